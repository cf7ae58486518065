//! The relay: builds, spawns and stops the loops, and supervises them.

pub mod health;
