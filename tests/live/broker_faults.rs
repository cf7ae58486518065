//! Topics that take nothing for a while, under the whole relay: their rows wait and say why, everything else goes on, and
//! afterwards all of it is there, in order.

use std::collections::BTreeMap;
use std::time::Instant;

use keiro_relay::cli::demo::services::KafkaOptions;

use crate::support::daemon::{Daemon, Setup};
use crate::support::database::{Table, fresh_database};
use crate::support::feed::{Feed, Order};
use crate::support::oracle::judge;
use crate::support::services::{brokers, own_kafka};
use crate::support::session::Session;
use crate::support::topics::{Admin, Record, read_topic_on};
use crate::support::{LONG, acls, unique, wait_until};

/// 35 s is the shortest lease for these timeouts.
pub(crate) const SECTIONS: &str = "[relay]\npublish_timeout = \"6s\"\nsettle_timeout = \"500ms\"\npublishing_timeout = \"35s\"\n\n\
    [sources.stream]\npolicy = \"per_source_stream\"\n\n[sources.line]\npolicy = \"stop_the_line\"\n\n\
    [sources.free]\npolicy = \"best_effort\"\n\n[maintenance]\ninterval = \"1s\"\n";
/// The broker's time of arrival: order across topics shows in it.
pub(crate) const ARRIVAL: (&str, &str) = ("message.timestamp.type", "LogAppendTime");
/// Rows of each source in a round.
const ROWS: usize = 60;

/// A topic that takes nothing between `hurt` and `mend`.
pub(crate) struct Spot<'a> {
    pub topic: &'a str,
    /// The code word of its rows' `last_error`, and something else it says.
    pub says: (&'a str, &'a str),
}

/// What happens to topics while rows for them and for another one stream.
pub(crate) struct Trouble<'a> {
    /// For the relay.
    pub brokers: &'a str,
    /// More lines of its `[kafka]`.
    pub kafka: &'a str,
    /// A listener that may do everything.
    pub admin: &'a str,
    /// The topic that works all the time.
    pub main: &'a str,
    pub spots: &'a [Spot<'a>],
    /// Whether the topics work at first.
    pub works_first: bool,
    pub hurt: &'a dyn Fn(),
    pub mend: &'a dyn Fn(),
    /// Whether what was written before went away with its topic.
    pub starts_anew: bool,
}

/// A source, which of a round's rows go to which spot, and how many rows go out although those do not.
struct Part {
    feed: Feed,
    keys: usize,
    faulty: &'static [(usize, usize)],
    goes: usize,
}

fn cast(main: &str) -> Vec<Part> {
    let part =
        |source: &str, order, keys, faulty, goes| Part { feed: Feed::new(source, main, order), keys, faulty, goes };
    vec![
        // One hot key, blocked in its middle.
        part("hot", Order::Key, 1, &[(20, 0), (40, 1)], 20),
        // Among other keys: of the twelve, two are blocked after their second row.
        part("keyed", Order::Key, 12, &[(27, 0), (28, 1)], ROWS - 6),
        // In the middle of a stream.
        part("stream", Order::Source, 7, &[(20, 0)], 20),
        part("line", Order::Source, 7, &[(20, 1)], 20),
        part("free", Order::None, 0, &[(10, 0), (30, 1), (50, 0)], ROWS - 3),
    ]
}

