//! `[database]`: the connection URL, and secrets that are read again at each use.
//!
//! Nothing here ever connects, and no part of a URL or of a secret's file reaches an error: not even an option's name is
//! echoed unless it is a known one, since a password with a `?` in it looks like options.

use std::path::Path;

use super::problems::{SettingError, quoted};
use super::{Database, Secret, Tls, TlsMode};

/// What one connection attempt needs, read now.
#[derive(Debug, Clone)]
pub struct Connection {
    /// A URL (or `key=value` text) that `tokio_postgres::Config` accepts: `sslmode` is taken off.
    pub url: Secret,
    /// Wins over a password in `url`.
    pub password: Option<Secret>,
    /// `[database.tls]`, with the mode that the URL asked for.
    pub tls: Tls,
}

impl Database {
    /// Reads `url_file` and `password_file` again and returns what the next connection needs.
    ///
    /// Call it at each connect: passwords rotate, and a token may live for minutes only.
    pub fn connect_config(&self) -> Result<Connection, SettingError> {
        let mut tls = self.tls.clone();
        let url = match &self.url_file {
            None => self.url.clone(),
            Some(file) => {
                let text = read_secret_file("database.url_file", file)?;
                let wrong = |text: String| setting_error("database.url_file", file, text);
                let url = split_url(text.expose().trim()).map_err(wrong)?;
                tls.mode = match url.mode {
                    // "prefer" is the default and promises nothing, so the URL's own word may replace it.
                    Some(mode) if tls.mode == TlsMode::Prefer || tls.mode == mode => mode,
                    Some(mode) => return Err(wrong(tls_conflict(mode, tls.mode))),
                    None => tls.mode,
                };
                url.url
            }
        };
        let password = match &self.password_file {
            Some(file) => Some(read_secret_file("database.password_file", file)?),
            None => self.password.clone(),
        };
        Ok(Connection { url, password, tls })
    }
}

impl Database {
    /// Takes over a connection URL, whose `sslmode` sets `tls.mode`.
    ///
    /// # Errors
    /// It is no URL that can be used; nothing of it is shown.
    pub fn set_url(&mut self, url: &str) -> Result<(), SettingError> {
        let split = split_url(url.trim()).map_err(|text| SettingError {
            setting: "database.url".to_owned(),
            value: quoted("***"),
            text,
        })?;
        if let Some(mode) = split.mode {
            self.tls.mode = mode;
        }
        (self.url, self.url_file) = (split.url, None);
        Ok(())
    }
}

/// The text for a URL whose `sslmode` contradicts `[database.tls]`.
pub(super) fn tls_conflict(url: TlsMode, section: TlsMode) -> String {
    format!("the URL's sslmode={} contradicts database.tls.mode = \"{}\": keep one of them", url.name(), section.name())
}

/// A secret is a line or a certificate; a file larger than this is another file.
const SECRET_FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a secret, without the line ends at its end.
pub(super) fn read_secret_file(setting: &str, file: &Path) -> Result<Secret, SettingError> {
    let wrong = |text: String| setting_error(setting, file, text);
    let too_large = |len: u64| len > SECRET_FILE_BYTES_MAX;
    let metadata = std::fs::metadata(file).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    if metadata.is_dir() {
        return Err(wrong("is a directory: name the file in it".to_owned()));
    }
    if too_large(metadata.len()) {
        return Err(wrong("is larger than 1 MiB, which no secret is: name another file".to_owned()));
    }
    let bytes = std::fs::read(file).map_err(|error| wrong(format!("cannot be read: {error}")))?;
    let text = String::from_utf8(bytes).map_err(|_| wrong("is not UTF-8 text".to_owned()))?;
    let text = text.trim_end_matches(['\r', '\n']);
    if text.is_empty() {
        return Err(wrong("is empty: write the secret into it".to_owned()));
    }
    if text.contains('\0') {
        return Err(wrong("holds a NUL, which no secret may".to_owned()));
    }
    Ok(Secret::new(text))
}

pub(super) fn setting_error(setting: &str, file: &Path, text: String) -> SettingError {
    SettingError { setting: setting.to_owned(), value: quoted(&file.to_string_lossy()), text }
}

/// A connection URL without what tokio-postgres does not take.
pub(super) struct SplitUrl {
    pub(super) url: Secret,
    /// The URL's `sslmode`.
    pub(super) mode: Option<TlsMode>,
    /// Whether it holds a password.
    pub(super) has_password: bool,
}

