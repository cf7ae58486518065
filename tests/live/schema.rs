//! What the daemon and `migrate` see of tables of every shape, and of users who may not do everything.

use keiro_relay::store::{InspectError, Profile, SchemaProblem, Shape, inspect, migrate};

use crate::support::database::{Database, Table, fresh_database, older_to_newer};
use crate::support::store::{db, settings};
use crate::support::{run, unique};

/// Looks at the contract's table with this URL's user.
fn look(url: &str) -> Result<Shape, InspectError> {
    run(async || inspect(&db(url), "keiro", "keiro_outbox").await)
}

/// The texts of all problems.
#[track_caller]
fn problems(url: &str) -> Vec<String> {
    match look(url) {
        Err(InspectError::Problems(problems)) => problems.iter().map(ToString::to_string).collect(),
        other => panic!("expected problems, found {other:?}"),
    }
}

/// The URL of a fresh role on this database.
fn role(database: &Database) -> (String, String) {
    let name = unique("role");
    database.execute(&format!("create role {name} login password 'secret'"));
    let rest = database.url().split_once("://").expect("a scheme").1;
    let host = rest.split_once('@').map_or(rest, |(_, host)| host);
    (format!("postgres://{name}:secret@{host}"), name)
}

#[test]
fn older_table_has_no_rejected_columns_and_upstreams_indexes() {
    let database = fresh_database(Table::OlderShared);
    let shape = look(database.url()).expect("a usable table");
    assert!(!shape.rejected_columns);
    assert_eq!((shape.profile, shape.missing_indexes), (Profile::Shared, vec![]));
    assert!(shape.can_delete && shape.reads_all_stats && !shape.in_recovery && !shape.unlogged && !shape.relay_schema);
    assert!(shape.server_version >= 140_000, "{}", shape.server_version);
}

#[test]
fn newer_table_has_the_rejected_columns() {
    let database = fresh_database(Table::NewerShared);
    let shape = look(database.url()).expect("a usable table");
    assert!(shape.rejected_columns);
    assert_eq!((shape.profile, shape.missing_indexes), (Profile::Shared, vec![]));
}

#[test]
fn columns_that_appear_while_we_look_on_are_seen_by_the_same_pool() {
    let database = fresh_database(Table::OlderShared);
    let pool = db(database.url());
    let before = run(async || inspect(&pool, "keiro", "keiro_outbox").await).expect("a usable table");
    database.execute(older_to_newer());
    let after = run(async || inspect(&pool, "keiro", "keiro_outbox").await).expect("a usable table");
    assert_eq!((before.rejected_columns, after.rejected_columns), (false, true));
}

#[test]
fn lean_table_is_lean_only_while_both_checks_hold() {
    let database = fresh_database(Table::None);
    let pool = db(database.url());
    run(async || migrate(&pool, "keiro", "keiro_outbox", None, false).await).expect("migrated");
    let shape = look(database.url()).expect("a usable table");
    assert_eq!((shape.profile, shape.missing_indexes), (Profile::Lean, vec![]));
    assert!(shape.relay_schema && shape.rejected_columns);

    // The same name over another condition is not the check that the statements rest on.
    database.execute(
        "alter table keiro.keiro_outbox drop constraint keiro_relay_far_check, \
         add constraint keiro_relay_far_check check (next_attempt_at > '-infinity')",
    );
    assert_eq!(look(database.url()).expect("a usable table").profile, Profile::Shared);
    database.execute(
        "alter table keiro.keiro_outbox drop constraint keiro_relay_far_check, add constraint keiro_relay_far_check \
         check (next_attempt_at < '9999-01-01 00:00:00+00' or status in ('sent', 'dead', 'rejected')) not valid",
    );
    assert_eq!(look(database.url()).expect("a usable table").profile, Profile::Shared);
    database.execute("alter table keiro.keiro_outbox validate constraint keiro_relay_far_check");
    assert_eq!(look(database.url()).expect("a usable table").profile, Profile::Lean);

    // Missing indexes are named and change nothing else.
    database.execute("drop index keiro.keiro_relay_keiro_outbox_far_idx");
    let shape = look(database.url()).expect("a usable table");
    assert_eq!(
        (shape.profile, shape.missing_indexes),
        (Profile::Lean, vec!["keiro_relay_keiro_outbox_far_idx".to_owned()])
    );
}

#[test]
fn lean_is_recognised_whatever_time_zone_the_database_prefers_and_behind_a_pooler() {
    let database = fresh_database(Table::None);
    database.execute(&format!("alter database {} set timezone = 'Asia/Kathmandu'", database.name()));
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await).expect("migrated");
    assert_eq!(look(database.url()).expect("a usable table").profile, Profile::Lean);
    let mut settings = settings(database.url());
    settings.prepared_statements = false;
    let pool = keiro_relay::store::Db::new(&settings, "test", "0").expect("a pool");
    let shape = run(async || inspect(&pool, "keiro", "keiro_outbox").await).expect("a usable table");
    assert_eq!(shape.profile, Profile::Lean);
}

