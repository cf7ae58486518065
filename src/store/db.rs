//! The way to PostgreSQL: a pool whose every use has a deadline, connections of their own, transactions of operators.
//!
//! Nothing here ever waits without a bound, and a connection whose answer was not awaited to the end is never used
//! again: dropping a future does not stop its statement.

use std::fmt::Write as _;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{self, Metrics, PoolError, RecycleError, RecycleResult};
use deadpool_postgres::ClientWrapper;
use postgres_openssl::MakeTlsConnector;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{AsyncMessage, Row};

use super::connect::{self, Driver};
use super::error::StoreError;
use super::names::quoted;
use crate::config::Database;

/// The channel that wakes relays; the payload is the source whose rows are new or due again.
pub const WAKE_CHANNEL: &str = "keiro_relay_wake";

/// How long a cancel request for an abandoned statement may take.
const CANCEL_MAX: Duration = Duration::from_secs(5);
/// Notifications kept for a listener that is busy. More add nothing: they only say "look".
const NOTIFICATIONS_MAX: usize = 1024;

/// A parameter and its type in the statement. Types are named so that a statement needs no round trip to learn them.
pub type Param<'a> = (&'a (dyn ToSql + Sync), Type);

/// The pool. Cheap to clone; does not connect before it is used.
#[derive(Clone)]
pub struct Db {
    inner: Arc<Inner>,
}

struct Inner {
    pool: Pool,
    plan: Arc<Plan>,
}

enum Pool {
    /// Ours: its sessions have our settings.
    Own { pool: managed::Pool<Connector>, connector: Connector },
    /// The caller's: settings hold within each transaction and leave nothing behind, as they do behind a transaction pooler.
    Callers(deadpool_postgres::Pool),
}

impl Db {
    /// Makes the pool and checks the settings as far as that works without a connection.
    ///
    /// `instance` and `policy_hash` become the `application_name`, by which operators and other relays see us.
    ///
    /// # Errors
    /// [`StoreError::Setting`] when the URL, a file it needs or the TLS settings cannot be used.
    pub fn new(database: &Database, instance: &str, policy_hash: &str) -> Result<Self, StoreError> {
        Self::with_plan(database, instance, policy_hash, Plan::new(database, false))
    }

    /// [`Db::new`] for commands that only look: the server itself refuses every change.
    ///
    /// # Errors
    /// As [`Db::new`].
    pub fn read_only(database: &Database, instance: &str, policy_hash: &str) -> Result<Self, StoreError> {
        Self::with_plan(database, instance, policy_hash, Plan::new(database, true))
    }

    fn with_plan(database: &Database, instance: &str, policy_hash: &str, plan: Plan) -> Result<Self, StoreError> {
        let application_name = connect::application_name(instance, policy_hash);
        connect::resolve(database, &application_name)?;
        let connector = Connector {
            plan: Arc::new(plan),
            database: Arc::new(database.clone()),
            application_name: Arc::new(RwLock::new(Arc::from(application_name))),
        };
        let pool = managed::Pool::builder(connector.clone())
            .max_size(database.pool_size)
            .runtime(Runtime::Tokio1)
            .build()
            .map_err(|error| StoreError::Setting(format!("database.pool_size cannot be used: {error}")))?;
        let plan = Arc::clone(&connector.plan);
        Ok(Self { inner: Arc::new(Inner { pool: Pool::Own { pool, connector }, plan }) })
    }

    /// Uses a pool that belongs to somebody else and is never closed. Its sessions keep their settings and their `application_name`;
    /// there is no LISTEN and no session lock over it ([`Db::has_sessions`] is `false`).
    ///
    /// Of the settings only `statement_timeout` and `synchronous_commit` are used.
    #[must_use]
    pub fn over(pool: deadpool_postgres::Pool, database: &Database) -> Self {
        let database = Database { prepared_statements: false, ..database.clone() };
        Self { inner: Arc::new(Inner { pool: Pool::Callers(pool), plan: Arc::new(Plan::new(&database, false)) }) }
    }

