//! Owns waiting: polling a condition up to a deadline, in place of sleeps.

use std::time::{Duration, Instant};

/// Long enough for a loaded two-core machine; a passing test never waits for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

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

/// Awaits all of them at once, in this task; the results come in the order of the futures.
pub async fn all_at_once<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        let mut pending = false;
        for (future, result) in &mut running {
            if result.is_none() {
                match future.as_mut().poll(cx) {
                    std::task::Poll::Ready(output) => *result = Some(output),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    running.into_iter().filter_map(|(_, result)| result).collect()
}
