//! Rows per second through the whole relay, beside the same claims and settlements without Kafka.
//!
//! Nothing here ever counts a run whose rows did not all arrive.

use std::sync::Arc;

use super::harness::{Drained, Harness, NoKafka, StatementCost, defaults, doing, kafka_publisher};
use super::load::Load;
use super::report::{Cell, Section};
use crate::domain::policy::Policy;
use crate::store::Profile;

/// One way to fill the table, measured with and without Kafka.
#[derive(Debug, Clone, Copy)]
struct Case {
    name: &'static str,
    policy: Policy,
    rows: usize,
    sources: usize,
    /// Keys of each source.
    keys: usize,
    partitions: i32,
}

const CASES: [Case; 1] = [Case {
    name: "10,000 keys",
    policy: Policy::PerKeyHeadOfLine,
    rows: 50_000,
    sources: 1,
    keys: 10_000,
    partitions: 12,
}];

/// Payload of a row.
const PAYLOAD_BYTES: usize = 1024;
/// Rows that are relayed before anything is measured: the JVM compiles what it runs often.
const WARM_UP_ROWS: usize = 20_000;

/// Statements of one run that are shown.
const STATEMENTS_SHOWN: usize = 4;

/// Measures.
///
/// # Errors
/// Something was not done.
pub(super) async fn measure(harness: &mut Harness) -> Result<Vec<Section>, String> {
    let mut section = Section {
        title: "Drain".to_owned(),
        notes: vec![
            "Rows of 1 KB, all there before the relay starts; `drain` until nothing is due, with the default configuration. *Without \
             Kafka* is the same relay over a publisher that acknowledges everything at once: looks, claims and settlements only. The \
             seconds of claim, publish and settle are added up over passes at the same time. A fresh table for each line, statistics \
             taken while it was empty, autovacuum as is. Processor seconds are the relay's own process (librdkafka's threads \
             included), and the two servers'."
                .to_owned(),
        ],
        heads: vec![
            "case",
            "profile",
            "to",
            "rows",
            "seconds",
            "rows/s",
            "of no Kafka",
            "claim s",
            "publish s",
            "settle s",
            "relay CPU s",
            "PostgreSQL CPU s",
            "Kafka CPU s",
            "peak MiB",
        ],
        rows: Vec::new(),
    };
    let mut statements = Section {
        title: "Drain: the database's share".to_owned(),
        notes: vec![
            "What the statements of the runs above took in the server, as pg_stat_statements counts them: added up over \
             connections, waits for a processor included."
                .to_owned(),
        ],
        heads: vec!["case", "profile", "to", "statement", "calls", "rows", "seconds", "ms / call", "µs / row", "buffers / row", "WAL bytes / row"],
        rows: Vec::new(),
    };
    doing("warming up");
    let warm_up = Case { rows: harness.scaled(WARM_UP_ROWS), ..CASES[0] };
    drain(harness, &warm_up, Profile::Lean, true).await?;
    for case in CASES {
        let case = Case { rows: harness.scaled(case.rows), ..case };
        for profile in [Profile::Lean, Profile::Shared] {
            let without = drain(harness, &case, profile, false).await?;
            let with = drain(harness, &case, profile, true).await?;
            section.rows.push(line(&case, profile, "no Kafka", &without, None));
            section.rows.push(line(&case, profile, "Kafka", &with, Some(&without)));
            statements.rows.extend(statement_lines(&case, profile, "no Kafka", &without));
            statements.rows.extend(statement_lines(&case, profile, "Kafka", &with));
        }
    }
    Ok(vec![section, statements])
}

async fn drain(harness: &mut Harness, case: &Case, profile: Profile, to_kafka: bool) -> Result<Drained, String> {
    let to = if to_kafka { "Kafka" } else { "no Kafka" };
    doing(&format!("drain, {}, {profile}, {} rows to {to}", case.name, case.rows));
    let brokers = harness.brokers().await?;
    let topic = harness.topic(case.partitions).await?;
    let scratch = harness.database(profile, &defaults(case.policy), Some(&brokers)).await?;
    let load = Load {
        rows: case.rows,
        sources: case.sources,
        keys: case.keys,
        payload_bytes: PAYLOAD_BYTES,
        topic: &topic,
        mark: "row",
        key: "key",
        seconds_ago: 60,
    };
    load.insert(&scratch).await?;
    scratch.batch("checkpoint").await?;
    let publisher = if to_kafka { kafka_publisher(&scratch.config)? } else { Arc::new(NoKafka) };
    let drained = harness.drain(&scratch, publisher).await?;
    if drained.report.sent != case.rows as u64 {
        return Err(format!("{} of {} rows were sent: {:?}", drained.report.sent, case.rows, drained.report));
    }
    if to_kafka {
        let records = harness.records(&topic, case.partitions).await?;
        if records != case.rows as u64 {
            return Err(format!("{records} records of {} rows are on the topic", case.rows));
        }
    }
    Ok(drained)
}

/// The statements that took the most time.
fn statement_lines(case: &Case, profile: Profile, to: &str, drained: &Drained) -> Vec<Vec<Cell>> {
    let cost = |cost: &StatementCost| {
        vec![
            Cell::text(case.name),
            Cell::text(profile.name()),
            Cell::text(to),
            Cell::text(cost.name),
            Cell::Number(cost.calls, 0),
            Cell::Number(cost.rows, 0),
            Cell::Number(cost.seconds, 2),
            Cell::ratio(cost.seconds * 1e3, cost.calls, 1),
            Cell::ratio(cost.seconds * 1e6, cost.rows, 0),
            Cell::ratio(cost.buffers, cost.rows, 1),
            Cell::ratio(cost.wal_bytes, cost.rows, 0),
        ]
    };
    drained.statements.iter().take(STATEMENTS_SHOWN).map(cost).collect()
}

fn line(case: &Case, profile: Profile, to: &str, drained: &Drained, without: Option<&Drained>) -> Vec<Cell> {
    let mebibytes =
        drained.peak_memory_bytes.map_or(Cell::Nothing, |bytes| Cell::Number(bytes as f64 / 1_048_576.0, 0));
    vec![
        Cell::text(case.name),
        Cell::text(profile.name()),
        Cell::text(to),
        Cell::count(drained.report.sent),
        Cell::Number(drained.elapsed.as_secs_f64(), 2),
        Cell::Number(drained.rate(), 0),
        without.map_or(Cell::Nothing, |without| Cell::ratio(drained.rate(), without.rate(), 2)),
        Cell::Number(drained.claim_seconds, 1),
        Cell::Number(drained.publish_seconds, 1),
        Cell::Number(drained.settle_seconds, 1),
        Cell::Number(drained.cpu.relay, 1),
        Cell::Number(drained.cpu.postgres, 1),
        Cell::Number(drained.cpu.kafka, 1),
        mebibytes,
    ]
}
