//! Tests that need no services and take seconds.

mod backoff;
mod codes;
mod faults;
mod health;
mod http;
mod plan;
mod record;
mod telemetry;
