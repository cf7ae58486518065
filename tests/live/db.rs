//! The way to PostgreSQL: bounds, lost connections, both ways to run statements, transactions, notifications.

use std::time::{Duration, Instant};

use keiro_relay::config::TlsMode;
use keiro_relay::store::{Db, ErrorKind, StoreError};
use tokio_postgres::types::Type;

use crate::support::database::{Database, Table, fresh_database, fresh_database_on};
use crate::support::services::own_postgres;
use crate::support::store::{db, settings};
use crate::support::{LONG, run, wait_until_async};

/// A pool that runs statements the other way: as behind a transaction pooler.
fn pooled(database: &Database) -> Db {
    let mut settings = settings(database.url());
    settings.prepared_statements = false;
    Db::new(&settings, "test", "0").expect("a pool")
}

async fn setting(db: &Db, name: &str) -> String {
    let rows = db.query("select current_setting($1)", &[(&name, Type::TEXT)], LONG).await.expect(name);
    rows[0].get(0)
}

#[test]
fn statements_run_under_our_settings_with_and_without_sessions() {
    let database = fresh_database(Table::None);
    database.execute(&format!(
        "alter database {} set timezone = 'Asia/Kathmandu'; \
         alter database {0} set default_transaction_isolation = 'serializable'",
        database.name()
    ));
    run(async || {
        for db in [db(database.url()), pooled(&database)] {
            for (name, value) in [
                ("plan_cache_mode", "force_generic_plan"),
                ("enable_seqscan", "off"),
                ("enable_bitmapscan", "off"),
                ("enable_sort", "off"),
                ("enable_hashjoin", "on"),
                ("jit", "off"),
                ("transaction_isolation", "read committed"),
                ("statement_timeout", "30s"),
                ("lock_timeout", "15s"),
                ("idle_in_transaction_session_timeout", "30s"),
                ("synchronous_commit", "off"),
                ("TimeZone", "UTC"),
            ] {
                assert_eq!(setting(&db, name).await, value, "{name} of {db:?}");
            }
            let mut tx = db.begin(LONG).await.expect("begin");
            let rows = tx.query("select current_setting('synchronous_commit')", &[], LONG).await.expect("query");
            assert_eq!(rows[0].get::<_, String>(0), "on");
            tx.commit(LONG).await.expect("commit");
            assert_eq!(setting(&db, "synchronous_commit").await, "off", "the transaction's setting ends with it");
        }
    });
}

#[test]
fn without_sessions_nothing_is_left_on_the_connection() {
    let database = fresh_database(Table::None);
    run(async || {
        let mut settings = settings(database.url());
        settings.prepared_statements = false;
        settings.pool_size = 1;
        let db = Db::new(&settings, "test", "0").expect("a pool");
        assert_eq!(setting(&db, "enable_seqscan").await, "off");
        assert!(db.query("select 1 / $1", &[(&0_i32, Type::INT4)], LONG).await.is_err());
        let left = "select (select count(*) from pg_prepared_statements)::int4, \
                    (select reset_val from pg_settings where name = 'enable_seqscan')";
        let row = db.query_opt(left, &[], LONG).await.expect("query").expect("a row");
        assert_eq!((row.get(0), row.get(1)), (0_i32, "on"));
        // Nor is a failed transaction left open.
        let count = db.execute("create table t (x int)", &[], LONG).await.expect("not in a failed transaction");
        assert_eq!(count, 0);
        assert_eq!(db.execute("insert into t values (1), (2)", &[], LONG).await.expect("insert"), 2);
    });
}

#[test]
fn application_name_says_who_we_are() {
    let database = fresh_database(Table::None);
    run(async || {
        let long = "a".repeat(60);
        for (instance, expected) in [
            ("worker-1", "keiro-relay/worker-1/0123456789ab".to_owned()),
            // Cut to 63 bytes; what tells policies apart is kept.
            (&long, format!("keiro-relay/{}/0123456789ab", "a".repeat(38))),
        ] {
            let db = Db::new(&settings(database.url()), instance, "0123456789ab").expect("a pool");
            assert_eq!(setting(&db, "application_name").await, expected);
        }
        // Cut between characters; the server shows what is not ASCII in a form of its own.
        let db = Db::new(&settings(database.url()), &"é".repeat(60), "0123456789ab").expect("a pool");
        assert!(setting(&db, "application_name").await.starts_with("keiro-relay/"));
    });
}

