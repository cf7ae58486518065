//! A conformance test for publishers: whether one keeps the promises of [`Publisher`] that order and loss rest on.
//!
//! It publishes rows of its own to destinations that the caller names and judges what arrived. Nothing here ever touches a database,
//! and nothing is repeated until it works: a promise that is kept only most of the time is not kept.
//!
//! ```no_run
//! # use keiro_relay::publish::{Publisher, conformance::{self, Sink}};
//! # async fn test(publisher: impl Publisher, sink: impl Sink) {
//! conformance::check(&publisher, &sink, std::time::Duration::from_secs(10)).await.assert_kept();
//! # }
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use bytes::Bytes;
use uuid::Uuid;

use super::{Batch, BoxFuture, Publisher};
use crate::domain::message::{Message, PgTime};
use crate::domain::outcome::Outcome;
use crate::domain::policy::Policy;

/// A publisher may be this late on a busy machine.
const LATE_MAX: Duration = Duration::from_secs(2);
/// How long a call may take that has nothing to hand over.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// When a stop comes that is meant to hit a call in its middle.
const STOP_AFTER: Duration = Duration::from_millis(20);

/// Where the publisher delivers, and how to look what arrived there.
pub trait Sink: Send + Sync {
    /// A destination that takes every message. What lay there before does not matter.
    fn good(&self) -> String;

    /// A destination that nothing gets through to, with any outcome but an acknowledgement or a rejection, such as a topic that does
    /// not exist. Without one the order after a failure cannot be checked.
    fn bad(&self) -> Option<String>;

    /// The message ids of all that has arrived at a destination; those of one key in the order in which they arrived.
    fn arrived<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Vec<String>>;
}

/// What became of every promise.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// One after the other, in the order in which they were checked.
    pub promises: Vec<Promise>,
}

/// One promise of a publisher.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Promise {
    /// Its name.
    pub name: &'static str,
    /// How it was broken; empty when it was kept.
    pub broken: Vec<String>,
    /// Why it could not be checked.
    pub skipped: Option<&'static str>,
}

impl Report {
    /// Whether every promise that could be checked was kept.
    #[must_use]
    pub fn kept(&self) -> bool {
        self.promises.iter().all(|promise| promise.broken.is_empty())
    }

    /// Names of the promises that were broken.
    #[must_use]
    pub fn broken(&self) -> Vec<&'static str> {
        self.promises.iter().filter(|promise| !promise.broken.is_empty()).map(|promise| promise.name).collect()
    }

    /// For tests.
    ///
    /// # Panics
    /// When a promise was broken, and says how.
    #[track_caller]
    pub fn assert_kept(&self) {
        assert!(self.kept(), "the publisher breaks its promises:\n{self}");
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Promise { name, broken, skipped } in &self.promises {
            match skipped {
                Some(why) => writeln!(f, "skipped  {name}: {why}")?,
                None if broken.is_empty() => writeln!(f, "kept     {name}")?,
                None => writeln!(f, "BROKEN   {name}")?,
            }
            broken.iter().try_for_each(|how| writeln!(f, "           {how}"))?;
        }
        Ok(())
    }
}

/// Checks every promise. `timeout` is the time each call gets: longer than the destination needs for a hundred messages.
///
/// The publisher is closed in the end, since that is a promise too.
pub async fn check(publisher: &dyn Publisher, sink: &dyn Sink, timeout: Duration) -> Report {
    let mut checks = Checks { publisher, sink, timeout, promises: Vec::new(), seen: Vec::new() };
    checks.every_row_gets_its_outcome().await;
    checks.nothing_passes_a_failure().await;
    checks.calls_do_not_mix().await;
    checks.nothing_after_a_stop().await;
    checks.stop_in_the_middle().await;
    checks.deadline().await;
    checks.closed().await;
    checks.nothing_comes_late().await;
    Report { promises: checks.promises }
}

struct Checks<'a> {
    publisher: &'a dyn Publisher,
    sink: &'a dyn Sink,
    timeout: Duration,
    promises: Vec<Promise>,
    /// What was said of every row so far, by message id.
    seen: Vec<(Message, Outcome)>,
}

