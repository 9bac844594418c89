//! The truth table of `docs/guarantees.md`: for each situation of the store and each event, what the retry gets and
//! how often the upstream ran. What other files prove already is not here.

use serde_json::{Value, json};

use crate::support::*;

/// A short lease and a long record; below `/takeover` and `/retain` the two ways to treat an abandoned claim, and
/// everything else with a lease of a minute.
fn leases(lock_ttl: &str) -> Value {
    let rule = |name: &str, on_abandoned: &str| {
        json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}],
            "lock_ttl": lock_ttl,
            "on_abandoned": on_abandoned,
        })
    };
    let mut plugin = default_plugin();
    let rules = plugin["rules"].as_array_mut().unwrap();
    rules.insert(0, rule("takeover", "takeover"));
    rules.insert(1, rule("retain", "retain"));
    plugin
}

async fn on(redis: std::net::SocketAddr, origin: &Origin, plugin: &Value, pace: Pace) -> Envoy {
    let plugin = on_redis(plugin.clone(), pace);
    linked(Envoy::builder().plugin(plugin).origin_addr(origin.addr()), redis, pace).start().await
}

/// The first execution of each key waits at the barrier; later ones are answered at once.
fn first_waits(origin: &Origin, path: &str) -> Barrier {
    let barrier = Barrier::new();
    origin.on(path, Behaviour::first_waits(&barrier));
    barrier
}

/// A request whose first execution the upstream has begun, and holds.
struct Running {
    key: String,
    request: Request,
    pending: Pending,
    barrier: Barrier,
}

impl Running {
    async fn start(envoy: &Envoy, origin: &Origin, proto: Protocol, path: &str) -> Running {
        let key = unique_key();
        let path = format!("{path}/{key}");
        let barrier = first_waits(origin, &path);
        let request = Request::post(&path).key(&key).body("amount=1");
        let pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        Running { key, request, pending, barrier }
    }

    /// The upstream answers, and the client hears it.
    async fn finish(self) -> (String, Request, Response) {
        self.barrier.open();
        let answer = self.pending.finish().await.unwrap();
        assert_eq!((answer.status, answer.is_replay()), (200, false), "{answer:?}");
        (self.key, self.request, answer)
    }

    /// The client hangs up.
    fn leave(self) -> (String, Request) {
        self.pending.abort();
        (self.key, self.request)
    }
}

