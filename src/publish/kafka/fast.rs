//! The fast lane: many records of a lane on their way at once, as long as they go to one partition; what fails there is
//! judged in the careful lane.
//!
//! A call's lanes advance beside each other, in one task, driven by the reports of a client that all calls share. The client is
//! idempotent and gapless: a batch that fails is fatal for it, and nothing that was handed over after it is written. So a fatal
//! error is an everyday event here. The client is replaced; what surely was not written and was not judged goes again, to the
//! next client; everything else that failed, and the rest of its lane, goes through the careful lane under the same claim and
//! deadline. Rows that are likely to fail do not come here at all: those attempted before, large ones, and those of parked and
//! [guarded](super::guards) topics. Nor do rows that gain nothing here: those of a lane that soon turns to another partition.
//!
//! Nothing here ever judges a record: a code may be a neighbour's. Nothing here ever hands a record over when its call may hand
//! over no more, waits for ever, or reports anything but an acknowledgement for what was acknowledged. Which record may follow
//! which is for [`super::pipeline`] to say.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use rdkafka::types::RDKafkaErrorCode as Code;
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};
use uuid::Uuid;

use super::careful::{Call, held_back, is_through, millis, setback};
use super::client::{Generation, Persisted, Report, Reporter};
use super::codes::{self, Class};
use super::pipeline::{Pipeline, Place, Sequel, Turn};
use crate::domain::outcome::{Blame, Outcome, Setback};
use crate::domain::{partition, record};

/// Payloads from this size on go through the careful lane: each fills a batch anyway, and a topic's limit (1 MB by default) is
/// near enough for a refusal, which would stop everything here.
const CAREFUL_OCTETS_MIN: usize = 512 * 1024;
/// Runs shorter than this, in a lane that goes from place to place, go through the careful lane: each has to be acknowledged
/// before the next may begin, and there a record is sent at once instead of waiting a millisecond for others.
const RUN_ROWS_MIN: usize = 4;
/// Reports taken at once.
const REPORTS_MAX: usize = 1_000;
/// How long records that were sent by a client that has failed may still be answered.
const ANSWERS_WITHIN: Duration = Duration::from_millis(500);
/// How long a lane waits for the next client; beyond, it goes through the careful lane.
const REPLACEMENT_MAX: Duration = Duration::from_secs(3);
/// How long a record may be on its way before the cluster is asked about its topic: a partition without a leader gives no
/// answer, and no error either.
const OVERDUE: Duration = Duration::from_secs(2);
/// Topics asked about at once.
const QUESTIONS_MAX: usize = 8;
/// How long to wait when librdkafka's queue is full before the same record is handed over again, unless a report comes sooner.
const QUEUE_FULL_PAUSE: Duration = Duration::from_millis(10);
/// How long a row rests that was overtaken.
const OVERTAKEN_REST: Duration = Duration::from_secs(1);

/// Publishes the rows of a call; returns when every one has its outcome.
pub(super) async fn publish<'c>(call: &'c Call<'c>) -> Vec<(Uuid, Outcome)> {
    let (reporter, mut reports) = mpsc::unbounded_channel();
    let mut fast = Fast::new(call, reporter);
    let mut chunk = Vec::with_capacity(REPORTS_MAX);
    for lane in 0..fast.lanes.len() {
        fast.advance(lane);
    }
    while fast.lanes_open > 0 {
        let waits_for_reports = fast.on_the_way > 0;
        let give_up_at = (fast.progress_at + call.schedule.fast_silence_max).min(call.schedule.hand_over_until);
        tokio::select! {
            _ = reports.recv_many(&mut chunk, REPORTS_MAX), if waits_for_reports => fast.reported(&mut chunk),
            Some(done) = fast.careful.next(), if !fast.careful.is_empty() => fast.judged(done),
            Some(replaced) = fast.replacements.next(), if !fast.replacements.is_empty() => fast.replaced(replaced),
            () = sleep_until(fast.look_at.into()), if waits_for_reports && !fast.has_given_up => fast.ask_about_overdue(),
            Some(()) = fast.questions.next(), if !fast.questions.is_empty() => fast.answered(),
            () = sleep_until(give_up_at.into()), if waits_for_reports && !fast.has_given_up => {
                fast.give_up("records in flight got no answer in time", ANSWERS_WITHIN);
            }
            () = call.resolving.cancelled(), if waits_for_reports && !fast.is_resolving => {
                fast.is_resolving = true;
                fast.give_up("the time for answers is over", Duration::ZERO);
            }
            () = call.abandoned.cancelled(), if waits_for_reports => fast.abandon(),
            () = sleep(QUEUE_FULL_PAUSE), if fast.queue_is_full => fast.look_again(),
            () = call.batch.stop.cancelled(), if !fast.waiting.is_empty() && !fast.queue_is_full => fast.look_again(),
        }
    }
    fast.outcomes()
}

