//! Requests that meet the filter more than once: internal redirects, a second filter, a second Envoy.

use std::time::Duration;

use serde_json::{Value, json};

use crate::support::*;

fn redirect(status: u16, to: &str) -> Behaviour {
    let location = format!("http://api.example.com{to}");
    Behaviour::Respond(Reply::status(status).header("location", location).chunk("elsewhere"))
}

/// Follows redirects itself; `/off` is a route without the filter, `/impatient` one with a short time-out, and behind
/// `/unreachable` nobody listens.
fn redirecting_routes() -> Vec<Value> {
    let route = |prefix: &str, cluster: &str, timeout: &str| {
        json!({
            "match": {"prefix": prefix},
            "route": {
                "cluster": cluster,
                "timeout": timeout,
                "internal_redirect_policy": {
                    "max_internal_redirects": 2,
                    "redirect_response_codes": [302, 303, 307]
                }
            }
        })
    };
    let mut off = route("/off", "origin", "15s");
    off["metadata"] = json!({"filter_metadata": {"idempotency": {"off": true}}});
    vec![
        off,
        route("/impatient", "origin", "0.3s"),
        route("/unreachable", "unreachable", "1s"),
        route("/", "origin", "15s"),
    ]
}

struct Redirecting {
    origin: Origin,
    envoy: Envoy,
    _refused: RefusedPort,
}

async fn redirecting(plugin: Value, change: impl FnOnce(envoy::Builder) -> envoy::Builder) -> Redirecting {
    let origin = Origin::start().await;
    let refused = RefusedPort::new();
    let unreachable = envoy::config::cluster("unreachable", refused.addr(), false);
    let builder = Envoy::builder()
        .workers(4)
        .plugin(plugin)
        .routes(redirecting_routes())
        .extra_cluster(unreachable)
        .origin_addr(origin.addr());
    let envoy = change(builder).start().await;
    Redirecting { origin, envoy, _refused: refused }
}

impl Redirecting {
    async fn send(&self, proto: Protocol, request: &Request) -> Response {
        send_once(self.envoy.addr(), proto, request).await.unwrap()
    }

    fn ran(&self, key: &str, path: &str) -> usize {
        self.origin.executions(|seen| seen.key() == Some(key.as_bytes()) && seen.path == path)
    }
}

