-- DOCTOR: how the table is kept. Locks nothing; reads catalogue and statistics only, so every number is an estimate.
-- $1 schema, $2 table
select
  coalesce(c.reloptions, '{}') as options,
  greatest(c.reltuples, 0)::float8 as rows,
  has_table_privilege(c.oid, 'insert') as can_insert,
  coalesce(t.n_live_tup, 0) as live_rows,
  coalesce(t.n_dead_tup, 0) as dead_rows,
  coalesce(t.n_tup_upd, 0) as updates,
  coalesce(t.n_tup_hot_upd, 0) as hot_updates,
  coalesce(t.n_tup_del, 0) as deletes,
  coalesce(extract(epoch from clock_timestamp() - coalesce(d.stats_reset, pg_postmaster_start_time())), 0)::float8 as statistics_seconds,
  extract(epoch from clock_timestamp() - greatest(t.last_vacuum, t.last_autovacuum))::float8 as vacuumed_seconds_ago,
  array(select k.conname::text from pg_constraint k where k.conrelid = c.oid and not k.convalidated order by 1) as not_validated
from pg_class c
join pg_namespace n on n.oid = c.relnamespace
left join pg_stat_all_tables t on t.relid = c.oid
left join pg_stat_database d on d.datname = current_database()
where n.nspname = $1 and c.relname = $2
