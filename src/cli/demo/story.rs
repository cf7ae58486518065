//! The demo's story, step by step.
//!
//! Nothing here ever judges what happened: `judge` does, from what the others bring.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::task::{JoinError, JoinHandle};
use tokio_postgres::types::Type;

use super::cast::{self, BILLING, LATE_TOPIC, ORDERS, ROLES, TOPIC_BYTES_MAX};
use super::consume::Consumer;
use super::daemon::{Daemon, Files, Settings, shell_word};
use super::judge::{self, Evidence, Judgement, TableRow};
use super::produce::{self, Books, Counts, Target};
use super::servers::{BrokerChoice, CleanUp, Servers, create_schema};
use super::show::{Show, Standing, grouped, table};
use crate::cli::{migrate, say};
use crate::domain::policy::Policy;
use crate::store::{Db, Profile, StoreError, qualified};

/// The table's name, also where the schema is the demo's own.
const TABLE: &str = "keiro_outbox";
/// How often the demo looks how far everybody is.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// How long nothing may move before the demo gives up: the relay's pauses after a fault of a topic are far shorter so early.
const STALL_MAX: Duration = Duration::from_secs(60);
/// How long the relay may take to be ready.
const READY_MAX: Duration = Duration::from_secs(30);
/// How long the demo watches that a halted source stays halted.
const HALT_WATCH: Duration = Duration::from_secs(2);
/// How long one statement may take.
const STATEMENT_MAX: Duration = Duration::from_secs(30);
/// How long the consumer may take to read the last records.
const READ_MAX: Duration = Duration::from_secs(60);
/// Connections of the producers and the judge.
const CONNECTIONS: usize = 12;

/// What is going to happen.
pub(super) struct Plan {
    pub rows: usize,
    pub json: bool,
    pub keep: bool,
    pub lose_a_record: bool,
    pub broker: BrokerChoice,
    pub database_url: Option<String>,
    pub log_level: String,
}

/// How it ended.
pub(super) struct Told {
    /// Whether the check held.
    pub held: bool,
    /// With `--keep`: what stays up.
    pub stage: Option<Stage>,
}

/// What stays up.
pub(super) struct Stage {
    daemon: Daemon,
    _servers: Servers,
    _files: Files,
}

impl Stage {
    /// Stops the relay in an orderly way, and the servers.
    pub(super) async fn clear(self) {
        // That it stops well was not promised here; it is gone afterwards in any case.
        let _ = self.daemon.stop().await;
    }
}

/// Tells the story.
///
/// # Errors
/// Something did not happen at all; a check that does not hold is no error.
pub(super) async fn tell(plan: &Plan, show: &Show, clean_up: &CleanUp) -> Result<Told, String> {
    let began = Instant::now();
    show.paragraph(
        "keiro-relay demo: programs write events into an outbox table in their own transactions, and the relay brings them to \
         Kafka, in order. Four sources with the four ordering policies do so now, and at the end the topics are compared with \
         what was committed.",
    );
    show.lines("");

    show.step(match (&plan.database_url, &plan.broker) {
        (None, BrokerChoice::Own) => "PostgreSQL and Kafka start, on free ports of 127.0.0.1.",
        (None, _) => "PostgreSQL starts, on a free port of 127.0.0.1.",
        (Some(_), BrokerChoice::Own) => "Kafka starts, on a free port of 127.0.0.1.",
        (Some(_), _) => "The servers are there.",
    });
    let servers = Servers::start(plan.database_url.as_deref(), plan.broker.clone()).await?;
    show.say(&format!("{} after {:.1} s.", servers.describe(), began.elapsed().as_secs_f64()));
    let mut scene = Scene::set(plan, servers)?;

    scene.make_table(show, clean_up).await?;
    scene.make_topics(show, clean_up).await?;
    let mut daemon = scene.start_relay(show).await?;

    let consumer = scene.start_consumer()?;
    let action = scene.write_and_relay(plan, show, clean_up, &mut daemon, &consumer).await?;

    show.step("The topics are read back and compared with what the producers committed.");
    let records = consumer.finish(READ_MAX).await?;
    let evidence = scene.evidence(&action.books, records, plan.lose_a_record).await?;
    let mut judgement = judge::judge(&evidence);
    judgement.problems.extend(action.problems.iter().cloned());

    let stage = if plan.keep {
        let Scene { servers, files, prefix, .. } = scene;
        Some((files, servers, daemon, prefix))
    } else {
        if let Err(problem) = daemon.stop().await {
            judgement.problems.push(problem);
        }
        None
    };
    report(show, &judgement, &action, &evidence);
    if plan.json {
        say(&in_json(&judgement, &action, began.elapsed()).to_string());
    }
    let held = judgement.problems.is_empty();
    let stage = stage.map(|(files, servers, daemon, prefix)| {
        say_what_stays_up(show, &files, &servers, &prefix);
        Stage { daemon, _servers: servers, _files: files }
    });
    Ok(Told { held, stage })
}

