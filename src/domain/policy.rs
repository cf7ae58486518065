//! The four ordering policies, and the rules of one source.
//!
//! Nothing here ever knows about SQL: `store::claim` turns a policy into a statement, `plan` into lanes.

use std::fmt;
use std::str::FromStr;

use super::backoff::Backoff;

/// What must reach the broker in order (contract §3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// In order per (source, message_key); a null key bypasses.
    PerKeyHeadOfLine,
    /// In order over the whole source, any key or none.
    PerSourceStream,
    /// In order over the whole source, one at a time; the first failure halts the source.
    StopTheLine,
    /// No order.
    BestEffort,
}

impl Policy {
    /// Every policy, in the order of the contract.
    pub const ALL: [Self; 4] = [Self::PerKeyHeadOfLine, Self::PerSourceStream, Self::StopTheLine, Self::BestEffort];

    /// The name used in configuration, metrics and `/status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PerKeyHeadOfLine => "per_key_head_of_line",
            Self::PerSourceStream => "per_source_stream",
            Self::StopTheLine => "stop_the_line",
            Self::BestEffort => "best_effort",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or(())
    }
}

/// What a failure on `stop_the_line` does to the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnHalt {
    /// The source waits until the failed row is due again.
    Retry,
    /// The source waits until an operator resumes it.
    Hold,
}

impl OnHalt {
    /// The name used in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Retry => "retry",
            Self::Hold => "hold",
        }
    }
}

/// The rules of one source: its section of the configuration over `[defaults]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SourceRules {
    /// Ordering policy.
    pub policy: Policy,
    /// Only meaningful for [`Policy::StopTheLine`].
    pub on_halt: OnHalt,
    /// Attempts a row may spend before it is dead, 1 to 1,000.
    pub max_attempts: u32,
    /// Delay between attempts.
    pub backoff: Backoff,
}
