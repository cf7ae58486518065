//! The judge of the demo: what the producers committed against what the topics hold.
//!
//! Nothing here ever asks the relay anything, and nothing here does IO: the order that counts is the table's, the records are
//! what a consumer read.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::Serialize;

use crate::domain::policy::Policy;

/// Problems of one kind that are written out; of the others only the number.
const SHOWN_MAX: usize = 3;

/// What has to become of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It is on its topic.
    Sent,
    /// It is on no topic, with this rejection code.
    Rejected(&'static str),
}

/// A row as its producer remembers it: its transaction was committed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The source's name.
    pub source: String,
    /// The dedupe key.
    pub message_id: String,
    /// Hash of the payload.
    pub digest: u64,
    /// What has to become of it.
    pub fate: Fate,
}

/// A row as the table has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableRow {
    /// The source's name.
    pub source: String,
    /// The dedupe key.
    pub message_id: String,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub key: Option<String>,
    /// Its status.
    pub status: String,
    /// Rejection code or last error.
    pub reason: Option<String>,
}

/// A record as a consumer read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Where it was.
    pub topic: String,
    /// Where it was.
    pub partition: i32,
    /// Where it was.
    pub offset: i64,
    /// When the broker appended it, in milliseconds since 1970, if it says so.
    pub appended_ms: Option<i64>,
    /// Header `keiro-message-id`.
    pub message_id: String,
    /// Its key.
    pub key: Option<Vec<u8>>,
    /// Hash of its value.
    pub digest: u64,
}

/// Everything the judge looks at.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// Name and policy of every source, in the order of the report.
    pub sources: Vec<(String, Policy)>,
    /// What the producers committed.
    pub committed: Vec<Committed>,
    /// Message ids that were rolled back.
    pub rolled_back: HashSet<String>,
    /// The table's rows in (created_at, outbox_id) order.
    pub table: Vec<TableRow>,
    /// The records, in any order.
    pub records: Vec<Record>,
    /// Whether one broker appended all of them, so that its clock orders records of different topics and partitions.
    pub one_clock: bool,
}

/// What one source's rows became.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct SourceFigures {
    /// The source's name.
    pub source: String,
    /// Its policy.
    pub policy: &'static str,
    /// Rows that were committed.
    pub rows: usize,
    /// Rows that are marked sent.
    pub sent: usize,
    /// Rows that are marked rejected.
    pub rejected: usize,
    /// Rows that are marked dead.
    pub dead: usize,
    /// Records beyond the first of each row.
    pub duplicates: usize,
    /// Rows that should be on a topic and are not.
    pub missing: usize,
    /// Rows whose first record comes after that of a row behind it.
    pub order_violations: usize,
    /// When the first record was appended, in milliseconds since 1970.
    #[serde(skip)]
    pub first_ms: Option<i64>,
    /// When the last record was appended.
    #[serde(skip)]
    pub last_ms: Option<i64>,
}

/// What the judge says.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Judgement {
    /// The figures of each source.
    pub sources: Vec<SourceFigures>,
    /// Records that no committed row explains.
    pub unexpected: usize,
    /// All that is not as it should be; empty when the check held.
    pub problems: Vec<String>,
}

