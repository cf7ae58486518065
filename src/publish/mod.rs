//! Where rows leave for the broker: the `Publisher` trait, and the Kafka publisher.
//!
//! Nothing here ever touches the database, and what happens to a row is never an `Err` but an [`Outcome`].

pub mod kafka;

use std::sync::Arc;
use std::time::Instant;

use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::domain::message::Message;
use crate::domain::outcome::Outcome;
use crate::domain::plan::Plan;

/// One claim on its way to the broker.
#[derive(Debug, Clone)]
pub struct Batch {
    /// The claimed rows in (created_at, outbox_id) order.
    pub messages: Arc<[Message]>,
    /// Which of them must reach the broker in order.
    pub plan: Arc<Plan>,
    /// Whether the policy demands that a row is handed over only after the one before it has its outcome.
    pub one_at_a_time: bool,
    /// When every row must have its outcome. Nothing may be handed to the broker after it: the lease is trusted no longer.
    pub deadline: Instant,
    /// Cancelled when the relay stops: hand over no further record; those in flight may finish until `deadline` or the stop's own.
    pub stop: CancellationToken,
}

/// Rows in, one outcome per row out.
///
/// A publisher must not deliver a later record of a lane after an earlier one of it failed in the same call (contract §3).
/// A row without an outcome counts as failed; an outcome for a row that was not in the batch is ignored and counted. An `Err`
/// or a panic fails every row of the call with its text.
pub trait Publisher: Send + Sync + 'static {
    /// Publishes one batch and returns by its deadline.
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>>;

    /// What is known of the broker without asking it: for readiness, and for pausing claims. Must not block.
    fn health(&self) -> BrokerHealth {
        BrokerHealth::default()
    }

    /// Asks the broker whether it is there, within a bound of its own; used while claims pause. Must not send any row.
    fn probe(&self) -> BoxFuture<'_, Result<(), PublishError>> {
        Box::pin(async { Ok(()) })
    }

    /// Waits for what is in flight and lets go of the broker; the deadline bounds it. Nothing is published afterwards.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()> {
        let _ = deadline;
        Box::pin(async {})
    }
}

/// Why a whole call failed.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
#[non_exhaustive]
pub struct PublishError(pub String);

/// What a publisher knows of its broker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrokerHealth {
    /// `None` when nothing stands against publishing, else why not.
    pub problem: Option<String>,
    /// Topics set aside for a while, with the reason; bounded.
    pub parked: Vec<ParkedTopic>,
    /// How often the client was rebuilt.
    pub rebuilds: u64,
}

/// A topic that is left alone for a while.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParkedTopic {
    /// The topic.
    pub topic: String,
    /// Why: a stable code word and text.
    pub reason: String,
    /// When it is probed next.
    pub probe_at: Instant,
}
