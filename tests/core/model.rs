//! A plain model of the table, of everybody who works on it, and of the loop of one source; `lanes` and `sweep` drive it.
//!
//! Time is a number, every statement is atomic and sees what is committed, and whoever drives the model chooses who moves next: a
//! seeded generator, or an enumeration of all choices. Nothing here knows how the scheduler works: only what its loop does with it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use keiro_relay::domain::lanes::{Glimpse, Lane, Lanes, PROBE_INTERVAL_MAX, Request, RowState, Served};
use keiro_relay::domain::message::{PgTime, Position};
use keiro_relay::domain::policy::Policy;
use keiro_relay::domain::sweep::{SweepKind, Sweeps};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use uuid::Uuid;

pub const MILLISECOND: u64 = 1_000;
pub const SECOND: u64 = 1_000_000;

/// The database's clock when the model begins.
const EPOCH_MICROS: i64 = 800_000_000_000_000;
/// How long an idle source waits between polls; doubles up to the maximum.
const POLL_INTERVAL_MIN: u64 = 2 * MILLISECOND;
const POLL_INTERVAL_MAX: u64 = 250 * MILLISECOND;
/// How long a claim is somebody's.
pub const LEASE: u64 = 30 * SECOND;

/// How often the model looks whether anybody waits too long.
const LOOK_INTERVAL: u64 = 10 * MILLISECOND;

/// How soon the loop has to claim a head of line that is due, counted from when it was both. Covers polls, the pause between late
/// sweeps, and retries that go one at a time.
const PROMPT: u64 = 5 * SECOND;
/// The same when somebody else had a hand in its lane: the lane may have been left alone until its next probe.
const PROBED: u64 = 15 * SECOND + PROMPT;
/// The same when only a full sweep can find it. The model makes full sweeps as expensive as they can be, so that they come rarely
/// and hide nothing.
const SWEPT: u64 = 300 * SECOND + PROMPT;
/// The same after lanes did not fit into memory, counted from when that last happened: a full sweep looks again.
const OVERFLOWED: u64 = 30 * SECOND + PROMPT;

/// Who decides where the model has a choice.
pub trait Choose {
    /// Returns one of `0..among`.
    fn pick(&mut self, among: usize) -> usize;

    /// Decides with a chance of `one` in `among`.
    fn one_in(&mut self, among: usize) -> bool {
        self.pick(among) == 0
    }
}

/// A seeded generator.
pub struct Seeded(StdRng);

impl Seeded {
    pub fn new(seed: u64) -> Self {
        Self(StdRng::seed_from_u64(seed))
    }
}

impl Choose for Seeded {
    fn pick(&mut self, among: usize) -> usize {
        self.0.random_range(0..among)
    }
}

/// The seeds of a random test: `runs` of them from anywhere; `KEIRO_TEST_SEED` says from where and then runs that one, and
/// `KEIRO_TEST_RUNS` how many.
pub fn seeds(runs: u64) -> std::ops::Range<u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (first, runs) = match (number("KEIRO_TEST_SEED"), number("KEIRO_TEST_RUNS")) {
        (Some(seed), runs) => (seed, runs.unwrap_or(1)),
        (None, several) => (u64::from(rand::random::<u32>()), several.unwrap_or(runs)),
    };
    first..first + runs
}

/// Walks through every sequence of choices: run, `advance`, run again, until it says that there is no other.
#[derive(Debug, Default)]
pub struct Every {
    /// Each choice so far and of how many.
    trail: Vec<(usize, usize)>,
    at: usize,
}

impl Every {
    /// Moves on to the next sequence.
    pub fn advance(&mut self) -> bool {
        self.trail.truncate(self.at);
        self.at = 0;
        while let Some((chosen, among)) = self.trail.pop() {
            if chosen + 1 < among {
                self.trail.push((chosen + 1, among));
                return true;
            }
        }
        false
    }

    /// The choices of this run, to name it when it fails.
    pub fn trail(&self) -> Vec<usize> {
        self.trail.iter().take(self.at).map(|(chosen, _)| *chosen).collect()
    }
}

impl Choose for Every {
    fn pick(&mut self, among: usize) -> usize {
        if self.at == self.trail.len() {
            self.trail.push((0, among));
        }
        let (chosen, of) = self.trail[self.at];
        assert_eq!(of, among, "the model is not deterministic");
        self.at += 1;
        chosen
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Pending,
    Failed,
    Publishing,
    /// For a moment only: sent rows leave the model.
    Sent,
    Dead,
    Rejected,
    /// A status nobody knows.
    Odd,
}

#[derive(Debug, Clone)]
pub struct Row {
    pub position: Position,
    pub key: Option<Arc<str>>,
    pub status: Status,
    pub due: u64,
    pub attempts: u32,
    pub bytes: usize,
    /// Which claim it is under, and since when.
    stamp: u64,
    claimed_at: u64,
    /// Somebody's open transaction holds its lock until then.
    pub locked_until: u64,
    /// Only a full sweep can find it: no late floor covered it, or it became due again without a word.
    only_swept: bool,
}

impl Row {
    fn live(&self) -> bool {
        match self.status {
            Status::Pending | Status::Failed | Status::Publishing | Status::Odd => true,
            Status::Sent | Status::Dead | Status::Rejected => false,
        }
    }

