//! The careful lane: one record per batch, one in flight per lane, lanes beside each other, and an exact verdict for each row.
//!
//! Nothing here ever hands over a record once its call may hand over no more, or a later record of a lane once an earlier one
//! did not get through. A call always ends: what has no report when its time is up is purged, and what has none even then is
//! reported as unknown.

use std::collections::BTreeSet;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream;
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::{OnceCell, oneshot};
use tokio::time::{sleep, sleep_until};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::client::{Found, Generation, Persisted, Report, Reporter};
use super::codes::{self, About, Class, Side};
use super::faults::{Admission, Silence};
use super::limits::Limits;
use super::{KafkaPublisher, fast};
use crate::domain::message::Message;
use crate::domain::outcome::{self, Blame, Outcome, Rejection, Setback};
use crate::domain::partition;
use crate::domain::record::{self, Record};
use crate::publish::Batch;

/// Longest silence that the fast lane bears: the careful lane needs time to find out whose fault it is.
const FAST_SILENCE_MAX: Duration = Duration::from_secs(15);
/// How often one record is handed over in one call: again only when the client was purged or died on it and it surely was not
/// written.
const HAND_OVERS_MAX: u32 = 5;
/// Topics asked about at once before their first record.
const INTRODUCTIONS_IN_FLIGHT_MAX: usize = 8;
/// How long asking about topics may take.
const ASK_MAX: Duration = Duration::from_secs(2);
/// How long a row rests after a fault that is likely over soon.
const SHORT_REST: Duration = Duration::from_secs(1);
/// How long records in flight are waited for at a stop while no broker is up.
const STOP_WAIT_WITHOUT_BROKER: Duration = Duration::from_secs(1);
/// How long to wait when librdkafka's queue is full before the same record is handed over again.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);

/// Publishes a batch; returns by its deadline.
pub(super) async fn publish(publisher: &KafkaPublisher, batch: &Batch) -> Vec<(Uuid, Outcome)> {
    let call = Call::new(publisher, batch, Instant::now());
    call.introduce_topics().await;
    let mut lanes = pin!(fast::publish(&call));
    tokio::select! {
        outcomes = &mut lanes => return outcomes,
        () = call.time_is_up() => {}
    }
    tokio::select! {
        outcomes = &mut lanes => return outcomes,
        () = call.resolve() => {}
        // The other half of the last part is for finding out whose fault it is.
        () = sleep(call.schedule.part / 2) => {}
    }
    call.abandoned.cancel();
    lanes.await
}

/// When a call may do what. The last part of its time is kept for getting every row its outcome before the deadline.
#[derive(Debug, Clone, Copy)]
pub(super) struct Schedule {
    /// Nothing is handed over to the fast lane from here on; the careful lane may still judge what fails there.
    pub(super) fast_until: Instant,
    /// How long the fast lane waits for any report at all before it lets go of what is on its way.
    pub(super) fast_silence_max: Duration,
    /// Nothing is handed over from here on; what is on its way has a while left.
    pub(super) hand_over_until: Instant,
    /// What is still on its way now is purged.
    resolve_at: Instant,
    /// How long each of these last parts is.
    part: Duration,
}

impl Schedule {
    fn new(now: Instant, deadline: Instant) -> Self {
        let total = deadline.saturating_duration_since(now);
        let part = (total / 10).min(Duration::from_secs(2));
        let resolve_at = deadline.checked_sub(part).unwrap_or(now);
        Self {
            fast_until: now + total * 6 / 10,
            fast_silence_max: (total / 2).min(FAST_SILENCE_MAX),
            hand_over_until: resolve_at.checked_sub(part).unwrap_or(now),
            resolve_at,
            part,
        }
    }
}

/// One call of `publish`.
pub(super) struct Call<'a> {
    pub(super) publisher: &'a KafkaPublisher,
    pub(super) batch: &'a Batch,
    pub(super) schedule: Schedule,
    /// Set before records are purged because our time is up: a record that comes back is not handed over again.
    pub(super) resolving: CancellationToken,
    /// Set when even the purge brought no report.
    pub(super) abandoned: CancellationToken,
    /// Records handed over whose reports have not come.
    in_flight: AtomicUsize,
    /// Whether the cluster answers, asked at most once.
    cluster_answers: OnceCell<bool>,
}

/// Why a record may not be handed over now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Barred {
    Stopping,
    OutOfTime,
}

