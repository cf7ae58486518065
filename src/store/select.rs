//! Which rows a command means, and the statement that finds them: filters become bound parameters, never text.
//!
//! Nothing here ever changes a row, and nothing here trusts the planner with a large table: every branch of the statement is written
//! for one index of the table's profile, and what no index serves is named so that the command can say so.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};
use uuid::Uuid;

use super::inspect::{Profile, Shape};
use super::maintenance::micros;
use super::names::{self, qualified};
use super::statements::in_live_index;
use super::{Param, Store, StoreError};
use crate::domain::message::{PgTime, Position};

/// A status of the contract, or any other that somebody wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// Waiting.
    Pending,
    /// Waiting after a failure, a skip or a return.
    Failed,
    /// Claimed by somebody.
    Publishing,
    /// None of the contract's.
    Unknown,
    /// Acknowledged.
    Sent,
    /// Attempts spent.
    Dead,
    /// Can never be accepted.
    Rejected,
}

impl Status {
    /// Every status.
    pub const ALL: [Self; 7] =
        [Self::Pending, Self::Failed, Self::Publishing, Self::Unknown, Self::Sent, Self::Dead, Self::Rejected];
    /// Those of rows that are not finished.
    pub const LIVE: [Self; 4] = [Self::Pending, Self::Failed, Self::Publishing, Self::Unknown];

    /// The status of a row of the table.
    #[must_use]
    pub fn of(text: &str) -> Self {
        Self::ALL.into_iter().find(|status| *status != Self::Unknown && status.name() == text).unwrap_or(Self::Unknown)
    }

    /// What the column holds; `unknown` stands for whatever else it may hold.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Failed => "failed",
            Self::Publishing => "publishing",
            Self::Unknown => "unknown",
            Self::Sent => "sent",
            Self::Dead => "dead",
            Self::Rejected => "rejected",
        }
    }

    /// The statuses that are met on the way to rows of this one.
    pub(super) fn way(self) -> &'static [Self] {
        match self {
            Self::Pending | Self::Failed | Self::Publishing | Self::Unknown => &Self::LIVE,
            Self::Dead | Self::Rejected => &[Self::Dead, Self::Rejected],
            Self::Sent => &[Self::Sent],
        }
    }

    /// Whether such a row still holds back its lane (contract §3).
    #[must_use]
    pub fn is_live(self) -> bool {
        match self {
            Self::Pending | Self::Failed | Self::Publishing | Self::Unknown => true,
            Self::Sent | Self::Dead | Self::Rejected => false,
        }
    }
}

/// An instant, absolute or counted back from the database's now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum When {
    /// This instant.
    At(PgTime),
    /// So long ago.
    Ago(Duration),
}

/// The earliest instant that the server takes: 4713 BC.
pub(super) const EARLIEST: PgTime = PgTime(-211_813_488_000_000_000);
/// Later than every finite instant that anybody means, and one that the server takes: about the year 100,000.
pub(super) const LATEST: PgTime = PgTime(3_092_534_208_000_000_000);

impl When {
    /// The instant, seen from `now`.
    #[must_use]
    pub fn instant(self, now: PgTime) -> PgTime {
        let instant = match self {
            Self::At(instant) => instant,
            Self::Ago(duration) => PgTime(now.0.saturating_sub(micros(duration))),
        };
        if instant < EARLIEST { PgTime::NEG_INFINITY } else { instant }
    }
}

/// Which rows: a row belongs to it when it matches one value of each filter that has any. Without filters every row does.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Selection {
    /// `outbox_id`.
    pub ids: Vec<Uuid>,
    /// `source`.
    pub sources: Vec<String>,
    /// `status`.
    pub statuses: BTreeSet<Status>,
    /// `destination`.
    pub topics: Vec<String>,
    /// `message_key`.
    pub keys: Vec<String>,
    /// `event_type`.
    pub event_types: Vec<String>,
    /// `message_id`.
    pub message_ids: Vec<String>,
    /// `created_at`, from here on.
    pub since: Option<When>,
    /// `created_at`, before this.
    pub until: Option<When>,
    /// `rejection_code`, or the code word that `last_error` begins with.
    pub errors: Vec<String>,
    /// Waiting rows (pending, failed) whose next attempt is due, or those whose is not yet.
    pub due: Option<bool>,
    /// `published_at`, up to this: what retention and prune go by. No filter of `list`.
    pub published_before: Option<When>,
    /// `updated_at`, up to this: a lease that ran out. No filter of `list`.
    pub updated_before: Option<When>,
}

