//! Whose fault it is: what the acknowledgements, errors and silences of the whole cluster say about one record.
//!
//! Nothing here ever talks to Kafka, reads a clock or draws a number: time and draws are arguments, so that each rule can be
//! tested. Everything remembered is bounded, and forgetting costs a wait or an attempt, never an event.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

use uuid::Uuid;

use crate::domain::backoff::{Backoff, BackoffKind};
use crate::publish::ParkedTopic;

/// Topics that may be parked at once. One more sets free the one whose turn is next: it costs one probe too many.
pub const PARKED_MAX: usize = 1_000;
/// Topics whose acknowledgements are remembered.
pub const TOPICS_MAX: usize = 10_000;
/// Rows whose silences are remembered.
pub const SUSPECTS_MAX: usize = 10_000;
/// How often a row may time out alone, while its partition acknowledges what came after it, before it is the row's fault.
pub const SILENCES_MAX: u32 = 3;
/// How long after its turn what is parked is forgotten when no row came to probe it: somebody cancelled them, or sent them
/// elsewhere. Rows that wait for it come back within a minute.
pub const UNWANTED_AFTER: Duration = Duration::from_secs(600);
/// How long no broker may be up before it counts as a problem: librdkafka reconnects an idle connection that the broker
/// closed within about a second, and the statistics that show it come every five.
pub const DOWN_GRACE: Duration = Duration::from_secs(6);

/// How long a topic rests after each failure in a row.
const REST: Backoff = Backoff {
    kind: BackoffKind::Exponential,
    initial: Duration::from_secs(1),
    multiplier: 2.0,
    max: Duration::from_secs(60),
    jitter: 0.2,
};

/// What is remembered of the cluster, its topics and a few rows.
#[derive(Debug, Default)]
pub struct Faults {
    parked: HashMap<String, Spots>,
    acks: HashMap<String, TopicAcks>,
    suspects: HashMap<Uuid, Suspect>,
    last_ack: Option<Instant>,
    cluster: Cluster,
}

/// What is parked of a topic: all of it, or some of its partitions.
#[derive(Debug, Default)]
struct Spots {
    whole: Option<Parked>,
    partitions: BTreeMap<i32, Parked>,
}

/// A topic or a partition that is left alone for a while.
#[derive(Debug)]
struct Parked {
    failures: u32,
    reason: String,
    /// When its first failure in a row was noticed.
    begun: Instant,
    /// When its last failure was noticed.
    since: Instant,
    probe_at: Instant,
    probing: bool,
}

/// What a topic acknowledged.
#[derive(Debug)]
struct TopicAcks {
    /// When it did so last.
    last: Instant,
    partitions: HashMap<i32, PartitionAcks>,
}

/// What a partition acknowledged.
#[derive(Debug)]
struct PartitionAcks {
    /// When it did so last.
    last: Instant,
    /// The latest hand-over of a record that was acknowledged.
    reached: Instant,
}

/// A row that timed out.
#[derive(Debug)]
struct Suspect {
    /// How often.
    silences: u32,
    /// How often while its partition acknowledged records that had come after it.
    alone: u32,
    /// When it was last.
    last: Instant,
}

/// What is known of the cluster as a whole.
#[derive(Debug, Default)]
struct Cluster {
    /// Whether any broker has ever answered.
    connected: bool,
    /// Since when no broker is up, as far as the client says.
    down_since: Option<Instant>,
    /// What the client said last about connections.
    reason: Option<String>,
    /// A fault of the whole cluster; gone with the next acknowledgement or answer.
    problem: Option<String>,
}

/// Whether a record for a topic and partition may be handed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Admission {
    /// Nothing stands against it.
    Free,
    /// The topic, or the partition, is parked and due: this record is its one probe, which must end in an acknowledgement, a
    /// verdict, another failure or [`Faults::release`].
    Probe,
    /// Not now.
    Held {
        /// How long to leave the row alone.
        pause: Duration,
        /// Why it is parked.
        reason: String,
    },
}

/// A topic or a partition was parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parking {
    /// How long its rows rest.
    pub pause: Duration,
    /// Whether it was not parked before: worth a line in the log.
    pub is_new: bool,
}

/// Whose fault a silence is, as far as acknowledgements tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// The row's or its partition's: the topic acknowledged others.
    Partition,
    /// The topic's: others on the cluster were acknowledged.
    Topic,
    /// The cluster's: no broker is up.
    Cluster,
    /// The topic's or the cluster's: nothing was acknowledged, but a broker seems up. Ask the cluster.
    Unclear,
}

