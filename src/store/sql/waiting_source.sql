-- Whether the table has any row of a source. Locks nothing; leans on unique (source, message_id).
-- $1 source
select exists (select from {table} o where o.source = $1) as found
