//! Which partition a key belongs to: the hash of Java clients, so that a key lands where every other producer puts it.
//!
//! Nothing here ever asks how many partitions a topic has, or chooses one for a record without a key.

/// The partition of a key among so many, as the default partitioner of Java clients has it. An empty key is a key.
///
/// # Panics
/// When there are no partitions.
#[must_use]
pub fn of_key(key: &str, partitions: i32) -> i32 {
    assert!(partitions > 0, "a topic has at least one partition");
    (murmur2(key.as_bytes()) & i32::MAX) % partitions
}

/// MurmurHash2 with Kafka's seed, signed as in Java.
#[must_use]
pub fn murmur2(octets: &[u8]) -> i32 {
    const SEED: u32 = 0x9747_b28c;
    const M: u32 = 0x5bd1_e995;
    const R: u32 = 24;
    // Java counts in an int and wraps; no key comes near that.
    #[expect(clippy::cast_possible_truncation, reason = "the hash is defined over 32 bits of the length")]
    let mut hash = SEED ^ octets.len() as u32;
    let (words, tail) = octets.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> R;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    if !tail.is_empty() {
        for (index, octet) in tail.iter().enumerate() {
            hash ^= u32::from(*octet) << (8 * index);
        }
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^= hash >> 15;
    hash.cast_signed()
}
