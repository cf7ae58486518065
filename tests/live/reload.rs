//! SIGHUP: what changes while the relay runs, what does not, and that no change of a policy costs order.

use serde_json::Value;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::brokers;
use crate::support::session::Session;
use crate::support::topics::{Admin, read_topic};
use crate::support::{LONG, unique, wait_until};

fn setup<'a>(database: &'a Database, sections: &'a str) -> Setup<'a> {
    Setup { database_url: database.url(), brokers: brokers(), sections, ..Setup::default() }
}

fn policy(name: &str) -> String {
    format!("[relay]\nbatch_rows_max = 50\n\n[sources.shift]\npolicy = \"{name}\"\n")
}

/// Waits until `/status` shows the answer to the last SIGHUP; returns it.
#[track_caller]
fn reloaded(daemon: &Daemon, before: &Value) -> Value {
    wait_until("the reload to be shown", LONG, || {
        daemon.json("/status")["config"]["last_reload_at"] != before["last_reload_at"]
    });
    daemon.json("/status")["config"].clone()
}

/// The policy hash in each connection's name.
fn hashes(session: &mut Session) -> Vec<String> {
    session.values(
        "select distinct split_part(application_name, '/', 3) from pg_stat_activity \
         where datname = current_database() and application_name like 'keiro-relay/%'",
    )
}

#[test]
fn reload_changes_policies_while_rows_stream_and_keeps_their_order() {
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(brokers()).create(&topic, 3, &[]);
    let mut session = Session::open(&database);
    let mut feed = Feed::new("shift", &topic, Order::Key);
    feed.insert(&database, 2_000, 40);
    let mut daemon = Daemon::start(&setup(&database, &policy("per_key_head_of_line")));
    daemon.wait_http_ok("/readyz", LONG);
    let first = daemon.json("/status");
    assert_eq!(first["config"]["generation"], 1);
    assert_eq!(first["config"]["last_reload_at"], Value::Null);
    let policies = ["per_source_stream", "per_key_head_of_line", "stop_the_line", "per_key_head_of_line"];
    for (round, name) in policies.into_iter().enumerate() {
        feed.insert_in(&mut session, 1_000, 40);
        wait_until("rows to be in flight", LONG, || session.rows("status = 'publishing'") > 0);
        let before = daemon.json("/status")["config"].clone();
        daemon.reload(&setup(&database, &policy(name)));
        let after = reloaded(&daemon, &before);
        assert_eq!(after["generation"], round + 2, "{after}");
        assert_eq!(after["last_reload_successful"], true);
        assert_eq!(after["needs_restart"], serde_json::json!([]));
        let moved = session.rows("status = 'sent'");
        wait_until("the source to be served under the new policy", LONG, || {
            let status = daemon.json("/status");
            let source =
                status["sources"].as_array().expect("sources").iter().find(|s| s["source"] == "shift").cloned();
            source.is_some_and(|source| source["policy"] == name)
        });
        wait_until("rows to move under it", LONG, || session.rows("status = 'sent'") > moved);
    }
    wait_until("everything to be sent", LONG * 2, || session.rows("status <> 'sent'") == 0);
    let status = daemon.json("/status");
    let hash = status["policy_hash"].as_str().expect("a hash").to_owned();
    assert_eq!(daemon.metric(&format!("keiro_relay_policy_info{{hash=\"{hash}\"}}")), Some(1.0));
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));

    // A policy nobody followed before: its hash reaches every connection.
    let before = status["config"].clone();
    daemon.reload(&setup(
        &database,
        "[sources.shift]\npolicy = \"per_source_stream\"\nmax_attempts = 3\n\n[relay]\nbatch_rows_max = 50\n",
    ));
    reloaded(&daemon, &before);
    let renamed = daemon.json("/status")["policy_hash"].as_str().expect("a hash").to_owned();
    assert_ne!(renamed, hash);
    wait_until("every connection to say which policies it follows", LONG, || hashes(&mut session) == [renamed.clone()]);

    // Under it the whole source keeps its order, whatever the keys.
    let topic = unique("topic");
    Admin::new(brokers()).create(&topic, 1, &[]);
    let mut stream = Feed::new("shift", &topic, Order::Source);
    stream.written = feed.written;
    stream.insert_in(&mut session, 1_000, 40);
    wait_until("the stream to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    judge(&read_topic(&topic), stream.expected()).assert_delivered(0);
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0), "{}", daemon.stderr());
}

