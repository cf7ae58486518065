-- The contract's table as keiro's earlier migrations made it: no rejected columns, upstream's indexes.
create schema keiro;

create table keiro.keiro_outbox (
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
    unique (source, message_id)
);

create index keiro_outbox_pending_idx on keiro.keiro_outbox (status, next_attempt_at, created_at);

create index keiro_outbox_head_of_line_idx on keiro.keiro_outbox (source, message_key, created_at)
    where status not in ('sent', 'dead') and message_key is not null;

create index keiro_outbox_source_order_idx on keiro.keiro_outbox (source, created_at, outbox_id)
    where status not in ('sent', 'dead');

create index keiro_outbox_claim_order_idx on keiro.keiro_outbox (created_at, outbox_id)
    where status in ('pending', 'failed');

create index keiro_outbox_sent_gc_idx on keiro.keiro_outbox (published_at)
    where status = 'sent';
