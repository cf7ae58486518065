//! Everything at once, under whole relays: two of them on one table, every policy, rows that nobody takes, and blows at random at
//! the broker, the relays and their connections; judged by what lies in the topics.
//!
//! `KEIRO_RELAY_TEST_SEED` repeats a run's draws, `KEIRO_RELAY_TEST_ROUNDS` makes it longer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services::Kafka;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::broker_faults::{ARRIVAL, assert_arrived_in_order, total};
use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::oracle::judge;
use crate::support::outbox::seed;
use crate::support::session::Session;
use crate::support::topics::{Admin, Record, read_topic_on};
use crate::support::{LONG, unique, victims, wait_until};

const POLICIES: [&str; 4] = ["per_key_head_of_line", "per_source_stream", "stop_the_line", "best_effort"];
/// The shortest lease for these timeouts.
const TIMEOUTS: &str = "publish_timeout = \"4s\"\nsettle_timeout = \"500ms\"\npublishing_timeout = \"29s\"";
/// Leases run out, what was parked is probed, and what is left is sent, on a busy machine.
const RECOVERED: Duration = Duration::from_secs(150);
const LIMIT: (&str, &str) = ("max.message.bytes", "20000");

/// A row as it was written, or will be.
struct Row {
    id: String,
    lane: String,
    sql: String,
    /// Why nobody takes it.
    poison: Option<&'static str>,
}

/// Draws a source's rows.
fn rows(rng: &mut StdRng, source: &str, policy: &str, topics: &[String], poisons: f64) -> Vec<Row> {
    let (keys, few) = (rng.random_range(1..=60), rng.random_range(1..=topics.len()));
    let count = if policy == "stop_the_line" { 250 } else { rng.random_range(300..2_000) };
    let compacted = topics.len() - 1;
    let row = |n: usize| {
        let id = format!("{source}-{n:06}");
        let key = (rng.random_range(0..40) > 0).then(|| format!("k{}", rng.random_range(0..keys)));
        let topic = rng.random_range(0..few);
        let drawn = rng
            .random_bool(poisons)
            .then(|| ["kafka.message_too_large", "kafka.invalid_topic"][rng.random_range(0..2)]);
        let poison = drawn.or((key.is_none() && topic == compacted).then_some("kafka.invalid_record"));
        let destination = if poison == Some("kafka.invalid_topic") { "no such/topic" } else { &topics[topic] };
        let octets = if poison == Some("kafka.message_too_large") { 40_000 } else { rng.random_range(0..600) };
        // Not to be compressed below the limit.
        let payload = format!(
            "(select decode(coalesce(string_agg(md5(random()::text || i), ''), ''), 'hex') from generate_series(1, {}) i)",
            octets / 16
        );
        let lane = match (policy, &key) {
            ("per_source_stream" | "stop_the_line", _) => source.to_owned(),
            ("per_key_head_of_line", Some(key)) => format!("{source}/{key}"),
            _ => id.clone(),
        };
        let key = key.map_or("null".to_owned(), |key| format!("'{key}'"));
        let sql = format!(
            "(gen_random_uuid(), '{id}', '{source}', '{destination}', {key}, 'Happened', 1, 'application/octet-stream', {payload}, \
             now(), timestamptz '2026-01-01 00:00:00+00' + {n} * interval '1 ms')"
        );
        Row { id, lane, sql, poison }
    };
    (0..count).map(row).collect()
}

fn insert(session: &mut Session, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    let values: Vec<&str> = rows.iter().map(|row| row.sql.as_str()).collect();
    session.execute(&format!(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
         content_type, payload_bytes, occurred_at, created_at) values {}",
        values.join(", ")
    ));
}

/// Two relays, and what those before them said.
struct Relays<'a> {
    setups: [Setup<'a>; 2],
    running: [Option<Daemon>; 2],
    duplicates_counted: usize,
    /// Rows that somebody held when a relay was ended, or the broker in an orderly way.
    in_flight: usize,
}

