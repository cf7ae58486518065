//! What operators' commands ask and change. Changes lock in id order, recheck the state and commit synchronously.
//!
//! Nothing here ever touches a row in a state that the command does not name.

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::claim::to_bigint;
use super::{Head, RESUME_CHANNEL, Store, StoreError};
use crate::domain::message::PgTime;
use crate::domain::pause::PausedRows;
use crate::domain::policy::Policy;

impl Store {
    /// Counts the rows of a source that wait although they are due.
    pub async fn due(&self, source: &str) -> Result<u64, StoreError> {
        const ROWS: usize = 1_000_000;
        let statements = self.statements()?;
        self.count(&statements.due, source, ROWS).await
    }

    /// Returns the database's time.
    pub async fn now(&self) -> Result<PgTime, StoreError> {
        let rows = self.query("select statement_timestamp() as now", &[]).await?;
        let row = rows.first().ok_or_else(|| StoreError::Protocol("the time is no row".to_owned()))?;
        Ok(row.try_get("now")?)
    }

    /// Counts the sent rows of a source, at most `rows_max`.
    pub async fn count_sent(&self, source: &str, rows_max: usize) -> Result<u64, StoreError> {
        let statements = self.statements()?;
        self.count(&statements.count_sent, source, rows_max).await
    }

    async fn count(&self, sql: &str, source: &str, rows_max: usize) -> Result<u64, StoreError> {
        let found = self.query(sql, &[(&source, Type::TEXT), (&to_bigint(rows_max), Type::INT8)]).await?;
        let rows: i64 = found.first().map_or(Ok(0), |row| row.try_get("rows"))?;
        Ok(u64::try_from(rows).unwrap_or(0))
    }

    /// Tells the running relays that a source may go on: closes a breaker, and makes them look at every row.
    pub async fn tell_resumed(&self, source: &str) -> Result<(), StoreError> {
        let params: [super::Param<'_>; 2] = [(&RESUME_CHANNEL, Type::TEXT), (&source, Type::TEXT)];
        self.query("select pg_notify($1, $2)", &params).await.map(drop)
    }

    /// Makes the row that halts a source due at once and wakes the relays; returns it, or `None` when no row halts it. With `dry_run`
    /// nothing changes.
    ///
    /// On `stop_the_line` that is its head. On other policies only a row that is held can halt anything: the policy was another one when
    /// it failed, and nothing else would ever make it due.
    pub async fn resume(&self, source: &str, policy: Policy, dry_run: bool) -> Result<Option<Uuid>, StoreError> {
        const ROWS: usize = 10_000;
        let halting = match policy {
            Policy::StopTheLine => self.heads(source, 1, &PausedRows::default()).await?.into_iter().find(Head::halts),
            Policy::PerKeyHeadOfLine | Policy::PerSourceStream | Policy::BestEffort => self
                .heads(source, ROWS, &PausedRows::default())
                .await?
                .into_iter()
                .find(|head| head.held && head.status == "failed"),
        };
        let Some(head) = halting else { return Ok(None) };
        if dry_run {
            return Ok(Some(head.outbox_id));
        }
        let statements = self.statements()?;
        let mut tx = self.db.begin(self.bound).await?;
        let changed = tx.query(&statements.resume, &[(&head.outbox_id, Type::UUID)], self.bound).await?;
        tx.execute("select pg_notify($1, $2)", &[(&RESUME_CHANNEL, Type::TEXT), (&source, Type::TEXT)], self.bound)
            .await?;
        tx.commit(self.bound).await?;
        Ok(changed.first().map(|_| head.outbox_id))
    }
}
