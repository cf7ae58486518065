//! `[kafka.properties]`: librdkafka's settings, those that are ours to decide, and our defaults.
//!
//! Nothing here ever connects: values are proved by building a client that knows no broker. No value of the user's is ever
//! shown, since any of them may be a secret.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use rdkafka::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::error::KafkaError;
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{BaseProducer, ProducerContext};
use rdkafka::types::RDKafkaConfRes;

use super::database::read_secret_file;
use super::problems::{SettingError, dotted, nearest};
use super::read::{Reader, size_text};
use super::{Kafka, Secret};

impl Kafka {
    /// Every property of a client, by librdkafka's names: our defaults, the user's over them, files read now.
    ///
    /// Call it at each client build. What makes a client the fast or the careful one (idempotence, acks, gapless, timeouts,
    /// batch.num.messages) is not among them: the publisher sets it last, and `[kafka.properties]` cannot hold it.
    pub fn client_properties(&self) -> Result<BTreeMap<String, Secret>, SettingError> {
        let mut properties = self.known_properties();
        for (name, file) in &self.property_files {
            let value = read_secret_file(&dotted(&["kafka", "property_files", name]), file)?;
            properties.insert(name.clone(), value);
        }
        Ok(properties)
    }

    /// [`Kafka::client_properties`] without the files.
    fn known_properties(&self) -> BTreeMap<String, Secret> {
        let mut properties: BTreeMap<String, Secret> =
            self.default_properties().into_iter().map(|(name, value)| (name.to_owned(), Secret::new(value))).collect();
        properties.insert("bootstrap.servers".to_owned(), Secret::new(self.brokers.join(",")));
        properties.insert("message.max.bytes".to_owned(), Secret::new(self.message_bytes_max.to_string()));
        for (name, value) in &self.properties {
            properties.insert(name.clone(), value.clone());
        }
        properties
    }

    /// Our defaults where they differ from librdkafka's, without those that the user set, in whatever spelling.
    pub(super) fn default_properties(&self) -> Vec<(&'static str, String)> {
        let set: Vec<&str> =
            self.properties.keys().chain(self.property_files.keys()).map(|name| canonical(name)).collect();
        let defaults = [
            ("client.id", "keiro-relay".to_owned()),
            // Cheap, and JSON shrinks to a fifth.
            ("compression.codec", "lz4".to_owned()),
            // The fast lane fills batches from rows that are there already; waiting longer only adds latency.
            ("queue.buffering.max.ms", "1".to_owned()),
            // librdkafka's 10 s would leave rows waiting long after a broker is back.
            ("reconnect.backoff.max.ms", "1000".to_owned()),
            // How long a topic may be unknown before its rows fail: librdkafka's 30 s is all of publish_timeout.
            ("topic.metadata.propagation.max.ms", "5000".to_owned()),
            // Idle connections that a firewall dropped are noticed.
            ("socket.keepalive.enable", "true".to_owned()),
            ("queue.buffering.max.kbytes", self.queue_kbytes_default().to_string()),
            // Readiness reads the brokers' state from them.
            ("statistics.interval.ms", "5000".to_owned()),
        ];
        defaults.into_iter().filter(|(name, _)| !set.contains(name)).collect()
    }

    /// Bounded, and room for two of the largest messages, so that one that fits a message's limit never waits for ever.
    fn queue_kbytes_default(&self) -> usize {
        const QUEUE_KBYTES_MIN: usize = 128 * 1024;
        (2 * self.message_bytes_max).div_ceil(1024).max(QUEUE_KBYTES_MIN)
    }
}

