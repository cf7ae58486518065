//! What the table at hand looks like: columns, types, permissions, profile, read from the catalogue.
//!
//! Nothing here ever changes anything, and every problem is found in one go.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::db::Db;
use super::error::StoreError;
use super::names::{self, qualified, quoted};

/// How long each look at the catalogue may take.
const LOOK_MAX: Duration = Duration::from_secs(15);
/// Oldest server this is tested with.
const SERVER_VERSION_MIN: i32 = 140_000;

/// The index profile of a table (design §2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Profile {
    /// A table that `keiro-relay migrate` made: claims are HOT updates.
    Lean,
    /// A table that keiro's own migrations made.
    Shared,
}

impl Profile {
    /// The name used on the command line and in `/status`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Lean => "lean",
            Self::Shared => "shared",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a usable table looks like, and what our user may do beside reading and settling.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Whether the table has `rejected_at`, `rejection_code` and `rejection_detail`; without them rejected rows are dead.
    pub rejected_columns: bool,
    /// Lean exactly when both lean checks are on the table and validated: the statements' correctness rests on them.
    pub profile: Profile,
    /// Whether our user may delete rows; without it retention is off.
    pub can_delete: bool,
    /// Whether our user sees other sessions' transactions (`pg_read_all_stats`), which late commits are judged by.
    pub reads_all_stats: bool,
    /// `server_version_num`, such as 180001.
    pub server_version: i32,
    /// Whether the server is a standby, which cannot be written to.
    pub in_recovery: bool,
    /// Whether the table is unlogged: a crash of the server empties it.
    pub unlogged: bool,
    /// Whether the schema `keiro_relay` is there and usable.
    pub relay_schema: bool,
    /// Indexes of the profile that are missing: slower, never wrong.
    pub missing_indexes: Vec<String>,
}

impl Shape {
    /// One line for people: what the table is.
    #[must_use]
    pub fn describe(&self) -> String {
        let columns = if self.rejected_columns { "with" } else { "without" };
        let version = self.server_version;
        format!(
            "{} profile, {columns} rejected columns, PostgreSQL {}.{}",
            self.profile,
            version / 10_000,
            version % 10_000
        )
    }

    /// What works but should be known, one line each; `retention` says whether sent rows are to be deleted.
    #[must_use]
    pub fn warnings(&self, retention: bool) -> Vec<String> {
        let mut warnings = Vec::new();
        if retention && !self.can_delete {
            warnings.push("database: our user may not delete: retention is off; grant DELETE on the table".to_owned());
        }
        if !self.reads_all_stats {
            let text = "database: our user cannot see other sessions' transactions, so rows committed later than a minute after \
                        their transaction began wait for a full sweep (up to 5 minutes); grant pg_read_all_stats to it";
            warnings.push(text.to_owned());
        }
        if self.unlogged {
            warnings.push(
                "database: the table is unlogged: a crash of the server loses its rows; alter table … set logged"
                    .to_owned(),
            );
        }
        if self.in_recovery {
            warnings.push(
                "database: the server is a standby: nothing can be claimed there; name the primary in database.url"
                    .to_owned(),
            );
        }
        if !self.missing_indexes.is_empty() {
            let names = self.missing_indexes.join(", ");
            warnings.push(format!("database: missing indexes make claims slow, not wrong: {names}"));
        }
        warnings
    }
}

