//! Tests that need no services.

mod codes;
mod faults;
mod record;
