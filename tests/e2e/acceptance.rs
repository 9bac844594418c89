//! The four failures of one key with one TTL (design, section 1), end to end: how often the upstream really ran.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

const LEASE: Duration = Duration::from_millis(1500);
const TRAP: (&str, &str) = ("x-test-fault", "trap");

/// A short lease and a long record, once with takeover and once without.
fn short_lease() -> Value {
    let rule = |name: &str, prefix: &str, on_abandoned: &str| {
        json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": prefix}},
            "scope": [{"header": "x-account-id"}],
            "lock_ttl": "1500ms",
            "record_ttl": "24h",
            "on_abandoned": on_abandoned,
        })
    };
    json!({
        "store": {"shared_data": {}},
        "rules": [rule("takeover", "/takeover", "takeover"), rule("retain", "/retain", "retain")],
    })
}

async fn trapping_envoy(origin: &Origin) -> Envoy {
    Envoy::builder()
        .workers(4)
        .wasm(Wasm::TestHooks)
        .plugin(short_lease())
        .origin_addr(origin.addr())
        .start()
        .await
}

/// The reloads of the VM so far.
async fn reloads(envoy: &Envoy) -> u64 {
    let stats = envoy.stats("wasm.").await;
    stats.iter().filter(|(name, _)| name.ends_with("vm_reload_success")).map(|(_, count)| count).sum()
}

fn traps(envoy: &Envoy) -> usize {
    envoy.log_text().matches("test fault: trap").count()
}

/// Waits until every VM that trapped is loaded anew; Envoy does that when a request comes, after a back-off.
async fn all_alive(envoy: &Envoy) {
    poll_until(PATIENCE, "every VM loaded anew", async || {
        let probes = vec![Request::post("/uncovered"); 8];
        let answers = burst(envoy.addr(), Protocol::Http1, probes).await;
        assert!(
            answers.iter().all(|answer| matches!(answer, Ok(answer) if [200, 503].contains(&answer.status)))
        );
        (reloads(envoy).await as usize == traps(envoy)).then_some(())
    })
    .await;
}

/// Sends `request` on fresh connections until it gets an answer of the filter or the upstream: a worker whose VM is
/// being loaded anew answers 503 by itself.
async fn ask(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    poll_until(PATIENCE, "an answer from a living VM", async || {
        let answer = send_once(envoy.addr(), proto, request).await.unwrap();
        (answer.status != 503).then_some(answer)
    })
    .await
}

#[derive(Clone, Copy, Debug)]
enum Crash {
    /// The claim is made, nothing was forwarded.
    BeforeForwarding,
    /// The upstream has run, nothing is stored.
    AtTheResponse,
}

