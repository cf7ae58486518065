//! The words of `why`: facts about one row become one paragraph.
//!
//! Nothing here ever asks anybody: what the facts do not say is called unknown.

use serde::Serialize;
use uuid::Uuid;

use super::text::{FAR_FROM, HELD_FROM, distance, escaped, instant};
use super::why::{Facts, RelayStatus};
use crate::domain::message::PgTime;
use crate::domain::policy::Policy;
use crate::store::{Ahead, LaneHead, Status};

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The row.
    pub outbox_id: Uuid,
    /// Its status.
    pub status: String,
    /// Every reason, in one word each, the strongest first; empty when nothing holds it back.
    pub reasons: Vec<&'static str>,
    /// Rows before it in its lane.
    pub ahead: u64,
    /// Whether there are more than were counted.
    pub ahead_capped: bool,
    /// The first row of its lane.
    pub head: Option<Uuid>,
    /// When it is due.
    pub next_attempt_at: String,
    /// Since when it is in flight.
    pub in_flight_since: Option<String>,
    /// `ready`, `not_ready` or `unknown`.
    pub relay: &'static str,
    /// All of it, for people.
    pub text: String,
}

/// Turns facts into an answer.
#[must_use]
pub fn explain(facts: &Facts) -> Explanation {
    let mut words = Words { facts, reasons: Vec::new(), text: introduction(facts) };
    match Status::of(&facts.status) {
        Status::Sent => words.sent(),
        Status::Dead => words.dead(),
        Status::Rejected => words.rejected(),
        Status::Unknown => words.unknown_status(),
        Status::Publishing => words.in_flight(),
        Status::Pending | Status::Failed => words.waiting(),
    }
    let in_flight = Status::of(&facts.status) == Status::Publishing;
    let Words { reasons, text, .. } = words;
    Explanation {
        outbox_id: facts.outbox_id,
        status: facts.status.clone(),
        reasons,
        ahead: facts.ahead.as_ref().map_or(0, |ahead| ahead.rows),
        ahead_capped: facts.ahead.as_ref().is_some_and(|ahead| ahead.capped),
        head: facts.ahead.as_ref().map(|ahead| ahead.head.outbox_id),
        next_attempt_at: facts.next_attempt_at.to_string(),
        in_flight_since: in_flight.then(|| facts.updated_at.to_string()),
        relay: match &facts.relay {
            Ok(relay) if relay.ready.ready => "ready",
            Ok(_) => "not_ready",
            Err(_) => "unknown",
        },
        text,
    }
}

fn introduction(facts: &Facts) -> String {
    let key = match &facts.message_key {
        Some(key) => format!("key {}", quoted(key)),
        None => "no key".to_owned(),
    };
    let (source, topic, status) = (quoted(&facts.source_name), quoted(&facts.topic), escaped(&facts.status));
    format!("Row {} (source {source}, topic {topic}, {key}) is {status}.", facts.outbox_id)
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", escaped(text))
}

/// An error of the table as the end of a sentence.
fn because(error: Option<&str>) -> String {
    error
        .filter(|error| !error.is_empty())
        .map_or_else(String::new, |error| format!(": {}", escaped(error.trim_end_matches('.'))))
}

fn attempts(count: i64) -> String {
    if count == 1 { "1 attempt".to_owned() } else { format!("{count} attempts") }
}

/// The answer while it is written.
struct Words<'a> {
    facts: &'a Facts,
    reasons: Vec<&'static str>,
    text: String,
}

