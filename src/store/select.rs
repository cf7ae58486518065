//! Which rows a command means: filters become bound parameters, never text. `branches` writes the statement.
//!
//! Nothing here ever changes a row.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::branches::{Query, Unserved};
use super::inspect::Shape;
use super::maintenance::micros;
use super::{Param, Store, StoreError};
use crate::domain::message::{PgTime, Position};

/// A status of the contract, or any other that somebody wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// Waiting.
    Pending,
    /// Waiting after a failure, a skip or a return.
    Failed,
    /// Claimed by somebody.
    Publishing,
    /// None of the contract's.
    Unknown,
    /// Acknowledged.
    Sent,
    /// Attempts spent.
    Dead,
    /// Can never be accepted.
    Rejected,
}

impl Status {
    /// Every status.
    pub const ALL: [Self; 7] =
        [Self::Pending, Self::Failed, Self::Publishing, Self::Unknown, Self::Sent, Self::Dead, Self::Rejected];
    /// Those of rows that are not finished.
    pub const LIVE: [Self; 4] = [Self::Pending, Self::Failed, Self::Publishing, Self::Unknown];

    /// The status of a row of the table.
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self::ALL.into_iter().find(|status| *status != Self::Unknown && status.name() == text).unwrap_or(Self::Unknown)
    }

    /// What the column holds; `unknown` stands for whatever else it may hold.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Failed => "failed",
            Self::Publishing => "publishing",
            Self::Unknown => "unknown",
            Self::Sent => "sent",
            Self::Dead => "dead",
            Self::Rejected => "rejected",
        }
    }

    /// The statuses that are met on the way to rows of this one.
    pub(super) fn way(self) -> &'static [Self] {
        match self {
            Self::Pending | Self::Failed | Self::Publishing | Self::Unknown => &Self::LIVE,
            Self::Dead | Self::Rejected => &[Self::Dead, Self::Rejected],
            Self::Sent => &[Self::Sent],
        }
    }

    /// Whether such a row still holds back its lane (contract §3).
    #[must_use]
    pub fn is_live(self) -> bool {
        match self {
            Self::Pending | Self::Failed | Self::Publishing | Self::Unknown => true,
            Self::Sent | Self::Dead | Self::Rejected => false,
        }
    }
}

/// An instant, absolute or counted back from the database's now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum When {
    /// This instant.
    At(PgTime),
    /// So long ago.
    Ago(Duration),
}

/// The earliest instant that the server takes: 4713 BC.
pub(super) const EARLIEST: PgTime = PgTime(-211_813_488_000_000_000);
/// Later than every finite instant that anybody means, and one that the server takes: about the year 100,000.
pub(super) const LATEST: PgTime = PgTime(3_092_534_208_000_000_000);

impl When {
    /// The instant, seen from `now`.
    #[must_use]
    pub fn instant(self, now: PgTime) -> PgTime {
        let instant = match self {
            Self::At(instant) => instant,
            Self::Ago(duration) => PgTime(now.0.saturating_sub(micros(duration))),
        };
        if instant < EARLIEST { PgTime::NEG_INFINITY } else { instant }
    }
}

/// Which rows: a row belongs to it when it matches one value of each filter that has any. Without filters every row does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// `outbox_id`.
    pub ids: Vec<Uuid>,
    /// `source`.
    pub sources: Vec<String>,
    /// `status`.
    pub statuses: BTreeSet<Status>,
    /// `destination`.
    pub topics: Vec<String>,
    /// `message_key`.
    pub keys: Vec<String>,
    /// `event_type`.
    pub event_types: Vec<String>,
    /// `message_id`.
    pub message_ids: Vec<String>,
    /// `created_at`, from here on.
    pub since: Option<When>,
    /// `created_at`, before this.
    pub until: Option<When>,
    /// `rejection_code`, or the code word that `last_error` begins with.
    pub errors: Vec<String>,
    /// Waiting rows (pending, failed) whose next attempt is due, or those whose is not yet.
    pub due: Option<bool>,
    /// `published_at`, up to this: what retention and prune go by. No filter of `list`.
    pub published_before: Option<When>,
    /// `updated_at`, up to this: a lease that ran out. No filter of `list`.
    pub updated_before: Option<When>,
}

