//! Why rows were not written.
//!
//! Nothing here ever shows a payload, a key, an attribute or any other value of a row: columns, ids and limits only.

use std::fmt;

use uuid::Uuid;

use crate::pg::message_may_quote_values;

/// Why a batch was not written. All of it was not: it is all rows or none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EnqueueError {
    /// Fields that the table, Kafka or the relay would not take: every one of every row. The database was not asked.
    #[error("{}", listed(.0))]
    Invalid(Vec<RowProblem>),
    /// More rows than one batch may have. The database was not asked.
    #[error("a batch of {rows} rows: at most {rows_max} are allowed; write several batches in one transaction")]
    TooManyRows {
        /// How many there are.
        rows: usize,
        /// [`BATCH_ROWS_MAX`](super::BATCH_ROWS_MAX).
        rows_max: usize,
    },
    /// More octets than one batch may have. The database was not asked.
    #[error("a batch of {octets} octets: at most {octets_max} are allowed; write several batches in one transaction")]
    TooLarge {
        /// How many there are.
        octets: usize,
        /// [`BATCH_OCTETS_MAX`](super::BATCH_OCTETS_MAX).
        octets_max: usize,
    },
    /// Rows whose ids are in the table already, where [`OnDuplicate`](super::OnDuplicate) forbids it: every one of the batch. If other
    /// rows of the batch had been written, the transaction is aborted, so that they cannot stay: roll it back (a nested one is enough).
    #[error("{}", listed(.0))]
    Conflict(Vec<Conflict>),
    /// Others insert and delete rows with the same ids meanwhile. Roll the transaction back and try it again.
    #[error("a row is neither new nor there already: others write and delete it meanwhile; try the transaction again")]
    Contended,
    /// The database refused, or the way to it broke. Roll the transaction back.
    #[error("{0}")]
    Database(DatabaseError),
}

impl EnqueueError {
    /// Whether the same transaction may well succeed when it is tried again from its beginning.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Invalid(_) | Self::TooManyRows { .. } | Self::TooLarge { .. } | Self::Conflict(_) => false,
            Self::Contended => true,
            Self::Database(error) => error.is_transient(),
        }
    }
}

impl From<tokio_postgres::Error> for EnqueueError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Database(DatabaseError(error))
    }
}

fn listed<T: fmt::Display>(problems: &[T]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A field of a row that must not be written as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowProblem {
    /// The row's place in the batch, from 0.
    pub row: usize,
    /// The column.
    pub field: &'static str,
    /// What is wrong and what would be right.
    pub text: String,
}

impl fmt::Display for RowProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows[{}].{}: {}", self.row, self.field, self.text)
    }
}

/// A row whose ids are in the table already.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    /// The row's place in the batch, from 0.
    pub row: usize,
    /// The `outbox_id` in the table, or of an earlier row of the batch.
    pub outbox_id: Uuid,
    /// The columns in which the two differ; empty when they are identical and that is not accepted either.
    pub columns: Vec<String>,
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows[{}]: {}", self.row, self.text())
    }
}

impl Conflict {
    /// What is wrong, without the row's place.
    pub(crate) fn text(&self) -> String {
        if self.columns.is_empty() {
            return format!("is there already, identical, as outbox_id {}", self.outbox_id);
        }
        format!("is there already as outbox_id {}, and differs in {}", self.outbox_id, self.columns.join(", "))
    }
}

/// What the database said. Its text leaves out what may quote a value of the row.
pub struct DatabaseError(tokio_postgres::Error);

impl DatabaseError {
    /// The driver's error. Its detail may quote values of the row: do not log it.
    #[must_use]
    pub fn driver(&self) -> &tokio_postgres::Error {
        &self.0
    }

    /// The SQLSTATE, when the server refused.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        self.0.code().map(tokio_postgres::error::SqlState::code)
    }

    /// Lost connections, two transactions in each other's way, locks, resources, a server that stops.
    fn is_transient(&self) -> bool {
        let class = |class: &str| matches!(class, "08" | "40" | "53" | "55" | "57" | "58");
        self.code().map_or(self.0.is_closed(), |code| code.get(..2).is_some_and(class))
    }
}

impl fmt::Display for DatabaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(db) = self.0.as_db_error() else { return write!(f, "database: {}", self.0) };
        let code = db.code().code();
        let message = if message_may_quote_values(code) { "the server refused a value" } else { db.message() };
        write!(f, "database: {message} (SQLSTATE {code}")?;
        for (what, name) in [("constraint", db.constraint()), ("column", db.column())] {
            if let Some(name) = name {
                write!(f, ", {what} {name:?}")?;
            }
        }
        f.write_str(")")
    }
}

impl fmt::Debug for DatabaseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// No source: whoever prints the chain would print the values.
impl std::error::Error for DatabaseError {}

/// A schema or table name that cannot be one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} name {name:?}: it must have 1 to 63 octets and no NUL")]
pub struct BadTable {
    /// `schema` or `table`.
    pub(super) what: &'static str,
    /// The name, cut.
    pub(super) name: String,
}