    fn waits(&self) -> bool {
        matches!(self.status, Status::Pending | Status::Failed)
    }
}

/// A producer's transaction.
#[derive(Debug, Clone)]
pub struct Open {
    pub began_at: u64,
    /// `pg_stat_activity` does not show it (prepared), or its rows' created_at is not its beginning.
    pub hidden: bool,
    pub rows: Vec<Row>,
    pub ends_at: u64,
}

/// What the broker says of a row that reaches it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Acked,
    Rejected,
    Failed,
    /// Not the row's fault: attempt returned, due after the pause.
    Returned(u64),
}

/// A pass of the relay, statement by statement.
#[derive(Debug)]
struct Pass {
    request: Request,
    stamp: u64,
    /// Of each lane of the request, what was claimed.
    claimed: Vec<Vec<Position>>,
    served: Vec<Option<Served>>,
    filled: bool,
    next: PassStep,
    /// The publisher does not answer before.
    stuck_until: u64,
    /// The database goes away when the pass settles.
    loses_settlement: bool,
    database_failed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PassStep {
    Claim,
    Settle,
    Peek,
    Serve,
}

/// A claim of a publisher that is not ours.
#[derive(Debug)]
struct ForeignClaim {
    stamp: u64,
    rows: Vec<Position>,
}

/// Statements the relay sent.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Statements {
    pub polls: u64,
    pub floors: u64,
    pub pages: u64,
    pub claims: u64,
    pub peeks: u64,
    /// Time that pages and floors of late sweeps took.
    pub late_micros: u64,
}

impl Statements {
    pub fn since(self, before: Self) -> Self {
        Self {
            polls: self.polls - before.polls,
            floors: self.floors - before.floors,
            pages: self.pages - before.pages,
            claims: self.claims - before.claims,
            peeks: self.peeks - before.peeks,
            late_micros: self.late_micros - before.late_micros,
        }
    }
}

/// What kind of world it is.
#[derive(Debug, Clone)]
pub struct Setup {
    pub policy: Policy,
    pub batch: usize,
    pub batch_bytes: usize,
    pub page: usize,
    pub passes_max: usize,
    pub lanes_max: usize,
    pub max_attempts: u32,
    pub backoff: u64,
    /// Sources that are one lane need no pages: a full sweep of one row, and no poll while the lane is known.
    pub whole_source_shortcut: bool,
    /// How long a statement takes.
    pub statement: u64,
    /// What the broker may say, each as often as it is listed.
    pub answers: Vec<Answer>,
    /// Whether what happened is told when the run fails.
    pub told: bool,
}

impl Setup {
    pub fn new(policy: Policy) -> Self {
        Self {
            policy,
            batch: 4,
            batch_bytes: usize::MAX,
            page: 2,
            passes_max: 3,
            lanes_max: 1_000,
            max_attempts: 10,
            backoff: 2 * SECOND,
            whole_source_shortcut: false,
            statement: MILLISECOND,
            answers: vec![Answer::Acked],
            told: std::env::var_os("KEIRO_TEST_SEED").is_some(),
        }
    }
}

/// Where the loop is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Turn,
    /// The late floor was sampled, by a statement before the first page.
    Begin(SweepKind, PgTime, u64),
}

pub struct World {
    pub setup: Setup,
    pub now: u64,
    base: Instant,
    pub rows: BTreeMap<Position, Row>,
    pub open: Vec<Open>,
    foreign: Vec<ForeignClaim>,
    next_stamp: u64,

    pub lanes: Lanes,
    pub sweeps: Sweeps,
    at: At,
    /// The kind of the sweep that began last.
    begun: SweepKind,
    passes: Vec<Pass>,
    in_flight: HashSet<Lane>,
    polled: bool,
    poll_at: u64,
    poll_interval: u64,
    pub idle: bool,