#[test]
fn every_wrong_column_is_named_at_once() {
    let database = fresh_database(Table::NewerShared);
    database.execute(
        "alter table keiro.keiro_outbox drop column tracestate, drop column rejection_detail, \
           alter column schema_version type int, alter column message_key set not null, \
           alter column content_type drop not null",
    );
    assert_eq!(
        problems(database.url()),
        [
            r#""keiro"."keiro_outbox": column "message_key" must allow null"#,
            r#""keiro"."keiro_outbox": column "schema_version" is integer; expected bigint"#,
            r#""keiro"."keiro_outbox": column "content_type" must not allow null"#,
            r#""keiro"."keiro_outbox": column "tracestate" is missing; expected text null"#,
            r#""keiro"."keiro_outbox": column "rejection_detail" is missing; expected text null"#,
        ]
    );
}

#[test]
fn missing_table_schema_and_key_are_named() {
    let database = fresh_database(Table::None);
    assert_eq!(
        problems(database.url()),
        [r#"schema "keiro" does not exist; run `keiro-relay migrate`, or correct database.schema"#]
    );
    database.execute("create schema keiro");
    assert_eq!(
        problems(database.url()),
        [r#"table "keiro"."keiro_outbox" does not exist; run `keiro-relay migrate`, or correct database.table"#]
    );
    database.execute("create view keiro.keiro_outbox as select 1 as one");
    assert_eq!(problems(database.url()), [r#""keiro"."keiro_outbox" is a view, not a table; correct database.table"#]);

    let database = fresh_database(Table::OlderShared);
    database.execute("alter table keiro.keiro_outbox drop constraint keiro_outbox_pkey");
    let found = problems(database.url());
    assert!(found.len() == 1 && found[0].contains("outbox_id is neither the primary key nor unique"), "{found:?}");
}

#[test]
fn missing_permissions_are_named_with_the_grant_that_helps() {
    let database = fresh_database(Table::NewerShared);
    let (url, name) = role(&database);
    let usage =
        format!("user {name} lacks usage on schema \"keiro\"; run: grant usage on schema \"keiro\" to \"{name}\"");
    let of = |privilege: &str| {
        let object = "\"keiro\".\"keiro_outbox\"";
        format!("user {name} lacks {privilege} on {object}; run: grant {privilege} on {object} to \"{name}\"")
    };
    assert_eq!(problems(&url), [usage, of("select"), of("update")]);

    database.execute(&format!("grant usage on schema keiro to {name}; grant select on keiro.keiro_outbox to {name}"));
    assert_eq!(problems(&url), [of("update")]);

    // Column by column is enough, and what is missing is named column by column.
    database.execute(&format!(
        "grant update (status, attempt_count, next_attempt_at, last_error, published_at, updated_at, rejected_at, \
         rejection_code) on keiro.keiro_outbox to {name}"
    ));
    assert_eq!(problems(&url), [of("update (\"rejection_detail\")")]);

    // What is advised helps; deleting is not needed.
    database.execute(&format!("grant update (\"rejection_detail\") on \"keiro\".\"keiro_outbox\" to \"{name}\""));
    let shape = look(&url).expect("a usable table");
    assert!(!shape.can_delete && !shape.reads_all_stats && !shape.relay_schema, "{shape:?}");
    database.execute(&format!("grant delete on keiro.keiro_outbox to {name}; grant pg_read_all_stats to {name}"));
    let shape = look(&url).expect("a usable table");
    assert!(shape.can_delete && shape.reads_all_stats, "{shape:?}");

    // Rows that are hidden from us would be overtaken.
    database.execute("alter table keiro.keiro_outbox enable row level security");
    assert!(problems(&url)[0].contains("row security may hide rows"), "{:?}", problems(&url));
}

#[test]
fn unlogged_tables_and_odd_encodings_are_noticed() {
    let database = fresh_database(Table::OlderShared);
    database.execute("alter table keiro.keiro_outbox set unlogged");
    assert!(look(database.url()).expect("a usable table").unlogged);

    let name = unique("ascii");
    database.execute(&format!("create database {name} encoding 'SQL_ASCII' template template0 locale 'C'"));
    let url = database.url().replace(database.name(), &name);
    let found = run(async || inspect(&db(&url), "keiro", "keiro_outbox").await);
    database.execute(&format!("drop database {name} with (force)"));
    match found {
        Err(InspectError::Problems(problems)) => {
            assert_eq!(problems[0], SchemaProblem::Encoding("SQL_ASCII".to_owned()));
        }
        other => panic!("expected problems, found {other:?}"),
    }
}
