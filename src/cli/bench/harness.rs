//! What every scenario needs: servers of its own, a fresh database, a topic, a relay in this process, and what it cost.
//!
//! Nothing here ever reuses a table: each figure begins with one that was just made.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use tokio::task::spawn_blocking;
use uuid::Uuid;

use crate::cli::complain;
use crate::cli::demo::services::{Installation, Kafka, KafkaOptions, Postgres, PostgresOptions};
use crate::config::{Config, ConfigFile, Loaded, Overrides};
use crate::domain::outcome::Outcome;
use crate::domain::policy::Policy;
use crate::publish::kafka::KafkaPublisher;
use crate::publish::{Batch, PublishError, Publisher};
use crate::relay::health::{Board, Identity, Limits};
use crate::relay::{DrainReport, Relay};
use crate::store::{Dedicated, Param, Profile, Store, migrate};
use crate::telemetry::Metrics;

/// How long one statement of the harness may take.
const STATEMENT_MAX: Duration = Duration::from_secs(600);
/// How long one request to Kafka may take.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// Ticks a second of the times in `/proc`, the same on every Linux that this runs on.
const TICKS_PER_SECOND: f64 = 100.0;

/// The servers.
pub(super) struct Harness {
    pub quick: bool,
    installation: Installation,
    postgres: Postgres,
    /// Started when first needed.
    kafka: Option<Kafka>,
    count: AtomicU32,
}

impl Harness {
    /// Starts PostgreSQL with its defaults but for `shared_buffers`, and the extension that counts buffers.
    ///
    /// # Errors
    /// With the server's log, or what to run first.
    pub(super) async fn start(quick: bool) -> Result<Self, String> {
        let installation = Installation::locate(None).map_err(|error| error.to_string())?;
        let programs = installation.clone();
        let postgres = spawn_blocking(move || {
            let settings =
                [("shared_buffers", "512MB"), ("shared_preload_libraries", "pg_stat_statements"), ("jit", "off")];
            Postgres::start(&programs, PostgresOptions { fsync: true, settings: &settings })
        });
        let postgres = postgres.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
        Ok(Self { quick, installation, postgres, kafka: None, count: AtomicU32::new(1) })
    }

    /// A tenth of it when everything is to be quick.
    pub(super) fn scaled(&self, rows: usize) -> usize {
        if self.quick { rows / 10 } else { rows }
    }

    /// What this ran on: a figure without it says little.
    pub(super) async fn about(&self) -> String {
        let version = async {
            let scratch = self.database(Profile::Lean, "", None).await?;
            scratch.text("select current_setting('server_version')").await
        };
        let version = version.await.unwrap_or_else(|problem| problem);
        let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().unwrap_or("?").to_owned();
        let scale = if self.quick { "; quick: a tenth of the rows" } else { "" };
        format!(
            "keiro-relay {}, PostgreSQL {version} and Kafka on the same {cores} cores; load average at the start {load}{scale}. \
             PostgreSQL has its defaults (fsync on) but for shared_buffers = 512MB; the relay's commits are asynchronous, as by \
             default. Trust ratios within one run, not seconds.",
            env!("CARGO_PKG_VERSION")
        )
    }

    /// A fresh database with an empty table of a profile, and a configuration for it.
    ///
    /// # Errors
    /// What the database says.
    pub(super) async fn database(
        &self,
        profile: Profile,
        sections: &str,
        brokers: Option<&str>,
    ) -> Result<Scratch, String> {
        let name = format!("bench_{}", self.count.fetch_add(1, Ordering::Relaxed));
        self.postgres.create_database(&name).map_err(|error| error.to_string())?;
        let url = self.postgres.url(&name);
        // Nothing listens there, and nothing is sent there.
        let brokers = brokers.unwrap_or("127.0.0.1:1");
        let toml = format!("[database]\nurl = \"{url}\"\n\n[kafka]\nbrokers = [\"{brokers}\"]\n\n{sections}\n");
        let file = ConfigFile::Text { name: "bench", text: &toml };
        let config = Loaded::from(file, [], Overrides::new()).map_err(|problems| problems.to_string())?.config;
        let store = Store::new(&config, 4).map_err(|error| error.to_string())?;
        let scratch = Scratch { config: Arc::new(config), store };
        let Database { schema, table } = Database::of(&scratch.config);
        migrate(&scratch.db()?, schema, table, Some(profile), false).await.map_err(|error| error.to_string())?;
        let shape = scratch.store.inspect().await.map_err(|error| error.to_string())?;
        assert_eq!(shape.profile, profile, "migrate makes what it was asked for");
        scratch.store.adopt(&shape);
        // The usual state of an outbox: whatever was counted was counted while it was drained.
        scratch.batch("create extension if not exists pg_stat_statements; analyze keiro.keiro_outbox").await?;
        Ok(scratch)
    }