impl Checks<'_> {
    fn note(&mut self, name: &'static str, broken: Vec<String>) {
        self.promises.push(Promise { name, broken, skipped: None });
    }

    fn skip(&mut self, name: &'static str, why: &'static str) {
        self.promises.push(Promise { name, broken: Vec::new(), skipped: Some(why) });
    }

    fn batch(&self, policy: Policy, rows: Vec<Message>) -> Batch {
        Batch::new(policy, rows, Instant::now() + self.timeout)
    }

    async fn every_row_gets_its_outcome(&mut self) {
        let good = self.sink.good();
        let mut broken = Vec::new();
        for policy in Policy::ALL {
            let rows = (0..60).map(|row| message(&good, (row % 7 > 0).then(|| format!("k{}", row % 7)))).collect();
            let batch = self.batch(policy, rows);
            let outcomes = self.call(&batch, &mut broken).await;
            for (message, outcome) in &outcomes {
                if !matches!(outcome, Outcome::Acked { .. }) {
                    broken.push(format!("{}: the good destination did not take it: {outcome:?}", message.message_id));
                }
            }
        }
        self.call(&self.batch(Policy::PerKeyHeadOfLine, Vec::new()), &mut broken).await;
        self.note("every row gets exactly one outcome, and lanes keep their order", broken);
    }

    async fn nothing_passes_a_failure(&mut self) {
        const NAME: &str = "no later record of a lane is delivered after one that failed, and other lanes go on";
        let Some(bad) = self.sink.bad() else {
            return self.skip(NAME, "there is no destination that nothing gets through to");
        };
        let good = self.sink.good();
        let mut broken = Vec::new();
        for policy in [Policy::PerKeyHeadOfLine, Policy::PerSourceStream, Policy::StopTheLine] {
            let lane = |destination: &str, key: &str| message(destination, Some(key.to_owned()));
            let mut rows = vec![lane(&good, "pivot"), lane(&good, "pivot"), lane(&bad, "pivot")];
            rows.extend((0..20).map(|_| lane(&good, "pivot")));
            let others = if policy == Policy::PerKeyHeadOfLine { 10 } else { 0 };
            rows.extend((0..others).map(|_| lane(&good, "other")));
            let batch = self.batch(policy, rows);
            let outcomes = self.call(&batch, &mut broken).await;
            for (message, outcome) in &outcomes {
                let acked = matches!(outcome, Outcome::Acked { .. });
                if message.destination == bad && outcome.lets_lane_go_on() {
                    broken
                        .push(format!("{}: the bad destination took or rejected it: {outcome:?}", message.message_id));
                }
                if message.message_key.as_deref() == Some("other") && !acked {
                    broken.push(format!("{}: held back by a failure in another lane: {outcome:?}", message.message_id));
                }
            }
        }
        self.note(NAME, broken);
    }

    async fn calls_do_not_mix(&mut self) {
        let good = self.sink.good();
        let batches: Vec<Batch> = (0..4)
            .map(|call| {
                let rows = (0..40).map(|row| message(&good, Some(format!("call{call}-{}", row % 3)))).collect();
                self.batch(Policy::PerKeyHeadOfLine, rows)
            })
            .collect();
        let mut broken = Vec::new();
        let answers =
            futures_util::future::join_all(batches.iter().map(|batch| call(self.publisher, batch, self.timeout))).await;
        for (batch, answer) in batches.iter().zip(answers) {
            self.judge(batch, answer, &mut broken).await;
        }
        self.note("calls at the same time get their own outcomes", broken);
    }

    async fn nothing_after_a_stop(&mut self) {
        let good = self.sink.good();
        let mut broken = Vec::new();
        let rows = (0..20).map(|row| message(&good, Some(format!("k{}", row % 2)))).collect();
        let batch = self.batch(Policy::PerKeyHeadOfLine, rows);
        batch.stop.cancel();
        let started = Instant::now();
        let outcomes = self.call(&batch, &mut broken).await;
        broken.extend(handed_over(&outcomes, "the relay had stopped"));
        if started.elapsed() > IDLE_MAX {
            broken.push(format!("it took {:?} although there was nothing to do", started.elapsed()));
        }
        self.note("nothing is handed over once the relay stops", broken);
    }

    async fn stop_in_the_middle(&mut self) {
        let good = self.sink.good();
        let mut broken = Vec::new();
        let rows = (0..200).map(|_| message(&good, Some("stopped".to_owned()))).collect();
        let batch = self.batch(Policy::StopTheLine, rows);
        let stop = async {
            tokio::time::sleep(STOP_AFTER).await;
            batch.stop.cancel();
        };
        let (answer, ()) = tokio::join!(call(self.publisher, &batch, self.timeout), stop);
        self.judge(&batch, answer, &mut broken).await;
        self.note("a stop in the middle leaves a prefix of each lane", broken);
    }

    async fn deadline(&mut self) {
        let good = self.sink.good();
        let mut broken = Vec::new();
        let rows = (0..20).map(|row| message(&good, Some(format!("k{}", row % 2)))).collect();
        let batch = Batch::new(Policy::PerKeyHeadOfLine, rows, Instant::now());
        let outcomes = self.call(&batch, &mut broken).await;
        broken.extend(handed_over(&outcomes, "the deadline was over"));
        if let Some(bad) = self.sink.bad() {
            let rows = (0..10).map(|row| message(&bad, Some(format!("k{}", row % 2)))).collect();
            let batch = Batch::new(Policy::PerKeyHeadOfLine, rows, Instant::now() + LATE_MAX);
            self.call(&batch, &mut broken).await;
        }
        self.note("a call ends by its deadline, and nothing is handed over after it", broken);
    }

    async fn closed(&mut self) {
        let good = self.sink.good();
        let mut broken = Vec::new();
        self.publisher.close(Instant::now() + self.timeout).await;
        let rows = (0..5).map(|_| message(&good, None)).collect();
        let batch = Batch::new(Policy::BestEffort, rows, Instant::now() + LATE_MAX);
        match call(self.publisher, &batch, self.timeout).await {
            // Failing the whole call is an answer as well.
            Answer::Failed(_) => {}
            answer => {
                let outcomes = self.judge(&batch, answer, &mut broken).await;
                broken.extend(handed_over(&outcomes, "the publisher was closed"));
            }
        }
        self.note("nothing is published once it is closed", broken);
    }

    async fn nothing_comes_late(&mut self) {
        let mut broken = Vec::new();
        let arrived = self.arrived().await;
        for (message, outcome) in &self.seen {
            let there = arrived.contains_key(message.message_id.as_str());
            if matches!(outcome, Outcome::NotSent(_) | Outcome::Failed { .. }) && there {
                broken.push(format!("{}: arrived although it was said not to have been sent", message.message_id));
            }
        }
        self.note("what was said not to be sent never arrives", broken);
    }

    /// Publishes a batch and judges what came of it.
    async fn call(&mut self, batch: &Batch, broken: &mut Vec<String>) -> Vec<(Message, Outcome)> {
        let answer = call(self.publisher, batch, self.timeout).await;
        self.judge(batch, answer, broken).await
    }

    async fn judge(&mut self, batch: &Batch, answer: Answer, broken: &mut Vec<String>) -> Vec<(Message, Outcome)> {
        let outcomes = match answer {
            Answer::Outcomes(outcomes, late) => {
                if late > LATE_MAX {
                    broken.push(format!("the call ended {late:?} after its deadline"));
                }
                outcomes
            }
            Answer::Failed(error) => {
                broken.push(format!("the whole call failed: {error}"));
                return Vec::new();
            }
            Answer::None => {
                broken.push("the call did not end".to_owned());
                return Vec::new();
            }
        };
        let mut by_id: BTreeMap<Uuid, Outcome> = BTreeMap::new();
        for (id, outcome) in outcomes {
            if batch.messages.iter().all(|message| message.outbox_id != id) {
                broken.push(format!("an outcome for a row that is not in the batch: {id}"));
            } else if by_id.insert(id, outcome).is_some() {
                broken.push(format!("two outcomes for one row: {id}"));
            }
        }
        for message in batch.messages.iter().filter(|message| !by_id.contains_key(&message.outbox_id)) {
            broken.push(format!("{}: no outcome", message.message_id));
        }
        let arrived = self.arrived().await;
        for lane in &batch.plan.lanes {
            judge_lane(lane.iter().map(|index| &batch.messages[*index]), &by_id, &arrived, broken);
        }
        let told: Vec<(Message, Outcome)> = batch
            .messages
            .iter()
            .filter_map(|message| Some((message.clone(), by_id.remove(&message.outbox_id)?)))
            .collect();
        self.seen.extend(told.iter().cloned());
        told
    }

    /// Of every message that has arrived: where first, and how often.
    async fn arrived(&self) -> BTreeMap<String, (usize, usize)> {
        let destinations: BTreeSet<String> = [self.sink.good()].into_iter().chain(self.sink.bad()).collect();
        let mut arrived = BTreeMap::new();
        for destination in destinations {
            for (place, id) in self.sink.arrived(&destination).await.into_iter().enumerate() {
                arrived.entry(id).or_insert((place, 0)).1 += 1;
            }
        }
        arrived
    }
}

