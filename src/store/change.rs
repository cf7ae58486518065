//! The verbs of operators: retry, replay, cancel, reschedule, requeue of stuck rows, prune. One call changes one bounded batch of rows, in one
//! transaction that commits synchronously.
//!
//! Nothing here ever changes a row in a state that the verb does not name (contract §2), and no verb but the requeue of rows whose lease ran out
//! touches a row in flight. Rows are locked in id order and judged by their newest version.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::Type;
use uuid::Uuid;

use super::db::{Tx, WAKE_CHANNEL};
use super::lane_order::{Behind, LaneRow};
use super::maintenance::micros;
use super::verb::{Changes, Due, Unchanged, Verb, Why};
use super::{ErrorKind, Page, Selection, Sort, Status, Store, StoreError};
use crate::domain::lanes::{Lane, Lanes};
use crate::domain::message::{PgTime, Position};
use crate::domain::outcome::rejection_detail;
use crate::domain::policy::SourceRules;

/// Rows of one call at most: its locks are held for as long as its few statements take.
pub const CHANGE_ROWS_MAX: usize = 1_000;
/// The relay's statements are short, so whoever holds a row longer is a person with an open transaction.
const LOCK_TIMEOUT: &str = "set local lock_timeout = '10s'";
/// A deadlock with another program is tried again this often.
const TRIES_MAX: usize = 5;

/// The rules of a source, for its lanes and its attempts.
pub type Rules<'a> = &'a (dyn Fn(&str) -> SourceRules + Sync);

/// A row as a call saw it.
struct Seen {
    position: Position,
    source_name: String,
    message_key: Option<String>,
    status: Status,
    attempt_count: i64,
    updated_at: PgTime,
    published_at: Option<PgTime>,
    cancelled: bool,
    /// In flight, and the lease has run out.
    expired: bool,
}

impl Seen {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            position: Position { created_at: row.try_get("created_at")?, outbox_id: row.try_get("outbox_id")? },
            source_name: row.try_get("source")?,
            message_key: row.try_get("message_key")?,
            status: Status::of(row.try_get("status")?),
            attempt_count: row.try_get("attempt_count")?,
            updated_at: row.try_get("updated_at")?,
            published_at: row.try_get("published_at")?,
            cancelled: row.try_get("cancelled")?,
            expired: row.try_get("expired")?,
        })
    }

    fn id(&self) -> Uuid {
        self.position.outbox_id
    }

    /// Why the verb leaves it alone, as far as the row itself says.
    fn objection(&self, verb: &Verb, rules: Rules<'_>) -> Option<Why> {
        if matches!(verb, Verb::Cancel { .. }) && self.cancelled {
            return Some(Why::AlreadyCancelled);
        }
        if !verb.takes().contains(&self.status) {
            return Some(Why::State(self.status));
        }
        match verb {
            Verb::Retry { keep_attempts: true, .. }
                if self.attempt_count >= i64::from(rules(&self.source_name).max_attempts) =>
            {
                Some(Why::AttemptsSpent(self.attempt_count))
            }
            Verb::RequeueStuck { .. } if !self.expired => Some(Why::Leased),
            Verb::Prune { before, .. } => {
                let since = if self.status == Status::Sent { self.published_at } else { None };
                (since.unwrap_or(self.updated_at) >= *before).then_some(Why::Recent)
            }
            Verb::Retry { .. }
            | Verb::Replay { .. }
            | Verb::Cancel { .. }
            | Verb::Reschedule { .. }
            | Verb::RequeueStuck { .. } => None,
        }
    }

    /// The row with the lane that it must not be overtaken in; a row that is its own lane has none.
    fn lane_row(&self, rules: Rules<'_>) -> Option<LaneRow> {
        let key = self.message_key.as_deref().map(std::sync::Arc::from);
        let key = match Lanes::lane_of(rules(&self.source_name).policy, key.as_ref(), self.id()) {
            Lane::Key(key) => Some(key.to_string()),
            Lane::Source => None,
            Lane::Row(_) => return None,
        };
        Some(LaneRow { position: self.position, source_name: self.source_name.clone(), key })
    }
}