fn is_replay(response: &Response) -> bool {
    response.header("idempotent-replayed") == Some("true")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_internal_redirect_is_one_exchange_and_its_last_answer_is_kept_once() {
    let world = redirecting(plugin_with(json!({})), |builder| builder).await;
    let mut expected_handovers = 0;
    for (number, (status, path, target)) in [
        (302, "/from302", "/to302"),
        (303, "/from303", "/to303"),
        (307, "/from307", "/to307"),
        (302, "/fromOff", "/off/302"),
        (303, "/fromOff303", "/off/303"),
    ]
    .into_iter()
    .enumerate()
    {
        world.origin.on(path, redirect(status, target));
        for (proto, body) in [
            (Protocol::Http1, "amount=1"),
            (Protocol::Http1, ""),
            (Protocol::Http2, "amount=1"),
            (Protocol::Http2, ""),
        ] {
            // Envoy below 1.38.3 crashes by itself when it follows a 303 for a request without a body.
            if status == 303 && body.is_empty() && world.envoy.version().await < [1, 38, 3] {
                continue;
            }
            let what = format!("row {number}: {status} {path} {proto:?} {body:?}");
            let barrier = Barrier::new();
            world.origin.on(target, Behaviour::BarrierEcho(barrier.clone()));
            let key = unique_key();
            let request = Request::post(path).key(&key).body(body);
            let running = {
                let (addr, request) = (world.envoy.addr(), request.clone());
                tokio::spawn(async move { send_once(addr, proto, &request).await })
            };
            // G20: the second pass doesn't meet its own claim, and everybody else does.
            barrier.wait_arrived(1, PATIENCE).await;
            for duplicate in burst(world.envoy.addr(), proto, vec![request.clone(); 2]).await {
                let duplicate = duplicate.unwrap();
                let got = (duplicate.status, duplicate.problem_type());
                assert_eq!(got, (409, Some("in-flight".to_owned())), "{what}: {duplicate:?}");
            }
            assert_eq!(world.envoy.metric("in_flight").await, 1, "{what}");
            barrier.open();
            let answer = running.await.unwrap().unwrap();
            assert_eq!(answer.status, 200, "{what}: {answer:?}");
            assert!(!is_replay(&answer), "{what}");
            let replay = world.send(proto, &request).await;
            assert_eq!(replay.status, 200, "{what}: {replay:?}");
            assert!(is_replay(&replay), "{what}: {replay:?}");
            assert_eq!(replay.body, answer.body, "{what}");
            assert_eq!((world.ran(&key, path), world.ran(&key, target)), (1, 1), "{what}");
            let seen = world.origin.requests().pop().expect("the second pass");
            assert_eq!(seen.path, target, "{what}");
            assert_eq!(seen.method, if status == 303 { "GET" } else { "POST" }, "{what}");
            if status != 303 {
                assert_eq!(seen.body, body.as_bytes(), "{what}");
            }
            expected_handovers += 1;
            assert_eq!(world.envoy.metric("handed_over").await, expected_handovers, "{what}");
        }
    }
    assert_eq!(world.envoy.metric("in_flight").await, 0);
    assert_eq!(world.envoy.metric("executed").await, expected_handovers);
    assert_eq!(world.envoy.metric("retained.redirected").await, 0);
    assert!(world.envoy.workers_that_served().await >= 2);
    // The first pass's line says so.
    let line = world.envoy.wait_access_log(|line| line.contains("internal_redirect"), PATIENCE).await;
    assert!(line.starts_with("302 internal_redirect"), "{line}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redirects_in_a_row_hand_the_claim_on_until_envoy_follows_no_further() {
    let world = redirecting(plugin_with(json!({})), |builder| builder).await;
    world.origin.on("/two", redirect(302, "/one")).on("/one", redirect(307, "/none"));
    world.origin.on("/three", redirect(302, "/two"));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/two").key(&key).body("amount=1");
        let answer = world.send(proto, &request).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let replay = world.send(proto, &request).await;
        assert!(is_replay(&replay), "{replay:?}");
        assert_eq!(replay.body, answer.body);
        assert_eq!(["/two", "/one", "/none"].map(|path| world.ran(&key, path)), [1, 1, 1]);

        // The third redirect is the answer.
        let key = unique_key();
        let request = Request::post("/three").key(&key).body("amount=1");
        let answer = world.send(proto, &request).await;
        assert_eq!((answer.status, answer.text().as_str()), (307, "elsewhere"), "{answer:?}");
        let replay = world.send(proto, &request).await;
        assert_eq!((replay.status, replay.text().as_str()), (307, "elsewhere"), "{replay:?}");
        assert_eq!(replay.header("location"), Some("http://api.example.com/none"));
        assert!(is_replay(&replay));
        assert_eq!(["/three", "/two", "/one", "/none"].map(|path| world.ran(&key, path)), [1, 1, 1, 0]);
    }
    assert_eq!(world.envoy.metric("handed_over").await, 8);
    assert_eq!(world.envoy.metric("in_flight").await, 0);
}

/// The first pass has run, so nothing that becomes of the second makes the retry run it again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirect_whose_second_pass_fails_is_retained() {
    let world = redirecting(plugin_with(json!({"max_response_body_bytes": 1000})), |builder| builder).await;
    let never = Barrier::new();
    world
        .origin
        .on("/a", redirect(302, "/impatient/target"))
        .on("/impatient", Behaviour::BarrierEcho(never.clone()))
        .on("/b", redirect(302, "/failing"))
        .on("/failing", Behaviour::Respond(Reply::status(500)))
        .on("/c", redirect(303, "/unreachable/target"))
        .on("/d", redirect(303, "/busy"))
        .on("/busy", Behaviour::Respond(Reply::status(503)));
    for proto in Protocol::BOTH {
        for (path, target, status, reason, metric) in [
            ("/a", "/impatient/target", 504, "timeout", "retained.timeout"),
            ("/b", "/failing", 500, "status", "retained.status"),
            ("/c", "/unreachable/target", 503, "redirected", "retained.redirected"),
            ("/d", "/busy", 503, "redirected", "retained.redirected"),
        ] {
            let what = format!("{proto:?} {path} to {target}");
            let before = world.envoy.metric(metric).await;
            let key = unique_key();
            let request = Request::post(path).key(&key).body("amount=1");
            assert_eq!(world.send(proto, &request).await.status, status, "{what}");
            world.envoy.wait_metric(metric, before + 1, PATIENCE).await;
            for _ in 0..2 {
                let retry = world.send(proto, &request).await;
                let got = (retry.status, retry.problem_type());
                assert_eq!(got, (424, Some("failed".to_owned())), "{what}: {retry:?}");
                assert_eq!(retry.json()["reason"], reason, "{what}: {retry:?}");
            }
            assert_eq!(world.ran(&key, path), 1, "{what}");
            assert_eq!(world.ran(&key, target), usize::from(path != "/c"), "{what}");
        }
    }
    // 4 rows, and two replies each.
    assert_eq!(world.envoy.metric("failed_replies").await, 16);
    assert_eq!(world.envoy.metric("in_flight").await, 0);
    assert_eq!(world.envoy.metric("outbox").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_in_the_second_pass_leaves_a_retained_failure() {
    let world = redirecting(plugin_with(json!({})), |builder| builder).await;
    for proto in Protocol::BOTH {
        let barrier = Barrier::new();
        world
            .origin
            .on("/start", redirect(302, "/held"))
            .on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let before = world.envoy.metric("retained.client_gone").await;
        let key = unique_key();
        let request = Request::post("/start").key(&key).body("amount=1");
        let client = Client::connect(world.envoy.addr(), proto).await;
        let pending = client.start(&request).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        pending.abort();
        world.envoy.wait_metric("retained.client_gone", before + 1, PATIENCE).await;
        let retry = world.send(proto, &request).await;
        assert_eq!((retry.status, retry.json()["reason"].as_str()), (424, Some("client_gone")), "{retry:?}");
        barrier.open();
        assert_eq!((world.ran(&key, "/start"), world.ran(&key, "/held")), (1, 1));
    }
    assert_eq!(world.envoy.metric("in_flight").await, 0);
}

/// A filter before this one refuses the second pass, so that nobody adopts the claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirect_that_never_comes_back_to_the_filter_ends_as_redirected() {
    let deny = json!({
        "name": "envoy.filters.http.rbac",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": {
                "action": "DENY",
                "policies": {"forbidden": {
                    "permissions": [{"url_path": {"path": {"prefix": "/forbidden"}}}],
                    "principals": [{"any": true}]
                }}
            }
        }
    });
    let rule = |name: &str, on_unknown: &str| {
        json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}],
            "on_unknown": on_unknown,
        })
    };
    let plugin = json!({
        "store": {"shared_data": {}},
        "rules": [rule("retain", "retain"), rule("release", "release")]
    });
    let world = redirecting(plugin, |builder| builder.filters_before(vec![deny])).await;
    world.origin.on("/retain", redirect(302, "/forbidden")).on("/release", redirect(302, "/forbidden"));
    for (proto, round) in Protocol::BOTH.into_iter().zip(1..) {
        let (kept, given_back) = (unique_key(), unique_key());
        let to_keep = Request::post("/retain").key(&kept).body("amount=1");
        let to_give_back = Request::post("/release").key(&given_back).body("amount=1");
        for request in [&to_keep, &to_give_back] {
            assert_eq!(world.send(proto, request).await.status, 403);
            // Until the claim is given up for lost.
            let duplicate = world.send(proto, request).await;
            assert_eq!(duplicate.problem_type().as_deref(), Some("in-flight"), "{duplicate:?}");
        }
        world.envoy.wait_metric("retained.redirected", round, PATIENCE).await;
        world.envoy.wait_metric("released.failure", round, PATIENCE).await;
        let retry = poll_until(PATIENCE, "the failed record", async || {
            let retry = world.send(proto, &to_keep).await;
            (retry.status != 409).then_some(retry)
        })
        .await;
        assert_eq!((retry.status, retry.json()["reason"].as_str()), (424, Some("redirected")), "{retry:?}");
        assert_eq!(world.ran(&kept, "/retain"), 1);
        // `on_unknown: release` says that a second run is harmless.
        poll_until(PATIENCE, "the claim given back", async || {
            (world.send(proto, &to_give_back).await.status == 403).then_some(())
        })
        .await;
        assert_eq!(world.ran(&given_back, "/release"), 2);
        world.envoy.wait_metric("released.failure", round + 1, PATIENCE).await;
        break_even(&world.envoy).await;
        assert_eq!(world.envoy.metric("handed_over").await, 0);
    }
}

