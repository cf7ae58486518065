//! `keiro-relay bench`: the figures of this program on this machine, each beside what it can be compared with in the same run.
//!
//! Nothing here ever asserts a time: a figure is printed, with what was measured and how. A run fails only when the work itself
//! was not done, such as rows that were not relayed.

mod bare;
mod buffers;
mod drain;
mod harness;
mod latency;
mod load;
mod report;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::{EXIT_FAILED, EXIT_OK, complain, say};
use crate::config::{Log, LogFormat};
use crate::telemetry;
use harness::Harness;
use report::Section;

/// `keiro-relay bench`
#[derive(Debug, Args)]
pub(super) struct Options {
    /// A tenth of the rows: shows that everything works, and worse figures.
    #[arg(long)]
    quick: bool,
    /// Measure only this; may be given several times.
    #[arg(long, value_enum, value_name = "NAME")]
    only: Vec<Scenario>,
    /// Print one JSON object instead of markdown.
    #[arg(long)]
    json: bool,
}

/// What can be measured. A new figure is a variant here and a module beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Scenario {
    /// Buffers that a claim, a look and a settlement touch per row.
    Buffers,
    /// Rows per second through the whole relay, beside the same claims and settlements without Kafka.
    Drain,
    /// Time from the commit of a row to its record in a consumer, beside a bare produce and consume.
    Latency,
}

impl Scenario {
    const ALL: [Self; 3] = [Self::Buffers, Self::Drain, Self::Latency];

    fn name(self) -> &'static str {
        match self {
            Self::Buffers => "buffers",
            Self::Drain => "drain",
            Self::Latency => "latency",
        }
    }

    async fn measure(self, harness: &mut Harness) -> Result<Vec<Section>, String> {
        match self {
            Self::Buffers => buffers::measure(harness).await,
            Self::Drain => drain::measure(harness).await,
            Self::Latency => latency::measure(harness).await,
        }
    }
}

/// Measures and returns the exit code.
pub(super) fn run(options: &Options) -> u8 {
    // What the relay complains about belongs beside the figures, on standard error.
    let log = Log { format: LogFormat::Text, level: "warn".to_owned() };
    if let Err(problem) = telemetry::init_tracing(&log, "bench") {
        complain(&problem);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            return EXIT_FAILED;
        }
    };
    let code = runtime.block_on(async {
        // The servers die with what is dropped here.
        tokio::select! {
            code = measure(options) => code,
            problem = interrupted() => {
                complain(&format!("bench: {problem}"));
                EXIT_FAILED
            }
        }
    });
    runtime.shutdown_background();
    code
}

async fn interrupted() -> String {
    match (signal(SignalKind::interrupt()), signal(SignalKind::terminate())) {
        (Ok(mut interrupt), Ok(mut terminate)) => {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            "interrupted; everything it started is stopped".to_owned()
        }
        (Err(error), _) | (_, Err(error)) => format!("signals cannot be caught: {error}"),
    }
}

async fn measure(options: &Options) -> u8 {
    if cfg!(debug_assertions) {
        complain("bench: this program was built without optimisation: use `make bench`, these figures mean little");
    }
    let mut harness = match Harness::start(options.quick).await {
        Ok(harness) => harness,
        Err(problem) => {
            complain(&format!("bench: {problem}"));
            return EXIT_FAILED;
        }
    };
    let about = harness.about().await;
    if !options.json {
        say(&format!("# keiro-relay bench\n\n{about}\n"));
    }
    let mut code = EXIT_OK;
    let mut sections = Vec::new();
    for scenario in Scenario::ALL {
        if !options.only.is_empty() && !options.only.contains(&scenario) {
            continue;
        }
        match scenario.measure(&mut harness).await {
            Ok(measured) if options.json => {
                sections.extend(measured.iter().map(|section| section.json(scenario.name())));
            }
            // As soon as it is known: the next scenario takes minutes.
            Ok(measured) => measured.iter().for_each(|section| say(&section.markdown())),
            Err(problem) => {
                complain(&format!("bench: {}: {problem}", scenario.name()));
                code = EXIT_FAILED;
            }
        }
    }
    if options.json {
        say(&json!({ "about": about, "quick": options.quick, "scenarios": sections }).to_string());
    }
    code
}
