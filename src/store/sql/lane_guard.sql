-- LANE GUARD: waiting rows become due a second from now, which is longer than a commit takes. A claim whose snapshot is older than the commit of what is
-- put in front of them looks at their newest version before it takes them, and finds them not due; a later claim sees what is in front.
-- The caller holds the rows' locks.
-- $1 uuid[]
update {table} k set next_attempt_at = greatest(k.next_attempt_at, statement_timestamp() + interval '1 second'), updated_at = statement_timestamp()
where k.outbox_id = any($1::uuid[]) and (k.status || '') in ('pending', 'failed')
