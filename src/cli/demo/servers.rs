//! The demo's two servers: its own, those it was given, or librdkafka's in-process broker.
//!
//! Nothing here ever touches what was there before: on servers that were given, the demo has a schema and topics of its own
//! names, and removes both.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::RDKafkaRespErr;

use super::services::{Installation, Kafka, KafkaOptions, Postgres, PostgresOptions};
use crate::store::{Db, Profile, quoted, table_sql};

/// How long one request to the cluster may take.
const REQUEST_MAX: Duration = Duration::from_secs(30);
/// How long one statement may take.
const STATEMENT_MAX: Duration = Duration::from_secs(30);
/// How long cleaning up on given servers may take in all.
const CLEAN_UP_MAX: Duration = Duration::from_secs(10);

/// Which Kafka the demo uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum BrokerChoice {
    /// Its own.
    Own,
    /// librdkafka's in-process broker.
    Mock,
    /// This one: `host:port` by commas.
    Given(String),
}

/// The servers, running.
pub(super) struct Servers {
    pub database_url: String,
    pub brokers: String,
    pub database_is_given: bool,
    kafka: Cluster,
    /// Dropped last: a relay that loses its database first would complain.
    _postgres: Option<Postgres>,
}

enum Cluster {
    Own(#[expect(dead_code, reason = "held so that it runs")] Kafka),
    Mock(MockCluster<'static, DefaultProducerContext>),
    Given,
}

impl Servers {
    /// Starts what was not given; both at once.
    ///
    /// # Errors
    /// With the server's log, or what to run first.
    pub(super) async fn start(database_url: Option<&str>, broker: BrokerChoice) -> Result<Self, String> {
        let installation = if database_url.is_none() || broker == BrokerChoice::Own {
            Some(Installation::locate(None).map_err(|error| error.to_string())?)
        } else {
            None
        };
        let wants_kafka = (broker == BrokerChoice::Own).then(|| installation.clone()).flatten();
        let kafka = tokio::task::spawn_blocking(move || {
            wants_kafka.map(|installation| Kafka::start(&installation, KafkaOptions::default())).transpose()
        });
        let wants_postgres = if database_url.is_none() { installation } else { None };
        let postgres = tokio::task::spawn_blocking(move || {
            // As users have it: what is committed is on disk.
            let options = PostgresOptions { fsync: true, ..PostgresOptions::default() };
            wants_postgres.map(|installation| Postgres::start(&installation, options)).transpose()
        });
        let (postgres, kafka) = tokio::join!(postgres, kafka);
        let ended = |error: tokio::task::JoinError| error.to_string();
        let postgres = postgres.map_err(ended)?.map_err(|error| error.to_string())?;
        let kafka = kafka.map_err(ended)?.map_err(|error| error.to_string())?;
        let (brokers, kafka) = match (broker, kafka) {
            (BrokerChoice::Given(brokers), _) => (brokers, Cluster::Given),
            (BrokerChoice::Mock, _) => {
                let mock = MockCluster::new(1).map_err(|error| format!("librdkafka's mock broker: {error}"))?;
                (mock.bootstrap_servers(), Cluster::Mock(mock))
            }
            (BrokerChoice::Own, kafka) => {
                let kafka = kafka.expect("started above");
                (kafka.bootstrap(), Cluster::Own(kafka))
            }
        };
        let own_url = || postgres.as_ref().map(|postgres| postgres.url("postgres"));
        Ok(Self {
            database_url: database_url.map(str::to_owned).or_else(own_url).expect("given or started"),
            database_is_given: database_url.is_some(),
            brokers,
            kafka,
            _postgres: postgres,
        })
    }

    /// Whether topics have limits: the mock broker takes everything.
    pub(super) fn has_limits(&self) -> bool {
        match self.kafka {
            Cluster::Own(_) | Cluster::Given => true,
            Cluster::Mock(_) => false,
        }
    }

    /// Whether one broker's clock stamps every record as it is appended.
    pub(super) fn has_one_clock(&self) -> bool {
        match self.kafka {
            Cluster::Own(_) => true,
            Cluster::Mock(_) | Cluster::Given => false,
        }
    }

    /// How people call the two.
    pub(super) fn describe(&self) -> String {
        let database = if self.database_is_given { "the given database" } else { "PostgreSQL" };
        let kafka = match self.kafka {
            Cluster::Own(_) => "Kafka",
            Cluster::Mock(_) => "librdkafka's mock broker",
            Cluster::Given => "the given Kafka",
        };
        format!("{database} and {kafka} ({})", self.brokers)
    }

    /// Creates topics whose records the broker stamps as it appends them.
    ///
    /// # Errors
    /// What the cluster says.
    pub(super) async fn create_topics(
        &self,
        topics: &[(String, i32, Option<usize>)],
        clean_up: &CleanUp,
    ) -> Result<(), String> {
        if let Cluster::Mock(mock) = &self.kafka {
            for (topic, partitions, _) in topics {
                mock.topic_error(topic, RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR)
                    .and_then(|()| mock.create_topic(topic, *partitions, 1))
                    // It is there already when it was made to fail before.
                    .or_else(|_| mock.topic_error(topic, RDKafkaRespErr::RD_KAFKA_RESP_ERR_NO_ERROR))
                    .map_err(|error| format!("create the topic {topic}: {error}"))?;
            }
            return Ok(());
        }
        let admin = admin(&self.brokers)?;
        let limits: Vec<Option<String>> =
            topics.iter().map(|(_, _, limit)| limit.map(|bytes| bytes.to_string())).collect();
        let new: Vec<NewTopic<'_>> = topics
            .iter()
            .zip(&limits)
            .map(|((topic, partitions, _), limit)| {
                // The cluster's own number of replicas.
                let new = NewTopic::new(topic, *partitions, TopicReplication::Fixed(-1))
                    .set("message.timestamp.type", "LogAppendTime");
                match limit {
                    Some(limit) => new.set("max.message.bytes", limit),
                    None => new,
                }
            })
            .collect();
        if matches!(self.kafka, Cluster::Given) {
            clean_up.topics(&self.brokers, topics.iter().map(|(topic, _, _)| topic.clone()));
        }
        let results = admin.create_topics(&new, &options()).await.map_err(|error| format!("create topics: {error}"))?;
        for result in results {
            result.map_err(|(topic, code)| format!("create the topic {topic}: {code}"))?;
        }
        Ok(())
    }

    /// Makes sure that a topic is not there.
    ///
    /// # Errors
    /// Only the mock broker can refuse.
    pub(super) fn withhold_topic(&self, topic: &str) -> Result<(), String> {
        match &self.kafka {
            // It would make a topic that is asked for.
            Cluster::Mock(mock) => mock
                .topic_error(topic, RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART)
                .map_err(|error| format!("withhold the topic {topic}: {error}")),
            Cluster::Own(_) | Cluster::Given => Ok(()),
        }
    }
}

fn admin(brokers: &str) -> Result<AdminClient<DefaultClientContext>, String> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers);
    config.create().map_err(|error| format!("an admin client for {brokers}: {error}"))
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(REQUEST_MAX)).operation_timeout(Some(REQUEST_MAX))
}

