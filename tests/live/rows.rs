//! Rows in states that nobody expects: each is sent, ends, or is shown to be waiting; none is silently idle, and none harms the others.

use crate::support::daemon::{Daemon, Setup, run_command};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, services, wait_until};

#[test]
fn every_state_is_sent_or_shown() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[maintenance]\ninterval = \"1s\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    let mut odd = Feed::new("odd", &topic, Order::None);
    // What can be sent although it looks odd …
    let sendable = [
        "attempt_count = 50",
        "status = 'failed', attempt_count = 0, last_error = null",
        "status = 'failed', attempt_count = -3, next_attempt_at = '-infinity'",
        "attempt_count = 9223372036854775000",
        "published_at = now() - interval '1 day', last_error = 'sent before, and set back by hand'",
        "created_at = 'infinity'",
        "created_at = '-infinity'",
        "created_at = now() + interval '30 years', updated_at = 'infinity'",
        "occurred_at = timestamptz '0001-01-01 00:00:00+00'",
    ];
    // … and what waits, each for somebody else.
    let waiting = [
        ("status = 'weird'", "unknown"),
        ("status = ''", "unknown"),
        ("status = 'PENDING'", "unknown"),
        ("next_attempt_at = 'infinity'", "pending"),
        ("status = 'failed', attempt_count = 1, next_attempt_at = '2999-01-01'", "failed"),
        ("status = 'publishing', attempt_count = 1, updated_at = now() + interval '1 year'", "publishing"),
        ("status = 'publishing', attempt_count = 1, updated_at = 'infinity'", "publishing"),
    ];
    let mut statements = format!("begin; {};", odd.statement(sendable.len() + waiting.len() + 1, 0));
    for (row, set) in sendable.iter().copied().chain(waiting.iter().map(|(set, _)| *set)).enumerate() {
        statements.push_str(&format!("update keiro.keiro_outbox set {set} where {};", odd.row(row)));
    }
    session.execute(&format!("{statements} commit"));
    // An unknown status blocks its lane: one key of several, or a whole stream.
    let (mut keyed, mut stream) = (Feed::new("keyed", &topic, Order::Key), Feed::new("stream", &topic, Order::Source));
    keyed.insert_in(&mut session, 12, 3);
    stream.insert_in(&mut session, 12, 3);
    session.execute(&format!(
        "update keiro.keiro_outbox set status = 'weird' where {} or {}",
        keyed.row(4),
        stream.row(4)
    ));

    let mut daemon = Daemon::start(&setup);
    let sent = sendable.len() + 1;
    wait_until("what can be sent to be sent", LONG, || session.rows("source = 'odd' and status = 'sent'") == sent);
    wait_until("the free keys to be sent", LONG, || session.rows("source = 'keyed' and status = 'sent'") == 9);
    wait_until("the stream's beginning to be sent", LONG, || {
        session.rows("source = 'stream' and status = 'sent'") == 4
    });
    let count = |status: &str| waiting.iter().filter(|(_, shown)| *shown == status).count();
    for status in ["unknown", "pending", "failed", "publishing"] {
        let series = format!("keiro_relay_backlog_rows{{source=\"odd\",status=\"{status}\"}}");
        wait_until(&series, LONG, || daemon.metric(&series) == Some(count(status) as f64));
    }
    let said = run_command(&setup, &["status", "--json"], "").stdout;
    let said: serde_json::Value = serde_json::from_str(&said).expect("one object");
    let of = |name: &str| {
        let sources = said["sources"].as_array().expect("a list");
        sources.iter().find(|source| source["source"] == name).cloned().expect("the source")
    };
    for status in ["unknown", "pending", "failed", "publishing"] {
        assert_eq!(of("odd")[status], count(status), "{status}: {said}");
    }
    assert_eq!(of("odd")["sent"], sent);
    assert_eq!((&of("keyed")["unknown"], &of("keyed")["pending"]), (&1.into(), &2.into()), "{said}");
    assert_eq!((&of("stream")["unknown"], &of("stream")["pending"]), (&1.into(), &7.into()), "{said}");
    // Nobody works on a lane that an unknown status blocks, and it is no fault of the relay's.
    daemon.wait_http_ok("/readyz", LONG);
    // Nothing of it was touched.
    assert_eq!(session.rows("status in ('weird', '', 'PENDING')"), 5);

    // Once somebody mends it, the lane goes on.
    session.execute("update keiro.keiro_outbox set status = 'pending' where status = 'weird'");
    wait_until("the lanes to go on", LONG, || session.rows("source in ('keyed', 'stream') and status <> 'sent'") == 0);
    // The mended row of the other source is among what is judged below.
    wait_until("the mended row to be sent", LONG, || session.rows("source = 'odd' and status = 'sent'") == sent + 1);
    let without: Vec<usize> = (sendable.len() + 1..sendable.len() + waiting.len()).collect();
    let expected = [keyed.expected(), stream.expected(), &odd.expected_without(&without)].concat();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert!(daemon.is_running());
}

#[test]
fn row_that_changes_or_goes_while_it_is_published_is_left_alone() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    feed.insert_in(&mut session, 400, 1);
    let mut daemon = Daemon::start(&setup);
    // A hot key keeps a batch in publishing for a while.
    wait_until("a batch to be in flight", LONG, || session.rows("status = 'publishing'") > 50);
    session.execute(
        "with ours as (select outbox_id, row_number() over (order by created_at desc) as n from keiro.keiro_outbox where status = 'publishing' limit 30), \
         gone as (delete from keiro.keiro_outbox where outbox_id in (select outbox_id from ours where n <= 5)) \
         update keiro.keiro_outbox set status = 'dead', last_error = 'somebody else' where outbox_id in (select outbox_id from ours where n between 6 and 10)",
    );
    wait_until("the rest to be sent", LONG, || session.rows("status not in ('sent', 'dead')") == 0);
    assert_eq!(session.rows("status = 'dead' and last_error = 'somebody else' and published_at is null"), 5);
    assert_eq!(session.statuses("true"), "dead=5 sent=390");
    wait_until("it to be counted", LONG, || {
        daemon.metric("keiro_relay_stale_settlements_total{source=\"keyed\"}") == Some(10.0)
    });
    // They were on their way already.
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
    // A lane whose settlement was lost goes on.
    feed.insert_in(&mut session, 10, 1);
    wait_until("the lane to go on", LONG, || session.rows("status = 'sent'") == 400);
    assert!(daemon.is_running());
}
