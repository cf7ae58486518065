//! What the loops report and HTTP reads: the state behind `/livez`, `/readyz` and `/status`.
//!
//! Nothing here ever asks a server anything: a verdict is a pure function of what was reported and of the time, and a large
//! backlog alone never makes the relay unready. Nothing of a row but its id is ever kept: no key, payload or attribute.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use serde::Serialize;
use uuid::Uuid;

use super::pause_report::{PauseReport, PausesShown};
use crate::config::Config;
use crate::domain::policy::Policy;
use crate::publish::{BrokerHealth, ParkedTopic};
pub use crate::telemetry::{LoopName, SourceSample};
use crate::telemetry::{Metrics, ProducerRebuilds, REPEAT_EVERY, Repeats, SOURCE_LABEL_BYTES_MAX, StateChange, clean};

/// State changes that are remembered.
pub const RECENT_MAX: usize = 50;
/// Sources that are remembered and shown; beyond it those without rows are forgotten first.
pub const SOURCES_MAX: usize = 10_000;
/// A loop may stay silent this many of its periods before it counts as stuck.
pub const LIVE_PERIODS: u32 = 3;
/// No loop counts as stuck before this, however short its period: a busy machine is no reason to be restarted.
pub const LIVE_SILENCE_MIN: Duration = Duration::from_secs(10);
/// Stalled sources that are named in a reason.
const STALLED_NAMED_MAX: usize = 5;

/// One instant by both clocks: the monotonic one decides, the wall clock is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    /// For differences.
    pub instant: Instant,
    /// For people.
    pub wall: Timestamp,
}

impl Moment {
    /// This instant.
    #[must_use]
    pub fn now() -> Self {
        Self { instant: Instant::now(), wall: Timestamp::now() }
    }

    /// How long ago an earlier moment was; zero for a later one.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.instant.saturating_duration_since(earlier.instant)
    }

    /// RFC 3339 in UTC with milliseconds.
    #[must_use]
    pub fn rfc3339(self) -> String {
        format!("{:.3}", self.wall)
    }
}

/// Who this relay is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// `[relay] instance`.
    pub instance: String,
    /// Version of the program.
    pub version: String,
    /// Hash of the policy configuration.
    pub policy_hash: String,
}

/// How long things may take before they are a reason to be not ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Rows may be ready this long without any verdict on their source.
    pub stall: Duration,
    /// The backlog may go uncounted this long while no verdict comes either.
    pub sample_age: Duration,
}

impl Limits {
    /// Follows the configuration: [`Limits::of_timeouts`].
    #[must_use]
    pub fn of(config: &Config) -> Self {
        Self::of_timeouts(config.relay.publish_timeout, config.maintenance.interval)
    }

    /// A publish may use its whole timeout without anything being wrong, and one sample of the backlog may fail.
    #[must_use]
    pub fn of_timeouts(publish_timeout: Duration, sample_interval: Duration) -> Self {
        let stall = Duration::from_secs(30).max(publish_timeout.saturating_mul(3));
        let two_samples = sample_interval.saturating_mul(2).saturating_add(Duration::from_secs(10));
        Self { stall, sample_age: stall.max(two_samples) }
    }
}

/// Why nothing of a source moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Halt {
    /// How.
    pub kind: HaltKind,
    /// The row it waits for.
    pub outbox_id: Option<Uuid>,
    /// Text for people: the row's `last_error`, the topic's fault.
    pub reason: String,
}

/// How a source is halted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HaltKind {
    /// `stop_the_line`, `on_halt = "retry"`: until the failed row is due again.
    Failing,
    /// `stop_the_line`, `on_halt = "hold"`: until somebody resumes it.
    Held,
    /// `stop_the_line`: its topic is parked, or the cluster is away.
    Topic,
    /// Too many terminal verdicts in a row without an acknowledgement: something is wrong with all of them. Not ready.
    Breaker,
}

impl HaltKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Failing, Self::Held, Self::Topic, Self::Breaker];

    /// How a row halts its source that waits: held, or with attempts spent, or with every attempt returned, which its topic or the
    /// cluster is to blame for.
    #[must_use]
    pub fn of_waiting(held: bool, attempts: i64) -> Self {
        match (held, attempts) {
            (true, _) => Self::Held,
            (false, 1..) => Self::Failing,
            (false, _) => Self::Topic,
        }
    }

    /// The name in log and `/status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Failing => "failing",
            Self::Held => "held",
            Self::Topic => "topic_parked",
            Self::Breaker => "breaker",
        }
    }

    fn needs_person(self) -> bool {
        match self {
            Self::Held | Self::Breaker => true,
            Self::Failing | Self::Topic => false,
        }
    }
}

/// The shared state. Cheap to clone; every method returns at once.
#[derive(Clone)]
pub struct Board(Arc<Inner>);

