-- Whether a row of a source with this key waits. Locks nothing; leans on the live key index.
-- $1 source, $2 key
select exists (
  select from {table} o where o.source = $1 and o.message_key >= $2 and o.message_key <= $2 and {live}
  order by o.message_key, o.created_at, o.outbox_id limit 1) as found
