//! librdkafka's error codes, matched once: what each of them says about a record that was alone in its batch.
//!
//! Nothing here ever keeps state: whose fault a code is in the light of everything else on the cluster is for
//! [`super::faults`] to say. The texts name a side, the topic, sizes and settings, never a key, a value or a header.

use rdkafka::types::RDKafkaErrorCode as Code;

/// What a code says of one record, with the stable code word that texts and `rejection_code` start with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Class {
    /// The record can never be accepted: only another row could mend that.
    Record(&'static str),
    /// Its topic or partition takes nothing now; it may later.
    Topic(&'static str),
    /// The cluster, our access to it or our clock.
    Cluster(&'static str),
    /// No verdict in time. Whose fault that is depends on what else was acknowledged meanwhile.
    Late,
    /// This client is of no more use; another one may well write the record.
    Fatal,
    /// We let go of it ourselves.
    Purged,
    /// librdkafka counts it as acknowledged because a later one was, without having heard of it: no acknowledgement at all.
    Unproven,
    /// The client holds as much as it may: back-pressure, nothing wrong with the record.
    QueueFull,
    /// Anything else, under a code word made of its name.
    Unlisted(String),
}

/// Sorts a code.
#[must_use]
pub fn classify(code: Code) -> Class {
    match code {
        // Content that the row fixes. Kafka refuses these before it writes, whatever the state of the cluster.
        Code::MessageSizeTooLarge => Class::Record("kafka.message_too_large"),
        Code::MessageBatchTooLarge => Class::Record("kafka.batch_too_large"),
        Code::InvalidRecord => Class::Record("kafka.invalid_record"),
        Code::InvalidTopic => Class::Record("kafka.invalid_topic"),
        Code::UnsupportedForMessageFormat => Class::Record("kafka.unsupported_message_format"),

        Code::TopicAuthorizationFailed => Class::Topic("kafka.topic_authorization_failed"),
        Code::UnknownTopic | Code::UnknownTopicOrPartition | Code::UnknownTopicId => {
            Class::Topic("kafka.unknown_topic")
        }
        Code::UnknownPartition => Class::Topic("kafka.unknown_partition"),
        Code::NotEnoughReplicas | Code::NotEnoughReplicasAfterAppend | Code::ISRInsufficient => {
            Class::Topic("kafka.not_enough_replicas")
        }
        Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::ReplicaNotAvailable
        | Code::FencedLeaderEpoch
        | Code::UnknownLeaderEpoch
        | Code::EligibleLeadersNotAvailable => Class::Topic("kafka.leader_not_available"),
        Code::KafkaStorageError | Code::LogDirNotFound => Class::Topic("kafka.storage_error"),
        Code::ThrottlingQuotaExceeded => Class::Topic("kafka.quota_exceeded"),

        Code::InvalidTimestamp => Class::Cluster("kafka.invalid_timestamp"),
        Code::BrokerTransportFailure
        | Code::NetworkException
        | Code::AllBrokersDown
        | Code::Resolve
        | Code::BrokerNotAvailable
        | Code::UnknownBroker
        | Code::RebootstrapRequired => Class::Cluster("kafka.unreachable"),
        Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::UnsupportedSASLMechanism
        | Code::IllegalSASLState
        | Code::SecurityDisabled => Class::Cluster("kafka.authentication_failed"),
        Code::SSL => Class::Cluster("kafka.tls_failed"),
        Code::ClusterAuthorizationFailed | Code::TransactionalIdAuthorizationFailed => {
            Class::Cluster("kafka.cluster_authorization_failed")
        }
        // What the whole client speaks, no row could mend: counting it against rows would kill the backlog.
        Code::UnsupportedVersion | Code::UnsupportedFeature | Code::UnsupportedCompressionType => {
            Class::Cluster("kafka.unsupported_by_broker")
        }

        Code::MessageTimedOut | Code::OperationTimedOut | Code::TimedOutQueue | Code::RequestTimedOut => Class::Late,

        Code::Fatal
        | Code::GaplessGuarantee
        | Code::OutOfOrderSequenceNumber
        | Code::UnknownProducerId
        | Code::InvalidProducerEpoch
        | Code::InvalidProducerIdMapping
        | Code::ProducerFenced
        | Code::Fenced
        | Code::Inconsistent => Class::Fatal,

        Code::PurgeQueue | Code::PurgeInflight | Code::BrokerDestroy | Code::DestroyBroker => Class::Purged,
        // Ours: nothing that librdkafka reports of a record.
        Code::NoOffset => Class::Unproven,
        Code::QueueFull => Class::QueueFull,
        // The enum belongs to the binding and is open: what nobody has sorted spends an attempt.
        unlisted => Class::Unlisted(code_word(unlisted)),
    }
}

/// Whether a fault of a topic's is its partition's alone.
#[must_use]
pub fn is_of_partition(code: Code) -> bool {
    matches!(
        code,
        Code::NotEnoughReplicas
            | Code::NotEnoughReplicasAfterAppend
            | Code::ISRInsufficient
            | Code::LeaderNotAvailable
            | Code::NotLeaderForPartition
            | Code::ReplicaNotAvailable
            | Code::FencedLeaderEpoch
            | Code::UnknownLeaderEpoch
            | Code::EligibleLeadersNotAvailable
            | Code::KafkaStorageError
            | Code::LogDirNotFound
    )
}

/// `PolicyViolation` → `kafka.policy_violation`.
fn code_word(code: Code) -> String {
    let mut word = String::from("kafka.");
    for character in format!("{code:?}").chars().filter(char::is_ascii_alphanumeric).take(50) {
        if character.is_ascii_uppercase() && !word.ends_with('.') {
            word.push('_');
        }
        word.push(character.to_ascii_lowercase());
    }
    word
}

/// Who said it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// librdkafka, before anything was sent.
    Client,
    /// A broker, or librdkafka on the broker's behalf.
    Broker,
}

/// What a text can say about the record it is about.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    /// Who refused it.
    pub side: Side,
    /// Its topic.
    pub topic: &'a str,
    /// Octets of key, value and headers.
    pub octets: usize,
    /// `[kafka] message_bytes_max`.
    pub message_bytes_max: usize,
    /// The topic's `max.message.bytes`, when it could be looked up.
    pub topic_bytes_max: Option<usize>,
}

