//! The two admin requests that the binding has no words for: describe the cluster, describe topics with what we may do with them.
//!
//! Unlike a producer's metadata request, neither creates a topic that is not there. Nothing here ever waits without a bound, and all of
//! librdkafka's pointers stay in here.

#![expect(unsafe_code, reason = "librdkafka's functions that describe clusters and topics have no safe wrapper")]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::time::Duration;

use rdkafka::bindings::{
    rd_kafka_AclOperation_t, rd_kafka_AdminOptions_destroy, rd_kafka_AdminOptions_new,
    rd_kafka_AdminOptions_set_include_authorized_operations, rd_kafka_AdminOptions_set_request_timeout,
    rd_kafka_AdminOptions_t, rd_kafka_DescribeCluster, rd_kafka_DescribeCluster_result_nodes, rd_kafka_DescribeTopics,
    rd_kafka_DescribeTopics_result_topics, rd_kafka_Node_host, rd_kafka_Node_id, rd_kafka_Node_port, rd_kafka_Node_t,
    rd_kafka_TopicCollection_destroy, rd_kafka_TopicCollection_of_topic_names,
    rd_kafka_TopicDescription_authorized_operations, rd_kafka_TopicDescription_error, rd_kafka_TopicDescription_name,
    rd_kafka_TopicDescription_partitions, rd_kafka_TopicDescription_t, rd_kafka_TopicPartitionInfo_isr,
    rd_kafka_TopicPartitionInfo_leader, rd_kafka_TopicPartitionInfo_partition, rd_kafka_TopicPartitionInfo_replicas,
    rd_kafka_admin_op_t, rd_kafka_error_code, rd_kafka_error_destroy, rd_kafka_event_DescribeCluster_result,
    rd_kafka_event_DescribeTopics_result, rd_kafka_event_destroy, rd_kafka_event_error, rd_kafka_event_t,
    rd_kafka_queue_destroy, rd_kafka_queue_new, rd_kafka_queue_poll, rd_kafka_queue_t, rd_kafka_resp_err_t, rd_kafka_t,
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
    let request = Request::new(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBECLUSTER, false, bound)?;
    // SAFETY: client, options and queue live until the request is dropped, after the answer.
    unsafe { rd_kafka_DescribeCluster(request.client, request.options, request.queue) };
    let answer = request.answer(bound)?;
    // SAFETY: the event is of this kind (checked by librdkafka, which returns null otherwise) and lives until `answer` is dropped;
    // the array has `count` entries, none of them null.
    unsafe {
        let result = rd_kafka_event_DescribeCluster_result(answer.0);
        if result.is_null() {
            return Err(Code::Fail);
        }
        let mut count = 0;
        let nodes = rd_kafka_DescribeCluster_result_nodes(result, &raw mut count);
        Ok((0..count).map(|index| node(*nodes.add(index))).collect())
    }
}

/// The topics that are described, or the code for each that is not.
pub(super) fn topics<C: ClientContext>(
    client: &Client<C>,
    names: &[String],
    bound: Duration,
) -> Result<HashMap<String, Result<Description, Code>>, Code> {
    let request = Request::new(client, rd_kafka_admin_op_t::RD_KAFKA_ADMIN_OP_DESCRIBETOPICS, true, bound)?;
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
    // SAFETY: as in `cluster`.
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
/// The pointer is a node of an answer that is still held.
unsafe fn node(node: *const rd_kafka_Node_t) -> Node {
    // SAFETY: see above; the host is a text of the answer's.
    unsafe {
        let host = text(rd_kafka_Node_host(node));
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Node { id: rd_kafka_Node_id(node), address: format!("{host}:{}", rd_kafka_Node_port(node)) }
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

/// A request under way.
struct Request {
    client: *mut rd_kafka_t,
    options: *mut rd_kafka_AdminOptions_t,
    queue: *mut rd_kafka_queue_t,
}

impl Request {
    fn new<C: ClientContext>(
        client: &Client<C>,
        operation: rd_kafka_admin_op_t,
        with_permissions: bool,
        bound: Duration,
    ) -> Result<Self, Code> {
        let millis = i32::try_from(bound.as_millis()).unwrap_or(i32::MAX);
        let client = client.native_ptr();
        // SAFETY: the client outlives the request; options and queue are given back once, by `drop`. Without a buffer for its text
        // the error of the timeout is its code alone.
        unsafe {
            let options = rd_kafka_AdminOptions_new(client, operation);
            if options.is_null() {
                return Err(Code::InvalidArgument);
            }
            let request = Self { client, options, queue: rd_kafka_queue_new(client) };
            rd_kafka_AdminOptions_set_request_timeout(options, millis, ptr::null_mut(), 0);
            if with_permissions {
                let error = rd_kafka_AdminOptions_set_include_authorized_operations(options, 1);
                if !error.is_null() {
                    let code = rd_kafka_error_code(error);
                    rd_kafka_error_destroy(error);
                    return Err(Code::from(code));
                }
            }
            Ok(request)
        }
    }

    fn answer(&self, bound: Duration) -> Result<Answer, Code> {
        let millis = i32::try_from((bound + GRACE).as_millis()).unwrap_or(i32::MAX);
        // SAFETY: the queue is ours; the event is given back once, by `Answer`.
        unsafe {
            let event = rd_kafka_queue_poll(self.queue, millis);
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
