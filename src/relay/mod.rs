//! The relay: build → spawn → stop. Supervises its loops; only `pass` knows the whole chain.
//!
//! Nothing here ever runs DDL, exits the process, or touches global state, so several relays can live in one process.

pub mod budget;
mod builder;
pub mod gate;
mod handle;
pub mod health;
mod live;
mod maintenance;
mod pass;
pub mod pause_report;
mod pauses;
mod poll;
mod preference;
mod source;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

pub use self::builder::{BuildError, Builder};
pub use self::handle::Handle;
pub use self::live::Reloaded;
pub use self::maintenance::MaintenanceSummary;
pub(crate) use self::maintenance::{SampleRows, sample};
pub use self::pass::PassSummary;

use self::budget::Budget;
use self::gate::Gate;
use self::health::{Board, Halt};
use self::live::Live;
use self::maintenance::Maintenance;
use self::pauses::Paused;
use self::poll::Poller;
use self::preference::Preference;
use self::source::{Done, Mode, SourceLoop, Wakers};
use crate::config::Config;
use crate::domain::outcome::Setback;
use crate::domain::pause::PausedRows;
use crate::domain::policy::{Policy, SourceRules};
use crate::domain::retry::RetryPolicy;
use crate::publish::{PublishError, Publisher};
use crate::store::{ErrorKind, Head, Heard, InspectError, Listening, Store, StoreError};
use crate::telemetry::{Failure, LoopName, Metrics, Reason, Stage, StateChange};

/// Sources served at most; more are refused and shown.
pub(crate) const SOURCES_MAX: usize = 10_000;
/// How often new sources are looked for.
const DISCOVER_INTERVAL: Duration = Duration::from_secs(1);
/// How often the broker's state is read for readiness.
const BROKER_INTERVAL: Duration = Duration::from_secs(1);
/// How long a refused change stands against the database although it answers questions.
const WRITES_REFUSED_MAX: Duration = Duration::from_secs(30);
/// Pause between tries while the database is away.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(200);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(5);
/// A loop's healthy turn may take this much longer than the longest timeout in it.
const TURN_MARGIN: Duration = Duration::from_secs(10);

/// Says what an error of a whole call means for its rows.
pub(crate) type Classify = dyn Fn(&PublishError) -> Setback + Send + Sync;

/// What every loop of one relay shares.
pub(crate) struct Context {
    /// What the relay was started with. What may change while it runs is in `live`.
    pub config: Arc<Config>,
    pub live: Live,
    pub store: Arc<Store>,
    /// Over a connection of its own, so that the slow timer never waits for the fast path.
    pub maintenance_store: Arc<Store>,
    pub publisher: Arc<dyn Publisher>,
    pub metrics: Metrics,
    pub board: Board,
    pub gate: Gate,
    pub budget: Budget,
    pub poller: Poller,
    /// Cancelled when the relay stops: no new claim, no new record.
    pub stop: CancellationToken,
    pub preference: Preference,
    /// The caller's own rules, if there are any.
    pub retry: Option<Arc<dyn RetryPolicy>>,
    pub classify: Option<Arc<Classify>>,
    /// What operators paused.
    pub paused: Paused,
    /// Notified when a source is served for the first time.
    sources_changed: Notify,
    wakers: Mutex<HashMap<Arc<str>, Arc<Wakers>>>,
    database_away: AtomicBool,
    /// When the database last refused a change although it answers.
    writes_refused: Mutex<Option<Instant>>,
}

impl Context {
    /// Reports a failed statement.
    fn store_failed(&self, stage: Stage, source: Option<&str>, error: &StoreError, elapsed: Option<Duration>) {
        let text = error.to_string();
        // A count that took too long says that there is much to count, not that the database is away: everything would be looked at
        // again after each of them.
        let slow_count = matches!(stage, Stage::Sample) && error.reason() == "timeout";
        let outage = is_outage(error) && !slow_count;
        Failure { stage, reason: reason_of(error), source_name: source, error: &text, elapsed }.emit(&self.metrics);
        if outage {
            // Each time, so that what is shown is why it is away now; and before the flag, so that an answer that comes in between
            // does not leave it shown for ever.
            self.board.database(Err(text));
            self.database_away.store(true, Ordering::SeqCst);
        }
    }

