//! The process-wide budgets of rows and bytes in flight.
//!
//! Nothing here ever lets a source take more than its turn: waiters are served in the order in which they asked, and who holds
//! something gets more only while as much as it would then hold is free. So sources whose topics give no answer leave room for
//! those whose topics do.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Bytes are counted in units, since a semaphore counts in `u32`.
const BYTES_PER_UNIT: usize = 1024;

/// What all sources together may have claimed and not settled.
#[derive(Debug, Clone)]
pub struct Budget {
    rows: Arc<Semaphore>,
    units: Arc<Semaphore>,
    rows_max: usize,
    units_max: usize,
    given_back: Arc<Notify>,
}

/// What one source holds of the budget.
#[derive(Debug, Default)]
pub struct Account {
    rows: AtomicUsize,
    units: AtomicUsize,
}

/// A share of the budget; given back when dropped.
#[derive(Debug)]
pub struct Share {
    rows: OwnedSemaphorePermit,
    units: OwnedSemaphorePermit,
    // Last: whoever waits looks again once the permits are back.
    booked: Booked,
}

/// What of an account is one share's.
#[derive(Debug)]
struct Booked {
    account: Arc<Account>,
    rows: usize,
    units: usize,
    given_back: Arc<Notify>,
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
            given_back: Arc::default(),
        }
    }

    /// Waits for a share that covers a batch of this size, or the whole budget when the batch is larger.
    pub async fn take(&self, account: &Arc<Account>, rows: usize, bytes: usize) -> Share {
        let (rows, units) = (rows.clamp(1, self.rows_max), units(bytes).clamp(1, self.units_max));
        loop {
            let given_back = self.given_back.notified();
            let mut given_back = std::pin::pin!(given_back);
            // Registered before the look, so that nothing that comes back in between is missed.
            given_back.as_mut().enable();
            if self.leaves_room(account, rows, units) {
                break;
            }
            given_back.await;
        }
        let permits = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        // Always rows before bytes, so that two takers never wait for each other.
        let row_permits = Arc::clone(&self.rows).acquire_many_owned(permits(rows)).await.expect("never closed");
        let unit_permits = Arc::clone(&self.units).acquire_many_owned(permits(units)).await.expect("never closed");
        account.rows.fetch_add(rows, Ordering::Relaxed);
        account.units.fetch_add(units, Ordering::Relaxed);
        let (account, given_back) = (Arc::clone(account), Arc::clone(&self.given_back));
        Share { rows: row_permits, units: unit_permits, booked: Booked { account, rows, units, given_back } }
    }

    /// Whether a source may hold so much more. Who holds nothing always may: it has its turn.
    fn leaves_room(&self, account: &Account, rows: usize, units: usize) -> bool {
        let (rows_held, units_held) = (account.rows.load(Ordering::Relaxed), account.units.load(Ordering::Relaxed));
        rows_held == 0
            || (rows_held + rows <= self.rows.available_permits()
                && units_held + units <= self.units.available_permits())
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
        self.booked.keep(self.rows.num_permits(), self.units.num_permits());
    }
}

impl Booked {
    fn keep(&mut self, rows: usize, units: usize) {
        self.account.rows.fetch_sub(self.rows - rows, Ordering::Relaxed);
        self.account.units.fetch_sub(self.units - units, Ordering::Relaxed);
        (self.rows, self.units) = (rows, units);
        self.given_back.notify_waiters();
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        self.keep(0, 0);
    }
}

fn units(bytes: usize) -> usize {
    bytes.div_ceil(BYTES_PER_UNIT)
}
