//! `run` and `drain`: the relay with everything around it.
//!
//! Nothing here ever waits for a server before `/livez` answers.

use std::sync::Arc;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::reload::{self, Origin};
use super::{EXIT_BUG, EXIT_CONFIG, EXIT_FAILED, EXIT_OK, complain, say};
use crate::config::Config;
use crate::http::Server;
use crate::publish::Publisher;
use crate::publish::kafka::KafkaPublisher;
use crate::relay::health::{Board, Identity, Limits};
use crate::relay::{DrainError, DrainReport, End, Relay};
use crate::store::{Store, StoreError};
use crate::telemetry::{self, LogLevel, Metrics};

/// Relays until stopped.
pub(super) fn run(origin: Origin) -> u8 {
    let config = origin.loaded.config.clone();
    let level = match telemetry::init_tracing(&config.log, &config.relay.instance) {
        Ok(level) => level,
        Err(problem) => {
            complain(&format!("configuration: {problem}"));
            return EXIT_CONFIG;
        }
    };
    // A panic must be seen in the log, with the instance, wherever it happens.
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        error!("{panic}");
        default_hook(panic);
    }));
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            return EXIT_FAILED;
        }
    };
    let code = runtime.block_on(run_until_stopped(config, origin, level));
    // Blocking calls into librdkafka that hang must not keep the process.
    runtime.shutdown_background();
    code
}

async fn run_until_stopped(config: Config, origin: Origin, level: LogLevel) -> u8 {
    let signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            complain(&error);
            return EXIT_FAILED;
        }
    };
    let hangup = match signal(SignalKind::hangup()) {
        Ok(hangup) => hangup,
        Err(error) => {
            complain(&format!("signals cannot be caught: {error}"));
            return EXIT_FAILED;
        }
    };
    let board = board(&config);
    let server = match Server::start(config.http.listen, board.clone(), board.metrics().clone()) {
        Ok(server) => server,
        Err(error) => {
            complain(&error.to_string());
            return EXIT_CONFIG;
        }
    };
    info!(address = %server.addr, "http listens");
    let relay = match build(config, board) {
        Ok(relay) => relay,
        Err(error) => {
            complain(&error);
            return EXIT_CONFIG;
        }
    };
    signals.stop(relay.stop_token());
    tokio::spawn(reload::follow(hangup, origin, relay.handle(), level));
    let code = match relay.run().await {
        End::Stopped { .. } => EXIT_OK,
        End::Schema(problems) => {
            error!("{problems}");
            complain(&problems);
            EXIT_CONFIG
        }
        End::Bug(_) => EXIT_BUG,
    };
    server.stop();
    code
}

/// SIGTERM and SIGINT, caught from when this is made: a signal that comes while the relay is still being built stops it too.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn catch() -> Result<Self, String> {
        let caught = |kind| signal(kind).map_err(|error| format!("signals cannot be caught: {error}"));
        Ok(Self { terminate: caught(SignalKind::terminate())?, interrupt: caught(SignalKind::interrupt())? })
    }

    /// The first signal stops the relay, the second exits at once.
    fn stop(mut self, stop: CancellationToken) {
        tokio::spawn(async move {
            self.next().await;
            stop.cancel();
            self.next().await;
            warn!("second signal: exiting at once; rows in flight wait until their lease runs out");
            std::process::exit(i32::from(EXIT_FAILED));
        });
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Passes until nothing is due.
pub(super) fn drain(config: Config, json: bool) -> u8 {
    if let Err(problem) = telemetry::init_tracing(&config.log, &config.relay.instance) {
        complain(&format!("configuration: {problem}"));
        return EXIT_CONFIG;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            return EXIT_FAILED;
        }
    };
    let grace = config.relay.shutdown_grace;
    let code = runtime.block_on(async {
        let signals = match Signals::catch() {
            Ok(signals) => signals,
            Err(error) => {
                complain(&error);
                return EXIT_FAILED;
            }
        };
        let board = board(&config);
        let relay = match build(config, board) {
            Ok(relay) => relay,
            Err(error) => {
                complain(&error);
                return EXIT_CONFIG;
            }
        };
        let (stop, told) = (relay.stop_token(), CancellationToken::new());
        signals.stop(told.clone());
        let drained = tokio::select! {
            drained = relay.drain() => drained,
            () = async { told.cancelled().await; stop.cancel(); tokio::time::sleep(grace).await } => {
                complain("shutdown_grace is over: rows in flight stay in publishing until their lease runs out");
                return EXIT_FAILED;
            }
        };
        match drained {
            Ok(report) => print_drained(&report, json),
            Err(error) => {
                complain(&error.to_string());
                match error {
                    DrainError::Schema(_) => EXIT_CONFIG,
                    DrainError::Database(_) => EXIT_FAILED,
                    DrainError::Bug(_) => EXIT_BUG,
                }
            }
        }
    });
    runtime.shutdown_background();
    code
}

fn print_drained(report: &DrainReport, json: bool) -> u8 {
    if json {
        say(&serde_json::to_string(report).expect("a report is plain data"));
    } else {
        let DrainReport { claimed, sent, failed, skipped, returned, dead, rejected, requeued, lost, .. } = report;
        say(&format!(
            "claimed {claimed}, sent {sent}, failed {failed}, skipped {skipped}, returned {returned}, dead {dead}, \
             rejected {rejected}, requeued {requeued}, lost {lost} in {} ms",
            report.elapsed_ms
        ));
        for halted in &report.halted_on {
            say(&format!("{} is halted on {}", halted.source, halted.outbox_id));
        }
        if report.due > 0 {
            say(&format!("{} rows are still due", report.due));
        }
        if report.paused > 0 {
            say(&format!("{} pauses are in force: keiro-relay pause --list", report.paused));
        }
        if report.gave_up {
            say("gave up: the database or the broker is away");
        }
    }
    if report.halted_on.is_empty() && report.due == 0 && !report.gave_up { EXIT_OK } else { EXIT_FAILED }
}

fn board(config: &Config) -> Board {
    let metrics = Metrics::new();
    metrics.policy(&config.policy_hash());
    let identity = Identity {
        instance: config.relay.instance.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy_hash: config.policy_hash(),
    };
    Board::new(identity, Limits::of(config), metrics)
}

/// Builds the relay over Kafka; contacts nothing.
fn build(config: Config, board: Board) -> Result<Relay, String> {
    let publisher: Arc<dyn Publisher> =
        Arc::new(KafkaPublisher::new(&config.kafka, &config.relay).map_err(|error| error.to_string())?);
    let store = Store::new(&config, config.database.pool_size - 1).map_err(|error: StoreError| error.to_string())?;
    // The slow timer has a connection of its own.
    let maintenance = Store::new(&config, 1).map_err(|error| error.to_string())?;
    Ok(Relay::build(Arc::new(config), Arc::new(store), Arc::new(maintenance), publisher, board))
}
