//! What differs between two configurations, what of it is live, what is shown of it; settings that a program puts together; a caller's
//! own rule for retries.

use std::time::Duration;

use keiro_relay::config::{Config, ConfigFile, Loaded, Overrides, Secret, UnlistedSources, When, default_rules};
use keiro_relay::domain::outcome::Rejection;
use keiro_relay::domain::plan::Verdict;
use keiro_relay::domain::policy::{OnHalt, Policy, SourceRules};
use keiro_relay::domain::retry::{self, FailedAttempt, Retry};

use crate::health::Scene;
use crate::record::bare;

fn config(text: &str) -> Config {
    let text = format!(
        "[database]\nurl = \"postgres://me:hunter2@localhost/app\"\n[kafka]\nbrokers = [\"localhost:9092\"]\n\
         [relay]\ninstance = \"r\"\n{text}"
    );
    Loaded::from(ConfigFile::Text { name: "test.toml", text: &text }, [], Overrides::new())
        .expect("a configuration")
        .config
}

fn changes(old: &Config, new: &Config) -> Vec<(String, String, String, bool)> {
    let changes = old.changes(new).into_iter();
    changes.map(|change| (change.setting, change.old, change.new, change.when == When::Now)).collect()
}

#[test]
fn reload_finds_each_difference_and_whether_it_is_live() {
    let old = config("");
    assert_eq!(changes(&old, &old.clone()), []);
    let mut new = old.clone();
    new.database.url = Secret::new("postgres://me:other@localhost/app");
    new.kafka.properties.insert("sasl.password".to_owned(), Secret::new("one"));
    new.relay.publish_timeout = Duration::from_secs(31);
    new.relay.unlisted_sources = UnlistedSources::Ignore;
    new.defaults.max_attempts = 3;
    new.log.level = "debug".to_owned();
    let of = |setting: &str, old: &str, new: &str, live| (setting.to_owned(), old.to_owned(), new.to_owned(), live);
    assert_eq!(
        changes(&old, &new),
        [
            of("database.url", "\"***\"", "\"***\"", false),
            of("defaults.max_attempts", "10", "3", true),
            of("kafka.properties.\"sasl.password\"", "not set", "\"***\"", false),
            of("log.level", "\"info\"", "\"debug\"", true),
            of("relay.publish_timeout", "\"30s\"", "\"31s\"", false),
            of("relay.unlisted_sources", "\"default\"", "\"ignore\"", true),
        ]
    );
    // A source with odd characters, and a policy that lets `on_halt` mean something.
    let mut new = old.clone();
    new.sources.insert(
        "Orders.EU".to_owned(),
        SourceRules { policy: Policy::StopTheLine, on_halt: OnHalt::Hold, ..default_rules() },
    );
    let found = changes(&old, &new);
    assert!(found.contains(&of("sources.\"Orders.EU\".on_halt", "not set", "\"hold\"", true)), "{found:?}");
    assert!(found.iter().all(|(_, _, _, live)| *live), "{found:?}");
}

#[test]
fn reload_takes_over_what_is_live_and_nothing_else() {
    let old = config("");
    let mut new = old.clone();
    new.database.url = Secret::new("postgres://elsewhere/app");
    new.relay.batch_rows_max = 7;
    new.relay.unlisted_sources = UnlistedSources::Ignore;
    new.sources.insert("a".to_owned(), SourceRules { policy: Policy::BestEffort, ..default_rules() });
    new.log.level = "warn".to_owned();
    let now = old.with_live_parts_of(&new);
    // What is left over is exactly what needs a restart.
    let left: Vec<String> = now.changes(&new).into_iter().map(|change| change.setting).collect();
    assert_eq!(left, ["database.url", "relay.batch_rows_max"]);
    assert!(old.changes(&now).iter().all(|change| change.when == When::Now));
    assert_eq!(now.policy_hash(), new.policy_hash());
}

#[test]
fn reload_hash_moves_with_every_setting_but_secrets_and_the_name() {
    let old = config("");
    let with = |change: fn(&mut Config)| {
        let mut new = old.clone();
        change(&mut new);
        new.hash()
    };
    assert_eq!(with(|_| ()), old.hash());
    assert_eq!(with(|config| config.relay.instance = "other".to_owned()), old.hash());
    assert_eq!(with(|config| config.database.url = Secret::new("postgres://me:x@localhost/app")), old.hash());
    assert_ne!(with(|config| config.relay.batch_rows_max = 7), old.hash());
    assert_ne!(with(|config| config.log.level = "debug".to_owned()), old.hash());
}

