//! The budget of rows and bytes in flight: nobody gets all of it, and nobody waits for ever.

use std::sync::Arc;

use futures_util::FutureExt as _;
use keiro_relay::relay::budget::{Account, Budget, Share};

const MIB: usize = 1024 * 1024;

/// Takes shares of this size until one would have to wait.
fn grab(budget: &Budget, account: &Arc<Account>, rows: usize, bytes: usize, shares_max: usize) -> Vec<Share> {
    (0..shares_max).map_while(|_| budget.take(account, rows, bytes).now_or_never()).collect()
}

#[test]
fn sources_that_never_give_back_leave_room_for_others() {
    for (rows, bytes, claimed) in [(500, 8 * MIB, 4096), (500, 8 * MIB, 8 * MIB), (20, 8 * MIB, 8 * MIB)] {
        let budget = Budget::new(10_000, 64 * MIB);
        let mut held = Vec::new();
        for source in 0..3 {
            let account = Arc::default();
            // Eight passes at once, as a source has them, each of which gives back what its claim did not use.
            for _ in 0..8 {
                let Some(mut share) = budget.take(&account, rows, bytes).now_or_never() else { break };
                share.shrink(rows, claimed);
                held.push(share);
            }
            println!("source {source}: {} rows, {} bytes in flight", budget.rows_in_flight(), budget.bytes_in_flight());
        }
        let late = Arc::default();
        assert_eq!(grab(&budget, &late, rows, bytes, 1).len(), 1, "{rows} {bytes} {claimed}: a batch for a fourth");
    }
}

#[test]
fn source_that_is_alone_has_its_eight_passes() {
    let (budget, account) = (Budget::new(10_000, 64 * MIB), Arc::default());
    let mut held = Vec::new();
    for _ in 0..8 {
        let mut share = budget.take(&account, 500, 8 * MIB).now_or_never().expect("room");
        share.shrink(500, 500 * 1024);
        held.push(share);
    }
    assert_eq!((budget.rows_in_flight(), budget.bytes_in_flight()), (4_000, 4_000 * 1024));
    drop(held);
    assert_eq!((budget.rows_in_flight(), budget.bytes_in_flight()), (0, 0));
}

#[tokio::test]
async fn who_waits_goes_on_when_something_comes_back() {
    // A batch is as large as all of it.
    let (budget, account) = (Budget::new(3, 1024), Arc::default());
    let mut share = budget.take(&account, 500, 8 * MIB).await;
    assert!(budget.take(&account, 1, 1).now_or_never().is_none());
    let (one, other) = (budget.take(&account, 1, 1), async {
        tokio::task::yield_now().await;
        share.shrink(1, 0);
        share
    });
    let (_one, share) = tokio::time::timeout(std::time::Duration::from_secs(20), async { tokio::join!(one, other) })
        .await
        .expect("it was woken");
    drop(share);
    let stranger = Arc::default();
    let _two = budget.take(&stranger, 2, 0).now_or_never();
    assert!(budget.rows_in_flight() <= 3);
}
