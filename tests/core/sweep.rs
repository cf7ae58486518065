//! Sweeps: single cases, and a model of producers' transactions.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::sweep::{SweepKind, Sweeps};
use uuid::Uuid;

use crate::model::{Choose, Every, Seeded, seeds};

const SECOND: Duration = Duration::from_secs(1);

// ---- single cases ----------------------------------------------------------------------------------------------------------

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

#[test]
fn the_first_sweep_is_full_and_the_next_goes_back_to_the_floor_before_it() {
    let now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    assert_eq!(sweeps.next_kind(now), SweepKind::Full);
    assert_eq!(sweeps.page_after(), None);
    sweeps.begin(SweepKind::Full, floor(70), Duration::ZERO);
    assert_eq!(sweeps.page_after(), Some(Position::START));
    sweeps.page(Some(at(50)), true, Duration::ZERO, now);
    assert_eq!(sweeps.page_after(), Some(at(50)));
    sweeps.page(Some(at(100)), false, Duration::ZERO, now);
    assert_eq!(sweeps.page_after(), None);
    // A transaction that began at 70 was running then. Two seconds of margin, since clocks step.
    assert_eq!(sweeps.next_kind(now), SweepKind::Late);
    assert_eq!(sweeps.poll_from(now), at(68));
    sweeps.begin(SweepKind::Late, floor(90), Duration::ZERO);
    assert_eq!(sweeps.page_after(), Some(at(68)), "the floor of the sweep before, not its own");
    sweeps.page(None, false, Duration::ZERO, now);
    assert_eq!(sweeps.poll_from(now), at(88));
    // Nothing came for long: the last row ever seen lies before everything that could be committed late.
    sweeps.begin(SweepKind::Late, floor(5_000), Duration::ZERO);
    sweeps.page(None, false, Duration::ZERO, now);
    assert_eq!(sweeps.poll_from(now), at(100));
}

#[test]
fn a_late_sweep_may_take_a_twentieth_of_the_time() {
    let now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    sweep(&mut sweeps, 100, Some(at(100)), Duration::ZERO, now);
    sweeps.begin(SweepKind::Late, floor(100), Duration::from_millis(10));
    sweeps.page(Some(at(99)), true, Duration::from_millis(20), now);
    sweeps.page(None, false, Duration::from_millis(20), now);
    let next = now + SECOND;
    assert_eq!(sweeps.next_late_at(), next, "twenty times fifty milliseconds");
    let just_before = now + Duration::from_nanos(999_999_999);
    assert_eq!((sweeps.next_kind(just_before), sweeps.poll_from(just_before)), (SweepKind::Tail, at(100)));
    assert_eq!((sweeps.next_kind(next), sweeps.poll_from(next)), (SweepKind::Late, at(98)));
    // What comes behind the last row is found meanwhile, and puts nothing off.
    assert_eq!(sweep(&mut sweeps, -1, Some(at(101)), SECOND, just_before), SweepKind::Tail);
    assert_eq!((sweeps.next_late_at(), sweeps.poll_from(just_before)), (next, at(101)));
}

#[test]
fn a_full_sweep_may_take_a_hundredth_of_the_time_within_limits() {
    for (took, interval) in [(Duration::from_millis(1), 15), (SECOND, 100), (60 * SECOND, 300)] {
        let now = Instant::now();
        let mut sweeps = Sweeps::new(now);
        sweep(&mut sweeps, 0, None, took, now);
        assert_eq!(sweeps.next_full_at(), now + interval * SECOND);
        sweeps.overflowed(now);
        assert_eq!(sweeps.next_full_at(), now + interval.min(30) * SECOND, "a lane did not fit into memory");
        sweeps.demand_full(now + SECOND);
        assert_eq!(sweeps.next_kind(now + SECOND), SweepKind::Full);
    }
}

#[test]
fn a_sweep_that_was_abandoned_is_made_again_from_the_start() {
    let now = Instant::now();
    let mut sweeps = Sweeps::new(now);
    sweep(&mut sweeps, 100, Some(at(100)), SECOND, now);
    sweeps.begin(SweepKind::Late, floor(500), Duration::ZERO);
    sweeps.page(Some(at(99)), true, SECOND, now);
    sweeps.abandon(now);
    assert_eq!((sweeps.page_after(), sweeps.next_kind(now)), (None, SweepKind::Full));
    assert_eq!(sweeps.poll_from(now), at(98), "its floor counts for nothing");
    sweeps.page(Some(at(400)), false, SECOND, now);
    assert_eq!(sweeps.next_kind(now), SweepKind::Full, "a page that arrives afterwards neither");
}

