-- DOCTOR: settings as a new session of our role in this database has them, whatever our own session set. Locks nothing.
-- $1 names
select s.name::text as name, s.reset_val::text as value from pg_settings s where s.name = any($1)
