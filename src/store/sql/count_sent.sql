-- COUNT SENT: sent rows of a source, counting at most $2. Leans on the unique index of the source; for people, not for a timer.
-- $1 source, $2 rows
select count(*) as rows from (select from {table} o where o.source = $1 and o.status = 'sent' limit $2) w
