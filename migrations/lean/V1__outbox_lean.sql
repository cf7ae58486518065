-- The outbox with the lean profile. No index has status, attempt_count or updated_at as a column or in its predicate:
-- a claim then changes no index (a HOT update), for which the low fillfactor keeps room on the row's own page.
create table {schema}.{table} (
  outbox_id uuid primary key,
  message_id text not null,
  source text not null,
  destination text not null,
  message_key text,
  event_type text not null,
  schema_version bigint not null,
  content_type text not null,
  schema_registry text,
  schema_subject text,
  schema_version_ref bigint,
  schema_id bigint,
  schema_fingerprint text,
  source_event_id uuid,
  source_global_position bigint,
  causation_id uuid,
  correlation_id uuid,
  traceparent text,
  tracestate text,
  payload_bytes bytea not null,
  attributes jsonb,
  occurred_at timestamptz not null,
  status text not null default 'pending',
  attempt_count bigint not null default 0,
  next_attempt_at timestamptz not null default now(),
  last_error text,
  published_at timestamptz,
  created_at timestamptz not null default now(),
  updated_at timestamptz not null default now(),
  rejected_at timestamptz,
  rejection_code text,
  rejection_detail text,
  constraint {message_id_key} unique (source, message_id),
  -- Checks of the contract.
  constraint keiro_relay_rejected_at_check check ((status = 'rejected') = (rejected_at is not null)),
  constraint keiro_relay_rejection_code_check check ((status = 'rejected') = (rejection_code is not null)),
  constraint keiro_relay_rejection_code_format_check check (rejection_code ~ '^[a-z][a-z0-9._-]{0,63}$'),
  constraint keiro_relay_rejection_detail_check check (octet_length(rejection_detail) between 1 and 1024),
  -- Checks that the lean statements rest on: together they make the live indexes hold every row that is not terminal.
  -- The relay knows the profile by their names and texts.
  constraint keiro_relay_sent_check check ((status = 'sent') = (published_at is not null)),
  constraint keiro_relay_far_check
    check (next_attempt_at < '9999-01-01 00:00:00+00' or status in ('sent', 'dead', 'rejected'))
) with (
  fillfactor = 45,
  -- Rows change a few times and then lie still or are deleted: vacuum early, in small bites, whatever the table's size.
  autovacuum_vacuum_scale_factor = 0.01,
  autovacuum_vacuum_threshold = 5000,
  autovacuum_vacuum_insert_scale_factor = 0.05,
  autovacuum_analyze_scale_factor = 0.05,
  autovacuum_vacuum_cost_limit = 2000
);

-- Live rows of a source in order.
create index {source_order_idx} on {schema}.{table} (source, created_at, outbox_id)
  where published_at is null and next_attempt_at < '9999-01-01 00:00:00+00';

-- Live rows of a key in order.
create index {key_order_idx} on {schema}.{table} (source, message_key, created_at, outbox_id)
  where published_at is null and next_attempt_at < '9999-01-01 00:00:00+00' and message_key is not null;

-- Sent rows by age, for retention.
create index {sent_idx} on {schema}.{table} (published_at)
  where published_at is not null;

-- Dead and rejected rows, which wait at the far date.
create index {far_idx} on {schema}.{table} (source, created_at)
  where next_attempt_at >= '9999-01-01 00:00:00+00';
