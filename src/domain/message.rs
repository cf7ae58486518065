//! A claimed row as the rest of the program sees it, and the instants and positions of the table.
//!
//! Nothing here ever fails on a legal row: `infinity` and far dates are values like any other.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use jiff::SignedDuration;
use jiff::civil::DateTime;
use uuid::Uuid;

/// An instant of the database: microseconds since 2000-01-01 00:00:00 UTC, as a `timestamptz` is stored.
///
/// `i64::MAX` is `infinity` and `i64::MIN` is `-infinity`. The full range of the column type fits, so a row with an odd
/// instant never breaks the batch it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PgTime(pub i64);

/// Microseconds between the Unix epoch and the epoch of [`PgTime`] (2000-01-01).
const PG_EPOCH_UNIX_MICROS: i64 = 946_684_800_000_000;

impl PgTime {
    /// `infinity`: later than every instant.
    pub const INFINITY: Self = Self(i64::MAX);
    /// `-infinity`: earlier than every instant.
    pub const NEG_INFINITY: Self = Self(i64::MIN);

    /// Returns microseconds since the Unix epoch, or `None` for the infinities and instants that do not fit.
    #[must_use]
    pub fn unix_micros(self) -> Option<i64> {
        if self == Self::INFINITY || self == Self::NEG_INFINITY {
            return None;
        }
        self.0.checked_add(PG_EPOCH_UNIX_MICROS)
    }

    /// RFC 3339 in UTC with milliseconds, for people; the infinities and instants beyond the years that has are `infinity` and `-infinity`.
    #[must_use]
    pub fn rfc3339(self) -> String {
        match self.unix_micros().and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok()) {
            Some(at) => format!("{at:.3}"),
            None if self.0 < 0 => "-infinity".to_owned(),
            None => "infinity".to_owned(),
        }
    }

    /// Makes an instant from microseconds since the Unix epoch, saturating at the infinities.
    #[must_use]
    pub fn from_unix_micros(micros: i64) -> Self {
        Self(micros.saturating_sub(PG_EPOCH_UNIX_MICROS))
    }
}

/// ISO 8601 in UTC, whatever the instant: `infinity`, and years beyond four digits with their sign.
impl fmt::Display for PgTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// The calendar repeats itself every 400 years.
        const CYCLE_MICROS: i64 = 146_097 * 86_400 * 1_000_000;
        const EPOCH: DateTime = DateTime::constant(2000, 1, 1, 0, 0, 0, 0);
        match *self {
            Self::INFINITY => return f.write_str("infinity"),
            Self::NEG_INFINITY => return f.write_str("-infinity"),
            Self(_) => {}
        }
        let (cycles, rest) = (self.0.div_euclid(CYCLE_MICROS), self.0.rem_euclid(CYCLE_MICROS));
        let civil =
            EPOCH.checked_add(SignedDuration::from_micros(rest)).expect("years 2000 to 2400 are in the calendar");
        let year = i64::from(civil.year()) + 400 * cycles;
        let text = civil.to_string();
        let (_, after_year) = text.split_at(4);
        match year {
            0..=9999 => write!(f, "{year:04}{after_year}Z"),
            _ => write!(f, "{year:+07}{after_year}Z"),
        }
    }
}

/// Down to whole microseconds; what does not fit is an infinity.
impl From<SystemTime> for PgTime {
    fn from(time: SystemTime) -> Self {
        let micros = |span: std::time::Duration| i64::try_from(span.as_micros()).unwrap_or(i64::MAX);
        match time.duration_since(UNIX_EPOCH) {
            Ok(since) if micros(since) == i64::MAX => Self::INFINITY,
            Ok(since) => Self::from_unix_micros(micros(since)),
            Err(before) => {
                let span = before.duration();
                let rounded_up = i64::from(!span.subsec_nanos().is_multiple_of(1000));
                Self::from_unix_micros(micros(span).saturating_neg().saturating_sub(rounded_up))
            }
        }
    }
}

