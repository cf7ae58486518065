//! What differs between two configurations, by setting, and what of it can change while the relay runs.
//!
//! Nothing here ever shows a secret, and nothing here changes anything.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::print::{Printed, sections};
use super::problems::dotted;
use super::{Config, Fnv1a, Log, Origin, Relay};
use crate::domain::policy::Policy;

/// When a changed setting takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum When {
    /// At once, while the relay runs.
    Now,
    /// Only after a restart.
    AfterRestart,
}

/// One setting that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// Its dotted path.
    pub setting: String,
    /// The value in force, as TOML; a secret is `"***"`.
    pub old: String,
    /// The value asked for.
    pub new: String,
    /// When it takes effect.
    pub when: When,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} → {}", self.setting, self.old, self.new)
    }
}

impl Config {
    /// What differs in another configuration, setting by setting.
    #[must_use]
    pub fn changes(&self, new: &Self) -> Vec<Change> {
        let (old, new) = (settings(self), settings(new));
        let absent = Printed::Unset;
        let paths: BTreeSet<&Vec<String>> = old.keys().chain(new.keys()).collect();
        let changed = paths.into_iter().filter_map(|path| {
            let (old, new) = (old.get(path).unwrap_or(&absent), new.get(path).unwrap_or(&absent));
            (old != new).then(|| Change {
                setting: dotted(path),
                old: old.shown().to_owned(),
                new: new.shown().to_owned(),
                when: when(path),
            })
        });
        changed.collect()
    }

    /// This configuration with everything of another one that may change while the relay runs.
    #[must_use]
    pub fn with_live_parts_of(&self, new: &Self) -> Self {
        Self {
            defaults: new.defaults.clone(),
            sources: new.sources.clone(),
            relay: Relay { unlisted_sources: new.relay.unlisted_sources, ..self.relay.clone() },
            log: Log { level: new.log.level.clone(), ..self.log.clone() },
            ..self.clone()
        }
    }

    /// A hash of every setting but the instance's name and secrets: two relays that should be alike can be compared by it.
    #[must_use]
    pub fn hash(&self) -> String {
        let mut hash = Fnv1a::new();
        for (path, value) in settings(self).iter().filter(|(path, _)| *path != &["relay", "instance"]) {
            hash.bytes(dotted(path).as_bytes());
            hash.bytes(&[0xff]);
            hash.bytes(value.shown().as_bytes());
            hash.bytes(&[0xff]);
        }
        format!("{:08x}", hash.0)
    }
}

impl super::Loaded {
    /// Takes over a name that nobody set: each load draws another one, and that is no change.
    pub(crate) fn keep_drawn_instance(&mut self, before: &Self) {
        const INSTANCE: [&str; 2] = ["relay", "instance"];
        if self.origin(&INSTANCE) == Origin::Default && before.origin(&INSTANCE) == Origin::Default {
            self.config.relay.instance.clone_from(&before.config.relay.instance);
        }
    }
}

/// Every setting by its path.
fn settings(config: &Config) -> BTreeMap<Vec<String>, Printed> {
    // Only where something halts does `on_halt` mean anything.
    let halts = |section: &[&str]| match section {
        ["sources", name] => config.sources.get(*name).is_some_and(|rules| rules.policy == Policy::StopTheLine),
        _ => config.defaults.policy == Policy::StopTheLine,
    };
    let sections = sections(config, halts);
    sections
        .into_iter()
        .flat_map(|(section, entries)| {
            entries.into_iter().map(move |(name, value)| ([&section[..], &[name][..]].concat(), value))
        })
        .collect()
}

/// Routes belong here once there are any: they change with the sources.
fn when(path: &[String]) -> When {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    match path[..] {
        ["defaults" | "sources", ..] | ["relay", "unlisted_sources"] | ["log", "level"] => When::Now,
        _ => When::AfterRestart,
    }
}
