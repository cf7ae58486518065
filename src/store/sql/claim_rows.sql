-- IDCLAIM: single rows whose order does not matter (null keys, best_effort). Locks them by primary key; see KEYCLAIM for the array in ready.
-- $1 uuid[], $2 bytes in all (the first row always fits), $3 whether rows attempted before may be claimed (then one row), $4 text[] paused topics,
-- $5 text[] paused keys
with run as materialized (
  select outbox_id from (
    select o.outbox_id,
      coalesce(sum(octet_length(o.payload_bytes)) over (order by o.created_at, o.outbox_id rows between unbounded preceding and 1 preceding), 0) as before
    from {table} o
    where o.outbox_id = any($1::uuid[]) and (o.status || '') in ('pending', 'failed') and o.next_attempt_at <= statement_timestamp()
      and (o.attempt_count <= 0 or $3) and (o.destination = any($4::text[]) or o.message_key = any($5::text[])) is not true) y
  where before < $2),
ready as materialized (
  select o.outbox_id from {table} o
  where o.outbox_id = any(array(select outbox_id from run))
    and (o.status || '') in ('pending', 'failed') and o.next_attempt_at <= statement_timestamp() and (o.attempt_count <= 0 or $3)
    and (o.destination = any($4::text[]) or o.message_key = any($5::text[])) is not true
  for update of o skip locked),
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
