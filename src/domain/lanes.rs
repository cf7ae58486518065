//! The lane scheduler of one source: which lanes to claim next, which to leave alone, and until when.
//!
//! It is a hint: the claim statements alone decide what may be claimed, so a wrong guess here costs a query, never an order
//! violation. What it must get right is the opposite: nothing it was shown is ever stranded, and no lane with a batch in flight
//! is ever dispatched again. Nothing here ever asks the database or a clock.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::message::Position;
use super::policy::Policy;

/// How long a lane that yields nothing is left alone at most, so that a stranger's settlement or an operator's change is seen.
pub const PROBE_INTERVAL_MAX: Duration = Duration::from_secs(15);
/// How long a lane is left alone whose head is paused: the end of a pause wakes it, so a probe is only for what strangers do to its head,
/// and a paused topic may hold a hundred thousand lanes.
const PAUSED_PROBE_INTERVAL: Duration = Duration::from_secs(60);
/// How long a lane is left alone whose head is due but was locked by somebody: their statement ends soon.
const RACE_PAUSE: Duration = Duration::from_millis(100);
/// Rows of one lane that are claimed in one statement while many lanes are ready; fewer lanes with more rows each cost less
/// (32 lanes × 16 rows: 30–37 buffers a row; 512 × 1: 39–46).
const LANE_ROWS_MIN: usize = 16;

/// Rows that must reach the broker in order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lane {
    /// All rows of the source with this key.
    Key(Arc<str>),
    /// A single row: a null key, or a source without order.
    Row(Uuid),
    /// The whole source.
    Source,
}

/// What a row looked like when a statement passed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowState {
    /// Pending or failed, and due.
    Due,
    /// Pending or failed, due after this long.
    Later(Duration),
    /// Pending or failed, and its topic or its key is paused.
    Paused,
    /// Claimed by somebody.
    Publishing,
    /// A status nobody knows: neither claimable nor terminal.
    Unknown,
}

/// One live row as DISCOVER or PEEK saw it.
#[derive(Debug, Clone)]
pub struct Glimpse {
    /// Its place in the order.
    pub position: Position,
    /// Its key.
    pub message_key: Option<Arc<str>>,
    /// What it looked like.
    pub state: RowState,
    /// Whether an attempt was spent on it: such a row is claimed alone.
    pub attempted: bool,
}

/// Lanes to claim in one statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Distinct lanes of one kind (all keys, all rows, or the source).
    pub lanes: Vec<Wanted>,
    /// The one lane's head was attempted before: claim it, and nothing else.
    pub retry: bool,
}

/// One lane of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The lane.
    pub lane: Lane,
    /// Rows to claim of it at most.
    pub rows_max: usize,
}

/// What a pass did to one lane of its request.
#[derive(Debug, Clone)]
pub enum Served {
    /// Rows were claimed and settled.
    Claimed {
        /// How many.
        rows: usize,
        /// The last of them.
        through: Position,
        /// The first of them that is neither sent nor terminal, as it is now: what the lane did not get past.
        blocked: Option<Glimpse>,
    },
    /// Nothing was claimed; the lane's head afterwards, if it has any.
    Nothing(Option<Glimpse>),
    /// Rows were claimed but not settled (lost to somebody, or the database is away): their lease must run out first.
    Unsettled,
    /// The claim did not happen; ask again.
    NotAsked,
}

/// What is known of a lane's rows that are not claimed.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    /// Rows seen, at least 1.
    rows: usize,
    /// First row seen.
    head: Position,
    /// Last row seen: the lane may be forgotten only when a claim got this far.
    through: Position,
    /// Whether the head was attempted before.
    retry: bool,
}

impl Waiting {
    fn of(glimpse: &Glimpse) -> Self {
        let (position, retry) = (glimpse.position, glimpse.attempted);
        Self { rows: 1, head: position, through: position, retry }
    }

    /// The same, now that this row is known to be the head.
    fn behind(&self, head: &Glimpse) -> Self {
        let through = self.through.max(head.position);
        Self { rows: self.rows, head: head.position, through, retry: head.attempted }
    }

    fn see(&mut self, position: Position) {
        if position > self.through {
            self.rows += 1;
            self.through = position;
        }
        self.head = self.head.min(position);
    }
}

#[derive(Debug, Clone)]
enum State {
    Ready(Waiting),
    /// `asked` is what was known of it; `dirty` is the first row that turned up meanwhile and that the claim may not have covered.
    InFlight {
        asked: Waiting,
        dirty: Option<Position>,
    },
    Parked {
        waiting: Waiting,
        probe_at: Instant,
    },
}

