//! The loop of one source: look for lanes, claim what is ready, leave alone what is not.
//!
//! Nothing here ever decides what may be claimed (the statements do) or what becomes of a row (`domain::plan` does).

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tracing::info;

use super::Context;
use super::budget::Account;
use super::health::{Halt, HaltKind, LoopHandle};
use super::pass::{self, PassSummary, Report};

use crate::domain::breaker::{Allowance, Breaker, Change, STREAK_MAX};
use crate::domain::lanes::{Lanes, Request, Served};
use crate::domain::message::{PgTime, Position};
use crate::domain::policy::{Policy, SourceRules};
use crate::domain::sweep::{SweepKind, Sweeps};
use crate::store::{Head, StoreError};
use crate::telemetry::{LoopName, Stage};

/// Rows a page of a sweep looks at.
const PAGE_ROWS: usize = 2_000;
/// Lanes remembered per source.
const LANES_MAX: usize = 100_000;
/// Passes of one source at the same time: enough to claim while others publish.
const PASSES_MAX: usize = 4;
/// Pause after the database failed; doubles up to the maximum.
const DATABASE_PAUSE_MIN: Duration = Duration::from_millis(100);
const DATABASE_PAUSE_MAX: Duration = Duration::from_secs(5);

/// How often a relay that stands by looks whether rows wait too long for the one that serves them, and at how many rows.
const STAND_BY_INTERVAL: Duration = Duration::from_secs(2);
const STAND_BY_ROWS: usize = 100;
/// And at how many when none of those can go out: a failing key, or one in flight, may fill any small window.
const STAND_BY_ROWS_BLOCKED: usize = 10_000;
/// Rows that could go out and wait this long are served by whoever sees it: their relay hangs with its connection open.
const TAKE_OVER_AFTER: Duration = Duration::from_secs(5);
/// How long it then serves the source before it looks again who does.
const HELP_FOR: Duration = Duration::from_secs(30);

/// How long a loop runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Until it is stopped.
    Forever,
    /// Until a full sweep claims nothing.
    Drain,
}

/// What a loop did, once it ends.
#[derive(Debug, Default, Clone)]
pub(super) struct Done {
    pub summary: PassSummary,
    /// Drain only: gave up because the database or the cluster is away.
    pub gave_up: bool,
}

/// What wakes a source's loop from outside.
#[derive(Debug, Default)]
pub(super) struct Wakers {
    /// A poll found something.
    pub polled: Arc<Notify>,
    /// Somebody changed rows in a way no poll shows: look at everything.
    pub changed: Notify,
    /// An operator resumed the source.
    pub resumed: AtomicBool,
    /// The breaker is open: it is what halts the source, whatever its head looks like.
    pub broken: AtomicBool,
}

/// The loop of one source and what it remembers.
pub(super) struct SourceLoop {
    ctx: Arc<Context>,
    source: Arc<str>,
    rules: Arc<SourceRules>,
    mode: Mode,
    wakers: Arc<Wakers>,
    lanes: Lanes,
    sweeps: Sweeps,
    passes: JoinSet<(Request, Report)>,
    /// What its passes hold of the budget.
    account: Arc<Account>,
    /// Pause before an idle source is polled; grows while nothing is found.
    poll_interval: Duration,
    database_pause: Duration,
    /// A pass or a look failed: pause before the next.
    database_failed: bool,
    /// Serves a source that another relay holds until then, because that one leaves rows waiting.
    helping_until: Instant,
    breaker: Breaker,
    done: Done,
    /// Rows claimed since the last full sweep began.
    claimed_since_full: u64,
}

impl SourceLoop {
    pub(super) fn new(
        ctx: Arc<Context>,
        source: Arc<str>,
        rules: SourceRules,
        mode: Mode,
        wakers: Arc<Wakers>,
    ) -> Self {
        let lanes = Lanes::new(rules.policy, LANES_MAX);
        let poll_interval = ctx.config.relay.poll_interval_min;
        Self {
            ctx,
            source,
            rules: Arc::new(rules),
            mode,
            wakers,
            lanes,
            sweeps: Sweeps::new(Instant::now()),
            passes: JoinSet::new(),
            account: Arc::default(),
            poll_interval,
            database_pause: DATABASE_PAUSE_MIN,
            database_failed: false,
            helping_until: Instant::now(),
            breaker: Breaker::default(),
            done: Done::default(),
            claimed_since_full: 0,
        }
    }

