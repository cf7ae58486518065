//! The filters of `list`, which the commands that change rows take as well.
//!
//! Nothing here ever asks a server: what was typed becomes a [`Selection`], or it is refused with what would be right.

use clap::{Args, ValueEnum};
use uuid::Uuid;

use crate::domain::message::PgTime;
use crate::store::{Filter, Selection, Status, Unserved, When};

/// Which rows. The same filter given several times means any of its values; different filters all have to hold.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Filters (each may be repeated: any of its values; all filters have to hold)")]
pub struct RowFilter {
    /// The row with this outbox_id.
    #[arg(long, value_name = "UUID", value_delimiter = ',', value_parser = parse_id)]
    pub id: Vec<Uuid>,
    /// Rows of this source.
    #[arg(long, value_name = "NAME")]
    pub source: Vec<String>,
    /// Rows in this status: pending, failed, publishing, sent, dead, rejected; `unknown`: none of these; `any`: whatever it is.
    #[arg(long, value_name = "STATUS", value_enum, value_delimiter = ',', hide_possible_values = true)]
    pub status: Vec<StatusName>,
    /// Rows for this Kafka topic.
    #[arg(long, value_name = "NAME")]
    pub topic: Vec<String>,
    /// Rows with this key; '' is a key, too.
    #[arg(long, value_name = "KEY")]
    pub key: Vec<String>,
    /// Rows of this event type.
    #[arg(long, value_name = "TYPE")]
    pub event_type: Vec<String>,
    /// The row with this message_id, which is unique within a source.
    #[arg(long, value_name = "ID")]
    pub message_id: Vec<String>,
    /// Rows created at or after this time: RFC 3339, or so long ago, such as `2h` or `3d 12h`.
    #[arg(long, value_name = "TIME", value_parser = parse_when, allow_hyphen_values = true)]
    pub since: Option<When>,
    /// Rows created before this time.
    #[arg(long, value_name = "TIME", value_parser = parse_when, allow_hyphen_values = true)]
    pub until: Option<When>,
    /// Rows with this error: their rejection_code, or what stands before the first colon of last_error.
    #[arg(long, value_name = "CODE", value_parser = parse_code)]
    pub error: Vec<String>,
    /// Waiting rows (pending, failed) whose next attempt is due.
    #[arg(long, conflicts_with = "not_due")]
    pub due: bool,
    /// Waiting rows whose next attempt is not due yet.
    #[arg(long)]
    pub not_due: bool,
}

/// A value of `--status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StatusName {
    /// Waiting.
    Pending,
    /// Waiting after a failure.
    Failed,
    /// In flight.
    Publishing,
    /// On Kafka.
    Sent,
    /// Attempts spent.
    Dead,
    /// Can never be accepted.
    Rejected,
    /// None of the contract's.
    Unknown,
    /// Whatever it is.
    Any,
}

impl StatusName {
    fn status(self) -> Option<Status> {
        Some(match self {
            Self::Pending => Status::Pending,
            Self::Failed => Status::Failed,
            Self::Publishing => Status::Publishing,
            Self::Sent => Status::Sent,
            Self::Dead => Status::Dead,
            Self::Rejected => Status::Rejected,
            Self::Unknown => Status::Unknown,
            Self::Any => return None,
        })
    }
}

impl RowFilter {
    /// What was asked for; without any filter, every row.
    ///
    /// # Errors
    /// Filters that exclude each other, whatever the table holds.
    pub fn selection(&self) -> Result<Selection, String> {
        let never = match (self.since, self.until) {
            (Some(When::At(since)), Some(When::At(until))) => since >= until,
            (Some(When::Ago(since)), Some(When::Ago(until))) => since <= until,
            (Some(_) | None, Some(_) | None) => false,
        };
        if never {
            return Err("--since is not before --until: no row can be between them".to_owned());
        }
        let any = self.status.contains(&StatusName::Any);
        let statuses = self.status.iter().filter_map(|name| name.status()).filter(|_| !any).collect();
        let selection = Selection {
            ids: self.id.clone(),
            sources: self.source.clone(),
            statuses,
            topics: self.topic.clone(),
            keys: self.key.clone(),
            event_types: self.event_type.clone(),
            message_ids: self.message_id.clone(),
            since: self.since,
            until: self.until,
            errors: self.error.clone(),
            published_before: None,
            updated_before: None,
            due: if self.due { Some(true) } else { self.not_due.then_some(false) },
        };
        if selection.possible().is_empty() {
            let what = if selection.due.is_some() {
                "--due and --not-due are about waiting rows: of --status only pending and failed go with them"
            } else {
                "--error is about rows that failed or were rejected: a sent row has none"
            };
            return Err(what.to_owned());
        }
        Ok(selection)
    }

    /// Whether nothing was asked for at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.status.is_empty() && self.selection().is_ok_and(|selection| selection.is_empty())
    }
}

/// The line that says what no index serves, for standard error; `None` when there is nothing to say.
#[must_use]
pub fn unserved_line(unserved: &Unserved) -> Option<String> {
    if unserved.is_empty() {
        return None;
    }
    let mut parts = Vec::new();
    if !unserved.filters.is_empty() {
        let flags: Vec<&str> = unserved.filters.iter().map(|filter| flag(*filter)).collect();
        parts.push(format!(
            "no index serves {}: rows are read one by one, which takes long on a large table",
            flags.join(", ")
        ));
    }
    if !unserved.missing_indexes.is_empty() {
        let names: Vec<&str> = unserved.missing_indexes.iter().map(String::as_str).collect();
        parts.push(format!("slow: missing index {}", names.join(", ")));
    }
    Some(parts.join("; "))
}

/// The flag of a filter.
fn flag(filter: Filter) -> &'static str {
    match filter {
        Filter::Source => "--source",
        Filter::Status => "--status",
        Filter::Topic => "--topic",
        Filter::Key => "--key",
        Filter::EventType => "--event-type",
        Filter::Since => "--since",
        Filter::Until => "--until",
        Filter::Error => "--error",
        Filter::Due => "--due/--not-due",
        Filter::Sort => "--sort",
    }
}

/// An outbox_id.
///
/// # Errors
/// What it should look like.
pub fn parse_id(text: &str) -> Result<Uuid, String> {
    text.trim().parse().map_err(|_| "an outbox_id is a UUID such as 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a".to_owned())
}

/// A time: RFC 3339, or a duration back.
///
/// # Errors
/// What it should look like.
pub fn parse_when(text: &str) -> Result<When, String> {
    let text = text.trim();
    if let Ok(at) = text.parse::<jiff::Timestamp>() {
        return Ok(When::At(PgTime::from_unix_micros(at.as_microsecond())));
    }
    if let Ok(ago) = humantime::parse_duration(text.strip_suffix("ago").unwrap_or(text).trim()) {
        return Ok(When::Ago(ago));
    }
    Err("expected a time with its zone such as 2026-01-02T03:04:05Z, or a duration back such as 90s, 15m, 2h, 3d"
        .to_owned())
}

fn parse_code(text: &str) -> Result<String, String> {
    let code = text.trim().trim_end_matches(':');
    if code.is_empty() || code.contains(':') {
        return Err(
            "expected what stands before the first colon of last_error, such as kafka.message_too_large".to_owned()
        );
    }
    Ok(code.to_owned())
}
