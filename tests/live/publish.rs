//! The Kafka publisher's careful lane against real brokers: what each row gets told, and what lies in the topics afterwards.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use keiro_relay::cli::demo::services::KafkaOptions;
use keiro_relay::config;
use keiro_relay::domain::message::{Message, PgTime};
use keiro_relay::domain::outcome::{Blame, Outcome, Setback};
use keiro_relay::domain::plan;
use keiro_relay::domain::policy::Policy;
use keiro_relay::publish::kafka::KafkaPublisher;
use keiro_relay::publish::{Batch, Publisher as _};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use rdkafka::TopicPartitionList;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::support::acls;
use crate::support::mock::Mock;
use crate::support::services::{brokers, own_kafka};
use crate::support::topics::{Admin, Record, fresh_topic, read_topic, read_topic_on};
use crate::support::{LONG, oracle, unique, wait_until, wait_until_async};

/// 2026-01-02 03:04:05.678 UTC, which is far from now on purpose.
const CLAIMED_AT_MILLIS: i64 = 1_767_323_045_678;
/// The client's limit in these tests.
pub(crate) const CLIENT_BYTES_MAX: usize = 200_000;

pub(crate) fn kafka(brokers: &str) -> config::Kafka {
    config::Kafka {
        brokers: brokers.split(',').map(str::to_owned).collect(),
        message_bytes_max: CLIENT_BYTES_MAX,
        topic_fault_dead_after: None,
        properties: [("statistics.interval.ms".to_owned(), config::Secret::new("1000"))].into(),
        property_files: [].into(),
    }
}

pub(crate) fn relay() -> config::Relay {
    config::Relay {
        instance: "test".into(),
        batch_rows_max: 500,
        batch_bytes_max: 8 << 20,
        in_flight_rows_max: 10_000,
        in_flight_bytes_max: 64 << 20,
        poll_interval_min: Duration::from_millis(2),
        poll_interval_max: Duration::from_millis(250),
        publish_timeout: Duration::from_secs(30),
        settle_timeout: Duration::from_secs(10),
        publishing_timeout: Duration::from_secs(300),
        shutdown_grace: Duration::from_secs(20),
        unlisted_sources: config::UnlistedSources::Default,
    }
}

pub(crate) fn publisher(brokers: &str) -> KafkaPublisher {
    KafkaPublisher::new(&kafka(brokers), &relay()).expect("a publisher")
}

pub(crate) fn row(topic: &str, key: Option<&str>, message_id: &str) -> Message {
    Message {
        outbox_id: Uuid::new_v4(),
        message_id: message_id.into(),
        source_name: "tests".into(),
        destination: topic.into(),
        message_key: key.map(str::to_owned),
        event_type: "Tested".into(),
        schema_version: 1,
        content_type: "text/plain".into(),
        schema_registry: None,
        schema_subject: None,
        schema_version_ref: None,
        schema_id: None,
        schema_fingerprint: None,
        source_event_id: None,
        source_global_position: None,
        causation_id: None,
        correlation_id: None,
        traceparent: None,
        tracestate: None,
        payload: Bytes::copy_from_slice(message_id.as_bytes()),
        payload_withheld: None,
        attributes: None,
        occurred_at: PgTime::from_unix_micros(0),
        attempt_count: 1,
        last_error: None,
        created_at: PgTime(0),
        updated_at: PgTime::from_unix_micros(CLAIMED_AT_MILLIS * 1000 + 999),
    }
}

/// Octets that no compression makes smaller.
pub(crate) fn noise(octets: usize) -> Bytes {
    let mut noise = vec![0; octets];
    rand::rng().fill(&mut noise[..]);
    noise.into()
}

fn batch(policy: Policy, messages: Vec<Message>, timeout: Duration) -> Batch {
    let plan = Arc::new(plan::plan(policy, &messages));
    let deadline = Instant::now() + timeout;
    Batch {
        messages: messages.into(),
        plan,
        // All of it through the careful lane.
        one_at_a_time: true,
        deadline,
        stop: CancellationToken::new(),
    }
}

/// Publishes and returns the outcomes in claim order; there is exactly one for each row, by the deadline.
pub(crate) async fn publish(publisher: &KafkaPublisher, batch: &Batch) -> Vec<Outcome> {
    let outcomes = publisher.publish(batch).await.expect("outcomes");
    // Generous: a test that runs beside others on two cores may be late to look at the clock.
    assert!(Instant::now() < batch.deadline + Duration::from_secs(2), "the call outlived its deadline");
    assert_eq!(outcomes.len(), batch.messages.len());
    let mut outcomes: HashMap<_, _> = outcomes.into_iter().collect();
    let in_order = batch.messages.iter().map(|message| outcomes.remove(&message.outbox_id));
    in_order.map(|outcome| outcome.expect("one outcome per row")).collect()
}

/// An outcome in short: `acked`, `rejected CODE`, `failed CODE`, `unknown BLAME CODE`, `not sent BLAME CODE`.
pub(crate) fn short(outcome: &Outcome) -> String {
    let code = |error: &str| error.split(": ").next().unwrap_or_default().to_owned();
    let setback = |what: &str, Setback { blame, error, .. }: &Setback| format!("{what} {blame:?} {}", code(error));
    match outcome {
        Outcome::Acked { .. } => "acked".to_owned(),
        Outcome::Rejected(rejection) => format!("rejected {}", rejection.code),
        Outcome::Failed { error } => format!("failed {}", code(error)),
        Outcome::Unknown(what) => setback("unknown", what),
        Outcome::NotSent(what) => setback("not sent", what),
    }
}

pub(crate) fn shorts(outcomes: &[Outcome]) -> Vec<String> {
    outcomes.iter().map(short).collect()
}

pub(crate) fn text(outcome: &Outcome) -> &str {
    match outcome {
        Outcome::Acked { .. } => "",
        Outcome::Rejected(rejection) => &rejection.detail,
        Outcome::Failed { error } => error,
        Outcome::Unknown(setback) | Outcome::NotSent(setback) => &setback.error,
    }
}

