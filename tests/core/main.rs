//! Tests that need no services; they take seconds.
