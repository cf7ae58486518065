//! How many partitions each topic has, as the cluster said: the fast lane chooses among them.
//!
//! Nothing here ever asks: what is not known, or not known any more, is somebody else's to find out.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a number is believed, as in Java clients (`metadata.max.age.ms`): new partitions are used after so long at most.
const BELIEVED: Duration = Duration::from_secs(300);
/// How long an old number is used on when nobody answers the question for a new one.
const ASK_AGAIN: Duration = Duration::from_secs(10);
/// Topics whose numbers are remembered; beyond, all are forgotten and asked for again as they are needed.
const TOPICS_MAX: usize = 10_000;

/// The numbers of partitions.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<HashMap<String, Known>>);

#[derive(Debug, Clone, Copy)]
struct Known {
    partitions: i32,
    ask_at: Instant,
}

impl Counts {
    /// Those that have to be asked about. Each is returned to one caller at a time as long as an old number will do.
    pub(super) fn unknown_among<'t>(&self, topics: Vec<&'t str>, now: Instant) -> Vec<&'t str> {
        let mut known = self.lock();
        let is_unknown = |topic: &&str| match known.get_mut(*topic) {
            None => true,
            Some(known) if known.ask_at > now => false,
            Some(known) => {
                known.ask_at = now + ASK_AGAIN;
                true
            }
        };
        topics.into_iter().filter(is_unknown).collect()
    }

    /// How many partitions a topic has, when that is known.
    pub(super) fn of(&self, topic: &str) -> Option<i32> {
        self.lock().get(topic).map(|known| known.partitions)
    }

    /// The cluster said so.
    pub(super) fn learn(&self, topic: &str, partitions: i32, now: Instant) {
        let mut known = self.lock();
        if known.len() >= TOPICS_MAX && !known.contains_key(topic) {
            known.clear();
        }
        known.insert(topic.to_owned(), Known { partitions, ask_at: now + BELIEVED });
    }

    /// Something says that the number is wrong.
    pub(super) fn forget(&self, topic: &str) {
        self.lock().remove(topic);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
