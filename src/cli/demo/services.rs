//! Real PostgreSQL and Kafka as child processes, for the demo, the bench and the tests.
//!
//! Nothing here outlives the process that started it, however that process ends: every child is tied to it by the
//! parent-death signal, and a keeper (a small shell that waits for the end of a pipe) then removes what the servers
//! left on disk. Nothing here ever listens beyond loopback, and nothing here downloads anything: the programs come
//! from the directory that `make services` fills.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use tokio::net::TcpSocket;

/// Names the directory that holds PostgreSQL and Kafka when it is not `target/services`.
pub const SERVICES_DIR_VARIABLE: &str = "KEIRO_RELAY_SERVICES_DIR";

/// How long a server may take to start: a cold disk and two busy cores need 15 s at worst.
const START_MAX: Duration = Duration::from_secs(60);
/// How long a server may take to stop when asked politely.
const STOP_MAX: Duration = Duration::from_secs(30);
/// How long a killed or stopped process may take to show it.
const SIGNAL_MAX: Duration = Duration::from_secs(10);
/// Pause between two looks at a condition.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);
/// How much of a server's log an error shows.
const LOG_TAIL_BYTES_MAX: u64 = 4096;

/// What went wrong with a server, in words for the person at the terminal.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The programs are not where they should be.
    #[error(
        "{what} is not in {}: run `make services`, or name another directory with {SERVICES_DIR_VARIABLE}",
        directory.display()
    )]
    Missing { what: &'static str, directory: PathBuf },
    /// A server did not do what it was asked.
    #[error("{server}: {problem}\nlast lines of {}:\n{tail}", log.display())]
    Server { server: String, problem: String, log: PathBuf, tail: String },
    /// The operating system refused something.
    #[error("{doing}: {cause}")]
    System { doing: String, cause: io::Error },
    /// A statement failed.
    #[error("{server}: {doing}: {cause}")]
    Database { server: String, doing: String, cause: tokio_postgres::Error },
}

/// Adds what was being done to an IO error.
fn system(doing: impl Into<String>) -> impl FnOnce(io::Error) -> ServiceError {
    let doing = doing.into();
    move |cause| ServiceError::System { doing, cause }
}

// ---------------------------------------------------------------------------------------------------------------
// Where the programs are

/// The directory that `make services` fills: `postgres/` and `lib/`.
#[derive(Debug, Clone)]
pub struct Installation {
    directory: PathBuf,
}

impl Installation {
    /// Finds the programs: the directory given, else the one the environment names, else `target/services`.
    ///
    /// # Errors
    /// When PostgreSQL or Kafka is not there; the text says what to run.
    pub fn locate(directory: Option<&Path>) -> Result<Self, ServiceError> {
        let directory = match directory {
            Some(directory) => directory.to_path_buf(),
            None => std::env::var_os(SERVICES_DIR_VARIABLE)
                .filter(|value| !value.is_empty())
                .map_or_else(|| PathBuf::from("target/services"), PathBuf::from),
        };
        // Children run in directories of their own, so a relative path would mean something else to them.
        let absolute = std::path::absolute(&directory).map_err(system(format!("resolve {}", directory.display())))?;
        let installation = Self { directory: absolute };
        if !installation.directory.join("postgres/bin/postgres").is_file() {
            return Err(ServiceError::Missing { what: "PostgreSQL", directory: installation.directory });
        }
        let has_kafka = fs::read_dir(installation.lib()).is_ok_and(|entries| {
            entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with("kafka_"))
        });
        if !has_kafka {
            return Err(ServiceError::Missing { what: "Kafka", directory: installation.directory });
        }
        Ok(installation)
    }

    fn lib(&self) -> PathBuf {
        self.directory.join("lib")
    }

    /// PostgreSQL's `bin` directory as its user can reach it: a clone under `/root` is closed to `nobody`, so
    /// root's PostgreSQL then runs from a copy, made once per process.
    fn postgres_bin(&self, run: &Path) -> Result<PathBuf, ServiceError> {
        static COPIES: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());
        let home = self.directory.join("postgres");
        if reachable(&home.join("bin/postgres"))? {
            return Ok(home.join("bin"));
        }
        let mut copies = lock(&COPIES);
        if let Some(copy) = copies.get(&home) {
            return Ok(copy.join("bin"));
        }
        let copy = run.join(format!("programs-{}", copies.len()));
        let mut command = Command::new("cp");
        command.arg("-R").arg(&home).arg(&copy);
        run_to_end(command, "copy PostgreSQL's programs")?;
        copies.insert(home, copy.clone());
        Ok(copy.join("bin"))
    }
}

/// Whether the user PostgreSQL runs as may execute this file, or enter this directory.
fn reachable(path: &Path) -> Result<bool, ServiceError> {
    let mut command = tethered("test", RunAs::Unprivileged)?;
    command.arg("-x").arg(path).stdin(Stdio::null());
    let status =
        spawn(command).and_then(|mut child| child.wait()).map_err(system("look at files as PostgreSQL's user"))?;
    Ok(status.success())
}

// ---------------------------------------------------------------------------------------------------------------
// Children that die with us

/// As whom a child runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunAs {
    /// As we do.
    Ourselves,
    /// As we do, but as `nobody` when we are root.
    Unprivileged,
}

