//! `status`: is it keeping up, what is blocked, and by what; from the table, and from the running relay what only it knows.
//!
//! Nothing here ever changes anything: the server itself would refuse it.

use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use super::operator::{Refused, open_to_look};
use super::pause::{end_words, object, printable};
use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, complain, health, written};
use crate::config::Config;
use crate::domain::message::PgTime;
use crate::domain::pause::{Pause, PauseTarget, Pauses};
use crate::domain::policy::Policy;
use crate::relay::health::Halt;
use crate::relay::{SampleRows, sample};
use crate::store::{PausesError, Store, StoreError};
use crate::telemetry::SourceSample;

/// Columns of a terminal that everything fits into.
const WIDTH: usize = 100;
/// Sent rows counted per source.
const SENT_ROWS: usize = 20_000;
/// How long the running relay is waited for.
const RELAY_TIMEOUT: Duration = Duration::from_secs(1);
/// Rows that could go out and have waited longer are behind.
const BEHIND_AFTER_SECONDS: f64 = 30.0;
/// Pauses, and sources with a breaker, that are named; more are counted.
const NAMED_MAX: usize = 20;

/// `status`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// One JSON object (with --watch one a line) instead of text.
    #[arg(long)]
    json: bool,
    /// Look again every so many seconds [2 when left out] until Ctrl-C.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    watch: Option<u64>,
}

/// Prints the state once, or again and again.
pub(super) async fn status(config: &Config, options: &Options) -> u8 {
    let Some(seconds) = options.watch else {
        return match look(config, options.json).await {
            Ok(text) => written(print(&text)),
            Err((text, code)) => {
                complain(&text);
                code
            }
        };
    };
    tokio::select! {
        code = watch(config, options.json, Duration::from_secs(seconds)) => code,
        // To end it is what was asked for.
        _ = tokio::signal::ctrl_c() => EXIT_OK,
    }
}

async fn watch(config: &Config, json: bool, pause: Duration) -> u8 {
    let redraw = io::stdout().is_terminal() && !json;
    let mut blocks = 0;
    loop {
        let text = match look(config, json).await {
            Ok(text) => text,
            Err((text, EXIT_CONFIG)) => {
                complain(&text);
                return EXIT_CONFIG;
            }
            // An outage is what one watches for.
            Err((text, _)) if json => json!({ "error": text }).to_string() + "\n",
            Err((text, _)) => format!("{}\n", folded(&printable(&text))),
        };
        let text = match (redraw, json, blocks) {
            (true, _, _) => format!("\x1b[H\x1b[2J{text}"),
            (false, false, 1..) => format!("\n{text}"),
            (false, _, _) => text,
        };
        if let Err(error) = print(&text) {
            return written(Err(error));
        }
        blocks = 1;
        tokio::time::sleep(pause).await;
    }
}

fn print(text: &str) -> io::Result<u8> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()?;
    Ok(EXIT_OK)
}

/// What was seen.
struct Seen {
    at: PgTime,
    table: String,
    samples: Vec<(SourceSample, Option<Halt>)>,
    pauses: Result<Pauses, PausesError>,
    /// The running relay's `/status`, or why there is none.
    relay: Result<Value, String>,
}

async fn look(config: &Config, json: bool) -> Result<String, Refused> {
    let asked = ask_relay(config);
    let store = open_to_look(config).await?;
    let failed = |error: StoreError| (error.to_string(), EXIT_FAILED);
    let at = store.now().await.map_err(failed)?;
    let pauses = match store.pauses().await {
        Err(PausesError::Store(error)) => return Err(failed(error)),
        answer => answer,
    };
    let samples = read(config, &store, &pauses, json).await.map_err(failed)?;
    let table = crate::store::qualified(&config.database.schema, &config.database.table);
    let relay = asked.await.unwrap_or_else(|_| Err("it could not be asked".to_owned()));
    let seen = Seen { at, table, samples, pauses, relay };
    Ok(if json { seen.json() } else { seen.text() })
}

