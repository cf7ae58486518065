-- The validated checks of the outbox, as the server prints them.
-- $1 schema, $2 table. Locks nothing; reads the catalogue only.
select k.conname::text as name, pg_catalog.pg_get_constraintdef(k.oid) as definition
from pg_catalog.pg_constraint k
join pg_catalog.pg_class c on c.oid = k.conrelid
join pg_catalog.pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2 and k.contype = 'c' and k.convalidated;
