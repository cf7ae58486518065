//! `doctor`: a good set-up has nothing to complain about, each check fires when its cause is there, and its remedy, copied, mends it.

use std::collections::BTreeMap;

use keiro_relay::cli::demo::services::{KafkaOptions, Postgres};
use rdkafka::mocking::MockCluster;
use rdkafka::types::RDKafkaApiKey;
use serde_json::Value;

use crate::support::acls;
use crate::support::daemon::{Daemon, Finished, Setup, run_command};
use crate::support::database::{Database, Table, fresh_database, fresh_database_on};
use crate::support::services::{own_kafka, own_postgres};
use crate::support::session::Session;
use crate::support::topics::{Admin, fresh_topic};
use crate::support::{LONG, services, unique, wait_until};

/// What `doctor --json` said, by check and subject.
struct Said {
    finished: Finished,
    checks: BTreeMap<(String, String), Value>,
}

#[track_caller]
fn doctor(setup: &Setup<'_>) -> Said {
    let finished = run_command(setup, &["doctor", "--json"], "");
    let mut checks = BTreeMap::new();
    for line in finished.stdout.lines() {
        let check: Value = serde_json::from_str(line).expect("an object a line");
        let key = (text(&check, "check").to_owned(), text(&check, "subject").to_owned());
        assert!(checks.insert(key, check).is_none(), "twice: {line}");
    }
    assert!(!checks.is_empty(), "{finished:?}");
    Said { finished, checks }
}

fn text<'a>(check: &'a Value, name: &str) -> &'a str {
    check[name].as_str().unwrap_or_default()
}

impl Said {
    #[track_caller]
    fn check(&self, name: &str, subject: &str) -> &Value {
        let found = self.checks.get(&(name.to_owned(), subject.to_owned()));
        found.unwrap_or_else(|| panic!("no {name} {subject:?} in {:#?}\n{}", self.checks.keys(), self.finished.stderr))
    }

    /// The check must have this verdict, and this in its reason or remedy.
    #[track_caller]
    fn expect(&self, name: &str, subject: &str, verdict: &str, says: &str) -> &Value {
        let check = self.check(name, subject);
        assert_eq!(text(check, "verdict"), verdict, "{check:#}");
        let (reason, remedy) = (text(check, "reason"), text(check, "remedy"));
        assert!(reason.contains(says) || remedy.contains(says), "{says:?} is not in {check:#}");
        // What cannot be found out may say what would help, too.
        assert!(verdict == "unknown" || matches!(verdict, "warn" | "fail") == !remedy.is_empty(), "{check:#}");
        check
    }

    /// Everything that is not ok, `check subject verdict`.
    fn complaints(&self) -> Vec<String> {
        let not_ok = self.checks.values().filter(|check| text(check, "verdict") != "ok");
        not_ok
            .map(|check| format!("{} {} {}", text(check, "check"), text(check, "subject"), text(check, "verdict")))
            .collect()
    }

    #[track_caller]
    fn exits(&self, code: i32) {
        assert_eq!(self.finished.status.code(), Some(code), "{:#?}\n{}", self.complaints(), self.finished.stderr);
    }
}

/// Runs a remedy line by line: some statements refuse to be in a transaction with others.
fn apply(session: &mut Session, remedy: &str) {
    for line in remedy.lines() {
        session.execute(line);
    }
}

/// A row with these columns beside those that are needed.
fn row(source: &str, topic: &str, columns: &str, values: &str) -> String {
    format!(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, content_type, \
           payload_bytes, occurred_at{columns}) \
         values (gen_random_uuid(), gen_random_uuid(), '{source}', '{topic}', 'E', 1, 'text/plain', 'x', now(){values});"
    )
}

fn on_shared_kafka(database: &Database) -> Setup<'_> {
    Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() }
}

fn postgres_that_keeps() -> Postgres {
    own_postgres(&[("fsync", "on"), ("full_page_writes", "on"), ("wal_level", "logical")])
}

