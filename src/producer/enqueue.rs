//! Writes new rows inside the caller's transaction.
//!
//! Nothing here ever commits, rolls back or opens a connection, and no error ever shows a payload, a key or an attribute.

use std::collections::{HashMap, HashSet};
use std::fmt;

use tokio_postgres::GenericClient;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::error::{BadTable, Conflict, EnqueueError, RowProblem};
use super::event::IntegrationEvent;
use crate::domain::limits::Limits;
use crate::domain::message::PgTime;
use crate::pg::{NAME_BYTES_MAX, qualified};

/// Most rows of a batch.
pub const BATCH_ROWS_MAX: usize = 1_000;
/// Most octets of a batch, payloads and attributes: far below what a statement may have (1 GB), as the server holds it several times.
pub const BATCH_OCTETS_MAX: usize = 64 << 20;
/// How often a row is tried whose twin was deleted between the insert and the look at it.
const ROUNDS_MAX: usize = 3;

/// A row to be written: an event, its place among the rows of its transaction, and when it is due.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewRow {
    /// Decides the order among rows of one transaction; keep it over retries, so that they coalesce.
    pub outbox_id: Uuid,
    /// What is said.
    pub event: IntegrationEvent,
    /// Decides the order; `None`, the start of the transaction, is what it should be. Another instant is for rows that
    /// were written elsewhere before.
    pub created_at: Option<PgTime>,
    /// When the row is due (column `next_attempt_at`); `None` is at once.
    pub available_at: Option<PgTime>,
}

impl NewRow {
    /// A row that is due at once.
    ///
    /// `outbox_id`: [`fresh_outbox_id`](super::fresh_outbox_id) when nobody tries again, or one that is the same at each attempt, such
    /// as [`stable_outbox_id`](super::stable_outbox_id). A retry that mints both ids anew is another message.
    #[must_use]
    pub fn new(outbox_id: Uuid, event: IntegrationEvent) -> Self {
        Self { outbox_id, event, created_at: None, available_at: None }
    }

    /// Delays the row. It holds its lane meanwhile: later rows of the same key (or source, as the policy has it) wait for it.
    #[must_use]
    pub fn available_at(mut self, at: impl Into<PgTime>) -> Self {
        self.available_at = Some(at.into());
        self
    }

    /// About what the row adds to a statement.
    pub(crate) fn octets(&self) -> usize {
        let draft = &self.event.draft;
        draft.payload.len()
            + draft.attributes.as_ref().map_or(0, String::len)
            + draft.message_key.as_ref().map_or(0, String::len)
    }
}

/// What to do with a row whose `outbox_id`, or whose `source` and `message_id`, is in the table already.
///
/// *Identical* means: the same in every column that says what happened. Left out are the ids (a retry keeps one of them and may mint
/// the other), `traceparent` and `tracestate` (a retry is another trace), `created_at` and `next_attempt_at`, and `occurred_at`
/// where the new row leaves it to the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OnDuplicate {
    /// It is not written again, whatever it holds. keiro's own rule.
    #[default]
    Coalesce,
    /// [`EnqueueError::Conflict`].
    Reject,
    /// It is not written again when it is identical; otherwise [`EnqueueError::Conflict`] names the columns that differ.
    AcceptIdentical,
}

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enqueued {
    /// The id of the row in the table: the given one, or that of the row it coalesced with.
    pub outbox_id: Uuid,
    /// The message id in the table.
    pub message_id: String,
    /// Whether it was inserted; otherwise it coalesced with a row that was there.
    pub inserted: bool,
}

/// An outbox table and how rows are written to it. The default is `keiro.keiro_outbox`, coalescing, with the default limits.
#[derive(Clone, PartialEq, Eq)]
pub struct Outbox {
    insert: String,
    twins: String,
    limits: Limits,
    on_duplicate: OnDuplicate,
}

impl Default for Outbox {
    fn default() -> Self {
        Self::written_out("keiro", "keiro_outbox")
    }
}

