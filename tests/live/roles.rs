//! The roles of `deploy/roles.sql`: each can do its job and nothing else.

use keiro_relay::store::migrate;
use tokio_postgres::error::SqlState;

use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::store::db;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, run, services, unique, wait_until};

const ROLES: [&str; 4] = ["producer", "relay", "operator", "reader"];

/// A table with its side schema and its roles, whose names begin with the prefix that is returned: roles belong to the whole server.
fn with_roles(table: Table) -> (Database, String) {
    let database = fresh_database(table);
    run(async || migrate(&db(database.url()), "keiro", "keiro_outbox", None, false).await).expect("migrate");
    let prefix = unique("r");
    for _ in 0..2 {
        database.execute(&script(&prefix));
    }
    (database, prefix)
}

fn script(prefix: &str) -> String {
    let script = include_str!("../../deploy/roles.sql");
    ROLES.iter().fold(script.to_owned(), |script, role| {
        let name = format!("'keiro_outbox_{role}'");
        assert!(script.contains(&name), "{name} is a name of the script");
        script.replace(&name, &format!("'{prefix}_{role}'"))
    })
}

/// Every statement, and who may run it: the initials of producer, relay, operator and reader.
const STATEMENTS: &[(&str, &str)] = &[
    (
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, payload_bytes, \
      occurred_at) values (gen_random_uuid(), 'm', 's', 't', 'e', 1, 'text/plain', '', now()) on conflict do nothing",
        "p",
    ),
    (
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, payload_bytes, \
      occurred_at) values (gen_random_uuid(), 'm', 's', 't', 'e', 1, 'text/plain', '', now()) on conflict (source, message_id) do nothing \
      returning outbox_id, source, message_id",
        "p",
    ),
    ("select outbox_id, source, message_id from keiro.keiro_outbox", "prow"),
    ("select payload_bytes from keiro.keiro_outbox", "row"),
    ("select status from keiro.keiro_outbox", "row"),
    ("select * from keiro.keiro_outbox", "row"),
    ("select outbox_id from keiro.keiro_outbox for update skip locked", "ro"),
    ("update keiro.keiro_outbox set status = 'pending' where false", "ro"),
    ("delete from keiro.keiro_outbox where status = 'sent'", "ro"),
    ("truncate keiro.keiro_outbox", ""),
    ("alter table keiro.keiro_outbox add column x int", ""),
    ("create index on keiro.keiro_outbox (status)", ""),
    ("drop table keiro.keiro_outbox", ""),
    ("create table keiro.mine (x int)", ""),
    (
        "create trigger t before insert on keiro.keiro_outbox for each row execute function suppress_redundant_updates_trigger()",
        "",
    ),
    // Who has a right on the table gives on nothing, with a warning; who has rights on its columns only is refused.
    (
        "grant select on keiro.keiro_outbox to public; select 1 / (not has_table_privilege('public', 'keiro.keiro_outbox', 'select'))::int",
        "row",
    ),
    // A row that claims to have been sent would never be.
    (
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, payload_bytes, \
      occurred_at, status, published_at) values (gen_random_uuid(), 'm', 's', 't', 'e', 1, 'text/plain', '', now(), 'sent', now())",
        "",
    ),
    ("select * from keiro_relay.pauses", "row"),
    (
        "insert into keiro_relay.pauses (schema_name, table_name, kind, name) values ('keiro', 'keiro_outbox', 'source', 's')",
        "o",
    ),
    ("update keiro_relay.pauses set reason = ''", "o"),
    ("delete from keiro_relay.pauses", "o"),
    ("truncate keiro_relay.pauses", ""),
    ("select * from keiro_relay.outbox_tables", "row"),
    ("delete from keiro_relay.outbox_tables", ""),
    ("select * from keiro_relay.schema_history", ""),
    ("delete from keiro_relay.schema_history", ""),
    ("create table keiro_relay.mine (x int)", ""),
    ("drop schema keiro_relay cascade", ""),
    ("listen keiro_relay_wake; select pg_notify('keiro_relay_wake', '')", "prow"),
    ("create role another", ""),
];

#[test]
fn each_role_may_run_these_statements_and_no_others() {
    for table in [Table::OlderShared, Table::NewerShared, Table::Lean] {
        let (database, prefix) = with_roles(table);
        let mut session = Session::open(&database);
        for (statement, allowed) in STATEMENTS {
            for (role, initial) in ROLES.iter().zip(["p", "r", "o", "w"]) {
                let outcome = session.try_execute(&format!("begin; set local role {prefix}_{role}; {statement}"));
                session.execute("rollback");
                let refused = match &outcome {
                    Ok(()) => None,
                    Err(error) => Some(error.code().unwrap_or_else(|| panic!("{error:?}")).clone()),
                };
                let expected = (!allowed.contains(initial)).then_some(SqlState::INSUFFICIENT_PRIVILEGE);
                assert_eq!(refused, expected, "{role} on {table:?}: {statement}");
            }
        }
    }
}

