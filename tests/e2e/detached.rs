//! Detached execution: the upstream runs to its end and its answer is kept, whatever becomes of the client.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::*;

const PROTOCOLS: [Protocol; 2] = [Protocol::Http1, Protocol::Http2];
const CLUSTER: &str = "idempotency-execute";

/// One detached rule, with this patch over it.
pub fn detached_plugin(patch: Value) -> Value {
    let mut rule = json!({"execution": "detached", "execute_timeout": "30s"});
    deep_merge(&mut rule, &patch);
    let mut plugin = plugin_with(rule);
    plugin["execute_cluster"] = json!(CLUSTER);
    plugin
}

fn in_redis(mut plugin: Value) -> Value {
    plugin["store"] = json!({"redis": {"cluster": "redis-link", "timeout": "8s"}});
    plugin
}

fn builder(origin: &Origin, plugin: Value) -> envoy::Builder {
    let builder = Envoy::builder().workers(4).plugin(plugin).origin_addr(origin.addr());
    with_execution(builder, &default_routes())
}

fn linked(builder: envoy::Builder, redis: &Redis) -> envoy::Builder {
    with_changed_link(builder, redis.addr(), |name, part| {
        if name == "proxy" {
            *part.pointer_mut("/filter_chains/0/filters/0/typed_config/settings/op_timeout").unwrap() =
                json!("3s");
        }
    })
}

/// The same test on each store: the embedded one, then Redis.
async fn on_each_store(
    origin: &Origin,
    rule: Value,
    change: impl Fn(envoy::Builder) -> envoy::Builder,
) -> Vec<(&'static str, Envoy, Option<Redis>)> {
    let embedded = change(builder(origin, detached_plugin(rule.clone()))).start().await;
    let redis = Redis::start().await;
    let shared = change(linked(builder(origin, in_redis(detached_plugin(rule))), &redis)).start().await;
    vec![("embedded", embedded, None), ("redis", shared, Some(redis))]
}

fn pay(key: &str) -> Request {
    Request::post("/pay").key(key).body("amount=1")
}

fn kind(response: &Response) -> (u16, Option<String>) {
    (response.status, response.problem_type())
}

