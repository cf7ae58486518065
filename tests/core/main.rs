//! Tests that need no services and take seconds.

mod backoff;
mod breaker;
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
mod record;
mod reload;
mod sweep;
mod table_sql;
mod telemetry;