pub(crate) fn setback(outcome: &Outcome) -> &Setback {
    match outcome {
        Outcome::Unknown(setback) | Outcome::NotSent(setback) => setback,
        other => panic!("no setback: {other:?}"),
    }
}

/// Runs what blocks beside the calls under test, which share a task with whoever waits for it.
async fn off<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}

pub(crate) fn ids(records: &[Record]) -> Vec<&str> {
    records.iter().map(Record::message_id).collect()
}

/// Publishes the rows again and again, as the relay does with rows whose attempt was returned, until all are acknowledged.
async fn publish_until_acked(publisher: &KafkaPublisher, policy: Policy, mut messages: Vec<Message>) {
    let end = Instant::now() + LONG;
    loop {
        let batch = batch(policy, messages, Duration::from_secs(5));
        let outcomes = publish(publisher, &batch).await;
        let left =
            batch.messages.iter().zip(&outcomes).filter(|(_, outcome)| !matches!(outcome, Outcome::Acked { .. }));
        messages = left.map(|(message, _)| message.clone()).collect();
        if messages.is_empty() {
            return;
        }
        assert!(Instant::now() < end, "still {:?}", shorts(&outcomes));
        for outcome in &outcomes {
            assert!(!matches!(outcome, Outcome::Rejected(_) | Outcome::Failed { .. }), "{outcome:?}");
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_wire_format_as_a_consumer_sees_it() {
    let topic = fresh_topic(1, &[]);
    let full = Message {
        schema_subject: Some("s".into()),
        schema_id: Some(7),
        causation_id: Some(Uuid::nil()),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        attributes: Some(r#"{"b": 1.50, "aa": "🧾 שלום"}"#.into()),
        payload: Bytes::from_static(b"\x00\xff{"),
        ..row(&topic, Some("ключ 🔑"), "m-full")
    };
    let empty = Message { payload: Bytes::new(), event_type: String::new(), ..row(&topic, Some(""), "m-empty") };
    let bare = row(&topic, None, "m-bare");
    let batch = batch(Policy::PerSourceStream, vec![full, empty, bare], LONG);
    let outcomes = publish(&publisher(brokers()), &batch).await;
    let expected: Vec<_> = (0..3).map(|offset| Outcome::Acked { partition: 0, offset, maybe_twice: false }).collect();
    assert_eq!(outcomes, expected);

    let records = read_topic(&topic);
    let pair = |(name, value): (&str, &str)| (name.to_owned(), value.as_bytes().to_vec());
    let headers = [
        ("keiro-message-id", "m-full"),
        ("keiro-source", "tests"),
        ("keiro-destination", topic.as_str()),
        ("keiro-event-type", "Tested"),
        ("keiro-schema-version", "1"),
        ("content-type", "text/plain"),
        ("keiro-schema-subject", "s"),
        ("keiro-schema-id", "7"),
        ("keiro-causation-id", "00000000-0000-0000-0000-000000000000"),
        ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ("keiro-occurred-at", "1970-01-01T00:00:00Z"),
        ("keiro-attributes", r#"{"aa":"🧾 שלום","b":1.50}"#),
    ];
    assert_eq!(records[0].headers, headers.map(pair));
    assert_eq!(records[0].key.as_deref(), Some("ключ 🔑".as_bytes()));
    assert_eq!(records[0].value.as_deref(), Some(&b"\x00\xff{"[..]));
    assert_eq!(records[1].key.as_deref(), Some(&b""[..]), "an empty key is a key");
    assert_eq!(records[1].value.as_deref(), Some(&b""[..]), "an empty payload is no tombstone");
    assert_eq!(records[1].header("keiro-event-type"), Some(""));
    assert_eq!(records[2].key, None);
    for record in &records {
        assert_eq!(record.timestamp, CLAIMED_AT_MILLIS, "the claim's database time, not this host's");
    }
}

/// The hashes are those of Kafka's own `UtilsTest.testMurmur2`.
#[tokio::test(flavor = "multi_thread")]
async fn publish_keys_land_where_java_producers_put_them() {
    const PARTITIONS: i32 = 12;
    let hashes: [(&str, i32); 6] = [
        ("21", -973_932_308),
        ("foobar", -790_332_482),
        ("a-little-bit-long-string", -985_981_536),
        ("a-little-bit-longer-string", -1_486_304_829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
        ("abc", 479_470_107),
    ];
    let topic = fresh_topic(PARTITIONS, &[]);
    let messages = hashes.map(|(key, _)| row(&topic, Some(key), key)).to_vec();
    let outcomes = publish(&publisher(brokers()), &batch(Policy::PerKeyHeadOfLine, messages, LONG)).await;
    for ((key, hash), outcome) in hashes.iter().zip(outcomes) {
        let expected = (hash & i32::MAX) % PARTITIONS;
        assert!(matches!(outcome, Outcome::Acked { partition, .. } if partition == expected), "{key}: {outcome:?}");
    }
}

/// Kafka makes its internal topic when somebody first asks for a group's offsets.
fn make_offsets_topic() {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers()).set("group.id", "anyone");
    let consumer: BaseConsumer = config.create().expect("a consumer");
    let mut list = TopicPartitionList::new();
    list.add_partition("anything", 0);
    wait_until("the offsets topic", LONG, || consumer.committed_offsets(list.clone(), Duration::from_secs(5)).is_ok());
}

/// Rows that no broker takes, each among good neighbours, in one lane and in others.
#[tokio::test(flavor = "multi_thread")]
async fn publish_rejects_a_row_for_its_content_and_goes_on() {
    let topic = fresh_topic(1, &[("max.message.bytes", "2000")]);
    let compacted = fresh_topic(1, &[("cleanup.policy", "compact")]);
    let hot = |id: &str| row(&topic, Some("hot"), id);
    let rows = || {
        vec![
            hot("h1"),
            Message { payload: noise(5_000), ..hot("over the topic's limit") },
            hot("h2"),
            row(&topic, Some("cold"), "c1"),
            Message { payload: noise(CLIENT_BYTES_MAX), ..hot("over the client's limit") },
            row(&compacted, None, "without a key"),
            row(&compacted, Some("hot"), "k1"),
            hot("h3"),
            Message { destination: "no/such".into(), ..hot("an illegal topic") },
            Message { destination: "__consumer_offsets".into(), ..hot("an internal topic") },
            Message { occurred_at: PgTime::INFINITY, ..hot("an infinite instant") },
            row(&topic, Some("cold"), "c2"),
            hot("h4"),
        ]
    };
    let publisher = publisher(brokers());
    make_offsets_topic();
    for policy in Policy::ALL {
        let batch = batch(policy, rows(), LONG);
        let outcomes = publish(&publisher, &batch).await;
        let expected = [
            "acked",
            "rejected kafka.message_too_large",
            "acked",
            "acked",
            "rejected kafka.message_too_large",
            "rejected kafka.invalid_record",
            "acked",
            "acked",
            "rejected kafka.invalid_topic",
            "rejected kafka.invalid_topic",
            "rejected row.invalid_timestamp",
            "acked",
            "acked",
        ];
        assert_eq!(shorts(&outcomes), expected, "{policy}: {outcomes:#?}");
        // Side, topic, size and limit, and what to change.
        for part in ["broker: ", &topic, "max.message.bytes = 2000", " octets"] {
            assert!(text(&outcomes[1]).contains(part), "{part}: {}", text(&outcomes[1]));
        }
        for part in ["client: ", &topic, "message_bytes_max = 200000", "message.max.bytes", " octets"] {
            assert!(text(&outcomes[4]).contains(part), "{part}: {}", text(&outcomes[4]));
        }
        assert!(text(&outcomes[5]).contains(&compacted), "{}", text(&outcomes[5]));
    }
    let mut expected_cold = Vec::new();
    let mut expected_hot = Vec::new();
    for _ in Policy::ALL {
        expected_cold.extend(["c1", "c2"]);
        expected_hot.extend(["h1", "h2", "h3", "h4"]);
    }
    let records = read_topic(&topic);
    let of = |key: &str| -> Vec<_> {
        records.iter().filter(|record| record.key.as_deref() == Some(key.as_bytes())).map(Record::message_id).collect()
    };
    // Best effort, the last policy, has no order.
    let (mut hot, mut cold) = (of("hot"), of("cold"));
    hot[12..].sort_unstable();
    cold[6..].sort_unstable();
    assert_eq!((hot, cold), (expected_hot, expected_cold));
    assert_eq!(ids(&read_topic(&compacted)).last(), Some(&"k1"));
    assert_eq!(publisher.health().parked, [], "a refused record says nothing against its topic");
    assert_eq!(publisher.health().rebuilds, 0);
}

/// An unknown topic costs its own rows and those behind them a wait, never a verdict, and they go out soon after it is there.
#[tokio::test(flavor = "multi_thread")]
async fn publish_waits_for_a_topic_that_does_not_exist_yet() {
    let (topic, late) = (fresh_topic(1, &[]), unique("late"));
    let publisher = publisher(brokers());
    let rows = vec![
        row(&topic, Some("a"), "a1"),
        row(&late, Some("a"), "a2"),
        row(&topic, Some("a"), "a3"),
        row(&topic, Some("b"), "b1"),
        row(&late, Some("c"), "c1"),
        row(&late, None, "n1"),
    ];
    let batch_1 = batch(Policy::PerKeyHeadOfLine, rows.clone(), LONG);
    let outcomes = publish(&publisher, &batch_1).await;
    let expected = [
        "acked",
        "not sent Topic kafka.unknown_topic",
        "not sent Lane kafka.held_back",
        "acked",
        "not sent Topic kafka.unknown_topic",
        "not sent Topic kafka.unknown_topic",
    ];
    assert_eq!(shorts(&outcomes), expected, "{outcomes:#?}");
    assert!(text(&outcomes[1]).contains(&late) && text(&outcomes[1]).contains("create it"), "{}", text(&outcomes[1]));
    let pause = setback(&outcomes[1]).pause;
    assert!(pause > Duration::ZERO && pause <= Duration::from_secs(2), "{pause:?}");
    let parked = publisher.health().parked;
    assert_eq!(parked.len(), 1);
    assert_eq!(parked[0].topic, late);
    assert!(parked[0].reason.starts_with("kafka.unknown_topic: "), "{}", parked[0].reason);
    assert_eq!(publisher.health().problem, None, "the cluster is well");

    // While it rests, nothing of it touches Kafka, and nothing else waits.
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, vec![row(&late, Some("d"), "d1")], LONG)).await;
    assert_eq!(shorts(&outcomes), ["not sent Topic kafka.unknown_topic"]);

    Admin::new(brokers()).create(&late, 3, &[]);
    let created = Instant::now();
    let left = vec![rows[1].clone(), rows[2].clone(), rows[4].clone(), rows[5].clone()];
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, left).await;
    println!("all rows out {:?} after the topic was created", created.elapsed());
    assert_eq!(publisher.health().parked, []);
    assert_eq!(ids(&read_topic(&topic)), ["a1", "b1", "a3"]);
    let records = read_topic(&late);
    let mut found = ids(&records);
    found.sort_unstable();
    assert_eq!(found, ["a2", "c1", "n1"]);
}

/// librdkafka keeps what it knows of a deleted topic; its successor may even have fewer partitions.
#[tokio::test(flavor = "multi_thread")]
async fn publish_finds_a_topic_that_was_deleted_and_made_anew() {
    let admin = Admin::new(brokers());
    let (topic, other) = (fresh_topic(6, &[]), fresh_topic(1, &[]));
    let publisher = publisher(brokers());
    let rows = |round: usize| -> Vec<_> {
        (0..20).map(|n| row(&topic, Some(&format!("k{}", n % 7)), &format!("r{round}-{n}"))).collect()
    };
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rows(1)).await;
    admin.delete(&topic);
    let messages = [rows(2), vec![row(&other, None, "o1")]].concat();
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, messages, Duration::from_secs(20))).await;
    let (deleted, alive) = outcomes.split_at(20);
    assert_eq!(shorts(alive), ["acked"]);
    for outcome in deleted {
        assert!(matches!(setback(outcome).blame, Blame::Topic | Blame::Lane), "{outcome:?}");
    }
    admin.create(&topic, 2, &[]);
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rows(2)).await;
    let expected: Vec<_> = (0..20).map(|n| (format!("k{}", n % 7), format!("r2-{n}"))).collect();
    oracle::judge(&read_topic(&topic), &expected).assert_delivered(0);
}

