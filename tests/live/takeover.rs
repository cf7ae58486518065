//! A relay that is preferred and does not work, its connections open: the one that stands by takes over, and nothing is sent twice.

use std::time::{Duration, Instant};

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::brokers;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, wait_until};

const SECTIONS: &str = "[relay]\npublish_timeout = \"3s\"\nsettle_timeout = \"500ms\"\npublishing_timeout = \"26s\"\n\n\
                        [sources.stream]\npolicy = \"per_source_stream\"\n\n[maintenance]\ninterval = \"1s\"\n";
/// Rows wait for 5 s before somebody helps, who looks every 2 s or so.
const HELPED: Duration = Duration::from_secs(20);

fn elsewhere(daemon: &Daemon) -> bool {
    let status = daemon.json("/status");
    let sources = status["sources"].as_array().expect("a list");
    !sources.is_empty() && sources.iter().all(|source| source["elsewhere"] == true)
}

fn sent(daemon: &Daemon, source: &str) -> Option<f64> {
    daemon.metric(&format!("keiro_relay_rows_total{{outcome=\"sent\",source=\"{source}\"}}"))
}

#[test]
fn relay_that_hangs_with_its_connections_open_is_followed_and_sends_nothing_when_it_wakes() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    let setup = Setup { database_url: database.url(), brokers: brokers(), sections: SECTIONS, ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feeds = [Feed::new("keyed", &topic, Order::Key), Feed::new("stream", &topic, Order::Source)];
    let insert = |session: &mut Session, feeds: &mut [Feed; 2]| {
        for feed in feeds {
            feed.insert_in(session, 50, 7);
        }
    };
    insert(&mut session, &mut feeds);
    let mut preferred = Daemon::start(&setup);
    wait_until("the first rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let mut other = Daemon::start(&setup);
    other.wait_http_ok("/readyz", LONG);
    wait_until("the other to stand by", LONG, || elsewhere(&other));
    preferred.signal("STOP");
    insert(&mut session, &mut feeds);
    let inserted = Instant::now();
    wait_until("the other to help", HELPED, || session.rows("status <> 'sent'") == 0);
    println!("followed after {:?}", inserted.elapsed());
    let locks = "select count(*) from pg_locks l join pg_stat_activity a using (pid) where l.locktype = 'advisory' and \
                 a.datname = current_database()";
    assert!(session.count(locks) >= 2, "the one that hangs holds its locks");
    assert_eq!((sent(&other, "keyed"), sent(&other, "stream")), (Some(50.0), Some(50.0)));
    // Rows that come while it helps do not wait.
    insert(&mut session, &mut feeds);
    wait_until("the next rows to be sent", Duration::from_secs(5), || session.rows("status <> 'sent'") == 0);

    preferred.signal("CONT");
    preferred.wait_http_ok("/readyz", LONG);
    insert(&mut session, &mut feeds);
    wait_until("the last rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    for daemon in [&preferred, &other] {
        assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
        assert_eq!(daemon.metric("keiro_relay_stale_settlements_total{source=\"keyed\"}"), Some(0.0));
    }
}

/// It runs, holds the locks, and reaches no broker; the other one does.
#[test]
fn relay_that_is_cut_off_from_its_broker_is_followed() {
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(2, &[]);
    let cut_off =
        Setup { database_url: database.url(), brokers: "127.0.0.1:1", sections: SECTIONS, ..Setup::default() };
    let well = Setup { brokers: brokers(), ..cut_off };
    let mut session = Session::open(&database);
    let mut feeds = [Feed::new("keyed", &topic, Order::Key), Feed::new("stream", &topic, Order::Source)];
    for feed in &mut feeds {
        feed.insert_in(&mut session, 300, 40);
    }
    let first = Daemon::start(&cut_off);
    let returned = "status = 'failed' and last_error like 'kafka.timed_out: %'";
    wait_until("it to try and fail", LONG, || session.rows(returned) > 0);
    let other = Daemon::start(&well);
    let begun = Instant::now();
    wait_until("the other to help", LONG, || session.rows("status <> 'sent'") == 0);
    println!("followed after {:?}", begun.elapsed());
    assert!(first.http_get("/readyz").is_some_and(|answer| answer.status == 503));
    for feed in &mut feeds {
        feed.insert_in(&mut session, 50, 40);
    }
    wait_until("the next rows to be sent", HELPED, || session.rows("status <> 'sent'") == 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
    assert_eq!(session.rows("attempt_count <> 1"), 0, "no attempt is spent");
    assert_eq!(other.metric("keiro_relay_overtaken_total"), Some(0.0));
}