/// The lanes of one source. The map is bounded; what does not fit is found again by a full sweep.
#[derive(Debug)]
pub struct Lanes {
    policy: Policy,
    lanes_max: usize,
    states: HashMap<Lane, State>,
    /// Lanes in the order in which they became ready. An entry whose state is no longer `Ready` is passed over.
    ready_keys: VecDeque<Lane>,
    ready_rows: VecDeque<Lane>,
    ready_retries: VecDeque<Lane>,
    /// Turns alternate between keys and single rows.
    rows_next: bool,
    /// Entries whose state no longer says the same `probe_at` are passed over.
    parked: BTreeSet<(Instant, Lane)>,
    /// Rows seen in lanes that wait in `ready_keys` and `ready_rows`.
    rows_ready: usize,
    retries_in_flight: usize,
    overflowed: bool,
}

impl Lanes {
    /// Makes an empty scheduler that remembers at most `lanes_max` lanes.
    #[must_use]
    pub fn new(policy: Policy, lanes_max: usize) -> Self {
        Self {
            policy,
            lanes_max,
            states: HashMap::new(),
            ready_keys: VecDeque::new(),
            ready_rows: VecDeque::new(),
            ready_retries: VecDeque::new(),
            rows_next: false,
            parked: BTreeSet::new(),
            rows_ready: 0,
            retries_in_flight: 0,
            overflowed: false,
        }
    }

    /// The lane a row belongs to under the policy.
    #[must_use]
    pub fn lane_of(policy: Policy, message_key: Option<&Arc<str>>, outbox_id: Uuid) -> Lane {
        match policy {
            Policy::PerKeyHeadOfLine => match message_key {
                Some(key) => Lane::Key(Arc::clone(key)),
                None => Lane::Row(outbox_id),
            },
            Policy::PerSourceStream | Policy::StopTheLine => Lane::Source,
            Policy::BestEffort => Lane::Row(outbox_id),
        }
    }

    /// Rows seen in lanes that can be claimed now: 0 exactly when [`Self::next_request`] has none.
    ///
    /// Lanes whose head was attempted before wait for each other; they count as the one row that can go, so that a crowd of them
    /// keeps nobody from looking further.
    #[must_use]
    pub fn rows_ready(&self) -> usize {
        self.rows_ready + usize::from(self.retries_in_flight == 0 && !self.ready_retries.is_empty())
    }

