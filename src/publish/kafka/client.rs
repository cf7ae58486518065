//! librdkafka behind a seam: building a client, handing a record over, its exact report, purging, building anew.
//!
//! Nothing here ever judges a code, decides what a row becomes, or blocks the caller: what blocks in librdkafka (purge, flush,
//! metadata, drop) runs on threads for that. `rd_kafka_message_produce_errstr` is never called: its text may dangle.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use rdkafka::bindings::{rd_kafka_message_status, rd_kafka_msg_status_t};
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::ConsumerContext;
use rdkafka::error::KafkaError;
use rdkafka::message::{DeliveryResult, Header, Message as _, OwnedHeaders};
use rdkafka::metadata::MetadataPartition;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer, ProducerContext, PurgeConfig, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot};
use tokio::task::spawn_blocking;

use super::codes::{self, Class};
use super::faults::Faults;
use crate::config;
use crate::domain::record::Record;

/// How many characters of a text of librdkafka's are kept.
const REASON_CHARS_MAX: usize = 400;
/// Shortest time between two clients when the first was never acknowledged anything, doubling up to [`REBUILD_PAUSE_MAX`].
const REBUILD_PAUSE: Duration = Duration::from_millis(500);
const REBUILD_PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long a purge may take before its caller goes on without it: it waits for threads that may be looking up a name.
const PURGE_MAX: Duration = Duration::from_secs(1);
/// How long after its last acknowledgement a partition counts as warm. Brokers forget a producer after a day
/// (`producer.id.expiration.ms`), and one that is told to do so sooner hardly does within minutes.
const WARM_FOR: Duration = Duration::from_secs(300);
/// Topics whose warm partitions are remembered; beyond, all are forgotten, and lanes go head first once more.
const WARM_TOPICS_MAX: usize = 10_000;
/// Pause between two looks at what a client that was replaced still waits for.
const RETIREMENT_LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// The memory of faults, shared with librdkafka's callbacks.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedFaults {
    faults: Arc<Mutex<Faults>>,
    /// How many brokers each client is connected to, by its purpose.
    up: Arc<[AtomicUsize; 2]>,
}

impl SharedFaults {
    /// Held for a few map look-ups, never across an await.
    pub(super) fn lock(&self) -> MutexGuard<'_, Faults> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A client says how many brokers it is connected to. One that is idle may have let its connections go, so a broker is up
    /// when either client says so.
    fn brokers_up(&self, purpose: Purpose, up: usize) {
        let slot = match purpose {
            Purpose::Fast => 0,
            Purpose::Careful => 1,
            Purpose::Question => return,
        };
        self.up[slot].store(up, Ordering::Relaxed);
        let up = self.up.iter().map(|up| up.load(Ordering::Relaxed)).sum();
        self.lock().brokers_up(up, Instant::now());
    }
}

/// Why no client could be built. It never holds the value of a property.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// librdkafka does not take a property.
    #[error("[kafka.properties] {name}: librdkafka refuses it: {reason}")]
    Property {
        /// Its name.
        name: String,
        /// What librdkafka says, without the value.
        reason: String,
    },
    /// The file that holds a property's value cannot be read.
    #[error(transparent)]
    Setting(#[from] config::SettingError),
    /// librdkafka does not take the properties together.
    #[error("[kafka]: librdkafka cannot build a client: {0}")]
    Creation(String),
}

impl From<KafkaError> for ClientError {
    fn from(error: KafkaError) -> Self {
        match error {
            // librdkafka quotes the value when it refuses it, and the value may be a secret.
            KafkaError::ClientConfig(_, reason, name, value) => {
                let reason = if value.is_empty() { reason } else { reason.replace(&value, "***") };
                Self::Property { name, reason }
            }
            error => Self::Creation(error.to_string()),
        }
    }
}

