//! Two Envoys on one Redis; duplicates that wait; shadow; and the mistakes one can make in the link.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::support::*;

/// In Redis, with so much time that a busy machine is no store failure.
fn in_redis(rule: Value) -> Value {
    let mut plugin = plugin_with(rule);
    plugin["store"] = json!({"redis": {"cluster": "redis-link", "timeout": "8s"}});
    plugin
}

fn patient(name: &str, part: &mut Value) {
    op_timeout(name, part, "3s");
}

fn op_timeout(name: &str, part: &mut Value, timeout: &str) {
    if name == "proxy" {
        *part.pointer_mut("/filter_chains/0/filters/0/typed_config/settings/op_timeout").unwrap() =
            json!(timeout);
    }
}

async fn envoy(redis: &Redis, origin: &Origin, workers: usize, plugin: Value) -> Envoy {
    let builder = Envoy::builder().workers(workers).plugin(plugin).origin_addr(origin.addr());
    with_changed_link(builder, redis.addr(), patient).start().await
}

async fn pair(redis: &Redis, origin: &Origin, plugin: Value) -> (Envoy, Envoy) {
    tokio::join!(envoy(redis, origin, 4, plugin.clone()), envoy(redis, origin, 4, plugin))
}

fn pay(key: &str) -> Request {
    Request::post("/pay").key(key).body("amount=1")
}

fn was_replayed(response: &Response) -> bool {
    response.header_lines("idempotent-replayed") == [b"true"]
}

fn kind(response: &Response) -> (u16, Option<String>) {
    (response.status, response.problem_type())
}

fn problem(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

async fn records(redis: &Redis) -> String {
    redis.command("DBSIZE").await.lines().next().unwrap_or_default().to_owned()
}

/// Nothing is in flight any more, and nothing waits to be written.
async fn settled(envoys: &[&Envoy]) {
    for envoy in envoys {
        poll_until(PATIENCE, "gauges back at zero", async || {
            let gauges = (envoy.metric("in_flight").await, envoy.metric("outbox").await);
            (gauges == (0, 0)).then_some(())
        })
        .await;
    }
}

async fn active(envoy: &Envoy, count: u64) {
    poll_until(PATIENCE, &format!("{count} active requests"), async || {
        (envoy.stat("http.main.downstream_rq_active").await == count).then_some(())
    })
    .await;
}

const LANES: usize = 8;
const KEYS_OF_A_LANE: usize = 25;
const RACERS: usize = 20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_racing_duplicates_on_two_envoys_one_runs() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let (one, two) = pair(&redis, &origin, in_redis(json!({}))).await;
    let mut racers = Vec::new();
    let mut keys = Vec::new();
    for _ in 0..LANES {
        let lane: Arc<Vec<String>> = Arc::new((0..KEYS_OF_A_LANE).map(|_| unique_key()).collect());
        keys.extend(lane.iter().cloned());
        let gate = Arc::new(tokio::sync::Barrier::new(RACERS));
        for racer in 0..RACERS {
            let addr = if racer % 2 == 0 { one.addr() } else { two.addr() };
            let proto = Protocol::BOTH[racer / 2 % 2];
            let (lane, gate) = (Arc::clone(&lane), Arc::clone(&gate));
            racers.push(tokio::spawn(async move {
                let mut client = Client::connect(addr, proto).await;
                let mut answers = Vec::new();
                for key in lane.iter() {
                    gate.wait().await;
                    answers.push((key.clone(), client.send(&pay(key)).await));
                }
                answers
            }));
        }
    }
    let mut bodies: BTreeMap<String, BTreeSet<Vec<u8>>> = BTreeMap::new();
    let mut firsts: BTreeMap<String, usize> = BTreeMap::new();
    let mut total = 0;
    for racer in racers {
        for (key, answer) in racer.await.unwrap() {
            let answer = answer.unwrap();
            total += 1;
            if answer.status == 200 {
                *firsts.entry(key.clone()).or_default() += usize::from(!was_replayed(&answer));
                bodies.entry(key).or_default().insert(answer.body);
            } else {
                assert_eq!(kind(&answer), problem(409, "in-flight"), "{answer:?}");
            }
        }
    }
    assert_eq!((total, keys.len()), (4000, 200));
    for key in &keys {
        assert_eq!((origin.executions_of(key), firsts[key], bodies[key].len()), (1, 1, 1), "{key}");
    }
    assert_eq!(records(&redis).await, ":200");
    settled(&[&one, &two]).await;
    assert_eq!(one.metric("executed").await + two.metric("executed").await, 200);
    for envoy in [&one, &two] {
        assert!(envoy.workers_that_served().await >= 2);
        for name in ["store_errors", "stale_writes", "unexpected_events", "host_errors"] {
            assert_eq!(envoy.metric(name).await, 0, "{name}\n{}", envoy.log_text());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_binary_response_is_the_same_on_the_other_envoy() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let mut state = 1_u32;
    let body: Vec<u8> = (0..200 * 1024)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state.to_be_bytes()[0]
        })
        .collect();
    let reply = Reply::status(201)
        .header("content-type", "application/octet-stream")
        .header("x-part", "a")
        .header("x-part", b"\xe9b")
        .chunk(body.clone());
    origin.on("/pay", Behaviour::Respond(reply));
    let (one, two) = pair(&redis, &origin, in_redis(json!({}))).await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let first = send_once(one.addr(), proto, &pay(&key)).await.unwrap();
        assert_eq!((first.status, was_replayed(&first)), (201, false));
        assert!(first.body == body);
        for envoy in [&two, &one, &two] {
            let replay = send_once(envoy.addr(), proto, &pay(&key)).await.unwrap();
            assert_eq!((replay.status, was_replayed(&replay)), (201, true));
            assert!(replay.body == body, "{} bytes", replay.body.len());
            for name in ["content-type", "x-part", "content-length"] {
                assert_eq!(replay.header_lines(name), first.header_lines(name), "{name}");
            }
        }
        assert_eq!(origin.executions_of(&key), 1);
    }
    settled(&[&one, &two]).await;
}