    /// The brokers of our Kafka, which is started at the first call.
    ///
    /// # Errors
    /// With the server's log.
    pub(super) async fn brokers(&mut self) -> Result<String, String> {
        if self.kafka.is_none() {
            doing("Kafka starts");
            let installation = self.installation.clone();
            let options = KafkaOptions { heap_megabytes_max: 1024, short_lived: false, ..KafkaOptions::default() };
            let kafka = spawn_blocking(move || Kafka::start(&installation, options));
            self.kafka = Some(kafka.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?);
        }
        Ok(self.kafka.as_ref().expect("started above").bootstrap())
    }

    /// Makes a topic and returns its name.
    ///
    /// # Errors
    /// What the cluster says.
    pub(super) async fn topic(&mut self, partitions: i32) -> Result<String, String> {
        let brokers = self.brokers().await?;
        let name = format!("bench-{}", self.count.fetch_add(1, Ordering::Relaxed));
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &brokers);
        let admin: AdminClient<DefaultClientContext> = config.create().map_err(|error| error.to_string())?;
        let new = NewTopic::new(&name, partitions, TopicReplication::Fixed(1));
        let options = AdminOptions::new().request_timeout(Some(REQUEST_MAX)).operation_timeout(Some(REQUEST_MAX));
        let results = admin.create_topics([&new], &options).await.map_err(|error| error.to_string())?;
        for result in results {
            result.map_err(|(topic, code)| format!("create the topic {topic}: {code}"))?;
        }
        Ok(name)
    }

    /// How many records lie on a topic.
    ///
    /// # Errors
    /// What the cluster says.
    pub(super) async fn records(&mut self, topic: &str, partitions: i32) -> Result<u64, String> {
        let (brokers, topic) = (self.brokers().await?, topic.to_owned());
        let count = spawn_blocking(move || {
            let mut config = ClientConfig::new();
            config.set("bootstrap.servers", &brokers).set("group.id", "keiro-relay-bench");
            let consumer: BaseConsumer = config.create()?;
            (0..partitions).try_fold(0, |count, partition| {
                let (low, high) = consumer.fetch_watermarks(&topic, partition, REQUEST_MAX)?;
                Ok::<_, rdkafka::error::KafkaError>(count + u64::try_from(high - low).unwrap_or(0))
            })
        });
        count.await.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }

    /// Runs a relay of this process over a database until nothing is due.
    ///
    /// # Errors
    /// It could not be built, or did not drain.
    pub(super) async fn drain(&self, scratch: &Scratch, publisher: Arc<dyn Publisher>) -> Result<Drained, String> {
        let (relay, metrics) = relay(scratch, publisher)?;
        scratch.batch("select pg_stat_statements_reset()").await?;
        forget_peak_memory();
        let before = self.cpu();
        let started = Instant::now();
        let report = relay.drain().await.map_err(|error| error.to_string())?;
        let elapsed = started.elapsed();
        let after = self.cpu();
        let text = metrics.render();
        let statements = scratch.statements().await?;
        Ok(Drained {
            statements,
            report,
            elapsed,
            cpu: after.since(before),
            peak_memory_bytes: peak_memory(),
            claim_seconds: sum_of(&text, "keiro_relay_claim_duration_seconds_sum"),
            publish_seconds: sum_of(&text, "keiro_relay_publish_duration_seconds_sum"),
            settle_seconds: sum_of(&text, "keiro_relay_settle_duration_seconds_sum"),
        })
    }

    /// Does something and returns what it cost in processor time, too.
    ///
    /// # Errors
    /// What it says.
    pub(super) async fn measured<T>(&self, work: impl Future<Output = Result<T, String>>) -> Result<(T, Cpu), String> {
        let before = self.cpu();
        let done = work.await?;
        Ok((done, self.cpu().since(before)))
    }

    fn cpu(&self) -> Cpu {
        Cpu {
            relay: process_cpu(std::process::id()),
            postgres: self.postgres.processes().into_iter().map(process_cpu).sum(),
            kafka: self.kafka.iter().flat_map(Kafka::processes).map(process_cpu).sum(),
        }
    }
}

