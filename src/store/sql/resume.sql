-- RESUME: the head of a halted source is due now. Locks that row; it must still be the failed row that was looked at.
-- $1 uuid
update {table} k set next_attempt_at = statement_timestamp(), updated_at = statement_timestamp()
where k.outbox_id = $1 and (k.status || '') = 'failed'
returning k.outbox_id
