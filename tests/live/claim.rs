//! Claims against a plain reading of contract §3: on random tables, and in races that a barrier arranges.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use keiro_relay::domain::message::{Message, PgTime, Position};
use keiro_relay::domain::outcome::Rejection;
use keiro_relay::domain::pause::PausedRows;
use keiro_relay::domain::plan::Verdict;
use keiro_relay::store::{Claim, Store, StoreError};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use uuid::Uuid;

use crate::support::database::Table;
use crate::support::outbox::{Outbox, Row, created_at, id, keyed, row, seed, with};
use crate::support::random::{Kinds, TOPICS, draw_paused, one_of};
use crate::support::{LONG, run, wait_until_async};

/// More bytes than any batch here has.
const ALL_BYTES: usize = 1 << 30;

/// No row.
const NONE: [u64; 0] = [];

/// A claim that a test asks for.
#[derive(Debug, Clone)]
enum Ask {
    Keys { source: String, keys: Vec<String>, rows_max: Vec<i32>, bytes_max: usize, retry: bool },
    Rows { ids: Vec<Uuid>, bytes_max: usize, retry: bool },
    Stream { source: String, rows_max: usize, bytes_max: usize },
}

impl Ask {
    fn key(key: &str, rows_max: i32, retry: bool) -> Self {
        let (keys, rows_max) = (vec![key.to_owned()], vec![rows_max]);
        Self::Keys { source: "s".to_owned(), keys, rows_max, bytes_max: ALL_BYTES, retry }
    }

    fn stream(rows_max: usize) -> Self {
        Self::Stream { source: "s".to_owned(), rows_max, bytes_max: ALL_BYTES }
    }

    fn rows(numbers: impl IntoIterator<Item = u64>, retry: bool) -> Self {
        Self::Rows { ids: numbers.into_iter().map(id).collect(), bytes_max: ALL_BYTES, retry }
    }

    async fn of(&self, store: &Store, paused: &PausedRows) -> Result<Claim, StoreError> {
        match self {
            Self::Keys { source, keys, rows_max, bytes_max, retry } => {
                let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
                store.claim_keys(source, &keys, rows_max, *bytes_max, *retry, paused).await
            }
            Self::Rows { ids, bytes_max, retry } => store.claim_rows(ids, *bytes_max, *retry, paused).await,
            Self::Stream { source, rows_max, bytes_max } => {
                store.claim_stream(source, *rows_max, *bytes_max, paused).await
            }
        }
    }

    async fn numbers(&self, store: &Store) -> Vec<u64> {
        numbers(&self.of(store, &NOTHING).await.expect("a claim").messages)
    }

    /// What the contract lets this claim take of these rows, when nobody else holds any of them.
    fn allowed(&self, rows: &[Row], paused: &PausedRows) -> Vec<Uuid> {
        let mut taken: Vec<&Row> = Vec::new();
        let may_go = |row: &Row| {
            let key = row.key.as_ref();
            let held = paused.topics.contains(&row.destination) || key.is_some_and(|key| paused.keys.contains(key));
            row.is_claimable() && !held
        };
        let fits = |taken: &[&Row], bytes_max: usize| {
            taken.is_empty() || taken.iter().map(|row| row.payload_octets).sum::<usize>() < bytes_max
        };
        match self {
            Self::Keys { source, keys, rows_max, bytes_max, retry } => {
                for (key, rows_max) in keys.iter().zip(rows_max) {
                    let lane = rows
                        .iter()
                        .filter(|row| row.is_live() && row.source == *source && row.key.as_ref() == Some(key));
                    let ready = lane
                        .take(usize::try_from(*rows_max).expect("a limit"))
                        .take_while(|row| may_go(row) && (row.attempt_count <= 0 || *retry));
                    for row in ready {
                        if fits(&taken, *bytes_max) {
                            taken.push(row);
                        }
                    }
                }
            }
            Self::Rows { ids, bytes_max, retry } => {
                for row in rows.iter().filter(|row| ids.contains(&row.id())) {
                    let ready = may_go(row) && (row.attempt_count <= 0 || *retry);
                    if ready && fits(&taken, *bytes_max) {
                        taken.push(row);
                    }
                }
            }
            Self::Stream { source, rows_max, bytes_max } => {
                let lane = rows.iter().filter(|row| row.is_live() && row.source == *source).take(*rows_max);
                for row in lane.take_while(|row| may_go(row)) {
                    let alone = row.attempt_count > 0 || taken.first().is_some_and(|head| head.attempt_count > 0);
                    if (alone && !taken.is_empty()) || !fits(&taken, *bytes_max) {
                        break;
                    }
                    taken.push(row);
                }
            }
        }
        let mut taken: Vec<Position> = taken.iter().map(|row| row.position).collect();
        taken.sort_unstable();
        taken.iter().map(|position| position.outbox_id).collect()
    }

    /// Whether `earlier` holds back `later` under the policy of this claim (contract §3).
    fn same_lane(&self, earlier: &Row, later: &Row) -> bool {
        match self {
            Self::Keys { .. } => earlier.source == later.source && later.key.is_some() && earlier.key == later.key,
            Self::Rows { .. } => false,
            Self::Stream { .. } => earlier.source == later.source,
        }
    }

