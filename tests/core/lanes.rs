//! The lane scheduler: single cases, every small interleaving, and long random runs against the model.

use keiro_relay::domain::message::Position;
use keiro_relay::domain::policy::Policy;

use crate::model::{Answer, Choose, Every, MILLISECOND, SECOND, Seeded, Setup, Statements, Status, World, seeds};

// ---- every small interleaving ----------------------------------------------------------------------------------------------

/// How far one enumeration goes.
#[derive(Debug, Clone, Copy)]
struct Reach {
    rows: usize,
    /// So many of them, the youngest and then the oldest, were committed before anything else happens.
    committed: usize,
    /// What the broker says of the first so many rows is enumerated; afterwards it acknowledges.
    answers: usize,
    /// How often somebody else than usual moves next.
    deviations: usize,
    /// Whether somebody else's publisher claims once and settles once.
    foreign: bool,
}

/// One sequence of moves: rows in two lanes whose transactions began long ago and commit whenever, before, between and after any
/// statements of the relay; whatever the broker says; whoever moves next.
fn small_run(policy: Policy, reach: Reach, choose: &mut Every) {
    let mut world = World::new(Setup {
        page: 2,
        passes_max: 2,
        // Longer than anybody may wait, so that no probe helps.
        backoff: 6 * SECOND,
        answers: vec![Answer::Acked, Answer::Failed, Answer::Rejected],
        // Nobody asks for the story of a million runs.
        told: false,
        ..Setup::new(policy)
    });
    for row in 0..reach.rows {
        // By symmetry the first row is in the first lane.
        let key = if row == 0 || choose.pick(2) == 0 { "a" } else { "b" };
        world.begin(&[Some(key)], &[row as u128 + 1], 0, false, 0);
        world.now += MILLISECOND;
    }
    // So long ago that the margin of late sweeps covers nothing.
    world.now += 10 * SECOND;
    for already in 0..reach.committed {
        world.commit(if already == 0 { world.open.len() - 1 } else { 0 });
    }
    // Pages that are read while passes are in flight are what a stranger may meet.
    let loop_first = reach.foreign || choose.pick(2) == 0;
    let (mut deviations, mut foreign) = (reach.deviations, if reach.foreign { 2 } else { 0 });
    let mut waits = 0;
    for _ in 0..40 {
        if world.settled >= reach.answers as u64 {
            world.setup.answers = vec![Answer::Acked];
        }
        // Who can move, first whose turn it usually is.
        let mut movers: Vec<Option<usize>> =
            (0..world.passes_in_flight()).filter(|index| world.pass_can_move(*index)).map(Some).collect();
        if !world.loop_rests() {
            movers.insert(if loop_first { 0 } else { movers.len() }, None);
        }
        let machine = if deviations > 0 { movers.len() } else { movers.len().min(1) };
        // While nothing can move, time passes; polls find nothing new, so once is enough.
        let pass_time = usize::from(movers.is_empty() && waits < if reach.foreign { 1 } else { 2 });
        let foreign_moves = usize::from(foreign == 2 || (foreign == 1 && world.foreign_claims() > 0));
        let moves = machine + pass_time + world.open.len() + foreign_moves;
        if moves == 0 {
            break;
        }
        let chosen = choose.pick(moves);
        waits = if movers.is_empty() { waits + 1 } else { 0 };
        if chosen < machine {
            deviations -= usize::from(chosen > 0);
            match movers[chosen] {
                Some(index) => world.pass_step(index, choose),
                None => world.loop_step(),
            }
        } else if chosen < machine + pass_time {
            world.now = world.wakes_at().min(world.now + SECOND);
            world.loop_step();
        } else if chosen < machine + pass_time + world.open.len() {
            world.commit(chosen - machine - pass_time);
            waits = 0;
        } else {
            foreign -= 1;
            if foreign == 1 {
                world.foreign_claim(2);
            } else {
                world.foreign_end(0, false, choose);
            }
            waits = 0;
        }
    }
    while !world.open.is_empty() {
        world.commit(0);
    }
    while world.foreign_claims() > 0 {
        world.foreign_end(0, false, choose);
    }
    world.setup.answers = vec![Answer::Acked];
    let before = world.statements;
    world.settle_down(choose, world.now + 100 * SECOND);
    assert_eq!((world.live(), world.lanes.len()), (0, 0), "stranded: {:?}", world.rows);
    let spent = world.statements.since(before);
    assert!(spent.claims + spent.peeks < 60, "{spent:?}");
}

