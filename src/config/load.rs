//! Loading: layers in, [`Loaded`] or every problem at once out. The ranges and the relations between settings are here.
//!
//! Nothing here ever stops at the first problem, and a relation is checked only between values that are right by themselves.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::problems::{Origin, Problem, Problems, Warning, nearest, quoted};
use super::read::{Reader, duration_text, size_text};
use super::{
    Config, Database, Http, Kafka, LEASE_MARGIN, Log, LogFormat, Maintenance, Relay, Secret, Tls, TlsMode,
    UnlistedSources, database, default_rules, kafka, layers,
};
use crate::domain::backoff::{Backoff, BackoffKind};
use crate::domain::limits::Limits;
use crate::domain::policy::{OnHalt, Policy, SourceRules};

/// Where the configuration is looked for when nobody names a file, in this order.
pub const DEFAULT_FILES: [&str; 2] = ["keiro-relay.toml", "/etc/keiro-relay/config.toml"];

/// Which file holds the configuration.
#[derive(Debug, Clone, Copy)]
pub enum ConfigFile<'a> {
    /// This one; that it is missing is a problem.
    Named(&'a Path),
    /// The first of these that exists; none of them will do, too.
    FirstOf(&'a [&'a str]),
    /// No file: a text, under the name that problems show.
    Text {
        /// Shown where a file's name would be.
        name: &'a str,
        /// TOML.
        text: &'a str,
    },
    /// None at all.
    Absent,
}

/// Keys that flags set: they win over everything else.
#[derive(Clone, Default)]
pub struct Overrides(Vec<(String, String, String)>);

impl Overrides {
    /// No flag at all.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a flag: its name as typed, the dotted key it sets, and its text, which is parsed as a variable's is.
    #[must_use]
    pub fn set(mut self, flag: impl Into<String>, key: impl Into<String>, text: impl Into<String>) -> Self {
        self.0.push((flag.into(), key.into(), text.into()));
        self
    }
}

// A flag's text may be a URL with a password.
impl std::fmt::Debug for Overrides {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.iter().map(|(flag, key, _)| (flag, key))).finish()
    }
}

/// The environment of this process, for [`Config::load`]: it never panics on text that is not UTF-8, it lets it be reported.
pub fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().map(|(name, text)| (name.to_string_lossy().into_owned(), text.to_string_lossy().into_owned()))
}

/// A configuration, and what is to be said about it.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// What is in force.
    pub config: Config,
    /// What works but should be known.
    pub warnings: Vec<Warning>,
    /// The file that was read, if any.
    pub file: Option<PathBuf>,
    /// Where each key that somebody set comes from.
    pub(super) origins: BTreeMap<Vec<String>, Origin>,
}

impl Loaded {
    /// Loads a configuration from a file (or none), the environment and flags.
    pub fn from(
        file: ConfigFile<'_>,
        environment: impl IntoIterator<Item = (String, String)>,
        flags: Overrides,
    ) -> Result<Self, Problems> {
        let mut unreadable = None;
        let mut path = None;
        let found: Option<(String, String)> = match file {
            ConfigFile::Absent => None,
            ConfigFile::Text { name, text } => Some((name.to_owned(), text.to_owned())),
            ConfigFile::Named(named) => match read_file(named) {
                Ok(text) => {
                    path = Some(named.to_owned());
                    Some((named.display().to_string(), text))
                }
                Err(error) => {
                    unreadable = Some(unreadable_file(named, &error));
                    None
                }
            },
            ConfigFile::FirstOf(candidates) => candidates.iter().map(Path::new).find_map(|candidate| {
                match read_file(candidate) {
                    Ok(text) => {
                        path = Some(candidate.to_owned());
                        Some((candidate.display().to_string(), text))
                    }
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
                    Err(error) => {
                        // It is there, so the next one is not what was meant.
                        unreadable = Some(unreadable_file(candidate, &error));
                        Some((String::new(), String::new()))
                    }
                }
            }),
        };
        if let Some(problem) = unreadable {
            // Whatever is missing would be missing because of this.
            return Err(Problems::from_list(vec![problem]).expect("one problem is a problem"));
        }
        let file = found.as_ref().map(|(name, text)| (name.as_str(), text.as_str()));
        let layers = layers::merge(file, environment, &flags.0);
        // The same for a file that is no TOML: its errors stand alone, but those of the other layers were found already.
        let broken = layers
            .problems
            .iter()
            .any(|problem| problem.key.is_empty() && matches!(problem.origin, Origin::File { .. }));
        let mut reader = Reader::new(layers);
        if broken {
            return Err(Problems::from_list(reader.problems).expect("a broken file is a problem"));
        }
        let config = read_config(&mut reader);
        let origins = reader.origins();
        match (Problems::from_list(reader.problems), config) {
            (None, Some(config)) => Ok(Self { config, warnings: reader.warnings, file: path, origins }),
            (Some(problems), _) => Err(problems),
            (None, None) => unreachable!("a value that is missing was reported"),
        }
    }
}