/// Writes a round in one transaction.
fn write(session: &mut Session, parts: &mut [Part], spots: &[Spot<'_>]) {
    for part in parts {
        let first = part.feed.written;
        let mut statements = format!("begin; {};", part.feed.statement(ROWS, part.keys));
        for (row, spot) in part.faulty {
            let (topic, row) = (spots[spot % spots.len()].topic, part.feed.row(first + row));
            statements.push_str(&format!("update keiro.keiro_outbox set destination = '{topic}' where {row};"));
        }
        session.execute(&format!("{statements} commit"));
    }
}

/// Fails unless each lane's records arrived in their order, whatever their topics and partitions.
#[track_caller]
pub(crate) fn assert_arrived_in_order(records: &[Record], expected: &[(String, String)]) {
    let mut arrived: BTreeMap<&str, i64> = BTreeMap::new();
    for record in records {
        let first = arrived.entry(record.message_id()).or_insert(record.timestamp);
        *first = record.timestamp.min(*first);
    }
    let mut last: BTreeMap<&str, (i64, &str)> = BTreeMap::new();
    for (lane, id) in expected {
        let Some(at) = arrived.get(id.as_str()) else { continue };
        let before = last.insert(lane, (*at, id)).unwrap_or((i64::MIN, ""));
        assert!(before.0 <= *at, "{lane}: {id} arrived {} ms before {}", before.0 - at, before.1);
    }
}

/// The sum of a series over all sources.
pub(crate) fn total(daemon: &Daemon, name: &str) -> usize {
    let metrics = daemon.http_get("/metrics").expect("metrics").body;
    let lines = metrics.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    lines.map(|line| line.rsplit(' ').next().expect("a value").parse::<usize>().expect("a count")).sum()
}

/// The topics that `/status` shows as parked, with their reasons.
pub(crate) fn parked(daemon: &Daemon) -> BTreeMap<String, String> {
    let status = daemon.json("/status");
    let text = |parked: &serde_json::Value, field: &str| parked[field].as_str().expect("a text").to_owned();
    let parked = status["parked_topics"].as_array().expect("a list").iter();
    parked.map(|parked| (text(parked, "topic"), text(parked, "reason"))).collect()
}

pub(crate) fn endure(trouble: &Trouble<'_>) {
    let Trouble { spots, admin, main, .. } = *trouble;
    let database = fresh_database(Table::NewerShared);
    let mut session = Session::open(&database);
    let setup = Setup {
        database_url: database.url(),
        brokers: trouble.brokers,
        kafka: trouble.kafka,
        sections: SECTIONS,
        ..Setup::default()
    };
    let daemon = Daemon::start(&setup);
    let mut parts = cast(main);
    let mut busy = Feed::new("busy", main, Order::Key);
    if trouble.works_first {
        write(&mut session, &mut parts, spots);
        wait_until("the first round to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    }
    let before = session.rows("true");
    (trouble.hurt)();
    write(&mut session, &mut parts, spots);
    busy.insert_in(&mut session, 200, 25);
    let first = |part: &Part| part.feed.written - ROWS;
    for part in &parts {
        let goes = first(part) + part.goes;
        wait_until(&format!("the other rows of {} to be sent", part.feed.source), LONG, || {
            session.rows(&format!("{} and status = 'sent'", part.feed.mine())) == goes
        });
    }
    wait_until("the other source to be sent", LONG, || session.rows("source = 'busy' and status <> 'sent'") == 0);

    // Each row at fault says why, spends nothing, and is tried again within a minute or so.
    for part in &parts {
        for (row, spot) in part.faulty {
            let spot = &spots[spot % spots.len()];
            // The second row of the hot key has not had its turn.
            if part.feed.source == "hot" && *row == 40 {
                continue;
            }
            let said = format!(
                "select coalesce(last_error, '') from keiro.keiro_outbox where {}",
                part.feed.row(first(part) + row)
            );
            let start = format!("{}: ", spot.says.0);
            wait_until(&format!("row {row} of {} to say {start}", part.feed.source), LONG, || {
                let said = session.value(&said);
                if !said.is_empty() && rand::random_ratio(1, 100) {
                    eprintln!("{}: {said}", part.feed.source);
                }
                said.starts_with(&start) && said.contains(spot.says.1) && said.contains(spot.topic)
            });
        }
    }
    let waiting = "status not in ('sent', 'publishing')";
    assert_eq!(session.statuses("status in ('dead', 'rejected')"), "");
    assert_eq!(session.rows(&format!("{waiting} and attempt_count > 0")), 0, "attempts are returned");
    assert_eq!(session.rows(&format!("{waiting} and next_attempt_at > now() + interval '75 s'")), 0);

    // Whoever looks sees it: in /status, in a gauge, in the log.
    for spot in spots {
        wait_until(&format!("{} to be shown as parked", spot.topic), LONG, || {
            let gauge = daemon.metric(&format!("keiro_relay_topic_parked{{topic=\"{}\"}}", spot.topic));
            gauge == Some(1.0) && parked(&daemon).get(spot.topic).is_some_and(|reason| reason.starts_with(spot.says.0))
        });
        let log = daemon.stderr();
        let shown = log.lines().filter(|line| line.contains("topic parked") && line.contains(spot.topic)).count();
        assert_eq!(shown, 1, "one line for {} in the log:\n{log}", spot.topic);
    }
    let line = parts.iter().find(|part| part.feed.source == "line").expect("a source");
    let head = session
        .value(&format!("select outbox_id::text from keiro.keiro_outbox where {}", line.feed.row(first(line) + 20)));
    wait_until("/status to name the row that halts the line", LONG, || {
        let status = daemon.json("/status");
        let sources = status["sources"].as_array().expect("a list");
        sources.iter().any(|source| source["source"] == "line" && source["halted_on"] == head.as_str())
    });
    // Traffic goes on, at its usual pace.
    for _ in 0..3 {
        busy.insert_in(&mut session, 50, 25);
        let begun = Instant::now();
        wait_until("the other source to be sent", LONG, || session.rows("source = 'busy' and status <> 'sent'") == 0);
        println!("the other source took {:?}", begun.elapsed());
    }

    (trouble.mend)();
    let mended = Instant::now();
    wait_until("all the rest to be sent", LONG, || session.rows("status <> 'sent'") == 0);
    println!("sent {:?} after it was mended", mended.elapsed());
    assert_eq!(session.rows("attempt_count <> 1"), 0);
    wait_until("nothing to be parked", LONG, || {
        let is_free = |spot: &Spot<'_>| {
            daemon.metric(&format!("keiro_relay_topic_parked{{topic=\"{}\"}}", spot.topic)).unwrap_or(0.0) == 0.0
        };
        parked(&daemon).is_empty() && spots.iter().all(is_free)
    });
    let mut expected = busy.expected().to_vec();
    for part in &parts {
        let gone = |n: usize| trouble.starts_anew && n < first(part) && part.faulty.iter().any(|(row, _)| *row == n);
        expected.extend(part.feed.expected().iter().enumerate().filter(|(n, _)| !gone(*n)).map(|(_, row)| row.clone()));
    }
    let mut records = read_topic_on(admin, main);
    for spot in spots {
        records.extend(read_topic_on(admin, spot.topic));
    }
    let counted = total(&daemon, "keiro_relay_duplicates_possible_total");
    let verdict = judge(&records, &expected);
    println!("{} duplicates, {counted} counted; {before} rows before", verdict.duplicates.len());
    verdict.assert_delivered(counted);
    assert_arrived_in_order(&records, &expected);
    assert_eq!(daemon.metric("keiro_relay_overtaken_total"), Some(0.0));
}

fn topic(partitions: i32) -> String {
    let topic = unique("topic");
    Admin::new(brokers()).create(&topic, partitions, &[ARRIVAL]);
    topic
}

#[test]
fn topics_that_do_not_exist_yet_hold_their_own_rows_only() {
    let (main, missing, other) = (topic(3), unique("missing"), unique("missing"));
    let admin = Admin::new(brokers());
    endure(&Trouble {
        brokers: brokers(),
        kafka: "",
        admin: brokers(),
        main: &main,
        spots: &[
            Spot { topic: &missing, says: ("kafka.unknown_topic", "create it") },
            Spot { topic: &other, says: ("kafka.unknown_topic", "create it") },
        ],
        works_first: false,
        hurt: &|| {},
        mend: &|| {
            admin.create(&missing, 1, &[ARRIVAL]);
            admin.create(&other, 4, &[ARRIVAL]);
        },
        starts_anew: false,
    });
}

#[test]
fn topics_that_are_deleted_and_made_anew_smaller_hold_their_own_rows_only() {
    let (main, one, other) = (topic(1), topic(6), topic(1));
    let admin = Admin::new(brokers());
    endure(&Trouble {
        brokers: brokers(),
        kafka: "",
        admin: brokers(),
        main: &main,
        spots: &[
            Spot { topic: &one, says: ("kafka.unknown_topic", "create it") },
            Spot { topic: &other, says: ("kafka.unknown_topic", "create it") },
        ],
        works_first: true,
        hurt: &|| {
            admin.delete(&one);
            admin.delete(&other);
        },
        mend: &|| {
            admin.create(&one, 2, &[ARRIVAL]);
            admin.create(&other, 1, &[ARRIVAL]);
        },
        starts_anew: true,
    });
}

#[test]
fn permissions_that_are_taken_hold_their_own_topics_only() {
    const LOGIN: &str = "org.apache.kafka.common.security.plain.PlainLoginModule required user_relay=\"right\";";
    let kafka = own_kafka(KafkaOptions {
        listeners: &[("LOGIN", "SASL_PLAINTEXT")],
        properties: &[
            ("listener.name.login.sasl.enabled.mechanisms", "PLAIN"),
            ("listener.name.login.plain.sasl.jaas.config", LOGIN),
            ("authorizer.class.name", "org.apache.kafka.metadata.authorizer.StandardAuthorizer"),
            ("super.users", "User:ANONYMOUS"),
        ],
        ..KafkaOptions::default()
    });
    let (superuser, write) = (kafka.bootstrap(), acls::Operation::RD_KAFKA_ACL_OPERATION_WRITE);
    let admin = Admin::new(&superuser);
    for topic in ["open", "hidden", "read-only"] {
        admin.create(topic, 2, &[ARRIVAL]);
        acls::allow(&superuser, "relay", write, topic);
    }
    acls::allow(&superuser, "relay", acls::Operation::RD_KAFKA_ACL_OPERATION_DESCRIBE, "read-only");
    let says = ("kafka.topic_authorization_failed", "WRITE");
    endure(&Trouble {
        brokers: &kafka.bootstrap_of("LOGIN"),
        kafka: "[kafka.properties]\n\"security.protocol\" = \"sasl_plaintext\"\n\"sasl.mechanism\" = \"PLAIN\"\n\
                \"sasl.username\" = \"relay\"\n\"sasl.password\" = \"right\"",
        admin: &superuser,
        main: "open",
        spots: &[Spot { topic: "hidden", says }, Spot { topic: "read-only", says }],
        works_first: true,
        hurt: &|| {
            acls::take_back(&superuser, "relay", write, "hidden");
            acls::take_back(&superuser, "relay", write, "read-only");
        },
        mend: &|| {
            acls::allow(&superuser, "relay", write, "hidden");
            acls::allow(&superuser, "relay", write, "read-only");
        },
        starts_anew: false,
    });
}