/// The first execution of a key stays with the origin for ever; later ones are answered.
fn first_hangs(origin: &Origin) -> Barrier {
    let barrier = Barrier::new();
    origin.on("/pay", Behaviour::first_waits(&barrier));
    barrier
}

async fn after_a_killed_envoy(on_abandoned: &str, check: impl AsyncFn(&Origin, &Envoy, &str, Response)) {
    for proto in Protocol::BOTH {
        let (redis, origin) = (Redis::start().await, Origin::start().await);
        let barrier = first_hangs(&origin);
        let mut plugin = in_redis(json!({"lock_ttl": "1600ms", "on_abandoned": on_abandoned}));
        plugin["store"]["redis"]["timeout"] = json!("400ms");
        let start = async || {
            let builder = Envoy::builder().plugin(plugin.clone()).origin_addr(origin.addr());
            with_changed_link(builder, redis.addr(), |name, part| op_timeout(name, part, "0.15s"))
                .start()
                .await
        };
        let (mut one, two) = tokio::join!(start(), start());
        let key = unique_key();
        let pending = Client::connect(one.addr(), proto).await.start(&pay(&key)).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        one.expect_death();
        one.kill9();
        let killed = Instant::now();
        pending.finish().await.unwrap_err();
        let mut conflicts = 0;
        let healed = poll_until(PATIENCE, "the lease is over", async || {
            let answer = send_once(two.addr(), proto, &pay(&key)).await.unwrap();
            if answer.status != 409 {
                return Some(answer);
            }
            assert_eq!(kind(&answer), problem(409, "in-flight"));
            assert_eq!(origin.executions_of(&key), 1);
            conflicts += 1;
            None
        })
        .await;
        assert!(conflicts > 0);
        let took = killed.elapsed();
        assert!(took < Duration::from_secs(4), "{took:?}");
        check(&origin, &two, &key, healed).await;
        settled(&[&two]).await;
        barrier.open();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claim_of_a_killed_envoy_is_taken_over_after_its_lease() {
    after_a_killed_envoy("takeover", async |origin, two, key, healed| {
        assert_eq!((healed.status, was_replayed(&healed)), (200, false), "{healed:?}");
        let seen: Vec<_> = origin.requests().into_iter().filter(|seen| seen.complete).collect();
        let attempts: Vec<_> = seen.iter().map(|seen| seen.header("x-idempotency-attempt")).collect();
        assert_eq!(attempts, [None, Some("2")]);
        let replay = send_once(two.addr(), Protocol::Http1, &pay(key)).await.unwrap();
        assert_eq!((replay.status, was_replayed(&replay), &replay.body), (200, true, &healed.body));
        assert_eq!((origin.executions_of(key), two.metric("takeovers").await), (2, 1));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_claim_of_a_killed_envoy_is_retained_if_the_rule_says_so() {
    after_a_killed_envoy("retain", async |origin, two, key, refused| {
        assert_eq!(kind(&refused), problem(424, "abandoned"), "{refused:?}");
        let again = send_once(two.addr(), Protocol::Http2, &pay(key)).await.unwrap();
        assert_eq!(kind(&again), problem(424, "abandoned"));
        assert_eq!(origin.executions_of(key), 1);
    })
    .await;
}

/// Once with claims that are answered after their clients left, once with claims that nobody answers in time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_leave_while_their_claim_is_asked_for_leave_none() {
    for (timeout, op, unanswered) in [("8s", "3s", false), ("400ms", "0.15s", true)] {
        let (redis, origin) = (Redis::start().await, Origin::start().await);
        let mut plugin = in_redis(json!({"lock_ttl": if unanswered { "2s" } else { "60s" }}));
        plugin["store"]["redis"]["timeout"] = json!(timeout);
        let builder = Envoy::builder().workers(2).plugin(plugin).origin_addr(origin.addr());
        let envoy =
            with_changed_link(builder, redis.addr(), |name, part| op_timeout(name, part, op)).start().await;
        let mut clients = Vec::new();
        for at in 0..60 {
            clients.push((unique_key(), Client::connect(envoy.addr(), Protocol::BOTH[at % 2]).await));
        }
        redis.pause();
        let (mut keys, mut pendings) = (Vec::new(), Vec::new());
        for (key, client) in clients {
            pendings.push(client.start(&pay(&key)).await.unwrap());
            keys.push(key);
        }
        if unanswered {
            envoy.wait_metric("store_errors", 1, PATIENCE).await;
        } else {
            active(&envoy, 60).await;
        }
        pendings.into_iter().for_each(Pending::abort);
        active(&envoy, 0).await;
        for key in &keys {
            assert_eq!(origin.executions_of(key), 0);
        }
        redis.resume();
        settled(&[&envoy]).await;
        if !unanswered {
            // Before a claim is answered there is no record either.
            envoy.wait_metric("released.not_sent", 60, PATIENCE).await;
            poll_until(PATIENCE, "no claim is left", async || (records(&redis).await == ":0").then_some(()))
                .await;
            assert_eq!(envoy.metric("released.not_sent").await, 60);
        }
        // What a late claim left is over with its lease.
        let end = Instant::now() + Duration::from_secs(10);
        for (at, key) in keys.iter().enumerate() {
            let proto = Protocol::BOTH[at % 2];
            let answer = poll_until(
                end.saturating_duration_since(Instant::now()),
                "a fresh request runs",
                async || {
                    let answer = send_once(envoy.addr(), proto, &pay(key)).await.unwrap();
                    assert!([200, 409, 503].contains(&answer.status), "{answer:?}");
                    (answer.status == 200).then_some(answer)
                },
            )
            .await;
            assert!(!was_replayed(&answer));
            assert_eq!(origin.executions_of(key), 1, "{key}");
        }
        settled(&[&envoy]).await;
    }
}

/// One Envoy with the embedded store, or two on one Redis.
struct Setup {
    redis: Option<Redis>,
    origin: Origin,
    envoys: Vec<Envoy>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Store {
    SharedData,
    Redis,
}

impl Setup {
    async fn start(store: Store, workers: usize, rule: Value, change: impl Fn(&mut Value)) -> Setup {
        let origin = Origin::start().await;
        if store == Store::SharedData {
            let mut plugin = plugin_with(rule);
            change(&mut plugin);
            let envoy =
                Envoy::builder().workers(workers).plugin(plugin).origin_addr(origin.addr()).start().await;
            return Setup { redis: None, origin, envoys: vec![envoy] };
        }
        let redis = Redis::start().await;
        let mut plugin = in_redis(rule);
        change(&mut plugin);
        let (one, two) = tokio::join!(
            envoy(&redis, &origin, workers, plugin.clone()),
            envoy(&redis, &origin, workers, plugin)
        );
        Setup { redis: Some(redis), origin, envoys: vec![one, two] }
    }

    fn first(&self) -> &Envoy {
        self.envoys.first().unwrap()
    }

    /// The other Envoy, where there is one.
    fn other(&self) -> &Envoy {
        self.envoys.last().unwrap()
    }

    async fn metric(&self, name: &str) -> u64 {
        let mut sum = 0;
        for envoy in &self.envoys {
            sum += envoy.metric(name).await;
        }
        sum
    }

    async fn wait_metric(&self, name: &str, count: u64) {
        poll_until(PATIENCE, &format!("{name} = {count}"), async || {
            (self.metric(name).await == count).then_some(())
        })
        .await;
    }

    async fn settled(&self) {
        settled(&self.envoys.iter().collect::<Vec<_>>()).await;
    }

    /// No record in Redis says that something runs. (The embedded store is written before the response ends.)
    async fn written(&self) {
        let Some(redis) = &self.redis else { return };
        let script = "local n = 0 for _, k in ipairs(redis.call('KEYS', '*')) do \
            if redis.call('HGET', k, 'state') == 'in_flight' then n = n + 1 end end return n";
        poll_until(PATIENCE, "no record in flight", async || {
            redis.command(&format!("EVAL \"{script}\" 0")).await.starts_with(":0\r").then_some(())
        })
        .await;
    }
}

const STORES: [Store; 2] = [Store::SharedData, Store::Redis];

fn spawn_send(
    addr: SocketAddr,
    proto: Protocol,
    request: Request,
) -> tokio::task::JoinHandle<Result<Response, ClientError>> {
    tokio::spawn(async move { send_once(addr, proto, &request).await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_wait_and_get_the_replay() {
    for store in STORES {
        let setup = Setup::start(store, 4, json!({"in_flight": "wait", "wait_timeout": "20s"}), |_| ()).await;
        let barrier = Barrier::new();
        setup.origin.on("/pay", Behaviour::BarrierEcho(barrier.clone()));
        let key = unique_key();
        let first =
            Client::connect(setup.first().addr(), Protocol::Http1).await.start(&pay(&key)).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        let mut waiting = Vec::new();
        for envoy in [setup.first(), setup.other()] {
            for proto in [Protocol::Http1, Protocol::Http2, Protocol::Http1, Protocol::Http2] {
                waiting.push(spawn_send(envoy.addr(), proto, pay(&key)));
            }
        }
        setup.wait_metric("waited", 8).await;
        // Another request under the key does not wait.
        let other =
            send_once(setup.other().addr(), Protocol::Http1, &pay(&key).body("amount=2")).await.unwrap();
        assert_eq!(kind(&other), problem(422, "mismatch"));
        barrier.open();
        let first = first.finish().await.unwrap();
        assert_eq!((first.status, was_replayed(&first)), (200, false));
        for answer in waiting {
            let answer = answer.await.unwrap().unwrap();
            assert_eq!((answer.status, was_replayed(&answer)), (200, true), "{store:?}: {answer:?}");
            assert_eq!(answer.body, first.body);
        }
        assert_eq!(setup.origin.executions_of(&key), 1);
        assert_eq!((setup.metric("waited").await, setup.metric("wait_timeouts").await), (8, 0));
        assert_eq!((setup.metric("replayed").await, setup.metric("conflicts").await), (8, 0));
        setup.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_waits_no_longer_than_it_may() {
    for store in STORES {
        let setup =
            Setup::start(store, 2, json!({"in_flight": "wait", "wait_timeout": "1500ms"}), |plugin| {
                if store == Store::Redis {
                    plugin["store"]["redis"]["timeout"] = json!("1s");
                }
            })
            .await;
        for (round, proto) in (1..).zip(Protocol::BOTH) {
            let barrier = Barrier::new();
            setup.origin.on("/pay", Behaviour::BarrierEcho(barrier.clone()));
            let key = unique_key();
            let first = Client::connect(setup.first().addr(), proto).await.start(&pay(&key)).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            let asked = Instant::now();
            let refused = send_once(setup.other().addr(), proto, &pay(&key)).await.unwrap();
            let took = asked.elapsed();
            assert_eq!(kind(&refused), problem(409, "in-flight"), "{store:?}");
            assert!(refused.header("retry-after").is_some());
            assert!(
                took >= Duration::from_millis(1490) && took < Duration::from_secs(3),
                "{store:?}: {took:?}"
            );
            assert_eq!(setup.origin.executions_of(&key), 1);
            barrier.open();
            assert_eq!(first.finish().await.unwrap().status, 200);
            let replay = send_once(setup.other().addr(), proto, &pay(&key)).await.unwrap();
            assert!(was_replayed(&replay));
            setup.wait_metric("wait_timeouts", round).await;
        }
        assert_eq!((setup.metric("waited").await, setup.metric("conflicts").await), (2, 2));
        setup.settled().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_are_bounded_and_one_that_leaves_frees_its_place() {
    for store in STORES {
        let setup = Setup::start(store, 1, json!({"in_flight": "wait", "wait_timeout": "20s"}), |plugin| {
            plugin["limits"] = json!({"waiters": 1});
        })
        .await;
        let barrier = Barrier::new();
        setup.origin.on("/pay", Behaviour::BarrierEcho(barrier.clone()));
        let key = unique_key();
        let first =
            Client::connect(setup.first().addr(), Protocol::Http1).await.start(&pay(&key)).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        let before = setup.other().stat("http.main.downstream_rq_active").await;
        for (round, proto) in Protocol::BOTH.into_iter().enumerate() {
            let waiter = Client::connect(setup.other().addr(), proto).await.start(&pay(&key)).await.unwrap();
            setup.wait_metric("waited", round as u64 + 1).await;
            for proto in Protocol::BOTH {
                let asked = Instant::now();
                let refused = send_once(setup.other().addr(), proto, &pay(&key)).await.unwrap();
                assert_eq!(kind(&refused), problem(409, "in-flight"), "{store:?}");
                assert!(asked.elapsed() < Duration::from_secs(5));
            }
            waiter.abort();
            active(setup.other(), before).await;
        }
        let last = spawn_send(setup.other().addr(), Protocol::Http2, pay(&key));
        // A claim that was asked for when its client left may still be on its way: its place is free after the answer.
        setup.wait_metric("waited", 3).await;
        barrier.open();
        let first = first.finish().await.unwrap();
        let last = last.await.unwrap().unwrap();
        assert_eq!((last.status, was_replayed(&last), &last.body), (200, true, &first.body), "{store:?}");
        assert_eq!(setup.origin.executions_of(&key), 1);
        assert_eq!((setup.metric("conflicts").await, setup.metric("wait_timeouts").await), (4, 0));
        setup.settled().await;
        if let Some(redis) = &setup.redis {
            assert_eq!(records(redis).await, ":1");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_executes_if_the_first_execution_is_released() {
    for store in STORES {
        let setup = Setup::start(store, 4, json!({"in_flight": "wait", "wait_timeout": "20s"}), |_| ()).await;
        let (refusing, running) = (Barrier::new(), Barrier::new());
        let at_once = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        let (one, two, count) = (refusing.clone(), running.clone(), Arc::clone(&at_once));
        setup.origin.on(
            "/pay",
            Behaviour::func(move |_, nth| {
                let barrier = if nth == 1 { one.clone() } else { two.clone() };
                let count = Arc::clone(&count);
                async move {
                    let now = count.0.fetch_add(1, Ordering::SeqCst) + 1;
                    count.1.fetch_max(now, Ordering::SeqCst);
                    barrier.pass().await;
                    count.0.fetch_sub(1, Ordering::SeqCst);
                    Reply::echo(if nth == 1 { 503 } else { 200 })
                }
            }),
        );
        let key = unique_key();
        let first =
            Client::connect(setup.first().addr(), Protocol::Http2).await.start(&pay(&key)).await.unwrap();
        refusing.wait_arrived(1, PATIENCE).await;
        let waiting: Vec<_> = [setup.first(), setup.other(), setup.first(), setup.other()]
            .into_iter()
            .zip(Protocol::BOTH.into_iter().cycle())
            .map(|(envoy, proto)| spawn_send(envoy.addr(), proto, pay(&key)))
            .collect();
        setup.wait_metric("waited", 4).await;
        refusing.open();
        assert_eq!(first.finish().await.unwrap().status, 503);
        running.wait_arrived(1, PATIENCE).await;
        running.open();
        let mut answers = Vec::new();
        for answer in waiting {
            answers.push(answer.await.unwrap().unwrap());
        }
        assert!(answers.iter().all(|answer| answer.status == 200), "{store:?}: {answers:?}");
        assert_eq!(answers.iter().filter(|answer| was_replayed(answer)).count(), 3);
        assert_eq!(answers.iter().map(|answer| &answer.body).collect::<BTreeSet<_>>().len(), 1);
        assert_eq!((setup.origin.executions_of(&key), at_once.1.load(Ordering::SeqCst)), (2, 1), "{store:?}");
        assert_eq!(setup.metric("released.status").await, 1);
        setup.settled().await;
    }
}

fn shadowed() -> Value {
    json!({"mode": "shadow", "match": {"path": {"prefix": "/shadow"}}})
}

/// Without what differs from request to request anyhow.
fn steady<N: AsRef<[u8]>>(lines: &[(N, Vec<u8>)]) -> Vec<(String, Vec<u8>)> {
    let varying = ["date", "x-request-id", "x-envoy-upstream-service-time", "idempotency-key", ":path"];
    let lines = lines
        .iter()
        .map(|(name, value)| (String::from_utf8_lossy(name.as_ref()).to_ascii_lowercase(), value.clone()));
    lines.filter(|(name, _)| !varying.contains(&name.as_str())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_counts_and_changes_nothing() {
    for store in STORES {
        let setup = Setup::start(store, 2, shadowed(), |_| ()).await;
        let reply = Reply::ok("paid").header("content-type", "text/plain").header("set-cookie", "a=b");
        for path in ["/shadow/pay", "/plain/pay"] {
            setup.origin.on(path, Behaviour::Respond(reply.clone()));
        }
        setup.origin.on("/shadow/fails", Behaviour::Respond(Reply::status(500)));
        for (round, proto) in (1_u64..).zip(Protocol::BOTH) {
            let (first, other) = (setup.first().addr(), setup.other().addr());
            let post = |path: &str, key: &str| Request::post(path).key(key).body("amount=1");
            let key = unique_key();
            let plain = send_once(first, proto, &post("/plain/pay", &key)).await.unwrap();
            for (at, addr) in [first, other, other].into_iter().enumerate() {
                let answer = send_once(addr, proto, &post("/shadow/pay", &key)).await.unwrap();
                assert_eq!((answer.status, &answer.body), (200, &plain.body), "{store:?}");
                assert_eq!(steady(&answer.headers), steady(&plain.headers), "{store:?}");
                if at == 0 {
                    setup.wait_metric("shadow.executed", 3 * round - 2).await;
                    setup.written().await;
                }
            }
            setup.wait_metric("shadow.replayed", 2 * round).await;
            let seen = setup.origin.requests();
            let of_key: Vec<_> = seen.iter().filter(|seen| seen.key() == Some(key.as_bytes())).collect();
            assert_eq!(of_key.len(), 4);
            for request in &of_key[1..] {
                assert_eq!(steady(&request.headers), steady(&of_key[0].headers), "{store:?}");
                assert_eq!(request.body, of_key[0].body);
            }

            let mismatch = post("/shadow/pay", &key).body("amount=2");
            assert_eq!(send_once(other, proto, &mismatch).await.unwrap().status, 200);
            setup.wait_metric("shadow.mismatches", round).await;

            let key = unique_key();
            let barrier = Barrier::new();
            setup.origin.on("/shadow/held", Behaviour::BarrierEcho(barrier.clone()));
            let held = Client::connect(first, proto).await.start(&post("/shadow/held", &key)).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            setup.wait_metric("shadow.executed", 3 * round - 1).await;
            let twin = Client::connect(other, proto).await.start(&post("/shadow/held", &key)).await.unwrap();
            barrier.wait_arrived(2, PATIENCE).await;
            setup.wait_metric("shadow.conflicts", round).await;
            barrier.open();
            let (held, twin) = (held.finish().await.unwrap(), twin.finish().await.unwrap());
            assert_eq!((held.status, twin.status), (200, 200));
            assert_ne!(held.body, twin.body);

            let key = unique_key();
            for at in 0..2 {
                assert_eq!(send_once(other, proto, &post("/shadow/fails", &key)).await.unwrap().status, 500);
                if at == 0 {
                    setup.wait_metric("shadow.executed", 3 * round).await;
                    setup.written().await;
                }
            }
            setup.wait_metric("shadow.failed_replies", round).await;
            assert_eq!(setup.origin.executions_of(&key), 2);

            let keyless = Request::post("/shadow/pay").body("amount=1");
            assert_eq!(send_once(other, proto, &keyless).await.unwrap().status, 200);
            let two_keys = post("/shadow/pay", "one").key("two");
            assert_eq!(send_once(other, proto, &two_keys).await.unwrap().status, 200);
            setup.wait_metric("shadow.rejected", 2 * round).await;
        }
        setup.settled().await;
        let counts = [
            ("shadow.executed", 6),
            ("shadow.replayed", 4),
            ("shadow.mismatches", 2),
            ("shadow.conflicts", 2),
            ("shadow.failed_replies", 2),
            ("shadow.rejected", 4),
            ("executed", 0),
            ("replayed", 0),
            ("conflicts", 0),
            ("store_errors", 0),
            ("unexpected_events", 0),
            ("host_errors", 0),
        ];
        for (name, count) in counts {
            assert_eq!(setup.metric(name).await, count, "{store:?}: {name}");
        }
    }
}

/// The upstream answers once it has the whole body, and tells when it has the first part.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_lets_bodies_stream() {
    for store in STORES {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let upstream = listener.local_addr().unwrap();
        let arrived = Arc::new(AtomicUsize::new(0));
        let firsts = Arc::clone(&arrived);
        let server = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let firsts = Arc::clone(&firsts);
                tokio::spawn(async move {
                    let (mut got, mut told) = (Vec::new(), false);
                    while stream.read_buf(&mut got).await.is_ok_and(|read| read > 0) {
                        let has = |what: &[u8]| got.windows(what.len()).any(|window| window == what);
                        if has(b"FIRST") && !std::mem::replace(&mut told, true) {
                            firsts.fetch_add(1, Ordering::SeqCst);
                        }
                        if has(b"SECOND") {
                            let answer =
                                b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok";
                            stream.write_all(answer).await.unwrap();
                            break;
                        }
                    }
                });
            }
        });
        let redis = Redis::start().await;
        let plugin = if store == Store::Redis { in_redis(shadowed()) } else { plugin_with(shadowed()) };
        let builder = Envoy::builder().plugin(plugin).origin_addr(upstream);
        let envoy = with_changed_link(builder, redis.addr(), patient).start().await;
        let request = Request::post("/shadow").key(unique_key()).header("content-length", "11");
        let mut h1 = H1::connect(envoy.addr()).await.unwrap();
        h1.write_request(&request).await.unwrap();
        h1.write_raw(b"FIRST").await.unwrap();
        let first_arrived = async |count| {
            poll_until(PATIENCE, "the first part at the upstream", async || {
                (arrived.load(Ordering::SeqCst) == count).then_some(())
            })
            .await;
        };
        first_arrived(1).await;
        h1.write_raw(b"SECOND").await.unwrap();
        assert_eq!(h1.read_response().await.unwrap().body, b"ok");
        let request = Request::post("/shadow").key(unique_key()).no_content_length();
        let h2 = H2::connect(envoy.addr()).await.unwrap();
        let mut stream = h2.open(&request, true).await.unwrap();
        stream.send_data(b"FIRST", false).await.unwrap();
        first_arrived(2).await;
        stream.send_data(b"SECOND", true).await.unwrap();
        assert_eq!(stream.response().await.unwrap().body, b"ok");
        envoy.wait_metric("shadow.executed", 2, PATIENCE).await;
        server.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadow_does_not_need_its_redis() {
    let (mut redis, origin) = (Redis::start().await, Origin::start().await);
    let mut plugin = in_redis(shadowed());
    plugin["store"]["redis"]["timeout"] = json!("250ms");
    let builder = Envoy::builder().plugin(plugin).origin_addr(origin.addr());
    let envoy = with_link(builder, redis.addr(), &json!({})).start().await;
    redis.kill();
    for (round, proto) in (1..).zip(Protocol::BOTH) {
        let key = unique_key();
        for _ in 0..2 {
            let answer =
                send_once(envoy.addr(), proto, &Request::post("/shadow").key(&key).body("x")).await.unwrap();
            assert_eq!((answer.status, was_replayed(&answer)), (200, false));
            assert_eq!(answer.header("idempotency-protection"), None);
        }
        assert_eq!(origin.executions_of(&key), 2);
        envoy.wait_metric("store_errors", 2 * round, PATIENCE).await;
    }
    for seen in origin.requests() {
        assert_eq!(seen.header("idempotency-protection"), None);
    }
    assert_eq!(envoy.metric("unprotected").await, 0);
    settled(&[&envoy]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn enforce_never_obeys_a_record_of_shadow() {
    for store in STORES {
        let (redis, origin) = (Redis::start().await, Origin::start().await);
        let plugin = |mode: &str| {
            let rule = json!({"mode": mode});
            if store == Store::Redis {
                return in_redis(rule);
            }
            let mut plugin = plugin_with(rule);
            plugin["store"] = json!({"shared_data": {"namespace": "both"}});
            plugin
        };
        let mut enforcing = FilterSpec::new("enforcing", plugin("enforce"));
        (enforcing.vm_id, enforcing.root_id) = (Some("both".into()), "enforcing".into());
        let builder = Envoy::builder()
            .plugin(plugin("shadow"))
            .vm_id("both")
            .listener(ListenerSpec::new("enforcing", Some(enforcing)))
            .origin_addr(origin.addr());
        let envoy = with_changed_link(builder, redis.addr(), patient).start().await;
        let enforced = envoy.addr_of("enforcing");
        for (round, proto) in (1..).zip(Protocol::BOTH) {
            let key = unique_key();
            let first = send_once(envoy.addr(), proto, &pay(&key)).await.unwrap();
            envoy.wait_metric("shadow.executed", round, PATIENCE).await;
            let second = send_once(enforced, proto, &pay(&key)).await.unwrap();
            assert_eq!((second.status, was_replayed(&second)), (200, false), "{store:?}: {second:?}");
            assert_ne!(first.body, second.body);
            assert_eq!(origin.executions_of(&key), 2);
            let replay = send_once(enforced, proto, &pay(&key)).await.unwrap();
            assert_eq!((was_replayed(&replay), &replay.body), (true, &second.body), "{store:?}");
            let again = send_once(envoy.addr(), proto, &pay(&key)).await.unwrap();
            assert_eq!((again.status, was_replayed(&again)), (200, false));
            assert_eq!(origin.executions_of(&key), 3);
            envoy.wait_metric("shadow.replayed", round, PATIENCE).await;
        }
        settled(&[&envoy]).await;
    }
}

/// When a mistake in the link shows.
#[derive(Clone, Copy, PartialEq)]
enum Shows {
    Always,
    /// It is a matter of timing: a request may get through, and then it ran once, under its claim.
    Sometimes,
    /// Envoys before this version make up for it.
    From([u32; 3]),
}

/// A link with a mistake in it: refused within the store's timeout, nothing runs, and the log says what it is.
async fn trap(cluster: &str, says: &str, shows: Shows, change: impl Fn(&str, &mut Value)) {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let mut plugin = plugin_with(json!({}));
    plugin["store"] = json!({"redis": {"cluster": cluster, "timeout": "500ms"}});
    let builder = Envoy::builder().plugin(plugin).origin_addr(origin.addr());
    let envoy = with_changed_link(builder, redis.addr(), change).start().await;
    let made_up_for = match shows {
        Shows::From(version) => envoy.version().await < version,
        Shows::Always | Shows::Sometimes => false,
    };
    for proto in Protocol::BOTH {
        let key = unique_key();
        let asked = Instant::now();
        let answer = send_once(envoy.addr(), proto, &pay(&key)).await.unwrap();
        let took = asked.elapsed();
        assert!(took < Duration::from_secs(2), "{says}: {took:?}");
        if answer.status == 200 && (shows == Shows::Sometimes || made_up_for) {
            assert_eq!((was_replayed(&answer), origin.executions_of(&key)), (false, 1), "{says}");
            continue;
        }
        let log = envoy.log_text();
        assert_eq!(kind(&answer), problem(503, "store-unavailable"), "{says}: {answer:?}\n{log}");
        assert_eq!(origin.executions_of(&key), 0, "{says}");
    }
    if made_up_for {
        return;
    }
    poll_until(PATIENCE, "the log names the mistake", async || {
        if shows == Shows::Sometimes {
            let _ = send_once(envoy.addr(), Protocol::Http1, &pay(&unique_key())).await.unwrap();
        }
        envoy.log_contains(says).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_cluster_is_named() {
    trap(
        "no-such-cluster",
        "Envoy has no cluster of the name in store.redis.cluster",
        Shows::Always,
        |_, _| (),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_an_http_service_is_named() {
    trap("origin", "store.redis.cluster leads to an HTTP service", Shows::Always, |_, _| ()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_without_its_holds_is_named() {
    trap("redis-link", "two request_end_hold filters", Shows::Sometimes, |name, part| {
        if name == "link" {
            let filters = part.pointer_mut("/filter_chains/0/filters/0/typed_config/http_filters").unwrap();
            filters.as_array_mut().unwrap().retain(|filter| filter["name"] == "router");
            assert_eq!(filters.as_array().unwrap().len(), 1);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_link_without_allow_post_is_named() {
    trap("redis-link", "connect_config.allow_post: true", Shows::Always, |name, part| {
        if name == "link" {
            let route = "/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/routes/0/route";
            let route = part.pointer_mut(route).unwrap();
            route["upgrade_configs"] = json!([{"upgrade_type": "CONNECT", "connect_config": {}}]);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_proxy_on_an_internal_listener_is_named() {
    let shows = Shows::From([1, 40, 0]);
    trap("redis-link", "redis_proxy is on an internal listener", shows, |name, part| match name {
        "proxy" => deep_merge(part, &json!({"address": null, "internal_listener": {}})),
        "proxy_cluster" => {
            *part.pointer_mut("/load_assignment/endpoints/0/lb_endpoints/0/endpoint/address").unwrap() =
                json!({"envoy_internal_address": {"server_listener_name": "redis_proxy"}});
        }
        _ => {}
    })
    .await;
}

/// Whether it fails is a matter of timing; what it must never do is answer wrongly.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_used_twice_lead_to_no_wrong_answer() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    origin.on(
        "/pay",
        Behaviour::func(|seen, _| async move { Reply::ok(seen.key().unwrap_or_default().to_vec()) }),
    );
    let builder = Envoy::builder().workers(4).plugin(in_redis(json!({}))).origin_addr(origin.addr());
    let envoy = with_changed_link(builder, redis.addr(), |name, part| {
        patient(name, part);
        if name == "proxy_cluster" {
            let options =
                "/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
            deep_merge(part.pointer_mut(options).unwrap(), &json!({"common_http_protocol_options": null}));
        }
    })
    .start()
    .await;
    for round in 0..6 {
        let keys: Vec<_> = (0..40).map(|_| unique_key()).collect();
        let twice = || keys.iter().chain(&keys);
        let answers =
            burst(envoy.addr(), Protocol::BOTH[round % 2], twice().map(|key| pay(key)).collect()).await;
        for (key, answer) in twice().zip(answers) {
            let answer = answer.unwrap();
            match answer.status {
                200 => assert_eq!(answer.text(), *key),
                409 => assert_eq!(kind(&answer), problem(409, "in-flight")),
                _ => assert_eq!(kind(&answer), problem(503, "store-unavailable")),
            }
            assert!(origin.executions_of(key) <= 1);
        }
    }
    settled(&[&envoy]).await;
    if envoy.metric("store_errors").await > 0 {
        assert!(envoy.log_contains("Redis: "), "{}", envoy.log_text());
    }
}

/// TLS to Redis is Envoy's: nothing of it shows in the filter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_behind_tls() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (cert, secret) = (path("cert.pem"), path("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=redis.test"])
        .args(["-addext", "subjectAltName=DNS:redis.test", "-keyout", &secret, "-out", &cert])
        .output()
        .expect("openssl is missing: `apt-get install openssl`");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let redis = Redis::start_with(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &secret,
        "--tls-ca-cert-file",
        &cert,
        "--tls-auth-clients",
        "no",
    ])
    .await;
    let origin = Origin::start().await;
    let start = async || {
        let builder = Envoy::builder().plugin(in_redis(json!({}))).origin_addr(origin.addr());
        with_changed_link(builder, SocketAddr::from(([127, 0, 0, 1], port)), |name, part| {
            patient(name, part);
            if name == "redis_cluster" {
                part["transport_socket"] = json!({"name": "envoy.transport_sockets.tls", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                    "sni": "redis.test",
                    "common_tls_context": {"validation_context": {
                        "trusted_ca": {"filename": cert},
                        "match_typed_subject_alt_names": [
                            {"san_type": "DNS", "matcher": {"exact": "redis.test"}}],
                    }},
                }});
            }
        })
        .start()
        .await
    };
    let (one, two) = tokio::join!(start(), start());
    for proto in Protocol::BOTH {
        let key = unique_key();
        let first = send_once(one.addr(), proto, &pay(&key)).await.unwrap();
        assert_eq!(first.status, 200, "{first:?}\n{}", one.log_text());
        let replay = send_once(two.addr(), proto, &pay(&key)).await.unwrap();
        assert_eq!((replay.status, was_replayed(&replay), &replay.body), (200, true, &first.body));
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert_eq!(records(&redis).await, ":2");
    assert!(one.stat("cluster.redis.ssl.handshake").await > 0);
}
