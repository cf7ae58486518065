//! The two requests that the binding has no words for: which brokers there are, and what topics are, with what we may do with them.
//!
//! Unlike a producer's metadata request for a topic, neither creates one that is not there, and neither needs a controller. Nothing here ever waits without a bound, and all of
//! librdkafka's pointers stay in here.

#![expect(unsafe_code, reason = "librdkafka's functions that describe clusters and topics have no safe wrapper")]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::time::Duration;

use rdkafka::bindings::{
    rd_kafka_AclOperation_t, rd_kafka_AdminOptions_destroy, rd_kafka_AdminOptions_new,
    rd_kafka_AdminOptions_set_broker, rd_kafka_AdminOptions_set_include_authorized_operations,
    rd_kafka_AdminOptions_set_request_timeout, rd_kafka_AdminOptions_t, rd_kafka_DescribeTopics,
    rd_kafka_DescribeTopics_result_topics, rd_kafka_Node_id, rd_kafka_TopicCollection_destroy,
    rd_kafka_TopicCollection_of_topic_names, rd_kafka_TopicDescription_authorized_operations,
    rd_kafka_TopicDescription_error, rd_kafka_TopicDescription_name, rd_kafka_TopicDescription_partitions,
    rd_kafka_TopicDescription_t, rd_kafka_TopicPartitionInfo_isr, rd_kafka_TopicPartitionInfo_leader,
    rd_kafka_TopicPartitionInfo_partition, rd_kafka_TopicPartitionInfo_replicas, rd_kafka_admin_op_t,
    rd_kafka_error_code, rd_kafka_error_destroy, rd_kafka_event_DescribeTopics_result, rd_kafka_event_destroy,
    rd_kafka_event_error, rd_kafka_event_t, rd_kafka_metadata, rd_kafka_metadata_destroy, rd_kafka_queue_destroy,
    rd_kafka_queue_new, rd_kafka_queue_poll, rd_kafka_queue_t, rd_kafka_resp_err_t, rd_kafka_t,
};
use rdkafka::client::{Client, ClientContext};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::inspect::{Description, Partition};

/// More than a request's own time, which ends it with an error.
const GRACE: Duration = Duration::from_secs(1);

/// A broker as the cluster lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) id: i32,
    pub(super) address: String,
}

/// The brokers that the cluster lists.
pub(super) fn cluster<C: ClientContext>(client: &Client<C>, bound: Duration) -> Result<Vec<Node>, Code> {
    // SAFETY: the client outlives the call; the answer has as many brokers as it says, and is given back once, after they were copied.
    // Without "all topics" it is about topics that the client knows: none.
    unsafe {
        let mut metadata = ptr::null();
        let code = rd_kafka_metadata(client.native_ptr(), 0, ptr::null_mut(), &raw mut metadata, millis(bound));
        if code != rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err(Code::from(code));
        }
        let count = usize::try_from((*metadata).broker_cnt).unwrap_or_default();
        let node = |index| {
            let broker = &*(*metadata).brokers.add(index);
            let host = text(broker.host);
            let host = if host.contains(':') { format!("[{host}]") } else { host };
            Node { id: broker.id, address: format!("{host}:{}", broker.port) }
        };
        let nodes = (0..count).map(node).collect();
        rd_kafka_metadata_destroy(metadata);
        Ok(nodes)
    }
}

fn millis(bound: Duration) -> i32 {
    i32::try_from(bound.as_millis()).unwrap_or(i32::MAX)
}

/// The topics as this broker describes them, or the code for each that it does not.
pub(super) fn topics<C: ClientContext>(
    client: &Client<C>,
    broker: i32,
    names: &[String],
    bound: Duration,
) -> Result<HashMap<String, Result<Description, Code>>, Code> {
    let request = Request::new(client, broker, bound)?;
    // A text of the table's has no NUL in it.
    let texts: Vec<CString> = names.iter().filter_map(|name| CString::new(name.as_str()).ok()).collect();
    let mut pointers: Vec<*const c_char> = texts.iter().map(|text| text.as_ptr()).collect();
    // SAFETY: the names live until the end of this function and are copied by librdkafka; the collection is given back once.
    unsafe {
        let collection = rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
        rd_kafka_DescribeTopics(request.client, collection, request.options, request.queue);
        rd_kafka_TopicCollection_destroy(collection);
    }
    let answer = request.answer(bound)?;
    // SAFETY: the event is of this kind (checked by librdkafka, which returns null otherwise) and lives until `answer` is dropped;
    // the array has `count` entries, none of them null.
    unsafe {
        let result = rd_kafka_event_DescribeTopics_result(answer.0);
        if result.is_null() {
            return Err(Code::Fail);
        }
        let mut count = 0;
        let found = rd_kafka_DescribeTopics_result_topics(result, &raw mut count);
        Ok((0..count).map(|index| topic(*found.add(index))).collect())
    }
}

