//! A producer: turns events of a private stream into integration events, one row per event that it maps.
//!
//! Nothing here ever reads the event store, keeps a cursor or loops: the subscription stays with the event store, whose checkpoint is
//! written in the same transaction as the row.

use std::fmt;

use serde::de::DeserializeOwned;
use tokio_postgres::GenericClient;
use uuid::Uuid;

use super::enqueue::{Enqueued, NewRow, Outbox};
use super::error::EnqueueError;
use super::event::{DecodeError, Draft, IntegrationEvent, decode};
use super::ids::{MessageIdPrefix, fresh_message_id};

/// An event as the event store recorded it.
#[derive(Clone, PartialEq, Eq)]
pub struct RecordedEvent {
    /// Its id.
    pub event_id: Uuid,
    /// Its position in the log of all events.
    pub global_position: i64,
    /// Kind of event, in the private stream's words.
    pub event_type: String,
    /// What was recorded.
    pub data: Vec<u8>,
}

/// Says which event it is, and nothing of what is in it.
impl fmt::Debug for RecordedEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecordedEvent")
            .field("event_id", &self.event_id)
            .field("global_position", &self.global_position)
            .field("event_type", &self.event_type)
            .finish_non_exhaustive()
    }
}

/// How recorded events are decoded. A function `Fn(&RecordedEvent) -> Result<E, Error>` is one; [`JsonCodec`] is another.
pub trait Codec {
    /// What the mapper sees.
    type Event;
    /// Why an event cannot be decoded.
    type Error;

    /// Decodes an event.
    ///
    /// # Errors
    /// The event is not what this codec knows.
    fn decode(&self, recorded: &RecordedEvent) -> Result<Self::Event, Self::Error>;
}

impl<F, E, X> Codec for F
where
    F: Fn(&RecordedEvent) -> Result<E, X>,
{
    type Event = E;
    type Error = X;

    fn decode(&self, recorded: &RecordedEvent) -> Result<E, X> {
        self(recorded)
    }
}

/// Decodes `data` as JSON.
#[derive(Debug)]
pub struct JsonCodec<E>(std::marker::PhantomData<fn() -> E>);

impl<E> JsonCodec<E> {
    /// The codec of this type.
    #[must_use]
    pub fn new() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<E> Default for JsonCodec<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: DeserializeOwned> Codec for JsonCodec<E> {
    type Event = E;
    type Error = DecodeError;

    fn decode(&self, recorded: &RecordedEvent) -> Result<E, DecodeError> {
        decode(&recorded.data)
    }
}

/// Writes the integration events of one subscription: `map_event` says what each recorded event is to the world, if anything.
///
/// One producer handles one event at a time (`&mut self`). That is what makes its order strict: `created_at` is the start of a
/// transaction, so the order of two events is safe only when the second's transaction begins after the first's has ended. Two producers
/// of one source, or one in two processes, need something outside their transactions that lets one go first.
pub struct IntegrationProducer<C, M> {
    name: String,
    source_name: String,
    prefix: MessageIdPrefix,
    codec: C,
    map_event: M,
    outbox: Outbox,
}

impl<C, M> fmt::Debug for IntegrationProducer<C, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IntegrationProducer")
            .field("name", &self.name)
            .field("source_name", &self.source_name)
            .field("outbox", &self.outbox)
            .finish_non_exhaustive()
    }
}

