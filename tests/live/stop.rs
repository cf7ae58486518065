//! Stopping: what is in flight is finished and settled, what was not sent goes back as it was, and it never takes for ever.

use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services::Kafka;

use crate::support::daemon::{Daemon, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database, fresh_database_on};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::{Verdict, judge};
use crate::support::session::Session;
use crate::support::topics::{Admin, read_topic, read_topic_on};
use crate::support::{LONG, services, unique, victims, wait_until};

/// `shutdown_grace` is 8 s; the rest is for a busy machine to start and end processes.
const GRACE: Duration = Duration::from_secs(8 + 5);
const RELAY: &str = "[relay]\nbatch_rows_max = 100\nshutdown_grace = \"8s\"\nsettle_timeout = \"2s\"\n\n\
                     [sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                     [sources.free]\npolicy = \"best_effort\"\n";

/// Rows of the four policies that wait to be sent.
fn feeds(database: &Database, topic: &str, rows: usize) -> Vec<Feed> {
    let orders = [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)];
    orders
        .into_iter()
        .map(|(source, order)| {
            let mut feed = Feed::new(source, topic, order);
            feed.insert(database, rows, 40);
            feed
        })
        .collect()
}

fn expected(feeds: &[Feed]) -> Vec<(String, String)> {
    feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect()
}

fn setup<'a>(database: &'a Database, brokers: &'a str) -> Setup<'a> {
    Setup { database_url: database.url(), brokers, sections: RELAY, ..Setup::default() }
}

/// What a stop must leave: nothing claimed, no attempt spent, what was not sent due at once.
#[track_caller]
fn assert_released(session: &mut Session) {
    assert_eq!(session.statuses("status not in ('sent', 'pending', 'failed')"), "", "nothing is left in publishing");
    let unsent = "status in ('pending', 'failed')";
    assert_eq!(session.rows(&format!("{unsent} and attempt_count > 0")), 0, "attempts are returned");
    assert_eq!(session.rows(&format!("{unsent} and next_attempt_at > now()")), 0, "what was not sent is due");
    let errors =
        session.values(&format!("select distinct coalesce(last_error, '') from keiro.keiro_outbox where {unsent}"));
    let says_so = |error: &String| error.is_empty() || error.contains("stop") || error.starts_with("skipped:");
    assert!(errors.iter().all(says_so), "{errors:?}");
}

#[track_caller]
fn drain_and_judge(database: &Database, brokers: &str, feeds: &[Feed]) -> Verdict {
    let drained = run_command(&setup(database, brokers), &["drain", "--json"], "");
    assert_eq!(drained.status.code(), Some(0), "{} {}", drained.stdout, drained.stderr);
    judge(&read_topic_on(brokers, &feeds[0].topic), &expected(feeds))
}

#[test]
fn sigterm_in_the_middle_finishes_what_is_in_flight_and_returns_the_rest() {
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 2, &[]);
    let feeds = feeds(&database, &topic, 1500);
    let mut session = Session::open(&database);
    // Both signals that mean "stop".
    for signal in ["TERM", "INT"] {
        let sent = session.rows("status = 'sent'");
        let mut daemon = Daemon::start(&setup(&database, services::brokers()));
        wait_until("some rows to be sent", LONG, || session.rows("status = 'sent'") > sent + 200);
        wait_until("some rows to be in flight", LONG, || session.rows("status = 'publishing'") > 50);
        daemon.signal(signal);
        assert_eq!(daemon.wait(GRACE).code(), Some(0), "{}", daemon.stderr());
        assert_released(&mut session);
        assert!(session.rows("status <> 'sent'") > 0, "it was stopped too late to show anything");
        assert_eq!(read_topic(&topic).len(), session.rows("status = 'sent'"), "acknowledged is sent, and nothing else");
    }
    drain_and_judge(&database, services::brokers(), &feeds).assert_delivered(0);
}

#[test]
fn sigterm_stops_a_drain_as_well() {
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 1, &[]);
    let feeds = feeds(&database, &topic, 1500);
    let mut session = Session::open(&database);
    let mut drain = Daemon::start_as(&setup(&database, services::brokers()), &["drain", "--json"]);
    wait_until("some rows to be in flight", LONG, || session.rows("status = 'publishing'") > 50);
    drain.signal("TERM");
    assert_eq!(drain.wait(GRACE).code(), Some(1), "rows are still due: {}", drain.stderr());
    let report: serde_json::Value = serde_json::from_str(&drain.stdout()).expect("a report");
    assert_released(&mut session);
    assert_eq!(report["sent"], session.rows("status = 'sent'"));
    drain_and_judge(&database, services::brokers(), &feeds).assert_delivered(0);
}

