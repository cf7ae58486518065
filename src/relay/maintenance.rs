//! The slow timer: requeue of expired leases, retention, the backlog sample, the table's shape. On a connection of its own.
//!
//! Any live relay does it; two at once are harmless. Nothing here ever runs unbounded: each step has a limit of rows and of time,
//! and goes on next time where it stopped.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::timeout;

use super::Context;
use super::health::{Halt, HaltKind};
use crate::domain::message::{PgTime, Position};
use crate::domain::pause::Pauses;
use crate::domain::policy::{Policy, SourceRules};
use crate::store::{Backlog, Head, Store, StoreError};
use crate::telemetry::{LoopName, Requeued, RetentionDeleted, SourceSample, Stage};

/// Rows at the head of each source that every tick looks at for expired leases: claims begin there.
const STALE_HEAD_ROWS: usize = 5_000;
/// Rows behind them that every tick looks at, going on where the last one stopped.
const STALE_WINDOW_ROWS: usize = 20_000;
/// Rows one retention statement deletes.
const RETENTION_ROWS: usize = 5_000;
/// Pause between them, so that traffic is not starved.
const RETENTION_PAUSE: Duration = Duration::from_millis(50);
/// Now and then retention begins at the start again, for rows whose published_at was set back.
const RETENTION_RESTART: Duration = Duration::from_secs(3_600);
/// What a backlog count stops at when it took too long.
const BACKLOG_ROWS_SLOW: usize = 10_000;
/// Live rows at the head of a source that are looked at for the oldest that is ready.
const HEAD_ROWS: usize = 1_000;
/// Longest time one step of a tick may take.
const STEP_MAX: Duration = Duration::from_secs(20);

/// How many rows a sample counts at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleRows {
    /// Live rows of each source.
    pub backlog: usize,
    /// Dead and rejected rows of all sources together.
    pub finished: usize,
}

impl SampleRows {
    /// For the slow timer, which has the time.
    pub(crate) const ALL: Self = Self { backlog: 1_000_000, finished: 100_000 };
    /// For a person who waits.
    pub(crate) const QUICK: Self = Self { backlog: 20_000, finished: 20_000 };
}

/// What one tick did.
#[derive(Debug, Default, Clone, PartialEq)]
#[non_exhaustive]
pub struct MaintenanceSummary {
    /// Rows freed from expired leases.
    pub requeued: u64,
    /// Rows whose attempts were spent when their lease expired.
    pub dead: u64,
    /// Sent rows deleted.
    pub deleted: u64,
    /// Rows waiting (pending and failed) over all sources.
    pub backlog: u64,
}

/// The slow timer and where its steps stopped.
pub(super) struct Maintenance {
    ctx: Arc<Context>,
    store: Arc<Store>,
    stale_after: HashMap<String, Position>,
    /// The source that the last tick had no time left for.
    requeue_next: Option<String>,
    retention_from: PgTime,
    retention_restart_at: Instant,
}

impl Maintenance {
    /// Makes the timer.
    pub(super) fn new(ctx: Arc<Context>) -> Self {
        Self {
            store: Arc::clone(&ctx.maintenance_store),
            ctx,
            stale_after: HashMap::new(),
            requeue_next: None,
            retention_from: PgTime::NEG_INFINITY,
            retention_restart_at: Instant::now() + RETENTION_RESTART,
        }
    }

