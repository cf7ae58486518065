//! Settlements: what each verdict writes, the fence, and the way through lost connections, deadlocks and other people's locks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use keiro_relay::domain::message::Message;
use keiro_relay::domain::outcome::Rejection;
use keiro_relay::domain::pause::PausedRows;
use keiro_relay::domain::plan::Verdict;
use keiro_relay::store::{ErrorKind, Store, StoreError};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use uuid::Uuid;

use crate::support::database::{Table, older_to_newer};
use crate::support::outbox::{Outbox, columns, id, keyed, row, seed, with};
use crate::support::random::one_of;
use crate::support::{LONG, run, wait_until_async};

const ALL_BYTES: usize = 1 << 30;
const FAR: &str = "9999-12-31T00:00:00+00:00";
const YEAR_9000: &str = "9000-01-01T00:00:00+00:00";

fn sent() -> Verdict {
    Verdict::Sent
}

fn failed() -> Verdict {
    Verdict::Failed { error: "kafka.some_code: failed".to_owned(), delay: Duration::from_millis(90_500) }
}

fn held() -> Verdict {
    Verdict::Held { error: "kafka.some_code: held".to_owned() }
}

fn dead() -> Verdict {
    Verdict::Dead { error: "kafka.some_code: dead".to_owned() }
}

fn rejected() -> Verdict {
    Verdict::Rejected(Rejection::new("kafka.message_too_large", "1,001 octets, topic takes 1,000"))
}

fn skipped() -> Verdict {
    Verdict::Skipped { error: "skipped: behind another".to_owned() }
}

fn returned() -> Verdict {
    Verdict::Returned { error: "kafka.some_code: returned".to_owned(), pause: Duration::from_secs(5) }
}

/// Every verdict once.
fn verdicts() -> [Verdict; 7] {
    [sent(), failed(), held(), dead(), rejected(), skipped(), returned()]
}

/// Claims rows by their ids, in the order of the claim.
async fn claim(store: &Store, numbers: impl IntoIterator<Item = u64>) -> Vec<Message> {
    let ids: Vec<Uuid> = numbers.into_iter().map(id).collect();
    let messages = store.claim_rows(&ids, ALL_BYTES, true, &PausedRows::default()).await.expect("a claim").messages;
    assert_eq!(messages.iter().map(|message| message.outbox_id).collect::<Vec<_>>(), ids);
    messages
}

async fn settle(store: &Store, messages: &[Message], verdicts: &[Verdict]) -> Vec<Uuid> {
    let settled = store.settle(messages, verdicts, Instant::now() + LONG).await;
    assert!(settled.failed.is_none(), "{settled:?}");
    settled.lost
}

