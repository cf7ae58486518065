//! The owed message beside the change it tells of, in one transaction: both are there, or neither.
//!
//! `DATABASE_URL=… cargo run --no-default-features --example beside_a_business_update -- 42`

use std::error::Error;

use keiro_relay::producer::{Draft, IntegrationEvent, NewRow, OnDuplicate, Outbox, fresh_outbox_id};
use serde_json::json;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let invoice: i64 = std::env::args().nth(1).ok_or("which invoice?")?.parse()?;
    let (mut client, connection) =
        tokio_postgres::connect(&std::env::var("DATABASE_URL")?, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);

    // Ids that say what happened: whoever does this again writes no second message.
    let event = |kind: &str, payload: &serde_json::Value| -> Result<NewRow, Box<dyn Error>> {
        let draft = Draft::json("invoices", kind, payload)?.key(format!("invoice-{invoice}"));
        let event = IntegrationEvent::from_draft("billing", format!("{kind}-{invoice}"), draft);
        // Rows of one transaction go out in the order of these ids.
        Ok(NewRow::new(fresh_outbox_id(), event))
    };
    let rows = [
        event("InvoiceSent", &json!({"invoice": invoice}))?,
        event("PaymentDue", &json!({"invoice": invoice, "days": 14}))?,
    ];

    let tx = client.transaction().await?;
    tx.execute(
        "insert into invoices (id, sent) values ($1, true) on conflict (id) do update set sent = true",
        &[&invoice],
    )
    .await?;
    let outbox = Outbox::default().on_duplicate(OnDuplicate::AcceptIdentical);
    let enqueued = outbox.enqueue_batch(&tx, &rows).await?;
    tx.commit().await?;

    for row in enqueued {
        println!("{} {}", row.message_id, if row.inserted { "inserted" } else { "already there" });
    }
    Ok(())
}
