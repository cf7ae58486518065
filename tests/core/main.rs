//! Tests that need no services and take seconds.

mod backoff;
mod codes;
mod faults;
mod plan;
mod record;
