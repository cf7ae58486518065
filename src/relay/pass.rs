//! One pass: claim → plan → publish → partition → settle. The only place that knows the whole chain.
//!
//! Nothing here ever holds a database transaction, or a connection, while it waits for the broker.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::debug;
use uuid::Uuid;

use super::Context;
use super::budget::Share;
use super::health::{Halt, HaltKind};
use crate::config::LEASE_MARGIN;
use crate::domain::lanes::{Glimpse, Lane, Lanes, PROBE_INTERVAL_MAX, Request, RowState, Served};
use crate::domain::message::Message;
use crate::domain::outcome::{Blame, Outcome, Setback};
use crate::domain::pause::PausedRows;
use crate::domain::plan::{self, Verdict};
use crate::domain::retry;

use crate::domain::policy::{Policy, SourceRules};
use crate::publish::Batch;
use crate::store::{Claim, StoreError};
use crate::telemetry::{Claimed, Failure, Published, Reason, RowEnd, RowEnded, Settled, Stage};

/// A publisher that has not answered this long after its deadline is given up.
const PUBLISHER_GRACE: Duration = Duration::from_secs(5);
/// How long rows rest whose publisher was given up.
const GIVEN_UP_PAUSE: Duration = Duration::from_secs(1);

/// What a pass did, for the source's loop.
#[derive(Debug)]
pub(super) struct Report {
    /// One entry per lane of the request.
    pub served: Vec<Served>,
    /// What became of the rows.
    pub summary: PassSummary,
    /// Whether the database failed on us.
    pub database_failed: bool,
    /// The row that halts its `stop_the_line` source, and how.
    pub halted_on: Option<Halt>,
}

/// Counts of one pass or many.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PassSummary {
    /// Rows claimed.
    pub claimed: u64,
    /// Acknowledged and marked.
    pub sent: u64,
    /// Spent an attempt.
    pub failed: u64,
    /// Behind the pivot of their lane.
    pub skipped: u64,
    /// Attempt returned: a topic's or the cluster's fault, or we stopped.
    pub returned: u64,
    /// Spent their last attempt.
    pub dead: u64,
    /// Never acceptable.
    pub rejected: u64,
    /// No longer ours when settled.
    pub lost: u64,
}

impl PassSummary {
    /// Failed and skipped rows together: what upstream calls retried.
    #[must_use]
    pub fn retried(&self) -> u64 {
        self.failed + self.skipped
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.claimed += other.claimed;
        self.sent += other.sent;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.returned += other.returned;
        self.dead += other.dead;
        self.rejected += other.rejected;
        self.lost += other.lost;
    }
}

