//! What `enqueue` makes of its input, line by line: rows, or every problem with its line and field.

use keiro_relay::cli::enqueue::{LineProblem, Lines};
use keiro_relay::domain::message::PgTime;
use keiro_relay::producer::{
    Limits, MessageIdPrefix, NewRow, SchemaReference, TraceContext, fresh_message_id, fresh_outbox_id,
};
use uuid::{Uuid, Version};

/// The rows with their lines, or every problem of every line.
fn parse(input: &[u8]) -> Result<Vec<(usize, NewRow)>, Vec<LineProblem>> {
    let (mut rows, mut problems) = (Vec::new(), Vec::new());
    for line in Lines::new(input, Limits::default()) {
        match line {
            Ok(row) => rows.push(row),
            Err(found) => problems.extend(found),
        }
    }
    if problems.is_empty() { Ok(rows) } else { Err(problems) }
}

#[track_caller]
fn rows(input: &str) -> Vec<NewRow> {
    match parse(input.as_bytes()) {
        Ok(rows) => rows.into_iter().map(|(_, row)| row).collect(),
        Err(problems) => panic!("{problems:?} in {input}"),
    }
}

#[track_caller]
fn problems(input: &[u8]) -> Vec<String> {
    match parse(input) {
        Ok(rows) => panic!("no problem: {rows:?}"),
        Err(problems) => problems.iter().map(ToString::to_string).collect(),
    }
}

