-- PAUSES of one outbox table that are in force, the oldest first. Reads the side table alone, by its primary key.
-- $1 schema, $2 table, $3 rows
select p.kind, p.name, p.message_key, p.paused_at, p.paused_until, p.paused_by, p.reason
from keiro_relay.pauses p
where p.schema_name = $1 and p.table_name = $2 and p.kind in ('source', 'topic', 'lane')
  and (p.paused_until is null or p.paused_until > statement_timestamp())
order by p.paused_at, p.kind, p.name, p.message_key limit $3