/// Nothing is in flight any more, and nothing waits.
async fn break_even(envoy: &Envoy) {
    poll_until(PATIENCE, "gauges back at zero", async || {
        let gauges = (envoy.metric("in_flight").await, envoy.metric("outbox").await);
        (gauges == (0, 0)).then_some(())
    })
    .await;
}

fn shared_scope() -> Value {
    let mut plugin = default_plugin();
    plugin["rules"][0]["scope"] = json!("shared");
    plugin
}

/// The inner filter's callers are all one, so that a second caller meets there what the first has done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_second_filter_in_the_chain_refuses_or_replays_is_not_the_outer_ones_answer() {
    let origin = Origin::start().await;
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    let envoy = Envoy::builder()
        .workers(4)
        .plugin(plugin_with(json!({})))
        .second_filter(shared_scope())
        .origin_addr(origin.addr())
        .start()
        .await;
    for (proto, round) in Protocol::BOTH.into_iter().zip(1..) {
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let key = unique_key();
        let request =
            |path: &str, account: &str| Request::post(path).key(&key).account(account).body("amount=1");
        let send = async |path: &str, account: &str| {
            send_once(envoy.addr(), proto, &request(path, account)).await.unwrap()
        };
        let (addr, alices) = (envoy.addr(), request("/held", "alice"));
        let running = tokio::spawn(async move { send_once(addr, proto, &alices).await });
        barrier.wait_arrived(1, PATIENCE).await;
        let by_the_outer = send("/held", "alice").await;
        assert_eq!(by_the_outer.problem_type().as_deref(), Some("in-flight"));
        // The outer filter has a claim for bob, the inner one refuses: twice, so nothing was stored.
        for _ in 0..2 {
            let by_the_inner = send("/held", "bob").await;
            assert_eq!(by_the_inner.problem_type().as_deref(), Some("in-flight"), "{by_the_inner:?}");
            assert_eq!(by_the_inner.header_lines("x-idempotency-refusal"), [b"in-flight"]);
        }
        assert_eq!(envoy.metric("released.not_sent").await, 5 * round - 3);
        barrier.open();
        let first = running.await.unwrap().unwrap();
        assert_eq!(first.status, 200);
        let replay = send("/held", "alice").await;
        assert_eq!(
            (replay.header_lines("idempotent-replayed"), &replay.body),
            (vec![&b"true"[..]], &first.body)
        );
        for _ in 0..2 {
            let replay = send("/held", "bob").await;
            assert_eq!(replay.header_lines("idempotent-replayed"), [b"true"], "{replay:?}");
            assert_eq!(replay.body, first.body);
        }
        assert_eq!(origin.executions_of(&key), 1);

        let key = unique_key();
        let request = |account: &str| Request::post("/fails").key(&key).account(account).body("amount=1");
        assert_eq!(send_once(envoy.addr(), proto, &request("alice")).await.unwrap().status, 500);
        for account in ["alice", "bob"] {
            let refused = send_once(envoy.addr(), proto, &request(account)).await.unwrap();
            assert_eq!(
                (refused.status, refused.problem_type().as_deref()),
                (424, Some("failed")),
                "{account}"
            );
        }
        assert_eq!(origin.executions_of(&key), 1);
        assert_eq!(envoy.metric("released.not_sent").await, 5 * round);
    }
    envoy.wait_access_log(|line| line.starts_with("409 idempotency_in_flight"), PATIENCE).await;
    break_even(&envoy).await;
    assert!(envoy.workers_that_served().await >= 2);
}

