//! The Kafka publisher's fast lane against real brokers: full speed, and never out of order, whatever fails.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services::KafkaOptions;
use keiro_relay::config;
use keiro_relay::domain::message::{Message, PgTime};
use keiro_relay::domain::outcome::{Blame, Outcome, Setback};
use keiro_relay::domain::policy::Policy;
use keiro_relay::domain::{partition, plan};
use keiro_relay::publish::kafka::KafkaPublisher;
use keiro_relay::publish::{Batch, Publisher as _};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use tokio_util::sync::CancellationToken;

use crate::publish::{noise, relay, shorts};
use crate::support::passes::{Fed, Feeding, feed};
use crate::support::services::{brokers, own_kafka};
use crate::support::topics::{Admin, Record, fresh_topic, read_topic, read_topic_on};
use crate::support::{LONG, acls, oracle, run, unique, victims};

/// A topic's limit in these tests, and a payload above it that still goes through the fast lane.
const LIMIT: (&str, &str) = ("max.message.bytes", "20000");
const POISON_OCTETS: usize = 60_000;

/// A publisher with these properties over the usual ones.
fn publisher_with(brokers: &str, properties: &[(&str, &str)]) -> KafkaPublisher {
    let mut kafka = config::Kafka {
        brokers: brokers.split(',').map(str::to_owned).collect(),
        properties: [("statistics.interval.ms".to_owned(), config::Secret::new("1000"))].into(),
        ..config::Kafka::default()
    };
    let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), config::Secret::new(*value)));
    kafka.properties.extend(properties);
    KafkaPublisher::new(&kafka, &relay()).expect("a publisher")
}

/// Batches of a few records, so that many are on their way at once and one that fails has others behind it.
fn small_batches(brokers: &str) -> KafkaPublisher {
    publisher_with(brokers, &[("batch.size", "2000")])
}

/// A row that knows its place in the order.
fn row(place: usize, topic: &str, key: Option<&str>) -> Message {
    Message {
        created_at: PgTime(i64::try_from(place).expect("few rows")),
        attempt_count: 0,
        ..crate::publish::row(topic, key, &format!("m{place:06}"))
    }
}

fn poison(message: Message) -> Message {
    Message { payload: noise(POISON_OCTETS), ..message }
}

