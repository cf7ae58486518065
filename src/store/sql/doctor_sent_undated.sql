-- DOCTOR: sent rows without published_at, which retention never finds; counting at most $1. Leans on the index on published_at.
select count(*) as rows from (
  select from {table} o where o.status = 'sent' and o.published_at is null limit $1) w
