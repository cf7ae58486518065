//! The wire format of contract §4, byte for byte, and the texts a row may carry about its failure.

use bytes::Bytes;
use keiro_relay::domain::message::{Message, PgTime, Withheld};
use keiro_relay::domain::outcome::{self, Rejection};
use keiro_relay::domain::record::{self, Record};
use uuid::Uuid;

/// A row with every nullable column null.
pub(crate) fn bare() -> Message {
    Message {
        outbox_id: Uuid::nil(),
        message_id: "msg_01h455vb4pex5vsknk084sn02q".into(),
        source_name: "billing".into(),
        destination: "billing.invoices".into(),
        message_key: None,
        event_type: "InvoiceIssued".into(),
        schema_version: 1,
        content_type: "application/json".into(),
        schema_registry: None,
        schema_subject: None,
        schema_version_ref: None,
        schema_id: None,
        schema_fingerprint: None,
        source_event_id: None,
        source_global_position: None,
        causation_id: None,
        correlation_id: None,
        traceparent: None,
        tracestate: None,
        payload: Bytes::from_static(b"{\"total\":12}"),
        payload_withheld: None,
        attributes: None,
        // 2026-01-02 03:04:05 UTC.
        occurred_at: PgTime::from_unix_micros(1_767_323_045_000_000),
        attempt_count: 1,
        last_error: None,
        created_at: PgTime(0),
        updated_at: PgTime(0),
    }
}

/// Headers as one line each, so that a golden text shows order and bytes.
fn lines(record: &Record<'_>) -> String {
    record.headers.iter().flat_map(|(name, value)| [*name, ": ", value, "\n"]).collect()
}

fn header(message: &Message, name: &str) -> Option<String> {
    let record = record::build(message).expect("a legal row");
    record.headers.iter().find(|(header, _)| *header == name).map(|(_, value)| value.to_string())
}

fn rejected(message: &Message) -> Rejection {
    record::build(message).expect_err("a row that cannot go out")
}

