//! What commands about rows print: escaped, within a width; cursors; and the paragraph of `why`.

use std::time::Duration;

use keiro_relay::cli::rows::cursor::{Cursor, ListQuery};
use keiro_relay::cli::rows::explain::explain;
use keiro_relay::cli::rows::text::{FAR_FROM, HELD_FROM, cut, distance, escaped, instant, json_line, span, wrapped};
use keiro_relay::cli::rows::why::{Facts, Halt, ParkedTopic, Ready, Reason, RelayStatus, SourceStatus};
use keiro_relay::domain::message::PgTime;
use keiro_relay::domain::policy::Policy;
use keiro_relay::store::{Ahead, LaneHead, Selection, Sort, When};
use uuid::Uuid;

const SECOND: i64 = 1_000_000;
const NOW: PgTime = PgTime(820_540_800 * SECOND);

#[test]
fn nothing_of_the_table_moves_a_cursor() {
    let bad = "a\n\x1b[2Jb\u{9b}c\u{202e}d\u{7f}\u{200b}ü";
    let text = escaped(bad);
    assert_eq!(text, "a\\n\\u{1b}[2Jb\\u{9b}c\\u{202e}d\\u{7f}\\u{200b}ü");
    let line = json_line(&serde_json::json!({ "key": bad }));
    assert!(line.chars().all(|c| !c.is_control() && c != '\u{202e}' && c != '\u{200b}'), "{line}");
    let back: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(back["key"], bad);
    assert_eq!(cut("abcdef", 6), "abcdef");
    assert_eq!(cut("abcdefg", 6), "abcde…");
    assert_eq!(cut("\n\n\n\n", 6).chars().count(), 6);
}

#[test]
fn spans_and_instants_are_short_and_never_fail() {
    for (seconds, text) in [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (3599, "59m"),
        (3600, "1h"),
        (86_400, "1d"),
        (364 * 86_400, "364d"),
        (365 * 86_400, "1y"),
    ] {
        assert_eq!(span(seconds * SECOND), text);
    }
    assert_eq!(distance(NOW, PgTime(NOW.0 + 90 * SECOND)), "in 1m");
    assert_eq!(distance(NOW, PgTime(NOW.0 - 90 * SECOND)), "1m ago");
    assert_eq!(distance(NOW, PgTime::INFINITY), "never");
    assert_eq!(instant(NOW, PgTime(NOW.0 - 1)), "2025-12-31T23:59:59Z (0s ago)");
    for (micros, text) in [
        (0, "2000-01-01T00:00:00Z"),
        (250_000, "2000-01-01T00:00:00.25Z"),
        (-1, "1999-12-31T23:59:59.999999Z"),
        (HELD_FROM.0, "9000-01-01T00:00:00Z"),
        (FAR_FROM.0, "9999-01-01T00:00:00Z"),
        (9_223_371_331_200_000_000 - 1, "+294276-12-31T23:59:59.999999Z"),
        (-211_813_488_000_000_000, "-004713-11-24T00:00:00Z"),
        (i64::MAX, "infinity"),
        (i64::MIN, "-infinity"),
    ] {
        assert_eq!(PgTime(micros).to_string(), text);
    }
    assert!(wrapped(&"word ".repeat(100), 40).lines().all(|line| line.len() <= 40));
    assert_eq!(wrapped(&"x".repeat(50), 40), "x".repeat(50));
}

