//! A relay without a database: feeds rows to a publisher the way passes do, settles them by the real rules, and counts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use keiro_relay::domain::backoff::{Backoff, BackoffKind};
use keiro_relay::domain::message::{Message, PgTime};
use keiro_relay::domain::plan::{self, Verdict};
use keiro_relay::domain::policy::{OnHalt, Policy, SourceRules};
use keiro_relay::publish::{Batch, Publisher};
use tokio_util::sync::CancellationToken;

use super::oracle;
use super::topics::Record;

/// How rows are fed.
#[derive(Debug, Clone)]
pub struct Feeding {
    pub policy: Policy,
    /// Rows of one call at most.
    pub rows_max: usize,
    /// Rows of one lane in a call at most.
    pub lane_rows_max: usize,
    /// Calls at once.
    pub calls_max: usize,
    /// How long a call may take.
    pub timeout: Duration,
    /// How long all of it may take.
    pub bound: Duration,
}

impl Default for Feeding {
    fn default() -> Self {
        Self {
            policy: Policy::PerKeyHeadOfLine,
            rows_max: 500,
            lane_rows_max: 500,
            calls_max: 4,
            timeout: Duration::from_secs(30),
            bound: Duration::from_secs(180),
        }
    }
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Fed {
    /// Code by message id.
    pub rejected: BTreeMap<String, String>,
    pub overtaken: usize,
    pub duplicates_possible: usize,
    pub calls: usize,
    /// Attempts that rows spent.
    pub failed: usize,
    /// The texts of what was returned or failed, each once.
    pub errors: BTreeMap<String, usize>,
    /// `(lane, message_id)` of every row, in the order they had to go out.
    pub order: Vec<(String, String)>,
}

impl Fed {
    /// Judges what lies in the topics: everything but the rejected rows, in order, with no more duplicates than were counted.
    #[track_caller]
    pub fn assert_delivered(&self, records: &[Record]) {
        let verdict = self.judge(records);
        assert_eq!(self.overtaken, 0, "overtaken");
        verdict.assert_delivered(self.duplicates_possible);
    }

