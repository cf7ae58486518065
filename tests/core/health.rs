//! Readiness and liveness as functions of what was reported and of the time, and the shape of `/status`.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use keiro_relay::domain::message::PgTime;
use keiro_relay::domain::pause::{Pause, PauseTarget, Pauses};
use keiro_relay::domain::policy::Policy;
use keiro_relay::publish::{BrokerHealth, ParkedTopic};
use keiro_relay::relay::health::{
    Board, Halt, HaltKind, Identity, Limits, LoopName, Moment, RECENT_MAX, Readiness, SourceSample,
};
use keiro_relay::relay::pause_report::PausesShown;
use keiro_relay::telemetry::Metrics;
use uuid::Uuid;

use crate::telemetry::{json_logged, value};

const STALL: Duration = Duration::from_secs(90);
const SAMPLE_AGE: Duration = Duration::from_secs(120);

/// A board whose time stands still until it is told to pass.
pub struct Scene {
    pub board: Board,
    now: Arc<Mutex<Moment>>,
}

impl Scene {
    /// 2026-01-02T03:04:05Z, nothing heard of yet.
    pub fn new() -> Self {
        let wall: Timestamp = "2026-01-02T03:04:05Z".parse().expect("a timestamp");
        let now = Arc::new(Mutex::new(Moment { instant: Instant::now(), wall }));
        let clock = Arc::clone(&now);
        let identity = Identity { instance: "relay-1".into(), version: "0.1.0".into(), policy_hash: "abc".into() };
        let limits = Limits { stall: STALL, sample_age: SAMPLE_AGE };
        let board = Board::with_clock(identity, limits, Metrics::new(), move || *clock.lock().expect("not poisoned"));
        Self { board, now }
    }

    /// Both sides work, and an empty table was sampled.
    pub fn working() -> Self {
        let scene = Self::new();
        scene.board.database(Ok(()));
        scene.board.broker(None);
        scene.board.schema(Ok("lean profile".into()));
        scene.board.source("billing", Policy::PerKeyHeadOfLine);
        scene.board.sampled(vec![]);
        scene
    }

    pub fn pass(&self, seconds: u64) {
        let mut now = self.now.lock().expect("not poisoned");
        let passed = Duration::from_secs(seconds);
        *now = Moment { instant: now.instant + passed, wall: now.wall.checked_add(passed).expect("in range") };
    }

    fn readiness(&self) -> Readiness {
        let snapshot = self.board.snapshot();
        snapshot.readiness(snapshot.at())
    }

    /// `check: reason` of everything that stands against being ready.
    fn reasons(&self) -> Vec<String> {
        let readiness = self.readiness();
        assert_eq!(readiness.ready, readiness.reasons.is_empty());
        readiness.reasons.iter().map(|reason| format!("{}: {}", reason.check, reason.reason)).collect()
    }

    /// Samples one source whose oldest ready row has waited so long, and all others empty.
    fn sample(&self, source: &str, ready_age_seconds: f64) {
        self.board.sampled(vec![ready(source, ready_age_seconds)]);
    }
}

fn ready(source: &str, ready_age_seconds: f64) -> SourceSample {
    SourceSample {
        source: source.into(),
        policy: Some(Policy::PerKeyHeadOfLine),
        pending: 1_000_000,
        oldest_age_seconds: Some(ready_age_seconds),
        oldest_ready_age_seconds: Some(ready_age_seconds),
        ..SourceSample::default()
    }
}

fn halt(kind: HaltKind) -> Halt {
    Halt { kind, outbox_id: Some(Uuid::from_u128(7)), reason: "kafka.odd: broker, topic t".into() }
}

const STALLED: &str = "progress: rows are ready but get no verdict: billing";

#[test]
fn nothing_is_ready_before_both_sides_answered_once() {
    let scene = Scene::new();
    assert_eq!(
        scene.reasons(),
        [
            "database: the database has not been checked yet",
            "broker: the broker has not been checked yet",
            "schema: the schema has not been checked yet",
            "progress: cannot be told before the database is usable",
        ]
    );
    scene.board.database(Ok(()));
    scene.board.schema(Ok("lean profile".into()));
    assert_eq!(
        scene.reasons(),
        ["broker: the broker has not been checked yet", "progress: cannot be told before the broker is usable"]
    );
    scene.board.broker(None);
    assert_eq!(scene.reasons(), [""; 0]);
}

