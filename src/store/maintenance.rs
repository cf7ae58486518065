//! The slow timer's statements: requeue of expired leases, retention, the backlog sample. Each call is one bounded statement.
//!
//! Nothing here ever deletes a row that is not sent, and nothing here reads payloads.

use std::time::Duration;

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::claim::to_bigint;
use super::{Store, StoreError};
use crate::domain::message::{PgTime, Position};
use crate::domain::pause::PausedRows;

/// What a look for expired leases found among the next live rows of a source.
#[derive(Debug)]
pub struct StaleWindow {
    /// Where the next look begins, or `None` when the end of the source was reached.
    pub resume_after: Option<Position>,
    /// Rows in publishing whose lease ran out, in id order.
    pub stale: Vec<Uuid>,
}

/// What a requeue did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Requeued {
    /// Rows that may be claimed again.
    pub failed: usize,
    /// Rows whose attempts were spent.
    pub dead: usize,
}

/// How long a backlog may be counted: well below what one step of the slow timer has for all sources.
const BACKLOG_MAX: Duration = Duration::from_secs(5);

/// Rows of one source by status.
#[derive(Debug, Default, Clone, PartialEq)]
pub struct Backlog {
    /// Waiting, never failed or retried by an operator.
    pub pending: u64,
    /// Waiting after a failure, a skip or a return.
    pub failed: u64,
    /// Claimed by somebody.
    pub publishing: u64,
    /// In a status nobody knows.
    pub unknown: u64,
    /// Dead rows met among the live ones (a foreign publisher's, on a lean table).
    pub dead: u64,
    /// Rejected rows met among the live ones.
    pub rejected: u64,
    /// Age of the oldest row that is not terminal, by created_at.
    pub oldest_age_seconds: Option<f64>,
    /// The count stopped at the limit: there are at least this many.
    pub capped: bool,
}

impl Backlog {
    /// Whether the source has no row that is not terminal.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pending + self.failed + self.publishing + self.unknown == 0
    }
}

/// One of the first live rows of a source.
#[derive(Debug, Clone)]
pub struct Head {
    /// Primary key.
    pub outbox_id: Uuid,
    /// Its key.
    pub message_key: Option<String>,
    /// Its status.
    pub status: String,
    /// Attempts spent.
    pub attempt_count: i64,
    /// Whether next_attempt_at has passed.
    pub due: bool,
    /// Whether it waits for an operator (`on_halt = "hold"`).
    pub held: bool,
    /// Why its last attempt failed; never a payload or key.
    pub last_error: String,
    /// Seconds since it was due.
    pub waiting_seconds: f64,
    /// Whether its topic or its lane is paused.
    pub paused: bool,
}

impl Head {
    /// Whether this row, at the head of a `stop_the_line` source, halts it: it failed, and its attempt was not returned due at once.
    #[must_use]
    pub fn halts(&self) -> bool {
        self.status == "failed" && (self.attempt_count > 0 || !self.due)
    }
}

/// Dead or rejected rows of a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finished {
    /// The source.
    pub source_name: String,
    /// `dead` or `rejected`.
    pub status: String,
    /// How many.
    pub rows: u64,
}

/// How the table itself is doing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TableHealth {
    /// Dead tuples vacuum has not removed.
    pub dead_tuples: i64,
    /// Age of the oldest transaction that keeps it from doing so.
    pub oldest_transaction_seconds: f64,
}

impl Store {
    /// Looks at the next `rows` live rows of a source for leases that ran out.
    pub async fn stale(
        &self,
        source: &str,
        after: Position,
        rows: usize,
        publishing_timeout: Duration,
    ) -> Result<StaleWindow, StoreError> {
        let statements = self.statements()?;
        let found = self
            .query(
                &statements.stale,
                &[
                    (&source, Type::TEXT),
                    (&after.created_at, Type::TIMESTAMPTZ),
                    (&after.outbox_id, Type::UUID),
                    (&to_bigint(rows), Type::INT8),
                    (&micros(publishing_timeout), Type::INT8),
                ],
            )
            .await?;
        let Some(row) = found.first() else { return Ok(StaleWindow { resume_after: None, stale: Vec::new() }) };
        let seen: i64 = row.try_get("seen")?;
        let last = Position { created_at: row.try_get("created_at")?, outbox_id: row.try_get("outbox_id")? };
        let resume_after = (seen >= to_bigint(rows)).then_some(last);
        Ok(StaleWindow { resume_after, stale: row.try_get("stale")? })
    }

    /// Frees rows whose lease ran out: failed, or dead when their attempts are spent.
    pub async fn requeue(
        &self,
        ids: &[Uuid],
        publishing_timeout: Duration,
        max_attempts: u32,
    ) -> Result<Requeued, StoreError> {
        let statements = self.statements()?;
        let rows = self
            .query(
                &statements.requeue,
                &[
                    (&ids, Type::UUID_ARRAY),
                    (&micros(publishing_timeout), Type::INT8),
                    (&i64::from(max_attempts), Type::INT8),
                ],
            )
            .await?;
        let mut requeued = Requeued::default();
        for row in &rows {
            match row.try_get("status")? {
                "dead" => requeued.dead += 1,
                _ => requeued.failed += 1,
            }
        }
        Ok(requeued)
    }