fn read_file(path: &Path) -> std::io::Result<String> {
    /// A configuration is a few kilobytes; this is another file.
    const FILE_BYTES_MAX: u64 = 4 << 20;
    let metadata = std::fs::metadata(path)?;
    if metadata.is_file() && metadata.len() > FILE_BYTES_MAX {
        return Err(std::io::Error::other("it is larger than 4 MiB"));
    }
    std::fs::read_to_string(path)
}

fn unreadable_file(path: &Path, error: &std::io::Error) -> Problem {
    let hint = if error.kind() == std::io::ErrorKind::NotFound { "; name an existing file with --config" } else { "" };
    Problem {
        key: String::new(),
        value: None,
        origin: Origin::File { name: path.display().to_string(), line: 0 },
        text: format!("the configuration file cannot be read: {error}{hint}"),
    }
}

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const HOUR: Duration = seconds(3_600);
const DAY: Duration = seconds(86_400);
/// humantime's year, so that 100 of them print as such.
const YEAR: Duration = seconds(31_557_600);

fn read_config(reader: &mut Reader) -> Option<Config> {
    let statement_timeout =
        reader.duration(&["database", "statement_timeout"], Database::default().statement_timeout, seconds(1)..=HOUR);
    let database = read_database(reader, statement_timeout);
    let relay = read_relay(reader);
    let ReadKafka { kafka, complete, message_bytes_max } = read_kafka(reader);
    let (defaults, sources) = read_rules(reader);
    let limits = read_limits(reader, message_bytes_max);
    let maintenance = read_maintenance(reader);
    let http = read_http(reader);
    let log = read_log(reader);
    check_relations(reader, statement_timeout, message_bytes_max, &relay, &maintenance);
    kafka::check_queue(reader, &kafka);
    // The publisher's own deadline and the margin: a process that wakes after its lease must send nothing old.
    let message_timeout = relay.publish_timeout.unwrap_or(Relay::default().publish_timeout) + LEASE_MARGIN;
    kafka::prove(reader, &kafka, message_timeout);
    Some(Config {
        database: database?,
        kafka: complete.then_some(kafka)?,
        relay: relay.complete()?,
        defaults: defaults?,
        sources: sources?,
        limits: limits?,
        maintenance: Maintenance { interval: maintenance.interval?, retention: maintenance.retention? },
        http: http?,
        log: log?,
    })
}

// ---- [database] ----

fn read_database(reader: &mut Reader, statement_timeout: Option<Duration>) -> Option<Database> {
    let default = Database::default();
    let url = reader.secret(&["database", "url"]);
    let url_file = reader.file(&["database", "url_file"]);
    let password = reader.secret(&["database", "password"]);
    let password_file = reader.file(&["database", "password_file"]);
    let schema = identifier(reader, &["database", "schema"], default.schema);
    let table = identifier(reader, &["database", "table"], default.table);
    let pool_size = reader.integer(&["database", "pool_size"], default.pool_size, 2..=256);
    let connect_timeout =
        reader.duration(&["database", "connect_timeout"], default.connect_timeout, millis(100)..=seconds(60));
    let prepared_statements = reader.boolean(&["database", "prepared_statements"], default.prepared_statements);
    let synchronous_commit =
        reader.choice(&["database", "synchronous_commit"], default.synchronous_commit, &[("off", false), ("on", true)]);
    let tls = read_tls(reader);
    let chosen = choose_url(reader, url, url_file);
    let url = chosen.as_ref().and_then(|(url, _)| url.as_ref());
    let split = match url.map(|url| database::split_url(url.expose())) {
        None => Ok(None),
        Some(Ok(split)) => Ok(Some(split)),
        Some(Err(text)) => {
            reader.problem(&["database", "url"], None, text);
            Err(())
        }
    };
    let url_password = matches!(&split, Ok(Some(split)) if split.has_password);
    let passwords = choose_password(reader, password, password_file, url_password);
    let ((_, url_file), split, (password, password_file)) = (chosen?, split.ok()?, passwords?);
    let mut tls = tls?;
    if let Some(mode) = split.as_ref().and_then(|split| split.mode) {
        if reader.is_set(&["database", "tls", "mode"]) && tls.mode != mode {
            reader.problem(&["database", "url"], None, database::tls_conflict(mode, tls.mode));
            return None;
        }
        tls.mode = mode;
    }
    let database = Database {
        url: split.map(|split| split.url).unwrap_or_default(),
        url_file,
        password,
        password_file,
        schema: schema?,
        table: table?,
        pool_size: pool_size?,
        connect_timeout: connect_timeout?,
        statement_timeout: statement_timeout?,
        prepared_statements: prepared_statements?,
        synchronous_commit: synchronous_commit?,
        tls,
    };
    check_files(reader, &database);
    Some(database)
}