fn judge_lane<'a>(
    lane: impl Iterator<Item = &'a Message>,
    outcomes: &BTreeMap<Uuid, Outcome>,
    arrived: &BTreeMap<String, (usize, usize)>,
    broken: &mut Vec<String>,
) {
    let mut pivot: Option<&str> = None;
    // By destination and key: between partitions there is no order that could be read back.
    let mut last: BTreeMap<(&str, &str), (usize, &str)> = BTreeMap::new();
    for message in lane {
        let id = message.message_id.as_str();
        let there = arrived.get(id).copied();
        let outcome = outcomes.get(&message.outbox_id);
        match (outcome, there) {
            (Some(Outcome::Acked { .. }), None) => broken.push(format!("{id}: acknowledged, and not there")),
            (Some(Outcome::Acked { maybe_twice: false, .. }), Some((_, 2..))) => {
                broken.push(format!("{id}: there more than once, and nobody said so"));
            }
            (Some(Outcome::NotSent(_) | Outcome::Rejected(_) | Outcome::Failed { .. }), Some(_)) => {
                broken.push(format!("{id}: there, although its outcome says that it was not written"));
            }
            _ => {}
        }
        if let Some(pivot) = pivot
            && (there.is_some() || matches!(outcome, Some(Outcome::Acked { .. })))
        {
            broken.push(format!("{id}: delivered after {pivot}, which did not get through"));
        }
        if let (Some((place, _)), Some(key)) = (there, message.message_key.as_deref()) {
            match last.insert((&message.destination, key), (place, id)) {
                Some((before, earlier)) if place < before => {
                    broken.push(format!("{id}: lies before {earlier}, which is earlier in its lane"));
                }
                Some(_) | None => {}
            }
        }
        if pivot.is_none() && !outcome.is_some_and(Outcome::lets_lane_go_on) {
            pivot = Some(id);
        }
    }
}

