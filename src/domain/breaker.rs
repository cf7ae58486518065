//! The breaker of one source: when row after row ends unsent, something is wrong with all of them, and a person should look.
//!
//! Nothing here ever loses a row: it only keeps more of them from being judged. Pure: instants are arguments.

use std::time::{Duration, Instant};

/// Terminal verdicts in a row, without an acknowledgement between them, that open it.
pub const STREAK_MAX: u64 = 20;
/// How long it stays open before one row is tried; doubles with each try that ends unsent too.
const REST_MIN: Duration = Duration::from_secs(60);
const REST_MAX: Duration = Duration::from_secs(600);

/// What may be claimed now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allowance {
    /// Anything.
    All,
    /// One row, to see whether rows get through again.
    One,
    /// Nothing until then.
    Nothing(Instant),
}

/// What a verdict changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Nothing.
    None,
    /// It opened, or stays open for longer.
    Opened,
    /// Rows get through again.
    Closed,
}

/// The breaker of one source.
#[derive(Debug, Default)]
pub struct Breaker {
    streak: u64,
    /// Open, with the instant of the next try and how long the last rest was.
    open: Option<(Instant, Duration)>,
}

impl Breaker {
    /// Takes in what a pass settled: rows acknowledged, and rows that ended dead or rejected.
    pub fn settled(&mut self, sent: u64, terminal: u64, now: Instant) -> Change {
        if sent > 0 {
            return self.close();
        }
        self.streak = self.streak.saturating_add(terminal);
        if terminal == 0 || self.streak < STREAK_MAX {
            return Change::None;
        }
        let rest = match self.open {
            None => REST_MIN,
            // Passes that were in flight when it opened say nothing new.
            Some((until, _)) if now < until => return Change::None,
            Some((_, rest)) => (rest * 2).min(REST_MAX),
        };
        self.open = Some((now + rest, rest));
        Change::Opened
    }

    /// Closes it: a row got through, or an operator says that rows will.
    pub fn close(&mut self) -> Change {
        let was_open = self.open.take().is_some();
        self.streak = 0;
        if was_open { Change::Closed } else { Change::None }
    }

    /// What may be claimed now.
    #[must_use]
    pub fn allowance(&self, now: Instant) -> Allowance {
        match self.open {
            None => Allowance::All,
            Some((until, _)) if now < until => Allowance::Nothing(until),
            Some(_) => Allowance::One,
        }
    }
}
