//! What `doctor` asks of the database: facts about server, table and rows, each by a statement of its own.
//!
//! Nothing here ever changes anything, waits longer than [`LOOK_MAX`] for one answer, or says what a fact means. Counts of rows are of the
//! first live rows of each source, estimates of the server's statistics, or capped: no statement reads the whole table.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::inspect::{self, Examined, Profile, Shape};
use super::maintenance::micros;
use super::names::{self, qualified, quoted};
use super::statements::in_live_index;
use super::{Param, Store, StoreError};
use crate::domain::message::PgTime;

/// How long each look may take, with the wait for a connection.
const LOOK_MAX: Duration = Duration::from_secs(10);
/// Sources that are looked into.
pub const SOURCES_MAX: usize = 1_000;
/// Live rows that are looked at, over all sources, and at least and at most of each: each is a page, which may come from disk.
const FRONT_ROWS: usize = 20_000;
const FRONT_ROWS_OF_A_SOURCE: (usize, usize) = (20, 2_000);
/// Sent rows whose topics are looked at.
const SENT_ROWS: i64 = 10_000;
/// Where a count stops that an operator only needs the order of.
pub const UNDATED_MAX: i64 = 10_000;

/// Settings by name, as a new session has them.
pub type Settings = BTreeMap<String, String>;

/// How the clocks of host and database differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClockGap {
    /// Host minus database, in seconds.
    pub seconds: f64,
    /// How long the question took: the gap is known no better.
    pub known_within_seconds: f64,
}

/// What stands between us and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// A session of ours stayed on one connection of the server's while another was open.
    Nothing,
    /// It did not.
    TransactionPooler,
}

/// The oldest transaction that holds back vacuum.
#[derive(Debug, Clone, PartialEq)]
pub struct OldTransaction {
    /// Its process.
    pub pid: i32,
    /// Who runs it.
    pub user: String,
    /// As what.
    pub application: String,
    /// `active`, `idle in transaction`, …
    pub state: String,
    /// How long it has been open.
    pub seconds: f64,
}

/// A prepared transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// Its name.
    pub gid: String,
    /// Whose it is.
    pub owner: String,
    /// How long it has waited.
    pub seconds: f64,
}

/// A replication slot that holds back vacuum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slot {
    /// Its name.
    pub name: String,
    /// Whether anybody uses it.
    pub active: bool,
    /// How many transactions back it holds.
    pub transactions: i64,
}

/// How the table is kept.
#[derive(Debug, Clone, PartialEq)]
pub struct Upkeep {
    /// Storage options of the table.
    pub options: BTreeMap<String, String>,
    /// Rows, as vacuum and analyze estimated them.
    pub rows: f64,
    /// Whether our user may insert.
    pub can_insert: bool,
    /// Live rows by the statistics.
    pub live_rows: i64,
    /// Dead rows by the statistics.
    pub dead_rows: i64,
    /// Updates since the statistics began.
    pub updates: i64,
    /// Updates that changed no index.
    pub hot_updates: i64,
    /// Deletions since the statistics began.
    pub deletes: i64,
    /// How long that is.
    pub statistics_seconds: f64,
    /// When vacuum last ran.
    pub vacuumed_seconds_ago: Option<f64>,
    /// Constraints that are not validated.
    pub not_validated: Vec<String>,
}

/// One index of the profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexFact {
    /// What it is for: the stable part of its name.
    pub place: &'static str,
    /// Its name on this table.
    pub name: String,
    /// What of it there is.
    pub state: IndexState,
}

/// What of an index there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexState {
    /// Usable.
    There,
    /// There, and no query can use it: its building failed, or is still going on.
    Invalid,
    /// Not there.
    Missing,
}

/// The indexes of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Indexes {
    /// Those of the profile.
    pub expected: Vec<IndexFact>,
    /// Indexes with a column that every claim changes: with one of them no claim is a HOT update.
    pub on_claimed_columns: Vec<String>,
}

