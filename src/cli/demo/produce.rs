//! The demo's producers: rows of the outbox table in transactions of their own, some of them rolled back.
//!
//! Nothing here ever writes two rows of one lane in two transactions at once: they would have no order for the relay to keep.
//! Producers that share an order take turns, and they do so before they begin, since created_at is the transaction's beginning.

use std::collections::HashSet;
use std::hash::{DefaultHasher, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rand::RngExt as _;
use serde_json::json;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::cast::{PlannedRow, Queue, ROLES};
use super::judge::Committed;
use crate::store::{Db, StoreError};

/// How long one statement may take.
const STATEMENT_MAX: Duration = Duration::from_secs(30);
/// Rows of one transaction.
const TRANSACTION_ROWS: std::ops::RangeInclusive<usize> = 1..=5;
/// How often a transaction is rolled back on purpose.
const ROLLBACK_CHANCE: f64 = 0.05;
/// How often a transaction of a source whose producers need not take turns stays open for a while, so that its rows appear
/// behind later ones.
const LINGER_CHANCE: f64 = 0.02;
const LINGER: Duration = Duration::from_millis(200);

/// Counts that others watch.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Committed rows of each source.
    pub committed: [AtomicUsize; ROLES.len()],
    pub transactions: AtomicUsize,
    pub rolled_back: AtomicUsize,
}

/// What the producers remember.
#[derive(Debug, Default)]
pub(super) struct Books {
    pub committed: Vec<Committed>,
    /// Message ids of rows that were rolled back.
    pub rolled_back: HashSet<String>,
}

impl Books {
    fn add(&mut self, other: Self) {
        self.committed.extend(other.committed);
        self.rolled_back.extend(other.rolled_back);
    }
}

/// Where rows go.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub db: Db,
    /// Schema and table, quoted.
    pub table: String,
    /// Before the name of every source and topic.
    pub prefix: String,
}

/// How many producers write.
pub(super) fn producers() -> usize {
    ROLES.iter().map(|role| role.producers).sum()
}

/// Writes every planned row.
///
/// # Errors
/// The first that a statement failed with; the other producers are stopped.
pub(super) async fn produce(
    target: Arc<Target>,
    plan: Vec<(usize, Vec<Queue>)>,
    counts: Arc<Counts>,
) -> Result<Books, StoreError> {
    let mut producers = JoinSet::new();
    for (source, queues) in plan {
        let queues: Vec<_> = queues.into_iter().map(|queue| Arc::new(Mutex::new(queue))).collect();
        for producer in 0..ROLES[source].producers {
            let queue = Arc::clone(&queues[producer % queues.len()]);
            let alone = queues.len() > 1;
            producers.spawn(write_queue(Arc::clone(&target), queue, alone, Arc::clone(&counts)));
        }
    }
    let mut books = Books::default();
    while let Some(written) = producers.join_next().await {
        books.add(written.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))?);
    }
    Ok(books)
}

async fn write_queue(
    target: Arc<Target>,
    queue: Arc<Mutex<Queue>>,
    alone: bool,
    counts: Arc<Counts>,
) -> Result<Books, StoreError> {
    let mut books = Books::default();
    loop {
        // Held until the transaction is over: whoever shares the queue begins after we committed.
        let mut queue = queue.lock().await;
        let size = rand::rng().random_range(TRANSACTION_ROWS).min(queue.len());
        if size == 0 {
            return Ok(books);
        }
        let rows: Vec<PlannedRow> = queue.drain(..size).collect();
        let rolls_back = rand::rng().random_bool(ROLLBACK_CHANCE);
        let lingers = alone && rand::rng().random_bool(LINGER_CHANCE);
        let written = write(&target, &rows, rolls_back, lingers).await?;
        counts.transactions.fetch_add(1, Ordering::Relaxed);
        if rolls_back {
            counts.rolled_back.fetch_add(rows.len(), Ordering::Relaxed);
            books.rolled_back.extend(written.into_iter().map(|row| row.message_id));
            // As a program would, the next try writes them again.
            for row in rows.into_iter().rev() {
                queue.push_front(row);
            }
        } else {
            counts.committed[rows[0].source].fetch_add(rows.len(), Ordering::Relaxed);
            books.committed.extend(written);
        }
    }
}

/// One transaction.
async fn write(
    target: &Target,
    rows: &[PlannedRow],
    rolls_back: bool,
    lingers: bool,
) -> Result<Vec<Committed>, StoreError> {
    let insert = format!(
        "insert into {} (outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, \
         payload_bytes, attributes, occurred_at) values ($1, $2, $3, $4, $5, $6, 1, $7, $8, $9, clock_timestamp())",
        target.table
    );
    let mut transaction = target.db.begin(STATEMENT_MAX).await?;
    let mut written = Vec::with_capacity(rows.len());
    for row in rows {
        // Ids that sort within this process: rows of one transaction share created_at, so their ids alone order them.
        let outbox_id = Uuid::now_v7();
        let message_id = format!("msg_{}", Uuid::now_v7().simple());
        let source = format!("{}{}", target.prefix, ROLES[row.source].name);
        let topic = format!("{}{}", target.prefix, row.topic);
        let event_type = format!("{}.happened", ROLES[row.source].name);
        let payload = row.payload();
        let attributes = json!({ "demo": true, "number": row.number });
        transaction
            .execute(
                &insert,
                &[
                    (&outbox_id, Type::UUID),
                    (&message_id, Type::TEXT),
                    (&source, Type::TEXT),
                    (&topic, Type::TEXT),
                    (&row.key, Type::TEXT),
                    (&event_type, Type::TEXT),
                    (&row.content_type(), Type::TEXT),
                    (&payload, Type::BYTEA),
                    (&attributes, Type::JSONB),
                ],
                STATEMENT_MAX,
            )
            .await?;
        written.push(Committed { source, message_id, digest: digest(&payload), fate: row.fate });
    }
    if lingers {
        tokio::time::sleep(LINGER).await;
    }
    if rolls_back {
        transaction.execute("rollback", &[], STATEMENT_MAX).await?;
    } else {
        transaction.commit(STATEMENT_MAX).await?;
    }
    Ok(written)
}

/// A hash of a payload: the judge compares these.
pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}
