//! Typed reading of the merged tree: a value of the right type and range, or a problem that says what is allowed.
//!
//! Nothing here ever coerces: `true` is no 1, `1.9` no 2 and `"7"` no 7. Only what comes from a variable or a flag is text,
//! and is parsed.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use config::{Value, ValueKind};

use super::problems::{Origin, Problem, Warning, dotted, nearest, shown};
use super::{Secret, layers};

/// Reads values and collects what is wrong with them.
pub(super) struct Reader {
    tree: Value,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
}

/// One value as it was given.
enum Given {
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(String),
    /// Text of a variable or a flag, whatever type the key has.
    Raw(String),
    List(Vec<Given>),
}

impl Given {
    /// As a problem shows it.
    fn shown(&self) -> String {
        match self {
            Self::Bool(truth) => truth.to_string(),
            Self::Integer(number) => number.to_string(),
            Self::Float(number) => format!("{number:?}"),
            Self::Text(text) | Self::Raw(text) => shown(text),
            Self::List(items) => format!("[{}]", items.iter().map(Self::shown).collect::<Vec<_>>().join(", ")),
        }
    }

    fn of(kind: &ValueKind, raw: bool) -> Option<Self> {
        match kind {
            ValueKind::Boolean(truth) => Some(Self::Bool(*truth)),
            ValueKind::I64(number) => Some(Self::Integer(*number)),
            ValueKind::Float(number) => Some(Self::Float(*number)),
            ValueKind::String(text) if raw => Some(Self::Raw(text.clone())),
            ValueKind::String(text) => Some(Self::Text(text.clone())),
            ValueKind::Array(items) => {
                items.iter().map(|item| Self::of(&item.kind, raw)).collect::<Option<_>>().map(Self::List)
            }
            // Our layers make none of the others.
            ValueKind::Nil | ValueKind::I128(_) | ValueKind::U64(_) | ValueKind::U128(_) | ValueKind::Table(_) => None,
        }
    }
}

/// A duration as it is written in the configuration.
pub(super) fn duration_text(duration: Duration) -> String {
    humantime::format_duration(duration).to_string()
}

/// A size as it is written in the configuration: the largest unit that leaves no fraction, binary ones first.
pub(super) fn size_text(bytes: usize) -> String {
    const UNITS: [(usize, &str); 6] =
        [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    UNITS
        .into_iter()
        .find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit))
        .map_or_else(|| format!("{bytes}B"), |(unit, name)| format!("{}{name}", bytes / unit))
}

impl Reader {
    pub(super) fn new(layers: layers::Layers) -> Self {
        Self { tree: layers.tree, problems: layers.problems, warnings: layers.warnings }
    }

    fn find<S: AsRef<str>>(&self, path: &[S]) -> Option<&Value> {
        path.iter().try_fold(&self.tree, |place, name| match &place.kind {
            ValueKind::Table(table) => table.get(name.as_ref()),
            _ => None,
        })
    }

    /// Where the value of a key comes from.
    pub(super) fn origin<S: AsRef<str>>(&self, path: &[S]) -> Origin {
        self.find(path).map_or(Origin::Default, |value| layers::origin(value).0)
    }

    /// Whether anybody set the key.
    pub(super) fn is_set<S: AsRef<str>>(&self, path: &[S]) -> bool {
        self.find(path).is_some()
    }

    /// The names of the user's choice below a section, sorted.
    pub(super) fn names<S: AsRef<str>>(&self, path: &[S]) -> Vec<String> {
        let mut names: Vec<String> = match self.find(path).map(|value| &value.kind) {
            Some(ValueKind::Table(table)) => table.keys().cloned().collect(),
            Some(_) | None => Vec::new(),
        };
        names.sort();
        names
    }

    /// Every path that somebody set, with its origin.
    pub(super) fn origins(&self) -> BTreeMap<Vec<String>, Origin> {
        fn collect(place: &Value, path: &mut Vec<String>, origins: &mut BTreeMap<Vec<String>, Origin>) {
            if let ValueKind::Table(table) = &place.kind {
                for (name, inner) in table {
                    path.push(name.clone());
                    collect(inner, path, origins);
                    path.pop();
                }
            } else {
                origins.insert(path.clone(), layers::origin(place).0);
            }
        }
        let mut origins = BTreeMap::new();
        collect(&self.tree, &mut Vec::new(), &mut origins);
        origins
    }

