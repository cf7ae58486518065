-- SENT: acknowledged rows, only those that are still ours. Locks by primary key in the order of the array (sorted by id).
-- $1 uuid[], $2 bigint[] attempts, $3 stamp of the claim
update {table} k set status = 'sent', published_at = statement_timestamp(), last_error = null, updated_at = statement_timestamp()
from unnest($1::uuid[], $2::bigint[]) as f(id, attempt)
where k.outbox_id = f.id and (k.status || '') = 'publishing' and k.attempt_count = f.attempt and k.updated_at = $3
returning k.outbox_id
