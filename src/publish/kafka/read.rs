//! Reads topics back for `verify`: from the offsets of a time to where they end now, in no group.
//!
//! Nothing here ever commits an offset, creates a topic or keeps a record. All of it blocks: it is for a thread of its own. Every wait for
//! the next record is bounded.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::{Offset, TopicPartitionList};

use super::client::{Blueprint, ClientError, QuietContext};
use crate::config;
use crate::domain::verify::SeenRecord;

/// How long one request may take.
const REQUEST_MAX: Duration = Duration::from_secs(15);
/// How long nothing may come although there is something to come.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// How long one wait takes.
const POLL: Duration = Duration::from_millis(100);

/// A client that reads topics.
pub struct TopicReader {
    consumer: BaseConsumer<QuietContext>,
}

/// A part of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its topic.
    pub topic: String,
    /// Its number.
    pub partition: i32,
    /// Where reading begins.
    pub start: i64,
    /// Where it ends.
    pub end: i64,
    /// The first record that was read: offset, and milliseconds since 1970.
    pub first: Option<(i64, i64)>,
    /// Whether the partition begins later than was asked for, because its beginning was removed.
    pub is_cut: bool,
}

impl TopicReader {
    /// Makes the client; contacts nothing.
    ///
    /// # Errors
    /// librdkafka does not take the properties.
    pub fn new(kafka: &config::Kafka, relay: &config::Relay) -> Result<Self, ClientError> {
        Ok(Self { consumer: Blueprint::new(kafka, relay).reader()? })
    }

    /// The parts of a topic's partitions from the first record of `from_millis` or later to where they end now.
    ///
    /// # Errors
    /// In words: the topic is not there, or not ours to read.
    pub fn spans(&self, topic: &str, from_millis: i64) -> Result<Vec<Span>, String> {
        let failed = |error: &dyn std::fmt::Display| format!("topic {topic} cannot be read: {error}");
        let metadata = self.consumer.fetch_metadata(Some(topic), REQUEST_MAX).map_err(|error| failed(&error))?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        let found = found.ok_or_else(|| failed(&"it does not exist"))?;
        if let Some(error) = found.error() {
            return Err(failed(&rdkafka::types::RDKafkaErrorCode::from(error)));
        }
        let mut times = TopicPartitionList::new();
        for partition in found.partitions() {
            times
                .add_partition_offset(topic, partition.id(), Offset::Offset(from_millis.max(0)))
                .map_err(|error| failed(&error))?;
        }
        let offsets = self.consumer.offsets_for_times(times, REQUEST_MAX).map_err(|error| failed(&error))?;
        let mut spans = Vec::new();
        for element in offsets.elements() {
            element.error().map_err(|error| failed(&error))?;
            let partition = element.partition();
            let (low, end) =
                self.consumer.fetch_watermarks(topic, partition, REQUEST_MAX).map_err(|error| failed(&error))?;
            let start = match element.offset() {
                Offset::Offset(offset) => offset.clamp(low, end),
                // Nothing as young as that.
                _ => end,
            };
            let is_cut = low > 0 && start == low;
            spans.push(Span { topic: topic.to_owned(), partition, start, end, first: None, is_cut });
        }
        Ok(spans)
    }

    /// Reads the spans of one topic and hands over each record that has the headers of a row; `progress` hears of every record. Fills in
    /// what each span began with.
    ///
    /// # Errors
    /// Nothing came for a while although something should.
    pub fn read(
        &self,
        spans: &mut [Span],
        mut each: impl FnMut(&SeenRecord<'_>),
        mut progress: impl FnMut(),
    ) -> Result<(), String> {
        let mut list = TopicPartitionList::new();
        // Partitions that are not read to their end yet, and their spans.
        let mut open = HashMap::new();
        for (index, span) in spans.iter().enumerate().filter(|(_, span)| span.start < span.end) {
            list.add_partition_offset(&span.topic, span.partition, Offset::Offset(span.start))
                .map_err(|error| format!("topic {} cannot be read: {error}", span.topic))?;
            open.insert(span.partition, index);
        }
        self.consumer.assign(&list).map_err(|error| format!("the topic cannot be read: {error}"))?;
        let (mut heard_at, mut problem) = (Instant::now(), None);
        while let Some(&waiting_for) = open.values().next() {
            match self.consumer.poll(POLL) {
                None => {}
                Some(Ok(message)) => {
                    heard_at = Instant::now();
                    let Some(&index) = open.get(&message.partition()) else { continue };
                    let span = &mut spans[index];
                    // What is left of the topic read before is no record of this one.
                    if message.topic() != span.topic {
                        continue;
                    }
                    span.first.get_or_insert((message.offset(), message.timestamp().to_millis().unwrap_or(i64::MAX)));
                    if message.offset() < span.end {
                        if let Some(record) = record(&message) {
                            each(&record);
                        }
                        progress();
                    }
                    if message.offset() + 1 >= span.end {
                        open.remove(&message.partition());
                    }
                }
                // The end of what is committed: behind it there are at most unfinished transactions of others, and a span that ends in
                // something that is no record has no last record to wait for.
                Some(Err(KafkaError::PartitionEOF(partition))) => {
                    heard_at = Instant::now();
                    open.remove(&partition);
                }
                Some(Err(error)) => problem = Some(error.to_string()),
            }
            if heard_at.elapsed() > SILENCE_MAX {
                let span = &spans[waiting_for];
                let why = problem.or_else(|| self.consumer.context().reason());
                let why = why.unwrap_or_else(|| "no broker says why".to_owned());
                return Err(format!(
                    "topic {} [{}]: nothing came for {SILENCE_MAX:?}: {why}",
                    span.topic, span.partition
                ));
            }
        }
        for span in spans {
            // What retention removed while we read.
            if let Ok((low, _)) = self.consumer.fetch_watermarks(&span.topic, span.partition, REQUEST_MAX) {
                span.is_cut |= low > span.start;
            }
        }
        Ok(())
    }
}

/// A record with the headers that name a row.
fn record<'a>(message: &'a BorrowedMessage<'_>) -> Option<SeenRecord<'a>> {
    let headers = message.headers()?;
    let text = |name: &str| {
        let header = headers.iter().find(|header| header.key == name)?;
        std::str::from_utf8(header.value?).ok()
    };
    Some(SeenRecord {
        topic: message.topic(),
        source: text("keiro-source")?,
        message_id: text("keiro-message-id")?,
        partition: message.partition(),
        offset: message.offset(),
    })
}
