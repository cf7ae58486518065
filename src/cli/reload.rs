//! SIGHUP: the configuration is read again while the relay runs.
//!
//! A configuration with a problem changes nothing. Nothing here ever ends the process, and no line shows a secret.

use std::path::PathBuf;

use tokio::signal::unix::Signal;
use tracing::{error, info, warn};

use crate::config::{Config, Loaded, Overrides, environment};
use crate::relay::Handle;
use crate::telemetry::LogLevel;

/// How the configuration was loaded, so that it can be loaded again.
pub(super) struct Origin {
    pub path: Option<PathBuf>,
    pub flags: Overrides,
    pub loaded: Loaded,
}

/// Reads the configuration again at each signal, one after the other.
pub(super) async fn follow(mut hangup: Signal, origin: Origin, relay: Handle, level: LogLevel) {
    while hangup.recv().await.is_some() {
        let (path, flags) = (origin.path.clone(), origin.flags.clone());
        // It reads files.
        let loading = tokio::task::spawn_blocking(move || Config::load(path.as_deref(), environment(), flags));
        match loading.await {
            Ok(Ok(mut loaded)) => {
                loaded.keep_drawn_instance(&origin.loaded);
                apply(&loaded, &relay, &level);
            }
            Ok(Err(problems)) => {
                relay.board().reload_failed();
                for problem in problems.list() {
                    error!(%problem, "the configuration has a problem");
                }
                error!(problems = problems.list().len(), "the configuration was not reloaded: nothing changed");
            }
            Err(_) => {
                relay.board().reload_failed();
                error!("reading the configuration failed: nothing changed; please report this");
            }
        }
    }
}

fn apply(loaded: &Loaded, relay: &Handle, level: &LogLevel) {
    for warning in &loaded.warnings {
        warn!("{warning}");
    }
    // First, so that the lines below are written as the new level says; it was checked with everything else.
    if let Err(problem) = level.set(&loaded.config.log) {
        relay.board().reload_failed();
        error!(problem, "the configuration was not reloaded: nothing changed");
        return;
    }
    let reloaded = relay.reconfigure(&loaded.config);
    for change in &reloaded.applied {
        info!(setting = change.setting, old = change.old, new = change.new, "changed");
    }
    for change in &reloaded.needs_restart {
        warn!(
            setting = change.setting,
            old = change.old,
            new = change.new,
            "needs a restart: the old value stays in force"
        );
    }
    let (changed, needs_restart) = (reloaded.applied.len(), reloaded.needs_restart.len());
    info!(changed, needs_restart, policy_hash = relay.config().policy_hash(), "configuration reloaded");
}
