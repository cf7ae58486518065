//! Random rows of every kind that is legal in the table, likely or not.

use keiro_relay::domain::pause::PausedRows;
use rand::RngExt;
use rand::rngs::StdRng;
use serde_json::{Value, json};
use uuid::Uuid;

use super::database::Table;
use super::outbox::{row, with};

pub const SOURCES: [&str; 3] = ["s", "S", "s "];

/// Topics, all different.
pub const TOPICS: [&str; 3] = ["topic", "Topic", "topic "];

/// Keys that are all different, though a collation may think little of the difference.
pub const KEYS: [&str; 12] = ["", " ", "a", "A", "á", "a\u{301}", "a ", "ａ", "ß", "ss", "\u{1}", "\u{10ffff}"];

/// One of these.
pub fn one_of<T: Clone>(rng: &mut StdRng, values: &[T]) -> T {
    values[rng.random_range(0..values.len())].clone()
}

/// Topics and keys that are paused, often none.
pub fn draw_paused(rng: &mut StdRng, topics: &[&str], keys: &[&str]) -> PausedRows {
    let mut some = |of: &[&str]| of.iter().filter(|_| rng.random_bool(0.2)).map(|&name| name.to_owned()).collect();
    PausedRows { topics: some(topics), keys: some(keys) }
}

/// What a table of random rows is drawn from: few sources and keys, so that lanes get long.
#[derive(Debug, Clone)]
pub struct Kinds {
    pub table: Table,
    pub sources: Vec<&'static str>,
    pub keys: Vec<&'static str>,
}

impl Kinds {
    pub fn draw(rng: &mut StdRng, table: Table) -> Self {
        let sources = (0..2).map(|_| one_of(rng, &SOURCES)).collect();
        let keys = (0..rng.random_range(1..5)).map(|_| one_of(rng, &KEYS)).collect();
        Self { table, sources, keys }
    }

    /// Its keys, each once.
    pub fn distinct_keys(&self) -> Vec<&'static str> {
        let mut keys = self.keys.clone();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// Row `n`, which only its message id shows.
    pub fn row(&self, rng: &mut StdRng, n: u64) -> Value {
        let status = self.status(rng);
        let lean = self.table == Table::Lean;
        let finished = status == "dead" || status == "rejected";
        let next_attempt_at = match rng.random_range(0..20) {
            // A foreign publisher leaves the date of a row that it gives up.
            _ if lean && finished => one_of(rng, &["9999-12-31 00:00:00+00", "2026-01-01 00:00:00+00"]),
            0 => "-infinity",
            1 if lean => "9998-12-31 23:59:59+00",
            1 => "infinity",
            2 => "9000-01-01 00:00:00+00",
            3 | 4 => "2999-01-01 00:00:00+00",
            _ => "2026-01-01 00:00:00+00",
        };
        let published_at = match rng.random_range(0..8) {
            _ if lean && status != "sent" => None,
            _ if lean => Some("2026-01-01 00:00:00+00"),
            0 => Some("2026-01-01 00:00:00+00"),
            1 => Some("infinity"),
            2 => Some("-infinity"),
            _ if status == "sent" => Some("2026-01-01 00:00:00+00"),
            _ => None,
        };
        let times =
            ["2026-01-01 00:00:00+00", "2026-01-01 00:00:00+00", "2999-01-01 00:00:00+00", "infinity", "-infinity"];
        let created_at = match rng.random_range(0..20) {
            0 => "-infinity".to_owned(),
            1 => "infinity".to_owned(),
            // Rows of one transaction share it.
            _ => format!("2026-01-01 00:00:{:02}+00", rng.random_range(0..8)),
        };
        let attempt_count: i64 = match rng.random_range(0..30) {
            0 => -1,
            1 => i64::MAX,
            2 => i64::MIN,
            3..7 => rng.random_range(1..4),
            _ => 0,
        };
        let rejected = status == "rejected";
        let columns = json!({
            "outbox_id": Uuid::from_u128(rng.random()),
            "source": one_of(rng, &self.sources),
            "message_key": if rng.random_bool(0.2) { None } else { Some(one_of(rng, &self.keys)) },
            "destination": one_of(rng, &TOPICS),
            "status": status,
            "attempt_count": attempt_count,
            "next_attempt_at": next_attempt_at,
            "published_at": published_at,
            "created_at": created_at,
            "updated_at": one_of(rng, &times),
            "occurred_at": one_of(rng, &times),
            "last_error": one_of(rng, &[None, Some(""), Some("kafka.some_code: text")]),
            "payload_bytes": format!("\\x{}", "70".repeat(one_of(rng, &[0, 0, 1, 7, 100]))),
            "attributes": one_of(rng, &[None, Some(json!({ "b": [1.50, null], "a": "ü" })), Some(json!(null))]),
        });
        let row = with(row(n), columns);
        if !rejected {
            return row;
        }
        with(row, json!({ "rejected_at": "2026-01-01 00:00:00+00", "rejection_code": "kafka.some_code" }))
    }

    fn status(&self, rng: &mut StdRng) -> &'static str {
        match rng.random_range(0..100) {
            0..55 => "pending",
            55..75 => "failed",
            75..80 => "publishing",
            80..88 => "sent",
            88..92 => "dead",
            92..96 if self.table != Table::OlderShared => "rejected",
            // Nobody knows these; they are neither claimable nor terminal.
            _ => one_of(rng, &["paused", "", "PENDING", "sent ", "publishing\n"]),
        }
    }
}
