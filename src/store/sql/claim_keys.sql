-- KEYCLAIM: the first rows of several keys. Locks the claimed rows by primary key, in id order within the update; leans on the live key index.
-- $1 source, $2 text[] keys (distinct), $3 int[] rows of each at most, $4 rows in all, $5 bytes in all (the first row always fits),
-- $6 whether rows attempted before may be claimed (then one key, one row), $7 text[] paused topics, $8 text[] paused keys
--
-- Why a claimed row overtakes nothing its snapshot shows: run numbers a lane's first rows from its head, as far as every one of them is due; locked
-- keeps those that are locked by us and still due in their newest version; ready keeps rank n only when ranks 1..n are all locked. A row in publishing
-- has a rank and is never due, so a lane in flight yields nothing. A paused row is like one that is not due: the run ends before it.
--
-- Must: locked reads no CTE row by row. PostgreSQL 18.0 and 18.1 run a CTE again, and add its rows to those that were read already, when a row that is to
-- be locked has changed since the snapshot; a lane then shows ranks 1, 1, 3 and seems to have no gap. An array is read whole before the first lock.
with k as (
  select key, rows_max, ord from unnest($2::text[], $3::int[]) with ordinality as k(key, rows_max, ord)),
run as materialized (
  select ord, rn, outbox_id from (
    select k.ord, r.rn, r.outbox_id,
      coalesce(sum(r.bytes) over (order by k.ord, r.rn rows between unbounded preceding and 1 preceding), 0) as before
    from k cross join lateral (
      select rn, outbox_id, bytes from (
        select h.outbox_id, h.bytes, row_number() over w as rn,
          bool_and(h.status in ('pending', 'failed') and h.next_attempt_at <= statement_timestamp() and (h.attempt_count <= 0 or $6)
            and h.paused is not true) over w as due
        from (
          select o.outbox_id, o.created_at, o.status, o.next_attempt_at, o.attempt_count, octet_length(o.payload_bytes) as bytes,
            o.destination = any($7::text[]) or o.message_key = any($8::text[]) as paused from {table} o
          where o.source = $1 and o.message_key >= k.key and o.message_key <= k.key and {live}
          order by o.message_key, o.created_at, o.outbox_id limit k.rows_max) h
        window w as (order by h.created_at, h.outbox_id)) d
      where due) r
    limit $4) y
  where before < $5),
locked as materialized (
  select o.outbox_id from {table} o
  where o.outbox_id = any(array(select outbox_id from run))
    and (o.status || '') in ('pending', 'failed') and o.next_attempt_at <= statement_timestamp() and (o.attempt_count <= 0 or $6)
    and (o.destination = any($7::text[]) or o.message_key = any($8::text[])) is not true
  for update of o skip locked),
ready as materialized (
  select outbox_id from (
    select outbox_id, bool_and(ours) over (partition by ord order by rn) as gapless
    from (select ord, rn, outbox_id, outbox_id in (select outbox_id from locked) as ours from run) r) x
  where gapless),
updated as (
  update {table} kt set status = 'publishing', attempt_count = least(kt.attempt_count, 9223372036854775806) + 1, updated_at = statement_timestamp()
  where kt.outbox_id = any(array(select outbox_id from ready))
  returning kt.outbox_id, kt.message_id, kt.source, kt.destination, kt.message_key, kt.event_type, kt.schema_version, kt.content_type, kt.schema_registry,
    kt.schema_subject, kt.schema_version_ref, kt.schema_id, kt.schema_fingerprint, kt.source_event_id, kt.source_global_position, kt.causation_id,
    kt.correlation_id, kt.traceparent, kt.tracestate, {payload} as payload_bytes, octet_length(kt.payload_bytes) as payload_octets,
    kt.attributes::text as attributes, kt.occurred_at, kt.attempt_count, kt.last_error, kt.created_at, kt.updated_at)
select outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, schema_registry, schema_subject,
  schema_version_ref, schema_id, schema_fingerprint, source_event_id, source_global_position, causation_id, correlation_id, traceparent, tracestate,
  payload_bytes, payload_octets, attributes, occurred_at, attempt_count, last_error, created_at, updated_at
from updated order by created_at, outbox_id
