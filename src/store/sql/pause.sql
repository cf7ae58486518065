-- PAUSE: makes a pause, or gives one that is there another end and reason. Locks that pause; leans on the side table's primary key.
-- $1 schema, $2 table, $3 kind, $4 name, $5 key, $6 timestamptz until, $7 bigint or that many microseconds from now, $8 reason
insert into keiro_relay.pauses as p (schema_name, table_name, kind, name, message_key, paused_until, reason)
values ($1, $2, $3, $4, $5, coalesce($6, statement_timestamp() + $7 * interval '1 microsecond'), $8)
on conflict (schema_name, table_name, kind, name, message_key) do update
set paused_until = excluded.paused_until, paused_by = excluded.paused_by, reason = coalesce(excluded.reason, p.reason)
returning p.kind, p.name, p.message_key, p.paused_at, p.paused_until, p.paused_by, p.reason,
  p.paused_at < now() as paused_before, coalesce(p.paused_until <= statement_timestamp(), false) as over
