-- DOCTOR: the oldest prepared transaction of this database. Locks nothing.
select p.gid::text as gid, p.owner::text as owner, extract(epoch from clock_timestamp() - p.prepared)::float8 as seconds
from pg_prepared_xacts p where p.database = current_database() order by p.prepared limit 1
