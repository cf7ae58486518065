//! What a person or a machine sees of a relay at work: and what nobody may ever see there.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::support::daemon::{Daemon, Setup, run_command};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::mock::Mock;
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, services, unique, wait_until};

#[test]
fn nothing_of_a_row_and_no_secret_reaches_logs_metrics_status_or_errors() {
    const MARK: &str = "zebra-mark";
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[("max.message.bytes", "5000")]);
    let mock_topic = unique("topic");
    let user = unique("relay");
    database.execute(&format!(
        "create role {user} login password '{MARK}-password'; grant usage on schema keiro to {user}; grant select, update, \
         delete on keiro.keiro_outbox to {user}; grant pg_read_all_stats to {user}"
    ));
    let url = database.url().replace("postgres@", &format!("{user}:{MARK}-password@"));
    let sections = "[log]\nlevel = \"trace\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n[maintenance]\ninterval = \"1s\"\n\n\
                    [defaults]\nmax_attempts = 2\n\n[defaults.backoff]\ninitial = \"100ms\"\n";
    let kafka = "message_bytes_max = \"10KiB\"\n\n[kafka.properties]\n\"ssl.key.password\" = \"zebra-mark-key\"\n\"client.id\" = \"relay\"\n";
    let setup = Setup { database_url: &url, brokers: services::brokers(), sections, kafka, ..Setup::default() };
    let mut session = Session::open(&database);
    // Everything of a row that is a user's: payload, key, attributes, every header's value.
    let marked = format!(
        "message_key = '{MARK}-key', payload_bytes = convert_to('{MARK}-payload', 'UTF8'), attributes = '{{\"{MARK}\": \"{MARK}\"}}', \
         event_type = '{MARK}', content_type = '{MARK}', schema_registry = '{MARK}', schema_subject = '{MARK}', \
         schema_fingerprint = '{MARK}', traceparent = '{MARK}', tracestate = '{MARK}', message_id = message_id || '-{MARK}'"
    );
    let mut feeds: Vec<Feed> =
        [("keyed", Order::Key), ("line", Order::Source)].map(|(source, order)| Feed::new(source, &topic, order)).into();
    for feed in &mut feeds {
        let statements = [
            feed.statement(12, 3),
            format!("update keiro.keiro_outbox set destination = 'not legal' where {}", feed.row(2)),
            format!("update keiro.keiro_outbox set occurred_at = 'infinity' where {}", feed.row(3)),
            format!("update keiro.keiro_outbox set {marked} where {}", feed.mine()),
            format!(
                "update keiro.keiro_outbox set payload_bytes = convert_to('{MARK}', 'UTF8') || (select decode(string_agg(md5(random()::text || n), ''), 'hex') \
                 from generate_series(1, 560) n) where message_id like '{}-000005%'",
                feed.source
            ),
            format!(
                "update keiro.keiro_outbox set payload_bytes = convert_to(repeat('{MARK}', 9000), 'UTF8') where message_id like '{}-000006%'",
                feed.source
            ),
            format!(
                "update keiro.keiro_outbox set destination = 'missing-topic' where message_id like '{}-000009%'",
                feed.source
            ),
        ];
        session.execute(&format!("begin; {}; commit", statements.join(";")));
    }
    let mut seen = String::new();
    let daemon = Daemon::start(&setup);
    wait_until("the verdicts", LONG, || {
        session.rows("status = 'rejected'") == 8 && session.rows("last_error like 'kafka.unknown_topic%'") >= 2
    });
    wait_until("the slow timer", LONG, || {
        daemon.metric("keiro_relay_backlog_rows{source=\"line\",status=\"rejected\"}") == Some(4.0)
    });
    for path in ["/metrics", "/status", "/readyz", "/livez", "/"] {
        seen.push_str(&daemon.http_get(path).expect(path).body);
    }
    for arguments in [
        &["status", "--json"][..],
        &["status"],
        &["config", "print"],
        &["config", "check"],
        &["drain"],
        &["health"],
        &["resume", "line"],
    ] {
        let finished = run_command(&setup, arguments, "");
        seen.push_str(&finished.stdout);
        seen.push_str(&finished.stderr);
    }
    // Connections that are cut, and a password that is wrong, write more.
    session.execute(&format!("alter role {user} password '{MARK}-new-password'"));
    session.value(&format!("select count(pg_terminate_backend(pid)) from pg_stat_activity where usename = '{user}'"));
    wait_until("the cut to be noticed", LONG, || daemon.stderr().contains("a database connection ended"));
    seen.push_str(&daemon.json("/status").to_string());
    seen.push_str(&daemon.stderr());
    seen.push_str(&daemon.stdout());
    drop(daemon);

    // Failures that nobody can explain, on a broker that makes them.
    let mock = Mock::new(&[&mock_topic]);
    mock.fail_next(1_000);
    session.execute(&format!(
        "alter role {user} password '{MARK}-password'; update keiro.keiro_outbox set destination = '{mock_topic}'"
    ));
    let brokers = mock.bootstrap();
    let daemon = Daemon::start(&Setup { brokers: &brokers, ..setup });
    wait_until("rows to be dead", LONG, || session.rows("status = 'dead'") > 0);
    seen.push_str(&daemon.json("/status").to_string());
    seen.push_str(&daemon.stderr());
    seen.push_str(
        &session
            .values("select concat_ws(' ', last_error, rejection_code, rejection_detail) from keiro.keiro_outbox")
            .join("\n"),
    );
    let lines: Vec<&str> = seen.lines().filter(|line| line.contains(MARK) || line.contains("zebra")).collect();
    assert!(lines.is_empty(), "{lines:#?}");
    // The search would find something: this is what it looked through.
    for text in [
        "kafka.invalid_topic",
        "row.invalid_timestamp",
        "kafka.message_too_large",
        "kafka.unknown_topic",
        "kafka.unknown: ",
        "stop_the_line",
    ] {
        assert!(seen.contains(text), "{text} was not seen: {seen}");
    }
}

