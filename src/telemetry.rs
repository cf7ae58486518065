//! Every metric and every event of the relay, each named once, and how log lines look.
//!
//! Nothing here ever touches a process-wide registry (two relays may live in one process), and no label ever holds a key, an
//! id or an error text. An event that is both a log line and a metric is one struct with one `emit`.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use prometheus::core::Collector;
use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use tracing::{Dispatch, debug, error, info, warn};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::fmt::{FmtContext, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;
use uuid::Uuid;

use crate::config;
use crate::domain::policy::Policy;

/// Sources with labels of their own; those that come later share [`OVERFLOW_LABEL`].
pub const SOURCE_LABELS_MAX: usize = 1_000;
/// Longest source name that is used as a label: a name is free text, and each costs about forty series.
pub const SOURCE_LABEL_BYTES_MAX: usize = 256;
/// Topics with labels of their own; those that come later share [`OVERFLOW_LABEL`].
pub const TOPIC_LABELS_MAX: usize = 100;
/// Longest topic name Kafka accepts; a longer one in a row is no topic.
const TOPIC_LABEL_BYTES_MAX: usize = 249;
/// What can be paused (label `kind` of `keiro_relay_paused`).
const PAUSE_KINDS: [&str; 3] = ["source", "topic", "lane"];
/// The label of everything beyond a cap. A source that really has this name shares it.
pub const OVERFLOW_LABEL: &str = "other";
/// A repeated event is written once in this time, with the number of those folded into it.
pub const REPEAT_EVERY: Duration = Duration::from_secs(60);
/// Different repeated events that are remembered; the oldest are forgotten first.
const REPEAT_KEYS_MAX: usize = 1_000;
/// Longest text of others (a database error, a broker's reason) in one log line or status field.
const TEXT_BYTES_MAX: usize = 1_024;

/// Bounds of the durations of claims, publishes and settlements: 1 ms is a healthy claim, 30 s the default timeouts.
const STAGE_SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// Bounds of the time from a row's creation to its acknowledgement: few, since every source has them.
const END_TO_END_SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 300.0, 3_600.0];
/// Bounds of the rows in one claim; `batch_rows_max` is 500 by default.
const CLAIM_ROWS: &[f64] = &[0.0, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1_000.0, 5_000.0];