impl Words<'_> {
    fn say(&mut self, sentence: &str) {
        self.text.push(' ');
        self.text.push_str(sentence);
    }

    fn give(&mut self, reason: &'static str, sentence: &str) {
        self.reasons.push(reason);
        self.say(sentence);
    }

    fn sent(&mut self) {
        match self.facts.published_at {
            Some(at) => self.give("sent", &format!("Kafka acknowledged it at {}.", instant(self.facts.now, at))),
            None => self.give("sent", "When it was acknowledged is not in the table: somebody else marked it."),
        }
    }

    fn dead(&mut self) {
        let (tries, error) = (attempts(self.facts.attempt_count), because(self.facts.error.as_deref()));
        self.give(
            "dead",
            &format!("It gave up after {tries}{error}. No relay touches it again unless somebody retries it."),
        );
    }

    fn rejected(&mut self) {
        let error = because(self.facts.error.as_deref());
        self.give(
            "rejected",
            &format!("It can never be accepted as it is{error}. No relay touches it again unless somebody retries it."),
        );
    }

    fn unknown_status(&mut self) {
        self.give(
            "unknown_status",
            "That is no status of this table's contract: no relay claims such a row, and in an ordered lane it holds back every later \
             row until somebody gives it a status that is one.",
        );
    }

    fn in_flight(&mut self) {
        let facts = self.facts;
        let end = self.lease_end(facts.updated_at);
        let since = instant(facts.now, facts.updated_at);
        if end > facts.now {
            let left = distance(facts.now, end);
            self.give(
                "in_flight",
                &format!(
                    "A relay claimed it at {since}, as attempt {}, and has not settled it yet; unless it does, the lease runs out {left}.",
                    facts.attempt_count
                ),
            );
            // What is in flight to a parked topic is a probe.
            if let Ok(relay) = &facts.relay {
                self.parked(relay);
            }
        } else {
            let becomes =
                if facts.attempt_count >= i64::from(facts.max_attempts) { "dead" } else { "failed, to be tried again" };
            self.give(
                "lease_expired",
                &format!(
                    "Somebody claimed it at {since} and never settled it: its lease ran out {}. A running relay requeues it within a few of \
                     its maintenance intervals; then it is {becomes}.",
                    distance(facts.now, end)
                ),
            );
            self.not_served();
            self.relay();
        }
    }

    fn waiting(&mut self) {
        let facts = self.facts;
        self.not_served();
        for pause in &facts.pauses {
            self.give("paused", pause);
        }
        let error = because(facts.error.as_deref());
        let failed = if facts.attempt_count > 0 {
            format!(", after {}{error}", attempts(facts.attempt_count))
        } else if facts.status == "failed" {
            format!(", its attempt returned{error}")
        } else {
            String::new()
        };
        let at = facts.next_attempt_at;
        if at >= FAR_FROM {
            self.give(
                "never_due",
                &format!("It is never due (next_attempt_at is {at}): somebody has to reschedule it."),
            );
        } else if at >= HELD_FROM {
            let source = quoted(&facts.source_name);
            self.give(
                "held",
                &format!("It is held{failed}. It and its lane wait until somebody resumes source {source}."),
            );
        } else if at > facts.now {
            self.give("not_due", &format!("It is due at {}{failed}.", instant(facts.now, at)));
        } else {
            self.say(&format!("It has been due since {}{failed}.", instant(facts.now, at)));
        }
        if let Some(ahead) = &facts.ahead {
            self.behind(ahead);
        }
        let held = !self.reasons.is_empty();
        self.relay();
        if !held && self.reasons.is_empty() {
            let first = match facts.policy {
                Some(Policy::BestEffort) => "It waits for no other row",
                Some(Policy::PerKeyHeadOfLine) if facts.message_key.is_none() => {
                    "Without a key it waits for no other row"
                }
                Some(_) | None => "It is the first of its lane",
            };
            self.say(&format!("{first}: a relay that runs can take it at any moment."));
        }
    }

    fn not_served(&mut self) {
        if self.facts.policy.is_none() {
            let source = quoted(&self.facts.source_name);
            self.give(
                "not_served",
                &format!("This configuration does not serve source {source} (relay.unlisted_sources = \"ignore\")."),
            );
        }
    }

    fn behind(&mut self, ahead: &Ahead) {
        let facts = self.facts;
        let lane = match (facts.policy, &facts.message_key) {
            (Some(Policy::PerKeyHeadOfLine), Some(key)) => {
                format!("the rows of source {} with key {}", quoted(&facts.source_name), quoted(key))
            }
            (Some(policy), _) => format!("all rows of source {}, whose policy is {policy}", quoted(&facts.source_name)),
            (None, _) => "its lane".to_owned(),
        };
        let count = match (ahead.rows, ahead.capped) {
            (rows, true) => format!("at least {rows} earlier rows"),
            (1, false) => "one earlier row".to_owned(),
            (rows, false) => format!("{rows} earlier rows"),
        };
        let head = &ahead.head;
        let first = if ahead.rows == 1 { "That row" } else { "The first of them" };
        self.give(
            "behind",
            &format!(
                "It waits behind {count} of its lane ({lane}). {first}, {}, {}.",
                head.outbox_id,
                self.state(head)
            ),
        );
    }

    fn lease_end(&self, claimed_at: PgTime) -> PgTime {
        let lease = i64::try_from(self.facts.publishing_timeout.as_micros()).unwrap_or(i64::MAX);
        PgTime(claimed_at.0.saturating_add(lease))
    }

    /// What the first row of the lane waits for.
    fn state(&self, head: &LaneHead) -> String {
        let now = self.facts.now;
        let error = because(head.last_error.as_deref());
        match Status::of(&head.status) {
            Status::Publishing => {
                let ran_out = if self.lease_end(head.updated_at) <= now { ", and its lease ran out" } else { "" };
                format!("has been in flight since {}{ran_out}", instant(now, head.updated_at))
            }
            Status::Pending | Status::Failed => {
                let tries = if head.attempt_count > 0 {
                    format!(" after {}", attempts(head.attempt_count))
                } else {
                    String::new()
                };
                let at = head.next_attempt_at;
                if at >= FAR_FROM {
                    format!("is never due (next_attempt_at is {at}){error}")
                } else if at >= HELD_FROM {
                    format!("is held{tries} until somebody resumes the source{error}")
                } else if at > now {
                    format!("is due {}{tries}{error}", distance(now, at))
                } else {
                    format!("is {} and due{tries}{error}", head.status)
                }
            }
            Status::Unknown => format!(
                "has the status {}, which no relay claims: somebody has to give it one of the contract's",
                quoted(&head.status)
            ),
            // Not live: AHEAD does not return such rows.
            Status::Sent | Status::Dead | Status::Rejected => format!("is {}", head.status),
        }
    }

    /// Whether the topic of the row, or of the first row of its lane, is left alone for a while.
    fn parked(&mut self, relay: &RelayStatus) {
        let facts = self.facts;
        let topics = [Some(facts.topic.as_str()), facts.ahead.as_ref().map(|ahead| ahead.head.topic.as_str())];
        for parked in &relay.parked_topics {
            if !topics.contains(&Some(parked.topic.as_str())) {
                continue;
            }
            let whose =
                if parked.topic == facts.topic { "Its topic" } else { "The topic of the first row of its lane" };
            let (reason, since, probe) =
                (escaped(parked.reason.trim_end_matches('.')), escaped(&parked.since), escaped(&parked.probe_at));
            self.give(
                "topic_parked",
                &format!(
                    "{whose}, {}, is parked since {since}: {reason}. It is tried again at {probe}.",
                    quoted(&parked.topic)
                ),
            );
        }
    }

    /// What only a running relay knows.
    fn relay(&mut self) {
        let facts = self.facts;
        let relay = match &facts.relay {
            Ok(relay) => relay,
            Err(problem) => {
                self.say(&format!("Whether its topic is parked and its source halted is unknown ({problem})."));
                match facts.relays.as_deref() {
                    Some([]) => self.give("no_relay", "No relay is connected to this database."),
                    Some(instances) => {
                        self.say(&format!("Connected to this database: {}.", escaped(&instances.join(", "))));
                    }
                    None => {}
                }
                return;
            }
        };
        self.parked(relay);
        let source = relay.sources.iter().find(|source| source.source == facts.source_name);
        if let Some(halt) = source.and_then(|source| source.halt.as_ref()) {
            let row = match source.and_then(|source| source.halted_on) {
                Some(id) if id == facts.outbox_id => " on this row".to_owned(),
                Some(id) => format!(" on row {id}"),
                None => String::new(),
            };
            let (kind, reason, since) =
                (escaped(&halt.kind), escaped(halt.reason.trim_end_matches('.')), escaped(&halt.since));
            self.give("source_halted", &format!("Its source is halted ({kind}){row} since {since}: {reason}."));
        }
        if relay.ready.ready {
            if source.is_some_and(|source| source.elsewhere) {
                self.say(&format!("Relay {} leaves its source to another relay.", quoted(&relay.instance)));
            }
        } else {
            let reasons: Vec<String> =
                relay.ready.reasons.iter().map(|reason| format!("{}: {}", reason.check, reason.reason)).collect();
            self.give(
                "relay_not_ready",
                &format!("Relay {} is not ready: {}.", quoted(&relay.instance), escaped(&reasons.join("; "))),
            );
        }
    }
}