/// The broker stands still for longer than the call: every row gets its outcome by the deadline, none an attempt's worth.
#[tokio::test(flavor = "multi_thread")]
async fn publish_returns_by_its_deadline_when_the_broker_stands_still() {
    let kafka = own_kafka(KafkaOptions::default());
    let topic = "still";
    Admin::new(&kafka.bootstrap()).create(topic, 3, &[]);
    let publisher = publisher(&kafka.bootstrap());
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(topic, None, "warm")]).await;

    let rows: Vec<_> = (0..30).map(|n| row(topic, Some(&format!("k{}", n % 5)), &format!("m{n}"))).collect();
    kafka.pause().expect("pause the broker");
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, rows.clone(), Duration::from_secs(4))).await;
    println!("{:?}", shorts(&outcomes[..6]));
    for (index, outcome) in outcomes.iter().enumerate() {
        let setback = setback(outcome);
        // The first row of each lane was on its way, its others never were.
        let expected = if index < 5 { Blame::Cluster } else { Blame::Lane };
        assert_eq!(setback.blame, expected, "{outcome:?}");
        if index >= 5 {
            assert!(matches!(outcome, Outcome::NotSent(_)), "{outcome:?}");
        }
    }
    let unknown = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Unknown(_))).count();
    assert!(unknown > 0, "some were sent and not answered: {:?}", shorts(&outcomes[..5]));
    let health = publisher.health();
    let problem = health.problem.expect("a problem");
    assert!(problem.starts_with("kafka.timed_out: "), "{problem}");
    assert_eq!((health.rebuilds, health.parked), (1, vec![]), "the client was replaced, no topic blamed");
    assert!(publisher.probe().await.is_err(), "a new connection is not answered either");

    kafka.resume().expect("let the broker go on");
    wait_until_async("the cluster to answer", LONG, async || publisher.probe().await.is_ok()).await;
    assert_eq!(publisher.health().problem, None);
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rows).await;
    let mut expected: Vec<_> = (0..30).map(|n| (format!("k{}", n % 5), format!("m{n}"))).collect();
    expected.push(("warm".into(), "warm".into()));
    oracle::judge(&read_topic_on(&kafka.bootstrap(), topic), &expected).assert_delivered(unknown);
}