/// Makes an enum whose variants are label values, with a stable name each.
macro_rules! label {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $name { $($(#[$variant_meta])* $variant,)+ }

        impl $name {
            /// Every value, in the order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The label value.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

label! {
    /// What became of a row (label `outcome` of `keiro_relay_rows_total`). Each settlement or requeue of a row counts once.
    RowOutcome {
        /// Acknowledged.
        Sent = "sent",
        /// Spent an attempt; also when its source is held for it.
        Failed = "failed",
        /// Behind the pivot of its lane.
        Skipped = "skipped",
        /// No verdict, and not the row's fault.
        Returned = "returned",
        /// Spent its last attempt.
        Dead = "dead",
        /// Can never be accepted.
        Rejected = "rejected",
        /// Freed from a lease that ran out, to be claimed again.
        Requeued = "requeued",
    }
}

label! {
    /// Status of rows in the backlog gauge (label `status` of `keiro_relay_backlog_rows`). Sent rows are history, not backlog.
    BacklogStatus {
        /// Never claimed.
        Pending = "pending",
        /// To be claimed again.
        Failed = "failed",
        /// Claimed by somebody.
        Publishing = "publishing",
        /// Attempts spent.
        Dead = "dead",
        /// Can never be accepted.
        Rejected = "rejected",
        /// A status that is not ours: neither claimable nor terminal.
        Unknown = "unknown",
    }
}

label! {
    /// Where something went wrong (label `stage` of `keiro_relay_errors_total`).
    Stage {
        /// Looking for rows and claiming them.
        Claim = "claim",
        /// Handing records to the broker.
        Publish = "publish",
        /// Writing verdicts.
        Settle = "settle",
        /// Requeue and retention.
        Maintenance = "maintenance",
        /// Counting the backlog.
        Sample = "sample",
    }
}

label! {
    /// Why something went wrong (label `reason` of `keiro_relay_errors_total`): a fixed list, never the text of an error.
    Reason {
        /// The connection failed or broke.
        Connection = "connection",
        /// The other side does not accept who we are.
        Authentication = "authentication",
        /// We may not do this.
        Permission = "permission",
        /// The table or a statement is not what we understand.
        Schema = "schema",
        /// A deadlock or a serialization failure.
        Conflict = "conflict",
        /// No answer in time.
        Timeout = "timeout",
        /// The server is starting, stopping, read-only or out of resources.
        Unavailable = "unavailable",
        /// No broker could be reached.
        Broker = "broker",
        /// One topic or partition does not work.
        Topic = "topic",
        /// The Kafka client must be rebuilt.
        ClientFatal = "client_fatal",
        /// The publisher returned no outcome for a row of its batch.
        MissingOutcome = "missing_outcome",
        /// The publisher returned an outcome for a row that was not in its batch.
        StrayOutcome = "stray_outcome",
        /// The publisher failed the whole call.
        Publisher = "publisher",
        /// Our bug.
        Panic = "panic",
        /// Anything else.
        Other = "other",
    }
}

impl Reason {
    /// Whether nothing but a person will mend it; such a failure is logged as an error.
    #[must_use]
    pub fn needs_person(self) -> bool {
        match self {
            Self::Authentication | Self::Permission | Self::Schema | Self::Panic => true,
            Self::Connection
            | Self::Conflict
            | Self::Timeout
            | Self::Unavailable
            | Self::Broker
            | Self::Topic
            | Self::ClientFatal
            | Self::MissingOutcome
            | Self::StrayOutcome
            | Self::Publisher
            | Self::Other => false,
        }
    }
}

label! {
    /// A loop of the relay (label `loop` of `keiro_relay_last_success_timestamp_seconds`).
    LoopName {
        /// Looks for sources.
        Discover = "discover",
        /// Claims, publishes and settles one source; one loop per source, one label for all.
        Source = "source",
        /// Polls the idle sources together.
        Idle = "idle",
        /// Frees rows whose lease ran out.
        Requeue = "requeue",
        /// Deletes old sent rows.
        Retention = "retention",
        /// Counts the backlog.
        Sample = "sample",
        /// Watches the broker.
        Broker = "broker",
        /// Listens for wake-ups.
        Listen = "listen",
        /// Reads what is paused.
        Pauses = "pauses",
    }
}

/// What one sample of the table says of one source.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SourceSample {
    /// Name of the source.
    pub source: String,
    /// Its policy, or `None` when the source is not ours (`unlisted_sources = "ignore"`): its backlog is counted as unrouted.
    pub policy: Option<Policy>,
    /// Rows in `pending`.
    pub pending: u64,
    /// Rows in `failed`.
    pub failed: u64,
    /// Rows in `publishing`.
    pub publishing: u64,
    /// Rows in `sent`; counted up to a cap.
    pub sent: u64,
    /// Rows in `dead`.
    pub dead: u64,
    /// Rows in `rejected`.
    pub rejected: u64,
    /// Rows whose status is none of the contract's.
    pub unknown: u64,
    /// Whether a count stopped at its cap or time limit: there are at least as many.
    pub capped: bool,
    /// Age of the oldest pending or failed row, by `created_at`.
    pub oldest_age_seconds: Option<f64>,
    /// How long the oldest row that could be claimed now has waited for it; `None` when no row is ready.
    pub oldest_ready_age_seconds: Option<f64>,
}

impl SourceSample {
    /// Rows waiting: exactly pending and failed.
    #[must_use]
    pub fn backlog(&self) -> u64 {
        self.pending.saturating_add(self.failed)
    }

    /// Rows in a status of the backlog gauge.
    #[must_use]
    pub fn rows(&self, status: BacklogStatus) -> u64 {
        match status {
            BacklogStatus::Pending => self.pending,
            BacklogStatus::Failed => self.failed,
            BacklogStatus::Publishing => self.publishing,
            BacklogStatus::Dead => self.dead,
            BacklogStatus::Rejected => self.rejected,
            BacklogStatus::Unknown => self.unknown,
        }
    }

    /// Folds another source into this one, for the label that several share.
    fn absorb(&mut self, other: &Self) {
        self.pending += other.pending;
        self.failed += other.failed;
        self.publishing += other.publishing;
        self.sent += other.sent;
        self.dead += other.dead;
        self.rejected += other.rejected;
        self.unknown += other.unknown;
        self.capped |= other.capped;
        self.oldest_age_seconds = later(self.oldest_age_seconds, other.oldest_age_seconds);
        self.oldest_ready_age_seconds = later(self.oldest_ready_age_seconds, other.oldest_ready_age_seconds);
    }
}

/// The larger of two ages, if there is any.
fn later(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.max(other)),
        (age, None) | (None, age) => age,
    }
}

/// All metrics of one relay, over a registry of their own. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    vecs: SourceVecs,
    sources: RwLock<Sources>,
    topics: Mutex<HashSet<String>>,
    topic_parked: IntGaugeVec,
    paused: IntGaugeVec,
    overtaken: IntCounter,
    errors: IntCounterVec,
    claim_duration: Histogram,
    publish_duration: Histogram,
    settle_duration: Histogram,
    claim_rows: Histogram,
    in_flight_rows: IntGauge,
    in_flight_bytes: IntGauge,
    producer_rebuilds: IntCounter,
    retention_deleted: IntCounter,
    last_success: GaugeVec,
    policy_info: IntGaugeVec,
    config_reload_successful: IntGauge,
    config_reload_timestamp: Gauge,
    table_dead_tuples: IntGauge,
    oldest_transaction: Gauge,
    repeats: Mutex<Repeats<RepeatKey>>,
}

/// Families with a source label.
struct SourceVecs {
    backlog_rows: IntGaugeVec,
    oldest_age: GaugeVec,
    oldest_ready_age: GaugeVec,
    rows: IntCounterVec,
    stale: IntCounterVec,
    duplicates_possible: IntCounterVec,
    end_to_end: HistogramVec,
    halted: IntGaugeVec,
    unrouted_rows: IntGaugeVec,
    sample_capped: IntGaugeVec,
}

#[derive(Default)]
struct Sources {
    by_name: HashMap<String, SourceMetrics>,
    overflow: Option<SourceMetrics>,
}

impl Sources {
    fn labelled(&self) -> impl Iterator<Item = &SourceMetrics> {
        self.by_name.values().chain(&self.overflow)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers every metric; the bounded series start at zero.
    #[must_use]
    pub fn new() -> Self {
        let registry = Registry::new();
        let r = &registry;
        let vecs = SourceVecs {
            backlog_rows: int_gauges(
                r,
                "keiro_relay_backlog_rows",
                "Rows of the table by status; the backlog is pending and failed.",
                &["source", "status"],
            ),
            oldest_age: gauges(
                r,
                "keiro_relay_oldest_age_seconds",
                "Age of the oldest pending or failed row by created_at, 0 without any.",
                &["source"],
            ),
            oldest_ready_age: gauges(
                r,
                "keiro_relay_oldest_ready_age_seconds",
                "How long the oldest row that could be claimed now has waited, 0 without any: the lag to alert on.",
                &["source"],
            ),
            rows: counters(
                r,
                "keiro_relay_rows_total",
                "Rows settled or requeued, by what became of them.",
                &["source", "outcome"],
            ),
            stale: counters(
                r,
                "keiro_relay_stale_settlements_total",
                "Rows that had left our claim before their verdict was written; they were left alone.",
                &["source"],
            ),
            duplicates_possible: counters(
                r,
                "keiro_relay_duplicates_possible_total",
                "Rows that may be on their topic although they are not marked sent.",
                &["source"],
            ),
            end_to_end: histograms(
                r,
                "keiro_relay_end_to_end_seconds",
                "From created_at to the acknowledgement, by the database's clock.",
                END_TO_END_SECONDS,
                &["source"],
            ),
            halted: int_gauges(
                r,
                "keiro_relay_source_halted",
                "1 while a source is halted or held; /status names the row.",
                &["source"],
            ),
            unrouted_rows: int_gauges(
                r,
                "keiro_relay_unrouted_rows",
                "Backlog of a source that no relay of this configuration serves.",
                &["source"],
            ),
            sample_capped: int_gauges(
                r,
                "keiro_relay_sample_capped",
                "1 when a count of the last sample stopped at its limit: there are at least as many rows.",
                &["source"],
            ),
        };
        let topic_parked =
            int_gauges(r, "keiro_relay_topic_parked", "Topics that are left alone for a while.", &["topic"]);
        topic_parked.with_label_values(&[OVERFLOW_LABEL]);
        let paused = int_gauges(r, "keiro_relay_paused", "What operators paused: sources, topics, lanes.", &["kind"]);
        for kind in PAUSE_KINDS {
            paused.with_label_values(&[kind]);
        }
        let overtaken = register(
            r,
            IntCounter::new(
                "keiro_relay_overtaken_total",
                "Rows acknowledged behind a row of their lane that was not: order violations. Must stay 0.",
            ),
        );
        let errors = counters(
            r,
            "keiro_relay_errors_total",
            "What went wrong, by where and why. What happened to rows is counted in rows_total.",
            &["stage", "reason"],
        );
        for stage in Stage::ALL {
            for reason in Reason::ALL {
                errors.with_label_values(&[stage.name(), reason.name()]);
            }
        }
        let last_success = gauges(
            r,
            "keiro_relay_last_success_timestamp_seconds",
            "When a loop last did its work without an error, 0 before the first time.",
            &["loop"],
        );
        for name in LoopName::ALL {
            last_success.with_label_values(&[name.name()]);
        }
        let build_info = int_gauges(r, "keiro_relay_build_info", "1; the version is in the label.", &["version"]);
        build_info.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Self(Arc::new(Inner {
            vecs,
            topic_parked,
            paused,
            overtaken,
            errors,
            last_success,
            claim_duration: histogram(
                r,
                "keiro_relay_claim_duration_seconds",
                "Time a claim took, also when it failed.",
                STAGE_SECONDS,
            ),
            publish_duration: histogram(
                r,
                "keiro_relay_publish_duration_seconds",
                "Time the publisher took for one batch, also when it failed.",
                STAGE_SECONDS,
            ),
            settle_duration: histogram(
                r,
                "keiro_relay_settle_duration_seconds",
                "Time a settlement took with its retries, also when it failed.",
                STAGE_SECONDS,
            ),
            claim_rows: histogram(r, "keiro_relay_claim_rows", "Rows in one claim.", CLAIM_ROWS),
            in_flight_rows: register(
                r,
                IntGauge::new("keiro_relay_in_flight_rows", "Rows claimed and not yet settled by this process."),
            ),
            in_flight_bytes: register(
                r,
                IntGauge::new("keiro_relay_in_flight_bytes", "Payload bytes of those rows, as claimed."),
            ),
            producer_rebuilds: register(
                r,
                IntCounter::new("keiro_relay_producer_rebuilds_total", "How often the Kafka client was rebuilt."),
            ),
            retention_deleted: register(
                r,
                IntCounter::new("keiro_relay_retention_deleted_total", "Sent rows deleted by retention."),
            ),
            table_dead_tuples: register(
                r,
                IntGauge::new(
                    "keiro_relay_table_dead_tuples",
                    "Dead tuples of the outbox table that vacuum has not removed yet.",
                ),
            ),
            oldest_transaction: register(
                r,
                Gauge::new(
                    "keiro_relay_oldest_transaction_seconds",
                    "Age of the oldest transaction that keeps vacuum from removing dead tuples.",
                ),
            ),
            policy_info: int_gauges(
                r,
                "keiro_relay_policy_info",
                "1; the hash is the same for relays with the same policies.",
                &["hash"],
            ),
            config_reload_successful: register(
                r,
                IntGauge::new(
                    "keiro_relay_config_last_reload_successful",
                    "Whether the configuration could be used when it was last read.",
                ),
            ),
            config_reload_timestamp: register(
                r,
                Gauge::new(
                    "keiro_relay_config_last_reload_success_timestamp_seconds",
                    "When a configuration was last read that could be used.",
                ),
            ),
            sources: RwLock::default(),
            topics: Mutex::default(),
            repeats: Mutex::new(Repeats::new(REPEAT_EVERY, REPEAT_KEYS_MAX)),
            registry,
        }))
    }

    /// Returns the metrics of a source, all of them at zero the first time.
    ///
    /// Configured sources should be named first, so that they have labels of their own whatever else is in the table.
    #[must_use]
    pub fn source(&self, name: &str) -> SourceMetrics {
        if let Some(found) = self.0.sources.read().unwrap_or_else(PoisonError::into_inner).by_name.get(name) {
            return found.clone();
        }
        let mut sources = self.0.sources.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = sources.by_name.get(name) {
            return found.clone();
        }
        if sources.by_name.len() >= SOURCE_LABELS_MAX || name.len() > SOURCE_LABEL_BYTES_MAX {
            let overflow = sources.overflow.get_or_insert_with(|| SourceMetrics::new(&self.0.vecs, OVERFLOW_LABEL));
            return overflow.clone();
        }
        let made = SourceMetrics::new(&self.0.vecs, name);
        sources.by_name.insert(name.to_owned(), made.clone());
        made
    }

    /// Sets the gauges of every source from one sample of the whole table; a source that is not in it has no rows left.
    pub fn sampled(&self, samples: &[SourceSample]) {
        let mut by_label: HashMap<String, (SourceMetrics, SourceSample, u64)> = HashMap::new();
        for sample in samples {
            let source = self.source(&sample.source);
            let unrouted = if sample.policy.is_none() { sample.backlog() } else { 0 };
            match by_label.get_mut(source.label()) {
                Some((_, sum, unrouted_sum)) => {
                    sum.absorb(sample);
                    *unrouted_sum += unrouted;
                }
                None => {
                    by_label.insert(source.label().to_owned(), (source, sample.clone(), unrouted));
                }
            }
        }
        for (source, sample, unrouted) in by_label.values() {
            source.set(sample, *unrouted);
        }
        let nothing = SourceSample::default();
        for source in self.0.sources.read().unwrap_or_else(PoisonError::into_inner).labelled() {
            if !by_label.contains_key(source.label()) {
                source.set(&nothing, 0);
            }
        }
    }

    /// Sets which sources are halted; all others are not.
    pub fn halted<'a>(&self, halted: impl IntoIterator<Item = &'a str>) {
        let halted: HashSet<String> = halted.into_iter().map(|name| self.source(name).label().to_owned()).collect();
        for source in self.0.sources.read().unwrap_or_else(PoisonError::into_inner).labelled() {
            source.0.halted.set(i64::from(halted.contains(source.label())));
        }
    }

    /// Sets which topics are parked; all others are not. The label of the overflow counts its topics.
    pub fn parked<'a>(&self, topics: impl IntoIterator<Item = &'a str>) {
        let mut known = lock(&self.0.topics);
        let mut parked: BTreeMap<&str, i64> = BTreeMap::new();
        for topic in topics {
            if !known.contains(topic) && known.len() < TOPIC_LABELS_MAX && topic.len() <= TOPIC_LABEL_BYTES_MAX {
                known.insert(topic.to_owned());
            }
            let own = known.contains(topic);
            let count = parked.entry(if own { topic } else { OVERFLOW_LABEL }).or_insert(0);
            *count = if own { 1 } else { *count + 1 };
        }
        for topic in known.iter().map(String::as_str).chain([OVERFLOW_LABEL]) {
            let count = parked.get(topic).copied().unwrap_or(0);
            self.0.topic_parked.with_label_values(&[topic]).set(count);
        }
    }

    /// Sets how many pauses there are of each kind.
    pub fn paused(&self, count: impl Fn(&str) -> u64) {
        for kind in PAUSE_KINDS {
            self.0.paused.with_label_values(&[kind]).set(gauge_value(count(kind)));
        }
    }

    /// Sets how many rows and payload bytes are between claim and settlement.
    pub fn in_flight(&self, rows: u64, bytes: u64) {
        self.0.in_flight_rows.set(gauge_value(rows));
        self.0.in_flight_bytes.set(gauge_value(bytes));
    }

    /// Notes that a loop did its work without an error just now.
    pub fn succeeded(&self, name: LoopName) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.0.last_success.with_label_values(&[name.name()]).set(now.as_secs_f64());
    }

    /// How the table itself is doing.
    pub fn table_health(&self, dead_tuples: i64, oldest_transaction_seconds: f64) {
        self.0.table_dead_tuples.set(dead_tuples);
        self.0.oldest_transaction.set(oldest_transaction_seconds);
    }

    /// Sets the hash of the policy configuration in force.
    pub fn policy(&self, hash: &str) {
        self.0.policy_info.reset();
        self.0.policy_info.with_label_values(&[hash]).set(1);
    }

    /// Notes that a configuration was read just now, and whether it could be used.
    pub fn config_loaded(&self, successful: bool) {
        self.0.config_reload_successful.set(i64::from(successful));
        if successful {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            self.0.config_reload_timestamp.set(now.as_secs_f64());
        }
    }

    /// Returns all metrics in Prometheus' text format (version 0.0.4).
    #[must_use]
    pub fn render(&self) -> String {
        // An error is only possible for a family without metrics, which gathering leaves out.
        TextEncoder::new().encode_to_string(&self.0.registry.gather()).unwrap_or_default()
    }

    /// Whether an event is to be written now, with the number of those folded into it.
    fn repeat(&self, kind: &'static str, about: &str) -> Option<u64> {
        lock(&self.0.repeats).note(RepeatKey(kind, about.to_owned()), Instant::now())
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Metrics")
    }
}

