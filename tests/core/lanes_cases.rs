//! The lane scheduler, case by case.

use std::sync::Arc;
use std::time::{Duration, Instant};

use keiro_relay::domain::lanes::{Glimpse, Lane, Lanes, PROBE_INTERVAL_MAX, Request, RowState, Served, Wanted};
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

// ---- what was seen, and what a claim covered -----------------------------------------------------------------------------------

#[test]
fn rows_are_counted_once_however_often_they_are_seen() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("a", 2), due("b", 3)]);
    assert_eq!((lanes.rows_ready(), lanes.len()), (3, 2));
    lanes.discovered(&[due("a", 1), due("a", 2), due("b", 3), due("a", 4)], now);
    assert_eq!(lanes.rows_ready(), 4);
    let request = next(&mut lanes);
    let wanted: Vec<usize> = request.lanes.iter().map(|wanted| wanted.rows_max).collect();
    assert_eq!((wanted, lanes.rows_ready()), (vec![3, 1], 0));
}

#[test]
fn a_lane_is_forgotten_only_when_a_claim_got_as_far_as_anything_was_seen() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("a", 2), due("a", 3)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![claimed(2, 2)], now);
    assert_eq!(lanes.rows_ready(), 1, "the third row was not claimed");
    let request = next(&mut lanes);
    lanes.served(&request, vec![claimed(1, 3)], now);
    assert!(lanes.is_empty());
    assert_eq!(lanes.next_request(BATCH), None);
}

#[test]
fn a_row_committed_late_between_others_is_not_lost_by_counting() {
    // Three rows were asked for; what was claimed are three, but one of them nobody had seen.
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("a", 5), due("a", 9)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![claimed(3, 5)], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")], "the row at 9 is still there");
}

#[test]
fn a_row_that_turns_up_while_its_lane_is_in_flight_is_asked_for_again() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 5), due("b", 6)]);
    let request = next(&mut lanes);
    // One behind what was asked for and one committed late before it; either may have missed the claim.
    lanes.discovered(&[due("b", 2), due("a", 7)], now);
    lanes.served(&request, vec![claimed(1, 5), claimed(1, 6)], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a"), key("b")]);
}

#[test]
fn a_lane_in_flight_is_dispatched_by_nothing() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 5), due("a", 6)]);
    let request = next(&mut lanes);
    lanes.discovered(&[due("a", 1), due("a", 5), due("a", 9)], now);
    lanes.wake_all();
    lanes.tick(now + Duration::from_secs(1_000));
    assert_eq!((lanes.rows_ready(), lanes.next_request(BATCH)), (0, None));
    lanes.served(&request, vec![Served::NotAsked], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
}

#[test]
fn a_whole_source_is_looked_at_until_it_yields_nothing() {
    let (mut lanes, now) = after(Policy::PerSourceStream, &[due("a", 1), due("b", 2)]);
    for _ in 0..3 {
        let request = next(&mut lanes);
        assert_eq!(request.lanes, [Wanted { lane: Lane::Source, rows_max: BATCH }]);
        lanes.served(&request, vec![claimed(2, 2)], now);
    }
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(None)], now);
    assert!(lanes.is_empty());
}

#[test]
fn keys_and_single_rows_take_turns() {
    let row = |number| seen(None, number, RowState::Due, false);
    let (mut lanes, _) = after(PER_KEY, &[due("a", 1), row(2), due("b", 3), row(4)]);
    let kind = |request: &Request| matches!(request.lanes[0].lane, Lane::Key(_));
    let (first, second) = (next(&mut lanes), next(&mut lanes));
    assert_ne!(kind(&first), kind(&second));
    assert_eq!((first.lanes.len(), second.lanes.len()), (2, 2), "a request holds lanes of one kind");
}

