//! What a check found, and how that is printed.
//!
//! Nothing here ever decides a verdict, and no control character of a text from a server reaches the terminal.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};

use serde_json::json;

/// What a check says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// Rows are delivered, but something costs speed, safety or somebody's patience.
    Warn,
    /// Something stops delivery, of all rows or of some.
    Fail,
    /// It could not be found out.
    Unknown,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
            Self::Unknown => "unknown",
        }
    }
}

/// One check: its stable name, what it is about when there are several, the verdict, why, and what to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Check {
    pub(super) name: &'static str,
    pub(super) subject: Option<String>,
    pub(super) verdict: Verdict,
    pub(super) reason: String,
    /// SQL, a setting or a command, to be copied.
    pub(super) remedy: Option<String>,
}

impl Check {
    fn new(name: &'static str, verdict: Verdict, reason: impl Into<String>, remedy: Option<String>) -> Self {
        Self { name, subject: None, verdict, reason: reason.into(), remedy }
    }

    pub(super) fn ok(name: &'static str, reason: impl Into<String>) -> Self {
        Self::new(name, Verdict::Ok, reason, None)
    }

    pub(super) fn warn(name: &'static str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Verdict::Warn, reason, Some(remedy.into()))
    }

    pub(super) fn fail(name: &'static str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::new(name, Verdict::Fail, reason, Some(remedy.into()))
    }

    pub(super) fn unknown(name: &'static str, reason: impl Into<String>) -> Self {
        Self::new(name, Verdict::Unknown, reason, None)
    }

    /// Names what it is about: a topic, a broker.
    pub(super) fn about(self, subject: impl Into<String>) -> Self {
        Self { subject: Some(subject.into()), ..self }
    }

    /// Adds what to do to a check that has no remedy yet.
    pub(super) fn with_remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Every name that was not reported is unknown, for this reason: the list of checks is the same whatever does not answer.
pub(super) fn complete(checks: &mut Vec<Check>, names: &[&'static str], reason: &str) {
    let reported: BTreeSet<&str> = checks.iter().map(|check| check.name).collect();
    let missing: Vec<_> = names.iter().filter(|name| !reported.contains(**name)).collect();
    checks.extend(missing.into_iter().map(|name| Check::unknown(name, reason)));
}

/// Prints every check; with `problems` those that are not ok. Returns whether nothing stops delivery.
pub(super) fn print(checks: &[Check], json: bool, problems: bool, out: &mut impl Write) -> io::Result<bool> {
    let shown = || checks.iter().filter(|check| !problems || check.verdict != Verdict::Ok);
    if json {
        for check in shown() {
            let line = json!({
                "check": check.name,
                "subject": check.subject,
                "verdict": check.verdict.name(),
                "reason": check.reason,
                "remedy": check.remedy,
            });
            writeln!(out, "{line}")?;
        }
    } else {
        for check in folded(shown()) {
            out.write_all(text(&check).as_bytes())?;
        }
        let count = |verdict| checks.iter().filter(|check| check.verdict == verdict).count();
        writeln!(
            out,
            "{} ok, {} warn, {} fail, {} unknown",
            count(Verdict::Ok),
            count(Verdict::Warn),
            count(Verdict::Fail),
            count(Verdict::Unknown)
        )?;
    }
    out.flush()?;
    Ok(checks.iter().all(|check| check.verdict != Verdict::Fail))
}

/// What is unknown for one reason is one line for people: thirty of them would bury what matters.
fn folded<'a>(checks: impl Iterator<Item = &'a Check>) -> Vec<Check> {
    let mut lines: Vec<Check> = Vec::new();
    let mut names: Vec<Vec<&'static str>> = Vec::new();
    for check in checks {
        let same = lines.last().is_some_and(|last| {
            (last.verdict, check.verdict) == (Verdict::Unknown, Verdict::Unknown)
                && last.subject.is_none()
                && check.subject.is_none()
                && last.remedy.is_none()
                && check.remedy.is_none()
                && last.reason == check.reason
        });
        match (same, names.last_mut()) {
            (true, Some(names)) => names.push(check.name),
            (true, None) | (false, _) => {
                lines.push(check.clone());
                names.push(vec![check.name]);
            }
        }
    }
    for (line, names) in lines.iter_mut().zip(names).filter(|(_, names)| names.len() > 1) {
        line.reason = format!("and {} more: {}", names.len() - 1, line.reason);
    }
    lines
}

fn text(check: &Check) -> String {
    let subject = check.subject.as_deref().map(|subject| format!(" {}", printable(subject))).unwrap_or_default();
    let mut text = format!("{:<8}{}{subject}: {}\n", check.verdict.name(), check.name, printable(&check.reason));
    for line in check.remedy.iter().flat_map(|remedy| remedy.lines()) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "          {}", printable(line));
    }
    text
}

/// The text with control characters written out.
pub(in crate::cli) fn printable(text: &str) -> String {
    let mut printable = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            printable.extend(character.escape_default());
        } else {
            printable.push(character);
        }
    }
    printable
}

/// A text as an SQL literal that can be copied from a terminal, whatever is in it.
pub(super) fn literal(text: &str) -> String {
    let quoted = text.replace('\'', "''");
    if !text.contains(|character: char| character.is_control() || character == '\\') {
        return format!("'{quoted}'");
    }
    let mut escaped = String::new();
    for character in quoted.chars() {
        match character {
            '\\' => escaped.push_str("\\\\"),
            character if character.is_control() => {
                let _ = write!(escaped, "\\u{:04x}", u32::from(character));
            }
            character => escaped.push(character),
        }
    }
    format!("E'{escaped}'")
}

/// At most so many names, and how many more there are.
pub(super) fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const NAMES_MAX: usize = 8;
    let names: Vec<&str> = names.into_iter().collect();
    let more = names.len().saturating_sub(NAMES_MAX);
    let shown = names[..names.len() - more].join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}
