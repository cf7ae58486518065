-- DOCTOR: the first live rows of each source, by source, topic and status. What waits for ever gathers there. Locks nothing.
-- $1 sources, $2 rows of each at most, $3 the lease in microseconds. Leans on the live source index.
select s.source, w.destination, w.status, count(*) as rows,
  count(*) filter (where w.published_at is not null) as published,
  count(*) filter (where w.next_attempt_at = timestamptz 'infinity') as never,
  count(*) filter (where w.next_attempt_at > statement_timestamp() + interval '7 days' and w.next_attempt_at <> timestamptz 'infinity'
    and w.next_attempt_at <> timestamptz '9000-01-01 00:00:00+00') as far,
  count(*) filter (where w.next_attempt_at = timestamptz '9000-01-01 00:00:00+00') as held,
  count(*) filter (where w.next_attempt_at <= statement_timestamp()) as due,
  count(*) filter (where w.updated_at < statement_timestamp() - $3 * interval '1 microsecond') as expired,
  count(*) filter (where w.message_key is null) as keyless,
  max(w.octets)::int8 as largest
from unnest($1::text[]) s(source) cross join lateral (
  select o.destination, o.status, o.next_attempt_at, o.published_at, o.updated_at, o.message_key,
    octet_length(o.payload_bytes) + coalesce(octet_length(o.message_key), 0) + octet_length(o.message_id)
      + coalesce(pg_column_size(o.attributes), 0) as octets
  from {table} o where o.source = s.source and {in_live_index}
  order by o.created_at, o.outbox_id limit $2) w
group by s.source, w.destination, w.status