#[test]
fn few_lanes_are_asked_for_many_rows_rather_than_many_for_few() {
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let glimpses: Vec<Glimpse> =
        (0..4_000).zip(keys.into_iter().cycle()).map(|(number, key)| due(key, number)).collect();
    let rows = |lanes: &mut Lanes| -> Vec<usize> { next(lanes).lanes.iter().map(|wanted| wanted.rows_max).collect() };
    let (mut lanes, _) = after(PER_KEY, &glimpses);
    assert_eq!(rows(&mut lanes), [16, 16, 16, 16, 16, 16, 16], "a batch of 100");
    let (mut lanes, _) = after(PER_KEY, &glimpses[..1]);
    lanes.discovered(
        &glimpses.iter().filter(|row| row.message_key.as_deref() == Some("a")).cloned().collect::<Vec<_>>(),
        Instant::now(),
    );
    assert_eq!(rows(&mut lanes), [BATCH], "one lane alone fills it");
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
fn a_lane_whose_head_was_attempted_before_goes_alone_and_one_at_a_time() {
    let retry = |name: &str, number| seen(Some(name), number, RowState::Due, true);
    let (mut lanes, now) = after(PER_KEY, &[retry("a", 1), due("a", 2), retry("b", 3), due("c", 4), due("d", 5)]);
    let first = next(&mut lanes);
    assert_eq!(first, Request { lanes: vec![Wanted { lane: key("a"), rows_max: 1 }], retry: true });
    let others = next(&mut lanes);
    assert_eq!((lanes_of(&others), others.retry), (vec![key("c"), key("d")], false), "innocent lanes go on meanwhile");
    assert_eq!(lanes.next_request(BATCH), None, "b waits for a");
    lanes.served(&first, vec![claimed(1, 1)], now);
    assert_eq!(next(&mut lanes), Request { lanes: vec![Wanted { lane: key("b"), rows_max: 1 }], retry: true });
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")], "what lay behind the retry");
}

#[test]
fn a_head_that_turns_out_to_have_been_attempted_becomes_a_retry_at_once() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(Some(seen(Some("a"), 1, RowState::Due, true)))], now);
    assert_eq!(next(&mut lanes), Request { lanes: vec![Wanted { lane: key("a"), rows_max: 1 }], retry: true });
    // A whole source needs no such request: its statement claims an attempted head alone.
    let (mut lanes, _) = after(Policy::StopTheLine, &[seen(None, 1, RowState::Due, true)]);
    assert_eq!(next(&mut lanes), Request { lanes: vec![Wanted { lane: Lane::Source, rows_max: BATCH }], retry: false });
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
fn a_lane_is_parked_until_its_head_is_due_and_no_longer_than_the_probe_interval() {
    let second = Duration::from_secs(1);
    let (mut lanes, now) = after(PER_KEY, &[failing("a", 1, 2 * second), failing("b", 2, 40 * second)]);
    lanes.discovered(
        &[seen(Some("c"), 3, RowState::Publishing, true), seen(Some("d"), 4, RowState::Unknown, false)],
        now,
    );
    assert_eq!(lanes.next_probe_at(), Some(now + 2 * second));
    lanes.tick(now + Duration::from_micros(1_999_999));
    assert_eq!(lanes.next_request(BATCH), None);
    lanes.tick(now + 2 * second);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
    assert_eq!(lanes.next_probe_at(), Some(now + PROBE_INTERVAL_MAX));
    lanes.tick(now + PROBE_INTERVAL_MAX);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("b"), key("c"), key("d")]);
    assert_eq!(lanes.next_probe_at(), None);
}

#[test]
fn a_head_that_is_due_but_locked_is_left_alone_for_a_moment() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(Some(due("a", 1)))], now);
    assert_eq!(lanes.next_request(BATCH), None, "asked at once it would be asked all the time");
    let pause = lanes.next_probe_at().expect("it is parked") - now;
    assert!(pause >= Duration::from_millis(10) && pause <= Duration::from_secs(1), "{pause:?}");
    // A row that turned up before the head meanwhile is another matter.
    lanes.discovered(&[due("a", 0)], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
}