/// Runs one pass over the lanes of a request.
pub(super) async fn run(
    ctx: &Context,
    source: &Arc<str>,
    rules: &SourceRules,
    request: &Request,
    mut share: Share,
) -> Report {
    let started = Instant::now();
    // One and the same for the claim and the look at what it left.
    let paused = ctx.paused.now().rows_of(source);
    let claim = claim(ctx, source, request, &paused).await;
    let claim = match claim {
        Ok(claim) => claim,
        Err(error) => {
            ctx.write_failed(Stage::Claim, source, &error, started.elapsed());
            let served = request.lanes.iter().map(|_| Served::NotAsked).collect();
            return Report { served, summary: PassSummary::default(), database_failed: true, halted_on: None };
        }
    };
    ctx.store_changed();
    Claimed { source_name: source, rows: claim.messages.len(), elapsed: started.elapsed() }.emit(&ctx.metrics);
    // What the statement counted, and what of it is in memory.
    let bytes: usize = claim.messages.iter().map(Message::payload_octets).sum();
    share.shrink(claim.messages.len(), claim.messages.iter().map(|message| message.payload.len()).sum());

    let mut report = Report {
        served: Vec::new(),
        summary: PassSummary { claimed: claim.messages.len() as u64, ..PassSummary::default() },
        database_failed: false,
        halted_on: None,
    };
    let mut by_lane: HashMap<Lane, Served> = HashMap::new();
    if !claim.messages.is_empty() {
        publish_and_settle(ctx, source, rules, claim, &mut report, &mut by_lane).await;
    }
    drop(share);

    // Lanes that yielded nothing: one look at their heads says whether to forget them or when to ask again. When the bytes of the
    // others filled the batch it may not have reached them: they are asked again at once.
    let reached = bytes < ctx.config.relay.batch_bytes_max;
    let lanes = request.lanes.iter().map(|wanted| &wanted.lane);
    let silent: Vec<&Lane> = lanes.filter(|lane| reached && !by_lane.contains_key(*lane)).collect();
    // What was learned at a stop nobody would use.
    if !silent.is_empty() && !ctx.stop.is_cancelled() {
        match peek(ctx, source, &silent, &paused).await {
            Ok(heads) => {
                let mut heads: HashMap<Lane, Glimpse> = heads
                    .into_iter()
                    .map(|head| {
                        (Lanes::lane_of(rules.policy, head.message_key.as_ref(), head.position.outbox_id), head)
                    })
                    .collect();
                for lane in silent {
                    by_lane.insert(lane.clone(), Served::Nothing(heads.remove(lane)));
                }
            }
            Err(error) => {
                ctx.store_failed(Stage::Claim, Some(source), &error, None);
                report.database_failed = true;
            }
        }
    }
    report.served =
        request.lanes.iter().map(|wanted| by_lane.remove(&wanted.lane).unwrap_or(Served::NotAsked)).collect();
    report
}

async fn claim(ctx: &Context, source: &str, request: &Request, paused: &PausedRows) -> Result<Claim, StoreError> {
    let bytes_max = ctx.config.relay.batch_bytes_max;
    match &request.lanes[0].lane {
        Lane::Source => ctx.store.claim_stream(source, request.lanes[0].rows_max, bytes_max, paused).await,
        Lane::Row(_) => {
            ctx.store
                .claim_rows(&rows_of(request.lanes.iter().map(|wanted| &wanted.lane)), bytes_max, request.retry, paused)
                .await
        }
        Lane::Key(_) => {
            let keys = keys_of(request.lanes.iter().map(|wanted| &wanted.lane));
            let rows_max: Vec<i32> =
                request.lanes.iter().map(|wanted| i32::try_from(wanted.rows_max).unwrap_or(i32::MAX)).collect();
            ctx.store.claim_keys(source, &keys, &rows_max, bytes_max, request.retry, paused).await
        }
    }
}

async fn peek(ctx: &Context, source: &str, lanes: &[&Lane], paused: &PausedRows) -> Result<Vec<Glimpse>, StoreError> {
    match lanes[0] {
        Lane::Source => ctx.store.discover(source, crate::domain::message::Position::START, 1, paused).await,
        Lane::Row(_) => ctx.store.peek_rows(&rows_of(lanes.iter().copied()), paused).await,
        Lane::Key(_) => ctx.store.peek_keys(source, &keys_of(lanes.iter().copied()), paused).await,
    }
}

fn keys_of<'a>(lanes: impl Iterator<Item = &'a Lane>) -> Vec<&'a str> {
    lanes
        .filter_map(|lane| match lane {
            Lane::Key(key) => Some(&**key),
            Lane::Row(_) | Lane::Source => None,
        })
        .collect()
}

fn rows_of<'a>(lanes: impl Iterator<Item = &'a Lane>) -> Vec<Uuid> {
    lanes
        .filter_map(|lane| match lane {
            Lane::Row(id) => Some(*id),
            Lane::Key(_) | Lane::Source => None,
        })
        .collect()
}

