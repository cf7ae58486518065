//! The rows: what waits for ever, what nobody serves, who else works on them, and which topics they are for.
//!
//! Nothing here ever reads more than the first waiting rows of each source: what waits for ever gathers there, and each text says how many
//! were looked at.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::report::{Check, complete, listed, literal};
use super::{Demand, InUse, judged};
use crate::config::{Config, UnlistedSources, nearest};
use crate::store::{
    Examined, Front, FrontRows, Profile, SOURCES_MAX, SchemaProblem, Shape, Store, StoreError, UNDATED_MAX,
};

/// Every check of this module.
pub(super) const NAMES: [&str; 10] = [
    "rows.unknown_status",
    "rows.published_at",
    "rows.never_due",
    "rows.held",
    "rows.expired_leases",
    "rows.finished_in_live_index",
    "sources.policy",
    "relays.running",
    "relays.policies",
    "relays.publishing_timeout",
];

/// What keiro's own publishers use on every row of the table.
const FOREIGN_LEASE: Duration = Duration::from_secs(300);
/// How long the list of sources may take.
const SOURCES_WAIT_MAX: Duration = Duration::from_secs(10);
const KNOWN: [&str; 6] = ["pending", "publishing", "sent", "failed", "dead", "rejected"];

/// The checks, and the topics in use.
pub(super) async fn checks(
    store: &Store,
    config: &Config,
    examined: &Result<Examined, StoreError>,
) -> (Vec<Check>, InUse) {
    let mut checks = Vec::new();
    let readable = match examined {
        Ok(examined) => readable(examined),
        Err(error) => Err(error.to_string()),
    };
    let shape = match readable {
        Ok(shape) => shape,
        Err(reason) => {
            checks.push(judged("relays.policies", store.relays().await, |names| policies(config, &names)));
            complete(&mut checks, &NAMES, &reason);
            return (checks, Err(format!("{reason}, so the topics in use are not known")));
        }
    };
    store.adopt(shape);
    let sources = match tokio::time::timeout(SOURCES_WAIT_MAX, store.sources(SOURCES_MAX)).await {
        Ok(sources) => sources,
        Err(_) => Err(StoreError::Timeout { waiting_for: "the list of sources", bound: SOURCES_WAIT_MAX }),
    };
    let front = match &sources {
        Ok(sources) => store.front(shape, sources, config.relay.publishing_timeout).await,
        Err(error) => Err(error.clone()),
    };
    let relays = store.relays().await;
    match &front {
        Ok(front) => {
            checks.push(unknown_status(store, front));
            checks.push(published_at(store, shape, front).await);
            checks.push(never_due(store, front));
            checks.push(held(front));
            checks.push(expired(store, config, front));
            checks.push(finished(store, shape, front));
            checks.push(judged("relays.running", relays.clone(), |names| running(front, &names)));
        }
        Err(error) => complete(
            &mut checks,
            &[
                "rows.unknown_status",
                "rows.published_at",
                "rows.never_due",
                "rows.held",
                "rows.expired_leases",
                "rows.finished_in_live_index",
                "relays.running",
            ],
            &error.to_string(),
        ),
    }
    checks.push(judged("sources.policy", sources, |sources| policy(config, &sources)));
    checks.push(judged("relays.policies", relays, |names| policies(config, &names)));
    checks.push(publishing_timeout(config, shape));
    let topics = topics(store, shape, front).await;
    (checks, topics)
}

/// The shape of a table whose rows can be read, or why they cannot.
fn readable(examined: &Examined) -> Result<&Shape, String> {
    let Some(shape) = &examined.shape else { return Err("there is no table to look at".to_owned()) };
    let in_the_way = examined.problems.iter().find(|problem| match problem {
        SchemaProblem::NoPermission { privilege, .. } => !privilege.starts_with("update"),
        SchemaProblem::MissingColumn { .. } | SchemaProblem::WrongType { .. } => true,
        SchemaProblem::ServerTooOld(_)
        | SchemaProblem::Encoding(_)
        | SchemaProblem::NoSchema(_)
        | SchemaProblem::NoTable(_)
        | SchemaProblem::NotATable { .. }
        | SchemaProblem::WrongNullability { .. }
        | SchemaProblem::NoPrimaryKey(_)
        | SchemaProblem::RowSecurity { .. } => false,
    });
    match in_the_way {
        Some(_) => Err("the rows cannot be read".to_owned()),
        None => Ok(shape),
    }
}

