//! The binary end to end: rows in the table, records on the topic, judged by an oracle that reads the topic.

use crate::support::daemon::{Daemon, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{TopicReader, fresh_topic, read_topic};
use crate::support::{LONG, services, unique, wait_until};

/// Inserts `rows` rows of a source over `keys` keys, each in a transaction of its own, and returns (lane, message_id) in order.
fn insert(database: &Database, source: &str, topic: &str, rows: usize, keys: usize) -> Vec<(String, String)> {
    let mut expected = Vec::new();
    let mut sql = String::new();
    for row in 0..rows {
        let key = format!("{source}-k{}", row % keys);
        let id = format!("{source}-m{row:06}");
        sql.push_str(&format!(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
             content_type, payload_bytes, occurred_at, created_at) values (gen_random_uuid(), '{id}', '{source}', '{topic}', '{key}', \
             'Happened', 1, 'application/json', convert_to('{{\"n\":{row}}}', 'UTF8'), now(), \
             timestamptz '2026-01-01 00:00:00+00' + {row} * interval '1 ms');\n"
        ));
        expected.push((key, id));
    }
    database.execute(&sql);
    expected
}

#[test]
fn four_policies_reach_kafka_in_order() {
    let database = fresh_database(Table::NewerShared);
    let topics: Vec<String> = (0..4).map(|_| fresh_topic(1, &[])).collect();
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        sections: "[relay]\nbatch_rows_max = 50\n\n[sources.stream]\npolicy = \"per_source_stream\"\n\n\
                   [sources.line]\npolicy = \"stop_the_line\"\n\n[sources.free]\npolicy = \"best_effort\"\n",
        ..Setup::default()
    };
    let mut expected = Vec::new();
    for ((source, keys), topic) in [("keyed", 7), ("stream", 7), ("line", 7), ("free", 7)].iter().zip(&topics) {
        expected.push(insert(&database, source, topic, 300, *keys));
    }
    let daemon = Daemon::start(&setup);
    for ((lanes, topic), source) in expected.iter().zip(&topics).zip(["keyed", "stream", "line", "free"]) {
        let mut reader = TopicReader::new(services::brokers(), topic);
        let records = reader.wait_for(300, LONG);
        let lanes: Vec<(&str, &str)> = lanes
            .iter()
            .map(|(key, id)| match source {
                "keyed" => (key.as_str(), id.as_str()),
                "free" => (id.as_str(), id.as_str()),
                _ => (source, id.as_str()),
            })
            .collect();
        judge(records, &lanes).assert_delivered(0);
    }
    wait_until("every row is sent", LONG, || {
        database.value("select count(*) from keiro.keiro_outbox where status <> 'sent'") == "0"
    });
    // A new source is found while it runs.
    let late = insert(&database, "late", &topics[0], 20, 3);
    wait_until("the new source is sent", LONG, || {
        database.value("select count(*) from keiro.keiro_outbox where source = 'late' and status = 'sent'") == "20"
    });
    assert_eq!(late.len(), 20);
    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    assert!(metrics.contains("keiro_relay_rows_total{outcome=\"sent\",source=\"keyed\"} 300"), "{metrics}");
    assert!(metrics.contains("keiro_relay_overtaken_total 0"), "{metrics}");
    let mut daemon = daemon;
    daemon.wait_http_ok("/readyz", LONG);
    daemon.signal("TERM");
    assert_eq!(daemon.wait(LONG).code(), Some(0), "{}", daemon.stderr());
}

#[test]
fn drain_sends_everything_and_says_so() {
    let database = fresh_database(Table::OlderShared);
    let topic = fresh_topic(3, &[]);
    let expected = insert(&database, "billing", &topic, 500, 40);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let finished = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(finished.status.code(), Some(0), "{} {}", finished.stdout, finished.stderr);
    let report: serde_json::Value = serde_json::from_str(&finished.stdout).expect("one object");
    for (field, value) in
        [("claimed", 500), ("sent", 500), ("failed", 0), ("dead", 0), ("rejected", 0), ("lost", 0), ("requeued", 0)]
    {
        assert_eq!(report[field], value, "{field} in {report}");
    }
    let mut reader = TopicReader::new(services::brokers(), &topic);
    judge(reader.catch_up(), &expected).assert_delivered(0);
}

