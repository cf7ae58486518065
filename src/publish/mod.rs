//! Where rows leave for the broker: the `Publisher` trait, and the Kafka publisher.
//!
//! Nothing here ever touches the database, and what happens to a row is never an `Err` but an [`Outcome`].

pub mod conformance;
mod each;
pub mod kafka;

use std::sync::Arc;
use std::time::Instant;

pub use each::{Each, each};
pub use futures_util::future::BoxFuture;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::domain::message::Message;
use crate::domain::outcome::Outcome;
use crate::domain::plan::{self, Plan};
use crate::domain::policy::Policy;

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

impl Batch {
    /// A batch as a pass would make it of rows in claim order, with nobody who stops it.
    #[must_use]
    pub fn new(policy: Policy, messages: Vec<Message>, deadline: Instant) -> Self {
        let plan = Arc::new(plan::plan(policy, &messages));
        Self {
            messages: messages.into(),
            plan,
            one_at_a_time: policy == Policy::StopTheLine,
            deadline,
            stop: CancellationToken::new(),
        }
    }
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

/// A publisher that is shared is one as well.
impl<P: Publisher + ?Sized> Publisher for Arc<P> {
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        (**self).publish(batch)
    }

    fn health(&self) -> BrokerHealth {
        (**self).health()
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), PublishError>> {
        (**self).probe()
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()> {
        (**self).close(deadline)
    }
}

/// Why a whole call failed. Its text begins with a stable code word and holds nothing of any row.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{text}")]
#[non_exhaustive]
pub struct PublishError {
    /// Text for the log and for `last_error`.
    pub text: String,
    /// The error behind it, which a classifier may look at.
    #[source]
    pub cause: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

impl PublishError {
    /// An error that is all text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), cause: None }
    }

    /// An error with another one behind it.
    #[must_use]
    pub fn caused_by(text: impl Into<String>, cause: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self { text: text.into(), cause: Some(Arc::new(cause)) }
    }
}

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
