//! Two brokers of which one dies: what needs it waits and says why, everything else goes on.

use keiro_relay::cli::demo::services::KafkaOptions;

use crate::broker_faults::{ARRIVAL, Spot, Trouble, endure};
use crate::support::services::own_kafka;
use crate::support::topics::Admin;

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
