-- UNPAUSE: ends one pause. Locks it; leans on the side table's primary key.
-- $1 schema, $2 table, $3 kind, $4 name, $5 key
delete from keiro_relay.pauses p
where p.schema_name = $1 and p.table_name = $2 and p.kind = $3 and p.name = $4 and p.message_key = $5
returning p.kind, p.name, p.message_key, p.paused_at, p.paused_until, p.paused_by, p.reason
