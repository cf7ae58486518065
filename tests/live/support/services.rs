//! One PostgreSQL and one Kafka for all tests of the process, started when first asked for, and servers of their own
//! for tests that stop or kill them.

use std::sync::OnceLock;

use keiro_relay::cli::demo::services::{Installation, Kafka, KafkaOptions, Postgres, PostgresOptions};

/// A PostgreSQL to use instead of our own: the URL of a superuser (or one who may create databases).
pub const DATABASE_VARIABLE: &str = "KEIRO_RELAY_TEST_DATABASE_URL";
/// A Kafka to use instead of our own.
pub const BROKERS_VARIABLE: &str = "KEIRO_RELAY_TEST_BROKERS";

/// The URL of a database on the shared PostgreSQL, from which others may be created.
pub fn database_url() -> &'static str {
    static SHARED: OnceLock<Result<(String, Option<Postgres>), String>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| match given(DATABASE_VARIABLE) {
        Some(url) => Ok((url, None)),
        None => {
            let postgres = Postgres::start(&installation()?, PostgresOptions::default()).map_err(|e| e.to_string())?;
            Ok((postgres.url("postgres"), Some(postgres)))
        }
    });
    match shared {
        Ok((url, _)) => url,
        Err(problem) => panic!("no PostgreSQL for this test: {problem}"),
    }
}

/// The bootstrap servers of the shared Kafka.
pub fn brokers() -> &'static str {
    static SHARED: OnceLock<Result<(String, Option<Kafka>), String>> = OnceLock::new();
    let shared = SHARED.get_or_init(|| match given(BROKERS_VARIABLE) {
        Some(brokers) => Ok((brokers, None)),
        None => {
            let kafka = Kafka::start(&installation()?, KafkaOptions::default()).map_err(|e| e.to_string())?;
            Ok((kafka.bootstrap(), Some(kafka)))
        }
    });
    match shared {
        Ok((brokers, _)) => brokers,
        Err(problem) => panic!("no Kafka for this test: {problem}"),
    }
}

/// A PostgreSQL for one test alone, which may stop and kill it.
pub fn own_postgres(settings: &[(&str, &str)]) -> Postgres {
    let options = PostgresOptions { settings, ..PostgresOptions::default() };
    let started = installation().and_then(|found| Postgres::start(&found, options).map_err(|e| e.to_string()));
    started.unwrap_or_else(|problem| panic!("no PostgreSQL for this test: {problem}"))
}

/// A Kafka for one test alone, which may stop and kill it.
pub fn own_kafka(options: KafkaOptions<'_>) -> Kafka {
    let started = installation().and_then(|found| Kafka::start(&found, options).map_err(|e| e.to_string()));
    started.unwrap_or_else(|problem| panic!("no Kafka for this test: {problem}"))
}

fn installation() -> Result<Installation, String> {
    Installation::locate(None)
        .map_err(|error| format!("{error}; or use servers that run, with {DATABASE_VARIABLE} and {BROKERS_VARIABLE}"))
}

fn given(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|value| !value.is_empty())
}