/// What a settlement changed in a row. Times are written as they relate to the settlement's own stamp.
async fn changes(outbox: &Outbox, before: &BTreeMap<String, Value>, id: Uuid) -> BTreeMap<String, String> {
    let after = columns(&outbox.client, id).await;
    let rows = outbox.rows().await;
    let row = rows.iter().find(|row| row.id() == id).expect("the row");
    let changed = after.iter().filter(|(name, value)| before[*name] != **value);
    let text = |(name, value): (&String, &Value)| {
        let delay = row.next_attempt_at.0.saturating_sub(row.updated_at.0);
        let text = match value {
            value if *value == after["updated_at"] => "now".to_owned(),
            Value::String(text) if name == "next_attempt_at" && text.starts_with("20") => format!("now + {delay} µs"),
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        (name.clone(), text)
    };
    changed.map(text).collect()
}

fn expected(columns: &[(&str, &str)]) -> BTreeMap<String, String> {
    columns.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

/// What a verdict changes in a row that was claimed with attempt 3, last_error `before` and, on a shared table, a stale published_at.
fn effects(table: Table, verdict: &Verdict) -> BTreeMap<String, String> {
    let mut changes = expected(&[("updated_at", "now")]);
    let mut set = |columns: &[(&str, &str)]| changes.extend(expected(columns));
    let far: &[(&str, &str)] = if table == Table::Lean { &[("next_attempt_at", FAR)] } else { &[] };
    match verdict {
        Verdict::Sent => set(&[("status", "sent"), ("published_at", "now"), ("last_error", "null")]),
        Verdict::Failed { error, .. } => {
            set(&[("status", "failed"), ("last_error", error), ("next_attempt_at", "now + 90500000 µs")]);
        }
        Verdict::Held { error } => {
            set(&[("status", "failed"), ("last_error", error), ("next_attempt_at", YEAR_9000)]);
        }
        Verdict::Dead { error } => {
            set(&[("status", "dead"), ("last_error", error)]);
            set(far);
        }
        Verdict::Rejected(Rejection { code, detail }) if table == Table::OlderShared => {
            set(&[("status", "dead"), ("last_error", &format!("rejected: {code}: {detail}"))]);
        }
        Verdict::Rejected(Rejection { code, detail }) => {
            set(&[("status", "rejected"), ("rejected_at", "now"), ("last_error", "null")]);
            set(&[("rejection_code", code), ("rejection_detail", detail)]);
            set(far);
            if table == Table::NewerShared {
                set(&[("published_at", "null")]);
            }
        }
        Verdict::Skipped { error } => {
            set(&[("status", "failed"), ("last_error", error), ("attempt_count", "2"), ("next_attempt_at", "now")]);
        }
        Verdict::Returned { error, .. } => {
            set(&[("status", "failed"), ("last_error", error), ("attempt_count", "2")]);
            set(&[("next_attempt_at", "now + 5000000 µs")]);
        }
    }
    changes
}

/// Rows of which a claim makes the third attempt, with all that a settlement may have to overwrite.
async fn attempted_twice(table: Table, numbers: impl IntoIterator<Item = u64>) -> Outbox {
    let outbox = Outbox::fresh(table).await;
    refill(&outbox, table, numbers).await;
    outbox
}

/// The same in a table that was used before.
async fn refill(outbox: &Outbox, table: Table, numbers: impl IntoIterator<Item = u64>) {
    let mut columns = json!({ "status": "failed", "attempt_count": 2, "last_error": "before" });
    if table != Table::Lean {
        columns["published_at"] = json!("2025-01-01 00:00:00+00");
    }
    let rows: Vec<_> = numbers.into_iter().map(|n| with(row(n), columns.clone())).collect();
    outbox.execute("truncate keiro.keiro_outbox").await;
    outbox.insert(&rows).await;
}

#[test]
fn every_verdict_writes_what_the_contract_says() {
    run(async || {
        for table in Table::ALL {
            // In one settlement, and each alone.
            let outbox = attempted_twice(table, 1..=14).await;
            let together = claim(&outbox.store, 1..=7).await;
            let mut before = Vec::new();
            for n in 1..=14 {
                if n > 7 {
                    claim(&outbox.store, [n]).await;
                }
                before.push(columns(&outbox.client, id(n)).await);
            }
            outbox
                .execute(
                    "update keiro.keiro_outbox set status = 'failed', attempt_count = 2 where message_id in \
                            ('m8', 'm9', 'm10', 'm11', 'm12', 'm13', 'm14')",
                )
                .await;
            assert_eq!(settle(&outbox.store, &together, &verdicts()).await, Vec::<Uuid>::new());
            for (n, verdict) in (8..).zip(verdicts()) {
                let alone = claim(&outbox.store, [n]).await;
                before[usize::try_from(n).expect("small") - 1] = columns(&outbox.client, id(n)).await;
                assert_eq!(settle(&outbox.store, &alone, &[verdict]).await, Vec::<Uuid>::new());
            }
            for ((n, verdict), before) in (1..).zip(verdicts().iter().cycle()).zip(&before) {
                let found = changes(&outbox, before, id(n)).await;
                assert_eq!(found, effects(table, verdict), "row {n} of {table:?}: {verdict:?}");
            }
        }
    });
}

#[test]
fn attempts_never_fall_below_zero() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let attempts = |n, attempts: i64| with(row(n), json!({ "attempt_count": attempts }));
            outbox.insert(&[attempts(1, 0), attempts(2, -5), attempts(3, i64::MIN), attempts(4, i64::MAX)]).await;
            let messages = claim(&outbox.store, 1..=4).await;
            let verdicts = [skipped(), skipped(), returned(), failed()];
            assert_eq!(settle(&outbox.store, &messages, &verdicts).await, Vec::<Uuid>::new());
            let found: Vec<i64> = outbox.rows().await.iter().map(|row| row.attempt_count).collect();
            assert_eq!(found, [0, 0, 0, i64::MAX], "{table:?}");
        }
    });
}