#[test]
fn each_side_that_fails_is_a_reason_with_the_time_it_began() {
    type Fail = fn(&Board, &str);
    let fail: [(&str, Fail); 3] = [
        ("database", |board, reason| board.database(Err(reason.into()))),
        ("broker", |board, reason| board.broker(Some(reason.into()))),
        ("schema", |board, reason| board.schema(Err(reason.into()))),
    ];
    for (check, fail) in fail {
        let scene = Scene::working();
        scene.pass(10);
        fail(&scene.board, "connection refused");
        scene.pass(10);
        // Another reason while it stays down: since when it is down does not change.
        fail(&scene.board, "no route to host");
        let readiness = scene.readiness();
        assert!(!readiness.ready);
        assert_eq!(readiness.reasons[0].check, check);
        assert_eq!(readiness.reasons[0].reason, "no route to host");
        assert_eq!(readiness.reasons[0].since, "2026-01-02T03:04:15.000Z");
        assert_eq!(readiness.checks[check].state, "failed");
        assert_eq!(readiness.checks["progress"].state, "unknown");
        let live = scene.board.liveness();
        assert!(live.live, "dependencies are nothing to be restarted for: {live:?}");
    }
}

#[test]
fn it_is_ready_again_as_soon_as_the_side_answers_however_long_it_was_away() {
    let scene = Scene::working();
    scene.board.database(Err("connection refused".into()));
    scene.pass(3_600);
    scene.board.database(Ok(()));
    // Rows waited for the hour, but nobody is late yet.
    scene.sample("billing", 3_600.0);
    assert_eq!(scene.reasons(), [""; 0]);
    assert_eq!(scene.readiness().checks["database"].since, "2026-01-02T04:04:05.000Z");
    scene.pass(STALL.as_secs() + 1);
    assert_eq!(scene.reasons(), [STALLED]);
}

#[test]
fn a_large_backlog_alone_is_no_reason() {
    let scene = Scene::working();
    for _ in 0..100 {
        scene.pass(30);
        scene.board.sampled(vec![SourceSample { pending: u64::MAX / 2, dead: 1_000_000, ..ready("billing", 9e9) }]);
        scene.pass(1);
        scene.board.progress("billing");
        assert_eq!(scene.reasons(), [""; 0]);
    }
}

#[test]
fn rows_that_are_ready_and_get_no_verdict_are_a_reason_since_the_last_one() {
    let scene = Scene::working();
    scene.pass(10);
    scene.board.progress("billing");
    for waited in [30, 60, 90] {
        scene.pass(30);
        scene.sample("billing", f64::from(waited));
        assert_eq!(scene.reasons(), [""; 0], "after {waited} seconds");
    }
    scene.pass(1);
    assert_eq!(scene.reasons(), [STALLED]);
    assert_eq!(scene.readiness().reasons[0].since, "2026-01-02T03:04:15.000Z");
    // Any verdict is progress, also a bad one.
    scene.board.progress("billing");
    assert_eq!(scene.reasons(), [""; 0]);
}

fn pauses(targets: Vec<PauseTarget>) -> PausesShown {
    let pause = |target| Pause {
        target,
        since: PgTime::from_unix_micros(0),
        until: Some(PgTime::INFINITY),
        by: "alice\n".into(),
        reason: Some("ledger\u{1b}[31m".into()),
    };
    PausesShown::of(&Pauses::new(targets.into_iter().map(pause).collect()), None)
}

fn lane(key: &str) -> PauseTarget {
    PauseTarget::Lane { source_name: "billing".into(), message_key: key.into() }
}

#[test]
fn a_pause_is_no_reason_however_old_its_rows_become_and_neither_is_its_end() {
    let scene = Scene::working();
    scene.board.progress("billing");
    scene.board.pauses(pauses(vec![PauseTarget::Source("billing".into())]));
    for _ in 0..10 {
        scene.pass(60);
        // Also where the sample does not know of the pause yet.
        scene.sample("billing", 3_600.0);
        assert_eq!(scene.reasons(), [""; 0]);
    }
    scene.board.pauses(pauses(vec![]));
    for _ in 0..3 {
        assert_eq!(scene.reasons(), [""; 0], "rows that waited for an hour have a while to go out");
        scene.pass(30);
        scene.sample("billing", 3_600.0);
    }
    scene.pass(1);
    assert_eq!(scene.reasons(), [STALLED]);
}