/// One crash between claim and completion, and all that its key sees until it is settled.
async fn crash_and_heal(envoy: &Envoy, origin: &Origin, proto: Protocol, crash: Crash, path: &str) {
    let what = format!("{proto:?} {crash:?} {path}");
    let key = unique_key();
    let request = Request::post(path).key(&key);
    let (first, ran) = match crash {
        Crash::BeforeForwarding => (request.clone().header(TRAP.0, TRAP.1), 0),
        Crash::AtTheResponse => (request.clone(), 1),
    };
    all_alive(envoy).await;
    let before = traps(envoy);
    let claimed = Instant::now();
    let crashed = Client::connect(envoy.addr(), proto).await.start(&first).await.unwrap();
    poll_until(PATIENCE, "the trap", async || (traps(envoy) == before + 1).then_some(())).await;
    assert_eq!(origin.executions_of(&key), ran, "{what}");

    // Within the lease nobody runs, whichever worker is asked.
    let mut refused = 0;
    while refused < 6 && claimed.elapsed() < LEASE * 3 / 4 {
        let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
        if answer.problem_type().is_none() {
            assert_eq!(answer.status, 503, "{what}: {answer:?}");
            continue;
        }
        assert_eq!((answer.status, answer.problem_type().as_deref()), (409, Some("in-flight")), "{what}");
        refused += 1;
    }
    assert!(refused >= 2, "{what}: only {refused} refusals within the lease");
    assert_eq!(origin.executions_of(&key), ran, "{what}");

    let healed = poll_until(PATIENCE, "the lease to run out", async || {
        let answer = ask(envoy, proto, &request).await;
        (answer.problem_type().as_deref() != Some("in-flight")).then_some(answer)
    })
    .await;
    assert!(claimed.elapsed() >= LEASE, "{what}: healed after {:?}", claimed.elapsed());
    assert!(claimed.elapsed() < LEASE * 4, "{what}: healed after {:?}", claimed.elapsed());
    // Who crashed gets no answer, or a bare 503.
    let crashed = tokio::time::timeout(Duration::from_millis(50), crashed.finish()).await;
    assert!(!matches!(&crashed, Ok(Ok(answer)) if answer.status != 503), "{what}: {crashed:?}");
    let again = ask(envoy, proto, &request).await;
    if path.starts_with("/retain") {
        for answer in [healed, again] {
            let got = (answer.status, answer.problem_type());
            assert_eq!(got, (424, Some("abandoned".to_owned())), "{what}: {answer:?}");
            assert_eq!(answer.header("retry-after"), None, "{what}");
        }
        assert_eq!(origin.executions_of(&key), ran, "{what}");
        return;
    }
    assert_eq!((healed.status, healed.header("idempotent-replayed")), (200, None), "{what}: {healed:?}");
    assert_eq!(origin.executions_of(&key), ran + 1, "{what}");
    let attempts: Vec<Option<String>> = origin
        .requests()
        .iter()
        .filter(|seen| seen.key() == Some(key.as_bytes()))
        .map(|seen| seen.header("x-idempotency-attempt").map(str::to_owned))
        .collect();
    let expected = vec![None; ran].into_iter().chain([Some("2".to_owned())]);
    assert_eq!(attempts, expected.collect::<Vec<_>>(), "{what}");
    assert_eq!((again.status, again.header("idempotent-replayed")), (200, Some("true")), "{what}");
    assert_eq!(again.body, healed.body, "{what}");
    assert_eq!(origin.executions_of(&key), ran + 1, "{what}");
}

// A10: a crash between claim and completion heals when the lease is over, a day before the record would be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_claim_and_completion_heals_after_the_lease() {
    let origin = Origin::start().await;
    for path in ["/takeover", "/retain"] {
        let first_traps = |_: Seen, nth| async move {
            let reply = Reply::echo(200);
            if nth == 1 { reply.header(TRAP.0, TRAP.1) } else { reply }
        };
        origin.on(&format!("{path}/response"), Behaviour::func(first_traps));
    }
    let envoy = trapping_envoy(&origin).await;
    // One crash after the other: two at the same time could be in the same VM.
    for (proto, crash, path) in [
        (Protocol::Http1, Crash::AtTheResponse, "/takeover/response"),
        (Protocol::Http2, Crash::AtTheResponse, "/retain/response"),
        (Protocol::Http2, Crash::BeforeForwarding, "/takeover/request"),
        (Protocol::Http1, Crash::BeforeForwarding, "/retain/request"),
    ] {
        crash_and_heal(&envoy, &origin, proto, crash, path).await;
    }
    assert!(envoy.workers_that_served().await >= 2);
    all_alive(&envoy).await;
    assert_eq!((traps(&envoy), reloads(&envoy).await), (4, 4));
    assert_eq!(envoy.metric("takeovers").await, 2);
    assert!(envoy.metric("failed_replies").await >= 4);
}