/// A good line with more fields.
fn line(more: &str) -> String {
    format!(r#"{{"source":"billing","destination":"invoices","event_type":"paid"{more}}}"#)
}

#[test]
fn smallest_line_gets_every_default() {
    let row = rows(&line(r#","payload":{"a":1}"#)).remove(0);
    let (event, draft) = (&row.event, &row.event.draft);
    assert_eq!(
        (event.source_name.as_str(), draft.destination.as_str(), draft.event_type.as_str()),
        ("billing", "invoices", "paid")
    );
    assert_eq!(row.outbox_id.get_version(), Some(Version::SortRand));
    assert!(event.message_id.starts_with("msg_") && event.message_id.len() == 30, "{}", event.message_id);
    assert_eq!((draft.schema_version, draft.content_type.as_str()), (1, "application/json"));
    assert_eq!(draft.payload, br#"{"a":1}"#);
    assert_eq!((&draft.message_key, &draft.attributes, &draft.trace), (&None, &None, &None));
    assert_eq!((draft.occurred_at, row.created_at, row.available_at), (None, None, None));
}

#[test]
fn every_key_reaches_its_column() {
    let id = |n: u8| Uuid::from_bytes([n; 16]);
    let input = format!(
        r#"{{"outbox_id":"{}","message_id":"m","source":"s","destination":"d","message_key":"","event_type":"e",
        "schema_version":-2,"content_type":"text/x","schema_registry":"r","schema_subject":"j","schema_version_ref":3,
        "schema_id":9223372036854775807,"schema_fingerprint":"f","source_event_id":"{}","source_global_position":5,
        "causation_id":"{}","correlation_id":"{}","traceparent":"tp","tracestate":"ts","payload_text":"héllo",
        "attributes":{{"n": 1.50, "b":[]}},"occurred_at":"2026-01-02T03:04:05.1234567+02:00",
        "created_at":"2000-01-01T00:00:00Z","next_attempt_at":"1999-12-31T23:59:59.999999Z"}}"#,
        id(1),
        id(2),
        id(3),
        id(4)
    )
    .replace('\n', " ");
    let row = rows(&input).remove(0);
    let draft = &row.event.draft;
    let text = |text: &'static str| Some(text.to_owned());
    assert_eq!((row.outbox_id, row.event.message_id.as_str(), draft.message_key.as_deref()), (id(1), "m", Some("")));
    assert_eq!((draft.schema_version, draft.content_type.as_str()), (-2, "text/x"));
    let schema = SchemaReference {
        registry: text("r"),
        subject: text("j"),
        version: Some(3),
        schema_id: Some(i64::MAX),
        fingerprint: text("f"),
    };
    assert_eq!((&draft.schema, draft.source_global_position), (&schema, Some(5)));
    assert_eq!(
        (draft.source_event_id, draft.causation_id, draft.correlation_id),
        (Some(id(2)), Some(id(3)), Some(id(4)))
    );
    assert_eq!(draft.trace, Some(TraceContext { traceparent: "tp".to_owned(), tracestate: text("ts") }));
    assert_eq!(draft.payload, "héllo".as_bytes());
    assert_eq!(draft.attributes.as_deref(), Some(r#"{"n": 1.50, "b":[]}"#), "digits stay as they were written");
    let micros = |time: Option<PgTime>| time.map(|time| time.0);
    assert_eq!(micros(row.created_at), Some(0));
    assert_eq!(micros(row.available_at), Some(-1));
    assert_eq!(
        draft.occurred_at.and_then(PgTime::unix_micros),
        Some(1_767_315_845_123_457),
        "rounded as the server does"
    );
}

#[test]
fn payload_is_taken_as_it_is_written() {
    for (field, payload, content_type) in [
        (
            r#""payload": {"b" :1e400,"a":[ 1.0,"\u00e9"]}"#,
            &br#"{"b" :1e400,"a":[ 1.0,"\u00e9"]}"#[..],
            "application/json",
        ),
        (r#""payload":null"#, b"null", "application/json"),
        (r#""payload":"text""#, b"\"text\"", "application/json"),
        (r#""payload":"x","payload_text":null"#, b"\"x\"", "application/json"),
        (r#""payload_text":"""#, b"", "text/plain; charset=utf-8"),
        (r#""payload_text":"a\u0000\n""#, b"a\0\n", "text/plain; charset=utf-8"),
        (r#""payload_base64":"AP/+""#, b"\x00\xff\xfe", "application/octet-stream"),
        (r#""payload_base64":"AA==","content_type":"avro/binary""#, b"\0", "avro/binary"),
    ] {
        let draft = rows(&line(&format!(",{field}"))).remove(0).event.draft;
        assert_eq!((draft.payload.as_slice(), draft.content_type.as_str()), (payload, content_type), "{field}");
    }
}

#[test]
fn nulls_are_as_good_as_left_out_and_blank_lines_are_skipped() {
    let input = format!(
        "\n{}\r\n   \n{}",
        line(
            r#","payload":1,"outbox_id":null,"message_key":null,"attributes":null,"schema_version":null,"occurred_at":null"#
        ),
        line(r#","payload":2"#)
    );
    let rows = parse(input.as_bytes()).expect("good lines");
    assert_eq!(rows.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 4]);
    let draft = &rows[0].1.event.draft;
    assert_eq!((draft.message_key.as_deref(), draft.attributes.as_deref(), draft.schema_version), (None, None, 1));
    assert_eq!(parse(b"").expect("nothing"), []);
}

#[test]
fn every_problem_of_every_line_is_named() {
    let good = line(r#","payload":1"#);
    let input = [
        good.clone(),
        r#"{"sourse":"s","destination":"a b","payload":1,"payload_text":"x","schema_version":1.5,"occurred_at":"yesterday"}"#
            .to_owned(),
        "[1]".to_owned(),
        r#"{"source":"#.to_owned(),
        line(r#","payload":1,"status":"sent","topic":"x","nothing_like_it":1,"source":"again""#),
        line(r#","payload_base64":"*","message_key":7,"outbox_id":"7","schema_id":"7","attributes":{"a":"\u0000"}"#),
        good,
    ]
    .join("\n");
    assert_eq!(
        problems(input.as_bytes()),
        [
            r#"line 2: sourse: is no key; did you mean "source"?"#,
            "line 2: payload: exactly one of payload (JSON), payload_text and payload_base64 is needed",
            "line 2: source: is missing",
            "line 2: event_type: is missing",
            "line 2: schema_version: must be an integer of at most 64 bits, without quotes, point or exponent",
            "line 2: occurred_at: must be a time with its offset in a string, such as \"2026-01-02T03:04:05.678Z\"",
            "line 2: destination: must be a topic name: 1 to 249 of A-Z a-z 0-9 . _ - and neither \".\" nor \"..\"",
            "line 3: must be a JSON object",
            "line 4: is not JSON (column 10)",
            "line 5: status: is written by the relay alone; leave it out",
            r#"line 5: topic: is no key; did you mean "destination"?"#,
            "line 5: nothing_like_it: is no key; the keys are the table's column names",
            "line 5: source: is given twice",
            "line 6: payload_base64: must be base64 with the standard alphabet and padding",
            "line 6: outbox_id: must be a UUID in a string, such as \"0192f0c1-2345-7abc-8def-0123456789ab\"",
            "line 6: message_key: must be a string of valid Unicode",
            "line 6: schema_id: must be an integer of at most 64 bits, without quotes, point or exponent",
            "line 6: attributes: must not contain a NUL (\\u0000), which jsonb cannot hold",
        ]
    );
}

#[test]
fn texts_and_times_that_the_table_or_the_relay_would_choke_on_are_refused() {
    let long = "k".repeat(2049);
    for (more, expected) in [
        (r#","message_id":" m""#, Some("message_id: must not begin or end with white space")),
        (r#","message_id":"""#, Some("message_id: must not be empty")),
        (r#","message_key":"a\u0000b""#, Some("message_key: must not contain a NUL")),
        (r#","traceparent":"\u0000""#, Some("traceparent: must not contain a NUL")),
        (r#","content_type":"""#, Some("content_type: must not be empty")),
        (r#","message_key":"\ud800""#, Some("message_key: must be a string of valid Unicode")),
        (
            r#","attributes":"\ud800""#,
            Some(
                "attributes: must be JSON that jsonb can hold: no half surrogates, no number beyond 1e308, at most 127 levels",
            ),
        ),
        (
            r#","next_attempt_at":"9999-01-01T00:00:00Z""#,
            Some("next_attempt_at: must lie before the year 9999: from then on rows count as finished"),
        ),
        (r#","occurred_at":"0000-12-31T00:00:00Z""#, Some("occurred_at: must lie in the years 0001 to 9999")),
        (
            r#","occurred_at":"2026-01-02T03:04:05""#,
            Some("occurred_at: must be a time with its offset in a string, such as \"2026-01-02T03:04:05.678Z\""),
        ),
        (r#","next_attempt_at":"9998-12-31T23:59:59.999999Z""#, None),
        (r#","occurred_at":"0001-01-01T00:00:00Z""#, None),
        (r#","available_at":"2026-01-02T03:04:05Z""#, None),
        (
            r#","available_at":"2026-01-02T03:04:05Z","next_attempt_at":"2026-01-02T03:04:05Z""#,
            Some("available_at: is another name for next_attempt_at: give one of them"),
        ),
        (
            r#","available_at":"9999-01-01T00:00:00Z""#,
            Some("available_at: must lie before the year 9999: from then on rows count as finished"),
        ),
        (r#","tracestate":"a=b""#, Some("tracestate: says nothing without a traceparent")),
        (r#","message_key":" spaces are part of a key ""#, None),
    ] {
        let input = line(&format!(r#","payload":1{more}"#));
        match expected {
            Some(expected) => assert_eq!(problems(input.as_bytes()), [format!("line 1: {expected}")]),
            None => drop(rows(&input)),
        }
    }
    let found = problems(line(&format!(r#","payload":1,"message_key":"{long}""#)).as_bytes());
    assert_eq!(found, ["line 1: message_key: has 2049 octets; at most 2048 are allowed"]);
    let large = "p".repeat(1_000_001);
    for field in ["payload_text", "payload_base64"] {
        let text = if field == "payload_text" { large.clone() } else { "AAAA".repeat(333_334) };
        let input =
            format!(r#"{{"source":"s","destination":"d","event_type":"e","{field}":"{text}","message_id":""}}"#);
        let over = if field == "payload_text" { 1_000_001 } else { 1_000_002 };
        let expected = format!(
            "line 1: {field}: has {over} octets; at most 1000000 are allowed: raise payload_bytes_max of the limits, and the topic's \
             max.message.bytes with it, or send less"
        );
        assert_eq!(problems(input.as_bytes()), ["line 1: message_id: must not be empty", &expected]);
    }
    let attributes = format!(r#","payload":1,"attributes":{{"a":"{}"}}"#, "a".repeat(65_530));
    let found = problems(line(&attributes).as_bytes());
    assert_eq!(
        found,
        [
            "line 1: attributes: has 65538 octets; at most 65536 are allowed: raise attributes_bytes_max of the limits, or send less"
        ]
    );
    for topic in ["", ".", "..", "a/b", "é", &"t".repeat(250)] {
        let input = format!(r#"{{"source":"s","destination":"{topic}","event_type":"e","payload":1}}"#);
        let found = problems(input.as_bytes());
        assert!(found.len() == 1 && found[0].starts_with("line 1: destination: must be a topic name"), "{found:?}");
    }
}

#[test]
fn no_value_of_a_line_reaches_a_problem() {
    let input = [
        r#"{"source":"marker","destination":"marker marker","message_key":"marker\u0000","event_type":" marker",
           "payload_base64":"marker!","occurred_at":"marker","outbox_id":"marker","attributes":{"marker":"\u0000marker"},
           "schema_id":"marker"}"#
            .replace('\n', " "),
        r#"{"source":"marker" "marker"}"#.to_owned(),
        r#""marker""#.to_owned(),
    ]
    .join("\n");
    let found = problems(input.as_bytes());
    assert!(found.len() > 8, "{found:?}");
    assert!(found.iter().all(|problem| !problem.contains("marker")), "{found:?}");
    assert_eq!(problems(b"{\"source\":\"\xff\"}"), ["line 1: is not UTF-8 (octet 12)"]);
    // A key is shown, but cannot write to the terminal.
    let found = problems(b"{\"\\u001b[31m\":1}");
    assert!(found[0].starts_with("line 1: \\u{1b}[31m: is no key"), "{found:?}");
}

#[test]
fn ids_sort_in_the_order_they_are_minted() {
    let minted: Vec<_> = (0..10_000).map(|_| fresh_outbox_id()).collect();
    assert!(minted.is_sorted_by(|a, b| a < b));
    let prefix = MessageIdPrefix::new("msg").expect("a prefix");
    let minted: Vec<_> = (0..1000).map(|_| fresh_message_id(&prefix)).collect();
    assert!(minted.is_sorted_by(|a, b| a < b));
    let text = minted[0].strip_prefix("msg_").expect("its prefix");
    assert!(text.len() == 26 && text.bytes().all(|b| b"0123456789abcdefghjkmnpqrstvwxyz".contains(&b)), "{text}");

    let rows = rows(&[line(r#","payload":1"#), line(r#","payload":2"#)].join("\n"));
    assert!(rows[0].outbox_id < rows[1].outbox_id);
}