/// Properties that are the relay's, each with the reason and what to use instead.
const REFUSED: [(&str, &str); 18] = [
    ("enable.idempotence", "it is always true: without it a retry can overtake or double a record"),
    ("request.required.acks", "it is always all: a row counts as sent only when every in-sync replica has it"),
    ("enable.gapless.guarantee", "the relay sets it for each client: without it later batches pass one that failed"),
    (
        "message.timeout.ms",
        "the relay derives it from the lease, or a stopped process sends old records when it wakes; set relay.publish_timeout",
    ),
    ("message.send.max.retries", "the deadline bounds retries, not a count; set relay.publish_timeout"),
    ("transactional.id", "the relay uses no transactions, and a shared id would let relays fence each other off"),
    ("partitioner", "the relay chooses the partition as Java clients do, so that a key keeps its partition"),
    ("partitioner_cb", "the relay chooses the partition as Java clients do, so that a key keeps its partition"),
    ("queuing.strategy", "it is always fifo: order rests on it"),
    (
        "batch.num.messages",
        "the careful lane sends one record a batch, which is how it knows whose fault an error is; set relay.batch_rows_max",
    ),
    ("delivery.report.only.error", "rows are settled by delivery reports, of successes too"),
    ("dr_cb", "rows are settled by delivery reports, which the relay reads itself"),
    ("dr_msg_cb", "rows are settled by delivery reports, which the relay reads itself"),
    ("enabled_events", "rows are settled by delivery reports, which the relay reads itself"),
    ("metadata.broker.list", "set kafka.brokers"),
    ("message.max.bytes", "set kafka.message_bytes_max"),
    ("log.queue", "the relay reads librdkafka's log itself"),
    ("opaque", "it is a pointer of the relay's own"),
];

/// Names that stand for another one.
const ALIASES: [(&str, &str); 12] = [
    ("acks", "request.required.acks"),
    ("bootstrap.servers", "metadata.broker.list"),
    ("compression.type", "compression.codec"),
    ("delivery.timeout.ms", "message.timeout.ms"),
    ("linger.ms", "queue.buffering.max.ms"),
    ("max.in.flight", "max.in.flight.requests.per.connection"),
    ("retries", "message.send.max.retries"),
    ("sasl.mechanism", "sasl.mechanisms"),
    ("sasl.oauthbearer.client.credentials.client.id", "sasl.oauthbearer.client.id"),
    ("sasl.oauthbearer.client.credentials.client.secret", "sasl.oauthbearer.client.secret"),
    ("max.partition.fetch.bytes", "fetch.message.max.bytes"),
    ("enable.auto.commit", "auto.commit.enable"),
];

/// The name under which librdkafka keeps a property.
pub(super) fn canonical(name: &str) -> &str {
    ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, canonical)| canonical)
}

/// Why a property cannot be set, by its name alone.
pub(super) fn refused(name: &str) -> Option<String> {
    let (_, reason) = REFUSED.iter().find(|(refused, _)| *refused == canonical(name))?;
    Some(format!("cannot be set: {reason}"))
}

/// Properties that the relay looks at itself, so that their value must be known when the configuration is read.
const CHECKED: [&str; 3] =
    ["max.in.flight.requests.per.connection", "statistics.interval.ms", "queue.buffering.max.kbytes"];

