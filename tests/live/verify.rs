//! `verify` on a real topic: all of it there, a row that never was, records that were deleted, twice, in the wrong order.

use std::time::Duration;

use keiro_relay::cli::demo::services::KafkaOptions;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, Producer as _};
use rdkafka::{Offset, TopicPartitionList};
use serde_json::Value;

use crate::support::daemon::{Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::services::own_kafka;
use crate::support::session::Session;
use crate::support::topics::{Admin, fresh_topic, read_topic};
use crate::support::{LONG, run, services};

const POLICIES: &str = "[sources.stream]\npolicy = \"per_source_stream\"\n";

fn setup<'a>(database: &'a Database, brokers: &'a str) -> Setup<'a> {
    Setup { database_url: database.url(), brokers, sections: POLICIES, ..Setup::default() }
}

/// The objects that `verify --json` printed, by kind, and the summary.
#[track_caller]
fn verify(setup: &Setup<'_>, arguments: &[&str]) -> (Finished, Vec<Value>, Value) {
    let mut all = vec!["verify", "--json", "--since", "1h"];
    all.extend(arguments);
    let finished = run_command(setup, &all, "");
    let mut lines: Vec<Value> =
        finished.stdout.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    let summary = lines.pop().unwrap_or_else(|| panic!("nothing was printed: {}", finished.stderr));
    assert_eq!(summary["finding"], "summary");
    (finished, lines, summary)
}

fn counts(summary: &Value) -> [u64; 6] {
    ["rows", "found", "missing", "not_judged", "duplicated", "out_of_order"]
        .map(|name| summary[name].as_u64().expect("a count"))
}

/// Rows sent by a relay, without anything wrong.
fn sent(table: Table, topic: &str, rows: usize) -> Database {
    let database = fresh_database(table);
    for (source, order) in [("keyed", Order::Key), ("stream", Order::Source)] {
        Feed::new(source, topic, order).insert(&database, rows, 5);
    }
    let drained = run_command(&setup(&database, services::brokers()), &["drain"], "");
    assert!(drained.status.success(), "{drained:?}");
    database
}

/// Writes a record that claims to be a row's.
fn produce(brokers: &str, topic: &str, partition: i32, source: &str, message_id: &str) {
    let producer: BaseProducer = ClientConfig::new().set("bootstrap.servers", brokers).create().expect("a producer");
    let header = |key, value| Header { key, value: Some(value) };
    let headers =
        OwnedHeaders::new().insert(header("keiro-message-id", message_id)).insert(header("keiro-source", source));
    let record = BaseRecord::<str, str>::to(topic).partition(partition).payload("x").headers(headers);
    producer.send(record).map_err(|(error, _)| error).expect("a record");
    producer.flush(LONG).expect("an acknowledgement");
}

/// A row that is marked sent, published `ago`; later rows of a test have larger numbers.
fn mark_sent(database: &Database, n: u32, source: &str, topic: &str, key: &str) {
    database.execute(&format!(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
           content_type, payload_bytes, occurred_at, status, published_at, created_at) \
         values ('019b0000-0000-7000-8000-{n:012}', 'odd {n}', '{source}', '{topic}', '{key}', 'E', 1, 'text/plain', 'x', now(), \
           'sent', now(), '2026-01-01 00:00:00+00'::timestamptz + interval '{n} seconds')"
    ));
}

#[test]
fn verify_finds_every_row_that_was_sent() {
    for table in Table::ALL {
        let topic = fresh_topic(3, &[]);
        let database = sent(table, &topic, 60);
        let setup = setup(&database, services::brokers());
        for (arguments, rows) in [
            (&["--source", "keyed"][..], 60),
            (&["--topic", &topic], 120),
            (&["--source", "stream", "--topic", &topic], 60),
        ] {
            let (finished, findings, summary) = verify(&setup, arguments);
            assert_eq!(finished.status.code(), Some(0), "{finished:?}");
            assert_eq!((counts(&summary), findings.len()), ([rows, rows, 0, 0, 0, 0], 0), "{summary}");
        }
        let before = database.value("select string_agg(o::text, ' ' order by outbox_id) from keiro.keiro_outbox o");
        let text = run_command(&setup, &["verify", "--since", "1h", "--source", "keyed"], "");
        assert!(
            text.stdout.contains("60 rows of source keyed") && text.stdout.contains("60 found, 0 missing"),
            "{text:?}"
        );
        assert_eq!(
            before,
            database.value("select string_agg(o::text, ' ' order by outbox_id) from keiro.keiro_outbox o")
        );
        assert_eq!(read_topic(&topic).len(), 120);
    }
}

