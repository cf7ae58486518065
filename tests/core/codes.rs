//! What librdkafka's codes mean for a record that was alone in its batch, and how the texts read.

use keiro_relay::domain::outcome::is_rejection_code;
use keiro_relay::publish::kafka::codes::{About, Class, Side, classify, fault_text, rejection_detail};
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::types::RDKafkaRespErr;

/// Every code that librdkafka has a name for.
fn every_code() -> Vec<Code> {
    (-200..200).filter_map(|number| RDKafkaRespErr::try_from(number).ok()).map(Code::from).collect()
}

fn about(side: Side) -> About<'static> {
    About { side, topic: "orders", octets: 1_500_123, message_bytes_max: 1_000_000, topic_bytes_max: None }
}

#[test]
fn every_code_has_one_class_and_a_code_word_that_can_be_stored() {
    let codes = every_code();
    assert!(codes.len() > 150, "{} codes", codes.len());
    for code in codes {
        let word = match classify(code) {
            Class::Record(word) | Class::Topic(word) | Class::Cluster(word) => word.to_owned(),
            Class::Unlisted(word) => word,
            Class::Late | Class::Fatal | Class::Purged | Class::Unproven | Class::QueueFull => continue,
        };
        assert!(word.starts_with("kafka."), "{code:?}: {word}");
        assert!(is_rejection_code(&word), "{code:?}: {word}");
    }
}

/// The whole list, so that a code that is moved between classes shows here: the wrong class kills a backlog or blocks a lane.
#[test]
fn only_content_that_the_row_fixes_is_the_record_s_fault() {
    let records = every_code().into_iter().filter_map(|code| match classify(code) {
        Class::Record(word) => Some((code, word)),
        _ => None,
    });
    let mut records: Vec<_> = records.map(|(code, word)| format!("{code:?} {word}")).collect();
    records.sort();
    let expected = [
        "InvalidRecord kafka.invalid_record",
        "InvalidTopic kafka.invalid_topic",
        "MessageBatchTooLarge kafka.batch_too_large",
        "MessageSizeTooLarge kafka.message_too_large",
        "UnsupportedForMessageFormat kafka.unsupported_message_format",
    ];
    assert_eq!(records, expected);
}

#[test]
fn the_table_of_faults() {
    use Class::{Cluster, Fatal, Late, Purged, QueueFull, Topic, Unlisted};
    let cases = [
        (Code::TopicAuthorizationFailed, Topic("kafka.topic_authorization_failed")),
        (Code::UnknownTopic, Topic("kafka.unknown_topic")),
        (Code::UnknownTopicOrPartition, Topic("kafka.unknown_topic")),
        (Code::UnknownPartition, Topic("kafka.unknown_partition")),
        (Code::NotEnoughReplicas, Topic("kafka.not_enough_replicas")),
        (Code::NotEnoughReplicasAfterAppend, Topic("kafka.not_enough_replicas")),
        (Code::LeaderNotAvailable, Topic("kafka.leader_not_available")),
        (Code::InvalidTimestamp, Cluster("kafka.invalid_timestamp")),
        (Code::BrokerTransportFailure, Cluster("kafka.unreachable")),
        (Code::AllBrokersDown, Cluster("kafka.unreachable")),
        (Code::Authentication, Cluster("kafka.authentication_failed")),
        (Code::SaslAuthenticationFailed, Cluster("kafka.authentication_failed")),
        (Code::ClusterAuthorizationFailed, Cluster("kafka.cluster_authorization_failed")),
        (Code::MessageTimedOut, Late),
        (Code::RequestTimedOut, Late),
        (Code::GaplessGuarantee, Fatal),
        (Code::Fatal, Fatal),
        (Code::OutOfOrderSequenceNumber, Fatal),
        (Code::UnknownProducerId, Fatal),
        (Code::PurgeQueue, Purged),
        (Code::PurgeInflight, Purged),
        (Code::QueueFull, QueueFull),
        (Code::PolicyViolation, Unlisted("kafka.policy_violation".into())),
        (Code::InvalidDifferentRecord, Unlisted("kafka.invalid_different_record".into())),
        (Code::Unknown, Unlisted("kafka.unknown".into())),
    ];
    for (code, class) in cases {
        assert_eq!(classify(code), class, "{code:?}");
    }
}

#[test]
fn texts_name_side_topic_size_limit_and_what_to_change() {
    let client = rejection_detail(Code::MessageSizeTooLarge, &about(Side::Client));
    assert_eq!(
        client,
        "client: a record of 1500123 octets for topic orders exceeds [kafka] message_bytes_max = 1000000 (librdkafka's \
         message.max.bytes, which counts framing too); raise it, and the topic's max.message.bytes with it"
    );
    let broker = rejection_detail(Code::MessageSizeTooLarge, &about(Side::Broker));
    assert_eq!(
        broker,
        "broker: a record of 1500123 octets exceeds max.message.bytes of topic orders (default: the broker's \
         message.max.bytes); raise it there, or the producer has to write smaller payloads"
    );
    let known = About { topic_bytes_max: Some(1_048_588), ..about(Side::Broker) };
    assert!(
        rejection_detail(Code::MessageSizeTooLarge, &known).contains("max.message.bytes = 1048588 of topic orders")
    );
    let fault = fault_text("kafka.topic_authorization_failed", Code::TopicAuthorizationFailed, &about(Side::Broker));
    assert_eq!(
        fault,
        "kafka.topic_authorization_failed: broker: topic orders: TopicAuthorizationFailed (Broker: Topic authorization failed); \
         allow this user to WRITE to and DESCRIBE it"
    );
}

#[test]
fn the_longest_texts_fit_the_table() {
    let topic = "t".repeat(249);
    for code in every_code() {
        for side in [Side::Client, Side::Broker] {
            let about = About {
                side,
                topic: &topic,
                octets: usize::MAX,
                message_bytes_max: usize::MAX,
                topic_bytes_max: Some(usize::MAX),
            };
            let detail = rejection_detail(code, &about);
            assert!((1..=1024).contains(&detail.len()), "{code:?}: {}", detail.len());
        }
    }
}
