//! What is in force, as TOML that could be a configuration file again, each value with its origin.
//!
//! Nothing here ever prints a secret, nor a property of librdkafka that the user set: any of them may be one.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use super::problems::{Origin, dotted, key, quoted};
use super::read::{duration_text, size_text};
use super::{Loaded, kind_name};
use crate::domain::policy::SourceRules;

const HIDDEN: &str = "\"***\"";

/// One value as TOML, or why there is none.
enum Printed {
    Value(String),
    /// Nobody set it and it has no default.
    Unset,
}

use Printed::{Unset, Value};

impl Loaded {
    /// The configuration in force, as TOML; secrets are `"***"`, and a comment says where each value comes from.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut page = Page { loaded: self, text: String::new() };
        let file = self.file.as_ref().map_or("none".to_owned(), |file| file.display().to_string());
        let _ = writeln!(page.text, "# In force. File: {file}. Policy hash: {}.", self.config.policy_hash());
        let _ = writeln!(page.text, "# Secrets and librdkafka's properties are shown as ***.");
        page.database();
        page.kafka();
        page.relay();
        page.rules(&["defaults"], &self.config.defaults);
        for (source_name, rules) in &self.config.sources {
            page.rules(&["sources", source_name], rules);
        }
        let limits = &self.config.limits;
        page.section(
            &["limits"],
            &[
                ("payload_bytes_max", size(limits.payload_bytes_max)),
                ("attributes_bytes_max", size(limits.attributes_bytes_max)),
            ],
        );
        let maintenance = &self.config.maintenance;
        page.section(
            &["maintenance"],
            &[("interval", duration(maintenance.interval)), ("retention", duration_or_off(maintenance.retention))],
        );
        page.section(&["http"], &[("listen", text(&self.config.http.listen.to_string()))]);
        let log = &self.config.log;
        page.section(&["log"], &[("format", text(log.format.name())), ("level", text(&log.level))]);
        page.text
    }
}

struct Page<'a> {
    loaded: &'a Loaded,
    text: String,
}

impl Page<'_> {
    fn section(&mut self, section: &[&str], entries: &[(&str, Printed)]) {
        let _ = writeln!(self.text, "\n[{}]", dotted(section));
        for (name, printed) in entries {
            match printed {
                Value(value) => {
                    let origin = self.origin(section, name);
                    let _ = writeln!(self.text, "{} = {value}  # {origin}", key(name));
                }
                Unset => {
                    let _ = writeln!(self.text, "# {} is not set", key(name));
                }
            }
        }
    }

    /// A source has from `[defaults]` what it does not say itself.
    fn origin(&self, section: &[&str], name: &str) -> String {
        let own = self.loaded.origin(&[section, &[name][..]].concat());
        match (own, section) {
            (Origin::Default, ["sources", _, rest @ ..]) => {
                let inherited = self.loaded.origin(&[&["defaults"][..], rest, &[name][..]].concat());
                format!("[defaults], {inherited}")
            }
            // The mode that a URL's sslmode asked for.
            (Origin::Default, ["database", "tls"]) if name == "mode" => {
                let default = super::Tls::default().mode;
                if self.loaded.config.database.tls.mode == default {
                    "default".to_owned()
                } else {
                    "the URL's sslmode".to_owned()
                }
            }
            (own, _) => own.to_string(),
        }
    }

    fn database(&mut self) {
        let database = &self.loaded.config.database;
        let url = if database.url_file.is_some() { Unset } else { Value(HIDDEN.to_owned()) };
        self.section(
            &["database"],
            &[
                ("url", url),
                ("url_file", path(database.url_file.as_deref())),
                ("password", database.password.as_ref().map_or(Unset, |_| Value(HIDDEN.to_owned()))),
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
        self.section(
            &["database", "tls"],
            &[
                ("mode", text(tls.mode.name())),
                ("ca_file", path(tls.ca_file.as_deref())),
                ("cert_file", path(tls.cert_file.as_deref())),
                ("key_file", path(tls.key_file.as_deref())),
            ],
        );
    }

    fn kafka(&mut self) {
        let kafka = &self.loaded.config.kafka;
        let brokers: Vec<_> = kafka.brokers.iter().map(|broker| quoted(broker)).collect();
        self.section(
            &["kafka"],
            &[
                ("brokers", Value(format!("[{}]", brokers.join(", ")))),
                ("message_bytes_max", size(kafka.message_bytes_max)),
                ("topic_fault_dead_after", duration_or_off(kafka.topic_fault_dead_after)),
            ],
        );
        let defaults = kafka.default_properties();
        let mut properties: Vec<(&str, Printed)> = defaults.iter().map(|(name, value)| (*name, text(value))).collect();
        properties.extend(kafka.properties.keys().map(|name| (name.as_str(), Value(HIDDEN.to_owned()))));
        self.section(&["kafka", "properties"], &properties);
        let files: Vec<_> = kafka.property_files.iter().map(|(name, file)| (name.as_str(), path(Some(file)))).collect();
        self.section(&["kafka", "property_files"], &files);
    }

    fn relay(&mut self) {
        let relay = &self.loaded.config.relay;
        self.section(
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

    fn rules(&mut self, section: &[&str], rules: &SourceRules) {
        use crate::domain::policy::Policy;
        // Where nothing halts, the key is a problem, and this page must load again; a section that set it may.
        let own = self.loaded.origin(&[section, &["on_halt"][..]].concat()) != Origin::Default;
        let on_halt = if own || rules.policy == Policy::StopTheLine { text(rules.on_halt.name()) } else { Unset };
        self.section(
            section,
            &[
                ("policy", text(rules.policy.name())),
                ("on_halt", on_halt),
                ("max_attempts", Value(rules.max_attempts.to_string())),
            ],
        );
        let backoff = &rules.backoff;
        self.section(
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