/// In which order a page lists rows; `outbox_id` decides between equals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sort {
    /// `created_at`: the order of the contract.
    Created,
    /// `updated_at`.
    Updated,
    /// `next_attempt_at`.
    Due,
    /// `published_at`: only rows that have one.
    Published,
}

impl Sort {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Due => "due",
            Self::Published => "published",
        }
    }

    /// The column, of the table or of what was read from it.
    pub(super) fn column(self) -> &'static str {
        match self {
            Self::Created => "created_at",
            Self::Updated => "updated_at",
            Self::Due => "next_attempt_at",
            Self::Published => "published_at",
        }
    }
}

/// Which part of the rows of a selection: so many behind a place, in an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// The order.
    pub sort: Sort,
    /// Backwards.
    pub descending: bool,
    /// Only rows behind this one: its value of the sort column, its id.
    pub after: Option<(PgTime, Uuid)>,
    /// Only rows created up to here, seen in the direction of the order: a part of a long walk.
    pub created_until: Option<PgTime>,
    /// Rows at most.
    pub rows_max: usize,
}

/// Values on their way into a statement.
#[derive(Default)]
pub struct Binds(Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

impl Binds {
    /// Binds a value and returns its place, `$n`.
    pub fn add(&mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> String {
        self.0.push((Box::new(value), kind));
        format!("${}", self.0.len())
    }

    pub(super) fn texts(&mut self, values: &[String]) -> String {
        self.add(values.to_vec(), Type::TEXT_ARRAY)
    }

    /// The values as [`super::Db`] and [`super::Tx`] take them.
    #[must_use]
    pub fn params(&self) -> Vec<Param<'_>> {
        self.0.iter().map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone())).collect()
    }
}

impl std::fmt::Debug for Binds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Values may be keys.
        f.debug_list().entries(self.0.iter().map(|(_, kind)| kind)).finish()
    }
}

/// The statuses of the contract, as SQL.
pub(super) const SIX: &str = "('pending', 'publishing', 'sent', 'failed', 'dead', 'rejected')";

impl Selection {
    /// Whether it has no filter: it means every row of the table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The statuses that rows of it can have.
    #[must_use]
    pub fn possible(&self) -> BTreeSet<Status> {
        let waiting = |status: &Status| match self.due {
            Some(_) => matches!(status, Status::Pending | Status::Failed),
            None => true,
        };
        // What was sent has no error any more, and no rejection.
        let erring = |status: &Status| self.errors.is_empty() || *status != Status::Sent;
        let asked = |status: &Status| self.statuses.is_empty() || self.statuses.contains(status);
        Status::ALL.into_iter().filter(waiting).filter(erring).filter(asked).collect()
    }

