//! The table: whether it is the contract's, its profile and indexes, what its updates cost, whether vacuum keeps up.
//!
//! Nothing here ever reads a row: numbers of rows are the server's estimates, and say so.

use std::collections::BTreeMap;

use super::report::{Check, complete, listed};
use super::{duration, judged};
use crate::config::Config;
use crate::store::{
    Examined, IndexFact, IndexState, Indexes, Profile, SchemaProblem, Settings, Store, StoreError, Upkeep, quoted,
};

/// Every check of this module, without the indexes: those are `table.index.…`, one for each of the profile.
pub(super) const NAMES: [&str; 10] = [
    "table.exists",
    "table.columns",
    "table.profile",
    "table.side_schema",
    "table.constraints",
    "durability.table",
    "permission.insert",
    "table.hot_updates",
    "table.autovacuum",
    "table.dead_rows",
];

/// Each index: its place, its check, and what is slow without it.
const INDEXES: [(&str, &str, &str); 9] = [
    (
        "message_id_key",
        "table.index.message_id_key",
        "every look for new sources reads the whole table, and a producer's retry writes a second row",
    ),
    (
        "source_order_idx",
        "table.index.source_order_idx",
        "every look for new rows reads the whole table, sent rows too",
    ),
    ("key_order_idx", "table.index.key_order_idx", "every claim of a key reads all waiting rows of its source"),
    ("head_of_line_idx", "table.index.head_of_line_idx", "every claim of a key reads all waiting rows of its source"),
    ("sent_idx", "table.index.sent_idx", "retention, prune and verify read the whole table"),
    ("sent_gc_idx", "table.index.sent_gc_idx", "retention, prune and verify read the whole table"),
    ("far_idx", "table.index.far_idx", "counting and listing dead and rejected rows reads the whole table"),
    ("pending_idx", "table.index.pending_idx", "counting and listing rows by status reads the whole table"),
    (
        "claim_order_idx",
        "table.index.claim_order_idx",
        "keiro's own publishers read the whole table for each claim; this relay does without",
    ),
];

/// Dead rows that vacuum may wait for before looks at the table are slow.
const DEAD_ROWS: f64 = 100_000.0;
/// The fillfactor up to which a page has room for the new versions of a claim and a settlement.
const FILLFACTOR_MAX: u32 = 60;
/// What `migrate` sets.
const VACUUM_OPTIONS: &str = "autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 5000, \
                              autovacuum_vacuum_insert_scale_factor = 0.05, autovacuum_analyze_scale_factor = 0.05, \
                              autovacuum_vacuum_cost_limit = 2000";

pub(super) async fn checks(
    store: &Store,
    config: &Config,
    settings: &Settings,
    examined: &Result<Examined, StoreError>,
) -> Vec<Check> {
    let mut checks = Vec::new();
    let examined = match examined {
        Ok(examined) => examined,
        Err(error) => {
            complete(&mut checks, &NAMES, &error.to_string());
            return checks;
        }
    };
    checks.extend(shape(store, config, examined));
    if let Some(shape) = &examined.shape {
        match store.upkeep().await {
            Ok(Some(upkeep)) => {
                let indexes = store.indexes(shape.profile).await;
                checks.push(constraints(store, &upkeep));
                checks.push(insert(&upkeep));
                checks.push(judged("table.hot_updates", indexes.clone(), |indexes| {
                    hot_updates(store, shape.profile, &upkeep, &indexes)
                }));
                checks.extend(vacuum(store, settings, &upkeep));
                match indexes {
                    Ok(indexes) => {
                        checks.extend(indexes.expected.iter().filter_map(|one| index(store, shape.profile, one)));
                    }
                    Err(error) => checks.push(Check::unknown("table.index.*", error.to_string())),
                }
            }
            Ok(None) => {}
            Err(error) => complete(&mut checks, &NAMES, &error.to_string()),
        }
    }
    complete(&mut checks, &NAMES, "there is no table to look at");
    checks
}

