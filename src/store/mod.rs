//! PostgreSQL: one module per verb, one statement per file in `sql/`.
//!
//! Nothing here ever talks to the broker or decides what an outcome means; only `migrate` runs DDL.

mod branches;
mod change;
mod claim;
mod connect;
mod db;
mod diagnose;
mod enqueue;
mod error;
mod inspect;
mod lane_order;
mod maintenance;
mod migrate;
mod names;
mod operator;
mod page;
mod pauses;
mod select;
mod settle;
mod statements;
mod verb;
mod verify;
mod why;

use std::sync::{Arc, RwLock};
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

pub use branches::{Filter, Query, Unserved};
pub use change::{CHANGE_ROWS_MAX, History, Rules};
pub use claim::Claim;
pub use db::{Db, Dedicated, Listener, Notification, Param, Tx, WAKE_CHANNEL};
pub use diagnose::{
    Between, ClockGap, Front, FrontRows, IndexFact, IndexState, Indexes, OldTransaction, Prepared, SOURCES_MAX,
    SentTopic, Settings, Slot, UNDATED_MAX, Upkeep,
};
pub use enqueue::{EnqueueFailure, enqueue, wake};
pub use error::{ErrorKind, REASONS, StoreError};
pub use inspect::{
    COLUMNS, ContractColumn, Examined, InspectError, LEAN_CHECKS, Profile, REJECTED_COLUMNS, SchemaProblem, Shape,
    inspect, inspect_to_read,
};
pub use maintenance::{Backlog, Finished, Head, Requeued, StaleWindow, TableHealth};
pub use migrate::{Found, MigrateError, Report, migrate, table_sql};
pub use names::{qualified, quoted};
pub use page::{Cell, Record, Walked};
pub use pauses::{PAUSES_MAX, PauseEnd, Paused, PausesError};
pub use select::{Binds, Page, Selection, Sort, Status, When};
pub use settle::Settled;
pub use verb::{Changes, Due, Unchanged, Verb, Why};
pub use verify::{Instants, RowName, SentRange};
pub use why::{AHEAD_MAX, Ahead, LaneHead};

use crate::config::Config;
use statements::Statements;

/// How long one statement of a command may take that only looks.
const LOOK_MAX: Duration = Duration::from_secs(10);

/// The outbox table, once its shape is known.
#[derive(Debug)]
pub struct Store {
    db: Db,
    schema: String,
    table: String,
    /// Longest wait for any statement of ours, with its connection.
    bound: Duration,
    /// Larger payloads are claimed without being read; they can only be rejected.
    payload_octets_max: usize,
    known: RwLock<Option<Known>>,
}

/// What the last look at the catalogue said, written out.
#[derive(Debug, Clone)]
struct Known {
    shape: Shape,
    statements: Arc<Statements>,
}

impl Store {
    /// Makes a store over a pool of its own; contacts nothing.
    ///
    /// # Errors
    /// [`StoreError::Setting`] when the connection settings cannot be used.
    pub fn new(config: &Config, pool_size: usize) -> Result<Self, StoreError> {
        let database = crate::config::Database { pool_size, ..config.database.clone() };
        let db = Db::new(&database, &config.relay.instance, &config.policy_hash())?;
        Ok(Self::over(db, database, config))
    }

    /// A store over a pool that belongs to somebody else: see [`Db::over`].
    #[must_use]
    pub fn over_pool(config: &Config, pool: deadpool_postgres::Pool) -> Self {
        Self::over(Db::over(pool, &config.database), config.database.clone(), config)
    }

    /// Whether a session's state outlives a transaction: see [`Db::has_sessions`].
    pub(crate) fn has_sessions(&self) -> bool {
        self.db.has_sessions()
    }

