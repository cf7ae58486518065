//! The slow timer's statements and the looks at the table that lead to a claim, against a plain reading of the contract.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use keiro_relay::config::Secret;
use keiro_relay::domain::lanes::{Glimpse, RowState};
use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::pause::PausedRows;
use keiro_relay::store::{Finished, Requeued, Store};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::database::Table;
use crate::support::outbox::{Outbox, Row, columns, id, keyed, row, seed, with};
use crate::support::random::{Kinds, SOURCES, TOPICS, draw_paused, one_of};
use crate::support::{run, unique};

const HOUR: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(300);
/// How far two looks at a clock may be apart on a busy machine.
const CLOCK_SLACK_SECONDS: f64 = 60.0;

// ---------------------------------------------------------------------------------------------------------------
// Looks at the table

/// A row in a status that holds back its lane, as a glimpse shows it; of a later one only that it is later.
fn glimpsed(row: &Row, paused: &PausedRows) -> (Position, Option<String>, &'static str, bool) {
    let state = match row.status.as_str() {
        "pending" | "failed" if held_back(row, paused) => "paused",
        "pending" | "failed" if row.due => "due",
        "pending" | "failed" => "later",
        "publishing" => "publishing",
        _ => "unknown",
    };
    (row.position, row.key.clone(), state, row.attempt_count > 0)
}

fn held_back(row: &Row, paused: &PausedRows) -> bool {
    paused.topics.contains(&row.destination) || row.key.as_ref().is_some_and(|key| paused.keys.contains(key))
}

fn seen(glimpse: &Glimpse) -> (Position, Option<String>, &'static str, bool) {
    let state = match glimpse.state {
        RowState::Due => "due",
        RowState::Later(delay) => {
            // The next look comes after 15 s at most: nobody needs to know more than an hour.
            assert!(delay > Duration::ZERO && delay <= HOUR, "{delay:?}");
            "later"
        }
        RowState::Paused => "paused",
        RowState::Publishing => "publishing",
        RowState::Unknown => "unknown",
    };
    (glimpse.position, glimpse.message_key.as_deref().map(str::to_owned), state, glimpse.attempted)
}

fn all_seen(glimpses: &[Glimpse]) -> Vec<(Position, Option<String>, &'static str, bool)> {
    glimpses.iter().map(seen).collect()
}

/// Seconds since this time, none before 1970 and none ahead of now.
fn age(time: PgTime) -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a clock after 1970").as_secs_f64();
    let since = match time {
        PgTime::INFINITY => now,
        PgTime::NEG_INFINITY => 0.0,
        #[expect(clippy::cast_precision_loss, reason = "compared with a minute's slack")]
        time => time.unix_micros().expect("a date") as f64 / 1e6,
    };
    (now - since.max(0.0)).max(0.0)
}

#[track_caller]
fn assert_age(found: f64, time: PgTime) {
    assert!((found - age(time)).abs() < CLOCK_SLACK_SECONDS, "{found} s, expected {} s", age(time));
}

/// A position near one of the rows, or before or behind all of them.
fn draw_position(rng: &mut StdRng, rows: &[Row]) -> Position {
    match rng.random_range(0..4) {
        0 => Position::START,
        1 => Position { created_at: PgTime::INFINITY, outbox_id: Uuid::max() },
        _ if rows.is_empty() => Position::START,
        2 => Position::at(one_of(rng, rows).position.created_at),
        _ => one_of(rng, rows).position,
    }
}