#[test]
fn program_settings_are_checked_by_the_ranges_of_the_file() {
    let given = |change: fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        config.check().map_err(|problems| problems.to_string())
    };
    assert_eq!(given(|_| ()), Ok(()));
    assert_eq!(
        given(|config| {
            config.sources.insert(
                "Orders \"EU\".1".to_owned(),
                SourceRules { policy: Policy::StopTheLine, on_halt: OnHalt::Hold, ..default_rules() },
            );
            config.database.password = Some(Secret::new("hunter2"));
            config.maintenance.retention = Some(Duration::from_secs(86_400));
            config.relay.poll_interval_min = Duration::from_micros(1_500);
        }),
        Ok(())
    );
    let problems = given(|config| {
        config.relay.publish_timeout = Duration::from_secs(200);
        config.database.schema = "not a name".to_owned();
        config.defaults.backoff.multiplier = 0.5;
    })
    .expect_err("three problems");
    for setting in ["relay.publishing_timeout", "database.schema", "defaults.backoff.multiplier"] {
        assert!(problems.contains(setting), "{setting} in {problems}");
    }
}

#[test]
fn status_shows_the_configuration_in_force_and_the_last_reload() {
    let scene = Scene::working();
    scene.board.configured("h1".to_owned());
    let shown = |scene: &Scene| serde_json::to_value(scene.board.snapshot().status()).expect("JSON");
    let first = serde_json::json!({
        "hash": "h1", "generation": 1, "in_force_since": "2026-01-02T03:04:05.000Z", "last_reload_at": null,
        "last_reload_successful": null, "needs_restart": [],
    });
    assert_eq!(shown(&scene)["config"], first);
    scene.pass(10);
    scene.board.reload_failed();
    let status = shown(&scene);
    assert_eq!(status["config"]["last_reload_successful"], false);
    assert_eq!(status["config"]["in_force_since"], first["in_force_since"]);
    assert_eq!(crate::telemetry::value(scene.board.metrics(), "keiro_relay_config_last_reload_successful"), 0.0);
    scene.pass(10);
    scene.board.reconfigured("h2".to_owned(), "p2".to_owned(), vec!["http.listen".to_owned()]);
    let status = shown(&scene);
    assert_eq!(
        status["config"],
        serde_json::json!({
            "hash": "h2", "generation": 2, "in_force_since": "2026-01-02T03:04:25.000Z",
            "last_reload_at": "2026-01-02T03:04:25.000Z", "last_reload_successful": true, "needs_restart": ["http.listen"],
        })
    );
    assert_eq!(status["policy_hash"], "p2");
    assert_eq!(crate::telemetry::value(scene.board.metrics(), "keiro_relay_config_last_reload_successful"), 1.0);
    assert_eq!(crate::telemetry::value(scene.board.metrics(), r#"keiro_relay_policy_info{hash="p2"}"#), 1.0);
}

#[test]
fn retry_policy_is_asked_about_spent_attempts_only() {
    let messages: Vec<_> = (0..7).map(|_| bare()).collect();
    let error = || "kafka.odd: text".to_owned();
    let before = [
        Verdict::Sent,
        Verdict::Failed { error: error(), delay: Duration::from_secs(1) },
        Verdict::Dead { error: error() },
        Verdict::Held { error: error() },
        Verdict::Rejected(Rejection::new("kafka.odd", "text")),
        Verdict::Skipped { error: error() },
        Verdict::Returned { error: error(), pause: Duration::ZERO },
    ];
    let mut verdicts = before.clone();
    let turned = |failed: &FailedAttempt<'_>| {
        assert_eq!(failed.error, "kafka.odd: text");
        match failed.rules {
            Retry::Dead => Retry::After(Duration::from_secs(9)),
            _ => Retry::Dead,
        }
    };
    retry::apply(&turned, &messages, &mut verdicts);
    assert_eq!(verdicts[1], Verdict::Dead { error: error() });
    assert_eq!(verdicts[2], Verdict::Failed { error: error(), delay: Duration::from_secs(9) });
    for untouched in [0, 3, 4, 5, 6] {
        assert_eq!(verdicts[untouched], before[untouched]);
    }
}
