-- UNPREFER: frees the advisory lock of each source, which this session holds; another relay serves it from now on.
-- $1 text[] sources, $2 text the table's name
select s.source, pg_advisory_unlock(hashtextextended('keiro-relay ' || $2 || ' ' || s.source, 0)) as freed
from unnest($1::text[]) as s(source)