/// # Safety
/// The pointer is a topic of an answer that is still held.
unsafe fn topic(topic: *const rd_kafka_TopicDescription_t) -> (String, Result<Description, Code>) {
    // SAFETY: see above; all that is read belongs to the answer, and every array has as many entries as it says.
    unsafe {
        let name = text(rd_kafka_TopicDescription_name(topic));
        let error = rd_kafka_TopicDescription_error(topic);
        if !error.is_null() {
            let code = rd_kafka_error_code(error);
            if code != rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
                return (name, Err(Code::from(code)));
            }
        }
        let mut count = 0;
        let operations = rd_kafka_TopicDescription_authorized_operations(topic, &raw mut count);
        // As numbers: a broker may know operations that the enum does not.
        let write = rd_kafka_AclOperation_t::RD_KAFKA_ACL_OPERATION_WRITE as u32;
        let may_write = (!operations.is_null() && count > 0)
            .then(|| (0..count).any(|index| ptr::read(operations.cast::<u32>().add(index)) == write));
        let mut count = 0;
        let found = rd_kafka_TopicDescription_partitions(topic, &raw mut count);
        let mut partitions = Vec::with_capacity(count);
        for index in 0..count {
            let partition = *found.add(index);
            let leader = rd_kafka_TopicPartitionInfo_leader(partition);
            let (mut replicas, mut in_sync) = (0, 0);
            rd_kafka_TopicPartitionInfo_replicas(partition, &raw mut replicas);
            rd_kafka_TopicPartitionInfo_isr(partition, &raw mut in_sync);
            partitions.push(Partition {
                id: rd_kafka_TopicPartitionInfo_partition(partition),
                has_leader: !leader.is_null() && rd_kafka_Node_id(leader) >= 0,
                replicas,
                in_sync,
            });
        }
        (name, Ok(Description { may_write, partitions }))
    }
}

/// # Safety
/// The pointer is null or a text that is still held.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// A request to describe topics.
struct Request {
    client: *mut rd_kafka_t,
    options: *mut rd_kafka_AdminOptions_t,
    queue: *mut rd_kafka_queue_t,
}

impl Request {
    fn new<C: ClientContext>(client: &Client<C>, broker: i32, bound: Duration) -> Result<Self, Code> {
        let client = client.native_ptr();
        // SAFETY: the client outlives the request; options and queue are given back once, by `drop`. Without a buffer for their texts
        // the errors of timeout and broker are their codes alone.
        unsafe {
            let options = rd_kafka_AdminOptions_new(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS);
            if options.is_null() {
                return Err(Code::InvalidArgument);
            }
            let request = Self { client, options, queue: rd_kafka_queue_new(client) };
            rd_kafka_AdminOptions_set_request_timeout(options, millis(bound), ptr::null_mut(), 0);
            // A broker that answers: the default is the controller, whether it answers or not.
            rd_kafka_AdminOptions_set_broker(options, broker, ptr::null_mut(), 0);
            let error = rd_kafka_AdminOptions_set_include_authorized_operations(options, 1);
            if !error.is_null() {
                let code = rd_kafka_error_code(error);
                rd_kafka_error_destroy(error);
                return Err(Code::from(code));
            }
            Ok(request)
        }
    }

    fn answer(&self, bound: Duration) -> Result<Answer, Code> {
        // SAFETY: the queue is ours; the event is given back once, by `Answer`.
        unsafe {
            let event = rd_kafka_queue_poll(self.queue, millis(bound + GRACE));
            if event.is_null() {
                return Err(Code::OperationTimedOut);
            }
            let answer = Answer(event);
            match rd_kafka_event_error(event) {
                rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR => Ok(answer),
                code => Err(Code::from(code)),
            }
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: both were made by `new` and are given back only here.
        unsafe {
            rd_kafka_queue_destroy(self.queue);
            rd_kafka_AdminOptions_destroy(self.options);
        }
    }
}

/// An answer that is held.
struct Answer(*mut rd_kafka_event_t);

impl Drop for Answer {
    fn drop(&mut self) {
        // SAFETY: it came from the queue and is given back only here.
        unsafe { rd_kafka_event_destroy(self.0) };
    }
}
