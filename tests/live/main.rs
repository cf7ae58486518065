//! Tests against a real PostgreSQL and a real Kafka. `make test` fetches them; each test process starts its own.

mod db;
mod demo;
mod enqueue;
mod migrate;
mod publish;
mod relay;
mod schema;
mod smoke;
mod support;
