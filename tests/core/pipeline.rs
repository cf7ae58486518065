//! The fast lane's rules of order against a model of librdkafka and a broker that is as mean as a real one may be.

use std::collections::{BTreeMap, VecDeque};

use keiro_relay::publish::kafka::pipeline::{Pipeline, Place, REWINDS_MAX, Sequel, Turn};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

const HERE: Place = Place { generation: 0, topic: 0, partition: Some(0) };

/// A record: its lane and position.
type Record = (usize, usize);

/// What the client and the brokers hold of one partition.
#[derive(Default)]
struct Partition {
    /// Handed over, not sent, each with its sequence number.
    queue: VecDeque<(u64, Record)>,
    sequence: u64,
    /// Sent, not processed; a batch that has to be sent again comes back to the front once the others are through.
    sent: VecDeque<Vec<(u64, Record)>>,
    again: VecDeque<Vec<(u64, Record)>>,
    /// What the broker expects of this client; `None` while it knows nothing of it.
    expected: Option<u64>,
    is_warm: bool,
}

/// Several lanes through one client after another.
struct Model {
    rng: StdRng,
    lanes: Vec<Vec<Place>>,
    poison: Vec<Vec<bool>>,
    pipelines: Vec<Pipeline>,
    /// Position up to which the careful lane has a lane to itself.
    careful: Vec<Option<usize>>,
    over: Vec<bool>,
    generation: u64,
    is_fatal: bool,
    partitions: BTreeMap<(usize, i32), Partition>,
    log: Vec<Record>,
    pipelined: usize,
    /// Whether partitions forget a client that they knew.
    heads_only_when_cold: bool,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let lanes: Vec<Vec<Place>> = (0..rng.random_range(1..5))
            .map(|_| {
                let wander = rng.random_range(0..10) < 3;
                let mut place =
                    Place { topic: rng.random_range(0..2), partition: Some(rng.random_range(0..2)), ..HERE };
                let records = rng.random_range(1..12);
                let mut next = |_| {
                    if wander && rng.random_range(0..4) == 0 {
                        place.topic = rng.random_range(0..2);
                        place.partition = (rng.random_range(0..4) > 0).then(|| rng.random_range(0..2));
                    }
                    place
                };
                (0..records).map(&mut next).collect()
            })
            .collect();
        let share = rng.random_range(0..4);
        let poison = lanes.iter().map(|lane| lane.iter().map(|_| rng.random_range(0..10) < share).collect()).collect();
        Self {
            pipelines: lanes.iter().map(|lane| Pipeline::new(lane.len())).collect(),
            careful: vec![None; lanes.len()],
            over: vec![false; lanes.len()],
            rng,
            lanes,
            poison,
            generation: 0,
            is_fatal: false,
            partitions: BTreeMap::new(),
            log: Vec::new(),
            pipelined: 0,
            heads_only_when_cold: true,
        }
    }

    /// Which partition a place is: librdkafka chooses when nobody else did.
    fn partition_of(&mut self, place: Place) -> (usize, i32) {
        let any = self.rng.random_range(0..2);
        (place.topic, place.partition.unwrap_or(any))
    }

    fn step(&mut self) {
        match self.rng.random_range(0..10) {
            0..4 => self.advance(),
            4..6 => self.send(),
            6..9 => self.process(),
            _ => self.replace(),
        }
    }

    /// A lane does one thing.
    fn advance(&mut self) {
        let lane = self.rng.random_range(0..self.lanes.len());
        if self.over[lane] {
            return;
        }
        if let Some(from) = self.careful[lane] {
            // One at a time, and the code is its own: poison is rejected, the others are written.
            for position in from..self.lanes[lane].len() {
                if !self.poison[lane][position] {
                    self.log.push((lane, position));
                }
            }
            self.over[lane] = true;
            return;
        }
        match self.pipelines[lane].turn() {
            Turn::Wait => {}
            Turn::Done => self.over[lane] = true,
            Turn::Lost => match self.pipelines[lane].sequel(self.rng.random_range(0..3) > 0) {
                Sequel::Again => {}
                Sequel::Careful(from) => self.careful[lane] = Some(from),
                Sequel::Overtaken(position) => panic!("lane {lane}, position {position} was overtaken"),
            },
            Turn::Next(position) => {
                let generation = self.pipelines[lane].generation().unwrap_or(self.generation);
                let place = Place { generation, ..self.lanes[lane][position] };
                if !self.pipelines[lane].may_go(place) {
                    return;
                }
                if generation != self.generation || self.is_fatal {
                    return self.pipelines[lane].refused(true);
                }
                self.pipelined += usize::from(!self.pipelines[lane].is_alone());
                let key = self.partition_of(place);
                let partition = self.partitions.entry(key).or_default();
                self.pipelines[lane].gone(place, partition.is_warm || !self.heads_only_when_cold);
                partition.queue.push_back((partition.sequence, (lane, position)));
                partition.sequence += 1;
            }
        }
    }

    /// A partition's next batch goes out, behind at most four others.
    fn send(&mut self) {
        let size = self.rng.random_range(1..4);
        let Some(key) = self.any_partition() else { return };
        let partition = self.partitions.get_mut(&key).expect("a partition");
        if !self.is_fatal && partition.again.is_empty() && partition.sent.len() < 5 && !partition.queue.is_empty() {
            let size = size.min(partition.queue.len());
            let batch = partition.queue.drain(..size).collect();
            partition.sent.push_back(batch);
        }
    }

    /// The broker takes or refuses the batch it got first, or something in between fails, and it has to be sent again.
    fn process(&mut self) {
        let is_lost_on_the_way = self.rng.random_range(0..5) == 0;
        let Some(key) = self.any_partition() else { return };
        let partition = self.partitions.get_mut(&key).expect("a partition");
        let Some(batch) = partition.sent.pop_front() else {
            // The others are through: what failed goes again, in order.
            partition.sent.append(&mut partition.again);
            return;
        };
        if is_lost_on_the_way && !self.is_fatal {
            partition.again.push_back(batch);
            return;
        }
        let is_in_turn = partition.expected.is_none_or(|expected| expected == batch[0].0);
        let is_poisoned = batch.iter().any(|(_, (lane, position))| self.poison[*lane][*position]);
        if is_in_turn && !is_poisoned {
            partition.expected = batch.last().map(|(sequence, _)| sequence + 1);
            partition.is_warm = true;
            for (_, (lane, position)) in batch {
                self.log.push((lane, position));
                self.pipelines[lane].acked(position);
            }
            return;
        }
        if !is_in_turn && !self.is_fatal && !partition.again.is_empty() {
            // An earlier one failed and goes again first.
            partition.again.push_back(batch);
            return;
        }
        for (_, (lane, position)) in batch {
            self.pipelines[lane].lost(position, false);
        }
        self.fail();
    }

    /// Gapless: nothing more goes out. What is on its way stays so until it is answered.
    fn fail(&mut self) {
        self.is_fatal = true;
        for partition in self.partitions.values_mut() {
            for (_, (lane, position)) in partition.queue.drain(..) {
                self.pipelines[lane].lost(position, true);
            }
            for (_, (lane, position)) in partition.again.drain(..).flatten() {
                self.pipelines[lane].lost(position, true);
            }
        }
    }

    /// Another client: no partition knows it.
    fn replace(&mut self) {
        if self.is_fatal && self.partitions.values().all(|partition| partition.sent.is_empty()) {
            self.partitions.clear();
            self.generation += 1;
            self.is_fatal = false;
        }
    }

    fn any_partition(&mut self) -> Option<(usize, i32)> {
        let keys: Vec<_> = self.partitions.keys().copied().collect();
        (!keys.is_empty()).then(|| keys[self.rng.random_range(0..keys.len())])
    }

    /// Runs to the end and says what was delivered out of order.
    fn run(mut self) -> (Vec<Record>, usize) {
        for _ in 0..100_000 {
            if self.over.iter().all(|over| *over) {
                return (self.inversions(), self.pipelined);
            }
            self.step();
        }
        panic!("the model stands still");
    }

    /// First occurrences that came after a later one of their lane; everything but poison is there.
    fn inversions(&self) -> Vec<Record> {
        let mut inversions = Vec::new();
        for (lane, places) in self.lanes.iter().enumerate() {
            let mut furthest = 0;
            let mut seen = vec![false; places.len()];
            for (_, position) in self.log.iter().filter(|record| record.0 == lane) {
                if !std::mem::replace(&mut seen[*position], true) && *position < furthest {
                    inversions.push((lane, *position));
                }
                furthest = furthest.max(*position);
            }
            for (position, seen) in seen.iter().enumerate() {
                assert_ne!(*seen, self.poison[lane][position], "lane {lane}, position {position}");
            }
        }
        inversions
    }
}

