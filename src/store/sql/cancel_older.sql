-- CANCEL on a table without `rejected`: such a row is dead there, and says why in last_error. The caller holds the rows' locks.
-- $1 uuid[], $2 reason
update {table} k set status = 'dead', last_error = 'rejected: operator.cancelled: ' || $2::text, published_at = null, updated_at = statement_timestamp(),
  next_attempt_at = {far}
where k.outbox_id = any($1::uuid[]) and (k.status || '') in ('pending', 'failed')
returning k.outbox_id