/// A row's place in the order of the contract: (created_at, outbox_id).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Start of the producer's transaction.
    pub created_at: PgTime,
    /// Tie-breaker between rows of one transaction; compared byte by byte, as PostgreSQL does.
    pub outbox_id: Uuid,
}

impl Position {
    /// Before every row.
    pub const START: Self = Self { created_at: PgTime::NEG_INFINITY, outbox_id: Uuid::nil() };

    /// The first possible position at an instant.
    #[must_use]
    pub fn at(created_at: PgTime) -> Self {
        Self { created_at, outbox_id: Uuid::nil() }
    }
}

/// A payload that was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Withheld {
    /// How large it is.
    pub octets: usize,
    /// `[kafka] message_bytes_max`, which it exceeds.
    pub octets_max: usize,
}

/// One claimed row: everything the wire needs, and the fence that proves the claim when it is settled.
#[derive(Clone)]
pub struct Message {
    /// Primary key of the row.
    pub outbox_id: Uuid,
    /// The consumer's dedupe key, unique together with the source.
    pub message_id: String,
    /// Producing bounded context (column `source`).
    pub source_name: String,
    /// Kafka topic.
    pub destination: String,
    /// Partition and ordering key; `None` bypasses the per-key order.
    pub message_key: Option<String>,
    /// Kind of event.
    pub event_type: String,
    /// Version of the event's schema.
    pub schema_version: i64,
    /// Media type of the payload.
    pub content_type: String,
    /// Schema registry, when one is used.
    pub schema_registry: Option<String>,
    /// Subject in the registry.
    pub schema_subject: Option<String>,
    /// Version in the registry.
    pub schema_version_ref: Option<i64>,
    /// Id in the registry.
    pub schema_id: Option<i64>,
    /// Fingerprint of the schema.
    pub schema_fingerprint: Option<String>,
    /// Event this one was derived from.
    pub source_event_id: Option<Uuid>,
    /// Position of that event in its log.
    pub source_global_position: Option<i64>,
    /// Event that caused this one.
    pub causation_id: Option<Uuid>,
    /// Correlation of a whole conversation.
    pub correlation_id: Option<Uuid>,
    /// W3C trace context, passed through untouched.
    pub traceparent: Option<String>,
    /// W3C trace state, sent only beside a traceparent.
    pub tracestate: Option<String>,
    /// Value of the record; empty is an empty value, never a tombstone.
    pub payload: Bytes,
    /// Octets of a payload too large for any broker, which was therefore not read: [`Self::payload`] is empty, and no record can be
    /// built of the row.
    pub payload_withheld: Option<Withheld>,
    /// `attributes` as PostgreSQL prints the jsonb value.
    pub attributes: Option<String>,
    /// When the event happened.
    pub occurred_at: PgTime,
    /// Attempts including this claim.
    pub attempt_count: i64,
    /// Why the last attempt failed.
    pub last_error: Option<String>,
    /// Start of the producer's transaction.
    pub created_at: PgTime,
    /// The claim's stamp (database time), second half of the fence beside `attempt_count`.
    pub updated_at: PgTime,
}

/// Says which row it is, and nothing of what is in it.
impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("outbox_id", &self.outbox_id)
            .field("destination", &self.destination)
            .field("created_at", &self.created_at)
            .field("attempt_count", &self.attempt_count)
            .field("updated_at", &self.updated_at)
            .field("payload_octets", &self.payload_octets())
            .finish_non_exhaustive()
    }
}

impl Message {
    /// Octets of the payload, read or not.
    #[must_use]
    pub fn payload_octets(&self) -> usize {
        self.payload_withheld.map_or(self.payload.len(), |withheld| withheld.octets)
    }

    /// The row's place in the order.
    #[must_use]
    pub fn position(&self) -> Position {
        Position { created_at: self.created_at, outbox_id: self.outbox_id }
    }

    /// Whether an earlier claim of this row did not end in a verdict that returned its attempt.
    #[must_use]
    pub fn attempted_before(&self) -> bool {
        self.attempt_count > 1
    }
}