/// Texts of people, brokers and foreign publishers must not break the settlement that their neighbours are in.
#[test]
fn odd_texts_and_delays_are_made_fit() {
    run(async || {
        for table in Table::ALL {
            let outbox = attempted_twice(table, 1..=6).await;
            let messages = claim(&outbox.store, 1..=6).await;
            let verdicts = [
                Verdict::Failed { error: "a\0b".to_owned(), delay: Duration::ZERO },
                Verdict::Dead { error: "ü".repeat(4096) },
                Verdict::Rejected(Rejection { code: "Not A Code".to_owned(), detail: String::new() }),
                Verdict::Rejected(Rejection { code: "a.b".to_owned(), detail: "ü\0".repeat(1024) }),
                Verdict::Failed { error: "for ever".to_owned(), delay: Duration::MAX },
                Verdict::Returned { error: String::new(), pause: Duration::from_secs(1 << 40) },
            ];
            assert_eq!(settle(&outbox.store, &messages, &verdicts).await, Vec::<Uuid>::new(), "{table:?}");
            let rows = outbox.rows().await;
            let status: Vec<_> = rows.iter().map(|row| row.status.as_str()).collect();
            let refused = if table == Table::OlderShared { "dead" } else { "rejected" };
            assert_eq!(status, ["failed", "dead", refused, refused, "failed", "failed"]);
            assert_eq!(rows[0].last_error.as_deref(), Some("a\u{fffd}b"));
            assert_eq!(rows[1].last_error, Some("ü".repeat(2048)));
            assert_eq!(rows[5].last_error.as_deref(), Some(""));
            if table != Table::OlderShared {
                let third = columns(&outbox.client, id(3)).await;
                assert_eq!(
                    (&third["rejection_code"], &third["rejection_detail"]),
                    (&json!("publisher.rejected"), &json!("no detail"))
                );
                let fourth = columns(&outbox.client, id(4)).await;
                assert!(
                    fourth["rejection_detail"].as_str().is_some_and(|detail| (1020..=1024).contains(&detail.len()))
                );
            }
            // Later than anybody waits, and still a date that every table takes for a row that is not finished.
            let century = 50 * 365 * 24 * 3600 * 1_000_000;
            for row in &rows[4..] {
                assert!(row.next_attempt_at.0 - row.updated_at.0 > century, "{row:?}");
                assert!(!row.due);
            }
        }
    });
}

#[test]
fn an_older_table_may_become_newer_while_rows_are_in_flight() {
    run(async || {
        let outbox = attempted_twice(Table::OlderShared, 1..=3).await;
        let messages = claim(&outbox.store, 1..=2).await;
        outbox.execute(older_to_newer()).await;
        // Not noticed yet: what the older table would get, which the newer one takes.
        assert_eq!(settle(&outbox.store, &messages[..1], &[rejected()]).await, Vec::<Uuid>::new());
        let shape = outbox.store.inspect().await.expect("a table of the contract");
        assert!(shape.rejected_columns);
        outbox.store.adopt(&shape);
        assert_eq!(settle(&outbox.store, &messages[1..], &[rejected()]).await, Vec::<Uuid>::new());
        assert_eq!(claim(&outbox.store, [3]).await.len(), 1);
        let status: Vec<_> = outbox.rows().await.into_iter().map(|row| row.status).collect();
        assert_eq!(status, ["dead", "rejected", "publishing"]);
    });
}