/// A call that runs out of time purges the client under another one: that other call's rows all the same go out in order.
#[tokio::test(flavor = "multi_thread")]
async fn publish_of_another_call_survives_a_purge() {
    let kafka = Arc::new(own_kafka(KafkaOptions::default()));
    let topic = "purged";
    Admin::new(&kafka.bootstrap()).create(topic, 2, &[]);
    let publisher = publisher(&kafka.bootstrap());
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(topic, None, "warm")]).await;
    let rows = |call: &str| -> Vec<_> {
        (0..40).map(|n| row(topic, Some(&format!("{call}{}", n % 10)), &format!("{call}-{n}"))).collect()
    };
    kafka.pause().expect("pause the broker");
    let hasty = batch(Policy::PerKeyHeadOfLine, rows("hasty"), Duration::from_secs(3));
    let patient = batch(Policy::PerKeyHeadOfLine, rows("patient"), LONG);
    let (hasty_outcomes, patient_outcomes) = tokio::join!(
        async {
            let outcomes = publish(&publisher, &hasty).await;
            let kafka = Arc::clone(&kafka);
            off(move || kafka.resume().expect("let the broker go on")).await;
            outcomes
        },
        publish(&publisher, &patient)
    );
    assert!(hasty_outcomes.iter().all(|outcome| setback(outcome).blame != Blame::Row), "{hasty_outcomes:?}");
    // Those that were in flight under the purge may have been written: the call says so, and the relay sends them again.
    let mut unknown = 0;
    for outcome in &patient_outcomes {
        match outcome {
            Outcome::Acked { .. } => {}
            Outcome::Unknown(Setback { blame: Blame::Topic, pause, .. }) if pause.is_zero() => unknown += 1,
            Outcome::NotSent(Setback { blame: Blame::Lane, .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    println!(
        "{unknown} of the patient call's rows were in flight, {} acknowledged",
        patient_outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Acked { .. })).count()
    );
    assert!(unknown <= 10, "at most one of each lane");
    let left = |batch: &Batch, outcomes: &[Outcome]| -> Vec<Message> {
        let rows = batch.messages.iter().zip(outcomes).filter(|(_, outcome)| !matches!(outcome, Outcome::Acked { .. }));
        rows.map(|(message, _)| message.clone()).collect()
    };
    let rest = [left(&hasty, &hasty_outcomes), left(&patient, &patient_outcomes)].concat();
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rest).await;
    let lanes =
        |call: &str| -> Vec<_> { (0..40).map(|n| (format!("{call}{}", n % 10), format!("{call}-{n}"))).collect() };
    let expected = [lanes("hasty"), lanes("patient"), vec![("warm".into(), "warm".into())]].concat();
    oracle::judge(&read_topic_on(&kafka.bootstrap(), topic), &expected).assert_delivered(20);
}

