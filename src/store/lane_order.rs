//! Whether rows that go back to pending would reach the broker after later rows of their lane.
//!
//! No index leads from a lane to its sent rows, so they are looked at page by page, those published last first, for a bounded time. Nothing here ever
//! says that order is kept when it could not look far enough. What a producer commits, and a relay claims, in the very moment in which an earlier row goes
//! back is not seen: it is as if the row had gone back a moment later.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::claim::to_bigint;
use super::db::Tx;
use super::verb::Why;
use super::{Store, StoreError};
use crate::domain::message::{PgTime, Position};

/// Sent rows of a page.
const PAGE_ROWS: usize = 50_000;
/// How long is looked for: long enough for some million rows.
const LOOK_MAX: Duration = Duration::from_secs(20);
/// A settlement writes the time at which it began, and is seen once it has committed; no statement of a relay takes longer than this.
const SETTLING_MAX_MICROS: i64 = 60_000_000;

/// A row and the lane in which no later row may be before it.
#[derive(Debug, Clone)]
pub(super) struct LaneRow {
    pub position: Position,
    pub source_name: String,
    /// `None`: the lane is the whole source.
    pub key: Option<String>,
}

impl LaneRow {
    fn id(&self) -> Uuid {
        self.position.outbox_id
    }

    fn lane(&self) -> (&str, Option<&str>) {
        (&self.source_name, self.key.as_deref())
    }
}

/// What comes next in the lanes of some rows.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// Rows behind which a row of their lane is in flight.
    pub in_flight: HashMap<Uuid, Why>,
    /// Rows and the waiting row behind each of them.
    waiting: HashMap<Uuid, Uuid>,
}

impl Store {
    /// What comes next in the lanes of these rows. With `lock`, whoever could claim what waits there has to wait for the caller's transaction.
    pub(super) async fn next_behind(&self, tx: &mut Tx, rows: &[LaneRow], lock: bool) -> Result<Behind, StoreError> {
        let mut behind = Behind::default();
        if rows.is_empty() {
            return Ok(behind);
        }
        let statements = self.statements()?;
        let ids: Vec<Uuid> = rows.iter().map(LaneRow::id).collect();
        let sources: Vec<&str> = rows.iter().map(|row| row.source_name.as_str()).collect();
        let keys: Vec<Option<&str>> = rows.iter().map(|row| row.key.as_deref()).collect();
        let created_at: Vec<PgTime> = rows.iter().map(|row| row.position.created_at).collect();
        let params: [super::Param<'_>; 4] = [
            (&ids, Type::UUID_ARRAY),
            (&sources, Type::TEXT_ARRAY),
            (&keys, Type::TEXT_ARRAY),
            (&created_at, Type::TIMESTAMPTZ_ARRAY),
        ];
        for row in &tx.query(&statements.lane_next, &params, self.bound).await? {
            let (id, next): (Uuid, Uuid) = (row.try_get("outbox_id")?, row.try_get("next_id")?);
            match row.try_get("status")? {
                "publishing" => {
                    behind.in_flight.insert(id, Why::LaterInFlight);
                }
                "pending" | "failed" => {
                    behind.waiting.insert(id, next);
                }
                // It blocks its lane, and nobody claims it.
                _ => {}
            }
        }
        if lock && !behind.waiting.is_empty() {
            let next: BTreeSet<Uuid> = behind.waiting.values().copied().collect();
            let next: Vec<Uuid> = next.into_iter().collect();
            let rows = tx.query(&statements.lane_lock, &[(&next, Type::UUID_ARRAY)], self.bound).await?;
            let locked = rows.iter().map(|row| Ok(row.try_get("outbox_id")?));
            let locked = locked.collect::<Result<HashSet<Uuid>, StoreError>>()?;
            // Claimed in this moment.
            let gone = behind.waiting.iter().filter(|(_, next)| !locked.contains(*next));
            behind.in_flight.extend(gone.map(|(id, _)| (*id, Why::LaterInFlight)));
            behind.waiting.retain(|_, next| locked.contains(next));
        }
        Ok(behind)
    }

