//! Which of several relays on one table serves a source, so that they do not claim the same rows in vain.
//!
//! Efficiency only: whoever claims, the statements alone keep the order. Each source has an advisory lock on a connection of its
//! own; who holds it serves the source, and who does not stands by, looking now and then whether rows wait too long.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::Notify;

use super::Context;
use crate::telemetry::{LoopName, Stage};

/// How often locks that others hold are tried again: a relay that dies is followed within this time.
const TRY_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before the connection that holds the locks is made anew.
const RECONNECT_PAUSE: Duration = Duration::from_secs(2);

/// Locks one relay holds at most. The server keeps all locks of all sessions in one table of a few thousand entries by default, and
/// whoever fills it fails every other session's statements.
const LOCKS_MAX: usize = 1_000;

/// The sources this relay serves by preference.
#[derive(Debug)]
pub(crate) struct Preference {
    /// `None` while nobody can tell (no connection to hold locks on, or a transaction pooler in between): then every source is
    /// ours, which is slower beside another relay, and right.
    ours: Mutex<Option<HashSet<Arc<str>>>>,
    changed: Notify,
}

impl Preference {
    pub(super) fn new() -> Self {
        Self { ours: Mutex::new(None), changed: Notify::new() }
    }

    /// Whether this relay serves the source. Who holds all the locks it may serves the sources beyond them as well: another relay,
    /// which tries for the same ones, stands by.
    pub(super) fn is_ours(&self, source: &str) -> bool {
        self.lock().as_ref().is_none_or(|ours| ours.len() >= LOCKS_MAX || ours.contains(source))
    }

    /// How many more locks may be held.
    fn room(&self) -> usize {
        LOCKS_MAX.saturating_sub(self.lock().as_ref().map_or(0, HashSet::len))
    }

    /// Returns when the preference of some source changed.
    pub(super) fn changed(&self) -> impl Future<Output = ()> + '_ {
        self.changed.notified()
    }

    /// Whether the lock of the source is held.
    fn holds(&self, source: &str) -> bool {
        self.lock().as_ref().is_some_and(|ours| ours.contains(source))
    }

    fn won(&self, sources: impl IntoIterator<Item = Arc<str>>) {
        let mut ours = self.lock();
        let before = ours.as_ref().map(HashSet::len);
        ours.get_or_insert_default().extend(sources);
        let after = ours.as_ref().map(HashSet::len);
        drop(ours);
        if before != after {
            self.changed.notify_waiters();
        }
    }

    /// Those of the sources whose locks are held and that nobody here serves any more.
    fn unserved(&self, serves: impl Fn(&str) -> bool) -> Vec<Arc<str>> {
        let ours = self.lock();
        ours.iter().flatten().filter(|source| !serves(source)).cloned().collect()
    }

    fn released(&self, sources: &[Arc<str>]) {
        if let Some(ours) = self.lock().as_mut() {
            ours.retain(|source| !sources.contains(source));
        }
    }

    fn unknown(&self) {
        *self.lock() = None;
        self.changed.notify_waiters();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<HashSet<Arc<str>>>> {
        self.ours.lock().expect("no code panics while it holds this lock")
    }
}

/// Keeps trying for the locks of all sources that are served.
pub(super) async fn hold(ctx: &Context) {
    let watch = ctx.board.register(LoopName::Listen, Some("preference"), ctx.turn_max());
    while !ctx.stop.is_cancelled() {
        watch.tick();
        match ctx.store.locks().await {
            Ok(locks) => loop {
                watch.tick();
                let unserved = {
                    let wakers = ctx.wakers();
                    ctx.preference.unserved(|source| wakers.contains_key(source))
                };
                if !unserved.is_empty() {
                    if let Err(error) = locks.unlock(&unserved).await {
                        ctx.store_failed(Stage::Claim, None, &error, None);
                        break;
                    }
                    ctx.preference.released(&unserved);
                }
                let mut wanted: Vec<Arc<str>> =
                    ctx.wakers().keys().filter(|source| !ctx.preference.holds(source)).cloned().collect();
                // In the same order in every relay, so that of two of them one gets all it may, and not each a part.
                wanted.sort_unstable();
                wanted.truncate(ctx.preference.room());
                // Asked also with nothing to try: it shows whether the connection, and with it every lock, is still there.
                match locks.try_lock(&wanted).await {
                    Ok(won) => {
                        watch.succeeded();
                        ctx.preference
                            .won(wanted.into_iter().filter(|source| won.iter().any(|name| **name == **source)));
                    }
                    Err(error) => {
                        ctx.store_failed(Stage::Claim, None, &error, None);
                        break;
                    }
                }
                tokio::select! {
                    () = tokio::time::sleep(TRY_INTERVAL) => {}
                    () = ctx.sources_changed.notified() => {}
                    () = ctx.stop.cancelled() => return,
                }
            },
            Err(error) => ctx.store_failed(Stage::Claim, None, &error, None),
        }
        ctx.preference.unknown();
        tokio::select! {
            () = tokio::time::sleep(RECONNECT_PAUSE) => {}
            () = ctx.stop.cancelled() => return,
        }
    }
}
