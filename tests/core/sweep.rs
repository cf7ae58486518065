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

/// Rows come in faster than they are relayed, so that every page is full. What lies behind is looked at all the same. A row a second;
/// the last ten that were seen are live.
#[test]
fn a_sweep_that_never_ends_does_not_keep_from_looking_back() {
    let mut now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    let took = Duration::from_millis(5);
    let (mut tail, mut late, mut full) = (0, 0, 0);
    sweeps.begin(SweepKind::Full, floor(0), Duration::ZERO);
    for _ in 0..10_000 {
        now += took;
        if sweeps.look_back_due(now) {
            let kind = sweeps.next_kind(now);
            sweeps.begin(kind, floor(tail), Duration::ZERO);
            match kind {
                SweepKind::Full => full += 1,
                SweepKind::Late => late += 1,
                SweepKind::Tail => unreachable!("that would not look back"),
            }
        }
        let after = sweeps.page_after().expect("no page was the last");
        let oldest_live = tail - 10;
        let last = (after.created_at.0.max(0) / 1_000_000 + 1).max(oldest_live);
        tail = tail.max(last);
        sweeps.page(Some(at(last)), true, took, now);
    }
    // Fifty seconds: late sweeps of ten pages may take 5 % of the time; a full sweep comes every fifteen seconds.
    assert!((40..=50).contains(&late), "{late} late sweeps");
    assert_eq!(full, 3);
    sweeps.demand_full(now);
    assert!(sweeps.look_back_due(now), "an operator changed rows");
    assert_eq!(sweeps.next_kind(now), SweepKind::Full);
}
