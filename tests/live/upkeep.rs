//! What the relay does while nothing happens: it asks little, keeps what must be kept, and deletes what may go.

use std::time::Duration;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::session::Session;
use crate::support::topics::{fresh_topic, read_topic};
use crate::support::{LONG, services, wait_until};

/// A relay of a few hundred idle sources asks hardly more than one of a single source.
#[test]
fn idle_relay_asks_little_however_many_sources_it_has() {
    const SOURCES: usize = 150;
    const SECONDS: usize = 6;
    let database = fresh_database(Table::NewerShared);
    let topic = fresh_topic(1, &[]);
    // The slow timer counts each source's rows: not while we count.
    let sections = "[maintenance]\ninterval = \"4m\"\n";
    let setup = Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
    let mut session = Session::open(&database);
    let mut feeds: Vec<Feed> = (0..SOURCES).map(|n| Feed::new(&format!("source{n:03}"), &topic, Order::Key)).collect();
    for feed in &mut feeds {
        feed.insert_in(&mut session, 2, 1);
    }
    let mut daemon = Daemon::start(&setup);
    wait_until("everything to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    daemon.wait_http_ok("/readyz", LONG);
    drop(session);
    // From another database, so that looking is not counted.
    let mut look = Session::open_url(services::database_url());
    let mut commits =
        || look.count(&format!("select xact_commit from pg_stat_database where datname = '{}'", database.name()));
    wait_until("the slow timer's first tick", LONG, || {
        daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").is_some_and(|at| at > 0.0)
    });
    // The server counts a second late; until what was done before is counted it grows fast.
    let mut before = commits();
    let mut quiet = 0;
    wait_until("the relay to be idle", LONG, || {
        std::thread::sleep(Duration::from_secs(1));
        let now = commits();
        quiet = if now - before < 40 { quiet + 1 } else { 0 };
        before = now;
        quiet == 2
    });
    std::thread::sleep(Duration::from_secs(SECONDS as u64));
    let asked = commits() - before;
    println!("{asked} statements in {SECONDS} s for {SOURCES} idle sources");
    // A poll each 250 ms, one look for new sources and one at the locks each second, two at the pauses every five seconds, and a sweep
    // of each source every fifteen seconds: two statements, all sources close together.
    let bound = (SECONDS + 2) * (4 + 1 + 1) + 2 * (SECONDS + 2).div_ceil(5) + 2 * SOURCES + SECONDS;
    assert!(asked <= bound, "{asked} statements in {SECONDS} s, at most {bound} were expected");

    // And all of them are served at once when something comes.
    let mut session = Session::open(&database);
    for feed in &mut feeds {
        feed.insert_in(&mut session, 1, 1);
    }
    wait_until("everything to be sent", Duration::from_secs(20), || session.rows("status <> 'sent'") == 0);
    let expected: Vec<_> = feeds.iter().flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&read_topic(&topic), &expected).assert_delivered(0);
}

#[test]
fn retention_takes_sent_rows_of_its_age_and_nothing_else() {
    for table in [Table::NewerShared, Table::Lean] {
        let database = fresh_database(table);
        let mut session = Session::open(&database);
        let mut feed = Feed::new("old", "nowhere", Order::None);
        let far = if table == Table::Lean { "next_attempt_at = '9999-12-31', " } else { "" };
        let year = "created_at = now() - interval '1 year', updated_at = now() - interval '1 year'";
        let mut statements = format!("begin; {};", feed.statement(7, 0));
        for (row, set) in [
            format!("status = 'sent', published_at = now() - interval '1 year', {year}"),
            format!("status = 'sent', published_at = now() - interval '1 hour', {year}"),
            format!("status = 'dead', last_error = 'it was', {far} {year}"),
            format!(
                "status = 'rejected', rejected_at = now() - interval '1 year', rejection_code = 'a.b', {far} {year}"
            ),
            format!("status = 'failed', next_attempt_at = '2999-01-01', {year}"),
            format!("next_attempt_at = '2999-01-01', {year}"),
            "status = 'publishing', attempt_count = 1, created_at = now() - interval '1 year', updated_at = now()"
                .to_string(),
        ]
        .iter()
        .enumerate()
        {
            statements.push_str(&format!("update keiro.keiro_outbox set {set} where {};", feed.row(row)));
        }
        session.execute(&format!("{statements} commit"));
        let all = "dead=1 failed=1 pending=1 publishing=1 rejected=1 sent=2";
        assert_eq!(session.statuses("true"), all);
        let every = "[maintenance]\ninterval = \"1s\"\n";
        let deleting = format!("{every}retention = \"7d\"\n");
        // Off, as it is unless somebody says otherwise: two ticks take nothing.
        let ticks = |daemon: &Daemon| {
            daemon.metric("keiro_relay_last_success_timestamp_seconds{loop=\"sample\"}").unwrap_or_default()
        };
        for (sections, left) in
            [(every, all), (deleting.as_str(), "dead=1 failed=1 pending=1 publishing=1 rejected=1 sent=1")]
        {
            let setup =
                Setup { database_url: database.url(), brokers: services::brokers(), sections, ..Setup::default() };
            let daemon = Daemon::start(&setup);
            wait_until("the first tick", LONG, || ticks(&daemon) > 0.0);
            let first = ticks(&daemon);
            wait_until("the next tick", LONG, || ticks(&daemon) > first);
            assert_eq!(session.statuses("true"), left, "{table:?} {sections}");
            let deleted = if left == all { 0.0 } else { 1.0 };
            assert_eq!(daemon.metric("keiro_relay_retention_deleted_total"), Some(deleted));
        }
        assert_eq!(session.rows(&feed.row(1)), 1, "the young one stays");
    }
}
