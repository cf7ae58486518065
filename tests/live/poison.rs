//! Rows that cannot be sent, now or ever, among rows that can: the verdict is the row's own, and its neighbours go on in order.

use std::time::Instant;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database, older_to_newer};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{Admin, TopicReader, read_topic};
use crate::support::{LONG, services, unique, wait_until};

const POLICIES: &str = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                        [sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n";
const SOURCES: [(&str, Order); 4] =
    [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)];
/// The topic's `max.message.bytes`; `message_bytes_max` of these relays is 64 KiB.
const TOPIC_MAX: usize = 20_000;

fn setup(database: &Database) -> Setup<'_> {
    Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        kafka: "message_bytes_max = \"64KiB\"",
        sections: POLICIES,
        ..Setup::default()
    }
}

/// A topic of one partition.
fn topic(configs: &[(&str, &str)]) -> String {
    let topic = unique("topic");
    Admin::new(services::brokers()).create(&topic, 1, configs);
    topic
}

/// So many bytes that no compression makes fewer.
fn noise(octets: usize) -> String {
    let blocks = octets / 16;
    format!(
        "payload_bytes = (select decode(string_agg(md5(random()::text || n), ''), 'hex') from generate_series(1, {blocks}) n)"
    )
}

/// A row that can never be sent: its place, what makes it so, the code and what the detail must say.
struct Poison {
    row: usize,
    set: String,
    code: &'static str,
    says: Vec<String>,
}

fn poisons(topic: &str, compacted: &str) -> Vec<Poison> {
    let poison = |row, set: &str, code, says: &[&str]| Poison {
        row,
        set: set.to_owned(),
        code,
        says: says.iter().map(|text| (*text).to_owned()).collect(),
    };
    vec![
        poison(
            4,
            &noise(100_000),
            "kafka.message_too_large",
            &["client: ", " 10", topic, "message_bytes_max = 65536", "message.max.bytes"],
        ),
        poison(7, &noise(30_000), "kafka.message_too_large", &["broker: ", " 30", topic, "max.message.bytes = 20000"]),
        poison(
            10,
            "destination = 'no such/topic'",
            "kafka.invalid_topic",
            &["client: ", "no such/topic", "A-Z a-z 0-9"],
        ),
        poison(13, "occurred_at = 'infinity'", "row.invalid_timestamp", &["client: ", "occurred_at"]),
        poison(16, "occurred_at = '-infinity'", "row.invalid_timestamp", &["client: ", "occurred_at"]),
        poison(
            19,
            &format!("destination = '{compacted}', message_key = null"),
            "kafka.invalid_record",
            &["broker: ", compacted, "message_key"],
        ),
        poison(22, "destination = '..'", "kafka.invalid_topic", &["client: ", "\"..\""]),
    ]
}

/// Rows that look odd and are sent all the same.
const ODD: [(usize, &str); 6] = [
    (2, "payload_bytes = ''"),
    (5, "payload_bytes = '\\x00fffe80'"),
    (8, "message_key = ''"),
    (11, "message_key = 'schlüssel \u{202e}ключ 🔑'"),
    (14, "event_type = E'two\\nlines\\t', content_type = '', attributes = '{\"ö\": [1e400, null, \"\\u0007\"]}'"),
    (17, "traceparent = 'not one', tracestate = 'a=1', schema_version = -9223372036854775808"),
];

