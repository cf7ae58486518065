//! librdkafka's broker in this process, which fails when told to: a real one never fails a row for no fault of its own.
//!
//! It enforces no limits and shows no order problems, so only what the relay does with a failure is judged on it.

use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

/// A cluster of one broker that fails produce requests when told to.
pub struct Mock {
    cluster: MockCluster<'static, DefaultProducerContext>,
}

impl Mock {
    /// A cluster with these topics, of one partition each.
    pub fn new(topics: &[&str]) -> Self {
        let cluster = MockCluster::new(1).expect("a mock cluster");
        for topic in topics {
            cluster.create_topic(topic, 1, 1).expect("a topic");
        }
        Self { cluster }
    }

    pub fn bootstrap(&self) -> String {
        self.cluster.bootstrap_servers()
    }

    /// Fails the next produce requests with an error that says nothing about whose fault it is.
    pub fn fail_next(&self, requests: usize) {
        let errors = vec![RDKafkaRespErr::RD_KAFKA_RESP_ERR_UNKNOWN; requests];
        self.cluster.request_errors(RDKafkaApiKey::Produce, &errors);
    }

    /// Fails the next produce request with an error that librdkafka tries again after.
    pub fn refuse_next(&self) {
        self.cluster
            .request_errors(RDKafkaApiKey::Produce, &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION]);
    }

    /// Forgets failures that nobody has met yet.
    pub fn mend(&self) {
        self.cluster.clear_request_errors(RDKafkaApiKey::Produce);
    }
}
