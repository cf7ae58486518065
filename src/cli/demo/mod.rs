//! `keiro-relay demo`: the main job shown end to end, on servers of its own, to someone who has never seen it.
//!
//! Nothing here ever takes the relay's word: what the demo says at the end comes from the producers' own books, the table and a
//! consumer of the topics. Nothing is left running, whatever happens.

mod cast;
mod consume;
mod daemon;
#[doc(hidden)]
pub mod judge;
mod produce;
mod servers;
#[doc(hidden)]
pub mod services;
mod show;
mod story;

use clap::{Args, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};

use super::{EXIT_FAILED, EXIT_OK, complain};
use servers::{BrokerChoice, CleanUp};
use show::Show;

pub(super) use show::grouped;

/// `keiro-relay demo`
#[derive(Debug, Args)]
pub(super) struct Options {
    /// Rows to write, over all four sources.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    rows: u32,
    /// Stay up after the check until Ctrl-C, to look at /metrics, /status and the table.
    #[arg(long)]
    keep: bool,
    /// Which Kafka to start, unless --brokers names one.
    #[arg(long, value_enum, value_name = "KIND", default_value_t = BrokerKind::Kafka, conflicts_with = "brokers")]
    broker: BrokerKind,
    /// Print one JSON object with the result; the story goes to standard error.
    #[arg(long)]
    json: bool,
    /// For tests: lose one record before the judge sees it, so that the check fails.
    #[arg(long, hide = true)]
    lose_a_record: bool,
}

/// `--broker`
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BrokerKind {
    /// A real Kafka from target/services.
    Kafka,
    /// librdkafka's in-process broker: starts at once, but enforces no limits of topics, so no row is too large for it.
    Mock,
}

/// What the global flags say.
pub(super) struct Given {
    pub database_url: Option<String>,
    pub brokers: Option<String>,
    pub log_level: Option<String>,
}

/// Runs the demo and returns its exit code: 0 only when the check held.
pub(super) fn run(options: &Options, given: Given) -> u8 {
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            return EXIT_FAILED;
        }
    };
    let code = runtime.block_on(run_until_stopped(options, given));
    // A server that is still starting in a thread dies with this process.
    runtime.shutdown_background();
    code
}

async fn run_until_stopped(options: &Options, given: Given) -> u8 {
    let (mut interrupt, mut terminate) = match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(interrupt), Ok(terminate)) => (interrupt, terminate),
        (Err(error), _) | (_, Err(error)) => {
            complain(&format!("signals cannot be caught: {error}"));
            return EXIT_FAILED;
        }
    };
    let mut interrupted = async || {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    let show = Show::new(options.json);
    let clean_up = CleanUp::default();
    let plan = story::Plan {
        rows: options.rows as usize,
        json: options.json,
        keep: options.keep,
        lose_a_record: options.lose_a_record,
        broker: match (given.brokers, options.broker) {
            (Some(brokers), _) => BrokerChoice::Given(brokers),
            (None, BrokerKind::Kafka) => BrokerChoice::Own,
            (None, BrokerKind::Mock) => BrokerChoice::Mock,
        },
        database_url: given.database_url,
        log_level: given.log_level.unwrap_or_else(|| "info".to_owned()),
    };
    // Whatever the story started stops where it ends, also in the middle.
    let outcome = tokio::select! {
        outcome = story::tell(&plan, &show, &clean_up) => Some(outcome),
        () = interrupted() => None,
    };
    show.end_progress();
    let code = match outcome {
        Some(Ok(story::Told { held, stage })) => {
            if let Some(stage) = stage {
                interrupted().await;
                show.paragraph("Stopping the relay and the servers.");
                stage.clear().await;
            }
            if held { EXIT_OK } else { EXIT_FAILED }
        }
        Some(Err(problem)) => {
            complain(&format!("demo: {problem}"));
            EXIT_FAILED
        }
        None => {
            complain("demo: interrupted; everything it started is stopped");
            EXIT_FAILED
        }
    };
    tokio::select! {
        left = clean_up.run() => {
            for left in left {
                complain(&format!("demo: {left}"));
            }
        }
        () = interrupted() => complain("demo: interrupted while cleaning up"),
    }
    code
}
