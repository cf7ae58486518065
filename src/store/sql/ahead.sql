-- AHEAD: what waits before a row of a source that is one lane, for `why`: the first of those rows, and how many there are, counting at
-- most $4. Locks nothing; leans on the live source index.
-- $1 source, $2 created_at, $3 outbox_id of the row, $4 rows
with b as materialized (
  select o.outbox_id, o.destination, o.message_key, o.status, o.attempt_count, o.next_attempt_at, o.updated_at, o.last_error, o.created_at
  from {table} o
  where o.source = $1 and {live} and (o.created_at, o.outbox_id) < ($2, $3)
  order by o.created_at, o.outbox_id limit $4)
select b.*, (select count(*) from b) as rows from b order by b.created_at, b.outbox_id limit 1
