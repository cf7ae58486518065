//! Sent rows against what a topic holds: which are missing, which are there twice, which lanes are out of order.
//!
//! Nothing here ever does IO or keeps a text of a row: 80 octets a row, whatever it holds, so a million rows take 80 MB. A row is known by a
//! 128-bit hash of topic, source and message_id, a lane by one of 64 bits.

use std::collections::HashMap;

use uuid::Uuid;

use super::message::{PgTime, Position};
use super::policy::Policy;

/// A sent row of the table.
#[derive(Debug, Clone, Copy)]
pub struct SentRow<'a> {
    /// Its place in the order.
    pub position: Position,
    /// When its acknowledgement was written down.
    pub published_at: PgTime,
    /// Its source.
    pub source: &'a str,
    /// Its topic.
    pub topic: &'a str,
    /// Its message_id.
    pub message_id: &'a str,
    /// Its key.
    pub key: Option<&'a str>,
}

/// A record of a topic.
#[derive(Debug, Clone, Copy)]
pub struct SeenRecord<'a> {
    /// Its topic.
    pub topic: &'a str,
    /// Header `keiro-source`.
    pub source: &'a str,
    /// Header `keiro-message-id`.
    pub message_id: &'a str,
    /// Where it is.
    pub partition: i32,
    /// Where it is there.
    pub offset: i64,
}

/// What can be said of a topic's rows that are not on it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Compaction removes records that a later one of their key replaces.
    pub compacted: bool,
    /// The records of rows published up to here may have been removed by the topic's retention.
    pub forgotten_until: Option<PgTime>,
}

/// What is wrong with a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finding {
    /// It is not on its topic.
    Missing,
    /// It is not on its topic, which may have forgotten it.
    Unjudged,
    /// It is there so many times.
    Duplicated {
        /// How many records.
        times: u32,
        /// Where.
        partition: i32,
        /// Where its first is.
        offset: i64,
    },
    /// Its first record is before the first of a row that is earlier in its lane.
    OutOfOrder {
        /// Where.
        partition: i32,
        /// Where its first is.
        offset: i64,
        /// The earlier row.
        behind: Uuid,
        /// Where that one's first is.
        behind_offset: i64,
    },
}

/// What was found, with the first rows of each kind in the contract's order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Rows looked for.
    pub rows: u64,
    /// Rows found.
    pub found: u64,
    /// Rows that are not there.
    pub missing: u64,
    /// Rows that are not there and need not be.
    pub unjudged: u64,
    /// Rows that are there more than once.
    pub duplicated: u64,
    /// Rows that are before a row that should be before them.
    pub out_of_order: u64,
    /// Which, as many of each kind as were asked for.
    pub findings: Vec<(Uuid, Finding)>,
}

/// The rows of a range, and what was seen of them.
#[derive(Debug, Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    topics: HashMap<String, u32>,
    is_sorted: bool,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    hash: u128,
    position: Position,
    published_at: PgTime,
    lane: Option<std::num::NonZeroU64>,
    /// Of the first record.
    offset: i64,
    partition: i32,
    times: u32,
    topic: u32,
}

impl Ledger {
    /// Notes a row, under the policy of its source; without one no order is judged.
    pub fn add(&mut self, row: &SentRow<'_>, policy: Option<Policy>) {
        let topic = match self.topics.get(row.topic) {
            Some(topic) => *topic,
            None => {
                let next = u32::try_from(self.topics.len()).unwrap_or(u32::MAX);
                *self.topics.entry(row.topic.to_owned()).or_insert(next)
            }
        };
        let lane = match policy {
            Some(Policy::PerKeyHeadOfLine) => row.key.map(|key| short(hash(&[row.source, key]))),
            Some(Policy::PerSourceStream | Policy::StopTheLine) => Some(short(hash(&[row.source]))),
            Some(Policy::BestEffort) | None => None,
        };
        self.is_sorted = false;
        self.entries.push(Entry {
            hash: hash(&[row.topic, row.source, row.message_id]),
            position: row.position,
            published_at: row.published_at,
            lane,
            offset: -1,
            partition: -1,
            times: 0,
            topic,
        });
    }

    /// How many rows there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The topics of the rows.
    #[must_use]
    pub fn topics(&self) -> Vec<String> {
        let mut topics: Vec<String> = self.topics.keys().cloned().collect();
        topics.sort_unstable();
        topics
    }

