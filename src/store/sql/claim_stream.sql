-- STREAMCLAIM: the first rows of a whole source. Locks the claimed rows by primary key; leans on the live source index.
-- $1 source, $2 rows, $3 bytes (the first row always fits), $4 text[] paused topics, $5 text[] paused keys
--
-- As KEYCLAIM, with the source as its one lane. A head that was attempted before is claimed alone; an attempted row at a later rank ends the run.
with run as materialized (
  select rn, outbox_id, attempted from (
    select rn, outbox_id, attempted, before, bool_and(due and (rn = 1 or not (attempted or head_attempted))) over (order by rn) as due
    from (
      select h.outbox_id, h.attempt_count > 0 as attempted, first_value(h.attempt_count > 0) over w as head_attempted, row_number() over w as rn,
        h.status in ('pending', 'failed') and h.next_attempt_at <= statement_timestamp() and h.paused is not true as due,
        coalesce(sum(h.bytes) over (order by h.created_at, h.outbox_id rows between unbounded preceding and 1 preceding), 0) as before
      from (
        select o.outbox_id, o.created_at, o.status, o.next_attempt_at, o.attempt_count, octet_length(o.payload_bytes) as bytes,
          o.destination = any($4::text[]) or o.message_key = any($5::text[]) as paused from {table} o
        where o.source = $1 and {live}
        order by o.created_at, o.outbox_id limit $2) h
      window w as (order by h.created_at, h.outbox_id)) d) y
  where due and before < $3),
locked as materialized (
  select o.outbox_id from {table} o
  where o.outbox_id = any(array(select outbox_id from run))
    and (o.status || '') in ('pending', 'failed') and o.next_attempt_at <= statement_timestamp()
    and (o.attempt_count <= 0 or o.outbox_id = any(array(select outbox_id from run where attempted)))
    and (o.destination = any($4::text[]) or o.message_key = any($5::text[])) is not true
  for update of o skip locked),
ready as materialized (
  select outbox_id from (
    select outbox_id, bool_and(ours) over (order by rn) as gapless
    from (select rn, outbox_id, outbox_id in (select outbox_id from locked) as ours from run) r) x
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
