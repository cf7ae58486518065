-- WAKE: tells the relays, at commit, that rows of these sources are due again. A name that does not fit into a notification wakes every source.
-- $1 channel, $2 text[] source
select count(pg_notify($1, case when octet_length(s.source) < 8000 then s.source else '' end)) as told from unnest($2::text[]) as s(source)