/// A relay of this process over a database.
///
/// # Errors
/// It could not be built.
pub(super) fn relay(scratch: &Scratch, publisher: Arc<dyn Publisher>) -> Result<(Relay, Metrics), String> {
    let config = Arc::clone(&scratch.config);
    let store = Store::new(&config, config.database.pool_size - 1).map_err(|error| error.to_string())?;
    let maintenance = Store::new(&config, 1).map_err(|error| error.to_string())?;
    let metrics = Metrics::new();
    let identity = Identity {
        instance: config.relay.instance.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        policy_hash: config.policy_hash(),
    };
    let board = Board::new(identity, Limits::of(&config), metrics.clone());
    let relay = Relay::build(config, Arc::new(store), Arc::new(maintenance), publisher, board);
    Ok((relay, metrics))
}

/// A publisher over our Kafka, as the relay has it.
///
/// # Errors
/// librdkafka does not take the properties.
pub(super) fn kafka_publisher(config: &Config) -> Result<Arc<dyn Publisher>, String> {
    let publisher = KafkaPublisher::new(&config.kafka, &config.relay).map_err(|error| error.to_string())?;
    Ok(Arc::new(publisher))
}

/// A publisher that acknowledges everything at once: what remains is the database's share.
#[derive(Debug)]
pub(super) struct NoKafka;

impl Publisher for NoKafka {
    fn publish<'a>(&'a self, batch: &'a Batch) -> BoxFuture<'a, Result<Vec<(Uuid, Outcome)>, PublishError>> {
        let acked = Outcome::Acked { partition: 0, offset: 0, maybe_twice: false };
        let outcomes = batch.messages.iter().map(|message| (message.outbox_id, acked.clone())).collect();
        std::future::ready(Ok(outcomes)).boxed()
    }
}

/// What a drain did and cost.
#[derive(Debug)]
pub(super) struct Drained {
    pub report: DrainReport,
    pub elapsed: Duration,
    pub cpu: Cpu,
    pub peak_memory_bytes: Option<u64>,
    /// Time that passes spent in each stage, added up over passes at the same time.
    pub claim_seconds: f64,
    pub publish_seconds: f64,
    pub settle_seconds: f64,
    /// What the database did, the longest first.
    pub statements: Vec<StatementCost>,
}

/// What one of the relay's statements cost the database.
#[derive(Debug)]
pub(super) struct StatementCost {
    pub name: &'static str,
    pub calls: f64,
    /// Rows it returned.
    pub rows: f64,
    pub seconds: f64,
    pub buffers: f64,
    pub wal_bytes: f64,
}

/// Words that only one of the relay's statements has; neither the comments at their heads nor constants are kept.
const STATEMENT_WORDS: [(&str, &str); 13] = [
    ("with ordinality as k(key, rows_max, ord)", "claim_keys"),
    ("octet_length(o.payload_bytes)) over", "claim_rows"),
    ("over w as head_attempted", "claim_stream"),
    ("published_at = statement_timestamp()", "settle_sent"),
    ("f(id, attempt, status, error, delay, returned)", "settle_unsent"),
    ("as k(key) cross join lateral", "peek_keys"),
    ("where o.outbox_id = any($1::uuid[]) and (o.status ||", "peek_rows"),
    ("(s.created_at, s.outbox_id)", "poll"),
    ("backend_type not in", "late_floor"),
    ("group by w.status", "backlog"),
    ("as stale", "stale"),
    ("waiting_seconds", "heads"),
    // PostgreSQL 18 folds the parameters of a row into one.
    ("(o.created_at, o.outbox_id) > (", "discover"),
];

impl Drained {
    /// Rows a second.
    pub(super) fn rate(&self) -> f64 {
        self.report.sent as f64 / self.elapsed.as_secs_f64()
    }
}

/// Processor time in seconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Cpu {
    pub relay: f64,
    pub postgres: f64,
    pub kafka: f64,
}

impl Cpu {
    fn since(self, before: Self) -> Self {
        // A backend that ended in between takes its time along only until its parent has collected it.
        let since = |after: f64, before: f64| (after - before).max(0.0);
        Self {
            relay: since(self.relay, before.relay),
            postgres: since(self.postgres, before.postgres),
            kafka: since(self.kafka, before.kafka),
        }
    }
}