    pub statements: Statements,
    /// Rows the relay settled.
    pub settled: u64,
    /// Since when the head of each lane could have been claimed.
    waiting: HashMap<Lane, (Position, u64)>,
    look_at: u64,
    /// When somebody else last had a hand in a lane.
    disturbed: HashMap<Lane, u64>,
    /// Lanes did not fit into memory, last at this time.
    overflowed_at: Option<u64>,
    /// A retry hangs, so that all others wait for it.
    retries_held_until: u64,
    /// What happened, to be read when a run fails.
    log: Vec<String>,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let base = Instant::now();
        Self {
            now: 0,
            base,
            rows: BTreeMap::new(),
            open: Vec::new(),
            foreign: Vec::new(),
            next_stamp: 1,
            lanes: Lanes::new(setup.policy, setup.lanes_max),
            sweeps: Sweeps::new(base),
            at: At::Turn,
            begun: SweepKind::Full,
            passes: Vec::new(),
            in_flight: HashSet::new(),
            polled: false,
            poll_at: 0,
            poll_interval: POLL_INTERVAL_MIN,
            idle: false,
            statements: Statements::default(),
            settled: 0,
            waiting: HashMap::new(),
            look_at: 0,
            disturbed: HashMap::new(),
            overflowed_at: None,
            retries_held_until: 0,
            log: Vec::new(),
            setup,
        }
    }

    pub fn instant(&self) -> Instant {
        self.base + Duration::from_micros(self.now)
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.base).as_micros()).expect("the model ends before")
    }

    pub fn pg_time(at: u64) -> PgTime {
        PgTime(EPOCH_MICROS + i64::try_from(at).expect("the model ends before"))
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        if !self.setup.told {
            return;
        }
        let what = what();
        if self.log.len() >= 4_000 {
            self.log.drain(..2_000);
        }
        self.log.push(format!("{:>12.3} ms  {what}", self.now as f64 / 1e3));
    }

    fn lane_of(&self, row: &Row) -> Lane {
        Lanes::lane_of(self.setup.policy, row.key.as_ref(), row.position.outbox_id)
    }

    /// Live rows of a lane, in order.
    fn lane_rows<'a>(&'a self, lane: &'a Lane) -> impl Iterator<Item = &'a Row> {
        self.rows.values().filter(move |row| row.live() && self.lane_of(row) == *lane)
    }

    pub fn live(&self) -> usize {
        self.rows.values().filter(|row| row.live()).count()
    }

    pub fn passes_in_flight(&self) -> usize {
        self.passes.len()
    }

    // ---- producers ---------------------------------------------------------------------------------------------------------

    /// Opens a transaction and inserts its rows; `back` is how long before its beginning created_at lies (explicit, or a clock step).
    pub fn begin(&mut self, keys: &[Option<&str>], ids: &[u128], back: u64, hidden: bool, ends_at: u64) {
        let created = World::pg_time(self.now);
        let created = PgTime(created.0 - i64::try_from(back).expect("small"));
        let rows = keys
            .iter()
            .zip(ids)
            .map(|(key, id)| Row {
                position: Position { created_at: created, outbox_id: Uuid::from_u128(*id) },
                key: key.map(Arc::from),
                status: Status::Pending,
                due: 0,
                attempts: 0,
                bytes: 1 + (*id % 3) as usize,
                stamp: 0,
                claimed_at: 0,
                locked_until: 0,
                only_swept: hidden || back > 0,
            })
            .collect();
        self.open.push(Open { began_at: self.now, hidden, rows, ends_at });
    }

    /// Commits a row in a transaction of its own; what it looks like is up to the caller.
    pub fn put(&mut self, key: Option<&str>, id: u128, change: impl FnOnce(&mut Row)) -> Position {
        self.begin(&[key], &[id], 0, false, 0);
        let last = self.open.len() - 1;
        change(&mut self.open[last].rows[0]);
        let at = self.open[last].rows[0].position;
        self.commit(last);
        at
    }

    pub fn commit(&mut self, index: usize) {
        let open = self.open.remove(index);
        self.note(|| format!("commit {:?}", open.rows.iter().map(short_row).collect::<Vec<_>>()));
        for mut row in open.rows {
            row.due = row.due.max(self.now);
            self.rows.insert(row.position, row);
        }
        self.look();
    }

    pub fn roll_back(&mut self, index: usize) {
        self.open.remove(index);
    }

    // ---- statements --------------------------------------------------------------------------------------------------------

    fn took(&mut self) -> u64 {
        self.now += self.setup.statement;
        self.setup.statement
    }

    fn glimpse(&self, row: &Row) -> Glimpse {
        let state = match row.status {
            Status::Pending | Status::Failed if row.due <= self.now => RowState::Due,
            Status::Pending | Status::Failed => RowState::Later(Duration::from_micros(row.due - self.now)),
            Status::Publishing => RowState::Publishing,
            Status::Odd => RowState::Unknown,
            Status::Sent | Status::Dead | Status::Rejected => unreachable!("only live rows are looked at"),
        };
        Glimpse { position: row.position, message_key: row.key.clone(), state, attempted: row.attempts > 0 }
    }

    /// LATE FLOOR.
    fn late_floor(&self) -> PgTime {
        let oldest = self.open.iter().filter(|open| !open.hidden).map(|open| open.began_at).min();
        World::pg_time(oldest.unwrap_or(self.now))
    }

    /// DISCOVER.
    fn discover(&self, after: Position, limit: usize) -> Vec<Glimpse> {
        use std::ops::Bound::{Excluded, Unbounded};
        let behind = self.rows.range((Excluded(after), Unbounded)).map(|(_, row)| row);
        behind.filter(|row| row.live()).take(limit).map(|row| self.glimpse(row)).collect()
    }

    fn peek(&self, lane: &Lane) -> Option<Glimpse> {
        self.lane_rows(lane).next().map(|head| self.glimpse(head))
    }

    fn due_now(&self, row: &Row) -> bool {
        row.waits() && row.due <= self.now
    }

    /// KEYCLAIM, IDCLAIM, STREAMCLAIM: what may be claimed of each lane of the request.
    fn claimable(&self, request: &Request) -> Vec<Vec<Position>> {
        let mut before = 0;
        let mut fits = |row: &Row| {
            let fits = before < self.setup.batch_bytes;
            before += row.bytes;
            fits
        };
        let gapless = |run: Vec<&Row>, allowed: &dyn Fn(usize, &Row) -> bool| -> Vec<Position> {
            run.iter()
                .enumerate()
                .take_while(|(rank, row)| self.due_now(row) && allowed(*rank, row) && row.locked_until <= self.now)
                .map(|(_, row)| row.position)
                .collect()
        };
        match &request.lanes[0].lane {
            Lane::Source => {
                let limit = request.lanes[0].rows_max;
                let run: Vec<&Row> = self.lane_rows(&Lane::Source).take(limit).take_while(|row| fits(row)).collect();
                let alone = run.first().is_some_and(|head| head.attempts > 0);
                vec![gapless(run, &|rank, row| rank == 0 || (!alone && row.attempts == 0))]
            }
            Lane::Key(_) => request
                .lanes
                .iter()
                .map(|wanted| {
                    let run: Vec<&Row> =
                        self.lane_rows(&wanted.lane).take(wanted.rows_max).take_while(|row| fits(row)).collect();
                    gapless(run, &|_, row| row.attempts == 0 || request.retry)
                })
                .collect(),
            Lane::Row(_) => {
                let mut run: Vec<&Row> = request.lanes.iter().flat_map(|wanted| self.lane_rows(&wanted.lane)).collect();
                run.sort_by_key(|row| row.position);
                run.retain(|row| self.due_now(row) && (row.attempts == 0 || request.retry));
                let run: Vec<&Row> = run.into_iter().take_while(|row| fits(row)).collect();
                let got: HashSet<Position> =
                    run.iter().filter(|row| row.locked_until <= self.now).map(|row| row.position).collect();
                request
                    .lanes
                    .iter()
                    .map(|wanted| {
                        self.lane_rows(&wanted.lane).map(|row| row.position).filter(|at| got.contains(at)).collect()
                    })
                    .collect()
            }
        }
    }

    /// Marks rows as claimed, after checking that this breaks no policy.
    fn take(&mut self, rows: &[Position], stamp: u64) {
        for at in rows {
            let row = &self.rows[at];
            assert!(row.waits(), "claimed twice at once: {}", short_row(row));
            let holds_back = |other: &&Row| match self.setup.policy {
                Policy::BestEffort => false,
                Policy::PerSourceStream | Policy::StopTheLine => true,
                Policy::PerKeyHeadOfLine => row.key.is_some() && other.key == row.key,
            };
            let overtaken = self.rows.range(..*at).map(|(_, other)| other);
            let overtaken = overtaken.filter(|other| other.live()).filter(holds_back);
            for other in overtaken {
                assert!(rows.contains(&other.position), "{} overtakes {}", short_row(row), short_row(other));
            }
        }
        for at in rows {
            let lane = self.lane_of(&self.rows[at]);
            self.waiting.remove(&lane);
            let row = self.rows.get_mut(at).expect("just seen");
            row.status = Status::Publishing;
            row.attempts += 1;
            row.stamp = stamp;
            row.claimed_at = self.now;
        }
    }

    /// Publishes and settles claimed rows of one lane, in order; returns the rows that somebody else had taken meanwhile.
    fn settle(&mut self, rows: &[Position], stamp: u64, answers: &[Answer], choose: &mut dyn Choose) -> usize {
        let mut pivot = false;
        let mut lost = 0;
        for at in rows {
            let (now, max_attempts, backoff) = (self.now, self.setup.max_attempts, self.setup.backoff);
            let answer = (!pivot).then(|| answers[choose.pick(answers.len())]);
            let ours = |row: &&mut Row| row.status == Status::Publishing && row.stamp == stamp;
            let Some(row) = self.rows.get_mut(at).filter(ours) else {
                lost += 1;
                continue;
            };
            match answer {
                None => (row.status, row.attempts, row.due) = (Status::Failed, row.attempts - 1, now),
                Some(Answer::Acked) => row.status = Status::Sent,
                Some(Answer::Rejected) => row.status = Status::Rejected,
                Some(Answer::Failed) if row.attempts >= max_attempts => row.status = Status::Dead,
                Some(Answer::Failed) => (row.status, row.due) = (Status::Failed, now + backoff),
                Some(Answer::Returned(pause)) => {
                    (row.status, row.attempts, row.due) = (Status::Failed, row.attempts - 1, now + pause);
                }
            }
            pivot |= matches!(answer, Some(Answer::Failed | Answer::Returned(_)));
            if row.status == Status::Sent {
                // Nobody asks for it again.
                self.rows.remove(at);
            }
        }
        lost
    }

    // ---- the loop of the source --------------------------------------------------------------------------------------------

    fn shortcut(&self) -> bool {
        self.setup.whole_source_shortcut && matches!(self.setup.policy, Policy::PerSourceStream | Policy::StopTheLine)
    }

    /// Lets the loop make one step: at most one statement, or one dispatch.
    pub fn loop_step(&mut self) {
        self.idle = false;
        if let At::Begin(kind, floor, took) = self.at {
            self.at = At::Turn;
            self.sweeps.begin(kind, floor, Duration::from_micros(took));
            self.note(|| format!("begin {kind:?} sweep, floor {}", floor.0.saturating_sub(EPOCH_MICROS)));
            self.begun = kind;
            // The whole price of a full sweep at its first page, so that the next is five minutes away.
            self.page(if kind == SweepKind::Full { 3 * SECOND } else { 0 });
            return self.look();
        }
        let now = self.instant();
        self.lanes.tick(now);
        if self.passes.len() < self.setup.passes_max {
            if self.lanes.rows_ready() < self.setup.batch && self.sweeps.page_after().is_some() {
                if self.sweeps.look_back_due(now) {
                    self.sample_floor();
                } else {
                    self.page(0);
                }
                return self.look();
            }
            let ready = self.lanes.rows_ready();
            if let Some(request) = self.lanes.next_request(self.setup.batch) {
                assert!(ready > 0, "a request without anything ready");
                self.dispatch(request);
                return self.look();
            }
            assert_eq!(ready, 0, "rows are ready, but no request comes of them");
            if std::mem::take(&mut self.polled) || self.sweeps.next_full_at() <= now {
                self.sample_floor();
                return self.look();
            }
        }
        self.poll();
        self.idle = true;
        self.look();
    }

    /// The first statement of a sweep.
    fn sample_floor(&mut self) {
        let kind = if self.shortcut() { SweepKind::Full } else { self.sweeps.next_kind(self.instant()) };
        let (floor, took) = match kind {
            SweepKind::Full | SweepKind::Late => {
                self.statements.floors += 1;
                (self.late_floor(), self.took())
            }
            SweepKind::Tail => (PgTime::NEG_INFINITY, 0),
        };
        if kind == SweepKind::Late {
            self.statements.late_micros += took;
        }
        self.at = At::Begin(kind, floor, took);
    }

    /// Reads a page, and says that it took so much longer.
    fn page(&mut self, dearer: u64) {
        let after = self.sweeps.page_after().expect("a sweep is under way");
        let limit = if self.shortcut() { 1 } else { self.setup.page };
        let glimpses = self.discover(after, limit);
        self.statements.pages += 1;
        let took = self.took();
        if self.begun == SweepKind::Late {
            self.statements.late_micros += took;
        }
        let now = self.instant();
        let ready = self.lanes.rows_ready();
        self.note(|| format!("page {:?}", glimpses.iter().map(|glimpse| short(glimpse.position)).collect::<Vec<_>>()));
        self.lanes.discovered(&glimpses, now);
        let full = glimpses.len() == limit && !self.shortcut();
        self.sweeps.page(
            glimpses.last().map(|glimpse| glimpse.position),
            full,
            Duration::from_micros(took + dearer),
            now,
        );
        if self.lanes.take_overflowed() {
            self.overflowed_at = Some(self.now);
            self.sweeps.overflowed(now);
        }
        if self.lanes.rows_ready() > ready {
            self.poll_interval = POLL_INTERVAL_MIN;
        }
    }

    fn dispatch(&mut self, request: Request) {
        let names: Vec<&Lane> = request.lanes.iter().map(|wanted| &wanted.lane).collect();
        if request.retry {
            assert!(names.len() == 1 && request.lanes[0].rows_max == 1, "a retry goes alone: {request:?}");
            assert!(self.passes.iter().all(|pass| !pass.request.retry), "two retries at once: {request:?}");
        }
        let kinds: HashSet<_> = names.iter().map(|lane| std::mem::discriminant(*lane)).collect();
        assert_eq!(kinds.len(), 1, "lanes of two kinds: {request:?}");
        assert!(!names.contains(&&Lane::Source) || names.len() == 1, "a source is one lane: {request:?}");
        for lane in names {
            assert!(self.in_flight.insert(lane.clone()), "{lane:?} is in flight and was dispatched again");
        }
        self.note(|| format!("dispatch {request:?}"));
        let lanes = request.lanes.len();
        self.passes.push(Pass {
            request,
            stamp: 0,
            claimed: vec![Vec::new(); lanes],
            served: vec![None; lanes],
            filled: false,
            next: PassStep::Claim,
            stuck_until: 0,
            loses_settlement: false,
            database_failed: false,
        });
    }

    /// The poll of an idle source, when it is time for one.
    fn poll(&mut self) {
        if self.polled || self.now < self.poll_at || self.passes.len() >= self.setup.passes_max {
            return;
        }
        if self.shortcut() && !self.lanes.is_empty() {
            return;
        }
        let from = if self.shortcut() { Position::START } else { self.sweeps.poll_from(self.instant()) };
        self.statements.polls += 1;
        self.polled = !self.discover(from, 1).is_empty();
        self.poll_at = self.now + self.poll_interval;
        self.poll_interval = (self.poll_interval * 2).min(POLL_INTERVAL_MAX);
    }

    /// When an idle loop has something to do again.
    pub fn wakes_at(&self) -> u64 {
        if !self.idle || self.polled {
            return self.now;
        }
        let polls = (self.lanes.is_empty() || !self.shortcut()) && self.passes.len() < self.setup.passes_max;
        let probe = self.lanes.next_probe_at().map(|at| self.micros(at));
        let poll = polls.then_some(self.poll_at);
        let full = (self.passes.len() < self.setup.passes_max).then_some(self.micros(self.sweeps.next_full_at()));
        [probe, poll, full].into_iter().flatten().min().unwrap_or(u64::MAX).max(self.now)
    }

    /// Whether a pass can move on now.
    pub fn pass_can_move(&self, index: usize) -> bool {
        self.passes[index].stuck_until <= self.now
    }

    /// Whether the loop does nothing before time passes or a pass ends.
    pub fn loop_rests(&self) -> bool {
        self.idle && self.wakes_at() > self.now
    }

    /// Whether nothing happens before time passes.
    pub fn rests(&self) -> bool {
        self.loop_rests() && (0..self.passes.len()).all(|index| !self.pass_can_move(index))
    }

    /// When a publisher that hangs answers.
    pub fn passes_unstuck_at(&self) -> Option<u64> {
        self.passes.iter().map(|pass| pass.stuck_until).min()
    }

    /// Lets a pass make its next statement.
    pub fn pass_step(&mut self, index: usize, choose: &mut dyn Choose) {
        let pass = &self.passes[index];
        match pass.next {
            PassStep::Claim => {
                let claimed = self.claimable(&pass.request);
                let retry = pass.request.retry || pass.request.lanes[0].lane == Lane::Source;
                let rows: Vec<Position> = claimed.iter().flatten().copied().collect();
                let attempted = rows.iter().filter(|at| self.rows[at].attempts > 0).count();
                assert!(attempted == 0 || (retry && rows.len() == 1), "a row attempted before was not claimed alone");
                let stamp = self.next_stamp;
                self.next_stamp += 1;
                self.take(&rows, stamp);
                self.statements.claims += 1;
                self.took();
                self.note(|| format!("claim {:?}", rows.iter().map(|at| short(*at)).collect::<Vec<_>>()));
                let bytes: usize = rows.iter().map(|at| self.rows[at].bytes).sum();
                let filled = bytes >= self.setup.batch_bytes;
                let pass = &mut self.passes[index];
                (pass.claimed, pass.stamp, pass.filled) = (claimed, stamp, filled);
                pass.next = if rows.is_empty() { PassStep::Peek } else { PassStep::Settle };
            }
            PassStep::Settle => {
                let answers = self.setup.answers.clone();
                let (claimed, stamp, failed) = (pass.claimed.clone(), pass.stamp, pass.loses_settlement);
                self.took();
                self.settled += claimed.iter().map(Vec::len).sum::<usize>() as u64;
                let mut silent = false;
                for (lane, rows) in claimed.iter().enumerate() {
                    if rows.is_empty() {
                        silent = true;
                        continue;
                    }
                    let served = if failed || self.settle(rows, stamp, &answers, choose) > 0 {
                        // What becomes of the lane is up to somebody else now.
                        let name = self.passes[index].request.lanes[lane].lane.clone();
                        self.disturb(name);
                        Served::Unsettled
                    } else {
                        self.served_of(rows)
                    };
                    self.note(|| {
                        format!("settle {:?}: {served:?}", rows.iter().map(|at| short(*at)).collect::<Vec<_>>())
                    });
                    self.passes[index].served[lane] = Some(served);
                }
                let pass = &mut self.passes[index];
                pass.database_failed |= failed;
                // A batch that is full may not have reached its other lanes: they are asked again.
                pass.next = if silent && !failed && !pass.filled { PassStep::Peek } else { PassStep::Serve };
            }
            PassStep::Peek => {
                let lanes: Vec<Lane> = pass.request.lanes.iter().map(|wanted| wanted.lane.clone()).collect();
                self.statements.peeks += 1;
                self.took();
                for (lane, name) in lanes.iter().enumerate() {
                    if self.passes[index].served[lane].is_none() {
                        let head = self.peek(name);
                        self.note(|| {
                            format!("peek {name:?}: {:?}", head.as_ref().map(|head| (short(head.position), head.state)))
                        });
                        self.passes[index].served[lane] = Some(Served::Nothing(head));
                    }
                }
                self.passes[index].next = PassStep::Serve;
            }
            PassStep::Serve => {
                let pass = self.passes.remove(index);
                for wanted in &pass.request.lanes {
                    self.in_flight.remove(&wanted.lane);
                }
                let now = self.instant();
                if pass.claimed.iter().any(|rows| !rows.is_empty()) {
                    self.poll_interval = POLL_INTERVAL_MIN;
                }
                let served = pass.served.into_iter().map(|served| served.unwrap_or(Served::NotAsked)).collect();
                self.note(|| format!("served {:?}", pass.request));
                self.lanes.served(&pass.request, served, now);
                if pass.database_failed {
                    self.sweeps.abandon(now);
                }
                self.idle = false;
            }
        }
        self.look();
    }

    /// What a settled lane tells the scheduler.
    fn served_of(&self, rows: &[Position]) -> Served {
        let unfinished = rows.iter().filter_map(|at| self.rows.get(at)).find(|row| row.live());
        let blocked = unfinished.map(|row| self.glimpse(row));
        Served::Claimed { rows: rows.len(), through: rows[rows.len() - 1], blocked }
    }

    // ---- what goes wrong, and everybody else -------------------------------------------------------------------------------

    /// Somebody else has a hand in a lane: the scheduler learns of it when it next looks.
    fn disturb(&mut self, lane: Lane) {
        let until = self.now;
        let at = self.disturbed.entry(lane).or_insert(until);
        *at = (*at).max(until);
    }

    fn disturb_row(&mut self, at: Position) {
        let lane = self.lane_of(&self.rows[&at]);
        self.disturb(lane);
    }

    /// A pass's claim does not reach the database, its settlement gets lost, or its publisher hangs.
    pub fn break_pass(&mut self, index: usize, choose: &mut dyn Choose) {
        let pass = &mut self.passes[index];
        match pass.next {
            PassStep::Claim => {
                pass.database_failed = true;
                pass.next = PassStep::Serve;
                self.note(|| "claim fails".to_owned());
            }
            PassStep::Settle if choose.one_in(2) => pass.loses_settlement = true,
            PassStep::Settle => {
                let time = (choose.pick(40) as u64) * SECOND;
                self.hang(index, time);
            }
            PassStep::Peek | PassStep::Serve => {}
        }
        self.look();
    }

    /// The publisher does not answer for so long.
    pub fn hang(&mut self, index: usize, time: u64) {
        let until = self.now + time;
        let pass = &mut self.passes[index];
        pass.stuck_until = until;
        if pass.request.retry {
            self.retries_held_until = until;
        }
        let lanes: Vec<Lane> = pass.request.lanes.iter().map(|wanted| wanted.lane.clone()).collect();
        self.note(|| format!("publisher hangs until {until}"));
        for lane in lanes {
            self.disturbed.insert(lane, until);
        }
    }

    pub fn anything_stuck(&self) -> bool {
        self.passes.iter().any(|pass| pass.stuck_until > self.now)
    }

    /// The process dies and starts again.
    pub fn restart(&mut self) {
        self.note(|| "restart".to_owned());
        self.lanes = Lanes::new(self.setup.policy, self.setup.lanes_max);
        self.sweeps = Sweeps::new(self.instant());
        self.passes.clear();
        self.in_flight.clear();
        (self.at, self.polled, self.idle) = (At::Turn, false, false);
        self.look();
    }

    /// Somebody else's publisher claims by the contract's plain rules.
    pub fn foreign_claim(&mut self, limit: usize) {
        let candidates: Vec<Position> = self
            .rows
            .values()
            .filter(|row| self.due_now(row) && row.locked_until <= self.now)
            .take(limit)
            .map(|row| row.position)
            .collect();
        // A row goes only if every earlier unfinished row of its order goes with it.
        let rows: Vec<Position> = candidates
            .iter()
            .filter(|at| {
                let row = &self.rows[at];
                let mut earlier = self.rows.range(..**at).map(|(_, other)| other).filter(|other| {
                    other.live()
                        && match self.setup.policy {
                            Policy::BestEffort => false,
                            Policy::PerSourceStream | Policy::StopTheLine => true,
                            Policy::PerKeyHeadOfLine => row.key.is_some() && other.key == row.key,
                        }
                });
                earlier.all(|other| candidates.contains(&other.position))
            })
            .copied()
            .collect();
        if rows.is_empty() {
            return;
        }
        let stamp = self.next_stamp;
        self.next_stamp += 1;
        self.take(&rows, stamp);
        for at in &rows {
            self.disturb_row(*at);
        }
        self.note(|| format!("foreign claim {:?}", rows.iter().map(|at| short(*at)).collect::<Vec<_>>()));
        self.foreign.push(ForeignClaim { stamp, rows });
        self.look();
    }

    pub fn foreign_claims(&self) -> usize {
        self.foreign.len()
    }

    /// It settles, or dies with its claim.
    pub fn foreign_end(&mut self, index: usize, dies: bool, choose: &mut dyn Choose) {
        let claim = self.foreign.remove(index);
        if dies {
            return;
        }
        self.note(|| format!("foreign settles {:?}", claim.rows.iter().map(|at| short(*at)).collect::<Vec<_>>()));
        let mut by_lane: Vec<(Lane, Vec<Position>)> = Vec::new();
        for at in claim.rows {
            let Some(row) = self.rows.get(&at) else { continue };
            let lane = self.lane_of(row);
            match by_lane.iter_mut().find(|(name, _)| *name == lane) {
                Some((_, rows)) => rows.push(at),
                None => by_lane.push((lane, vec![at])),
            }
        }
        for (lane, rows) in by_lane {
            self.settle(&rows, claim.stamp, &[Answer::Acked, Answer::Failed], choose);
            self.disturb(lane);
        }
        self.look();
    }

    /// Maintenance frees rows whose lease ran out.
    pub fn requeue(&mut self) {
        let expired: Vec<Position> = self
            .rows
            .values()
            .filter(|row| row.status == Status::Publishing && row.claimed_at + LEASE <= self.now)
            .map(|row| row.position)
            .collect();
        for at in expired {
            let max_attempts = self.setup.max_attempts;
            let row = self.rows.get_mut(&at).expect("just seen");
            row.status = if row.attempts >= max_attempts { Status::Dead } else { Status::Failed };
            let row = short_row(row);
            self.note(|| format!("requeue {row}"));
            self.disturb_row(at);
        }
        self.look();
    }

    /// An operator makes a terminal row due again; with `says_so` the relay is woken.
    pub fn operator_retries(&mut self, at: Position, says_so: bool) {
        let now = self.now;
        let row = self.rows.get_mut(&at).expect("an operator names rows that exist");
        assert!(matches!(row.status, Status::Dead | Status::Rejected));
        (row.status, row.attempts, row.due) = (Status::Pending, 0, now);
        row.only_swept |= !says_so;
        let row = short_row(row);
        self.note(|| format!("operator retries {row}, says so: {says_so}"));
        self.changed(at, says_so);
    }

    /// An operator gives a waiting row another time.
    pub fn operator_reschedules(&mut self, at: Position, due: u64, says_so: bool) {
        let row = self.rows.get_mut(&at).expect("an operator names rows that exist");
        assert!(row.waits());
        row.due = due;
        let row = short_row(row);
        self.note(|| format!("operator reschedules {row} to {due}, says so: {says_so}"));
        self.changed(at, says_so);
    }

    /// An operator takes a waiting row out.
    pub fn operator_cancels(&mut self, at: Position) {
        let row = self.rows.get_mut(&at).expect("an operator names rows that exist");
        assert!(row.waits());
        row.status = Status::Rejected;
        let row = short_row(row);
        self.note(|| format!("operator cancels {row}"));
        self.changed(at, false);
    }

    /// Somebody gives a row a status that nobody knows, or takes it back.
    pub fn set_odd(&mut self, at: Position, odd: bool) {
        let row = self.rows.get_mut(&at).expect("an operator names rows that exist");
        row.status = if odd { Status::Odd } else { Status::Pending };
        let row = short_row(row);
        self.note(|| format!("odd status {odd}: {row}"));
        self.changed(at, false);
    }

    /// Somebody's open transaction locks a row for a while.
    pub fn lock(&mut self, at: Position, until: u64) {
        self.rows.get_mut(&at).expect("rows stay").locked_until = until;
        self.note(|| format!("lock {} until {until}", short(at)));
        let lane = self.lane_of(&self.rows[&at]);
        self.disturbed.insert(lane, until);
        self.look();
    }

    fn changed(&mut self, at: Position, says_so: bool) {
        if says_so {
            let now = self.instant();
            self.lanes.wake_all();
            self.sweeps.demand_full(now);
            self.poll_interval = POLL_INTERVAL_MIN;
            self.idle = false;
        } else {
            self.disturb_row(at);
        }
        self.look();
    }

    // ---- what has to hold --------------------------------------------------------------------------------------------------

    /// Checks, after every step, what must hold at any time; and that no head of line waits for longer than it has to.
    fn look(&mut self) {
        assert!(self.lanes.len() <= self.setup.lanes_max, "{} lanes remembered", self.lanes.len());
        if self.now < self.look_at {
            return;
        }
        self.look_at = self.now + LOOK_INTERVAL;
        let mut heads: HashMap<Lane, Position> = HashMap::new();
        for row in self.rows.values().filter(|row| row.live()) {
            heads.entry(self.lane_of(row)).or_insert(row.position);
        }
        let now = self.now;
        let mut waiting = HashMap::new();
        for (lane, head) in heads {
            let row = &self.rows[&head];
            if !self.due_now(row) || row.locked_until > now {
                continue;
            }
            let since = match self.waiting.get(&lane) {
                Some((before, since)) if *before == head => *since,
                Some(_) | None => now,
            };
            waiting.insert(lane, (head, since));
        }
        for (lane, (head, since)) in &waiting {
            let row = &self.rows[head];
            // A source whose one lane is known is not polled: its next probe finds what was committed late.
            let disturbed = self.shortcut()
                || self.disturbed.get(lane).is_some_and(|at| {
                    at + u64::try_from(PROBE_INTERVAL_MAX.as_micros()).expect("small") + PROMPT >= *since
                });
            let held_until = if row.attempts > 0 { self.retries_held_until } else { 0 };
            let after_disturbance =
                self.disturbed.get(lane).copied().unwrap_or(0).max(held_until).saturating_sub(*since);
            let overflowed = self.overflowed_at.is_some_and(|at| at + OVERFLOWED >= *since);
            let after_overflow = self.overflowed_at.map_or(0, |at| at.saturating_sub(*since));
            let allowed = match (row.only_swept, overflowed, disturbed) {
                (true, _, _) => SWEPT + after_disturbance + after_overflow,
                (false, true, _) => OVERFLOWED + after_disturbance + after_overflow,
                (false, false, true) => PROBED + after_disturbance,
                // Retries go one at a time.
                (false, false, false) if row.attempts > 0 => PROBED + after_disturbance,
                (false, false, false) => PROMPT,
            };
            assert!(
                now - since <= allowed,
                "{} of {lane:?} could be claimed for {} ms, allowed {} ms (only swept {}, overflowed {overflowed}, disturbed {disturbed})\n\
                 next probe {:?}, next full {:?}, page after {:?}\n{:?}",
                short_row(row),
                (now - since) / 1_000,
                allowed / 1_000,
                row.only_swept,
                self.lanes.next_probe_at().map(|at| self.micros(at)),
                self.micros(self.sweeps.next_full_at()),
                self.sweeps.page_after().map(short),
                self.lanes,
            );
        }
        self.waiting = waiting;
    }

    /// Lets the relay work, alone, for so long.
    pub fn run_for(&mut self, choose: &mut dyn Choose, time: u64) {
        let until = self.now + time;
        while self.now < until {
            if let Some(index) = (0..self.passes.len()).find(|index| self.pass_can_move(*index)) {
                self.pass_step(index, choose);
                continue;
            }
            self.loop_step();
            if self.idle {
                self.now = self.wakes_at().min(self.passes_unstuck_at().unwrap_or(u64::MAX)).clamp(self.now, until);
                self.look();
            }
        }
    }

    /// Lets the relay work, alone, until nothing is left to do, or so much time has passed.
    pub fn settle_down(&mut self, choose: &mut dyn Choose, until: u64) {
        let mut requeue_at = self.now;
        while self.now < until {
            if self.now >= requeue_at {
                self.requeue();
                requeue_at = self.now + SECOND;
            }
            if let Some(index) = (0..self.passes.len()).find(|index| self.pass_can_move(*index)) {
                self.pass_step(index, choose);
                continue;
            }
            self.loop_step();
            if self.idle {
                if self.passes.is_empty() && self.live() == 0 && self.lanes.is_empty() {
                    return;
                }
                let next = self.wakes_at().min(self.passes_unstuck_at().unwrap_or(u64::MAX)).min(requeue_at).min(until);
                self.now = next.max(self.now);
                self.look();
            }
        }
    }
}

impl Drop for World {
    /// A run that failed tells what happened last.
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log[self.log.len().saturating_sub(120)..].join("\n"));
        }
    }
}

pub fn short(at: Position) -> String {
    format!("{}/{:x}", at.created_at.0 - EPOCH_MICROS, at.outbox_id.as_u128() & 0xfff)
}

fn short_row(row: &Row) -> String {
    let Row { position, key, status, due, attempts, .. } = row;
    format!("{} {key:?} {status:?} due {due} attempts {attempts}", short(*position))
}
