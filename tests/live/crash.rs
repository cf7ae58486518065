//! Relays that die or freeze with rows in their hands: nothing is lost, nothing is overtaken, and only their rows go out twice.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{TopicReader, fresh_topic, read_topic};
use crate::support::{LONG, services, wait_for, wait_until};

/// The shortest lease that these timeouts allow: three times 10 s + 0.5 s + a margin of 5 s is 46.5 s. A broker on a busy machine
/// answers within them: a record that timed out may go out twice without any kill.
const RELAY: &str = "[relay]\npublish_timeout = \"10s\"\nsettle_timeout = \"500ms\"\npublishing_timeout = \"47s\"\n\n\
                     [maintenance]\ninterval = \"1s\"\n\n";
/// Lease and two ticks of the slow timer, and time for what then has to be sent on a busy machine.
const RECOVERED: Duration = Duration::from_secs(47 + 2 + 60);

fn setup<'a>(database: &'a Database, sections: &'a str) -> Setup<'a> {
    Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() }
}

/// The connections of relays.
const ASKED: &str = "select count(*) from pg_stat_activity where datname = current_database() and \
                     application_name like 'keiro-relay%'";

/// The message ids that a killed relay left in publishing, once the server has noticed that it is gone.
fn left_behind(session: &mut Session) -> BTreeSet<String> {
    wait_until("the server to end what the relay had asked for", LONG, || session.count(ASKED) == 0);
    session.values("select message_id from keiro.keiro_outbox where status = 'publishing'").into_iter().collect()
}

#[test]
fn kills_at_random_points_lose_nothing_and_overtake_nothing() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut draw = StdRng::seed_from_u64(seed);
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(3, &[]);
    // Streams are ordered as a whole, so each has a topic of one partition to itself.
    let stream_topic = fresh_topic(1, &[]);
    const KILLS: usize = 7;
    let streams: String =
        (0..=KILLS).map(|round| format!("[sources.stream{round}]\npolicy = \"per_source_stream\"\n\n")).collect();
    let sections = format!("{RELAY}{streams}[sources.free]\npolicy = \"best_effort\"\n");
    let setup = setup(&database, &sections);
    let mut session = Session::open(&database);
    let mut keyed = Feed::new("keyed", &topic, Order::Key);
    let mut free = Feed::new("free", &topic, Order::None);
    let mut streams = Vec::new();
    let mut in_flight = BTreeSet::new();
    let mut last_kill = Instant::now();
    for round in 0..=KILLS {
        let mut stream = Feed::new(&format!("stream{round}"), &stream_topic, Order::Source);
        stream.insert_in(&mut session, 300, 10);
        streams.push(stream);
        keyed.insert_in(&mut session, 600, 150);
        free.insert_in(&mut session, 200, 0);
        let mut daemon = Daemon::start(&setup);
        if round == KILLS {
            wait_until("every row to be sent", RECOVERED, || session.rows("status <> 'sent'") == 0);
            println!("recovered {:?} after the last kill", last_kill.elapsed());
            daemon.signal("TERM");
            assert_eq!(daemon.wait(LONG).code(), Some(0));
            break;
        }
        let sent = session.rows("status = 'sent'");
        let goal = sent + draw.random_range(0..600);
        wait_until("it to send some", LONG, || session.rows("status = 'sent'") >= goal && daemon.is_running());
        // Somewhere within a pass.
        std::thread::sleep(Duration::from_micros(draw.random_range(0..30_000)));
        daemon.kill();
        last_kill = Instant::now();
        let left = left_behind(&mut session);
        println!("kill {round} after {} rows: {} in publishing", goal - sent, left.len());
        in_flight.extend(left);
    }
    assert_eq!(session.rows("status <> 'sent'"), 0);
    let mut expected = [keyed.expected(), free.expected()].concat();
    expected.extend(streams.iter().flat_map(|stream| stream.expected().to_vec()));
    let records = [read_topic(&topic), read_topic(&stream_topic)].concat();
    let verdict = judge(&records, &expected);
    verdict.assert_delivered(in_flight.len());
    let stray: Vec<_> = verdict.duplicates.iter().filter(|id| !in_flight.contains(*id)).collect();
    assert!(stray.is_empty(), "sent twice although no killed relay had them: {stray:?}");
    println!("{} duplicates of {} rows in flight", verdict.duplicates.len(), in_flight.len());
}

