-- TURN: until the commit, no other operator puts rows of this table back in front of others: what comes next in a lane is then what a look at it shows.
-- $1 the table's qualified name
select pg_advisory_xact_lock(hashtextextended('keiro_relay back to pending ' || $1, 0)) is null as done