/// What a client is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Many records on their way at once; the first that fails stops all of them.
    Fast,
    /// One record per batch, so that a code is the record's own.
    Careful,
    /// One question, then gone.
    Question,
}

/// How clients are built.
#[derive(Debug, Clone)]
pub(super) struct Blueprint {
    kafka: config::Kafka,
    message_timeout: Duration,
}

impl Blueprint {
    pub(super) fn new(kafka: &config::Kafka, relay: &config::Relay) -> Self {
        Self { kafka: kafka.clone(), message_timeout: message_timeout(relay) }
    }

    /// Every property of a client; reads the files that hold secrets, so that a rotated one counts from the next client on.
    fn config(&self, purpose: Purpose) -> Result<ClientConfig, ClientError> {
        let mut config = ClientConfig::new();
        for (name, value) in self.kafka.client_properties()? {
            config.set(name, value.expose());
        }
        config.set("acks", "all");
        config.set("message.timeout.ms", self.message_timeout.as_millis().to_string());
        // As Java clients do, so that a key lands where other producers of the topic put it.
        config.set("partitioner", "murmur2_random");
        match purpose {
            Purpose::Fast => {
                config.set("enable.idempotence", "true");
                // A batch that fails is fatal for the client: nothing that was handed over after it goes out.
                config.set("enable.gapless.guarantee", "true");
            }
            Purpose::Careful => {
                config.set("enable.idempotence", "true");
                // Off: a refused record would be fatal for the client, and here every lane waits for its own record anyway.
                config.set("enable.gapless.guarantee", "false");
                config.set("batch.num.messages", "1");
                // Under either name the user may have set it: librdkafka would take whichever comes last.
                config.remove("queue.buffering.max.ms");
                config.set("linger.ms", "0");
            }
            Purpose::Question => {
                config.set("enable.idempotence", "false");
                config.set("statistics.interval.ms", "0");
                // To every broker at once: the next one after a dead one would have its turn a second later.
                config.set("enable.sparse.connections", "false");
                config.remove("enable.gapless.guarantee");
            }
        }
        Ok(config)
    }

    /// A client for one question.
    pub(super) fn question<C: FromClientConfigAndContext<QuietContext>>(&self) -> Result<C, ClientError> {
        Ok(self.config(Purpose::Question)?.create_with_context(QuietContext::default())?)
    }

    /// A client for questions that logs what the brokers say of themselves as they are connected to.
    pub(super) fn curious<X: ClientContext, C: FromClientConfigAndContext<X>>(
        &self,
        context: X,
    ) -> Result<C, ClientError> {
        let mut config = self.config(Purpose::Question)?;
        config.set("debug", "feature").set_log_level(RDKafkaLogLevel::Debug);
        Ok(config.create_with_context(context)?)
    }

    /// A client that reads topics: in no group, never committing, only what is committed.
    pub(super) fn reader<C: FromClientConfigAndContext<QuietContext>>(&self) -> Result<C, ClientError> {
        let mut config = ClientConfig::new();
        for (name, value) in self.kafka.client_properties()? {
            config.set(name, value.expose());
        }
        config.set("statistics.interval.ms", "0");
        // The group is never joined, but the client wants its name.
        config.set("group.id", "keiro-relay-verify").set("enable.auto.commit", "false");
        config.set("enable.auto.offset.store", "false").set("isolation.level", "read_committed");
        config.set("enable.partition.eof", "true").set("auto.offset.reset", "earliest");
        config.set("allow.auto.create.topics", "false");
        Ok(config.create_with_context(QuietContext::default())?)
    }
}

/// How long librdkafka may keep a record. Our own deadline comes first, always; this one holds for a process that was stopped
/// and wakes: what it still has must not go out after the lease ended and someone else took the row (design §3.4).
///
/// A record is handed over up to `publish_timeout` after the claim, so the last one may go out until twice that plus the margin;
/// the configuration keeps three times as much below the lease.
fn message_timeout(relay: &config::Relay) -> Duration {
    relay.publish_timeout + config::LEASE_MARGIN
}