/// The state of one call.
struct Fast<'c> {
    call: &'c Call<'c>,
    topics: Vec<Topic<'c>>,
    rows: Vec<Row>,
    lanes: Vec<Lane<'c>>,
    lanes_open: usize,
    /// Records without a report.
    on_the_way: usize,
    reporter: mpsc::UnboundedSender<(usize, Report)>,
    /// The clients that records of this call were handed to.
    generations: HashMap<u64, Arc<Generation>>,
    /// Those that are of no more use, and whether there is another one.
    broken: HashMap<u64, Replacement>,
    replacements: FuturesUnordered<BoxFuture<'c, (u64, bool)>>,
    careful: FuturesUnordered<BoxFuture<'c, Judged>>,
    /// Questions about topics whose records are overdue.
    questions: FuturesUnordered<BoxFuture<'c, ()>>,
    /// When to look for such records.
    look_at: Instant,
    /// Lanes that wait for room in the queue or for the next client.
    waiting: Vec<usize>,
    queue_is_full: bool,
    /// When a record was handed over or a report came.
    progress_at: Instant,
    /// Nothing more goes through the fast lane in this call.
    has_given_up: bool,
    is_resolving: bool,
}

/// A topic of the call's rows. The number of partitions is frozen for the call, so that a key keeps its partition.
struct Topic<'c> {
    name: &'c str,
    partitions: Option<i32>,
}

/// A row of the batch.
struct Row {
    lane: usize,
    position: usize,
    topic: usize,
    /// Where its record goes; `None` is any partition that librdkafka chooses.
    partition: Option<i32>,
    /// Whether it belongs to a short run of a lane that goes from place to place.
    is_stray: bool,
    /// While it is on its way.
    handed: Option<Handed>,
    /// Whether a record of it may have been written without an acknowledgement.
    maybe_written: bool,
    outcome: Option<Outcome>,
}

#[derive(Clone, Copy)]
struct Handed {
    at: Instant,
    generation: u64,
    partition: Option<i32>,
}

struct Lane<'c> {
    rows: &'c [usize],
    pipeline: Pipeline,
    mode: Mode,
}

/// Where a lane is; never in two lanes at once.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Fast,
    Careful,
    Over,
}

/// A client of no more use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Replacement {
    UnderWay,
    There,
    Failed,
}

/// What the careful lane says of some rows of a lane: from this position on.
struct Judged {
    lane: usize,
    from: usize,
    outcomes: Vec<Outcome>,
}

/// The way of a record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// To this partition, or to any.
    Fast(Option<i32>),
    Careful,
}

/// The client for a run that begins now.
enum Available {
    Now(Arc<Generation>),
    Soon,
    No,
}

