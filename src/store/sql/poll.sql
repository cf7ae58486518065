-- POLL: which of the idle sources have a live row behind their position. Locks nothing; one probe of the live source index a source.
-- $1 text[] sources, $2 timestamptz[] created_at, $3 uuid[] outbox_id (exclusive)
select s.source
from unnest($1::text[], $2::timestamptz[], $3::uuid[]) as s(source, created_at, outbox_id)
where exists (
  select from {table} o where o.source = s.source and {live} and (o.created_at, o.outbox_id) > (s.created_at, s.outbox_id)
  order by o.created_at, o.outbox_id limit 1)
