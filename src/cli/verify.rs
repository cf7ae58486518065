//! `verify`: the rows that are marked sent, against what their topics hold.
//!
//! Nothing here ever changes a row, a topic or a group's offset. Memory is bounded by the number of rows of the range, which is capped.

use std::collections::HashMap;
use std::io::{self, Write};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use uuid::Uuid;

use super::doctor::printable;
use super::rows::filter::parse_when;
use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_USAGE, complain, written};
use crate::config::Config;
use crate::domain::message::PgTime;
use crate::domain::verify::{Finding, Ledger, Memory, Verdict};
use crate::publish::kafka::inspect::{self, Hidden, InspectError};
use crate::publish::kafka::read::{Span, TopicReader};
use crate::store::{InspectError as SchemaError, Instants, RowName, SentRange, Store, When};

/// Rows of one call, at 80 bytes each.
const ROWS_MAX: usize = 5_000_000;
/// How far clocks of database and brokers may be apart for a record to be found by its time.
const CLOCKS: Duration = Duration::from_secs(60);

/// What is to be compared.
#[derive(Debug, Clone, Args)]
pub(super) struct Options {
    /// Rows of this source.
    #[arg(long, value_name = "NAME", required_unless_present = "topic")]
    source: Option<String>,
    /// Rows for this topic.
    #[arg(long, value_name = "NAME")]
    topic: Option<String>,
    /// Rows published at or after this time: RFC 3339, or so long ago, such as `2h` or `3d 12h`.
    #[arg(long, value_name = "TIME", value_parser = parse_when, allow_hyphen_values = true)]
    since: When,
    /// Rows published before this time [default: now].
    #[arg(long, value_name = "TIME", value_parser = parse_when, allow_hyphen_values = true)]
    until: Option<When>,
    /// How many rows of each kind are named; all are counted.
    #[arg(long, value_name = "ROWS", default_value_t = 20, value_parser = clap::value_parser!(u32).range(0..=10_000))]
    limit: u32,
    /// One JSON object a line: a finding each, and a summary last.
    #[arg(long)]
    json: bool,
}

/// Compares, prints, and says whether all is as it should be.
pub(super) async fn run(config: &Config, options: Options) -> u8 {
    match verify(config, &options).await {
        Ok(report) => written(
            report
                .print(options.json, &mut io::stdout().lock())
                .map(|()| if report.is_fine() { EXIT_OK } else { EXIT_FAILED }),
        ),
        Err(Stopped { code, text }) => {
            complain(&printable(&text));
            code
        }
    }
}

/// Why there is no report.
struct Stopped {
    code: u8,
    text: String,
}

fn failed(text: impl ToString) -> Stopped {
    Stopped { code: EXIT_FAILED, text: text.to_string() }
}

async fn verify(config: &Config, options: &Options) -> Result<Report, Stopped> {
    let misconfigured = |text: String| Stopped { code: EXIT_CONFIG, text };
    let store = Store::new(config, 2).map_err(|error| misconfigured(error.to_string()))?;
    store.inspect().await.map_err(|error| match error {
        problems @ SchemaError::Problems(_) => misconfigured(problems.to_string()),
        SchemaError::Store(error) => failed(error),
    })?;
    let range = SentRange {
        source: options.source.as_deref(),
        topic: options.topic.as_deref(),
        since: options.since,
        until: options.until,
    };
    // The database's now comes first: what was published before it is on its topic before we look where the topic ends.
    let instants = store.instants(&range).await.map_err(failed)?;
    if instants.since >= instants.until {
        return Err(Stopped {
            code: EXIT_USAGE,
            text: "--since is not before --until: no row can be between them".to_owned(),
        });
    }
    let ledger = read_table(config, &store, &range, &instants).await?;
    let mut report = Report {
        range: described(options),
        instants,
        verdict: Verdict::default(),
        names: HashMap::new(),
        notes: Vec::new(),
    };
    if ledger.is_empty() {
        return Ok(report);
    }
    let topics = ledger.topics();
    let (verdict, notes) = compare(config, ledger, topics, report.instants.since, options.limit).await?;
    let ids: Vec<Uuid> = verdict.findings.iter().map(|(id, _)| *id).collect();
    let names = store.names(&ids).await.map_err(failed)?;
    report.names = names.into_iter().map(|name| (name.outbox_id, name)).collect();
    (report.verdict, report.notes) = (verdict, notes);
    Ok(report)
}

fn described(options: &Options) -> String {
    let source = options.source.as_ref().map(|source| format!("of source {source}"));
    let topic = options.topic.as_ref().map(|topic| format!("for topic {topic}"));
    source.into_iter().chain(topic).collect::<Vec<_>>().join(" ")
}

