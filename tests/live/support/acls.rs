//! Permissions: the binding has no words of its own for them, so this speaks to librdkafka directly.

#![expect(unsafe_code, reason = "librdkafka's admin functions for ACLs have no safe wrapper")]

use std::ffi::CString;
use std::ptr;
use std::time::Duration;

use rdkafka::bindings::{
    rd_kafka_AclBinding_destroy, rd_kafka_AclBinding_new, rd_kafka_AclBindingFilter_new, rd_kafka_AclOperation_t,
    rd_kafka_AclPermissionType_t, rd_kafka_CreateAcls, rd_kafka_CreateAcls_result_acls, rd_kafka_DeleteAcls,
    rd_kafka_DeleteAcls_result_response_error, rd_kafka_DeleteAcls_result_response_matching_acls,
    rd_kafka_DeleteAcls_result_responses, rd_kafka_ResourcePatternType_t, rd_kafka_ResourceType_t,
    rd_kafka_acl_result_error, rd_kafka_event_CreateAcls_result, rd_kafka_event_DeleteAcls_result,
    rd_kafka_event_destroy, rd_kafka_event_error, rd_kafka_queue_destroy, rd_kafka_queue_new, rd_kafka_queue_poll,
    rd_kafka_resp_err_t,
};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

pub use rdkafka::bindings::rd_kafka_AclOperation_t as Operation;

/// How long the cluster may take to answer.
const REQUEST_MAX: Duration = Duration::from_secs(30);

/// Allows a user an operation on a topic; `brokers` is a listener whose user may say so.
#[track_caller]
pub fn allow(brokers: &str, user: &str, operation: rd_kafka_AclOperation_t, topic: &str) {
    let consumer = client(brokers);
    let text = |text: &str| CString::new(text).expect("a text without NUL");
    let (topic, principal, host) = (text(topic), text(&format!("User:{user}")), text("*"));
    let client = consumer.client().native_ptr();
    // SAFETY: every pointer comes from librdkafka or a CString that outlives the block, is checked before it is read, and is
    // given back once.
    unsafe {
        let mut acl = rd_kafka_AclBinding_new(
            rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_TOPIC,
            topic.as_ptr(),
            rd_kafka_ResourcePatternType_t::RD_KAFKA_RESOURCE_PATTERN_LITERAL,
            principal.as_ptr(),
            host.as_ptr(),
            operation,
            rd_kafka_AclPermissionType_t::RD_KAFKA_ACL_PERMISSION_TYPE_ALLOW,
            ptr::null_mut(),
            0,
        );
        assert!(!acl.is_null(), "an ACL");
        let queue = rd_kafka_queue_new(client);
        rd_kafka_CreateAcls(client, &raw mut acl, 1, ptr::null(), queue);
        let event = rd_kafka_queue_poll(queue, i32::try_from(REQUEST_MAX.as_millis()).expect("a short time"));
        assert!(!event.is_null(), "no answer in {REQUEST_MAX:?}");
        assert_eq!(rd_kafka_event_error(event), rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR);
        let mut count = 0;
        let results = rd_kafka_CreateAcls_result_acls(rd_kafka_event_CreateAcls_result(event), &raw mut count);
        assert_eq!(count, 1);
        assert!(rd_kafka_acl_result_error(*results).is_null(), "the cluster refused the ACL");
        rd_kafka_event_destroy(event);
        rd_kafka_queue_destroy(queue);
        rd_kafka_AclBinding_destroy(acl);
    }
}

/// Takes back what [`allow`] gave.
#[track_caller]
pub fn take_back(brokers: &str, user: &str, operation: rd_kafka_AclOperation_t, topic: &str) {
    let consumer = client(brokers);
    let text = |text: &str| CString::new(text).expect("a text without NUL");
    let (topic, principal, host) = (text(topic), text(&format!("User:{user}")), text("*"));
    // SAFETY: as in `allow`.
    unsafe {
        let mut filter = rd_kafka_AclBindingFilter_new(
            rd_kafka_ResourceType_t::RD_KAFKA_RESOURCE_TOPIC,
            topic.as_ptr(),
            rd_kafka_ResourcePatternType_t::RD_KAFKA_RESOURCE_PATTERN_LITERAL,
            principal.as_ptr(),
            host.as_ptr(),
            operation,
            rd_kafka_AclPermissionType_t::RD_KAFKA_ACL_PERMISSION_TYPE_ALLOW,
            ptr::null_mut(),
            0,
        );
        assert!(!filter.is_null(), "a filter");
        let queue = rd_kafka_queue_new(consumer.client().native_ptr());
        rd_kafka_DeleteAcls(consumer.client().native_ptr(), &raw mut filter, 1, ptr::null(), queue);
        let event = rd_kafka_queue_poll(queue, i32::try_from(REQUEST_MAX.as_millis()).expect("a short time"));
        assert!(!event.is_null(), "no answer in {REQUEST_MAX:?}");
        assert_eq!(rd_kafka_event_error(event), rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR);
        let (mut count, mut matching) = (0, 0);
        let responses = rd_kafka_DeleteAcls_result_responses(rd_kafka_event_DeleteAcls_result(event), &raw mut count);
        assert_eq!(count, 1);
        assert!(rd_kafka_DeleteAcls_result_response_error(*responses).is_null(), "the cluster refused the filter");
        rd_kafka_DeleteAcls_result_response_matching_acls(*responses, &raw mut matching);
        assert_eq!(matching, 1, "one ACL goes");
        rd_kafka_event_destroy(event);
        rd_kafka_queue_destroy(queue);
        rd_kafka_AclBinding_destroy(filter);
    }
}

fn client(brokers: &str) -> BaseConsumer {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers).set("group.id", "keiro-relay-test").create().expect("a client")
}