/// In which order a page lists rows; `outbox_id` decides between equals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sort {
    /// `created_at`: the order of the contract.
    Created,
    /// `updated_at`.
    Updated,
    /// `next_attempt_at`.
    Due,
    /// `published_at`: only rows that have one.
    Published,
}

impl Sort {
    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Due => "due",
            Self::Published => "published",
        }
    }

    /// The column, of the table or of what was read from it.
    pub(super) fn column(self) -> &'static str {
        match self {
            Self::Created => "created_at",
            Self::Updated => "updated_at",
            Self::Due => "next_attempt_at",
            Self::Published => "published_at",
        }
    }
}

/// Which part of the rows of a selection: so many behind a place, in an order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    /// The order.
    pub sort: Sort,
    /// Backwards.
    pub descending: bool,
    /// Only rows behind this one: its value of the sort column, its id.
    pub after: Option<(PgTime, Uuid)>,
    /// Only rows created up to here, seen in the direction of the order: a part of a long walk.
    pub created_until: Option<PgTime>,
    /// Rows at most.
    pub rows_max: usize,
}

/// A filter, for saying that no index serves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Filter {
    /// [`Selection::sources`].
    Source,
    /// [`Selection::statuses`].
    Status,
    /// [`Selection::topics`].
    Topic,
    /// [`Selection::keys`].
    Key,
    /// [`Selection::event_types`].
    EventType,
    /// [`Selection::since`].
    Since,
    /// [`Selection::until`].
    Until,
    /// [`Selection::errors`].
    Error,
    /// [`Selection::due`].
    Due,
    /// [`Page::sort`].
    Sort,
}

/// What a statement costs: nothing to say of it when both are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unserved {
    /// Filters that are applied row by row, to rows that nothing else narrows down to a few.
    pub filters: BTreeSet<Filter>,
    /// Indexes of the profile that would be used and are missing.
    pub missing_indexes: BTreeSet<String>,
    /// The rows are met in order along an index, most of them in vain: that can be done in parts, by [`Page::created_until`].
    pub in_order: bool,
}

impl Unserved {
    /// Whether an index serves all of it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.filters.is_empty() && self.missing_indexes.is_empty()
    }
}

/// Values on their way into a statement.
#[derive(Default)]
pub struct Binds(Vec<(Box<dyn ToSql + Sync + Send>, Type)>);

impl Binds {
    /// Binds a value and returns its place, `$n`.
    pub fn add(&mut self, value: impl ToSql + Sync + Send + 'static, kind: Type) -> String {
        self.0.push((Box::new(value), kind));
        format!("${}", self.0.len())
    }

    fn texts(&mut self, values: &[String]) -> String {
        self.add(values.to_vec(), Type::TEXT_ARRAY)
    }

    /// The values as [`super::Db`] and [`super::Tx`] take them.
    #[must_use]
    pub fn params(&self) -> Vec<Param<'_>> {
        self.0.iter().map(|(value, kind)| (&**value as &(dyn ToSql + Sync), kind.clone())).collect()
    }
}

impl std::fmt::Debug for Binds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Values may be keys.
        f.debug_list().entries(self.0.iter().map(|(_, kind)| kind)).finish()
    }
}

/// A statement and its values.
#[derive(Debug)]
pub struct Query {
    /// Text, with `$n` for every value.
    pub sql: String,
    /// The values.
    pub binds: Binds,
    /// What no index serves.
    pub unserved: Unserved,
    /// Whether reading the whole table is the best that can be done.
    pub(super) scans: bool,
}

