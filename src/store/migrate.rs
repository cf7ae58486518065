//! Makes the outbox table and the side schema, or adopts what is there: the only DDL of the program.
//!
//! Nothing here ever changes a table that it did not make, and the daemon never calls it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use refinery::{Migration, Runner};
use tokio_postgres::types::Type;

use super::db::{Db, Dedicated};
use super::error::StoreError;
use super::inspect::{InspectError, Profile, SchemaProblem, Shape, inspect};
use super::names::{self, qualified, quoted};

/// The advisory lock that keeps two migrations apart; any number does that no other program uses.
const LOCK_KEY: i64 = 0x6b65_6972_6f52_4c59;
/// How long one migration waits for another, or for whoever holds a table.
const LOCK_WAIT_MAX: Duration = Duration::from_secs(60);
/// How long one step may take once it has its locks.
const STEP_MAX: Duration = Duration::from_secs(600);
/// A limit of the server; longer names it would cut in silence.
const NAME_BYTES_MAX: usize = 63;

/// Why `migrate` did not do its work. What was begun was rolled back, file by file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MigrateError {
    /// The server, or the way to it.
    #[error("{doing}: {cause}")]
    Store {
        /// What was being done.
        doing: String,
        /// What went wrong.
        cause: StoreError,
    },
    /// A table is there that cannot be relayed and is not ours to mend.
    #[error("the table is there, but cannot be relayed; it was left as it is\n{}", .0.iter().map(|problem| format!("  {problem}")).collect::<Vec<_>>().join("\n"))]
    Unusable(Vec<SchemaProblem>),
    /// The numbered files and what is recorded in the database do not fit together.
    #[error("{0}")]
    History(String),
    /// A setting that `migrate` cannot work with.
    #[error("{0}")]
    Setting(String),
}

/// What `migrate` found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// No table.
    Nothing,
    /// A table that an earlier `migrate` made.
    Ours(Shape),
    /// A table that somebody else made.
    Theirs(Shape),
}

/// What `migrate` found and did. `Display` is what people read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// Schema and table, quoted.
    pub table: String,
    /// What was there before.
    pub found: Found,
    /// The profile asked for, if any.
    pub asked: Option<Profile>,
    /// The profile that an earlier migrate made the table with.
    pub made_with: Option<Profile>,
    /// The profile the table has now, or would have.
    pub profile: Profile,
    /// The migrations that were run, or would be.
    pub applied: Vec<String>,
    /// The statements that were run, or would be: complete and in order, except for the history that is kept beside.
    pub sql: String,
    /// Whether nothing was changed on purpose.
    pub dry_run: bool,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { table, profile, .. } = self;
        match &self.found {
            Found::Nothing => {
                let verb = if self.dry_run { "would be created" } else { "created" };
                writeln!(f, "{table}: {verb} with the {profile} profile")?;
                if *profile == Profile::Lean {
                    writeln!(
                        f,
                        "  while rows wait, the table takes about twice their size: the room makes claims cheap"
                    )?;
                }
                writeln!(
                    f,
                    "  the relay's user needs: usage on the schema; select, update and, for retention, delete on {table}; \
                     usage on schema keiro_relay; select on keiro_relay.pauses"
                )?;
            }
            Found::Ours(shape) => {
                writeln!(f, "{table}: made by an earlier migrate; {}", describe(shape))?;
            }
            Found::Theirs(shape) => {
                writeln!(f, "{table}: made by another program, left as it is; {}", describe(shape))?;
            }
        }
        match &self.found {
            Found::Nothing => {}
            Found::Ours(shape) | Found::Theirs(shape) => {
                for index in &shape.missing_indexes {
                    writeln!(f, "  index {index} is missing: slower, never wrong")?;
                }
                if let Some(made_with) = self.made_with.filter(|made_with| made_with != profile) {
                    writeln!(
                        f,
                        "  it was made with the {made_with} profile, but its checks were changed since, so it is served as {profile}"
                    )?;
                }
                if let Some(asked) = self.asked.filter(|asked| asked != profile) {
                    writeln!(
                        f,
                        "  the {asked} profile was asked for; a table keeps the profile it was made with, so nothing was changed"
                    )?;
                }
            }
        }
        for name in &self.applied {
            writeln!(f, "  {} {name}", if self.dry_run { "would run" } else { "ran" })?;
        }
        if self.applied.is_empty() {
            writeln!(f, "  nothing to do")?;
        }
        Ok(())
    }
}

fn describe(shape: &Shape) -> String {
    let columns = if shape.rejected_columns {
        "newer shape (with the rejected columns)"
    } else {
        "older shape (no rejected columns: what would be rejected becomes dead)"
    };
    let logged = if shape.unlogged { ", UNLOGGED: a crash of the server empties it" } else { "" };
    format!("{columns}, {} profile{logged}", shape.profile)
}

