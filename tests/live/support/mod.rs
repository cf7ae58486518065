//! What live tests share: servers, databases, topics, the daemon, and the oracle that judges what reached Kafka.
//!
//! Nothing here ever skips a test: a server that is missing fails it and says what to run.

// Each test uses some of this; what none uses today is here for the next one.
#![allow(dead_code)]

pub mod acls;
pub mod daemon;
pub mod database;
pub mod feed;
pub mod mock;
pub mod oracle;
pub mod outbox;
pub mod passes;
pub mod random;
pub mod services;
pub mod session;
pub mod store;
pub mod topics;
pub mod victims;

use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Long enough for anything that works on two busy cores; a wait that takes this long has failed.
pub const LONG: Duration = Duration::from_secs(60);

/// Pause between two looks at a condition.
const LOOK_INTERVAL: Duration = Duration::from_millis(10);

/// Waits until the condition holds; fails with `what` when it does not within the bound.
#[track_caller]
pub fn wait_until(what: &str, bound: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, bound, || condition().then_some(()));
}

/// Waits until there is a value.
#[track_caller]
pub fn wait_for<T>(what: &str, bound: Duration, mut value: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + bound;
    loop {
        if let Some(value) = value() {
            return value;
        }
        assert!(Instant::now() < end, "waited {bound:?} for {what}");
        thread::sleep(LOOK_INTERVAL);
    }
}

/// [`wait_until`] for conditions that have to be awaited.
pub async fn wait_until_async(what: &str, bound: Duration, mut condition: impl AsyncFnMut() -> bool) {
    let end = Instant::now() + bound;
    while !condition().await {
        assert!(Instant::now() < end, "waited {bound:?} for {what}");
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// A name that no other test, and no other process on the same servers, uses.
pub fn unique(prefix: &str) -> String {
    static COUNT: AtomicU32 = AtomicU32::new(1);
    let salt: u32 = rand::random();
    format!("{prefix}_{}_{salt:08x}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// Runs asynchronous work to its end, from inside a runtime as well as outside.
pub fn run<T: Send>(work: impl AsyncFnOnce() -> T + Send) -> T {
    let thread = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(work())
    };
    match thread::scope(|scope| scope.spawn(thread).join()) {
        Ok(output) => output,
        Err(panic) => std::panic::resume_unwind(panic),
    }
}