fn identifier(reader: &mut Reader, path: &[&str], default: String) -> Option<String> {
    let fits = |text: &str| {
        let first = text.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        first && text.len() <= 63 && text.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    optional(reader, path, default, |text| {
        if fits(text) {
            return Ok(());
        }
        Err("must be a PostgreSQL name of 1 to 63 letters (a-z, A-Z), digits and _, not beginning with a digit"
            .to_owned())
    })
}

/// A text with a default: `None` only when its problem was reported.
fn optional(
    reader: &mut Reader,
    path: &[&str],
    default: String,
    check: impl FnOnce(&str) -> Result<(), String>,
) -> Option<String> {
    if reader.is_set(path) { reader.text(path, check) } else { Some(default) }
}

fn read_tls(reader: &mut Reader) -> Option<Tls> {
    const MODE: [&str; 3] = ["database", "tls", "mode"];
    let modes = TlsMode::ALL.map(|mode| (mode.name(), mode));
    let mode = reader.choice(&MODE, Tls::default().mode, &modes);
    let ca_file = reader.file(&["database", "tls", "ca_file"]);
    let cert_file = reader.file(&["database", "tls", "cert_file"]);
    let key_file = reader.file(&["database", "tls", "key_file"]);
    for (name, other) in [("cert_file", "key_file"), ("key_file", "cert_file")] {
        if reader.is_set(&["database", "tls", name]) && !reader.is_set(&["database", "tls", other]) {
            let text =
                format!("a client certificate needs its key and the other way round: set database.tls.{other} too");
            reader.problem(&["database", "tls", name], None, text);
        }
    }
    Some(Tls { mode: mode?, ca_file, cert_file, key_file })
}

/// Of a URL and a file that holds one, the higher layer's wins: a flag must not lose to the file's `url_file`.
fn choose_url(
    reader: &mut Reader,
    url: Option<Secret>,
    url_file: Option<PathBuf>,
) -> Option<(Option<Secret>, Option<PathBuf>)> {
    const URL: [&str; 2] = ["database", "url"];
    const URL_FILE: [&str; 2] = ["database", "url_file"];
    match (url, url_file) {
        (None, None) => {
            // A value that was there but wrong has its problem already.
            if !reader.is_set(&URL) && !reader.is_set(&URL_FILE) {
                reader.problem(
                    &URL,
                    None,
                    format!(
                        "is missing: set it in the file, or {}DATABASE__URL, or database.url_file; the form is \
                     postgres://USER@HOST:5432/DATABASE",
                        layers::ENV_PREFIX
                    ),
                );
            }
            None
        }
        (Some(url), Some(url_file)) => match reader.origin(&URL).rank().cmp(&reader.origin(&URL_FILE).rank()) {
            std::cmp::Ordering::Greater => Some((Some(url), None)),
            std::cmp::Ordering::Less => Some((None, Some(url_file))),
            std::cmp::Ordering::Equal => {
                reader.problem(&URL, None, "is set beside database.url_file: keep one of them");
                None
            }
        },
        one => Some(one),
    }
}

/// The same for the password, which a URL of a higher layer may hold too.
fn choose_password(
    reader: &mut Reader,
    password: Option<Secret>,
    password_file: Option<PathBuf>,
    url_password: bool,
) -> Option<(Option<Secret>, Option<PathBuf>)> {
    const PASSWORD: [&str; 2] = ["database", "password"];
    const PASSWORD_FILE: [&str; 2] = ["database", "password_file"];
    let url_rank = if url_password { reader.origin(&["database", "url"]).rank() } else { 0 };
    let (rank, file_rank) = (reader.origin(&PASSWORD).rank(), reader.origin(&PASSWORD_FILE).rank());
    if password.is_some() && password_file.is_some() && rank == file_rank {
        reader.problem(&PASSWORD, None, "is set beside database.password_file: keep one of them");
        return None;
    }
    let password = password.filter(|_| rank >= url_rank && rank > file_rank);
    let password_file = password_file.filter(|_| file_rank >= url_rank && file_rank > rank);
    Some((password, password_file))
}

/// Files that are not there now may be there when they are needed, so they are no problem; but it is seldom meant.
fn check_files(reader: &mut Reader, database: &Database) {
    if let Err(error) = database.connect_config() {
        let name = error.setting.rsplit('.').next().unwrap_or_default().to_owned();
        reader.warning(&["database", &name], format!("{} {}; it is read again at each use", error.value, error.text));
    }
    let tls = &database.tls;
    for (name, file) in [("ca_file", &tls.ca_file), ("cert_file", &tls.cert_file), ("key_file", &tls.key_file)] {
        if let Some(Err(error)) = file.as_ref().map(std::fs::File::open) {
            let file = quoted(&file.as_ref().map(|file| file.display().to_string()).unwrap_or_default());
            reader.warning(&["database", "tls", name], format!("{file} cannot be read: {error}"));
        }
    }
    let verifies = match tls.mode {
        TlsMode::VerifyCa | TlsMode::VerifyFull => true,
        TlsMode::Disable | TlsMode::Prefer | TlsMode::Require => false,
    };
    if tls.ca_file.is_some() && !verifies {
        let text =
            format!("the server's certificate is not checked with mode \"{}\": set \"verify-full\"", tls.mode.name());
        reader.warning(&["database", "tls", "ca_file"], text);
    }
}

// ---- [kafka] ----

/// `[kafka]` while some of it may be wrong.
struct ReadKafka {
    /// What was wrong has its default, so that the rest can still be checked.
    kafka: Kafka,
    /// Whether nothing was wrong.
    complete: bool,
    message_bytes_max: Option<usize>,
}

fn read_kafka(reader: &mut Reader) -> ReadKafka {
    const BROKERS: [&str; 2] = ["kafka", "brokers"];
    let default = Kafka::default();
    let brokers = reader.list(&BROKERS, check_broker);
    let before = reader.problems.len();
    match &brokers {
        None if !reader.is_set(&BROKERS) => {
            let text = format!(
                "is missing: set it in the file, such as [\"kafka-1:9092\", \"kafka-2:9092\"], or {}KAFKA__BROKERS, separated by \
                 commas",
                layers::ENV_PREFIX
            );
            reader.problem(&BROKERS, None, text);
        }
        Some(list) if list.is_empty() => {
            reader.problem(&BROKERS, Some("[]".to_owned()), "must name at least one broker, such as \"kafka-1:9092\"");
        }
        Some(_) | None => {}
    }
    // librdkafka takes 1,000 to 1,000,000,000 bytes.
    let message_bytes_max =
        reader.size(&["kafka", "message_bytes_max"], default.message_bytes_max, 1_000..=1_000_000_000);
    let topic_fault_dead_after = reader.duration_or_off(
        &["kafka", "topic_fault_dead_after"],
        default.topic_fault_dead_after,
        seconds(10)..=30 * DAY,
    );
    let (properties, property_files) = kafka::read(reader);
    let complete = brokers.is_some() && message_bytes_max.is_some() && topic_fault_dead_after.is_some();
    let kafka = Kafka {
        brokers: brokers.unwrap_or_default(),
        message_bytes_max: message_bytes_max.unwrap_or(default.message_bytes_max),
        topic_fault_dead_after: topic_fault_dead_after.flatten(),
        properties,
        property_files,
    };
    ReadKafka { kafka, complete: complete && reader.problems.len() == before, message_bytes_max }
}

fn check_broker(broker: &str) -> Result<(), String> {
    const FORM: &str = "must be host:port, such as \"kafka-1:9092\" or \"[::1]:9092\"";
    if broker.contains("://") {
        return Err(format!("{FORM}; leave the scheme out and set security.protocol in [kafka.properties]"));
    }
    if broker.contains(',') {
        return Err(format!("{FORM}; write one broker an entry"));
    }
    let (host, port) = match broker.strip_prefix('[') {
        Some(rest) => match rest.split_once("]:") {
            Some((host, port)) if host.parse::<std::net::Ipv6Addr>().is_ok() => (host, port),
            Some(_) | None => return Err(FORM.to_owned()),
        },
        None => match broker.rsplit_once(':') {
            Some((host, _)) if host.contains(':') => return Err(format!("{FORM}; an IPv6 address stands in brackets")),
            Some((host, port)) => (host, port),
            None => return Err(format!("{FORM}; the port is missing")),
        },
    };
    let host_fits = !host.is_empty() && host.chars().all(|c| c.is_ascii_alphanumeric() || ".-_:".contains(c));
    let port_fits = port.chars().all(|c| c.is_ascii_digit()) && port.parse::<u16>().is_ok_and(|port| port > 0);
    if host_fits && port_fits { Ok(()) } else { Err(FORM.to_owned()) }
}

// ---- [relay] ----

/// `[relay]` while some of it may be wrong.
struct ReadRelay {
    instance: Option<String>,
    batch_rows_max: Option<usize>,
    batch_bytes_max: Option<usize>,
    in_flight_rows_max: Option<usize>,
    in_flight_bytes_max: Option<usize>,
    poll_interval_min: Option<Duration>,
    poll_interval_max: Option<Duration>,
    publish_timeout: Option<Duration>,
    settle_timeout: Option<Duration>,
    publishing_timeout: Option<Duration>,
    shutdown_grace: Option<Duration>,
    unlisted_sources: Option<UnlistedSources>,
}

impl ReadRelay {
    fn complete(self) -> Option<Relay> {
        Some(Relay {
            instance: self.instance?,
            batch_rows_max: self.batch_rows_max?,
            batch_bytes_max: self.batch_bytes_max?,
            in_flight_rows_max: self.in_flight_rows_max?,
            in_flight_bytes_max: self.in_flight_bytes_max?,
            poll_interval_min: self.poll_interval_min?,
            poll_interval_max: self.poll_interval_max?,
            publish_timeout: self.publish_timeout?,
            settle_timeout: self.settle_timeout?,
            publishing_timeout: self.publishing_timeout?,
            shutdown_grace: self.shutdown_grace?,
            unlisted_sources: self.unlisted_sources?,
        })
    }
}

fn read_relay(reader: &mut Reader) -> ReadRelay {
    let default = Relay::default();
    let size = 1 << 10..=1 << 36;
    ReadRelay {
        instance: optional(reader, &["relay", "instance"], default.instance, check_instance),
        batch_rows_max: reader.integer(&["relay", "batch_rows_max"], default.batch_rows_max, 1..=10_000),
        batch_bytes_max: reader.size(&["relay", "batch_bytes_max"], default.batch_bytes_max, size.clone()),
        in_flight_rows_max: reader.integer(&["relay", "in_flight_rows_max"], default.in_flight_rows_max, 1..=1_000_000),
        in_flight_bytes_max: reader.size(&["relay", "in_flight_bytes_max"], default.in_flight_bytes_max, size),
        poll_interval_min: poll_interval(reader, "poll_interval_min", default.poll_interval_min),
        poll_interval_max: poll_interval(reader, "poll_interval_max", default.poll_interval_max),
        publish_timeout: timeout(reader, "publish_timeout", default.publish_timeout, millis(100)..=8 * HOUR),
        settle_timeout: timeout(reader, "settle_timeout", default.settle_timeout, millis(100)..=HOUR),
        publishing_timeout: timeout(reader, "publishing_timeout", default.publishing_timeout, seconds(5)..=DAY),
        shutdown_grace: timeout(reader, "shutdown_grace", default.shutdown_grace, seconds(1)..=HOUR),
        unlisted_sources: reader.choice(
            &["relay", "unlisted_sources"],
            default.unlisted_sources,
            &[UnlistedSources::Default, UnlistedSources::Ignore].map(|choice| (choice.name(), choice)),
        ),
    }
}

fn poll_interval(reader: &mut Reader, name: &str, default: Duration) -> Option<Duration> {
    reader.duration(&["relay", name], default, millis(1)..=seconds(60))
}

fn timeout(reader: &mut Reader, name: &str, default: Duration, range: RangeInclusive<Duration>) -> Option<Duration> {
    reader.duration(&["relay", name], default, range)
}

fn check_instance(text: &str) -> Result<(), String> {
    let printable = text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if !text.is_empty() && text.len() <= 128 && printable && text.trim() == text {
        return Ok(());
    }
    Err("must be 1 to 128 printable ASCII characters without a space at either end; leave it out for host-pid-random"
        .to_owned())
}

/// Host, process and a random word: the host finds the machine, the rest keeps two relays on it apart.
pub(super) fn drawn_instance() -> String {
    let host = gethostname::gethostname();
    let host: String = host
        .to_string_lossy()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
        .take(100)
        .collect();
    let host = if host.is_empty() { "host".to_owned() } else { host };
    format!("{host}-{}-{:04x}", std::process::id(), rand::random::<u16>())
}

// ---- [defaults], [sources.*] ----

type Sources = BTreeMap<String, SourceRules>;

fn read_rules(reader: &mut Reader) -> (Option<SourceRules>, Option<Sources>) {
    let defaults = read_section(reader, &["defaults"], &default_rules());
    // Wrong defaults are reported once; the sources are then read over the product's own.
    let base = defaults.clone().unwrap_or_else(default_rules);
    let mut sources = Some(Sources::new());
    for name in reader.names(&["sources"]) {
        match (read_section(reader, &["sources", &name], &base), &mut sources) {
            (Some(rules), Some(sources)) => {
                sources.insert(name, rules);
            }
            (Some(_), None) => {}
            (None, _) => sources = None,
        }
    }
    check_on_halt(reader, defaults.as_ref(), sources.as_ref());
    (defaults, sources)
}

fn read_section(reader: &mut Reader, section: &[&str], base: &SourceRules) -> Option<SourceRules> {
    let at = |key: &'static str| [section, &[key][..]].concat();
    let backoff_at = |key: &'static str| [section, &["backoff", key][..]].concat();
    let policy = reader.choice(&at("policy"), base.policy, &Policy::ALL.map(|policy| (policy.name(), policy)));
    let on_halt = reader.choice(
        &at("on_halt"),
        base.on_halt,
        &[OnHalt::Retry, OnHalt::Hold].map(|choice| (choice.name(), choice)),
    );
    let max_attempts = reader.integer(&at("max_attempts"), base.max_attempts as usize, 1..=1_000);
    let kinds = [BackoffKind::Exponential, BackoffKind::Constant].map(|kind| (super::kind_name(kind), kind));
    let kind = reader.choice(&backoff_at("kind"), base.backoff.kind, &kinds);
    let delay = millis(1)..=7 * DAY;
    let initial = reader.duration(&backoff_at("initial"), base.backoff.initial, delay.clone());
    let multiplier = reader.float(&backoff_at("multiplier"), base.backoff.multiplier, 1.0..=1_000.0);
    let max = reader.duration(&backoff_at("max"), base.backoff.max, delay);
    let jitter = reader.float(&backoff_at("jitter"), base.backoff.jitter, 0.0..=1.0);
    if let (Some(initial), Some(max)) = (initial, max)
        && max < initial
    {
        // Named where it was set: a source that sets one of the two has the other from [defaults].
        let home = |key: &'static str| {
            if reader.is_set(&backoff_at(key)) { backoff_at(key) } else { vec!["defaults", "backoff", key] }
        };
        let (initial_path, max_path) = (home("initial"), home("max"));
        let text = format!("must be at least {}", reader.cite(&initial_path, quoted_duration(initial)));
        reader.problem(&max_path, Some(quoted_duration(max)), text);
        return None;
    }
    Some(SourceRules {
        policy: policy?,
        on_halt: on_halt?,
        max_attempts: u32::try_from(max_attempts?).expect("at most 1,000"),
        backoff: Backoff { kind: kind?, initial: initial?, multiplier: multiplier?, max: max?, jitter: jitter? },
    })
}

