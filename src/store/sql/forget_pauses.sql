-- Forgets pauses of one outbox table that are over. Locks them.
-- $1 schema, $2 table
delete from keiro_relay.pauses p
where p.schema_name = $1 and p.table_name = $2 and p.paused_until <= statement_timestamp()
