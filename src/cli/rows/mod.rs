//! Commands that show rows, and the filters that every command about rows shares.
//!
//! Nothing here ever changes a row: every statement runs in a read-only transaction, for at most `--timeout`.

pub mod cursor;
pub mod explain;
pub mod filter;
pub mod list;
pub mod show;
pub mod text;
pub mod why;

use std::io::{self, BufWriter, StdoutLock, Write as _};
use std::time::Duration;

use clap::Args;

use super::operator::open_to_look;
use super::{EXIT_CONFIG, EXIT_FAILED, Global, block_on, complain, with_config, written};
use crate::config::Config;
use crate::store::{ErrorKind, Store, StoreError};

/// What every command that only looks takes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Options")]
pub struct Look {
    /// One JSON object a line.
    #[arg(long)]
    pub json: bool,
    /// Longest wait for the database.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = parse_timeout)]
    pub timeout: Duration,
}

/// Runs a command that writes rows to standard output.
pub(super) fn run(global: &Global, command: impl AsyncFnOnce(&Config, &mut Output) -> io::Result<u8>) -> u8 {
    with_config(global, |config| {
        block_on(async {
            let mut out = BufWriter::new(io::stdout().lock());
            let result = command(&config, &mut out).await;
            written(result.and_then(|code| out.flush().map(|()| code)))
        })
    })
}

/// Opens the table: nothing can be changed over it.
async fn open(config: &Config, command: &str) -> Result<Store, u8> {
    open_to_look(config).await.map_err(|(text, code)| {
        complain(&format!("{command}: {text}"));
        code
    })
}

/// Where rows go.
type Output = BufWriter<StdoutLock<'static>>;

fn parse_timeout(text: &str) -> Result<Duration, String> {
    const SECOND: Duration = Duration::from_millis(100);
    const HOUR: Duration = Duration::from_secs(3600);
    match humantime::parse_duration(text) {
        Ok(duration) if (SECOND..=HOUR).contains(&duration) => Ok(duration),
        Ok(_) | Err(_) => Err("expected a duration from 100ms to 1h such as 30s".to_owned()),
    }
}

/// Says why a look failed, and returns the exit code.
fn failed(command: &str, error: &StoreError, look: &Look, unserved: Option<&str>) -> u8 {
    if error.is_timeout() {
        let why = unserved.map_or_else(String::new, |unserved| format!(" ({unserved})"));
        let timeout = look.timeout;
        complain(&format!(
            "{command}: it took longer than {timeout:?}{why}: narrow it down, or give it a longer --timeout"
        ));
        return EXIT_FAILED;
    }
    complain(&format!("{command}: {error}"));
    match error.kind() {
        ErrorKind::Mismatch | ErrorKind::Auth => EXIT_CONFIG,
        ErrorKind::Transient | ErrorKind::Serialization | ErrorKind::Fatal => EXIT_FAILED,
    }
}
