//! Tests against a real PostgreSQL and a real Kafka. `make test` fetches them; each test process starts its own.

mod bench;
mod claim;
mod crash;
mod db;
mod demo;
mod enqueue;
mod fast;
mod fleet;
mod foreign;
mod halt;
mod http;
mod late;
mod maintenance;
mod migrate;
mod outage;
mod plans;
mod poison;
mod publish;
mod relay;
mod rows;
mod schema;
mod settle;
mod smoke;
mod stop;
mod support;
mod upkeep;