async fn read(
    config: &Config,
    store: &Store,
    pauses: &Result<Pauses, PausesError>,
    sent: bool,
) -> Result<Vec<(SourceSample, Option<Halt>)>, StoreError> {
    let sources = store.sources(crate::relay::SOURCES_MAX).await?;
    let policy_of = |source: &str| config.rules(source).map(|rules| rules.policy);
    let nothing = Pauses::default();
    let mut samples =
        sample(store, &sources, pauses.as_ref().unwrap_or(&nothing), SampleRows::QUICK, policy_of).await?;
    if sent {
        for (sample, _) in &mut samples {
            sample.sent = store.count_sent(&sample.source, SENT_ROWS).await?;
            sample.capped |= sample.sent >= SENT_ROWS as u64;
        }
    }
    Ok(samples)
}

/// Asks the relay of this configuration while the table is looked at.
fn ask_relay(config: &Config) -> tokio::task::JoinHandle<Result<Value, String>> {
    let listen = config.http.listen;
    tokio::task::spawn_blocking(move || health::status(listen, RELAY_TIMEOUT))
}

impl Seen {
    fn json(&self) -> String {
        let sources: Vec<Value> = self
            .samples
            .iter()
            .map(|(sample, halt)| {
                json!({
                    "source": sample.source,
                    "policy": sample.policy.map(Policy::name),
                    "pending": sample.pending,
                    "failed": sample.failed,
                    "publishing": sample.publishing,
                    "sent": sample.sent,
                    "dead": sample.dead,
                    "rejected": sample.rejected,
                    "unknown": sample.unknown,
                    "oldest_age_seconds": sample.oldest_age_seconds,
                    "oldest_ready_age_seconds": sample.oldest_ready_age_seconds,
                    "halted_on": halt.as_ref().and_then(|halt| halt.outbox_id),
                    "halted_because": halt.as_ref().map(|halt| halt.reason.as_str()),
                    "breaker": self.breaker(&sample.source),
                    "paused": self.pauses.as_ref().ok().map(|pauses| pauses.holds_source(&sample.source)),
                    "capped": sample.capped,
                })
            })
            .collect();
        let relay = self.relay.as_ref().ok();
        let paused = self.pauses.as_ref().ok().map(|pauses| pauses.list().iter().map(object).collect::<Vec<_>>());
        let whole = json!({
            "at": self.at.rfc3339(),
            "sources": sources,
            "paused": paused,
            "pauses_off": self.pauses.as_ref().err().map(ToString::to_string),
            "parked_topics": relay.map(|status| &status["parked_topics"]),
            "relay": relay.map(|status| json!({
                "instance": status["instance"], "version": status["version"], "live": status["live"],
                "ready": status["ready"]["ready"], "reasons": status["ready"]["reasons"],
                "in_flight_rows": status["in_flight_rows"], "in_flight_bytes": status["in_flight_bytes"],
                "pauses_off": status["pauses_off"],
            })),
            "relay_unknown": self.relay.as_ref().err(),
        });
        whole.to_string() + "\n"
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let mut line = |words: &str| {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{}", folded(words));
        };
        line(&self.verdict());
        line(&format!("table {} at {}", printable(&self.table), self.at.rfc3339()));
        self.relay_lines(&mut line);
        if !self.samples.is_empty() {
            line("");
            line(&format!(
                "{:<24} {:<11} {:>9} {:>8} {:>7} {:>7} {:>8} {:>7} {:>7}",
                "SOURCE", "POLICY", "PENDING", "FAILED", "FLIGHT", "DEAD", "REJECTED", "OLDEST", "READY"
            ));
        }
        for (sample, halt) in &self.samples {
            line(&row(sample));
            for words in self.blocked(sample, halt.as_ref()) {
                line(&format!("  {words}"));
            }
        }
        self.topic_lines(&mut line);
        if let Err(error) = &self.pauses {
            line("");
            line(&format!("pauses: unknown: {error}"));
        }
        text
    }

