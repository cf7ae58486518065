//! The configuration: every problem's exact text, precedence, types that are not coerced, secrets that are never printed, names
//! that are matched exactly, and the example file.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use keiro_relay::cli;
use keiro_relay::config::{
    Config, ConfigFile, Database, Kafka, LEASE_MARGIN, Loaded, LogFormat, Overrides, Problems, Relay, TlsMode,
    UnlistedSources, default_rules,
};
use keiro_relay::domain::backoff::BackoffKind;
use keiro_relay::domain::policy::{OnHalt, Policy};

/// What every configuration needs, from the environment, so that line numbers are those of the text under test.
const NEEDED: [(&str, &str); 2] = [
    ("KEIRO_RELAY__DATABASE__URL", "postgres://relay@db.example/app"),
    ("KEIRO_RELAY__KAFKA__BROKERS", "kafka-1:9092,kafka-2:9092"),
];

fn pairs(variables: &[(&str, &str)]) -> Vec<(String, String)> {
    variables.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

/// Loads a text as the file t.toml, with [`NEEDED`] unless the variables say otherwise.
fn load_all(text: &str, variables: &[(&str, &str)], flags: Overrides) -> Result<Loaded, Problems> {
    let mut environment: BTreeMap<String, String> = pairs(&NEEDED).into_iter().collect();
    environment.extend(pairs(variables));
    Loaded::from(ConfigFile::Text { name: "t.toml", text }, environment, flags)
}

fn load(text: &str) -> Result<Loaded, Problems> {
    load_all(text, &[], Overrides::new())
}

#[track_caller]
fn config(text: &str) -> Config {
    load(text).unwrap_or_else(|problems| panic!("{problems}")).config
}

#[track_caller]
fn config_with(text: &str, variables: &[(&str, &str)]) -> Config {
    load_all(text, variables, Overrides::new()).unwrap_or_else(|problems| panic!("{problems}")).config
}

/// Every problem of a text as it is printed.
#[track_caller]
fn problems(text: &str) -> Vec<String> {
    listed(load(text).expect_err("the text should be refused"))
}

#[track_caller]
fn problems_with(text: &str, variables: &[(&str, &str)]) -> Vec<String> {
    listed(load_all(text, variables, Overrides::new()).expect_err("it should be refused"))
}

fn listed(problems: Problems) -> Vec<String> {
    problems.list().iter().map(ToString::to_string).collect()
}

fn warnings(text: &str, variables: &[(&str, &str)]) -> Vec<String> {
    let loaded = load_all(text, variables, Overrides::new()).unwrap_or_else(|problems| panic!("{problems}"));
    loaded.warnings.iter().map(ToString::to_string).collect()
}

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Each text has exactly this problem. The text is one section and one line unless it says otherwise.
#[track_caller]
fn each_refused(cases: &[(&str, &str)]) {
    let mut wrong = Vec::new();
    for (text, expected) in cases {
        match load(text) {
            Ok(_) => wrong.push(format!("{text}\n  was accepted")),
            Err(found) => {
                let found = listed(found);
                if found != [*expected] {
                    wrong.push(format!("{text}\n  expected {expected}\n  found    {}", found.join("\n           ")));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

// ---- defaults and precedence ----

#[test]
fn the_defaults_are_those_of_the_design() {
    let config = config("");
    assert_eq!(config.database.url.expose(), "postgres://relay@db.example/app");
    assert_eq!((config.database.schema.as_str(), config.database.table.as_str()), ("keiro", "keiro_outbox"));
    assert_eq!(config.database.pool_size, 8);
    assert_eq!((config.database.connect_timeout, config.database.statement_timeout), (seconds(5), seconds(30)));
    assert!(config.database.prepared_statements);
    assert!(!config.database.synchronous_commit);
    assert_eq!(config.database.tls.mode, TlsMode::Prefer);
    assert_eq!(config.kafka.brokers, ["kafka-1:9092", "kafka-2:9092"]);
    assert_eq!(config.kafka.message_bytes_max, 16 * 1024 * 1024);
    assert_eq!(config.kafka.topic_fault_dead_after, None);
    assert_eq!((config.relay.batch_rows_max, config.relay.batch_bytes_max), (500, 8 * 1024 * 1024));
    assert_eq!((config.relay.in_flight_rows_max, config.relay.in_flight_bytes_max), (10_000, 64 * 1024 * 1024));
    assert_eq!(config.relay.poll_interval_min, Duration::from_millis(2));
    assert_eq!(config.relay.poll_interval_max, Duration::from_millis(250));
    assert_eq!((config.relay.publish_timeout, config.relay.settle_timeout), (seconds(30), seconds(10)));
    assert_eq!((config.relay.publishing_timeout, config.relay.shutdown_grace), (seconds(300), seconds(20)));
    assert_eq!(config.relay.unlisted_sources, UnlistedSources::Default);
    assert_eq!(config.defaults.policy, Policy::PerKeyHeadOfLine);
    assert_eq!(config.defaults.max_attempts, 10);
    assert_eq!(config.defaults.backoff.kind, BackoffKind::Exponential);
    assert_eq!((config.defaults.backoff.initial, config.defaults.backoff.max), (seconds(1), seconds(60)));
    assert_eq!((config.defaults.backoff.multiplier, config.defaults.backoff.jitter), (2.0, 0.2));
    assert!(config.sources.is_empty());
    assert_eq!((config.maintenance.interval, config.maintenance.retention), (seconds(30), None));
    assert_eq!(config.http.listen.to_string(), "127.0.0.1:9464");
    assert_eq!((config.log.format, config.log.level.as_str()), (LogFormat::Json, "info"));
    assert_eq!(LEASE_MARGIN, seconds(5));
}

#[test]
fn a_flag_wins_over_a_variable_over_the_file_over_the_default() {
    let file = "[http]\nlisten = \"127.0.0.1:2\"\n";
    let variable = [("KEIRO_RELAY__HTTP__LISTEN", "127.0.0.1:3")];
    let flag = Overrides::new().set("--listen", "http.listen", "127.0.0.1:4");
    let port = |text: &str, variables: &[(&str, &str)], flags: Overrides| {
        let loaded = load_all(text, variables, flags).expect("it is right");
        (loaded.config.http.listen.port(), loaded.origin(&["http", "listen"]).to_string())
    };
    assert_eq!(port("", &[], Overrides::new()), (9464, "default".to_owned()));
    assert_eq!(port(file, &[], Overrides::new()), (2, "t.toml:2".to_owned()));
    assert_eq!(port(file, &variable, Overrides::new()), (3, "env KEIRO_RELAY__HTTP__LISTEN".to_owned()));
    assert_eq!(port(file, &variable, flag.clone()), (4, "flag --listen".to_owned()));
    assert_eq!(port("", &[], flag), (4, "flag --listen".to_owned()));
}

#[test]
fn a_wrong_value_that_is_overridden_is_not_in_force_and_no_problem() {
    let config = config_with("[relay]\nbatch_rows_max = 0\n", &[("KEIRO_RELAY__RELAY__BATCH_ROWS_MAX", "7")]);
    assert_eq!(config.relay.batch_rows_max, 7);
}

#[test]
fn the_higher_layer_wins_between_a_secret_and_its_file_too() {
    // A flag must not lose to the file's url_file.
    let loaded = load_all(
        "[database]\nurl_file = \"/nowhere/url\"\npassword_file = \"/nowhere/password\"\n",
        &[],
        Overrides::new().set("--database-url", "database.url", "postgres://u:flagpw@other/app"),
    );
    let database = loaded.expect("it is right").config.database;
    assert_eq!((database.url_file, database.password_file), (None, None));
    assert_eq!(database.url.expose(), "postgres://u:flagpw@other/app");
    // A variable with a url_file wins over the file's url.
    let text = "[database]\nurl = \"postgres://file/app\"\n";
    let without = |variables: &[(&str, &str)]| {
        let environment = pairs(&[&NEEDED[1..], variables].concat());
        Loaded::from(ConfigFile::Text { name: "t.toml", text }, environment, Overrides::new())
            .expect("it is right")
            .config
            .database
    };
    let database = without(&[("KEIRO_RELAY__DATABASE__URL_FILE", "/nowhere/url")]);
    assert_eq!(database.url_file.as_deref(), Some(Path::new("/nowhere/url")));
    assert_eq!(database.url.expose(), "");
    // A property's file wins over its value from a lower layer, and the other way round.
    let files = config_with(
        "[kafka.properties]\nsasl.password = \"x\"\n",
        &[("KEIRO_RELAY__KAFKA__PROPERTY_FILES__SASL_PASSWORD", "/nowhere/kafka")],
    );
    assert!(files.kafka.properties.is_empty());
    assert_eq!(files.kafka.property_files["sasl.password"], Path::new("/nowhere/kafka"));
    let values = config_with(
        "[kafka.property_files]\nsasl.password = \"/nowhere/kafka\"\n",
        &[("KEIRO_RELAY__KAFKA__PROPERTIES__SASL_PASSWORD", "x")],
    );
    assert!(values.kafka.property_files.is_empty());
    assert_eq!(values.kafka.properties["sasl.password"].expose(), "x");
}

// ---- files ----

#[test]
fn a_missing_file_is_a_problem_only_when_it_was_named() {
    let missing = Path::new("/nonexistent/keiro-relay.toml");
    let found = listed(Config::load(Some(missing), pairs(&NEEDED), Overrides::new()).expect_err("it is not there"));
    assert_eq!(
        found,
        [
            "/nonexistent/keiro-relay.toml: the configuration file cannot be read: No such file or directory (os error 2); name \
          an existing file with --config"
        ]
    );
    let none = ConfigFile::FirstOf(&["/nonexistent/a.toml", "/nonexistent/b.toml"]);
    let loaded = Loaded::from(none, pairs(&NEEDED), Overrides::new()).expect("no file is needed");
    assert_eq!(loaded.file, None);
}

#[test]
fn the_first_default_file_that_exists_is_read_and_one_that_cannot_be_read_is_not_passed_over() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name).display().to_string();
    fs::write(path("second.toml"), "[http]\nlisten = \"127.0.0.1:2\"\n").expect("written");
    fs::write(path("third.toml"), "[http]\nlisten = \"127.0.0.1:3\"\n").expect("written");
    let (first, second, third) = (path("first.toml"), path("second.toml"), path("third.toml"));
    let candidates = [first.as_str(), second.as_str(), third.as_str()];
    let loaded = Loaded::from(ConfigFile::FirstOf(&candidates), pairs(&NEEDED), Overrides::new()).expect("it is right");
    assert_eq!(loaded.config.http.listen.port(), 2);
    assert_eq!(loaded.file.as_deref(), Some(Path::new(&second)));
    fs::create_dir(&first).expect("a directory in its place");
    let found = listed(
        Loaded::from(ConfigFile::FirstOf(&candidates), pairs(&NEEDED), Overrides::new()).expect_err("unreadable"),
    );
    assert_eq!(found, [format!("{first}: the configuration file cannot be read: Is a directory (os error 21)")]);
}

#[test]
fn a_file_that_is_no_toml_says_line_and_column_and_nothing_of_what_it_holds() {
    let found = problems("[database]\nurl = \"postgres://u:hunter2@db/app\npool_size = 3\n");
    assert_eq!(found[0], "t.toml:2: not valid TOML at column 35: invalid basic string, expected `\"`");
    assert!(!found.join("\n").contains("hunter2"));
    assert_eq!(problems("[http]\n[http]\n"), ["t.toml:2: not valid TOML at column 2: duplicate key"]);
    // Several broken lines come back at once.
    assert_eq!(problems("a = \nb = \n").len(), 2);
    // What is wrong in the environment is said at the same time.
    let found = problems_with("a =\n", &[("KEIRO_RELAY__LOG__LEVL", "info")]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert_eq!(found[1], "env KEIRO_RELAY__LOG__LEVL: unknown key; did you mean KEIRO_RELAY__LOG__LEVEL?");
}

#[test]
fn a_byte_order_mark_and_windows_lines_are_read() {
    let config = config("\u{feff}[http]\r\nlisten = \"127.0.0.1:2\"\r\n");
    assert_eq!(config.http.listen.port(), 2);
}

// ---- every problem's text ----

#[test]
fn problems_are_listed_together_in_the_order_of_the_file_with_a_count() {
    let text = "[relay]\nbatch_rows_max = 0\n[log]\nlevl = \"info\"\n[maintenance]\nretention = 0\n";
    let found = load_all(text, &[("KEIRO_RELAY__HTTP__LISTEN", "x")], Overrides::new()).expect_err("it is wrong");
    assert_eq!(
        found.to_string(),
        "the configuration has 4 problems:\n  \
         relay.batch_rows_max = 0 (t.toml:2): must be a whole number from 1 to 10000\n  \
         log.levl (t.toml:4): unknown key; did you mean level?\n  \
         maintenance.retention = 0 (t.toml:6): must be \"off\" or a duration from \"5s\" to \"100years\"; spell it \"off\" to \
         switch it off\n  \
         http.listen = \"x\" (env KEIRO_RELAY__HTTP__LISTEN): must be an IP address and a port, such as \"127.0.0.1:9464\", \
         \"0.0.0.0:9464\" or \"[::]:9464\""
    );
    let one = load("[relay]\nbatch_rows_max = 0\n").expect_err("it is wrong").to_string();
    assert!(one.starts_with("the configuration has a problem:\n  relay.batch_rows_max"), "{one}");
}

#[test]
fn what_is_missing_is_named_with_every_way_to_set_it() {
    let found = listed(Loaded::from(ConfigFile::Absent, Vec::new(), Overrides::new()).expect_err("nothing is set"));
    assert_eq!(
        found,
        [
            "database.url: is missing: set it in the file, or KEIRO_RELAY__DATABASE__URL, or database.url_file; the form is \
             postgres://USER@HOST:5432/DATABASE",
            "kafka.brokers: is missing: set it in the file, such as [\"kafka-1:9092\", \"kafka-2:9092\"], or \
             KEIRO_RELAY__KAFKA__BROKERS, separated by commas",
        ]
    );
}

#[test]
fn unknown_names_come_with_the_nearest() {
    each_refused(&[
        ("[kafak]\nbrokers = []", "kafak (t.toml:1): unknown section; did you mean kafka?"),
        ("[source.billing]\npolicy = \"x\"", "source (t.toml:1): unknown section; did you mean sources?"),
        (
            "[zzz]",
            "zzz (t.toml:1): unknown section; known here: database, kafka, relay, defaults, sources, limits, maintenance, http, log",
        ),
        ("[database]\npasword = \"geheim\"", "database.pasword (t.toml:2): unknown key; did you mean password?"),
        ("[database.tsl]\nmode = \"x\"", "database.tsl (t.toml:1): unknown key; did you mean tls?"),
        ("[relay]\nbatch_rows = 1", "relay.batch_rows (t.toml:2): unknown key; did you mean batch_rows_max?"),
        (
            "[relay]\nretention = \"7d\"",
            "relay.retention (t.toml:2): unknown key here; did you mean maintenance.retention?",
        ),
        ("[http]\nxyz = 1", "http.xyz (t.toml:2): unknown key; known here: listen"),
        ("level = \"info\"", "level (t.toml:1): unknown section here; did you mean log.level?"),
        ("[defaults]\nmax_attempt = 1", "defaults.max_attempt (t.toml:2): unknown key; did you mean max_attempts?"),
        ("[defaults.backof]\nkind = \"x\"", "defaults.backof (t.toml:1): unknown key; did you mean backoff?"),
        (
            "[sources.\"Orders.EU\"]\npolices = \"x\"",
            "sources.\"Orders.EU\".polices (t.toml:2): unknown key; did you mean policy?",
        ),
        (
            "[kafka]\nlinger.ms = 5",
            "kafka.linger (t.toml:2): unknown key; librdkafka's own settings stand in [kafka.properties]",
        ),
        // A quoted name with a dot is one name, not a path.
        (
            "\"http.listen\" = \"127.0.0.1:2\"",
            "\"http.listen\" (t.toml:1): unknown section; known here: database, kafka, relay, defaults, sources, limits, \
             maintenance, http, log",
        ),
    ]);
}

#[test]
fn sections_and_values_do_not_stand_for_each_other() {
    each_refused(&[
        ("http = 9464", "http (t.toml:1): is a section: write [http] and its keys below it"),
        (
            "[sources]\nbilling = \"stop_the_line\"",
            "sources.billing (t.toml:2): is a section: write [sources.billing] and its keys below it",
        ),
        ("[database]\ntls = true", "database.tls (t.toml:2): is a section: write [database.tls] and its keys below it"),
        (
            "[kafka]\nproperties = \"x\"",
            "kafka.properties (t.toml:2): is a section: write [kafka.properties] and its keys below it",
        ),
        ("[http.listen]\nport = 1", "http.listen (t.toml:1): is one value, not a section"),
        ("[[sources]]\nname = \"x\"", "sources (t.toml:1): is a section: write [sources] and its keys below it"),
    ]);
    // A section stays what it is when a variable sets one of its keys.
    let found = problems_with("http = 9464", &[("KEIRO_RELAY__HTTP__LISTEN", "127.0.0.1:1")]);
    assert_eq!(found, ["http (t.toml:1): is a section: write [http] and its keys below it"]);
}

#[test]
fn numbers_are_never_coerced() {
    let rows = "must be a whole number from 1 to 10000";
    let attempts = "must be a whole number from 1 to 1000";
    for (given, shown, hint) in [
        ("true", "true", ""),
        ("1.9", "1.9", ""),
        ("7.0", "7.0", ""),
        ("\"7\"", "\"7\"", "; write it without quotes"),
        ("\"seven\"", "\"seven\"", ""),
        ("-1", "-1", ""),
        ("10001", "10001", ""),
        ("[1]", "[1]", ""),
        ("9223372036854775807", "9223372036854775807", ""),
        ("inf", "inf", ""),
        ("nan", "NaN", ""),
    ] {
        each_refused(&[(
            &format!("[relay]\nbatch_rows_max = {given}"),
            &format!("relay.batch_rows_max = {shown} (t.toml:2): {rows}{hint}"),
        )]);
    }
    each_refused(&[
        (
            "[relay]\nbatch_rows_max = 9223372036854775808",
            "relay.batch_rows_max (t.toml:2): is a number too large for any setting",
        ),
        (
            "[relay]\nbatch_rows_max = 2024-01-01",
            "relay.batch_rows_max = 2024-01-01 (t.toml:2): is a date, and no setting is: quote a string",
        ),
        (
            "[relay]\ninstance = 2024-01-01",
            "relay.instance = 2024-01-01 (t.toml:2): is a date, and no setting is: quote a string",
        ),
        ("[relay]\ninstance = 7", "relay.instance = 7 (t.toml:2): must be a string in quotes"),
        ("[database]\npool_size = 1", "database.pool_size = 1 (t.toml:2): must be a whole number from 2 to 256"),
        ("[database]\npool_size = 257", "database.pool_size = 257 (t.toml:2): must be a whole number from 2 to 256"),
        ("[defaults]\nmax_attempts = 0", &format!("defaults.max_attempts = 0 (t.toml:2): {attempts}")),
        ("[defaults]\nmax_attempts = 1001", &format!("defaults.max_attempts = 1001 (t.toml:2): {attempts}")),
        ("[sources.a]\nmax_attempts = 0", &format!("sources.a.max_attempts = 0 (t.toml:2): {attempts}")),
        (
            "[relay]\nin_flight_rows_max = 1000001",
            "relay.in_flight_rows_max = 1000001 (t.toml:2): must be a whole number from 1 to 1000000",
        ),
        (
            "[defaults.backoff]\nmultiplier = 0.9",
            "defaults.backoff.multiplier = 0.9 (t.toml:2): must be a number from 1.0 to 1000.0",
        ),
        (
            "[defaults.backoff]\nmultiplier = \"2\"",
            "defaults.backoff.multiplier = \"2\" (t.toml:2): must be a number from 1.0 to 1000.0",
        ),
        (
            "[defaults.backoff]\nmultiplier = inf",
            "defaults.backoff.multiplier = inf (t.toml:2): must be a number from 1.0 to 1000.0",
        ),
        (
            "[defaults.backoff]\nmultiplier = true",
            "defaults.backoff.multiplier = true (t.toml:2): must be a number from 1.0 to 1000.0",
        ),
        (
            "[defaults.backoff]\njitter = 1.1",
            "defaults.backoff.jitter = 1.1 (t.toml:2): must be a number from 0.0 to 1.0",
        ),
        (
            "[defaults.backoff]\njitter = -0.1",
            "defaults.backoff.jitter = -0.1 (t.toml:2): must be a number from 0.0 to 1.0",
        ),
        (
            "[defaults.backoff]\njitter = nan",
            "defaults.backoff.jitter = NaN (t.toml:2): must be a number from 0.0 to 1.0",
        ),
    ]);
    // A whole number is a number with a fraction; TOML's other spellings are numbers.
    assert_eq!(config("[defaults.backoff]\nmultiplier = 3").defaults.backoff.multiplier, 3.0);
    assert_eq!(config("[relay]\nbatch_rows_max = 1_000").relay.batch_rows_max, 1_000);
    assert_eq!(config("[relay]\nbatch_rows_max = 0x10").relay.batch_rows_max, 16);
}

#[test]
fn text_of_a_variable_is_parsed_as_the_key_s_type_and_nothing_else() {
    let set = |key: &str, text: &str| {
        let name = format!("KEIRO_RELAY__{key}");
        load_all("", &[(&name, text)], Overrides::new()).map(|loaded| loaded.config).map_err(listed)
    };
    assert_eq!(set("RELAY__BATCH_ROWS_MAX", "7").expect("a number").relay.batch_rows_max, 7);
    for text in ["7.0", "true", " 7", "+7", "0x7", "1_000", "7\n", "99999999999999999999"] {
        let found = set("RELAY__BATCH_ROWS_MAX", text).expect_err(text);
        let shown = text.replace('\n', "\\n");
        assert_eq!(
            found,
            [format!(
                "relay.batch_rows_max = \"{shown}\" (env KEIRO_RELAY__RELAY__BATCH_ROWS_MAX): must be a whole number from 1 to \
                 10000"
            )]
        );
    }
    assert!(!set("DATABASE__PREPARED_STATEMENTS", "false").expect("a truth value").database.prepared_statements);
    for text in ["0", "no", "off", "False"] {
        assert_eq!(
            set("DATABASE__PREPARED_STATEMENTS", text).expect_err(text),
            [format!(
                "database.prepared_statements = \"{text}\" (env KEIRO_RELAY__DATABASE__PREPARED_STATEMENTS): must be true or false"
            )]
        );
    }
    assert_eq!(set("RELAY__PUBLISH_TIMEOUT", "12s").expect("a duration").relay.publish_timeout, seconds(12));
    assert_eq!(
        set("RELAY__PUBLISH_TIMEOUT", "12").expect_err("no unit"),
        [
            "relay.publish_timeout = \"12\" (env KEIRO_RELAY__RELAY__PUBLISH_TIMEOUT): must be a duration from \"100ms\" to \"8h\"; \
          write it with a unit, such as \"2s\""
        ]
    );
    assert_eq!(
        set("MAINTENANCE__RETENTION", "7d").expect("a duration").maintenance.retention,
        Some(seconds(7 * 86_400))
    );
    assert_eq!(set("MAINTENANCE__RETENTION", "off").expect("off").maintenance.retention, None);
    assert_eq!(set("DEFAULTS__BACKOFF__MULTIPLIER", "1.5").expect("a number").defaults.backoff.multiplier, 1.5);
    for text in ["inf", "nan", "+2", "-1"] {
        assert!(set("DEFAULTS__BACKOFF__MULTIPLIER", text).is_err(), "{text}");
    }
    assert_eq!(set("KAFKA__BROKERS", " a:1 , [::1]:2").expect("a list").kafka.brokers, ["a:1", "[::1]:2"]);
    assert_eq!(
        set("KAFKA__BROKERS", "a:1,").expect_err("an empty entry"),
        ["kafka.brokers[1] = \"\" (env KEIRO_RELAY__KAFKA__BROKERS): must be host:port, such as \"kafka-1:9092\" or \
          \"[::1]:9092\"; the port is missing"]
    );
}

#[test]
fn durations_sizes_words_and_truth_values_say_what_is_allowed() {
    let off = "must be \"off\" or a duration from \"5s\" to \"100years\"";
    let spelled = "; spell it \"off\" to switch it off";
    each_refused(&[
        (
            "[relay]\npublish_timeout = 30",
            "relay.publish_timeout = 30 (t.toml:2): must be a duration from \"100ms\" to \"8h\"; write it with a unit, such as \"2s\"",
        ),
        (
            "[relay]\npublish_timeout = \"30\"",
            "relay.publish_timeout = \"30\" (t.toml:2): must be a duration from \"100ms\" to \"8h\"; write it with a unit, such as \"2s\"",
        ),
        (
            "[relay]\npublish_timeout = \"99ms\"",
            "relay.publish_timeout = \"99ms\" (t.toml:2): must be a duration from \"100ms\" to \"8h\"",
        ),
        (
            "[relay]\npublish_timeout = \"off\"",
            "relay.publish_timeout = \"off\" (t.toml:2): must be a duration from \"100ms\" to \"8h\"",
        ),
        (
            "[relay]\npublish_timeout = \"-2s\"",
            "relay.publish_timeout = \"-2s\" (t.toml:2): must be a duration from \"100ms\" to \"8h\"",
        ),
        (
            "[relay]\npublish_timeout = \"18446744073709551615s1000ms\"",
            "relay.publish_timeout = \"18446744073709551615s1000ms\" (t.toml:2): must be a duration from \"100ms\" to \"8h\"",
        ),
        (
            "[relay]\nsettle_timeout = \"1ms\"",
            "relay.settle_timeout = \"1ms\" (t.toml:2): must be a duration from \"100ms\" to \"1h\"",
        ),
        (
            "[relay]\npublishing_timeout = \"4s\"",
            "relay.publishing_timeout = \"4s\" (t.toml:2): must be a duration from \"5s\" to \"1day\"",
        ),
        (
            "[relay]\npublishing_timeout = \"25h\"",
            "relay.publishing_timeout = \"25h\" (t.toml:2): must be a duration from \"5s\" to \"1day\"",
        ),
        (
            "[relay]\nshutdown_grace = \"2h\"",
            "relay.shutdown_grace = \"2h\" (t.toml:2): must be a duration from \"1s\" to \"1h\"",
        ),
        (
            "[relay]\npoll_interval_min = \"0s\"",
            "relay.poll_interval_min = \"0s\" (t.toml:2): must be a duration from \"1ms\" to \"1m\"",
        ),
        (
            "[database]\nconnect_timeout = \"2m\"",
            "database.connect_timeout = \"2m\" (t.toml:2): must be a duration from \"100ms\" to \"1m\"",
        ),
        (
            "[database]\nstatement_timeout = 0",
            "database.statement_timeout = 0 (t.toml:2): must be a duration from \"1s\" to \"1h\"; write it with a unit, such as \"2s\"",
        ),
        (
            "[maintenance]\ninterval = \"10ms\"",
            "maintenance.interval = \"10ms\" (t.toml:2): must be a duration from \"1s\" to \"1h\"",
        ),
        ("[maintenance]\nretention = 0", &format!("maintenance.retention = 0 (t.toml:2): {off}{spelled}")),
        ("[maintenance]\nretention = \"0s\"", &format!("maintenance.retention = \"0s\" (t.toml:2): {off}{spelled}")),
        ("[maintenance]\nretention = \"0\"", &format!("maintenance.retention = \"0\" (t.toml:2): {off}{spelled}")),
        ("[maintenance]\nretention = false", &format!("maintenance.retention = false (t.toml:2): {off}{spelled}")),
        ("[maintenance]\nretention = \"OFF\"", &format!("maintenance.retention = \"OFF\" (t.toml:2): {off}{spelled}")),
        (
            "[maintenance]\nretention = 7",
            &format!("maintenance.retention = 7 (t.toml:2): {off}; write it with a unit, such as \"7d\""),
        ),
        ("[maintenance]\nretention = \"never\"", &format!("maintenance.retention = \"never\" (t.toml:2): {off}")),
        (
            "[kafka]\ntopic_fault_dead_after = 0",
            "kafka.topic_fault_dead_after = 0 (t.toml:2): must be \"off\" or a duration from \"10s\" to \"30days\"; spell it \"off\" to switch it off",
        ),
        (
            "[relay]\nbatch_bytes_max = 8388608",
            "relay.batch_bytes_max = 8388608 (t.toml:2): must be a size from \"1KiB\" to \"64GiB\"; write it with a unit, such as \"8388608B\" or \"8MiB\"",
        ),
        (
            "[relay]\nbatch_bytes_max = \"8388608\"",
            "relay.batch_bytes_max = \"8388608\" (t.toml:2): must be a size from \"1KiB\" to \"64GiB\"; write it with a unit, such as \"8MiB\"",
        ),
        (
            "[relay]\nbatch_bytes_max = \"8 lots\"",
            "relay.batch_bytes_max = \"8 lots\" (t.toml:2): must be a size from \"1KiB\" to \"64GiB\"",
        ),
        (
            "[relay]\nbatch_bytes_max = \"0B\"",
            "relay.batch_bytes_max = \"0B\" (t.toml:2): must be a size from \"1KiB\" to \"64GiB\"",
        ),
        (
            "[relay]\nbatch_bytes_max = \"-1MiB\"",
            "relay.batch_bytes_max = \"-1MiB\" (t.toml:2): must be a size from \"1KiB\" to \"64GiB\"",
        ),
        (
            "[kafka]\nmessage_bytes_max = \"2GB\"",
            "kafka.message_bytes_max = \"2GB\" (t.toml:2): must be a size from \"1kB\" to \"1GB\"",
        ),
        (
            "[limits]\npayload_bytes_max = \"0B\"",
            "limits.payload_bytes_max = \"0B\" (t.toml:2): must be a size from \"1B\" to \"100MB\"",
        ),
        (
            "[limits]\nattributes_bytes_max = \"1MiB\"",
            "limits.attributes_bytes_max = \"1MiB\" (t.toml:2): must be a size from \"2B\" to \"1MB\"",
        ),
        (
            "[database]\nprepared_statements = \"false\"",
            "database.prepared_statements = \"false\" (t.toml:2): must be true or false; write it without quotes",
        ),
        ("[database]\nprepared_statements = 0", "database.prepared_statements = 0 (t.toml:2): must be true or false"),
        (
            "[database]\nsynchronous_commit = false",
            "database.synchronous_commit = false (t.toml:2): must be \"off\" or \"on\"",
        ),
        (
            "[database]\nsynchronous_commit = \"local\"",
            "database.synchronous_commit = \"local\" (t.toml:2): must be \"off\" or \"on\"",
        ),
        (
            "[database.tls]\nmode = \"verify-fulll\"",
            "database.tls.mode = \"verify-fulll\" (t.toml:2): must be \"disable\", \"prefer\", \"require\", \"verify-ca\" or \"verify-full\"; did you mean \"verify-full\"?",
        ),
        (
            "[defaults]\npolicy = \"per_key\"",
            "defaults.policy = \"per_key\" (t.toml:2): must be \"per_key_head_of_line\", \"per_source_stream\", \"stop_the_line\" or \"best_effort\"; did you mean \"per_key_head_of_line\"?",
        ),
        (
            "[defaults]\npolicy = \"fifo\"",
            "defaults.policy = \"fifo\" (t.toml:2): must be \"per_key_head_of_line\", \"per_source_stream\", \"stop_the_line\" or \"best_effort\"",
        ),
        (
            "[sources.a]\npolicy = \"Best_Effort\"",
            "sources.a.policy = \"Best_Effort\" (t.toml:2): must be \"per_key_head_of_line\", \"per_source_stream\", \"stop_the_line\" or \"best_effort\"; did you mean \"best_effort\"?",
        ),
        (
            "[defaults.backoff]\nkind = \"linear\"",
            "defaults.backoff.kind = \"linear\" (t.toml:2): must be \"exponential\" or \"constant\"",
        ),
        (
            "[defaults.backoff]\ninitial = \"0s\"",
            "defaults.backoff.initial = \"0s\" (t.toml:2): must be a duration from \"1ms\" to \"7days\"",
        ),
        (
            "[relay]\nunlisted_sources = \"none\"",
            "relay.unlisted_sources = \"none\" (t.toml:2): must be \"default\" or \"ignore\"",
        ),
        (
            "[log]\nformat = \"jsn\"",
            "log.format = \"jsn\" (t.toml:2): must be \"json\" or \"text\"; did you mean \"json\"?",
        ),
        (
            "[http]\nlisten = \"localhost:9464\"",
            "http.listen = \"localhost:9464\" (t.toml:2): must be an IP address and a port, such as \"127.0.0.1:9464\", \"0.0.0.0:9464\" or \"[::]:9464\"",
        ),
        ("[http]\nlisten = 9464", "http.listen = 9464 (t.toml:2): must be a string in quotes"),
    ]);
    let config = config(
        "[relay]\nbatch_bytes_max = \"1.5MiB\"\npublish_timeout = \"1m 500ms\"\npublishing_timeout = \"5m\"\n[log]\nlevel = \"warn,keiro_relay=debug\"\n[http]\nlisten = \"[::]:1\"",
    );
    assert_eq!(config.relay.batch_bytes_max, 1_572_864);
    assert_eq!(config.relay.publish_timeout, Duration::from_millis(60_500));
    assert_eq!(config.log.level, "warn,keiro_relay=debug");
}

#[test]
fn names_levels_and_brokers_are_checked() {
    let identifier =
        "must be a PostgreSQL name of 1 to 63 letters (a-z, A-Z), digits and _, not beginning with a digit";
    let long = "a".repeat(64);
    for name in ["", "1a", "a-b", "a.b", "a\\\"; drop", "ä", &long] {
        let shown = if name == "a\\\"; drop" { "a\\\"; drop" } else { name };
        each_refused(&[
            (
                &format!("[database]\nschema = \"{name}\""),
                &format!("database.schema = \"{shown}\" (t.toml:2): {identifier}"),
            ),
            (
                &format!("[database]\ntable = \"{name}\""),
                &format!("database.table = \"{shown}\" (t.toml:2): {identifier}"),
            ),
        ]);
    }
    assert_eq!(config(&format!("[database]\ntable = \"_{}\"", "a9".repeat(31))).database.table.len(), 63);

    let instance =
        "must be 1 to 128 printable ASCII characters without a space at either end; leave it out for host-pid-random";
    for name in ["", " a", "a ", "ä"] {
        each_refused(&[(
            &format!("[relay]\ninstance = \"{name}\""),
            &format!("relay.instance = \"{name}\" (t.toml:2): {instance}"),
        )]);
    }
    each_refused(&[("[relay]\ninstance = \"a\\nb\"", &format!("relay.instance = \"a\\nb\" (t.toml:2): {instance}"))]);
    let long = "x".repeat(129);
    let shown = "x".repeat(80);
    each_refused(&[(
        &format!("[relay]\ninstance = \"{long}\""),
        &format!("relay.instance = \"{shown}\"… (t.toml:2): {instance}"),
    )]);
    assert_eq!(config(&format!("[relay]\ninstance = \"{}\"", &long[..128])).relay.instance.len(), 128);

    let level = "must be off, error, warn, info, debug or trace, or a list such as \"info,keiro_relay=debug\"";
    each_refused(&[
        ("[log]\nlevel = \"inof\"", &format!("log.level = \"inof\" (t.toml:2): {level}; did you mean info?")),
        ("[log]\nlevel = \"\"", &format!("log.level = \"\" (t.toml:2): {level}")),
        (
            "[log]\nlevel = \"info,keiro_relay=debgu\"",
            &format!("log.level = \"info,keiro_relay=debgu\" (t.toml:2): {level}; did you mean debug?"),
        ),
        ("[log]\nlevel = \"keiro_relay\"", &format!("log.level = \"keiro_relay\" (t.toml:2): {level}")),
        ("[log]\nlevel = \"a[{b=debug\"", &format!("log.level = \"a[{{b=debug\" (t.toml:2): {level}")),
    ]);

    let form = "must be host:port, such as \"kafka-1:9092\" or \"[::1]:9092\"";
    let brokers = |entry: &str| {
        let text = format!("[kafka]\nbrokers = [\"ok:1\", \"{entry}\"]");
        listed(
            Loaded::from(ConfigFile::Text { name: "t.toml", text: &text }, pairs(&NEEDED[..1]), Overrides::new())
                .expect_err(entry),
        )
    };
    for (entry, hint) in [
        ("kafka-1", "; the port is missing"),
        ("", "; the port is missing"),
        ("kafka-1:", ""),
        ("kafka-1:0", ""),
        ("kafka-1:65536", ""),
        ("kafka-1:+9", ""),
        (":9092", ""),
        ("a b:9092", ""),
        ("::1:9092", "; an IPv6 address stands in brackets"),
        ("[::1]", ""),
        ("[nope]:9092", ""),
        ("ssl://kafka-1:9092", "; leave the scheme out and set security.protocol in [kafka.properties]"),
        ("a:1,b:2", "; write one broker an entry"),
    ] {
        assert_eq!(brokers(entry), [format!("kafka.brokers[1] = \"{entry}\" (t.toml:2): {form}{hint}")]);
    }
    // A password in the wrong place stays hidden.
    assert!(
        brokers("sasl://u:hunter2@kafka-1:9092")[0]
            .starts_with("kafka.brokers[1] = \"***\" (t.toml:2): must be host:port")
    );
    let of = |list: &str| {
        let text = format!("[kafka]\nbrokers = {list}");
        Loaded::from(ConfigFile::Text { name: "t.toml", text: &text }, pairs(&NEEDED[..1]), Overrides::new())
            .map(|loaded| loaded.config.kafka.brokers)
            .map_err(listed)
    };
    assert_eq!(
        of("[]").expect_err("empty"),
        ["kafka.brokers = [] (t.toml:2): must name at least one broker, such as \"kafka-1:9092\""]
    );
    assert_eq!(of("\"a:1\"").expect_err("no list"), ["kafka.brokers (t.toml:2): must be a list: write [\"a:1\"]"]);
    assert_eq!(of("9092").expect_err("no list"), ["kafka.brokers = 9092 (t.toml:2): must be a list of strings"]);
    assert_eq!(
        of("[\"a:1\", 2]").expect_err("no string"),
        ["kafka.brokers[1] = 2 (t.toml:2): must be a string in quotes"]
    );
    assert_eq!(of("[\"10.0.0.1:1\", \"[fe80::1]:65535\", \"a_b.c-d:9092\"]").expect("right").len(), 3);
}

#[test]
fn the_instance_is_drawn_anew_and_fits_its_own_rule() {
    let (one, other) = (config("").relay.instance, config("").relay.instance);
    assert_ne!(one, other);
    assert!(one.contains(&std::process::id().to_string()), "{one}");
    assert_eq!(config(&format!("[relay]\ninstance = \"{one}\"")).relay.instance, one);
}

// ---- relations ----

#[test]
fn unsafe_relations_are_refused_naming_both_sides_and_where_they_come_from() {
    each_refused(&[
        (
            "[relay]\npublish_timeout = \"85s\"",
            "relay.publishing_timeout = \"5m\" (default): must be longer than three times relay.publish_timeout = \"1m 25s\" \
             (t.toml:2) + relay.settle_timeout = \"10s\" (default) + a margin of 5s, which is 5m: raise it or shorten them",
        ),
        (
            "[relay]\npublishing_timeout = \"30s\"",
            "relay.publishing_timeout = \"30s\" (t.toml:2): must be longer than three times relay.publish_timeout = \"30s\" \
             (default) + relay.settle_timeout = \"10s\" (default) + a margin of 5s, which is 2m 15s: raise it or shorten them",
        ),
        (
            "[relay]\nin_flight_rows_max = 499",
            "relay.in_flight_rows_max = 499 (t.toml:2): must be at least relay.batch_rows_max = 500 (default): a batch would never \
             fit",
        ),
        (
            "[relay]\nbatch_bytes_max = \"65MiB\"",
            "relay.in_flight_bytes_max = \"64MiB\" (default): must be at least relay.batch_bytes_max = \"65MiB\" (t.toml:2): it \
             would never fit",
        ),
        (
            "[relay]\nin_flight_bytes_max = \"15MiB\"",
            "relay.in_flight_bytes_max = \"15MiB\" (t.toml:2): must be at least kafka.message_bytes_max = \"16MiB\" (default): it \
             would never fit",
        ),
        (
            "[limits]\npayload_bytes_max = \"16777217B\"",
            "limits.payload_bytes_max = \"16777217B\" (t.toml:2): must be at most kafka.message_bytes_max = \"16MiB\" (default): a \
             larger row would be rejected",
        ),
        (
            "[relay]\npoll_interval_min = \"251ms\"",
            "relay.poll_interval_max = \"250ms\" (default): must be at least relay.poll_interval_min = \"251ms\" (t.toml:2)",
        ),
        (
            "[relay]\nshutdown_grace = \"10s\"",
            "relay.shutdown_grace = \"10s\" (t.toml:2): must be longer than relay.settle_timeout = \"10s\" (default): that much of \
             it is kept to settle what was sent",
        ),
        (
            "[database]\nstatement_timeout = \"9s\"",
            "database.statement_timeout = \"9s\" (t.toml:2): must be at least relay.settle_timeout = \"10s\" (default): a \
             settlement would be cut off before its time",
        ),
        (
            "[maintenance]\ninterval = \"301s\"",
            "maintenance.interval = \"5m 1s\" (t.toml:2): must be at most relay.publishing_timeout = \"5m\" (default): rows of a \
             relay that died would wait for longer than their lease",
        ),
        (
            "[maintenance]\nretention = \"299s\"",
            "maintenance.retention = \"4m 59s\" (t.toml:2): must be at least relay.publishing_timeout = \"5m\" (default): a row \
             would be gone while another relay may still settle it",
        ),
        (
            "[defaults.backoff]\ninitial = \"61s\"",
            "defaults.backoff.max = \"1m\" (default): must be at least defaults.backoff.initial = \"1m 1s\" (t.toml:2)",
        ),
        (
            "[sources.a.backoff]\nmax = \"999ms\"",
            "sources.a.backoff.max = \"999ms\" (t.toml:2): must be at least defaults.backoff.initial = \"1s\" (default)",
        ),
        (
            "[sources.a]\non_halt = \"hold\"",
            "sources.a.on_halt = \"hold\" (t.toml:2): has no effect with policy \"per_key_head_of_line\": only \"stop_the_line\" \
             halts; take it out",
        ),
        (
            "[defaults]\non_halt = \"retry\"",
            "defaults.on_halt = \"retry\" (t.toml:2): has no effect with policy \"per_key_head_of_line\": only \"stop_the_line\" \
             halts; take it out",
        ),
        (
            "[kafka.properties]\n\"queue.buffering.max.kbytes\" = 16383",
            "kafka.properties.\"queue.buffering.max.kbytes\" (t.toml:2): must be at least 16384, to hold one message of \
             kafka.message_bytes_max = \"16MiB\" (default): a larger one would wait for ever",
        ),
        (
            "[database.tls]\ncert_file = \"a\"",
            "database.tls.cert_file (t.toml:2): a client certificate needs its key and the other way round: set \
             database.tls.key_file too",
        ),
    ]);
}

#[test]
fn relations_hold_at_their_very_edge() {
    // The defaults pass: 30 s + 10 s + 5 s is less than a third of 5 m.
    let relay = Relay::default();
    assert!(relay.publish_timeout + relay.settle_timeout + LEASE_MARGIN < relay.publishing_timeout / 3);
    config("[relay]\npublish_timeout = \"84999ms\"");
    config("[relay]\nin_flight_rows_max = 500");
    config("[relay]\nin_flight_bytes_max = \"16MiB\"");
    // A batch smaller than a message is fine: the first row always fits.
    config("[relay]\nbatch_bytes_max = \"1KiB\"");
    config("[relay]\npoll_interval_min = \"250ms\"");
    config("[relay]\nshutdown_grace = \"10001ms\"");
    config("[database]\nstatement_timeout = \"10s\"");
    config("[maintenance]\ninterval = \"5m\"\nretention = \"5m\"");
    config("[defaults.backoff]\ninitial = \"1m\"\njitter = 1\nmultiplier = 1");
    config("[kafka.properties]\n\"queue.buffering.max.kbytes\" = 16384");
    config("[defaults]\non_halt = \"hold\"\n[sources.a]\npolicy = \"stop_the_line\"");
    // The default limit of a new row gives way to a client that may hand over less.
    assert_eq!(config("[limits]\npayload_bytes_max = \"16MiB\"").limits.payload_bytes_max, 16 << 20);
    assert_eq!(config("[kafka]\nmessage_bytes_max = \"1kB\"").limits.payload_bytes_max, 1_000);
    // The largest message finds room in the client's queue by default.
    let kafka = config("[kafka]\nmessage_bytes_max = \"1GB\"\n[relay]\nin_flight_bytes_max = \"2GiB\"").kafka;
    let kbytes = kafka.client_properties().expect("no files")["queue.buffering.max.kbytes"].expose().parse::<usize>();
    assert!(kbytes.expect("a number") * 1024 >= 1_000_000_000);
}

#[test]
fn a_wrong_value_takes_part_in_no_relation_and_wrong_defaults_are_said_once() {
    assert_eq!(problems("[relay]\npublish_timeout = 90\nsettle_timeout = \"80s\"").len(), 3);
    let found =
        problems("[defaults.backoff]\ninitial = \"2m\"\n[sources.a]\nmax_attempts = 3\n[sources.b]\npolicy = \"x\"");
    assert_eq!(found.len(), 2, "{found:#?}");
}

#[test]
fn what_works_but_should_be_known_is_a_warning() {
    assert_eq!(warnings("", &[]), [""; 0]);
    assert_eq!(
        warnings("[relay]\npublishing_timeout = \"301s\"", &[]),
        [
            "relay.publishing_timeout: is \"5m 1s\", and a keiro program beside this relay requeues every row that has been \
          publishing for 5m: its rows could be sent twice; keep it at 5m unless no such program runs"
        ]
    );
    assert_eq!(
        warnings("[relay]\nshutdown_grace = \"30s\"", &[]),
        ["relay.shutdown_grace: is \"30s\", and Kubernetes kills a pod after 30s unless told otherwise: set \
          terminationGracePeriodSeconds above it"]
    );
    assert_eq!(
        warnings("[database]\npassword_file = \"/nonexistent/password\"", &[]),
        [
            "database.password_file: \"/nonexistent/password\" cannot be read: No such file or directory (os error 2); it is read \
          again at each use"
        ]
    );
    assert_eq!(
        warnings("[kafka.property_files]\n\"sasl.password\" = \"/nonexistent/password\"", &[]),
        [
            "kafka.property_files.\"sasl.password\": \"/nonexistent/password\" cannot be read: No such file or directory (os error \
          2); it is read again at each use"
        ]
    );
    assert_eq!(
        warnings("[database.tls]\nca_file = \"/nonexistent/ca\"", &[]),
        [
            "database.tls.ca_file: \"/nonexistent/ca\" cannot be read: No such file or directory (os error 2)",
            "database.tls.ca_file: the server's certificate is not checked with mode \"prefer\": set \"verify-full\"",
        ]
    );
}

// ---- names in the environment ----

#[test]
fn variables_that_are_not_ours_are_left_alone_and_mistyped_ones_are_not() {
    // Kubernetes sets these for a service called keiro-relay.
    let foreign = [
        ("KEIRO_RELAY_PORT", "tcp://10.0.0.1:80"),
        ("KEIRO_RELAY_SERVICE_HOST", "x"),
        ("KEIRO", "x"),
        ("PATH", "/bin"),
    ];
    assert_eq!(warnings("", &foreign), [""; 0]);
    assert_eq!(
        warnings(
            "",
            &[("KEIRO_RELAY_DATABASE_URL", "postgres://u:hunter2@x/y"), ("KEIRO_RELAY_RELAY__BATCH_ROWS_MAX", "1")]
        ),
        [
            "KEIRO_RELAY_DATABASE_URL: the variable is not read; database.url is set by KEIRO_RELAY__DATABASE__URL",
            "KEIRO_RELAY_RELAY__BATCH_ROWS_MAX: the variable is not read; relay.batch_rows_max is set by \
             KEIRO_RELAY__RELAY__BATCH_ROWS_MAX",
        ]
    );
    for (name, expected) in [
        (
            "KEIRO_RELAY__DATABASE__ULR",
            "env KEIRO_RELAY__DATABASE__ULR: unknown key; did you mean KEIRO_RELAY__DATABASE__URL?",
        ),
        (
            "KEIRO_RELAY__DATABASE_URL",
            "env KEIRO_RELAY__DATABASE_URL: unknown key; did you mean KEIRO_RELAY__DATABASE__URL?",
        ),
        ("KEIRO_RELAY__DATABASE", "env KEIRO_RELAY__DATABASE: database is a section: name one of its keys too"),
        (
            "KEIRO_RELAY__DATABASE__TLS",
            "env KEIRO_RELAY__DATABASE__TLS: database.tls is a section: name one of its keys too",
        ),
        (
            "KEIRO_RELAY__",
            "env KEIRO_RELAY__: unknown key; the form is KEIRO_RELAY__SECTION__KEY, such as KEIRO_RELAY__DATABASE__URL",
        ),
        (
            "KEIRO_RELAY__SOURCES__billing__POLICI",
            "env KEIRO_RELAY__SOURCES__billing__POLICI: unknown key; the form is KEIRO_RELAY__SECTION__KEY, such as \
             KEIRO_RELAY__DATABASE__URL",
        ),
        (
            "KEIRO_RELAY__SOURCES____POLICY",
            "env KEIRO_RELAY__SOURCES____POLICY: unknown key; the form is KEIRO_RELAY__SECTION__KEY, such as \
             KEIRO_RELAY__DATABASE__URL",
        ),
    ] {
        // The value behind a mistyped name may be a secret.
        assert_eq!(problems_with("", &[(name, "postgres://u:hunter2@x/y")]), [expected]);
    }
}

#[test]
fn our_own_names_match_in_any_case_but_only_once() {
    assert_eq!(config_with("", &[("KEIRO_RELAY__relay__Batch_Rows_Max", "9")]).relay.batch_rows_max, 9);
    assert_eq!(
        problems_with("", &[("KEIRO_RELAY__LOG__LEVEL", "info"), ("KEIRO_RELAY__log__level", "warn")]),
        ["log.level (env KEIRO_RELAY__log__level): another variable sets the same key in another spelling: keep one"]
    );
}

#[test]
fn an_empty_or_garbled_variable_is_a_problem_not_a_default() {
    assert_eq!(
        problems_with("[log]\nlevel = \"warn\"", &[("KEIRO_RELAY__LOG__LEVEL", "")]),
        ["log.level (env KEIRO_RELAY__LOG__LEVEL): the variable is set but empty: unset it, or give it a value"]
    );
    assert_eq!(
        problems_with("", &[("KEIRO_RELAY__LOG__LEVEL", "inf\u{fffd}")]),
        ["log.level (env KEIRO_RELAY__LOG__LEVEL): the value is not valid UTF-8"]
    );
    let flags = Overrides::new().set("--level", "log.level", "").set("--x", "log.levle", "x").set("--y", "log", "x");
    let mut found = listed(load_all("", &[], flags).expect_err("they are wrong"));
    found.sort();
    assert_eq!(
        found,
        [
            "log (flag --y): log is a section: name one of its keys too",
            "log.level (flag --level): the flag is empty: leave it out, or give it a value",
            "log.levle (flag --x): unknown key; did you mean log.level?",
        ]
    );
}

#[test]
fn source_names_are_matched_exactly_wherever_they_are_written() {
    let names = |config: &Config| config.sources.keys().cloned().collect::<Vec<_>>();
    let text = "[sources.\"Orders.EU\"]\npolicy = \"best_effort\"\n[sources.\"with space\"]\nmax_attempts = 2\n[sources.orders]\nmax_attempts = 3\n";
    let variables = [
        ("KEIRO_RELAY__SOURCES__orders__MAX_ATTEMPTS", "4"),
        ("KEIRO_RELAY__SOURCES__orders__BACKOFF__INITIAL", "3s"),
        ("KEIRO_RELAY__SOURCES__Orders.EU__max_attempts", "5"),
        ("KEIRO_RELAY__SOURCES__a__b__POLICY", "stop_the_line"),
        ("KEIRO_RELAY__SOURCES__a__b__ON_HALT", "hold"),
        ("KEIRO_RELAY__SOURCES__POLICY__POLICY", "best_effort"),
        (
            "KEIRO_RELAY__SOURCES",
            "{ \"with space\" = { max_attempts = 6 }, orders = { max_attempts = 9 }, \"Ö\" = {} }",
        ),
    ];
    let config = config_with(text, &variables);
    assert_eq!(names(&config), ["Orders.EU", "POLICY", "a__b", "orders", "with space", "Ö"]);
    assert_eq!(config.sources["Orders.EU"].policy, Policy::BestEffort);
    assert_eq!(config.sources["Orders.EU"].max_attempts, 5);
    assert_eq!((config.sources["a__b"].policy, config.sources["a__b"].on_halt), (Policy::StopTheLine, OnHalt::Hold));
    assert_eq!(config.sources["with space"].max_attempts, 6);
    // A variable for one key wins over the table of all sources.
    assert_eq!(config.sources["orders"].max_attempts, 4);
    assert_eq!(config.sources["orders"].backoff.initial, seconds(3));
    assert_eq!(config.sources["Ö"], config.defaults);
    // Nothing is folded: another case is another source, with a word about it.
    let other = [("KEIRO_RELAY__SOURCES__ORDERS__MAX_ATTEMPTS", "4")];
    assert_eq!(config_with(text, &other).sources["orders"].max_attempts, 3);
    assert_eq!(config_with(text, &other).sources["ORDERS"].max_attempts, 4);
    assert_eq!(
        warnings(text, &other),
        [
            "KEIRO_RELAY__SOURCES__ORDERS__MAX_ATTEMPTS: names a source \"ORDERS\" that the file does not list; it lists \"orders\", \
          and names are matched exactly"
        ]
    );
    assert_eq!(
        problems_with("", &[("KEIRO_RELAY__SOURCES", "{ a = { polcy = \"x\" } }")]),
        ["sources.a.polcy (env KEIRO_RELAY__SOURCES): unknown key; did you mean policy?"]
    );
    assert_eq!(
        problems_with("", &[("KEIRO_RELAY__SOURCES", "billing")]),
        [
            "sources (env KEIRO_RELAY__SOURCES): must be an inline TOML table, such as { \"a.name\" = … }: not valid TOML at column 1: \
          string values must be quoted, expected literal string"
        ]
    );
    each_refused(&[(
        "[sources.\"a\\u0000b\"]",
        "sources.\"a\\u0000b\" (t.toml:1): a source's name cannot hold a NUL: PostgreSQL has no such text",
    )]);
}

#[test]
fn a_source_has_from_the_defaults_what_it_does_not_say() {
    let config = config(
        "[defaults]\nmax_attempts = 20\n[defaults.backoff]\nkind = \"constant\"\ninitial = \"2s\"\n[sources.a]\npolicy = \
         \"per_source_stream\"\n[sources.a.backoff]\njitter = 0.5\n[sources.b]\nmax_attempts = 1\n",
    );
    let a = &config.sources["a"];
    assert_eq!((a.policy, a.max_attempts, a.backoff.kind), (Policy::PerSourceStream, 20, BackoffKind::Constant));
    assert_eq!((a.backoff.initial, a.backoff.jitter), (seconds(2), 0.5));
    assert_eq!(config.sources["b"].max_attempts, 1);
    assert_eq!(config.rules("c").map(|rules| rules.max_attempts), Some(20));
    assert_eq!(config.rules("A").map(|rules| rules.policy), Some(Policy::PerKeyHeadOfLine));
    let ignoring = config_with("[relay]\nunlisted_sources = \"ignore\"\n[sources.a]\n", &[]);
    assert!(ignoring.rules("a").is_some() && ignoring.rules("b").is_none());
}

// ---- librdkafka's properties ----

#[test]
fn property_names_come_out_flat_however_they_are_written() {
    let expected = [
        ("compression.level", "3"),
        ("sasl.password", "geheim"),
        ("sasl.username", "u"),
        ("socket.keepalive.enable", "false"),
    ];
    let flat = |config: &Config| -> Vec<(String, String)> {
        config.kafka.properties.iter().map(|(name, value)| (name.clone(), value.expose().to_owned())).collect()
    };
    for text in [
        "[kafka.properties]\nsasl.password = \"geheim\"\nsasl.username = \"u\"\ncompression.level = 3\nsocket.keepalive.enable = false\n",
        "[kafka.properties]\n\"sasl.password\" = \"geheim\"\n\"sasl.username\" = \"u\"\n\"compression.level\" = \"3\"\n\"socket.keepalive.enable\" = \"false\"\n",
        "[kafka.properties.sasl]\npassword = \"geheim\"\nusername = \"u\"\n[kafka.properties]\ncompression.level = 3\n\"socket.keepalive.enable\" = false\n",
        "[kafka]\nproperties = { sasl.password = \"geheim\", \"sasl.username\" = \"u\", compression = { level = 3 }, socket.\"keepalive.enable\" = false }\n",
    ] {
        assert_eq!(flat(&config(text)), pairs(&expected), "{text}");
    }
    let variables = [
        ("KEIRO_RELAY__KAFKA__PROPERTIES__SASL_PASSWORD", "geheim"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES__sasl.username", "u"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES__Compression.Level", "3"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES", "{ \"socket.keepalive.enable\" = false, sasl.password = \"not this\" }"),
    ];
    assert_eq!(flat(&config_with("", &variables)), pairs(&expected));
    // The environment reaches a name of the file, nested or quoted.
    let both = config_with("[kafka.properties]\nsasl.password = \"file\"\n\"sasl.username\" = \"file\"", &variables);
    assert_eq!(flat(&both), pairs(&expected));
    // librdkafka's own underscore is none of ours.
    let level = config_with("", &[("KEIRO_RELAY__KAFKA__PROPERTIES__LOG_LEVEL", "3")]);
    assert_eq!(level.kafka.properties["log_level"].expose(), "3");
    each_refused(&[
        (
            "[kafka.properties]\nsasl.password = \"geheim\"\n\"sasl.password\" = \"geheim\"",
            "kafka.properties.\"sasl.password\" (t.toml:3): is set twice, once quoted and once as a table: keep one",
        ),
        (
            "[kafka.properties]\n\"linger.ms\" = 1.5",
            "kafka.properties.\"linger.ms\" (t.toml:2): must be a string, a whole number, true or false",
        ),
        (
            "[kafka.properties]\n\"client.id\" = [\"a\"]",
            "kafka.properties.\"client.id\" (t.toml:2): must be a string, a whole number, true or false",
        ),
        (
            "[kafka.properties]\n\"client.id\" = \"a\\u0000b\"",
            "kafka.properties.\"client.id\" (t.toml:2): cannot hold a NUL: librdkafka has no such text",
        ),
    ]);
}

#[test]
fn properties_that_are_the_relay_s_are_refused_with_the_reason() {
    let reports = "cannot be set: rows are settled by delivery reports, which the relay reads itself";
    let partition =
        "cannot be set: the relay chooses the partition as Java clients do, so that a key keeps its partition";
    let acks = "cannot be set: it is always all: a row counts as sent only when every in-sync replica has it";
    let timeout = "cannot be set: the relay derives it from the lease, or a stopped process sends old records when it wakes; set \
                   relay.publish_timeout";
    let retries = "cannot be set: the deadline bounds retries, not a count; set relay.publish_timeout";
    let in_flight = "must be from 1 to 5: with more, a broker cannot keep an idempotent producer's order";
    let statistics = "must be from 100 to 60000: readiness is read from the statistics";
    for (name, value, expected) in [
        (
            "enable.idempotence",
            "false",
            "cannot be set: it is always true: without it a retry can overtake or double a record",
        ),
        (
            "enable.idempotence",
            "true",
            "cannot be set: it is always true: without it a retry can overtake or double a record",
        ),
        ("acks", "1", acks),
        ("request.required.acks", "-1", acks),
        (
            "enable.gapless.guarantee",
            "false",
            "cannot be set: the relay sets it for each client: without it later batches pass one that failed",
        ),
        ("message.timeout.ms", "1", timeout),
        ("delivery.timeout.ms", "1", timeout),
        ("retries", "1", retries),
        ("message.send.max.retries", "1", retries),
        (
            "transactional.id",
            "x",
            "cannot be set: the relay uses no transactions, and a shared id would let relays fence each other off",
        ),
        ("partitioner", "random", partition),
        ("partitioner_cb", "x", partition),
        ("queuing.strategy", "lifo", "cannot be set: it is always fifo: order rests on it"),
        (
            "batch.num.messages",
            "9",
            "cannot be set: the careful lane sends one record a batch, which is how it knows whose fault an error is; set relay.batch_rows_max",
        ),
        ("delivery.report.only.error", "true", "cannot be set: rows are settled by delivery reports, of successes too"),
        ("dr_cb", "x", reports),
        ("dr_msg_cb", "x", reports),
        ("enabled_events", "0", reports),
        ("bootstrap.servers", "a:1", "cannot be set: set kafka.brokers"),
        ("metadata.broker.list", "a:1", "cannot be set: set kafka.brokers"),
        ("message.max.bytes", "1", "cannot be set: set kafka.message_bytes_max"),
        ("log.queue", "true", "cannot be set: the relay reads librdkafka's log itself"),
        ("opaque", "x", "cannot be set: it is a pointer of the relay's own"),
        ("max.in.flight", "6", in_flight),
        ("max.in.flight.requests.per.connection", "1000000", in_flight),
        ("statistics.interval.ms", "0", statistics),
        ("statistics.interval.ms", "60001", statistics),
    ] {
        let key = if name.contains('.') { format!("\"{name}\"") } else { name.to_owned() };
        let expected = format!("kafka.properties.{key} (t.toml:2): {expected}");
        each_refused(&[(&format!("[kafka.properties]\n\"{name}\" = \"{value}\""), &expected)]);
    }
    // A file is no way around it, nor is another layer.
    each_refused(&[
        ("[kafka.property_files]\nacks = \"/nonexistent\"", &format!("kafka.property_files.acks (t.toml:2): {acks}")),
        (
            "[kafka.property_files]\n\"max.in.flight\" = \"/nonexistent\"",
            "kafka.property_files.\"max.in.flight\" (t.toml:2): cannot be read from a file: set it in kafka.properties",
        ),
    ]);
    assert_eq!(
        problems_with("", &[("KEIRO_RELAY__KAFKA__PROPERTIES__ENABLE_IDEMPOTENCE", "false")]),
        [
            "kafka.properties.\"enable.idempotence\" (env KEIRO_RELAY__KAFKA__PROPERTIES__ENABLE_IDEMPOTENCE): cannot be set: it is \
          always true: without it a retry can overtake or double a record"
        ]
    );
    config("[kafka.properties]\n\"max.in.flight\" = 5\n\"statistics.interval.ms\" = 100");
}

#[test]
fn librdkafka_judges_the_rest_and_the_property_is_named() {
    each_refused(&[
        (
            "[kafka.properties]\nsasl.usernam = \"x\"",
            "kafka.properties.\"sasl.usernam\" (t.toml:2): librdkafka has no such property; did you mean sasl.username?",
        ),
        (
            "[kafka.properties]\n\"zookeeper\" = \"x\"",
            "kafka.properties.zookeeper (t.toml:2): librdkafka has no such property; its CONFIGURATION.md lists them",
        ),
        (
            "[kafka.properties]\nsecurity.protocol = \"tls\"",
            "kafka.properties.\"security.protocol\" (t.toml:2): librdkafka refuses the value; its CONFIGURATION.md says what is allowed",
        ),
        (
            "[kafka.properties]\ncompression.level = 99",
            "kafka.properties.\"compression.level\" (t.toml:2): librdkafka refuses the value: it is outside allowed range -1..12",
        ),
        (
            "[kafka.properties]\nlinger.ms = \"soon\"",
            "kafka.properties.\"linger.ms\" (t.toml:2): librdkafka refuses the value; its CONFIGURATION.md says what is allowed",
        ),
        (
            "[kafka.properties]\nsocket.keepalive.enable = \"maybe\"",
            "kafka.properties.\"socket.keepalive.enable\" (t.toml:2): librdkafka refuses the value: it is neither true nor false",
        ),
        // Right by themselves, wrong together with what every client of ours has.
        (
            "[kafka.properties]\nlinger.ms = 60000",
            "kafka.properties.\"linger.ms\" (t.toml:2): librdkafka refuses the properties together: `message.timeout.ms` must be greater than `linger.ms`",
        ),
        (
            "[kafka.properties]\nsecurity.protocol = \"sasl_ssl\"\nsasl.mechanism = \"NOPE\"",
            "kafka.properties: librdkafka refuses the properties together: Unsupported SASL mechanism: ***",
        ),
    ]);
    // From different layers too: which spelling is meant is not for us to guess.
    assert_eq!(
        problems_with(
            "[kafka.properties]\n\"linger.ms\" = 5",
            &[("KEIRO_RELAY__KAFKA__PROPERTIES__QUEUE_BUFFERING_MAX_MS", "6")]
        ),
        [
            "kafka.properties.\"queue.buffering.max.ms\" (env KEIRO_RELAY__KAFKA__PROPERTIES__QUEUE_BUFFERING_MAX_MS): is the same \
             property as kafka.properties.\"linger.ms\": keep one of them"
        ]
    );
    // A wrong broker keeps no property from being judged.
    let found = problems_with("[kafka.properties]\nlinger.ms = 60000", &[("KEIRO_RELAY__KAFKA__BROKERS", "kafka-1")]);
    assert_eq!(found.len(), 2, "{found:#?}");
    // Each wrong one is named at once.
    assert_eq!(problems("[kafka.properties]\nlinger.ms = \"x\"\nclient.di = \"y\"\ncompression.level = 99").len(), 3);
    // The same property under two names.
    each_refused(&[(
        "[kafka.properties]\n\"linger.ms\" = 5\n\"queue.buffering.max.ms\" = 5",
        "kafka.properties.\"queue.buffering.max.ms\" (t.toml:3): is the same property as kafka.properties.\"linger.ms\": keep one \
         of them",
    )]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("secret");
    fs::write(&file, "x\n").expect("written");
    let text = format!(
        "[kafka.properties]\nsasl.password = \"x\"\n[kafka.property_files]\nsasl.password = \"{}\"",
        file.display()
    );
    each_refused(&[(
        &text,
        "kafka.property_files.\"sasl.password\" (t.toml:4): is the same property as kafka.properties.\"sasl.password\": keep one \
         of them",
    )]);
    config(
        "[kafka.properties]\nsecurity.protocol = \"sasl_plaintext\"\nsasl.mechanism = \"SCRAM-SHA-512\"\nsasl.username = \"u\"\nsasl.password = \"p\"",
    );
}

#[test]
fn client_properties_are_our_defaults_under_the_user_s_with_files_read_each_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kafka-password");
    let text = format!(
        "[kafka.properties]\ncompression.type = \"zstd\"\n\"linger.ms\" = 5\n[kafka.property_files]\nsasl.password = \"{}\"",
        file.display()
    );
    let kafka = config(&text).kafka;
    let missing = kafka.client_properties().expect_err("the file is not there yet").to_string();
    assert_eq!(
        missing,
        format!(
            "kafka.property_files.\"sasl.password\" = \"{}\": cannot be read: No such file or directory (os error 2)",
            file.display()
        )
    );
    let password = |kafka: &Kafka| kafka.client_properties().expect("readable")["sasl.password"].expose().to_owned();
    fs::write(&file, "first\n").expect("written");
    assert_eq!(password(&kafka), "first");
    fs::write(&file, "second\r\n").expect("written");
    assert_eq!(password(&kafka), "second");
    let properties: BTreeMap<String, String> = kafka
        .client_properties()
        .expect("readable")
        .into_iter()
        .map(|(name, value)| (name, value.expose().to_owned()))
        .collect();
    // The user's spelling replaces ours: librdkafka would otherwise get both, in no order.
    let expected = [
        ("bootstrap.servers", "kafka-1:9092,kafka-2:9092"),
        ("client.id", "keiro-relay"),
        ("compression.type", "zstd"),
        ("linger.ms", "5"),
        ("message.max.bytes", "16777216"),
        ("queue.buffering.max.kbytes", "131072"),
        ("reconnect.backoff.max.ms", "1000"),
        ("sasl.password", "second"),
        ("socket.keepalive.enable", "true"),
        ("statistics.interval.ms", "5000"),
        ("topic.metadata.propagation.max.ms", "5000"),
    ];
    assert_eq!(properties.into_iter().collect::<Vec<_>>(), pairs(&expected));
    let plain = config("").kafka.client_properties().expect("no files");
    assert_eq!((plain["compression.codec"].expose(), plain["queue.buffering.max.ms"].expose()), ("lz4", "1"));
}

// ---- the database's URL and secrets ----

#[test]
fn sslmode_moves_from_the_url_to_the_tls_section() {
    let of = |url: &str| {
        let config = config_with("", &[("KEIRO_RELAY__DATABASE__URL", url)]);
        (config.database.url.expose().to_owned(), config.database.tls.mode)
    };
    for (url, kept, mode) in [
        ("postgres://u@h/d", "postgres://u@h/d", TlsMode::Prefer),
        ("postgres://u@h/d?sslmode=verify-full", "postgres://u@h/d", TlsMode::VerifyFull),
        (
            "postgresql://u@h/d?sslmode=verify-ca&connect_timeout=3",
            "postgresql://u@h/d?connect_timeout=3",
            TlsMode::VerifyCa,
        ),
        ("postgres://u@h/d?connect_timeout=3&sslmode=disable", "postgres://u@h/d?connect_timeout=3", TlsMode::Disable),
        // As the driver does, a ? before the @ belongs to the password.
        ("postgres://u:a?sslmode=x@h/d?sslmode=require", "postgres://u:a?sslmode=x@h/d", TlsMode::Require),
        ("host=h user=u sslmode=verify-full dbname=d", "host=h user=u dbname=d", TlsMode::VerifyFull),
        (
            "host=h password='a sslmode=b \\' c' sslmode = 'require'",
            "host=h password='a sslmode=b \\' c'",
            TlsMode::Require,
        ),
        ("host=h password=a\\ b user=u", "host=h password=a\\ b user=u", TlsMode::Prefer),
    ] {
        assert_eq!(of(url), (kept.to_owned(), mode), "{url}");
        kept.parse::<tokio_postgres::Config>().unwrap_or_else(|error| panic!("{kept}: {error}"));
    }
    let url = "postgres://u:hunter2@h/d";
    let refused = |text: &str, url: &str| problems_with(text, &[("KEIRO_RELAY__DATABASE__URL", url)]);
    let at = "database.url (env KEIRO_RELAY__DATABASE__URL)";
    assert_eq!(
        refused("[database.tls]\nmode = \"require\"", &format!("{url}?sslmode=verify-full")),
        [format!("{at}: the URL's sslmode=verify-full contradicts database.tls.mode = \"require\": keep one of them")]
    );
    assert_eq!(
        config_with(
            "[database.tls]\nmode = \"require\"",
            &[("KEIRO_RELAY__DATABASE__URL", &format!("{url}?sslmode=require"))]
        )
        .database
        .tls
        .mode,
        TlsMode::Require
    );
    let form = "cannot be read as a connection URL; the form is postgres://USER@HOST:5432/DATABASE, and in a user or password the \
                characters : / ? # @ % are written as %3A %2F %3F %23 %40 %25";
    for (url, expected) in [
        (format!("{url}?sslmode=allow"), "its sslmode is none of disable, prefer, require, verify-ca, verify-full"),
        (
            format!("{url}?sslrootcert=/ca.pem"),
            "takes no sslrootcert: take it off the URL and set database.tls.ca_file",
        ),
        (format!("{url}?sslcert=/c.pem"), "takes no sslcert: take it off the URL and set database.tls.cert_file"),
        (format!("{url}?sslkey=/k.pem"), "takes no sslkey: take it off the URL and set database.tls.key_file"),
        (
            format!("{url}?gssencmode=disable"),
            "takes no gssencmode: the driver does not know this option, so take it off the URL",
        ),
        // An unknown option is not named: it may be the end of a password.
        (format!("{url}?hunter3=1"), form),
        ("postgres://u:hunter2?hunter3=1/h/d".to_owned(), form),
        ("mysql://u:hunter2@h/d".to_owned(), form),
        ("hunter2".to_owned(), form),
        ("postgres:///d".to_owned(), "names no host; the form is postgres://USER@HOST:5432/DATABASE"),
    ] {
        assert_eq!(refused("", &url), [format!("{at}: {expected}")], "{url}");
    }
    let both = "[database]\nurl = \"postgres://a/b\"\nurl_file = \"/x\"\npassword = \"x\"\npassword_file = \"/x\"";
    let found = listed(
        Loaded::from(ConfigFile::Text { name: "t.toml", text: both }, pairs(&NEEDED[1..]), Overrides::new())
            .expect_err("both"),
    );
    assert_eq!(
        found,
        [
            "database.url (t.toml:2): is set beside database.url_file: keep one of them",
            "database.password (t.toml:4): is set beside database.password_file: keep one of them"
        ]
    );
}

#[test]
fn the_url_and_the_password_are_read_again_at_each_connect() {
    let directory = tempfile::tempdir().expect("a directory");
    let (url_file, password_file) = (directory.path().join("url"), directory.path().join("password"));
    let text =
        format!("[database]\nurl_file = \"{}\"\npassword_file = \"{}\"", url_file.display(), password_file.display());
    let database = |text: &str| -> Database {
        let file = ConfigFile::Text { name: "t.toml", text };
        Loaded::from(file, pairs(&NEEDED[1..]), Overrides::new())
            .unwrap_or_else(|problems| panic!("{problems}"))
            .config
            .database
    };
    let rotating = database(&text);
    let error = |database: &Database| database.connect_config().expect_err("it cannot be read").to_string();
    assert_eq!(
        error(&rotating),
        format!(
            "database.url_file = \"{}\": cannot be read: No such file or directory (os error 2)",
            url_file.display()
        )
    );
    fs::write(&url_file, "postgres://u@first/d?sslmode=verify-full\n").expect("written");
    assert_eq!(
        error(&rotating),
        format!(
            "database.password_file = \"{}\": cannot be read: No such file or directory (os error 2)",
            password_file.display()
        )
    );
    fs::write(&password_file, " one two \n\n").expect("written");
    let now = rotating.connect_config().expect("both are there");
    assert_eq!(now.url.expose(), "postgres://u@first/d");
    assert_eq!(now.tls.mode, TlsMode::VerifyFull);
    // Spaces may be part of a password, line ends may not.
    assert_eq!(now.password.map(|password| password.expose().to_owned()).as_deref(), Some(" one two "));
    fs::write(&url_file, "postgres://u@second/d").expect("written");
    fs::write(&password_file, "three").expect("written");
    let now = rotating.connect_config().expect("both are there");
    assert_eq!((now.url.expose(), now.tls.mode), ("postgres://u@second/d", TlsMode::Prefer));
    assert_eq!(now.password.map(|password| password.expose().to_owned()).as_deref(), Some("three"));
    // What a file holds is never in an error.
    for (content, expected) in [
        ("\n", "is empty: write the secret into it"),
        ("mysql://u:hunter2@h/d", "cannot be read as a connection URL"),
        ("postgres://u:hunter2@h/d?sslmode=allow", "its sslmode is none of"),
    ] {
        fs::write(&url_file, content).expect("written");
        let text = error(&rotating);
        assert!(text.contains(expected) && !text.contains("hunter2"), "{text}");
    }
    fs::write(&url_file, [0xff, 0xfe]).expect("written");
    assert!(error(&rotating).ends_with("is not UTF-8 text"));
    // A section that asks for more than the file's URL wins no argument: it is one.
    let strict = database(&format!("{text}\n[database.tls]\nmode = \"verify-full\""));
    fs::write(&url_file, "postgres://u@h/d?sslmode=disable").expect("written");
    assert!(
        error(&strict)
            .ends_with("the URL's sslmode=disable contradicts database.tls.mode = \"verify-full\": keep one of them")
    );
    fs::write(&url_file, "postgres://u@h/d?sslmode=verify-full").expect("written");
    assert_eq!(strict.connect_config().expect("they agree").tls.mode, TlsMode::VerifyFull);
    // The password of its own.
    let own =
        config_with("", &[("KEIRO_RELAY__DATABASE__PASSWORD", "own")]).database.connect_config().expect("no files");
    assert_eq!(own.password.map(|password| password.expose().to_owned()).as_deref(), Some("own"));
    assert_eq!(own.url.expose(), "postgres://relay@db.example/app");
}

// ---- secrets never show ----

#[test]
fn planted_secrets_are_in_no_debug_text_no_page_and_no_problem() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("secret");
    fs::write(&file, "MARKER6").expect("written");
    let text = format!(
        "[database]\nurl = \"postgres://u:MARKER1@h/d\"\npassword = \"MARKER2\"\n[kafka]\nbrokers = [\"k:1\"]\n[kafka.properties]\n\
         sasl.password = \"MARKER3\"\nsasl.username = \"MARKER4\"\nclient.id = \"MARKER5\"\n[kafka.property_files]\n\
         ssl.key.password = \"{}\"\n",
        file.display()
    );
    let loaded =
        load_all(&text, &[], Overrides::new().set("--database-url", "database.url", "postgres://u:MARKER7@h/d"))
            .expect("right");
    let connection = loaded.config.database.connect_config().expect("readable");
    let properties = loaded.config.kafka.client_properties().expect("readable");
    let flags = Overrides::new().set("--database-url", "database.url", "postgres://u:MARKER7@h/d");
    let own = load_all("[database]\npassword = \"MARKER8\"", &[], Overrides::new()).expect("right");
    assert!(own.config.database.password.is_some());
    let shown = format!(
        "{own:?} {} {loaded:?} {connection:?} {properties:?} {flags:?} {} {}",
        own.to_toml(),
        loaded.to_toml(),
        connection.password.as_ref().map(ToString::to_string).unwrap_or_default()
    );
    assert!(!shown.contains("MARKER"), "{shown}");
    assert!(shown.contains("***"));

    // The same secrets in places where something is wrong.
    let wrong = [
        "[database]\nurl = 7\npassword = [\"MARKER\"]\n[kafka.properties]\nsasl.password = { x = \"MARKER\" }\n",
        "[database]\nulr = \"postgres://u:MARKER@h/d\"\nurl = \"postgres://u:MARKER@h:port/d\"\n",
        "[database]\nurl = \"postgres://MARKER:MARKER@h/d?MARKER=MARKER\"\n",
        "[database.url]\nMARKER = \"MARKER\"\n",
        "[kafka.properties]\nsasl.mechanism = \"MARKER\"\nsecurity.protocol = \"sasl_ssl\"\n",
        "[kafka.properties]\nsecurity.protocol = \"MARKER\"\nssl.key.pem = \"MARKER\"\ndebug = \"MARKER\"\nlinger.ms = \"MARKER\"\n",
        "[kafka.properties]\nsecurity.protocol = \"ssl\"\nssl.key.pem = \"MARKER\"\n",
        "[kafka.properties]\nsecurity.protocol = \"ssl\"\nssl.ca.location = \"MARKER\"\n",
        "[kafka.properties]\nsecurity.protocol = \"sasl_ssl\"\nsasl.mechanism = \"x,MARKER\"\n",
        "[kafka.properties]\ndebug = \"msg,MARKER\"\n",
        "[kafka.properties]\nacks = \"MARKER\"\nsasl.pasword = \"MARKER\"\n",
        "[kafka]\nbrokers = [\"sasl://u:MARKER@h:1\", \"k:1\"]\nsasl.password = \"MARKER\"\n",
        "[database]\npassword = \"MARKER\nx = 1\n",
    ];
    for text in wrong {
        let file = ConfigFile::Text { name: "t.toml", text };
        let problems = Loaded::from(file, Vec::new(), Overrides::new()).expect_err(text);
        let shown = format!("{problems} {problems:?}").replace("database.url.MARKER", "");
        assert!(!shown.contains("MARKER"), "{text}\n{shown}");
    }
    for (name, value) in [
        ("KEIRO_RELAY__DATABASE__PASWORD", "MARKER"),
        ("KEIRO_RELAY__DATABASE__URL", "MARKER"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES", "{ sasl.password = \"MARKER }"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES", "MARKER"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES__SASL_PASWORD", "MARKER"),
        ("KEIRO_RELAY__KAFKA__PROPERTIES__SECURITY_PROTOCOL", "MARKER"),
    ] {
        let problems = load_all("", &[(name, value)], Overrides::new()).expect_err(name);
        let shown = format!("{problems} {problems:?}");
        assert!(!shown.contains("MARKER"), "{name}\n{shown}");
    }
}

// ---- the hash of the policies ----

#[test]
fn the_policy_hash_is_pinned_and_moves_with_the_policies_only() {
    let hash = |text: &str| config(text).policy_hash();
    // Pinned: relays of two versions on one table compare it.
    assert_eq!(hash(""), "7b7242cd");
    assert_eq!(hash("[sources.\"Orders.EU\"]\npolicy = \"stop_the_line\"\non_halt = \"hold\""), "0a917f45");
    let changes = [
        "",
        "[defaults]\npolicy = \"best_effort\"",
        "[defaults]\npolicy = \"stop_the_line\"",
        "[defaults]\npolicy = \"stop_the_line\"\non_halt = \"hold\"",
        "[defaults]\nmax_attempts = 11",
        "[defaults.backoff]\nkind = \"constant\"",
        "[defaults.backoff]\ninitial = \"2s\"",
        "[defaults.backoff]\nmultiplier = 3",
        "[defaults.backoff]\nmax = \"61s\"",
        "[defaults.backoff]\njitter = 0.3",
        "[sources.a]\nmax_attempts = 11",
        "[sources.b]\nmax_attempts = 11",
        "[sources.A]\nmax_attempts = 11",
        "[sources.a]\nmax_attempts = 11\n[sources.b]\nmax_attempts = 11",
    ];
    let hashes: std::collections::BTreeSet<_> = changes.iter().map(|text| hash(text)).collect();
    assert_eq!(hashes.len(), changes.len());
    assert!(hashes.iter().all(|hash| hash.len() == 8 && hash.chars().all(|c| c.is_ascii_hexdigit())));
    // The same policies said otherwise, and what is no policy.
    for same in [
        "[sources.a]",
        "[sources.a]\nmax_attempts = 10",
        "[relay]\nbatch_rows_max = 7\ninstance = \"x\"",
        "[maintenance]\nretention = \"7d\"",
    ] {
        assert_eq!(hash(same), hash(""), "{same}");
    }
}

// ---- print and check ----

#[test]
fn print_shows_what_is_in_force_with_its_origin_and_loads_again() {
    let text = "[kafka]\nbrokers = [\"k:1\"]\n[defaults]\nmax_attempts = 20\n[sources.\"Orders.EU\"]\npolicy = \"stop_the_line\"\n[database]\ntable = \"o\"\n";
    let environment = pairs(&[
        ("KEIRO_RELAY__DATABASE__URL", "postgres://u:geheim@h/d?sslmode=require"),
        ("KEIRO_RELAY__MAINTENANCE__RETENTION", "36h"),
    ]);
    let flags = Overrides::new().set("--log-level", "log.level", "debug");
    let loaded = Loaded::from(ConfigFile::Text { name: "t.toml", text }, environment, flags).expect("it is right");
    let page = loaded.to_toml();
    for line in [
        "url = \"***\"  # env KEIRO_RELAY__DATABASE__URL",
        "# url_file is not set",
        "table = \"o\"  # t.toml:8",
        "mode = \"require\"  # the URL's sslmode",
        "brokers = [\"k:1\"]  # t.toml:2",
        "\"compression.codec\" = \"lz4\"  # default",
        "batch_bytes_max = \"8MiB\"  # default",
        "retention = \"1day 12h\"  # env KEIRO_RELAY__MAINTENANCE__RETENTION",
        "topic_fault_dead_after = \"off\"  # default",
        "[sources.\"Orders.EU\"]",
        "policy = \"stop_the_line\"  # t.toml:6",
        "on_halt = \"retry\"  # [defaults], default",
        "max_attempts = 20  # [defaults], t.toml:4",
        "[sources.\"Orders.EU\".backoff]",
        "level = \"debug\"  # flag --log-level",
    ] {
        assert!(page.lines().any(|printed| printed == line), "{line}\n{page}");
    }
    let again = page.replace("url = \"***\"", "url = \"postgres://u:geheim@h/d\"");
    let file = ConfigFile::Text { name: "again.toml", text: &again };
    let again =
        Loaded::from(file, Vec::new(), Overrides::new()).unwrap_or_else(|problems| panic!("{problems}\n{again}"));
    // All but where our defaults for librdkafka stand now.
    let mut config = again.config.clone();
    assert_eq!(
        format!("{:?}", again.config.kafka.client_properties().expect("no files").keys()),
        format!("{:?}", loaded.config.kafka.client_properties().expect("no files").keys())
    );
    config.kafka.properties.clear();
    assert_eq!(format!("{config:?}"), format!("{:?}", loaded.config));
    assert_eq!(again.config.policy_hash(), loaded.config.policy_hash());
}

#[test]
fn check_says_ok_with_warnings_or_every_problem_and_78() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("relay.toml");
    let check = |text: &str| {
        fs::write(&file, text).expect("written");
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code =
            cli::config::check(Some(&file), pairs(&NEEDED), Overrides::new(), &mut out, &mut err).expect("written");
        (code, String::from_utf8(out).expect("text"), String::from_utf8(err).expect("text"))
    };
    let (code, out, err) = check("");
    assert_eq!((code, out, err), (0, format!("ok: {}, policy hash 7b7242cd\n", file.display()), String::new()));
    let (code, out, err) = check("[relay]\nshutdown_grace = \"40s\"");
    assert_eq!((code, out.starts_with("ok: ")), (0, true));
    assert!(err.starts_with("warning: relay.shutdown_grace: is \"40s\""), "{err}");
    let (code, out, err) = check("[relay]\nbatch_rows_max = 0\nbatch_row_max = 0");
    assert_eq!((code, out.as_str()), (78, ""));
    assert_eq!(
        err,
        format!(
            "the configuration has 2 problems:\n  relay.batch_rows_max = 0 ({0}:2): must be a whole number from 1 to 10000\n  \
             relay.batch_row_max ({0}:3): unknown key; did you mean batch_rows_max?\n",
            file.display()
        )
    );
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = cli::config::print(Some(&file), pairs(&NEEDED), Overrides::new(), &mut out, &mut err).expect("written");
    assert_eq!((code, out.is_empty(), err.is_empty()), (78, true, false));
    fs::write(&file, "").expect("written");
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let code = cli::config::print(Some(&file), pairs(&NEEDED), Overrides::new(), &mut out, &mut err).expect("written");
    assert_eq!((code, err.is_empty()), (0, true));
    assert!(String::from_utf8(out).expect("text").contains("\n[maintenance]\n"));
}

// ---- the example file ----

const EXAMPLE: &str = include_str!("../../config/keiro-relay.toml");

/// The example with the # of every `#key = value` and `#[section]` taken off; prose has a space behind its #.
fn uncommented(keep: impl Fn(&str) -> bool) -> String {
    EXAMPLE
        .lines()
        .map(|line| match line.strip_prefix('#') {
            Some(setting) if !setting.starts_with(' ') && keep(setting) => setting,
            _ => line,
        })
        .collect::<Vec<_>>()
        .join("\n")
}

fn load_file(text: &str) -> Loaded {
    let file = ConfigFile::Text { name: "keiro-relay.toml", text };
    Loaded::from(file, Vec::new(), Overrides::new()).unwrap_or_else(|problems| panic!("{problems}"))
}

#[test]
fn the_example_file_loads_and_sets_only_what_it_says_it_does() {
    let loaded = load_file(EXAMPLE);
    assert_eq!(loaded.warnings, []);
    assert_eq!(loaded.config.maintenance.retention, Some(seconds(7 * 86_400)));
    let mut expected = config("");
    expected.database.url = loaded.config.database.url.clone();
    expected.kafka.brokers = loaded.config.kafka.brokers.clone();
    expected.maintenance.retention = loaded.config.maintenance.retention;
    expected.relay.instance.clone_from(&loaded.config.relay.instance);
    assert_eq!(format!("{:?}", loaded.config), format!("{expected:?}"));
    // Requirements 0.36.
    assert!(EXAMPLE.contains("Retention only bounds how long the history of what was published can be queried"));
}

#[test]
fn the_example_s_commented_settings_are_all_there_are_and_equal_the_defaults() {
    // Keys without a default have an example value in the comment.
    const NO_DEFAULT: [&str; 12] = [
        "url_file",
        "password_file",
        "password",
        "ca_file",
        "cert_file",
        "key_file",
        "instance",
        "\"security.protocol\"",
        "\"sasl.mechanism\"",
        "\"sasl.username\"",
        "\"sasl.password\"",
        "policy = \"stop_the_line\"",
    ];
    let text = uncommented(|setting| {
        !NO_DEFAULT.iter().any(|name| setting.starts_with(&format!("{name} ")) || setting == *name)
    });
    let loaded = load_file(&text.replace("on_halt = \"retry\"", ""));
    let mut expected = load_file(EXAMPLE).config;
    expected.sources.insert("billing".to_owned(), default_rules());
    expected.relay.instance.clone_from(&loaded.config.relay.instance);
    assert_eq!(format!("{:?}", loaded.config), format!("{expected:?}"));

    // Every key that `config print` knows stands in the example: with all of it uncommented, none is left to a default.
    let exclusive = ["url_file", "password_file"];
    let text = uncommented(|setting| !exclusive.iter().any(|name| setting.starts_with(&format!("{name} "))));
    let page = load_file(&text).to_toml();
    let ours = page
        .split("[kafka.properties]")
        .next()
        .expect("a page")
        .lines()
        .chain(page.split("[kafka.property_files]").nth(1).expect("a page").lines());
    let left: Vec<_> = ours.filter(|line| line.ends_with("default") || line.ends_with("is not set")).collect();
    // A default policy halts nothing, so [defaults] has no on_halt.
    let mut expected: Vec<String> = exclusive.iter().map(|name| format!("# {name} is not set")).collect();
    expected.push("# on_halt is not set".to_owned());
    assert_eq!(left, expected);
}
