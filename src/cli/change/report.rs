//! What a command did, in words and as JSON, and the exit code that follows from it.
//!
//! Nothing here ever prints more lines than a person reads: many rows that were left alone are counted by reason.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;
use uuid::Uuid;

use super::super::{EXIT_FAILED, EXIT_OK, EXIT_STATE, complain, say};
use crate::store::{Status, Unchanged, Why};

/// Rows that are told one by one.
const ROWS_MAX: usize = 20;
/// Rows that are in the JSON object.
const JSON_ROWS_MAX: usize = 1_000;

/// What came of a command.
pub(super) struct Report {
    name: &'static str,
    dry_run: bool,
    takes: BTreeSet<Status>,
    /// Rows that were changed, or would be.
    pub changed: usize,
    /// Those of them that are dead now.
    pub dead: usize,
    /// Somebody pressed Ctrl-C.
    pub interrupted: bool,
    error: Option<String>,
    /// Rows that were left alone: by reason, how many, and the first of them.
    counts: BTreeMap<&'static str, (usize, Unchanged)>,
    rows: Vec<Unchanged>,
}

impl Report {
    pub(super) fn new(name: &'static str, dry_run: bool, takes: BTreeSet<Status>) -> Self {
        Self {
            name,
            dry_run,
            takes,
            changed: 0,
            dead: 0,
            interrupted: false,
            error: None,
            counts: BTreeMap::new(),
            rows: Vec::new(),
        }
    }

    /// Takes in rows that were left alone.
    pub(super) fn add(&mut self, rows: impl Iterator<Item = Unchanged>) {
        for row in rows {
            self.counts.entry(code(row.why)).or_insert((0, row)).0 += 1;
            if self.rows.len() < JSON_ROWS_MAX {
                self.rows.push(row);
            }
        }
    }

    /// Rows that were left alone.
    pub(super) fn unchanged(&self) -> usize {
        self.counts.values().map(|(rows, _)| rows).sum()
    }

    /// The command ended early.
    pub(super) fn stopped(&mut self, error: &str) {
        self.error = Some(error.to_owned());
    }

    /// 3 when a row that was named was left alone, or any row for the sake of order: the one who asked has to decide.
    pub(super) fn exit_code(&self, named: &BTreeSet<Uuid>) -> u8 {
        if self.interrupted {
            return EXIT_FAILED;
        }
        let fine = |why: Why| match why {
            Why::AlreadyCancelled => true,
            Why::State(_) | Why::NotFound | Why::Moved | Why::Leased | Why::Recent => named.is_empty(),
            Why::AttemptsSpent(_) | Why::LaterSent | Why::LaterInFlight | Why::OrderUnknown => false,
        };
        if self.counts.values().all(|(_, row)| fine(row.why)) { EXIT_OK } else { EXIT_STATE }
    }

    /// Tells it.
    pub(super) fn print(&self, json: bool) {
        if json {
            say(&self.json().to_string());
        } else {
            say(&self.line());
        }
        if self.unchanged() <= ROWS_MAX {
            for row in &self.rows {
                complain(&format!("row {}: {}", row.outbox_id, self.reason(row.why)));
            }
        } else {
            for (rows, first) in self.counts.values() {
                let more = if *rows == 1 { String::new() } else { format!(" and {} more", rows - 1) };
                complain(&format!("row {}{more}: {}", first.outbox_id, self.reason(first.why)));
            }
        }
        if self.interrupted {
            complain("interrupted: what is counted is done; the same command goes on where this one ended");
        }
        if let Some(error) = &self.error {
            complain(error);
            if self.changed > 0 && !self.dry_run {
                complain("stopped there: what is counted is done; the same command goes on where this one ended");
            }
        }
    }

