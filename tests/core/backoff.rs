//! Properties of the delays between attempts. Random cases print their seed.

use std::time::Duration;

use keiro_relay::domain::backoff::{Backoff, BackoffKind};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const ATTEMPTS: [i64; 12] = [i64::MIN, -1, 0, 1, 2, 3, 10, 63, 1_000, 1_000_000, i64::MAX - 1, i64::MAX];

fn exponential(initial: Duration, multiplier: f64, max: Duration, jitter: f64) -> Backoff {
    Backoff { kind: BackoffKind::Exponential, initial, multiplier, max, jitter }
}

fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value)
}

/// A legal backoff of any size, up to the bounds of the type now and then.
fn any(rng: &mut StdRng) -> Backoff {
    let max = match rng.random_range(0..4) {
        0 => Duration::MAX,
        1 => Duration::from_nanos(rng.random_range(1..1_000)),
        _ => Duration::from_nanos(rng.random_range(1..=u64::MAX)),
    };
    let initial = max.mul_f64(rng.random_range(0.0..0.999)).max(Duration::from_nanos(1)).min(max);
    Backoff {
        kind: if rng.random_bool(0.2) { BackoffKind::Constant } else { BackoffKind::Exponential },
        initial,
        multiplier: if rng.random_bool(0.1) { f64::MAX } else { rng.random_range(1.0..10.0) },
        max,
        jitter: [0.0, 1.0, rng.random_range(0.0..=1.0)][rng.random_range(0..3)],
    }
}

fn random_cases(seed: u64, mut check: impl FnMut(&Backoff, &mut StdRng)) {
    println!("seed {seed}");
    let mut rng = StdRng::seed_from_u64(seed);
    for _ in 0..20_000 {
        let backoff = any(&mut rng);
        check(&backoff, &mut rng);
    }
}

fn seed() -> u64 {
    std::env::var("KEIRO_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(rand::random)
}

#[test]
fn every_delay_lies_between_initial_and_max_whatever_the_attempt() {
    random_cases(seed(), |backoff, rng| {
        for attempt in ATTEMPTS {
            for draw in [0.0, rng.random_range(0.0..1.0), 1.0 - f64::EPSILON] {
                let delay = backoff.delay(attempt, draw);
                assert!(
                    backoff.initial <= delay && delay <= backoff.max,
                    "{delay:?} after attempt {attempt}, draw {draw}, of {backoff:?}"
                );
            }
        }
    });
}

#[test]
fn without_jitter_a_later_attempt_never_waits_less_and_the_draw_does_not_matter() {
    random_cases(seed(), |backoff, rng| {
        let backoff = Backoff { jitter: 0.0, ..backoff.clone() };
        let mut before = Duration::ZERO;
        for attempt in 1..40 {
            let delay = backoff.delay(attempt, rng.random_range(0.0..1.0));
            assert!(delay >= before, "attempt {attempt} waits {delay:?} after {before:?}, of {backoff:?}");
            assert_eq!(delay, backoff.delay(attempt, 0.25), "of {backoff:?}");
            before = delay;
        }
    });
}

#[test]
fn a_larger_draw_never_waits_less() {
    random_cases(seed(), |backoff, rng| {
        let (one, other): (f64, f64) = (rng.random_range(0.0..1.0), rng.random_range(0.0..1.0));
        let attempt = rng.random_range(1..30);
        let (less, more) = (backoff.delay(attempt, one.min(other)), backoff.delay(attempt, one.max(other)));
        assert!(less <= more, "{less:?} > {more:?} for draws {one} and {other}, of {backoff:?}");
    });
}

#[test]
fn the_delay_is_the_documented_formula() {
    // By hand: min(60, 1 × 2^(n−1)) × (1 − 0.2 + 0.4·draw), clamped to 1..60.
    let backoff = exponential(seconds(1.0), 2.0, seconds(60.0), 0.2);
    for (attempt, draw, expected) in [
        (1, 0.0, 1.0), // 0.8, not below the initial delay
        (1, 0.5, 1.0),
        (1, 0.75, 1.1),
        (2, 0.0, 1.6),
        (2, 0.5, 2.0),
        (3, 0.25, 3.6),
        (6, 0.5, 32.0),
        (7, 0.0, 48.0),
        (7, 0.5, 60.0),
        (7, 0.9, 60.0), // 69.6, not above the maximum
        (i64::MAX, 0.0, 48.0),
    ] {
        let delay = backoff.delay(attempt, draw).as_secs_f64();
        assert!((delay - expected).abs() < 1e-6, "attempt {attempt}, draw {draw}: {delay} instead of {expected}");
    }
}

#[test]
fn a_constant_delay_stays_at_its_initial_value_apart_from_jitter() {
    let backoff = Backoff { kind: BackoffKind::Constant, ..exponential(seconds(2.0), 3.0, seconds(10.0), 0.0) };
    for attempt in ATTEMPTS {
        assert_eq!(backoff.delay(attempt, 0.7), seconds(2.0), "attempt {attempt}");
    }
    let jittered = Backoff { jitter: 0.5, ..backoff };
    // 2 × (1 − 0.5 + 1 × 0.75)
    assert_eq!(jittered.delay(9, 0.75), seconds(2.5));
    assert_eq!(jittered.delay(9, 0.1), seconds(2.0), "never below the initial delay");
}

#[test]
fn the_longest_duration_is_no_panic() {
    let backoff = exponential(Duration::from_nanos(1), f64::MAX, Duration::MAX, 1.0);
    assert_eq!(backoff.delay(i64::MAX, 0.999), Duration::MAX);
    let still = exponential(Duration::MAX, 1.0, Duration::MAX, 1.0);
    assert_eq!(still.delay(i64::MAX, 0.0), Duration::MAX);
}
