//! `keiro-relay enqueue`: rows as JSON objects, one a line, written in one transaction.
//!
//! Keys are the column names. The payload is one of `payload` (any JSON, sent exactly as written), `payload_text` and
//! `payload_base64`. Nothing here ever writes some of the lines: either all are in the table afterwards, or none. No value
//! of a line ever reaches an error.

use std::collections::BTreeSet;
use std::fmt;
use std::io::{self, BufRead, Write};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK};
use crate::config::nearest;
use crate::domain::message::PgTime;
use crate::producer::{MessageIdPrefix, fresh_message_id, fresh_outbox_id};
use crate::store::{self, Db, Enqueued, ErrorKind, NewRow, StoreError, qualified};

/// Prefix of the message ids that are minted for lines without one.
const MESSAGE_ID_PREFIX: &str = "msg";

/// The keys of a line.
const KEYS: [&str; 26] = [
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
const OTHER_WORDS: [(&str, &str); 6] = [
    ("topic", "destination"),
    ("key", "message_key"),
    ("id", "outbox_id"),
    ("type", "event_type"),
    ("payload_bytes", "payload_base64"),
    ("available_at", "next_attempt_at"),
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

/// Runs the command and returns its exit code: 0 when every row is in the table, 1 when none was written.
///
/// # Errors
/// Only those of the two outputs.
pub async fn run(
    db: &Db,
    schema: &str,
    table: &str,
    bound: Duration,
    input: impl BufRead,
    out: &mut (impl Write + Send),
    err: &mut (impl Write + Send),
) -> io::Result<u8> {
    let lines = match parse(input) {
        Ok(lines) => lines,
        Err(problems) => {
            for problem in &problems {
                writeln!(err, "enqueue: {problem}")?;
            }
            let count = problems.len();
            writeln!(
                err,
                "enqueue: nothing was inserted: {count} {}",
                if count == 1 { "problem" } else { "problems" }
            )?;
            return Ok(EXIT_FAILED);
        }
    };
    let (numbers, rows): (Vec<usize>, Vec<NewRow>) = lines.into_iter().unzip();
    let enqueued = match write_all(db, schema, table, &rows, bound).await {
        Ok(enqueued) => enqueued,
        Err(Failure::Nothing(error)) => {
            writeln!(err, "enqueue: nothing was inserted: {error}")?;
            return Ok(match error.kind() {
                ErrorKind::Mismatch | ErrorKind::Auth => EXIT_CONFIG,
                ErrorKind::Fatal if matches!(error, StoreError::Setting(_)) => EXIT_CONFIG,
                ErrorKind::Fatal | ErrorKind::Transient | ErrorKind::Serialization => EXIT_FAILED,
            });
        }
        Err(Failure::Unknown { error, outbox_id }) => {
            writeln!(
                err,
                "enqueue: whether the rows were inserted is not known: {error}; all of them were exactly when there is a row with \
                 outbox_id {outbox_id}"
            )?;
            return Ok(EXIT_FAILED);
        }
    };
    for (line, Enqueued { outbox_id, message_id, inserted }) in numbers.into_iter().zip(enqueued) {
        let answer = Answer { line, outbox_id, message_id: &message_id, inserted };
        serde_json::to_writer(&mut *out, &answer)?;
        writeln!(out)?;
    }
    Ok(EXIT_OK)
}

/// What is printed for a line.
#[derive(serde::Serialize)]
struct Answer<'a> {
    line: usize,
    outbox_id: Uuid,
    message_id: &'a str,
    inserted: bool,
}

enum Failure {
    Nothing(StoreError),
    /// The commit got no answer; the id is one of the rows that would have been inserted.
    Unknown {
        error: StoreError,
        outbox_id: Uuid,
    },
}

async fn write_all(
    db: &Db,
    schema: &str,
    table: &str,
    rows: &[NewRow],
    bound: Duration,
) -> Result<Vec<Enqueued>, Failure> {
    if rows.is_empty() {
        return Ok(Vec::new());
    }
    let mut tx = db.begin(bound).await.map_err(Failure::Nothing)?;
    let enqueued = store::enqueue(&mut tx, schema, table, rows, bound).await.map_err(Failure::Nothing)?;
    let sources: BTreeSet<&str> = rows.iter().map(|row| row.source_name.as_str()).collect();
    let sources: Vec<&str> = sources.into_iter().collect();
    store::wake(&mut tx, &sources, bound).await.map_err(Failure::Nothing)?;
    let Err(error) = tx.commit(bound).await else { return Ok(enqueued) };
    let Some(outbox_id) = enqueued.iter().find(|row| row.inserted).map(|row| row.outbox_id) else {
        // Every row was there before: there was nothing to commit.
        return Ok(enqueued);
    };
    // The answer may have been lost on its way, so look. Not there yet is no proof: the server may still be at it.
    let sql = format!("select 1 from {} where outbox_id = $1", qualified(schema, table));
    match db.query_opt(&sql, &[(&outbox_id, Type::UUID)], bound).await {
        Ok(Some(_)) => Ok(enqueued),
        Ok(None) if error.code().is_some() => Err(Failure::Nothing(error)),
        Ok(None) | Err(_) => Err(Failure::Unknown { error, outbox_id }),
    }
}

/// Reads every line and checks every field: the rows with their line numbers, or every problem. Blank lines are skipped.
///
/// # Errors
/// All problems of all lines.
pub fn parse(mut input: impl BufRead) -> Result<Vec<(usize, NewRow)>, Vec<LineProblem>> {
    let prefix = MessageIdPrefix::new(MESSAGE_ID_PREFIX).expect("the prefix is a lower-case word");
    let mut rows = Vec::new();
    let mut problems = Vec::new();
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        match input.read_until(b'\n', &mut bytes) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) => {
                problems.push(LineProblem { line, field: None, text: format!("cannot be read: {error}") });
                break;
            }
        }
        let problem = |text: String| LineProblem { line, field: None, text };
        match std::str::from_utf8(&bytes) {
            Ok(text) if text.trim().is_empty() => {}
            Ok(text) => match serde_json::from_str::<Line<'_>>(text.trim_end()) {
                Ok(Line(fields)) => match Fields::new(line, fields).row(&prefix) {
                    Ok(row) => rows.push((line, row)),
                    Err(found) => problems.extend(found),
                },
                Err(error) if error.is_data() => problems.push(problem("must be a JSON object".to_owned())),
                // Only the place: a syntax error's text may quote what it found.
                Err(error) => problems.push(problem(format!("is not JSON (column {})", error.column()))),
            },
            Err(error) => problems.push(problem(format!("is not UTF-8 (octet {})", error.valid_up_to() + 1))),
        }
    }
    if problems.is_empty() { Ok(rows) } else { Err(problems) }
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

    fn row(mut self, prefix: &MessageIdPrefix) -> Result<NewRow, Vec<LineProblem>> {
        let (payload, content_type) = self.payload();
        let row = NewRow {
            outbox_id: self.uuid("outbox_id").unwrap_or_else(fresh_outbox_id),
            message_id: self.text("message_id").unwrap_or_else(|| fresh_message_id(prefix)),
            source_name: self.required_text("source"),
            destination: self.required_text("destination"),
            message_key: self.text("message_key"),
            event_type: self.required_text("event_type"),
            schema_version: self.integer("schema_version").unwrap_or(1),
            content_type: self.text("content_type").unwrap_or_else(|| content_type.to_owned()),
            schema_registry: self.text("schema_registry"),
            schema_subject: self.text("schema_subject"),
            schema_version_ref: self.integer("schema_version_ref"),
            schema_id: self.integer("schema_id"),
            schema_fingerprint: self.text("schema_fingerprint"),
            source_event_id: self.uuid("source_event_id"),
            source_global_position: self.integer("source_global_position"),
            causation_id: self.uuid("causation_id"),
            correlation_id: self.uuid("correlation_id"),
            traceparent: self.text("traceparent"),
            tracestate: self.text("tracestate"),
            payload,
            attributes: self.given("attributes").map(|value| value.get().to_owned()),
            occurred_at: self.time("occurred_at"),
            created_at: self.time("created_at"),
            next_attempt_at: self.time("next_attempt_at"),
        };
        // A field that could not be read has its problem already, and only a stand-in as its value.
        for found in row.problems() {
            if !self.problems.iter().any(|problem| problem.field.as_deref() == Some(found.field)) {
                self.problem(found.field, found.text);
            }
        }
        if self.problems.is_empty() { Ok(row) } else { Err(self.problems) }
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