async fn read_table(
    config: &Config,
    store: &Store,
    range: &SentRange<'_>,
    instants: &Instants,
) -> Result<Ledger, Stopped> {
    let bar = bar("rows of the table: {pos} read", None);
    let mut ledger = Ledger::default();
    let read = store.sent_rows(range, instants, |row| {
        ledger.add(row, config.rules(row.source).map(|rules| rules.policy));
        bar.inc(1);
        ledger.len() <= ROWS_MAX
    });
    read.await.map_err(failed)?;
    bar.finish_and_clear();
    if ledger.len() > ROWS_MAX {
        let text =
            format!("more than {ROWS_MAX} rows were sent in the range; choose a smaller one with --since and --until");
        return Err(Stopped { code: EXIT_USAGE, text });
    }
    Ok(ledger)
}

/// Reads the topics, and judges.
async fn compare(
    config: &Config,
    mut ledger: Ledger,
    topics: Vec<String>,
    since: PgTime,
    limit: u32,
) -> Result<(Verdict, Vec<String>), Stopped> {
    let cluster =
        inspect::inspect(&config.kafka, &config.relay, topics.clone()).await.map_err(|error| match error {
            InspectError::Client(error) => Stopped { code: EXIT_CONFIG, text: error.to_string() },
            InspectError::Unreachable(reason) => failed(format!("Kafka: {reason}")),
        })?;
    let mut notes = Vec::new();
    let mut memory: HashMap<String, Memory> = HashMap::new();
    let mut readable = Vec::new();
    for topic in cluster.topics {
        match topic.settings {
            Ok(settings) => {
                let policy = settings.get("cleanup.policy").map(String::as_str).unwrap_or_default();
                if policy.split(',').any(|part| part.trim() == "compact") {
                    memory.entry(topic.name.clone()).or_default().compacted = true;
                    notes.push(format!(
                        "topic {} is compacted: a row that is not there may have been there until a later record of its key replaced it",
                        topic.name
                    ));
                }
            }
            Err(Hidden::Unknown) => {}
            Err(reason) => notes.push(format!(
                "topic {}: its settings cannot be seen ({reason}), so whether it is compacted is not known",
                topic.name
            )),
        }
        match topic.description {
            // Then every row for it is missing.
            Err(Hidden::Unknown) => notes.push(format!("topic {} does not exist", topic.name)),
            Ok(_) | Err(_) => readable.push(topic.name),
        }
    }
    // A record has the time of its claim, which is before its row is published by a lease at most.
    let margin = config.relay.publishing_timeout + CLOCKS;
    let from =
        since.unix_micros().map_or(0, |micros| micros / 1_000 - i64::try_from(margin.as_millis()).unwrap_or(i64::MAX));
    let reader = TopicReader::new(&config.kafka, &config.relay)
        .map_err(|error| Stopped { code: EXIT_CONFIG, text: error.to_string() })?;
    let lease = config.relay.publishing_timeout;
    let reading = tokio::task::spawn_blocking(move || -> Result<_, String> {
        let mut spans = Vec::new();
        for topic in &readable {
            spans.push(reader.spans(topic, from)?);
        }
        let all: i64 = spans.iter().flatten().map(|span| span.end - span.start).sum();
        let bar = bar("records: {pos} of {len} read, {per_sec} {bar:30} {eta} left", u64::try_from(all).ok());
        for spans in &mut spans {
            reader.read(spans, |record| _ = ledger.see(record), || bar.inc(1))?;
            notes.extend(forgotten(spans, lease, &mut memory));
        }
        bar.finish_and_clear();
        Ok((ledger.judge(&memory, limit as usize), notes))
    });
    match reading.await {
        Ok(Ok(judged)) => Ok(judged),
        Ok(Err(text)) => Err(failed(format!("Kafka: {text}"))),
        Err(error) => Err(failed(error)),
    }
}

/// Notes what a topic may have forgotten: a partition that begins later than asked for has lost what came before.
fn forgotten(spans: &[Span], lease: Duration, memory: &mut HashMap<String, Memory>) -> Option<String> {
    let cut: Vec<&Span> = spans.iter().filter(|span| span.is_cut).collect();
    let topic = &cut.first()?.topic;
    // A record that was removed was claimed before the first that is left, and its row published within a lease of that.
    let until = cut.iter().map(|span| match span.first {
        Some((_, millis)) => millis.saturating_add(i64::try_from(lease.as_millis()).unwrap_or(i64::MAX)),
        None => i64::MAX,
    });
    let until = PgTime::from_unix_micros(until.max()?.saturating_mul(1_000));
    memory.entry(topic.clone()).or_default().forgotten_until = Some(until);
    Some(format!(
        "topic {topic}: the beginning of the range is no longer on {} of its {} partitions (retention, or deleted records): rows that \
         are missing from there cannot be judged",
        cut.len(),
        spans.len()
    ))
}

