//! The configuration: TOML and environment in, [`Config`] or every problem at once out. The only reader of TOML.
//!
//! Nothing here ever contacts a server, and nothing here ever prints a secret.
//!
//! - A flag wins over an environment variable, that over the file, that over the default.
//! - A variable is `KEIRO_RELAY__SECTION__KEY`, in any case after the prefix: `KEIRO_RELAY__DATABASE__TLS__MODE`. Its text is
//!   parsed as the key's type; a list is separated by commas; an empty variable is a problem, not a default.
//! - A source's name is matched exactly, in a variable too: `KEIRO_RELAY__SOURCES__billing__POLICY` is the source `billing`. A
//!   name that no shell lets into a variable's name is reached with `KEIRO_RELAY__SOURCES='{ "Orders EU" = { policy = "…" } }'`;
//!   a variable for one key wins over that.
//! - A property of librdkafka is `KEIRO_RELAY__KAFKA__PROPERTIES__SASL_PASSWORD` or `…__sasl.password`: an underscore
//!   is a dot. `KEIRO_RELAY__KAFKA__PROPERTIES='{ "sasl.password" = "…" }'` works too.
//! - Durations and sizes have a unit ("2s", "8MiB"); what can be switched off is "off"; a number is a number.

mod changes;
mod database;
mod kafka;
mod layers;
mod load;
mod print;
mod problems;
mod read;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::domain::backoff::{Backoff, BackoffKind};
use crate::domain::limits::Limits;
use crate::domain::policy::{OnHalt, Policy, SourceRules};

pub use changes::{Change, When};
pub use database::Connection;
pub use load::{ConfigFile, DEFAULT_FILES, Loaded, Overrides, environment};
pub(crate) use problems::nearest;
pub use problems::{Origin, Problem, Problems, SettingError, Warning};
pub(crate) use read::duration_of;

/// What a lease keeps in reserve beside the publish and settle timeouts: for clocks that run apart, a scheduler that pauses us,
/// and the way of a statement to the database and back.
///
/// `publish_timeout + settle_timeout + LEASE_MARGIN < publishing_timeout / 3` always holds, so a lease needs no renewal.
pub const LEASE_MARGIN: Duration = Duration::from_secs(5);

/// Everything the daemon runs by, validated: every relation between settings holds.
#[derive(Debug, Clone)]
pub struct Config {
    /// `[database]`
    pub database: Database,
    /// `[kafka]`
    pub kafka: Kafka,
    /// `[relay]`
    pub relay: Relay,
    /// Rules of sources that have no section of their own.
    pub defaults: SourceRules,
    /// Rules by exact source name.
    pub sources: BTreeMap<String, SourceRules>,
    /// `[limits]`
    pub limits: Limits,
    /// `[maintenance]`
    pub maintenance: Maintenance,
    /// `[http]`
    pub http: Http,
    /// `[log]`
    pub log: Log,
}

impl Config {
    /// Loads the configuration: `path`, or else the first of [`DEFAULT_FILES`] that exists, under the environment and the flags.
    pub fn load(
        path: Option<&std::path::Path>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: Overrides,
    ) -> Result<Loaded, Problems> {
        match path {
            Some(path) => Loaded::from(ConfigFile::Named(path), environment, flags),
            None => Loaded::from(ConfigFile::FirstOf(&DEFAULT_FILES), environment, flags),
        }
    }

    /// A hash of all that decides in which order and how often rows are sent: 8 hex digits, the same in every process and version.
    ///
    /// Two relays on one table that differ in it disagree about the policies. A section that says what `[defaults]` says anyway
    /// changes nothing.
    #[must_use]
    pub fn policy_hash(&self) -> String {
        let mut hash = Fnv1a::new();
        hash.rules("", &self.defaults);
        for (source_name, rules) in self.sources.iter().filter(|(_, rules)| **rules != self.defaults) {
            hash.rules(source_name, rules);
        }
        format!("{:08x}", hash.0)
    }

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
    /// Connection URL without `sslmode`, which is in `tls`; empty when there is a `url_file`. See [`Database::connect_config`].
    pub url: Secret,
    /// Read at each connect when set; wins over `url`.
    pub url_file: Option<PathBuf>,
    /// Wins over a password in the URL.
    pub password: Option<Secret>,
    /// Read at each connect when set; wins over a password in the URL. Never set together with `password`.
    pub password_file: Option<PathBuf>,
    /// Schema of the outbox table; an SQL identifier.
    pub schema: String,
    /// Name of the outbox table; an SQL identifier.
    pub table: String,
    /// Connections at most; one of them is the slow timer's.
    pub pool_size: usize,
    /// Longest wait for a connection.
    pub connect_timeout: Duration,
    /// Longest time the server spends on a statement of ours.
    pub statement_timeout: Duration,
    /// `false` behind a transaction pooler: no named statements, session settings inside each transaction.
    pub prepared_statements: bool,
    /// `synchronous_commit` of the relay's own statements; operator commands always commit synchronously.
    pub synchronous_commit: bool,
    /// `[database.tls]`
    pub tls: Tls,
}

