//! The limits a topic has, looked up for the texts that say why its rows do not go out.
//!
//! Nothing here ever waits long or insists: without the right to see them (DESCRIBE_CONFIGS), or without an answer, they are unknown.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, ResourceSpecifier};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, oneshot};
use tokio::task::spawn_blocking;

use super::client::{Blueprint, QuietContext};

/// How long a limit is believed. An operator who just raised it reads an older number for so long at most.
const BELIEVED: Duration = Duration::from_secs(60);
/// Topics whose limits are remembered; beyond, all are forgotten and looked up again as they are needed.
const TOPICS_MAX: usize = 1_000;
/// How long one look may take.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// What a topic demands of its records and replicas, as far as it could be looked up.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Limits {
    /// `max.message.bytes`.
    pub(super) message_bytes_max: Option<usize>,
    /// `min.insync.replicas`.
    pub(super) in_sync_min: Option<usize>,
}

/// Limits by topic, with when they were looked up.
#[derive(Default)]
pub(super) struct TopicLimits(Mutex<HashMap<String, (Instant, Limits)>>);

impl TopicLimits {
    /// The topic's limits, looked up at most once a minute.
    pub(super) async fn of(&self, blueprint: &Blueprint, topic: &str) -> Limits {
        // Held over the look, so that rows of one topic that are refused together cost one.
        let mut limits = self.0.lock().await;
        if let Some((_, limits)) = limits.get(topic).filter(|(at, _)| at.elapsed() < BELIEVED) {
            return *limits;
        }
        let found = look_up(blueprint.clone(), topic.to_owned()).await.unwrap_or_default();
        if limits.len() >= TOPICS_MAX {
            limits.clear();
        }
        limits.insert(topic.to_owned(), (Instant::now(), found));
        found
    }
}

async fn look_up(blueprint: Blueprint, topic: String) -> Option<Limits> {
    let (answer, answered) = oneshot::channel();
    let runtime = Handle::current();
    spawn_blocking(move || {
        let Ok(admin) = blueprint.question::<AdminClient<QuietContext>>() else { return };
        let options = AdminOptions::new().request_timeout(Some(LOOK_MAX));
        let resource = ResourceSpecifier::Topic(&topic);
        let described = admin.describe_configs([&resource], &options);
        let resources = runtime.block_on(described).unwrap_or_default();
        let entries = || resources.iter().flatten().flat_map(|resource| &resource.entries);
        let limit = |name: &str| {
            entries().filter(|entry| entry.name == name).find_map(|entry| entry.value.as_ref()?.parse().ok())
        };
        let limits =
            Limits { message_bytes_max: limit("max.message.bytes"), in_sync_min: limit("min.insync.replicas") };
        let _ = answer.send(limits);
        // Dropping the client takes a moment, and the answer does not wait for it.
    });
    tokio::time::timeout(LOOK_MAX, answered).await.ok()?.ok()
}
