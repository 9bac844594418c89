//! Tests of the harness itself, in an Envoy without the filter: what it counts and sees can be relied on.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::support::*;

async fn plain_envoy(origin: &Origin) -> Envoy {
    Envoy::builder().without_filter().origin_addr(origin.addr()).start().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn origin_counts_executions_per_key() {
    let origin = Origin::start().await;
    let envoy = plain_envoy(&origin).await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let path = format!("/pay?by={proto:?}");
        let mut client = Client::connect(envoy.addr(), proto).await;
        let first = client.send(&Request::post(&path).key(&key).body("x")).await.unwrap();
        let second = client.send(&Request::post(&path).key(&key).body("x")).await.unwrap();
        assert_ne!(first.execution(), second.execution());
        assert_eq!(origin.executions_of(&key), 2);
        assert_eq!(origin.executions_of(&unique_key()), 0);
        let seen = origin.requests().pop().unwrap();
        assert_eq!((seen.method.as_str(), &seen.path), ("POST", &path));
        assert_eq!((seen.authority.as_str(), seen.body.as_slice()), ("api.example.com", b"x".as_slice()));
        assert_eq!(seen.header("x-account-id"), Some("alice"));
        let line = envoy.wait_access_log(|line| line.ends_with(&path), PATIENCE).await;
        assert_eq!(line, format!("200 via_upstream - {path}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequence_counts_per_key_and_path() {
    let origin = Origin::start().await;
    origin.on("/", Behaviour::Sequence(vec![Reply::status(503), Reply::ok("fine")]));
    let envoy = plain_envoy(&origin).await;
    for key in [unique_key(), unique_key()] {
        let mut statuses = vec![];
        for _ in 0..3 {
            let request = Request::post("/").key(&key);
            statuses.push(send_once(envoy.addr(), Protocol::Http2, &request).await.unwrap().status);
        }
        assert_eq!(statuses, [503, 200, 200]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn barrier_holds_executions_until_opened() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let envoy = plain_envoy(&origin).await;
    let held = tokio::spawn(burst(envoy.addr(), Protocol::Http1, vec![Request::post("/held"); 3]));
    barrier.wait_arrived(3, PATIENCE).await;
    assert_eq!(origin.executions(|seen| seen.path == "/held"), 3);
    let other = send_once(envoy.addr(), Protocol::Http1, &Request::post("/other")).await.unwrap();
    assert_eq!(other.status, 200);
    assert!(!held.is_finished());
    barrier.open();
    let executions: BTreeSet<u64> =
        held.await.unwrap().into_iter().map(|answer| answer.unwrap().execution()).collect();
    assert_eq!(executions.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_and_repeated_headers_survive_both_protocols() {
    let binary: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    let reply = Reply::status(201)
        .header("set-cookie", "a=1")
        .header("x-bytes", b"a\xffb")
        .header("set-cookie", "b=2")
        .chunk(binary[..10].to_vec())
        .chunk(binary[10..].to_vec());
    for origin_http2 in [false, true] {
        let origin = Origin::start().await;
        origin.on("/", Behaviour::Respond(reply.clone()));
        let options = Envoy::builder().without_filter().origin_http2(origin_http2);
        let envoy = options.origin_addr(origin.addr()).start().await;
        for proto in Protocol::BOTH {
            for sizes in [None, Some([1, 8192, 16384].as_slice())] {
                let request =
                    Request::post("/").header("x-many", "1").header("x-many", b"\xfe").body(&binary);
                let request = sizes.map_or(request.clone(), |sizes| request.chunked(sizes));
                let response = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_eq!(response.status, 201);
                assert_eq!(response.header_lines("set-cookie"), [b"a=1", b"b=2"]);
                assert_eq!(response.header_lines("x-bytes"), [b"a\xffb"]);
                assert_eq!(response.header("content-length"), Some("100000"));
                assert!(response.body == binary);
                let seen = origin.requests().pop().unwrap();
                assert_eq!(seen.header_lines("x-many"), [b"1".as_slice(), b"\xfe"]);
                assert_eq!(seen.header("content-length").is_some(), sizes.is_none());
                assert!(seen.body == binary);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodyless_and_head_responses_are_framed() {
    let origin = Origin::start().await;
    origin
        .on("/204", Behaviour::Respond(Reply::status(204)))
        .on("/empty", Behaviour::Respond(Reply::status(200)))
        .on("/chunked", Behaviour::Respond(Reply::ok("abc").no_content_length()))
        .on("/ok", Behaviour::Respond(Reply::ok("abc")));
    let envoy = plain_envoy(&origin).await;
    for proto in Protocol::BOTH {
        let mut client = Client::connect(envoy.addr(), proto).await;
        for (method, path, status, body, length) in [
            ("POST", "/204", 204, "", None),
            ("POST", "/empty", 200, "", Some("0")),
            ("POST", "/chunked", 200, "abc", None),
            ("HEAD", "/ok", 200, "", Some("3")),
            ("GET", "/ok", 200, "abc", Some("3")),
        ] {
            let response = client.send(&Request::get(path).method(method)).await.unwrap();
            assert_eq!((response.status, response.text().as_str()), (status, body), "{method} {path}");
            assert_eq!(response.header("content-length"), length, "{method} {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trailers_arrive_in_both_directions() {
    let origin = Origin::start().await;
    origin.on("/", Behaviour::Respond(Reply::ok("body").trailer("x-sum", "17")));
    let options = Envoy::builder().without_filter().origin_http2(true).origin_addr(origin.addr());
    let envoy = options.http_protocol_options(json!({"enable_trailers": true})).start().await;
    for proto in Protocol::BOTH {
        let request = Request::post("/").body("abc").chunked(&[2]).trailer("x-check", "1");
        let response = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!(response.text(), "body");
        assert_eq!(response.trailers, Some(vec![(b"x-sum".to_vec(), b"17".to_vec())]), "{proto:?}");
        assert_eq!(origin.requests().pop().unwrap().trailers, [("x-check".to_owned(), b"1".to_vec())]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_is_readable_as_it_arrives() {
    let origin = Origin::start().await;
    let envoy = plain_envoy(&origin).await;
    for proto in Protocol::BOTH {
        let (early, late) = (Barrier::new(), Barrier::new());
        let reply = Reply::status(200).chunk("first").wait(&early).chunk("second").wait(&late);
        origin.on("/", Behaviour::Respond(reply.no_content_length()));
        let client = Client::connect(envoy.addr(), proto).await;
        let mut pending = client.start(&Request::post("/")).await.unwrap();
        assert_eq!(pending.head().await.unwrap().status, 200);
        assert_eq!(pending.chunk().await.unwrap().unwrap(), b"first");
        early.wait_arrived(1, PATIENCE).await;
        early.open();
        assert_eq!(pending.chunk().await.unwrap().unwrap(), b"second");
        late.open();
        assert_eq!(pending.finish().await.unwrap().text(), "firstsecond");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hang_up_is_seen_by_envoy() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/", Behaviour::BarrierEcho(barrier.clone()));
    let envoy = plain_envoy(&origin).await;
    for (nth, proto) in Protocol::BOTH.into_iter().enumerate() {
        let path = format!("/{proto:?}");
        let client = Client::connect(envoy.addr(), proto).await;
        let pending = client.start(&Request::post(&path).body("abc")).await.unwrap();
        barrier.wait_arrived(nth + 1, PATIENCE).await;
        pending.abort();
        let line = envoy.wait_access_log(|line| line.ends_with(&path), PATIENCE).await;
        assert!(line.starts_with("0 ") && line.contains("remote"), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_off_request_is_no_execution() {
    let origin = Origin::start().await;
    let envoy = plain_envoy(&origin).await;
    let mut client = H1::connect(envoy.addr()).await.unwrap();
    client.write_raw(b"POST /h1 HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nabc").await.unwrap();
    envoy.wait_stat("cluster.origin.upstream_rq_active", 1, PATIENCE).await;
    client.abort();
    let client = H2::connect(envoy.addr()).await.unwrap();
    let mut stream = client.open(&Request::post("/h2").no_content_length(), true).await.unwrap();
    stream.send_data(b"abc", false).await.unwrap();
    envoy.wait_stat("cluster.origin.upstream_rq_total", 2, PATIENCE).await;
    stream.reset();
    // The connection outlives its stream.
    assert_eq!(client.send(&Request::post("/whole")).await.unwrap().status, 200);
    poll_until(PATIENCE, "both broken-off requests", async || (origin.requests().len() == 3).then_some(()))
        .await;
    assert_eq!(origin.executions(|_| true), 1);
    assert_eq!(origin.executions(|seen| seen.path == "/whole"), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_worker_serves_under_64_connections() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().without_filter().workers(4).origin_addr(origin.addr()).start().await;
    assert_eq!(envoy.workers_that_served().await, 0);
    for answer in burst(envoy.addr(), Protocol::Http1, vec![Request::post("/"); 64]).await {
        assert_eq!(answer.unwrap().status, 200);
    }
    assert_eq!(envoy.workers_that_served().await, 4);
    assert_eq!(envoy.stat("http.main.downstream_rq_2xx").await, 64);
    assert_eq!(envoy.metric("no_such_metric").await, 0);
    assert!(envoy.rss_bytes() > 1 << 20);
}

fn answering(body: &str) -> Vec<Value> {
    vec![json!({
        "match": {"prefix": "/"},
        "direct_response": {"status": 200, "body": {"inline_string": body}}
    })]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_reaches_every_worker_before_it_returns() {
    let mut envoy = Envoy::builder().without_filter().workers(4).routes(answering("0")).start().await;
    for round in 1..=3 {
        envoy.reload(|main| main.routes = answering(&round.to_string())).await.unwrap();
        for answer in burst(envoy.addr(), Protocol::Http1, vec![Request::post("/"); 16]).await {
            assert_eq!(answer.unwrap().text(), round.to_string());
        }
    }
    let refused = envoy.reload(|main| main.hcm_patch = json!({"no_such_field": 1})).await.unwrap_err();
    assert!(refused.contains("no_such_field"), "{refused}");
    let answer = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(answer.text(), "3");
    envoy.wait_drained(PATIENCE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn further_listeners_have_addresses_of_their_own() {
    let mut second = ListenerSpec::new("second", None);
    second.routes = answering("second");
    let envoy = Envoy::builder().without_filter().routes(answering("main")).listener(second).start().await;
    for (listener, body) in [("main", "main"), ("second", "second")] {
        let answer = send_once(envoy.addr_of(listener), Protocol::Http2, &Request::post("/")).await;
        assert_eq!(answer.unwrap().text(), body);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restart_keeps_the_address() {
    let origin = Origin::start().await;
    let mut envoy = plain_envoy(&origin).await;
    let (addr, pid) = (envoy.addr(), envoy.pid());
    let mut client = Client::connect(addr, Protocol::Http1).await;
    assert_eq!(client.send(&Request::post("/")).await.unwrap().status, 200);
    envoy.kill9();
    assert!(!envoy.is_running());
    assert!(client.send(&Request::post("/")).await.is_err());
    envoy.restart().await;
    assert_ne!(envoy.pid(), pid);
    assert_eq!(send_once(addr, Protocol::Http1, &Request::post("/")).await.unwrap().status, 200);
    envoy.stop().await;
    envoy.restart().await;
    assert_eq!(send_once(addr, Protocol::Http1, &Request::post("/")).await.unwrap().status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_configuration_gives_the_log() {
    for options in [Envoy::builder(), Envoy::builder().static_listeners()] {
        let options = options.without_filter().hcm_patch(json!({"no_such_field": 1}));
        let log = options.try_start().await.err().expect("a refusal");
        assert!(log.contains("no_such_field"), "{log}");
    }
    let envoy =
        Envoy::builder().without_filter().static_listeners().routes(answering("static")).start().await;
    let answer = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(answer.text(), "static");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_response_is_told_from_a_whole_one() {
    let origin = RawOrigin::start(RawReply::whole(200, &[("x-bytes", b"\xff")], b"whole")).await;
    let envoy = Envoy::builder().without_filter().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/").key(&key).body("abc").chunked(&[2]);
        origin.set(RawReply::whole(200, &[("x-bytes", b"\xff")], b"whole"));
        let whole = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!(
            (whole.text().as_str(), whole.header_lines("x-bytes")),
            ("whole", vec![b"\xff".as_slice()])
        );
        for end in [End::Close, End::Reset] {
            origin.set(RawReply::truncated(100, b"ten bytes!", end));
            let cut = send_once(envoy.addr(), proto, &request).await.unwrap_err();
            assert!(cut.is_truncated(), "{proto:?} {end:?}: {cut:?}");
            origin.set(RawReply::new("", end));
            let none = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(none.status, 503);
            assert!(none.text().contains("reset"), "{}", none.text());
        }
        assert_eq!(origin.executions_of(&key), 5);
        assert!(origin.requests().iter().all(|seen| seen.body == b"abc"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn aborted_reply_is_truncated() {
    for origin_http2 in [false, true] {
        let origin = Origin::start().await;
        let options = Envoy::builder().without_filter().origin_http2(origin_http2);
        let envoy = options.origin_addr(origin.addr()).start().await;
        for proto in Protocol::BOTH {
            let sent = Barrier::new();
            let reply = Reply::status(200).chunk("partial").wait(&sent).abort();
            origin.on("/", Behaviour::Respond(reply.no_content_length()));
            let client = Client::connect(envoy.addr(), proto).await;
            let mut pending = client.start(&Request::post("/")).await.unwrap();
            pending.head().await.unwrap();
            assert_eq!(pending.chunk().await.unwrap().unwrap(), b"partial");
            sent.open();
            assert!(pending.finish().await.unwrap_err().is_truncated(), "{proto:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_upstream_is_a_timeout() {
    let origin = RawOrigin::start(RawReply::hang()).await;
    let routes = vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "0.2s"}})];
    let envoy = Envoy::builder().without_filter().routes(routes).origin_addr(origin.addr()).start().await;
    let answer = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(answer.status, 504);
    assert_eq!(origin.executions(|_| true), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_port_opens_later() {
    let port = RefusedPort::new();
    let envoy = Envoy::builder().without_filter().origin_addr(port.addr()).start().await;
    let refused = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(refused.status, 503);
    let origin = port.open();
    let answer = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(answer.status, 200);
    origin.stop().await;
    let stopped = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!(stopped.status, 503);
    let again = Origin::start_at(origin.addr()).await;
    let answer = send_once(envoy.addr(), Protocol::Http1, &Request::post("/")).await.unwrap();
    assert_eq!((answer.status, again.executions(|_| true)), (200, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn early_refusal_of_a_large_body_reaches_the_client() {
    let envoy = Envoy::builder().without_filter().routes(answering("early")).start().await;
    for proto in Protocol::BOTH {
        let request = Request::post("/").body(vec![7; 200_000]).chunked(&[1000]);
        let answer = send_once(envoy.addr(), proto, &request).await;
        assert_eq!(answer.unwrap().text(), "early", "{proto:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[should_panic(expected = "Envoy died of signal 11")]
async fn crash_of_envoy_fails_the_test() {
    let envoy = Envoy::builder().without_filter().start().await;
    // SAFETY: the process is a child of ours that isn't reaped yet.
    unsafe { libc::kill(envoy.pid().cast_signed(), libc::SIGSEGV) };
    poll_until(PATIENCE, "the crash", async || (!is_alive(envoy.pid())).then_some(())).await;
}

const CHILD: &str = "IDEMPOTENCY_E2E_DOOMED";

/// What the child process of `envoy_dies_with_the_test_process` does.
async fn be_the_doomed_process() {
    let envoy = Envoy::builder().without_filter().routes(answering("")).start().await;
    println!("pid={}", envoy.pid());
    std::future::pending::<()>().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoy_dies_with_the_test_process() {
    if std::env::var_os(CHILD).is_some() {
        return be_the_doomed_process().await;
    }
    let left_behind = tempfile::tempdir().unwrap();
    let mut child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "harness::envoy_dies_with_the_test_process", "--nocapture"])
        .env(CHILD, "1")
        .env("TMPDIR", left_behind.path())
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let pid: u32 = loop {
        let line = lines.next_line().await.unwrap().expect("the child's output");
        if let Some((_, pid)) = line.split_once("pid=") {
            break pid.parse().unwrap();
        }
    };
    assert!(is_alive(pid));
    child.kill().await.unwrap();
    poll_until(Duration::from_secs(5), "the end of the orphaned Envoy", async || {
        (!is_alive(pid)).then_some(())
    })
    .await;
}

/// An ended process that nobody has waited for is dead too.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.trim().chars().next()).is_some_and(|state| state != 'Z')
}

#[test]
fn plugin_patch_changes_one_rule_only() {
    let plugin = plugin_with(json!({"lock_ttl": "2s", "match": {"methods": ["PUT"]}}));
    let rule = &plugin["rules"][0];
    assert_eq!((&rule["lock_ttl"], &rule["name"]), (&json!("2s"), &json!("payments")));
    assert_eq!(rule["match"], json!({"methods": ["PUT"], "path": {"prefix": "/"}}));
    assert_eq!(unique_key().len(), 36);
}