fn problem(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

fn was_replayed(response: &Response) -> bool {
    response.header_lines("idempotent-replayed") == [b"true"]
}

async fn send(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    send_once(envoy.addr(), proto, request).await.unwrap()
}

/// Asks until the key is no longer in flight.
async fn settled(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    poll_until(PATIENCE, "the key to be settled", async || {
        let answer = send(envoy, proto, request).await;
        (kind(&answer) != problem(409, "in-flight")).then_some(answer)
    })
    .await
}

async fn gauges_are_zero(envoy: &Envoy) {
    for gauge in ["detached_bytes", "in_flight", "outbox"] {
        poll_until(PATIENCE, gauge, async || (envoy.metric(gauge).await == 0).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detached_request_is_executed_once_answered_and_replayed() {
    let origin = Origin::start().await;
    origin.on(
        "/",
        Behaviour::func(|_, _| async {
            Reply::echo(201)
                .header("x-made", "1")
                // An upstream that speaks for the execution listener, or echoes what it gets, is not heard.
                .header("x-idempotency-execution-redirected", "/forged")
                .header("x-idempotency-execution-details", "idempotency_in_flight")
        }),
    );
    for (store, envoy, _redis) in on_each_store(&origin, json!({}), |builder| builder).await {
        for (proto, commit) in [(Protocol::Http1, "a"), (Protocol::Http2, "b")] {
            let what = format!("{store} {proto:?} {commit}");
            let key = unique_key();
            let first = send(&envoy, proto, &pay(&key)).await;
            assert_eq!((first.status, first.header("x-made")), (201, Some("1")), "{what}: {first:?}");
            assert!(first.header_lines("idempotent-replayed").is_empty(), "{what}");
            assert!(
                !first.headers.iter().any(|(name, _)| name.starts_with(b"x-idempotency")),
                "{what}: {first:?}"
            );
            let again = send(&envoy, proto, &pay(&key)).await;
            assert_eq!((again.status, &again.body, was_replayed(&again)), (201, &first.body, true), "{what}");
            assert!(
                !again.headers.iter().any(|(name, _)| name.starts_with(b"x-idempotency")),
                "{what}: {again:?}"
            );
            let other = send(&envoy, proto, &pay(&key).body("amount=2")).await;
            assert_eq!(kind(&other), problem(422, "mismatch"), "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
        assert_eq!(envoy.metric("detached").await, 2, "{store}");
        assert_eq!(envoy.metric("executed").await, 2, "{store}");
        assert_eq!(envoy.metric("unexpected_events").await, 0, "{store}");
        let line = envoy.wait_access_log(|line| line.contains("idempotency_executed"), PATIENCE).await;
        assert!(line.starts_with("201 idempotency_executed executed rule=payments attempt=1 key="), "{line}");
        gauges_are_zero(&envoy).await;
    }
}

/// With `after_response` the client need not wait for the record; its answer is the same.
#[tokio::test(flavor = "multi_thread")]
async fn the_answer_may_go_out_before_the_record_is_kept() {
    let origin = Origin::start().await;
    origin.on("/", Behaviour::func(|_, _| async { Reply::echo(201).header("content-type", "text/csv") }));
    for (store, envoy, redis) in
        on_each_store(&origin, json!({"commit": "after_response"}), |builder| builder).await
    {
        for proto in PROTOCOLS {
            let key = unique_key();
            let first = send(&envoy, proto, &pay(&key)).await;
            assert_eq!(first.status, 201, "{store} {proto:?}");
            let again = settled(&envoy, proto, &pay(&key)).await;
            assert_eq!(
                (again.status, &again.body, was_replayed(&again)),
                (201, &first.body, true),
                "{store}"
            );
            assert_eq!(again.header_lines("content-type"), first.header_lines("content-type"));
            assert_eq!(origin.executions_of(&key), 1, "{store} {proto:?}");
        }
        // A store that hangs holds nobody back.
        if let Some(redis) = redis {
            let barrier = Barrier::new();
            origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
            let key = unique_key();
            let request = Request::post("/held").key(&key).body("amount=1");
            let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&request).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            redis.pause();
            barrier.open();
            assert_eq!(pending.finish().await.unwrap().status, 200);
            redis.resume();
            assert!(was_replayed(&settled(&envoy, Protocol::Http1, &request).await));
            assert_eq!(origin.executions_of(&key), 1);
        }
        gauges_are_zero(&envoy).await;
        assert_eq!(envoy.metric("unexpected_events").await, 0, "{store}");
    }
}

/// The client leaves at some moment; whenever the upstream has begun, it ends, and the retry gets its answer.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_gets_its_result_on_retry() {
    let origin = Origin::start().await;
    for (store, envoy, _redis) in on_each_store(&origin, json!({}), |builder| builder).await {
        let mut gone = 0;
        for proto in PROTOCOLS {
            let what = format!("{store} {proto:?}");
            // Before: half of the body was sent, nothing is claimed, and the retry is the first execution.
            let key = unique_key();
            let request = Request::post("/before").key(&key).body("amount=1");
            leave_within_the_body(&envoy, proto, &request, &key).await;
            let first = settled(&envoy, proto, &request).await;
            assert_eq!((first.status, was_replayed(&first)), (200, false), "{what}: {first:?}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");

            // During: the upstream works on, duplicates are in flight, and then there is a replay.
            let (key, barrier) = (unique_key(), Barrier::new());
            let path = format!("/during/{key}");
            origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
            let request = Request::post(&path).key(&key).body("amount=1");
            let pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            pending.abort();
            envoy
                .wait_access_log(|line| line.contains(&path) && line.contains(" executing "), PATIENCE)
                .await;
            assert_eq!(kind(&send(&envoy, proto, &request).await), problem(409, "in-flight"), "{what}");
            barrier.open();
            let replay = settled(&envoy, proto, &request).await;
            assert_eq!((replay.status, was_replayed(&replay)), (200, true), "{what}: {replay:?}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
            gone += 1;
            assert_eq!(envoy.metric("finished_without_client").await, gone, "{what}");

            // After: the head of the response is there, the client does not read on.
            let key = unique_key();
            origin.on("/after", Behaviour::Respond(Reply::status(200).chunk(vec![b'x'; 200_000])));
            let request = Request::post("/after").key(&key).body("amount=1");
            let mut pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
            assert_eq!(pending.head().await.unwrap().status, 200, "{what}");
            pending.abort();
            let replay = settled(&envoy, proto, &request).await;
            assert_eq!(
                (replay.status, replay.body.len(), was_replayed(&replay)),
                (200, 200_000, true),
                "{what}"
            );
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
        gauges_are_zero(&envoy).await;
        assert_eq!(envoy.metric("unexpected_events").await, 0, "{store}");
        assert_eq!(envoy.metric("retained.client_gone").await, 0, "{store}");
    }
}

async fn leave_within_the_body(envoy: &Envoy, proto: Protocol, request: &Request, key: &str) {
    match proto {
        Protocol::Http1 => {
            let mut client = H1::connect(envoy.addr()).await.unwrap();
            let head = format!(
                "POST {} HTTP/1.1\r\nhost: api.example.com\r\nidempotency-key: {}\r\nx-account-id: alice\r\ncontent-length: 8\r\n\r\namou",
                request.path, key
            );
            client.write_raw(head.as_bytes()).await.unwrap();
            client.abort();
        }
        Protocol::Http2 => {
            let client = H2::connect(envoy.addr()).await.unwrap();
            let mut stream = client.open(request, true).await.unwrap();
            stream.send_data(b"amou", false).await.unwrap();
            stream.reset();
        }
    }
    envoy.wait_access_log(|line| line.contains(&request.path) && line.starts_with("0 "), PATIENCE).await;
}

/// The commonest retry: the client's own time-out is shorter than the upstream needs.
#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_slower_than_its_client_is_answered_for_on_retry() {
    const LEASE: Duration = Duration::from_millis(1000);
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/slow", Behaviour::BarrierEcho(barrier.clone()));
    let envoy = builder(&origin, detached_plugin(json!({"lock_ttl": "1s", "on_abandoned": "takeover"})))
        .start()
        .await;
    let key = unique_key();
    let request = Request::post("/slow").key(&key).body("amount=1");
    let begun = Instant::now();
    let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    pending.abort();
    // Nobody is there, and yet the lease is renewed: three of them pass without a takeover.
    let mut refused = 0;
    while begun.elapsed() < LEASE * 3 {
        let answer = send(&envoy, Protocol::Http2, &request).await;
        assert_eq!(kind(&answer), problem(409, "in-flight"), "after {:?}", begun.elapsed());
        refused += 1;
    }
    assert!(refused > 3);
    barrier.open();
    assert!(was_replayed(&settled(&envoy, Protocol::Http2, &request).await));
    assert_eq!((origin.executions_of(&key), envoy.metric("takeovers").await), (1, 0));
}

/// 2,000 clients leave at once: as many executions as have room, each once; no claim is orphaned, no memory kept.
#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_clients_that_leave_at_once_are_bounded_and_orphan_nothing() {
    const CLIENTS: usize = 2000;
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    // Room for 400 executions a worker: 8 bytes of body and 8 KiB for the response each.
    let room = 400 * (8 + 8192);
    let mut plugin = detached_plugin(json!({
        "max_response_body_bytes": 8192, "max_request_body_bytes": 1024, "execute_timeout": "300s"}));
    plugin["limits"] = json!({"detached_bytes": room});
    // An upstream that accepts 2,000 connections at once takes its time on a busy machine.
    let patient = json!({"connect_timeout": "30s", "circuit_breakers": {"thresholds": [
        {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]}});
    let routes = vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "300s"}})];
    let builder =
        Envoy::builder().workers(4).plugin(plugin).origin_addr(origin.addr()).cluster_patch(patient);
    let envoy = with_execution(builder, &routes).start().await;
    let keys: Vec<String> = (0..CLIENTS).map(|_| unique_key()).collect();
    let request = |key: &String| Request::post("/held").key(key).body("amount=1");
    send(&envoy, Protocol::Http1, &pay(&unique_key())).await;
    let before = envoy.rss_bytes();

    // 20 connections of 100 requests: a reset each.
    let mut pending = Vec::new();
    for part in keys.chunks(100) {
        let client = H2::connect(envoy.addr()).await.unwrap();
        let mut streams = Vec::new();
        for key in part {
            let mut stream = client.open(&request(key), false).await.unwrap();
            stream.send_rest(&request(key)).await.unwrap();
            streams.push(stream);
        }
        pending.push((client, streams));
    }
    let settled_clients = poll_until(PATIENCE, "every request runs or is refused", async || {
        let refused = envoy.metric("execution_unavailable").await as usize;
        (barrier.arrived() + refused == CLIENTS).then_some(refused)
    })
    .await;
    let running = barrier.arrived();
    assert!(running >= 400, "{running} run");
    assert!(envoy.metric("detached_bytes").await <= 4 * room, "{running} run");
    for (_client, streams) in pending {
        streams.into_iter().for_each(H2Stream::reset);
    }
    poll_until(PATIENCE, "every client is gone", async || {
        let gone = envoy.access_log_lines().iter().filter(|line| line.contains(" executing ")).count();
        (gone == running).then_some(())
    })
    .await;
    barrier.open();
    gauges_are_zero(&envoy).await;
    assert_eq!(envoy.metric("finished_without_client").await as usize, running);

    // Every retry is a replay, or the first execution of what was refused.
    let mut replays = 0;
    for part in keys.chunks(100) {
        let answers = burst(envoy.addr(), Protocol::Http2, part.iter().map(request).collect()).await;
        for answer in answers {
            let answer = answer.unwrap();
            assert_eq!(answer.status, 200, "{answer:?}");
            replays += usize::from(was_replayed(&answer));
        }
    }
    assert_eq!((replays, CLIENTS - replays), (running, settled_clients));
    for key in &keys {
        assert_eq!(origin.executions_of(key), 1);
    }
    assert!(envoy.workers_that_served().await >= 2);
    gauges_are_zero(&envoy).await;
    let grown = envoy.rss_bytes().saturating_sub(before) / 1024 / 1024;
    assert!(grown < 250, "{grown} MiB more than before");
}

/// Without room a request is refused before it runs, names the cause, and its key is free again.
#[tokio::test(flavor = "multi_thread")]
async fn without_room_a_request_is_refused_before_it_runs() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let mut plugin =
        detached_plugin(json!({"max_request_body_bytes": 1024, "max_response_body_bytes": 1024}));
    plugin["limits"] = json!({"detached_bytes": 2048});
    let envoy = builder(&origin, plugin).workers(1).start().await;
    let held = Request::post("/held").key(unique_key()).body("amount=1");
    let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&held).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    let key = unique_key();
    let large = Request::post("/pay").key(&key).body(vec![b'x'; 1000]);
    let refused = send(&envoy, Protocol::Http1, &large).await;
    assert_eq!(kind(&refused), problem(503, "execution-unavailable"));
    assert_eq!(refused.header_lines("retry-after"), [b"1"]);
    assert_eq!(origin.executions_of(&key), 0);
    envoy.wait_log("limits.detached_bytes of this worker is used up", PATIENCE).await;
    barrier.open();
    assert_eq!(pending.finish().await.unwrap().status, 200);
    let ran = poll_until(PATIENCE, "room for it", async || {
        let answer = send(&envoy, Protocol::Http1, &large).await;
        (answer.status == 200).then_some(answer)
    })
    .await;
    assert!(!was_replayed(&ran));
    assert_eq!(origin.executions_of(&key), 1);
    gauges_are_zero(&envoy).await;
}

