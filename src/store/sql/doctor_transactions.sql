-- DOCTOR: the oldest transaction of another session of this database that keeps vacuum from removing what is dead. Locks nothing.
select a.pid, coalesce(a.usename::text, '') as user_name, coalesce(a.application_name, '') as application_name,
  coalesce(a.state, '') as state, extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
from pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.xact_start is not null
  and (a.backend_xmin is not null or a.backend_xid is not null) and a.backend_type <> 'autovacuum worker'
order by a.xact_start limit 1
