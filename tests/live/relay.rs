//! The binary end to end: rows in the table, records on the topic, judged by an oracle that reads the topic.

use crate::support::daemon::{Daemon, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::oracle::judge;
use crate::support::topics::{TopicReader, fresh_topic};
use crate::support::{LONG, services, wait_until};

/// Inserts `rows` rows of a source over `keys` keys, each in a transaction of its own, and returns (lane, message_id) in order.
fn insert(database: &Database, source: &str, topic: &str, rows: usize, keys: usize) -> Vec<(String, String)> {
    let mut expected = Vec::new();
    let mut sql = String::new();
    for row in 0..rows {
        let key = format!("{source}-k{}", row % keys);
        let id = format!("{source}-m{row:06}");
        sql.push_str(&format!(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
             content_type, payload_bytes, occurred_at, created_at) values (gen_random_uuid(), '{id}', '{source}', '{topic}', '{key}', \
             'Happened', 1, 'application/json', convert_to('{{\"n\":{row}}}', 'UTF8'), now(), \
             timestamptz '2026-01-01 00:00:00+00' + {row} * interval '1 ms');\n"
        ));
        expected.push((key, id));
    }
    database.execute(&sql);
    expected
}

#[test]
fn four_policies_reach_kafka_in_order() {
    let database = fresh_database(Table::NewerShared);
    let topics: Vec<String> = (0..4).map(|_| fresh_topic(1, &[])).collect();
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        sections: "[relay]\nbatch_rows_max = 50\n\n[sources.stream]\npolicy = \"per_source_stream\"\n\n\
                   [sources.line]\npolicy = \"stop_the_line\"\n\n[sources.free]\npolicy = \"best_effort\"\n",
        ..Setup::default()
    };
    let mut expected = Vec::new();
    for ((source, keys), topic) in [("keyed", 7), ("stream", 7), ("line", 7), ("free", 7)].iter().zip(&topics) {
        expected.push(insert(&database, source, topic, 300, *keys));
    }
    let daemon = Daemon::start(&setup);
    for ((lanes, topic), source) in expected.iter().zip(&topics).zip(["keyed", "stream", "line", "free"]) {
        let mut reader = TopicReader::new(services::brokers(), topic);
        let records = reader.wait_for(300, LONG);
        let lanes: Vec<(&str, &str)> = lanes
            .iter()
            .map(|(key, id)| match source {
                "keyed" => (key.as_str(), id.as_str()),
                "free" => (id.as_str(), id.as_str()),
                _ => (source, id.as_str()),
            })
            .collect();
        judge(records, &lanes).assert_delivered(0);
    }
    wait_until("every row is sent", LONG, || {
        database.value("select count(*) from keiro.keiro_outbox where status <> 'sent'") == "0"
    });
    // A new source is found while it runs.
    let late = insert(&database, "late", &topics[0], 20, 3);
    wait_until("the new source is sent", LONG, || {
        database.value("select count(*) from keiro.keiro_outbox where source = 'late' and status = 'sent'") == "20"
    });
    assert_eq!(late.len(), 20);
    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    assert!(metrics.contains("keiro_relay_rows_total{outcome=\"sent\",source=\"keyed\"} 300"), "{metrics}");
    assert!(metrics.contains("keiro_relay_overtaken_total 0"), "{metrics}");
    let mut daemon = daemon;
    daemon.wait_http_ok("/readyz", LONG);
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0), "{}", daemon.stderr());
}

#[test]
fn drain_sends_everything_and_says_so() {
    let database = fresh_database(Table::OlderShared);
    let topic = fresh_topic(3, &[]);
    let expected = insert(&database, "billing", &topic, 500, 40);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let finished = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(finished.status.code(), Some(0), "{} {}", finished.stdout, finished.stderr);
    let report: serde_json::Value = serde_json::from_str(&finished.stdout).expect("one object");
    for (field, value) in
        [("claimed", 500), ("sent", 500), ("failed", 0), ("dead", 0), ("rejected", 0), ("lost", 0), ("requeued", 0)]
    {
        assert_eq!(report[field], value, "{field} in {report}");
    }
    let mut reader = TopicReader::new(services::brokers(), &topic);
    judge(reader.catch_up(), &expected).assert_delivered(0);
}