/// A killed Envoy leaves an abandoned record, and a detached rule does not run it again.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_envoy_leaves_an_abandoned_record_that_is_not_run_again() {
    let origin = Origin::start().await;
    let redis = Redis::start().await;
    let rule = json!({"lock_ttl": "2s"});
    let plugin = || {
        let mut plugin = in_redis(detached_plugin(rule.clone()));
        plugin["store"]["redis"]["timeout"] = json!("500ms");
        plugin
    };
    let linked = |builder| with_link(builder, redis.addr(), &json!({"settings": {"op_timeout": "0.2s"}}));
    let mut doomed = linked(builder(&origin, plugin())).start().await;
    let other = linked(builder(&origin, plugin())).start().await;
    for client_stays in [false, true] {
        let (key, barrier) = (unique_key(), Barrier::new());
        let path = format!("/held/{client_stays}");
        origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
        let request = Request::post(&path).key(&key).body("amount=1");
        let pending = Client::connect(doomed.addr(), Protocol::Http1).await.start(&request).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        if client_stays {
            doomed.kill9();
            assert!(pending.finish().await.is_err());
        } else {
            pending.abort();
            doomed.wait_access_log(|line| line.contains(&path), PATIENCE).await;
            doomed.kill9();
        }
        barrier.open();
        assert_eq!(kind(&send(&other, Protocol::Http1, &request).await), problem(409, "in-flight"));
        let healed = settled(&other, Protocol::Http1, &request).await;
        assert_eq!(kind(&healed), problem(424, "abandoned"), "client stays: {client_stays}");
        assert_eq!(origin.executions_of(&key), 1);
        doomed.restart().await;
        assert_eq!(kind(&send(&doomed, Protocol::Http1, &request).await), problem(424, "abandoned"));
        assert_eq!(origin.executions_of(&key), 1);
    }
}

