//! A Redis that loses what it had acknowledged: failover, eviction; what narrows that; and a Redis that takes no writes.

use serde_json::{Value, json};

use crate::support::*;

/// A primary, a replica behind a network of its own, and Envoys whose road leads to whichever is the primary.
struct Pair {
    primary: Redis,
    replica: Redis,
    replication: Relay,
    origin: Origin,
    roads: Vec<Relay>,
    envoys: Vec<Envoy>,
}

fn plugin(pace: Pace, near_cache: Value, rule: Value) -> Value {
    let mut plugin = on_redis(plugin_with(rule), pace);
    plugin["store"]["redis"]["near_cache"] = near_cache;
    plugin
}

impl Pair {
    async fn start(primary: &[&str], pace: Pace, plugins: Vec<Value>) -> Pair {
        let arguments = [&["--repl-diskless-sync-delay", "0"], primary].concat();
        let (primary, origin) = (Redis::start_with(&arguments).await, Origin::start().await);
        let replication = Relay::to(primary.addr()).await;
        let of = format!("127.0.0.1 {}", replication.addr().port());
        let replica = Redis::start_with(&["--replicaof", &of]).await;
        poll_until(PATIENCE, "the replica is in sync", async || {
            replica.command("INFO replication").await.contains("master_link_status:up").then_some(())
        })
        .await;
        let (mut roads, mut envoys) = (Vec::new(), Vec::new());
        for plugin in plugins {
            let road = Relay::to(primary.addr()).await;
            // One worker, so that one request shows that the road is open.
            let builder = Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr());
            envoys.push(linked(builder, road.addr(), pace).start().await);
            roads.push(road);
        }
        Pair { primary, replica, replication, origin, roads, envoys }
    }

    /// Everything that the primary has is on the replica.
    async fn replicated(&self) {
        poll_until(PATIENCE, "the replica has it all", async || {
            (states(&self.primary).await == states(&self.replica).await).then_some(())
        })
        .await;
    }

    /// From here on the replica gets nothing.
    async fn stop_replication(&self) {
        self.replication.cut();
        poll_until(PATIENCE, "no replica", async || {
            self.primary.command("INFO replication").await.contains("connected_slaves:0").then_some(())
        })
        .await;
    }

    /// The primary dies, the replica takes its place.
    async fn fail_over(&mut self) {
        self.primary.kill();
        assert!(self.replica.command("REPLICAOF NO ONE").await.starts_with("+OK"));
        for (road, envoy) in self.roads.iter().zip(&mut self.envoys) {
            road.lead_to(self.replica.addr());
            if envoy.is_running() {
                store_is_back(envoy).await;
            }
        }
    }
}

/// Every record and its state.
async fn states(redis: &Redis) -> String {
    let script = "local all = {} for _, k in ipairs(redis.call('KEYS', '*')) do \
        all[#all + 1] = k .. '=' .. (redis.call('HGET', k, 'state') or '?') end table.sort(all) \
        return table.concat(all, ' ')";
    redis.command(&format!("EVAL \"{script}\" 0")).await
}

async fn store_is_back(envoy: &Envoy) {
    poll_until(PATIENCE, "the store is back", async || {
        let warm = Request::post("/warm").account("warm").key(unique_key());
        (ask(envoy, Protocol::Http1, &warm).await.status == 200).then_some(())
    })
    .await;
}

/// A request whose first execution waits at the barrier; later ones are answered at once.
async fn running(envoy: &Envoy, origin: &Origin, proto: Protocol) -> (String, Request, Pending, Barrier) {
    let (key, barrier) = (unique_key(), Barrier::new());
    let (path, held) = (format!("/held/{key}"), barrier.clone());
    origin.on(
        &path,
        Behaviour::func(move |_, nth| {
            let held = held.clone();
            async move {
                if nth == 1 {
                    held.pass().await;
                }
                Reply::echo(200)
            }
        }),
    );
    let request = Request::post(&path).key(&key).body("amount=1");
    let pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    (key, request, pending, barrier)
}

fn pay() -> (String, Request) {
    let key = unique_key();
    let request = Request::post("/pay").key(&key).body("amount=1");
    (key, request)
}

