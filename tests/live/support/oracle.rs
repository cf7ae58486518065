//! The oracle: what had to reach Kafka against what did.

use std::collections::{BTreeMap, BTreeSet};

use super::topics::Record;

/// What the records show.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// Expected and never seen.
    pub missing: Vec<String>,
    /// Seen and never expected.
    pub unexpected: Vec<String>,
    /// Seen again, once for each time.
    pub duplicates: Vec<String>,
    /// `lane: A (3rd) after B (5th)`, for every first occurrence that came too late.
    pub order_violations: Vec<String>,
}

impl Verdict {
    /// Fails unless everything arrived, in order, with at most so many duplicates.
    #[track_caller]
    pub fn assert_delivered(&self, duplicates_max: usize) {
        let Self { missing, unexpected, duplicates, order_violations } = self;
        let holds = missing.is_empty() && unexpected.is_empty() && order_violations.is_empty();
        assert!(
            holds && duplicates.len() <= duplicates_max,
            "{} missing {:?}, {} unexpected {:?}, {} order violations {:?}, {} duplicates (at most {duplicates_max}) {:?}",
            missing.len(),
            first_few(missing),
            unexpected.len(),
            first_few(unexpected),
            order_violations.len(),
            first_few(order_violations),
            duplicates.len(),
            first_few(duplicates),
        );
    }
}

fn first_few(list: &[String]) -> &[String] {
    &list[..list.len().min(10)]
}

/// Judges records of any number of topics against `(lane, message_id)` in the order they had to go out.
///
/// Order is judged among the first occurrences of a lane's messages within one topic and partition: Kafka has no
/// order across partitions that could be read back.
pub fn judge<L: AsRef<str>, M: AsRef<str>>(records: &[Record], expected: &[(L, M)]) -> Verdict {
    let mut place = BTreeMap::new();
    for (index, (lane, message_id)) in expected.iter().enumerate() {
        let before = place.insert(message_id.as_ref(), (lane.as_ref(), index));
        assert!(before.is_none(), "{} is expected twice", message_id.as_ref());
    }
    let mut in_log_order: Vec<&Record> = records.iter().collect();
    in_log_order.sort_by_key(|record| (&record.topic, record.partition, record.offset));

    let mut verdict = Verdict::default();
    let mut seen = BTreeSet::new();
    let mut furthest: BTreeMap<(&str, &str, i32), (usize, &str)> = BTreeMap::new();
    for record in in_log_order {
        let message_id = record.message_id();
        if !seen.insert(message_id) {
            verdict.duplicates.push(message_id.to_owned());
            continue;
        }
        let Some((lane, index)) = place.get(message_id).copied() else {
            verdict.unexpected.push(message_id.to_owned());
            continue;
        };
        let furthest = furthest.entry((lane, &record.topic, record.partition)).or_insert((index, message_id));
        if index < furthest.0 {
            let (later, later_id) = *furthest;
            verdict.order_violations.push(format!("{lane}: {message_id} ({index}) after {later_id} ({later})"));
        } else {
            *furthest = (index, message_id);
        }
    }
    verdict.missing = place.keys().filter(|id| !seen.contains(*id)).map(|id| (*id).to_owned()).collect();
    verdict
}

/// The oracle itself must be able to say no.
mod tests {
    use super::{Record, judge};

    fn record(partition: i32, offset: i64, message_id: &str) -> Record {
        Record {
            topic: "t".to_owned(),
            partition,
            offset,
            timestamp: 0,
            key: None,
            value: None,
            headers: vec![("keiro-message-id".to_owned(), message_id.as_bytes().to_vec())],
        }
    }

    const EXPECTED: &[(&str, &str)] = &[("a", "a1"), ("b", "b1"), ("a", "a2"), ("a", "a3")];

    #[test]
    fn oracle_accepts_what_was_delivered() {
        let records = [record(0, 0, "a1"), record(0, 1, "a2"), record(0, 2, "b1"), record(0, 3, "a3")];
        judge(&records, EXPECTED).assert_delivered(0);
        // Across partitions there is no order to judge.
        let records = [record(0, 0, "a2"), record(0, 1, "a3"), record(1, 0, "a1"), record(1, 1, "b1")];
        judge(&records, EXPECTED).assert_delivered(0);
    }

    #[test]
    fn oracle_sees_loss_duplicates_strangers_and_overtaking() {
        let records =
            [record(0, 2, "a1"), record(0, 0, "a1"), record(0, 1, "a3"), record(0, 3, "a2"), record(0, 4, "x")];
        let verdict = judge(&records, EXPECTED);
        assert_eq!(verdict.missing, ["b1"]);
        assert_eq!(verdict.duplicates, ["a1"]);
        assert_eq!(verdict.unexpected, ["x"]);
        assert_eq!(verdict.order_violations, ["a: a2 (2) after a3 (3)"]);
    }
}
