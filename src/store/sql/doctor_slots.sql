-- DOCTOR: the replication slot that holds back vacuum most. Locks nothing.
select s.slot_name::text as name, coalesce(s.active, false) as active, age(s.xmin)::int8 as transactions
from pg_replication_slots s where s.xmin is not null order by age(s.xmin) desc limit 1
