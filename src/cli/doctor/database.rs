//! The database: who answers, whether it keeps what it was given, what our user may do, what holds back vacuum.
//!
//! Nothing here ever reads a row of the outbox.

use super::report::{Check, complete, literal};
use super::{duration, judged};
use crate::config::Config;
use crate::store::{
    Between, ClockGap, Examined, OldTransaction, Prepared, SchemaProblem, Settings, Slot, Store, StoreError, quoted,
};

/// Every check of this module.
pub(super) const NAMES: [&str; 18] = [
    "database.connect",
    "database.version",
    "database.encoding",
    "database.primary",
    "database.pooler",
    "database.clock",
    "database.oldest_transaction",
    "database.prepared_transactions",
    "database.replication_slots",
    "durability.fsync",
    "durability.full_page_writes",
    "durability.synchronous_commit",
    "permission.schema",
    "permission.row_security",
    "permission.select",
    "permission.update",
    "permission.delete",
    "permission.read_all_stats",
];

/// The settings that checks look at.
pub(super) const SETTINGS: [&str; 9] = [
    "server_version_num",
    "server_encoding",
    "fsync",
    "full_page_writes",
    "synchronous_commit",
    "default_transaction_read_only",
    "autovacuum",
    "autovacuum_vacuum_threshold",
    "autovacuum_vacuum_scale_factor",
];

/// Versions of PostgreSQL that are supported.
const VERSIONS: std::ops::RangeInclusive<i32> = 14..=18;
/// From here on a transaction in the way of vacuum is worth a warning: dead rows of a busy outbox are a million by then.
const OLD_SECONDS: f64 = 300.0;
/// The same for a slot.
const OLD_TRANSACTIONS: i64 = 1_000_000;
/// Clocks that differ by more confuse whoever compares a log with the table.
const CLOCK_SECONDS: f64 = 5.0;

/// The database does not answer.
pub(super) fn unreachable(error: &StoreError) -> Check {
    Check::fail("database.connect", error.to_string(), "[database] url, password_file, tls: keiro-relay config print")
}

pub(super) async fn checks(
    store: &Store,
    config: &Config,
    settings: &Settings,
    examined: &Result<Examined, StoreError>,
) -> Vec<Check> {
    let mut checks = vec![Check::ok("database.connect", "the database answers")];
    checks.push(version(settings));
    checks.push(encoding(settings));
    checks.push(primary(settings, examined));
    let is_pooled = !config.database.prepared_statements;
    checks.push(judged("database.pooler", store.between().await, |between| pooler(between, is_pooled)));
    checks.push(judged("database.clock", store.clock_gap().await, clock));
    let sees_others =
        examined.as_ref().is_ok_and(|found| found.shape.as_ref().is_none_or(|shape| shape.reads_all_stats));
    checks.push(judged("database.oldest_transaction", store.oldest_transaction().await, |oldest| {
        transaction(oldest, sees_others)
    }));
    checks.push(judged("database.prepared_transactions", store.oldest_prepared().await, prepared));
    checks.push(judged("database.replication_slots", store.oldest_slot().await, slot));
    checks.extend(durability(settings));
    match examined {
        Ok(examined) => checks.extend(permissions(store, config, examined)),
        Err(error) => complete(&mut checks, &NAMES, &error.to_string()),
    }
    complete(&mut checks, &NAMES, "there is no table to look at");
    checks
}

fn version(settings: &Settings) -> Check {
    const NAME: &str = "database.version";
    let Some(version) = settings.get("server_version_num").and_then(|text| text.parse::<i32>().ok()) else {
        return Check::unknown(NAME, "the server does not say its version");
    };
    let text = format!("PostgreSQL {}.{}", version / 10_000, version % 10_000);
    let supported = format!("{text}; {} to {} are supported", VERSIONS.start(), VERSIONS.end());
    match version / 10_000 {
        major if major < *VERSIONS.start() => Check::fail(NAME, supported, "upgrade the server"),
        major if major > *VERSIONS.end() => {
            Check::warn(NAME, format!("{text} is newer than what this was tested with"), "look for a newer keiro-relay")
        }
        _ => Check::ok(NAME, text),
    }
}

fn encoding(settings: &Settings) -> Check {
    const NAME: &str = "database.encoding";
    match settings.get("server_encoding").map(String::as_str) {
        Some("SQL_ASCII") => Check::fail(
            NAME,
            "SQL_ASCII: texts may be bytes that are no text",
            "create database … encoding 'UTF8' template template0; and restore a dump into it",
        ),
        Some(encoding) => Check::ok(NAME, encoding),
        None => Check::unknown(NAME, "the server does not say its encoding"),
    }
}

