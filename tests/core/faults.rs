//! Whose fault it is: each rule of design §3 with instants of its own.

use std::time::{Duration, Instant};

use keiro_relay::publish::kafka::faults::{
    Admission, DOWN_GRACE, Faults, PARKED_MAX, SILENCES_MAX, SUSPECTS_MAX, Silence, TOPICS_MAX, UNWANTED_AFTER,
};
use uuid::Uuid;

const ROW: Uuid = Uuid::from_u128(1);
const OTHER: Uuid = Uuid::from_u128(2);
/// The draw that leaves a delay as it is.
const MIDDLE: f64 = 0.5;

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Faults of a cluster that was seen, and an instant to count from.
fn connected() -> (Faults, Instant) {
    let mut faults = Faults::default();
    let start = Instant::now();
    faults.brokers_up(1, start);
    (faults, start)
}

#[test]
fn a_topic_that_fails_rests_longer_each_time_up_to_a_minute() {
    let (mut faults, mut now) = connected();
    for expected in [1, 2, 4, 8, 16, 32, 60, 60] {
        assert!(matches!(faults.admit("t", None, now), Admission::Free | Admission::Probe));
        let parking = faults.failed("t", None, now, "kafka.unknown_topic: …", now, MIDDLE);
        assert_eq!(parking.pause, seconds(expected));
        assert_eq!(parking.is_new, expected == 1);
        let just_before = now + Duration::from_millis(expected * 1000 - 1);
        let held = Admission::Held { pause: Duration::from_millis(1), reason: "kafka.unknown_topic: …".into() };
        assert_eq!(faults.admit("t", None, just_before), held);
        assert_eq!(faults.admit("u", None, just_before), Admission::Free, "another topic is not concerned");
        now += seconds(expected);
    }
    assert!(faults.is_parked("t", None));
    assert!(faults.acked(ROW, "t", 0, now, now), "the first acknowledgement frees it");
    assert_eq!(faults.admit("t", None, now), Admission::Free);
    assert_eq!(faults.failed("t", None, now, "again", now, MIDDLE).pause, seconds(1), "and its past is forgotten");
}

#[test]
fn a_partition_fails_alone_and_its_topic_with_all_of_them() {
    let (mut faults, now) = connected();
    let held = |admission: Admission| matches!(admission, Admission::Held { .. });
    assert!(faults.failed("t", Some(3), now, "kafka.leader_not_available: …", now, MIDDLE).is_new);
    assert!(held(faults.admit("t", Some(3), now)));
    assert_eq!(faults.admit("t", Some(2), now), Admission::Free);
    assert_eq!(faults.admit("t", None, now), Admission::Free, "the topic as a whole is well");
    assert!(faults.is_parked("t", Some(3)) && !faults.is_parked("t", Some(2)) && !faults.is_parked("t", None));
    assert!(!faults.acked(ROW, "t", 2, now, now), "another partition's acknowledgement frees nothing");
    assert!(!faults.refused(ROW, "t", Some(2)));
    assert!(held(faults.admit("t", Some(3), now)));

    assert!(faults.failed("t", None, now, "kafka.topic_authorization_failed: …", now, MIDDLE).is_new);
    assert!(held(faults.admit("t", Some(2), now)) && held(faults.admit("t", None, now)));
    let parked = faults.parked();
    assert_eq!(parked.len(), 1);
    assert!(parked[0].reason.starts_with("kafka.topic_authorization_failed"), "{parked:?}");
    assert!(faults.acked(ROW, "t", 2, now, now), "it frees the topic, and not the other partition");
    assert!(held(faults.admit("t", Some(3), now)) && faults.parked()[0].reason.contains("leader"));

    let due = now + seconds(1);
    assert_eq!(faults.admit("t", Some(3), due), Admission::Probe);
    assert!(held(faults.admit("t", Some(3), due)));
    faults.release("t", Some(3));
    assert_eq!(faults.admit("t", Some(3), due), Admission::Probe);
    assert!(faults.acked(ROW, "t", 3, due, due));
    assert_eq!(faults.parked(), []);
}