    /// Runs until stopped (or drained), then waits for the passes in flight.
    pub(super) async fn run(mut self) -> Done {
        let watch = self.ctx.board.register(LoopName::Source, Some(&self.source), self.ctx.turn_max());
        while !self.ctx.stop.is_cancelled() && self.follow_rules() {
            watch.tick();
            let now = Instant::now();
            while let Some(finished) = self.passes.try_join_next() {
                self.finished(finished);
            }
            if std::mem::take(&mut self.database_failed) {
                if self.mode == Mode::Drain {
                    self.done.gave_up = true;
                    break;
                }
                self.pause_for_database().await;
                continue;
            }
            if !self.ctx.gate.is_open() {
                if self.mode == Mode::Drain && self.passes.is_empty() {
                    self.done.gave_up = true;
                    break;
                }
                self.wait_for_gate().await;
                continue;
            }
            if self.ctx.paused.now().holds_source(&self.source) {
                if self.mode == Mode::Drain && self.passes.is_empty() {
                    break;
                }
                self.rest_until(now + DATABASE_PAUSE_MAX).await;
                continue;
            }
            if self.mode == Mode::Forever {
                if !self.ctx.preference.is_ours(&self.source) && now >= self.helping_until {
                    self.stand_by().await;
                    continue;
                }
                self.lanes.tick(now);
            }
            if self.wakers.resumed.swap(false, Ordering::Relaxed) {
                let change = self.breaker.close();
                self.breaker_changed(change);
            }
            let (batch, passes_max) = match self.breaker.allowance(now) {
                Allowance::All => (self.ctx.config.relay.batch_rows_max, PASSES_MAX),
                Allowance::One => (1, 1),
                Allowance::Nothing(_) if self.mode == Mode::Drain && self.passes.is_empty() => {
                    self.done.gave_up = true;
                    break;
                }
                Allowance::Nothing(until) => {
                    self.rest_until(until).await;
                    continue;
                }
            };
            if self.passes.len() < passes_max {
                // Few lanes ready: look further before claiming a small batch.
                if self.lanes.rows_ready() < batch && self.sweeps.page_after().is_some() {
                    let look_back = self.mode == Mode::Forever && self.sweeps.look_back_due(now);
                    self.look(look_back.then_some(now)).await;
                    continue;
                }
                if let Some(request) = self.lanes.next_request(batch) {
                    self.dispatch(request, &watch).await;
                    continue;
                }
                if self.wants_sweep(now) {
                    self.look(Some(now)).await;
                    continue;
                }
                if self.mode == Mode::Drain && self.passes.is_empty() {
                    break;
                }
            }
            self.idle(passes_max).await;
        }
        self.ctx.poller.unwatch(&self.source);
        while let Some(finished) = self.passes.join_next().await {
            self.finished(finished);
        }
        self.done
    }

    /// One pass over what is ready now.
    pub(super) async fn once(mut self) -> Done {
        let watch = self.ctx.board.register(LoopName::Source, Some(&self.source), self.ctx.turn_max());
        if !self.ctx.gate.is_open() || self.ctx.paused.now().holds_source(&self.source) {
            return self.done;
        }
        self.look(Some(Instant::now())).await;
        while self.lanes.rows_ready() == 0 && self.sweeps.page_after().is_some() && !self.database_failed {
            watch.tick();
            self.look(None).await;
        }
        if let Some(request) = self.lanes.next_request(self.ctx.config.relay.batch_rows_max) {
            self.dispatch(request, &watch).await;
        }
        while let Some(finished) = self.passes.join_next().await {
            self.finished(finished);
        }
        self.done.gave_up |= self.database_failed;
        self.done
    }

    /// Takes over rules that changed. `false` when the policy is another one, or the source no longer ours: this loop then claims
    /// nothing more, and whoever serves the source next begins once its passes are settled.
    fn follow_rules(&mut self) -> bool {
        match self.ctx.live.rules(&self.source) {
            Some(rules) if rules.policy == self.rules.policy => {
                self.rules = Arc::new(rules);
                true
            }
            Some(_) | None => false,
        }
    }