#[test]
fn statement_over_its_bound_is_given_up_and_ended_on_the_server() {
    let database = fresh_database(Table::None);
    run(async || {
        for db in [db(database.url()), pooled(&database)] {
            let begun = Instant::now();
            let error = db.query("select pg_sleep(300)", &[], Duration::from_millis(200)).await.expect_err("a timeout");
            assert!(begun.elapsed() < Duration::from_secs(30));
            assert_eq!((error.kind(), error.reason()), (ErrorKind::Transient, "timeout"));
            let running =
                "select count(*) from pg_stat_activity where query like 'select pg_sleep%' and state = 'active'";
            // Well before statement_timeout, which would end it too.
            let soon = Duration::from_secs(10);
            wait_until_async("the statement to be cancelled", soon, async || {
                let row = db.query_opt(running, &[], LONG).await.expect("query").expect("a row");
                row.get::<_, i64>(0) == 0
            })
            .await;
        }
    });
}

#[test]
fn dropped_call_does_not_hand_its_connection_on() {
    let database = fresh_database(Table::None);
    run(async || {
        let mut settings = settings(database.url());
        settings.pool_size = 1;
        let db = Db::new(&settings, "test", "0").expect("a pool");
        let pid = async || db.query("select pg_backend_pid()", &[], LONG).await.expect("pid")[0].get::<_, i32>(0);
        let first = pid().await;
        assert_eq!(pid().await, first, "an answered statement keeps its connection");
        tokio::select! {
            biased;
            answer = db.query("select pg_sleep(300)", &[], LONG) => panic!("{answer:?}"),
            // The statement is on its way once the first poll returned.
            () = tokio::task::yield_now() => {}
        }
        assert_ne!(pid().await, first);
    });
}

#[test]
fn busy_pool_is_waited_for_no_longer_than_the_bound() {
    let database = fresh_database(Table::None);
    run(async || {
        let mut settings = settings(database.url());
        settings.pool_size = 1;
        let db = Db::new(&settings, "test", "0").expect("a pool");
        let tx = db.begin(LONG).await.expect("begin");
        let error = db.query("select 1", &[], Duration::from_millis(100)).await.expect_err("no connection");
        assert_eq!(error.reason(), "timeout");
        assert!(error.to_string().contains("database.pool_size"), "{error}");
        drop(tx);
        db.query("select 1", &[], LONG).await.expect("the connection is free again");
    });
}

#[test]
fn transaction_that_is_not_committed_leaves_nothing() {
    let database = fresh_database(Table::None);
    database.execute("create table t (x int primary key)");
    run(async || {
        for db in [db(database.url()), pooled(&database)] {
            let mut tx = db.begin(LONG).await.expect("begin");
            assert_eq!(
                tx.execute("insert into t values ($1)", &[(&1_i32, Type::INT4)], LONG).await.expect("insert"),
                1
            );
            drop(tx);
            let count =
                async || db.query("select count(*) from t", &[], LONG).await.expect("count")[0].get::<_, i64>(0);
            assert_eq!(count().await, 0);

            let mut tx = db.begin(LONG).await.expect("begin");
            tx.execute("insert into t values (1)", &[], LONG).await.expect("insert");
            let error = tx.execute("insert into t values (1)", &[], LONG).await.expect_err("a duplicate");
            assert_eq!(error.code(), Some("23505"));
            let text = error.to_string();
            assert!(text.contains("t_pkey") && !text.contains("(x)=(1)"), "{text}");
            tx.commit(LONG).await.expect("commit of a failed transaction rolls back");
            assert_eq!(count().await, 0);
        }
    });
}

#[test]
fn notifications_arrive_and_end_with_the_connection() {
    let database = fresh_database(Table::None);
    run(async || {
        let db = db(database.url());
        let (dedicated, mut listener) = db.dedicated().await.expect("a connection");
        dedicated.listen("Odd \"channel\"", LONG).await.expect("listen");
        let notify = "select pg_notify($1, $2)";
        let params = [(&"Odd \"channel\"" as _, Type::TEXT), (&"billing" as _, Type::TEXT)];
        db.query(notify, &params, LONG).await.expect("notify");
        let notification = tokio::time::timeout(LONG, listener.next()).await.expect("in time").expect("a notification");
        assert_eq!((notification.channel.as_str(), notification.payload.as_str()), ("Odd \"channel\"", "billing"));

        let kill = "select pg_terminate_backend(pid) from pg_stat_activity where query like 'listen%'";
        db.query(kill, &[], LONG).await.expect("kill it");
        assert_eq!(tokio::time::timeout(LONG, listener.next()).await.expect("in time"), None);
        wait_until_async("it to be seen as closed", LONG, async || dedicated.is_closed()).await;
        let error = dedicated.query("select 1", &[], LONG).await.expect_err("closed");
        assert_eq!((error.kind(), error.reason()), (ErrorKind::Transient, "closed"));
    });
}

