//! What is in force, as TOML that could be a configuration file again, each value with its origin.
//!
//! Nothing here ever prints a secret, nor a property of librdkafka that the user set: any of them may be one.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use super::problems::{Origin, dotted, key, quoted};
use super::read::{duration_text, size_text};
use super::{Config, ConfigFile, Database, Kafka, Loaded, Overrides, Problems, Relay, Secret, kind_name};
use crate::domain::policy::{Policy, SourceRules};

const HIDDEN: &str = "\"***\"";

/// One value as TOML, or why there is none.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Printed {
    /// Shown as it is.
    Value(String),
    /// Shown as `"***"`; kept so that a change of it is noticed.
    Hidden(Secret),
    /// Nobody set it and it has no default.
    Unset,
}

use Printed::{Hidden, Unset, Value};

impl Printed {
    /// What may be shown of it.
    pub(super) fn shown(&self) -> &str {
        match self {
            Value(value) => value,
            Hidden(_) => HIDDEN,
            Unset => "not set",
        }
    }
}

/// One section: its path, and its keys in order.
pub(super) type Section = (Vec<String>, Vec<(String, Printed)>);

/// Every setting of a configuration, section by section. `on_halt_is_set` says whether a section set `on_halt` itself.
pub(super) fn sections(config: &Config, on_halt_is_set: impl Fn(&[&str]) -> bool) -> Vec<Section> {
    let mut sections = Sections { list: Vec::new() };
    sections.database(&config.database);
    sections.kafka(&config.kafka);
    sections.relay(&config.relay);
    sections.rules(&["defaults"], &config.defaults, &on_halt_is_set);
    for (source_name, rules) in &config.sources {
        sections.rules(&["sources", source_name], rules, &on_halt_is_set);
    }
    let limits = &config.limits;
    sections.add(
        &["limits"],
        &[
            ("payload_bytes_max", size(limits.payload_bytes_max)),
            ("attributes_bytes_max", size(limits.attributes_bytes_max)),
        ],
    );
    let maintenance = &config.maintenance;
    sections.add(
        &["maintenance"],
        &[("interval", duration(maintenance.interval)), ("retention", duration_or_off(maintenance.retention))],
    );
    sections.add(&["http"], &[("listen", text(&config.http.listen.to_string()))]);
    sections.add(&["log"], &[("format", text(config.log.format.name())), ("level", text(&config.log.level))]);
    sections.list
}

impl Loaded {
    /// The configuration in force, as TOML; secrets are `"***"`, and a comment says where each value comes from.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut page = String::new();
        let file = self.file.as_ref().map_or("none".to_owned(), |file| file.display().to_string());
        let _ = writeln!(page, "# In force. File: {file}. Policy hash: {}.", self.config.policy_hash());
        let _ = writeln!(page, "# Secrets and librdkafka's properties are shown as ***.");
        // Where nothing halts, the key is a problem, and this page must load again; a section that set it may.
        let own = |section: &[&str]| self.origin(&[section, &["on_halt"][..]].concat()) != Origin::Default;
        for (section, entries) in sections(&self.config, own) {
            let section: Vec<&str> = section.iter().map(String::as_str).collect();
            let _ = writeln!(page, "\n[{}]", dotted(&section));
            for (name, printed) in &entries {
                match printed {
                    Value(_) | Hidden(_) => {
                        let origin = self.shown_origin(&section, name);
                        let _ = writeln!(page, "{} = {}  # {origin}", key(name), printed.shown());
                    }
                    Unset => {
                        let _ = writeln!(page, "# {} is not set", key(name));
                    }
                }
            }
        }
        page
    }

    /// A source has from `[defaults]` what it does not say itself.
    fn shown_origin(&self, section: &[&str], name: &str) -> String {
        let own = self.origin(&[section, &[name][..]].concat());
        match (own, section) {
            (Origin::Default, ["sources", _, rest @ ..]) => {
                let inherited = self.origin(&[&["defaults"][..], rest, &[name][..]].concat());
                format!("[defaults], {inherited}")
            }
            // The mode that a URL's sslmode asked for.
            (Origin::Default, ["database", "tls"]) if name == "mode" => {
                let default = super::Tls::default().mode;
                if self.config.database.tls.mode == default {
                    "default".to_owned()
                } else {
                    "the URL's sslmode".to_owned()
                }
            }
            (own, _) => own.to_string(),
        }
    }
}

impl Config {
    /// Checks a configuration that a program put together: the ranges and relations that a file's would have to keep. Servers, secrets
    /// and librdkafka's properties are left to whoever uses them.
    ///
    /// # Errors
    /// Every problem.
    pub fn check(&self) -> Result<(), Problems> {
        // There is one reader that knows every range: it is given what it would have read.
        let mut file = String::new();
        for (section, entries) in sections(self, |_| false) {
            let section: Vec<&str> = section.iter().map(String::as_str).collect();
            let given: &[(&str, &str)] = match section[..] {
                ["database"] => &[("url", "\"postgres://somebody@somewhere/database\"")],
                ["kafka"] => &[("brokers", "[\"somewhere:9092\"]")],
                ["database" | "kafka", _] => continue,
                _ => &[],
            };
            let _ = writeln!(file, "[{}]", dotted(&section));
            for (name, value) in given {
                let _ = writeln!(file, "{name} = {value}");
            }
            for (name, printed) in &entries {
                let left_out = ["url", "url_file", "password_file", "brokers"];
                if let (Value(value), false) = (printed, left_out.contains(&name.as_str())) {
                    let _ = writeln!(file, "{} = {value}", key(name));
                }
            }
        }
        let file = ConfigFile::Text { name: "the program's settings", text: &file };
        Loaded::from(file, [], Overrides::new()).map(drop)
    }
}

