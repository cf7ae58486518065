//! Tables full of rows, made in the database by one statement each.
//!
//! Nothing here ever measures.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::harness::Scratch;

/// How long filling a table may take.
const FILL_MAX: Duration = Duration::from_secs(600);

/// Rows to insert.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load<'a> {
    pub rows: usize,
    /// Rows go to these in turn.
    pub sources: usize,
    /// Keys of each source, in turn.
    pub keys: usize,
    /// Payload of a row: digits and letters that do not compress well.
    pub payload_bytes: usize,
    pub topic: &'a str,
    /// Before every message id, so that several loads fit into one table.
    pub mark: &'a str,
    /// Before the number of every key.
    pub key: &'a str,
    /// created_at of the first row, in seconds before now; the next rows follow a microsecond apart.
    pub seconds_ago: i32,
}

impl Load<'_> {
    /// The name of a source.
    pub(super) fn source(number: usize) -> String {
        format!("source-{number}")
    }

    /// Inserts the rows, pending and due, in one transaction.
    ///
    /// # Errors
    /// What the database says.
    pub(super) async fn insert(&self, scratch: &Scratch) -> Result<(), String> {
        const SQL: &str = "
insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type,
  payload_bytes, attributes, occurred_at, created_at, next_attempt_at)
select (lpad(to_hex(i), 12, '0') || '7000' || '8' || substr(md5($8 || i), 1, 15))::uuid, $8 || '-' || i,
  'source-' || (i % $2), $6, $9 || '-' || (i / $2 % $3), 'bench.happened', 1, 'application/json',
  convert_to(left((select string_agg(md5($8 || i || '-' || j), '') from generate_series(1, $4 / 32 + 1) j), $4), 'UTF8'),
  '{\"bench\": true}', at.created + i * interval '1 microsecond', at.created + i * interval '1 microsecond', at.created
from generate_series(0, $1 - 1) i, (select clock_timestamp() - $5 * interval '1 second' as created where $7) at";
        let count = |number: usize| i32::try_from(number).expect("a bench has fewer than two billion rows");
        let (rows, sources, keys, bytes) =
            (count(self.rows), count(self.sources), count(self.keys), count(self.payload_bytes));
        let always = true;
        scratch
            .session()
            .await?
            .execute(
                SQL,
                &[
                    (&rows, Type::INT4),
                    (&sources, Type::INT4),
                    (&keys, Type::INT4),
                    (&bytes, Type::INT4),
                    (&self.seconds_ago, Type::INT4),
                    (&self.topic, Type::TEXT),
                    (&always, Type::BOOL),
                    (&self.mark, Type::TEXT),
                    (&self.key, Type::TEXT),
                ],
                FILL_MAX,
            )
            .await
            .map(drop)
            .map_err(|error| format!("fill the table: {error}"))
    }
}