#[test]
fn doctor_has_nothing_to_complain_about_a_good_setup_and_sees_brokers_go() {
    let postgres = postgres_that_keeps();
    let kafka = own_kafka(KafkaOptions {
        brokers: 3,
        // So that a broker that does not answer stays listed while we look.
        properties: &[("broker.session.timeout.ms", "60000"), ("broker.heartbeat.interval.ms", "2000")],
        heap_megabytes_max: 320,
        ..KafkaOptions::default()
    });
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    admin.create_replicated("invoices", 3, 3, &[("min.insync.replicas", "2")]);
    for profile in ["lean", "shared"] {
        let database = fresh_database_on(&postgres.url("postgres"), Table::None);
        let setup = Setup { database_url: database.url(), brokers: &brokers, ..Setup::default() };
        assert!(run_command(&setup, &["migrate", "--profile", profile], "").status.success());
        let empty = doctor(&setup);
        assert_eq!(empty.complaints(), Vec::<String>::new());
        empty.exits(0);

        let mut relay = Daemon::start(&setup);
        relay.wait_http_ok("/readyz", LONG);
        database.execute(&row("billing", "invoices", ", message_key", ", 'k'").repeat(10));
        wait_until("the rows to be sent", LONG, || {
            database.value("select count(*) from keiro.keiro_outbox where status = 'sent'") == "10"
        });
        let good = doctor(&setup);
        assert_eq!(good.complaints(), Vec::<String>::new());
        good.exits(0);
        good.expect("topic.exists", "invoices", "ok", "");
        good.expect("topic.min_insync_replicas", "invoices", "ok", "2 of 3");
        good.expect("brokers.version", "", "ok", "Kafka 4");
        good.expect("table.profile", "", "ok", profile);
        let people = run_command(&setup, &["doctor"], "");
        assert!(people.stdout.ends_with(" ok, 0 warn, 0 fail, 0 unknown\n"), "{people:?}");
        let problems = run_command(&setup, &["doctor", "--problems"], "");
        assert_eq!(problems.stdout.lines().count(), 1, "{problems:?}");
    }

    let database = fresh_database_on(&postgres.url("postgres"), Table::Lean);
    database.execute(&row("billing", "invoices", "", ""));
    let setup = Setup { database_url: database.url(), brokers: &brokers, ..Setup::default() };
    kafka.pause_broker(2).expect("paused");
    let paused = doctor(&setup);
    let address = brokers.split(',').nth(1).expect("three brokers");
    paused.expect("brokers.listeners", &format!("2 {address}"), "fail", "advertised.listeners");
    paused.exits(1);
    kafka.resume_broker(2).expect("resumed");
    wait_until("every copy to be in sync again", LONG, || {
        text(doctor(&setup).check("topic.min_insync_replicas", "invoices"), "verdict") == "ok"
    });
    admin.create_assigned("lonely", &[&[3]], &[]);
    database.execute(&row("billing", "lonely", "", ""));
    kafka.stop_broker(3).expect("stopped");
    wait_until("the third copy to be out of sync", LONG, || {
        text(doctor(&setup).check("topic.min_insync_replicas", "invoices"), "verdict") == "warn"
    });
    doctor(&setup).expect("topic.min_insync_replicas", "invoices", "warn", "2 of 3 copies in sync");
    // A topic on the broker that is gone has no leader.
    wait_until("the leader to be gone", LONG, || {
        text(doctor(&setup).check("topic.partitions", "lonely"), "verdict") == "fail"
    });
    doctor(&setup).exits(1);
}

