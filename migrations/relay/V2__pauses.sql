-- What operators paused: a source, a topic, or a lane (the rows of a source with one key). Every relay of the table reads it;
-- `keiro-relay pause` and `keiro-relay resume` write it.
create table keiro_relay.pauses (
  schema_name text not null,
  table_name text not null,
  kind text not null check (kind in ('source', 'topic', 'lane')),
  -- The source, or the topic; of a lane its source.
  name text not null,
  -- Of a lane its key, which may be empty.
  message_key text not null default '' check (kind = 'lane' or message_key = ''),
  paused_at timestamptz not null default now(),
  -- From then on it counts no more; null: until somebody resumes it.
  paused_until timestamptz,
  paused_by text not null default session_user,
  reason text,
  primary key (schema_name, table_name, kind, name, message_key)
);

comment on table keiro_relay.pauses is 'Sources, topics and lanes that keiro-relay pause holds back.';