#[test]
fn rows_that_were_not_settled_are_left_to_their_lease() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), due("b", 2)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Unsettled, Served::NotAsked], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("b")], "what was not asked is asked again");
    assert_eq!(lanes.next_probe_at(), Some(now + PROBE_INTERVAL_MAX));
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
fn a_lane_that_does_not_fit_is_reported_once() {
    let (mut lanes, now) = (Lanes::new(Policy::BestEffort, 3), Instant::now());
    let rows: Vec<Glimpse> = (0..10).map(|number| seen(None, number, RowState::Due, false)).collect();
    lanes.discovered(&rows[..3], now);
    assert!(!lanes.take_overflowed());
    lanes.discovered(&rows, now);
    assert_eq!((lanes.len(), lanes.rows_ready()), (3, 3));
    assert!(lanes.take_overflowed());
    assert!(!lanes.take_overflowed(), "taken");
    // Lanes in flight take room too.
    let request = next(&mut lanes);
    lanes.discovered(&rows[5..6], now);
    assert!(lanes.take_overflowed() && lanes.len() == 3);
    lanes.served(&request, vec![claimed(1, 0), claimed(1, 1), claimed(1, 2)], now);
    lanes.discovered(&rows[3..6], now);
    assert!(!lanes.take_overflowed() && lanes.len() == 3);
}

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
fn a_wake_up_makes_every_parked_lane_ready() {
    let hour = Duration::from_secs(3_600);
    let (mut lanes, _) = after(PER_KEY, &[failing("a", 1, hour), seen(Some("b"), 2, RowState::Unknown, false)]);
    lanes.wake_all();
    assert_eq!((lanes.rows_ready(), lanes.next_probe_at()), (2, None));
    assert_eq!(next(&mut lanes).lanes.len(), 2);
}

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

// ---- pauses ----------------------------------------------------------------------------------------------------------------

fn paused(key: Option<&str>, number: i64) -> Glimpse {
    seen(key, number, RowState::Paused, false)
}

#[test]
fn a_lane_whose_head_is_paused_is_left_alone_until_the_pause_ends() {
    let (mut lanes, now) = after(PER_KEY, &[paused(Some("a"), 1), due("a", 2), due("b", 3), paused(Some("b"), 4)]);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("b")]);
    assert_eq!(lanes.next_request(BATCH), None);
    // Nobody is asked every few seconds about a hundred thousand lanes of a paused topic.
    lanes.tick(now + PROBE_INTERVAL_MAX * 3);
    assert_eq!(lanes.next_request(BATCH), None);
    lanes.tick(now + PROBE_INTERVAL_MAX * 4);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(Some(paused(Some("a"), 1)))], now);
    assert_eq!(lanes.next_request(BATCH), None, "no retry every moment, as after a lost race");
    lanes.wake_all();
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
}

#[test]
fn a_claim_that_ends_at_a_paused_row_leaves_its_lane_alone_until_the_pause_ends() {
    let (mut lanes, now) = after(PER_KEY, &[due("a", 1), paused(Some("a"), 2), due("a", 3)]);
    let request = next(&mut lanes);
    lanes.served(&request, vec![claimed(1, 1)], now);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(Some(paused(Some("a"), 2)))], now);
    assert_eq!((lanes.next_request(BATCH), lanes.len()), (None, 1));
    // A row committed late before it may go.
    lanes.discovered(&[due("a", 1)], now);
    assert_eq!(lanes_of(&next(&mut lanes)), [key("a")]);
}

#[test]
fn single_rows_that_are_paused_take_no_room() {
    let (mut lanes, now) = (Lanes::new(PER_KEY, 2), Instant::now());
    let rows: Vec<Glimpse> = (1..100).map(|number| paused(None, number)).collect();
    lanes.discovered(&rows, now);
    assert!(!lanes.take_overflowed() && lanes.is_empty());
    lanes.discovered(&[seen(None, 100, RowState::Due, false)], now);
    let request = next(&mut lanes);
    lanes.served(&request, vec![Served::Nothing(Some(paused(None, 100)))], now);
    assert!(lanes.is_empty());
}

#[test]
fn a_whole_source_whose_head_is_paused_is_probed_like_any_other() {
    let (mut lanes, now) = after(Policy::PerSourceStream, &[paused(Some("a"), 1)]);
    assert_eq!((lanes.next_request(BATCH), lanes.next_probe_at()), (None, Some(now + PROBE_INTERVAL_MAX)));
}
