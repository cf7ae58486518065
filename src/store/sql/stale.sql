-- STALE: which of the next live rows of a source are in publishing with their lease run out. Locks nothing; leans on the live source index.
-- $1 source, $2 created_at, $3 outbox_id (exclusive), $4 rows to look at, $5 publishing_timeout in microseconds
with w as materialized (
  select o.outbox_id, o.created_at, o.status, o.updated_at from {table} o
  where o.source = $1 and {live} and (o.created_at, o.outbox_id) > ($2, $3)
  order by o.created_at, o.outbox_id limit $4)
select (select count(*) from w) as seen, last.created_at, last.outbox_id,
  (select coalesce(array_agg(w.outbox_id order by w.outbox_id), '{}') from w
    where w.status = 'publishing' and w.updated_at <= statement_timestamp() - $5::bigint * interval '1 microsecond') as stale
from (select created_at, outbox_id from w order by created_at desc, outbox_id desc limit 1) last
