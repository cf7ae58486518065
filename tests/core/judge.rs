//! The demo's judge must be able to say no, and to say what is wrong.

use keiro_relay::cli::demo::judge::{Committed, Evidence, Fate, Judgement, Record, TableRow, judge};
use keiro_relay::domain::policy::Policy;

/// Evidence of one source: rows a1, b1, a2 (with keys a, b, a) of policy `policy`, all sent and on partition 0 in order.
fn fine(policy: Policy) -> Evidence {
    let rows = [("m1", "a"), ("m2", "b"), ("m3", "a")];
    Evidence {
        sources: vec![("s".to_owned(), policy)],
        committed: rows
            .iter()
            .map(|(id, _)| Committed {
                source: "s".to_owned(),
                message_id: (*id).to_owned(),
                digest: 1,
                fate: Fate::Sent,
            })
            .collect(),
        rolled_back: ["ghost".to_owned()].into(),
        table: rows
            .iter()
            .map(|(id, key)| TableRow {
                source: "s".to_owned(),
                message_id: (*id).to_owned(),
                topic: "t".to_owned(),
                key: Some((*key).to_owned()),
                status: "sent".to_owned(),
                reason: None,
            })
            .collect(),
        records: rows
            .iter()
            .zip(0..)
            .map(|((id, key), offset)| Record {
                topic: "t".to_owned(),
                partition: 0,
                offset,
                appended_ms: Some(1000 + offset),
                message_id: (*id).to_owned(),
                key: Some(key.as_bytes().to_vec()),
                digest: 1,
            })
            .collect(),
        one_clock: true,
    }
}

/// The one problem of a judgement.
#[track_caller]
fn problem(judgement: &Judgement) -> &str {
    assert_eq!(judgement.problems.len(), 1, "{:?}", judgement.problems);
    &judgement.problems[0]
}

#[test]
fn what_is_right_is_right_under_every_policy() {
    for policy in Policy::ALL {
        let judgement = judge(&fine(policy));
        assert_eq!(judgement.problems, [""; 0], "{policy}");
        let figures = &judgement.sources[0];
        assert_eq!((figures.rows, figures.sent, figures.duplicates, figures.order_violations), (3, 3, 0, 0));
        assert_eq!((figures.first_ms, figures.last_ms), (Some(1000), Some(1002)));
    }
}

#[test]
fn a_missing_record_is_seen() {
    let mut evidence = fine(Policy::BestEffort);
    evidence.records.remove(1);
    let judgement = judge(&evidence);
    assert_eq!(problem(&judgement), "rows committed and on no topic: 1 (m2 of s for t)");
    assert_eq!(judgement.sources[0].missing, 1);
}

#[test]
fn a_duplicate_is_counted_and_no_problem() {
    let mut evidence = fine(Policy::PerSourceStream);
    let again = Record { offset: 3, ..evidence.records[0].clone() };
    evidence.records.push(again);
    let judgement = judge(&evidence);
    assert_eq!(judgement.problems, [""; 0]);
    assert_eq!(judgement.sources[0].duplicates, 1);
}

#[test]
fn overtaking_is_seen_where_the_policy_has_an_order() {
    // m2 (key b) after m3 (key a).
    let swapped = |policy| {
        let mut evidence = fine(policy);
        for (record, offset) in evidence.records.iter_mut().zip([0, 2, 1]) {
            (record.offset, record.appended_ms) = (offset, Some(1000 + offset));
        }
        judge(&evidence)
    };
    for policy in [Policy::PerKeyHeadOfLine, Policy::BestEffort] {
        assert_eq!(swapped(policy).problems, [""; 0], "{policy}: other keys may overtake");
    }
    for policy in [Policy::PerSourceStream, Policy::StopTheLine] {
        let judgement = swapped(policy);
        assert_eq!(judgement.sources[0].order_violations, 1);
        assert!(
            problem(&judgement).starts_with("rows later on Kafka than a row behind them: 1 (m3 of s"),
            "{judgement:?}"
        );
    }
    // m3 before m1, which has the same key.
    let mut evidence = fine(Policy::PerKeyHeadOfLine);
    for (record, offset) in evidence.records.iter_mut().zip([2, 1, 0]) {
        (record.offset, record.appended_ms) = (offset, Some(1000 + offset));
    }
    assert_eq!(judge(&evidence).sources[0].order_violations, 1);
}

