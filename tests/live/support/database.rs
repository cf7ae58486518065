//! A database for each test, copied from a template that holds the contract's table.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::{Mutex, PoisonError};

use keiro_relay::store::{Profile, table_sql};
use tokio_postgres::{Client, NoTls};

use super::{run, services, unique};

/// What a fresh database holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// Nothing.
    None,
    /// `keiro.keiro_outbox` without the rejected columns, with upstream's indexes.
    OlderShared,
    /// `keiro.keiro_outbox` with the rejected columns and their checks, with upstream's indexes.
    NewerShared,
    /// `keiro.keiro_outbox` as `keiro-relay migrate` makes it.
    Lean,
}

impl Table {
    /// Every shape that a relay works on.
    pub const ALL: [Self; 3] = [Self::OlderShared, Self::NewerShared, Self::Lean];

    /// The statements that make it.
    pub fn sql(self) -> String {
        const OLDER: &str = include_str!("table_older_shared.sql");
        const UPGRADE: &str = include_str!("table_older_to_newer.sql");
        match self {
            Table::None => String::new(),
            Table::OlderShared => OLDER.to_owned(),
            Table::NewerShared => format!("{OLDER}\n{UPGRADE}"),
            Table::Lean => format!("create schema keiro;\n{}", table_sql(Profile::Lean, "keiro", "keiro_outbox")),
        }
    }
}

/// What turns an older table into a newer one, also while a relay works on it.
pub fn older_to_newer() -> &'static str {
    include_str!("table_older_to_newer.sql")
}

/// A database of one test; dropped with it.
#[derive(Debug)]
pub struct Database {
    name: String,
    url: String,
    admin_url: String,
}

/// A database on the shared PostgreSQL.
pub fn fresh_database(table: Table) -> Database {
    fresh_database_on(services::database_url(), table)
}

/// A database on the server of this URL (of a user who may create databases).
pub fn fresh_database_on(admin_url: &str, table: Table) -> Database {
    let template = template(admin_url, &table.sql());
    let name = unique("t");
    execute(admin_url, &format!("create database {name} template {template}"));
    Database { url: with_database(admin_url, &name), name, admin_url: admin_url.to_owned() }
}

impl Database {
    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs statements over a connection of their own.
    #[track_caller]
    pub fn execute(&self, statements: &str) {
        execute(&self.url, statements);
    }

    /// A connection that lives on the caller's runtime.
    pub async fn connect(&self) -> Client {
        connect(&self.url).await
    }

    /// The first column of the first row of a query, as text.
    #[track_caller]
    pub fn value(&self, query: &str) -> String {
        let query = format!("select (q.*)::text from ({query}) as q(value)");
        let text: String = run(async || connect(&self.url).await.query_one(&query, &[]).await.expect(&query).get(0));
        // A row's text form is in parentheses.
        text.trim_start_matches('(').trim_end_matches(')').to_owned()
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        // The server may be gone on purpose; then so is the database.
        let statement = format!("drop database if exists {} with (force)", self.name);
        run(async || {
            if let Ok((client, connection)) = tokio_postgres::connect(&self.admin_url, NoTls).await {
                tokio::spawn(connection);
                let _ = client.batch_execute(&statement).await;
            }
        });
    }
}

/// A connection whose driver runs on the caller's runtime.
pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.expect("connect to the test's database");
    tokio::spawn(connection);
    client
}

#[track_caller]
fn execute(url: &str, statements: &str) {
    let outcome = run(async || connect(url).await.batch_execute(statements).await);
    if let Err(error) = outcome {
        panic!("{error:?} in: {statements}");
    }
}

/// The name of a database that holds just this table; made once per server, whoever else wants it at the same time.
fn template(admin_url: &str, sql: &str) -> String {
    static MADE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut hasher = DefaultHasher::new();
    sql.hash(&mut hasher);
    let name = format!("keiro_relay_template_{:016x}", hasher.finish());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    if made.insert(format!("{admin_url} {name}")) {
        run(async || {
            let client = connect(admin_url).await;
            client.batch_execute("select pg_advisory_lock(761503)").await.expect("lock the templates");
            let query = "select 1 from pg_database where datname = $1";
            if client.query_opt(query, &[&name]).await.expect(query).is_none() {
                // Under another name until it is whole: a process that dies in between leaves no half template.
                let draft = unique("draft");
                client.batch_execute(&format!("create database {draft}")).await.expect("create the template");
                let inside = connect(&with_database(admin_url, &draft)).await;
                inside.batch_execute(sql).await.expect("the table's statements");
                drop(inside);
                let rename = format!("alter database {draft} rename to {name}");
                // The server notices a moment later that the connection inside is gone.
                super::wait_until_async("the template to be free", super::LONG, async || {
                    client.batch_execute(&rename).await.is_ok()
                })
                .await;
            }
        });
    }
    name
}

/// The same server and user, another database.
fn with_database(url: &str, database: &str) -> String {
    let (url, parameters) = url.split_once('?').map_or((url, None), |(url, rest)| (url, Some(rest)));
    let (scheme, rest) = url.split_once("://").expect("a URL with a scheme");
    let authority = rest.split('/').next().unwrap_or_default();
    let parameters = parameters.map(|text| format!("?{text}")).unwrap_or_default();
    format!("{scheme}://{authority}/{database}{parameters}")
}
