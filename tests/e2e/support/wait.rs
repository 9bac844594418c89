//! Owns waiting: polling a condition up to a deadline, in place of sleeps.

use std::time::{Duration, Instant};

/// Long enough for a loaded two-core machine; a passing test never waits for it.
pub const PATIENCE: Duration = Duration::from_secs(20);

const PAUSE: Duration = Duration::from_millis(5);

/// Calls `probe` until it gives a value; panics with `what` at the deadline.
pub async fn poll_until<T>(deadline: Duration, what: &str, mut probe: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(value) = probe().await {
            return value;
        }
        assert!(Instant::now() < end, "not within {deadline:?}: {what}");
        tokio::time::sleep(PAUSE).await;
    }
}
