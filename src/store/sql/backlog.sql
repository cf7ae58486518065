-- BACKLOG of one source by status, counting at most $2 rows, and its oldest row. Leans on the live source index.
-- $1 source, $2 rows at most
-- Before PostgreSQL 17 infinity cannot be subtracted: least keeps it out.
with w as materialized (
  select o.status, o.created_at from {table} o where o.source = $1 and {in_live_index}
  order by o.created_at, o.outbox_id limit $2)
select w.status, count(*) as rows,
  extract(epoch from statement_timestamp() - least(greatest(min(w.created_at), timestamptz '1970-01-01 00:00:00+00'), statement_timestamp()))::float8
    as oldest_age_seconds
from w group by w.status
