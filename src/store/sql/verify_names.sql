-- VERIFY: what people call these rows. Locks nothing; by primary key.
-- $1 ids
select o.outbox_id, o.source, o.message_id, o.destination, o.created_at::text as created_at, o.published_at::text as published_at
from {table} o where o.outbox_id = any($1)