    /// Reports a claim or settlement that failed. That the database answers questions does not mean that it takes changes: a
    /// standby, a server that ran full, a table that somebody locked.
    fn write_failed(&self, stage: Stage, source: &str, error: &StoreError, elapsed: Duration) {
        let refused = is_outage(error) && error.code().is_some();
        if refused {
            *self.writes_refused() = Some(Instant::now());
        }
        self.store_failed(stage, Some(source), error, Some(elapsed));
    }

    /// The database answered: when it had been away, everything is looked at again.
    fn store_answered(&self) {
        if !self.database_away.load(Ordering::Relaxed) {
            return;
        }
        {
            let mut refused = self.writes_refused();
            // Whoever has rows to claim tries at least every few seconds, so silence means that there are none.
            if refused.is_some_and(|at| at.elapsed() < WRITES_REFUSED_MAX) {
                return;
            }
            *refused = None;
        }
        if self.database_away.swap(false, Ordering::SeqCst) {
            self.board.database(Ok(()));
            self.changed_all();
        }
    }

    /// The database took a change.
    fn store_changed(&self) {
        if self.database_away.load(Ordering::Relaxed) {
            *self.writes_refused() = None;
            self.store_answered();
        }
    }

    fn writes_refused(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        self.writes_refused.lock().expect("no code panics while it holds this lock")
    }

    /// The table could not be read, or is not what we understand.
    fn inspect_failed(&self, error: &InspectError) {
        match error {
            InspectError::Store(error) => self.store_failed(Stage::Maintenance, None, error, None),
            problems @ InspectError::Problems(_) => self.board.schema(Err(problems.to_string())),
        }
    }

    /// Rows of a source changed in a way no poll shows.
    fn changed(&self, source: &str) {
        if let Some(wakers) = self.wakers().get(source) {
            wakers.changed.notify_one();
        }
    }

    /// An operator says that the source may go on.
    fn resumed(&self, source: &str) {
        if let Some(wakers) = self.wakers().get(source) {
            wakers.resumed.store(true, Ordering::Relaxed);
            wakers.changed.notify_one();
        }
    }

    fn changed_all(&self) {
        for wakers in self.wakers().values() {
            wakers.changed.notify_one();
        }
    }

    /// A `stop_the_line` source is halted by its head, or moves. An open breaker has the last word.
    fn halted(&self, source: &str, halt: Option<Halt>) {
        let broken = self.wakers().get(source).is_some_and(|wakers| wakers.broken.load(Ordering::Relaxed));
        if !broken {
            self.board.halted(source, halt);
        }
    }

    fn wakers(&self) -> std::sync::MutexGuard<'_, HashMap<Arc<str>, Arc<Wakers>>> {
        self.wakers.lock().expect("no code panics while it holds this lock")
    }

    /// The longest healthy turn of a loop that talks to the database and waits for others' passes.
    fn turn_max(&self) -> Duration {
        self.config.database.statement_timeout.max(self.config.relay.publish_timeout) + TURN_MARGIN
    }
}

/// Whether the database, and not the statement, is to blame.
fn is_outage(error: &StoreError) -> bool {
    match error.kind() {
        ErrorKind::Transient | ErrorKind::Auth => true,
        ErrorKind::Serialization | ErrorKind::Mismatch | ErrorKind::Fatal => false,
    }
}

/// The metric's reason for an error of the database.
fn reason_of(error: &StoreError) -> Reason {
    match error.reason() {
        "connect" | "closed" => Reason::Connection,
        "auth" => Reason::Authentication,
        "timeout" => Reason::Timeout,
        "serialization" => Reason::Conflict,
        "permission" => Reason::Permission,
        "schema" => Reason::Schema,
        "unavailable" => Reason::Unavailable,
        _ => Reason::Other,
    }
}

/// A relay that is built and not started.
pub struct Relay {
    ctx: Arc<Context>,
    ended: watch::Sender<Option<End>>,
}

/// Why the relay ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It was stopped; whether everything in flight was settled within the grace.
    Stopped {
        /// Whether every pass ended in time.
        clean: bool,
    },
    /// The table is not what we understand: every problem, named.
    Schema(String),
    /// A loop ended by itself: a bug of ours.
    Bug(String),
}

/// Why `drain` has no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DrainError {
    /// The table is not what we understand: every problem, named.
    #[error("{0}")]
    Schema(String),
    /// The database could not be asked.
    #[error(transparent)]
    Database(#[from] StoreError),
    /// A loop panicked.
    #[error("a loop panicked: {0}")]
    Bug(String),
}