/// The broker dies in the middle of a call and is back in time: the call simply takes longer.
#[tokio::test(flavor = "multi_thread")]
async fn publish_outlasts_a_restart_of_the_broker() {
    let kafka = Arc::new(own_kafka(KafkaOptions::default()));
    let topic = "restarted";
    Admin::new(&kafka.bootstrap()).create(topic, 3, &[]);
    let publisher = publisher(&kafka.bootstrap());
    let rows: Vec<_> = (0..2_000).map(|n| row(topic, Some(&format!("k{}", n % 20)), &format!("m{n}"))).collect();
    let batch = batch(Policy::PerKeyHeadOfLine, rows, LONG);
    let kafka_2 = Arc::clone(&kafka);
    let restart = off(move || {
        wait_until("some records", LONG, || read_topic_on(&kafka_2.bootstrap(), topic).len() > 100);
        kafka_2.kill().expect("kill the broker");
        kafka_2.restart().expect("start it again");
    });
    let (outcomes, ()) = tokio::join!(publish(&publisher, &batch), restart);
    let acked = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Acked { .. })).count();
    println!("{acked} acknowledged, {} rebuilds", publisher.health().rebuilds);
    assert_eq!(acked, 2_000, "{:?}", outcomes.iter().find(|outcome| !matches!(outcome, Outcome::Acked { .. })));
    let expected: Vec<_> = (0..2_000).map(|n| (format!("k{}", n % 20), format!("m{n}"))).collect();
    oracle::judge(&read_topic_on(&kafka.bootstrap(), topic), &expected).assert_delivered(20);
}

/// The broker is away, at the start already and for longer than the call: nothing is blamed on a row, and it recovers by itself.
#[tokio::test(flavor = "multi_thread")]
async fn publish_blames_the_cluster_when_no_broker_is_up() {
    let kafka = own_kafka(KafkaOptions::default());
    let topic = "away";
    Admin::new(&kafka.bootstrap()).create(topic, 1, &[]);
    kafka.kill().expect("kill the broker");
    let publisher = publisher(&kafka.bootstrap());
    let problem = publisher.health().problem.expect("a problem from the start");
    // Whether the first refused connection was noticed yet is chance.
    assert!(problem.starts_with("kafka.not_connected: ") || problem.starts_with("kafka.unreachable: "), "{problem}");
    let rows: Vec<_> = (0..10).map(|n| row(topic, Some(&format!("k{}", n % 2)), &format!("m{n}"))).collect();
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, rows.clone(), Duration::from_secs(3))).await;
    let mut expected = vec!["not sent Cluster kafka.timed_out"; 2];
    expected.extend(["not sent Lane kafka.held_back"; 8]);
    assert_eq!(shorts(&outcomes), expected, "{outcomes:#?}");
    assert!(publisher.health().problem.is_some());
    assert_eq!(publisher.health().parked, []);
    let refused = publisher.probe().await.expect_err("nobody is there").to_string();
    assert!(refused.starts_with("kafka.unreachable: "), "{refused}");

    kafka.restart().expect("start it again");
    wait_until_async("the cluster to answer", LONG, async || publisher.probe().await.is_ok()).await;
    assert_eq!(publisher.health().problem, None);
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rows).await;
    assert_eq!(read_topic_on(&kafka.bootstrap(), topic).len(), 10, "nothing was written twice");

    kafka.kill().expect("kill the broker");
    // Without a row to publish, the client's own eyes.
    wait_until_async("the outage to show", LONG, async || publisher.health().problem.is_some()).await;
    kafka.restart().expect("start it again");
    wait_until_async("the recovery to show", LONG, async || publisher.health().problem.is_none()).await;
}

/// A stop: what is on its way may finish, nothing further is handed over, all of it is returned as the stop's.
#[tokio::test(flavor = "multi_thread")]
async fn publish_stops_with_records_in_flight() {
    let topic = fresh_topic(1, &[]);
    let publisher = publisher(brokers());
    let rows: Vec<_> = (0..5_000).map(|n| row(&topic, Some(&format!("k{}", n % 3)), &format!("m{n}"))).collect();
    let batch = batch(Policy::PerKeyHeadOfLine, rows, LONG);
    let (token, read) = (batch.stop.clone(), topic.clone());
    let stop = off(move || {
        wait_until("some records", LONG, || read_topic(&read).len() > 10);
        token.cancel();
    });
    let (outcomes, ()) = tokio::join!(publish(&publisher, &batch), stop);
    let acked = outcomes.iter().filter(|outcome| matches!(outcome, Outcome::Acked { .. })).count();
    let stopped = outcomes.iter().filter(|outcome| short(outcome) == "not sent Stop kafka.stopping").count();
    let held = outcomes.iter().filter(|outcome| short(outcome) == "not sent Lane kafka.held_back").count();
    println!("{acked} acknowledged, {stopped} stopped, {held} held back");
    assert!(acked > 10 && acked < 5_000 && stopped == 3 && acked + stopped + held == 5_000, "{acked} {stopped} {held}");
    assert_eq!(read_topic(&topic).len(), acked, "all that was written is acknowledged");
}