struct Sections {
    list: Vec<Section>,
}

impl Sections {
    fn add(&mut self, section: &[&str], entries: &[(&str, Printed)]) {
        let section = section.iter().map(|name| (*name).to_owned()).collect();
        self.list.push((section, entries.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()));
    }

    fn database(&mut self, database: &Database) {
        let url = if database.url_file.is_some() { Unset } else { Hidden(database.url.clone()) };
        self.add(
            &["database"],
            &[
                ("url", url),
                ("url_file", path(database.url_file.as_deref())),
                ("password", database.password.clone().map_or(Unset, Hidden)),
                ("password_file", path(database.password_file.as_deref())),
                ("schema", text(&database.schema)),
                ("table", text(&database.table)),
                ("pool_size", number(database.pool_size)),
                ("connect_timeout", duration(database.connect_timeout)),
                ("statement_timeout", duration(database.statement_timeout)),
                ("prepared_statements", Value(database.prepared_statements.to_string())),
                ("synchronous_commit", text(if database.synchronous_commit { "on" } else { "off" })),
            ],
        );
        let tls = &database.tls;
        self.add(
            &["database", "tls"],
            &[
                ("mode", text(tls.mode.name())),
                ("ca_file", path(tls.ca_file.as_deref())),
                ("cert_file", path(tls.cert_file.as_deref())),
                ("key_file", path(tls.key_file.as_deref())),
            ],
        );
    }

    fn kafka(&mut self, kafka: &Kafka) {
        let brokers: Vec<_> = kafka.brokers.iter().map(|broker| quoted(broker)).collect();
        self.add(
            &["kafka"],
            &[
                ("brokers", Value(format!("[{}]", brokers.join(", ")))),
                ("message_bytes_max", size(kafka.message_bytes_max)),
                ("topic_fault_dead_after", duration_or_off(kafka.topic_fault_dead_after)),
            ],
        );
        let defaults = kafka.default_properties();
        let mut properties: Vec<(&str, Printed)> = defaults.iter().map(|(name, value)| (*name, text(value))).collect();
        properties.extend(kafka.properties.iter().map(|(name, value)| (name.as_str(), Hidden(value.clone()))));
        self.add(&["kafka", "properties"], &properties);
        let files: Vec<_> = kafka.property_files.iter().map(|(name, file)| (name.as_str(), path(Some(file)))).collect();
        self.add(&["kafka", "property_files"], &files);
    }

    fn relay(&mut self, relay: &Relay) {
        self.add(
            &["relay"],
            &[
                ("instance", text(&relay.instance)),
                ("batch_rows_max", number(relay.batch_rows_max)),
                ("batch_bytes_max", size(relay.batch_bytes_max)),
                ("in_flight_rows_max", number(relay.in_flight_rows_max)),
                ("in_flight_bytes_max", size(relay.in_flight_bytes_max)),
                ("poll_interval_min", duration(relay.poll_interval_min)),
                ("poll_interval_max", duration(relay.poll_interval_max)),
                ("publish_timeout", duration(relay.publish_timeout)),
                ("settle_timeout", duration(relay.settle_timeout)),
                ("publishing_timeout", duration(relay.publishing_timeout)),
                ("shutdown_grace", duration(relay.shutdown_grace)),
                ("unlisted_sources", text(relay.unlisted_sources.name())),
            ],
        );
    }

    fn rules(&mut self, section: &[&str], rules: &SourceRules, on_halt_is_set: &impl Fn(&[&str]) -> bool) {
        let on_halt = if on_halt_is_set(section) || rules.policy == Policy::StopTheLine {
            text(rules.on_halt.name())
        } else {
            Unset
        };
        self.add(
            section,
            &[
                ("policy", text(rules.policy.name())),
                ("on_halt", on_halt),
                ("max_attempts", Value(rules.max_attempts.to_string())),
            ],
        );
        let backoff = &rules.backoff;
        self.add(
            &[section, &["backoff"][..]].concat(),
            &[
                ("kind", text(kind_name(backoff.kind))),
                ("initial", duration(backoff.initial)),
                ("multiplier", Value(format!("{:?}", backoff.multiplier))),
                ("max", duration(backoff.max)),
                ("jitter", Value(format!("{:?}", backoff.jitter))),
            ],
        );
    }
}

fn text(text: &str) -> Printed {
    Value(quoted(text))
}

fn number(number: usize) -> Printed {
    Value(number.to_string())
}

fn size(bytes: usize) -> Printed {
    text(&size_text(bytes))
}

fn duration(duration: Duration) -> Printed {
    text(&duration_text(duration))
}

fn duration_or_off(duration: Option<Duration>) -> Printed {
    duration.map_or_else(|| text("off"), self::duration)
}

fn path(path: Option<&Path>) -> Printed {
    path.map_or(Unset, |path| text(&path.to_string_lossy()))
}
