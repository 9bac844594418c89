//! What a store outlives: listener updates, other plugins in its VM, trapped VMs; and what it doesn't.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::support::*;

async fn send(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    send_once(envoy.addr(), proto, request).await.unwrap()
}

fn was_replayed(response: &Response) -> bool {
    response.header_lines("idempotent-replayed") == [b"true"]
}

/// Nothing is in flight any more, and nothing waits.
async fn break_even(envoy: &Envoy) {
    poll_until(PATIENCE, "gauges back at zero", async || {
        let gauges = (envoy.metric("in_flight").await, envoy.metric("outbox").await);
        (gauges == (0, 0)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_update_loses_no_record_and_no_exchange() {
    let origin = Origin::start().await;
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    let mut envoy = Envoy::builder()
        .workers(4)
        .plugin(plugin_with(json!({})))
        .drain_time_s(30)
        .origin_addr(origin.addr())
        .start()
        .await;
    let mut before = Vec::new();
    for proto in Protocol::BOTH {
        let barrier = Barrier::new();
        let held_path = format!("/held/{proto:?}");
        origin.on(&held_path, Behaviour::BarrierEcho(barrier.clone()));
        let [done, failed, held, fresh] = ["/pay", "/fails", &held_path, "/fresh"]
            .map(|path| Request::post(path).key(unique_key()).body("amount=1"));
        let first = send(&envoy, proto, &done).await;
        assert_eq!(first.status, 200);
        assert_eq!(send(&envoy, proto, &failed).await.status, 500);
        let pending = Client::connect(envoy.addr(), proto).await.start(&held).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        // A second one whose connection the client keeps for the retry: it stays with the old listener.
        let mut old = Client::connect(envoy.addr(), proto).await;
        let warm = send(&envoy, proto, &done).await;
        assert!(was_replayed(&warm));
        let on_old = old.send(&done).await.unwrap();
        assert!(was_replayed(&on_old));
        before.push((proto, barrier, done, first, failed, held, pending, old, fresh));
    }
    assert_eq!(envoy.metric("in_flight").await, 2);

    // The header's name shows which configuration answers.
    envoy.reload_listener(plugin_with(json!({"replay_header": "x-replayed-by-new"}))).await.unwrap();
    assert_eq!(
        envoy.stat("listener_manager.total_listeners_draining").await
            + envoy.stat("listener_manager.total_filter_chains_draining").await,
        1
    );

    for (proto, barrier, done, first, failed, held, pending, mut old, fresh) in before {
        let what = format!("{proto:?}");
        let key = |request: &Request| {
            let line = request.headers.iter().find(|(name, _)| name == b"idempotency-key").unwrap();
            String::from_utf8(line.1.clone()).unwrap()
        };
        for _ in 0..4 {
            let replay = send(&envoy, proto, &done).await;
            assert_eq!(
                (replay.status, replay.header("x-replayed-by-new")),
                (200, Some("true")),
                "{what}: {replay:?}"
            );
            assert_eq!(replay.body, first.body, "{what}");
            let refused = send(&envoy, proto, &failed).await;
            assert_eq!((refused.status, refused.problem_type().as_deref()), (424, Some("failed")), "{what}");
            let duplicate = send(&envoy, proto, &held).await;
            assert_eq!(
                (duplicate.status, duplicate.problem_type().as_deref()),
                (409, Some("in-flight")),
                "{what}"
            );
        }
        barrier.open();
        let answer = pending.finish().await.unwrap();
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (200, None), "{what}");
        let replay = send(&envoy, proto, &held).await;
        assert_eq!(
            (replay.status, replay.header("x-replayed-by-new")),
            (200, Some("true")),
            "{what}: {replay:?}"
        );
        assert_eq!(replay.body, answer.body, "{what}");
        // The old listener's connection still works for a request, and its record is everybody's.
        let run = old.send(&fresh).await.unwrap();
        assert_eq!(run.status, 200, "{what}");
        let replay = send(&envoy, proto, &fresh).await;
        assert_eq!(replay.header("x-replayed-by-new"), Some("true"), "{what}: {replay:?}");
        assert_eq!(replay.body, run.body, "{what}");
        for request in [&done, &failed, &held, &fresh] {
            assert_eq!(origin.executions_of(&key(request)), 1, "{what}: {}", request.path);
        }
    }
    break_even(&envoy).await;
    assert!(envoy.workers_that_served().await >= 2);
}

fn with_store(store: Value) -> Value {
    let mut plugin = default_plugin();
    plugin["store"]["shared_data"] = store;
    plugin
}

/// Starting empty would run live keys again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_geometry_is_refused_until_it_gets_a_namespace_of_its_own() {
    let origin = Origin::start().await;
    let mut envoy = Envoy::builder()
        .plugin(with_store(json!({"max_records": 1000})))
        .origin_addr(origin.addr())
        .start()
        .await;
    let keys = [unique_key(), unique_key()];
    let request = |key: &str| Request::post("/pay").key(key).body("amount=1");
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        assert_eq!(send(&envoy, proto, &request(key)).await.status, 200);
    }
    let why = envoy.reload_listener(with_store(json!({"max_records": 5000}))).await.unwrap_err();
    for part in ["1000", "5000", "namespace", "restart Envoy"] {
        assert!(why.contains(part), "{part:?} is not in {why}");
    }
    assert_eq!(envoy.stat("listener_manager.lds.update_rejected").await, 1);
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        assert!(was_replayed(&send(&envoy, proto, &request(key)).await));
    }
    // Neither of these is the table's shape.
    let other_bounds = json!({"max_records": 1000, "max_bytes": 67_108_864, "when_full": "evict_completed"});
    envoy.reload_listener(with_store(other_bounds)).await.unwrap();
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        assert!(was_replayed(&send(&envoy, proto, &request(key)).await));
        assert_eq!(origin.executions_of(key), 1);
    }
    envoy.reload_listener(with_store(json!({"max_records": 5000, "namespace": "larger"}))).await.unwrap();
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        let run = send(&envoy, proto, &request(key)).await;
        assert_eq!((run.status, was_replayed(&run)), (200, false));
        assert!(was_replayed(&send(&envoy, proto, &request(key)).await));
        assert_eq!(origin.executions_of(key), 2);
    }
    // Back to the first: it is still there.
    envoy.reload_listener(with_store(json!({"max_records": 1000}))).await.unwrap();
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        assert!(was_replayed(&send(&envoy, proto, &request(key)).await));
        assert_eq!(origin.executions_of(key), 2);
    }
}