/// `[database.tls]`
#[derive(Debug, Clone)]
pub struct Tls {
    /// How much TLS is asked for.
    pub mode: TlsMode,
    /// PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file of our certificate.
    pub cert_file: Option<PathBuf>,
    /// PEM file of its key.
    pub key_file: Option<PathBuf>,
}

/// libpq's `sslmode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsMode {
    /// No TLS.
    Disable,
    /// TLS when the server has it, unverified.
    Prefer,
    /// TLS, unverified unless `ca_file` is set.
    Require,
    /// TLS with a trusted certificate, whatever its name.
    VerifyCa,
    /// TLS with a trusted certificate for the host.
    VerifyFull,
}

impl TlsMode {
    /// Every mode, the weakest first.
    pub const ALL: [Self; 5] = [Self::Disable, Self::Prefer, Self::Require, Self::VerifyCa, Self::VerifyFull];

    /// The name used in configuration, which is libpq's.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disable => "disable",
            Self::Prefer => "prefer",
            Self::Require => "require",
            Self::VerifyCa => "verify-ca",
            Self::VerifyFull => "verify-full",
        }
    }
}

/// `[kafka]`
#[derive(Debug, Clone)]
pub struct Kafka {
    /// `host:port` of the brokers to ask first.
    pub brokers: Vec<String>,
    /// The client's message.max.bytes: above any topic's limit, so that the broker judges size.
    pub message_bytes_max: usize,
    /// After how long a topic's fault spends its rows' attempts; `None` is "off": they wait for the topic, however long.
    pub topic_fault_dead_after: Option<Duration>,
    /// Raw librdkafka properties, already checked against the refused ones.
    pub properties: BTreeMap<String, Secret>,
    /// The same names, values read from files at each client build.
    pub property_files: BTreeMap<String, PathBuf>,
}

/// `[relay]`
#[derive(Debug, Clone)]
pub struct Relay {
    /// Name of this relay in log, `/status` and `application_name`; 1 to 128 printable bytes.
    pub instance: String,
    /// Rows one claim takes at most.
    pub batch_rows_max: usize,
    /// Payload bytes one claim takes at most; its first row always fits.
    pub batch_bytes_max: usize,
    /// Rows claimed and not settled, over all sources.
    pub in_flight_rows_max: usize,
    /// Their payload bytes.
    pub in_flight_bytes_max: usize,
    /// Pause between two looks while a source was busy a moment ago.
    pub poll_interval_min: Duration,
    /// Longest pause between two looks at an idle source.
    pub poll_interval_max: Duration,
    /// Time from asking for a claim until every row of it has its outcome.
    pub publish_timeout: Duration,
    /// Time kept for writing verdicts, also at a stop.
    pub settle_timeout: Duration,
    /// How long a row may stay in `publishing` before anyone may requeue it: the lease.
    pub publishing_timeout: Duration,
    /// Time from the stop signal until the process ends.
    pub shutdown_grace: Duration,
    /// What to do with sources that have no section.
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

impl UnlistedSources {
    /// The name used in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Ignore => "ignore",
        }
    }
}

/// `[maintenance]`
#[derive(Debug, Clone)]
pub struct Maintenance {
    /// Pause between two ticks of the slow timer.
    pub interval: Duration,
    /// `None` is "off": sent rows are kept.
    pub retention: Option<Duration>,
}

/// `[http]`
#[derive(Debug, Clone)]
pub struct Http {
    /// Address of `/metrics`, `/livez`, `/readyz` and `/status`.
    pub listen: SocketAddr,
}

/// `[log]`
#[derive(Debug, Clone)]
pub struct Log {
    /// How lines look.
    pub format: LogFormat,
    /// A `tracing` filter, such as `info` or `keiro_relay=debug`.
    pub level: String,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

impl LogFormat {
    /// The name used in configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Json => "json",
            Self::Text => "text",
        }
    }
}

