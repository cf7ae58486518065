//! The grip on a relay that runs: stop it, wait for its end, wake it, look at it, change its rules.
//!
//! Nothing here ever waits for the relay but [`Handle::done`], and dropping a handle changes nothing.

use std::sync::Arc;

use tokio::sync::watch;

use super::health::{Board, Status};
use super::live::{self, Reloaded};
use super::{Context, End};
use crate::config::Config;
use crate::store::Store;

/// A relay that runs, or is about to. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    ctx: Arc<Context>,
    ended: watch::Receiver<Option<End>>,
}

impl Handle {
    pub(super) fn new(ctx: Arc<Context>, ended: watch::Receiver<Option<End>>) -> Self {
        Self { ctx, ended }
    }

    /// Begins to stop: no new claim, no new record; what is in flight is settled within `shutdown_grace`. Returns at once, and does
    /// nothing the second time. [`Handle::done`] waits for the end.
    pub fn stop(&self) {
        self.ctx.stop.cancel();
    }

    /// Waits until the relay has ended and let go of its connections, and says how. Any number of callers may wait.
    pub async fn done(&self) -> End {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(end) => end.clone().unwrap_or(End::Stopped { clean: false }),
            // The task that ran it was dropped half-way.
            Err(_) => End::Stopped { clean: false },
        }
    }

    /// Says that rows of a source, or of all when there is none, are new or due: they are looked for at once instead of at the next
    /// poll. A name that is not served does nothing.
    pub fn wake(&self, source: Option<&str>) {
        match source {
            Some(source) => self.ctx.changed(source),
            None => self.ctx.changed_all(),
        }
    }

    /// Says that a source may go on whose breaker opened, as `keiro-relay resume` does.
    pub fn resume(&self, source: &str) {
        self.ctx.resumed(source);
    }

    /// Everything that `/status` shows.
    #[must_use]
    pub fn status(&self) -> Status {
        self.ctx.board.snapshot().status()
    }

    /// The board behind [`Handle::status`], for `http::Server` and for metrics.
    #[must_use]
    pub fn board(&self) -> &Board {
        &self.ctx.board
    }

    /// The table as this relay sees it: what readers and operators' verbs are called on.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.ctx.store
    }

    /// The configuration in force.
    #[must_use]
    pub fn config(&self) -> Arc<Config> {
        self.ctx.live.now()
    }

    /// Puts in force what may change while the relay runs, all of it at once: the sources' rules, which sources are served, and the
    /// log level (which is only noted: the subscriber is the caller's). The answer says what else differs and needs a restart.
    ///
    /// A source whose policy changes finishes and settles what is in flight before anything of it is claimed under the new one.
    pub fn reconfigure(&self, config: &Config) -> Reloaded {
        live::reconfigure(&self.ctx, config)
    }
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("board", &self.ctx.board).finish_non_exhaustive()
    }
}