fn primary(settings: &Settings, examined: &Result<Examined, StoreError>) -> Check {
    const NAME: &str = "database.primary";
    let in_recovery = match examined {
        Ok(Examined { shape: Some(shape), .. }) => shape.in_recovery,
        Ok(Examined { shape: None, .. }) => false,
        Err(error) => return Check::unknown(NAME, error.to_string()),
    };
    if in_recovery {
        return Check::fail(
            NAME,
            "the server is a standby: nothing can be claimed there",
            "[database] url: name every host and add ?target_session_attrs=read-write",
        );
    }
    if settings.get("default_transaction_read_only").is_some_and(|value| value == "on") {
        return Check::fail(
            NAME,
            "transactions are read-only by default: nothing can be claimed",
            "select * from pg_db_role_setting where setconfig::text like '%default_transaction_read_only%';  -- who sets it\n\
             alter database … reset default_transaction_read_only;  -- or alter role …, or alter system …",
        );
    }
    Check::ok(NAME, "it can be written to")
}

fn pooler(between: Between, expected: bool) -> Check {
    const NAME: &str = "database.pooler";
    match (between, expected) {
        (Between::TransactionPooler, false) => Check::warn(
            NAME,
            "a pooler in transaction mode is in between: named statements, session settings, NOTIFY and the preference of sources \
             do not work through it",
            "[database] prepared_statements = false\nor connect to the server itself",
        ),
        (Between::TransactionPooler, true) => Check::ok(
            NAME,
            "a pooler in transaction mode is in between, and prepared_statements = false is made for it",
        ),
        (Between::Nothing, false) => Check::ok(NAME, "no pooler in transaction mode is in between"),
        (Between::Nothing, true) => Check::ok(
            NAME,
            "no pooler in transaction mode was seen; without one prepared_statements = true is faster and lets the relay be woken",
        ),
    }
}

fn clock(gap: ClockGap) -> Check {
    const NAME: &str = "database.clock";
    let text =
        format!("this host's clock is {:+.1} s from the database's (± {:.1} s)", gap.seconds, gap.known_within_seconds);
    if gap.seconds.abs() - gap.known_within_seconds <= CLOCK_SECONDS {
        return Check::ok(NAME, text);
    }
    let reason = format!(
        "{text}: due times, leases and the records' timestamps are the database's, the log's times are this host's; brokers refuse \
         records an hour ahead of their own clock"
    );
    Check::warn(NAME, reason, "timedatectl set-ntp true  # on the host whose clock is wrong")
}

fn transaction(oldest: Option<OldTransaction>, sees_others: bool) -> Check {
    const NAME: &str = "database.oldest_transaction";
    match oldest {
        Some(oldest) if oldest.seconds >= OLD_SECONDS => Check::warn(
            NAME,
            format!(
                "a transaction of {} ({}, {}) has been open for {}: until it ends, vacuum removes nothing that died since, and looks \
                 at the table get slower",
                oldest.user,
                if oldest.application.is_empty() { "no application_name" } else { &oldest.application },
                oldest.state,
                duration(oldest.seconds)
            ),
            format!("select pg_terminate_backend({});", oldest.pid),
        ),
        Some(oldest) => Check::ok(NAME, format!("the oldest has been open for {}", duration(oldest.seconds))),
        None if !sees_others => {
            Check::unknown(NAME, "our user cannot see the transactions of others: see permission.read_all_stats")
        }
        None => Check::ok(NAME, "no other transaction is open"),
    }
}

fn prepared(oldest: Option<Prepared>) -> Check {
    const NAME: &str = "database.prepared_transactions";
    match oldest {
        Some(oldest) if oldest.seconds >= OLD_SECONDS => {
            let gid = literal(&oldest.gid);
            Check::warn(
                NAME,
                format!(
                    "a transaction that {} prepared {} ago waits: vacuum removes nothing that died since, and rows it wrote are seen \
                     only by a full sweep after its commit",
                    oldest.owner,
                    duration(oldest.seconds)
                ),
                format!("commit prepared {gid};  -- or: rollback prepared {gid};"),
            )
        }
        Some(oldest) => Check::ok(NAME, format!("the oldest waits since {}", duration(oldest.seconds))),
        None => Check::ok(NAME, "none waits"),
    }
}

