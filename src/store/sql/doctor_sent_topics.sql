-- DOCTOR: the topics of the rows that were sent last. Leans on the index on published_at, read backwards. Locks nothing.
-- $1 rows looked at
select w.destination, count(*) filter (where w.message_key is null) as keyless
from (select o.destination, o.message_key from {table} o where o.status = 'sent' and o.published_at is not null
  order by o.published_at desc limit $1) w
group by w.destination
