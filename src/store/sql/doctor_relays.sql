-- DOCTOR: the programs of ours that have a session in this database, by application_name; a doctor is none. Locks nothing.
select distinct a.application_name as name from pg_stat_activity a
where a.datname = current_database() and a.application_name like 'keiro-relay/%' and a.application_name not like 'keiro-relay/doctor %'
order by 1 limit 100
