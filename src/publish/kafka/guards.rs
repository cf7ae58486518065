//! Topics whose records go through the careful lane for a while: whatever fails in the fast lane stops everything there.
//!
//! Nothing here ever judges a record, reads a clock or holds anything back: a guard costs speed, never an attempt or a wait.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::faults::make_room;

/// Topics that may be guarded at once. One more sets free the one whose guard ends first.
pub const GUARDED_MAX: usize = 1_000;
/// How long after the last fault of a topic, such as a permission that is missing: the next one would be as fatal.
pub const FAULT: Duration = Duration::from_secs(60);
/// How long a partition that gave no answer is guarded, unless it answers the careful lane sooner.
pub const SILENCE: Duration = Duration::from_secs(60);
/// How long after a batch was refused for what is in it. It doubles while the topic is soon refused again: it may take no batch
/// at all (a `max.message.bytes` below the client's `batch.size`), or get many rows that nobody can take.
pub const REFUSAL_MIN: Duration = Duration::from_secs(5);
/// Longest guard for refusals.
pub const REFUSAL_MAX: Duration = Duration::from_secs(600);

/// The guarded topics.
#[derive(Debug, Default)]
pub struct Guards {
    topics: HashMap<String, Guard>,
}

#[derive(Debug)]
struct Guard {
    /// Until when it holds, or held, for the whole topic.
    until: Instant,
    /// How long that is after a refusal.
    refusal: Duration,
    /// Until when it holds for a partition, or for records without one of their own.
    silent: HashMap<Option<i32>, Instant>,
}

impl Guards {
    /// The topic takes nothing, or not from us.
    pub fn failed(&mut self, topic: &str, now: Instant) {
        let guard = self.guard(topic, now);
        guard.until = guard.until.max(now + FAULT);
    }

    /// A batch was refused for what is in it, or in another record of it.
    pub fn refused(&mut self, topic: &str, now: Instant) {
        let guard = self.guard(topic, now);
        // Records that were on their way together fail together: that is one refusal.
        if now < guard.until {
            return;
        }
        let is_soon = now < guard.until + guard.refusal;
        guard.refusal = if is_soon { (guard.refusal * 2).min(REFUSAL_MAX) } else { REFUSAL_MIN };
        guard.until = now + guard.refusal;
    }

    /// A partition gave no answer, or, without one, whichever was chosen for a record without a key.
    pub fn silent(&mut self, topic: &str, partition: Option<i32>, now: Instant) {
        self.guard(topic, now).silent.insert(partition, now + SILENCE);
    }

    /// A partition acknowledged a record.
    pub fn answered(&mut self, topic: &str, partition: i32) {
        if let Some(guard) = self.topics.get_mut(topic) {
            guard.silent.remove(&Some(partition));
        }
    }

    /// Whether a record for this partition, or without one of its own, goes through the careful lane.
    #[must_use]
    pub fn is_guarded(&self, topic: &str, partition: Option<i32>, now: Instant) -> bool {
        let Some(guard) = self.topics.get(topic) else { return false };
        now < guard.until || guard.silent.get(&partition).is_some_and(|until| now < *until)
    }

    fn guard(&mut self, topic: &str, now: Instant) -> &mut Guard {
        if !self.topics.contains_key(topic) {
            make_room(&mut self.topics, GUARDED_MAX, Guard::end);
        }
        let new = || Guard { until: now, refusal: Duration::ZERO, silent: HashMap::new() };
        self.topics.entry(topic.to_owned()).or_insert_with(new)
    }
}

impl Guard {
    fn end(&self) -> Instant {
        self.silent.values().copied().fold(self.until, Instant::max)
    }
}