/// Why a table cannot be relayed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SchemaProblem {
    /// Older than anything this is tested with.
    #[error("the server is PostgreSQL {}.{}; PostgreSQL 14 to 18 are supported", .0 / 10_000, .0 % 10_000)]
    ServerTooOld(i32),
    /// The server would hand out bytes that are not text.
    #[error(
        "the database's encoding is {0}; texts must be convertible to UTF-8: create the database with encoding UTF8"
    )]
    Encoding(String),
    /// No such schema.
    #[error("schema {0} does not exist; run `keiro-relay migrate`, or correct database.schema")]
    NoSchema(String),
    /// No such table.
    #[error("table {0} does not exist; run `keiro-relay migrate`, or correct database.table")]
    NoTable(String),
    /// A view, a sequence, …
    #[error("{table} is {kind}, not a table; correct database.table")]
    NotATable {
        /// Its name.
        table: String,
        /// What it is.
        kind: &'static str,
    },
    /// A column that the contract has.
    #[error("{table}: column {column:?} is missing; expected {expected}")]
    MissingColumn {
        /// The table.
        table: String,
        /// The column.
        column: &'static str,
        /// Type and nullability.
        expected: String,
    },
    /// A column of another type.
    #[error("{table}: column {column:?} is {found}; expected {expected}")]
    WrongType {
        /// The table.
        table: String,
        /// The column.
        column: &'static str,
        /// Type of the contract.
        expected: &'static str,
        /// Type in the table.
        found: String,
    },
    /// A column that may be null where it must not, or the other way round.
    #[error("{table}: column {column:?} must {} null", if *.may_be_null { "allow" } else { "not allow" })]
    WrongNullability {
        /// The table.
        table: String,
        /// The column.
        column: &'static str,
        /// What the contract says.
        may_be_null: bool,
    },
    /// Without it a row has no identity.
    #[error("{0}: outbox_id is neither the primary key nor unique; add the primary key")]
    NoPrimaryKey(String),
    /// A permission that the relay cannot work without.
    #[error("user {user} lacks {privilege} on {object}; run: grant {privilege} on {object} to {}", quoted(.user))]
    NoPermission {
        /// Our user.
        user: String,
        /// USAGE, SELECT or UPDATE, possibly with columns.
        privilege: String,
        /// Schema or table.
        object: String,
    },
    /// Hidden rows would be overtaken by visible ones.
    #[error("{table}: row security may hide rows from user {user}, and order cannot be kept past hidden rows; run: alter role {} bypassrls", quoted(.user))]
    RowSecurity {
        /// The table.
        table: String,
        /// Our user.
        user: String,
    },
}

/// Why [`inspect`] has no shape to show.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    /// The server could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The table cannot be relayed; all that is wrong with it.
    #[error("database: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\ndatabase: "))]
    Problems(Vec<SchemaProblem>),
}

/// One column of contract §1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContractColumn {
    /// Its name.
    pub name: &'static str,
    /// Its type as `format_type` prints it.
    pub kind: &'static str,
    /// Whether it may be null.
    pub nullable: bool,
    /// Whether the relay writes it.
    written: bool,
}

const fn required(name: &'static str, kind: &'static str) -> ContractColumn {
    ContractColumn { name, kind, nullable: false, written: false }
}

const fn optional(name: &'static str, kind: &'static str) -> ContractColumn {
    ContractColumn { name, kind, nullable: true, written: false }
}

const fn written(column: ContractColumn) -> ContractColumn {
    ContractColumn { written: true, ..column }
}

const TIME: &str = "timestamp with time zone";

/// The columns of every table, in the contract's order.
pub const COLUMNS: [ContractColumn; 29] = [
    required("outbox_id", "uuid"),
    required("message_id", "text"),
    required("source", "text"),
    required("destination", "text"),
    optional("message_key", "text"),
    required("event_type", "text"),
    required("schema_version", "bigint"),
    required("content_type", "text"),
    optional("schema_registry", "text"),
    optional("schema_subject", "text"),
    optional("schema_version_ref", "bigint"),
    optional("schema_id", "bigint"),
    optional("schema_fingerprint", "text"),
    optional("source_event_id", "uuid"),
    optional("source_global_position", "bigint"),
    optional("causation_id", "uuid"),
    optional("correlation_id", "uuid"),
    optional("traceparent", "text"),
    optional("tracestate", "text"),
    required("payload_bytes", "bytea"),
    optional("attributes", "jsonb"),
    required("occurred_at", TIME),
    written(required("status", "text")),
    written(required("attempt_count", "bigint")),
    written(required("next_attempt_at", TIME)),
    written(optional("last_error", "text")),
    written(optional("published_at", TIME)),
    required("created_at", TIME),
    written(required("updated_at", TIME)),
];

/// The columns that only newer tables have: all of them or none.
pub const REJECTED_COLUMNS: [ContractColumn; 3] = [
    written(optional("rejected_at", TIME)),
    written(optional("rejection_code", "text")),
    written(optional("rejection_detail", "text")),
];

/// The checks that make a table lean: name and definition as the server prints it in UTC.
pub const LEAN_CHECKS: [(&str, &str); 2] = [
    ("keiro_relay_sent_check", "CHECK (((status = 'sent'::text) = (published_at IS NOT NULL)))"),
    (
        "keiro_relay_far_check",
        "CHECK (((next_attempt_at < '9999-01-01 00:00:00+00'::timestamp with time zone) OR \
         (status = ANY (ARRAY['sent'::text, 'dead'::text, 'rejected'::text]))))",
    ),
];

