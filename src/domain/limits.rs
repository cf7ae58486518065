//! The limits of a new row that a program may set; those that the table and the relay set are fixed.
//!
//! Nothing here ever looks at a row.

/// What a new row may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Largest payload. The default, 1,000,000 octets, is what Kafka's brokers and topics take unless told otherwise
    /// (`message.max.bytes`), with room for the headers.
    pub payload_bytes_max: usize,
    /// Largest attributes, 64 KiB: they travel as a header.
    pub attributes_bytes_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { payload_bytes_max: 1_000_000, attributes_bytes_max: 64 << 10 }
    }
}