impl<'c> Fast<'c> {
    fn new(call: &'c Call<'c>, reporter: mpsc::UnboundedSender<(usize, Report)>) -> Self {
        let batch = call.batch;
        let mut topics: Vec<Topic<'c>> = Vec::new();
        let mut numbers: HashMap<&str, usize> = HashMap::new();
        let mut rows: Vec<Row> = Vec::with_capacity(batch.messages.len());
        for message in batch.messages.iter() {
            let name = message.destination.as_str();
            let topic = *numbers.entry(name).or_insert_with(|| {
                topics.push(Topic { name, partitions: call.publisher.counts.of(name) });
                topics.len() - 1
            });
            let partition = topics[topic].partitions.and_then(|partitions| match &message.message_key {
                Some(key) => Some(partition::of_key(key, partitions)),
                None => (partitions == 1).then_some(0),
            });
            rows.push(Row {
                lane: 0,
                position: 0,
                topic,
                partition,
                is_stray: false,
                handed: None,
                maybe_written: false,
                outcome: None,
            });
        }
        let mut lanes = Vec::with_capacity(batch.plan.lanes.len());
        for (lane, indexes) in batch.plan.lanes.iter().enumerate() {
            for (position, index) in indexes.iter().enumerate() {
                (rows[*index].lane, rows[*index].position) = (lane, position);
            }
            let goes_with = |one: &usize, other: &usize| {
                let (one, other) = (&rows[*one], &rows[*other]);
                one.partition.is_some() && (one.topic, one.partition) == (other.topic, other.partition)
            };
            let runs: Vec<usize> = indexes.chunk_by(goes_with).map(<[usize]>::len).collect();
            if runs.len() > 1 {
                let stray = runs.iter().flat_map(|run| std::iter::repeat_n(*run < RUN_ROWS_MIN, *run));
                for (index, is_stray) in indexes.iter().zip(stray) {
                    rows[*index].is_stray = is_stray;
                }
            }
            lanes.push(Lane { rows: indexes, pipeline: Pipeline::new(indexes.len()), mode: Mode::Fast });
        }
        Self {
            call,
            topics,
            rows,
            lanes_open: lanes.len(),
            lanes,
            on_the_way: 0,
            reporter,
            generations: HashMap::new(),
            broken: HashMap::new(),
            replacements: FuturesUnordered::new(),
            careful: FuturesUnordered::new(),
            questions: FuturesUnordered::new(),
            look_at: Instant::now() + OVERDUE,
            waiting: Vec::new(),
            queue_is_full: false,
            progress_at: Instant::now(),
            has_given_up: false,
            is_resolving: false,
        }
    }

