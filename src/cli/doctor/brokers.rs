//! The brokers: whether anybody answers, whether each answers where the cluster says it does, what they speak.
//!
//! Nothing here ever looks at a topic.

use super::report::{Check, listed};
use crate::publish::kafka::inspect::{Broker, Cluster, Protocol};

/// Every check of this module.
pub(super) const NAMES: [&str; 3] = ["brokers.reachable", "brokers.listeners", "brokers.version"];

/// The first version of Produce that carries headers.
const PRODUCE_WITH_HEADERS: i16 = 3;
/// The lowest version of Fetch that Kafka 4 still speaks; of Produce it still admits to the oldest, for librdkafka's sake.
const FETCH_OF_KAFKA_4: i16 = 4;
/// The highest version of Fetch of the oldest brokers that this was tested with (Kafka 3.0).
const FETCH_OF_KAFKA_3: i16 = 12;

/// Nobody answers.
pub(super) fn unreachable(reason: &str) -> Check {
    Check::fail(
        "brokers.reachable",
        reason,
        "[kafka] brokers, and security.protocol, sasl.*, ssl.* in [kafka.properties]: keiro-relay config print",
    )
}

pub(super) fn checks(cluster: &Cluster) -> Vec<Check> {
    let addresses = listed(cluster.brokers.iter().map(|broker| broker.address.as_str()));
    let mut checks = vec![Check::ok("brokers.reachable", format!("the cluster lists {addresses}"))];
    for broker in &cluster.brokers {
        checks.push(listener(broker).about(format!("{} {}", broker.id, broker.address)));
    }
    checks.push(version(&cluster.brokers));
    checks
}

fn listener(broker: &Broker) -> Check {
    const NAME: &str = "brokers.listeners";
    match &broker.answers {
        Ok(()) => Check::ok(NAME, "it answers where the cluster says it listens"),
        Err(reason) => Check::fail(
            NAME,
            format!(
                "it does not answer from here where the cluster says it listens ({reason}): partitions it leads take nothing"
            ),
            "start it; or correct advertised.listeners of the broker; or let this host reach that address",
        ),
    }
}

fn version(brokers: &[Broker]) -> Check {
    const NAME: &str = "brokers.version";
    let spoken: Vec<Protocol> = brokers.iter().filter_map(|broker| broker.speaks).collect();
    let oldest = spoken.iter().min_by_key(|protocol| (protocol.produce.1, protocol.fetch.1));
    let Some(oldest) = oldest else { return Check::unknown(NAME, "no broker told what it speaks") };
    let text =
        format!("Produce {}..{}, Fetch {}..{}", oldest.produce.0, oldest.produce.1, oldest.fetch.0, oldest.fetch.1);
    match (oldest.produce, oldest.fetch) {
        ((_, highest), _) if highest < PRODUCE_WITH_HEADERS => {
            Check::fail(NAME, format!("{text}: older than Kafka 0.11, without headers"), "upgrade the brokers")
        }
        (_, (lowest, _)) if lowest >= FETCH_OF_KAFKA_4 => Check::ok(NAME, format!("{text}: Kafka 4")),
        (_, (_, highest)) if highest >= FETCH_OF_KAFKA_3 => Check::ok(NAME, format!("{text}: Kafka 2.7 to 3.9")),
        _ => Check::warn(
            NAME,
            format!("{text}: older than Kafka 2.7; Kafka 3 and 4 are supported"),
            "upgrade the brokers",
        ),
    }
}
