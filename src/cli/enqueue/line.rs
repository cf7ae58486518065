//! A line of `keiro-relay enqueue`: a JSON object that becomes a row, or every problem with it.
//!
//! Keys are the column names. The payload is one of `payload` (any JSON, sent exactly as written), `payload_text` and
//! `payload_base64`. No value of a line ever reaches a problem.

use std::fmt;
use std::io::{self, BufRead, Read as _};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::config::nearest;
use crate::domain::message::PgTime;
use crate::producer::{
    Draft, IntegrationEvent, Limits, MessageIdPrefix, NewRow, TraceContext, fresh_message_id, fresh_outbox_id,
};

/// Prefix of the message ids that are minted for lines without one.
const MESSAGE_ID_PREFIX: &str = "msg";
/// Longest line: room for a payload of the largest message Kafka's own limits allow, in base64. It is held in memory.
const LINE_OCTETS_MAX: usize = 256 << 20;

/// The keys of a line.
const KEYS: [&str; 27] = [
    "outbox_id",
    "message_id",
    "source",
    "destination",
    "message_key",
    "event_type",
    "schema_version",
    "content_type",
    "schema_registry",
    "schema_subject",
    "schema_version_ref",
    "schema_id",
    "schema_fingerprint",
    "source_event_id",
    "source_global_position",
    "causation_id",
    "correlation_id",
    "traceparent",
    "tracestate",
    "payload",
    "payload_text",
    "payload_base64",
    "attributes",
    "occurred_at",
    "created_at",
    "next_attempt_at",
    "available_at",
];

/// Columns that only a relay writes.
const RELAYS_KEYS: [&str; 8] = [
    "status",
    "attempt_count",
    "last_error",
    "published_at",
    "updated_at",
    "rejected_at",
    "rejection_code",
    "rejection_detail",
];

/// Other programs' words for a key.
const OTHER_WORDS: [(&str, &str); 5] = [
    ("topic", "destination"),
    ("key", "message_key"),
    ("id", "outbox_id"),
    ("type", "event_type"),
    ("payload_bytes", "payload_base64"),
];

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineProblem {
    /// The line's number, from 1.
    pub line: usize,
    /// The key, when one is to blame.
    pub field: Option<String>,
    /// What is wrong and what would be right.
    pub text: String,
}

impl fmt::Display for LineProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.field {
            Some(field) => write!(f, "line {}: {field}: {}", self.line, self.text),
            None => write!(f, "line {}: {}", self.line, self.text),
        }
    }
}

/// The lines of an input: each a row with its number, or every problem with the line. Blank lines are skipped.
///
/// Holds one line at a time.
#[derive(Debug)]
pub struct Lines<R> {
    input: R,
    limits: Limits,
    prefix: MessageIdPrefix,
    number: usize,
    bytes: Vec<u8>,
    ended: bool,
}

impl<R: BufRead> Lines<R> {
    /// Reads this input under these limits.
    #[must_use]
    pub fn new(input: R, limits: Limits) -> Self {
        let prefix = MessageIdPrefix::new(MESSAGE_ID_PREFIX).expect("the prefix is a lower-case word");
        Self { input, limits, prefix, number: 0, bytes: Vec::new(), ended: false }
    }

    fn problem(&self, text: String) -> Vec<LineProblem> {
        vec![LineProblem { line: self.number, field: None, text }]
    }

    /// Reads the next line into `bytes`: whether there was one, and whether all of it fitted.
    fn read(&mut self) -> io::Result<(bool, bool)> {
        self.bytes.clear();
        let taken = u64::try_from(LINE_OCTETS_MAX).unwrap_or(u64::MAX);
        let octets = self.input.by_ref().take(taken).read_until(b'\n', &mut self.bytes)?;
        let whole = octets < LINE_OCTETS_MAX || self.bytes.last() == Some(&b'\n');
        if !whole {
            self.input.skip_until(b'\n')?;
        }
        Ok((octets > 0, whole))
    }

    fn row(&self) -> Result<NewRow, Vec<LineProblem>> {
        let text = std::str::from_utf8(&self.bytes)
            .map_err(|error| self.problem(format!("is not UTF-8 (octet {})", error.valid_up_to() + 1)))?;
        match serde_json::from_str::<Line<'_>>(text.trim_end()) {
            Ok(Line(fields)) => Fields::new(self.number, fields).row(&self.prefix, &self.limits),
            Err(error) if error.is_data() => Err(self.problem("must be a JSON object".to_owned())),
            // Only the place: a syntax error's text may quote what it found.
            Err(error) => Err(self.problem(format!("is not JSON (column {})", error.column()))),
        }
    }
}

