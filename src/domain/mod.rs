//! The pure core: what order means, what a pass does with outcomes, when to try again.
//!
//! Nothing here ever does IO, reads a clock or draws a random number: time and draws are arguments.

pub mod backoff;
pub mod breaker;
pub mod lanes;
pub mod limits;
pub mod message;
pub mod outcome;
pub mod partition;
pub mod pause;
pub mod plan;
pub mod policy;
pub mod record;
pub mod retry;
pub mod sweep;
pub mod verify;
