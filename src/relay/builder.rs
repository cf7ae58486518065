//! How a program builds a relay of its own: rules, a publisher, and a database or a pool that is there already.
//!
//! Nothing here ever contacts a server, reads a file or the environment, or touches anything global.

use std::sync::Arc;

use super::health::{Board, Identity, Limits};
use super::{Classify, Relay};
use crate::config::{Config, Database, Problems, SettingError, UnlistedSources};
use crate::domain::outcome::Setback;
use crate::domain::policy::SourceRules;
use crate::domain::retry::RetryPolicy;
use crate::publish::{PublishError, Publisher};
use crate::store::{Store, StoreError};
use crate::telemetry::Metrics;

/// Makes a [`Relay`]: see [`Relay::builder`].
#[must_use = "a builder does nothing before it is built"]
pub struct Builder {
    config: Config,
    url: Option<String>,
    pool: Option<deadpool_postgres::Pool>,
    publisher: Arc<dyn Publisher>,
    retry: Option<Arc<dyn RetryPolicy>>,
    classify: Option<Arc<Classify>>,
    board: Option<Board>,
}

/// Why a relay could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// Settings contradict each other or are out of range: every problem.
    #[error(transparent)]
    Settings(#[from] Problems),
    /// The database's URL cannot be used.
    #[error(transparent)]
    Url(#[from] SettingError),
    /// The connection settings cannot be used.
    #[error(transparent)]
    Database(#[from] StoreError),
}

impl Builder {
    pub(super) fn new(publisher: Arc<dyn Publisher>) -> Self {
        Self { config: Config::default(), url: None, pool: None, publisher, retry: None, classify: None, board: None }
    }

    /// Takes everything from a configuration, such as one that [`Config::load`] read. Overwrites what was set before.
    pub fn config(mut self, config: Config) -> Self {
        self.config = config;
        self
    }

    /// Connects to this database, `postgres://USER@HOST/DATABASE`, with connections of its own.
    pub fn database_url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Connects as these settings say.
    pub fn database(mut self, database: Database) -> Self {
        self.config.database = database;
        self
    }

    /// Uses a pool of the caller's, which is never closed. Each statement runs in a transaction with settings of its own, so nothing
    /// of the pool's sessions changes. There is no LISTEN over it: [`Handle::wake`](super::Handle::wake) shortens the wait instead.
    pub fn pool(mut self, pool: deadpool_postgres::Pool) -> Self {
        self.pool = Some(pool);
        self
    }

    /// The outbox table, if it is not `keiro.keiro_outbox`.
    pub fn table(mut self, schema: impl Into<String>, table: impl Into<String>) -> Self {
        self.config.database.schema = schema.into();
        self.config.database.table = table.into();
        self
    }

    /// The name of this relay in `/status` and `application_name`.
    pub fn instance(mut self, instance: impl Into<String>) -> Self {
        self.config.relay.instance = instance.into();
        self
    }

    /// The rules of sources that have none of their own.
    pub fn defaults(mut self, rules: SourceRules) -> Self {
        self.config.defaults = rules;
        self
    }

    /// The rules of one source.
    pub fn source(mut self, name: impl Into<String>, rules: SourceRules) -> Self {
        self.config.sources.insert(name.into(), rules);
        self
    }

    /// Serves only sources that were named with [`Builder::source`].
    pub fn only_named_sources(mut self) -> Self {
        self.config.relay.unlisted_sources = UnlistedSources::Ignore;
        self
    }

    /// Changes any other setting, by the names that the configuration file has.
    pub fn settings(mut self, change: impl FnOnce(&mut Config)) -> Self {
        change(&mut self.config);
        self
    }

    /// Decides itself when a row that spent an attempt is due again, over its source's backoff and `max_attempts`.
    pub fn retry(mut self, policy: impl RetryPolicy) -> Self {
        self.retry = Some(Arc::new(policy));
        self
    }

    /// Says what an error of a whole call means for its rows: whose fault it is. Without a classifier each of them spends an attempt.
    ///
    /// The rows may have been written: that is what an `Err` leaves open, whatever the classifier says.
    pub fn classify(mut self, classify: impl Fn(&PublishError) -> Setback + Send + Sync + 'static) -> Self {
        self.classify = Some(Arc::new(classify));
        self
    }

    /// Reports to this board, for instance one that `http::Server` shows already.
    pub fn board(mut self, board: Board) -> Self {
        self.board = Some(board);
        self
    }

    /// Builds the relay; nothing is contacted and nothing runs yet.
    ///
    /// # Errors
    /// Every setting that is out of range or contradicts another one; or why the database's settings cannot be used.
    pub fn build(self) -> Result<Relay, BuildError> {
        let Self { mut config, url, pool, publisher, retry, classify, board } = self;
        if let Some(url) = url {
            config.database.set_url(&url)?;
        }
        config.check()?;
        let (store, maintenance) = match pool {
            Some(pool) => (Store::over_pool(&config, pool.clone()), Store::over_pool(&config, pool)),
            // The slow timer has a connection of its own.
            None => (Store::new(&config, config.database.pool_size - 1)?, Store::new(&config, 1)?),
        };
        let board = board.unwrap_or_else(|| board_of(&config));
        let mut relay = Relay::build(Arc::new(config), Arc::new(store), Arc::new(maintenance), publisher, board);
        relay.decide(retry, classify);
        Ok(relay)
    }
}

/// A board for a relay of this configuration, over metrics of its own.
fn board_of(config: &Config) -> Board {
    let identity = Identity {
        instance: config.relay.instance.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy_hash: config.policy_hash(),
    };
    Board::new(identity, Limits::of(config), Metrics::new())
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("config", &self.config).finish_non_exhaustive()
    }
}