impl Store {
    /// Does a verb to rows, at most [`CHANGE_ROWS_MAX`] of them, and tells the running relays. With `dry_run` nothing is changed or locked.
    ///
    /// `history` is what [`Store::history`] said of these rows, possibly among others; without it it is asked for here.
    ///
    /// # Errors
    /// [`StoreError`]; then nothing was changed, unless the connection was lost during the commit.
    pub async fn change(
        &self,
        verb: &Verb,
        ids: &[Uuid],
        rules: Rules<'_>,
        history: Option<&History>,
        dry_run: bool,
    ) -> Result<Changes, StoreError> {
        assert!(ids.len() <= CHANGE_ROWS_MAX, "a call changes at most {CHANGE_ROWS_MAX} rows");
        let ids: BTreeSet<Uuid> = ids.iter().copied().collect();
        let ids: Vec<Uuid> = ids.into_iter().collect();
        let own;
        let history = match history {
            Some(history) => history,
            None => {
                own = self.history(verb, &ids, rules).await?;
                &own
            }
        };
        if dry_run {
            return self.preview(verb, &ids, rules, history).await;
        }
        let mut tries = 0;
        loop {
            tries += 1;
            match self.change_once(verb, &ids, rules, history).await {
                Err(error) if error.kind() == ErrorKind::Serialization && tries < TRIES_MAX => {}
                outcome => return outcome,
            }
        }
    }

