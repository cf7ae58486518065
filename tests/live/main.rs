//! Tests against a real PostgreSQL and a real Kafka. `make test` fetches them; each test process starts its own.

mod claim;
mod db;
mod migrate;
mod schema;
mod settle;
mod smoke;
mod support;