/// A stop while the broker stands still or is gone: it ends long before the deadline.
#[tokio::test(flavor = "multi_thread")]
async fn publish_stops_while_the_broker_is_silent_or_gone() {
    let kafka = own_kafka(KafkaOptions::default());
    let topic = "stopped";
    Admin::new(&kafka.bootstrap()).create(topic, 1, &[]);
    let relay = config::Relay { shutdown_grace: Duration::from_secs(13), ..relay() };
    let publisher = KafkaPublisher::new(&self::kafka(&kafka.bootstrap()), &relay).expect("a publisher");
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(topic, None, "warm")]).await;
    let rows: Vec<_> = (0..10).map(|n| row(topic, Some(&format!("k{}", n % 2)), &format!("m{n}"))).collect();

    kafka.pause().expect("pause the broker");
    let silent = batch(Policy::PerKeyHeadOfLine, rows.clone(), Duration::from_secs(600));
    silent.stop.cancel();
    let outcomes = publish(&publisher, &silent).await;
    assert!(outcomes[..2].iter().all(|outcome| short(outcome) == "not sent Stop kafka.stopping"), "{outcomes:?}");

    let silent = batch(Policy::PerKeyHeadOfLine, rows.clone(), Duration::from_secs(600));
    let begun = Instant::now();
    let stop = async {
        // Long enough for the two heads to be on their way; the outcome is the same if they are not.
        tokio::time::sleep(Duration::from_millis(300)).await;
        silent.stop.cancel();
    };
    let (outcomes, ()) = tokio::join!(publish(&publisher, &silent), stop);
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    for outcome in &outcomes[..2] {
        assert_eq!(setback(outcome).blame, Blame::Stop, "{outcome:?}");
    }
    assert_eq!(publisher.health().parked, [], "a stop says nothing against a topic");

    kafka.kill().expect("kill the broker");
    wait_until_async("the outage to show", LONG, async || publisher.health().problem.is_some()).await;
    let gone = batch(Policy::PerKeyHeadOfLine, rows, Duration::from_secs(600));
    let begun = Instant::now();
    let stop = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        gone.stop.cancel();
    };
    let (outcomes, ()) = tokio::join!(publish(&publisher, &gone), stop);
    println!("a stop without a broker took {:?}", begun.elapsed());
    assert!(begun.elapsed() < LONG, "{:?}", begun.elapsed());
    assert_eq!(shorts(&outcomes[..2]), ["not sent Stop kafka.stopping"; 2], "surely not written");
}

/// A process that was stopped and wakes after its lease sends nothing.
#[tokio::test(flavor = "multi_thread")]
async fn publish_hands_nothing_over_after_its_deadline() {
    let topic = fresh_topic(1, &[]);
    let publisher = publisher(brokers());
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(&topic, None, "warm")]).await;
    let late = batch(
        Policy::PerKeyHeadOfLine,
        vec![row(&topic, Some("k"), "m1"), row(&topic, Some("k"), "m2")],
        Duration::ZERO,
    );
    let outcomes = publish(&publisher, &late).await;
    assert_eq!(shorts(&outcomes), ["not sent Topic kafka.out_of_time", "not sent Lane kafka.held_back"]);
    assert_eq!(setback(&outcomes[0]).pause, Duration::ZERO, "nothing failed: it is due again at once");
    assert_eq!(ids(&read_topic(&topic)), ["warm"]);
    assert_eq!(publisher.health().parked, []);
}

/// A partition whose broker is gone: its topic is parked, the other topics go on, and no client is replaced for it.
#[tokio::test(flavor = "multi_thread")]
async fn publish_parks_a_topic_without_a_leader() {
    let kafka = own_kafka(KafkaOptions { brokers: 2, ..KafkaOptions::default() });
    let admin = Admin::new(&kafka.bootstrap());
    admin.create_assigned("led", &[&[1]], &[]);
    admin.create_assigned("leaderless", &[&[2]], &[]);
    let publisher = publisher(&kafka.bootstrap());
    let warm = vec![row("led", Some("w"), "w1"), row("leaderless", Some("w"), "w2")];
    publish_until_acked(&publisher, Policy::BestEffort, warm).await;
    kafka.kill_broker(2).expect("kill the second broker");

    let rows: Vec<_> = (0..6)
        .map(|n| row(if n % 2 == 0 { "leaderless" } else { "led" }, Some(&format!("k{}", n % 4)), &format!("m{n}")))
        .collect();
    // Two lanes on each topic.
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, rows.clone(), Duration::from_secs(10))).await;
    let expected = ["Topic", "acked", "Topic", "acked", "Lane", "acked"];
    for (outcome, expected) in outcomes.iter().zip(expected) {
        assert!(short(outcome).contains(expected), "{outcome:?}");
    }
    let health = publisher.health();
    assert_eq!(health.parked.iter().map(|parked| parked.topic.as_str()).collect::<Vec<_>>(), ["leaderless"]);
    assert_eq!((health.problem, health.rebuilds), (None, 0));
    kafka.restart_broker(2).expect("start the second broker");
    let left = vec![rows[0].clone(), rows[2].clone(), rows[4].clone()];
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, left).await;
    let expected = [("k0", "m0"), ("k2", "m2"), ("k0", "m4"), ("w", "w2")];
    oracle::judge(&read_topic_on(&kafka.bootstrap(), "leaderless"), &expected).assert_delivered(2);
}