/// Every statement that looks, on one table.
async fn look(rng: &mut StdRng, kinds: &Kinds, store: &Store, rows: &[Row]) {
    let lean = kinds.table == Table::Lean;
    let far = |row: &Row| row.next_attempt_at >= PgTime(252_423_993_600_000_000);
    let source = one_of(rng, &kinds.sources);
    let paused = draw_paused(rng, &TOPICS, &kinds.keys);
    let live: Vec<&Row> = rows.iter().filter(|row| row.source == source && row.is_live()).collect();
    let count = |status: &str| live.iter().filter(|row| row.status == status).count() as u64;

    let after = draw_position(rng, rows);
    let limit = rng.random_range(1..20);
    let window: Vec<&Row> = live.iter().copied().filter(|row| row.position > after).take(limit).collect();
    let found = store.discover(source, after, limit, &paused).await.expect("DISCOVER");
    assert_eq!(all_seen(&found), window.iter().map(|row| glimpsed(row, &paused)).collect::<Vec<_>>());

    let stale = store.stale(source, after, limit, LEASE).await.expect("STALE");
    let mut expected: Vec<Uuid> =
        window.iter().filter(|row| row.status == "publishing" && is_stale(row)).map(|row| row.id()).collect();
    expected.sort_unstable();
    assert_eq!(stale.stale, expected);
    let full = window.len() == limit;
    assert_eq!(stale.resume_after, window.last().filter(|_| full).map(|row| row.position));

    let mut found = all_seen(&store.peek_keys(source, &kinds.distinct_keys(), &paused).await.expect("PEEK"));
    found.sort();
    let mut heads = BTreeMap::new();
    for row in live.iter().rev().filter(|row| row.key.is_some()) {
        heads.insert(row.key.clone(), glimpsed(row, &paused));
    }
    let mut expected: Vec<_> = heads.into_values().collect();
    expected.sort();
    assert_eq!(found, expected);

    let asked: Vec<&Row> = rows.iter().filter(|_| rng.random_bool(0.3)).collect();
    let ids: Vec<Uuid> = asked.iter().map(|row| row.id()).chain([Uuid::nil()]).collect();
    let mut found = all_seen(&store.peek_rows(&ids, &paused).await.expect("PEEK"));
    found.sort();
    assert_eq!(found, asked.iter().filter(|row| row.is_live()).map(|row| glimpsed(row, &paused)).collect::<Vec<_>>());

    let backlog = store.backlog(source, 1000).await.expect("BACKLOG");
    let known = ["pending", "failed", "publishing"];
    let unknown = live.iter().filter(|row| !known.contains(&row.status.as_str())).count() as u64;
    assert_eq!(
        (backlog.pending, backlog.failed, backlog.publishing, backlog.unknown),
        (count("pending"), count("failed"), count("publishing"), unknown)
    );
    assert!(!backlog.capped);
    match (live.first(), backlog.oldest_age_seconds) {
        (None, None) => {}
        (Some(oldest), Some(found)) => assert_age(found, oldest.position.created_at),
        (oldest, found) => panic!("{found:?} for {oldest:?}"),
    }
    if rows.iter().filter(|row| row.source == source).count() > 1 {
        assert!(store.backlog(source, 1).await.expect("BACKLOG").capped || live.is_empty());
    }

    // Dead and rejected rows are counted once: by their own index, or among the live ones where a foreigner left them.
    let finished = store.finished(1000).await.expect("FINISHED");
    let counted = |status: &str| {
        let found = finished.iter().find(|found| found.source_name == source && found.status == status);
        found.map_or(0, |found: &Finished| found.rows)
    };
    for (status, among_live) in [("dead", backlog.dead), ("rejected", backlog.rejected)] {
        let of_status = || rows.iter().filter(|row| row.source == source && row.status == status);
        let near = of_status().filter(|row| lean && !far(row)).count() as u64;
        assert_eq!((among_live, counted(status)), (near, of_status().count() as u64 - near), "{status}");
    }
    assert!(finished.iter().all(|found| found.rows > 0 && ["dead", "rejected"].contains(&found.status.as_str())));

    let heads = store.heads(source, limit, &paused).await.expect("HEADS");
    assert_eq!(heads.len(), live.len().min(limit));
    assert!(heads.iter().zip(&live).all(|(head, row)| head.paused == held_back(row, &paused)));
    for (head, row) in heads.iter().zip(&live) {
        let held = row.next_attempt_at >= PgTime(220_898_620_800_000_000);
        let found = (head.outbox_id, &head.message_key, &head.status, head.attempt_count, head.due, head.held);
        assert_eq!(found, (row.id(), &row.key, &row.status, row.attempt_count, row.due, held));
        assert_eq!(head.last_error, row.last_error.clone().unwrap_or_default());
        assert_age(head.waiting_seconds, row.next_attempt_at.max(row.position.created_at));
    }

    let due = live.iter().filter(|row| row.is_claimable()).count() as u64;
    assert_eq!(store.due(source).await.expect("DUE"), due);
    let sent = rows.iter().filter(|row| row.source == source && row.status == "sent").count();
    assert_eq!(store.count_sent(source, 1000).await.expect("COUNT SENT"), sent as u64);
    assert_eq!(store.count_sent(source, 1).await.expect("COUNT SENT"), sent.min(1) as u64);

    let sources: BTreeSet<&str> = rows.iter().map(|row| row.source.as_str()).collect();
    let found = store.sources(1000).await.expect("SOURCES");
    assert_eq!(found.iter().map(String::as_str).collect::<BTreeSet<_>>(), sources);
    assert_eq!(found.len(), sources.len(), "each once");
    assert_eq!(store.sources(1).await.expect("SOURCES").len(), sources.len().min(1));

    let asked: Vec<(Arc<str>, Position)> =
        SOURCES.iter().chain(&["nobody"]).map(|source| (Arc::from(*source), draw_position(rng, rows))).collect();
    let mut found = store.poll(&asked).await.expect("POLL");
    found.sort();
    let behind = |(source, after): &&(Arc<str>, Position)| {
        rows.iter().any(|row| row.source == **source && row.is_live() && row.position > *after)
    };
    let mut expected: Vec<String> = asked.iter().filter(behind).map(|(source, _)| source.to_string()).collect();
    expected.sort();
    assert_eq!(found, expected);
}