    /// Hands over as many records of a lane as may go now.
    fn advance(&mut self, index: usize) {
        loop {
            let lane = &mut self.lanes[index];
            if lane.mode != Mode::Fast {
                return;
            }
            let position = match lane.pipeline.turn() {
                Turn::Next(position) => position,
                Turn::Wait => return,
                Turn::Lost if self.go_on_after_loss(index) => continue,
                Turn::Lost => return,
                Turn::Done => return self.end(index),
            };
            if self.queue_is_full {
                return self.waiting.push(index);
            }
            let (row, end) = (lane.rows[position], lane.rows.len());
            let is_alone = lane.pipeline.is_alone();
            let Way::Fast(partition) = self.way(row, is_alone) else {
                // Whoever is on the way is waited for: the lane is never in both lanes at once.
                if is_alone {
                    let stretch = self.lanes[index].rows[position..].iter();
                    let careful = stretch.take_while(|row| self.way(**row, true) == Way::Careful).count();
                    self.go_careful(index, position, position + careful.max(1));
                }
                return;
            };
            let generation = match self.lanes[index].pipeline.generation() {
                Some(number) => Arc::clone(&self.generations[&number]),
                None => match self.client() {
                    Available::Now(generation) => generation,
                    Available::Soon => return self.waiting.push(index),
                    Available::No => return self.go_careful(index, position, end),
                },
            };
            let topic = self.rows[row].topic;
            let place = Place { generation: generation.number(), topic, partition };
            if !self.lanes[index].pipeline.may_go(place) {
                return;
            }
            let message = &self.call.batch.messages[row];
            let record = match record::build(message) {
                Ok(record) => record,
                Err(rejection) => {
                    self.rows[row].outcome = Some(Outcome::Rejected(rejection));
                    self.lanes[index].pipeline.passed();
                    continue;
                }
            };
            let reporter = Reporter::Row(row, self.reporter.clone());
            // The fence against waking up after the lease: nothing that takes time comes between this look at the clock and
            // handing over.
            if self.call.barred().is_some() {
                // The careful lane hands nothing over either, and says why.
                if is_alone {
                    self.go_careful(index, position, end);
                }
                return;
            }
            let at = Instant::now();
            // Before it goes: an acknowledgement that comes while it is on its way proves nothing for what follows it.
            let is_warm = is_alone
                && position + 1 < end
                && partition.is_some_and(|partition| generation.is_warm(record.topic, partition, at));
            match generation.hand_over(&record, partition, millis(message), reporter) {
                Ok(()) => {
                    self.lanes[index].pipeline.gone(place, is_warm);
                    self.rows[row].handed = Some(Handed { at, generation: place.generation, partition });
                    self.generations.entry(place.generation).or_insert(generation);
                    self.on_the_way += 1;
                    self.progress_at = at;
                }
                Err(code) => match codes::classify(code) {
                    // Back-pressure: the same record again, once there may be room.
                    Class::QueueFull => {
                        self.queue_is_full = true;
                        return self.waiting.push(index);
                    }
                    Class::Fatal => {
                        self.lanes[index].pipeline.refused(true);
                        self.replace(&generation, ANSWERS_WITHIN);
                    }
                    class => {
                        self.lanes[index].pipeline.refused(false);
                        self.guard(topic, code, &class);
                    }
                },
            }
        }
    }

    /// Which way a row's record goes. Guards are looked at where a run may begin.
    fn way(&self, row: usize, is_beginning: bool) -> Way {
        let message = &self.call.batch.messages[row];
        let Row { topic, partition, is_stray, .. } = self.rows[row];
        let topic = &self.topics[topic];
        let is_open = !self.has_given_up && !self.call.batch.one_at_a_time && topic.partitions.is_some();
        let is_risky = message.attempted_before() || message.payload.len() >= CAREFUL_OCTETS_MIN;
        if !is_open || is_risky || is_stray {
            return Way::Careful;
        }
        if is_beginning {
            let now = Instant::now();
            let publisher = self.call.publisher;
            let is_parked = || {
                let faults = publisher.faults.lock();
                // librdkafka may choose a parked one for a record without a partition.
                faults.is_parked(topic.name, partition) || (partition.is_none() && faults.is_partly_parked(topic.name))
            };
            if now >= self.call.schedule.fast_until
                || self.call.barred().is_some()
                || publisher.guards().is_guarded(topic.name, partition, now)
                || is_parked()
            {
                return Way::Careful;
            }
        }
        Way::Fast(partition)
    }

    /// The client for a run that begins now.
    fn client(&self) -> Available {
        let current = self.call.publisher.fast.current();
        match self.broken.get(&current.number()) {
            None => Available::Now(current),
            Some(Replacement::UnderWay) => Available::Soon,
            // Another one was there and is gone again, or none could be built: no time to find out.
            Some(Replacement::There | Replacement::Failed) => Available::No,
        }
    }

    /// A record of the lane is lost and nothing of it is on its way; returns whether the lane goes on here.
    fn go_on_after_loss(&mut self, index: usize) -> bool {
        let may_go_again = !self.has_given_up && self.call.barred().is_none();
        let lane = &mut self.lanes[index];
        match lane.pipeline.sequel(may_go_again) {
            Sequel::Again => true,
            Sequel::Careful(from) => {
                let end = lane.rows.len();
                self.go_careful(index, from, end);
                false
            }
            Sequel::Overtaken(from) => {
                self.end_overtaken(index, from);
                false
            }
        }
    }

