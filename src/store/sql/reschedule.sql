-- RESCHEDULE: waiting rows get another due time. The caller holds the rows' locks.
-- $1 uuid[], $2 due at (null: $3), $3 due in microseconds
update {table} k set next_attempt_at = coalesce($2::timestamptz, statement_timestamp() + $3::bigint * interval '1 microsecond'),
  updated_at = statement_timestamp()
where k.outbox_id = any($1::uuid[]) and (k.status || '') in ('pending', 'failed')
returning k.outbox_id