/// Whether a lease of five minutes has run out, by a clock that agrees with the database's to a minute.
fn is_stale(row: &Row) -> bool {
    row.updated_at == PgTime::NEG_INFINITY || (row.updated_at != PgTime::INFINITY && age(row.updated_at) > 360.0)
}

/// A requeue of random rows: those in publishing whose lease ran out change, and nothing else.
async fn requeue(rng: &mut StdRng, outbox: &Outbox, rows: &[Row]) {
    let ids: Vec<Uuid> = rows.iter().filter(|_| rng.random_bool(0.7)).map(Row::id).chain([Uuid::nil()]).collect();
    let stale = |row: &&Row| ids.contains(&row.id()) && row.status == "publishing" && is_stale(row);
    let attempts_spent = rows.iter().filter(stale).filter(|row| row.attempt_count >= 2).count();
    let expected = Requeued { failed: rows.iter().filter(stale).count() - attempts_spent, dead: attempts_spent };
    assert_eq!(outbox.store.requeue(&ids, LEASE, 2).await.expect("REQUEUE"), expected);
    for (before, after) in rows.iter().zip(outbox.rows().await) {
        if !stale(&before) {
            assert_eq!(before.text, after.text);
            continue;
        }
        let status = if before.attempt_count >= 2 { "dead" } else { "failed" };
        let last_error = before.last_error.as_deref().unwrap_or("reclaimed: publisher crashed mid-publish");
        assert_eq!((after.status.as_str(), after.attempt_count), (status, before.attempt_count));
        assert_eq!((after.last_error.as_deref(), after.published_at), (Some(last_error), before.published_at));
        assert!(after.updated_at > before.updated_at);
    }
}

async fn random_tables(table: Table, tables: usize, prepare: &str) {
    let mut rng = StdRng::seed_from_u64(seed());
    let outbox = Outbox::fresh(table).await;
    outbox.execute(prepare).await;
    for _ in 0..tables {
        let kinds = Kinds::draw(&mut rng, table);
        let rows: Vec<_> = (0..rng.random_range(0..40)).map(|n| kinds.row(&mut rng, n)).collect();
        outbox.execute("truncate keiro.keiro_outbox").await;
        outbox.insert(&rows).await;
        let rows = outbox.rows().await;
        look(&mut rng, &kinds, &outbox.store, &rows).await;
        requeue(&mut rng, &outbox, &rows).await;
    }
}

#[test]
fn looks_at_random_older_shared_tables_see_what_is_there() {
    run(async || random_tables(Table::OlderShared, 40, "").await);
}

#[test]
fn looks_at_random_newer_shared_tables_see_what_is_there() {
    run(async || random_tables(Table::NewerShared, 40, "").await);
}