struct Inner {
    identity: Identity,
    limits: Limits,
    metrics: Metrics,
    clock: Box<dyn Fn() -> Moment + Send + Sync>,
    started: Moment,
    state: Mutex<State>,
    loops: Mutex<Loops>,
    in_flight_rows: AtomicU64,
    in_flight_bytes: AtomicU64,
}

struct State {
    checks: BTreeMap<Dependency, Check>,
    durability: Vec<String>,
    sampled_at: Option<Moment>,
    sources: BTreeMap<String, Source>,
    parked: Vec<Parked>,
    pauses: PausesShown,
    /// When something was last paused or resumed.
    pauses_changed_at: Option<Moment>,
    recent: VecDeque<Recent>,
    stopping: Option<Moment>,
    config: ConfigState,
    /// Lines about a reason that changed while its check stays lost.
    rewordings: Repeats<Dependency>,
}

/// What the relay needs to work at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Dependency {
    Database,
    Broker,
    Schema,
}

impl Dependency {
    const ALL: [Self; 3] = [Self::Database, Self::Broker, Self::Schema];

    fn name(self) -> &'static str {
        match self {
            Self::Database => "database",
            Self::Broker => "broker",
            Self::Schema => "schema",
        }
    }
}

/// What is known of one thing, and since when it is so.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    standing: Standing,
    since: Moment,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Standing {
    /// Not heard of yet, or it cannot be told.
    Unknown(String),
    /// Fine; with a note for people.
    Ok(Option<String>),
    /// Not fine, and why.
    Failed(String),
}

#[derive(Debug, Clone, Default)]
struct Source {
    policy: Option<Policy>,
    elsewhere: bool,
    sample: Option<SourceSample>,
    halt: Option<(Halt, Moment)>,
    last_error: Option<(String, Moment)>,
    last_verdict: Option<Moment>,
}

#[derive(Debug, Clone)]
struct Parked {
    topic: String,
    reason: String,
    since: Moment,
    probe_at: Instant,
}

/// Which configuration is in force, and what became of the last attempt to read another.
#[derive(Debug, Clone)]
struct ConfigState {
    hash: String,
    policy_hash: String,
    /// 1 is what the relay was started with.
    generation: u64,
    in_force_since: Moment,
    /// When it was last read again, and whether that succeeded.
    reload: Option<(Moment, bool)>,
    needs_restart: Vec<String>,
}

#[derive(Debug, Clone)]
struct Recent {
    at: Moment,
    change: StateChange,
}

#[derive(Default)]
struct Loops {
    next: u64,
    running: BTreeMap<u64, Arc<LoopState>>,
}

struct LoopState {
    name: LoopName,
    detail: Option<String>,
    silence_max: Duration,
    /// Microseconds since the board's start.
    ticked: AtomicU64,
}

impl Board {
    /// Makes the board of one relay: nothing is known of either side yet, so it is not ready.
    #[must_use]
    pub fn new(identity: Identity, limits: Limits, metrics: Metrics) -> Self {
        Self::with_clock(identity, limits, metrics, Moment::now)
    }

    /// A board that reads the time elsewhere, for tests.
    #[must_use]
    pub fn with_clock(
        identity: Identity,
        limits: Limits,
        metrics: Metrics,
        clock: impl Fn() -> Moment + Send + Sync + 'static,
    ) -> Self {
        let started = clock();
        metrics.policy(&identity.policy_hash);
        metrics.config_loaded(true);
        let unknown = |dependency: Dependency| {
            let text = format!("the {} has not been checked yet", dependency.name());
            (dependency, Check { standing: Standing::Unknown(text), since: started })
        };
        let mut state = State {
            checks: Dependency::ALL.into_iter().map(unknown).collect(),
            durability: Vec::new(),
            sampled_at: None,
            sources: BTreeMap::new(),
            parked: Vec::new(),
            pauses: PausesShown::default(),
            pauses_changed_at: None,
            recent: VecDeque::new(),
            stopping: None,
            config: ConfigState {
                hash: String::new(),
                policy_hash: identity.policy_hash.clone(),
                generation: 1,
                in_force_since: started,
                reload: None,
                needs_restart: Vec::new(),
            },
            rewordings: Repeats::new(REPEAT_EVERY, Dependency::ALL.len()),
        };
        state.changed(started, StateChange::Started);
        StateChange::Started.emit();
        Self(Arc::new(Inner {
            identity,
            limits,
            metrics,
            clock: Box::new(clock),
            started,
            state: Mutex::new(state),
            loops: Mutex::default(),
            in_flight_rows: AtomicU64::new(0),
            in_flight_bytes: AtomicU64::new(0),
        }))
    }

