//! The process-wide budgets of rows and bytes in flight.
//!
//! Nothing here ever lets a source take more than its turn: waiters are served in the order in which they asked.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes are counted in units, since a semaphore counts in `u32`.
const BYTES_PER_UNIT: usize = 1024;

/// What all sources together may have claimed and not settled.
#[derive(Debug, Clone)]
pub struct Budget {
    rows: Arc<Semaphore>,
    units: Arc<Semaphore>,
    rows_max: usize,
    units_max: usize,
}

/// A share of the budget; given back when dropped.
#[derive(Debug)]
pub struct Share {
    rows: OwnedSemaphorePermit,
    units: OwnedSemaphorePermit,
}

impl Budget {
    /// Makes a budget of rows and bytes.
    #[must_use]
    pub fn new(rows_max: usize, bytes_max: usize) -> Self {
        let rows_max = rows_max.clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        let units_max = units(bytes_max).clamp(1, Semaphore::MAX_PERMITS.min(u32::MAX as usize));
        Self {
            rows: Arc::new(Semaphore::new(rows_max)),
            units: Arc::new(Semaphore::new(units_max)),
            rows_max,
            units_max,
        }
    }

    /// Waits for a share that covers a batch of this size, or the whole budget when the batch is larger.
    pub async fn take(&self, rows: usize, bytes: usize) -> Share {
        let rows = u32::try_from(rows.clamp(1, self.rows_max)).unwrap_or(u32::MAX);
        let units = u32::try_from(units(bytes).clamp(1, self.units_max)).unwrap_or(u32::MAX);
        // Always rows before bytes, so that two takers never wait for each other.
        let rows = Arc::clone(&self.rows).acquire_many_owned(rows).await.expect("never closed");
        let units = Arc::clone(&self.units).acquire_many_owned(units).await.expect("never closed");
        Share { rows, units }
    }

    /// Rows in flight, as far as shares say.
    #[must_use]
    pub fn rows_in_flight(&self) -> usize {
        self.rows_max - self.rows.available_permits()
    }

    /// Bytes in flight, as far as shares say.
    #[must_use]
    pub fn bytes_in_flight(&self) -> usize {
        (self.units_max - self.units.available_permits()) * BYTES_PER_UNIT
    }
}

impl Share {
    /// Gives back what the claim did not use.
    pub fn shrink(&mut self, rows: usize, bytes: usize) {
        drop(self.rows.split(self.rows.num_permits().saturating_sub(rows)));
        drop(self.units.split(self.units.num_permits().saturating_sub(units(bytes))));
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(BYTES_PER_UNIT)
}
