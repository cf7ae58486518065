//! Servers that are not there yet, go away, hang, come back, or let nobody work: the relay stays up, says why, and recovers by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::support::daemon::{Daemon, Setup, http_get, run_command};
use crate::support::database::{Database, Table, fresh_database, fresh_database_on};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{Admin, read_topic, read_topic_on};
use crate::support::{LONG, services, unique, victims, wait_until};

const POLICIES: &str = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                        [sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n\n";
/// A lease of 26 s is the shortest for these timeouts.
const RELAY: &str = "[relay]\npublish_timeout = \"3s\"\nsettle_timeout = \"500ms\"\npublishing_timeout = \"26s\"\n\n";
/// An outage over, a relay works again after its longest pause (5 s) and a connection, or once its leases ran out.
const RECOVERED: Duration = Duration::from_secs(90);

fn sections() -> String {
    format!("{RELAY}{POLICIES}")
}

/// Asks /livez all the time, as an orchestrator would, and remembers any answer but 200.
struct Probe {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<String>>,
}

impl Probe {
    /// Begins once the relay answers.
    fn start(daemon: &mut Daemon) -> Self {
        daemon.wait_http_ok("/livez", LONG);
        let (address, stop) = (daemon.http_address(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut wrong = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                match http_get(&address, "/livez") {
                    Some(answer) if answer.status == 200 => {}
                    Some(answer) => wrong.push(answer.body),
                    None => wrong.push("no answer".to_owned()),
                }
                std::thread::sleep(Duration::from_millis(50));
            }
            wrong
        });
        Self { stop, thread }
    }

    #[track_caller]
    fn assert_lived(self, daemon: &mut Daemon, pid: u32) {
        self.stop.store(true, Ordering::Relaxed);
        assert_eq!(self.thread.join().expect("the probe"), [""; 0]);
        assert!(daemon.is_running() && daemon.id() == pid);
    }
}

/// Which checks stand against readiness, with their reasons.
fn against(daemon: &Daemon) -> Vec<(String, String)> {
    let answer = daemon.http_get("/readyz").expect("/readyz answers");
    let body: serde_json::Value = serde_json::from_str(&answer.body).expect("JSON");
    let reasons = body["reasons"].as_array().expect("reasons").clone();
    assert_eq!(answer.status == 200, reasons.is_empty(), "{body}");
    let text = |reason: &serde_json::Value, field: &str| reason[field].as_str().expect("a text").to_owned();
    for reason in &reasons {
        let since: jiff::Timestamp = text(reason, "since").parse().expect("a time");
        assert!(since <= jiff::Timestamp::now());
    }
    reasons.iter().map(|reason| (text(reason, "check"), text(reason, "reason"))).collect()
}

#[track_caller]
fn wait_against(daemon: &Daemon, check: &str, says: &str) {
    wait_until(&format!("/readyz to name the {check}"), LONG, || {
        against(daemon).iter().any(|(name, reason)| name == check && reason.contains(says))
    });
}

fn feeds(session: &mut Session, topic: &str, rows: usize, feeds: &mut Vec<Feed>) {
    if feeds.is_empty() {
        let orders = [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)];
        feeds.extend(orders.map(|(source, order)| Feed::new(source, topic, order)));
    }
    for feed in feeds {
        feed.insert_in(session, rows, 25);
    }
}

fn expected(feeds: &[Feed]) -> Vec<(String, String)> {
    feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect()
}

#[test]
fn started_before_its_servers_it_waits_for_them_and_says_for_which() {
    let postgres = victims::postgres();
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let database = fresh_database_on(&postgres.url("postgres"), Table::NewerShared);
    let topic = unique("topic");
    Admin::new(&brokers).create(&topic, 2, &[]);
    let mut all = Vec::new();
    feeds(&mut Session::open(&database), &topic, 50, &mut all);
    postgres.stop().expect("stopped");
    kafka.stop().expect("stopped");

    let sections = sections();
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    wait_against(&daemon, "database", &format!("127.0.0.1:{}", postgres.port()));
    postgres.restart().expect("PostgreSQL starts");
    wait_until("only the broker to be missing", LONG, || {
        let against = against(&daemon);
        !against.iter().any(|(check, _)| check == "database") && against.iter().any(|(check, _)| check == "broker")
    });
    wait_against(&daemon, "broker", "kafka.");
    kafka.restart().expect("Kafka starts");
    daemon.wait_http_ok("/readyz", LONG);
    let mut session = Session::open(&database);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    probe.assert_lived(&mut daemon, pid);
    judge(&read_topic_on(&brokers, &topic), &expected(&all)).assert_delivered(0);
    // A hundred lines a minute would be a log nobody reads.
    let lines = daemon.stderr().lines().count();
    assert!(lines < 60, "{lines} lines:\n{}", daemon.stderr());
    daemon.kill();

    // With the broker there and the database not.
    postgres.stop().expect("stopped");
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    wait_against(&daemon, "database", "cannot connect");
    assert_eq!(daemon.http_get("/healthz").expect("an answer").status, 200);
    postgres.restart().expect("PostgreSQL starts");
    daemon.wait_http_ok("/readyz", LONG);
    probe.assert_lived(&mut daemon, pid);
}