    /// Deletes at most `rows` sent rows older than `age`; returns how many, and the published_at it reached.
    pub async fn delete_sent(
        &self,
        age: Duration,
        rows: usize,
        from: PgTime,
    ) -> Result<(u64, Option<PgTime>), StoreError> {
        let statements = self.statements()?;
        let params: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
            [(&micros(age), Type::INT8), (&to_bigint(rows), Type::INT8), (&from, Type::TIMESTAMPTZ)];
        let found = self.query(&statements.retention, &params).await?;
        let row = found.first().ok_or_else(|| StoreError::Protocol("RETENTION returned no row".to_owned()))?;
        let deleted: i64 = row.try_get("deleted")?;
        Ok((u64::try_from(deleted).unwrap_or(0), row.try_get("reached")?))
    }

    /// Counts the live rows of a source by status, at most `rows_max`; [`StoreError::Timeout`] when that takes too long.
    pub async fn backlog(&self, source: &str, rows_max: usize) -> Result<Backlog, StoreError> {
        let statements = self.statements()?;
        let params: [super::Param<'_>; 2] = [(&source, Type::TEXT), (&to_bigint(rows_max), Type::INT8)];
        let found = self.query_within(self.bound.min(BACKLOG_MAX), &statements.backlog, &params).await?;
        let mut backlog = Backlog::default();
        let mut total = 0;
        for row in &found {
            let rows = u64::try_from(row.try_get::<_, i64>("rows")?).unwrap_or(0);
            let age: f64 = row.try_get("oldest_age_seconds")?;
            total += rows;
            let (count, live) = match row.try_get("status")? {
                "pending" => (&mut backlog.pending, true),
                "failed" => (&mut backlog.failed, true),
                "publishing" => (&mut backlog.publishing, true),
                "dead" => (&mut backlog.dead, false),
                "rejected" => (&mut backlog.rejected, false),
                "sent" => continue,
                _ => (&mut backlog.unknown, true),
            };
            *count += rows;
            if live {
                backlog.oldest_age_seconds = Some(backlog.oldest_age_seconds.map_or(age, |oldest| oldest.max(age)));
            }
        }
        backlog.capped = total >= u64::try_from(rows_max).unwrap_or(u64::MAX);
        Ok(backlog)
    }

    /// Returns the first live rows of a source.
    pub async fn heads(&self, source: &str, rows: usize, paused: &PausedRows) -> Result<Vec<Head>, StoreError> {
        let statements = self.statements()?;
        let params: [super::Param<'_>; 4] = [
            (&source, Type::TEXT),
            (&to_bigint(rows), Type::INT8),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        let found = self.query(&statements.heads, &params).await?;
        found
            .iter()
            .map(|row| {
                Ok(Head {
                    outbox_id: row.try_get("outbox_id")?,
                    message_key: row.try_get("message_key")?,
                    status: row.try_get("status")?,
                    attempt_count: row.try_get("attempt_count")?,
                    due: row.try_get("due")?,
                    held: row.try_get("held")?,
                    last_error: row.try_get("last_error")?,
                    waiting_seconds: row.try_get("waiting_seconds")?,
                    paused: row.try_get("paused")?,
                })
            })
            .collect()
    }

    /// Counts dead and rejected rows by source, at most `rows_max` in all.
    pub async fn finished(&self, rows_max: usize) -> Result<Vec<Finished>, StoreError> {
        let statements = self.statements()?;
        let found = self.query(&statements.finished, &[(&to_bigint(rows_max), Type::INT8)]).await?;
        found
            .iter()
            .map(|row| {
                let rows: i64 = row.try_get("rows")?;
                Ok(Finished {
                    source_name: row.try_get("source")?,
                    status: row.try_get("status")?,
                    rows: u64::try_from(rows).unwrap_or(0),
                })
            })
            .collect()
    }

    /// Reads how the table itself is doing.
    pub async fn table_health(&self) -> Result<TableHealth, StoreError> {
        let statements = self.statements()?;
        let (schema, table) = self.table_name();
        let found = self.query(&statements.table_health, &[(&schema, Type::TEXT), (&table, Type::TEXT)]).await?;
        let row = found.first().ok_or_else(|| StoreError::Protocol("TABLE HEALTH returned no row".to_owned()))?;
        Ok(TableHealth {
            dead_tuples: row.try_get("dead_tuples")?,
            oldest_transaction_seconds: row.try_get("oldest_transaction_seconds")?,
        })
    }
}

/// Longest duration that statements get: added to or taken from today it is a date, and one that a lean table does not take for
/// the far date of finished rows.
const DURATION_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// A duration for a `bigint` parameter: the driver has no interval type.
pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.min(DURATION_MAX).as_micros()).expect("a century of microseconds fits")
}