    /// Runs a statement and returns its rows. The bound also covers the wait for a connection and making one.
    ///
    /// # Errors
    /// [`StoreError`]; after a timeout it is not known whether the statement took effect.
    pub async fn query(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<Vec<Row>, StoreError> {
        self.query_timed(sql, params, bound).await.map(|(rows, _)| rows)
    }

    /// [`Db::query`], and when there was a connection for it: before that it was not sent, and from then on it took what it costs.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn query_timed(
        &self,
        sql: &str,
        params: &[Param<'_>],
        bound: Duration,
    ) -> Result<(Vec<Row>, Instant), StoreError> {
        let deadline = Instant::now() + bound;
        let mut lease = self.lease(deadline, bound).await?;
        let started = Instant::now();
        let plan = &self.inner.plan;
        let answer = timeout_at(deadline, plan.query(lease.client()?, sql, params, bound));
        let rows = lease.finish(answer.await, bound)?;
        Ok((rows, started))
    }

    /// Runs a statement that returns at most one row.
    ///
    /// # Errors
    /// As [`Db::query`]; more than one row is [`StoreError::Protocol`].
    pub async fn query_opt(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<Option<Row>, StoreError> {
        at_most_one(self.query(sql, params, bound).await?)
    }

    /// Runs a statement and returns how many rows it changed.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn execute(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<u64, StoreError> {
        let deadline = Instant::now() + bound;
        let mut lease = self.lease(deadline, bound).await?;
        let answer = timeout_at(deadline, self.inner.plan.execute(lease.client()?, sql, params, bound));
        lease.finish(answer.await, bound)
    }

    /// Begins a transaction that commits synchronously whatever the configuration says: for commands of people.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn begin(&self, bound: Duration) -> Result<Tx, StoreError> {
        let deadline = Instant::now() + bound;
        let mut lease = self.lease(deadline, bound).await?;
        let begin = format!("{}; set local synchronous_commit = on", self.inner.plan.begin);
        let answer = timeout_at(deadline, lease.client()?.batch_execute(&begin));
        lease.check(answer.await, bound)?;
        Ok(Tx { lease, named_statements: self.inner.plan.named_statements })
    }

    /// Begins a transaction that can change nothing and whose statements the server itself ends after `bound`: for commands that only look.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn begin_read_only(&self, bound: Duration) -> Result<Tx, StoreError> {
        let deadline = Instant::now() + bound;
        let mut lease = self.lease(deadline, bound).await?;
        let plan = &self.inner.plan;
        let begin = format!(
            "{}; set transaction read only; set local statement_timeout = '{}'",
            plan.begin,
            milliseconds(bound)
        );
        let answer = timeout_at(deadline, lease.client()?.batch_execute(&begin));
        lease.check(answer.await, bound)?;
        Ok(Tx { lease, named_statements: plan.named_statements })
    }

    /// Opens a connection outside the pool: for LISTEN, advisory locks and maintenance.
    ///
    /// Behind a transaction pooler (`prepared_statements = false`) it has no session state to rely on: see
    /// [`Db::has_sessions`].
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn dedicated(&self) -> Result<(Dedicated, Listener), StoreError> {
        let (sender, receiver) = mpsc::channel(NOTIFICATIONS_MAX);
        let Pool::Own { connector, .. } = &self.inner.pool else {
            return Err(StoreError::Setting("the caller's pool has no connections outside of it".to_owned()));
        };
        let connection = connector.connect(Some(sender)).await?;
        let plan = Arc::clone(&self.inner.plan);
        let shared = Arc::clone(&connector.application_name);
        let name = Mutex::new(Arc::clone(&connection.name));
        let dedicated = Dedicated { connection: Some(connection), plan, spoiled: AtomicBool::new(false), shared, name };
        Ok((dedicated, Listener { receiver }))
    }

    /// Changes the `application_name`: idle connections are closed, busy ones when they come back, others are renamed by
    /// [`Dedicated::follow_name`].
    pub fn rename(&self, instance: &str, policy_hash: &str) {
        let name: Arc<str> = Arc::from(connect::application_name(instance, policy_hash));
        if let Pool::Own { pool, connector } = &self.inner.pool {
            *connector.application_name.write().expect("no code panics while it holds this lock") = Arc::clone(&name);
            let _ = pool.retain(|connected, _| connected.name == name);
        }
    }

    /// Whether a session's state outlives a transaction: LISTEN and advisory locks work only then.
    #[must_use]
    pub fn has_sessions(&self) -> bool {
        self.inner.plan.named_statements
    }

    async fn lease(&self, deadline: Instant, bound: Duration) -> Result<Lease, StoreError> {
        let waiting_for = "a connection (all of database.pool_size are busy, or a new one is still being made)";
        // Boxed: every future of a command contains this one with all it waits for, and the compiler follows such a type only so deep.
        let unusable = |error: &dyn std::fmt::Display| StoreError::Protocol(format!("the pool does not work: {error}"));
        let leased = match &self.inner.pool {
            Pool::Own { pool, .. } => match timeout_at(deadline, Box::pin(pool.get())).await {
                Ok(Ok(object)) => Leased::Own(object),
                Ok(Err(PoolError::Backend(error))) => return Err(error),
                Ok(Err(PoolError::Timeout(_))) | Err(_) => return Err(StoreError::Timeout { waiting_for, bound }),
                Ok(Err(error @ (PoolError::Closed | PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_)))) => {
                    return Err(unusable(&error));
                }
            },
            Pool::Callers(pool) => match timeout_at(deadline, Box::pin(pool.get())).await {
                Ok(Ok(object)) => Leased::Callers(object),
                Ok(Err(PoolError::Backend(error))) => {
                    return Err(StoreError::connecting(&error, "the caller's pool"));
                }
                Ok(Err(PoolError::Timeout(_))) | Err(_) => return Err(StoreError::Timeout { waiting_for, bound }),
                Ok(Err(error @ (PoolError::Closed | PoolError::NoRuntimeSpecified | PoolError::PostCreateHook(_)))) => {
                    return Err(unusable(&error));
                }
            },
        };
        Ok(Lease { leased: Some(leased) })
    }
}

