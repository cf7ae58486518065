//! Rows as commands show them: pages of a selection, and one row with every column.
//!
//! Nothing here ever changes a row, and a payload is read only where it was asked for.

use std::fmt;
use std::time::{Duration, Instant};

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::value::RawValue;
use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::branches::{Query, Unserved};
use super::inspect::{COLUMNS, REJECTED_COLUMNS, Shape};
use super::names::qualified;
use super::select::{Binds, EARLIEST, LATEST, Page, Selection};
use super::{Store, StoreError};
use crate::domain::message::PgTime;

/// The value of a column.
#[derive(Clone, PartialEq, Eq)]
pub enum Cell {
    /// SQL null, or a column that this table does not have.
    Null,
    /// `text`.
    Text(String),
    /// `bigint`.
    Integer(i64),
    /// `timestamptz`.
    Time(PgTime),
    /// `uuid`.
    Id(Uuid),
    /// `jsonb`, as PostgreSQL prints it.
    Json(String),
    /// `bytea`.
    Bytes(Vec<u8>),
}

/// A row: columns with their values, in the contract's order. Serialised it is an object; a payload is left out.
#[derive(Clone, PartialEq, Eq)]
pub struct Record(Vec<(&'static str, Cell)>);

impl Record {
    /// Every column that was read.
    pub fn cells(&self) -> impl Iterator<Item = (&'static str, &Cell)> {
        self.0.iter().map(|(name, cell)| (*name, cell))
    }

    fn cell(&self, name: &str) -> Option<&Cell> {
        self.0.iter().find(|(column, _)| *column == name).map(|(_, cell)| cell)
    }

    /// A text; `None` when it is null.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        if let Some(Cell::Text(text)) = self.cell(name) { Some(text) } else { None }
    }

    /// An instant; `None` when it is null.
    #[must_use]
    pub fn time(&self, name: &str) -> Option<PgTime> {
        if let Some(Cell::Time(time)) = self.cell(name) { Some(*time) } else { None }
    }

    /// A number; `None` when it is null.
    #[must_use]
    pub fn integer(&self, name: &str) -> Option<i64> {
        if let Some(Cell::Integer(number)) = self.cell(name) { Some(*number) } else { None }
    }

    /// The payload, when it was read.
    #[must_use]
    pub fn payload(&self) -> Option<&[u8]> {
        if let Some(Cell::Bytes(bytes)) = self.cell("payload_bytes") { Some(bytes) } else { None }
    }

    /// `outbox_id`, which every record has.
    #[must_use]
    pub fn outbox_id(&self) -> Uuid {
        if let Some(Cell::Id(id)) = self.cell("outbox_id") { *id } else { Uuid::nil() }
    }
}

/// Says which row it is, and nothing of what is in it.
impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("outbox_id", &self.outbox_id()).finish_non_exhaustive()
    }
}

impl Serialize for Record {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.entries(&mut map)?;
        map.end()
    }
}

impl Record {
    /// Writes its columns into an object; a payload is left out.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn entries<M: SerializeMap>(&self, map: &mut M) -> Result<(), M::Error> {
        for (name, cell) in &self.0 {
            match cell {
                Cell::Null => map.serialize_entry(name, &())?,
                Cell::Text(text) => map.serialize_entry(name, text)?,
                Cell::Integer(number) => map.serialize_entry(name, number)?,
                Cell::Time(time) => map.serialize_entry(name, &time.to_string())?,
                Cell::Id(id) => map.serialize_entry(name, id)?,
                // Its numbers stay as they are written.
                Cell::Json(text) => match serde_json::from_str::<&RawValue>(text) {
                    Ok(raw) => map.serialize_entry(name, raw)?,
                    Err(_) => map.serialize_entry(name, text)?,
                },
                Cell::Bytes(_) => {}
            }
        }
        Ok(())
    }
}

/// What a walk found.
#[derive(Debug)]
pub struct Walked {
    /// Rows, in order.
    pub rows: Vec<Record>,
    /// How far it got when its time was over before the page was full.
    pub reached: Option<(PgTime, Uuid)>,
}

/// The shortest part of a walk, in microseconds of `created_at`: even of the busiest outbox a second is soon read.
const PART_MIN: i64 = 1_000_000;
/// A part that took less is followed by a longer one.
const PART_TIME: Duration = Duration::from_millis(300);

/// What a list shows of a row.
const LISTED: [&str; 14] = [
    "outbox_id",
    "message_id",
    "source",
    "destination",
    "message_key",
    "event_type",
    "occurred_at",
    "status",
    "attempt_count",
    "next_attempt_at",
    "last_error",
    "published_at",
    "created_at",
    "updated_at",
];

/// A column that a statement reads: its name, its type, the expression over `o`.
struct Column {
    name: &'static str,
    kind: &'static str,
    expression: String,
}

/// The columns of the contract that are wanted; a column that the table does not have is null.
fn columns(shape: &Shape, wanted: impl Fn(&str) -> bool) -> Vec<Column> {
    let rejected = REJECTED_COLUMNS.iter().map(|column| (column, shape.rejected_columns));
    let known = COLUMNS.iter().map(|column| (column, true)).chain(rejected);
    let mut columns: Vec<Column> = known
        .filter(|(column, _)| wanted(column.name))
        .map(|(column, there)| {
            let (name, kind) = (column.name, column.kind);
            let expression = match (there, kind) {
                (false, _) => format!("null::{kind} as {name}"),
                (true, "jsonb") => format!("o.{name}::text as {name}"),
                (true, _) => format!("o.{name}"),
            };
            Column { name, kind, expression }
        })
        .collect();
    // Does not read the payload.
    let octets = "octet_length(o.payload_bytes)::bigint as payload_octets".to_owned();
    columns.push(Column { name: "payload_octets", kind: "bigint", expression: octets });
    columns
}

