//! `allow_on_headers_stop_iteration`: without it no body can be held, which must never hang a request; with it, a
//! body that stalls is given up, and one that keeps coming is not.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::requests::Slow;
use crate::support::*;

async fn envoy_with(origin: &Origin, stop_iteration: bool, workers: usize, rule: serde_json::Value) -> Envoy {
    Envoy::builder()
        .plugin(plugin_with(rule))
        .headers_stop_iteration(stop_iteration)
        .workers(workers)
        .origin_addr(origin.addr())
        .start()
        .await
}

fn assert_body_timeout(answer: &Response, what: &str) {
    assert_eq!(
        (answer.status, answer.problem_type().as_deref()),
        (408, Some("body-timeout")),
        "{what}: {answer:?}"
    );
    assert_eq!(answer.header("x-idempotency-refusal"), Some("body-timeout"), "{what}");
    assert_eq!(answer.json()["status"], 408, "{what}");
}

async fn assert_logged(envoy: &Envoy, path: &str) {
    let expected =
        format!("408 idempotency_body_timeout refused.body-timeout rule=payments attempt=0 key=- {path}");
    envoy.wait_access_log(|line| line == expected, PATIENCE).await;
}

/// Without the setting a request with a body is refused after `body_timeout`, and log and metric name the cause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_a_body_is_refused_and_nothing_hangs() {
    let origin = Origin::start().await;
    let envoy = envoy_with(&origin, false, 1, json!({"body_timeout": "300ms"})).await;
    let mut refused = 0;
    for proto in Protocol::BOTH {
        // A body that is there, one in pieces, one beyond every buffer's limit.
        for (length, sizes) in [(1, None), (5000, Some([1000].as_slice())), (900_000, None)] {
            let key = unique_key();
            let path = format!("/{key}");
            let request = Request::post(&path).key(&key).body(vec![b'x'; length]);
            let request = sizes.map_or(request.clone(), |sizes| request.chunked(sizes));
            let what = format!("{proto:?} {length} {sizes:?}");
            let began = Instant::now();
            let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
            let took = began.elapsed();
            assert_body_timeout(&answer, &what);
            assert!(took >= Duration::from_millis(250) && took < Duration::from_secs(5), "{what}: {took:?}");
            assert_logged(&envoy, &path).await;
            refused += 1;
            assert_eq!(envoy.metric("rejected.body_timeout").await, refused, "{what}");
            assert_eq!(envoy.metric("headers_stop_iteration_missing").await, refused, "{what}");
            assert_eq!(origin.executions_of(&key), 0, "{what}");
            // Nothing was claimed: the same key without a body is no mismatch, and runs.
            let bodyless = Request::post(&path).key(&key);
            let first = send_once(envoy.addr(), proto, &bodyless).await.unwrap();
            let again = send_once(envoy.addr(), proto, &bodyless).await.unwrap();
            assert_eq!((first.status, again.status), (200, 200), "{what}: {first:?}");
            assert_eq!(
                (&again.body, again.header("idempotent-replayed")),
                (&first.body, Some("true")),
                "{what}"
            );
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
    }
    assert!(envoy.log_contains("allow_on_headers_stop_iteration"), "{}", envoy.log_text());
    assert!(origin.requests().iter().all(|seen| seen.body.is_empty()));
    assert_eq!(envoy.metric("executed").await, 6);
    assert_eq!(envoy.metric("in_flight").await, 0);
}

/// `fingerprint.body: false` is the mode for hosts that can't set it: protection, replay and whole bodies. A01.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_setting_the_head_alone_still_protects() {
    const MANY: usize = 30;
    let origin = Origin::start().await;
    let rule =
        json!({"fingerprint": {"body": false, "headers": ["content-digest"]}, "body_timeout": "300ms"});
    let envoy = envoy_with(&origin, false, 4, rule).await;
    let mut rng = Rng::new(3);
    for proto in Protocol::BOTH {
        for (length, sizes) in [(0, None), (10, None), (3000, Some([1, 500].as_slice())), (900 << 10, None)] {
            let key = unique_key();
            let body = rng.bytes(length);
            let request =
                Request::post("/pay").key(&key).header("content-digest", "sha-256=:YQ==:").body(&body);
            let request = sizes.map_or(request.clone(), |sizes| request.chunked(sizes));
            let what = format!("{proto:?} {length} {sizes:?}");
            let first = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(first.status, 200, "{what}: {first:?}");
            assert!(origin.requests().pop().unwrap().body == body, "{what}");
            let again = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((again.status, &again.body), (200, &first.body), "{what}");
            assert_eq!(again.header("idempotent-replayed"), Some("true"), "{what}");
            let other = request.without("content-digest").header("content-digest", "sha-256=:Yg==:");
            let other = send_once(envoy.addr(), proto, &other).await.unwrap();
            assert_eq!((other.status, other.problem_type().as_deref()), (422, Some("mismatch")), "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
        let key = unique_key();
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let before = envoy.metric("conflicts").await;
        let request = Request::post("/held").key(&key).body("b");
        let answers = tokio::spawn(burst(envoy.addr(), proto, vec![request; MANY]));
        envoy.wait_metric("conflicts", before + MANY as u64 - 1, PATIENCE).await;
        barrier.wait_arrived(1, PATIENCE).await;
        assert_eq!((barrier.arrived(), origin.executions_of(&key)), (1, 1));
        barrier.open();
        let statuses: Vec<u16> =
            answers.await.unwrap().into_iter().map(|answer| answer.unwrap().status).collect();
        assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 1, "{statuses:?}");
        assert_eq!(statuses.iter().filter(|status| **status == 409).count(), MANY - 1, "{statuses:?}");
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("rejected.body_timeout").await, 0);
    assert_eq!(envoy.metric("headers_stop_iteration_missing").await, 0);
}