impl std::fmt::Debug for Db {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match &self.inner.pool {
            Pool::Own { connector, .. } => name_of(&connector.application_name),
            Pool::Callers(_) => Arc::from("the caller's"),
        };
        f.debug_struct("Db").field("application_name", &name).finish_non_exhaustive()
    }
}

/// A transaction of an operator's command: synchronous commit, read committed. Dropped without commit it is rolled back.
pub struct Tx {
    lease: Lease,
    named_statements: bool,
}

impl Tx {
    /// Runs a statement and returns its rows.
    ///
    /// # Errors
    /// [`StoreError`]; the transaction is then only good for being dropped.
    pub async fn query(&mut self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<Vec<Row>, StoreError> {
        let client = self.lease.client()?;
        let answer = if self.named_statements {
            timeout(bound, query_named(client, sql, params)).await
        } else {
            timeout(bound, client.query_typed(sql, params)).await
        };
        self.lease.check(answer, bound)
    }

    /// Runs a statement that returns at most one row.
    ///
    /// # Errors
    /// As [`Tx::query`].
    pub async fn query_opt(
        &mut self,
        sql: &str,
        params: &[Param<'_>],
        bound: Duration,
    ) -> Result<Option<Row>, StoreError> {
        at_most_one(self.query(sql, params, bound).await?)
    }

    /// Runs a statement and returns how many rows it changed.
    ///
    /// # Errors
    /// As [`Tx::query`].
    pub async fn execute(&mut self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<u64, StoreError> {
        let client = self.lease.client()?;
        let answer = if self.named_statements {
            timeout(bound, execute_named(client, sql, params)).await
        } else {
            timeout(bound, client.execute_typed(sql, params)).await
        };
        self.lease.check(answer, bound)
    }

    /// Runs statements without parameters.
    ///
    /// # Errors
    /// As [`Tx::query`].
    pub async fn batch(&mut self, sql: &str, bound: Duration) -> Result<(), StoreError> {
        let answer = timeout(bound, self.lease.client()?.batch_execute(sql)).await;
        self.lease.check(answer, bound)
    }

    /// Lets the producers' half work on this transaction's connection. When the bound is over the connection is discarded, and with it
    /// the transaction.
    ///
    /// # Errors
    /// [`StoreError`] of the connection; what the work says is its own.
    pub(super) async fn with_client<T>(
        &mut self,
        bound: Duration,
        work: impl AsyncFnOnce(&tokio_postgres::Client) -> T,
    ) -> Result<T, StoreError> {
        let client = self.lease.client()?;
        let answer = timeout(bound, work(client)).await;
        self.lease.check(answer.map(Ok), bound)
    }

    /// Commits; returns once the commit is on disk.
    ///
    /// # Errors
    /// As [`Tx::query`]; after a timeout or a lost connection it is not known whether the transaction took effect.
    pub async fn commit(mut self, bound: Duration) -> Result<(), StoreError> {
        let answer = timeout(bound, self.lease.client()?.batch_execute("commit")).await;
        self.lease.finish(answer, bound)
    }
}

impl std::fmt::Debug for Tx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tx").finish_non_exhaustive()
    }
}

/// A connection outside the pool. After a timeout or a call that was dropped half-way it counts as closed: drop it and
/// ask for another.
pub struct Dedicated {
    /// Always there until it is dropped.
    connection: Option<Connected>,
    plan: Arc<Plan>,
    spoiled: AtomicBool,
    /// The `application_name` it should have, and the one it has.
    shared: SharedName,
    name: Mutex<Arc<str>>,
}

impl Dedicated {
    /// Runs a statement and returns its rows.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn query(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<Vec<Row>, StoreError> {
        let (call, client) = self.call()?;
        let answer = timeout(bound, self.plan.query(client, sql, params, bound)).await;
        call.finish(answer, bound)
    }