fn handed_over(outcomes: &[(Message, Outcome)], why: &str) -> Vec<String> {
    let handed = outcomes.iter().filter(|(_, outcome)| !matches!(outcome, Outcome::NotSent(_)));
    handed.map(|(message, outcome)| format!("{}: {outcome:?} although {why}", message.message_id)).collect()
}

enum Answer {
    /// What it said, and how late.
    Outcomes(Vec<(Uuid, Outcome)>, Duration),
    Failed(String),
    None,
}

async fn call(publisher: &dyn Publisher, batch: &Batch, timeout: Duration) -> Answer {
    match tokio::time::timeout(timeout + LATE_MAX * 2, publisher.publish(batch)).await {
        Ok(Ok(outcomes)) => Answer::Outcomes(outcomes, Instant::now().saturating_duration_since(batch.deadline)),
        Ok(Err(error)) => Answer::Failed(error.to_string()),
        Err(_) => Answer::None,
    }
}

/// A row as a first claim returns it.
fn message(destination: &str, key: Option<String>) -> Message {
    let outbox_id = Uuid::now_v7();
    let now = PgTime::from_unix_micros(jiff::Timestamp::now().as_microsecond());
    Message {
        outbox_id,
        message_id: format!("conformance_{}", outbox_id.simple()),
        source_name: "conformance".to_owned(),
        destination: destination.to_owned(),
        message_key: key,
        event_type: "Checked".to_owned(),
        schema_version: 1,
        content_type: "application/json".to_owned(),
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
        payload: Bytes::from_static(b"{}"),
        payload_withheld: None,
        attributes: None,
        occurred_at: now,
        attempt_count: 1,
        last_error: None,
        created_at: now,
        updated_at: now,
    }
}
