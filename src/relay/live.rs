//! What may change while the relay runs: the rules of the sources, and the log level.
//!
//! Nothing here ever changes the policy of a loop: a source's loop that finds another policy in force ends, and the next one begins
//! once everything the old one had claimed is settled. Nothing else of a configuration takes effect before a restart.

use std::sync::{Arc, RwLock};

use super::Context;
use crate::config::{Change, Config, When};
use crate::domain::policy::SourceRules;

/// The configuration in force, replaced as a whole.
#[derive(Debug)]
pub(crate) struct Live {
    in_force: RwLock<Arc<Config>>,
}

/// What a change of the configuration did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reloaded {
    /// What is different now.
    pub applied: Vec<Change>,
    /// What would be different after a restart.
    pub needs_restart: Vec<Change>,
}

impl Live {
    pub(super) fn new(config: Arc<Config>) -> Self {
        Self { in_force: RwLock::new(config) }
    }

    /// The configuration in force.
    pub(super) fn now(&self) -> Arc<Config> {
        Arc::clone(&self.in_force.read().expect("no code panics while it holds this lock"))
    }

    /// The rules of a source, or `None` when it is not ours.
    pub(super) fn rules(&self, source_name: &str) -> Option<SourceRules> {
        self.now().rules(source_name).cloned()
    }

    fn replace(&self, config: Config) {
        *self.in_force.write().expect("no code panics while it holds this lock") = Arc::new(config);
    }
}

/// Puts in force what may change while the relay runs, all of it at once.
pub(super) fn reconfigure(ctx: &Context, new: &Config) -> Reloaded {
    let old = ctx.live.now();
    let (applied, needs_restart): (Vec<Change>, Vec<Change>) =
        old.changes(new).into_iter().partition(|change| change.when == When::Now);
    let now = old.with_live_parts_of(new);
    let (hash, policy_hash) = (now.hash(), now.policy_hash());
    ctx.live.replace(now);
    if policy_hash != old.policy_hash() {
        let instance = &ctx.config.relay.instance;
        ctx.store.policy_changed(instance, &policy_hash);
        ctx.maintenance_store.policy_changed(instance, &policy_hash);
    }
    ctx.board.reconfigured(hash, policy_hash, needs_restart.iter().map(|change| change.setting.clone()).collect());
    // Every loop looks at its rules as soon as it wakes; and rows may be ready under the new ones that were not under the old.
    ctx.changed_all();
    Reloaded { applied, needs_restart }
}
