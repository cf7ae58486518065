//! `enqueue` on a real table: what is written, what coalesces, and that it is all lines or none.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use keiro_relay::cli;
use keiro_relay::producer::{Limits, OnDuplicate};
use keiro_relay::store::{Db, Profile, WAKE_CHANNEL, migrate};
use serde_json::Value;
use uuid::Uuid;

use crate::support::database::{Database, Table, fresh_database};
use crate::support::store::{db, settings};
use crate::support::{LONG, run, unique};

struct Outcome {
    code: u8,
    answers: Vec<Value>,
    err: String,
}

fn enqueue_on(db: &Db, input: &str) -> Outcome {
    enqueue_as(db, input, None, OnDuplicate::AcceptIdentical)
}

fn enqueue_as(db: &Db, input: &str, batch: Option<usize>, on_duplicate: OnDuplicate) -> Outcome {
    let job = cli::enqueue::Job {
        schema: "keiro",
        table: "keiro_outbox",
        bound: LONG,
        limits: Limits { payload_bytes_max: 4 << 20, ..Limits::default() },
        on_duplicate,
        batch,
        progress: cli::enqueue::progress(),
    };
    run(async || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let input = input.as_bytes();
        let code = cli::enqueue::run(db, &job, input, &mut out, &mut err).await.expect("output");
        let answers = out.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        let answers = answers.map(|line| serde_json::from_slice(line).expect("JSON")).collect();
        Outcome { code, answers, err: String::from_utf8(err).expect("text") }
    })
}

#[track_caller]
fn enqueue(database: &Database, input: &str) -> Vec<Value> {
    let outcome = enqueue_on(&db(database.url()), input);
    assert_eq!((outcome.code, outcome.err.as_str()), (0, ""));
    outcome.answers
}

fn lean_database() -> Database {
    let database = fresh_database(Table::None);
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", Some(Profile::Lean), false).await)
        .expect("migrate");
    database
}

fn line(message_id: &str, more: &str) -> String {
    format!(r#"{{"source":"s","destination":"d","event_type":"e","message_id":"{message_id}"{more}}}"#)
}

#[test]
fn every_column_arrives_as_it_was_given_on_every_kind_of_table() {
    for database in [fresh_database(Table::OlderShared), fresh_database(Table::NewerShared), lean_database()] {
        let id = Uuid::now_v7();
        let input = format!(
            r#"{{"outbox_id":"{id}","message_id":"m","source":"s","destination":"d","message_key":"k","event_type":"e","schema_version":2,"content_type":"application/json; charset=utf-8","schema_registry":"r","schema_subject":"j","schema_version_ref":3,"schema_id":4,"schema_fingerprint":"f","source_event_id":"{id}","source_global_position":5,"causation_id":"{id}","correlation_id":"{id}","traceparent":"tp","tracestate":"ts","payload":{{"a": 1.10}},"attributes":{{"b":1.50,"a":123456789012345678901234567890}},"occurred_at":"2026-01-02T03:04:05.123456Z","created_at":"2026-01-01T00:00:00Z","next_attempt_at":"2026-01-03T00:00:00+01:00"}}"#
        );
        let answers = enqueue(&database, &input);
        assert_eq!(answers, [serde_json::json!({"line": 1, "outbox_id": id, "message_id": "m", "inserted": true})]);
        let text = database.value(
            "select concat_ws('|', outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
             content_type, schema_registry, schema_subject, schema_version_ref, schema_id, schema_fingerprint, \
             source_event_id, source_global_position, causation_id, correlation_id, traceparent, tracestate, \
             convert_from(payload_bytes, 'UTF8'), attributes, extract(epoch from occurred_at), \
             extract(epoch from created_at), extract(epoch from next_attempt_at), status, attempt_count) \
             from keiro.keiro_outbox",
        );
        let expected = format!(
            "{id}|m|s|d|k|e|2|application/json; charset=utf-8|r|j|3|4|f|{id}|5|{id}|{id}|tp|ts|{{\"a\": 1.10}}|\
             {{\"a\": 123456789012345678901234567890, \"b\": 1.50}}|1767323045.123456|1767225600.000000|1767394800.000000|pending|0"
        );
        assert_eq!(text.trim_matches('"').replace("\"\"", "\""), expected);
    }
}

