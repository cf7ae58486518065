//! Rows per second through the whole relay, beside the same claims and settlements without Kafka, and beside a bare producer of
//! the same records.
//!
//! Nothing here ever counts a run whose rows did not all arrive.

use std::sync::Arc;
use std::time::Duration;

use super::bare;
use super::harness::{Cpu, Drained, Harness, NoKafka, StatementCost, defaults, doing, kafka_publisher};
use super::load::Load;
use super::report::{Cell, Section};
use crate::config::Config;
use crate::domain::policy::Policy;
use crate::store::Profile;

/// One way to fill the table.
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

const CASES: [Case; 5] = [
    Case {
        name: "10,000 keys",
        policy: Policy::PerKeyHeadOfLine,
        rows: 100_000,
        sources: 1,
        keys: 10_000,
        partitions: 12,
    },
    Case {
        name: "8 sources, 10,000 keys",
        policy: Policy::PerKeyHeadOfLine,
        rows: 100_000,
        sources: 8,
        keys: 1_250,
        partitions: 12,
    },
    Case { name: "one hot key", policy: Policy::PerKeyHeadOfLine, rows: 100_000, sources: 1, keys: 1, partitions: 12 },
    Case {
        name: "per_source, 1 partition",
        policy: Policy::PerSourceStream,
        rows: 100_000,
        sources: 1,
        keys: 10_000,
        partitions: 1,
    },
    // Almost every record of the one lane goes to another partition than the one before, so it goes alone.
    Case {
        name: "per_source, 12 partitions",
        policy: Policy::PerSourceStream,
        rows: 20_000,
        sources: 1,
        keys: 10_000,
        partitions: 12,
    },
];

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
            "Rows of 1 KB, all there before the relay starts; `drain` until nothing is due, with the default configuration. *No Kafka* is \
             the same relay over a publisher that acknowledges everything at once: looks, claims and settlements only. *Bare producer* \
             hands the very same records, held in memory, to librdkafka with the client settings of the relay and waits for all \
             acknowledgements: no table, no order but that of each partition. The \
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
            "of bare",
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
    let mut measured = Vec::new();
    for case in CASES {
        let case = Case { rows: harness.scaled(case.rows), ..case };
        let mut runs = Vec::new();
        for profile in [Profile::Lean, Profile::Shared] {
            let without = drain(harness, &case, profile, false).await?;
            let with = drain(harness, &case, profile, true).await?;
            statements.rows.extend(statement_lines(&case, profile, "no Kafka", &without.drained));
            statements.rows.extend(statement_lines(&case, profile, "Kafka", &with.drained));
            runs.push((profile, without, with));
        }
        measured.push((case, runs));
    }
    // Last: what the bare producer holds in memory must not count as the relay's.
    for (case, runs) in measured {
        let Some((_, _, last)) = runs.last() else { continue };
        let bare = produce(harness, &case, last).await?;
        for (profile, without, with) in &runs {
            section.rows.push(line(&case, *profile, "no Kafka", &without.drained, None));
            section.rows.push(line(&case, *profile, "Kafka", &with.drained, Some((&without.drained, &bare))));
        }
        section.rows.push(bare_line(&case, &bare));
    }
    Ok(vec![section, statements])
}

/// The records of a topic once more, through a bare producer, to a topic like it.
async fn produce(harness: &mut Harness, case: &Case, run: &Run) -> Result<Produced, String> {
    doing(&format!("drain, {}, {} records through a bare producer", case.name, case.rows));
    let brokers = harness.brokers().await?;
    let records = bare::read(&brokers, &run.topic, case.partitions, case.rows).await?;
    let fresh = harness.topic(case.partitions).await?;
    let produced = harness.measured(bare::produce(&run.config.kafka, &fresh, records)).await?;
    let there = harness.records(&fresh, case.partitions).await?;
    if there != case.rows as u64 {
        return Err(format!("{there} records of {} are on the topic of the bare producer", case.rows));
    }
    Ok(Produced { records: case.rows, elapsed: produced.0, cpu: produced.1 })
}

/// What a bare producer did and cost.
#[derive(Debug)]
struct Produced {
    records: usize,
    elapsed: Duration,
    cpu: Cpu,
}

impl Produced {
    /// Records a second.
    fn rate(&self) -> f64 {
        self.records as f64 / self.elapsed.as_secs_f64()
    }
}

/// A table that was drained.
struct Run {
    drained: Drained,
    topic: String,
    config: Arc<Config>,
}

async fn drain(harness: &mut Harness, case: &Case, profile: Profile, to_kafka: bool) -> Result<Run, String> {
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
    Ok(Run { drained, topic, config: scratch.config })
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

fn line(
    case: &Case,
    profile: Profile,
    to: &str,
    drained: &Drained,
    beside: Option<(&Drained, &Produced)>,
) -> Vec<Cell> {
    let mebibytes =
        drained.peak_memory_bytes.map_or(Cell::Nothing, |bytes| Cell::Number(bytes as f64 / 1_048_576.0, 0));
    vec![
        Cell::text(case.name),
        Cell::text(profile.name()),
        Cell::text(to),
        Cell::count(drained.report.sent),
        Cell::Number(drained.elapsed.as_secs_f64(), 2),
        Cell::Number(drained.rate(), 0),
        beside.map_or(Cell::Nothing, |(without, _)| Cell::ratio(drained.rate(), without.rate(), 2)),
        beside.map_or(Cell::Nothing, |(_, bare)| Cell::ratio(drained.rate(), bare.rate(), 2)),
        Cell::Number(drained.claim_seconds, 1),
        Cell::Number(drained.publish_seconds, 1),
        Cell::Number(drained.settle_seconds, 1),
        Cell::Number(drained.cpu.relay, 1),
        Cell::Number(drained.cpu.postgres, 1),
        Cell::Number(drained.cpu.kafka, 1),
        mebibytes,
    ]
}

fn bare_line(case: &Case, bare: &Produced) -> Vec<Cell> {
    vec![
        Cell::text(case.name),
        Cell::text("–"),
        Cell::text("bare producer"),
        Cell::Number(bare.records as f64, 0),
        Cell::Number(bare.elapsed.as_secs_f64(), 2),
        Cell::Number(bare.rate(), 0),
        Cell::Nothing,
        Cell::Nothing,
        Cell::Nothing,
        Cell::Nothing,
        Cell::Nothing,
        Cell::Number(bare.cpu.relay, 1),
        Cell::Number(bare.cpu.postgres, 1),
        Cell::Number(bare.cpu.kafka, 1),
        Cell::Nothing,
    ]
}
