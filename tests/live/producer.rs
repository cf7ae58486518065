//! The producers' half on a real table: the caller's transaction, what coalesces, what conflicts, and that a batch is all or nothing.

use std::time::Duration;

use keiro_relay::producer::{
    BATCH_ROWS_MAX, Conflict, Draft, EnqueueError, IntegrationEvent, IntegrationProducer, JsonCodec, NewRow,
    OnDuplicate, Outbox, PgTime, RecordedEvent, SchemaReference, StableId, TraceContext, fresh_outbox_id,
    stable_outbox_id,
};
use tokio_postgres::Client;
use uuid::Uuid;

use crate::support::database::{Database, Table, fresh_database};
use crate::support::{LONG, run, unique, wait_until_async};

fn row(message_id: &str) -> NewRow {
    let draft = Draft::new("d", "e", "text/plain", "payload").key("k");
    NewRow::new(fresh_outbox_id(), IntegrationEvent::from_draft("s", message_id, draft))
}

fn count(database: &Database) -> String {
    database.value("select count(*) from keiro.keiro_outbox")
}

fn accept_identical() -> Outbox {
    Outbox::default().on_duplicate(OnDuplicate::AcceptIdentical)
}

fn conflicts(outcome: Result<impl std::fmt::Debug, EnqueueError>) -> Vec<Conflict> {
    match outcome {
        Err(EnqueueError::Conflict(conflicts)) => conflicts,
        other => panic!("no conflict: {other:?}"),
    }
}

#[test]
fn rows_stand_and_fall_with_the_callers_transaction_whatever_kind_it_is() {
    for table in Table::ALL {
        let database = fresh_database(table);
        run(async || {
            let mut client = database.connect().await;
            let outbox = Outbox::default();
            let tx = client.transaction().await.expect("begin");
            assert!(outbox.enqueue(&tx, &row("rolled back")).await.expect("enqueued").inserted);
            tx.rollback().await.expect("rollback");

            let mut tx = client.transaction().await.expect("begin");
            let nested = tx.transaction().await.expect("savepoint");
            outbox.enqueue(&nested, &row("in a nested one")).await.expect("enqueued");
            nested.commit().await.expect("release");
            let nested = tx.transaction().await.expect("savepoint");
            outbox.enqueue(&nested, &row("rolled back too")).await.expect("enqueued");
            nested.rollback().await.expect("rollback to");
            tx.commit().await.expect("commit");

            client.batch_execute("begin").await.expect("begin");
            outbox.enqueue(&client, &row("on a client")).await.expect("enqueued");
            client.batch_execute("commit").await.expect("commit");
        });
        let rows = database.value("select string_agg(message_id, ', ' order by message_id) from keiro.keiro_outbox");
        assert_eq!(rows.trim_matches('"'), "in a nested one, on a client");
    }
}

#[test]
fn batch_is_one_statement_in_the_order_of_its_ids() {
    let database = fresh_database(Table::NewerShared);
    database.execute(
        "create table statements (n int);
         create function counted() returns trigger language plpgsql as
           $$ begin insert into statements values (1); return null; end $$;
         create trigger counted after insert on keiro.keiro_outbox for each statement execute function counted()",
    );
    run(async || {
        let mut client = database.connect().await;
        let tx = client.transaction().await.expect("begin");
        let rows: Vec<_> = (0..BATCH_ROWS_MAX).map(|n| row(&format!("m{n:03}"))).collect();
        let enqueued = Outbox::default().enqueue_batch(&tx, &rows).await.expect("enqueued");
        tx.commit().await.expect("commit");
        assert!(enqueued.iter().all(|row| row.inserted));
        assert!(enqueued.iter().map(|row| row.outbox_id).eq(rows.iter().map(|row| row.outbox_id)));
    });
    assert_eq!(database.value("select count(*) from statements"), "1");
    let ordered = "select bool_and(message_id = 'm' || lpad((n - 1)::text, 3, '0')) from (select message_id, \
                   row_number() over (order by created_at, outbox_id) as n from keiro.keiro_outbox) x";
    assert_eq!(database.value(ordered), "t");
}