    /// Runs a statement that returns at most one row.
    ///
    /// # Errors
    /// As [`Db::query_opt`].
    pub async fn query_opt(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<Option<Row>, StoreError> {
        at_most_one(self.query(sql, params, bound).await?)
    }

    /// Runs a statement and returns how many rows it changed.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn execute(&self, sql: &str, params: &[Param<'_>], bound: Duration) -> Result<u64, StoreError> {
        let (call, client) = self.call()?;
        let answer = timeout(bound, self.plan.execute(client, sql, params, bound)).await;
        call.finish(answer, bound)
    }

    /// Runs statements without parameters, outside any transaction of ours: `listen`, `set`, DDL.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn batch(&self, sql: &str, bound: Duration) -> Result<(), StoreError> {
        let (call, client) = self.call()?;
        let answer = timeout(bound, client.batch_execute(sql)).await;
        call.finish(answer, bound)
    }

    /// Starts to receive the notifications of a channel.
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn listen(&self, channel: &str, bound: Duration) -> Result<(), StoreError> {
        self.batch(&format!("listen {}", quoted(channel)), bound).await
    }

    /// Renames the session when the pool was renamed ([`Db::rename`]).
    ///
    /// # Errors
    /// As [`Db::query`].
    pub async fn follow_name(&self, bound: Duration) -> Result<(), StoreError> {
        let wanted = name_of(&self.shared);
        if *self.named() != wanted {
            self.query("select set_config('application_name', $1, false)", &[(&&*wanted, Type::TEXT)], bound).await?;
            *self.named() = wanted;
        }
        Ok(())
    }

    fn named(&self) -> std::sync::MutexGuard<'_, Arc<str>> {
        self.name.lock().expect("no code panics while it holds this lock")
    }

    /// Whether the connection is of no more use.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.spoiled.load(Ordering::Relaxed) || self.connection.as_ref().is_none_or(|open| open.client.is_closed())
    }

    /// The driver's client, for crates that need one.
    pub(super) fn client_mut(&mut self) -> Result<&mut tokio_postgres::Client, StoreError> {
        self.connection.as_mut().map(|open| &mut *open.client).ok_or_else(closed_before)
    }

    fn call(&self) -> Result<(Call<'_>, &ClientWrapper), StoreError> {
        match &self.connection {
            Some(open) if !self.is_closed() => Ok((Call { of: self, done: false }, &open.client)),
            Some(_) | None => Err(closed_before()),
        }
    }
}

