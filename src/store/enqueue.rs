//! Writes new rows inside the caller's transaction.
//!
//! Nothing here ever commits, and no error ever shows a payload, a key or an attribute.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::time::Duration;

use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::db::{Param, Tx, WAKE_CHANNEL};
use super::error::StoreError;
use super::names::qualified;
use crate::domain::message::PgTime;
use crate::domain::record::{TOPIC_OCTETS_MAX, is_legal_topic};

/// Rows and payload octets of one statement.
const CHUNK_ROWS_MAX: usize = 500;
const CHUNK_OCTETS_MAX: usize = 4 << 20;
/// How often a row is tried whose twin was deleted between the insert and the look at it.
const ROUNDS_MAX: usize = 3;

/// Longest message_id and event_type, and longest source: both are in an index.
const NAME_OCTETS_MAX: usize = 256;
/// Longest message_key: with the source it must fit into an index entry (2,704 octets).
const KEY_OCTETS_MAX: usize = 2048;
/// Largest attributes: they travel as a header.
const ATTRIBUTES_OCTETS_MAX: usize = 64 << 10;
/// 9999-01-01: from here on the relay keeps terminal rows.
const FAR_UNIX_MICROS: i64 = 253_370_764_800_000_000;
/// 0001-01-01 and 10000-01-01: what ISO 8601 can write.
const YEAR_1_UNIX_MICROS: i64 = -62_135_596_800_000_000;
const YEAR_10000_UNIX_MICROS: i64 = 253_402_300_800_000_000;

/// A row to be written.
#[derive(Clone, PartialEq, Eq)]
pub struct NewRow {
    /// Decides the order among rows of one transaction; keep it over retries, so that they coalesce.
    pub outbox_id: Uuid,
    /// The consumer's dedupe key, unique together with the source.
    pub message_id: String,
    /// Producing bounded context (column `source`).
    pub source_name: String,
    /// Kafka topic.
    pub destination: String,
    /// Partition and ordering key.
    pub message_key: Option<String>,
    /// Kind of event.
    pub event_type: String,
    /// Version of the event's schema.
    pub schema_version: i64,
    /// Media type of the payload.
    pub content_type: String,
    /// Schema registry.
    pub schema_registry: Option<String>,
    /// Subject in the registry.
    pub schema_subject: Option<String>,
    /// Version in the registry.
    pub schema_version_ref: Option<i64>,
    /// Id in the registry.
    pub schema_id: Option<i64>,
    /// Fingerprint of the schema.
    pub schema_fingerprint: Option<String>,
    /// Event this one was derived from.
    pub source_event_id: Option<Uuid>,
    /// Position of that event in its log.
    pub source_global_position: Option<i64>,
    /// Event that caused this one.
    pub causation_id: Option<Uuid>,
    /// Correlation of a whole conversation.
    pub correlation_id: Option<Uuid>,
    /// W3C trace context.
    pub traceparent: Option<String>,
    /// W3C trace state.
    pub tracestate: Option<String>,
    /// Value of the record.
    pub payload: Vec<u8>,
    /// JSON text.
    pub attributes: Option<String>,
    /// When the event happened; `None` is the start of the transaction.
    pub occurred_at: Option<PgTime>,
    /// Decides the order; `None`, the start of the transaction, is what it should be. Another instant is for rows that
    /// were written elsewhere before.
    pub created_at: Option<PgTime>,
    /// When the row is due; it holds its lane until then. `None` is at once.
    pub next_attempt_at: Option<PgTime>,
}

impl fmt::Debug for NewRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewRow")
            .field("outbox_id", &self.outbox_id)
            .field("message_id", &self.message_id)
            .field("payload_octets", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// A field that must not be written as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldProblem {
    /// The column.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub text: String,
}

