-- PRUNE: deletes finished rows. The caller holds the rows' locks and has looked at their age.
-- $1 uuid[], $2 text[] status it must have
delete from {table} k
where k.outbox_id = any($1::uuid[]) and (k.status || '') = any($2::text[]) and (k.status || '') in ('sent', 'dead', 'rejected')
returning k.outbox_id