    /// Ticks until stopped.
    pub(super) async fn run(mut self) {
        let ctx = Arc::clone(&self.ctx);
        let longest_turn = STEP_MAX * 4 + ctx.config.maintenance.interval + ctx.turn_max();
        let watch = ctx.board.register(LoopName::Sample, None, longest_turn);
        while !ctx.stop.is_cancelled() {
            watch.tick();
            tokio::select! {
                _ = self.tick() => {}
                () = ctx.stop.cancelled() => return,
            }
            // Jittered, so that several relays do not tick together.
            let pause = ctx.config.maintenance.interval.mul_f64(0.9 + 0.2 * rand::random::<f64>());
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = ctx.stop.cancelled() => return,
            }
        }
    }

    /// Does everything once. A step that fails is reported and does not keep the others from their turn.
    pub(super) async fn tick(&mut self) -> MaintenanceSummary {
        let mut summary = MaintenanceSummary::default();
        self.inspect().await;
        let sources = match self.store.sources(super::SOURCES_MAX).await {
            Ok(sources) => sources,
            Err(error) => {
                self.ctx.store_failed(Stage::Maintenance, None, &error, None);
                return summary;
            }
        };
        self.requeue_all(&sources, &mut summary).await;
        self.delete_sent(&mut summary).await;
        self.sample(&sources, &mut summary).await;
        summary
    }

    /// Reads the table's shape again: the newer columns may have appeared, a permission may have gone.
    async fn inspect(&self) {
        match self.store.inspect().await {
            Ok(shape) => {
                // Both: the slow timer's statements are written out from the shape as the fast path's are.
                self.store.adopt(&shape);
                self.ctx.store.adopt(&shape);
                self.ctx.board.schema(Ok(shape.describe()));
            }
            Err(error) => self.ctx.inspect_failed(&error),
        }
    }

    async fn requeue_all(&mut self, sources: &[String], summary: &mut MaintenanceSummary) {
        let ctx = Arc::clone(&self.ctx);
        let until = Instant::now() + STEP_MAX;
        let mut whole = true;
        // Where the last tick stopped, or the sources at the end would never have their turn.
        for source in in_turn(sources, self.requeue_next.take().as_deref()) {
            let Some(rules) = ctx.live.rules(source) else { continue };
            if Instant::now() >= until {
                self.requeue_next = Some(source.clone());
                break;
            }
            match self.requeue(source, &rules).await {
                Ok((failed, dead)) => {
                    Requeued { source_name: source, failed, dead }.emit(&ctx.metrics);
                    summary.requeued += failed;
                    summary.dead += dead;
                    if failed + dead > 0 {
                        ctx.changed(source);
                    }
                }
                Err(error) => {
                    ctx.store_failed(Stage::Maintenance, Some(source), &error, None);
                    whole = false;
                }
            }
        }
        self.stale_after.retain(|source, _| sources.iter().any(|name| name == source));
        if whole && self.requeue_next.is_none() {
            ctx.metrics.succeeded(LoopName::Requeue);
        }
    }

    /// Looks at the head of a source and at the next window behind it.
    async fn requeue(&mut self, source: &str, rules: &SourceRules) -> Result<(u64, u64), StoreError> {
        let lease = self.ctx.config.relay.publishing_timeout;
        let head = self.store.stale(source, Position::START, STALE_HEAD_ROWS, lease).await?;
        let mut stale = head.stale;
        match head.resume_after {
            None => {
                self.stale_after.remove(source);
            }
            Some(end_of_head) => {
                let after = self.stale_after.get(source).copied().unwrap_or(end_of_head).max(end_of_head);
                let window = self.store.stale(source, after, STALE_WINDOW_ROWS, lease).await?;
                stale.extend(window.stale);
                match window.resume_after {
                    Some(next) => self.stale_after.insert(source.to_owned(), next),
                    None => self.stale_after.remove(source),
                };
            }
        }
        if stale.is_empty() {
            return Ok((0, 0));
        }
        stale.sort_unstable();
        let requeued = self.store.requeue(&stale, lease, rules.max_attempts).await?;
        Ok((requeued.failed as u64, requeued.dead as u64))
    }

    async fn delete_sent(&mut self, summary: &mut MaintenanceSummary) {
        let ctx = Arc::clone(&self.ctx);
        let Some(retention) = ctx.config.maintenance.retention else { return };
        if !self.store.can_delete() {
            return;
        }
        let now = Instant::now();
        if now >= self.retention_restart_at {
            self.retention_from = PgTime::NEG_INFINITY;
            self.retention_restart_at = now + RETENTION_RESTART;
        }
        let until = now + STEP_MAX;
        while Instant::now() < until {
            match self.store.delete_sent(retention, RETENTION_ROWS, self.retention_from).await {
                Ok((deleted, reached)) => {
                    RetentionDeleted { rows: deleted }.emit(&ctx.metrics);
                    summary.deleted += deleted;
                    self.retention_from = reached.unwrap_or(self.retention_from);
                    if deleted < RETENTION_ROWS as u64 {
                        ctx.metrics.succeeded(LoopName::Retention);
                        return;
                    }
                }
                Err(error) => return ctx.store_failed(Stage::Maintenance, None, &error, None),
            }
            tokio::time::sleep(RETENTION_PAUSE).await;
        }
    }

    async fn sample(&self, sources: &[String], summary: &mut MaintenanceSummary) {
        let ctx = &self.ctx;
        let paused = ctx.paused.now();
        let sampled = timeout(
            STEP_MAX,
            sample(&self.store, sources, &paused, SampleRows::ALL, |source| {
                ctx.live.rules(source).map(|rules| rules.policy)
            }),
        );
        let samples = match sampled.await {
            Ok(Ok(samples)) => samples,
            Ok(Err(error)) => return ctx.store_failed(Stage::Sample, None, &error, None),
            Err(_) => {
                return ctx.store_failed(
                    Stage::Sample,
                    None,
                    &StoreError::Timeout { waiting_for: "the backlog sample", bound: STEP_MAX },
                    None,
                );
            }
        };
        summary.backlog = samples.iter().map(|(sample, _)| sample.backlog()).sum();
        for (sample, halted) in &samples {
            if sample.policy == Some(Policy::StopTheLine) {
                ctx.halted(&sample.source, halted.clone());
            }
        }
        let samples: Vec<SourceSample> = samples.into_iter().map(|(sample, _)| sample).collect();
        ctx.metrics.sampled(&samples);
        ctx.board.sampled(samples);
        match self.store.table_health().await {
            Ok(health) => ctx.metrics.table_health(health.dead_tuples, health.oldest_transaction_seconds),
            Err(error) => return ctx.store_failed(Stage::Sample, None, &error, None),
        }
        ctx.metrics.succeeded(LoopName::Sample);
    }
}

