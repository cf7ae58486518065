//! The cast of the demo: four sources with the four policies, their topics, and every row that is going to be written.
//!
//! Nothing here ever talks to a server: it is the plan that the producers follow and the judge holds the result against.

use std::collections::VecDeque;

use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

use super::judge::Fate;
use crate::domain::policy::Policy;

/// What the oversized row is refused with.
pub(super) const TOO_LARGE: &str = "kafka.message_too_large";
/// Limit of a record on the topic of the first source; the client's own is 16 MiB.
pub(super) const TOPIC_BYTES_MAX: usize = 16 << 10;
/// Payload of the row that is too large for it.
const TOO_LARGE_BYTES: usize = 40_000;
/// Keys of a source that has keys.
const KEYS: usize = 200;
/// The key that every fourth row of the first source has.
const HOT_KEY: usize = 0;

/// One source of the demo.
#[derive(Debug, Clone, Copy)]
pub(super) struct Role {
    /// Its name, and its topic's.
    pub name: &'static str,
    pub policy: Policy,
    /// What the policy promises, for people.
    pub promise: &'static str,
    /// Its share of all rows, in tenths.
    tenths: usize,
    pub partitions: i32,
    pub producers: usize,
    /// What a key is called.
    key: &'static str,
}

/// Its hot key has a row that is too large in the middle.
pub(super) const ORDERS: usize = 0;
/// One of its rows goes to a topic that is not there yet.
pub(super) const BILLING: usize = 2;

pub(super) const ROLES: [Role; 4] = [
    Role {
        name: "orders",
        policy: Policy::PerKeyHeadOfLine,
        promise: "in order per customer; customers do not wait for each other",
        tenths: 4,
        partitions: 3,
        producers: 3,
        key: "customer",
    },
    Role {
        name: "ledger",
        policy: Policy::PerSourceStream,
        promise: "in order over the whole source, whatever the key",
        tenths: 2,
        partitions: 1,
        producers: 2,
        key: "account",
    },
    Role {
        name: "billing",
        policy: Policy::StopTheLine,
        promise: "one after the other; a failure halts the source",
        tenths: 2,
        partitions: 1,
        producers: 2,
        key: "invoice",
    },
    Role {
        name: "clicks",
        policy: Policy::BestEffort,
        promise: "no order, so nothing waits for anything",
        tenths: 2,
        partitions: 3,
        producers: 2,
        key: "visitor",
    },
];

/// The topic that is made only once somebody misses it.
pub(super) const LATE_TOPIC: &str = "billing-refunds";

/// One row that is going to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PlannedRow {
    /// Index into [`ROLES`].
    pub source: usize,
    /// Its number within the source.
    pub number: usize,
    pub key: Option<String>,
    /// Topic, without the run's prefix.
    pub topic: &'static str,
    pub fate: Fate,
}

/// Rows that share an order, so that their producers take turns.
pub(super) type Queue = VecDeque<PlannedRow>;

/// How many rows a source gets of so many in all.
pub(super) fn rows_of(source: usize, rows: usize) -> usize {
    let share = |source: usize| rows * ROLES[source].tenths / 10;
    // The first takes what rounding left.
    if source == 0 { rows - (1..ROLES.len()).map(share).sum::<usize>() } else { share(source) }
}

/// How many rows of the halting source come before the one that halts it.
pub(super) fn rows_before_halt(rows: usize) -> usize {
    rows_of(BILLING, rows) * 2 / 5
}

/// Every row, dealt out to its source's producers: each has a queue of its own where an order holds within keys only, else they
/// share one. With `limits`, the topics' limits are enforced, so one row is too large.
pub(super) fn deal(rows: usize, limits: bool) -> Vec<(usize, Vec<Queue>)> {
    (0..ROLES.len()).map(|source| (source, deal_source(source, rows, limits))).collect()
}

fn deal_source(source: usize, rows: usize, limits: bool) -> Vec<Queue> {
    let role = &ROLES[source];
    let own = rows_of(source, rows);
    let shared = match role.policy {
        Policy::PerSourceStream | Policy::StopTheLine => true,
        Policy::PerKeyHeadOfLine | Policy::BestEffort => false,
    };
    let mut queues = vec![Queue::new(); if shared { 1 } else { role.producers }];
    for number in 0..own {
        let too_large = limits && source == ORDERS && number == own / 2;
        let late = source == BILLING && number == rows_before_halt(rows);
        let key = if source == ORDERS && (number.is_multiple_of(4) || too_large) {
            Some(HOT_KEY)
        } else if role.policy == Policy::BestEffort && number.is_multiple_of(2) {
            None
        } else {
            Some(1 + number % (KEYS - 1))
        };
        // All rows of a key are one producer's: two that wrote it at once would have no order between them to keep.
        let queue = key.unwrap_or(number) % queues.len();
        queues[queue].push_back(PlannedRow {
            source,
            number,
            key: key.map(|key| format!("{}-{key}", role.key)),
            topic: if late { LATE_TOPIC } else { role.name },
            fate: if too_large { Fate::Rejected(TOO_LARGE) } else { Fate::Sent },
        });
    }
    queues
}

impl PlannedRow {
    /// The payload; the same each time.
    pub(super) fn payload(&self) -> Vec<u8> {
        let mut random = StdRng::seed_from_u64((self.source as u64) << 32 | self.number as u64);
        if let Fate::Rejected(_) = self.fate {
            // What compresses well would fit after all.
            let mut bytes = vec![0; TOO_LARGE_BYTES];
            random.fill_bytes(&mut bytes);
            return bytes;
        }
        let letters = random.random_range(16..160);
        let note: String = (0..letters).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect();
        let Role { name, key, .. } = ROLES[self.source];
        let whose = self.key.as_deref().unwrap_or("nobody");
        format!(r#"{{"source":"{name}","number":{},"{key}":"{whose}","note":"{note}"}}"#, self.number).into_bytes()
    }

    pub(super) fn content_type(&self) -> &'static str {
        match self.fate {
            Fate::Sent => "application/json",
            Fate::Rejected(_) => "application/octet-stream",
        }
    }
}
