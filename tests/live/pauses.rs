//! The side table of pauses: who is held back, what is refused, and what holds without the table.

use std::time::Duration;

use keiro_relay::domain::message::PgTime;
use keiro_relay::domain::pause::PauseTarget;
use keiro_relay::store::{PauseEnd, PausesError, Store, migrate};

use crate::support::database::{Database, Table, fresh_database};
use crate::support::outbox::config;
use crate::support::run;
use crate::support::store::db;

fn source(name: &str) -> PauseTarget {
    PauseTarget::Source(name.to_owned())
}

fn lane(source_name: &str, message_key: &str) -> PauseTarget {
    PauseTarget::Lane { source_name: source_name.to_owned(), message_key: message_key.to_owned() }
}

/// A table with its side schema.
fn migrated(table: Table) -> Database {
    let database = fresh_database(table);
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await).expect("migrate");
    database
}

fn store(database: &Database) -> Store {
    Store::new(&config(database.url()), 2).expect("a store")
}

#[test]
fn pauses_are_kept_per_table_and_end_by_the_databases_clock() {
    let database = migrated(Table::Lean);
    run(async || {
        let store = store(&database);
        let topic = PauseTarget::Topic("orders".to_owned());
        let made = store.pause(&topic, PauseEnd::Never, Some("migration"), false).await.expect("pause");
        assert!(!made.before);
        let again = store.pause(&topic, PauseEnd::In(Duration::from_secs(3600)), None, false).await.expect("pause");
        assert!(again.before && again.pause.until.is_some(), "{again:?}");
        assert_eq!((again.pause.since, again.pause.reason.as_deref()), (made.pause.since, Some("migration")));
        store.pause(&lane("s", ""), PauseEnd::Never, None, false).await.expect("an empty key is a key");
        store.pause(&source("s"), PauseEnd::In(Duration::from_millis(1)), None, false).await.expect("pause");
        store.pause(&source("dry"), PauseEnd::Never, None, true).await.expect("pause");
        database.execute(
            "insert into keiro_relay.pauses (schema_name, table_name, kind, name) values ('keiro', 'another', 'source', 's'); \
             update keiro_relay.pauses set paused_until = now() - interval '1 s' where kind = 'source' and table_name = 'keiro_outbox'",
        );
        let pauses = store.pauses().await.expect("the pauses");
        let targets: Vec<_> = pauses.list().iter().map(|pause| &pause.target).collect();
        assert_eq!(targets, [&topic, &lane("s", "")]);
        assert!(!pauses.holds_source("s"));
        assert_eq!(pauses.holding("s", "orders", Some("")).count(), 2);
        assert_eq!(pauses.holding("s", "orders", None).count(), 1);
        assert_eq!((&*pauses.rows_of("s").keys, &*pauses.rows_of("t").keys), (&[String::new()][..], &[][..]));

        let past = PauseEnd::At(PgTime(0));
        assert_eq!(store.pause(&source("s"), past, None, false).await.map(drop), Err(PausesError::Over));
        assert_eq!(store.unpause(&source("s"), false).await, Ok(None));
        assert!(store.unpause(&topic, true).await.expect("unpause").is_some());
        assert!(store.unpause(&topic, false).await.expect("unpause").is_some());
        assert_eq!(store.unpause(&topic, false).await, Ok(None));
    });
    assert_eq!(database.value("select count(*) from keiro_relay.pauses where table_name = 'keiro_outbox'"), "1");
}

#[test]
fn more_pauses_than_every_claim_can_carry_are_refused() {
    let database = migrated(Table::Lean);
    database.execute(
        "insert into keiro_relay.pauses (schema_name, table_name, kind, name, message_key) \
         select 'keiro', 'keiro_outbox', 'lane', 's', n::text from generate_series(1, 1000) n",
    );
    run(async || {
        let store = store(&database);
        assert_eq!(store.pause(&source("s"), PauseEnd::Never, None, false).await.map(drop), Err(PausesError::TooMany));
        assert!(store.pause(&lane("s", "7"), PauseEnd::Never, None, false).await.expect("pause").before);
    });
}

#[test]
fn without_the_side_table_that_is_said() {
    let database = fresh_database(Table::Lean);
    run(async || {
        let store = store(&database);
        assert_eq!(store.pauses().await.map(drop), Err(PausesError::Missing));
        assert_eq!(store.pause(&source("s"), PauseEnd::Never, None, false).await.map(drop), Err(PausesError::Missing));
        assert_eq!(store.unpause(&source("s"), false).await, Err(PausesError::Missing));
    });
}