impl fmt::Debug for Outbox {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outbox")
            .field("limits", &self.limits)
            .field("on_duplicate", &self.on_duplicate)
            .finish_non_exhaustive()
    }
}

impl Outbox {
    /// Another table than `keiro.keiro_outbox`.
    ///
    /// # Errors
    /// [`BadTable`] when a name is empty, longer than 63 octets or holds a NUL. Any other is quoted.
    pub fn new(schema: &str, table: &str) -> Result<Self, BadTable> {
        for (what, name) in [("schema", schema), ("table", table)] {
            if !(1..=NAME_BYTES_MAX).contains(&name.len()) || name.contains('\0') {
                return Err(BadTable { what, name: name.chars().take(NAME_BYTES_MAX + 1).collect() });
            }
        }
        Ok(Self::written_out(schema, table))
    }

    fn written_out(schema: &str, table: &str) -> Self {
        let table = qualified(schema, table);
        Self {
            insert: include_str!("../store/sql/enqueue.sql").replace("{table}", &table),
            twins: include_str!("../store/sql/enqueue_twins.sql").replace("{table}", &table),
            limits: Limits::default(),
            on_duplicate: OnDuplicate::default(),
        }
    }

    /// Sets what to do with rows that are there already.
    #[must_use]
    pub fn on_duplicate(mut self, on_duplicate: OnDuplicate) -> Self {
        self.on_duplicate = on_duplicate;
        self
    }

    /// Sets the limits.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Writes one row in the caller's transaction and says what became of it. Never commits.
    ///
    /// Works on a `Client` inside a transaction, a `Transaction`, a nested one, and what pools give out, also behind a transaction
    /// pooler: no statement stays prepared.
    ///
    /// Order caveat: `created_at` is the *start* of the transaction, so two transactions that write the same lane at the same time can
    /// commit in the other order. A lock taken inside them does not help; serialise them before they begin. Rows of one transaction
    /// follow each other by `outbox_id`.
    ///
    /// # Errors
    /// [`EnqueueError`]. After [`EnqueueError::Invalid`] and [`EnqueueError::Conflict`] the transaction can go on.
    pub async fn enqueue(&self, client: &impl GenericClient, row: &NewRow) -> Result<Enqueued, EnqueueError> {
        let enqueued = self.enqueue_batch(client, std::slice::from_ref(row)).await?;
        Ok(enqueued.into_iter().next().expect("one result for one row"))
    }

    /// Writes up to [`BATCH_ROWS_MAX`] rows with one statement in the caller's transaction, all or none, and says what became of each,
    /// in their order. Never commits.
    ///
    /// Rows that are twins of an earlier row of the batch coalesce with it, as they would with a row of the table. Which rows coalesced
    /// is asked in a second statement, only when some did.
    ///
    /// Order caveat: as [`Outbox::enqueue`]. Within the batch it is `outbox_id` that decides: mint ids in the order of the events.
    ///
    /// # Errors
    /// [`EnqueueError`], naming every problem of every row. After [`EnqueueError::Conflict`] the transaction is aborted if some rows had
    /// been written: open a nested one around the call to go on without them. Outside any transaction nothing can take them back.
    pub async fn enqueue_batch(
        &self,
        client: &impl GenericClient,
        rows: &[NewRow],
    ) -> Result<Vec<Enqueued>, EnqueueError> {
        self.check(rows)?;
        let mut results: Vec<Option<Enqueued>> = vec![None; rows.len()];
        for _ in 0..ROUNDS_MAX {
            let open: Vec<usize> = (0..rows.len()).filter(|&index| results[index].is_none()).collect();
            if open.is_empty() {
                break;
            }
            insert_rows(client, &self.insert, rows, &open, &mut results).await?;
            let conflicts = self.find_twins(client, rows, &mut results).await?;
            if !conflicts.is_empty() {
                if results.iter().flatten().any(|row| row.inserted) {
                    // Whoever ignores our error must not be able to commit a part. That this fails is its purpose.
                    let _ = client.batch_execute(ABORT).await;
                }
                return Err(EnqueueError::Conflict(conflicts));
            }
        }
        results.into_iter().map(|result| result.ok_or(EnqueueError::Contended)).collect()
    }

