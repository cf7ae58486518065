//! `keiro-relay demo`: the main job shown end to end on servers of its own.

#[doc(hidden)]
pub mod services;
