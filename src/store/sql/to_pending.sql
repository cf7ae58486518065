-- RETRY and REPLAY: back to pending, with nothing left of what became of the row before. The caller holds the rows' locks.
-- $1 uuid[], $2 text[] status it must have, $3 whether attempts stay spent, $4 due at (null: $5), $5 due in microseconds
update {table} k set status = 'pending', attempt_count = case when $3 then k.attempt_count else 0 end,
  next_attempt_at = coalesce($4::timestamptz, statement_timestamp() + $5::bigint * interval '1 microsecond'),
  last_error = null, published_at = null{unreject}, updated_at = statement_timestamp()
where k.outbox_id = any($1::uuid[]) and (k.status || '') = any($2::text[])
returning k.outbox_id