/// Halting is what stop_the_line does and nothing else: elsewhere the setting would promise what never happens.
fn check_on_halt(reader: &mut Reader, defaults: Option<&SourceRules>, sources: Option<&Sources>) {
    let (Some(defaults), Some(sources)) = (defaults, sources) else { return };
    let text =
        |policy: Policy| format!("has no effect with policy \"{policy}\": only \"stop_the_line\" halts; take it out");
    for (name, rules) in sources.iter().filter(|(_, rules)| rules.policy != Policy::StopTheLine) {
        let path = ["sources", name, "on_halt"];
        if reader.is_set(&path) {
            reader.problem(&path, Some(quoted(rules.on_halt.name())), text(rules.policy));
        }
    }
    // In [defaults] it is for the sources that halt, if there is one.
    let halts =
        defaults.policy == Policy::StopTheLine || sources.values().any(|rules| rules.policy == Policy::StopTheLine);
    let path = ["defaults", "on_halt"];
    if reader.is_set(&path) && !halts {
        reader.problem(&path, Some(quoted(defaults.on_halt.name())), text(defaults.policy));
    }
}

// ---- the rest ----

struct ReadMaintenance {
    interval: Option<Duration>,
    retention: Option<Option<Duration>>,
}

fn read_maintenance(reader: &mut Reader) -> ReadMaintenance {
    let default = Maintenance::default();
    ReadMaintenance {
        interval: reader.duration(&["maintenance", "interval"], default.interval, seconds(1)..=HOUR),
        retention: reader.duration_or_off(&["maintenance", "retention"], default.retention, seconds(5)..=100 * YEAR),
    }
}

