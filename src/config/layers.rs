//! File, environment and flags become one tree of values, each with its origin; unknown names are found here.
//!
//! Nothing here ever interprets a value, and nothing here ever folds the case of a source's name. The `config` crate merges
//! the layers. Its own readers of TOML and of the environment are not used: they lose the line of a key, turn dates into
//! strings, split quoted names at their dots and fold names to lower case.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};

use config::{ConfigError, Source, Value, ValueKind};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problems::{Origin, Problem, Warning, dotted, nearest, quoted, shown};

/// What may stand at a place of the tree.
pub(super) enum Shape {
    /// One value, or a list of values.
    Leaf,
    /// A table with these keys and no others.
    Section(&'static [(&'static str, Shape)]),
    /// A table with keys of the user's choice, each holding the same shape; names are taken exactly as written.
    Named(&'static Shape),
    /// A table of values with dotted names: however deep TOML nests them, they come out as one name each.
    Flat,
}

use Shape::{Flat, Leaf, Named, Section};

const BACKOFF: Shape =
    Section(&[("kind", Leaf), ("initial", Leaf), ("multiplier", Leaf), ("max", Leaf), ("jitter", Leaf)]);
const RULES: Shape = Section(&[("policy", Leaf), ("on_halt", Leaf), ("max_attempts", Leaf), ("backoff", BACKOFF)]);

/// Every section and key there is.
pub(super) static ROOT: Shape = Section(&[
    (
        "database",
        Section(&[
            ("url", Leaf),
            ("url_file", Leaf),
            ("password", Leaf),
            ("password_file", Leaf),
            ("schema", Leaf),
            ("table", Leaf),
            ("pool_size", Leaf),
            ("connect_timeout", Leaf),
            ("statement_timeout", Leaf),
            ("prepared_statements", Leaf),
            ("synchronous_commit", Leaf),
            ("tls", Section(&[("mode", Leaf), ("ca_file", Leaf), ("cert_file", Leaf), ("key_file", Leaf)])),
        ]),
    ),
    (
        "kafka",
        Section(&[
            ("brokers", Leaf),
            ("message_bytes_max", Leaf),
            ("topic_fault_dead_after", Leaf),
            ("properties", Flat),
            ("property_files", Flat),
        ]),
    ),
    (
        "relay",
        Section(&[
            ("instance", Leaf),
            ("batch_rows_max", Leaf),
            ("batch_bytes_max", Leaf),
            ("in_flight_rows_max", Leaf),
            ("in_flight_bytes_max", Leaf),
            ("poll_interval_min", Leaf),
            ("poll_interval_max", Leaf),
            ("publish_timeout", Leaf),
            ("settle_timeout", Leaf),
            ("publishing_timeout", Leaf),
            ("shutdown_grace", Leaf),
            ("unlisted_sources", Leaf),
        ]),
    ),
    ("defaults", RULES),
    ("sources", Named(&RULES)),
    ("limits", Section(&[("payload_bytes_max", Leaf), ("attributes_bytes_max", Leaf)])),
    ("maintenance", Section(&[("interval", Leaf), ("retention", Leaf)])),
    ("http", Section(&[("listen", Leaf)])),
    ("log", Section(&[("format", Leaf), ("level", Leaf)])),
]);

/// Every key with a fixed path, dotted, in the order of the documentation: `database.url`, `database.tls.mode`, …
pub(super) fn fixed_keys() -> Vec<String> {
    fn collect(shape: &Shape, path: &mut Vec<&'static str>, keys: &mut Vec<String>) {
        match shape {
            Leaf => keys.push(path.join(".")),
            Section(entries) => {
                for (name, inner) in *entries {
                    path.push(name);
                    collect(inner, path, keys);
                    path.pop();
                }
            }
            Named(_) | Flat => {}
        }
    }
    let mut keys = Vec::new();
    collect(&ROOT, &mut Vec::new(), &mut keys);
    keys
}

