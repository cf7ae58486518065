//! The topics that rows are for: whether they take what is waiting, and keep it.
//!
//! Nothing here ever creates a topic or changes one.

use super::report::{Check, complete};
use super::{Demand, InUse};
use crate::config::Config;
use crate::domain::record::is_legal_topic;
use crate::publish::kafka::inspect::{Cluster, Description, Hidden, Settings};

/// Every check of this module; each is about one topic.
pub(super) const NAMES: [&str; 7] = [
    "topic.exists",
    "topic.write",
    "topic.partitions",
    "topic.max_message_bytes",
    "topic.compaction",
    "topic.replication",
    "topic.min_insync_replicas",
];

/// What headers and framing add to what was counted of a row.
const FRAME_OCTETS: i64 = 1_024;
/// Copies of a partition that survive a broker's maintenance and another's crash.
const REPLICAS: usize = 3;
const IN_SYNC: usize = 2;

pub(super) fn checks(config: &Config, cluster: &Cluster, in_use: &InUse) -> Vec<Check> {
    let mut checks = Vec::new();
    let in_use = match in_use {
        Ok(in_use) => in_use,
        Err(reason) => {
            complete(&mut checks, &NAMES, reason);
            return checks;
        }
    };
    if in_use.is_empty() {
        return vec![Check::ok("topic.exists", "no row waits or was sent lately, so no topic is in use")];
    }
    for (name, demand) in in_use {
        checks.extend(of_topic(config, cluster, name, *demand).into_iter().map(|check| check.about(name)));
    }
    checks
}

fn of_topic(config: &Config, cluster: &Cluster, name: &str, demand: Demand) -> Vec<Check> {
    let brokers = config.kafka.brokers.join(",");
    if !is_legal_topic(name) {
        return vec![Check::warn(
            "topic.exists",
            "not a legal topic name: its rows are rejected (kafka.invalid_topic)",
            "correct the destination that the producer writes",
        )];
    }
    let Some(topic) = cluster.topics.iter().find(|topic| topic.name == name) else { return Vec::new() };
    let grant = format!(
        "kafka-acls.sh --bootstrap-server {brokers} --add --allow-principal User:… --operation Write --operation Describe --topic {name}"
    );
    let description = match &topic.description {
        Ok(description) => description,
        Err(Hidden::Unknown) => return vec![unknown_topic(cluster, &brokers, name)],
        Err(Hidden::Forbidden) => {
            let reason = "the topic may not be seen, and so not written to (or it is not there)";
            return vec![Check::fail("topic.write", reason, grant)];
        }
        Err(reason @ Hidden::Other(_)) => {
            let mut checks = Vec::new();
            complete(&mut checks, &NAMES, &format!("the cluster does not say: {reason}"));
            return checks;
        }
    };
    let mut checks = vec![Check::ok("topic.exists", "it is there")];
    checks.push(match description.may_write {
        Some(true) => Check::ok("topic.write", "we may write to it"),
        Some(false) => Check::fail("topic.write", "we may not write to it", grant),
        None => Check::unknown("topic.write", "the cluster does not say what we may do"),
    });
    checks.push(partitions(description));
    match &topic.settings {
        Ok(settings) => {
            checks.push(size(config, &brokers, name, settings, demand));
            checks.push(compaction(&brokers, name, settings, demand));
            checks.push(replication(cluster, &brokers, description));
            checks.push(in_sync(&brokers, name, settings, description));
        }
        Err(reason) => {
            let reason = format!("its settings cannot be seen: {reason}");
            let remedy = format!(
                "kafka-acls.sh --bootstrap-server {brokers} --add --allow-principal User:… --operation DescribeConfigs --topic {name}"
            );
            for check in ["topic.max_message_bytes", "topic.compaction", "topic.min_insync_replicas"] {
                checks.push(Check::unknown(check, &reason).with_remedy(&remedy));
            }
            checks.push(replication(cluster, &brokers, description));
        }
    }
    checks
}

fn unknown_topic(cluster: &Cluster, brokers: &str, name: &str) -> Check {
    let copies = cluster.brokers.len().clamp(1, REPLICAS);
    let in_sync = if copies == REPLICAS { format!(" --config min.insync.replicas={IN_SYNC}") } else { String::new() };
    let create = format!(
        "kafka-topics.sh --bootstrap-server {brokers} --create --topic {name} --partitions 12 --replication-factor {copies}{in_sync}"
    );
    let by_itself =
        |settings: &Settings| settings.get("auto.create.topics.enable").is_some_and(|value| value == "true");
    if cluster.brokers.iter().filter_map(|broker| broker.settings.as_ref()).any(by_itself) {
        return Check::warn(
            "topic.exists",
            "it does not exist; the first record creates it with the brokers' defaults (auto.create.topics.enable)",
            create,
        );
    }
    Check::fail("topic.exists", "it does not exist: its rows wait", create)
}

fn partitions(description: &Description) -> Check {
    let leaderless: Vec<String> = description
        .partitions
        .iter()
        .filter(|partition| !partition.has_leader)
        .map(|partition| partition.id.to_string())
        .collect();
    let count = description.partitions.len();
    if leaderless.is_empty() {
        return Check::ok("topic.partitions", format!("{count}, each with a leader"));
    }
    Check::fail(
        "topic.partitions",
        format!("{} of {count} have no leader and take nothing: {}", leaderless.len(), leaderless.join(", ")),
        "start the brokers that have copies of them",
    )
}