/// The metrics of one source, resolved once. Cheap to clone.
#[derive(Clone)]
pub struct SourceMetrics(Arc<SourceInner>);

struct SourceInner {
    label: String,
    rows: Vec<(RowOutcome, IntCounter)>,
    backlog: Vec<(BacklogStatus, IntGauge)>,
    stale: IntCounter,
    duplicates_possible: IntCounter,
    end_to_end: Histogram,
    oldest_age: Gauge,
    oldest_ready_age: Gauge,
    halted: IntGauge,
    unrouted_rows: IntGauge,
    sample_capped: IntGauge,
}

impl SourceMetrics {
    fn new(vecs: &SourceVecs, label: &str) -> Self {
        let rows =
            RowOutcome::ALL.iter().map(|outcome| (*outcome, vecs.rows.with_label_values(&[label, outcome.name()])));
        let backlog = BacklogStatus::ALL
            .iter()
            .map(|status| (*status, vecs.backlog_rows.with_label_values(&[label, status.name()])));
        Self(Arc::new(SourceInner {
            rows: rows.collect(),
            backlog: backlog.collect(),
            stale: vecs.stale.with_label_values(&[label]),
            duplicates_possible: vecs.duplicates_possible.with_label_values(&[label]),
            end_to_end: vecs.end_to_end.with_label_values(&[label]),
            oldest_age: vecs.oldest_age.with_label_values(&[label]),
            oldest_ready_age: vecs.oldest_ready_age.with_label_values(&[label]),
            halted: vecs.halted.with_label_values(&[label]),
            unrouted_rows: vecs.unrouted_rows.with_label_values(&[label]),
            sample_capped: vecs.sample_capped.with_label_values(&[label]),
            label: label.to_owned(),
        }))
    }