/// Prefix of the environment variables that are ours. Those of Kubernetes' service links (`KEIRO_RELAY_PORT`) have one
/// underscore, not two.
pub(super) const ENV_PREFIX: &str = "KEIRO_RELAY__";

type Table = HashMap<String, Value>;

/// One layer of values in the shape of [`ROOT`].
#[derive(Clone, Default)]
struct Layer(Table);

// Values may be secrets.
impl std::fmt::Debug for Layer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Layer")
    }
}

impl Source for Layer {
    fn clone_into_box(&self) -> Box<dyn Source + Send + Sync> {
        Box::new(self.clone())
    }

    fn collect(&self) -> Result<Table, ConfigError> {
        Ok(self.0.clone())
    }
}

/// The merged layers, and what was found wrong while they were read.
pub(super) struct Layers {
    pub(super) tree: Value,
    pub(super) problems: Vec<Problem>,
    pub(super) warnings: Vec<Warning>,
}

/// Merges file < environment < flags. Each layer has the right shape by then, so a merge never replaces a table by a value.
pub(super) fn merge(
    file: Option<(&str, &str)>,
    environment: impl IntoIterator<Item = (String, String)>,
    flags: &[(String, String, String)],
) -> Layers {
    let mut problems = Vec::new();
    let mut warnings = Vec::new();
    let file = file.map_or_else(Layer::default, |(name, text)| file_layer(name, text, &mut problems));
    let environment = environment_layers(environment, &file, &mut problems, &mut warnings);
    let flags = flag_layer(flags, &mut problems);
    let merged = config::Config::builder()
        .add_source(file)
        .add_source(environment.tables)
        .add_source(environment.values)
        .add_source(flags)
        .build()
        .expect("our own layers do no IO, so they merge");
    Layers { tree: merged.cache, problems, warnings }
}

/// Where a value of the merged tree comes from, and whether it is text that has yet to be parsed.
pub(super) fn origin(value: &Value) -> (Origin, bool) {
    let mut parts = value.origin().unwrap_or_default().splitn(3, ':');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("file"), Some(line), Some(name)) => {
            (Origin::File { name: name.to_owned(), line: line.parse().unwrap_or(0) }, false)
        }
        (Some("env"), Some(form), Some(name)) => (Origin::Environment(name.to_owned()), form == "text"),
        (Some("flag"), Some(form), Some(name)) => (Origin::Flag(name.to_owned()), form == "text"),
        (_, _, _) => (Origin::Default, false),
    }
}

/// The `config` crate keeps a string with each value: ours says layer, line or form, and name.
fn value(origin: &Origin, text: bool, kind: impl Into<ValueKind>) -> Value {
    let form = if text { "text" } else { "toml" };
    let origin = match origin {
        Origin::Default => String::new(),
        Origin::File { name, line } => format!("file:{line}:{name}"),
        Origin::Environment(name) => format!("env:{form}:{name}"),
        Origin::Flag(name) => format!("flag:{form}:{name}"),
    };
    Value::new(Some(&origin), kind)
}

fn file_layer(name: &str, text: &str, problems: &mut Vec<Problem>) -> Layer {
    let lines = Lines::of(text);
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        // What else a broken document seems to say is guesswork, so only its errors are reported, and never the line itself:
        // it may hold a secret.
        problems.extend(errors.iter().take(SYNTAX_ERRORS_MAX).map(|error| {
            let (line, column) = lines.position(error.span().map_or(0, |span| span.start));
            Problem {
                key: String::new(),
                value: None,
                origin: Origin::File { name: name.to_owned(), line },
                text: format!("not valid TOML at column {column}: {}", error.message()),
            }
        }));
        return Layer::default();
    }
    let mut walk = Walk { problems, origin: &|at| Origin::File { name: name.to_owned(), line: lines.position(at).0 } };
    Layer(walk.section(&mut Vec::new(), root_entries(), document.into_inner()))
}