#[test]
fn looks_at_random_lean_tables_see_what_is_there() {
    run(async || random_tables(Table::Lean, 40, "").await);
}

#[test]
fn looks_at_random_tables_with_a_language_of_their_own_see_what_is_there() {
    const COLLATE: &str = "alter table keiro.keiro_outbox alter column source type text collate \"und-x-icu\", \
                           alter column message_key type text collate \"und-x-icu\"";
    run(async || random_tables(Table::Lean, 30, COLLATE).await);
}

// ---------------------------------------------------------------------------------------------------------------
// Requeue

fn publishing(n: u64, updated_at: &str) -> Value {
    with(keyed(n, "k"), json!({ "status": "publishing", "attempt_count": 1, "updated_at": updated_at }))
}

/// Young rows, however many, do not hide stale ones behind them.
#[test]
fn stale_rows_behind_young_ones_are_found_in_one_pass() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let rows: Vec<_> = (1..=150)
                .map(|n| publishing(n, "2999-01-01 00:00:00+00"))
                .chain((151..=160).map(|n| publishing(n, "2026-01-01 00:00:00+00")))
                .collect();
            outbox.insert(&rows).await;
            let stale: Vec<Uuid> = (151..=160).map(id).collect();
            let whole = outbox.store.stale("s", Position::START, 2000, LEASE).await.expect("STALE");
            assert_eq!((whole.stale, whole.resume_after), (stale.clone(), None));

            // The same in windows, as the slow timer walks a long table.
            let (mut found, mut after, mut windows) = (Vec::new(), Position::START, 0);
            loop {
                let window = outbox.store.stale("s", after, 50, LEASE).await.expect("STALE");
                found.extend(window.stale);
                windows += 1;
                let Some(next) = window.resume_after else { break };
                after = next;
            }
            assert_eq!((&found, windows), (&stale, 4));

            let young = outbox.rows().await;
            let requeued = outbox.store.requeue(&found, LEASE, 10).await.expect("REQUEUE");
            assert_eq!(requeued, Requeued { failed: 10, dead: 0 });
            let after = outbox.rows().await;
            assert_eq!(young[..150], after[..150], "a lease from the future is left alone");
            assert!(after[150..].iter().all(|row| row.status == "failed" && row.due));
            assert_eq!(outbox.store.requeue(&found, LEASE, 10).await.expect("REQUEUE"), Requeued::default());
        }
    });
}

#[test]
fn a_requeue_writes_what_the_contract_says() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let row = |n: u64, attempts: i64, last_error: Option<&str>| {
                with(
                    publishing(n, "2026-01-01 00:00:00+00"),
                    json!({ "attempt_count": attempts, "last_error": last_error }),
                )
            };
            outbox.insert(&[row(1, 1, None), row(2, 9, Some("before")), row(3, 10, None), row(4, 11, Some(""))]).await;
            let ids: Vec<Uuid> = (1..=4).map(id).collect();
            let mut before = Vec::new();
            for id in &ids {
                before.push(columns(&outbox.client, *id).await);
            }
            let requeued = outbox.store.requeue(&ids, LEASE, 10).await.expect("REQUEUE");
            assert_eq!(requeued, Requeued { failed: 2, dead: 2 });
            let crashed = "reclaimed: publisher crashed mid-publish";
            for ((id, before), (status, last_error)) in ids.iter().zip(&before).zip([
                ("failed", crashed),
                ("failed", "before"),
                ("dead", crashed),
                ("dead", ""),
            ]) {
                let after = columns(&outbox.client, *id).await;
                let mut expected = before.clone();
                expected.insert("status".to_owned(), json!(status));
                expected.insert("last_error".to_owned(), json!(last_error));
                expected.insert("updated_at".to_owned(), after["updated_at"].clone());
                if status == "dead" && table == Table::Lean {
                    expected.insert("next_attempt_at".to_owned(), json!("9999-12-31T00:00:00+00:00"));
                }
                assert_eq!(after, expected, "{table:?}");
                assert_ne!(after["updated_at"], before["updated_at"]);
            }
        }
    });
}