fn closed_before() -> StoreError {
    StoreError::Closed("closed before the call".to_owned())
}

impl std::fmt::Debug for Dedicated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Dedicated").field("closed", &self.is_closed()).finish_non_exhaustive()
    }
}

impl Drop for Dedicated {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take().filter(|_| *self.spoiled.get_mut()) {
            connection.abandon();
        }
    }
}

/// One call on a dedicated connection; spoils it when it does not get to its end.
struct Call<'a> {
    of: &'a Dedicated,
    done: bool,
}

impl Call<'_> {
    fn finish<T>(mut self, answer: Answer<T>, bound: Duration) -> Result<T, StoreError> {
        let outcome = outcome(answer, bound);
        self.done = !matches!(&outcome, Err(error) if error.spoils_connection());
        outcome
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.of.spoiled.store(true, Ordering::Relaxed);
        }
    }
}

/// Receives what a [`Dedicated`] connection listens to.
#[derive(Debug)]
pub struct Listener {
    receiver: mpsc::Receiver<Notification>,
}

impl Listener {
    /// Waits for the next notification; `None` when the connection is gone. Cancel-safe.
    pub async fn next(&mut self) -> Option<Notification> {
        self.receiver.recv().await
    }
}

/// One NOTIFY.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notification {
    /// Its channel.
    pub channel: String,
    /// Its payload, possibly empty.
    pub payload: String,
}

/// What awaiting a statement within a bound gave.
type Answer<T> = Result<Result<T, tokio_postgres::Error>, tokio::time::error::Elapsed>;

fn outcome<T>(answer: Answer<T>, bound: Duration) -> Result<T, StoreError> {
    match answer {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(StoreError::Timeout { waiting_for: "a statement", bound }),
    }
}

fn at_most_one(mut rows: Vec<Row>) -> Result<Option<Row>, StoreError> {
    if rows.len() > 1 {
        return Err(StoreError::Protocol(format!("a statement returned {} rows instead of one", rows.len())));
    }
    Ok(rows.pop())
}

/// A pooled connection while one caller uses it. Goes back to the pool only after a complete answer.
struct Lease {
    leased: Option<Leased>,
}

enum Leased {
    Own(managed::Object<Connector>),
    Callers(deadpool_postgres::Object),
}

impl Lease {
    fn client(&self) -> Result<&ClientWrapper, StoreError> {
        match &self.leased {
            Some(Leased::Own(object)) => Ok(&object.client),
            Some(Leased::Callers(object)) => Ok(object),
            None => Err(StoreError::Closed("closed by an earlier error of this transaction".to_owned())),
        }
    }

    /// Judges an answer; the lease can be used again unless the connection is spoiled.
    fn check<T>(&mut self, answer: Answer<T>, bound: Duration) -> Result<T, StoreError> {
        let outcome = outcome(answer, bound);
        if matches!(&outcome, Err(error) if error.spoils_connection()) {
            self.discard();
        }
        outcome
    }

    /// Judges the last answer and gives the connection back.
    fn finish<T>(&mut self, answer: Answer<T>, bound: Duration) -> Result<T, StoreError> {
        let outcome = self.check(answer, bound);
        drop(self.leased.take());
        outcome
    }

    fn discard(&mut self) {
        match self.leased.take() {
            Some(Leased::Own(object)) => managed::Object::take(object).abandon(),
            // How to ask the server to stop what runs on it only the caller's pool knows; `statement_timeout` ends it.
            Some(Leased::Callers(object)) => drop(deadpool_postgres::Object::take(object)),
            None => {}
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Still here: the caller gave up half-way, or a transaction was not committed.
        self.discard();
    }
}

/// An open connection with its driver task, which ends with it.
struct Connected {
    client: ClientWrapper,
    tls: MakeTlsConnector,
    may_cancel: bool,
    /// The `application_name` it was opened with.
    name: Arc<str>,
}

impl Connected {
    /// Asks the server to stop what runs on this connection, then closes it. Closing alone would not stop it: the server
    /// notices only when it wants to answer, and until then the statement holds its locks.
    ///
    /// A pooler is never asked: PgBouncer 1.18 ends with "bad client state" when it is, and takes everybody's connections
    /// with it. There each transaction limits its statement's time to the caller's bound instead.
    fn abandon(self) {
        if !self.may_cancel {
            return;
        }
        let (token, tls) = (self.client.cancel_token(), self.tls.clone());
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                // A request that fails changes nothing: statement_timeout ends the statement.
                let _ = timeout(CANCEL_MAX, token.cancel_query(tls)).await;
                drop(self);
            });
        }
    }
}