#[test]
fn broker_that_hangs_or_dies_costs_no_attempt_and_no_order() {
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(&brokers).create(&topic, 2, &[]);
    let mut session = Session::open(&database);
    let mut all = Vec::new();
    let sections = sections();
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    daemon.wait_http_ok("/readyz", LONG);
    let mut in_flight = 0;
    let interruptions = ["a short pause", "a long pause", "a kill"];
    for what in interruptions {
        let sent = session.rows("status = 'sent'");
        feeds(&mut session, &topic, 300, &mut all);
        wait_until("some to be sent", LONG, || session.rows("status = 'sent'") > sent + 100);
        let hurt = Instant::now();
        match what {
            "a kill" => kafka.kill().expect("killed"),
            _ => kafka.pause().expect("paused"),
        }
        in_flight += session.rows("status = 'publishing'");
        // Rows go on being written meanwhile.
        feeds(&mut session, &topic, 50, &mut all);
        match what {
            "a short pause" => {
                std::thread::sleep(Duration::from_millis(1200));
                kafka.resume().expect("resumed");
            }
            "a long pause" => {
                wait_against(&daemon, "broker", "kafka.");
                assert!(hurt.elapsed() < Duration::from_secs(30), "{:?}", hurt.elapsed());
                // What was claimed goes back, and nothing is claimed any more.
                wait_until("rows to be returned", LONG, || session.rows("status = 'publishing'") == 0);
                kafka.resume().expect("resumed");
            }
            _ => {
                wait_against(&daemon, "broker", "kafka.");
                kafka.restart().expect("Kafka starts");
            }
        }
        let mended = Instant::now();
        daemon.wait_http_ok("/readyz", LONG);
        println!("ready {:?} after {what}", mended.elapsed());
        wait_until("everything to be sent", RECOVERED, || session.rows("status <> 'sent'") == 0);
        println!("sent {:?} after {what}", mended.elapsed());
        assert_eq!(session.rows("attempt_count <> 1"), 0, "{what} cost attempts");
        let verdict = judge(&read_topic_on(&brokers, &topic), &expected(&all));
        println!("{} duplicates of {in_flight} in flight after {what}", verdict.duplicates.len());
        verdict.assert_delivered(in_flight);
    }
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
    probe.assert_lived(&mut daemon, pid);
}

