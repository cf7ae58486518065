//! How operators' commands open the table, and `status`.
//!
//! Nothing here ever changes a row whose state is not what the command expects.

use serde_json::json;

use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, complain, say};
use crate::config::Config;
use crate::domain::pause::Pauses;
use crate::domain::policy::Policy;
use crate::relay::sample;
use crate::store::{InspectError, Shape, Store};
use crate::telemetry::SourceSample;

/// Sent rows counted per source.
const SENT_ROWS: usize = 1_000_000;

/// Opens the table for a command that changes rows, or says why not and with which exit code.
pub(super) async fn open(config: &Config) -> Result<Store, u8> {
    let store = connect(config)?;
    let looked = store.inspect().await;
    adopted(store, looked)
}

/// Opens the table for a command that only reads it.
pub(super) async fn open_to_read(config: &Config) -> Result<Store, u8> {
    let store = connect(config)?;
    let looked = store.inspect_to_read().await;
    adopted(store, looked)
}

fn connect(config: &Config) -> Result<Store, u8> {
    Store::new(config, 1).map_err(|error| {
        complain(&error.to_string());
        EXIT_CONFIG
    })
}

fn adopted(store: Store, looked: Result<Shape, InspectError>) -> Result<Store, u8> {
    match looked {
        Ok(shape) => {
            store.adopt(&shape);
            Ok(store)
        }
        Err(problems @ InspectError::Problems(_)) => {
            complain(&problems.to_string());
            Err(EXIT_CONFIG)
        }
        Err(InspectError::Store(error)) => {
            complain(&error.to_string());
            Err(EXIT_FAILED)
        }
    }
}

/// Prints every source.
pub(super) async fn status(config: &Config, json: bool) -> u8 {
    let store = match open_to_read(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    let read = async {
        let sources = store.sources(crate::relay::SOURCES_MAX).await?;
        let policy_of = |source: &str| config.rules(source).map(|rules| rules.policy);
        let mut samples = sample(&store, &sources, &Pauses::default(), policy_of).await?;
        for (sample, _) in &mut samples {
            sample.sent = store.count_sent(&sample.source, SENT_ROWS).await?;
        }
        Ok::<_, crate::store::StoreError>(samples)
    };
    let samples = match read.await {
        Ok(samples) => samples,
        Err(error) => {
            complain(&error.to_string());
            return EXIT_FAILED;
        }
    };
    if json {
        let sources: Vec<_> = samples
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
                    "capped": sample.capped,
                })
            })
            .collect();
        say(&json!({ "sources": sources }).to_string());
        return EXIT_OK;
    }
    say(&format!(
        "{:<24} {:<20} {:>8} {:>7} {:>6} {:>9} {:>6} {:>8}  {}",
        "SOURCE", "POLICY", "PENDING", "FAILED", "FLIGHT", "SENT", "DEAD", "REJECTED", "OLDEST"
    ));
    for (sample, halt) in &samples {
        say(&status_line(sample));
        if let Some(halt) = halt {
            let row = halt.outbox_id.map(|id| id.to_string()).unwrap_or_default();
            say(&format!("    halted on {row}: {}", halt.reason));
        }
    }
    EXIT_OK
}

fn status_line(sample: &SourceSample) -> String {
    let mut name: String = sample.source.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    if name.chars().count() > 24 {
        name = name.chars().take(23).chain(['…']).collect();
    }
    let age = sample.oldest_age_seconds.map_or_else(|| "-".to_owned(), |age| format!("{age:.0}s"));
    let policy = sample.policy.map_or("(not served)", Policy::name);
    format!(
        "{name:<24} {policy:<20} {:>8} {:>7} {:>6} {:>9} {:>6} {:>8}  {age}{}",
        sample.pending,
        sample.failed,
        sample.publishing,
        sample.sent,
        sample.dead,
        sample.rejected,
        if sample.capped { " (at least)" } else { "" }
    )
}