#[test]
fn pipeline_keeps_every_lane_in_order_on_a_mean_broker() {
    let first: u64 = rand::random();
    println!("seeds from {first}");
    let mut pipelined = 0;
    for seed in (0..4_000).map(|n| first.wrapping_add(n)) {
        let (inversions, count) = Model::new(seed).run();
        assert_eq!(inversions, [], "seed {seed}");
        pipelined += count;
    }
    assert!(pipelined > 4_000, "{pipelined} records went behind others: the model shows nothing");
}

/// The model is mean enough: without the rule of heads it does turn lanes over.
#[test]
fn pipeline_needs_the_rule_of_heads() {
    let overturned = (0..2_000).filter(|seed| {
        let model = Model { heads_only_when_cold: false, ..Model::new(*seed) };
        // The pipeline itself notices some.
        std::panic::catch_unwind(|| model.run().0).is_ok_and(|inversions| inversions.is_empty()).then_some(()).is_none()
    });
    assert!(overturned.count() > 20);
}

#[test]
fn pipeline_follows_only_to_the_same_place() {
    let others = [
        Place { generation: 1, ..HERE },
        Place { topic: 1, ..HERE },
        Place { partition: Some(1), ..HERE },
        Place { partition: None, ..HERE },
    ];
    let mut lane = Pipeline::new(3);
    assert!(lane.may_go(HERE));
    lane.gone(HERE, true);
    assert!(lane.may_go(HERE));
    assert!(others.iter().all(|other| !lane.may_go(*other)));
    lane.acked(0);
    assert!(others.iter().all(|other| lane.may_go(*other)), "alone it may go anywhere");

    // Where librdkafka chooses, two records may go to two partitions.
    let anywhere = Place { partition: None, ..HERE };
    let mut lane = Pipeline::new(2);
    lane.gone(anywhere, true);
    assert!(!lane.may_go(anywhere));
}

