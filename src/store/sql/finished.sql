-- FINISHED: dead and rejected rows by source, counting at most $1 rows. Leans on the far index (lean) or the status index (shared).
select w.source, w.status, count(*) as rows
from (select o.source, o.status from {table} o where {finished} limit $1) w
group by w.source, w.status