#[test]
fn database_that_cuts_connections_restarts_or_crashes_loses_nothing() {
    let postgres = victims::postgres();
    let database = fresh_database_on(&postgres.url("postgres"), Table::NewerShared);
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 2, &[]);
    let mut all = Vec::new();
    let sections = sections();
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: &sections, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    let mut session = Session::open(&database);
    let mut sent = 0;
    feeds(&mut session, &topic, 600, &mut all);
    for _ in 0..5 {
        wait_until("some more to be sent", RECOVERED, || session.rows("status = 'sent'") > sent + 30);
        sent = session.rows("status = 'sent'");
        session.value(
            "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and \
             pid <> pg_backend_pid()",
        );
    }
    wait_until("everything to be sent", RECOVERED, || session.rows("status <> 'sent'") == 0);
    daemon.wait_http_ok("/readyz", LONG);
    let attempts = session.value("select max(attempt_count) from keiro.keiro_outbox");
    println!("at most {attempts} attempts after five cuts");
    // A settlement whose answer was lost is asked for again, so nothing goes out twice.
    judge(&read_topic(&topic), &expected(&all)).assert_delivered(0);

    let mut in_flight = 0;
    type Hurt = fn(&keiro_relay::cli::demo::services::Postgres);
    let interruptions: [(&str, Hurt); 3] = [
        ("an orderly stop", |postgres| postgres.stop().expect("stopped")),
        ("a crash", |postgres| postgres.kill().expect("killed")),
        ("a hang", |postgres| postgres.pause().expect("paused")),
    ];
    for (what, hurt) in interruptions {
        sent = session.rows("status = 'sent'");
        feeds(&mut session, &topic, 200, &mut all);
        wait_until("some to be sent", LONG, || session.rows("status = 'sent'") > sent + 50);
        in_flight += session.rows("status = 'publishing'") + 4 * 500;
        drop(session);
        hurt(&postgres);
        if what == "a hang" {
            std::thread::sleep(Duration::from_secs(3));
            postgres.resume().expect("resumed");
        } else {
            wait_against(&daemon, "database", "database");
            postgres.restart().expect("PostgreSQL starts again");
        }
        let mended = Instant::now();
        daemon.wait_http_ok("/readyz", LONG);
        println!("ready {:?} after {what}", mended.elapsed());
        session = Session::open(&database);
        wait_until("everything to be sent", RECOVERED, || session.rows("status <> 'sent'") == 0);
        println!("sent {:?} after {what}", mended.elapsed());
        let verdict = judge(&read_topic(&topic), &expected(&all));
        println!("{} duplicates after {what}", verdict.duplicates.len());
        verdict.assert_delivered(in_flight);
    }
    assert_eq!(session.rows("attempt_count > 6"), 0, "leases that ran out, and nothing else, cost attempts");
    probe.assert_lived(&mut daemon, pid);
}

/// Hurts the table of a relay at work, waits until it says so, mends it, and sees everything delivered.
fn table_trouble(hurt: &str, mend: &str, check: &str, says: &str) {
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 2, &[]);
    // Not the superuser, whom no permission binds.
    let user = unique("relay");
    database.execute(&format!(
        "create role {user} login; grant usage on schema keiro to {user}; grant select, update on keiro.keiro_outbox to {user}"
    ));
    let url = database.url().replace("postgres@", &format!("{user}@"));
    let mut session = Session::open(&database);
    let mut all = Vec::new();
    feeds(&mut session, &topic, 100, &mut all);
    let sections = sections();
    let setup = Setup { database_url: &url, brokers: services::brokers(), sections: &sections, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let fill = |text: &str| text.replace("{user}", &user).replace("{database}", database.name());
    feeds(&mut session, &topic, 400, &mut all);
    session.execute(&fill(hurt));
    wait_against(&daemon, check, says);
    // Rows that come in the middle of it.
    let hurt_at = Instant::now();
    let lines = daemon.stderr().lines().count();
    std::thread::sleep(Duration::from_secs(4));
    let more = daemon.stderr().lines().count() - lines;
    assert!(more < 20, "{more} lines in {:?}:\n{}", hurt_at.elapsed(), daemon.stderr());
    session.execute(&fill(mend));
    daemon.wait_http_ok("/readyz", LONG);
    wait_until("everything to be sent", RECOVERED, || session.rows("status <> 'sent'") == 0);
    assert_eq!(session.rows("status = 'dead' or attempt_count > 2"), 0);
    probe.assert_lived(&mut daemon, pid);
    judge(&read_topic(&topic), &expected(&all)).assert_delivered(100);
}

#[test]
fn table_that_is_moved_away_and_back() {
    table_trouble(
        "alter table keiro.keiro_outbox rename to elsewhere",
        "alter table keiro.elsewhere rename to keiro_outbox",
        "schema",
        "\"keiro\".\"keiro_outbox\" does not exist",
    );
}

#[test]
fn permission_that_is_taken_and_given_back() {
    table_trouble(
        "revoke update on keiro.keiro_outbox from {user}",
        "grant update on keiro.keiro_outbox to {user}",
        "schema",
        "lacks update",
    );
}

#[test]
fn database_that_becomes_read_only() {
    const CUT: &str = "select pg_terminate_backend(pid) from pg_stat_activity where usename = '{user}';";
    table_trouble(
        &format!("alter role {{user}} set default_transaction_read_only = on; {CUT}"),
        &format!("alter role {{user}} reset default_transaction_read_only; {CUT}"),
        "database",
        "read-only",
    );
}