/// Live rows of one source, topic and status, among the first of their source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrontRows {
    /// Their source.
    pub source: String,
    /// Their topic.
    pub topic: String,
    /// Their status.
    pub status: String,
    /// How many.
    pub rows: i64,
    /// Of them with a published_at.
    pub published: i64,
    /// Of them due at infinity.
    pub never: i64,
    /// Of them due in more than a week, not held.
    pub far: i64,
    /// Of them held until somebody resumes the source.
    pub held: i64,
    /// Of them due now.
    pub due: i64,
    /// Of them unchanged for longer than a lease.
    pub expired: i64,
    /// Of them without a key.
    pub keyless: i64,
    /// Octets of the largest: payload, key, message id and stored attributes.
    pub largest: i64,
}

/// The first live rows of each source.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Front {
    /// By source, topic and status.
    pub groups: Vec<FrontRows>,
    /// Rows of each source that were looked at, at most.
    pub rows_max: usize,
    /// Sources with more live rows than that.
    pub capped: BTreeSet<String>,
}

/// A topic of rows that were sent lately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SentTopic {
    /// Its name.
    pub topic: String,
    /// Rows without a key.
    pub keyless: i64,
}

impl Store {
    /// What the table is, usable or not.
    pub async fn examine(&self) -> Result<Examined, StoreError> {
        inspect::examine(&self.db, &self.schema, &self.table, &["select", "update"]).await
    }

    /// The server's settings of these names.
    pub async fn settings(&self, names: &[&str]) -> Result<Settings, StoreError> {
        let rows = self.look(include_str!("sql/doctor_settings.sql"), &[(&names, Type::TEXT_ARRAY)]).await?;
        rows.iter().map(|row| Ok((row.try_get("name")?, row.try_get("value")?))).collect()
    }

    /// How far the clocks of this host and the database are apart.
    pub async fn clock_gap(&self) -> Result<ClockGap, StoreError> {
        // A connection that is open: else the time to open it would count.
        let mut tx = self.db.begin_read_only(LOOK_MAX).await?;
        let before = SystemTime::now();
        let row = tx.query_opt("select clock_timestamp() as now", &[], LOOK_MAX).await?;
        let after = SystemTime::now();
        tx.commit(LOOK_MAX).await?;
        let row = row.ok_or_else(|| StoreError::Protocol("the server said no time".to_owned()))?;
        let now: PgTime = row.try_get("now")?;
        let seconds = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let database = now.unix_micros().unwrap_or_default() as f64 / 1e6;
        let (before, after) = (seconds(before), seconds(after));
        Ok(ClockGap { seconds: before.midpoint(after) - database, known_within_seconds: (after - before).abs() / 2.0 })
    }

    /// Whether a session of ours keeps its connection to the server while another one is open: behind a pooler in transaction mode the
    /// other one takes it.
    pub async fn between(&self) -> Result<Between, StoreError> {
        const PID: &str = "select pg_backend_pid() as pid";
        let pid = |row: Option<Row>| -> Result<i32, StoreError> {
            let row = row.ok_or_else(|| StoreError::Protocol("the server named no process".to_owned()))?;
            Ok(row.try_get("pid")?)
        };
        let (session, _) = self.db.dedicated().await?;
        let first = pid(session.query_opt(PID, &[], LOOK_MAX).await?)?;
        let mut other = self.db.begin_read_only(LOOK_MAX).await?;
        let of_other = pid(other.query_opt(PID, &[], LOOK_MAX).await?)?;
        let second = pid(session.query_opt(PID, &[], LOOK_MAX).await?)?;
        other.commit(LOOK_MAX).await?;
        Ok(if first == second && first != of_other { Between::Nothing } else { Between::TransactionPooler })
    }

    /// The oldest transaction of another session.
    pub async fn oldest_transaction(&self) -> Result<Option<OldTransaction>, StoreError> {
        let rows = self.look(include_str!("sql/doctor_transactions.sql"), &[]).await?;
        let read = |row: &Row| -> Result<OldTransaction, StoreError> {
            Ok(OldTransaction {
                pid: row.try_get("pid")?,
                user: row.try_get("user_name")?,
                application: row.try_get("application_name")?,
                state: row.try_get("state")?,
                seconds: row.try_get("seconds")?,
            })
        };
        rows.first().map(read).transpose()
    }

    /// The oldest prepared transaction.
    pub async fn oldest_prepared(&self) -> Result<Option<Prepared>, StoreError> {
        let rows = self.look(include_str!("sql/doctor_prepared.sql"), &[]).await?;
        let read = |row: &Row| -> Result<Prepared, StoreError> {
            Ok(Prepared { gid: row.try_get("gid")?, owner: row.try_get("owner")?, seconds: row.try_get("seconds")? })
        };
        rows.first().map(read).transpose()
    }