fn refusal(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

fn attempts(origin: &Origin, key: &str) -> Vec<Option<String>> {
    let seen = origin.requests().into_iter().filter(|seen| seen.key() == Some(key.as_bytes()));
    seen.map(|seen| seen.header("x-idempotency-attempt").map(str::to_owned)).collect()
}

async fn assert_failed(envoy: &Envoy, proto: Protocol, request: &Request, reason: &str) {
    let (retry, _) = ask_until_decided(envoy, proto, request).await;
    assert_eq!(retry.kind(), refusal(424, "failed"), "{reason}: {retry:?}");
    assert_eq!(retry.json()["reason"], reason, "{retry:?}");
}

async fn outbox_empty(envoy: &Envoy) {
    poll_until(PATIENCE, "the outbox is empty", async || (envoy.metric("outbox").await == 0).then_some(()))
        .await;
}

/// Requests through `envoy` are protected again, on each of its workers that a few connections reach.
async fn store_is_back(envoy: &Envoy) {
    for _ in 0..8 {
        poll_until(PATIENCE, "the store is back", async || {
            let answer = ask(envoy, Protocol::Http1, &Request::post("/warm").key(unique_key())).await;
            (answer.status == 200).then_some(())
        })
        .await;
    }
}

// ---- each store

/// A07, A17, A18, B01, B02, C21, H01, and the plain rows: whichever Envoy and whichever store is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_store_gives_each_record_its_answer_on_every_envoy() {
    let routes = vec![
        json!({"match": {"prefix": "/impatient"}, "route": {"cluster": "origin", "timeout": "0.4s"}}),
        json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "15s"}}),
    ];
    for store in Store::EACH {
        let world =
            Deployment::start(store, plugin_with(json!({})), |builder| builder.routes(routes.clone())).await;
        let origin = &world.origin;
        origin.on("/busy", Behaviour::Sequence(vec![Reply::status(503), Reply::echo(200)]));
        for proto in Protocol::BOTH {
            let what = format!("{store:?} {proto:?}");
            let (first, other) = (world.first(), world.other());

            // In flight, whoever asks; another request under the key is told so first, and takes nothing with it.
            let running = Running::start(first, origin, proto, "/pay").await;
            let request = running.request.clone();
            for envoy in [other, first] {
                for _ in 0..2 {
                    assert_eq!(ask(envoy, proto, &request).await.kind(), refusal(409, "in-flight"), "{what}");
                    let mismatch = ask(envoy, proto, &request.clone().body("amount=2")).await;
                    assert_eq!(mismatch.kind(), refusal(422, "mismatch"), "{what}");
                }
            }
            let (key, request, answer) = running.finish().await;
            for envoy in [other, first] {
                let mismatch = ask(envoy, proto, &request.clone().body("amount=2")).await;
                assert_eq!(mismatch.kind(), refusal(422, "mismatch"), "{what}");
                let replay = ask(envoy, proto, &request).await;
                assert_eq!((replay.status, replay.is_replay()), (200, true), "{what}: {replay:?}");
                assert_eq!(replay.body, answer.body, "{what}");
            }
            assert_eq!(origin.executions_of(&key), 1, "{what}");

            // A duplicate of what fails later never got a success.
            let key = unique_key();
            let path = format!("/fails/{key}");
            let barrier = Barrier::new();
            origin.on(&path, Behaviour::Barrier(barrier.clone(), Reply::status(500)));
            let request = Request::post(&path).key(&key).body("amount=1");
            let pending = Client::connect(first.addr(), proto).await.start(&request).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            assert_eq!(ask(other, proto, &request).await.kind(), refusal(409, "in-flight"), "{what}");
            barrier.open();
            assert_eq!(pending.finish().await.unwrap().status, 500, "{what}");
            for envoy in [other, first] {
                assert_failed(envoy, proto, &request, "status").await;
            }
            assert_eq!(origin.executions_of(&key), 1, "{what}");

            // The upstream's outcome is unknown: its time was up, or the client left.
            let key = unique_key();
            let path = format!("/impatient/{key}");
            origin.on(&path, Behaviour::BarrierEcho(Barrier::new()));
            let request = Request::post(&path).key(&key).body("amount=1");
            assert_eq!(ask(first, proto, &request).await.status, 504, "{what}");
            assert_failed(other, proto, &request, "timeout").await;
            assert_eq!(origin.executions_of(&key), 1, "{what}");
            let (key, request) = Running::start(first, origin, proto, "/pay").await.leave();
            assert_failed(other, proto, &request, "client_gone").await;
            assert_eq!(origin.executions_of(&key), 1, "{what}");

            // Not processed: it runs.
            let key = unique_key();
            let request = Request::post("/busy").key(&key).body("amount=1");
            assert_eq!(ask(first, proto, &request).await.status, 503, "{what}");
            let (run, _) = ask_until_decided(other, proto, &request).await;
            assert_eq!((run.status, run.is_replay()), (200, false), "{what}");
            assert_eq!(origin.executions_of(&key), 2, "{what}");

            // Keys that could mean something to a store, a path or a pattern are different keys, and nothing else.
            let salt = unique_key();
            let keys = [
                "ord.1",
                "ord.2",
                "ord",
                "ord*",
                "o/r?d#1",
                "50%25+1",
                "a:b:c",
                "{tag}",
                "idem:0",
                "\"\\\"q\\\"\"",
            ]
            .map(|key| if key.starts_with('"') { key.to_owned() } else { format!("{salt}{key}") });
            let mut bodies = std::collections::BTreeSet::new();
            for key in &keys {
                let request = Request::post("/keys").account(&salt).key(key).body("amount=1");
                let first_answer = ask(first, proto, &request).await;
                assert_eq!((first_answer.status, first_answer.is_replay()), (200, false), "{what} {key}");
                assert!(bodies.insert(first_answer.body), "{what} {key}");
            }
            for key in &keys {
                let request = Request::post("/keys").account(&salt).key(key).body("amount=1");
                let replay = ask(other, proto, &request).await;
                assert!(replay.is_replay() && bodies.remove(&replay.body), "{what} {key}: {replay:?}");
            }
            assert_eq!(
                origin.executions(|seen| seen.header("x-account-id") == Some(&salt)),
                keys.len(),
                "{what}"
            );
        }
        world.settled().await;
    }
}