fn refusal(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

fn ran(answer: &Response) -> bool {
    answer.status == 200 && !answer.is_replay()
}

/// What the replica has by then is as good after a failover as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_loses_nothing_changes_nothing() {
    let mut pair = Pair::start(&[], Pace::STEADY, vec![plugin(Pace::STEADY, json!(false), json!({}))]).await;
    pair.origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    let (done_key, done) = pay();
    let first = ask(&pair.envoys[0], Protocol::Http1, &done).await;
    let key = unique_key();
    let fails = Request::post("/fails").key(&key).body("amount=1");
    assert_eq!(ask(&pair.envoys[0], Protocol::Http2, &fails).await.status, 500);
    let (held_key, held, pending, barrier) = running(&pair.envoys[0], &pair.origin, Protocol::Http2).await;
    pair.replicated().await;
    pair.fail_over().await;
    let envoy = &pair.envoys[0];
    let replay = ask(envoy, Protocol::Http2, &done).await;
    assert_eq!((replay.is_replay(), replay.body), (true, first.body));
    assert_eq!(ask(envoy, Protocol::Http1, &fails).await.kind(), refusal(424, "failed"));
    assert_eq!(ask(envoy, Protocol::Http1, &held).await.kind(), refusal(409, "in-flight"));
    barrier.open();
    let first = pending.finish().await.unwrap();
    let (replay, _) = ask_until_decided(envoy, Protocol::Http1, &held).await;
    assert_eq!((replay.is_replay(), replay.body), (true, first.body));
    for key in [done_key, key, held_key] {
        assert_eq!(pair.origin.executions_of(&key), 1);
    }
}

/// H06, H12: the documented limit. A replica that lags is never asked, so nothing shows until it is promoted; then
/// every key whose last write it lacks is a new one, except where an Envoy has the answer near.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failover_that_loses_an_acknowledged_write_runs_its_key_again() {
    let far = plugin(Pace::STEADY, json!(false), json!({}));
    let plugins = vec![plugin(Pace::STEADY, json!({}), json!({})), far.clone(), far];
    let mut pair = Pair::start(&[], Pace::STEADY, plugins).await;
    let (kept_key, kept) = pay();
    let kept_answer = ask(&pair.envoys[1], Protocol::Http1, &kept).await;
    for envoy in &pair.envoys {
        store_is_back(envoy).await;
    }
    pair.replicated().await;
    pair.stop_replication().await;

    let origin = pair.origin.clone();
    let [near, far, doomed] = pair.envoys.as_mut_slice() else { panic!("three Envoys") };
    let (done_key, done) = pay();
    let done_answer = ask(near, Protocol::Http1, &done).await;
    for envoy in [&*far, &*near] {
        for (request, answer) in [(&kept, &kept_answer), (&done, &done_answer)] {
            let replay = ask(envoy, Protocol::Http2, request).await;
            assert_eq!((replay.is_replay(), &replay.body), (true, &answer.body), "the replica lags");
        }
    }
    let (held_key, held, pending, barrier) = running(far, &origin, Protocol::Http1).await;
    let (gone_key, gone, leaving, _) = running(far, &origin, Protocol::Http2).await;
    leaving.abort();
    let (failed, _) = ask_until_decided(near, Protocol::Http1, &gone).await;
    assert_eq!(failed.kind(), refusal(424, "failed"));
    // One Envoy dies with an execution, and with a claim of whose answer it never heard.
    let (crashed_key, crashed, _, _) = running(doomed, &origin, Protocol::Http1).await;
    let (claimed_key, claimed) = pay();
    let before = pair.primary.command("DBSIZE").await;
    let client = Client::connect(doomed.addr(), Protocol::Http1).await;
    pair.roads[2].mute(pair.primary.addr());
    let unanswered = client.start(&claimed).await.unwrap();
    poll_until(PATIENCE, "the claim", async || {
        (pair.primary.command("DBSIZE").await != before).then_some(())
    })
    .await;
    doomed.kill9();
    unanswered.finish().await.unwrap_err();

    pair.fail_over().await;
    let (near, far) = (&pair.envoys[0], &pair.envoys[1]);
    let replay = ask(far, Protocol::Http2, &kept).await;
    assert_eq!(
        (replay.is_replay(), replay.body, origin.executions_of(&kept_key)),
        (true, kept_answer.body, 1)
    );
    // Near: replayed. Far: run again.
    let replay = ask(near, Protocol::Http1, &done).await;
    assert_eq!(
        (replay.is_replay(), replay.body, origin.executions_of(&done_key)),
        (true, done_answer.body, 1)
    );
    assert!(ran(&ask(far, Protocol::Http1, &done).await));
    assert_eq!(origin.executions_of(&done_key), 2);
    // A duplicate beside the execution itself.
    let second = ask(near, Protocol::Http1, &held).await;
    assert!(ran(&second), "{second:?}");
    barrier.open();
    let first = pending.finish().await.unwrap();
    assert_ne!(first.execution(), second.execution());
    far.wait_metric("stale_writes", 1, PATIENCE).await;
    let replay = ask(far, Protocol::Http2, &held).await;
    assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&held_key)), (true, second.body, 2));
    for (key, request, runs) in
        [(&gone_key, &gone, 2), (&crashed_key, &crashed, 2), (&claimed_key, &claimed, 1)]
    {
        assert!(ran(&ask(far, Protocol::Http1, request).await));
        assert_eq!(origin.executions_of(key), runs);
        assert!(ask(near, Protocol::Http2, request).await.is_replay());
        assert_eq!(origin.executions_of(key), runs);
    }
    // Nothing tells the upstream that these are second runs.
    assert!(origin.requests().iter().all(|seen| seen.header("x-idempotency-attempt").is_none()));
}