    /// Keeps what waits behind these rows from being claimed by whoever does not see yet that they are in front: until the commit, and a
    /// moment longer. The last statement before the commit.
    pub(super) async fn guard(&self, tx: &mut Tx, behind: &Behind, rows: &HashSet<Uuid>) -> Result<(), StoreError> {
        let next = behind.waiting.iter().filter(|(id, _)| rows.contains(*id)).map(|(_, next)| *next);
        let next: BTreeSet<Uuid> = next.collect();
        if next.is_empty() {
            return Ok(());
        }
        let next: Vec<Uuid> = next.into_iter().collect();
        let statements = self.statements()?;
        tx.execute(&statements.lane_guard, &[(&next, Type::UUID_ARRAY)], self.bound).await.map(drop)
    }

    /// Rows behind which a row of their lane has been sent (since about then, when given), or may have been.
    pub(super) async fn sent_behind(
        &self,
        tx: &mut Tx,
        rows: &[LaneRow],
        since: Option<PgTime>,
    ) -> Result<HashMap<Uuid, Why>, StoreError> {
        let Some(first) = rows.iter().map(|row| row.position.created_at).min() else { return Ok(HashMap::new()) };
        let statements = self.statements()?;
        // What is later in the lane was published after it was created.
        let from = since.map_or(first, |since| first.max(PgTime(since.0.saturating_sub(SETTLING_MAX_MICROS))));
        let deadline = Instant::now() + LOOK_MAX;
        let mut found = HashMap::new();
        let mut open: Vec<&LaneRow> = rows.iter().collect();
        let (mut up_to, mut rows_max) = (PgTime::INFINITY, PAGE_ROWS);
        while !open.is_empty() {
            if Instant::now() >= deadline {
                found.extend(open.iter().map(|row| (row.id(), Why::OrderUnknown)));
                break;
            }
            let lanes: BTreeSet<(&str, Option<&str>)> = open.iter().map(|row| row.lane()).collect();
            let lanes: Vec<(&str, Option<&str>)> = lanes.into_iter().collect();
            let sources: Vec<&str> = lanes.iter().map(|lane| lane.0).collect();
            let keys: Vec<Option<&str>> = lanes.iter().map(|lane| lane.1).collect();
            let params: [super::Param<'_>; 5] = [
                (&up_to, Type::TIMESTAMPTZ),
                (&from, Type::TIMESTAMPTZ),
                (&to_bigint(rows_max), Type::INT8),
                (&sources, Type::TEXT_ARRAY),
                (&keys, Type::TEXT_ARRAY),
            ];
            let page = tx.query(&statements.lane_sent, &params, self.bound).await?;
            let page = page.first().ok_or_else(|| StoreError::Protocol("LANE SENT returned no row".to_owned()))?;
            let (ords, times, ids): (Vec<i64>, Vec<PgTime>, Vec<Uuid>) =
                (page.try_get("lanes")?, page.try_get("created_at")?, page.try_get("outbox_ids")?);
            let last: HashMap<(&str, Option<&str>), Position> = ords
                .iter()
                .zip(times.iter().zip(&ids))
                .filter_map(|(ord, (created_at, outbox_id))| {
                    let lane = usize::try_from(*ord).ok().and_then(|ord| lanes.get(ord.checked_sub(1)?))?;
                    Some((*lane, Position { created_at: *created_at, outbox_id: *outbox_id }))
                })
                .collect();
            open.retain(|row| {
                let overtaken = last.get(&row.lane()).is_some_and(|last| *last > row.position);
                if overtaken {
                    found.insert(row.id(), Why::LaterSent);
                }
                !overtaken
            });
            let (seen, reached): (i64, Option<PgTime>) = (page.try_get("seen")?, page.try_get("reached")?);
            match reached {
                Some(reached) if seen >= to_bigint(rows_max) => {
                    // More rows of one instant than a page holds: only a larger page gets past them.
                    if reached == up_to {
                        rows_max *= 2;
                    }
                    up_to = reached;
                }
                Some(_) | None => break,
            }
        }
        Ok(found)
    }
}