    /// Notes a record, in any order of partitions; records of other rows count for nothing. Returns whether it was one of these rows'.
    pub fn see(&mut self, record: &SeenRecord<'_>) -> bool {
        if !self.is_sorted {
            self.entries.sort_unstable_by_key(|entry| entry.hash);
            self.is_sorted = true;
        }
        let hash = hash(&[record.topic, record.source, record.message_id]);
        let Ok(index) = self.entries.binary_search_by_key(&hash, |entry| entry.hash) else { return false };
        let entry = &mut self.entries[index];
        if entry.times == 0 || (entry.partition == record.partition && record.offset < entry.offset) {
            (entry.partition, entry.offset) = (record.partition, record.offset);
        }
        entry.times = entry.times.saturating_add(1);
        true
    }

    /// Says what is wrong, with the first `shown_max` rows of each kind. `memory` tells what each topic may have forgotten.
    ///
    /// Offsets order the records of one partition only, so a lane is compared partition by partition.
    #[must_use]
    pub fn judge(mut self, memory: &HashMap<String, Memory>, shown_max: usize) -> Verdict {
        let mut of_topic = vec![Memory::default(); self.topics.len()];
        for (topic, index) in &self.topics {
            of_topic[*index as usize] = memory.get(topic).copied().unwrap_or_default();
        }
        self.entries.sort_unstable_by_key(|entry| entry.position);
        let mut verdict = Verdict { rows: self.entries.len() as u64, ..Verdict::default() };
        // By position still, so that the first of a kind are the earliest.
        for entry in &self.entries {
            let id = entry.position.outbox_id;
            match entry.times {
                0 => {
                    let memory = of_topic[entry.topic as usize];
                    let may_be_forgotten =
                        memory.compacted || memory.forgotten_until.is_some_and(|until| entry.published_at <= until);
                    let (count, finding) = if may_be_forgotten {
                        (&mut verdict.unjudged, Finding::Unjudged)
                    } else {
                        (&mut verdict.missing, Finding::Missing)
                    };
                    note(&mut verdict.findings, count, id, finding, shown_max);
                }
                1 => verdict.found += 1,
                times => {
                    verdict.found += 1;
                    let finding = Finding::Duplicated { times, partition: entry.partition, offset: entry.offset };
                    note(&mut verdict.findings, &mut verdict.duplicated, id, finding, shown_max);
                }
            }
        }
        // Stable: within a lane the order of positions stays.
        self.entries.retain(|entry| entry.times > 0 && entry.lane.is_some());
        self.entries.sort_by_key(|entry| (entry.lane, entry.topic, entry.partition));
        let mut furthest: Option<&Entry> = None;
        for entry in &self.entries {
            let place = |entry: &Entry| (entry.lane, entry.topic, entry.partition);
            match furthest {
                Some(before) if place(before) == place(entry) && before.offset > entry.offset => {
                    let finding = Finding::OutOfOrder {
                        partition: entry.partition,
                        offset: entry.offset,
                        behind: before.position.outbox_id,
                        behind_offset: before.offset,
                    };
                    note(
                        &mut verdict.findings,
                        &mut verdict.out_of_order,
                        entry.position.outbox_id,
                        finding,
                        shown_max,
                    );
                }
                Some(_) | None => furthest = Some(entry),
            }
        }
        verdict
    }
}

fn note(findings: &mut Vec<(Uuid, Finding)>, count: &mut u64, id: Uuid, finding: Finding, shown_max: usize) {
    if *count < shown_max as u64 {
        findings.push((id, finding));
    }
    *count += 1;
}

/// FNV-1a of 128 bits over texts, each with an end that no text holds.
fn hash(texts: &[&str]) -> u128 {
    const START: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013b;
    let octets = texts.iter().flat_map(|text| text.bytes().chain([0xff]));
    octets.fold(START, |hash, octet| (hash ^ u128::from(octet)).wrapping_mul(PRIME))
}

/// Half of it; never zero, so that it costs no room to say that there is none.
fn short(hash: u128) -> std::num::NonZeroU64 {
    let folded = ((hash >> 64) ^ (hash & u128::from(u64::MAX))) & u128::from(u64::MAX);
    let folded = u64::try_from(folded).expect("64 bits were kept");
    std::num::NonZeroU64::new(folded).unwrap_or(std::num::NonZeroU64::MIN)
}
