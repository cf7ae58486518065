-- DUE: how many rows of a source wait although they are due, counting at most $2; for `drain`. Leans on the live source index; the status
-- as an expression and the order keep it there: an index on the status would walk over every other source.
-- $1 source, $2 rows
select count(*) as rows from (
  select from {table} o
  where o.source = $1 and {live} and (o.status || '') in ('pending', 'failed') and o.next_attempt_at <= statement_timestamp()
  order by o.created_at, o.outbox_id limit $2) w
