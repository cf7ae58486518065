//! `list`, `stuck` and `gc-preview`: pages of rows, as a table or one JSON object a line.
//!
//! Nothing here ever changes a row, shows a payload, or reads without a limit.

use std::io::{self, Write};

use clap::{Args, ValueEnum};
use serde_json::json;

use super::cursor::{Cursor, ListQuery};
use super::filter::{RowFilter, unserved_line};
use super::text::{FAR_FROM, HELD_FROM, cut, distance, json_line, span};
use super::{Look, failed, open};
use crate::cli::{EXIT_OK, EXIT_USAGE, complain};
use crate::config::{Config, UnlistedSources};
use crate::domain::message::PgTime;
use crate::store::{Page, Profile, Record, Selection, Sort, Status, Store, Walked, When};

/// Rows of a page at most.
const LIMIT_MAX: u16 = 200;

/// `list`.
#[derive(Debug, Args)]
pub struct ListArgs {
    #[command(flatten)]
    filter: RowFilter,
    #[command(flatten)]
    paging: Paging,
    /// What to sort by.
    #[arg(long, value_name = "TIME", value_enum, default_value = "created", help_heading = "Pages")]
    sort: SortName,
    /// The latest first.
    #[arg(long, help_heading = "Pages")]
    desc: bool,
    #[command(flatten)]
    look: Look,
}

/// `stuck` and `gc-preview`.
#[derive(Debug, Args)]
pub struct PreviewArgs {
    #[command(flatten)]
    paging: Paging,
    #[command(flatten)]
    look: Look,
}

/// How much of a list, and from where.
#[derive(Debug, Args)]
#[command(next_help_heading = "Pages")]
struct Paging {
    /// Rows of a page.
    #[arg(long, value_name = "ROWS", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=i64::from(LIMIT_MAX)))]
    limit: u16,
    /// Where a page of the same query ended.
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    /// Every page, one after the other.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
}

/// `--sort`.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum SortName {
    /// When the producer's transaction began: the order of the outbox.
    Created,
    /// When the row last changed.
    Updated,
    /// When the next attempt is due.
    Due,
    /// When it was acknowledged (sent rows only).
    Published,
}

impl SortName {
    fn sort(self) -> Sort {
        match self {
            Self::Created => Sort::Created,
            Self::Updated => Sort::Updated,
            Self::Due => Sort::Due,
            Self::Published => Sort::Published,
        }
    }
}

/// A list to print.
struct List<'a> {
    command: &'static str,
    selection: Selection,
    sort: Sort,
    descending: bool,
    paging: &'a Paging,
    look: &'a Look,
}

/// Prints rows that the filters mean. Without any filter that says otherwise these are the rows that are not finished.
pub(in crate::cli) async fn list(config: &Config, arguments: &ListArgs, out: &mut impl Write) -> io::Result<u8> {
    let mut selection = match arguments.filter.selection() {
        Ok(selection) => selection,
        Err(problem) => {
            complain(&format!("list: {problem}"));
            return Ok(EXIT_USAGE);
        }
    };
    let sort = arguments.sort.sort();
    let status_given = !arguments.filter.status.is_empty();
    if sort == Sort::Published {
        if status_given && !selection.possible().contains(&Status::Sent) {
            complain("list: --sort published is for sent rows: leave --status out, or name sent");
            return Ok(EXIT_USAGE);
        }
        selection.statuses = [Status::Sent].into();
    } else if !status_given && let Some(statuses) = default_statuses(&selection) {
        selection.statuses = statuses.into();
        complain("list: rows that are not finished; --status sent, dead, rejected or any shows others");
    }
    let list = List {
        command: "list",
        selection,
        sort,
        descending: arguments.desc,
        paging: &arguments.paging,
        look: &arguments.look,
    };
    let store = match open(config, "list").await {
        Ok(store) => store,
        Err(code) => return Ok(code),
    };
    print(config, &store, &list, out).await
}

/// The statuses of a list that names none: finished rows are many and old, so they are left out unless a filter asks for single rows
/// or for errors, which sent rows do not have.
fn default_statuses(selection: &Selection) -> Option<[Status; 4]> {
    let single = !selection.ids.is_empty() || !selection.message_ids.is_empty();
    let narrowed = !selection.errors.is_empty() || selection.due.is_some();
    (!single && !narrowed).then_some(Status::LIVE)
}