/// The second half of a pass, once rows are ours.
async fn publish_and_settle(
    ctx: &Context,
    source: &Arc<str>,
    rules: &SourceRules,
    claim: Claim,
    report: &mut Report,
    by_lane: &mut HashMap<Lane, Served>,
) {
    let asked_at = claim.asked_at;
    let messages: Arc<[Message]> = claim.messages.into();
    let plan = Arc::new(plan::plan(rules.policy, &messages));
    let batch = Batch {
        messages: Arc::clone(&messages),
        plan: Arc::clone(&plan),
        one_at_a_time: rules.policy == Policy::StopTheLine,
        // Counted from before the claim was sent, so that the lease is certainly ours until then.
        deadline: asked_at + ctx.config.relay.publish_timeout,
        stop: ctx.stop.clone(),
    };
    let started = Instant::now();
    let outcomes = publish(ctx, source, batch).await;
    let acknowledged = outcomes.iter().flatten().filter(|outcome| matches!(outcome, Outcome::Acked { .. })).count();
    Published { source_name: source, rows: messages.len(), acknowledged, elapsed: started.elapsed() }
        .emit(&ctx.metrics);
    judge_cluster(ctx, &outcomes);

    let mut settlement = plan::partition(&plan, &messages, &outcomes, rules, rand::random::<f64>);
    if let Some(policy) = &ctx.retry {
        retry::apply(&**policy, &messages, &mut settlement.verdicts);
    }
    note_verdicts(ctx, source, &messages, &settlement.verdicts);

    let started = Instant::now();
    let give_up_at = asked_at + ctx.config.relay.publishing_timeout.saturating_sub(LEASE_MARGIN);
    let settled = ctx.store.settle(&messages, &settlement.verdicts, give_up_at).await;
    let elapsed = started.elapsed();
    if !settled.lost.is_empty() {
        debug!(source = &**source, ids = ?settled.lost, "rows were no longer ours when settled");
    }
    let mut lost: HashSet<Uuid> = settled.lost.into_iter().collect();
    match settled.failed {
        None => ctx.store_changed(),
        Some((error, ids)) => {
            ctx.write_failed(Stage::Settle, source, &error, elapsed);
            report.database_failed = true;
            lost.extend(ids);
        }
    }
    tally(rules, ctx.store.has_rejected(), &messages, &settlement.verdicts, &lost, report);
    let summary = &report.summary;
    // A row whose verdict was lost goes out again if it had been acknowledged.
    let acked_and_lost = messages
        .iter()
        .zip(&settlement.verdicts)
        .filter(|(message, verdict)| **verdict == Verdict::Sent && lost.contains(&message.outbox_id))
        .count();
    Settled {
        source_name: source,
        sent: summary.sent,
        failed: summary.failed,
        skipped: summary.skipped,
        returned: summary.returned,
        dead: summary.dead,
        rejected: summary.rejected,
        stale: summary.lost,
        overtaken: settlement.overtaken as u64,
        duplicates_possible: (settlement.duplicates_possible + acked_and_lost) as u64,
        elapsed,
    }
    .emit(&ctx.metrics);
    ctx.board.progress(source);
    for lane in &plan.lanes {
        let (lane, served) = serve(rules.policy, &messages, &settlement.verdicts, lane, &lost);
        by_lane.insert(lane, served);
    }
}

