-- LATE FLOOR: the start of the oldest transaction that may still commit rows behind a cursor; null when we may not see the others.
-- Run in a statement before the sweep it belongs to. Locks nothing.
select case when pg_has_role(current_user, 'pg_read_all_stats', 'usage') then least(min(xact_start), clock_timestamp()) end as late_floor,
  clock_timestamp() as now
from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and backend_type not in ('autovacuum worker', 'walsender')
