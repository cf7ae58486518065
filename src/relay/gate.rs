//! The gate before every claim: closed while the cluster is away, so that an outage of any length costs no attempt.
//!
//! Nothing here ever touches a row: the way back is a probe that asks the broker whether it is there.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// Pause before the first probe; doubles per fault in a row.
const PROBE_PAUSE_MIN: Duration = Duration::from_millis(500);
/// Longest pause between probes: an operator who mends the cluster should not wait for us.
const PROBE_PAUSE_MAX: Duration = Duration::from_secs(5);
/// Spread of the pause, so that many relays do not probe at once.
const PROBE_JITTER: f64 = 0.3;

/// Whether claims may be made now.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Faults since the last acknowledgement.
    faults: u32,
    /// Closed until a probe at this instant succeeds.
    probe_at: Option<Instant>,
}

impl Gate {
    /// Whether claims may be made.
    pub fn is_open(&self) -> bool {
        self.lock().probe_at.is_none()
    }

    /// Returns once claims may be made.
    pub async fn opened(&self) {
        loop {
            let changed = self.changed.notified();
            if self.is_open() {
                return;
            }
            changed.await;
        }
    }

    /// Closes the gate: a pass found the cluster away. `draw` in [0, 1) spreads the probe.
    pub fn close(&self, draw: f64) {
        let mut state = self.lock();
        // Passes that were in flight together fail together: that is one fault.
        if state.probe_at.is_none() {
            state.fault(draw);
            drop(state);
            self.changed.notify_waiters();
        }
    }

    /// A record was acknowledged: whatever stood against the cluster is over.
    pub fn acknowledged(&self) {
        let mut state = self.lock();
        let was_closed = state.probe_at.is_some();
        *state = State::default();
        drop(state);
        if was_closed {
            self.changed.notify_waiters();
        }
    }

    /// Waits until the gate is closed and its probe is due.
    pub async fn probe_due(&self) {
        loop {
            let changed = self.changed.notified();
            let probe_at = self.lock().probe_at;
            match probe_at {
                None => changed.await,
                Some(at) if at <= Instant::now() => return,
                Some(at) => {
                    tokio::select! {
                        () = changed => {}
                        () = tokio::time::sleep_until(at.into()) => {}
                    }
                }
            }
        }
    }

    /// What the probe found. An answer opens the gate; the faults are forgotten only at the next acknowledgement, since a cluster
    /// may answer and still not write.
    pub fn probed(&self, answered: bool, draw: f64) {
        let mut state = self.lock();
        if answered {
            state.probe_at = None;
        } else {
            state.fault(draw);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds this lock")
    }
}

impl State {
    fn fault(&mut self, draw: f64) {
        let doubled = PROBE_PAUSE_MIN.saturating_mul(1 << self.faults.min(10)).min(PROBE_PAUSE_MAX);
        self.faults = self.faults.saturating_add(1);
        self.probe_at = Some(Instant::now() + doubled.mul_f64(1.0 - PROBE_JITTER * draw));
    }
}