/// A permission that is missing parks its topic alone; a client that may not even begin is replaced once it may.
#[tokio::test(flavor = "multi_thread")]
async fn publish_parks_a_topic_that_may_not_be_written_to() {
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
    for topic in ["open", "closed", "read-only"] {
        admin.create(topic, 1, &[]);
    }
    let login = |password: &str| {
        let mut config = self::kafka(&kafka.bootstrap_of("LOGIN"));
        let sasl = [
            ("security.protocol", "sasl_plaintext"),
            ("sasl.mechanism", "PLAIN"),
            ("sasl.username", "relay"),
            ("sasl.password", password),
        ];
        config.properties.extend(sasl.map(|(name, value)| (name.to_owned(), config::Secret::new(value))));
        KafkaPublisher::new(&config, &relay()).expect("a publisher")
    };
    let rows = || vec![row("open", Some("a"), "a1"), row("closed", Some("b"), "b1"), row("read-only", Some("c"), "c1")];

    let stranger = login("wrong-but-secret");
    let outcomes = publish(&stranger, &batch(Policy::PerKeyHeadOfLine, rows(), Duration::from_secs(3))).await;
    assert_eq!(shorts(&outcomes), ["not sent Cluster kafka.timed_out"; 3], "{outcomes:#?}");
    let refused = stranger.probe().await.expect_err("refused").to_string();
    assert!(refused.starts_with("kafka.authentication_failed: "), "{refused}");
    let fresh = login("wrong-but-secret");
    let why = || fresh.health().problem.unwrap_or_default();
    wait_until_async("the reason to show", LONG, async || why().contains("kafka.authentication_failed: ")).await;
    assert!(!why().contains("wrong-but-secret"), "{}", why());

    // With no right at all the client cannot even get its producer id: that is fatal for it, and nobody's row's fault.
    let publisher = login("right");
    wait_until_async("the cluster to answer", LONG, async || publisher.probe().await.is_ok()).await;
    let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, rows(), Duration::from_secs(5))).await;
    println!("{:?}", shorts(&outcomes));
    assert!(outcomes.iter().all(|outcome| setback(outcome).blame != Blame::Row), "{outcomes:#?}");

    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "open");
    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE, "read-only");
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, vec![rows().remove(0)]).await;
    println!("{} rebuilds", publisher.health().rebuilds);

    // Their topics rest from before; the third round is surely after their pauses.
    let end = Instant::now() + LONG;
    loop {
        let outcomes = publish(&publisher, &batch(Policy::PerKeyHeadOfLine, rows(), Duration::from_secs(5))).await;
        let expected = [
            "acked",
            "not sent Topic kafka.topic_authorization_failed",
            "not sent Topic kafka.topic_authorization_failed",
        ];
        assert_eq!(shorts(&outcomes), expected, "{outcomes:#?}");
        assert!(text(&outcomes[1]).contains("topic closed") && text(&outcomes[1]).contains("WRITE"), "{outcomes:#?}");
        let parked = publisher.health().parked;
        let topics: Vec<_> = parked.iter().map(|parked| parked.topic.as_str()).collect();
        assert_eq!(topics, ["closed", "read-only"]);
        if parked.iter().all(|parked| parked.probe_at > Instant::now() + Duration::from_secs(2)) {
            break;
        }
        assert!(Instant::now() < end, "{parked:?}");
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    assert_eq!(publisher.health().problem, None);

    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "closed");
    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "read-only");
    publish_until_acked(&publisher, Policy::PerKeyHeadOfLine, rows()[1..].to_vec()).await;
    for (topic, expected) in [("closed", "b1"), ("read-only", "c1")] {
        assert_eq!(ids(&read_topic_on(&superuser, topic)), [expected]);
    }
    assert_eq!(publisher.health().parked, []);
}

/// One producer's rows and what became of them, published as a relay does: what was not acknowledged or rejected is tried again.
struct Feed {
    name: String,
    policy: Policy,
    waiting: Vec<Message>,
    /// How many rows were said to be unknown, each time.
    unknown: usize,
    rejected: Vec<String>,
}

impl Feed {
    async fn run(mut self, publisher: &KafkaPublisher, rng: &mut StdRng) -> Self {
        let end = Instant::now() + LONG * 3;
        while !self.waiting.is_empty() {
            assert!(Instant::now() < end, "{}: {} rows left", self.name, self.waiting.len());
            let size = rng.random_range(1..=400).min(self.waiting.len());
            let timeout = Duration::from_millis(rng.random_range(1_000..6_000));
            let batch = batch(self.policy, self.waiting[..size].to_vec(), timeout);
            let outcomes = publish(publisher, &batch).await;
            let mut is_done = Vec::new();
            for (message, outcome) in batch.messages.iter().zip(&outcomes) {
                is_done.push(matches!(outcome, Outcome::Acked { .. } | Outcome::Rejected(_)));
                match outcome {
                    Outcome::Acked { .. } | Outcome::NotSent(_) => {}
                    Outcome::Rejected(_) => self.rejected.push(message.message_id.clone()),
                    Outcome::Unknown(_) => self.unknown += 1,
                    Outcome::Failed { .. } => panic!("{outcome:?}"),
                }
                if let Outcome::Unknown(setback) | Outcome::NotSent(setback) = outcome {
                    assert_ne!(setback.blame, Blame::Row, "an outage spends no attempt: {setback:?}");
                }
            }
            let mut is_done = is_done.into_iter().chain(std::iter::repeat(false));
            self.waiting.retain(|_| !is_done.next().expect("endless"));
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        self
    }
}

/// Four feeds with a policy each over shared topics and one client, poison among their rows, while the broker is stopped,
/// killed and restarted at random.
#[tokio::test(flavor = "multi_thread")]
async fn publish_loses_nothing_and_keeps_order_through_chaos() {
    let seed: u64 = rand::random();
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    let kafka = Arc::new(own_kafka(KafkaOptions::default()));
    let admin = Admin::new(&kafka.bootstrap());
    let topics = ["chaos-1", "chaos-2", "chaos-3"];
    for (topic, partitions) in topics.iter().zip([1, 3, 6]) {
        admin.create(topic, partitions, &[("max.message.bytes", "5000")]);
    }
    let mut expected: Vec<(String, String)> = Vec::new();
    let mut poison = Vec::new();
    let mut feeds = Vec::new();
    for policy in Policy::ALL {
        let mut waiting = Vec::new();
        for n in 0..2_000 {
            let key = rng.random_range(0..30);
            let topic = topics[key % topics.len()];
            let id = format!("{policy}-{n}");
            let mut message = row(topic, Some(&format!("{policy}-{key}")), &id);
            if rng.random_ratio(1, 200) {
                message.payload = noise(10_000);
                poison.push(id);
            } else {
                let lane = match policy {
                    Policy::BestEffort => id.clone(),
                    Policy::PerKeyHeadOfLine => format!("{policy}-{key}"),
                    Policy::PerSourceStream | Policy::StopTheLine => policy.to_string(),
                };
                expected.push((lane, id));
            }
            waiting.push(message);
        }
        let name = policy.to_string();
        feeds.push(Feed { name, policy, waiting, unknown: 0, rejected: Vec::new() });
    }
    let publisher = publisher(&kafka.bootstrap());
    let done = CancellationToken::new();
    let chaos = async {
        let mut rng = StdRng::seed_from_u64(seed + 100);
        let mut faults = 0;
        for _ in 0..4 {
            let wait = Duration::from_millis(rng.random_range(200..1_500));
            let hold = Duration::from_millis(rng.random_range(200..7_000));
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = done.cancelled() => break,
            }
            faults += 1;
            let (kafka, is_pause) = (Arc::clone(&kafka), rng.random_ratio(2, 3));
            off(move || {
                if is_pause {
                    kafka.pause().expect("pause the broker");
                    std::thread::sleep(hold);
                    kafka.resume().expect("let the broker go on");
                } else {
                    kafka.kill().expect("kill the broker");
                    std::thread::sleep(hold / 4);
                    kafka.restart().expect("start it again");
                }
            })
            .await;
        }
        println!("{faults} faults");
    };
    let publishing = async {
        let runs = feeds.into_iter().enumerate().map(|(number, feed)| {
            let publisher = &publisher;
            async move { feed.run(publisher, &mut StdRng::seed_from_u64(seed + number as u64)).await }
        });
        let feeds = futures_util::future::join_all(runs).await;
        done.cancel();
        feeds
    };
    let (feeds, ()) = tokio::join!(publishing, chaos);