    /// The replication slot that holds back vacuum most.
    pub async fn oldest_slot(&self) -> Result<Option<Slot>, StoreError> {
        let rows = self.look(include_str!("sql/doctor_slots.sql"), &[]).await?;
        let read = |row: &Row| -> Result<Slot, StoreError> {
            let transactions = row.try_get("transactions")?;
            Ok(Slot { name: row.try_get("name")?, active: row.try_get("active")?, transactions })
        };
        rows.first().map(read).transpose()
    }

    /// The application names of the relays with a session in this database.
    pub async fn relays(&self) -> Result<Vec<String>, StoreError> {
        let rows = self.look(include_str!("sql/doctor_relays.sql"), &[]).await?;
        rows.iter().map(|row| Ok(row.try_get("name")?)).collect()
    }

    /// How the table is kept; `None` when there is none.
    pub async fn upkeep(&self) -> Result<Option<Upkeep>, StoreError> {
        let rows = self.look(include_str!("sql/doctor_table.sql"), &self.place()).await?;
        let read = |row: &Row| -> Result<Upkeep, StoreError> {
            let options: Vec<String> = row.try_get("options")?;
            let pair =
                |option: &String| option.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
            Ok(Upkeep {
                options: options.iter().filter_map(pair).collect(),
                rows: row.try_get("rows")?,
                can_insert: row.try_get("can_insert")?,
                live_rows: row.try_get("live_rows")?,
                dead_rows: row.try_get("dead_rows")?,
                updates: row.try_get("updates")?,
                hot_updates: row.try_get("hot_updates")?,
                deletes: row.try_get("deletes")?,
                statistics_seconds: row.try_get("statistics_seconds")?,
                vacuumed_seconds_ago: row.try_get("vacuumed_seconds_ago")?,
                not_validated: row.try_get("not_validated")?,
            })
        };
        rows.first().map(read).transpose()
    }

    /// The indexes that a table of this profile should have, and those that it should not.
    pub async fn indexes(&self, profile: Profile) -> Result<Indexes, StoreError> {
        const CLAIMED: [&str; 3] = ["status", "attempt_count", "updated_at"];
        let rows = self.look(include_str!("sql/doctor_indexes.sql"), &self.place()).await?;
        let (mut found, mut on_claimed_columns, mut is_unique) = (BTreeMap::new(), Vec::new(), false);
        for row in &rows {
            let (name, usable): (String, bool) = (row.try_get("name")?, row.try_get("usable")?);
            let (keys, columns): (Vec<String>, Vec<String>) = (row.try_get("key_columns")?, row.try_get("columns")?);
            is_unique |= usable && row.try_get::<_, bool>("is_unique")? && keys == ["source", "message_id"];
            if columns.iter().any(|column| CLAIMED.contains(&column.as_str())) {
                on_claimed_columns.push(name.clone());
            }
            found.insert(name, usable);
        }
        let state = |name: &String| match found.get(name) {
            Some(true) => IndexState::There,
            Some(false) => IndexState::Invalid,
            None => IndexState::Missing,
        };
        let mut expected: Vec<IndexFact> = names::indexes(profile, &self.table)
            .filter(|(place, _)| *place != UNIQUE_PLACE)
            .map(|(place, name)| IndexFact { place, state: state(&name), name })
            .collect();
        // Whatever its name: keiro's migrations leave it to the server.
        let state = if is_unique { IndexState::There } else { IndexState::Missing };
        expected.insert(0, IndexFact { place: UNIQUE_PLACE, name: unique_name(&self.table), state });
        Ok(Indexes { expected, on_claimed_columns })
    }

    /// The statement that makes an index of the profile on a table in use.
    #[must_use]
    pub fn create_index(&self, profile: Profile, index: &IndexFact) -> String {
        let (table, name) = (qualified(&self.schema, &self.table), quoted(&index.name));
        if index.place == UNIQUE_PLACE {
            return format!("create unique index concurrently {name} on {table} (source, message_id);");
        }
        // As `migrate` makes it.
        let sql = super::table_sql(profile, &self.schema, &self.table);
        let statement = sql.split(';').find_map(|statement| statement.split_once(&format!("create index {name} on ")));
        let rest = statement.map_or("", |(_, rest)| rest);
        let words: Vec<&str> = rest.split_whitespace().collect();
        format!("create index concurrently {name} on {};", words.join(" "))
    }