/// Runs every sequence of moves within reach.
fn every_small_run(policy: Policy, reach: Reach) {
    let mut choose = Every::default();
    let mut runs = 0_u64;
    loop {
        let run = std::panic::AssertUnwindSafe(|| small_run(policy, reach, &mut choose));
        if let Err(panic) = std::panic::catch_unwind(run) {
            eprintln!("{policy}, {reach:?}, after {runs} runs: {:?}", choose.trail());
            std::panic::resume_unwind(panic);
        }
        runs += 1;
        if !choose.advance() {
            break;
        }
    }
    println!("{policy}, {reach:?}: {runs} runs");
}

/// The two policies that make a source one lane differ for the publisher only.
const LANE_POLICIES: [Policy; 3] = [Policy::PerKeyHeadOfLine, Policy::PerSourceStream, Policy::BestEffort];

#[test]
fn every_order_of_two_commits_and_what_the_broker_says() {
    for policy in Policy::ALL {
        every_small_run(policy, Reach { rows: 2, committed: 0, answers: 2, deviations: 0, foreign: false });
    }
}

#[test]
fn every_two_late_commits_beside_a_third_row() {
    for policy in LANE_POLICIES {
        every_small_run(policy, Reach { rows: 3, committed: 1, answers: 0, deviations: 0, foreign: false });
    }
}

#[test]
fn every_late_commit_between_two_rows_and_what_the_broker_says() {
    for policy in LANE_POLICIES {
        every_small_run(policy, Reach { rows: 3, committed: 2, answers: 2, deviations: 0, foreign: false });
    }
}

#[test]
fn every_order_of_passes_and_pages_beside_a_late_commit() {
    for policy in LANE_POLICIES {
        every_small_run(policy, Reach { rows: 2, committed: 1, answers: 1, deviations: 2, foreign: false });
    }
}

#[test]
fn every_moment_for_somebody_elses_publisher() {
    for policy in LANE_POLICIES {
        every_small_run(policy, Reach { rows: 2, committed: 1, answers: 0, deviations: 0, foreign: true });
    }
}

// ---- nothing changes -------------------------------------------------------------------------------------------------------

const MINUTE: u64 = 60 * SECOND;

/// What the relay sends in a minute in which nothing changes, after it has had one to settle in.
fn a_quiet_minute(world: &mut World) -> Statements {
    let choose = &mut Seeded::new(1);
    world.run_for(choose, MINUTE);
    let before = world.statements;
    world.run_for(choose, MINUTE);
    let spent = world.statements.since(before);
    println!("{}: {spent:?}", world.setup.policy);
    // Every poll interval, and full sweeps.
    assert!(spent.polls <= MINUTE / (250 * MILLISECOND) + 10, "{spent:?}");
    // A twentieth of the time, and the sweep that was due when the minute began.
    assert!(spent.late_micros <= MINUTE / 20 + 100 * MILLISECOND, "{spent:?}");
    spent
}

#[test]
fn an_empty_source_costs_nothing_but_polls() {
    for policy in Policy::ALL {
        let mut world = World::new(Setup::new(policy));
        for id in 0..10 {
            world.put(Some("a"), id, |_| {});
        }
        let spent = a_quiet_minute(&mut world);
        assert_eq!(world.live(), 0);
        assert_eq!((spent.claims, spent.peeks, spent.pages, spent.floors), (0, 0, 0, 0), "{spent:?}");
    }
}

