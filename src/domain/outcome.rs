//! What a publisher says of each row it was given.
//!
//! An outcome is never an `Err`: what happens to a message is data, and only `plan::partition` turns it into a verdict.

use std::time::Duration;

/// What the broker, or the publisher on its behalf, said of one row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Written and acknowledged by all in-sync replicas.
    Acked {
        /// Partition the record landed in.
        partition: i32,
        /// Its offset there.
        offset: i64,
        /// Whether it may lie there twice: handed over before under the same claim, without a verdict.
        maybe_twice: bool,
    },
    /// Can never be accepted; the row is terminal and its lane goes on.
    Rejected(Rejection),
    /// Not written; spends an attempt. The text starts with a stable code word, `kafka.some_code: …`.
    Failed {
        /// Text for `last_error`.
        error: String,
    },
    /// Handed over without a verdict: it may or may not have been written. Spends an attempt only when the row is to blame.
    Unknown(Setback),
    /// Surely not written. Spends an attempt only when the row is to blame.
    NotSent(Setback),
}

impl Outcome {
    /// Acknowledged, by a broker without partitions and offsets.
    #[must_use]
    pub fn acked() -> Self {
        Self::Acked { partition: -1, offset: -1, maybe_twice: false }
    }

    /// Not written; spends an attempt. The text starts with a stable code word.
    #[must_use]
    pub fn failed(error: impl Into<String>) -> Self {
        Self::Failed { error: error.into() }
    }

    /// Whether the next record of the lane may be handed over: this one was written, or never will be.
    #[must_use]
    pub fn lets_lane_go_on(&self) -> bool {
        match self {
            Self::Acked { .. } | Self::Rejected(_) => true,
            Self::Failed { .. } | Self::Unknown(_) | Self::NotSent(_) => false,
        }
    }
}

/// Why a row can never be accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// Stable code, `^[a-z][a-z0-9._-]{0,63}$`, such as `kafka.message_too_large`.
    pub code: String,
    /// Explanation for people: side, topic, size and limit, the setting to change. 1 to 1,024 octets once stored.
    pub detail: String,
}

impl Rejection {
    /// Makes a rejection whose code and detail satisfy the checks of the table.
    ///
    /// # Panics
    /// When the code does not match `^[a-z][a-z0-9._-]{0,63}$`: codes are written in this program, not taken from outside.
    #[must_use]
    pub fn new(code: impl Into<String>, detail: impl AsRef<str>) -> Self {
        let code = code.into();
        assert!(is_rejection_code(&code), "rejection code {code:?} does not match ^[a-z][a-z0-9._-]{{0,63}}$");
        Self { code, detail: rejection_detail(detail.as_ref()) }
    }
}

/// Longest `last_error`, in octets.
pub const LAST_ERROR_OCTETS_MAX: usize = 4096;

/// Longest `rejection_detail` that the table takes, in octets.
pub const REJECTION_DETAIL_OCTETS_MAX: usize = 1024;

/// Whether the table takes this as a `rejection_code`: `^[a-z][a-z0-9._-]{0,63}$`.
#[must_use]
pub fn is_rejection_code(code: &str) -> bool {
    let tail = |octet: u8| octet.is_ascii_lowercase() || octet.is_ascii_digit() || matches!(octet, b'.' | b'_' | b'-');
    code.len() <= 64 && code.starts_with(|first: char| first.is_ascii_lowercase()) && code.bytes().all(tail)
}

/// Makes a text fit for `last_error`: no NUL, which PostgreSQL refuses, and at most 4,096 octets, cut between characters.
#[must_use]
pub fn last_error(text: &str) -> String {
    bounded(text, LAST_ERROR_OCTETS_MAX)
}

/// Makes a text fit for `rejection_detail`: no NUL, and 1 to 1,024 octets, cut between characters.
#[must_use]
pub fn rejection_detail(text: &str) -> String {
    // The table refuses an empty detail, and null would lose that there was a reason.
    bounded(if text.is_empty() { "no detail" } else { text }, REJECTION_DETAIL_OCTETS_MAX)
}

/// The text without NUL, cut between two characters so that at most so many octets remain.
fn bounded(text: &str, octets_max: usize) -> String {
    let mut fit = String::with_capacity(text.len().min(octets_max));
    for character in text.chars() {
        let character = if character == '\0' { char::REPLACEMENT_CHARACTER } else { character };
        if fit.len() + character.len_utf8() > octets_max {
            break;
        }
        fit.push(character);
    }
    fit
}

/// Why a row got no verdict, whose fault that is, and how long to leave it alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setback {
    /// Whose fault it is.
    pub blame: Blame,
    /// Text for `last_error`; starts with a stable code word.
    pub error: String,
    /// How long the row rests before it is due again (ignored for [`Blame::Row`], which backs off by its attempts).
    pub pause: Duration,
}

impl Setback {
    /// Makes a setback.
    #[must_use]
    pub fn new(blame: Blame, error: impl Into<String>, pause: Duration) -> Self {
        Self { blame, error: error.into(), pause }
    }
}

/// Whose fault it is that a row got no verdict (design §3, "Whose fault?").
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Blame {
    /// The row itself is suspect: it spends an attempt.
    Row,
    /// Its topic or partition: the attempt is returned.
    Topic,
    /// The whole cluster: the attempt is returned and claims pause.
    Cluster,
    /// We are stopping: the attempt is returned, due at once.
    Stop,
    /// An earlier record of its lane did not get through; it was never handed over.
    Lane,
}