/// What `enqueue` lets through is what the client may hand to a broker.
fn read_limits(reader: &mut Reader, message_bytes_max: Option<usize>) -> Option<Limits> {
    const PAYLOAD: [&str; 2] = ["limits", "payload_bytes_max"];
    let default = Limits::default();
    let payload_bytes_max = reader.size(&PAYLOAD, default.payload_bytes_max, 1..=100_000_000);
    let attributes_bytes_max =
        reader.size(&["limits", "attributes_bytes_max"], default.attributes_bytes_max, 2..=1_000_000);
    // The default gives way to a client that may hand over less.
    let payload_bytes_max = match (payload_bytes_max, message_bytes_max) {
        (Some(payload), Some(message)) if payload > message && reader.is_set(&PAYLOAD) => {
            let text = format!(
                "must be at most {}: a larger row would be rejected",
                reader.cite(&["kafka", "message_bytes_max"], quoted_size(message))
            );
            reader.problem(&PAYLOAD, Some(quoted_size(payload)), text);
            None
        }
        (Some(payload), Some(message)) => Some(payload.min(message)),
        (payload, _) => payload,
    };
    Some(Limits { payload_bytes_max: payload_bytes_max?, attributes_bytes_max: attributes_bytes_max? })
}

fn read_http(reader: &mut Reader) -> Option<Http> {
    const LISTEN: [&str; 2] = ["http", "listen"];
    if !reader.is_set(&LISTEN) {
        return Some(Http::default());
    }
    let listen = reader.text(&LISTEN, |text| {
        text.parse::<std::net::SocketAddr>().map(|_| ()).map_err(|_| {
            "must be an IP address and a port, such as \"127.0.0.1:9464\", \"0.0.0.0:9464\" or \"[::]:9464\"".to_owned()
        })
    })?;
    Some(Http { listen: listen.parse().expect("it was parsed above") })
}

