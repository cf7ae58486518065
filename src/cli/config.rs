//! `config check` and `config print`: what a configuration says, without running it.
//!
//! Nothing here ever contacts a server, and nothing here ever prints a secret.

use std::io::{self, Write};
use std::path::Path;

use crate::config::{Config, Loaded, Overrides, Problems};

/// The configuration can be run.
const EXIT_DONE: u8 = 0;
/// It cannot: sysexits' EX_CONFIG.
const EXIT_CONFIG: u8 = 78;

/// `config check`: "ok" on `out` and warnings on `err`, or every problem on `err`; returns the exit code.
pub fn check(
    path: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: Overrides,
    out: &mut impl Write,
    err: &mut impl Write,
) -> io::Result<u8> {
    report(Config::load(path, environment, flags), err, |loaded| {
        let file = loaded.file.as_ref().map_or("no file".to_owned(), |file| file.display().to_string());
        writeln!(out, "ok: {file}, policy hash {}", loaded.config.policy_hash())
    })
}

/// `config print`: what is in force on `out`, as TOML with the origin of each value; problems and warnings as `check` has them.
pub fn print(
    path: Option<&Path>,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: Overrides,
    out: &mut impl Write,
    err: &mut impl Write,
) -> io::Result<u8> {
    report(Config::load(path, environment, flags), err, |loaded| out.write_all(loaded.to_toml().as_bytes()))
}

fn report(
    loaded: Result<Loaded, Problems>,
    err: &mut impl Write,
    done: impl FnOnce(&Loaded) -> io::Result<()>,
) -> io::Result<u8> {
    match loaded {
        Ok(loaded) => {
            for warning in &loaded.warnings {
                writeln!(err, "warning: {warning}")?;
            }
            done(&loaded)?;
            Ok(EXIT_DONE)
        }
        Err(problems) => {
            writeln!(err, "{problems}")?;
            Ok(EXIT_CONFIG)
        }
    }
}