#[test]
fn killed_connections_are_replaced() {
    let database = fresh_database(Table::None);
    run(async || {
        let db = db(database.url());
        let (killer, _) = db.dedicated().await.expect("a connection");
        let kill = "select pg_terminate_backend(pid) from pg_stat_activity \
                    where pid <> pg_backend_pid() and datname = current_database()";
        for _ in 0..3 {
            db.query("select 1", &[], LONG).await.expect("a connection");
            killer.query(kill, &[], LONG).await.expect("kill it");
            // The first use after the kill may meet the dead connection; the one after that must not.
            match db.query("select 1", &[], LONG).await {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), ErrorKind::Transient, "{error}"),
            }
            db.query("select 1", &[], LONG).await.expect("a new connection");
        }
    });
}

#[test]
fn errors_are_sorted_and_show_no_values() {
    let database = fresh_database(Table::OlderShared);
    run(async || {
        let db = db(database.url());
        let error = async |sql: &str| db.query(sql, &[], LONG).await.expect_err(sql);
        for (sql, kind, reason) in [
            ("select nonsense from keiro.keiro_outbox", ErrorKind::Mismatch, "schema"),
            ("select 1 from keiro.nonsense", ErrorKind::Mismatch, "schema"),
            ("select 'payload-marker'::int", ErrorKind::Fatal, "other"),
            ("do $$ begin raise exception 'payload-marker'; end $$", ErrorKind::Fatal, "other"),
            (
                "do $$ begin raise exception 'payload-marker' using errcode = '40001'; end $$",
                ErrorKind::Serialization,
                "serialization",
            ),
            ("do $$ begin raise exception using errcode = '40P01'; end $$", ErrorKind::Serialization, "serialization"),
            ("do $$ begin raise exception using errcode = '42501'; end $$", ErrorKind::Mismatch, "permission"),
            ("do $$ begin raise exception using errcode = '25006'; end $$", ErrorKind::Transient, "connect"),
            ("do $$ begin raise exception using errcode = '57P01'; end $$", ErrorKind::Transient, "closed"),
            ("set statement_timeout = 1; select pg_sleep(5)", ErrorKind::Fatal, "other"),
        ] {
            let error = error(sql).await;
            assert_eq!((error.kind(), error.reason()), (kind, reason), "{sql}: {error}");
            let text = format!("{error} {error:?}");
            assert!(!text.contains("payload-marker") || error.code() == Some("40001"), "{text}");
            assert!(error.to_string().starts_with("database: "), "{text}");
        }
        let wrong = db.query("select $1", &[(&"text", Type::INT4)], LONG).await.expect_err("a wrong type");
        assert_eq!((wrong.kind(), wrong.reason()), (ErrorKind::Mismatch, "schema"));
    });
}

#[test]
fn ways_not_to_connect_are_told_apart_and_show_no_secret() {
    let database = fresh_database(Table::None);
    database.execute(&format!("create role locked_{} login password 'right'", database.name()));
    run(async || {
        let host = database.url().split_once('@').expect("a user in the URL").1;
        let query = async |url: &str| {
            let error = db(url).query("select 1", &[], LONG).await.expect_err(url);
            let text = format!("{error} {error:?}");
            assert!(!text.contains("sesame") && !text.contains("postgres://"), "{text}");
            error
        };
        let nobody = query(&format!("postgres://nobody_at_all:sesame@{host}")).await;
        assert_eq!((nobody.kind(), nobody.reason()), (ErrorKind::Auth, "auth"), "{nobody}");
        let server = host.split('/').next().expect("a host");
        let user = database.url().split_once("://").expect("a scheme").1.split('@').next().expect("a user");
        let nowhere = query(&format!("postgres://{user}@{server}/nonsense")).await;
        assert_eq!(nowhere.kind(), ErrorKind::Auth, "{nowhere}");
        assert!(nowhere.to_string().contains("database's name"), "{nowhere}");
        let refused = query("postgres://u:sesame@127.0.0.1:1/x").await;
        assert_eq!((refused.kind(), refused.reason()), (ErrorKind::Transient, "connect"), "{refused}");
        assert!(refused.to_string().contains("127.0.0.1:1"), "{refused}");
    });
    for (url, part) in [
        ("postgres://u:sesame@h:99999/x", "is not a connection URL"),
        ("not a url with sesame", "is not a connection URL"),
        ("postgres:///x", "names no host"),
    ] {
        let error = Db::new(&settings(url), "test", "0").expect_err(url);
        assert_eq!(error.kind(), ErrorKind::Fatal);
        assert!(error.to_string().contains(part), "{error}");
        assert!(!format!("{error} {error:?}").contains("sesame"), "{error:?}");
    }
    let mut any = settings("postgres://h/x");
    any.tls.mode = TlsMode::VerifyCa;
    let error = Db::new(&any, "test", "0").expect_err("any authority");
    assert!(error.to_string().contains("needs database.tls.ca_file"), "{error}");
    any.tls.ca_file = Some("/nowhere/ca.pem".into());
    let error = Db::new(&any, "test", "0").expect_err("no file");
    assert!(error.to_string().contains("database.tls.ca_file = \"/nowhere/ca.pem\" cannot be read"), "{error}");
}