    let unknown: usize = feeds.iter().map(|feed| feed.unknown).sum();
    let mut rejected: Vec<_> = feeds.into_iter().flat_map(|feed| feed.rejected).collect();
    rejected.sort_unstable();
    poison.sort_unstable();
    assert_eq!(rejected, poison, "the poison and nothing else");
    let records: Vec<_> = topics.iter().flat_map(|topic| read_topic_on(&kafka.bootstrap(), topic)).collect();
    let verdict = oracle::judge(&records, &expected);
    println!(
        "{} rows, {} records, {unknown} unknown, {} duplicates, {} rebuilds",
        expected.len(),
        records.len(),
        verdict.duplicates.len(),
        publisher.health().rebuilds
    );
    verdict.assert_delivered(unknown);
}

/// A broker that has just started refuses a record and, a moment later, takes the next one: it knows nothing of the client. librdkafka
/// then reports the first as delivered as well, and forgets it.
#[tokio::test(flavor = "multi_thread")]
async fn publish_believes_no_acknowledgement_without_an_offset() {
    for policy in [Policy::PerKeyHeadOfLine, Policy::BestEffort] {
        let topic = unique("topic");
        let mock = Mock::new(&[&topic]);
        // One record per batch in the fast lane as well, so that the first is alone in what is refused.
        let mut kafka = kafka(&mock.bootstrap());
        kafka.properties.insert("batch.num.messages".to_owned(), config::Secret::new("1"));
        let publisher = KafkaPublisher::new(&kafka, &relay()).expect("a publisher");
        mock.refuse_next();
        let mut left: Vec<_> = (0..6).map(|n| row(&topic, Some(&format!("k{n}")), &format!("m{n}"))).collect();
        let end = Instant::now() + LONG;
        while !left.is_empty() {
            assert!(Instant::now() < end, "{left:?}");
            let outcomes = publish(&publisher, &batch(policy, left.clone(), Duration::from_secs(10))).await;
            println!("{:?}", shorts(&outcomes));
            let mut acked = outcomes.iter().map(|outcome| matches!(outcome, Outcome::Acked { .. }));
            left.retain(|_| !acked.next().expect("an outcome"));
        }
        let records = read_topic_on(&mock.bootstrap(), &topic);
        let found: std::collections::BTreeSet<_> = ids(&records).into_iter().collect();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["m0", "m1", "m2", "m3", "m4", "m5"]);
    }
}

/// A clock that is far off is nobody's row.
#[tokio::test(flavor = "multi_thread")]
async fn publish_blames_the_clock_for_a_timestamp_out_of_range() {
    let strict = fresh_topic(1, &[("message.timestamp.before.max.ms", "60000")]);
    let publisher = publisher(brokers());
    let outcomes =
        publish(&publisher, &batch(Policy::PerKeyHeadOfLine, vec![row(&strict, Some("k"), "m1")], LONG)).await;
    assert_eq!(shorts(&outcomes), ["not sent Cluster kafka.invalid_timestamp"]);
    let problem = publisher.health().problem.expect("a problem");
    assert!(problem.starts_with("kafka.invalid_timestamp: ") && problem.contains("clock"), "{problem}");
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(&fresh_topic(1, &[]), None, "m2")]).await;
    assert_eq!(publisher.health().problem, None);
}

/// After closing, rows are returned and nothing is sent; what was on its way had its chance.
#[tokio::test(flavor = "multi_thread")]
async fn publish_after_closing_returns_the_rows() {
    let topic = fresh_topic(1, &[]);
    let publisher = publisher(brokers());
    publish_until_acked(&publisher, Policy::BestEffort, vec![row(&topic, None, "m1")]).await;
    publisher.close(Instant::now() + LONG).await;
    let outcomes = publish(&publisher, &batch(Policy::BestEffort, vec![row(&topic, None, "m2")], LONG)).await;
    assert_eq!(shorts(&outcomes), ["not sent Stop kafka.stopping"]);
    assert_eq!(ids(&read_topic(&topic)), ["m1"]);
}

/// What librdkafka does not take is said without the value, which may be a secret.
#[test]
fn publish_names_a_property_that_librdkafka_refuses() {
    let with = |name: &str, value: &str| {
        let mut kafka = kafka("127.0.0.1:1");
        kafka.properties.insert(name.to_owned(), config::Secret::new(value));
        KafkaPublisher::new(&kafka, &relay()).expect_err("refused").to_string()
    };
    let unknown = with("no.such.property", "hunter2");
    assert!(unknown.contains("no.such.property") && !unknown.contains("hunter2"), "{unknown}");
    let wrong = with("socket.timeout.ms", "hunter2");
    assert!(wrong.contains("socket.timeout.ms") && !wrong.contains("hunter2"), "{wrong}");
}
