//! Faults that other layers of this kind had in public between the proxy and Redis, tried on this one. `docs/cases.md`
//! says which case is which; those that other files cover already are not here.

use serde_json::{Value, json};

use crate::requests::trapped;
use crate::support::*;

/// How many commands `redis_proxy` was given.
const ASKED: &str = "redis.redis.downstream_rq_total";
/// How many requests went out to the upstream, whole or not.
const SENT: &str = "cluster.origin.upstream_rq_total";

fn refusal(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

fn ran(answer: &Response) -> bool {
    answer.status == 200 && !answer.is_replay()
}

async fn envoy(redis: &Redis, plugin: Value, change: impl FnOnce(envoy::Builder) -> envoy::Builder) -> Envoy {
    let builder = Envoy::builder().workers(2).plugin(on_redis(plugin, Pace::PATIENT));
    linked(change(builder), redis.addr(), Pace::PATIENT).start().await
}

/// Redis knows the scripts from here on: an operation is one command.
async fn warm(envoy: &Envoy) {
    assert!(ran(&ask(envoy, Protocol::Http1, &Request::post("/warm").key(unique_key())).await));
}

/// A14: whoever has found out what happened can clear a key: the access log says which record it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_finds_a_failed_record_by_the_access_log_and_clears_it() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let envoy = envoy(&redis, default_plugin(), |builder| builder.origin_addr(origin.addr())).await;
    origin.on("/fails", Behaviour::Sequence(vec![Reply::status(500), Reply::echo(200)]));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let path = format!("/fails/{key}");
        let request = Request::post(&path).key(&key).body("amount=1");
        assert_eq!(ask(&envoy, proto, &request).await.status, 500);
        assert_eq!(ask(&envoy, proto, &request).await.kind(), refusal(424, "failed"));
        let line = envoy.wait_access_log(|line| line.ends_with(&path), PATIENCE).await;
        let mark = &line.split("key=").nth(1).unwrap()[..8];
        let found = redis.command(&format!("KEYS idem:{mark}*")).await;
        let names: Vec<&str> = found.lines().filter(|line| line.starts_with("idem:")).collect();
        let [name] = names.as_slice() else { panic!("{found}") };
        assert!(redis.command(&format!("HGET {name} state")).await.contains("failed"));
        assert!(redis.command(&format!("DEL {name}")).await.starts_with(":1"));
        assert!(ran(&ask(&envoy, proto, &request).await));
        assert!(ask(&envoy, proto, &request).await.is_replay());
        assert_eq!(origin.executions_of(&key), 2);
    }
}

/// E09: nothing in Redis names a caller, a key or a path; a body rests there in clear, unless the rule keeps none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_rests_in_redis_names_nobody_and_a_secret_body_need_not_rest_there() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let mut plugin = default_plugin();
    let tokens = json!({
        "name": "tokens", "match": {"methods": ["POST"], "path": {"prefix": "/tokens"}},
        "scope": [{"header": "x-account-id"}], "max_response_body_bytes": 0
    });
    plugin["rules"].as_array_mut().unwrap().insert(0, tokens);
    let envoy = envoy(&redis, plugin, |builder| builder.origin_addr(origin.addr())).await;
    origin.on("/tokens", Behaviour::Respond(Reply::status(201).chunk("the-secret-token")));
    origin.on("/pay", Behaviour::Respond(Reply::status(201).chunk("an-ordinary-answer")));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request =
            |path: &str| Request::post(path).account("callers-name").key(&key).body("the-request-body");
        let first = ask(&envoy, proto, &request("/tokens")).await;
        assert_eq!((first.status, first.text().as_str()), (201, "the-secret-token"));
        let retry = ask(&envoy, proto, &request("/tokens")).await;
        assert_eq!(retry.kind(), refusal(409, "response-not-kept"), "{retry:?}");
        assert!(!retry.text().contains("secret"), "{retry:?}");
        assert_eq!(origin.executions_of(&key), 1);
        let key = unique_key();
        let pay = Request::post("/pay").account("callers-name").key(&key).body("the-request-body");
        assert_eq!(ask(&envoy, proto, &pay).await.status, 201);
    }
    let script = "local all = '' for _, k in ipairs(redis.call('KEYS', '*')) do \
        all = all .. k .. ' ' .. table.concat(redis.call('HGETALL', k), ' ') .. ' ' end return all";
    let all = redis.command(&format!("EVAL \"{script}\" 0")).await;
    assert_eq!(all.matches("state completed").count(), 4, "{all}");
    assert_eq!(all.matches("an-ordinary-answer").count(), 2, "{all}");
    for secret in
        ["the-secret-token", "callers-name", "the-request-body", "/tokens", "/pay", "api.example.com"]
    {
        assert!(!all.contains(secret), "{secret} is in {all}");
    }
    for request in origin.requests() {
        assert!(!all.contains(std::str::from_utf8(request.key().unwrap()).unwrap()), "{all}");
    }
}