    /// Begins a sweep now, or reads the next page; but no longer than until a stop: a database that does not answer must not use up
    /// the grace. Nothing is claimed by looking, so nothing is left behind.
    async fn look(&mut self, begin: Option<Instant>) {
        let stop = self.ctx.stop.clone();
        let look = async {
            match begin {
                Some(now) => self.begin_sweep(now).await,
                None => self.page().await,
            }
        };
        tokio::select! {
            () = look => {}
            () = stop.cancelled() => {}
        }
    }

    /// Whether to look at the table now, nothing being ready.
    fn wants_sweep(&mut self, now: Instant) -> bool {
        match self.mode {
            // Drained when a full sweep led to no claim.
            Mode::Drain => self.passes.is_empty() && (self.sweeps.next_full_at() <= now || self.claimed_since_full > 0),
            Mode::Forever => self.sweeps.next_full_at() <= now || self.woken(),
        }
    }

    /// Takes a poll's wake-up, if there is one.
    fn woken(&self) -> bool {
        use futures_util::FutureExt;
        self.wakers.polled.notified().now_or_never().is_some()
    }

    async fn begin_sweep(&mut self, now: Instant) {
        if self.mode == Mode::Drain {
            self.sweeps.demand_full(now);
        }
        let kind = if whole_source(self.rules.policy) { SweepKind::Full } else { self.sweeps.next_kind(now) };
        let late_floor = match kind {
            SweepKind::Full | SweepKind::Late => self.ctx.store.late_floor().await,
            SweepKind::Tail => Ok(PgTime::NEG_INFINITY),
        };
        match late_floor {
            Ok(late_floor) => {
                if kind == SweepKind::Full {
                    self.claimed_since_full = 0;
                    self.sweeps.beside(self.ctx.wakers().len());
                }
                self.sweeps.begin(kind, late_floor, Duration::ZERO);
                self.page().await;
            }
            Err(error) => self.store_failed(&error),
        }
    }

    /// Reads the next page of the sweep under way.
    async fn page(&mut self) {
        let Some(after) = self.sweeps.page_after() else { return };
        // A whole source is one lane: its head says everything.
        let rows = if whole_source(self.rules.policy) { 1 } else { PAGE_ROWS };
        let paused = self.ctx.paused.now().rows_of(&self.source);
        // Timed without the wait for a connection: a cold pool or a busy one must not put off the next sweep for minutes.
        let (glimpses, took) = match self.ctx.store.discover_timed(&self.source, after, rows, &paused).await {
            Ok(found) => found,
            Err(error) => return self.store_failed(&error),
        };
        self.ctx.store_answered();
        self.database_pause = DATABASE_PAUSE_MIN;
        let now = Instant::now();
        let ready_before = self.lanes.rows_ready();
        self.lanes.discovered(&glimpses, now);
        let full = glimpses.len() == rows && !whole_source(self.rules.policy);
        self.sweeps.page(glimpses.last().map(|glimpse| glimpse.position), full, took, now);
        if self.lanes.take_overflowed() {
            self.sweeps.overflowed(now);
        }
        if self.lanes.rows_ready() > ready_before {
            self.poll_interval = self.ctx.config.relay.poll_interval_min;
        }
    }

    /// Starts a pass over the lanes of a request, once the budgets allow.
    async fn dispatch(&mut self, request: Request, watch: &LoopHandle) {
        let (ctx, source, rules) = (Arc::clone(&self.ctx), Arc::clone(&self.source), Arc::clone(&self.rules));
        let rows: usize = request.lanes.iter().map(|wanted| wanted.rows_max).sum();
        let account = Arc::clone(&self.account);
        // One future for the whole wait, so that it keeps its place in the queue.
        let mut share = pin!(ctx.budget.take(&account, rows, ctx.config.relay.batch_bytes_max));
        let share = loop {
            tokio::select! {
                share = &mut share => break share,
                // Others may hold the budget for as long as their publishing takes, many rounds of it: waiting is no hang.
                () = tokio::time::sleep(DATABASE_PAUSE_MAX) => watch.tick(),
                () = ctx.stop.cancelled() => return,
            }
        };
        if !ctx.gate.is_open() || ctx.paused.now().holds_source(&source) || !self.follow_rules() {
            // Since we began to wait. Rows that were claimed behind a closed gate would only be returned, after a whole deadline.
            let not_asked = request.lanes.iter().map(|_| Served::NotAsked).collect();
            self.lanes.served(&request, not_asked, Instant::now());
            return;
        }
        let ctx = Arc::clone(&self.ctx);
        self.passes.spawn(async move {
            let report = pass::run(&ctx, &source, &rules, &request, share).await;
            (request, report)
        });
    }