/// How much was looked at, for the end of a sentence.
fn looked_at(front: &Front) -> String {
    if front.capped.is_empty() {
        return "of all waiting rows".to_owned();
    }
    format!("of the first {} waiting rows of each source", front.rows_max)
}

/// How many rows of each source, as `3 of billing`.
fn by_source(front: &Front, count: impl Fn(&FrontRows) -> i64) -> Vec<(&str, i64)> {
    let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
    for group in &front.groups {
        *counts.entry(&group.source).or_default() += count(group);
    }
    counts.into_iter().filter(|(_, count)| *count > 0).collect()
}

fn told(counts: &[(&str, i64)]) -> String {
    let texts: Vec<String> = counts.iter().map(|(source, count)| format!("{count} of {source}")).collect();
    listed(texts.iter().map(String::as_str))
}

fn unknown_status(store: &Store, front: &Front) -> Check {
    const NAME: &str = "rows.unknown_status";
    let is_unknown = |group: &&FrontRows| !KNOWN.contains(&group.status.as_str());
    let statuses: BTreeSet<&str> = front.groups.iter().filter(is_unknown).map(|group| group.status.as_str()).collect();
    if statuses.is_empty() {
        return Check::ok(NAME, format!("none {}", looked_at(front)));
    }
    let counts = by_source(front, |group| if is_unknown(&group) { group.rows } else { 0 });
    let quoted: Vec<String> = statuses.iter().map(|status| literal(status)).collect();
    Check::fail(
        NAME,
        format!(
            "{}, {}, are in a status that nobody knows ({}): they are never sent and hold back later rows of an ordered lane",
            told(&counts),
            looked_at(front),
            listed(quoted.iter().map(String::as_str))
        ),
        format!(
            "update {} set status = 'pending', next_attempt_at = now(), updated_at = now() where status in ({});  -- or 'dead': not sent",
            store.table_in_sql(),
            quoted.join(", ")
        ),
    )
}

async fn published_at(store: &Store, shape: &Shape, front: &Front) -> Check {
    const NAME: &str = "rows.published_at";
    if shape.profile == Profile::Lean {
        return Check::ok(NAME, "the table's check keeps it set exactly on sent rows");
    }
    let table = store.table_in_sql();
    let stale = by_source(front, |group| group.published);
    // Without its index that would read the whole table.
    if shape.missing_indexes.iter().any(|name| name.ends_with("sent_gc_idx")) && stale.is_empty() {
        return Check::unknown(
            NAME,
            format!("none stale {}; of sent rows it is not known: see table.index.sent_gc_idx", looked_at(front)),
        );
    }
    let undated = if stale.is_empty() { store.sent_undated(shape).await } else { Ok(0) };
    match (stale.is_empty(), undated) {
        (_, Err(error)) => Check::unknown(NAME, error.to_string()),
        (true, Ok(0)) => Check::ok(NAME, format!("none stale {}, and every sent row has one", looked_at(front))),
        (false, Ok(_)) => Check::warn(
            NAME,
            format!(
                "{}, {}, have one although they were not sent: the table can never become lean, and queries by it find them",
                told(&stale),
                looked_at(front)
            ),
            format!("update {table} set published_at = null where published_at is not null and status <> 'sent';"),
        ),
        (true, Ok(undated)) => {
            let count = if undated > UNDATED_MAX { format!("more than {UNDATED_MAX}") } else { undated.to_string() };
            Check::warn(
                NAME,
                format!("{count} sent rows have none: retention never deletes them"),
                format!("update {table} set published_at = updated_at where published_at is null and status = 'sent';"),
            )
        }
    }
}

