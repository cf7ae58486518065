-- PREFER: tries the advisory lock of each source; the session that holds it serves the source, others stand by. Never blocks.
-- $1 text[] sources, $2 text the table's name
select s.source, pg_try_advisory_lock(hashtextextended('keiro-relay ' || $2 || ' ' || s.source, 0)) as ours
from unnest($1::text[]) as s(source)
