//! `pause` and `resume`: holds a source, a topic or a lane back, on every relay and over restarts, and lets it go on.
//!
//! Nothing here ever changes a row, but for the one that halts a source, which `resume` makes due.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use serde_json::{Value, json};
use uuid::Uuid;

use super::health;
use super::operator::{open, open_beside};
pub(super) use super::rows::text::escaped as printable;
use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STATE, EXIT_USAGE, complain, say};
use crate::config::{Config, duration_of};
use crate::domain::message::PgTime;
use crate::domain::pause::{Pause, PauseTarget};
use crate::domain::policy::Policy;
use crate::store::{PauseEnd, PausesError, Store, StoreError};

/// How long the relay may take to answer.
const RELAY_MAX: Duration = Duration::from_secs(2);
/// Longest `--for`: longer is for ever, and that is what neither option says.
const FOR_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// What is paused or resumed.
#[derive(Debug, Args)]
struct Named {
    /// The source.
    #[arg(conflicts_with = "topic")]
    source: Option<String>,
    /// The topic, whatever the source.
    #[arg(long, value_name = "TOPIC")]
    topic: Option<String>,
    /// Of the source, only the rows with this key.
    #[arg(long, value_name = "KEY", requires = "source", conflicts_with = "topic")]
    key: Option<String>,
}

impl Named {
    fn target(&self) -> Option<PauseTarget> {
        match (&self.source, &self.key, &self.topic) {
            (Some(source), Some(key), _) => {
                Some(PauseTarget::Lane { source_name: source.clone(), message_key: key.clone() })
            }
            (Some(source), None, _) => Some(PauseTarget::Source(source.clone())),
            (None, _, Some(topic)) => Some(PauseTarget::Topic(topic.clone())),
            (None, _, None) => None,
        }
    }
}

/// `pause`.
#[derive(Debug, Args)]
pub(super) struct PauseOptions {
    #[command(flatten)]
    named: Named,
    /// When the pause ends by itself, such as 2026-01-02T03:04:05Z.
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "lasting")]
    until: Option<Timestamp>,
    /// How long the pause lasts, such as 2h.
    #[arg(long = "for", id = "lasting", value_name = "DURATION", value_parser = duration)]
    lasting: Option<Duration>,
    /// Why: shown by `pause --list`, `status`, /status and the relays' logs.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Print what is paused, the oldest first, and change nothing.
    #[arg(long, conflicts_with_all = ["source", "topic", "key", "until", "lasting", "reason", "dry_run"])]
    list: bool,
    /// One JSON object a line instead of text.
    #[arg(long)]
    json: bool,
    /// Say what would be done and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// `resume`.
#[derive(Debug, Args)]
pub(super) struct ResumeOptions {
    #[command(flatten)]
    named: Named,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
    /// Say what would be done and change nothing.
    #[arg(long)]
    dry_run: bool,
}

fn time(text: &str) -> Result<Timestamp, String> {
    text.parse().map_err(|_| "expected a time with its zone, such as 2026-01-02T03:04:05Z".to_owned())
}

fn duration(text: &str) -> Result<Duration, String> {
    match duration_of(text) {
        Some(duration) if !duration.is_zero() && duration <= FOR_MAX => Ok(duration),
        Some(_) => {
            Err("expected more than nothing and at most 100 years; leave --for out to pause until `resume`".to_owned())
        }
        None => Err("expected a duration with its unit, such as 90s, 30m or 2h".to_owned()),
    }
}

