//! What a real Envoy with the filter makes of records that `idempotency` changed. What counts is how often the upstream
//! executed.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs
)]

#[allow(dead_code, reason = "tests/cli_records uses the rest")]
#[path = "../cli_records/command.rs"]
mod command;
#[path = "../e2e/support/mod.rs"]
mod support;

use command::{Config, Ended};
use serde_json::{Value, json};
use support::*;

/// One plugin configuration, for the Envoys and for the command: near caches as they are by default.
fn plugin(rule: Value) -> Value {
    let mut plugin = plugin_with(rule);
    plugin["store"] = json!({"redis": {"cluster": "redis-link", "timeout": "1200ms"}});
    plugin
}

async fn envoy(redis: &Redis, origin: &Origin, plugin: &Value) -> Envoy {
    let builder = Envoy::builder().workers(2).plugin(plugin.clone()).origin_addr(origin.addr());
    linked(builder, redis.addr(), Pace::STEADY).start().await
}

/// An operator, who knows the request and the configuration.
struct Operator {
    config: Config,
    url: String,
}

impl Operator {
    fn of(redis: &Redis, plugin: &Value) -> Self {
        Self { config: Config::whole(plugin.clone()), url: format!("redis://{}", redis.addr()) }
    }

    fn run(&self, verb: &str, key: &str, more: &[&str]) -> Ended {
        let file = self.config.file();
        let request = ["--rule", "payments", "--scope", "x-account-id=alice", "--key", key];
        let place = [&["--json", "--redis", &self.url, "--config", &file], &request[..]].concat();
        command::run(&[&[verb], &place[..], more].concat())
    }

    fn list(&self, state: &str) -> Vec<Value> {
        let listed = command::run(&["list", "--json", "--redis", &self.url, "--state", state]).expect(0, "");
        listed.json()["records"].as_array().unwrap().clone()
    }

    /// It was done after all: this is what the upstream would have answered.
    fn resolve(&self, key: &str) -> Ended {
        let body = self.config.put("body", BODY);
        let lines = ["--header", "content-type: application/json", "--header", "location: /payments/pay-7"];
        self.run("resolve", key, &[&["--yes", "--status", "201", "--body", &body], &lines[..]].concat())
    }
}

const BODY: &[u8] = b"{\"id\":\"pay-7\"}";

fn refusal(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

/// Every Envoy and protocol gets the operator's answer, and nothing runs for it.
async fn assert_resolved(envoys: &[&Envoy], origin: &Origin, key: &str, request: &Request) {
    for envoy in envoys {
        for proto in Protocol::BOTH {
            let replay = ask(envoy, proto, request).await;
            assert_eq!(
                (replay.status, replay.is_replay(), &replay.body[..]),
                (201, true, BODY),
                "{replay:?}"
            );
            assert_eq!(replay.header("content-type"), Some("application/json"));
            assert_eq!(replay.header("location"), Some("/payments/pay-7"));
            let other = request.clone().body("amount=9900");
            assert_eq!(ask(envoy, proto, &other).await.kind(), refusal(422, "mismatch"));
        }
    }
    assert_eq!(origin.executions_of(key), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_request_is_resolved_or_released_by_whoever_knows_what_happened() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let plugin = plugin(json!({}));
    let (one, two) = tokio::join!(envoy(&redis, &origin, &plugin), envoy(&redis, &origin, &plugin));
    let operator = Operator::of(&redis, &plugin);
    origin.on("/fails", Behaviour::Sequence(vec![Reply::status(500), Reply::echo(200)]));
    let keys = [unique_key(), unique_key()];
    for key in &keys {
        let request = Request::post("/fails").key(key).body("amount=1");
        assert_eq!(ask(&one, Protocol::Http1, &request).await.status, 500);
        // Both Envoys have read the failed record by now: neither may keep it near.
        for envoy in [&one, &two] {
            assert_eq!(ask(envoy, Protocol::Http1, &request).await.kind(), refusal(424, "failed"));
        }
        let shown = operator.run("inspect", key, &[]).expect(0, "failed").json();
        assert_eq!((&shown["state"], &shown["reason"]), (&json!("failed"), &json!("status")));
        assert!(!shown.to_string().contains(key.as_str()), "{shown}");
    }
    assert_eq!(operator.list("failed").len(), 2);

    let [done, not_done] = &keys;
    let request = Request::post("/fails").key(done).body("amount=1");
    operator.resolve(done).expect(0, "resolved");
    assert_resolved(&[&one, &two], &origin, done, &request).await;

    // Removed: the near caches replay on, as the command says and the documents have it.
    let warning = operator.run("forget", done, &["--yes"]).expect(0, "").json()["warning"].clone();
    assert!(warning.as_str().unwrap().contains("1m"), "{warning}");
    assert_eq!(operator.run("inspect", done, &[]).code, 1);
    assert!(ask(&one, Protocol::Http1, &request).await.is_replay());
    assert_eq!(origin.executions_of(done), 1);

    let request = Request::post("/fails").key(not_done).body("amount=1");
    operator.run("resolve", not_done, &["--yes", "--release"]).expect(0, "released");
    let second = ask(&two, Protocol::Http2, &request).await;
    assert_eq!((second.status, second.is_replay()), (200, false));
    assert!(ask(&one, Protocol::Http1, &request).await.is_replay());
    assert_eq!(origin.executions_of(not_done), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_envoy_left_behind_is_found_and_resolved() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let plugin = plugin(json!({"lock_ttl": "4800ms", "on_abandoned": "retain"}));
    let (mut doomed, other) = tokio::join!(envoy(&redis, &origin, &plugin), envoy(&redis, &origin, &plugin));
    let operator = Operator::of(&redis, &plugin);
    let (key, barrier) = (unique_key(), Barrier::new());
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let request = Request::post("/held").key(&key).body("amount=1");
    let pending = Client::connect(doomed.addr(), Protocol::Http1).await.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    // While it runs nobody may say how it ended.
    operator.resolve(&key).expect(4, "executing");
    operator.run("forget", &key, &["--yes"]).expect(4, "--force");
    doomed.kill9();
    assert!(pending.finish().await.is_err());
    barrier.open();
    let (retried, refused) = ask_until_decided(&other, Protocol::Http1, &request).await;
    assert_eq!((retried.kind(), refused > 0), (refusal(424, "abandoned"), true));

    let [found] = &operator.list("abandoned")[..] else { panic!("one record") };
    assert_eq!(found["redis_key"], operator.run("inspect", &key, &[]).json()["redis_key"]);
    operator.resolve(&key).expect(0, "resolved");
    doomed.restart().await;
    assert_resolved(&[&doomed, &other], &origin, &key, &request).await;
}