/// Looks at the table and at what our user may do with it.
///
/// # Errors
/// Every problem at once, or the error of the way to the server.
pub async fn inspect(db: &Db, schema: &str, table: &str) -> Result<Shape, InspectError> {
    inspect_for(db, schema, table, &["select", "update"]).await
}

/// [`inspect`] for somebody who only reads: that our user may not update is no problem.
///
/// # Errors
/// As [`inspect`].
pub async fn inspect_to_read(db: &Db, schema: &str, table: &str) -> Result<Shape, InspectError> {
    inspect_for(db, schema, table, &["select"]).await
}

async fn inspect_for(db: &Db, schema: &str, table: &str, privileges: &[&str]) -> Result<Shape, InspectError> {
    let Examined { shape, problems, .. } = examine(db, schema, table, privileges).await?;
    match shape {
        Some(shape) if problems.is_empty() => Ok(shape),
        Some(_) | None => Err(InspectError::Problems(problems)),
    }
}

/// What a look at the catalogue said, usable or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Examined {
    /// What the table looks like; `None` when there is no such table. Only without problems is it one that can be relayed.
    pub shape: Option<Shape>,
    /// All that is wrong with it.
    pub problems: Vec<SchemaProblem>,
    /// Our user.
    pub user: String,
}

/// [`inspect`], and also what a table looks like that cannot be relayed. Missing privileges among those named are problems.
///
/// # Errors
/// The error of the way to the server.
pub async fn examine(db: &Db, schema: &str, table: &str, privileges: &[&str]) -> Result<Examined, StoreError> {
    let mut problems = Vec::new();
    let name = qualified(schema, table);
    let look = async |sql: &'static str, with_table: bool| {
        let params = [(&schema as _, Type::TEXT), (&table as _, Type::TEXT)];
        db.query(sql, if with_table { &params } else { &params[..1] }, LOOK_MAX).await
    };

    let rows = look(include_str!("sql/inspect_server.sql"), false).await?;
    let server = Server::read(rows.first())?;
    if server.version < SERVER_VERSION_MIN {
        problems.push(SchemaProblem::ServerTooOld(server.version));
    }
    if server.encoding == "SQL_ASCII" {
        problems.push(SchemaProblem::Encoding(server.encoding.clone()));
    }
    if !server.schema_exists {
        problems.push(SchemaProblem::NoSchema(quoted(schema)));
        return Ok(Examined { shape: None, problems, user: server.user });
    }
    let lacks = |privilege: String, object: String| SchemaProblem::NoPermission {
        user: server.user.clone(),
        privilege,
        object,
    };
    if !server.schema_usable {
        problems.push(lacks("usage".to_owned(), format!("schema {}", quoted(schema))));
    }

    let rows = look(include_str!("sql/inspect_table.sql"), true).await?;
    let Some(relation) = rows.first() else {
        problems.push(SchemaProblem::NoTable(name));
        return Ok(Examined { shape: None, problems, user: server.user });
    };
    let relation = Relation::read(relation)?;
    if let Some(kind) = relation.not_a_table() {
        problems.push(SchemaProblem::NotATable { table: name, kind });
        return Ok(Examined { shape: None, problems, user: server.user });
    }
    if relation.row_security {
        problems.push(SchemaProblem::RowSecurity { table: name.clone(), user: server.user.clone() });
    }

    let columns = Column::read_all(&look(include_str!("sql/inspect_columns.sql"), true).await?)?;
    let rejected_columns = REJECTED_COLUMNS.iter().any(|column| columns.contains_key(column.name));
    let expected = || COLUMNS.iter().chain(REJECTED_COLUMNS.iter().filter(|_| rejected_columns));
    problems.extend(expected().filter_map(|column| column_problem(&name, column, columns.get(column.name))));
    let without = |may: fn(&Column) -> bool, needed: fn(&ContractColumn) -> bool| -> Vec<String> {
        let there = expected().filter(|column| needed(column)).filter_map(|column| columns.get_key_value(column.name));
        there.filter(|(_, column)| !may(column)).map(|(name, _)| quoted(name)).collect()
    };
    for (privilege, whole, without) in [
        ("select", relation.can_select, without(|column| column.can_select, |_| true)),
        ("update", relation.can_update, without(|column| column.can_update, |column| column.written)),
    ] {
        if !privileges.contains(&privilege) {
            continue;
        }
        // Where some columns are granted one by one, those that are not are the ones to name.
        let needed = if privilege == "select" { columns.len() } else { expected().filter(|c| c.written).count() };
        if !whole && !without.is_empty() {
            let some = without.len() < needed;
            let privilege = if some { format!("{privilege} ({})", without.join(", ")) } else { privilege.to_owned() };
            problems.push(lacks(privilege, name.clone()));
        }
    }
    if !relation.unique_outbox_id {
        problems.push(SchemaProblem::NoPrimaryKey(name.clone()));
    }

    let checks = pairs(&look(include_str!("sql/inspect_constraints.sql"), true).await?)?;
    let profile = if LEAN_CHECKS.iter().all(|(name, text)| checks.get(*name).is_some_and(|found| found == text)) {
        Profile::Lean
    } else {
        Profile::Shared
    };
    let indexes = texts(&look(include_str!("sql/inspect_indexes.sql"), true).await?)?;
    let missing_indexes =
        names::indexes(profile, table).map(|(_, name)| name).filter(|name| !indexes.contains(name)).collect();

    let shape = Shape {
        rejected_columns,
        profile,
        can_delete: relation.can_delete,
        reads_all_stats: server.reads_all_stats,
        server_version: server.version,
        in_recovery: server.in_recovery,
        unlogged: relation.persistence == "u",
        relay_schema: server.relay_schema,
        missing_indexes,
    };
    Ok(Examined { shape: Some(shape), problems, user: server.user })
}