fn read_log(reader: &mut Reader) -> Option<Log> {
    let default = Log::default();
    let formats = [LogFormat::Json, LogFormat::Text].map(|format| (format.name(), format));
    let format = reader.choice(&["log", "format"], default.format, &formats);
    let level = optional(reader, &["log", "level"], default.level, check_level);
    Some(Log { format: format?, level: level? })
}

/// A filter of `tracing`. It takes any word for the name of a module, so that "inof" would silence everything: a word alone
/// must be a level.
fn check_level(text: &str) -> Result<(), String> {
    const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
    let form = "must be off, error, warn, info, debug or trace, or a list such as \"info,keiro_relay=debug\"";
    for directive in text.split(',') {
        let level = directive.rsplit_once('=').map_or(directive, |(_, level)| level);
        if !LEVELS.contains(&level.to_ascii_lowercase().as_str()) {
            return Err(match nearest(level, LEVELS) {
                Some(near) => format!("{form}; did you mean {near}?"),
                None => form.to_owned(),
            });
        }
    }
    tracing_subscriber::EnvFilter::builder().parse(text).map(|_| ()).map_err(|_| form.to_owned())
}

// ---- relations ----

fn quoted_duration(duration: Duration) -> String {
    format!("\"{}\"", duration_text(duration))
}

