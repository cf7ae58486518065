-- After a lost connection: which rows did the settlement reach before the answer was lost? A row that left publishing with our attempt and
-- a later stamp was settled by us: anybody else would have had to claim it first, or to free it, which leaves it as a failure does.
-- $1 uuid[], $2 bigint[] attempts after the settlement, $3 stamp of the claim, $4 text[] status
select k.outbox_id
from {table} k join unnest($1::uuid[], $2::bigint[], $4::text[]) as f(id, attempt, status) on k.outbox_id = f.id
where (k.status || '') = f.status and k.attempt_count = f.attempt and k.updated_at > $3