/// A mistake in the configuration: the inner filter meets the outer one's claim. Nothing runs, nothing hangs, and the
/// claim is given back every time, so that it heals with the configuration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_filters_in_one_chain_with_one_namespace_refuse_each_other() {
    let mut plugin = plugin_with(json!({}));
    plugin["store"]["shared_data"]["namespace"] = json!("one.for.both");
    let origin = Origin::start().await;
    let mut envoy = Envoy::builder()
        .plugin(plugin.clone())
        .second_filter(plugin)
        .main(|main| main.second_filter.as_mut().unwrap().vm_id = Some("idempotency".to_owned()))
        .origin_addr(origin.addr())
        .start()
        .await;
    let mut keys = Vec::new();
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        for _ in 0..3 {
            let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(
                (answer.status, answer.problem_type().as_deref()),
                (409, Some("in-flight")),
                "{answer:?}"
            );
        }
        assert_eq!(origin.executions_of(&key), 0);
        keys.push((proto, request, key));
    }
    assert_eq!(envoy.metric("conflicts").await, 6);
    assert_eq!(envoy.metric("released.not_sent").await, 6);
    break_even(&envoy).await;
    envoy.reload(|main| main.second_filter = None).await.unwrap();
    for (proto, request, key) in keys {
        assert_eq!(send_once(envoy.addr(), proto, &request).await.unwrap().status, 200);
        assert_eq!(origin.executions_of(&key), 1);
    }
}

