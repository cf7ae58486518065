//! Carries out a command over any number of rows, in bounded batches, and leaves a trace of who did what.
//!
//! Nothing here ever keeps on after an error or an interruption: what was committed stays, and is told.

use std::collections::BTreeSet;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tokio_util::sync::CancellationToken;
use tracing::info;
use uuid::Uuid;

use super::super::rows::filter::unserved_line;
use super::super::{EXIT_CONFIG, EXIT_FAILED, complain, operator};
use super::report::Report;
use super::{Order, describe, refuse};
use crate::config::Config;
use crate::domain::message::PgTime;
use crate::domain::policy::SourceRules;
use crate::store::{CHANGE_ROWS_MAX, ErrorKind, Rules, Selection, Sort, Store, StoreError, Unchanged, Verb, Why};
use crate::telemetry;

/// Rows that are looked up at once; they are changed in batches of [`CHANGE_ROWS_MAX`].
const PAGE_ROWS: usize = 50_000;
/// How long one look-up may take.
const READ_MAX: Duration = Duration::from_secs(120);
/// Exit code of a second interruption, as shells have it.
const EXIT_INTERRUPTED: i32 = 130;

/// Does what was ordered, and returns the exit code.
pub(super) async fn run(config: &Config, order: Result<Order, String>) -> u8 {
    let order = match order {
        Ok(order) => order,
        Err(problem) => return refuse(&problem),
    };
    if let Err(problem) = telemetry::init_tracing(&config.log, &config.relay.instance) {
        complain(&format!("configuration: {problem}"));
        return EXIT_CONFIG;
    }
    let store = match operator::open(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    if matches!(order.verb, Verb::Prune { .. }) && !order.dry_run && !store.can_delete() {
        complain("database: prune needs the permission to delete: grant delete on the table to this user");
        return EXIT_CONFIG;
    }
    let rules = |source: &str| -> SourceRules { config.rules(source).unwrap_or(&config.defaults).clone() };
    let mut report = Report::new(order.name, order.dry_run, order.verb.takes());
    let (ids, json) = (order.ids.clone(), order.json);
    let code = match carry_out(&store, order, &rules, &mut report).await {
        Ok(()) => report.exit_code(&ids),
        Err(error) => {
            report.stopped(&error.to_string());
            if error.kind() == ErrorKind::Mismatch { EXIT_CONFIG } else { EXIT_FAILED }
        }
    };
    report.print(json);
    code
}

/// Widens, changes, and tells the log who did it.
async fn carry_out(store: &Store, mut order: Order, rules: Rules<'_>, report: &mut Report) -> Result<(), StoreError> {
    let now = store.now().await?;
    if let (Verb::Prune { before: instant, .. }, Some(before)) = (&mut order.verb, order.before) {
        *instant = before.instant(now);
    }
    let (user, application) = store.who().await?;
    let what = describe::order(&order);
    let told = !order.dry_run;
    if told && order.ids.is_empty() {
        info!(command = order.name, user, application, what, "operator's command begins");
    }
    let outcome = match widened(store, &mut order, rules, report).await {
        Ok(()) => Work::new(store, &order, rules, now, report).parts().await,
        Err(error) => Err(error),
    };
    if told {
        let (changed, unchanged) = (report.changed, report.unchanged());
        let complete = outcome.is_ok() && !report.interrupted;
        info!(command = order.name, user, application, what, changed, unchanged, complete, "operator's command");
    }
    outcome
}

/// With `--lane`, the selection becomes the lanes of the rows that were named.
async fn widened(store: &Store, order: &mut Order, rules: Rules<'_>, report: &mut Report) -> Result<(), StoreError> {
    if !order.lane {
        return Ok(());
    }
    let ids: Vec<Uuid> = order.ids.iter().copied().collect();
    let lanes = store.lanes(&ids, rules).await?;
    report.add(ids.iter().filter(|id| !lanes.contains_key(id)).map(|id| (*id, Why::NotFound).into()));
    let Some((template, sort)) = order.parts.pop() else { return Ok(()) };
    let template = Selection { ids: Vec::new(), statuses: order.verb.takes(), ..template };
    // Rows that are their own lanes together, and each other lane once.
    let single: Vec<Uuid> = lanes.iter().filter(|(_, lane)| lane.is_none()).map(|(id, _)| *id).collect();
    if !single.is_empty() {
        order.parts.push((Selection { ids: single, ..template.clone() }, sort));
    }
    let lanes: BTreeSet<(String, Option<String>)> = lanes.into_values().flatten().collect();
    for (source, key) in lanes {
        let keys = key.into_iter().collect();
        order.parts.push((Selection { sources: vec![source], keys, ..template.clone() }, sort));
    }
    Ok(())
}

/// An order while it is carried out.
struct Work<'a> {
    store: &'a Store,
    order: &'a Order,
    rules: Rules<'a>,
    now: PgTime,
    report: &'a mut Report,
    /// Rows that may still be changed.
    left: usize,
    /// Named rows that were found.
    met: BTreeSet<Uuid>,
    stop: CancellationToken,
    progress: ProgressBar,
}