fn quoted_size(bytes: usize) -> String {
    format!("\"{}\"", size_text(bytes))
}

fn check_relations(
    reader: &mut Reader,
    statement_timeout: Option<Duration>,
    message_bytes_max: Option<usize>,
    relay: &ReadRelay,
    maintenance: &ReadMaintenance,
) {
    if let (Some(rows), Some(batch)) = (relay.in_flight_rows_max, relay.batch_rows_max)
        && rows < batch
    {
        let text =
            format!("must be at least {}: a batch would never fit", reader.cite(&["relay", "batch_rows_max"], batch));
        reader.problem(&["relay", "in_flight_rows_max"], Some(rows.to_string()), text);
    }
    if let Some(bytes) = relay.in_flight_bytes_max {
        let batch = relay.batch_bytes_max.map(|batch| (["relay", "batch_bytes_max"], batch));
        let message = message_bytes_max.map(|message| (["kafka", "message_bytes_max"], message));
        // The larger of the two names the bound; a batch always takes its first row, so batch_bytes_max may be the smaller.
        if let Some((path, least)) = batch.into_iter().chain(message).max_by_key(|(_, least)| *least)
            && bytes < least
        {
            let text = format!("must be at least {}: it would never fit", reader.cite(&path, quoted_size(least)));
            reader.problem(&["relay", "in_flight_bytes_max"], Some(quoted_size(bytes)), text);
        }
    }
    if let (Some(min), Some(max)) = (relay.poll_interval_min, relay.poll_interval_max)
        && max < min
    {
        let text = format!("must be at least {}", reader.cite(&["relay", "poll_interval_min"], quoted_duration(min)));
        reader.problem(&["relay", "poll_interval_max"], Some(quoted_duration(max)), text);
    }
    check_lease(reader, relay);
    if let (Some(grace), Some(settle)) = (relay.shutdown_grace, relay.settle_timeout) {
        if grace <= settle {
            let text = format!(
                "must be longer than {}: that much of it is kept to settle what was sent",
                reader.cite(&["relay", "settle_timeout"], quoted_duration(settle))
            );
            reader.problem(&["relay", "shutdown_grace"], Some(quoted_duration(grace)), text);
        }
        if grace >= seconds(30) {
            let text = format!(
                "is {}, and Kubernetes kills a pod after 30s unless told otherwise: set terminationGracePeriodSeconds above it",
                quoted_duration(grace)
            );
            reader.warning(&["relay", "shutdown_grace"], text);
        }
    }
    if let (Some(statement), Some(settle)) = (statement_timeout, relay.settle_timeout)
        && statement < settle
    {
        let text = format!(
            "must be at least {}: a settlement would be cut off before its time",
            reader.cite(&["relay", "settle_timeout"], quoted_duration(settle))
        );
        reader.problem(&["database", "statement_timeout"], Some(quoted_duration(statement)), text);
    }
    if let (Some(interval), Some(lease)) = (maintenance.interval, relay.publishing_timeout)
        && interval > lease
    {
        let text = format!(
            "must be at most {}: rows of a relay that died would wait for longer than their lease",
            reader.cite(&["relay", "publishing_timeout"], quoted_duration(lease))
        );
        reader.problem(&["maintenance", "interval"], Some(quoted_duration(interval)), text);
    }
    if let (Some(Some(retention)), Some(lease)) = (maintenance.retention, relay.publishing_timeout)
        && retention < lease
    {
        let text = format!(
            "must be at least {}: a row would be gone while another relay may still settle it",
            reader.cite(&["relay", "publishing_timeout"], quoted_duration(lease))
        );
        reader.problem(&["maintenance", "retention"], Some(quoted_duration(retention)), text);
    }
}

