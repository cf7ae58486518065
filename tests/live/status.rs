//! `status` as a person reads it, once and again and again.

use std::time::Duration;

use keiro_relay::store::migrate;
use serde_json::{Value, json};

use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::session::Session;
use crate::support::store::db;
use crate::support::topics::fresh_topic;
use crate::support::{LONG, run, services, unique, wait_until};

const SECTIONS: &str = "[relay]\ninstance = \"relay-1\"\n\n[sources.line]\npolicy = \"stop_the_line\"\non_halt = \"hold\"\n\n\
                        [maintenance]\ninterval = \"1s\"\n";

fn migrated(table: Table) -> Database {
    let database = fresh_database(table);
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await).expect("migrate");
    database
}

#[track_caller]
fn command(setup: &Setup<'_>, arguments: &[&str], code: i32) -> Finished {
    let finished = run_command(setup, arguments, "");
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

/// What the command says with the daemon's own configuration, so that it knows where the daemon listens.
#[track_caller]
fn beside(daemon: &Daemon, setup: &Setup<'_>, arguments: &[&str]) -> String {
    let address = daemon.http_address();
    let environment = [("KEIRO_RELAY__HTTP__LISTEN", address.as_str())];
    command(&Setup { environment: &environment, ..*setup }, arguments, 0).stdout
}

#[track_caller]
fn assert_readable(text: &str) {
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{} columns: {line}", line.chars().count());
        assert!(!line.chars().any(|c| c.is_control() || c == '\u{202e}'), "{line:?}");
    }
}

#[test]
fn status_says_what_is_blocked_and_by_what() {
    let database = migrated(Table::NewerShared);
    let (topic, missing) = (fresh_topic(1, &[]), unique("missing"));
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: SECTIONS, ..Setup::default() };
    assert_eq!(command(&setup, &["status"], 0).stdout.lines().next(), Some("nothing waits"));

    let mut session = Session::open(&database);
    let odd = format!("odd\u{1b}[2J\u{202e}\n{}", "long".repeat(30));
    for (source, topic) in [("keyed", &topic), (&odd, &missing), ("paused", &topic)] {
        Feed::new(source, topic, Order::Key).insert_in(&mut session, 6, 2);
    }
    session.execute(
        "update keiro.keiro_outbox set status = 'weird' where source = 'keyed' and message_id like '%0'; \
         update keiro.keiro_outbox set status = 'dead', attempt_count = 9223372036854775807, next_attempt_at = 'infinity' \
         where source = 'keyed' and message_id like '%1'; \
         update keiro.keiro_outbox set created_at = '-infinity', outbox_id = '00000000-0000-0000-0000-000000000000' \
         where source = 'paused' and message_id like '%0'",
    );
    Feed::new("line", &topic, Order::Source).insert_in(&mut session, 3, 1);
    session.execute(
        "update keiro.keiro_outbox set status = 'failed', attempt_count = 1, next_attempt_at = '9000-01-01', last_error = E'kafka.odd:\\x1b[31m broker' \
         where source = 'line' and message_id like '%0'",
    );
    let long = "because ".repeat(90);
    command(&setup, &["pause", "paused", "--reason", &long, "--for", "2h"], 0);
    command(&setup, &["pause", "keyed", "--key", "k\u{1b}1"], 0);
    command(&setup, &["pause", "--topic", "elsewhere"], 0);
    command(&setup, &["pause", "nobody"], 0);

    let alone = command(&setup, &["status"], 0).stdout;
    assert_readable(&alone);
    for part in [
        "relay: unknown (no answer from http://127.0.0.1:",
        "halted (held) on ",
        "kafka.odd:\\u{1b}[31m broker",
        "paused since 20",
        "by postgres, until 20",
        "paused lane \"k\\u{1b}1\" since 20",
        "topic \"elsewhere\": paused since 20",
        "source \"nobody\" (no rows): paused since 20",
        "1 rows in a status nobody knows are never sent; in an ordered lane they hold back the rest",
        "parked topics, breakers: unknown, only a running relay knows them",
        "keeping up, 19 rows wait, the oldest ready one for ",
    ] {
        assert!(alone.contains(part), "{part:?} is not in\n{alone}");
    }

    session.execute(&format!(
        "update keiro.keiro_outbox set next_attempt_at = now() - interval '1 hour 1 min 10 s' where destination = '{missing}'"
    ));
    let late = command(&setup, &["status"], 0).stdout;
    assert!(late.contains("BEHIND, 19 rows wait, the oldest ready one for "), "{late}");

    let mut daemon = Daemon::start(&setup);
    daemon.wait_http_ok("/livez", LONG);
    wait_until("the topic to be parked", LONG, || {
        daemon.json("/status")["parked_topics"][0]["topic"] == json!(missing)
    });
    wait_until("what may go to be sent", LONG, || {
        session.statuses("source = 'keyed'") == "dead=1 sent=2 weird=1"
            || session.rows("source = 'keyed' and status = 'pending'") < 4
    });
    let together = beside(&daemon, &setup, &["status"]);
    assert_readable(&together);
    for part in ["relay relay-1 0.1.0: ", "rows in flight", &format!("topic {missing:?}: parked since 20")] {
        assert!(together.contains(part), "{part:?} is not in\n{together}");
    }
    assert!(!together.contains("unknown, only a running"), "{together}");
    let said: Value = serde_json::from_str(&beside(&daemon, &setup, &["status", "--json"])).expect("one object");
    assert_eq!(said["relay"]["instance"], json!("relay-1"), "{said}");
    assert_eq!(said["parked_topics"][0]["topic"], json!(missing));
    assert_eq!(said["paused"].as_array().map(Vec::len), Some(4));
    let paused =
        said["sources"].as_array().expect("a list").iter().find(|source| source["source"] == "paused").expect("it");
    assert_eq!((&paused["paused"], &paused["oldest_ready_age_seconds"]), (&json!(true), &Value::Null));
    // Another program answers there.
    daemon.kill();
    let kafka = services::brokers().split(',').next().expect("a broker").to_owned();
    let environment = [("KEIRO_RELAY__HTTP__LISTEN", kafka.as_str())];
    assert!(command(&Setup { environment: &environment, ..setup }, &["status"], 0).stdout.contains("relay: unknown ("));
}

#[test]
fn watch_looks_again_until_it_is_stopped() {
    let database = fresh_database(Table::Lean);
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: SECTIONS, ..Setup::default() };
    for (arguments, mark) in
        [(&["status", "--watch", "1"][..], "nothing waits\n"), (&["status", "--json", "--watch", "1"], "{\"at\"")]
    {
        let mut watch = Daemon::start_as(&setup, arguments);
        wait_until("three looks", LONG, || watch.stdout().matches(mark).count() >= 3);
        watch.signal("INT");
        assert_eq!(watch.wait(Duration::from_secs(20)).code(), Some(0), "{}", watch.stderr());
        assert!(!watch.stdout().contains('\u{1b}'), "nobody redraws a pipe");
        if mark.starts_with('{') {
            assert!(watch.stdout().lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
        }
    }
    for bad in [&["status", "--watch", "0"][..], &["status", "--watch", "soon"], &["status", "now"]] {
        command(&setup, bad, 64);
    }
}