    /// Lanes remembered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.states.len()
    }

    /// Whether no lane is remembered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.states.is_empty()
    }

    /// Whether a lane did not fit since the last call: a full sweep must find its rows again.
    pub fn take_overflowed(&mut self) -> bool {
        std::mem::take(&mut self.overflowed)
    }

    /// When the next parked lane wants to be probed.
    #[must_use]
    pub fn next_probe_at(&self) -> Option<Instant> {
        self.parked.first().map(|(probe_at, _)| *probe_at)
    }

    /// Takes in live rows, in order, as a statement saw them.
    pub fn discovered(&mut self, glimpses: &[Glimpse], now: Instant) {
        for glimpse in glimpses {
            let lane = Self::lane_of(self.policy, glimpse.message_key.as_ref(), glimpse.position.outbox_id);
            let full = self.states.len() >= self.lanes_max;
            match self.states.get_mut(&lane) {
                // The end of a pause sweeps fully: nothing need be known of a single row that is paused.
                None if glimpse.state == RowState::Paused && matches!(lane, Lane::Row(_)) => {}
                None if full => {
                    self.overflowed = true;
                    if glimpse.state == RowState::Due && self.forget_one_parked() {
                        self.place(lane, Waiting::of(glimpse), glimpse.state, now);
                    }
                }
                None => self.place(lane, Waiting::of(glimpse), glimpse.state, now),
                Some(State::InFlight { asked, dirty }) => {
                    // What is publishing is ours, unless it lies before everything that was asked for.
                    if glimpse.state != RowState::Publishing || glimpse.position < asked.head {
                        *dirty = Some(dirty.map_or(glimpse.position, |first| first.min(glimpse.position)));
                    }
                    asked.see(glimpse.position);
                }
                Some(State::Ready(waiting)) => {
                    let before = waiting.rows;
                    waiting.see(glimpse.position);
                    if !waiting.retry {
                        self.rows_ready += waiting.rows - before;
                    }
                }
                Some(State::Parked { waiting, probe_at }) => {
                    // The head decides whether the lane can be claimed; a row at or before it is news.
                    let news = glimpse.position <= waiting.head;
                    waiting.see(glimpse.position);
                    if news && glimpse.state == RowState::Due {
                        let (waiting, probe_at) = (Waiting { retry: glimpse.attempted, ..*waiting }, *probe_at);
                        self.parked.remove(&(probe_at, lane.clone()));
                        self.make_ready(lane, waiting);
                    }
                }
            }
        }
    }

    /// Makes room for a lane that can be claimed now: lanes that wait, however many, must not keep it out for ever. The one whose
    /// probe is last goes; a full sweep finds it again.
    fn forget_one_parked(&mut self) -> bool {
        while let Some((probe_at, lane)) = self.parked.pop_last() {
            if let Some(State::Parked { probe_at: current, .. }) = self.states.get(&lane)
                && *current == probe_at
            {
                self.states.remove(&lane);
                return true;
            }
        }
        false
    }

    /// Makes lanes ready whose probe is due.
    pub fn tick(&mut self, now: Instant) {
        while let Some((probe_at, _)) = self.parked.first() {
            if *probe_at > now {
                return;
            }
            let (probe_at, lane) = self.parked.pop_first().expect("first() was Some");
            if let Some(State::Parked { waiting, probe_at: current }) = self.states.get(&lane)
                && *current == probe_at
            {
                let waiting = *waiting;
                self.make_ready(lane, waiting);
            }
        }
    }

    /// Picks the lanes to claim next, marks them in flight, and returns them; `None` when nothing is ready.
    ///
    /// Lanes whose head was attempted before go one at a time, alone, so that a row that takes the process down takes
    /// nobody with it.
    pub fn next_request(&mut self, rows_max: usize) -> Option<Request> {
        if self.retries_in_flight == 0
            && let Some((lane, waiting)) = Self::pop_ready(&self.states, &mut self.ready_retries, true)
        {
            self.retries_in_flight += 1;
            self.dispatch(lane.clone(), waiting);
            return Some(Request { lanes: vec![Wanted { lane, rows_max: 1 }], retry: true });
        }
        self.rows_next = !self.rows_next;
        let turns = if self.rows_next { [true, false] } else { [false, true] };
        turns.into_iter().find_map(|single_rows| self.collect(single_rows, rows_max))
    }

    /// Fills a batch from one of the two queues.
    fn collect(&mut self, single_rows: bool, rows_max: usize) -> Option<Request> {
        let queued = if single_rows { self.ready_rows.len() } else { self.ready_keys.len() };
        let lane_rows_max = (rows_max / queued.max(1)).clamp(LANE_ROWS_MIN.min(rows_max), rows_max);
        let mut lanes = Vec::new();
        let mut rows = 0;
        while rows < rows_max {
            let queue = if single_rows { &mut self.ready_rows } else { &mut self.ready_keys };
            let Some((lane, waiting)) = Self::pop_ready(&self.states, queue, false) else { break };
            // The whole source is one lane: its statement is bounded by the batch alone.
            let lane_rows = if lane == Lane::Source { rows_max } else { waiting.rows.min(lane_rows_max) };
            rows += lane_rows;
            self.dispatch(lane.clone(), waiting);
            lanes.push(Wanted { lane, rows_max: lane_rows });
        }
        if lanes.is_empty() { None } else { Some(Request { lanes, retry: false }) }
    }

    /// Pops the first entry that still is what the queue says.
    fn pop_ready(states: &HashMap<Lane, State>, queue: &mut VecDeque<Lane>, retry: bool) -> Option<(Lane, Waiting)> {
        while let Some(lane) = queue.pop_front() {
            if let Some(State::Ready(waiting)) = states.get(&lane)
                && waiting.retry == retry
            {
                let waiting = *waiting;
                return Some((lane, waiting));
            }
        }
        None
    }

    fn dispatch(&mut self, lane: Lane, waiting: Waiting) {
        if !waiting.retry {
            self.rows_ready -= waiting.rows;
        }
        self.states.insert(lane, State::InFlight { asked: waiting, dirty: None });
    }

    /// Takes in what a pass did; `served[i]` belongs to `request.lanes[i]`.
    pub fn served(&mut self, request: &Request, served: Vec<Served>, now: Instant) {
        assert_eq!(request.lanes.len(), served.len(), "one result per lane");
        if request.retry {
            self.retries_in_flight -= 1;
        }
        for (wanted, served) in request.lanes.iter().zip(served) {
            let lane = wanted.lane.clone();
            let Some(State::InFlight { asked, dirty }) = self.states.remove(&lane) else {
                unreachable!("a lane stays in flight until its pass is served")
            };
            match served {
                Served::Claimed { rows, through, blocked: None } => {
                    // The whole source is never known to be empty by what was seen of it: look again.
                    let covered = through >= asked.through && lane != Lane::Source;
                    if !covered || dirty.is_some() {
                        let waiting = Waiting { rows: asked.rows.saturating_sub(rows).max(1), retry: false, ..asked };
                        self.make_ready(lane, waiting);
                    }
                }
                Served::Claimed { rows: _, through: _, blocked: Some(head) } => {
                    self.rest(lane, asked, &head, dirty, now);
                }
                Served::Nothing(None) => {
                    if dirty.is_some() {
                        self.make_ready(lane, asked);
                    }
                }
                Served::Nothing(Some(head)) => {
                    let claimable = request.retry || !head.attempted || lane == Lane::Source;
                    let lost_race = head.state == RowState::Due && claimable;
                    if lost_race && dirty.is_none_or(|first| first > head.position) {
                        self.park(lane, asked.behind(&head), RACE_PAUSE, now);
                    } else {
                        self.rest(lane, asked, &head, dirty, now);
                    }
                }
                Served::Unsettled => {
                    self.park(lane, Waiting { retry: false, ..asked }, PROBE_INTERVAL_MAX, now);
                }
                Served::NotAsked => self.make_ready(lane, asked),
            }
        }
    }

    /// Puts a lane where the head that its pass left behind belongs; unless a row turned up meanwhile at that place or before
    /// it: then the lane is looked at again, since nobody knows which of the two was seen later.
    fn rest(&mut self, lane: Lane, asked: Waiting, head: &Glimpse, dirty: Option<Position>, now: Instant) {
        let waiting = asked.behind(head);
        if head.state != RowState::Due && dirty.is_some_and(|first| first <= head.position) {
            self.make_ready(lane, Waiting { retry: false, ..waiting });
        } else {
            self.place(lane, waiting, head.state, now);
        }
    }

    /// Puts a lane where the state of its head belongs.
    fn place(&mut self, lane: Lane, waiting: Waiting, head: RowState, now: Instant) {
        match head {
            RowState::Due => self.make_ready(lane, waiting),
            RowState::Later(due_in) => self.park(lane, waiting, due_in, now),
            RowState::Paused => match lane {
                Lane::Row(_) => {}
                // Rows that were committed late may come before the one that is paused.
                Lane::Source => self.park(lane, waiting, PROBE_INTERVAL_MAX, now),
                Lane::Key(_) => self.park_until(lane, Waiting { retry: false, ..waiting }, now + PAUSED_PROBE_INTERVAL),
            },
            RowState::Publishing | RowState::Unknown => {
                self.park(lane, Waiting { retry: false, ..waiting }, PROBE_INTERVAL_MAX, now);
            }
        }
    }

    fn make_ready(&mut self, lane: Lane, waiting: Waiting) {
        // STREAMCLAIM itself claims an attempted head alone.
        let waiting = Waiting { retry: waiting.retry && lane != Lane::Source, ..waiting };
        let queue = match &lane {
            Lane::Key(_) | Lane::Row(_) | Lane::Source if waiting.retry => &mut self.ready_retries,
            Lane::Key(_) | Lane::Source => &mut self.ready_keys,
            Lane::Row(_) => &mut self.ready_rows,
        };
        queue.push_back(lane.clone());
        if !waiting.retry {
            self.rows_ready += waiting.rows;
        }
        self.states.insert(lane, State::Ready(waiting));
    }

    fn park(&mut self, lane: Lane, waiting: Waiting, due_in: Duration, now: Instant) {
        if due_in.is_zero() {
            self.make_ready(lane, waiting);
            return;
        }
        // A look at a head that will not be due is no retry: it claims nothing and needs not go alone.
        let waiting = Waiting { retry: waiting.retry && due_in <= PROBE_INTERVAL_MAX, ..waiting };
        self.park_until(lane, waiting, now + due_in.min(PROBE_INTERVAL_MAX));
    }

    fn park_until(&mut self, lane: Lane, waiting: Waiting, probe_at: Instant) {
        self.parked.insert((probe_at, lane.clone()));
        self.states.insert(lane, State::Parked { waiting, probe_at });
    }

    /// Probes every lane now: something changed that this process did not do. Lanes in flight are looked at again, since their pass
    /// may have looked before the change.
    pub fn wake_all(&mut self) {
        for state in self.states.values_mut() {
            if let State::InFlight { dirty, .. } = state {
                *dirty = Some(Position::START);
            }
        }
        for (_, lane) in std::mem::take(&mut self.parked) {
            if let Some(State::Parked { waiting, .. }) = self.states.get(&lane) {
                // Whether its head can be retried now is what the probe finds out.
                let waiting = Waiting { retry: false, ..*waiting };
                self.make_ready(lane, waiting);
            }
        }
    }
}
