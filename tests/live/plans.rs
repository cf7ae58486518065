//! How the statements find their rows: by which indexes, and over how many pages, whatever the statistics say. Never how long it takes.
//!
//! An outbox is nearly always empty when its statistics are taken, and full when they matter.

use std::collections::BTreeSet;

use keiro_relay::domain::pause::PausedRows;
use keiro_relay::store::{Db, Dedicated, Profile};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::support::database::Table;
use crate::support::outbox::{Outbox, id, keyed, with};
use crate::support::store::settings;
use crate::support::{LONG, run, wait_until_async};

const ALL_BYTES: usize = 1 << 30;
/// Rows of the key that fails, rows that are dead: what a claim must not walk over.
const MANY: usize = 20_000;

/// Rows whose ids say nothing of their order, so that neighbours in an index are strangers in the table: $1 prefix, $2 source, $3 how many keys, $4 rows,
/// $5 status, $6 next_attempt_at, $7 published_at, $8 created_at of the first. The first row of some is a failure that is not due.
const LOAD: &str = "insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type,
      payload_bytes, occurred_at, created_at, status, attempt_count, next_attempt_at, published_at, updated_at)
    select md5($1 || n)::uuid, $1 || n, $2, 'topic', $1 || n % $3, 'Tested', 1, 'text/plain', convert_to(repeat('p', 200), 'UTF8'), now(),
      $8::text::timestamptz + n * interval '1 ms', case when head then 'failed' else $5 end, case when head then 3 else 0 end,
      case when head then '2999-01-01' else $6::text::timestamptz end, $7::text::timestamptz, '2026-01-01'
    from (select n, n = 1 and $1 in ('failing', 'halted') as head from generate_series(1, $4) n) r order by md5($1 || n)";

/// A table that was analysed when it was empty and has been filled since.
async fn filled(table: Table) -> Outbox {
    let outbox = Outbox::fresh(table).await;
    outbox.execute("alter table keiro.keiro_outbox set (autovacuum_enabled = off); analyze keiro.keiro_outbox").await;
    let (first, then) = ("2026-01-01", "2026-01-02");
    let far = if table == Table::Lean { "9999-12-31" } else { first };
    let load = async |name: &str, source: &str, keys: i32, rows: usize, status: &str, created_at: &str| {
        let due = if status == "dead" { far } else { first };
        let published_at = (status == "sent").then_some(first);
        let rows = i32::try_from(rows).expect("few rows");
        outbox
            .client
            .execute(LOAD, &[&name, &source, &keys, &rows, &status, &due, &published_at, &created_at])
            .await
            .expect(LOAD);
    };
    load("failing", "s", 1, MANY, "pending", first).await;
    load("dead", "s", 200, MANY, "dead", first).await;
    load("key", "s", 200, 4000, "pending", then).await;
    load("gone", "stream", 10, MANY, "dead", first).await;
    load("stream", "stream", 10, 2000, "pending", then).await;
    load("halted", "halted", 10, 5000, "pending", first).await;
    load("stale", "stuck", 10, 2000, "publishing", first).await;
    load("sent", "done", 10, 5000, "sent", first).await;
    outbox
}

/// What EXPLAIN (ANALYZE, BUFFERS) says of one run, which is then undone.
struct Run {
    indexes: BTreeSet<String>,
    /// Nodes that read the table otherwise.
    other_scans: Vec<String>,
    rows: u64,
    buffers: u64,
    text: String,
}

fn walk(node: &Value, run: &mut Run) {
    if let Some(index) = node["Index Name"].as_str() {
        run.indexes.insert(index.to_owned());
    }
    let kind = node["Node Type"].as_str().expect("a node");
    if kind.contains("Bitmap") || (kind.contains("Seq Scan") && node["Relation Name"] == "keiro_outbox") {
        run.other_scans.push(kind.to_owned());
    }
    for child in node["Plans"].as_array().into_iter().flatten() {
        walk(child, run);
    }
}

struct Explainer {
    session: Dedicated,
    outbox: Outbox,
    /// For messages.
    case: String,
}

impl Explainer {
    /// A session as the relay's own are.
    async fn on(outbox: Outbox, case: &str) -> Self {
        let db = Db::new(&settings(outbox.database.url()), "plans", "00000000").expect("a pool");
        let (session, _) = db.dedicated().await.expect("a session");
        Self { session, outbox, case: case.to_owned() }
    }