/// What became of a record that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    /// `None` is an acknowledgement.
    pub(super) code: Option<Code>,
    pub(super) persisted: Persisted,
    /// Below 0 when it was never chosen.
    pub(super) partition: i32,
    /// Below 0 without an acknowledgement.
    pub(super) offset: i64,
}

/// What a report proves. librdkafka takes all earlier records of a partition for written when a later one is acknowledged, those that
/// wait to be sent again included, and reports them as delivered, without an offset. That holds only where the broker knows the
/// client: on a partition that does not (a broker that has just started, a topic made anew), it took the later one as the first,
/// and the earlier one was never written. So only an offset is an acknowledgement.
fn proven(code: Option<Code>, persisted: Persisted, offset: i64) -> (Option<Code>, Persisted) {
    match (code, persisted) {
        (None, _) if offset < 0 => (Some(Code::NoOffset), Persisted::Possibly),
        (Some(code), Persisted::Yes) if offset < 0 => (Some(code), Persisted::Possibly),
        proven => proven,
    }
}

/// Whether a record was written, as librdkafka knows it. The code alone does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Persisted {
    No,
    Possibly,
    Yes,
}

/// Where the report of a record goes. There is exactly one, unless handing over says that nothing was taken.
pub(super) enum Reporter {
    /// To whoever waits for this record alone.
    One(oneshot::Sender<Report>),
    /// To a call that has many on their way, with the row's index.
    Row(usize, mpsc::UnboundedSender<(usize, Report)>),
}

/// Receives librdkafka's events on its poll thread.
pub(super) struct Context {
    faults: SharedFaults,
    purpose: Purpose,
    /// Off once another client took over: what this one says of connections no longer counts.
    is_current: Arc<AtomicBool>,
}

/// The little of the statistics that is read; everything else is skipped over.
#[derive(Deserialize)]
struct Statistics {
    #[serde(default)]
    brokers: HashMap<String, BrokerStatistics>,
}

#[derive(Deserialize)]
struct BrokerStatistics {
    state: String,
    source: String,
}

impl ClientContext for Context {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, text: &str) {
        // What an operator has to know is said once, as the problem it becomes; these lines are for finding out more.
        tracing::debug!(target: "librdkafka", facility, "{text}");
    }

    fn stats_raw(&self, json: &[u8]) {
        let Ok(statistics) = serde_json::from_slice::<Statistics>(json) else { return };
        let is_up = |broker: &&BrokerStatistics| matches!(broker.state.as_str(), "UP" | "UPDATE");
        let real =
            statistics.brokers.values().filter(|broker| matches!(broker.source.as_str(), "learned" | "configured"));
        let up = real.filter(is_up).count();
        if self.is_current.load(Ordering::Relaxed) {
            self.faults.brokers_up(self.purpose, up);
        }
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let Some(code) = error.rdkafka_error_code() else { return };
        // Each event arrives twice; everything here may happen twice.
        tracing::debug!(target: "librdkafka", ?code, "{reason}");
        if !self.is_current.load(Ordering::Relaxed) {
            return;
        }
        if let Class::Cluster(word) = codes::classify(code) {
            if code == Code::AllBrokersDown {
                self.faults.brokers_up(self.purpose, 0);
            } else {
                self.faults.lock().connection_failed(bounded(&format!("{word}: {reason}")));
            }
        }
    }
}

impl ProducerContext for Context {
    type DeliveryOpaque = Box<Reporter>;

