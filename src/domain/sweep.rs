//! Where a source's next look at the table begins: behind the last row seen, back at what may have been committed late, or at the start.
//!
//! created_at is the start of the producer's transaction, so rows appear behind the cursor all the time. Nothing here ever trusts
//! the cursor alone: a row committed late is found by going back to the oldest transaction that was running, and every row by a
//! full sweep now and then. Pure: instants are arguments.

use std::time::{Duration, Instant};

use super::message::{PgTime, Position};

/// How far before the oldest running transaction a late sweep begins: clocks step.
const LATE_MARGIN_MICROS: i64 = 2_000_000;
/// A full sweep may take this share of the time (1 %), but comes at least every five minutes and at most every fifteen seconds.
const FULL_COST_FACTOR: u32 = 100;
const FULL_INTERVAL_MIN: Duration = Duration::from_secs(15);
const FULL_INTERVAL_MAX: Duration = Duration::from_secs(300);
/// Ten full sweeps a second over all sources are enough.
const FULL_INTERVAL_PER_SOURCE: Duration = Duration::from_millis(100);
/// How soon rows of lanes that did not fit into memory are looked for again.
const FULL_INTERVAL_OVERFLOWED: Duration = Duration::from_secs(30);
/// A late sweep may take this share of the time (5 %): it is cheap unless a transaction stays open for long.
const LATE_COST_FACTOR: u32 = 20;

/// What a sweep covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SweepKind {
    /// Everything.
    Full,
    /// From the oldest transaction that was running before the last such sweep.
    Late,
    /// Only what lies behind the last row seen.
    Tail,
}

/// The sweep under way.
#[derive(Debug, Clone, Copy)]
struct Current {
    /// What it still covers: a full or late sweep that has reached `until` is a tail sweep from there on.
    kind: SweepKind,
    /// Where its next page begins.
    position: Position,
    /// The last row ever seen when it began: up to there it looks back.
    until: Position,
    /// Sampled before it.
    late_floor: PgTime,
    /// The time its queries took.
    spent: Duration,
}

/// The sweeps of one source.
#[derive(Debug)]
pub struct Sweeps {
    current: Option<Current>,
    /// The last row ever seen.
    tail: Position,
    /// Rows that were invisible to the last sweep have a created_at no earlier than this.
    late_from: PgTime,
    next_full_at: Instant,
    /// Full sweeps come no closer than this.
    full_interval_min: Duration,
    next_late_at: Instant,
    /// When another full sweep was asked for since the last one began: what is under way may have passed those rows already.
    again_at: Option<Instant>,
}

impl Sweeps {
    /// Begins with a full sweep.
    #[must_use]
    pub fn new(now: Instant) -> Self {
        Self {
            current: None,
            tail: Position::START,
            late_from: PgTime::NEG_INFINITY,
            next_full_at: now,
            full_interval_min: FULL_INTERVAL_MIN,
            next_late_at: now,
            again_at: None,
        }
    }

    /// Where the next page of the sweep under way begins.
    #[must_use]
    pub fn page_after(&self) -> Option<Position> {
        self.current.map(|current| current.position)
    }

    /// Whether the sweep under way only moves forward although it is time to look back: begin that sweep instead of reading
    /// the next page. While rows come in faster than they are relayed, a sweep never ends.
    #[must_use]
    pub fn look_back_due(&self, now: Instant) -> bool {
        let forward = self.current.is_some_and(|current| current.kind == SweepKind::Tail);
        forward && self.next_kind(now) != SweepKind::Tail
    }

    /// What a sweep that began now would cover.
    #[must_use]
    pub fn next_kind(&self, now: Instant) -> SweepKind {
        if now >= self.next_full_at {
            SweepKind::Full
        } else if now >= self.next_late_at {
            SweepKind::Late
        } else {
            SweepKind::Tail
        }
    }

    /// When the next full sweep is due, whether or not anything new shows.
    #[must_use]
    pub fn next_full_at(&self) -> Instant {
        self.next_full_at
    }

    /// From when on a late sweep may be made, so that a poll covers what may have been committed late.
    #[must_use]
    pub fn next_late_at(&self) -> Instant {
        self.next_late_at
    }

    /// Asks for a full sweep at once.
    pub fn demand_full(&mut self, now: Instant) {
        self.full_by(now);
    }

    /// Where a poll must look so that it misses nothing the next sweep would find.
    #[must_use]
    pub fn poll_from(&self, now: Instant) -> Position {
        if now >= self.next_late_at { self.tail.min(Position::at(self.late_from)) } else { self.tail }
    }

    /// Begins a sweep. `late_floor` was sampled by an earlier statement than the sweep's first page; a tail sweep needs none.
    pub fn begin(&mut self, kind: SweepKind, late_floor: PgTime, took: Duration) {
        let from = match kind {
            SweepKind::Full => Position::START,
            SweepKind::Late => self.tail.min(Position::at(self.late_from)),
            SweepKind::Tail => self.tail,
        };
        self.current = Some(Current { kind, position: from, until: self.tail, late_floor, spent: took });
        if kind == SweepKind::Full {
            self.again_at = None;
        }
    }

    /// Takes in a page: its last row, and whether it was full (so that another follows).
    pub fn page(&mut self, last: Option<Position>, full: bool, took: Duration, now: Instant) {
        let Some(mut current) = self.current.take() else { return };
        current.spent += took;
        if let Some(last) = last {
            self.tail = self.tail.max(last);
            current.position = last;
        }
        let more = full && last.is_some();
        if !more || current.position >= current.until {
            self.looked_back(current, now);
            current.kind = SweepKind::Tail;
        }
        if more {
            self.current = Some(current);
        }
    }

    /// Everything up to the last row that had been seen when the sweep began was looked at again.
    fn looked_back(&mut self, sweep: Current, now: Instant) {
        match sweep.kind {
            SweepKind::Tail => return,
            SweepKind::Late => self.next_late_at = now + sweep.spent * LATE_COST_FACTOR,
            // What a full sweep costs says nothing about what a late one will.
            SweepKind::Full => {
                let next = now + (sweep.spent * FULL_COST_FACTOR).clamp(self.full_interval_min, FULL_INTERVAL_MAX);
                self.next_full_at = self.again_at.map_or(next, |again| again.min(next));
            }
        }
        self.late_from = PgTime(sweep.late_floor.0.saturating_sub(LATE_MARGIN_MICROS));
    }

    /// Says beside how many sources this one is swept: a table of a thousand idle ones is not to be asked hundreds of times a second.
    pub fn beside(&mut self, sources: usize) {
        let sources = u32::try_from(sources).unwrap_or(u32::MAX);
        let interval = FULL_INTERVAL_PER_SOURCE.saturating_mul(sources);
        self.full_interval_min = interval.clamp(FULL_INTERVAL_MIN, FULL_INTERVAL_MAX);
    }

    /// A lane did not fit into memory.
    pub fn overflowed(&mut self, now: Instant) {
        self.full_by(now + FULL_INTERVAL_OVERFLOWED);
    }

    fn full_by(&mut self, at: Instant) {
        self.next_full_at = self.next_full_at.min(at);
        self.again_at = Some(self.again_at.map_or(at, |before| before.min(at)));
    }

    /// The connection was lost, or the sweep could not go on: begin again from the start.
    pub fn abandon(&mut self, now: Instant) {
        self.current = None;
        self.next_full_at = now;
    }
}