impl About<'_> {
    fn side(&self) -> &'static str {
        match self.side {
            Side::Client => "client",
            Side::Broker => "broker",
        }
    }
}

/// What stands after the code word of a rejection: side, topic, size and limit, and what would have to change.
#[must_use]
pub fn rejection_detail(code: Code, about: &About<'_>) -> String {
    let (side, topic, octets) = (about.side(), about.topic, about.octets);
    match (code, about.side) {
        (Code::MessageSizeTooLarge, Side::Client) => format!(
            "{side}: a record of {octets} octets for topic {topic} exceeds [kafka] message_bytes_max = {} (librdkafka's \
             message.max.bytes, which counts framing too); raise it, and the topic's max.message.bytes with it",
            about.message_bytes_max
        ),
        (Code::MessageSizeTooLarge, Side::Broker) => {
            let limit = about.topic_bytes_max.map(|limit| format!(" = {limit}")).unwrap_or_default();
            format!(
                "{side}: a record of {octets} octets exceeds max.message.bytes{limit} of topic {topic} (default: the broker's \
                 message.max.bytes); raise it there, or the producer has to write smaller payloads"
            )
        }
        (Code::MessageBatchTooLarge, _) => format!(
            "{side}: a record of {octets} octets is larger than a log segment of topic {topic}; raise its segment.bytes, or the \
             producer has to write smaller payloads"
        ),
        (Code::InvalidRecord, _) => format!(
            "{side}: topic {topic} does not take this record; a compacted topic (cleanup.policy) takes none without a key: the \
             producer has to set message_key"
        ),
        (Code::InvalidTopic, _) => format!(
            "{side}: topic {topic} may not be written to (an illegal or an internal name); the producer has to write another \
             destination"
        ),
        (Code::UnsupportedForMessageFormat, _) => {
            format!("{side}: the message format of topic {topic} has no headers; raise its message.format.version")
        }
        _ => format!("{side}: topic {topic}: {code}"),
    }
}

/// The whole text of a fault: code word, side, topic, what was said, what to do.
#[must_use]
pub fn fault_text(word: &str, code: Code, about: &About<'_>) -> String {
    let (side, topic) = (about.side(), about.topic);
    let remedy = match word {
        "kafka.topic_authorization_failed" => "; allow this user to WRITE to and DESCRIBE it",
        "kafka.unknown_topic" => "; create it, or let the brokers do so (auto.create.topics.enable)",
        "kafka.unknown_partition" => "; its partitions changed, the relay looks again",
        "kafka.not_enough_replicas" => "; its in-sync replicas are fewer than min.insync.replicas: bring brokers back",
        "kafka.leader_not_available" => "; a partition has no leader: bring its brokers back",
        "kafka.storage_error" => "; the broker's log directory has trouble: see the broker's log",
        "kafka.quota_exceeded" => "; raise the client's quota",
        "kafka.invalid_timestamp" => {
            "; the database's clock is too far from the broker's (message.timestamp.before.max.ms, …after.max.ms): set the clock"
        }
        "kafka.unreachable" => "; check [kafka] brokers, the network and the brokers",
        "kafka.authentication_failed" => "; check sasl.* in [kafka.properties]",
        "kafka.tls_failed" => "; check ssl.* in [kafka.properties]",
        "kafka.cluster_authorization_failed" => "; allow this user IDEMPOTENT_WRITE on the cluster",
        "kafka.unsupported_by_broker" => "; check compression.type in [kafka.properties] and the brokers' version",
        _ => "",
    };
    format!("{word}: {side}: topic {topic}: {code}{remedy}")
}