    fn finished(&mut self, finished: Result<(Request, Report), tokio::task::JoinError>) {
        let (request, report) = match finished {
            Ok(finished) => finished,
            // A pass catches its publisher's panics, so this is a bug of ours: let the supervisor end the process.
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let now = Instant::now();
        if report.summary.claimed > 0 {
            self.poll_interval = self.ctx.config.relay.poll_interval_min;
            self.claimed_since_full += report.summary.claimed;
            if self.rules.policy == Policy::StopTheLine {
                self.ctx.halted(&self.source, report.halted_on);
            }
        }
        self.done.summary.add(&report.summary);
        let change = self.breaker.settled(report.summary.sent, report.summary.dead + report.summary.rejected, now);
        self.breaker_changed(change);
        self.lanes.served(&request, report.served, now);
        if report.database_failed {
            self.sweeps.abandon(now);
            self.database_failed = true;
        }
    }

    /// Waits for whatever comes first: a pass, a wake-up, a probe, the next full sweep, stop.
    async fn idle(&mut self, passes_max: usize) {
        let now = Instant::now();
        let may_sweep = self.mode == Mode::Forever && self.passes.len() < passes_max;
        // A whole source whose one lane is known needs no poll: its lane says when to look.
        let known = whole_source(self.rules.policy) && !self.lanes.is_empty();
        if may_sweep && !known {
            let from = if whole_source(self.rules.policy) { Position::START } else { self.sweeps.poll_from(now) };
            self.ctx.poller.watch(&self.source, from, self.poll_interval, &self.wakers.polled);
            self.poll_interval = (self.poll_interval * 2).min(self.ctx.config.relay.poll_interval_max);
        }
        let mut wake_at = if may_sweep { self.sweeps.next_full_at() } else { now + DATABASE_PAUSE_MAX };
        if may_sweep && self.sweeps.next_late_at() > now {
            // Until then the poll looks only behind the last row seen; then it must cover late commits again.
            wake_at = wake_at.min(self.sweeps.next_late_at());
        }
        if self.mode == Mode::Forever
            && let Some(probe_at) = self.lanes.next_probe_at()
        {
            wake_at = wake_at.min(probe_at);
        }
        let (ctx, wakers) = (Arc::clone(&self.ctx), Arc::clone(&self.wakers));
        tokio::select! {
            Some(finished) = self.passes.join_next() => self.finished(finished),
            // The permit is kept: `wants_sweep` takes it.
            () = wakers.polled.notified(), if may_sweep => wakers.polled.notify_one(),
            () = wakers.changed.notified() => self.look_at_everything(),
            () = tokio::time::sleep_until(wake_at.into()) => {}
            () = ctx.stop.cancelled() => {}
        }
    }

    /// Shows that the breaker opened or closed.
    fn breaker_changed(&self, change: Change) {
        let halt = match change {
            Change::None => return,
            Change::Closed => None,
            Change::Opened => {
                let reason = format!(
                    "breaker.open: {STREAK_MAX} rows in a row ended dead or rejected without one that was sent; look at them, then \
                     `keiro-relay resume {}`",
                    self.source
                );
                Some(Halt { kind: HaltKind::Breaker, outbox_id: None, reason })
            }
        };
        self.wakers.broken.store(halt.is_some(), Ordering::Relaxed);
        self.ctx.board.halted(&self.source, halt);
    }

    /// The breaker is open, or the source is paused: nothing is claimed until then, or until an operator says so.
    async fn rest_until(&mut self, until: Instant) {
        self.ctx.poller.unwatch(&self.source);
        let (ctx, wakers) = (Arc::clone(&self.ctx), Arc::clone(&self.wakers));
        let until = until.min(Instant::now() + DATABASE_PAUSE_MAX);
        tokio::select! {
            Some(finished) = self.passes.join_next() => self.finished(finished),
            () = wakers.changed.notified() => self.look_at_everything(),
            () = tokio::time::sleep_until(until.into()) => {}
            () = ctx.stop.cancelled() => {}
        }
    }

    /// Another relay serves this source: wait until it does not, or until rows wait too long for it.
    async fn stand_by(&mut self) {
        let ctx = Arc::clone(&self.ctx);
        ctx.board.elsewhere(&self.source, true);
        ctx.poller.unwatch(&self.source);
        // Registered before the look, so that a change in between is not missed.
        let changed = ctx.preference.changed();
        if ctx.preference.is_ours(&self.source) {
            ctx.board.elsewhere(&self.source, false);
            self.look_at_everything();
            return;
        }
        tokio::select! {
            Some(finished) = self.passes.join_next() => return self.finished(finished),
            () = changed => {}
            () = ctx.stop.cancelled() => return,
            () = tokio::time::sleep(STAND_BY_INTERVAL.mul_f64(0.8 + 0.4 * rand::random::<f64>())) => {
                match self.longest_wait().await {
                    Ok(waiting) => {
                        if waiting.is_none_or(|seconds| seconds < TAKE_OVER_AFTER.as_secs_f64()) {
                            return;
                        }
                        info!(source = &*self.source, "rows wait although another relay holds this source: helping");
                        self.helping_until = Instant::now() + HELP_FOR;
                    }
                    Err(error) => return self.store_failed(&error),
                }
            }
        }
        if ctx.preference.is_ours(&self.source) || Instant::now() < self.helping_until {
            ctx.board.elsewhere(&self.source, false);
            self.look_at_everything();
        }
    }

    /// How long the oldest of the first rows has waited that could go out.
    async fn longest_wait(&self) -> Result<Option<f64>, StoreError> {
        let ready = |heads: &[Head]| super::maintenance::oldest_ready(self.rules.policy, heads);
        let paused = self.ctx.paused.now().rows_of(&self.source);
        let heads = self.ctx.store.heads(&self.source, STAND_BY_ROWS, &paused).await?;
        let waiting = ready(&heads);
        if waiting.is_some() || heads.len() < STAND_BY_ROWS || whole_source(self.rules.policy) {
            return Ok(waiting);
        }
        Ok(ready(&self.ctx.store.heads(&self.source, STAND_BY_ROWS_BLOCKED, &paused).await?))
    }

    /// Forgets what memory says about when to look.
    fn look_at_everything(&mut self) {
        self.lanes.wake_all();
        self.sweeps.demand_full(Instant::now());
        self.poll_interval = self.ctx.config.relay.poll_interval_min;
    }

    async fn wait_for_gate(&mut self) {
        let ctx = Arc::clone(&self.ctx);
        tokio::select! {
            Some(finished) = self.passes.join_next() => self.finished(finished),
            () = ctx.gate.opened() => {
                // Rows that were returned while the cluster was away are due by now.
                self.lanes.wake_all();
            }
            () = ctx.stop.cancelled() => {}
            () = tokio::time::sleep(DATABASE_PAUSE_MAX) => {}
        }
    }

    fn store_failed(&mut self, error: &StoreError) {
        self.ctx.store_failed(Stage::Claim, Some(&self.source), error, None);
        self.sweeps.abandon(Instant::now());
        self.database_failed = true;
    }

    async fn pause_for_database(&mut self) {
        let pause = self.database_pause.mul_f64(1.0 - 0.3 * rand::random::<f64>());
        self.database_pause = (self.database_pause * 2).min(DATABASE_PAUSE_MAX);
        let ctx = Arc::clone(&self.ctx);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = ctx.stop.cancelled() => {}
        }
    }
}

/// Whether the source is one lane.
fn whole_source(policy: Policy) -> bool {
    match policy {
        Policy::PerSourceStream | Policy::StopTheLine => true,
        Policy::PerKeyHeadOfLine | Policy::BestEffort => false,
    }
}