/// A command whose process is killed when we end, in a process group of its own so that Ctrl-C reaches only us.
/// Start it with [`spawn`].
///
/// # Errors
/// When the ids of `nobody` are needed and cannot be had.
pub fn tethered(program: impl AsRef<OsStr>, run_as: RunAs) -> Result<Command, ServiceError> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).process_group(0);
    match run_as {
        RunAs::Ourselves => {}
        RunAs::Unprivileged if !is_root() => {}
        RunAs::Unprivileged => {
            let (user, group) = nobody()?;
            command.args(["--reuid", user, "--regid", group, "--clear-groups"]);
        }
    }
    command.arg("--").arg(program);
    Ok(command)
}

/// Starts a child from a thread that never ends.
///
/// The parent-death signal is sent when the *thread* that started the child ends, and test threads end early.
///
/// # Errors
/// When the program cannot be started.
pub fn spawn(command: Command) -> io::Result<Child> {
    type Request = (Command, mpsc::Sender<io::Result<Child>>);
    static SPAWNER: OnceLock<mpsc::Sender<Request>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, requests) = mpsc::channel::<Request>();
        thread::Builder::new()
            .name("spawner".to_owned())
            .spawn(move || {
                for (mut command, reply) in requests {
                    // Whoever asked may have gone: then its child goes too.
                    if let Err(mpsc::SendError(Ok(mut unwanted))) = reply.send(command.spawn()) {
                        let _ = unwanted.kill();
                        let _ = unwanted.wait();
                    }
                }
            })
            .expect("a thread can be started");
        sender
    });
    let program = command.get_program().to_string_lossy().into_owned();
    let (reply, answer) = mpsc::channel();
    spawner.send((command, reply)).expect("the spawner never ends");
    answer.recv().expect("the spawner answers").map_err(|cause| {
        if cause.kind() == io::ErrorKind::NotFound {
            io::Error::new(cause.kind(), format!("{program} is not installed (setpriv comes with util-linux)"))
        } else {
            cause
        }
    })
}

/// Sends a signal (`STOP`, `TERM`, …) to processes; those that are gone already are passed over.
///
/// By the shell's own `kill`, since the program of that name is missing from minimal systems.
///
/// # Errors
/// When no shell can be started.
pub fn signal(name: &str, processes: &[u32]) -> io::Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", r#"kill -s "$0" "$@""#, name]).args(processes.iter().map(u32::to_string));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().map(|_| ())
}

fn run_to_end(mut command: Command, doing: &str) -> Result<(), ServiceError> {
    let output = command.stdin(Stdio::null()).output().map_err(system(doing))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(ServiceError::System { doing: doing.to_owned(), cause: io::Error::other(format!("{}: {said}", output.status)) })
}

/// The effective user, read from the owner of our own entry in `/proc`.
fn user_id() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|metadata| metadata.uid())
}

fn is_root() -> bool {
    user_id() == Some(0)
}

/// Numeric user and group of `nobody` (its group has other names on other systems).
fn nobody() -> Result<(&'static str, &'static str), ServiceError> {
    static IDS: Mutex<Option<(&'static str, &'static str)>> = Mutex::new(None);
    let mut ids = lock(&IDS);
    if let Some(known) = *ids {
        return Ok(known);
    }
    let id = |flag: &str| -> Result<&'static str, ServiceError> {
        let output = Command::new("id")
            .args([flag, "nobody"])
            .stdin(Stdio::null())
            .output()
            .map_err(system("look up the user `nobody`"))?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if text.is_empty() {
            return Err(ServiceError::System {
                doing: "look up the user `nobody`, as whom root's PostgreSQL runs".to_owned(),
                cause: io::ErrorKind::NotFound.into(),
            });
        }
        Ok(Box::leak(text.into_boxed_str()))
    };
    let found = (id("-u")?, id("-g")?);
    *ids = Some(found);
    Ok(found)
}

/// One field of `/proc/PID/stat`, counted as `man 5 proc_pid_stat` does; fields before the third are not offered,
/// since the second may hold spaces.
fn stat_field(process: u32, field: usize) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let (_, after_name) = text.rsplit_once(')')?;
    after_name.split_whitespace().nth(field.checked_sub(3)?).map(str::to_owned)
}

/// When a process started, which together with its id names it for good.
fn start_time(process: u32) -> Option<String> {
    stat_field(process, 22)
}

fn state(process: u32) -> Option<String> {
    stat_field(process, 3)
}

/// Gone, or dead and waiting for somebody to notice.
fn is_gone(process: u32) -> bool {
    state(process).is_none_or(|state| state == "Z" || state == "X")
}

fn children_of(parent: u32) -> Vec<u32> {
    let parent = parent.to_string();
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|process| stat_field(*process, 4).as_deref() == Some(parent.as_str()))
        .collect()
}