/// Makes the demo's schema and table on a database that was given.
///
/// # Errors
/// What the database says.
pub(super) async fn create_schema(db: &Db, schema: &str, table: &str, clean_up: &CleanUp) -> Result<(), String> {
    let (session, _) = db.dedicated().await.map_err(|error| error.to_string())?;
    clean_up.schema(db.clone(), schema);
    let sql = format!("create schema {};\n{}", quoted(schema), table_sql(Profile::Lean, schema, table));
    session.batch(&sql, STATEMENT_MAX).await.map_err(|error| format!("create the schema {schema}: {error}"))
}

/// What has to be removed from given servers, however the demo ends.
#[derive(Clone, Default)]
pub(super) struct CleanUp(Arc<Mutex<Leftovers>>);

#[derive(Default)]
struct Leftovers {
    schema: Option<(Db, String)>,
    topics: Option<(String, Vec<String>)>,
}

impl CleanUp {
    fn schema(&self, db: Db, schema: &str) {
        self.lock().schema = Some((db, schema.to_owned()));
    }

    fn topics(&self, brokers: &str, topics: impl Iterator<Item = String>) {
        self.lock().topics.get_or_insert_with(|| (brokers.to_owned(), Vec::new())).1.extend(topics);
    }

    /// Removes it, within a bound; returns what could not be removed.
    pub(super) async fn run(&self) -> Vec<String> {
        let Leftovers { schema, topics } = std::mem::take(&mut *self.lock());
        let mut left = Vec::new();
        let named = |what: String| move |error: String| format!("{what} could not be removed: {error}");
        if let Some((db, schema)) = schema {
            let drop = async {
                let (session, _) = db.dedicated().await.map_err(|error| error.to_string())?;
                let sql = format!("drop schema if exists {} cascade", quoted(&schema));
                session.batch(&sql, CLEAN_UP_MAX).await.map_err(|error| error.to_string())
            };
            left.extend(bounded(drop).await.map_err(named(format!("the schema {schema}"))).err());
        }
        if let Some((brokers, topics)) = topics {
            let names: Vec<&str> = topics.iter().map(String::as_str).collect();
            let delete = async {
                let admin = admin(&brokers)?;
                let results = admin.delete_topics(&names, &options()).await.map_err(|error| error.to_string())?;
                for result in results {
                    match result {
                        // It was to be made later, and the demo ended before.
                        Ok(_)
                        | Err((_, RDKafkaErrorCode::UnknownTopicOrPartition | RDKafkaErrorCode::UnknownTopic)) => {}
                        Err((topic, code)) => return Err(format!("{topic}: {code}")),
                    }
                }
                Ok(())
            };
            left.extend(bounded(delete).await.map_err(named(format!("the topics {}", names.join(", ")))).err());
        }
        left
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Leftovers> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn bounded(work: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    match tokio::time::timeout(CLEAN_UP_MAX, work).await {
        Ok(done) => done,
        Err(_) => Err(format!("no answer within {CLEAN_UP_MAX:?}")),
    }
}
