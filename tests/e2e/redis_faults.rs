//! What becomes of requests when Redis, or the way to it, fails: how often the upstream ran, what the client was told,
//! and that nobody waited longer than the store's timeout.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

/// An answer takes no longer, whatever Redis does: the store's timeout of 250 ms, twice where an exchange asks twice,
/// and the noise of a busy machine.
const BOUND: Duration = Duration::from_secs(2);

/// What differs between the Envoys of these tests.
struct Setup {
    rule: Value,
    /// Merged into `store.redis`. No near cache unless it says so: what is replayed comes from Redis.
    store: Value,
    on_store_error: &'static str,
    /// See `with_link`.
    link: Value,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup { rule: json!({}), store: json!({}), on_store_error: "deny", link: json!({}) }
    }
}

impl Setup {
    /// A timeout that only a store that hangs reaches.
    fn patient() -> Setup {
        Setup {
            store: json!({"timeout": "2s"}),
            link: json!({"settings": {"op_timeout": "0.9s"}}),
            ..Setup::default()
        }
    }

    async fn start(self, redis: SocketAddr, origin: &Origin) -> Envoy {
        let mut plugin = plugin_with(self.rule);
        let mut store = json!({"cluster": "redis-link", "near_cache": false});
        deep_merge(&mut store, &self.store);
        plugin["store"] = json!({"redis": store});
        plugin["on_store_error"] = json!(self.on_store_error);
        let builder = Envoy::builder().workers(4).plugin(plugin).origin_addr(origin.addr());
        with_link(builder, redis, &self.link).start().await
    }
}

/// Redis, the upstream and an Envoy.
async fn world(setup: Setup) -> (Redis, Origin, Envoy) {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let envoy = setup.start(redis.addr(), &origin).await;
    (redis, origin, envoy)
}

fn request(path: &str) -> (String, Request) {
    let key = unique_key();
    let request = Request::post(path).key(&key).body("amount=1");
    (key, request)
}

/// The answer, which comes in time.
async fn send(envoy: &Envoy, request: &Request) -> Response {
    send_within(envoy, request, BOUND).await
}

async fn send_within(envoy: &Envoy, request: &Request, bound: Duration) -> Response {
    let start = Instant::now();
    let answer = send_once(envoy.addr(), Protocol::Http1, request).await.unwrap();
    assert!(start.elapsed() < bound, "{:?}: {answer:?}", start.elapsed());
    answer
}

fn assert_unavailable(answer: &Response) {
    assert_eq!(
        (answer.status, answer.problem_type().as_deref()),
        (503, Some("store-unavailable")),
        "{answer:?}"
    );
    let seconds: u64 = answer.header("retry-after").expect("retry-after").parse().expect("whole seconds");
    assert!(seconds > 0, "{answer:?}");
}

/// The retry is answered with what the first execution said, and nothing ran again.
async fn assert_replayed(envoy: &Envoy, origin: &Origin, key: &str, request: &Request, first: &Response) {
    let retry = send(envoy, request).await;
    assert_eq!((retry.status, &retry.body), (first.status, &first.body), "{retry:?}");
    assert_eq!(retry.header("idempotent-replayed"), Some("true"), "{retry:?}");
    assert_eq!(origin.executions_of(key), 1);
}

/// Retries until the store is back. Each answer comes in time; until then it is 503, or 409 while a claim that nobody
/// got an answer for is being given back.
async fn send_until_ok(envoy: &Envoy, request: &Request) -> Response {
    poll_until(PATIENCE, "the store is back", async || {
        let answer = send(envoy, request).await;
        let problem = answer.problem_type();
        match (answer.status, problem.as_deref()) {
            (200, None) => Some(answer),
            (503, Some("store-unavailable")) | (409, Some("in-flight")) => None,
            _ => panic!("{answer:?}"),
        }
    })
    .await
}

