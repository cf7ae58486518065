//! What `/status`, the metrics and the log show of pauses. Keys of lanes are content of rows and stay out of all three: `pause --list`
//! shows them.
//!
//! Nothing here ever asks the database: it turns what was read into words.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::domain::message::PgTime;
use crate::domain::pause::{Pause, PauseTarget, Pauses};
use crate::telemetry::{StateChange, clean};

/// Pauses that are listed; the gauges count all.
const SHOWN_MAX: usize = 100;

/// One pause in `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PauseReport {
    /// `source`, `topic` or `lane`.
    pub kind: &'static str,
    /// The source or the topic; of a lane its source.
    pub name: String,
    /// Since when (RFC 3339, UTC).
    pub since: String,
    /// When it ends by itself.
    pub until: Option<String>,
    /// The database user who paused it.
    pub by: String,
    /// Why, in that person's words.
    pub reason: Option<String>,
}

impl PauseReport {
    fn of(pause: &Pause) -> Self {
        Self {
            kind: pause.target.kind(),
            name: clean(pause.target.name()),
            since: pause.since.rfc3339(),
            until: pause.until.map(PgTime::rfc3339),
            by: clean(&pause.by),
            reason: pause.reason.as_deref().map(clean),
        }
    }
}

/// What is shown of all pauses at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PausesShown {
    /// The oldest first, a limited number.
    pub list: Vec<PauseReport>,
    /// Why pauses are not read, or `None` when they are.
    pub problem: Option<String>,
    /// Paused sources.
    pub(super) sources: BTreeSet<String>,
    /// How many there are of each kind and name, and the first of them. The kind is a label of the gauge.
    groups: BTreeMap<(&'static str, String), (u64, PauseReport)>,
}

impl PausesShown {
    /// Turns pauses into what is shown of them.
    #[must_use]
    pub fn of(pauses: &Pauses, problem: Option<String>) -> Self {
        let mut shown = Self { problem: problem.as_deref().map(clean), ..Self::default() };
        for pause in pauses.list() {
            let report = PauseReport::of(pause);
            if let PauseTarget::Source(name) = &pause.target {
                shown.sources.insert(name.clone());
            }
            if shown.list.len() < SHOWN_MAX {
                shown.list.push(report.clone());
            }
            shown.groups.entry((report.kind, report.name.clone())).or_insert((0, report)).0 += 1;
        }
        shown
    }

    /// How many pauses there are of a kind.
    #[must_use]
    pub fn count(&self, kind: &str) -> u64 {
        self.groups.iter().filter(|((of, _), _)| *of == kind).map(|(_, (count, _))| count).sum()
    }

    /// What is not as it was before.
    pub(super) fn changes(&self, before: &Self) -> Vec<StateChange> {
        let mut changes = Vec::new();
        for ((kind, name), (count, report)) in &self.groups {
            if before.groups.get(&(*kind, name.clone())).is_none_or(|(known, _)| known != count) {
                changes.push(StateChange::Paused {
                    kind,
                    name: name.clone(),
                    count: *count,
                    by: report.by.clone(),
                    until: report.until.clone(),
                    reason: report.reason.clone().unwrap_or_default(),
                });
            }
        }
        for (kind, name) in before.groups.keys() {
            if !self.groups.contains_key(&(*kind, name.clone())) {
                changes.push(StateChange::Unpaused { kind, name: name.clone() });
            }
        }
        match (&self.problem, &before.problem) {
            (Some(reason), old) if old.as_ref() != Some(reason) => {
                changes.push(StateChange::PausesOff { reason: reason.clone() });
            }
            (None, Some(_)) => changes.push(StateChange::PausesOn),
            (None, None) | (Some(_), _) => {}
        }
        changes
    }
}