/// Makes the table with its side schema, or adopts the table that is there. Safe to run twice, and at the same time.
///
/// `profile` is for a table that does not exist yet (lean when `None`). With `dry_run` nothing changes.
///
/// # Errors
/// [`MigrateError`]; a table of somebody else is never changed.
pub async fn migrate(
    db: &Db,
    schema: &str,
    table: &str,
    profile: Option<Profile>,
    dry_run: bool,
) -> Result<Report, MigrateError> {
    check_name("database.schema", schema)?;
    check_name("database.table", table)?;
    if !db.has_sessions() {
        return Err(MigrateError::Setting(
            "migrate needs a session of its own, and database.prepared_statements = false says that a transaction pooler \
             stands between; run it with a database.url that leads to the server itself and \
             KEIRO_RELAY__DATABASE__PREPARED_STATEMENTS=true"
                .to_owned(),
        ));
    }
    let (mut session, _) = db.dedicated().await.map_err(doing("connecting"))?;
    if !dry_run {
        let prepare = format!(
            "set statement_timeout = 0; set idle_in_transaction_session_timeout = 0; set synchronous_commit = on; \
             set lock_timeout = '{}ms'",
            LOCK_WAIT_MAX.as_millis()
        );
        session.batch(&prepare, STEP_MAX).await.map_err(doing("preparing the session"))?;
        // The lock goes with the session, however this ends.
        let lock = format!("select pg_advisory_lock({LOCK_KEY})");
        session.batch(&lock, STEP_MAX).await.map_err(doing("waiting for another migrate to end"))?;
    }
    let state = State::look(db, &session, schema, table).await?;
    let plan = MigrationPlan::new(&state, schema, table, profile)?;
    if !dry_run {
        plan.run(&mut session, &state, schema, table).await?;
    }
    Ok(Report {
        table: qualified(schema, table),
        found: state.found,
        asked: profile,
        made_with: state.made_with,
        profile: plan.profile,
        applied: plan.names(),
        sql: plan.sql(),
        dry_run,
    })
}

/// What is in the database before anything is done.
struct State {
    found: Found,
    /// The profile in the table's history.
    made_with: Option<Profile>,
    schema_exists: bool,
    relay_schema_exists: bool,
    /// Versions of the side schema that are there.
    relay_applied: Vec<i32>,
    /// Versions of the table that are there.
    table_applied: Vec<i32>,
    /// A history whose table is gone.
    stale_history: bool,
}

impl State {
    async fn look(db: &Db, session: &Dedicated, schema: &str, table: &str) -> Result<Self, MigrateError> {
        let shape = match inspect(db, schema, table).await {
            Ok(shape) => Some(shape),
            Err(InspectError::Store(cause)) => return Err(doing("looking at the table")(cause)),
            Err(InspectError::Problems(problems)) => {
                let absent =
                    |problem: &SchemaProblem| matches!(problem, SchemaProblem::NoSchema(_) | SchemaProblem::NoTable(_));
                if !problems.iter().all(absent) {
                    return Err(MigrateError::Unusable(problems));
                }
                None
            }
        };
        let schema_exists = has_schema(session, schema).await?;
        let relay_schema_exists = has_schema(session, "keiro_relay").await?;
        let relay_history = history(session, RELAY_HISTORY_NAME).await?;
        let table_history = history(session, &history_name(schema, table)).await?;
        let made_with = table_history.iter().flatten().find_map(|(_, name)| made_with(name));
        let stale_history = shape.is_none() && table_history.is_some();
        let found = match (shape, made_with) {
            (None, _) => Found::Nothing,
            (Some(shape), Some(_)) => Found::Ours(shape),
            (Some(shape), None) => Found::Theirs(shape),
        };
        let versions = |history: Option<Vec<(i32, String)>>| {
            history.unwrap_or_default().into_iter().map(|(version, _)| version).collect::<Vec<_>>()
        };
        Ok(Self {
            made_with: made_with.filter(|_| !stale_history),
            found,
            schema_exists,
            relay_schema_exists,
            relay_applied: versions(relay_history),
            table_applied: if stale_history { Vec::new() } else { versions(table_history) },
            stale_history,
        })
    }
}

/// What is to be done, in order.
struct MigrationPlan {
    profile: Profile,
    /// Statements outside any numbered file: the schemas that the files and their histories live in.
    before: Vec<String>,
    relay: Vec<Migration>,
    relay_pending: Vec<Migration>,
    /// Empty for a table that is not ours.
    table: Vec<Migration>,
    table_pending: Vec<Migration>,
}