/// One way to rows, along one index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Branch {
    /// By primary key.
    Ids,
    /// By (source, message_id).
    Messages,
    /// Live rows of a key, by the live key index.
    Keys,
    /// Live rows of a source in order, by the live source index.
    Live,
    /// Finished rows among the first live ones of a lean table: another program wrote them, and they never leave that index, so they
    /// gather at its beginning.
    Strays,
    /// Dead and rejected rows of a lean table, by the far index.
    Far,
    /// Rows of a status of a shared table, by the status index.
    Status,
    /// Sent rows, by published_at.
    Sent,
}

/// Live rows of each source among which [`Branch::Strays`] are looked for.
const STRAYS_AMONG: i64 = 1_000;

const FAR: &str = "timestamptz '9999-01-01 00:00:00+00'";
const SIX: &str = "('pending', 'publishing', 'sent', 'failed', 'dead', 'rejected')";

impl Selection {
    /// Whether it has no filter: it means every row of the table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The statuses that rows of it can have.
    #[must_use]
    pub fn possible(&self) -> BTreeSet<Status> {
        let waiting = |status: &Status| match self.due {
            Some(_) => matches!(status, Status::Pending | Status::Failed),
            None => true,
        };
        // What was sent has no error any more, and no rejection.
        let erring = |status: &Status| self.errors.is_empty() || *status != Status::Sent;
        let asked = |status: &Status| self.statuses.is_empty() || self.statuses.contains(status);
        Status::ALL.into_iter().filter(waiting).filter(erring).filter(asked).collect()
    }

    /// The condition that says whether a row `o` belongs to it, whatever index brought the row: `$n` are the values, which it binds.
    ///
    /// Written so that no index is tempted by it, `created_at` and `published_at` apart: which one is used is decided by what stands beside it.
    #[must_use]
    pub fn condition(&self, shape: &Shape, now: PgTime, binds: &mut Binds) -> String {
        let mut all = vec!["true".to_owned()];
        if !self.ids.is_empty() {
            let ids = binds.add(self.ids.clone(), Type::UUID_ARRAY);
            all.push(format!("o.outbox_id = any({ids})"));
        }
        for (column, values) in [
            ("source", &self.sources),
            ("destination", &self.topics),
            ("message_key", &self.keys),
            ("event_type", &self.event_types),
            ("message_id", &self.message_ids),
        ] {
            if !values.is_empty() {
                let values = binds.texts(values);
                all.push(format!("(o.{column} || '') = any({values})"));
            }
        }
        if !self.statuses.is_empty() {
            let known: Vec<String> =
                self.statuses.iter().filter(|s| **s != Status::Unknown).map(|s| s.name().to_owned()).collect();
            let known = binds.texts(&known);
            let unknown = if self.statuses.contains(&Status::Unknown) {
                format!(" or (o.status || '') not in {SIX}")
            } else {
                String::new()
            };
            all.push(format!("((o.status || '') = any({known}){unknown})"));
        }
        for (comparison, when) in [
            ("created_at >=", self.since),
            ("created_at <", self.until),
            ("published_at <", self.published_before),
            ("updated_at <=", self.updated_before),
        ] {
            if let Some(when) = when {
                let instant = binds.add(when.instant(now), Type::TIMESTAMPTZ);
                all.push(format!("o.{comparison} {instant}"));
            }
        }
        if !self.errors.is_empty() {
            let codes = binds.texts(&self.errors);
            // A table without the columns keeps a rejection in last_error.
            let rejection =
                if shape.rejected_columns { format!(" or o.rejection_code = any({codes})") } else { String::new() };
            all.push(format!(
                "(split_part(o.last_error, ':', 1) = any({codes}) \
                 or (o.last_error like 'rejected: %' and trim(split_part(o.last_error, ':', 2)) = any({codes})){rejection})"
            ));
        }
        if let Some(due) = self.due {
            let comparison = if due { "<=" } else { ">" };
            let now = binds.add(now, Type::TIMESTAMPTZ);
            all.push(format!("(o.status || '') in ('pending', 'failed') and o.next_attempt_at {comparison} {now}"));
        }
        all.join(" and ")
    }