/// Starts a request and waits until the upstream works on it. The barrier holds it there.
async fn held(envoy: &Envoy, origin: &Origin, path: &str) -> (String, Request, Pending, Barrier) {
    let barrier = Barrier::new();
    origin.on(path, Behaviour::BarrierEcho(barrier.clone()));
    let (key, request) = request(path);
    let client = Client::connect(envoy.addr(), Protocol::Http1).await;
    let pending = client.start(&request).await.unwrap();
    barrier.wait_arrived(1, PATIENCE).await;
    (key, request, pending, barrier)
}

/// The end of a held request: the client gets the upstream's answer in time. How long that took.
async fn let_go(pending: Pending, barrier: &Barrier) -> (Response, Duration) {
    let start = Instant::now();
    barrier.open();
    let answer = pending.finish().await.unwrap();
    let took = start.elapsed();
    assert!(took < BOUND, "{took:?}: {answer:?}");
    assert_eq!((answer.status, answer.header("idempotent-replayed")), (200, None), "{answer:?}");
    (answer, took)
}

async fn wait_outbox_empty(envoy: &Envoy) {
    poll_until(PATIENCE, "the outbox is empty", async || (envoy.metric("outbox").await == 0).then_some(()))
        .await;
}

/// How often Redis said `-<error>`.
async fn errors_said(redis: &Redis, prologue: &str, error: &str) -> u64 {
    let text = redis.command(&format!("{prologue}INFO errorstats")).await;
    let prefix = format!("errorstat_{error}:count=");
    text.lines().find_map(|line| line.strip_prefix(&prefix)?.trim().parse().ok()).unwrap_or(0)
}