    /// The label value: the source's name, or [`OVERFLOW_LABEL`].
    #[must_use]
    pub fn label(&self) -> &str {
        &self.0.label
    }

    /// Counts rows of an outcome.
    pub fn rows(&self, outcome: RowOutcome, rows: u64) {
        for (of, counter) in &self.0.rows {
            if *of == outcome {
                counter.inc_by(rows);
            }
        }
    }

    /// Observes the time from a row's creation to its acknowledgement; below zero (a producer's clock) counts as zero.
    pub fn end_to_end(&self, seconds: f64) {
        self.0.end_to_end.observe(seconds.max(0.0));
    }

    fn set(&self, sample: &SourceSample, unrouted: u64) {
        for (status, gauge) in &self.0.backlog {
            gauge.set(gauge_value(sample.rows(*status)));
        }
        self.0.oldest_age.set(sample.oldest_age_seconds.unwrap_or(0.0));
        self.0.oldest_ready_age.set(sample.oldest_ready_age_seconds.unwrap_or(0.0));
        self.0.unrouted_rows.set(gauge_value(unrouted));
        self.0.sample_capped.set(i64::from(sample.capped));
    }
}

impl fmt::Debug for SourceMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SourceMetrics").field(&self.0.label).finish()
    }
}

/// A claim came back.
#[derive(Debug, Clone, Copy)]
pub struct Claimed<'a> {
    /// The source.
    pub source_name: &'a str,
    /// Rows in it.
    pub rows: usize,
    /// Time the statement took.
    pub elapsed: Duration,
}

