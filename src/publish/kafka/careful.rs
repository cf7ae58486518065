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

use super::KafkaPublisher;
use super::client::{Generation, Persisted, Report};
use super::codes::{self, About, Class, Side};
use super::faults::{Admission, Silence};
use crate::domain::message::Message;
use crate::domain::outcome::{self, Blame, Outcome, Rejection, Setback};
use crate::domain::record::{self, Record};
use crate::publish::Batch;

/// Lanes of one call that may have a record on its way at once; a call has no more lanes than rows, which the configuration
/// bounds, so this is a backstop.
const LANES_IN_FLIGHT_MAX: usize = 10_000;
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
    let lanes: Vec<_> = batch.plan.lanes.iter().map(|lane| call.publish_lane(lane)).collect();
    let mut lanes = pin!(stream::iter(lanes).buffer_unordered(LANES_IN_FLIGHT_MAX).concat());
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
struct Schedule {
    /// Nothing is handed over from here on; what is on its way has a while left.
    hand_over_until: Instant,
    /// What is still on its way now is purged.
    resolve_at: Instant,
    /// How long each of these last parts is.
    part: Duration,
}

impl Schedule {
    fn new(now: Instant, deadline: Instant) -> Self {
        let part = (deadline.saturating_duration_since(now) / 10).min(Duration::from_secs(2));
        let resolve_at = deadline.checked_sub(part).unwrap_or(now);
        Self { hand_over_until: resolve_at.checked_sub(part).unwrap_or(now), resolve_at, part }
    }
}

/// One call of `publish`.
struct Call<'a> {
    publisher: &'a KafkaPublisher,
    batch: &'a Batch,
    schedule: Schedule,
    /// Set before records are purged because our time is up: a record that comes back is not handed over again.
    resolving: CancellationToken,
    /// Set when even the purge brought no report.
    abandoned: CancellationToken,
    /// Records handed over whose reports have not come.
    in_flight: AtomicUsize,
    /// Whether the cluster answers, asked at most once.
    cluster_answers: OnceCell<bool>,
}

/// Why a record may not be handed over now.
#[derive(Debug, Clone, Copy)]
enum Barred {
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

/// The one probe of a parked topic. Dropping it, also with its call, lets another record try.
struct Probe<'a> {
    publisher: &'a KafkaPublisher,
    topic: &'a str,
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        // After a verdict of the topic's there is nothing to release, and that is fine.
        self.publisher.faults.lock().release(self.topic);
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