impl<'a> Work<'a> {
    fn new(store: &'a Store, order: &'a Order, rules: Rules<'a>, now: PgTime, report: &'a mut Report) -> Self {
        // Hidden by itself where standard error is no terminal.
        let progress = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{spinner} {msg}: {pos} rows, {elapsed}");
        progress.set_style(style.expect("the template is legal"));
        progress.set_message(order.name);
        progress.enable_steady_tick(Duration::from_millis(200));
        let left = order.limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Self { store, order, rules, now, report, left, met: BTreeSet::new(), stop: interruption(), progress }
    }

    async fn parts(mut self) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        for (selection, sort) in &self.order.parts {
            if let Some(line) = unserved_line(&self.store.unserved(selection, *sort)?) {
                self.progress.suspend(|| complain(&line));
            }
            outcome = self.part(selection, *sort).await;
            if outcome.is_err() || self.report.interrupted || self.left == 0 {
                break;
            }
        }
        self.progress.finish_and_clear();
        outcome?;
        if !self.order.lane && !self.report.interrupted && self.left > 0 {
            let missing = self.order.ids.iter().filter(|id| !self.met.contains(*id));
            self.report.add(missing.map(|id| (*id, Why::NotFound).into()));
        }
        Ok(())
    }

    /// Page after page of a selection, in order: an earlier row of a lane is never changed after a later one.
    async fn part(&mut self, selection: &Selection, sort: Sort) -> Result<(), StoreError> {
        let mut after = None;
        loop {
            let rows_max = PAGE_ROWS.min(self.left);
            let page = self.store.places(selection, sort, after, rows_max, self.now, READ_MAX).await?;
            let ids: Vec<Uuid> = page.iter().map(|(_, id)| *id).collect();
            if self.order.dry_run && self.order.ids.is_empty() && selection_decides(&self.order.verb) {
                self.report.changed += ids.len();
                self.left -= ids.len();
                self.progress.inc(ids.len().try_into().unwrap_or(u64::MAX));
            } else {
                self.batches(&ids).await?;
            }
            after = page.last().copied();
            if page.len() < rows_max || self.left == 0 || self.report.interrupted {
                return Ok(());
            }
        }
    }

    /// The rows of a page, batch by batch.
    async fn batches(&mut self, ids: &[Uuid]) -> Result<(), StoreError> {
        let verb = &self.order.verb;
        let history = self.store.history(verb, ids, self.rules).await?;
        for batch in ids.chunks(CHANGE_ROWS_MAX) {
            if self.stop.is_cancelled() {
                self.report.interrupted = true;
                return Ok(());
            }
            if !self.order.ids.is_empty() {
                self.met.extend(batch);
            }
            let dry_run = self.order.dry_run;
            let changes = self.store.change(verb, batch, self.rules, Some(&history), dry_run).await?;
            self.left -= batch.len();
            self.progress.inc(batch.len().try_into().unwrap_or(u64::MAX));
            self.report.changed += changes.changed.len();
            self.report.dead += changes.dead;
            self.report.add(changes.unchanged.into_iter());
        }
        Ok(())
    }
}

/// Whether every row that the selection finds would be changed: then a dry run only counts.
fn selection_decides(verb: &Verb) -> bool {
    match verb {
        Verb::Retry { keep_attempts, allow_reorder, .. } => !keep_attempts && *allow_reorder,
        Verb::Replay { allow_reorder } => *allow_reorder,
        Verb::Cancel { .. } | Verb::Reschedule { .. } | Verb::Prune { .. } => true,
        // Some of them would be dead.
        Verb::RequeueStuck { .. } => false,
    }
}
impl From<(Uuid, Why)> for Unchanged {
    fn from((outbox_id, why): (Uuid, Why)) -> Self {
        Self { outbox_id, why }
    }
}

/// Cancelled by Ctrl-C, after which the batch under way is finished; a second one ends the process.
fn interruption() -> CancellationToken {
    let stop = CancellationToken::new();
    let asked = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            asked.cancel();
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(EXIT_INTERRUPTED);
            }
        }
    });
    stop
}