/// Two Envoys in a row, both with the filter and a store of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_hop_that_sees_the_same_key_runs_it_once() {
    for http2 in [false, true] {
        let origin = Origin::start().await;
        origin.on("/fails", Behaviour::Respond(Reply::status(500)));
        let inner = Envoy::builder().plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
        let outer = Envoy::builder()
            .plugin(plugin_with(json!({})))
            .origin_addr(inner.addr())
            .origin_http2(http2)
            .start()
            .await;
        for (proto, round) in Protocol::BOTH.into_iter().zip(1..) {
            let what = format!("{proto:?}, between the hops HTTP/{}", if http2 { 2 } else { 1 });
            let send = async |envoy: &Envoy, request: &Request| {
                send_once(envoy.addr(), proto, request).await.unwrap()
            };

            let key = unique_key();
            let request = Request::post("/pay").key(&key).body("amount=1");
            let first = send(&outer, &request).await;
            assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{what}");
            let replay = send(&outer, &request).await;
            assert_eq!(replay.header_lines("idempotent-replayed"), [b"true"], "{what}");
            assert_eq!(replay.body, first.body, "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
            assert_eq!(
                (outer.metric("replayed").await, inner.metric("replayed").await),
                (2 * round - 1, round - 1)
            );

            // In flight at the inner hop: "not processed" for the outer one.
            let barrier = Barrier::new();
            origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
            let key = unique_key();
            let request = Request::post("/held").key(&key).body("amount=1");
            let (addr, sent) = (inner.addr(), request.clone());
            let running = tokio::spawn(async move { send_once(addr, proto, &sent).await });
            barrier.wait_arrived(1, PATIENCE).await;
            for _ in 0..2 {
                let refused = send(&outer, &request).await;
                let got = (refused.status, refused.problem_type());
                assert_eq!(got, (409, Some("in-flight".to_owned())), "{what}: {refused:?}");
                assert!(refused.header("retry-after").is_some(), "{what}: {refused:?}");
            }
            assert_eq!(outer.metric("released.status").await, 2 * round, "{what}");
            barrier.open();
            let first = running.await.unwrap().unwrap();
            // F16: the inner hop's mark is not part of the record.
            for replayed_by_outer in [2 * round - 1, 2 * round] {
                let replay = send(&outer, &request).await;
                assert_eq!(replay.header_lines("idempotent-replayed"), [b"true"], "{what}: {replay:?}");
                assert_eq!(replay.body, first.body, "{what}");
                assert_eq!(outer.metric("replayed").await, replayed_by_outer, "{what}");
            }
            assert_eq!(inner.metric("replayed").await, round, "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");

            // Failed at the inner hop: it may have run, so the outer hop keeps that.
            let key = unique_key();
            let request = Request::post("/fails").key(&key).body("amount=1");
            assert_eq!(send(&inner, &request).await.status, 500, "{what}");
            for _ in 0..2 {
                let refused = send(&outer, &request).await;
                let got = (refused.status, refused.problem_type());
                assert_eq!(got, (424, Some("failed".to_owned())), "{what}: {refused:?}");
            }
            assert_eq!(outer.metric("retained.intermediary").await, round, "{what}");
            assert_eq!(outer.metric("failed_replies").await, round, "{what}");
            assert_eq!(inner.metric("failed_replies").await, round, "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
    }
}

/// The outer hop must not keep "full" as an answer either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_hop_that_is_full_is_asked_again() {
    let origin = Origin::start().await;
    let mut small = plugin_with(json!({"lock_ttl": "100ms", "record_ttl": "1s", "failed_ttl": "1s"}));
    small["store"]["shared_data"] = json!({"max_records": 1});
    let inner = Envoy::builder().plugin(small).origin_addr(origin.addr()).start().await;
    let outer = Envoy::builder().plugin(plugin_with(json!({}))).origin_addr(inner.addr()).start().await;
    for (proto, round) in Protocol::BOTH.into_iter().zip(1..) {
        let (first, second) = (unique_key(), unique_key());
        let request = |key: &str| Request::post("/pay").key(key).body("amount=1");
        let run = poll_until(PATIENCE, "room for the first", async || {
            let answer = send_once(outer.addr(), proto, &request(&first)).await.unwrap();
            (answer.status == 200).then_some(answer)
        })
        .await;
        assert_eq!(run.header("idempotent-replayed"), None);
        let full = send_once(outer.addr(), proto, &request(&second)).await.unwrap();
        assert_eq!((full.status, full.problem_type().as_deref()), (503, Some("store-full")), "{full:?}");
        assert_eq!(origin.executions_of(&second), 0);
        assert!(outer.metric("released.status").await >= round);
        let run = poll_until(Duration::from_secs(5), "room again", async || {
            let answer = send_once(outer.addr(), proto, &request(&second)).await.unwrap();
            (answer.status != 503).then_some(answer)
        })
        .await;
        assert_eq!((run.status, run.header("idempotent-replayed")), (200, None), "{run:?}");
        assert_eq!((origin.executions_of(&first), origin.executions_of(&second)), (1, 1));
    }
}
