//! Every small batch through `plan` and `partition`, against a plain reading of contract §2, §3 and design §3.
//!
//! The reference below knows no lanes, pivots or indexes: it asks of each row what the contract says of it, from the contract's
//! own words, by looking at all earlier rows.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use keiro_relay::domain::backoff::{Backoff, BackoffKind};
use keiro_relay::domain::message::{Message, PgTime};
use keiro_relay::domain::outcome::{Blame, Outcome, Rejection, Setback};
use keiro_relay::domain::plan::{Plan, Settlement, Verdict, partition, plan};
use keiro_relay::domain::policy::{OnHalt, Policy, SourceRules};
use uuid::Uuid;

const MAX_ATTEMPTS: u32 = 3;
const DRAW: f64 = 0.75;
const PAUSE: Duration = Duration::from_millis(7_250);

/// One row of a case: its key, whether this is its last attempt, and which of [`outcomes`] the publisher returned.
#[derive(Debug, Clone, Copy)]
struct Row {
    key: Option<&'static str>,
    last_attempt: bool,
    outcome: usize,
}

/// Every outcome there is, and none.
fn outcomes() -> Vec<Option<Outcome>> {
    let blames = [Blame::Row, Blame::Topic, Blame::Cluster, Blame::Stop, Blame::Lane];
    let setback = |what: &str, blame| Setback { blame, error: format!("kafka.{what}: {blame:?}"), pause: PAUSE };
    let mut all = vec![
        Some(Outcome::Acked { partition: 1, offset: 2, maybe_twice: false }),
        Some(Outcome::Acked { partition: 1, offset: 3, maybe_twice: true }),
        Some(Outcome::Rejected(Rejection { code: "kafka.message_too_large".into(), detail: "too large".into() })),
        Some(Outcome::Failed { error: "kafka.odd: what now".into() }),
        None,
    ];
    all.extend(blames.map(|blame| Some(Outcome::Unknown(setback("unknown", blame)))));
    all.extend(blames.map(|blame| Some(Outcome::NotSent(setback("not_sent", blame)))));
    all
}

fn rules(policy: Policy, on_halt: OnHalt) -> SourceRules {
    let backoff = Backoff {
        kind: BackoffKind::Exponential,
        initial: Duration::from_secs(1),
        multiplier: 2.0,
        max: Duration::from_secs(60),
        jitter: 0.2,
    };
    SourceRules { policy, on_halt, max_attempts: MAX_ATTEMPTS, backoff }
}

fn every_rule() -> Vec<SourceRules> {
    let halts = [OnHalt::Retry, OnHalt::Hold];
    Policy::ALL.into_iter().flat_map(|policy| halts.map(|on_halt| rules(policy, on_halt))).collect()
}

/// `on_halt` matters on one policy only; that it does not on others is enumerated for small batches.
fn distinct_rules() -> Vec<SourceRules> {
    every_rule().into_iter().filter(|r| r.on_halt == OnHalt::Retry || r.policy == Policy::StopTheLine).collect()
}

fn outbox_id(index: usize) -> Uuid {
    Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 + index as u128)
}

fn attempts(row: Row) -> i64 {
    if row.last_attempt { i64::from(MAX_ATTEMPTS) } else { i64::from(MAX_ATTEMPTS) - 1 }
}

fn message(index: usize, row: Row) -> Message {
    Message {
        outbox_id: outbox_id(index),
        message_id: String::new(),
        source_name: String::new(),
        destination: String::new(),
        message_key: row.key.map(str::to_owned),
        event_type: String::new(),
        schema_version: 1,
        content_type: String::new(),
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
        payload: Bytes::new(),
        payload_withheld: None,
        attributes: None,
        occurred_at: PgTime(0),
        attempt_count: attempts(row),
        last_error: None,
        created_at: PgTime(0),
        updated_at: PgTime(0),
    }
}

// ---- The reference -------------------------------------------------------------------------------------------------------

/// §3: must `later` reach the broker after `earlier`?
fn ordered(policy: Policy, earlier: Row, later: Row) -> bool {
    match policy {
        // "every earlier row with the same (source, message_key)"; "a null key bypasses".
        Policy::PerKeyHeadOfLine => earlier.key.is_some() && earlier.key == later.key,
        // "of the same source, any key or none".
        Policy::PerSourceStream => true,
        // "nothing of the source moves while a row of it is failing, null keys included".
        Policy::StopTheLine => true,
        // "no condition".
        Policy::BestEffort => false,
    }
}