#[test]
fn cursor_continues_its_own_query_only() {
    let selection = Selection {
        sources: vec!["a".to_owned()],
        since: Some(When::Ago(Duration::from_secs(60))),
        ..Selection::default()
    };
    let query =
        ListQuery { table: "keiro.keiro_outbox", selection: &selection, sort: Sort::Created, descending: false };
    for cursor in [
        Cursor { now: NOW, value: PgTime::INFINITY, outbox_id: Uuid::max() },
        Cursor { now: NOW, value: PgTime::NEG_INFINITY, outbox_id: Uuid::nil() },
        Cursor { now: PgTime(-1), value: PgTime(7), outbox_id: Uuid::from_u128(1) },
    ] {
        let text = cursor.text(&query);
        assert!(text.len() <= 64 && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'), "{text}");
        assert_eq!(Cursor::read(&text, &query), Ok(cursor));
        assert_eq!(Cursor::read(&format!(" {text}\n"), &query), Ok(cursor));

        let other = Selection { sources: vec!["b".to_owned()], ..selection.clone() };
        for query in [
            ListQuery {
                selection: &other,
                ..ListQuery { table: query.table, selection: query.selection, sort: query.sort, descending: false }
            },
            ListQuery { table: "keiro.other", selection: &selection, sort: Sort::Created, descending: false },
            ListQuery { table: query.table, selection: &selection, sort: Sort::Due, descending: false },
            ListQuery { table: query.table, selection: &selection, sort: Sort::Created, descending: true },
        ] {
            let error = Cursor::read(&text, &query).expect_err("another query");
            assert!(error.contains("another query"), "{error}");
        }
        // Every single character matters.
        for at in 0..text.len() {
            let mut broken = text.clone().into_bytes();
            broken[at] = if broken[at] == b'A' { b'B' } else { b'A' };
            let broken = String::from_utf8(broken).expect("ASCII");
            let read = Cursor::read(&broken, &query);
            assert!(read.is_err(), "{broken}: {read:?}");
        }
        assert!(Cursor::read(&text[..text.len() - 1], &query).is_err());
        assert!(Cursor::read("", &query).is_err());
        assert!(Cursor::read(&"A".repeat(5000), &query).is_err());
    }
}

fn facts() -> Facts {
    Facts {
        outbox_id: Uuid::from_u128(7),
        source_name: "billing".to_owned(),
        topic: "invoices".to_owned(),
        message_key: Some("42".to_owned()),
        status: "pending".to_owned(),
        attempt_count: 0,
        next_attempt_at: PgTime(NOW.0 - 60 * SECOND),
        updated_at: PgTime(NOW.0 - 60 * SECOND),
        published_at: None,
        error: None,
        now: NOW,
        policy: Some(Policy::PerKeyHeadOfLine),
        max_attempts: 10,
        publishing_timeout: Duration::from_secs(300),
        ahead: None,
        pauses: Vec::new(),
        relay: Ok(RelayStatus {
            instance: "one".to_owned(),
            ready: Ready { ready: true, reasons: Vec::new() },
            ..RelayStatus::default()
        }),
        relays: Some(vec!["one".to_owned()]),
    }
}

fn head(status: &str, attempt_count: i64, due_in_seconds: i64) -> Ahead {
    let head = LaneHead {
        outbox_id: Uuid::from_u128(1),
        topic: "invoices".to_owned(),
        message_key: Some("42".to_owned()),
        status: status.to_owned(),
        attempt_count,
        next_attempt_at: PgTime(NOW.0 + due_in_seconds * SECOND),
        updated_at: PgTime(NOW.0 - 20 * SECOND),
        last_error: (attempt_count > 0).then(|| "kafka.invalid_record: refused".to_owned()),
    };
    Ahead { rows: 3, capped: false, head }
}

#[track_caller]
fn says(facts: &Facts, reasons: &[&str], parts: &[&str]) {
    let found = explain(facts);
    assert_eq!(found.reasons, reasons, "{}", found.text);
    for part in parts {
        assert!(found.text.contains(part), "no {part:?} in: {}", found.text);
    }
    assert!(!found.text.contains('\n'));
}

#[test]
fn why_names_the_row_that_holds_the_lane_and_what_it_waits_for() {
    let start =
        "Row 00000000-0000-0000-0000-000000000007 (source \"billing\", topic \"invoices\", key \"42\") is pending.";
    says(&facts(), &[], &[start, "It has been due since 2025-12-31T23:59:00Z (1m ago)", "the first of its lane"]);
    says(&Facts { message_key: None, ..facts() }, &[], &["no key", "Without a key it waits for no other row"]);
    says(&Facts { policy: Some(Policy::BestEffort), ..facts() }, &[], &["It waits for no other row"]);

    let behind = Facts { ahead: Some(head("failed", 2, 240)), ..facts() };
    let first = "The first of them, 00000000-0000-0000-0000-000000000001, is due in 4m after 2 attempts: kafka.invalid_record: refused.";
    says(
        &behind,
        &["behind"],
        &["behind 3 earlier rows of its lane (the rows of source \"billing\" with key \"42\")", first],
    );
    let stream = Facts { policy: Some(Policy::PerSourceStream), ..behind.clone() };
    says(&stream, &["behind"], &["all rows of source \"billing\", whose policy is per_source_stream"]);
    let capped = Facts { ahead: Some(Ahead { rows: 10_000, capped: true, ..head("pending", 0, 0) }), ..facts() };
    says(&capped, &["behind"], &["at least 10000 earlier rows", "is pending and due"]);
    let one = Facts { ahead: Some(Ahead { rows: 1, ..head("publishing", 1, 0) }), ..facts() };
    says(
        &one,
        &["behind"],
        &["behind one earlier row", "That row, ", "has been in flight since 2025-12-31T23:59:40Z (20s ago)"],
    );
    let unknown = Facts { ahead: Some(head("weird\n", 0, 0)), ..facts() };
    says(&unknown, &["behind"], &["has the status \"weird\\n\", which no relay claims"]);
}

#[test]
fn why_tells_when_a_row_is_due_or_held_or_never_due() {
    let failed = Facts {
        status: "failed".to_owned(),
        attempt_count: 3,
        error: Some("kafka.timeout: no answer.".to_owned()),
        ..facts()
    };
    let later = Facts { next_attempt_at: PgTime(NOW.0 + 300 * SECOND), ..failed.clone() };
    says(
        &later,
        &["not_due"],
        &["It is due at 2026-01-01T00:05:00Z (in 5m), after 3 attempts: kafka.timeout: no answer."],
    );
    says(
        &Facts { next_attempt_at: HELD_FROM, ..failed.clone() },
        &["held"],
        &["It is held", "until somebody resumes source \"billing\""],
    );
    says(
        &Facts { next_attempt_at: PgTime::INFINITY, ..failed.clone() },
        &["never_due"],
        &["never due (next_attempt_at is infinity)"],
    );
    says(&Facts { attempt_count: 0, ..failed }, &[], &["its attempt returned: kafka.timeout: no answer."]);
}

#[test]
fn why_tells_since_when_a_row_is_in_flight_and_whose_lease_ran_out() {
    let flight = Facts { status: "publishing".to_owned(), attempt_count: 1, ..facts() };
    says(
        &flight,
        &["in_flight"],
        &["claimed it at 2025-12-31T23:59:00Z (1m ago), as attempt 1", "the lease runs out in 4m"],
    );
    assert_eq!(explain(&flight).in_flight_since.as_deref(), Some("2025-12-31T23:59:00Z"));
    let late = Facts { updated_at: PgTime(NOW.0 - 400 * SECOND), ..flight };
    says(&late, &["lease_expired"], &["its lease ran out 1m ago", "then it is failed"]);
    says(&Facts { attempt_count: 10, ..late.clone() }, &["lease_expired"], &["then it is dead"]);
    let odd = Facts { updated_at: PgTime::INFINITY, ..late };
    says(&odd, &["in_flight"], &["infinity"]);
}

#[test]
fn why_says_what_the_relay_knows_or_that_it_is_unknown() {
    let no_answer = Facts {
        relay: Err("no answer from http://127.0.0.1:9464/status".to_owned()),
        relays: Some(Vec::new()),
        ..facts()
    };
    says(&no_answer, &["no_relay"], &["is unknown (no answer from", "No relay is connected to this database."]);
    assert_eq!(explain(&no_answer).relay, "unknown");
    let elsewhere = Facts { relays: Some(vec!["two".to_owned()]), ..no_answer.clone() };
    says(&elsewhere, &[], &["Connected to this database: two."]);
    says(&Facts { relays: None, ..no_answer }, &[], &["is unknown"]);

    let parked = |topic: &str| ParkedTopic {
        topic: topic.to_owned(),
        reason: "kafka.topic_authorization_failed: no write".to_owned(),
        since: "2025-12-31T23:50:00Z".to_owned(),
        probe_at: "2026-01-01T00:00:30Z".to_owned(),
    };
    let mut facts = facts();
    facts.relay = Ok(RelayStatus {
        instance: "one".to_owned(),
        ready: Ready {
            ready: false,
            reasons: vec![Reason { check: "broker".to_owned(), reason: "no broker is up".to_owned() }],
        },
        sources: vec![SourceStatus {
            source: "billing".to_owned(),
            elsewhere: false,
            halt: Some(Halt { kind: "breaker".to_owned(), reason: "20 verdicts".to_owned(), since: "x".to_owned() }),
            halted_on: Some(Uuid::from_u128(7)),
        }],
        parked_topics: vec![parked("other"), parked("invoices")],
    });
    facts.pauses = vec!["It is paused: source \"billing\".".to_owned()];
    says(
        &facts,
        &["paused", "topic_parked", "source_halted", "relay_not_ready"],
        &[
            "It is paused: source",
            "Its topic, \"invoices\", is parked since 2025-12-31T23:50:00Z: kafka.topic_authorization_failed: no write. It is tried again at",
            "Its source is halted (breaker) on this row since x: 20 verdicts.",
            "Relay \"one\" is not ready: broker: no broker is up.",
        ],
    );
}

#[test]
fn why_says_that_a_finished_row_is_finished() {
    let sent = Facts { status: "sent".to_owned(), published_at: Some(NOW), ..facts() };
    says(&sent, &["sent"], &["Kafka acknowledged it at 2026-01-01T00:00:00Z (0s ago)."]);
    says(&Facts { published_at: None, ..sent }, &["sent"], &["somebody else marked it"]);
    let dead = Facts { status: "dead".to_owned(), attempt_count: 10, error: Some("kafka.x: y".to_owned()), ..facts() };
    says(&dead, &["dead"], &["It gave up after 10 attempts: kafka.x: y."]);
    says(
        &Facts { status: "rejected".to_owned(), ..dead },
        &["rejected"],
        &["It can never be accepted as it is: kafka.x: y."],
    );
    says(
        &Facts { status: "PENDING".to_owned(), ..facts() },
        &["unknown_status"],
        &["is PENDING.", "no relay claims such a row"],
    );
    says(&Facts { policy: None, ..facts() }, &["not_served"], &["does not serve source \"billing\""]);
}