    /// A store for a command that only looks, over one connection: the server refuses every change, and ends a statement that takes
    /// longer than a person waits.
    ///
    /// # Errors
    /// As [`Store::new`].
    pub fn read_only(config: &Config) -> Result<Self, StoreError> {
        let statement_timeout = config.database.statement_timeout.min(LOOK_MAX);
        let database = crate::config::Database { pool_size: 1, statement_timeout, ..config.database.clone() };
        let db = Db::read_only(&database, &config.relay.instance, &config.policy_hash())?;
        Ok(Self::over(db, database, config))
    }

    fn over(db: Db, database: crate::config::Database, config: &Config) -> Self {
        Self {
            db,
            schema: database.schema,
            table: database.table,
            // The server ends a statement after statement_timeout; what is longer is a connection that died.
            bound: database.statement_timeout + database.connect_timeout,
            payload_octets_max: config.kafka.message_bytes_max,
            known: RwLock::new(None),
        }
    }

    /// Reads the table's shape and our permissions from the catalogue. Changes nothing: see [`Store::adopt`].
    ///
    /// # Errors
    /// Every problem of the table at once, or why it could not be read.
    pub async fn inspect(&self) -> Result<Shape, InspectError> {
        inspect(&self.db, &self.schema, &self.table).await
    }

    /// [`Store::inspect`] for a command that only reads: the right to update is not asked for.
    ///
    /// # Errors
    /// As [`Store::inspect`].
    pub async fn inspect_to_read(&self) -> Result<Shape, InspectError> {
        inspect_to_read(&self.db, &self.schema, &self.table).await
    }

    /// Uses the statements of this shape from now on.
    pub fn adopt(&self, shape: &Shape) {
        let mut known = self.known.write().expect("no code panics while it holds this lock");
        if known.as_ref().is_none_or(|known| known.shape != *shape) {
            let statements = Arc::new(Statements::new(&self.schema, &self.table, shape, self.payload_octets_max));
            *known = Some(Known { shape: shape.clone(), statements });
        }
    }

    /// Connections say from now on that they follow these policies, open ones as soon as they are used again.
    pub fn policy_changed(&self, instance: &str, policy_hash: &str) {
        self.db.rename(instance, policy_hash);
    }

    /// Whether retention may delete.
    #[must_use]
    pub fn can_delete(&self) -> bool {
        self.known().is_some_and(|known| known.shape.can_delete)
    }

    /// Whether the table has the status `rejected`; without it such rows are dead.
    pub(crate) fn has_rejected(&self) -> bool {
        self.known().is_some_and(|known| known.shape.rejected_columns)
    }

    /// The text of a statement of the adopted shape, by the name of its file: for tests and benchmarks that look at plans.
    #[doc(hidden)]
    #[must_use]
    pub fn statement(&self, name: &str) -> Option<String> {
        self.known().and_then(|known| known.statements.text(name).map(str::to_owned))
    }

    /// Opens a connection that hears when a command made old rows due again.
    ///
    /// # Errors
    /// As [`Db::dedicated`].
    pub async fn listen(&self) -> Result<Listening, StoreError> {
        let (connection, listener) = self.db.dedicated().await?;
        connection.listen(WAKE_CHANNEL, self.bound).await?;
        connection.listen(RESUME_CHANNEL, self.bound).await?;
        connection.listen(PAUSE_CHANNEL, self.bound).await?;
        Ok(Listening { connection, listener, bound: self.bound })
    }

    /// Opens the connection that holds the advisory locks of the sources this relay serves; closing it frees them.
    ///
    /// # Errors
    /// As [`Db::dedicated`].
    pub async fn locks(&self) -> Result<Locks, StoreError> {
        let (connection, _) = self.db.dedicated().await?;
        let table = qualified(&self.schema, &self.table);
        Ok(Locks { connection, table, bound: self.bound })
    }

    /// The adopted shape.
    pub(crate) fn shape(&self) -> Result<Shape, StoreError> {
        self.known().map(|known| known.shape).ok_or_else(shape_unknown)
    }

