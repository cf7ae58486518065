//! The filters of commands about rows: what was typed becomes a selection, and a selection a statement without a value in its text.

use clap::{Args as _, Command, FromArgMatches as _};
use keiro_relay::cli::rows::filter::{RowFilter, parse_when, unserved_line};
use keiro_relay::domain::message::PgTime;
use keiro_relay::store::{Filter, Page, Profile, Query, Selection, Shape, Sort, Status, When};
use std::collections::BTreeSet;
use std::time::Duration;

fn typed(arguments: &[&str]) -> Result<RowFilter, String> {
    let command = RowFilter::augment_args(Command::new("list").no_binary_name(true));
    let matches = command.try_get_matches_from(arguments).map_err(|error| error.to_string())?;
    RowFilter::from_arg_matches(&matches).map_err(|error| error.to_string())
}

fn selection(arguments: &[&str]) -> Result<Selection, String> {
    typed(arguments)?.selection()
}

fn shape(profile: Profile, rejected_columns: bool) -> Shape {
    Shape {
        rejected_columns,
        profile,
        can_delete: true,
        reads_all_stats: true,
        server_version: 180_001,
        in_recovery: false,
        unlogged: false,
        relay_schema: false,
        missing_indexes: Vec::new(),
    }
}

fn query(selection: &Selection, profile: Profile, sort: Sort) -> Query {
    let page = Page { sort, descending: false, after: None, created_until: None, rows_max: 50 };
    selection.query("keiro", "keiro_outbox", &shape(profile, true), "o.outbox_id, o.created_at", page, PgTime(0))
}

fn unserved(arguments: &[&str], profile: Profile, sort: Sort) -> Vec<Filter> {
    query(&selection(arguments).expect("a selection"), profile, sort).unserved.filters.into_iter().collect()
}

#[test]
fn filters_repeat_and_add_up() {
    let id = "019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a";
    let all = [
        "--id",
        id,
        "--source",
        "a",
        "--source",
        "b,c",
        "--status",
        "pending,failed",
        "--status",
        "unknown",
        "--topic",
        "t",
        "--key",
        "",
        "--event-type",
        "E",
        "--message-id",
        "m",
        "--since",
        "2h",
        "--until",
        "2026-01-02T03:04:05+01:00",
        "--error",
        "kafka.message_too_large:",
        "--error",
        "skipped",
    ];
    let found = selection(&all).expect("a selection");
    let expected = Selection {
        ids: vec![id.parse().expect("a uuid")],
        sources: vec!["a".to_owned(), "b,c".to_owned()],
        statuses: BTreeSet::from([Status::Pending, Status::Failed, Status::Unknown]),
        topics: vec!["t".to_owned()],
        keys: vec![String::new()],
        event_types: vec!["E".to_owned()],
        message_ids: vec!["m".to_owned()],
        since: Some(When::Ago(Duration::from_secs(7200))),
        until: Some(When::At(PgTime::from_unix_micros(1_767_319_445_000_000))),
        errors: vec!["kafka.message_too_large".to_owned(), "skipped".to_owned()],
        due: None,
        ..Selection::default()
    };
    assert_eq!(found, expected);
    assert_eq!(selection(&["--due"]).expect("a selection").due, Some(true));
    assert_eq!(selection(&["--not-due"]).expect("a selection").due, Some(false));
    assert_eq!(selection(&["--status", "dead,any"]).expect("a selection"), Selection::default());
    assert!(typed(&[]).expect("no filter").is_empty());
    assert!(!typed(&["--status", "any"]).expect("a filter").is_empty());
}

#[test]
fn what_makes_no_sense_is_refused_with_what_would() {
    for (arguments, says) in [
        (&["--status", "sending"][..], "possible values: pending, failed"),
        (&["--id", "42"], "an outbox_id is a UUID such as"),
        (&["--since", "yesterday"], "expected a time with its zone such as"),
        (&["--since", "2026-01-02T03:04:05"], "expected a time with its zone such as"),
        (&["--until", "-2h"], "a duration back such as"),
        (&["--error", "a: b"], "before the first colon"),
        (&["--error", ":"], "before the first colon"),
        (&["--due", "--not-due"], "cannot be used with"),
        (&["--since", "1h", "--until", "2h"], "no row can be between them"),
        (&["--since", "2026-01-02T00:00:00Z", "--until", "2026-01-02T00:00:00Z"], "no row can be between them"),
        (&["--status", "dead", "--due"], "only pending and failed"),
        (&["--status", "sent", "--error", "x"], "a sent row has none"),
    ] {
        let error = selection(arguments).expect_err("refused");
        assert!(error.contains(says), "{arguments:?}: {error}");
    }
}

#[test]
fn times_are_instants_or_durations_back_and_never_leave_the_servers_range() {
    assert_eq!(parse_when("3d 12h"), Ok(When::Ago(Duration::from_secs(84 * 3600))));
    assert_eq!(parse_when(" 15m ago "), Ok(When::Ago(Duration::from_secs(900))));
    assert_eq!(parse_when("2000-01-01T00:00:00Z"), Ok(When::At(PgTime(0))));
    let now = PgTime(0);
    assert_eq!(When::Ago(Duration::from_secs(1)).instant(now), PgTime(-1_000_000));
    assert_eq!(parse_when("-005000-01-01T00:00:00Z").expect("jiff's range").instant(now), PgTime::NEG_INFINITY);
    assert!(When::Ago(Duration::MAX).instant(now) < PgTime(0));
}

