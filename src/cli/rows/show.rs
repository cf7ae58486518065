//! `show`: one row with all its columns.
//!
//! Nothing here ever reads a payload that was not asked for.

use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use serde::ser::{Serialize, SerializeMap as _, Serializer};
use uuid::Uuid;

use super::filter::parse_id;
use super::text::{distance, escaped, json_line};
use super::{Look, failed, open};
use crate::cli::{EXIT_OK, EXIT_STATE, complain};
use crate::config::Config;
use crate::domain::message::PgTime;
use crate::store::{Cell, Record};

/// `show`.
#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Its outbox_id.
    #[arg(value_name = "OUTBOX_ID", value_parser = parse_id)]
    id: Uuid,
    /// The payload, too: as text where it is text, else in base64.
    #[arg(long)]
    payload: bool,
    #[command(flatten)]
    look: Look,
}

/// Prints one row; exit 3 when there is none.
pub(in crate::cli) async fn show(config: &Config, arguments: &ShowArgs, out: &mut impl Write) -> io::Result<u8> {
    let store = match open(config, "show").await {
        Ok(store) => store,
        Err(code) => return Ok(code),
    };
    let read = async {
        let row = store.row(arguments.id, arguments.payload, arguments.look.timeout).await?;
        Ok((row, store.now().await?))
    };
    let (row, now) = match read.await {
        Ok(found) => found,
        Err(error) => return Ok(failed("show", &error, &arguments.look, None)),
    };
    let Some(row) = row else {
        complain(&format!("show: there is no row with outbox_id {}", arguments.id));
        return Ok(EXIT_STATE);
    };
    if arguments.look.json {
        writeln!(out, "{}", json_line(&Whole(&row)))?;
    } else {
        for (name, cell) in row.cells() {
            if let Some(text) = value(cell, now) {
                writeln!(out, "{name:<23} {text}")?;
            }
        }
        if let Some(payload) = row.payload() {
            match payload_text(payload) {
                (name, text) if name == "payload_text" => writeln!(out, "{name:<23} {}", escaped(&text))?,
                (name, text) => writeln!(out, "{name:<23} {text}")?,
            }
        }
    }
    Ok(EXIT_OK)
}

/// A column for people; the payload stands at the end.
fn value(cell: &Cell, now: PgTime) -> Option<String> {
    Some(match cell {
        Cell::Null => "-".to_owned(),
        Cell::Text(text) if text.is_empty() => "''".to_owned(),
        Cell::Text(text) | Cell::Json(text) => escaped(text),
        Cell::Integer(number) => number.to_string(),
        Cell::Time(at) if [PgTime::INFINITY, PgTime::NEG_INFINITY].contains(at) => at.to_string(),
        Cell::Time(at) => format!("{at} ({})", distance(now, *at)),
        Cell::Id(id) => id.to_string(),
        Cell::Bytes(_) => return None,
    })
}

/// The payload under the name that `enqueue` takes it by.
fn payload_text(payload: &[u8]) -> (&'static str, String) {
    match std::str::from_utf8(payload) {
        Ok(text) => ("payload_text", text.to_owned()),
        Err(_) => ("payload_base64", STANDARD.encode(payload)),
    }
}

/// A row as JSON, with its payload when it was read.
struct Whole<'a>(&'a Record);

impl Serialize for Whole<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        self.0.entries(&mut map)?;
        if let Some(payload) = self.0.payload() {
            let (name, text) = payload_text(payload);
            map.serialize_entry(name, &text)?;
        }
        map.end()
    }
}