#[test]
fn relay_that_freezes_with_rows_hands_none_over_once_it_wakes_up() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    // One hot key: its rows go out one after the other, so the relay freezes in the middle of them.
    feed.insert(&database, 900, 1);
    let mut session = Session::open(&database);
    let mut frozen = Daemon::start(&setup(&database, RELAY));
    let mut reader = TopicReader::new(services::brokers(), &topic);
    // In the middle of a batch: some of its rows are on the topic, and none of them is settled.
    let in_flight = wait_for("it to freeze in the middle of a batch", LONG, || {
        // A batch takes some milliseconds: there is always a next one to be caught in.
        if session.rows("status <> 'sent'") < 900 {
            feed.insert(&database, 900, 1);
        }
        let settled = session.rows("status = 'sent'");
        if reader.catch_up().len() <= settled {
            return None;
        }
        frozen.signal("STOP");
        wait_until("the server to finish what it asked for", LONG, || {
            session.count(&format!("{ASKED} and state = 'active'")) == 0
        });
        let in_flight = session.rows("status = 'publishing'");
        if in_flight > 0 && session.rows("status = 'sent'") == settled {
            return Some(in_flight);
        }
        frozen.signal("CONT");
        None
    });
    let mut other = Daemon::start(&setup(&database, RELAY));
    wait_until("the other to send everything", RECOVERED, || session.rows("status <> 'sent'") == 0);
    let settled = "select md5(string_agg(outbox_id || ' ' || attempt_count || ' ' || updated_at, ',' order by outbox_id)) \
                   from keiro.keiro_outbox";
    let before = (read_topic(&topic).len(), session.value(settled));
    frozen.signal("CONT");
    let stale = "keiro_relay_stale_settlements_total{source=\"keyed\"}";
    wait_until("it to notice what it lost", LONG, || frozen.metric(stale).is_some_and(|lost| lost > 0.0));
    assert_eq!(frozen.metric(stale), Some(in_flight as f64));
    let records = read_topic(&topic);
    assert_eq!((records.len(), session.value(settled)), before, "it sent or settled rows that it had lost");
    judge(&records, feed.expected()).assert_delivered(in_flight);
    // Both go on together.
    frozen.wait_http_ok("/readyz", LONG);
    feed.insert(&database, 100, 1);
    wait_until("the next rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    judge(&read_topic(&topic), feed.expected()).assert_delivered(in_flight);
    for daemon in [&mut frozen, &mut other] {
        daemon.signal("TERM");
        assert_eq!(daemon.wait(LONG).code(), Some(0), "{}", daemon.stderr());
    }
}

#[test]
fn expired_leases_come_back_also_behind_young_ones_and_spent_rows_die() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let sections = format!("{RELAY}[defaults]\nmax_attempts = 3\n\n[sources.x]\n");
    let sections = sections.replace("[relay]\n", "[relay]\nunlisted_sources = \"ignore\"\n");
    let mut session = Session::open(&database);
    let mut feed = Feed::new("x", &topic, Order::None);
    feed.insert(&database, 200, 0);
    let mut foreign = Feed::new("unlisted", &topic, Order::None);
    foreign.insert(&database, 10, 0);
    let claim = |rows: std::ops::Range<usize>, source: &str, attempts: usize, age: &str, error: &str| {
        format!(
            "update keiro.keiro_outbox set status = 'publishing', attempt_count = {attempts}, last_error = {error}, \
             updated_at = now() - interval '{age}' where message_id >= '{source}-{:06}' and message_id < '{source}-{:06}';",
            rows.start, rows.end
        )
    };
    // 150 that somebody is at work on, then ten that were left behind, the last four with their attempts spent.
    session.execute(&claim(0..150, "x", 1, "0 s", "null"));
    session.execute(&claim(150..156, "x", 1, "21 s", "'kafka.before: broker: said before'"));
    session.execute(&claim(156..158, "x", 3, "1 day", "'kafka.before: broker: said before'"));
    session.execute(&claim(158..160, "x", 4, "1 day", "null"));
    session.execute(&claim(0..10, "unlisted", 9, "1 day", "null"));
    let mut daemon = Daemon::start(&setup(&database, &sections));
    wait_until("what can be sent to be sent", LONG, || session.rows("source = 'x' and status = 'sent'") == 46);
    wait_until("the spent rows to be dead", LONG, || session.rows("source = 'x' and status = 'dead'") == 4);
    // The young ones are still somebody's: their lease of 20 s cannot have run out unless this took so long itself.
    assert_eq!(session.statuses("source = 'x'"), "dead=4 publishing=150 sent=46");
    assert_eq!(session.statuses("source = 'unlisted'"), "publishing=10");
    let dead = session.values(
        "select attempt_count || ' ' || last_error from keiro.keiro_outbox where status = 'dead' order by message_id",
    );
    let reclaimed = "4 reclaimed: publisher crashed mid-publish";
    let before = "3 kafka.before: broker: said before";
    assert_eq!(dead, [before, before, reclaimed, reclaimed]);
    assert_eq!(session.rows("status = 'sent' and attempt_count = 2 and last_error is null"), 6);
    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    assert!(metrics.contains("keiro_relay_rows_total{outcome=\"requeued\",source=\"x\"} 6"), "{metrics}");
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0));
}
