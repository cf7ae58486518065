//! Tests without services: seconds, on any machine.

mod codes;
mod config;
mod faults;
mod layering;
mod record;