/// Somebody settles the row, or holds it, while we think that it is stale.
#[test]
fn a_requeue_neither_waits_nor_believes_what_it_saw_before() {
    run(async || {
        let outbox = Outbox::fresh(Table::Lean).await;
        let rows: Vec<_> = (1..=3).map(|n| publishing(n, "2026-01-01 00:00:00+00")).collect();
        outbox.insert(&rows).await;
        let stale = outbox.store.stale("s", Position::START, 10, LEASE).await.expect("STALE").stale;
        assert_eq!(stale.len(), 3);
        outbox
            .execute("update keiro.keiro_outbox set status = 'sent', published_at = now() where message_id = 'm1'")
            .await;
        let mut other = outbox.database.connect().await;
        let transaction = other.transaction().await.expect("begin");
        transaction
            .batch_execute("select from keiro.keiro_outbox where message_id = 'm2' for update")
            .await
            .expect("lock");
        let requeued = outbox.store.requeue(&stale, LEASE, 10).await.expect("REQUEUE");
        assert_eq!(requeued, Requeued { failed: 1, dead: 0 });
        transaction.rollback().await.expect("rollback");
        let status: Vec<_> = outbox.rows().await.into_iter().map(|row| row.status).collect();
        assert_eq!(status, ["sent", "publishing", "failed"]);

        // Two relays at once free each row once.
        outbox
            .execute(
                "update keiro.keiro_outbox set status = 'publishing', published_at = null, updated_at = '2026-01-01'",
            )
            .await;
        let another = outbox.another(|_| ());
        let (one, two) = tokio::join!(outbox.store.requeue(&stale, LEASE, 10), another.requeue(&stale, LEASE, 10));
        assert_eq!(one.expect("REQUEUE").failed + two.expect("REQUEUE").failed, 3);
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Retention

#[test]
fn retention_deletes_sent_rows_of_that_age_and_nothing_else() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let shared = table != Table::Lean;
            let mut rows = Vec::new();
            let mut add = |columns: Value| rows.push(with(row(rows.len() as u64 + 1), columns));
            for status in ["pending", "failed", "publishing", "dead", "unheard of"] {
                add(json!({ "status": status }));
                if shared {
                    // Stale: the row was replayed by somebody who forgot it.
                    add(json!({ "status": status, "published_at": "2020-01-01 00:00:00+00" }));
                }
            }
            if table != Table::OlderShared {
                add(json!({ "status": "rejected", "rejected_at": "2020-01-01 00:00:00+00", "rejection_code": "a.b" }));
            }
            if shared {
                add(json!({ "status": "sent" }));
            }
            for published_at in ["2999-01-01 00:00:00+00", "infinity"] {
                add(json!({ "status": "sent", "published_at": published_at }));
            }
            let kept = rows.len();
            let mut add = |columns: Value| rows.push(with(row(rows.len() as u64 + 1), columns));
            for published_at in ["-infinity", "2020-01-01 00:00:00+00", "2026-01-01 00:00:00+00"] {
                add(json!({ "status": "sent", "published_at": published_at }));
            }
            outbox.insert(&rows).await;
            let young = "update keiro.keiro_outbox set published_at = now() - interval '59 minutes' where message_id = 'm1'; \
                         update keiro.keiro_outbox set status = 'sent' where message_id = 'm1'";
            outbox.execute(if shared { young } else { "select" }).await;
            let before = outbox.rows().await;

            let (deleted, reached) =
                outbox.store.delete_sent(HOUR, 1000, PgTime::NEG_INFINITY).await.expect("RETENTION");
            assert_eq!((deleted, reached), (3, Some(PgTime::from_unix_micros(1_767_225_600_000_000))), "{table:?}");
            assert_eq!(outbox.rows().await, before[..kept]);
            let nothing = outbox.store.delete_sent(HOUR, 1000, PgTime::NEG_INFINITY).await.expect("RETENTION");
            assert_eq!(nothing, (0, None));
            // An age that no calendar has keeps everything.
            let nothing = outbox.store.delete_sent(Duration::MAX, 1000, PgTime::NEG_INFINITY).await.expect("RETENTION");
            assert_eq!(nothing, (0, None));
        }
    });
}

