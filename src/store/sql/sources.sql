-- SOURCES: every source of the table. Walks the unique index on (source, message_id), which dead entries of the live indexes do not slow down.
with recursive s as (
  (select source from {table} order by source, message_id limit 1)
  union all
  select n.source from s cross join lateral (
    select source from {table} where source > s.source order by source, message_id limit 1) n)
select source from s limit $1