/// Judges the evidence.
#[must_use]
pub fn judge(evidence: &Evidence) -> Judgement {
    let mut problems = Problems::default();
    let mut figures: Vec<SourceFigures> = evidence
        .sources
        .iter()
        .map(|(name, policy)| SourceFigures { source: name.clone(), policy: policy.name(), ..SourceFigures::default() })
        .collect();
    let source_index: HashMap<&str, usize> =
        evidence.sources.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();

    // What was committed is in the table, and nothing else is.
    let committed: HashMap<&str, &Committed> =
        evidence.committed.iter().map(|row| (row.message_id.as_str(), row)).collect();
    let in_table: HashSet<&str> = evidence.table.iter().map(|row| row.message_id.as_str()).collect();
    for row in &evidence.committed {
        if let Some(&index) = source_index.get(row.source.as_str()) {
            figures[index].rows += 1;
        }
        if !in_table.contains(row.message_id.as_str()) {
            problems.add("rows committed and not in the table", &row.message_id);
        }
    }

    // Every record belongs to a committed row, and carries what that row says.
    let table: HashMap<&str, &TableRow> = evidence.table.iter().map(|row| (row.message_id.as_str(), row)).collect();
    let mut firsts: HashMap<&str, &Record> = HashMap::new();
    let mut unexpected = 0;
    let mut in_log_order: Vec<&Record> = evidence.records.iter().collect();
    in_log_order.sort_by_key(|record| (&record.topic, record.partition, record.offset));
    for record in in_log_order {
        let id = record.message_id.as_str();
        let (Some(row), Some(written)) = (table.get(id), committed.get(id)) else {
            unexpected += 1;
            let kind = if evidence.rolled_back.contains(id) {
                "records of rows that were rolled back"
            } else {
                "records of no row that was committed"
            };
            problems.add(kind, &format!("{id} on {} [{}] at {}", record.topic, record.partition, record.offset));
            continue;
        };
        let described = || format!("{id} on {} [{}] at {}", record.topic, record.partition, record.offset);
        if record.topic != row.topic {
            problems.add("records on another topic than their row says", &described());
        }
        if record.key.as_deref() != row.key.as_deref().map(str::as_bytes) || record.digest != written.digest {
            problems.add("records with another key or value than their row", &described());
        }
        if let Fate::Rejected(_) = written.fate {
            problems.add("records of rows that no topic should have taken", &described());
        }
        let Some(&index) = source_index.get(row.source.as_str()) else { continue };
        let figures = &mut figures[index];
        if let Some(at) = record.appended_ms {
            figures.first_ms = Some(figures.first_ms.map_or(at, |first| first.min(at)));
            figures.last_ms = Some(figures.last_ms.map_or(at, |last| last.max(at)));
        }
        if firsts.contains_key(id) {
            figures.duplicates += 1;
        } else {
            firsts.insert(id, record);
        }
    }

    // In the table's order: what became of each row, and whether its record comes after those of the rows before it.
    let mut lanes: HashMap<(usize, Option<&str>), LaneSoFar<'_>> = HashMap::new();
    for row in &evidence.table {
        let Some(&index) = source_index.get(row.source.as_str()) else { continue };
        let id = row.message_id.as_str();
        let Some(written) = committed.get(id) else {
            problems.add("rows in the table that nobody committed", id);
            continue;
        };
        let figures = &mut figures[index];
        match row.status.as_str() {
            "sent" => figures.sent += 1,
            "rejected" => figures.rejected += 1,
            "dead" => figures.dead += 1,
            _ => {}
        }
        let as_expected = match written.fate {
            Fate::Sent => row.status == "sent",
            Fate::Rejected(code) => row.status == "rejected" && row.reason.as_deref() == Some(code),
        };
        if !as_expected {
            let reason = row.reason.as_deref().unwrap_or("no reason given");
            problems.add(
                "rows with another status than they should have",
                &format!("{id} of {} is {}: {reason}", row.source, row.status),
            );
        }
        let Some(record) = firsts.get(id) else {
            if written.fate == Fate::Sent {
                figures.missing += 1;
                problems.add("rows committed and on no topic", &format!("{id} of {} for {}", row.source, row.topic));
            }
            continue;
        };
        let lane = match evidence.sources[index].1 {
            Policy::PerKeyHeadOfLine => match row.key.as_deref() {
                Some(key) => Some(key),
                None => continue,
            },
            Policy::PerSourceStream | Policy::StopTheLine => None,
            Policy::BestEffort => continue,
        };
        if let Some(later) = lanes.entry((index, lane)).or_default().follow(record, evidence.one_clock) {
            figures.order_violations += 1;
            problems.add("rows later on Kafka than a row behind them", &format!("{id} of {}: {later}", row.source));
        }
    }
    Judgement { sources: figures, unexpected, problems: problems.texts() }
}

/// How far a lane's records got, going through its rows in the table's order.
#[derive(Default)]
struct LaneSoFar<'a> {
    /// The furthest record of each topic and partition.
    furthest: BTreeMap<(&'a str, i32), (i64, &'a str)>,
    /// The latest record by the broker's clock: it orders records of different topics too.
    latest: Option<(i64, &'a str)>,
}

impl<'a> LaneSoFar<'a> {
    /// Takes the next row's record; says what is wrong when an earlier row's record comes after it.
    fn follow(&mut self, record: &'a Record, one_clock: bool) -> Option<String> {
        let id = record.message_id.as_str();
        let (furthest, before) = self.furthest.entry((&record.topic, record.partition)).or_insert((record.offset, id));
        if record.offset < *furthest {
            return Some(format!(
                "at offset {} of {} [{}], after {before} at {furthest}, which is ahead of it in the table",
                record.offset, record.topic, record.partition
            ));
        }
        (*furthest, *before) = (record.offset, id);
        if let Some(at) = record.appended_ms.filter(|_| one_clock) {
            if let Some((latest, before)) = self.latest
                && at < latest
            {
                return Some(format!("appended to {} {} ms before {before}", record.topic, latest - at));
            }
            self.latest = Some((at, id));
        }
        None
    }
}

/// Problems by kind, few of each written out.
#[derive(Default)]
struct Problems(BTreeMap<&'static str, (usize, Vec<String>)>);

impl Problems {
    fn add(&mut self, kind: &'static str, what: &str) {
        let (count, shown) = self.0.entry(kind).or_default();
        *count += 1;
        if shown.len() < SHOWN_MAX {
            shown.push(what.to_owned());
        }
    }

    fn texts(self) -> Vec<String> {
        let text = |(kind, (count, shown)): (&str, (usize, Vec<String>))| {
            let more = if count > shown.len() { ", …" } else { "" };
            format!("{kind}: {count} ({}{more})", shown.join(", "))
        };
        self.0.into_iter().map(text).collect()
    }
}