    fn delivery(&self, result: &DeliveryResult<'_>, reporter: Self::DeliveryOpaque) {
        let (code, message) = match result {
            Ok(message) => (None, message),
            Err((error, message)) => (Some(error.rdkafka_error_code().unwrap_or(Code::Unknown)), message),
        };
        #[expect(unsafe_code, reason = "the binding has no other way to rd_kafka_message_status")]
        // SAFETY: the pointer belongs to the delivery report event, which `message` keeps alive; the function only reads it.
        let status = unsafe { rd_kafka_message_status(message.ptr()) };
        let persisted = match status {
            rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_NOT_PERSISTED => Persisted::No,
            rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_POSSIBLY_PERSISTED => Persisted::Possibly,
            rd_kafka_msg_status_t::RD_KAFKA_MSG_STATUS_PERSISTED => Persisted::Yes,
        };
        let (code, persisted) = proven(code, persisted, message.offset());
        let report = Report { code, persisted, partition: message.partition(), offset: message.offset() };
        // Nobody may be waiting any more: the call was dropped.
        match *reporter {
            Reporter::One(reporter) => drop(reporter.send(report)),
            Reporter::Row(row, reporter) => drop(reporter.send((row, report))),
        }
    }
}

/// What the cluster says of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Found {
    /// It is there, with so many partitions; some of them perhaps without a leader, or with a leader and so many replicas in sync,
    /// fewer than all.
    There { partitions: i32, leaderless: Vec<i32>, thin: Vec<(i32, usize)> },
    /// It takes nothing, or not from us.
    Fault(Code),
}

/// One librdkafka client, from its building to its replacement.
pub(super) struct Generation {
    number: u64,
    is_current: Arc<AtomicBool>,
    /// Whether it was acknowledged anything: a client that works may be replaced at once when it breaks.
    has_acked: AtomicBool,
    /// Whether it takes nothing any more. Held for reading while a record is handed over, so that none comes in behind a purge.
    is_closed: RwLock<bool>,
    /// By topic and partition, when it was acknowledged a record there last.
    warm: Mutex<HashMap<String, HashMap<i32, Instant>>>,
    /// `None` only while it is dropped.
    producer: Option<ThreadedProducer<Context>>,
}

impl Generation {
    fn build(blueprint: &Blueprint, purpose: Purpose, faults: SharedFaults, number: u64) -> Result<Self, ClientError> {
        let is_current = Arc::new(AtomicBool::new(true));
        let context = Context { faults, purpose, is_current: Arc::clone(&is_current) };
        let producer = blueprint.config(purpose)?.create_with_context(context)?;
        let (has_acked, is_closed, warm) = (AtomicBool::new(false), RwLock::default(), Mutex::default());
        Ok(Self { number, is_current, has_acked, is_closed, warm, producer: Some(producer) })
    }