/// A claim that was lost is only lost until its owner renews it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_running_claim_that_a_failover_lost_is_made_again_by_its_renewal() {
    let rule = json!({"lock_ttl": "4800ms"});
    let mut pair = Pair::start(&[], Pace::STEADY, vec![plugin(Pace::STEADY, json!(false), rule)]).await;
    pair.stop_replication().await;
    let (key, request, pending, barrier) = running(&pair.envoys[0], &pair.origin, Protocol::Http1).await;
    let name = pair.primary.command("KEYS *").await.lines().nth(2).unwrap().trim().to_owned();
    assert!(name.starts_with("idem:"), "{name}");
    pair.fail_over().await;
    assert_eq!(pair.origin.executions_of(&key), 1);
    poll_until(PATIENCE, "the renewal", async || {
        pair.replica.command(&format!("EXISTS {name}")).await.starts_with(":1").then_some(())
    })
    .await;
    for proto in Protocol::BOTH {
        let duplicate = ask(&pair.envoys[0], proto, &request).await;
        assert_eq!(duplicate.kind(), refusal(409, "in-flight"), "{duplicate:?}");
    }
    barrier.open();
    let first = pending.finish().await.unwrap();
    let (replay, _) = ask_until_decided(&pair.envoys[0], Protocol::Http2, &request).await;
    assert_eq!((replay.is_replay(), replay.body, pair.origin.executions_of(&key)), (true, first.body, 1));
}

/// H06, H08: with `min-replicas-to-write` nothing is acknowledged that no replica could have: claims are refused, and
/// what has run waits for a primary that takes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn min_replicas_to_write_refuses_claims_that_a_failover_would_lose() {
    let primary = ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "10"];
    let mut pair =
        Pair::start(&primary, Pace::STEADY, vec![plugin(Pace::STEADY, json!(false), json!({}))]).await;
    store_is_back(&pair.envoys[0]).await;
    let (held_key, held, pending, barrier) = running(&pair.envoys[0], &pair.origin, Protocol::Http1).await;
    pair.replicated().await;
    pair.stop_replication().await;
    let (new_key, new) = pay();
    for proto in Protocol::BOTH {
        let refused = ask(&pair.envoys[0], proto, &new).await;
        assert_eq!(refused.kind(), refusal(503, "store-unavailable"), "{refused:?}");
        assert_eq!(ask(&pair.envoys[0], proto, &held).await.kind(), refusal(409, "in-flight"));
    }
    assert_eq!(pair.origin.executions_of(&new_key), 0);
    pair.envoys[0].wait_log("no_replicas", PATIENCE).await;
    barrier.open();
    let first = pending.finish().await.unwrap();
    assert_eq!(ask(&pair.envoys[0], Protocol::Http1, &held).await.kind(), refusal(409, "in-flight"));
    pair.fail_over().await;
    let (replay, _) = ask_until_decided(&pair.envoys[0], Protocol::Http2, &held).await;
    assert_eq!(
        (replay.is_replay(), replay.body, pair.origin.executions_of(&held_key)),
        (true, first.body, 1)
    );
    let run = ask(&pair.envoys[0], Protocol::Http1, &new).await;
    assert_eq!((ran(&run), pair.origin.executions_of(&new_key)), (true, 1), "{run:?}");
}

/// Fills Redis with other keys until `enough`.
async fn flood(redis: &Redis, mut enough: impl AsyncFnMut(&str) -> bool) {
    let filling = "x".repeat(1000);
    for batch in 0..200 {
        let sets: Vec<String> = (0..100).map(|nth| format!("SET other:{batch}:{nth} {filling}")).collect();
        let replies = redis.command(&sets.join("\r\n")).await;
        if enough(&replies).await {
            return;
        }
    }
    panic!("20 MB were not enough");
}