/// Three more listeners beside the main one, all in the main one's VM: another plugin name, another root id, and
/// another plugin name with the main one's namespace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plugins_of_one_vm_share_records_only_where_they_name_one_namespace() {
    let origin = Origin::start().await;
    let ours = |store: Value, change: fn(&mut FilterSpec)| {
        let mut filter = FilterSpec::new("idempotency", with_store(store));
        filter.vm_id = Some("one-vm".to_owned());
        change(&mut filter);
        Some(filter)
    };
    let listener = |name: &str, filter| ListenerSpec::new(name, filter);
    let start = async |with_others: bool| {
        let mut builder = Envoy::builder()
            .workers(4)
            .main(|main| main.filter = ours(json!({}), |_| {}))
            .origin_addr(origin.addr());
        if with_others {
            builder = builder
                .listener(listener(
                    "by_name",
                    ours(json!({}), |it| it.plugin_name = Some("other".to_owned())),
                ))
                .listener(listener("by_root", ours(json!({}), |it| it.root_id = "other".to_owned())))
                .listener(listener(
                    "joined",
                    ours(json!({"namespace": "joined"}), |it| it.plugin_name = Some("third".to_owned())),
                ))
                .listener(listener(
                    "joined_too",
                    ours(json!({"namespace": "joined"}), |it| it.plugin_name = Some("fourth".to_owned())),
                ));
        }
        builder.start().await
    };
    let active = "wasm.envoy.wasm.runtime.v8.active";
    let alone = {
        let envoy = start(false).await;
        envoy.stat(active).await
    };
    let envoy = start(true).await;
    assert!(alone > 0);
    assert_eq!(envoy.stat(active).await, alone, "the listeners share their VMs");
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let mut runs = 0;
        for (name, shared) in
            [("main", false), ("by_name", false), ("by_root", false), ("joined", false), ("joined_too", true)]
        {
            let first = send_once(envoy.addr_of(name), proto, &request).await.unwrap();
            assert_eq!((first.status, was_replayed(&first)), (200, shared), "{proto:?} {name}: {first:?}");
            let retry = send_once(envoy.addr_of(name), proto, &request).await.unwrap();
            assert!(was_replayed(&retry), "{proto:?} {name}");
            assert_eq!(retry.body, first.body, "{proto:?} {name}");
            runs += usize::from(!shared);
            assert_eq!(origin.executions_of(&key), runs, "{proto:?} {name}");
        }
        // In flight in one, free in another.
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let key = unique_key();
        let request = Request::post("/held").key(&key).body("amount=1");
        let names = ["main", "by_name", "by_root", "joined"];
        let running: Vec<_> = names
            .map(|name| (envoy.addr_of(name), request.clone()))
            .into_iter()
            .map(|(addr, request)| tokio::spawn(async move { send_once(addr, proto, &request).await }))
            .collect();
        barrier.wait_arrived(names.len(), PATIENCE).await;
        for name in names.into_iter().chain(["joined_too"]) {
            let refused = send_once(envoy.addr_of(name), proto, &request).await.unwrap();
            assert_eq!(refused.problem_type().as_deref(), Some("in-flight"), "{proto:?} {name}");
        }
        barrier.open();
        for answer in running {
            assert_eq!(answer.await.unwrap().unwrap().status, 200);
        }
        assert_eq!(origin.executions_of(&key), names.len());
    }
    break_even(&envoy).await;
}