/// A broken line tends to break those after it; more than these would hide the first.
const SYNTAX_ERRORS_MAX: usize = 10;

fn root_entries() -> &'static [(&'static str, Shape)] {
    match &ROOT {
        Section(entries) => entries,
        Leaf | Named(_) | Flat => unreachable!("the root is a section"),
    }
}

/// Turns offsets into lines and columns, both counted from 1.
struct Lines<'t> {
    text: &'t str,
    starts: Vec<usize>,
}

impl<'t> Lines<'t> {
    fn of(text: &'t str) -> Self {
        let starts = std::iter::once(0).chain(text.match_indices('\n').map(|(at, _)| at + 1)).collect();
        Self { text, starts }
    }

    fn position(&self, at: usize) -> (usize, usize) {
        let line = self.starts.partition_point(|start| *start <= at).max(1);
        let before = self.text.get(self.starts[line - 1]..at).unwrap_or_default();
        (line, before.chars().count() + 1)
    }
}

/// Walks a TOML document along [`Shape`], keeping what fits and reporting what does not.
struct Walk<'a> {
    problems: &'a mut Vec<Problem>,
    /// The origin of what stands at an offset.
    origin: &'a dyn Fn(usize) -> Origin,
}

impl Walk<'_> {
    fn problem(&mut self, path: &[String], at: usize, value: Option<String>, text: String) {
        self.problems.push(Problem { key: dotted(path), value, origin: (self.origin)(at), text });
    }

    fn section(
        &mut self,
        path: &mut Vec<String>,
        entries: &'static [(&'static str, Shape)],
        table: DeTable<'_>,
    ) -> Table {
        let mut kept = Table::new();
        for (name, inner) in table {
            let at = name.span().start;
            let name = name.into_inner().into_owned();
            path.push(name.clone());
            match entries.iter().find(|(known, _)| *known == name) {
                Some((_, shape)) => {
                    if let Some(inner) = self.place(path, shape, at, inner) {
                        kept.insert(name, inner);
                    }
                }
                // The value is not shown: behind a mistyped name it may be a secret.
                None => self.problem(path, at, None, unknown(path, entries)),
            }
            path.pop();
        }
        kept
    }

    fn place(
        &mut self,
        path: &mut Vec<String>,
        shape: &'static Shape,
        at: usize,
        found: Spanned<DeValue<'_>>,
    ) -> Option<Value> {
        match (shape, found.into_inner()) {
            (Leaf, found) => self.leaf(path, at, found),
            (Section(entries), DeValue::Table(table)) => Some(Value::new(None, self.section(path, entries, table))),
            (Named(inner), DeValue::Table(table)) => {
                let mut kept = Table::new();
                for (name, found) in table {
                    let at = name.span().start;
                    let name = name.into_inner().into_owned();
                    path.push(name.clone());
                    if name.contains('\0') {
                        let text = "a source's name cannot hold a NUL: PostgreSQL has no such text".to_owned();
                        self.problem(path, at, None, text);
                    } else if let Some(found) = self.place(path, inner, at, found) {
                        kept.insert(name, found);
                    }
                    path.pop();
                }
                Some(Value::new(None, kept))
            }
            (Flat, DeValue::Table(table)) => {
                let mut kept = Table::new();
                self.flatten(path, "", table, &mut kept);
                Some(Value::new(None, kept))
            }
            (Section(_) | Named(_) | Flat, _) => {
                self.problem(path, at, None, format!("is a section: write [{}] and its keys below it", dotted(path)));
                None
            }
        }
    }

    fn flatten(&mut self, path: &mut Vec<String>, prefix: &str, table: DeTable<'_>, kept: &mut Table) {
        for (name, found) in table {
            let at = name.span().start;
            let name = format!("{prefix}{}", name.into_inner());
            if let DeValue::Table(inner) = found.get_ref() {
                self.flatten(path, &format!("{name}."), inner.clone(), kept);
                continue;
            }
            path.push(name.clone());
            match kept.entry(name) {
                Entry::Occupied(_) => {
                    self.problem(path, at, None, "is set twice, once quoted and once as a table: keep one".to_owned());
                }
                Entry::Vacant(place) => {
                    if let Some(found) = self.leaf(path, at, found.into_inner()) {
                        place.insert(found);
                    }
                }
            }
            path.pop();
        }
    }

    fn leaf(&mut self, path: &[String], at: usize, found: DeValue<'_>) -> Option<Value> {
        let origin = (self.origin)(at);
        match found {
            DeValue::String(text) => Some(value(&origin, false, text.into_owned())),
            DeValue::Boolean(truth) => Some(value(&origin, false, truth)),
            DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => Some(value(&origin, false, number)),
                Err(_) => {
                    self.problem(path, at, None, "is a number too large for any setting".to_owned());
                    None
                }
            },
            DeValue::Float(number) => match number.as_str().parse::<f64>() {
                Ok(number) => Some(value(&origin, false, number)),
                Err(_) => {
                    self.problem(path, at, None, "is not a number that can be read".to_owned());
                    None
                }
            },
            DeValue::Datetime(date) => {
                self.problem(
                    path,
                    at,
                    Some(date.to_string()),
                    "is a date, and no setting is: quote a string".to_owned(),
                );
                None
            }
            DeValue::Array(items) => {
                let mut kept = Vec::new();
                for item in items {
                    kept.push(self.leaf(path, at, item.into_inner())?);
                }
                Some(value(&origin, false, kept))
            }
            DeValue::Table(_) => {
                self.problem(path, at, None, "is one value, not a section".to_owned());
                None
            }
        }
    }
}

