//! What `doctor` asks of the cluster: its brokers and what they speak, its topics, their settings, what we may do with them.
//!
//! Nothing here ever changes anything: topics are described by requests that never create one. Every wait is bounded, and nothing here
//! says what a fact means.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::message::DeliveryResult;
use rdkafka::producer::{Producer as _, ProducerContext, ThreadedProducer};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

use super::client::{Blueprint, ClientError, QuietContext};
use super::describe::{self, Node};
use crate::config;

/// How long the cluster may take to answer the first question: TLS, SASL and a dead bootstrap server are in it.
const CLUSTER_MAX: Duration = Duration::from_secs(10);
/// How long any other answer may take.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// How long all of it may take. What is not known by then stays unknown.
const ALL_MAX: Duration = Duration::from_secs(60);
/// Topics described by one request.
const TOPICS_OF_A_REQUEST: usize = 100;

/// Why the cluster could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// No client could be built.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Nobody answered.
    #[error("{0}")]
    Unreachable(String),
}

/// What the cluster says of itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// The brokers it lists.
    pub brokers: Vec<Broker>,
    /// The topics that were asked about, in the order asked.
    pub topics: Vec<Topic>,
}

/// A broker that the cluster lists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broker {
    /// Its id.
    pub id: i32,
    /// Where the cluster says that it listens.
    pub address: String,
    /// Whether it answers there, or why not.
    pub answers: Result<(), String>,
    /// Its settings, when we may see them.
    pub settings: Option<Settings>,
    /// Which versions of the protocol it speaks, when it told.
    pub speaks: Option<Protocol>,
}

/// Settings by name.
pub type Settings = BTreeMap<String, String>;

/// Versions of the requests that the relay depends on, lowest and highest.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Protocol {
    /// Of Produce.
    pub produce: (i16, i16),
    /// Of Fetch.
    pub fetch: (i16, i16),
}

/// A topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topic {
    /// Its name.
    pub name: String,
    /// What it is made of, or why that cannot be said.
    pub description: Result<Description, Hidden>,
    /// Its settings, or why they cannot be seen.
    pub settings: Result<Settings, Hidden>,
}

/// Why nothing can be said of a topic.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Hidden {
    /// There is none of this name.
    #[error("it does not exist")]
    Unknown,
    /// We may not see it.
    #[error("we may not see it")]
    Forbidden,
    /// Anything else, in librdkafka's words.
    #[error("{0}")]
    Other(String),
}

impl Hidden {
    fn of(code: Code) -> Self {
        match code {
            Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownTopicId => Self::Unknown,
            Code::TopicAuthorizationFailed | Code::ClusterAuthorizationFailed => Self::Forbidden,
            code => Self::Other(code.to_string()),
        }
    }
}

/// What a topic is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Whether we may write to it; `None` when the cluster does not say.
    pub may_write: Option<bool>,
    /// Its partitions.
    pub partitions: Vec<Partition>,
}

/// A partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partition {
    /// Its number.
    pub id: i32,
    /// Whether it has a leader.
    pub has_leader: bool,
    /// Brokers that should have a copy.
    pub replicas: usize,
    /// Brokers whose copy is complete.
    pub in_sync: usize,
}

/// Asks the cluster about itself and about these topics.
///
/// # Errors
/// No client can be built, or nobody answers.
pub async fn inspect(
    kafka: &config::Kafka,
    relay: &config::Relay,
    topics: Vec<String>,
) -> Result<Cluster, InspectError> {
    let blueprint = Blueprint::new(kafka, relay);
    let runtime = Handle::current();
    let asking = spawn_blocking(move || ask(&blueprint, &runtime, topics));
    let silent = || InspectError::Unreachable(format!("the cluster did not answer every question within {ALL_MAX:?}"));
    match tokio::time::timeout(ALL_MAX, asking).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(_)) | Err(_) => Err(silent()),
    }
}

