//! Pausing and resuming while relays run: what stays where it is, what goes on, and that no lane loses its order by it.

use keiro_relay::domain::pause::PauseTarget;
use keiro_relay::store::{PauseEnd, Store, migrate};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::outbox::{config, seed};
use crate::support::random::one_of;
use crate::support::session::Session;
use crate::support::store::db;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, run, services, wait_until};

const POLICIES: &str = "[relay]\nbatch_rows_max = 20\n\n[sources.stream]\npolicy = \"per_source_stream\"\n\n\
                        [sources.line]\npolicy = \"stop_the_line\"\n\n[sources.free]\npolicy = \"best_effort\"\n\n\
                        [maintenance]\ninterval = \"1s\"\n";
const SOURCES: [(&str, Order); 4] =
    [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)];

/// A table with its side schema.
fn migrated(table: Table) -> Database {
    let database = fresh_database(table);
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await).expect("migrate");
    database
}

fn setup(database: &Database) -> Setup<'_> {
    Setup { database_url: database.url(), brokers: services::brokers(), sections: POLICIES, ..Setup::default() }
}

#[track_caller]
fn command(setup: &Setup<'_>, arguments: &[&str], code: i32) -> Finished {
    let finished = run_command(setup, arguments, "");
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

/// Writes rows, every third of which goes to another topic.
fn insert(session: &mut Session, feed: &mut Feed, other: &str, rows: usize, keys: usize) {
    let topic = format!("'{}'", feed.topic);
    let statement = feed.statement(rows, keys);
    session.execute(&statement.replacen(&topic, &format!("case when n % 3 = 2 then '{other}' else {topic} end"), 1));
}

/// Rows that were marked sent before an earlier row of their lane was.
fn overtaken(session: &mut Session) -> usize {
    session.count(
        "select count(*) from keiro.keiro_outbox e join keiro.keiro_outbox l on l.source = e.source \
         and (e.source <> 'keyed' or l.message_key = e.message_key) and (e.created_at, e.outbox_id) < (l.created_at, l.outbox_id) \
         where e.source <> 'free' and e.published_at > l.published_at",
    )
}

/// Other rows go on, one after the other, each after the other's turn: time enough for anything that would move.
#[track_caller]
fn let_time_pass(session: &mut Session, feed: &mut Feed) {
    for _ in 0..20 {
        feed.insert_in(session, 1, 0);
        wait_until("another source to go on", LONG, || session.rows("source = 'clock' and status <> 'sent'") == 0);
    }
}

#[test]
fn pauses_come_and_go_under_load_and_every_lane_keeps_its_order() {
    for table in [Table::NewerShared, Table::Lean] {
        let mut rng = StdRng::seed_from_u64(seed());
        let database = migrated(table);
        let (topic, other) = (fresh_topic(2, &[]), fresh_topic(2, &[]));
        let plain = setup(&database);
        // Nobody tells a relay behind a pooler: it learns of each pause seconds after the others.
        let pooled = Setup { database: "prepared_statements = false", ..plain };
        let mut session = Session::open(&database);
        let mut feeds = SOURCES.map(|(source, order)| Feed::new(source, &topic, order));
        let mut daemons: Vec<Daemon> = [plain, plain, pooled].iter().map(Daemon::start).collect();
        let lane = |key: &str| PauseTarget::Lane { source_name: one_source(key), message_key: key.to_owned() };
        let targets: Vec<PauseTarget> = SOURCES
            .iter()
            .map(|(source, _)| PauseTarget::Source((*source).to_owned()))
            .chain([&topic, &other].map(|topic| PauseTarget::Topic(topic.clone())))
            .chain(["k0", "k1", "k2", "k3", "k4"].map(lane))
            .collect();
        for _ in 0..60 {
            for feed in &mut feeds {
                insert(&mut session, feed, &other, 12, 5);
            }
            let target = one_of(&mut rng, &targets);
            let pausing = rng.random_bool(0.5);
            let store = Store::new(&config(database.url()), 1).expect("a store");
            run(async || {
                if pausing {
                    store.pause(&target, PauseEnd::Never, None, false).await.map(drop).expect("pause");
                } else {
                    store.unpause(&target, false).await.map(drop).expect("unpause");
                }
            });
        }
        database.execute("delete from keiro_relay.pauses; select pg_notify('keiro_relay_pause', '')");
        wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
        let records = [read_topic(&topic), read_topic(&other)].concat();
        let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
        judge(&records, &expected).assert_delivered(0);
        assert_eq!(overtaken(&mut session), 0);
        assert_eq!(session.rows("attempt_count <> 1"), 0, "a pause spends nothing");
        for daemon in &mut daemons {
            assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
            assert!(daemon.is_running());
        }
    }
}

/// Each source has lanes of the same keys.
fn one_source(key: &str) -> String {
    SOURCES[usize::from(key.as_bytes()[1] - b'0') % SOURCES.len()].0.to_owned()
}

#[test]
fn paused_topic_holds_the_lanes_whose_head_goes_there_and_outlives_the_relay() {
    let database = migrated(Table::Lean);
    let (topic, other) = (fresh_topic(2, &[]), fresh_topic(2, &[]));
    let setup = setup(&database);
    let said = command(&setup, &["pause", "--topic", &other, "--reason", "the cluster of\u{7} others", "--json"], 0);
    let paused: Value = serde_json::from_str(&said.stdout).expect("one object");
    assert_eq!(
        (&paused["kind"], &paused["topic"], &paused["by"], &paused["until"], &paused["was_paused"]),
        (&json!("topic"), &json!(other), &json!("postgres"), &Value::Null, &json!(false))
    );
    assert!(said.stderr.contains("note: no row that goes to topic"), "{}", said.stderr);

    let mut session = Session::open(&database);
    let mut feeds = SOURCES.map(|(source, order)| Feed::new(source, &topic, order));
    for feed in &mut feeds {
        // Row 0 and 1 go to the one topic, row 2 to the paused one: of the keys 0 and 1 row 8 and 5 are the first that do.
        insert(&mut session, feed, &other, 12, 2);
    }
    let mut clock = Feed::new("clock", &topic, Order::None);
    let expected = |source: &str| -> &[&str] {
        match source {
            "keyed" => &["000000", "000001", "000003"],
            "free" => &["000000", "000001", "000003", "000004", "000006", "000007", "000009", "000010"],
            _ => &["000000", "000001"],
        }
    };
    for _ in 0..2 {
        let mut daemon = Daemon::start(&setup);
        daemon.wait_http_ok("/readyz", LONG);
        let_time_pass(&mut session, &mut clock);
        for (source, _) in SOURCES {
            let sent = session.values(&format!(
                "select right(message_id, 6) from keiro.keiro_outbox where source = '{source}' and status = 'sent' order by 1"
            ));
            assert_eq!(sent, expected(source), "{source}");
        }
        assert_eq!(session.rows("status = 'pending' and attempt_count = 0"), 48 - 3 - 2 - 2 - 8);
        assert_eq!(daemon.metric("keiro_relay_paused{kind=\"topic\"}"), Some(1.0));
        assert_eq!(daemon.metric("keiro_relay_paused{kind=\"lane\"}"), Some(0.0));
        let shown = daemon.json("/status");
        assert_eq!(shown["paused"][0]["name"], json!(other), "{shown}");
        assert_eq!(shown["paused"][0]["reason"], json!("the cluster of  others"));
        assert_eq!(shown["pauses_off"], Value::Null);
        wait_until("the rows that wait not to count as ready", LONG, || {
            SOURCES.iter().all(|(source, _)| {
                let ready = format!("keiro_relay_oldest_ready_age_seconds{{source=\"{source}\"}}");
                daemon.metric(&ready) == Some(0.0)
            })
        });
        daemon.wait_http_ok("/readyz", LONG);
        assert!(daemon.stderr().contains("paused by an operator"), "{}", daemon.stderr());
    }
    let _daemon = Daemon::start(&setup);
    let said = command(&setup, &["resume", "--topic", &other], 0).stdout;
    assert!(said.starts_with(&format!("resumed topic {other:?}, paused since 20")), "{said}");
    assert!(said.contains("the cluster of\\u{7} others"), "{said}");
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let records = [read_topic(&topic), read_topic(&other)].concat();
    let expected: Vec<_> = feeds.iter().chain([&clock]).flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&records, &expected).assert_delivered(0);
    assert_eq!((overtaken(&mut session), session.rows("attempt_count <> 1")), (0, 0));
    command(&setup, &["resume", "--topic", &other], 3);
}

