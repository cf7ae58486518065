//! Pages of rows against a plain filter in memory, on random tables of every kind: nothing is missing, twice, or out of order.

use std::collections::BTreeSet;
use std::time::Duration;

use keiro_relay::domain::message::PgTime;
use keiro_relay::store::{Page, Selection, Sort, Status, Store, When};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use uuid::Uuid;

use crate::support::LONG;
use crate::support::database::Table;
use crate::support::outbox::{Outbox, id, keyed, row, seed, with};
use crate::support::random::{Kinds, one_of};

const ROUNDS: usize = 2;
const ROWS: u64 = 150;
const QUERIES: usize = 60;

/// A row as the model sees it.
#[derive(Debug, Clone)]
struct Seen {
    id: Uuid,
    source: String,
    topic: String,
    key: Option<String>,
    event_type: String,
    message_id: String,
    status: String,
    error: Option<String>,
    code: Option<String>,
    due_at: PgTime,
    created_at: PgTime,
    updated_at: PgTime,
    published_at: Option<PgTime>,
}

async fn look(outbox: &Outbox, code: &str) -> Vec<Seen> {
    let sql = format!(
        "select outbox_id, source, destination, message_key, event_type, message_id, status, last_error, {code}, next_attempt_at, \
         created_at, updated_at, published_at from keiro.keiro_outbox"
    );
    let rows = outbox.client.query(&sql, &[]).await.expect(&sql);
    let seen = |row: &tokio_postgres::Row| Seen {
        id: row.get(0),
        source: row.get(1),
        topic: row.get(2),
        key: row.get(3),
        event_type: row.get(4),
        message_id: row.get(5),
        status: row.get(6),
        error: row.get(7),
        code: row.get(8),
        due_at: row.get(9),
        created_at: row.get(10),
        updated_at: row.get(11),
        published_at: row.get(12),
    };
    rows.iter().map(seen).collect()
}

fn draw(rng: &mut StdRng, rows: &[Seen], now: PgTime) -> Selection {
    let mut selection = Selection::default();
    let any = |rng: &mut StdRng| rows[rng.random_range(0..rows.len())].clone();
    for _ in 0..rng.random_range(0..4) {
        match rng.random_range(0..13) {
            0 => selection.ids.extend([any(rng).id, any(rng).id, Uuid::nil()]),
            1 | 2 => selection.sources.extend([any(rng).source, "nobody".to_owned()]),
            3 | 4 => selection.statuses.extend([one_of(rng, &Status::ALL), one_of(rng, &Status::ALL)]),
            5 => selection.statuses.extend(Status::LIVE),
            6 => selection.topics.push(any(rng).topic),
            7 => selection.keys.extend(any(rng).key),
            8 => selection.event_types.push(one_of(rng, &["Tested".to_owned(), "Other".to_owned()])),
            9 => selection.message_ids.extend([any(rng).message_id, any(rng).message_id]),
            10 => selection.since = Some(When::At(any(rng).created_at)),
            11 => selection.until = Some(When::At(PgTime(now.0 - rng.random_range(0..1_000_000)))),
            12 if rng.random() => selection.errors.push("kafka.some_code".to_owned()),
            _ => selection.due = Some(rng.random()),
        }
    }
    selection
}

/// Whether the row belongs to the selection, said once more and plainly.
fn belongs(row: &Seen, selection: &Selection, sort: Sort, now: PgTime) -> bool {
    fn holds<T: PartialEq>(values: &[T], value: &T) -> bool {
        values.is_empty() || values.contains(value)
    }
    let status = Status::of(&row.status);
    let waiting = row.status == "pending" || row.status == "failed";
    let word = row.error.as_deref().map(|error| error.split(':').next().unwrap_or_default().to_owned());
    let erring = [word, row.code.clone()].into_iter().flatten().any(|word| selection.errors.contains(&word));
    // A sent row is found by when it was sent, and has no error any more, unless it is named.
    let named = !selection.ids.is_empty() || !selection.message_ids.is_empty();
    let since = selection.since.map(|since| since.instant(now));
    let sent_since = since.is_none_or(|since| row.published_at.is_some_and(|at| at >= since));
    let sent_as_it_should = status != Status::Sent || (sent_since && selection.errors.is_empty());
    holds(&selection.ids, &row.id)
        && holds(&selection.sources, &row.source)
        && (selection.statuses.is_empty() || selection.statuses.contains(&status))
        && holds(&selection.topics, &row.topic)
        && (selection.keys.is_empty() || row.key.as_ref().is_some_and(|key| selection.keys.contains(key)))
        && holds(&selection.event_types, &row.event_type)
        && holds(&selection.message_ids, &row.message_id)
        && since.is_none_or(|since| row.created_at >= since)
        && selection.until.is_none_or(|until| row.created_at < until.instant(now))
        && (selection.errors.is_empty() || erring)
        && selection.due.is_none_or(|due| waiting && (row.due_at <= now) == due)
        && (named || sent_as_it_should)
        && (sort != Sort::Published || (row.published_at.is_some() && (named || status == Status::Sent)))
}