/// Behind a transaction pooler there are no named statements.
#[test]
fn rows_are_claimed_and_settled_without_named_statements() {
    run(async || {
        for table in Table::ALL {
            let outbox = attempted_twice(table, 1..=7).await;
            let store = outbox.another(|config| config.database.prepared_statements = false);
            let messages = claim(&store, 1..=7).await;
            let mut before = Vec::new();
            for message in &messages {
                before.push(columns(&outbox.client, message.outbox_id).await);
            }
            assert_eq!(settle(&store, &messages, &verdicts()).await, Vec::<Uuid>::new());
            for ((n, verdict), before) in (1..).zip(&verdicts()).zip(&before) {
                assert_eq!(changes(&outbox, before, id(n)).await, effects(table, verdict), "{verdict:?}");
            }
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// The fence

/// What may happen to a row between a claim and its settlement.
#[derive(Debug, Clone, Copy)]
enum Meanwhile {
    /// The lease ran out: somebody freed the row.
    Requeued,
    /// And somebody claimed it again.
    ClaimedAgain,
    /// It was returned and claimed again, so that its attempt is ours; only the stamp is not.
    ReturnedAndClaimedAgain,
    /// Another attempt under our stamp. No clock does that, but the fence is both.
    AnotherAttempt,
    /// Another stamp and our attempt.
    AnotherStamp,
    /// A foreign publisher marked it.
    Sent,
    /// An operator took it.
    Cancelled,
    Deleted,
}

const MEANWHILE: [Meanwhile; 8] = [
    Meanwhile::Requeued,
    Meanwhile::ClaimedAgain,
    Meanwhile::ReturnedAndClaimedAgain,
    Meanwhile::AnotherAttempt,
    Meanwhile::AnotherStamp,
    Meanwhile::Sent,
    Meanwhile::Cancelled,
    Meanwhile::Deleted,
];

impl Meanwhile {
    async fn happen(self, outbox: &Outbox, other: &Store, messages: &[Message]) {
        let ids: Vec<Uuid> = messages.iter().map(|message| message.outbox_id).collect();
        let update = async |set: &str| {
            let update = format!("update keiro.keiro_outbox set {set} where outbox_id = any($1)");
            assert_eq!(outbox.client.execute(&update, &[&ids]).await.expect(&update), ids.len() as u64);
        };
        let requeue = async || {
            let requeued = other.requeue(&ids, Duration::ZERO, 10).await.expect("a requeue");
            assert_eq!((requeued.failed, requeued.dead), (ids.len(), 0));
        };
        let claim_again = async || {
            assert_eq!(
                other.claim_rows(&ids, ALL_BYTES, true, &PausedRows::default()).await.expect("a claim").messages.len(),
                ids.len()
            );
        };
        match self {
            Self::Requeued => requeue().await,
            Self::ClaimedAgain => {
                requeue().await;
                claim_again().await;
            }
            Self::ReturnedAndClaimedAgain => {
                let skipped = vec![skipped(); messages.len()];
                assert_eq!(settle(other, messages, &skipped).await, Vec::<Uuid>::new());
                claim_again().await;
            }
            Self::AnotherAttempt => update("attempt_count = attempt_count + 1").await,
            Self::AnotherStamp => update("updated_at = updated_at + interval '1 microsecond'").await,
            Self::Sent => update("status = 'sent', published_at = now()").await,
            Self::Cancelled => update("status = 'dead'").await,
            Self::Deleted => {
                let delete = "delete from keiro.keiro_outbox where outbox_id = any($1)";
                outbox.client.execute(delete, &[&ids]).await.expect(delete);
            }
        }
    }
}

#[test]
fn a_late_settlement_changes_nothing_and_says_what_it_lost() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let other = outbox.another(|_| ());
            for meanwhile in MEANWHILE {
                refill(&outbox, table, 1..=14).await;
                // The first half is lost; the second is still ours, in the same settlement.
                let messages = claim(&outbox.store, 1..=14).await;
                meanwhile.happen(&outbox, &other, &messages[..7]).await;
                let before = outbox.rows().await;
                let verdicts = [verdicts(), verdicts()].concat();
                let mut lost = settle(&outbox.store, &messages, &verdicts).await;
                lost.sort_unstable();
                assert_eq!(lost, (1..=7).map(id).collect::<Vec<_>>(), "{meanwhile:?} on {table:?}");
                let after = outbox.rows().await;
                for (before, after) in before.iter().zip(&after) {
                    if lost.contains(&before.id()) {
                        assert_eq!(before.text, after.text, "{meanwhile:?} on {table:?}");
                    } else {
                        assert_eq!(before.status, "publishing");
                        assert_ne!(after.status, "publishing", "{meanwhile:?} on {table:?}");
                    }
                }
                let mut lost = settle(&outbox.store, &messages, &verdicts).await;
                lost.sort_unstable();
                assert_eq!(lost, (1..=14).map(id).collect::<Vec<_>>(), "twice is too late");
                assert_eq!(after, outbox.rows().await);
            }
        }
    });
}