impl Faults {
    /// Whether a record for this topic and partition, if it has one before librdkafka chooses, may be handed over now.
    pub fn admit(&mut self, topic: &str, partition: Option<i32>, now: Instant) -> Admission {
        let Some(parked) = self.find_parked(topic, partition) else { return Admission::Free };
        if parked.probing {
            // The probe may take a whole deadline. Come back well before the next turn, so that other rows do not wait long
            // once the probe got through.
            let rest = parked.probe_at.saturating_duration_since(parked.since) / 4;
            let pause = rest.clamp(Duration::from_secs(1), Duration::from_secs(15));
            return Admission::Held { pause, reason: parked.reason.clone() };
        }
        let pause = parked.probe_at.saturating_duration_since(now);
        if pause.is_zero() {
            parked.probing = true;
            return Admission::Probe;
        }
        Admission::Held { pause, reason: parked.reason.clone() }
    }

    /// Which partition a record without a key should go to: `None` is any that librdkafka chooses, which looks for a leader at most
    /// and may well choose one that is parked.
    ///
    /// One that is parked and due has its probe first, or a topic without keys would never find out that it is well again.
    #[must_use]
    pub fn choose(&self, topic: &str, partitions: i32, now: Instant, draw: f64) -> Option<i32> {
        let parked = &self.parked.get(topic)?.partitions;
        let parked = || parked.range(..partitions);
        parked().next()?;
        if let Some((due, _)) = parked().find(|(_, parked)| !parked.probing && parked.probe_at <= now) {
            return Some(*due);
        }
        let free: Vec<i32> =
            (0..partitions).filter(|partition| parked().all(|(found, _)| found != partition)).collect();
        // The last one below the draw's share of them.
        let chosen = free.iter().enumerate().rfind(|(index, _)| *index as f64 <= draw * free.len() as f64);
        let next = || parked().min_by_key(|(_, parked)| parked.probe_at).map(|(partition, _)| *partition);
        chosen.map(|(_, partition)| *partition).or_else(next)
    }

    /// Whether a partition of the topic is parked.
    #[must_use]
    pub fn is_partly_parked(&self, topic: &str) -> bool {
        self.parked.get(topic).is_some_and(|spots| !spots.partitions.is_empty())
    }

    /// The topic has so many partitions: those beyond, which it had before it was made anew, are no more.
    pub fn has_partitions(&mut self, topic: &str, partitions: i32) {
        if let Some(spots) = self.parked.get_mut(topic) {
            spots.partitions.retain(|partition, _| *partition < partitions);
            if spots.whole.is_none() && spots.partitions.is_empty() {
                self.parked.remove(topic);
            }
        }
    }

    /// Forgets what was parked and has not been probed long after its turn: no row waits for it any more.
    pub fn forget_unwanted(&mut self, now: Instant) {
        let is_wanted =
            |parked: &Parked| parked.probing || now.saturating_duration_since(parked.probe_at) < UNWANTED_AFTER;
        self.parked.retain(|_, spots| {
            spots.whole = spots.whole.take().filter(is_wanted);
            spots.partitions.retain(|_, parked| is_wanted(parked));
            spots.whole.is_some() || !spots.partitions.is_empty()
        });
    }

    /// The probe that this record was ended without saying anything: the next record may try at once.
    pub fn release(&mut self, topic: &str, partition: Option<i32>) {
        if let Some(parked) = self.find_parked(topic, partition) {
            parked.probing = false;
        }
    }

    /// What keeps a record for this topic and partition: the whole topic's fault before the partition's.
    fn find_parked(&mut self, topic: &str, partition: Option<i32>) -> Option<&mut Parked> {
        let Spots { whole, partitions } = self.parked.get_mut(topic)?;
        whole.as_mut().or_else(|| partitions.get_mut(&partition?))
    }

    /// The topic works, and so does this partition; returns whether one of them was parked.
    fn free(&mut self, topic: &str, partition: Option<i32>) -> bool {
        let Some(spots) = self.parked.get_mut(topic) else { return false };
        let was_parked = spots.whole.take().is_some();
        let was_parked = partition.is_some_and(|it| spots.partitions.remove(&it).is_some()) || was_parked;
        if spots.partitions.is_empty() {
            self.parked.remove(topic);
        }
        was_parked
    }

