//! Commands that show rows, and the filters that every command about rows shares.
//!
//! Nothing here ever changes a row.

pub mod filter;