/// The row changes hands while the settlement waits for its lock.
#[test]
fn a_settlement_that_waits_for_a_lock_sees_what_it_waited_for() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let mut other = outbox.database.connect().await;
            for verdict in verdicts() {
                refill(&outbox, table, 1..=3).await;
                let messages = claim(&outbox.store, 1..=3).await;
                let transaction = other.transaction().await.expect("begin");
                let steal = "update keiro.keiro_outbox set status = 'failed', updated_at = statement_timestamp() where outbox_id = $1";
                assert_eq!(transaction.execute(steal, &[&id(2)]).await.expect(steal), 1);
                let verdicts = vec![verdict.clone(); 3];
                let (lost, ()) = tokio::join!(settle(&outbox.store, &messages, &verdicts), async {
                    wait_blocked(&outbox, &[]).await;
                    transaction.commit().await.expect("commit");
                });
                assert_eq!(lost, [id(2)], "{verdict:?} on {table:?}");
                let rows = outbox.rows().await;
                assert_eq!((rows[1].status.as_str(), rows[1].attempt_count), ("failed", 3));
                assert!(rows[0].status != "publishing" && rows[2].status != "publishing", "{rows:?}");
            }
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Lost answers

/// Waits until a session of ours waits for a lock that somebody holds, and returns its process id: not one of these.
async fn wait_blocked(outbox: &Outbox, known: &[i32]) -> i32 {
    const QUERY: &str = "select pid from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock' \
                         and application_name like 'keiro-relay/%' and state = 'active' and not pid = any($1)";
    let client = outbox.database.connect().await;
    let mut found = None;
    wait_until_async("a settlement to wait for a lock", LONG, async || {
        found = client.query_opt(QUERY, &[&known]).await.expect(QUERY).map(|row| row.get(0));
        found.is_some()
    })
    .await;
    found.expect("it was found")
}

#[test]
fn a_connection_lost_before_the_settlement_took_effect_costs_nothing() {
    run(async || {
        for table in Table::ALL {
            let outbox = attempted_twice(table, 1..=7).await;
            let messages = claim(&outbox.store, 1..=7).await;
            let mut before = Vec::new();
            for message in &messages {
                before.push(columns(&outbox.client, message.outbox_id).await);
            }
            let mut other = outbox.database.connect().await;
            let transaction = other.transaction().await.expect("begin");
            // The last row of each statement, so that the others of it are written and lost again.
            let lock = "select from keiro.keiro_outbox where message_id in ('m1', 'm7', 'm5') for update";
            transaction.batch_execute(lock).await.expect(lock);
            let verdicts = verdicts();
            let (lost, ()) = tokio::join!(settle(&outbox.store, &messages, &verdicts), async {
                let first = wait_blocked(&outbox, &[]).await;
                outbox.execute(&format!("select pg_terminate_backend({first})")).await;
                let second = wait_blocked(&outbox, &[first]).await;
                outbox.execute(&format!("select pg_terminate_backend({second})")).await;
                wait_blocked(&outbox, &[first, second]).await;
                transaction.rollback().await.expect("rollback");
            });
            assert_eq!(lost, Vec::<Uuid>::new(), "{table:?}");
            for ((n, verdict), before) in (1..).zip(&verdicts).zip(&before) {
                assert_eq!(changes(&outbox, before, id(n)).await, effects(table, verdict), "{verdict:?} on {table:?}");
            }
        }
    });
}

