//! From claimed rows to lanes, and from outcomes to verdicts. Pure, so that every small case can be enumerated.
//!
//! Nothing here ever lets a later row of a lane count as sent after an earlier one did not get through.

use std::time::Duration;

use super::message::Message;
use super::outcome::{Blame, Outcome, Rejection, Setback};
use super::policy::{OnHalt, Policy, SourceRules};

/// How one claim is handed to a publisher: rows that must reach the broker in order share a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Indexes into the claimed rows, in claim order within each lane; each row is in exactly one lane.
    pub lanes: Vec<Vec<usize>>,
}

/// Groups claimed rows, given in (created_at, outbox_id) order, into the lanes of the policy.
#[must_use]
pub fn plan(policy: Policy, messages: &[Message]) -> Plan {
    let lanes = match policy {
        Policy::BestEffort => (0..messages.len()).map(|index| vec![index]).collect(),
        Policy::PerSourceStream | Policy::StopTheLine if messages.is_empty() => Vec::new(),
        Policy::PerSourceStream | Policy::StopTheLine => vec![(0..messages.len()).collect()],
        Policy::PerKeyHeadOfLine => {
            let mut lanes: Vec<Vec<usize>> = Vec::new();
            let mut lane_of_key = std::collections::HashMap::new();
            for (index, message) in messages.iter().enumerate() {
                match message.message_key.as_deref() {
                    None => lanes.push(vec![index]),
                    Some(key) => {
                        let lane = *lane_of_key.entry(key).or_insert_with(|| {
                            lanes.push(Vec::new());
                            lanes.len() - 1
                        });
                        lanes[lane].push(index);
                    }
                }
            }
            lanes
        }
    };
    Plan { lanes }
}

/// What becomes of one claimed row (contract §2).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Acknowledged: sent.
    Sent,
    /// Spent an attempt; due again after the delay.
    Failed {
        /// Text for `last_error`.
        error: String,
        /// Backoff of this attempt.
        delay: Duration,
    },
    /// Failed on a held `stop_the_line` source: not due until an operator resumes it, and never dead.
    Held {
        /// Text for `last_error`.
        error: String,
    },
    /// Spent its last attempt.
    Dead {
        /// Text for `last_error`.
        error: String,
    },
    /// Can never be accepted; releases its lane.
    Rejected(Rejection),
    /// Behind the pivot of its lane: attempt returned, due now.
    Skipped {
        /// `skipped: …`.
        error: String,
    },
    /// No verdict and not the row's fault: attempt returned, due after the pause.
    Returned {
        /// Text for `last_error`; says which side.
        error: String,
        /// How long the row rests.
        pause: Duration,
    },
}

/// The verdicts of one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settlement {
    /// One verdict per claimed row, in claim order.
    pub verdicts: Vec<Verdict>,
    /// Rows acknowledged behind the pivot of their lane. Anything but 0 is an order violation.
    pub overtaken: usize,
    /// Rows that may be on the topic twice, or may be there although they are not marked sent: their next attempt may duplicate
    /// them.
    pub duplicates_possible: usize,
}

/// Turns outcomes into verdicts: per lane, the prefix is sent, rejected rows are passed over, the first row that did not get
/// through is the pivot, and everything behind it is skipped.
///
/// `outcomes[i]` belongs to `messages[i]`; a missing one counts as failed. `draw` yields numbers in [0, 1) for the jitter.
pub fn partition(
    plan: &Plan,
    messages: &[Message],
    outcomes: &[Option<Outcome>],
    rules: &SourceRules,
    mut draw: impl FnMut() -> f64,
) -> Settlement {
    assert_eq!(messages.len(), outcomes.len(), "one outcome slot per claimed row");
    let mut verdicts: Vec<Option<Verdict>> = vec![None; messages.len()];
    let (mut overtaken, mut duplicates_possible) = (0, 0);
    for lane in &plan.lanes {
        let mut pivot: Option<usize> = None;
        for &index in lane {
            let outcome = outcomes[index].as_ref();
            // Of a row without an outcome nothing is known either: the publisher may have handed it over before it forgot it.
            // One that was acknowledged at its second hand-over may be there twice already.
            if matches!(outcome, None | Some(Outcome::Unknown(_) | Outcome::Acked { maybe_twice: true, .. })) {
                duplicates_possible += 1;
            }
            let verdict = match pivot {
                Some(pivot) => {
                    if matches!(outcome, Some(Outcome::Acked { .. })) {
                        overtaken += 1;
                        duplicates_possible += 1;
                    }
                    Verdict::Skipped { error: format!("skipped: behind {} of its lane", messages[pivot].outbox_id) }
                }
                None => {
                    let verdict = judge(&messages[index], outcome, rules, &mut draw);
                    if !matches!(verdict, Verdict::Sent | Verdict::Rejected(_)) {
                        pivot = Some(index);
                    }
                    verdict
                }
            };
            verdicts[index] = Some(verdict);
        }
    }
    let verdicts = verdicts.into_iter().map(|verdict| verdict.expect("every row is in a lane")).collect();
    Settlement { verdicts, overtaken, duplicates_possible }
}

/// The verdict of a row that no earlier row of its lane holds back.
fn judge(message: &Message, outcome: Option<&Outcome>, rules: &SourceRules, draw: &mut impl FnMut() -> f64) -> Verdict {
    match outcome {
        None => spend(message, "publisher returned no outcome", rules, draw),
        Some(Outcome::Acked { .. }) => Verdict::Sent,
        Some(Outcome::Rejected(rejection)) => Verdict::Rejected(rejection.clone()),
        Some(Outcome::Failed { error }) => spend(message, error, rules, draw),
        Some(Outcome::Unknown(setback) | Outcome::NotSent(setback)) => {
            let Setback { blame, error, pause } = setback;
            match blame {
                // A publisher that blames a lane in which nothing failed is wrong about the row: it must not loop for ever.
                Blame::Row | Blame::Lane => spend(message, error, rules, draw),
                Blame::Topic | Blame::Cluster => Verdict::Returned { error: error.clone(), pause: *pause },
                Blame::Stop => Verdict::Returned { error: error.clone(), pause: Duration::ZERO },
            }
        }
    }
}

/// Spends the attempt that the claim counted.
fn spend(message: &Message, error: &str, rules: &SourceRules, draw: &mut impl FnMut() -> f64) -> Verdict {
    let error = error.to_owned();
    if rules.policy == Policy::StopTheLine && rules.on_halt == OnHalt::Hold {
        return Verdict::Held { error };
    }
    if message.attempt_count >= i64::from(rules.max_attempts) {
        return Verdict::Dead { error };
    }
    Verdict::Failed { error, delay: rules.backoff.delay(message.attempt_count, draw()) }
}
