//! Identifiers that sort: outbox ids that are fresh or stable, message ids with a prefix.
//!
//! Nothing here ever repeats an id that it minted, and a stable id depends on its inputs alone.

use type_safe_id::{DynamicType, TypeSafeId};
use uuid::Uuid;

use crate::domain::message::PgTime;

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

/// What a stable outbox id is made of. The same four make the same id in every process and every version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StableId<'a> {
    /// Who writes the row: the subscription's name, or the saga's. Two producers that react to one recorded event write two
    /// rows, and need two ids.
    pub producer: &'a str,
    /// When the recorded event was recorded. Not the time of the attempt: it would change.
    pub recorded_at: PgTime,
    /// Its position in the event store's log.
    pub global_position: i64,
    /// Which of the rows that this producer writes for that event; from 0.
    pub n: u8,
}

/// An outbox id that is the same at each attempt, so that a retry coalesces: a UUIDv7 that sorts by time (milliseconds), then
/// position, then `n`.
///
/// Two ids differ when any input does, with two exceptions: positions of one millisecond that agree in their lower 32 bits count as the
/// same, and so do names that agree in a hash of 34 bits.
#[must_use]
pub fn stable_outbox_id(id: StableId<'_>) -> Uuid {
    // The layout of UUIDv7: 48 bits of time, then 74 that are ours, around the version and the variant.
    let millis = id.recorded_at.unix_micros().map_or(0, |micros| micros.div_euclid(1000)).clamp(0, (1 << 48) - 1);
    let millis = u128::from(millis.unsigned_abs());
    let position = u128::from(id.global_position.cast_unsigned() & 0xffff_ffff);
    let ours = position << 42 | u128::from(id.n) << 34 | u128::from(hash(id.producer) >> 30);
    Uuid::from_u128(millis << 80 | 0x7 << 76 | (ours >> 62) << 64 | 0b10 << 62 | ours & ((1 << 62) - 1))
}

/// FNV-1a with 64 bits: the standard library's hasher may change with a version, and this one may not.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
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