/// The text for a name that is not in its section.
fn unknown(path: &[String], entries: &'static [(&'static str, Shape)]) -> String {
    let (name, section) = path.split_last().expect("an unknown name has a path");
    let kind = if section.is_empty() { "section" } else { "key" };
    let names = || entries.iter().map(|(name, _)| *name);
    if let Some(near) = nearest(name, names()) {
        return format!("unknown {kind}; did you mean {near}?");
    }
    // The right key in the wrong section is a slip as common as a typing error.
    let homes: Vec<_> = fixed_keys().into_iter().filter(|key| key.rsplit('.').next() == Some(name.as_str())).collect();
    match homes.as_slice() {
        [home] => format!("unknown {kind} here; did you mean {home}?"),
        _ if section == ["kafka"] => "unknown key; librdkafka's own settings stand in [kafka.properties]".to_owned(),
        _ => format!("unknown {kind}; known here: {}", names().collect::<Vec<_>>().join(", ")),
    }
}

struct EnvironmentLayers {
    /// Variables that hold a whole table as inline TOML.
    tables: Layer,
    /// Variables that hold one value; they win over `tables`.
    values: Layer,
}

fn environment_layers(
    environment: impl IntoIterator<Item = (String, String)>,
    file: &Layer,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Warning>,
) -> EnvironmentLayers {
    let mut layers = EnvironmentLayers { tables: Layer::default(), values: Layer::default() };
    let mut seen = BTreeSet::new();
    let mut variables: Vec<_> = environment.into_iter().collect();
    // The order of an environment is no order, and two runs should complain alike.
    variables.sort();
    for (name, text) in variables {
        let Some(rest) = name.strip_prefix(ENV_PREFIX) else {
            warnings.extend(single_underscores(&name));
            continue;
        };
        let origin = Origin::Environment(name.clone());
        let mut problem = |key: String, text: String| {
            problems.push(Problem { key, value: None, origin: origin.clone(), text });
        };
        let target = match resolve(rest, "__", &ROOT) {
            Ok(target) => target,
            Err(text) => {
                // The origin names the variable; there is no key to name.
                problem(String::new(), text);
                continue;
            }
        };
        let key = dotted(target.path());
        if !seen.insert(key.clone()) {
            problem(key, "another variable sets the same key in another spelling: keep one".to_owned());
        } else if text.is_empty() {
            problem(key, "the variable is set but empty: unset it, or give it a value".to_owned());
        } else if text.contains(['\0', '\u{FFFD}']) {
            problem(key, "the value is not valid UTF-8".to_owned());
        } else {
            match target {
                Target::Value(path) => {
                    warnings.extend(other_case(&path, &name, file));
                    put(&mut layers.values.0, &path, value(&origin, true, text));
                }
                Target::Table(path, shape) => {
                    if let Some(table) = inline_table(&path, shape, &origin, &text, problems) {
                        put(&mut layers.tables.0, &path, table);
                    }
                }
            }
        }
    }
    layers
}