/// A18, J01: whoever waits for an execution that fails is told so; however many wait, none of them runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_duplicates_wait_for_one_execution_and_share_its_end() {
    const WAITERS: usize = 200;
    for store in Store::EACH {
        let rule = plugin_with(json!({"in_flight": "wait", "wait_timeout": "60s", "lock_ttl": "60s"}));
        let world = Deployment::start(store, rule, |builder| builder).await;
        for (round, status) in (1..).zip([500, 200]) {
            let what = format!("{store:?} {status}");
            let key = unique_key();
            let path = format!("/held/{status}");
            let barrier = Barrier::new();
            world
                .origin
                .on(&path, Behaviour::Barrier(barrier.clone(), Reply::status(status).chunk("the end")));
            let request = Request::post(&path).key(&key).body("amount=1");
            let first = Client::connect(world.first().addr(), Protocol::Http1).await;
            let first = first.start(&request).await.unwrap();
            barrier.wait_arrived(1, PATIENCE).await;
            let mut waiting = Vec::new();
            let mut connections = Vec::new();
            for envoy in [world.first(), world.other()] {
                for _ in 0..2 {
                    let connection = H2::connect(envoy.addr()).await.unwrap();
                    for _ in 0..WAITERS / 4 {
                        let (connection, request) = (connection.clone(), request.clone());
                        waiting.push(tokio::spawn(async move { connection.send(&request).await }));
                    }
                    connections.push(connection);
                }
            }
            world.wait_metric("waited", round * WAITERS as u64).await;
            assert_eq!(world.origin.executions_of(&key), 1, "{what}");
            barrier.open();
            assert_eq!(first.finish().await.unwrap().status, status, "{what}");
            for answer in waiting {
                let answer = answer.await.unwrap().unwrap();
                if status == 200 {
                    assert_eq!((answer.status, answer.is_replay()), (200, true), "{what}: {answer:?}");
                    assert_eq!(answer.text(), "the end", "{what}");
                } else {
                    assert_eq!(answer.kind(), refusal(424, "failed"), "{what}: {answer:?}");
                }
            }
            assert_eq!(world.origin.executions_of(&key), 1, "{what}");
        }
        world.settled().await;
    }
}

/// I04, F17: within `record_ttl` a replay, whoever has read the record before; after it the key is a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_replayed_until_its_ttl_and_runs_again_after_it() {
    all_at_once(Store::EACH.map(|store| async move {
        let mut plugin = plugin_with(json!({"lock_ttl": "1600ms", "record_ttl": "3200ms"}));
        let (redis, origin) = (Redis::start().await, Origin::start().await);
        let builder = Envoy::builder().origin_addr(origin.addr());
        let envoy = if store == Store::SharedData {
            builder.plugin(plugin.clone()).start().await
        } else {
            plugin = on_redis(plugin, Pace::BRISK);
            // What is near may not outlive what is in Redis.
            plugin["store"]["redis"]["near_cache"] = json!({"ttl": "1h"});
            linked(builder.plugin(plugin.clone()), redis.addr(), Pace::BRISK).start().await
        };
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let begun = std::time::Instant::now();
        let first = ask(&envoy, Protocol::Http1, &request).await;
        let completed = std::time::Instant::now();
        let mut replays = 0;
        let second = poll_until(PATIENCE, "the end of the record", async || {
            let asked = begun.elapsed();
            let answer = ask(&envoy, Protocol::Http2, &request).await;
            assert_eq!(answer.status, 200, "{store:?}: {answer:?}");
            if answer.is_replay() {
                assert_eq!(answer.body, first.body, "{store:?}");
                assert!(asked.as_millis() < 4500, "{store:?}: still replayed after {asked:?}");
                replays += 1;
                return None;
            }
            Some(answer)
        })
        .await;
        assert!(completed.elapsed().as_millis() >= 3150, "{store:?}: after {:?}", completed.elapsed());
        assert!(replays > 10 && second.execution() != first.execution(), "{store:?}: {replays} replays");
        assert_eq!(attempts(&origin, &key), [None, None], "{store:?}");
        let replay = ask(&envoy, Protocol::Http1, &request).await;
        assert_eq!((replay.is_replay(), replay.body), (true, second.body), "{store:?}");
        assert_eq!(origin.executions_of(&key), 2, "{store:?}");
    }))
    .await;
}

