//! The statements in `sql/`, written out for one table and one index profile.
//!
//! Nothing here ever holds a value of a row: values are parameters. Names are quoted identifiers, checked by the configuration; the one
//! number is a limit of the configuration.

use super::inspect::{Profile, Shape};
use super::names::qualified;

/// Every statement of the relay for one table shape.
#[derive(Debug)]
pub(super) struct Statements {
    pub discover: String,
    pub peek_keys: String,
    pub peek_rows: String,
    pub claim_keys: String,
    pub claim_rows: String,
    pub claim_stream: String,
    pub late_floor: String,
    pub poll: String,
    pub sources: String,
    pub settle_sent: String,
    pub settle_unsent: String,
    pub settle_rejected: String,
    pub settled_already: String,
    pub requeue: String,
    pub stale: String,
    pub retention: String,
    pub backlog: String,
    pub heads: String,
    pub finished: String,
    pub table_health: String,
    pub due: String,
    pub count_sent: String,
    pub resume: String,
    pub ahead: String,
    pub ahead_key: String,
    pub waiting_source: String,
    pub waiting_lane: String,
    pub waiting_topic: String,
    pub change_look: String,
    pub change_lock: String,
    pub to_pending: String,
    pub reschedule: String,
    pub cancel: String,
    pub prune: String,
    pub lane_next: String,
    pub lane_lock: String,
    pub lane_guard: String,
    pub lane_sent: String,
}

/// Non-terminal rows. On a lean table the first two conditions are the live indexes' predicates; on a shared table they would
/// hide a row with a stale published_at, and let its lane overtake it.
const LIVE_LEAN: &str = "o.published_at is null and o.next_attempt_at < timestamptz '9999-01-01 00:00:00+00' \
                         and o.status not in ('sent', 'dead', 'rejected')";
const LIVE_SHARED: &str = "o.status not in ('sent', 'dead', 'rejected')";

/// What an index of live rows holds: on a lean table also finished rows that another program wrote.
pub(super) fn in_live_index(profile: Profile) -> &'static str {
    match profile {
        Profile::Lean => "o.published_at is null and o.next_attempt_at < timestamptz '9999-01-01 00:00:00+00'",
        Profile::Shared => LIVE_SHARED,
    }
}