/// A table as inline TOML: the way to names that no shell lets into a variable's name.
fn inline_table(
    path: &[String],
    shape: &'static Shape,
    origin: &Origin,
    text: &str,
    problems: &mut Vec<Problem>,
) -> Option<Value> {
    match DeValue::parse(text) {
        Ok(found) => {
            let mut walk = Walk { problems, origin: &|_| origin.clone() };
            walk.place(&mut path.to_vec(), shape, 0, found)
        }
        Err(error) => {
            let text = format!(
                "must be an inline TOML table, such as {{ \"a.name\" = … }}: not valid TOML at column {}: {}",
                Lines::of(text).position(error.span().map_or(0, |span| span.start)).1,
                error.message()
            );
            problems.push(Problem { key: dotted(path), value: None, origin: origin.clone(), text });
            None
        }
    }
}

fn flag_layer(flags: &[(String, String, String)], problems: &mut Vec<Problem>) -> Layer {
    let mut layer = Layer::default();
    for (flag, key, text) in flags {
        let origin = Origin::Flag(flag.clone());
        match resolve(key, ".", &ROOT) {
            Ok(Target::Value(path)) if text.is_empty() => problems.push(Problem {
                key: dotted(&path),
                value: None,
                origin,
                text: "the flag is empty: leave it out, or give it a value".to_owned(),
            }),
            Ok(Target::Value(path)) => put(&mut layer.0, &path, value(&origin, true, text.as_str())),
            Ok(Target::Table(path, _)) => problems.push(Problem {
                key: dotted(&path),
                value: None,
                origin,
                text: "is a section, and a flag sets one key".to_owned(),
            }),
            Err(text) => problems.push(Problem { key: key.clone(), value: None, origin, text }),
        }
    }
    layer
}