#[test]
fn pipeline_waits_for_the_head_itself_on_a_cold_partition() {
    let mut lane = Pipeline::new(3);
    lane.gone(HERE, false);
    assert!(!lane.may_go(HERE), "whoever else was acknowledged meanwhile");
    lane.acked(0);
    lane.gone(HERE, true);
    lane.gone(HERE, true);
    assert_eq!(lane.turn(), Turn::Wait);
    lane.acked(2);
    lane.acked(1);
    assert_eq!(lane.turn(), Turn::Done);
}

#[test]
fn pipeline_stops_behind_a_loss_and_waits_for_what_is_on_its_way() {
    let mut lane = Pipeline::new(4);
    lane.gone(HERE, true);
    lane.gone(HERE, true);
    lane.gone(HERE, true);
    lane.lost(1, false);
    assert_eq!(lane.turn(), Turn::Wait);
    lane.acked(0);
    lane.lost(2, true);
    assert_eq!(lane.turn(), Turn::Lost);
    assert_eq!(lane.sequel(true), Sequel::Careful(1), "one of them was judged");
    lane.passed_until(4);
    assert_eq!(lane.turn(), Turn::Done);
}

#[test]
fn pipeline_goes_again_only_with_what_is_innocent_and_not_for_ever() {
    let mut lane = Pipeline::new(3);
    for _ in 0..REWINDS_MAX {
        lane.gone(HERE, true);
        lane.passed();
        lane.refused(true);
        assert_eq!(lane.turn(), Turn::Wait);
        lane.lost(0, true);
        assert_eq!(lane.sequel(true), Sequel::Again);
        assert_eq!(lane.turn(), Turn::Next(0));
    }
    let mut closed = lane.clone();
    closed.refused(true);
    assert_eq!(closed.sequel(false), Sequel::Careful(0));
    lane.refused(true);
    assert_eq!(lane.sequel(true), Sequel::Careful(0));
}

#[test]
fn pipeline_says_when_it_was_overtaken() {
    let mut lane = Pipeline::new(3);
    lane.gone(HERE, true);
    lane.gone(HERE, true);
    lane.lost(0, true);
    lane.acked(1);
    assert_eq!(lane.sequel(true), Sequel::Overtaken(0));
    assert!(lane.is_lost(0) && !lane.is_lost(1) && !lane.is_lost(2));

    // A rejected row behind it was never delivered.
    let mut lane = Pipeline::new(2);
    lane.gone(HERE, true);
    lane.passed();
    lane.lost(0, false);
    assert_eq!(lane.sequel(true), Sequel::Careful(0));
}