/// Embedded stores know nothing of each other: what two Envoys have to agree on needs Redis.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_envoys_with_embedded_stores_run_a_key_once_each() {
    let origin = Origin::start().await;
    let start = || Envoy::builder().origin_addr(origin.addr()).start();
    let (one, two) = tokio::join!(start(), start());
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let answers = [ask(&one, proto, &request).await, ask(&two, proto, &request).await];
        assert_ne!(answers[0].execution(), answers[1].execution());
        for (envoy, first) in [(&one, &answers[0]), (&two, &answers[1])] {
            let replay = ask(envoy, proto, &request).await;
            assert_eq!((replay.is_replay(), &replay.body), (true, &first.body));
        }
        assert_eq!(origin.executions_of(&key), 2);
    }
}

// ---- crashes, and owners that fall silent

/// A10, A14: the claim is in Redis, its reply never came, and its Envoy is dead: nothing ran.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_envoy_died_before_it_forwarded_heals_after_its_lease() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let relay = Relay::to(redis.addr()).await;
    let plugin = leases("4800ms");
    let (mut doomed, envoy) = tokio::join!(
        on(relay.addr(), &origin, &plugin, Pace::STEADY),
        on(redis.addr(), &origin, &plugin, Pace::STEADY)
    );
    // From here on Redis knows the scripts: a claim is one command.
    store_is_back(&doomed).await;
    redis.command("FLUSHDB").await;
    let mut clients = Vec::new();
    for proto in Protocol::BOTH {
        clients.push(Client::connect(doomed.addr(), proto).await);
    }
    relay.mute(redis.addr());
    let mut claimed = Vec::new();
    for (client, rule) in clients.into_iter().zip(["takeover", "retain"]) {
        let key = unique_key();
        let request = Request::post(&format!("/{rule}/{key}")).key(&key).body("amount=1");
        let pending = client.start(&request).await.unwrap();
        claimed.push((rule, key, request, pending));
    }
    poll_until(PATIENCE, "two claims", async || {
        redis.command("DBSIZE").await.starts_with(":2").then_some(())
    })
    .await;
    doomed.kill9();
    let mut seen_alive = 0;
    for (rule, key, request, pending) in claimed {
        pending.finish().await.unwrap_err();
        assert_eq!(origin.executions_of(&key), 0, "{rule}");
        let (healed, refused) = ask_until_decided(&envoy, Protocol::Http1, &request).await;
        seen_alive += refused;
        if rule == "takeover" {
            assert_eq!((healed.status, healed.is_replay()), (200, false), "{healed:?}");
            assert_eq!(attempts(&origin, &key), [Some("2".to_owned())]);
            let replay = ask(&envoy, Protocol::Http2, &request).await;
            assert_eq!((replay.is_replay(), replay.body), (true, healed.body));
        } else {
            assert_eq!(healed.kind(), refusal(424, "abandoned"), "{healed:?}");
            assert_eq!(origin.executions_of(&key), 0);
        }
    }
    assert!(seen_alive > 0, "the leases were never seen alive");
}

/// How an Envoy that executes falls silent for longer than its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Silence {
    /// The process sleeps, as in a suspended machine.
    Asleep,
    /// It works on, and can't reach Redis.
    CutOff,
}

