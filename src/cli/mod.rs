//! The command line: what was typed → what is done → an exit code.
//!
//! Nothing here ever decides about rows: commands call the library, and this module only dispatches and reports.

mod bench;
mod change;
pub mod config;
pub mod demo;
mod doctor;
pub mod enqueue;
pub mod health;
pub mod migrate;
mod operator;
mod pause;
mod reload;
pub mod rows;
mod run;
mod status;
mod verify;

use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::config::{Config, Loaded, Overrides, environment};
use crate::store::{Db, Profile};

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
    #[arg(long, global = true, value_name = "URL")]
    database_url: Option<String>,
    /// Kafka brokers, comma-separated host:port, over file and environment.
    #[arg(long, global = true, value_name = "LIST")]
    brokers: Option<String>,
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
    Migrate {
        /// Index profile of a table that does not exist yet.
        #[arg(long, value_enum)]
        profile: Option<ProfileName>,
        /// Print the SQL and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Check or print the configuration; contacts nothing.
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Insert rows, one JSON object a line on standard input, in one transaction: all of them or none.
    ///
    /// Keys are the table's column names, with the payload as `payload` (any JSON), `payload_text` or `payload_base64`. Prints one
    /// object a line: {"line","outbox_id","message_id","inserted"}. A line with an outbox_id, or a source and message_id, that is in
    /// the table already is not written again, so an input whose lines have ids can be sent twice.
    #[command(
        after_help = "Examples:\n  echo '{\"source\":\"billing\",\"destination\":\"invoices\",\"message_key\":\"42\",\
                      \"event_type\":\"InvoiceSent\",\"payload\":{\"total\":7}}' | keiro-relay enqueue\n  \
                      keiro-relay enqueue --batch 1000 <events.ndjson >written.ndjson"
    )]
    Enqueue {
        /// Commit every N lines instead, 1 to 10000 (earlier when they are large). Stops at the first batch that fails, and says
        /// from which line on to send again.
        #[arg(long, value_name = "N", conflicts_with = "all_or_nothing",
              value_parser = clap::value_parser!(u32).range(1..=i64::from(enqueue::BATCH_LINES_MAX)))]
        batch: Option<u32>,
        /// One transaction, however many lines (the default). The input is read to its end and checked first.
        #[arg(long)]
        all_or_nothing: bool,
        /// What to do with a line whose row is there already.
        #[arg(long, value_enum, default_value = "coalesce")]
        on_duplicate: enqueue::OnDuplicateName,
    },
    /// List rows, oldest first: those that are not finished, unless a filter says otherwise.
    ///
    /// Each filter may be repeated (any of its values); all filters have to hold. Finished rows (sent, dead, rejected) are left out
    /// unless --status names them, or --id, --message-id or --error asks for them. With --json the last line is
    /// {"next_cursor"} when another page follows.
    #[command(
        after_help = "Examples:\n  keiro-relay list --source billing --not-due\n  keiro-relay list --status dead,rejected --desc --limit 10\n  \
                      keiro-relay list --error kafka.message_too_large --since 2h --json\n  keiro-relay list --sort published --desc"
    )]
    List(rows::list::ListArgs),
    /// Show every column of a row; its payload only with --payload. Exit 3 when there is none.
    #[command(after_help = "Example:\n  keiro-relay show 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a --payload")]
    Show(rows::show::ShowArgs),
    /// Say why a row is not on Kafka yet, in one paragraph. Exit 3 when there is none.
    ///
    /// What only a running relay knows (parked topics, halted sources) is asked of the one on `[http] listen`.
    #[command(after_help = "Example:\n  keiro-relay why 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a")]
    Why(rows::why::WhyArgs),
    /// List the rows that requeue would take: in flight for longer than publishing_timeout, oldest first.
    #[command(after_help = "Example:\n  keiro-relay stuck")]
    Stuck(rows::list::PreviewArgs),
    /// List the rows that retention would delete: sent for longer than maintenance.retention, oldest first.
    #[command(after_help = "Example:\n  keiro-relay gc-preview --limit 10")]
    GcPreview(rows::list::PreviewArgs),
    /// Show whether it keeps up, what is blocked and by what: every source, what is halted, parked and paused.
    ///
    /// Counts come from the table; parked topics and open breakers only a running relay knows, which is asked at http.listen.
    #[command(
        after_help = "Examples:\n  keiro-relay status\n  keiro-relay status --watch 5\n  keiro-relay status --json"
    )]
    Status(status::Options),
    /// Hold back a source, a topic or a lane (the rows of a source with one key), on every relay and over restarts.
    ///
    /// Its rows stay as they are, spend no attempt, and hold back the rows behind them in their lane. What is in flight is finished.
    #[command(
        after_help = "Examples:\n  keiro-relay pause billing --for 2h --reason 'ledger migration'\n  keiro-relay pause --topic invoices\n  \
                      keiro-relay pause billing --key 42\n  keiro-relay pause --list"
    )]
    Pause(pause::PauseOptions),
    /// Let a paused source, topic or lane go on, or a halted source: then its halting row is due at once.
    ///
    /// Exit 3 when it is neither paused nor halted.
    #[command(
        after_help = "Examples:\n  keiro-relay resume billing\n  keiro-relay resume --topic invoices\n  keiro-relay resume billing --key 42"
    )]
    Resume(pause::ResumeOptions),
    /// Try dead and rejected rows again: pending, attempts at 0, due now.
    ///
    /// A row that a later row of its lane has overtaken is left alone without --allow-reorder. Exit 3 when a row that was named was
    /// left alone, or any row for the sake of order.
    #[command(after_help = "Examples:\n  keiro-relay retry 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a\n  \
                      keiro-relay retry 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a --lane\n  \
                      keiro-relay retry --source billing --error kafka.message_too_large --dry-run")]
    Retry(change::Retry),
    /// Give waiting rows up: rejected with the code operator.cancelled (dead on an older table). Their lanes go on.
    ///
    /// Cancelling a cancelled row again is no error. Exit 3 when a row that was named is in another state.
    #[command(
        after_help = "Example:\n  keiro-relay cancel 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a --reason 'duplicate of order 17'"
    )]
    Cancel(change::Cancel),
    /// Give waiting rows another due time. Until then they hold back their lane.
    #[command(after_help = "Examples:\n  keiro-relay reschedule --source billing --not-due --in 0s\n  \
                      keiro-relay reschedule 019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a --at 2026-01-02T06:00:00Z")]
    Reschedule(change::Reschedule),
    /// Free rows that a relay left in flight: failed, or dead when their attempts are spent. A running relay does it by itself.
    #[command(after_help = "Example:\n  keiro-relay requeue-stuck --everything --dry-run")]
    RequeueStuck(change::RequeueStuck),
    /// Delete sent rows published before a time, oldest first; dead and rejected rows only when named with --status.
    #[command(after_help = "Examples:\n  keiro-relay prune --before 30d --dry-run\n  \
                      keiro-relay prune --before 2026-01-01T00:00:00Z --status dead,rejected --source billing")]
    Prune(change::Prune),
    /// Send rows again that were sent. Consumers that dedupe on keiro-message-id take no notice of them.
    ///
    /// In an ordered lane that has later rows sent, they would arrive after those: that needs --allow-reorder. Without it the rows that
    /// nothing overtook (the last ones of each lane) are sent again all the same; --dry-run counts them.
    #[command(
        after_help = "Example:\n  keiro-relay replay --source billing --since 2026-01-02T03:00:00Z --until 2026-01-02T04:00:00Z \
                      --allow-reorder"
    )]
    Replay(change::Replay),
    /// Show the main job end to end, on a PostgreSQL and a Kafka of its own, and check it.
    ///
    /// Writes rows over four sources with the four policies, relays them with a real `keiro-relay run`, reads the topics back
    /// and compares. Exit 0 only when the check held. With --database-url or --brokers it uses those servers instead, under
    /// names of its own that it removes at the end (the brokers without TLS or SASL). --config is refused: the demo writes
    /// its own.
    #[command(
        after_help = "Examples:\n  keiro-relay demo\n  keiro-relay demo --rows 100000 --keep\n  keiro-relay demo --broker mock\n  \
                      keiro-relay demo --database-url postgres://me@localhost/scratch --brokers localhost:9092"
    )]
    Demo(demo::Options),
    /// Measure this program on this machine, on servers of its own, and print the figures as markdown.
    ///
    /// Takes some minutes. Each figure stands beside what it can be compared with in the same run; no time is asserted.
    #[command(after_help = "Examples:\n  keiro-relay bench\n  keiro-relay bench --quick --only buffers --json")]
    Bench(bench::Options),
    /// Look at both sides and say what is wrong, why, and what to do about it; changes nothing.
    ///
    /// One line a check: ok, warn, fail (something stops delivery) or unknown, with the remedy to copy below it. Numbers of rows are the
    /// server's estimates, or of the first waiting rows of each source. Exit 1 when a check fails.
    #[command(
        after_help = "Examples:\n  keiro-relay doctor\n  keiro-relay doctor --problems\n  keiro-relay doctor --json | jq -r \
                            'select(.verdict == \"fail\") | .remedy'"
    )]
    Doctor(doctor::Options),
    /// Compare sent rows with their topics: each is there, and every lane in order; changes nothing.
    ///
    /// Takes the rows published in the range, and reads their topics from shortly before it to where they end now, in no consumer group.
    /// Says which rows are missing, there more than once (which delivery at least once allows), or before a row that precedes them in
    /// their lane; and plainly what cannot be judged, because the topic's retention or compaction removed records. Needs 80 bytes of
    /// memory a row. Exit 1 when a row is missing, out of order or cannot be judged.
    #[command(
        after_help = "Examples:\n  keiro-relay verify --source billing --since 1h\n  keiro-relay verify --topic invoices --since \
                            2026-01-02T00:00:00Z --until 2026-01-03T00:00:00Z --json"
    )]
    Verify(verify::Options),
    /// Ask the running relay whether it is alive; exit 1 when it is not.
    #[command(after_help = "Example:\n  keiro-relay health --ready")]
    Health {
        /// Ask whether it is ready instead.
        #[arg(long)]
        ready: bool,
    },
}

