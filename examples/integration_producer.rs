//! A subscription to a private stream that tells the world what matters to it: row and checkpoint in one transaction.
//!
//! The event store is a table here; the subscription's loop is always yours.
//! `DATABASE_URL=… cargo run --no-default-features --example integration_producer`

use std::error::Error;

use keiro_relay::producer::{Draft, IntegrationProducer, JsonCodec, PgTime, RecordedEvent, StableId, stable_outbox_id};
use serde::Deserialize;

#[derive(Deserialize)]
struct Paid {
    invoice: i64,
    cents: i64,
}

/// What a private event is to the world, if anything.
fn map_event(_: &RecordedEvent, paid: &Paid) -> Option<Draft> {
    if paid.cents == 0 {
        return None;
    }
    let payload = serde_json::json!({"invoice": paid.invoice, "cents": paid.cents});
    let draft = Draft::json("payments", "InvoicePaid", &payload).expect("numbers have a JSON form");
    Some(draft.key(format!("invoice-{}", paid.invoice)))
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut client, connection) =
        tokio_postgres::connect(&std::env::var("DATABASE_URL")?, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    let mut producer =
        IntegrationProducer::new("billing-to-world", "billing", "pay", JsonCodec::<Paid>::new(), map_event)?;

    // One event at a time, each in a transaction that begins after the one before has ended: that is what keeps their order.
    loop {
        let tx = client.transaction().await?;
        let next = "select e.position, e.event_id, e.kind, e.data, e.recorded_at from events e
                    where e.position > (select c.position from checkpoints c where c.name = $1 for update)
                    order by e.position limit 1";
        let Some(row) = tx.query_opt(next, &[&producer.name()]).await? else { return Ok(()) };
        let recorded = RecordedEvent {
            event_id: row.get("event_id"),
            global_position: row.get("position"),
            event_type: row.get("kind"),
            data: row.get("data"),
        };
        let recorded_at: std::time::SystemTime = row.get("recorded_at");
        let id = StableId {
            producer: producer.name(),
            recorded_at: PgTime::from(recorded_at),
            global_position: recorded.global_position,
            n: 0,
        };
        let outbox_id = stable_outbox_id(id);
        let enqueued = producer.handle(&tx, outbox_id, &recorded).await?;
        tx.execute(
            "update checkpoints set position = $2 where name = $1",
            &[&producer.name(), &recorded.global_position],
        )
        .await?;
        tx.commit().await?;
        match enqueued {
            Some(row) => println!("{} {}", recorded.global_position, if row.inserted { "inserted" } else { "there" }),
            None => println!("{} skipped", recorded.global_position),
        }
    }
}