    /// Whether it keeps up, in one sentence.
    fn verdict(&self) -> String {
        let waiting: u64 = self.samples.iter().map(|(sample, _)| sample.backlog()).sum();
        let capped = if self.samples.iter().any(|(sample, _)| sample.capped) { " or more" } else { "" };
        let ready = self.samples.iter().filter_map(|(sample, _)| sample.oldest_ready_age_seconds).reduce(f64::max);
        match ready {
            None if waiting == 0 => "nothing waits".to_owned(),
            None => format!("{waiting}{capped} rows wait, none of which may go out now"),
            Some(ready) if ready < BEHIND_AFTER_SECONDS => {
                format!("keeping up, {waiting}{capped} rows wait, the oldest ready one for {}", age(ready))
            }
            Some(ready) => format!("BEHIND, {waiting}{capped} rows wait, the oldest ready one for {}", age(ready)),
        }
    }

    fn relay_lines(&self, line: &mut impl FnMut(&str)) {
        let status = match &self.relay {
            Ok(status) => status,
            Err(why) => return line(&format!("relay: unknown ({why})")),
        };
        let word = |value: &Value| printable(value.as_str().unwrap_or("?"));
        let ready = status["ready"]["ready"] == true;
        line(&format!(
            "relay {} {}: {}, {} rows in flight",
            word(&status["instance"]),
            word(&status["version"]),
            if ready { "ready" } else { "NOT READY" },
            status["in_flight_rows"]
        ));
        for reason in status["ready"]["reasons"].as_array().into_iter().flatten() {
            line(&format!(
                "  {} since {}: {}",
                word(&reason["check"]),
                word(&reason["since"]),
                word(&reason["reason"])
            ));
        }
        if let (Some(why), Ok(_)) = (status["pauses_off"].as_str(), &self.pauses) {
            line(&format!("  it does not see what is paused: {}", printable(why)));
        }
    }

    /// What stands against rows of a source.
    fn blocked(&self, sample: &SourceSample, halt: Option<&Halt>) -> Vec<String> {
        let mut words = Vec::new();
        if sample.policy.is_none() && sample.backlog() > 0 {
            words.push("not served by this configuration".to_owned());
        }
        if let Some(Halt { kind, outbox_id, reason }) = halt {
            let row = outbox_id.map(|id| id.to_string()).unwrap_or_default();
            words.push(format!("halted ({}) on {row}: {}", kind.name(), printable(reason)));
        }
        if let Some(reason) = self.breaker(&sample.source) {
            words.push(format!("halted (breaker): {}", printable(&reason)));
        }
        if sample.unknown > 0 {
            words.push(format!(
                "{} rows in a status nobody knows are never sent; in an ordered lane they hold back the rest",
                sample.unknown
            ));
        }
        let Ok(pauses) = &self.pauses else { return words };
        let mut lanes = 0;
        for pause in pauses.list() {
            match &pause.target {
                PauseTarget::Source(name) if *name == sample.source => words.push(paused("paused", pause)),
                PauseTarget::Lane { source_name, message_key } if *source_name == sample.source => {
                    lanes += 1;
                    if lanes <= NAMED_MAX {
                        words.push(paused(&format!("paused lane {message_key:?}"), pause));
                    }
                }
                PauseTarget::Source(_) | PauseTarget::Lane { .. } | PauseTarget::Topic(_) => {}
            }
        }
        if lanes > NAMED_MAX {
            words.push(format!("and {} more paused lanes", lanes - NAMED_MAX));
        }
        words
    }

    /// Topics that are paused or parked, and pauses of sources without a row.
    fn topic_lines(&self, line: &mut impl FnMut(&str)) {
        let mut lines = Vec::new();
        for pause in self.pauses.iter().flat_map(Pauses::list) {
            let absent = |name: &str| !self.samples.iter().any(|(sample, _)| sample.source == name);
            match &pause.target {
                PauseTarget::Topic(topic) => lines.push(paused(&format!("topic {topic:?}: paused"), pause)),
                PauseTarget::Source(name) if absent(name) => {
                    lines.push(paused(&format!("source {name:?} (no rows): paused"), pause));
                }
                PauseTarget::Source(_) | PauseTarget::Lane { .. } => {}
            }
        }
        let relay = self.relay.as_ref().ok();
        for parked in relay.and_then(|status| status["parked_topics"].as_array()).into_iter().flatten() {
            let word = |name: &str| printable(parked[name].as_str().unwrap_or("?"));
            lines.push(format!("topic {:?}: parked since {}: {}", word("topic"), word("since"), word("reason")));
        }
        if relay.is_none() {
            lines.push("parked topics, breakers: unknown, only a running relay knows them".to_owned());
        }
        if !lines.is_empty() {
            line("");
        }
        let more = lines.len().saturating_sub(NAMED_MAX);
        lines.iter().take(NAMED_MAX).for_each(|words| line(words));
        if more > 0 {
            line(&format!("and {more} more"));
        }
    }