impl Claimed<'_> {
    /// Observes size and duration.
    pub fn emit(&self, metrics: &Metrics) {
        metrics.0.claim_duration.observe(self.elapsed.as_secs_f64());
        metrics.0.claim_rows.observe(self.rows as f64);
        if self.rows > 0 {
            debug!(source = self.source_name, rows = self.rows, elapsed_ms = millis(self.elapsed), "claimed");
        }
    }
}

/// A publisher returned.
#[derive(Debug, Clone, Copy)]
pub struct Published<'a> {
    /// The source.
    pub source_name: &'a str,
    /// Rows it was given.
    pub rows: usize,
    /// Rows that were acknowledged.
    pub acknowledged: usize,
    /// Time it took.
    pub elapsed: Duration,
}

impl Published<'_> {
    /// Observes the duration.
    pub fn emit(&self, metrics: &Metrics) {
        metrics.0.publish_duration.observe(self.elapsed.as_secs_f64());
        debug!(
            source = self.source_name,
            rows = self.rows,
            acknowledged = self.acknowledged,
            elapsed_ms = millis(self.elapsed),
            "published"
        );
    }
}

/// The verdicts of a claim are in the table.
#[derive(Debug, Clone, Copy, Default)]
pub struct Settled<'a> {
    /// The source.
    pub source_name: &'a str,
    /// Rows marked sent.
    pub sent: u64,
    /// Rows that spent an attempt, held ones included.
    pub failed: u64,
    /// Rows behind a pivot.
    pub skipped: u64,
    /// Rows whose attempt was returned.
    pub returned: u64,
    /// Rows that spent their last attempt.
    pub dead: u64,
    /// Rows that can never be accepted.
    pub rejected: u64,
    /// Rows that had left our claim meanwhile.
    pub stale: u64,
    /// Rows acknowledged behind a pivot.
    pub overtaken: u64,
    /// Rows that may be on the topic although they are not marked sent.
    pub duplicates_possible: u64,
    /// Time the settlement took.
    pub elapsed: Duration,
}

impl Settled<'_> {
    /// Counts every row once and observes the duration.
    pub fn emit(&self, metrics: &Metrics) {
        let source = metrics.source(self.source_name);
        source.rows(RowOutcome::Sent, self.sent);
        source.rows(RowOutcome::Failed, self.failed);
        source.rows(RowOutcome::Skipped, self.skipped);
        source.rows(RowOutcome::Returned, self.returned);
        source.rows(RowOutcome::Dead, self.dead);
        source.rows(RowOutcome::Rejected, self.rejected);
        source.0.stale.inc_by(self.stale);
        source.0.duplicates_possible.inc_by(self.duplicates_possible);
        metrics.0.overtaken.inc_by(self.overtaken);
        metrics.0.settle_duration.observe(self.elapsed.as_secs_f64());
        debug!(
            source = self.source_name,
            sent = self.sent,
            failed = self.failed,
            skipped = self.skipped,
            returned = self.returned,
            dead = self.dead,
            rejected = self.rejected,
            elapsed_ms = millis(self.elapsed),
            "settled"
        );
        if self.overtaken > 0
            && let Some(folded) = metrics.repeat("overtaken", self.source_name)
        {
            error!(
                source = self.source_name,
                rows = self.overtaken,
                folded,
                "the broker acknowledged rows behind one that was not: their order on the topic is broken; please report this"
            );
        }
        if self.stale > 0
            && let Some(folded) = metrics.repeat("stale", self.source_name)
        {
            warn!(
                source = self.source_name,
                rows = self.stale,
                folded,
                "rows had left our claim before their verdict was written and were left alone: they may be sent twice"
            );
        }
    }
}

