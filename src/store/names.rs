//! Names in SQL text: quoted, and never too long for the server.
//!
//! Nothing here ever puts a value into SQL text; values are parameters.

use super::inspect::Profile;

/// Longest identifier the server keeps; longer ones it would cut in silence.
const NAME_BYTES_MAX: usize = 63;

/// An identifier as SQL wants it, whatever it contains.
#[must_use]
pub fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// The table's name with its schema, quoted.
#[must_use]
pub fn qualified(schema: &str, table: &str) -> String {
    format!("{}.{}", quoted(schema), quoted(table))
}

/// The names of a profile's indexes beside the primary key, in the order of the contract and of design §2.
///
/// The contract's names for its own table; another table's begin with its name.
pub(super) fn indexes(profile: Profile, table: &str) -> Vec<String> {
    let (prefix, suffixes): (_, &[&str]) = match profile {
        Profile::Lean => {
            ("keiro_relay", &["message_id_key", "source_order_idx", "key_order_idx", "sent_idx", "far_idx"])
        }
        Profile::Shared => {
            ("", &["pending_idx", "head_of_line_idx", "source_order_idx", "claim_order_idx", "sent_gc_idx"])
        }
    };
    suffixes.iter().map(|suffix| derived(prefix, table, suffix)).collect()
}

/// `PREFIX_TABLE_SUFFIX`, with the table's part cut and marked by a hash where the whole would be too long.
pub(super) fn derived(prefix: &str, table: &str, suffix: &str) -> String {
    let whole = if prefix.is_empty() { format!("{table}_{suffix}") } else { format!("{prefix}_{table}_{suffix}") };
    if whole.len() <= NAME_BYTES_MAX {
        return whole;
    }
    let room = NAME_BYTES_MAX - (prefix.len() + suffix.len() + 2 + 9);
    let end = (0..=room).rev().find(|&end| table.is_char_boundary(end)).unwrap_or(0);
    let short = format!("{}_{:08x}", &table[..end], fnv1a(table));
    if prefix.is_empty() { format!("{short}_{suffix}") } else { format!("{prefix}_{short}_{suffix}") }
}

/// A hash that is the same in every version of this program and of Rust (FNV-1a, 32 bits).
fn fnv1a(text: &str) -> u32 {
    text.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
