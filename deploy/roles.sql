-- Roles with least privilege for an outbox table and its relays. Run it as the table's owner who may create roles, after
-- `keiro-relay migrate`, with any client: psql "$URL" -f roles.sql. Run it again whenever you like: each role then has what is
-- written here and nothing else.
--
-- The roles cannot log in. Make users of your own members of them:
--   create role billing_service login password '…' in role keiro_outbox_producer;
--
--   producer   writes rows: services, `keiro-relay enqueue`
--   relay      `keiro-relay run` and `drain`
--   operator   commands of people that change something: `pause`, `resume`, …; and all that a reader may
--   reader     commands that only look: `status`, `pause --list`, …
do $roles$
declare
  -- Names are changed here and nowhere else.
  outbox_schema constant text := 'keiro';
  outbox_table constant text := 'keiro_outbox';
  producer constant text := 'keiro_outbox_producer';
  relay constant text := 'keiro_outbox_relay';
  operator constant text := 'keiro_outbox_operator';
  reader constant text := 'keiro_outbox_reader';

  outbox constant text := format('%I.%I', outbox_schema, outbox_table);
  role_name text;
begin
  foreach role_name in array array[producer, relay, operator, reader] loop
    if not exists (select from pg_catalog.pg_roles where rolname = role_name) then
      execute format('create role %I nologin', role_name);
    end if;
    execute format('revoke all on schema %I from %I', outbox_schema, role_name);
    -- Also what was granted on single columns.
    execute format('revoke all on %s from %I', outbox, role_name);
    execute format('grant usage on schema %I to %I', outbox_schema, role_name);
  end loop;

  -- Not status and what belongs to it: a row begins as the table's defaults have it.
  execute format('grant insert (outbox_id, message_id, source, destination, message_key, event_type, schema_version, content_type, '
    'schema_registry, schema_subject, schema_version_ref, schema_id, schema_fingerprint, source_event_id, source_global_position, '
    'causation_id, correlation_id, traceparent, tracestate, payload_bytes, attributes, occurred_at, created_at, next_attempt_at) '
    'on %s to %I', outbox, producer);
  -- What `on conflict (source, message_id)` and `returning` read, and what finds the row that a retry coalesced with.
  execute format('grant select (outbox_id, source, message_id) on %s to %I', outbox, producer);
  -- Without delete retention is off.
  execute format('grant select, update, delete on %s to %I', outbox, relay);
  execute format('grant select, update, delete on %s to %I', outbox, operator);
  execute format('grant select on %s to %I', outbox, reader);

  -- The side tables, where `migrate` made them: without them nothing can be paused.
  if exists (select from pg_catalog.pg_namespace where nspname = 'keiro_relay') then
    foreach role_name in array array[producer, relay, operator, reader] loop
      execute format('revoke all on schema keiro_relay from %I', role_name);
      execute format('revoke all on all tables in schema keiro_relay from %I', role_name);
    end loop;
    execute format('grant usage on schema keiro_relay to %I, %I, %I', relay, operator, reader);
    if to_regclass('keiro_relay.outbox_tables') is not null then
      execute format('grant select on keiro_relay.outbox_tables to %I, %I, %I', relay, operator, reader);
    end if;
    if to_regclass('keiro_relay.pauses') is not null then
      execute format('grant select on keiro_relay.pauses to %I, %I, %I', relay, operator, reader);
      execute format('grant insert, update, delete on keiro_relay.pauses to %I', operator);
    end if;
  end if;

  -- Optional: sees since when others' transactions run, so that rows committed late are found at once and not by the next full sweep.
  begin
    execute format('grant pg_read_all_stats to %I', relay);
  exception when insufficient_privilege then
    raise notice 'pg_read_all_stats was not granted to %: a superuser may do it', relay;
  end;
end $roles$;