/// What the table must show of a row afterwards.
#[derive(Debug, PartialEq)]
enum Expected {
    Sent,
    Rejected(Rejection),
    Failed {
        error: String,
    },
    Held {
        error: String,
    },
    Dead {
        error: String,
    },
    /// Attempt returned, due now, `skipped: …`.
    Skipped,
    Returned {
        error: String,
        pause: Duration,
    },
}

/// What a row's own outcome means while nothing earlier stands in its way.
fn on_its_own(rules: &SourceRules, row: Row, outcome: &Option<Outcome>) -> Expected {
    let spend = |error: &str| {
        let error = error.to_owned();
        if rules.policy == Policy::StopTheLine && rules.on_halt == OnHalt::Hold {
            // Design §4: held until somebody resumes it; "it never dies".
            Expected::Held { error }
        } else if attempts(row) < i64::from(MAX_ATTEMPTS) {
            Expected::Failed { error }
        } else {
            Expected::Dead { error }
        }
    };
    match outcome {
        None => spend("publisher returned no outcome"),
        Some(Outcome::Acked { .. }) => Expected::Sent,
        Some(Outcome::Rejected(rejection)) => Expected::Rejected(rejection.clone()),
        Some(Outcome::Failed { error }) => spend(error),
        // Design §3, "Whose fault?": returned when it is the topic's, the cluster's or our stop's; a stopped row is due now.
        Some(Outcome::Unknown(s) | Outcome::NotSent(s)) => match s.blame {
            Blame::Topic | Blame::Cluster => Expected::Returned { error: s.error.clone(), pause: s.pause },
            Blame::Stop => Expected::Returned { error: s.error.clone(), pause: Duration::ZERO },
            // Nothing earlier stands in the way, so a row that is said to wait for its lane has failed for itself.
            Blame::Row | Blame::Lane => spend(&s.error),
        },
    }
}

/// §3: rows are judged in order; a row behind one that is neither sent nor rejected is skipped.
fn reference(rules: &SourceRules, rows: &[Row], outcomes: &[Option<Outcome>]) -> Vec<Expected> {
    let mut expected: Vec<Expected> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        let blocked = (0..index).any(|earlier| {
            ordered(rules.policy, rows[earlier], *row)
                && !matches!(expected[earlier], Expected::Sent | Expected::Rejected(_))
        });
        expected.push(if blocked { Expected::Skipped } else { on_its_own(rules, *row, &outcomes[index]) });
    }
    expected
}

// ---- The comparison ------------------------------------------------------------------------------------------------------

fn same(expected: &Expected, actual: &Verdict, row: Row, earlier: &[Row], rules: &SourceRules) -> bool {
    match (expected, actual) {
        (Expected::Sent, Verdict::Sent) => true,
        (Expected::Rejected(expected), Verdict::Rejected(actual)) => expected == actual,
        (Expected::Failed { error: expected }, Verdict::Failed { error, delay }) => {
            // 1 s × 2^(attempt − 1) × (1 − 0.2 + 0.4 × 0.75), far from both bounds.
            let seconds = f64::from(1 << (attempts(row) - 1)) * 1.1;
            expected == error && (delay.as_secs_f64() - seconds).abs() < 1e-6
        }
        (Expected::Held { error: expected }, Verdict::Held { error }) => expected == error,
        (Expected::Dead { error: expected }, Verdict::Dead { error }) => expected == error,
        (Expected::Returned { error: expected, pause: wait }, Verdict::Returned { error, pause }) => {
            expected == error && wait == pause
        }
        // The text names the row that it waits for: an earlier one of its order.
        (Expected::Skipped, Verdict::Skipped { error }) => {
            error.starts_with("skipped: ")
                && (0..earlier.len()).any(|index| {
                    ordered(rules.policy, earlier[index], row) && error.contains(&outbox_id(index).to_string())
                })
        }
        _ => false,
    }
}

