//! Sweeps: single cases, and a model of producers' transactions.

use std::time::{Duration, Instant};

use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::sweep::{SweepKind, Sweeps};
use uuid::Uuid;

const SECOND: Duration = Duration::from_secs(1);

/// The first position at so many seconds.
fn at(second: i64) -> Position {
    Position { created_at: floor(second), outbox_id: Uuid::nil() }
}

fn floor(second: i64) -> PgTime {
    PgTime(second * 1_000_000)
}

/// A whole sweep in one page that took so long.
fn sweep(sweeps: &mut Sweeps, late_floor: i64, last: Option<Position>, took: Duration, now: Instant) -> SweepKind {
    let kind = sweeps.next_kind(now);
    sweeps.begin(kind, floor(late_floor), Duration::ZERO);
    sweeps.page(last, false, took, now);
    kind
}

#[test]
fn an_expensive_full_sweep_does_not_put_off_late_sweeps() {
    let now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    assert_eq!(sweep(&mut sweeps, 100, Some(at(100)), 10 * SECOND, now), SweepKind::Full);
    assert_eq!(sweeps.next_kind(now), SweepKind::Late, "it says nothing about what a late sweep costs");
    assert_eq!(sweeps.poll_from(now), at(98));
    assert_eq!(sweep(&mut sweeps, 101, None, Duration::from_millis(10), now), SweepKind::Late);
    assert_eq!(sweeps.next_late_at(), now + Duration::from_millis(200));
}

#[test]
fn what_is_asked_for_during_a_full_sweep_comes_after_it() {
    let now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    // Rows behind the page it has reached would otherwise wait for the next one, five minutes later.
    sweeps.begin(SweepKind::Full, floor(100), Duration::ZERO);
    sweeps.page(Some(at(1)), true, 10 * SECOND, now);
    sweeps.demand_full(now);
    sweeps.page(None, false, SECOND, now);
    assert_eq!(sweeps.next_full_at(), now, "an operator changed rows");

    sweeps.begin(SweepKind::Full, floor(100), Duration::ZERO);
    sweeps.page(Some(at(1)), true, 10 * SECOND, now);
    sweeps.overflowed(now);
    sweeps.page(None, false, SECOND, now);
    assert_eq!(sweeps.next_full_at(), now + 30 * SECOND, "a lane did not fit into memory");

    sweeps.begin(SweepKind::Full, floor(100), Duration::ZERO);
    sweeps.page(None, false, 10 * SECOND, now);
    assert_eq!(sweeps.next_full_at(), now + 300 * SECOND, "what was asked for was done");
}