/// A record that was handed over, or refused at once.
struct Handed {
    at: Instant,
    side: Side,
    generation: Arc<Generation>,
    report: Report,
}

/// What came of one try.
enum Tried {
    /// The row has its outcome.
    Outcome(Outcome),
    /// Surely not written, through no fault of its own: hand it over again.
    Again,
}

/// The one probe of a parked topic or partition. Dropping it, also with its call, lets another record try.
struct Probe<'a> {
    publisher: &'a KafkaPublisher,
    topic: &'a str,
    partition: Option<i32>,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        // After a verdict there is nothing to release, and that is fine.
        self.publisher.faults.lock().release(self.topic, self.partition);
    }
}

impl<'a> Call<'a> {
    fn new(publisher: &'a KafkaPublisher, batch: &'a Batch, now: Instant) -> Self {
        Self {
            publisher,
            batch,
            schedule: Schedule::new(now, batch.deadline),
            resolving: CancellationToken::new(),
            abandoned: CancellationToken::new(),
            in_flight: AtomicUsize::new(0),
            cluster_answers: OnceCell::new(),
        }
    }

    /// Asks about topics of which the number of partitions is not known, or not any more: the fast lane chooses among them.
    /// Besides, a topic that does not exist or may not be written to is parked at once: librdkafka would keep its records, and
    /// with them this call, for seconds.
    async fn introduce_topics(&self) {
        let topics: BTreeSet<&str> = {
            let faults = self.publisher.faults.lock();
            if faults.is_down() {
                return;
            }
            let topics = self.batch.messages.iter().map(|message| message.destination.as_str());
            topics.filter(|topic| !faults.is_parked(topic, None)).collect()
        };
        let counts = &self.publisher.counts;
        let topics: Vec<&str> = topics.into_iter().filter(|topic| record::is_legal_topic(topic)).collect();
        let topics = counts.unknown_among(topics, Instant::now());
        if topics.is_empty() {
            return;
        }
        // The client that asks also mends what it believes about the topic itself.
        let client = self.publisher.fast.current();
        let introductions = stream::iter(topics).for_each_concurrent(INTRODUCTIONS_IN_FLIGHT_MAX, |topic| {
            let client = &client;
            async move {
                // What it answers is remembered; who comes now finds the topic parked or free.
                let _ = self.ask_about(topic, None, client).await;
            }
        });
        tokio::select! {
            () = introductions => {}
            () = sleep(self.ask_bound()) => {}
            () = self.batch.stop.cancelled() => {}
        }
    }

    fn ask_bound(&self) -> Duration {
        (self.schedule.hand_over_until.saturating_duration_since(Instant::now()) / 4).min(ASK_MAX)
    }

    /// Asks the cluster about a topic; a fault of the topic or of this partition parks it and is returned. Other partitions that
    /// take nothing are parked, too.
    pub(super) async fn ask_about(
        &self,
        topic: &str,
        partition: Option<i32>,
        client: &Arc<Generation>,
    ) -> Option<Setback> {
        let asked_at = Instant::now();
        let answer = client.ask_about(topic, self.ask_bound()).await;
        let Ok(found) = answer else {
            // No answer says nothing about the topic: its record will tell.
            return None;
        };
        self.publisher.faults.lock().answered();
        let code = match found {
            Found::There { partitions, leaderless, thin } => {
                self.publisher.counts.learn(topic, partitions, Instant::now());
                self.publisher.faults.lock().has_partitions(topic, partitions);
                let leaderless = leaderless.into_iter().map(|partition| (partition, Code::LeaderNotAvailable));
                let short = self.short_of_replicas(topic, thin).await;
                let short = short.into_iter().map(|partition| (partition, Code::NotEnoughReplicas));
                let mut fault = None;
                for (found, code) in leaderless.chain(short) {
                    let found = Some(found);
                    if found == partition || !self.publisher.faults.lock().is_parked(topic, found) {
                        let parked = self.park_for(code, topic, found, asked_at);
                        fault = if found == partition { parked } else { fault };
                    }
                }
                return fault;
            }
            Found::Fault(code) => code,
        };
        self.park_for(code, topic, None, asked_at)
    }