/// librdkafka would choose a parked one as well.
#[test]
fn a_record_without_a_key_keeps_clear_of_parked_partitions_and_probes_those_that_are_due() {
    let (mut faults, now) = connected();
    assert_eq!(faults.choose("t", 3, now, MIDDLE), None, "nothing is parked");
    faults.failed("t", Some(1), now, "kafka.leader_not_available: …", now, MIDDLE);
    let choices = |faults: &Faults, at| [0.0, 0.4, 0.6, 0.999].map(|draw| faults.choose("t", 3, at, draw));
    assert_eq!(choices(&faults, now), [Some(0), Some(0), Some(2), Some(2)]);
    assert_eq!(faults.choose("u", 3, now, MIDDLE), None, "another topic is not concerned");
    let due = now + seconds(1);
    assert_eq!(choices(&faults, due), [Some(1); 4], "it is due");
    assert_eq!(faults.admit("t", Some(1), due), Admission::Probe);
    assert_eq!(choices(&faults, due), [Some(0), Some(0), Some(2), Some(2)], "it is being probed");
    faults.release("t", Some(1));

    // All of them: the one whose turn is next says why, and how long to wait.
    faults.failed("t", Some(0), now, "kafka.leader_not_available: …", now, 0.9);
    faults.failed("t", Some(2), now, "kafka.leader_not_available: …", now, 0.9);
    assert_eq!(choices(&faults, now), [Some(1); 4]);
    assert!(faults.is_partly_parked("t") && !faults.is_partly_parked("u"));
    // Made anew with one partition, and so without the others.
    faults.has_partitions("t", 1);
    assert_eq!(faults.choose("t", 1, now, MIDDLE), Some(0));
    assert!(!faults.is_parked("t", Some(2)));
    faults.has_partitions("t", 0);
    assert_eq!(faults.parked(), []);
}

#[test]
fn what_no_row_waits_for_any_more_is_forgotten() {
    let (mut faults, now) = connected();
    faults.failed("t", None, now, "kafka.unknown_topic: …", now, MIDDLE);
    faults.failed("u", Some(4), now, "kafka.leader_not_available: …", now, MIDDLE);
    let due = now + seconds(1);
    faults.forget_unwanted(now + UNWANTED_AFTER);
    assert_eq!(faults.parked().len(), 2);
    assert_eq!(faults.admit("u", Some(4), due), Admission::Probe);
    faults.forget_unwanted(due + UNWANTED_AFTER);
    assert_eq!(faults.parked()[0].topic, "u", "its probe is under way");
    faults.release("u", Some(4));
    faults.forget_unwanted(due + UNWANTED_AFTER);
    assert_eq!(faults.parked(), []);
}

#[test]
fn how_long_a_fault_has_lasted_counts_from_its_first_failure() {
    let (mut faults, start) = connected();
    for second in [0, 5, 20] {
        let now = start + seconds(second);
        faults.failed("t", Some(0), now, "x", now, MIDDLE);
        assert_eq!(faults.parked_since("t", Some(0)), Some(start));
    }
    assert_eq!(faults.parked_since("t", Some(1)), None);
    faults.acked(ROW, "t", 0, start, start);
    assert_eq!(faults.parked_since("t", Some(0)), None);
}

#[test]
fn a_partition_is_mute_when_it_acknowledged_nothing_in_the_latter_half_of_a_wait() {
    let (mut faults, start) = connected();
    let end = start + seconds(30);
    assert!(faults.is_mute("t", 0, start, end));
    faults.acked(OTHER, "t", 0, start, start + seconds(14));
    assert!(faults.is_mute("t", 0, start, end));
    faults.acked(OTHER, "t", 1, start, start + seconds(16));
    assert!(faults.is_mute("t", 0, start, end));
    faults.acked(OTHER, "t", 0, start, start + seconds(16));
    assert!(!faults.is_mute("t", 0, start, end));
}

#[test]
fn the_rest_of_a_topic_is_jittered() {
    let (mut faults, now) = connected();
    // The first rest cannot be shortened below the initial delay.
    assert_eq!(faults.failed("low", None, now, "x", now, 0.0).pause, seconds(1));
    assert_eq!(faults.failed("high", None, now, "x", now, 0.999).pause.as_millis(), 1199);
}

