//! What operators paused, and which rows that holds back.
//!
//! A paused row is like one that is not due: it stays as it is, spends nothing, and holds back its lane. Nothing here ever lets a
//! later row of a lane pass it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use super::message::PgTime;

/// What can be paused.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PauseTarget {
    /// Every row of a source.
    Source(String),
    /// Every row that goes to a topic, whatever its source.
    Topic(String),
    /// The rows of a source with one key. Where the whole source is one lane, it stops at the first of them.
    Lane {
        /// The source.
        source_name: String,
        /// The key.
        message_key: String,
    },
}

impl PauseTarget {
    /// What it is, in one word: the column `kind`, and the label of the gauge.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Source(_) => "source",
            Self::Topic(_) => "topic",
            Self::Lane { .. } => "lane",
        }
    }

    /// The source or the topic; of a lane its source.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Source(name) | Self::Topic(name) => name,
            Self::Lane { source_name, .. } => source_name,
        }
    }

    /// The key of a lane.
    #[must_use]
    pub fn message_key(&self) -> Option<&str> {
        match self {
            Self::Source(_) | Self::Topic(_) => None,
            Self::Lane { message_key, .. } => Some(message_key),
        }
    }

    /// Whether it holds back a row with these columns.
    #[must_use]
    pub fn holds(&self, source: &str, destination: &str, key: Option<&str>) -> bool {
        match self {
            Self::Source(name) => name == source,
            Self::Topic(topic) => topic == destination,
            Self::Lane { source_name, message_key } => source_name == source && key == Some(message_key),
        }
    }
}

/// Without the key, which is content of a row.
impl fmt::Debug for PauseTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.kind(), self.name())
    }
}

/// One pause that is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pause {
    /// What is paused.
    pub target: PauseTarget,
    /// Since when.
    pub since: PgTime,
    /// When it ends by itself.
    pub until: Option<PgTime>,
    /// The database user who paused it.
    pub by: String,
    /// Why, in that person's words.
    pub reason: Option<String>,
}

/// The rows of one source that are held back: those that go to one of the topics, and those with one of the keys.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct PausedRows {
    /// Paused topics, of every source.
    pub topics: Vec<String>,
    /// Keys of the source's paused lanes.
    pub keys: Vec<String>,
}

/// Without the keys, which are content of rows.
impl fmt::Debug for PausedRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PausedRows").field("topics", &self.topics).field("keys", &self.keys.len()).finish()
    }
}

/// Every pause of a table at one moment.
#[derive(Debug, Default)]
pub struct Pauses {
    list: Vec<Pause>,
    sources: BTreeSet<String>,
    /// Of sources without a paused lane.
    everywhere: Arc<PausedRows>,
    /// Of sources with one.
    by_source: BTreeMap<String, Arc<PausedRows>>,
}

impl Pauses {
    /// Sorts pauses by what they hold back.
    #[must_use]
    pub fn new(list: Vec<Pause>) -> Self {
        let mut sources = BTreeSet::new();
        let mut topics = Vec::new();
        let mut keys: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for pause in &list {
            match &pause.target {
                PauseTarget::Source(name) => {
                    sources.insert(name.clone());
                }
                PauseTarget::Topic(topic) => topics.push(topic.clone()),
                PauseTarget::Lane { source_name, message_key } => {
                    keys.entry(source_name.clone()).or_default().push(message_key.clone());
                }
            }
        }
        let by_source = keys
            .into_iter()
            .map(|(source, keys)| (source, Arc::new(PausedRows { topics: topics.clone(), keys })))
            .collect();
        Self { list, sources, everywhere: Arc::new(PausedRows { topics, keys: Vec::new() }), by_source }
    }

    /// Every pause, the oldest first.
    #[must_use]
    pub fn list(&self) -> &[Pause] {
        &self.list
    }

    /// Whether the whole source is paused.
    #[must_use]
    pub fn holds_source(&self, source: &str) -> bool {
        self.sources.contains(source)
    }

    /// Which rows of a source are held back although the source itself is not.
    #[must_use]
    pub fn rows_of(&self, source: &str) -> Arc<PausedRows> {
        Arc::clone(self.by_source.get(source).unwrap_or(&self.everywhere))
    }

    /// The pauses that hold back a row with these columns.
    pub fn holding<'a>(
        &'a self,
        source: &'a str,
        destination: &'a str,
        key: Option<&'a str>,
    ) -> impl Iterator<Item = &'a Pause> {
        self.list.iter().filter(move |pause| pause.target.holds(source, destination, key))
    }
}