/// A listener update lets running executions end while the old one drains, and cuts what takes longer: that outcome
/// is unknown.
#[tokio::test(flavor = "multi_thread")]
async fn a_listener_update_lets_executions_end_or_marks_them_as_failed() {
    let origin = Origin::start().await;
    for (drain_time_s, ends_in_time) in [(600, true), (1, false)] {
        for (store, mut envoy, _redis) in
            on_each_store(&origin, json!({}), |builder| builder.drain_time_s(drain_time_s)).await
        {
            let what = format!("{store}, drain {drain_time_s} s");
            let (key, barrier) = (unique_key(), Barrier::new());
            let path = format!("/held/{key}");
            origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
            let request = Request::post(&path).key(&key).body("amount=1");
            let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&request).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            pending.abort();
            envoy.wait_access_log(|line| line.contains(&path), PATIENCE).await;
            let mut changed = detached_plugin(json!({"replay_header": "x-replayed"}));
            if store == "redis" {
                changed = in_redis(changed);
            }
            envoy.reload_listener(changed).await.unwrap();
            if ends_in_time {
                barrier.open();
                let replay = settled(&envoy, Protocol::Http1, &request).await;
                assert_eq!(
                    (replay.status, replay.header("x-replayed")),
                    (200, Some("true")),
                    "{what}: {replay:?}"
                );
            } else {
                envoy.wait_drained(PATIENCE).await;
                let failed = settled(&envoy, Protocol::Http1, &request).await;
                assert_eq!(kind(&failed), problem(424, "failed"), "{what}");
                assert_eq!(failed.json()["reason"], "reset", "{what}");
                barrier.open();
            }
            assert_eq!(origin.executions(|seen| seen.key() == Some(key.as_bytes())), 1, "{what}");
        }
    }
}

