//! `keiro-relay migrate`: makes the table or adopts it, and says which.
//!
//! Nothing here ever decides what is done to the database: `store::migrate` does.

use std::io::{self, Write};

use crate::store::{self, Db, ErrorKind, MigrateError, Profile};

/// What the command was given.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// `--profile`, for a table that does not exist yet.
    pub profile: Option<Profile>,
    /// `--dry-run`: print the statements and change nothing.
    pub dry_run: bool,
}

/// Runs the command and returns its exit code: 0 done, 1 failed, 78 when a person must change something first.
///
/// With `dry_run` the output is a script: what was found stands in comments.
///
/// # Errors
/// Only those of the two outputs.
pub async fn run(
    db: &Db,
    schema: &str,
    table: &str,
    options: Options,
    out: &mut (impl Write + Send),
    err: &mut (impl Write + Send),
) -> io::Result<u8> {
    match store::migrate(db, schema, table, options.profile, options.dry_run).await {
        Ok(report) if options.dry_run => {
            for line in report.to_string().lines() {
                writeln!(out, "-- {line}")?;
            }
            write!(out, "{}", report.sql)?;
            Ok(0)
        }
        Ok(report) => {
            write!(out, "{report}")?;
            Ok(0)
        }
        Err(error) => {
            writeln!(err, "migrate: {error}")?;
            Ok(exit_code(&error))
        }
    }
}

fn exit_code(error: &MigrateError) -> u8 {
    match error {
        MigrateError::Unusable(_) | MigrateError::History(_) | MigrateError::Setting(_) => 78,
        MigrateError::Store { cause, .. } => match cause.kind() {
            ErrorKind::Mismatch | ErrorKind::Auth | ErrorKind::Fatal => 78,
            ErrorKind::Transient | ErrorKind::Serialization => 1,
        },
    }
}