/// Calls the publisher in a task of its own, so that a panic or a hang costs this call and nothing else.
async fn publish(ctx: &Context, source: &str, batch: Batch) -> Vec<Option<Outcome>> {
    let messages = Arc::clone(&batch.messages);
    let give_up_at = batch.deadline + PUBLISHER_GRACE;
    let publisher = Arc::clone(&ctx.publisher);
    if Instant::now() >= batch.deadline {
        // We were stopped or starved since the claim: somebody else may own these rows by now.
        let setback = Setback {
            blame: Blame::Stop,
            error: "relay.late: the lease could no longer be trusted before the row was handed over".to_owned(),
            pause: Duration::ZERO,
        };
        return messages.iter().map(|_| Some(Outcome::NotSent(setback.clone()))).collect();
    }
    let mut call = tokio::spawn(async move { publisher.publish(&batch).await });
    let answer = tokio::time::timeout_at(give_up_at.into(), &mut call).await;
    let failed = |reason, error: &str| {
        Failure { stage: Stage::Publish, reason, source_name: Some(source), error, elapsed: None }.emit(&ctx.metrics);
    };
    let text = match answer {
        Ok(Ok(Ok(outcomes))) => return align(ctx, source, &messages, outcomes),
        Ok(Ok(Err(error))) => {
            failed(Reason::Publisher, &error.to_string());
            if let Some(classify) = &ctx.classify {
                // Whatever it says of whose fault that is: nobody knows how far the publisher got.
                let setback = classify(&error);
                return messages.iter().map(|_| Some(Outcome::Unknown(setback.clone()))).collect();
            }
            format!("publisher.error: {error}")
        }
        Ok(Err(join)) => {
            failed(Reason::Panic, "the publisher panicked; every row of the call counts as failed");
            format!(
                "publisher.panic: the publisher ended abnormally ({})",
                if join.is_panic() { "panic" } else { "cancelled" }
            )
        }
        Err(_) => {
            call.abort();
            failed(Reason::Timeout, "the publisher did not answer by its deadline");
            let setback = Setback {
                blame: Blame::Cluster,
                error:
                    "publisher.no_answer: the publisher did not answer by its deadline; the row may have been written"
                        .to_owned(),
                pause: GIVEN_UP_PAUSE,
            };
            return messages.iter().map(|_| Some(Outcome::Unknown(setback.clone()))).collect();
        }
    };
    // Nobody knows how far it got: the rows spend an attempt, and may be on the topic.
    let setback = Setback { blame: Blame::Row, error: text, pause: Duration::ZERO };
    messages.iter().map(|_| Some(Outcome::Unknown(setback.clone()))).collect()
}

/// Puts outcomes into the order of the rows. Outcomes for strangers are counted and ignored; missing ones stay missing.
fn align(ctx: &Context, source: &str, messages: &[Message], outcomes: Vec<(Uuid, Outcome)>) -> Vec<Option<Outcome>> {
    let mut by_id: HashMap<Uuid, Outcome> = outcomes.into_iter().collect();
    let aligned: Vec<Option<Outcome>> = messages.iter().map(|message| by_id.remove(&message.outbox_id)).collect();
    let failed = |reason, error: &str| {
        Failure { stage: Stage::Publish, reason, source_name: Some(source), error, elapsed: None }.emit(&ctx.metrics);
    };
    if !by_id.is_empty() {
        failed(Reason::StrayOutcome, "the publisher returned outcomes for rows that were not in the batch");
    }
    if aligned.contains(&None) {
        failed(Reason::MissingOutcome, "the publisher returned no outcome for some rows");
    }
    aligned
}

/// Tells the gate what this call says about the cluster.
fn judge_cluster(ctx: &Context, outcomes: &[Option<Outcome>]) {
    let mut away = false;
    for outcome in outcomes.iter().flatten() {
        match outcome {
            // Any answer about a record proves that the cluster answers.
            Outcome::Acked { .. } => {
                ctx.gate.acknowledged();
                return;
            }
            Outcome::Unknown(setback) | Outcome::NotSent(setback) if setback.blame == Blame::Cluster => away = true,
            Outcome::Unknown(_) | Outcome::NotSent(_) | Outcome::Rejected(_) | Outcome::Failed { .. } => {}
        }
    }
    if away {
        ctx.gate.close(rand::random());
    }
}

/// Reports what became of single rows: how long the sent ones took, and why the others were not sent.
fn note_verdicts(ctx: &Context, source: &Arc<str>, messages: &[Message], verdicts: &[Verdict]) {
    let metrics = ctx.metrics.source(source);
    let now = unix_micros_now();
    for (message, verdict) in messages.iter().zip(verdicts) {
        let ended = |end, error: &str| {
            RowEnded { source_name: source, outbox_id: message.outbox_id, end, error }.emit(&ctx.metrics);
        };
        match verdict {
            Verdict::Sent => {
                if let Some(created) = message.created_at.unix_micros() {
                    metrics.end_to_end(now.saturating_sub(created) as f64 / 1e6);
                }
            }
            Verdict::Failed { error, .. } | Verdict::Held { error } | Verdict::Returned { error, .. } => {
                ctx.board.failure(source, error);
            }
            Verdict::Dead { error } => {
                ended(RowEnd::Dead, error);
                ctx.board.failure(source, error);
            }
            Verdict::Rejected(rejection) => {
                let error = format!("{}: {}", rejection.code, rejection.detail);
                ended(RowEnd::Rejected, &error);
                ctx.board.failure(source, &error);
            }
            Verdict::Skipped { .. } => {}
        }
    }
}

