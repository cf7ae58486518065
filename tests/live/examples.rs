//! The examples, run as they are written: those in Rust without the relay, those in other languages by their own interpreters, and the
//! SQL of the documentation.

use std::path::{Path, PathBuf};
use std::process::Command;

use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use crate::support::database::{Database, Table, fresh_database};
use crate::support::run;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What a command printed; it must succeed.
#[track_caller]
fn printed(database: &Database, command: &mut Command) -> String {
    let output = command.env("DATABASE_URL", database.url()).output();
    let output = output.unwrap_or_else(|error| panic!("{command:?} did not start ({error}): run `make languages`"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed: {error}");
    String::from_utf8(output.stdout).expect("text")
}

/// An example in Rust, linked without the relay; a warning in either fails.
#[track_caller]
fn example(database: &Database, name: &str, arguments: &[&str]) -> String {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["run", "--quiet", "--locked", "--no-default-features", "--target-dir"]);
    cargo.arg(Path::new(env!("CARGO_TARGET_TMPDIR")).join("half")).args(["--example", name, "--"]).args(arguments);
    printed(database, cargo.env("RUSTFLAGS", "-D warnings").current_dir(root()))
}

fn with_invoices() -> Database {
    let database = fresh_database(Table::NewerShared);
    database.execute("create table invoices (id bigint primary key, sent boolean not null)");
    database
}

const INSERTED: &str = "InvoiceSent-42 inserted\nPaymentDue-42 inserted\n";
const AGAIN: &str = "InvoiceSent-42 already there\nPaymentDue-42 already there\n";

/// What an example wrote for invoice 42, in the order in which it goes out.
#[track_caller]
fn assert_wrote_the_two_messages(database: &Database, attributes: &str) {
    let rows = database.value(
        "select string_agg(concat_ws('|', message_id, source, destination, message_key, event_type, schema_version, \
         content_type, convert_from(payload_bytes, 'UTF8')::jsonb, attributes, substr(outbox_id::text, 15, 1), status), ' / ' \
         order by created_at, outbox_id) from keiro.keiro_outbox",
    );
    let rows = rows.trim_matches('"').replace("\"\"", "\"");
    let attributes = if attributes.is_empty() { String::new() } else { format!("|{attributes}") };
    let row = |kind: &str, payload: &str| {
        format!("{kind}-42|billing|invoices|invoice-42|{kind}|1|application/json|{payload}{attributes}|7|pending")
    };
    let sent = row("InvoiceSent", r#"{"invoice": 42}"#);
    assert_eq!(rows, format!("{sent} / {}", row("PaymentDue", r#"{"days": 14, "invoice": 42}"#)));
    assert_eq!(database.value("select bool_and(sent) and count(*) = 1 from invoices"), "t");
}

#[test]
fn examples_in_rust_run_without_the_relay() {
    let database = with_invoices();
    assert_eq!(example(&database, "beside_a_business_update", &["42"]), INSERTED);
    assert_eq!(example(&database, "beside_a_business_update", &["42"]), AGAIN);
    assert_wrote_the_two_messages(&database, "");

    let database = fresh_database(Table::Lean);
    assert!(example(&database, "stand_alone", &[]).ends_with(" inserted\n"));
    let due =
        database.value("select next_attempt_at > now() from keiro.keiro_outbox where message_id like 'reminder\\_%'");
    assert_eq!(due, "t");

    let database = fresh_database(Table::Lean);
    database.execute(
        r#"create table events (position bigint primary key, event_id uuid not null, kind text not null, data bytea not null,
             recorded_at timestamptz not null default now());
           create table checkpoints (name text primary key, position bigint not null);
           insert into checkpoints values ('billing-to-world', 0);
           insert into events (position, event_id, kind, data) values
             (1, gen_random_uuid(), 'paid', '{"invoice": 1, "cents": 5}'), (2, gen_random_uuid(), 'paid', '{"invoice": 2, "cents": 0}'),
             (3, gen_random_uuid(), 'paid', '{"invoice": 1, "cents": 7}')"#,
    );
    assert_eq!(example(&database, "integration_producer", &[]), "1 inserted\n2 skipped\n3 inserted\n");
    assert_eq!(example(&database, "integration_producer", &[]), "");
    database.execute("update checkpoints set position = 0");
    assert_eq!(example(&database, "integration_producer", &[]), "1 there\n2 skipped\n3 there\n");
}

fn fetched(path: &str) -> PathBuf {
    root().join("target/producers").join(path)
}

#[test]
fn example_in_python_runs_as_it_is_written() {
    let database = with_invoices();
    let run = || {
        let script = root().join("examples/producers/python/enqueue.py");
        printed(&database, Command::new(fetched("python/bin/python")).arg(script).arg("42"))
    };
    assert_eq!((run().as_str(), run().as_str()), (INSERTED, AGAIN));
    assert_wrote_the_two_messages(&database, r#"{"tenant": "blue"}"#);
}

#[test]
fn example_in_node_runs_as_it_is_written() {
    let database = with_invoices();
    // Beside its packages, which Node.js looks for beside the script.
    let script = fetched("node/enqueue.js");
    std::fs::copy(root().join("examples/producers/node/enqueue.js"), &script)
        .expect("`make languages` makes its place");
    let run = || printed(&database, Command::new("node").arg(&script).arg("42"));
    assert_eq!((run().as_str(), run().as_str()), (INSERTED, AGAIN));
    assert_wrote_the_two_messages(&database, r#"{"tenant": "blue"}"#);
}

#[test]
fn example_in_go_runs_as_it_is_written() {
    let database = with_invoices();
    let run = || {
        let directory = root().join("examples/producers/go");
        printed(&database, Command::new("go").args(["run", ".", "42"]).current_dir(directory))
    };
    assert_eq!((run().as_str(), run().as_str()), (INSERTED, AGAIN));
    assert_wrote_the_two_messages(&database, r#"{"tenant": "blue"}"#);
}

/// The SQL statements of a page, in their order.
fn statements(page: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(page)).expect("the page is there");
    let blocks = text.split("```sql\n").skip(1).map(|block| block.split("```").next().unwrap_or_default());
    blocks.flat_map(|block| block.split_inclusive(";\n").map(str::to_owned)).collect()
}

/// Runs a statement with parameters of its own and returns how many rows it wrote.
async fn execute(client: &Client, statement: &str) -> u64 {
    let prepared = client.prepare(statement).await.unwrap_or_else(|error| panic!("{error:?} in {statement}"));
    let (id, text, bytes) = (Uuid::now_v7(), Uuid::now_v7().to_string(), b"{}".to_vec());
    let value = |kind: &Type| match *kind {
        Type::UUID => &id as &(dyn ToSql + Sync),
        Type::BYTEA => &bytes,
        Type::TEXT => &text,
        ref other => panic!("a parameter of type {other} in {statement}"),
    };
    let params: Vec<_> = prepared.params().iter().map(value).collect();
    client.execute(&prepared, &params).await.unwrap_or_else(|error| panic!("{error:?} in {statement}"))
}

#[test]
fn sql_of_the_documentation_runs_as_it_is_written() {
    let database = fresh_database(Table::OlderShared);
    database.execute("do $$ begin create role app; exception when duplicate_object then null; end $$");
    run(async || {
        let client = database.connect().await;
        let pages = ["README.md", "docs/producers.md"].map(statements);
        assert!(pages.iter().all(|statements| !statements.is_empty()));
        for statement in pages.iter().flatten() {
            execute(&client, statement).await;
        }
        // What is granted there is enough for what is written there.
        client.batch_execute("set role app").await.expect("set role");
        assert_eq!(execute(&client, &pages[1][0]).await, 1);
    });
    database.execute("drop owned by app; drop role app");
    assert_eq!(database.value("select count(*) from keiro.keiro_outbox"), "3");
}