    /// The condition that says whether a row `o` belongs to it, whatever index brought the row: `$n` are the values, which it binds.
    ///
    /// Written so that no index is tempted by it, `created_at` and `published_at` apart: which one is used is decided by what stands beside it.
    #[must_use]
    pub fn condition(&self, shape: &Shape, now: PgTime, binds: &mut Binds) -> String {
        let mut all = vec!["true".to_owned()];
        if !self.ids.is_empty() {
            let ids = binds.add(self.ids.clone(), Type::UUID_ARRAY);
            all.push(format!("o.outbox_id = any({ids})"));
        }
        for (column, values) in [
            ("source", &self.sources),
            ("destination", &self.topics),
            ("message_key", &self.keys),
            ("event_type", &self.event_types),
            ("message_id", &self.message_ids),
        ] {
            if !values.is_empty() {
                let values = binds.texts(values);
                all.push(format!("(o.{column} || '') = any({values})"));
            }
        }
        if !self.statuses.is_empty() {
            let known: Vec<String> =
                self.statuses.iter().filter(|s| **s != Status::Unknown).map(|s| s.name().to_owned()).collect();
            let known = binds.texts(&known);
            let unknown = if self.statuses.contains(&Status::Unknown) {
                format!(" or (o.status || '') not in {SIX}")
            } else {
                String::new()
            };
            all.push(format!("((o.status || '') = any({known}){unknown})"));
        }
        for (comparison, when) in [
            ("created_at >=", self.since),
            ("created_at <", self.until),
            ("published_at <", self.published_before),
            ("updated_at <=", self.updated_before),
        ] {
            if let Some(when) = when {
                let instant = binds.add(when.instant(now), Type::TIMESTAMPTZ);
                all.push(format!("o.{comparison} {instant}"));
            }
        }
        if !self.errors.is_empty() {
            let codes = binds.texts(&self.errors);
            // A table without the columns keeps a rejection in last_error.
            let rejection =
                if shape.rejected_columns { format!(" or o.rejection_code = any({codes})") } else { String::new() };
            all.push(format!(
                "(split_part(o.last_error, ':', 1) = any({codes}) \
                 or (o.last_error like 'rejected: %' and trim(split_part(o.last_error, ':', 2)) = any({codes})){rejection})"
            ));
        }
        if let Some(due) = self.due {
            let comparison = if due { "<=" } else { ">" };
            let now = binds.add(now, Type::TIMESTAMPTZ);
            all.push(format!("(o.status || '') in ('pending', 'failed') and o.next_attempt_at {comparison} {now}"));
        }
        all.join(" and ")
    }
}

impl Store {
    /// The next rows of a selection in the contract's order, behind a position: their positions, and nothing locked. What they are then
    /// changed by has to look at their state again.
    ///
    /// # Errors
    /// [`StoreError`]; a timeout when no index serves the selection on a large table: see [`Store::unserved`].
    pub async fn select(
        &self,
        selection: &Selection,
        after: Option<Position>,
        rows_max: usize,
        now: PgTime,
        bound: Duration,
    ) -> Result<Vec<Position>, StoreError> {
        let after = after.map(|position| (position.created_at, position.outbox_id));
        let page = Page { sort: Sort::Created, descending: false, after, created_until: None, rows_max };
        let query = selection.query(&self.schema, &self.table, &self.shape()?, "o.created_at, o.outbox_id", page, now);
        let position =
            |row: &Row| Ok(Position { created_at: row.try_get("created_at")?, outbox_id: row.try_get("outbox_id")? });
        self.read(&query, bound).await?.iter().map(position).collect()
    }

    /// What no index of the table serves of a selection in this order.
    ///
    /// # Errors
    /// When the table's shape is not known yet.
    pub fn unserved(&self, selection: &Selection, sort: Sort) -> Result<Unserved, StoreError> {
        let page = Page { sort, descending: false, after: None, created_until: None, rows_max: 1 };
        Ok(selection.query(&self.schema, &self.table, &self.shape()?, "o.outbox_id", page, PgTime(0)).unserved)
    }

    /// Runs a query in a read-only transaction, for at most so long.
    pub(super) async fn read(&self, query: &Query, bound: Duration) -> Result<Vec<Row>, StoreError> {
        let mut tx = self.db.begin_read_only(bound).await?;
        // Sorting what one index brought is no mistake here, and where no index helps the whole table is read faster in its own order.
        let scan = if query.scans { "; set local enable_seqscan = on; set local enable_bitmapscan = on" } else { "" };
        tx.batch(&format!("set local enable_sort = on{scan}"), bound).await?;
        let rows = tx.query(&query.sql, &query.binds.params(), bound).await?;
        tx.commit(bound).await?;
        Ok(rows)
    }
}
