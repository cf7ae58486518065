//! Tests that need no services and take seconds.

mod backoff;
mod breaker;
mod budget;
mod codes;
mod config;
mod faults;
mod health;
mod http;
mod judge;
mod lanes;
mod lanes_cases;
mod layering;
mod model;
mod ndjson;
mod partition;
mod pipeline;
mod plan;
mod producer;
mod record;
mod reload;
mod row_filter;
mod rows_text;
mod sweep;
mod table_sql;
mod telemetry;
mod verify;
