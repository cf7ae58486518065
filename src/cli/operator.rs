//! `status` and `resume`: what an operator asks and changes, straight from the table.
//!
//! Nothing here ever changes a row whose state is not what the command expects.

use serde_json::json;

use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, EXIT_STATE, complain, say};
use crate::config::Config;
use crate::domain::policy::Policy;
use crate::relay::sample;
use crate::store::{InspectError, Store};
use crate::telemetry::SourceSample;

/// Sent rows counted per source.
const SENT_ROWS: usize = 1_000_000;

/// Opens the table for a command, or says why not and with which exit code.
pub(super) async fn open(config: &Config) -> Result<Store, u8> {
    let store = Store::new(config, 1).map_err(|error| {
        complain(&error.to_string());
        EXIT_CONFIG
    })?;
    match store.inspect().await {
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
    let store = match open(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    let read = async {
        let sources = store.sources(crate::relay::SOURCES_MAX).await?;
        let policy_of = |source: &str| config.rules(source).map(|rules| rules.policy);
        let mut samples = sample(&store, &sources, policy_of).await?;
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

/// Makes the halting row of a `stop_the_line` source due at once.
pub(super) async fn resume(config: &Config, source: &str, json: bool, dry_run: bool) -> u8 {
    let store = match open(config).await {
        Ok(store) => store,
        Err(code) => return code,
    };
    // A source that is not served may hold a row of the time when it was.
    let policy = config.rules(source).map_or(Policy::BestEffort, |rules| rules.policy);
    match store.resume(source, policy, dry_run).await {
        Ok(Some(outbox_id)) => {
            if json {
                say(&json!({ "source": source, "outbox_id": outbox_id, "resumed": !dry_run }).to_string());
            } else if dry_run {
                say(&format!("would resume {source}: its row {outbox_id} would be due at once"));
            } else {
                say(&format!("resumed {source}: its row {outbox_id} is due now"));
            }
            EXIT_OK
        }
        // Only a breaker holds such a source, and only the running relays know about it.
        Ok(None) if policy != Policy::StopTheLine => tell_resumed(&store, source, json, dry_run).await,
        Ok(None) => {
            // A breaker may hold it all the same, and only the running relays know.
            if !dry_run && let Err(error) = store.tell_resumed(source).await {
                complain(&error.to_string());
            }
            if json {
                say(&json!({ "source": source, "error": "not_halted" }).to_string());
            }
            complain(&format!("source {source:?} is not halted: nothing to resume"));
            EXIT_STATE
        }
        Err(error) => {
            complain(&error.to_string());
            EXIT_FAILED
        }
    }
}

/// Tells the running relays to go on with a source that is not `stop_the_line`.
async fn tell_resumed(store: &Store, source: &str, json: bool, dry_run: bool) -> u8 {
    match store.sources(crate::relay::SOURCES_MAX).await {
        Ok(sources) if !sources.iter().any(|name| name == source) => {
            complain(&format!("there is no source {source:?} in the table"));
            return EXIT_STATE;
        }
        Ok(_) => {}
        Err(error) => {
            complain(&error.to_string());
            return EXIT_FAILED;
        }
    }
    let told = if dry_run { Ok(()) } else { store.tell_resumed(source).await };
    match told {
        Ok(()) if json => say(&json!({ "source": source, "outbox_id": null, "resumed": !dry_run }).to_string()),
        Ok(()) if dry_run => say(&format!("would tell the running relays to go on with {source}")),
        Ok(()) => say(&format!("told the running relays to go on with {source}")),
        Err(error) => {
            complain(&error.to_string());
            return EXIT_FAILED;
        }
    }
    EXIT_OK
}
