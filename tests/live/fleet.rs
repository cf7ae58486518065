//! Several relays on one table.

use std::time::Duration;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::mock::Mock;
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, services, unique, wait_until};

const POLICIES: &str = "[relay]\nbatch_rows_max = 40\n\n[sources.stream]\npolicy = \"per_source_stream\"\n\n\
                        [sources.line]\npolicy = \"stop_the_line\"\n\n[sources.free]\npolicy = \"best_effort\"\n";

/// Series of all relays together.
fn sum(daemons: &[Daemon], series: &str) -> f64 {
    daemons.iter().map(|daemon| daemon.metric(series).unwrap_or_default()).sum()
}

#[test]
fn relays_of_every_kind_share_a_table() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(2, &[]);
    // What administrators set for all: each statement of ours asks for read committed itself.
    let users = ["serializable", "repeatable read"].map(|isolation| {
        let user = unique("relay");
        database.execute(&format!(
            "create role {user} login; grant usage on schema keiro to {user}; grant select, update, delete on \
             keiro.keiro_outbox to {user}; alter role {user} set default_transaction_isolation = '{isolation}'"
        ));
        user
    });
    let [one, other] = users.map(|user| database.url().replace("postgres@", &format!("{user}@")));
    let plain = Setup { database_url: &one, brokers: services::brokers(), sections: POLICIES, ..Setup::default() };
    // Behind a pooler a relay has no session to hold locks on, so it claims beside whoever is preferred.
    let pooled = Setup { database: "prepared_statements = false", ..plain };
    let setups = [plain, Setup { database_url: &other, ..plain }, pooled, Setup { database_url: &other, ..pooled }];
    let mut session = Session::open(&database);
    let orders = [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)];
    let mut feeds: Vec<Feed> = orders.map(|(source, order)| Feed::new(source, &topic, order)).into();
    for feed in &mut feeds {
        feed.insert_in(&mut session, 300, 60);
    }
    let mut daemons: Vec<Daemon> = setups.iter().map(Daemon::start).collect();
    for _ in 0..10 {
        for feed in &mut feeds {
            feed.insert_in(&mut session, 10, 60);
        }
    }
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    // A verdict is counted a moment after it is written.
    for source in ["keyed", "stream", "line", "free"] {
        let series = format!("keiro_relay_rows_total{{outcome=\"sent\",source=\"{source}\"}}");
        wait_until("each row to be counted once", LONG, || sum(&daemons, &series) >= 400.0);
        assert_eq!(sum(&daemons, &series), 400.0);
    }
    assert_eq!(sum(&daemons, "keiro_relay_overtaken_total"), 0.0);
    for reason in ["conflict", "other"] {
        for stage in ["claim", "settle", "maintenance"] {
            let series = format!("keiro_relay_errors_total{{reason=\"{reason}\",stage=\"{stage}\"}}");
            assert_eq!(sum(&daemons, &series), 0.0, "{series}");
        }
    }
    for daemon in &mut daemons {
        daemon.wait_http_ok("/readyz", LONG);
        daemon.signal("TERM");
    }
    for mut daemon in daemons {
        assert_eq!(daemon.wait(LONG).code(), Some(0), "{}", daemon.stderr());
    }
}

#[test]
fn failing_row_is_not_tried_more_often_by_more_relays() {
    const MAX_ATTEMPTS: usize = 4;
    let topic = unique("topic");
    let mock = Mock::new(&[&topic]);
    let brokers = mock.bootstrap();
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    // When each claim was made.
    session.execute(
        "create table keiro.claims (at timestamptz not null default clock_timestamp()); \
         create function keiro.note() returns trigger language plpgsql as $$ begin insert into keiro.claims default values; return new; end $$; \
         create trigger note after update on keiro.keiro_outbox for each row \
         when (new.status = 'publishing' and old.status <> 'publishing') execute function keiro.note()",
    );
    mock.fail_next(1_000);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    feed.insert_in(&mut session, 1, 1);
    let sections = format!(
        "[defaults]\nmax_attempts = {MAX_ATTEMPTS}\n\n[defaults.backoff]\nkind = \"constant\"\ninitial = \"1500ms\"\njitter = 0.0\n"
    );
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections: &sections, ..Setup::default() };
    // Half of them as behind a pooler, so that they do not stand by.
    let pooled = Setup { database: "prepared_statements = false", ..setup };
    let daemons: Vec<Daemon> = [setup, pooled, setup, pooled].iter().map(Daemon::start).collect();
    wait_until("the row to be dead", LONG, || session.statuses("true") == "dead=1");
    let gaps = session.values(
        "select extract(epoch from at - lag(at) over (order by at)) >= 1.5 from keiro.claims order by at offset 1",
    );
    assert_eq!(
        gaps,
        vec!["t"; MAX_ATTEMPTS - 1],
        "every pause is the backoff's, and there are as many tries as it may have"
    );
    assert_eq!(session.value("select attempt_count from keiro.keiro_outbox"), MAX_ATTEMPTS.to_string());
    assert_eq!(sum(&daemons, "keiro_relay_rows_total{outcome=\"failed\",source=\"keyed\"}"), (MAX_ATTEMPTS - 1) as f64);
    assert_eq!(sum(&daemons, "keiro_relay_rows_total{outcome=\"dead\",source=\"keyed\"}"), 1.0);
}

#[test]
fn relay_that_dies_is_followed_by_the_one_that_stood_by() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feed = Feed::new("keyed", &topic, Order::Key);
    feed.insert_in(&mut session, 20, 5);
    let mut first = Daemon::start(&setup);
    wait_until("the first rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let mut second = Daemon::start(&setup);
    second.wait_http_ok("/readyz", LONG);
    let elsewhere = |daemon: &Daemon| daemon.json("/status")["sources"][0]["elsewhere"] == true;
    wait_until("the second to stand by", LONG, || elsewhere(&second));
    feed.insert_in(&mut session, 20, 5);
    wait_until("the next rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    assert_eq!(first.metric("keiro_relay_rows_total{outcome=\"sent\",source=\"keyed\"}"), Some(40.0));
    second.wait_http_ok("/readyz", LONG);

    first.kill();
    feed.insert_in(&mut session, 20, 5);
    let inserted = std::time::Instant::now();
    wait_until("the second to follow", LONG, || session.rows("status <> 'sent'") == 0);
    println!("followed {:?} after it died", inserted.elapsed());
    wait_until("it to say so", LONG, || !elsewhere(&second));
    assert_eq!(second.metric("keiro_relay_rows_total{outcome=\"sent\",source=\"keyed\"}"), Some(20.0));
    // From then on at once.
    for _ in 0..3 {
        feed.insert_in(&mut session, 5, 5);
        wait_until("its rows to be sent", Duration::from_secs(10), || session.rows("status <> 'sent'") == 0);
    }
    judge(&read_topic(&topic), feed.expected()).assert_delivered(0);
}