label! {
    /// How a row ended without being sent.
    RowEnd {
        /// Attempts spent.
        Dead = "dead",
        /// Can never be accepted.
        Rejected = "rejected",
    }
}

/// A row will not be sent unless a person acts. The counters are [`Settled`]'s and [`Requeued`]'s.
#[derive(Debug, Clone, Copy)]
pub struct RowEnded<'a> {
    /// The source.
    pub source_name: &'a str,
    /// The row.
    pub outbox_id: Uuid,
    /// How it ended.
    pub end: RowEnd,
    /// Text of `last_error`, or code and detail.
    pub error: &'a str,
}

impl RowEnded<'_> {
    /// Writes a line, unless one for the same source and end was written a moment ago.
    pub fn emit(&self, metrics: &Metrics) {
        if let Some(folded) = metrics.repeat(self.end.name(), self.source_name) {
            let (end, error) = (self.end.name(), clean(self.error));
            warn!(source = self.source_name, outbox_id = %self.outbox_id, end, error, folded, "row ended unsent");
        }
    }
}

/// Something of ours went wrong; what happened to rows is told by their outcomes.
#[derive(Debug, Clone, Copy)]
pub struct Failure<'a> {
    /// Where.
    pub stage: Stage,
    /// Why.
    pub reason: Reason,
    /// The source, when it is about one.
    pub source_name: Option<&'a str>,
    /// The error's text.
    pub error: &'a str,
    /// How long it took to fail, for the stage's histogram; `None` when [`Claimed`], [`Published`] or [`Settled`] tells it.
    pub elapsed: Option<Duration>,
}

impl Failure<'_> {
    /// Counts it, and writes a line unless one of the same stage, reason and source was written a moment ago.
    pub fn emit(&self, metrics: &Metrics) {
        metrics.0.errors.with_label_values(&[self.stage.name(), self.reason.name()]).inc();
        if let Some(elapsed) = self.elapsed {
            match self.stage {
                Stage::Claim => metrics.0.claim_duration.observe(elapsed.as_secs_f64()),
                Stage::Publish => metrics.0.publish_duration.observe(elapsed.as_secs_f64()),
                Stage::Settle => metrics.0.settle_duration.observe(elapsed.as_secs_f64()),
                Stage::Maintenance | Stage::Sample => {}
            }
        }
        let about = format!("{} {} {}", self.stage, self.reason, self.source_name.unwrap_or_default());
        if let Some(folded) = metrics.repeat("failure", &about) {
            let (stage, reason, error) = (self.stage.name(), self.reason.name(), clean(self.error));
            let source = self.source_name;
            if self.reason.needs_person() {
                error!(stage, reason, source, error, folded, "failed");
            } else {
                warn!(stage, reason, source, error, folded, "failed; trying again");
            }
        }
    }
}

/// Rows were freed from leases that ran out.
#[derive(Debug, Clone, Copy)]
pub struct Requeued<'a> {
    /// The source.
    pub source_name: &'a str,
    /// Rows that will be claimed again.
    pub failed: u64,
    /// Rows that had no attempt left.
    pub dead: u64,
}

impl Requeued<'_> {
    /// Counts the rows and says so.
    pub fn emit(&self, metrics: &Metrics) {
        let source = metrics.source(self.source_name);
        source.rows(RowOutcome::Requeued, self.failed);
        source.rows(RowOutcome::Dead, self.dead);
        if self.failed + self.dead > 0 {
            let (failed, dead) = (self.failed, self.dead);
            warn!(source = self.source_name, failed, dead, "requeued rows that a relay left in publishing");
        }
    }
}

/// Retention deleted sent rows.
#[derive(Debug, Clone, Copy)]
pub struct RetentionDeleted {
    /// Rows deleted.
    pub rows: u64,
}

impl RetentionDeleted {
    /// Counts the rows and says so.
    pub fn emit(&self, metrics: &Metrics) {
        metrics.0.retention_deleted.inc_by(self.rows);
        if self.rows > 0 {
            info!(rows = self.rows, "retention deleted sent rows");
        }
    }
}

/// How often the publisher has rebuilt its client so far.
#[derive(Debug, Clone, Copy)]
pub struct ProducerRebuilds {
    /// Rebuilds since the publisher was made.
    pub total: u64,
}

impl ProducerRebuilds {
    /// Counts what is new, and says so.
    pub fn emit(&self, metrics: &Metrics) {
        let new = self.total.saturating_sub(metrics.0.producer_rebuilds.get());
        if new > 0 {
            metrics.0.producer_rebuilds.inc_by(new);
            if let Some(folded) = metrics.repeat("rebuilt", "") {
                warn!(total = self.total, folded, "the Kafka client was rebuilt");
            }
        }
    }
}