/// What `drain` did.
#[derive(Debug, Default, Clone, Serialize)]
#[non_exhaustive]
pub struct DrainReport {
    /// Rows claimed.
    pub claimed: u64,
    /// Rows acknowledged and marked.
    pub sent: u64,
    /// Rows that spent an attempt.
    pub failed: u64,
    /// Rows behind a pivot.
    pub skipped: u64,
    /// Rows whose attempt was returned.
    pub returned: u64,
    /// Rows that spent their last attempt.
    pub dead: u64,
    /// Rows that can never be accepted.
    pub rejected: u64,
    /// Rows freed from expired leases first.
    pub requeued: u64,
    /// Rows that were no longer ours when settled.
    pub lost: u64,
    /// Halted `stop_the_line` sources.
    pub halted_on: Vec<HaltedOn>,
    /// Rows that are due and were not sent, as far as the last look at each source says.
    pub due: u64,
    /// Pauses in force at the end, whose rows stay.
    pub paused: u64,
    /// Whether it gave up because a side is away.
    pub gave_up: bool,
    /// How long it took.
    pub elapsed_ms: u64,
}

/// A halted source in `drain --json`.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct HaltedOn {
    /// The source.
    pub source: String,
    /// The row it waits for.
    pub outbox_id: Uuid,
}

impl Relay {
    /// Begins to build a relay of a program's own, with the defaults of the product.
    ///
    /// ```no_run
    /// # use keiro_relay::domain::message::Message;
    /// # use keiro_relay::relay::Relay;
    /// # async fn send(_: Message) -> Result<(), std::io::Error> { Ok(()) }
    /// # async fn run(pool: deadpool_postgres::Pool) -> Result<(), Box<dyn std::error::Error>> {
    /// let relay = Relay::builder(keiro_relay::publish::each(send)).pool(pool).build()?;
    /// let handle = relay.spawn();
    /// // …
    /// handle.stop();
    /// handle.done().await;
    /// # Ok(())
    /// # }
    /// ```
    pub fn builder(publisher: impl Publisher) -> Builder {
        Builder::new(Arc::new(publisher))
    }

    /// Builds a relay; nothing is contacted and nothing runs yet.
    ///
    /// `maintenance_store` is a store over a connection of its own, so that the slow timer never waits for the fast path.
    pub(crate) fn build(
        config: Arc<Config>,
        store: Arc<Store>,
        maintenance_store: Arc<Store>,
        publisher: Arc<dyn Publisher>,
        board: Board,
    ) -> Self {
        let relay = &config.relay;
        board.configured(config.hash());
        let ctx = Context {
            budget: Budget::new(relay.in_flight_rows_max, relay.in_flight_bytes_max),
            poller: Poller::new(relay.poll_interval_max),
            gate: Gate::default(),
            metrics: board.metrics().clone(),
            stop: CancellationToken::new(),
            preference: Preference::new(),
            retry: None,
            classify: None,
            paused: Paused::default(),
            sources_changed: Notify::new(),
            wakers: Mutex::new(HashMap::new()),
            database_away: AtomicBool::new(false),
            writes_refused: Mutex::new(None),
            live: Live::new(Arc::clone(&config)),
            config,
            store,
            maintenance_store,
            publisher,
            board,
        };
        Self { ctx: Arc::new(ctx), ended: watch::Sender::new(None) }
    }

    /// Takes the caller's own rules.
    fn decide(&mut self, retry: Option<Arc<dyn RetryPolicy>>, classify: Option<Arc<Classify>>) {
        let ctx = Arc::get_mut(&mut self.ctx).expect("nothing runs yet, so nobody else holds it");
        (ctx.retry, ctx.classify) = (retry, classify);
    }

    /// Claims once from every source, publishes and settles, and returns what became of the rows: for programs that have a loop of
    /// their own, and for tests. Pauses, the gate and other relays' claims are respected; expired leases are requeued by
    /// [`Relay::maintain_once`] only. A source whose claim fails is left out, and that is logged and counted.
    ///
    /// # Errors
    /// Every problem of the table, named, when it is not what we understand; or why the database could not be asked.
    pub async fn pass_once(&self) -> Result<PassSummary, DrainError> {
        let ctx = &self.ctx;
        prepare(ctx, false).await?;
        let mut loops: JoinSet<Done> = JoinSet::new();
        for source in ctx.store.sources(SOURCES_MAX).await? {
            if let Some(rules) = ctx.live.rules(&source) {
                loops.spawn(source_loop(ctx, &source, rules, Mode::Drain).once());
            }
        }
        let mut summary = PassSummary::default();
        while let Some(ended) = loops.join_next().await {
            summary.add(&ended.map_err(|error| DrainError::Bug(error.to_string()))?.summary);
        }
        Ok(summary)
    }

