//! Time from the commit of a row to its record in a consumer, at a steady pace, beside a bare produce and consume.
//!
//! Nothing here ever counts a run of which a record is missing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::{BorrowedMessage, Header, Headers as _, Message as _, OwnedHeaders};
use rdkafka::producer::{BaseRecord, Producer as _};
use rdkafka::topic_partition_list::Offset;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_postgres::types::Type;

use super::bare;
use super::harness::{Cpu, Harness, Scratch, defaults, doing, kafka_publisher, relay};
use super::report::{Cell, Section};
use crate::domain::policy::Policy;
use crate::domain::record::MESSAGE_ID_HEADER;
use crate::relay::End;
use crate::store::Profile;

/// Rows a second.
const PACE: u32 = 500;
/// How long rows are written.
const SECONDS: usize = 30;
/// The first rows are not counted: the relay and the JVM have just started.
const WARM_UP_ROWS: usize = 1_000;
const PAYLOAD_BYTES: usize = 1024;
const KEYS: usize = 1_000;
const PARTITIONS: i32 = 12;
/// Connections that write: one commit waits for the disk about as long as the pace allows.
const WRITERS: usize = 4;
/// How long the last record may take.
const LAST_MAX: Duration = Duration::from_secs(60);

const INSERT: &str = "
insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type,
  payload_bytes, attributes, occurred_at)
values (gen_random_uuid(), $1, 'latency', $2, $3, 'bench.happened', 1, 'application/json', $4, '{\"bench\": true}', now())";

/// Measures.
///
/// # Errors
/// Something was not done.
pub(super) async fn measure(harness: &mut Harness) -> Result<Vec<Section>, String> {
    let rows = WARM_UP_ROWS + harness.scaled(SECONDS * PACE as usize);
    let mut section = Section {
        title: "Latency".to_owned(),
        notes: vec![format!(
            "{PACE} rows of 1 KB a second, each in a transaction of its own over {WRITERS} connections, {KEYS} keys, {PARTITIONS} partitions; \
             from the moment the commit returned to the moment a consumer in this process had the record, in milliseconds. \
             Producers do not notify, so the relay finds rows by polling. *Bare* is a producer with the same client settings and the \
             same consumer: from before the hand-over. The first {} rows are not counted.",
            crate::cli::demo::grouped(WARM_UP_ROWS)
        )],
        heads: vec![
            "what",
            "rows",
            "p50",
            "p95",
            "p99",
            "max",
            "p50 of bare",
            "relay CPU s",
            "PostgreSQL CPU s",
            "Kafka CPU s",
        ],
        rows: Vec::new(),
    };
    doing(&format!("latency, bare, {rows} records"));
    let bare = bare_latencies(harness, rows).await?;
    section.rows.push(line("bare", &bare, &bare));
    for profile in [Profile::Lean, Profile::Shared] {
        doing(&format!("latency, {profile}, {rows} rows"));
        let relayed = relay_latencies(harness, profile, rows).await?;
        section.rows.push(line(&format!("relay, {profile}"), &relayed, &bare));
    }
    Ok(vec![section])
}

/// Milliseconds in ascending order, and what it cost.
struct Latencies {
    milliseconds: Vec<f64>,
    cpu: Cpu,
}

impl Latencies {
    fn new(begun: &[Instant], arrived: &[Instant], cpu: Cpu) -> Self {
        let pairs = begun.iter().zip(arrived).skip(WARM_UP_ROWS);
        let mut milliseconds: Vec<f64> =
            pairs.map(|(begun, arrived)| arrived.saturating_duration_since(*begun).as_secs_f64() * 1e3).collect();
        milliseconds.sort_by(f64::total_cmp);
        Self { milliseconds, cpu }
    }

    /// The value that this share of the records does not exceed, in percent.
    fn percentile(&self, percent: usize) -> f64 {
        let rank = (self.milliseconds.len() * percent).div_ceil(100).max(1);
        self.milliseconds.get(rank - 1).copied().unwrap_or(f64::NAN)
    }
}