impl Relays<'_> {
    fn daemon(&self, relay: usize) -> &Daemon {
        self.running[relay].as_ref().expect("it runs")
    }

    fn note(&mut self, relay: usize) {
        let daemon = self.daemon(relay);
        // One that has only just begun does not answer yet, and has sent nothing.
        let Some(overtaken) = daemon.metric("keiro_relay_overtaken_total") else { return };
        assert_eq!(overtaken, 0.0, "{}", daemon.stderr());
        self.duplicates_counted += total(daemon, "keiro_relay_duplicates_possible_total");
    }

    /// Ends a relay and starts another one in its place.
    fn replace(&mut self, relay: usize, signal: &str, session: &mut Session) {
        self.note(relay);
        self.in_flight += session.rows("status = 'publishing'");
        let mut daemon = self.running[relay].take().expect("it runs");
        daemon.signal(signal);
        let status = daemon.wait(LONG);
        assert!(signal == "KILL" || status.code() == Some(0), "{status}: {}", daemon.stderr());
        self.running[relay] = Some(Daemon::start(&self.setups[relay]));
    }
}

/// Hurts something, and mends it.
fn blow(rng: &mut StdRng, kafka: &Kafka, relays: &mut Relays<'_>, session: &mut Session) -> String {
    let relay = rng.random_range(0..2);
    let milliseconds = rng.random_range(50..3_000);
    match rng.random_range(0..10) {
        kind @ 0..3 => {
            // Now and then for longer than a call may take.
            let milliseconds = if kind == 0 { 7_000 } else { milliseconds };
            kafka.pause().expect("paused");
            std::thread::sleep(Duration::from_millis(milliseconds));
            kafka.resume().expect("resumed");
            format!("broker stood still for {milliseconds} ms")
        }
        3 => {
            kafka.kill().expect("killed");
            kafka.restart().expect("Kafka starts again");
            "broker killed".to_owned()
        }
        4 => {
            // A broker that stops may write a record and refuse it all the same.
            relays.in_flight += session.rows("status = 'publishing'");
            kafka.restart().expect("Kafka starts again");
            "broker restarted".to_owned()
        }
        5 => {
            relays.replace(relay, "TERM", session);
            format!("relay {relay} stopped")
        }
        6 | 7 => {
            relays.replace(relay, "KILL", session);
            format!("relay {relay} killed")
        }
        8 => {
            relays.daemon(relay).signal("STOP");
            std::thread::sleep(Duration::from_millis(milliseconds));
            relays.daemon(relay).signal("CONT");
            format!("relay {relay} stood still for {milliseconds} ms")
        }
        _ => {
            // A settlement whose answer is lost is asked for again; a claim's rows wait until their lease runs out.
            session.value(
                "select count(pg_terminate_backend(pid)) from pg_stat_activity where datname = current_database() and \
                 pid <> pg_backend_pid()",
            );
            "connections cut".to_owned()
        }
    }
}