/// `--profile`.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum ProfileName {
    /// Fastest: claims are HOT updates. For a table that only this program migrates.
    Lean,
    /// keiro's own indexes.
    Shared,
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
        let mut overrides = Overrides::new();
        if let Some(url) = &self.database_url {
            overrides = overrides.set("--database-url", "database.url", url);
        }
        if let Some(brokers) = &self.brokers {
            overrides = overrides.set("--brokers", "kafka.brokers", brokers);
        }
        if let Some(level) = &self.log_level {
            overrides = overrides.set("--log-level", "log.level", level);
        }
        overrides
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
        Command::Config(command) => {
            let (path, environment, flags) = (global.path(), environment(), global.overrides());
            let (mut out, mut err) = (io::stdout().lock(), io::stderr().lock());
            match command {
                ConfigCommand::Check => written(config::check(path, environment, flags, &mut out, &mut err)),
                ConfigCommand::Print => written(config::print(path, environment, flags, &mut out, &mut err)),
            }
        }
        Command::Run => with_loaded(&global, |loaded| {
            run::run(reload::Origin { path: global.config.clone(), flags: global.overrides(), loaded })
        }),
        Command::Drain { json } => with_config(&global, |config| run::drain(config, json)),
        Command::Migrate { profile, dry_run } => {
            let profile = profile.map(|profile| match profile {
                ProfileName::Lean => Profile::Lean,
                ProfileName::Shared => Profile::Shared,
            });
            with_config(&global, |config| block_on(migrate(&config, migrate::Options { profile, dry_run })))
        }
        Command::Enqueue { batch, all_or_nothing: _, on_duplicate } => {
            with_config(&global, |config| block_on(enqueue(&config, batch, on_duplicate)))
        }
        Command::List(arguments) => {
            rows::run(&global, async |config, out| rows::list::list(config, &arguments, out).await)
        }
        Command::Show(arguments) => {
            rows::run(&global, async |config, out| rows::show::show(config, &arguments, out).await)
        }
        Command::Why(arguments) => {
            rows::run(&global, async |config, out| rows::why::why(config, &arguments, out).await)
        }
        Command::Stuck(arguments) => {
            rows::run(&global, async |config, out| rows::list::stuck(config, &arguments, out).await)
        }
        Command::GcPreview(arguments) => {
            rows::run(&global, async |config, out| rows::list::gc_preview(config, &arguments, out).await)
        }
        Command::Status(options) => with_config(&global, |config| block_on(status::status(&config, &options))),
        Command::Pause(options) => with_config(&global, |config| block_on(pause::pause(&config, &options))),
        Command::Resume(options) => with_config(&global, |config| block_on(pause::resume(&config, &options))),
        Command::Retry(retry) => with_config(&global, |config| block_on(change::retry(&config, retry))),
        Command::Cancel(cancel) => with_config(&global, |config| block_on(change::cancel(&config, cancel))),
        Command::Reschedule(it) => with_config(&global, |config| block_on(change::reschedule(&config, it))),
        Command::RequeueStuck(it) => with_config(&global, |config| block_on(change::requeue_stuck(&config, it))),
        Command::Prune(prune) => with_config(&global, |config| block_on(change::prune(&config, prune))),
        Command::Replay(replay) => with_config(&global, |config| block_on(change::replay(&config, replay))),
        Command::Demo(options) => {
            if global.config.is_some() {
                complain("demo writes its own configuration: leave --config out");
                return EXIT_USAGE;
            }
            let Global { database_url, brokers, log_level, config: _ } = global;
            demo::run(&options, demo::Given { database_url, brokers, log_level })
        }
        Command::Bench(options) => {
            if global.config.is_some() || global.database_url.is_some() || global.brokers.is_some() {
                complain("bench measures servers of its own: leave --config, --database-url and --brokers out");
                return EXIT_USAGE;
            }
            bench::run(&options)
        }
        Command::Doctor(options) => with_config(&global, |config| block_on(doctor::run(&config, &options))),
        Command::Verify(options) => with_config(&global, |config| block_on(verify::run(&config, options))),
        Command::Health { ready } => with_config(&global, |config| health(&config, ready)),
    }
}

