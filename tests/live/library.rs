//! The relay inside a program: two at once, a pool of the caller's, its own rules, and single passes, on a real PostgreSQL.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deadpool_postgres::{Manager, Pool};
use keiro_relay::config::default_rules;
use keiro_relay::domain::message::Message;
use keiro_relay::domain::outcome::{Blame, Outcome, Setback};
use keiro_relay::domain::policy::{Policy, SourceRules};
use keiro_relay::domain::retry::{FailedAttempt, Retry};
use keiro_relay::publish::{Batch, BoxFuture, PublishError, Publisher, each};
use keiro_relay::relay::{BuildError, End, Relay};
use tokio_postgres::NoTls;
use uuid::Uuid;

use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::{LONG, wait_until_async};

#[path = "../../examples/own_publisher.rs"]
#[allow(dead_code)]
mod own_publisher;

/// Collects message ids in the order in which they were sent.
#[derive(Debug, Clone, Default)]
struct Inbox(Arc<Mutex<Vec<String>>>);

impl Inbox {
    fn publisher(&self) -> impl Publisher {
        let inbox = self.clone();
        each(move |message: Message| {
            let inbox = inbox.clone();
            async move {
                inbox.0.lock().expect("not poisoned").push(message.message_id);
                Ok::<(), std::convert::Infallible>(())
            }
        })
    }

    fn ids(&self) -> Vec<String> {
        self.0.lock().expect("not poisoned").clone()
    }

    /// Everything of the feed once, lanes in order.
    #[track_caller]
    fn assert_delivered(&self, feed: &Feed) {
        let ids = self.ids();
        assert_eq!(ids.len(), feed.expected().len());
        let mut expected: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (lane, id) in feed.expected() {
            expected.entry(lane).or_default().push(id);
        }
        for (lane, expected) in expected {
            let got: Vec<&str> = ids.iter().map(String::as_str).filter(|id| expected.contains(id)).collect();
            assert_eq!(got, expected, "{lane}");
        }
    }
}

fn pool(database: &Database) -> Pool {
    let manager = Manager::new(database.url().parse().expect("a URL"), NoTls);
    Pool::builder(manager).max_size(3).build().expect("a pool")
}

async fn sent(database: &Database) -> String {
    let client = database.connect().await;
    let row = client.query_one("select count(*) from keiro.keiro_outbox where status = 'sent'", &[]).await;
    row.expect("a count").get::<_, i64>(0).to_string()
}

fn feed(database: &Database, source: &str, rows: usize) -> Feed {
    let mut feed = Feed::new(source, "anywhere", Order::Key);
    database.execute(&feed.statement(rows, 7));
    feed
}

#[tokio::test(flavor = "multi_thread")]
async fn library_two_relays_live_in_one_process_and_stop_apart() {
    let (one, other) = (fresh_database(Table::Lean), fresh_database(Table::OlderShared));
    let (first, second) = (feed(&one, "first", 400), feed(&other, "second", 300));
    let (inbox_one, inbox_other) = (Inbox::default(), Inbox::default());
    // One has connections of its own, the other the caller's pool.
    let callers = pool(&other);
    let a = Relay::builder(inbox_one.publisher()).database_url(one.url()).instance("a").build().expect("built").spawn();
    let b = Relay::builder(inbox_other.publisher()).pool(callers.clone()).instance("b").build().expect("built").spawn();
    wait_until_async("both to be drained", LONG, async || sent(&one).await == "400" && sent(&other).await == "300")
        .await;
    inbox_one.assert_delivered(&first);
    inbox_other.assert_delivered(&second);
    assert_eq!((a.status().instance.as_str(), b.status().instance.as_str()), ("a", "b"));
    assert_eq!(a.status().sources.iter().map(|source| source.source.as_str()).collect::<Vec<_>>(), ["first"]);
    // Each counts its own.
    let line = "keiro_relay_rows_total{outcome=\"sent\",source=\"first\"} 400";
    assert!(a.board().metrics().render().contains(line) && !b.board().metrics().render().contains("\"first\""));

    // One stops, the other goes on.
    a.stop();
    a.stop();
    let (ended, again) = tokio::join!(a.done(), a.done());
    assert_eq!((ended, again), (End::Stopped { clean: true }, End::Stopped { clean: true }));
    let mut second = second;
    other.execute(&second.statement(20, 7));
    b.wake(Some("second"));
    b.wake(Some("nobody"));
    b.wake(None);
    wait_until_async("the other to go on", LONG, async || sent(&other).await == "320").await;
    inbox_other.assert_delivered(&second);
    b.stop();
    assert_eq!(b.done().await, End::Stopped { clean: true });

    // The caller's pool is open, and its sessions are as they were.
    let client = callers.get().await.expect("the pool still works");
    let settings = "select current_setting('enable_seqscan') || current_setting('plan_cache_mode')";
    assert_eq!(client.query_one(settings, &[]).await.expect("a row").get::<_, String>(0), "onauto");
}

