//! One connection that stays open over many statements: producers' transactions, and looks at the table many times a second.

use tokio::runtime::Runtime;
use tokio_postgres::Client;

use super::database::{Database, connect};

/// A connection and the runtime that drives it while a statement runs. Not for use inside a runtime.
pub struct Session {
    runtime: Runtime,
    client: Option<Client>,
}

impl Session {
    /// Connects to a test's database.
    pub fn open(database: &Database) -> Self {
        Self::open_url(database.url())
    }

    /// Connects to this URL.
    pub fn open_url(url: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let client = runtime.block_on(connect(url));
        Self { runtime, client: Some(client) }
    }

    /// Runs statements.
    #[track_caller]
    pub fn execute(&mut self, statements: &str) {
        if let Err(error) = self.try_execute(statements) {
            panic!("{error:?} in: {statements}");
        }
    }

    /// Runs statements that may fail.
    pub fn try_execute(&mut self, statements: &str) -> Result<(), tokio_postgres::Error> {
        let client = self.client.as_ref().expect("open until dropped");
        self.runtime.block_on(client.batch_execute(statements))
    }

    /// The first column of the first row of a query, as text; null is empty.
    #[track_caller]
    pub fn value(&mut self, query: &str) -> String {
        self.values(query).into_iter().next().unwrap_or_else(|| panic!("no row from: {query}"))
    }

    /// The first column of every row, as text; null is empty.
    #[track_caller]
    pub fn values(&mut self, query: &str) -> Vec<String> {
        let client = self.client.as_ref().expect("open until dropped");
        let messages =
            self.runtime.block_on(client.simple_query(query)).unwrap_or_else(|e| panic!("{e:?} in: {query}"));
        let row = |message| match message {
            tokio_postgres::SimpleQueryMessage::Row(row) => Some(row.get(0).unwrap_or_default().to_owned()),
            _ => None,
        };
        messages.into_iter().filter_map(row).collect()
    }

    /// A count.
    #[track_caller]
    pub fn count(&mut self, query: &str) -> usize {
        self.value(query).parse().unwrap_or_else(|_| panic!("no number from: {query}"))
    }

    /// How many rows of the outbox meet a condition.
    #[track_caller]
    pub fn rows(&mut self, condition: &str) -> usize {
        self.count(&format!("select count(*) from keiro.keiro_outbox where {condition}"))
    }

    /// `status=count` of every status, in order, by spaces.
    #[track_caller]
    pub fn statuses(&mut self, condition: &str) -> String {
        self.value(&format!(
            "select coalesce(string_agg(status || '=' || n, ' ' order by status), '') from \
             (select status, count(*) as n from keiro.keiro_outbox where {condition} group by status) s"
        ))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        drop(self.client.take());
    }
}