    /// Runs a statement of the store with these arguments, as SQL writes them.
    async fn explain(&self, name: &str, types: &str, arguments: &str) -> Run {
        let text = self.outbox.store.statement(name).expect("a statement of the store");
        let prepare = format!("begin; prepare explained ({types}) as {text}");
        self.session.batch(&prepare, LONG).await.expect(name);
        let explain = format!("explain (analyze, buffers, timing off, format json) execute explained ({arguments})");
        let found = self.session.query(&explain, &[], LONG).await.expect(name);
        self.session.batch("rollback; deallocate explained", LONG).await.expect("rollback");
        let explained: Value = found[0].get(0);
        let root = &explained[0]["Plan"];
        let count = |what: &str| root[what].as_f64().expect(what);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "counts")]
        let mut run = Run {
            indexes: BTreeSet::new(),
            other_scans: Vec::new(),
            rows: count("Actual Rows") as u64,
            buffers: (count("Shared Hit Blocks") + count("Shared Read Blocks")) as u64,
            text: format!("{explained:#}"),
        };
        walk(root, &mut run);
        run
    }

    /// Fails unless the statement uses exactly these indexes, returns so many rows, and reads at most so many pages.
    async fn expect(
        &self,
        (name, types, arguments): (&str, &str, &str),
        indexes: &[&str],
        rows: u64,
        buffers_max: u64,
    ) {
        let run = self.explain(name, types, arguments).await;
        let indexes = indexes.iter().map(|index| (*index).to_owned()).collect();
        let case = &self.case;
        println!("{case}: {name}: {} rows, {} buffers", run.rows, run.buffers);
        assert_eq!((&run.indexes, &run.other_scans), (&indexes, &vec![]), "{case}: {name}\n{}", run.text);
        assert_eq!(run.rows, rows, "{case}: {name}\n{}", run.text);
        assert!(run.buffers <= buffers_max, "{case}: {name} read {} pages\n{}", run.buffers, run.text);
    }

    async fn ids(&self, source: &str, rows: i64) -> String {
        let query = "select coalesce(array_agg(outbox_id order by outbox_id), '{}')::text from \
                     (select outbox_id from keiro.keiro_outbox where source = $1 and status <> 'dead' order by message_id limit $2) x";
        self.outbox.client.query_one(query, &[&source, &rows]).await.expect(query).get(0)
    }
}

/// `'{x,x,…}'`
fn repeated(value: &str, times: usize) -> String {
    format!("'{{{}}}'", vec![value; times].join(","))
}