// ---- producers' transactions against sweeps --------------------------------------------------------------------------------

/// Rows of transactions that commit in any order, and one source's sweeps over them.
struct Model {
    now: Duration,
    base: Instant,
    /// (created_at in microseconds, id) of rows in open transactions; the flag says that no late floor shows them.
    open: BTreeMap<Position, bool>,
    /// Committed, and whether a late floor showed them while they were not.
    live: BTreeMap<Position, bool>,
    seen: BTreeSet<Position>,
    sweeps: Sweeps,
    /// The sweep under way, and what has to be seen when it ends.
    current: Option<(SweepKind, Vec<Position>)>,
    /// A floor was sampled for such a sweep.
    sampled: Option<(SweepKind, PgTime, Duration)>,
    ids: u128,
}

impl Model {
    fn new() -> Self {
        let base = Instant::now();
        Self {
            now: Duration::ZERO,
            base,
            open: BTreeMap::new(),
            live: BTreeMap::new(),
            seen: BTreeSet::new(),
            sweeps: Sweeps::new(base),
            current: None,
            sampled: None,
            ids: 0,
        }
    }

    fn instant(&self) -> Instant {
        self.base + self.now
    }

    fn db_now(&self) -> PgTime {
        PgTime(1_000_000_000_000 + i64::try_from(self.now.as_micros()).expect("short"))
    }

    fn begin(&mut self, id: u128, hidden: bool) {
        self.ids += 1;
        self.open
            .insert(Position { created_at: self.db_now(), outbox_id: Uuid::from_u128(id << 64 | self.ids) }, hidden);
    }

    fn commit(&mut self, index: usize) {
        let position = *self.open.keys().nth(index).expect("that many are open");
        let hidden = self.open.remove(&position).expect("just seen");
        self.live.insert(position, hidden);
    }

    /// Samples the floor of the sweep that is due.
    fn sample(&mut self, took: Duration) {
        let kind = self.sweeps.next_kind(self.instant());
        let shown = self.open.iter().filter(|(_, hidden)| !**hidden).map(|(position, _)| position.created_at);
        let floor = shown.min().unwrap_or(self.db_now());
        self.now += took;
        self.sampled = Some((kind, floor, took));
    }

    /// Reads a page; the first of a sweep begins it.
    fn page(&mut self, limit: usize, took: Duration) {
        if let Some((kind, late_floor, took)) = self.sampled.take() {
            let polled = self.sweeps.poll_from(self.instant());
            let floor = if kind == SweepKind::Tail { PgTime::NEG_INFINITY } else { late_floor };
            self.sweeps.begin(kind, floor, took);
            let from = self.sweeps.page_after().expect("just begun");
            if kind != SweepKind::Tail {
                assert!(from <= polled, "a poll looks from {polled:?}, the sweep it wakes from {from:?}");
            }
            let owed = self.live.iter().filter(|(position, hidden)| match kind {
                SweepKind::Full => true,
                SweepKind::Late => !**hidden,
                SweepKind::Tail => **position > from,
            });
            self.current = Some((kind, owed.map(|(position, _)| *position).collect()));
        }
        let after = self.sweeps.page_after().expect("a sweep is under way");
        let page: Vec<Position> = self.live.keys().filter(|position| **position > after).take(limit).copied().collect();
        self.now += took;
        self.seen.extend(&page);
        self.sweeps.page(page.last().copied(), page.len() == limit, took, self.instant());
        if self.sweeps.page_after().is_none() {
            let (kind, owed) = self.current.take().expect("a sweep was under way");
            for position in owed {
                assert!(self.seen.contains(&position), "a {kind:?} sweep skipped {position:?}");
            }
        }
        self.look();
    }

    /// Whenever a late sweep may be made, a poll shows every row that was never seen and that no full sweep is needed for.
    fn look(&self) {
        if self.current.is_some() || self.sampled.is_some() {
            return;
        }
        let from = self.sweeps.poll_from(self.sweeps.next_late_at().max(self.instant()));
        for (position, hidden) in &self.live {
            let unseen = !hidden && !self.seen.contains(position);
            assert!(!unseen || *position > from, "no poll from {from:?} shows {position:?}");
        }
    }

    /// Rows that were seen are relayed some time.
    fn relay(&mut self, keep: usize) {
        let done: Vec<Position> = self.live.keys().filter(|position| self.seen.contains(position)).copied().collect();
        for position in done.iter().take(done.len().saturating_sub(keep)) {
            self.live.remove(position);
        }
    }
}