/// A way to the server that can lose what the server says.
struct Wire {
    url: String,
    muted: Arc<AtomicBool>,
    cut: Arc<Notify>,
    opened: Arc<AtomicUsize>,
}

impl Wire {
    /// Listens for as long as the runtime lives.
    async fn to(url: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("its address").port();
        let (user, place) = url.split_once('@').expect("a URL with a user");
        let (server, database) = place.split_once('/').expect("a URL with a database");
        let server = server.to_owned();
        let wire = Self {
            url: format!("{user}@127.0.0.1:{port}/{database}"),
            muted: Arc::default(),
            cut: Arc::default(),
            opened: Arc::default(),
        };
        let (muted, cut, opened) = (Arc::clone(&wire.muted), Arc::clone(&wire.cut), Arc::clone(&wire.opened));
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                opened.fetch_add(1, Ordering::Relaxed);
                let far = TcpStream::connect(&server).await.expect("the server");
                let (muted, cut) = (Arc::clone(&muted), Arc::clone(&cut));
                tokio::spawn(async move {
                    let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
                        (near.into_split(), far.into_split());
                    let up = async { tokio::io::copy(&mut from_near, &mut to_far).await };
                    let down = async {
                        let mut bytes = vec![0; 1 << 16];
                        while let Ok(count @ 1..) = from_far.read(&mut bytes).await {
                            if !muted.load(Ordering::Relaxed) && to_near.write_all(&bytes[..count]).await.is_err() {
                                break;
                            }
                        }
                    };
                    tokio::select! { _ = up => (), () = down => (), () = cut.notified() => () }
                });
            }
        });
        wire
    }

    /// From now on nothing that the server says arrives.
    fn mute(&self) {
        self.muted.store(true, Ordering::Relaxed);
    }

    /// Ends every connection; new ones work.
    fn cut(&self) {
        self.muted.store(false, Ordering::Relaxed);
        self.cut.notify_waiters();
    }
}

#[test]
fn a_settlement_whose_answer_was_lost_counts() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let wire = Wire::to(outbox.database.url()).await;
            for (n, verdict) in (1..).zip(verdicts()) {
                refill(&outbox, table, 1..=4).await;
                let store = outbox.another(|config| config.database.url = keiro_relay::config::Secret::new(&wire.url));
                let messages = claim(&store, 1..=3).await;
                let before = columns(&outbox.client, id(1)).await;
                // So that the statement is known to the server by the time that its answers are lost.
                let warm = claim(&store, [4]).await;
                assert_eq!(settle(&store, &warm, std::slice::from_ref(&verdict)).await, Vec::<Uuid>::new());
                let opened = wire.opened.load(Ordering::Relaxed);
                wire.mute();
                let verdicts = vec![verdict.clone(); 3];
                // Now and then somebody takes one of the rows in between: that one is no longer ours, whatever we wrote.
                let stolen = n % 2 == 0;
                let (lost, ()) = tokio::join!(settle(&store, &messages, &verdicts), async {
                    wait_until_async("the settlement to take effect", LONG, async || {
                        outbox.rows().await.iter().all(|row| row.status != "publishing")
                    })
                    .await;
                    if stolen {
                        let steal = "update keiro.keiro_outbox set status = 'publishing', attempt_count = attempt_count + 1, \
                                     updated_at = statement_timestamp(), published_at = null, next_attempt_at = now() \
                                     where message_id = 'm3' and status in ('failed', 'dead')";
                        outbox.execute(steal).await;
                    }
                    wire.cut();
                });
                assert!(wire.opened.load(Ordering::Relaxed) > opened, "it came over a new connection");
                let taken = outbox.rows().await[2].status == "publishing";
                assert_eq!(lost, if taken { vec![id(3)] } else { vec![] }, "{verdict:?} on {table:?}");
                assert_eq!(changes(&outbox, &before, id(1)).await, effects(table, &verdict), "written once");
            }
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Errors

