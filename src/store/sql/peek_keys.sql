-- PEEK by key: the head of line of each key, to learn why a claim took nothing. Locks nothing; leans on the live key index.
-- $1 source, $2 text[] keys, $3 text[] paused topics, $4 text[] paused keys
select h.outbox_id, h.message_key, h.created_at, h.status, h.attempt_count,
  case when h.next_attempt_at <= statement_timestamp() then 0
    else (extract(epoch from least(h.next_attempt_at, statement_timestamp() + interval '1 hour') - statement_timestamp()) * 1000000)::bigint
  end as due_in_micros, (h.destination = any($3::text[]) or h.message_key = any($4::text[])) is true as paused
from unnest($2::text[]) as k(key) cross join lateral (
  select o.outbox_id, o.message_key, o.created_at, o.status, o.attempt_count, o.next_attempt_at, o.destination from {table} o
  where o.source = $1 and o.message_key >= k.key and o.message_key <= k.key and {live}
  order by o.message_key, o.created_at, o.outbox_id limit 1) h
