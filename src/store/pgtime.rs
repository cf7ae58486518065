//! `timestamptz` to and from [`PgTime`], over the column's full range.

use std::error::Error;

use bytes::BytesMut;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

use crate::domain::message::PgTime;

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
