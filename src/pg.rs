//! What both halves of the library need of PostgreSQL: names in SQL text, `timestamptz` over its full range, texts that are safe to show.
//!
//! Nothing here ever talks to a server, and nothing here ever puts a value into SQL text.

use std::error::Error;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

use crate::domain::message::PgTime;

/// Longest identifier the server keeps; longer ones it would cut in silence.
pub(crate) const NAME_BYTES_MAX: usize = 63;

/// An identifier as SQL wants it, whatever it contains.
#[must_use]
pub fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// The table's name with its schema, quoted.
#[must_use]
pub fn qualified(schema: &str, table: &str) -> String {
    format!("{}.{}", quoted(schema), quoted(table))
}

/// Whether the primary message of a SQLSTATE may quote a value: data exceptions do, and what triggers raise may.
pub(crate) fn message_may_quote_values(code: &str) -> bool {
    code.starts_with("22") || code.starts_with("P0")
}

impl<'a> FromSql<'a> for PgTime {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        // The wire form is the stored form: microseconds since 2000-01-01, the infinities at both ends of the range.
        i64::from_sql(&Type::INT8, raw).map(PgTime).map_err(|error| format!("{ty}: {error}").into())
    }

    accepts!(TIMESTAMPTZ);
}

impl ToSql for PgTime {
    fn to_sql(&self, _ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        self.0.to_sql(&Type::INT8, out)
    }

    accepts!(TIMESTAMPTZ);
    to_sql_checked!();
}