#[test]
fn verify_names_what_is_missing_twice_or_out_of_order() {
    let topic = fresh_topic(1, &[]);
    let database = sent(Table::Lean, &topic, 20);
    let setup = setup(&database, services::brokers());

    // A row that is on no topic, one that is on another, and one whose topic does not exist.
    mark_sent(&database, 1, "keyed", &topic, "k1");
    mark_sent(&database, 2, "keyed", &topic, "k2");
    mark_sent(&database, 3, "keyed", "no-such-topic", "k3");
    let other = fresh_topic(1, &[]);
    produce(services::brokers(), &other, 0, "keyed", "odd 2");
    let (finished, findings, summary) = verify(&setup, &["--source", "keyed"]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(1), [23, 20, 3, 0, 0, 0]), "{summary}");
    let missing: Vec<_> = findings.iter().map(|finding| (&finding["finding"], &finding["message_id"])).collect();
    assert_eq!(format!("{missing:?}").matches("missing").count(), 3, "{missing:?}");
    for id in ["odd 1", "odd 2", "odd 3"] {
        assert!(findings.iter().any(|finding| finding["message_id"] == id), "{findings:?}");
    }
    assert!(summary["notes"].to_string().contains("no-such-topic does not exist"), "{summary}");
    let text = run_command(&setup, &["verify", "--since", "1h", "--source", "keyed", "--limit", "1"], "");
    assert!(text.stdout.contains("missing       019b0000-0000-7000-8000-000000000001 odd 1 of keyed"), "{text:?}");
    assert!(text.stdout.contains("20 found, 3 missing"), "{text:?}");

    // They arrive: one of them twice, and the third of a lane before its second.
    database.execute("delete from keiro.keiro_outbox where destination = 'no-such-topic'");
    for n in [4, 5, 6] {
        mark_sent(&database, n, "keyed", &topic, "same");
    }
    for n in [1, 2, 4, 6, 5, 1] {
        produce(services::brokers(), &topic, 0, "keyed", &format!("odd {n}"));
    }
    let (finished, findings, summary) = verify(&setup, &["--source", "keyed"]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(1), [25, 25, 0, 0, 1, 1]), "{summary}");
    let of = |kind: &str| findings.iter().find(|finding| finding["finding"] == kind).expect("a finding").clone();
    let twice = of("duplicated");
    assert_eq!(
        (&twice["message_id"], &twice["times"], &twice["offset"]),
        (&"odd 1".into(), &2.into(), &40.into()),
        "{twice}"
    );
    let inverted = of("out_of_order");
    assert_eq!(inverted["message_id"], "odd 6", "{inverted}");
    assert_eq!(inverted["behind"]["outbox_id"], "019b0000-0000-7000-8000-000000000005", "{inverted}");

    // Twice is what delivery at least once allows.
    database.execute("delete from keiro.keiro_outbox where message_id in ('odd 5')");
    let (finished, _, summary) = verify(&setup, &["--source", "keyed"]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(0), [24, 24, 0, 0, 1, 0]), "{summary}");
}

#[test]
fn verify_says_what_retention_and_compaction_hide() {
    let topic = fresh_topic(1, &[]);
    let database = sent(Table::NewerShared, &topic, 20);
    let setup = setup(&database, services::brokers());
    let admin: AdminClient<DefaultClientContext> =
        ClientConfig::new().set("bootstrap.servers", services::brokers()).create().expect("an admin client");
    let mut before = TopicPartitionList::new();
    before.add_partition_offset(&topic, 0, Offset::Offset(3)).expect("an offset");
    let deleted = run(async || admin.delete_records(&before, &AdminOptions::new().operation_timeout(Some(LONG))).await);
    deleted.expect("delete records").elements()[0].error().expect("deleted");

    let (finished, findings, summary) = verify(&setup, &["--topic", &topic]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(1), [40, 37, 0, 3, 0, 0]), "{summary}");
    assert!(findings.iter().all(|finding| finding["finding"] == "not_judged"), "{findings:?}");
    assert!(summary["notes"].to_string().contains("no longer on 1 of its 1 partitions"), "{summary}");

    let compacted = fresh_topic(1, &[("cleanup.policy", "compact")]);
    mark_sent(&database, 1, "other", &compacted, "k");
    let (finished, _, summary) = verify(&setup, &["--source", "other"]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(1), [1, 0, 0, 1, 0, 0]), "{summary}");
    assert!(summary["notes"].to_string().contains("is compacted"), "{summary}");
}