    /// Those of the partitions that have fewer replicas in sync than their topic demands, as far as that can be looked up. librdkafka
    /// tries their records again until their time is over, and never says why.
    async fn short_of_replicas(&self, topic: &str, thin: Vec<(i32, usize)>) -> Vec<i32> {
        if thin.is_empty() {
            return Vec::new();
        }
        let in_sync_min = self.limits_of(topic).await.in_sync_min.unwrap_or_default();
        thin.into_iter().filter(|(_, in_sync)| *in_sync < in_sync_min).map(|(partition, _)| partition).collect()
    }

    /// Parks a topic or partition for a code that says so.
    fn park_for(&self, code: Code, topic: &str, partition: Option<i32>, asked_at: Instant) -> Option<Setback> {
        let Class::Topic(word) = codes::classify(code) else { return None };
        let error = self.topic_fault(word, code, topic, partition);
        Some(self.park(topic, partition, asked_at, &error))
    }

    /// The text of a fault of a topic's or a partition's.
    fn topic_fault(&self, word: &str, code: Code, topic: &str, partition: Option<i32>) -> String {
        let text = codes::fault_text(word, code, &self.about(Side::Broker, topic, 0));
        match partition {
            Some(partition) => text.replacen(&format!("topic {topic}"), &format!("topic {topic} [{partition}]"), 1),
            None => text,
        }
    }

    /// The partition of a row's record, as far as it is known before librdkafka chooses.
    fn partition_of(&self, message: &Message) -> Option<i32> {
        let partitions = self.publisher.counts.of(&message.destination)?;
        match &message.message_key {
            Some(key) => Some(partition::of_key(key, partitions)),
            None => (partitions == 1).then_some(0),
        }
    }

    /// The partition that we choose for a record without a key, since some are parked.
    fn choose_partition(&self, message: &Message) -> Option<i32> {
        let partitions = self.publisher.counts.of(&message.destination).filter(|_| message.message_key.is_none())?;
        self.publisher.faults.lock().choose(&message.destination, partitions, Instant::now(), rand::random())
    }

