//! A row as it goes over the wire: topic, key, value and headers, byte for byte as contract §4 has them.
//!
//! Nothing here ever sends anything, and nothing here ever puts a key, a payload or a header value into an error or a log:
//! a [`Rejection`] names columns, lengths and limits only.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

use bytes::Bytes;
use jiff::SignedDuration;
use jiff::civil::DateTime;
use serde_json::value::RawValue;

use super::message::{Message, PgTime, Withheld};
use super::outcome::Rejection;

/// Header of the message id, which consumers dedupe on.
pub const MESSAGE_ID_HEADER: &str = "keiro-message-id";

/// Longest topic name Kafka accepts, in octets.
pub const TOPIC_OCTETS_MAX: usize = 249;

/// Deepest nesting of `attributes` that is sent. PostgreSQL allows thousands of levels, which no consumer's parser survives;
/// 512 is four times what common parsers accept and far below what could exhaust a stack here.
pub const ATTRIBUTES_DEPTH_MAX: usize = 512;

/// One Kafka record, borrowed from its row.
#[derive(Clone, PartialEq, Eq)]
pub struct Record<'a> {
    /// Topic, checked against Kafka's naming rule.
    pub topic: &'a str,
    /// Key; `None` is no key, an empty string is an empty key.
    pub key: Option<&'a str>,
    /// Value; empty is an empty value, never a tombstone.
    pub payload: &'a Bytes,
    /// Headers in the order of the contract, each only when its column is set.
    pub headers: Vec<(&'static str, Cow<'a, str>)>,
}

impl Record<'_> {
    /// Octets of key, value and headers together: what people mean by the size of a record. Kafka adds some framing.
    #[must_use]
    pub fn octets(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.key.map_or(0, str::len) + self.payload.len() + headers
    }
}

impl fmt::Debug for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Record").field("topic", &self.topic).field("octets", &self.octets()).finish_non_exhaustive()
    }
}

/// Builds the record of a row, or says why no broker could ever take it.
///
/// # Errors
/// The row's own content forbids it: an illegal topic name, a payload so large that it was not read, an `occurred_at` that ISO 8601 cannot write, or `attributes`
/// nested too deep. Only another row can mend that.
pub fn build(message: &Message) -> Result<Record<'_>, Rejection> {
    check_topic(&message.destination)?;
    if let Some(withheld) = message.payload_withheld {
        return Err(too_large(&message.destination, withheld));
    }
    let mut headers = Headers(Vec::with_capacity(19));
    headers.text(MESSAGE_ID_HEADER, &message.message_id);
    headers.text("keiro-source", &message.source_name);
    headers.text("keiro-destination", &message.destination);
    headers.text("keiro-event-type", &message.event_type);
    headers.made("keiro-schema-version", Some(message.schema_version));
    headers.text("content-type", content_type(&message.content_type));
    headers.set("keiro-schema-registry", message.schema_registry.as_deref());
    headers.set("keiro-schema-subject", message.schema_subject.as_deref());
    headers.made("keiro-schema-version-ref", message.schema_version_ref);
    headers.made("keiro-schema-id", message.schema_id);
    headers.set("keiro-schema-fingerprint", message.schema_fingerprint.as_deref());
    headers.made("keiro-source-event-id", message.source_event_id);
    headers.made("keiro-source-global-position", message.source_global_position);
    headers.made("keiro-causation-id", message.causation_id);
    headers.made("keiro-correlation-id", message.correlation_id);
    if let Some(traceparent) = message.traceparent.as_deref() {
        headers.text("traceparent", traceparent);
        headers.set("tracestate", message.tracestate.as_deref());
    }
    headers.made("keiro-occurred-at", Some(occurred_at(message.occurred_at)?));
    if let Some(attributes) = message.attributes.as_deref() {
        headers.made("keiro-attributes", Some(compact_attributes(attributes)?));
    }
    Ok(Record {
        topic: &message.destination,
        key: message.message_key.as_deref(),
        payload: &message.payload,
        headers: headers.0,
    })
}

/// The headers so far, in order.
struct Headers<'a>(Vec<(&'static str, Cow<'a, str>)>);

impl<'a> Headers<'a> {
    /// A text column that cannot be null.
    fn text(&mut self, name: &'static str, value: &'a str) {
        self.0.push((name, Cow::Borrowed(value)));
    }

    /// A text column that may be null.
    fn set(&mut self, name: &'static str, value: Option<&'a str>) {
        if let Some(value) = value {
            self.text(name, value);
        }
    }

    /// A value that has to be written out; a uuid writes itself in lower case with hyphens, an integer in decimal.
    fn made(&mut self, name: &'static str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.0.push((name, Cow::Owned(value.to_string())));
        }
    }
}

/// Kafka's rule for topic names.
#[must_use]
pub fn is_legal_topic(name: &str) -> bool {
    let legal = |octet: u8| octet.is_ascii_alphanumeric() || matches!(octet, b'.' | b'_' | b'-');
    (1..=TOPIC_OCTETS_MAX).contains(&name.len()) && name.bytes().all(legal) && name != "." && name != ".."
}