#[test]
fn doctor_names_what_is_wrong_with_a_table_and_its_remedies_mend_it() {
    let topic = fresh_topic(1, &[]);
    let pending = |columns: &str, values: &str| row("billing", &topic, columns, values);
    // On one table together: what makes it so, the check, its verdict, a text, whether its remedy mends it.
    let shared: Vec<(String, &str, &str, &str, bool)> = vec![
        // First: it makes every index anew.
        ("alter table keiro.keiro_outbox set unlogged;".to_owned(), "durability.table", "warn", "set logged", true),
        (
            "drop index keiro.keiro_outbox_pending_idx;".to_owned(),
            "table.index.pending_idx",
            "warn",
            "create index concurrently",
            true,
        ),
        (
            "drop index keiro.keiro_outbox_head_of_line_idx;".to_owned(),
            "table.index.head_of_line_idx",
            "warn",
            "every claim of a key",
            true,
        ),
        (
            "drop index keiro.keiro_outbox_source_order_idx;".to_owned(),
            "table.index.source_order_idx",
            "warn",
            "reads the whole table",
            true,
        ),
        ("drop index keiro.keiro_outbox_sent_gc_idx;".to_owned(), "table.index.sent_gc_idx", "warn", "retention", true),
        (
            "update pg_index set indisvalid = false where indexrelid = 'keiro.keiro_outbox_claim_order_idx'::regclass;"
                .to_owned(),
            "table.index.claim_order_idx",
            "warn",
            "drop index concurrently",
            true,
        ),
        (
            "alter table keiro.keiro_outbox drop constraint keiro_outbox_source_message_id_key;".to_owned(),
            "table.index.message_id_key",
            "warn",
            "create unique index concurrently",
            true,
        ),
        (
            "alter table keiro.keiro_outbox set (autovacuum_enabled = false);".to_owned(),
            "table.autovacuum",
            "warn",
            "reset (autovacuum_enabled)",
            true,
        ),
        (
            "alter table keiro.keiro_outbox add constraint later check (attempt_count >= 0) not valid;".to_owned(),
            "table.constraints",
            "warn",
            "validate constraint \"later\"",
            true,
        ),
        (pending(", status", ", E'it''s\\\\odd\\n'"), "rows.unknown_status", "fail", "E'it''s\\\\odd\\u000a'", true),
        (pending(", published_at", ", now()"), "rows.published_at", "warn", "although they were not sent", true),
        (pending(", next_attempt_at", ", 'infinity'"), "rows.never_due", "fail", "due at infinity", true),
        (
            pending(", status, next_attempt_at", ", 'failed', '9000-01-01 00:00:00+00'"),
            "rows.held",
            "fail",
            "resume billing",
            false,
        ),
        (
            pending(", status, updated_at", ", 'publishing', now() - interval '1 hour'"),
            "rows.expired_leases",
            "warn",
            "their relay died",
            false,
        ),
        (String::new(), "relays.running", "warn", "rows are due", false),
        (String::new(), "table.side_schema", "warn", "keiro-relay migrate", false),
    ];
    let lean: Vec<(String, &str, &str, &str, bool)> = vec![
        (
            "drop index keiro.keiro_relay_keiro_outbox_key_order_idx;".to_owned(),
            "table.index.key_order_idx",
            "warn",
            "every claim of a key",
            true,
        ),
        (
            "drop index keiro.keiro_relay_keiro_outbox_sent_idx;".to_owned(),
            "table.index.sent_idx",
            "warn",
            "retention",
            true,
        ),
        (
            "drop index keiro.keiro_relay_keiro_outbox_far_idx;".to_owned(),
            "table.index.far_idx",
            "warn",
            "dead and rejected",
            true,
        ),
        (
            "create index by_status on keiro.keiro_outbox (source) where status = 'pending';".to_owned(),
            "table.hot_updates",
            "warn",
            "by_status",
            true,
        ),
        (pending(", status", ", 'dead'"), "rows.finished_in_live_index", "warn", "another program", true),
        (
            pending(", next_attempt_at", ", now() + interval '30 days'"),
            "rows.never_due",
            "warn",
            "more than a week",
            true,
        ),
    ];
    for (table, cases) in [(Table::NewerShared, shared), (Table::Lean, lean)] {
        let database = fresh_database(table);
        let setup = on_shared_kafka(&database);
        let before = doctor(&setup);
        for (provoke, check, ..) in &cases {
            if check.starts_with("table.side") {
                continue;
            }
            assert_eq!(text(before.check(check, ""), "verdict"), "ok", "{check} before {provoke}");
            database.execute(provoke);
        }
        let ill = doctor(&setup);
        let mut session = Session::open(&database);
        for (_, check, verdict, says, mends) in &cases {
            let said = ill.expect(check, "", verdict, says);
            if *mends {
                apply(&mut session, text(said, "remedy"));
            }
        }
        ill.exits(i32::from(cases.iter().any(|case| case.2 == "fail")));
        let well = doctor(&setup);
        for (_, check, ..) in cases.iter().filter(|case| case.4) {
            well.expect(check, "", "ok", "");
        }
    }

    // What shows only when the other is mended.
    let database = fresh_database(Table::NewerShared);
    database.execute(&pending(", status, published_at", ", 'sent', null"));
    let setup = on_shared_kafka(&database);
    let said = doctor(&setup);
    apply(&mut Session::open(&database), text(said.expect("rows.published_at", "", "warn", "never deletes"), "remedy"));
    doctor(&setup).expect("rows.published_at", "", "ok", "");
    let database = fresh_database(Table::Lean);
    database.execute("alter table keiro.keiro_outbox reset (fillfactor)");
    let setup = on_shared_kafka(&database);
    let said = doctor(&setup);
    apply(
        &mut Session::open(&database),
        text(said.expect("table.hot_updates", "", "warn", "fillfactor 100"), "remedy"),
    );
    doctor(&setup).expect("table.hot_updates", "", "ok", "");
}