/// The sources beginning with this one, or with all when it is gone.
fn in_turn<'a>(sources: &'a [String], first: Option<&str>) -> impl Iterator<Item = &'a String> {
    let at = first.and_then(|first| sources.iter().position(|source| source == first)).unwrap_or(0);
    sources[at..].iter().chain(&sources[..at])
}

/// Samples every source: its counts and ages, and the row that halts it, with the reason.
pub(crate) async fn sample(
    store: &Store,
    sources: &[String],
    paused: &Pauses,
    rows: SampleRows,
    policy_of: impl Fn(&str) -> Option<Policy>,
) -> Result<Vec<(SourceSample, Option<Halt>)>, StoreError> {
    let finished = store.finished(rows.finished).await?;
    let finished_capped = finished.iter().map(|finished| finished.rows).sum::<u64>() >= rows.finished as u64;
    let mut samples = Vec::with_capacity(sources.len());
    let mut rows_max = rows.backlog;
    for source in sources {
        let policy = policy_of(source);
        let backlog: Backlog = match store.backlog(source, rows_max).await {
            Err(StoreError::Timeout { .. }) if rows_max > BACKLOG_ROWS_SLOW => {
                // The next big one would take as long, and all of them together have one step's time.
                rows_max = BACKLOG_ROWS_SLOW;
                Backlog { capped: true, ..store.backlog(source, rows_max).await? }
            }
            answer => answer?,
        };
        let count = |status: &str| -> u64 {
            finished.iter().filter(|f| f.source_name == *source && f.status == status).map(|f| f.rows).sum()
        };
        let heads = if backlog.is_empty() {
            Vec::new()
        } else {
            store.heads(source, HEAD_ROWS, &paused.rows_of(source)).await?
        };
        let halting = match policy {
            Some(Policy::StopTheLine) => heads.first().filter(|head| head.halts()),
            // Held when the policy was another one: its lane waits for a person, and `status` tells who looks.
            Some(Policy::PerKeyHeadOfLine | Policy::PerSourceStream | Policy::BestEffort) => {
                heads.iter().find(|head| head.held && head.status == "failed")
            }
            None => None,
        };
        let halted = halting.map(|head| Halt {
            kind: HaltKind::of_waiting(head.held, head.attempt_count),
            outbox_id: Some(head.outbox_id),
            reason: head.last_error.clone(),
        });
        samples.push((
            SourceSample {
                source: source.clone(),
                policy,
                pending: backlog.pending,
                failed: backlog.failed,
                publishing: backlog.publishing,
                sent: 0,
                dead: backlog.dead + count("dead"),
                rejected: backlog.rejected + count("rejected"),
                unknown: backlog.unknown,
                capped: backlog.capped || finished_capped,
                oldest_age_seconds: backlog.oldest_age_seconds,
                oldest_ready_age_seconds: policy
                    .filter(|_| !paused.holds_source(source))
                    .and_then(|policy| oldest_ready(policy, &heads)),
            },
            halted,
        ));
    }
    Ok(samples)
}

/// How long the oldest of these rows has waited that the policy would let us claim now.
pub(super) fn oldest_ready(policy: Policy, heads: &[Head]) -> Option<f64> {
    let mut keys: HashSet<&str> = HashSet::new();
    let ready = heads.iter().enumerate().filter(|(index, head)| {
        let first = match policy {
            Policy::BestEffort => true,
            Policy::PerSourceStream | Policy::StopTheLine => *index == 0,
            Policy::PerKeyHeadOfLine => head.message_key.as_deref().is_none_or(|key| keys.insert(key)),
        };
        first && head.due && !head.paused && matches!(head.status.as_str(), "pending" | "failed")
    });
    ready.map(|(_, head)| head.waiting_seconds).reduce(f64::max)
}
