-- LOCK: rows in one of the states, in id order. Waits for rows that others hold and looks at their newest version then; rows in flight are only
-- taken when their lease has run out. By primary key.
-- $1 uuid[], $2 publishing_timeout in microseconds, $3 text[] status
select o.outbox_id, o.source, o.message_key, o.created_at, o.status, o.attempt_count, o.updated_at, o.published_at, {cancelled} as cancelled,
  o.updated_at <= statement_timestamp() - $2::bigint * interval '1 microsecond' as expired
from {table} o
where o.outbox_id = any($1::uuid[]) and (o.status || '') = any($3::text[])
  and ((o.status || '') <> 'publishing' or o.updated_at <= statement_timestamp() - $2::bigint * interval '1 microsecond')
order by o.outbox_id for update
