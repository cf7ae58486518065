//! Buffers that the relay's own statements touch, as `pg_stat_statements` counts them.
//!
//! Nothing here ever writes a statement of its own in place of the relay's: rows are looked for, claimed and settled through the
//! same scheduler and store, one pass after the other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_postgres::types::Type;

use super::harness::{Harness, Scratch, defaults, doing};
use super::load::Load;
use super::report::{Cell, Section};
use crate::cli::demo::grouped;
use crate::domain::lanes::{Lane, Lanes, Served};
use crate::domain::message::{Message, Position};
use crate::domain::pause::PausedRows;
use crate::domain::plan::Verdict;
use crate::domain::policy::Policy;
use crate::store::Profile;

/// Rows of a page and a batch, as the relay has them.
const PAGE_ROWS: usize = 2_000;
const BATCH_ROWS: usize = 500;
const BATCH_BYTES: usize = 8 << 20;
/// Passes that are measured.
const PASSES: usize = 10;
/// Lanes that are remembered.
const LANES_MAX: usize = 100_000;
/// How long a settlement is tried.
const SETTLE_MAX: Duration = Duration::from_secs(30);

/// What stands in front of the rows that can be claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Obstacle {
    None,
    /// Rows of one key whose head failed and is not due.
    FailingKey,
    /// Rows that died, of the very keys that are claimed.
    Dead,
}

/// Measures.
///
/// # Errors
/// Something was not done.
pub(super) async fn measure(harness: &mut Harness) -> Result<Vec<Section>, String> {
    let mut section = Section {
        title: "Buffers".to_owned(),
        notes: vec![format!(
            "Shared buffers hit or read, counted by pg_stat_statements over {PASSES} passes of the relay's own scheduler and \
             statements, batches of {BATCH_ROWS} rows of 1 KB (per_key_head_of_line, 10 rows a key). Statistics were taken while the \
             table was empty and autovacuum is off, so that they stay so. A *look* is one page of {PAGE_ROWS} rows; the *probe* claims \
             what blocks: the failing key alone."
        )],
        heads: vec![
            "profile",
            "in front",
            "rows claimed",
            "buffers / claimed row",
            "/ settled row",
            "looks",
            "/ row looked at",
            "probe",
        ],
        rows: Vec::new(),
    };
    for profile in [Profile::Lean, Profile::Shared] {
        let obstacles = [
            (Obstacle::None, 0),
            (Obstacle::FailingKey, harness.scaled(200_000)),
            (Obstacle::Dead, harness.scaled(20_000)),
        ];
        for (obstacle, rows) in obstacles {
            let what = match obstacle {
                Obstacle::None => "nothing".to_owned(),
                Obstacle::FailingKey => format!("{} rows of one failing key", grouped(rows)),
                Obstacle::Dead => format!("{} dead rows", grouped(rows)),
            };
            doing(&format!("buffers, {profile}, in front: {what}"));
            let scratch = prepared(harness, profile, obstacle, rows).await?;
            section.rows.push(figures(&scratch, profile, obstacle, what).await?);
        }
    }
    Ok(vec![section])
}

/// A table with the obstacle and what can be claimed behind it.
async fn prepared(harness: &Harness, profile: Profile, obstacle: Obstacle, rows: usize) -> Result<Scratch, String> {
    let scratch = harness.database(profile, &defaults(Policy::PerKeyHeadOfLine), None).await?;
    scratch.batch("alter table keiro.keiro_outbox set (autovacuum_enabled = off)").await?;
    let good = PASSES * BATCH_ROWS * 2;
    let keys = good / 10;
    let load = |mark, rows, key, keys, seconds_ago| Load {
        rows,
        sources: 1,
        keys,
        payload_bytes: 1024,
        topic: "bench",
        mark,
        key,
        seconds_ago,
    };
    match obstacle {
        Obstacle::None => {}
        Obstacle::FailingKey => {
            load("failing", rows, "failing", 1, 7200).insert(&scratch).await?;
            scratch
                .batch(
                    "update keiro.keiro_outbox set status = 'failed', attempt_count = 3, last_error = 'bench', \
                     next_attempt_at = now() + interval '1 day' where message_id = 'failing-0'",
                )
                .await?;
        }
        Obstacle::Dead => {
            // Under the same keys as the good rows, older than they are, and dying as rows do: claimed, then settled.
            load("dead", rows, "key", keys, 7200).insert(&scratch).await?;
            let far = match profile {
                Profile::Lean => "timestamptz '9999-12-31 00:00:00+00'",
                Profile::Shared => "next_attempt_at",
            };
            let sql = format!(
                "update keiro.keiro_outbox set status = 'publishing', attempt_count = 10; \
                 update keiro.keiro_outbox set status = 'dead', last_error = 'bench', next_attempt_at = {far}"
            );
            scratch.batch(&sql).await?;
        }
    }
    load("good", good, "key", keys, 3600).insert(&scratch).await?;
    scratch.batch("checkpoint; select pg_stat_statements_reset()").await?;
    Ok(scratch)
}