/// Something is not as it was a moment ago. Written once; the gauges are set by whoever knows the whole state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateChange {
    /// The relay began.
    Started,
    /// The relay was told to stop.
    Stopping,
    /// A side does not work any more, or never did.
    Lost {
        /// `database`, `broker`, `schema`, …
        check: &'static str,
        /// Why.
        reason: String,
    },
    /// A side works again, or at last.
    Regained {
        /// `database`, `broker`, `schema`, …
        check: &'static str,
    },
    /// Nothing of the source moves.
    Halted {
        /// The source.
        source_name: String,
        /// How, in one word.
        kind: &'static str,
        /// The row it waits for.
        outbox_id: Option<Uuid>,
        /// Why.
        reason: String,
        /// Whether it waits until a person acts.
        needs_person: bool,
    },
    /// The source moves again.
    Resumed {
        /// The source.
        source_name: String,
    },
    /// A topic is left alone for a while.
    Parked {
        /// The topic.
        topic: String,
        /// Why.
        reason: String,
    },
    /// The topic is served again.
    Released {
        /// The topic.
        topic: String,
    },
    /// An operator paused something, or other lanes of the same source.
    Paused {
        /// `source`, `topic` or `lane`.
        kind: &'static str,
        /// The source or the topic; of lanes their source, whose keys nobody writes down here.
        name: String,
        /// How many lanes; 1 for the others.
        count: u64,
        /// The database user who did.
        by: String,
        /// When it ends by itself.
        until: Option<String>,
        /// Why.
        reason: String,
    },
    /// What was paused goes on.
    Unpaused {
        /// `source`, `topic` or `lane`.
        kind: &'static str,
        /// The source or the topic.
        name: String,
    },
    /// Pauses cannot be read: whatever operators paused is not honoured from the next start on.
    PausesOff {
        /// Why, and what to do.
        reason: String,
    },
    /// Pauses can be read after all.
    PausesOn,
}

impl StateChange {
    /// What changed, in one stable word.
    #[must_use]
    pub fn word(&self) -> &'static str {
        match self {
            Self::Started => "started",
            Self::Stopping => "stopping",
            Self::Lost { .. } => "lost",
            Self::Regained { .. } => "regained",
            Self::Halted { .. } => "halted",
            Self::Resumed { .. } => "resumed",
            Self::Parked { .. } => "parked",
            Self::Released { .. } => "released",
            Self::Paused { .. } => "paused",
            Self::Unpaused { .. } => "unpaused",
            Self::PausesOff { .. } => "pauses_off",
            Self::PausesOn => "pauses_on",
        }
    }

    /// What it is about: a check, a source, a topic.
    #[must_use]
    pub fn about(&self) -> Option<&str> {
        match self {
            Self::Started | Self::Stopping | Self::PausesOff { .. } | Self::PausesOn => None,
            Self::Paused { name, .. } | Self::Unpaused { name, .. } => Some(name),
            Self::Lost { check, .. } | Self::Regained { check } => Some(check),
            Self::Halted { source_name, .. } | Self::Resumed { source_name } => Some(source_name),
            Self::Parked { topic, .. } | Self::Released { topic } => Some(topic),
        }
    }

    /// Why, when there is a reason.
    #[must_use]
    pub fn reason(&self) -> Option<&str> {
        match self {
            Self::Lost { reason, .. }
            | Self::Halted { reason, .. }
            | Self::Parked { reason, .. }
            | Self::Paused { reason, .. }
            | Self::PausesOff { reason } => Some(reason),
            Self::Started
            | Self::Stopping
            | Self::Regained { .. }
            | Self::Resumed { .. }
            | Self::Released { .. }
            | Self::Unpaused { .. }
            | Self::PausesOn => None,
        }
    }

    /// Writes the line.
    pub fn emit(&self) {
        match self {
            Self::Started => info!(version = env!("CARGO_PKG_VERSION"), "started"),
            Self::Stopping => info!("stopping: no new claims; what is in flight is finished and settled"),
            Self::Lost { check, reason } => warn!(check, reason, "not usable"),
            Self::Regained { check } => info!(check, "usable"),
            Self::Halted { source_name, kind, outbox_id, reason, needs_person } => {
                let (source, outbox_id) = (source_name, outbox_id.map(tracing::field::display));
                if *needs_person {
                    error!(source, kind, outbox_id, reason, "source halted until somebody acts");
                } else {
                    warn!(source, kind, outbox_id, reason, "source halted");
                }
            }
            Self::Resumed { source_name } => info!(source = source_name, "source moves again"),
            Self::Parked { topic, reason } => warn!(topic, reason, "topic parked: its rows wait and spend no attempt"),
            Self::Released { topic } => info!(topic, "topic served again"),
            Self::Paused { kind, name, count, by, until, reason } => {
                warn!(
                    kind,
                    name, count, by, until, reason, "paused by an operator: its rows wait and spend no attempt"
                );
            }
            Self::Unpaused { kind, name } => info!(kind, name, "not paused any more"),
            Self::PausesOff { reason } => warn!(reason, "pauses are not read"),
            Self::PausesOn => info!("pauses are read"),
        }
    }
}

/// What a repeated event is, and what it is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct RepeatKey(&'static str, String);

/// Folds repeats: one line per key in a while, with the number of those that were left out since.
#[derive(Debug)]
pub struct Repeats<K> {
    every: Duration,
    keys_max: usize,
    seen: HashMap<K, Repeat>,
}

#[derive(Debug)]
struct Repeat {
    written: Instant,
    folded: u64,
}

impl<K: Hash + Eq + Clone> Repeats<K> {
    /// Remembers up to `keys_max` keys (at least one), and lets one line per key through in `every`.
    #[must_use]
    pub fn new(every: Duration, keys_max: usize) -> Self {
        Self { every, keys_max: keys_max.max(1), seen: HashMap::new() }
    }