/// Every kind of poison in the middle of every policy. Rows are all of one hot key, but for what is set.
fn poison_among_neighbours(shape: Table) {
    let database = fresh_database(shape);
    let main = topic(&[("max.message.bytes", &TOPIC_MAX.to_string())]);
    let compacted = topic(&[("cleanup.policy", "compact")]);
    let mut session = Session::open(&database);
    let poisons = poisons(&main, &compacted);
    let poisoned: Vec<usize> = poisons.iter().map(|poison| poison.row).collect();
    let mut feeds = Vec::new();
    for (source, order) in SOURCES {
        let mut feed = Feed::new(source, &main, order);
        let mut statements = format!("begin; {};", feed.statement(30, 1));
        for (row, set) in poisons.iter().map(|p| (p.row, p.set.as_str())).chain(ODD) {
            statements.push_str(&format!("update keiro.keiro_outbox set {set} where {};", feed.row(row)));
        }
        session.execute(&format!("{statements} commit"));
        feeds.push(feed);
    }
    let mut daemon = Daemon::start(&setup(&database));
    let ended = if shape == Table::OlderShared { "dead=7 sent=23" } else { "rejected=7 sent=23" };
    for feed in &feeds {
        wait_until(&format!("{} to end", feed.source), LONG, || session.statuses(&feed.mine()) == ended);
    }
    for (feed, poison) in feeds.iter().flat_map(|feed| poisons.iter().map(move |poison| (feed, poison))) {
        let (verdict, detail) = match shape {
            Table::OlderShared => {
                let said =
                    session.value(&format!("select last_error from keiro.keiro_outbox where {}", feed.row(poison.row)));
                let start = format!("rejected: {}: ", poison.code);
                let detail =
                    said.strip_prefix(&start).unwrap_or_else(|| panic!("{said:?} does not start with {start:?}"));
                (said.clone(), detail.to_owned())
            }
            Table::NewerShared | Table::Lean | Table::None => {
                let columns = "rejection_code || ' ' || (rejected_at > now() - interval '10 minutes') || ' ' || \
                               coalesce(last_error, 'null') || ' ' || coalesce(published_at::text, 'null')";
                let of = format!("from keiro.keiro_outbox where {}", feed.row(poison.row));
                let verdict = session.value(&format!("select {columns} {of}"));
                assert_eq!(verdict, format!("{} true null null", poison.code), "{} {}", feed.source, poison.row);
                (verdict, session.value(&format!("select rejection_detail {of}")))
            }
        };
        for text in &poison.says {
            assert!(detail.contains(text), "{} {verdict}: {text:?} is not in {detail:?}", feed.source);
        }
    }
    assert_eq!(session.rows("attempt_count <> 1"), 0, "everything was tried once");
    // Odd keys are lanes of their own, but for the sources in which keys do not matter.
    let expected: Vec<(String, String)> = feeds
        .iter()
        .flat_map(|feed| {
            let alone = [feed.id(8), feed.id(11)];
            let rows = feed.expected_without(&poisoned).into_iter();
            rows.map(
                move |(lane, id)| {
                    if feed.source == "keyed" && alone.contains(&id) { (id.clone(), id) } else { (lane, id) }
                },
            )
            .collect::<Vec<_>>()
        })
        .collect();
    let records = read_topic(&main);
    judge(&records, &expected).assert_delivered(0);
    assert_eq!(read_topic(&compacted), []);

    let record = |row: usize| {
        let id = feeds[0].id(row);
        records.iter().find(|record| record.message_id() == id).expect("it was delivered")
    };
    assert_eq!(record(2).value.as_deref(), Some(&b""[..]), "an empty payload is an empty value, not a tombstone");
    assert_eq!(record(5).value.as_deref(), Some(&b"\x00\xff\xfe\x80"[..]));
    assert_eq!(record(8).key.as_deref(), Some(&b""[..]), "an empty key is a key");
    assert_eq!(record(11).key.as_deref(), Some("schlüssel \u{202e}ключ 🔑".as_bytes()));
    let odd = record(14);
    assert_eq!((odd.header("keiro-event-type"), odd.header("content-type")), (Some("two\nlines\t"), Some("")));
    let digits = format!("{{\"ö\":[1{},null,\"\\u0007\"]}}", "0".repeat(400));
    assert_eq!(odd.header("keiro-attributes"), Some(digits.as_str()));
    let odd = record(17);
    assert_eq!((odd.header("traceparent"), odd.header("tracestate")), (Some("not one"), Some("a=1")));
    assert_eq!(odd.header("keiro-schema-version"), Some("-9223372036854775808"));
    // Absent columns are absent headers.
    let plain: Vec<&str> = record(0).headers.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        plain,
        [
            "keiro-message-id",
            "keiro-source",
            "keiro-destination",
            "keiro-event-type",
            "keiro-schema-version",
            "content-type",
            "keiro-occurred-at"
        ]
    );
    let outcome = if shape == Table::OlderShared { "dead" } else { "rejected" };
    assert_eq!(
        daemon.metric(&format!("keiro_relay_rows_total{{outcome=\"{outcome}\",source=\"line\"}}")),
        Some(7.0),
        "{}",
        daemon.http_get("/metrics").expect("metrics").body
    );
    assert_eq!(daemon.metric("keiro_relay_source_halted{source=\"line\"}"), Some(0.0), "a rejected row does not halt");
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0));
}

#[test]
fn poison_is_rejected_and_its_neighbours_go_on() {
    poison_among_neighbours(Table::NewerShared);
}

#[test]
fn poison_is_rejected_on_a_lean_table_and_its_neighbours_go_on() {
    poison_among_neighbours(Table::Lean);
}

#[test]
fn poison_is_dead_on_an_older_table_and_its_neighbours_go_on() {
    poison_among_neighbours(Table::OlderShared);
}

