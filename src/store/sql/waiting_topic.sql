-- Whether a row that goes to a topic waits among the first $2 live rows. Locks nothing; leans on the live source index: none leads by topic.
-- $1 topic, $2 rows
select exists (
  select from (select o.destination from {table} o where {live} order by o.source, o.created_at, o.outbox_id limit $2) w
  where w.destination = $1) as found
