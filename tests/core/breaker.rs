//! The breaker opens after twenty terminal verdicts in a row, tries one row at a time, and never stays closed by accident.

use std::time::{Duration, Instant};

use keiro_relay::domain::breaker::{Allowance, Breaker, Change, STREAK_MAX};

#[test]
fn twenty_terminal_verdicts_in_a_row_open_it() {
    let now = Instant::now();
    let mut breaker = Breaker::default();
    for _ in 1..STREAK_MAX {
        assert_eq!(breaker.settled(0, 1, now), Change::None);
        assert_eq!(breaker.allowance(now), Allowance::All);
    }
    assert_eq!(breaker.settled(0, 1, now), Change::Opened);
    assert!(matches!(breaker.allowance(now), Allowance::Nothing(until) if until > now));
}

#[test]
fn an_acknowledgement_or_a_mere_failure_between_them_does_not() {
    let now = Instant::now();
    let mut breaker = Breaker::default();
    for _ in 0..10 {
        assert_eq!(breaker.settled(0, STREAK_MAX - 1, now), Change::None);
        assert_eq!(breaker.settled(1, 5, now), Change::None);
    }
    // Rows that fail and are tried again end nothing.
    assert_eq!(breaker.settled(0, STREAK_MAX - 1, now), Change::None);
    assert_eq!(breaker.settled(0, 0, now), Change::None);
    assert_eq!(breaker.allowance(now), Allowance::All);
}

#[test]
fn open_it_tries_one_row_after_ever_longer_rests() {
    let mut now = Instant::now();
    let mut breaker = Breaker::default();
    assert_eq!(breaker.settled(0, 500, now), Change::Opened);
    let mut last = Duration::ZERO;
    for _ in 0..6 {
        // What was in flight changes nothing.
        assert_eq!(breaker.settled(0, 7, now), Change::None);
        let Allowance::Nothing(until) = breaker.allowance(now) else { panic!("it is open") };
        let rest = until - now;
        assert!(rest >= last && rest <= Duration::from_secs(600), "{rest:?} after {last:?}");
        last = rest;
        now = until;
        assert_eq!(breaker.allowance(now), Allowance::One);
        assert_eq!(breaker.settled(0, 1, now), Change::Opened);
    }
    let Allowance::Nothing(until) = breaker.allowance(now) else { panic!("it is open") };
    assert_eq!(breaker.settled(1, 0, until), Change::Closed);
    assert_eq!(breaker.allowance(until), Allowance::All);
    // The streak begins anew.
    assert_eq!(breaker.settled(0, STREAK_MAX - 1, until), Change::None);
}

#[test]
fn an_operator_closes_it() {
    let now = Instant::now();
    let mut breaker = Breaker::default();
    assert_eq!(breaker.close(), Change::None);
    assert_eq!(breaker.settled(0, STREAK_MAX, now), Change::Opened);
    assert_eq!(breaker.close(), Change::Closed);
    assert_eq!(breaker.allowance(now), Allowance::All);
}
