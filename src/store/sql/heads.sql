-- HEADS: the first live rows of a source with what decides whether they are ready; for the oldest-ready age and the halted row.
-- $1 source, $2 rows, $3 text[] paused topics, $4 text[] paused keys
-- Before PostgreSQL 17 infinity cannot be subtracted: least keeps it out.
select o.outbox_id, o.message_key, o.created_at, o.status, o.attempt_count, o.next_attempt_at <= statement_timestamp() as due,
  o.next_attempt_at >= timestamptz '9000-01-01 00:00:00+00' as held, left(coalesce(o.last_error, ''), 300) as last_error,
  extract(epoch from statement_timestamp() - least(greatest(o.next_attempt_at, o.created_at, timestamptz '1970-01-01 00:00:00+00'), statement_timestamp()))::float8
    as waiting_seconds,
  (o.destination = any($3::text[]) or o.message_key = any($4::text[])) is true as paused
from {table} o
where o.source = $1 and {live}
order by o.created_at, o.outbox_id limit $2