    /// Names everything that is wrong with a batch; the database is not asked. [`Outbox::enqueue_batch`] does it first.
    ///
    /// # Errors
    /// [`EnqueueError::Invalid`], [`EnqueueError::TooManyRows`] or [`EnqueueError::TooLarge`].
    pub fn check(&self, rows: &[NewRow]) -> Result<(), EnqueueError> {
        if rows.len() > BATCH_ROWS_MAX {
            return Err(EnqueueError::TooManyRows { rows: rows.len(), rows_max: BATCH_ROWS_MAX });
        }
        let mut problems = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let found = row.problems(&self.limits).into_iter();
            problems.extend(found.map(|problem| RowProblem { row: index, field: problem.field, text: problem.text }));
        }
        if !problems.is_empty() {
            return Err(EnqueueError::Invalid(problems));
        }
        let octets = rows.iter().map(NewRow::octets).sum();
        // A row that the limits allow may always be written alone.
        if octets > BATCH_OCTETS_MAX && rows.len() > 1 {
            return Err(EnqueueError::TooLarge { octets, octets_max: BATCH_OCTETS_MAX });
        }
        Ok(())
    }

    /// The statement that finds twins. Whoever does not compare them needs no right to read what they hold.
    fn twins(&self) -> String {
        let differing = match self.on_duplicate {
            OnDuplicate::Coalesce => "'{}'::text[]",
            OnDuplicate::Reject | OnDuplicate::AcceptIdentical => include_str!("../store/sql/enqueue_differing.sql"),
        };
        self.twins.replace("{differing}", differing)
    }

    /// Finds what the rows without a result coalesced with, and which of them may not.
    async fn find_twins(
        &self,
        client: &impl GenericClient,
        rows: &[NewRow],
        results: &mut [Option<Enqueued>],
    ) -> Result<Vec<Conflict>, EnqueueError> {
        let open: Vec<usize> = (0..rows.len()).filter(|&index| results[index].is_none()).collect();
        let mut conflicts = Vec::new();
        if open.is_empty() {
            return Ok(conflicts);
        }
        let inserted_by: HashMap<Uuid, usize> = results
            .iter()
            .enumerate()
            .filter_map(|(index, result)| result.as_ref().filter(|row| row.inserted).map(|row| (row.outbox_id, index)))
            .collect();
        let columns = columns(rows, &open);
        // created_at and next_attempt_at are not compared.
        for row in client.query_typed(&self.twins(), &params(&columns[..COMPARED_COLUMNS])).await? {
            let place: i64 = row.try_get("place")?;
            let index = usize::try_from(place - 1).ok().and_then(|place| open.get(place)).copied();
            let index = index.expect("the statement numbers the rows it was given");
            let outbox_id: Uuid = row.try_get("outbox_id")?;
            // What a later row of ours inserted was not there yet, and so is not what this one coalesced with.
            if inserted_by.get(&outbox_id).is_some_and(|&by| by > index) {
                continue;
            }
            let columns: Vec<String> = row.try_get("differing")?;
            let accepted = match self.on_duplicate {
                OnDuplicate::Coalesce => true,
                OnDuplicate::Reject => false,
                OnDuplicate::AcceptIdentical => columns.is_empty(),
            };
            if !accepted && conflicts.last().is_none_or(|last: &Conflict| last.row != index) {
                conflicts.push(Conflict { row: index, outbox_id, columns });
            } else if results[index].is_none() {
                results[index] = Some(Enqueued { outbox_id, message_id: row.try_get("message_id")?, inserted: false });
            }
        }
        Ok(conflicts)
    }
}

