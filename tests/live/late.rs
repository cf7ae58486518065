//! Rows that turn up where nobody looks any more: committed late, prepared, dated back, dated ahead, due later, made due again.

use std::time::{Duration, Instant};

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Database, Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{TopicReader, fresh_topic, read_topic};
use crate::support::{LONG, services, wait_until};

/// Well below the fifteen seconds after which the next full sweep finds everything, and well above a poll of 250 ms.
const POLLED: Duration = Duration::from_secs(10);
/// A full sweep of a small table comes every fifteen seconds.
const SWEPT: Duration = Duration::from_secs(30);

const POLICIES: &str = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                        [sources.free]\npolicy = \"best_effort\"\n";
const SOURCES: [&str; 4] = ["keyed", "stream", "line", "free"];

fn start(database: &Database) -> Daemon {
    let setup =
        Setup { database_url: database.url(), brokers: services::brokers(), sections: POLICIES, ..Setup::default() };
    let mut daemon = Daemon::start(&setup);
    daemon.wait_http_ok("/readyz", LONG);
    daemon
}

/// A row as a producer writes it: created_at is the start of its transaction.
fn insert(source: &str, id: &str, topic: &str) -> String {
    insert_with(source, id, topic, "created_at", "now()")
}

fn insert_with(source: &str, id: &str, topic: &str, column: &str, value: &str) -> String {
    format!(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, \
         content_type, payload_bytes, occurred_at, {column}) values (gen_random_uuid(), '{id}', '{source}', '{topic}', 'k', \
         'Happened', 1, 'application/json', '{{}}', now(), {value});\n"
    )
}

#[track_caller]
fn wait_sent(look: &mut Session, ids: &[String], bound: Duration) -> Duration {
    let list = ids.iter().map(|id| format!("'{id}'")).collect::<Vec<_>>().join(", ");
    let begin = Instant::now();
    wait_until(&format!("{list} to be sent"), bound, || {
        look.rows(&format!("status = 'sent' and message_id in ({list})")) == ids.len()
    });
    begin.elapsed()
}

#[test]
fn row_committed_behind_the_cursor_goes_out_within_a_poll() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let mut daemon = start(&database);
    let (mut one, mut other, mut look) = (Session::open(&database), Session::open(&database), Session::open(&database));
    for round in 0..3 {
        let ids = |which: &str| SOURCES.map(|source| format!("{source}-{which}{round}"));
        let rows = |which: &str| -> String {
            SOURCES.iter().map(|source| insert(source, &format!("{source}-{which}{round}"), &topic)).collect()
        };
        one.execute(&format!("begin; {}", rows("early")));
        other.execute(&format!("begin; {}; commit", rows("late")));
        wait_sent(&mut look, &ids("late"), LONG);
        assert_eq!(look.rows(&format!("message_id like '%early{round}'")), 0, "not committed yet");
        one.execute("commit");
        wait_sent(&mut look, &ids("early"), POLLED);
    }
    assert!(daemon.is_running());
    let expected: Vec<(String, String)> = (0..3)
        .flat_map(|round| {
            ["late", "early"].map(|which| SOURCES.map(|source| format!("{source}-{which}{round}"))).concat()
        })
        .map(|id| (id.split('-').next().expect("a source").to_owned(), id))
        .collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
}

#[test]
fn rows_of_a_long_transaction_are_found_among_fast_traffic() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(2, &[]);
    let mut daemon = start(&database);
    let (mut long, mut fast, mut look) = (Session::open(&database), Session::open(&database), Session::open(&database));
    let mut expected = Vec::new();
    let mut sent_fast = 0;
    let mut traffic = |fast: &mut Session, rows: usize| {
        for _ in 0..rows {
            for source in SOURCES {
                let id = format!("{source}-fast{sent_fast}");
                fast.execute(&insert(source, &id, &topic));
                let lane = if source == "free" { id.clone() } else { source.to_owned() };
                expected.push((lane, id));
            }
            sent_fast += 1;
        }
    };
    for round in 0..2 {
        let ids: Vec<String> =
            SOURCES.iter().flat_map(|source| (0..10).map(move |n| format!("{source}-long{round}-{n}"))).collect();
        let rows: String = ids.iter().map(|id| insert(id.split('-').next().expect("a source"), id, &topic)).collect();
        long.execute(&format!("begin; {rows}"));
        traffic(&mut fast, 100);
        long.execute("commit");
        let committed = Instant::now();
        traffic(&mut fast, 20);
        wait_sent(&mut look, &ids, POLLED);
        assert!(committed.elapsed() < 2 * POLLED, "late rows waited while others went out");
    }
    wait_until("everything to be sent", LONG, || look.rows("status <> 'sent'") == 0);
    assert!(daemon.is_running());
    let records = read_topic(&topic);
    let fast_ones: Vec<_> = records.iter().filter(|record| record.message_id().contains("fast")).cloned().collect();
    judge(&fast_ones, &expected).assert_delivered(0);
    assert_eq!(records.len(), expected.len() + 2 * 40);
}

