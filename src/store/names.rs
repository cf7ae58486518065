//! Names in SQL text: quoted, and never too long for the server.
//!
//! Nothing here ever puts a value into SQL text; values are parameters.

use super::inspect::Profile;
use crate::pg::NAME_BYTES_MAX;

pub use crate::pg::{qualified, quoted};

/// The indexes of a profile beside the primary key: their place in the numbered files and their name.
///
/// The contract's names for its own table; another table's begin with its name.
pub(super) fn indexes(profile: Profile, table: &str) -> impl Iterator<Item = (&'static str, String)> {
    let places: &[&str] = match profile {
        Profile::Lean => &["message_id_key", "source_order_idx", "key_order_idx", "sent_idx", "far_idx"],
        Profile::Shared => &["pending_idx", "head_of_line_idx", "source_order_idx", "claim_order_idx", "sent_gc_idx"],
    };
    named(profile, places, table)
}

/// The checks whose names depend on the table: place and name. Lean checks have the same names on every table.
pub(super) fn checks(profile: Profile, table: &str) -> impl Iterator<Item = (&'static str, String)> {
    let places: &[&str] = match profile {
        Profile::Lean => &[],
        Profile::Shared => {
            &["rejected_at_check", "rejection_code_check", "rejection_code_format_check", "rejection_detail_check"]
        }
    };
    named(profile, places, table)
}

fn named(
    profile: Profile,
    places: &'static [&'static str],
    table: &str,
) -> impl Iterator<Item = (&'static str, String)> {
    let prefix = match profile {
        Profile::Lean => "keiro_relay",
        Profile::Shared => "",
    };
    places.iter().map(move |place| (*place, derived(prefix, table, place)))
}

/// `PREFIX_TABLE_SUFFIX`, with the table's part cut and marked by a hash where the whole would be too long.
pub(super) fn derived(prefix: &str, table: &str, suffix: &str) -> String {
    let whole = if prefix.is_empty() { format!("{table}_{suffix}") } else { format!("{prefix}_{table}_{suffix}") };
    if whole.len() <= NAME_BYTES_MAX {
        return whole;
    }
    let room = NAME_BYTES_MAX - (prefix.len() + suffix.len() + 2 + 9);
    let end = (0..=room).rev().find(|&end| table.is_char_boundary(end)).unwrap_or(0);
    let short = format!("{}_{}", &table[..end], hash(table));
    if prefix.is_empty() { format!("{short}_{suffix}") } else { format!("{prefix}_{short}_{suffix}") }
}

/// Eight hex digits that are the same in every version of this program and of Rust (FNV-1a).
pub(super) fn hash(text: &str) -> String {
    let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    format!("{hash:08x}")
}
