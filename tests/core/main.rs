//! Tests that need no services and take seconds.

mod backoff;
mod codes;
mod faults;
mod ndjson;
mod plan;
mod record;
mod table_sql;
