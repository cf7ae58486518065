//! Rows for the relay to send, and what the oracle has to find of them.

use super::database::Database;
use super::session::Session;

/// Which rows of a source must keep their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Those of a key.
    Key,
    /// All.
    Source,
    /// None.
    None,
}

/// Writes rows of one source to one topic, in order, and remembers them.
///
/// `created_at` counts up in milliseconds from a day long ago, so that the order is known before anything is read back.
#[derive(Debug, Clone)]
pub struct Feed {
    pub source: String,
    pub topic: String,
    order: Order,
    /// Rows written so far.
    pub written: usize,
    expected: Vec<(String, String)>,
}

impl Feed {
    /// A feed that has written nothing.
    pub fn new(source: &str, topic: &str, order: Order) -> Self {
        Self { source: source.to_owned(), topic: topic.to_owned(), order, written: 0, expected: Vec::new() }
    }

    /// Writes rows over so many keys, in one transaction; 0 keys are null keys.
    #[track_caller]
    pub fn insert(&mut self, database: &Database, rows: usize, keys: usize) {
        self.insert_in(&mut Session::open(database), rows, keys);
    }

    /// [`Feed::insert`] over a connection that is there.
    #[track_caller]
    pub fn insert_in(&mut self, session: &mut Session, rows: usize, keys: usize) {
        let statement = self.statement(rows, keys);
        session.execute(&statement);
    }

    /// The statement of [`Feed::insert`], which the caller runs.
    pub fn statement(&mut self, rows: usize, keys: usize) -> String {
        let (first, end) = (self.written, self.written + rows);
        for row in first..end {
            let id = self.id(row);
            let lane = match self.order {
                Order::Source => self.source.clone(),
                Order::Key if keys > 0 => format!("{}/k{}", self.source, row % keys),
                Order::Key | Order::None => id.clone(),
            };
            self.expected.push((lane, id));
        }
        self.written = end;
        let source = self.source.replace('\'', "''");
        let key = if keys == 0 { "null".to_owned() } else { format!("'k' || (n % {keys})") };
        format!(
            "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, \
             schema_version, content_type, payload_bytes, occurred_at, created_at) \
             select gen_random_uuid(), '{source}-' || lpad(n::text, 6, '0'), '{source}', '{topic}', {key}, 'Happened', 1, \
             'application/json', convert_to('{{\"n\":' || n || '}}', 'UTF8'), now(), \
             timestamptz '2026-01-01 00:00:00+00' + n * interval '1 ms' from generate_series({first}, {end} - 1) as n",
            topic = self.topic,
        )
    }

    /// The message id of a row.
    pub fn id(&self, row: usize) -> String {
        format!("{}-{row:06}", self.source)
    }

    /// `(lane, message_id)` of what was written, in order.
    pub fn expected(&self) -> &[(String, String)] {
        &self.expected
    }

    /// The same without rows that must never arrive.
    pub fn expected_without(&self, rows: &[usize]) -> Vec<(String, String)> {
        let without: Vec<String> = rows.iter().map(|row| self.id(*row)).collect();
        self.expected.iter().filter(|(_, id)| !without.contains(id)).cloned().collect()
    }

    /// An SQL condition that selects this source.
    pub fn mine(&self) -> String {
        format!("source = '{}'", self.source.replace('\'', "''"))
    }

    /// An SQL condition that selects one of its rows.
    pub fn row(&self, row: usize) -> String {
        format!("message_id = '{}'", self.id(row).replace('\'', "''"))
    }
}