/// Options of libpq that belong elsewhere here, and where.
const MOVED_OPTIONS: [(&str, &str); 3] = [
    ("sslrootcert", "database.tls.ca_file"),
    ("sslcert", "database.tls.cert_file"),
    ("sslkey", "database.tls.key_file"),
];

/// Options of libpq that the driver lacks: known words, so they may be named.
const LACKING_OPTIONS: [&str; 14] = [
    "client_encoding",
    "fallback_application_name",
    "gssencmode",
    "gsslib",
    "krbsrvname",
    "passfile",
    "replication",
    "require_auth",
    "service",
    "sslcompression",
    "sslcrl",
    "sslpassword",
    "sslsni",
    "ssl_min_protocol_version",
];

/// Checks a URL and takes `sslmode` off it: the driver refuses `verify-ca` and `verify-full`.
pub(super) fn split_url(text: &str) -> Result<SplitUrl, String> {
    let is_url = ["postgres://", "postgresql://"].iter().any(|prefix| text.starts_with(prefix));
    let (kept, options) = if is_url { split_query(text) } else { split_pairs(text) };
    let mut mode = None;
    for (name, value) in options {
        if name == "sslmode" {
            let modes = TlsMode::ALL.map(TlsMode::name).join(", ");
            let found = TlsMode::ALL.into_iter().find(|mode| mode.name() == value);
            mode = Some(found.ok_or_else(|| format!("its sslmode is none of {modes}"))?);
        } else if let Some((_, home)) = MOVED_OPTIONS.iter().find(|(moved, _)| *moved == name) {
            return Err(format!("takes no {name}: take it off the URL and set {home}"));
        } else if LACKING_OPTIONS.contains(&name.as_str()) {
            return Err(format!("takes no {name}: the driver does not know this option, so take it off the URL"));
        }
    }
    let Ok(parsed) = kept.parse::<tokio_postgres::Config>() else {
        return Err(
            "cannot be read as a connection URL; the form is postgres://USER@HOST:5432/DATABASE, and in a user or \
                    password the characters : / ? # @ % are written as %3A %2F %3F %23 %40 %25"
                .to_owned(),
        );
    };
    if parsed.get_hosts().is_empty() && parsed.get_hostaddrs().is_empty() {
        return Err("names no host; the form is postgres://USER@HOST:5432/DATABASE".to_owned());
    }
    let has_password = parsed.get_password().is_some();
    Ok(SplitUrl { url: Secret::new(kept), mode, has_password })
}

/// The URL without `sslmode`, and its options. As the driver does, everything before the first `@` is the credentials.
fn split_query(text: &str) -> (String, Vec<(String, String)>) {
    let after_credentials = text.find('@').map_or(0, |at| at + 1);
    let Some(query) = text[after_credentials..].find('?').map(|at| after_credentials + at) else {
        return (text.to_owned(), Vec::new());
    };
    let mut kept = Vec::new();
    let mut options = Vec::new();
    for pair in text[query + 1..].split('&') {
        match pair.split_once('=') {
            Some((name, value)) => {
                options.push((name.to_owned(), value.to_owned()));
                if name != "sslmode" {
                    kept.push(pair);
                }
            }
            None => kept.push(pair),
        }
    }
    let rest = if kept.is_empty() { String::new() } else { format!("?{}", kept.join("&")) };
    (format!("{}{rest}", &text[..query]), options)
}

/// The same for `host=… user=…`; text that does not follow this form is left for the driver to refuse.
fn split_pairs(text: &str) -> (String, Vec<(String, String)>) {
    let mut kept = String::new();
    let mut options = Vec::new();
    let mut rest = text;
    while let Some((name, tail)) = rest.split_once('=') {
        let name = name.trim();
        let tail = tail.trim_start();
        let (value, len) = pair_value(tail);
        if name != "sslmode" {
            kept.push_str(&format!("{name}={} ", &tail[..len]));
        }
        options.push((name.to_owned(), value));
        rest = &tail[len..];
    }
    kept.push_str(rest.trim());
    (kept.trim_end().to_owned(), options)
}

/// The value at the beginning of the text, and how many bytes of it are the value: libpq's quotes and backslashes.
fn pair_value(text: &str) -> (String, usize) {
    let quoted = text.starts_with('\'');
    let mut value = String::new();
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(usize::from(quoted)) {
        match c {
            c if escaped => {
                value.push(c);
                escaped = false;
            }
            '\\' => escaped = true,
            '\'' if quoted => return (value, at + 1),
            c if c.is_whitespace() && !quoted => return (value, at),
            c => value.push(c),
        }
    }
    (value, text.len())
}