fn bar(template: &str, length: Option<u64>) -> ProgressBar {
    let bar = length.map_or_else(ProgressBar::no_length, ProgressBar::new);
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style);
    bar
}

/// What is printed.
struct Report {
    range: String,
    instants: Instants,
    verdict: Verdict,
    names: HashMap<Uuid, RowName>,
    /// What limits the verdict.
    notes: Vec<String>,
}

impl Report {
    fn is_fine(&self) -> bool {
        let Verdict { missing, unjudged, out_of_order, .. } = self.verdict;
        missing == 0 && unjudged == 0 && out_of_order == 0
    }

    fn print(&self, json: bool, out: &mut impl Write) -> io::Result<()> {
        for (id, finding) in &self.verdict.findings {
            if json {
                writeln!(out, "{}", self.object(*id, *finding))?;
            } else {
                writeln!(out, "{}", printable(&self.line(*id, *finding)))?;
            }
        }
        if json {
            writeln!(out, "{}", self.summary())?;
        } else {
            for note in &self.notes {
                writeln!(out, "note: {}", printable(note))?;
            }
            if self.verdict.out_of_order > 0 {
                writeln!(
                    out,
                    "note: created_at is the start of a transaction: a row that was committed after a later one of its lane was sent, and a \
                     row that was replayed, are out of order here although the relay did what it could"
                )?;
            }
            let Verdict { rows, found, missing, unjudged, duplicated, out_of_order, .. } = self.verdict;
            if rows == 0 {
                writeln!(out, "nothing to compare: is the name right, and was anything sent in the range?")?;
            }
            writeln!(
                out,
                "{rows} rows {} published from {} to {}: {found} found, {missing} missing, {unjudged} not to be judged, {duplicated} \
                 duplicated, {out_of_order} out of order",
                printable(&self.range),
                self.instants.since_text,
                self.instants.until_text
            )?;
        }
        out.flush()
    }

    fn line(&self, id: Uuid, finding: Finding) -> String {
        let row = self.names.get(&id).map_or_else(
            || format!("{id} (gone from the table meanwhile)"),
            |name| {
                let published = name.published_at.as_deref().unwrap_or("never");
                format!("{id} {} of {} for {}, published {published}", name.message_id, name.source, name.topic)
            },
        );
        match finding {
            Finding::Missing => format!("missing       {row}"),
            Finding::Unjudged => format!("not judged    {row}: it is not there, and may have been"),
            Finding::Duplicated { times, partition, offset } => {
                format!("duplicated    {row}: {times} times, first at [{partition}] {offset}")
            }
            Finding::OutOfOrder { partition, offset, behind, behind_offset } => format!(
                "out of order  {row}: at [{partition}] {offset}, before {behind} at {behind_offset}, which precedes it in its lane"
            ),
        }
    }

    fn object(&self, id: Uuid, finding: Finding) -> Value {
        let name = self.names.get(&id);
        let mut object = json!({
            "finding": kind(finding),
            "outbox_id": id,
            "message_id": name.map(|name| &name.message_id),
            "source": name.map(|name| &name.source),
            "topic": name.map(|name| &name.topic),
            "created_at": name.map(|name| &name.created_at),
            "published_at": name.and_then(|name| name.published_at.as_ref()),
        });
        match finding {
            Finding::Missing | Finding::Unjudged => {}
            Finding::Duplicated { times, partition, offset } => {
                object["times"] = json!(times);
                object["partition"] = json!(partition);
                object["offset"] = json!(offset);
            }
            Finding::OutOfOrder { partition, offset, behind, behind_offset } => {
                object["partition"] = json!(partition);
                object["offset"] = json!(offset);
                object["behind"] = json!({ "outbox_id": behind, "offset": behind_offset });
            }
        }
        object
    }

    fn summary(&self) -> Value {
        let Verdict { rows, found, missing, unjudged, duplicated, out_of_order, .. } = self.verdict;
        json!({
            "finding": "summary",
            "since": self.instants.since_text,
            "until": self.instants.until_text,
            "rows": rows,
            "found": found,
            "missing": missing,
            "not_judged": unjudged,
            "duplicated": duplicated,
            "out_of_order": out_of_order,
            "notes": self.notes,
        })
    }
}

fn kind(finding: Finding) -> &'static str {
    match finding {
        Finding::Missing => "missing",
        Finding::Unjudged => "not_judged",
        Finding::Duplicated { .. } => "duplicated",
        Finding::OutOfOrder { .. } => "out_of_order",
    }
}