#[test]
fn overtaking_across_topics_is_seen_by_one_clock_only() {
    let mut evidence = fine(Policy::StopTheLine);
    // The second row goes to a topic of its own, appended before the first.
    evidence.table[1].topic = "other".to_owned();
    let record = &mut evidence.records[1];
    (record.topic, record.offset, record.appended_ms) = ("other".to_owned(), 0, Some(990));
    assert_eq!(judge(&evidence).sources[0].order_violations, 1);
    evidence.one_clock = false;
    assert_eq!(judge(&evidence).problems, [""; 0]);
}

#[test]
fn strangers_are_seen() {
    let mut evidence = fine(Policy::BestEffort);
    let ghost = Record { message_id: "ghost".to_owned(), offset: 9, ..evidence.records[0].clone() };
    evidence.records.push(ghost);
    let judgement = judge(&evidence);
    assert_eq!(problem(&judgement), "records of rows that were rolled back: 1 (ghost on t [0] at 9)");
    assert_eq!(judgement.unexpected, 1);

    let mut evidence = fine(Policy::BestEffort);
    let unknown = Record { message_id: "x".to_owned(), offset: 9, ..evidence.records[0].clone() };
    evidence.records.push(unknown);
    assert_eq!(problem(&judge(&evidence)), "records of no row that was committed: 1 (x on t [0] at 9)");

    let mut evidence = fine(Policy::BestEffort);
    let row = TableRow { message_id: "x".to_owned(), ..evidence.table[0].clone() };
    evidence.table.push(row);
    assert_eq!(problem(&judge(&evidence)), "rows in the table that nobody committed: 1 (x)");
}

#[test]
fn a_row_that_is_gone_from_the_table_is_seen() {
    let mut evidence = fine(Policy::BestEffort);
    evidence.table.remove(0);
    let judgement = judge(&evidence);
    // Its record cannot be explained by the table any more.
    assert_eq!(judgement.problems.len(), 2, "{judgement:?}");
    assert!(judgement.problems.contains(&"rows committed and not in the table: 1 (m1)".to_owned()));
}

#[test]
fn a_record_with_another_key_value_or_topic_is_seen() {
    let changes: [fn(&mut Record); 4] = [
        |record| record.key = None,
        |record| record.key = Some(b"b".to_vec()),
        |record| record.digest = 2,
        |record| record.topic = "other".to_owned(),
    ];
    for change in changes {
        let mut evidence = fine(Policy::BestEffort);
        change(&mut evidence.records[0]);
        let judgement = judge(&evidence);
        assert!(problem(&judgement).contains("m1 on "), "{judgement:?}");
    }
}

#[test]
fn a_rejected_row_must_be_rejected_for_its_reason_and_on_no_topic() {
    let rejected = || {
        let mut evidence = fine(Policy::PerKeyHeadOfLine);
        evidence.committed[1].fate = Fate::Rejected("kafka.message_too_large");
        evidence.table[1].status = "rejected".to_owned();
        evidence.table[1].reason = Some("kafka.message_too_large".to_owned());
        evidence
    };
    let mut evidence = rejected();
    assert_eq!(problem(&judge(&evidence)), "records of rows that no topic should have taken: 1 (m2 on t [0] at 1)");
    evidence.records.remove(1);
    let judgement = judge(&evidence);
    assert_eq!(judgement.problems, [""; 0]);
    assert_eq!((judgement.sources[0].sent, judgement.sources[0].rejected), (2, 1));
    evidence.table[1].reason = Some("kafka.invalid_record".to_owned());
    assert!(problem(&judge(&evidence)).contains("another status"));
    // And a row that should have been sent may be neither rejected nor waiting.
    for status in ["rejected", "dead", "failed", "pending", "publishing"] {
        let mut evidence = fine(Policy::PerKeyHeadOfLine);
        evidence.table[0].status = status.to_owned();
        assert!(problem(&judge(&evidence)).contains(&format!("m1 of s is {status}")), "{status}");
    }
}