    /// Publishes these rows of a lane one after the other, up to the first that does not get through.
    pub(super) async fn publish_rows(&self, rows: &[usize]) -> Vec<Outcome> {
        let mut outcomes = Vec::with_capacity(rows.len());
        let mut pivot: Option<Uuid> = None;
        for &index in rows {
            let message = &self.batch.messages[index];
            let outcome = match pivot {
                Some(pivot) => held_back(pivot),
                None => self.publish_row(message).await,
            };
            if !is_through(&outcome) {
                pivot.get_or_insert(message.outbox_id);
            }
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Publishes one row.
    async fn publish_row(&self, message: &Message) -> Outcome {
        if let Some(barred) = self.barred() {
            return Self::not_handed_over(barred);
        }
        let record = match record::build(message) {
            Ok(record) => record,
            Err(rejection) => return Outcome::Rejected(rejection),
        };
        let mut chosen = self.choose_partition(message);
        let partition = chosen.or_else(|| self.partition_of(message));
        let admission = self.publisher.faults.lock().admit(record.topic, partition, Instant::now());
        let _probe = match admission {
            Admission::Free => None,
            Admission::Held { pause, reason } => {
                let fault = Setback { blame: Blame::Topic, error: reason, pause };
                return self.topic_setback(Persisted::No, record.topic, partition, fault);
            }
            Admission::Probe => {
                let probe = Probe { publisher: self.publisher, topic: record.topic, partition };
                if let Some(fault) = self.ask_about(record.topic, partition, &self.publisher.careful.current()).await {
                    return self.topic_setback(Persisted::No, record.topic, partition, fault);
                }
                Some(probe)
            }
        };
        for _ in 0..HAND_OVERS_MAX {
            match self.try_row(message, &record, chosen).await {
                Tried::Outcome(outcome) => return outcome,
                // The topic may have fewer partitions by now.
                Tried::Again => chosen = None,
            }
        }
        let error = format!("kafka.client_lost: client: the client was lost under this record {HAND_OVERS_MAX} times");
        setback(Persisted::No, Blame::Topic, &error, SHORT_REST)
    }

    /// Hands the record over once and makes of its report what it means.
    async fn try_row(&self, message: &Message, record: &Record<'_>, partition: Option<i32>) -> Tried {
        match self.hand_over(message, record, partition).await {
            Ok(handed) => self.judge(message, record, &handed).await,
            Err(barred) => Tried::Outcome(Self::not_handed_over(barred)),
        }
    }

    /// Hands the record over, waits while the queue is full, and waits for its report.
    async fn hand_over(
        &self,
        message: &Message,
        record: &Record<'_>,
        partition: Option<i32>,
    ) -> Result<Handed, Barred> {
        loop {
            let generation = self.publisher.careful.current();
            // The fence against waking up after the lease: nothing comes between this look at the clock and handing over.
            if let Some(barred) = self.barred() {
                return Err(barred);
            }
            let at = Instant::now();
            let (reporter, report) = oneshot::channel();
            let refused = match generation.hand_over(record, partition, millis(message), Reporter::One(reporter)) {
                Ok(()) => {
                    let report = self.wait_for(report).await;
                    return Ok(Handed { at, side: Side::Broker, generation, report });
                }
                Err(code) => code,
            };
            if codes::classify(refused) != Class::QueueFull {
                let report = Report { code: Some(refused), persisted: Persisted::No, partition: -1, offset: -1 };
                return Ok(Handed { at, side: Side::Client, generation, report });
            }
            tokio::select! {
                () = sleep(QUEUE_FULL_PAUSE) => {}
                () = self.batch.stop.cancelled() => {}
            }
        }
    }

    async fn wait_for(&self, report: oneshot::Receiver<Report>) -> Report {
        // A record without a report may have been written.
        let lost =
            Report { code: Some(Code::MessageTimedOut), persisted: Persisted::Possibly, partition: -1, offset: -1 };
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let report = tokio::select! {
            biased;
            report = report => report.unwrap_or(lost),
            () = self.abandoned.cancelled() => lost,
        };
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
        report
    }

    /// Whether nothing may be handed over now, and why.
    pub(super) fn barred(&self) -> Option<Barred> {
        let now = Instant::now();
        if self.is_stopping() {
            Some(Barred::Stopping)
        } else if self.resolving.is_cancelled() || now >= self.schedule.hand_over_until || now >= self.batch.deadline {
            Some(Barred::OutOfTime)
        } else {
            None
        }
    }

    fn is_stopping(&self) -> bool {
        self.batch.stop.is_cancelled() || self.publisher.closed.is_cancelled()
    }

    fn not_handed_over(barred: Barred) -> Outcome {
        match barred {
            Barred::Stopping => {
                let error = "kafka.stopping: client: the relay stopped before this row's turn";
                setback(Persisted::No, Blame::Stop, error, Duration::ZERO)
            }
            // Nothing failed: the rows before it took all the time. It is due again at once.
            Barred::OutOfTime => {
                let error = "kafka.out_of_time: client: the call's time was up before this row's turn; raise [relay] \
                             publish_timeout or lower batch_rows_max";
                setback(Persisted::No, Blame::Topic, error, Duration::ZERO)
            }
        }
    }

    /// What the report of a record means for its row.
    async fn judge(&self, message: &Message, record: &Record<'_>, handed: &Handed) -> Tried {
        let Report { code, persisted, partition, offset } = handed.report;
        let code = match (code, persisted) {
            (Some(code), Persisted::No | Persisted::Possibly) => code,
            // Written, whatever became of the answer.
            (None, _) | (Some(_), Persisted::Yes) => {
                handed.generation.acked();
                self.note_acked(message.outbox_id, record.topic, partition, handed.at);
                return Tried::Outcome(Outcome::Acked { partition, offset, maybe_twice: false });
            }
        };
        let about = self.about(handed.side, record.topic, record.octets());
        let outcome = match codes::classify(code) {
            Class::Record(word) => {
                let mut about = about;
                if handed.side == Side::Broker {
                    self.note_refused(message.outbox_id, record.topic, partition);
                    if code == Code::MessageSizeTooLarge {
                        about.topic_bytes_max = self.limits_of(record.topic).await.message_bytes_max;
                    }
                }
                Outcome::Rejected(Rejection::new(word, codes::rejection_detail(code, &about)))
            }
            Class::Topic(_) if code == Code::UnknownPartition && persisted == Persisted::No => {
                // The client took the topic for one with more partitions. Asked about it, it looks again.
                return match self.ask_about(record.topic, None, &handed.generation).await {
                    Some(fault) => Tried::Outcome(self.topic_setback(persisted, record.topic, None, fault)),
                    None => Tried::Again,
                };
            }
            Class::Topic(word) => {
                let partition = chosen(partition).or_else(|| self.partition_of(message));
                let partition = partition.filter(|_| codes::is_of_partition(code));
                let error = self.topic_fault(word, code, record.topic, partition);
                let fault = self.park(record.topic, partition, handed.at, &error);
                self.topic_setback(persisted, record.topic, partition, fault)
            }
            Class::Cluster(word) => {
                let error = codes::fault_text(word, code, &about);
                self.note_cluster_failed(&error);
                setback(persisted, Blame::Cluster, &error, SHORT_REST)
            }
            Class::Fatal => return self.replace_client(code, record, handed).await,
            Class::Purged if !self.resolving.is_cancelled() && !self.is_stopping() => {
                // Another call ran out of time, or the client was replaced. What surely was not written goes again.
                if persisted == Persisted::No {
                    return Tried::Again;
                }
                let error = format!("kafka.purged: client: topic {}: let go of while it was on its way", record.topic);
                setback(persisted, Blame::Topic, &error, Duration::ZERO)
            }
            Class::Late | Class::Purged => self.judge_silence(message, record, handed).await,
            Class::Unproven => {
                let error = format!(
                    "kafka.unproven: client: topic {}: a later record was acknowledged before this one; it may have been written",
                    record.topic
                );
                setback(persisted, Blame::Topic, &error, Duration::ZERO)
            }
            Class::QueueFull => return Tried::Again,
            Class::Unlisted(word) => {
                let error = bounded(&codes::fault_text(&word, code, &about));
                match persisted {
                    Persisted::Possibly => setback(persisted, Blame::Row, &error, Duration::ZERO),
                    Persisted::No | Persisted::Yes => Outcome::Failed { error },
                }
            }
        };
        Tried::Outcome(outcome)
    }

    /// What it means that a record got no verdict in time.
    async fn judge_silence(&self, message: &Message, record: &Record<'_>, handed: &Handed) -> Outcome {
        let Report { persisted, partition, .. } = handed.report;
        let topic = record.topic;
        let fate = match persisted {
            Persisted::No => "it was not written",
            Persisted::Possibly | Persisted::Yes => "it may have been written",
        };
        if self.is_stopping() {
            let error = format!("kafka.stopping: client: topic {topic}: no answer before the relay stopped; {fate}");
            return setback(persisted, Blame::Stop, &error, Duration::ZERO);
        }
        let now = Instant::now();
        let silence = match self.publisher.faults.lock().silent(topic, handed.at, now) {
            Silence::Unclear => None,
            clear @ (Silence::Partition | Silence::Topic | Silence::Cluster) => Some(clear),
        };
        let silence = match silence {
            Some(silence) => silence,
            None if self.cluster_answers().await => Silence::Topic,
            None => Silence::Cluster,
        };
        let waited = now.saturating_duration_since(handed.at).as_millis();
        let text =
            |what: &str| format!("kafka.timed_out: broker: topic {topic}: no answer in {waited} ms {what}; {fate}");
        if silence == Silence::Cluster {
            let error = text("and nothing else was answered; check [kafka] brokers, the network and the brokers");
            self.note_cluster_failed(&error);
            return setback(persisted, Blame::Cluster, &error, SHORT_REST);
        }
        let rest =
            self.publisher.faults.lock().suspect(message.outbox_id, topic, partition, handed.at, now, rand::random());
        let Some(pause) = rest else {
            let error = text("while its partition answered later records, for the third time: the row is suspect");
            return setback(persisted, Blame::Row, &error, Duration::ZERO);
        };
        // A partition that is known fails alone; of the others nothing is known.
        let partition = chosen(partition).or_else(|| self.partition_of(message));
        let is_mute = |partition| self.publisher.faults.lock().is_mute(topic, partition, handed.at, now);
        if silence == Silence::Partition && !partition.is_some_and(is_mute) {
            return setback(persisted, Blame::Topic, &text("while the topic answered others"), pause);
        }
        let error = text("while the cluster answered; look at the topic's leaders and in-sync replicas");
        let fault = self.park(topic, partition, handed.at, &error);
        self.topic_setback(persisted, topic, partition, fault)
    }

    /// The outcome of a row whose topic or partition is at fault: it spends no attempt, unless that has lasted for too long.
    fn topic_setback(&self, persisted: Persisted, topic: &str, partition: Option<i32>, fault: Setback) -> Outcome {
        let since = self.publisher.faults.lock().parked_since(topic, partition);
        let is_over = |after: Duration| since.is_some_and(|since| since.elapsed() >= after);
        if !self.publisher.topic_fault_dead_after.is_some_and(is_over) {
            return with(persisted, fault);
        }
        let error = bounded(&format!("{}; this has lasted for [kafka] topic_fault_dead_after", fault.error));
        match persisted {
            Persisted::No => Outcome::Failed { error },
            Persisted::Possibly | Persisted::Yes => Outcome::Unknown(Setback { blame: Blame::Row, error, ..fault }),
        }
    }

    /// The client died under this record: another one takes over, and the record goes again if it surely was not written.
    async fn replace_client(&self, code: Code, record: &Record<'_>, handed: &Handed) -> Tried {
        let persisted = handed.report.persisted;
        let (cause, reason) = handed.generation.fatal().unwrap_or_else(|| (code, code.to_string()));
        let is_replaced = self
            .publisher
            .careful
            .rebuild(&handed.generation, &reason, Duration::ZERO, self.schedule.hand_over_until)
            .await;
        if let Class::Cluster(word) = codes::classify(cause) {
            let error = codes::fault_text(word, cause, &self.about(Side::Broker, record.topic, record.octets()));
            self.note_cluster_failed(&error);
            return Tried::Outcome(setback(persisted, Blame::Cluster, &error, SHORT_REST));
        }
        if is_replaced && persisted == Persisted::No && self.barred().is_none() {
            return Tried::Again;
        }
        let error =
            format!("kafka.client_fatal: client: topic {}: the client had to be replaced: {reason}", record.topic);
        Tried::Outcome(setback(persisted, Blame::Topic, &error, SHORT_REST))
    }

    /// Returns when what is still on its way has to be purged: at the schedule's time, or some while after a stop.
    async fn time_is_up(&self) {
        let scheduled = async {
            let Schedule { hand_over_until, resolve_at, part, .. } = self.schedule;
            sleep_until(hand_over_until.into()).await;
            // Records are late. Unless the cluster acknowledges others, the question whose fault that is will come up, and a
            // new connection takes its time: asked now, the answer is there when it is needed.
            let recently = hand_over_until.checked_sub(part).unwrap_or(hand_over_until);
            if !self.publisher.faults.lock().was_acked_since(recently) {
                self.cluster_answers().await;
            }
            sleep_until(resolve_at.into()).await;
        };
        let stopped = async {
            tokio::select! {
                () = self.batch.stop.cancelled() => {}
                () = self.publisher.closed.cancelled() => {}
            }
            let wait = self.publisher.stop_wait.saturating_sub(self.schedule.part);
            let no_broker_is_up = self.publisher.faults.lock().no_broker_is_up();
            sleep(if no_broker_is_up { wait.min(STOP_WAIT_WITHOUT_BROKER) } else { wait }).await;
        };
        tokio::select! {
            () = scheduled => {}
            () = stopped => {}
        }
    }

    /// Brings every record that is still on its way its report. Lanes go on meanwhile, and usually end before this does.
    async fn resolve(&self) {
        let part = self.schedule.part;
        self.resolving.cancel();
        if self.in_flight.load(Ordering::Relaxed) == 0 {
            // The fast lane lets go of its own, and its rows end as not handed over here.
            return std::future::pending().await;
        }
        let client = &self.publisher.careful;
        let generation = client.current();
        // Records that were never sent first: most that wait for a partition without a leader are among them, and letting go
        // of those disturbs no other call.
        generation.purge(false).await;
        sleep(part / 16).await;
        if self.in_flight.load(Ordering::Relaxed) == 0 {
            // Lanes only wait for answers about whose fault it is.
            return std::future::pending().await;
        }
        // What is left was sent and not answered. The client that sent it is replaced: who knows what its connection holds.
        let until = Instant::now() + part / 8;
        if !client.rebuild(&generation, "records in flight got no answer in time", Duration::ZERO, until).await {
            generation.purge(true).await;
        }
        sleep(part / 4).await;
    }

    /// Whether the cluster answers: over a connection that is there, or over a new one, since the one that is there may be stuck
    /// behind a request.
    async fn cluster_answers(&self) -> bool {
        let ask = || async {
            let now = Instant::now();
            let Schedule { resolve_at, part, .. } = self.schedule;
            let until = if now < resolve_at { resolve_at } else { resolve_at + part };
            let bound = until.saturating_duration_since(now);
            let client = &self.publisher.careful;
            let mut topics = self.batch.messages.iter().map(|message| message.destination.as_str());
            let here = async {
                match topics.find(|topic| record::is_legal_topic(topic)) {
                    Some(topic) => client.current().ask_about(topic, bound).await.is_ok(),
                    None => false,
                }
            };
            let anew = async {
                let answer = client.ask_cluster(bound).await;
                if let Err(reason) = &answer {
                    tracing::debug!("the cluster does not answer a new connection: {reason}");
                }
                answer.is_ok()
            };
            let (mut here, mut anew) = (pin!(here), pin!(anew));
            tokio::select! {
                answers = &mut here => answers || anew.await,
                answers = &mut anew => answers || here.await,
            }
        };
        *self.cluster_answers.get_or_init(ask).await
    }

    /// The topic's own limits, when they can be had in time.
    async fn limits_of(&self, topic: &str) -> Limits {
        let look = self.publisher.limits.of(self.publisher.careful.blueprint(), topic);
        tokio::time::timeout_at(self.schedule.resolve_at.into(), look).await.unwrap_or_default()
    }

    fn about<'t>(&self, side: Side, topic: &'t str, octets: usize) -> About<'t> {
        About { side, topic, octets, message_bytes_max: self.publisher.message_bytes_max, topic_bytes_max: None }
    }

