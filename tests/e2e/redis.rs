//! The store in Redis, through the link inside Envoy.

use serde_json::{Value, json};

use crate::support::*;

fn plugin(rule: Value) -> Value {
    let mut plugin = plugin_with(rule);
    plugin["store"] = json!({"redis": {"cluster": "redis-link"}});
    plugin
}

async fn envoy(redis: &Redis, origin: &Origin, plugin: Value) -> Envoy {
    let builder = Envoy::builder().workers(4).plugin(plugin).origin_addr(origin.addr());
    with_link(builder, redis.addr(), &json!({})).start().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_request_runs_and_the_retry_is_replayed_on_the_other_envoy() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let (one, two) =
        tokio::join!(envoy(&redis, &origin, plugin(json!({}))), envoy(&redis, &origin, plugin(json!({}))));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let first = send_once(one.addr(), proto, &request).await.unwrap();
        assert_eq!(first.status, 200, "{first:?}\n{}", one.log_text());
        let retry = send_once(two.addr(), proto, &request).await.unwrap();
        assert_eq!((retry.status, &retry.body), (200, &first.body));
        assert_eq!(retry.header("idempotent-replayed"), Some("true"));
        let other =
            send_once(two.addr(), proto, &Request::post("/pay").key(&key).body("amount=2")).await.unwrap();
        assert_eq!((other.status, other.problem_type().as_deref()), (422, Some("mismatch")));
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert_eq!(redis.command("DBSIZE").await.lines().next(), Some(":2"));
}