fn ask(blueprint: &Blueprint, runtime: &Handle, topics: Vec<String>) -> Result<Cluster, InspectError> {
    // A producer, as the relay is one; its thread brings what it logs, and why nobody answers, to the context.
    let producer: ThreadedProducer<Curious> = blueprint.curious(Curious::default())?;
    let admin: AdminClient<QuietContext> = blueprint.question()?;
    let client = producer.client();
    let deadline = Instant::now() + CLUSTER_MAX;
    let nodes = describe::cluster(client, CLUSTER_MAX).map_err(|code| {
        let reason = client.context().quiet.reason();
        InspectError::Unreachable(
            reason.unwrap_or_else(|| format!("no broker answered within {CLUSTER_MAX:?}: {code}")),
        )
    })?;
    let options = AdminOptions::new().request_timeout(Some(ANSWER_MAX));
    let brokers = runtime.block_on(join_all(nodes.into_iter().map(|node| ask_broker(&admin, &options, node))));
    // Every listed broker is connected to while the others are asked; those that answered have told what they speak.
    let until = deadline.max(Instant::now());
    let answering = brokers.iter().find(|broker| broker.answers.is_ok()).map_or(-1, |broker| broker.id);
    // A broker that answers: the default is the controller, whether it answers or not.
    let topic_options = AdminOptions::new().request_timeout(Some(ANSWER_MAX)).broker_id(Some(answering));
    let mut described = Vec::with_capacity(topics.len());
    for some in topics.chunks(TOPICS_OF_A_REQUEST) {
        let descriptions = describe::topics(client, answering, some, ANSWER_MAX);
        let resources: Vec<_> = some.iter().map(|topic| ResourceSpecifier::Topic(topic)).collect();
        let settings = runtime.block_on(admin.describe_configs(&resources, &topic_options));
        for (index, name) in some.iter().enumerate() {
            let description = match &descriptions {
                Ok(found) => found.get(name).cloned().unwrap_or(Err(Code::UnknownTopicOrPartition)).map_err(Hidden::of),
                Err(code) => Err(Hidden::of(*code)),
            };
            let settings = match &settings {
                Ok(found) => match found.get(index) {
                    // A topic always has settings: none are those that we may not see.
                    Some(Ok(one)) if one.entries.is_empty() => Err(Hidden::Forbidden),
                    Some(one) => one.as_ref().map(read).map_err(|code| Hidden::of(*code)),
                    None => Err(Hidden::of(Code::Unknown)),
                },
                Err(error) => Err(Hidden::of(code_of(error))),
            };
            described.push(Topic { name: name.clone(), description, settings });
        }
    }
    let speaks = client.context().wait(&brokers, until);
    let with_protocol = |broker: Broker| Broker { speaks: speaks.get(&broker.address).copied(), ..broker };
    Ok(Cluster { brokers: brokers.into_iter().map(with_protocol).collect(), topics: described })
}

/// Settings of a broker are asked of that broker itself, so an answer shows that it can be reached, whatever the answer is.
async fn ask_broker(admin: &AdminClient<QuietContext>, options: &AdminOptions, node: Node) -> Broker {
    let resource = ResourceSpecifier::Broker(node.id);
    let answer = admin.describe_configs([&resource], options).await;
    let (answers, settings) = match answer.map(|found| found.into_iter().next()) {
        // Without the right to see them it answers with none.
        Ok(Some(Ok(resource))) => (Ok(()), Some(read(&resource)).filter(|settings| !settings.is_empty())),
        Ok(Some(Err(_)) | None) => (Ok(()), None),
        Err(error) => match code_of(&error) {
            Code::ClusterAuthorizationFailed | Code::UnsupportedFeature | Code::UnsupportedVersion => (Ok(()), None),
            code => (Err(code.to_string()), None),
        },
    };
    Broker { id: node.id, address: node.address, answers, settings, speaks: None }
}

fn code_of(error: &KafkaError) -> Code {
    error.rdkafka_error_code().unwrap_or(Code::Unknown)
}

fn read(resource: &ConfigResource) -> Settings {
    let entries = resource.entries.iter();
    entries.filter_map(|entry| Some((entry.name.clone(), entry.value.clone()?))).collect()
}

/// Keeps what brokers say of the protocol they speak, which librdkafka only logs.
#[derive(Default)]
struct Curious {
    quiet: QuietContext,
    /// By `host:port`.
    heard: Mutex<BTreeMap<String, Protocol>>,
}

impl Curious {
    /// What was heard, as soon as every broker that answers has told, or when the time is over.
    fn wait(&self, brokers: &[Broker], until: Instant) -> BTreeMap<String, Protocol> {
        const LOOK_INTERVAL: Duration = Duration::from_millis(20);
        loop {
            let heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let all = brokers
                .iter()
                .filter(|broker| broker.answers.is_ok())
                .all(|broker| heard.contains_key(&broker.address));
            if all || Instant::now() >= until {
                return heard;
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

impl ProducerContext for Curious {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &DeliveryResult<'_>, (): ()) {}
}

impl ClientContext for Curious {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, text: &str) {
        if let Some((broker, key, versions)) = api_line(text) {
            let mut heard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
            let protocol = heard.entry(broker.to_owned()).or_default();
            match key {
                "Produce" => protocol.produce = versions,
                "Fetch" => protocol.fetch = versions,
                _ => {}
            }
        }
        self.quiet.log(level, facility, text);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.quiet.error(error, reason);
    }
}

/// Broker, request and its versions of `[thrd:…]: HOST:PORT/ID:   ApiKey Produce (0) Versions 3..12`; with TLS or SASL the protocol stands
/// before the host, as `sasl_ssl://`.
fn api_line(text: &str) -> Option<(&str, &str, (i16, i16))> {
    let (before, rest) = text.split_once(":   ApiKey ")?;
    let broker = before.rsplit(' ').next()?;
    let address = broker.split_once("://").map_or(broker, |(_, address)| address).split('/').next()?;
    let (key, rest) = rest.split_once(" (")?;
    let (lowest, highest) = rest.split_once(" Versions ")?.1.split_once("..")?;
    Some((address, key, (lowest.parse().ok()?, highest.trim().parse().ok()?)))
}