/// Where the story happens.
struct Scene {
    rows: usize,
    servers: Servers,
    files: Files,
    schema: String,
    prefix: String,
    db: Db,
}

/// What happened while rows moved.
#[derive(Default)]
struct Action {
    books: Books,
    /// How long the halting source stood still.
    halted: Duration,
    took: Duration,
    problems: Vec<String>,
}

impl Scene {
    fn set(plan: &Plan, servers: Servers) -> Result<Self, String> {
        let files = Files::new()?;
        let mark = format!("{:06x}", rand::random::<u32>() & 0x00ff_ffff);
        let schema = if servers.database_is_given { format!("keiro_relay_demo_{mark}") } else { "keiro".to_owned() };
        let brokers_are_given = matches!(plan.broker, BrokerChoice::Given(_));
        let prefix =
            if servers.database_is_given || brokers_are_given { format!("demo-{mark}-") } else { String::new() };
        let loaded = files.write(&Settings {
            database_url: &servers.database_url,
            schema: &schema,
            brokers: &servers.brokers,
            prefix: &prefix,
            log_level: &plan.log_level,
        })?;
        let database = crate::config::Database { pool_size: CONNECTIONS, ..loaded.config.database.clone() };
        let db = Db::new(&database, "demo", &loaded.config.policy_hash()).map_err(|error| error.to_string())?;
        Ok(Self { rows: plan.rows, servers, files, schema, prefix, db })
    }

