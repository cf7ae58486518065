//! Topics: made and changed through the admin API, read back whole.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::admin::{
    AdminClient, AdminOptions, AlterConfig, NewPartitions, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use super::{LONG, run, services, unique, wait_until};

/// How long one request may take.
const REQUEST_MAX: Duration = Duration::from_secs(30);

/// Makes a topic of its own name on the shared Kafka.
pub fn fresh_topic(partitions: i32, configs: &[(&str, &str)]) -> String {
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, partitions, configs);
    topic
}

/// Creates, changes and deletes topics.
pub struct Admin {
    client: AdminClient<DefaultClientContext>,
}

impl Admin {
    /// An admin of this cluster.
    pub fn new(brokers: &str) -> Self {
        Self::with(brokers, &[])
    }

    /// The same with client properties, such as credentials.
    pub fn with(brokers: &str, properties: &[(&str, &str)]) -> Self {
        Self { client: client_config(brokers, properties).create().expect("an admin client") }
    }

    /// Creates a topic with one replica of each partition; returns when every partition has a leader.
    #[track_caller]
    pub fn create(&self, topic: &str, partitions: i32, configs: &[(&str, &str)]) {
        self.create_replicated(topic, partitions, 1, configs);
    }

    /// The same with so many replicas.
    #[track_caller]
    pub fn create_replicated(&self, topic: &str, partitions: i32, replicas: i32, configs: &[(&str, &str)]) {
        let mut new = NewTopic::new(topic, partitions, TopicReplication::Fixed(replicas));
        for (name, value) in configs {
            new = new.set(name, value);
        }
        let results = run(async || self.client.create_topics([&new], &options()).await).expect("create a topic");
        expect_done("create the topic", results);
        self.wait_partitions(topic, partitions);
    }

    /// Creates a topic whose partitions lie where the test wants them: the brokers' ids, partition by partition.
    #[track_caller]
    pub fn create_assigned(&self, topic: &str, assignment: &[&[i32]], configs: &[(&str, &str)]) {
        let partitions = i32::try_from(assignment.len()).expect("few partitions");
        let mut new = NewTopic::new(topic, partitions, TopicReplication::Variable(assignment));
        for (name, value) in configs {
            new = new.set(name, value);
        }
        let results = run(async || self.client.create_topics([&new], &options()).await).expect("create a topic");
        expect_done("create the topic", results);
        self.wait_partitions(topic, partitions);
    }

    /// Deletes a topic; returns when the cluster no longer knows it.
    #[track_caller]
    pub fn delete(&self, topic: &str) {
        let results = run(async || self.client.delete_topics(&[topic], &options()).await).expect("delete a topic");
        expect_done("delete the topic", results);
        wait_until(&format!("topic {topic} to be gone"), LONG, || self.partitions(topic).is_none());
    }

    /// Gives a topic more partitions: so many in all.
    #[track_caller]
    pub fn grow(&self, topic: &str, partitions: i32) {
        let count = usize::try_from(partitions).expect("a positive number of partitions");
        let new = NewPartitions::new(topic, count);
        let results = run(async || self.client.create_partitions([&new], &options()).await).expect("add partitions");
        expect_done("add partitions", results);
        self.wait_partitions(topic, partitions);
    }

    /// Sets a topic's configuration; what is not named goes back to its default.
    #[track_caller]
    pub fn configure(&self, topic: &str, configs: &[(&str, &str)]) {
        let mut alter = AlterConfig::new(ResourceSpecifier::Topic(topic));
        for (name, value) in configs {
            alter = alter.set(name, value);
        }
        let results = run(async || self.client.alter_configs([&alter], &options()).await).expect("alter a topic");
        for result in results {
            result.unwrap_or_else(|(_, code)| panic!("alter the topic {topic}: {code}"));
        }
    }

    /// How many partitions a topic has, when the cluster knows it and each of them has a leader.
    pub fn partitions(&self, topic: &str) -> Option<i32> {
        let metadata = self.client.inner().fetch_metadata(Some(topic), REQUEST_MAX).ok()?;
        let found = metadata.topics().iter().find(|found| found.name() == topic)?;
        let has_leaders = found.partitions().iter().all(|partition| partition.leader() >= 0);
        let count = i32::try_from(found.partitions().len()).expect("few partitions");
        (found.error().is_none() && has_leaders && count > 0).then_some(count)
    }

    #[track_caller]
    fn wait_partitions(&self, topic: &str, partitions: i32) {
        let what = format!("topic {topic} to have {partitions} partitions with leaders");
        wait_until(&what, LONG, || self.partitions(topic) == Some(partitions));
    }
}

#[track_caller]
fn expect_done(doing: &str, results: Vec<Result<String, (String, RDKafkaErrorCode)>>) {
    for result in results {
        result.unwrap_or_else(|(topic, code)| panic!("{doing} {topic}: {code}"));
    }
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST_MAX)).operation_timeout(Some(REQUEST_MAX))
}

fn client_config(brokers: &str, properties: &[(&str, &str)]) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    for (name, value) in properties {
        config.set(*name, *value);
    }
    config
}

/// A record as it lies in the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub topic: String,
    pub partition: i32,
    pub offset: i64,
    /// Milliseconds since 1970.
    pub timestamp: i64,
    pub key: Option<Vec<u8>>,
    pub value: Option<Vec<u8>>,
    pub headers: Vec<(String, Vec<u8>)>,
}

