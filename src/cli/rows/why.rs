//! `why`: why a row is not on Kafka yet, in one paragraph.
//!
//! Nothing here ever guesses: what only a running relay knows is asked of it, and called unknown when none answers.

use std::io::{self, Write};
use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use serde::Deserialize;
use uuid::Uuid;

use super::explain::explain;
use super::filter::parse_id;
use super::text::{json_line, wrapped};
use super::{Look, failed, open};
use crate::cli::{EXIT_OK, EXIT_STATE, complain, health, pause};
use crate::config::Config;
use crate::domain::message::{PgTime, Position};
use crate::domain::policy::Policy;
use crate::store::{Ahead, LaneHead, PausesError, Record, Status, Store, StoreError};

/// How long the relay has to answer.
const RELAY_MAX: Duration = Duration::from_secs(3);
/// Width of the paragraph.
const WIDTH: usize = 100;

/// `why`.
#[derive(Debug, Args)]
pub struct WhyArgs {
    /// Its outbox_id.
    #[arg(value_name = "OUTBOX_ID", value_parser = parse_id)]
    id: Uuid,
    #[command(flatten)]
    look: Look,
}

/// Everything that bears on one row.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The row.
    pub outbox_id: Uuid,
    /// Its source.
    pub source_name: String,
    /// Its topic.
    pub topic: String,
    /// Its key.
    pub message_key: Option<String>,
    /// Its status, as it stands in the table.
    pub status: String,
    /// Attempts spent, the one in flight included.
    pub attempt_count: i64,
    /// When it is due.
    pub next_attempt_at: PgTime,
    /// When it last changed: while it is in flight, when it was claimed.
    pub updated_at: PgTime,
    /// When it was acknowledged.
    pub published_at: Option<PgTime>,
    /// Why its last attempt failed, or why it was rejected.
    pub error: Option<String>,
    /// The database's time.
    pub now: PgTime,
    /// The policy of its source; `None` when this configuration does not serve it.
    pub policy: Option<Policy>,
    /// Attempts that a row of its source may spend.
    pub max_attempts: u32,
    /// How long a claim is its relay's.
    pub publishing_timeout: Duration,
    /// What waits before it in its lane.
    pub ahead: Option<Ahead>,
    /// The pauses that hold it back, one sentence each.
    pub pauses: Vec<String>,
    /// What the running relay says, or why it says nothing.
    pub relay: Result<RelayStatus, String>,
    /// Instances with a session in this database; `None` when that cannot be seen.
    pub relays: Option<Vec<String>>,
}

/// What `/status` says, as far as it bears on one row.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct RelayStatus {
    /// Which relay.
    pub instance: String,
    /// Whether it does its work.
    pub ready: Ready,
    /// Its sources.
    #[serde(default)]
    pub sources: Vec<SourceStatus>,
    /// The topics it leaves alone for a while.
    #[serde(default)]
    pub parked_topics: Vec<ParkedTopic>,
}

/// Readiness in `/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Ready {
    /// The verdict.
    pub ready: bool,
    /// Why not.
    #[serde(default)]
    pub reasons: Vec<Reason>,
}

/// Why a relay is not ready.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Reason {
    /// Which check.
    pub check: String,
    /// Why.
    pub reason: String,
}

/// A source in `/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct SourceStatus {
    /// Its name.
    pub source: String,
    /// Another relay serves it by preference.
    #[serde(default)]
    pub elsewhere: bool,
    /// How it is halted.
    pub halt: Option<Halt>,
    /// The row it is halted on.
    pub halted_on: Option<Uuid>,
}

/// A halt in `/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct Halt {
    /// How.
    pub kind: String,
    /// Why.
    pub reason: String,
    /// Since when.
    pub since: String,
}

/// A parked topic in `/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
pub struct ParkedTopic {
    /// The topic.
    pub topic: String,
    /// Why.
    pub reason: String,
    /// Since when.
    pub since: String,
    /// When it is tried again.
    pub probe_at: String,
}

