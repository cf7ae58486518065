"""The owed messages beside the change they tell of, in one transaction.

    pip install -r requirements.txt
    DATABASE_URL=postgres://… python enqueue.py 42
"""

import json
import os
import secrets
import sys
import time
import uuid

import psycopg

INSERT = """
insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version,
                                content_type, payload_bytes, attributes, occurred_at)
values (%s, %s, 'billing', 'invoices', %s, %s, 1, 'application/json', %s, %s::jsonb, now())
on conflict do nothing
"""

_last = 0


def outbox_id() -> uuid.UUID:
    """A UUIDv7, later than every one before: rows of one transaction go out in the order of these ids."""
    global _last
    # 48 bits of milliseconds, then 12 that count within one.
    _last = max(time.time_ns() // 1_000_000 << 12, _last + 1)
    return uuid.UUID(int=(_last >> 12) << 80 | 7 << 76 | (_last & 0xFFF) << 64 | 2 << 62 | secrets.randbits(62))


def enqueue(cursor: psycopg.Cursor, message_id: str, key: str, event_type: str, payload: object, attributes: object) -> bool:
    """Writes a row in the caller's transaction; False when it is there already."""
    cursor.execute(
        INSERT,
        (outbox_id(), message_id, key, event_type, json.dumps(payload).encode(), json.dumps(attributes)),
    )
    return cursor.rowcount == 1


def main() -> None:
    invoice = int(sys.argv[1])
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection, connection.cursor() as cursor:
        cursor.execute(
            "insert into invoices (id, sent) values (%s, true) on conflict (id) do update set sent = true", (invoice,)
        )
        # A message id that says what happened: whoever does this again writes no second message.
        for event_type, payload in [
            ("InvoiceSent", {"invoice": invoice}),
            ("PaymentDue", {"invoice": invoice, "days": 14}),
        ]:
            message_id = f"{event_type}-{invoice}"
            inserted = enqueue(cursor, message_id, f"invoice-{invoice}", event_type, payload, {"tenant": "blue"})
            print(message_id, "inserted" if inserted else "already there")


if __name__ == "__main__":
    main()
