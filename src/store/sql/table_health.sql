-- TABLE HEALTH: dead tuples, and the oldest snapshot that keeps vacuum from removing them. Reads statistics views only.
-- $1 schema, $2 table
select coalesce((select n_dead_tup from pg_stat_user_tables where schemaname = $1 and relname = $2), 0) as dead_tuples,
  coalesce((select extract(epoch from max(clock_timestamp() - xact_start)) from pg_stat_activity
    where datname = current_database() and pid <> pg_backend_pid() and backend_xmin is not null), 0)::float8 as oldest_transaction_seconds