async fn a_silent_owner(silence: Silence) {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let relay = Relay::to(redis.addr()).await;
    let plugin = leases("1600ms");
    let (silent, envoy) = tokio::join!(
        on(relay.addr(), &origin, &plugin, Pace::BRISK),
        on(redis.addr(), &origin, &plugin, Pace::BRISK)
    );
    let mut running = Vec::new();
    for proto in Protocol::BOTH {
        for rule in ["/takeover", "/retain"] {
            running.push((proto, rule, Running::start(&silent, &origin, proto, rule).await));
        }
    }
    match silence {
        Silence::Asleep => silent.pause(),
        Silence::CutOff => {
            relay.cut();
            let refused = poll_until(PATIENCE, "a duplicate at the Envoy that is cut off", async || {
                Some(ask(&silent, Protocol::Http1, &running[0].2.request).await)
            })
            .await;
            assert_eq!(refused.kind(), refusal(503, "store-unavailable"), "{refused:?}");
        }
    }
    let mut seen_alive = 0;
    let mut decided = Vec::new();
    for (proto, rule, owner) in running {
        let what = format!("{silence:?} {proto:?} {rule}");
        let (answer, refused) = ask_until_decided(&envoy, proto, &owner.request).await;
        seen_alive += refused;
        if rule == "/takeover" {
            assert_eq!((answer.status, answer.is_replay()), (200, false), "{what}: {answer:?}");
            assert_eq!(attempts(&origin, &owner.key), [None, Some("2".to_owned())], "{what}");
        } else {
            assert_eq!(answer.kind(), refusal(424, "abandoned"), "{what}: {answer:?}");
            assert_eq!(origin.executions_of(&owner.key), 1, "{what}");
        }
        decided.push((what, proto, rule, owner, answer));
    }
    assert!(seen_alive > 0, "{silence:?}: the leases were never seen alive");
    if silence == Silence::Asleep {
        silent.resume();
    }
    // Who executed first still hears its own answer.
    let mut ended = Vec::new();
    for (what, proto, rule, owner, answer) in decided {
        let (key, request, first) = owner.finish().await;
        ended.push((what, proto, rule, key, request, first, answer));
    }
    if silence == Silence::CutOff {
        silent.wait_metric("outbox_queued", 1, PATIENCE).await;
        relay.lead_to(redis.addr());
    }
    silent.wait_metric("stale_writes", 2, PATIENCE).await;
    outbox_empty(&silent).await;
    for (what, proto, rule, key, request, first, answer) in ended {
        let (kept, runs) = if rule == "/takeover" { (answer, 2) } else { (first.clone(), 1) };
        for envoy in [&envoy, &silent] {
            let (replay, _) = ask_until_decided(envoy, proto, &request).await;
            assert_eq!((replay.status, replay.is_replay()), (200, true), "{what}: {replay:?}");
            assert_eq!(replay.body, kept.body, "{what}");
        }
        assert_eq!(first.execution() != kept.execution(), rule == "/takeover", "{what}");
        assert_eq!(origin.executions_of(&key), runs, "{what}");
    }
    assert_eq!(envoy.metric("takeovers").await, 2);
}

/// A04: the late completion of an owner that lost its lease is fenced off; every later retry gets one and the same
/// answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_that_slept_past_its_lease_overwrites_nothing() {
    a_silent_owner(Silence::Asleep).await;
}

/// The same where the owner could not renew, since Redis was out of its reach.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_owner_cut_off_from_redis_past_its_lease_overwrites_nothing() {
    a_silent_owner(Silence::CutOff).await;
}

// ---- Redis lost for a while, and back with what it had acknowledged

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_redis_missed_while_it_was_lost_is_told_it_afterwards() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let plugin = leases("1600ms");
    let start = || on(redis.addr(), &origin, &plugin, Pace::BRISK);
    let (envoy, mut doomed) = tokio::join!(start(), start());
    let running = Running::start(&envoy, &origin, Protocol::Http1, "/pay").await;
    let leaving = Running::start(&envoy, &origin, Protocol::Http2, "/pay").await;
    let orphans = [
        Running::start(&doomed, &origin, Protocol::Http1, "/takeover").await,
        Running::start(&doomed, &origin, Protocol::Http2, "/retain").await,
    ];
    redis.pause();
    for proto in Protocol::BOTH {
        let duplicate = ask(&envoy, proto, &running.request).await;
        assert_eq!(duplicate.kind(), refusal(503, "store-unavailable"), "{duplicate:?}");
    }
    let (gone_key, gone) = leaving.leave();
    envoy.wait_metric("outbox_queued", 1, PATIENCE).await;
    doomed.kill9();
    assert_eq!(origin.requests().len(), 4);
    redis.resume();
    assert_failed(&envoy, Protocol::Http2, &gone, "client_gone").await;
    assert_eq!(origin.executions_of(&gone_key), 1);
    assert_eq!(ask(&envoy, Protocol::Http2, &running.request).await.kind(), refusal(409, "in-flight"));
    let (key, request, first) = running.finish().await;
    let (replay, _) = ask_until_decided(&envoy, Protocol::Http2, &request).await;
    assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
    let [takeover, retain] = orphans;
    let (healed, _) = ask_until_decided(&envoy, Protocol::Http1, &takeover.request).await;
    assert_eq!((healed.status, healed.is_replay()), (200, false), "{healed:?}");
    assert_eq!(attempts(&origin, &takeover.key), [None, Some("2".to_owned())]);
    let (kept, _) = ask_until_decided(&envoy, Protocol::Http1, &retain.request).await;
    assert_eq!((kept.kind(), origin.executions_of(&retain.key)), (refusal(424, "abandoned"), 1));
}