    /// The metrics that go with this board.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Registers a loop, which must tick at least every `period` while it works: `/livez` fails when it is silent for
    /// [`LIVE_PERIODS`] of them (at least [`LIVE_SILENCE_MIN`]). So the period is the longest a healthy turn may take, a statement
    /// that runs into its timeout included. Dropping the handle ends the watch.
    #[must_use]
    pub fn register(&self, name: LoopName, detail: Option<&str>, period: Duration) -> LoopHandle {
        let running = Arc::new(LoopState {
            name,
            detail: detail.map(clean),
            silence_max: period.saturating_mul(LIVE_PERIODS).max(LIVE_SILENCE_MIN),
            ticked: AtomicU64::new(self.0.elapsed_micros()),
        });
        let mut loops = lock(&self.0.loops);
        let id = loops.next;
        loops.next += 1;
        loops.running.insert(id, Arc::clone(&running));
        LoopHandle { board: self.clone(), id, state: running }
    }

    /// The database answered, or why not.
    pub fn database(&self, result: Result<(), String>) {
        self.check(Dependency::Database, result.map(|()| None));
    }

    /// What stands against publishing, or `None` when nothing does.
    pub fn broker(&self, problem: Option<String>) {
        self.check(Dependency::Broker, problem.map_or(Ok(None), Err));
    }

    /// All that a publisher says of its broker: [`Board::broker`], [`Board::parked`] and the rebuilds.
    pub fn broker_health(&self, health: BrokerHealth) {
        let BrokerHealth { problem, parked, rebuilds } = health;
        self.broker(problem);
        self.parked(parked);
        ProducerRebuilds { total: rebuilds }.emit(&self.0.metrics);
    }

    /// The table is understood (with what it is, for people), or what is missing.
    pub fn schema(&self, result: Result<String, String>) {
        self.check(Dependency::Schema, result.map(Some));
    }

    /// What weakens the promise that nothing is lost, such as a server with `fsync = off`; shown, no reason to be unready.
    pub fn durability(&self, notes: Vec<String>) {
        lock(&self.0.state).durability = notes.iter().map(|note| clean(note)).collect();
    }

    /// Makes a source known with its policy, before any sample or verdict of it.
    pub fn source(&self, name: &str, policy: Policy) {
        // Also gives it its metrics, all at zero.
        let _ = self.0.metrics.source(name);
        lock(&self.0.state).source(name).policy = Some(policy);
    }

    /// Another relay serves this source by preference (or no more): that it makes no progress here is no fault.
    pub fn elsewhere(&self, source: &str, elsewhere: bool) {
        lock(&self.0.state).source(source).elsewhere = elsewhere;
    }

    /// One sample of the whole table; a source that is not in it has no rows.
    pub fn sampled(&self, samples: Vec<SourceSample>) {
        let now = self.now();
        self.0.metrics.sampled(&samples);
        let mut state = lock(&self.0.state);
        state.sampled_at = Some(now);
        for (name, source) in &mut state.sources {
            source.sample =
                Some(SourceSample { source: name.clone(), policy: source.policy, ..SourceSample::default() });
        }
        let present: BTreeSet<String> = samples.iter().map(|sample| sample.source.clone()).collect();
        for sample in samples {
            let source = state.source(&sample.source);
            source.policy = sample.policy;
            source.sample = Some(sample);
        }
        if state.sources.len() > SOURCES_MAX {
            state.sources.retain(|name, source| present.contains(name) || source.halt.is_some());
        }
    }

    /// Rows of the source got a verdict, whichever.
    pub fn progress(&self, source: &str) {
        let now = self.now();
        lock(&self.0.state).source(source).last_verdict = Some(now);
    }

    /// The source is halted, or moves again. To be left halted while the same row is tried again.
    pub fn halted(&self, source: &str, halt: Option<Halt>) {
        let now = self.now();
        let mut state = lock(&self.0.state);
        let known = &mut state.source(source).halt;
        let change = match (known.as_mut(), halt) {
            (None, None) => None,
            (Some(_), None) => {
                *known = None;
                Some(StateChange::Resumed { source_name: source.to_owned() })
            }
            // The same row once more: only its reason may differ.
            (Some((old, _)), Some(new)) if (old.kind, old.outbox_id) == (new.kind, new.outbox_id) => {
                old.reason = clean(&new.reason);
                None
            }
            (_, Some(new)) => {
                let new = Halt { reason: clean(&new.reason), ..new };
                *known = Some((new.clone(), now));
                Some(StateChange::Halted {
                    source_name: source.to_owned(),
                    kind: new.kind.name(),
                    outbox_id: new.outbox_id,
                    reason: new.reason,
                    needs_person: new.kind.needs_person(),
                })
            }
        };
        if let Some(change) = change {
            state.changed(now, change.clone());
            let halted =
                state.sources.iter().filter(|(_, source)| source.halt.is_some()).map(|(name, _)| name.as_str());
            self.0.metrics.halted(halted);
            drop(state);
            change.emit();
        }
    }

