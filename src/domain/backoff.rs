//! Delays between attempts.
//!
//! Nothing here ever draws: the random number in [0, 1) is an argument.

use std::time::Duration;

/// How the delay grows with the attempts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackoffKind {
    /// Always `initial`.
    Constant,
    /// `min(max, initial × multiplier^(attempt − 1))`.
    Exponential,
}

/// A validated backoff: 0 < initial ≤ max, multiplier ≥ 1, 0 ≤ jitter ≤ 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Backoff {
    /// Constant or exponential.
    pub kind: BackoffKind,
    /// Delay after the first attempt.
    pub initial: Duration,
    /// Growth per attempt (exponential only).
    pub multiplier: f64,
    /// Upper bound of every delay.
    pub max: Duration,
    /// Spread around the delay, as a fraction of it.
    pub jitter: f64,
}

impl Backoff {
    /// Returns the delay after the given attempt (1 is the first), for a draw in [0, 1).
    ///
    /// The delay is multiplied by `1 − j + 2j·draw` and clamped to [initial, max] (requirements C 4.179).
    #[must_use]
    pub fn delay(&self, attempt: i64, draw: f64) -> Duration {
        let (initial, max) = (self.initial.as_secs_f64(), self.max.as_secs_f64());
        let plain = match self.kind {
            BackoffKind::Constant => initial,
            // powf saturates to infinity, which `min` brings back to the maximum.
            BackoffKind::Exponential => initial * self.multiplier.powf((attempt.max(1) - 1) as f64),
        };
        let spread = plain.min(max) * (1.0 - self.jitter + 2.0 * self.jitter * draw);
        // Clamped once more as durations: seconds as a float neither hold every nanosecond nor the longest duration.
        Duration::try_from_secs_f64(spread.max(0.0)).unwrap_or(self.max).clamp(self.initial.min(self.max), self.max)
    }
}