#[tokio::test(flavor = "multi_thread")]
async fn library_passes_once_and_asks_the_callers_rules() {
    let database = fresh_database(Table::NewerShared);
    let feed = feed(&database, "once", 30);
    let poison = feed.id(3);
    let asked = Arc::new(AtomicUsize::new(0));
    let (bad, count) = (poison.clone(), Arc::clone(&asked));
    let publisher = each(move |message: Message| {
        let answer = if message.message_id == bad { Err("no") } else { Ok(()) };
        async move { answer }
    });
    let relay = Relay::builder(publisher)
        .pool(pool(&database))
        .only_named_sources()
        .source("once", default_rules())
        .retry(move |failed: &FailedAttempt<'_>| {
            count.fetch_add(1, Ordering::Relaxed);
            assert!(failed.error.starts_with("publisher.failed"), "{}", failed.error);
            assert!(matches!(failed.rules, Retry::After(_)));
            if failed.attempts >= 2 { Retry::Dead } else { Retry::After(Duration::ZERO) }
        })
        .build()
        .expect("built");
    // Nothing runs before it is asked.
    let first = relay.pass_once().await.expect("a pass");
    assert_eq!((first.claimed, first.sent, first.failed), (30, 26, 1), "{first:?}");
    assert_eq!(first.skipped, 3, "rows behind the poisoned one wait");
    let second = relay.pass_once().await.expect("a pass");
    assert!(second.claimed >= 1, "{second:?}");
    wait_until_async("the rest to be sent", LONG, async || {
        relay.pass_once().await.expect("a pass");
        sent(&database).await == "29"
    })
    .await;
    assert_eq!(
        database.value(&format!("select status || attempt_count from keiro.keiro_outbox where {}", feed.row(3))),
        "dead2"
    );
    assert_eq!(asked.load(Ordering::Relaxed), 2);
    assert_eq!(relay.pass_once().await.expect("a pass").claimed, 0);

    // A relay that died left a row behind.
    database.execute("update keiro.keiro_outbox set status = 'publishing', published_at = null, updated_at = now() - interval '1 day' where status = 'sent' and message_id = 'once-000000'");
    assert_eq!(relay.maintain_once().await.expect("maintained").requeued, 1);
}

/// A publisher whose calls fail as a whole.
struct Failing;

impl Publisher for Failing {
    fn publish<'a>(&'a self, _: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        let cause = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        Box::pin(async { Err(PublishError::caused_by("sink.away: nobody answers", cause)) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn library_classifier_says_whose_fault_a_failed_call_is() {
    let database = fresh_database(Table::Lean);
    feed(&database, "away", 5);
    let builder = || Relay::builder(Failing).pool(pool(&database));
    let relay = builder()
        .classify(|error| {
            let io = error.cause.as_ref().and_then(|cause| cause.downcast_ref::<std::io::Error>());
            let away = io.is_some_and(|io| io.kind() == std::io::ErrorKind::ConnectionRefused);
            Setback::new(if away { Blame::Topic } else { Blame::Row }, error.to_string(), Duration::ZERO)
        })
        .build()
        .expect("built");
    let pass = relay.pass_once().await.expect("a pass");
    assert_eq!((pass.returned, pass.failed), (5, 0), "{pass:?}");
    assert_eq!(database.value("select sum(attempt_count)::text from keiro.keiro_outbox"), "0");
    // Without one the rows pay for it.
    let pass = builder().build().expect("built").pass_once().await.expect("a pass");
    assert!(pass.failed > 0 && pass.returned == 0, "{pass:?}");
}

#[tokio::test]
async fn library_names_every_setting_that_cannot_be() {
    let rules = SourceRules { max_attempts: 0, policy: Policy::BestEffort, ..default_rules() };
    let built = Relay::builder(Inbox::default().publisher())
        .database_url("postgres://me@localhost/app")
        .source("odd", rules)
        .settings(|config| config.relay.publish_timeout = Duration::from_secs(200))
        .build();
    let Err(BuildError::Settings(problems)) = built.map(drop) else { panic!("settings that cannot be") };
    let text = problems.to_string();
    assert!(text.contains("sources.odd.max_attempts") && text.contains("relay.publishing_timeout"), "{text}");

    let built = Relay::builder(Inbox::default().publisher()).database_url("mysql://me:hunter2@localhost/app").build();
    let error = built.map(drop).expect_err("no such database").to_string();
    assert!(error.contains("database.url") && !error.contains("hunter2"), "{error}");

    // A table that is not there is said as such.
    let database = fresh_database(Table::None);
    let relay = Relay::builder(Inbox::default().publisher()).pool(pool(&database)).build().expect("built");
    let error = relay.pass_once().await.expect_err("no table").to_string();
    assert!(error.contains("keiro-relay migrate"), "{error}");
    assert!(matches!(relay.spawn().done().await, End::Schema(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn library_example_own_publisher_writes_every_event_to_its_file() {
    let database = fresh_database(Table::NewerShared);
    let feed = feed(&database, "filed", 50);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("events.ndjson");
    let handle = own_publisher::relay(database.url(), &file).expect("built").spawn();
    wait_until_async("every row to be sent", LONG, async || sent(&database).await == "50").await;
    handle.stop();
    assert_eq!(handle.done().await, End::Stopped { clean: true });
    let lines = std::fs::read_to_string(&file).expect("a file");
    let inbox = Inbox::default();
    for line in lines.lines() {
        let event: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        inbox.0.lock().expect("not poisoned").push(event["message_id"].as_str().expect("an id").to_owned());
    }
    inbox.assert_delivered(&feed);
}