/// An Envoy whose inbound listeners are drained takes nothing new, and ends what it executes: another one replays it.
/// (Drained as a whole, it has no way to Redis any more: the link's listeners are among them.)
#[tokio::test(flavor = "multi_thread")]
async fn a_drained_envoy_ends_what_it_executes() {
    let origin = Origin::start().await;
    let redis = Redis::start().await;
    let plugin = || in_redis(detached_plugin(json!({})));
    let drained = linked(builder(&origin, plugin()), &redis)
        .main(|main| main.listener_patch = json!({"traffic_direction": "INBOUND"}))
        .start()
        .await;
    let other = linked(builder(&origin, plugin()), &redis).start().await;
    let (key, barrier) = (unique_key(), Barrier::new());
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let request = Request::post("/held").key(&key).body("amount=1");
    let pending = Client::connect(drained.addr(), Protocol::Http1).await.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    pending.abort();
    drained.wait_access_log(|line| line.contains("/held"), PATIENCE).await;
    drained.admin_post("/drain_listeners?inboundonly").await;
    poll_until(PATIENCE, "nothing new is taken", async || {
        Client::try_connect(drained.addr(), Protocol::Http1).await.is_err().then_some(())
    })
    .await;
    assert_eq!(kind(&send(&other, Protocol::Http1, &request).await), problem(409, "in-flight"));
    barrier.open();
    let replay = settled(&other, Protocol::Http1, &request).await;
    assert_eq!((replay.status, was_replayed(&replay)), (200, true), "{replay:?}");
    assert_eq!(origin.executions_of(&key), 1);
}

