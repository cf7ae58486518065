//! keiro-relay relays rows of a Postgres outbox table to Kafka: none lost, in order, soon.
//!
//! Data flows one way: config → store (claim) → domain (plan) → publish → domain (partition) → store (settle).
//! A program that relays by itself begins with [`relay::Relay::builder`], a publisher of its own with [`publish::each`] or
//! [`publish::Publisher`], and its test with [`publish::conformance`]. Nothing here is global: several relays may live in one process.
//! The library emits `tracing` events and installs no subscriber.
//!
//! ARCHITECTURE.md has the code map and the rules each module keeps.

pub mod cli;
pub mod config;
pub mod domain;
pub mod http;
pub mod producer;
pub mod publish;
pub mod relay;
pub mod store;
pub mod telemetry;