#[test]
fn full_sweep_finds_what_no_cursor_covers() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let daemon = start(&database);
    let (mut producer, mut look) = (Session::open(&database), Session::open(&database));
    let ids = |which: &str| SOURCES.map(|source| format!("{source}-{which}")).to_vec();
    let rows = |which: &str, column: &str, value: &str| -> String {
        let row = |source: &&str| insert_with(source, &format!("{source}-{which}"), &topic, column, value);
        SOURCES.iter().map(row).collect()
    };
    let name = database.name();
    producer.execute(&format!("begin; {}; prepare transaction '{name}'", rows("prepared", "created_at", "now()")));
    // Keys with a future of their own, so that nothing waits behind the row dated back.
    producer.execute(&rows("ahead", "created_at", "now() + interval '400 days'"));
    wait_sent(&mut look, &ids("ahead"), LONG);
    // A cursor that ran ahead of all clocks hides nothing that is written now.
    for n in 0..3 {
        producer.execute(&rows(&format!("now{n}"), "created_at", "now()"));
        wait_sent(&mut look, &ids(&format!("now{n}")), POLLED);
    }
    let sweep = Instant::now();
    producer.execute(&format!("commit prepared '{name}'"));
    producer.execute(&rows("back", "created_at", "timestamptz '2001-01-01 00:00:00+00'"));
    // What operators do by hand.
    producer.execute(
        "update keiro.keiro_outbox set status = 'pending', attempt_count = 0, published_at = null, last_error = null, \
         next_attempt_at = now() where message_id like '%-now1'",
    );
    wait_sent(&mut look, &ids("prepared"), SWEPT);
    wait_sent(&mut look, &ids("back"), SWEPT);
    wait_sent(&mut look, &ids("now1"), SWEPT);
    assert!(sweep.elapsed() < SWEPT, "{:?}", sweep.elapsed());
    assert_eq!(look.statuses("true"), "sent=24");
    let mut reader = TopicReader::new(services::brokers(), &topic);
    assert_eq!(reader.catch_up().len(), 28, "each once, and again what was made due again");
    drop(daemon);
}

#[test]
fn row_that_is_due_later_goes_out_when_it_is_due_and_its_lane_waits() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let daemon = start(&database);
    let mut session = Session::open(&database);
    let mut feeds: Vec<Feed> = SOURCES
        .iter()
        .map(|source| Feed::new(source, &topic, if *source == "free" { Order::None } else { Order::Source }))
        .collect();
    // The first row of each source is due in two seconds, the second behind it at once.
    let mut statements = String::from("begin; ");
    for feed in &mut feeds {
        statements.push_str(&format!("{};", feed.statement(2, 1)));
        statements.push_str(&format!(
            "update keiro.keiro_outbox set next_attempt_at = clock_timestamp() + interval '2 s' where {};",
            feed.row(0)
        ));
    }
    session.execute(&format!("{statements} commit"));
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let early = "published_at < next_attempt_at or attempt_count <> 1";
    assert_eq!(session.rows(early), 0, "nothing goes out before it is due, or is tried");
    let waited = session.value(
        "select max(extract(epoch from published_at - next_attempt_at)) from keiro.keiro_outbox where message_id like '%-000000'",
    );
    assert!(waited.parse::<f64>().expect("seconds") < POLLED.as_secs_f64(), "waited {waited} s after it was due");
    // best_effort has no lane to wait for.
    let free = "message_id = 'free-000001' and published_at < (select f.next_attempt_at from keiro.keiro_outbox f where \
                f.message_id = 'free-000000')";
    assert_eq!(session.rows(free), 1);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    drop(daemon);
}
