//! `migrate` on empty databases, on tables of keiro's, run twice, and run by two at once.

use keiro_relay::cli;
use keiro_relay::store::{Found, MigrateError, Profile, Report, migrate, table_sql};

use crate::support::database::{Database, Table, fresh_database};
use crate::support::run;
use crate::support::store::{db, settings};

fn migrated(database: &Database, profile: Option<Profile>, dry_run: bool) -> Report {
    let outcome = run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", profile, dry_run).await);
    outcome.expect("migrate")
}

/// Everything of the database that `migrate` could have changed.
fn fingerprint(database: &Database) -> String {
    database.value(
        "select coalesce(string_agg(line, E'\\n' order by line), '') from ( \
           select format('%s.%s %s %s %s', n.nspname, c.relname, c.relkind, c.oid, c.reloptions) \
             from pg_class c join pg_namespace n on n.oid = c.relnamespace \
             where n.nspname not like 'pg\\_%' and n.nspname <> 'information_schema' \
           union all select format('%s %s %s', nspname, oid, nspacl) from pg_namespace where nspname not like 'pg\\_%' \
           union all select format('%s %s %s', conname, oid, pg_get_constraintdef(oid)) from pg_constraint \
             where connamespace not in ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)) x(line)",
    )
}

#[test]
fn empty_database_gets_the_lean_table_and_a_second_run_changes_nothing() {
    let database = fresh_database(Table::None);
    let report = migrated(&database, None, false);
    assert_eq!((&report.found, report.profile), (&Found::Nothing, Profile::Lean));
    assert_eq!(report.applied, ["V1__outbox_tables", "V2__pauses", "V1__outbox_lean"]);
    let text = report.to_string();
    assert!(text.starts_with("\"keiro\".\"keiro_outbox\": created with the lean profile\n"), "{text}");

    let before = fingerprint(&database);
    let report = migrated(&database, None, false);
    assert!(matches!(&report.found, Found::Ours(shape) if shape.profile == Profile::Lean), "{report:?}");
    assert!(report.applied.is_empty());
    assert!(report.to_string().contains("nothing to do"), "{report}");
    assert_eq!(fingerprint(&database), before);
    assert_eq!(database.value("select count(*) from keiro_relay.schema_history"), "2");
    assert_eq!(
        database
            .value("select concat_ws(' ', schema_name, table_name, profile, origin) from keiro_relay.outbox_tables")
            .trim_matches('"'),
        "keiro keiro_outbox lean created"
    );
}

#[test]
fn another_profile_the_second_time_changes_nothing_and_says_so() {
    let database = fresh_database(Table::None);
    migrated(&database, Some(Profile::Shared), false);
    let before = fingerprint(&database);
    let report = migrated(&database, Some(Profile::Lean), false);
    assert_eq!((report.profile, report.made_with), (Profile::Shared, Some(Profile::Shared)));
    assert!(report.to_string().contains("the lean profile was asked for"), "{report}");
    assert_eq!(fingerprint(&database), before);
}

#[test]
fn shared_profile_is_what_keiros_own_migrations_make() {
    let catalogue = |database: &Database| {
        database.value(
            "select string_agg(line, E'\\n' order by line) from ( \
               select format('%s %s %s %s', attname, format_type(atttypid, atttypmod), attnotnull, \
                   pg_get_expr(d.adbin, d.adrelid)) \
                 from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum \
                 where attrelid = 'keiro.keiro_outbox'::regclass and attnum > 0 \
               union all select indexdef from pg_indexes where schemaname = 'keiro' \
               union all select coalesce(reloptions::text, '-') from pg_class \
                 where oid = 'keiro.keiro_outbox'::regclass) x(line)",
        )
    };
    let ours = fresh_database(Table::None);
    migrated(&ours, Some(Profile::Shared), false);
    let keiros = fresh_database(Table::NewerShared);
    assert_eq!(catalogue(&ours), catalogue(&keiros));
}