/// The names a producer can have, for the nearest one to a mistyped one only; librdkafka itself decides what it knows.
const PRODUCER_PROPERTIES: &[&str] = &[
    "allow.auto.create.topics",
    "api.version.fallback.ms",
    "api.version.request",
    "api.version.request.timeout.ms",
    "batch.size",
    "broker.address.family",
    "broker.address.ttl",
    "broker.version.fallback",
    "client.dns.lookup",
    "client.id",
    "client.rack",
    "compression.codec",
    "compression.level",
    "compression.type",
    "connections.max.idle.ms",
    "debug",
    "enable.metrics.push",
    "enable.random.seed",
    "enable.sasl.oauthbearer.unsecure.jwt",
    "enable.ssl.certificate.verification",
    "internal.termination.signal",
    "linger.ms",
    "log.connection.close",
    "log.thread.name",
    "log_level",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
    "message.copy.max.bytes",
    "metadata.max.age.ms",
    "metadata.recovery.rebootstrap.trigger.ms",
    "metadata.recovery.strategy",
    "queue.buffering.backpressure.threshold",
    "queue.buffering.max.kbytes",
    "queue.buffering.max.messages",
    "queue.buffering.max.ms",
    "receive.message.max.bytes",
    "reconnect.backoff.max.ms",
    "reconnect.backoff.ms",
    "request.timeout.ms",
    "retry.backoff.max.ms",
    "retry.backoff.ms",
    "sasl.kerberos.keytab",
    "sasl.kerberos.kinit.cmd",
    "sasl.kerberos.min.time.before.relogin",
    "sasl.kerberos.principal",
    "sasl.kerberos.service.name",
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.secret",
    "sasl.oauthbearer.config",
    "sasl.oauthbearer.extensions",
    "sasl.oauthbearer.method",
    "sasl.oauthbearer.scope",
    "sasl.oauthbearer.token.endpoint.url",
    "sasl.password",
    "sasl.username",
    "security.protocol",
    "socket.blocking.max.ms",
    "socket.connection.setup.timeout.ms",
    "socket.keepalive.enable",
    "socket.max.fails",
    "socket.nagle.disable",
    "socket.receive.buffer.bytes",
    "socket.send.buffer.bytes",
    "socket.timeout.ms",
    "ssl.ca.certificate.stores",
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.cipher.suites",
    "ssl.crl.location",
    "ssl.curves.list",
    "ssl.endpoint.identification.algorithm",
    "ssl.engine.id",
    "ssl.engine.location",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
    "ssl.keystore.location",
    "ssl.keystore.password",
    "ssl.providers",
    "ssl.sigalgs.list",
    "statistics.interval.ms",
    "sticky.partitioning.linger.ms",
    "topic.blacklist",
    "topic.metadata.propagation.max.ms",
    "topic.metadata.refresh.fast.interval.ms",
    "topic.metadata.refresh.interval.ms",
    "topic.metadata.refresh.sparse",
];

const PROPERTIES: [&str; 2] = ["kafka", "properties"];
const PROPERTY_FILES: [&str; 2] = ["kafka", "property_files"];

/// Reads both sections: what is refused, given twice, or out of the relay's own bounds is reported.
pub(super) fn read(reader: &mut Reader) -> (BTreeMap<String, Secret>, BTreeMap<String, PathBuf>) {
    let mut properties = BTreeMap::new();
    let mut files = BTreeMap::new();
    // The first spelling of each property, and whether it is a file's.
    let mut seen: BTreeMap<String, (String, [&str; 2])> = BTreeMap::new();
    for section in [PROPERTIES, PROPERTY_FILES] {
        for name in reader.names(&section) {
            let path = [section[0], section[1], name.as_str()];
            if let Some(text) = refused(&name) {
                reader.problem(&path, None, text);
                continue;
            }
            if section == PROPERTY_FILES && CHECKED.contains(&canonical(&name)) {
                reader.problem(&path, None, format!("cannot be read from a file: set it in {}", dotted(&PROPERTIES)));
                continue;
            }
            if let Some((other, other_section)) = seen.get(canonical(&name)) {
                let other_path = [other_section[0], other_section[1], other.as_str()];
                let (here, there) = (reader.origin(&path).rank(), reader.origin(&other_path).rank());
                if *other != name || here == there {
                    let other = dotted(&other_path);
                    reader.problem(&path, None, format!("is the same property as {other}: keep one of them"));
                    continue;
                }
                // A value and a file of the same name from different layers: the higher layer wins, as everywhere.
                if here < there {
                    continue;
                }
                properties.remove(&name);
            }
            seen.insert(canonical(&name).to_owned(), (name.clone(), section));
            if section == PROPERTY_FILES {
                files.extend(reader.file(&path).map(|file| (name, file)));
            } else {
                properties.extend(reader.property(&path).map(|value| (name, value)));
            }
        }
    }
    for (name, value) in &properties {
        let number = value.expose().parse::<i64>();
        let path = [PROPERTIES[0], PROPERTIES[1], name.as_str()];
        // What is no number at all is librdkafka's to refuse.
        match (canonical(name), number) {
            ("max.in.flight.requests.per.connection", Ok(number)) if number > 5 => {
                reader.problem(
                    &path,
                    None,
                    "must be from 1 to 5: with more, a broker cannot keep an idempotent producer's order",
                );
            }
            ("statistics.interval.ms", Ok(number)) if !(100..=60_000).contains(&number) => {
                reader.problem(&path, None, "must be from 100 to 60000: readiness is read from the statistics");
            }
            _ => {}
        }
    }
    (properties, files)
}

