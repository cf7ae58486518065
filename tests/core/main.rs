//! Tests that need no services and take seconds.

mod backoff;
mod health;
mod plan;
mod telemetry;
