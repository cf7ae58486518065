//! Claim: pending or failed rows → publishing, under the policy of their source; and the looks at the table that lead there.
//!
//! Nothing here ever decides by memory: what a statement's snapshot and locks allow is claimed, whatever was asked for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{Param, Store, StoreError};
use crate::domain::lanes::{Glimpse, RowState};
use crate::domain::message::{Message, PgTime, Position, Withheld};
use crate::domain::pause::PausedRows;

/// The rows one statement took, and since when its lease may be trusted.
#[derive(Debug)]
pub struct Claim {
    /// In (created_at, outbox_id) order.
    pub messages: Vec<Message>,
    /// Before the statement was sent: the lease certainly began later.
    pub asked_at: Instant,
}

impl Store {
    /// Returns up to `rows` live rows of a source behind a position, in order, whatever their state.
    pub async fn discover(
        &self,
        source: &str,
        after: Position,
        rows: usize,
        paused: &PausedRows,
    ) -> Result<Vec<Glimpse>, StoreError> {
        self.discover_timed(source, after, rows, paused).await.map(|(glimpses, _)| glimpses)
    }

    /// [`Store::discover`], and how long the statement took, without the wait for a connection.
    pub async fn discover_timed(
        &self,
        source: &str,
        after: Position,
        rows: usize,
        paused: &PausedRows,
    ) -> Result<(Vec<Glimpse>, Duration), StoreError> {
        let statements = self.statements()?;
        let params: [Param<'_>; 6] = [
            (&source, Type::TEXT),
            (&after.created_at, Type::TIMESTAMPTZ),
            (&after.outbox_id, Type::UUID),
            (&to_bigint(rows), Type::INT8),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        let (rows, started) = self.db.query_timed(&statements.discover, &params, self.bound).await?;
        let took = started.elapsed();
        let glimpses = rows.iter().map(glimpse).collect::<Result<_, _>>()?;
        Ok((glimpses, took))
    }

    /// Returns the head of line of each key that has one.
    pub async fn peek_keys(
        &self,
        source: &str,
        keys: &[&str],
        paused: &PausedRows,
    ) -> Result<Vec<Glimpse>, StoreError> {
        let statements = self.statements()?;
        let params: [Param<'_>; 4] = [
            (&source, Type::TEXT),
            (&keys, Type::TEXT_ARRAY),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        let rows = self.query(&statements.peek_keys, &params).await?;
        rows.iter().map(glimpse).collect()
    }

    /// Returns those of the rows that are not terminal.
    pub async fn peek_rows(&self, ids: &[Uuid], paused: &PausedRows) -> Result<Vec<Glimpse>, StoreError> {
        let statements = self.statements()?;
        let params: [Param<'_>; 3] =
            [(&ids, Type::UUID_ARRAY), (&paused.topics, Type::TEXT_ARRAY), (&paused.keys, Type::TEXT_ARRAY)];
        let rows = self.query(&statements.peek_rows, &params).await?;
        rows.iter().map(glimpse).collect()
    }

    /// Claims the first rows of several distinct keys, at most `rows_max[i]` of `keys[i]`; with `retry`, rows attempted before too.
    pub async fn claim_keys(
        &self,
        source: &str,
        keys: &[&str],
        rows_max: &[i32],
        bytes_max: usize,
        retry: bool,
        paused: &PausedRows,
    ) -> Result<Claim, StoreError> {
        let statements = self.statements()?;
        let rows_in_all: i64 = rows_max.iter().copied().map(i64::from).sum();
        let params: [Param<'_>; 8] = [
            (&source, Type::TEXT),
            (&keys, Type::TEXT_ARRAY),
            (&rows_max, Type::INT4_ARRAY),
            (&rows_in_all, Type::INT8),
            (&to_bigint(bytes_max), Type::INT8),
            (&retry, Type::BOOL),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        self.claim(&statements.claim_keys, &params).await
    }

    /// Claims single rows whose order does not matter; with `retry`, rows attempted before too.
    pub async fn claim_rows(
        &self,
        ids: &[Uuid],
        bytes_max: usize,
        retry: bool,
        paused: &PausedRows,
    ) -> Result<Claim, StoreError> {
        let statements = self.statements()?;
        let params: [Param<'_>; 5] = [
            (&ids, Type::UUID_ARRAY),
            (&to_bigint(bytes_max), Type::INT8),
            (&retry, Type::BOOL),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        self.claim(&statements.claim_rows, &params).await
    }

    /// Claims the first rows of a whole source.
    pub async fn claim_stream(
        &self,
        source: &str,
        rows: usize,
        bytes_max: usize,
        paused: &PausedRows,
    ) -> Result<Claim, StoreError> {
        let statements = self.statements()?;
        let params: [Param<'_>; 5] = [
            (&source, Type::TEXT),
            (&to_bigint(rows), Type::INT8),
            (&to_bigint(bytes_max), Type::INT8),
            (&paused.topics, Type::TEXT_ARRAY),
            (&paused.keys, Type::TEXT_ARRAY),
        ];
        self.claim(&statements.claim_stream, &params).await
    }

    /// Runs a claim. Its lease counts from when there was a connection for it: the wait for one must not use up the time to publish.
    async fn claim(&self, sql: &str, params: &[Param<'_>]) -> Result<Claim, StoreError> {
        let (rows, asked_at) = self.db.query_timed(sql, params, self.bound).await?;
        // One by one, so that no payload is in memory twice for longer than its own copy takes.
        let messages = rows.into_iter().map(|row| message(&row, self.payload_octets_max)).collect::<Result<_, _>>()?;
        Ok(Claim { messages, asked_at: asked_at.into_std() })
    }

    /// Returns the instant before which no running transaction began: rows committed later have a later created_at.
    ///
    /// Without the right to see other sessions (`pg_read_all_stats`) it is a minute ago, a guess that the full sweep backs up.
    pub async fn late_floor(&self) -> Result<PgTime, StoreError> {
        const BLIND_GUESS_MICROS: i64 = 60_000_000;
        let statements = self.statements()?;
        let rows = self.query(&statements.late_floor, &[]).await?;
        let row = rows.first().ok_or_else(|| StoreError::Protocol("LATE FLOOR returned no row".to_owned()))?;
        let now: PgTime = row.try_get("now")?;
        let floor: Option<PgTime> = row.try_get("late_floor")?;
        Ok(floor.unwrap_or(PgTime(now.0.saturating_sub(BLIND_GUESS_MICROS))))
    }

    /// Returns those of the sources that have a live row behind their position.
    pub async fn poll(&self, sources: &[(Arc<str>, Position)]) -> Result<Vec<String>, StoreError> {
        let statements = self.statements()?;
        let names: Vec<&str> = sources.iter().map(|(name, _)| &**name).collect();
        let created: Vec<PgTime> = sources.iter().map(|(_, position)| position.created_at).collect();
        let ids: Vec<Uuid> = sources.iter().map(|(_, position)| position.outbox_id).collect();
        let params: [(&(dyn tokio_postgres::types::ToSql + Sync), Type); 3] =
            [(&names, Type::TEXT_ARRAY), (&created, Type::TIMESTAMPTZ_ARRAY), (&ids, Type::UUID_ARRAY)];
        let rows = self.query(&statements.poll, &params).await?;
        rows.iter().map(|row| Ok(row.try_get("source")?)).collect()
    }

    /// Returns every source of the table, in byte order of the database's collation, at most `sources_max`.
    pub async fn sources(&self, sources_max: usize) -> Result<Vec<String>, StoreError> {
        let statements = self.statements()?;
        let rows = self.query(&statements.sources, &[(&to_bigint(sources_max), Type::INT8)]).await?;
        rows.iter().map(|row| Ok(row.try_get("source")?)).collect()
    }
}

/// A count for a `bigint` parameter.
pub(super) fn to_bigint(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn glimpse(row: &Row) -> Result<Glimpse, StoreError> {
    let status: &str = row.try_get("status")?;
    let due_in_micros: i64 = row.try_get("due_in_micros")?;
    let attempt_count: i64 = row.try_get("attempt_count")?;
    let key: Option<&str> = row.try_get("message_key")?;
    let paused: bool = row.try_get("paused")?;
    let state = match status {
        "pending" | "failed" if paused => RowState::Paused,
        "pending" | "failed" => match u64::try_from(due_in_micros) {
            Err(_) | Ok(0) => RowState::Due,
            Ok(micros) => RowState::Later(Duration::from_micros(micros)),
        },
        "publishing" => RowState::Publishing,
        _ => RowState::Unknown,
    };
    Ok(Glimpse {
        position: Position { created_at: row.try_get("created_at")?, outbox_id: row.try_get("outbox_id")? },
        message_key: key.map(Arc::from),
        state,
        attempted: attempt_count > 0,
    })
}

fn message(row: &Row, octets_max: usize) -> Result<Message, StoreError> {
    let payload: Option<&[u8]> = row.try_get("payload_bytes")?;
    let octets: i32 = row.try_get("payload_octets")?;
    Ok(Message {
        outbox_id: row.try_get("outbox_id")?,
        message_id: row.try_get("message_id")?,
        source_name: row.try_get("source")?,
        destination: row.try_get("destination")?,
        message_key: row.try_get("message_key")?,
        event_type: row.try_get("event_type")?,
        schema_version: row.try_get("schema_version")?,
        content_type: row.try_get("content_type")?,
        schema_registry: row.try_get("schema_registry")?,
        schema_subject: row.try_get("schema_subject")?,
        schema_version_ref: row.try_get("schema_version_ref")?,
        schema_id: row.try_get("schema_id")?,
        schema_fingerprint: row.try_get("schema_fingerprint")?,
        source_event_id: row.try_get("source_event_id")?,
        source_global_position: row.try_get("source_global_position")?,
        causation_id: row.try_get("causation_id")?,
        correlation_id: row.try_get("correlation_id")?,
        traceparent: row.try_get("traceparent")?,
        tracestate: row.try_get("tracestate")?,
        payload: payload.map(Bytes::copy_from_slice).unwrap_or_default(),
        payload_withheld: payload
            .is_none()
            .then(|| Withheld { octets: usize::try_from(octets).unwrap_or(0), octets_max }),
        attributes: row.try_get("attributes")?,
        occurred_at: row.try_get("occurred_at")?,
        attempt_count: row.try_get("attempt_count")?,
        last_error: row.try_get("last_error")?,
        created_at: row.try_get("created_at")?,
        updated_at: row.try_get("updated_at")?,
    })
}
