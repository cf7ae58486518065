//! An order in words for the log: which rows were meant, without a key in it.
//!
//! Nothing here ever shows a key, and no line grows with the number of ids.

use super::Order;
use crate::domain::message::PgTime;
use crate::store::{Due, Selection, Verb, When};

/// Ids that are named one by one.
const IDS_MAX: usize = 20;

/// What was asked for, as the log keeps it.
pub(super) fn order(order: &Order) -> String {
    let mut parts = Vec::new();
    match &order.verb {
        Verb::Retry { keep_attempts, due, allow_reorder } => {
            due_time(&mut parts, *due);
            flag(&mut parts, *keep_attempts, "keep_attempts");
            flag(&mut parts, *allow_reorder, "allow_reorder");
        }
        Verb::Replay { allow_reorder } => flag(&mut parts, *allow_reorder, "allow_reorder"),
        Verb::Cancel { reason } => parts.push(format!("reason={reason:?}")),
        Verb::Reschedule { due } => due_time(&mut parts, *due),
        Verb::RequeueStuck { older_than } => {
            parts.push(format!("older_than={}", humantime::format_duration(*older_than)));
        }
        Verb::Prune { before, .. } => parts.push(format!("before={}", instant(*before))),
    }
    flag(&mut parts, order.lane, "lane");
    if let Some(limit) = order.limit {
        parts.push(format!("limit={limit}"));
    }
    let mut selections: Vec<String> = order.parts.iter().map(|(selection, _)| selected(selection)).collect();
    selections.dedup();
    parts.push(selections.join(" or "));
    parts.join(" ")
}

fn selected(selection: &Selection) -> String {
    let mut parts = Vec::new();
    if !selection.ids.is_empty() {
        let ids: Vec<String> = selection.ids.iter().take(IDS_MAX).map(ToString::to_string).collect();
        let more = selection.ids.len().saturating_sub(IDS_MAX);
        let more = if more == 0 { String::new() } else { format!(" and {more} more") };
        parts.push(format!("ids={}{more}", ids.join(",")));
    }
    for (name, values) in [
        ("source", &selection.sources),
        ("topic", &selection.topics),
        ("event_type", &selection.event_types),
        ("message_id", &selection.message_ids),
        ("error", &selection.errors),
    ] {
        if !values.is_empty() {
            parts.push(format!("{name}={values:?}"));
        }
    }
    if !selection.keys.is_empty() {
        parts.push(format!("keys={}", selection.keys.len()));
    }
    if !selection.statuses.is_empty() {
        let names: Vec<&str> = selection.statuses.iter().map(|status| status.name()).collect();
        parts.push(format!("status={}", names.join(",")));
    }
    for (name, when) in [("since", selection.since), ("until", selection.until)] {
        match when {
            Some(When::At(at)) => parts.push(format!("{name}={}", instant(at))),
            Some(When::Ago(ago)) => parts.push(format!("{name}={} ago", humantime::format_duration(ago))),
            None => {}
        }
    }
    if let Some(due) = selection.due {
        parts.push(format!("due={due}"));
    }
    if parts.is_empty() { "everything".to_owned() } else { parts.join(" ") }
}

fn due_time(parts: &mut Vec<String>, due: Due) {
    match due {
        Due::At(at) => parts.push(format!("at={}", instant(at))),
        Due::In(delay) if delay.is_zero() => {}
        Due::In(delay) => parts.push(format!("in={}", humantime::format_duration(delay))),
    }
}

fn flag(parts: &mut Vec<String>, given: bool, name: &str) {
    if given {
        parts.push(name.to_owned());
    }
}

fn instant(at: PgTime) -> String {
    let timestamp = at.unix_micros().and_then(|micros| jiff::Timestamp::from_microsecond(micros).ok());
    timestamp.map_or_else(|| "beyond the calendar".to_owned(), |timestamp| timestamp.to_string())
}
