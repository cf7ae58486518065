//! The command line: what was typed, dispatch, exit codes.

pub mod health;