fn sort_key(row: &Seen, sort: Sort) -> (PgTime, Uuid) {
    let value = match sort {
        Sort::Created => row.created_at,
        Sort::Updated => row.updated_at,
        Sort::Due => row.due_at,
        Sort::Published => row.published_at.unwrap_or(PgTime::INFINITY),
    };
    (value, row.id)
}

/// Every page of a list, as the command reads them; rows change in between if somebody says how.
async fn pages(
    store: &Store,
    selection: &Selection,
    mut page: Page,
    now: PgTime,
    mut between: impl AsyncFnMut(&[Uuid]),
) -> Vec<Uuid> {
    let column = match page.sort {
        Sort::Created => "created_at",
        Sort::Updated => "updated_at",
        Sort::Due => "next_attempt_at",
        Sort::Published => "published_at",
    };
    let mut found = Vec::new();
    loop {
        let unserved = store.unserved(selection, page.sort).expect("a shape");
        let rows = if unserved.in_order && !unserved.filters.is_empty() {
            store.walk(selection, page, now, LONG).await.expect("a walk").rows
        } else {
            store.page(selection, page, now, LONG).await.expect("a page")
        };
        assert!(rows.len() <= page.rows_max);
        let Some(last) = rows.last() else { return found };
        page.after = Some((last.time(column).expect("the sort's column"), last.outbox_id()));
        found.extend(rows.iter().map(keiro_relay::store::Record::outbox_id));
        between(&found).await;
    }
}

#[tokio::test]
async fn pages_are_what_a_plain_filter_finds() {
    let mut rng = StdRng::seed_from_u64(seed());
    for round in 0..ROUNDS * Table::ALL.len() {
        let table = Table::ALL[round % Table::ALL.len()];
        let kinds = Kinds::draw(&mut rng, table);
        let outbox = Outbox::fresh(table).await;
        let rows: Vec<_> = (0..ROWS).map(|n| kinds.row(&mut rng, n)).collect();
        outbox.insert(&rows).await;
        let code = if table == Table::OlderShared { "null::text" } else { "rejection_code" };
        let seen = look(&outbox, code).await;
        let now = outbox.store.now().await.expect("a time");
        for _ in 0..QUERIES {
            let selection = draw(&mut rng, &seen, now);
            let sort = one_of(&mut rng, &[Sort::Created, Sort::Created, Sort::Updated, Sort::Due, Sort::Published]);
            let page = Page {
                sort,
                descending: rng.random(),
                after: None,
                created_until: None,
                rows_max: one_of(&mut rng, &[1, 3, 10, 1000]),
            };
            let mut expected: Vec<&Seen> = seen.iter().filter(|row| belongs(row, &selection, sort, now)).collect();
            expected.sort_by_key(|row| sort_key(row, sort));
            if page.descending {
                expected.reverse();
            }
            let expected: Vec<Uuid> = expected.iter().map(|row| row.id).collect();
            let found = pages(&outbox.store, &selection, page, now, async |_| {}).await;
            assert_eq!(found, expected, "{table:?} {selection:#?} {page:?}");
            let first = outbox.store.select(&selection, None, 10_000, now, LONG).await.expect("positions");
            let expected = seen.iter().filter(|row| belongs(row, &selection, Sort::Created, now)).count();
            assert_eq!(first.len(), expected, "{table:?} {selection:#?}");
        }
    }
}

