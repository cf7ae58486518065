//! A caller's own rule for rows that spent an attempt, over the backoff and `max_attempts` of their source.
//!
//! Nothing here ever touches a row that was sent, rejected or held back: only a spent attempt is asked about.

use std::time::Duration;

use super::message::Message;
use super::plan::Verdict;

/// Decides when a row that spent an attempt is due again, and whether at all.
///
/// A closure will do. It must not block. Rows whose lease ran out (their relay died) are requeued by `max_attempts` alone.
pub trait RetryPolicy: Send + Sync + 'static {
    /// What becomes of the row.
    fn after(&self, failed: &FailedAttempt<'_>) -> Retry;
}

impl<F: Fn(&FailedAttempt<'_>) -> Retry + Send + Sync + 'static> RetryPolicy for F {
    fn after(&self, failed: &FailedAttempt<'_>) -> Retry {
        self(failed)
    }
}

/// A row that spent an attempt.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct FailedAttempt<'a> {
    /// The row.
    pub message: &'a Message,
    /// Attempts it has spent, this one included.
    pub attempts: i64,
    /// Why, as it will stand in `last_error`; starts with a stable code word.
    pub error: &'a str,
    /// What the rules of its source say.
    pub rules: Retry,
}

/// What becomes of a row that spent an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Retry {
    /// Due again after this.
    After(Duration),
    /// Dead.
    Dead,
}

/// Asks the policy about every row that spent an attempt.
pub fn apply(policy: &dyn RetryPolicy, messages: &[Message], verdicts: &mut [Verdict]) {
    for (message, verdict) in messages.iter().zip(verdicts) {
        let (error, rules) = match verdict {
            Verdict::Failed { error, delay } => (error.clone(), Retry::After(*delay)),
            Verdict::Dead { error } => (error.clone(), Retry::Dead),
            Verdict::Sent
            | Verdict::Held { .. }
            | Verdict::Rejected(_)
            | Verdict::Skipped { .. }
            | Verdict::Returned { .. } => continue,
        };
        let failed = FailedAttempt { message, attempts: message.attempt_count, error: &error, rules };
        *verdict = match policy.after(&failed) {
            Retry::After(delay) => Verdict::Failed { error, delay },
            Retry::Dead => Verdict::Dead { error },
        };
    }
}