    /// Does once what the slow timer does: requeues rows whose lease ran out, deletes sent rows behind the retention, counts the
    /// backlog. What fails of it is logged and counted.
    ///
    /// # Errors
    /// As [`Relay::pass_once`].
    pub async fn maintain_once(&self) -> Result<MaintenanceSummary, DrainError> {
        prepare(&self.ctx, false).await?;
        Ok(Maintenance::new(Arc::clone(&self.ctx)).tick().await)
    }

    /// The token that stops this relay.
    #[must_use]
    pub fn stop_token(&self) -> CancellationToken {
        self.ctx.stop.clone()
    }

    /// The grip on this relay, before or while it runs.
    #[must_use]
    pub fn handle(&self) -> Handle {
        Handle::new(Arc::clone(&self.ctx), self.ended.subscribe())
    }

    /// Runs in a task of its own.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn spawn(self) -> Handle {
        let handle = self.handle();
        tokio::spawn(self.run());
        handle
    }

    /// Runs until it is stopped, then finishes and settles what is in flight within the grace.
    pub async fn run(self) -> End {
        let Self { ctx, ended } = self;
        let end = Self::run_to_end(ctx).await;
        ended.send_replace(Some(end.clone()));
        end
    }

    async fn run_to_end(ctx: Arc<Context>) -> End {
        StateChange::Started.emit();
        if let Err(problems) = prepare(&ctx, true).await {
            return End::Schema(problems.to_string());
        }
        if ctx.stop.is_cancelled() {
            return End::Stopped { clean: true };
        }
        let mut loops: JoinSet<&'static str> = JoinSet::new();
        let sources = Arc::clone(&ctx);
        loops.spawn(async move { named("sources", serve_sources(sources)).await });
        let poll = Arc::clone(&ctx);
        loops.spawn(async move { named("idle poll", poll_idle(poll)).await });
        let maintenance = Maintenance::new(Arc::clone(&ctx));
        loops.spawn(async move { named("maintenance", maintenance.run()).await });
        let broker = Arc::clone(&ctx);
        loops.spawn(async move { named("broker", watch_broker(broker)).await });
        let follow = Arc::clone(&ctx);
        loops.spawn(async move { named("pauses", until_stopped(&follow, pauses::follow(&follow))).await });
        if ctx.store.has_sessions() {
            let listen = Arc::clone(&ctx);
            loops.spawn(async move { named("listen", until_stopped(&listen, listen_for_changes(&listen))).await });
            let hold = Arc::clone(&ctx);
            loops.spawn(async move { named("preference", until_stopped(&hold, preference::hold(&hold))).await });
        }

        let bug = tokio::select! {
            ended = loops.join_next() => Some(match ended {
                Some(Ok(name)) => format!("the {name} loop ended by itself"),
                Some(Err(error)) => format!("a loop panicked: {error}"),
                None => "no loop is left".to_owned(),
            }),
            () = ctx.stop.cancelled() => None,
        };
        // A loop that ended because we stop is no bug.
        let bug = bug.filter(|_| !ctx.stop.is_cancelled());
        ctx.stop.cancel();
        ctx.board.stopping();
        let grace_ends = Instant::now() + ctx.config.relay.shutdown_grace;
        let mut panicked = None;
        let clean = tokio::time::timeout_at(grace_ends.into(), async {
            while let Some(ended) = loops.join_next().await {
                if let Err(error) = ended {
                    panicked = Some(format!("a loop panicked while stopping: {error}"));
                }
            }
        })
        .await
        .is_ok();
        if !clean {
            warn!("shutdown_grace is over: rows in flight stay in publishing until their lease runs out");
            loops.abort_all();
        }
        // Records without a verdict are purged; a second is enough once every pass has ended.
        ctx.publisher.close(grace_ends.max(Instant::now() + Duration::from_secs(1))).await;
        match bug.or(panicked) {
            Some(bug) => {
                error!(bug, "stopped by a bug; please report this");
                End::Bug(bug)
            }
            None => {
                info!(clean, "stopped");
                End::Stopped { clean }
            }
        }
    }

    /// Passes over every source until a full sweep claims nothing, then stops.
    ///
    /// # Errors
    /// Every problem of the table, named, when it is not what we understand; or why the database could not be reached.
    pub async fn drain(self) -> Result<DrainReport, DrainError> {
        let started = Instant::now();
        let ctx = self.ctx;
        prepare(&ctx, false).await?;
        let mut report = DrainReport::default();
        let mut maintenance = Maintenance::new(Arc::clone(&ctx));
        let MaintenanceSummary { requeued, dead, .. } = maintenance.tick().await;
        report.requeued = requeued;
        report.dead = dead;
        let mut served: BTreeMap<String, Done> = BTreeMap::new();
        let follow = Arc::clone(&ctx);
        tokio::spawn(async move { until_stopped(&follow, pauses::follow(&follow)).await });
        loop {
            let sources = match ctx.store.sources(SOURCES_MAX).await {
                Ok(sources) => sources,
                Err(error) if served.is_empty() => return Err(error.into()),
                // What was relayed is told all the same.
                Err(error) => {
                    ctx.store_failed(Stage::Claim, None, &error, None);
                    report.gave_up = true;
                    break;
                }
            };
            let mut loops: JoinSet<(String, Done)> = JoinSet::new();
            for source in sources {
                let Some(rules) = ctx.live.rules(&source) else { continue };
                if !served.contains_key(&source) {
                    let drain = source_loop(&ctx, &source, rules, Mode::Drain);
                    loops.spawn(async move { (source, drain.run().await) });
                }
            }
            if loops.is_empty() {
                break;
            }
            while let Some(ended) = loops.join_next().await {
                let (source, done) = ended.map_err(|error| DrainError::Bug(error.to_string()))?;
                served.insert(source, done);
            }
        }
        for (source, done) in &served {
            let summary = &done.summary;
            report.claimed += summary.claimed;
            report.sent += summary.sent;
            report.failed += summary.failed;
            report.skipped += summary.skipped;
            report.returned += summary.returned;
            report.dead += summary.dead;
            report.rejected += summary.rejected;
            report.lost += summary.lost;
            report.gave_up |= done.gave_up;
            match left_behind(&ctx, source).await {
                Ok((due, halted)) => {
                    report.due += due;
                    report.halted_on.extend(halted.map(|outbox_id| HaltedOn { source: source.clone(), outbox_id }));
                }
                Err(error) => {
                    ctx.store_failed(Stage::Sample, Some(source), &error, None);
                    report.gave_up = true;
                }
            }
        }
        report.paused = ctx.paused.now().list().len() as u64;
        ctx.stop.cancel();
        ctx.publisher.close(Instant::now() + ctx.config.relay.shutdown_grace).await;
        report.elapsed_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(report)
    }
}