/// B14: a full Redis takes no completion; what it holds still says "in flight", to every Envoy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_whose_completion_was_not_taken_is_in_flight_everywhere_until_it_is() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let plugin = default_plugin();
    let start = || on(redis.addr(), &origin, &plugin, Pace::BRISK);
    let (one, two) = tokio::join!(start(), start());
    redis.command("CONFIG SET maxmemory-policy noeviction").await;
    for (round, proto) in (1..).zip(Protocol::BOTH) {
        let running = Running::start(&one, &origin, proto, "/pay").await;
        redis.command("CONFIG SET maxmemory 1").await;
        let (key, request, first) = running.finish().await;
        one.wait_metric("outbox_queued", round, PATIENCE).await;
        for envoy in [&one, &two] {
            for proto in Protocol::BOTH {
                assert_eq!(ask(envoy, proto, &request).await.kind(), refusal(409, "in-flight"));
            }
        }
        redis.command("CONFIG SET maxmemory 0").await;
        outbox_empty(&one).await;
        for envoy in [&two, &one] {
            let replay = ask(envoy, proto, &request).await;
            assert_eq!((replay.is_replay(), &replay.body), (true, &first.body), "{replay:?}");
        }
        assert_eq!(origin.executions_of(&key), 1);
    }
}

// ---- Envoy restarts

/// A14, H14: everything that Redis holds is there after a restart, under the names and for the time that it should be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_envoy_loses_nothing_that_redis_holds() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    let mut envoy = on(redis.addr(), &origin, &leases("1600ms"), Pace::BRISK).await;
    redis.command("CONFIG SET maxmemory-policy noeviction").await;
    let pay = |path: &str| {
        let key = unique_key();
        (Request::post(path).key(&key).body("amount=1"), key)
    };
    let (done, done_key) = pay("/pay");
    let first = ask(&envoy, Protocol::Http1, &done).await;
    let (fails, fails_key) = pay("/fails");
    assert_eq!(ask(&envoy, Protocol::Http2, &fails).await.status, 500);
    let (gone_key, gone) = Running::start(&envoy, &origin, Protocol::Http1, "/pay").await.leave();
    assert_failed(&envoy, Protocol::Http1, &gone, "client_gone").await;

    let names = redis.command("KEYS *").await;
    let names: Vec<&str> = names.lines().filter(|line| line.starts_with("idem:")).collect();
    assert_eq!((names.len(), redis.command("DBSIZE").await.lines().next()), (3, Some(":3")));
    for name in names {
        let hash = name.trim().strip_prefix("idem:").unwrap();
        assert!(hash.len() == 64 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()), "{name}");
        let life: u64 =
            redis.command(&format!("PTTL {name}")).await.lines().next().unwrap()[1..].parse().unwrap();
        assert!((86_340_000..=86_400_000).contains(&life), "{name}: {life} ms");
    }

    let mut running = Vec::new();
    for rule in ["/takeover", "/retain"] {
        running.push((rule, Running::start(&envoy, &origin, Protocol::Http1, rule).await));
    }
    // Two more are answered, and their completions die with the process that was to write them.
    let mut unwritten = Vec::new();
    for rule in ["/takeover", "/retain"] {
        unwritten.push((rule, Running::start(&envoy, &origin, Protocol::Http2, rule).await));
    }
    redis.command("CONFIG SET maxmemory 1").await;
    let mut orphans = Vec::new();
    for (rule, owner) in unwritten {
        let (key, request, _) = owner.finish().await;
        orphans.push((rule, key, request));
    }
    envoy.wait_metric("outbox_queued", 2, PATIENCE).await;
    envoy.kill9();
    redis.command("CONFIG SET maxmemory 0").await;
    envoy.restart().await;

    let replay = ask(&envoy, Protocol::Http2, &done).await;
    assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&done_key)), (true, first.body, 1));
    assert_failed(&envoy, Protocol::Http1, &fails, "status").await;
    assert_failed(&envoy, Protocol::Http2, &gone, "client_gone").await;
    assert_eq!((origin.executions_of(&fails_key), origin.executions_of(&gone_key)), (1, 1));
    orphans.extend(running.into_iter().map(|(rule, owner)| (rule, owner.key, owner.request)));
    for (rule, key, request) in orphans {
        let (answer, _) = ask_until_decided(&envoy, Protocol::Http1, &request).await;
        if rule == "/takeover" {
            assert_eq!((answer.status, answer.is_replay()), (200, false), "{answer:?}");
            assert_eq!(attempts(&origin, &key), [None, Some("2".to_owned())]);
        } else {
            assert_eq!(answer.kind(), refusal(424, "abandoned"), "{answer:?}");
            assert_eq!(origin.executions_of(&key), 1);
        }
    }
}

