-- RELAYS: the relays that have a session in this database, by their application_name; our own session is none. Locks nothing.
select distinct split_part(a.application_name, '/', 2) as instance from pg_stat_activity a
where a.datname = current_database() and a.pid <> pg_backend_pid() and a.application_name like 'keiro-relay/%'
order by 1 limit 20