#[test]
fn verify_refuses_what_makes_no_sense_and_says_which_side_is_away() {
    let database = fresh_database(Table::Lean);
    let fine = setup(&database, services::brokers());
    for (arguments, code, says) in [
        (&["verify", "--since", "1h"][..], 64, "--source"),
        (&["verify", "--source", "s"], 64, "--since"),
        (&["verify", "--source", "s", "--since", "yesterday"], 64, "expected a time"),
        (&["verify", "--source", "s", "--since", "1h", "--until", "2h"], 64, "--since is not before --until"),
        (&["verify", "--source", "s", "--since", "1h", "--limit", "100000"], 64, "--limit"),
    ] {
        let finished = run_command(&fine, arguments, "");
        assert_eq!(finished.status.code(), Some(code), "{finished:?}");
        assert!(finished.stderr.contains(says), "{finished:?}");
    }
    let nothing = run_command(&fine, &["verify", "--source", "typo", "--since", "1h"], "");
    assert_eq!(nothing.status.code(), Some(0), "{nothing:?}");
    assert!(nothing.stdout.contains("nothing to compare"), "{nothing:?}");

    mark_sent(&database, 1, "s", "t", "k");
    let away = setup(&database, "127.0.0.1:1");
    let finished = run_command(&away, &["verify", "--source", "s", "--since", "1h"], "");
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    assert!(finished.stderr.contains("Kafka: ") && finished.stderr.contains("127.0.0.1:1"), "{finished:?}");
    let nowhere = Setup { database_url: "postgres://postgres@127.0.0.1:1/x", ..fine };
    let finished = run_command(&nowhere, &["verify", "--source", "s", "--since", "1h"], "");
    assert_eq!(finished.status.code(), Some(1), "{finished:?}");
    assert!(finished.stderr.contains("database: cannot connect"), "{finished:?}");
}

/// Another producer's transactions leave markers and aborted records among ours: they end a partition without a record, and are no rows'.
#[test]
fn verify_reads_past_transactions_of_others() {
    let kafka = own_kafka(KafkaOptions {
        properties: &[("transaction.state.log.replication.factor", "1"), ("transaction.state.log.min.isr", "1")],
        ..KafkaOptions::default()
    });
    let brokers = kafka.bootstrap();
    Admin::new(&brokers).create("shared", 1, &[]);
    let database = fresh_database(Table::Lean);
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", "shared", Order::Key);
    let setup = setup(&database, &brokers);
    feed.insert_in(&mut session, 3, 1);
    assert!(run_command(&setup, &["drain"], "").status.success());
    mark_sent(&database, 9, "keyed", "shared", "k");
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", &brokers)
        .set("transactional.id", "other")
        .create()
        .expect("a producer");
    producer.init_transactions(LONG).expect("transactions");
    producer.begin_transaction().expect("a transaction");
    let headers = OwnedHeaders::new()
        .insert(Header { key: "keiro-message-id", value: Some("odd 9") })
        .insert(Header { key: "keiro-source", value: Some("keyed") });
    let record = BaseRecord::<str, str>::to("shared").payload("x").headers(headers);
    producer.send(record).map_err(|(error, _)| error).expect("a record");
    producer.flush(Duration::from_secs(30)).expect("written");
    producer.abort_transaction(LONG).expect("aborted");

    let (finished, findings, summary) = verify(&setup, &["--topic", "shared"]);
    assert_eq!((finished.status.code(), counts(&summary)), (Some(1), [4, 3, 1, 0, 0, 0]), "{summary}");
    assert_eq!(findings[0]["message_id"], "odd 9");
}