/// The embedded store is this process's memory: a restart runs a completed key again. (README, "Limits".)
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_envoy_forgets_the_embedded_store() {
    let origin = Origin::start().await;
    let mut envoy = Envoy::builder().plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    let keys = [unique_key(), unique_key()];
    let mut before = Vec::new();
    for (proto, key) in Protocol::BOTH.into_iter().zip(&keys) {
        let request = Request::post("/pay").key(key).body("amount=1");
        let first = send(&envoy, proto, &request).await;
        assert!(was_replayed(&send(&envoy, proto, &request).await));
        before.push((proto, request, first));
    }
    envoy.restart().await;
    for ((proto, request, first), key) in before.into_iter().zip(&keys) {
        let again = send(&envoy, proto, &request).await;
        assert_eq!((again.status, was_replayed(&again)), (200, false));
        assert_ne!(again.execution(), first.execution());
        assert!(was_replayed(&send(&envoy, proto, &request).await));
        assert_eq!(origin.executions_of(key), 2);
        // It can't know that this is a second attempt.
        assert!(origin.requests().iter().all(|seen| seen.header("x-idempotency-attempt").is_none()));
    }
}

/// Sends each request `times` times at once over as many connections, and holds the winners at the barrier until all
/// others were refused.
async fn race(envoy: &Envoy, origin: &Origin, proto: Protocol, keys: usize, times: usize) {
    let barrier = Barrier::new();
    let path = format!("/race/{proto:?}");
    origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
    let keys: Vec<String> = (0..keys).map(|_| unique_key()).collect();
    let mut requests = Vec::new();
    let executed = envoy.metric("executed").await;
    let conflicts = envoy.metric("conflicts").await;
    match proto {
        Protocol::Http1 => {
            for key in &keys {
                for _ in 0..times {
                    let request = Request::post(&path).key(key).body("amount=1");
                    let client = Client::connect(envoy.addr(), proto).await;
                    requests.push((key.clone(), request, Some(client), None));
                }
            }
        }
        Protocol::Http2 => {
            for _ in 0..times {
                let client = std::sync::Arc::new(H2::connect(envoy.addr()).await.unwrap());
                for key in &keys {
                    let request = Request::post(&path).key(key).body("amount=1");
                    requests.push((key.clone(), request, None, Some(client.clone())));
                }
            }
        }
    }
    let racing: Vec<_> = requests
        .into_iter()
        .map(|(key, request, h1, h2)| {
            tokio::spawn(async move {
                let answer = match (h1, h2) {
                    (Some(mut client), _) => client.send(&request).await,
                    (None, Some(client)) => client.send(&request).await,
                    (None, None) => panic!("neither protocol"),
                };
                (key, answer.unwrap())
            })
        })
        .collect();
    let losers = (keys.len() * (times - 1)) as u64;
    barrier.wait_arrived(keys.len(), PATIENCE).await;
    envoy.wait_metric("conflicts", conflicts + losers, PATIENCE).await;
    assert_eq!(envoy.metric("in_flight").await, keys.len() as u64, "{proto:?}");
    barrier.open();
    let mut won = BTreeMap::new();
    let mut refused = 0;
    for answer in racing {
        let (key, answer) = answer.await.unwrap();
        if answer.status == 200 && answer.header("idempotent-replayed").is_none() {
            assert!(won.insert(key, answer.body).is_none(), "{proto:?}: two winners");
        } else {
            let got = (answer.status, answer.problem_type());
            assert_eq!(got, (409, Some("in-flight".to_owned())), "{proto:?}: {answer:?}");
            refused += 1;
        }
    }
    assert_eq!((won.len(), refused), (keys.len(), losers), "{proto:?}");
    for key in &keys {
        assert_eq!(origin.executions_of(key), 1, "{proto:?}");
    }
    for key in keys.iter().step_by(10) {
        let replay = send(envoy, proto, &Request::post(&path).key(key).body("amount=1")).await;
        assert!(was_replayed(&replay));
        assert_eq!(&replay.body, &won[key]);
    }
    assert_eq!(envoy.metric("executed").await, executed + keys.len() as u64);
    break_even(envoy).await;
}