#[test]
fn one_head_probes_a_topic_that_is_due() {
    let (mut faults, now) = connected();
    faults.failed("t", None, now, "x", now, MIDDLE);
    let due = now + seconds(1);
    assert_eq!(faults.admit("t", None, due), Admission::Probe);
    for _ in 0..3 {
        assert!(matches!(faults.admit("t", None, due), Admission::Held { pause, .. } if pause >= seconds(1)));
    }
    faults.release("t", None);
    assert_eq!(faults.admit("t", None, due), Admission::Probe, "a probe that said nothing leaves its turn to the next");
    assert_eq!(faults.failed("t", None, due, "x", due, MIDDLE).pause, seconds(2));
    assert!(matches!(faults.admit("t", None, due + seconds(1)), Admission::Held { .. }));
    assert_eq!(faults.admit("t", None, due + seconds(2)), Admission::Probe);
    assert!(faults.refused(ROW, "t", None), "a verdict on the record shows that the topic works");
    assert_eq!(faults.admit("t", None, due + seconds(2)), Admission::Free);
}

#[test]
fn records_that_were_on_their_way_together_fail_once() {
    let (mut faults, handed_over) = connected();
    let failed = handed_over + seconds(5);
    for _ in 0..100 {
        faults.failed("t", None, handed_over, "x", failed, MIDDLE);
    }
    assert_eq!(faults.admit("t", None, failed + seconds(1)), Admission::Probe);
}

#[test]
fn silence_while_nothing_was_acknowledged_is_unclear_or_the_cluster_s() {
    let (mut faults, start) = connected();
    let later = start + seconds(30);
    assert_eq!(faults.silent("t", start, later), Silence::Unclear);
    faults.brokers_up(0, later);
    assert_eq!(faults.silent("t", start, later), Silence::Cluster);
    faults.brokers_up(3, later);
    assert_eq!(faults.silent("t", start, later), Silence::Unclear);
    assert_eq!(Faults::default().silent("t", start, later), Silence::Cluster, "no broker ever answered");
}

#[test]
fn silence_while_another_topic_was_acknowledged_is_the_topic_s() {
    let (mut faults, start) = connected();
    let later = start + seconds(30);
    faults.acked(OTHER, "elsewhere", 0, start, start + seconds(14));
    assert_eq!(faults.silent("t", start, later), Silence::Unclear, "an outage may have begun since");
    faults.acked(OTHER, "elsewhere", 0, start, start + seconds(16));
    assert_eq!(faults.silent("t", start, later), Silence::Topic);
    faults.brokers_up(0, later);
    assert_eq!(faults.silent("t", start, later), Silence::Cluster, "what is known to be away explains it");
}

#[test]
fn silence_while_its_topic_was_acknowledged_is_the_partition_s() {
    let (mut faults, start) = connected();
    faults.acked(OTHER, "t", 0, start, start + seconds(16));
    assert_eq!(faults.silent("t", start, start + seconds(30)), Silence::Partition);
}

#[test]
fn the_third_silence_alone_is_the_row_s() {
    let (mut faults, mut now) = connected();
    for time in 1..=SILENCES_MAX {
        // A record that came later was acknowledged.
        faults.acked(OTHER, "t", 4, now + seconds(1), now + seconds(2));
        let rest = faults.suspect(ROW, "t", 4, now, now + seconds(30), MIDDLE);
        let expected = if time < SILENCES_MAX { Some(seconds(1 << (time - 1))) } else { None };
        assert_eq!(rest, expected);
        now += seconds(60);
    }
    assert_eq!(faults.admit("t", None, now), Admission::Free, "the topic was never parked");
    faults.acked(OTHER, "t", 4, now + seconds(1), now + seconds(2));
    assert_eq!(faults.suspect(ROW, "t", 4, now, now + seconds(30), MIDDLE), Some(seconds(1)), "and it starts anew");
}

/// A record that holds its partition up lets nothing pass while it waits, only between its tries.
#[test]
fn a_row_that_blocks_its_partition_is_found_out_too() {
    let (mut faults, mut now) = connected();
    let mut tries = 0;
    loop {
        tries += 1;
        let rest = faults.suspect(ROW, "t", 0, now, now + seconds(30), MIDDLE);
        faults.acked(OTHER, "t", 0, now + seconds(31), now + seconds(32));
        now += seconds(60);
        if rest.is_none() {
            break;
        }
    }
    assert_eq!(tries, SILENCES_MAX + 1, "before its first try there is nothing to compare with");
}