/// Pauses, or lists what is paused.
pub(super) async fn pause(config: &Config, options: &PauseOptions) -> u8 {
    if options.list {
        return list(config, options.json).await;
    }
    let Some(target) = options.named.target() else {
        complain("say what to pause: SOURCE, SOURCE --key KEY or --topic TOPIC (or --list to see what is paused)");
        return EXIT_USAGE;
    };
    let store = match open_beside(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    let end = match (options.until, options.lasting) {
        (Some(until), _) => PauseEnd::At(PgTime::from_unix_micros(until.as_microsecond())),
        (None, Some(lasting)) => PauseEnd::In(lasting),
        (None, None) => PauseEnd::Never,
    };
    let paused = match store.pause(&target, end, options.reason.as_deref(), options.dry_run).await {
        Ok(paused) => paused,
        Err(error) => return refused(&error),
    };
    if options.json {
        let mut object = object(&paused.pause);
        object["was_paused"] = json!(paused.before);
        object["paused"] = json!(!options.dry_run);
        say(&object.to_string());
    } else {
        let (done, what) = (if options.dry_run { "would pause" } else { "paused" }, words(&target));
        let Pause { since, .. } = &paused.pause;
        let before = if paused.before { format!(" (it was since {})", since.rfc3339()) } else { String::new() };
        say(&format!("{done} {what}{before}, {}", end_words(&paused.pause)));
        if !options.dry_run {
            say("relays claim no more of its rows from now on (5 s at most); what is in flight is finished");
        }
    }
    note_absence(config, &store, &target).await;
    EXIT_OK
}

/// Says so when nothing there is would be held back: a pause may come first, but a slip of the pen is more likely.
async fn note_absence(config: &Config, store: &Store, target: &PauseTarget) {
    match store.waits(target).await {
        Ok(true) => {}
        Ok(false) => match target {
            PauseTarget::Source(name) => {
                let known = store.sources(crate::relay::SOURCES_MAX).await.unwrap_or_default();
                let known = known.iter().map(String::as_str).chain(config.sources.keys().map(String::as_str));
                let meant = crate::config::nearest(name, known)
                    .map(|meant| format!("; did you mean {meant:?}?"))
                    .unwrap_or_default();
                complain(&format!("note: the table has no row of source {name:?}{meant}"));
            }
            PauseTarget::Topic(name) => complain(&format!("note: no row that goes to topic {name:?} was seen waiting")),
            PauseTarget::Lane { source_name, message_key } => {
                complain(&format!("note: no row of source {source_name:?} with the key {message_key:?} waits"));
            }
        },
        Err(error) => complain(&format!("note: whether it holds back any row could not be seen: {error}")),
    }
}

async fn list(config: &Config, json: bool) -> u8 {
    // The outbox table is not needed: who may read the side table may know.
    let store = match Store::read_only(config) {
        Ok(store) => store,
        Err(error) => {
            complain(&error.to_string());
            return EXIT_CONFIG;
        }
    };
    match store.pauses().await {
        Ok(pauses) => {
            for pause in pauses.list() {
                say(&if json { object(pause).to_string() } else { line(pause) });
            }
            if pauses.list().is_empty() && !json {
                say("nothing is paused");
            }
            EXIT_OK
        }
        Err(error) => refused(&error),
    }
}

/// Lets a source, a topic or a lane go on.
pub(super) async fn resume(config: &Config, options: &ResumeOptions) -> u8 {
    let Some(target) = options.named.target() else {
        complain("say what to resume: SOURCE, SOURCE --key KEY or --topic TOPIC");
        return EXIT_USAGE;
    };
    match &target {
        PauseTarget::Source(source) => resume_source(config, source, &target, options).await,
        PauseTarget::Topic(_) | PauseTarget::Lane { .. } => {
            let store = match open_beside(config).await {
                Ok(store) => store,
                Err(code) => return code,
            };
            match store.unpause(&target, options.dry_run).await {
                Ok(Some(pause)) => {
                    tell_ended(&pause, options);
                    EXIT_OK
                }
                Ok(None) => not_paused(&target, options),
                Err(error) => refused(&error),
            }
        }
    }
}

/// Ends the pause of a source, and makes the row due that halts it.
async fn resume_source(config: &Config, source: &str, target: &PauseTarget, options: &ResumeOptions) -> u8 {
    let store = match open(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    let ResumeOptions { json, dry_run, .. } = *options;
    let ended = match store.unpause(target, dry_run).await {
        Ok(ended) => ended,
        // A source may be halted all the same.
        Err(PausesError::Missing) => None,
        Err(error @ PausesError::Forbidden { .. }) => match store.pauses().await {
            Ok(pauses) if !pauses.holds_source(source) => None,
            Ok(_) | Err(_) => return refused(&error),
        },
        Err(error) => return refused(&error),
    };
    // A source that is not served may hold a row of the time when it was.
    let policy = config.rules(source).map_or(Policy::BestEffort, |rules| rules.policy);
    let freed = match free(config, &store, source, policy, dry_run).await {
        Ok(freed) => freed,
        Err(error) => {
            complain(&error.to_string());
            return EXIT_FAILED;
        }
    };
    if json {
        let mut object =
            json!({ "source": source, "outbox_id": freed.row(), "resumed": false, "was_paused": ended.is_some() });
        if ended.is_some() || freed != Freed::Nothing {
            object["resumed"] = json!(!dry_run);
        } else {
            object["error"] = json!("not_halted");
        }
        say(&object.to_string());
    } else {
        if let Some(pause) = &ended {
            tell_ended(pause, options);
        }
        let (would, done) = if dry_run { ("would resume", "would be") } else { ("resumed", "is") };
        match freed {
            Freed::Row(id) => say(&format!("{would} {source:?}: its row {id} {done} due at once")),
            Freed::Told if ended.is_none() && dry_run => {
                say(&format!("would tell the running relays to go on with {source:?}"));
            }
            Freed::Told if ended.is_none() => say(&format!("told the running relays to go on with {source:?}")),
            Freed::Told | Freed::Nothing => {}
        }
    }
    note_other_pauses(&store, source).await;
    if ended.is_none() && freed == Freed::Nothing {
        complain(&format!("source {source:?} is neither paused nor halted: nothing to resume"));
        return EXIT_STATE;
    }
    EXIT_OK
}

/// What made a halted source go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Freed {
    /// This row was what it waited for.
    Row(Uuid),
    /// No row halts it, but a breaker might: only the running relays know, and they were told.
    Told,
    /// There was nothing to be done.
    Nothing,
}

impl Freed {
    fn row(self) -> Option<Uuid> {
        match self {
            Self::Row(id) => Some(id),
            Self::Told | Self::Nothing => None,
        }
    }
}

async fn free(
    config: &Config,
    store: &Store,
    source: &str,
    policy: Policy,
    dry_run: bool,
) -> Result<Freed, StoreError> {
    if let Some(id) = store.resume(source, policy, dry_run).await? {
        return Ok(Freed::Row(id));
    }
    // Asked before the relays are told, and only where nothing but a breaker could hold the source.
    let may_be_broken = policy != Policy::StopTheLine && !moves(config, source);
    if !dry_run {
        store.tell_resumed(source).await?;
    }
    Ok(if may_be_broken && store.waits(&PauseTarget::Source(source.to_owned())).await? {
        Freed::Told
    } else {
        Freed::Nothing
    })
}

/// Whether the relay of this configuration serves the source and says that nothing halts it.
fn moves(config: &Config, source: &str) -> bool {
    let Ok(status) = health::status(config.http.listen, RELAY_MAX) else { return false };
    let sources = status["sources"].as_array().map_or(&[][..], Vec::as_slice);
    sources
        .iter()
        .find(|shown| shown["source"] == source)
        .is_some_and(|shown| shown["halt"].is_null() && shown["elsewhere"] == false)
}

/// Says what else holds rows of the source back.
async fn note_other_pauses(store: &Store, source: &str) {
    let Ok(pauses) = store.pauses().await else { return };
    let rows = pauses.rows_of(source);
    if !rows.keys.is_empty() {
        complain(&format!("note: {} of its lanes are paused: keiro-relay pause --list", rows.keys.len()));
    }
    if !rows.topics.is_empty() {
        complain(&format!("note: {} topics are paused: keiro-relay pause --list", rows.topics.len()));
    }
}

fn tell_ended(pause: &Pause, options: &ResumeOptions) {
    if options.json {
        if let PauseTarget::Topic(_) | PauseTarget::Lane { .. } = &pause.target {
            let mut object = object(pause);
            object["was_paused"] = json!(true);
            object["resumed"] = json!(!options.dry_run);
            say(&object.to_string());
        }
        return;
    }
    let done = if options.dry_run { "would resume" } else { "resumed" };
    let Pause { target, since, by, reason, .. } = pause;
    let reason = reason.as_deref().map(|reason| format!(": {}", printable(reason))).unwrap_or_default();
    say(&format!("{done} {}, paused since {} by {}{reason}", words(target), since.rfc3339(), printable(by)));
}

fn not_paused(target: &PauseTarget, options: &ResumeOptions) -> u8 {
    if options.json {
        let mut object = described(target);
        object["error"] = json!("not_paused");
        say(&object.to_string());
    }
    complain(&format!("{} is not paused: nothing to resume", words(target)));
    EXIT_STATE
}

fn refused(error: &PausesError) -> u8 {
    complain(&error.to_string());
    match error {
        PausesError::Missing | PausesError::Forbidden { .. } => EXIT_CONFIG,
        PausesError::Over => EXIT_USAGE,
        PausesError::TooMany => EXIT_STATE,
        PausesError::Store(StoreError::Setting(_)) => EXIT_CONFIG,
        PausesError::Store(_) => EXIT_FAILED,
    }
}

fn words(target: &PauseTarget) -> String {
    match target {
        PauseTarget::Source(name) => format!("source {name:?}"),
        PauseTarget::Topic(name) => format!("topic {name:?}"),
        PauseTarget::Lane { source_name, message_key } => format!("lane {message_key:?} of source {source_name:?}"),
    }
}

pub(super) fn end_words(pause: &Pause) -> String {
    pause.until.map_or_else(|| "until somebody resumes it".to_owned(), |until| format!("until {}", until.rfc3339()))
}

pub(super) fn line(pause: &Pause) -> String {
    let reason = pause.reason.as_deref().map(|reason| format!(": {}", printable(reason))).unwrap_or_default();
    format!(
        "{} since {} by {}, {}{reason}",
        words(&pause.target),
        pause.since.rfc3339(),
        printable(&pause.by),
        end_words(pause)
    )
}

fn described(target: &PauseTarget) -> Value {
    let (source, topic) = match target {
        PauseTarget::Source(name) | PauseTarget::Lane { source_name: name, .. } => (Some(name), None),
        PauseTarget::Topic(name) => (None, Some(name)),
    };
    json!({ "kind": target.kind(), "source": source, "topic": topic, "key": target.message_key() })
}

pub(super) fn object(pause: &Pause) -> Value {
    let mut object = described(&pause.target);
    object["since"] = json!(pause.since.rfc3339());
    object["until"] = json!(pause.until.map(PgTime::rfc3339));
    object["by"] = json!(pause.by);
    object["reason"] = json!(pause.reason);
    object
}