    /// Which of these rows, however many, a row of their lane has overtaken so far, when that matters to the verb. The long look at what was sent,
    /// made before anything is locked; [`Store::change`] looks again at what was sent since.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn history(&self, verb: &Verb, ids: &[Uuid], rules: Rules<'_>) -> Result<History, StoreError> {
        if !verb.keeps_order() {
            return Ok(History::default());
        }
        let until = self.now().await?;
        let mut tx = self.db.begin_read_only(self.bound).await?;
        let looked = self.seen(&mut tx, ids, verb.lease()).await?;
        let wanted = looked.iter().filter(|row| row.objection(verb, rules).is_none());
        let lanes: Vec<LaneRow> = wanted.filter_map(|row| row.lane_row(rules)).collect();
        let overtaken = self.sent_behind(&mut tx, &lanes, None).await?;
        tx.commit(self.bound).await?;
        Ok(History { until: Some(until), looked: lanes.iter().map(|row| row.position.outbox_id).collect(), overtaken })
    }

    /// The next rows of a selection, with their value of the sort column, behind the last of an earlier page.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn places(
        &self,
        selection: &Selection,
        sort: Sort,
        after: Option<(PgTime, Uuid)>,
        rows_max: usize,
        now: PgTime,
        bound: Duration,
    ) -> Result<Vec<(PgTime, Uuid)>, StoreError> {
        let page = Page { sort, descending: false, after, created_until: None, rows_max };
        let column = sort.column();
        let columns = format!("o.{column}, o.outbox_id");
        let query = selection.query(&self.schema, &self.table, &self.shape()?, &columns, page, now);
        let rows = self.read(&query, bound).await?;
        rows.iter().map(|row| Ok((row.try_get(column)?, row.try_get("outbox_id")?))).collect()
    }

    /// The session user and application name under which the database knows us.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn who(&self) -> Result<(String, String), StoreError> {
        let rows = self.query(include_str!("sql/who.sql"), &[]).await?;
        let row = rows.first().ok_or_else(|| StoreError::Protocol("WHO returned no row".to_owned()))?;
        Ok((row.try_get("session_user")?, row.try_get("application_name")?))
    }

    /// The lanes of these rows, whatever the state of the rows; `None` for a row that is its own lane.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn lanes(
        &self,
        ids: &[Uuid],
        rules: Rules<'_>,
    ) -> Result<HashMap<Uuid, Option<(String, Option<String>)>>, StoreError> {
        let mut tx = self.db.begin_read_only(self.bound).await?;
        let rows = self.seen(&mut tx, ids, Duration::MAX).await?;
        tx.commit(self.bound).await?;
        let lane = |row: &Seen| (row.id(), row.lane_row(rules).map(|lane| (lane.source_name, lane.key)));
        Ok(rows.iter().map(lane).collect())
    }

    async fn change_once(
        &self,
        verb: &Verb,
        ids: &[Uuid],
        rules: Rules<'_>,
        history: &History,
    ) -> Result<Changes, StoreError> {
        let mut tx = self.db.begin(self.bound).await?;
        tx.batch(LOCK_TIMEOUT, self.bound).await?;
        if verb.brings_back() {
            let table = super::qualified(&self.schema, &self.table);
            tx.query(include_str!("sql/change_turn.sql"), &[(&table, Type::TEXT)], self.bound).await?;
        }
        let locked = self.lock(&mut tx, verb, ids).await?;
        let mut changes = Changes::default();
        let mut wanted: Vec<&Seen> = Vec::with_capacity(locked.len());
        for row in &locked {
            match row.objection(verb, rules) {
                None => wanted.push(row),
                Some(why) => changes.unchanged.push(Unchanged { outbox_id: row.id(), why }),
            }
        }
        let mut behind = Behind::default();
        if let Some(until) = history.until {
            let lanes: Vec<LaneRow> = wanted.iter().filter_map(|row| row.lane_row(rules)).collect();
            // First what waits is kept from being claimed, then what went before is looked at: in between nothing gets past.
            behind = self.next_behind(&mut tx, &lanes, true).await?;
            let mut objections = self.sent_behind(&mut tx, &lanes, Some(until)).await?;
            objections.extend(behind.in_flight.iter().map(|(id, why)| (*id, *why)));
            objections.extend(history.overtaken.iter().map(|(id, why)| (*id, *why)));
            let new = lanes.iter().map(|row| row.position.outbox_id).filter(|id| !history.looked.contains(id));
            objections.extend(new.map(|id| (id, Why::Moved)));
            wanted.retain(|row| match objections.get(&row.id()) {
                None => true,
                Some(why) => {
                    changes.unchanged.push(Unchanged { outbox_id: row.id(), why: *why });
                    false
                }
            });
        }
        self.apply(&mut tx, verb, &wanted, rules, &mut changes).await?;
        let done: HashSet<Uuid> = changes.changed.iter().copied().collect();
        let known: HashSet<Uuid> =
            done.iter().copied().chain(changes.unchanged.iter().map(|row| row.outbox_id)).collect();
        let rest: Vec<Uuid> = ids.iter().copied().filter(|id| !known.contains(id)).collect();
        let looked = self.seen(&mut tx, &rest, verb.lease()).await?;
        if verb.wakes() && !done.is_empty() {
            let sources = wanted.iter().filter(|row| done.contains(&row.id())).map(|row| row.source_name.as_str());
            let sources: Vec<&str> = sources.collect::<BTreeSet<&str>>().into_iter().collect();
            let wake = include_str!("sql/change_wake.sql");
            tx.query(wake, &[(&WAKE_CHANNEL, Type::TEXT), (&sources, Type::TEXT_ARRAY)], self.bound).await?;
        }
        self.guard(&mut tx, &behind, &done).await?;
        tx.commit(self.bound).await?;
        changes.explain(verb, &rest, &looked, rules);
        Ok(changes)
    }

    /// What a call would do, from a look that locks nothing.
    async fn preview(
        &self,
        verb: &Verb,
        ids: &[Uuid],
        rules: Rules<'_>,
        history: &History,
    ) -> Result<Changes, StoreError> {
        let mut tx = self.db.begin_read_only(self.bound).await?;
        let looked = self.seen(&mut tx, ids, verb.lease()).await?;
        let wanted: Vec<&Seen> = looked.iter().filter(|row| row.objection(verb, rules).is_none()).collect();
        let mut overtaken = history.overtaken.clone();
        if verb.keeps_order() {
            let lanes: Vec<LaneRow> = wanted.iter().filter_map(|row| row.lane_row(rules)).collect();
            overtaken.extend(self.next_behind(&mut tx, &lanes, false).await?.in_flight);
        }
        tx.commit(self.bound).await?;
        let mut changes = Changes::default();
        for row in wanted {
            match overtaken.get(&row.id()) {
                None => {
                    changes.changed.push(row.id());
                    let spent = row.attempt_count >= i64::from(rules(&row.source_name).max_attempts);
                    changes.dead += usize::from(spent && matches!(verb, Verb::RequeueStuck { .. }));
                }
                Some(why) => changes.unchanged.push(Unchanged { outbox_id: row.id(), why: *why }),
            }
        }
        changes.changed.sort_unstable();
        let known: HashSet<Uuid> =
            changes.changed.iter().copied().chain(changes.unchanged.iter().map(|row| row.outbox_id)).collect();
        let rest: Vec<Uuid> = ids.iter().copied().filter(|id| !known.contains(id)).collect();
        changes.explain(verb, &rest, &looked, rules);
        Ok(changes)
    }

    async fn lock(&self, tx: &mut Tx, verb: &Verb, ids: &[Uuid]) -> Result<Vec<Seen>, StoreError> {
        let statements = self.statements()?;
        let (lease, states) = (micros(verb.lease()), names(&verb.takes()));
        let params: [super::Param<'_>; 3] =
            [(&ids, Type::UUID_ARRAY), (&lease, Type::INT8), (&states, Type::TEXT_ARRAY)];
        tx.query(&statements.change_lock, &params, self.bound).await?.iter().map(Seen::read).collect()
    }

    async fn seen(&self, tx: &mut Tx, ids: &[Uuid], lease: Duration) -> Result<Vec<Seen>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let statements = self.statements()?;
        let params: [super::Param<'_>; 2] = [(&ids, Type::UUID_ARRAY), (&micros(lease), Type::INT8)];
        tx.query(&statements.change_look, &params, self.bound).await?.iter().map(Seen::read).collect()
    }

    /// Runs the verb's own statement over rows that are locked.
    async fn apply(
        &self,
        tx: &mut Tx,
        verb: &Verb,
        rows: &[&Seen],
        rules: Rules<'_>,
        changes: &mut Changes,
    ) -> Result<(), StoreError> {
        if rows.is_empty() {
            return Ok(());
        }
        let statements = self.statements()?;
        let ids: Vec<Uuid> = rows.iter().map(|row| row.id()).collect();
        let states = names(&verb.takes());
        let changed = match verb {
            Verb::Retry { .. } | Verb::Replay { .. } => {
                let (keep, due) = match verb {
                    Verb::Retry { keep_attempts, due, .. } => (*keep_attempts, *due),
                    _ => (false, Due::In(Duration::ZERO)),
                };
                let params: [super::Param<'_>; 5] = [
                    (&ids, Type::UUID_ARRAY),
                    (&states, Type::TEXT_ARRAY),
                    (&keep, Type::BOOL),
                    (&due.at(), Type::TIMESTAMPTZ),
                    (&due.delay_micros(), Type::INT8),
                ];
                tx.query(&statements.to_pending, &params, self.bound).await?
            }
            Verb::Cancel { reason } => {
                let reason = rejection_detail(reason);
                let params: [super::Param<'_>; 2] = [(&ids, Type::UUID_ARRAY), (&reason, Type::TEXT)];
                tx.query(&statements.cancel, &params, self.bound).await?
            }
            Verb::Reschedule { due } => {
                let params: [super::Param<'_>; 3] =
                    [(&ids, Type::UUID_ARRAY), (&due.at(), Type::TIMESTAMPTZ), (&due.delay_micros(), Type::INT8)];
                tx.query(&statements.reschedule, &params, self.bound).await?
            }
            Verb::RequeueStuck { older_than } => {
                let mut by_limit: BTreeMap<u32, Vec<Uuid>> = BTreeMap::new();
                for row in rows {
                    by_limit.entry(rules(&row.source_name).max_attempts).or_default().push(row.id());
                }
                let mut all = Vec::new();
                for (max_attempts, ids) in by_limit {
                    let params: [super::Param<'_>; 3] = [
                        (&ids, Type::UUID_ARRAY),
                        (&micros(*older_than), Type::INT8),
                        (&i64::from(max_attempts), Type::INT8),
                    ];
                    all.extend(tx.query(&statements.requeue, &params, self.bound).await?);
                }
                for row in &all {
                    changes.dead += usize::from(row.try_get::<_, &str>("status")? == "dead");
                }
                all
            }
            Verb::Prune { .. } => {
                let params: [super::Param<'_>; 2] = [(&ids, Type::UUID_ARRAY), (&states, Type::TEXT_ARRAY)];
                tx.query(&statements.prune, &params, self.bound).await?
            }
        };
        for row in &changed {
            changes.changed.push(row.try_get("outbox_id")?);
        }
        changes.changed.sort_unstable();
        Ok(())
    }
}

/// What the long look at sent rows found: see [`Store::history`].
#[derive(Debug, Clone, Default)]
pub struct History {
    /// When it began; nothing when the verb does not ask.
    until: Option<PgTime>,
    /// Whom it was about.
    looked: HashSet<Uuid>,
    overtaken: HashMap<Uuid, Why>,
}

impl Changes {
    /// Says why each of the rest was left as it is.
    fn explain(&mut self, verb: &Verb, rest: &[Uuid], looked: &[Seen], rules: Rules<'_>) {
        let looked: HashMap<Uuid, &Seen> = looked.iter().map(|row| (row.id(), row)).collect();
        for id in rest {
            let why = match looked.get(id) {
                None => Why::NotFound,
                Some(row) => row.objection(verb, rules).unwrap_or(Why::Moved),
            };
            self.unchanged.push(Unchanged { outbox_id: *id, why });
        }
        self.unchanged.sort_unstable_by_key(|row| row.outbox_id);
    }
}

fn names(statuses: &BTreeSet<Status>) -> Vec<&'static str> {
    statuses.iter().map(|status| status.name()).collect()
}
