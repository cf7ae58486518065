//! keiro-relay relays rows of a Postgres outbox table to Kafka: none lost, in order, soon.
//!
//! Data flows one way: config → store (claim) → domain (plan) → publish → domain (partition) → store (settle).
//!
//! Programs that only write rows link the `producer` half alone: `default-features = false` leaves out the relay, and with it librdkafka,
//! HTTP and the command line.
//!
//! A program that relays by itself begins with [`relay::Relay::builder`], a publisher of its own with [`publish::each`] or
//! [`publish::Publisher`], and its test with [`publish::conformance`]. Nothing here is global: several relays may live in one process.
//! The library emits `tracing` events and installs no subscriber.
//!
//! ARCHITECTURE.md has the code map and the rules each module keeps.

// The futures of commands are nested more deeply than the compiler looks by default.
#![recursion_limit = "256"]

#[cfg(feature = "relay")]
pub mod cli;
#[cfg(feature = "relay")]
pub mod config;
pub mod domain;
#[cfg(feature = "relay")]
pub mod http;
mod pg;
pub mod producer;
#[cfg(feature = "relay")]
pub mod publish;
#[cfg(feature = "relay")]
pub mod relay;
#[cfg(feature = "relay")]
pub mod store;
#[cfg(feature = "relay")]
pub mod telemetry;