    /// The statement that reads a page of it: `columns` are expressions over `o`, each with its name, and must contain `outbox_id`
    /// and the sort's column under their own.
    ///
    /// `now` decides what is due and what "two hours ago" means; it stays the same for all pages of a list.
    #[must_use]
    pub fn query(&self, schema: &str, table: &str, shape: &Shape, columns: &str, page: Page, now: PgTime) -> Query {
        let branches = self.branches(shape, page.sort);
        let mut unserved = Unserved::default();
        for branch in &branches {
            unserved.filters.extend(self.unserved(*branch, page.sort));
            let missing =
                names::indexes(shape.profile, table).find(|(place, _)| branch.index(shape.profile) == Some(place));
            unserved
                .missing_indexes
                .extend(missing.map(|(_, name)| name).filter(|name| shape.missing_indexes.contains(name)));
        }
        let along = |branch: &Branch| matches!(branch, Branch::Live | Branch::Far | Branch::Strays);
        unserved.in_order =
            page.sort == Sort::Created && branches.iter().all(along) && unserved.missing_indexes.is_empty();
        let scans = branches.iter().any(|branch| *branch == Branch::Sent && !self.sent_is_served(page.sort))
            || !unserved.missing_indexes.is_empty();

        let mut binds = Binds::default();
        let mut render =
            Render { selection: self, shape, table: qualified(schema, table), columns, page, now, binds: &mut binds };
        let mut parts: Vec<String> = branches.iter().map(|branch| render.branch(*branch)).collect();
        if parts.is_empty() {
            // Filters that exclude each other.
            parts.push(format!("(select {columns} from {} o where false)", render.table));
        }
        let (lead, order, limit) = (render.lead(&branches), render.order(), render.limit());
        let parts = parts.join("\nunion all\n");
        let sql = format!("{lead}select o.* from (\n{parts}) o\norder by {order} limit {limit}");
        Query { sql, binds, unserved, scans }
    }

    fn branches(&self, shape: &Shape, sort: Sort) -> Vec<Branch> {
        if !self.ids.is_empty() {
            return vec![Branch::Ids];
        }
        if !self.message_ids.is_empty() {
            return vec![Branch::Messages];
        }
        let possible = self.possible();
        if sort == Sort::Published {
            return if possible.contains(&Status::Sent) { vec![Branch::Sent] } else { Vec::new() };
        }
        let live = possible.iter().any(|status| status.is_live());
        let finished = possible.contains(&Status::Dead) || possible.contains(&Status::Rejected);
        let mut branches = Vec::new();
        match shape.profile {
            Profile::Lean => {
                // Along the live indexes of a lean table a finished row is met as well, and shown when it is asked for.
                match (live, finished) {
                    (true, false) if !self.keys.is_empty() => branches.push(Branch::Keys),
                    (true, _) => branches.push(Branch::Live),
                    (false, true) => branches.push(Branch::Strays),
                    (false, false) => {}
                }
                if finished {
                    branches.push(Branch::Far);
                }
            }
            Profile::Shared => {
                // Pending rows may be all there are: only their own order ends early.
                let by_status = sort == Sort::Due || self.due == Some(false) || !possible.contains(&Status::Pending);
                match (live, by_status) {
                    (true, _) if !self.keys.is_empty() => branches.push(Branch::Keys),
                    (true, false) => branches.push(Branch::Live),
                    (true, true) | (false, _) => {}
                }
                let by_status = by_status && self.keys.is_empty();
                if finished || (live && by_status) {
                    branches.push(Branch::Status);
                }
            }
        }
        if possible.contains(&Status::Sent) {
            branches.push(Branch::Sent);
        }
        branches
    }

    fn sent_is_served(&self, sort: Sort) -> bool {
        sort == Sort::Published || self.since.is_some() || self.published_before.is_some()
    }