fn shape(store: &Store, config: &Config, examined: &Examined) -> Vec<Check> {
    let mut checks = Vec::new();
    let table = store.table_in_sql();
    let absent = examined.problems.iter().find(|problem| {
        matches!(problem, SchemaProblem::NoSchema(_) | SchemaProblem::NoTable(_) | SchemaProblem::NotATable { .. })
    });
    if let Some(absent) = absent {
        let place = format!("[database] schema = {:?}, table = {:?}", config.database.schema, config.database.table);
        checks.push(Check::fail(
            "table.exists",
            absent.to_string(),
            format!("keiro-relay migrate\nor correct {place}"),
        ));
    }
    let Some(shape) = &examined.shape else { return checks };
    checks.push(Check::ok("table.exists", &table));
    let problems: Vec<String> = examined
        .problems
        .iter()
        .filter(|problem| match problem {
            SchemaProblem::MissingColumn { .. }
            | SchemaProblem::WrongType { .. }
            | SchemaProblem::WrongNullability { .. }
            | SchemaProblem::NoPrimaryKey(_) => true,
            SchemaProblem::ServerTooOld(_)
            | SchemaProblem::Encoding(_)
            | SchemaProblem::NoSchema(_)
            | SchemaProblem::NoTable(_)
            | SchemaProblem::NotATable { .. }
            | SchemaProblem::NoPermission { .. }
            | SchemaProblem::RowSecurity { .. } => false,
        })
        .map(ToString::to_string)
        .collect();
    checks.push(if problems.is_empty() {
        Check::ok("table.columns", "the contract's")
    } else {
        let remedy = column_remedies(&table, &examined.problems);
        Check::fail("table.columns", problems.join("; "), remedy)
    });
    checks.push(Check::ok("table.profile", shape.describe()));
    checks.push(if shape.relay_schema {
        Check::ok("table.side_schema", "schema keiro_relay is there")
    } else {
        Check::warn(
            "table.side_schema",
            "schema keiro_relay is not there, or we may not use it: what is kept in its tables is off (pause)",
            format!(
                "keiro-relay migrate  # as a user who may create it\ngrant usage on schema keiro_relay to {};",
                quoted(&examined.user)
            ),
        )
    });
    checks.push(if shape.unlogged {
        Check::warn(
            "durability.table",
            "the table is unlogged: a crash of the server empties it",
            format!("alter table {table} set logged;  -- rewrites the table under a lock"),
        )
    } else {
        Check::ok("durability.table", "the table is logged")
    });
    checks
}

fn column_remedies(table: &str, problems: &[SchemaProblem]) -> String {
    let remedy = |problem: &SchemaProblem| match problem {
        SchemaProblem::MissingColumn { column, expected, .. } => {
            Some(format!("alter table {table} add column {column} {expected};"))
        }
        SchemaProblem::WrongType { column, expected, .. } => Some(format!(
            "alter table {table} alter column {column} type {expected};  -- rewrites the table under a lock"
        )),
        SchemaProblem::WrongNullability { column, may_be_null, .. } => {
            let change = if *may_be_null { "drop" } else { "set" };
            Some(format!("alter table {table} alter column {column} {change} not null;"))
        }
        SchemaProblem::NoPrimaryKey(_) => Some(format!("alter table {table} add primary key (outbox_id);")),
        SchemaProblem::ServerTooOld(_)
        | SchemaProblem::Encoding(_)
        | SchemaProblem::NoSchema(_)
        | SchemaProblem::NoTable(_)
        | SchemaProblem::NotATable { .. }
        | SchemaProblem::NoPermission { .. }
        | SchemaProblem::RowSecurity { .. } => None,
    };
    problems.iter().filter_map(remedy).collect::<Vec<_>>().join("\n")
}

fn constraints(store: &Store, upkeep: &Upkeep) -> Check {
    const NAME: &str = "table.constraints";
    if upkeep.not_validated.is_empty() {
        return Check::ok(NAME, "all are validated");
    }
    let table = store.table_in_sql();
    let validate = |name: &String| format!("alter table {table} validate constraint {};", quoted(name));
    Check::warn(
        NAME,
        format!(
            "not validated, so rows may break them and the lean profile does not count: {}",
            listed(upkeep.not_validated.iter().map(String::as_str))
        ),
        upkeep.not_validated.iter().map(validate).collect::<Vec<_>>().join("\n"),
    )
}

fn insert(upkeep: &Upkeep) -> Check {
    let granted = if upkeep.can_insert { "granted" } else { "not granted" };
    Check::ok(
        "permission.insert",
        format!("{granted}, and the relay does not need it: producers and `keiro-relay enqueue` do"),
    )
}