/// Wall-clock time for the age of a sent row; a wrong clock spoils a histogram and nothing else.
fn unix_micros_now() -> i64 {
    jiff::Timestamp::now().as_microsecond()
}

/// Counts what was settled, and notes the row that halts its source.
fn tally(
    rules: &SourceRules,
    has_rejected: bool,
    messages: &[Message],
    verdicts: &[Verdict],
    lost: &HashSet<Uuid>,
    report: &mut Report,
) {
    let summary = &mut report.summary;
    summary.lost += lost.len() as u64;
    let halts = rules.policy == Policy::StopTheLine;
    for (message, verdict) in messages.iter().zip(verdicts) {
        if lost.contains(&message.outbox_id) {
            continue;
        }
        let (counter, halting) = match verdict {
            Verdict::Sent => (&mut summary.sent, None),
            Verdict::Failed { error, .. } => (&mut summary.failed, Some((HaltKind::Failing, error))),
            Verdict::Held { error } => (&mut summary.failed, Some((HaltKind::Held, error))),
            Verdict::Dead { .. } => (&mut summary.dead, None),
            Verdict::Rejected(_) if has_rejected => (&mut summary.rejected, None),
            // An older table has no such status: what is counted is what the table says.
            Verdict::Rejected(_) => (&mut summary.dead, None),
            Verdict::Skipped { .. } => (&mut summary.skipped, None),
            // Rows returned because we stop are due at once and halt nothing.
            Verdict::Returned { error, pause } => {
                let kind = HaltKind::of_waiting(false, message.attempt_count - 1);
                (&mut summary.returned, (!pause.is_zero()).then_some((kind, error)))
            }
        };
        *counter += 1;
        if halts && let Some((kind, error)) = halting {
            report.halted_on = Some(Halt { kind, outbox_id: Some(message.outbox_id), reason: error.clone() });
        }
    }
}

fn lane_of(policy: Policy, message: &Message) -> Lane {
    let key = message.message_key.as_deref().map(Arc::from);
    Lanes::lane_of(policy, key.as_ref(), message.outbox_id)
}

/// What a settled lane tells the scheduler.
fn serve(
    policy: Policy,
    messages: &[Message],
    verdicts: &[Verdict],
    lane: &[usize],
    lost: &HashSet<Uuid>,
) -> (Lane, Served) {
    let name = lane_of(policy, &messages[lane[0]]);
    if lane.iter().any(|&index| lost.contains(&messages[index].outbox_id)) {
        return (name, Served::Unsettled);
    }
    let blocked = lane.iter().find_map(|&index| {
        let message = &messages[index];
        // Whether an attempt is spent on it now: those that return theirs are what they were before.
        let (due_in, attempted) = match &verdicts[index] {
            // Terminal. A dead row releases its lane: the head is what was skipped behind it.
            Verdict::Sent | Verdict::Rejected(_) | Verdict::Dead { .. } => return None,
            Verdict::Failed { delay, .. } => (*delay, true),
            Verdict::Held { .. } => (PROBE_INTERVAL_MAX, true),
            Verdict::Returned { pause, .. } => (*pause, message.attempted_before()),
            Verdict::Skipped { .. } => (Duration::ZERO, message.attempted_before()),
        };
        let state = if due_in.is_zero() { RowState::Due } else { RowState::Later(due_in) };
        Some(Glimpse { position: message.position(), message_key: None, state, attempted })
    });
    let through = messages[lane[lane.len() - 1]].position();
    (name, Served::Claimed { rows: lane.len(), through, blocked })
}
