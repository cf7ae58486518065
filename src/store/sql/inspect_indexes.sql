-- The names of the outbox's indexes that queries can use.
-- $1 schema, $2 table. Locks nothing; reads the catalogue only.
select x.relname::text as name
from pg_catalog.pg_index i
join pg_catalog.pg_class c on c.oid = i.indrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
join pg_catalog.pg_class x on x.oid = i.indexrelid
where n.nspname = $1 and c.relname = $2 and i.indisvalid and i.indisready;