impl MigrationPlan {
    fn new(state: &State, schema: &str, table: &str, asked: Option<Profile>) -> Result<Self, MigrateError> {
        let mut before = Vec::new();
        // `if not exists` would still ask for the permission to create.
        if !state.relay_schema_exists {
            before.push("create schema keiro_relay".to_owned());
        }
        let profile = match &state.found {
            Found::Nothing => asked.unwrap_or(Profile::Lean),
            Found::Ours(shape) | Found::Theirs(shape) => shape.profile,
        };
        let relay = numbered(&RELAY_FILES, str::to_owned)?;
        let table = match &state.found {
            Found::Theirs(_) => Vec::new(),
            Found::Nothing | Found::Ours(_) => {
                let made_with = state.made_with.unwrap_or(profile);
                if !state.schema_exists {
                    before.push(format!("create schema {}", quoted(schema)));
                }
                if state.stale_history {
                    before.push(format!("drop table {}", history_table(schema, table)));
                }
                numbered(files(made_with), |sql| render(sql, made_with, schema, table))?
            }
        };
        let pending = |all: &[Migration], applied: &[i32]| {
            all.iter().filter(|migration| !applied.contains(&migration.version())).cloned().collect::<Vec<_>>()
        };
        Ok(Self {
            profile,
            before,
            relay_pending: pending(&relay, &state.relay_applied),
            table_pending: pending(&table, &state.table_applied),
            relay,
            table,
        })
    }

    fn pending(&self) -> impl Iterator<Item = &Migration> {
        self.relay_pending.iter().chain(&self.table_pending)
    }

    fn names(&self) -> Vec<String> {
        self.pending().map(ToString::to_string).collect()
    }

    fn sql(&self) -> String {
        let before = self.before.iter().map(|statement| format!("{statement};\n"));
        let files =
            self.pending().map(|migration| format!("\n-- {migration}\n{}", migration.sql().unwrap_or_default()));
        before.chain(files).collect()
    }

    async fn run(&self, session: &mut Dedicated, state: &State, schema: &str, table: &str) -> Result<(), MigrateError> {
        for statement in &self.before {
            let cause = format!("{statement} (needs CREATE on the database)");
            session.batch(statement, STEP_MAX).await.map_err(doing(cause))?;
        }
        apply(session, &self.relay, RELAY_HISTORY_NAME, "keiro_relay.schema_history").await?;
        if !self.table.is_empty() {
            apply(session, &self.table, &history_name(schema, table), &history_table(schema, table)).await?;
        }
        let (profile, origin) = match &state.found {
            Found::Nothing | Found::Ours(_) => (state.made_with.unwrap_or(self.profile), "created"),
            Found::Theirs(_) => (self.profile, "adopted"),
        };
        let params = [
            (&schema as _, Type::TEXT),
            (&table as _, Type::TEXT),
            (&profile.name() as _, Type::TEXT),
            (&origin as _, Type::TEXT),
        ];
        let record = include_str!("sql/record_table.sql");
        session.execute(record, &params, STEP_MAX).await.map_err(doing("recording the table in keiro_relay"))?;
        Ok(())
    }
}

/// Runs those of the numbered files that are not in their history yet.
async fn apply(
    session: &mut Dedicated,
    migrations: &[Migration],
    history: &str,
    history_table: &str,
) -> Result<(), MigrateError> {
    let mut runner = Runner::new(migrations);
    runner.set_migration_table_name(history_table);
    let client = session.client_mut().map_err(doing("migrating"))?;
    let run = tokio::time::timeout(STEP_MAX, runner.run_async(client)).await;
    let error = match run {
        Ok(Ok(_)) => return Ok(()),
        Ok(Err(error)) => error,
        Err(_) => {
            let cause = StoreError::Timeout { waiting_for: "a migration", bound: STEP_MAX };
            return Err(doing("migrating")(cause));
        }
    };
    use refinery::error::Kind;
    Err(match error.kind() {
        Kind::Connection(text, cause) => match cause.downcast_ref::<tokio_postgres::Error>() {
            Some(cause) => doing(text.clone())(StoreError::of(cause)),
            None => MigrateError::History(text.clone()),
        },
        Kind::MissingVersion(migration) => MigrateError::History(format!(
            "keiro_relay.{} has {migration}, which this version does not know: a newer keiro-relay was here; use that one",
            quoted(history)
        )),
        Kind::DivergentVersion(applied, ours) => MigrateError::History(format!(
            "keiro_relay.{} has {applied} with other statements than {ours} of this version; use the version that made \
             the table",
            quoted(history)
        )),
        Kind::InvalidName
        | Kind::InvalidVersion
        | Kind::RepeatedVersion(_)
        | Kind::InvalidMigrationPath(..)
        | Kind::ConfigError(_)
        | Kind::InvalidMigrationFile(..) => MigrateError::History(format!("the numbered files are wrong: {error}")),
    })
}

const RELAY_HISTORY_NAME: &str = "schema_history";