#[test]
fn lanes_that_can_only_wait_cost_two_statements_a_batch_and_probe() {
    let names: Vec<String> = (0..40).map(|number| format!("key {number}")).collect();
    for policy in Policy::ALL {
        for shortcut in [false, true] {
            let batch = 8;
            let mut world =
                World::new(Setup { batch, page: 50, whole_source_shortcut: shortcut, ..Setup::new(policy) });
            // A transaction that never ends keeps every late sweep as long as it can be.
            world.begin(&[None], &[1], 0, false, u64::MAX);
            for (id, name) in names.iter().enumerate() {
                world.put(Some(name), 100 + id as u128, |row| match id % 3 {
                    0 => (row.status, row.attempts, row.due) = (Status::Failed, 1, 3_600 * SECOND),
                    1 => row.status = Status::Odd,
                    _ => row.due = 3_600 * SECOND,
                });
            }
            let spent = a_quiet_minute(&mut world);
            let lanes = match policy {
                Policy::PerKeyHeadOfLine | Policy::BestEffort => names.len().div_ceil(batch) as u64,
                Policy::PerSourceStream | Policy::StopTheLine => 1,
            };
            let probes = MINUTE / (15 * SECOND) + 1;
            assert!(spent.claims <= lanes * probes && spent.peeks <= lanes * probes, "{spent:?}");
            assert!(!shortcut || lanes > 1 || spent.polls == 0, "a whole source that waits needs no poll: {spent:?}");
        }
    }
}

#[test]
fn a_row_that_somebody_keeps_locked_is_asked_for_ten_times_a_second() {
    for policy in Policy::ALL {
        let mut world = World::new(Setup::new(policy));
        let at = world.put(Some("a"), 1, |_| {});
        world.lock(at, 10 * MINUTE);
        let spent = a_quiet_minute(&mut world);
        let pauses = MINUTE / (100 * MILLISECOND);
        assert!(spent.claims <= pauses && spent.peeks <= pauses, "{spent:?}");
        assert!(spent.claims > pauses / 2, "{spent:?}");
    }
}

#[test]
fn lanes_that_wait_for_ever_do_not_keep_others_out_of_memory() {
    let mut world = World::new(Setup { lanes_max: 3, page: 2, ..Setup::new(Policy::PerKeyHeadOfLine) });
    for (id, key) in ["a", "b", "c", "d", "e"].into_iter().enumerate() {
        world.put(Some(key), id as u128, |row| row.status = Status::Odd);
    }
    let choose = &mut Seeded::new(1);
    world.run_for(choose, MINUTE);
    for id in 100..110 {
        world.put(None, id, |_| {});
    }
    world.run_for(choose, 3 * MINUTE);
    assert_eq!(world.live(), 5, "only the odd rows are left");
    let spent = a_quiet_minute(&mut world);
    assert!(spent.claims <= 5 * 5, "{spent:?}");
}

#[test]
fn a_retry_that_hangs_holds_up_nobody_but_retries() {
    let mut world = World::new(Setup { page: 2, ..Setup::new(Policy::PerKeyHeadOfLine) });
    for (id, key) in ["a", "b", "c", "d", "e", "f"].into_iter().enumerate() {
        // More rows behind the failing heads than a batch has.
        world.put(Some(key), 10 * id as u128, |row| row.attempts = 1);
        world.put(Some(key), 10 * id as u128 + 1, |_| {});
    }
    let choose = &mut Seeded::new(1);
    while world.statements.claims == 0 {
        if world.passes_in_flight() > 0 { world.pass_step(0, choose) } else { world.loop_step() }
    }
    world.hang(0, 30 * SECOND);
    world.put(Some("healthy"), 1_000, |_| {});
    world.run_for(choose, SECOND);
    assert_eq!(world.live(), 12, "the healthy row went; the others wait for the one that hangs");
    world.settle_down(choose, 10 * MINUTE);
    assert_eq!(world.live(), 0);
}

// ---- long random runs ------------------------------------------------------------------------------------------------------

const KEYS: [Option<&str>; 5] = [Some("a"), Some("b"), Some("c"), Some(""), None];

