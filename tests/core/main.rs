//! Tests that need no services and take seconds.

mod backoff;
mod health;
mod http;
mod plan;
mod telemetry;