    /// The first live rows of each of these sources.
    pub async fn front(&self, shape: &Shape, sources: &[String], lease: Duration) -> Result<Front, StoreError> {
        let (least, most) = FRONT_ROWS_OF_A_SOURCE;
        let rows_max = (FRONT_ROWS / sources.len().max(1)).clamp(least, most);
        let sql = self.written(include_str!("sql/doctor_front.sql"), shape);
        let limit = i64::try_from(rows_max).unwrap_or(i64::MAX);
        let params: [Param<'_>; 3] = [(&sources, Type::TEXT_ARRAY), (&limit, Type::INT8), (&micros(lease), Type::INT8)];
        let rows = self.look(&sql, &params).await?;
        let read = |row: &Row| -> Result<FrontRows, StoreError> {
            Ok(FrontRows {
                source: row.try_get("source")?,
                topic: row.try_get("destination")?,
                status: row.try_get("status")?,
                rows: row.try_get("rows")?,
                published: row.try_get("published")?,
                never: row.try_get("never")?,
                far: row.try_get("far")?,
                held: row.try_get("held")?,
                due: row.try_get("due")?,
                expired: row.try_get("expired")?,
                keyless: row.try_get("keyless")?,
                largest: row.try_get("largest")?,
            })
        };
        let groups = rows.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let mut by_source: BTreeMap<&str, i64> = BTreeMap::new();
        for group in &groups {
            *by_source.entry(&group.source).or_default() += group.rows;
        }
        let capped = by_source.into_iter().filter(|(_, rows)| *rows >= limit).map(|(source, _)| source.to_owned());
        Ok(Front { rows_max, capped: capped.collect(), groups })
    }

    /// The topics of the rows that were sent last.
    pub async fn sent_topics(&self, shape: &Shape) -> Result<Vec<SentTopic>, StoreError> {
        let sql = self.written(include_str!("sql/doctor_sent_topics.sql"), shape);
        let rows = self.look(&sql, &[(&SENT_ROWS, Type::INT8)]).await?;
        rows.iter()
            .map(|row| Ok(SentTopic { topic: row.try_get("destination")?, keyless: row.try_get("keyless")? }))
            .collect()
    }

    /// Counts sent rows without published_at, up to one more than [`UNDATED_MAX`].
    pub async fn sent_undated(&self, shape: &Shape) -> Result<i64, StoreError> {
        let sql = self.written(include_str!("sql/doctor_sent_undated.sql"), shape);
        let rows = self.look(&sql, &[(&(UNDATED_MAX + 1), Type::INT8)]).await?;
        rows.first().map_or(Ok(0), |row| Ok(row.try_get("rows")?))
    }

    /// The table's name, quoted, for statements that are shown.
    #[must_use]
    pub fn table_in_sql(&self) -> String {
        qualified(&self.schema, &self.table)
    }

    /// The table's schema.
    #[must_use]
    pub fn schema(&self) -> &str {
        &self.schema
    }

    fn place(&self) -> [Param<'_>; 2] {
        [(&self.schema, Type::TEXT), (&self.table, Type::TEXT)]
    }

    fn written(&self, sql: &str, shape: &Shape) -> String {
        sql.replace("{table}", &self.table_in_sql()).replace("{in_live_index}", in_live_index(shape.profile))
    }

    /// One statement in a transaction of its own that can change nothing.
    async fn look(&self, sql: &str, params: &[Param<'_>]) -> Result<Vec<Row>, StoreError> {
        let mut tx = self.db.begin_read_only(LOOK_MAX).await?;
        let rows = tx.query(sql, params, LOOK_MAX).await?;
        tx.commit(LOOK_MAX).await?;
        Ok(rows)
    }
}

/// The place of the index that makes (source, message_id) unique.
const UNIQUE_PLACE: &str = "message_id_key";

fn unique_name(table: &str) -> String {
    names::indexes(Profile::Lean, table)
        .find_map(|(place, name)| (place == UNIQUE_PLACE).then_some(name))
        .unwrap_or_else(|| UNIQUE_PLACE.to_owned())
}