    /// All topics that are parked now.
    pub fn parked(&self, topics: Vec<ParkedTopic>) {
        let now = self.now();
        let mut state = lock(&self.0.state);
        if topics.is_empty() && state.parked.is_empty() {
            return;
        }
        let before = std::mem::take(&mut state.parked);
        let mut changes = Vec::new();
        for ParkedTopic { topic, reason, probe_at } in topics {
            let (topic, reason) = (clean(&topic), clean(&reason));
            let since = match before.iter().find(|known| known.topic == topic) {
                Some(known) => known.since,
                None => {
                    changes.push(StateChange::Parked { topic: topic.clone(), reason: reason.clone() });
                    now
                }
            };
            state.parked.push(Parked { topic, reason, since, probe_at });
        }
        for Parked { topic, .. } in before {
            if !state.parked.iter().any(|parked| parked.topic == topic) {
                changes.push(StateChange::Released { topic });
            }
        }
        self.0.metrics.parked(state.parked.iter().map(|parked| parked.topic.as_str()));
        for change in &changes {
            state.changed(now, change.clone());
        }
        drop(state);
        for change in changes {
            change.emit();
        }
    }

    /// What operators paused.
    pub fn pauses(&self, shown: PausesShown) {
        let now = self.now();
        self.0.metrics.paused(|kind| shown.count(kind));
        let mut state = lock(&self.0.state);
        let changes = shown.changes(&state.pauses);
        state.pauses = shown;
        if changes.is_empty() {
            return;
        }
        state.pauses_changed_at = Some(now);
        for change in &changes {
            state.changed(now, change.clone());
        }
        drop(state);
        for change in changes {
            change.emit();
        }
    }

    /// The last thing that went wrong with a source: a text that starts with a code word, and holds nothing of any row.
    pub fn failure(&self, source: &str, error: &str) {
        let now = self.now();
        lock(&self.0.state).source(source).last_error = Some((clean(error), now));
    }

    /// How many rows and payload bytes are between claim and settlement in this process.
    pub fn in_flight(&self, rows: u64, bytes: u64) {
        self.0.in_flight_rows.store(rows, Ordering::Relaxed);
        self.0.in_flight_bytes.store(bytes, Ordering::Relaxed);
        self.0.metrics.in_flight(rows, bytes);
    }

    /// The hash of the configuration the relay was started with.
    pub fn configured(&self, hash: String) {
        lock(&self.0.state).config.hash = hash;
    }

    /// Another configuration is in force, but for the settings that need a restart.
    pub fn reconfigured(&self, hash: String, policy_hash: String, needs_restart: Vec<String>) {
        let now = self.now();
        self.0.metrics.policy(&policy_hash);
        self.0.metrics.config_loaded(true);
        let config = &mut lock(&self.0.state).config;
        if config.hash != hash {
            config.generation += 1;
            config.in_force_since = now;
        }
        (config.hash, config.policy_hash, config.needs_restart) = (hash, policy_hash, needs_restart);
        config.reload = Some((now, true));
    }

    /// A configuration was refused as a whole: the one before stays in force.
    pub fn reload_failed(&self) {
        let now = self.now();
        self.0.metrics.config_loaded(false);
        lock(&self.0.state).config.reload = Some((now, false));
    }

    /// The relay was told to stop: alive, but not ready any more.
    pub fn stopping(&self) {
        let now = self.now();
        let mut state = lock(&self.0.state);
        if state.stopping.is_none() {
            state.stopping = Some(now);
            state.changed(now, StateChange::Stopping);
            drop(state);
            StateChange::Stopping.emit();
        }
    }

    /// Everything as it is now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let at = self.now();
        // One lock after the other, never both.
        let loops = self.silences();
        let state = lock(&self.0.state);
        Snapshot {
            identity: self.0.identity.clone(),
            limits: self.0.limits,
            at,
            started: self.0.started,
            checks: state.checks.clone(),
            durability: state.durability.clone(),
            sampled_at: state.sampled_at,
            sources: state.sources.clone(),
            parked: state.parked.clone(),
            pauses: state.pauses.clone(),
            pauses_changed_at: state.pauses_changed_at,
            recent: state.recent.iter().cloned().collect(),
            stopping: state.stopping,
            config: state.config.clone(),
            loops,
            in_flight_rows: self.0.in_flight_rows.load(Ordering::Relaxed),
            in_flight_bytes: self.0.in_flight_bytes.load(Ordering::Relaxed),
        }
    }

    /// Whether every loop ticks. Takes no lock that a loop holds for long, and knows nothing of dependencies.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        Liveness::of(&self.silences())
    }

    fn silences(&self) -> Vec<Silence> {
        let now = self.0.elapsed_micros();
        let loops = lock(&self.0.loops);
        let silence = |running: &Arc<LoopState>| Silence {
            name: running.name,
            detail: running.detail.clone(),
            silent: Duration::from_micros(now.saturating_sub(running.ticked.load(Ordering::Relaxed))),
            silence_max: running.silence_max,
        };
        loops.running.values().map(silence).collect()
    }

    fn check(&self, dependency: Dependency, result: Result<Option<String>, String>) {
        let now = self.now();
        let mut state = lock(&self.0.state);
        let known = &state.checks[&dependency];
        let (standing, since, change) = match (&known.standing, result) {
            (Standing::Ok(_), Ok(note)) => (Standing::Ok(note), known.since, None),
            (Standing::Unknown(_) | Standing::Failed(_), Ok(note)) => {
                (Standing::Ok(note), now, Some(StateChange::Regained { check: dependency.name() }))
            }
            (Standing::Unknown(_) | Standing::Ok(_), Err(reason)) => {
                let reason = clean(&reason);
                let change = StateChange::Lost { check: dependency.name(), reason: reason.clone() };
                (Standing::Failed(reason), now, Some(change))
            }
            (Standing::Failed(old), Err(reason)) => {
                let (since, reason) = (known.since, clean(&reason));
                // Another reason is worth a line, but texts that differ each time are not worth one each time.
                let reworded = *old != reason && state.rewordings.note(dependency, now.instant).is_some();
                let change = reworded.then(|| StateChange::Lost { check: dependency.name(), reason: reason.clone() });
                (Standing::Failed(reason), since, change)
            }
        };
        state.checks.insert(dependency, Check { standing, since });
        if let Some(change) = change {
            state.changed(now, change.clone());
            drop(state);
            change.emit();
        }
    }

    fn now(&self) -> Moment {
        (self.0.clock)()
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Board").field(&self.0.identity.instance).finish()
    }
}

