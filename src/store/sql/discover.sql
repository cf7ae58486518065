-- DISCOVER: the next live rows of a source behind a position, whatever their state. Locks nothing; leans on the live source index.
-- $1 source, $2 created_at, $3 outbox_id (exclusive), $4 rows, $5 text[] paused topics, $6 text[] paused keys
select o.outbox_id, o.message_key, o.created_at, o.status, o.attempt_count,
  case when o.next_attempt_at <= statement_timestamp() then 0
    else (extract(epoch from least(o.next_attempt_at, statement_timestamp() + interval '1 hour') - statement_timestamp()) * 1000000)::bigint
  end as due_in_micros, (o.destination = any($5::text[]) or o.message_key = any($6::text[])) is true as paused
from {table} o
where o.source = $1 and {live} and (o.created_at, o.outbox_id) > ($2, $3)
order by o.created_at, o.outbox_id
limit $4
