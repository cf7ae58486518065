//! The lane scheduler, case by case.

use std::sync::Arc;
use std::time::{Duration, Instant};

use keiro_relay::domain::lanes::{Glimpse, Lane, Lanes, PROBE_INTERVAL_MAX, Request, RowState, Served};
use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::policy::Policy;
use uuid::Uuid;

const BATCH: usize = 100;
const PER_KEY: Policy = Policy::PerKeyHeadOfLine;

/// A position; the number is both when the row was created and its id.
fn at(number: i64) -> Position {
    Position { created_at: PgTime(number), outbox_id: Uuid::from_u128(number.unsigned_abs().into()) }
}

fn seen(key: Option<&str>, number: i64, state: RowState, attempted: bool) -> Glimpse {
    Glimpse { position: at(number), message_key: key.map(Arc::from), state, attempted }
}

fn due(key: &str, number: i64) -> Glimpse {
    seen(Some(key), number, RowState::Due, false)
}

fn failing(key: &str, number: i64, due_in: Duration) -> Glimpse {
    seen(Some(key), number, RowState::Later(due_in), true)
}

fn key(name: &str) -> Lane {
    Lane::Key(Arc::from(name))
}

fn lanes_of(request: &Request) -> Vec<Lane> {
    request.lanes.iter().map(|wanted| wanted.lane.clone()).collect()
}

fn claimed(rows: usize, through: i64) -> Served {
    Served::Claimed { rows, through: at(through), blocked: None }
}

/// A scheduler that has seen these rows, and the time.
fn after(policy: Policy, glimpses: &[Glimpse]) -> (Lanes, Instant) {
    let (mut lanes, now) = (Lanes::new(policy, 1_000), Instant::now());
    lanes.discovered(glimpses, now);
    (lanes, now)
}

#[track_caller]
fn next(lanes: &mut Lanes) -> Request {
    lanes.next_request(BATCH).expect("something is ready")
}

// ---- retries ---------------------------------------------------------------------------------------------------------------

#[test]
fn retries_that_wait_for_each_other_do_not_count_as_ready() {
    let retry = |name: &str, number| seen(Some(name), number, RowState::Due, true);
    let (mut lanes, now) = after(PER_KEY, &[retry("a", 1), due("a", 2), due("a", 3), retry("b", 4), due("b", 5)]);
    assert_eq!(lanes.rows_ready(), 1, "one row can go, however many wait behind it");
    let first = next(&mut lanes);
    assert!(first.retry);
    assert_eq!(lanes.rows_ready(), 0, "b waits for a: whoever asks has to look further meanwhile");
    assert_eq!(lanes.next_request(BATCH), None);
    lanes.served(&first, vec![claimed(1, 1)], now);
    assert_eq!(lanes.rows_ready(), 3, "b's retry, and the two rows behind a's");
}

#[test]
fn a_row_whose_attempt_was_returned_is_no_retry() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("b", 2)]);
    let request = next(&mut lanes);
    let returned = |name: &str, number| {
        let head = seen(Some(name), number, RowState::Later(Duration::from_secs(1)), false);
        Served::Claimed { rows: 1, through: at(number), blocked: Some(head) }
    };
    lanes.served(&request, vec![returned("a", 1), returned("b", 2)], now);
    lanes.tick(now + Duration::from_secs(1));
    let again = next(&mut lanes);
    assert!(!again.retry, "the cluster was away: nobody is to blame");
    assert_eq!(lanes_of(&again), [key("a"), key("b")], "both at once");
}

// ---- parked lanes ----------------------------------------------------------------------------------------------------------

#[test]
fn a_row_committed_late_before_the_pivot_of_a_parked_lane_is_claimed_at_once() {
    // The head that was asked for is sent, the third row fails; then a row turns up between them.
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("a", 5), due("a", 9)]);
    let request = next(&mut lanes);
    let pivot = failing("a", 9, Duration::from_secs(60));
    lanes.served(&request, vec![Served::Claimed { rows: 3, through: at(9), blocked: Some(pivot) }], now);
    assert_eq!(lanes.rows_ready(), 0);
    lanes.discovered(&[due("a", 12)], now);
    assert_eq!(lanes.rows_ready(), 0, "what lies behind the pivot waits for it");
    lanes.discovered(&[due("a", 7)], now);
    assert!(lanes.rows_ready() > 0, "what lies before it does not");
    let request = next(&mut lanes);
    assert_eq!((lanes_of(&request), request.retry), (vec![key("a")], false));
}