#[test]
fn retries_coalesce_on_either_id_and_say_so_row_by_row() {
    let database = fresh_database(Table::Lean);
    run(async || {
        let mut client = database.connect().await;
        let (first, second) = (row("m1"), row("m2"));
        let outbox = Outbox::default();
        let tx = client.transaction().await.expect("begin");
        outbox.enqueue_batch(&tx, &[first.clone(), second.clone()]).await.expect("enqueued");
        tx.commit().await.expect("commit");

        // As a producer's retry does it: the message id is minted anew, the outbox id stays. And the other way round.
        let (mut again, mut other) = (first.clone(), second.clone());
        again.event.message_id = "m9".to_owned();
        other.outbox_id = fresh_outbox_id();
        other.event.draft.payload = b"something else".to_vec();
        let new = row("m3");
        let rows = [again, other, new.clone(), new.clone()];
        let tx = client.transaction().await.expect("begin");
        let enqueued = outbox.enqueue_batch(&tx, &rows).await.expect("enqueued");
        tx.commit().await.expect("commit");
        let seen: Vec<_> = enqueued.iter().map(|row| (row.outbox_id, row.message_id.as_str(), row.inserted)).collect();
        assert_eq!(
            seen,
            [
                (first.outbox_id, "m1", false),
                (second.outbox_id, "m2", false),
                (new.outbox_id, "m3", true),
                (new.outbox_id, "m3", false)
            ]
        );
    });
    assert_eq!(count(&database), "3");
}