impl Record {
    /// The first header of this name, as text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(found, _)| found == name)?;
        Some(std::str::from_utf8(value).expect("a header in UTF-8"))
    }

    /// The header that consumers dedupe by.
    #[track_caller]
    pub fn message_id(&self) -> &str {
        self.header("keiro-message-id").expect("a record with the header keiro-message-id")
    }
}

/// Every record of a topic on the shared Kafka, by partition and offset.
#[track_caller]
pub fn read_topic(topic: &str) -> Vec<Record> {
    read_topic_on(services::brokers(), topic)
}

/// Every record of a topic, by partition and offset.
#[track_caller]
pub fn read_topic_on(brokers: &str, topic: &str) -> Vec<Record> {
    let mut reader = TopicReader::new(brokers, topic);
    reader.catch_up();
    let mut records = reader.records;
    records.sort_by_key(|record| (record.partition, record.offset));
    records
}

/// Reads a topic from its beginning, without a group, and keeps what it has read.
pub struct TopicReader {
    consumer: BaseConsumer,
    topic: String,
    /// The next offset of each partition.
    next: BTreeMap<i32, i64>,
    records: Vec<Record>,
}

impl TopicReader {
    /// A reader that has read nothing yet.
    pub fn new(brokers: &str, topic: &str) -> Self {
        let mut config = client_config(brokers, &[]);
        // The group is never joined, but the client wants its name.
        config.set("group.id", "keiro-relay-test").set("enable.auto.commit", "false");
        config.set("auto.offset.reset", "earliest").set("fetch.wait.max.ms", "20");
        let consumer = config.create().expect("a consumer");
        Self { consumer, topic: topic.to_owned(), next: BTreeMap::new(), records: Vec::new() }
    }

    /// What was read so far, in the order of reading.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Reads on up to what every partition's high watermark is now.
    ///
    /// The last offset below a high watermark is a record that can be read: nobody here writes transactions, and
    /// compaction keeps a partition's last record.
    #[track_caller]
    pub fn catch_up(&mut self) -> &[Record] {
        let goals = self.goals();
        let end = Instant::now() + LONG;
        while let Some((partition, goal)) = goals.iter().find(|(partition, goal)| self.next[partition] < **goal) {
            let next = self.next[partition];
            assert!(Instant::now() < end, "{} [{partition}]: read up to {next} of {goal} in {LONG:?}", self.topic);
            self.poll();
        }
        &self.records
    }

    /// Reads on until there are so many records in all.
    #[track_caller]
    pub fn wait_for(&mut self, count: usize, bound: Duration) -> &[Record] {
        let end = Instant::now() + bound;
        while self.catch_up().len() < count {
            let found = self.records.len();
            assert!(Instant::now() < end, "{}: {found} of {count} records in {bound:?}", self.topic);
            self.poll();
        }
        &self.records
    }

    /// The high watermark of each partition that holds anything; assigns partitions that are new.
    fn goals(&mut self) -> BTreeMap<i32, i64> {
        let metadata = self.consumer.fetch_metadata(Some(&self.topic), REQUEST_MAX).expect("the topic's metadata");
        let found = metadata.topics().iter().find(|found| found.name() == self.topic).expect("the topic");
        if let Some(error) = found.error() {
            panic!("topic {}: {:?}", self.topic, RDKafkaErrorCode::from(error));
        }
        let mut goals = BTreeMap::new();
        let known = self.next.len();
        for partition in found.partitions() {
            let partition = partition.id();
            let marks = self.consumer.fetch_watermarks(&self.topic, partition, REQUEST_MAX);
            let (low, high) = marks.unwrap_or_else(|error| panic!("{} [{partition}]: {error}", self.topic));
            self.next.entry(partition).or_insert(low);
            if low < high {
                goals.insert(partition, high);
            }
        }
        if self.next.len() > known {
            let mut list = TopicPartitionList::new();
            for (partition, next) in &self.next {
                list.add_partition_offset(&self.topic, *partition, Offset::Offset(*next)).expect("an offset");
            }
            self.consumer.assign(&list).expect("an assignment");
        }
        goals
    }

    fn poll(&mut self) {
        match self.consumer.poll(Duration::from_millis(50)) {
            None => {}
            // The broker being away is for the caller's bound to judge.
            Some(Err(KafkaError::MessageConsumption(
                RDKafkaErrorCode::BrokerTransportFailure | RDKafkaErrorCode::AllBrokersDown,
            ))) => {}
            Some(Err(error)) => panic!("read {}: {error}", self.topic),
            Some(Ok(message)) => {
                self.next.insert(message.partition(), message.offset() + 1);
                let headers = message.headers().map(|headers| {
                    let value = |value: Option<&[u8]>| value.expect("headers never have a null value").to_vec();
                    headers.iter().map(|header| (header.key.to_owned(), value(header.value))).collect()
                });
                self.records.push(Record {
                    topic: self.topic.clone(),
                    partition: message.partition(),
                    offset: message.offset(),
                    timestamp: message.timestamp().to_millis().expect("a record with a timestamp"),
                    key: message.key().map(<[u8]>::to_vec),
                    value: message.payload().map(<[u8]>::to_vec),
                    headers: headers.unwrap_or_default(),
                });
            }
        }
    }
}