/// A value that is never printed: `Debug` and `Display` show `***`.
#[derive(Clone, Default, PartialEq, Eq)]
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

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The defaults of the product; the database's URL and the brokers have none.
impl Default for Config {
    fn default() -> Self {
        Self {
            database: Database::default(),
            kafka: Kafka::default(),
            relay: Relay::default(),
            defaults: default_rules(),
            sources: BTreeMap::new(),
            limits: Limits::default(),
            maintenance: Maintenance::default(),
            http: Http::default(),
            log: Log::default(),
        }
    }
}

/// The defaults of the product, in one place; `url` and `brokers` have none.
impl Default for Database {
    fn default() -> Self {
        Self {
            url: Secret::default(),
            url_file: None,
            password: None,
            password_file: None,
            schema: "keiro".to_owned(),
            table: "keiro_outbox".to_owned(),
            pool_size: 8,
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(30),
            prepared_statements: true,
            synchronous_commit: false,
            tls: Tls::default(),
        }
    }
}

impl Default for Tls {
    fn default() -> Self {
        Self { mode: TlsMode::Prefer, ca_file: None, cert_file: None, key_file: None }
    }
}

impl Default for Kafka {
    fn default() -> Self {
        Self {
            brokers: Vec::new(),
            message_bytes_max: 16 << 20,
            topic_fault_dead_after: None,
            properties: BTreeMap::new(),
            property_files: BTreeMap::new(),
        }
    }
}

impl Default for Relay {
    /// The instance is drawn anew each time: two processes on one host never share one.
    fn default() -> Self {
        Self {
            instance: load::drawn_instance(),
            batch_rows_max: 500,
            batch_bytes_max: 8 << 20,
            in_flight_rows_max: 10_000,
            in_flight_bytes_max: 64 << 20,
            poll_interval_min: Duration::from_millis(2),
            poll_interval_max: Duration::from_millis(250),
            publish_timeout: Duration::from_secs(30),
            settle_timeout: Duration::from_secs(10),
            publishing_timeout: Duration::from_secs(300),
            shutdown_grace: Duration::from_secs(20),
            unlisted_sources: UnlistedSources::Default,
        }
    }
}

/// The rules of `[defaults]` when it says nothing.
#[must_use]
pub fn default_rules() -> SourceRules {
    SourceRules {
        policy: Policy::PerKeyHeadOfLine,
        on_halt: OnHalt::Retry,
        max_attempts: 10,
        backoff: Backoff {
            kind: BackoffKind::Exponential,
            initial: Duration::from_secs(1),
            multiplier: 2.0,
            max: Duration::from_secs(60),
            jitter: 0.2,
        },
    }
}

impl Default for Maintenance {
    fn default() -> Self {
        Self { interval: Duration::from_secs(30), retention: None }
    }
}

impl Default for Http {
    fn default() -> Self {
        Self { listen: SocketAddr::from(([127, 0, 0, 1], 9464)) }
    }
}

impl Default for Log {
    fn default() -> Self {
        Self { format: LogFormat::Json, level: "info".to_owned() }
    }
}

/// FNV-1a, 32 bits: the standard library's hasher may change with a version, and this one may not.
struct Fnv1a(u32);

impl Fnv1a {
    fn new() -> Self {
        Self(0x811c_9dc5)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        }
    }

    /// Every field has a fixed width or ends in a byte that no text holds, so that two configurations never read alike.
    fn rules(&mut self, source_name: &str, rules: &SourceRules) {
        let backoff = &rules.backoff;
        self.bytes(source_name.as_bytes());
        self.bytes(&[0xff]);
        self.bytes(rules.policy.name().as_bytes());
        self.bytes(&[0xff]);
        if rules.policy == Policy::StopTheLine {
            self.bytes(rules.on_halt.name().as_bytes());
        }
        self.bytes(&[0xff]);
        self.bytes(&rules.max_attempts.to_le_bytes());
        self.bytes(kind_name(backoff.kind).as_bytes());
        self.bytes(&[0xff]);
        self.bytes(&backoff.initial.as_nanos().to_le_bytes());
        self.bytes(&backoff.multiplier.to_bits().to_le_bytes());
        self.bytes(&backoff.max.as_nanos().to_le_bytes());
        self.bytes(&backoff.jitter.to_bits().to_le_bytes());
    }
}

/// The name used in configuration.
fn kind_name(kind: BackoffKind) -> &'static str {
    match kind {
        BackoffKind::Constant => "constant",
        BackoffKind::Exponential => "exponential",
    }
}
