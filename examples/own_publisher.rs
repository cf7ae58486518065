//! A relay inside a program, with a publisher of its own: each event becomes a line of a file.
//!
//! ```text
//! cargo run --example own_publisher -- postgres://me@localhost/app events.ndjson
//! ```
//!
//! `each` keeps the contract (lanes in order, one outcome per row, nothing after a stop); all that is left to say is how one message
//! is sent, and what an error means.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use keiro_relay::domain::message::Message;
use keiro_relay::domain::outcome::{Blame, Outcome, Setback};
use keiro_relay::publish::{Publisher, each};
use keiro_relay::relay::{BuildError, Relay};
use tokio::fs::OpenOptions;
use tokio::io::AsyncWriteExt as _;

/// A publisher that appends to a file.
pub fn to_file(path: &Path) -> impl Publisher {
    let path: PathBuf = path.to_owned();
    each(move |message: Message| append(path.clone(), message)).classify(|error: &io::Error| match error.kind() {
        // The disk, and not the message: no attempt is spent, and the row waits.
        io::ErrorKind::StorageFull | io::ErrorKind::PermissionDenied => Outcome::NotSent(Setback::new(
            Blame::Topic,
            format!("file.unusable: {}", error.kind()),
            Duration::from_secs(5),
        )),
        // A line may have been written in part.
        _ => Outcome::Unknown(Setback::new(Blame::Row, format!("file.failed: {}", error.kind()), Duration::ZERO)),
    })
}

async fn append(path: PathBuf, message: Message) -> io::Result<()> {
    // Whoever reads the file drops a `message_id` that was there before: delivery is at least once.
    let line = serde_json::json!({
        "message_id": message.message_id,
        "destination": message.destination,
        "key": message.message_key,
        "payload": String::from_utf8_lossy(&message.payload),
    });
    let mut file = OpenOptions::new().create(true).append(true).open(path).await?;
    file.write_all(format!("{line}\n").as_bytes()).await?;
    // Only what is on disk is acknowledged.
    file.sync_data().await
}

/// A relay over this database that writes to this file.
///
/// # Errors
/// The URL cannot be used.
pub fn relay(database_url: &str, path: &Path) -> Result<Relay, BuildError> {
    Relay::builder(to_file(path)).database_url(database_url).instance("own-publisher").build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(url), Some(path)) = (arguments.next(), arguments.next()) else {
        return Err("usage: own_publisher DATABASE_URL FILE".into());
    };
    let handle = relay(&url, Path::new(&path))?.spawn();
    tokio::select! {
        // The table is not what it should be, or a bug.
        _ = handle.done() => {}
        interrupted = tokio::signal::ctrl_c() => interrupted?,
    }
    handle.stop();
    println!("{:?}", handle.done().await);
    Ok(())
}
