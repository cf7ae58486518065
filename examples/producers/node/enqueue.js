// The owed messages beside the change they tell of, in one transaction.
//
//     npm ci
//     DATABASE_URL=postgres://… node enqueue.js 42

import { randomBytes } from "node:crypto";
import pg from "pg";

const INSERT = `
insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version,
                                content_type, payload_bytes, attributes, occurred_at)
values ($1, $2, 'billing', 'invoices', $3, $4, 1, 'application/json', $5, $6::jsonb, now())
on conflict do nothing
`;

let last = 0n;

// A UUIDv7, later than every one before: rows of one transaction go out in the order of these ids.
function outboxId() {
  // 48 bits of milliseconds, then 12 that count within one.
  const now = BigInt(Date.now()) << 12n;
  last = now > last ? now : last + 1n;
  const random = randomBytes(8).readBigUInt64BE() & ((1n << 62n) - 1n);
  const value = ((last >> 12n) << 80n) | (7n << 76n) | ((last & 0xfffn) << 64n) | (2n << 62n) | random;
  return value.toString(16).padStart(32, "0").replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
}

// Writes a row in the caller's transaction; false when it is there already.
async function enqueue(client, messageId, key, eventType, payload, attributes) {
  const values = [outboxId(), messageId, key, eventType, Buffer.from(JSON.stringify(payload)), JSON.stringify(attributes)];
  const { rowCount } = await client.query(INSERT, values);
  return rowCount === 1;
}

const invoice = Number(process.argv[2]);
const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
try {
  await client.query("begin");
  await client.query("insert into invoices (id, sent) values ($1, true) on conflict (id) do update set sent = true", [invoice]);
  // A message id that says what happened: whoever does this again writes no second message.
  for (const [eventType, payload] of [
    ["InvoiceSent", { invoice }],
    ["PaymentDue", { invoice, days: 14 }],
  ]) {
    const messageId = `${eventType}-${invoice}`;
    const inserted = await enqueue(client, messageId, `invoice-${invoice}`, eventType, payload, { tenant: "blue" });
    console.log(messageId, inserted ? "inserted" : "already there");
  }
  await client.query("commit");
} finally {
  await client.end();
}
