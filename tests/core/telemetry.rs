//! Names, labels and caps of the metrics, and what log lines look like.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use keiro_relay::config::{Log, LogFormat};
use keiro_relay::domain::policy::Policy;
use keiro_relay::telemetry::{
    Claimed, Failure, LoopName, Metrics, OVERFLOW_LABEL, ProducerRebuilds, Published, Reason, Repeats, Requeued,
    RetentionDeleted, RowEnd, RowEnded, SOURCE_LABELS_MAX, Settled, SourceSample, Stage, StateChange, TOPIC_LABELS_MAX,
    clean, tracing_dispatch,
};
use tracing::Dispatch;
use uuid::Uuid;

/// Every series of an exposition, `name{labels}` to value; panics on a line that is none, and on a series that is there twice.
pub fn series(metrics: &Metrics) -> BTreeMap<String, f64> {
    let mut all = BTreeMap::new();
    for line in metrics.render().lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no series: {line}"));
        let value = value.parse().unwrap_or_else(|_| panic!("no value: {line}"));
        assert!(all.insert(name.to_owned(), value).is_none(), "twice: {name}");
    }
    all
}

pub fn value(metrics: &Metrics, name: &str) -> f64 {
    let all = series(metrics);
    *all.get(name).unwrap_or_else(|| panic!("{name} is not among {:#?}", all.keys()))
}

/// Log lines of a closure that runs with a subscriber of its own.
pub fn logged(format: LogFormat, level: &str, run: impl FnOnce()) -> Vec<String> {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().expect("not poisoned").extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    // While there is just one subscriber, tracing asks only the current thread's whether an event is wanted, and remembers the
    // answer for all threads: a test without a subscriber would silence this one. A second one makes it ask all of them.
    static ANOTHER: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(tracing_subscriber::registry()));
    LazyLock::force(&ANOTHER);
    let sink = Sink::default();
    let writer = sink.clone();
    let log = Log { format, level: level.to_owned() };
    let dispatch = tracing_dispatch(&log, "relay \"1\"", move || writer.clone()).expect("a legal level");
    tracing::dispatcher::with_default(&dispatch, run);
    let text = String::from_utf8(sink.0.lock().expect("not poisoned").clone()).expect("UTF-8");
    text.lines().map(str::to_owned).collect()
}

pub fn json_logged(run: impl FnOnce()) -> Vec<serde_json::Value> {
    let lines = logged(LogFormat::Json, "debug", run);
    lines.iter().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
}

fn sample(source: &str, pending: u64) -> SourceSample {
    SourceSample {
        source: source.to_owned(),
        policy: Some(Policy::BestEffort),
        pending,
        failed: 2,
        publishing: 3,
        sent: 10_000,
        dead: 4,
        rejected: 5,
        unknown: 6,
        capped: true,
        oldest_age_seconds: Some(90.5),
        oldest_ready_age_seconds: Some(1.5),
    }
}

fn labels_of(metrics: &Metrics, family: &str, label: &str) -> BTreeSet<String> {
    let prefix = format!("{family}{{");
    let marker = format!("{label}=\"");
    series(metrics)
        .keys()
        .filter(|name| name.starts_with(&prefix))
        .filter_map(|name| Some(name.split_once(&marker)?.1.split_once('"')?.0.to_owned()))
        .collect()
}

