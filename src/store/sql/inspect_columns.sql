-- The columns of the outbox.
-- $1 schema, $2 table. Locks nothing; reads the catalogue only.
select
  a.attname::text as name,
  pg_catalog.format_type(a.atttypid, a.atttypmod) as type,
  a.attnotnull as not_null,
  has_column_privilege(c.oid, a.attnum, 'select') as can_select,
  has_column_privilege(c.oid, a.attnum, 'update') as can_update
from pg_catalog.pg_attribute a
join pg_catalog.pg_class c on c.oid = a.attrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2 and a.attnum > 0 and not a.attisdropped;
