-- LANE NEXT: the first live row of each row's lane behind it. Locks nothing; leans on the live indexes.
-- $1 uuid[], $2 text[] source, $3 text[] key (null: the lane is the whole source), $4 timestamptz[] created_at
select r.outbox_id, n.outbox_id as next_id, n.status
from unnest($1::uuid[], $2::text[], $3::text[], $4::timestamptz[]) as r(outbox_id, source, key, created_at) cross join lateral (
  (select o.outbox_id, o.status from {table} o
    where r.key is not null and o.source = r.source and o.message_key >= r.key and o.message_key <= r.key and {live}
      and (o.created_at, o.outbox_id) > (r.created_at, r.outbox_id)
    order by o.message_key, o.created_at, o.outbox_id limit 1)
  union all
  (select o.outbox_id, o.status from {table} o
    where r.key is null and o.source = r.source and {live} and (o.created_at, o.outbox_id) > (r.created_at, r.outbox_id)
    order by o.created_at, o.outbox_id limit 1)) n