    /// Parks a topic, or a partition of it, and returns what that means for the row that found out.
    fn park(&self, topic: &str, partition: Option<i32>, handed_over: Instant, error: &str) -> Setback {
        let error = bounded(error);
        if partition.is_none() {
            // It may come back as another one, with other partitions.
            self.publisher.counts.forget(topic);
        }
        let now = Instant::now();
        let parking = self.publisher.faults.lock().failed(topic, partition, handed_over, &error, now, rand::random());
        if parking.is_new {
            tracing::warn!(topic, partition, "a topic or partition is parked: {error}");
        } else {
            tracing::debug!(topic, partition, "the topic or partition stays parked: {error}");
        }
        Setback { blame: Blame::Topic, error, pause: parking.pause }
    }

    fn note_acked(&self, id: Uuid, topic: &str, partition: i32, handed_over: Instant) {
        if self.publisher.faults.lock().acked(id, topic, partition, handed_over, Instant::now()) {
            tracing::info!(topic, "the topic takes records again");
        }
        self.publisher.guards().answered(topic, partition);
    }

    fn note_refused(&self, id: Uuid, topic: &str, partition: i32) {
        if self.publisher.faults.lock().refused(id, topic, chosen(partition)) {
            tracing::info!(topic, "the topic answers again");
        }
    }