impl Statements {
    pub(super) fn new(schema: &str, table: &str, shape: &Shape, payload_octets_max: usize) -> Self {
        // A payload that no broker could take is not even read: a claim that brought a gigabyte would take everybody's memory, or fail
        // again and again, and with it every other row of its source. octet_length does not detoast.
        let payload =
            format!("case when octet_length(kt.payload_bytes) <= {payload_octets_max} then kt.payload_bytes end");
        let table = qualified(schema, table);
        let (live, sent, finished, far) = match shape.profile {
            Profile::Lean => (
                LIVE_LEAN,
                "o.published_at is not null and (o.status || '') = 'sent'",
                "o.next_attempt_at >= timestamptz '9999-01-01 00:00:00+00' and o.status in ('dead', 'rejected')",
                "timestamptz '9999-12-31 00:00:00+00'",
            ),
            Profile::Shared => {
                (LIVE_SHARED, "o.status = 'sent'", "o.status in ('dead', 'rejected')", "k.next_attempt_at")
            }
        };
        let (unreject, cancelled) = if shape.rejected_columns {
            (
                ", rejected_at = null, rejection_code = null, rejection_detail = null",
                "coalesce(o.rejection_code = 'operator.cancelled', false)",
            )
        } else {
            ("", "coalesce(o.status = 'dead' and o.last_error like 'rejected: operator.cancelled:%', false)")
        };
        let render = |text: &str| {
            text.replace("{table}", &table)
                .replace("{live}", live)
                .replace("{in_live_index}", in_live_index(shape.profile))
                .replace("{sent}", sent)
                .replace("{finished}", finished)
                .replace("{unreject}", unreject)
                .replace("{cancelled}", cancelled)
                .replace("{far}", far)
                .replace("{payload}", &payload)
        };
        Self {
            discover: render(include_str!("sql/discover.sql")),
            peek_keys: render(include_str!("sql/peek_keys.sql")),
            peek_rows: render(include_str!("sql/peek_rows.sql")),
            claim_keys: render(include_str!("sql/claim_keys.sql")),
            claim_rows: render(include_str!("sql/claim_rows.sql")),
            claim_stream: render(include_str!("sql/claim_stream.sql")),
            late_floor: render(include_str!("sql/late_floor.sql")),
            poll: render(include_str!("sql/poll.sql")),
            sources: render(include_str!("sql/sources.sql")),
            settle_sent: render(include_str!("sql/settle_sent.sql")),
            settle_unsent: render(include_str!("sql/settle_unsent.sql")),
            settle_rejected: render(include_str!("sql/settle_rejected.sql")),
            settled_already: render(include_str!("sql/settled_already.sql")),
            requeue: render(include_str!("sql/requeue.sql")),
            stale: render(include_str!("sql/stale.sql")),
            retention: render(include_str!("sql/retention.sql")),
            backlog: render(include_str!("sql/backlog.sql")),
            heads: render(include_str!("sql/heads.sql")),
            finished: render(include_str!("sql/finished.sql")),
            table_health: render(include_str!("sql/table_health.sql")),
            due: render(include_str!("sql/due.sql")),
            count_sent: render(include_str!("sql/count_sent.sql")),
            resume: render(include_str!("sql/resume.sql")),
            ahead: render(include_str!("sql/ahead.sql")),
            ahead_key: render(include_str!("sql/ahead_key.sql")),
            waiting_source: render(include_str!("sql/waiting_source.sql")),
            waiting_lane: render(include_str!("sql/waiting_lane.sql")),
            waiting_topic: render(include_str!("sql/waiting_topic.sql")),
            change_look: render(include_str!("sql/change_look.sql")),
            change_lock: render(include_str!("sql/change_lock.sql")),
            to_pending: render(include_str!("sql/to_pending.sql")),
            reschedule: render(include_str!("sql/reschedule.sql")),
            cancel: render(if shape.rejected_columns {
                include_str!("sql/cancel.sql")
            } else {
                include_str!("sql/cancel_older.sql")
            }),
            prune: render(include_str!("sql/prune.sql")),
            lane_next: render(include_str!("sql/lane_next.sql")),
            lane_lock: render(include_str!("sql/lane_lock.sql")),
            lane_guard: render(include_str!("sql/lane_guard.sql")),
            lane_sent: render(include_str!("sql/lane_sent.sql")),
        }
    }

    /// The text of a statement by the name of its file.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        let text = match name {
            "discover" => &self.discover,
            "peek_keys" => &self.peek_keys,
            "peek_rows" => &self.peek_rows,
            "claim_keys" => &self.claim_keys,
            "claim_rows" => &self.claim_rows,
            "claim_stream" => &self.claim_stream,
            "late_floor" => &self.late_floor,
            "poll" => &self.poll,
            "sources" => &self.sources,
            "settle_sent" => &self.settle_sent,
            "settle_unsent" => &self.settle_unsent,
            "settle_rejected" => &self.settle_rejected,
            "settled_already" => &self.settled_already,
            "requeue" => &self.requeue,
            "stale" => &self.stale,
            "retention" => &self.retention,
            "backlog" => &self.backlog,
            "heads" => &self.heads,
            "finished" => &self.finished,
            "table_health" => &self.table_health,
            "due" => &self.due,
            "count_sent" => &self.count_sent,
            "resume" => &self.resume,
            "ahead" => &self.ahead,
            "ahead_key" => &self.ahead_key,
            "waiting_source" => &self.waiting_source,
            "waiting_lane" => &self.waiting_lane,
            "waiting_topic" => &self.waiting_topic,
            "change_look" => &self.change_look,
            "change_lock" => &self.change_lock,
            "to_pending" => &self.to_pending,
            "reschedule" => &self.reschedule,
            "cancel" => &self.cancel,
            "prune" => &self.prune,
            "lane_next" => &self.lane_next,
            "lane_lock" => &self.lane_lock,
            "lane_guard" => &self.lane_guard,
            "lane_sent" => &self.lane_sent,
            _ => return None,
        };
        Some(text)
    }
}
