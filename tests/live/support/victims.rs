//! One PostgreSQL and one Kafka that tests may stop, kill and pause, one test at a time.
//!
//! A test that fails half-way leaves them as they are; the next one mends them first.

use std::net::TcpStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use keiro_relay::cli::demo::services::{Kafka, KafkaOptions, Postgres};

use super::services::{own_kafka, own_postgres};

/// The PostgreSQL to hurt. Whoever needs both takes this one first.
pub fn postgres() -> MutexGuard<'static, Postgres> {
    static VICTIM: OnceLock<Mutex<Postgres>> = OnceLock::new();
    let victim = VICTIM.get_or_init(|| Mutex::new(own_postgres(&[])));
    let postgres = victim.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = postgres.resume();
    if !listens(&format!("127.0.0.1:{}", postgres.port())) {
        postgres.restart().expect("PostgreSQL starts again");
    }
    postgres
}

/// The Kafka to hurt.
pub fn kafka() -> MutexGuard<'static, Kafka> {
    static VICTIM: OnceLock<Mutex<Kafka>> = OnceLock::new();
    let victim = VICTIM.get_or_init(|| Mutex::new(own_kafka(KafkaOptions::default())));
    let kafka = victim.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = kafka.resume();
    if !listens(&kafka.bootstrap()) {
        kafka.restart().expect("Kafka starts again");
    }
    kafka
}

/// Whether anybody listens there.
pub fn listens(address: &str) -> bool {
    TcpStream::connect(address).is_ok()
}
