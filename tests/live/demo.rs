//! `keiro-relay demo` as somebody types it: it holds, it says so when it does not, and it leaves nothing behind.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, ExitStatus, Stdio};
use std::time::Duration;

use keiro_relay::cli::demo::services::{self, Installation, RunAs, SERVICES_DIR_VARIABLE};
use serde_json::Value;

use crate::support::daemon::http_get;
use crate::support::database::{Database, Table, fresh_database};
use crate::support::services::brokers;
use crate::support::topics::Admin;
use crate::support::{LONG, wait_for, wait_until};

/// A demo starts servers, a relay and a story; ten of them may run at once on two cores.
const DEMO_MAX: Duration = Duration::from_secs(300);

/// A demo under way; killed when it is dropped.
struct Demo {
    child: Child,
    directory: PathBuf,
}

impl Demo {
    fn start(arguments: &[&str]) -> Self {
        let directory = services::fresh_directory("demo-test").expect("a directory");
        let output = |name| File::create(directory.join(name)).expect("open an output file");
        let program = OsStr::new(env!("CARGO_BIN_EXE_keiro-relay"));
        let mut command = services::tethered(program, RunAs::Ourselves).expect("a command");
        command.arg("demo").args(arguments);
        // What a user may have set for a relay of their own must not reach the demo's.
        command.env("KEIRO_RELAY__RELAY__UNLISTED_SOURCES", "nonsense");
        command.stdin(Stdio::null()).stdout(output("stdout")).stderr(output("stderr"));
        Self { child: services::spawn(command).expect("start the demo"), directory }
    }