impl<C, M> IntegrationProducer<C, M>
where
    C: Codec,
    M: Fn(&RecordedEvent, &C::Event) -> Option<Draft>,
{
    /// Makes a producer: the subscription's name, the source its rows carry, the prefix of its message ids, how events are decoded, and
    /// what they are mapped to. `map_event` should be pure; `None` skips the event.
    ///
    /// # Errors
    /// [`BadProducer`], with every problem.
    pub fn new(
        name: impl Into<String>,
        source_name: impl Into<String>,
        message_id_prefix: &str,
        codec: C,
        map_event: M,
    ) -> Result<Self, BadProducer> {
        let (name, source_name) = (name.into(), source_name.into());
        let mut problems = Vec::new();
        if name.trim().is_empty() {
            problems.push("its name must not be empty".to_owned());
        }
        if source_name.trim().is_empty() {
            problems.push("its source must not be empty".to_owned());
        }
        match MessageIdPrefix::new(message_id_prefix) {
            Ok(prefix) if problems.is_empty() => {
                Ok(Self { name, source_name, prefix, codec, map_event, outbox: Outbox::default() })
            }
            Ok(_) => Err(BadProducer(problems)),
            Err(bad) => {
                problems.push(bad.to_string());
                Err(BadProducer(problems))
            }
        }
    }

    /// Writes to another table, under other limits, or with another rule for duplicates.
    #[must_use]
    pub fn outbox(mut self, outbox: Outbox) -> Self {
        self.outbox = outbox;
        self
    }

    /// The subscription's name, under which the event store keeps its cursor.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The source of its rows.
    #[must_use]
    pub fn source_name(&self) -> &str {
        &self.source_name
    }

    /// Makes the event of a draft, with a message id that is minted anew each time.
    #[must_use]
    pub fn mint(&self, draft: Draft) -> IntegrationEvent {
        IntegrationEvent::from_draft(&self.source_name, fresh_message_id(&self.prefix), draft)
    }

    /// What this producer says of a recorded event: its draft, or nothing. The draft's `source_event_id` and `source_global_position`
    /// are the recorded event's unless the mapper set others.
    ///
    /// # Errors
    /// The codec's.
    pub fn draft(&self, recorded: &RecordedEvent) -> Result<Option<Draft>, C::Error> {
        let event = self.codec.decode(recorded)?;
        Ok((self.map_event)(recorded, &event).map(|mut draft| {
            draft.source_event_id = draft.source_event_id.or(Some(recorded.event_id));
            draft.source_global_position = draft.source_global_position.or(Some(recorded.global_position));
            draft
        }))
    }

    /// Decodes a recorded event, maps it and writes its row in the caller's transaction: the whole work of a subscription per event.
    /// `None` when it was skipped. Never commits: write the cursor's checkpoint in the same transaction.
    ///
    /// The message id is minted before the insert and discarded with a rollback; the next attempt mints another. What makes attempts
    /// coalesce is `outbox_id`: derive it from the event with [`stable_outbox_id`](super::stable_outbox_id), and never mint it anew.
    ///
    /// Order caveat: as [`Outbox::enqueue`]: begin the transaction of an event after that of the event before has ended.
    ///
    /// # Errors
    /// [`HandleError`]; nothing was written then.
    pub async fn handle(
        &mut self,
        tx: &impl GenericClient,
        outbox_id: Uuid,
        recorded: &RecordedEvent,
    ) -> Result<Option<Enqueued>, HandleError<C::Error>> {
        match self.draft(recorded).map_err(HandleError::Decode)? {
            Some(draft) => Ok(Some(self.enqueue_draft(tx, outbox_id, draft).await?)),
            None => Ok(None),
        }
    }

    /// Mints the event of a draft and writes its row in the caller's transaction. Never commits.
    ///
    /// Ids and order caveat: as [`IntegrationProducer::handle`].
    ///
    /// # Errors
    /// As [`Outbox::enqueue`].
    pub async fn enqueue_draft(
        &mut self,
        tx: &impl GenericClient,
        outbox_id: Uuid,
        draft: Draft,
    ) -> Result<Enqueued, EnqueueError> {
        self.outbox.enqueue(tx, &NewRow::new(outbox_id, self.mint(draft))).await
    }
}

/// A producer that cannot be made: every reason.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("integration producer: {}", .0.join("; "))]
pub struct BadProducer(Vec<String>);

/// Why a recorded event has no row.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandleError<E> {
    /// The codec does not know it.
    #[error("the recorded event cannot be decoded: {0}")]
    Decode(E),
    /// Its row could not be written.
    #[error(transparent)]
    Enqueue(#[from] EnqueueError),
}
