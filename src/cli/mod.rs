//! The command line.
//!
//! Nothing here ever decides what happens to a message.

pub mod config;
pub mod demo;