/// A message that is larger than the client's queue would wait for room for ever.
pub(super) fn check_queue(reader: &mut Reader, kafka: &Kafka) {
    const NAME: &str = "queue.buffering.max.kbytes";
    let Some(kbytes) = kafka.properties.get(NAME).and_then(|value| value.expose().parse::<usize>().ok()) else {
        return;
    };
    if kbytes.saturating_mul(1024) < kafka.message_bytes_max {
        let largest = format!("\"{}\"", size_text(kafka.message_bytes_max));
        let text = format!(
            "must be at least {}, to hold one message of {}: a larger one would wait for ever",
            kafka.message_bytes_max.div_ceil(1024),
            reader.cite(&["kafka", "message_bytes_max"], largest)
        );
        reader.problem(&[PROPERTIES[0], PROPERTIES[1], NAME], None, text);
    }
}

/// Lets librdkafka judge the properties: one by one first, so that each wrong one is named, then all of them together.
pub(super) fn prove(reader: &mut Reader, kafka: &Kafka, message_timeout: Duration) {
    // What the relay refused itself librdkafka would refuse again, in other words.
    let mut ok = !reader.problems.iter().any(|problem| problem.key.starts_with("kafka.propert"));
    for (name, value) in &kafka.properties {
        ok &= prove_one(reader, &[PROPERTIES[0], PROPERTIES[1], name], value.expose());
    }
    let mut values = kafka.known_properties();
    for (name, file) in &kafka.property_files {
        let path = [PROPERTY_FILES[0], PROPERTY_FILES[1], name.as_str()];
        match read_secret_file(&dotted(&path), file) {
            Ok(value) => {
                ok &= prove_one(reader, &path, value.expose());
                values.insert(name.clone(), value);
            }
            // It may appear before it is needed, but then nothing can be said of the whole.
            Err(error) => {
                reader.warning(&path, format!("{} {}; it is read again at each use", error.value, error.text));
                ok = false;
            }
        }
    }
    if ok {
        prove_together(reader, kafka, &values, message_timeout);
    }
}

fn prove_one(reader: &mut Reader, path: &[&str; 3], value: &str) -> bool {
    let name = path[2];
    let mut client = ClientConfig::new();
    client.set(name, value);
    let text = match client.create_native_config() {
        Ok(_) => return true,
        Err(KafkaError::ClientConfig(RDKafkaConfRes::RD_KAFKA_CONF_UNKNOWN, _, _, _)) => {
            match nearest(name, PRODUCER_PROPERTIES.iter().copied()) {
                Some(near) => format!("librdkafka has no such property; did you mean {near}?"),
                None => "librdkafka has no such property; its CONFIGURATION.md lists them".to_owned(),
            }
        }
        Err(KafkaError::ClientConfig(_, text, _, _)) => format!("librdkafka refuses the value{}", safe_reason(&text)),
        // The other errors hold the value.
        Err(_) => "librdkafka refuses the value".to_owned(),
    };
    reader.problem(path, None, text);
    false
}