fn slot(oldest: Option<Slot>) -> Check {
    const NAME: &str = "database.replication_slots";
    match oldest {
        Some(slot) if !slot.active || slot.transactions >= OLD_TRANSACTIONS => Check::warn(
            NAME,
            format!(
                "slot {} ({}) keeps what died in the last {} transactions from being removed",
                slot.name,
                if slot.active { "in use" } else { "nobody uses it" },
                slot.transactions
            ),
            format!("select pg_drop_replication_slot({});  -- once nobody needs it", literal(&slot.name)),
        ),
        Some(slot) => Check::ok(NAME, format!("slot {} holds back {} transactions", slot.name, slot.transactions)),
        None => Check::ok(NAME, "none holds back vacuum"),
    }
}

fn durability(settings: &Settings) -> [Check; 3] {
    let is_on = |setting: &str| settings.get(setting).map(|value| value == "on");
    let kept = |name: &'static str, setting: &str, risk: &str| match is_on(setting) {
        Some(true) => Check::ok(name, "on"),
        Some(false) => Check::warn(
            name,
            format!("off: {risk}"),
            format!("alter system set {setting} = on; select pg_reload_conf();"),
        ),
        None => Check::unknown(name, "the server does not say"),
    };
    let synchronous = match settings.get("synchronous_commit").map(String::as_str) {
        Some("off") => Check::warn(
            "durability.synchronous_commit",
            "off for new sessions: what a producer believes committed in the last moment before a crash of the server is lost with \
             its events",
            "alter system set synchronous_commit = on; select pg_reload_conf();  -- the relay may keep its own off",
        ),
        Some(value) => Check::ok("durability.synchronous_commit", format!("{value} for new sessions")),
        None => Check::unknown("durability.synchronous_commit", "the server does not say"),
    };
    [
        kept("durability.fsync", "fsync", "a crash of the machine may destroy every table"),
        kept("durability.full_page_writes", "full_page_writes", "a crash of the machine may leave torn pages"),
        synchronous,
    ]
}

fn permissions(store: &Store, config: &Config, examined: &Examined) -> Vec<Check> {
    let mut checks = Vec::new();
    let (table, user) = (store.table_in_sql(), quoted(&examined.user));
    let lacking = |wanted: &str| {
        examined.problems.iter().find_map(|problem| match problem {
            SchemaProblem::NoPermission { privilege, object, .. }
                if privilege.split_whitespace().next() == Some(wanted) =>
            {
                Some((privilege, object))
            }
            _ => None,
        })
    };
    let has_schema = !examined.problems.iter().any(|problem| matches!(problem, SchemaProblem::NoSchema(_)));
    let needed: [(&'static str, &str, bool); 3] = [
        ("permission.schema", "usage", has_schema),
        ("permission.select", "select", examined.shape.is_some()),
        ("permission.update", "update", examined.shape.is_some()),
    ];
    for (name, wanted, is_there) in needed {
        match lacking(wanted) {
            Some((privilege, object)) => checks.push(Check::fail(
                name,
                format!("user {} lacks {privilege} on {object}", examined.user),
                format!("grant {privilege} on {object} to {user};"),
            )),
            None if is_there => checks.push(Check::ok(name, format!("user {} has {wanted}", examined.user))),
            None => {}
        }
    }
    if examined.problems.iter().any(|problem| matches!(problem, SchemaProblem::RowSecurity { .. })) {
        checks.push(Check::fail(
            "permission.row_security",
            format!("row security may hide rows from user {}: order cannot be kept past hidden rows", examined.user),
            format!("alter role {user} bypassrls;"),
        ));
    } else if examined.shape.is_some() {
        checks.push(Check::ok("permission.row_security", "no row is hidden from us"));
    }
    let Some(shape) = &examined.shape else { return checks };
    checks.push(match (shape.can_delete, config.maintenance.retention) {
        (true, _) => Check::ok("permission.delete", format!("user {} has delete", examined.user)),
        (false, None) => {
            Check::ok("permission.delete", "not granted, and not needed while maintenance.retention is off")
        }
        (false, Some(_)) => Check::warn(
            "permission.delete",
            format!("user {} lacks delete: retention deletes nothing, and the table grows for ever", examined.user),
            format!("grant delete on {table} to {user};"),
        ),
    });
    checks.push(if shape.reads_all_stats {
        Check::ok("permission.read_all_stats", "other sessions' transactions can be seen")
    } else {
        Check::warn(
            "permission.read_all_stats",
            "other sessions' transactions cannot be seen: rows committed later than a minute after their transaction began wait for \
             a full sweep (up to 5 minutes)",
            format!("grant pg_read_all_stats to {user};"),
        )
    });
    checks
}
