-- The side schema's register: which outbox tables `keiro-relay migrate` made or adopted.
create table keiro_relay.outbox_tables (
  schema_name text not null,
  table_name text not null,
  profile text not null check (profile in ('lean', 'shared')),
  origin text not null check (origin in ('created', 'adopted')),
  recorded_at timestamptz not null default now(),
  primary key (schema_name, table_name)
);

comment on schema keiro_relay is 'Side tables of keiro-relay; made by keiro-relay migrate, needed by no producer.';
comment on table keiro_relay.outbox_tables is 'Outbox tables that keiro-relay migrate made or adopted.';
