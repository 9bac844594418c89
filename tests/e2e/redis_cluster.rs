//! The store in a Redis Cluster: what a batch over several shards, a move of slots, a failover and a dead shard do to
//! keys, to answers and to time.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use idempotency::config::{KeyPolicy, load};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::{StoreKey, parse_key};
use idempotency::scope::{ScopeValues, resolve_scope};
use serde_json::json;

use crate::support::redis_cluster::{SHARDS, SLOTS, slot_of};
use crate::support::*;

async fn envoy(cluster: &RedisCluster, origin: &Origin, pace: Pace, workers: usize) -> Envoy {
    let plugin = on_redis(plugin_with(rule(pace)), pace);
    let builder = Envoy::builder().workers(workers).plugin(plugin).origin_addr(origin.addr());
    let envoy = linked_to_cluster(builder, &cluster.addrs(), pace).start().await;
    poll_until(PATIENCE, "Envoy knows the cluster", async || {
        let nodes = envoy.stat("cluster.redis.membership_total").await;
        (nodes == cluster.nodes.len() as u64).then_some(())
    })
    .await;
    envoy
}

fn rule(pace: Pace) -> serde_json::Value {
    let lock_ttl = if pace == Pace::PATIENT { "60s" } else { "5s" };
    json!({"scope": [{"constant": "test"}], "lock_ttl": lock_ttl})
}

fn pay(key: &str) -> Request {
    Request::post("/pay").key(key).body("amount=1")
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

/// Tells in which slot the record of a client's key is.
struct Slots {
    scope: ScopeValues,
    policy: KeyPolicy,
}

impl Slots {
    fn new() -> Slots {
        let config =
            load(on_redis(plugin_with(rule(Pace::CLUSTER)), Pace::CLUSTER).to_string().as_bytes()).unwrap();
        let headers = HeaderBlock::from_pairs([(":method", "POST")]);
        let head = RequestHead { headers: &headers, attributes: &NoAttributes };
        let rule = &config.rules[0];
        Slots { scope: resolve_scope(rule, &head).unwrap(), policy: rule.key.clone() }
    }

    fn of(&self, key: &str) -> usize {
        let key = parse_key([key.as_bytes()], &self.policy).unwrap().unwrap();
        let store_key = StoreKey::derive("", &self.scope, &key);
        slot_of(format!("idem:{}", store_key.hex()).as_bytes())
    }

    /// The shard that has it while nothing was moved.
    fn shard_of(&self, key: &str) -> usize {
        let slot = self.of(key);
        (0..SHARDS).find(|shard| slot < (shard + 1) * SLOTS / SHARDS).unwrap()
    }

    /// A new key in one of these slots.
    fn key_in(&self, slots: &Range<usize>) -> String {
        std::iter::repeat_with(unique_key).find(|key| slots.contains(&self.of(key))).unwrap()
    }
}

/// One answer to one request.
#[derive(Clone, Debug)]
struct Shot {
    key: String,
    at: Instant,
    took: Duration,
    status: u16,
    kind: Option<String>,
    is_replay: bool,
}

async fn shoot(client: &mut Client, key: &str) -> Shot {
    let at = Instant::now();
    let answer = client.send(&pay(key)).await.expect("an answer");
    let (status, kind) = answer.kind();
    Shot { key: key.to_owned(), at, took: at.elapsed(), status, kind, is_replay: answer.is_replay() }
}

/// Clients that pay with new keys until they are stopped: each key until it is replayed, or `tries` times.
struct Load {
    stop: Arc<AtomicBool>,
    shots: Arc<Mutex<Vec<Shot>>>,
    clients: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(
        envoys: &[&Envoy],
        clients: usize,
        tries: usize,
        keys: impl Fn() -> String + Send + Sync + 'static,
    ) -> Load {
        let (stop, shots, keys) = (Arc::default(), Arc::default(), Arc::new(keys));
        let mut load = Load { stop, shots, clients: Vec::new() };
        for number in 0..clients {
            let (stop, shots, keys) = (Arc::clone(&load.stop), Arc::clone(&load.shots), Arc::clone(&keys));
            let (addr, protocol) =
                (envoys[number % envoys.len()].addr(), Protocol::BOTH[number / envoys.len() % 2]);
            load.clients.push(tokio::spawn(async move {
                let mut client = Client::connect(addr, protocol).await;
                while !stop.load(Ordering::Relaxed) {
                    let key = keys();
                    for _ in 0..tries {
                        let shot = shoot(&mut client, &key).await;
                        let (is_over, was_refused) = (shot.is_replay, shot.status != 200);
                        shots.lock().unwrap().push(shot);
                        if is_over || stop.load(Ordering::Relaxed) {
                            break;
                        }
                        if was_refused {
                            // A client's pause between two tries.
                            tokio::time::sleep(Duration::from_millis(20)).await;
                        }
                    }
                }
            }));
        }
        load
    }

    fn count(&self, which: impl Fn(&Shot) -> bool) -> usize {
        self.shots.lock().unwrap().iter().filter(|shot| which(shot)).count()
    }

    async fn wait(&self, count: usize, what: &str, which: impl Fn(&Shot) -> bool) {
        poll_until(PATIENCE, what, async || (self.count(&which) >= count).then_some(())).await;
    }

    async fn end(self) -> Vec<Shot> {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            client.await.expect("a client");
        }
        Arc::into_inner(self.shots).unwrap().into_inner().unwrap()
    }
}