/// Open connections of the main listener by worker.
async fn connections_by_worker(envoy: &Envoy) -> BTreeMap<String, u64> {
    let stats = envoy.stats("listener.main.worker_").await;
    stats.into_iter().filter(|(name, _)| name.ends_with(".downstream_cx_active")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trap_on_one_worker_leaves_the_others_and_every_record_alone() {
    let origin = Origin::start().await;
    let envoy = trapping_envoy(&origin).await;
    for proto in Protocol::BOTH {
        all_alive(&envoy).await;
        let barrier = Barrier::new();
        let path = format!("/takeover/{proto:?}");
        origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
        let done = Request::post("/retain/done").key(unique_key()).body("done");
        let first = ask(&envoy, proto, &done).await;
        assert_eq!(first.status, 200);

        const HELD: usize = 12;
        let keys: Vec<String> = (0..HELD).map(|_| unique_key()).collect();
        let mut held = Vec::new();
        for key in &keys {
            let client = Client::connect(envoy.addr(), proto).await;
            held.push(client.start(&Request::post(&path).key(key)).await.unwrap());
        }
        barrier.wait_arrived(HELD, PATIENCE).await;
        let before = connections_by_worker(&envoy).await;
        assert!(before.values().filter(|count| **count > 0).count() >= 2, "{before:?}");
        assert_eq!(before.values().sum::<u64>(), HELD as u64);

        // The connection that carries the fault is open before it does, so that its worker is known.
        let mut victim = Client::connect(envoy.addr(), proto).await;
        let after = poll_until(PATIENCE, "the connection's worker", async || {
            let after = connections_by_worker(&envoy).await;
            (after.values().sum::<u64>() == HELD as u64 + 1).then_some(after)
        })
        .await;
        let trapped = before.keys().find(|name| before[*name] < after[*name]).expect("a worker");
        let traps_before = traps(&envoy);
        let fault = Request::post("/retain/victim").key(unique_key()).header(TRAP.0, TRAP.1);
        let answer = victim.send_within(&fault, Duration::from_secs(1)).await;
        assert!(!matches!(&answer, Ok(answer) if answer.status != 503), "{answer:?}");
        poll_until(PATIENCE, "the trap", async || (traps(&envoy) > traps_before).then_some(())).await;

        barrier.open();
        let survivors = HELD - before[trapped] as usize;
        let answers: Vec<_> = held
            .into_iter()
            .map(|pending| {
                tokio::spawn(
                    async move { tokio::time::timeout(Duration::from_secs(2), pending.finish()).await },
                )
            })
            .collect();
        let mut finished = Vec::new();
        for (key, answer) in keys.iter().zip(answers) {
            match answer.await.unwrap() {
                Ok(Ok(answer)) if answer.status == 200 => finished.push((key, answer)),
                // Its VM is gone: it hangs, or Envoy gives it up.
                Ok(Ok(answer)) => assert_eq!(answer.status, 503, "{answer:?}"),
                Ok(Err(_)) | Err(_) => {}
            }
        }
        assert_eq!(finished.len(), survivors, "{proto:?}: {before:?}, {trapped} trapped");
        // What the others stored is there, and what was stored before.
        for (key, answer) in finished {
            let replay = ask(&envoy, proto, &Request::post(&path).key(key)).await;
            assert_eq!(
                (replay.status, replay.header("idempotent-replayed")),
                (200, Some("true")),
                "{replay:?}"
            );
            assert_eq!(replay.body, answer.body);
            assert_eq!(origin.executions_of(key), 1);
        }
        let replay = ask(&envoy, proto, &done).await;
        assert_eq!((replay.status, replay.header("idempotent-replayed")), (200, Some("true")));
        assert_eq!(replay.body, first.body);
        assert_eq!(
            origin.executions(|seen| seen.path == "/retain/done"),
            usize::from(proto == Protocol::Http2) + 1
        );
    }
    assert!(envoy.workers_that_served().await >= 2);
}

/// A rule for each way to treat a failing status.
fn retain_and_release() -> Value {
    let rule = |name: &str, on_failure: &str| {
        json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}],
            "on_failure": on_failure,
        })
    };
    json!({"store": {"shared_data": {}}, "rules": [rule("retain", "retain"), rule("release", "release")]})
}

