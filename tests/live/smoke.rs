//! The servers and helpers the other tests lean on work: they start, keep what they are given, and die when told to.

use std::process::{Command, Stdio};
use std::time::Duration;

use keiro_relay::cli::demo::services::{KafkaOptions, Port, Postgres};
use rdkafka::config::ClientConfig;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::support::database::{Table, fresh_database, fresh_database_on, older_to_newer};
use crate::support::services::{brokers, own_kafka, own_postgres};
use crate::support::topics::{Admin, TopicReader, fresh_topic, read_topic, read_topic_on};
use crate::support::{LONG, oracle, run, wait_until};

/// Writes `m0…` in order to partition 0, each as a record of its own.
fn produce(brokers: &str, topic: &str, ids: std::ops::Range<usize>) {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("enable.idempotence", "true");
    let producer: FutureProducer = config.create().expect("a producer");
    run(async || {
        let mut deliveries = Vec::new();
        for id in ids {
            let message_id = format!("m{id}");
            let headers = OwnedHeaders::new().insert(Header { key: "keiro-message-id", value: Some(&message_id) });
            let record = FutureRecord::to(topic).partition(0).key("k").payload(&message_id).headers(headers);
            let sent = producer.send_result(record.timestamp(1_767_323_045_000));
            deliveries.push(sent.map_err(|(error, _)| error).expect("room in the queue"));
        }
        for delivery in deliveries {
            delivery.await.expect("an answer").map_err(|(error, _)| error).expect("acknowledged");
        }
    });
}

fn expected(count: usize) -> Vec<(&'static str, String)> {
    (0..count).map(|id| ("lane", format!("m{id}"))).collect()
}