/// A seed, printed so that a failure can be repeated: `KEIRO_RELAY_TEST_SEED` sets it.
fn seeded() -> (u64, StdRng) {
    let seed = std::env::var("KEIRO_RELAY_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(rand::random);
    println!("KEIRO_RELAY_TEST_SEED={seed}");
    (seed, StdRng::seed_from_u64(seed))
}

/// One call's worth of rows, each key a lane.
fn batch(rows: Vec<Message>, timeout: Duration) -> Batch {
    let updated_at = PgTime::from_unix_micros(jiff::Timestamp::now().as_microsecond());
    let rows: Vec<Message> = rows.into_iter().map(|row| Message { attempt_count: 1, updated_at, ..row }).collect();
    Batch {
        plan: plan::plan(Policy::PerKeyHeadOfLine, &rows).into(),
        messages: rows.into(),
        one_at_a_time: false,
        deadline: Instant::now() + timeout,
        stop: CancellationToken::new(),
    }
}

fn read_all(topics: &[String]) -> Vec<Record> {
    topics.iter().flat_map(|topic| read_topic(topic)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn fast_delivers_every_row_byte_for_byte_and_in_order() {
    let (_, mut rng) = seeded();
    let publisher = publisher_with(brokers(), &[]);
    for keys in [1, 7, 60] {
        let topic = fresh_topic(6, &[]);
        let rows: Vec<Message> = (0..10_000)
            .map(|place| {
                let key = format!("key {}", rng.random_range(0..keys));
                let payload = noise(rng.random_range(0..600));
                Message { payload, ..row(place, &topic, Some(&key)) }
            })
            .collect();
        let begun = Instant::now();
        let fed = feed(&publisher, &Feeding::default(), rows.clone(), |_, _| {}).await;
        println!("{keys} keys: {:?}, {} calls", begun.elapsed(), fed.calls);
        let records = read_topic(&topic);
        fed.assert_delivered(&records);
        assert_eq!((fed.duplicates_possible, fed.failed, &fed.errors), (0, 0, &BTreeMap::new()));
        let by_id: BTreeMap<&str, &Record> = records.iter().map(|record| (record.message_id(), record)).collect();
        for row in &rows {
            let record = by_id[row.message_id.as_str()];
            assert_eq!(record.key.as_deref(), row.message_key.as_deref().map(str::as_bytes));
            assert_eq!(record.value.as_deref(), Some(&row.payload[..]));
        }
    }
    assert_eq!(publisher.health().rebuilds, 0);
}

/// A row that no broker takes, anywhere in a hot lane and in others at once: it alone is rejected, and everybody else's order
/// holds.
#[tokio::test(flavor = "multi_thread")]
async fn fast_goes_on_around_a_row_that_nobody_takes() {
    let (_, mut rng) = seeded();
    let publisher = small_batches(brokers());
    for round in 0..12 {
        let topic = fresh_topic(2, &[LIMIT]);
        let compacted = fresh_topic(1, &[("cleanup.policy", "compact")]);
        let mut rows = Vec::new();
        // Warm, or not: half of the rounds begin with a topic that this client never wrote to.
        let warm = if round % 2 == 0 { 20 } else { 0 };
        for _ in 0..warm {
            rows.push(row(rows.len(), &topic, Some(&format!("k{}", rng.random_range(0..8)))));
        }
        let k = [0, 1, 10, 25, 48, 49][round / 2];
        for place in 0..50 {
            for (key, is_poison) in [("hot", place == k), ("other", place % 17 == 16), ("calm", false)] {
                let row = Message { payload: noise(300), ..row(rows.len(), &topic, Some(key)) };
                rows.push(if is_poison { poison(row) } else { row });
            }
        }
        rows.push(row(rows.len(), &compacted, None));
        rows.push(row(rows.len(), &compacted, Some("fine")));
        let poisons: Vec<String> =
            rows.iter().filter(|row| row.payload.len() == POISON_OCTETS).map(|row| row.message_id.clone()).collect();
        let keyless = rows[rows.len() - 2].message_id.clone();

        let fed = feed(&publisher, &Feeding::default(), rows, |_, _| {}).await;
        println!(
            "round {round}: {} calls, {} rebuilds, {} duplicates possible",
            fed.calls,
            publisher.health().rebuilds,
            fed.duplicates_possible
        );
        fed.assert_delivered(&read_all(&[topic.clone(), compacted.clone()]));
        let mut expected: BTreeMap<String, String> =
            poisons.into_iter().map(|id| (id, "kafka.message_too_large".to_owned())).collect();
        expected.insert(keyless, "kafka.invalid_record".to_owned());
        assert_eq!(fed.rejected, expected);
        assert_eq!((fed.failed, fed.errors), (0, BTreeMap::new()), "nothing else was returned or failed");
        assert_eq!(publisher.health().parked, []);
    }
    assert!(publisher.health().rebuilds >= 6, "the fast lane was not there: {:?}", publisher.health());
}

/// Partitions that know nothing of the client take whatever comes first: a later batch too, when the first one fails. So each
/// topic here is new, and among its first records is one that its broker refuses together with its neighbours.
#[tokio::test(flavor = "multi_thread")]
async fn fast_keeps_order_on_partitions_that_do_not_know_the_client() {
    let (_, mut rng) = seeded();
    // Two or three records a batch: librdkafka has several batches of a partition on their way only if they are that small.
    let publisher = publisher_with(brokers(), &[("batch.size", "1000")]);
    let known = fresh_topic(1, &[]);
    let mut inverted = 0;
    for round in 0..25 {
        // A client that was never acknowledged anything is not replaced at once.
        feed(&publisher, &Feeding::default(), vec![row(round, &known, None)], |_, _| {}).await;
        let topic = fresh_topic(1, &[("cleanup.policy", "compact")]);
        let keys = rng.random_range(1..3);
        let poison = rng.random_range(0..2);
        let rows: Vec<Message> = (0..60)
            .map(|place| {
                // A compacted topic takes no record without a key, nor any other of its batch.
                let key = (place != poison).then(|| format!("k{}", rng.random_range(0..keys)));
                Message { payload: noise(rng.random_range(10..60)), ..row(place, &topic, key.as_deref()) }
            })
            .collect();
        let fed = feed(&publisher, &Feeding { calls_max: 1, ..Feeding::default() }, rows, |_, _| {}).await;
        let verdict = fed.judge(&read_topic(&topic));
        if fed.overtaken > 0 || !verdict.order_violations.is_empty() {
            inverted += 1;
            println!("round {round}: {} overtaken, {:?}", fed.overtaken, verdict.order_violations.first());
        } else {
            verdict.assert_delivered(fed.duplicates_possible);
        }
        assert_eq!(fed.rejected.values().map(String::as_str).collect::<Vec<_>>(), ["kafka.invalid_record"]);
    }
    println!("{inverted} of 25 inverted, {} rebuilds", publisher.health().rebuilds);
    assert_eq!(inverted, 0);
    assert!(publisher.health().rebuilds >= 20, "few refusals reached the fast lane: {:?}", publisher.health());
}

/// Rows of a lane that goes from topic to topic and from key to key: the order of the hand-overs shows in the records' offsets
/// only within a partition, so what is checked is that all is there, in order, and nothing was returned.
#[tokio::test(flavor = "multi_thread")]
async fn fast_serves_every_policy_on_one_partition_and_on_many() {
    let (_, mut rng) = seeded();
    let publisher = publisher_with(brokers(), &[]);
    for policy in Policy::ALL {
        let topics = [fresh_topic(1, &[]), fresh_topic(6, &[])];
        let rows: Vec<Message> = (0..600)
            .map(|place| {
                let key = (rng.random_range(0..5) > 0).then(|| format!("k{}", rng.random_range(0..9)));
                row(place, &topics[rng.random_range(0..2)], key.as_deref())
            })
            .collect();
        let fed = feed(&publisher, &Feeding { policy, ..Feeding::default() }, rows, |_, _| {}).await;
        fed.assert_delivered(&read_all(&topics));
        assert_eq!((fed.duplicates_possible, fed.failed, fed.errors), (0, 0, BTreeMap::new()), "{policy}");
    }
    assert_eq!(publisher.health().rebuilds, 0);
}

/// The order across partitions: a record goes to another one only once all before it are acknowledged, so its timestamp of
/// arrival is never earlier than theirs.
#[tokio::test(flavor = "multi_thread")]
async fn fast_waits_where_a_lane_turns_to_another_partition() {
    let topic = fresh_topic(4, &[("message.timestamp.type", "LogAppendTime")]);
    let publisher = publisher_with(brokers(), &[]);
    // Runs of five rows a key, so that a lane of the whole source turns every five.
    let rows: Vec<Message> = (0..400).map(|place| row(place, &topic, Some(&format!("k{}", place / 5 % 8)))).collect();
    let policy = Policy::PerSourceStream;
    let fed = feed(&publisher, &Feeding { policy, ..Feeding::default() }, rows, |_, _| {}).await;
    let mut records = read_topic(&topic);
    fed.assert_delivered(&records);
    records.sort_by(|one, other| one.message_id().cmp(other.message_id()));
    for pair in records.windows(2) {
        assert!(pair[0].timestamp <= pair[1].timestamp, "{pair:?}");
    }
}

/// Pipelining is what this lane is for: a hot key goes many times faster than one record after the other.
#[tokio::test(flavor = "multi_thread")]
async fn fast_is_faster_than_careful_on_a_hot_key() {
    let topic = fresh_topic(1, &[]);
    let publisher = publisher_with(brokers(), &[]);
    let mut best = BTreeMap::new();
    for round in 0..5 {
        for policy in [Policy::PerKeyHeadOfLine, Policy::StopTheLine] {
            let rows = (0..500).map(|place| row(round * 500 + place, &topic, Some("hot"))).collect();
            let begun = Instant::now();
            feed(&publisher, &Feeding { policy, ..Feeding::default() }, rows, |_, _| {}).await;
            let took = best.entry(policy.name()).or_insert(Duration::MAX);
            *took = begun.elapsed().min(*took);
        }
    }
    println!("{best:?}");
    assert!(best[Policy::PerKeyHeadOfLine.name()] * 2 < best[Policy::StopTheLine.name()], "{best:?}");
}

/// A topic that may not be written to stops the client once; its rows then wait, and the others' do not.
#[tokio::test(flavor = "multi_thread")]
async fn fast_goes_on_beside_a_topic_that_may_not_be_written_to() {
    const LOGIN: &str = "org.apache.kafka.common.security.plain.PlainLoginModule required user_relay=\"right\";";
    let kafka = own_kafka(KafkaOptions {
        listeners: &[("LOGIN", "SASL_PLAINTEXT")],
        properties: &[
            ("listener.name.login.sasl.enabled.mechanisms", "PLAIN"),
            ("listener.name.login.plain.sasl.jaas.config", LOGIN),
            ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
            ("super.users", "User:ANONYMOUS"),
        ],
        ..KafkaOptions::default()
    });
    let superuser = kafka.bootstrap();
    let admin = Admin::new(&superuser);
    for topic in ["open", "read-only"] {
        admin.create(topic, 2, &[]);
    }
    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "open");
    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE, "read-only");
    let publisher = publisher_with(
        &kafka.bootstrap_of("LOGIN"),
        &[
            ("security.protocol", "sasl_plaintext"),
            ("sasl.mechanism", "PLAIN"),
            ("sasl.username", "relay"),
            ("sasl.password", "right"),
        ],
    );
    let open = |from: usize, count: usize| -> Vec<Message> {
        (from..from + count).map(|place| row(place, "open", Some(&format!("k{}", place % 7)))).collect()
    };
    // Both topics in each call; nothing of the denied one is ever the rows' fault.
    let mut rows = open(0, 2_000);
    for (place, row) in rows.iter_mut().enumerate().filter(|(place, _)| place % 20 == 7) {
        row.destination = "read-only".to_owned();
        row.message_key = Some(format!("denied {}", place % 3));
    }
    let denied: Vec<Message> = rows.iter().filter(|row| row.destination == "read-only").cloned().collect();
    let innocent: Vec<Message> = rows.iter().filter(|row| row.destination == "open").cloned().collect();
    let calls = async |rows: Vec<Message>| {
        let mut left = Vec::new();
        for rows in rows.chunks(250) {
            let batch = batch(rows.to_vec(), Duration::from_secs(20));
            let outcomes = crate::publish::publish(&publisher, &batch).await;
            for (row, outcome) in batch.messages.iter().zip(&outcomes) {
                match outcome {
                    Outcome::Acked { .. } => assert_eq!(row.destination, "open"),
                    Outcome::NotSent(setback) => {
                        assert!(matches!(setback.blame, Blame::Topic | Blame::Lane), "{outcome:?}");
                        assert_eq!(row.destination, "read-only", "{outcome:?}");
                        left.push(row.clone());
                    }
                    other => panic!("{}: {other:?}", row.destination),
                }
            }
        }
        left
    };
    let left = calls(rows).await;
    assert_eq!(left.len(), denied.len());
    let rebuilds = publisher.health().rebuilds;
    println!("{rebuilds} rebuilds");
    assert!(rebuilds <= 3, "the denied topic stops the client once, not each time: {rebuilds}");
    assert_eq!(publisher.health().parked.iter().map(|parked| parked.topic.as_str()).collect::<Vec<_>>(), ["read-only"]);

    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "read-only");
    let fed = feed(&publisher, &Feeding::default(), [left, open(5_000, 500)].concat(), |_, _| {}).await;
    assert_eq!((fed.failed, fed.overtaken), (0, 0));
    let order: Vec<(String, String)> = [denied, innocent, open(5_000, 500)]
        .concat()
        .into_iter()
        .map(|row| (row.message_key.unwrap_or_default(), row.message_id))
        .collect();
    let records = [read_topic_on(&superuser, "open"), read_topic_on(&superuser, "read-only")].concat();
    oracle::judge(&records, &order).assert_delivered(fed.duplicates_possible);
}

