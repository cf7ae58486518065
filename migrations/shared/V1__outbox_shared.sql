-- The outbox as keiro's own migrations make it: the same columns, checks and indexes, and nothing beside them.
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
  unique (source, message_id),
  constraint {rejected_at_check} check ((status = 'rejected') = (rejected_at is not null)),
  constraint {rejection_code_check} check ((status = 'rejected') = (rejection_code is not null)),
  constraint {rejection_code_format_check} check (rejection_code ~ '^[a-z][a-z0-9._-]{0,63}$'),
  constraint {rejection_detail_check} check (octet_length(rejection_detail) between 1 and 1024)
);

create index {pending_idx} on {schema}.{table} (status, next_attempt_at, created_at);

create index {head_of_line_idx} on {schema}.{table} (source, message_key, created_at)
  where status not in ('sent', 'dead', 'rejected') and message_key is not null;

create index {source_order_idx} on {schema}.{table} (source, created_at, outbox_id)
  where status not in ('sent', 'dead', 'rejected');

create index {claim_order_idx} on {schema}.{table} (created_at, outbox_id)
  where status in ('pending', 'failed');

create index {sent_gc_idx} on {schema}.{table} (published_at)
  where status = 'sent';
