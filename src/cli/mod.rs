//! The command line.

pub mod demo;
pub mod migrate;
