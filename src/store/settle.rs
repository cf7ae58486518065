//! Settle: the verdicts of one claim → the table, fenced by the claim.
//!
//! Nothing here ever touches a row that is no longer ours: outbox_id, attempt_count and updated_at must be what the claim returned.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use tokio_postgres::types::Type;
use uuid::Uuid;

use super::maintenance::micros;
use super::{ErrorKind, Store, StoreError};
use crate::domain::message::{Message, PgTime};
use crate::domain::outcome::{is_rejection_code, last_error, rejection_detail};
use crate::domain::plan::Verdict;

/// Pause before a settlement is tried again; doubles up to the maximum.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);
/// A try gets this long even when it begins late: the fence makes it harmless, and the rows may still be ours.
const TRY_MIN: Duration = Duration::from_secs(1);

/// What a settlement did.
#[derive(Debug, Default)]
pub struct Settled {
    /// Rows that were no longer ours: somebody requeued or settled them meanwhile.
    pub lost: Vec<Uuid>,
    /// Rows whose verdict could not be written, and the first reason: they wait for their lease to run out.
    pub failed: Option<(StoreError, Vec<Uuid>)>,
}

/// One row's part in a statement.
struct Change<'a> {
    id: Uuid,
    attempt: i64,
    verdict: &'a Verdict,
}

/// Which statement a verdict belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Sent,
    Unsent,
    Rejected,
}

impl Verb {
    fn of(verdict: &Verdict, has_rejected: bool) -> Self {
        match verdict {
            Verdict::Sent => Self::Sent,
            Verdict::Rejected(_) if has_rejected => Self::Rejected,
            // An older table has no `rejected`: such a row is dead there (contract §1).
            Verdict::Rejected(_)
            | Verdict::Failed { .. }
            | Verdict::Held { .. }
            | Verdict::Dead { .. }
            | Verdict::Skipped { .. }
            | Verdict::Returned { .. } => Self::Unsent,
        }
    }
}

impl Store {
    /// Writes the verdicts of one claim; `verdicts[i]` belongs to `messages[i]`.
    ///
    /// Tried again after a lost connection, a deadlock, a serialisation failure or a lost permission until `give_up_at`: from then
    /// on the rows wait for their lease to run out. Sent rows go first, so that a crash in between costs the fewest duplicates. An
    /// error that one kind of verdict meets keeps no other from being written.
    pub async fn settle(&self, messages: &[Message], verdicts: &[Verdict], give_up_at: Instant) -> Settled {
        assert_eq!(messages.len(), verdicts.len(), "one verdict per claimed row");
        let mut settled = Settled::default();
        let Some(stamp) = messages.first().map(|message| message.updated_at) else { return settled };
        // Asked once: the newer columns may appear between two statements, and every row belongs to exactly one of them.
        let has_rejected = self.has_rejected();
        for verb in [Verb::Sent, Verb::Unsent, Verb::Rejected] {
            let mut changes: Vec<Change<'_>> = messages
                .iter()
                .zip(verdicts)
                .filter(|(_, verdict)| Verb::of(verdict, has_rejected) == verb)
                .map(|(message, verdict)| Change { id: message.outbox_id, attempt: message.attempt_count, verdict })
                .collect();
            if changes.is_empty() {
                continue;
            }
            changes.sort_by_key(|change| change.id);
            let ids = changes.iter().map(|change| change.id);
            if let Some((_, failed)) = &mut settled.failed
                && Instant::now() + RETRY_PAUSE_MAX >= give_up_at
            {
                failed.extend(ids);
                continue;
            }
            match (self.settle_until(verb, &changes, stamp, give_up_at).await, &mut settled.failed) {
                (Ok(done), _) => settled.lost.extend(ids.filter(|id| !done.contains(id))),
                (Err(error), None) => settled.failed = Some((error, ids.collect())),
                (Err(_), Some((_, failed))) => failed.extend(ids),
            }
        }
        settled
    }

    /// Runs one statement until it is answered; returns the rows that carry their verdict.
    async fn settle_until(
        &self,
        verb: Verb,
        changes: &[Change<'_>],
        stamp: PgTime,
        give_up_at: Instant,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let mut pause = RETRY_PAUSE_MIN;
        let mut answer_lost = false;
        loop {
            // Whoever waits for us must not wait for a lock or a dead connection longer than this settlement is worth.
            let bound = self.bound.min(give_up_at.saturating_duration_since(Instant::now()).max(TRY_MIN));
            let attempt = async {
                let mut done = self.settle_once(verb, changes, stamp, bound).await?;
                if answer_lost && done.len() < changes.len() {
                    done.extend(self.settled_already(verb, changes, stamp, bound).await?);
                }
                Ok::<_, StoreError>(done)
            };
            match attempt.await {
                Ok(done) => return Ok(done),
                Err(error) => {
                    let again = match error.kind() {
                        ErrorKind::Transient | ErrorKind::Auth => {
                            answer_lost = true;
                            true
                        }
                        // What a person took away (a permission, the table's name) a person may give back in time, and rows that
                        // were acknowledged would otherwise go out twice.
                        ErrorKind::Serialization | ErrorKind::Mismatch => true,
                        ErrorKind::Fatal => false,
                    };
                    if !again || Instant::now() + pause >= give_up_at {
                        return Err(error);
                    }
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_PAUSE_MAX);
                }
            }
        }
    }