/// The embedded store ends with its process: whatever was known of a key, it is a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_envoy_forgets_claims_and_failures_of_the_embedded_store_too() {
    let origin = Origin::start().await;
    let mut envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    let running = Running::start(&envoy, &origin, Protocol::Http1, "/pay").await;
    let (gone_key, gone) = Running::start(&envoy, &origin, Protocol::Http2, "/pay").await.leave();
    assert_failed(&envoy, Protocol::Http1, &gone, "client_gone").await;
    assert_eq!(ask(&envoy, Protocol::Http2, &running.request).await.kind(), refusal(409, "in-flight"));
    envoy.restart().await;
    for (key, request) in [(&running.key, &running.request), (&gone_key, &gone)] {
        let again = ask(&envoy, Protocol::Http1, request).await;
        assert_eq!((again.status, again.is_replay()), (200, false), "{again:?}");
        assert_eq!(attempts(&origin, key), [None, None]);
        assert!(ask(&envoy, Protocol::Http2, request).await.is_replay());
    }
}

// ---- listener updates

/// An execution outlives an update of its listener and keeps its lease; what had failed stays failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_update_keeps_failures_and_renews_leases() {
    all_at_once(Store::EACH.map(|store| async move {
        let (redis, origin) = (Redis::start().await, Origin::start().await);
        let mut plugin = leases("1600ms");
        let mut builder = Envoy::builder().drain_time_s(30).origin_addr(origin.addr());
        if store == Store::Redis {
            plugin = on_redis(plugin, Pace::BRISK);
            builder = linked(builder, redis.addr(), Pace::BRISK);
        }
        let mut envoy = builder.plugin(plugin.clone()).start().await;
        let (gone_key, gone) = Running::start(&envoy, &origin, Protocol::Http1, "/pay").await.leave();
        assert_failed(&envoy, Protocol::Http1, &gone, "client_gone").await;
        let mut running = Vec::new();
        for proto in Protocol::BOTH {
            for rule in ["/takeover", "/retain"] {
                running.push(Running::start(&envoy, &origin, proto, rule).await);
            }
        }
        plugin["rules"][2]["replay_header"] = json!("x-new");
        envoy.reload_listener(plugin).await.unwrap();
        let updated = std::time::Instant::now();
        let mut refused = 0;
        poll_until(PATIENCE, "a lease and a half", async || {
            for owner in &running {
                let duplicate = ask(&envoy, Protocol::Http1, &owner.request).await;
                assert_eq!(duplicate.kind(), refusal(409, "in-flight"), "{store:?}: {duplicate:?}");
                refused += 1;
            }
            (updated.elapsed().as_millis() > 2500).then_some(())
        })
        .await;
        assert!(refused > 8, "{store:?}: {refused}");
        for owner in running {
            let (key, request, first) = owner.finish().await;
            let (replay, _) = ask_until_decided(&envoy, Protocol::Http2, &request).await;
            assert_eq!((replay.is_replay(), replay.body), (true, first.body), "{store:?}");
            assert_eq!(origin.executions_of(&key), 1, "{store:?}");
        }
        assert_failed(&envoy, Protocol::Http2, &gone, "client_gone").await;
        assert_eq!(origin.executions_of(&gone_key), 1, "{store:?}");
        assert_eq!(envoy.metric("takeovers").await, 0, "{store:?}");
    }))
    .await;
}

