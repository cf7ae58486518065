//! What operators do to rows, and what came of it.
//!
//! Nothing here ever asks the database.

use std::collections::BTreeSet;
use std::time::Duration;

use uuid::Uuid;

use super::Status;
use super::maintenance::micros;
use crate::domain::message::PgTime;

/// When a row is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// At this instant.
    At(PgTime),
    /// So long from the database's now.
    In(Duration),
}

impl Due {
    pub(super) fn at(self) -> Option<PgTime> {
        match self {
            Self::At(at) => Some(at),
            Self::In(_) => None,
        }
    }

    pub(super) fn delay_micros(self) -> i64 {
        match self {
            Self::At(_) => 0,
            Self::In(delay) => micros(delay),
        }
    }
}

/// What is done to rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verb {
    /// Dead and rejected rows are tried again.
    Retry {
        /// Attempts that were spent stay spent; rows that have none left are refused.
        keep_attempts: bool,
        /// When.
        due: Due,
        /// Also rows that a later row of their lane has overtaken.
        allow_reorder: bool,
    },
    /// Sent rows go out once more. Consumers that dedupe on the message id take no notice.
    Replay {
        /// Also rows that a later row of their lane would then precede.
        allow_reorder: bool,
    },
    /// Waiting rows are given up: rejected with the code `operator.cancelled`, on an older table dead. Their lanes go on.
    Cancel {
        /// Kept beside the row.
        reason: String,
    },
    /// Waiting rows get another due time. Until then they hold back their lane.
    Reschedule {
        /// When.
        due: Due,
    },
    /// Rows in flight whose lease ran out are failed, or dead when their attempts are spent.
    RequeueStuck {
        /// How long ago they were claimed at least; no less than the longest lease of any relay on the table.
        older_than: Duration,
    },
    /// Finished rows are deleted.
    Prune {
        /// Of these statuses; others than sent, dead and rejected are never deleted.
        statuses: BTreeSet<Status>,
        /// Sent rows that were published before this, others that were last changed before it.
        before: PgTime,
    },
}

impl Verb {
    /// The statuses it applies to.
    #[must_use]
    pub fn takes(&self) -> BTreeSet<Status> {
        match self {
            Self::Retry { .. } => BTreeSet::from([Status::Dead, Status::Rejected]),
            Self::Replay { .. } => BTreeSet::from([Status::Sent]),
            Self::Cancel { .. } | Self::Reschedule { .. } => BTreeSet::from([Status::Pending, Status::Failed]),
            Self::RequeueStuck { .. } => BTreeSet::from([Status::Publishing]),
            Self::Prune { statuses, .. } => statuses
                .intersection(&BTreeSet::from([Status::Sent, Status::Dead, Status::Rejected]))
                .copied()
                .collect(),
        }
    }

    /// Whether what it changes can be claimed again, or lets others be claimed: relays are told.
    pub(super) fn wakes(&self) -> bool {
        match self {
            Self::Prune { .. } => false,
            Self::Retry { .. }
            | Self::Replay { .. }
            | Self::Cancel { .. }
            | Self::Reschedule { .. }
            | Self::RequeueStuck { .. } => true,
        }
    }

    /// Whether rows that were finished wait again: in front of others of their lane.
    pub(super) fn brings_back(&self) -> bool {
        match self {
            Self::Retry { .. } | Self::Replay { .. } => true,
            Self::Cancel { .. } | Self::Reschedule { .. } | Self::RequeueStuck { .. } | Self::Prune { .. } => false,
        }
    }

    /// Whether it must leave alone what a later row of its lane overtook.
    pub(super) fn keeps_order(&self) -> bool {
        match self {
            Self::Retry { allow_reorder, .. } | Self::Replay { allow_reorder } => !allow_reorder,
            Self::Cancel { .. } | Self::Reschedule { .. } | Self::RequeueStuck { .. } | Self::Prune { .. } => false,
        }
    }

    pub(super) fn lease(&self) -> Duration {
        match self {
            Self::RequeueStuck { older_than } => *older_than,
            // What is in flight is nobody else's business.
            Self::Retry { .. }
            | Self::Replay { .. }
            | Self::Cancel { .. }
            | Self::Reschedule { .. }
            | Self::Prune { .. } => Duration::MAX,
        }
    }
}

/// What a call did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Rows that were changed (that would be, in a dry run), in id order.
    pub changed: Vec<Uuid>,
    /// Those of them whose attempts were spent: they are dead now.
    pub dead: usize,
    /// Rows that were left as they are.
    pub unchanged: Vec<Unchanged>,
}

/// A row that was left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unchanged {
    /// Which.
    pub outbox_id: Uuid,
    /// Why.
    pub why: Why,
}

/// Why a row was left as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No such row.
    NotFound,
    /// Its state forbids it.
    State(Status),
    /// It was cancelled before.
    AlreadyCancelled,
    /// It is as the verb wants it now, but was not a moment ago: somebody changed it at the same time.
    Moved,
    /// In flight, and its lease has not run out.
    Leased,
    /// Finished, but not that long ago.
    Recent,
    /// Attempts are kept, and none is left.
    AttemptsSpent(i64),
    /// A later row of its lane has been sent.
    LaterSent,
    /// A later row of its lane is in flight.
    LaterInFlight,
    /// Whether a later row of its lane has been sent could not be found out in time.
    OrderUnknown,
}

impl Why {
    /// Whether [`Verb::Retry`] or [`Verb::Replay`] takes the row when order may be broken.
    #[must_use]
    pub fn is_order(self) -> bool {
        match self {
            Self::LaterSent | Self::LaterInFlight | Self::OrderUnknown => true,
            Self::NotFound
            | Self::State(_)
            | Self::AlreadyCancelled
            | Self::Moved
            | Self::Leased
            | Self::Recent
            | Self::AttemptsSpent(_) => false,
        }
    }
}