fn never_due(store: &Store, front: &Front) -> Check {
    const NAME: &str = "rows.never_due";
    let waits = |group: &FrontRows| matches!(group.status.as_str(), "pending" | "failed");
    let never = by_source(front, |group| if waits(group) { group.never } else { 0 });
    let far = by_source(front, |group| if waits(group) { group.far } else { 0 });
    let remedy = |condition: &str| {
        format!(
            "update {} set next_attempt_at = now(), updated_at = now() where status in ('pending', 'failed') and {condition};",
            store.table_in_sql()
        )
    };
    if !never.is_empty() {
        return Check::fail(
            NAME,
            format!(
                "{}, {}, are due at infinity: they are never sent and block their lane",
                told(&never),
                looked_at(front)
            ),
            remedy("next_attempt_at = 'infinity'"),
        );
    }
    if !far.is_empty() {
        return Check::warn(
            NAME,
            format!(
                "{}, {}, are due in more than a week, and block their lane until then",
                told(&far),
                looked_at(front)
            ),
            remedy("next_attempt_at > now() + interval '7 days' and next_attempt_at < '9000-01-01'"),
        );
    }
    Check::ok(NAME, format!("none {}", looked_at(front)))
}

fn held(front: &Front) -> Check {
    const NAME: &str = "rows.held";
    let held = by_source(front, |group| group.held);
    if held.is_empty() {
        return Check::ok(NAME, "no source is held");
    }
    let resume: Vec<String> = held.iter().map(|(source, _)| format!("keiro-relay resume {}", shell(source))).collect();
    Check::fail(
        NAME,
        format!("{} halt their source until somebody resumes it (on_halt = \"hold\")", told(&held)),
        format!("keiro-relay status  # the row and its error; mend that first\n{}", resume.join("\n")),
    )
}

