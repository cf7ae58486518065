//! The commands that change rows: what each does to each state on each shape of the table, what it refuses, and what it tells.

use serde_json::{Value, json};

use crate::support::daemon::{Finished, Setup, run_command};
use crate::support::database::{Database, Table};
use crate::support::outbox::{self, Outbox, id, keyed, row, with};
use crate::support::run;

/// Runs a command to its end.
#[track_caller]
pub fn command(database: &Database, sections: &str, arguments: &[&str], code: i32) -> Finished {
    let setup = Setup { database_url: database.url(), brokers: "127.0.0.1:1", sections, ..Setup::default() };
    let finished = run_command(&setup, arguments, "");
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

/// What a command with `--json` counted: changed, and why rows were left alone.
fn counted(finished: &Finished) -> (u64, Vec<String>) {
    let said: Value = serde_json::from_str(&finished.stdout).expect("one object");
    let why = said["unchanged_rows"].as_array().expect("a list").iter().map(|row| row["why"].as_str().expect("text"));
    (said["changed"].as_u64().expect("a count"), why.map(str::to_owned).collect())
}

const STATES: [&str; 7] = ["pending", "failed", "publishing", "sent", "dead", "rejected", "strange"];

/// A row in this state as the relay (or an odd program) leaves it; null keys, so that no lane stands in the way.
fn in_state(n: u64, state: &str, table: Table) -> Value {
    let far = if table == Table::Lean { "9999-12-31 00:00:00+00" } else { "2026-01-02 03:04:05+00" };
    let mut columns = json!({ "status": state, "attempt_count": 3 });
    let more = match state {
        "failed" => json!({ "last_error": "kafka.unknown: broker", "next_attempt_at": "2999-01-01 00:00:00+00" }),
        "sent" => json!({ "published_at": "2026-01-02 03:05:00+00" }),
        "dead" => json!({ "last_error": "kafka.unknown: broker", "next_attempt_at": far }),
        "rejected" => json!({ "rejected_at": "2026-01-02 03:05:00+00", "rejection_code": "kafka.invalid_topic",
                              "rejection_detail": "no", "next_attempt_at": far }),
        _ => json!({}),
    };
    if let (Value::Object(columns), Value::Object(more)) = (&mut columns, more) {
        columns.extend(more);
    }
    with(row(n), columns)
}

fn states(table: Table) -> impl Iterator<Item = (u64, &'static str)> {
    let exists = move |state: &&str| table != Table::OlderShared || *state != "rejected";
    (1..).zip(STATES.into_iter().filter(exists))
}

/// A fresh table with one row in every state.
async fn every_state(table: Table) -> Outbox {
    let outbox = Outbox::fresh(table).await;
    outbox.insert(&states(table).map(|(n, state)| in_state(n, state, table)).collect::<Vec<_>>()).await;
    outbox
}

/// Each verb takes exactly the states of the contract, leaves every other row alone to the last bit, and says so.
#[test]
fn each_verb_takes_the_states_of_the_contract_and_no_other() {
    let verbs: [(&[&str], &[&str]); 6] = [
        (&["retry"], &["dead", "rejected"]),
        (&["replay"], &["sent"]),
        (&["cancel", "--reason", "no longer wanted"], &["pending", "failed"]),
        (&["reschedule", "--in", "1h"], &["pending", "failed"]),
        (&["requeue-stuck"], &["publishing"]),
        (&["prune", "--before", "1s"], &["sent"]),
    ];
    for table in Table::ALL {
        for (verb, takes) in verbs {
            let outbox = run(async || every_state(table).await);
            let rows = || run(async || outbox::rows(&outbox.database.connect().await).await);
            let before = rows();
            let ids: Vec<String> = states(table).map(|(n, _)| id(n).to_string()).collect();
            let arguments: Vec<&str> =
                verb.iter().copied().chain(ids.iter().map(String::as_str)).chain(["--json"]).collect();
            let dry: Vec<&str> = arguments.iter().copied().chain(["--dry-run"]).collect();
            let told = counted(&command(&outbox.database, "", &dry, 3));
            assert_eq!(before, rows(), "{table:?} {dry:?}: a dry run changes nothing");
            assert_eq!(told, counted(&command(&outbox.database, "", &arguments, 3)), "{table:?} {verb:?}");
            let left: Vec<&str> =
                states(table).map(|(_, state)| state).filter(|state| !takes.contains(state)).collect();
            let why = left.iter().map(|state| if *state == "strange" { "unknown" } else { state }.to_owned()).collect();
            let taken = u64::try_from(ids.len() - left.len()).expect("few");
            assert_eq!(told, (taken, why), "{table:?} {verb:?}");
            let after = rows();
            for old in &before {
                let same = after.iter().any(|new| new == old);
                assert_eq!(same, !takes.contains(&old.status.as_str()), "{table:?} {verb:?} of a {} row", old.status);
            }
        }
    }
    // Alone, such a row is told what it is and what would be possible.
    let outbox = run(async || every_state(Table::NewerShared).await);
    for (n, verb, words) in [
        (1, &["retry"][..], "is pending; retry takes dead and rejected rows. It can be cancelled or rescheduled"),
        (3, &["cancel", "--reason", "x"], "is publishing; cancel takes pending and failed rows. Wait for its verdict"),
        (
            4,
            &["reschedule", "--in", "1h"],
            "is sent; reschedule takes pending and failed rows. It can be replayed or pruned",
        ),
        (5, &["replay"], "is dead; replay takes sent rows. It can be retried or pruned"),
        (7, &["requeue-stuck"], "is in a status nobody knows; requeue-stuck takes publishing rows. Correct it by hand"),
    ] {
        let outbox_id = id(n).to_string();
        let arguments = [verb, &[outbox_id.as_str()]].concat();
        let refused = command(&outbox.database, "", &arguments, 3);
        assert!(refused.stderr.contains(words), "{arguments:?}: {}", refused.stderr);
    }
}

/// What each verb leaves behind, column by column.
#[test]
fn verbs_leave_what_the_contract_says() {
    for table in Table::ALL {
        let outbox = run(async || every_state(table).await);
        let n = |wanted: &str| states(table).find(|(_, state)| *state == wanted).map(|(n, _)| id(n).to_string());
        let columns = |outbox_id: &str| {
            let outbox_id = outbox_id.parse().expect("a uuid");
            run(async || outbox::columns(&outbox.database.connect().await, outbox_id).await)
        };
        let recent = |columns: &std::collections::BTreeMap<String, Value>, name: &str| {
            columns[name].as_str().is_some_and(|text| !text.starts_with("2026-01-02"))
        };
        let mut back = vec![("retry", n("dead").expect("a row")), ("replay", n("sent").expect("a row"))];
        back.extend(n("rejected").map(|rejected| ("retry", rejected)));
        for (verb, row) in back {
            command(&outbox.database, "", &[verb, &row], 0);
            let now = columns(&row);
            assert_eq!((&now["status"], &now["attempt_count"]), (&json!("pending"), &json!(0)), "{table:?} {verb}");
            for name in ["last_error", "published_at", "rejected_at", "rejection_code", "rejection_detail"] {
                assert!(now.get(name).is_none_or(Value::is_null), "{table:?} {verb}: {name} in {now:?}");
            }
            assert!(recent(&now, "updated_at") && recent(&now, "next_attempt_at"), "{table:?} {verb}: {now:?}");
            assert_eq!(
                outbox.database.value(&format!(
                    "select next_attempt_at <= now() from keiro.keiro_outbox where outbox_id = '{row}'"
                )),
                "t"
            );
        }

        let reason = "duplicate of 17 \u{1b}[31m";
        let pending = n("pending").expect("a row");
        command(&outbox.database, "", &["cancel", &pending, "--reason", reason], 0);
        let now = columns(&pending);
        let far = if table == Table::Lean { "9999-12-31T" } else { "2026-01-02T" };
        assert!(now["next_attempt_at"].as_str().is_some_and(|at| at.starts_with(far)), "{table:?}: {now:?}");
        if table == Table::OlderShared {
            assert_eq!(now["status"], "dead");
            assert_eq!(now["last_error"], format!("rejected: operator.cancelled: {reason}"));
        } else {
            assert_eq!((&now["status"], &now["rejection_code"]), (&json!("rejected"), &json!("operator.cancelled")));
            assert_eq!((&now["rejection_detail"], &now["last_error"]), (&json!(reason), &Value::Null));
            assert!(recent(&now, "rejected_at"));
        }
        // Again is no error and changes nothing, also another reason.
        let again = command(&outbox.database, "", &["cancel", &pending, "--reason", "x", "--json"], 0);
        assert_eq!(counted(&again), (0, vec!["already_cancelled".to_owned()]), "{table:?}");
        assert_eq!(now, columns(&pending), "{table:?}");
        // And a cancelled row can be retried.
        command(&outbox.database, "", &["retry", &pending], 0);
        assert_eq!(columns(&pending)["status"], "pending", "{table:?}");

        let failed = n("failed").expect("a row");
        command(&outbox.database, "", &["reschedule", &failed, "--at", "2031-05-06T07:08:09.25Z"], 0);
        let now = columns(&failed);
        assert_eq!(now["next_attempt_at"], "2031-05-06T07:08:09.25+00:00", "{table:?}: {now:?}");
        let kept = (&now["status"], &now["attempt_count"], &now["last_error"]);
        assert_eq!(kept, (&json!("failed"), &json!(3), &json!("kafka.unknown: broker")), "{table:?}");
        command(&outbox.database, "", &["reschedule", &failed, "--in", "0s"], 0);
        assert_eq!(
            outbox.database.value(&format!(
                "select next_attempt_at <= now() from keiro.keiro_outbox where outbox_id = '{failed}'"
            )),
            "t"
        );

        let stuck = n("publishing").expect("a row");
        command(&outbox.database, "", &["requeue-stuck", &stuck], 0);
        let now = columns(&stuck);
        assert_eq!((&now["status"], &now["attempt_count"]), (&json!("failed"), &json!(3)), "{table:?}");
        assert_eq!(now["last_error"], "reclaimed: publisher crashed mid-publish", "{table:?}");
    }
}

#[test]
fn attempts_that_are_kept_must_not_be_spent() {
    let outbox = run(async || Outbox::fresh(Table::NewerShared).await);
    let rows = [
        in_state(1, "dead", Table::NewerShared),
        with(in_state(2, "dead", Table::NewerShared), json!({ "attempt_count": 4 })),
    ];
    run(async || outbox::insert(&outbox.database.connect().await, &rows).await);
    let sections = "[sources.s]\nmax_attempts = 4\n";
    let kept = command(
        &outbox.database,
        sections,
        &["retry", "--everything", "--keep-attempts", "--json", "--at", "2031-01-01T00:00:00Z"],
        3,
    );
    assert_eq!(counted(&kept), (1, vec!["attempts_spent".to_owned()]));
    let left = outbox.database.value("select string_agg(status || attempt_count || (next_attempt_at > now()), '-' order by outbox_id) from keiro.keiro_outbox");
    assert_eq!(left, "pending3true-dead4false");
}

#[test]
fn requeue_takes_rows_whose_lease_ran_out_and_spends_the_last_attempt() {
    for table in Table::ALL {
        let outbox = run(async || Outbox::fresh(table).await);
        let spent = with(in_state(2, "publishing", table), json!({ "attempt_count": 4 }));
        run(async || {
            outbox::insert(
                &outbox.database.connect().await,
                &[in_state(1, "publishing", table), spent, in_state(3, "publishing", table)],
            )
            .await;
        });
        outbox.database.execute(&format!(
            "update keiro.keiro_outbox set updated_at = now() - interval '4 minutes' where outbox_id = '{}'",
            id(3)
        ));
        let sections = "[sources.s]\nmax_attempts = 4\n";
        let dry = command(&outbox.database, sections, &["requeue-stuck", "--everything", "--dry-run"], 0);
        assert_eq!(
            dry.stdout,
            "nothing changed: this would have requeued 2 rows, of them 1 dead, since their attempts are spent\n"
        );
        let leased = command(&outbox.database, sections, &["requeue-stuck", &id(3).to_string(), "--json"], 3);
        assert_eq!(counted(&leased), (0, vec!["leased".to_owned()]));
        command(&outbox.database, sections, &["requeue-stuck", "--everything", "--older-than", "4m"], 64);
        let done = command(&outbox.database, sections, &["requeue-stuck", "--everything"], 0);
        assert_eq!(done.stdout, "requeued 2 rows, of them 1 dead, since their attempts are spent\n");
        let left = outbox.database.value("select string_agg(status, '-' order by outbox_id) from keiro.keiro_outbox");
        assert_eq!(left, "failed-dead-publishing", "{table:?}");
    }
}

#[test]
fn prune_takes_what_is_named_and_old_enough() {
    for table in Table::ALL {
        let outbox = run(async || every_state(table).await);
        let count =
            || outbox.database.value("select string_agg(status, '-' order by outbox_id) from keiro.keiro_outbox");
        let all = count();
        command(&outbox.database, "", &["prune", "--before", "2026-01-02T03:05:00Z"], 0);
        command(&outbox.database, "", &["prune", "--before", "2026-01-02T03:04:05Z", "--status", "dead"], 0);
        let recent = command(
            &outbox.database,
            "",
            &["prune", "--before", "2026-01-02T03:05:00Z", &id(4).to_string(), "--json"],
            3,
        );
        assert_eq!(counted(&recent), (0, vec!["recent".to_owned()]));
        assert_eq!(count(), all, "{table:?}: nothing is older");
        for status in ["pending", "failed", "publishing", "unknown", "sent,pending"] {
            command(&outbox.database, "", &["prune", "--before", "1s", "--status", status], 64);
        }
        command(&outbox.database, "", &["prune", "--before", "2026-01-02T03:05:01Z"], 0);
        assert_eq!(count(), all.replace("-sent", ""), "{table:?}");
        command(
            &outbox.database,
            "",
            &["prune", "--before", "2026-01-02T03:05:01Z", "--status", "dead,rejected", "--source", "t"],
            0,
        );
        assert_eq!(count(), all.replace("-sent", ""), "{table:?}: of another source");
        command(&outbox.database, "", &["prune", "--before", "2026-01-02T03:05:01Z", "--status", "dead,rejected"], 0);
        assert_eq!(count(), "pending-failed-publishing-strange", "{table:?}");
    }
}

#[test]
fn what_a_mistaken_operator_types_is_refused_and_changes_nothing() {
    let outbox = run(async || every_state(Table::Lean).await);
    let before = run(async || outbox::rows(&outbox.database.connect().await).await);
    let row = id(5).to_string();
    let refused: [&[&str]; 24] = [
        &["retry"],
        &["retry", "--status", "any"],
        &["retry", "--dry-run"],
        &["retry", "--everything", &row],
        &["retry", "--everything", "--source", "s"],
        &["retry", "--status", "sent"],
        &["retry", "--due", "--source", "s"],
        &["retry", "--lane"],
        &["retry", "--lane", "--source", "s"],
        &["retry", "everything"],
        &["retry", &row, "--limit", "0"],
        &["retry", &row, "--at", "tomorrow"],
        &["cancel", "--everything"],
        &["cancel", "--everything", "--reason", ""],
        &["cancel", "--reason", "x"],
        &["reschedule", &row],
        &["reschedule", &row, "--in", "-1h"],
        &["reschedule", &row, "--in", "1h", "--at", "2031-01-01T00:00:00Z"],
        &["reschedule", &row, "--at", "9000-01-01T00:00:00Z"],
        &["requeue-stuck"],
        &["requeue-stuck", "--everything", "--status", "pending"],
        &["prune", "--everything"],
        &["replay"],
        &["replay", "--status", "dead"],
    ];
    for arguments in refused {
        let finished = command(&outbox.database, "", arguments, 64);
        assert!(!finished.stderr.is_empty() && finished.stdout.is_empty(), "{arguments:?}");
    }
    // No row, and rows of which one is not there.
    let stranger = "00000000-0000-0000-0000-000000000000";
    let missing = command(&outbox.database, "", &["retry", stranger, "--json"], 3);
    assert_eq!(counted(&missing), (0, vec!["not_found".to_owned()]));
    command(&outbox.database, "", &["retry", stranger, "--lane"], 3);
    // A selection that matches nothing is no mistake.
    let nothing = command(&outbox.database, "", &["retry", "--source", "nobody"], 0);
    assert_eq!(nothing.stdout, "retried 0 rows\n");
    assert_eq!(run(async || outbox::rows(&outbox.database.connect().await).await), before);
    // Named twice is named once, and what can be done is done beside what cannot.
    let both = command(&outbox.database, "", &["retry", &row, "--id", &row, stranger, "--json"], 3);
    assert_eq!(counted(&both), (1, vec!["not_found".to_owned()]));
}

/// The log says who did what to which rows, and never a key.
#[test]
fn log_says_who_did_what() {
    let outbox = run(async || every_state(Table::NewerShared).await);
    let done = command(
        &outbox.database,
        "[relay]\ninstance = \"desk7\"\n",
        &["cancel", "--source", "s", "--key", "planted-key", "--key", "", "--reason", "over"],
        0,
    );
    assert!(!done.stderr.contains("planted-key"), "{}", done.stderr);
    let done = command(
        &outbox.database,
        "[relay]\ninstance = \"desk7\"\n",
        &["retry", "--source", "s", "--since", "2026-01-01T00:00:00Z", "--limit", "1"],
        0,
    );
    let line = done.stderr.lines().find(|line| line.contains("\"operator's command\"")).expect("a line");
    let line: Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(
        (&line["command"], &line["user"], &line["level"]),
        (&json!("retry"), &json!("postgres"), &json!("INFO")),
        "{line}"
    );
    assert!(line["application"].as_str().is_some_and(|name| name.starts_with("keiro-relay/desk7/")), "{line}");
    assert_eq!(line["what"], "limit=1 source=[\"s\"] status=dead,rejected since=2026-01-01T00:00:00Z", "{line}");
    assert_eq!(
        (&line["changed"], &line["unchanged"], &line["complete"]),
        (&json!(1), &json!(0), &json!(true)),
        "{line}"
    );
    assert!(
        !command(&outbox.database, "", &["retry", "--everything", "--dry-run"], 0)
            .stderr
            .contains("operator's command")
    );
}

/// Rows of one lane: retried past a later row that was sent, or is in flight, only when told to.
#[test]
fn overtaken_rows_are_left_alone_unless_told_otherwise() {
    for table in Table::ALL {
        let dead = |n: u64, key: &str| with(in_state(n, "dead", table), json!({ "message_key": key }));
        let sent = |n: u64, key: &str| with(in_state(n, "sent", table), json!({ "message_key": key }));
        let flying = |n: u64, key: &str| with(in_state(n, "publishing", table), json!({ "message_key": key }));
        let of = |row: Value, source: &str| with(row, json!({ "source": source }));
        let same_time = |row: Value| with(row, json!({ "created_at": outbox::created_at(900) }));
        let outbox = run(async || Outbox::fresh(table).await);
        let rows = [
            // Overtaken by row 2; row 3 is behind it and not overtaken; keys do not concern each other.
            dead(1, "a"),
            sent(2, "a"),
            dead(3, "a"),
            keyed(4, "a"),
            sent(5, "b"),
            // Overtaken by a row in flight.
            dead(11, "c"),
            flying(12, "c"),
            // Nothing is later: sent before.
            sent(21, "d"),
            dead(22, "d"),
            // One transaction: ids decide.
            same_time(sent(31, "e")),
            same_time(dead(32, "e")),
            same_time(dead(33, "f")),
            same_time(sent(34, "f")),
            // No key, no lane.
            in_state(41, "dead", table),
            in_state(42, "sent", table),
            // A source that is one lane: any key.
            of(dead(51, "x"), "stream"),
            of(sent(52, "y"), "stream"),
            of(dead(53, "z"), "stream"),
            // A source without lanes.
            of(dead(61, "x"), "free"),
            of(sent(62, "x"), "free"),
            // An empty key is a key.
            dead(71, ""),
            sent(72, ""),
        ];
        run(async || outbox::insert(&outbox.database.connect().await, &rows).await);
        let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.free]\npolicy = \"best_effort\"\n";
        let told = |arguments: &[&str], code| {
            let said: Value =
                serde_json::from_str(&command(&outbox.database, sections, arguments, code).stdout).expect("one object");
            let rows = said["unchanged_rows"].as_array().expect("a list").clone();
            let mut rows: Vec<String> = rows
                .iter()
                .map(|row| {
                    format!("{} {}", row["outbox_id"].as_str().expect("an id"), row["why"].as_str().expect("text"))
                })
                .collect();
            rows.sort();
            (said["changed"].clone(), rows)
        };
        let late =
            [(1, "later_sent"), (11, "later_in_flight"), (33, "later_sent"), (51, "later_sent"), (71, "later_sent")];
        let late: Vec<String> = late.iter().map(|(n, why)| format!("{} {why}", id(*n))).collect();
        let expected = (json!(6), late);
        assert_eq!(told(&["retry", "--everything", "--dry-run", "--json"], 3), expected, "{table:?}");
        assert_eq!(told(&["retry", "--everything", "--json"], 3), expected, "{table:?}");
        let pending = outbox.database.value("select string_agg(right(outbox_id::text, 2), '-' order by outbox_id) from keiro.keiro_outbox where status = 'pending'");
        // In hexadecimal: 3, 4, 22, 32, 41, 53, 61.
        assert_eq!(pending, "03-04-16-20-29-35-3d", "{table:?}");
        let single = command(&outbox.database, sections, &["retry", &id(1).to_string()], 3);
        assert!(single.stderr.contains("--allow-reorder"), "{}", single.stderr);
        command(&outbox.database, sections, &["retry", &id(1).to_string(), "--allow-reorder"], 0);
        // Replaying is the same: 2 has a later row waiting but none sent.
        assert_eq!(
            told(&["replay", &id(31).to_string(), &id(21).to_string(), &id(52).to_string(), "--json"], 0).0,
            json!(3),
            "{table:?}"
        );
        assert_eq!(told(&["replay", &id(2).to_string(), "--json"], 0).0, json!(1), "{table:?}");
    }
}