fn expressions(columns: &[Column]) -> String {
    columns.iter().map(|column| column.expression.as_str()).collect::<Vec<_>>().join(", ")
}

fn record(row: &Row, columns: &[Column]) -> Result<Record, StoreError> {
    let cell = |column: &Column| -> Result<(&'static str, Cell), StoreError> {
        let name = column.name;
        let cell = match column.kind {
            "uuid" => row.try_get::<_, Option<Uuid>>(name)?.map(Cell::Id),
            "bigint" => row.try_get::<_, Option<i64>>(name)?.map(Cell::Integer),
            "bytea" => row.try_get::<_, Option<Vec<u8>>>(name)?.map(Cell::Bytes),
            "jsonb" => row.try_get::<_, Option<String>>(name)?.map(Cell::Json),
            "text" => row.try_get::<_, Option<String>>(name)?.map(Cell::Text),
            _ => row.try_get::<_, Option<PgTime>>(name)?.map(Cell::Time),
        };
        Ok((name, cell.unwrap_or(Cell::Null)))
    };
    Ok(Record(columns.iter().map(cell).collect::<Result<_, _>>()?))
}

impl Store {
    /// Reads a page of a selection, and says what no index serves of it. `now` stays the same for all pages of a list.
    ///
    /// # Errors
    /// [`StoreError`]; a timeout when no index serves the selection on a large table.
    pub async fn page(
        &self,
        selection: &Selection,
        page: Page,
        now: PgTime,
        bound: Duration,
    ) -> Result<Vec<Record>, StoreError> {
        let shape = self.shape()?;
        let columns = listed(&shape);
        let query = selection.query(&self.schema, &self.table, &shape, &expressions(&columns), page, now);
        self.read(&query, bound).await?.iter().map(|row| record(row, &columns)).collect()
    }

    /// [`Store::page`] of a selection that no index serves but whose rows are met in order ([`Unserved::in_order`]): in parts, until the
    /// page is full, nothing is left, or the time is over. What was found until then is not lost.
    ///
    /// # Errors
    /// [`StoreError`], but no timeout once a part of the way lies behind.
    pub async fn walk(
        &self,
        selection: &Selection,
        mut page: Page,
        now: PgTime,
        bound: Duration,
    ) -> Result<Walked, StoreError> {
        let deadline = Instant::now() + bound;
        // The same way without the filters that no index serves: its next row is where the next part begins.
        let along = Selection {
            sources: selection.sources.clone(),
            statuses: selection.possible().iter().flat_map(|status| status.way()).copied().collect(),
            since: selection.since,
            until: selection.until,
            ..Selection::default()
        };
        let mut rows = Vec::new();
        let mut width = PART_MIN;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let began = Instant::now();
            let first = Page { rows_max: 1, created_until: None, ..page };
            let part = async {
                let Some(next) =
                    self.page(&along, first, now, left).await?.first().and_then(|row| row.time("created_at"))
                else {
                    return Ok::<_, StoreError>(None);
                };
                let width = if page.descending { width.saturating_neg() } else { width };
                let until = PgTime(next.0.saturating_add(width).clamp(EARLIEST.0, LATEST.0));
                // Rows at the ends of time are a part of their own.
                let until = if (EARLIEST..LATEST).contains(&next) { until } else { next };
                let part = Page { created_until: Some(until), rows_max: page.rows_max - rows.len(), ..page };
                Ok(Some((until, self.page(selection, part, now, left).await?)))
            };
            let (until, found) = match part.await {
                Ok(None) => return Ok(Walked { rows, reached: None }),
                Ok(Some(part)) => part,
                Err(error) if error.is_timeout() && page.after.is_some() => {
                    return Ok(Walked { rows, reached: page.after });
                }
                Err(error) => return Err(error),
            };
            rows.extend(found);
            if rows.len() >= page.rows_max {
                return Ok(Walked { rows, reached: None });
            }
            page.after = Some((until, if page.descending { Uuid::nil() } else { Uuid::max() }));
            if Instant::now() >= deadline {
                return Ok(Walked { rows, reached: page.after });
            }
            width = if began.elapsed() < PART_TIME { width.saturating_mul(4) } else { (width / 2).max(PART_MIN) };
        }
    }

    /// The statement of [`Store::page`]: for tests that look at plans.
    ///
    /// # Errors
    /// When the table's shape is not known yet.
    #[doc(hidden)]
    pub fn page_query(&self, selection: &Selection, page: Page, now: PgTime) -> Result<Query, StoreError> {
        let shape = self.shape()?;
        Ok(selection.query(&self.schema, &self.table, &shape, &expressions(&listed(&shape)), page, now))
    }

    /// Reads one row with every column; its payload only when it is asked for.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn row(&self, outbox_id: Uuid, payload: bool, bound: Duration) -> Result<Option<Record>, StoreError> {
        let columns = columns(&self.shape()?, |name| payload || name != "payload_bytes");
        let mut binds = Binds::default();
        let id = binds.add(outbox_id, Type::UUID);
        let table = qualified(&self.schema, &self.table);
        let sql = format!("select {} from {table} o where o.outbox_id = {id}", expressions(&columns));
        let query = Query { sql, binds, unserved: Unserved::default(), scans: false };
        self.read(&query, bound).await?.first().map(|row| record(row, &columns)).transpose()
    }
}

fn listed(shape: &Shape) -> Vec<Column> {
    let rejected = |name: &str| REJECTED_COLUMNS.iter().any(|column| column.name == name);
    columns(shape, |name| LISTED.contains(&name) || rejected(name))
}