#[test]
fn no_value_is_in_the_text_and_every_place_is_bound() {
    let marks = ["m_arker'; drop table x; --", "019b7c1e-8a30-7cc2-9f0e-0f6a5d3c2b1a"];
    let one = [
        ["--id", marks[1]],
        ["--source", marks[0]],
        ["--topic", marks[0]],
        ["--key", marks[0]],
        ["--event-type", marks[0]],
        ["--message-id", marks[0]],
        ["--error", marks[0]],
        ["--since", "2h"],
        ["--status", "unknown,dead,sent"],
    ];
    let mut every: Vec<Vec<&str>> = one.iter().map(|pair| pair.to_vec()).collect();
    every.push(Vec::new());
    every.push(vec!["--not-due"]);
    every.push(one[1..7].concat());
    for arguments in every {
        for profile in [Profile::Lean, Profile::Shared] {
            for sort in [Sort::Created, Sort::Updated, Sort::Due, Sort::Published] {
                let Query { sql, binds, .. } = query(&selection(&arguments).expect("a selection"), profile, sort);
                assert!(!marks.iter().any(|mark| sql.contains(mark)), "{sql}");
                assert!(!format!("{binds:?}").contains("m_arker"));
                let mut places: Vec<usize> = sql
                    .split('$')
                    .skip(1)
                    .map(|rest| {
                        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().expect("a place")
                    })
                    .collect();
                places.sort_unstable();
                places.dedup();
                assert_eq!(places, (1..=binds.params().len()).collect::<Vec<_>>(), "{sql}");
            }
        }
    }
}

#[test]
fn what_no_index_serves_is_named() {
    use Filter as F;
    for (arguments, sort, lean, shared) in [
        // The rows that wait, in their order.
        (&["--status", "pending,failed"][..], Sort::Created, &[][..], &[][..]),
        (&["--source", "s", "--since", "2h", "--until", "1h", "--status", "pending,failed"], Sort::Created, &[], &[]),
        (&["--status", "dead,rejected"], Sort::Created, &[], &[]),
        (&["--source", "s", "--status", "dead"], Sort::Created, &[], &[F::Source]),
        (&["--key", "k", "--status", "pending", "--topic", "t"], Sort::Due, &[], &[]),
        (&["--message-id", "m", "--error", "e"], Sort::Updated, &[], &[]),
        // What needs the status in an index.
        (&["--status", "failed"], Sort::Created, &[F::Status], &[]),
        (&["--status", "pending,failed"], Sort::Due, &[F::Sort], &[]),
        (&["--not-due"], Sort::Created, &[F::Due], &[]),
        (&["--due"], Sort::Created, &[F::Due], &[F::Due]),
        // What neither profile has.
        (
            &["--status", "pending,failed", "--topic", "t", "--event-type", "E"],
            Sort::Created,
            &[F::Topic, F::EventType],
            &[F::Topic, F::EventType],
        ),
        (&["--status", "pending,failed"], Sort::Updated, &[F::Sort], &[F::Sort]),
        (&["--key", "k", "--status", "dead"], Sort::Created, &[F::Key], &[F::Key]),
        // Sent rows by when they were sent.
        (&["--status", "sent"], Sort::Created, &[F::Status], &[F::Status]),
        (&["--status", "sent"], Sort::Published, &[], &[]),
        (&["--status", "sent", "--since", "2h"], Sort::Created, &[], &[]),
    ] {
        assert_eq!(unserved(arguments, Profile::Lean, sort), lean, "lean: {arguments:?} {sort:?}");
        assert_eq!(unserved(arguments, Profile::Shared, sort), shared, "shared: {arguments:?} {sort:?}");
    }
    let query = query(&selection(&["--topic", "t"]).expect("a selection"), Profile::Lean, Sort::Updated);
    let line = unserved_line(&query.unserved).expect("something to say");
    assert!(line.starts_with("no index serves --topic, --sort") || line.contains("--topic"), "{line}");
    assert!(!line.contains('\n'));
}

#[test]
fn missing_index_is_named() {
    let mut shape = shape(Profile::Shared, true);
    shape.missing_indexes = vec!["keiro_outbox_source_order_idx".to_owned(), "keiro_outbox_pending_idx".to_owned()];
    let page = Page { sort: Sort::Created, descending: false, after: None, created_until: None, rows_max: 50 };
    let asked = selection(&["--status", "pending,failed"]).expect("a selection");
    let query = asked.query("keiro", "keiro_outbox", &shape, "o.outbox_id, o.created_at", page, PgTime(0));
    assert_eq!(query.unserved.missing_indexes.into_iter().collect::<Vec<_>>(), ["keiro_outbox_source_order_idx"]);
}
