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
  array_remove(array[
    case when o.source is distinct from f.source then 'source' end,
    case when o.destination is distinct from f.destination then 'destination' end,
    case when o.message_key is distinct from f.message_key then 'message_key' end,
    case when o.event_type is distinct from f.event_type then 'event_type' end,
    case when o.schema_version is distinct from f.schema_version then 'schema_version' end,
    case when o.content_type is distinct from f.content_type then 'content_type' end,
    case when o.schema_registry is distinct from f.schema_registry then 'schema_registry' end,
    case when o.schema_subject is distinct from f.schema_subject then 'schema_subject' end,
    case when o.schema_version_ref is distinct from f.schema_version_ref then 'schema_version_ref' end,
    case when o.schema_id is distinct from f.schema_id then 'schema_id' end,
    case when o.schema_fingerprint is distinct from f.schema_fingerprint then 'schema_fingerprint' end,
    case when o.source_event_id is distinct from f.source_event_id then 'source_event_id' end,
    case when o.source_global_position is distinct from f.source_global_position then 'source_global_position' end,
    case when o.causation_id is distinct from f.causation_id then 'causation_id' end,
    case when o.correlation_id is distinct from f.correlation_id then 'correlation_id' end,
    case when o.payload_bytes is distinct from f.payload_bytes then 'payload_bytes' end,
    case when o.attributes is distinct from f.attributes::jsonb then 'attributes' end,
    case when o.occurred_at <> f.occurred_at then 'occurred_at' end
  ], null) as differing
from found
join f on f.place = found.place
join {table} o on o.outbox_id = found.outbox_id
order by found.place, found.preference
