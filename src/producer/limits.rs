//! What may be written: every field that the table, Kafka or the relay would not take is named before the database sees it.
//!
//! Nothing here ever shows a value: problems name columns, sizes and limits.

use super::enqueue::NewRow;
use crate::domain::limits::Limits;
use crate::domain::message::PgTime;
use crate::domain::record::{TOPIC_OCTETS_MAX, is_legal_topic};

/// Longest message_id, event_type and content_type, and longest source; some of them are in an index.
const NAME_OCTETS_MAX: usize = 256;
/// Longest message_key: with the source it must fit into an index entry (2,704 octets).
const KEY_OCTETS_MAX: usize = 2048;
/// Longest of the texts that go out as a header untouched.
const HEADER_OCTETS_MAX: usize = 64 << 10;
/// 9999-01-01: from here on the relay keeps terminal rows.
const FAR_UNIX_MICROS: i64 = 253_370_764_800_000_000;
/// 0001-01-01 and 10000-01-01: what ISO 8601 can write.
const YEAR_1_UNIX_MICROS: i64 = -62_135_596_800_000_000;
const YEAR_10000_UNIX_MICROS: i64 = 253_402_300_800_000_000;

/// A field that must not be written as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldProblem {
    /// The column.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub text: String,
}

impl NewRow {
    /// Names every field that the table or the relay would not take.
    #[must_use]
    pub fn problems(&self, limits: &Limits) -> Vec<FieldProblem> {
        let event = &self.event;
        let draft = &event.draft;
        let mut problems = Vec::new();
        let mut add = |field, text: Option<String>| problems.extend(text.map(|text| FieldProblem { field, text }));
        add("message_id", name(&event.message_id));
        add("source", name(&event.source_name));
        add(
            "destination",
            (!is_legal_topic(&draft.destination)).then(|| {
                format!(
                    "must be a topic name: 1 to {TOPIC_OCTETS_MAX} of A-Z a-z 0-9 . _ - and neither \".\" nor \"..\""
                )
            }),
        );
        add(
            "message_key",
            draft.message_key.as_deref().and_then(|key| nul(key).or_else(|| too_long(key, KEY_OCTETS_MAX))),
        );
        add("event_type", name(&draft.event_type));
        add("content_type", name(&draft.content_type));
        let trace = draft.trace.as_ref();
        for (field, text) in [
            ("schema_registry", draft.schema.registry.as_deref()),
            ("schema_subject", draft.schema.subject.as_deref()),
            ("schema_fingerprint", draft.schema.fingerprint.as_deref()),
            ("traceparent", trace.map(|trace| trace.traceparent.as_str())),
            ("tracestate", trace.and_then(|trace| trace.tracestate.as_deref())),
        ] {
            add(field, text.and_then(|text| nul(text).or_else(|| too_long(text, HEADER_OCTETS_MAX))));
        }
        add(
            "payload_bytes",
            too_large(
                draft.payload.len(),
                limits.payload_bytes_max,
                "payload_bytes_max",
                ", and the topic's max.message.bytes with it",
            ),
        );
        add("attributes", draft.attributes.as_deref().and_then(|text| attributes(text, limits)));
        add("occurred_at", draft.occurred_at.and_then(writable));
        add("created_at", self.created_at.and_then(writable));
        add("next_attempt_at", self.available_at.and_then(due));
        problems
    }
}

/// A text that must be there.
fn name(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("must not be empty".to_owned());
    }
    if text.trim() != text {
        return Some("must not begin or end with white space".to_owned());
    }
    nul(text).or_else(|| too_long(text, NAME_OCTETS_MAX))
}

fn nul(text: &str) -> Option<String> {
    text.contains('\0').then(|| "must not contain a NUL".to_owned())
}

fn too_long(text: &str, octets_max: usize) -> Option<String> {
    (text.len() > octets_max).then(|| format!("has {} octets; at most {octets_max} are allowed", text.len()))
}

/// The same with a limit that somebody may raise.
fn too_large(octets: usize, octets_max: usize, setting: &str, also: &str) -> Option<String> {
    (octets > octets_max).then(|| {
        format!(
            "has {octets} octets; at most {octets_max} are allowed: raise {setting} of the limits{also}, or send less"
        )
    })
}

fn attributes(text: &str, limits: &Limits) -> Option<String> {
    if let Some(problem) = too_large(text.len(), limits.attributes_bytes_max, "attributes_bytes_max", "") {
        return Some(problem);
    }
    match serde_json::from_str::<serde_json::Value>(text) {
        Ok(value) if has_nul(&value) => Some("must not contain a NUL (\\u0000), which jsonb cannot hold".to_owned()),
        Ok(_) => None,
        // Its text could quote a value.
        Err(_) => Some(
            "must be JSON that jsonb can hold: no half surrogates, no number beyond 1e308, at most 127 levels"
                .to_owned(),
        ),
    }
}

fn has_nul(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::String(text) => text.contains('\0'),
        serde_json::Value::Array(items) => items.iter().any(has_nul),
        serde_json::Value::Object(fields) => fields.iter().any(|(name, value)| name.contains('\0') || has_nul(value)),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => false,
    }
}

fn writable(time: PgTime) -> Option<String> {
    let writable = time.unix_micros().is_some_and(|at| (YEAR_1_UNIX_MICROS..YEAR_10000_UNIX_MICROS).contains(&at));
    (!writable).then(|| "must lie in the years 0001 to 9999".to_owned())
}

fn due(time: PgTime) -> Option<String> {
    let due = time.unix_micros().is_some_and(|at| at < FAR_UNIX_MICROS);
    (!due).then(|| "must lie before the year 9999: from then on rows count as finished".to_owned())
}
