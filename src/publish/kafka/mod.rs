//! The Kafka publisher: claimed rows to records, and what librdkafka reports of each to outcomes.
//!
//! Rows go through the fast lane (`fast`), many on their way at once; what fails there, and what is likely to, goes through the
//! careful lane (`careful`): one record per batch and one in flight per lane, so that every code and every silence is the
//! record's own. Nothing here ever hands a record over after the call's deadline, lets a later
//! record of a lane out after an earlier one that did not get through, or blocks a thread of the runtime.

mod careful;
mod client;
pub mod codes;
mod counts;
mod describe;
mod fast;
pub mod faults;
pub mod guards;
pub mod inspect;
mod limits;
pub mod pipeline;
pub mod read;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

pub use client::ClientError;
use client::{Blueprint, Client, Generation, Purpose, SharedFaults};
use counts::Counts;
use guards::Guards;
use limits::TopicLimits;

use super::{Batch, BrokerHealth, PublishError, Publisher};
use crate::config;
use crate::domain::outcome::Outcome;

/// How long a probe of the cluster may take.
const PROBE_MAX: Duration = Duration::from_secs(5);

/// Publishes to one Kafka cluster.
pub struct KafkaPublisher {
    fast: Client,
    careful: Client,
    faults: SharedFaults,
    counts: Counts,
    guards: Mutex<Guards>,
    limits: TopicLimits,
    message_bytes_max: usize,
    topic_fault_dead_after: Option<Duration>,
    /// How long a record in flight may still wait for its verdict once we stop.
    stop_wait: Duration,
    closed: CancellationToken,
}

impl KafkaPublisher {
    /// Builds the clients; they connect by themselves, and a cluster that is away is no error.
    ///
    /// # Errors
    /// librdkafka does not take the properties, or a file that holds one cannot be read.
    pub fn new(kafka: &config::Kafka, relay: &config::Relay) -> Result<Self, ClientError> {
        let faults = SharedFaults::default();
        let blueprint = Blueprint::new(kafka, relay);
        Ok(Self {
            fast: Client::new(blueprint.clone(), Purpose::Fast, faults.clone())?,
            careful: Client::new(blueprint, Purpose::Careful, faults.clone())?,
            faults,
            counts: Counts::default(),
            guards: Mutex::default(),
            limits: TopicLimits::default(),
            message_bytes_max: kafka.message_bytes_max,
            topic_fault_dead_after: kafka.topic_fault_dead_after,
            stop_wait: relay.shutdown_grace.saturating_sub(relay.settle_timeout),
            closed: CancellationToken::new(),
        })
    }

    /// Held for a few map look-ups, never across an await.
    fn guards(&self) -> MutexGuard<'_, Guards> {
        self.guards.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Publisher for KafkaPublisher {
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        careful::publish(self, batch).map(Ok).boxed()
    }

    fn health(&self) -> BrokerHealth {
        let rebuilds = self.fast.rebuilds() + self.careful.rebuilds();
        let mut faults = self.faults.lock();
        faults.forget_unwanted(Instant::now());
        BrokerHealth { problem: faults.problem(Instant::now()), parked: faults.parked(), rebuilds }
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), PublishError>> {
        let probe = async {
            self.careful.ask_cluster(PROBE_MAX).await.map_err(PublishError::new)?;
            self.faults.lock().answered();
            Ok(())
        };
        probe.boxed()
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()> {
        let close = async move {
            self.closed.cancel();
            let close = async |generation: Arc<Generation>| {
                generation.flush(deadline.saturating_duration_since(Instant::now())).await;
                generation.purge(true).await;
            };
            tokio::join!(close(self.fast.current()), close(self.careful.current()));
        };
        close.boxed()
    }
}

impl std::fmt::Debug for KafkaPublisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KafkaPublisher").field("health", &self.health()).finish_non_exhaustive()
    }
}