/// Stops a relay whose broker does not answer any more.
fn stop_without_broker(hurt: fn(&Kafka)) {
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(&brokers).create(&topic, 2, &[]);
    let feeds = feeds(&database, &topic, 1500);
    let mut session = Session::open(&database);
    let mut daemon = Daemon::start(&setup(&database, &brokers));
    wait_until("some rows to be sent", LONG, || session.rows("status = 'sent'") > 200);
    hurt(&kafka);
    wait_until("some rows to be in flight", LONG, || session.rows("status = 'publishing'") > 50);
    let in_flight = session.rows("status = 'publishing'");
    daemon.signal("TERM");
    assert_eq!(daemon.wait(GRACE).code(), Some(0), "{}", daemon.stderr());
    assert_released(&mut session);
    drop(daemon);
    let _ = kafka.resume();
    if !victims::listens(&brokers) {
        kafka.restart().expect("the broker starts again");
    }
    drain_and_judge(&database, &brokers, &feeds).assert_delivered(in_flight);
    assert_eq!(session.rows("attempt_count > 1"), 0, "the stop cost no attempt");
}

#[test]
fn sigterm_while_the_broker_hangs() {
    stop_without_broker(|kafka| kafka.pause().expect("paused"));
}

#[test]
fn sigterm_while_the_broker_is_gone() {
    stop_without_broker(|kafka| kafka.kill().expect("killed"));
}

#[test]
fn second_signal_exits_at_once_and_its_rows_come_back_with_their_lease() {
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(&brokers).create(&topic, 1, &[]);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    feed.insert(&database, 500, 40);
    let mut session = Session::open(&database);
    // The grace is far longer than the bound below.
    let sections = "[relay]\nbatch_rows_max = 100\nshutdown_grace = \"100s\"\npublish_timeout = \"90s\"\npublishing_timeout = \"8m\"\n";
    let mut daemon = Daemon::start(&Setup { sections, ..setup(&database, &brokers) });
    wait_until("some rows to be sent", LONG, || session.rows("status = 'sent'") > 50);
    kafka.pause().expect("paused");
    wait_until("some rows to be in flight", LONG, || session.rows("status = 'publishing'") > 0);
    daemon.signal("TERM");
    wait_until("the relay to stop", LONG, || {
        daemon.http_get("/readyz").is_some_and(|r| r.body.contains("is stopping"))
    });
    assert_eq!(daemon.http_get("/livez").map(|answer| answer.status), Some(200));
    assert!(daemon.is_running());
    daemon.signal("INT");
    let told = Instant::now();
    assert_eq!(daemon.wait(LONG).code(), Some(1));
    assert!(told.elapsed() < Duration::from_secs(10), "{:?}", told.elapsed());
    assert!(daemon.stderr().contains("second signal"), "{}", daemon.stderr());
    kafka.resume().expect("resumed");
    let in_flight = session.rows("status = 'publishing'");
    assert!(in_flight > 0);
    // As if their lease had run out.
    session.execute("update keiro.keiro_outbox set updated_at = now() - interval '1 day' where status = 'publishing'");
    drain_and_judge(&database, &brokers, std::slice::from_ref(&feed)).assert_delivered(in_flight);
}

#[test]
fn sigterm_ends_a_relay_that_never_saw_its_servers_and_one_whose_database_hangs() {
    let postgres = victims::postgres();
    let database = fresh_database_on(&postgres.url("postgres"), Table::NewerShared);
    let nobody = "postgres://postgres@127.0.0.1:1/none";
    let mut daemon =
        Daemon::start(&Setup { database_url: nobody, brokers: "127.0.0.1:1", sections: RELAY, ..Setup::default() });
    wait_until("it to look for its database", LONG, || daemon.stderr().contains("cannot connect"));
    daemon.signal("TERM");
    assert_eq!(daemon.wait(GRACE).code(), Some(0), "{}", daemon.stderr());

    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 1, &[]);
    let feeds = feeds(&database, &topic, 1500);
    let mut daemon = Daemon::start(&setup(&database, services::brokers()));
    let mut session = Session::open(&database);
    wait_until("some rows to be in flight", LONG, || session.rows("status = 'publishing'") > 50);
    postgres.pause().expect("paused");
    daemon.signal("TERM");
    assert_eq!(daemon.wait(GRACE).code(), Some(0), "{}", daemon.stderr());
    postgres.resume().expect("resumed");
    // Whatever reached Kafka and could not be settled waits for its lease, and is sent again then.
    let in_flight = session.rows("status = 'publishing'");
    session.execute("update keiro.keiro_outbox set updated_at = now() - interval '1 day' where status = 'publishing'");
    drain_and_judge(&database, services::brokers(), &feeds).assert_delivered(in_flight);
}
