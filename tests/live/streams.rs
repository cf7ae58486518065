//! Long streams and long outages under the whole relay: a restart of the broker in mid-stream, and a broker that is away for
//! more than a minute.

use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services::KafkaOptions;

use crate::broker_faults::{ARRIVAL, assert_arrived_in_order, parked, total};
use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::{brokers, own_kafka};
use crate::support::session::Session;
use crate::support::topics::{Admin, Record, read_topic, read_topic_on};
use crate::support::{LONG, unique, victims, wait_until};

const COUNTED: &str = "keiro_relay_duplicates_possible_total";

/// Sixty thousand rows are on their way when the broker is restarted in an orderly way, and again when it is killed.
#[test]
fn broker_that_restarts_in_a_stream_of_sixty_thousand_rows_loses_and_inverts_nothing() {
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    let topics = [(1, "one"), (12, "many")].map(|(partitions, name)| {
        let topic = unique(name);
        admin.create(&topic, partitions, &[]);
        topic
    });
    let database = fresh_database(Table::Lean);
    let mut session = Session::open(&database);
    let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n";
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections, ..Setup::default() };
    let mut feeds = [
        (Feed::new("keyed", &topics[1], Order::Key), 28_000, 10_000),
        (Feed::new("few", &topics[0], Order::Key), 20_000, 7),
        (Feed::new("stream", &topics[0], Order::Source), 12_000, 50),
    ];
    for (feed, rows, keys) in &mut feeds {
        feed.insert_in(&mut session, *rows, *keys);
    }
    session.execute("analyze keiro.keiro_outbox");
    let daemon = Daemon::start(&setup);
    // Each blow falls while all three still have much to send.
    let unsent = |session: &mut Session| {
        let least = "select min(n) from (select count(*) filter (where status <> 'sent') as n from keiro.keiro_outbox group by source) s";
        session.count(least)
    };
    let mut in_flight = 0;
    for (blow, left) in [("a restart", 8_000), ("a kill", 3_000)] {
        wait_until(&format!("{left} rows of one to be left"), LONG, || unsent(&mut session) < left);
        in_flight += session.rows("status = 'publishing'");
        println!("{blow} with {} left of one source", unsent(&mut session));
        if blow == "a kill" {
            kafka.kill().expect("killed");
        }
        kafka.restart().expect("Kafka starts again");
    }
    let mended = Instant::now();
    wait_until("everything to be sent", LONG * 2, || session.rows("status <> 'sent'") == 0);
    println!("sent {:?} after the second", mended.elapsed());
    assert_eq!(session.rows("attempt_count <> 1"), 0, "no attempt is spent");
    let records: Vec<Record> = topics.iter().flat_map(|topic| read_topic_on(&brokers, topic)).collect();
    let expected: Vec<_> = feeds.iter().flat_map(|(feed, ..)| feed.expected().to_vec()).collect();
    let verdict = judge(&records, &expected);
    let counted = total(&daemon, COUNTED);
    println!("{} duplicates, {counted} counted, {in_flight} in flight", verdict.duplicates.len());
    verdict.assert_delivered(counted);
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
    assert_eq!(parked(&daemon), [].into());
}

