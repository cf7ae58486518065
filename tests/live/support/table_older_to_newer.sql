-- What keiro's later migration adds to an older table: the rejected columns, their checks, 'rejected' in the predicates.
alter table keiro.keiro_outbox
    add column rejected_at timestamptz,
    add column rejection_code text,
    add column rejection_detail text;

alter table keiro.keiro_outbox
    add constraint keiro_outbox_rejected_at_check
        check ((status = 'rejected') = (rejected_at is not null)),
    add constraint keiro_outbox_rejection_code_check
        check ((status = 'rejected') = (rejection_code is not null)),
    add constraint keiro_outbox_rejection_code_format_check
        check (rejection_code is null or rejection_code ~ '^[a-z][a-z0-9._-]{0,63}$'),
    add constraint keiro_outbox_rejection_detail_check
        check (rejection_detail is null or octet_length(rejection_detail) between 1 and 1024);

drop index keiro.keiro_outbox_head_of_line_idx;
create index keiro_outbox_head_of_line_idx on keiro.keiro_outbox (source, message_key, created_at)
    where status not in ('sent', 'dead', 'rejected') and message_key is not null;

drop index keiro.keiro_outbox_source_order_idx;
create index keiro_outbox_source_order_idx on keiro.keiro_outbox (source, created_at, outbox_id)
    where status not in ('sent', 'dead', 'rejected');