impl NewRow {
    /// Names every field that the table or the relay would not take.
    #[must_use]
    pub fn problems(&self) -> Vec<FieldProblem> {
        let mut problems = Vec::new();
        let mut add = |field, text: Option<String>| problems.extend(text.map(|text| FieldProblem { field, text }));
        add("message_id", required(&self.message_id).or_else(|| too_long(&self.message_id, NAME_OCTETS_MAX)));
        add("source", required(&self.source_name).or_else(|| too_long(&self.source_name, NAME_OCTETS_MAX)));
        add(
            "destination",
            (!is_legal_topic(&self.destination)).then(|| {
                format!(
                    "must be a topic name: 1 to {TOPIC_OCTETS_MAX} of A-Z a-z 0-9 . _ - and neither \".\" nor \"..\""
                )
            }),
        );
        add(
            "message_key",
            self.message_key.as_deref().and_then(|key| nul(key).or_else(|| too_long(key, KEY_OCTETS_MAX))),
        );
        add("event_type", required(&self.event_type).or_else(|| too_long(&self.event_type, NAME_OCTETS_MAX)));
        add("content_type", required(&self.content_type).or_else(|| too_long(&self.content_type, NAME_OCTETS_MAX)));
        for (field, text) in [
            ("schema_registry", &self.schema_registry),
            ("schema_subject", &self.schema_subject),
            ("schema_fingerprint", &self.schema_fingerprint),
            ("traceparent", &self.traceparent),
            ("tracestate", &self.tracestate),
        ] {
            add(field, text.as_deref().and_then(|text| nul(text).or_else(|| too_long(text, ATTRIBUTES_OCTETS_MAX))));
        }
        add("attributes", self.attributes.as_deref().and_then(attributes_problem));
        let micros = |time: &PgTime| time.unix_micros();
        let writable =
            |time: &PgTime| micros(time).is_some_and(|at| (YEAR_1_UNIX_MICROS..YEAR_10000_UNIX_MICROS).contains(&at));
        let unwritable = "must lie in the years 0001 to 9999".to_owned();
        add("occurred_at", self.occurred_at.filter(|time| !writable(time)).map(|_| unwritable.clone()));
        add("created_at", self.created_at.filter(|time| !writable(time)).map(|_| unwritable));
        let due = |time: &PgTime| micros(time).is_some_and(|at| at < FAR_UNIX_MICROS);
        let never = "must lie before the year 9999: from then on rows count as finished".to_owned();
        add("next_attempt_at", self.next_attempt_at.filter(|time| !due(time)).map(|_| never));
        problems
    }

    /// About what the row adds to a statement.
    fn octets(&self) -> usize {
        self.payload.len()
            + self.attributes.as_ref().map_or(0, String::len)
            + self.message_key.as_ref().map_or(0, String::len)
    }
}

fn nul(text: &str) -> Option<String> {
    text.contains('\0').then(|| "must not contain a NUL".to_owned())
}

fn required(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("must not be empty".to_owned());
    }
    if text.trim() != text {
        return Some("must not begin or end with white space".to_owned());
    }
    nul(text)
}

fn too_long(text: &str, octets_max: usize) -> Option<String> {
    (text.len() > octets_max).then(|| format!("has {} octets; at most {octets_max} are allowed", text.len()))
}

fn attributes_problem(text: &str) -> Option<String> {
    if let Some(problem) = too_long(text, ATTRIBUTES_OCTETS_MAX) {
        return Some(problem);
    }
    fn has_nul(value: &serde_json::Value) -> bool {
        match value {
            serde_json::Value::String(text) => text.contains('\0'),
            serde_json::Value::Array(items) => items.iter().any(has_nul),
            serde_json::Value::Object(fields) => {
                fields.iter().any(|(name, value)| name.contains('\0') || has_nul(value))
            }
            serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => false,
        }
    }
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(value) if has_nul(&value) => Some("must not contain a NUL (\\u0000), which jsonb cannot hold".to_owned()),
        Ok(_) => None,
        // Its text could quote a value.
        Err(_) => Some(
            "must be JSON that jsonb can hold: no half surrogates, no number beyond 1e308, at most 127 levels"
                .to_owned(),
        ),
    }
}

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enqueued {
    /// The id of the row in the table: the given one, or that of the row it coalesced with.
    pub outbox_id: Uuid,
    /// The message id in the table.
    pub message_id: String,
    /// Whether it was inserted; otherwise its outbox_id, or its source and message_id, was there already.
    pub inserted: bool,
}