#[test]
fn tables_of_keiro_are_adopted_untouched() {
    for (table, shape) in [(Table::OlderShared, "older shape"), (Table::NewerShared, "newer shape")] {
        let database = fresh_database(table);
        let mine = "select string_agg(format('%s %s %s', c.oid, c.relname, c.reloptions), ' ' order by c.oid) \
                    from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'keiro'";
        let before = database.value(mine);
        database.execute("drop index keiro.keiro_outbox_claim_order_idx");
        let report = migrated(&database, Some(Profile::Lean), false);
        assert!(matches!(&report.found, Found::Theirs(found) if found.profile == Profile::Shared), "{report:?}");
        assert_eq!(report.applied, ["V1__outbox_tables", "V2__pauses"]);
        let text = report.to_string();
        for part in ["made by another program, left as it is", shape, "shared profile"] {
            assert!(text.contains(part), "{part:?} is not in {text}");
        }
        assert!(text.contains("index keiro_outbox_claim_order_idx is missing"), "{text}");
        assert!(text.contains("the lean profile was asked for"), "{text}");
        let after = database.value(mine);
        assert_eq!(before.split_whitespace().count() - after.split_whitespace().count(), 2, "{before}\n{after}");
        assert_eq!(database.value("select origin from keiro_relay.outbox_tables"), "adopted");
        let before = fingerprint(&database);
        assert!(migrated(&database, None, false).applied.is_empty());
        assert_eq!(fingerprint(&database), before);
    }
}

#[test]
fn table_that_cannot_be_relayed_is_left_alone() {
    let database = fresh_database(Table::NewerShared);
    database.execute("alter table keiro.keiro_outbox drop column tracestate");
    let before = fingerprint(&database);
    let outcome = run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await);
    let error = outcome.expect_err("must not adopt it");
    assert!(matches!(error, MigrateError::Unusable(_)), "{error:?}");
    assert!(error.to_string().contains(r#"column "tracestate" is missing"#), "{error}");
    assert_eq!(fingerprint(&database), before);
}

#[test]
fn dry_run_changes_nothing_and_its_script_makes_the_same_table() {
    let database = fresh_database(Table::None);
    let before = fingerprint(&database);
    let options = cli::migrate::Options { profile: None, dry_run: true };
    let script = run(async || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let pool = db(database.url());
        let code =
            cli::migrate::run(&pool, "keiro", "keiro_outbox", options, &mut out, &mut err).await.expect("output");
        assert_eq!((code, String::from_utf8_lossy(&err).as_ref()), (0, ""));
        String::from_utf8(out).expect("text")
    });
    assert!(script.starts_with("-- \"keiro\".\"keiro_outbox\": would be created with the lean profile\n"), "{script}");
    assert_eq!(fingerprint(&database), before);

    database.execute(&script);
    let report = migrated(&database, None, true);
    assert!(matches!(&report.found, Found::Theirs(shape) if shape.profile == Profile::Lean), "{report:?}");
    // What the script made is complete; only the history is not there, so it counts as somebody else's.
    assert!(script.contains(&table_sql(Profile::Lean, "keiro", "keiro_outbox")), "{script}");
}

#[test]
fn two_at_once_make_one_table() {
    for _ in 0..5 {
        let database = fresh_database(Table::None);
        let pools: Vec<_> = (0..4).map(|_| db(database.url())).collect();
        let reports = run(async || {
            let runs = pools.iter().map(|pool| migrate(pool, "keiro", "keiro_outbox", None, false));
            futures_util::future::join_all(runs).await
        });
        let reports: Vec<_> = reports.into_iter().map(|report| report.expect("migrate")).collect();
        let made = reports.iter().filter(|report| report.found == Found::Nothing).count();
        assert_eq!(made, 1, "{reports:?}");
        assert_eq!(reports.iter().map(|report| report.applied.len()).sum::<usize>(), 3);
    }
}