    fn draw(rng: &mut StdRng, kinds: &Kinds, rows: &[Row]) -> Self {
        let source = one_of(rng, &kinds.sources).to_owned();
        let bytes_max = one_of(rng, &[1, 2, 8, 101, 200, ALL_BYTES, ALL_BYTES]);
        match rng.random_range(0..10) {
            0..4 => {
                let keys: BTreeSet<&str> =
                    (0..rng.random_range(1..4)).map(|_| one_of(rng, &kinds.keys)).chain(["nobody has this"]).collect();
                let keys: Vec<String> = keys.into_iter().map(str::to_owned).collect();
                let rows_max = keys.iter().map(|_| rng.random_range(1..6)).collect();
                Self::Keys { source, keys, rows_max, bytes_max, retry: false }
            }
            4..6 => {
                let keys = vec![one_of(rng, &kinds.keys).to_owned()];
                Self::Keys { source, keys, rows_max: vec![1], bytes_max, retry: true }
            }
            6..8 => {
                let ids = rows.iter().filter(|_| rng.random_bool(0.3)).map(Row::id).chain([Uuid::nil()]).collect();
                Self::Rows { ids, bytes_max, retry: false }
            }
            8 if !rows.is_empty() => Self::Rows { ids: vec![one_of(rng, rows).id()], bytes_max, retry: true },
            _ => Self::Stream { source, rows_max: rng.random_range(1..8), bytes_max },
        }
    }
}

/// Nothing is paused.
const NOTHING: PausedRows = PausedRows { topics: Vec::new(), keys: Vec::new() };

/// The numbers of rows made by [`row`].
fn numbers(messages: &[Message]) -> Vec<u64> {
    messages.iter().map(|message| number(message.outbox_id)).collect()
}

fn number(outbox_id: Uuid) -> u64 {
    u64::try_from(outbox_id.as_u128() & 0xffff_ffff).expect("it was masked")
}

/// Rows as one reads them when a test has failed.
fn lines(rows: &[Row]) -> String {
    let rows = rows.iter().filter(|row| row.is_live());
    rows.map(|row| {
        let Row { source, key, status, attempt_count, due, payload_octets, .. } = row;
        let created_at = row.position.created_at.0;
        format!("{created_at} {} {source:?} {key:?} {status} {attempt_count} {due} {payload_octets}\n", row.id())
    })
    .collect()
}

/// Compares a claim with what the contract says of the rows before and after it.
#[track_caller]
fn judge(ask: &Ask, paused: &PausedRows, before: &[Row], claim: &Claim, after: &[Row]) {
    let claimed: Vec<Uuid> = claim.messages.iter().map(|message| message.outbox_id).collect();
    assert_eq!(claimed, ask.allowed(before, paused), "{ask:?} beside {paused:?} of\n{}", lines(before));

    for message in &claim.messages {
        let found = before.iter().find(|row| row.id() == message.outbox_id).expect("a row of the table");
        for earlier in before.iter().filter(|row| row.position < found.position && ask.same_lane(row, found)) {
            assert!(!earlier.is_live() || claimed.contains(&earlier.id()), "{earlier:?} was overtaken by {found:?}");
        }
        assert_eq!(message.attempt_count, found.attempt_count.saturating_add(1), "{found:?}");
        assert_eq!(message.updated_at, claim.messages[0].updated_at, "one claim has one stamp");
        assert_eq!(message.payload.len(), found.payload_octets);
        assert_eq!((message.position(), &message.message_key), (found.position, &found.key));
    }
    assert_eq!(before.len(), after.len());
    for (before, after) in before.iter().zip(after) {
        let Some(message) = claim.messages.iter().find(|message| message.outbox_id == before.id()) else {
            assert_eq!(before.text, after.text, "a row that was not claimed is left alone");
            continue;
        };
        assert_eq!(
            (after.status.as_str(), after.attempt_count, after.updated_at),
            ("publishing", message.attempt_count, message.updated_at)
        );
        assert_eq!(before.unclaimed_columns, after.unclaimed_columns);
    }
}

/// Random tables of one shape, each claimed from until little is left.
async fn random_tables(table: Table, tables: usize, prepare: &str) {
    const CLAIMS: usize = 7;
    let mut rng = StdRng::seed_from_u64(seed());
    let outbox = Outbox::fresh(table).await;
    outbox.execute(prepare).await;
    let mut claimed = 0;
    for _ in 0..tables {
        let kinds = Kinds::draw(&mut rng, table);
        let rows: Vec<_> = (0..rng.random_range(1..40)).map(|n| kinds.row(&mut rng, n)).collect();
        outbox.execute("truncate keiro.keiro_outbox").await;
        outbox.insert(&rows).await;
        let mut before = outbox.rows().await;
        for _ in 0..CLAIMS {
            let ask = Ask::draw(&mut rng, &kinds, &before);
            let paused = draw_paused(&mut rng, &TOPICS, &kinds.keys);
            let claim = match ask.of(&outbox.store, &paused).await {
                Ok(claim) => claim,
                Err(error) => panic!("{error} for {ask:?} of\n{}", lines(&before)),
            };
            let after = outbox.rows().await;
            judge(&ask, &paused, &before, &claim, &after);
            claimed += claim.messages.len();
            before = after;
        }
    }
    assert!(claimed > tables, "only {claimed} rows were claimed from {tables} tables");
}

#[test]
fn random_older_shared_tables_are_claimed_by_the_contract() {
    run(async || random_tables(Table::OlderShared, 60, "").await);
}

#[test]
fn random_newer_shared_tables_are_claimed_by_the_contract() {
    run(async || random_tables(Table::NewerShared, 60, "").await);
}