/// Aborts the transaction.
const ABORT: &str = "do $$ begin raise exception 'a batch with conflicts is rolled back as a whole' \
                     using errcode = 'integrity_constraint_violation'; end $$";

/// How many of [`columns`] the look at twins is given.
const COMPARED_COLUMNS: usize = 20;

type Column<'a> = (Box<dyn ToSql + Sync + Send + 'a>, Type);

/// The columns of these rows as arrays, in the order of `enqueue.sql`.
fn columns<'a>(rows: &'a [NewRow], open: &[usize]) -> [Column<'a>; 24] {
    macro_rules! column {
        ($array:expr, |$row:ident, $draft:ident| $value:expr) => {
            (
                Box::new(
                    open.iter()
                        .map(|&index| {
                            let $row = &rows[index];
                            let $draft = &$row.event.draft;
                            $value
                        })
                        .collect::<Vec<_>>(),
                ) as Box<dyn ToSql + Sync + Send + 'a>,
                $array,
            )
        };
    }
    [
        column!(Type::UUID_ARRAY, |row, _draft| row.outbox_id),
        column!(Type::TEXT_ARRAY, |row, _draft| row.event.message_id.as_str()),
        column!(Type::TEXT_ARRAY, |row, _draft| row.event.source_name.as_str()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.destination.as_str()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.message_key.as_deref()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.event_type.as_str()),
        column!(Type::INT8_ARRAY, |_row, draft| draft.schema_version),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.content_type.as_str()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.schema.registry.as_deref()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.schema.subject.as_deref()),
        column!(Type::INT8_ARRAY, |_row, draft| draft.schema.version),
        column!(Type::INT8_ARRAY, |_row, draft| draft.schema.schema_id),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.schema.fingerprint.as_deref()),
        column!(Type::UUID_ARRAY, |_row, draft| draft.source_event_id),
        column!(Type::INT8_ARRAY, |_row, draft| draft.source_global_position),
        column!(Type::UUID_ARRAY, |_row, draft| draft.causation_id),
        column!(Type::UUID_ARRAY, |_row, draft| draft.correlation_id),
        column!(Type::BYTEA_ARRAY, |_row, draft| draft.payload.as_slice()),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.attributes.as_deref()),
        column!(Type::TIMESTAMPTZ_ARRAY, |_row, draft| draft.occurred_at),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.trace.as_ref().map(|trace| trace.traceparent.as_str())),
        column!(Type::TEXT_ARRAY, |_row, draft| draft.trace.as_ref().and_then(|trace| trace.tracestate.as_deref())),
        column!(Type::TIMESTAMPTZ_ARRAY, |row, _draft| row.created_at),
        column!(Type::TIMESTAMPTZ_ARRAY, |row, _draft| row.available_at),
    ]
}

fn params<'a>(columns: &'a [Column<'_>]) -> Vec<(&'a (dyn ToSql + Sync), Type)> {
    columns.iter().map(|(values, array)| (values.as_ref() as &(dyn ToSql + Sync), array.clone())).collect()
}

async fn insert_rows(
    client: &impl GenericClient,
    sql: &str,
    rows: &[NewRow],
    open: &[usize],
    results: &mut [Option<Enqueued>],
) -> Result<(), EnqueueError> {
    let columns = columns(rows, open);
    // Two rows of the input may share one key or even both; then the first that has them was inserted.
    let mut inserted: HashSet<(Uuid, String, String)> = HashSet::new();
    for row in client.query_typed(sql, &params(&columns)).await? {
        inserted.insert((row.try_get("outbox_id")?, row.try_get("source")?, row.try_get("message_id")?));
    }
    for &index in open {
        let row = &rows[index];
        let key = (row.outbox_id, row.event.source_name.clone(), row.event.message_id.clone());
        if inserted.remove(&key) {
            let (outbox_id, _, message_id) = key;
            results[index] = Some(Enqueued { outbox_id, message_id, inserted: true });
        }
    }
    Ok(())
}