/// Writes rows and returns what became of each, in the same order. Commits nothing.
///
/// A row whose `outbox_id`, or whose `source` and `message_id`, is in the table already is not written again, so that a
/// producer's retry coalesces on either. Order caveat: `created_at` is the start of the transaction, so two transactions
/// that write the same lane at the same time can commit in the other order; a lock taken inside them does not help.
///
/// # Errors
/// [`StoreError`]; the transaction is then only good for being dropped.
pub async fn enqueue(
    tx: &mut Tx,
    schema: &str,
    table: &str,
    rows: &[NewRow],
    bound: Duration,
) -> Result<Vec<Enqueued>, StoreError> {
    let table = qualified(schema, table);
    let insert = include_str!("sql/enqueue.sql").replace("{table}", &table);
    let before = include_str!("sql/enqueued_before.sql").replace("{table}", &table);
    let mut enqueued = Vec::with_capacity(rows.len());
    for chunk in chunks(rows) {
        let mut results: Vec<Option<Enqueued>> = vec![None; chunk.len()];
        for _ in 0..ROUNDS_MAX {
            let open: Vec<usize> = (0..chunk.len()).filter(|&index| results[index].is_none()).collect();
            if open.is_empty() {
                break;
            }
            insert_rows(tx, &insert, chunk, &open, &mut results, bound).await?;
            find_twins(tx, &before, chunk, &mut results, bound).await?;
        }
        for result in results {
            enqueued.push(result.ok_or_else(|| {
                StoreError::Protocol("a row is neither new nor there already: others delete rows meanwhile".to_owned())
            })?);
        }
    }
    Ok(enqueued)
}

/// Tells every relay that these sources have new rows, once the transaction commits.
///
/// # Errors
/// As [`enqueue`].
pub async fn wake(tx: &mut Tx, sources: &[&str], bound: Duration) -> Result<(), StoreError> {
    let sql = "select count(pg_notify($1, s.source)) from unnest($2::text[]) as s(source)";
    tx.query(sql, &[(&WAKE_CHANNEL, Type::TEXT), (&sources, Type::TEXT_ARRAY)], bound).await.map(|_| ())
}

/// Runs of rows that fit into one statement; a single row always does.
fn chunks(rows: &[NewRow]) -> Vec<&[NewRow]> {
    let mut chunks = Vec::new();
    let mut rest = rows;
    while !rest.is_empty() {
        let mut octets = 0;
        let fits = |row: &&NewRow| {
            octets += row.octets();
            octets <= CHUNK_OCTETS_MAX
        };
        let (chunk, later) = rest.split_at(rest.iter().take(CHUNK_ROWS_MAX).take_while(fits).count().max(1));
        chunks.push(chunk);
        rest = later;
    }
    chunks
}