    /// The filters that a way to rows applies row by row.
    fn unserved(&self, branch: Branch, sort: Sort) -> BTreeSet<Filter> {
        use Filter as F;
        let possible = self.possible();
        let served: &[F] = match branch {
            // Few rows, whatever else is asked.
            Branch::Ids | Branch::Messages | Branch::Keys | Branch::Strays => return BTreeSet::new(),
            // What is neither pending nor failed is in flight, and that is bounded.
            Branch::Live if possible.contains(&Status::Pending) && possible.contains(&Status::Failed) => {
                &[F::Source, F::Status, F::Since, F::Until]
            }
            Branch::Live => &[F::Source, F::Since, F::Until],
            Branch::Far => &[F::Source, F::Status, F::Since, F::Until],
            Branch::Status if sort == Sort::Due || self.due == Some(false) => &[F::Status, F::Due],
            Branch::Status => &[F::Status],
            Branch::Sent if self.sent_is_served(sort) => &[F::Status, F::Since],
            Branch::Sent => &[F::Since],
        };
        let in_order = match branch {
            Branch::Ids | Branch::Messages | Branch::Keys | Branch::Strays => true,
            Branch::Live | Branch::Far => sort == Sort::Created,
            // What is in flight is bounded, so any order will do.
            Branch::Status => {
                sort == Sort::Created || sort == Sort::Due || possible == BTreeSet::from([Status::Publishing])
            }
            // Named by its status: it is not the order that is wrong.
            Branch::Sent => true,
        };
        let given = [
            (F::Source, !self.sources.is_empty()),
            (F::Status, !self.statuses.is_empty() || branch == Branch::Sent),
            (F::Topic, !self.topics.is_empty()),
            (F::Key, !self.keys.is_empty()),
            (F::EventType, !self.event_types.is_empty()),
            (F::Since, self.since.is_some()),
            (F::Until, self.until.is_some()),
            (F::Error, !self.errors.is_empty()),
            (F::Due, self.due.is_some()),
            (F::Sort, !in_order),
        ];
        given
            .into_iter()
            .filter(|(filter, given)| *given && !served.contains(filter))
            .map(|(filter, _)| filter)
            .collect()
    }
}

impl Branch {
    /// The place of its index among those of the profile; the primary key and the unique index are the table's own.
    fn index(self, profile: Profile) -> Option<&'static str> {
        match (self, profile) {
            (Self::Ids | Self::Messages, _) => None,
            (Self::Keys, Profile::Lean) => Some("key_order_idx"),
            (Self::Keys, Profile::Shared) => Some("head_of_line_idx"),
            (Self::Live | Self::Strays, _) => Some("source_order_idx"),
            (Self::Far, _) => Some("far_idx"),
            (Self::Status, _) => Some("pending_idx"),
            (Self::Sent, Profile::Lean) => Some("sent_idx"),
            (Self::Sent, Profile::Shared) => Some("sent_gc_idx"),
        }
    }
}

/// A statement while it is written.
struct Render<'a> {
    selection: &'a Selection,
    shape: &'a Shape,
    table: String,
    columns: &'a str,
    page: Page,
    now: PgTime,
    binds: &'a mut Binds,
}

