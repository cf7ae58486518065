-- What kind of relation the outbox is, and what our user may do with it as a whole.
-- $1 schema, $2 table. Locks nothing; reads the catalogue only.
select
  c.relkind::text as kind,
  c.relpersistence::text as persistence,
  has_table_privilege(c.oid, 'select') as can_select,
  has_table_privilege(c.oid, 'update') as can_update,
  has_table_privilege(c.oid, 'delete') as can_delete,
  row_security_active(c.oid) as row_security,
  exists (
    select from pg_catalog.pg_index i
    join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
    where i.indrelid = c.oid and i.indisunique and i.indisvalid and i.indimmediate and i.indnkeyatts = 1
      and i.indpred is null and a.attname = 'outbox_id'
  ) as unique_outbox_id
from pg_catalog.pg_class c
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2;