#[test]
fn pauses_are_shown_counted_and_told_once_without_any_key() {
    let scene = Scene::working();
    let off = |text: &str| PausesShown::of(&Pauses::default(), Some(text.into()));
    let lines = json_logged(|| {
        scene.board.pauses(off("no table"));
        scene.board.pauses(off("no table"));
        for _ in 0..2 {
            scene.board.pauses(pauses(vec![PauseTarget::Topic("invoices".into()), lane("secret-1"), lane("secret-2")]));
        }
    });
    let said: Vec<String> =
        lines.iter().map(|line| format!("{} {}", line["kind"], line["count"]).replace('"', "")).collect();
    assert_eq!(said, ["null null", "lane 2", "topic 1", "null null"]);
    let status = serde_json::to_value(scene.board.snapshot().status()).expect("JSON");
    assert_eq!(
        status["paused"][0],
        serde_json::json!({
            "kind": "topic", "name": "invoices", "since": "1970-01-01T00:00:00.000Z", "until": "infinity", "by": "alice ",
            "reason": "ledger [31m",
        })
    );
    assert_eq!(
        (status["paused"][2]["kind"].as_str(), status["paused"][2]["name"].as_str()),
        (Some("lane"), Some("billing"))
    );
    assert_eq!(status["pauses_off"], serde_json::Value::Null);
    assert!(!format!("{status} {lines:?}").contains("secret"));
    let metric = |kind: &str| value(scene.board.metrics(), &format!("keiro_relay_paused{{kind=\"{kind}\"}}"));
    assert_eq!((metric("source"), metric("topic"), metric("lane")), (0.0, 1.0, 2.0));
    scene.board.pauses(pauses(vec![lane("secret-1")]));
    assert_eq!((metric("topic"), metric("lane")), (0.0, 1.0));
    let recent = &scene.board.snapshot().status().recent;
    assert_eq!((recent[0].change, recent[1].change), ("unpaused", "paused"));
}

#[test]
fn rows_that_are_not_due_not_ours_held_or_served_elsewhere_are_no_reason() {
    type Arrange = fn(&Scene);
    let cases: [(&str, Arrange); 7] = [
        ("nothing is ready: backoff, or behind a failing row", |scene| {
            scene.board.sampled(vec![SourceSample {
                oldest_ready_age_seconds: None,
                failed: 500,
                ..ready("billing", 9_999.0)
            }]);
        }),
        ("no relay of this configuration serves it", |scene| {
            scene.board.sampled(vec![SourceSample { policy: None, ..ready("billing", 9_999.0) }]);
        }),
        ("its oldest ready row came a moment ago: somebody else serves it too", |scene| scene.sample("billing", 2.0)),
        ("halted on a failing row", |scene| {
            scene.sample("billing", 9_999.0);
            scene.board.halted("billing", Some(halt(HaltKind::Failing)));
        }),
        ("held", |scene| {
            scene.sample("billing", 9_999.0);
            scene.board.halted("billing", Some(halt(HaltKind::Held)));
        }),
        ("its topic is parked", |scene| {
            scene.sample("billing", 9_999.0);
            scene.board.halted("billing", Some(halt(HaltKind::Topic)));
        }),
        ("another relay serves it", |scene| {
            scene.sample("billing", 9_999.0);
            scene.board.elsewhere("billing", true);
        }),
    ];
    for (case, arrange) in cases {
        let scene = Scene::working();
        scene.pass(STALL.as_secs() + 5);
        arrange(&scene);
        assert_eq!(scene.reasons(), [""; 0], "{case}");
        // The same without what excuses it.
        scene.board.halted("billing", None);
        scene.board.elsewhere("billing", false);
        scene.sample("billing", 9_999.0);
        assert_eq!(scene.reasons(), [STALLED], "{case}");
    }
}

#[test]
fn a_sample_older_than_the_last_verdict_says_nothing() {
    let scene = Scene::working();
    scene.pass(10);
    scene.sample("billing", 9_999.0);
    scene.pass(1);
    scene.board.progress("billing");
    // Idle since; the table was not sampled again yet.
    scene.pass(STALL.as_secs() + 5);
    assert_eq!(scene.reasons(), [""; 0]);
}

