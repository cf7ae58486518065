-- The rows that new ones may have coalesced with. Locks nothing; leans on the primary key and on unique (source, message_id).
-- $1 outbox ids, $2 sources, $3 message ids; for each the row with its outbox_id goes before the one with its message_id.
select f.place, e.outbox_id, e.message_id
from unnest($1::uuid[], $2::text[], $3::text[]) with ordinality as f(outbox_id, source, message_id, place)
cross join lateral (
  select o.outbox_id, o.message_id, 1 as preference from {table} o where o.outbox_id = f.outbox_id
  union all
  select o.outbox_id, o.message_id, 2 as preference from {table} o where o.source = f.source and o.message_id = f.message_id
) e
order by f.place, e.preference
