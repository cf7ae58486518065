//! The built binary, run as an operator runs it.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use keiro_relay::cli::demo::services::{self, Port, RunAs};

use super::{LONG, wait_until};

/// What a test's configuration file says beside servers and ports. Every text is TOML.
#[derive(Debug, Clone, Copy, Default)]
pub struct Setup<'a> {
    pub database_url: &'a str,
    /// `host:port` by commas.
    pub brokers: &'a str,
    /// More lines of `[database]`.
    pub database: &'a str,
    /// More lines of `[kafka]`.
    pub kafka: &'a str,
    /// Whole sections: `[relay]`, `[defaults]`, `[sources.x]`, `[maintenance]`, …
    pub sections: &'a str,
    /// Environment variables.
    pub environment: &'a [(&'a str, &'a str)],
}

impl Setup<'_> {
    /// The configuration file's text.
    pub fn toml(&self, http_port: u16) -> String {
        let brokers: Vec<_> = self.brokers.split(',').map(|broker| format!("{broker:?}")).collect();
        let mut text = format!("[database]\nurl = {:?}\n{}\n", self.database_url, self.database);
        let _ = write!(text, "\n[kafka]\nbrokers = [{}]\n{}\n", brokers.join(", "), self.kafka);
        let _ = write!(text, "\n[http]\nlisten = \"127.0.0.1:{http_port}\"\n\n{}\n", self.sections);
        text
    }
}

/// A running `keiro-relay run`; killed when it is dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    directory: PathBuf,
    http: Port,
    status: Option<ExitStatus>,
}

impl Daemon {
    /// Starts `keiro-relay run`; returns at once.
    pub fn start(setup: &Setup<'_>) -> Self {
        Self::start_as(setup, &["run"])
    }

    /// Starts another subcommand with the same configuration.
    pub fn start_as(setup: &Setup<'_>, arguments: &[&str]) -> Self {
        let directory = services::fresh_directory("daemon").expect("a directory for the daemon");
        let http = Port::reserve().expect("a port for the daemon");
        let config = directory.join("keiro-relay.toml");
        fs::write(&config, setup.toml(http.number())).expect("write the configuration");
        let child = start(&directory, &config, setup, arguments, Stdio::null());
        Self { child, directory, http, status: None }
    }

    /// Its process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The address of its HTTP server.
    pub fn http_address(&self) -> String {
        format!("127.0.0.1:{}", self.http.number())
    }

    /// Its configuration file.
    pub fn config(&self) -> PathBuf {
        self.directory.join("keiro-relay.toml")
    }

    /// Sends a signal: `TERM`, `INT`, `STOP`, `CONT`, `KILL`, …
    pub fn signal(&self, name: &str) {
        assert!(self.status.is_none(), "the daemon ended before it was sent {name}");
        services::signal(name, &[self.child.id()]).expect("send a signal");
    }

    /// Writes another configuration file and tells the daemon to read it.
    pub fn reload(&self, setup: &Setup<'_>) {
        fs::write(self.config(), setup.toml(self.http.number())).expect("write the configuration");
        self.signal("HUP");
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("look at the daemon");
        }
        self.status.is_none()
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self, bound: Duration) -> ExitStatus {
        if self.status.is_none() {
            self.status = services::wait_bounded(&mut self.child, bound);
        }
        self.status.unwrap_or_else(|| panic!("the daemon still runs after {bound:?}; its log:\n{}", self.stderr()))
    }

    /// Kills it as a power cut would and waits for its end.
    pub fn kill(&mut self) {
        if self.is_running() {
            self.signal("KILL");
            self.wait(LONG);
        }
    }

    /// What it has written to its standard output.
    pub fn stdout(&self) -> String {
        text(&self.directory.join("stdout"))
    }

    /// What it has written to its standard error.
    pub fn stderr(&self) -> String {
        text(&self.directory.join("stderr"))
    }

    /// Asks its HTTP server; `None` when it does not answer.
    pub fn http_get(&self, path: &str) -> Option<Response> {
        http_get(&self.http_address(), path)
    }

    /// The value of a series, such as `keiro_relay_rows_total{outcome="sent",source="a"}`; `None` when it is not there.
    pub fn metric(&self, series: &str) -> Option<f64> {
        let metrics = self.http_get("/metrics")?.body;
        let value = metrics.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))?;
        Some(value.parse().expect("a number"))
    }

    /// A path's answer as JSON, whatever its status.
    #[track_caller]
    pub fn json(&self, path: &str) -> serde_json::Value {
        let answer = self.http_get(path).unwrap_or_else(|| panic!("{path} does not answer"));
        serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{path}: {error} in {}", answer.body))
    }

    /// Waits until a path answers 200.
    #[track_caller]
    pub fn wait_http_ok(&mut self, path: &str, bound: Duration) {
        wait_until(&format!("{path} to answer 200"), bound, || {
            assert!(self.is_running(), "the daemon ended: {:?}\n{}", self.status, self.stderr());
            self.http_get(path).is_some_and(|response| response.status == 200)
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if self.status.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- stderr of keiro-relay {}\n{}", self.child.id(), self.stderr());
        }
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// What a finished command left.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a subcommand to its end, within a minute, with this standard input.
#[track_caller]
pub fn run_command(setup: &Setup<'_>, arguments: &[&str], input: &str) -> Finished {
    let directory = services::fresh_directory("command").expect("a directory for the command");
    let http = Port::reserve().expect("a port");
    let config = directory.join("keiro-relay.toml");
    fs::write(&config, setup.toml(http.number())).expect("write the configuration");
    let stdin = directory.join("stdin");
    fs::write(&stdin, input).expect("write the input");
    let stdin = File::open(&stdin).expect("open the input");
    let mut child = start(&directory, &config, setup, arguments, stdin.into());
    let status = services::wait_bounded(&mut child, LONG);
    if status.is_none() {
        let _ = child.kill();
        let _ = child.wait();
    }
    let (stdout, stderr) = (text(&directory.join("stdout")), text(&directory.join("stderr")));
    let _ = fs::remove_dir_all(&directory);
    let status = status.unwrap_or_else(|| panic!("{arguments:?} still ran after {LONG:?}; it said:\n{stderr}"));
    Finished { status, stdout, stderr }
}

fn start(directory: &Path, config: &Path, setup: &Setup<'_>, arguments: &[&str], input: Stdio) -> Child {
    let output = |name| File::create(directory.join(name)).expect("open an output file");
    let mut command =
        services::tethered(OsStr::new(env!("CARGO_BIN_EXE_keiro-relay")), RunAs::Ourselves).expect("a command");
    command.args(arguments).arg("--config").arg(config).current_dir(directory).envs(setup.environment.iter().copied());
    command.stdin(input).stdout(output("stdout")).stderr(output("stderr"));
    services::spawn(command).expect("start keiro-relay")
}

fn text(file: &Path) -> String {
    String::from_utf8_lossy(&fs::read(file).unwrap_or_default()).into_owned()
}

/// An answer over HTTP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub head: String,
    pub body: String,
}

/// Asks for a path with HTTP/1.0, so that the answer ends with the connection; `None` when there is no whole answer.
pub fn http_get(address: &str, path: &str) -> Option<Response> {
    let limit = Some(Duration::from_secs(10));
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(limit).ok()?;
    stream.set_write_timeout(limit).ok()?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).ok()?;
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split_whitespace().nth(1)?.parse().ok()?;
    Some(Response { status, head: head.to_owned(), body: body.to_owned() })
}
