//! The library half, for programs that write rows: events, ids that sort, and `enqueue` inside the caller's transaction.
//!
//! Nothing here ever opens a connection, commits, rolls back, or takes a pool: the row and your business row stand or fall together
//! because they are one transaction. Without the feature `relay` this is all there is to link: no librdkafka, no HTTP.
//!
//! ```no_run
//! # async fn example(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//! use keiro_relay::producer::{Draft, IntegrationEvent, MessageIdPrefix, NewRow, Outbox, fresh_message_id, fresh_outbox_id};
//!
//! let prefix = MessageIdPrefix::new("invoice")?;
//! let draft = Draft::json("invoices", "InvoiceSent", &serde_json::json!({"total": 7}))?.key("customer-42");
//! let event = IntegrationEvent::from_draft("billing", fresh_message_id(&prefix), draft);
//!
//! let tx = client.transaction().await?;
//! tx.execute("update invoices set sent = true where id = 7", &[]).await?;
//! Outbox::default().enqueue(&tx, &NewRow::new(fresh_outbox_id(), event)).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```

mod enqueue;
mod error;
mod event;
mod ids;
mod integration;
mod limits;

pub use enqueue::{BATCH_OCTETS_MAX, BATCH_ROWS_MAX, Enqueued, NewRow, OnDuplicate, Outbox};
pub use error::{BadTable, Conflict, DatabaseError, EnqueueError, RowProblem};
pub use event::{DecodeError, Draft, EncodeError, IntegrationEvent, SchemaReference, TraceContext};
pub use ids::{BadPrefix, MessageIdPrefix, StableId, fresh_message_id, fresh_outbox_id, stable_outbox_id};
pub use integration::{BadProducer, Codec, HandleError, IntegrationProducer, JsonCodec, RecordedEvent};
pub use limits::FieldProblem;

pub use crate::domain::limits::Limits;
pub use crate::domain::message::PgTime;
