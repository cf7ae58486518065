//! The configuration: TOML and environment in, [`Config`] or every problem at once out. The only reader of TOML.
//!
//! Nothing here ever contacts a server, and nothing here ever prints a secret.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::policy::SourceRules;

/// Everything the daemon runs by, validated: every relation between settings holds.
#[derive(Debug, Clone)]
pub struct Config {
    pub database: Database,
    pub kafka: Kafka,
    pub relay: Relay,
    /// Rules of sources that have no section of their own.
    pub defaults: SourceRules,
    /// Rules by exact source name.
    pub sources: BTreeMap<String, SourceRules>,
    pub maintenance: Maintenance,
    pub http: Http,
    pub log: Log,
}

impl Config {
    /// The rules of a source, or `None` when it is not ours (`unlisted_sources = "ignore"`).
    #[must_use]
    pub fn rules(&self, source_name: &str) -> Option<&SourceRules> {
        self.sources.get(source_name).or(match self.relay.unlisted_sources {
            UnlistedSources::Default => Some(&self.defaults),
            UnlistedSources::Ignore => None,
        })
    }
}

/// `[database]`
#[derive(Debug, Clone)]
pub struct Database {
    /// Connection URL without a password when `password_file` or the environment supplies it.
    pub url: Secret,
    /// Read at each connect when set; wins over `url`.
    pub url_file: Option<PathBuf>,
    /// Read at each connect when set; wins over a password in the URL.
    pub password_file: Option<PathBuf>,
    pub schema: String,
    pub table: String,
    pub pool_size: usize,
    pub connect_timeout: Duration,
    pub statement_timeout: Duration,
    /// `false` behind a transaction pooler: no named statements, session settings inside each transaction.
    pub prepared_statements: bool,
    /// `synchronous_commit` of the relay's own statements; operator commands always commit synchronously.
    pub synchronous_commit: bool,
    pub tls: Tls,
}

/// `[database.tls]`
#[derive(Debug, Clone)]
pub struct Tls {
    pub mode: TlsMode,
    pub ca_file: Option<PathBuf>,
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
}

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsMode {
    Disable,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// `[kafka]`
#[derive(Debug, Clone)]
pub struct Kafka {
    pub brokers: Vec<String>,
    /// The client's message.max.bytes: above any topic's limit, so that the broker judges size.
    pub message_bytes_max: usize,
    /// Raw librdkafka properties, already checked against the refused ones.
    pub properties: BTreeMap<String, Secret>,
    /// The same names, values read from files at each client build.
    pub property_files: BTreeMap<String, PathBuf>,
}

/// `[relay]`
#[derive(Debug, Clone)]
pub struct Relay {
    pub instance: String,
    pub batch_rows_max: usize,
    pub batch_bytes_max: usize,
    pub in_flight_rows_max: usize,
    pub in_flight_bytes_max: usize,
    pub poll_interval_min: Duration,
    pub poll_interval_max: Duration,
    pub publish_timeout: Duration,
    pub settle_timeout: Duration,
    /// How long a row may stay in `publishing` before anyone may requeue it: the lease.
    pub publishing_timeout: Duration,
    pub shutdown_grace: Duration,
    pub unlisted_sources: UnlistedSources,
}

/// What to do with sources that have no section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnlistedSources {
    /// Serve them by `[defaults]`.
    Default,
    /// Leave them to somebody else.
    Ignore,
}

/// `[maintenance]`
#[derive(Debug, Clone)]
pub struct Maintenance {
    pub interval: Duration,
    /// `None` is "off": sent rows are kept.
    pub retention: Option<Duration>,
}

/// `[http]`
#[derive(Debug, Clone)]
pub struct Http {
    pub listen: SocketAddr,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct Log {
    pub format: LogFormat,
    /// A `tracing` filter, such as `info` or `keiro_relay=debug`.
    pub level: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Json,
    Text,
}

/// A value that is never printed: `Debug` and `Display` show `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a value.
    #[must_use]
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself, for the one place that needs it.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}
pub const LEASE_MARGIN: Duration = Duration::from_secs(5);
impl Config {
    pub fn policy_hash(&self) -> String {
        String::new()
    }
}