    /// Sends a stretch of a lane through the careful lane.
    fn go_careful(&mut self, index: usize, from: usize, to: usize) {
        let (call, lane) = (self.call, &mut self.lanes[index]);
        lane.mode = Mode::Careful;
        let rows = &lane.rows[from..to];
        let judge = async move { Judged { lane: index, from, outcomes: call.publish_rows(rows).await } };
        self.careful.push(judge.boxed());
    }

    /// Takes what the careful lane says; when all of it got through, the lane goes on in the fast lane.
    fn judged(&mut self, judged: Judged) {
        let Judged { lane: index, from, outcomes } = judged;
        let rows = self.lanes[index].rows;
        let to = from + outcomes.len();
        let pivot = outcomes.iter().position(|outcome| !is_through(outcome));
        for (row, outcome) in rows[from..to].iter().zip(outcomes) {
            let row = &mut self.rows[*row];
            row.outcome = Some(if row.maybe_written { handed_over_twice(outcome) } else { outcome });
        }
        let Some(pivot) = pivot else {
            let lane = &mut self.lanes[index];
            lane.pipeline.passed_until(to);
            lane.mode = Mode::Fast;
            return self.advance(index);
        };
        let pivot = self.call.batch.messages[rows[from + pivot]].outbox_id;
        for row in &rows[to..] {
            self.rows[*row].outcome = Some(held_back(pivot));
        }
        self.end(index);
    }

    /// What must never happen is not mended here, or nobody would notice: the outcomes show it, and it is counted.
    fn end_overtaken(&mut self, index: usize, from: usize) {
        let Lane { rows, pipeline, .. } = &self.lanes[index];
        let pivot = self.call.batch.messages[rows[from]].outbox_id;
        let topic = self.topics[self.rows[rows[from]].topic].name;
        tracing::error!(topic, "a later record of a lane was acknowledged although {pivot} was not: order is lost");
        for (position, row) in rows.iter().enumerate().skip(from) {
            let row = &mut self.rows[*row];
            if pipeline.is_lost(position) {
                let error =
                    format!("kafka.overtaken: broker: topic {topic}: a later record of its lane got through first");
                let persisted = if row.maybe_written { Persisted::Possibly } else { Persisted::No };
                row.outcome = Some(setback(persisted, Blame::Topic, &error, OVERTAKEN_REST));
            } else if row.outcome.is_none() {
                row.outcome = Some(held_back(pivot));
            }
        }
        self.end(index);
    }

    fn end(&mut self, index: usize) {
        self.lanes[index].mode = Mode::Over;
        self.lanes_open -= 1;
    }

    /// Takes reports, and advances the lanes they belong to.
    fn reported(&mut self, chunk: &mut Vec<(usize, Report)>) {
        let now = Instant::now();
        self.progress_at = now;
        let mut lanes = Vec::with_capacity(chunk.len());
        let mut acks = Vec::with_capacity(chunk.len());
        for (index, report) in chunk.drain(..) {
            let row = &mut self.rows[index];
            // None of a record that was given up for lost.
            let Some(handed) = row.handed.take() else { continue };
            self.on_the_way -= 1;
            lanes.push(row.lane);
            match (report.code, report.persisted) {
                // Written, whatever became of the answer.
                (None, _) | (Some(_), Persisted::Yes) => {
                    let Report { partition, offset, .. } = report;
                    row.outcome = Some(Outcome::Acked { partition, offset, maybe_twice: row.maybe_written });
                    self.lanes[row.lane].pipeline.acked(row.position);
                    acks.push((index, partition, handed));
                }
                (Some(code), persisted @ (Persisted::No | Persisted::Possibly)) => {
                    self.lost(index, code, persisted, handed);
                }
            }
        }
        // Before the lanes go on: what is warm now decides how many of their records may go.
        self.note_acks(&acks, now);
        lanes.dedup();
        for lane in lanes {
            self.advance(lane);
        }
        self.look_again();
    }

