//! The statement that finds the rows of a selection, written for the indexes of the table's profile.
//!
//! Nothing here trusts the planner with a large table: every branch takes one index, and what no index serves is named so that the
//! command can say so.

use std::collections::BTreeSet;

use tokio_postgres::types::Type;

use super::inspect::{Profile, Shape};
use super::names::{self, qualified};
use super::select::{Binds, Page, SIX, Selection, Sort, Status};
use super::statements::in_live_index;
use crate::domain::message::PgTime;

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

impl Selection {
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
                let bound = match (self.counts_by_index(), self.page.descending) {
                    (false, _) => "",
                    (true, false) => " and o.created_at <= s.bound",
                    (true, true) => " and o.created_at >= s.bound",
                };
                format!("o.status = s.status{due}{bound}")
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
        let table = self.table.clone();
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
            let mut from = format!("unnest({known}::text[]) u(status)");
            if possible.contains(&Status::Unknown) && !elsewhere {
                lead.push(format!(
                    "found as (\n  (select o.status from {table} o order by o.status, o.next_attempt_at limit 1)\n  union all\n  \
                     select n.status from found p cross join lateral (\n    select o.status from {table} o where o.status > p.status \
                     order by o.status, o.next_attempt_at limit 1) n)"
                ));
                from = format!("found u where u.status = any({known}) or u.status not in {SIX}");
            }
            let bound = self.bound();
            lead.push(format!("statuses as materialized (select u.status{bound} from {from})"));
        }
        if lead.is_empty() { String::new() } else { format!("with recursive {}\n", lead.join(",\n")) }
    }

    /// Whether the status index alone tells how far a page in order of creation reaches: nothing but columns of that index is asked for.
    fn counts_by_index(&self) -> bool {
        let other = Selection { statuses: BTreeSet::new(), since: None, until: None, ..self.selection.clone() };
        self.page.sort == Sort::Created && other.is_empty()
    }

    /// The `created_at` that a page of one status `u` does not get beyond, read from the index without the rows: sorting all rows of a
    /// status is slow because of the rows, not because of the sorting.
    fn bound(&mut self) -> String {
        if !self.counts_by_index() {
            return String::new();
        }
        let mut condition = String::new();
        // Rows that share it with the last row of the page before are within the bound in any case.
        let after = self.page.after.map(|(value, _)| value);
        let beyond = if self.page.descending { "<" } else { ">" };
        let since = self.selection.since.map(|since| since.instant(self.now));
        let until = self.selection.until.map(|until| until.instant(self.now));
        for (comparison, value) in [(beyond, after), (">=", since), ("<", until)] {
            if let Some(value) = value {
                condition
                    .push_str(&format!(" and o.created_at {comparison} {}", self.binds.add(value, Type::TIMESTAMPTZ)));
            }
        }
        let (last, end, direction) =
            if self.page.descending { ("min", "-infinity", " desc") } else { ("max", "infinity", "") };
        let (table, limit) = (self.table.clone(), self.limit());
        format!(
            ", coalesce((select {last}(n.created_at) from (select o.created_at from {table} o where o.status = u.status{condition} \
             order by o.created_at{direction} limit {limit}) n), '{end}') as bound"
        )
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
