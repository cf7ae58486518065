//! What the relay is compared with: the same records through a producer that does nothing else.
//!
//! Nothing here ever touches the database.

use std::time::{Duration, Instant};

use rdkafka::config::{ClientConfig, FromClientConfigAndContext as _};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{Message as _, OwnedMessage};
use rdkafka::producer::{BaseRecord, DefaultProducerContext, Producer as _, ThreadedProducer};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::task::spawn_blocking;

use crate::config::Kafka;

/// How long reading or producing everything may take.
const ALL_MAX: Duration = Duration::from_secs(600);
/// How long one request may take.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// Pause while librdkafka's queue is full.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(1);

/// A producer with the client settings of the relay.
///
/// # Errors
/// librdkafka does not take them.
pub(super) fn producer(kafka: &Kafka) -> Result<ThreadedProducer<DefaultProducerContext>, String> {
    let mut config = ClientConfig::new();
    for (name, value) in kafka.client_properties().map_err(|error| error.to_string())? {
        config.set(name, value.expose());
    }
    config.set("acks", "all").set("enable.idempotence", "true").set("partitioner", "murmur2_random");
    ThreadedProducer::from_config_and_context(&config, DefaultProducerContext).map_err(|error| error.to_string())
}

/// A consumer of every partition of a topic, from an offset on.
///
/// # Errors
/// What librdkafka says.
pub(super) fn consumer(brokers: &str, topic: &str, partitions: i32, from: Offset) -> Result<BaseConsumer, String> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("group.id", "keiro-relay-bench").set("enable.auto.commit", "false");
    // As soon as there is anything.
    config.set("fetch.min.bytes", "1").set("fetch.wait.max.ms", "100");
    let consumer: BaseConsumer = config.create().map_err(|error| error.to_string())?;
    let mut all = TopicPartitionList::new();
    for partition in 0..partitions {
        all.add_partition_offset(topic, partition, from).map_err(|error| error.to_string())?;
    }
    consumer.assign(&all).map_err(|error| error.to_string())?;
    Ok(consumer)
}

/// Reads so many records of a topic.
///
/// # Errors
/// They are not there in time.
pub(super) async fn read(
    brokers: &str,
    topic: &str,
    partitions: i32,
    count: usize,
) -> Result<Vec<OwnedMessage>, String> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let read = spawn_blocking(move || {
        let consumer = consumer(&brokers, &topic, partitions, Offset::Beginning)?;
        let until = Instant::now() + ALL_MAX;
        let mut records = Vec::with_capacity(count);
        while records.len() < count {
            if Instant::now() > until {
                return Err(format!("{} of {count} records of {topic} could be read", records.len()));
            }
            if let Some(record) = consumer.poll(Duration::from_millis(100)) {
                records.push(record.map_err(|error| error.to_string())?.detach());
            }
        }
        Ok(records)
    });
    read.await.map_err(|error| error.to_string())?
}

/// Produces records to a topic and waits until all are acknowledged; returns how long that took.
///
/// # Errors
/// Not all were acknowledged.
pub(super) async fn produce(kafka: &Kafka, topic: &str, records: Vec<OwnedMessage>) -> Result<Duration, String> {
    let (kafka, topic) = (kafka.clone(), topic.to_owned());
    let produced = spawn_blocking(move || {
        let producer = producer(&kafka)?;
        // Connected, as the relay's is when it has served for a while.
        producer.client().fetch_metadata(Some(&topic), REQUEST_MAX).map_err(|error| error.to_string())?;
        let begun = Instant::now();
        for record in &records {
            let mut native = BaseRecord::to(&topic).payload(record.payload().unwrap_or_default());
            native.key = record.key();
            native.headers = record.headers().cloned();
            while let Err((error, back)) = producer.send(native) {
                if error.rdkafka_error_code() != Some(rdkafka::types::RDKafkaErrorCode::QueueFull) {
                    return Err(format!("the bare producer: {error}"));
                }
                std::thread::sleep(QUEUE_FULL_PAUSE);
                native = back;
            }
        }
        producer.flush(ALL_MAX).map_err(|error| format!("the bare producer: {error}"))?;
        Ok(begun.elapsed())
    });
    produced.await.map_err(|error| error.to_string())?
}