    /// Asks about topics that no record went to yet, so that one that does not exist or may not be written to is parked at
    /// once: librdkafka would keep its records, and with them this call, for seconds.
    async fn introduce_topics(&self) {
        let topics: BTreeSet<&str> = {
            let faults = self.publisher.faults.lock();
            if faults.is_down() {
                return;
            }
            let topics = self.batch.messages.iter().map(|message| message.destination.as_str());
            topics.filter(|topic| !faults.is_familiar(topic) && !faults.is_parked(topic)).collect()
        };
        let topics = topics.into_iter().filter(|topic| record::is_legal_topic(topic));
        let introductions = stream::iter(topics).for_each_concurrent(INTRODUCTIONS_IN_FLIGHT_MAX, |topic| async move {
            // What it answers is remembered; who comes now finds the topic parked or free.
            let _ = self.ask_about(topic).await;
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

    /// Asks the cluster about a topic; a fault of the topic parks it and is returned.
    async fn ask_about(&self, topic: &str) -> Option<Setback> {
        let asked_at = Instant::now();
        let answer = self.publisher.careful.current().ask_about(topic, self.ask_bound()).await;
        let Ok(found) = answer else {
            // No answer says nothing about the topic: its record will tell.
            return None;
        };
        self.publisher.faults.lock().answered();
        let code = found?;
        let Class::Topic(word) = codes::classify(code) else { return None };
        let about = self.about(Side::Broker, topic, 0);
        let error = codes::fault_text(word, code, &about);
        Some(self.park(topic, asked_at, &error))
    }

    /// Publishes the rows of a lane one after the other, up to the first that does not get through.
    async fn publish_lane(&self, lane: &[usize]) -> Vec<(Uuid, Outcome)> {
        let mut outcomes = Vec::with_capacity(lane.len());
        let mut pivot: Option<Uuid> = None;
        for &index in lane {
            let message = &self.batch.messages[index];
            let outcome = match pivot {
                Some(pivot) => setback(
                    Persisted::No,
                    Blame::Lane,
                    &format!("kafka.held_back: client: behind {pivot} of its lane"),
                    Duration::ZERO,
                ),
                None => self.publish_row(message).await,
            };
            match &outcome {
                Outcome::Acked { .. } | Outcome::Rejected(_) => {}
                Outcome::Failed { .. } | Outcome::Unknown(_) | Outcome::NotSent(_) => {
                    pivot.get_or_insert(message.outbox_id);
                }
            }
            outcomes.push((message.outbox_id, outcome));
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
        let admission = self.publisher.faults.lock().admit(record.topic, Instant::now());
        let _probe = match admission {
            Admission::Free => None,
            Admission::Held { pause, reason } => return setback(Persisted::No, Blame::Topic, &reason, pause),
            Admission::Probe => {
                let probe = Probe { publisher: self.publisher, topic: record.topic };
                if let Some(fault) = self.ask_about(record.topic).await {
                    return Outcome::NotSent(fault);
                }
                Some(probe)
            }
        };
        for _ in 0..HAND_OVERS_MAX {
            match self.try_row(message, &record).await {
                Tried::Outcome(outcome) => return outcome,
                Tried::Again => {}
            }
        }
        let error = format!("kafka.client_lost: client: the client was lost under this record {HAND_OVERS_MAX} times");
        setback(Persisted::No, Blame::Topic, &error, SHORT_REST)
    }

    /// Hands the record over once and makes of its report what it means.
    async fn try_row(&self, message: &Message, record: &Record<'_>) -> Tried {
        match self.hand_over(message, record).await {
            Ok(handed) => self.judge(message, record, &handed).await,
            Err(barred) => Tried::Outcome(Self::not_handed_over(barred)),
        }
    }

    /// Hands the record over, waits while the queue is full, and waits for its report.
    async fn hand_over(&self, message: &Message, record: &Record<'_>) -> Result<Handed, Barred> {
        // The claim's database time: a wrong clock of this host hurts nobody.
        let millis = message.updated_at.unix_micros().map(|micros| micros.div_euclid(1000));
        loop {
            let generation = self.publisher.careful.current();
            // The fence against waking up after the lease: nothing comes between this look at the clock and handing over.
            if let Some(barred) = self.barred() {
                return Err(barred);
            }
            let at = Instant::now();
            let refused = match generation.hand_over(record, millis) {
                Ok(report) => {
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
    fn barred(&self) -> Option<Barred> {
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
                return Tried::Outcome(Outcome::Acked { partition, offset });
            }
        };
        let about = self.about(handed.side, record.topic, record.octets());
        let outcome = match codes::classify(code) {
            Class::Record(word) => {
                let mut about = about;
                if handed.side == Side::Broker {
                    self.note_refused(message.outbox_id, record.topic);
                    if code == Code::MessageSizeTooLarge {
                        about.topic_bytes_max = self.topic_bytes_max(record.topic).await;
                    }
                }
                Outcome::Rejected(Rejection::new(word, codes::rejection_detail(code, &about)))
            }
            Class::Topic(word) => {
                let fault = self.park(record.topic, handed.at, &codes::fault_text(word, code, &about));
                with(persisted, fault)
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
        if silence == Silence::Partition {
            return setback(persisted, Blame::Topic, &text("while the topic answered others"), pause);
        }
        let error = text("while the cluster answered; look at the topic's leaders and in-sync replicas");
        with(persisted, self.park(topic, handed.at, &error))
    }

    /// The client died under this record: another one takes over, and the record goes again if it surely was not written.
    async fn replace_client(&self, code: Code, record: &Record<'_>, handed: &Handed) -> Tried {
        let persisted = handed.report.persisted;
        let (cause, reason) = handed.generation.fatal().unwrap_or_else(|| (code, code.to_string()));
        let is_replaced =
            self.publisher.careful.rebuild(&handed.generation, &reason, self.schedule.hand_over_until).await;
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
            let Schedule { hand_over_until, resolve_at, part } = self.schedule;
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
        if !client.rebuild(&generation, "records in flight got no answer in time", until).await {
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

    /// The topic's own limit, when it can be had in time.
    async fn topic_bytes_max(&self, topic: &str) -> Option<usize> {
        let look = self.publisher.limits.bytes_max(self.publisher.careful.blueprint(), topic);
        tokio::time::timeout_at(self.schedule.resolve_at.into(), look).await.ok()?
    }

    fn about<'t>(&self, side: Side, topic: &'t str, octets: usize) -> About<'t> {
        About { side, topic, octets, message_bytes_max: self.publisher.message_bytes_max, topic_bytes_max: None }
    }

    /// Parks a topic and returns what that means for the row that found out.
    fn park(&self, topic: &str, handed_over: Instant, error: &str) -> Setback {
        let error = bounded(error);
        let parking =
            self.publisher.faults.lock().topic_failed(topic, handed_over, &error, Instant::now(), rand::random());
        if parking.is_new {
            tracing::warn!(topic, "a topic is parked: {error}");
        } else {
            tracing::debug!(topic, "the topic stays parked: {error}");
        }
        Setback { blame: Blame::Topic, error, pause: parking.pause }
    }

    fn note_acked(&self, id: Uuid, topic: &str, partition: i32, handed_over: Instant) {
        if self.publisher.faults.lock().acked(id, topic, partition, handed_over, Instant::now()) {
            tracing::info!(topic, "the topic takes records again");
        }
    }

    fn note_refused(&self, id: Uuid, topic: &str) {
        if self.publisher.faults.lock().refused(id, topic) {
            tracing::info!(topic, "the topic answers again");
        }
    }

    fn note_cluster_failed(&self, error: &str) {
        if self.publisher.faults.lock().cluster_failed(error) {
            tracing::error!("the Kafka cluster takes nothing: {error}");
        }
    }
}

/// A setback as the outcome it is: of a record that may have been written, or of one that surely was not.
fn with(persisted: Persisted, setback: Setback) -> Outcome {
    match persisted {
        Persisted::No => Outcome::NotSent(setback),
        Persisted::Possibly | Persisted::Yes => Outcome::Unknown(setback),
    }
}

fn setback(persisted: Persisted, blame: Blame, error: &str, pause: Duration) -> Outcome {
    with(persisted, Setback { blame, error: bounded(error), pause })
}

fn bounded(error: &str) -> String {
    outcome::last_error(error)
}