    /// Remembers what the acknowledgements prove, for every call.
    fn note_acks(&self, acks: &[(usize, i32, Handed)], now: Instant) {
        let publisher = self.call.publisher;
        let topic_of = |index: usize| self.topics[self.rows[index].topic].name;
        let mut last = None;
        for (index, partition, handed) in acks {
            let place = (handed.generation, self.rows[*index].topic, *partition);
            if last != Some(place) {
                self.generations[&handed.generation].acked_by(topic_of(*index), *partition, now);
                last = Some(place);
            }
        }
        let mut faults = publisher.faults.lock();
        for (index, partition, handed) in acks {
            let id = self.call.batch.messages[*index].outbox_id;
            if faults.acked(id, topic_of(*index), *partition, handed.at, now) {
                tracing::info!(topic = topic_of(*index), "the topic takes records again");
            }
        }
    }

    /// A record did not get through.
    fn lost(&mut self, index: usize, code: Code, persisted: Persisted, handed: Handed) {
        let class = codes::classify(code);
        let row = &mut self.rows[index];
        row.maybe_written |= persisted != Persisted::No;
        let is_innocent = persisted == Persisted::No && matches!(class, Class::Fatal | Class::Purged);
        let (lane, topic) = (row.lane, row.topic);
        let pipeline = &mut self.lanes[lane].pipeline;
        pipeline.lost(row.position, is_innocent);
        // Records behind one that is lost must not get through, whatever librdkafka thinks of it.
        let is_dangerous = !pipeline.is_alone() && class != Class::Purged;
        self.guard(topic, code, &class);
        let generation = Arc::clone(&self.generations[&handed.generation]);
        if is_dangerous || (!self.broken.contains_key(&handed.generation) && generation.fatal().is_some()) {
            self.replace(&generation, ANSWERS_WITHIN);
        }
    }

    /// Keeps the next records of a topic away from here after a failure that it, or one of its records, caused.
    fn guard(&mut self, topic: usize, code: Code, class: &Class) {
        let topic = &mut self.topics[topic];
        let publisher = self.call.publisher;
        let now = Instant::now();
        match class {
            // We chose the partition by a number that is too high by now.
            Class::Topic(_) if code == Code::UnknownPartition => {}
            Class::Topic(_) => publisher.guards().failed(topic.name, now),
            // A neighbour's code as well as its own. The cluster's clock, or a feature it lacks: the next batch fails too.
            Class::Record(_) | Class::Unlisted(_) | Class::Cluster(_) => publisher.guards().refused(topic.name, now),
            Class::Late | Class::Fatal | Class::Purged | Class::Unproven | Class::QueueFull => return,
        }
        if matches!(class, Class::Topic(_)) {
            publisher.counts.forget(topic.name);
            topic.partitions = None;
        }
    }

    /// Has a client replaced; what it still holds gets its reports soon.
    fn replace(&mut self, generation: &Arc<Generation>, answers_within: Duration) {
        if self.broken.contains_key(&generation.number()) {
            return;
        }
        let reason = generation.fatal().map(|(_, reason)| reason);
        let reason = reason.unwrap_or_else(|| "a record failed with others of its lane behind it".to_owned());
        self.replace_because(generation, reason, answers_within);
    }

    fn replace_because(&mut self, generation: &Arc<Generation>, reason: String, answers_within: Duration) {
        let number = generation.number();
        self.broken.insert(number, Replacement::UnderWay);
        let (call, generation) = (self.call, Arc::clone(generation));
        let replace = async move {
            let until = (Instant::now() + REPLACEMENT_MAX).min(call.schedule.hand_over_until);
            let is_there = call.publisher.fast.rebuild(&generation, &reason, answers_within, until).await;
            if !is_there || answers_within.is_zero() {
                generation.retire(Instant::now() + answers_within).await;
            }
            (number, is_there)
        };
        self.replacements.push(replace.boxed());
    }

