-- REQUEUE: rows in publishing whose lease ran out, one source a call. Locks by primary key, skipping what others hold.
-- $1 uuid[], $2 publishing_timeout in microseconds, $3 max_attempts
with s as materialized (
  select o.outbox_id from {table} o
  where o.outbox_id = any($1::uuid[]) and (o.status || '') = 'publishing'
    and o.updated_at <= statement_timestamp() - $2::bigint * interval '1 microsecond'
  order by o.outbox_id for update skip locked)
update {table} k set status = case when k.attempt_count >= $3 then 'dead' else 'failed' end,
  last_error = coalesce(k.last_error, 'reclaimed: publisher crashed mid-publish'), updated_at = statement_timestamp(),
  next_attempt_at = case when k.attempt_count >= $3 then {far} else k.next_attempt_at end
where k.outbox_id = any(array(select outbox_id from s))
returning k.outbox_id, k.status