impl Inner {
    fn elapsed_micros(&self) -> u64 {
        u64::try_from((self.clock)().since(self.started).as_micros()).unwrap_or(u64::MAX)
    }
}

impl State {
    fn source(&mut self, name: &str) -> &mut Source {
        if !self.sources.contains_key(name) {
            self.sources.insert(name.to_owned(), Source::default());
        }
        self.sources.get_mut(name).expect("inserted when it was missing")
    }

    /// Remembers a change. Its line is written once the lock is let go: a reader must not wait for a log that blocks.
    fn changed(&mut self, at: Moment, change: StateChange) {
        if self.recent.len() >= RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(Recent { at, change });
    }
}

/// A loop's proof of life; dropping it ends the watch.
pub struct LoopHandle {
    board: Board,
    id: u64,
    state: Arc<LoopState>,
}

impl LoopHandle {
    /// The loop turns.
    pub fn tick(&self) {
        self.state.ticked.store(self.board.0.elapsed_micros(), Ordering::Relaxed);
    }

    /// The loop turns, and its last turn did its work without an error.
    pub fn succeeded(&self) {
        self.tick();
        self.board.0.metrics.succeeded(self.state.name);
    }
}

impl Drop for LoopHandle {
    fn drop(&mut self) {
        lock(&self.board.0.loops).running.remove(&self.id);
    }
}

impl fmt::Debug for LoopHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopHandle").field("name", &self.state.name).field("detail", &self.state.detail).finish()
    }
}

/// How long a loop has been silent.
#[derive(Debug, Clone)]
struct Silence {
    name: LoopName,
    detail: Option<String>,
    silent: Duration,
    silence_max: Duration,
}

/// Everything the board knows at one moment; every verdict is a function of it.
#[derive(Debug, Clone)]
pub struct Snapshot {
    identity: Identity,
    limits: Limits,
    at: Moment,
    started: Moment,
    checks: BTreeMap<Dependency, Check>,
    durability: Vec<String>,
    sampled_at: Option<Moment>,
    sources: BTreeMap<String, Source>,
    parked: Vec<Parked>,
    pauses: PausesShown,
    pauses_changed_at: Option<Moment>,
    recent: Vec<Recent>,
    stopping: Option<Moment>,
    config: ConfigState,
    loops: Vec<Silence>,
    in_flight_rows: u64,
    in_flight_bytes: u64,
}

/// Whether the process should be left running (body of `/livez`).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Liveness {
    /// No loop is stuck.
    pub live: bool,
    /// Loops that are watched.
    pub loops: usize,
    /// Those that are silent for too long.
    pub stuck: Vec<Stuck>,
}

/// A loop that is silent for too long.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Stuck {
    /// The loop.
    #[serde(rename = "loop")]
    pub name: &'static str,
    /// Which of several: the source.
    pub detail: Option<String>,
    /// How long it has been silent.
    pub silent_seconds: u64,
    /// How long it may be.
    pub silent_seconds_max: u64,
}

/// Whether the relay does its work (body of `/readyz`).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Readiness {
    /// No check stands against it.
    pub ready: bool,
    /// Why not: every check that is not `ok`.
    pub reasons: Vec<NotReady>,
    /// Every check: `database`, `broker`, `schema`, `progress`, `breaker`, `stop`.
    pub checks: BTreeMap<&'static str, CheckReport>,
    /// What weakens the promise that nothing is lost; no reason to be unready.
    pub durability: Vec<String>,
}