#[test]
fn table_made_by_migrate_is_drained() {
    let database = fresh_database(Table::None);
    let topic = fresh_topic(3, &[]);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    for _ in 0..2 {
        let migrated = run_command(&setup, &["migrate"], "");
        assert_eq!(migrated.status.code(), Some(0), "{} {}", migrated.stdout, migrated.stderr);
    }
    let mut feed = Feed::new("billing", &topic, Order::Key);
    feed.insert(&database, 1000, 60);
    let drained = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(drained.status.code(), Some(0), "{} {}", drained.stdout, drained.stderr);
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
    // Nothing due is no failure.
    let drained = run_command(&setup, &["drain"], "");
    assert_eq!(drained.status.code(), Some(0), "{} {}", drained.stdout, drained.stderr);
    assert!(drained.stdout.starts_with("claimed 0, sent 0, "), "{}", drained.stdout);
}

#[test]
fn behind_a_transaction_pooler_everything_is_drained() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(2, &[]);
    let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                    [sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n";
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        database: "prepared_statements = false",
        sections,
        ..Setup::default()
    };
    let mut feeds: Vec<Feed> =
        [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)]
            .map(|(source, order)| Feed::new(source, &topic, order))
            .into();
    for feed in &mut feeds {
        feed.insert(&database, 200, 20);
    }
    // Bytes that text would spoil, and one row for every statement that settles.
    let (odd, bad) = (feeds[0].row(3), feeds[0].row(7));
    database.execute(&format!(
        "update keiro.keiro_outbox set payload_bytes = '\\x00ff0a5c', attributes = '{{\"a\": [1.50, \"\\\\\"]}}' where {odd}; \
         update keiro.keiro_outbox set destination = 'not legal' where {bad}"
    ));
    let drained = run_command(&setup, &["drain", "--json"], "");
    assert_eq!(drained.status.code(), Some(0), "{} {}", drained.stdout, drained.stderr);
    let report: serde_json::Value = serde_json::from_str(&drained.stdout).expect("one object");
    assert_eq!((&report["sent"], &report["rejected"]), (&799.into(), &1.into()), "{report}");
    // And by the daemon, with its polls and its slow timer.
    let mut daemon = Daemon::start(&setup);
    daemon.wait_http_ok("/readyz", LONG);
    for feed in &mut feeds {
        feed.insert(&database, 100, 20);
    }
    let mut session = Session::open(&database);
    wait_until("everything to be sent", LONG, || session.statuses("true") == "rejected=1 sent=1199");
    wait_until("the slow timer to tick", LONG, || {
        daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").is_some_and(|at| at > 0.0)
    });
    let mut expected: Vec<_> = feeds[0].expected_without(&[7]);
    expected.extend(feeds[1..].iter().flat_map(|feed| feed.expected().to_vec()));
    let records = read_topic(&topic);
    judge(&records, &expected).assert_delivered(0);
    let record = records.iter().find(|record| record.message_id() == feeds[0].id(3)).expect("it was delivered");
    assert_eq!(record.value.as_deref(), Some(&b"\x00\xff\x0a\\"[..]));
    assert_eq!(record.header("keiro-attributes"), Some("{\"a\":[1.50,\"\\\\\"]}"));
    // No named statement and no session state, which the next server connection would not know.
    let log = daemon.stderr();
    let warned = |line: &&str| line.contains("\"WARN\"") && !line.contains("pauses are not read");
    assert_eq!(log.lines().filter(warned).count(), 0, "{log}");
}

#[test]
fn small_source_is_served_while_a_large_one_drains() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(2, &[]);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let mut session = Session::open(&database);
    let (mut large, mut small) = (Feed::new("large", &topic, Order::Key), Feed::new("small", &topic, Order::Key));
    large.insert_in(&mut session, 20_000, 3_000);
    let daemon = Daemon::start(&setup);
    wait_until("the large source to be at work", LONG, || session.rows("source = 'large' and status = 'sent'") > 500);
    let mut waits = Vec::new();
    for _ in 0..3 {
        small.insert_in(&mut session, 1, 1);
        let inserted = std::time::Instant::now();
        // In one statement, so that it is seen while the large source still waits.
        wait_until("the small source to be sent", LONG, || {
            let both = "select (count(*) filter (where source = 'small' and status <> 'sent'))::text || ' ' || \
                        (count(*) filter (where source = 'large' and status = 'pending') > 1000) from keiro.keiro_outbox";
            let seen = session.value(both);
            assert!(seen.ends_with("true"), "the large source was drained first: {seen}");
            seen.starts_with("0 ")
        });
        waits.push(inserted.elapsed());
    }
    println!("the small source's rows were sent after {waits:?}");
    drop(daemon);
}