fn line(what: &str, of: &Latencies, bare: &Latencies) -> Vec<Cell> {
    vec![
        Cell::text(what),
        Cell::Number(of.milliseconds.len() as f64, 0),
        Cell::Number(of.percentile(50), 1),
        Cell::Number(of.percentile(95), 1),
        Cell::Number(of.percentile(99), 1),
        Cell::Number(of.percentile(100), 1),
        Cell::ratio(of.percentile(50), bare.percentile(50), 1),
        Cell::Number(of.cpu.relay, 1),
        Cell::Number(of.cpu.postgres, 1),
        Cell::Number(of.cpu.kafka, 1),
    ]
}

async fn relay_latencies(harness: &mut Harness, profile: Profile, rows: usize) -> Result<Latencies, String> {
    let brokers = harness.brokers().await?;
    let topic = harness.topic(PARTITIONS).await?;
    let scratch = Arc::new(harness.database(profile, &defaults(Policy::PerKeyHeadOfLine), Some(&brokers)).await?);
    let (relay, _) = relay(&scratch, kafka_publisher(&scratch.config)?)?;
    let stop = relay.stop_token();
    let (arrivals, _listening) = arrivals(&brokers, &topic, rows).await?;
    let running = tokio::spawn(relay.run());
    let measured = harness
        .measured(async {
            let begun = write(&scratch, &topic, rows).await?;
            Ok((begun, arrivals.await.map_err(|error| error.to_string())??))
        })
        .await;
    stop.cancel();
    let end = running.await.map_err(|error| error.to_string())?;
    let ((begun, arrived), cpu) = measured?;
    match end {
        End::Stopped { .. } => Ok(Latencies::new(&begun, &arrived, cpu)),
        other => Err(format!("the relay ended: {other:?}")),
    }
}

/// Writes rows at the pace; returns when each was committed.
async fn write(scratch: &Arc<Scratch>, topic: &str, rows: usize) -> Result<Vec<Instant>, String> {
    let start = Instant::now();
    let mut writers = Vec::new();
    for writer in 0..WRITERS {
        let (scratch, topic) = (Arc::clone(scratch), topic.to_owned());
        writers.push(tokio::spawn(async move {
            let session = scratch.session().await?;
            let mut committed = Vec::with_capacity(rows / WRITERS + 1);
            for number in (writer..rows).step_by(WRITERS) {
                tokio::time::sleep_until((start + due(number)).into()).await;
                let (id, key, payload) = (number.to_string(), format!("key-{}", number % KEYS), payload(number));
                let params = [
                    (&id as _, Type::TEXT),
                    (&topic as _, Type::TEXT),
                    (&key as _, Type::TEXT),
                    (&payload as _, Type::BYTEA),
                ];
                session.execute(INSERT, &params, LAST_MAX).await.map_err(|error| error.to_string())?;
                committed.push((number, Instant::now()));
            }
            Ok::<_, String>(committed)
        }));
    }
    let mut all = vec![start; rows];
    for writer in writers {
        for (number, at) in writer.await.map_err(|error| error.to_string())?? {
            all[number] = at;
        }
    }
    Ok(all)
}