/// How connections are made; the pool's manager.
#[derive(Clone)]
struct Connector {
    database: Arc<Database>,
    plan: Arc<Plan>,
    application_name: SharedName,
}

/// `application_name`, which may change while connections are open.
type SharedName = Arc<RwLock<Arc<str>>>;

fn name_of(shared: &SharedName) -> Arc<str> {
    Arc::clone(&shared.read().expect("no code panics while it holds this lock"))
}

impl Connector {
    async fn connect(&self, notifications: Option<mpsc::Sender<Notification>>) -> Result<Connected, StoreError> {
        let bound = self.database.connect_timeout;
        let name = name_of(&self.application_name);
        let (client, connection, tls) = connect::open(&self.database, &name).await?;
        let driver = tokio::spawn(drive(connection, notifications));
        let connected =
            Connected { client: ClientWrapper::new(client, driver), tls, may_cancel: self.plan.named_statements, name };
        if let Some(set) = &self.plan.set {
            outcome(timeout(bound, connected.client.batch_execute(set)).await, bound)?;
        }
        Ok(connected)
    }
}

impl managed::Manager for Connector {
    type Type = Connected;
    type Error = StoreError;

    async fn create(&self) -> Result<Connected, StoreError> {
        self.connect(None).await
    }

    async fn recycle(&self, connected: &mut Connected, _: &Metrics) -> RecycleResult<StoreError> {
        if connected.client.is_closed() {
            return Err(RecycleError::message("closed"));
        }
        if connected.name != name_of(&self.application_name) {
            return Err(RecycleError::message("it says that we follow other policies"));
        }
        Ok(())
    }
}

/// Does a connection's IO until it ends, and passes on its notifications.
async fn drive(mut connection: Driver, notifications: Option<mpsc::Sender<Notification>>) {
    loop {
        match poll_fn(|context| connection.poll_message(context)).await {
            Some(Ok(AsyncMessage::Notification(notification))) => {
                let notification = Notification {
                    channel: notification.channel().to_owned(),
                    payload: notification.payload().to_owned(),
                };
                // A full queue already says "look".
                let _ = notifications.as_ref().map(|sender| sender.try_send(notification));
            }
            // Notices, and what later versions of the driver may tell.
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                // Whoever uses the connection gets the error; this is for the log of someone who looks closely.
                tracing::debug!(error = %StoreError::from(error), "a database connection ended");
                return;
            }
            None => return,
        }
    }
}

/// How statements run: with named statements and session settings, or behind a transaction pooler without either.
struct Plan {
    named_statements: bool,
    /// Sent once a connection is open. Not as startup options: poolers refuse those.
    set: Option<String>,
    /// Begins a transaction in which the settings hold.
    begin: String,
    statement_timeout: Duration,
}

impl Plan {
    fn new(database: &Database, read_only: bool) -> Self {
        let mut settings = settings(database);
        if read_only {
            // Behind a pooler these are set within the transaction, where the default would come too late.
            let name =
                if database.prepared_statements { "default_transaction_read_only" } else { "transaction_read_only" };
            settings.push((name, "on".to_owned()));
        }
        let begin = "begin isolation level read committed".to_owned();
        let statement_timeout = database.statement_timeout;
        if database.prepared_statements {
            let own = settings.into_iter().chain(KEEPALIVES.map(|(name, value)| (name, value.to_owned())));
            let set = statements("set", &own.collect::<Vec<_>>());
            return Self { named_statements: true, set: Some(set), begin, statement_timeout };
        }
        let begin = format!("{begin}; {}", statements("set local", &settings));
        Self { named_statements: false, set: None, begin, statement_timeout }
    }

