//! One lane in the fast lane: which of its records may be handed over while earlier ones are still on their way.
//!
//! Nothing here ever talks to Kafka or reads a clock, so that every rule of order can be tested against a model of a broker.
//! Nothing here ever lets a record go while an earlier one of its lane is lost, or on its way to another place.

/// What two records must share to be on their way at once: a broker keeps order within a partition and for one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The client.
    pub generation: u64,
    /// The topic, by its number within the call.
    pub topic: usize,
    /// The partition; `None` is any that librdkafka chooses.
    pub partition: Option<i32>,
}

/// How often what surely was not written, through no fault of its own, goes through the fast lane again within one call.
pub const REWINDS_MAX: u32 = 3;

/// The records of one lane, by their position in it.
#[derive(Debug, Clone)]
pub struct Pipeline {
    fates: Vec<Fate>,
    /// The first that neither went nor was passed over.
    next: usize,
    on_the_way: usize,
    lost: usize,
    /// Where those on their way go.
    run: Option<Run>,
    rewinds: u32,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    place: Place,
    /// Whether the partition had acknowledged something to this client before the first record of the run went.
    is_warm: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Waiting,
    OnTheWay,
    Acked,
    /// Settled elsewhere in a way that lets later records follow.
    Passed,
    Lost {
        is_innocent: bool,
    },
}

/// What can be done for a lane now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// The record at this position is next, if it [may go](Pipeline::may_go).
    Next(usize),
    /// Reports have to come first.
    Wait,
    /// A record is lost and nothing is on its way: see [`Pipeline::sequel`].
    Lost,
    /// All records got through.
    Done,
}

/// How it goes on after a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequel {
    /// From the first lost record on, once more; nothing was written of it.
    Again,
    /// From this position on in the careful lane.
    Careful(usize),
    /// The record at this position is lost, and one behind it was acknowledged. This must never happen.
    Overtaken(usize),
}

impl Pipeline {
    /// A lane of so many records.
    #[must_use]
    pub fn new(records: usize) -> Self {
        Self { fates: vec![Fate::Waiting; records], next: 0, on_the_way: 0, lost: 0, run: None, rewinds: 0 }
    }

    /// What can be done now.
    #[must_use]
    pub fn turn(&self) -> Turn {
        match (self.lost, self.on_the_way) {
            (1.., 0) => Turn::Lost,
            (1.., 1..) => Turn::Wait,
            (0, _) if self.next < self.fates.len() => Turn::Next(self.next),
            (0, 0) => Turn::Done,
            (0, 1..) => Turn::Wait,
        }
    }

    /// Whether nothing is on its way.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.on_the_way == 0
    }

    /// The client that those on their way were handed to.
    #[must_use]
    pub fn generation(&self) -> Option<u64> {
        self.run.filter(|_| self.on_the_way > 0).map(|run| run.place.generation)
    }

    /// Whether the next record may go to this place now.
    ///
    /// Behind others only to the very same partition, by the same client, and only if the run began on a warm partition. A
    /// partition that has no state of this client takes whatever comes first, a later record too when the batch of an earlier
    /// one failed. So on a cold partition a lane's head goes alone; and its own acknowledgement is waited for, since another
    /// one's says nothing about a batch that is still on its way.
    #[must_use]
    pub fn may_go(&self, place: Place) -> bool {
        let joins = |run: Run| run.is_warm && run.place == place && place.partition.is_some();
        self.on_the_way == 0 || self.run.is_some_and(joins)
    }

    /// The next record was handed over. `is_warm` counts for the first of a run.
    pub fn gone(&mut self, place: Place, is_warm: bool) {
        assert!(self.lost == 0 && self.may_go(place), "a record went that may not go");
        if self.on_the_way == 0 {
            self.run = Some(Run { place, is_warm });
        }
        self.fates[self.next] = Fate::OnTheWay;
        self.on_the_way += 1;
        self.next += 1;
    }

    /// The next record was refused when it was handed over. Innocent is one that another client might take.
    pub fn refused(&mut self, is_innocent: bool) {
        self.fates[self.next] = Fate::Lost { is_innocent };
        self.lost += 1;
        self.next += 1;
    }

    /// The next record is settled without being handed over, and does not hold back others.
    pub fn passed(&mut self) {
        self.fates[self.next] = Fate::Passed;
        self.next += 1;
    }

    /// Everything before this position got through elsewhere; nothing is on its way.
    pub fn passed_until(&mut self, position: usize) {
        assert!(self.on_the_way == 0, "the lane is elsewhere");
        for fate in &mut self.fates[..position] {
            if *fate != Fate::Acked {
                *fate = Fate::Passed;
            }
        }
        self.next = position;
        self.lost = 0;
    }

    /// A record on its way was acknowledged.
    pub fn acked(&mut self, position: usize) {
        self.arrived(position, Fate::Acked);
    }

    /// A record on its way did not get through. Innocent is one that surely was not written and that nobody judged.
    pub fn lost(&mut self, position: usize, is_innocent: bool) {
        self.arrived(position, Fate::Lost { is_innocent });
        self.lost += 1;
    }

    fn arrived(&mut self, position: usize, fate: Fate) {
        assert!(self.fates[position] == Fate::OnTheWay, "a report for a record that is not on its way");
        self.fates[position] = fate;
        self.on_the_way -= 1;
    }

    /// How it goes on after a loss; `may_go_again` says whether the fast lane is open to it.
    pub fn sequel(&mut self, may_go_again: bool) -> Sequel {
        assert!(self.turn() == Turn::Lost, "nothing is lost, or something is still on its way");
        let is_lost = |fate: &Fate| matches!(fate, Fate::Lost { .. });
        let first = self.fates.iter().position(is_lost).expect("a record is lost");
        let rest = &mut self.fates[first..];
        if rest.contains(&Fate::Acked) {
            return Sequel::Overtaken(first);
        }
        let all_innocent = !rest.contains(&Fate::Lost { is_innocent: false });
        if !may_go_again || !all_innocent || self.rewinds >= REWINDS_MAX {
            return Sequel::Careful(first);
        }
        rest.fill(Fate::Waiting);
        self.next = first;
        self.lost = 0;
        self.rewinds += 1;
        Sequel::Again
    }

    /// Whether the record at a position got no further than being lost.
    #[must_use]
    pub fn is_lost(&self, position: usize) -> bool {
        matches!(self.fates[position], Fate::Lost { .. })
    }
}