/// One reason to be not ready.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct NotReady {
    /// Which check.
    pub check: &'static str,
    /// Why.
    pub reason: String,
    /// Since when (RFC 3339, UTC).
    pub since: String,
}

/// One check.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CheckReport {
    /// `ok`, `failed` or `unknown`.
    pub state: &'static str,
    /// Why not, or a note.
    pub reason: Option<String>,
    /// Since when it is so (RFC 3339, UTC).
    pub since: String,
}

impl Check {
    fn report(&self) -> CheckReport {
        let (state, reason) = match &self.standing {
            Standing::Unknown(reason) => ("unknown", Some(reason.clone())),
            Standing::Ok(note) => ("ok", note.clone()),
            Standing::Failed(reason) => ("failed", Some(reason.clone())),
        };
        CheckReport { state, reason, since: self.since.rfc3339() }
    }

    fn is_ok(&self) -> bool {
        matches!(self.standing, Standing::Ok(_))
    }
}

impl Liveness {
    fn of(loops: &[Silence]) -> Self {
        let stuck: Vec<Stuck> = loops
            .iter()
            .filter(|silence| silence.silent > silence.silence_max)
            .map(|silence| Stuck {
                name: silence.name.name(),
                detail: silence.detail.clone(),
                silent_seconds: silence.silent.as_secs(),
                silent_seconds_max: silence.silence_max.as_secs(),
            })
            .collect();
        Self { live: stuck.is_empty(), loops: loops.len(), stuck }
    }
}

