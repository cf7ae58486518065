//! The producers' half without a database: ids, events, limits, producers, and what is linked for it.

use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use keiro_relay::producer::{
    BATCH_ROWS_MAX, DecodeError, Draft, EnqueueError, IntegrationEvent, IntegrationProducer, JsonCodec, Limits,
    MessageIdPrefix, NewRow, Outbox, PgTime, RecordedEvent, RowProblem, StableId, TraceContext, fresh_outbox_id,
    stable_outbox_id,
};
use serde::Deserialize;
use uuid::{Uuid, Variant, Version};

#[derive(Debug, PartialEq, Deserialize)]
struct Invoice {
    total: u8,
}

fn stable(producer: &str, micros: i64, global_position: i64, n: u8) -> Uuid {
    stable_outbox_id(StableId { producer, recorded_at: PgTime::from_unix_micros(micros), global_position, n })
}

#[test]
fn stable_ids_are_the_same_at_each_attempt_and_sort_by_time_position_and_number() {
    // Written down, so that no later version says otherwise: rows in tables have these ids.
    assert_eq!(stable("billing", 1_767_323_045_123_456, 4711, 0).to_string(), STABLE);
    let mut last = Uuid::nil();
    for micros in [0, 1_000, 1_767_323_045_123_000, 1_767_323_045_124_000] {
        for position in [0, 1, 1023, 1024, 0xffff_ffff] {
            for n in [0, 1, 63, 64, 255] {
                let id = stable("billing", micros, position, n);
                assert!(id > last, "{micros} {position} {n}");
                assert_eq!((id.get_version(), id.get_variant()), (Some(Version::SortRand), Variant::RFC4122));
                last = id;
            }
        }
    }
    let others = [("audit", 1_000, 1, 0), ("billing", 2_000, 1, 0), ("billing", 1_000, 2, 0), ("billing", 1_000, 1, 1)];
    for (producer, micros, position, n) in others {
        assert_ne!(stable(producer, micros, position, n), stable("billing", 1_000, 1, 0));
    }
    // Odd instants and positions are ids like any other.
    for recorded_at in [PgTime::INFINITY, PgTime::NEG_INFINITY, PgTime(i64::MAX - 1), PgTime(i64::MIN + 1)] {
        let id = stable_outbox_id(StableId { producer: "", recorded_at, global_position: -1, n: 255 });
        assert_eq!((id.get_version(), id.get_variant()), (Some(Version::SortRand), Variant::RFC4122));
    }
}

const STABLE: &str = "019b7ca9-8d03-7000-8049-9c0100155c0a";

#[test]
fn prefixes_have_one_to_sixty_three_lower_case_latin_letters() {
    for good in ["m", "msg", &"z".repeat(63)] {
        assert!(MessageIdPrefix::new(good).is_ok(), "{good}");
    }
    for bad in ["", "Msg", "ms1", "m_s", "m-s", "é", "m ", &"z".repeat(64)] {
        let error = MessageIdPrefix::new(bad).expect_err(bad);
        assert!(error.to_string().contains("1 to 63 lower-case Latin letters"), "{error}");
    }
}

#[test]
fn instants_of_the_standard_library_are_the_databases() {
    for (time, micros) in [
        (UNIX_EPOCH, 0),
        (UNIX_EPOCH + Duration::from_nanos(1_999), 1),
        (UNIX_EPOCH - Duration::from_nanos(1), -1),
        (UNIX_EPOCH - Duration::from_micros(2), -2),
    ] {
        assert_eq!(PgTime::from(time).unix_micros(), Some(micros));
    }
    let far = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(1 << 50)).expect("a far instant");
    assert_eq!(PgTime::from(far), PgTime::INFINITY);
}

