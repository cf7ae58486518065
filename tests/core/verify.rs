//! Sent rows against records: every small case of one lane, and what hides a row.

use std::collections::HashMap;

use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::policy::Policy;
use keiro_relay::domain::verify::{Finding, Ledger, Memory, SeenRecord, SentRow, Verdict};
use uuid::Uuid;

fn id(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

fn ledger(rows: &[(u128, Option<&str>)], policy: Option<Policy>) -> Ledger {
    let mut ledger = Ledger::default();
    for (n, key) in rows {
        let message_id = format!("m{n}");
        let row = SentRow {
            position: Position { created_at: PgTime(7), outbox_id: id(*n) },
            published_at: PgTime(1_000 + i64::try_from(*n).expect("a small number")),
            source: "s",
            topic: "t",
            message_id: &message_id,
            key: *key,
        };
        ledger.add(&row, policy);
    }
    ledger
}

fn see(ledger: &mut Ledger, n: u128, partition: i32, offset: i64) -> bool {
    ledger.see(&SeenRecord { topic: "t", source: "s", message_id: &format!("m{n}"), partition, offset })
}

fn judged(ledger: Ledger) -> Verdict {
    ledger.judge(&HashMap::new(), 100)
}

/// Every sequence of up to six records of three rows of one lane: the counts are those of a direct reading of the rule.
#[test]
fn every_small_topic_of_one_lane() {
    let mut sequences = vec![Vec::new()];
    for length in 1..=6_u32 {
        for code in 0..3_usize.pow(length) {
            sequences.push((0..length).map(|place| (code / 3_usize.pow(place) % 3) as u128).collect());
        }
    }
    for sequence in sequences {
        let mut ledger = ledger(&[(0, Some("k")), (1, Some("k")), (2, Some("k"))], Some(Policy::PerKeyHeadOfLine));
        for (offset, n) in (0_i64..).zip(&sequence) {
            assert!(see(&mut ledger, *n, 0, offset));
        }
        let verdict = judged(ledger);
        let first = |n: u128| sequence.iter().position(|seen| *seen == n);
        let times = |n: u128| sequence.iter().filter(|seen| **seen == n).count();
        let overtaken =
            |n: u128| first(n).is_some_and(|at| (0..n).any(|earlier| first(earlier).is_some_and(|e| e > at)));
        let count = |is: &dyn Fn(u128) -> bool| (0..3).filter(|n| is(*n)).count() as u64;
        assert_eq!(verdict.missing, count(&|n| first(n).is_none()), "{sequence:?}");
        assert_eq!(verdict.found, count(&|n| first(n).is_some()), "{sequence:?}");
        assert_eq!(verdict.duplicated, count(&|n| times(n) > 1), "{sequence:?}");
        assert_eq!(verdict.out_of_order, count(&overtaken), "{sequence:?}: {verdict:?}");
    }
}

#[test]
fn lanes_are_those_of_the_policy() {
    // Row 1 is before row 0, of another key.
    for (policy, keys, out_of_order) in [
        (Some(Policy::PerKeyHeadOfLine), [Some("a"), Some("a")], 1),
        (Some(Policy::PerKeyHeadOfLine), [Some("a"), Some("b")], 0),
        (Some(Policy::PerKeyHeadOfLine), [Some(""), Some("")], 1),
        (Some(Policy::PerKeyHeadOfLine), [None, None], 0),
        (Some(Policy::PerSourceStream), [Some("a"), None], 1),
        (Some(Policy::StopTheLine), [Some("a"), Some("b")], 1),
        (Some(Policy::BestEffort), [Some("a"), Some("a")], 0),
        (None, [Some("a"), Some("a")], 0),
    ] {
        let rows = [(0, keys[0]), (1, keys[1])];
        let mut same_partition = ledger(&rows, policy);
        see(&mut same_partition, 1, 0, 5);
        see(&mut same_partition, 0, 0, 6);
        assert_eq!(judged(same_partition).out_of_order, out_of_order, "{policy:?} {keys:?}");
        // Offsets of two partitions say nothing.
        let mut two_partitions = ledger(&rows, policy);
        see(&mut two_partitions, 1, 0, 5);
        see(&mut two_partitions, 0, 1, 6);
        assert_eq!(judged(two_partitions).out_of_order, 0, "{policy:?} {keys:?}");
    }
}

#[test]
fn a_row_is_found_by_topic_source_and_message_id_together() {
    let mut ledger = ledger(&[(0, None)], None);
    for (topic, source, message_id) in
        [("t2", "s", "m0"), ("t", "s2", "m0"), ("t", "s", "m"), ("ts", "", "m0"), ("t", "sm", "0")]
    {
        let record = SeenRecord { topic, source, message_id, partition: 0, offset: 0 };
        assert!(!ledger.see(&record), "{record:?}");
    }
    assert!(see(&mut ledger, 0, 3, 9));
    assert_eq!((judged(ledger).found), 1);
}

#[test]
fn what_a_topic_may_have_forgotten_is_not_missing() {
    let rows = [(0, None), (1, None), (2, None)];
    for (memory, missing, unjudged) in [
        (Memory::default(), 3, 0),
        (Memory { compacted: true, forgotten_until: None }, 0, 3),
        (Memory { compacted: false, forgotten_until: Some(PgTime(1_001)) }, 1, 2),
    ] {
        let verdict = ledger(&rows, None).judge(&HashMap::from([("t".to_owned(), memory)]), 1);
        assert_eq!((verdict.missing, verdict.unjudged), (missing, unjudged), "{memory:?}");
        // All are counted, the first of each kind is named.
        let named: Vec<_> = verdict.findings.iter().map(|(id, _)| *id).collect();
        match (missing, unjudged) {
            (3, 0) | (0, 3) => assert_eq!(named, [id(0)]),
            _ => assert_eq!(verdict.findings, [(id(0), Finding::Unjudged), (id(2), Finding::Missing)]),
        }
    }
}