/// A numbered file: its name and its text.
type NumberedFile = (&'static str, &'static str);

const RELAY_FILES: [NumberedFile; 2] = [
    ("V1__outbox_tables", include_str!("../../migrations/relay/V1__outbox_tables.sql")),
    ("V2__pauses", include_str!("../../migrations/relay/V2__pauses.sql")),
];
const LEAN_FILES: [NumberedFile; 1] = [("V1__outbox_lean", include_str!("../../migrations/lean/V1__outbox_lean.sql"))];
const SHARED_FILES: [NumberedFile; 1] =
    [("V1__outbox_shared", include_str!("../../migrations/shared/V1__outbox_shared.sql"))];

fn files(profile: Profile) -> &'static [NumberedFile] {
    match profile {
        Profile::Lean => &LEAN_FILES,
        Profile::Shared => &SHARED_FILES,
    }
}

/// The profile that a table's first numbered file made it with.
fn made_with(migration_name: &str) -> Option<Profile> {
    match migration_name {
        "outbox_lean" => Some(Profile::Lean),
        "outbox_shared" => Some(Profile::Shared),
        _ => None,
    }
}

fn numbered(files: &[NumberedFile], render: impl Fn(&str) -> String) -> Result<Vec<Migration>, MigrateError> {
    files
        .iter()
        .map(|(name, sql)| {
            Migration::unapplied(name, &render(sql))
                .map_err(|error| MigrateError::History(format!("the numbered file {name} is wrong: {error}")))
        })
        .collect()
}

/// The statements that make a table with this profile, without the side schema.
#[must_use]
pub fn table_sql(profile: Profile, schema: &str, table: &str) -> String {
    files(profile).iter().map(|(_, sql)| render(sql, profile, schema, table)).collect::<Vec<_>>().join("\n")
}

/// Puts the names into a file's text, in one pass: a name that looks like a place is not one.
fn render(sql: &str, profile: Profile, schema: &str, table: &str) -> String {
    let mut places: BTreeMap<&str, String> =
        names::indexes(profile, table).chain(names::checks(profile, table)).collect();
    places.insert("schema", schema.to_owned());
    places.insert("table", table.to_owned());
    let mut rendered = String::with_capacity(sql.len() + 1024);
    let mut rest = sql;
    while let Some(open) = rest.find('{') {
        rendered.push_str(&rest[..open]);
        rest = &rest[open..];
        let named = rest.find('}').and_then(|close| Some((close, places.get(&rest[1..close])?)));
        // Other braces, as in a regular expression, stay.
        let taken = named.map_or(1, |(close, _)| close + 1);
        rendered.push_str(&named.map_or_else(|| "{".to_owned(), |(_, name)| quoted(name)));
        rest = &rest[taken..];
    }
    rendered + rest
}

/// The history of one table: its name in full, as far as it fits, and a hash that tells it from every other.
fn history_name(schema: &str, table: &str) -> String {
    names::derived("migrations", &format!("{schema}_{table}"), &names::hash(&qualified(schema, table)))
}

fn history_table(schema: &str, table: &str) -> String {
    qualified("keiro_relay", &history_name(schema, table))
}

async fn has_schema(session: &Dedicated, schema: &str) -> Result<bool, MigrateError> {
    let sql = "select 1 from pg_catalog.pg_namespace where nspname = $1";
    let found = session.query_opt(sql, &[(&schema, Type::TEXT)], STEP_MAX).await;
    Ok(found.map_err(doing("looking for the schema"))?.is_some())
}

/// Version and name of what a history holds, or `None` when there is no such history.
async fn history(session: &Dedicated, name: &str) -> Result<Option<Vec<(i32, String)>>, MigrateError> {
    let sql = "select 1 from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace \
               where n.nspname = 'keiro_relay' and c.relname = $1";
    let failed = doing("reading the history in schema keiro_relay");
    let read = async {
        if session.query_opt(sql, &[(&name, Type::TEXT)], STEP_MAX).await?.is_none() {
            return Ok(None);
        }
        let sql = format!("select version, name from {} order by version", qualified("keiro_relay", name));
        let rows = session.query(&sql, &[], STEP_MAX).await?;
        rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<Vec<_>, StoreError>>().map(Some)
    };
    read.await.map_err(failed)
}

fn check_name(setting: &str, name: &str) -> Result<(), MigrateError> {
    if name.is_empty() || name.len() > NAME_BYTES_MAX || name.contains('\0') {
        return Err(MigrateError::Setting(format!("{setting} = {name:?} must have 1 to {NAME_BYTES_MAX} bytes")));
    }
    Ok(())
}

fn doing(what: impl Into<String>) -> impl FnOnce(StoreError) -> MigrateError {
    let doing = what.into();
    move |cause| MigrateError::Store { doing, cause }
}