    fn replaced(&mut self, (number, is_there): (u64, bool)) {
        self.broken.insert(number, if is_there { Replacement::There } else { Replacement::Failed });
        self.look_again();
    }

    /// Asks about topics whose records are on their way for long.
    fn ask_about_overdue(&mut self) {
        let now = Instant::now();
        self.look_at = now + OVERDUE;
        if !self.questions.is_empty() {
            return;
        }
        let is_overdue =
            |row: &Row| row.handed.is_some_and(|handed| now.saturating_duration_since(handed.at) >= OVERDUE);
        let mut topics: Vec<usize> = self.rows.iter().filter(|row| is_overdue(row)).map(|row| row.topic).collect();
        topics.sort_unstable();
        topics.dedup();
        let (call, client) = (self.call, self.call.publisher.fast.current());
        for topic in topics.into_iter().take(QUESTIONS_MAX) {
            let (name, client) = (self.topics[topic].name, Arc::clone(&client));
            // What it answers is remembered as a fault of the topic or partition.
            let ask = async move { drop(call.ask_about(name, None, &client).await) };
            self.questions.push(ask.boxed());
        }
    }

    /// The cluster answered. Records for what is parked by now would wait for nothing.
    fn answered(&mut self) {
        let is_lost_time = |row: &Row| {
            let faults = self.call.publisher.faults.lock();
            row.handed.is_some_and(|handed| faults.is_parked(self.topics[row.topic].name, handed.partition))
        };
        if !self.has_given_up && self.rows.iter().any(is_lost_time) {
            self.give_up("a topic or partition takes nothing", ANSWERS_WITHIN);
        }
    }

    /// Lets go of everything that is on its way; from now on the careful lane has this call to itself.
    fn give_up(&mut self, reason: &str, answers_within: Duration) {
        self.has_given_up = true;
        let now = Instant::now();
        let mut generations: Vec<u64> = Vec::new();
        for row in &self.rows {
            let Some(handed) = row.handed else { continue };
            if !generations.contains(&handed.generation) {
                generations.push(handed.generation);
            }
            if !self.is_resolving {
                self.call.publisher.guards().silent(self.topics[row.topic].name, handed.partition, now);
            }
        }
        for number in generations {
            let generation = Arc::clone(&self.generations[&number]);
            self.replace_because(&generation, reason.to_owned(), answers_within);
        }
        self.look_again();
    }

    /// Not even letting go brought reports: what has none may have been written.
    fn abandon(&mut self) {
        let mut lanes = Vec::new();
        for row in &mut self.rows {
            if row.handed.take().is_some() {
                self.on_the_way -= 1;
                row.maybe_written = true;
                self.lanes[row.lane].pipeline.lost(row.position, false);
                lanes.push(row.lane);
            }
        }
        for lane in lanes {
            self.advance(lane);
        }
    }

    /// Lanes that waited look whether they may go on.
    fn look_again(&mut self) {
        self.queue_is_full = false;
        for lane in std::mem::take(&mut self.waiting) {
            self.advance(lane);
        }
    }

    fn outcomes(self) -> Vec<(Uuid, Outcome)> {
        let rows = self.call.batch.messages.iter().zip(self.rows);
        let outcome = |row: Row| row.outcome.expect("a lane that is over has an outcome for each row");
        rows.map(|(message, row)| (message.outbox_id, outcome(row))).collect()
    }
}

/// The outcome of a row whose record may have been written before it was handed over again.
fn handed_over_twice(outcome: Outcome) -> Outcome {
    match outcome {
        Outcome::Acked { partition, offset, .. } => Outcome::Acked { partition, offset, maybe_twice: true },
        Outcome::NotSent(setback) => Outcome::Unknown(setback),
        Outcome::Failed { error } => Outcome::Unknown(Setback { blame: Blame::Row, error, pause: Duration::ZERO }),
        settled @ (Outcome::Rejected(_) | Outcome::Unknown(_)) => settled,
    }
}