/// G02: Envoy's own time-out answers while the claim is asked for; the claim's answer makes no second one, and no claim
/// is left behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoys_own_time_out_while_a_claim_is_asked_for_is_the_only_answer() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let envoy = envoy(&redis, default_plugin(), |builder| {
        builder.stream_idle_timeout("0.4s").origin_addr(origin.addr())
    })
    .await;
    warm(&envoy).await;
    for (nth, proto) in (1..).zip(Protocol::BOTH) {
        redis.pause();
        let (key, other_key) = (unique_key(), unique_key());
        let request = Request::post("/pay").key(&key).body("amount=1");
        let mut client = Client::connect(envoy.addr(), proto).await;
        let answer = client.send(&request).await.unwrap();
        assert!([408, 504].contains(&answer.status) && answer.problem_type().is_none(), "{answer:?}");
        let timed_out = |line: &str| line.contains("stream_idle_timeout");
        poll_until(PATIENCE, "the time-out in the access log", async || {
            (envoy.access_log_lines().iter().filter(|line| timed_out(line)).count() == nth).then_some(())
        })
        .await;
        assert_eq!(origin.executions_of(&key), 0);
        redis.resume();
        // The connection, where it lives on, is in step.
        if answer.header("connection") != Some("close") && proto == Protocol::Http2 {
            assert!(ran(&client.send(&Request::post("/pay").key(&other_key).body("b")).await.unwrap()));
        }
        let (retry, _) = ask_until_decided(&envoy, proto, &request).await;
        assert!(ran(&retry), "{retry:?}");
        assert_eq!(origin.executions_of(&key), 1);
        assert!(!trapped(&envoy), "{}", envoy.log_text());
        assert_eq!(envoy.metric("unexpected_events").await, 0);
    }
}

/// An external processor that takes a request's body piece by piece and lets each pass.
async fn patient_processor() -> std::net::SocketAddr {
    // ProcessingResponse {request_body: {}}, in a gRPC frame.
    const MESSAGE: &[u8] = b"\0\0\0\0\x02\x1a\0";
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut server = ::h2::server::Builder::new();
                server.initial_window_size(16 << 20).initial_connection_window_size(16 << 20);
                let mut connection = server.handshake::<_, bytes::Bytes>(socket).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    tokio::spawn(async move {
                        let head = http::Response::builder().header("content-type", "application/grpc");
                        let mut replies = respond.send_response(head.body(()).unwrap(), false).unwrap();
                        let (mut body, mut unread) = (request.into_body(), Vec::new());
                        while let Some(Ok(data)) = body.data().await {
                            let _ = body.flow_control().release_capacity(data.len());
                            unread.extend_from_slice(&data);
                            while unread.len() >= 5 {
                                let length = u32::from_be_bytes(unread[1..5].try_into().unwrap()) as usize;
                                if unread.len() < 5 + length {
                                    break;
                                }
                                unread.drain(..5 + length);
                                let _ = replies.send_data(bytes::Bytes::from_static(MESSAGE), false);
                            }
                        }
                        let mut trailers = http::HeaderMap::new();
                        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
                        let _ = replies.send_trailers(trailers);
                    });
                }
            });
        }
    });
    addr
}