    async fn settle_once(
        &self,
        verb: Verb,
        changes: &[Change<'_>],
        stamp: PgTime,
        bound: Duration,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let statements = self.statements()?;
        let ids: Vec<Uuid> = changes.iter().map(|change| change.id).collect();
        let attempts: Vec<i64> = changes.iter().map(|change| change.attempt).collect();
        let rows = match verb {
            Verb::Sent => {
                self.query_within(
                    bound,
                    &statements.settle_sent,
                    &[(&ids, Type::UUID_ARRAY), (&attempts, Type::INT8_ARRAY), (&stamp, Type::TIMESTAMPTZ)],
                )
                .await?
            }
            Verb::Unsent => {
                let unsent: Vec<Unsent> = changes.iter().map(|change| Unsent::of(change.verdict)).collect();
                let status: Vec<&str> = unsent.iter().map(|unsent| unsent.status).collect();
                let errors: Vec<&str> = unsent.iter().map(|unsent| unsent.error.as_str()).collect();
                let delays: Vec<i64> = unsent.iter().map(|unsent| unsent.delay_micros).collect();
                let returned: Vec<i32> = unsent.iter().map(|unsent| i32::from(unsent.attempt_returned)).collect();
                self.query_within(
                    bound,
                    &statements.settle_unsent,
                    &[
                        (&ids, Type::UUID_ARRAY),
                        (&attempts, Type::INT8_ARRAY),
                        (&stamp, Type::TIMESTAMPTZ),
                        (&status, Type::TEXT_ARRAY),
                        (&errors, Type::TEXT_ARRAY),
                        (&delays, Type::INT8_ARRAY),
                        (&returned, Type::INT4_ARRAY),
                    ],
                )
                .await?
            }
            Verb::Rejected => {
                let (mut codes, mut details) = (Vec::new(), Vec::new());
                for change in changes {
                    if let Verdict::Rejected(rejection) = change.verdict {
                        // A foreign publisher's text must not break the checks of the table, and its neighbours with it.
                        let code = rejection.code.as_str();
                        codes.push(if is_rejection_code(code) { code } else { "publisher.rejected" });
                        details.push(rejection_detail(&rejection.detail));
                    }
                }
                self.query_within(
                    bound,
                    &statements.settle_rejected,
                    &[
                        (&ids, Type::UUID_ARRAY),
                        (&attempts, Type::INT8_ARRAY),
                        (&stamp, Type::TIMESTAMPTZ),
                        (&codes, Type::TEXT_ARRAY),
                        (&details, Type::TEXT_ARRAY),
                    ],
                )
                .await?
            }
        };
        rows.iter().map(|row| Ok(row.try_get("outbox_id")?)).collect()
    }

    /// Rows that an earlier try settled although its answer was lost.
    async fn settled_already(
        &self,
        verb: Verb,
        changes: &[Change<'_>],
        stamp: PgTime,
        bound: Duration,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let statements = self.statements()?;
        let ids: Vec<Uuid> = changes.iter().map(|change| change.id).collect();
        let mut attempts = Vec::new();
        let mut status = Vec::new();
        for change in changes {
            let (after, wanted) = match verb {
                Verb::Sent => (change.attempt, "sent"),
                Verb::Rejected => (change.attempt, "rejected"),
                Verb::Unsent => {
                    let unsent = Unsent::of(change.verdict);
                    ((change.attempt - i64::from(unsent.attempt_returned)).max(0), unsent.status)
                }
            };
            attempts.push(after);
            status.push(wanted);
        }
        let rows = self
            .query_within(
                bound,
                &statements.settled_already,
                &[
                    (&ids, Type::UUID_ARRAY),
                    (&attempts, Type::INT8_ARRAY),
                    (&stamp, Type::TIMESTAMPTZ),
                    (&status, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        rows.iter().map(|row| Ok(row.try_get("outbox_id")?)).collect()
    }
}

/// What the statement for rows that were not sent writes.
struct Unsent {
    status: &'static str,
    error: String,
    /// Below 0: held.
    delay_micros: i64,
    attempt_returned: bool,
}

impl Unsent {
    fn of(verdict: &Verdict) -> Self {
        let failed = |error: &str, delay: Duration, attempt_returned| Self {
            status: "failed",
            error: last_error(error),
            delay_micros: micros(delay),
            attempt_returned,
        };
        match verdict {
            Verdict::Failed { error, delay } => failed(error, *delay, false),
            Verdict::Skipped { error } => failed(error, Duration::ZERO, true),
            Verdict::Returned { error, pause } => failed(error, *pause, true),
            Verdict::Held { error } => Self { delay_micros: -1, ..failed(error, Duration::ZERO, false) },
            Verdict::Dead { error } => Self { status: "dead", ..failed(error, Duration::ZERO, false) },
            Verdict::Rejected(rejection) => {
                let error = format!("rejected: {}: {}", rejection.code, rejection.detail);
                Self { status: "dead", ..failed(&error, Duration::ZERO, false) }
            }
            Verdict::Sent => unreachable!("a sent row has a statement of its own"),
        }
    }
}