/// A topic that was deleted and made anew with fewer partitions, and one that grew.
#[tokio::test(flavor = "multi_thread")]
async fn fast_follows_topics_that_change_their_partitions() {
    let admin = Admin::new(brokers());
    let publisher = publisher_with(brokers(), &[]);
    let (shrinking, growing) = (fresh_topic(8, &[]), fresh_topic(2, &[]));
    let rows = |from: usize, topic: &str| -> Vec<Message> {
        (from..from + 1_500).map(|place| row(place, topic, Some(&format!("k{}", place % 40)))).collect()
    };
    feed(&publisher, &Feeding::default(), rows(0, &shrinking), |_, _| {}).await;
    admin.delete(&shrinking);
    admin.create(&shrinking, 2, &[]);
    let fed = feed(&publisher, &Feeding::default(), rows(2_000, &shrinking), |_, _| {}).await;
    println!("after shrinking: {:?}, {} rebuilds", fed.errors, publisher.health().rebuilds);
    fed.assert_delivered(&read_topic(&shrinking));
    assert_eq!(fed.failed, 0);

    // In the middle of a stream.
    let feeding = Feeding { rows_max: 100, calls_max: 2, ..Feeding::default() };
    let fed = feed(&publisher, &feeding, rows(4_000, &growing), |call, _| {
        if call == 5 {
            admin.grow(&growing, 6);
        }
    })
    .await;
    fed.assert_delivered(&read_topic(&growing));
    assert_eq!((fed.duplicates_possible, fed.failed, fed.errors), (0, 0, BTreeMap::new()));

    let shrinking = fresh_topic(8, &[]);
    let mut remade = false;
    let fed = feed(&publisher, &feeding, rows(6_000, &shrinking), |call, _| {
        if call == 6 {
            admin.delete(&shrinking);
            admin.create(&shrinking, 2, &[]);
            remade = true;
        }
    })
    .await;
    println!("while shrinking: {:?}, {} rebuilds", fed.errors, publisher.health().rebuilds);
    assert!(remade);
    assert_eq!((fed.failed, fed.overtaken), (0, 0));
    // What was there before is gone with the topic.
    let verdict = fed.judge(&read_topic(&shrinking));
    assert_eq!((verdict.order_violations, verdict.unexpected), (vec![], vec![]));
    assert!(verdict.missing.len() <= 800, "{} missing", verdict.missing.len());
}

