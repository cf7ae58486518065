-- REJECTED: rows that can never be accepted; only rows that are still ours. Newer tables only.
-- $1 uuid[] (sorted), $2 bigint[] attempts, $3 stamp of the claim, $4 text[] codes, $5 text[] details (1 to 1024 octets)
update {table} k set status = 'rejected', rejected_at = statement_timestamp(), rejection_code = f.code, rejection_detail = f.detail, last_error = null,
  published_at = null, updated_at = statement_timestamp(), next_attempt_at = {far}
from unnest($1::uuid[], $2::bigint[], $4::text[], $5::text[]) as f(id, attempt, code, detail)
where k.outbox_id = f.id and (k.status || '') = 'publishing' and k.attempt_count = f.attempt and k.updated_at = $3
returning k.outbox_id