#[test]
fn topic_round_trips() {
    let topic = fresh_topic(3, &[("max.message.bytes", "200000")]);
    assert_eq!(read_topic(&topic), []);
    produce(brokers(), &topic, 0..100);

    let records = read_topic(&topic);
    oracle::judge(&records, &expected(100)).assert_delivered(0);
    let record = &records[7];
    assert_eq!((record.partition, record.offset, record.timestamp), (0, 7, 1_767_323_045_000));
    assert_eq!(record.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(record.value.as_deref(), Some(&b"m7"[..]));
    assert_eq!(record.headers, [("keiro-message-id".to_owned(), b"m7".to_vec())]);
}

#[test]
fn topic_is_read_on_while_it_grows() {
    let topic = fresh_topic(1, &[]);
    let mut reader = TopicReader::new(brokers(), &topic);
    assert_eq!(reader.catch_up().len(), 0);
    produce(brokers(), &topic, 0..3);
    assert_eq!(reader.catch_up().len(), 3);
    Admin::new(brokers()).grow(&topic, 2);
    produce(brokers(), &topic, 3..5);
    assert_eq!(reader.wait_for(5, LONG).len(), 5);
    Admin::new(brokers()).delete(&topic);
}

#[test]
fn databases_of_two_tests_are_apart() {
    let older = fresh_database(Table::OlderShared);
    let newer = fresh_database(Table::NewerShared);
    older.execute(
        "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, event_type, schema_version, \
         content_type, payload_bytes, occurred_at) \
         values (gen_random_uuid(), 'm', 's', 'd', 'e', 1, 'text/plain', '', now())",
    );
    let rows = "select count(*) from keiro.keiro_outbox";
    assert_eq!((older.value(rows), newer.value(rows)), ("1".to_owned(), "0".to_owned()));

    let columns = "select count(*) from information_schema.columns where table_schema = 'keiro'";
    assert_eq!((older.value(columns), newer.value(columns)), ("29".to_owned(), "32".to_owned()));
    older.execute(older_to_newer());
    assert_eq!(older.value(columns), "32");
    // Primary key, the unique pair, and the five of the contract.
    let indexes = "select count(*) from pg_indexes where schemaname = 'keiro'";
    assert_eq!((older.value(indexes), newer.value(indexes)), ("7".to_owned(), "7".to_owned()));
}

#[test]
fn postgres_keeps_its_data_over_stop_kill_and_pause() {
    let postgres = own_postgres(&[("work_mem", "7MB")]);
    let database = fresh_database_on(&postgres.url("postgres"), Table::NewerShared);
    assert_eq!(database.value("select current_setting('work_mem')"), "7MB");
    database.execute("create table kept (n int)");
    let interruptions: [fn(&Postgres); 3] = [postgres_stop, postgres_kill, postgres_pause];
    for (n, interrupt) in interruptions.into_iter().enumerate() {
        database.execute(&format!("insert into kept values ({n}); checkpoint"));
        interrupt(&postgres);
        assert_eq!(database.value("select count(*) from kept"), (n + 1).to_string());
    }
    postgres.create_database("another \"one\"").expect("a database");
    let refused = postgres.create_database("another \"one\"").expect_err("it exists");
    assert!(refused.to_string().contains("run a statement in postgres"), "{refused}");
}

fn postgres_stop(postgres: &Postgres) {
    postgres.stop().expect("stopped");
    assert!(std::net::TcpStream::connect(("127.0.0.1", postgres.port())).is_err(), "nobody listens now");
    postgres.restart().expect("started again");
}

fn postgres_kill(postgres: &Postgres) {
    postgres.kill().expect("killed");
    postgres.restart().expect("started again");
}

fn postgres_pause(postgres: &Postgres) {
    postgres.pause().expect("paused");
    // The kernel still takes connections for it; nothing answers on them.
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", postgres.port())).expect("the kernel answers");
    std::io::Write::write_all(&mut stream, &[0, 0, 0, 8, 4, 210, 22, 47]).expect("the kernel takes it");
    stream.set_read_timeout(Some(Duration::from_millis(200))).expect("a timeout");
    let mut answer = [0];
    assert!(std::io::Read::read(&mut stream, &mut answer).is_err(), "a paused server answers nothing");
    postgres.resume().expect("resumed");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    std::io::Read::read_exact(&mut stream, &mut answer).expect("it answers again");
}

#[test]
fn kafka_keeps_its_data_over_stop_kill_and_pause_of_two_brokers() {
    let kafka = own_kafka(KafkaOptions { brokers: 2, properties: &[("num.partitions", "2")], ..Default::default() });
    let (both, topic) = (kafka.bootstrap(), "kept");
    let admin = Admin::new(&both);
    admin.create_assigned(topic, &[&[1], &[2]], &[]);
    produce(&both, topic, 0..10);
    kafka.kill().expect("killed");
    kafka.restart().expect("started again");
    assert_eq!(kafka.bootstrap(), both);
    produce(&both, topic, 10..20);
    kafka.pause().expect("paused");
    kafka.resume().expect("resumed");
    produce(&both, topic, 20..30);
    kafka.stop_broker(2).expect("stopped");
    produce(&both, topic, 30..40);
    wait_until("partition 1 to lose its leader", LONG, || admin.partitions(topic).is_none());
    kafka.restart_broker(2).expect("started again");
    wait_until("partition 1 to have a leader again", LONG, || admin.partitions(topic) == Some(2));
    oracle::judge(&read_topic_on(&both, topic), &expected(40)).assert_delivered(0);
}

/// Runs a test of ours as a process of its own, kills that, and sees its servers go.
#[test]
fn servers_and_their_files_go_when_their_process_is_killed() {
    let mut victim = Command::new(std::env::current_exe().expect("our own path"))
        .args(["--exact", "smoke::victim", "--ignored", "--nocapture"])
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .expect("start the victim");
    let mut said = std::io::BufReader::new(victim.stdout.take().expect("its output"));
    let mut facts = Vec::new();
    while facts.len() < 3 {
        let mut line = String::new();
        let length = std::io::BufRead::read_line(&mut said, &mut line).expect("its output is text");
        assert!(length > 0, "the victim ended early");
        facts.extend(line.trim().strip_prefix("victim: ").map(str::to_owned));
    }
    let [directory, postgres_port, kafka_port] = &facts[..] else { panic!("three facts, not {facts:?}") };
    let listens = |port: &str| std::net::TcpStream::connect(format!("127.0.0.1:{port}")).is_ok();
    assert!(listens(postgres_port) && listens(kafka_port) && std::path::Path::new(directory).is_dir());

    victim.kill().expect("kill the victim");
    victim.wait().expect("the victim ends");
    wait_until("its Kafka to go", LONG, || !listens(kafka_port));
    wait_until("its PostgreSQL to go", LONG, || !listens(postgres_port));
    wait_until("its files to go", LONG, || !std::path::Path::new(directory).exists());
    let backends = || {
        let arguments = std::fs::read_dir("/proc").expect("/proc").flatten();
        arguments.filter(|entry| {
            let work = std::fs::read_link(entry.path().join("cwd"));
            work.is_ok_and(|work| work.to_string_lossy().starts_with(directory.as_str()))
        })
    };
    wait_until("its last process to go", LONG, || backends().count() == 0);
}

/// Starts servers from a thread that ends, pauses one, tells where they are, and waits to be killed.
#[test]
#[ignore = "run by servers_and_their_files_go_when_their_process_is_killed"]
fn victim() {
    let (postgres, kafka) =
        std::thread::spawn(|| (own_postgres(&[]), own_kafka(KafkaOptions::default()))).join().expect("both started");
    // Backends that stand still do not notice that their postmaster died.
    postgres.pause().expect("paused");
    let directory = keiro_relay::cli::demo::services::fresh_directory("victim").expect("a directory");
    println!("\nvictim: {}", directory.parent().expect("the run directory").display());
    println!("victim: {}", postgres.port());
    println!("victim: {}", kafka.bootstrap().rsplit(':').next().expect("a port"));
    loop {
        std::thread::park();
    }
}

#[test]
fn ports_are_reserved_apart_and_free_to_listen_on() {
    let ports: Vec<_> = (0..200).map(|_| Port::reserve().expect("a port")).collect();
    let numbers: std::collections::BTreeSet<_> = ports.iter().map(Port::number).collect();
    assert_eq!(numbers.len(), ports.len());
    for port in &ports {
        // The standard library sets SO_REUSEADDR, as both servers do.
        let listener = std::net::TcpListener::bind(("127.0.0.1", port.number())).expect("listen on a reserved port");
        drop(listener);
    }
}
