-- PEEK by id: what became of single rows that a claim did not take. Locks nothing; leans on the primary key.
-- $1 uuid[], $2 text[] paused topics, $3 text[] paused keys
select o.outbox_id, o.message_key, o.created_at, o.status, o.attempt_count,
  case when o.next_attempt_at <= statement_timestamp() then 0
    else (extract(epoch from least(o.next_attempt_at, statement_timestamp() + interval '1 hour') - statement_timestamp()) * 1000000)::bigint
  end as due_in_micros, (o.destination = any($2::text[]) or o.message_key = any($3::text[])) is true as paused
from {table} o
where o.outbox_id = any($1::uuid[]) and (o.status || '') not in ('sent', 'dead', 'rejected')
