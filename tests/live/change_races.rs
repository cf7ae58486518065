//! Operators' commands beside a relay and beside each other: they are noticed at once, and neither a row in flight nor order suffers.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use keiro_relay::domain::policy::{Policy, SourceRules};
use keiro_relay::store::{Changes, Due, Status, Store, Verb, Why};
use serde_json::json;
use uuid::Uuid;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::outbox::{self, Outbox, id, keyed, with};
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, run, services, wait_until};

use super::change::command;

const RETRY: Verb = Verb::Retry { keep_attempts: false, due: Due::In(Duration::ZERO), allow_reorder: false };

fn cancel() -> Verb {
    Verb::Cancel { reason: "race".to_owned() }
}

/// An operator's store: the rules of the tests' configuration, by the sources' names.
struct Operator {
    store: Store,
}

impl Operator {
    async fn on(url: &str) -> Self {
        let mut config = outbox::config(url);
        "operator".clone_into(&mut config.relay.instance);
        let store = Store::new(&config, 2).expect("a store");
        let shape = store.inspect().await.expect("a table");
        store.adopt(&shape);
        Self { store }
    }

    async fn change(&self, verb: &Verb, ids: &[Uuid]) -> Changes {
        let rules = |source: &str| SourceRules {
            policy: if source == "stream" { Policy::PerSourceStream } else { Policy::PerKeyHeadOfLine },
            ..keiro_relay::config::default_rules()
        };
        self.store.change(verb, ids, &rules, None, false).await.expect("a change")
    }
}

/// Rows far behind everything the relay has seen go out at once, again and again: no sweep could be that quick.
#[test]
fn changed_rows_are_picked_up_at_once_wherever_they_are() {
    let database = fresh_database(Table::Lean);
    let topic = fresh_topic(1, &[]);
    let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.free]\npolicy = \"best_effort\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    let sources = ["keyed", "stream", "free"];
    for source in sources {
        Feed::new(source, &topic, Order::Key).insert_in(&mut session, 500, 10);
    }
    let mut daemon = Daemon::start(&setup);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    daemon.wait_http_ok("/readyz", LONG);
    let started = Instant::now();
    for round in 0..3 {
        for source in sources {
            let outbox_id = session
                .value(&format!("select outbox_id from keiro.keiro_outbox where message_id = '{source}-00000{round}'"));
            session.execute(&format!(
                "update keiro.keiro_outbox set status = 'dead', published_at = null, next_attempt_at = '9999-12-31' where outbox_id = '{outbox_id}'"
            ));
            command(&database, sections, &["retry", &outbox_id, "--allow-reorder"], 0);
            wait_until("the row to be sent", LONG, || {
                session.rows(&format!("outbox_id = '{outbox_id}' and status = 'sent'")) == 1
            });
        }
    }
    // A sweep comes every fifteen seconds.
    assert!(started.elapsed() < Duration::from_secs(60), "nine rows took {:?}", started.elapsed());
    // What waits for a far time, and blocks its lane, is brought forward as quickly.
    session.execute("begin");
    let mut waiting = Feed::new("later", &topic, Order::Key);
    waiting.insert_in(&mut session, 3, 1);
    session.execute("update keiro.keiro_outbox set next_attempt_at = '2999-01-01' where source = 'later' and message_id = 'later-000000'; commit");
    wait_until("the relay to know of it", LONG, || daemon.json("/status").to_string().contains("later"));
    command(&database, sections, &["reschedule", "--source", "later", "--not-due", "--in", "0s"], 0);
    wait_until("the lane to be sent", LONG, || session.rows("source = 'later' and status = 'sent'") == 3);
    judge(&read_topic(&topic), waiting.expected());
}

/// Two operators cancel and retry rows of every lane while a relay claims them. Whatever the outcome of each command, no row in flight is
/// touched, nothing is sent twice, and what goes out goes out in order.
#[test]
fn commands_beside_a_relay_touch_nothing_in_flight_and_break_no_order() {
    for table in [Table::NewerShared, Table::Lean] {
        meddle(table);
    }
}

fn meddle(table: Table) {
    let database: Database = fresh_database(table);
    let (topic, stream_topic) = (fresh_topic(3, &[]), fresh_topic(1, &[]));
    // Small claims, so that there are many of them.
    let sections = "[relay]\nbatch_rows_max = 20\n\n[sources.stream]\npolicy = \"per_source_stream\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    session.execute(
        "create table touched (status text);
         create function touch() returns trigger language plpgsql as $$ begin
           if current_setting('application_name') like 'keiro-relay/operator/%' and old.status in ('publishing', 'sent') then
             insert into touched values (old.status); end if; return new; end $$;
         create trigger touch before update on keiro.keiro_outbox for each row execute function touch()",
    );
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    let mut stream = Feed::new("stream", &stream_topic, Order::Source);
    feed.insert_in(&mut session, 4000, 30);
    stream.insert_in(&mut session, 1500, 5);
    let daemon = Daemon::start(&setup);
    let url = database.url();
    let counts: Vec<(usize, usize, usize)> = std::thread::scope(|scope| {
        let operators: Vec<_> = (0..2).map(|_| scope.spawn(|| run(async || operate(url).await))).collect();
        operators.into_iter().map(|operator| operator.join().expect("an operator")).collect()
    });
    wait_until("every row to have its verdict", Duration::from_secs(180), || {
        session.rows("status in ('sent', 'rejected')") == feed.written + stream.written
    });
    println!("{table:?}: cancelled, retried, refused for order: {counts:?}");
    assert!(counts.iter().all(|(cancelled, retried, refused)| *cancelled > 0 && *retried > 0 && *refused > 0));
    assert_eq!(session.count("select count(*) from touched"), 0, "rows in flight or sent were changed");
    let rejected: BTreeSet<String> =
        session.values("select message_id from keiro.keiro_outbox where status = 'rejected'").into_iter().collect();
    let expected: Vec<(String, String)> =
        [feed.expected(), stream.expected()].concat().into_iter().filter(|(_, id)| !rejected.contains(id)).collect();
    judge(&[read_topic(&topic), read_topic(&stream_topic)].concat(), &expected).assert_delivered(0);
    drop(daemon);
}