/// Batches go on where the last one ended, also in the middle of rows that were settled together; what somebody holds is left.
#[test]
fn retention_walks_on_in_batches() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let rows: Vec<_> = (1..=25_u64)
                .map(|n| {
                    let published_at = format!("2026-01-01 00:00:{:02}+00", n / 10);
                    with(row(n), json!({ "status": "sent", "published_at": published_at }))
                })
                .collect();
            outbox.insert(&rows).await;
            let mut other = outbox.database.connect().await;
            let transaction = other.transaction().await.expect("begin");
            transaction
                .batch_execute("select from keiro.keiro_outbox where message_id = 'm3' for update")
                .await
                .expect("lock");
            let (mut deleted, mut from) = (Vec::new(), PgTime::NEG_INFINITY);
            loop {
                let (count, reached) = outbox.store.delete_sent(HOUR, 7, from).await.expect("RETENTION");
                deleted.push(count);
                let Some(reached) = reached else { break };
                assert!(reached >= from);
                from = reached;
            }
            assert_eq!(deleted, [7, 7, 7, 3, 0], "{table:?}");
            transaction.rollback().await.expect("rollback");
            assert_eq!(outbox.rows().await.len(), 1);
            let (count, _) = outbox.store.delete_sent(HOUR, 7, PgTime::NEG_INFINITY).await.expect("RETENTION");
            assert_eq!(count, 1);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Late floor

/// The database's clock.
async fn now(outbox: &Outbox) -> PgTime {
    outbox.client.query_one("select clock_timestamp()", &[]).await.expect("the time").get(0)
}

#[test]
fn the_late_floor_is_the_start_of_the_oldest_transaction() {
    run(async || {
        let outbox = Outbox::fresh(Table::Lean).await;
        let mut one = outbox.database.connect().await;
        let mut two = outbox.database.connect().await;
        let before = now(&outbox).await;
        let floor = outbox.store.late_floor().await.expect("LATE FLOOR");
        assert!(floor >= before, "sessions that do nothing hold nothing back");

        let first = one.transaction().await.expect("begin");
        let began: PgTime = first.query_one("select now()", &[]).await.expect("its start").get(0);
        let second = two.transaction().await.expect("begin");
        second.query_one("select now()", &[]).await.expect("its start");
        let elsewhere = crate::support::database::connect(crate::support::services::database_url()).await;
        elsewhere.batch_execute("begin; select now()").await.expect("a transaction in another database");
        assert_eq!(outbox.store.late_floor().await.expect("LATE FLOOR"), began);
        first.rollback().await.expect("rollback");
        let floor = outbox.store.late_floor().await.expect("LATE FLOOR");
        assert!(floor > began && floor < now(&outbox).await);
        second.rollback().await.expect("rollback");
        let before = now(&outbox).await;
        assert!(outbox.store.late_floor().await.expect("LATE FLOOR") >= before);
    });
}

#[test]
fn without_the_right_to_see_others_the_late_floor_is_a_minute_ago() {
    run(async || {
        let outbox = Outbox::fresh(Table::Lean).await;
        let role = unique("role");
        outbox
            .execute(&format!(
                "create role {role} login password 'secret'; grant usage on schema keiro to {role};
                grant select, update on keiro.keiro_outbox to {role}"
            ))
            .await;
        let place = outbox.database.url().split_once('@').expect("a URL with a user").1;
        let url = format!("postgres://{role}:secret@{place}");
        let store = outbox.another(|config| config.database.url = Secret::new(url));
        let minute = 60_000_000;
        let before = now(&outbox).await;
        let floor = store.late_floor().await.expect("LATE FLOOR");
        let after = now(&outbox).await;
        assert!(floor.0 >= before.0 - minute && floor.0 <= after.0 - minute, "{floor:?}");

        // The grant is seen at once, by the sessions that are open.
        outbox.execute(&format!("grant pg_read_all_stats to {role}")).await;
        let floor = store.late_floor().await.expect("LATE FLOOR");
        assert!(floor >= after, "{floor:?}");
        drop(store);
        outbox.execute(&format!("drop owned by {role}; drop role {role}")).await;
    });
}
