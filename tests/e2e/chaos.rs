//! Chaos on real processes: under load Envoys die, Redis stops and comes back, listeners are reloaded, VMs trap and clients
//! hang up; then an audit that knows only what upstream and clients saw.
//!
//! `make test` runs a short storm on each store, `make chaos MINUTES=30` a long one; `SEED=` repeats the choices of a run,
//! as far as real processes allow.

mod audit;
mod clients;
mod history;
mod ledger;
mod planted;
mod report;
mod storm;
mod upstream;

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use self::audit::audit;
use self::history::Store;
use self::report::{Summary, table};
use self::storm::{Plan, Storm};

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a whole number")))
}

fn plan(store: Store) -> Plan {
    let seed = number("CHAOS_SEED").unwrap_or_else(|| RandomState::new().hash_one(()) >> 40);
    let short = Plan {
        store,
        seed,
        length: Duration::from_secs(if store == Store::Redis { 9 } else { 8 }),
        workers: 2,
        clients: 20,
        pause: Duration::from_millis(500),
        warm_up: Duration::from_secs(1),
    };
    // Two thirds of the time for Redis, where more can break.
    let part = if store == Store::Redis { 40 } else { 20 };
    number("CHAOS_MINUTES").map_or(short, |minutes| Plan {
        length: Duration::from_secs(minutes * part),
        workers: 4,
        clients: 32,
        pause: Duration::from_secs(3),
        warm_up: Duration::from_secs(minutes * part / 8).min(Duration::from_secs(20)),
        ..short
    })
}

/// The storm, its table, and no findings. The summary says what really happened.
async fn survive(store: Store) -> Summary {
    let plan = plan(store);
    println!("{plan:?}");
    let begin = Instant::now();
    let history = Storm::run(plan).await;
    let (summary, verdict) = (Summary::of(&history), audit(&history));
    let title = format!(
        "Chaos on {store}: {} s, {} Envoy(s) of {} workers, {} clients, CHAOS_SEED={}",
        begin.elapsed().as_secs(),
        history.rests.len(),
        plan.workers,
        plan.clients,
        plan.seed
    );
    let table = table(&title, &history, &summary, &verdict);
    println!("{table}");
    let findings: Vec<String> = verdict.findings.iter().take(20).map(ToString::to_string).collect();
    assert!(findings.is_empty(), "{}", findings.join("\n"));
    assert!(!history.lives.is_empty(), "no process lived long enough to be weighed");
    for name in ["client hung up", "connection lost", "cut off"] {
        assert!(summary.tries.get(name).is_some_and(|count| *count > 0), "no try of the kind {name:?}");
    }
    for name in ["replayed", "first answers", "409 in-flight", "422 mismatch", "424 failed"] {
        assert!(summary.answer(name) > 0, "no answer of the kind {name:?}");
    }
    assert!(summary.executions > 150, "{} runs are no load", summary.executions);
    for name in [
        "envoy killed and restarted",
        "vm trapped at a request",
        "vm trapped at a response",
        "listener reloaded",
    ] {
        assert!(summary.fault(name) > 0, "nothing of the kind {name:?} happened");
    }
    let traps = (history.traps_logged, summary.fault("vm trapped at a request"));
    assert!(traps.0 > traps.1, "no VM trapped at a response: {traps:?}");
    summary
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_redis_breaks_no_guarantee() {
    let summary = survive(Store::Redis).await;
    for name in ["redis paused", "redis killed and restarted"] {
        assert!(summary.fault(name) > 0, "nothing of the kind {name:?} happened");
    }
    assert!(summary.answer("503 store-unavailable") > 0, "nobody noticed that Redis was away");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_on_the_embedded_store_breaks_no_guarantee() {
    survive(Store::SharedData).await;
}