async fn migrate(config: &Config, options: migrate::Options) -> u8 {
    let database = &config.database;
    match connect(config) {
        Ok(db) => {
            let (mut out, mut err) = (io::stdout(), io::stderr());
            written(migrate::run(&db, &database.schema, &database.table, options, &mut out, &mut err).await)
        }
        Err(code) => code,
    }
}

async fn enqueue(config: &Config, batch: Option<u32>, on_duplicate: enqueue::OnDuplicateName) -> u8 {
    let database = &config.database;
    match connect(config) {
        Ok(db) => {
            if io::stdin().is_terminal() {
                complain("enqueue: reading lines from the terminal; end them with Ctrl-D");
            }
            let (mut out, mut err) = (io::BufWriter::new(io::stdout()), io::stderr());
            let job = enqueue::Job {
                schema: &database.schema,
                table: &database.table,
                bound: database.statement_timeout + database.connect_timeout,
                limits: config.limits,
                on_duplicate: on_duplicate.into(),
                batch: batch.map(|lines| lines as usize),
                progress: enqueue::progress(),
            };
            written(enqueue::run(&db, &job, io::stdin().lock(), &mut out, &mut err).await)
        }
        Err(code) => code,
    }
}

/// A pool for a command, or its exit code.
fn connect(config: &Config) -> Result<Db, u8> {
    Db::new(&config.database, &config.relay.instance, &config.policy_hash()).map_err(|error| {
        complain(&error.to_string());
        EXIT_CONFIG
    })
}

fn health(config: &Config, ready: bool) -> u8 {
    match health::check(config.http.listen, ready, health::TIMEOUT) {
        Ok(answer) => {
            say(answer.body.trim_end());
            if answer.fine { EXIT_OK } else { EXIT_FAILED }
        }
        Err(error) => {
            complain(&error);
            EXIT_FAILED
        }
    }
}

/// The exit code of a command that writes: a reader that went away is no failure.
fn written(result: io::Result<u8>) -> u8 {
    match result {
        Ok(code) => code,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => EXIT_OK,
        Err(error) => {
            complain(&format!("cannot write: {error}"));
            EXIT_FAILED
        }
    }
}

/// Loads the configuration, or prints every problem and returns 78.
fn with_config(global: &Global, command: impl FnOnce(Config) -> u8) -> u8 {
    with_loaded(global, |loaded| command(loaded.config))
}

/// [`with_config`], with where each value comes from.
fn with_loaded(global: &Global, command: impl FnOnce(Loaded) -> u8) -> u8 {
    match Config::load(global.path(), environment(), global.overrides()) {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                complain(&format!("warning: {warning}"));
            }
            command(loaded)
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