async fn check(explainer: &Explainer, profile: Profile) {
    let lean = profile == Profile::Lean;
    let [source, key, sent, finished, message] = match profile {
        Profile::Lean => [
            "keiro_relay_keiro_outbox_source_order_idx",
            "keiro_relay_keiro_outbox_key_order_idx",
            "keiro_relay_keiro_outbox_sent_idx",
            "keiro_relay_keiro_outbox_far_idx",
            "keiro_relay_keiro_outbox_message_id_key",
        ],
        Profile::Shared => [
            "keiro_outbox_source_order_idx",
            "keiro_outbox_head_of_line_idx",
            "keiro_outbox_sent_gc_idx",
            "keiro_outbox_pending_idx",
            "keiro_outbox_source_message_id_key",
        ],
    };
    let primary = "keiro_outbox_pkey";
    // Of a claimed row: an update that changes every index, or none.
    let row_buffers = if lean { 40 } else { 80 };

    // What is paused: nothing that is here.
    let none = "'{elsewhere}', '{nobody}'";

    let keys: Vec<String> = (0..32).map(|n| format!("key{n}")).collect();
    let keys = format!("'{{{}}}'", keys.join(","));
    let claim = ("claim_keys", "text, text[], int[], bigint, bigint, bool, text[], text[]");
    let arguments = format!("'s', {keys}, {}, 512, {ALL_BYTES}, false, {none}", repeated("16", 32));
    explainer.expect((claim.0, claim.1, &arguments), &[key, primary], 512, 512 * row_buffers).await;
    let arguments = format!("'s', '{{key7}}', '{{1}}', 1, {ALL_BYTES}, true, {none}");
    explainer.expect((claim.0, claim.1, &arguments), &[key, primary], 1, 100).await;
    // The failing key itself: as far as was asked, not as far as it goes.
    let arguments = format!("'s', '{{failing0}}', '{{16}}', 16, {ALL_BYTES}, false, {none}");
    explainer.expect((claim.0, claim.1, &arguments), &[key, primary], 0, 100).await;

    let claim = ("claim_stream", "text, bigint, bigint, text[], text[]");
    let arguments = format!("'stream', 500, {ALL_BYTES}, {none}");
    explainer.expect((claim.0, claim.1, &arguments), &[source, primary], 500, 500 * row_buffers).await;
    let arguments = format!("'halted', 500, {ALL_BYTES}, {none}");
    explainer.expect((claim.0, claim.1, &arguments), &[source, primary], 0, 500 * 4).await;

    let ids = explainer.ids("stream", 100).await;
    let arguments = format!("'{ids}', {ALL_BYTES}, false, {none}");
    explainer
        .expect(("claim_rows", "uuid[], bigint, bool, text[], text[]", &arguments), &[primary], 100, 100 * row_buffers)
        .await;

    let nil = Uuid::nil();
    let position = "text, timestamptz, uuid, bigint, text[], text[]";
    let arguments = format!("'s', '-infinity', '{nil}', 2000, {none}");
    explainer.expect(("discover", position, &arguments), &[source], 2000, 2000 * 3).await;
    // Behind what the cursor has passed.
    let arguments = format!("'s', '2026-01-02', '{nil}', 2000, {none}");
    explainer.expect(("discover", position, &arguments), &[source], 2000, 2000 * 3).await;
    let arguments = format!("'stuck', '-infinity', '{nil}', 1000, 300000000");
    explainer.expect(("stale", "text, timestamptz, uuid, bigint, bigint", &arguments), &[source], 1, 1000 * 3).await;
    explainer
        .expect(("heads", "text, bigint, text[], text[]", &format!("'s', 100, {none}")), &[source], 100, 100 * 4)
        .await;
    explainer.expect(("backlog", "text, bigint", "'s', 1000"), &[source], 2, 1000 * 3).await;
    explainer.expect(("due", "text, bigint", "'stream', 1000"), &[source], 1, 1000 * 6).await;
    explainer
        .expect(("peek_keys", "text, text[], text[], text[]", &format!("'s', {keys}, {none}")), &[key], 32, 32 * 10)
        .await;
    explainer
        .expect(("peek_rows", "uuid[], text[], text[]", &format!("'{ids}', {none}")), &[primary], 100, 100 * 10)
        .await;

    let arguments = format!("'{{s,stream,nobody}}', {}, {}", repeated("2026-01-01", 3), repeated(&nil.to_string(), 3));
    explainer.expect(("poll", "text[], timestamptz[], uuid[]", &arguments), &[source], 2, 60).await;
    explainer.expect(("sources", "bigint", "1000"), &[message], 5, 100).await;
    explainer.expect(("count_sent", "text, bigint", "'done', 1000"), &[message], 1, 1000 * 4).await;
    explainer.expect(("finished", "bigint", "100000"), &[finished], 2, MANY as u64 * 2 * 2).await;

    let arguments = "3600000000, 1000, '-infinity'";
    explainer.expect(("retention", "bigint, bigint, timestamptz", arguments), &[sent, primary], 1, 1000 * 40).await;
    let ids = explainer.ids("stuck", 100).await;
    explainer
        .expect(("requeue", "uuid[], bigint, bigint", &format!("'{ids}', 300000000, 10")), &[primary], 100, 100 * 80)
        .await;
    let stamp = "'2026-01-01'";
    let attempts = repeated("0", 100);
    let settle = "uuid[], bigint[], timestamptz";
    let arguments = format!("'{ids}', {attempts}, {stamp}");
    explainer.expect(("settle_sent", settle, &arguments), &[primary], 100, 100 * 80).await;
    let text = repeated("a.b", 100);
    let types = format!("{settle}, text[], text[], bigint[], int[]");
    let arguments =
        format!("'{ids}', {attempts}, {stamp}, {}, {text}, {attempts}, {attempts}", repeated("failed", 100));
    explainer.expect(("settle_unsent", &types, &arguments), &[primary], 100, 100 * 80).await;
    let arguments = format!("'{ids}', {attempts}, {stamp}, {text}, {text}");
    explainer
        .expect(("settle_rejected", &format!("{settle}, text[], text[]"), &arguments), &[primary], 100, 100 * 80)
        .await;
    let arguments = format!("'{ids}', {attempts}, '2025-01-01', {}", repeated("publishing", 100));
    explainer.expect(("settled_already", &format!("{settle}, text[]"), &arguments), &[primary], 100, 100 * 10).await;

    // What operators do.
    let waiting = explainer.ids("stream", 100).await;
    let arguments = format!("'{waiting}', 0, '{{pending,failed}}'");
    explainer.expect(("change_lock", "uuid[], bigint, text[]", &arguments), &[primary], 100, 100 * 10).await;
    explainer.expect(("change_look", "uuid[], bigint", &format!("'{waiting}', 0")), &[primary], 100, 100 * 10).await;
    let arguments = format!("'{ids}', '{{publishing}}', false, null, 0");
    let types = "uuid[], text[], bool, timestamptz, bigint";
    explainer.expect(("to_pending", types, &arguments), &[primary], 100, 100 * 80).await;
    let arguments = format!("'{waiting}', null, 1000000");
    explainer.expect(("reschedule", "uuid[], timestamptz, bigint", &arguments), &[primary], 100, 100 * 80).await;
    explainer.expect(("cancel", "uuid[], text", &format!("'{waiting}', 'x'")), &[primary], 100, 100 * 80).await;
    explainer.expect(("lane_lock", "uuid[]", &format!("'{waiting}'")), &[primary], 100, 100 * 10).await;
    let sent_ids = explainer.ids("done", 100).await;
    let arguments = format!("'{sent_ids}', '{{sent}}'");
    explainer.expect(("prune", "uuid[], text[]", &arguments), &[primary], 100, 100 * 20).await;
    let arguments =
        format!("{}, {}, {keys}, {}", repeated(&nil.to_string(), 32), repeated("s", 32), repeated("2026-01-01", 32));
    let types = "uuid[], text[], text[], timestamptz[]";
    explainer.expect(("lane_next", types, &arguments), &[source, key], 32, 32 * 10).await;
    let arguments = format!("'infinity', '-infinity', 1000, {}, {keys}", repeated("s", 32));
    let types = "timestamptz, timestamptz, bigint, text[], text[]";
    explainer.expect(("lane_sent", types, &arguments), &[sent], 1, 1000 * 3).await;
}