#[test]
fn defaults_are_the_transactions_and_ids_sort_with_the_lines() {
    let database = lean_database();
    let input: Vec<_> = (0..1200).map(|n| line(&format!("m{n}"), r#","payload":1"#)).collect();
    let answers = enqueue(&database, &input.join("\n"));
    assert_eq!(answers.len(), 1200);
    let sorted = database.value(
        "select bool_and(place = n) from (select substr(message_id, 2)::int as n, \
         row_number() over (order by created_at, outbox_id) - 1 as place from keiro.keiro_outbox) x",
    );
    assert_eq!(sorted, "t");
    let same = "select count(distinct (created_at, occurred_at, next_attempt_at)) || ' ' || \
                bool_and(created_at = occurred_at and created_at <= now()) from keiro.keiro_outbox";
    assert_eq!(database.value(same).trim_matches('"'), "1 true");
}

#[test]
fn retries_coalesce_on_either_key_and_answer_with_the_row_that_is_there() {
    for pooled in [false, true] {
        let database = lean_database();
        let mut settings = settings(database.url());
        settings.prepared_statements = !pooled;
        let pool = Db::new(&settings, "test", "0").expect("a pool");
        let (a, b, c) = (Uuid::now_v7(), Uuid::now_v7(), Uuid::now_v7());
        let with_id = |id: Uuid| format!(r#","payload":1,"outbox_id":"{id}""#);
        let first = enqueue_on(&pool, &[line("m1", &with_id(a)), line("m2", &with_id(b))].join("\n"));
        assert_eq!((first.code, first.answers.len()), (0, 2), "{}", first.err);
        let again = [
            // The same outbox_id with a new message_id, as a producer's retry mints it.
            line("m9", &with_id(a)),
            // The same message_id with a new outbox_id.
            line("m2", &with_id(c)),
            // Both, of two different rows: the outbox_id counts.
            line("m2", &with_id(a)),
            // New, and its twin further down.
            line("m3", &with_id(c)),
            line("m3", r#","payload":1"#),
            line("m4", &with_id(c)),
            // The same message_id of another source is another message.
            line("m1", r#","payload":1"#).replace(r#""source":"s""#, r#""source":"t""#),
        ];
        let outcome = enqueue_on(&pool, &again.join("\n"));
        assert_eq!((outcome.code, outcome.err.as_str()), (0, ""));
        let seen: Vec<_> = outcome
            .answers
            .iter()
            .map(|answer| (answer["outbox_id"].as_str(), answer["message_id"].as_str(), answer["inserted"].as_bool()))
            .collect();
        let (a, b, c) = (a.to_string(), b.to_string(), c.to_string());
        let expected = [
            (&a, "m1", false),
            (&b, "m2", false),
            (&a, "m1", false),
            (&c, "m3", true),
            (&c, "m3", false),
            (&c, "m3", false),
        ];
        for (index, (id, message_id, inserted)) in expected.into_iter().enumerate() {
            assert_eq!(seen[index], (Some(id.as_str()), Some(message_id), Some(inserted)), "line {}", index + 1);
        }
        assert_eq!((seen[6].1, seen[6].2), (Some("m1"), Some(true)));
        assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "4");
    }
}

#[test]
fn one_bad_line_and_nothing_is_written() {
    let database = lean_database();
    let mut lines: Vec<_> = (0..1000).map(|n| line(&format!("m{n}"), r#","payload":1"#)).collect();
    lines[777] = line("m777", r#","payload":1,"colour":"red""#);
    lines.push("{".to_owned());
    let outcome = enqueue_on(&db(database.url()), &lines.join("\n"));
    assert_eq!((outcome.code, outcome.answers.len()), (1, 0));
    assert_eq!(
        outcome.err,
        "enqueue: line 778: colour: is no key; the keys are the table's column names\n\
         enqueue: line 1001: is not JSON (column 1)\n\
         enqueue: nothing was inserted: 2 problems\n"
    );
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "0");
}

#[test]
fn refusal_of_the_server_leaves_nothing_and_shows_no_value() {
    let database = lean_database();
    database.execute("alter table keiro.keiro_outbox add check (message_key is distinct from 'marker')");
    let mut lines: Vec<_> = (0..600).map(|n| line(&format!("m{n}"), r#","payload":1"#)).collect();
    lines.push(line("last", r#","payload":"marker","message_key":"marker""#));
    let outcome = enqueue_on(&db(database.url()), &lines.join("\n"));
    assert_eq!((outcome.code, outcome.answers.len()), (1, 0));
    assert!(outcome.err.starts_with("enqueue: nothing was inserted: database: "), "{}", outcome.err);
    assert!(!outcome.err.contains("marker"), "{}", outcome.err);
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "0");

    let name = unique("role");
    database.execute(&format!("create role {name} login; grant usage on schema keiro to {name}"));
    let host = database.url().split_once('@').expect("a user in the URL").1;
    let outcome = enqueue_on(&db(&format!("postgres://{name}@{host}")), &line("m", r#","payload":1"#));
    assert_eq!(outcome.code, 78);
    assert!(
        outcome.err.contains("permission denied") && outcome.err.contains("enqueue also insert"),
        "{}",
        outcome.err
    );
}

#[test]
fn twin_that_another_transaction_is_writing_is_waited_for() {
    let database = lean_database();
    let pool = db(database.url());
    let mut fast = settings(database.url());
    fast.statement_timeout = Duration::from_secs(2);
    let impatient = Db::new(&fast, "test", "0").expect("a pool");
    let id = Uuid::now_v7();
    run(async || {
        let (other, watcher) = (database.connect().await, database.connect().await);
        let insert = format!(
            "begin; insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, \
             schema_version, content_type, payload_bytes, occurred_at) \
             values ('{id}', 'theirs', 's', 'd', 'e', 1, 't', '', now())"
        );
        other.batch_execute(&insert).await.expect("insert");
        let input = line("ours", &format!(r#","payload":1,"outbox_id":"{id}""#));

        // Somebody who never ends: given up within the bound, with nothing written.
        let outcome = enqueue_as(&impatient, &input, None, OnDuplicate::Coalesce);
        assert_eq!(outcome.code, 1);
        assert!(outcome.err.contains("nothing was inserted"), "{}", outcome.err);

        let waiting = tokio::task::spawn_blocking({
            let input = input.clone();
            move || enqueue_as(&pool, &input, None, OnDuplicate::Coalesce)
        });
        let blocked =
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
        crate::support::wait_until_async("the second to wait for the first", LONG, async || {
            // Not inside `other`'s transaction, which sees the sessions as they were when it first looked.
            watcher.query_one(blocked, &[]).await.expect("count").get::<_, i64>(0) == 1
        })
        .await;
        other.batch_execute("commit").await.expect("commit");
        let outcome = waiting.await.expect("no panic");
        assert_eq!((outcome.code, outcome.err.as_str()), (0, ""));
        assert_eq!(
            outcome.answers,
            [serde_json::json!({"line": 1, "outbox_id": id, "message_id": "theirs", "inserted": false})]
        );
    });
}

#[test]
fn relays_are_woken_once_per_source_when_the_rows_can_be_seen() {
    let database = lean_database();
    let pool = db(database.url());
    run(async || {
        let (connection, mut listener) = pool.dedicated().await.expect("a connection");
        connection.listen(WAKE_CHANNEL, LONG).await.expect("listen");
        let other = line("m3", r#","payload":1"#).replace(r#""source":"s""#, r#""source":"été""#);
        let input = [line("m1", r#","payload":1"#), other, line("m2", r#","payload":1"#)].join("\n");
        assert_eq!(enqueue_on(&pool, &input).code, 0);
        let mut heard = Vec::new();
        for _ in 0..2 {
            let next = tokio::time::timeout(LONG, listener.next()).await.expect("in time").expect("a notification");
            heard.push(next.payload);
        }
        heard.sort();
        assert_eq!(heard, ["s", "été"]);
        let count = connection.query("select count(*) from keiro.keiro_outbox", &[], LONG).await.expect("count");
        assert_eq!(count[0].get::<_, i64>(0), 3);
    });
}

#[test]
fn large_payloads_are_split_into_several_statements_of_one_transaction() {
    let database = lean_database();
    let payload = "x".repeat(3 << 20);
    let input: Vec<_> = (0..5).map(|n| line(&format!("m{n}"), &format!(r#","payload_text":"{payload}""#))).collect();
    assert_eq!(enqueue(&database, &input.join("\n")).len(), 5);
    let stored = "select count(distinct created_at) || ' ' || count(distinct xmin::text) || ' ' || \
                  sum(octet_length(payload_bytes)) from keiro.keiro_outbox";
    assert_eq!(database.value(stored).trim_matches('"'), format!("1 1 {}", 5 * (3 << 20)));
}

#[test]
fn different_row_under_a_used_id_is_named_by_line_and_columns_and_nothing_is_inserted() {
    let database = lean_database();
    let pool = db(database.url());
    enqueue(&database, &line("m1", r#","payload":1,"message_key":"k""#));
    // Identical: white space of attributes and the instant that nobody gave are no difference.
    let again = line("m1", r#","payload":1,"message_key":"k""#);
    let different = line("m1", r#","payload":"marker","message_key":"marker""#);
    let input =
        [line("m2", r#","payload":1"#), again.clone(), different.clone(), String::new(), different.clone()].join("\n");
    let id = database.value("select outbox_id from keiro.keiro_outbox");

    let outcome = enqueue_on(&pool, &input);
    assert_eq!((outcome.code, outcome.answers.len()), (1, 0));
    let problem = |line| {
        format!("enqueue: line {line}: is there already as outbox_id {id}, and differs in message_key, payload_bytes\n")
    };
    let expected = format!("{}{}enqueue: nothing was inserted: 2 problems\n", problem(3), problem(5));
    assert_eq!(outcome.err, expected);
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "1");

    let outcome = enqueue_as(&pool, &again, None, OnDuplicate::Reject);
    let expected = format!(
        "enqueue: line 1: is there already, identical, as outbox_id {id}\nenqueue: nothing was inserted: 1 problem\n"
    );
    assert_eq!((outcome.code, outcome.err), (1, expected));

    let outcome = enqueue_as(&pool, &input, None, OnDuplicate::Coalesce);
    assert_eq!((outcome.code, outcome.answers.len(), outcome.err.as_str()), (0, 4, ""));
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "2");
}

#[test]
fn batches_are_committed_one_by_one_and_a_failure_says_where_to_go_on() {
    let database = lean_database();
    let pool = db(database.url());
    let mut lines: Vec<_> = (1..=25).map(|n| line(&format!("m{n}"), r#","payload":1"#)).collect();
    // Blank lines count as lines, not as rows.
    lines.insert(4, String::new());
    let good = lines.join("\n");
    lines[21] = line("m21", r#","payload":1,"colour":1"#);
    lines[24] = "{".to_owned();
    let outcome = enqueue_as(&pool, &lines.join("\n"), Some(10), OnDuplicate::AcceptIdentical);
    assert_eq!((outcome.code, outcome.answers.len()), (1, 20));
    assert_eq!(
        outcome.err,
        "enqueue: line 22: colour: is no key; the keys are the table's column names\n\
         enqueue: line 25: is not JSON (column 1)\n\
         enqueue: stopped at a line that cannot be inserted: 2 problems; every line up to line 21 is in the table: send the rest \
         again, from line 22\n"
    );
    let stored = "select count(*) || ' in ' || count(distinct xmin::text) from keiro.keiro_outbox";
    assert_eq!(database.value(stored).trim_matches('"'), "20 in 2");

    let outcome = enqueue_as(&pool, &good, Some(10), OnDuplicate::AcceptIdentical);
    assert_eq!((outcome.code, outcome.err.as_str()), (0, ""));
    let inserted = outcome.answers.iter().filter(|answer| answer["inserted"] == true).count();
    assert_eq!((outcome.answers.len(), inserted), (25, 5));

    // What the server refuses is the same: the batches before it stay.
    database.execute("alter table keiro.keiro_outbox add check (message_key is distinct from 'marker')");
    let mut lines: Vec<_> = (31..=39).map(|n| line(&format!("m{n}"), r#","payload":1"#)).collect();
    lines[7] = line("m38", r#","payload":1,"message_key":"marker""#);
    let outcome = enqueue_as(&pool, &lines.join("\n"), Some(3), OnDuplicate::AcceptIdentical);
    assert_eq!((outcome.code, outcome.answers.len()), (1, 6));
    assert!(outcome.err.starts_with("enqueue: lines 7 to 9 were not inserted: database: "), "{}", outcome.err);
    assert!(
        outcome.err.ends_with("every line up to line 6 is in the table: send the rest again, from line 7\n"),
        "{}",
        outcome.err
    );
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "31");

    let outcome = enqueue_as(&pool, "x", Some(3), OnDuplicate::AcceptIdentical);
    assert!(outcome.err.ends_with("1 problem; nothing was inserted\n"), "{}", outcome.err);
}

/// The command as an operator runs it.
fn command(database: &Database, arguments: &[&str]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_keiro-relay"))
        .args(["enqueue", "--database-url", database.url(), "--brokers", "localhost:9092"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start the command")
}

#[test]
fn batch_is_in_the_table_while_the_input_goes_on_and_no_transaction_waits_for_it() {
    let database = lean_database();
    let mut child = command(&database, &["--batch", "2"]);
    let mut input = child.stdin.take().expect("its input");
    let mut answers = BufReader::new(child.stdout.take().expect("its output")).lines();
    for batch in 0..3 {
        for n in 0..2 {
            writeln!(input, "{}", line(&format!("m{batch}{n}"), r#","payload":1"#)).expect("it reads");
        }
        for _ in 0..2 {
            assert!(answers.next().expect("an answer").expect("text").contains("\"inserted\":true"));
        }
        assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), ((batch + 1) * 2).to_string());
        let open = "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in%'";
        assert_eq!(database.value(open), "0");
    }
    // A last batch that is not full, and a reader that is gone: the rows are what counts.
    drop(answers);
    for n in 0..3 {
        writeln!(input, "{}", line(&format!("last{n}"), r#","payload":1"#)).expect("it reads");
    }
    drop(input);
    assert!(child.wait().expect("it ends").success());
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "9");
}

#[test]
fn transaction_begins_when_the_input_has_ended() {
    let database = lean_database();
    let mut child = command(&database, &["--all-or-nothing"]);
    let mut input = child.stdin.take().expect("its input");
    writeln!(input, "{}", line("m1", r#","payload":1"#)).expect("it reads");
    let before = database.value("select clock_timestamp()::text");
    writeln!(input, "{}", line("m2", r#","payload":1"#)).expect("it reads");
    drop(input);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let began = format!("select bool_and(created_at > {}::timestamptz) from keiro.keiro_outbox", quote(&before));
    assert_eq!(database.value(&began), "t");
}

fn quote(text: &str) -> String {
    format!("'{}'", text.trim_matches('"'))
}

#[test]
fn contradictory_and_senseless_flags_are_bad_usage() {
    let database = fresh_database(Table::None);
    let flags: [&[&str]; 5] = [
        &["--batch", "0"],
        &["--batch", "10001"],
        &["--batch", "x"],
        &["--batch", "5", "--all-or-nothing"],
        &["--on-duplicate", "ignore"],
    ];
    for arguments in flags {
        let output = command(&database, arguments).wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(64), "{arguments:?}");
    }
}