type Change = (&'static str, fn(&mut NewRow));

/// Every column that says what happened, with something else in it.
const CHANGES: [Change; 17] = [
    ("source", |row| row.event.source_name = "other".into()),
    ("destination", |row| row.event.draft.destination = "other".into()),
    ("message_key", |row| row.event.draft.message_key = None),
    ("event_type", |row| row.event.draft.event_type = "other".into()),
    ("schema_version", |row| row.event.draft.schema_version = 2),
    ("content_type", |row| row.event.draft.content_type = "other".into()),
    ("schema_registry", |row| row.event.draft.schema.registry = None),
    ("schema_subject", |row| row.event.draft.schema.subject = Some("other".into())),
    ("schema_version_ref", |row| row.event.draft.schema.version = None),
    ("schema_id", |row| row.event.draft.schema.schema_id = None),
    ("schema_fingerprint", |row| row.event.draft.schema.fingerprint = Some(String::new())),
    ("source_event_id", |row| row.event.draft.source_event_id = None),
    ("source_global_position", |row| row.event.draft.source_global_position = Some(2)),
    ("causation_id", |row| row.event.draft.causation_id = Some(Uuid::max())),
    ("correlation_id", |row| row.event.draft.correlation_id = Some(Uuid::nil())),
    ("payload_bytes", |row| row.event.draft.payload = b"other".to_vec()),
    ("attributes", |row| row.event.draft.attributes = Some(r#"{"a":2}"#.to_owned())),
];

#[test]
fn only_identical_rows_are_accepted_and_the_columns_that_differ_are_named() {
    let database = fresh_database(Table::NewerShared);
    let mut full = row("m1");
    let draft = &mut full.event.draft;
    draft.schema = SchemaReference {
        registry: Some("r".to_owned()),
        version: Some(1),
        schema_id: Some(2),
        ..draft.schema.clone()
    };
    draft.source_event_id = Some(Uuid::nil());
    draft.attributes = Some(r#"{"a":1, "b":1.0}"#.to_owned());
    draft.occurred_at = Some(PgTime(1));
    run(async || {
        let mut client = database.connect().await;
        let outbox = accept_identical();
        let tx = client.transaction().await.expect("begin");
        outbox.enqueue(&tx, &full).await.expect("enqueued");

        // What a retry may do differently, and JSON that means the same.
        let mut retry = full.clone().available_at(PgTime(7));
        retry.event.message_id = "m2".to_owned();
        let draft = &mut retry.event.draft;
        draft.attributes = Some(r#"{ "b": 1.0, "a": 1 }"#.to_owned());
        draft.trace = Some(TraceContext { traceparent: "another".to_owned(), tracestate: None });
        draft.occurred_at = None;
        let enqueued = outbox.enqueue(&tx, &retry).await.expect("identical");
        assert_eq!(
            (enqueued.outbox_id, enqueued.message_id.as_str(), enqueued.inserted),
            (full.outbox_id, "m1", false)
        );

        for (column, change) in CHANGES {
            let mut changed = full.clone();
            change(&mut changed);
            let found = conflicts(outbox.enqueue(&tx, &changed).await);
            let expected = Conflict { row: 0, outbox_id: full.outbox_id, columns: vec![column.to_owned()] };
            assert_eq!(found, [expected], "{column}");
        }
        let mut changed = full.clone();
        changed.event.draft.occurred_at = Some(PgTime(2));
        changed.event.draft.payload = b"marker".to_vec();
        let error = outbox.enqueue(&tx, &changed).await.expect_err("two columns");
        let text = format!(
            "rows[0]: is there already as outbox_id {}, and differs in payload_bytes, occurred_at",
            full.outbox_id
        );
        assert_eq!(error.to_string(), text);
        // A conflict that wrote nothing leaves the transaction as it was.
        outbox.enqueue(&tx, &row("m3")).await.expect("enqueued");
        tx.commit().await.expect("commit");
    });
    assert_eq!(count(&database), "2");
}

#[test]
fn rejected_duplicates_are_all_named_and_a_batch_is_all_or_nothing_even_if_nobody_minds_the_error() {
    let database = fresh_database(Table::Lean);
    run(async || {
        let mut client = database.connect().await;
        let known = row("known");
        let outbox = Outbox::default().on_duplicate(OnDuplicate::Reject);
        let tx = client.transaction().await.expect("begin");
        outbox.enqueue(&tx, &known).await.expect("enqueued");
        tx.commit().await.expect("commit");

        let mut changed = row("known");
        changed.event.draft.payload = b"other".to_vec();
        let new = row("new");
        let batch = [new.clone(), known.clone(), changed, new.clone()];
        let tx = client.transaction().await.expect("begin");
        let found = conflicts(outbox.enqueue_batch(&tx, &batch).await);
        let expected = |row, outbox_id, columns: &[&str]| Conflict {
            row,
            outbox_id,
            columns: columns.iter().map(|&column| column.to_owned()).collect(),
        };
        assert_eq!(
            found,
            [
                expected(1, known.outbox_id, &[]),
                expected(2, known.outbox_id, &["payload_bytes"]),
                // Its twin stands before it in the batch.
                expected(3, new.outbox_id, &[])
            ]
        );
        // Somebody who ignores the error cannot commit a part.
        tx.commit().await.expect("the server turns it into a rollback");
        let rows = client.query_one("select count(*) from keiro.keiro_outbox", &[]).await.expect("count");
        assert_eq!(rows.get::<_, i64>(0), 1);

        // A nested transaction is enough to go on without the batch.
        let mut tx = client.transaction().await.expect("begin");
        outbox.enqueue(&tx, &row("before")).await.expect("enqueued");
        let nested = tx.transaction().await.expect("savepoint");
        conflicts(outbox.enqueue_batch(&nested, &batch).await);
        nested.rollback().await.expect("rollback to");
        outbox.enqueue(&tx, &row("after")).await.expect("enqueued");
        tx.commit().await.expect("commit");
    });
    assert_eq!(count(&database), "3");
}

/// Enqueues a row whose id another transaction is just writing, as soon as it waits for that.
async fn race(database: &Database, theirs: &NewRow, ours: &[NewRow]) -> Result<usize, EnqueueError> {
    let (mut first, mut second, watcher) =
        (database.connect().await, database.connect().await, database.connect().await);
    let outbox = accept_identical();
    let tx = first.transaction().await.expect("begin");
    outbox.enqueue(&tx, theirs).await.expect("enqueued");
    let waiting = {
        let ours = ours.to_vec();
        tokio::spawn(async move {
            let tx = second.transaction().await.expect("begin");
            let enqueued = accept_identical().enqueue_batch(&tx, &ours).await;
            // Also after an error: what then can be committed is nothing.
            tx.commit().await.expect("commit");
            enqueued.map(|rows| rows.iter().filter(|row| row.inserted).count())
        })
    };
    let blocked =
        "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()";
    wait_until_async("the second to wait for the first", LONG, async || {
        watcher.query_one(blocked, &[]).await.expect("count").get::<_, i64>(0) == 1
    })
    .await;
    tx.commit().await.expect("commit");
    waiting.await.expect("no panic")
}

#[test]
fn two_attempts_at_the_same_time_write_one_row_and_a_different_one_takes_its_batch_along() {
    let database = fresh_database(Table::Lean);
    run(async || {
        let theirs = row("m1");
        let outcome = race(&database, &theirs, &[row("beside"), theirs.clone()]).await;
        assert_eq!(outcome.expect("identical"), 1);

        let theirs = row("m2");
        let mut different = theirs.clone();
        different.event.draft.payload = b"other".to_vec();
        let found = conflicts(race(&database, &theirs, &[row("never"), different]).await);
        assert_eq!((found[0].row, found[0].columns.as_slice()), (1, &["payload_bytes".to_owned()][..]));
    });
    let rows = database.value("select string_agg(message_id, ', ' order by message_id) from keiro.keiro_outbox");
    assert_eq!(rows.trim_matches('"'), "beside, m1, m2");
}

#[test]
fn delayed_rows_are_due_later_and_the_database_dates_what_the_caller_leaves_open() {
    let database = fresh_database(Table::NewerShared);
    run(async || {
        let mut client = database.connect().await;
        let tx = client.transaction().await.expect("begin");
        let due = std::time::UNIX_EPOCH + Duration::from_micros(32_503_680_000_000_001);
        Outbox::default().enqueue(&tx, &row("m").available_at(due)).await.expect("enqueued");
        let same = tx
            .query_one(
                "select next_attempt_at = '3000-01-01 00:00:00.000001+00' and created_at = now() and occurred_at = now() \
                 and status = 'pending' and attempt_count = 0 from keiro.keiro_outbox",
                &[],
            )
            .await
            .expect("a row");
        assert!(same.get::<_, bool>(0));
        tx.commit().await.expect("commit");
    });
}

#[test]
fn errors_of_the_database_show_no_value_and_say_whether_to_try_again() {
    let database = fresh_database(Table::Lean);
    let role = unique("onlooker");
    database.execute(&format!(
        "alter table keiro.keiro_outbox add check (message_key is distinct from 'marker');
         create role {role}; grant usage on schema keiro to {role}; grant select on keiro.keiro_outbox to {role}"
    ));
    run(async || {
        let mut client = database.connect().await;
        let mut bad = row("m");
        bad.event.draft.message_key = Some("marker".to_owned());
        bad.event.draft.payload = b"marker".to_vec();
        let tx = client.transaction().await.expect("begin");
        let error = Outbox::default().enqueue(&tx, &bad).await.expect_err("refused");
        let shown = format!("{error} {error:?}");
        assert!(shown.contains("SQLSTATE 23514") && !shown.contains("marker"), "{shown}");
        assert!(std::error::Error::source(&error).is_none() && !error.is_transient());
        drop(tx);

        client.batch_execute(&format!("set role {role}")).await.expect("set role");
        let error = Outbox::default().enqueue(&client, &row("m")).await.expect_err("no permission");
        assert!(error.to_string().contains("permission denied for table keiro_outbox (SQLSTATE 42501"), "{error}");
        client.batch_execute("reset role").await.expect("reset");
        let other = Outbox::new("nowhere", "x\"y").expect("a name like any other");
        let error = other.enqueue(&client, &row("m")).await.expect_err("no such table");
        assert!(error.to_string().contains("42P01"), "{error}");

        let pid: i32 = client.query_one("select pg_backend_pid()", &[]).await.expect("pid").get(0);
        let killer: Client = database.connect().await;
        killer.execute("select pg_terminate_backend($1)", &[&pid]).await.expect("kill");
        let error = Outbox::default().enqueue(&client, &row("m")).await.expect_err("killed");
        assert!(error.is_transient(), "{error}");
    });
    assert_eq!(count(&database), "0");
    database.execute(&format!("drop owned by {role}; drop role {role}"));
}

#[test]
fn producer_that_tries_again_after_a_rollback_writes_one_row() {
    let database = fresh_database(Table::NewerShared);
    run(async || {
        let mut client = database.connect().await;
        let map = |_: &RecordedEvent, total: &i64| {
            (*total > 0).then(|| Draft::json("invoices", "InvoicePaid", total).expect("a number has a JSON form"))
        };
        let mut producer =
            IntegrationProducer::new("sub", "billing", "pay", JsonCodec::<i64>::new(), map).expect("good");
        let recorded = |global_position, data: &str| RecordedEvent {
            event_id: Uuid::from_u128(5),
            global_position,
            event_type: "paid".to_owned(),
            data: data.into(),
        };
        let id = |global_position| {
            stable_outbox_id(StableId { producer: "sub", recorded_at: PgTime(0), global_position, n: 0 })
        };
        let mut minted = Vec::new();
        for attempt in 0..3 {
            let tx = client.transaction().await.expect("begin");
            let enqueued = producer.handle(&tx, id(7), &recorded(7, "1")).await.expect("handled").expect("mapped");
            assert_eq!((enqueued.outbox_id, enqueued.inserted), (id(7), attempt < 2));
            minted.push(enqueued.message_id);
            // The first attempt is rolled back, and its message id with it.
            if attempt == 0 { tx.rollback().await.expect("rollback") } else { tx.commit().await.expect("commit") }
        }
        assert!(minted[0] != minted[1] && minted[1] == minted[2] && minted[1].starts_with("pay_"), "{minted:?}");

        let tx = client.transaction().await.expect("begin");
        assert_eq!(producer.handle(&tx, id(8), &recorded(8, "0")).await.expect("handled"), None);
        assert!(producer.handle(&tx, id(9), &recorded(9, "\"marker\"")).await.is_err());
        tx.commit().await.expect("commit");
    });
    let row = database.value(
        "select concat_ws('|', source, destination, source_event_id, source_global_position, convert_from(payload_bytes, 'UTF8')) \
         from keiro.keiro_outbox",
    );
    assert_eq!(row, format!("billing|invoices|{}|7|1", Uuid::from_u128(5)));
}