    /// Which of its purpose's clients it is.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    fn producer(&self) -> &ThreadedProducer<Context> {
        self.producer.as_ref().expect("the producer is there until the generation is dropped")
    }

    /// Hands a record over, to a partition or to the one that librdkafka chooses. Milliseconds are since 1970. A client that was
    /// retired refuses it as one that has failed does.
    pub(super) fn hand_over(
        &self,
        record: &Record<'_>,
        partition: Option<i32>,
        millis: Option<i64>,
        reporter: Reporter,
    ) -> Result<(), Code> {
        let mut headers = OwnedHeaders::new_with_capacity(record.headers.len());
        for (key, value) in &record.headers {
            headers = headers.insert(Header { key, value: Some(value.as_ref()) });
        }
        let mut native = BaseRecord::with_opaque_to(record.topic, Box::new(reporter)).headers(headers);
        native.payload = Some(record.payload.as_ref());
        native.key = record.key;
        native.partition = partition;
        native.timestamp = millis;
        let is_closed = self.is_closed.read().unwrap_or_else(PoisonError::into_inner);
        if *is_closed {
            return Err(Code::Fatal);
        }
        let sent = self.producer().send::<str, [u8]>(native);
        sent.map_err(|(error, _)| error.rdkafka_error_code().unwrap_or(Code::InvalidArgument))
    }

    /// Notes that it works.
    pub(super) fn acked(&self) {
        self.has_acked.store(true, Ordering::Relaxed);
    }

    /// Notes an acknowledgement by a partition.
    pub(super) fn acked_by(&self, topic: &str, partition: i32, now: Instant) {
        self.acked();
        let mut warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        match warm.get_mut(topic) {
            Some(partitions) => drop(partitions.insert(partition, now)),
            None => {
                if warm.len() >= WARM_TOPICS_MAX {
                    warm.clear();
                }
                warm.insert(topic.to_owned(), HashMap::from([(partition, now)]));
            }
        }
    }

    /// Whether a partition knows this client: it acknowledged a record of it lately, so it refuses one that comes out of turn.
    pub(super) fn is_warm(&self, topic: &str, partition: i32, now: Instant) -> bool {
        let warm = self.warm.lock().unwrap_or_else(PoisonError::into_inner);
        let acked = warm.get(topic).and_then(|partitions| partitions.get(&partition));
        acked.is_some_and(|acked| now.saturating_duration_since(*acked) < WARM_FOR)
    }

    /// How many records have no report yet.
    pub(super) fn in_flight(&self) -> usize {
        usize::try_from(self.producer().in_flight_count()).unwrap_or_default()
    }

    /// Takes nothing more, and brings every record its report: when it is answered, or when the time for that is over.
    ///
    /// All that is left goes in one purge. To let go of what was not sent yet first, and wait for the rest, would be wrong: a
    /// client that has not failed sends again what its broker refuses, also when an earlier batch that was to go again before it
    /// has been purged meanwhile.
    pub(super) async fn retire(self: &Arc<Self>, answers_until: Instant) {
        *self.is_closed.write().unwrap_or_else(PoisonError::into_inner) = true;
        while self.in_flight() > 0 && Instant::now() < answers_until {
            tokio::time::sleep(RETIREMENT_LOOK_INTERVAL).await;
        }
        self.purge(true).await;
    }

    /// Why it is of no more use, when it is: the first fatal error.
    pub(super) fn fatal(&self) -> Option<(Code, String)> {
        self.producer().client().fatal_error().map(|(code, reason)| (code, bounded(&reason)))
    }

    /// Lets go of records, so that their reports come: of those not sent yet, and of those in flight when asked for. Returns
    /// once that is done, or after a second.
    pub(super) async fn purge(self: &Arc<Self>, in_flight: bool) {
        let generation = Arc::clone(self);
        let flags = PurgeConfig::default().queue();
        let flags = if in_flight { flags.inflight() } else { flags };
        let purge = spawn_blocking(move || generation.producer().purge(flags));
        let _ = tokio::time::timeout(PURGE_MAX, purge).await;
    }

    /// Waits until everything has its report, for so long at most.
    pub(super) async fn flush(self: &Arc<Self>, bound: Duration) {
        let generation = Arc::clone(self);
        let flush = spawn_blocking(move || generation.producer().flush(bound));
        let _ = tokio::time::timeout(bound, flush).await;
    }

    /// Asks for a topic's metadata, which also mends what this client believes about it: librdkafka asks by itself only every
    /// few minutes once it took a topic for non-existing.
    pub(super) async fn ask_about(self: &Arc<Self>, topic: &str, bound: Duration) -> Result<Found, Code> {
        let generation = Arc::clone(self);
        let topic = topic.to_owned();
        let ask = spawn_blocking(move || {
            let metadata = generation.producer().client().fetch_metadata(Some(&topic), bound);
            let metadata = metadata.map_err(|error| error.rdkafka_error_code().unwrap_or(Code::Unknown))?;
            let found = metadata.topics().iter().find(|found| found.name() == topic);
            match found {
                None => Ok(Found::Fault(Code::UnknownTopicOrPartition)),
                Some(found) => match (found.error(), i32::try_from(found.partitions().len())) {
                    (Some(error), _) => Ok(Found::Fault(Code::from(error))),
                    (None, Ok(partitions)) if partitions > 0 => {
                        let (led, leaderless): (Vec<_>, Vec<_>) =
                            found.partitions().iter().partition(|partition| partition.leader() >= 0);
                        let leaderless = leaderless.into_iter().map(MetadataPartition::id).collect();
                        let thin =
                            led.into_iter().filter(|partition| partition.isr().len() < partition.replicas().len());
                        let thin = thin.map(|partition| (partition.id(), partition.isr().len())).collect();
                        Ok(Found::There { partitions, leaderless, thin })
                    }
                    (None, _) => Ok(Found::Fault(Code::LeaderNotAvailable)),
                },
            }
        });
        // The bound again: picking a broker to ask has its own idea of time.
        match tokio::time::timeout(bound, ask).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(Code::OperationTimedOut),
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        // Dropping a client purges, waits for reports and joins threads: never on a thread of the runtime.
        let producer = self.producer.take();
        let thread = std::thread::Builder::new().name("kafka-drop".into());
        // When no thread can be had, the closure and with it the client is dropped here, slowly.
        drop(thread.spawn(move || drop(producer)));
    }
}

