-- VERIFY: the rows sent in a range, in no order. Locks nothing; leans on the index on published_at.
-- $1 from, $2 before, $3 source or null, $4 topic or null
declare keiro_relay_sent no scroll cursor for
select o.outbox_id, o.created_at, o.published_at, o.source, o.destination, o.message_id, o.message_key
from {table} o
where o.status = 'sent' and o.published_at is not null and o.published_at >= $1 and o.published_at < $2
  and ($3::text is null or o.source = $3) and ($4::text is null or o.destination = $4)
