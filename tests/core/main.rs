//! Tests that need no services and take seconds.

mod backoff;
mod codes;
mod config;
mod faults;
mod health;
mod http;
mod lanes;
mod lanes_cases;
mod layering;
mod model;
mod plan;
mod record;
mod sweep;
mod telemetry;