    /// Adds a problem about a key whose value may be shown.
    pub(super) fn problem<S: AsRef<str>>(&mut self, path: &[S], value: Option<String>, text: impl Into<String>) {
        let origin = self.origin(path);
        self.problems.push(Problem { key: dotted(path), value, origin, text: text.into() });
    }

    /// Adds a warning about a key.
    pub(super) fn warning<S: AsRef<str>>(&mut self, path: &[S], text: impl Into<String>) {
        self.warnings.push(Warning { key: dotted(path), text: text.into() });
    }

    /// Another key, its value and where that comes from, as the text of a relation names it.
    pub(super) fn cite<S: AsRef<str>>(&self, path: &[S], value: impl Display) -> String {
        format!("{} = {value} ({})", dotted(path), self.origin(path))
    }

    /// Reads a key: the default when nobody set it, `None` when its problem was reported.
    fn read<T, S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: T,
        parse: impl FnOnce(&Given) -> Result<T, String>,
    ) -> Option<T> {
        let Some(value) = self.find(path) else { return Some(default) };
        let raw = layers::origin(value).1;
        let given = Given::of(&value.kind, raw).expect("our layers hold these kinds only");
        match parse(&given) {
            Ok(value) => Some(value),
            Err(text) => {
                self.problem(path, Some(given.shown()), text);
                None
            }
        }
    }

    /// A whole number within bounds.
    pub(super) fn integer<S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Option<usize> {
        self.read(path, default, |given| {
            let number = match given {
                Given::Integer(number) => Some(*number),
                // `parse` alone would take a plus sign.
                Given::Raw(text) if text.chars().all(|c| c.is_ascii_digit()) => text.parse().ok(),
                Given::Bool(_) | Given::Float(_) | Given::Text(_) | Given::Raw(_) | Given::List(_) => None,
            };
            number.and_then(|number| usize::try_from(number).ok()).filter(|number| range.contains(number)).ok_or_else(
                || {
                    let quoted_number = matches!(given, Given::Text(text) if text.parse::<i64>().is_ok());
                    let hint = if quoted_number { "; write it without quotes" } else { "" };
                    format!("must be a whole number from {} to {}{hint}", range.start(), range.end())
                },
            )
        })
    }

    /// A number with a fraction, within bounds; a whole number will do.
    pub(super) fn float<S: AsRef<str>>(&mut self, path: &[S], default: f64, range: RangeInclusive<f64>) -> Option<f64> {
        self.read(path, default, |given| {
            let number = match given {
                Given::Float(number) => Some(*number),
                Given::Integer(number) => i32::try_from(*number).ok().map(f64::from),
                Given::Raw(text) if text.starts_with(|c: char| c.is_ascii_digit()) => text.parse().ok(),
                Given::Bool(_) | Given::Text(_) | Given::Raw(_) | Given::List(_) => None,
            };
            // NaN is in no range.
            number
                .filter(|number| range.contains(number))
                .ok_or_else(|| format!("must be a number from {:?} to {:?}", range.start(), range.end()))
        })
    }

    /// `true` or `false`.
    pub(super) fn boolean<S: AsRef<str>>(&mut self, path: &[S], default: bool) -> Option<bool> {
        self.read(path, default, |given| match given {
            Given::Bool(truth) => Ok(*truth),
            Given::Raw(text) if text == "true" => Ok(true),
            Given::Raw(text) if text == "false" => Ok(false),
            Given::Integer(_) | Given::Float(_) | Given::Text(_) | Given::Raw(_) | Given::List(_) => {
                let quoted_truth = matches!(given, Given::Text(text) if text == "true" || text == "false");
                let hint = if quoted_truth { "; write it without quotes" } else { "" };
                Err(format!("must be true or false{hint}"))
            }
        })
    }

    /// A duration with a unit, within bounds.
    pub(super) fn duration<S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: Duration,
        range: RangeInclusive<Duration>,
    ) -> Option<Duration> {
        self.read(path, default, |given| {
            parse_duration(given).filter(|duration| range.contains(duration)).ok_or_else(|| {
                format!("must be a duration from {}{}", duration_range(&range), unit_hint(given, "\"2s\""))
            })
        })
    }

    /// A duration with a unit, within bounds, or "off".
    pub(super) fn duration_or_off<S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: Option<Duration>,
        range: RangeInclusive<Duration>,
    ) -> Option<Option<Duration>> {
        self.read(path, default, |given| {
            let is_off = matches!(given, Given::Text(text) | Given::Raw(text) if text == "off");
            if is_off {
                return Ok(None);
            }
            let duration = parse_duration(given);
            if let Some(duration) = duration.filter(|duration| range.contains(duration)) {
                return Ok(Some(duration));
            }
            let means_off = match given {
                Given::Bool(truth) => !truth,
                Given::Integer(number) => *number == 0,
                Given::Text(text) | Given::Raw(text) => {
                    text == "0" || text.eq_ignore_ascii_case("off") || text == "false"
                }
                Given::Float(_) | Given::List(_) => false,
            };
            let hint = if means_off || duration == Some(Duration::ZERO) {
                "; spell it \"off\" to switch it off".to_owned()
            } else {
                unit_hint(given, "\"7d\"")
            };
            Err(format!("must be \"off\" or a duration from {}{hint}", duration_range(&range)))
        })
    }

    /// A size with a unit, within bounds.
    pub(super) fn size<S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Option<usize> {
        self.read(path, default, |given| {
            parse_size(given).filter(|size| range.contains(size)).ok_or_else(|| {
                let hint = match given {
                    Given::Integer(number) if *number > 0 => {
                        format!("; write it with a unit, such as \"{number}B\" or \"8MiB\"")
                    }
                    Given::Bool(_)
                    | Given::Integer(_)
                    | Given::Float(_)
                    | Given::Text(_)
                    | Given::Raw(_)
                    | Given::List(_) => unit_hint(given, "\"8MiB\""),
                };
                format!(
                    "must be a size from \"{}\" to \"{}\"{hint}",
                    size_text(*range.start()),
                    size_text(*range.end())
                )
            })
        })
    }

    /// One of a few words.
    pub(super) fn choice<T: Copy, S: AsRef<str>>(
        &mut self,
        path: &[S],
        default: T,
        choices: &[(&'static str, T)],
    ) -> Option<T> {
        self.read(path, default, |given| {
            let (Given::Text(text) | Given::Raw(text)) = given else {
                return Err(format!("must be {}", alternatives(choices)));
            };
            choices.iter().find(|(name, _)| name == text).map(|(_, value)| *value).ok_or_else(|| {
                match nearest(text, choices.iter().map(|(name, _)| *name)) {
                    Some(near) => format!("must be {}; did you mean \"{near}\"?", alternatives(choices)),
                    None => format!("must be {}", alternatives(choices)),
                }
            })
        })
    }

    /// Text that the check accepts; its error is the whole sentence. `None` when it is not set, too.
    pub(super) fn text<S: AsRef<str>>(
        &mut self,
        path: &[S],
        check: impl FnOnce(&str) -> Result<(), String>,
    ) -> Option<String> {
        self.read(path, None, |given| match given {
            Given::Text(text) | Given::Raw(text) => check(text).map(|()| Some(text.clone())),
            Given::Bool(_) | Given::Integer(_) | Given::Float(_) | Given::List(_) => {
                Err("must be a string in quotes".to_owned())
            }
        })
        .flatten()
    }

    /// The name of a file; whether it is there is another question.
    pub(super) fn file<S: AsRef<str>>(&mut self, path: &[S]) -> Option<PathBuf> {
        self.text(path, |name| if name.is_empty() { Err("must name a file".to_owned()) } else { Ok(()) })
            .map(PathBuf::from)
    }

    /// Text that is never shown.
    pub(super) fn secret<S: AsRef<str>>(&mut self, path: &[S]) -> Option<Secret> {
        match self.find(path).map(|value| &value.kind) {
            None => None,
            Some(ValueKind::String(text)) if !text.is_empty() => Some(Secret::new(text.clone())),
            Some(ValueKind::String(_)) => {
                self.problem(path, None, "is empty: leave it out, or give it a value");
                None
            }
            Some(_) => {
                self.problem(path, None, "must be a string in quotes");
                None
            }
        }
    }

    /// A value of librdkafka's: it takes all of them as text, so a number or a truth value loses nothing. Never shown.
    pub(super) fn property<S: AsRef<str>>(&mut self, path: &[S]) -> Option<Secret> {
        let text = match self.find(path).map(|value| &value.kind) {
            Some(ValueKind::String(text)) => text.clone(),
            Some(ValueKind::I64(number)) => number.to_string(),
            Some(ValueKind::Boolean(truth)) => truth.to_string(),
            Some(_) | None => {
                self.problem(path, None, "must be a string, a whole number, true or false");
                return None;
            }
        };
        if text.contains('\0') {
            self.problem(path, None, "cannot hold a NUL: librdkafka has no such text");
            return None;
        }
        Some(Secret::new(text))
    }

    /// A list of strings; in a variable or a flag separated by commas.
    pub(super) fn list<S: AsRef<str>>(
        &mut self,
        path: &[S],
        check: impl Fn(&str) -> Result<(), String>,
    ) -> Option<Vec<String>> {
        let value = self.find(path)?;
        let raw = layers::origin(value).1;
        let items = match Given::of(&value.kind, raw) {
            Some(Given::List(items)) => items,
            Some(Given::Raw(text)) => text.split(',').map(|item| Given::Text(item.trim().to_owned())).collect(),
            Some(Given::Text(text)) => {
                let text = format!("must be a list: write [{}]", shown(&text));
                self.problem(path, None, text);
                return None;
            }
            Some(given @ (Given::Bool(_) | Given::Integer(_) | Given::Float(_))) => {
                self.problem(path, Some(given.shown()), "must be a list of strings");
                return None;
            }
            None => return None,
        };
        let mut kept = Vec::new();
        let mut ok = true;
        for (at, item) in items.iter().enumerate() {
            let result = match item {
                Given::Text(text) => check(text).map(|()| kept.push(text.clone())),
                Given::Bool(_) | Given::Integer(_) | Given::Float(_) | Given::Raw(_) | Given::List(_) => {
                    Err("must be a string in quotes".to_owned())
                }
            };
            if let Err(text) = result {
                ok = false;
                let origin = self.origin(path);
                let key = format!("{}[{at}]", dotted(path));
                self.problems.push(Problem { key, value: Some(item.shown()), origin, text });
            }
        }
        ok.then_some(kept)
    }
}

fn alternatives<T>(choices: &[(&'static str, T)]) -> String {
    let names: Vec<_> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
        None => String::new(),
    }
}

fn duration_range(range: &RangeInclusive<Duration>) -> String {
    format!("\"{}\" to \"{}\"", duration_text(*range.start()), duration_text(*range.end()))
}

/// A bare number has no unit, and guessing one is how a timeout of 30 becomes half a minute or 30 milliseconds.
fn unit_hint(given: &Given, example: &str) -> String {
    let bare = match given {
        Given::Integer(_) | Given::Float(_) => true,
        Given::Text(text) | Given::Raw(text) => text.parse::<f64>().is_ok(),
        Given::Bool(_) | Given::List(_) => false,
    };
    if bare { format!("; write it with a unit, such as {example}") } else { String::new() }
}

fn parse_duration(given: &Given) -> Option<Duration> {
    let (Given::Text(text) | Given::Raw(text)) = given else { return None };
    duration_of(text)
}

/// A duration as the configuration and the command line take it, such as `90s` or `1h 30m`.
pub(crate) fn duration_of(text: &str) -> Option<Duration> {
    // humantime takes "0" for nothing at all, and adds up seconds and their fractions without looking, so it panics when the
    // sum is over the end of u64; no duration of ours needs that many digits.
    const DIGITS_MAX: usize = 12;
    let digits = text.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    if text == "0" || digits > DIGITS_MAX { None } else { humantime::parse_duration(text).ok() }
}

fn parse_size(given: &Given) -> Option<usize> {
    let (Given::Text(text) | Given::Raw(text)) = given else { return None };
    // A number without a unit is bytes to bytesize; ours say so.
    if text.chars().all(|c| c.is_ascii_digit()) {
        return None;
    }
    let size: bytesize::ByteSize = text.parse().ok()?;
    usize::try_from(size.as_u64()).ok()
}