    fn on(database: &Database, arguments: &[&str]) -> Self {
        Self::start(&[&["--database-url", database.url(), "--brokers", brokers()], arguments].concat())
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.directory.join(name)).expect("its output")
    }

    /// Waits for its end; returns status and standard output.
    #[track_caller]
    fn end(mut self) -> (ExitStatus, String) {
        let status = services::wait_bounded(&mut self.child, DEMO_MAX);
        let (stdout, stderr) = (self.read("stdout"), self.read("stderr"));
        let status = status.unwrap_or_else(|| panic!("the demo still runs after {DEMO_MAX:?}:\n{stdout}\n{stderr}"));
        println!("{stdout}\n{stderr}");
        (status, stdout)
    }

    #[track_caller]
    fn wait_says(&mut self, text: &str) -> String {
        wait_for(&format!("the demo to say {text:?}"), DEMO_MAX, || {
            let said = self.read("stdout");
            if said.contains(text) {
                return Some(said);
            }
            let ended = self.child.try_wait().expect("look at the demo");
            assert!(ended.is_none(), "the demo ended: {ended:?}\n{said}\n{}", self.read("stderr"));
            None
        })
    }

    fn interrupt(&self) {
        services::signal("INT", &[self.child.id()]).expect("send a signal");
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Schemas the demo left behind.
fn schemas_left(database: &Database) -> String {
    database.value("select count(*) from pg_namespace where nspname like 'keiro_relay%'")
}

fn figure(sources: &Value, name: &str, figure: &str) -> i64 {
    let sources = sources["sources"].as_array().expect("sources");
    let source = sources.iter().find(|source| source["source"].as_str().is_some_and(|found| found.ends_with(name)));
    source.expect("the source")[figure].as_i64().expect("a number")
}

#[test]
fn demo_holds_on_given_servers_and_leaves_nothing_there() {
    let database = fresh_database(Table::None);
    let (status, stdout) = Demo::on(&database, &["--rows", "2000", "--json"]).end();
    assert_eq!(status.code(), Some(0));
    let result: Value = serde_json::from_str(&stdout).expect("one object on standard output");
    assert_eq!(result["ok"], true);
    for (name, rows, rejected) in [("orders", 800, 1), ("ledger", 400, 0), ("billing", 400, 0), ("clicks", 400, 0)] {
        let of = |what: &str| figure(&result, name, what);
        let found = [of("rows"), of("sent"), of("rejected"), of("dead"), of("missing"), of("order_violations")];
        assert_eq!(found, [rows, rows - rejected, rejected, 0, 0, 0], "{name}");
    }
    assert!(result["rolled_back"].as_i64() > Some(0), "{result}");
    assert!(result["halted_ms"].as_i64() >= Some(2000), "{result}");

    assert_eq!(schemas_left(&database), "0");
    let orders = result["sources"][0]["source"].as_str().expect("a name");
    assert!(orders.starts_with("demo-"), "on servers of others it keeps to names of its own, not {orders}");
    let admin = Admin::new(brokers());
    wait_until("its topic to be gone", LONG, || admin.partitions(orders).is_none());
}

#[test]
fn demo_fails_when_a_record_is_missing() {
    let database = fresh_database(Table::None);
    let (status, stdout) = Demo::on(&database, &["--rows", "200", "--lose-a-record"]).end();
    assert_eq!(status.code(), Some(1));
    assert!(stdout.contains("THE CHECK FAILED"), "{stdout}");
    assert!(stdout.contains("committed and on no topic"), "{stdout}");
    let wide = stdout.lines().find(|line| line.chars().count() > 100 && !line.contains("/tmp/"));
    assert_eq!(wide, None, "nothing is wider than 100 columns");
}

#[test]
fn demo_that_is_kept_shows_where_to_look_until_it_is_interrupted() {
    let database = fresh_database(Table::None);
    let mut demo = Demo::on(&database, &["--rows", "200", "--keep"]);
    let said = demo.wait_says("log: ");
    let (_, after) = said.split_once("http://").expect("a URL");
    let (address, _) = after.split_once('/').expect("a path");
    let status = http_get(address, "/status").expect("/status answers");
    assert_eq!(status.status, 200);
    assert!(status.body.contains("billing"), "{}", status.body);
    let metrics = http_get(address, "/metrics").expect("/metrics answers").body;
    assert!(metrics.contains("keiro_relay_rows_total"), "{metrics}");

    demo.interrupt();
    let address = address.to_owned();
    assert_eq!(demo.end().0.code(), Some(0), "the check had held");
    assert_eq!(http_get(&address, "/livez"), None, "its relay is gone");
    assert_eq!(schemas_left(&database), "0");
}

#[test]
fn demo_interrupted_in_the_middle_leaves_nothing() {
    let database = fresh_database(Table::None);
    let mut demo = Demo::on(&database, &["--rows", "100000"]);
    demo.wait_says("producers write");
    let relay = keiro_relay_children(demo.child.id());
    assert_eq!(relay.len(), 1, "the relay is its child");
    demo.interrupt();
    assert_eq!(demo.end().0.code(), Some(1));
    assert!(keiro_relay_children(relay[0]).is_empty() && !PathBuf::from(format!("/proc/{}", relay[0])).exists());
    assert_eq!(schemas_left(&database), "0");
}

#[test]
fn demo_starts_and_stops_servers_of_its_own() {
    let installed = Installation::locate(None);
    // The demo runs where the test does, so it finds what the test finds.
    let elsewhere = std::env::var_os(SERVICES_DIR_VARIABLE);
    installed.unwrap_or_else(|error| panic!("{error} ({elsewhere:?})"));
    let (status, stdout) = Demo::start(&["--rows", "300"]).end();
    assert_eq!(status.code(), Some(0));
    assert!(stdout.contains("The check held"), "{stdout}");
}

/// The processes whose parent this is and that run our program.
fn keiro_relay_children(parent: u32) -> Vec<u32> {
    let parent = parent.to_string();
    let processes = fs::read_dir("/proc").expect("/proc").flatten();
    processes
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|process: &u32| {
            let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
            let after_name = stat.rsplit_once(')').map(|(_, after)| after.to_owned()).unwrap_or_default();
            stat.contains("(keiro-relay)") && after_name.split_whitespace().nth(1) == Some(parent.as_str())
        })
        .collect()
}
