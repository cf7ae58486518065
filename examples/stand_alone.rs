//! A message that stands for itself: a transaction of its own, due in a minute, with an id that is minted.
//!
//! `DATABASE_URL=… cargo run --no-default-features --example stand_alone`

use std::error::Error;
use std::time::{Duration, SystemTime};

use keiro_relay::producer::{
    Draft, IntegrationEvent, MessageIdPrefix, NewRow, Outbox, fresh_message_id, fresh_outbox_id,
};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (mut client, connection) =
        tokio_postgres::connect(&std::env::var("DATABASE_URL")?, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);

    let prefix = MessageIdPrefix::new("reminder")?;
    let draft = Draft::new("reminders", "ReminderWanted", "text/plain; charset=utf-8", "water the plants");
    let event = IntegrationEvent::from_draft("garden", fresh_message_id(&prefix), draft);
    // Both ids stay the same however often the transaction has to be tried.
    let row = NewRow::new(fresh_outbox_id(), event).available_at(SystemTime::now() + Duration::from_secs(60));

    let outbox = Outbox::default();
    let enqueued = loop {
        let tx = client.transaction().await?;
        match outbox.enqueue(&tx, &row).await {
            Ok(enqueued) => {
                tx.commit().await?;
                break enqueued;
            }
            Err(error) if error.is_transient() && !tx.client().is_closed() => eprintln!("once more: {error}"),
            Err(error) => return Err(error.into()),
        }
    };
    println!("{} {}", enqueued.message_id, if enqueued.inserted { "inserted" } else { "already there" });
    Ok(())
}
