//! Relays whose host's clock is hours off: the database's clock decides, and the records carry its time.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services;

use crate::broker_faults::total;
use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::brokers;
use crate::support::session::Session;
use crate::support::topics::{Admin, fresh_topic, read_topic};
use crate::support::{LONG, unique, wait_until};

/// What to preload so that a program's clock is off: Debian's libfaketime, and what it lacks for librdkafka.
fn preload(directory: &Path) -> String {
    let homes =
        std::fs::read_dir("/usr/lib").expect("/usr/lib").chain(std::fs::read_dir("/usr/lib64").into_iter().flatten());
    let mut libraries = homes.map(|home| home.expect("an entry").path().join("faketime/libfaketimeMT.so.1"));
    let faketime = libraries.find(|library| library.is_file());
    let faketime = faketime.expect("libfaketimeMT.so.1: `make deps` installs Debian's faketime");
    let (source, shim) = (directory.join("cnd_timedwait.c"), directory.join("cnd_timedwait.so"));
    std::fs::write(&source, include_str!("support/cnd_timedwait.c")).expect("write the source");
    let compiled = Command::new("gcc").args(["-shared", "-fPIC", "-o"]).args([&shim, &source]).status().expect("gcc");
    assert!(compiled.success(), "gcc: {compiled}");
    format!("{}:{}", shim.display(), faketime.display())
}

#[test]
fn relays_whose_clock_is_hours_off_send_everything_in_order_with_the_database_s_time() {
    let directory = services::fresh_directory("clock").expect("a directory");
    let libraries = preload(&directory);
    // A record that is an hour off is refused.
    let strict = [("message.timestamp.before.max.ms", "3600000"), ("message.timestamp.after.max.ms", "3600000")];
    for offset in ["-5h", "+7h", "+400d"] {
        let topic = fresh_topic(3, &strict);
        let missing = unique("missing");
        let database = fresh_database(Table::Lean);
        let mut session = Session::open(&database);
        let mut feeds =
            [("keyed", Order::Key), ("stream", Order::Source), ("line", Order::Source), ("free", Order::None)]
                .map(|(source, order)| Feed::new(source, &topic, order));
        let sections = "[sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
                        [sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n";
        // What waits waits by a clock that nobody sets.
        let environment =
            [("LD_PRELOAD", libraries.as_str()), ("FAKETIME", offset), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")];
        let setup = Setup {
            database_url: database.url(),
            brokers: brokers(),
            sections,
            environment: &environment,
            ..Setup::default()
        };
        let begun = jiff::Timestamp::now().as_millisecond();
        for feed in &mut feeds {
            feed.insert_in(&mut session, 300, 12);
        }
        // One topic is missing at first: its row rests and comes back, whatever the host's clock says.
        let (blocked, row) = (feeds[0].id(40), feeds[0].row(40));
        session.execute(&format!("update keiro.keiro_outbox set destination = '{missing}' where {row}"));
        // Rows that another relay left behind, one with its lease run out and one that is still somebody's.
        let leases = [(250, "6 minutes"), (251, "1 minute")];
        for (n, age) in leases {
            session.execute(&format!(
                "update keiro.keiro_outbox set status = 'publishing', attempt_count = 1, updated_at = now() - interval '{age}' \
                 where {}",
                feeds[3].row(n)
            ));
        }
        let mut daemon = Daemon::start(&setup);
        let waiting = || {
            "status <> 'sent' and message_key is not distinct from (select message_key from keiro.keiro_outbox \
                          where source = 'keyed' order by created_at offset 40 limit 1) and source = 'keyed'"
        };
        wait_until("everything else to be sent", LONG, || {
            session.rows("status <> 'sent'") == session.rows(waiting()) + 1 && session.rows(waiting()) == 22
        });
        assert_eq!(session.rows(&format!("{} and status = 'publishing'", feeds[3].row(251))), 1, "its lease is young");
        let log = daemon.stderr();
        let host = jiff::Timestamp::now().as_second();
        let logged = log.lines().next().expect("a line").split("\"timestamp\":\"").nth(1).expect("a time");
        let logged: jiff::Timestamp = logged.split('"').next().expect("a time").parse().expect("a time");
        assert!((logged.as_second() - host).abs() > 4 * 3600, "the host's clock is right: {logged}");
        Admin::new(brokers()).create(&missing, 1, &strict);
        let made = Instant::now();
        wait_until("the rest to be sent", LONG, || session.rows("status <> 'sent'") == 1);
        println!("{offset}: sent {:?} after its topic was made", made.elapsed());
        assert_eq!(session.rows("attempt_count <> 1"), 1, "the row whose lease ran out, and no other");
        let published = "published_at not between now() - interval '5 minutes' and now() and status = 'sent'";
        assert_eq!(session.rows(published), 0);

        let records = [read_topic(&topic), read_topic(&missing)].concat();
        let ended = jiff::Timestamp::now().as_millisecond();
        for record in &records {
            assert!((begun..=ended).contains(&record.timestamp), "{begun} {} {ended}", record.timestamp);
        }
        let mut expected: Vec<_> = feeds[..3].iter().flat_map(|feed| feed.expected().to_vec()).collect();
        expected.extend(feeds[3].expected_without(&[251]));
        judge(&records, &expected).assert_delivered(total(&daemon, "keiro_relay_duplicates_possible_total"));
        assert!(records.iter().any(|record| record.message_id() == blocked));
        daemon.wait_http_ok("/readyz", LONG);
        daemon.signal("TERM");
        assert_eq!(daemon.wait(LONG + Duration::from_secs(20)).code(), Some(0), "{}", daemon.stderr());
    }
    let _ = std::fs::remove_dir_all(&directory);
}