/// What else happens in a long run, beside producers and the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Trouble {
    strangers: bool,
    faults: bool,
    hidden: bool,
    lanes_max: usize,
}

/// One long run; every choice comes from the seed.
fn long_run(policy: Policy, trouble: Trouble, seed: u64) {
    println!("seed {seed}, {policy}, {trouble:?}");
    let choose = &mut Seeded::new(seed);
    let mut answers = vec![Answer::Acked; 6 + choose.pick(20)];
    answers.extend([
        Answer::Rejected,
        Answer::Failed,
        Answer::Failed,
        Answer::Returned(0),
        Answer::Returned(MILLISECOND * choose.pick(20_000) as u64),
    ]);
    let setup = Setup {
        batch: 1 + choose.pick(8),
        batch_bytes: if choose.one_in(3) { 1 + choose.pick(6) } else { usize::MAX },
        page: 1 + choose.pick(6),
        passes_max: 2 + choose.pick(3),
        lanes_max: trouble.lanes_max,
        max_attempts: [1, 2, 3, 4, 5][choose.pick(5)],
        backoff: [MILLISECOND, 300 * MILLISECOND, 2 * SECOND, 40 * SECOND][choose.pick(4)],
        whole_source_shortcut: choose.one_in(2),
        statement: [200, 1_000][choose.pick(2)],
        answers,
        ..Setup::new(policy)
    };
    let mut world = World::new(setup);
    let live_max = 4 + choose.pick(40);
    let mut ids = 0_u128;
    for _ in 0..3_000 {
        match choose.pick(100) {
            0..45 => {
                world.loop_step();
                if world.rests() {
                    let jump = world.now + 1 + choose.pick(300_000) as u64;
                    world.now =
                        jump.min(world.wakes_at()).min(world.passes_unstuck_at().unwrap_or(u64::MAX)).max(world.now);
                }
            }
            45..75 => {
                if world.passes_in_flight() > 0 {
                    let index = choose.pick(world.passes_in_flight());
                    if world.pass_can_move(index) {
                        world.pass_step(index, choose);
                    }
                }
            }
            75..82 => {
                if world.open.len() < 6 && world.live() < live_max {
                    let rows = 1 + choose.pick(3);
                    let keys: Vec<_> = (0..rows).map(|_| KEYS[choose.pick(KEYS.len())]).collect();
                    let ids: Vec<u128> = (0..rows)
                        .map(|_| {
                            ids += 1;
                            ((choose.pick(1 << 20) as u128) << 64) | ids
                        })
                        .collect();
                    let lasts = match choose.pick(10) {
                        0..6 => choose.pick(5_000) as u64,
                        6..9 => choose.pick(600_000) as u64,
                        _ => SECOND * (2 + choose.pick(20) as u64),
                    };
                    let hidden = trouble.hidden && choose.one_in(8);
                    let back = if trouble.hidden && choose.one_in(12) { SECOND * choose.pick(100) as u64 } else { 0 };
                    world.begin(&keys, &ids, back, hidden, world.now + lasts);
                }
            }
            82..94 => {
                let over: Vec<usize> = (0..world.open.len()).filter(|i| world.open[*i].ends_at <= world.now).collect();
                if !over.is_empty() {
                    let index = over[choose.pick(over.len())];
                    if choose.one_in(7) { world.roll_back(index) } else { world.commit(index) }
                }
            }
            94..97 => {
                if trouble.strangers {
                    stranger(&mut world, choose);
                }
            }
            97 => {
                world.requeue();
            }
            98 => {
                if trouble.faults && world.passes_in_flight() > 0 && !world.anything_stuck() {
                    let index = choose.pick(world.passes_in_flight());
                    world.break_pass(index, choose);
                }
            }
            _ => {
                if trouble.faults && choose.one_in(8) {
                    world.restart();
                }
            }
        }
    }
    // Everybody else goes home; what they left behind has to be finished.
    while !world.open.is_empty() {
        if choose.one_in(5) { world.roll_back(0) } else { world.commit(0) }
    }
    while world.foreign_claims() > 0 {
        world.foreign_end(0, choose.one_in(2), choose);
    }
    let odd: Vec<Position> =
        world.rows.values().filter(|row| row.status == Status::Odd).map(|row| row.position).collect();
    for at in odd {
        world.set_odd(at, false);
    }
    world.setup.answers = vec![Answer::Acked];
    world.settle_down(choose, world.now + 2_000 * SECOND);
    assert_eq!(world.live(), 0, "stranded: {:?}", world.rows.values().collect::<Vec<_>>());
    assert!(world.lanes.is_empty(), "nothing is live, but lanes are remembered: {:?}", world.lanes);
}