async fn insert_rows(
    tx: &mut Tx,
    sql: &str,
    chunk: &[NewRow],
    open: &[usize],
    results: &mut [Option<Enqueued>],
    bound: Duration,
) -> Result<(), StoreError> {
    /// One column of the open rows as an array parameter.
    macro_rules! column {
        ($array:expr, |$row:ident| $value:expr) => {
            (
                Box::new(
                    open.iter()
                        .map(|&index| {
                            let $row = &chunk[index];
                            $value
                        })
                        .collect::<Vec<_>>(),
                ) as Box<dyn ToSql + Sync + Send + '_>,
                $array,
            )
        };
    }
    let columns = [
        column!(Type::UUID_ARRAY, |row| row.outbox_id),
        column!(Type::TEXT_ARRAY, |row| row.message_id.as_str()),
        column!(Type::TEXT_ARRAY, |row| row.source_name.as_str()),
        column!(Type::TEXT_ARRAY, |row| row.destination.as_str()),
        column!(Type::TEXT_ARRAY, |row| row.message_key.as_deref()),
        column!(Type::TEXT_ARRAY, |row| row.event_type.as_str()),
        column!(Type::INT8_ARRAY, |row| row.schema_version),
        column!(Type::TEXT_ARRAY, |row| row.content_type.as_str()),
        column!(Type::TEXT_ARRAY, |row| row.schema_registry.as_deref()),
        column!(Type::TEXT_ARRAY, |row| row.schema_subject.as_deref()),
        column!(Type::INT8_ARRAY, |row| row.schema_version_ref),
        column!(Type::INT8_ARRAY, |row| row.schema_id),
        column!(Type::TEXT_ARRAY, |row| row.schema_fingerprint.as_deref()),
        column!(Type::UUID_ARRAY, |row| row.source_event_id),
        column!(Type::INT8_ARRAY, |row| row.source_global_position),
        column!(Type::UUID_ARRAY, |row| row.causation_id),
        column!(Type::UUID_ARRAY, |row| row.correlation_id),
        column!(Type::TEXT_ARRAY, |row| row.traceparent.as_deref()),
        column!(Type::TEXT_ARRAY, |row| row.tracestate.as_deref()),
        column!(Type::BYTEA_ARRAY, |row| row.payload.as_slice()),
        column!(Type::TEXT_ARRAY, |row| row.attributes.as_deref()),
        column!(Type::TIMESTAMPTZ_ARRAY, |row| row.occurred_at),
        column!(Type::TIMESTAMPTZ_ARRAY, |row| row.created_at),
        column!(Type::TIMESTAMPTZ_ARRAY, |row| row.next_attempt_at),
    ];
    let params: Vec<Param<'_>> =
        columns.iter().map(|(values, array)| (values.as_ref() as &(dyn ToSql + Sync), array.clone())).collect();
    // Two rows of the input may share one key or even both; then the first that has them was inserted.
    let mut inserted: HashSet<(Uuid, String, String)> = HashSet::new();
    for row in tx.query(sql, &params, bound).await? {
        inserted.insert((row.try_get("outbox_id")?, row.try_get("source")?, row.try_get("message_id")?));
    }
    for &index in open {
        let row = &chunk[index];
        let key = (row.outbox_id, row.source_name.clone(), row.message_id.clone());
        if inserted.remove(&key) {
            let (outbox_id, _, message_id) = key;
            results[index] = Some(Enqueued { outbox_id, message_id, inserted: true });
        }
    }
    Ok(())
}

async fn find_twins(
    tx: &mut Tx,
    sql: &str,
    chunk: &[NewRow],
    results: &mut [Option<Enqueued>],
    bound: Duration,
) -> Result<(), StoreError> {
    let open: Vec<usize> = (0..chunk.len()).filter(|&index| results[index].is_none()).collect();
    if open.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = open.iter().map(|&index| chunk[index].outbox_id).collect();
    let sources: Vec<&str> = open.iter().map(|&index| chunk[index].source_name.as_str()).collect();
    let message_ids: Vec<&str> = open.iter().map(|&index| chunk[index].message_id.as_str()).collect();
    let params: [Param<'_>; 3] =
        [(&ids, Type::UUID_ARRAY), (&sources, Type::TEXT_ARRAY), (&message_ids, Type::TEXT_ARRAY)];
    let inserted_by: HashMap<Uuid, usize> = results
        .iter()
        .enumerate()
        .filter_map(|(index, result)| result.as_ref().filter(|row| row.inserted).map(|row| (row.outbox_id, index)))
        .collect();
    for row in tx.query(sql, &params, bound).await? {
        let place: i64 = row.try_get("place")?;
        let index = usize::try_from(place - 1).ok().and_then(|place| open.get(place)).copied();
        let index = index.ok_or_else(|| StoreError::Protocol("a row came back for no row of ours".to_owned()))?;
        let outbox_id: Uuid = row.try_get("outbox_id")?;
        // What a later row of ours inserted was not there yet, and so is not what this one coalesced with.
        let later = inserted_by.get(&outbox_id).is_some_and(|&by| by > index);
        if results[index].is_none() && !later {
            results[index] = Some(Enqueued { outbox_id, message_id: row.try_get("message_id")?, inserted: false });
        }
    }
    Ok(())
}