async fn records(redis: &Redis) -> String {
    redis.command("DBSIZE").await.lines().next().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_redis_refuses_requests_until_it_is_back() {
    let (mut redis, origin, envoy) = world(Setup::default()).await;
    redis.kill();
    let (key, request) = request("/pay");
    for _ in 0..8 {
        assert_unavailable(&send(&envoy, &request).await);
    }
    assert_eq!(origin.requests().len(), 0);
    envoy.wait_metric("store_errors", 8, PATIENCE).await;
    envoy.wait_log("Redis: operations failed: ", PATIENCE).await;
    redis.restart().await;
    let first = send_until_ok(&envoy, &request).await;
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_redis_requests_pass_unprotected_where_that_is_allowed() {
    let (mut redis, origin, envoy) = world(Setup { on_store_error: "allow", ..Setup::default() }).await;
    for (nth, dies) in [false, true].into_iter().enumerate() {
        if dies {
            redis.kill();
        } else {
            redis.pause();
        }
        let (key, request) = request("/pay");
        let first = send(&envoy, &request).await;
        assert_eq!((first.status, first.header("idempotency-protection")), (200, Some("none")), "{first:?}");
        let seen = origin.requests();
        assert_eq!(seen.len(), nth + 1);
        assert_eq!(seen[nth].header("idempotency-protection"), Some("none"));
        envoy.wait_metric("unprotected", nth as u64 + 1, PATIENCE).await;
        assert!(envoy.metric("store_errors").await > nth as u64);
        // The exchange kept its owner: what it did is written as soon as somebody takes it.
        if dies {
            redis.restart().await;
        } else {
            redis.resume();
        }
        wait_outbox_empty(&envoy).await;
        assert_eq!(records(&redis).await, ":1");
        assert_replayed(&envoy, &origin, &key, &request, &first).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_somebody_else_wrote_is_refused_even_where_unprotected_is_allowed() {
    let (redis, origin, envoy) = world(Setup { on_store_error: "allow", ..Setup::default() }).await;
    let (key, request) = request("/pay");
    assert_eq!(send(&envoy, &request).await.status, 200);
    let keys = redis.command("KEYS *").await;
    let record = keys.lines().nth(2).unwrap();
    for change in [
        format!("HSET {record} v 99"),
        format!("DEL {record}\r\nHSET {record} theirs 1"),
        format!("DEL {record}\r\nSET {record} 1"),
    ] {
        redis.command(&change).await;
        assert_unavailable(&send(&envoy, &request).await);
        assert_eq!(origin.executions_of(&key), 1, "{change}");
    }
    assert_eq!(envoy.metric("unprotected").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_dies_during_an_execution_and_comes_back_empty_gets_its_result() {
    let (mut redis, origin, envoy) = world(Setup::default()).await;
    let (key, request, pending, barrier) = held(&envoy, &origin, "/held").await;
    redis.kill();
    let (first, _) = let_go(pending, &barrier).await;
    envoy.wait_metric("outbox_queued", 1, PATIENCE).await;
    assert_unavailable(&send(&envoy, &request).await);
    redis.restart().await;
    wait_outbox_empty(&envoy).await;
    assert_eq!(records(&redis).await, ":1");
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_hangs_during_a_claim_costs_a_timeout_and_leaves_the_key_usable() {
    let (redis, origin, envoy) = world(Setup::default()).await;
    // Redis knows the scripts: it makes the claim once it goes on, though nobody waits for it any more.
    let (_, warm) = request("/pay");
    assert_eq!(send(&envoy, &warm).await.status, 200);
    redis.pause();
    let (key, request) = request("/pay");
    assert_unavailable(&send(&envoy, &request).await);
    assert_eq!(origin.executions_of(&key), 0);
    envoy.wait_metric("store_errors", 1, PATIENCE).await;
    envoy.wait_log("Redis: operations failed: ", PATIENCE).await;
    redis.resume();
    let first = send_until_ok(&envoy, &request).await;
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
    wait_outbox_empty(&envoy).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_while_its_claim_is_asked_for_leaves_no_claim() {
    const ASKED: &str = "redis.redis.downstream_rq_total";
    let (redis, origin, envoy) = world(Setup::patient()).await;
    // Redis knows the scripts: the claim is made by the first command.
    let (_, warm) = request("/pay");
    assert_eq!(send(&envoy, &warm).await.status, 200);
    for protocol in Protocol::BOTH {
        redis.pause();
        let (asked, logged) = (envoy.stat(ASKED).await, envoy.access_log_lines().len());
        let (key, request) = request("/pay");
        let client = Client::connect(envoy.addr(), protocol).await;
        let pending = client.start(&request).await.unwrap();
        envoy.wait_stat(ASKED, asked + 1, PATIENCE).await;
        pending.abort();
        poll_until(PATIENCE, "the request's line in the access log", async || {
            (envoy.access_log_lines().len() > logged).then_some(())
        })
        .await;
        redis.resume();
        // The claim's lease is a minute.
        let first = send_until_ok(&envoy, &request).await;
        assert_replayed(&envoy, &origin, &key, &request, &first).await;
        wait_outbox_empty(&envoy).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_hangs_during_a_completion_costs_a_timeout_and_the_result_is_kept() {
    let (redis, origin, envoy) = world(Setup::default()).await;
    let (key, request, pending, barrier) = held(&envoy, &origin, "/held").await;
    redis.pause();
    let (first, took) = let_go(pending, &barrier).await;
    assert!(took >= Duration::from_millis(100), "nobody waited for the store: {took:?}");
    envoy.wait_metric("outbox_queued", 1, PATIENCE).await;
    assert_unavailable(&send(&envoy, &request).await);
    redis.resume();
    wait_outbox_empty(&envoy).await;
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
}

/// A Redis that answers, and takes nothing.
struct Refusal {
    name: &'static str,
    begins: &'static str,
    ends: &'static str,
    /// The error that Redis counts.
    error: &'static str,
    /// What the log says.
    cause: &'static str,
}

const REFUSALS: &[Refusal] = &[
    Refusal {
        name: "oom",
        begins: "CONFIG SET maxmemory-policy noeviction\r\nCONFIG SET maxmemory 1",
        ends: "CONFIG SET maxmemory 0",
        error: "OOM",
        cause: "out_of_memory",
    },
    Refusal {
        name: "readonly",
        // Nothing listens on the discard port.
        begins: "REPLICAOF 127.0.0.1 9",
        ends: "REPLICAOF NO ONE",
        error: "READONLY",
        cause: "read_only",
    },
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_takes_no_writes_refuses_claims_and_gets_results_later() {
    let (redis, origin, envoy) = world(Setup::default()).await;
    for refusal in REFUSALS {
        let name = refusal.name;
        let begin = redis.command(refusal.begins).await;
        assert!(begin.starts_with("+OK"), "{name}: {begin}");
        let (key, request) = request("/pay");
        assert_unavailable(&send(&envoy, &request).await);
        assert_eq!(origin.executions_of(&key), 0, "{name}");
        assert!(errors_said(&redis, "", refusal.error).await >= 1, "{name}");
        envoy.wait_log(&format!("Redis: operations failed: {}", refusal.cause), PATIENCE).await;
        redis.command(refusal.ends).await;
        let first = send_until_ok(&envoy, &request).await;
        assert_replayed(&envoy, &origin, &key, &request, &first).await;

        let (key, request, pending, barrier) = held(&envoy, &origin, &format!("/held/{name}")).await;
        let queued = envoy.metric("outbox_queued").await;
        redis.command("CONFIG RESETSTAT").await;
        redis.command(refusal.begins).await;
        let (first, _) = let_go(pending, &barrier).await;
        envoy.wait_metric("outbox_queued", queued + 1, PATIENCE).await;
        assert!(errors_said(&redis, "", refusal.error).await >= 1, "{name}");
        redis.command(refusal.ends).await;
        wait_outbox_empty(&envoy).await;
        assert_replayed(&envoy, &origin, &key, &request, &first).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_redis_forgot_are_sent_again() {
    let (redis, origin, envoy) = world(Setup::default()).await;
    // From here on Redis knows the scripts.
    let (_, warm) = request("/pay");
    assert_eq!(send(&envoy, &warm).await.status, 200);
    let (key, request, pending, barrier) = held(&envoy, &origin, "/held").await;
    assert!(redis.command("CONFIG RESETSTAT\r\nSCRIPT FLUSH").await.starts_with("+OK\r\n+OK"));
    let (first, _) = let_go(pending, &barrier).await;
    assert!(errors_said(&redis, "", "NOSCRIPT").await >= 1);
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
    assert_eq!(envoy.metric("outbox_queued").await, 0);
    assert_eq!(envoy.metric("store_errors").await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_is_configured_on_envoys_redis_cluster() {
    const ADMIT: &str = "AUTH secret\r\n";
    let (redis, origin) = (Redis::start_with(&["--requirepass", "secret"]).await, Origin::start().await);
    let with_password = |password: &str| Setup {
        link: json!({"redis_cluster": {"typed_extension_protocol_options": {"envoy.filters.network.redis_proxy": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProtocolOptions",
            "auth_password": {"inline_string": password},
        }}}}),
        ..Setup::default()
    };
    for (setup, error) in [(Setup::default(), "NOAUTH"), (with_password("wrong"), "WRONGPASS")] {
        let envoy = setup.start(redis.addr(), &origin).await;
        let (key, request) = request("/pay");
        assert_unavailable(&send(&envoy, &request).await);
        assert_eq!(origin.executions_of(&key), 0, "{error}");
        envoy.wait_log("Redis: operations failed: not_allowed", PATIENCE).await;
        assert!(errors_said(&redis, ADMIT, error).await >= 1, "{error}");
    }
    let envoy = with_password("secret").start(redis.addr(), &origin).await;
    let (key, request) = request("/pay");
    let first = send(&envoy, &request).await;
    assert_eq!(first.status, 200, "{first:?}\n{}", envoy.log_text());
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_is_configured_on_envoys_redis_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    for name in ["redis", "stranger"] {
        let made = std::process::Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "2", "-subj", &format!("/CN={name}"), "-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-keyout", &file(&format!("{name}.key")), "-out", &file(&format!("{name}.crt"))])
            .output()
            .expect("openssl is missing");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    let tls_port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let (port, certificate, private_key) = (tls_port.to_string(), file("redis.crt"), file("redis.key"));
    let arguments = [
        "--tls-port",
        &port,
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &private_key,
        "--tls-auth-clients",
        "no",
    ];
    let arguments = [&arguments[..], &["--tls-ca-cert-file", &certificate]].concat();
    let (redis, origin) = (Redis::start_with(&arguments).await, Origin::start().await);
    let tls = |trusted: &str| Setup {
        link: json!({"redis_cluster": {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            "common_tls_context": {"validation_context": {"trusted_ca": {"filename": file(trusted)}}},
        }}}}),
        ..Setup::patient()
    };
    let addr = SocketAddr::from(([127, 0, 0, 1], tls_port));
    for (name, setup) in [("no TLS", Setup::default()), ("another's certificate", tls("stranger.crt"))] {
        let envoy = setup.start(addr, &origin).await;
        let (key, request) = request("/pay");
        assert_unavailable(&send_within(&envoy, &request, BOUND * 2).await);
        assert_eq!(origin.executions_of(&key), 0, "{name}");
        envoy.wait_log("Redis: operations failed: ", PATIENCE).await;
    }
    let envoy = tls("redis.crt").start(addr, &origin).await;
    let (key, request) = request("/pay");
    let first = send(&envoy, &request).await;
    assert_eq!(first.status, 200, "{first:?}\n{}", envoy.log_text());
    assert!(envoy.stat("cluster.redis.ssl.handshake").await >= 1);
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
    assert_eq!(records(&redis).await, ":1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_reply_is_asked_for_again_and_nothing_runs_twice() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let way = Way::start(redis.addr()).await;
    let envoy = Setup::patient().start(way.addr, &origin).await;
    for word in ["claimed", "applied"] {
        for hangs in [false, true] {
            let faults = way.faults();
            way.set(Mode::Lose { word, hangs });
            let (key, request) = request("/pay");
            let first = send_within(&envoy, &request, BOUND * 2).await;
            assert_eq!(first.status, 200, "{word} {hangs}: {first:?}");
            assert_eq!(way.faults(), faults + 1, "{word} {hangs}");
            assert_eq!(origin.executions_of(&key), 1, "{word} {hangs}");
            assert_replayed(&envoy, &origin, &key, &request, &first).await;
        }
    }
    assert_eq!(origin.requests().len(), 4);
    for request in origin.requests() {
        assert_eq!(request.header("x-idempotency-attempt").unwrap_or("1"), "1");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_redis_is_too_slow_only_for_a_short_timeout() {
    const SLOW: Duration = Duration::from_millis(500);
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let way = Way::start(redis.addr()).await;
    let (hasty, patient) =
        tokio::join!(Setup::default().start(way.addr, &origin), Setup::patient().start(way.addr, &origin));
    // Redis knows the scripts: one command for each operation.
    let (_, warm) = request("/pay");
    assert_eq!(send(&patient, &warm).await.status, 200);

    way.set(Mode::Delay(SLOW));
    let (refused_key, refused) = request("/pay");
    assert_unavailable(&send(&hasty, &refused).await);
    assert_eq!(origin.executions_of(&refused_key), 0);
    assert!(way.faults() >= 1);
    hasty.wait_metric("store_errors", 1, PATIENCE).await;

    let (key, request) = request("/pay");
    let start = Instant::now();
    let first = send_within(&patient, &request, BOUND * 2).await;
    assert_eq!(first.status, 200, "{first:?}");
    assert!(start.elapsed() >= SLOW * 2, "a claim and a completion: {:?}", start.elapsed());
    assert_replayed(&patient, &origin, &key, &request, &first).await;

    way.set(Mode::Pass);
    let first = send_until_ok(&hasty, &refused).await;
    assert_replayed(&hasty, &origin, &refused_key, &refused, &first).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reply_cut_in_the_middle_is_never_passed_on() {
    const LENGTH: usize = 100 * 1024;
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let way = Way::start(redis.addr()).await;
    let envoy = Setup::patient().start(way.addr, &origin).await;
    let body: Vec<u8> = (0..LENGTH).map(|place| b'a' + u8::try_from(place % 26).unwrap()).collect();
    origin.on("/big", Behaviour::Respond(Reply::ok(body.clone())));
    let (key, request) = request("/big");
    let first = send(&envoy, &request).await;
    assert_eq!((first.status, first.body == body), (200, true));

    for _ in 0..4 {
        // Once: the second try gets it whole.
        let faults = way.faults();
        way.set(Mode::Cut { after: LENGTH / 2, always: false });
        assert_replayed(&envoy, &origin, &key, &request, &first).await;
        assert_eq!(way.faults(), faults + 1);
        // Every time: then there is nothing to replay.
        way.set(Mode::Cut { after: LENGTH / 2, always: true });
        assert_unavailable(&send_within(&envoy, &request, BOUND * 2).await);
        assert!(way.faults() > faults + 1);
        assert_eq!(origin.executions_of(&key), 1);
        way.set(Mode::Pass);
        assert_replayed(&envoy, &origin, &key, &request, &first).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_read_once_is_replayed_without_redis() {
    let (mut redis, origin) = (Redis::start().await, Origin::start().await);
    let near = Setup { store: json!({"near_cache": {}}), ..Setup::default() };
    let (near, far) =
        tokio::join!(near.start(redis.addr(), &origin), Setup::default().start(redis.addr(), &origin));
    let (key, request) = request("/pay");
    let first = send(&far, &request).await;
    assert_eq!(first.status, 200, "{first:?}");
    assert_replayed(&near, &origin, &key, &request, &first).await;
    assert_eq!(near.metric("near_cache.hits").await, 0);
    near.wait_metric("near_cache.misses", 1, PATIENCE).await;

    redis.kill();
    // Whichever worker read it: the cache is the process's.
    for _ in 0..8 {
        assert_replayed(&near, &origin, &key, &request, &first).await;
    }
    near.wait_metric("near_cache.hits", 8, PATIENCE).await;
    let other = send(&near, &Request::post("/pay").key(&key).body("amount=2")).await;
    assert_eq!((other.status, other.problem_type().as_deref()), (422, Some("mismatch")), "{other:?}");
    assert_unavailable(&send(&far, &request).await);
    assert_eq!(far.metric("near_cache.hits").await, 0);
    assert_eq!(origin.executions_of(&key), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lease_of_a_long_execution_is_renewed_in_redis() {
    const LEASE: Duration = Duration::from_secs(1);
    let (redis, origin, envoy) = world(Setup { rule: json!({"lock_ttl": "1s"}), ..Setup::default() }).await;
    let (key, request, pending, barrier) = held(&envoy, &origin, "/held").await;
    let claimed = Instant::now();
    let keys = redis.command("KEYS *").await;
    let record = keys.lines().nth(2).unwrap().to_owned();
    let lease_until = async || -> u64 {
        let reply = redis.command(&format!("HGET {record} lease_until")).await;
        reply.lines().nth(1).unwrap().parse().unwrap()
    };
    let first_lease = lease_until().await;
    poll_until(PATIENCE, "more than three leases", async || {
        let duplicate = send(&envoy, &request).await;
        assert_eq!(
            (duplicate.status, duplicate.problem_type().as_deref()),
            (409, Some("in-flight")),
            "after {:?}: {duplicate:?}",
            claimed.elapsed()
        );
        (claimed.elapsed() > LEASE * 7 / 2).then_some(())
    })
    .await;
    assert!(lease_until().await >= first_lease + 2000);
    let (first, _) = let_go(pending, &barrier).await;
    assert_replayed(&envoy, &origin, &key, &request, &first).await;
    assert_eq!(envoy.metric("stale_writes").await, 0);
}

/// What is done with the replies of Redis on their way to Envoy.
#[derive(Debug, Clone, Copy)]
enum Mode {
    Pass,
    /// Loses the next reply with this word in it, and closes the connection, or leaves it open and silent.
    Lose {
        word: &'static str,
        hangs: bool,
    },
    /// Each reply comes so much later.
    Delay(Duration),
    /// Closes a connection once so many bytes went over it in one reply: the next, or every one.
    Cut {
        after: usize,
        always: bool,
    },
}

/// A proxy between Envoy and Redis. It is gone with the test's runtime.
struct Way {
    addr: SocketAddr,
    state: Arc<Mutex<(Mode, usize)>>,
}

impl Way {
    async fn start(redis: SocketAddr) -> Way {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let way = Way { addr: listener.local_addr().unwrap(), state: Arc::new(Mutex::new((Mode::Pass, 0))) };
        let state = Arc::clone(&way.state);
        tokio::spawn(async move {
            while let Ok((envoy, _)) = listener.accept().await {
                let state = Arc::clone(&state);
                tokio::spawn(async move {
                    if let Ok(redis) = TcpStream::connect(redis).await {
                        let _ = carry(envoy, redis, &state).await;
                    }
                });
            }
        });
        way
    }

    fn set(&self, mode: Mode) {
        self.state.lock().unwrap().0 = mode;
    }

    /// How many replies something was done to.
    fn faults(&self) -> usize {
        self.state.lock().unwrap().1
    }
}

/// What becomes of some bytes of a reply.
enum Fate {
    Passes,
    Waits(Duration),
    /// So many pass, then the connection ends.
    Ends(usize),
    /// Nothing passes any more.
    Silence,
}

/// Carries bytes both ways until an end closes, or the mode ends it.
async fn carry(envoy: TcpStream, redis: TcpStream, state: &Mutex<(Mode, usize)>) -> std::io::Result<()> {
    let ((mut from_envoy, mut to_envoy), (mut from_redis, mut to_redis)) =
        (envoy.into_split(), redis.into_split());
    let asks = async {
        tokio::io::copy(&mut from_envoy, &mut to_redis).await?;
        Ok(())
    };
    let answers = async {
        let mut buffer = vec![0; 64 * 1024];
        // Since the last short read: a big reply comes in full reads.
        let mut replied = 0;
        loop {
            let length = from_redis.read(&mut buffer).await?;
            if length == 0 {
                return Ok(());
            }
            let bytes = &buffer[..length];
            match fate(state, bytes, replied) {
                Fate::Passes => {}
                Fate::Waits(time) => tokio::time::sleep(time).await,
                Fate::Ends(length) => return to_envoy.write_all(&bytes[..length]).await,
                Fate::Silence => std::future::pending().await,
            }
            to_envoy.write_all(bytes).await?;
            replied = if bytes.ends_with(b"\r\n") { 0 } else { replied + length };
        }
    };
    tokio::select! {
        result = asks => result,
        result = answers => result,
    }
}

fn fate(state: &Mutex<(Mode, usize)>, bytes: &[u8], replied: usize) -> Fate {
    let mut state = state.lock().unwrap();
    let (mode, faults) = &mut *state;
    match *mode {
        Mode::Lose { word, hangs } if bytes.windows(word.len()).any(|part| part == word.as_bytes()) => {
            *faults += 1;
            *mode = Mode::Pass;
            if hangs { Fate::Silence } else { Fate::Ends(0) }
        }
        Mode::Delay(time) => {
            *faults += 1;
            Fate::Waits(time)
        }
        Mode::Cut { after, always } if replied + bytes.len() > after => {
            *faults += 1;
            if !always {
                *mode = Mode::Pass;
            }
            Fate::Ends(after.saturating_sub(replied))
        }
        Mode::Pass | Mode::Lose { .. } | Mode::Cut { .. } => Fate::Passes,
    }
}