#[test]
fn one_source_that_moves_does_not_hide_one_that_does_not() {
    let scene = Scene::working();
    for _ in 0..4 {
        scene.pass(30);
        let names = ["a", "b", "c", "d", "e", "f", "g"];
        let mut samples: Vec<SourceSample> = names.iter().map(|name| ready(name, 500.0)).collect();
        samples.push(ready("moving", 500.0));
        scene.board.sampled(samples);
        scene.board.progress("moving");
    }
    assert_eq!(scene.reasons(), ["progress: rows are ready but get no verdict: a, b, c, d, e, 2 more"]);
}

#[test]
fn a_table_that_can_not_be_counted_while_nothing_moves_is_a_reason() {
    let scene = Scene::working();
    scene.pass(SAMPLE_AGE.as_secs());
    assert_eq!(scene.reasons(), [""; 0]);
    scene.pass(1);
    assert_eq!(scene.reasons(), ["progress: the backlog could not be counted and no row got a verdict"]);
    scene.board.progress("billing");
    assert_eq!(scene.reasons(), [""; 0], "verdicts come, whatever the counting does");
}

#[test]
fn a_breaker_and_a_stop_are_reasons() {
    let scene = Scene::working();
    scene
        .board
        .halted("billing", Some(Halt { reason: "20 rows in a row were rejected".into(), ..halt(HaltKind::Breaker) }));
    assert_eq!(scene.reasons(), ["breaker: source billing is held: 20 rows in a row were rejected"]);
    scene.board.halted("billing", None);
    assert_eq!(scene.reasons(), [""; 0]);
    scene.board.stopping();
    assert_eq!(scene.reasons(), ["stop: the relay is stopping"]);
    assert!(scene.board.liveness().live, "a relay that stops must not be killed for it");
}

#[test]
fn a_loop_that_is_silent_for_three_periods_is_stuck_and_one_that_ended_is_not() {
    let scene = Scene::new();
    assert!(scene.board.liveness().live, "nothing runs yet");
    let slow = scene.board.register(LoopName::Source, Some("billing"), Duration::from_secs(40));
    let quick = scene.board.register(LoopName::Discover, None, Duration::from_secs(1));
    scene.pass(10);
    assert!(scene.board.liveness().live, "ten seconds of silence are allowed to any loop");
    scene.pass(1);
    let liveness = scene.board.liveness();
    assert!(!liveness.live && liveness.loops == 2);
    assert_eq!(
        serde_json::to_value(&liveness.stuck).expect("JSON"),
        serde_json::json!([
            { "loop": "discover", "detail": null, "silent_seconds": 11, "silent_seconds_max": 10 }
        ])
    );
    quick.tick();
    assert!(scene.board.liveness().live);
    drop(quick);
    scene.pass(109);
    assert!(scene.board.liveness().live, "120 seconds are three periods");
    scene.pass(1);
    assert_eq!(scene.board.liveness().stuck[0].detail.as_deref(), Some("billing"));
    assert!(!scene.board.snapshot().liveness().live);
    slow.succeeded();
    assert!(scene.board.liveness().live);
    let name = r#"keiro_relay_last_success_timestamp_seconds{loop="source"}"#;
    assert!(value(scene.board.metrics(), name) > 0.0);
    drop(slow);
    scene.pass(10_000);
    assert_eq!(scene.board.liveness().loops, 0);
    assert!(scene.board.liveness().live);
}

#[test]
fn a_state_change_is_one_line_however_often_it_is_reported() {
    let lines = json_logged(|| {
        let scene = Scene::working();
        for n in 0..50 {
            scene.board.database(Err("connection refused".into()));
            scene.board.halted("billing", Some(halt(HaltKind::Held)));
            scene.board.halted("billing", Some(Halt { reason: format!("attempt {n}"), ..halt(HaltKind::Held) }));
            scene.board.parked(vec![parked("orders", &format!("kafka.unknown_topic: {n}"))]);
            scene.pass(1);
        }
        for _ in 0..50 {
            scene.board.database(Ok(()));
            scene.board.halted("billing", None);
            scene.board.parked(vec![]);
            scene.board.stopping();
        }
    });
    let lines: Vec<String> =
        lines.iter().map(|line| format!("{} {}", line["level"], line["message"]).replace('"', "")).collect();
    assert_eq!(
        lines,
        [
            "INFO started",
            "INFO usable",
            "INFO usable",
            "INFO usable",
            "WARN not usable",
            "ERROR source halted until somebody acts",
            "WARN topic parked: its rows wait and spend no attempt",
            "INFO usable",
            "INFO source moves again",
            "INFO topic served again",
            "INFO stopping: no new claims; what is in flight is finished and settled",
        ]
    );
}