/// Prints what requeue would take: rows in flight whose lease ran out, by this configuration.
pub(in crate::cli) async fn stuck(config: &Config, arguments: &PreviewArgs, out: &mut impl Write) -> io::Result<u8> {
    let store = match open(config, "stuck").await {
        Ok(store) => store,
        Err(code) => return Ok(code),
    };
    let timeout = config.relay.publishing_timeout;
    let mut selection = Selection {
        statuses: [Status::Publishing].into(),
        updated_before: Some(When::Ago(timeout)),
        ..Selection::default()
    };
    if config.relay.unlisted_sources == UnlistedSources::Ignore {
        // Requeue touches only the sources that this configuration serves.
        selection.sources = config.sources.keys().cloned().collect();
        if selection.sources.is_empty() {
            complain(
                "stuck: this configuration serves no source (relay.unlisted_sources = \"ignore\", and no [sources.…])",
            );
            return Ok(EXIT_OK);
        }
    }
    // No index of a lean table knows which rows are in flight: they are looked for among the waiting ones, in their order.
    let sort = match store.profile() {
        Ok(Profile::Lean) => Sort::Created,
        Ok(Profile::Shared) | Err(_) => Sort::Updated,
    };
    let list =
        List { command: "stuck", selection, sort, descending: false, paging: &arguments.paging, look: &arguments.look };
    print(config, &store, &list, out).await
}

/// Prints what retention would delete: sent rows, oldest first.
pub(in crate::cli) async fn gc_preview(
    config: &Config,
    arguments: &PreviewArgs,
    out: &mut impl Write,
) -> io::Result<u8> {
    let Some(retention) = config.maintenance.retention else {
        complain("gc-preview: retention is off (maintenance.retention): nothing would be deleted");
        return Ok(EXIT_OK);
    };
    let store = match open(config, "gc-preview").await {
        Ok(store) => store,
        Err(code) => return Ok(code),
    };
    let selection = Selection {
        statuses: [Status::Sent].into(),
        published_before: Some(When::Ago(retention)),
        ..Selection::default()
    };
    let list = List {
        command: "gc-preview",
        selection,
        sort: Sort::Published,
        descending: false,
        paging: &arguments.paging,
        look: &arguments.look,
    };
    print(config, &store, &list, out).await
}

/// Prints a page, or all of them.
async fn print(config: &Config, store: &Store, list: &List<'_>, out: &mut impl Write) -> io::Result<u8> {
    let table = format!("{}.{}", config.database.schema, config.database.table);
    let query = ListQuery { table: &table, selection: &list.selection, sort: list.sort, descending: list.descending };
    let mut cursor = match list.paging.cursor.as_deref().map(|text| Cursor::read(text, &query)).transpose() {
        Ok(cursor) => cursor,
        Err(problem) => {
            complain(&format!("{}: {problem}", list.command));
            return Ok(EXIT_USAGE);
        }
    };
    let (walks, unserved) = match store.unserved(&list.selection, list.sort) {
        Ok(unserved) => (unserved.in_order && !unserved.filters.is_empty(), unserved_line(&unserved)),
        Err(error) => return Ok(failed(list.command, &error, list.look, None)),
    };
    // The others have no filters that could be named.
    if let Some(line) = unserved.as_ref().filter(|_| list.command == "list") {
        complain(&format!("{}: {line}", list.command));
    }
    let limit = usize::from(if list.paging.all { LIMIT_MAX } else { list.paging.limit });
    let mut shown = 0_usize;
    loop {
        let read = async {
            let now = match cursor {
                Some(cursor) => cursor.now,
                None => store.now().await?,
            };
            // One more than is shown, to know whether another page follows.
            let page = Page {
                sort: list.sort,
                descending: list.descending,
                after: cursor.map(|cursor| (cursor.value, cursor.outbox_id)),
                created_until: None,
                rows_max: limit + 1,
            };
            let found = if walks {
                store.walk(&list.selection, page, now, list.look.timeout).await?
            } else {
                Walked { rows: store.page(&list.selection, page, now, list.look.timeout).await?, reached: None }
            };
            Ok((now, found))
        };
        let (now, Walked { mut rows, reached }) = match read.await {
            Ok(found) => found,
            Err(error) => return Ok(failed(list.command, &error, list.look, unserved.as_deref())),
        };
        let more = rows.len() > limit || reached.is_some();
        rows.truncate(limit);
        if shown == 0 && !rows.is_empty() && !list.look.json {
            writeln!(out, "{HEADER}")?;
        }
        for row in &rows {
            if list.look.json {
                writeln!(out, "{}", json_line(row))?;
            } else {
                line(row, list, now, out)?;
            }
        }
        shown += rows.len();
        let last = rows.last().map(|row| (row.time(column(list.sort)).unwrap_or(PgTime::INFINITY), row.outbox_id()));
        cursor = reached.or(last).map(|(value, outbox_id)| Cursor { now, value, outbox_id });
        if let Some((until, _)) = reached.filter(|_| !list.paging.all) {
            let (command, timeout) = (list.command, list.look.timeout);
            let side = if list.descending { "after" } else { "before" };
            complain(&format!(
                "{command}: in {timeout:?} only rows created {side} {until} were looked at; --cursor goes on from there"
            ));
        }
        match cursor {
            Some(_) if more && list.paging.all => {}
            Some(cursor) if more => {
                let text = cursor.text(&query);
                if list.look.json {
                    writeln!(out, "{}", json!({ "next_cursor": text }))?;
                } else {
                    writeln!(out, "more: --cursor {text}")?;
                }
                return Ok(EXIT_OK);
            }
            Some(_) | None => {
                if shown == 0 && !list.look.json {
                    complain(&format!("{}: no such rows", list.command));
                }
                return Ok(EXIT_OK);
            }
        }
    }
}

