//! Tests that need no services.

mod record;