/// A renewal hangs in Redis as the root goes: the end that waited for it is left to the next root all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_that_is_out_as_the_root_goes_loses_no_end() {
    let origin = Origin::start().await;
    let redis = Redis::start().await;
    let plugin = |replay_header: &str| {
        let rule = json!({"lock_ttl": "6s", "on_abandoned": "takeover", "replay_header": replay_header});
        let mut plugin = in_redis(detached_plugin(rule));
        plugin["store"]["redis"]["timeout"] = json!("1500ms");
        plugin
    };
    let builder = builder(&origin, plugin("x-first")).workers(1).drain_time_s(1);
    let mut envoy =
        with_link(builder, redis.addr(), &json!({"settings": {"op_timeout": "0.7s"}})).start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let key = unique_key();
    let request = Request::post("/held").key(&key).body("amount=1");
    let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    let claimed = Instant::now();
    pending.abort();
    envoy.wait_access_log(|line| line.contains("/held"), PATIENCE).await;
    // The lease is renewed after 2 s; from then on one renewal after the other hangs.
    redis.pause();
    poll_until(PATIENCE, "a renewal is out", async || {
        (claimed.elapsed() > Duration::from_millis(2200)).then_some(())
    })
    .await;
    envoy.reload_listener(plugin("x-second")).await.unwrap();
    envoy.wait_drained(PATIENCE).await;
    redis.resume();
    let failed = settled(&envoy, Protocol::Http1, &request).await;
    assert_eq!(kind(&failed), problem(424, "failed"), "{failed:?}");
    assert_eq!(failed.json()["reason"], "reset");
    barrier.open();
    assert_eq!(origin.executions_of(&key), 1);
}

/// Mistakes in the execution listener refuse requests before they run, and the log names each.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_unknown_or_looping_execution_listener_is_refused_and_named() {
    let origin = Origin::start().await;
    let plain = |plugin: Value| Envoy::builder().workers(2).plugin(plugin).origin_addr(origin.addr());
    let missing = plain(detached_plugin(json!({}))).extra_cluster(execution_cluster()).internal_listeners();
    let unknown = plain(detached_plugin(json!({})));
    let nobody = plain(detached_plugin(json!({})))
        .extra_cluster(json!({"name": CLUSTER, "load_assignment": {"cluster_name": CLUSTER}}));
    let filter = FilterSpec::new("idempotency", detached_plugin(json!({})));
    let looping =
        with_changed_execution(plain(detached_plugin(json!({}))), &default_routes(), |name, part| {
            if name == "listener" {
                *part = execution_listener(&default_routes(), json!([filter.to_json()]));
            }
        });
    for (name, builder, text) in [
        ("missing", missing, "execute_cluster can't be reached"),
        ("unknown", unknown, "execute_cluster names no cluster of this Envoy"),
        ("nobody", nobody, "execute_cluster can't be reached"),
        ("looping", looping, "the execution listener leads back into this filter"),
    ] {
        let envoy = builder.start().await;
        for proto in PROTOCOLS {
            let key = unique_key();
            for _ in 0..2 {
                let refused = settled(&envoy, proto, &pay(&key)).await;
                assert_eq!(kind(&refused), problem(503, "execution-unavailable"), "{name} {proto:?}");
                assert_eq!(refused.header("x-idempotency-refusal"), Some("execution-unavailable"), "{name}");
            }
            assert_eq!(origin.executions_of(&key), 0, "{name} {proto:?}");
        }
        envoy.wait_log(text, PATIENCE).await;
        assert_eq!(envoy.metric("execution_unavailable").await, 4, "{name}");
        assert_eq!(envoy.metric("released.not_sent").await, 4, "{name}");
        gauges_are_zero(&envoy).await;
    }
}

