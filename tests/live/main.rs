//! Tests against a real PostgreSQL and a real Kafka. `make test` fetches them; each test process starts its own.

mod claim;
mod crash;
mod db;
mod enqueue;
mod halt;
mod late;
mod migrate;
mod outage;
mod poison;
mod publish;
mod relay;
mod schema;
mod smoke;
mod stop;
mod support;
