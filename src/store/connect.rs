//! How a connection comes about: URL, secrets and certificates read anew each time, TLS as libpq means it.
//!
//! Nothing here ever keeps a secret beyond the connection attempt, and no error ever shows one.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Duration;

use openssl::error::ErrorStack;
use openssl::pkey::PKey;
use openssl::ssl::{SslConnector, SslMethod, SslVerifyMode, SslVersion};
use openssl::x509::X509;
use openssl::x509::store::X509StoreBuilder;
use postgres_openssl::{MakeTlsConnector, TlsStream};
use tokio_postgres::config::{Host, SslMode, SslNegotiation};
use tokio_postgres::{Client, Socket};

use super::error::StoreError;
use crate::config::{Connection, Database, Tls, TlsMode};

/// Longest `application_name` the server keeps.
const APPLICATION_NAME_BYTES_MAX: usize = 63;
/// A peer that is gone is noticed after 30 s of silence and three unanswered probes, 10 s apart.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(10);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long sent bytes may stay unacknowledged before the connection counts as broken.
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(30);
/// The driver's default, which means that the URL says nothing.
const DRIVER_KEEPALIVE_IDLE: Duration = Duration::from_secs(2 * 60 * 60);

/// The half of a connection that does its IO.
pub(super) type Driver = tokio_postgres::Connection<Socket, TlsStream<Socket>>;

/// Everything needed to open a connection, secrets included; lives for one attempt.
pub(super) struct Resolved {
    driver: tokio_postgres::Config,
    tls: MakeTlsConnector,
    target: String,
    bound: Duration,
}

/// Opens one connection. The bound covers every host of the URL, TLS and authentication.
pub(super) async fn open(
    database: &Database,
    application_name: &str,
) -> Result<(Client, Driver, MakeTlsConnector), StoreError> {
    let (database, application_name) = (database.clone(), application_name.to_owned());
    // Files and certificate stores are read synchronously: not on a thread that serves others.
    let resolved = tokio::task::spawn_blocking(move || resolve(&database, &application_name))
        .await
        .map_err(|_| StoreError::Closed("the program is ending".to_owned()))??;
    let connecting = resolved.driver.connect(resolved.tls.clone());
    match tokio::time::timeout(resolved.bound, connecting).await {
        Ok(Ok((client, connection))) => Ok((client, connection, resolved.tls)),
        Ok(Err(error)) => Err(StoreError::connecting(&error, &resolved.target)),
        Err(_) => Err(StoreError::Connect {
            target: resolved.target,
            cause: format!("no connection within {:?} (database.connect_timeout)", resolved.bound),
        }),
    }
}

/// Reads and checks the settings as the next connection will use them. Contacts nothing.
pub(super) fn resolve(database: &Database, application_name: &str) -> Result<Resolved, StoreError> {
    let Connection { url, password, tls } =
        database.connect_config().map_err(|error| StoreError::Setting(error.to_string()))?;
    let mut driver: tokio_postgres::Config = url.expose().parse().map_err(|_| {
        StoreError::Setting(
            "database.url is not a connection URL; expected postgres://USER@HOST:PORT/DATABASE, with %-escapes for \
             special characters in user and password"
                .to_owned(),
        )
    })?;
    if let Some(password) = password {
        driver.password(password.expose());
    }
    let hosts = complete_hosts(&mut driver)?;
    let socket_only = driver.get_hosts().iter().all(|host| matches!(host, Host::Unix(_)));
    // libpq ignores sslmode on Unix sockets; the driver would fail.
    let mode = if socket_only { TlsMode::Disable } else { effective_mode(&tls)? };
    match mode {
        TlsMode::Disable => driver.ssl_mode(SslMode::Disable),
        // What the URL says, "prefer" when it says nothing: this default must not weaken it.
        TlsMode::Prefer => &mut driver,
        TlsMode::Require | TlsMode::VerifyCa | TlsMode::VerifyFull => driver.ssl_mode(SslMode::Require),
    }
    .application_name(application_name)
    // Half, so that the second address of a name is still tried within the whole bound.
    .connect_timeout(database.connect_timeout / 2);
    if driver.get_keepalives_idle() == DRIVER_KEEPALIVE_IDLE {
        driver.keepalives_idle(KEEPALIVE_IDLE);
    }
    if driver.get_keepalives_interval().is_none() {
        driver.keepalives_interval(KEEPALIVE_INTERVAL);
    }
    if driver.get_keepalives_retries().is_none() {
        driver.keepalives_retries(KEEPALIVE_RETRIES);
    }
    if driver.get_tcp_user_timeout().is_none() {
        driver.tcp_user_timeout(TCP_USER_TIMEOUT);
    }
    let direct = driver.get_ssl_negotiation() == SslNegotiation::Direct;
    let connector = tls_connector(&Tls { mode, ..tls }, direct)?;
    let target = target(&driver);
    Ok(Resolved { driver, tls: connector, target, bound: database.connect_timeout * hosts })
}

/// `keiro-relay/INSTANCE/HASH`; a long instance is cut, the hash never: it tells relays with different policies apart.
pub(super) fn application_name(instance: &str, policy_hash: &str) -> String {
    let room = APPLICATION_NAME_BYTES_MAX.saturating_sub("keiro-relay//".len() + policy_hash.len());
    let end = (0..=room.min(instance.len())).rev().find(|&end| instance.is_char_boundary(end)).unwrap_or(0);
    format!("keiro-relay/{}/{policy_hash}", &instance[..end])
}

