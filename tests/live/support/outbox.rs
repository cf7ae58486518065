//! The outbox table of a test: the store that works on it, rows written into it as anybody may write them, and what it holds.

use std::collections::BTreeMap;
use std::time::Duration;

use keiro_relay::config::{self, Config};
use keiro_relay::domain::limits::Limits;
use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::store::{Shape, Store};
use serde_json::{Value, json};
use tokio_postgres::Client;
use uuid::Uuid;

use super::database::{Database, Table, fresh_database};
use super::store::settings;

/// A table, a store on it, and a connection that looks at it from outside.
pub struct Outbox {
    pub store: Store,
    pub shape: Shape,
    pub client: Client,
    // Last, so that its sessions are gone before it is dropped.
    pub database: Database,
}

impl Outbox {
    /// A fresh table of this shape.
    pub async fn fresh(table: Table) -> Self {
        Self::on(fresh_database(table)).await
    }

    /// The table of this database.
    pub async fn on(database: Database) -> Self {
        let store = Store::new(&config(database.url()), 8).expect("a store");
        let shape = store.inspect().await.expect("a table of the contract");
        store.adopt(&shape);
        let client = database.connect().await;
        Self { store, shape, client, database }
    }

    /// Another relay's store on the same table.
    pub fn another(&self, change: impl FnOnce(&mut Config)) -> Store {
        let mut config = config(self.database.url());
        change(&mut config);
        let store = Store::new(&config, 8).expect("a store");
        store.adopt(&self.shape);
        store
    }

    /// Writes rows made by [`row`].
    pub async fn insert(&self, rows: &[Value]) {
        insert(&self.client, rows).await;
    }

    /// Every row, in the contract's order.
    pub async fn rows(&self) -> Vec<Row> {
        rows(&self.client).await
    }

    /// Runs statements.
    pub async fn execute(&self, statements: &str) {
        execute(&self.client, statements).await;
    }
}

/// The defaults of the product, for this URL.
pub fn config(url: &str) -> Config {
    Config {
        database: settings(url),
        kafka: config::Kafka::default(),
        relay: config::Relay::default(),
        defaults: config::default_rules(),
        sources: BTreeMap::new(),
        limits: Limits::default(),
        maintenance: config::Maintenance::default(),
        http: config::Http::default(),
        log: config::Log::default(),
    }
}

/// The id of row `n`: ids sort as their numbers.
pub fn id(n: u64) -> Uuid {
    Uuid::from_u128(0x0190_0000_0000_7000_8000_0000_0000_0000 | u128::from(n))
}

/// A pending row of source `s` that is due, without a key; row `n` was created `n` microseconds after the first.
pub fn row(n: u64) -> Value {
    json!({
        "outbox_id": id(n),
        "message_id": format!("m{n}"),
        "source": "s",
        "destination": "topic",
        "event_type": "Tested",
        "schema_version": 1,
        "content_type": "text/plain",
        "payload_bytes": "\\x70",
        "occurred_at": "2026-01-02 03:04:05+00",
        "status": "pending",
        "attempt_count": 0,
        "next_attempt_at": "2026-01-02 03:04:05+00",
        "created_at": created_at(n),
        "updated_at": "2026-01-02 03:04:05+00",
    })
}

/// When row `n` was created.
pub fn created_at(n: u64) -> String {
    format!("2026-01-02 03:{:02}:{:02}.{:06}+00", n / 60_000_000 % 60, n / 1_000_000 % 60, n % 1_000_000)
}

/// The same row with other columns.
pub fn with(mut row: Value, columns: Value) -> Value {
    let (Value::Object(row_columns), Value::Object(columns)) = (&mut row, columns) else { panic!("rows are objects") };
    row_columns.extend(columns);
    row
}

/// Row `n` with this key.
pub fn keyed(n: u64, key: &str) -> Value {
    with(row(n), json!({ "message_key": key }))
}

