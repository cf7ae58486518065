//! The commands that change rows: what was typed becomes a verb and a selection, or it is refused with what would be right.
//!
//! Nothing here ever decides what a row's state allows: the library does, under the row's lock.

mod describe;
mod report;
mod work;

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use uuid::Uuid;

use super::rows::filter::{RowFilter, parse_id, parse_when};
use super::{EXIT_USAGE, complain};
use crate::config::Config;
use crate::domain::message::PgTime;
use crate::store::{Due, Selection, Sort, Status, Verb, When};

/// Which rows, and how it is told.
#[derive(Debug, Args)]
pub struct Which {
    /// Rows by their outbox_id.
    #[arg(value_name = "UUID", value_parser = parse_id)]
    ids: Vec<Uuid>,
    /// Every row that the command applies to: neither an id nor a filter limits it.
    #[arg(long)]
    everything: bool,
    /// Rows at most, the first in order.
    #[arg(long, value_name = "ROWS", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Count what would be changed, and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    filter: RowFilter,
}

/// `retry`.
#[derive(Debug, Args)]
pub struct Retry {
    /// All dead and rejected rows of the lanes of these rows, in order.
    #[arg(long)]
    lane: bool,
    /// Leave attempts spent; rows without any left are refused.
    #[arg(long)]
    keep_attempts: bool,
    /// Due at this time instead of now (RFC 3339).
    #[arg(long, value_name = "TIME", value_parser = parse_at)]
    at: Option<PgTime>,
    /// Also rows of lanes where a later row has been sent, or is in flight.
    #[arg(long)]
    allow_reorder: bool,
    #[command(flatten)]
    which: Which,
}

/// `replay`.
#[derive(Debug, Args)]
pub struct Replay {
    /// Also rows of lanes where a later row has been sent, or is in flight.
    #[arg(long)]
    allow_reorder: bool,
    #[command(flatten)]
    which: Which,
}

/// `cancel`.
#[derive(Debug, Args)]
pub struct Cancel {
    /// Why; kept beside the row.
    #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
    reason: String,
    #[command(flatten)]
    which: Which,
}

/// `reschedule`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("due_time").required(true).args(["at", "within"])))]
pub struct Reschedule {
    /// Due at this time (RFC 3339).
    #[arg(long, value_name = "TIME", value_parser = parse_at)]
    at: Option<PgTime>,
    /// Due after so long, such as `0s`, `15m`, `2h`.
    #[arg(long = "in", id = "within", value_name = "DURATION", value_parser = parse_duration)]
    within: Option<Duration>,
    #[command(flatten)]
    which: Which,
}

/// `requeue-stuck`.
#[derive(Debug, Args)]
pub struct RequeueStuck {
    /// In flight for at least so long; not below relay.publishing_timeout, which is the default.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    older_than: Option<Duration>,
    #[command(flatten)]
    which: Which,
}

/// `prune`.
#[derive(Debug, Args)]
pub struct Prune {
    /// Sent rows published before this time, dead and rejected rows last changed before it: RFC 3339, or so long ago, such as `30d`.
    #[arg(long, value_name = "TIME", value_parser = parse_when)]
    before: When,
    #[command(flatten)]
    which: Which,
}

/// A command that is ready to be carried out.
struct Order {
    name: &'static str,
    verb: Verb,
    parts: Vec<(Selection, Sort)>,
    /// The ids that were named, each of which must be accounted for.
    ids: BTreeSet<Uuid>,
    /// The selection is to be widened to the lanes of its ids.
    lane: bool,
    /// Of `prune`: relative to the database's now.
    before: Option<When>,
    limit: Option<u64>,
    dry_run: bool,
    json: bool,
}

pub(super) async fn retry(config: &Config, retry: Retry) -> u8 {
    let due = retry.at.map_or(Due::In(Duration::ZERO), Due::At);
    let verb = Verb::Retry { keep_attempts: retry.keep_attempts, due, allow_reorder: retry.allow_reorder };
    let named = !retry.which.ids.is_empty() || !retry.which.filter.id.is_empty();
    let order = if retry.lane && !named {
        Err("--lane needs a row of the lane: retry UUID --lane".to_owned())
    } else {
        order("retry", verb, retry.which).map(|order| Order { lane: retry.lane, ..order })
    };
    work::run(config, order).await
}

pub(super) async fn replay(config: &Config, replay: Replay) -> u8 {
    let verb = Verb::Replay { allow_reorder: replay.allow_reorder };
    work::run(config, order("replay", verb, replay.which)).await
}

pub(super) async fn cancel(config: &Config, cancel: Cancel) -> u8 {
    work::run(config, order("cancel", Verb::Cancel { reason: cancel.reason }, cancel.which)).await
}

pub(super) async fn reschedule(config: &Config, reschedule: Reschedule) -> u8 {
    let due = match (reschedule.at, reschedule.within) {
        (Some(at), _) => Due::At(at),
        (None, delay) => Due::In(delay.unwrap_or_default()),
    };
    work::run(config, order("reschedule", Verb::Reschedule { due }, reschedule.which)).await
}