/// The mode as libpq means it: a named authority makes "require" verify it.
fn effective_mode(tls: &Tls) -> Result<TlsMode, StoreError> {
    match (tls.mode, &tls.ca_file) {
        (TlsMode::Require, Some(_)) => Ok(TlsMode::VerifyCa),
        (TlsMode::VerifyCa, None) => Err(StoreError::Setting(
            "database.tls.mode = \"verify-ca\" needs database.tls.ca_file: a certificate of any public authority for any \
             host would do otherwise; or use \"verify-full\""
                .to_owned(),
        )),
        (mode, _) => Ok(mode),
    }
}

/// Gives the driver a host for each bare address, which it needs for TLS; returns how many hosts there are.
fn complete_hosts(driver: &mut tokio_postgres::Config) -> Result<u32, StoreError> {
    if driver.get_hosts().is_empty() {
        for address in driver.get_hostaddrs().to_vec() {
            driver.host(address.to_string());
        }
    }
    match u32::try_from(driver.get_hosts().len()) {
        Ok(hosts @ 1..=64) => Ok(hosts),
        Ok(0) => Err(StoreError::Setting("database.url names no host".to_owned())),
        Ok(_) | Err(_) => Err(StoreError::Setting("database.url names more than 64 hosts".to_owned())),
    }
}

/// `host:port` for messages. A host with odd characters may be a piece of a password that was not escaped.
fn target(driver: &tokio_postgres::Config) -> String {
    let mut text = String::new();
    for (index, host) in driver.get_hosts().iter().enumerate() {
        let host = match host {
            Host::Tcp(host) => host.clone(),
            Host::Unix(path) => path.display().to_string(),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-:/".contains(c);
        let host = if host.chars().all(plain) { host } else { "the host of database.url".to_owned() };
        let ports = driver.get_ports();
        let port = ports.get(index).or(ports.first()).copied().unwrap_or(5432);
        let comma = if index == 0 { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}{host}:{port}");
    }
    text
}

fn tls_connector(tls: &Tls, direct: bool) -> Result<MakeTlsConnector, StoreError> {
    let unusable =
        |error: ErrorStack| StoreError::Setting(format!("database.tls: the TLS library cannot be set up: {error}"));
    let mut builder = SslConnector::builder(SslMethod::tls_client()).map_err(unusable)?;
    builder.set_min_proto_version(Some(SslVersion::TLS1_2)).map_err(unusable)?;
    if direct {
        postgres_openssl::set_postgresql_alpn(&mut builder).map_err(unusable)?;
    }
    let verify = match tls.mode {
        TlsMode::Disable | TlsMode::Prefer | TlsMode::Require => false,
        TlsMode::VerifyCa | TlsMode::VerifyFull => true,
    };
    builder.set_verify(if verify { SslVerifyMode::PEER } else { SslVerifyMode::NONE });
    if let Some(file) = tls.ca_file.as_ref().filter(|_| verify) {
        // A store of its own: the system's authorities must not count beside the one that was named.
        let mut store = X509StoreBuilder::new().map_err(unusable)?;
        for certificate in certificates("database.tls.ca_file", file)? {
            store.add_cert(certificate).map_err(unusable)?;
        }
        builder.set_cert_store(store.build());
    }
    if let (Some(cert_file), Some(key_file), true) = (&tls.cert_file, &tls.key_file, tls.mode != TlsMode::Disable) {
        let mut chain = certificates("database.tls.cert_file", cert_file)?.into_iter();
        if let Some(own) = chain.next() {
            builder.set_certificate(&own).map_err(unusable)?;
        }
        for intermediate in chain {
            builder.add_extra_chain_cert(intermediate).map_err(unusable)?;
        }
        let key = read_file("database.tls.key_file", key_file)?;
        // An empty passphrase makes an encrypted key an error; without one the library would ask at the terminal.
        let key = PKey::private_key_from_pem_passphrase(&key, b"").map_err(|_| {
            StoreError::Setting(format!(
                "database.tls.key_file = {:?} is not a private key in PEM form without a passphrase",
                key_file.display()
            ))
        })?;
        builder.set_private_key(&key).and_then(|()| builder.check_private_key()).map_err(|_| {
            StoreError::Setting(format!(
                "database.tls.key_file = {:?} does not belong to cert_file = {:?}",
                key_file.display(),
                cert_file.display()
            ))
        })?;
    }
    let mut connector = MakeTlsConnector::new(builder.build());
    if tls.mode != TlsMode::VerifyFull {
        connector.set_callback(|ssl, _| {
            ssl.set_verify_hostname(false);
            Ok(())
        });
    }
    Ok(connector)
}

fn certificates(setting: &str, file: &Path) -> Result<Vec<X509>, StoreError> {
    match X509::stack_from_pem(&read_file(setting, file)?) {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) | Err(_) => {
            Err(StoreError::Setting(format!("{setting} = {:?} holds no certificate in PEM form", file.display())))
        }
    }
}

fn read_file(setting: &str, file: &Path) -> Result<Vec<u8>, StoreError> {
    fs::read(file)
        .map_err(|error| StoreError::Setting(format!("{setting} = {:?} cannot be read: {error}", file.display())))
}