fn size(config: &Config, brokers: &str, name: &str, settings: &Settings, demand: Demand) -> Check {
    const NAME: &str = "topic.max_message_bytes";
    let Some(limit) = settings.get("max.message.bytes").and_then(|text| text.parse::<i64>().ok()) else {
        return Check::unknown(NAME, "the cluster does not say");
    };
    let largest = demand.largest.saturating_add(if demand.largest > 0 { FRAME_OCTETS } else { 0 });
    let ours = i64::try_from(config.kafka.message_bytes_max).unwrap_or(i64::MAX);
    let setting = |octets: i64| format!("[kafka] message_bytes_max = \"{octets}B\"");
    if largest > limit {
        return Check::warn(
            NAME,
            format!(
                "{limit}, and a waiting row has about {largest} octets with its headers: unless it compresses well it is rejected \
                 (kafka.message_too_large)"
            ),
            format!(
                "kafka-configs.sh --bootstrap-server {brokers} --alter --entity-type topics --entity-name {name} --add-config \
                 max.message.bytes={largest}"
            ),
        );
    }
    if largest > ours {
        return Check::warn(
            NAME,
            format!(
                "a waiting row has about {largest} octets, more than [kafka] message_bytes_max = {ours}: the relay rejects it"
            ),
            setting(largest),
        );
    }
    if limit > ours {
        return Check::warn(
            NAME,
            format!(
                "{limit}, more than [kafka] message_bytes_max = {ours}: rows in between are rejected although the topic takes them"
            ),
            setting(limit),
        );
    }
    let seen =
        if demand.largest > 0 { format!("; the largest waiting row seen has about {largest}") } else { String::new() };
    Check::ok(NAME, format!("{limit} octets{seen}"))
}

fn compaction(brokers: &str, name: &str, settings: &Settings, demand: Demand) -> Check {
    const NAME: &str = "topic.compaction";
    let Some(policy) = settings.get("cleanup.policy") else {
        return Check::unknown(NAME, "the cluster does not say");
    };
    if policy.split(',').any(|part| part.trim() == "compact") && demand.keyless > 0 {
        return Check::warn(
            NAME,
            format!(
                "the topic is compacted and takes no record without a key; of the rows seen {} have none",
                demand.keyless
            ),
            format!(
                "kafka-configs.sh --bootstrap-server {brokers} --alter --entity-type topics --entity-name {name} --add-config \
                 cleanup.policy=delete  # or let the producer set message_key"
            ),
        );
    }
    Check::ok(NAME, format!("cleanup.policy is {policy}"))
}

fn replication(cluster: &Cluster, brokers: &str, description: &Description) -> Check {
    const NAME: &str = "topic.replication";
    let copies = description.partitions.iter().map(|partition| partition.replicas).min().unwrap_or_default();
    if copies >= REPLICAS {
        return Check::ok(NAME, format!("{copies} copies of each partition"));
    }
    let (copies, lost) = match copies {
        0 | 1 => ("one copy".to_owned(), "a broker that is lost takes its records with it"),
        copies => (format!("{copies} copies"), "one broker down leaves a single copy"),
    };
    Check::warn(
        NAME,
        format!("{copies} of each partition, on {} listed brokers: {lost}", cluster.brokers.len()),
        format!(
            "kafka-reassign-partitions.sh --bootstrap-server {brokers} --reassignment-json-file FILE --execute  # FILE names {REPLICAS} \
             replicas of each partition"
        ),
    )
}

fn in_sync(brokers: &str, name: &str, settings: &Settings, description: &Description) -> Check {
    const NAME: &str = "topic.min_insync_replicas";
    let Some(least) = settings.get("min.insync.replicas").and_then(|text| text.parse::<usize>().ok()) else {
        return Check::unknown(NAME, "the cluster does not say");
    };
    let copies = description.partitions.iter().map(|partition| partition.replicas).min().unwrap_or_default();
    let in_sync = description.partitions.iter().map(|partition| partition.in_sync).min().unwrap_or_default();
    let set = |least: usize| {
        format!(
            "kafka-configs.sh --bootstrap-server {brokers} --alter --entity-type topics --entity-name {name} --add-config \
             min.insync.replicas={least}"
        )
    };
    if in_sync < least {
        return Check::fail(
            NAME,
            format!("{least}, and a partition has {in_sync} copies in sync (of {copies}): it takes nothing"),
            format!(
                "start the brokers that have copies of it; or, with fewer copies for ever:\n{}",
                set(copies.min(IN_SYNC))
            ),
        );
    }
    if in_sync < copies {
        return Check::warn(
            NAME,
            format!("{least}, and a partition has {in_sync} of {copies} copies in sync"),
            "start the brokers that have copies of it, and see their logs",
        );
    }
    if least < IN_SYNC {
        // With as many copies as must be in sync, the first broker that is down stops the topic.
        let first = if copies > IN_SYNC { "" } else { "# first give it more copies (topic.replication), then:\n" };
        return Check::warn(
            NAME,
            format!("{least}: a record counts as acknowledged when one broker has it, and is lost with that broker"),
            format!("{first}{}", set(IN_SYNC)),
        );
    }
    if least >= copies {
        return Check::warn(NAME, format!("{least} of {copies} copies: one broker down stops the topic"), set(IN_SYNC));
    }
    Check::ok(NAME, format!("{least} of {copies} copies, all in sync"))
}
