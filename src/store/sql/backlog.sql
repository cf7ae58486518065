-- BACKLOG of one source by status, counting at most $2 rows, and its oldest row. Leans on the live source index.
-- $1 source, $2 rows at most
with w as materialized (
  select o.status, o.created_at from {table} o where o.source = $1 and {in_live_index} limit $2)
select w.status, count(*) as rows,
  coalesce(extract(epoch from statement_timestamp() - greatest(min(w.created_at), timestamptz '1970-01-01 00:00:00+00')), 0)::float8 as oldest_age_seconds
from w group by w.status
