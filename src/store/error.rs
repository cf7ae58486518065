//! What can go wrong with the database, sorted once by SQLSTATE.
//!
//! Nothing here ever shows a URL, a secret or the contents of a row: of the server's errors only the code, the primary
//! message and the names of things are kept, and not even the message where it may quote a value.

use std::fmt::Write as _;
use std::time::Duration;

use tokio_postgres::error::{DbError, SqlState};

use crate::pg::message_may_quote_values;

/// An error of the database or of the way to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A setting, or a file it names, cannot be used.
    #[error("database: {0}")]
    Setting(String),
    /// No connection came about.
    #[error("database: cannot connect to {target}: {cause}; check that the server runs and that database.url names it")]
    Connect {
        /// `host:port`, as far as it is safe to show.
        target: String,
        /// What the network said.
        cause: String,
    },
    /// The server does not let us in, or one side could not prove who it is.
    #[error("database: {target} refuses the connection: {cause}")]
    Auth {
        /// `host:port`, as far as it is safe to show.
        target: String,
        /// What was wrong and what to check.
        cause: String,
    },
    /// No answer within the bound.
    #[error("database: {waiting_for} took longer than {bound:?}")]
    Timeout {
        /// What was waited for.
        waiting_for: &'static str,
        /// How long.
        bound: Duration,
    },
    /// The connection broke; whether the statement took effect is not known.
    #[error("database: the connection was lost ({0}); it is made anew at the next use")]
    Closed(String),
    /// The server refused a statement.
    #[error("database: {text} (SQLSTATE {code})")]
    Server {
        /// SQLSTATE.
        code: String,
        /// Message and what to do.
        text: String,
    },
    /// A value did not have the type that the statement expects.
    #[error("database: {0}; the table differs from the contract: `keiro-relay migrate --dry-run` names the columns")]
    Value(String),
    /// The server did not keep to the protocol.
    #[error("database: {0}")]
    Protocol(String),
}

/// What an error means for whoever called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Goes away by itself: try again.
    Transient,
    /// Two transactions were in each other's way (40001, 40P01): run the same one again at once.
    Serialization,
    /// The table, its types or our permissions are not what we need: a person must act.
    Mismatch,
    /// We are not let in: a person must act, and then trying again helps.
    Auth,
    /// A setting or the program is wrong: trying again does not help.
    Fatal,
}

impl StoreError {
    /// What the error means for whoever called.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Setting(_) | Self::Protocol(_) => ErrorKind::Fatal,
            Self::Connect { .. } | Self::Timeout { .. } | Self::Closed(_) => ErrorKind::Transient,
            Self::Auth { .. } => ErrorKind::Auth,
            Self::Server { code, .. } => classify(code).kind,
            Self::Value(_) => ErrorKind::Mismatch,
        }
    }

    /// The label value of `errors_total{reason}`, from [`REASONS`].
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Connect { .. } => "connect",
            Self::Auth { .. } => "auth",
            Self::Timeout { .. } => "timeout",
            Self::Closed(_) => "closed",
            Self::Server { code, .. } => classify(code).reason,
            Self::Value(_) => "schema",
            Self::Setting(_) | Self::Protocol(_) => "other",
        }
    }

    /// The SQLSTATE, when the server refused a statement.
    #[must_use]
    pub fn code(&self) -> Option<&str> {
        match self {
            Self::Server { code, .. } => Some(code),
            Self::Setting(_)
            | Self::Connect { .. }
            | Self::Auth { .. }
            | Self::Timeout { .. }
            | Self::Closed(_)
            | Self::Value(_)
            | Self::Protocol(_) => None,
        }
    }

    /// Whether it is only that the time was over, for the client or for the server.
    #[must_use]
    pub fn is_timeout(&self) -> bool {
        matches!(self, Self::Timeout { .. }) || self.code() == Some("57014")
    }

    /// Whether the connection it happened on must not be used again.
    pub(crate) fn spoils_connection(&self) -> bool {
        match self {
            Self::Server { code, .. } => classify(code).spoils_connection,
            Self::Value(_) => false,
            Self::Setting(_)
            | Self::Connect { .. }
            | Self::Auth { .. }
            | Self::Timeout { .. }
            | Self::Closed(_)
            | Self::Protocol(_) => true,
        }
    }

    /// Turns what the driver said while connecting into an error about this target.
    pub(crate) fn connecting(error: &tokio_postgres::Error, target: &str) -> Self {
        let target = target.to_owned();
        if let Some(db) = error.as_db_error() {
            let code = db.code().code();
            let advice = match code {
                "28P01" => "check the user in database.url and the password (database.password_file)",
                "28000" => "check the user in database.url, database.tls and the server's pg_hba.conf",
                "3D000" => "check the database's name in database.url",
                "08P01" => "check what stands between here and the server: a pooler may not know a parameter",
                _ => return Self::from_server(db),
            };
            return Self::Auth { target, cause: format!("{} (SQLSTATE {code}); {advice}", db.message()) };
        }
        let cause = cause_of(error);
        match DriverKind::of(error) {
            DriverKind::Authentication => Self::Auth { target, cause: format!("authentication failed: {cause}") },
            DriverKind::Tls => Self::Auth {
                target,
                cause: format!("TLS failed: {cause}; check database.tls (mode, ca_file) and the server's certificate"),
            },
            DriverKind::Configuration if cause == "password missing" => Self::Auth {
                target,
                cause: "the server asks for a password and none is set; set database.password_file".to_owned(),
            },
            DriverKind::Configuration => Self::Setting(format!("database.url cannot be used: {cause}")),
            DriverKind::Network | DriverKind::Closed => Self::Connect { target, cause },
            DriverKind::Value | DriverKind::Other => Self::Protocol(format!("{error}: {cause}")),
        }
    }

    fn from_server(db: &DbError) -> Self {
        let code = db.code().code().to_owned();
        let mut text = if message_may_quote_values(&code) {
            "the server refused a value".to_owned()
        } else {
            db.message().to_owned()
        };
        for (what, name) in [("constraint", db.constraint()), ("column", db.column())] {
            if let Some(name) = name.filter(|name| !text.contains(*name)) {
                // Writing to a String cannot fail.
                let _ = write!(text, ", {what} {name:?}");
            }
        }
        if let Some(advice) = classify(&code).advice {
            text.push_str("; ");
            text.push_str(advice);
        }
        Self::Server { code, text }
    }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::of(&error)
    }
}