/// G03, G06: while Redis is slow nothing of a body goes on; then all of it does, or nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_held_while_redis_is_slow_and_go_on_whole_or_not_at_all() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let processor = json!({
        "name": "ext_proc",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
            "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}},
            "message_timeout": "10s",
            "processing_mode": {
                "request_header_mode": "SKIP", "response_header_mode": "SKIP", "request_body_mode": "STREAMED"
            }
        }
    });
    let processing = envoy::config::cluster("processor", patient_processor().await, true);
    let plugin = plugin_with(json!({"max_request_body_bytes": 2 << 20}));
    let envoy = envoy(&redis, plugin, |builder| {
        builder
            .origin_addr(origin.addr())
            .filters_after(vec![processor])
            .extra_cluster(processing)
            .per_connection_buffer_limit_bytes(4 << 20)
    })
    .await;
    warm(&envoy).await;
    let mut rng = Rng::new(6);
    for proto in Protocol::BOTH {
        for (length, chunk) in [(1_600_000, 16_384), (900 << 10, 8192), (160_000, 1000)] {
            let what = format!("{proto:?} {length}");
            let key = unique_key();
            let body = rng.bytes(length);
            let request = Request::post("/large").key(&key).body(&body).chunked(&[chunk]);
            let mut other = request.clone();
            *other.body.last_mut().unwrap() ^= 1;
            let mut first: Option<Response> = None;
            for (request, duplicate) in [(&request, false), (&request, true), (&other, true)] {
                let (asked, sent) = (envoy.stat(ASKED).await, envoy.stat(SENT).await);
                redis.pause();
                let pending = tokio::spawn({
                    let (addr, request) = (envoy.addr(), request.clone());
                    async move { send_once(addr, proto, &request).await }
                });
                envoy.wait_stat(ASKED, asked + 1, PATIENCE).await;
                assert_eq!(envoy.stat(SENT).await, sent, "{what}");
                redis.resume();
                let answer = pending.await.unwrap().unwrap();
                assert_eq!(envoy.stat(SENT).await, sent + u64::from(!duplicate), "{what}");
                match &first {
                    None => {
                        assert!(ran(&answer), "{what}: {answer:?}");
                        let seen = origin.requests().pop().unwrap();
                        assert!(seen.complete && seen.body == body, "{what}: {} bytes", seen.body.len());
                        first = Some(answer);
                    }
                    Some(first) if request.body == body => {
                        assert_eq!((answer.is_replay(), &answer.body), (true, &first.body), "{what}");
                    }
                    Some(_) => assert_eq!(answer.kind(), refusal(422, "mismatch"), "{what}"),
                }
                assert_eq!(origin.executions_of(&key), 1, "{what}");
            }
        }
    }
    assert!(!trapped(&envoy), "{}", envoy.log_text());
}

/// G12: a callout that fails at once, for want of a host anywhere on the way, is a store failure like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_way_to_redis_without_hosts_is_a_store_failure() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let cases = [
        ("link_cluster", "deny"),
        ("link_cluster", "allow"),
        ("proxy_cluster", "deny"),
        ("redis_cluster", "deny"),
    ];
    all_at_once(cases.map(|(empty, on_store_error)| {
        let (redis, origin) = (&redis, &origin);
        async move {
            let mut plugin = on_redis(default_plugin(), Pace::BRISK);
            plugin["on_store_error"] = json!(on_store_error);
            let builder = Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr());
            let envoy = with_changed_link(builder, redis.addr(), |name, part| {
                if name == empty {
                    part["load_assignment"]["endpoints"] = json!([]);
                }
            })
            .start()
            .await;
            for proto in Protocol::BOTH {
                let what = format!("{empty} {on_store_error} {proto:?}");
                let key = unique_key();
                let request = Request::post("/pay").key(&key).body("amount=1");
                for runs in 1..=2 {
                    let answer = ask(&envoy, proto, &request).await;
                    if on_store_error == "deny" {
                        assert_eq!(answer.kind(), refusal(503, "store-unavailable"), "{what}: {answer:?}");
                        assert_eq!(origin.executions_of(&key), 0, "{what}");
                    } else {
                        let mark = answer.header("idempotency-protection");
                        assert_eq!((answer.status, mark), (200, Some("none")), "{what}: {answer:?}");
                        assert_eq!(origin.executions_of(&key), runs, "{what}");
                    }
                }
            }
            assert!(!trapped(&envoy), "{empty}: {}", envoy.log_text());
        }
    }))
    .await;
}