#[test]
fn random_lean_tables_are_claimed_by_the_contract() {
    run(async || random_tables(Table::Lean, 60, "").await);
}

/// Where a language's order, not the bytes', decides in the indexes.
#[test]
fn random_tables_with_a_language_of_their_own_are_claimed_by_the_contract() {
    const COLLATE: &str = "alter table keiro.keiro_outbox alter column source type text collate \"und-x-icu\", \
                           alter column message_key type text collate \"und-x-icu\"";
    run(async || {
        random_tables(Table::NewerShared, 30, COLLATE).await;
        random_tables(Table::Lean, 30, COLLATE).await;
    });
}

/// Without its indexes a claim is slower, never wrong.
#[test]
fn random_tables_without_indexes_are_claimed_by_the_contract() {
    const DROP: &str = "do $$ declare i text; begin
        for i in select c.oid::regclass::text from pg_class c join pg_index x on x.indexrelid = c.oid
            where x.indrelid = 'keiro.keiro_outbox'::regclass and not x.indisprimary and c.relname not like '%key' loop
          execute 'drop index ' || i;
        end loop; end $$";
    run(async || {
        random_tables(Table::NewerShared, 20, DROP).await;
        random_tables(Table::Lean, 20, DROP).await;
    });
}

#[test]
fn every_column_reaches_the_message() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let full = json!({
                "message_id": "msg_1", "destination": "topic-1", "message_key": "k", "event_type": "Happened",
                "schema_version": 2, "content_type": "application/json", "schema_registry": "registry",
                "schema_subject": "subject", "schema_version_ref": 3, "schema_id": 4, "schema_fingerprint": "print",
                "source_event_id": id(11), "source_global_position": 5, "causation_id": id(12),
                "correlation_id": id(13), "traceparent": "parent", "tracestate": "state",
                "payload_bytes": "\\x00ff10",                 "occurred_at": "2026-01-02 03:04:05.25+00", "attempt_count": 0, "last_error": "before",
            });
            outbox.insert(&[with(row(1), full), with(row(2), json!({ "occurred_at": "-infinity" }))]).await;
            // Here, so that no JSON library of ours rounds the number.
            outbox
                .execute(
                    r#"update keiro.keiro_outbox set attributes = '{"b": 1.50, "a": "ü"}' where message_id = 'msg_1'"#,
                )
                .await;
            let claim = outbox.store.claim_stream("s", 9, ALL_BYTES, &NOTHING).await.expect("a claim");
            let [full, bare] = claim.messages.as_slice() else { panic!("{claim:?}") };

            let texts = [&full.message_id, &full.source_name, &full.destination, &full.event_type, &full.content_type];
            assert_eq!(texts, ["msg_1", "s", "topic-1", "Happened", "application/json"]);
            let texts = [
                &full.message_key,
                &full.schema_registry,
                &full.schema_subject,
                &full.schema_fingerprint,
                &full.traceparent,
                &full.tracestate,
                &full.attributes,
                &full.last_error,
            ];
            let expected =
                ["k", "registry", "subject", "print", "parent", "state", r#"{"a": "ü", "b": 1.50}"#, "before"];
            assert_eq!(texts.map(Option::as_deref), expected.map(Some));
            let numbers = [full.schema_version_ref, full.schema_id, full.source_global_position];
            assert_eq!((full.schema_version, numbers), (2, [Some(3), Some(4), Some(5)]));
            let ids = [full.source_event_id, full.causation_id, full.correlation_id];
            assert_eq!(ids, [Some(id(11)), Some(id(12)), Some(id(13))]);
            assert_eq!(&full.payload[..], [0, 0xff, 0x10]);
            assert_eq!((full.outbox_id, full.attempt_count), (id(1), 1));
            assert_eq!(full.occurred_at, PgTime::from_unix_micros(1_767_323_045_250_000));
            assert_eq!(full.created_at, PgTime::from_unix_micros(1_767_322_800_000_001));

            let texts = [
                &bare.message_key,
                &bare.schema_registry,
                &bare.schema_subject,
                &bare.schema_fingerprint,
                &bare.traceparent,
                &bare.tracestate,
                &bare.attributes,
                &bare.last_error,
            ];
            assert_eq!(texts, [&None; 8]);
            assert_eq!(bare.occurred_at, PgTime::NEG_INFINITY);
        }
    });
}

/// A payload that only can be rejected is not read: a gigabyte would take the memory of everybody, or make every claim of its source fail.
#[test]
fn a_payload_over_the_limit_is_claimed_without_being_read() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let keyed = |n, payload: &str| with(row(n), json!({ "message_key": "k", "payload_bytes": payload }));
            outbox.insert(&[keyed(1, "\\x01"), keyed(2, ""), keyed(3, "\\x03")]).await;
            outbox
                .execute(
                    "update keiro.keiro_outbox set payload_bytes = convert_to(repeat('x', 2001), 'UTF8') \
                     where outbox_id = '01900000-0000-7000-8000-000000000002'",
                )
                .await;
            let store = outbox.another(|config| config.kafka.message_bytes_max = 2000);
            let seen = |claim: &Claim| -> Vec<(usize, Option<usize>)> {
                claim
                    .messages
                    .iter()
                    .map(|message| (message.payload.len(), message.payload_withheld.map(|withheld| withheld.octets)))
                    .collect()
            };
            for ask in [Ask::key("k", 9, false), Ask::stream(9), Ask::rows(1..=3, false)] {
                let claim = ask.of(&store, &NOTHING).await.expect("a claim");
                assert_eq!(seen(&claim), [(1, None), (0, Some(2001)), (1, None)], "{ask:?}");
                outbox.execute("update keiro.keiro_outbox set status = 'pending', attempt_count = 0").await;
            }
        }
    });
}