/// Somebody who is not the relay and not a producer does something.
fn stranger(world: &mut World, choose: &mut Seeded) {
    let in_state = |world: &World, states: &[Status]| -> Vec<Position> {
        world.rows.values().filter(|row| states.contains(&row.status)).map(|row| row.position).collect()
    };
    match choose.pick(10) {
        0..2 => {
            if world.foreign_claims() < 2 {
                world.foreign_claim(1 + choose.pick(5));
            }
        }
        2..6 => {
            if world.foreign_claims() > 0 {
                let index = choose.pick(world.foreign_claims());
                world.foreign_end(index, choose.one_in(5), choose);
            }
        }
        6 => {
            let ended = in_state(world, &[Status::Dead, Status::Rejected]);
            if !ended.is_empty() {
                let at = ended[choose.pick(ended.len())];
                world.operator_retries(at, choose.one_in(2));
            }
        }
        7 => {
            let waiting = in_state(world, &[Status::Pending, Status::Failed]);
            if !waiting.is_empty() {
                let at = waiting[choose.pick(waiting.len())];
                if choose.one_in(4) {
                    world.operator_cancels(at);
                } else {
                    let due = if choose.one_in(2) { world.now } else { world.now + SECOND * choose.pick(60) as u64 };
                    world.operator_reschedules(at, due, choose.one_in(2));
                }
            }
        }
        8 => {
            let odd = in_state(world, &[Status::Odd]);
            let waiting = in_state(world, &[Status::Pending, Status::Failed]);
            if !odd.is_empty() && choose.one_in(2) {
                world.set_odd(odd[choose.pick(odd.len())], false);
            } else if !waiting.is_empty() {
                world.set_odd(waiting[choose.pick(waiting.len())], true);
            }
        }
        _ => {
            let waiting = in_state(world, &[Status::Pending, Status::Failed]);
            if !waiting.is_empty() {
                let at = waiting[choose.pick(waiting.len())];
                world.lock(at, world.now + MILLISECOND * choose.pick(5_000) as u64);
            }
        }
    }
}

/// Runs many seeds on every policy.
fn long_runs(trouble: impl Fn(u64) -> Trouble) {
    for seed in seeds(15) {
        for policy in Policy::ALL {
            long_run(policy, trouble(seed), seed);
        }
    }
}

const QUIET: Trouble = Trouble { strangers: false, faults: false, hidden: false, lanes_max: 1_000 };

#[test]
fn nothing_is_stranded_when_only_the_relay_works() {
    long_runs(|_| QUIET);
}

#[test]
fn nothing_is_stranded_among_strangers() {
    long_runs(|_| Trouble { strangers: true, ..QUIET });
}

#[test]
fn nothing_is_stranded_through_faults_and_restarts() {
    long_runs(|_| Trouble { faults: true, ..QUIET });
}

#[test]
fn nothing_is_stranded_that_only_a_full_sweep_finds() {
    long_runs(|_| Trouble { hidden: true, ..QUIET });
}

#[test]
fn nothing_is_stranded_when_lanes_do_not_fit_into_memory() {
    long_runs(|seed| Trouble { lanes_max: 1 + (seed % 6) as usize, ..QUIET });
}

#[test]
fn nothing_is_stranded_when_everything_happens_at_once() {
    long_runs(|seed| Trouble {
        strangers: true,
        faults: true,
        hidden: true,
        lanes_max: [3, 8, 1_000][(seed % 3) as usize],
    });
}