#[test]
fn every_metric_of_the_design_is_there_with_its_type_and_labels_from_the_start() {
    let metrics = Metrics::new();
    metrics.policy("abc");
    let _ = metrics.source("billing");
    let families = [
        ("backlog_rows", "gauge", r#"source="billing",status="pending""#),
        ("oldest_age_seconds", "gauge", r#"source="billing""#),
        ("oldest_ready_age_seconds", "gauge", r#"source="billing""#),
        ("rows_total", "counter", r#"outcome="sent",source="billing""#),
        ("stale_settlements_total", "counter", r#"source="billing""#),
        ("overtaken_total", "counter", ""),
        ("duplicates_possible_total", "counter", r#"source="billing""#),
        ("errors_total", "counter", r#"reason="timeout",stage="claim""#),
        ("claim_duration_seconds", "histogram", ""),
        ("publish_duration_seconds", "histogram", ""),
        ("settle_duration_seconds", "histogram", ""),
        ("end_to_end_seconds", "histogram", r#"source="billing""#),
        ("claim_rows", "histogram", ""),
        ("in_flight_rows", "gauge", ""),
        ("in_flight_bytes", "gauge", ""),
        ("source_halted", "gauge", r#"source="billing""#),
        ("topic_parked", "gauge", r#"topic="other""#),
        ("paused", "gauge", r#"kind="lane""#),
        ("unrouted_rows", "gauge", r#"source="billing""#),
        ("producer_rebuilds_total", "counter", ""),
        ("retention_deleted_total", "counter", ""),
        ("last_success_timestamp_seconds", "gauge", r#"loop="source""#),
        ("sample_capped", "gauge", r#"source="billing""#),
        ("table_dead_tuples", "gauge", ""),
        ("oldest_transaction_seconds", "gauge", ""),
        ("policy_info", "gauge", r#"hash="abc""#),
        ("config_last_reload_successful", "gauge", ""),
        ("config_last_reload_success_timestamp_seconds", "gauge", ""),
        ("build_info", "gauge", &format!("version=\"{}\"", env!("CARGO_PKG_VERSION"))),
    ];
    let text = metrics.render();
    let all = series(&metrics);
    for (name, kind, labels) in families {
        let name = format!("keiro_relay_{name}");
        assert!(text.contains(&format!("# TYPE {name} {kind}\n")), "{name} is no {kind} in\n{text}");
        let series = if kind == "histogram" { format!("{name}_count") } else { name.clone() };
        let series = if labels.is_empty() { series } else { format!("{series}{{{labels}}}") };
        let expected = if name.ends_with("_info") { 1.0 } else { 0.0 };
        assert_eq!(all.get(&series), Some(&expected), "{series} in\n{text}");
    }
    let types = text.lines().filter(|line| line.starts_with("# TYPE ")).count();
    assert_eq!(types, families.len(), "a metric that this list does not know in\n{text}");
    for help in text.lines().filter(|line| line.starts_with("# TYPE ")) {
        let name = help.split(' ').nth(2).expect("a name");
        assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help");
    }
}

#[test]
fn every_outcome_status_stage_and_reason_is_zero_before_it_happens() {
    let metrics = Metrics::new();
    let _ = metrics.source("billing");
    let outcomes = ["sent", "failed", "skipped", "returned", "dead", "rejected", "requeued"];
    assert_eq!(labels_of(&metrics, "keiro_relay_rows_total", "outcome"), outcomes.map(str::to_owned).into());
    let statuses = ["pending", "failed", "publishing", "dead", "rejected", "unknown"];
    assert_eq!(labels_of(&metrics, "keiro_relay_backlog_rows", "status"), statuses.map(str::to_owned).into());
    let stages = ["claim", "publish", "settle", "maintenance", "sample"];
    assert_eq!(labels_of(&metrics, "keiro_relay_errors_total", "stage"), stages.map(str::to_owned).into());
    let errors = series(&metrics).keys().filter(|name| name.starts_with("keiro_relay_errors_total{")).count();
    assert_eq!(errors, Stage::ALL.len() * Reason::ALL.len());
}

#[test]
fn two_relays_in_one_process_count_apart() {
    let (one, other) = (Metrics::new(), Metrics::new());
    RetentionDeleted { rows: 5 }.emit(&one);
    assert_eq!(value(&one, "keiro_relay_retention_deleted_total"), 5.0);
    assert_eq!(value(&other, "keiro_relay_retention_deleted_total"), 0.0);
    // A clone is the same.
    RetentionDeleted { rows: 2 }.emit(&one.clone());
    assert_eq!(value(&one, "keiro_relay_retention_deleted_total"), 7.0);
}

#[test]
fn a_sample_sets_every_gauge_and_a_source_without_rows_falls_to_zero() {
    let metrics = Metrics::new();
    let unrouted = SourceSample { policy: None, capped: false, ..sample("stranger", 40) };
    metrics.sampled(&[sample("billing", 7), unrouted]);
    for (name, expected) in [
        (r#"backlog_rows{source="billing",status="pending"}"#, 7.0),
        (r#"backlog_rows{source="billing",status="failed"}"#, 2.0),
        (r#"backlog_rows{source="billing",status="publishing"}"#, 3.0),
        (r#"backlog_rows{source="billing",status="dead"}"#, 4.0),
        (r#"backlog_rows{source="billing",status="rejected"}"#, 5.0),
        (r#"backlog_rows{source="billing",status="unknown"}"#, 6.0),
        (r#"oldest_age_seconds{source="billing"}"#, 90.5),
        (r#"oldest_ready_age_seconds{source="billing"}"#, 1.5),
        (r#"sample_capped{source="billing"}"#, 1.0),
        (r#"sample_capped{source="stranger"}"#, 0.0),
        (r#"unrouted_rows{source="billing"}"#, 0.0),
        (r#"unrouted_rows{source="stranger"}"#, 42.0),
    ] {
        assert_eq!(value(&metrics, &format!("keiro_relay_{name}")), expected, "{name}");
    }
    metrics.sampled(&[]);
    for (name, value) in series(&metrics) {
        let gauge = ["backlog_rows", "oldest", "unrouted", "sample_capped"].iter().any(|part| name.contains(part));
        assert!(!gauge || value == 0.0, "{name} {value}");
    }
}

#[test]
fn sources_beyond_the_cap_share_a_label_that_adds_up() {
    let metrics = Metrics::new();
    let _ = metrics.source("configured");
    let samples: Vec<SourceSample> =
        (0..SOURCE_LABELS_MAX + 499).map(|n| sample(&format!("source-{n:05}"), 1)).collect();
    metrics.sampled(&samples);
    let family = "keiro_relay_backlog_rows";
    let labels = labels_of(&metrics, family, "source");
    assert_eq!(labels.len(), SOURCE_LABELS_MAX + 1, "the capped sources and `{OVERFLOW_LABEL}`");
    assert!(labels.contains("configured") && labels.contains(OVERFLOW_LABEL));
    assert_eq!(value(&metrics, r#"keiro_relay_backlog_rows{source="other",status="pending"}"#), 500.0);
    assert_eq!(value(&metrics, r#"keiro_relay_oldest_age_seconds{source="other"}"#), 90.5);
    Settled { source_name: "source-01400", sent: 3, ..Settled::default() }.emit(&metrics);
    Settled { source_name: "source-01401", sent: 4, ..Settled::default() }.emit(&metrics);
    assert_eq!(value(&metrics, r#"keiro_relay_rows_total{outcome="sent",source="other"}"#), 7.0);
    metrics.halted(["source-01400", "source-00001"]);
    assert_eq!(value(&metrics, r#"keiro_relay_source_halted{source="other"}"#), 1.0);
    assert_eq!(value(&metrics, r#"keiro_relay_source_halted{source="source-00001"}"#), 1.0);
    metrics.halted(["source-00001"]);
    assert_eq!(value(&metrics, r#"keiro_relay_source_halted{source="other"}"#), 0.0);
    metrics.sampled(&samples[..1]);
    assert_eq!(value(&metrics, r#"keiro_relay_backlog_rows{source="other",status="pending"}"#), 0.0);
}

#[test]
fn odd_source_names_are_escaped_and_endless_ones_are_no_labels() {
    let metrics = Metrics::new();
    let _ = metrics.source("a\"b\\c\nd");
    let _ = metrics.source(&"x".repeat(100_000));
    let _ = metrics.source("");
    let text = metrics.render();
    assert!(text.contains(r#"source="a\"b\\c\nd""#), "{text}");
    assert!(text.contains(r#"source="""#) && text.contains(r#"source="other""#));
    assert!(text.lines().all(|line| line.len() < 1_000));
}

#[test]
fn parked_topics_have_capped_labels_and_fall_to_zero() {
    let metrics = Metrics::new();
    let topics: Vec<String> = (0..2_000).map(|n| format!("topic-{n:04}")).collect();
    metrics.parked(topics.iter().map(String::as_str));
    assert_eq!(labels_of(&metrics, "keiro_relay_topic_parked", "topic").len(), TOPIC_LABELS_MAX + 1);
    assert_eq!(value(&metrics, r#"keiro_relay_topic_parked{topic="topic-0000"}"#), 1.0);
    assert_eq!(value(&metrics, r#"keiro_relay_topic_parked{topic="other"}"#), 1_900.0);
    metrics.parked(["topic-0001"]);
    assert_eq!(value(&metrics, r#"keiro_relay_topic_parked{topic="topic-0000"}"#), 0.0);
    assert_eq!(value(&metrics, r#"keiro_relay_topic_parked{topic="topic-0001"}"#), 1.0);
    assert_eq!(value(&metrics, r#"keiro_relay_topic_parked{topic="other"}"#), 0.0);
}

#[test]
fn each_event_counts_what_it_says() {
    let metrics = Metrics::new();
    let elapsed = Duration::from_millis(20);
    Claimed { source_name: "billing", rows: 32, elapsed }.emit(&metrics);
    Claimed { source_name: "billing", rows: 0, elapsed }.emit(&metrics);
    Published { source_name: "billing", rows: 32, acknowledged: 30, elapsed }.emit(&metrics);
    Settled {
        source_name: "billing",
        sent: 20,
        failed: 1,
        skipped: 2,
        returned: 3,
        dead: 4,
        rejected: 5,
        stale: 6,
        overtaken: 7,
        duplicates_possible: 8,
        elapsed,
    }
    .emit(&metrics);
    Requeued { source_name: "billing", failed: 9, dead: 1 }.emit(&metrics);
    ProducerRebuilds { total: 2 }.emit(&metrics);
    ProducerRebuilds { total: 2 }.emit(&metrics);
    ProducerRebuilds { total: 3 }.emit(&metrics);
    metrics.in_flight(12, 3_456);
    metrics.source("billing").end_to_end(0.012);
    metrics.source("billing").end_to_end(-4.0);
    for (name, expected) in [
        ("claim_duration_seconds_count", 2.0),
        ("claim_rows_sum", 32.0),
        (r#"claim_duration_seconds_bucket{le="0.025"}"#, 2.0),
        (r#"claim_duration_seconds_bucket{le="0.01"}"#, 0.0),
        ("publish_duration_seconds_count", 1.0),
        ("settle_duration_seconds_count", 1.0),
        (r#"rows_total{outcome="sent",source="billing"}"#, 20.0),
        (r#"rows_total{outcome="failed",source="billing"}"#, 1.0),
        (r#"rows_total{outcome="skipped",source="billing"}"#, 2.0),
        (r#"rows_total{outcome="returned",source="billing"}"#, 3.0),
        (r#"rows_total{outcome="dead",source="billing"}"#, 5.0),
        (r#"rows_total{outcome="rejected",source="billing"}"#, 5.0),
        (r#"rows_total{outcome="requeued",source="billing"}"#, 9.0),
        (r#"stale_settlements_total{source="billing"}"#, 6.0),
        ("overtaken_total", 7.0),
        (r#"duplicates_possible_total{source="billing"}"#, 8.0),
        ("producer_rebuilds_total", 3.0),
        ("in_flight_rows", 12.0),
        ("in_flight_bytes", 3_456.0),
        (r#"end_to_end_seconds_count{source="billing"}"#, 2.0),
        (r#"end_to_end_seconds_sum{source="billing"}"#, 0.012),
    ] {
        assert_eq!(value(&metrics, &format!("keiro_relay_{name}")), expected, "{name}");
    }
    metrics.succeeded(LoopName::Sample);
    let sampled = value(&metrics, r#"keiro_relay_last_success_timestamp_seconds{loop="sample"}"#);
    assert!(sampled > 1_700_000_000.0, "{sampled} is no Unix time of today");
    metrics.policy("one");
    metrics.policy("two");
    assert_eq!(labels_of(&metrics, "keiro_relay_policy_info", "hash"), BTreeSet::from(["two".to_owned()]));
}

#[test]
fn a_failed_stage_is_in_its_histogram_and_its_text_is_in_no_label() {
    let metrics = Metrics::new();
    let before = series(&metrics).len();
    for n in 0..500 {
        let error = format!("marker-{n}");
        for stage in Stage::ALL {
            let elapsed = Some(Duration::from_secs(3));
            Failure { stage: *stage, reason: Reason::Timeout, source_name: Some("billing"), error: &error, elapsed }
                .emit(&metrics);
        }
    }
    for stage in ["claim", "publish", "settle"] {
        assert_eq!(value(&metrics, &format!("keiro_relay_{stage}_duration_seconds_count")), 500.0, "{stage}");
    }
    assert_eq!(value(&metrics, r#"keiro_relay_errors_total{reason="timeout",stage="maintenance"}"#), 500.0);
    assert_eq!(series(&metrics).len(), before, "error texts must not make series");
    assert!(!metrics.render().contains("marker"));
}

#[test]
fn repeated_failures_are_one_line_and_every_one_is_counted() {
    let metrics = Metrics::new();
    let lines = json_logged(|| {
        for source_name in [Some("billing"), Some("orders"), None] {
            for n in 0..100 {
                let error = format!("connection to 127.0.0.1:{n} refused");
                Failure { stage: Stage::Claim, reason: Reason::Connection, source_name, error: &error, elapsed: None }
                    .emit(&metrics);
            }
        }
    });
    assert_eq!(lines.len(), 3, "{lines:#?}");
    assert_eq!(lines[0]["source"], "billing");
    assert_eq!(lines[0]["stage"], "claim");
    assert_eq!(lines[0]["reason"], "connection");
    assert_eq!(lines[0]["level"], "WARN");
    assert_eq!(lines[0]["error"], "connection to 127.0.0.1:0 refused");
    assert_eq!(value(&metrics, r#"keiro_relay_errors_total{reason="connection",stage="claim"}"#), 300.0);
}

#[test]
fn what_only_a_person_can_mend_is_an_error() {
    let metrics = Metrics::new();
    let lines = json_logged(|| {
        for reason in [Reason::Permission, Reason::Conflict] {
            Failure { stage: Stage::Settle, reason, source_name: None, error: "no", elapsed: None }.emit(&metrics);
        }
        Settled { source_name: "billing", overtaken: 1, ..Settled::default() }.emit(&metrics);
    });
    let levels: Vec<&str> = lines.iter().filter_map(|line| line["level"].as_str()).collect();
    assert_eq!(levels, ["ERROR", "WARN", "DEBUG", "ERROR"], "{lines:#?}");
}

#[test]
fn a_json_line_has_instance_level_and_fields_at_the_top() {
    let metrics = Metrics::new();
    let lines = json_logged(|| {
        Claimed { source_name: "billing", rows: 32, elapsed: Duration::from_millis(20) }.emit(&metrics);
        RowEnded { source_name: "billing", outbox_id: Uuid::nil(), end: RowEnd::Dead, error: "kafka.odd: no\nmore" }
            .emit(&metrics);
        StateChange::Lost { check: "database", reason: "it is \"gone\"".into() }.emit();
    });
    assert_eq!(lines.len(), 3, "{lines:#?}");
    for line in &lines {
        assert_eq!(line["instance"], "relay \"1\"", "{line}");
        assert!(line["timestamp"].is_string() && line["target"] == "keiro_relay::telemetry", "{line}");
    }
    assert_eq!(lines[0]["message"], "claimed");
    assert_eq!(lines[0]["rows"], 32);
    assert_eq!(lines[0]["elapsed_ms"], 20);
    assert_eq!(lines[1]["outbox_id"], "00000000-0000-0000-0000-000000000000");
    assert_eq!(lines[1]["error"], "kafka.odd: no more");
    assert_eq!(lines[2]["reason"], "it is \"gone\"");
}

#[test]
fn a_text_line_ends_with_the_instance() {
    let lines = logged(LogFormat::Text, "info", || {
        StateChange::Regained { check: "broker" }.emit();
        tracing::debug!("not at this level");
    });
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains(" INFO ") && lines[0].contains("usable check=\"broker\""), "{lines:?}");
    assert!(lines[0].ends_with(" instance=relay \"1\""), "{lines:?}");
}

#[test]
fn a_bare_level_is_ours_and_a_filter_is_taken_as_it_is() {
    let emit = || {
        tracing::info!(target: "keiro_relay::relay", "ours");
        tracing::info!(target: "librdkafka", "theirs");
        tracing::warn!(target: "librdkafka", "their warning");
    };
    let ours = logged(LogFormat::Text, "info", emit);
    assert_eq!(ours.len(), 2, "{ours:?}");
    assert!(ours[0].contains("ours") && ours[1].contains("their warning"), "{ours:?}");
    let theirs = logged(LogFormat::Text, "off,librdkafka=info", emit);
    assert!(theirs.len() == 2 && theirs.iter().all(|line| line.contains("their")), "{theirs:?}");
    assert!(logged(LogFormat::Text, "off", || tracing::error!(target: "keiro_relay", "ours")).is_empty());
    let log = Log { format: LogFormat::Text, level: "keiro_relay=loud".into() };
    let error = tracing_dispatch(&log, "", std::io::sink).expect_err("no such level");
    assert!(error.starts_with("log.level \"keiro_relay=loud\" is no level or filter: "), "{error}");
}

#[test]
fn repeats_let_one_line_through_in_a_while_with_the_number_left_out() {
    let start = Instant::now();
    let at = |seconds| start + Duration::from_secs(seconds);
    let mut repeats = Repeats::new(Duration::from_secs(60), 2);
    assert_eq!(repeats.note("a", at(0)), Some(0));
    assert_eq!(repeats.note("a", at(1)), None);
    assert_eq!(repeats.note("a", at(59)), None);
    assert_eq!(repeats.note("b", at(59)), Some(0), "another key is another line");
    assert_eq!(repeats.note("a", at(60)), Some(2));
    assert_eq!(repeats.note("a", at(61)), None);
    assert_eq!(repeats.clear(&"a"), Some(1), "it is over, one was left out since the last line");
    assert_eq!(repeats.note("a", at(62)), Some(0), "and begins again");
    // A third key pushes out the one whose line is oldest, so the map stays bounded.
    assert_eq!(repeats.note("c", at(63)), Some(0));
    assert_eq!(repeats.note("a", at(64)), None);
    assert_eq!(repeats.note("b", at(65)), Some(0));
    // A clock that goes back lets nothing through and does not panic.
    assert_eq!(repeats.note("b", at(0)), None);
}

#[test]
fn foreign_text_becomes_one_bounded_line() {
    assert_eq!(clean("a\nb\tc\u{1b}[31m"), "a b c [31m");
    let long = clean(&"é".repeat(5_000));
    assert!(long.len() <= 1_024 && long.ends_with("é…"), "{} bytes", long.len());
    assert_eq!(clean(&"x".repeat(1_024)), "x".repeat(1_024));
}
