-- Notes in the side schema what `migrate` made or adopted; writes only when that is news.
-- $1 schema, $2 table, $3 profile, $4 origin. Locks the note's row, if any.
insert into keiro_relay.outbox_tables as t (schema_name, table_name, profile, origin)
values ($1, $2, $3, $4)
on conflict (schema_name, table_name) do update
set profile = excluded.profile, origin = excluded.origin, recorded_at = now()
where (t.profile, t.origin) is distinct from (excluded.profile, excluded.origin);