#[test]
fn every_column_set() {
    let message = Message {
        message_key: Some("customer-7".into()),
        content_type: "application/json; charset=utf-8".into(),
        schema_version: 3,
        schema_registry: Some("https://registry.example".into()),
        schema_subject: Some("invoices-value".into()),
        schema_version_ref: Some(12),
        schema_id: Some(9_007_199_254_740_993),
        schema_fingerprint: Some("sha256:ab".into()),
        source_event_id: Some(Uuid::from_u128(0xABCD_EF01_2345_6789_ABCD_EF01_2345_6789)),
        source_global_position: Some(i64::MAX),
        causation_id: Some(Uuid::from_u128(1)),
        correlation_id: Some(Uuid::from_u128(2)),
        traceparent: Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()),
        tracestate: Some("vendor=1".into()),
        // As PostgreSQL prints a jsonb value: shorter keys first, a space after colon and comma.
        attributes: Some(r#"{"b": 1.50, "aa": [true, null], "ab": {"z": "é\n", "Z": -0.0}}"#.into()),
        occurred_at: PgTime::from_unix_micros(1_767_323_045_250_000),
        ..bare()
    };
    let record = record::build(&message).expect("a legal row");
    assert_eq!(record.topic, "billing.invoices");
    assert_eq!(record.key, Some("customer-7"));
    assert_eq!(&record.payload[..], b"{\"total\":12}");
    let expected = "\
keiro-message-id: msg_01h455vb4pex5vsknk084sn02q
keiro-source: billing
keiro-destination: billing.invoices
keiro-event-type: InvoiceIssued
keiro-schema-version: 3
content-type: application/json
keiro-schema-registry: https://registry.example
keiro-schema-subject: invoices-value
keiro-schema-version-ref: 12
keiro-schema-id: 9007199254740993
keiro-schema-fingerprint: sha256:ab
keiro-source-event-id: abcdef01-2345-6789-abcd-ef0123456789
keiro-source-global-position: 9223372036854775807
keiro-causation-id: 00000000-0000-0000-0000-000000000001
keiro-correlation-id: 00000000-0000-0000-0000-000000000002
traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
tracestate: vendor=1
keiro-occurred-at: 2026-01-02T03:04:05.25Z
keiro-attributes: {\"aa\":[true,null],\"ab\":{\"Z\":-0.0,\"z\":\"é\\n\"},\"b\":1.50}
";
    assert_eq!(lines(&record), expected);
    let octets: usize = record.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
    assert_eq!(record.octets(), "customer-7".len() + 12 + octets);
}

#[test]
fn every_nullable_column_null() {
    let message = bare();
    let record = record::build(&message).expect("a legal row");
    assert_eq!(record.key, None);
    let expected = "\
keiro-message-id: msg_01h455vb4pex5vsknk084sn02q
keiro-source: billing
keiro-destination: billing.invoices
keiro-event-type: InvoiceIssued
keiro-schema-version: 1
content-type: application/json
keiro-occurred-at: 2026-01-02T03:04:05Z
";
    assert_eq!(lines(&record), expected);
}

#[test]
fn an_empty_key_is_a_key_and_an_empty_payload_a_value() {
    let message = Message { message_key: Some(String::new()), payload: Bytes::new(), ..bare() };
    let record = record::build(&message).expect("a legal row");
    assert_eq!(record.key, Some(""));
    assert!(record.payload.is_empty());
}

#[test]
fn texts_go_out_as_they_stand() {
    let odd = "🧾 שלום \u{202e}abc\u{0007}\u{feff} tab\t";
    let message = Message {
        message_id: odd.into(),
        source_name: String::new(),
        event_type: odd.into(),
        message_key: Some(odd.into()),
        schema_subject: Some(odd.into()),
        ..bare()
    };
    let record = record::build(&message).expect("a legal row");
    assert_eq!(record.key.map(str::as_bytes), Some(odd.as_bytes()));
    assert_eq!(header(&message, "keiro-message-id").as_deref(), Some(odd));
    assert_eq!(header(&message, "keiro-source").as_deref(), Some(""));
    assert_eq!(header(&message, "keiro-schema-subject").as_deref(), Some(odd));
}

#[test]
fn tracestate_only_beside_a_traceparent() {
    let message = Message { tracestate: Some("vendor=1".into()), ..bare() };
    assert_eq!(header(&message, "tracestate"), None);
    let message = Message { traceparent: Some("not even valid".into()), ..message };
    assert_eq!(header(&message, "traceparent").as_deref(), Some("not even valid"));
    assert_eq!(header(&message, "tracestate").as_deref(), Some("vendor=1"));
}

#[test]
fn content_types() {
    let cases = [
        ("application/json", "application/json"),
        ("Application/JSON", "application/json"),
        ("  application/json\t; charset=utf-8", "application/json"),
        ("application/json;", "application/json"),
        ("application/json; a; b", "application/json"),
        ("application/cloudevents+json", "application/cloudevents+json"),
        ("application/json5", "application/json5"),
        ("Text/Plain; charset=UTF-8", "Text/Plain; charset=UTF-8"),
        ("; application/json", "; application/json"),
        ("", ""),
        (" avro/binary ", " avro/binary "),
    ];
    for (column, sent) in cases {
        let message = Message { content_type: column.into(), ..bare() };
        assert_eq!(header(&message, "content-type").as_deref(), Some(sent), "{column:?}");
    }
}

#[test]
fn occurred_at_is_iso_8601_with_trimmed_fractions() {
    let cases = [
        (1_767_323_045_000_000, "2026-01-02T03:04:05Z"),
        (1_767_323_045_250_000, "2026-01-02T03:04:05.25Z"),
        (1_767_323_045_000_001, "2026-01-02T03:04:05.000001Z"),
        (1_767_323_045_100_000, "2026-01-02T03:04:05.1Z"),
        (1_767_323_045_120_300, "2026-01-02T03:04:05.1203Z"),
        (0, "1970-01-01T00:00:00Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (951_782_400_000_000, "2000-02-29T00:00:00Z"),
        (-62_135_596_800_000_000, "0001-01-01T00:00:00Z"),
        (253_402_300_799_999_999, "9999-12-31T23:59:59.999999Z"),
    ];
    for (micros, expected) in cases {
        let message = Message { occurred_at: PgTime::from_unix_micros(micros), ..bare() };
        assert_eq!(header(&message, "keiro-occurred-at").as_deref(), Some(expected), "{micros}");
    }
}

#[test]
fn instants_that_iso_8601_cannot_write_are_rejected() {
    let instants = [
        PgTime::INFINITY,
        PgTime::NEG_INFINITY,
        PgTime(i64::MAX - 1),
        PgTime(i64::MIN + 1),
        // The first instant of the year 10000 and the last of 1 BC.
        PgTime::from_unix_micros(253_402_300_800_000_000),
        PgTime::from_unix_micros(-62_135_596_800_000_001),
        // The ends of the column type.
        PgTime(9_223_371_331_199_999_999),
        PgTime(-211_813_488_000_000_000),
    ];
    for occurred_at in instants {
        let rejection = rejected(&Message { occurred_at, ..bare() });
        assert_eq!(rejection.code, "row.invalid_timestamp", "{occurred_at:?}");
    }
}

fn attributes(json: &str) -> String {
    header(&Message { attributes: Some(json.into()), ..bare() }, "keiro-attributes").expect("the header")
}

#[test]
fn attributes_keep_every_digit() {
    let huge = format!("1{}", "0".repeat(400));
    let small = format!("0.{}1", "0".repeat(320));
    for digits in
        [huge.as_str(), &small, "9007199254740993", "0.1000", "-0.0", "12345678901234567890.123456789012345678901"]
    {
        assert_eq!(attributes(digits), digits);
        assert_eq!(attributes(&format!("{{\"n\": [{digits}, {digits}]}}")), format!("{{\"n\":[{digits},{digits}]}}"));
    }
}

#[test]
fn attributes_are_compact_with_keys_in_byte_order() {
    let cases = [
        ("null", "null"),
        ("true", "true"),
        (r#""a \"quoted\" \\ \u0001 ü""#, r#""a \"quoted\" \\ \u0001 ü""#),
        ("{}", "{}"),
        ("[]", "[]"),
        ("[[], {}, [1, 2]]", "[[],{},[1,2]]"),
        // PostgreSQL sorts by length first; we sort by bytes.
        (r#"{"b": 1, "aa": 2, "B": 3, "": 4}"#, r#"{"":4,"B":3,"aa":2,"b":1}"#),
        // Byte order of UTF-8 is code point order, not UTF-16 order: U+FF61 comes before U+1F600.
        ("{\"😀\": 1, \"｡\": 2, \"z\": 3}", "{\"z\":3,\"｡\":2,\"😀\":1}"),
        // Keys that need escapes.
        (r#"{"q\"": 1, "n\n": 2, "back\\": 3}"#, r#"{"back\\":3,"n\n":2,"q\"":1}"#),
        // White space and separators inside strings are content.
        (r#"{"a": "x, y: {z}  [1]"}"#, r#"{"a":"x, y: {z}  [1]"}"#),
        // serde_json's private markers are keys like any other.
        (r#"{"$serde_json::private::RawValue": "1"}"#, r#"{"$serde_json::private::RawValue":"1"}"#),
        (r#"{"$serde_json::private::Number": "1e400"}"#, r#"{"$serde_json::private::Number":"1e400"}"#),
    ];
    for (column, sent) in cases {
        assert_eq!(attributes(column), sent);
    }
}

#[test]
fn attributes_may_nest_512_levels() {
    let nested = |levels: usize| format!("{}7{}", "[".repeat(levels), "]".repeat(levels));
    assert_eq!(attributes(&nested(512)), nested(512));
    for json in [nested(513), nested(6000), format!("{}7{}", "{\"a\": ".repeat(513), "}".repeat(513))] {
        let rejection = rejected(&Message { attributes: Some(json), ..bare() });
        assert_eq!(rejection.code, "row.attributes_too_deep");
    }
}

#[test]
fn attributes_that_are_not_json_are_rejected() {
    for text in ["", "{", "{\"a\": 1} x", "nul", "\u{0}"] {
        let rejection = rejected(&Message { attributes: Some(text.into()), ..bare() });
        assert_eq!(rejection.code, "row.invalid_attributes", "{text:?}");
    }
}

#[test]
fn topic_names() {
    let longest = "t".repeat(249);
    for legal in ["a", "A-Z.a_z.0-9", "...", "_", "-", longest.as_str()] {
        assert!(record::build(&Message { destination: legal.into(), ..bare() }).is_ok(), "{legal:?}");
    }
    let too_long = "t".repeat(250);
    for illegal in ["", ".", "..", "a b", "a/b", "tö", "a\n", "a,b", too_long.as_str()] {
        let rejection = rejected(&Message { destination: illegal.into(), ..bare() });
        assert_eq!(rejection.code, "kafka.invalid_topic", "{illegal:?}");
        assert!(rejection.detail.starts_with("client: destination "), "{}", rejection.detail);
        assert!(!rejection.detail.contains('\n'));
    }
}

#[test]
fn no_rejection_and_no_debug_text_shows_content() {
    const MARK: &str = "s3cr3t-mark";
    let marked = Message {
        message_key: Some(MARK.into()),
        payload: Bytes::from_static(MARK.as_bytes()),
        event_type: MARK.into(),
        content_type: MARK.into(),
        schema_subject: Some(MARK.into()),
        attributes: Some(format!("{}\"{MARK}\"{}", "[".repeat(600), "]".repeat(600))),
        ..bare()
    };
    assert!(!rejected(&marked).detail.contains(MARK));
    let malformed = Message { attributes: Some(format!("{{{MARK}")), ..marked.clone() };
    assert!(!rejected(&malformed).detail.contains(MARK));
    let late = Message { attributes: None, occurred_at: PgTime::INFINITY, ..marked.clone() };
    assert!(!rejected(&late).detail.contains(MARK));
    let sound = Message { attributes: Some(format!("\"{MARK}\"")), ..marked };
    assert!(!format!("{:?}", record::build(&sound)).contains(MARK));
    assert!(!format!("{sound:?}").contains(MARK));
}

#[test]
fn a_payload_that_was_not_read_is_never_an_empty_value() {
    let rejection = rejected(&Message {
        payload: Bytes::new(),
        payload_withheld: Some(Withheld { octets: 1 << 30, octets_max: 65_536 }),
        ..bare()
    });
    assert_eq!(rejection.code, "kafka.message_too_large");
    assert!(rejection.detail.contains("1073741824"), "{}", rejection.detail);
    assert!(rejection.detail.contains("message_bytes_max = 65536"), "{}", rejection.detail);
}

#[test]
fn rejections_satisfy_the_checks_of_the_table() {
    for code in ["kafka.message_too_large", "a", "a-b.c_d9", &format!("a{}", "b".repeat(63))] {
        assert!(outcome::is_rejection_code(code), "{code}");
    }
    for code in ["", "A", "9a", ".a", "a b", "aB", "ä", &format!("a{}", "b".repeat(64))] {
        assert!(!outcome::is_rejection_code(code), "{code}");
    }
    assert_eq!(Rejection::new("a", "").detail, "no detail");
    assert_eq!(Rejection::new("a", "x".repeat(5000)).detail.len(), 1024);
}

#[test]
fn stored_texts_are_bounded_on_a_character_boundary_and_free_of_nul() {
    assert_eq!(outcome::last_error("plain"), "plain");
    assert_eq!(outcome::last_error("a\0b"), "a\u{fffd}b");
    // 4,096 is no multiple of 3, so a cut inside a character would show.
    let cut = outcome::last_error(&"€".repeat(2000));
    assert_eq!(cut.len(), 4095);
    assert_eq!(cut, "€".repeat(1365));
    assert_eq!(outcome::last_error(&"x".repeat(5000)).len(), 4096);
    assert_eq!(outcome::last_error(&"\0".repeat(5000)).len(), 4095);
    assert_eq!(outcome::rejection_detail(&"€".repeat(2000)).len(), 1023);
}
