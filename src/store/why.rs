//! What the table knows of why a row is not on Kafka yet: what waits before it in its lane, and which relays are there at all.
//!
//! Nothing here ever changes a row, and nothing here judges: `cli::rows::why` does.

use std::fmt;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::branches::{Query, Unserved};
use super::select::Binds;
use super::{Store, StoreError};
use crate::domain::message::{PgTime, Position};

/// The rows before a row in its lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// How many.
    pub rows: u64,
    /// There are at least that many: counting stopped.
    pub capped: bool,
    /// The first of them: what the lane waits for.
    pub head: LaneHead,
}

/// The first row of a lane.
#[derive(Clone, PartialEq, Eq)]
pub struct LaneHead {
    /// Primary key.
    pub outbox_id: Uuid,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub message_key: Option<String>,
    /// Its status.
    pub status: String,
    /// Attempts spent.
    pub attempt_count: i64,
    /// When it is due.
    pub next_attempt_at: PgTime,
    /// When it was claimed, while it is in flight.
    pub updated_at: PgTime,
    /// Why its last attempt failed.
    pub last_error: Option<String>,
}

/// Without its key, which is content of a row.
impl fmt::Debug for LaneHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneHead")
            .field("outbox_id", &self.outbox_id)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

/// Rows before a row that are counted.
pub const AHEAD_MAX: i64 = 10_000;

impl Store {
    /// What waits before a row in its lane: of its key, or without one of its whole source.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn ahead(
        &self,
        source: &str,
        key: Option<&str>,
        row: Position,
        bound: Duration,
    ) -> Result<Option<Ahead>, StoreError> {
        let statements = self.statements()?;
        let mut binds = Binds::default();
        binds.add(source.to_owned(), Type::TEXT);
        binds.add(row.created_at, Type::TIMESTAMPTZ);
        binds.add(row.outbox_id, Type::UUID);
        binds.add(AHEAD_MAX, Type::INT8);
        let sql = match key {
            Some(key) => {
                binds.add(key.to_owned(), Type::TEXT);
                statements.ahead_key.clone()
            }
            None => statements.ahead.clone(),
        };
        let query = Query { sql, binds, unserved: Unserved::default(), scans: false };
        self.read(&query, bound).await?.first().map(ahead).transpose()
    }

    /// The instances of the relays that are connected to this database; `None` behind a pooler, which hides them.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn connected_relays(&self, bound: Duration) -> Result<Option<Vec<String>>, StoreError> {
        if !self.db.has_sessions() {
            return Ok(None);
        }
        let sql = include_str!("sql/relays.sql").to_owned();
        let query = Query { sql, binds: Binds::default(), unserved: Unserved::default(), scans: false };
        let rows = self.read(&query, bound).await?;
        rows.iter().map(|row| Ok(row.try_get("instance")?)).collect::<Result<_, _>>().map(Some)
    }
}

fn ahead(row: &Row) -> Result<Ahead, StoreError> {
    let rows: i64 = row.try_get("rows")?;
    let head = LaneHead {
        outbox_id: row.try_get("outbox_id")?,
        topic: row.try_get("destination")?,
        message_key: row.try_get("message_key")?,
        status: row.try_get("status")?,
        attempt_count: row.try_get("attempt_count")?,
        next_attempt_at: row.try_get("next_attempt_at")?,
        updated_at: row.try_get("updated_at")?,
        last_error: row.try_get("last_error")?,
    };
    Ok(Ahead { rows: u64::try_from(rows).unwrap_or(0), capped: rows >= AHEAD_MAX, head })
}
