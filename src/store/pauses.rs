//! The side table of pauses: read by every relay, written by `pause` and `resume`.
//!
//! Nothing here ever touches the outbox table. Where the side table is missing, or may not be read, that is said, and nothing is paused.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::claim::to_bigint;
use super::{PAUSE_CHANNEL, Param, Store, StoreError};
use crate::domain::message::PgTime;
use crate::domain::pause::{Pause, PauseTarget, Pauses};

/// Pauses of one table that `pause` makes at most: every claim carries them.
pub const PAUSES_MAX: usize = 1_000;
/// And that are read at most, whoever made them.
const PAUSES_READ_MAX: usize = 10_000;

/// Waiting rows that are looked at for a topic.
const TOPIC_ROWS: usize = 100_000;

/// Why the pauses could not be read or changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PausesError {
    /// There is no side table.
    #[error(
        "there is no table keiro_relay.pauses, so nothing can be paused; `keiro-relay migrate`, run by a user who may create it, \
         makes it (`migrate --dry-run` prints the SQL)"
    )]
    Missing,
    /// Our user may not do this.
    #[error(
        "{text}; the relay's user needs usage on schema keiro_relay and select on keiro_relay.pauses, an operator's also insert, \
             update and delete"
    )]
    Forbidden {
        /// What the server said.
        text: String,
    },
    /// The end that was asked for has passed by the database's clock.
    #[error("the pause would be over already: its end has passed by the database's clock")]
    Over,
    /// One more would be too many.
    #[error(
        "{PAUSES_MAX} pauses are in force already, and every claim carries them: pause the source or the topic instead"
    )]
    TooMany,
    /// Anything else about the database.
    #[error(transparent)]
    Store(StoreError),
}

impl From<StoreError> for PausesError {
    fn from(error: StoreError) -> Self {
        match error.code() {
            Some("42P01" | "3F000") => Self::Missing,
            Some("42501") => {
                // The general advice is about the outbox table.
                let text = error.to_string();
                Self::Forbidden { text: text.split(';').next().unwrap_or_default().to_owned() }
            }
            _ => Self::Store(error),
        }
    }
}

/// When a new pause ends by itself, by the database's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PauseEnd {
    /// When somebody resumes it.
    Never,
    /// At this instant.
    At(PgTime),
    /// After this long.
    In(Duration),
}

/// What `pause` did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paused {
    /// The pause that is in force now.
    pub pause: Pause,
    /// Whether it was in force before, perhaps with another end or reason.
    pub before: bool,
}

