//! The command line: what was typed → what is done → an exit code.
//!
//! Nothing here ever decides about rows: commands call the library, and this module only dispatches and reports.

pub mod config;
pub mod demo;
pub mod enqueue;
pub mod health;
pub mod migrate;
mod operator;
mod run;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::config::{Config, Overrides};

/// Done.
pub const EXIT_OK: u8 = 0;
/// Failed.
pub const EXIT_FAILED: u8 = 1;
/// No such row, or its state forbids it.
pub const EXIT_STATE: u8 = 3;
/// Bad usage.
pub const EXIT_USAGE: u8 = 64;
/// A bug of ours.
pub const EXIT_BUG: u8 = 70;
/// Bad configuration, schema or permissions.
pub const EXIT_CONFIG: u8 = 78;

/// Relays rows of a Postgres outbox table to Kafka: none lost, in order, soon.
///
/// Delivery is at least once: consumers dedupe on the header `keiro-message-id`. Exit codes: 0 done, 1 failed, 3 no such row or
/// its state forbids it, 64 bad usage, 70 a bug, 78 bad configuration, schema or permissions.
#[derive(Debug, Parser)]
#[command(name = "keiro-relay", version, propagate_version = true, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct Global {
    /// Configuration file [default: keiro-relay.toml, then /etc/keiro-relay/config.toml].
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Database URL, over file and environment.
    #[arg(long, global = true, value_name = "URL", hide_env_values = true)]
    database_url: Option<String>,
    /// Kafka brokers, comma-separated host:port, over file and environment.
    #[arg(long, global = true, value_name = "LIST", value_delimiter = ',')]
    brokers: Option<Vec<String>>,
    /// Log filter such as `info` or `keiro_relay=debug`, over file and environment.
    #[arg(long, global = true, value_name = "FILTER")]
    log_level: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Relay rows until stopped (SIGTERM or SIGINT; a second signal exits at once).
    #[command(after_help = "Example:\n  keiro-relay run --config /etc/keiro-relay/config.toml")]
    Run,
    /// Pass over the table until nothing is due, print counts, and end.
    ///
    /// Exit 1 when a source is halted or rows stay due.
    #[command(after_help = "Example:\n  keiro-relay drain --json")]
    Drain {
        /// One JSON object instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Create the table, or adopt the one that is there; safe to run every time.
    #[command(after_help = "Example:\n  keiro-relay migrate --profile lean --dry-run")]
    Migrate(migrate::Arguments),
    /// Check or print the configuration; contacts nothing.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Insert rows, one JSON object a line on standard input, in one transaction.
    #[command(
        after_help = "Example:\n  echo '{\"source\":\"billing\",\"destination\":\"invoices\",\"message_key\":\"42\",\
                      \"event_type\":\"InvoiceSent\",\"payload\":{\"total\":7}}' | keiro-relay enqueue"
    )]
    Enqueue,
    /// Show every source: policy, rows by status, ages, what it is halted on.
    #[command(after_help = "Example:\n  keiro-relay status --json")]
    Status {
        /// One JSON object instead of a table.
        #[arg(long)]
        json: bool,
    },
    /// Let a halted stop_the_line source go on: its halting row is due at once.
    ///
    /// Exit 3 when the source is not halted.
    #[command(after_help = "Example:\n  keiro-relay resume billing")]
    Resume {
        /// The source.
        source: String,
        /// One JSON object instead of text.
        #[arg(long)]
        json: bool,
        /// Say what would be done and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Ask the running relay whether it is alive; exit 1 when it is not.
    #[command(after_help = "Example:\n  keiro-relay health --ready")]
    Health {
        /// Ask whether it is ready instead.
        #[arg(long)]
        ready: bool,
    },
    /// Show the main job on servers of its own: 10,000 rows, four policies, a poison row and a halt.
    #[command(after_help = "Example:\n  keiro-relay demo --keep")]
    Demo(demo::Arguments),
}

#[derive(Debug, Subcommand)]
enum ConfigCommand {
    /// Say every problem of the configuration at once, or `ok`.
    Check,
    /// Print the configuration in force, secrets hidden.
    Print,
}

impl Global {
    fn overrides(&self) -> Overrides {
        Overrides {
            database_url: self.database_url.clone(),
            brokers: self.brokers.clone(),
            log_level: self.log_level.clone(),
        }
    }

    fn path(&self) -> Option<&Path> {
        self.config.as_deref()
    }
}

/// Parses the command line, does what it says, and returns the exit code.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // `--help` and `--version` are no errors; a closed pipe is none either.
            let _ = error.print();
            return ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { EXIT_OK });
        }
    };
    ExitCode::from(dispatch(cli))
}

fn dispatch(cli: Cli) -> u8 {
    let global = cli.global;
    match cli.command {
        Command::Config(ConfigCommand::Check) => config::check(global.path(), global.overrides()),
        Command::Config(ConfigCommand::Print) => config::print(global.path(), global.overrides()),
        Command::Demo(arguments) => demo::main(&arguments, global.database_url.as_deref(), global.brokers.as_deref()),
        Command::Run => with_config(&global, |config| run::run(config)),
        Command::Drain { json } => with_config(&global, |config| run::drain(config, json)),
        Command::Migrate(arguments) => with_config(&global, |config| block_on(migrate::main(&config, &arguments))),
        Command::Enqueue => with_config(&global, |config| block_on(enqueue::main(&config))),
        Command::Status { json } => with_config(&global, |config| block_on(operator::status(&config, json))),
        Command::Resume { source, json, dry_run } => {
            with_config(&global, |config| block_on(operator::resume(&config, &source, json, dry_run)))
        }
        Command::Health { ready } => with_config(&global, |config| health::main(&config, ready)),
    }
}

/// Loads the configuration, or prints every problem and returns 78.
fn with_config(global: &Global, command: impl FnOnce(Config) -> u8) -> u8 {
    match Config::load(global.path(), std::env::vars_os(), global.overrides()) {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                complain(&format!("warning: {warning}"));
            }
            command(loaded.config)
        }
        Err(problems) => {
            complain(&problems.to_string());
            EXIT_CONFIG
        }
    }
}

/// Runs a short command on a runtime of its own.
fn block_on(command: impl Future<Output = u8>) -> u8 {
    match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(command),
        Err(error) => {
            complain(&format!("cannot start: {error}"));
            EXIT_FAILED
        }
    }
}

/// Prints a line to standard output; a closed pipe is no failure.
pub(crate) fn say(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// Prints a line to standard error.
pub(crate) fn complain(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}