#[test]
fn doctor_finds_a_table_that_is_not_the_contracts() {
    let database = fresh_database(Table::None);
    let setup = on_shared_kafka(&database);
    let said = doctor(&setup);
    said.expect("table.exists", "", "fail", "keiro-relay migrate");
    said.expect("rows.unknown_status", "", "unknown", "no table");
    said.exits(1);

    let database = fresh_database(Table::NewerShared);
    database.execute(
        "alter table keiro.keiro_outbox drop column tracestate, alter column schema_version type int, \
           alter column event_type drop not null, drop constraint keiro_outbox_pkey",
    );
    let setup = on_shared_kafka(&database);
    let said = doctor(&setup);
    said.exits(1);
    let columns = said.expect("table.columns", "", "fail", "primary key");
    apply(&mut Session::open(&database), text(columns, "remedy"));
    let said = doctor(&setup);
    said.expect("table.columns", "", "ok", "");
    said.exits(0);
}

/// The server's own views and functions, hidden behind others of the same name: what a test cannot have otherwise (old transactions, other
/// versions, a standby, another clock, a pooler).
const FAKES: &str = "
    create schema fake;
    create function fake.clock_timestamp() returns timestamptz language sql as $$ select pg_catalog.clock_timestamp() + interval '1 hour' $$;
    create function fake.pg_backend_pid() returns int language sql as $$ select 1000000 + (random() * 1000000000)::int $$;
    create function fake.pg_is_in_recovery() returns boolean language sql as $$ select true $$;
    create view fake.pg_replication_slots as select 'old slot'::name as slot_name, false as active, '3'::xid as xmin;
    create view fake.pg_stat_all_tables as
      select relid, n_live_tup, 5000000::bigint as n_dead_tup, n_tup_upd, n_tup_hot_upd, n_tup_del, last_vacuum, last_autovacuum
      from pg_catalog.pg_stat_all_tables;
    create view fake.pg_settings as
      select name, case name when 'server_version_num' then '130004' when 'server_encoding' then 'SQL_ASCII' when 'fsync' then 'off'
        when 'full_page_writes' then 'off' when 'synchronous_commit' then 'off' else reset_val end as reset_val
      from pg_catalog.pg_settings;
    grant usage on schema fake to public;";