// B01: the handler charges and then fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_fails_after_its_side_effect_runs_again_only_under_release() {
    let origin = Origin::start().await;
    let failing =
        Behaviour::Sequence(vec![Reply::status(500).chunk("charged, then broke"), Reply::echo(200)]);
    origin.on("/retain", failing.clone()).on("/release", failing);
    let envoy =
        Envoy::builder().workers(4).plugin(retain_and_release()).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let (kept, given_back) = (unique_key(), unique_key());
        let send = async |path: &str, key: &str| {
            send_once(envoy.addr(), proto, &Request::post(path).key(key).body("amount=1")).await.unwrap()
        };
        let first = send("/retain", &kept).await;
        assert_eq!((first.status, first.text().as_str()), (500, "charged, then broke"));
        for _ in 0..3 {
            let retry = send("/retain", &kept).await;
            assert_eq!((retry.status, retry.problem_type().as_deref()), (424, Some("failed")), "{retry:?}");
        }
        assert_eq!(origin.executions_of(&kept), 1);

        assert_eq!(send("/release", &given_back).await.status, 500);
        let second = send("/release", &given_back).await;
        assert_eq!((second.status, second.header("idempotent-replayed")), (200, None));
        let third = send("/release", &given_back).await;
        assert_eq!((third.status, third.header("idempotent-replayed")), (200, Some("true")));
        assert_eq!(third.body, second.body);
        assert_eq!(origin.executions_of(&given_back), 2);
        // Given back, it is a first attempt again.
        assert!(origin.requests().iter().all(|seen| seen.header("x-idempotency-attempt").is_none()));
    }
    assert_eq!(envoy.metric("retained.status").await, 2);
    assert_eq!(envoy.metric("released.failure").await, 2);
    assert_eq!(envoy.metric("failed_replies").await, 6);
    assert!(envoy.workers_that_served().await >= 2);
}

// B02: a transient failure is not pinned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_503_is_run_again_and_a_200_is_replayed() {
    let origin = Origin::start().await;
    origin.on("/", Behaviour::Sequence(vec![Reply::status(503).chunk("busy"), Reply::echo(200)]));
    let envoy =
        Envoy::builder().workers(4).plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let busy = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!((busy.status, busy.text().as_str()), (503, "busy"));
        let run = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!((run.status, run.header("idempotent-replayed")), (200, None), "{run:?}");
        assert_eq!(origin.executions_of(&key), 2);
        for answer in burst(envoy.addr(), proto, vec![request.clone(); 8]).await {
            let replay = answer.unwrap();
            assert_eq!((replay.status, replay.header("idempotent-replayed")), (200, Some("true")));
            assert_eq!(replay.body, run.body);
        }
        assert_eq!(origin.executions_of(&key), 2);
    }
    assert_eq!(envoy.metric("released.status").await, 2);
    assert_eq!(envoy.metric("replayed").await, 16);
    assert!(envoy.workers_that_served().await >= 2);
}

// E01: same key, method, path and body.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_callers_with_the_same_request_get_an_execution_each() {
    let origin = Origin::start().await;
    let envoy =
        Envoy::builder().workers(4).plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let barrier = Barrier::new();
        origin.on("/pay", Behaviour::BarrierEcho(barrier.clone()));
        let key = unique_key();
        let request = |account: &str| Request::post("/pay").key(&key).account(account).body("amount=1");
        let both = vec![request("alice"), request("bob")];
        let (addr, sent) = (envoy.addr(), both.clone());
        let running = tokio::spawn(async move { burst(addr, proto, sent).await });
        // Both run at the same time, and each is in flight for its own caller only.
        barrier.wait_arrived(2, PATIENCE).await;
        for answer in burst(envoy.addr(), proto, both.clone()).await {
            assert_eq!(answer.unwrap().problem_type().as_deref(), Some("in-flight"));
        }
        barrier.open();
        let answers: Vec<Response> = running.await.unwrap().into_iter().map(Result::unwrap).collect();
        assert_ne!(answers[0].execution(), answers[1].execution());
        for (request, answer) in both.iter().zip(&answers) {
            let replay = send_once(envoy.addr(), proto, request).await.unwrap();
            assert_eq!((replay.status, replay.header("idempotent-replayed")), (200, Some("true")));
            assert_eq!(replay.body, answer.body);
        }
        assert_eq!(origin.executions_of(&key), 2);
        for account in ["alice", "bob"] {
            let ran = |seen: &Seen| {
                seen.key() == Some(key.as_bytes()) && seen.header("x-account-id") == Some(account)
            };
            assert_eq!(origin.executions(ran), 1, "{account}");
        }
    }
    assert!(envoy.workers_that_served().await >= 2);
}