#[test]
fn budgets_far_below_the_work_slow_it_down_and_stop_nothing() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[("max.message.bytes", "3000000")]);
    let sections = "[relay]\nbatch_rows_max = 3\nin_flight_rows_max = 3\nbatch_bytes_max = \"1KiB\"\nin_flight_bytes_max = \"2MiB\"\n\n\
                    [sources.s0]\npolicy = \"per_source_stream\"\n\n[sources.s1]\npolicy = \"stop_the_line\"\n";
    let setup = Setup {
        database_url: database.url(),
        brokers: services::brokers(),
        database: "pool_size = 2",
        kafka: "message_bytes_max = \"2MiB\"",
        sections,
        ..Setup::default()
    };
    let mut session = Session::open(&database);
    let mut feeds: Vec<Feed> =
        (0..6).map(|n| Feed::new(&format!("s{n}"), &topic, if n < 2 { Order::Source } else { Order::Key })).collect();
    for feed in &mut feeds {
        feed.insert_in(&mut session, 40, 5);
        // Larger than a batch may be: it goes alone.
        session.execute(&format!(
            "update keiro.keiro_outbox set payload_bytes = convert_to(repeat('x', 1500000), 'UTF8') where {}",
            feed.row(20)
        ));
    }
    let mut daemon = Daemon::start(&setup);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    daemon.wait_http_ok("/readyz", LONG);
    wait_until("the budgets to be given back", LONG, || {
        daemon.metric("keiro_relay_in_flight_rows") == Some(0.0)
            && daemon.metric("keiro_relay_in_flight_bytes") == Some(0.0)
    });
}

#[test]
fn rows_go_out_in_order_of_created_at_and_outbox_id_wherever_they_lie() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let sections = "[relay]\nbatch_rows_max = 7\n\n[sources.stream]\npolicy = \"per_source_stream\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    // Four rows each share a created_at, as rows of one transaction do; written from the last to the first.
    for (variant, source) in ["keyed", "stream"].into_iter().enumerate() {
        session.execute(&format!(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
             content_type, payload_bytes, occurred_at, created_at) \
             select (lpad(to_hex((n * 7919) % 65536), 8, '0') || '-000{variant}-7000-8000-000000000000')::uuid, '{source}-' || n, '{source}', \
             '{topic}', 'k' || n % 3, 'Happened', 1, 'text/plain', '', now(), timestamptz '2026-01-01 00:00:00+00' + (n / 4) * interval '1 ms' \
             from generate_series(299, 0, -1) n"
        ));
    }
    let expected: Vec<(String, String)> = session
        .values("select source || ' ' || message_key || ' ' || message_id from keiro.keiro_outbox order by created_at, outbox_id")
        .into_iter()
        .map(|row| {
            let mut words = row.split(' ');
            let (source, key, id) = (words.next().expect("a source"), words.next().expect("a key"), words.next().expect("an id"));
            (if source == "keyed" { format!("keyed/{key}") } else { source.to_owned() }, id.to_owned())
        })
        .collect();
    let finished = run_command(&setup, &["drain"], "");
    assert_eq!(finished.status.code(), Some(0), "{} {}", finished.stdout, finished.stderr);
    judge(&read_topic(&topic), &expected).assert_delivered(0);
}