/// The broker stands still, for longer than the calls, with all they may have on its way; then it goes on.
#[test]
fn fast_outlasts_a_broker_that_stands_still() {
    let kafka = victims::kafka();
    let topic = unique("still");
    Admin::new(&kafka.bootstrap()).create(&topic, 3, &[]);
    let publisher = publisher_with(&kafka.bootstrap(), &[]);
    for (round, still, timeout) in [(0, 1, 6), (1, 9, 5)] {
        let rows = |from: usize, count: usize| -> Vec<Message> {
            let place = |n: usize| 100_000 * round + from + n;
            (0..count).map(|n| row(place(n), &topic, Some(&format!("k{}", n % 50)))).collect()
        };
        run(async || feed(&publisher, &Feeding::default(), rows(0, 100), |_, _| {}).await);
        let feeding = Feeding { timeout: Duration::from_secs(timeout), ..Feeding::default() };
        let all = rows(1_000, 4_000);
        std::thread::scope(|scope| {
            let fed = run(async || {
                feed(&publisher, &feeding, all, |call, _| {
                    if call == 0 {
                        kafka.pause().expect("pause the broker");
                        scope.spawn(|| {
                            std::thread::sleep(Duration::from_secs(still));
                            kafka.resume().expect("let the broker go on");
                        });
                    }
                })
                .await
            });
            println!(
                "{still} s: {} calls, {} duplicates possible, {} rebuilds, {:?}",
                fed.calls,
                fed.duplicates_possible,
                publisher.health().rebuilds,
                fed.errors
            );
            assert_eq!((fed.failed, fed.overtaken), (0, 0), "no row is to blame: {:?}", fed.errors);
            let mut records = read_topic_on(&kafka.bootstrap(), &topic);
            records.retain(|record| fed.order.iter().any(|(_, id)| id == record.message_id()));
            fed.assert_delivered(&records);
        });
    }
    assert_eq!(publisher.health().parked, []);
}

/// The broker is killed in the middle of a stream, and comes back.
#[test]
fn fast_outlasts_a_broker_that_is_killed() {
    let kafka = victims::kafka();
    let topic = unique("killed");
    Admin::new(&kafka.bootstrap()).create(&topic, 3, &[]);
    let publisher = publisher_with(&kafka.bootstrap(), &[]);
    let rows: Vec<Message> = (0..20_000).map(|place| row(place, &topic, Some(&format!("k{}", place % 60)))).collect();
    std::thread::scope(|scope| {
        let fed = run(async || {
            feed(&publisher, &Feeding::default(), rows, |call, _| {
                if call == 8 {
                    scope.spawn(|| {
                        kafka.kill().expect("kill the broker");
                        kafka.restart().expect("start it again");
                    });
                }
            })
            .await
        });
        println!(
            "{} calls, {} duplicates possible, {} rebuilds, {:?}",
            fed.calls,
            fed.duplicates_possible,
            publisher.health().rebuilds,
            fed.errors
        );
        assert_eq!(fed.failed, 0, "no row is to blame: {:?}", fed.errors);
        fed.assert_delivered(&read_topic_on(&kafka.bootstrap(), &topic));
    });
}