impl Store {
    /// Returns what is paused now.
    ///
    /// # Errors
    /// [`PausesError::Missing`] and [`PausesError::Forbidden`] mean that this table has no pauses for us.
    pub async fn pauses(&self) -> Result<Pauses, PausesError> {
        let (schema, table) = self.table_name();
        let params: [Param<'_>; 3] =
            [(&schema, Type::TEXT), (&table, Type::TEXT), (&to_bigint(PAUSES_READ_MAX), Type::INT8)];
        let rows = self.query(include_str!("sql/pauses.sql"), &params).await?;
        Ok(Pauses::new(rows.iter().map(pause).collect::<Result<_, _>>()?))
    }

    /// Pauses something and tells the relays. One that is paused already gets the new end, and the new reason if there is one.
    /// With `dry_run` nothing changes.
    ///
    /// # Errors
    /// [`PausesError`]; nothing was changed then.
    pub async fn pause(
        &self,
        target: &PauseTarget,
        end: PauseEnd,
        reason: Option<&str>,
        dry_run: bool,
    ) -> Result<Paused, PausesError> {
        let (schema, table) = self.table_name();
        let key = target.message_key().unwrap_or_default();
        let (at, micros) = match end {
            PauseEnd::Never => (None, None),
            PauseEnd::At(at) => (Some(at), None),
            PauseEnd::In(after) => (None, Some(i64::try_from(after.as_micros()).unwrap_or(i64::MAX))),
        };
        let params: [Param<'_>; 8] = [
            (&schema, Type::TEXT),
            (&table, Type::TEXT),
            (&target.kind(), Type::TEXT),
            (&target.name(), Type::TEXT),
            (&key, Type::TEXT),
            (&at, Type::TIMESTAMPTZ),
            (&micros, Type::INT8),
            (&reason, Type::TEXT),
        ];
        let mut tx = self.db.begin(self.bound).await?;
        tx.execute(include_str!("sql/forget_pauses.sql"), &params[..2], self.bound).await?;
        let rows = tx.query(include_str!("sql/pause.sql"), &params, self.bound).await?;
        let row = rows.first().ok_or_else(|| StoreError::Protocol("PAUSE returned no row".to_owned()))?;
        let (paused, over): (_, bool) = (
            Paused { pause: pause(row)?, before: row.try_get("paused_before").map_err(StoreError::from)? },
            row.try_get("over").map_err(StoreError::from)?,
        );
        if over {
            return Err(PausesError::Over);
        }
        let limit: [Param<'_>; 3] =
            [(&schema, Type::TEXT), (&table, Type::TEXT), (&to_bigint(PAUSES_MAX + 1), Type::INT8)];
        if !paused.before && tx.query(include_str!("sql/pauses.sql"), &limit, self.bound).await?.len() > PAUSES_MAX {
            return Err(PausesError::TooMany);
        }
        if !dry_run {
            self.tell_pauses(&mut tx).await?;
            tx.commit(self.bound).await?;
        }
        Ok(paused)
    }

    /// Ends a pause and tells the relays; returns it, or `None` when there is none. With `dry_run` nothing changes.
    ///
    /// # Errors
    /// [`PausesError`]; nothing was changed then.
    pub async fn unpause(&self, target: &PauseTarget, dry_run: bool) -> Result<Option<Pause>, PausesError> {
        let (schema, table) = self.table_name();
        let key = target.message_key().unwrap_or_default();
        let params: [Param<'_>; 5] = [
            (&schema, Type::TEXT),
            (&table, Type::TEXT),
            (&target.kind(), Type::TEXT),
            (&target.name(), Type::TEXT),
            (&key, Type::TEXT),
        ];
        let mut tx = self.db.begin(self.bound).await?;
        tx.execute(include_str!("sql/forget_pauses.sql"), &params[..2], self.bound).await?;
        let rows = tx.query(include_str!("sql/unpause.sql"), &params, self.bound).await?;
        let ended = rows.first().map(pause).transpose()?;
        if !dry_run {
            self.tell_pauses(&mut tx).await?;
            tx.commit(self.bound).await?;
        }
        Ok(ended)
    }

    /// Whether there is a row that a pause would hold back; of a topic only as far as the first waiting rows show. So that a slip of
    /// the pen is noticed.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn waits(&self, target: &PauseTarget) -> Result<bool, StoreError> {
        let statements = self.statements()?;
        let rows = match target {
            PauseTarget::Source(name) => self.query(&statements.waiting_source, &[(name, Type::TEXT)]).await?,
            PauseTarget::Topic(name) => {
                let params: [Param<'_>; 2] = [(name, Type::TEXT), (&to_bigint(TOPIC_ROWS), Type::INT8)];
                self.query(&statements.waiting_topic, &params).await?
            }
            PauseTarget::Lane { source_name, message_key } => {
                let params: [Param<'_>; 2] = [(source_name, Type::TEXT), (message_key, Type::TEXT)];
                self.query(&statements.waiting_lane, &params).await?
            }
        };
        rows.first().map_or(Ok(false), |row| Ok(row.try_get("found")?))
    }

    async fn tell_pauses(&self, tx: &mut super::Tx) -> Result<(), StoreError> {
        let params: [Param<'_>; 1] = [(&PAUSE_CHANNEL, Type::TEXT)];
        tx.execute("select pg_notify($1, '')", &params, self.bound).await.map(drop)
    }
}

fn pause(row: &Row) -> Result<Pause, StoreError> {
    let (kind, name): (&str, String) = (row.try_get("kind")?, row.try_get("name")?);
    let target = match kind {
        "source" => PauseTarget::Source(name),
        "topic" => PauseTarget::Topic(name),
        "lane" => PauseTarget::Lane { source_name: name, message_key: row.try_get("message_key")? },
        other => return Err(StoreError::Protocol(format!("keiro_relay.pauses holds a kind nobody knows: {other:?}"))),
    };
    Ok(Pause {
        target,
        since: row.try_get("paused_at")?,
        until: row.try_get("paused_until")?,
        by: row.try_get("paused_by")?,
        reason: row.try_get("reason")?,
    })
}