/// Five hundred rows wait while no broker is there. The usual timeouts, so that the outage is longer than two of the calls.
#[test]
fn broker_that_is_away_for_more_than_a_minute_kills_no_row_and_spends_no_attempt() {
    let kafka = own_kafka(KafkaOptions::default());
    let brokers = kafka.bootstrap();
    Admin::new(&brokers).create("away", 3, &[]);
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    // An attempt that is spent would be a row's last.
    let sections = "[defaults]\nmax_attempts = 1\n\n[sources.stream]\npolicy = \"per_source_stream\"\n\n\
                    [sources.line]\npolicy = \"stop_the_line\"\n\n[sources.free]\npolicy = \"best_effort\"\n\n\
                    [maintenance]\ninterval = \"1s\"\n";
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections, ..Setup::default() };
    let mut feeds = [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)]
        .map(|(source, order)| Feed::new(source, "away", order));
    let mut daemon = Daemon::start(&setup);
    for feed in &mut feeds {
        feed.insert_in(&mut session, 25, 10);
    }
    wait_until("the first rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    kafka.kill().expect("killed");
    let away = Instant::now();
    for feed in &mut feeds {
        feed.insert_in(&mut session, 125, 10);
    }
    let is_ready = |daemon: &Daemon| daemon.http_get("/readyz").is_some_and(|answer| answer.status == 200);
    wait_until("/readyz to say so", LONG, || !is_ready(&daemon));
    wait_until("what was claimed to be returned", LONG, || session.rows("status = 'publishing'") == 0);
    // From now on nothing is claimed, whatever the relay does meanwhile.
    let claims = |daemon: &Daemon| daemon.metric("keiro_relay_claim_rows_sum");
    let (returned, claimed) = (away.elapsed(), claims(&daemon));
    assert!(claimed.is_some());
    wait_until("the outage to last", LONG * 2, || {
        assert_eq!(session.rows("status = 'publishing' or attempt_count > 1 or status in ('dead', 'rejected')"), 0);
        away.elapsed() > Duration::from_secs(75)
    });
    assert!(!is_ready(&daemon));
    assert_eq!(claims(&daemon), claimed, "something was claimed after {returned:?}");
    assert_eq!(session.rows("status <> 'sent' and attempt_count > 0"), 0, "no attempt is spent");
    assert_eq!(session.rows("status <> 'sent'"), 500);
    assert_eq!(parked(&daemon), [].into(), "no topic is to blame");
    let log = daemon.stderr().lines().count();
    assert!(log < 80, "{log} lines:\n{}", daemon.stderr());

    kafka.restart().expect("Kafka starts again");
    let mended = Instant::now();
    wait_until("everything to be sent", Duration::from_secs(20), || session.rows("status <> 'sent'") == 0);
    println!("returned after {returned:?}, sent {:?} after the broker came back", mended.elapsed());
    daemon.wait_http_ok("/readyz", LONG);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic_on(&brokers, "away"), &expected).assert_delivered(total(&daemon, COUNTED));
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
}

/// Each policy on topics of one and of many partitions, and on a topic that grows in the middle; null keys among the others.
#[test]
fn policies_hold_on_one_and_on_many_partitions_and_on_a_topic_that_grows() {
    let admin = Admin::new(brokers());
    let topics = [1, 6, 2].map(|partitions| {
        let topic = unique("topic");
        admin.create(&topic, partitions, &[ARRIVAL]);
        topic
    });
    for table in [Table::Lean, Table::NewerShared] {
        let database = fresh_database(table);
        let mut session = Session::open(&database);
        let policies = ["per_key_head_of_line", "per_source_stream", "stop_the_line", "best_effort"];
        let (mut sections, mut feeds) = (String::new(), Vec::new());
        for policy in policies {
            for (number, topic) in topics.iter().enumerate() {
                let source = format!("{policy} {number} {table:?}");
                sections.push_str(&format!("[sources.\"{source}\"]\npolicy = \"{policy}\"\n\n"));
                let order = match policy {
                    "per_key_head_of_line" => Order::Key,
                    "best_effort" => Order::None,
                    _ => Order::Source,
                };
                feeds.push(Feed::new(&source, topic, order));
            }
        }
        let setup = Setup { database_url: database.url(), brokers: brokers(), sections: &sections, ..Setup::default() };
        let daemon = Daemon::start(&setup);
        for (round, keys) in [(0, 9), (1, 0), (2, 9)] {
            for feed in &mut feeds {
                feed.insert_in(&mut session, 100, keys);
            }
            if round == 1 && table == Table::Lean {
                wait_until("some to be sent", LONG, || session.rows("status = 'sent'") > 1_500);
                admin.grow(&topics[2], 8);
            }
        }
        wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
        assert_eq!(session.rows("attempt_count <> 1"), 0);
        let records: Vec<Record> = topics.iter().flat_map(|topic| read_topic(topic)).collect();
        let ours: Vec<Record> =
            records.into_iter().filter(|record| record.message_id().contains(&format!("{table:?}"))).collect();
        let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
        judge(&ours, &expected).assert_delivered(0);
        assert_arrived_in_order(&ours, &expected);
        assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
    }
}