/// A queue for fifty records is back-pressure, nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn fast_waits_while_the_queue_is_full() {
    let topic = fresh_topic(3, &[]);
    let publisher = publisher_with(brokers(), &[("queue.buffering.max.messages", "50")]);
    let rows: Vec<Message> = (0..5_000).map(|place| row(place, &topic, Some(&format!("k{}", place % 30)))).collect();
    let fed = feed(&publisher, &Feeding::default(), rows, |_, _| {}).await;
    fed.assert_delivered(&read_topic(&topic));
    assert_eq!((fed.duplicates_possible, fed.failed, fed.errors), (0, 0, BTreeMap::new()));
    assert_eq!(publisher.health().rebuilds, 0);
}

/// A stop in mid-flight: what is on its way is acknowledged, nothing further is handed over, and the rest is the stop's.
#[tokio::test(flavor = "multi_thread")]
async fn fast_stops_in_mid_flight() {
    let (_, mut rng) = seeded();
    let topic = fresh_topic(2, &[]);
    // Back-pressure, so that a call lasts longer than it takes to hand its rows over.
    let publisher = publisher_with(brokers(), &[("queue.buffering.max.messages", "20")]);
    let mut stopped = 0;
    for round in 0..10 {
        let rows: Vec<Message> = (0..500).map(|n| row(round * 500 + n, &topic, Some(&format!("k{}", n % 5)))).collect();
        let batch = batch(rows, LONG);
        let wait = Duration::from_micros(rng.random_range(0..100_000));
        let stop = async {
            tokio::time::sleep(wait).await;
            batch.stop.cancel();
        };
        let (outcomes, ()) = tokio::join!(crate::publish::publish(&publisher, &batch), stop);
        let mut held = BTreeSet::new();
        for (row, outcome) in batch.messages.iter().zip(&outcomes) {
            match outcome {
                Outcome::Acked { maybe_twice: false, .. } => assert!(!held.contains(&row.message_key), "{round}"),
                Outcome::NotSent(Setback { blame: Blame::Stop | Blame::Lane, .. }) => {
                    held.insert(row.message_key.clone());
                    stopped += 1;
                }
                other => panic!("{other:?}"),
            }
        }
    }
    println!("{stopped} of 5000 stopped");
    assert!(stopped > 0 && stopped < 5_000, "{stopped}");
    assert_eq!(read_topic(&topic).len(), 5_000 - stopped, "all that was written is acknowledged");
    assert_eq!(publisher.health().rebuilds, 0);
}

/// Nothing is handed over after the deadline.
#[tokio::test(flavor = "multi_thread")]
async fn fast_hands_nothing_over_after_its_deadline() {
    let topic = fresh_topic(1, &[]);
    let publisher = publisher_with(brokers(), &[]);
    feed(&publisher, &Feeding::default(), vec![row(0, &topic, Some("k"))], |_, _| {}).await;
    let late = batch(vec![row(1, &topic, Some("k")), row(2, &topic, Some("k"))], Duration::ZERO);
    let outcomes = crate::publish::publish(&publisher, &late).await;
    assert_eq!(shorts(&outcomes), ["not sent Topic kafka.out_of_time", "not sent Lane kafka.held_back"]);
    assert_eq!(read_topic(&topic).len(), 1);
}