#[test]
fn status_metrics_and_health_tell_what_is_there() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let sections = "[relay]\ninstance = \"relay-1\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n[maintenance]\ninterval = \"1s\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feed = Feed::new("line", &topic, Order::Source);
    session.execute(&format!(
        "begin; {}; update keiro.keiro_outbox set destination = '!' where {}; update keiro.keiro_outbox set next_attempt_at = \
         now() + interval '1 hour' where {}; commit",
        feed.statement(10, 0),
        feed.row(2),
        feed.row(6)
    ));
    let mut daemon = Daemon::start(&setup);
    wait_until("what can be sent to be sent", LONG, || session.statuses("true") == "pending=4 rejected=1 sent=5");
    daemon.wait_http_ok("/readyz", LONG);
    wait_until("the backlog to be shown", LONG, || {
        daemon.metric("keiro_relay_backlog_rows{source=\"line\",status=\"rejected\"}") == Some(1.0)
    });
    let status = daemon.json("/status");
    assert_eq!((&status["instance"], &status["live"]), (&"relay-1".into(), &true.into()), "{status}");
    assert_eq!(status["ready"]["ready"], true, "{status}");
    let line = status["sources"][0].clone();
    for (field, value) in
        [("source", "line".into()), ("pending", 4.into()), ("rejected", 1.into()), ("dead", serde_json::Value::from(0))]
    {
        assert_eq!(line[field], value, "{field} in {status}");
    }
    // A row that was put off is not waiting for us, and its source is not halted by a failure.
    assert_eq!(
        (&line["halted_on"], &line["oldest_ready_age_seconds"]),
        (&serde_json::Value::Null, &serde_json::Value::Null)
    );
    assert!(line["oldest_age_seconds"].as_f64().is_some_and(|age| age > 1000.0), "by created_at: {line}");
    assert_eq!(daemon.json("/livez")["live"], true);
    assert_eq!(daemon.http_get("/nowhere").map(|answer| answer.status), Some(404));
    let page = daemon.http_get("/").expect("the page");
    assert!(page.status == 200 && page.body.contains("/readyz"), "{page:?}");

    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    for name in [
        "backlog_rows",
        "oldest_age_seconds",
        "oldest_ready_age_seconds",
        "rows_total",
        "stale_settlements_total",
        "overtaken_total",
        "duplicates_possible_total",
        "errors_total",
        "claim_duration_seconds",
        "publish_duration_seconds",
        "settle_duration_seconds",
        "end_to_end_seconds",
        "claim_rows",
        "in_flight_rows",
        "in_flight_bytes",
        "source_halted",
        "topic_parked",
        "unrouted_rows",
        "producer_rebuilds_total",
        "retention_deleted_total",
        "last_success_timestamp_seconds",
        "sample_capped",
        "policy_info",
        "build_info",
    ] {
        assert!(metrics.contains(&format!("# TYPE keiro_relay_{name} ")), "{name} is not in {metrics}");
    }
    assert!(!metrics.contains(&feed.id(0)) && !metrics.contains("k0\""), "{metrics}");

    // `health` asks the configured address: a copy of this relay's configuration.
    let config = std::fs::read_to_string(daemon.config()).expect("its configuration");
    let file = daemon.config().with_file_name("copy.toml");
    std::fs::write(&file, config).expect("write");
    let health = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keiro-relay"));
        command.arg("health").args(arguments).arg("--config").arg(&file).stdin(Stdio::null());
        command.output().expect("run it").status.code()
    };
    assert_eq!((health(&[]), health(&["--ready"])), (Some(0), Some(0)));
    daemon.signal("TERM");
    daemon.wait(LONG);
    assert_eq!((health(&[]), health(&["--ready"])), (Some(1), Some(1)));
}

/// A disk that is full, or a log collector that died, must not stop the relay.
#[test]
fn log_that_cannot_be_written_stops_nothing() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        sections: "[log]\nlevel = \"debug\"\n",
        ..Setup::default()
    };
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    let directory = tempfile::tempdir().expect("a directory");
    let config = directory.path().join("relay.toml");
    std::fs::write(&config, setup.toml(0)).expect("write");
    let full = || Stdio::from(File::options().write(true).open("/dev/full").expect("/dev/full"));
    let closed = || {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        Stdio::from(writer)
    };
    let sinks: [fn() -> Stdio; 2] = [full, closed];
    for sink in sinks {
        let mut command = Command::new(env!("CARGO_BIN_EXE_keiro-relay"));
        command.arg("run").arg("--config").arg(&config).stdin(Stdio::null()).stdout(sink()).stderr(sink());
        let mut relay = command.spawn().expect("start it");
        feed.insert_in(&mut session, 50, 5);
        wait_until("its rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
        assert_eq!(relay.try_wait().expect("look at it"), None, "it ended");
        let id = nix::unistd::Pid::from_raw(i32::try_from(relay.id()).expect("a process id"));
        nix::sys::signal::kill(id, nix::sys::signal::Signal::SIGTERM).expect("signal it");
        assert_eq!(relay.wait().expect("its end").code(), Some(0));
    }
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
}