#[test]
fn sources_with_odd_names_are_served_by_their_rules_and_unlisted_ones_can_be_ignored() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let long = "l".repeat(300);
    let names =
        ["Orders.EU", "ein \"Name\" mit 'allem' \\ {und} ü🔑", " ", "two\nlines", "other", long.as_str(), "billing"];
    let listed: String =
        names.iter().map(|name| format!("[sources.{}]\npolicy = \"per_source_stream\"\n\n", toml_key(name))).collect();
    let sections = format!("[relay]\nunlisted_sources = \"ignore\"\n\n{listed}[maintenance]\ninterval = \"1s\"\n");
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: &sections, ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feeds: Vec<Feed> = names.iter().map(|name| Feed::new(name, &topic, Order::Source)).collect();
    let mut stranger = Feed::new("Billing", &topic, Order::Key);
    for feed in feeds.iter_mut().chain([&mut stranger]) {
        // A message id goes into a header of its own; the name stands in it too.
        feed.insert_in(&mut session, 20, 3);
    }
    let mut daemon = Daemon::start(&setup);
    wait_until("the listed sources to be sent", LONG, || session.rows("status = 'sent'") == 20 * names.len());
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert_eq!(session.statuses("source = 'Billing'"), "pending=20");
    wait_until("the stranger's backlog to be shown", LONG, || {
        daemon.metric("keiro_relay_unrouted_rows{source=\"Billing\"}") == Some(20.0)
    });
    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    for label in ["Orders.EU", "two\\nlines", "ein \\\"Name\\\" mit 'allem' \\\\ {und} ü🔑"] {
        let series = format!("keiro_relay_rows_total{{outcome=\"sent\",source=\"{label}\"}} 20");
        assert!(metrics.contains(&series), "{series} is not in {metrics}");
    }
    let status = run_command(&setup, &["status", "--json"], "");
    let status: serde_json::Value = serde_json::from_str(&status.stdout).expect("one object");
    let shown: Vec<&str> =
        status["sources"].as_array().expect("a list").iter().filter_map(|source| source["source"].as_str()).collect();
    for name in names {
        assert!(shown.contains(&name), "{name:?} is not in {shown:?}");
    }
    let text = run_command(&setup, &["status"], "");
    let of_a_source = |line: &&str| line.contains(" per_source ") || line.starts_with("Billing  ");
    assert_eq!(text.stdout.lines().filter(of_a_source).count(), names.len() + 1, "a line each: {}", text.stdout);
    daemon.wait_http_ok("/readyz", LONG);
}

/// A name as a quoted key of TOML.
fn toml_key(name: &str) -> String {
    format!("\"{}\"", name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

#[test]
fn new_sources_and_idle_ones_are_served_at_once() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    daemon.wait_http_ok("/readyz", LONG);
    let mut session = Session::open(&database);
    let mut feeds: Vec<Feed> = Vec::new();
    for round in 0..3 {
        // Sources appear one after the other; those of the rounds before have been idle since.
        feeds.extend((0..5).map(|n| Feed::new(&format!("round{round}-{n}"), &topic, Order::Key)));
        for feed in &mut feeds {
            feed.insert_in(&mut session, 3, 2);
        }
        let inserted = std::time::Instant::now();
        wait_until("all of them to be sent", LONG, || session.rows("status <> 'sent'") == 0);
        println!("sent {:?} after they were written", inserted.elapsed());
        // Fifteen seconds is when a full sweep would find them.
        assert!(inserted.elapsed() < std::time::Duration::from_secs(10), "{:?}", inserted.elapsed());
    }
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
}

#[test]
fn least_privilege_is_enough() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let user = unique("relay");
    database.execute(&format!(
        "create role {user} login; grant usage on schema keiro to {user}; grant select, update on keiro.keiro_outbox to {user}"
    ));
    let url = database.url().replace("postgres@", &format!("{user}@"));
    let setup = Setup {
        database_url: &url,
        brokers: services::brokers(),
        sections: "[maintenance]\ninterval = \"1s\"\nretention = \"1h\"\n",
        ..Setup::default()
    };
    let mut feed = Feed::new("billing", &topic, Order::Key);
    feed.insert(&database, 200, 20);
    database.execute("update keiro.keiro_outbox set status = 'sent', published_at = now() - interval '1 year' where message_key = 'k0'");
    let mut session = Session::open(&database);
    let mut daemon = Daemon::start(&setup);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    daemon.wait_http_ok("/readyz", LONG);
    let log = daemon.stderr();
    assert!(log.contains("pg_read_all_stats") && log.contains("delete"), "what is off is said: {log}");
    wait_until("the slow timer to tick", LONG, || {
        daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").is_some_and(|at| at > 0.0)
    });
    assert_eq!(session.rows("published_at < now() - interval '1 month'"), 10, "nothing could be deleted");
    let denied = log.lines().filter(|line| line.contains("permission")).count();
    assert!(denied <= 2, "{log}");
}
