-- RETENTION: deletes sent rows published before the cut-off, oldest first. Locks what it deletes, skipping what others hold.
-- $1 age in microseconds, $2 rows at most, $3 published_at that the last batch reached (dead index entries before it are not read again)
with old as materialized (
  select o.outbox_id, o.published_at from {table} o
  where o.status = 'sent' and o.published_at < statement_timestamp() - $1::bigint * interval '1 microsecond' and o.published_at >= $3
  order by o.published_at limit $2 for update skip locked),
gone as (
  delete from {table} k where k.outbox_id = any(array(select outbox_id from old)) returning k.outbox_id)
select (select count(*) from gone) as deleted, (select max(published_at) from old) as reached