    fn json(&self) -> serde_json::Value {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|row| {
                let status = match row.why {
                    Why::State(status) => Some(status.name()),
                    _ => None,
                };
                json!({ "outbox_id": row.outbox_id, "why": code(row.why), "status": status, "text": self.reason(row.why) })
            })
            .collect();
        json!({
            "command": self.name,
            "dry_run": self.dry_run,
            "changed": self.changed,
            "dead": self.dead,
            "unchanged": self.unchanged(),
            "unchanged_rows": rows,
            "complete": !self.interrupted && self.error.is_none(),
            "error": self.error,
        })
    }

    fn line(&self) -> String {
        let rows = if self.changed == 1 { "row" } else { "rows" };
        let done = match self.name {
            "retry" => "retried",
            "replay" => "replayed",
            "cancel" => "cancelled",
            "reschedule" => "rescheduled",
            "requeue-stuck" => "requeued",
            "prune" => "deleted",
            name => name,
        };
        let would = if self.dry_run { "nothing changed: this would have " } else { "" };
        let dead = match self.dead {
            0 => String::new(),
            dead => format!(", of them {dead} dead, since their attempts are spent"),
        };
        let left = match self.unchanged() {
            0 => String::new(),
            left => format!("; {left} left as they are"),
        };
        format!("{would}{done} {} {rows}{dead}{left}", self.changed)
    }

    /// Why a row was left alone, and what would be possible.
    fn reason(&self, why: Why) -> String {
        match why {
            Why::NotFound => "no such row, or another filter excludes it".to_owned(),
            Why::State(status) => {
                format!("is {}; {} takes {} rows. {}", known(status), self.name, kinds(&self.takes), possible(status))
            }
            Why::AlreadyCancelled => "was cancelled before".to_owned(),
            Why::Moved => "changed while the command ran: look at it and run the command again".to_owned(),
            Why::Leased => "is in flight, and its lease has not run out: a relay is still at work on it".to_owned(),
            Why::Recent => "is not older than --before".to_owned(),
            Why::AttemptsSpent(attempts) => {
                format!("has spent {attempts} attempts and none is left: leave --keep-attempts out")
            }
            Why::LaterSent => format!(
                "a later row of its lane has been sent already, and would be followed by this one; `{} --allow-reorder` does that",
                self.name
            ),
            Why::LaterInFlight => format!(
                "a later row of its lane is in flight, and may be followed by this one; `{} --allow-reorder` does that",
                self.name
            ),
            Why::OrderUnknown => format!(
                "whether a later row of its lane has been sent could not be found out in time; if that does not matter: `{} --allow-reorder`",
                self.name
            ),
        }
    }
}

/// Stable names for programs.
fn code(why: Why) -> &'static str {
    match why {
        Why::NotFound => "not_found",
        Why::State(Status::Pending) => "pending",
        Why::State(Status::Failed) => "failed",
        Why::State(Status::Publishing) => "publishing",
        Why::State(Status::Unknown) => "unknown",
        Why::State(Status::Sent) => "sent",
        Why::State(Status::Dead) => "dead",
        Why::State(Status::Rejected) => "rejected",
        Why::AlreadyCancelled => "already_cancelled",
        Why::Moved => "moved",
        Why::Leased => "leased",
        Why::Recent => "recent",
        Why::AttemptsSpent(_) => "attempts_spent",
        Why::LaterSent => "later_sent",
        Why::LaterInFlight => "later_in_flight",
        Why::OrderUnknown => "order_unknown",
    }
}

fn known(status: Status) -> &'static str {
    if status == Status::Unknown { "in a status nobody knows" } else { status.name() }
}

/// What an operator can do with a row in this state.
fn possible(status: Status) -> &'static str {
    match status {
        Status::Pending | Status::Failed => "It can be cancelled or rescheduled",
        Status::Publishing => "Wait for its verdict; once its lease has run out, requeue-stuck frees it",
        Status::Sent => "It can be replayed or pruned",
        Status::Dead | Status::Rejected => "It can be retried or pruned",
        Status::Unknown => "Correct it by hand: it blocks its lane",
    }
}

/// `dead and rejected`.
pub(super) fn kinds(statuses: &BTreeSet<Status>) -> String {
    let names: Vec<&str> = statuses.iter().map(|status| status.name()).collect();
    names.join(" and ")
}