pub(super) async fn requeue_stuck(config: &Config, requeue: RequeueStuck) -> u8 {
    let lease = config.relay.publishing_timeout;
    let older_than = requeue.older_than.unwrap_or(lease);
    let order = if older_than < lease {
        Err(format!(
            "--older-than {} is below relay.publishing_timeout ({}): a relay may still be publishing such rows",
            humantime::format_duration(older_than),
            humantime::format_duration(lease)
        ))
    } else {
        order("requeue-stuck", Verb::RequeueStuck { older_than }, requeue.which).map(|mut order| {
            for (selection, _) in order.parts.iter_mut().filter(|(selection, _)| selection.ids.is_empty()) {
                selection.updated_before = Some(When::Ago(older_than));
            }
            order
        })
    };
    work::run(config, order).await
}

pub(super) async fn prune(config: &Config, prune: Prune) -> u8 {
    let named: BTreeSet<Status> = match prune.which.filter.selection() {
        Ok(selection) if !selection.statuses.is_empty() => selection.statuses,
        // The time alone is a filter of prune, but a status is never guessed beyond `sent`.
        Ok(_) | Err(_) => BTreeSet::from([Status::Sent]),
    };
    // Resolved against the database's clock when it is carried out.
    let verb = Verb::Prune { statuses: named, before: PgTime::NEG_INFINITY };
    let order = order("prune", verb, Which { everything: true, ..prune.which }).map(|mut order| {
        let (selection, _) = order.parts.remove(0);
        if !selection.ids.is_empty() {
            order.parts.push((selection, Sort::Created));
            return order;
        }
        let of = |statuses: &[Status]| -> BTreeSet<Status> {
            statuses.iter().copied().filter(|status| selection.statuses.contains(status)).collect()
        };
        let (sent, unsent) = (of(&[Status::Sent]), of(&[Status::Dead, Status::Rejected]));
        if !sent.is_empty() {
            let sent = Selection { statuses: sent, published_before: Some(prune.before), ..selection.clone() };
            order.parts.push((sent, Sort::Published));
        }
        if !unsent.is_empty() {
            let unsent = Selection { statuses: unsent, updated_before: Some(prune.before), ..selection };
            order.parts.push((unsent, Sort::Created));
        }
        order
    });
    work::run(config, order.map(|order| Order { before: Some(prune.before), ..order })).await
}

/// What was typed, as far as it makes sense whatever the table holds.
fn order(name: &'static str, verb: Verb, which: Which) -> Result<Order, String> {
    let Which { ids, everything, limit, dry_run, json, filter } = which;
    let mut selection = filter.selection()?;
    selection.ids.extend(ids);
    let takes = verb.takes();
    let (wanted, kinds) = (report::kinds(&takes), report::kinds(&selection.statuses));
    if let Some(status) = selection.statuses.iter().find(|status| !verb_may_take(&verb, **status)) {
        let wanted = if name == "prune" { "sent, dead, rejected".to_owned() } else { wanted };
        return Err(format!("{name} applies to {wanted} rows only: not to --status {}", status.name()));
    }
    let no_filter = selection.is_empty();
    if no_filter && !everything {
        return Err(format!(
            "no row was named: give ids or filters, or --everything for all {wanted} rows of the table (see {name} --help)"
        ));
    }
    if everything && !no_filter && name != "prune" {
        return Err("--everything goes with no id and no filter: leave it out, or leave them out".to_owned());
    }
    let ids: BTreeSet<Uuid> = selection.ids.iter().copied().collect();
    selection.ids = ids.iter().copied().collect();
    if ids.is_empty() && selection.statuses.is_empty() {
        selection.statuses = takes;
    }
    if selection.possible().is_empty() {
        let kinds = if kinds.is_empty() { wanted } else { kinds };
        return Err(format!("{name} applies to {kinds} rows here, and the other filters exclude all of them"));
    }
    Ok(Order {
        name,
        verb,
        parts: vec![(selection, Sort::Created)],
        ids,
        lane: false,
        before: None,
        limit,
        dry_run,
        json,
    })
}

fn verb_may_take(verb: &Verb, status: Status) -> bool {
    match verb {
        Verb::Prune { .. } => matches!(status, Status::Sent | Status::Dead | Status::Rejected),
        Verb::Retry { .. }
        | Verb::Replay { .. }
        | Verb::Cancel { .. }
        | Verb::Reschedule { .. }
        | Verb::RequeueStuck { .. } => verb.takes().contains(&status),
    }
}

/// From here on a due time means that the row is held until somebody acts.
const HELD_FROM_UNIX_SECONDS: i64 = 221_845_392_000;

fn parse_at(text: &str) -> Result<PgTime, String> {
    let at: jiff::Timestamp =
        text.trim().parse().map_err(|_| "expected a time with its zone such as 2026-01-02T03:04:05Z".to_owned())?;
    if at.as_second() >= HELD_FROM_UNIX_SECONDS {
        return Err("a row due in the year 9000 or later would never go out: cancel it instead".to_owned());
    }
    Ok(PgTime::from_unix_micros(at.as_microsecond()))
}

fn parse_duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text.trim()).map_err(|error| format!("{error}; expected such as 0s, 90s, 15m, 2h, 3d"))
}

fn parse_reason(text: &str) -> Result<String, String> {
    let text = text.trim();
    if text.is_empty() { Err("a reason cannot be empty".to_owned()) } else { Ok(text.to_owned()) }
}

/// Says what is wrong with the command line.
fn refuse(problem: &str) -> u8 {
    complain(problem);
    EXIT_USAGE
}