/// A client that is built anew when it is of no more use.
pub(super) struct Client {
    blueprint: Blueprint,
    purpose: Purpose,
    faults: SharedFaults,
    current: RwLock<Arc<Generation>>,
    rebuilding: tokio::sync::Mutex<Rebuilding>,
    rebuilds: AtomicU64,
}

/// When the next client may be built.
#[derive(Debug, Default)]
struct Rebuilding {
    /// How many in a row were never acknowledged anything.
    fruitless: u32,
    not_before: Option<Instant>,
}

impl Client {
    pub(super) fn new(blueprint: Blueprint, purpose: Purpose, faults: SharedFaults) -> Result<Self, ClientError> {
        let first = Generation::build(&blueprint, purpose, faults.clone(), 0)?;
        Ok(Self {
            blueprint,
            purpose,
            faults,
            current: RwLock::new(Arc::new(first)),
            rebuilding: tokio::sync::Mutex::default(),
            rebuilds: AtomicU64::new(0),
        })
    }

    /// How its clients are built.
    pub(super) fn blueprint(&self) -> &Blueprint {
        &self.blueprint
    }

    /// The client to use now.
    pub(super) fn current(&self) -> Arc<Generation> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// How often it was built anew.
    pub(super) fn rebuilds(&self) -> u64 {
        self.rebuilds.load(Ordering::Relaxed)
    }

    /// Replaces a client and retires it, so that every record it holds gets its report: those that were sent have so long for an
    /// answer. The first of several callers who saw the same client does it. Returns whether another client is there by
    /// `until`; building may have to wait its turn.
    pub(super) async fn rebuild(
        &self,
        seen: &Arc<Generation>,
        why: &str,
        answers_within: Duration,
        until: Instant,
    ) -> bool {
        let rebuild = self.rebuild_in_turn(seen, why, answers_within, until);
        tokio::time::timeout_at(until.into(), rebuild).await.unwrap_or(false)
    }

