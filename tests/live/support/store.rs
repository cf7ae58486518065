//! The store's pool on a test's database.

use std::time::Duration;

use keiro_relay::config::{Database, Secret, Tls, TlsMode};
use keiro_relay::store::Db;

/// Settings as the defaults have them, for this URL.
pub fn settings(url: &str) -> Database {
    Database {
        url: Secret::new(url),
        url_file: None,
        password: None,
        password_file: None,
        schema: "keiro".to_owned(),
        table: "keiro_outbox".to_owned(),
        pool_size: 8,
        connect_timeout: Duration::from_secs(5),
        statement_timeout: Duration::from_secs(30),
        prepared_statements: true,
        synchronous_commit: false,
        tls: Tls { mode: TlsMode::Prefer, ca_file: None, cert_file: None, key_file: None },
    }
}

/// A pool with the default settings.
pub fn db(url: &str) -> Db {
    Db::new(&settings(url), "test", "0123456789ab").expect("a pool")
}
