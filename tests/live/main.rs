//! Tests against a real PostgreSQL and a real Kafka. `make test` fetches them; each test process starts its own.

mod claim;
mod db;
mod enqueue;
mod late;
mod maintenance;
mod migrate;
mod plans;
mod publish;
mod relay;
mod schema;
mod settle;
mod smoke;
mod stop;
mod support;