async fn bare_latencies(harness: &mut Harness, rows: usize) -> Result<Latencies, String> {
    let brokers = harness.brokers().await?;
    let topic = harness.topic(PARTITIONS).await?;
    let config = harness.database(Profile::Lean, "", Some(&brokers)).await?.config;
    let (arrivals, _listening) = arrivals(&brokers, &topic, rows).await?;
    let ((begun, arrived), cpu) = harness
        .measured(async {
            let produced = spawn_blocking(move || {
                let producer = bare::producer(&config.kafka)?;
                let start = Instant::now();
                let mut begun = Vec::with_capacity(rows);
                for number in 0..rows {
                    std::thread::sleep((start + due(number)).saturating_duration_since(Instant::now()));
                    let (id, key, payload) = (number.to_string(), format!("key-{}", number % KEYS), payload(number));
                    let headers = OwnedHeaders::new().insert(Header { key: MESSAGE_ID_HEADER, value: Some(&id) });
                    let record = BaseRecord::to(&topic).key(&key).payload(&payload).headers(headers);
                    begun.push(Instant::now());
                    producer.send(record).map_err(|(error, _)| error.to_string())?;
                }
                producer.flush(LAST_MAX).map_err(|error| error.to_string())?;
                Ok::<_, String>(begun)
            });
            let begun = produced.await.map_err(|error| error.to_string())??;
            Ok((begun, arrivals.await.map_err(|error| error.to_string())??))
        })
        .await?;
    Ok(Latencies::new(&begun, &arrived, cpu))
}

/// When a row is due after the first.
fn due(number: usize) -> Duration {
    Duration::from_secs(1) / PACE * u32::try_from(number).unwrap_or(u32::MAX)
}

/// Digits and letters that do not compress well.
fn payload(number: usize) -> Vec<u8> {
    let mut text = String::with_capacity(PAYLOAD_BYTES + 32);
    while text.len() < PAYLOAD_BYTES {
        text += &uuid::Uuid::new_v4().simple().to_string();
    }
    text.truncate(PAYLOAD_BYTES);
    debug_assert!(text.len() == PAYLOAD_BYTES, "record {number}");
    text.into_bytes()
}

/// Ends the consumer when whoever waits for it gives up.
struct Listening(Arc<AtomicBool>);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

type Arrivals = JoinHandle<Result<Vec<Instant>, String>>;

/// A consumer that already listens when this returns; it ends with when each record was first seen.
async fn arrivals(brokers: &str, topic: &str, rows: usize) -> Result<(Arrivals, Listening), String> {
    let (brokers, topic) = (brokers.to_owned(), topic.to_owned());
    let consumer = spawn_blocking(move || {
        let consumer = bare::consumer(&brokers, &topic, PARTITIONS, Offset::Beginning)?;
        // It answers from every partition, so it is connected.
        for partition in 0..PARTITIONS {
            consumer.fetch_watermarks(&topic, partition, LAST_MAX).map_err(|error| error.to_string())?;
        }
        Ok::<_, String>(consumer)
    });
    let consumer = consumer.await.map_err(|error| error.to_string())??;
    let is_over = Arc::new(AtomicBool::new(false));
    let listening = Listening(Arc::clone(&is_over));
    Ok((spawn_blocking(move || listen(&consumer, rows, &is_over)), listening))
}

fn listen(consumer: &BaseConsumer, rows: usize, is_over: &AtomicBool) -> Result<Vec<Instant>, String> {
    let until = Instant::now() + due(rows) + LAST_MAX;
    let mut seen: Vec<Option<Instant>> = vec![None; rows];
    let mut missing = rows;
    while missing > 0 {
        if Instant::now() > until || is_over.load(Ordering::Relaxed) {
            return Err(format!("{missing} of {rows} records did not arrive"));
        }
        let Some(record) = consumer.poll(Duration::from_millis(100)) else { continue };
        let record = record.map_err(|error| error.to_string())?;
        let number = number(&record).filter(|number| *number < rows).ok_or("a record that nobody wrote")?;
        if seen[number].replace(Instant::now()).is_none() {
            missing -= 1;
        }
    }
    Ok(seen.into_iter().flatten().collect())
}

/// The number of a row, which is its message id.
fn number(record: &BorrowedMessage<'_>) -> Option<usize> {
    let header = record.headers()?.iter().find(|header| header.key == MESSAGE_ID_HEADER)?;
    std::str::from_utf8(header.value?).ok()?.parse().ok()
}