/// Every key answers in the end, and always the same; how often the upstream ran for each.
async fn audit(envoy: &Envoy, origin: &Origin, keys: BTreeSet<String>) -> BTreeMap<String, usize> {
    let all: Vec<String> = keys.into_iter().collect();
    let probes: Vec<_> = all
        .chunks(all.len().div_ceil(16).max(1))
        .map(|part| {
            let (part, addr) = (part.to_vec(), envoy.addr());
            tokio::spawn(async move {
                let mut client = Client::connect(addr, Protocol::Http2).await;
                for key in part {
                    let end = Instant::now() + PATIENCE;
                    while !shoot(&mut client, &key).await.is_replay {
                        assert!(Instant::now() < end, "{key} is not replayed");
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            })
        })
        .collect();
    for probe in probes {
        probe.await.expect("a probe");
    }
    let mut runs: BTreeMap<String, usize> = all.into_iter().map(|key| (key, 0)).collect();
    for seen in origin.requests().iter().filter(|seen| seen.complete) {
        let key = String::from_utf8(seen.key().unwrap_or_default().to_vec()).unwrap();
        if let Some(runs) = runs.get_mut(&key) {
            *runs += 1;
        }
    }
    runs
}

fn keys_of(shots: &[Shot]) -> BTreeSet<String> {
    shots.iter().map(|shot| shot.key.clone()).collect()
}

/// Answers by kind, and the times within which half, 99 % and all of them came.
fn summary<'a>(shots: impl Iterator<Item = &'a Shot>) -> (BTreeMap<String, usize>, [Duration; 3]) {
    let (mut kinds, mut times) = (BTreeMap::new(), Vec::new());
    for shot in shots {
        let success = if shot.is_replay { "replay" } else { "first" };
        let kind = shot.kind.as_deref().unwrap_or(success);
        *kinds.entry(format!("{} {kind}", shot.status)).or_default() += 1;
        times.push(shot.took);
    }
    times.sort();
    let share = |of: usize| times.get(times.len() * of / 100).or(times.last()).copied().unwrap_or_default();
    (kinds, [share(50), share(99), share(100)])
}

async fn redirects(envoy: &Envoy) -> u64 {
    envoy.stat("cluster.redis.upstream_internal_redirect_succeeded_total").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_is_spread_over_the_shards_and_each_key_runs_once() {
    let (cluster, origin) = (RedisCluster::start(&[]).await, Origin::start().await);
    let (one, two) =
        tokio::join!(envoy(&cluster, &origin, Pace::PATIENT, 2), envoy(&cluster, &origin, Pace::PATIENT, 2));
    // The same keys through both at the same time.
    let lanes: Vec<Vec<String>> = (0..16).map(|_| (0..20).map(|_| unique_key()).collect()).collect();
    let mut racers = Vec::new();
    for (nth, lane) in lanes.iter().enumerate() {
        for envoy in [&one, &two] {
            let (lane, addr) = (lane.clone(), envoy.addr());
            racers.push(tokio::spawn(async move {
                let mut client = Client::connect(addr, Protocol::BOTH[nth % 2]).await;
                for key in lane {
                    let shot = shoot(&mut client, &key).await;
                    assert!(shot.status == 200 || shot.kind.as_deref() == Some("in-flight"), "{shot:?}");
                }
            }));
        }
    }
    for racer in racers {
        racer.await.unwrap();
    }
    let runs = audit(&two, &origin, lanes.into_iter().flatten().collect()).await;
    assert_eq!(runs.len(), 320);
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    for envoy in [&one, &two] {
        assert_eq!((redirects(envoy).await, envoy.metric("store_errors").await), (0, 0));
        let (batches, operations) = (
            envoy.stat("cluster.redis-link.upstream_rq_total").await,
            envoy.stat("redis.redis.command.evalsha.total").await,
        );
        assert!(operations > batches, "{operations} operations in {batches} callouts");
    }
    let keys = cluster.keys().await;
    assert!(keys[..SHARDS].iter().all(|keys| *keys > 60), "{keys:?}");
    assert_eq!(keys[..SHARDS].iter().sum::<usize>(), 320);
}

/// Nodes name themselves by a host name, so a redirect has to be resolved.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slots_that_move_under_load_lose_no_key_and_no_answer() {
    const MOVED: Range<usize> = 1_000..1_060;
    let by_name =
        ["--cluster-announce-hostname", "localhost", "--cluster-preferred-endpoint-type", "hostname"];
    let (cluster, origin) = (RedisCluster::start(&by_name).await, Origin::start().await);
    let (one, two) =
        tokio::join!(envoy(&cluster, &origin, Pace::PATIENT, 2), envoy(&cluster, &origin, Pace::PATIENT, 2));
    let slots = Slots::new();
    let some_move = move || slots.key_in(&if RandomBit::next() { MOVED } else { 0..SLOTS });
    let load = Load::start(&[&one, &two], 16, usize::MAX, some_move);
    load.wait(200, "load", |shot| shot.is_replay).await;
    for slot in MOVED {
        cluster.begin_move(slot, 0, 1).await;
    }
    let before = redirects(&one).await;
    load.wait(load.count(|shot| shot.is_replay) + 200, "load while slots move", |shot| shot.is_replay).await;
    for slot in MOVED {
        cluster.end_move(slot, 0, 1).await;
    }
    let end = load.count(|shot| shot.is_replay);
    load.wait(end + 200, "load after it", |shot| shot.is_replay).await;
    let shots = load.end().await;
    let redirected = redirects(&one).await + redirects(&two).await;
    println!("moved 60 slots: {:?}, {redirected} redirects", summary(shots.iter()));
    assert!(cluster.nodes[1].command("INFO commandstats").await.contains("cmdstat_asking"));
    assert!(cluster.nodes[0].command("INFO errorstats").await.contains("errorstat_ASK"));
    assert!(redirects(&one).await > before);
    for envoy in [&one, &two] {
        assert_eq!(envoy.stat("cluster.redis.upstream_internal_redirect_failed_total").await, 0);
        assert_eq!(envoy.metric("store_errors").await, 0, "{}", envoy.log_text());
    }
    assert!(shots.iter().all(|shot| shot.status == 200), "{:?}", summary(shots.iter()));
    let runs = audit(&one, &origin, keys_of(&shots)).await;
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    // Envoy asks for the slots anew: what was moved is asked for where it is.
    let (slots, mut client) = (Slots::new(), Client::connect(one.addr(), Protocol::Http1).await);
    poll_until(PATIENCE, "no redirect any more", async || {
        let before = redirects(&one).await;
        for _ in 0..8 {
            assert_eq!(shoot(&mut client, &slots.key_in(&MOVED)).await.status, 200);
        }
        (redirects(&one).await == before).then_some(())
    })
    .await;
}

/// Every other call is true.
struct RandomBit;

impl RandomBit {
    fn next() -> bool {
        static TURN: AtomicBool = AtomicBool::new(false);
        TURN.fetch_not(Ordering::Relaxed)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_shard_fails_its_own_keys_only() {
    let (cluster, origin, slots) = (RedisCluster::start(&[]).await, Origin::start().await, Slots::new());
    let envoy = envoy(&cluster, &origin, Pace::CLUSTER, 1).await;
    let load = Load::start(&[&envoy], 48, 2, unique_key);
    load.wait(200, "load", |shot| shot.is_replay).await;
    // The replica too: nobody takes its place.
    cluster.nodes[SHARDS].pause();
    cluster.nodes[0].pause();
    let dead = Instant::now();
    load.wait(100, "a dead shard", |shot| shot.at > dead && shot.status == 503).await;
    // By now the filter knows which slots don't answer.
    let known = Instant::now();
    load.wait(500, "load beside it", |shot| shot.at > known && shot.status == 200).await;
    let end = Instant::now();
    let shots = load.end().await;
    let within = |from: Instant| shots.iter().filter(move |shot| shot.at > from && shot.at + shot.took < end);
    let is_live = |shot: &&Shot| slots.shard_of(&shot.key) != 0;
    println!("before      {:?}", summary(shots.iter().filter(|shot| shot.at + shot.took < dead)));
    println!("live, first {:?}", summary(within(dead).filter(|shot| shot.at < known).filter(is_live)));
    println!("live, then  {:?}", summary(within(known).filter(is_live)));
    println!("dead        {:?}", summary(within(dead).filter(|shot| !is_live(shot))));
    let failed: BTreeSet<String> = shots
        .iter()
        .filter(|shot| shot.at > dead && shot.status == 503 && !is_live(shot))
        .map(|shot| shot.key.clone())
        .collect();
    let before: BTreeSet<String> =
        shots.iter().filter(|shot| shot.at < dead).map(|shot| shot.key.clone()).collect();
    for key in failed.difference(&before) {
        assert_eq!(origin.executions_of(key), 0, "{key}");
    }
    let of_live: Vec<&Shot> = within(known).filter(is_live).collect();
    assert!(of_live.iter().all(|shot| shot.status == 200), "{:?}", summary(of_live.iter().copied()));
    let [half, ..] = summary(of_live.iter().copied()).1;
    // A batch with one key of the dead shard takes op_timeout, 200 ms.
    assert!(half < Duration::from_millis(150), "{half:?}");
    cluster.nodes[0].resume();
    cluster.nodes[SHARDS].resume();
    let runs = audit(&envoy, &origin, keys_of(&shots)).await;
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
}

/// Primaries die and hang under load, and their replicas take their place. What a primary had acknowledged and not yet
/// passed on is lost with it: such a key may run once more, and no other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_failovers_runs_nothing_twice_but_what_a_primary_took_with_it() {
    let minutes: Option<u64> = std::env::var("CHAOS_MINUTES").ok().and_then(|minutes| minutes.parse().ok());
    let end = Instant::now() + Duration::from_secs(minutes.unwrap_or(0) * 20);
    let (mut cluster, origin, slots) = (RedisCluster::start(&[]).await, Origin::start().await, Slots::new());
    let (one, two) =
        tokio::join!(envoy(&cluster, &origin, Pace::CLUSTER, 2), envoy(&cluster, &origin, Pace::CLUSTER, 2));
    let mut round = 0;
    while round < 2 || Instant::now() < end {
        let (shard, dies) = (round % SHARDS, round % 2 == 0);
        let range = shard * SLOTS / SHARDS..(shard + 1) * SLOTS / SHARDS;
        let old = cluster.owner_of(range.start).await;
        let new = (old + SHARDS) % (2 * SHARDS);
        let load = Load::start(&[&one, &two], 16, 400, unique_key);
        load.wait(300, "load", |shot| shot.is_replay).await;
        let fault = Instant::now();
        if dies {
            cluster.nodes[old].kill();
        } else {
            cluster.nodes[old].pause();
        }
        poll_until(PATIENCE, "the replica takes over", async || {
            (cluster.owner_of(range.start).await == new).then_some(())
        })
        .await;
        let elected = fault.elapsed();
        let is_hit = |shot: &Shot| range.contains(&slots.of(&shot.key));
        load.wait(50, "the shard is back", |shot| {
            shot.at > fault + elected && shot.status == 200 && is_hit(shot)
        })
        .await;
        if dies {
            cluster.nodes[old].restart().await;
        } else {
            cluster.nodes[old].resume();
        }
        cluster.wait_replicas().await;
        let shots = load.end().await;
        let after = |shot: &&Shot| shot.at > fault;
        let back =
            shots.iter().filter(after).filter(|shot| is_hit(shot) && shot.status == 200 && !shot.is_replay);
        let back = back.map(|shot| shot.at + shot.took - fault).min().unwrap();
        println!(
            "round {round}: shard {shard} {}, replica elected after {elected:?}, first answer after {back:?}",
            if dies { "killed" } else { "paused" }
        );
        println!("  its keys     {:?}", summary(shots.iter().filter(after).filter(|shot| is_hit(shot))));
        println!("  other shards {:?}", summary(shots.iter().filter(after).filter(|shot| !is_hit(shot))));
        assert!(back < Duration::from_secs(10), "{back:?}");
        let refused = shots.iter().filter(after).filter(|shot| is_hit(shot) && shot.status == 503).count();
        assert!(refused > 0, "nobody noticed");
        let runs = audit(&one, &origin, keys_of(&shots)).await;
        let again: Vec<&String> = runs.iter().filter(|(_, runs)| **runs != 1).map(|(key, _)| key).collect();
        println!("  {} keys, {} ran again", runs.len(), again.len());
        for key in &again {
            let at_the_fault = shots.iter().any(|shot| {
                shot.key == **key && shot.at < fault && shot.at + shot.took + Duration::from_secs(1) > fault
            });
            assert!(
                at_the_fault && slots_hit(&slots, &range, key) && runs[*key] == 2,
                "{key} ran {} times",
                runs[*key]
            );
        }
        round += 1;
    }
    for envoy in [&one, &two] {
        println!("{:?}", envoy.stats("redis.redis.command.evalsha").await);
        poll_until(PATIENCE, "nothing waits", async || {
            (envoy.metric("outbox").await + envoy.metric("in_flight").await == 0).then_some(())
        })
        .await;
    }
}

fn slots_hit(slots: &Slots, range: &Range<usize>, key: &str) -> bool {
    range.contains(&slots.of(key))
}
