-- FAILED, HELD, DEAD, SKIPPED, RETURNED in one statement, so that a pivot and its suffix change together; only rows that are still ours.
-- $1 uuid[] (sorted), $2 bigint[] attempts, $3 stamp of the claim, $4 text[] status, $5 text[] error,
-- $6 bigint[] delay in microseconds, below 0 for held (year 9000), $7 int[] attempts returned
update {table} k set status = f.status, last_error = f.error, attempt_count = greatest(k.attempt_count - f.returned, 0),
  updated_at = statement_timestamp(),
  next_attempt_at = case
    when f.status = 'dead' then {far}
    when f.delay < 0 then timestamptz '9000-01-01 00:00:00+00'
    else statement_timestamp() + f.delay * interval '1 microsecond' end
from unnest($1::uuid[], $2::bigint[], $4::text[], $5::text[], $6::bigint[], $7::int[]) as f(id, attempt, status, error, delay, returned)
where k.outbox_id = f.id and (k.status || '') = 'publishing' and k.attempt_count = f.attempt and k.updated_at = $3
returning k.outbox_id