#[test]
fn payloads_are_encoded_and_decoded_with_the_reason_why_not() {
    let draft = Draft::json("invoices", "InvoiceSent", &serde_json::json!({"total": 7})).expect("JSON");
    assert_eq!((draft.content_type.as_str(), draft.payload.as_slice()), ("application/json", &br#"{"total":7}"#[..]));
    let event = IntegrationEvent::from_draft("billing", "m", draft);
    assert_eq!(event.decode_json::<Invoice>(), Ok(Invoice { total: 7 }));

    let decode = |content_type: &str, payload: &str| {
        Draft::new("d", "e", content_type, payload).decode_json::<Invoice>().expect_err("not an invoice")
    };
    assert_eq!(decode("text/plain", "{}"), DecodeError::UnsupportedContentType("text/plain".to_owned()));
    assert_eq!(decode("Application/JSON; charset=utf-8", "{"), DecodeError::Malformed { line: 1, column: 1 });
    assert_eq!(decode("application/json", "{}"), DecodeError::MissingField { field: "total".to_owned() });
    let error = decode("application/json", r#"{"total":"missing field `marker`"}"#);
    assert_eq!(error, DecodeError::DoesNotFit { line: 1, column: 33 });
    assert!(!format!("{error} {error:?}").contains("marker"));

    let keys = std::collections::BTreeMap::from([(vec![1], 1)]);
    assert!(Draft::json("d", "e", &keys).expect_err("no text as a key").to_string().contains("no JSON form"));
}

#[test]
fn debug_shows_neither_payload_nor_key_nor_attributes() {
    let draft = Draft::new("d", "e", "t", "marker").key("marker").attributes("marker").expect("JSON");
    let row = NewRow::new(Uuid::nil(), IntegrationEvent::from_draft("s", "m", draft));
    let recorded = RecordedEvent {
        event_id: Uuid::nil(),
        global_position: 1,
        event_type: "e".to_owned(),
        data: b"marker".to_vec(),
    };
    let shown = format!("{row:?} {recorded:?}");
    assert!(!shown.contains("marker") && !shown.contains("109, 97"), "{shown}");
}

fn row(message_id: &str) -> NewRow {
    NewRow::new(fresh_outbox_id(), IntegrationEvent::from_draft("s", message_id, Draft::new("d", "e", "t", "p")))
}

#[test]
fn every_problem_of_every_row_is_named_before_the_database_is_asked() {
    let outbox = Outbox::default().limits(Limits { payload_bytes_max: 3, ..Limits::default() });
    let mut rows = [row("m"), row(" m"), row("m")];
    rows[1].event.draft.destination = "a b".to_owned();
    rows[1].event.draft.payload = b"four".to_vec();
    rows[2].event.draft.message_key = Some("k".repeat(2_049));
    rows[2].event.draft.trace = Some(TraceContext { traceparent: "\0".to_owned(), tracestate: None });
    rows[2].event.event_type_is_long();
    let Err(EnqueueError::Invalid(problems)) = outbox.check(&rows) else { panic!("invalid") };
    let found: Vec<_> = problems.iter().map(|RowProblem { row, field, .. }| (*row, *field)).collect();
    assert_eq!(
        found,
        [
            (1, "message_id"),
            (1, "destination"),
            (1, "payload_bytes"),
            (2, "message_key"),
            (2, "event_type"),
            (2, "traceparent")
        ]
    );
    let text = EnqueueError::Invalid(problems).to_string();
    assert!(
        text.starts_with("rows[1].message_id: must not begin or end with white space; rows[1].destination: "),
        "{text}"
    );
    assert!(text.contains("has 4 octets; at most 3 are allowed: raise payload_bytes_max"), "{text}");
    assert!(!text.contains("four") && !text.contains("kkk"), "{text}");

    let many: Vec<_> = (0..=BATCH_ROWS_MAX).map(|n| row(&format!("m{n}"))).collect();
    assert!(outbox.check(&many[1..]).is_ok());
    assert!(matches!(outbox.check(&many), Err(EnqueueError::TooManyRows { rows: 1_001, rows_max: 1_000 })));

    let outbox = Outbox::default().limits(Limits { payload_bytes_max: 100 << 20, ..Limits::default() });
    let mut large = [row("a"), row("b")];
    large[0].event.draft.payload = vec![0; (64 << 20) + 1];
    assert!(outbox.check(&large[..1]).is_ok(), "what the limits allow may always be written alone");
    assert!(matches!(outbox.check(&large), Err(EnqueueError::TooLarge { .. })));
}

trait Long {
    fn event_type_is_long(&mut self);
}

impl Long for IntegrationEvent {
    fn event_type_is_long(&mut self) {
        self.draft.event_type = "e".repeat(257);
    }
}

#[test]
fn tables_have_names_that_the_server_keeps() {
    for (schema, table) in [("keiro", "keiro_outbox"), ("a\"b", "c d"), ("s", &"t".repeat(63))] {
        assert!(Outbox::new(schema, table).is_ok(), "{schema} {table}");
    }
    for (schema, table) in [("", "t"), ("s", ""), ("s", "a\0b"), ("s", &"t".repeat(64))] {
        assert!(Outbox::new(schema, table).is_err(), "{schema} {table}");
    }
}

fn map(recorded: &RecordedEvent, invoice: &Invoice) -> Option<Draft> {
    let mut draft = Draft::json("invoices", &recorded.event_type, &invoice.total).expect("a number has a JSON form");
    draft.source_global_position = (invoice.total == 2).then_some(99);
    (invoice.total > 0).then_some(draft)
}

#[test]
fn producers_are_checked_when_they_are_made_and_mint_ids_with_their_prefix() {
    let make = |name: &str, source: &str, prefix: &str| {
        IntegrationProducer::new(name, source, prefix, JsonCodec::<Invoice>::new(), map)
    };
    let problems = make("", " ", "Inv").expect_err("three problems").to_string();
    assert!(problems.contains("name") && problems.contains("source") && problems.contains("prefix"), "{problems}");

    let producer = make("sub", "billing", "inv").expect("a producer");
    let recorded = |data: &str| RecordedEvent {
        event_id: Uuid::max(),
        global_position: 7,
        event_type: "paid".to_owned(),
        data: data.into(),
    };
    assert_eq!(producer.draft(&recorded(r#"{"total":0}"#)), Ok(None));
    assert_eq!(producer.draft(&recorded("{}")), Err(DecodeError::MissingField { field: "total".to_owned() }));
    let draft = producer.draft(&recorded(r#"{"total":1}"#)).expect("decoded").expect("mapped");
    assert_eq!((draft.source_event_id, draft.source_global_position), (Some(Uuid::max()), Some(7)));
    let other = producer.draft(&recorded(r#"{"total":2}"#)).expect("decoded").expect("mapped");
    assert_eq!(other.source_global_position, Some(99), "the mapper may say otherwise");

    let (first, second) = (producer.mint(draft.clone()), producer.mint(draft));
    assert!(first.message_id.starts_with("inv_") && first.message_id < second.message_id);
    assert_eq!((first.source_name.as_str(), first.draft), ("billing", second.draft));
}

/// What a program links that only writes rows.
#[test]
fn half_without_the_relay_has_neither_librdkafka_nor_http_nor_a_command_line() {
    let tree = |features: &[&str]| {
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--locked", "--offline", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"])
            .args(features)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("run cargo");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).expect("text");
        text.lines().filter_map(|line| line.split(' ').next()).map(str::to_owned).collect::<Vec<_>>()
    };
    let heavy =
        ["rdkafka", "rdkafka-sys", "axum", "hyper", "clap", "openssl", "deadpool", "prometheus", "config", "tempfile"];
    let (whole, half) = (tree(&[]), tree(&["--no-default-features"]));
    for name in heavy {
        assert!(whole.iter().any(|linked| linked == name), "{name} is gone: take it off this list");
        assert!(!half.iter().any(|linked| linked == name), "{name} is linked by programs that only write rows");
    }
    assert!(half.iter().any(|linked| linked == "tokio-postgres"));
}