/// Cancels what waits and retries what was cancelled; how many rows were cancelled, retried, refused for order.
async fn operate(url: &str) -> (usize, usize, usize) {
    let operator = Operator::on(url).await;
    let client = crate::support::database::connect(url).await;
    let ids = async |query: &str| -> Vec<Uuid> {
        client.query(query, &[]).await.expect(query).iter().map(|row| row.get(0)).collect()
    };
    // Near the front, where the relay claims, and rows in flight, which must be refused.
    let waiting = "select outbox_id from (select outbox_id from keiro.keiro_outbox where status in ('pending', 'failed', 'publishing') \
                   order by created_at limit 100) w order by random() limit 5";
    let given_up = "select outbox_id from keiro.keiro_outbox where status = 'rejected' order by random() limit 5";
    /// Enough to meet the relay everywhere; each makes the front of a lane wait for a moment.
    const ROUNDS: usize = 100;
    let (mut cancelled, mut retried, mut refused) = (0, 0, 0);
    for _ in 0..ROUNDS {
        let changes = operator.change(&cancel(), &ids(waiting).await).await;
        cancelled += changes.changed.len();
        let at_once = operator.change(&RETRY, &changes.changed).await;
        let later = operator.change(&RETRY, &ids(given_up).await).await;
        for changes in [at_once, later] {
            retried += changes.changed.len();
            refused += changes.unchanged.iter().filter(|row| row.why.is_order()).count();
        }
    }
    (cancelled, retried, refused)
}

/// Every row is changed by exactly one of them.
#[test]
fn two_operators_at_once_share_the_rows() {
    for table in Table::ALL {
        let rows = 3000;
        let outbox = run(async || {
            let outbox = Outbox::fresh(table).await;
            let far = if table == Table::Lean { "9999-12-31" } else { "2026-01-01" };
            let dead = json!({ "status": "dead", "attempt_count": 9, "next_attempt_at": far });
            outbox
                .insert(&(1..=rows).map(|n| with(keyed(n, &format!("k{}", n % 50)), dead.clone())).collect::<Vec<_>>())
                .await;
            outbox
        });
        let changed: Vec<(u64, String)> = std::thread::scope(|scope| {
            let database = &outbox.database;
            let both: Vec<_> = (0..2)
                .map(|_| scope.spawn(move || command(database, "", &["retry", "--everything", "--json"], 0)))
                .collect();
            both.into_iter()
                .map(|done| {
                    let done = done.join().expect("a command");
                    let said: serde_json::Value = serde_json::from_str(&done.stdout).expect("one object");
                    (said["changed"].as_u64().expect("a count"), said.to_string())
                })
                .collect()
        });
        assert_eq!(changed.iter().map(|(changed, _)| changed).sum::<u64>(), rows, "{table:?}: {changed:?}");
        let mut session = Session::open(&outbox.database);
        assert_eq!(session.statuses("attempt_count = 0"), format!("pending={rows}"), "{table:?}");
    }
}

/// A claim that has read the table before a retry commits, and locks rows afterwards, sees the next row of the lane as not due.
#[test]
fn retry_keeps_the_next_row_of_its_lane_from_claims_that_do_not_see_it() {
    for table in Table::ALL {
        run(async || {
            let outbox = Outbox::fresh(table).await;
            let far = if table == Table::Lean { "9999-12-31" } else { "2026-01-01" };
            let dead = json!({ "status": "dead", "next_attempt_at": far });
            let held = json!({ "next_attempt_at": "2999-01-01" });
            outbox
                .insert(&[
                    with(keyed(1, "a"), dead.clone()),
                    keyed(2, "a"),
                    keyed(3, "a"),
                    keyed(4, "b"),
                    with(keyed(5, "c"), dead),
                    with(keyed(6, "c"), held),
                ])
                .await;
            let operator = Operator::on(outbox.database.url()).await;
            let changes = operator.change(&RETRY, &[id(1), id(5)]).await;
            assert_eq!((changes.changed, changes.unchanged), (vec![id(1), id(5)], vec![]), "{table:?}");
            let ahead = "select string_agg((extract(epoch from next_attempt_at - updated_at) > 0.5)::text, '-' order by outbox_id) from keiro.keiro_outbox";
            let ahead: String = outbox.client.query_one(ahead, &[]).await.expect(ahead).get(0);
            assert_eq!(ahead, "false-true-false-false-false-true", "{table:?}");
            let rows = outbox.rows().await;
            assert_eq!(rows[5].text.matches("2999-01-01").count(), 1, "{table:?}: what was due later stays so");
            // What is claimed meanwhile is left alone, and so is what it would be overtaken by.
            outbox
                .execute(
                    "update keiro.keiro_outbox set status = 'publishing', updated_at = now() where message_key = 'b'",
                )
                .await;
            let cancelled = operator.change(&cancel(), &[id(4)]).await;
            assert_eq!(cancelled.unchanged[0].why, Why::State(Status::Publishing));
        });
    }
}