/// A listener that does not say how an execution ended proves nothing: what it answers is passed on and not kept.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_its_details_is_delivered_but_counts_as_unknown() {
    let origin = Origin::start().await;
    let plain = Envoy::builder().workers(2).plugin(detached_plugin(json!({}))).origin_addr(origin.addr());
    let envoy = with_changed_execution(plain, &default_routes(), |name, part| {
        if name == "listener" {
            let filters = "/filter_chains/0/filters/0/typed_config/http_filters";
            part.pointer_mut(filters).unwrap().as_array_mut().unwrap().remove(0);
        }
    })
    .start()
    .await;
    let key = unique_key();
    assert_eq!(send(&envoy, Protocol::Http1, &pay(&key)).await.status, 200);
    let retry = send(&envoy, Protocol::Http1, &pay(&key)).await;
    assert_eq!(kind(&retry), problem(424, "failed"));
    assert_eq!(retry.json()["reason"], "replaced");
    assert_eq!(origin.executions_of(&key), 1);
    envoy.wait_log("without the header x-idempotency-execution-details", PATIENCE).await;
}

/// The callout's own router would obey the client's retry headers and run the request again and again.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_cannot_make_the_callout_retry() {
    let origin = Origin::start().await;
    origin.on("/failing", Behaviour::Respond(Reply::status(500)));
    let envoy = builder(&origin, detached_plugin(json!({}))).start().await;
    for proto in PROTOCOLS {
        let key = unique_key();
        let request = Request::post("/failing")
            .key(&key)
            .body("amount=1")
            .header("x-envoy-retry-on", "5xx,gateway-error,reset")
            .header("x-envoy-max-retries", "3")
            .header("x-envoy-upstream-rq-timeout-ms", "1");
        let first = send(&envoy, proto, &request).await;
        assert_eq!(first.status, 500, "{first:?}");
        assert_eq!(kind(&send(&envoy, proto, &request).await), problem(424, "failed"));
        assert_eq!(origin.executions_of(&key), 1, "{proto:?}");
    }
}

/// What a callout can't carry runs inline, and is counted.
#[tokio::test(flavor = "multi_thread")]
async fn trailers_and_lines_that_are_no_text_run_inline() {
    let origin = Origin::start().await;
    let envoy = builder(&origin, detached_plugin(json!({}))).start().await;
    let trailers = Request::post("/pay").key(unique_key()).body("amount=1").trailer("x-sum", "1");
    let binary = Request::post("/pay").key(unique_key()).body("amount=1").header("x-name", b"caf\xe9");
    for (done, (proto, request)) in
        [(Protocol::Http2, &trailers), (Protocol::Http1, &binary)].into_iter().enumerate()
    {
        let first = send(&envoy, proto, request).await;
        assert_eq!(first.status, 200, "{first:?}");
        let again = send(&envoy, proto, request).await;
        assert!(was_replayed(&again), "{again:?}");
        let done = done as u64 + 1;
        assert_eq!((envoy.metric("detached_inline").await, envoy.metric("detached").await), (done, 0));
        assert_eq!(origin.executions(|_| true) as u64, done);
    }
}

/// An answer beyond what is kept is delivered whole, and its retry told that it was not kept.
#[tokio::test(flavor = "multi_thread")]
async fn a_large_answer_is_delivered_and_not_kept() {
    let origin = Origin::start().await;
    let body: Vec<u8> = (0..5 * 1024 * 1024_u32).map(|index| (index % 251) as u8).collect();
    origin.on(
        "/large",
        Behaviour::Respond(Reply::status(201).header("location", "/pay/1").chunk(body.clone())),
    );
    for (store, envoy, _redis) in on_each_store(&origin, json!({}), |builder| builder).await {
        let key = unique_key();
        let request = Request::post("/large").key(&key).body("amount=1");
        let first = send(&envoy, Protocol::Http1, &request).await;
        assert_eq!((first.status, first.body == body), (201, true), "{store}: {} bytes", first.body.len());
        let retry = send(&envoy, Protocol::Http1, &request).await;
        assert_eq!(kind(&retry), problem(409, "response-not-kept"), "{store}");
        assert_eq!(retry.header("location"), Some("/pay/1"), "{store}");
        assert_eq!(origin.executions_of(&key), 1, "{store}");
        gauges_are_zero(&envoy).await;
    }
}

