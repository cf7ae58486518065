//! What `verify` reads of the table: the rows sent in a range, and their names.
//!
//! Nothing here ever changes anything. The rows are read through a cursor, a few thousand at a time, from one snapshot.

use std::time::Duration;

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::names::qualified;
use super::{Param, Store, StoreError, When};
use crate::domain::message::{PgTime, Position};
use crate::domain::verify::SentRow;

/// Rows fetched at once.
const FETCH: &str = "fetch 5000 from keiro_relay_sent";

/// Which rows.
#[derive(Debug, Clone, Copy)]
pub struct SentRange<'a> {
    /// Of this source.
    pub source: Option<&'a str>,
    /// For this topic.
    pub topic: Option<&'a str>,
    /// Published from then on.
    pub since: When,
    /// Published before; the database's now when it is not given.
    pub until: Option<When>,
}

/// A range as the database understood it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instants {
    /// From here on.
    pub since: PgTime,
    /// Before this.
    pub until: PgTime,
    /// The same for people.
    pub since_text: String,
    /// The same for people.
    pub until_text: String,
}

/// What people call a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowName {
    /// Its id.
    pub outbox_id: Uuid,
    /// Its source.
    pub source: String,
    /// Its message_id.
    pub message_id: String,
    /// Its topic.
    pub topic: String,
    /// When its transaction began.
    pub created_at: String,
    /// When it was published.
    pub published_at: Option<String>,
}

impl Store {
    /// What the range means now.
    pub async fn instants(&self, range: &SentRange<'_>) -> Result<Instants, StoreError> {
        let bound = self.bound;
        let mut tx = self.db.begin_read_only(bound).await?;
        let one =
            |row: Option<tokio_postgres::Row>| row.ok_or_else(|| StoreError::Protocol("no row came back".to_owned()));
        let now: PgTime =
            one(tx.query_opt("select statement_timestamp() as now", &[], bound).await?)?.try_get("now")?;
        let since = range.since.instant(now);
        let until = range.until.map_or(now, |until| until.instant(now));
        let params: [Param<'_>; 2] = [(&since, Type::TIMESTAMPTZ), (&until, Type::TIMESTAMPTZ)];
        let texts = one(tx.query_opt("select $1::text as since, $2::text as until", &params, bound).await?)?;
        tx.commit(bound).await?;
        Ok(Instants { since, until, since_text: texts.try_get("since")?, until_text: texts.try_get("until")? })
    }

    /// Hands over every sent row of the range, until `each` says that it has enough.
    pub async fn sent_rows(
        &self,
        range: &SentRange<'_>,
        instants: &Instants,
        mut each: impl FnMut(&SentRow<'_>) -> bool,
    ) -> Result<(), StoreError> {
        let bound: Duration = self.bound;
        let sql = include_str!("sql/verify_sent.sql").replace("{table}", &qualified(&self.schema, &self.table));
        let params: [Param<'_>; 4] = [
            (&instants.since, Type::TIMESTAMPTZ),
            (&instants.until, Type::TIMESTAMPTZ),
            (&range.source, Type::TEXT),
            (&range.topic, Type::TEXT),
        ];
        let mut tx = self.db.begin_read_only(bound).await?;
        tx.execute(&sql, &params, bound).await?;
        loop {
            let rows = tx.query(FETCH, &[], bound).await?;
            for row in &rows {
                let outbox_id = row.try_get("outbox_id")?;
                let row = SentRow {
                    position: Position { created_at: row.try_get("created_at")?, outbox_id },
                    published_at: row.try_get("published_at")?,
                    source: row.try_get("source")?,
                    topic: row.try_get("destination")?,
                    message_id: row.try_get("message_id")?,
                    key: row.try_get("message_key")?,
                };
                if !each(&row) {
                    return Ok(());
                }
            }
            if rows.is_empty() {
                return tx.commit(bound).await;
            }
        }
    }

    /// What people call these rows; those that are gone meanwhile are left out.
    pub async fn names(&self, ids: &[Uuid]) -> Result<Vec<RowName>, StoreError> {
        let sql = include_str!("sql/verify_names.sql").replace("{table}", &qualified(&self.schema, &self.table));
        let bound = self.bound;
        let mut tx = self.db.begin_read_only(bound).await?;
        let rows = tx.query(&sql, &[(&ids, Type::UUID_ARRAY)], bound).await?;
        tx.commit(bound).await?;
        rows.iter()
            .map(|row| {
                Ok(RowName {
                    outbox_id: row.try_get("outbox_id")?,
                    source: row.try_get("source")?,
                    message_id: row.try_get("message_id")?,
                    topic: row.try_get("destination")?,
                    created_at: row.try_get("created_at")?,
                    published_at: row.try_get("published_at")?,
                })
            })
            .collect()
    }
}