impl Render<'_> {
    /// The rows of one branch, no more than the page takes.
    fn branch(&mut self, branch: Branch) -> String {
        let own = self.own_condition(branch);
        let condition = self.selection.condition(self.shape, self.now, self.binds);
        let (behind, limit) = (self.behind(), self.limit());
        let (table, columns) = (self.table.clone(), self.columns);
        let (from, order) = match branch {
            Branch::Strays => {
                let among = self.binds.add(STRAYS_AMONG, Type::INT8);
                let first =
                    format!("(select o.* from {table} o where {own} order by o.created_at, o.outbox_id limit {among})");
                (format!("{first} o where {condition}"), self.order())
            }
            // In the index's own order, or the planner walks the source's rows for those of a key.
            Branch::Keys if self.page.sort == Sort::Created => {
                let direction = if self.page.descending { " desc" } else { "" };
                (
                    format!("{table} o where {own} and {condition}"),
                    format!("o.message_key{direction}, {}", self.order()),
                )
            }
            Branch::Ids
            | Branch::Messages
            | Branch::Keys
            | Branch::Live
            | Branch::Far
            | Branch::Status
            | Branch::Sent => (format!("{table} o where {own} and {condition}"), self.order()),
        };
        let rows = format!("select {columns} from {from}{behind} order by {order} limit {limit}");
        match branch {
            Branch::Ids | Branch::Sent => format!("({rows})"),
            Branch::Messages | Branch::Live | Branch::Far | Branch::Strays => {
                format!("(select o.* from sources s cross join lateral ({rows}) o)")
            }
            Branch::Status => format!("(select o.* from statuses s cross join lateral ({rows}) o)"),
            Branch::Keys => {
                let keys = self.binds.texts(&self.selection.keys);
                let keys = format!("(select distinct * from unnest({keys}::text[]) u(key)) k");
                format!("(select o.* from sources s cross join {keys} cross join lateral ({rows}) o)")
            }
        }
    }

    /// What makes a branch take its index.
    fn own_condition(&mut self, branch: Branch) -> String {
        let live = in_live_index(self.shape.profile);
        match branch {
            Branch::Ids => "true".to_owned(),
            Branch::Messages => {
                let ids = self.binds.texts(&self.selection.message_ids);
                format!("o.source = s.source and o.message_id = any({ids})")
            }
            Branch::Keys => {
                format!("o.source = s.source and o.message_key >= k.key and o.message_key <= k.key and {live}")
            }
            Branch::Live | Branch::Strays => format!("o.source = s.source and {live}"),
            Branch::Far => {
                format!("o.source = s.source and o.next_attempt_at >= {FAR} and o.status in ('dead', 'rejected')")
            }
            Branch::Status => {
                let due = if self.selection.due == Some(false) {
                    format!(" and o.next_attempt_at > {}", self.binds.add(self.now, Type::TIMESTAMPTZ))
                } else {
                    String::new()
                };
                format!("o.status = s.status{due}")
            }
            Branch::Sent => {
                // A row is created before it is published.
                let since =
                    self.selection.since.map(|since| self.binds.add(since.instant(self.now), Type::TIMESTAMPTZ));
                let since = since.map(|since| format!(" and o.published_at >= {since}")).unwrap_or_default();
                let sent = match self.shape.profile {
                    Profile::Lean => "o.published_at is not null and (o.status || '') = 'sent'",
                    Profile::Shared => "o.status = 'sent'",
                };
                format!("{sent}{since}")
            }
        }
    }

    /// The sources or statuses that branches are joined to.
    fn lead(&mut self, branches: &[Branch]) -> String {
        let table = &self.table;
        let mut lead = Vec::new();
        if branches.iter().any(|branch| match branch {
            Branch::Messages | Branch::Keys | Branch::Live | Branch::Strays | Branch::Far => true,
            Branch::Ids | Branch::Status | Branch::Sent => false,
        }) {
            lead.push(if self.selection.sources.is_empty() {
                // Walks the unique index, from source to source.
                format!(
                    "sources as (\n  (select o.source from {table} o order by o.source, o.message_id limit 1)\n  union all\n  \
                     select n.source from sources p cross join lateral (\n    select o.source from {table} o where o.source > p.source \
                     order by o.source, o.message_id limit 1) n)"
                )
            } else {
                let sources = self.binds.texts(&self.selection.sources);
                format!("sources as (select distinct * from unnest({sources}::text[]) u(source))")
            });
        }
        if branches.contains(&Branch::Status) {
            // With live rows found elsewhere, only the finished ones are left.
            let possible = self.selection.possible();
            let elsewhere = branches.contains(&Branch::Live) || branches.contains(&Branch::Keys);
            let wanted = |status: &&Status| !elsewhere || !status.is_live();
            let known =
                possible.iter().filter(|status| **status != Status::Unknown && **status != Status::Sent).filter(wanted);
            let known: Vec<String> = known.map(|status| status.name().to_owned()).collect();
            let known = self.binds.texts(&known);
            lead.push(if possible.contains(&Status::Unknown) && !elsewhere {
                format!(
                    "found as (\n  (select o.status from {table} o order by o.status, o.next_attempt_at limit 1)\n  union all\n  \
                     select n.status from found p cross join lateral (\n    select o.status from {table} o where o.status > p.status \
                     order by o.status, o.next_attempt_at limit 1) n),\nstatuses as (select status from found \
                     where status = any({known}) or status not in {SIX})"
                )
            } else {
                format!("statuses as (select * from unnest({known}::text[]) u(status))")
            });
        }
        if lead.is_empty() { String::new() } else { format!("with recursive {}\n", lead.join(",\n")) }
    }

    fn behind(&mut self) -> String {
        let mut there =
            if self.page.sort == Sort::Published { " and o.published_at is not null" } else { "" }.to_owned();
        if let Some(until) = self.page.created_until {
            let comparison = if self.page.descending { ">=" } else { "<=" };
            there.push_str(&format!(" and o.created_at {comparison} {}", self.binds.add(until, Type::TIMESTAMPTZ)));
        }
        let Some((value, outbox_id)) = self.page.after else { return there };
        let comparison = if self.page.descending { "<" } else { ">" };
        let column = self.page.sort.column();
        let value = self.binds.add(value, Type::TIMESTAMPTZ);
        let outbox_id = self.binds.add(outbox_id, Type::UUID);
        format!("{there} and (o.{column}, o.outbox_id) {comparison} ({value}, {outbox_id})")
    }

    fn order(&self) -> String {
        let column = self.page.sort.column();
        let direction = if self.page.descending { " desc" } else { "" };
        format!("o.{column}{direction}, o.outbox_id{direction}")
    }

    fn limit(&mut self) -> String {
        self.binds.add(i64::try_from(self.page.rows_max).unwrap_or(i64::MAX), Type::INT8)
    }
}