/// What a drained source still has: how many rows that are due, and the row that halts it.
async fn left_behind(ctx: &Context, source: &str) -> Result<(u64, Option<Uuid>), StoreError> {
    let due = ctx.store.due(source).await?;
    let halting = if ctx.live.rules(source).is_some_and(|rules| rules.policy == Policy::StopTheLine) {
        ctx.store
            .heads(source, 1, &PausedRows::default())
            .await?
            .into_iter()
            .find(Head::halts)
            .map(|head| head.outbox_id)
    } else {
        None
    };
    Ok((due, halting))
}

/// Runs a loop and returns its name, so that the supervisor can say which one ended.
async fn named(name: &'static str, looping: impl Future<Output = ()>) -> &'static str {
    looping.await;
    name
}

/// Ends a loop that has nothing to finish as soon as the relay stops, whatever statement it waits for.
async fn until_stopped(ctx: &Context, looping: impl Future<Output = ()>) {
    tokio::select! {
        () = looping => {}
        () = ctx.stop.cancelled() => {}
    }
}

/// Reads the table's shape before anything is claimed. With `patient`, waits for a database that is away until stopped.
async fn prepare(ctx: &Context, patient: bool) -> Result<(), DrainError> {
    let watch = ctx.board.register(LoopName::Discover, Some("start"), ctx.turn_max());
    let mut pause = RETRY_PAUSE_MIN;
    loop {
        watch.tick();
        let looked = tokio::select! {
            looked = ctx.store.inspect() => looked,
            () = ctx.stop.cancelled() => return Ok(()),
        };
        match looked {
            Ok(shape) => {
                ctx.store.adopt(&shape);
                for warning in shape.warnings(ctx.config.maintenance.retention.is_some()) {
                    warn!("{warning}");
                }
                ctx.board.schema(Ok(shape.describe()));
                // Before the first claim: what was paused must not move because we start.
                match pauses::read(ctx).await {
                    Ok(()) => {
                        ctx.board.database(Ok(()));
                        return Ok(());
                    }
                    Err(error) if !patient => return Err(error.into()),
                    Err(error) => ctx.store_failed(Stage::Maintenance, None, &error, None),
                }
            }
            Err(problems @ InspectError::Problems(_)) => return Err(DrainError::Schema(problems.to_string())),
            Err(InspectError::Store(error)) if !patient => return Err(error.into()),
            Err(error) => ctx.inspect_failed(&error),
        }
        tokio::select! {
            () = tokio::time::sleep(pause.mul_f64(0.7 + 0.3 * rand::random::<f64>())) => {}
            () = ctx.stop.cancelled() => return Ok(()),
        }
        pause = (pause * 2).min(RETRY_PAUSE_MAX);
    }
}

fn source_loop(ctx: &Arc<Context>, source: &str, rules: SourceRules, mode: Mode) -> SourceLoop {
    let source: Arc<str> = Arc::from(source);
    let wakers = Arc::new(Wakers::default());
    ctx.wakers().insert(Arc::clone(&source), Arc::clone(&wakers));
    ctx.sources_changed.notify_one();
    ctx.board.source(&source, rules.policy);
    SourceLoop::new(Arc::clone(ctx), source, rules, mode, wakers)
}

/// Looks for sources and runs a loop for each that is ours.
async fn serve_sources(ctx: Arc<Context>) {
    let watch = ctx.board.register(LoopName::Discover, None, ctx.turn_max());
    let mut loops: JoinSet<Arc<str>> = JoinSet::new();
    let mut served: HashSet<Arc<str>> = HashSet::new();
    while !ctx.stop.is_cancelled() {
        let found = tokio::select! {
            found = ctx.store.sources(SOURCES_MAX) => found,
            () = ctx.stop.cancelled() => break,
        };
        match found {
            Ok(sources) => {
                ctx.store_answered();
                watch.succeeded();
                if sources.len() == SOURCES_MAX && served.len() < SOURCES_MAX {
                    error!(sources_max = SOURCES_MAX, "too many sources: those beyond the maximum are not served");
                }
                for source in sources {
                    let source: Arc<str> = Arc::from(source);
                    // One that is not ours is asked about again: that may change.
                    if !served.contains(&source) && serve(&ctx, &mut loops, &source) {
                        served.insert(source);
                    }
                }
            }
            Err(error) => {
                watch.tick();
                ctx.store_failed(Stage::Claim, None, &error, None);
            }
        }
        tokio::select! {
            () = tokio::time::sleep(DISCOVER_INTERVAL) => {}
            () = ctx.stop.cancelled() => {}
            Some(ended) = loops.join_next() => {
                let source = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
                // Its policy changed: everything of it is settled, so it may begin anew.
                if !ctx.stop.is_cancelled() {
                    served.remove(&source);
                    // A halt of the earlier policy is over; what halts the source under the next is seen soon.
                    ctx.board.halted(&source, None);
                    if serve(&ctx, &mut loops, &source) {
                        served.insert(source);
                    } else {
                        info!(source = &*source, "no longer served");
                        ctx.wakers().remove(&source);
                        ctx.sources_changed.notify_one();
                    }
                }
            }
        }
    }
    while let Some(ended) = loops.join_next().await {
        if let Err(error) = ended {
            std::panic::resume_unwind(error.into_panic());
        }
    }
}

/// Begins to serve a source, if it is ours.
fn serve(ctx: &Arc<Context>, loops: &mut JoinSet<Arc<str>>, source: &Arc<str>) -> bool {
    let Some(rules) = ctx.live.rules(source) else { return false };
    info!(source = &**source, policy = rules.policy.name(), "serving");
    let (looping, source) = (source_loop(ctx, source, rules, Mode::Forever), Arc::clone(source));
    loops.spawn(async move {
        looping.run().await;
        source
    });
    true
}

/// Polls all idle sources in one statement.
async fn poll_idle(ctx: Arc<Context>) {
    let watch = ctx.board.register(LoopName::Idle, None, ctx.turn_max());
    let mut pause = RETRY_PAUSE_MIN;
    loop {
        watch.tick();
        let asked = tokio::select! {
            asked = ctx.poller.due() => asked,
            () = tokio::time::sleep(DISCOVER_INTERVAL) => continue,
            () = ctx.stop.cancelled() => return,
        };
        let answer = tokio::select! {
            answer = ctx.store.poll(&asked) => answer,
            () = ctx.stop.cancelled() => return,
        };
        match answer {
            Ok(found) => {
                ctx.store_answered();
                watch.succeeded();
                pause = RETRY_PAUSE_MIN;
                ctx.poller.answered(&asked, &found);
            }
            Err(error) => {
                ctx.store_failed(Stage::Claim, None, &error, None);
                ctx.poller.failed(&asked, pause);
                pause = (pause * 2).min(RETRY_PAUSE_MAX);
            }
        }
    }
}

/// Reads what the publisher knows of its broker, and probes it while the gate is closed or something stands against publishing: the
/// client alone notices only seconds later that it is connected, and nothing is sent meanwhile that could show it.
async fn watch_broker(ctx: Arc<Context>) {
    let watch = ctx.board.register(LoopName::Broker, None, ctx.turn_max());
    // Asked before anything is said of it: that nobody has answered a client that was only just made is no news.
    let mut ask = true;
    while !ctx.stop.is_cancelled() {
        if ask {
            tokio::select! {
                () = probe_broker(&ctx) => {}
                () = ctx.stop.cancelled() => return,
            }
        }
        watch.succeeded();
        ctx.board.in_flight(ctx.budget.rows_in_flight() as u64, ctx.budget.bytes_in_flight() as u64);
        let health = ctx.publisher.health();
        let troubled = health.problem.is_some();
        ctx.board.broker_health(health);
        ask = tokio::select! {
            // While the gate is closed it says when to ask.
            () = tokio::time::sleep(BROKER_INTERVAL) => troubled && ctx.gate.is_open(),
            () = ctx.gate.probe_due() => true,
            () = ctx.stop.cancelled() => return,
        };
    }
}

/// Asks the broker whether it is there, and tells the gate.
async fn probe_broker(ctx: &Context) {
    let answer = ctx.publisher.probe().await;
    if let Err(error) = &answer {
        let (text, reason) = (error.to_string(), Reason::Broker);
        Failure { stage: Stage::Publish, reason, source_name: None, error: &text, elapsed: None }.emit(&ctx.metrics);
    }
    ctx.gate.probed(answer.is_ok(), rand::random());
}

/// Listens for commands that made old rows due again. It only shortens the wait: probes and sweeps find them without it.
async fn listen_for_changes(ctx: &Context) {
    let watch = ctx.board.register(LoopName::Listen, None, ctx.turn_max());
    let mut pause = RETRY_PAUSE_MIN;
    while !ctx.stop.is_cancelled() {
        watch.tick();
        let mut listener: Listening = match ctx.store.listen().await {
            Ok(listener) => listener,
            Err(error) => {
                ctx.store_failed(Stage::Claim, None, &error, None);
                tokio::select! {
                    () = tokio::time::sleep(pause) => {}
                    () = ctx.stop.cancelled() => return,
                }
                pause = (pause * 2).min(RETRY_PAUSE_MAX);
                continue;
            }
        };
        pause = RETRY_PAUSE_MIN;
        watch.succeeded();
        // Whatever was said before we listened.
        ctx.changed_all();
        ctx.paused.changed();
        loop {
            tokio::select! {
                said = listener.next() => match said {
                    Some(Heard::Changed(source)) if source.is_empty() => ctx.changed_all(),
                    Some(Heard::Changed(source)) => ctx.changed(&source),
                    Some(Heard::Resumed(source)) => ctx.resumed(&source),
                    Some(Heard::Pauses) => ctx.paused.changed(),
                    None => break,
                },
                () = tokio::time::sleep(DISCOVER_INTERVAL) => {
                    watch.tick();
                    if let Err(error) = listener.follow_name().await {
                        ctx.store_failed(Stage::Claim, None, &error, None);
                        break;
                    }
                }
                () = ctx.stop.cancelled() => return,
            }
        }
        // A server that lets us in and cuts us off at once must not be asked without a break.
        tokio::time::sleep(RETRY_PAUSE_MIN).await;
    }
}
