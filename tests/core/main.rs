//! Tests without services: seconds, on any machine.

mod config;
mod layering;