    /// Begins a transaction whose statement the server itself ends when nobody waits for it any more.
    fn begin_within(&self, bound: Duration) -> String {
        if bound >= self.statement_timeout {
            return self.begin.clone();
        }
        format!("{}; set local statement_timeout = '{}'", self.begin, milliseconds(bound))
    }

    async fn query(
        &self,
        client: &ClientWrapper,
        sql: &str,
        params: &[Param<'_>],
        bound: Duration,
    ) -> Result<Vec<Row>, tokio_postgres::Error> {
        if self.named_statements {
            return query_named(client, sql, params).await;
        }
        // The three go out together and cost one round trip.
        let begin = self.begin_within(bound);
        let (begun, rows, ended) = futures_util::future::join3(
            client.batch_execute(&begin),
            client.query_typed(sql, params),
            client.batch_execute("commit"),
        )
        .await;
        begun?;
        let rows = rows?;
        ended?;
        Ok(rows)
    }

    async fn execute(
        &self,
        client: &ClientWrapper,
        sql: &str,
        params: &[Param<'_>],
        bound: Duration,
    ) -> Result<u64, tokio_postgres::Error> {
        if self.named_statements {
            return execute_named(client, sql, params).await;
        }
        let begin = self.begin_within(bound);
        let (begun, count, ended) = futures_util::future::join3(
            client.batch_execute(&begin),
            client.execute_typed(sql, params),
            client.batch_execute("commit"),
        )
        .await;
        begun?;
        let count = count?;
        ended?;
        Ok(count)
    }
}

async fn query_named(
    client: &ClientWrapper,
    sql: &str,
    params: &[Param<'_>],
) -> Result<Vec<Row>, tokio_postgres::Error> {
    let (values, types) = split(params);
    let statement = client.prepare_typed_cached(sql, &types).await?;
    client.query(&statement, &values).await
}

async fn execute_named(client: &ClientWrapper, sql: &str, params: &[Param<'_>]) -> Result<u64, tokio_postgres::Error> {
    let (values, types) = split(params);
    let statement = client.prepare_typed_cached(sql, &types).await?;
    client.execute(&statement, &values).await
}

fn split<'a>(params: &[Param<'a>]) -> (Vec<&'a (dyn ToSql + Sync)>, Vec<Type>) {
    params.iter().map(|(value, kind)| (*value, kind.clone())).unzip()
}

/// When the server notices that we are gone without a word: the session of a host that vanished holds its advisory locks, and with
/// them the preference for its sources, and by the system's defaults that takes two hours. Not behind a pooler, whose connection it is.
const KEEPALIVES: [(&str, &str); 3] =
    [("tcp_keepalives_idle", "30"), ("tcp_keepalives_interval", "10"), ("tcp_keepalives_count", "3")];

/// The settings under which every statement of ours runs.
fn settings(database: &Database) -> Vec<(&'static str, String)> {
    vec![
        // Statistics taken while the table was empty must not choose the plan (design §2).
        ("plan_cache_mode", "force_generic_plan".to_owned()),
        ("enable_seqscan", "off".to_owned()),
        ("enable_bitmapscan", "off".to_owned()),
        ("enable_sort", "off".to_owned()),
        ("jit", "off".to_owned()),
        ("default_transaction_isolation", "read committed".to_owned()),
        ("statement_timeout", milliseconds(database.statement_timeout)),
        // Half of the statement's time, so that the error says what it waited for.
        ("lock_timeout", milliseconds(database.statement_timeout / 2)),
        ("idle_in_transaction_session_timeout", milliseconds(database.statement_timeout)),
        ("synchronous_commit", if database.synchronous_commit { "on" } else { "off" }.to_owned()),
        ("timezone", "UTC".to_owned()),
    ]
}

fn milliseconds(duration: Duration) -> String {
    // Zero would mean no limit.
    format!("{}ms", duration.as_millis().max(1))
}

fn statements(verb: &str, settings: &[(&'static str, String)]) -> String {
    settings.iter().fold(String::new(), |mut text, (name, value)| {
        let separator = if text.is_empty() { "" } else { "; " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{verb} {name} = '{value}'");
        text
    })
}
