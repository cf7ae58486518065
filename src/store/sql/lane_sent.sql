-- LANE SENT: of the rows published last up to an instant, the last of each lane in the contract's order. Locks nothing; leans on the index of sent rows.
-- $1 published_at up to which, $2 published_at from which, $3 rows to look at, $4 text[] source, $5 text[] key (null: the lane is the whole source)
with w as materialized (
  select o.source, o.message_key, o.created_at, o.outbox_id, o.published_at from {table} o
  where {sent} and o.published_at <= $1 and o.published_at >= $2
  order by o.published_at desc limit $3),
lane as materialized (
  select l.source, l.key, l.ord from unnest($4::text[], $5::text[]) with ordinality as l(source, key, ord)),
m as (
  select l.ord, w.created_at, w.outbox_id from w join lane l on l.source = w.source and l.key = w.message_key
  union all
  select l.ord, w.created_at, w.outbox_id from w join lane l on l.source = w.source where l.key is null),
last as materialized (
  select distinct on (ord) ord, created_at, outbox_id from m order by ord, created_at desc, outbox_id desc)
select (select count(*) from w) as seen, (select min(published_at) from w) as reached,
  array(select ord from last order by ord) as lanes, array(select created_at from last order by ord) as created_at,
  array(select outbox_id from last order by ord) as outbox_ids