fn column(sort: Sort) -> &'static str {
    match sort {
        Sort::Created => "created_at",
        Sort::Updated => "updated_at",
        Sort::Due => "next_attempt_at",
        Sort::Published => "published_at",
    }
}

const HEADER: &str = "OUTBOX_ID                            STATUS     TRY AGE  DUE    SOURCE       TOPIC        KEY";

/// One row for people: at most 100 characters, and a second line for an error.
fn line(row: &Record, list: &List<'_>, now: PgTime, out: &mut impl Write) -> io::Result<()> {
    let text = |name: &str, width: usize| row.text(name).map_or_else(|| "-".to_owned(), |text| cut(text, width));
    let key = match row.text("message_key") {
        Some("") => "''".to_owned(),
        _ => text("message_key", 11),
    };
    let age = match row.time("created_at") {
        Some(at) if at < now && at > PgTime::NEG_INFINITY => span(now.0.saturating_sub(at.0)),
        _ => "-".to_owned(),
    };
    let id = row.outbox_id().to_string();
    writeln!(
        out,
        "{id} {:<10} {:>3} {age:<4} {:<6} {:<12} {:<12} {key}",
        text("status", 10),
        row.integer("attempt_count").map_or_else(String::new, |tries| cut(&tries.to_string(), 3)),
        due(row, list, now),
        text("source", 12),
        text("destination", 12),
    )?;
    let rejection = row.text("rejection_code").map(|code| match row.text("rejection_detail") {
        Some(detail) => format!("{code}: {detail}"),
        None => code.to_owned(),
    });
    match rejection.as_deref().or(row.text("last_error")) {
        Some(error) => writeln!(out, "    {}", cut(error, 95)),
        None => Ok(()),
    }
}

/// When a waiting row is due; of a row in flight, since when it is.
fn due(row: &Record, list: &List<'_>, now: PgTime) -> String {
    let since = |name: &str| row.time(name).map_or_else(String::new, |at| span(now.0.saturating_sub(at.0).max(0)));
    match (Status::of(row.text("status").unwrap_or_default()), row.time("next_attempt_at")) {
        (Status::Pending | Status::Failed, Some(at)) if at <= now => "now".to_owned(),
        (Status::Pending | Status::Failed, Some(at)) if at >= FAR_FROM => "never".to_owned(),
        (Status::Pending | Status::Failed, Some(at)) if at >= HELD_FROM => "held".to_owned(),
        (Status::Pending | Status::Failed, Some(at)) => distance(now, at),
        (Status::Publishing, _) => format!("-{}", since("updated_at")),
        (Status::Sent, _) if list.sort == Sort::Published => format!("-{}", since("published_at")),
        (Status::Pending | Status::Failed | Status::Sent | Status::Dead | Status::Rejected | Status::Unknown, _) => {
            "-".to_owned()
        }
    }
}