#[test]
fn no_sweep_skips_what_its_floor_covers() {
    for seed in seeds(200) {
        println!("seed {seed}");
        let choose = &mut Seeded::new(seed);
        let mut model = Model::new();
        let limit = 1 + choose.pick(4);
        for _ in 0..500 {
            let took = Duration::from_micros(choose.pick(20_000) as u64);
            match choose.pick(12) {
                0..2 => {
                    let (id, hidden) = (choose.pick(1_000) as u128, choose.one_in(10));
                    model.begin(id, hidden);
                }
                2..4 => {
                    if !model.open.is_empty() {
                        let index = choose.pick(model.open.len());
                        model.commit(index);
                    }
                }
                4 => model.now += Duration::from_micros(choose.pick(4_000_000) as u64),
                5 => model.relay(choose.pick(6)),
                6 if choose.one_in(8) => {
                    model.sweeps.abandon(model.instant());
                    (model.current, model.sampled) = (None, None);
                }
                7 if choose.one_in(8) => model.sweeps.demand_full(model.instant()),
                _ => {
                    let interrupt = model.sampled.is_none() && model.sweeps.look_back_due(model.instant());
                    if model.current.is_none() && model.sampled.is_none() || interrupt {
                        model.sample(took);
                    } else {
                        model.page(limit, took);
                    }
                }
            }
        }
    }
}

/// Three transactions that began long before one another, committed in any order between any two statements.
#[test]
fn no_order_of_three_commits_escapes_the_sweeps() {
    let mut choose = Every::default();
    let mut runs = 0;
    loop {
        let mut model = Model::new();
        for id in 0..3 {
            model.begin(id, false);
            model.now += 10 * SECOND;
        }
        let limit = 1 + choose.pick(2);
        for _ in 0..14 {
            let chosen = choose.pick(1 + model.open.len());
            if chosen > 0 {
                model.commit(chosen - 1);
            } else if model.current.is_none() && model.sampled.is_none() {
                // Time for the next late sweep, too early for a full one.
                model.now += Duration::from_millis(100);
                model.sample(Duration::from_millis(1));
            } else {
                model.page(limit, Duration::from_millis(1));
            }
        }
        while !model.open.is_empty() {
            model.commit(0);
        }
        // The sweep under way may have passed them; the next may not.
        for _ in 0..2 {
            if model.current.is_none() && model.sampled.is_none() {
                model.now += Duration::from_millis(100);
                model.sample(Duration::from_millis(1));
                assert_eq!(model.sampled.expect("just sampled").0, SweepKind::Late, "no full sweep helps");
            }
            while model.current.is_some() || model.sampled.is_some() {
                model.page(limit, Duration::from_millis(1));
            }
        }
        assert_eq!(model.seen.len(), 3);
        runs += 1;
        if !choose.advance() {
            break;
        }
    }
    println!("{runs} runs");
    assert!(runs > 1_000);
}

/// An hour of one source, swept whenever it is due: what that costs.
#[test]
fn sweeps_cost_no_more_than_their_share() {
    for seed in seeds(20) {
        println!("seed {seed}");
        let choose = &mut Seeded::new(seed);
        let base = Instant::now();
        let (mut now, end) = (base, base + 3_600 * SECOND);
        let mut sweeps = Sweeps::new(now);
        let (mut late, mut full) = (Duration::ZERO, Duration::ZERO);
        let mut last_full = now;
        let (late_took, full_took) =
            (Duration::from_micros(choose.pick(50_000) as u64), Duration::from_millis(choose.pick(2_000) as u64));
        while now < end {
            let kind = sweeps.next_kind(now);
            let took = match kind {
                SweepKind::Full => {
                    assert!(now - last_full <= 310 * SECOND, "no full sweep for {:?}", now - last_full);
                    last_full = now;
                    full += full_took;
                    full_took
                }
                SweepKind::Late => {
                    late += late_took;
                    late_took
                }
                SweepKind::Tail => Duration::ZERO,
            };
            sweeps.begin(kind, PgTime(0), Duration::ZERO);
            now += took;
            sweeps.page(None, false, took, now);
            now = sweeps.next_late_at().min(sweeps.next_full_at()).max(now + Duration::from_millis(2));
        }
        // The first full sweep comes at once, whatever it costs.
        assert!(late <= 3_600 * SECOND / 20, "late sweeps took {late:?} of an hour");
        assert!(full <= 3_600 * SECOND / 100 + full_took, "full sweeps took {full:?} of an hour");
    }
}