#[test]
fn what_was_granted_beside_is_taken_back_and_the_side_schema_may_be_missing() {
    let (database, prefix) = with_roles(Table::Lean);
    database.execute(&format!(
        "grant all on keiro.keiro_outbox, keiro_relay.pauses to {prefix}_reader; grant update (status) on keiro.keiro_outbox to {prefix}_producer; \
         grant create on schema keiro to {prefix}_relay"
    ));
    database.execute(&script(&prefix));
    let may = |role: &str, what: &str, privilege: &str| {
        database.value(&format!("select has_{what}_privilege('{prefix}_{role}', {privilege})")) == "t"
    };
    assert!(
        !may("reader", "table", "'keiro.keiro_outbox', 'update'")
            && !may("reader", "table", "'keiro_relay.pauses', 'delete'")
    );
    assert!(!may("producer", "column", "'keiro.keiro_outbox', 'status', 'update'"));
    assert!(!may("relay", "schema", "'keiro', 'create'") && may("relay", "schema", "'keiro', 'usage'"));

    let database = fresh_database(Table::NewerShared);
    database.execute(&script(&unique("r")));
}

/// The URL of a user who has one of the roles.
fn user(database: &Database, prefix: &str, role: &str) -> String {
    let name = format!("{prefix}_{role}_user");
    database.execute(&format!("create role {name} login in role {prefix}_{role}"));
    database.url().replace("postgres@", &format!("{name}@"))
}

#[track_caller]
fn command(setup: &Setup<'_>, arguments: &[&str], input: &str, code: i32) -> Finished {
    let finished = run_command(setup, arguments, input);
    assert_eq!(finished.status.code(), Some(code), "{arguments:?}: {} {}", finished.stdout, finished.stderr);
    finished
}

#[test]
fn each_role_does_its_job_with_the_program() {
    let (database, prefix) = with_roles(Table::Lean);
    let topic = fresh_topic(2, &[]);
    let [producer, relay, operator, reader] = ROLES.map(|role| user(&database, &prefix, role));
    let sections = "[maintenance]\ninterval = \"1s\"\nretention = \"1h\"\n\n[sources.line]\npolicy = \"stop_the_line\"\non_halt = \"hold\"\n";
    let setup = |url| Setup { database_url: url, brokers: services::brokers(), sections, ..Setup::default() };
    let (producer, relay, operator, reader) = (setup(&producer), setup(&relay), setup(&operator), setup(&reader));

    let mut daemon = Daemon::start(&relay);
    command(&operator, &["pause", "line", "--reason", "not yet"], "", 0);
    wait_until("the relay to see the pause", LONG, || {
        daemon.metric("keiro_relay_paused{kind=\"source\"}") == Some(1.0)
    });
    let row = |source: &str, n: usize| {
        format!(
            "{{\"source\":\"{source}\",\"destination\":\"{topic}\",\"message_key\":\"k\",\"message_id\":\"{source}-{n:06}\",\
                 \"event_type\":\"E\",\"payload\":{n}}}\n"
        )
    };
    let lines: String = ["keyed", "line"]
        .iter()
        .flat_map(|source| (0..5).map(move |n| (source, n)))
        .map(|(source, n)| row(source, n))
        .collect();
    for inserted in ["\"inserted\":true", "\"inserted\":false"] {
        let said = command(&producer, &["enqueue"], &lines, 0).stdout;
        assert_eq!(said.matches(inserted).count(), 10, "{said}");
    }
    let mut session = Session::open(&database);
    wait_until("the rows of the other source to be sent", LONG, || {
        session.rows("source = 'keyed' and status = 'sent'") == 5
    });
    assert_eq!(session.statuses("source = 'line'"), "pending=5");
    assert!(command(&reader, &["pause", "--list"], "", 0).stdout.contains(&format!("{prefix}_operator_user")));
    let said = command(&reader, &["status", "--json"], "", 0).stdout;
    assert!(said.contains("\"source\":\"line\""), "{said}");
    command(&reader, &["status"], "", 0);
    command(&operator, &["resume", "line"], "", 0);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let mut expected = Vec::new();
    for (source, order) in [("keyed", Order::Key), ("line", Order::Source)] {
        let mut feed = Feed::new(source, &topic, order);
        let _ = feed.statement(5, 1);
        expected.extend(feed.expected().to_vec());
    }
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    daemon.wait_http_ok("/readyz", LONG);
    // Late commits are seen at once, and retention deletes.
    assert!(
        !daemon.stderr().contains("pg_read_all_stats") && !daemon.stderr().contains("retention is off"),
        "{}",
        daemon.stderr()
    );
    session.execute("update keiro.keiro_outbox set published_at = now() - interval '2 hours'");
    wait_until("retention", LONG, || session.rows("true") == 0);

    for arguments in [&["retry", "--everything"][..], &["prune", "--before", "1h"], &["replay", "--everything"]] {
        command(&operator, arguments, "", 0);
    }

    // And what is not theirs says which right is missing.
    for (setup, arguments) in [
        (&reader, &["pause", "x"][..]),
        (&reader, &["resume", "--topic", "x"]),
        (&reader, &["retry", "--everything"]),
        (&reader, &["prune", "--before", "1h"]),
        (&producer, &["status"]),
        (&producer, &["pause", "--list"]),
        (&relay, &["pause", "x"]),
        (&reader, &["drain"]),
        (&reader, &["migrate"]),
    ] {
        let said = command(setup, arguments, "", 78).stderr;
        assert!(said.contains("permission denied") || said.contains("lacks"), "{arguments:?}: {said}");
    }
    command(&reader, &["enqueue"], &row("keyed", 9), 78);
}
