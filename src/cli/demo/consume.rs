//! The demo's consumer: reads every topic from its beginning, as any consumer would, and keeps what the judge needs.
//!
//! Nothing here ever joins a group or commits an offset, and nothing of the relay is used: this is the other end.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use super::judge::Record;
use super::produce::digest;

/// How long one request may take.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// How long one wait for a record takes: commands are looked at in between.
const POLL: Duration = Duration::from_millis(50);

/// What the thread is told.
enum Command {
    /// Read this topic too.
    Add(String),
    /// Read up to where the topics end now, and hand over.
    Finish(Instant),
}

/// A consumer on a thread of its own. Dropping it ends the thread soon.
pub(super) struct Consumer {
    commands: mpsc::Sender<Command>,
    /// Records read, by topic.
    counts: Arc<HashMap<String, AtomicUsize>>,
    thread: Option<JoinHandle<Result<Vec<Record>, String>>>,
}

impl Consumer {
    /// Starts to read topics; `all` names those that may be added later too.
    pub(super) fn start(brokers: &str, topics: &[String], all: &[String]) -> Result<Self, String> {
        let mut config = ClientConfig::new();
        // The group is never joined, but the client wants its name.
        config.set("bootstrap.servers", brokers).set("group.id", "keiro-relay-demo").set("enable.auto.commit", "false");
        config.set("auto.offset.reset", "earliest").set("fetch.wait.max.ms", "50");
        let consumer: BaseConsumer = config.create().map_err(|error| format!("a consumer: {error}"))?;
        let counts: Arc<HashMap<String, AtomicUsize>> =
            Arc::new(all.iter().map(|topic| (topic.clone(), AtomicUsize::new(0))).collect());
        let (commands, received) = mpsc::channel();
        for topic in topics {
            let _ = commands.send(Command::Add(topic.clone()));
        }
        let mut reader =
            Reader { consumer, next: BTreeMap::new(), records: Vec::new(), counts: Arc::clone(&counts), problem: None };
        let thread = std::thread::Builder::new()
            .name("consumer".to_owned())
            .spawn(move || reader.run(&received))
            .map_err(|error| format!("a consumer's thread: {error}"))?;
        Ok(Self { commands, counts, thread: Some(thread) })
    }

    /// Reads a topic too, from its beginning.
    pub(super) fn add(&self, topic: &str) {
        // A thread that ended says why at the end.
        let _ = self.commands.send(Command::Add(topic.to_owned()));
    }

    /// Records read of a topic so far.
    pub(super) fn count(&self, topic: &str) -> usize {
        self.counts.get(topic).map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Reads on to where the topics end now and returns every record.
    ///
    /// # Errors
    /// A topic could not be read, or not within the bound.
    pub(super) async fn finish(mut self, bound: Duration) -> Result<Vec<Record>, String> {
        let _ = self.commands.send(Command::Finish(Instant::now() + bound));
        let thread = self.thread.take().expect("a consumer finishes once");
        match tokio::task::spawn_blocking(move || thread.join()).await {
            Ok(Ok(records)) => records,
            Ok(Err(panic)) => std::panic::resume_unwind(panic),
            Err(error) => Err(error.to_string()),
        }
    }
}

struct Reader {
    consumer: BaseConsumer,
    /// The next offset of each topic and partition.
    next: BTreeMap<(String, i32), i64>,
    records: Vec<Record>,
    counts: Arc<HashMap<String, AtomicUsize>>,
    /// What librdkafka complained about last: why nothing comes.
    problem: Option<String>,
}

impl Reader {
    fn run(&mut self, commands: &mpsc::Receiver<Command>) -> Result<Vec<Record>, String> {
        loop {
            match commands.try_recv() {
                Ok(Command::Add(topic)) => self.add(&topic)?,
                Ok(Command::Finish(deadline)) => {
                    self.read_to_end(deadline)?;
                    return Ok(std::mem::take(&mut self.records));
                }
                Err(mpsc::TryRecvError::Empty) => self.poll()?,
                // Nobody wants the records any more.
                Err(mpsc::TryRecvError::Disconnected) => return Ok(Vec::new()),
            }
        }
    }

    fn add(&mut self, topic: &str) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("topic {topic} cannot be read: {error}");
        let metadata = self.consumer.fetch_metadata(Some(topic), REQUEST_MAX).map_err(|error| failed(&error))?;
        let found =
            metadata.topics().iter().find(|found| found.name() == topic).ok_or_else(|| failed(&"it is not there"))?;
        for partition in found.partitions() {
            self.next.entry((topic.to_owned(), partition.id())).or_insert(0);
        }
        let mut list = TopicPartitionList::new();
        for ((topic, partition), next) in &self.next {
            list.add_partition_offset(topic, *partition, Offset::Offset(*next)).map_err(|error| failed(&error))?;
        }
        self.consumer.assign(&list).map_err(|error| failed(&error))
    }

    fn poll(&mut self) -> Result<(), String> {
        match self.consumer.poll(POLL) {
            None => {}
            // Librdkafka goes on by itself; the deadline judges.
            Some(Err(error)) => self.problem = Some(error.to_string()),
            Some(Ok(message)) => {
                let record = read(&message)?;
                self.next.insert((record.topic.clone(), record.partition), record.offset + 1);
                if let Some(count) = self.counts.get(&record.topic) {
                    count.fetch_add(1, Ordering::Relaxed);
                }
                self.records.push(record);
            }
        }
        Ok(())
    }

    /// Reads up to every partition's high watermark as it is now.
    fn read_to_end(&mut self, deadline: Instant) -> Result<(), String> {
        let mut ends = BTreeMap::new();
        for (topic, partition) in self.next.keys() {
            let (_, end) = self
                .consumer
                .fetch_watermarks(topic, *partition, REQUEST_MAX)
                .map_err(|error| format!("the end of topic {topic} cannot be found: {error}"))?;
            ends.insert((topic.clone(), *partition), end);
        }
        while let Some(((topic, partition), end)) = ends.iter().find(|(place, end)| self.next[*place] < **end) {
            if Instant::now() >= deadline {
                let next = self.next[&(topic.clone(), *partition)];
                let why = self.problem.take().unwrap_or_else(|| "nothing more came".to_owned());
                return Err(format!("topic {topic} [{partition}] was read up to {next} of {end}: {why}"));
            }
            self.poll()?;
        }
        Ok(())
    }
}

fn read(message: &BorrowedMessage<'_>) -> Result<Record, String> {
    let (topic, partition, offset) = (message.topic(), message.partition(), message.offset());
    let headers = message.headers();
    let message_id = headers
        .and_then(|headers| headers.iter().find(|header| header.key == crate::domain::record::MESSAGE_ID_HEADER))
        .and_then(|header| std::str::from_utf8(header.value?).ok())
        .ok_or_else(|| format!("topic {topic} [{partition}] has a record without keiro-message-id at {offset}"))?;
    Ok(Record {
        topic: topic.to_owned(),
        partition,
        offset,
        appended_ms: message.timestamp().to_millis(),
        message_id: message_id.to_owned(),
        key: message.key().map(<[u8]>::to_vec),
        digest: digest(message.payload().unwrap_or_default()),
    })
}
