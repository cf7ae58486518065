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

/// Why a row can never be accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// Stable code, `^[a-z][a-z0-9._-]{0,63}$`, such as `kafka.message_too_large`.
    pub code: String,
    /// Explanation for people: side, topic, size and limit, the setting to change. 1 to 1,024 octets once stored.
    pub detail: String,
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
