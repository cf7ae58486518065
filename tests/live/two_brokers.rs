//! Two brokers of which one dies: what needs it waits and says why, everything else goes on.

use std::time::{Duration, Instant};

use keiro_relay::cli::demo::services::KafkaOptions;

use crate::broker_faults::{ARRIVAL, Spot, Trouble, endure, total};
use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::own_kafka;
use crate::support::session::Session;
use crate::support::topics::{Admin, read_topic_on};
use crate::support::{LONG, wait_until};

#[test]
fn partitions_without_a_leader_or_enough_replicas_hold_their_own_rows_only() {
    let kafka = own_kafka(KafkaOptions { brokers: 2, ..KafkaOptions::default() });
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    admin.create_assigned("whole", &[&[1], &[1], &[1]], &[ARRIVAL]);
    admin.create_assigned("leaderless", &[&[2], &[2]], &[ARRIVAL]);
    admin.create_assigned("replicated", &[&[1, 2], &[2, 1]], &[ARRIVAL, ("min.insync.replicas", "2")]);
    endure(&Trouble {
        brokers: &brokers,
        kafka: "",
        admin: &brokers,
        main: "whole",
        spots: &[
            Spot { topic: "leaderless", says: ("kafka.leader_not_available", "leader") },
            Spot { topic: "replicated", says: ("kafka.not_enough_replicas", "min.insync.replicas") },
        ],
        works_first: true,
        hurt: &|| kafka.kill_broker(2).expect("killed"),
        mend: &|| kafka.restart_broker(2).expect("it starts again"),
        starts_anew: false,
    });
}

/// A broker that stands still, unnoticed by its cluster, with the topic of three sources that have thousands of rows: the sources whose
/// topic is on the other broker are served all the same, within seconds.
#[test]
fn sources_of_a_silent_topic_leave_room_for_the_others() {
    let kafka = own_kafka(KafkaOptions {
        brokers: 2,
        properties: &[("broker.session.timeout.ms", "60000")],
        ..KafkaOptions::default()
    });
    let brokers = kafka.bootstrap();
    let admin = Admin::new(&brokers);
    admin.create_assigned("well", &[&[1], &[1]], &[]);
    admin.create_assigned("silent", &[&[2], &[2], &[2], &[2]], &[]);
    let database = fresh_database(Table::Lean);
    let mut session = Session::open(&database);
    let mut large = ["a", "b", "c"].map(|source| Feed::new(source, "silent", Order::Key));
    let mut well = [Feed::new("known", "well", Order::Key), Feed::new("late", "well", Order::Key)];
    for feed in large.iter_mut().chain(&mut well[..1]) {
        feed.insert_in(&mut session, 100, 50);
    }
    // Room for two of them.
    let sections = "[relay]\nin_flight_rows_max = 6000\n";
    let setup = Setup { database_url: database.url(), brokers: &brokers, sections, ..Setup::default() };
    let daemon = Daemon::start(&setup);
    wait_until("the first rows to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    kafka.pause_broker(2).expect("paused");
    for feed in &mut large {
        feed.insert_in(&mut session, 5_000, 2_500);
    }
    wait_until("thousands of rows to be in flight", LONG, || session.rows("status = 'publishing'") > 3_000);
    let mut slowest = Duration::ZERO;
    for _ in 0..3 {
        for feed in &mut well {
            feed.insert_in(&mut session, 20, 20);
        }
        let begun = Instant::now();
        wait_until("the other sources to be sent", LONG, || {
            session.rows("source in ('known', 'late') and status <> 'sent'") == 0
        });
        slowest = begun.elapsed().max(slowest);
    }
    println!("{slowest:?} at most beside {} rows in flight", session.rows("status = 'publishing'"));
    assert!(slowest < Duration::from_secs(10), "{slowest:?}");
    kafka.resume_broker(2).expect("resumed");
    wait_until("everything to be sent", LONG * 2, || session.rows("status <> 'sent'") == 0);
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    let records = [read_topic_on(&brokers, "well"), read_topic_on(&brokers, "silent")].concat();
    let expected: Vec<_> = large.iter().chain(&well).flat_map(|feed| feed.expected().to_vec()).collect();
    judge(&records, &expected).assert_delivered(total(&daemon, "keiro_relay_duplicates_possible_total"));
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
}