#[test]
fn lane_is_retried_as_a_whole() {
    for table in Table::ALL {
        let outbox = run(async || Outbox::fresh(table).await);
        let dead = |n: u64, key: &str, source: &str| {
            with(in_state(n, "dead", table), json!({ "message_key": key, "source": source }))
        };
        let rows = [
            dead(1, "a", "s"),
            dead(2, "b", "s"),
            keyed(3, "a"),
            dead(4, "a", "s"),
            dead(5, "a", "t"),
            in_state(6, "dead", table),
            in_state(7, "dead", table),
            dead(8, "a", "stream"),
            dead(9, "b", "stream"),
        ];
        run(async || outbox::insert(&outbox.database.connect().await, &rows).await);
        let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n";
        let pending = || {
            outbox.database.value("select string_agg(right(outbox_id::text, 1), '' order by outbox_id) from keiro.keiro_outbox where status = 'pending'")
        };
        // By any row of the lane, whatever its state.
        command(&outbox.database, sections, &["retry", "--lane", &id(3).to_string()], 0);
        assert_eq!(pending(), "134", "{table:?}");
        command(&outbox.database, sections, &["retry", "--lane", &id(8).to_string()], 0);
        assert_eq!(pending(), "13489", "{table:?}");
        // A row without a key is its own lane.
        command(&outbox.database, sections, &["retry", "--lane", &id(6).to_string()], 0);
        assert_eq!(pending(), "134689", "{table:?}");
    }
}
