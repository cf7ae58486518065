//! PostgreSQL: one module per verb, one statement per file in `sql/`.
//!
//! Nothing here ever talks to the broker or decides what an outcome means; only `migrate` runs DDL.

mod connect;
mod db;
mod error;
mod inspect;
mod migrate;
mod names;

pub use db::{Db, Dedicated, Listener, Notification, Param, Tx, WAKE_CHANNEL};
pub use error::{ErrorKind, REASONS, StoreError};
pub use inspect::{
    COLUMNS, ContractColumn, InspectError, LEAN_CHECKS, Profile, REJECTED_COLUMNS, SchemaProblem, Shape, inspect,
};
pub use migrate::{Found, MigrateError, Report, migrate, table_sql};
pub use names::{qualified, quoted};
