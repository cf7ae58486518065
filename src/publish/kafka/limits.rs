//! The size limit a topic has, looked up for the text of a rejection.
//!
//! Nothing here ever decides anything: without the right to see it, or without an answer, the text goes without the number.

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

/// Limits by topic, with when they were looked up.
#[derive(Default)]
pub(super) struct TopicLimits(Mutex<HashMap<String, (Instant, Option<usize>)>>);

impl TopicLimits {
    /// The topic's `max.message.bytes`, looked up at most once a minute.
    pub(super) async fn bytes_max(&self, blueprint: &Blueprint, topic: &str) -> Option<usize> {
        // Held over the look, so that rows of one topic that are refused together cost one.
        let mut limits = self.0.lock().await;
        if let Some((_, limit)) = limits.get(topic).filter(|(at, _)| at.elapsed() < BELIEVED) {
            return *limit;
        }
        let limit = look_up(blueprint.clone(), topic.to_owned()).await;
        if limits.len() >= TOPICS_MAX {
            limits.clear();
        }
        limits.insert(topic.to_owned(), (Instant::now(), limit));
        limit
    }
}

async fn look_up(blueprint: Blueprint, topic: String) -> Option<usize> {
    let (answer, answered) = oneshot::channel();
    let runtime = Handle::current();
    spawn_blocking(move || {
        let Ok(admin) = blueprint.question::<AdminClient<QuietContext>>() else { return };
        let options = AdminOptions::new().request_timeout(Some(LOOK_MAX));
        let resource = ResourceSpecifier::Topic(&topic);
        let described = admin.describe_configs([&resource], &options);
        let resources = runtime.block_on(described).unwrap_or_default();
        let entries = resources.into_iter().flatten().flat_map(|resource| resource.entries);
        let limit =
            entries.filter(|entry| entry.name == "max.message.bytes").find_map(|entry| entry.value?.parse().ok());
        let _ = answer.send(limit);
        // Dropping the client takes a moment, and the answer does not wait for it.
    });
    tokio::time::timeout(LOOK_MAX, answered).await.ok()?.ok()?
}
