//! HTTP gateways in front of Redis, through the compiled filter: how often the upstream ran, and what a failing gateway does.

use serde_json::{Value, json};

use crate::support::*;

fn plugin(dialect: &str) -> Value {
    let mut plugin = plugin_with(json!({}));
    plugin["store"] = json!({"redis": {
        "cluster": "redis-gateway", "timeout": "8s", "near_cache": false,
        "gateway": {"dialect": dialect, "authority": "redis.example.com"},
    }});
    plugin
}

/// Whatever stands in front of the Redis.
enum Gateway {
    Webdis(Webdis),
    Upstash(Upstash),
}

impl Gateway {
    async fn start(dialect: &str, redis: &Redis) -> Gateway {
        match dialect {
            "webdis" => Gateway::Webdis(Webdis::start(redis.addr()).await),
            _ => Gateway::Upstash(Upstash::start(redis.addr()).await),
        }
    }

    fn addr(&self) -> std::net::SocketAddr {
        match self {
            Gateway::Webdis(webdis) => webdis.addr(),
            Gateway::Upstash(upstash) => upstash.addr(),
        }
    }
}

async fn envoy(gateway: &Gateway, origin: &Origin, dialect: &str, token: &str) -> Envoy {
    let builder = Envoy::builder()
        .workers(2)
        .plugin(plugin(dialect))
        .vm_env("UPSTASH_REDIS_REST_TOKEN", token)
        .origin_addr(origin.addr());
    with_gateway(builder, gateway.addr()).start().await
}

fn pay(key: &str) -> Request {
    Request::post("/pay").key(key).body("amount=1")
}

const KEYS: usize = 12;
const DUPLICATES: usize = 8;

async fn runs_each_key_once(dialect: &str) -> Gateway {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let gateway = Gateway::start(dialect, &redis).await;
    let body: Vec<u8> = (0..=255).cycle().take(5_000).collect();
    let reply = Reply::status(201).header("x-part", b"\xe9b").chunk(body.clone());
    origin.on("/pay", Behaviour::Respond(reply));
    let (one, two) =
        tokio::join!(envoy(&gateway, &origin, dialect, TOKEN), envoy(&gateway, &origin, dialect, TOKEN));
    let keys: Vec<String> = (0..KEYS).map(|_| unique_key()).collect();
    let mut racers = Vec::new();
    for key in &keys {
        for nth in 0..DUPLICATES {
            let (addr, request) = ([one.addr(), two.addr()][nth % 2], pay(key));
            racers.push(tokio::spawn(
                async move { send_once(addr, Protocol::BOTH[nth / 2 % 2], &request).await },
            ));
        }
    }
    for racer in racers {
        let answer = racer.await.unwrap().unwrap();
        let is_refused = answer.kind() == (409, Some("in-flight".to_owned()));
        assert!(is_refused || answer.status == 201, "{answer:?}\n{}", one.log_text());
    }
    for key in &keys {
        for envoy in [&one, &two] {
            let (replay, _) = ask_until_decided(envoy, Protocol::Http1, &pay(key)).await;
            assert_eq!((replay.status, replay.is_replay()), (201, true), "{replay:?}");
            assert!(replay.body == body && replay.header_lines("x-part") == [b"\xe9b"], "{replay:?}");
            let other = Request::post("/pay").key(key).body("amount=2");
            assert_eq!(ask(envoy, Protocol::Http2, &other).await.kind(), (422, Some("mismatch".to_owned())));
        }
        assert_eq!(origin.executions_of(key), 1, "{key}");
    }
    assert!(redis.command("DBSIZE").await.starts_with(&format!(":{KEYS}\r")));
    for envoy in [&one, &two] {
        for name in ["store_errors", "stale_writes", "unexpected_events", "host_errors"] {
            assert_eq!(envoy.metric(name).await, 0, "{name}\n{}", envoy.log_text());
        }
    }
    gateway
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_key_runs_once_over_webdis() {
    runs_each_key_once("webdis").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_key_runs_once_over_the_rest_dialect_of_upstash() {
    for dialect in ["upstash_resp2", "upstash_base64"] {
        let Gateway::Upstash(upstash) = runs_each_key_once(dialect).await else { panic!("{dialect}") };
        assert!(upstash.most_pipelined() > 1, "{dialect}: no batch");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_fails_or_refuses_forwards_nothing() {
    for (dialect, token, says) in [
        ("webdis", TOKEN, "the gateway gives no answer of its dialect in time"),
        ("upstash_resp2", "stolen", "the gateway refuses what it is sent"),
        // The Redis behind it is gone.
        ("upstash_base64", TOKEN, "the gateway gives no answer of its dialect in time"),
    ] {
        let (mut redis, origin) = (Redis::start().await, Origin::start().await);
        let gateway = Gateway::start(dialect, &redis).await;
        let envoy = envoy(&gateway, &origin, dialect, token).await;
        redis.kill();
        let key = unique_key();
        let refused = ask(&envoy, Protocol::Http1, &pay(&key)).await;
        assert_eq!(refused.kind(), (503, Some("store-unavailable".to_owned())), "{dialect}: {refused:?}");
        assert_eq!(origin.executions_of(&key), 0);
        envoy.wait_log(says, PATIENCE).await;
        assert!(!envoy.log_contains(token));
        redis.restart().await;
        if token == TOKEN {
            poll_until(PATIENCE, "the store is back", async || {
                (ask(&envoy, Protocol::Http2, &pay(&key)).await.status == 200).then_some(())
            })
            .await;
            assert_eq!(origin.executions_of(&key), 1, "{dialect}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_without_the_token_does_not_start() {
    let refused = Envoy::builder().plugin(plugin("upstash_resp2")).try_start().await;
    let log = refused.err().expect("it does not start");
    assert!(
        log.contains("the VM has no token in its environment variable UPSTASH_REDIS_REST_TOKEN"),
        "{log}"
    );
}
