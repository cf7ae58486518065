//! The producers' `enqueue` on a transaction of a command.
//!
//! Nothing here ever commits, and no error ever shows a payload, a key or an attribute.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::db::{Tx, WAKE_CHANNEL};
use super::error::StoreError;
use crate::producer::{EnqueueError, Enqueued, NewRow, Outbox};

/// Why rows were not written.
#[derive(Debug)]
pub enum EnqueueFailure {
    /// What the rows are, or what is in the table already.
    Refused(EnqueueError),
    /// The database, or the way to it.
    Store(StoreError),
}

/// Writes a batch of rows; all of it or nothing. Commits nothing.
///
/// Order caveat: as [`Outbox::enqueue`].
///
/// # Errors
/// [`EnqueueFailure`]; the transaction is then only good for being dropped.
pub async fn enqueue(
    tx: &mut Tx,
    outbox: &Outbox,
    rows: &[NewRow],
    bound: Duration,
) -> Result<Vec<Enqueued>, EnqueueFailure> {
    let outcome = tx.with_client(bound, async |client| outbox.enqueue_batch(client, rows).await).await;
    outcome.map_err(EnqueueFailure::Store)?.map_err(|error| match error {
        EnqueueError::Database(error) => EnqueueFailure::Store(StoreError::of(error.driver())),
        refused => EnqueueFailure::Refused(refused),
    })
}

/// Tells every relay that these sources have new rows, once the transaction commits; an empty name stands for all.
///
/// # Errors
/// [`StoreError`]; the transaction is then only good for being dropped.
pub async fn wake(tx: &mut Tx, sources: &[&str], bound: Duration) -> Result<(), StoreError> {
    let sql = "select count(pg_notify($1, s.source)) from unnest($2::text[]) as s(source)";
    tx.query(sql, &[(&WAKE_CHANNEL, Type::TEXT), (&sources, Type::TEXT_ARRAY)], bound).await.map(|_| ())
}