fn hot_updates(store: &Store, profile: Profile, upkeep: &Upkeep, indexes: &Indexes) -> Check {
    const NAME: &str = "table.hot_updates";
    let share = match upkeep.updates {
        0 => String::new(),
        updates => format!("; {:.0} % of {updates} updates so far", upkeep.hot_updates as f64 * 100.0 / updates as f64),
    };
    match profile {
        Profile::Shared => {
            Check::ok(NAME, format!("the shared profile has indexes on status, so claims change them{share}"))
        }
        Profile::Lean if !indexes.on_claimed_columns.is_empty() => {
            let drop = |name: &String| format!("drop index concurrently {}.{};", quoted(store.schema()), quoted(name));
            Check::warn(
                NAME,
                format!(
                    "an index on status, attempt_count or updated_at makes every claim change every index{share}: {}",
                    listed(indexes.on_claimed_columns.iter().map(String::as_str))
                ),
                indexes.on_claimed_columns.iter().map(drop).collect::<Vec<_>>().join("\n"),
            )
        }
        Profile::Lean => {
            let fillfactor = upkeep.options.get("fillfactor").and_then(|text| text.parse::<u32>().ok()).unwrap_or(100);
            if fillfactor <= FILLFACTOR_MAX {
                return Check::ok(NAME, format!("claims change no index, and pages have room for them{share}"));
            }
            Check::warn(
                NAME,
                format!(
                    "fillfactor {fillfactor} leaves no room on a row's page for its next version: claims change indexes{share}"
                ),
                format!(
                    "alter table {} set (fillfactor = 45);  -- for pages written from now on",
                    store.table_in_sql()
                ),
            )
        }
    }
}

fn vacuum(store: &Store, settings: &Settings, upkeep: &Upkeep) -> [Check; 2] {
    let table = store.table_in_sql();
    let number = |name: &str, default: f64| {
        let of = |values: &BTreeMap<String, String>| values.get(name).and_then(|text| text.parse::<f64>().ok());
        of(&upkeep.options).or_else(|| of(settings)).unwrap_or(default)
    };
    let is_on = settings.get("autovacuum").is_none_or(|value| value == "on");
    let of_table = upkeep
        .options
        .get("autovacuum_enabled")
        .is_none_or(|value| !matches!(value.as_str(), "false" | "off" | "0" | "no"));
    let begins =
        number("autovacuum_vacuum_threshold", 50.0) + number("autovacuum_vacuum_scale_factor", 0.2) * upkeep.rows;
    // A HOT update cleans up after itself.
    let churn = (upkeep.updates - upkeep.hot_updates + upkeep.deletes).max(0) as f64;
    let an_hour = churn * 3_600.0 / upkeep.statistics_seconds.max(1.0);
    let text = format!(
        "vacuum begins at {begins:.0} dead rows (of about {:.0} rows); about {an_hour:.0} die an hour, by statistics of {}",
        upkeep.rows,
        duration(upkeep.statistics_seconds)
    );
    let tune = format!("alter table {table} set ({VACUUM_OPTIONS});");
    let autovacuum = if !is_on {
        Check::warn(
            "table.autovacuum",
            "autovacuum is off: nothing removes dead rows, and looks at the table get slower without end",
            "alter system set autovacuum = on; select pg_reload_conf();",
        )
    } else if !of_table {
        Check::warn(
            "table.autovacuum",
            "autovacuum is off for this table: nothing removes dead rows, and looks at it get slower without end",
            format!("alter table {table} reset (autovacuum_enabled);"),
        )
    } else if begins > DEAD_ROWS && (churn > DEAD_ROWS || upkeep.dead_rows as f64 > DEAD_ROWS) {
        Check::warn("table.autovacuum", format!("{text}: too late for a table that changes so much"), tune)
    } else {
        Check::ok("table.autovacuum", text)
    };
    let dead = upkeep.dead_rows as f64;
    let vacuumed = upkeep.vacuumed_seconds_ago.map_or_else(
        || "never vacuumed since the statistics began".to_owned(),
        |seconds| format!("vacuumed {} ago", duration(seconds)),
    );
    let text =
        format!("about {} dead and {} live rows by the statistics, {vacuumed}", upkeep.dead_rows, upkeep.live_rows);
    // Up to where vacuum begins they are the usual state.
    let dead = if dead > DEAD_ROWS && dead > 0.5 * upkeep.live_rows as f64 {
        Check::warn(
            "table.dead_rows",
            format!(
                "{text}: looks at the table walk over them; when vacuum does not help, see database.oldest_transaction"
            ),
            format!("vacuum (verbose, analyze) {table};"),
        )
    } else {
        Check::ok("table.dead_rows", text)
    };
    [autovacuum, dead]
}

fn index(store: &Store, profile: Profile, index: &IndexFact) -> Option<Check> {
    let (_, name, cost) = INDEXES.iter().find(|(place, _, _)| *place == index.place)?;
    let create = store.create_index(profile, index);
    Some(match index.state {
        IndexState::There => Check::ok(name, "there"),
        IndexState::Missing => Check::warn(name, format!("{} is missing: {cost}", index.name), create),
        IndexState::Invalid => {
            let drop = format!("drop index concurrently {}.{};", quoted(store.schema()), quoted(&index.name));
            let reason = format!("{} is invalid, as its building failed or still goes on: {cost}", index.name);
            Check::warn(name, reason, format!("{drop}\n{create}"))
        }
    })
}