    /// A source's or topic's name in this run.
    fn named(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    async fn make_table(&self, show: &Show, clean_up: &CleanUp) -> Result<(), String> {
        if self.servers.database_is_given {
            show.step(&format!(
                "An outbox table in a schema of its own, {}, which is dropped at the end.",
                self.schema
            ));
            return create_schema(&self.db, &self.schema, TABLE, clean_up).await;
        }
        show.step("The outbox table is made: `keiro-relay migrate`.");
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let options = migrate::Options { profile: Some(Profile::Lean), dry_run: false };
        let code = migrate::run(&self.db, &self.schema, TABLE, options, &mut out, &mut err).await;
        if code.map_err(|error| error.to_string())? != 0 {
            return Err(String::from_utf8_lossy(&err).trim_end().to_owned());
        }
        if let Some(line) = String::from_utf8_lossy(&out).lines().next() {
            show.say(line);
        }
        Ok(())
    }

    async fn make_topics(&self, show: &Show, clean_up: &CleanUp) -> Result<(), String> {
        let limits = self.servers.has_limits();
        let limit = |source: usize| (limits && source == ORDERS).then_some(TOPIC_BYTES_MAX);
        let topics: Vec<(String, i32, Option<usize>)> = ROLES
            .iter()
            .enumerate()
            .map(|(source, role)| (self.named(role.name), role.partitions, limit(source)))
            .collect();
        show.step("Each source has a topic:");
        for (source, role) in ROLES.iter().enumerate() {
            let plural = if role.partitions == 1 { "partition" } else { "partitions" };
            let limit = limit(source).map(|bytes| format!(", takes records of {} KiB at most", bytes >> 10));
            show.lines(&format!("   {:8} {} {plural}{}", role.name, role.partitions, limit.unwrap_or_default()));
        }
        show.say(&format!("One row of billing is for a topic that nobody made: {LATE_TOPIC}."));
        if !limits {
            show.say("The mock broker enforces no limits of topics, so no row is too large this time.");
        }
        self.servers.withhold_topic(&self.named(LATE_TOPIC))?;
        self.servers.create_topics(&topics, clean_up).await
    }

    async fn start_relay(&self, show: &Show) -> Result<Daemon, String> {
        show.step(&format!("The relay starts: `keiro-relay run --config {}`.", shell_word(&self.files.config)));
        for role in &ROLES {
            show.lines(&format!("   {:8} {:20} {}", role.name, role.policy.name(), role.promise));
        }
        let mut daemon = Daemon::start(&self.files)?;
        let end = Instant::now() + READY_MAX;
        loop {
            if let Some(status) = daemon.ended() {
                return Err(format!("the relay ended with {status}; its log:{}", self.files.log_tail()));
            }
            let answer = daemon.get("/readyz").await;
            if answer.as_ref().is_some_and(|answer| answer.fine) {
                return Ok(daemon);
            }
            if Instant::now() >= end {
                let said = answer.map_or_else(|| "no answer".to_owned(), |answer| answer.body);
                return Err(format!("the relay was not ready within {READY_MAX:?}: {said}"));
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    fn start_consumer(&self) -> Result<Consumer, String> {
        let topics: Vec<String> = ROLES.iter().map(|role| self.named(role.name)).collect();
        let all: Vec<String> = topics.iter().cloned().chain([self.named(LATE_TOPIC)]).collect();
        Consumer::start(&self.servers.brokers, &topics, &all)
    }

    /// Rows of a source that the consumer has read.
    fn relayed(&self, source: usize, consumer: &Consumer) -> usize {
        let late = if source == BILLING { consumer.count(&self.named(LATE_TOPIC)) } else { 0 };
        consumer.count(&self.named(ROLES[source].name)) + late
    }

    /// The middle of the story: producers write, the relay relays, one source is halted and mended.
    async fn write_and_relay(
        &mut self,
        plan: &Plan,
        show: &Show,
        clean_up: &CleanUp,
        daemon: &mut Daemon,
        consumer: &Consumer,
    ) -> Result<Action, String> {
        let limits = self.servers.has_limits();
        show.step(&format!(
            "{} producers write {} rows in transactions of 1 to 5 rows; some are rolled back on purpose.",
            produce::producers(),
            grouped(plan.rows)
        ));
        if limits {
            show.say(&format!(
                "In the middle of the busiest customer's orders one row of 40 KB is too large for its topic: it must be set \
                 aside (status rejected, {}), and the customer's later orders must go on.",
                cast::TOO_LARGE
            ));
        }
        let target = Arc::new(Target {
            db: self.db.clone(),
            table: qualified(&self.schema, TABLE),
            prefix: self.prefix.clone(),
        });
        let counts = Arc::new(Counts::default());
        let began = Instant::now();
        let mut producers = Producers::Writing(tokio::spawn(produce::produce(
            target,
            cast::deal(self.rows, limits),
            Arc::clone(&counts),
        )));
        let mut halt = Halt::Expected;
        let mut action = Action::default();
        let mut last_move = (Instant::now(), Vec::new());
        show.begin_progress(&self.standings(&counts, consumer, false));
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            producers.look().await?;
            if let Some(status) = daemon.ended() {
                return Err(format!("the relay ended with {status}; its log:{}", self.files.log_tail()));
            }
            let standings = self.standings(&counts, consumer, matches!(halt, Halt::Halted { .. }));
            show.progress_of(&standings);
            halt = self.direct(halt, show, clean_up, daemon, consumer, &standings, &mut action).await?;

            if last_move.1 != standings {
                last_move = (Instant::now(), standings.clone());
            } else if last_move.0.elapsed() > STALL_MAX {
                return Err(format!("nothing moved for {STALL_MAX:?}; the relay's log:{}", self.files.log_tail()));
            }
            let is_relayed = |source: usize| {
                let refused = usize::from(limits && source == ORDERS);
                standings[source].relayed + refused >= cast::rows_of(source, self.rows)
            };
            let all_relayed = (0..ROLES.len()).all(is_relayed);
            if let (Producers::Done(_), true, Halt::Mended) = (&producers, all_relayed, &halt)
                && self.unsettled().await.map_err(|error| error.to_string())? == 0
            {
                break;
            }
        }
        show.end_progress();
        action.took = began.elapsed();
        if let Producers::Done(books) = &mut producers {
            action.books = std::mem::take(books);
        }
        show.say(&format!(
            "{} transactions, of which {} rows were rolled back; every row has its verdict after {:.1} s.",
            grouped(counts.transactions.load(Ordering::Relaxed)),
            grouped(counts.rolled_back.load(Ordering::Relaxed)),
            action.took.as_secs_f64()
        ));
        Ok(action)
    }

    /// The part of the halting source: what is to be done next about it.
    #[expect(clippy::too_many_arguments, reason = "one step of one loop")]
    async fn direct(
        &self,
        halt: Halt,
        show: &Show,
        clean_up: &CleanUp,
        daemon: &Daemon,
        consumer: &Consumer,
        standings: &[Standing],
        action: &mut Action,
    ) -> Result<Halt, String> {
        let relayed = standings[BILLING].relayed;
        let others = || standings.iter().map(|standing| standing.relayed).sum::<usize>() - relayed;
        let before = cast::rows_before_halt(self.rows);
        Ok(match halt {
            Halt::Expected => match daemon.halted(&self.named(ROLES[BILLING].name)).await {
                Some((row, reason)) if relayed >= before => {
                    show.say(&format!("billing is halted on row {row}, says /status: {reason}"));
                    Halt::Halted { since: Instant::now(), others: others() }
                }
                Some(_) | None => Halt::Expected,
            },
            Halt::Halted { since, others: others_then } if since.elapsed() >= HALT_WATCH => {
                if relayed == before {
                    show.say(&format!(
                        "For {:.0} s nothing of billing moved, while {} rows of the other sources did. Now somebody makes the \
                         topic; the relay finds it by itself.",
                        since.elapsed().as_secs_f64(),
                        grouped(others() - others_then)
                    ));
                } else {
                    action.problems.push(format!(
                        "billing was halted behind {before} rows, but {relayed} of its rows are on Kafka"
                    ));
                }
                let topic = self.named(LATE_TOPIC);
                self.servers.create_topics(&[(topic.clone(), 1, None)], clean_up).await?;
                consumer.add(&topic);
                Halt::Mending { since }
            }
            Halt::Mending { since } if relayed > before => {
                action.halted = since.elapsed();
                show.say(&format!("billing goes on, {:.1} s after it was halted.", action.halted.as_secs_f64()));
                Halt::Mended
            }
            halt @ (Halt::Halted { .. } | Halt::Mending { .. } | Halt::Mended) => halt,
        })
    }

    fn standings(&self, counts: &Counts, consumer: &Consumer, halted: bool) -> Vec<Standing> {
        let standing = |(source, role): (usize, &cast::Role)| Standing {
            name: role.name,
            rows: cast::rows_of(source, self.rows),
            written: counts.committed[source].load(Ordering::Relaxed),
            relayed: self.relayed(source, consumer),
            halted: halted && source == BILLING,
        };
        ROLES.iter().enumerate().map(standing).collect()
    }

    /// Rows without a verdict.
    async fn unsettled(&self) -> Result<i64, StoreError> {
        let sql = format!(
            "select count(*) from {} where status not in ('sent', 'dead', 'rejected')",
            qualified(&self.schema, TABLE)
        );
        let row = self.db.query_opt(&sql, &[], STATEMENT_MAX).await?;
        Ok(row.map_or(Ok(0), |row| row.try_get(0))?)
    }

    /// What the judge looks at.
    async fn evidence(
        &self,
        books: &Books,
        mut records: Vec<judge::Record>,
        lose_a_record: bool,
    ) -> Result<Evidence, String> {
        if lose_a_record {
            records.pop();
        }
        let sql = format!(
            "select source, message_id, destination, message_key, status, coalesce(rejection_code, last_error) from {} \
             where source = any($1) order by created_at, outbox_id",
            qualified(&self.schema, TABLE)
        );
        let sources: Vec<(String, Policy)> = ROLES.iter().map(|role| (self.named(role.name), role.policy)).collect();
        let names: Vec<&str> = sources.iter().map(|(name, _)| name.as_str()).collect();
        let read = async {
            let rows = self.db.query(&sql, &[(&names, Type::TEXT_ARRAY)], STATEMENT_MAX).await?;
            let row = |row: &tokio_postgres::Row| {
                Ok(TableRow {
                    source: row.try_get(0)?,
                    message_id: row.try_get(1)?,
                    topic: row.try_get(2)?,
                    key: row.try_get(3)?,
                    status: row.try_get(4)?,
                    reason: row.try_get(5)?,
                })
            };
            rows.iter().map(row).collect::<Result<Vec<_>, StoreError>>()
        };
        let table = read.await.map_err(|error| format!("read the table: {error}"))?;
        Ok(Evidence {
            sources,
            committed: books.committed.clone(),
            rolled_back: books.rolled_back.clone(),
            table,
            records,
            one_clock: self.servers.has_one_clock(),
        })
    }
}

/// Where the producers are.
enum Producers {
    Writing(JoinHandle<Result<Books, StoreError>>),
    Done(Books),
}

impl Producers {
    /// Takes the books when all is written.
    async fn look(&mut self) -> Result<(), String> {
        if let Self::Writing(writing) = self
            && writing.is_finished()
        {
            let books: Result<_, JoinError> = writing.await;
            let books = books.map_err(|error| format!("a producer panicked: {error}"))?;
            *self = Self::Done(books.map_err(|error| format!("a producer could not write: {error}"))?);
        }
        Ok(())
    }
}

impl Drop for Producers {
    fn drop(&mut self) {
        if let Self::Writing(writing) = self {
            writing.abort();
        }
    }
}

/// Where the halting source is.
#[derive(Debug, Clone, Copy)]
enum Halt {
    /// It has not come to the row yet.
    Expected,
    /// It stands still; what the others had relayed then.
    Halted { since: Instant, others: usize },
    /// The topic is there now.
    Mending { since: Instant },
    /// It went on.
    Mended,
}

/// The table at the end and what it means.
fn report(show: &Show, judgement: &Judgement, action: &Action, evidence: &Evidence) {
    let heads = ["source", "policy", "rows", "sent", "rejected", "dead", "duplicates", "out of order", "rows/s"];
    let rows: Vec<Vec<String>> = judgement
        .sources
        .iter()
        .zip(&ROLES)
        .enumerate()
        .map(|(source, (figures, role))| {
            let numbers = [
                figures.rows,
                figures.sent,
                figures.rejected,
                figures.dead,
                figures.duplicates,
                figures.order_violations,
            ];
            let mut cells = vec![role.name.to_owned(), figures.policy.to_owned()];
            cells.extend(numbers.map(grouped));
            cells.push(rate(figures, source, action).map_or_else(|| "-".to_owned(), grouped));
            cells
        })
        .collect();
    show.lines("");
    show.lines(&table(&heads, &rows, 2));
    show.lines("");
    show.say(
        "rows/s counts from a source's first record to its last, while producers, PostgreSQL and a Kafka that has only just \
         started share this machine, and without the time billing was halted. Order is the table's (created_at, outbox_id), compared with offsets on the topics.",
    );
    show.lines("");
    let committed: usize = judgement.sources.iter().map(|figures| figures.rows).sum();
    if judgement.problems.is_empty() {
        show.paragraph(&format!(
            "The check held: of {} committed rows each is on its topic in order, or set aside as it should be; none is \
             missing, and none of the {} rows that were rolled back is there.",
            grouped(committed),
            grouped(evidence.rolled_back.len())
        ));
    } else {
        show.paragraph("THE CHECK FAILED:");
        for problem in &judgement.problems {
            show.say(problem);
        }
    }
}

/// Rows a second of one source, on the way to Kafka.
fn rate(figures: &judge::SourceFigures, source: usize, action: &Action) -> Option<usize> {
    let milliseconds = u64::try_from(figures.last_ms? - figures.first_ms?).ok()?;
    let halted = if source == BILLING { action.halted } else { Duration::ZERO };
    let moving = Duration::from_millis(milliseconds).checked_sub(halted)?;
    let rate = figures.sent as f64 / moving.as_secs_f64();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate of a demo")]
    rate.is_finite().then_some(rate as usize)
}

fn in_json(judgement: &Judgement, action: &Action, elapsed: Duration) -> serde_json::Value {
    let sources: Vec<_> = judgement
        .sources
        .iter()
        .enumerate()
        .map(|(source, figures)| {
            let mut value = serde_json::to_value(figures).expect("figures are plain data");
            value["rows_per_second"] = json!(rate(figures, source, action));
            value
        })
        .collect();
    json!({
        "ok": judgement.problems.is_empty(),
        "sources": sources,
        "unexpected": judgement.unexpected,
        "rolled_back": action.books.rolled_back.len(),
        "halted_ms": u64::try_from(action.halted.as_millis()).unwrap_or(u64::MAX),
        "problems": judgement.problems,
        "elapsed_ms": u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX),
    })
}

fn say_what_stays_up(show: &Show, files: &Files, servers: &Servers, prefix: &str) {
    let address = files.address();
    let config = shell_word(&files.config);
    let program =
        std::env::current_exe().map_or_else(|_| "keiro-relay".to_owned(), |path| shell_word(Path::new(&path)));
    show.lines("");
    show.paragraph("Everything stays up until Ctrl-C:");
    show.lines(&format!("   http://{address}/status    what the relay does and why not (JSON)"));
    show.lines(&format!("   http://{address}/metrics   for Prometheus"));
    show.lines(&format!("   http://{address}/readyz    whether it is ready"));
    if !servers.database_is_given {
        show.lines(&format!("   psql {} -c 'table keiro.{TABLE} limit 5'", servers.database_url));
    }
    show.lines(&format!("   Kafka is at {}", servers.brokers));
    show.lines(&format!("   {program} status --config {config}"));
    if prefix.is_empty() {
        show.lines(
            r#"   echo '{"source":"clicks","destination":"clicks","event_type":"clicked","payload":{"by":"me"}}' |"#,
        );
        show.lines(&format!("     {program} enqueue --config {config}"));
    }
    show.lines(&format!("   log: {}", files.log.display()));
}
