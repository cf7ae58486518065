//! What a producer says: an event, and the draft it grows from.
//!
//! Nothing here ever talks to a database, and `Debug` shows no payload, key or attribute.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::error::Category;
use uuid::Uuid;

use crate::domain::message::PgTime;
use crate::domain::record;

/// The content type of [`Draft::json`].
const JSON: &str = "application/json";

/// An event for other bounded contexts: one row of the outbox, one record on Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IntegrationEvent {
    /// The consumer's dedupe key, unique together with the source: header `keiro-message-id`.
    pub message_id: String,
    /// Producing bounded context (column `source`). The relay's ordering policy is per source.
    pub source_name: String,
    /// All the rest.
    pub draft: Draft,
}

impl IntegrationEvent {
    /// Makes the event of a draft. Pure: mints nothing.
    #[must_use]
    pub fn from_draft(source_name: impl Into<String>, message_id: impl Into<String>, draft: Draft) -> Self {
        Self { message_id: message_id.into(), source_name: source_name.into(), draft }
    }

    /// Decodes a JSON payload.
    ///
    /// # Errors
    /// As [`Draft::decode_json`].
    pub fn decode_json<T: DeserializeOwned>(&self) -> Result<T, DecodeError> {
        self.draft.decode_json()
    }
}

/// An event without `message_id` and `source`. Begin with [`Draft::new`] or [`Draft::json`].
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Draft {
    /// Kafka topic.
    pub destination: String,
    /// Partition and ordering key. `None` bypasses the per-key order; an empty string is a key like any other.
    pub message_key: Option<String>,
    /// Kind of event.
    pub event_type: String,
    /// Version of the event's schema.
    pub schema_version: i64,
    /// Media type of the payload.
    pub content_type: String,
    /// Where a registry keeps the schema.
    pub schema: SchemaReference,
    /// Event this one was derived from.
    pub source_event_id: Option<Uuid>,
    /// Position of that event in its log.
    pub source_global_position: Option<i64>,
    /// Event that caused this one.
    pub causation_id: Option<Uuid>,
    /// Correlation of a whole conversation.
    pub correlation_id: Option<Uuid>,
    /// W3C trace context, passed through untouched.
    pub trace: Option<TraceContext>,
    /// Value of the record; empty is an empty value, never a tombstone.
    pub payload: Vec<u8>,
    /// JSON text; goes out as the header `keiro-attributes` with its digits unchanged.
    pub attributes: Option<String>,
    /// When the event happened; `None` is the start of the transaction, by the database's clock.
    pub occurred_at: Option<PgTime>,
}

/// Where a registry keeps the schema. Each part that is set goes out as a header of its own.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SchemaReference {
    /// Registry.
    pub registry: Option<String>,
    /// Subject in the registry.
    pub subject: Option<String>,
    /// Version in the registry (column `schema_version_ref`).
    pub version: Option<i64>,
    /// Id in the registry.
    pub schema_id: Option<i64>,
    /// Fingerprint of the schema.
    pub fingerprint: Option<String>,
}

/// W3C trace context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceContext {
    /// `traceparent`.
    pub traceparent: String,
    /// `tracestate`, which says nothing without a traceparent.
    pub tracestate: Option<String>,
}

impl Draft {
    /// A draft of a payload that is any bytes; schema version 1, everything optional left out.
    #[must_use]
    pub fn new(
        destination: impl Into<String>,
        event_type: impl Into<String>,
        content_type: impl Into<String>,
        payload: impl Into<Vec<u8>>,
    ) -> Self {
        Self {
            destination: destination.into(),
            message_key: None,
            event_type: event_type.into(),
            schema_version: 1,
            content_type: content_type.into(),
            schema: SchemaReference::default(),
            source_event_id: None,
            source_global_position: None,
            causation_id: None,
            correlation_id: None,
            trace: None,
            payload: payload.into(),
            attributes: None,
            occurred_at: None,
        }
    }