/// H09: every record has an expiry, so `volatile-*` evicts claims like `allkeys-*` does, and a duplicate runs beside
/// the execution. Under `noeviction` a full Redis refuses what is new, and keeps what it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_noeviction_keeps_a_claim_in_a_full_redis() {
    for policy in ["noeviction", "allkeys-lru", "volatile-lru"] {
        let (redis, origin) =
            (Redis::start_with(&["--maxmemory-policy", policy]).await, Origin::start().await);
        let builder =
            Envoy::builder().plugin(plugin(Pace::STEADY, json!(false), json!({}))).origin_addr(origin.addr());
        let envoy = linked(builder, redis.addr(), Pace::STEADY).start().await;
        store_is_back(&envoy).await;
        redis.command("FLUSHDB").await;
        let (key, request, pending, barrier) = running(&envoy, &origin, Protocol::Http1).await;
        let name = redis.command("KEYS *").await.lines().nth(2).unwrap().trim().to_owned();
        let used = redis.command("INFO memory").await;
        let used: u64 =
            used.lines().find_map(|line| line.strip_prefix("used_memory:")).unwrap().trim().parse().unwrap();
        redis.command(&format!("CONFIG SET maxmemory {}", used + 500_000)).await;
        flood(&redis, async |replies| match policy {
            "noeviction" => replies.contains("-OOM"),
            _ => redis.command(&format!("EXISTS {name}")).await.starts_with(":0"),
        })
        .await;
        let duplicate = ask(&envoy, Protocol::Http2, &request).await;
        if policy != "noeviction" {
            assert!(ran(&duplicate), "{policy}: {duplicate:?}");
            assert_eq!(origin.executions_of(&key), 2, "{policy}");
            barrier.open();
            assert_ne!(pending.finish().await.unwrap().execution(), duplicate.execution(), "{policy}");
            continue;
        }
        assert_eq!(duplicate.kind(), refusal(409, "in-flight"), "{duplicate:?}");
        // The flood's own connections take memory too; without them there would be a little room again.
        redis.command(&format!("CONFIG SET maxmemory {}", used + 100_000)).await;
        let (new_key, new) = pay();
        assert_eq!(ask(&envoy, Protocol::Http1, &new).await.kind(), refusal(503, "store-unavailable"));
        assert_eq!(origin.executions_of(&new_key), 0);
        barrier.open();
        let first = pending.finish().await.unwrap();
        assert_eq!(ask(&envoy, Protocol::Http1, &request).await.kind(), refusal(409, "in-flight"));
        redis.command("CONFIG SET maxmemory 0").await;
        let (replay, _) = ask_until_decided(&envoy, Protocol::Http1, &request).await;
        assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
    }
}

/// H08: a Redis whose last snapshot failed refuses writes; that is neither "claimed" nor "taken".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_cannot_save_refuses_claims_and_gets_results_later() {
    // Nobody can write a file there.
    let redis = Redis::start_with(&["--dir", "/proc", "--save", "3600 1000000"]).await;
    let origin = Origin::start().await;
    let builder =
        Envoy::builder().plugin(plugin(Pace::STEADY, json!(false), json!({}))).origin_addr(origin.addr());
    let envoy = linked(builder, redis.addr(), Pace::STEADY).start().await;
    let (key, request, pending, barrier) = running(&envoy, &origin, Protocol::Http1).await;
    redis.command("BGSAVE").await;
    poll_until(PATIENCE, "the failed snapshot", async || {
        redis.command("INFO persistence").await.contains("rdb_last_bgsave_status:err").then_some(())
    })
    .await;
    let (new_key, new) = pay();
    for proto in Protocol::BOTH {
        assert_eq!(ask(&envoy, proto, &new).await.kind(), refusal(503, "store-unavailable"));
        assert_eq!(ask(&envoy, proto, &request).await.kind(), refusal(409, "in-flight"));
    }
    assert_eq!(origin.executions_of(&new_key), 0);
    let said = redis.command("INFO errorstats").await;
    assert!(said.contains("errorstat_MISCONF:count="), "{said}");
    barrier.open();
    let first = pending.finish().await.unwrap();
    envoy.wait_metric("outbox_queued", 1, PATIENCE).await;
    assert!(redis.command("CONFIG SET stop-writes-on-bgsave-error no").await.starts_with("+OK"));
    let (replay, _) = ask_until_decided(&envoy, Protocol::Http2, &request).await;
    assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
    assert!(ran(&ask_until_decided(&envoy, Protocol::Http2, &new).await.0));
    assert_eq!(origin.executions_of(&new_key), 1);
}