#[test]
fn table_dropped_by_hand_is_made_again() {
    let database = fresh_database(Table::None);
    migrated(&database, None, false);
    database.execute("drop table keiro.keiro_outbox");
    let report = migrated(&database, Some(Profile::Shared), false);
    assert_eq!((report.found, report.profile), (Found::Nothing, Profile::Shared));
    assert!(matches!(migrated(&database, None, false).found, Found::Ours(_)));
}

#[test]
fn two_tables_of_any_name_live_side_by_side() {
    let database = fresh_database(Table::None);
    let odd = "Out\"box; drop {schema}.{table} that goes on for 63 bytes ééé";
    assert_eq!(odd.len(), 63);
    for (schema, table, profile) in
        [("keiro", "keiro_outbox", Profile::Lean), ("keiro", odd, Profile::Lean), ("we\"ird", odd, Profile::Shared)]
    {
        let pool = db(database.url());
        let report = run(async || migrate(&pool, schema, table, Some(profile), false).await).expect("migrate");
        assert_eq!((report.found, report.profile), (Found::Nothing, profile));
        let report = run(async || migrate(&pool, schema, table, None, false).await).expect("migrate");
        match report.found {
            Found::Ours(shape) => assert_eq!((shape.profile, shape.missing_indexes), (profile, vec![])),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(database.value("select count(*) from keiro_relay.outbox_tables"), "3");
}

#[test]
fn pooler_and_missing_permission_are_told_apart() {
    let database = fresh_database(Table::None);
    let mut pooled = settings(database.url());
    pooled.prepared_statements = false;
    let pool = keiro_relay::store::Db::new(&pooled, "test", "0").expect("a pool");
    let error = run(async || migrate(&pool, "keiro", "keiro_outbox", None, false).await).expect_err("a pooler");
    assert!(error.to_string().contains("database.prepared_statements = false"), "{error}");

    let name = crate::support::unique("role");
    database.execute(&format!("create role {name} login"));
    let host = database.url().split_once('@').expect("a user in the URL").1;
    let pool = db(&format!("postgres://{name}@{host}"));
    let (code, err) = run(async || {
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let options = cli::migrate::Options::default();
        let code =
            cli::migrate::run(&pool, "keiro", "keiro_outbox", options, &mut out, &mut err).await.expect("output");
        (code, String::from_utf8(err).expect("text"))
    });
    assert_eq!(code, 78);
    assert!(err.contains("create schema keiro_relay (needs CREATE on the database)"), "{err}");
}

#[test]
fn lean_checks_refuse_what_would_hide_a_row() {
    let database = fresh_database(Table::None);
    migrated(&database, None, false);
    let insert = |status: &str, next: &str, published: &str| {
        format!(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, \
             content_type, payload_bytes, occurred_at, status, next_attempt_at, published_at) \
             values (gen_random_uuid(), gen_random_uuid(), 's', 't', 'e', 1, 'text/plain', '', now(), '{status}', \
             '{next}', {published})"
        )
    };
    let refused = |sql: String| run(async || database.connect().await.batch_execute(&sql).await).is_err();
    for (status, next, published, legal) in [
        ("pending", "now", "null", true),
        ("pending", "-infinity", "null", true),
        ("failed", "9000-01-01 00:00:00+00", "null", true),
        ("somebody's", "now", "null", true),
        ("sent", "now", "now()", true),
        ("dead", "9999-12-31 00:00:00+00", "null", true),
        ("dead", "now", "null", true),
        ("pending", "now", "now()", false),
        ("sent", "now", "null", false),
        ("pending", "infinity", "null", false),
        ("failed", "9999-01-01 00:00:00+00", "null", false),
        ("publishing", "9999-12-31 00:00:00+00", "null", false),
        ("somebody's", "infinity", "null", false),
    ] {
        let status_text = status.replace('\'', "''");
        assert_eq!(refused(insert(&status_text, next, published)), !legal, "{status} {next} {published}");
    }
}
