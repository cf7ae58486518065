//! `stop_the_line`: one failure halts the source, and names the row everywhere a person would look.

use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::mock::Mock;
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{Admin, read_topic, read_topic_on};
use crate::support::{LONG, services, unique, wait_until};

const OTHERS: &str = "[sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n";

fn line(rules: &str) -> String {
    format!("[sources.line]\npolicy = \"stop_the_line\"\n{rules}\n{OTHERS}")
}

fn command(setup: &Setup<'_>, arguments: &[&str], code: i32) -> Finished {
    let finished = run_command(setup, arguments, "");
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

/// What `status --json` says of a source.
fn status(setup: &Setup<'_>, source: &str) -> serde_json::Value {
    let said: serde_json::Value =
        serde_json::from_str(&command(setup, &["status", "--json"], 0).stdout).expect("one object");
    let sources = said["sources"].as_array().expect("a list").clone();
    sources.into_iter().find(|found| found["source"] == source).unwrap_or_else(|| panic!("no {source} in {said}"))
}

/// What `/status` says of a source.
fn shown(daemon: &Daemon, source: &str) -> serde_json::Value {
    let status = daemon.json("/status");
    let sources = status["sources"].as_array().expect("a list").clone();
    sources.into_iter().find(|found| found["source"] == source).unwrap_or_default()
}

fn halted(daemon: &Daemon) -> Option<f64> {
    daemon.metric("keiro_relay_source_halted{source=\"line\"}")
}

/// Rows of the halted source, keys and null keys, and of another one.
fn feeds(session: &mut Session, topic: &str) -> (Feed, Feed) {
    let (mut line, mut free) = (Feed::new("line", topic, Order::Source), Feed::new("free", topic, Order::None));
    line.insert_in(session, 6, 3);
    line.insert_in(session, 4, 0);
    free.insert_in(session, 1, 0);
    (line, free)
}

/// Everything of the source waits for its first row, and other sources go on.
#[track_caller]
fn assert_nothing_moves(session: &mut Session, free: &mut Feed, first: &str) {
    // Twenty rows one after the other, each after the other's turn: time enough for anything that would move.
    for _ in 0..20 {
        free.insert_in(session, 1, 0);
        wait_until("another source to go on", LONG, || session.rows("source = 'free' and status <> 'sent'") == 0);
    }
    assert_eq!(session.statuses("source = 'line'"), "failed=10");
    let rest = format!("source = 'line' and outbox_id <> '{first}' and attempt_count <> 0");
    assert_eq!(session.rows(&rest), 0, "the others were never tried");
}

#[test]
fn failure_halts_the_source_until_the_row_is_due_or_somebody_resumes_it() {
    let topic = unique("topic");
    let mock = Mock::new(&[&topic]);
    let brokers = mock.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    let sections = line("[sources.line.backoff]\nkind = \"constant\"\ninitial = \"1h\"\nmax = \"1h\"\n");
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    mock.fail_next(1);
    let mut line = Feed::new("line", &topic, Order::Source);
    line.insert_in(&mut session, 6, 3);
    line.insert_in(&mut session, 4, 0);
    let first = session.value(&format!("select outbox_id from keiro.keiro_outbox where {}", line.row(0)));

    let mut daemon = Daemon::start(&setup);
    wait_until("the source to be halted", LONG, || halted(&daemon) == Some(1.0));
    let mut free = Feed::new("free", &topic, Order::None);
    assert_nothing_moves(&mut session, &mut free, &first);

    // Everywhere a person would look.
    let seen = shown(&daemon, "line");
    assert_eq!((&seen["halted_on"], &seen["halt"]["kind"]), (&first.as_str().into(), &"failing".into()), "{seen}");
    assert!(seen["halt"]["reason"].as_str().is_some_and(|why| why.starts_with("kafka.unknown: ")), "{seen}");
    assert!(daemon.stderr().lines().any(|line| line.contains("source halted") && line.contains(&first)));
    daemon.wait_http_ok("/readyz", LONG);
    let seen = status(&setup, "line");
    assert_eq!(seen["halted_on"], first, "{seen}");
    assert_eq!((&seen["failed"], &seen["policy"]), (&10.into(), &"stop_the_line".into()), "{seen}");
    assert_eq!(status(&setup, "free")["halted_on"], serde_json::Value::Null);
    // Another relay does not move it either, and a drain says why it is not done.
    let drained: serde_json::Value =
        serde_json::from_str(&command(&setup, &["drain", "--json"], 1).stdout).expect("one object");
    assert_eq!(drained["halted_on"], serde_json::json!([{ "source": "line", "outbox_id": first }]), "{drained}");
    assert_eq!((&drained["claimed"], &drained["sent"]), (&0.into(), &0.into()), "{drained}");

    command(&setup, &["resume", "free"], 0);
    command(&setup, &["resume", "nobody"], 3);
    let resumed = command(&setup, &["resume", "line", "--json"], 0);
    let resumed: serde_json::Value = serde_json::from_str(&resumed.stdout).expect("one object");
    assert_eq!(
        resumed,
        serde_json::json!({ "source": "line", "outbox_id": first, "resumed": true, "was_paused": false })
    );
    wait_until("the source to move again", LONG, || session.rows("source = 'line' and status = 'sent'") == 10);
    wait_until("the gauge to say so", LONG, || halted(&daemon) == Some(0.0));
    assert_eq!(shown(&daemon, "line")["halted_on"], serde_json::Value::Null);
    assert!(daemon.stderr().contains("source moves again"), "{}", daemon.stderr());
    assert_eq!(session.rows("source = 'line' and attempt_count = 2"), 1, "only the row that failed spent an attempt");
    command(&setup, &["resume", "line"], 3);
    judge(&read_topic_on(&brokers, &topic), &[line.expected(), free.expected()].concat()).assert_delivered(0);
}

#[test]
fn failing_row_is_tried_again_when_it_is_due_and_dies_at_last() {
    let topic = unique("topic");
    let mock = Mock::new(&[&topic]);
    let brokers = mock.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    let sections =
        line("max_attempts = 3\n[sources.line.backoff]\nkind = \"constant\"\ninitial = \"300ms\"\njitter = 0.0\n");
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    let mut line = Feed::new("line", &topic, Order::Source);
    line.insert_in(&mut session, 10, 3);
    mock.fail_next(3);
    let daemon = Daemon::start(&setup);
    wait_until("the rest to be sent", LONG, || session.statuses("source = 'line'") == "dead=1 sent=9");
    let dead = session.value(
        "select message_id || ' ' || attempt_count || ' ' || last_error from keiro.keiro_outbox where status = 'dead'",
    );
    assert!(dead.starts_with(&format!("{} 3 kafka.unknown: ", line.id(0))), "{dead}");
    assert_eq!(session.rows("status = 'sent' and attempt_count <> 1"), 0);
    wait_until("the gauge to say so", LONG, || halted(&daemon) == Some(0.0));
    // One state change, however often it was tried.
    assert_eq!(daemon.stderr().matches("source halted").count(), 1, "{}", daemon.stderr());
    judge(&read_topic_on(&brokers, &topic), &line.expected_without(&[0])).assert_delivered(0);
}

#[test]
fn held_source_waits_for_a_person_over_restarts_and_its_row_never_dies() {
    let topic = unique("topic");
    let mock = Mock::new(&[&topic]);
    let brokers = mock.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    let sections = line("on_halt = \"hold\"\nmax_attempts = 1\n");
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    let (line, mut free) = {
        mock.fail_next(1);
        let mut line = Feed::new("line", &topic, Order::Source);
        line.insert_in(&mut session, 10, 0);
        (line, Feed::new("free", &topic, Order::None))
    };
    let first = session.value(&format!("select outbox_id from keiro.keiro_outbox where {}", line.row(0)));
    let mut daemon = Daemon::start(&setup);
    wait_until("the source to be held", LONG, || halted(&daemon) == Some(1.0));
    assert_nothing_moves(&mut session, &mut free, &first);
    assert_eq!(shown(&daemon, "line")["halt"]["kind"], "held");
    let log = daemon.stderr();
    assert!(
        log.lines().any(|line| line.contains("until somebody acts") && line.contains("ERROR") && line.contains(&first))
    );

    for n in 1..=2 {
        daemon.kill();
        daemon = Daemon::start(&setup);
        wait_until("the next relay to see it", LONG, || halted(&daemon) == Some(1.0));
        assert_nothing_moves(&mut session, &mut free, &first);
        let seen = shown(&daemon, "line");
        assert_eq!((&seen["halted_on"], &seen["halt"]["kind"]), (&first.as_str().into(), &"held".into()), "{seen}");
        assert_eq!(status(&setup, "line")["halted_on"], first);
        let said = command(&setup, &["resume", "line", "--dry-run"], 0).stdout;
        assert!(said.contains(&first), "{said}");
        assert_eq!(session.rows(&format!("outbox_id = '{first}' and next_attempt_at >= '9000-01-01'")), 1);
        if n == 1 {
            // It fails again: held again, and alive although it may be tried only once.
            mock.fail_next(1);
            command(&setup, &["resume", "line"], 0);
            wait_until("it to be held again", LONG, || {
                session
                    .rows(&format!("outbox_id = '{first}' and attempt_count = 2 and next_attempt_at >= '9000-01-01'"))
                    == 1
            });
        }
    }
    command(&setup, &["resume", "line"], 0);
    wait_until("the source to move again", LONG, || session.rows("source = 'line' and status = 'sent'") == 10);
    judge(&read_topic_on(&brokers, &topic), &[line.expected(), free.expected()].concat()).assert_delivered(0);
    assert!(daemon.is_running());
}

/// The policy was another one when its row failed: nothing but a person makes that row due, so a person must see it and be able to.
#[test]
fn row_held_under_an_earlier_policy_is_shown_and_resumed() {
    let database = fresh_database(Table::Lean);
    let mut session = Session::open(&database);
    let setup = Setup { database_url: database.url(), brokers: "127.0.0.1:1", ..Setup::default() };
    Feed::new("line", "topic", Order::Key).insert_in(&mut session, 3, 2);
    let held = "source = 'line' and attempt_count = 1";
    session.execute(
        "update keiro.keiro_outbox set status = 'failed', attempt_count = 1, last_error = 'kafka.unknown: broker', \
         next_attempt_at = '9000-01-01' where outbox_id = (select outbox_id from keiro.keiro_outbox order by outbox_id desc limit 1)",
    );
    let row = session.value(&format!("select outbox_id from keiro.keiro_outbox where {held}"));
    assert_eq!(status(&setup, "line")["halted_on"], row);
    let said = command(&setup, &["resume", "line", "--dry-run"], 0).stdout;
    assert!(said.contains(&row), "{said}");
    command(&setup, &["resume", "line"], 0);
    assert_eq!(session.rows(&format!("{held} and next_attempt_at <= now()")), 1);
    assert_eq!(status(&setup, "line")["halted_on"], serde_json::Value::Null);
}

#[test]
fn missing_topic_halts_the_source_and_costs_no_attempt() {
    let database: Database = fresh_database(Table::NewerShared);
    let (topic, missing) = (unique("topic"), unique("missing"));
    Admin::new(services::brokers()).create(&topic, 1, &[]);
    let mut session = Session::open(&database);
    let sections = line("on_halt = \"hold\"\n");
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: &sections, ..Setup::default() };
    let (line, mut free) = feeds(&mut session, &topic);
    session.execute(&format!("update keiro.keiro_outbox set destination = '{missing}' where {}", line.row(0)));
    let first = session.value(&format!("select outbox_id from keiro.keiro_outbox where {}", line.row(0)));
    let mut daemon = Daemon::start(&setup);
    wait_until("the source to be halted", LONG, || halted(&daemon) == Some(1.0));
    assert_nothing_moves(&mut session, &mut free, "00000000-0000-0000-0000-000000000000");
    let seen = shown(&daemon, "line");
    // Not held, although a failure of the row would be: it goes on by itself.
    assert_eq!((&seen["halted_on"], &seen["halt"]["kind"]), (&first.as_str().into(), &"topic_parked".into()), "{seen}");
    // The broker's side is looked at once a second.
    wait_until("the topic to be shown", LONG, || daemon.json("/status")["parked_topics"][0]["topic"] == missing);
    assert_eq!(status(&setup, "line")["halted_on"], first);
    daemon.wait_http_ok("/readyz", LONG);
    Admin::new(services::brokers()).create(&missing, 1, &[]);
    wait_until("the source to move", LONG, || session.rows("source = 'line' and status = 'sent'") == 10);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    wait_until("the gauge to say so", LONG, || halted(&daemon) == Some(0.0));
    let errors: Vec<String> =
        daemon.stderr().lines().filter(|line| line.contains("\"ERROR\"")).map(str::to_owned).collect();
    assert_eq!(errors, [""; 0], "a topic that will be there is nobody's emergency");
    let records = [read_topic(&missing), read_topic(&topic)].concat();
    judge(&records, &[line.expected(), free.expected()].concat()).assert_delivered(0);
    assert!(daemon.is_running());
}