    /// Why the breaker of a source is open, when the running relay says so.
    fn breaker(&self, source: &str) -> Option<String> {
        let sources = self.relay.as_ref().ok()?["sources"].as_array()?;
        let halt = &sources.iter().find(|found| found["source"] == source)?["halt"];
        (halt["kind"] == "breaker").then(|| halt["reason"].as_str().unwrap_or_default().to_owned())
    }
}

fn paused(what: &str, pause: &Pause) -> String {
    let reason = pause.reason.as_deref().map(|reason| format!(": {}", printable(reason))).unwrap_or_default();
    format!("{what} since {} by {}, {}{reason}", pause.since.rfc3339(), printable(&pause.by), end_words(pause))
}

fn row(sample: &SourceSample) -> String {
    let policy = match sample.policy {
        Some(Policy::PerKeyHeadOfLine) => "per_key",
        Some(Policy::PerSourceStream) => "per_source",
        Some(Policy::StopTheLine) => "stop_line",
        Some(Policy::BestEffort) => "best_effort",
        None => "-",
    };
    let seconds = |age_seconds: Option<f64>| age_seconds.map_or_else(|| "-".to_owned(), age);
    let count = |rows: u64| if sample.capped && rows > 0 { format!("{rows}+") } else { rows.to_string() };
    format!(
        "{:<24} {policy:<11} {:>9} {:>8} {:>7} {:>7} {:>8} {:>7} {:>7}",
        shortened(&printable(&sample.source), 24),
        count(sample.pending),
        count(sample.failed),
        count(sample.publishing),
        count(sample.dead),
        count(sample.rejected),
        seconds(sample.oldest_age_seconds),
        seconds(sample.oldest_ready_age_seconds),
    )
}

/// An age in at most six characters.
fn age(seconds: f64) -> String {
    const DAY: f64 = 86_400.0;
    if seconds < 10.0 {
        return format!("{seconds:.1}s");
    }
    let (large, small, per, units) = match seconds {
        ..60.0 => return format!("{seconds:.0}s"),
        ..3_600.0 => (60.0, 1.0, 60.0, ("m", "s")),
        ..DAY => (3_600.0, 60.0, 60.0, ("h", "m")),
        _ if seconds < 100.0 * DAY => (DAY, 3_600.0, 24.0, ("d", "h")),
        _ => return format!("{:.0}d", (seconds / DAY).floor()),
    };
    format!("{:.0}{}{:02.0}{}", (seconds / large).floor(), units.0, (seconds / small % per).floor(), units.1)
}

/// A line folded at spaces where it does not fit, with what follows indented; what is too long for that is cut.
fn folded(line: &str) -> String {
    const INDENT: &str = "      ";
    const LINES_MAX: usize = 4;
    let mut lines: Vec<String> = Vec::new();
    let mut rest: Vec<char> = line.chars().collect();
    while rest.len() > WIDTH && lines.len() + 1 < LINES_MAX {
        let space = (WIDTH / 2..=WIDTH).rev().find(|&at| rest[at] == ' ');
        let tail = rest.split_off(space.unwrap_or(WIDTH));
        lines.push(rest.into_iter().collect());
        rest = INDENT.chars().chain(tail.into_iter().skip_while(|c| *c == ' ')).collect();
    }
    lines.push(shortened(&rest.into_iter().collect::<String>(), WIDTH));
    lines.join("\n")
}

/// At most so many characters, the last of which says that there were more.
fn shortened(text: &str, chars_max: usize) -> String {
    if text.chars().count() <= chars_max {
        return text.to_owned();
    }
    text.chars().take(chars_max - 1).chain(['…']).collect()
}