/// A row that was attempted before is claimed alone, so that ten crashes over one row do not kill its neighbours.
#[test]
fn attempted_rows_are_claimed_alone() {
    run(async || {
        for table in Table::ALL {
            let outbox = Outbox::fresh(table).await;
            let attempted = |n| with(keyed(n, "k"), json!({ "attempt_count": 1, "status": "failed" }));
            outbox.insert(&[keyed(1, "k"), keyed(2, "k"), attempted(3), keyed(4, "k"), keyed(5, "k")]).await;
            let store = &outbox.store;

            assert_eq!(Ask::rows([1, 3, 5], false).allowed(&outbox.rows().await, &NOTHING), [id(1), id(5)]);
            assert_eq!(Ask::key("k", 9, false).numbers(store).await, [1, 2], "an attempted row ends the run");
            outbox.execute("update keiro.keiro_outbox set status = 'dead' where outbox_id < '01900000-0000-7000-8000-000000000003'").await;
            assert_eq!(Ask::key("k", 9, false).numbers(store).await, NONE, "and at the head it is left to a retry");
            assert_eq!(Ask::rows(1..=5, false).of(store, &NOTHING).await.expect("a claim").messages.len(), 2);
            outbox.execute("update keiro.keiro_outbox set status = 'pending', attempt_count = 0 where attempt_count = 1 and status = 'publishing'").await;
            assert_eq!(Ask::stream(9).numbers(store).await, [3], "alone at the head of a stream");
            outbox
                .execute(
                    "update keiro.keiro_outbox set status = 'failed', attempt_count = 1 where status = 'publishing'",
                )
                .await;
            assert_eq!(Ask::key("k", 1, true).numbers(store).await, [3]);
            assert_eq!(Ask::key("k", 9, true).numbers(store).await, NONE, "its lane is in flight");
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Races

/// The number of the lock that holds a gated claim between its snapshot and its first lock on a row.
const GATE: &str = "7";

/// A view of the table, at every row of which a gated store's statements wait while somebody holds the gate.
const GATED_VIEW: &str = "create function keiro.gate() returns boolean language plpgsql volatile as $$ begin
      if current_setting('application_name') like 'keiro-relay/gated/%' then
        perform pg_advisory_lock_shared(7);
        perform pg_advisory_unlock_shared(7);
      end if;
      return true;
    end $$;
    create view keiro.gated_outbox as select * from keiro.keiro_outbox where keiro.gate()";

/// Somebody else's store, and one whose statements stop at the gate.
struct Race {
    outbox: Outbox,
    thief: Store,
    gated: Store,
}

impl Race {
    async fn on(table: Table) -> Self {
        let outbox = Outbox::fresh(table).await;
        outbox.execute(GATED_VIEW).await;
        let thief = outbox.another(|config| "thief".clone_into(&mut config.relay.instance));
        let gated = outbox.another(|config| {
            "gated".clone_into(&mut config.relay.instance);
            "gated_outbox".clone_into(&mut config.database.table);
        });
        Self { outbox, thief, gated }
    }

    /// Runs a claim whose snapshot is from before `meanwhile`, and whose locks are from after it.
    async fn claim(&self, ask: &Ask, paused: &PausedRows, meanwhile: impl AsyncFnOnce()) -> Claim {
        let holder = self.outbox.database.connect().await;
        holder.batch_execute(&format!("select pg_advisory_lock({GATE})")).await.expect("close the gate");
        let waiting = "select exists (select from pg_locks where locktype = 'advisory' and not granted and database = \
                       (select oid from pg_database where datname = current_database()))";
        let disturb = async {
            wait_until_async("the claim to reach the gate", LONG, async || {
                holder.query_one(waiting, &[]).await.expect(waiting).get(0)
            })
            .await;
            meanwhile().await;
            holder.batch_execute(&format!("select pg_advisory_unlock({GATE})")).await.expect("open the gate");
        };
        let (claim, ()) = tokio::join!(ask.of(&self.gated, paused), disturb);
        claim.expect("a claim")
    }

    /// Four rows of one key, due and never attempted.
    async fn refill(&self) {
        self.outbox.execute("truncate keiro.keiro_outbox").await;
        let rows: Vec<_> = (1..=4).map(|n| keyed(n, "k")).collect();
        self.outbox.insert(&rows).await;
    }

    /// Somebody else claims row `n` and, perhaps, settles it.
    async fn disturb(&self, n: u64, disturbance: &Disturbance) {
        let claim = self.thief.claim_rows(&[id(n)], ALL_BYTES, true, &NOTHING).await.expect("a claim");
        assert_eq!(numbers(&claim.messages), [n]);
        if let Some(verdict) = &disturbance.verdict {
            settle(&self.thief, &claim.messages, std::slice::from_ref(verdict)).await;
        }
        if disturbance.overdue {
            let backdate =
                "update keiro.keiro_outbox set next_attempt_at = '2026-01-01 00:00:00+00' where outbox_id = ";
            self.outbox.execute(&format!("{backdate} '{}'", id(n))).await;
        }
    }
}

async fn settle(store: &Store, messages: &[Message], verdicts: &[Verdict]) {
    let settled = store.settle(messages, verdicts, Instant::now() + LONG).await;
    assert!(settled.lost.is_empty() && settled.failed.is_none(), "{settled:?}");
}

fn failed(delay: Duration) -> Verdict {
    Verdict::Failed { error: "kafka.some_code: failed".to_owned(), delay }
}

fn returned(pause: Duration) -> Verdict {
    Verdict::Returned { error: "kafka.some_code: returned".to_owned(), pause }
}

fn skipped() -> Verdict {
    Verdict::Skipped { error: "skipped: behind another".to_owned() }
}

const HOUR: Duration = Duration::from_secs(3600);

/// What somebody else does to a row while a claim is between its snapshot and its locks.
struct Disturbance {
    what: &'static str,
    /// They claim it and settle it so.
    verdict: Option<Verdict>,
    /// It is due again at a time before the claim began: an operator's, or another clock's.
    overdue: bool,
    /// Whether it may be claimed after that as if nothing had happened.
    claimable: bool,
    /// Whether it may be claimed as a retry.
    retriable: bool,
}

fn disturbances() -> Vec<Disturbance> {
    let error = "kafka.some_code: failed".to_owned();
    let gone = |what, verdict| Disturbance { what, verdict, overdue: false, claimable: false, retriable: false };
    let dead = Verdict::Dead { error: error.clone() };
    let rejected = Verdict::Rejected(Rejection::new("kafka.some_code", "never"));
    let now = Duration::ZERO;
    vec![
        gone("claimed", None),
        gone("sent", Some(Verdict::Sent)),
        gone("dead", Some(dead)),
        gone("rejected", Some(rejected)),
        gone("failed, due later", Some(failed(HOUR))),
        gone("held", Some(Verdict::Held { error })),
        gone("returned, due later", Some(returned(HOUR))),
        // Due as of their statement, which is later than ours.
        gone("failed, due now", Some(failed(now))),
        gone("returned, due now", Some(returned(now))),
        gone("skipped", Some(skipped())),
        Disturbance { overdue: true, retriable: true, ..gone("failed, due before", Some(failed(now))) },
        Disturbance {
            overdue: true,
            claimable: true,
            retriable: true,
            ..gone("returned, due before", Some(returned(now)))
        },
    ]
}

/// Claims while row `n` is disturbed, for every table, disturbance and row.
async fn disturbed(rows: &[u64], ask: &Ask, expected: impl Fn(u64, &Disturbance) -> Vec<u64>) {
    for table in [Table::NewerShared, Table::Lean] {
        let race = Race::on(table).await;
        for disturbance in disturbances() {
            for &n in rows {
                race.refill().await;
                let claim = race.claim(ask, &NOTHING, async || race.disturb(n, &disturbance).await).await;
                let what = format!("row {n} {} on {table:?}", disturbance.what);
                assert_eq!(numbers(&claim.messages), expected(n, &disturbance), "{what}");
                for row in race.outbox.rows().await {
                    let Some(message) = claim.messages.iter().find(|message| message.outbox_id == row.id()) else {
                        continue;
                    };
                    let found = (row.status.as_str(), row.attempt_count, row.updated_at);
                    assert_eq!(found, ("publishing", message.attempt_count, message.updated_at), "{what}");
                    let retried = row.id() == id(n) && disturbance.retriable && !disturbance.claimable;
                    assert_eq!(row.attempt_count, if retried { 2 } else { 1 }, "{what}");
                }
            }
        }
    }
}

#[test]
fn a_key_that_changes_behind_the_snapshot_is_claimed_up_to_the_change() {
    run(async || {
        let expected = |n, found: &Disturbance| if found.claimable { (1..=4).collect() } else { (1..n).collect() };
        disturbed(&[1, 2, 3], &Ask::key("k", 9, false), expected).await;
    });
}

#[test]
fn a_stream_that_changes_behind_the_snapshot_is_claimed_up_to_the_change() {
    run(async || {
        let expected = |n, found: &Disturbance| if found.claimable { (1..=4).collect() } else { (1..n).collect() };
        disturbed(&[1, 2, 3], &Ask::stream(9), expected).await;
    });
}

#[test]
fn a_row_that_somebody_sends_to_a_paused_topic_behind_the_snapshot_ends_the_claim() {
    run(async || {
        let paused = PausedRows { topics: vec!["elsewhere".to_owned()], keys: Vec::new() };
        for table in [Table::NewerShared, Table::Lean] {
            let race = Race::on(table).await;
            for (ask, expected) in [
                (Ask::key("k", 9, false), vec![1]),
                (Ask::stream(9), vec![1]),
                (Ask::rows(1..=4, false), vec![1, 3, 4]),
            ] {
                race.refill().await;
                let redirect =
                    format!("update keiro.keiro_outbox set destination = 'elsewhere' where outbox_id = '{}'", id(2));
                let claim = race.claim(&ask, &paused, async || race.outbox.execute(&redirect).await).await;
                assert_eq!(numbers(&claim.messages), expected, "{ask:?} on {table:?}");
            }
        }
    });
}

#[test]
fn a_retry_that_changes_behind_the_snapshot_sees_the_change() {
    run(async || {
        let expected = |n, found: &Disturbance| if found.retriable { vec![n] } else { vec![] };
        disturbed(&[1], &Ask::key("k", 1, true), expected).await;
        disturbed(&[1], &Ask::rows([1], true), expected).await;
    });
}

#[test]
fn single_rows_that_change_behind_the_snapshot_are_left_out() {
    run(async || {
        let expected = |n, found: &Disturbance| (1..=4).filter(|m| found.claimable || *m != n).collect();
        disturbed(&[2], &Ask::rows(1..=4, false), expected).await;
    });
}

/// The claims a race is tried with, and whether they keep an order.
fn asks() -> [(Ask, bool); 3] {
    [(Ask::key("k", 9, false), true), (Ask::stream(9), true), (Ask::rows(1..=4, false), false)]
}

#[test]
fn a_row_that_is_locked_or_in_flight_holds_back_its_lane() {
    run(async || {
        for table in [Table::NewerShared, Table::Lean] {
            let race = Race::on(table).await;
            for (ask, ordered) in asks() {
                for n in 1..=4 {
                    let expected: Vec<u64> =
                        if ordered { (1..n).collect() } else { (1..=4).filter(|m| *m != n).collect() };
                    race.refill().await;
                    let other = race.outbox.database.connect().await;
                    let lock = "select from keiro.keiro_outbox where outbox_id = $1 for update";
                    other.batch_execute("begin").await.expect("begin");
                    other.query(lock, &[&id(n)]).await.expect(lock);
                    assert_eq!(ask.numbers(&race.thief).await, expected, "row {n} is locked, {ask:?} on {table:?}");
                    other.batch_execute("rollback").await.expect("rollback");

                    race.refill().await;
                    race.disturb(n, &disturbances()[0]).await;
                    assert_eq!(
                        ask.numbers(&race.outbox.store).await,
                        expected,
                        "row {n} is claimed, {ask:?} on {table:?}"
                    );
                }
            }
        }
    });
}

#[test]
fn of_two_claims_at_once_one_takes_the_lane() {
    run(async || {
        for table in [Table::NewerShared, Table::Lean] {
            let race = Race::on(table).await;
            for (ask, _) in asks() {
                race.refill().await;
                let late = race
                    .claim(&ask, &NOTHING, async || assert_eq!(ask.numbers(&race.thief).await, [1, 2, 3, 4], "{ask:?}"))
                    .await;
                assert_eq!(numbers(&late.messages), NONE, "{ask:?} on {table:?}");
                assert!(race.outbox.rows().await.iter().all(|row| row.attempt_count == 1));
            }
        }
    });
}

/// Deleted by hand behind the snapshot: nothing to claim, nothing to trip over.
#[test]
fn a_row_deleted_behind_the_snapshot_is_no_row() {
    run(async || {
        let race = Race::on(Table::NewerShared).await;
        for (ask, ordered) in asks() {
            race.refill().await;
            let delete = format!("delete from keiro.keiro_outbox where outbox_id = '{}'", id(2));
            let claim = race.claim(&ask, &NOTHING, async || race.outbox.execute(&delete).await).await;
            let expected: &[u64] = if ordered { &[1] } else { &[1, 3, 4] };
            assert_eq!(numbers(&claim.messages), expected, "{ask:?}");
        }
    });
}

/// A row whose transaction began early and commits late is published late, never skipped: before the rows that are left,
/// behind those that were visible without it.
#[test]
fn a_row_committed_late_is_claimed_next() {
    run(async || {
        for table in [Table::NewerShared, Table::Lean] {
            let race = Race::on(table).await;
            for (ask, _) in asks().into_iter().filter(|(_, ordered)| *ordered) {
                race.refill().await;
                race.outbox.execute("delete from keiro.keiro_outbox where message_id in ('m1', 'm3')").await;
                let other = race.outbox.database.connect().await;
                other.batch_execute("begin").await.expect("begin");
                crate::support::outbox::insert(&other, &[keyed(1, "k"), keyed(3, "k")]).await;

                let claim =
                    race.claim(&ask, &NOTHING, async || other.batch_execute("commit").await.expect("commit")).await;
                assert_eq!(numbers(&claim.messages), [2, 4], "{ask:?} on {table:?}");
                // Row 3 waits for row 2, which is in flight; row 1 waits for nobody.
                assert_eq!(ask.numbers(&race.outbox.store).await, [1], "{ask:?} on {table:?}");
                assert_eq!(ask.numbers(&race.outbox.store).await, NONE);
                settle(&race.gated, &claim.messages, &[Verdict::Sent, Verdict::Sent]).await;
                assert_eq!(ask.numbers(&race.outbox.store).await, NONE, "row 1 is in flight");
            }
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------
// Many at once

/// What the crowd keeps in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Keys,
    Source,
}

impl Order {
    /// The lane of a row, if it has one.
    fn lane(self, row: &Held) -> Option<String> {
        match self {
            Self::Keys => row.key.clone(),
            Self::Source => Some("all".to_owned()),
        }
    }

    /// Whether rows `e` and `c` share a lane, in SQL.
    fn same_lane(self) -> &'static str {
        match self {
            Self::Keys => "e.source = c.source and e.message_key = c.message_key",
            Self::Source => "e.source = c.source",
        }
    }

    /// A publisher that is not ours: claims by the contract's plain rules (§2 and §3), at most $1 candidates.
    fn foreign_claim(self) -> String {
        let same_lane = self.same_lane();
        format!(
            "with candidates as (
              select outbox_id, source, message_key, created_at from keiro.keiro_outbox
              where status in ('pending', 'failed') and next_attempt_at <= now()
              order by created_at, outbox_id limit $1 for update skip locked),
            ready as (
              select c.outbox_id from candidates c
              where not exists (
                select from keiro.keiro_outbox e
                where {same_lane} and (e.created_at, e.outbox_id) < (c.created_at, c.outbox_id)
                  and e.status not in ('sent', 'dead', 'rejected')
                  and not exists (select from candidates also where also.outbox_id = e.outbox_id)))
            update keiro.keiro_outbox k set status = 'publishing', attempt_count = attempt_count + 1, updated_at = now()
            where k.outbox_id = any(array(select outbox_id from ready))
            returning k.outbox_id, k.created_at, k.message_key, k.attempt_count"
        )
    }
}

/// What all workers of the crowd together know.
#[derive(Default)]
struct Ledger {
    /// Rows that somebody has claimed and not begun to settle.
    held: Mutex<BTreeSet<Uuid>>,
    /// Rows as they were sent, by lane.
    sent: Mutex<BTreeMap<Option<String>, Vec<Position>>>,
}

/// One claimed row, whoever claimed it.
#[derive(Debug, Clone)]
struct Held {
    position: Position,
    key: Option<String>,
}

impl Ledger {
    fn take(&self, who: &str, rows: &[Held]) {
        let mut held = self.held.lock().expect("the ledger");
        for row in rows {
            assert!(held.insert(row.position.outbox_id), "{who} claimed {row:?}, which somebody has in flight");
        }
    }

    fn give_back(&self, order: Order, rows: &[Held], outcomes: &[Option<bool>]) {
        let mut held = self.held.lock().expect("the ledger");
        let mut ledger = self.sent.lock().expect("the ledger");
        for (row, outcome) in rows.iter().zip(outcomes) {
            assert!(held.remove(&row.position.outbox_id));
            if *outcome == Some(true) {
                ledger.entry(order.lane(row)).or_default().push(row.position);
            }
        }
    }
}

/// Draws prefix, pivot and suffix of each lane: `Some(true)` sent, `Some(false)` failed, `None` skipped.
fn draw_outcomes(rng: &mut StdRng, order: Order, rows: &[Held]) -> Vec<Option<bool>> {
    let mut pivots: BTreeSet<Option<String>> = BTreeSet::new();
    rows.iter()
        .map(|row| {
            let lane = order.lane(row);
            if lane.is_some() && pivots.contains(&lane) {
                return None;
            }
            let sent = rng.random_bool(0.8);
            if !sent {
                pivots.insert(lane);
            }
            Some(sent)
        })
        .collect()
}

/// Fails when a row of the claim has an earlier row of its lane that is neither finished nor in the claim. Rows that were finished
/// stay so here, and nothing is inserted, so what is seen now was so when the claim was made.
async fn assert_nothing_overtaken(client: &tokio_postgres::Client, order: Order, who: &str, rows: &[Held]) {
    let query = format!(
        "select e.outbox_id from keiro.keiro_outbox e join keiro.keiro_outbox c on c.outbox_id = any($1)
        where {} and (e.created_at, e.outbox_id) < (c.created_at, c.outbox_id)
          and e.status not in ('sent', 'dead', 'rejected') and not e.outbox_id = any($1)",
        order.same_lane()
    );
    let ids: Vec<Uuid> = rows.iter().map(|row| row.position.outbox_id).collect();
    let overtaken = client.query(&query, &[&ids]).await.expect(&query);
    assert!(overtaken.is_empty(), "{who} claimed {rows:?} and overtook {overtaken:?}");
}

const CROWD_KEYS: [&str; 4] = ["a", "b", "c", "d"];
const CROWD_TOPICS: [&str; 3] = ["x", "y", "z"];
const CROWD_ATTEMPTS_MAX: i64 = 4;

/// A relay without a scheduler: asks for random lanes again and again until all rows are finished.
async fn crowd_relay(outbox: &Outbox, ledger: &Ledger, order: Order, seed: u64, keyless: &[Uuid]) {
    let mut rng = StdRng::seed_from_u64(seed);
    let who = format!("relay {seed}");
    let store = outbox.another(|_| ());
    let client = outbox.database.connect().await;
    while !finished(&client).await {
        let ask = match rng.random_range(0..4) {
            _ if order == Order::Source => Ask::stream(rng.random_range(1..9)),
            0 => Ask::key(one_of(&mut rng, &CROWD_KEYS), 1, true),
            1 => Ask::Rows {
                ids: keyless.iter().copied().filter(|_| rng.random_bool(0.2)).collect(),
                bytes_max: ALL_BYTES,
                retry: true,
            },
            _ => {
                let keys: BTreeSet<&str> = (0..3).map(|_| one_of(&mut rng, &CROWD_KEYS)).collect();
                let rows_max = keys.iter().map(|_| rng.random_range(1..7)).collect();
                let keys = keys.into_iter().map(str::to_owned).collect();
                Ask::Keys { source: "s".to_owned(), keys, rows_max, bytes_max: ALL_BYTES, retry: false }
            }
        };
        // Relays learn of a pause one after the other, so each believes what it likes.
        let paused = draw_paused(&mut rng, &CROWD_TOPICS, &CROWD_KEYS);
        let messages = ask.of(&store, &paused).await.expect("a claim").messages;
        let rows: Vec<Held> = messages
            .iter()
            .map(|message| Held { position: message.position(), key: message.message_key.clone() })
            .collect();
        ledger.take(&who, &rows);
        assert_nothing_overtaken(&client, order, &who, &rows).await;
        let outcomes = draw_outcomes(&mut rng, order, &rows);
        let verdicts: Vec<Verdict> = messages
            .iter()
            .zip(&outcomes)
            .map(|(message, outcome)| match outcome {
                None => skipped(),
                Some(true) => Verdict::Sent,
                Some(false) if message.attempt_count >= CROWD_ATTEMPTS_MAX => {
                    Verdict::Dead { error: "kafka.x".to_owned() }
                }
                Some(false) if rng.random_bool(0.1) => Verdict::Rejected(Rejection::new("kafka.x", "never")),
                Some(false) if rng.random_bool(0.3) => returned(Duration::ZERO),
                Some(false) => failed(Duration::ZERO),
            })
            .collect();
        ledger.give_back(order, &rows, &outcomes);
        settle(&store, &messages, &verdicts).await;
    }
}

async fn crowd_foreigner(outbox: &Outbox, ledger: &Ledger, order: Order, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let who = format!("foreigner {seed}");
    let foreign_claim = order.foreign_claim();
    let client = outbox.database.connect().await;
    while !finished(&client).await {
        let limit: i64 = rng.random_range(1..9);
        let claimed = client.query(&foreign_claim, &[&limit]).await.expect(&foreign_claim);
        let mut rows: Vec<(Held, i64)> = claimed
            .iter()
            .map(|row| {
                let position = Position { created_at: row.get("created_at"), outbox_id: row.get("outbox_id") };
                (Held { position, key: row.get("message_key") }, row.get("attempt_count"))
            })
            .collect();
        rows.sort_by_key(|(row, _)| row.position);
        let (rows, attempts): (Vec<Held>, Vec<i64>) = rows.into_iter().unzip();
        ledger.take(&who, &rows);
        assert_nothing_overtaken(&client, order, &who, &rows).await;
        let outcomes = draw_outcomes(&mut rng, order, &rows);
        ledger.give_back(order, &rows, &outcomes);
        // In one transaction, as the contract's own publisher does: a suffix must not be seen before its pivot.
        client.batch_execute("begin").await.expect("begin");
        for ((row, outcome), attempt) in rows.iter().zip(&outcomes).zip(attempts) {
            let set = match outcome {
                Some(true) => "status = 'sent', published_at = now(), last_error = null",
                None => "status = 'failed', attempt_count = greatest(attempt_count - 1, 0), next_attempt_at = now()",
                Some(false) if attempt >= CROWD_ATTEMPTS_MAX => "status = 'dead'",
                Some(false) => "status = 'failed', next_attempt_at = now()",
            };
            let mark = format!(
                "update keiro.keiro_outbox set {set}, updated_at = now() where outbox_id = $1 and status = 'publishing'"
            );
            assert_eq!(client.execute(&mark, &[&row.position.outbox_id]).await.expect(&mark), 1, "{who} lost {row:?}");
        }
        client.batch_execute("commit").await.expect("commit");
    }
}

async fn finished(client: &tokio_postgres::Client) -> bool {
    let query = "select not exists (select from keiro.keiro_outbox where status not in ('sent', 'dead', 'rejected'))";
    client.query_one(query, &[]).await.expect(query).get(0)
}

async fn crowd(table: Table, order: Order) {
    const ROWS: u64 = 160;
    let seed = seed();
    let mut rng = StdRng::seed_from_u64(seed);
    let outbox = Outbox::fresh(table).await;
    let rows: Vec<_> = (1..=ROWS)
        .map(|n| {
            // A fifth has no key; runs of rows share a created_at.
            let row = with(row(n), json!({ "created_at": created_at(n / 3) }));
            let key = (!rng.random_bool(0.2)).then(|| one_of(&mut rng, &CROWD_KEYS));
            with(row, json!({ "message_key": key, "destination": one_of(&mut rng, &CROWD_TOPICS) }))
        })
        .collect();
    outbox.insert(&rows).await;
    let keyless: Vec<Uuid> = outbox.rows().await.iter().filter(|row| row.key.is_none()).map(Row::id).collect();
    let ledger = Ledger::default();
    let crowd = async {
        tokio::join!(
            crowd_relay(&outbox, &ledger, order, seed, &keyless),
            crowd_relay(&outbox, &ledger, order, seed ^ 1, &keyless),
            crowd_relay(&outbox, &ledger, order, seed ^ 2, &keyless),
            crowd_foreigner(&outbox, &ledger, order, seed ^ 3),
            crowd_foreigner(&outbox, &ledger, order, seed ^ 4),
        )
    };
    tokio::time::timeout(LONG, crowd).await.expect("the crowd finishes every row");

    let sent = ledger.sent.into_inner().expect("the ledger");
    for (lane, positions) in sent.iter().filter(|(lane, _)| lane.is_some()) {
        assert!(positions.is_sorted(), "{lane:?} was sent out of order: {positions:?}");
    }
    let sent: usize = sent.values().map(Vec::len).sum();
    let marked = outbox.rows().await.iter().filter(|row| row.status == "sent").count();
    assert_eq!(sent, marked);
    assert!(marked > 100, "only {marked} of {ROWS} were sent");
}

#[test]
fn a_crowd_of_relays_and_foreign_publishers_keeps_every_key_in_order() {
    run(async || {
        crowd(Table::NewerShared, Order::Keys).await;
        crowd(Table::Lean, Order::Keys).await;
    });
}

#[test]
fn a_crowd_of_relays_and_foreign_publishers_keeps_a_source_in_order() {
    run(async || {
        crowd(Table::NewerShared, Order::Source).await;
        crowd(Table::Lean, Order::Source).await;
    });
}