#[test]
fn two_relays_lose_invert_and_kill_nothing_through_chaos() {
    let mut rng = StdRng::seed_from_u64(seed());
    let rounds = std::env::var("KEIRO_RELAY_TEST_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2);
    let kafka = victims::kafka();
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    for round in 0..rounds {
        let kinds: [(i32, &[(&str, &str)]); 4] = [
            (1, &[LIMIT, ARRIVAL]),
            (6, &[LIMIT, ARRIVAL]),
            (3, &[LIMIT, ARRIVAL]),
            (2, &[LIMIT, ARRIVAL, ("cleanup.policy", "compact")]),
        ];
        let topics = kinds.map(|(partitions, configs)| {
            let topic = unique("chaos");
            admin.create(&topic, partitions, configs);
            topic
        });
        let table = Table::ALL[1 + round % 2];
        let database = fresh_database(table);
        let mut session = Session::open(&database);
        let poisons = [0.0, 0.002, 0.01, 0.04][rng.random_range(0..4)];
        let mut sections = String::new();
        let mut all: Vec<Vec<Row>> = (0..4)
            .map(|number| {
                // Each policy once, and the first, which has the most to lose, in the other relays' way more often.
                let policy = POLICIES[if rng.random_bool(0.6) { number } else { rng.random_range(0..2) }];
                let source = format!("s{number} {policy}");
                let _ = write!(sections, "[sources.\"{source}\"]\npolicy = \"{policy}\"\n\n");
                rows(&mut rng, &source, policy, &topics, poisons)
            })
            .collect();
        sections.push_str("[maintenance]\ninterval = \"1s\"\n\n");
        let batches = [(); 2].map(|()| rng.random_range(1..=400));
        let relay_sections = batches.map(|rows| format!("[relay]\nbatch_rows_max = {rows}\n{TIMEOUTS}\n\n{sections}"));
        // Half of the rounds without preference, so that both claim from every source.
        let pooled = if rng.random_bool(0.5) { "prepared_statements = false" } else { "" };
        let setups = [0, 1].map(|relay| Setup {
            database_url: database.url(),
            brokers: &brokers,
            database: pooled,
            sections: &relay_sections[relay],
            // Small batches, so that many are on their way at once.
            kafka: "[kafka.properties]\n\"batch.size\" = \"4000\"",
            ..Setup::default()
        });
        let blows = rng.random_range(2..6);
        println!(
            "round {round}: {table:?}, {:?} rows, poisons {poisons}, batches {batches:?}, {pooled:?}, {blows} blows",
            all.iter().map(Vec::len).collect::<Vec<_>>()
        );
        let running = setups.map(|setup| Some(Daemon::start(&setup)));
        let mut relays = Relays { setups, running, duplicates_counted: 0, in_flight: 0 };
        // The rows come in portions; each blow falls while some of one are on their way.
        let mut written: Vec<Row> = Vec::new();
        for number in 0..blows {
            for source in &mut all {
                let portion = source.len() / (blows - number);
                let portion: Vec<Row> = source.drain(..portion).collect();
                insert(&mut session, &portion);
                written.extend(portion);
            }
            wait_until("some to be on their way", LONG, || session.rows("status in ('publishing')") > 0);
            std::thread::sleep(Duration::from_millis(rng.random_range(0..400)));
            let said = blow(&mut rng, &kafka, &mut relays, &mut session);
            println!("  {said}: {}", session.statuses("true"));
        }
        let begun = Instant::now();
        wait_until("every row to end", RECOVERED, || session.rows("status not in ('sent', 'rejected', 'dead')") == 0);
        println!("  ended {:?} after the last blow: {}", begun.elapsed(), session.statuses("true"));
        for relay in 0..2 {
            wait_until("the relay to answer", LONG, || relays.daemon(relay).http_get("/metrics").is_some());
            relays.note(relay);
        }

        let rejected: BTreeMap<String, String> = session
            .values("select message_id || '/' || rejection_code from keiro.keiro_outbox where status = 'rejected' order by 1")
            .into_iter()
            .map(|row| row.split_once('/').map(|(id, code)| (id.to_owned(), code.to_owned())).expect("an id and a code"))
            .collect();
        let poisoned: BTreeMap<String, String> =
            written.iter().filter_map(|row| Some((row.id.clone(), row.poison?.to_owned()))).collect();
        assert_eq!(rejected, poisoned, "nobody takes these, and no other is rejected");
        assert_eq!(session.statuses("status = 'dead'"), "", "nothing is dead");
        let records: Vec<Record> = topics.iter().flat_map(|topic| read_topic_on(&brokers, topic)).collect();
        let expected: Vec<(String, String)> =
            written.iter().filter(|row| row.poison.is_none()).map(|row| (row.lane.clone(), row.id.clone())).collect();
        let verdict = judge(&records, &expected);
        let distinct: BTreeSet<&String> = verdict.duplicates.iter().collect();
        println!(
            "  {} duplicates of {} rows, {} counted, {} in flight when relays or the broker were ended",
            verdict.duplicates.len(),
            distinct.len(),
            relays.duplicates_counted,
            relays.in_flight
        );
        for id in &verdict.missing {
            let row =
                format!("select to_jsonb(o) - 'payload_bytes' from keiro.keiro_outbox o where message_id = '{id}'");
            println!("  missing: {}", session.value(&row));
        }
        verdict.assert_delivered(relays.duplicates_counted + relays.in_flight);
        assert_arrived_in_order(&records, &expected);
    }
}