    /// A record handed over at that instant was acknowledged; returns whether that freed its topic or partition.
    pub fn acked(&mut self, id: Uuid, topic: &str, partition: i32, handed_over: Instant, now: Instant) -> bool {
        self.last_ack = Some(now);
        self.cluster.answered();
        self.suspects.remove(&id);
        match self.acks.get_mut(topic) {
            Some(acks) => {
                acks.last = now;
                let of_partition =
                    acks.partitions.entry(partition).or_insert(PartitionAcks { last: now, reached: handed_over });
                of_partition.last = now;
                of_partition.reached = handed_over.max(of_partition.reached);
            }
            None => {
                make_room(&mut self.acks, TOPICS_MAX, |acks| acks.last);
                let partitions = HashMap::from([(partition, PartitionAcks { last: now, reached: handed_over })]);
                self.acks.insert(topic.to_owned(), TopicAcks { last: now, partitions });
            }
        }
        self.free(topic, Some(partition))
    }

    /// A broker refused a record for what is in it, so its topic and partition work; returns whether that freed one of them.
    pub fn refused(&mut self, id: Uuid, topic: &str, partition: Option<i32>) -> bool {
        self.cluster.answered();
        self.suspects.remove(&id);
        self.free(topic, partition)
    }

    /// The topic, or a partition of it, failed for a record handed over at that instant: it rests, longer each time in a row.
    pub fn failed(
        &mut self,
        topic: &str,
        partition: Option<i32>,
        handed_over: Instant,
        reason: &str,
        now: Instant,
        draw: f64,
    ) -> Parking {
        if !self.parked.contains_key(topic) {
            make_room(&mut self.parked, PARKED_MAX, |spots| spots.probe_at().unwrap_or(now));
        }
        let spots = self.parked.entry(topic.to_owned()).or_default();
        let spot = match partition {
            None => spots.whole.as_mut(),
            Some(partition) => spots.partitions.get_mut(&partition),
        };
        if let Some(parked) = spot {
            // Records that were on their way together fail together: that is one failure.
            if handed_over >= parked.since {
                parked.failures = parked.failures.saturating_add(1);
                parked.since = now;
                parked.probe_at = now + REST.delay(i64::from(parked.failures), draw);
                parked.probing = false;
                reason.clone_into(&mut parked.reason);
            }
            return Parking { pause: parked.probe_at.saturating_duration_since(now), is_new: false };
        }
        let pause = REST.delay(1, draw);
        let reason = reason.to_owned();
        let parked = Parked { failures: 1, reason, begun: now, since: now, probe_at: now + pause, probing: false };
        match partition {
            None => spots.whole = Some(parked),
            Some(partition) => drop(spots.partitions.insert(partition, parked)),
        }
        Parking { pause, is_new: true }
    }

    /// Whether a partition gave no acknowledgement lately while a record handed over at that instant waited for one.
    #[must_use]
    pub fn is_mute(&self, topic: &str, partition: i32, handed_over: Instant, now: Instant) -> bool {
        let acks = self.acks.get(topic).and_then(|acks| acks.partitions.get(&partition));
        acks.is_none_or(|acks| acks.last < middle(handed_over, now))
    }

    /// Whose fault it is that a record handed over at that instant got no verdict in time.
    #[must_use]
    pub fn silent(&self, topic: &str, handed_over: Instant, now: Instant) -> Silence {
        // What was acknowledged early in the wait says little about its end: an outage may have begun in between.
        let fresh = middle(handed_over, now);
        let is_fresh = |at: Option<Instant>| at.is_some_and(|at| at >= fresh);
        match () {
            () if self.no_broker_is_up() => Silence::Cluster,
            () if is_fresh(self.acks.get(topic).map(|acks| acks.last)) => Silence::Partition,
            () if is_fresh(self.last_ack) => Silence::Topic,
            () => Silence::Unclear,
        }
    }

    /// A silence that is not the cluster's: returns how long the row rests, or `None` when the row itself is at fault.
    ///
    /// A partition takes records in the order they come. One that is slow has acknowledged what came before this record; one
    /// that has a quarrel with this record acknowledged what came after it, meanwhile or since the row's last silence. Three
    /// times, and it is the row's fault. A partition below 0 is unknown.
    pub fn suspect(
        &mut self,
        id: Uuid,
        topic: &str,
        partition: i32,
        handed_over: Instant,
        now: Instant,
        draw: f64,
    ) -> Option<Duration> {
        let reached = self.acks.get(topic).and_then(|acks| acks.partitions.get(&partition)).map(|acks| acks.reached);
        if !self.suspects.contains_key(&id) {
            make_room(&mut self.suspects, SUSPECTS_MAX, |suspect| suspect.last);
        }
        let suspect = self.suspects.entry(id).or_insert(Suspect { silences: 0, alone: 0, last: handed_over });
        suspect.silences = suspect.silences.saturating_add(1);
        suspect.alone += u32::from(reached.is_some_and(|reached| reached > suspect.last));
        suspect.last = now;
        if suspect.alone >= SILENCES_MAX {
            self.suspects.remove(&id);
            return None;
        }
        Some(REST.delay(i64::from(suspect.silences), draw))
    }

