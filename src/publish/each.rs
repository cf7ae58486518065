//! A publisher made of one function that sends one message.
//!
//! It keeps the contract for that function: lanes in order, nothing handed over after a stop or the deadline, one outcome per row.

use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::{FutureExt as _, StreamExt as _};
use uuid::Uuid;

use super::{Batch, BoxFuture, PublishError, Publisher};
use crate::domain::message::Message;
use crate::domain::outcome::{Blame, Outcome, Setback};

/// Messages of one call that are sent at the same time, unless [`Each::at_once`] says otherwise.
const AT_ONCE: usize = 16;
/// How long a row rests whose sending had no end by the deadline.
const NO_ANSWER_PAUSE: Duration = Duration::from_secs(1);

/// A [`Publisher`] that sends messages one by one: see [`each`].
pub struct Each<F, E> {
    send: F,
    classify: Box<dyn Fn(&E) -> Outcome + Send + Sync>,
    at_once: usize,
    closed: AtomicBool,
}

/// Makes a publisher of a function that sends one message and returns once it is there.
///
/// An error counts as the message's own and spends an attempt, unless [`Each::classify`] says otherwise; its text goes to
/// `last_error`, so it must hold nothing of the message.
pub fn each<F, Sending, E>(send: F) -> Each<F, E>
where
    F: Fn(Message) -> Sending + Send + Sync + 'static,
    Sending: Future<Output = Result<(), E>> + Send + 'static,
    E: Display + Send + 'static,
{
    let classify = Box::new(|error: &E| Outcome::failed(format!("publisher.failed: {error}")));
    Each { send, classify, at_once: AT_ONCE, closed: AtomicBool::new(false) }
}

impl<F, E> Each<F, E> {
    /// Says what an error means: whose fault it is, or that the message can never be accepted.
    #[must_use]
    pub fn classify(mut self, classify: impl Fn(&E) -> Outcome + Send + Sync + 'static) -> Self {
        self.classify = Box::new(classify);
        self
    }

    /// Sends so many messages of different lanes at the same time.
    #[must_use]
    pub fn at_once(mut self, at_once: usize) -> Self {
        self.at_once = at_once.max(1);
        self
    }
}

impl<F, Sending, E> Publisher for Each<F, E>
where
    F: Fn(Message) -> Sending + Send + Sync + 'static,
    Sending: Future<Output = Result<(), E>> + Send + 'static,
    E: Send + 'static,
{
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        async move {
            let lanes: Vec<BoxFuture<'_, _>> =
                batch.plan.lanes.iter().map(|lane| self.lane(batch, lane).boxed()).collect();
            let outcomes: Vec<_> = futures_util::stream::iter(lanes).buffer_unordered(self.at_once).collect().await;
            Ok(outcomes.into_iter().flatten().collect())
        }
        .boxed()
    }

    fn close(&self, _: Instant) -> BoxFuture<'_, ()> {
        self.closed.store(true, Ordering::SeqCst);
        std::future::ready(()).boxed()
    }
}

impl<F, Sending, E> Each<F, E>
where
    F: Fn(Message) -> Sending + Send + Sync + 'static,
    Sending: Future<Output = Result<(), E>> + Send + 'static,
    E: Send + 'static,
{
    /// The rows of a lane, one after the other, up to the first that does not get through.
    async fn lane(&self, batch: &Batch, lane: &[usize]) -> Vec<(Uuid, Outcome)> {
        let mut outcomes = Vec::with_capacity(lane.len());
        let mut goes_on = true;
        for message in lane.iter().map(|index| &batch.messages[*index]) {
            let outcome = if goes_on {
                self.one(batch, message).await
            } else {
                not_sent(Blame::Lane, "publisher.lane: an earlier message of its lane did not get through")
            };
            goes_on = outcome.lets_lane_go_on();
            outcomes.push((message.outbox_id, outcome));
        }
        outcomes
    }

    async fn one(&self, batch: &Batch, message: &Message) -> Outcome {
        if batch.stop.is_cancelled() || self.closed.load(Ordering::SeqCst) {
            return not_sent(Blame::Stop, "relay.stop: the relay stopped before the message was sent");
        }
        if Instant::now() >= batch.deadline {
            return not_sent(Blame::Stop, "relay.late: the deadline was over before the message was sent");
        }
        if let Some(withheld) = message.payload_withheld {
            let detail =
                format!("the payload has {} octets, at most {} are read", withheld.octets, withheld.octets_max);
            return Outcome::Rejected(crate::domain::outcome::Rejection::new("relay.payload_too_large", detail));
        }
        match tokio::time::timeout_at(batch.deadline.into(), (self.send)(message.clone())).await {
            Ok(Ok(())) => Outcome::acked(),
            Ok(Err(error)) => (self.classify)(&error),
            Err(_) => Outcome::Unknown(Setback::new(
                Blame::Topic,
                "publisher.no_answer: sending had no end by the deadline; the message may be there",
                NO_ANSWER_PAUSE,
            )),
        }
    }
}

fn not_sent(blame: Blame, error: &str) -> Outcome {
    Outcome::NotSent(Setback::new(blame, error, Duration::ZERO))
}

impl<F, E> std::fmt::Debug for Each<F, E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Each").field("at_once", &self.at_once).finish_non_exhaustive()
    }
}