fn column_problem(table: &str, expected: &ContractColumn, found: Option<&Column>) -> Option<SchemaProblem> {
    let (table, column) = (table.to_owned(), expected.name);
    let Some(found) = found else {
        let null = if expected.nullable { "null" } else { "not null" };
        return Some(SchemaProblem::MissingColumn { table, column, expected: format!("{} {null}", expected.kind) });
    };
    if found.kind != expected.kind {
        return Some(SchemaProblem::WrongType { table, column, expected: expected.kind, found: found.kind.clone() });
    }
    (found.not_null == expected.nullable).then_some(SchemaProblem::WrongNullability {
        table,
        column,
        may_be_null: expected.nullable,
    })
}

struct Server {
    version: i32,
    encoding: String,
    in_recovery: bool,
    reads_all_stats: bool,
    user: String,
    schema_exists: bool,
    schema_usable: bool,
    relay_schema: bool,
}

impl Server {
    fn read(row: Option<&Row>) -> Result<Self, StoreError> {
        let row = row.ok_or_else(|| StoreError::Protocol("the catalogue answered without a row".to_owned()))?;
        Ok(Self {
            version: row.try_get("server_version")?,
            encoding: row.try_get("encoding")?,
            in_recovery: row.try_get("in_recovery")?,
            reads_all_stats: row.try_get("reads_all_stats")?,
            user: row.try_get("user_name")?,
            schema_exists: row.try_get("schema_exists")?,
            schema_usable: row.try_get("schema_usable")?,
            relay_schema: row.try_get("relay_schema")?,
        })
    }
}

struct Relation {
    kind: String,
    persistence: String,
    can_select: bool,
    can_update: bool,
    can_delete: bool,
    row_security: bool,
    unique_outbox_id: bool,
}

impl Relation {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            kind: row.try_get("kind")?,
            persistence: row.try_get("persistence")?,
            can_select: row.try_get("can_select")?,
            can_update: row.try_get("can_update")?,
            can_delete: row.try_get("can_delete")?,
            row_security: row.try_get("row_security")?,
            unique_outbox_id: row.try_get("unique_outbox_id")?,
        })
    }

    fn not_a_table(&self) -> Option<&'static str> {
        match self.kind.as_str() {
            "r" | "p" => None,
            "v" => Some("a view"),
            "m" => Some("a materialised view"),
            "f" => Some("a foreign table"),
            "i" | "I" => Some("an index"),
            "S" => Some("a sequence"),
            _ => Some("something else"),
        }
    }
}

struct Column {
    kind: String,
    not_null: bool,
    can_select: bool,
    can_update: bool,
}

impl Column {
    fn read_all(rows: &[Row]) -> Result<BTreeMap<String, Self>, StoreError> {
        let read = |row: &Row| {
            let column = Self {
                kind: row.try_get("type")?,
                not_null: row.try_get("not_null")?,
                can_select: row.try_get("can_select")?,
                can_update: row.try_get("can_update")?,
            };
            Ok((row.try_get("name")?, column))
        };
        rows.iter().map(read).collect()
    }
}

fn pairs(rows: &[Row]) -> Result<BTreeMap<String, String>, StoreError> {
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

fn texts(rows: &[Row]) -> Result<BTreeSet<String>, StoreError> {
    rows.iter().map(|row| Ok(row.try_get(0)?)).collect()
}