    async fn rebuild_in_turn(
        &self,
        seen: &Arc<Generation>,
        why: &str,
        answers_within: Duration,
        until: Instant,
    ) -> bool {
        let mut rebuilding = loop {
            let rebuilding = self.rebuilding.lock().await;
            if self.current().number != seen.number {
                return true;
            }
            match rebuilding.not_before {
                Some(not_before) if not_before > until => return false,
                Some(not_before) if not_before > Instant::now() => {
                    // Not with the lock: others may have less time.
                    drop(rebuilding);
                    tokio::time::sleep_until(not_before.into()).await;
                }
                Some(_) | None => break rebuilding,
            }
        };
        let (blueprint, purpose, faults, number) =
            (self.blueprint.clone(), self.purpose, self.faults.clone(), seen.number + 1);
        let built = spawn_blocking(move || Generation::build(&blueprint, purpose, faults, number)).await;
        rebuilding.fruitless = if seen.has_acked.load(Ordering::Relaxed) { 0 } else { rebuilding.fruitless + 1 };
        rebuilding.not_before = rebuilding.fruitless.checked_sub(1).map(|doublings| {
            let pause = REBUILD_PAUSE * 2_u32.pow(doublings.min(10));
            Instant::now() + pause.min(REBUILD_PAUSE_MAX)
        });
        let problem = match built {
            Ok(Ok(next)) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
                seen.is_current.store(false, Ordering::Relaxed);
                self.rebuilds.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(generation = number, "the Kafka client was built anew: {why}");
                drop(rebuilding);
                // A task of its own: records of other calls wait for their reports, also when this call is over.
                let (retired, answers_until) = (Arc::clone(seen), Instant::now() + answers_within);
                let retirement = tokio::spawn(async move { retired.retire(answers_until).await });
                if answers_within.is_zero() {
                    let _ = retirement.await;
                }
                return true;
            }
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic.to_string(),
        };
        if self.faults.lock().cluster_failed(&bounded(&format!("kafka.client_failed: client: {problem}"))) {
            tracing::error!("the Kafka client cannot be built anew: {problem}");
        }
        false
    }

    /// Whether the cluster answers a new connection, within the bound. A connection of our own may be stuck behind a request,
    /// so this one is built for the question and then dropped.
    pub(super) async fn ask_cluster(&self, bound: Duration) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        let blueprint = self.blueprint.clone();
        spawn_blocking(move || {
            let producer = match blueprint.question::<BaseProducer<QuietContext>>() {
                Ok(producer) => producer,
                Err(error) => return drop(answer.send(Err(format!("kafka.client_failed: client: {error}")))),
            };
            // A part of the time is for building the client, and for saying why nobody answered.
            let _ = answer.send(ask_cluster(&producer, bound * 4 / 5));
            // Dropping the client takes a moment, and the answer does not wait for it.
        });
        match tokio::time::timeout(bound, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) | Err(_) => Err(format!("kafka.unreachable: client: no broker answered within {bound:?}")),
        }
    }
}

fn ask_cluster(producer: &BaseProducer<QuietContext>, bound: Duration) -> Result<(), String> {
    // Known as soon as the first broker answered.
    if producer.client().fetch_cluster_id(bound).is_some() {
        return Ok(());
    }
    // Nobody polls this client, so what it has to say waits in its queue.
    for _ in 0..PROBE_EVENTS_MAX {
        producer.poll(Duration::ZERO);
    }
    Err(producer
        .context()
        .reason()
        .unwrap_or_else(|| format!("kafka.unreachable: client: no broker answered within {bound:?}")))
}

/// How many events of a probe are looked through for the reason of its failure.
const PROBE_EVENTS_MAX: usize = 100;

/// Keeps the last reason why a client for one question could not connect.
#[derive(Default)]
pub(super) struct QuietContext {
    reason: Mutex<Option<String>>,
}

impl QuietContext {
    /// The last reason, once.
    pub(super) fn reason(&self) -> Option<String> {
        self.reason.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl ClientContext for QuietContext {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, text: &str) {
        tracing::debug!(target: "librdkafka", facility, "{text}");
    }

    fn error(&self, error: KafkaError, reason: &str) {
        let Some(code) = error.rdkafka_error_code() else { return };
        // That all brokers are down follows from the reason before it.
        if let (Class::Cluster(word), false) = (codes::classify(code), code == Code::AllBrokersDown) {
            let reason = bounded(&format!("{word}: client: {reason}"));
            *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = Some(reason);
        }
    }
}

impl ProducerContext for QuietContext {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

impl ConsumerContext for QuietContext {}

/// The text, cut to what is kept.
fn bounded(text: &str) -> String {
    text.chars().take(REASON_CHARS_MAX).collect()
}
