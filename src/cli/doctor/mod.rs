//! `doctor`: looks at both sides, and says of each thing that delivery depends on whether it is as it should be, why not, and what to do.
//!
//! Nothing here ever changes anything, and nothing waits for a side that does not answer longer than its bound: the other side is looked
//! at all the same.

mod brokers;
mod database;
mod report;
mod rows;
mod table;
mod topics;

use std::collections::BTreeMap;
use std::io;

use clap::Args;

pub(super) use self::report::printable;
use self::report::{Check, complete};
use super::{EXIT_CONFIG, EXIT_FAILED, EXIT_OK, complain, written};
use crate::config::Config;
use crate::domain::record::is_legal_topic;
use crate::publish::kafka::inspect::{self, InspectError};
use crate::store::{Store, StoreError};

/// Topics that are looked at: a row's destination may be anything.
const TOPICS_MAX: usize = 1_000;

/// What `doctor` prints.
#[derive(Debug, Clone, Args)]
pub(super) struct Options {
    /// One JSON object a line: check, subject, verdict, reason, remedy.
    #[arg(long)]
    json: bool,
    /// Only what is not ok.
    #[arg(long)]
    problems: bool,
}

/// A topic in use, and what its rows ask of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Demand {
    /// Octets of the largest waiting row that was seen.
    largest: i64,
    /// Rows without a key, waiting or sent lately.
    keyless: i64,
}

/// Topics in use by name, or why they are not known.
type InUse = Result<BTreeMap<String, Demand>, String>;

/// Looks at everything and prints what it found.
pub(super) async fn run(config: &Config, options: &Options) -> u8 {
    // Under a name of its own, so that no one takes it for a relay.
    let mut config = config.clone();
    config.relay.instance = format!("doctor {}", std::process::id());
    let store = match Store::new(&config, 2) {
        Ok(store) => store,
        Err(error) => {
            complain(&error.to_string());
            return EXIT_CONFIG;
        }
    };
    let (mut checks, topics) = look_at_database(&store, &config).await;
    let names = topics.iter().flat_map(BTreeMap::keys).filter(|name| is_legal_topic(name)).cloned().collect();
    match inspect::inspect(&config.kafka, &config.relay, names).await {
        Ok(cluster) => {
            checks.extend(brokers::checks(&cluster));
            checks.extend(topics::checks(&config, &cluster, &topics));
        }
        Err(InspectError::Client(error)) => {
            complain(&error.to_string());
            return EXIT_CONFIG;
        }
        Err(InspectError::Unreachable(reason)) => {
            checks.push(brokers::unreachable(&reason));
            complete(&mut checks, &brokers::NAMES, "no broker answers");
            complete(&mut checks, &topics::NAMES, "no broker answers");
        }
    }
    written(
        report::print(&checks, options.json, options.problems, &mut io::stdout().lock())
            .map(|fine| if fine { EXIT_OK } else { EXIT_FAILED }),
    )
}

async fn look_at_database(store: &Store, config: &Config) -> (Vec<Check>, InUse) {
    let settings = match store.settings(&database::SETTINGS).await {
        Ok(settings) => settings,
        Err(error) => {
            let mut checks = vec![database::unreachable(&error)];
            for names in [&database::NAMES[..], &table::NAMES, &rows::NAMES] {
                complete(&mut checks, names, "the database does not answer");
            }
            return (checks, Err("the database does not answer, so the topics in use are not known".to_owned()));
        }
    };
    let examined = store.examine().await;
    let mut checks = database::checks(store, config, &settings, &examined).await;
    checks.extend(table::checks(store, config, &settings, &examined).await);
    let (of_rows, topics) = rows::checks(store, config, &examined).await;
    checks.extend(of_rows);
    let topics = topics.map(|topics| topics.into_iter().take(TOPICS_MAX).collect());
    (checks, topics)
}

/// The verdict of a fact that could be found out; otherwise unknown, and why.
fn judged<T>(name: &'static str, fact: Result<T, StoreError>, judge: impl FnOnce(T) -> Check) -> Check {
    match fact {
        Ok(fact) => judge(fact),
        Err(error) => Check::unknown(name, error.to_string()),
    }
}

/// `3 min`, for people.
fn duration(seconds: f64) -> String {
    const UNITS: [(f64, &str); 3] = [(86_400.0, "d"), (3_600.0, "h"), (60.0, "min")];
    let unit = UNITS.into_iter().find(|(unit, _)| seconds >= 2.0 * unit);
    unit.map_or_else(|| format!("{seconds:.0} s"), |(unit, name)| format!("{:.0} {name}", seconds / unit))
}