fn prove_together(reader: &mut Reader, kafka: &Kafka, values: &BTreeMap<String, Secret>, message_timeout: Duration) {
    // These would connect, listen, or run foreign code.
    const LEFT_OUT: [&str; 3] = ["bootstrap.servers", "test.mock.num.brokers", "plugin.library.paths"];
    let mut client = ClientConfig::new();
    for (name, value) in values.iter().filter(|(name, _)| !LEFT_OUT.contains(&name.as_str())) {
        client.set(name, value.expose());
    }
    // What every client of the relay has: some values are wrong only beside these.
    client.set("enable.idempotence", "true");
    client.set("enable.gapless.guarantee", "true");
    client.set("acks", "all");
    client.set("message.timeout.ms", message_timeout.as_millis().to_string());
    client.set_log_level(RDKafkaLogLevel::Emerg);
    let error = match client.create_with_context::<_, BaseProducer<Quiet>>(Quiet) {
        Ok(_) => return,
        Err(KafkaError::ClientCreation(text)) => text,
        Err(KafkaError::ClientConfig(_, text, _, _)) => text,
        Err(_) => "the client cannot be created".to_owned(),
    };
    let names = || kafka.properties.keys().chain(kafka.property_files.keys());
    // librdkafka names the property in its text; the longest name in it is the one.
    let culprit = names().filter(|name| error.contains(name.as_str())).max_by_key(|name| name.len()).cloned();
    let secrets = names().filter_map(|name| values.get(name));
    let text = format!("librdkafka refuses the properties together: {}", redacted(&error, secrets));
    match culprit {
        Some(name) if kafka.property_files.contains_key(&name) => {
            reader.problem(&[PROPERTY_FILES[0], PROPERTY_FILES[1], &name], None, text);
        }
        Some(name) => reader.problem(&[PROPERTIES[0], PROPERTIES[1], &name], None, text),
        None => reader.problem(&PROPERTIES, None, text),
    }
}

/// What librdkafka's complaint about one value may be quoted as: its text may hold the value, or a part of it.
fn safe_reason(text: &str) -> String {
    const RANGE: &str = "is outside allowed range ";
    if let Some((_, range)) = text.split_once(RANGE) {
        return format!(": it {RANGE}{}", range.trim_end());
    }
    if text.starts_with("Expected bool value") {
        return ": it is neither true nor false".to_owned();
    }
    if let Some((_, build)) = text.split_once("not supported in this build: ") {
        return format!(": this build does not support it: {}", build.trim_end());
    }
    "; its CONFIGURATION.md says what is allowed".to_owned()
}

/// The text without the values: as librdkafka puts a client together, it quotes them whole or not at all.
fn redacted<'a>(text: &str, values: impl IntoIterator<Item = &'a Secret>) -> String {
    values.into_iter().fold(text.trim_end().to_owned(), |text, value| replace_alone(&text, value.expose()))
}

/// Only where it stands alone, or `ssl` would go from `ssl.ca.location` too.
fn replace_alone(text: &str, value: &str) -> String {
    if value.is_empty() {
        return text.to_owned();
    }
    let of_word = |c: char| c.is_alphanumeric() || ".-_".contains(c);
    let mut replaced = String::with_capacity(text.len());
    let mut end = 0;
    for (at, _) in text.match_indices(value) {
        let after = at + value.len();
        if !text[..at].ends_with(of_word) && !text[after..].starts_with(of_word) {
            replaced.push_str(&text[end..at]);
            replaced.push_str("***");
            end = after;
        }
    }
    replaced.push_str(&text[end..]);
    replaced
}

/// A context that says nothing: the client lives for a moment and its complaints come back as errors.
struct Quiet;

impl ClientContext for Quiet {
    fn log(&self, _: RDKafkaLogLevel, _: &str, _: &str) {}
    fn error(&self, _: KafkaError, _: &str) {}
}

impl ProducerContext for Quiet {
    type DeliveryOpaque = ();
    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}