/// What the name of a variable or the key of a flag stands for.
enum Target {
    Value(Vec<String>),
    /// A section with names of the user's choice.
    Table(Vec<String>, &'static Shape),
}

impl Target {
    fn path(&self) -> &[String] {
        match self {
            Self::Value(path) | Self::Table(path, _) => path,
        }
    }
}

/// Finds the place that a name spells. Our own names match in any case; a source's name is taken exactly as written, up to
/// the first separator after which a rule's key follows, so that it may hold the separator itself.
fn resolve(name: &str, separator: &str, shape: &'static Shape) -> Result<Target, String> {
    let Some(mut path) = descend(name, separator, shape) else {
        let known = fixed_keys().into_iter().map(|key| key.replace('.', separator));
        let known: Vec<_> = known.map(|key| if separator == "__" { key.to_ascii_uppercase() } else { key }).collect();
        let near = nearest(name, known.iter().map(String::as_str));
        let prefix = if separator == "__" { ENV_PREFIX } else { "" };
        return Err(match near {
            Some(near) => format!("unknown key; did you mean {prefix}{near}?"),
            None if separator == "__" => {
                format!("unknown key; the form is {ENV_PREFIX}SECTION__KEY, such as {ENV_PREFIX}DATABASE__URL")
            }
            None => "unknown key; the form is section.key, such as database.url".to_owned(),
        });
    };
    path.1.reverse();
    match path.0 {
        Leaf => Ok(Target::Value(path.1)),
        shape @ (Named(_) | Flat) => Ok(Target::Table(path.1, shape)),
        Section(_) => Err(format!("{} is a section: name one of its keys too", dotted(&path.1))),
    }
}

/// The shape at the end of the name, and the path to it, last name first.
fn descend(name: &str, separator: &str, shape: &'static Shape) -> Option<(&'static Shape, Vec<String>)> {
    match shape {
        Leaf => None,
        Section(entries) => entries.iter().find_map(|(known, inner)| {
            let (head, rest) = name.split_at_checked(known.len())?;
            if !head.eq_ignore_ascii_case(known) {
                return None;
            }
            if rest.is_empty() {
                return Some((inner, vec![(*known).to_owned()]));
            }
            let (shape, mut path) = descend(rest.strip_prefix(separator)?, separator, inner)?;
            path.push((*known).to_owned());
            Some((shape, path))
        }),
        Named(inner) => name.match_indices(separator).find_map(|(at, _)| {
            let (chosen, rest) = (&name[..at], &name[at + separator.len()..]);
            let (shape, mut path) = descend(rest, separator, inner)?;
            // A section of a source is not a key, and a name must not be empty: both look on for another split.
            (matches!(shape, Leaf) && !chosen.is_empty()).then(|| {
                path.push(chosen.to_owned());
                (shape, path)
            })
        }),
        Flat => (!name.is_empty()).then(|| (&Leaf, vec![property_name(name)])),
    }
}

/// librdkafka's name for what a variable spells: `SASL_PASSWORD` and `sasl.password` are both `sasl.password`.
fn property_name(name: &str) -> String {
    /// The few names of librdkafka with an underscore of their own.
    const UNDERSCORED: [&str; 2] = ["log_level", "enabled_events"];
    let folded = name.to_ascii_lowercase();
    if UNDERSCORED.contains(&folded.as_str()) { folded } else { folded.replace('_', ".") }
}

fn put(table: &mut Table, path: &[String], value: Value) {
    let (first, rest) = path.split_first().expect("a value has a path");
    if rest.is_empty() {
        table.insert(first.clone(), value);
        return;
    }
    let inner = table.entry(first.clone()).or_insert_with(|| Value::new(None, Table::new()));
    if let ValueKind::Table(inner) = &mut inner.kind {
        put(inner, rest, value);
    }
}

/// `KEIRO_RELAY_DATABASE_URL` does nothing, which nobody would guess; other variables with our name are not ours to judge.
fn single_underscores(name: &str) -> Option<Warning> {
    let squeeze = |text: &str| text.replace(['_', '.'], "").to_ascii_lowercase();
    let rest = squeeze(name.strip_prefix("KEIRO_RELAY_")?);
    let key = fixed_keys().into_iter().find(|key| squeeze(key) == rest)?;
    let right = format!("{ENV_PREFIX}{}", key.replace('.', "__").to_ascii_uppercase());
    Some(Warning { key: name.to_owned(), text: format!("the variable is not read; {key} is set by {right}") })
}

/// A variable that names a source in another case than the file does makes a new source, which is seldom meant.
fn other_case(path: &[String], variable: &str, file: &Layer) -> Option<Warning> {
    let [section, name, ..] = path else { return None };
    if section != "sources" {
        return None;
    }
    let ValueKind::Table(listed) = &file.0.get("sources")?.kind else { return None };
    if listed.contains_key(name) {
        return None;
    }
    let listed = listed.keys().filter(|listed| listed.eq_ignore_ascii_case(name)).min()?;
    Some(Warning {
        key: variable.to_owned(),
        text: format!(
            "names a source {} that the file does not list; it lists {}, and names are matched exactly",
            shown(name),
            quoted(listed)
        ),
    })
}
