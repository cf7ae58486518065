//! The library half, for programs that write rows: identifiers that sort.
//!
//! Nothing here ever talks to a database.

use type_safe_id::{DynamicType, TypeSafeId};
use uuid::Uuid;

/// Longest prefix of a message id.
const PREFIX_BYTES_MAX: usize = 63;

/// Mints an outbox id: a UUIDv7, later than every one that this process minted before, also within a millisecond and when
/// the clock goes back.
///
/// Rows of one transaction share `created_at`, so their ids decide their order: mint them in the order in which the
/// events happened. `created_at` is the *start* of the transaction: two transactions that write the same lane at the same
/// time can commit in the other order. A lock taken inside them does not help; serialise them before they begin.
#[must_use]
pub fn fresh_outbox_id() -> Uuid {
    // One context for the whole process; `uuid` documents the order.
    Uuid::now_v7()
}

/// Mints a message id: a TypeID, `PREFIX_…` with a UUIDv7, as [`fresh_outbox_id`] mints it, in base 32.
#[must_use]
pub fn fresh_message_id(prefix: &MessageIdPrefix) -> String {
    TypeSafeId::from_type_and_uuid(prefix.0.clone(), Uuid::now_v7()).to_string()
}

/// The prefix of message ids: 1 to 63 lower-case Latin letters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageIdPrefix(DynamicType);

impl MessageIdPrefix {
    /// Checks a prefix.
    ///
    /// # Errors
    /// [`BadPrefix`] when it is empty, too long or has other characters.
    pub fn new(prefix: &str) -> Result<Self, BadPrefix> {
        let legal = (1..=PREFIX_BYTES_MAX).contains(&prefix.len()) && prefix.bytes().all(|b| b.is_ascii_lowercase());
        let bad = || BadPrefix(prefix.chars().take(PREFIX_BYTES_MAX + 1).collect());
        if legal { DynamicType::new(prefix).map(Self).map_err(|_| bad()) } else { Err(bad()) }
    }
}

/// A prefix that no message id may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("message id prefix {0:?}: it must be 1 to {PREFIX_BYTES_MAX} lower-case Latin letters")]
pub struct BadPrefix(String);
