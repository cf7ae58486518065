//! Follows the side table of pauses: what is paused, who is woken when that ends, and what is shown of it.
//!
//! Nothing here ever decides about a row (the claim statements leave paused rows alone), and nothing is forgotten because the database
//! is away: what was paused stays so until the table says otherwise.

use std::collections::BTreeSet;
use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio::sync::Notify;

use super::Context;
use super::pause_report::PausesShown;
use crate::domain::pause::{PauseTarget, Pauses};
use crate::store::{PausesError, StoreError};
use crate::telemetry::{LoopName, Stage};

/// How often the table is read without being told: behind a pooler nobody is told, and a pause may end by itself.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// What is paused, as every loop of one relay sees it.
#[derive(Debug, Default)]
pub(crate) struct Paused {
    now: RwLock<Arc<Pauses>>,
    /// Somebody said that the table changed.
    changed: Notify,
}

impl Paused {
    /// What is paused now.
    pub(super) fn now(&self) -> Arc<Pauses> {
        Arc::clone(&self.now.read().expect("no code panics while it holds this lock"))
    }

    /// Reads the table soon.
    pub(super) fn changed(&self) {
        self.changed.notify_one();
    }

    fn replace(&self, pauses: Pauses) -> Arc<Pauses> {
        let mut now = self.now.write().expect("no code panics while it holds this lock");
        std::mem::replace(&mut *now, Arc::new(pauses))
    }
}

/// Reads the table now and then, and whenever it is said to have changed.
pub(super) async fn follow(ctx: &Context) {
    let watch = ctx.board.register(LoopName::Pauses, None, ctx.turn_max());
    loop {
        tokio::select! {
            () = ctx.paused.changed.notified() => {}
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
        }
        match read(ctx).await {
            Ok(()) => watch.succeeded(),
            Err(error) => {
                watch.tick();
                ctx.store_failed(Stage::Maintenance, None, &error, None);
            }
        }
    }
}

/// Reads the table and tells whoever it concerns. Without the table, or without the right to read it, nothing is paused that was not
/// known to be, and that is shown.
///
/// # Errors
/// The database could not be asked.
pub(super) async fn read(ctx: &Context) -> Result<(), StoreError> {
    let (pauses, problem) = match ctx.store.pauses().await {
        Ok(pauses) => (Some(pauses), None),
        Err(error @ PausesError::Missing) => (Some(Pauses::default()), Some(error.to_string())),
        Err(PausesError::Store(error)) => return Err(error),
        Err(error) => (None, Some(error.to_string())),
    };
    if let Some(pauses) = pauses {
        let before = ctx.paused.replace(pauses);
        wake(ctx, &before, &ctx.paused.now());
    }
    ctx.board.pauses(PausesShown::of(&ctx.paused.now(), problem));
    Ok(())
}

/// Wakes the sources whose rows may go on.
fn wake(ctx: &Context, before: &Pauses, now: &Pauses) {
    let still: BTreeSet<&PauseTarget> = now.list().iter().map(|pause| &pause.target).collect();
    for pause in before.list().iter().filter(|pause| !still.contains(&pause.target)) {
        match &pause.target {
            PauseTarget::Topic(_) => return ctx.changed_all(),
            PauseTarget::Source(source_name) | PauseTarget::Lane { source_name, .. } => ctx.changed(source_name),
        }
    }
}
