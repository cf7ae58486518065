-- LOOK: rows as they are, for saying why they cannot be changed. Locks nothing; by primary key.
-- $1 uuid[], $2 publishing_timeout in microseconds
select o.outbox_id, o.source, o.message_key, o.created_at, o.status, o.attempt_count, o.updated_at, o.published_at, {cancelled} as cancelled,
  o.updated_at <= statement_timestamp() - $2::bigint * interval '1 microsecond' as expired
from {table} o
where o.outbox_id = any($1::uuid[])