/// Runs the passes and reads what they touched.
async fn figures(scratch: &Scratch, profile: Profile, obstacle: Obstacle, what: String) -> Result<Vec<Cell>, String> {
    let source = Load::source(0);
    let passes = run_passes(scratch, &source).await?;
    let claim = touched(scratch, CLAIM).await?;
    let look = touched(scratch, LOOK).await?;
    let settle = touched(scratch, SETTLE).await?;
    let probe = match obstacle {
        Obstacle::FailingKey => {
            scratch.batch("select pg_stat_statements_reset()").await?;
            let keys = ["failing-0"];
            let claimed =
                scratch.store.claim_keys(&source, &keys, &[1], BATCH_BYTES, true, &PausedRows::default()).await;
            let claimed = claimed.map_err(|error| error.to_string())?;
            if !claimed.messages.is_empty() {
                return Err("the failing key was claimed before it was due".to_owned());
            }
            scratch.store.peek_keys(&source, &keys, &PausedRows::default()).await.map_err(|error| error.to_string())?;
            Cell::Number(touched(scratch, CLAIM).await?.buffers + touched(scratch, PEEK).await?.buffers, 0)
        }
        Obstacle::None | Obstacle::Dead => Cell::Nothing,
    };
    Ok(vec![
        Cell::text(profile.name()),
        Cell::Text(what),
        Cell::count(passes.claimed as u64),
        Cell::ratio(claim.buffers, passes.claimed as f64, 1),
        Cell::ratio(settle.buffers, passes.claimed as f64, 1),
        Cell::Number(look.calls, 0),
        Cell::ratio(look.buffers, passes.looked_at as f64, 2),
        probe,
    ])
}

/// What the passes did.
struct Passes {
    claimed: usize,
    looked_at: usize,
}

/// Passes as a source's loop makes them, one after the other, every row acknowledged.
async fn run_passes(scratch: &Scratch, source: &str) -> Result<Passes, String> {
    let mut lanes = Lanes::new(Policy::PerKeyHeadOfLine, LANES_MAX);
    let (mut cursor, mut more) = (Position::START, true);
    let mut done = Passes { claimed: 0, looked_at: 0 };
    for _ in 0..PASSES {
        while lanes.rows_ready() < BATCH_ROWS && more {
            let page = scratch
                .store
                .discover(source, cursor, PAGE_ROWS, &PausedRows::default())
                .await
                .map_err(|error| error.to_string())?;
            lanes.discovered(&page, Instant::now());
            more = page.len() == PAGE_ROWS;
            cursor = page.last().map_or(cursor, |glimpse| glimpse.position);
            done.looked_at += page.len();
        }
        let request = lanes.next_request(BATCH_ROWS).ok_or("nothing is ready, but rows were inserted")?;
        let keys: Vec<&str> = request
            .lanes
            .iter()
            .map(|wanted| match &wanted.lane {
                Lane::Key(key) => &**key,
                Lane::Row(_) | Lane::Source => unreachable!("every row has a key"),
            })
            .collect();
        let rows_max: Vec<i32> =
            request.lanes.iter().map(|wanted| i32::try_from(wanted.rows_max).unwrap_or(i32::MAX)).collect();
        let claim = scratch
            .store
            .claim_keys(source, &keys, &rows_max, BATCH_BYTES, request.retry, &PausedRows::default())
            .await;
        let messages = claim.map_err(|error| error.to_string())?.messages;
        let verdicts = vec![Verdict::Sent; messages.len()];
        let settled = scratch.store.settle(&messages, &verdicts, Instant::now() + SETTLE_MAX).await;
        if let Some((error, _)) = settled.failed {
            return Err(error.to_string());
        }
        if !settled.lost.is_empty() {
            return Err("rows were lost to somebody".to_owned());
        }
        done.claimed += messages.len();
        let mut by_key: HashMap<Lane, (usize, Position)> = HashMap::new();
        for message in &messages {
            let (rows, through) = by_key.entry(lane_of(message)).or_insert((0, message.position()));
            (*rows, *through) = (*rows + 1, message.position());
        }
        let served = request
            .lanes
            .iter()
            .map(|wanted| match by_key.get(&wanted.lane) {
                Some((rows, through)) => Served::Claimed { rows: *rows, through: *through, blocked: None },
                None => Served::Nothing(None),
            })
            .collect();
        lanes.served(&request, served, Instant::now());
    }
    Ok(done)
}

fn lane_of(message: &Message) -> Lane {
    let key = message.message_key.as_deref().map(Arc::from);
    Lanes::lane_of(Policy::PerKeyHeadOfLine, key.as_ref(), message.outbox_id)
}

/// What a statement touched.
struct Touched {
    calls: f64,
    buffers: f64,
}

// What no other statement here says; the comments at their heads are not kept, nor are constants.
const CLAIM: &str = "ready as materialized";
const LOOK: &str = "(o.created_at, o.outbox_id) > (";
const SETTLE: &str = "published_at = statement_timestamp()";
const PEEK: &str = "as k(key) cross join lateral";

/// The statements that say this.
async fn touched(scratch: &Scratch, words: &str) -> Result<Touched, String> {
    let sql = "select coalesce(sum(calls), 0)::float8, coalesce(sum(shared_blks_hit + shared_blks_read), 0)::float8 \
         from pg_stat_statements where dbid = (select oid from pg_database where datname = current_database()) \
         and strpos(query, $1) > 0";
    let row = scratch.row(sql, &[(&words, Type::TEXT)]).await?;
    let read = |column: usize| row.try_get(column).map_err(|error| error.to_string());
    let touched = Touched { calls: read(0)?, buffers: read(1)? };
    if touched.calls == 0.0 {
        return Err(format!("pg_stat_statements has no statement with {words:?}"));
    }
    Ok(touched)
}