#[test]
fn a_slow_partition_makes_no_row_suspect() {
    let (mut faults, mut now) = connected();
    for time in 0..10 {
        // It acknowledges all the time, but only what came before.
        let (other_at, row_at, end) = (now, now + seconds(1), now + seconds(30));
        faults.acked(OTHER, "t", 4, other_at, end);
        assert_eq!(faults.suspect(ROW, "t", 4, row_at, end, MIDDLE), Some(seconds((1 << time).min(60))));
        now = end;
    }
}

#[test]
fn silence_of_another_partition_makes_no_row_suspect() {
    let (mut faults, mut now) = connected();
    for time in 0..10 {
        faults.acked(OTHER, "t", 4, now + seconds(1), now + seconds(2));
        for partition in [5, -1] {
            let row = Uuid::from_u128(100 + u128::from(partition == 5));
            let rest = faults.suspect(row, "t", partition, now, now + seconds(30), MIDDLE);
            assert_eq!(rest, Some(seconds((1 << time).min(60))));
        }
        now += seconds(60);
    }
}

#[test]
fn an_acknowledgement_clears_a_suspect() {
    let (mut faults, mut now) = connected();
    for _ in 0..10 {
        for _ in 1..SILENCES_MAX {
            faults.acked(OTHER, "t", 0, now + seconds(1), now + seconds(2));
            assert!(faults.suspect(ROW, "t", 0, now, now + seconds(30), MIDDLE).is_some());
            now += seconds(60);
        }
        faults.acked(ROW, "t", 0, now, now);
    }
}

#[test]
fn the_problem_says_what_stands_against_publishing() {
    let mut faults = Faults::default();
    let start = Instant::now();
    let begins = |faults: &Faults, now: Instant, word: &str| {
        let problem = faults.problem(now).expect("a problem");
        assert!(problem.starts_with(word), "{problem}");
    };
    begins(&faults, start, "kafka.not_connected: client: no broker has answered yet: check [kafka] brokers");
    faults.connection_failed("kafka.authentication_failed: wrong password".into());
    begins(&faults, start, "kafka.not_connected: client: no broker has answered yet: kafka.authentication_failed");
    faults.brokers_up(0, start);
    begins(&faults, start, "kafka.unreachable: client: no broker is up: kafka.authentication_failed");
    faults.brokers_up(1, start);
    assert_eq!(faults.problem(start), None);
    // A broker that closes an idle connection is no outage.
    faults.brokers_up(0, start);
    assert_eq!(faults.problem(start + DOWN_GRACE.mul_f64(0.99)), None);
    begins(&faults, start + DOWN_GRACE, "kafka.unreachable: ");
    faults.answered();
    assert_eq!(faults.problem(start + DOWN_GRACE), None);
    assert!(faults.cluster_failed("kafka.invalid_timestamp: …"), "news");
    assert!(!faults.cluster_failed("kafka.invalid_timestamp: …"), "no news");
    faults.brokers_up(1, start);
    begins(&faults, start, "kafka.invalid_timestamp: ");
    faults.acked(ROW, "t", 0, start, start);
    assert_eq!(faults.problem(start), None);
}

#[test]
fn everything_remembered_is_bounded() {
    let (mut faults, start) = connected();
    for number in 0..(PARKED_MAX as u64 + 50) {
        let now = start + Duration::from_millis(number);
        faults.failed(&format!("t{number}"), None, now, "x", now, MIDDLE);
    }
    assert_eq!(faults.parked().len(), PARKED_MAX);
    assert!(!faults.is_parked("t0", None) && faults.is_parked("t50", None), "the one that is due first goes first");
    for number in 0..(TOPICS_MAX as u64 + 50) {
        faults.acked(ROW, &format!("t{number}"), 0, start, start + Duration::from_millis(number));
    }
    assert!(!faults.is_familiar("t49") && faults.is_familiar("t50"));
    // A row that was forgotten needs three silences again: it is late, never wrong.
    let later = start + seconds(100);
    faults.acked(OTHER, "t", 0, later, later);
    for _ in 1..SILENCES_MAX {
        faults.suspect(ROW, "t", 0, start, start, MIDDLE);
    }
    for number in 0..SUSPECTS_MAX as u128 {
        faults.suspect(Uuid::from_u128(1_000 + number), "t", 0, start, start + seconds(1), MIDDLE);
    }
    assert!(faults.suspect(ROW, "t", 0, start, start + seconds(2), MIDDLE).is_some());
}