// A01.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn racing_duplicates_run_once_per_key_on_four_workers() {
    let origin = Origin::start().await;
    let envoy =
        Envoy::builder().workers(4).plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    race(&envoy, &origin, Protocol::Http2, 200, 20).await;
    // Each HTTP/1.1 request needs a connection of its own, so these are fewer.
    race(&envoy, &origin, Protocol::Http1, 25, 20).await;
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("stale_writes").await, 0);
    assert_eq!(envoy.metric("store_errors").await, 0);
    assert_eq!(envoy.metric("unexpected_events").await, 0);
    assert_eq!(envoy.metric("host_errors").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gauges_are_back_at_zero_after_many_clients_left() {
    let origin = Origin::start().await;
    let envoy =
        Envoy::builder().workers(4).plugin(plugin_with(json!({}))).origin_addr(origin.addr()).start().await;
    for (proto, round) in Protocol::BOTH.into_iter().zip(1..) {
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        // They leave while the upstream works.
        const MANY: usize = 60;
        let keys: Vec<String> = (0..MANY).map(|_| unique_key()).collect();
        let mut held = Vec::new();
        for key in &keys {
            let client = Client::connect(envoy.addr(), proto).await;
            held.push(client.start(&Request::post("/held").key(key).body("amount=1")).await.unwrap());
        }
        barrier.wait_arrived(MANY, PATIENCE).await;
        assert_eq!(envoy.metric("in_flight").await, MANY as u64);
        held.into_iter().for_each(Pending::abort);
        envoy.wait_metric("retained.client_gone", round * MANY as u64, PATIENCE).await;
        break_even(&envoy).await;
        barrier.open();
        for key in &keys {
            let retry = send(&envoy, proto, &Request::post("/held").key(key).body("amount=1")).await;
            assert_eq!(
                (retry.status, retry.json()["reason"].as_str()),
                (424, Some("client_gone")),
                "{retry:?}"
            );
            assert_eq!(origin.executions_of(key), 1);
        }
        // They leave before their request is whole: nothing is claimed, and the retry runs.
        let executed = envoy.metric("executed").await;
        let keys: Vec<String> = (0..20).map(|_| unique_key()).collect();
        let mut h1s = Vec::new();
        let mut h2s = Vec::new();
        for key in &keys {
            let request = Request::post("/held").key(key).header("content-length", "8").body("amount=1");
            match proto {
                Protocol::Http1 => {
                    let mut client = H1::connect(envoy.addr()).await.unwrap();
                    let bytes = client::h1::encode(&request);
                    client.write_raw(&bytes[..bytes.len() - 1]).await.unwrap();
                    h1s.push(client);
                }
                Protocol::Http2 => {
                    let client = H2::connect(envoy.addr()).await.unwrap();
                    let mut stream = client.open(&request, true).await.unwrap();
                    stream.send_data(b"amount=", false).await.unwrap();
                    h2s.push((client, stream));
                }
            }
        }
        envoy.wait_stat("http.main.downstream_rq_active", keys.len() as u64, PATIENCE).await;
        h1s.into_iter().for_each(H1::abort);
        h2s.into_iter().for_each(|(_client, stream)| stream.reset());
        poll_until(PATIENCE, "the half requests gone", async || {
            (envoy.stat("http.main.downstream_rq_active").await == 0).then_some(())
        })
        .await;
        assert_eq!(envoy.metric("executed").await, executed);
        break_even(&envoy).await;
        for key in &keys {
            assert_eq!(origin.executions_of(key), 0);
            let run = send(&envoy, proto, &Request::post("/held").key(key).body("amount=1")).await;
            assert_eq!((run.status, was_replayed(&run)), (200, false));
            assert_eq!(origin.executions_of(key), 1);
        }
    }
    assert_eq!(envoy.metric("outbox_dropped").await, 0);
    assert!(envoy.workers_that_served().await >= 2);
}