    #[track_caller]
    pub fn judge(&self, records: &[Record]) -> oracle::Verdict {
        let expected: Vec<_> = self.order.iter().filter(|(_, id)| !self.rejected.contains_key(id)).collect();
        let expected: Vec<_> = expected.into_iter().map(|(lane, id)| (lane, id)).collect();
        oracle::judge(records, &expected)
    }
}

/// The lane of each row under the policy, by a name.
fn lane_names(policy: Policy, rows: &[Message]) -> Vec<String> {
    let mut names = vec![String::new(); rows.len()];
    for lane in plan::plan(policy, rows).lanes {
        let name = format!("lane of {}", rows[lane[0]].message_id);
        for index in lane {
            names[index].clone_from(&name);
        }
    }
    names
}

/// Publishes all rows, again and again until each is sent or rejected; `meanwhile` is told of each call that begins.
pub async fn feed<P: Publisher>(
    publisher: &P,
    feeding: &Feeding,
    rows: Vec<Message>,
    mut meanwhile: impl FnMut(usize, &CancellationToken),
) -> Fed {
    let rules = SourceRules {
        policy: feeding.policy,
        on_halt: OnHalt::Retry,
        max_attempts: 1_000,
        backoff: Backoff {
            kind: BackoffKind::Constant,
            initial: Duration::from_millis(1),
            multiplier: 1.0,
            max: Duration::from_millis(1),
            jitter: 0.0,
        },
    };
    let mut fed = Fed::default();
    let names = lane_names(feeding.policy, &rows);
    fed.order = names.iter().cloned().zip(rows.iter().map(|row| row.message_id.clone())).collect();
    // Lanes wait in the order of their oldest row.
    let mut lanes: Vec<(VecDeque<Message>, Instant)> = Vec::new();
    let mut number_of: BTreeMap<String, usize> = BTreeMap::new();
    for (name, row) in names.into_iter().zip(rows) {
        let number = *number_of.entry(name).or_insert_with(|| {
            lanes.push((VecDeque::new(), Instant::now()));
            lanes.len() - 1
        });
        lanes[number].0.push_back(row);
    }
    let mut ready: VecDeque<usize> = (0..lanes.len()).collect();
    let mut calls = FuturesUnordered::new();
    let end = Instant::now() + feeding.bound;
    let mut left: usize = lanes.iter().map(|lane| lane.0.len()).sum();
    while left > 0 {
        while calls.len() < feeding.calls_max {
            let now = Instant::now();
            let mut taken: Vec<(usize, Vec<Message>)> = Vec::new();
            let mut count = 0;
            for _ in 0..ready.len() {
                let Some(number) = ready.pop_front() else { break };
                let (lane, due) = &mut lanes[number];
                if count >= feeding.rows_max || *due > now {
                    ready.push_back(number);
                    continue;
                }
                // A row that was attempted before is claimed alone.
                let alone = lane.front().is_some_and(|row| row.attempt_count > 0);
                let cap = if alone { 1 } else { feeding.lane_rows_max.min(feeding.rows_max - count) };
                let untried = lane.iter().skip(1).take_while(|row| row.attempt_count == 0).count() + 1;
                let rows: Vec<Message> = lane.drain(..cap.min(lane.len()).min(untried)).collect();
                count += rows.len();
                taken.push((number, rows));
            }
            if taken.is_empty() {
                break;
            }
            let mut messages: Vec<(usize, Message)> = Vec::new();
            for (number, rows) in taken {
                messages.extend(rows.into_iter().map(|row| (number, row)));
            }
            // Claims return rows by position, whatever their lanes.
            messages.sort_by_key(|(_, message)| message.position());
            let numbers: Vec<usize> = messages.iter().map(|(number, _)| *number).collect();
            let updated_at = PgTime::from_unix_micros(jiff::Timestamp::now().as_microsecond());
            let claimed = |(_, mut message): (usize, Message)| {
                message.attempt_count += 1;
                message.updated_at = updated_at;
                message
            };
            let messages: Arc<[Message]> = messages.into_iter().map(claimed).collect();
            let batch = Batch {
                plan: Arc::new(plan::plan(feeding.policy, &messages)),
                messages,
                one_at_a_time: feeding.policy == Policy::StopTheLine,
                deadline: Instant::now() + feeding.timeout,
                stop: CancellationToken::new(),
            };
            meanwhile(fed.calls, &batch.stop);
            fed.calls += 1;
            calls.push(async move {
                let outcomes = publisher.publish(&batch).await.expect("outcomes");
                let late = Instant::now().saturating_duration_since(batch.deadline);
                assert!(late < Duration::from_secs(3), "a call outlived its deadline by {late:?}");
                (numbers, batch, outcomes)
            });
        }
        let next = tokio::time::timeout(Duration::from_millis(20), calls.next()).await;
        assert!(Instant::now() < end, "{left} rows left after {:?}: {:?}", feeding.bound, fed.errors);
        let Ok(Some((numbers, batch, outcomes))) = next else {
            if calls.is_empty() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            continue;
        };
        let mut by_id: BTreeMap<_, _> = outcomes.into_iter().collect();
        let outcomes: Vec<_> = batch.messages.iter().map(|message| by_id.remove(&message.outbox_id)).collect();
        assert!(by_id.is_empty() && outcomes.iter().all(Option::is_some), "one outcome per row");
        let settlement = plan::partition(&batch.plan, &batch.messages, &outcomes, &rules, rand::random::<f64>);
        fed.overtaken += settlement.overtaken;
        fed.duplicates_possible += settlement.duplicates_possible;
        let mut back: BTreeMap<usize, (Vec<Message>, Duration)> = BTreeMap::new();
        for ((number, message), verdict) in
            numbers.into_iter().zip(batch.messages.iter().cloned()).zip(settlement.verdicts)
        {
            let entry = back.entry(number).or_default();
            let mut returned = |mut message: Message, error: &str, pause: Duration, spent: i64| {
                message.attempt_count += spent - 1;
                let error: String = error.chars().take(200).collect();
                *fed.errors.entry(error).or_default() += 1;
                entry.0.push(message);
                entry.1 = entry.1.max(pause.min(Duration::from_millis(300)));
            };
            match verdict {
                Verdict::Sent => left -= 1,
                Verdict::Rejected(rejection) => {
                    left -= 1;
                    fed.rejected.insert(message.message_id, rejection.code);
                }
                Verdict::Failed { error, delay } => {
                    fed.failed += 1;
                    returned(message, &error, delay, 1);
                }
                Verdict::Skipped { .. } => returned(message, "skipped", Duration::ZERO, 0),
                Verdict::Returned { error, pause } => returned(message, &error, pause, 0),
                verdict @ (Verdict::Held { .. } | Verdict::Dead { .. }) => panic!("{verdict:?}"),
            }
        }
        for (number, (rows, pause)) in back {
            let lane = &mut lanes[number];
            lane.1 = Instant::now() + pause;
            for row in rows.into_iter().rev() {
                lane.0.push_front(row);
            }
            if !lane.0.is_empty() {
                ready.push_back(number);
            }
        }
    }
    fed
}