impl Snapshot {
    /// Whether the relay does its work at `now`.
    #[must_use]
    pub fn readiness(&self, now: Moment) -> Readiness {
        let mut checks: Vec<(&'static str, Check)> =
            self.checks.iter().map(|(dependency, check)| (dependency.name(), check.clone())).collect();
        checks.push(("progress", self.progress(now)));
        checks.push(("breaker", self.breaker()));
        let stop = match self.stopping {
            None => Check { standing: Standing::Ok(None), since: self.started },
            Some(since) => Check { standing: Standing::Failed("the relay is stopping".to_owned()), since },
        };
        checks.push(("stop", stop));
        let reasons: Vec<NotReady> = checks
            .iter()
            .filter(|(_, check)| !check.is_ok())
            .map(|(name, check)| {
                let CheckReport { reason, since, .. } = check.report();
                NotReady { check: name, reason: reason.unwrap_or_default(), since }
            })
            .collect();
        Readiness {
            ready: reasons.is_empty(),
            reasons,
            checks: checks.iter().map(|(name, check)| (*name, check.report())).collect(),
            durability: self.durability.clone(),
        }
    }

    /// Whether rows that are ready, routed and not held get verdicts.
    fn progress(&self, now: Moment) -> Check {
        // Nobody can be expected to make progress before both sides work, nor is anybody late by the time they did not.
        if let Some((dependency, check)) = self.checks.iter().find(|(_, check)| !check.is_ok()) {
            let text = format!("cannot be told before the {} is usable", dependency.name());
            return Check { standing: Standing::Unknown(text), since: check.since };
        }
        let usable = self.checks.values().map(|check| check.since).fold(self.started, latest);
        let stalled: Vec<(&str, Moment)> = self
            .sources
            .iter()
            .filter(|(name, _)| !self.pauses.sources.contains(*name))
            .filter_map(|(name, source)| Some((name.as_str(), self.stalled(source, usable, now)?)))
            .collect();
        if let Some(since) = stalled.iter().map(|(_, since)| *since).reduce(earliest) {
            let mut names: Vec<String> = stalled.iter().take(STALLED_NAMED_MAX).map(|(name, _)| clean(name)).collect();
            if stalled.len() > STALLED_NAMED_MAX {
                names.push(format!("{} more", stalled.len() - STALLED_NAMED_MAX));
            }
            let text = format!("rows are ready but get no verdict: {}", names.join(", "));
            return Check { standing: Standing::Failed(text), since };
        }
        let last_verdict = self.sources.values().filter_map(|source| source.last_verdict).reduce(latest);
        let told = [self.sampled_at, last_verdict].into_iter().flatten().fold(usable, latest);
        if now.since(told) > self.limits.sample_age {
            let text = "the backlog could not be counted and no row got a verdict".to_owned();
            return Check { standing: Standing::Failed(text), since: told };
        }
        Check { standing: Standing::Ok(None), since: last_verdict.unwrap_or(self.started) }
    }

    /// Since when a source with ready rows gets no verdict, when that is too long.
    fn stalled(&self, source: &Source, usable: Moment, now: Moment) -> Option<Moment> {
        let waiting = source.sample.as_ref()?.oldest_ready_age_seconds?;
        let (halted, unrouted) = (source.halt.is_some(), source.policy.is_none());
        if halted || unrouted || source.elsewhere || waiting < self.limits.stall.as_secs_f64() {
            return None;
        }
        // A sample from before the last verdict, or from before a pause began or ended, says nothing of what is waiting since.
        let news = [source.last_verdict, self.pauses_changed_at].into_iter().flatten().reduce(latest);
        if news.is_some_and(|news| self.sampled_at.is_none_or(|sampled| sampled.instant <= news.instant)) {
            return None;
        }
        // Rows that a pause held back are as old as the pause was long: nobody is late by that.
        let since = news.map_or(usable, |news| latest(news, usable));
        (now.since(since) > self.limits.stall).then_some(since)
    }

    /// Whether a source is held because all its rows end without being sent.
    fn breaker(&self) -> Check {
        let broken = self.sources.iter().find_map(|(name, source)| match &source.halt {
            Some((halt, since)) if halt.kind == HaltKind::Breaker => Some((name, halt, *since)),
            Some(_) | None => None,
        });
        match broken {
            None => Check { standing: Standing::Ok(None), since: self.started },
            Some((name, halt, since)) => {
                let text = format!("source {} is held: {}", clean(name), halt.reason);
                Check { standing: Standing::Failed(text), since }
            }
        }
    }

    /// Whether every loop ticks.
    #[must_use]
    pub fn liveness(&self) -> Liveness {
        Liveness::of(&self.loops)
    }

    /// The whole state for `/status`.
    #[must_use]
    pub fn status(&self) -> Status {
        let dependencies = self.checks.iter().map(|(dependency, check)| (dependency.name(), check.report())).collect();
        let recent = |recent: &Recent| RecentReport {
            at: recent.at.rfc3339(),
            change: recent.change.word(),
            about: recent.change.about().map(clean),
            reason: recent.change.reason().map(str::to_owned),
        };
        Status {
            instance: self.identity.instance.clone(),
            version: self.identity.version.clone(),
            policy_hash: self.config.policy_hash.clone(),
            config: self.config.report(),
            at: self.at.rfc3339(),
            started_at: self.started.rfc3339(),
            live: self.liveness().live,
            ready: self.readiness(self.at),
            dependencies,
            durability: self.durability.clone(),
            in_flight_rows: self.in_flight_rows,
            in_flight_bytes: self.in_flight_bytes,
            sampled_at: self.sampled_at.map(Moment::rfc3339),
            sources: self.sources.iter().take(SOURCES_MAX).map(|(name, source)| source.report(name)).collect(),
            sources_omitted: self.sources.len().saturating_sub(SOURCES_MAX),
            parked_topics: self.parked.iter().map(|parked| parked.report(self.at)).collect(),
            paused: self.pauses.list.clone(),
            pauses_off: self.pauses.problem.clone(),
            recent: self.recent.iter().rev().map(recent).collect(),
        }
    }

    /// When it was taken.
    #[must_use]
    pub fn at(&self) -> Moment {
        self.at
    }
}

/// Body of `/status`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// `[relay] instance`.
    pub instance: String,
    /// Version of the program.
    pub version: String,
    /// Hash of the policy configuration.
    pub policy_hash: String,
    /// Which configuration is in force.
    pub config: ConfigReport,
    /// When this was read.
    pub at: String,
    /// When the relay started.
    pub started_at: String,
    /// As `/livez` says.
    pub live: bool,
    /// As `/readyz` says.
    pub ready: Readiness,
    /// Database, broker and schema.
    pub dependencies: BTreeMap<&'static str, CheckReport>,
    /// What weakens the promise that nothing is lost.
    pub durability: Vec<String>,
    /// Rows between claim and settlement.
    pub in_flight_rows: u64,
    /// Their payload bytes.
    pub in_flight_bytes: u64,
    /// When the rows were counted; `null` before the first time.
    pub sampled_at: Option<String>,
    /// Every source, by name.
    pub sources: Vec<SourceReport>,
    /// Sources beyond [`SOURCES_MAX`], which are left out.
    pub sources_omitted: usize,
    /// Topics that are left alone for a while.
    pub parked_topics: Vec<ParkedReport>,
    /// What operators paused, the oldest first.
    pub paused: Vec<PauseReport>,
    /// Why pauses are not read; `null` when they are.
    pub pauses_off: Option<String>,
    /// State changes, the newest first.
    pub recent: Vec<RecentReport>,
}

/// Which configuration is in force, and what became of the last reload.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ConfigReport {
    /// Hash of every setting in force but secrets and the instance's name.
    pub hash: String,
    /// Counts the configurations that were in force; 1 is what the relay was started with.
    pub generation: u64,
    /// Since when it is in force.
    pub in_force_since: String,
    /// When the configuration was last read again; `null` when it never was.
    pub last_reload_at: Option<String>,
    /// Whether that succeeded; after a failure the configuration before it stays in force.
    pub last_reload_successful: Option<bool>,
    /// Settings that were changed and wait for a restart.
    pub needs_restart: Vec<String>,
}

