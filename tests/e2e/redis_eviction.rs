//! A Redis that evicts is told of: in the log, and by a gauge that an alert can watch.

use serde_json::json;

use crate::support::*;

const TOLD: &str = "Redis: it evicts records when its memory is full";

/// With a timeout that only a store that hangs reaches.
async fn world(redis: &Redis, wasm: Wasm) -> (Origin, Envoy) {
    let origin = Origin::start().await;
    let mut plugin = plugin_with(json!({}));
    plugin["store"] = json!({"redis": {"cluster": "redis-link", "near_cache": false, "timeout": "2s"}});
    let builder = Envoy::builder().workers(1).wasm(wasm).plugin(plugin).origin_addr(origin.addr());
    let envoy = with_link(builder, redis.addr(), &json!({"settings": {"op_timeout": "0.9s"}})).start().await;
    (origin, envoy)
}

/// A request, its replay, and how often the upstream ran.
async fn pay(envoy: &Envoy, origin: &Origin) {
    let key = unique_key();
    let request = Request::post("/pay").key(&key).body("amount=1");
    for replayed in [None, Some("true")] {
        let answer = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (200, replayed), "{answer:?}");
    }
    assert_eq!(origin.executions_of(&key), 1);
}

/// How often a script asked by INFO. The questions of this test are INFOs, too, and `own` counts them.
async fn checks(redis: &Redis, own: &mut u64) -> u64 {
    let stats = redis.command("INFO commandstats").await;
    let line = stats.lines().find(|line| line.starts_with("cmdstat_info:calls="));
    let calls = line.and_then(|line| line.split(['=', ',']).nth(1)?.parse::<u64>().ok()).unwrap_or(0);
    *own += 1;
    calls - (*own - 1)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_evicts_is_told_of_with_what_to_set() {
    let redis = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let (origin, envoy) = world(&redis, Wasm::Dist).await;
    pay(&envoy, &origin).await;
    envoy.wait_metric("redis.evicting", 1, PATIENCE).await;
    envoy.wait_log(TOLD, PATIENCE).await;
    let log = envoy.log_text();
    let line = log.lines().find(|line| line.contains(TOLD)).unwrap();
    assert!(line.contains("[warning]"), "{line}");
    assert!(line.contains("maxmemory-policy allkeys-lru"), "{line}");
    assert!(line.contains("set maxmemory-policy noeviction"), "{line}");
    // Requests do not wait for it, nor ask for it each time.
    pay(&envoy, &origin).await;
    assert_eq!(checks(&redis, &mut 0).await, 1);
    assert_eq!((envoy.metric("redis.evicting").await, envoy.metric("store_errors").await), (1, 0));
    // Not a key was written for it.
    assert_eq!(redis.command("DBSIZE").await.lines().next(), Some(":2"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_keeps_everything_is_not_told_of() {
    for arguments in [
        &["--maxmemory", "100mb", "--maxmemory-policy", "noeviction"][..],
        &["--maxmemory", "0", "--maxmemory-policy", "allkeys-lru"],
    ] {
        let redis = Redis::start_with(arguments).await;
        let (origin, envoy) = world(&redis, Wasm::Dist).await;
        pay(&envoy, &origin).await;
        let mut own = 0;
        poll_until(PATIENCE, "it was asked", async || (checks(&redis, &mut own).await >= 1).then_some(()))
            .await;
        // The answer of the check is there before that of the requests that follow it.
        pay(&envoy, &origin).await;
        assert_eq!((envoy.metric("redis.evicting").await, envoy.metric("store_errors").await), (0, 0));
        assert!(!envoy.log_contains("evicts"), "{}", envoy.log_text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_that_is_changed_is_noticed_with_the_next_requests() {
    let redis = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "noeviction"]).await;
    let (origin, envoy) = world(&redis, Wasm::TestHooks).await;
    pay(&envoy, &origin).await;
    assert_eq!(envoy.metric("redis.evicting").await, 0);
    for (policy, evicting) in [("volatile-ttl", 1), ("noeviction", 0), ("allkeys-lfu", 1)] {
        let reply = redis.command(&format!("CONFIG SET maxmemory-policy {policy}")).await;
        assert!(reply.starts_with("+OK"), "{reply}");
        poll_until(PATIENCE, policy, async || {
            pay(&envoy, &origin).await;
            (envoy.metric("redis.evicting").await == evicting).then_some(())
        })
        .await;
    }
    envoy.wait_log("maxmemory-policy volatile-ttl", PATIENCE).await;
    envoy.wait_log("maxmemory-policy allkeys-lfu", PATIENCE).await;
    assert_eq!(envoy.metric("store_errors").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_acl_without_info_and_a_redis_that_is_gone_are_no_store_errors() {
    let mut redis = Redis::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]).await;
    let reply = redis.command("ACL SETUSER default -info").await;
    assert!(reply.starts_with("+OK"), "{reply}");
    let (origin, envoy) = world(&redis, Wasm::TestHooks).await;
    pay(&envoy, &origin).await;
    envoy.wait_log("Redis: whether it evicts records can't be told", PATIENCE).await;
    pay(&envoy, &origin).await;
    let counts = (envoy.metric("redis.evicting").await, envoy.metric("store_errors").await);
    assert_eq!((counts, envoy.log_contains(TOLD)), ((0, 0), false));

    // Back without that ACL: what was not known is found out, and the gauge outlives a Redis that is gone.
    redis.restart().await;
    poll_until(PATIENCE, "it is found out", async || {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let _ = send_once(envoy.addr(), Protocol::Http1, &request).await.unwrap();
        assert!(origin.executions_of(&key) <= 1);
        (envoy.metric("redis.evicting").await == 1).then_some(())
    })
    .await;
    redis.kill();
    let gone =
        send_once(envoy.addr(), Protocol::Http1, &Request::post("/pay").key(unique_key())).await.unwrap();
    assert_eq!(gone.status, 503);
    assert_eq!(envoy.metric("redis.evicting").await, 1);
}