#[test]
fn paused_source_and_lane_wait_until_resumed_or_over() {
    let database = migrated(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = setup(&database);
    let mut session = Session::open(&database);
    let mut feeds = SOURCES.map(|(source, order)| Feed::new(source, &topic, order));
    let mut clock = Feed::new("clock", &topic, Order::None);
    clock.insert_in(&mut session, 1, 0);
    let daemon = Daemon::start(&setup);
    wait_until("the relay to work", LONG, || session.rows("status <> 'sent'") == 0);

    let said = command(&setup, &["pause", "klock"], 0);
    assert!(said.stderr.contains("did you mean \"clock\"?"), "{}", said.stderr);
    command(&setup, &["pause", "stream"], 0);
    for source in ["keyed", "line", "free"] {
        let said = command(&setup, &["pause", source, "--key", "k1"], 0);
        assert!(
            said.stdout.contains(&format!("paused lane \"k1\" of source {source:?}, until somebody")),
            "{}",
            said.stdout
        );
    }
    wait_until("the relay to hear of it", LONG, || daemon.metric("keiro_relay_paused{kind=\"lane\"}") == Some(3.0));
    assert_eq!(daemon.metric("keiro_relay_paused{kind=\"source\"}"), Some(2.0));
    for feed in &mut feeds {
        feed.insert_in(&mut session, 6, 3);
    }
    let waiting = "select source || right(message_id, 1) from keiro.keiro_outbox where status = 'pending' order by source, message_id";
    let held = ["free1", "free4", "keyed1", "keyed4", "line1", "line2", "line3", "line4", "line5"];
    let stream = ["stream0", "stream1", "stream2", "stream3", "stream4", "stream5"];
    let held = [&held[..], &stream].concat();
    wait_until("whatever may go to be sent", LONG, || session.values(waiting) == held);
    let_time_pass(&mut session, &mut clock);
    assert_eq!(session.values(waiting), held);
    assert_eq!(session.rows("status = 'pending' and attempt_count <> 0"), 0);
    // A key is content of a row.
    assert!(!daemon.stderr().contains("k1") && !daemon.http_get("/status").expect("an answer").body.contains("k1"));

    let listed = command(&setup, &["pause", "--list", "--json"], 0).stdout;
    let kinds: Vec<Value> = listed.lines().map(|line| serde_json::from_str(line).expect("an object")).collect();
    let kinds: Vec<_> =
        kinds.iter().map(|pause| (pause["kind"].as_str(), pause["source"].as_str(), pause["key"].as_str())).collect();
    let lane = |source| (Some("lane"), Some(source), Some("k1"));
    let source = |name| (Some("source"), Some(name), None);
    assert_eq!(kinds, [source("klock"), source("stream"), lane("keyed"), lane("line"), lane("free")]);

    let said = command(&setup, &["resume", "keyed", "--dry-run"], 0);
    assert!(said.stderr.contains("1 of its lanes are paused"), "{}", said.stderr);
    command(&setup, &["resume", "keyed", "--key", "k2"], 3);
    command(&setup, &["resume", "line"], 3);
    command(&setup, &["resume", "stream"], 0);
    command(&setup, &["resume", "klock"], 0);
    command(&setup, &["resume", "klock"], 3);
    for source in ["keyed", "line"] {
        let resumed: Value =
            serde_json::from_str(&command(&setup, &["resume", source, "--key", "k1", "--json"], 0).stdout)
                .expect("an object");
        assert_eq!((&resumed["key"], &resumed["resumed"]), (&json!("k1"), &json!(true)));
    }
    wait_until("all but the last to be sent", LONG, || session.values(waiting) == ["free1", "free4"]);
    // It ends by itself.
    let said = command(&setup, &["pause", "free", "--key", "k1", "--for", "1s"], 0);
    assert!(said.stdout.contains("(it was since 20"), "{}", said.stdout);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    assert_eq!(command(&setup, &["pause", "--list"], 0).stdout, "nothing is paused\n");
    let expected: Vec<_> = feeds.iter().chain([&clock]).flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert_eq!(overtaken(&mut session), 0);
}

#[test]
fn drain_leaves_what_is_paused_and_says_so() {
    let database = migrated(Table::Lean);
    let topic = fresh_topic(1, &[]);
    let setup = setup(&database);
    let mut session = Session::open(&database);
    for (source, order) in SOURCES {
        Feed::new(source, &topic, order).insert_in(&mut session, 6, 3);
    }
    command(&setup, &["pause", "stream"], 0);
    command(&setup, &["pause", "keyed", "--key", "k0"], 0);
    let drained: Value = serde_json::from_str(&command(&setup, &["drain", "--json"], 1).stdout).expect("one object");
    assert_eq!(
        (&drained["sent"], &drained["due"], &drained["paused"]),
        (&json!(16), &json!(8), &json!(2)),
        "{drained}"
    );
    assert_eq!(drained["gave_up"], json!(false));
}

#[test]
fn without_the_side_table_the_relay_runs_and_the_commands_say_so() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = setup(&database);
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    feed.insert_in(&mut session, 3, 1);
    let daemon = Daemon::start(&setup);
    wait_until("the rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let said = daemon.json("/status")["pauses_off"].as_str().unwrap_or_default().to_owned();
    assert!(said.contains("keiro-relay migrate"), "{said}");
    for arguments in
        [&["pause", "keyed"][..], &["pause", "--list"], &["resume", "--topic", "t"], &["resume", "keyed", "--key", "k"]]
    {
        let said = command(&setup, arguments, 78).stderr;
        assert!(said.contains("there is no table keiro_relay.pauses"), "{said}");
    }
    // What it did before there were pauses it still does.
    command(&setup, &["resume", "keyed"], 0);
    command(&setup, &["resume", "nobody"], 3);
    // A table that comes later is used.
    command(&setup, &["migrate"], 0);
    command(&setup, &["pause", "keyed"], 0);
    wait_until("the relay to see it", LONG, || daemon.metric("keiro_relay_paused{kind=\"source\"}") == Some(1.0));
    assert_eq!(daemon.json("/status")["pauses_off"], Value::Null);
}

#[test]
fn what_is_mistyped_is_refused() {
    let database = migrated(Table::Lean);
    let setup = setup(&database);
    let bad: [&[&str]; 13] = [
        &["pause"],
        &["resume"],
        &["pause", "a", "--topic", "t"],
        &["pause", "--key", "k"],
        &["pause", "--topic", "t", "--key", "k"],
        &["pause", "a", "--for", "2"],
        &["pause", "a", "--for", "0s"],
        &["pause", "a", "--for", "1h", "--until", "2999-01-01T00:00:00Z"],
        &["pause", "a", "--until", "2999-01-01 00:00"],
        &["pause", "a", "--until", "2020-01-01T00:00:00Z"],
        &["pause", "--list", "a"],
        &["pause", "a", "b"],
        &["resume", "--all"],
    ];
    for arguments in bad {
        let said = command(&setup, arguments, 64);
        assert!(!said.stderr.is_empty(), "{arguments:?}");
    }
    command(&setup, &["pause", "a", "--dry-run"], 0);
    assert_eq!(command(&setup, &["pause", "--list"], 0).stdout, "nothing is paused\n");
    // Whatever was meant, it is not lost in an empty variable.
    assert!(command(&setup, &["pause", ""], 0).stderr.contains("no row of source \"\""));
    command(&setup, &["pause", "a", "--until", "2999-01-01T00:00:00+02:00"], 0);
    assert!(command(&setup, &["pause", "--list"], 0).stdout.contains("until 2998-12-31T22:00:00.000Z"));
}