    /// The index profile of the adopted shape.
    ///
    /// # Errors
    /// When the table's shape is not known yet.
    pub fn profile(&self) -> Result<Profile, StoreError> {
        self.shape().map(|shape| shape.profile)
    }

    fn known(&self) -> Option<Known> {
        self.known.read().expect("no code panics while it holds this lock").clone()
    }

    /// The statements of the adopted shape.
    fn statements(&self) -> Result<Arc<Statements>, StoreError> {
        self.known().map(|known| known.statements).ok_or_else(shape_unknown)
    }

    async fn query(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, StoreError> {
        self.query_within(self.bound, sql, params).await
    }

    async fn query_within(&self, bound: Duration, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, StoreError> {
        self.db.query(sql, params, bound).await
    }

    fn table_name(&self) -> (&str, &str) {
        (&self.schema, &self.table)
    }
}

fn shape_unknown() -> StoreError {
    StoreError::Protocol("the table's shape is not known yet".to_owned())
}

/// The channel of `keiro-relay resume`; the payload is the source.
pub const RESUME_CHANNEL: &str = "keiro_relay_resume";
/// The channel that says that something was paused or resumed; the payload says nothing.
pub const PAUSE_CHANNEL: &str = "keiro_relay_pause";

/// What a [`Listening`] connection heard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Rows of this source, or of all when it is empty, are new or due again.
    Changed(String),
    /// An operator resumed this source.
    Resumed(String),
    /// Something was paused, or is no more.
    Pauses,
}

/// A connection that listens on [`WAKE_CHANNEL`], [`RESUME_CHANNEL`] and [`PAUSE_CHANNEL`].
#[derive(Debug)]
pub struct Listening {
    connection: Dedicated,
    listener: Listener,
    bound: Duration,
}

impl Listening {
    /// Takes over a policy hash that changed ([`Store::policy_changed`]).
    ///
    /// # Errors
    /// As [`Db::dedicated`].
    pub async fn follow_name(&self) -> Result<(), StoreError> {
        self.connection.follow_name(self.bound).await
    }

    /// The next thing said; `None` when the connection is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Heard> {
        let Notification { channel, payload } = self.listener.next().await?;
        Some(match channel.as_str() {
            RESUME_CHANNEL => Heard::Resumed(payload),
            PAUSE_CHANNEL => Heard::Pauses,
            _ => Heard::Changed(payload),
        })
    }
}

/// A connection that holds advisory locks.
#[derive(Debug)]
pub struct Locks {
    connection: Dedicated,
    table: String,
    bound: Duration,
}

impl Locks {
    /// Tries the locks of these sources and returns those it got. Never waits for another session.
    ///
    /// # Errors
    /// [`StoreError`]; the connection, and every lock with it, may be gone.
    pub async fn try_lock(&self, sources: &[Arc<str>]) -> Result<Vec<String>, StoreError> {
        self.connection.follow_name(self.bound).await?;
        let sources: Vec<&str> = sources.iter().map(|source| &**source).collect();
        let params: [Param<'_>; 2] = [(&sources, Type::TEXT_ARRAY), (&self.table, Type::TEXT)];
        let rows = self.connection.query(include_str!("sql/prefer.sql"), &params, self.bound).await?;
        let mut ours = Vec::new();
        for row in &rows {
            if row.try_get("ours")? {
                ours.push(row.try_get("source")?);
            }
        }
        Ok(ours)
    }

    /// Frees the locks of these sources.
    ///
    /// # Errors
    /// As [`Locks::try_lock`].
    pub async fn unlock(&self, sources: &[Arc<str>]) -> Result<(), StoreError> {
        let sources: Vec<&str> = sources.iter().map(|source| &**source).collect();
        let params: [Param<'_>; 2] = [(&sources, Type::TEXT_ARRAY), (&self.table, Type::TEXT)];
        self.connection.query(include_str!("sql/unprefer.sql"), &params, self.bound).await.map(drop)
    }
}