#[test]
fn doctor_sees_what_a_server_does_to_rows() {
    let database = fresh_database(Table::NewerShared);
    let setup = Setup { sections: "[relay]\npublishing_timeout = \"10m\"\n", ..on_shared_kafka(&database) };
    let before = doctor(&setup);
    database.execute(FAKES);
    let mut open = Session::open(&database);
    open.execute("begin isolation level repeatable read; select count(*) from keiro.keiro_outbox");
    let gid = format!("it's {}", unique("gid"));
    let mut prepares = Session::open(&database);
    prepares.execute(&format!("begin; create table prepared (); prepare transaction '{}'", gid.replace('\'', "''")));
    // Another relay, with other policies.
    let mut other = Session::open(&database);
    other.execute("set application_name = 'keiro-relay/host/with/slashes/deadbeef'");
    database.execute("update pg_class set reltuples = 1e7 where oid = 'keiro.keiro_outbox'::regclass");
    let name = database.name().to_owned();
    let mut admin = Session::open_url(services::database_url());
    admin.execute(&format!("alter database {name} set search_path = fake, pg_catalog, public"));
    let said = doctor(&setup);
    for (check, verdict, says) in [
        ("database.version", "fail", "PostgreSQL 13.4"),
        ("database.encoding", "fail", "SQL_ASCII"),
        ("database.primary", "fail", "standby"),
        ("database.pooler", "warn", "prepared_statements = false"),
        ("database.clock", "warn", "-3600"),
        ("database.oldest_transaction", "warn", "pg_terminate_backend("),
        ("database.prepared_transactions", "warn", "commit prepared 'it''s "),
        ("database.replication_slots", "warn", "pg_drop_replication_slot('old slot')"),
        ("durability.fsync", "warn", "alter system set fsync = on"),
        ("durability.full_page_writes", "warn", "torn pages"),
        ("durability.synchronous_commit", "warn", "synchronous_commit = on"),
        ("table.autovacuum", "warn", "autovacuum_vacuum_scale_factor = 0.01"),
        ("table.dead_rows", "warn", "vacuum (verbose, analyze)"),
        ("relays.policies", "warn", "host/with/slashes (deadbeef)"),
        ("relays.publishing_timeout", "warn", "publishing_timeout = \"5m\""),
    ] {
        if check != "relays.publishing_timeout" && !check.starts_with("durability") {
            assert_eq!(text(before.check(check, ""), "verdict"), "ok", "{check}");
        }
        said.expect(check, "", verdict, says);
    }
    said.exits(1);
    let pid = open.value("select pg_catalog.pg_backend_pid()");
    said.expect("database.oldest_transaction", "", "warn", &format!("pg_terminate_backend({pid})"));
    admin.execute(&format!("alter database {name} reset search_path"));
    prepares.execute(&format!("rollback prepared '{}'", gid.replace('\'', "''")));

    // Behind a pooler the setting is right, and a database whose transactions are read-only claims nothing.
    admin.execute(&format!("alter database {name} set default_transaction_read_only = on"));
    let pooled = Setup { database: "prepared_statements = false", ..setup };
    let said = doctor(&pooled);
    said.expect("database.primary", "", "fail", "read-only");
    said.expect("database.pooler", "", "ok", "no pooler");
    admin.execute(&format!("alter database {name} reset default_transaction_read_only"));
}

#[test]
fn doctor_asks_for_each_permission_that_is_missing() {
    let database = fresh_database(Table::NewerShared);
    let role = unique("role");
    let mut admin = Session::open(&database);
    admin.execute(&format!("create role {role} login"));
    admin.execute(
        "alter table keiro.keiro_outbox enable row level security; create policy all_rows on keiro.keiro_outbox using (true)",
    );
    let host = database.url().split_once('@').expect("a user in the URL").1;
    let url = format!("postgres://{role}@{host}");
    let setup = Setup {
        database_url: &url,
        brokers: services::brokers(),
        sections: "[maintenance]\nretention = \"7d\"\n",
        ..Setup::default()
    };
    let mut asked = Vec::new();
    // Some show only once others are mended.
    for _ in 0..4 {
        let said = doctor(&setup);
        let missing: Vec<&Value> = said
            .checks
            .values()
            .filter(|check| {
                text(check, "check").starts_with("permission.") && !matches!(text(check, "verdict"), "ok" | "unknown")
            })
            .collect();
        for check in &missing {
            asked.push(format!("{} {}", text(check, "check"), text(check, "verdict")));
            admin.execute(text(check, "remedy"));
        }
    }
    asked.sort_unstable();
    assert_eq!(
        asked,
        [
            "permission.delete warn",
            "permission.read_all_stats warn",
            "permission.row_security fail",
            "permission.schema fail",
            "permission.select fail",
            "permission.update fail"
        ]
    );
    let said = doctor(&setup);
    said.expect("permission.insert", "", "ok", "not granted, and the relay does not need it");
    said.exits(0);
    drop(said);
    admin.execute(&format!("drop owned by {role}; drop role {role}"));
}