async fn plans(table: Table) {
    let outbox = filled(table).await;
    let profile = outbox.shape.profile;
    let mut explainer = Explainer::on(outbox, &format!("{profile}, statistics of the empty table")).await;
    check(&explainer, profile).await;
    explainer.outbox.execute("analyze keiro.keiro_outbox").await;
    explainer.case = format!("{profile}, fresh statistics");
    check(&explainer, profile).await;
}

#[test]
fn shared_plans_lean_on_the_promised_indexes_whatever_the_statistics_say() {
    run(async || plans(Table::NewerShared).await);
}

#[test]
fn lean_plans_lean_on_the_promised_indexes_whatever_the_statistics_say() {
    run(async || plans(Table::Lean).await);
}

/// On an older table the live indexes' predicates lack a word that the statements have.
#[test]
fn an_older_tables_indexes_serve_too() {
    run(async || {
        let outbox = Outbox::fresh(Table::OlderShared).await;
        outbox.insert(&[keyed(1, "k"), keyed(2, "k")]).await;
        let explainer = Explainer::on(outbox, "older").await;
        let arguments = format!("'s', '{{k}}', '{{16}}', 16, {ALL_BYTES}, false, '{{}}', '{{}}'");
        let claim = ("claim_keys", "text, text[], int[], bigint, bigint, bool, text[], text[]", arguments.as_str());
        explainer.expect(claim, &["keiro_outbox_head_of_line_idx", "keiro_outbox_pkey"], 2, 200).await;
        let arguments = format!("'s', 16, {ALL_BYTES}, '{{}}', '{{}}'");
        let claim = ("claim_stream", "text, bigint, bigint, text[], text[]", arguments.as_str());
        explainer.expect(claim, &["keiro_outbox_source_order_idx", "keiro_outbox_pkey"], 2, 200).await;
    });
}

/// A lean claim touches no index: that is what the profile is for. Its fillfactor leaves room for every row's second version.
#[test]
fn lean_claims_are_hot() {
    const ROWS: i64 = 600;
    run(async || {
        let outbox = Outbox::fresh(Table::Lean).await;
        let sources = ["keys", "stream", "rows"];
        let rows: Vec<_> = (1..=600)
            .zip(sources.iter().cycle())
            .map(|(n, source)| with(keyed(n, &format!("k{}", n % 20)), json!({ "source": source })))
            .collect();
        outbox.insert(&rows).await;
        let relay = outbox.another(|_| ());
        let keys: Vec<String> = (0..20).map(|n| format!("k{n}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let none = PausedRows::default();
        let claims = [
            relay.claim_keys("keys", &keys, &[10; 20], ALL_BYTES, false, &none).await,
            relay.claim_stream("stream", 200, ALL_BYTES, &none).await,
            relay
                .claim_rows(&(1..=600).filter(|n| n % 3 == 0).map(id).collect::<Vec<_>>(), ALL_BYTES, false, &none)
                .await,
        ];
        assert_eq!(claims.map(|claim| claim.expect("a claim").messages.len()), [200; 3]);
        // What a session counted is written when it ends.
        drop(relay);
        let counted = "select n_tup_upd, n_tup_hot_upd from pg_stat_user_tables where relname = 'keiro_outbox'";
        let mut found = (0, 0);
        wait_until_async("the counters of sessions that have ended", LONG, async || {
            let row = outbox.client.query_one(counted, &[]).await.expect(counted);
            found = (row.get(0), row.get(1));
            found.0 >= ROWS
        })
        .await;
        assert_eq!(found, (ROWS, ROWS), "updates, HOT updates");
    });
}
