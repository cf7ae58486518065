//! What operators' commands ask and change. Changes lock in id order, recheck the state and commit synchronously.
//!
//! Nothing here ever touches a row in a state that the command does not name.

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::claim::to_bigint;
use super::{RESUME_CHANNEL, Store, StoreError};

impl Store {
    /// Counts the rows of a source that wait although they are due.
    pub async fn due(&self, source: &str) -> Result<u64, StoreError> {
        const ROWS: usize = 1_000_000;
        let statements = self.statements()?;
        self.count(&statements.due, source, ROWS).await
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

    /// Makes the row that halts a `stop_the_line` source due at once and wakes the relays; returns it, or `None` when the source is not
    /// halted. With `dry_run` nothing changes.
    pub async fn resume(&self, source: &str, dry_run: bool) -> Result<Option<Uuid>, StoreError> {
        let Some(head) = self.heads(source, 1).await?.into_iter().find(super::Head::halts) else { return Ok(None) };
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