#[test]
fn doctor_knows_which_sources_have_no_policy() {
    let database = fresh_database(Table::Lean);
    let topic = fresh_topic(1, &[]);
    database.execute(&row("billing", &topic, "", ""));
    for (sections, verdict, says) in [
        ("", "ok", "served by [defaults]"),
        ("[sources.billing]\npolicy = \"best_effort\"\n", "ok", "has a section"),
        ("[sources.Billing]\npolicy = \"best_effort\"\n", "warn", "misspelt"),
        ("[relay]\nunlisted_sources = \"ignore\"\n", "warn", "[sources.\"billing\"]"),
    ] {
        let setup = Setup { sections, ..on_shared_kafka(&database) };
        doctor(&setup).expect("sources.policy", "", verdict, says);
    }
}

#[test]
fn doctor_judges_each_topic_in_use() {
    let database = fresh_database(Table::NewerShared);
    let fine = fresh_topic(2, &[]);
    let small = fresh_topic(1, &[("max.message.bytes", "2000")]);
    let compacted = fresh_topic(1, &[("cleanup.policy", "compact")]);
    let strict = fresh_topic(1, &[("min.insync.replicas", "2")]);
    let absent = unique("absent");
    for topic in [&fine, &compacted, &strict, &absent, &"no such/topic".to_owned()] {
        database.execute(&row("billing", topic, "", ""));
    }
    database.execute(&row("billing", &small, ", message_key", ", repeat('k', 3000)"));
    let setup = on_shared_kafka(&database);
    let said = doctor(&setup);
    let broker = services::brokers();
    for (check, topic, verdict, says) in [
        ("topic.exists", &fine, "ok", ""),
        ("topic.write", &fine, "ok", ""),
        ("topic.partitions", &fine, "ok", "2, each with a leader"),
        ("topic.max_message_bytes", &fine, "ok", "1048588"),
        ("topic.compaction", &fine, "ok", "delete"),
        ("topic.replication", &fine, "warn", "one copy"),
        ("topic.min_insync_replicas", &fine, "warn", "min.insync.replicas=2"),
        ("topic.max_message_bytes", &small, "warn", "kafka.message_too_large"),
        ("topic.compaction", &compacted, "warn", "takes no record without a key"),
        ("topic.min_insync_replicas", &strict, "fail", "takes nothing"),
        (
            "topic.exists",
            &absent,
            "fail",
            &format!("kafka-topics.sh --bootstrap-server {broker} --create --topic {absent}"),
        ),
        ("topic.exists", &"no such/topic".to_owned(), "warn", "kafka.invalid_topic"),
    ] {
        said.expect(check, topic, verdict, says);
    }
    said.exits(1);
    assert!(Admin::new(broker).partitions(&absent).is_none(), "looking created the topic");

    let limited = Setup { kafka: "message_bytes_max = \"64KiB\"", ..setup };
    doctor(&limited).expect("topic.max_message_bytes", &fine, "warn", "[kafka] message_bytes_max");
}