    /// The whole cluster, our access to it or our clock is at fault; returns whether that is news.
    pub fn cluster_failed(&mut self, problem: &str) -> bool {
        let is_new = self.cluster.problem.is_none();
        self.cluster.problem = Some(problem.to_owned());
        is_new
    }

    /// A broker answered something: the cluster is there.
    pub fn answered(&mut self) {
        self.cluster.answered();
    }

    /// The client says how many brokers it is connected to.
    pub fn brokers_up(&mut self, up: usize, now: Instant) {
        if up > 0 {
            self.cluster.connected = true;
            self.cluster.down_since = None;
        } else {
            self.cluster.down_since.get_or_insert(now);
        }
    }

    /// The client says why a connection failed. One of several brokers may fail alone, so this explains and does not judge.
    pub fn connection_failed(&mut self, reason: String) {
        self.cluster.reason = Some(reason);
    }

    /// Whether, as far as the client says, no broker is up.
    #[must_use]
    pub fn no_broker_is_up(&self) -> bool {
        !self.cluster.connected || self.cluster.down_since.is_some()
    }

    /// Whether the client said that its connections are gone.
    #[must_use]
    pub fn is_down(&self) -> bool {
        self.cluster.down_since.is_some()
    }

    /// What stands against publishing anything.
    #[must_use]
    pub fn problem(&self, now: Instant) -> Option<String> {
        let Cluster { connected, down_since, reason, problem } = &self.cluster;
        if problem.is_some() {
            return problem.clone();
        }
        let is_down = down_since.is_some_and(|since| !connected || now.saturating_duration_since(since) >= DOWN_GRACE);
        let reason = || reason.as_deref().unwrap_or("check [kafka] brokers, the network and the brokers");
        match () {
            () if is_down => Some(format!("kafka.unreachable: client: no broker is up: {}", reason())),
            () if !connected => Some(format!("kafka.not_connected: client: no broker has answered yet: {}", reason())),
            () => None,
        }
    }

    /// Whether anything was acknowledged since.
    #[must_use]
    pub fn was_acked_since(&self, since: Instant) -> bool {
        self.last_ack.is_some_and(|at| at >= since)
    }

    /// Whether the topic has taken a record before.
    #[must_use]
    pub fn is_familiar(&self, topic: &str) -> bool {
        self.acks.contains_key(topic)
    }

    /// Whether records for this topic and partition are kept.
    #[must_use]
    pub fn is_parked(&self, topic: &str, partition: Option<i32>) -> bool {
        self.parked_since(topic, partition).is_some()
    }

    /// Since when records for this topic and partition are kept.
    #[must_use]
    pub fn parked_since(&self, topic: &str, partition: Option<i32>) -> Option<Instant> {
        let spots = self.parked.get(topic)?;
        let parked = spots.whole.as_ref().or_else(|| spots.partitions.get(&partition?))?;
        Some(parked.begun)
    }

    /// The parked topics, by name; one of which only partitions are parked shows with the first of those.
    #[must_use]
    pub fn parked(&self) -> Vec<ParkedTopic> {
        let of = |(topic, spots): (&String, &Spots)| {
            let shown = spots.whole.as_ref().or_else(|| spots.partitions.values().next())?;
            Some(ParkedTopic { topic: topic.clone(), reason: shown.reason.clone(), probe_at: spots.probe_at()? })
        };
        let mut parked: Vec<_> = self.parked.iter().filter_map(of).collect();
        parked.sort_by(|one, other| one.topic.cmp(&other.topic));
        parked
    }
}

impl Spots {
    /// When the first of them is probed.
    fn probe_at(&self) -> Option<Instant> {
        self.whole.iter().chain(self.partitions.values()).map(|parked| parked.probe_at).min()
    }
}

impl Cluster {
    fn answered(&mut self) {
        *self = Self { connected: true, ..Self::default() };
    }
}

/// Half-way through a wait.
fn middle(from: Instant, to: Instant) -> Instant {
    from + to.saturating_duration_since(from) / 2
}

/// Forgets the entry with the earliest instant when the map is full.
pub(super) fn make_room<K: Hash + Eq + Clone, V>(map: &mut HashMap<K, V>, max: usize, instant: impl Fn(&V) -> Instant) {
    if map.len() < max {
        return;
    }
    let earliest = map.iter().min_by_key(|(_, value)| instant(value)).map(|(key, _)| key.clone());
    if let Some(key) = earliest {
        map.remove(&key);
    }
}
