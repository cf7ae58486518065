-- DOCTOR: the table's indexes: whether queries can use them, and which columns they have, in keys, expressions and predicate.
-- $1 schema, $2 table. Locks nothing; reads the catalogue only.
select
  x.relname::text as name,
  i.indisvalid and i.indisready as usable,
  i.indisunique and i.indpred is null and i.indexprs is null as is_unique,
  array(select a.attname::text from unnest(i.indkey) with ordinality k(attnum, place)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    where k.place <= i.indnkeyatts order by k.place) as key_columns,
  array(select distinct a.attname::text from pg_attribute a
    where a.attrelid = i.indrelid and (a.attnum = any(i.indkey) or exists (
      select from pg_depend p where p.classid = 'pg_class'::regclass and p.objid = i.indexrelid
        and p.refclassid = 'pg_class'::regclass and p.refobjid = i.indrelid and p.refobjsubid = a.attnum))
      and a.attnum > 0 order by 1) as columns
from pg_index i
join pg_class c on c.oid = i.indrelid
join pg_namespace n on n.oid = c.relnamespace
join pg_class x on x.oid = i.indexrelid
where n.nspname = $1 and c.relname = $2