    /// Notes that a key happened: `Some(folded)` when it is to be written, with the number left out since the last line.
    pub fn note(&mut self, key: K, now: Instant) -> Option<u64> {
        if let Some(repeat) = self.seen.get_mut(&key) {
            if now.saturating_duration_since(repeat.written) < self.every {
                repeat.folded += 1;
                return None;
            }
            repeat.written = now;
            return Some(std::mem::take(&mut repeat.folded));
        }
        if self.seen.len() >= self.keys_max
            && let Some(oldest) = self.seen.iter().min_by_key(|(_, repeat)| repeat.written).map(|(key, _)| key.clone())
        {
            self.seen.remove(&oldest);
        }
        self.seen.insert(key, Repeat { written: now, folded: 0 });
        Some(0)
    }

    /// Forgets a key that is over: its next line is written at once. Returns the number left out, if it was known.
    pub fn clear(&mut self, key: &K) -> Option<u64> {
        self.seen.remove(key).map(|repeat| repeat.folded)
    }
}

/// Text of others made fit for one line: no control characters, and a bounded length.
#[must_use]
pub fn clean(text: &str) -> String {
    let mut clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if clean.len() > TEXT_BYTES_MAX {
        let mut end = TEXT_BYTES_MAX - '…'.len_utf8();
        while !clean.is_char_boundary(end) {
            end -= 1;
        }
        clean.truncate(end);
        clean.push('…');
    }
    clean
}

/// The log level of this process, which may change while it runs. Cheap to clone.
#[derive(Clone)]
pub struct LogLevel(reload::Handle<EnvFilter, tracing_subscriber::Registry>);

impl LogLevel {
    /// Lets other lines through from now on.
    ///
    /// # Errors
    /// Says what is wrong with `log.level`; nothing was changed then.
    pub fn set(&self, log: &config::Log) -> Result<(), String> {
        self.0.reload(filter(log)?).map_err(|error| format!("the log level cannot be changed: {error}"))
    }
}

impl fmt::Debug for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LogLevel")
    }
}

/// Sends log lines of this process to standard error, as configured. For the binary only: it can be done once.
///
/// # Errors
/// Says what is wrong with `log.level`, or that a subscriber is installed already.
pub fn init_tracing(log: &config::Log, instance: &str) -> Result<LogLevel, String> {
    let (dispatch, level) = subscriber(log, instance, std::io::stderr)?;
    tracing::dispatcher::set_global_default(dispatch).map_err(|error| format!("logging cannot be set up: {error}"))?;
    Ok(level)
}

/// The subscriber of [`init_tracing`], writing somewhere else.
///
/// # Errors
/// Says what is wrong with `log.level`.
pub fn tracing_dispatch<W>(log: &config::Log, instance: &str, writer: W) -> Result<Dispatch, String>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    subscriber(log, instance, writer).map(|(dispatch, _)| dispatch)
}

fn filter(log: &config::Log) -> Result<EnvFilter, String> {
    // A bare level is meant for us: at `debug` the libraries would drown our lines.
    let directives = match log.level.parse::<LevelFilter>() {
        Ok(level) => format!("warn,keiro_relay={level}"),
        Err(_) => log.level.clone(),
    };
    EnvFilter::builder()
        .parse(directives)
        .map_err(|error| format!("log.level \"{}\" is no level or filter: {error}", log.level))
}

fn subscriber<W>(log: &config::Log, instance: &str, writer: W) -> Result<(Dispatch, LogLevel), String>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reload::Layer::new(filter(log)?);
    let instance = instance.to_owned();
    let registry = tracing_subscriber::registry().with(filter);
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(writer);
    let dispatch = match log.format {
        config::LogFormat::Json => {
            let format = tracing_subscriber::fmt::format().json().flatten_event(true);
            Dispatch::new(registry.with(layer.json().event_format(WithInstance { format, instance, json: true })))
        }
        config::LogFormat::Text => {
            let format = tracing_subscriber::fmt::format().with_ansi(false);
            Dispatch::new(registry.with(layer.event_format(WithInstance { format, instance, json: false })))
        }
    };
    Ok((dispatch, LogLevel(handle)))
}

/// Adds the instance to every line: the library puts shared fields on spans only, and our tasks and threads share none.
struct WithInstance<F> {
    format: F,
    instance: String,
    json: bool,
}

impl<S, N, F> FormatEvent<S, N> for WithInstance<F>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
    N: for<'writer> FormatFields<'writer> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &tracing::Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.format.format_event(context, Writer::new(&mut line), event)?;
        match line.strip_prefix('{') {
            Some(rest) if self.json => {
                writeln!(writer, "{{\"instance\":{},{}", serde_json::json!(self.instance), rest.trim_end())
            }
            _ => writeln!(writer, "{} instance={}", line.trim_end(), self.instance),
        }
    }
}

/// Registers a metric whose name and labels are constants of this file.
fn register<C: Collector + Clone + 'static>(registry: &Registry, made: prometheus::Result<C>) -> C {
    let collector = made.expect("names, labels and buckets of this file are legal");
    registry.register(Box::new(collector.clone())).expect("each name of this file is registered once");
    collector
}

fn counters(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntCounterVec {
    register(registry, IntCounterVec::new(Opts::new(name, help), labels))
}

fn int_gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> IntGaugeVec {
    register(registry, IntGaugeVec::new(Opts::new(name, help), labels))
}

fn gauges(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> GaugeVec {
    register(registry, GaugeVec::new(Opts::new(name, help), labels))
}

fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    register(registry, Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
}

fn histograms(registry: &Registry, name: &str, help: &str, buckets: &[f64], labels: &[&str]) -> HistogramVec {
    register(registry, HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
}

/// A count as a gauge's value.
fn gauge_value(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

fn millis(elapsed: Duration) -> u64 {
    u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
}

/// Locks a mutex that no holder leaves half changed: a panic elsewhere must not end telemetry too.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
