//! Beside a publisher that is not ours: it claims and marks by the contract's plain rules, and knows nothing of us.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, run, services, wait_until};

/// Upstream's claim: the limit applies to the locked candidates before the filter, and the condition is that every earlier
/// row of the lane that is not terminal is among them.
const CLAIM: &str = "
with candidates as materialized (
  select o.outbox_id, o.source, o.message_key, o.created_at from keiro.keiro_outbox o
  where o.source = $1 and o.status in ('pending', 'failed') and o.next_attempt_at <= now()
  order by o.created_at, o.outbox_id limit 32 for update skip locked),
ready as (
  select c.outbox_id from candidates c
  where ($2 and c.message_key is null) or not exists (
    select from keiro.keiro_outbox e
    where e.source = c.source and (not $2 or e.message_key = c.message_key)
      and e.status not in ('sent', 'dead', 'rejected') and (e.created_at, e.outbox_id) < (c.created_at, c.outbox_id)
      and e.outbox_id not in (select outbox_id from candidates)))
update keiro.keiro_outbox k set status = 'publishing', attempt_count = k.attempt_count + 1, updated_at = now()
where k.outbox_id in (select outbox_id from ready)
returning k.outbox_id, k.message_id, k.message_key, k.created_at, k.payload_bytes";

/// One pass: claim, publish one after the other, mark by id what still is publishing. Returns what it sent.
async fn pass(client: &Client, producer: &FutureProducer, feed: &Feed, by_key: bool, draw: &mut StdRng) -> usize {
    let mut rows = client.query(CLAIM, &[&feed.source, &by_key]).await.expect("a claim");
    rows.sort_by_key(|row| (row.get::<_, std::time::SystemTime>("created_at"), row.get::<_, Uuid>("outbox_id")));
    let (mut sent, mut failed, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    let mut stuck: BTreeSet<Option<String>> = BTreeSet::new();
    for row in &rows {
        let (id, key): (Uuid, Option<String>) = (row.get("outbox_id"), row.get("message_key"));
        let lane = if by_key { key.clone() } else { None };
        if stuck.contains(&lane) {
            skipped.push(id);
            continue;
        }
        // It fails now and then, before it sends.
        if draw.random_range(0..40) == 0 {
            failed.push(id);
            stuck.insert(lane);
            continue;
        }
        let message_id: String = row.get("message_id");
        let payload: Vec<u8> = row.get("payload_bytes");
        let headers = OwnedHeaders::new()
            .insert(Header { key: "keiro-message-id", value: Some(&message_id) })
            .insert(Header { key: "keiro-source", value: Some(&feed.source) });
        let mut record = FutureRecord::<String, Vec<u8>>::to(&feed.topic).payload(&payload).headers(headers);
        if let Some(key) = &key {
            record = record.key(key);
        }
        producer.send(record, std::time::Duration::from_secs(30)).await.expect("acknowledged");
        sent.push(id);
    }
    let marks = [
        ("status = 'sent', published_at = now(), last_error = null", &sent),
        ("status = 'failed', next_attempt_at = now() + interval '50 ms', last_error = 'foreign: failed'", &failed),
        (
            "status = 'failed', attempt_count = greatest(attempt_count - 1, 0), next_attempt_at = now(), last_error = 'skipped: foreign'",
            &skipped,
        ),
    ];
    for (set, ids) in marks {
        let sql = format!(
            "update keiro.keiro_outbox set {set}, updated_at = now() where outbox_id = any($1) and status = 'publishing'"
        );
        let marked = client.execute(&sql, &[ids]).await.expect("a mark");
        assert_eq!(marked, ids.len() as u64, "somebody else marked the foreign publisher's rows");
    }
    sent.len()
}

#[test]
fn beside_a_foreign_publisher_order_holds_and_nothing_is_lost_or_sent_twice() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let database: Database = fresh_database(Table::NewerShared);
    let (keyed_topic, stream_topic) = (fresh_topic(1, &[]), fresh_topic(1, &[]));
    let sections = "[relay]\nbatch_rows_max = 20\n\n[sources.stream]\npolicy = \"per_source_stream\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    daemon.wait_http_ok("/readyz", LONG);
    let mut session = Session::open(&database);
    let mut keyed = Feed::new("keyed", &keyed_topic, Order::Key);
    let mut stream = Feed::new("stream", &stream_topic, Order::Source);
    // The relay has work in hand when the others come: a lane that somebody else holds it would leave alone for a while.
    keyed.insert_in(&mut session, 600, 150);
    stream.insert_in(&mut session, 300, 4);
    for feed in [&keyed, &stream] {
        wait_until("the relay to begin", LONG, || session.rows(&format!("{} and status = 'sent'", feed.mine())) >= 20);
    }
    let done = AtomicBool::new(false);
    let counts: BTreeMap<&str, AtomicUsize> =
        ["keyed", "stream"].into_iter().map(|name| (name, AtomicUsize::new(0))).collect();
    std::thread::scope(|scope| {
        // Two publishers a source, as two instances of a program would be.
        for (n, (feed, by_key)) in
            [(&keyed, true), (&keyed, true), (&stream, false), (&stream, false)].into_iter().enumerate()
        {
            let (feed, database, done, counts) = (feed.clone(), &database, &done, &counts);
            scope.spawn(move || {
                let mut draw = StdRng::seed_from_u64(seed.wrapping_add(n as u64));
                run(async || {
                    let client = database.connect().await;
                    let mut config = ClientConfig::new();
                    config.set("bootstrap.servers", services::brokers()).set("enable.idempotence", "true");
                    let producer: FutureProducer = config.set("linger.ms", "0").create().expect("a producer");
                    while !done.load(Ordering::Relaxed) {
                        let sent = pass(&client, &producer, &feed, by_key, &mut draw).await;
                        counts[feed.source.as_str()].fetch_add(sent, Ordering::Relaxed);
                        // Not faster than a program that polls, or the relay would see no row.
                        tokio::time::sleep(std::time::Duration::from_millis(draw.random_range(0..20))).await;
                    }
                });
            });
        }
        // Rows come in while both are at work.
        for _ in 0..30 {
            keyed.insert_in(&mut session, 30, 150);
            stream.insert_in(&mut session, 10, 4);
        }
        keyed.insert_in(&mut session, 50, 0);
        wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
        done.store(true, Ordering::Relaxed);
    });
    for (feed, topic) in [(&keyed, &keyed_topic), (&stream, &stream_topic)] {
        let foreign = counts[feed.source.as_str()].load(Ordering::Relaxed);
        println!("{foreign} of {} rows of {} were sent by the foreign publisher", feed.written, feed.source);
        assert!(foreign > 0 && foreign < feed.written, "one of them did everything, which shows nothing");
        judge(&read_topic(topic), feed.expected()).assert_delivered(0);
    }
    assert_eq!(daemon.metric("keiro_relay_stale_settlements_total{source=\"keyed\"}"), Some(0.0));
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0));
}
