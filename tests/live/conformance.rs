//! The conformance test for publishers: the real one passes it on a real broker, and wrong ones do not.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use keiro_relay::domain::message::Message;
use keiro_relay::domain::outcome::{Blame, Outcome, Setback};
use keiro_relay::publish::conformance::{Sink, check};
use keiro_relay::publish::{Batch, BoxFuture, PublishError, Publisher, each};
use std::sync::Arc;
use uuid::Uuid;

use crate::publish::publisher;
use crate::support::services::brokers;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::unique;

struct Topics {
    good: String,
    bad: String,
}

impl Sink for Topics {
    fn good(&self) -> String {
        self.good.clone()
    }

    fn bad(&self) -> Option<String> {
        Some(self.bad.clone())
    }

    fn arrived<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Vec<String>> {
        let topic = destination.to_owned();
        Box::pin(async move {
            if topic == self.bad {
                return Vec::new();
            }
            let read = move || read_topic(&topic).iter().map(|record| record.message_id().to_owned()).collect();
            tokio::task::spawn_blocking(read).await.expect("read the topic")
        })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_of_the_kafka_publisher() {
    let topic = tokio::task::spawn_blocking(|| fresh_topic(3, &[])).await.expect("a topic");
    let sink = Topics { good: topic, bad: unique("nowhere") };
    let report = check(&publisher(brokers()), &sink, Duration::from_secs(20)).await;
    report.assert_kept();
    assert!(report.promises.iter().all(|promise| promise.skipped.is_none()), "{report}");
}

/// Keeps messages in memory; refuses those to `bad`.
#[derive(Debug, Default, Clone)]
struct Shelf(Arc<Mutex<BTreeMap<String, Vec<String>>>>);

impl Shelf {
    fn put(&self, message: &Message) -> Result<(), &'static str> {
        if message.destination == "bad" {
            return Err("refused");
        }
        let mut shelf = self.0.lock().expect("not poisoned");
        shelf.entry(message.destination.clone()).or_default().push(message.message_id.clone());
        Ok(())
    }
}

impl Sink for Shelf {
    fn good(&self) -> String {
        "good".to_owned()
    }

    fn bad(&self) -> Option<String> {
        Some("bad".to_owned())
    }

    fn arrived<'a>(&'a self, destination: &'a str) -> BoxFuture<'a, Vec<String>> {
        Box::pin(async move { self.0.lock().expect("not poisoned").get(destination).cloned().unwrap_or_default() })
    }
}

/// What a publisher does wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wrong {
    GoesOnAfterFailure,
    ForgetsOutcomes,
    IgnoresStop,
    IgnoresDeadline,
    WritesTwice,
    Lies,
    Reverses,
    WorksWhenClosed,
    Hangs,
}

struct WrongPublisher {
    wrong: Wrong,
    shelf: Shelf,
    closed: Mutex<bool>,
}

impl Publisher for WrongPublisher {
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        Box::pin(async move {
            let mut outcomes = Vec::new();
            let not_sent = |blame| Outcome::NotSent(Setback::new(blame, "wrong.not_sent: test", Duration::ZERO));
            let mut failed: HashSet<usize> = HashSet::new();
            let mut rows: Vec<(usize, usize)> = Vec::new();
            for (lane, indexes) in batch.plan.lanes.iter().enumerate() {
                rows.extend(indexes.iter().map(|index| (lane, *index)));
            }
            if self.wrong == Wrong::Reverses {
                rows.reverse();
            }
            for (lane, index) in rows {
                let message = &batch.messages[index];
                let stopped = batch.stop.is_cancelled() && self.wrong != Wrong::IgnoresStop;
                let late = Instant::now() >= batch.deadline && self.wrong != Wrong::IgnoresDeadline;
                let closed = *self.closed.lock().expect("not poisoned") && self.wrong != Wrong::WorksWhenClosed;
                let outcome = if stopped || late || closed {
                    not_sent(Blame::Stop)
                } else if failed.contains(&lane) && self.wrong != Wrong::GoesOnAfterFailure {
                    not_sent(Blame::Lane)
                } else {
                    match (self.wrong, self.shelf.put(message)) {
                        (Wrong::Lies, Ok(())) => not_sent(Blame::Topic),
                        (Wrong::WritesTwice, Ok(())) => {
                            self.shelf.put(message).expect("it took the first");
                            Outcome::acked()
                        }
                        (_, Ok(())) => Outcome::acked(),
                        (Wrong::Hangs, Err(_)) => std::future::pending().await,
                        (_, Err(error)) => Outcome::failed(format!("wrong.failed: {error}")),
                    }
                };
                if !outcome.lets_lane_go_on() {
                    failed.insert(lane);
                }
                // A stop must be able to come in the middle.
                if batch.one_at_a_time {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                outcomes.push((message.outbox_id, outcome));
            }
            if self.wrong == Wrong::ForgetsOutcomes {
                outcomes.pop();
            }
            Ok(outcomes)
        })
    }

    fn close(&self, _: Instant) -> BoxFuture<'_, ()> {
        *self.closed.lock().expect("not poisoned") = true;
        Box::pin(async {})
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_finds_what_each_wrong_publisher_does_wrong() {
    const FIRST: &str = "every row gets exactly one outcome, and lanes keep their order";
    let cases = [
        (
            Wrong::GoesOnAfterFailure,
            "no later record of a lane is delivered after one that failed, and other lanes go on",
        ),
        (Wrong::ForgetsOutcomes, FIRST),
        (Wrong::IgnoresStop, "nothing is handed over once the relay stops"),
        (Wrong::IgnoresDeadline, "a call ends by its deadline, and nothing is handed over after it"),
        (Wrong::WritesTwice, FIRST),
        (Wrong::Lies, "what was said not to be sent never arrives"),
        (Wrong::Reverses, FIRST),
        (Wrong::WorksWhenClosed, "nothing is published once it is closed"),
        (Wrong::Hangs, "a call ends by its deadline, and nothing is handed over after it"),
    ];
    let checks = cases.map(|(wrong, promise)| async move {
        let shelf = Shelf::default();
        let publisher = WrongPublisher { wrong, shelf: shelf.clone(), closed: Mutex::default() };
        let report = check(&publisher, &shelf, Duration::from_secs(3)).await;
        assert!(report.broken().contains(&promise), "{wrong:?} got through:\n{report}");
    });
    futures_util::future::join_all(checks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn conformance_of_a_publisher_made_of_a_function() {
    let shelf = Shelf::default();
    let put = shelf.clone();
    let publisher = each(move |message: Message| {
        let answer = put.put(&message);
        async move {
            tokio::task::yield_now().await;
            answer
        }
    });
    check(&publisher, &shelf, Duration::from_secs(3)).await.assert_kept();
}