impl Store {
    /// The next rows of a selection in the contract's order, behind a position: their positions, and nothing locked. What they are then
    /// changed by has to look at their state again.
    ///
    /// # Errors
    /// [`StoreError`]; a timeout when no index serves the selection on a large table: see [`Store::unserved`].
    pub async fn select(
        &self,
        selection: &Selection,
        after: Option<Position>,
        rows_max: usize,
        now: PgTime,
        bound: Duration,
    ) -> Result<Vec<Position>, StoreError> {
        let after = after.map(|position| (position.created_at, position.outbox_id));
        let page = Page { sort: Sort::Created, descending: false, after, created_until: None, rows_max };
        let query = selection.query(&self.schema, &self.table, &self.shape()?, "o.created_at, o.outbox_id", page, now);
        let position =
            |row: &Row| Ok(Position { created_at: row.try_get("created_at")?, outbox_id: row.try_get("outbox_id")? });
        self.read(&query, bound).await?.iter().map(position).collect()
    }

    /// What no index of the table serves of a selection in this order.
    ///
    /// # Errors
    /// When the table's shape is not known yet.
    pub fn unserved(&self, selection: &Selection, sort: Sort) -> Result<Unserved, StoreError> {
        let page = Page { sort, descending: false, after: None, created_until: None, rows_max: 1 };
        Ok(selection.query(&self.schema, &self.table, &self.shape()?, "o.outbox_id", page, PgTime(0)).unserved)
    }

    /// Runs a query in a read-only transaction, for at most so long.
    pub(super) async fn read(&self, query: &Query, bound: Duration) -> Result<Vec<Row>, StoreError> {
        let mut tx = self.db.begin_read_only(bound).await?;
        // Sorting what one index brought is no mistake here, and where no index helps the whole table is read faster in its own order.
        let scan = if query.scans { "; set local enable_seqscan = on; set local enable_bitmapscan = on" } else { "" };
        tx.batch(&format!("set local enable_sort = on{scan}"), bound).await?;
        let rows = tx.query(&query.sql, &query.binds.params(), bound).await?;
        tx.commit(bound).await?;
        Ok(rows)
    }
}
