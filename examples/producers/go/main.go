// The owed messages beside the change they tell of, in one transaction.
//
//	DATABASE_URL=postgres://… go run . 42
package main

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

const insert = `
insert into keiro.keiro_outbox (outbox_id, message_id, source, destination, message_key, event_type, schema_version,
                                content_type, payload_bytes, attributes, occurred_at)
values ($1, $2, 'billing', 'invoices', $3, $4, 1, 'application/json', $5, $6::jsonb, now())
on conflict do nothing`

var (
	mutex sync.Mutex
	last  uint64
)

// outboxID returns a UUIDv7, later than every one before: rows of one transaction go out in the order of these ids.
func outboxID() (id [16]byte) {
	mutex.Lock()
	defer mutex.Unlock()
	// 48 bits of milliseconds, then 12 that count within one.
	if now := uint64(time.Now().UnixMilli()) << 12; now > last {
		last = now
	} else {
		last++
	}
	if _, err := rand.Read(id[8:]); err != nil {
		log.Fatal(err)
	}
	binary.BigEndian.PutUint64(id[:8], last>>12<<16|7<<12|last&0xfff)
	id[8] = 0x80 | id[8]&0x3f
	return id
}

// enqueue writes a row in the caller's transaction; false when it is there already.
func enqueue(ctx context.Context, tx pgx.Tx, messageID, key, eventType string, payload, attributes any) (bool, error) {
	body, err := json.Marshal(payload)
	if err != nil {
		return false, err
	}
	headers, err := json.Marshal(attributes)
	if err != nil {
		return false, err
	}
	tag, err := tx.Exec(ctx, insert, outboxID(), messageID, key, eventType, body, string(headers))
	return tag.RowsAffected() == 1, err
}

func run(ctx context.Context, invoice int64) error {
	conn, err := pgx.Connect(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		business := "insert into invoices (id, sent) values ($1, true) on conflict (id) do update set sent = true"
		if _, err := tx.Exec(ctx, business, invoice); err != nil {
			return err
		}
		events := []struct {
			eventType string
			payload   any
		}{
			{"InvoiceSent", map[string]any{"invoice": invoice}},
			{"PaymentDue", map[string]any{"invoice": invoice, "days": 14}},
		}
		for _, event := range events {
			// A message id that says what happened: whoever does this again writes no second message.
			messageID := fmt.Sprintf("%s-%d", event.eventType, invoice)
			key := fmt.Sprintf("invoice-%d", invoice)
			inserted, err := enqueue(ctx, tx, messageID, key, event.eventType, event.payload, map[string]string{"tenant": "blue"})
			if err != nil {
				return err
			}
			if inserted {
				fmt.Println(messageID, "inserted")
			} else {
				fmt.Println(messageID, "already there")
			}
		}
		return nil
	})
}

func main() {
	invoice, err := strconv.ParseInt(os.Args[1], 10, 64)
	if err == nil {
		err = run(context.Background(), invoice)
	}
	if err != nil {
		log.Fatal(err)
	}
}
