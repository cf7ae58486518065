//! `--cursor`: the place where a page ended, with the time by which its list decides what is due, and a proof of the query it belongs to.
//!
//! Nothing here ever continues another query than the one that the page came from.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use uuid::Uuid;

use crate::domain::message::PgTime;
use crate::store::{Selection, Sort};

/// The layout of the text; another one has another number.
const VERSION: u8 = 1;
/// Version, proof, now, value, id.
const OCTETS: usize = 1 + 8 + 8 + 8 + 16;

/// What makes two lists the same, so that a page of one continues the other.
#[derive(Debug)]
pub struct ListQuery<'a> {
    /// Which table.
    pub table: &'a str,
    /// Which rows.
    pub selection: &'a Selection,
    /// In which order.
    pub sort: Sort,
    /// Backwards.
    pub descending: bool,
}

/// A place in a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    /// The database's time at the first page.
    pub now: PgTime,
    /// The last row's value of the sort column.
    pub value: PgTime,
    /// The last row.
    pub outbox_id: Uuid,
}

impl Cursor {
    /// Its text.
    #[must_use]
    pub fn text(&self, query: &ListQuery<'_>) -> String {
        let mut octets = Vec::with_capacity(OCTETS);
        octets.push(VERSION);
        octets.extend(self.proof(query));
        octets.extend(self.now.0.to_be_bytes());
        octets.extend(self.value.0.to_be_bytes());
        octets.extend(self.outbox_id.as_bytes());
        URL_SAFE_NO_PAD.encode(octets)
    }

    /// Reads a text back.
    ///
    /// # Errors
    /// It is no cursor, or one of another version, or of another query.
    pub fn read(text: &str, query: &ListQuery<'_>) -> Result<Self, String> {
        let damaged = || "--cursor is none of ours: copy the whole text that a page ended with".to_owned();
        let octets = URL_SAFE_NO_PAD.decode(text.trim()).map_err(|_| damaged())?;
        let (version, rest) = octets.split_first().ok_or_else(damaged)?;
        if *version != VERSION {
            return Err(format!(
                "--cursor has version {version} and this program knows {VERSION}: begin at the first page"
            ));
        }
        let (proof, rest) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
        let (now, rest) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
        let (value, id) = rest.split_first_chunk::<8>().ok_or_else(damaged)?;
        let cursor = Self {
            now: PgTime(i64::from_be_bytes(*now)),
            value: PgTime(i64::from_be_bytes(*value)),
            outbox_id: Uuid::from_slice(id).map_err(|_| damaged())?,
        };
        if cursor.proof(query) == *proof {
            Ok(cursor)
        } else {
            Err("--cursor belongs to another query: give the same filters, --sort and --desc as for the page it came from".to_owned())
        }
    }

    fn proof(&self, query: &ListQuery<'_>) -> [u8; 8] {
        let digest = openssl::sha::sha256(format!("{query:?} {self:?}").as_bytes());
        *digest.first_chunk().expect("a digest is longer than eight octets")
    }
}
