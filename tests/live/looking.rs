//! `list`, `show`, `why`, `stuck` and `gc-preview` as a person runs them: what they print, their exit codes, and that they change nothing.

use serde_json::{Value, json};

use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::outbox::{id, insert, keyed, row, with};
use crate::support::session::Session;
use crate::support::{LONG, run, services, unique, wait_for};

const SECTIONS: &str = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[maintenance]\nretention = \"7d\"\n";

fn setup(url: &str) -> Setup<'_> {
    Setup { database_url: url, brokers: "127.0.0.1:1", sections: SECTIONS, ..Setup::default() }
}

#[track_caller]
fn command(setup: &Setup<'_>, arguments: &[&str], code: i32) -> Finished {
    let finished = run_command(setup, arguments, "");
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

/// The objects that a command prints, one a line.
#[track_caller]
fn objects(setup: &Setup<'_>, arguments: &[&str]) -> Vec<Value> {
    let arguments = [arguments, &["--json"]].concat();
    let printed = command(setup, &arguments, 0).stdout;
    printed.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

#[track_caller]
fn ids(setup: &Setup<'_>, arguments: &[&str]) -> Vec<String> {
    objects(setup, arguments).iter().map(|row| row["outbox_id"].as_str().expect("an id").to_owned()).collect()
}

fn texts(numbers: &[u64]) -> Vec<String> {
    numbers.iter().map(|n| id(*n).to_string()).collect()
}

/// Every row as it lies.
fn lies(database: &Database) -> Vec<String> {
    Session::open(database).values("select o::text from keiro.keiro_outbox o order by outbox_id")
}

/// A table with a row of every kind, and as it lay before the commands ran.
fn table(kind: Table) -> (Database, Vec<String>) {
    let database = fresh_database(kind);
    run(async || {
        let far = if kind == Table::Lean { "9999-12-31 00:00:00+00" } else { "2026-01-01 00:00:00+00" };
        let mut rows = vec![
            with(
                keyed(1, "k"),
                json!({ "status": "failed", "attempt_count": 2, "next_attempt_at": "2999-01-01 00:00:00+00",
                                       "last_error": "kafka.some_code: \u{1b}[31mred" }),
            ),
            keyed(2, "k"),
            row(3),
            with(row(4), json!({ "status": "weird\u{7}", "destination": "other" })),
            with(row(5), json!({ "status": "publishing", "attempt_count": 1, "updated_at": "2026-01-01 00:00:01+00" })),
            with(row(6), json!({ "status": "publishing", "attempt_count": 1, "updated_at": "2026-01-01 00:00:00+00" })),
            with(row(7), json!({ "status": "publishing", "attempt_count": 1, "updated_at": "2999-01-01 00:00:00+00" })),
            with(row(8), json!({ "status": "sent", "published_at": "2026-01-01 00:00:01+00" })),
            with(row(9), json!({ "status": "sent", "published_at": "2026-01-01 00:00:00+00" })),
            with(row(10), json!({ "status": "sent", "published_at": "2999-01-01 00:00:00+00" })),
            with(
                row(11),
                json!({ "status": "dead", "attempt_count": 10, "next_attempt_at": far, "last_error": "kafka.other: gone" }),
            ),
            with(row(12), json!({ "source": "stream", "message_key": "" })),
            with(
                row(13),
                json!({ "source": "stream", "next_attempt_at": "9000-01-01 00:00:00+00", "status": "failed", "attempt_count": 1 }),
            ),
        ];
        if kind != Table::OlderShared {
            let rejected = json!({ "status": "rejected", "next_attempt_at": far, "rejected_at": "2026-01-01 00:00:00+00",
                                   "rejection_code": "kafka.message_too_large", "rejection_detail": "1 > 0" });
            rows.push(with(row(14), rejected));
        }
        insert(&database.connect().await, &rows).await;
    });
    let before = lies(&database);
    (database, before)
}

#[test]
fn lists_show_what_is_asked_for_and_change_nothing() {
    for kind in Table::ALL {
        let (database, before) = table(kind);
        let setup = setup(database.url());
        assert_eq!(ids(&setup, &["list"]), texts(&[1, 2, 3, 4, 5, 6, 7, 12, 13]), "{kind:?}");
        assert_eq!(ids(&setup, &["list", "--status", "dead"]), texts(&[11]));
        assert_eq!(ids(&setup, &["list", "--status", "unknown", "--topic", "other"]), texts(&[4]));
        assert_eq!(ids(&setup, &["list", "--not-due"]), texts(&[1, 13]));
        assert_eq!(ids(&setup, &["list", "--due", "--source", "s"]), texts(&[2, 3]));
        assert_eq!(ids(&setup, &["list", "--key", "k", "--desc"]), texts(&[2, 1]));
        assert_eq!(ids(&setup, &["list", "--key", ""]), texts(&[12]));
        assert_eq!(ids(&setup, &["list", "--error", "kafka.other", "--error", "kafka.some_code"]), texts(&[1, 11]));
        assert_eq!(ids(&setup, &["list", "--id", &id(9).to_string(), "--id", &id(2).to_string()]), texts(&[2, 9]));
        assert_eq!(ids(&setup, &["list", "--message-id", "m8"]), texts(&[8]));
        assert_eq!(ids(&setup, &["list", "--sort", "published", "--desc"]), texts(&[10, 8, 9]));
        let all = if kind == Table::OlderShared { 13 } else { 14 };
        assert_eq!(ids(&setup, &["list", "--status", "any", "--all"]).len(), all);
        if kind != Table::OlderShared {
            assert_eq!(ids(&setup, &["list", "--error", "kafka.message_too_large"]), texts(&[14]));
        }

        let first = objects(&setup, &["list", "--limit", "4"]);
        assert_eq!(first.len(), 5, "four rows and where the next page begins");
        let cursor = first[4]["next_cursor"].as_str().expect("a cursor");
        assert_eq!(ids(&setup, &["list", "--cursor", cursor]), texts(&[5, 6, 7, 12, 13]));
        for other in [&["--source", "s"][..], &["--desc"], &["--sort", "due"], &["--status", "any"]] {
            let refused = command(&setup, &[&["list", "--cursor", cursor], other].concat(), 64);
            assert!(refused.stderr.contains("belongs to another query"), "{}", refused.stderr);
        }
        assert!(command(&setup, &["list", "--cursor", "x"], 64).stderr.contains("--cursor is none of ours"));

        assert_eq!(ids(&setup, &["stuck"]), texts(if kind == Table::Lean { &[5, 6] } else { &[6, 5] }));
        assert_eq!(ids(&setup, &["gc-preview"]), texts(&[9, 8]));

        let text = command(&setup, &["list", "--status", "any", "--all"], 0).stdout;
        assert!(text.lines().all(|line| line.chars().count() <= 100 && !line.contains(char::is_control)), "{text}");
        assert!(text.contains("kafka.some_code: \\u{1b}[31mred"), "{text}");
        assert!(text.contains("held") && text.contains("''"), "{text}");
        assert_eq!(lies(&database), before);
    }
}

#[test]
fn what_a_tired_person_types_is_refused_with_what_would_be_right() {
    let (database, _) = table(Table::Lean);
    let setup = setup(database.url());
    for (arguments, says) in [
        (&["list", "--limit", "0"][..], "1..=200"),
        (&["list", "--limit", "1000"], "1..=200"),
        (&["list", "--status", "publised"], "similar value"),
        (&["list", "--since", "yesterday"], "2026-01-02T03:04:05Z"),
        (&["list", "--since", "1h", "--until", "2h"], "no row can be between them"),
        (&["list", "--sort", "published", "--status", "dead"], "--sort published is for sent rows"),
        (&["list", "--due", "--status", "dead"], "only pending and failed"),
        (&["list", "--timeout", "0s"], "from 100ms to 1h"),
        (&["show"], "OUTBOX_ID"),
        (&["show", "7"], "an outbox_id is a UUID"),
        (&["why", "m1"], "an outbox_id is a UUID"),
    ] {
        let refused = command(&setup, arguments, 64);
        assert!(refused.stderr.contains(says), "{arguments:?}: {}", refused.stderr);
        assert_eq!(refused.stdout, "");
    }
    let nobody = "00000000-0000-0000-0000-000000000000";
    for verb in ["show", "why"] {
        assert!(command(&setup, &[verb, nobody], 3).stderr.contains("no row with outbox_id"));
    }
    assert!(command(&setup, &["list", "--source", "nobody"], 0).stderr.contains("list: no such rows"));
    let line = command(&setup, &["list", "--topic", "t", "--event-type", "E"], 0).stderr;
    assert!(line.contains("list: no index serves --topic, --event-type: "), "{line}");
    let off = Setup { sections: "", ..setup };
    assert!(command(&off, &["gc-preview"], 0).stderr.contains("retention is off"));
    database.execute("drop table keiro.keiro_outbox");
    for verb in [&["list"][..], &["show", nobody], &["why", nobody], &["stuck"], &["gc-preview"]] {
        assert!(command(&setup, verb, 78).stderr.contains("does not exist"), "{verb:?}");
    }
}

#[test]
fn show_prints_every_column_and_a_payload_only_when_asked() {
    for kind in Table::ALL {
        let (database, _) = table(kind);
        let setup = setup(database.url());
        run(async || {
            let odd = json!({
                "payload_bytes": "\\x00ff", "attributes": { "b": 1.5, "a": "MARK\u{1}" }, "next_attempt_at": "-infinity",
                "created_at": "infinity", "attempt_count": i64::MAX, "event_type": "",
            });
            insert(
                &database.connect().await,
                &[with(row(20), odd), with(row(21), json!({ "payload_bytes": "\\x7b7d0a" }))],
            )
            .await;
        });
        let (binary, text) = (id(20).to_string(), id(21).to_string());
        let printed = command(&setup, &["show", &binary], 0).stdout;
        assert!(!printed.contains("AP8") && !printed.contains("payload_base64"), "{printed}");
        let column = |name: &str| {
            let line =
                printed.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {printed}"));
            line[name.len()..].trim().to_owned()
        };
        assert_eq!(column("created_at"), "infinity");
        assert_eq!(column("next_attempt_at"), "-infinity");
        assert_eq!(column("attempt_count"), i64::MAX.to_string());
        assert_eq!(column("payload_octets"), "2");
        assert_eq!(column("event_type"), "''");
        assert_eq!(column("message_key"), "-");
        assert_eq!(column("attributes"), "{\"a\": \"MARK\\u0001\", \"b\": 1.5}");

        let object = &objects(&setup, &["show", &binary, "--payload"])[0];
        assert_eq!(object["payload_base64"], "AP8=");
        assert_eq!(object["created_at"], "infinity");
        assert!(object["rejection_code"].is_null());
        let count: usize = 29 + 3 - 1 + 2;
        assert_eq!(object.as_object().expect("an object").len(), count);
        let object = &objects(&setup, &["show", &text, "--payload"])[0];
        assert_eq!(object["payload_text"], "{}\n");
        assert!(command(&setup, &["show", &text, "--payload"], 0).stdout.contains("{}\\n"));
        assert!(objects(&setup, &["show", &text])[0].get("payload_text").is_none());
        // The other commands never do.
        for arguments in [&["list", "--id", &text][..], &["why", &text]] {
            assert!(!command(&setup, &[arguments, &["--json"]].concat(), 0).stdout.contains("{}\\n"), "{arguments:?}");
        }
    }
}

#[test]
fn why_answers_from_the_table_alone() {
    for kind in Table::ALL {
        let (database, before) = table(kind);
        let setup = setup(database.url());
        let why = |n: u64| objects(&setup, &["why", &id(n).to_string()]).remove(0);
        let reasons = |n: u64| {
            let mut answer = why(n);
            answer["reasons"].take()
        };
        assert_eq!(reasons(1), json!(["not_due", "no_relay"]));
        assert_eq!(reasons(2), json!(["behind", "no_relay"]));
        assert_eq!(why(2)["head"], json!(id(1)));
        assert_eq!(why(2)["ahead"], 1);
        // Without a key nothing is before it.
        assert_eq!(reasons(3), json!(["no_relay"]));
        assert_eq!(reasons(4), json!(["unknown_status"]));
        assert_eq!(reasons(5), json!(["lease_expired", "no_relay"]));
        assert_eq!(reasons(7), json!(["in_flight"]));
        assert_eq!(reasons(8), json!(["sent"]));
        assert_eq!(reasons(11), json!(["dead"]));
        assert_eq!(reasons(13), json!(["held", "behind", "no_relay"]));
        assert_eq!(why(13)["head"], json!(id(12)));
        if kind != Table::OlderShared {
            assert_eq!(reasons(14), json!(["rejected"]));
        }
        let text = command(&setup, &["why", &id(1).to_string()], 0).stdout;
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
        assert!(text.replace('\n', " ").contains("after 2 attempts: kafka.some_code: \\u{1b}[31mred."), "{text}");
        assert_eq!(lies(&database), before);
    }
}

#[test]
fn why_tells_what_the_running_relay_and_an_operator_hold_back() {
    let database = fresh_database(Table::Lean);
    let nowhere = unique("nowhere");
    let sections = "[maintenance]\ninterval = \"1s\"\n";
    let kafka = "[kafka.properties]\n\"allow.auto.create.topics\" = \"false\"\n";
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections, kafka, ..Setup::default() };
    command(&setup, &["migrate"], 0);
    let row = with(keyed(1, "k"), json!({ "destination": nowhere }));
    run(async || insert(&database.connect().await, &[row]).await);
    let mut session = Session::open(&database);
    let daemon = Daemon::start(&setup);
    let config = daemon.config();
    let why = || {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_keiro-relay"))
            .args(["why", &id(1).to_string(), "--json", "--config"])
            .arg(&config)
            .output()
            .expect("run why");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).expect("one object")
    };
    let has = |answer: &Value, reason: &str| answer["reasons"].as_array().expect("a list").contains(&json!(reason));
    let answer = wait_for("the topic to be parked", LONG, || Some(why()).filter(|answer| has(answer, "topic_parked")));
    let text = answer["text"].as_str().expect("a text");
    assert!(text.contains(&format!("Its topic, \"{nowhere}\", is parked since")), "{text}");
    assert_ne!(answer["relay"], "unknown");
    session.execute(&format!(
        "insert into keiro_relay.pauses (schema_name, table_name, kind, name) values ('keiro', 'keiro_outbox', 'topic', '{nowhere}')"
    ));
    let answer = wait_for("the probe to end", LONG, || Some(why()).filter(|answer| has(answer, "paused")));
    assert!(answer["text"].as_str().expect("a text").contains(&format!("It is paused: topic \"{nowhere}\" since")));
}

#[test]
fn reader_who_may_change_nothing_may_look() {
    let (database, _) = table(Table::Lean);
    let role = unique("reader");
    database.execute(&format!(
        "create role {role} login; grant usage on schema keiro to {role}; grant select on keiro.keiro_outbox to {role}"
    ));
    let url = database.url().replacen("://postgres", &format!("://{role}"), 1);
    assert!(url.contains(&role), "{url}");
    let setup = setup(&url);
    for arguments in
        [&["list"][..], &["show", &id(1).to_string()], &["why", &id(2).to_string()], &["stuck"], &["gc-preview"]]
    {
        command(&setup, arguments, 0);
    }
    database.execute(&format!("drop owned by {role}; drop role {role}"));
}