/// Checks one case; panics with the whole of it when it does not hold.
fn check(rules: &SourceRules, rows: &[Row], messages: &[Message], plan: &Plan, outcomes: &[Option<Outcome>]) {
    let expected = reference(rules, rows, outcomes);
    let Settlement { verdicts, overtaken, duplicates_possible } = partition(plan, messages, outcomes, rules, || DRAW);
    let holds = verdicts.len() == rows.len()
        && (0..rows.len()).all(|i| same(&expected[i], &verdicts[i], rows[i], &rows[..i], rules))
        // Acknowledged behind one that did not get through.
        && overtaken
            == (0..rows.len())
                .filter(|&i| expected[i] == Expected::Skipped && matches!(outcomes[i], Some(Outcome::Acked { .. })))
                .count()
        // Not sent for the table, but nobody can say that it is not on the topic; or there twice already.
        && duplicates_possible
            == (0..rows.len())
                .filter(|&i| {
                    expected[i] != Expected::Sent
                        && matches!(outcomes[i], None | Some(Outcome::Acked { .. } | Outcome::Unknown(_)))
                })
                .count()
                + outcomes.iter().filter(|o| matches!(o, Some(Outcome::Acked { maybe_twice: true, .. }))).count();
    assert!(
        holds,
        "{rules:?}\nrows {rows:?}\noutcomes {outcomes:?}\nplan {plan:?}\nexpected {expected:?}\n\
         got {verdicts:?}, overtaken {overtaken}, duplicates possible {duplicates_possible}"
    );
}

/// Every choice of `n` out of `options`, in order, with repetition.
fn product<T: Copy>(options: &[T], n: usize) -> Vec<Vec<T>> {
    (0..n).fold(vec![Vec::new()], |all, _| {
        all.into_iter()
            .flat_map(|chosen: Vec<T>| {
                options.iter().map(move |option| chosen.iter().copied().chain([*option]).collect())
            })
            .collect()
    })
}

/// Every assignment of two keys (one of them empty: an empty string is a key) and none to `n` rows, up to swapping the keys.
fn every_keys(n: usize) -> Vec<Vec<Option<&'static str>>> {
    let mut all = product(&[None, Some(""), Some("b")], n);
    all.retain(|keys| keys.iter().flatten().next().is_none_or(|first| first.is_empty()));
    all
}

