//! What is wrong with a configuration, in words an operator can act on.
//!
//! Nothing here ever holds a secret: a value that may be one is not stored in a problem in the first place.

use std::fmt;

/// Where a value comes from; a later variant wins over an earlier one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// Nobody set it.
    Default,
    /// A line of the configuration file.
    File {
        /// The file as it was named.
        name: String,
        /// Counted from 1; 0 stands for the whole file.
        line: usize,
    },
    /// An environment variable, by its full name.
    Environment(String),
    /// A flag of the command line.
    Flag(String),
}

impl Origin {
    /// The layer alone: which of two origins wins.
    pub(super) fn rank(&self) -> u8 {
        match self {
            Self::Default => 0,
            Self::File { .. } => 1,
            Self::Environment(_) => 2,
            Self::Flag(_) => 3,
        }
    }

    /// Problems are listed as an operator reads: the file from top to bottom, then variables, flags, and what is missing.
    fn reading_order(&self) -> (u8, usize) {
        match self {
            Self::File { line, .. } => (0, *line),
            Self::Environment(_) => (1, 0),
            Self::Flag(_) => (2, 0),
            Self::Default => (3, 0),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { name, line: 0 } => f.write_str(name),
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Environment(name) => write!(f, "env {name}"),
            Self::Flag(name) => write!(f, "flag {name}"),
        }
    }
}

/// One thing that is wrong, with all that is needed to mend it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The dotted path of the key; empty when it is about a whole file.
    pub key: String,
    /// The value as it was given; absent for what may be a secret.
    pub value: Option<String>,
    /// Where the value comes from.
    pub origin: Origin,
    /// What is wrong, what is allowed, and what to do.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.key.is_empty() {
            return write!(f, "{}: {}", self.origin, self.text);
        }
        f.write_str(&self.key)?;
        if let Some(value) = &self.value {
            write!(f, " = {value}")?;
        }
        // A default has no place to point at unless its value is the point.
        if self.origin != Origin::Default || self.value.is_some() {
            write!(f, " ({})", self.origin)?;
        }
        write!(f, ": {}", self.text)
    }
}

/// Everything that is wrong with a configuration: never empty.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problems(Vec<Problem>);

impl Problems {
    /// Sorts the problems as an operator reads; `None` when there are none.
    pub(super) fn from_list(mut problems: Vec<Problem>) -> Option<Self> {
        problems.sort_by_key(|problem| problem.origin.reading_order());
        (!problems.is_empty()).then_some(Self(problems))
    }

    /// The problems, the file's first, by line.
    #[must_use]
    pub fn list(&self) -> &[Problem] {
        &self.0
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.len() {
            1 => f.write_str("the configuration has a problem:")?,
            n => write!(f, "the configuration has {n} problems:")?,
        }
        self.0.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
    }
}

impl std::error::Error for Problems {}

/// Something that works but that the operator should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning {
    /// The dotted path of the key, or the name of an environment variable.
    pub key: String,
    /// What may go wrong and what to do.
    pub text: String,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.text)
    }
}

/// A setting that cannot be used right now, such as a secret's file that is missing; another try may succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting} = {value}: {text}")]
pub struct SettingError {
    /// The dotted path of the key.
    pub setting: String,
    /// Its value, usually a file name.
    pub value: String,
    /// What is wrong and what to do; never what the file holds.
    pub text: String,
}

/// The dotted path of a key, with names quoted where TOML needs it: `sources."Orders.EU".policy`.
pub(super) fn dotted<S: AsRef<str>>(path: &[S]) -> String {
    path.iter().map(|name| key(name.as_ref())).collect::<Vec<_>>().join(".")
}

/// One name of a path, quoted where TOML needs it.
pub(super) fn key(name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if bare { name.to_owned() } else { quoted(name) }
}

/// A TOML basic string.
pub(super) fn quoted(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    for c in text.chars() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

/// A string value as a problem shows it: short, and without a password that slipped into the wrong key inside a URL.
pub(super) fn shown(text: &str) -> String {
    const SHOWN_CHARS_MAX: usize = 80;
    if text.contains("://") && text.contains('@') {
        return "\"***\"".to_owned();
    }
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", quoted(&text[..end])),
        None => quoted(text),
    }
}

/// The allowed name that was probably meant, if one is near enough to be worth naming.
pub(crate) fn nearest<'a>(name: &str, allowed: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let folded = name.to_ascii_lowercase();
    let allowed: Vec<&str> = allowed.into_iter().collect();
    // The beginning of one name only is that name: `per_key`, `stop`.
    let begun: Vec<&str> = allowed.iter().copied().filter(|candidate| candidate.starts_with(&folded)).collect();
    if let ([candidate], true) = (begun.as_slice(), folded.len() >= 3) {
        return Some(candidate);
    }
    allowed
        .into_iter()
        .map(|candidate| (strsim::damerau_levenshtein(&folded, &candidate.to_ascii_lowercase()), candidate))
        // One slip, or a third of a longer name: more than that is another word.
        .filter(|(distance, candidate)| *distance <= (candidate.chars().count() / 3).max(1))
        .min()
        .map(|(_, candidate)| candidate)
}
