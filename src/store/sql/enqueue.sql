-- ENQUEUE: writes new rows; one whose outbox_id, or whose source and message_id, is there already is left out.
-- $1 … $24 the columns in the order of the list, as arrays; null in the three instants is now.
-- Locks what it inserts, in the given order; leans on the primary key and on unique (source, message_id).
insert into {table} as o (
  outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, schema_registry,
  schema_subject, schema_version_ref, schema_id, schema_fingerprint, source_event_id, source_global_position, causation_id,
  correlation_id, payload_bytes, attributes, occurred_at, traceparent, tracestate, created_at, next_attempt_at)
select
  f.outbox_id, f.message_id, f.source, f.destination, f.message_key, f.event_type, f.schema_version, f.content_type,
  f.schema_registry, f.schema_subject, f.schema_version_ref, f.schema_id, f.schema_fingerprint, f.source_event_id,
  f.source_global_position, f.causation_id, f.correlation_id, f.payload_bytes, f.attributes::jsonb,
  coalesce(f.occurred_at, now()), f.traceparent, f.tracestate, coalesce(f.created_at, now()), coalesce(f.next_attempt_at, now())
from unnest(
  $1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::int8[], $8::text[], $9::text[], $10::text[],
  $11::int8[], $12::int8[], $13::text[], $14::uuid[], $15::int8[], $16::uuid[], $17::uuid[], $18::bytea[], $19::text[],
  $20::timestamptz[], $21::text[], $22::text[], $23::timestamptz[], $24::timestamptz[]
) with ordinality as f(
  outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, schema_registry,
  schema_subject, schema_version_ref, schema_id, schema_fingerprint, source_event_id, source_global_position, causation_id,
  correlation_id, payload_bytes, attributes, occurred_at, traceparent, tracestate, created_at, next_attempt_at, place)
order by f.place
on conflict do nothing
returning o.outbox_id, o.source, o.message_id
