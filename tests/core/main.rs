//! Tests that need no services and take seconds.

mod backoff;
mod plan;
mod record;