#[test]
fn reload_of_a_bad_file_changes_nothing_and_says_every_problem() {
    let database = fresh_database(Table::Lean);
    let topic = unique("topic");
    Admin::new(brokers()).create(&topic, 1, &[]);
    let mut daemon = Daemon::start(&setup(&database, &policy("per_source_stream")));
    daemon.wait_http_ok("/readyz", LONG);
    let before = daemon.json("/status");
    let bad =
        "[sources.shift]\npolicy = \"per_nothing\"\nmax_attempts = 0\n\n[sources.other]\npolicy = \"best_effort\"\n";
    daemon.reload(&setup(&database, bad));
    let after = reloaded(&daemon, &before["config"]);
    assert_eq!(after["last_reload_successful"], false);
    for unchanged in ["hash", "generation", "in_force_since"] {
        assert_eq!(after[unchanged], before["config"][unchanged], "{unchanged}");
    }
    assert_eq!(daemon.json("/status")["policy_hash"], before["policy_hash"]);
    let log = daemon.stderr();
    for problem in ["sources.shift.policy", "sources.shift.max_attempts", "nothing changed"] {
        assert!(log.contains(problem), "{problem} in {log}");
    }
    assert_eq!(daemon.metric("keiro_relay_config_last_reload_successful"), Some(0.0));
    let succeeded = daemon.metric("keiro_relay_config_last_reload_success_timestamp_seconds").expect("a time");

    // It goes on as before, and the next file may be a good one.
    let mut feed = Feed::new("shift", &topic, Order::Source);
    feed.insert(&database, 300, 10);
    let mut session = Session::open(&database);
    wait_until("all rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
    daemon.reload(&setup(&database, &policy("per_source_stream")));
    let again = reloaded(&daemon, &after);
    assert_eq!(again["last_reload_successful"], true);
    assert_eq!(again["generation"], 1, "nothing is different");
    assert_eq!(daemon.metric("keiro_relay_config_last_reload_successful"), Some(1.0));
    let now = daemon.metric("keiro_relay_config_last_reload_success_timestamp_seconds").expect("a time");
    assert!(now > succeeded, "{now} {succeeded}");
}

#[test]
fn reload_names_what_needs_a_restart_hides_secrets_and_changes_the_log_level() {
    let database = fresh_database(Table::Lean);
    let start = "[sources.quiet]\npolicy = \"best_effort\"\n";
    let mut daemon = Daemon::start(&setup(&database, start));
    daemon.wait_http_ok("/readyz", LONG);
    let before = daemon.json("/status")["config"].clone();
    let sections = "[relay]\nbatch_rows_max = 77\nunlisted_sources = \"ignore\"\n\n[log]\nlevel = \"debug\"\n";
    let asked =
        Setup { kafka: "[kafka.properties]\n\"sasl.password\" = \"hunter2-secret\"\n", ..setup(&database, sections) };
    daemon.reload(&asked);
    let after = reloaded(&daemon, &before);
    assert_eq!(after["last_reload_successful"], true);
    assert_eq!(
        after["needs_restart"],
        serde_json::json!(["kafka.properties.\"sasl.password\"", "relay.batch_rows_max"])
    );
    let log = daemon.stderr();
    let line = |setting: &str| {
        let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.into_iter().find(|line| line["setting"] == setting).unwrap_or_else(|| panic!("{setting} in {log}"))
    };
    let restart = line("relay.batch_rows_max");
    assert_eq!((&restart["old"], &restart["new"]), (&"500".into(), &"77".into()), "{restart}");
    assert!(restart["message"].as_str().is_some_and(|text| text.contains("needs a restart")), "{restart}");
    let secret = line("kafka.properties.\"sasl.password\"");
    assert_eq!((&secret["old"], &secret["new"]), (&"not set".into(), &"\"***\"".into()), "{secret}");
    assert!(!log.contains("hunter2"), "{log}");
    assert_eq!(line("log.level")["new"], "\"debug\"");
    assert_eq!(line("relay.unlisted_sources")["message"], "changed");
    assert_eq!(line("sources.quiet.policy")["new"], "not set");
    // Nobody is served now.
    database.execute(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, \
         payload_bytes, occurred_at) values (gen_random_uuid(), 'q1', 'quiet', 'nowhere', 'Happened', 1, 'text/plain', '', now())",
    );
    let before = daemon.json("/status")["config"].clone();
    let topic = unique("topic");
    Admin::new(brokers()).create(&topic, 1, &[]);
    database.execute(&format!("update keiro.keiro_outbox set destination = '{topic}'"));
    assert_eq!(database.value("select status from keiro.keiro_outbox"), "pending");
    daemon.reload(&setup(&database, "[log]\nlevel = \"debug\"\n"));
    reloaded(&daemon, &before);
    wait_until("the source to be served again", LONG, || {
        database.value("select status from keiro.keiro_outbox") == "sent"
    });
    wait_until("its claim to be told", LONG, || daemon.stderr().contains("\"level\":\"DEBUG\""));
    // A source that is no longer ours is left to other relays: its lock is free.
    let locks = "select count(*)::text from pg_locks where locktype = 'advisory' \
                 and database = (select oid from pg_database where datname = current_database())";
    wait_until("the lock of the source", LONG, || database.value(locks) == "1");
    let before = daemon.json("/status")["config"].clone();
    daemon.reload(&setup(&database, "[relay]\nunlisted_sources = \"ignore\"\n"));
    reloaded(&daemon, &before);
    wait_until("the lock to be free", LONG, || database.value(locks) == "0");
    assert!(daemon.is_running() && daemon.stderr().contains("no longer served"), "{}", daemon.stderr());
}