/// The worker's room bounds what answers may weigh, too: without room the client is told where to look.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_room_is_not_read() {
    let origin = Origin::start().await;
    origin.on(
        "/large",
        Behaviour::Respond(Reply::status(201).header("location", "/pay/1").chunk(vec![b'x'; 1 << 20])),
    );
    let mut plugin =
        detached_plugin(json!({"max_request_body_bytes": 1024, "max_response_body_bytes": 1024}));
    plugin["limits"] = json!({"detached_bytes": 65536});
    let envoy = builder(&origin, plugin).start().await;
    let key = unique_key();
    let request = Request::post("/large").key(&key).body("amount=1");
    for _ in 0..2 {
        let answer = send(&envoy, Protocol::Http2, &request).await;
        assert_eq!(kind(&answer), problem(409, "response-not-kept"), "{answer:?}");
        assert_eq!(
            (&answer.json()["original_status"], answer.header("location")),
            (&json!(201), Some("/pay/1"))
        );
    }
    assert_eq!(origin.executions_of(&key), 1);
    gauges_are_zero(&envoy).await;
}

/// Time-outs, resets and truncated answers: unknown, whoever is there to hear it.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_without_a_whole_answer_is_unknown() {
    let origin = RawOrigin::start(RawReply::hang()).await;
    let rule = json!({"execute_timeout": "1s"});
    let routes = vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "300s"}})];
    let builder = Envoy::builder().workers(2).plugin(detached_plugin(rule)).origin_addr(origin.addr());
    let envoy = with_execution(builder, &routes).start().await;
    for (reply, status, reason) in [
        (RawReply::hang(), 504, "timeout"),
        (RawReply::reset_before_response(), 503, "reset"),
        (RawReply::truncated(100, b"half", End::Close), 502, "reset"),
        (RawReply::truncated(100, b"half", End::HangForever), 504, "timeout"),
    ] {
        let what = format!("{reply:?}");
        origin.set(reply);
        for client_stays in [true, false] {
            let key = unique_key();
            let request = pay(&key);
            let pending = Client::connect(envoy.addr(), Protocol::Http1).await.start(&request).await.unwrap();
            poll_until(PATIENCE, "the execution", async || (origin.executions_of(&key) == 1).then_some(()))
                .await;
            if client_stays {
                let told = pending.finish().await.unwrap();
                assert_eq!(told.status, status, "{what}: {told:?}");
                // The upstream's own listener answers for a reset; for the rest there is only the filter.
                let own = (reason != "reset" || status == 502).then(|| "failed".to_owned());
                assert_eq!(told.problem_type(), own, "{what}: {told:?}");
            } else {
                pending.abort();
            }
            let retry = settled(&envoy, Protocol::Http1, &request).await;
            assert_eq!(kind(&retry), problem(424, "failed"), "{what}");
            assert_eq!(retry.json()["reason"], reason, "{what}, client stays: {client_stays}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
    }
    gauges_are_zero(&envoy).await;
}

/// An internal redirect inside the execution listener ran the first upstream: nothing after it gives the key back.
#[tokio::test(flavor = "multi_thread")]
async fn a_redirect_inside_the_execution_is_followed_and_never_released() {
    let origin = Origin::start().await;
    origin.on(
        "/first",
        Behaviour::Respond(Reply::status(302).header("location", "http://api.example.com/second")),
    );
    origin.on("/second", Behaviour::Respond(Reply::status(503).chunk("busy")));
    let routes = vec![json!({"match": {"prefix": "/"}, "route": {
        "cluster": "origin",
        "internal_redirect_policy": {"max_internal_redirects": 3, "redirect_response_codes": [302]},
    }})];
    let builder = Envoy::builder().workers(2).plugin(detached_plugin(json!({}))).origin_addr(origin.addr());
    let envoy = with_execution(builder, &routes).start().await;
    let key = unique_key();
    let request = Request::post("/first").key(&key).body("amount=1");
    let first = send(&envoy, Protocol::Http1, &request).await;
    assert_eq!((first.status, first.body.as_slice()), (503, &b"busy"[..]), "{first:?}");
    let retry = send(&envoy, Protocol::Http1, &request).await;
    assert_eq!(kind(&retry), problem(424, "failed"));
    assert_eq!(retry.json()["reason"], "redirected");
    assert_eq!(origin.executions(|seen| seen.key() == Some(key.as_bytes())), 2, "once each");
}