#[test]
fn reasons_that_differ_each_time_are_not_a_line_each() {
    let lines = json_logged(|| {
        let scene = Scene::working();
        for n in 0..600 {
            scene.board.database(Err(format!("connection from port {n} refused")));
            scene.pass(1);
        }
    });
    let lost = lines.iter().filter(|line| line["message"] == "not usable").count();
    assert!((2..=12).contains(&lost), "{lost} lines in ten minutes");
}

fn parked(topic: &str, reason: &str) -> ParkedTopic {
    ParkedTopic { topic: topic.into(), reason: reason.into(), probe_at: Instant::now() }
}

#[test]
fn status_shows_what_was_reported() {
    let scene = Scene::working();
    let id = Uuid::from_u128(7);
    scene.board.durability(vec!["the server runs with fsync = off".into()]);
    scene.board.in_flight(12, 3_456);
    scene.pass(1);
    scene.board.failure("billing", "kafka.odd: broker,\ntopic t");
    scene.board.progress("billing");
    scene.pass(1);
    scene.board.halted("billing", Some(halt(HaltKind::Failing)));
    let probe_at = scene.board.snapshot().at().instant + Duration::from_secs(60);
    scene.board.broker_health(BrokerHealth {
        problem: None,
        parked: vec![ParkedTopic { topic: "t".into(), reason: "kafka.unknown_topic: no such topic".into(), probe_at }],
        rebuilds: 2,
    });
    scene.board.source("quiet", Policy::BestEffort);
    scene.board.sampled(vec![
        SourceSample {
            pending: 1,
            failed: 2,
            publishing: 3,
            sent: 4,
            dead: 5,
            rejected: 6,
            unknown: 7,
            capped: true,
            ..ready("billing", 8.5)
        },
        SourceSample { policy: None, ..ready("stranger", 1.0) },
    ]);
    let status = serde_json::to_value(scene.board.snapshot().status()).expect("JSON");
    for (key, expected) in [
        ("instance", serde_json::json!("relay-1")),
        ("version", serde_json::json!("0.1.0")),
        ("policy_hash", serde_json::json!("abc")),
        ("started_at", serde_json::json!("2026-01-02T03:04:05.000Z")),
        ("at", serde_json::json!("2026-01-02T03:04:07.000Z")),
        ("live", serde_json::json!(true)),
        ("durability", serde_json::json!(["the server runs with fsync = off"])),
        ("in_flight_rows", serde_json::json!(12)),
        ("in_flight_bytes", serde_json::json!(3_456)),
        ("sampled_at", serde_json::json!("2026-01-02T03:04:07.000Z")),
        ("sources_omitted", serde_json::json!(0)),
    ] {
        assert_eq!(status[key], expected, "{key}");
    }
    assert_eq!(status["ready"]["ready"], true);
    assert_eq!(
        status["dependencies"]["schema"],
        serde_json::json!({
            "state": "ok", "reason": "lean profile", "since": "2026-01-02T03:04:05.000Z"
        })
    );
    assert_eq!(
        status["sources"][0],
        serde_json::json!({
            "source": "billing", "policy": "per_key_head_of_line",
            "pending": 1, "failed": 2, "publishing": 3, "sent": 4, "dead": 5, "rejected": 6, "unknown": 7, "capped": true,
            "oldest_age_seconds": 8.5, "oldest_ready_age_seconds": 8.5, "halted_on": id,
            "halt": { "kind": "failing", "reason": "kafka.odd: broker, topic t", "since": "2026-01-02T03:04:07.000Z" },
            "elsewhere": false,
            "last_error": { "error": "kafka.odd: broker, topic t", "at": "2026-01-02T03:04:06.000Z" },
            "last_verdict_at": "2026-01-02T03:04:06.000Z",
        })
    );
    // Sampled, so its zeros are known; it has no rows.
    assert_eq!(status["sources"][1]["source"], "quiet");
    assert_eq!(status["sources"][1]["pending"], 0);
    assert_eq!(status["sources"][1]["oldest_age_seconds"], serde_json::Value::Null);
    assert_eq!(status["sources"][2]["policy"], serde_json::Value::Null);
    assert_eq!(
        status["parked_topics"],
        serde_json::json!([{
            "topic": "t", "reason": "kafka.unknown_topic: no such topic",
            "since": "2026-01-02T03:04:07.000Z", "probe_at": "2026-01-02T03:05:07.000Z",
        }])
    );
    let recent: Vec<String> = status["recent"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|change| format!("{} {}", change["change"], change["about"]).replace('"', ""))
        .collect();
    assert_eq!(
        recent,
        ["parked t", "halted billing", "regained schema", "regained broker", "regained database", "started null"]
    );
    let metrics = scene.board.metrics();
    assert_eq!(value(metrics, r#"keiro_relay_source_halted{source="billing"}"#), 1.0);
    assert_eq!(value(metrics, r#"keiro_relay_topic_parked{topic="t"}"#), 1.0);
    assert_eq!(value(metrics, "keiro_relay_producer_rebuilds_total"), 2.0);
    assert_eq!(value(metrics, r#"keiro_relay_unrouted_rows{source="stranger"}"#), 1_000_000.0);
    assert_eq!(value(metrics, r#"keiro_relay_policy_info{hash="abc"}"#), 1.0);
}

#[test]
fn a_source_that_was_never_sampled_has_no_counts() {
    let scene = Scene::new();
    scene.board.source("billing", Policy::StopTheLine);
    let status = serde_json::to_value(scene.board.snapshot().status()).expect("JSON");
    assert_eq!(status["sources"][0]["policy"], "stop_the_line");
    assert_eq!(status["sources"][0]["pending"], serde_json::Value::Null);
    assert_eq!(status["sampled_at"], serde_json::Value::Null);
    // But its metrics are there from the start.
    assert_eq!(value(scene.board.metrics(), r#"keiro_relay_rows_total{outcome="sent",source="billing"}"#), 0.0);
}

#[test]
fn what_is_remembered_is_bounded() {
    let scene = Scene::working();
    for n in 0..10_500 {
        let name = format!("source-{n}");
        if n == 10 {
            scene.board.halted(&name, Some(halt(HaltKind::Held)));
        }
        scene.board.progress(&name);
    }
    for n in 0..60 {
        scene.board.database(if n % 2 == 0 { Err("gone".into()) } else { Ok(()) });
    }
    scene.board.failure("source-1", &"x".repeat(100_000));
    let status = scene.board.snapshot().status();
    assert_eq!(status.recent.len(), RECENT_MAX);
    assert_eq!((status.sources.len(), status.sources_omitted), (10_000, 501), "10,500 and `billing`");
    let longest = status.sources.iter().filter_map(|source| Some(source.last_error.as_ref()?.error.len())).max();
    assert!(longest <= Some(1_024), "{longest:?}");
    // The next sample forgets those that have no rows, but no halted one.
    scene.board.sampled(vec![ready("source-20", 1.0)]);
    let names: Vec<String> = scene.board.snapshot().status().sources.into_iter().map(|source| source.source).collect();
    assert_eq!(names, ["source-10", "source-20"]);
}

#[test]
fn limits_follow_the_publish_timeout_and_the_sample_interval() {
    let defaults = Limits { stall: Duration::from_secs(90), sample_age: Duration::from_secs(90) };
    assert_eq!(Limits::of_timeouts(Duration::from_secs(30), Duration::from_secs(30)), defaults);
    let quick = Limits { stall: Duration::from_secs(30), sample_age: Duration::from_secs(30) };
    assert_eq!(Limits::of_timeouts(Duration::from_secs(2), Duration::from_secs(5)), quick);
    let slow = Limits { stall: Duration::from_secs(90), sample_age: Duration::from_secs(1_210) };
    assert_eq!(Limits::of_timeouts(Duration::from_secs(30), Duration::from_secs(600)), slow);
}
