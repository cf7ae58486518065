-- What kind of server this is and what our user may do beside the table.
-- $1 schema. Locks nothing; reads the catalogue only.
select
  current_setting('server_version_num')::int4 as server_version,
  current_setting('server_encoding') as encoding,
  pg_is_in_recovery() as in_recovery,
  pg_has_role(current_user, 'pg_read_all_stats', 'usage') as reads_all_stats,
  current_user::text as user_name,
  exists (select from pg_catalog.pg_namespace n where n.nspname = $1) as schema_exists,
  coalesce((select has_schema_privilege(n.oid, 'usage') from pg_catalog.pg_namespace n where n.nspname = $1), false)
    as schema_usable,
  coalesce((select has_schema_privilege(n.oid, 'usage') from pg_catalog.pg_namespace n where n.nspname = 'keiro_relay'), false)
    as relay_schema;