#[test]
fn secrets_are_read_anew_for_each_connection() {
    let database = fresh_database(Table::None);
    let directory = tempfile::tempdir().expect("a directory");
    let (url_file, password_file) = (directory.path().join("url"), directory.path().join("password"));
    std::fs::write(&url_file, "postgres://nobody_at_all@127.0.0.1:1/x\n").expect("write");
    std::fs::write(&password_file, "old\n").expect("write");
    let mut settings = settings("postgres://ignored@127.0.0.1:2/x");
    (settings.url_file, settings.password_file) = (Some(url_file.clone()), Some(password_file.clone()));
    let db = Db::new(&settings, "test", "0").expect("a pool");
    run(async || {
        assert_eq!(db.query("select 1", &[], LONG).await.expect_err("nobody there").reason(), "connect");
        std::fs::write(&url_file, format!("{}\n", database.url())).expect("write");
        std::fs::write(&password_file, "new\n").expect("write");
        db.query("select 1", &[], LONG).await.expect("the new URL");
        std::fs::remove_file(&password_file).expect("remove");
        let error = db.dedicated().await.expect_err("no password file");
        assert!(error.to_string().contains("database.password_file"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Fatal);
    });
}

#[test]
fn verified_tls_trusts_the_named_authority_and_nobody_else() {
    let directory = tempfile::tempdir().expect("a directory");
    let (ca, other) = (authority("ours"), authority("other"));
    let path = |name: &str| directory.path().join(name);
    let write = |name: &str, pem: Vec<u8>| std::fs::write(path(name), pem).expect("write");
    write("ca.pem", ca.0.to_pem().expect("PEM"));
    write("other.pem", other.0.to_pem().expect("PEM"));
    let (certificate, key) = server_certificate(&ca, "localhost");
    let server = own_postgres(&[]);
    let admin = server.url("postgres");
    // The server reads its certificate from its own directory and as its own user; it is handed over through SQL.
    run(async || {
        let client = crate::support::database::connect(&admin).await;
        let data: String = client.query_one("show data_directory", &[]).await.expect("data").get(0);
        for (name, pem) in [("server.crt", certificate.to_pem()), ("server.key", key.private_key_to_pem_pkcs8())] {
            let text = String::from_utf8(pem.expect("PEM")).expect("text").trim_end().replace('\n', "\\n");
            // COPY makes files for the owner only, which is what the server wants of a key.
            let copy = format!(
                "copy (select unnest(string_to_array(E'{text}', E'\\n'))) to program 'umask 077; cat > {data}/{name}'"
            );
            client.batch_execute(&copy).await.expect("copy");
        }
        client.batch_execute("alter system set ssl = on").await.expect("ssl");
        client.batch_execute("select pg_reload_conf()").await.expect("reload");
        wait_until_async("TLS to be on", LONG, async || {
            let fresh = crate::support::database::connect(&admin).await;
            fresh.query_one("show ssl", &[]).await.expect("ssl").get::<_, String>(0) == "on"
        })
        .await;
    });
    let database = fresh_database_on(&admin, Table::None);
    let by_name = database.url().replace("127.0.0.1", "localhost");
    let by_address = database.url().replace("localhost", "127.0.0.1");
    let connect = |url: &str, mode: TlsMode, ca: Option<&str>| {
        let mut settings = settings(url);
        settings.tls.mode = mode;
        settings.tls.ca_file = ca.map(path);
        let db = Db::new(&settings, "test", "0").expect("a pool");
        let sql = "select coalesce((select ssl from pg_stat_ssl where pid = pg_backend_pid()), false)";
        run(async || Ok::<_, StoreError>(db.query(sql, &[], LONG).await?[0].get::<_, bool>(0)))
    };
    for (url, mode, ca, encrypted) in [
        (&by_name, TlsMode::Disable, None, Some(false)),
        (&by_name, TlsMode::Prefer, None, Some(true)),
        (&by_name, TlsMode::Require, None, Some(true)),
        (&by_address, TlsMode::Require, None, Some(true)),
        (&by_name, TlsMode::Require, Some("other.pem"), None),
        (&by_address, TlsMode::VerifyCa, Some("ca.pem"), Some(true)),
        (&by_address, TlsMode::VerifyCa, Some("other.pem"), None),
        (&by_name, TlsMode::VerifyFull, Some("ca.pem"), Some(true)),
        (&by_address, TlsMode::VerifyFull, Some("ca.pem"), None),
        (&by_name, TlsMode::VerifyFull, Some("other.pem"), None),
        (&by_name, TlsMode::VerifyFull, None, None),
    ] {
        let outcome = connect(url, mode, ca);
        assert_eq!(outcome.as_ref().ok().copied(), encrypted, "{mode:?} {ca:?} {outcome:?}");
        if let Err(error) = outcome {
            assert_eq!((error.kind(), error.reason()), (ErrorKind::Auth, "auth"), "{error}");
            assert!(error.to_string().contains("database.tls"), "{error}");
        }
    }
    // The URL's own word counts where the section says nothing, also when it is read from a file.
    let separator = if by_name.contains('?') { '&' } else { '?' };
    let mut settings = settings("postgres://ignored/x");
    settings.url_file = Some(path("url"));
    settings.tls.ca_file = Some(path("other.pem"));
    std::fs::write(path("url"), format!("{by_name}{separator}sslmode=verify-full\n")).expect("write");
    let db = Db::new(&settings, "test", "0").expect("a pool");
    let error = run(async || db.query("select 1", &[], LONG).await).expect_err("another authority");
    assert_eq!(error.kind(), ErrorKind::Auth, "{error}");
}

type Authority = (openssl::x509::X509, openssl::pkey::PKey<openssl::pkey::Private>);

fn authority(name: &str) -> Authority {
    certificate(name, None, &|builder| {
        let constraints = openssl::x509::extension::BasicConstraints::new().critical().ca().build()?;
        builder.append_extension(constraints)
    })
}

fn server_certificate(ca: &Authority, host: &str) -> Authority {
    certificate(host, Some(ca), &|builder| {
        let context = builder.x509v3_context(Some(&ca.0), None);
        let names = openssl::x509::extension::SubjectAlternativeName::new().dns(host).build(&context)?;
        builder.append_extension(names)
    })
}

fn certificate(
    name: &str,
    issuer: Option<&Authority>,
    extend: &dyn Fn(&mut openssl::x509::X509Builder) -> Result<(), openssl::error::ErrorStack>,
) -> Authority {
    let make = || {
        let key = openssl::pkey::PKey::from_rsa(openssl::rsa::Rsa::generate(2048)?)?;
        let mut subject = openssl::x509::X509NameBuilder::new()?;
        subject.append_entry_by_text("CN", name)?;
        let subject = subject.build();
        let mut builder = openssl::x509::X509Builder::new()?;
        builder.set_version(2)?;
        let serial = openssl::bn::BigNum::from_u32(if issuer.is_some() { 2 } else { 1 })?;
        builder.set_serial_number(&*openssl::asn1::Asn1Integer::from_bn(&serial)?)?;
        builder.set_subject_name(&subject)?;
        builder.set_issuer_name(issuer.map_or(&subject, |(certificate, _)| certificate.subject_name()))?;
        builder.set_pubkey(&key)?;
        builder.set_not_before(&*openssl::asn1::Asn1Time::days_from_now(0)?)?;
        builder.set_not_after(&*openssl::asn1::Asn1Time::days_from_now(2)?)?;
        extend(&mut builder)?;
        builder.sign(issuer.map_or(&key, |(_, key)| key), openssl::hash::MessageDigest::sha256())?;
        Ok::<_, openssl::error::ErrorStack>((builder.build(), key))
    };
    make().expect("a certificate")
}