impl ConfigState {
    fn report(&self) -> ConfigReport {
        ConfigReport {
            hash: self.hash.clone(),
            generation: self.generation,
            in_force_since: self.in_force_since.rfc3339(),
            last_reload_at: self.reload.map(|(at, _)| at.rfc3339()),
            last_reload_successful: self.reload.map(|(_, successful)| successful),
            needs_restart: self.needs_restart.clone(),
        }
    }
}

/// One source in `/status`. Counts are `null` before the first sample.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SourceReport {
    /// Its name.
    pub source: String,
    /// Its policy; `null` when it is not ours.
    pub policy: Option<&'static str>,
    /// Rows in `pending`.
    pub pending: Option<u64>,
    /// Rows in `failed`.
    pub failed: Option<u64>,
    /// Rows in `publishing`.
    pub publishing: Option<u64>,
    /// Rows in `sent`, up to a cap.
    pub sent: Option<u64>,
    /// Rows in `dead`.
    pub dead: Option<u64>,
    /// Rows in `rejected`.
    pub rejected: Option<u64>,
    /// Rows with a status that is not ours.
    pub unknown: Option<u64>,
    /// Whether a count stopped at its limit.
    pub capped: bool,
    /// Age of the oldest pending or failed row.
    pub oldest_age_seconds: Option<f64>,
    /// How long the oldest claimable row has waited.
    pub oldest_ready_age_seconds: Option<f64>,
    /// The row a halted source waits for.
    pub halted_on: Option<Uuid>,
    /// How, why and since when it is halted.
    pub halt: Option<HaltReport>,
    /// Another relay serves it by preference.
    pub elsewhere: bool,
    /// The last thing that went wrong.
    pub last_error: Option<ErrorReport>,
    /// When rows of it last got a verdict here.
    pub last_verdict_at: Option<String>,
}

/// How a source is halted.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct HaltReport {
    /// See [`HaltKind`].
    pub kind: &'static str,
    /// Why.
    pub reason: String,
    /// Since when.
    pub since: String,
}

/// The last thing that went wrong.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ErrorReport {
    /// What.
    pub error: String,
    /// When.
    pub at: String,
}

/// A parked topic.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ParkedReport {
    /// The topic.
    pub topic: String,
    /// Why.
    pub reason: String,
    /// Since when.
    pub since: String,
    /// When it is probed next.
    pub probe_at: String,
}

/// A state change.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct RecentReport {
    /// When.
    pub at: String,
    /// What, in one word.
    pub change: &'static str,
    /// The check, source or topic it is about.
    pub about: Option<String>,
    /// Why.
    pub reason: Option<String>,
}

impl Source {
    fn report(&self, name: &str) -> SourceReport {
        let sample = self.sample.as_ref();
        let count = |rows: fn(&SourceSample) -> u64| sample.map(rows);
        SourceReport {
            // A name is free text: one that is no label either is shown shortened.
            source: if name.len() > SOURCE_LABEL_BYTES_MAX { clean(name) } else { name.to_owned() },
            policy: self.policy.map(Policy::name),
            pending: count(|sample| sample.pending),
            failed: count(|sample| sample.failed),
            publishing: count(|sample| sample.publishing),
            sent: count(|sample| sample.sent),
            dead: count(|sample| sample.dead),
            rejected: count(|sample| sample.rejected),
            unknown: count(|sample| sample.unknown),
            capped: sample.is_some_and(|sample| sample.capped),
            oldest_age_seconds: sample.and_then(|sample| sample.oldest_age_seconds),
            oldest_ready_age_seconds: sample.and_then(|sample| sample.oldest_ready_age_seconds),
            halted_on: self.halt.as_ref().and_then(|(halt, _)| halt.outbox_id),
            halt: self.halt.as_ref().map(|(halt, since)| HaltReport {
                kind: halt.kind.name(),
                reason: halt.reason.clone(),
                since: since.rfc3339(),
            }),
            elsewhere: self.elsewhere,
            last_error: self
                .last_error
                .as_ref()
                .map(|(error, at)| ErrorReport { error: error.clone(), at: at.rfc3339() }),
            last_verdict_at: self.last_verdict.map(Moment::rfc3339),
        }
    }
}

impl Parked {
    fn report(&self, now: Moment) -> ParkedReport {
        let ahead = self.probe_at.saturating_duration_since(now.instant);
        let probe_at = Moment { instant: self.probe_at, wall: now.wall.checked_add(ahead).unwrap_or(now.wall) };
        ParkedReport {
            topic: self.topic.clone(),
            reason: self.reason.clone(),
            since: self.since.rfc3339(),
            probe_at: probe_at.rfc3339(),
        }
    }
}

fn latest(one: Moment, other: Moment) -> Moment {
    if one.instant >= other.instant { one } else { other }
}

fn earliest(one: Moment, other: Moment) -> Moment {
    if one.instant <= other.instant { one } else { other }
}

/// Locks a mutex that no holder leaves half changed: a panic elsewhere must not end the reports too.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