#[test]
fn doctor_knows_what_it_may_not_do_to_a_topic() {
    const LOGIN: &str =
        "org.apache.kafka.common.security.plain.PlainLoginModule required user_relay=\"right-but-secret\";";
    let kafka = own_kafka(KafkaOptions {
        listeners: &[("LOGIN", "SASL_PLAINTEXT")],
        properties: &[
            ("listener.name.login.sasl.enabled.mechanisms", "PLAIN"),
            ("listener.name.login.plain.sasl.jaas.config", LOGIN),
            ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
            ("super.users", "User:ANONYMOUS"),
            ("auto.create.topics.enable", "true"),
        ],
        ..KafkaOptions::default()
    });
    let admin = Admin::new(&kafka.bootstrap());
    let database = fresh_database(Table::Lean);
    for topic in ["open", "read-only", "hidden"] {
        admin.create(topic, 1, &[]);
        database.execute(&row("billing", topic, "", ""));
    }
    acls::allow(&kafka.bootstrap(), "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE, "open");
    acls::allow(&kafka.bootstrap(), "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE_CONFIGS, "open");
    acls::allow(&kafka.bootstrap(), "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE, "read-only");
    let login = |password: &str| {
        format!(
            "[kafka.properties]\n\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanism\" = \"PLAIN\"\n\"sasl.username\" = \
             \"relay\"\n\"sasl.password\" = \"{password}\"\n"
        )
    };
    let (brokers, right, wrong) = (kafka.bootstrap_of("LOGIN"), login("right-but-secret"), login("wrong-but-secret"));
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &right, ..Setup::default() };
    let said = doctor(&setup);
    for (check, topic, verdict, says) in [
        ("topic.write", "open", "ok", ""),
        ("topic.compaction", "open", "ok", ""),
        ("topic.write", "read-only", "fail", "--operation Write"),
        ("topic.compaction", "read-only", "unknown", "we may not see it"),
        ("topic.write", "hidden", "fail", "--topic hidden"),
    ] {
        said.expect(check, topic, verdict, says);
    }
    said.exits(1);
    said.expect("brokers.reachable", "", "ok", "");
    said.expect("brokers.version", "", "ok", "Kafka 4");

    let said = doctor(&Setup { sections: &wrong, ..setup });
    said.expect("brokers.reachable", "", "fail", "kafka.authentication_failed");
    said.expect("topic.exists", "", "unknown", "no broker answers");
    said.expect("permission.update", "", "ok", "");
    assert!(!format!("{:?}", said.finished).contains("but-secret"), "{:?}", said.finished);

    // As a user who may see the brokers' settings: the topic would be made by the first record, and looking does not make it.
    database.execute(&row("billing", "not-yet", "", ""));
    let plain = kafka.bootstrap();
    let said = doctor(&Setup { brokers: &plain, sections: "", ..setup });
    said.expect("topic.exists", "not-yet", "warn", "auto.create.topics.enable");
    let metadata = run_command(&Setup { brokers: &plain, sections: "", ..setup }, &["doctor", "--json"], "");
    assert!(metadata.stdout.contains("\"subject\":\"not-yet\",\"verdict\":\"warn\""), "{metadata:?}");
}

#[test]
fn doctor_warns_of_brokers_older_than_what_was_tested() {
    let cluster = MockCluster::new(1).expect("a mock cluster");
    cluster.apiversion(RDKafkaApiKey::Fetch, Some(0), Some(11)).expect("a version");
    let database = fresh_database(Table::Lean);
    let brokers = cluster.bootstrap_servers();
    let said = doctor(&Setup { database_url: database.url(), brokers: &brokers, ..Setup::default() });
    said.expect("brokers.reachable", "", "ok", "");
    said.expect("brokers.version", "", "warn", "older than Kafka 2.7");
}

#[test]
fn doctor_looks_at_one_side_when_the_other_does_not_answer() {
    let database = fresh_database(Table::Lean);
    let said = doctor(&Setup { database_url: "postgres://postgres@127.0.0.1:1/x", ..on_shared_kafka(&database) });
    said.expect("database.connect", "", "fail", "127.0.0.1:1");
    said.expect("table.exists", "", "unknown", "does not answer");
    said.expect("brokers.reachable", "", "ok", "");
    said.exits(1);
    let said = doctor(&Setup { brokers: "127.0.0.1:1", ..on_shared_kafka(&database) });
    said.expect("brokers.reachable", "", "fail", "kafka.unreachable");
    said.expect("table.exists", "", "ok", "");
    said.exits(1);
    let bad =
        run_command(&Setup { sections: "[relay]\nnonsense = 1\n", ..on_shared_kafka(&database) }, &["doctor"], "");
    assert_eq!(bad.status.code(), Some(78), "{bad:?}");
}