/// Prints the answer; exit 3 when there is no such row.
pub(in crate::cli) async fn why(config: &Config, arguments: &WhyArgs, out: &mut impl Write) -> io::Result<u8> {
    let store = match open(config, "why").await {
        Ok(store) => store,
        Err(code) => return Ok(code),
    };
    let facts = match gather(config, &store, arguments).await {
        Ok(Some(facts)) => facts,
        Ok(None) => {
            complain(&format!("why: there is no row with outbox_id {}", arguments.id));
            return Ok(EXIT_STATE);
        }
        Err(error) => return Ok(failed("why", &error, &arguments.look, None)),
    };
    let explanation = explain(&facts);
    if arguments.look.json {
        writeln!(out, "{}", json_line(&explanation))?;
    } else {
        writeln!(out, "{}", wrapped(&explanation.text, WIDTH))?;
    }
    Ok(EXIT_OK)
}

async fn gather(config: &Config, store: &Store, arguments: &WhyArgs) -> Result<Option<Facts>, StoreError> {
    let bound = arguments.look.timeout;
    let Some(row) = store.row(arguments.id, false, bound).await? else { return Ok(None) };
    let text = |name: &str| row.text(name).unwrap_or_default().to_owned();
    let time = |name: &str| row.time(name).unwrap_or(PgTime::INFINITY);
    let rules = config.rules(row.text("source").unwrap_or_default());
    let waiting = matches!(Status::of(&text("status")), Status::Pending | Status::Failed);
    let policy = rules.map(|rules| rules.policy);
    let ahead = match (policy, row.text("message_key")) {
        (Some(Policy::PerKeyHeadOfLine), None) | (Some(Policy::BestEffort) | None, _) => None,
        _ if !waiting => None,
        (Some(Policy::PerKeyHeadOfLine), key) => ahead(store, &row, key, bound).await?,
        (Some(Policy::PerSourceStream | Policy::StopTheLine), _) => ahead(store, &row, None, bound).await?,
    };
    let head = ahead.as_ref().map(|ahead| ahead.head.clone());
    let error = row.text("rejection_code").map(|code| match row.text("rejection_detail") {
        Some(detail) => format!("{code}: {detail}"),
        None => code.to_owned(),
    });
    Ok(Some(Facts {
        outbox_id: row.outbox_id(),
        source_name: text("source"),
        topic: text("destination"),
        message_key: row.text("message_key").map(str::to_owned),
        status: text("status"),
        attempt_count: row.integer("attempt_count").unwrap_or_default(),
        next_attempt_at: time("next_attempt_at"),
        updated_at: time("updated_at"),
        published_at: row.time("published_at"),
        error: error.or_else(|| row.text("last_error").map(str::to_owned)),
        now: store.now().await?,
        policy,
        max_attempts: rules.map_or(config.defaults.max_attempts, |rules| rules.max_attempts),
        publishing_timeout: config.relay.publishing_timeout,
        ahead,
        pauses: pauses(store, &row, head.as_ref()).await?,
        relay: ask(config.http.listen),
        relays: store.connected_relays(bound).await?,
    }))
}

async fn ahead(store: &Store, row: &Record, key: Option<&str>, bound: Duration) -> Result<Option<Ahead>, StoreError> {
    let source = row.text("source").unwrap_or_default();
    let created_at = row.time("created_at").unwrap_or(PgTime::INFINITY);
    store.ahead(source, key, Position { created_at, outbox_id: row.outbox_id() }, bound).await
}

/// What an operator paused that holds back the row, or the first row of its lane; without the side table nothing is paused.
async fn pauses(store: &Store, row: &Record, head: Option<&LaneHead>) -> Result<Vec<String>, StoreError> {
    let pauses = match store.pauses().await {
        Ok(pauses) => pauses,
        Err(PausesError::Store(error)) => return Err(error),
        Err(_) => return Ok(Vec::new()),
    };
    let source = row.text("source").unwrap_or_default();
    let topic = row.text("destination").unwrap_or_default();
    let own = pauses.holding(source, topic, row.text("message_key")).map(|pause| (pause, "It is paused"));
    let head = head.into_iter().flat_map(|head| pauses.holding(source, &head.topic, head.message_key.as_deref()));
    let mut found: Vec<_> = own.collect();
    for pause in head {
        if !found.iter().any(|(known, _)| *known == pause) {
            found.push((pause, "The first row of its lane is paused"));
        }
    }
    Ok(found.into_iter().map(|(pause, whose)| format!("{whose}: {}.", pause::line(pause))).collect())
}

/// What the relay of this configuration says of itself.
fn ask(listen: SocketAddr) -> Result<RelayStatus, String> {
    serde_json::from_value(health::status(listen, RELAY_MAX)?)
        .map_err(|_| format!("what answers on http.listen ({listen}) is no keiro-relay of this version"))
}