/// A lease is trusted for a third of its time, so that it needs no renewal (design: settle).
fn check_lease(reader: &mut Reader, relay: &ReadRelay) {
    const LEASE: [&str; 2] = ["relay", "publishing_timeout"];
    /// Upstream's lease, which its sweepers apply to the whole table.
    const UPSTREAM_LEASE: Duration = seconds(300);
    let Some(lease) = relay.publishing_timeout else { return };
    if lease > UPSTREAM_LEASE {
        let text = format!(
            "is {}, and a keiro program beside this relay requeues every row that has been publishing for 5m: its rows could be \
             sent twice; keep it at 5m unless no such program runs",
            quoted_duration(lease)
        );
        reader.warning(&LEASE, text);
    }
    let (Some(publish), Some(settle)) = (relay.publish_timeout, relay.settle_timeout) else { return };
    let needed = publish + settle + LEASE_MARGIN;
    if needed >= lease / 3 {
        let text = format!(
            "must be longer than three times {} + {} + a margin of {}, which is {}: raise it or shorten them",
            reader.cite(&["relay", "publish_timeout"], quoted_duration(publish)),
            reader.cite(&["relay", "settle_timeout"], quoted_duration(settle)),
            duration_text(LEASE_MARGIN),
            duration_text(needed * 3)
        );
        reader.problem(&LEASE, Some(quoted_duration(lease)), text);
    }
}

impl Loaded {
    /// Where the value of a key comes from; a source's key that it does not set itself comes from `[defaults]`.
    #[must_use]
    pub fn origin(&self, path: &[&str]) -> Origin {
        let path: Vec<String> = path.iter().map(|name| (*name).to_owned()).collect();
        self.origins.get(&path).cloned().unwrap_or(Origin::Default)
    }
}