/// Checks `keys` × `masks` × every combination of the outcomes numbered `of`, on both cores of a small machine.
fn enumerate(all_rules: &[SourceRules], keys: &[Vec<Option<&'static str>>], masks: &[Vec<bool>], of: &[usize]) -> u64 {
    let outcomes: Arc<[Option<Outcome>]> = outcomes().into();
    let cases = AtomicU64::new(0);
    let halves: Vec<Vec<_>> = (0..2).map(|half| keys.iter().skip(half).step_by(2).collect()).collect();
    std::thread::scope(|scope| {
        for half in halves {
            let (outcomes, cases) = (Arc::clone(&outcomes), &cases);
            scope.spawn(move || {
                for keys in half {
                    let combinations = product(of, keys.len());
                    for mask in masks {
                        let rows: Vec<Row> =
                            (0..keys.len()).map(|i| Row { key: keys[i], last_attempt: mask[i], outcome: 0 }).collect();
                        let messages: Vec<Message> =
                            rows.iter().enumerate().map(|(index, row)| message(index, *row)).collect();
                        for rules in all_rules {
                            let plan = plan(rules.policy, &messages);
                            let mut rows = rows.clone();
                            for combination in &combinations {
                                for (row, outcome) in rows.iter_mut().zip(combination) {
                                    row.outcome = *outcome;
                                }
                                let given: Vec<_> = rows.iter().map(|row| outcomes[row.outcome].clone()).collect();
                                check(rules, &rows, &messages, &plan, &given);
                            }
                            cases.fetch_add(combinations.len() as u64, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    cases.into_inner()
}

fn all_outcomes() -> Vec<usize> {
    (0..outcomes().len()).collect()
}

#[test]
fn every_batch_of_up_to_three_rows_is_settled_as_the_contract_says() {
    let mut cases = 0;
    for n in 0..=2 {
        cases += enumerate(&every_rule(), &every_keys(n), &product(&[false, true], n), &all_outcomes());
    }
    // From three rows on `on_halt` is varied where it means something only.
    cases += enumerate(&distinct_rules(), &every_keys(3), &product(&[false, true], 3), &all_outcomes());
    println!("{cases} cases");
    assert!(cases > 1_500_000, "only {cases} cases");
}

#[test]
fn every_batch_of_four_rows_is_settled_as_the_contract_says() {
    // Whether an attempt is the last one only turns the row's own `failed` into `dead`; both hold back the lane alike. So the last
    // attempts are not multiplied with everything, only set in turn.
    let masks = [vec![false, true, false, true], vec![true, false, true, false]];
    let (per_key, others): (Vec<_>, Vec<_>) =
        distinct_rules().into_iter().partition(|rules| rules.policy == Policy::PerKeyHeadOfLine);
    // An acknowledgement is one, whether of the first hand-over or of a second.
    let all = outcomes();
    let of: Vec<_> = all_outcomes()
        .into_iter()
        .filter(|&o| !matches!(all[o], Some(Outcome::Acked { maybe_twice: true, .. })))
        .collect();
    let mut cases = enumerate(&per_key, &every_keys(4), &masks[..1], &of);
    // Keys mean nothing to the other policies (enumerated up to three rows): two assignments are enough.
    let keys = [vec![Some(""), None, Some("b"), Some("")], vec![None; 4]];
    cases += enumerate(&others, &keys, &masks, &of);
    println!("{cases} cases");
    assert!(cases > 1_500_000, "only {cases} cases");
}

#[test]
fn every_batch_of_five_rows_is_settled_as_the_contract_says_for_one_outcome_of_each_sort() {
    let all = outcomes();
    let sorts = [
        all.iter().position(|o| matches!(o, Some(Outcome::Acked { .. }))),
        all.iter().position(|o| matches!(o, Some(Outcome::Rejected(_)))),
        all.iter().position(|o| matches!(o, Some(Outcome::Failed { .. }))),
        all.iter().position(|o| matches!(o, Some(Outcome::NotSent(s)) if s.blame == Blame::Topic)),
    ]
    .map(|found| found.expect("listed above"));
    let cases = enumerate(&distinct_rules(), &every_keys(5), &[vec![false, true, false, true, false]], &sorts);
    println!("{cases} cases");
    assert!(cases > 500_000, "only {cases} cases");
}

#[test]
fn every_plan_keeps_the_order_of_the_policy_and_no_other() {
    for n in 0..=5 {
        for keys in every_keys(n) {
            let rows: Vec<Row> = keys.iter().map(|key| Row { key: *key, last_attempt: false, outcome: 0 }).collect();
            let messages: Vec<Message> = rows.iter().enumerate().map(|(index, row)| message(index, *row)).collect();
            for policy in Policy::ALL {
                let Plan { lanes } = plan(policy, &messages);
                let mut seen = BTreeSet::new();
                for lane in &lanes {
                    assert!(!lane.is_empty(), "{policy} {keys:?}: an empty lane in {lanes:?}");
                    assert!(lane.is_sorted(), "{policy} {keys:?}: claim order within a lane of {lanes:?}");
                    for index in lane {
                        assert!(seen.insert(*index), "{policy} {keys:?}: row {index} twice in {lanes:?}");
                    }
                }
                assert_eq!(seen.len(), n, "{policy} {keys:?}: a row is missing in {lanes:?}");
                for later in 0..n {
                    for earlier in 0..later {
                        let together = lanes.iter().any(|lane| lane.contains(&earlier) && lane.contains(&later));
                        assert_eq!(
                            together,
                            ordered(policy, rows[earlier], rows[later]),
                            "{policy} {keys:?}: rows {earlier} and {later} in {lanes:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
#[should_panic(expected = "one outcome slot per claimed row")]
fn outcomes_that_do_not_belong_to_the_rows_are_our_bug() {
    let row = Row { key: None, last_attempt: false, outcome: 0 };
    let messages = [message(0, row)];
    let rules = rules(Policy::BestEffort, OnHalt::Retry);
    partition(&plan(rules.policy, &messages), &messages, &[], &rules, || DRAW);
}

#[test]
fn a_row_past_its_last_attempt_dies_too() {
    // A smaller max_attempts in the configuration leaves such rows behind.
    let row = Row { key: None, last_attempt: true, outcome: 2 };
    let mut late = message(0, row);
    late.attempt_count = i64::MAX;
    let rules = rules(Policy::BestEffort, OnHalt::Retry);
    let outcome = Outcome::Failed { error: "kafka.odd: what now".into() };
    let messages = [late];
    let settlement = partition(&plan(rules.policy, &messages), &messages, &[Some(outcome)], &rules, || DRAW);
    assert_eq!(settlement.verdicts, [Verdict::Dead { error: "kafka.odd: what now".into() }]);
}