/// G13: where the head decides, the claim's answer comes at any point of the body; none of either is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_answered_between_the_pieces_of_a_body_lose_none_of_them() {
    const LANES: usize = 8;
    const ROUNDS: usize = 125;
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let plugin = plugin_with(json!({"fingerprint": {"body": false, "headers": ["content-digest"]}}));
    let envoy = envoy(&redis, plugin, |builder| builder.origin_addr(origin.addr())).await;
    let pieces: [&[u8]; 4] = [&[b'a'; 1500], b"b", &[b'c'; 9000], b"end"];
    let lanes: Vec<_> = (0..LANES)
        .map(|lane| {
            let addr = envoy.addr();
            tokio::spawn(async move {
                let mut client = Client::connect(addr, Protocol::BOTH[lane % 2]).await;
                let mut keys = Vec::new();
                for round in 0..ROUNDS {
                    let key = unique_key();
                    let head = Request::post("/pay").key(&key);
                    let pause = async |piece: usize| {
                        for _ in 0..(round * 7 + piece * 3) % 40 {
                            tokio::task::yield_now().await;
                        }
                    };
                    let answer = match &mut client {
                        Client::Http1(client) => {
                            // The encoding ends with the end of an empty body, which is still to come.
                            let head = client::h1::encode(&head.chunked(&[1]));
                            client.write_raw(head.strip_suffix(b"0\r\n\r\n").unwrap()).await.unwrap();
                            for (nth, piece) in pieces.iter().enumerate() {
                                pause(nth).await;
                                let framed =
                                    [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
                                client.write_raw(&framed).await.unwrap();
                            }
                            client.write_raw(b"0\r\n\r\n").await.unwrap();
                            client.read_response().await.unwrap()
                        }
                        Client::Http2(client) => {
                            let mut stream = client.open(&head.no_content_length(), true).await.unwrap();
                            for (nth, piece) in pieces.iter().enumerate() {
                                pause(nth).await;
                                stream.send_data(piece, nth + 1 == pieces.len()).await.unwrap();
                            }
                            stream.response().await.unwrap()
                        }
                    };
                    assert!(ran(&answer), "lane {lane}, round {round}: {answer:?}");
                    keys.push(key);
                }
                keys
            })
        })
        .collect();
    let mut total = 0;
    for lane in lanes {
        for key in tokio::time::timeout(PATIENCE * 2, lane).await.expect("no lane hangs").unwrap() {
            assert_eq!(origin.executions_of(&key), 1);
            total += 1;
        }
    }
    assert_eq!(total, LANES * ROUNDS);
    let body = pieces.concat();
    assert!(origin.requests().iter().all(|seen| seen.complete && seen.body == body));
    assert_eq!(envoy.metric("unexpected_events").await, 0);
    assert!(!trapped(&envoy), "{}", envoy.log_text());
}

/// H02, H04, H05: a record of any bytes and any size that the rule keeps comes back from Redis whole, although the link
/// uses each of its connections once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_of_every_size_come_back_from_redis_whole() {
    let plugin = plugin_with(json!({"max_response_body_bytes": 2 << 20}));
    let world = Deployment::start(Store::Redis, plugin, |builder| builder).await;
    let mut rng = Rng::new(4);
    for length in [0, 1, 4 << 10, 20_000, 64 << 10, 1_100_000] {
        let body = rng.bytes(length);
        let path = format!("/size/{length}/");
        world.origin.on(&path, Behaviour::Respond(Reply::ok(body.clone())));
        for proto in Protocol::BOTH {
            let key = unique_key();
            let request = Request::post(&path).key(&key).body("amount=1");
            let first = ask(world.first(), proto, &request).await;
            assert!(ran(&first) && first.body == body, "{proto:?} {length}");
            let replay = ask(world.other(), proto, &request).await;
            assert!(replay.is_replay() && replay.body == body, "{proto:?} {length}: {replay:?}");
            assert_eq!(world.origin.executions_of(&key), 1, "{proto:?} {length}");
        }
    }
    assert_eq!((world.metric("tombstones").await, world.metric("store_errors").await), (0, 0));
    world.settled().await;
}