/// With the setting, a body that stalls is given up: nothing is claimed, nothing is forwarded, the retry runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_stalls_is_refused_and_claims_nothing() {
    let origin = Origin::start().await;
    let envoy = envoy_with(&origin, true, 1, json!({"body_timeout": "300ms"})).await;
    for proto in Protocol::BOTH {
        // Once the worker has seen a body, a stall is the client's.
        let whole = Request::post("/whole").key(unique_key()).body("b");
        assert_eq!(send_once(envoy.addr(), proto, &whole).await.unwrap().status, 200);
        for sent in [0, 1, 60_000] {
            let key = unique_key();
            let path = format!("/{key}");
            let what = format!("{proto:?} after {sent} bytes");
            let request = Request::post(&path).key(&key).body(vec![b'x'; 100_000]).no_content_length();
            let upstream = envoy.stat("cluster.origin.upstream_rq_total").await;
            let mut slow = Slow::start(&envoy, proto, &request).await;
            if sent > 0 {
                slow.send(&request.body[..sent], false).await;
            }
            let began = Instant::now();
            let answer = slow.answer().await;
            assert!(began.elapsed() < Duration::from_secs(5), "{what}: {:?}", began.elapsed());
            assert_body_timeout(&answer, &what);
            assert_logged(&envoy, &path).await;
            assert_eq!(envoy.stat("cluster.origin.upstream_rq_total").await, upstream, "{what}");
            // Another body under the same key is no mismatch: there is no record.
            let retry = Request::post(&path).key(&key).body("whole");
            let first = send_once(envoy.addr(), proto, &retry).await.unwrap();
            assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{what}: {first:?}");
            let again = send_once(envoy.addr(), proto, &retry).await.unwrap();
            assert_eq!(
                (&again.body, again.header("idempotent-replayed")),
                (&first.body, Some("true")),
                "{what}"
            );
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
    }
    assert_eq!(envoy.metric("rejected.body_timeout").await, 6);
    assert_eq!(envoy.metric("headers_stop_iteration_missing").await, 0);
    assert!(!envoy.log_contains("allow_on_headers_stop_iteration"), "{}", envoy.log_text());
    assert_eq!(envoy.metric("unexpected_events").await, 0);
}

/// A body that takes far longer than `body_timeout`, but keeps coming, is no stall.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_but_steady_body_is_fine() {
    let origin = Origin::start().await;
    let envoy = envoy_with(&origin, true, 2, json!({"body_timeout": "600ms"})).await;
    let both = Protocol::BOTH.map(|proto| {
        let (envoy, origin) = (&envoy, &origin);
        async move {
            let key = unique_key();
            let request = Request::post("/pay").key(&key).body("0123456789ab").no_content_length();
            let mut slow = Slow::start(envoy, proto, &request).await;
            // The pace is what this test is about.
            let mut pace = tokio::time::interval(Duration::from_millis(120));
            let began = Instant::now();
            for (at, byte) in request.body.iter().enumerate() {
                pace.tick().await;
                slow.send(&[*byte], at + 1 == request.body.len()).await;
            }
            assert!(began.elapsed() > Duration::from_millis(1200), "it was to take twice the timeout");
            let first = slow.answer().await;
            assert_eq!(
                (first.status, first.header("idempotent-replayed")),
                (200, None),
                "{proto:?}: {first:?}"
            );
            assert!(
                origin
                    .requests()
                    .iter()
                    .any(|seen| seen.body == request.body && seen.key() == Some(key.as_bytes()))
            );
            let again = send_once(envoy.addr(), proto, &request.clone().chunked(&[3])).await.unwrap();
            assert_eq!(
                (&again.body, again.header("idempotent-replayed")),
                (&first.body, Some("true")),
                "{proto:?}"
            );
            assert_eq!(origin.executions_of(&key), 1, "{proto:?}");
        }
    });
    let [one, two] = both;
    tokio::join!(one, two);
    assert_eq!(envoy.metric("rejected.body_timeout").await, 0);
}

/// A client that goes away in the middle of its body leaves nothing behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_in_its_body_claims_nothing() {
    let origin = Origin::start().await;
    let envoy = envoy_with(&origin, true, 1, json!({})).await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let path = format!("/{key}");
        let request = Request::post(&path).key(&key).body(vec![b'x'; 50_000]).no_content_length();
        let mut slow = Slow::start(&envoy, proto, &request).await;
        slow.send(&request.body[..20_000], false).await;
        poll_until(PATIENCE, "the request in Envoy", async || {
            (envoy.stat("http.main.downstream_rq_active").await == 1).then_some(())
        })
        .await;
        match slow {
            Slow::Http1(client) => client.abort(),
            Slow::Http2(stream) => stream.reset(),
        }
        envoy.wait_access_log(|line| line.starts_with("0 ") && line.ends_with(&path), PATIENCE).await;
        let retry = Request::post(&path).key(&key).body("another");
        let first = send_once(envoy.addr(), proto, &retry).await.unwrap();
        assert_eq!((first.status, origin.executions_of(&key)), (200, 1), "{proto:?}: {first:?}");
    }
    assert_eq!(origin.requests().len(), 2);
    assert_eq!(envoy.metric("in_flight").await, 0);
    assert_eq!(envoy.metric("released.not_sent").await, 0);
}