#[tokio::test]
async fn rows_that_do_not_change_are_on_one_page_each_whatever_happens_to_others() {
    let mut rng = StdRng::seed_from_u64(seed());
    for table in Table::ALL {
        for (sort, descending) in [
            (Sort::Created, false),
            (Sort::Created, true),
            (Sort::Updated, false),
            (Sort::Due, true),
            (Sort::Due, false),
        ] {
            let outbox = Outbox::fresh(table).await;
            // Few instants, so that pages end among equals.
            let rows: Vec<_> = (0..100)
                .map(|n| {
                    let second = format!("2026-01-01 00:00:{:02}+00", rng.random_range(0..6));
                    with(
                        keyed(n, "k"),
                        json!({ "created_at": second, "updated_at": second, "next_attempt_at": second }),
                    )
                })
                .collect();
            outbox.insert(&rows).await;
            let now = outbox.store.now().await.expect("a time");
            let selection = Selection { statuses: [Status::Pending, Status::Failed].into(), ..Selection::default() };
            let page = Page { sort, descending, after: None, created_until: None, rows_max: 7 };
            // Every third row changes in every way while pages are read, and new ones come.
            let mut fresh = 1000;
            let found = pages(&outbox.store, &selection, page, now, async |_| {
                fresh += 1;
                // What changes for ever is listed for ever.
                if fresh > 1010 {
                    return;
                }
                outbox.insert(&[row(fresh)]).await;
                let third = "('x' || right(outbox_id::text, 2))::bit(8)::int % 3 = 0";
                outbox
                    .execute(&format!(
                        "update keiro.keiro_outbox set status = case when random() < 0.5 then 'failed' else 'publishing' end, \
                         updated_at = now(), next_attempt_at = now() - random() * interval '1 day' where {third}"
                    ))
                    .await;
            })
            .await;
            let steady: Vec<Uuid> = (0..100).filter(|n| n % 3 != 0).map(id).collect();
            for row in &steady {
                let times = found.iter().filter(|found| *found == row).count();
                assert_eq!(times, 1, "{table:?} {sort:?} {descending} {row}");
            }
            let steady: BTreeSet<Uuid> = steady.into_iter().collect();
            let order: Vec<Uuid> = found.into_iter().filter(|found| steady.contains(found)).collect();
            assert_eq!(order.len(), steady.len());
        }
    }
}

#[tokio::test]
async fn walk_whose_time_is_over_says_how_far_it_came_and_goes_on_from_there() {
    let outbox = Outbox::fresh(Table::Lean).await;
    outbox
        .execute(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, \
             payload_bytes, occurred_at, created_at) select gen_random_uuid(), 'm' || n, 's' || n % 3, \
             case when n in (1, 30000, 60000) then 'wanted' else 'topic' end, 'T', 1, 'x', '', now(), \
             timestamptz '2026-01-01 00:00:00+00' + n * interval '1 s' from generate_series(1, 60000) n",
        )
        .await;
    let store = &outbox.store;
    let now = store.now().await.expect("a time");
    let selection =
        Selection { statuses: Status::LIVE.into(), topics: vec!["wanted".to_owned()], ..Selection::default() };
    for descending in [false, true] {
        let mut page = Page { sort: Sort::Created, descending, after: None, created_until: None, rows_max: 50 };
        let (mut found, mut walks) = (Vec::new(), 0);
        let mut bound = Duration::from_millis(50);
        loop {
            // So short that it ends under way, and no longer than a step takes.
            let walked = match store.walk(&selection, page, now, bound).await {
                Ok(walked) => walked,
                Err(error) => {
                    assert!(error.is_timeout() && bound < LONG, "{error}");
                    bound *= 2;
                    continue;
                }
            };
            walks += 1;
            found.extend(walked.rows.iter().map(|row| row.text("message_id").expect("a text").to_owned()));
            let Some(reached) = walked.reached else { break };
            match page.after {
                Some(before) if reached == before => bound *= 2,
                Some(before) => {
                    assert!(if descending { reached < before } else { reached > before }, "it comes forward");
                }
                None => {}
            }
            page.after = Some(reached);
            assert!(walks < 1000);
        }
        let expected = if descending { ["m60000", "m30000", "m1"] } else { ["m1", "m30000", "m60000"] };
        assert_eq!(found, expected);
    }
}

/// A table that was analysed when it was empty and has been filled since, with thousands of rows of every kind.
async fn filled(table: Table) -> Outbox {
    let outbox = Outbox::fresh(table).await;
    let far = if table == Table::Lean { "timestamptz '9999-12-31 00:00:00+00'" } else { "t" };
    outbox
        .execute(&format!(
            "alter table keiro.keiro_outbox set (autovacuum_enabled = off); analyze keiro.keiro_outbox; \
             insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
               content_type, payload_bytes, occurred_at, created_at, updated_at, next_attempt_at, published_at, status, last_error) \
             select md5('x' || n)::uuid, 'm' || n, 's' || n % 3, 'topic', 'k' || n % 500, 'T', 1, 'x', convert_to(repeat('p', 200), 'UTF8'), t, \
               t, t, case when st = 'dead' then {far} when n % 1000 = 5 then '2999-01-01' else t end, case when st = 'sent' then t end, st, \
               case when st = 'dead' then 'kafka.x: y' end \
             from (select n, timestamptz '2026-01-01 00:00:00+00' + n * interval '1 ms' as t, \
               case when n % 1000 = 1 then 'publishing' when n % 1000 = 2 then 'failed' else (array['pending', 'sent', 'dead'])[1 + n / 20000] end as st \
               from generate_series(0, 59999) n) r order by md5('x' || n)"
        ))
        .await;
    outbox
}