    /// A draft whose payload is this value as JSON.
    ///
    /// # Errors
    /// [`EncodeError`] when the value has no JSON form.
    pub fn json<T: Serialize + ?Sized>(
        destination: impl Into<String>,
        event_type: impl Into<String>,
        payload: &T,
    ) -> Result<Self, EncodeError> {
        let payload = serde_json::to_vec(payload).map_err(|error| EncodeError(error.to_string()))?;
        Ok(Self::new(destination, event_type, JSON, payload))
    }

    /// Sets the partition and ordering key.
    #[must_use]
    pub fn key(mut self, key: impl Into<String>) -> Self {
        self.message_key = Some(key.into());
        self
    }

    /// Sets when the event happened: a `SystemTime`, or the [`PgTime`] of a row.
    #[must_use]
    pub fn occurred_at(mut self, at: impl Into<PgTime>) -> Self {
        self.occurred_at = Some(at.into());
        self
    }

    /// Sets the attributes to this value as JSON.
    ///
    /// # Errors
    /// As [`Draft::json`].
    pub fn attributes<T: Serialize + ?Sized>(mut self, attributes: &T) -> Result<Self, EncodeError> {
        self.attributes = Some(serde_json::to_string(attributes).map_err(|error| EncodeError(error.to_string()))?);
        Ok(self)
    }

    /// Decodes a JSON payload.
    ///
    /// # Errors
    /// [`DecodeError`], which says what kind of mismatch it is and never what the payload holds.
    pub fn decode_json<T: DeserializeOwned>(&self) -> Result<T, DecodeError> {
        if record::content_type(&self.content_type) != JSON {
            return Err(DecodeError::UnsupportedContentType(shown(&self.content_type)));
        }
        decode(&self.payload)
    }
}

/// Decodes JSON, sorting what can be wrong with it.
pub(super) fn decode<T: DeserializeOwned>(json: &[u8]) -> Result<T, DecodeError> {
    serde_json::from_slice(json).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        match error.classify() {
            Category::Io | Category::Syntax | Category::Eof => DecodeError::Malformed { line, column },
            Category::Data => match missing_field(&error) {
                Some(field) => DecodeError::MissingField { field },
                None => DecodeError::DoesNotFit { line, column },
            },
        }
    })
}

/// The field that serde misses: its name is the type's, not the payload's. serde has no other way to tell than this text.
fn missing_field(error: &serde_json::Error) -> Option<String> {
    let text = error.to_string();
    let (field, rest) = text.strip_prefix("missing field `")?.split_once('`')?;
    (rest.is_empty() || rest.starts_with(" at line ")).then(|| field.to_owned())
}

/// A text from outside, escaped and cut so that it cannot write to a terminal.
fn shown(text: &str) -> String {
    text.chars().take(64).flat_map(char::escape_debug).collect()
}

/// Says what kind of event it is, and nothing of what is in it.
impl fmt::Debug for Draft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Draft")
            .field("destination", &self.destination)
            .field("event_type", &self.event_type)
            .field("payload_octets", &self.payload.len())
            .finish_non_exhaustive()
    }
}

/// A value that has no JSON form, such as a map whose keys are not texts.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the value has no JSON form: {0}")]
pub struct EncodeError(String);

/// Why a payload is not what the reader wants.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// It says that it is something else than JSON.
    #[error("content type \"{0}\" is not application/json")]
    UnsupportedContentType(String),
    /// It is no JSON.
    #[error("not JSON (line {line}, column {column})")]
    Malformed {
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
    /// It is JSON without a field that the type needs.
    #[error("the field `{field}` is missing")]
    MissingField {
        /// The field's name in the type.
        field: String,
    },
    /// It is JSON of another shape.
    #[error("JSON of another shape (line {line}, column {column})")]
    DoesNotFit {
        /// Line, from 1.
        line: usize,
        /// Column, from 1; 0 where the whole value is meant.
        column: usize,
    },
}
