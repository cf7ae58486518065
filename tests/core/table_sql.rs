//! The statements that make a table: names quoted, rules of the lean profile kept.

use keiro_relay::store::{COLUMNS, LEAN_CHECKS, Profile, REJECTED_COLUMNS, table_sql};

#[test]
fn no_lean_index_touches_what_a_claim_changes() {
    let sql = table_sql(Profile::Lean, "keiro", "keiro_outbox");
    let indexes: Vec<_> = sql.split(';').filter(|statement| statement.contains("create index")).collect();
    assert_eq!(indexes.len(), 4, "{sql}");
    for index in indexes {
        for column in ["status", "attempt_count", "updated_at"] {
            assert!(!index.contains(column), "{index} makes every claim change an index");
        }
    }
    assert!(sql.contains("fillfactor = 45"));
    let live = "where published_at is null and next_attempt_at < '9999-01-01 00:00:00+00'";
    assert_eq!(sql.matches(live).count(), 2);
}

#[test]
fn both_profiles_have_the_contracts_columns_in_its_order() {
    for profile in [Profile::Lean, Profile::Shared] {
        let sql = table_sql(profile, "keiro", "keiro_outbox");
        let mut rest = sql.as_str();
        for column in COLUMNS.iter().chain(&REJECTED_COLUMNS) {
            let kind = column.kind.replace("timestamp with time zone", "timestamptz");
            let declared = format!("\n  {} {kind}", column.name);
            let at =
                rest.find(&declared).unwrap_or_else(|| panic!("{declared:?} is not where it belongs in {profile}"));
            rest = &rest[at + declared.len()..];
            let line = rest.lines().next().unwrap_or_default();
            let not_null = line.contains("not null") || line.contains("primary key");
            assert_eq!(not_null, !column.nullable, "{}", column.name);
        }
    }
}

#[test]
fn lean_checks_are_declared_by_the_names_they_are_recognised_by() {
    let sql = table_sql(Profile::Lean, "keiro", "keiro_outbox");
    for (name, _) in LEAN_CHECKS {
        assert!(
            sql.contains(&format!("constraint {name}\n")) || sql.contains(&format!("constraint {name} check")),
            "{name}"
        );
    }
}

#[test]
fn names_are_quoted_and_no_place_is_left_open() {
    let odd = "o\"; drop table {schema}.{table}; --";
    for profile in [Profile::Lean, Profile::Shared] {
        let sql = table_sql(profile, "s\"", odd);
        let quoted = "\"s\"\"\".\"o\"\"; drop table {schema}.{table}; --\"";
        // Once for the table and once for each index.
        let expected = if profile == Profile::Lean { 5 } else { 6 };
        assert_eq!(sql.matches(quoted).count(), expected, "{sql}");
        let plain = table_sql(profile, "keiro", "keiro_outbox");
        let open: Vec<_> = plain.split('{').skip(1).filter(|rest| !rest.starts_with("0,63}")).collect();
        assert!(open.is_empty(), "{open:?}");
    }
    let shared = table_sql(Profile::Shared, "keiro", "keiro_outbox");
    for index in ["pending_idx", "head_of_line_idx", "source_order_idx", "claim_order_idx", "sent_gc_idx"] {
        assert!(
            shared.contains(&format!("create index \"keiro_outbox_{index}\" on \"keiro\".\"keiro_outbox\"")),
            "{index}"
        );
    }
}