fn look_for_scans(node: &serde_json::Value, scans: &mut Vec<String>) {
    let kind = node["Node Type"].as_str().expect("a node");
    if (kind.contains("Seq Scan") && node["Relation Name"] == "keiro_outbox") || kind.contains("Bitmap") {
        scans.push(kind.to_owned());
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        look_for_scans(child, scans);
    }
}

/// What an index serves reads few pages, whatever the statistics say: filters, order, and pages at most so large.
#[tokio::test]
async fn served_lists_read_few_pages() {
    let some = |statuses: &[Status]| Selection { statuses: statuses.iter().copied().collect(), ..Selection::default() };
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let ago = |seconds| Some(When::Ago(Duration::from_secs(seconds)));
    let cases: Vec<(Selection, Sort, u64, u64)> = vec![
        // Selection, order, pages on a lean and on a shared table: the latter reads all rows of a status to sort them by created_at.
        (some(&Status::LIVE), Sort::Created, 1000, 1000),
        (Selection { sources: names(&["s1"]), ..some(&[Status::Pending, Status::Failed]) }, Sort::Created, 500, 500),
        (Selection { keys: names(&["k1", "k7"]), ..some(&Status::LIVE) }, Sort::Created, 500, 500),
        (Selection { message_ids: names(&["m1", "m50000"]), ..Selection::default() }, Sort::Updated, 100, 100),
        (Selection { ids: vec![id(1)], ..Selection::default() }, Sort::Due, 50, 50),
        (some(&[Status::Dead, Status::Rejected]), Sort::Created, 5000, 32_000),
        (Selection { sources: names(&["s1"]), ..some(&[Status::Dead]) }, Sort::Created, 5000, u64::MAX),
        (some(&[Status::Sent]), Sort::Published, 300, 300),
        (Selection { published_before: ago(1), ..some(&[Status::Sent]) }, Sort::Published, 300, 300),
        (Selection { updated_before: ago(1), ..some(&[Status::Publishing]) }, Sort::Updated, u64::MAX, 500),
        (some(&[Status::Failed]), Sort::Due, u64::MAX, 300),
        (Selection { due: Some(false), ..Selection::default() }, Sort::Created, u64::MAX, 500),
        (some(&[Status::Unknown]), Sort::Created, u64::MAX, 100),
    ];
    for table in [Table::NewerShared, Table::Lean] {
        let outbox = filled(table).await;
        let now = outbox.store.now().await.expect("a time");
        let db = keiro_relay::store::Db::new(&crate::support::store::settings(outbox.database.url()), "plans", "0")
            .expect("a pool");
        let (session, _) = db.dedicated().await.expect("a session");
        for (selection, sort, lean, shared) in &cases {
            let pages_max = if table == Table::Lean { *lean } else { *shared };
            for descending in [false, true] {
                let page = Page { sort: *sort, descending, after: None, created_until: None, rows_max: 51 };
                let query = outbox.store.page_query(selection, page, now).expect("a shape");
                assert_eq!(query.unserved.is_empty(), pages_max < u64::MAX, "{table:?} {selection:?}");
                if pages_max == u64::MAX {
                    continue;
                }
                session.batch("begin; set local enable_sort = on", LONG).await.expect("begin");
                let explain = format!("explain (analyze, buffers, timing off, format json) {}", query.sql);
                let found = session.query(&explain, &query.binds.params(), LONG).await.expect("explain");
                session.batch("rollback", LONG).await.expect("rollback");
                let explained: serde_json::Value = found[0].get(0);
                let root = &explained[0]["Plan"];
                let count = |what: &str| root[what].as_u64().expect(what);
                let read = count("Shared Hit Blocks") + count("Shared Read Blocks");
                let mut scans = Vec::new();
                look_for_scans(root, &mut scans);
                assert!(scans.is_empty(), "{table:?} {selection:?} {sort:?}: {scans:?} {explained:#}");
                assert!(
                    read <= pages_max,
                    "{table:?} {selection:?} {sort:?} desc {descending}: {read} pages {explained:#}"
                );
            }
        }
    }
}
