//! One poll statement for all idle sources, so that a thousand of them do not cost a thousand queries.
//!
//! Nothing here ever claims: a source that has something new is woken and looks for itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use crate::domain::message::Position;

/// Sources whose poll is due this soon are asked in the same statement, and so are those whose pause is half over: a probe more
/// costs less than a statement of their own, and from then on they are due together.
const GATHER: Duration = Duration::from_millis(1);

/// Idle sources and what they wait for.
#[derive(Debug)]
pub struct Poller {
    idle: Mutex<HashMap<Arc<str>, Idle>>,
    changed: Notify,
    interval_max: Duration,
}

#[derive(Debug)]
struct Idle {
    from: Position,
    due_at: Instant,
    interval: Duration,
    wake: Arc<Notify>,
}

impl Poller {
    /// Makes a poller whose pauses grow up to a maximum.
    #[must_use]
    pub fn new(interval_max: Duration) -> Self {
        Self { idle: Mutex::new(HashMap::new()), changed: Notify::new(), interval_max }
    }

    /// Watches a source: `wake` is notified once it has a live row behind `from`. The first look is after `interval`, later ones
    /// further apart.
    pub fn watch(&self, source: &Arc<str>, from: Position, interval: Duration, wake: &Arc<Notify>) {
        let idle = Idle { from, due_at: Instant::now() + interval, interval, wake: Arc::clone(wake) };
        self.lock().insert(Arc::clone(source), idle);
        self.changed.notify_one();
    }

    /// Stops watching a source.
    pub fn unwatch(&self, source: &Arc<str>) {
        self.lock().remove(source);
    }

    /// Waits until at least one source is due, and returns all that are.
    pub async fn due(&self) -> Vec<(Arc<str>, Position)> {
        loop {
            let changed = self.changed.notified();
            let now = Instant::now();
            let (due, next) = {
                let idle = self.lock();
                let next = idle.values().map(|idle| idle.due_at).min();
                let mut due = Vec::new();
                if next.is_some_and(|at| at <= now + GATHER) {
                    let soon = |idle: &Idle| idle.due_at <= now + GATHER.max(idle.interval / 2);
                    let asked = idle.iter().filter(|(_, idle)| soon(idle));
                    due.extend(asked.map(|(source, idle)| (Arc::clone(source), idle.from)));
                }
                (due, next)
            };
            if !due.is_empty() {
                return due;
            }
            match next {
                None => changed.await,
                Some(at) => {
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep_until(at.into()) => {}
                    }
                }
            }
        }
    }

    /// Takes in an answer: wakes the sources that have something, and moves the others' next look.
    pub fn answered(&self, asked: &[(Arc<str>, Position)], found: &[String]) {
        let now = Instant::now();
        let mut idle = self.lock();
        for (source, from) in asked {
            if found.iter().any(|name| **name == **source) {
                // A source that began to watch from elsewhere meanwhile is asked again.
                if idle.get(source).is_some_and(|idle| idle.from == *from)
                    && let Some(idle) = idle.remove(source)
                {
                    idle.wake.notify_one();
                }
            } else if let Some(idle) = idle.get_mut(source) {
                idle.interval = (idle.interval * 2).min(self.interval_max);
                idle.due_at = now + idle.interval;
            }
        }
    }

    /// The statement failed: everybody waits a little longer.
    pub fn failed(&self, asked: &[(Arc<str>, Position)], pause: Duration) {
        let now = Instant::now();
        let mut idle = self.lock();
        for (source, _) in asked {
            if let Some(idle) = idle.get_mut(source) {
                idle.due_at = now + pause;
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, Idle>> {
        self.idle.lock().expect("no code panics while it holds this lock")
    }
}