#[test]
fn newer_columns_that_appear_while_it_runs_are_used() {
    let database = fresh_database(Table::OlderShared);
    let main = topic(&[]);
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &main, Order::Key);
    let daemon = Daemon::start(&setup(&database));
    let bad = "destination = 'not legal'";
    let mut round = |session: &mut Session, poisoned: usize| {
        session.execute(&format!(
            "begin; {}; update keiro.keiro_outbox set {bad} where {}; commit",
            feed.statement(20, 4),
            feed.row(poisoned)
        ));
        wait_until("the rows to end", LONG, || session.rows("status in ('pending', 'failed', 'publishing')") == 0);
    };
    round(&mut session, 7);
    assert_eq!(session.statuses("true"), "dead=1 sent=19");
    // With rows on their way all the time.
    let stream = std::thread::scope(|scope| {
        let database = &database;
        let (source, main) = ("traffic", main.clone());
        let traffic = scope.spawn(move || {
            let mut feed = Feed::new(source, &main, Order::Key);
            let mut session = Session::open(database);
            for _ in 0..60 {
                feed.insert_in(&mut session, 5, 3);
            }
            feed
        });
        database.execute(older_to_newer());
        traffic.join().expect("it writes on")
    });
    wait_until("the traffic to be sent", LONG, || session.rows("source = 'traffic' and status <> 'sent'") == 0);
    // The slow timer looks at the table once a second: only what it does not know yet ends as before.
    let mut rounds = 0;
    wait_until("the new columns to be used", LONG, || {
        rounds += 1;
        round(&mut session, 20 * rounds + 3);
        session.rows("status = 'rejected' and rejection_code = 'kafka.invalid_topic' and last_error is null") > 0
    });
    let poisoned: Vec<usize> = std::iter::once(7).chain((1..=rounds).map(|n| 20 * n + 3)).collect();
    judge(&read_topic(&main), &[stream.expected(), &feed.expected_without(&poisoned)].concat()).assert_delivered(0);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    drop(daemon);
}

#[test]
fn missing_topic_holds_its_own_lanes_until_it_is_there() {
    let database = fresh_database(Table::NewerShared);
    let main = topic(&[]);
    let missing = unique("missing");
    let mut session = Session::open(&database);
    let mut keyed = Feed::new("keyed", &main, Order::Key);
    let mut free = Feed::new("free", &main, Order::None);
    // One row of a hot key, and a crowd that would starve the rest if it were tried again and again.
    session.execute(&format!(
        "begin; {}; update keiro.keiro_outbox set destination = '{missing}' where {}; commit",
        keyed.statement(60, 6),
        keyed.row(12)
    ));
    session.execute(&format!(
        "begin; {}; update keiro.keiro_outbox set destination = '{missing}' where source = 'free'; commit",
        free.statement(1000, 0)
    ));
    let daemon = Daemon::start(&setup(&database));
    // Rows 0 and 6 of the hot key come before it, rows 18, 24, … wait behind it.
    wait_until("everything else to be sent", LONG, || session.rows("source = 'keyed' and status = 'sent'") == 52);
    // Fresh rows of the same source go out although a thousand others wait.
    free.insert_in(&mut session, 100, 0);
    wait_until("fresh rows to be sent", LONG, || session.rows("source = 'free' and status = 'sent'") == 100);
    let error = session.value(&format!("select last_error from keiro.keiro_outbox where {}", keyed.row(12)));
    assert!(
        error.starts_with("kafka.unknown_topic: ") && error.contains(&missing) && error.contains("create it"),
        "{error}"
    );
    assert_eq!(
        session.rows("status <> 'sent' and attempt_count > 0 and status <> 'publishing'"),
        0,
        "no attempt is spent"
    );
    let lines = daemon.stderr().lines().filter(|line| line.contains(&missing)).count();
    assert!(lines <= 4, "{lines} lines about one topic:\n{}", daemon.stderr());

    let made = Instant::now();
    Admin::new(services::brokers()).create(&missing, 1, &[]);
    wait_until("all the rest to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    println!("sent {:?} after the topic was made", made.elapsed());
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    let records = [read_topic(&main), read_topic(&missing)].concat();
    judge(&records, &[keyed.expected(), free.expected()].concat()).assert_delivered(0);
    let hot: Vec<String> = session.values(
        "select message_id from keiro.keiro_outbox where source = 'keyed' and message_key = 'k0' order by published_at, created_at",
    );
    assert_eq!(
        hot,
        (0..10).map(|n| keyed.id(6 * n)).collect::<Vec<_>>(),
        "the hot key's rows went out in order over two topics"
    );
}

#[test]
fn topic_that_is_deleted_and_made_anew_is_used_again() {
    let database = fresh_database(Table::NewerShared);
    let main = topic(&[]);
    let admin = Admin::new(services::brokers());
    admin.grow(&main, 6);
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &main, Order::Key);
    let mut daemon = Daemon::start(&setup(&database));
    feed.insert_in(&mut session, 100, 30);
    wait_until("the first rows to be sent", LONG, || session.rows("status = 'sent'") == 100);
    admin.delete(&main);
    feed.insert_in(&mut session, 50, 30);
    // Found missing, so that it is parked when it comes back.
    wait_until("it to be missed", LONG, || session.rows("last_error like 'kafka.unknown_topic: %'") > 0);
    admin.create(&main, 2, &[]);
    feed.insert_in(&mut session, 100, 30);
    let made = Instant::now();
    wait_until("all the rest to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    println!("sent {:?} after the topic was made anew", made.elapsed());
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    let expected: Vec<_> = feed.expected()[100..].to_vec();
    judge(TopicReader::new(services::brokers(), &main).catch_up(), &expected).assert_delivered(0);
    assert!(daemon.is_running());
}