#[test]
fn a_row_committed_late_before_the_head_of_a_parked_lane_is_claimed_at_once() {
    let (mut lanes, now) = after(PER_KEY, &[failing("a", 5, Duration::from_secs(60))]);
    assert_eq!(lanes.next_request(BATCH), None);
    lanes.discovered(&[seen(Some("a"), 3, RowState::Publishing, true)], now);
    assert_eq!(lanes.next_request(BATCH), None, "a row that somebody has is none to claim");
    lanes.discovered(&[due("a", 2)], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
}

#[test]
fn a_row_committed_late_before_the_pivot_of_a_lane_in_flight_is_claimed_at_once() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("a", 9)]);
    let request = next(&mut lanes);
    // The first row is sent and the second fails, and nobody knows of the one between them but the sweep that passed it meanwhile.
    lanes.discovered(&[due("a", 5)], now);
    let pivot = || failing("a", 9, Duration::from_secs(60));
    lanes.served(&request, vec![Served::Claimed { rows: 2, through: at(9), blocked: Some(pivot()) }], now);
    let request = next(&mut lanes);
    assert_eq!((lanes_of(&request), request.retry), (vec![key("a")], false));
    // The same when nothing was claimed, and the look at the head came before the commit.
    lanes.discovered(&[due("a", 7)], now);
    lanes.served(&request, vec![Served::Nothing(Some(pivot()))], now);
    let request = next(&mut lanes);
    // What turns up behind the pivot is no reason to ask again.
    lanes.discovered(&[due("a", 12)], now);
    lanes.served(&request, vec![Served::Nothing(Some(pivot()))], now);
    assert_eq!(lanes.next_request(BATCH), None);
}

#[test]
fn lanes_that_are_probed_before_they_are_due_are_looked_at_together() {
    let hour = Duration::from_secs(3_600);
    let publishing = seen(Some("c"), 3, RowState::Publishing, true);
    let (mut lanes, now) = after(PER_KEY, &[failing("a", 1, hour), failing("b", 2, hour), publishing]);
    lanes.tick(now + PROBE_INTERVAL_MAX);
    let probe = next(&mut lanes);
    assert_eq!((lanes_of(&probe), probe.retry), (vec![key("a"), key("b"), key("c")], false));
    // One of them has become due meanwhile: now it goes alone.
    let heads = vec![
        Served::Nothing(Some(failing("a", 1, hour))),
        Served::Nothing(Some(seen(Some("b"), 2, RowState::Due, true))),
        Served::Nothing(None),
    ];
    lanes.served(&probe, heads, now + PROBE_INTERVAL_MAX);
    let retry = next(&mut lanes);
    assert_eq!((lanes_of(&retry), retry.retry), (vec![key("b")], true));
    assert_eq!(lanes.next_request(BATCH), None);
    // A change from outside wakes them together too.
    lanes.served(&retry, vec![Served::Nothing(Some(failing("b", 2, hour)))], now + PROBE_INTERVAL_MAX);
    lanes.wake_all();
    let probe = next(&mut lanes);
    assert!(!probe.retry);
    assert_eq!(probe.lanes.len(), 2);
}

// ---- memory ----------------------------------------------------------------------------------------------------------------

#[test]
fn lanes_that_wait_make_room_for_one_that_can_be_claimed() {
    let (mut lanes, now) = (Lanes::new(PER_KEY, 2), Instant::now());
    let odd = |name: &str, number| seen(Some(name), number, RowState::Unknown, false);
    lanes.discovered(&[odd("a", 1), failing("b", 2, Duration::from_secs(5))], now);
    assert!(!lanes.take_overflowed());
    lanes.discovered(&[odd("c", 3)], now);
    assert!(lanes.take_overflowed() && lanes.len() == 2, "what waits pushes nobody out");
    assert_eq!(lanes.next_probe_at(), Some(now + Duration::from_secs(5)));
    lanes.discovered(&[due("d", 4)], now);
    assert!(lanes.take_overflowed(), "a lane was forgotten: a full sweep has to find it again");
    assert_eq!(lanes_of(&next(&mut lanes)), [key("d")]);
    assert_eq!(lanes.next_probe_at(), Some(now + Duration::from_secs(5)), "the one that would be probed last went");
    assert_eq!(lanes.len(), 2);
    // What can be claimed or is in flight is pushed out by nobody.
    lanes.discovered(&[due("e", 5), due("f", 6)], now);
    assert_eq!((lanes.len(), lanes.next_probe_at()), (2, None));
    assert_eq!(lanes_of(&next(&mut lanes)), [key("e")]);
}

// ---- wake-ups --------------------------------------------------------------------------------------------------------------

#[test]
fn a_wake_up_reaches_lanes_in_flight() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("b", 2), due("c", 3)]);
    let request = next(&mut lanes);
    // Their pass has looked at the heads when an operator makes them due, and the wake-up overtakes its report.
    lanes.wake_all();
    let late = || failing("a", 1, Duration::from_secs(60));
    let heads = vec![
        Served::Nothing(Some(late())),
        Served::Nothing(None),
        Served::Claimed { rows: 1, through: at(3), blocked: Some(failing("c", 3, Duration::from_secs(60))) },
    ];
    lanes.served(&request, heads, now);
    let again = next(&mut lanes);
    assert_eq!((lanes_of(&again), again.retry), (vec![key("a"), key("b"), key("c")], false));
}