/// Writes rows as they are; columns that are not given are null.
pub async fn insert(client: &Client, rows: &[Value]) {
    const INSERT: &str = "insert into keiro.keiro_outbox \
                          select * from jsonb_populate_recordset(null::keiro.keiro_outbox, $1::jsonb)";
    let rows = Value::Array(rows.to_vec());
    if let Err(error) = client.execute(INSERT, &[&rows]).await {
        panic!("{error:?} for {rows:#}");
    }
}

pub async fn execute(client: &Client, statements: &str) {
    if let Err(error) = client.batch_execute(statements).await {
        panic!("{error:?} in: {statements}");
    }
}

/// A row as it lies in the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub position: Position,
    pub source: String,
    pub key: Option<String>,
    pub destination: String,
    pub status: String,
    pub attempt_count: i64,
    pub next_attempt_at: PgTime,
    /// Whether next_attempt_at had passed when the row was read.
    pub due: bool,
    pub updated_at: PgTime,
    pub published_at: Option<PgTime>,
    pub last_error: Option<String>,
    pub payload_octets: usize,
    /// Every column, as PostgreSQL prints the whole row.
    pub text: String,
    /// Every column that a claim leaves alone.
    pub unclaimed_columns: String,
}

impl Row {
    pub fn id(&self) -> Uuid {
        self.position.outbox_id
    }

    /// Whether it still holds back its lane (contract §3): also in a status nobody knows.
    pub fn is_live(&self) -> bool {
        !["sent", "dead", "rejected"].contains(&self.status.as_str())
    }

    /// Whether it may be claimed as far as it alone is concerned.
    pub fn is_claimable(&self) -> bool {
        ["pending", "failed"].contains(&self.status.as_str()) && self.due
    }
}

/// Every row, in the contract's order: sorted here, not by the server.
pub async fn rows(client: &Client) -> Vec<Row> {
    const QUERY: &str = "select outbox_id, created_at, source, message_key, destination, status, attempt_count, next_attempt_at, \
                         next_attempt_at <= statement_timestamp() as due, updated_at, published_at, last_error, \
                         length(payload_bytes) as payload_octets, o::text as text, \
                         (to_jsonb(o) - '{status,attempt_count,updated_at}'::text[])::text as unclaimed_columns from keiro.keiro_outbox o";
    let found = client.query(QUERY, &[]).await.expect("the rows");
    let mut rows: Vec<Row> = found
        .iter()
        .map(|row| Row {
            position: Position { created_at: row.get("created_at"), outbox_id: row.get("outbox_id") },
            source: row.get("source"),
            key: row.get("message_key"),
            destination: row.get("destination"),
            status: row.get("status"),
            attempt_count: row.get("attempt_count"),
            next_attempt_at: row.get("next_attempt_at"),
            due: row.get("due"),
            updated_at: row.get("updated_at"),
            published_at: row.get("published_at"),
            last_error: row.get("last_error"),
            payload_octets: usize::try_from(row.get::<_, i32>("payload_octets")).expect("a length"),
            text: row.get("text"),
            unclaimed_columns: row.get("unclaimed_columns"),
        })
        .collect();
    rows.sort_by_key(|row| row.position);
    rows
}

/// Every column of one row, times as the server prints them in UTC.
pub async fn columns(client: &Client, id: Uuid) -> BTreeMap<String, Value> {
    let query = "select to_jsonb(o) from keiro.keiro_outbox o where outbox_id = $1";
    let row: Value = client.query_one(query, &[&id]).await.expect("the row").get(0);
    let Value::Object(columns) = row else { panic!("a row is an object") };
    columns.into_iter().collect()
}

/// A seed that is printed, so that a failure can be repeated with `KEIRO_RELAY_TEST_SEED`.
pub fn seed() -> u64 {
    let given = std::env::var("KEIRO_RELAY_TEST_SEED").ok().map(|text| text.parse().expect("a seed is a number"));
    let seed = given.unwrap_or_else(rand::random);
    println!("KEIRO_RELAY_TEST_SEED={seed}");
    seed
}

/// How often something may be tried before a test gives up on it.
pub const SHORT: Duration = Duration::from_secs(20);