/// Everything at once: two sources with their own policies over shared topics, rows that nobody takes, stops, and a broker that
/// stands still, dies and comes back. `KEIRO_RELAY_TEST_ROUNDS` makes it longer.
#[test]
fn fast_survives_chaos() {
    let (_, mut rng) = seeded();
    let rounds = std::env::var("KEIRO_RELAY_TEST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(4);
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    let publisher = small_batches(&brokers);
    for round in 0..rounds {
        let kinds: [(i32, &[(&str, &str)]); 3] =
            [(1, &[LIMIT]), (4, &[LIMIT]), (2, &[LIMIT, ("cleanup.policy", "compact")])];
        let topics = kinds.map(|(partitions, configs)| {
            let topic = unique("chaos");
            admin.create(&topic, partitions, configs);
            topic
        });
        let poisons = [0.0, 0.001, 0.01, 0.05][rng.random_range(0..4)];
        let sources: Vec<(Feeding, Vec<Message>)> = (0..2)
            .map(|source| {
                let policy = Policy::ALL[rng.random_range(0..Policy::ALL.len())];
                let (keys, few) = (rng.random_range(1..=60), rng.random_range(1..=3));
                let count = if policy == Policy::StopTheLine { 300 } else { rng.random_range(500..3_000) };
                let rows = (0..count).map(|n| {
                    let key = Some(format!("source {source} key {}", rng.random_range(0..keys)));
                    let key = key.filter(|_| rng.random_range(0..50) > 0);
                    let row = row(100_000 * source + n, &topics[rng.random_range(0..few)], key.as_deref());
                    let row = Message { payload: noise(rng.random_range(0..700)), ..row };
                    if rng.random_bool(poisons) { poison(row) } else { row }
                });
                let rows = rows.collect();
                let feeding = Feeding {
                    policy,
                    rows_max: rng.random_range(1..=400),
                    lane_rows_max: rng.random_range(1..=400),
                    calls_max: rng.random_range(1..=6),
                    timeout: Duration::from_secs(5),
                    ..Feeding::default()
                };
                (feeding, rows)
            })
            .collect();
        let stops: u32 = [0, 0, 5][rng.random_range(0..3)];
        let blows: Vec<u32> = (0..rng.random_range(0..4)).map(|_| rng.random_range(0..10)).collect();
        let pauses: Vec<u64> = blows.iter().map(|_| rng.random_range(50..3_000)).collect();
        let done = AtomicBool::new(false);
        let feds: Vec<Fed> = std::thread::scope(|scope| {
            scope.spawn(|| {
                for (blow, pause) in blows.iter().zip(&pauses) {
                    std::thread::sleep(Duration::from_millis(*pause / 4));
                    if done.load(Ordering::Relaxed) {
                        return;
                    }
                    if *blow == 0 {
                        kafka.kill().expect("kill the broker");
                        kafka.restart().expect("start it again");
                    } else {
                        let pause = if *blow == 1 { 7_000 } else { *pause };
                        kafka.pause().expect("pause the broker");
                        std::thread::sleep(Duration::from_millis(pause));
                        kafka.resume().expect("let the broker go on");
                    }
                }
            });
            let publisher = &publisher;
            let threads: Vec<_> = sources
                .iter()
                .map(|(feeding, rows)| {
                    scope.spawn(move || {
                        run(async || {
                            feed(publisher, feeding, rows.clone(), |_, stop| {
                                if stops > 0 && rand::random_ratio(1, stops) {
                                    let stop = stop.clone();
                                    let wait = Duration::from_millis(rand::random_range(0..40));
                                    tokio::spawn(async move {
                                        tokio::time::sleep(wait).await;
                                        stop.cancel();
                                    });
                                }
                            })
                            .await
                        })
                    })
                })
                .collect();
            let feds = threads.into_iter().map(|thread| thread.join().expect("fed")).collect();
            done.store(true, Ordering::Relaxed);
            feds
        });
        let records: Vec<Record> = topics.iter().flat_map(|topic| read_topic_on(&brokers, topic)).collect();
        for ((feeding, rows), fed) in sources.iter().zip(&feds) {
            println!(
                "round {round}: {} rows {}, {} calls, poisons {poisons}, blows {blows:?}: {} rejected, {} failed, {} \
                 duplicates possible, {} rebuilds",
                rows.len(),
                feeding.policy,
                fed.calls,
                fed.rejected.len(),
                fed.failed,
                fed.duplicates_possible,
                publisher.health().rebuilds
            );
            let ours: Vec<Record> = records
                .iter()
                .filter(|record| fed.order.iter().any(|(_, id)| id == record.message_id()))
                .cloned()
                .collect();
            fed.assert_delivered(&ours);
            assert_eq!(fed.failed, 0, "{:?}", fed.errors);
            let large = rows.iter().filter(|row| row.payload.len() == POISON_OCTETS);
            let keyless = rows.iter().filter(|row| row.message_key.is_none() && row.destination == topics[2]);
            let mut expected: BTreeSet<&str> = large.map(|row| row.message_id.as_str()).collect();
            expected.extend(keyless.map(|row| row.message_id.as_str()));
            assert_eq!(fed.rejected.keys().map(String::as_str).collect::<BTreeSet<_>>(), expected);
        }
    }
}

/// Half of a topic's partitions lose their leader: the other half goes on at full speed, and nobody's row is to blame.
#[tokio::test(flavor = "multi_thread")]
async fn fast_goes_on_beside_partitions_without_a_leader() {
    let kafka = own_kafka(KafkaOptions { brokers: 2, ..KafkaOptions::default() });
    let admin = Admin::new(&kafka.bootstrap());
    admin.create_assigned("half", &[&[1], &[2], &[1], &[2], &[1], &[2]], &[]);
    let publisher = publisher_with(&kafka.bootstrap(), &[]);
    let rows = |from: usize, count: usize| -> Vec<Message> {
        (from..from + count).map(|place| row(place, "half", Some(&format!("k{}", place % 30)))).collect()
    };
    feed(&publisher, &Feeding::default(), rows(0, 300), |_, _| {}).await;
    kafka.kill_broker(2).expect("kill the second broker");

    let mut left: Vec<Message> = Vec::new();
    let mut took = Vec::new();
    for call in 0..6 {
        // Lanes that are held back stay so, as they would for the relay.
        let keys: BTreeSet<_> = left.iter().map(|row| row.message_key.clone()).collect();
        let (behind, ahead): (Vec<_>, Vec<_>) =
            rows(1_000 + call * 300, 300).into_iter().partition(|row| keys.contains(&row.message_key));
        let batch = batch(ahead, Duration::from_secs(20));
        let begun = Instant::now();
        let outcomes = crate::publish::publish(&publisher, &batch).await;
        took.push(begun.elapsed());
        for (row, outcome) in batch.messages.iter().zip(outcomes) {
            let lost_leader = partition::of_key(row.message_key.as_deref().expect("a key"), 6) % 2 == 1;
            match outcome {
                Outcome::Acked { partition, .. } => assert!(partition % 2 == 0, "{partition}"),
                Outcome::NotSent(Setback { blame: Blame::Topic | Blame::Lane, .. }) if lost_leader => {
                    left.push(Message { attempt_count: 0, ..row.clone() });
                }
                // In flight when the broker died.
                Outcome::Unknown(Setback { blame: Blame::Topic | Blame::Lane, .. }) if lost_leader => {
                    left.push(Message { attempt_count: 0, ..row.clone() });
                }
                other => panic!("{row:?}: {other:?}"),
            }
        }
        left.extend(behind);
    }
    println!("{took:?}, {} rows left, {} rebuilds", left.len(), publisher.health().rebuilds);
    assert!(took[0] < Duration::from_secs(12), "the first call asks what is wrong: {took:?}");
    assert!(took[1..].iter().all(|took| *took < Duration::from_secs(3)), "the others know: {took:?}");
    let parked = publisher.health().parked;
    assert_eq!(parked.len(), 1);
    assert!(parked[0].reason.contains("topic half [1]") && parked[0].reason.contains("leader"), "{parked:?}");

    kafka.restart_broker(2).expect("start the second broker");
    left.sort_by_key(Message::position);
    let fed =
        feed(&publisher, &Feeding { timeout: Duration::from_secs(10), ..Feeding::default() }, left, |_, _| {}).await;
    assert_eq!((fed.failed, fed.overtaken), (0, 0), "{:?}", fed.errors);
    let order: Vec<(String, String)> = [rows(0, 300), rows(1_000, 1_800)]
        .concat()
        .into_iter()
        .map(|row| (row.message_key.expect("a key"), row.message_id))
        .collect();
    oracle::judge(&read_topic_on(&kafka.bootstrap(), "half"), &order).assert_delivered(500);
    assert_eq!(publisher.health().parked, []);
}

/// Again and again a call lets go of records that get no answer, and the client is replaced under others that are in the middle
/// of handing theirs over.
#[test]
fn fast_keeps_order_while_its_client_is_replaced() {
    const TIMES: usize = 12;
    let kafka = own_kafka(KafkaOptions { brokers: 2, ..KafkaOptions::default() });
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    let dying: Vec<String> = (0..TIMES).map(|number| format!("dying-{number}")).collect();
    for topic in &dying {
        admin.create_assigned(topic, &[&[2]], &[]);
    }
    admin.create_assigned("alive", &[&[1], &[1]], &[]);
    // Small batches, so that others always have something queued while they hand over more.
    let publisher = small_batches(&brokers);
    run(async || {
        let warm = dying.iter().enumerate().map(|(place, topic)| row(place, topic, Some("k"))).collect();
        feed(&publisher, &Feeding::default(), warm, |_, _| {}).await;
    });
    kafka.kill_broker(2).expect("kill the second broker");
    let is_over = AtomicBool::new(false);
    let mut order = Vec::new();
    let mut duplicates_possible = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for topic in &dying {
                let batch = batch(vec![row(900_000, topic, Some("k"))], Duration::from_secs(20));
                let outcomes = run(async || crate::publish::publish(&publisher, &batch).await);
                assert!(shorts(&outcomes)[0].contains("Topic"), "{outcomes:?}");
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let mut round = 0;
        while !is_over.load(Ordering::Relaxed) {
            let rows = (0..2_000).map(|n| row(1_000 + round * 2_000 + n, "alive", Some(&format!("k{}", n % 3))));
            let rows = rows.collect();
            let fed = run(async || feed(&publisher, &Feeding::default(), rows, |_, _| {}).await);
            assert_eq!((fed.overtaken, fed.failed), (0, 0), "{:?}", fed.errors);
            duplicates_possible += fed.duplicates_possible;
            order.extend(fed.order.into_iter().map(|(lane, id)| (format!("{round} {lane}"), id)));
            round += 1;
        }
    });
    println!(
        "{} rows, {} rebuilds, {duplicates_possible} duplicates possible",
        order.len(),
        publisher.health().rebuilds
    );
    assert!(publisher.health().rebuilds >= TIMES as u64 / 2, "{:?}", publisher.health());
    oracle::judge(&read_topic_on(&brokers, "alive"), &order).assert_delivered(duplicates_possible);
}