/// Processor time of a process and of the children it has collected.
fn process_cpu(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let Some((_, fields)) = stat.rsplit_once(')') else { return 0.0 };
    // utime, stime, cutime, cstime: the fields 14 to 17, of which the first here is 3.
    let ticks: f64 = fields.split_whitespace().skip(11).take(4).filter_map(|ticks| ticks.parse::<f64>().ok()).sum();
    ticks / TICKS_PER_SECOND
}

/// Begins a new measurement of the peak; where the system refuses, the peak is that of the whole run.
fn forget_peak_memory() {
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

/// The most memory this process had resident.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kibibytes << 10)
}

/// The sum of a metric over all its labels.
fn sum_of(metrics: &str, name: &str) -> f64 {
    let value = |line: &str| line.strip_prefix(name)?.rsplit_once(' ')?.1.parse::<f64>().ok();
    metrics.lines().filter_map(value).sum()
}

/// A database of one figure.
pub(super) struct Scratch {
    pub config: Arc<Config>,
    pub store: Store,
}

struct Database<'a> {
    schema: &'a str,
    table: &'a str,
}

impl<'a> Database<'a> {
    fn of(config: &'a Config) -> Self {
        Self { schema: &config.database.schema, table: &config.database.table }
    }
}

impl Scratch {
    fn db(&self) -> Result<crate::store::Db, String> {
        crate::store::Db::new(&self.config.database, "bench", &self.config.policy_hash())
            .map_err(|error| error.to_string())
    }

    /// A connection whose statements may take long.
    ///
    /// # Errors
    /// What the database says.
    pub(super) async fn session(&self) -> Result<Dedicated, String> {
        let (session, _) = self.db()?.dedicated().await.map_err(|error| error.to_string())?;
        let prepare = "set statement_timeout = 0; set enable_seqscan = on; set enable_sort = on";
        session.batch(prepare, STATEMENT_MAX).await.map_err(|error| error.to_string())?;
        Ok(session)
    }

    /// Runs statements.
    ///
    /// # Errors
    /// What the database says.
    pub(super) async fn batch(&self, sql: &str) -> Result<(), String> {
        self.session().await?.batch(sql, STATEMENT_MAX).await.map_err(|error| error.to_string())
    }

    /// Runs a query of one row.
    ///
    /// # Errors
    /// What the database says, or that there is no row.
    pub(super) async fn row(&self, sql: &str, params: &[Param<'_>]) -> Result<tokio_postgres::Row, String> {
        let row = self.session().await?.query_opt(sql, params, STATEMENT_MAX).await;
        row.map_err(|error| error.to_string())?.ok_or_else(|| format!("no row: {sql}"))
    }

    /// What the relay's statements cost since they were last reset, the longest first.
    async fn statements(&self) -> Result<Vec<StatementCost>, String> {
        let sql = "select query, calls::float8, rows::float8, total_exec_time / 1000, \
                   (shared_blks_hit + shared_blks_read)::float8, wal_bytes::float8 from pg_stat_statements \
                   where dbid = (select oid from pg_database where datname = current_database()) order by total_exec_time desc";
        let rows = self.session().await?.query(sql, &[], STATEMENT_MAX).await.map_err(|error| error.to_string())?;
        let read = |row: &tokio_postgres::Row| {
            let query: &str = row.try_get(0)?;
            let named = STATEMENT_WORDS.iter().find(|(words, _)| query.contains(words));
            Ok(StatementCost {
                name: named.map_or("other", |(_, name)| name),
                calls: row.try_get(1)?,
                rows: row.try_get(2)?,
                seconds: row.try_get(3)?,
                buffers: row.try_get(4)?,
                wal_bytes: row.try_get(5)?,
            })
        };
        rows.iter().map(read).collect::<Result<_, tokio_postgres::Error>>().map_err(|error| error.to_string())
    }

    async fn text(&self, sql: &str) -> Result<String, String> {
        self.row(sql, &[]).await?.try_get(0).map_err(|error| error.to_string())
    }
}

/// Says on standard error what is being done: a scenario takes minutes.
pub(super) fn doing(what: &str) {
    complain(&format!("bench: {what} …"));
}

/// The section of a source's policy in the configuration.
pub(super) fn defaults(policy: Policy) -> String {
    format!("[defaults]\npolicy = \"{}\"\n", policy.name())
}