/// Lets updates fail with this SQLSTATE, the first `times` times.
async fn refuse(outbox: &Outbox, code: &str, times: u32) {
    outbox
        .execute(&format!(
            "create sequence keiro.tries;
            create function keiro.refuse() returns trigger language plpgsql as $$ begin
              if nextval('keiro.tries') <= {times} then raise exception 'not now' using errcode = '{code}'; end if;
              return null;
            end $$;
            create trigger refuse after update on keiro.keiro_outbox for each statement execute function keiro.refuse()"
        ))
        .await;
}

#[test]
fn a_deadlock_or_a_serialisation_failure_is_tried_again() {
    run(async || {
        for code in ["40P01", "40001"] {
            let outbox = attempted_twice(Table::Lean, 1..=7).await;
            let messages = claim(&outbox.store, 1..=7).await;
            refuse(&outbox, code, 2).await;
            assert_eq!(settle(&outbox.store, &messages, &verdicts()).await, Vec::<Uuid>::new());
            assert_eq!(outbox.database.value("select last_value from keiro.tries"), "5", "two refused, three written");
            assert!(outbox.rows().await.iter().all(|row| row.status != "publishing"));
        }
    });
}

#[test]
fn an_error_that_stays_is_told_at_once() {
    run(async || {
        let outbox = attempted_twice(Table::Lean, 1..=1).await;
        let messages = claim(&outbox.store, 1..=1).await;
        refuse(&outbox, "23514", u32::MAX).await;
        let settled = outbox.store.settle(&messages, &[sent()], Instant::now() + LONG).await;
        let (error, ids) = settled.failed.expect("it is refused");
        assert_eq!((ids, settled.lost), (vec![id(1)], vec![]));
        assert_eq!((error.kind(), error.code()), (ErrorKind::Fatal, Some("23514")));
        assert_eq!(outbox.database.value("select last_value from keiro.tries"), "1", "tried once");
        assert_eq!(outbox.rows().await[0].status, "publishing");
    });
}

/// A check or a trigger of somebody's on one kind of row is no reason to leave the others in publishing.
#[test]
fn an_error_of_one_kind_of_verdict_keeps_no_other_from_being_written() {
    run(async || {
        for refused in ["sent", "failed", "rejected"] {
            let outbox = attempted_twice(Table::NewerShared, 1..=3).await;
            let messages = claim(&outbox.store, 1..=3).await;
            outbox
                .execute(&format!(
                    "alter table keiro.keiro_outbox add constraint c check (status <> '{refused}') not valid"
                ))
                .await;
            let verdicts = [sent(), failed(), rejected()];
            let settled = outbox.store.settle(&messages, &verdicts, Instant::now() + LONG).await;
            let (error, ids) = settled.failed.expect("one is refused");
            assert_eq!((error.code(), ids.len(), settled.lost), (Some("23514"), 1, vec![]));
            let rows = outbox.rows().await;
            let found: Vec<&str> = rows.iter().map(|row| row.status.as_str()).collect();
            let expected =
                ["sent", "failed", "rejected"].map(|status| if status == refused { "publishing" } else { status });
            assert_eq!(found, expected);
        }
    });
}

/// From then on the lease is no longer ours to trust, and somebody waits for us to stop.
#[test]
fn a_settlement_ends_when_it_is_told_to() {
    run(async || {
        let outbox = attempted_twice(Table::Lean, 1..=1).await;
        let messages = claim(&outbox.store, 1..=1).await;
        let mut other = outbox.database.connect().await;
        let transaction = other.transaction().await.expect("begin");
        transaction.batch_execute("lock table keiro.keiro_outbox in exclusive mode").await.expect("the lock");
        let started = Instant::now();
        let settled = outbox.store.settle(&messages, &[sent()], started + Duration::from_millis(300)).await;
        let (error, _) = settled.failed.expect("in vain");
        assert!(matches!(error, StoreError::Timeout { .. }), "{error:?}");
        // Not after the statement's own half minute.
        assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
        // And it holds nothing any more: it does not come back to life with the lock.
        wait_until_async("the statement to be cancelled", LONG, async || {
            let waiting = "select not exists (select from pg_locks where relation = 'keiro.keiro_outbox'::regclass and not granted)";
            outbox.client.query_one(waiting, &[]).await.expect(waiting).get(0)
        })
        .await;
        transaction.rollback().await.expect("rollback");
        assert_eq!(outbox.rows().await[0].status, "publishing");
    });
}

