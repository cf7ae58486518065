-- COUNT SENT: sent rows of a source, counting at most $2. Leans on the unique index of the source, where the order and the status as an expression
-- keep it: an index on sent rows would walk over every other source. For people, not for a timer.
-- $1 source, $2 rows
select count(*) as rows from (
  select from {table} o where o.source = $1 and (o.status || '') = 'sent' order by o.message_id limit $2) w