impl StoreError {
    /// Sorts what the driver said of an open connection.
    pub(crate) fn of(error: &tokio_postgres::Error) -> Self {
        if let Some(db) = error.as_db_error() {
            return Self::from_server(db);
        }
        let cause = cause_of(error);
        match DriverKind::of(error) {
            DriverKind::Network => Self::Closed(cause),
            DriverKind::Closed => Self::Closed("closed by the server".to_owned()),
            DriverKind::Value => Self::Value(format!("{error} ({cause})")),
            DriverKind::Configuration => Self::Setting(format!("database.url cannot be used: {cause}")),
            DriverKind::Authentication | DriverKind::Tls | DriverKind::Other => {
                Self::Protocol(format!("{error}: {cause}"))
            }
        }
    }
}

/// Every value of [`StoreError::reason`].
pub const REASONS: [&str; 8] =
    ["connect", "auth", "timeout", "serialization", "permission", "schema", "closed", "other"];

/// The driver's own kinds, which it does not show otherwise than in its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DriverKind {
    Network,
    Closed,
    Authentication,
    Tls,
    Configuration,
    Value,
    Other,
}

impl DriverKind {
    fn of(error: &tokio_postgres::Error) -> Self {
        let text = error.to_string();
        match text.as_str() {
            "error communicating with the server" | "error connecting to server" | "timeout waiting for server" => {
                Self::Network
            }
            "connection closed" => Self::Closed,
            "authentication error" => Self::Authentication,
            "error performing TLS handshake" => Self::Tls,
            "invalid configuration" | "invalid connection string" => Self::Configuration,
            "query returned an unexpected number of columns" => Self::Value,
            _ if ["error serializing parameter", "error deserializing column", "invalid column"]
                .iter()
                .any(|start| text.starts_with(start)) =>
            {
                Self::Value
            }
            _ => Self::Other,
        }
    }
}

/// The innermost text of a driver error that has no server's answer in it.
fn cause_of(error: &tokio_postgres::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

/// What a SQLSTATE means.
#[derive(Debug, Clone, Copy)]
struct Class {
    kind: ErrorKind,
    reason: &'static str,
    spoils_connection: bool,
    advice: Option<&'static str>,
}

/// The one place where SQLSTATEs are told apart.
fn classify(code: &str) -> Class {
    let class = |kind, reason, spoils_connection, advice| Class { kind, reason, spoils_connection, advice };
    let state = SqlState::from_code(code);
    if state == SqlState::T_R_SERIALIZATION_FAILURE || state == SqlState::T_R_DEADLOCK_DETECTED {
        return class(ErrorKind::Serialization, "serialization", false, None);
    }
    match code {
        "57014" => class(ErrorKind::Transient, "timeout", false, Some("see database.statement_timeout")),
        "55P03" => class(ErrorKind::Transient, "timeout", false, Some("somebody else holds the lock")),
        "25P02" | "25P03" | "57P05" => class(ErrorKind::Transient, "closed", true, None),
        // A standby, or a primary that became one: the next connection may reach the new primary.
        "25006" => class(
            ErrorKind::Transient,
            "connect",
            true,
            Some("database.url must reach the primary (target_session_attrs=read-write)"),
        ),
        "42501" => class(
            ErrorKind::Mismatch,
            "permission",
            false,
            Some("the relay's user needs usage on the schema and select, update on the table; enqueue also insert"),
        ),
        // Named statements that a pooler sent to another server connection.
        "26000" | "42P05" | "08P01" => class(
            ErrorKind::Mismatch,
            "other",
            true,
            Some("behind a transaction pooler set database.prepared_statements = false"),
        ),
        // "cached plan must not change result type": the table was altered while we ran; a new connection prepares anew.
        "0A000" => class(ErrorKind::Transient, "schema", true, None),
        "42P01" | "42703" | "42704" | "42804" | "42883" | "42846" | "42P18" | "42809" | "3F000" => {
            class(ErrorKind::Mismatch, "schema", true, Some("`keiro-relay migrate --dry-run` names what is missing"))
        }
        "28000" | "28P01" => class(ErrorKind::Auth, "auth", true, None),
        "3D000" => class(ErrorKind::Auth, "connect", true, None),
        _ => match code.get(..2) {
            Some("08" | "57") => class(ErrorKind::Transient, "closed", true, None),
            // Out of connections, memory, disk; trouble of the operating system.
            Some("53" | "58") => class(ErrorKind::Transient, "other", true, None),
            _ => class(ErrorKind::Fatal, "other", false, None),
        },
    }
}