/// Whoever locks rows locks them in id order, or does not wait: nobody ever waits in a circle.
#[test]
fn settlers_requeue_retention_and_operator_never_deadlock() {
    const ROWS: u64 = 60;
    const ROUNDS: usize = 25;
    const OPERATOR: &str = "with t as materialized (
          select outbox_id from keiro.keiro_outbox where outbox_id = any($1) and status in ('dead', 'failed') order by outbox_id for update)
        update keiro.keiro_outbox k set status = 'pending', attempt_count = 0, next_attempt_at = statement_timestamp(), last_error = null,
          published_at = null, updated_at = statement_timestamp()
        where k.outbox_id = any(array(select outbox_id from t))";
    run(async || {
        let seed = seed();
        for table in [Table::NewerShared, Table::Lean] {
            let outbox = Outbox::fresh(table).await;
            // A deadlock would be noticed, and end, sooner.
            outbox.execute("do $$ begin execute format('alter database %I set deadlock_timeout = ''50ms''', current_database()); end $$").await;
            let ids: Vec<Uuid> = (1..=ROWS).map(id).collect();
            let stores: Vec<Store> = (0..4).map(|_| outbox.another(|_| ())).collect();
            let mut rng = StdRng::seed_from_u64(seed);
            for _ in 0..ROUNDS {
                outbox.execute("truncate keiro.keiro_outbox").await;
                let rows: Vec<_> = (1..=ROWS).map(|n| keyed(n, "k")).collect();
                outbox.insert(&rows).await;
                let messages = claim(&outbox.store, 1..=ROWS).await;
                // Four who all believe the claim to be theirs, each with its own order and verdicts.
                let mut settlers = Vec::new();
                for store in &stores {
                    let mut messages = messages.clone();
                    messages.shuffle(&mut rng);
                    let verdicts: Vec<Verdict> = messages
                        .iter()
                        .map(|_| one_of(&mut rng, &[sent(), sent(), dead(), skipped(), failed()]))
                        .collect();
                    settlers.push((store, messages, verdicts));
                }
                let mut shuffled = ids.clone();
                shuffled.shuffle(&mut rng);
                let pause = Duration::from_micros(rng.random_range(0..3000));
                let settled = futures_util::future::join_all(
                    settlers.iter().map(|(store, messages, verdicts)| settle(store, messages, verdicts)),
                );
                let ((), (), (), lost) = tokio::join!(
                    async {
                        outbox.store.requeue(&shuffled, Duration::ZERO, 10).await.expect("a requeue");
                    },
                    async {
                        tokio::time::sleep(pause).await;
                        let from = keiro_relay::domain::message::PgTime::NEG_INFINITY;
                        stores[0].delete_sent(Duration::ZERO, 1000, from).await.expect("retention");
                    },
                    async {
                        let operator = outbox.database.connect().await;
                        operator.execute(OPERATOR, &[&shuffled]).await.expect(OPERATOR);
                    },
                    settled,
                );
                // Each row was settled by one of them at most.
                let settled: usize = lost.iter().map(|lost| ids.len() - lost.len()).sum();
                assert!(settled <= ids.len(), "{settled} settlements of {ROWS} rows");
            }
            drop(stores);
            let name = outbox.database.name().to_owned();
            let admin = crate::support::database::connect(crate::support::services::database_url()).await;
            drop(outbox.client);
            drop(outbox.store);
            // What sessions counted is written when they end.
            wait_until_async("the sessions to end", LONG, async || {
                let left = "select count(*) from pg_stat_activity where datname = $1";
                admin.query_one(left, &[&name]).await.expect(left).get::<_, i64>(0) == 0
            })
            .await;
            let deadlocks = "select deadlocks from pg_stat_database where datname = $1";
            assert_eq!(admin.query_one(deadlocks, &[&name]).await.expect(deadlocks).get::<_, i64>(0), 0, "{table:?}");
            drop(outbox.database);
        }
    });
}
