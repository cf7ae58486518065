-- CANCEL: waiting rows are given up by an operator. The caller holds the rows' locks. Newer tables only.
-- $1 uuid[], $2 reason (1 to 1024 octets)
update {table} k set status = 'rejected', rejected_at = statement_timestamp(), rejection_code = 'operator.cancelled', rejection_detail = $2,
  last_error = null, published_at = null, updated_at = statement_timestamp(), next_attempt_at = {far}
where k.outbox_id = any($1::uuid[]) and (k.status || '') in ('pending', 'failed')
returning k.outbox_id