#[test]
fn table_that_somebody_locks_for_a_while() {
    let database = fresh_database(Table::NewerShared);
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 1, &[]);
    let sections = sections();
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        database: "statement_timeout = \"1s\"",
        sections: &sections,
        ..Setup::default()
    };
    let mut session = Session::open(&database);
    let mut all = Vec::new();
    feeds(&mut session, &topic, 100, &mut all);
    let mut daemon = Daemon::start(&setup);
    let (pid, probe) = (daemon.id(), Probe::start(&mut daemon));
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let mut other = Session::open(&database);
    other.execute("begin; lock table keiro.keiro_outbox in access exclusive mode");
    wait_against(&daemon, "database", "database");
    other.execute("commit");
    feeds(&mut session, &topic, 100, &mut all);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    daemon.wait_http_ok("/readyz", LONG);
    judge(&read_topic(&topic), &expected(&all)).assert_delivered(0);
    // The slow timer has a connection of its own, and goes on too.
    let ticked = daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").expect("a time");
    wait_until("the slow timer to tick", LONG, || {
        daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").is_some_and(|now| now > ticked)
    });
    probe.assert_lived(&mut daemon, pid);
}

#[test]
fn start_without_what_it_needs_exits_78_and_names_everything() {
    let run = |database: &Database, url: &str| {
        let _ = database;
        let setup = Setup { database_url: url, brokers: services::brokers(), ..Setup::default() };
        let finished = run_command(&setup, &["run"], "");
        assert_eq!(finished.status.code(), Some(78), "{} {}", finished.stdout, finished.stderr);
        finished.stderr
    };
    let database = fresh_database(Table::None);
    let said = run(&database, database.url());
    assert!(said.contains("schema \"keiro\" does not exist") && said.contains("keiro-relay migrate"), "{said}");

    let database = fresh_database(Table::NewerShared);
    database.execute(
        "alter table keiro.keiro_outbox drop column tracestate, drop column attributes, alter column schema_version type int",
    );
    let said = run(&database, database.url());
    for text in
        ["\"tracestate\" is missing", "\"attributes\" is missing", "\"schema_version\" is integer; expected bigint"]
    {
        assert!(said.contains(text), "{text} is not in {said}");
    }
    let database = fresh_database(Table::NewerShared);
    let user = unique("relay");
    database.execute(&format!("create role {user} login"));
    let said = run(&database, &database.url().replace("postgres@", &format!("{user}@")));
    for privilege in ["usage on schema", "select on", "update on"] {
        assert!(said.contains(&format!("lacks {privilege}")), "{privilege} is not in {said}");
    }
    // A drain and the other commands say the same.
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    database.execute("drop table keiro.keiro_outbox");
    for arguments in [&["drain"][..], &["status"], &["resume", "x"]] {
        let finished = run_command(&setup, arguments, "");
        assert_eq!(finished.status.code(), Some(78), "{arguments:?}");
        assert!(finished.stderr.contains("table \"keiro\".\"keiro_outbox\" does not exist"), "{}", finished.stderr);
    }
    assert!(fresh_database(Table::OlderShared).value("select 1") == "1");
}

#[test]
fn drain_gives_up_when_a_side_is_away() {
    let nobody = "127.0.0.1:1";
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    let mut all = Vec::new();
    feeds(&mut session, "topic", 10, &mut all);
    let sections = sections();
    let setup = Setup { database_url: database.url(), brokers: nobody, sections: &sections, ..Setup::default() };
    let finished = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(finished.status.code(), Some(1), "{} {}", finished.stdout, finished.stderr);
    let report: serde_json::Value = serde_json::from_str(&finished.stdout).expect("one object");
    assert_eq!((&report["sent"], &report["dead"], &report["failed"]), (&0.into(), &0.into(), &0.into()), "{report}");
    assert_eq!(session.statuses("attempt_count > 0 or status = 'publishing'"), "", "no attempt is spent");

    let setup = Setup { database_url: "postgres://postgres@127.0.0.1:1/x", brokers: nobody, ..Setup::default() };
    let finished = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(finished.status.code(), Some(1), "{} {}", finished.stdout, finished.stderr);
    assert!(finished.stderr.contains("cannot connect to 127.0.0.1:1"), "{}", finished.stderr);
}