/// Looks until the condition holds; false when it did not within the bound.
fn holds_within(bound: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + bound;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(LOOK_INTERVAL);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ---------------------------------------------------------------------------------------------------------------
// Where servers keep their files

/// Every run directory's name starts with this; its owner's process id, start time and process namespace follow.
const RUN_PREFIX: &str = "keiro-relay-run-";

/// `$1` is a directory of ours whose owner is gone, `$2…` a command prefix that turns into PostgreSQL's user.
/// Kills what still runs in it (backends that were stopped with SIGSTOP outlive their postmaster), frees the System V
/// segment a killed PostgreSQL leaves (only when key and id both match), removes the files.
const SWEEP: &str = r#"
dir=$1; shift
kill_inside() {
    "$@" find /proc -maxdepth 2 -path '/proc/[0-9]*/cwd' \( -lname "$dir" -o -lname "$dir/*" \) 2>/dev/null |
        while IFS=/ read -r _ _ process _; do kill -s KILL "$process" 2>/dev/null; done
}
kill_inside env
[ $# -eq 0 ] || kill_inside "$@"
for file in "$dir"/data/postmaster.pid "$dir"/*/data/postmaster.pid; do
    [ -f "$file" ] || continue
    sed -n 7p "$file" | while read -r key segment; do
        grep -q "^ *$key  *$segment " /proc/sysvipc/shm && ipcrm -m "$segment" 2>/dev/null
    done
done
tries=0
until rm -rf "$dir" 2>/dev/null || [ $tries -ge 50 ]; do sleep 0.1; tries=$((tries + 1)); done
exit 0
"#;

/// The keeper's script: its standard input ends when we do.
fn keeper_script() -> String {
    format!("trap '' HUP INT TERM\ncat >/dev/null\n{SWEEP}")
}

fn sweep_command(script: &str, directory: &Path) -> Result<Command, ServiceError> {
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh"]).arg(directory);
    if is_root() {
        // Root without the ptrace capability (the usual container) cannot see where other users' processes are.
        let (user, group) = nobody()?;
        command.args(["setpriv", "--reuid", user, "--regid", group, "--clear-groups"]);
    }
    // Never our standard output: whoever reads it to its end would wait for the keeper.
    command.current_dir("/").stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    Ok(command)
}

/// Kills what runs in a server's directory and removes it.
fn sweep(directory: &Path) {
    if let Ok(mut command) = sweep_command(SWEEP, directory) {
        let _ = command.stdin(Stdio::null()).status();
    }
}

/// This process's directory for servers; made at the first use, together with the keeper that removes it.
fn run_directory() -> Result<PathBuf, ServiceError> {
    /// The pipe's end is held until the process ends; the keeper waits for that.
    static RUN: Mutex<Option<(PathBuf, ChildStdin)>> = Mutex::new(None);
    let mut run = lock(&RUN);
    if let Some((directory, _)) = &*run {
        return Ok(directory.clone());
    }
    let parent = std::env::temp_dir();
    let parent = fs::canonicalize(&parent).map_err(system(format!("find the directory {}", parent.display())))?;
    sweep_leftovers(&parent);

    let process = std::process::id();
    let started = start_time(process)
        .ok_or(io::ErrorKind::NotFound)
        .map_err(|kind| ServiceError::System { doing: "read our own entry in /proc".to_owned(), cause: kind.into() })?;
    let directory = parent.join(format!("{RUN_PREFIX}{process}-{started}-{}", process_namespace()));
    let doing = || format!("make the directory {}", directory.display());
    fs::DirBuilder::new().mode(0o700).create(&directory).map_err(system(doing()))?;
    // Entered by PostgreSQL's user on its way to its own directory, whatever our umask is; read by nobody else.
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o711)).map_err(system(doing()))?;

    let mut keeper = sweep_command(&keeper_script(), &directory)?;
    let mut keeper = keeper.stdin(Stdio::piped()).spawn().map_err(system("start the keeper of temporary files"))?;
    let pipe = keeper.stdin.take().expect("the keeper's input is a pipe");
    *run = Some((directory.clone(), pipe));
    Ok(directory)
}

/// Names the process namespace: a process id from another container says nothing about ours.
fn process_namespace() -> String {
    fs::read_link("/proc/self/ns/pid")
        .map(|link| link.to_string_lossy().chars().filter(char::is_ascii_digit).collect())
        .unwrap_or_default()
}

/// Removes directories of ours whose owner and keeper are both gone.
fn sweep_leftovers(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(owner) = name.to_str().and_then(|name| name.strip_prefix(RUN_PREFIX)) else { continue };
        let mut parts = owner.split('-');
        let (Some(process), Some(started), Some(namespace)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let Ok(process) = process.parse::<u32>() else { continue };
        let lives = start_time(process).as_deref() == Some(started);
        let is_ours = entry.metadata().is_ok_and(|found| found.is_dir() && Some(found.uid()) == user_id());
        if !lives && is_ours && namespace == process_namespace() {
            sweep(&entry.path());
        }
    }
}

/// A fresh directory, for one server or whatever else should not outlive this process.
///
/// # Errors
/// When the directory for temporary files cannot be written.
pub fn fresh_directory(kind: &str) -> Result<PathBuf, ServiceError> {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    let directory = run_directory()?.join(format!("{kind}-{}", COUNT.fetch_add(1, Ordering::Relaxed)));
    fs::create_dir(&directory).map_err(system(format!("make the directory {}", directory.display())))?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o711))
        .map_err(system(format!("open the directory {}", directory.display())))?;
    Ok(directory)
}

// ---------------------------------------------------------------------------------------------------------------
// Ports

/// A loopback port that is ours until this is dropped.
///
/// The socket is bound and never listens. Linux hands such a port to nobody else, neither to a bind to port 0 nor to
/// an outgoing connection, but lets our server listen on it, because both sides set `SO_REUSEADDR`. While the server
/// is down, clients are refused as they should be.
#[derive(Debug)]
pub struct Port {
    number: u16,
    _reservation: TcpSocket,
}

impl Port {
    /// Reserves a free port.
    ///
    /// # Errors
    /// When there is none.
    pub fn reserve() -> Result<Self, ServiceError> {
        let reserve = || {
            let socket = TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(([127, 0, 0, 1], 0).into())?;
            Ok(Self { number: socket.local_addr()?.port(), _reservation: socket })
        };
        reserve().map_err(system("reserve a port on 127.0.0.1"))
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }
}

// ---------------------------------------------------------------------------------------------------------------
// What both servers have in common

/// One server process with its log, running or not.
#[derive(Debug)]
struct Server {
    /// How errors call it.
    name: String,
    log: PathBuf,
    child: Option<Child>,
    /// The processes stopped by `pause`, to be woken in reverse order.
    paused: Vec<u32>,
}

impl Server {
    fn new(name: String, log: PathBuf) -> Self {
        Self { name, log, child: None, paused: Vec::new() }
    }

    fn error(&self, problem: impl Into<String>) -> ServiceError {
        ServiceError::Server {
            server: self.name.clone(),
            problem: problem.into(),
            log: self.log.clone(),
            tail: log_from(&self.log, None),
        }
    }

    /// Gives a command our log as its output.
    fn logged(&self, mut command: Command) -> Result<Command, ServiceError> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .and_then(|log| Ok((log.try_clone()?, log)))
            .map_err(system(format!("open the log {}", self.log.display())))?;
        command.stdin(Stdio::null()).stdout(log.0).stderr(log.1);
        Ok(command)
    }

    /// Runs a program that prepares the server, such as `initdb`.
    fn prepare(&self, command: Command, what: &str) -> Result<(), ServiceError> {
        let mut child = spawn(self.logged(command)?).map_err(system(format!("start {what}")))?;
        match wait_bounded(&mut child, START_MAX) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.error(format!("{what} failed: {status}"))),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                Err(self.error(format!("{what} took longer than {START_MAX:?}")))
            }
        }
    }

    fn launch(&mut self, command: Command) -> Result<(), ServiceError> {
        assert!(self.child.is_none(), "a server is started only when it does not run");
        let child = spawn(self.logged(command)?).map_err(system(format!("start {}", self.name)))?;
        self.child = Some(child);
        Ok(())
    }

    /// Waits until the server answers; leaves nothing running when it does not.
    fn wait_ready(&mut self, mut ready: impl FnMut(u32) -> bool) -> Result<(), ServiceError> {
        let child = self.child.as_mut().expect("a server that was launched");
        let mut ended = None;
        let came = holds_within(START_MAX, || {
            ended = child.try_wait().ok().flatten();
            ended.is_some() || ready(child.id())
        });
        match (ended, came) {
            (None, true) => Ok(()),
            (Some(status), _) => {
                self.child = None;
                Err(self.error(format!("ended while starting: {status}")))
            }
            (None, false) => {
                let error = self.error(format!("was not ready within {START_MAX:?}"));
                self.kill()?;
                Err(error)
            }
        }
    }

    fn id(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Asks the server to end and waits for it; kills it, and says so, when it does not.
    fn stop(&mut self, with: &str) -> Result<(), ServiceError> {
        self.resume()?;
        let Some(child) = self.child.as_mut() else { return Ok(()) };
        signal(with, &[child.id()]).map_err(system(format!("stop {}", self.name)))?;
        if wait_bounded(child, STOP_MAX).is_some() {
            self.child = None;
            return Ok(());
        }
        let error = self.error(format!("did not stop within {STOP_MAX:?} and was killed"));
        self.kill()?;
        Err(error)
    }

    /// Kills the server and its children at once, as a power cut would.
    fn kill(&mut self) -> Result<(), ServiceError> {
        self.paused.clear();
        let Some(mut child) = self.child.take() else { return Ok(()) };
        // Stopped first, so that it makes no more children while we look for them.
        signal("STOP", &[child.id()]).map_err(system(format!("kill {}", self.name)))?;
        holds_within(SIGNAL_MAX, || state(child.id()).is_none_or(|state| state == "T" || state == "Z"));
        let children = children_of(child.id());
        if !children.is_empty() {
            signal("KILL", &children).map_err(system(format!("kill {}", self.name)))?;
        }
        child.kill().and_then(|()| child.wait()).map_err(system(format!("kill {}", self.name)))?;
        if holds_within(SIGNAL_MAX, || children.iter().all(|process| is_gone(*process))) {
            Ok(())
        } else {
            Err(self.error(format!("children outlived SIGKILL by {SIGNAL_MAX:?}")))
        }
    }

    /// Stops every process of the server in its tracks; returns when all of them stand.
    fn pause(&mut self) -> Result<(), ServiceError> {
        let Some(parent) = self.id() else { return Err(self.error("cannot be paused: it does not run")) };
        if !self.paused.is_empty() {
            return Ok(());
        }
        // The parent first, so that it makes no more children while we look for them.
        self.paused.push(parent);
        self.stand_still(&[parent])?;
        let children = children_of(parent);
        self.paused.extend(&children);
        self.stand_still(&children)
    }

    fn stand_still(&self, processes: &[u32]) -> Result<(), ServiceError> {
        if processes.is_empty() {
            return Ok(());
        }
        signal("STOP", processes).map_err(system(format!("pause {}", self.name)))?;
        let stopped = |process: &u32| state(*process).is_none_or(|state| matches!(state.as_str(), "T" | "t" | "Z"));
        if holds_within(SIGNAL_MAX, || processes.iter().all(stopped)) {
            Ok(())
        } else {
            Err(self.error(format!("was not paused within {SIGNAL_MAX:?}")))
        }
    }

    fn resume(&mut self) -> Result<(), ServiceError> {
        let mut processes = std::mem::take(&mut self.paused);
        if processes.is_empty() {
            return Ok(());
        }
        processes.reverse();
        signal("CONT", &processes).map_err(system(format!("resume {}", self.name)))
    }
}

/// Waits for a child, but not for ever: `None` when it still runs at the end.
pub fn wait_bounded(child: &mut Child, bound: Duration) -> Option<ExitStatus> {
    let mut status = None;
    holds_within(bound, || {
        status = child.try_wait().ok().flatten();
        status.is_some()
    });
    status
}

/// The log from a position on, or its tail.
fn log_from(log: &Path, position: Option<u64>) -> String {
    let mut bytes = Vec::new();
    if let Ok(mut file) = File::open(log) {
        let length = file.metadata().map_or(0, |metadata| metadata.len());
        let from = position.unwrap_or_else(|| length.saturating_sub(LOG_TAIL_BYTES_MAX));
        if file.seek(SeekFrom::Start(from)).is_ok() {
            let _ = file.read_to_end(&mut bytes);
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

// ---------------------------------------------------------------------------------------------------------------
// PostgreSQL

/// How a PostgreSQL is set up.
#[derive(Debug, Clone, Copy, Default)]
pub struct PostgresOptions<'a> {
    /// Whether commits reach the disk: off for tests, on for figures that compare.
    pub fsync: bool,
    /// Settings by name; the last of a name wins.
    pub settings: &'a [(&'a str, &'a str)],
}

/// A PostgreSQL server of our own on loopback; its data goes when it is dropped.
#[derive(Debug)]
pub struct Postgres {
    directory: PathBuf,
    bin: PathBuf,
    port: Port,
    server: Mutex<Server>,
}

impl Postgres {
    /// Creates a cluster and starts it; returns when it accepts connections.
    ///
    /// # Errors
    /// With the end of the server's log when it does not come up within a minute.
    pub fn start(installation: &Installation, options: PostgresOptions<'_>) -> Result<Self, ServiceError> {
        let bin = installation.postgres_bin(&run_directory()?)?;
        let directory = fresh_directory("postgres")?;
        if !reachable(&directory)? {
            return Err(ServiceError::System {
                doing: format!(
                    "let PostgreSQL, which refuses to run as root, work as `nobody` in {}",
                    directory.display()
                ),
                cause: io::Error::new(
                    io::ErrorKind::PermissionDenied,
                    "set TMPDIR to a directory that every user can enter",
                ),
            });
        }
        let port = Port::reserve()?;
        let server = Server::new(format!("PostgreSQL on port {}", port.number), directory.join("log"));
        let postgres = Self { directory, bin, port, server: Mutex::new(server) };
        postgres.create_cluster(options)?;
        postgres.launch(&mut lock(&postgres.server))?;
        Ok(postgres)
    }

    fn create_cluster(&self, options: PostgresOptions<'_>) -> Result<(), ServiceError> {
        let data = self.data();
        fs::DirBuilder::new().mode(0o700).create(&data).map_err(system(format!("make {}", data.display())))?;
        if is_root() {
            let (user, group) = nobody()?;
            let mut command = Command::new("chown");
            command.arg(format!("{user}:{group}")).arg(&data);
            run_to_end(command, "give PostgreSQL's data to its user")?;
        }
        let mut initdb = tethered(self.bin.join("initdb"), RunAs::Unprivileged)?;
        initdb.arg("-D").arg(&data).current_dir(&self.directory);
        initdb.args(["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]);
        initdb.args(["--no-sync", "--no-instructions"]);
        lock(&self.server).prepare(initdb, "initdb")?;

        let fsync = if options.fsync { "on" } else { "off" };
        let port = self.port.number.to_string();
        let own = [
            ("listen_addresses", "127.0.0.1"),
            ("port", &port),
            ("unix_socket_directories", ""),
            ("fsync", fsync),
            ("full_page_writes", fsync),
            ("max_connections", "300"),
            ("max_prepared_transactions", "20"),
            // In files below the data directory, which go with it: those in /dev/shm outlive a killed server.
            ("dynamic_shared_memory_type", "mmap"),
            ("timezone", "UTC"),
            ("log_timezone", "UTC"),
        ];
        let mut text = String::from("\n# keiro-relay\n");
        for (name, value) in own.iter().chain(options.settings) {
            let _ = writeln!(text, "{name} = '{}'", value.replace('\'', "''"));
        }
        let file = data.join("postgresql.conf");
        File::options()
            .append(true)
            .open(&file)
            .and_then(|mut opened| io::Write::write_all(&mut opened, text.as_bytes()))
            .map_err(system(format!("write {}", file.display())))
    }

    fn data(&self) -> PathBuf {
        self.directory.join("data")
    }

    fn launch(&self, server: &mut Server) -> Result<(), ServiceError> {
        let mut command = tethered(self.bin.join("postgres"), RunAs::Unprivileged)?;
        command.arg("-D").arg(self.data()).current_dir(&self.directory);
        server.launch(command)?;
        // What `pg_ctl --wait` looks at: the first line names the process, the eighth its state.
        let pid_file = self.data().join("postmaster.pid");
        server.wait_ready(|process| {
            let text = fs::read_to_string(&pid_file).unwrap_or_default();
            let mut lines = text.lines();
            lines.next().map(str::trim) == Some(process.to_string().as_str())
                && lines.nth(6).map(str::trim) == Some("ready")
        })
    }

    /// The URL of a database, as the superuser `postgres`, without a password.
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port.number)
    }

    /// The port, the same over restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port.number
    }

    /// Its processes as they are now: the server, then its backends.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        let server = lock(&self.server).id();
        server.into_iter().flat_map(|server| [vec![server], children_of(server)].concat()).collect()
    }

    /// Creates an empty database.
    ///
    /// # Errors
    /// When it exists, or the server does not answer.
    pub fn create_database(&self, name: &str) -> Result<(), ServiceError> {
        self.execute("postgres", &format!("create database \"{}\"", name.replace('"', "\"\"")))
    }

    /// Runs statements in a database.
    ///
    /// # Errors
    /// When a statement fails, or the server does not answer.
    pub fn execute(&self, database: &str, statements: &str) -> Result<(), ServiceError> {
        execute(&self.url(database), statements).map_err(|cause| ServiceError::Database {
            server: format!("PostgreSQL on port {}", self.port.number),
            doing: format!("run a statement in {database}"),
            cause,
        })
    }

    /// Stops the server in an orderly way (a fast shutdown); its data stays.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop(&self) -> Result<(), ServiceError> {
        lock(&self.server).stop("INT")
    }

    /// Kills the server and all its backends; its data stays as a crash leaves it.
    ///
    /// # Errors
    /// When a process does not go away.
    pub fn kill(&self) -> Result<(), ServiceError> {
        lock(&self.server).kill()
    }

    /// Starts the server again with the same port and data; stops it first when it runs.
    ///
    /// # Errors
    /// With the end of the server's log when it does not come up within a minute.
    pub fn restart(&self) -> Result<(), ServiceError> {
        let mut server = lock(&self.server);
        server.stop("INT")?;
        self.launch(&mut server)
    }

    /// Stops the server and all its backends in their tracks (SIGSTOP): connections stay open and nothing answers.
    ///
    /// # Errors
    /// When the server does not run.
    pub fn pause(&self) -> Result<(), ServiceError> {
        lock(&self.server).pause()
    }

    /// Lets a paused server go on.
    ///
    /// # Errors
    /// When no signal can be sent.
    pub fn resume(&self) -> Result<(), ServiceError> {
        lock(&self.server).resume()
    }

    /// The end of the server's log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        log_from(&self.directory.join("log"), None)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // Whatever remains is killed by the sweep.
        let _ = lock(&self.server).kill();
        sweep(&self.directory);
    }
}

/// Runs statements over a connection of their own; from a thread of its own, so that it may be called inside a
/// runtime as well as outside.
fn execute(url: &str, statements: &str) -> Result<(), tokio_postgres::Error> {
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime can be built").block_on(async {
            let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls).await?;
            let driver = tokio::spawn(connection);
            let outcome = client.batch_execute(statements).await;
            drop(client);
            let _ = driver.await;
            outcome
        })
    };
    thread::scope(|scope| scope.spawn(work).join()).expect("the thread does not panic")
}

// ---------------------------------------------------------------------------------------------------------------
// Kafka

/// How a Kafka cluster is set up.
#[derive(Debug, Clone, Copy)]
pub struct KafkaOptions<'a> {
    /// How many brokers; the first is also the controller, so stop one of the others to lose a broker only.
    pub brokers: u32,
    /// Server properties of every broker; these win over ours.
    pub properties: &'a [(&'a str, &'a str)],
    /// More listeners beside the plain one: name and security protocol, as `("SASL", "SASL_PLAINTEXT")`.
    pub listeners: &'a [(&'a str, &'a str)],
    /// Each broker's heap.
    pub heap_megabytes_max: u32,
    /// Whether the brokers live for minutes at most: they start sooner and leave the processor to others, but never get as
    /// fast as one that compiles thoroughly. Off for figures.
    pub short_lived: bool,
}

impl Default for KafkaOptions<'_> {
    fn default() -> Self {
        Self { brokers: 1, properties: &[], listeners: &[], heap_megabytes_max: 512, short_lived: true }
    }
}

/// A Kafka cluster of our own on loopback; its data goes when it is dropped.
///
/// Topics are not created by being used, unless a property says so.
#[derive(Debug)]
pub struct Kafka {
    directory: PathBuf,
    lib: PathBuf,
    heap_megabytes_max: u32,
    short_lived: bool,
    brokers: Vec<Broker>,
}

#[derive(Debug)]
struct Broker {
    directory: PathBuf,
    /// The port of every listener by name; the plain one is `PLAINTEXT`.
    ports: Vec<(String, Port)>,
    server: Mutex<Server>,
}

/// Lines with the time, and without the hundreds of settings that would fill an error's log tail.
const LOGGING: [&str; 3] = [
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.log.org.apache.kafka.common.config.AbstractConfig=warn",
];
/// The listener that every cluster has.
const PLAIN: &str = "PLAINTEXT";
/// The controller's listener.
const CONTROLLER: &str = "CONTROLLER";

impl Kafka {
    /// Formats and starts a cluster; returns when every broker serves.
    ///
    /// # Errors
    /// With the end of a broker's log when it does not come up within a minute.
    pub fn start(installation: &Installation, options: KafkaOptions<'_>) -> Result<Self, ServiceError> {
        assert!(options.brokers >= 1, "a cluster has at least one broker");
        let directory = fresh_directory("kafka")?;
        let controller = Port::reserve()?;
        let quorum = format!("1@127.0.0.1:{}", controller.number);
        let mut controller = Some(controller);
        let mut brokers = Vec::new();
        for id in 1..=options.brokers {
            brokers.push(Broker::configure(&directory, id, controller.take(), &quorum, options)?);
        }
        let KafkaOptions { heap_megabytes_max, short_lived, .. } = options;
        let kafka = Self { directory, lib: installation.lib(), heap_megabytes_max, short_lived, brokers };
        let mut cluster = uuid::Uuid::new_v4().into_bytes();
        // Its text must not begin with '-', which the tool would take for an option.
        cluster[0] &= 0x7f;
        let cluster = URL_SAFE_NO_PAD.encode(cluster);
        for broker in &kafka.brokers {
            kafka.format(broker, &cluster)?;
        }
        kafka.restart()?;
        Ok(kafka)
    }

    fn java(&self, broker: &Broker, main: &str) -> Result<Command, ServiceError> {
        let java = std::env::var_os("JAVA_HOME")
            .map(|home| Path::new(&home).join("bin/java"))
            .filter(|java| java.is_file())
            .unwrap_or_else(|| PathBuf::from("java"));
        let mut command = tethered(java, RunAs::Ourselves)?;
        command.arg(format!("-Xmx{}m", self.heap_megabytes_max)).arg("-XX:-UsePerfData").args(LOGGING);
        if self.short_lived {
            // On two busy cores the thorough compiler takes seconds from everybody and has hardly begun when all is over.
            command.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]);
        }
        command.arg("-cp");
        command.arg(self.lib.join("*")).arg(main).current_dir(&broker.directory);
        Ok(command)
    }

    fn format(&self, broker: &Broker, cluster: &str) -> Result<(), ServiceError> {
        let mut command = self.java(broker, "kafka.tools.StorageTool")?;
        command.args(["format", "--cluster-id", cluster, "--config"]).arg(broker.properties());
        lock(&broker.server).prepare(command, "kafka.tools.StorageTool")
    }

    /// `host:port` of every broker, by commas.
    #[must_use]
    pub fn bootstrap(&self) -> String {
        self.bootstrap_of(PLAIN)
    }

    /// `host:port` of a listener of every broker, by commas.
    ///
    /// # Panics
    /// When there is no such listener.
    #[must_use]
    pub fn bootstrap_of(&self, listener: &str) -> String {
        let addresses: Vec<_> =
            self.brokers.iter().map(|broker| format!("127.0.0.1:{}", broker.port(listener))).collect();
        addresses.join(",")
    }

    /// The processes of the brokers that run.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        self.brokers.iter().filter_map(|broker| lock(&broker.server).id()).collect()
    }

    /// Stops every broker in an orderly way; their data stays.
    ///
    /// # Errors
    /// When one had to be killed.
    pub fn stop(&self) -> Result<(), ServiceError> {
        // The controller last: the others want to tell it that they go.
        (1..=self.brokers.len()).rev().try_for_each(|id| self.stop_broker(id))
    }

    /// Kills every broker.
    ///
    /// # Errors
    /// When a process does not go away.
    pub fn kill(&self) -> Result<(), ServiceError> {
        (1..=self.brokers.len()).try_for_each(|id| self.kill_broker(id))
    }

    /// Starts every broker again on the same ports and data; stops those that run.
    ///
    /// # Errors
    /// With the end of a broker's log when it does not come up within a minute.
    pub fn restart(&self) -> Result<(), ServiceError> {
        self.stop()?;
        let from: Vec<_> = self.brokers.iter().map(|broker| self.launch(broker)).collect::<Result<_, _>>()?;
        self.brokers.iter().zip(from).try_for_each(|(broker, position)| broker.wait_ready(position))
    }

    /// Stops every broker in its tracks (SIGSTOP): connections stay open and nothing answers.
    ///
    /// # Errors
    /// When one does not run.
    pub fn pause(&self) -> Result<(), ServiceError> {
        (1..=self.brokers.len()).try_for_each(|id| self.pause_broker(id))
    }

    /// Lets paused brokers go on.
    ///
    /// # Errors
    /// When no signal can be sent.
    pub fn resume(&self) -> Result<(), ServiceError> {
        (1..=self.brokers.len()).try_for_each(|id| self.resume_broker(id))
    }

    /// [`stop`](Self::stop) for one broker; ids count from 1.
    ///
    /// # Errors
    /// When it had to be killed.
    pub fn stop_broker(&self, id: usize) -> Result<(), ServiceError> {
        lock(&self.broker(id).server).stop("TERM")
    }

    /// [`kill`](Self::kill) for one broker.
    ///
    /// # Errors
    /// When a process does not go away.
    pub fn kill_broker(&self, id: usize) -> Result<(), ServiceError> {
        lock(&self.broker(id).server).kill()
    }

    /// [`restart`](Self::restart) for one broker.
    ///
    /// # Errors
    /// With the end of the broker's log when it does not come up within a minute.
    pub fn restart_broker(&self, id: usize) -> Result<(), ServiceError> {
        self.stop_broker(id)?;
        let position = self.launch(self.broker(id))?;
        self.broker(id).wait_ready(position)
    }

    /// [`pause`](Self::pause) for one broker.
    ///
    /// # Errors
    /// When it does not run.
    pub fn pause_broker(&self, id: usize) -> Result<(), ServiceError> {
        lock(&self.broker(id).server).pause()
    }

    /// [`resume`](Self::resume) for one broker.
    ///
    /// # Errors
    /// When no signal can be sent.
    pub fn resume_broker(&self, id: usize) -> Result<(), ServiceError> {
        lock(&self.broker(id).server).resume()
    }

    /// The end of one broker's log.
    #[must_use]
    pub fn log_tail(&self, id: usize) -> String {
        log_from(&self.broker(id).log(), None)
    }

    fn broker(&self, id: usize) -> &Broker {
        id.checked_sub(1).and_then(|index| self.brokers.get(index)).expect("a broker id between 1 and their number")
    }

    /// Starts a broker; returns where its log then ended.
    fn launch(&self, broker: &Broker) -> Result<u64, ServiceError> {
        let mut command = self.java(broker, "kafka.Kafka")?;
        command.arg(broker.properties());
        let position = fs::metadata(broker.log()).map_or(0, |metadata| metadata.len());
        lock(&broker.server).launch(command)?;
        Ok(position)
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        // Whatever remains is killed by the sweep.
        let _ = self.kill();
        sweep(&self.directory);
    }
}

impl Broker {
    /// Reserves ports and writes the properties; the broker that is given the controller's port is the controller.
    fn configure(
        cluster: &Path,
        id: u32,
        controller: Option<Port>,
        quorum: &str,
        options: KafkaOptions<'_>,
    ) -> Result<Self, ServiceError> {
        let directory = cluster.join(format!("broker-{id}"));
        fs::create_dir(&directory).map_err(system(format!("make the directory {}", directory.display())))?;

        let is_controller = controller.is_some();
        let mut ports = Vec::new();
        let mut protocols = format!("{PLAIN}:PLAINTEXT,{CONTROLLER}:PLAINTEXT");
        ports.push((PLAIN.to_owned(), Port::reserve()?));
        for (name, protocol) in options.listeners {
            ports.push(((*name).to_owned(), Port::reserve()?));
            let _ = write!(protocols, ",{name}:{protocol}");
        }
        let on_loopback = |(name, port): &(String, Port)| format!("{name}://127.0.0.1:{}", port.number);
        let advertised = ports.iter().map(on_loopback).collect::<Vec<_>>().join(",");
        ports.extend(controller.map(|port| (CONTROLLER.to_owned(), port)));
        let listeners = ports.iter().map(on_loopback).collect::<Vec<_>>().join(",");

        let id_text = id.to_string();
        let data = directory.join("data");
        let mut properties = BTreeMap::from([
            ("process.roles", if is_controller { "broker,controller" } else { "broker" }),
            ("node.id", &id_text),
            ("controller.quorum.voters", quorum),
            ("controller.listener.names", CONTROLLER),
            ("inter.broker.listener.name", PLAIN),
            ("listener.security.protocol.map", &protocols),
            ("listeners", &listeners),
            ("advertised.listeners", &advertised),
            ("log.dirs", data.to_str().expect("a directory of ours has a name in UTF-8")),
            ("auto.create.topics.enable", "false"),
            ("offsets.topic.replication.factor", "1"),
            ("offsets.topic.num.partitions", "1"),
            ("transaction.state.log.replication.factor", "1"),
            ("transaction.state.log.min.isr", "1"),
            ("transaction.state.log.num.partitions", "1"),
            ("share.coordinator.state.topic.replication.factor", "1"),
            ("share.coordinator.state.topic.min.isr", "1"),
            ("share.coordinator.state.topic.num.partitions", "1"),
            ("group.initial.rebalance.delay.ms", "0"),
            // A killed broker may not come back before its session ends: 9 s by default.
            ("broker.session.timeout.ms", "4000"),
            ("broker.heartbeat.interval.ms", "500"),
            // Records keep the time of their row, which may be years ago, and are read back later all the same.
            ("log.retention.ms", "-1"),
            // The default takes a quarter of our heap.
            ("log.cleaner.dedupe.buffer.size", "8388608"),
        ]);
        properties.extend(options.properties.iter().copied());
        let mut text = String::new();
        for (name, value) in properties {
            let _ = writeln!(text, "{name}={value}");
        }
        let log = directory.join("log");
        let name = format!("Kafka broker {id} on port {}", ports[0].1.number);
        let broker = Self { directory, ports, server: Mutex::new(Server::new(name, log)) };
        let file = broker.properties();
        fs::write(&file, text).map_err(system(format!("write {}", file.display())))?;
        Ok(broker)
    }

    fn properties(&self) -> PathBuf {
        self.directory.join("server.properties")
    }

    fn log(&self) -> PathBuf {
        self.directory.join("log")
    }

    fn port(&self, listener: &str) -> u16 {
        let port = self.ports.iter().find(|(name, _)| name == listener);
        port.map(|(_, port)| port.number).expect("a listener that was asked for")
    }

    /// Waits for the line a broker writes when it is no longer fenced and its listeners serve.
    fn wait_ready(&self, position: u64) -> Result<(), ServiceError> {
        let log = self.log();
        lock(&self.server).wait_ready(|_| log_from(&log, Some(position)).contains("Kafka Server started"))
    }
}