fn check_topic(destination: &str) -> Result<(), Rejection> {
    if is_legal_topic(destination) {
        return Ok(());
    }
    // A name can be any text: escaped, so that control characters do not reach a terminal, and cut.
    let shown: String = destination.chars().take(64).flat_map(char::escape_debug).collect();
    let detail = format!(
        "client: destination \"{shown}\" ({} octets) is not a legal topic name: 1 to {TOPIC_OCTETS_MAX} of A-Z a-z 0-9 . _ - and \
         neither \".\" nor \"..\"; the producer has to write another destination",
        destination.len()
    );
    Err(Rejection::new("kafka.invalid_topic", detail))
}

fn too_large(topic: &str, Withheld { octets, octets_max }: Withheld) -> Rejection {
    let detail = format!(
        "client: a payload of {octets} octets for topic {topic} exceeds [kafka] message_bytes_max = {octets_max} (librdkafka's \
         message.max.bytes) and was not read; raise it, and the topic's max.message.bytes with it"
    );
    Rejection::new("kafka.message_too_large", detail)
}

/// `application/json` for anything that says so with parameters or in another case; everything else as it stands.
pub(crate) fn content_type(value: &str) -> &str {
    const JSON: &str = "application/json";
    let essence = value.split(';').next().unwrap_or(value);
    if essence.trim().to_lowercase() == JSON { JSON } else { value }
}

/// ISO 8601 in UTC: fractional seconds only when there are some, without trailing zeros.
fn occurred_at(at: PgTime) -> Result<String, Rejection> {
    // The civil calendar and not `jiff::Timestamp`, which ends a day before the year 9999 does.
    const UNIX_EPOCH: DateTime = DateTime::constant(1970, 1, 1, 0, 0, 0, 0);
    let civil = at.unix_micros().and_then(|micros| UNIX_EPOCH.checked_add(SignedDuration::from_micros(micros)).ok());
    match civil {
        Some(civil) if civil.year() >= 1 => Ok(format!("{civil}Z")),
        Some(_) | None => Err(Rejection::new(
            "row.invalid_timestamp",
            "client: occurred_at is infinite or outside the years 0001 to 9999, which ISO 8601 cannot write; the producer has to \
             write another instant",
        )),
    }
}

/// `attributes` as compact JSON: keys in byte order at every level, scalars with the very digits and escapes that PostgreSQL
/// prints, so that no number goes through a float.
fn compact_attributes(attributes: &str) -> Result<String, Rejection> {
    let mut compact = String::with_capacity(attributes.len());
    let value = serde_json::from_str::<&RawValue>(attributes).map_err(|_| Uncompactable::Malformed);
    match value.and_then(|value| write_compact(value.get(), 0, &mut compact)) {
        Ok(()) => Ok(compact),
        Err(Uncompactable::TooDeep) => Err(Rejection::new(
            "row.attributes_too_deep",
            format!(
                "client: attributes are nested deeper than {ATTRIBUTES_DEPTH_MAX} levels; the producer has to write them flatter"
            ),
        )),
        // PostgreSQL prints no such jsonb; a message from elsewhere could still hold anything.
        Err(Uncompactable::Malformed) => Err(Rejection::new(
            "row.invalid_attributes",
            "client: attributes are not JSON; the producer has to write JSON",
        )),
    }
}

/// Why `attributes` cannot go out.
enum Uncompactable {
    TooDeep,
    Malformed,
}

impl From<serde_json::Error> for Uncompactable {
    fn from(_: serde_json::Error) -> Self {
        Self::Malformed
    }
}

/// Writes one JSON value, given without surrounding white space. Each level is parsed into raw pieces only, so scalars are
/// never interpreted, and a key that looks like one of serde_json's own markers is a key like any other.
fn write_compact(json: &str, depth: usize, out: &mut String) -> Result<(), Uncompactable> {
    let deeper = || if depth < ATTRIBUTES_DEPTH_MAX { Ok(depth + 1) } else { Err(Uncompactable::TooDeep) };
    match json.as_bytes().first() {
        Some(b'{') => {
            let depth = deeper()?;
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(json)?;
            out.push('{');
            for (position, (key, value)) in members.iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                let key = serde_json::to_string(key)?;
                // Writing into a String cannot fail.
                let _ = write!(out, "{key}:");
                write_compact(value.get(), depth, out)?;
            }
            out.push('}');
        }
        Some(b'[') => {
            let depth = deeper()?;
            let items: Vec<&RawValue> = serde_json::from_str(json)?;
            out.push('[');
            for (position, item) in items.iter().enumerate() {
                if position > 0 {
                    out.push(',');
                }
                write_compact(item.get(), depth, out)?;
            }
            out.push(']');
        }
        Some(_) => out.push_str(json),
        None => return Err(Uncompactable::Malformed),
    }
    Ok(())
}