impl<R: BufRead> Iterator for Lines<R> {
    type Item = Result<(usize, NewRow), Vec<LineProblem>>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.ended {
            self.number += 1;
            match self.read() {
                Ok((false, _)) => self.ended = true,
                Ok((true, false)) => {
                    return Some(Err(self.problem(format!("has more than {LINE_OCTETS_MAX} octets: that is no line"))));
                }
                Ok((true, true)) if self.bytes.trim_ascii().is_empty() => {}
                Ok((true, true)) => return Some(self.row().map(|row| (self.number, row))),
                Err(error) => {
                    self.ended = true;
                    return Some(Err(self.problem(format!("cannot be read: {error}"))));
                }
            }
        }
        None
    }
}

/// A JSON object with its keys in order, twice where they are given twice, and its values as written.
struct Line<'a>(Vec<(String, &'a RawValue)>);

impl<'de> Deserialize<'de> for Line<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Line<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Line<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    fields.push(field);
                }
                Ok(Line(fields))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// The fields of one line while they are read; collects what is wrong with them.
struct Fields<'a> {
    line: usize,
    fields: Vec<(String, &'a RawValue)>,
    problems: Vec<LineProblem>,
}

impl<'a> Fields<'a> {
    fn new(line: usize, fields: Vec<(String, &'a RawValue)>) -> Self {
        let mut this = Self { line, fields: Vec::with_capacity(fields.len()), problems: Vec::new() };
        for (key, value) in fields {
            if let Some(text) = this.key_problem(&key) {
                let shown: String = key.chars().take(64).flat_map(char::escape_debug).collect();
                this.problem(&shown, text);
            } else {
                this.fields.push((key, value));
            }
        }
        this
    }

    fn key_problem(&self, key: &str) -> Option<String> {
        if self.fields.iter().any(|(other, _)| other == key) {
            return Some("is given twice".to_owned());
        }
        if KEYS.contains(&key) {
            return None;
        }
        if RELAYS_KEYS.contains(&key) {
            return Some("is written by the relay alone; leave it out".to_owned());
        }
        let meant = OTHER_WORDS.iter().find(|(word, _)| *word == key).map(|(_, meant)| *meant);
        Some(match meant.or_else(|| nearest(key, KEYS)) {
            Some(meant) => format!("is no key; did you mean {meant:?}?"),
            None => "is no key; the keys are the table's column names".to_owned(),
        })
    }

    fn problem(&mut self, field: &str, text: impl Into<String>) {
        self.problems.push(LineProblem { line: self.line, field: Some(field.to_owned()), text: text.into() });
    }

    fn row(mut self, prefix: &MessageIdPrefix, limits: &Limits) -> Result<NewRow, Vec<LineProblem>> {
        let (payload, content_type) = self.payload();
        let outbox_id = self.uuid("outbox_id").unwrap_or_else(fresh_outbox_id);
        let message_id = self.text("message_id").unwrap_or_else(|| fresh_message_id(prefix));
        let source_name = self.required_text("source");
        let (destination, event_type) = (self.required_text("destination"), self.required_text("event_type"));
        let content_type = self.text("content_type").unwrap_or_else(|| content_type.to_owned());
        let mut draft = Draft::new(destination, event_type, content_type, payload);
        draft.message_key = self.text("message_key");
        draft.schema_version = self.integer("schema_version").unwrap_or(1);
        draft.schema.registry = self.text("schema_registry");
        draft.schema.subject = self.text("schema_subject");
        draft.schema.version = self.integer("schema_version_ref");
        draft.schema.schema_id = self.integer("schema_id");
        draft.schema.fingerprint = self.text("schema_fingerprint");
        draft.source_event_id = self.uuid("source_event_id");
        draft.source_global_position = self.integer("source_global_position");
        draft.causation_id = self.uuid("causation_id");
        draft.correlation_id = self.uuid("correlation_id");
        draft.trace = self.trace();
        draft.attributes = self.given("attributes").map(|value| value.get().to_owned());
        draft.occurred_at = self.time("occurred_at");
        let mut row = NewRow::new(outbox_id, IntegrationEvent::from_draft(source_name, message_id, draft));
        row.created_at = self.time("created_at");
        row.available_at = self.due();
        // A field that could not be read has its problem already, and only a stand-in as its value.
        for found in row.problems(limits) {
            let field = self.key_of(found.field);
            if !self.problems.iter().any(|problem| problem.field.as_deref() == Some(field)) {
                self.problem(field, found.text);
            }
        }
        if self.problems.is_empty() { Ok(row) } else { Err(self.problems) }
    }

    /// The key under which the line gives a column.
    fn key_of(&self, column: &'static str) -> &'static str {
        let keys: &[&'static str] = match column {
            "payload_bytes" => &["payload_text", "payload_base64", "payload"],
            "next_attempt_at" => &["available_at", "next_attempt_at"],
            _ => return column,
        };
        keys.iter().find(|key| self.given(key).is_some()).copied().unwrap_or(column)
    }

    /// When the row is due, under either name.
    fn due(&mut self) -> Option<PgTime> {
        if self.given("available_at").is_some() && self.given("next_attempt_at").is_some() {
            self.problem("available_at", "is another name for next_attempt_at: give one of them");
        }
        self.time("available_at").or(self.time("next_attempt_at"))
    }

    fn trace(&mut self) -> Option<TraceContext> {
        let (traceparent, tracestate) = (self.text("traceparent"), self.text("tracestate"));
        if self.given("traceparent").is_none() && tracestate.is_some() {
            self.problem("tracestate", "says nothing without a traceparent");
        }
        traceparent.map(|traceparent| TraceContext { traceparent, tracestate })
    }

    /// A key's value; `null` is as good as left out.
    fn given(&self, key: &str) -> Option<&'a RawValue> {
        self.fields.iter().find(|(name, value)| name == key && value.get() != "null").map(|(_, value)| *value)
    }

    fn text(&mut self, key: &str) -> Option<String> {
        let value = self.given(key)?;
        let text = serde_json::from_str(value.get()).ok();
        if text.is_none() {
            self.problem(key, "must be a string of valid Unicode");
        }
        text
    }

    fn required_text(&mut self, key: &str) -> String {
        if self.given(key).is_none() {
            self.problem(key, "is missing");
        }
        self.text(key).unwrap_or_default()
    }

    fn integer(&mut self, key: &str) -> Option<i64> {
        let value = self.given(key)?;
        let integer = value.get().parse().ok();
        if integer.is_none() {
            self.problem(key, "must be an integer of at most 64 bits, without quotes, point or exponent");
        }
        integer
    }

    fn uuid(&mut self, key: &str) -> Option<Uuid> {
        let value = self.given(key)?;
        let uuid = serde_json::from_str::<String>(value.get()).ok().and_then(|text| Uuid::try_parse(&text).ok());
        if uuid.is_none() {
            self.problem(key, "must be a UUID in a string, such as \"0192f0c1-2345-7abc-8def-0123456789ab\"");
        }
        uuid
    }

    fn time(&mut self, key: &str) -> Option<PgTime> {
        let value = self.given(key)?;
        let time = serde_json::from_str::<String>(value.get()).ok().and_then(|text| text.parse::<Timestamp>().ok());
        // Rounded to microseconds as the server does.
        let micros = time.and_then(|time| i64::try_from((time.as_nanosecond() + 500).div_euclid(1000)).ok());
        if micros.is_none() {
            self.problem(key, "must be a time with its offset in a string, such as \"2026-01-02T03:04:05.678Z\"");
        }
        micros.map(PgTime::from_unix_micros)
    }

    /// The payload and its default content type.
    fn payload(&mut self) -> (Vec<u8>, &'static str) {
        const KINDS: [(&str, &str); 3] = [
            ("payload", "application/json"),
            ("payload_text", "text/plain; charset=utf-8"),
            ("payload_base64", "application/octet-stream"),
        ];
        // `"payload": null` is JSON like any other.
        let json = self.fields.iter().find(|(name, _)| name == "payload").map(|(_, value)| *value);
        let given: Vec<_> = KINDS
            .into_iter()
            .filter(|(key, _)| if *key == "payload" { json.is_some() } else { self.given(key).is_some() })
            .collect();
        let &[(key, content_type)] = given.as_slice() else {
            let text = "exactly one of payload (JSON), payload_text and payload_base64 is needed";
            self.problem("payload", text);
            return (Vec::new(), KINDS[0].1);
        };
        let payload = match (key, json) {
            ("payload", Some(json)) => json.get().as_bytes().to_vec(),
            ("payload_text", _) => self.text(key).unwrap_or_default().into_bytes(),
            _ => {
                let decoded = self.text(key).map(|text| STANDARD.decode(text));
                if let Some(Err(_)) = decoded {
                    self.problem(key, "must be base64 with the standard alphabet and padding");
                }
                decoded.and_then(Result::ok).unwrap_or_default()
            }
        };
        (payload, content_type)
    }
}