/// A worker trapped, and then the configuration changed: the claim's lease decides, in the table that is still there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listener_update_after_a_trap_leaves_the_claim_to_its_lease() {
    let origin = Origin::start().await;
    let plugin = leases("2500ms");
    let builder = Envoy::builder().workers(1).wasm(Wasm::TestHooks).plugin(plugin.clone());
    let mut envoy = builder.origin_addr(origin.addr()).start().await;
    // Each was executed, or only claimed, when the VM died.
    let (mut claims, mut owners) = (Vec::new(), Vec::new());
    for rule in ["/takeover", "/retain"] {
        let owner = Running::start(&envoy, &origin, Protocol::Http1, rule).await;
        claims.push((rule, owner.key.clone(), owner.request.clone(), 1));
        owners.push(owner);
    }
    let key = unique_key();
    let unsent = Request::post(&format!("/takeover/{key}")).key(&key);
    let killed =
        send_once(envoy.addr(), Protocol::Http1, &unsent.clone().header("x-test-fault", "trap")).await;
    assert!(killed.as_ref().map_or(true, |answer| answer.status == 503), "{killed:?}");
    assert!(envoy.log_contains("test fault: trap"), "{}", envoy.log_text());
    claims.push(("/takeover", key, unsent, 0));
    drop(owners);
    let mut changed = plugin;
    changed["rules"][2]["replay_header"] = json!("x-new");
    envoy.reload_listener(changed).await.unwrap();
    let mut seen_alive = 0;
    for (rule, key, request, ran) in claims {
        // Envoy itself answers 503 while it loads the VM anew.
        let (answer, refused) = poll_until(PATIENCE, "a living VM", async || {
            let (answer, refused) = ask_until_decided(&envoy, Protocol::Http2, &request).await;
            (answer.status != 503).then_some((answer, refused))
        })
        .await;
        seen_alive += refused;
        if rule == "/takeover" {
            assert_eq!((answer.status, answer.is_replay()), (200, false), "{answer:?}");
            assert_eq!(origin.executions_of(&key), ran + 1);
            assert_eq!(attempts(&origin, &key).last(), Some(&Some("2".to_owned())));
        } else {
            assert_eq!(answer.kind(), refusal(424, "abandoned"), "{answer:?}");
            assert_eq!(origin.executions_of(&key), ran);
        }
    }
    assert!(seen_alive > 0, "the leases were never seen alive");
}

/// What the store had not taken when its root went is written by the root that comes after it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_still_to_be_written_outlives_a_listener_update() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let mut envoy = on(redis.addr(), &origin, &default_plugin(), Pace::BRISK).await;
    redis.command("CONFIG SET maxmemory-policy noeviction").await;
    let done = Running::start(&envoy, &origin, Protocol::Http1, "/pay").await;
    let leaving = Running::start(&envoy, &origin, Protocol::Http2, "/pay").await;
    redis.command("CONFIG SET maxmemory 1").await;
    let (key, request, first) = done.finish().await;
    let (gone_key, gone) = leaving.leave();
    envoy.wait_metric("outbox_queued", 2, PATIENCE).await;
    let mut plugin = on_redis(plugin_with(json!({"replay_header": "x-new"})), Pace::BRISK);
    plugin["store"]["redis"]["near_cache"] = json!(false);
    envoy.reload_listener(plugin).await.unwrap();
    envoy.wait_metric("outbox_spilled", 2, PATIENCE).await;
    for request in [&request, &gone] {
        assert_eq!(ask(&envoy, Protocol::Http1, request).await.kind(), refusal(409, "in-flight"));
    }
    redis.command("CONFIG SET maxmemory 0").await;
    let (replay, _) = ask_until_decided(&envoy, Protocol::Http1, &request).await;
    assert_eq!((replay.header("x-new"), &replay.body), (Some("true"), &first.body));
    assert_failed(&envoy, Protocol::Http2, &gone, "client_gone").await;
    assert_eq!((origin.executions_of(&key), origin.executions_of(&gone_key)), (1, 1));
    assert_eq!(envoy.metric("outbox_dropped").await, 0);
}
