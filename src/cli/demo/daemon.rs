//! The relay of the demo: `keiro-relay run` as a child process with a configuration file, exactly as users run it.
//!
//! Nothing here ever outlives the demo, and the child sees none of the demo's own `KEIRO_RELAY__…` variables.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::cast::ROLES;
use super::services::{self, Port, RunAs};
use crate::cli::health;
use crate::config::{ConfigFile, Loaded, Overrides};

/// How long the relay may take to answer over HTTP.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How long it may take to stop; its own grace is 20 s.
const STOP_MAX: Duration = Duration::from_secs(30);
/// Lines of its log that an error shows.
const LOG_LINES_SHOWN: usize = 8;

/// The files of the demo's relay.
pub(super) struct Files {
    pub directory: PathBuf,
    pub config: PathBuf,
    pub log: PathBuf,
    http: Port,
}

/// What the configuration depends on.
pub(super) struct Settings<'a> {
    pub database_url: &'a str,
    pub schema: &'a str,
    pub brokers: &'a str,
    pub prefix: &'a str,
    pub log_level: &'a str,
}

impl Files {
    /// Makes a directory that goes with this process, and a port that is ours.
    ///
    /// # Errors
    /// The directory for temporary files cannot be written, or there is no port.
    pub(super) fn new() -> Result<Self, String> {
        let directory = services::fresh_directory("demo").map_err(|error| error.to_string())?;
        let (config, log) = (directory.join("keiro-relay.toml"), directory.join("relay.log"));
        let http = Port::reserve().map_err(|error| error.to_string())?;
        Ok(Self { directory, config, log, http })
    }

    /// Where the relay serves HTTP.
    pub(super) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.http.number()))
    }

    /// Writes the configuration, readable by us alone since a URL may hold a password, and checks it.
    ///
    /// # Errors
    /// Every problem of the configuration, or why it cannot be written.
    pub(super) fn write(&self, settings: &Settings<'_>) -> Result<Loaded, String> {
        let text = self.toml(settings);
        let written = File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&self.config)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| format!("write {}: {error}", self.config.display()))?;
        let name = self.config.display().to_string();
        Loaded::from(ConfigFile::Text { name: &name, text: &text }, [], Overrides::new())
            .map_err(|problems| problems.to_string())
    }

    fn toml(&self, settings: &Settings<'_>) -> String {
        let Settings { database_url, schema, brokers, prefix, log_level } = settings;
        let brokers: Vec<String> = brokers.split(',').map(|broker| text(broker.trim())).collect();
        let mut toml = format!(
            "# Written by keiro-relay demo. What is not here has its default: see `keiro-relay config print`.\n\
             [database]\nurl = {}\nschema = {}\n\n[kafka]\nbrokers = [{}]\n\n\
             # Whatever else is in this table is left alone.\n[relay]\nunlisted_sources = \"ignore\"\n\n",
            text(database_url),
            text(schema),
            brokers.join(", ")
        );
        for role in &ROLES {
            let source = format!("{prefix}{}", role.name);
            let _ = write!(toml, "[sources.{}]\npolicy = {}\n\n", text(&source), text(role.policy.name()));
        }
        let _ = write!(
            toml,
            "# How often the rows shown at /status are counted.\n[maintenance]\ninterval = \"2s\"\n\n[http]\nlisten = {}\n\n\
             [log]\nformat = \"text\"\nlevel = {}\n",
            text(&self.address().to_string()),
            text(log_level)
        );
        toml
    }

    /// The last lines of the relay's log, indented.
    pub(super) fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let shown = &lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..];
        shown.iter().fold(String::new(), |tail, line| tail + "\n    " + line)
    }
}

/// A text as TOML writes it: JSON's escapes are TOML's too.
fn text(value: &str) -> String {
    Value::from(value).to_string()
}

/// The relay's process; killed when it is dropped.
pub(super) struct Daemon {
    child: Child,
    address: SocketAddr,
}

impl Daemon {
    /// Starts `keiro-relay run`.
    ///
    /// # Errors
    /// Our own program cannot be found or started.
    pub(super) fn start(files: &Files) -> Result<Self, String> {
        let program = std::env::current_exe().map_err(|error| format!("find our own program: {error}"))?;
        let log = File::create(&files.log).map_err(|error| format!("write {}: {error}", files.log.display()))?;
        let mut command = services::tethered(&program, RunAs::Ourselves).map_err(|error| error.to_string())?;
        command.arg("run").arg("--config").arg(&files.config).current_dir(&files.directory);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().to_uppercase().starts_with("KEIRO_RELAY__") {
                command.env_remove(name);
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = services::spawn(command).map_err(|error| format!("start {}: {error}", program.display()))?;
        Ok(Self { child, address: files.address() })
    }

    /// Whether it still runs; else how it ended.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Asks for a path over HTTP.
    pub(super) async fn get(&self, path: &'static str) -> Option<health::Answer> {
        let address = self.address;
        let ask = tokio::task::spawn_blocking(move || health::ask(address, path, ANSWER_MAX));
        ask.await.ok()?.ok()
    }

    /// Why a source is halted, as `/status` says: the row and the reason.
    pub(super) async fn halted(&self, source: &str) -> Option<(String, String)> {
        let answer = self.get("/status").await?;
        let status: Value = serde_json::from_str(&answer.body).ok()?;
        let sources = status["sources"].as_array()?;
        let found = sources.iter().find(|found| found["source"] == source)?;
        let row = found["halted_on"].as_str()?.to_owned();
        Some((row, found["halt"]["reason"].as_str().unwrap_or_default().to_owned()))
    }

    /// Asks it to stop (SIGTERM) and waits for its end.
    ///
    /// # Errors
    /// It did not stop in time, or not with exit code 0.
    pub(super) async fn stop(mut self) -> Result<(), String> {
        services::signal("TERM", &[self.child.id()]).map_err(|error| format!("stop the relay: {error}"))?;
        let stopped = tokio::task::spawn_blocking(move || {
            let status = services::wait_bounded(&mut self.child, STOP_MAX);
            drop(self);
            status
        });
        match stopped.await.map_err(|error| error.to_string())? {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(format!("the relay ended with {status} instead of exit code 0")),
            None => Err(format!("the relay did not stop within {STOP_MAX:?}")),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A path as a word of a shell's command line.
pub(super) fn shell_word(path: &Path) -> String {
    let path = path.display().to_string();
    if path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c)) {
        path
    } else {
        format!("'{}'", path.replace('\'', r"'\''"))
    }
}
