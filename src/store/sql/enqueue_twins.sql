-- ENQUEUE_TWINS: the rows that new ones coalesced with, and the columns in which they differ. Locks nothing; leans on the primary key
-- and on unique (source, message_id).
-- $1 … $20 the columns in the order of the list, as arrays; for each row the one with its outbox_id goes before the one with its
-- source and message_id. Not compared: the two ids, the trace (a retry is another one), the schedule; a null occurred_at.
with f as materialized (
  select * from unnest(
    $1::uuid[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::int8[], $8::text[], $9::text[], $10::text[],
    $11::int8[], $12::int8[], $13::text[], $14::uuid[], $15::int8[], $16::uuid[], $17::uuid[], $18::bytea[], $19::text[],
    $20::timestamptz[]
  ) with ordinality as f(
    outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, schema_registry,
    schema_subject, schema_version_ref, schema_id, schema_fingerprint, source_event_id, source_global_position, causation_id,
    correlation_id, payload_bytes, attributes, occurred_at, place)
),
found as (
  select f.place, 1 as preference, o.outbox_id from f join lateral (
    select o.outbox_id from {table} o where o.outbox_id = f.outbox_id
  ) o on true
  union all
  select f.place, 2 as preference, o.outbox_id from f join lateral (
    select o.outbox_id from {table} o
    where o.source = f.source and o.message_id = f.message_id and o.outbox_id <> f.outbox_id
  ) o on true
)
select
  found.place, o.outbox_id, o.message_id,
  {differing} as differing
from found
join f on f.place = found.place
join {table} o on o.outbox_id = found.outbox_id
order by found.place, found.preference
