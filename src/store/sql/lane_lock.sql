-- LANE LOCK: waiting rows, in id order, so that nobody claims them until we have committed. Waits for a claim under way.
-- $1 uuid[]
select o.outbox_id from {table} o
where o.outbox_id = any($1::uuid[]) and (o.status || '') in ('pending', 'failed')
order by o.outbox_id for update