    fn note_cluster_failed(&self, error: &str) {
        if self.publisher.faults.lock().cluster_failed(error) {
            tracing::error!("the Kafka cluster takes nothing: {error}");
        }
    }
}

/// The partition of a report, when one was chosen.
fn chosen(partition: i32) -> Option<i32> {
    (partition >= 0).then_some(partition)
}

/// The claim's database time: a wrong clock of this host hurts nobody.
pub(super) fn millis(message: &Message) -> Option<i64> {
    message.updated_at.unix_micros().map(|micros| micros.div_euclid(1000))
}

/// Whether later rows of the lane may follow.
pub(super) fn is_through(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Acked { .. } | Outcome::Rejected(_) => true,
        Outcome::Failed { .. } | Outcome::Unknown(_) | Outcome::NotSent(_) => false,
    }
}

/// The outcome of a row behind one that did not get through.
pub(super) fn held_back(pivot: Uuid) -> Outcome {
    let error = format!("kafka.held_back: client: behind {pivot} of its lane");
    setback(Persisted::No, Blame::Lane, &error, Duration::ZERO)
}

/// A setback as the outcome it is: of a record that may have been written, or of one that surely was not.
fn with(persisted: Persisted, setback: Setback) -> Outcome {
    match persisted {
        Persisted::No => Outcome::NotSent(setback),
        Persisted::Possibly | Persisted::Yes => Outcome::Unknown(setback),
    }
}

pub(super) fn setback(persisted: Persisted, blame: Blame, error: &str, pause: Duration) -> Outcome {
    with(persisted, Setback { blame, error: bounded(error), pause })
}

fn bounded(error: &str) -> String {
    outcome::last_error(error)
}