/// A name as a shell takes it.
fn shell(text: &str) -> String {
    if !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn expired(store: &Store, config: &Config, front: &Front) -> Check {
    const NAME: &str = "rows.expired_leases";
    let counts = by_source(front, |group| if group.status == "publishing" { group.expired } else { 0 });
    if counts.is_empty() {
        return Check::ok(NAME, format!("none {}", looked_at(front)));
    }
    let lease = config.relay.publishing_timeout;
    Check::warn(
        NAME,
        format!(
            "{}, {}, are in publishing for longer than {lease:?}: their relay died, and none that runs has taken them back; a running \
             relay does within maintenance.interval",
            told(&counts),
            looked_at(front)
        ),
        format!(
            "keiro-relay run\nselect * from pg_stat_activity where application_name like 'keiro-relay/%';  -- does one run on {}?",
            store.table_in_sql()
        ),
    )
}

fn finished(store: &Store, shape: &Shape, front: &Front) -> Check {
    const NAME: &str = "rows.finished_in_live_index";
    match shape.profile {
        Profile::Shared => Check::ok(NAME, "the shared profile's live indexes hold no finished rows"),
        Profile::Lean => {
            let is_finished = |group: &FrontRows| matches!(group.status.as_str(), "dead" | "rejected");
            let counts = by_source(front, |group| if is_finished(group) { group.rows } else { 0 });
            if counts.is_empty() {
                return Check::ok(NAME, format!("none {}", looked_at(front)));
            }
            Check::warn(
                NAME,
                format!(
                    "{}, {}, are dead or rejected and were left there by another program: every look at the table walks over them",
                    told(&counts),
                    looked_at(front)
                ),
                format!(
                    "update {} set next_attempt_at = '9999-12-31 00:00:00+00' where status in ('dead', 'rejected') and next_attempt_at < \
                     '9999-01-01 00:00:00+00';",
                    store.table_in_sql()
                ),
            )
        }
    }
}

fn policy(config: &Config, sources: &[String]) -> Check {
    const NAME: &str = "sources.policy";
    let unlisted: Vec<&str> =
        sources.iter().filter(|source| !config.sources.contains_key(*source)).map(String::as_str).collect();
    let absent: Vec<&str> = config.sources.keys().filter(|name| !sources.contains(name)).map(String::as_str).collect();
    let section = |source: &str| format!("[sources.{source:?}]\npolicy = \"{}\"", config.defaults.policy.name());
    let alike = unlisted.iter().find_map(|source| Some((*source, nearest(source, absent.iter().copied())?)));
    if let Some((source, near)) = alike {
        return Check::warn(
            NAME,
            format!(
                "the table has source {source}, the configuration [sources.{near}], which has no rows: is one of them misspelt?"
            ),
            section(source),
        );
    }
    if unlisted.is_empty() {
        return Check::ok(NAME, "every source of the table has a section");
    }
    let names = listed(unlisted.iter().copied());
    match config.relay.unlisted_sources {
        UnlistedSources::Default => Check::ok(
            NAME,
            format!("{names}: no section of their own, served by [defaults] ({})", config.defaults.policy.name()),
        ),
        UnlistedSources::Ignore => Check::warn(
            NAME,
            format!("{names}: no section, and relay.unlisted_sources = \"ignore\" leaves their rows to somebody else"),
            section(unlisted[0]),
        ),
    }
}

/// Instance and policy hash of `keiro-relay/INSTANCE/HASH`.
fn identity(name: &str) -> Option<(&str, &str)> {
    let (instance, hash) = name.strip_prefix("keiro-relay/")?.rsplit_once('/')?;
    (hash.len() == 8 && hash.chars().all(|c| c.is_ascii_hexdigit())).then_some((instance, hash))
}

fn running(front: &Front, names: &[String]) -> Check {
    const NAME: &str = "relays.running";
    let instances: Vec<&str> = names.iter().filter_map(|name| identity(name)).map(|(instance, _)| instance).collect();
    if !instances.is_empty() {
        return Check::ok(NAME, listed(instances));
    }
    let due =
        by_source(front, |group| if matches!(group.status.as_str(), "pending" | "failed") { group.due } else { 0 });
    if due.is_empty() {
        return Check::ok(NAME, "none has a session in this database, and no row is due");
    }
    Check::warn(
        NAME,
        format!("none has a session in this database, and rows are due: {}", told(&due)),
        "keiro-relay run",
    )
}

fn policies(config: &Config, names: &[String]) -> Check {
    const NAME: &str = "relays.policies";
    let ours = config.policy_hash();
    let others: Vec<String> = names
        .iter()
        .filter_map(|name| identity(name))
        .filter(|(_, hash)| *hash != ours)
        .map(|(instance, hash)| format!("{instance} ({hash})"))
        .collect();
    if others.is_empty() {
        return Check::ok(NAME, format!("every relay seen has this configuration's policies ({ours})"));
    }
    Check::warn(
        NAME,
        format!(
            "this configuration has policy hash {ours}, and other relays on this database have others: {}; two policies on one source \
             can break its order",
            listed(others.iter().map(String::as_str))
        ),
        "give every relay of the table the same [defaults] and [sources.…], and restart those that differ",
    )
}

fn publishing_timeout(config: &Config, shape: &Shape) -> Check {
    const NAME: &str = "relays.publishing_timeout";
    let lease = config.relay.publishing_timeout;
    if lease <= FOREIGN_LEASE {
        return Check::ok(NAME, format!("{lease:?}, no longer than keiro's own {FOREIGN_LEASE:?}"));
    }
    match shape.profile {
        Profile::Lean => Check::ok(NAME, format!("{lease:?}; fine as long as no keiro program sweeps this table")),
        Profile::Shared => Check::warn(
            NAME,
            format!(
                "{lease:?}, but keiro programs take back every row of the table after {FOREIGN_LEASE:?}: rows that are still on \
                 their way are sent twice"
            ),
            "[relay] publishing_timeout = \"5m\"",
        ),
    }
}

async fn topics(store: &Store, shape: &Shape, front: Result<Front, StoreError>) -> InUse {
    let mut topics: BTreeMap<String, Demand> = BTreeMap::new();
    let front = front.map_err(|error| format!("the topics in use are not known: {error}"))?;
    for group in front.groups {
        let demand = topics.entry(group.topic).or_default();
        demand.largest = demand.largest.max(group.largest);
        demand.keyless += group.keyless;
    }
    // Without its index that would read the whole table; what waits is known all the same.
    let is_missing = |suffix: &str| shape.missing_indexes.iter().any(|name| name.ends_with(suffix));
    if !is_missing("sent_idx") && !is_missing("sent_gc_idx") {
        for sent in
            store.sent_topics(shape).await.map_err(|error| format!("the topics in use are not known: {error}"))?
        {
            topics.entry(sent.topic).or_default().keyless += sent.keyless;
        }
    }
    Ok(topics)
}