/// A stop while the broker stands still ends long before the deadline, and what may have been written says so.
#[test]
fn fast_stops_while_the_broker_stands_still() {
    let kafka = victims::kafka();
    let topic = unique("stopped");
    Admin::new(&kafka.bootstrap()).create(&topic, 1, &[]);
    let relay = config::Relay { shutdown_grace: Duration::from_secs(13), ..relay() };
    let publisher = KafkaPublisher::new(&crate::publish::kafka(&kafka.bootstrap()), &relay).expect("a publisher");
    let rows = |from: usize| -> Vec<Message> {
        (from..from + 300).map(|place| row(place, &topic, Some(&format!("k{}", place % 5)))).collect()
    };
    run(async || feed(&publisher, &Feeding::default(), rows(0), |_, _| {}).await);
    kafka.pause().expect("pause the broker");
    let silent = batch(rows(1_000), Duration::from_secs(600));
    let begun = Instant::now();
    let outcomes = run(async || {
        let stop = async {
            // Long enough for records to be on their way; the outcomes are the same if they are not.
            tokio::time::sleep(Duration::from_millis(300)).await;
            silent.stop.cancel();
        };
        tokio::join!(crate::publish::publish(&publisher, &silent), stop).0
    });
    println!("a stop took {:?}: {:?}", begun.elapsed(), shorts(&outcomes)[0]);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    for outcome in &outcomes {
        match outcome {
            Outcome::NotSent(setback) | Outcome::Unknown(setback) => {
                assert!(matches!(setback.blame, Blame::Stop | Blame::Lane), "{outcome:?}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(publisher.health().parked, [], "a stop says nothing against a topic");
    let unknown = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Unknown(_))).count();
    kafka.resume().expect("let the broker go on");
    let fed = run(async || feed(&publisher, &Feeding::default(), rows(1_000), |_, _| {}).await);
    let mut records = read_topic_on(&kafka.bootstrap(), &topic);
    records.retain(|record| fed.order.iter().any(|(_, id)| id == record.message_id()));
    let verdict = fed.judge(&records);
    verdict.assert_delivered(unknown + fed.duplicates_possible);
}

/// A topic's fault that lasts for longer than `[kafka] topic_fault_dead_after` spends attempts.
#[tokio::test(flavor = "multi_thread")]
async fn topic_fault_spends_attempts_once_it_has_lasted_too_long() {
    let missing = unique("missing");
    let kafka = config::Kafka {
        brokers: brokers().split(',').map(str::to_owned).collect(),
        topic_fault_dead_after: Some(Duration::from_millis(1_500)),
        ..config::Kafka::default()
    };
    let publisher = KafkaPublisher::new(&kafka, &relay()).expect("a publisher");
    let rows = || vec![row(1, &missing, Some("k")), row(2, &missing, Some("k")), row(3, &missing, None)];
    let begun = Instant::now();
    let end = begun + LONG;
    loop {
        let outcomes = crate::publish::publish(&publisher, &batch(rows(), LONG)).await;
        let outcomes = shorts(&outcomes);
        if outcomes[0].starts_with("failed") {
            assert!(begun.elapsed() > Duration::from_millis(1_500));
            assert_eq!(
                outcomes,
                ["failed kafka.unknown_topic", "not sent Lane kafka.held_back", "failed kafka.unknown_topic"]
            );
            break;
        }
        let returned = "not sent Topic kafka.unknown_topic";
        assert_eq!(outcomes, [returned, "not sent Lane kafka.held_back", returned]);
        assert!(Instant::now() < end);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Prints records per second; `cargo test --release --test live fast_figures -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "it measures"]
async fn fast_figures() {
    use rdkafka::config::{ClientConfig, FromClientConfigAndContext as _};
    use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};

    let linger = std::env::var("KEIRO_RELAY_TEST_LINGER").unwrap_or_else(|_| "1".to_owned());
    let publisher = publisher_with(brokers(), &[("linger.ms", &linger)]);
    let payload =
        bytes::Bytes::from(vec![b"{\"order\": 12345, \"what\": \"one of many things\"}, ".to_vec(); 21].concat());
    let cases: [(&str, usize, i32, Policy); 5] = [
        ("10,000 keys, 12 partitions", 10_000, 12, Policy::PerKeyHeadOfLine),
        ("60 keys, 12 partitions", 60, 12, Policy::PerKeyHeadOfLine),
        ("one hot key", 1, 12, Policy::PerKeyHeadOfLine),
        ("per_source, 1 partition", 10_000, 1, Policy::PerSourceStream),
        ("per_source, 12 partitions", 10_000, 12, Policy::PerSourceStream),
    ];
    for (name, keys, partitions, policy) in cases {
        let topic = fresh_topic(partitions, &[]);
        for (way, calls_max, count) in
            [("fast", 8, 100_000), ("careful", 8, 10_000), ("bare", 1, 100_000), ("fast", 8, 100_000)]
        {
            // One source has one lane, so its calls come one after the other.
            let calls_max = if policy == Policy::PerSourceStream || keys == 1 { 1 } else { calls_max };
            let count = if policy == Policy::PerSourceStream && partitions > 1 { count / 10 } else { count };
            let rows: Vec<Message> = (0..count)
                .map(|place| Message {
                    payload: payload.clone(),
                    ..row(place, &topic, Some(&format!("key-{}", place % keys)))
                })
                .collect();
            let cpu = cpu_seconds();
            let begun;
            if way == "bare" {
                let mut client = ClientConfig::new();
                client.set("bootstrap.servers", brokers()).set("enable.idempotence", "true").set("linger.ms", "1");
                client.set("compression.type", "lz4").set("partitioner", "murmur2_random");
                let producer: ThreadedProducer<DefaultProducerContext> =
                    ThreadedProducer::from_config_and_context(&client, DefaultProducerContext).expect("a producer");
                // Connected, as the other one is.
                producer.client().fetch_metadata(Some(&topic), LONG).expect("the topic");
                begun = Instant::now();
                for row in &rows {
                    let record = keiro_relay::domain::record::build(row).expect("a record");
                    let mut headers = rdkafka::message::OwnedHeaders::new();
                    for (key, value) in &record.headers {
                        headers = headers.insert(rdkafka::message::Header { key, value: Some(value.as_ref()) });
                    }
                    let mut native = BaseRecord::to(&topic)
                        .payload(&record.payload[..])
                        .key(record.key.unwrap_or_default())
                        .headers(headers);
                    while let Err((_, back)) = producer.send(native) {
                        native = back;
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                }
                producer.flush(LONG).expect("all sent");
            } else {
                let batches: Vec<Batch> = rows
                    .chunks(500)
                    .map(|rows| Batch {
                        plan: plan::plan(policy, rows).into(),
                        one_at_a_time: way == "careful",
                        deadline: Instant::now() + Duration::from_secs(300),
                        ..batch(rows.to_vec(), LONG)
                    })
                    .collect();
                begun = Instant::now();
                let acked: usize =
                    futures_util::StreamExt::collect::<Vec<usize>>(futures_util::StreamExt::buffer_unordered(
                        futures_util::stream::iter(batches.iter().map(|batch| async {
                            let outcomes = publisher.publish(batch).await.expect("outcomes");
                            outcomes.iter().filter(|(_, outcome)| matches!(outcome, Outcome::Acked { .. })).count()
                        })),
                        calls_max,
                    ))
                    .await
                    .into_iter()
                    .sum();
                assert_eq!(acked, count);
            }
            let took = begun.elapsed().as_secs_f64();
            println!(
                "{name}: {way}: {:.0} records/s, {:.1} µs of processor time a record",
                count as f64 / took,
                (cpu_seconds() - cpu) * 1e6 / count as f64
            );
        }
    }
    assert_eq!(publisher.health().rebuilds, 0);
}

/// Seconds of processor time that this process used.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("the process's statistics");
    let fields: Vec<&str> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
    let ticks = |field: usize| fields[field].parse::<f64>().expect("a number");
    (ticks(11) + ticks(12)) / 100.0
}
