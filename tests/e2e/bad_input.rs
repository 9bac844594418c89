//! Bytes that nobody should send never kill the worker's VM, never slip past the protection, and never harm the next
//! request on the same worker; a bad configuration is refused by name.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::requests::trapped;
use crate::support::*;

/// An exchange that was completed before the abuse, on the only worker; afterwards it must still be protected.
struct Canary {
    requests: Vec<(Protocol, Request, Response)>,
}

impl Canary {
    async fn new(envoy: &Envoy) -> Canary {
        let mut requests = vec![];
        for proto in Protocol::BOTH {
            let request = Request::post("/canary").key(unique_key()).body("amount=1");
            let first = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((first.status, first.header("idempotent-replayed")), (200, None), "{first:?}");
            requests.push((proto, request, first));
        }
        Canary { requests }
    }

    /// No VM trapped; the completed exchanges replay; a new one runs once and replays.
    async fn check(&self, envoy: &Envoy, what: &str) {
        for (proto, request, first) in &self.requests {
            let again = send_once(envoy.addr(), *proto, request).await.unwrap();
            assert_eq!((again.status, &again.body), (200, &first.body), "after {what}: {again:?}");
            assert_eq!(again.header("idempotent-replayed"), Some("true"), "after {what}");
            let fresh = request.clone().without("idempotency-key").key(unique_key());
            let ran = send_once(envoy.addr(), *proto, &fresh).await.unwrap();
            assert_eq!((ran.status, ran.header("idempotent-replayed")), (200, None), "after {what}: {ran:?}");
            let again = send_once(envoy.addr(), *proto, &fresh).await.unwrap();
            assert_eq!((again.body, again.status), (ran.body, 200), "after {what}");
        }
        assert!(!trapped(envoy), "after {what}: a VM trapped\n{}", envoy.log_text());
    }

    async fn check_at_the_end(&self, envoy: &Envoy) {
        self.check(envoy, "all of it").await;
        for stat in ["vm_reload_success", "vm_reload_failure", "vm_reload_backoff"] {
            assert_eq!(envoy.stat(&format!("wasm.idempotency.{stat}")).await, 0, "{stat}");
        }
        assert_eq!(envoy.metric("unexpected_events").await, 0);
        assert_eq!(envoy.metric("in_flight").await, 0);
    }
}

async fn one_worker(origin: &Origin, plugin: Value) -> Envoy {
    Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr()).start().await
}

/// Sends bytes on a connection of their own; gives what comes back until the peer closes or pauses for good.
async fn send_raw(envoy: &Envoy, bytes: &[u8]) -> Vec<u8> {
    let mut client = H1::connect(envoy.addr()).await.unwrap();
    // The peer may refuse and close before it has read everything.
    let _ = client.write_raw(bytes).await;
    match tokio::time::timeout(PATIENCE, client.read_response()).await.expect("an answer or a close") {
        Ok(response) => format!("{} {}", response.status, response.text()).into_bytes(),
        Err(_) => vec![],
    }
}

// ---- bytes beyond ASCII

/// The SDK's own getters trap on such bytes; the filter's must not, in whatever header they come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_beyond_utf8_in_any_request_header_never_trap() {
    let origin = Origin::start().await;
    let mut plugin = plugin_with(json!({"fingerprint": {"headers": ["content-type", "x-listed"]}}));
    let rules = plugin["rules"].as_array_mut().unwrap();
    let mut other = |path: &str, scope: Value| {
        rules.insert(
            0,
            json!({"name": path.trim_start_matches('/'), "scope": scope,
                   "match": {"methods": ["POST"], "path": {"regex": format!("{path}/.*")}}}),
        );
    };
    other("/auth", json!([{"authorization": true}]));
    other("/property", json!([{"property": ["request", "headers", "x-tenant"]}]));
    let envoy = one_worker(&origin, plugin).await;
    let canary = Canary::new(&envoy).await;
    let values: [&[u8]; 5] = [b"a\xffb", b"\xff", b"\x80\x81", b"\xc3", b"caf\xe9, \xed\xa0\x80;q=\"\xf8\""];
    for proto in Protocol::BOTH {
        for value in values {
            for name in [
                "x-any",
                "x-listed",
                "content-type",
                "user-agent",
                "origin",
                "cookie",
                "x-request-id",
                "traceparent",
                "x-forwarded-for",
                "x-idempotency-attempt",
                "idempotency-protection",
                "x-idempotency-refusal",
                "accept",
                "referer",
            ] {
                let key = unique_key();
                let what = format!("{proto:?} {name}: {}", value.escape_ascii());
                let request = Request::post("/pay").key(&key).header(name, value).body("b");
                let first = send_once(envoy.addr(), proto, &request).await.unwrap();
                let again = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_eq!((first.status, again.status), (200, 200), "{what}: {first:?} {again:?}");
                assert_eq!(again.header("idempotent-replayed"), Some("true"), "{what}");
                assert_eq!(origin.executions_of(&key), 1, "{what}");
                if name == "x-any" {
                    let seen = origin.requests().pop().unwrap();
                    assert_eq!(seen.header_lines(name), [value], "{what}");
                }
            }
            // The caller may be named in any bytes; two such callers are two.
            let key = unique_key();
            for request in [
                Request::post("/pay").account(value),
                Request::post("/pay").account([value, b"\xfe".as_slice()].concat()),
                Request::post("/auth/1").header("authorization", [b"Bearer ", value].concat()),
                Request::post("/property/1").header("x-tenant", value),
            ] {
                let what = format!("{proto:?} scope of {} {}", request.path, value.escape_ascii());
                let request = request.key(&key).body("b");
                let before = origin.executions_of(&key);
                let first = send_once(envoy.addr(), proto, &request).await.unwrap();
                let again = send_once(envoy.addr(), proto, &request).await.unwrap();
                // A space or comma in a header part is refused, as in ASCII.
                let ran = usize::from(first.status == 200);
                assert!([200, 400].contains(&first.status), "{what}: {first:?}");
                assert_eq!((again.status, again.body), (first.status, first.body), "{what}");
                assert_eq!(origin.executions_of(&key) - before, ran, "{what}");
            }
            // A key of such bytes is none.
            for key in [value.to_vec(), [b"\"", value, b"\""].concat(), [b"k", value].concat()] {
                let request = Request::post("/pay").key(&key).body("b");
                let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
                let found = (answer.status, answer.problem_type());
                assert_eq!(found, (400, Some("invalid-key".to_owned())), "{proto:?} {}", key.escape_ascii());
                assert_eq!(origin.executions(|seen| seen.key() == Some(&key)), 0);
            }
            // What frames or routes the request is Envoy's to refuse or to take; nothing may trap.
            for name in
                ["connection", "upgrade", "te", "expect", "transfer-encoding", "host", "content-length"]
            {
                let mut raw = b"POST /pay HTTP/1.1\r\n".to_vec();
                for (name, value) in [
                    ("x-account-id", b"alice".as_slice()),
                    ("idempotency-key", unique_key().as_bytes()),
                    (name, value),
                ] {
                    raw.extend_from_slice(&[name.as_bytes(), b": ", value, b"\r\n"].concat());
                }
                raw.extend_from_slice(b"connection: close\r\n\r\n");
                if proto == Protocol::Http1 {
                    send_raw(&envoy, &raw).await;
                }
            }
            canary.check(&envoy, &format!("{}", value.escape_ascii())).await;
        }
    }
    canary.check_at_the_end(&envoy).await;
}

/// C09, HTTP/1.1 only: the HTTP/2 client can't express most of these.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_targets_run_at_most_once_and_never_trap() {
    let origin = Origin::start().await;
    let mut plugin = plugin_with(json!({"match": {"path": {"prefix": "/"}}}));
    let by_regex = json!({
        "name": "regex", "scope": "shared", "match": {"methods": ["POST"], "path": {"regex": "/re/.*x?"}}
    });
    plugin["rules"].as_array_mut().unwrap().insert(0, by_regex);
    let envoy = one_worker(&origin, plugin).await;
    let canary = Canary::new(&envoy).await;
    let many: String = (0..5000).map(|nth| format!("p{}=1&", (nth * 7919) % 5000)).collect();
    let same_name = "a=b&".repeat(5000);
    let mut targets: Vec<Vec<u8>> = [
        "/pay/%zz",
        "/pay/%",
        "/pay/%2",
        "/%C3%28",
        "/%00",
        "/pay?%",
        "/pay?%zz=%",
        "/pay?%00=%0d%0a",
        "/pay#frag",
        "/pay?a=1#frag",
        "/pay?#",
        "//pay",
        "/./a/../pay",
        "/..",
        "/pay??",
        "/pay?&&&&",
        "/pay?=x",
        "/pay?====",
        "/pay?a&a",
        "/pay;a=b",
        "/re/%zz",
        "/pay\\x",
        "*",
        "pay",
        "",
        "http://api.example.com/absolute",
        "http://api.example.com",
        "://",
        "/a b",
    ]
    .iter()
    .map(|target| target.as_bytes().to_vec())
    .collect();
    targets.extend([
        b"/pay/\xff".to_vec(),
        b"/re/\xff\xfe".to_vec(),
        b"/pay?\xff=\x80".to_vec(),
        b"/pay\t".to_vec(),
    ]);
    targets.push(format!("/pay?{}", "x".repeat(16_384)).into_bytes());
    targets.push(format!("/pay/{}", "y".repeat(16_384)).into_bytes());
    targets.push(format!("/pay?{many}").into_bytes());
    targets.push(format!("/pay?{same_name}").into_bytes());
    targets.push(format!("/pay?{}", "&".repeat(50_000)).into_bytes());
    let mut taken = 0;
    for target in &targets {
        let key = unique_key();
        let head = [b"POST ".as_slice(), target, b" HTTP/1.1\r\nhost: api.example.com\r\n"].concat();
        let rest = format!(
            "x-account-id: alice\r\nidempotency-key: {key}\r\ncontent-length: 1\r\nconnection: close\r\n\r\nb"
        );
        let raw = [head, rest.into_bytes()].concat();
        let shown = target[..target.len().min(40)].escape_ascii().to_string();
        let began = Instant::now();
        let (first, again) = (send_raw(&envoy, &raw).await, send_raw(&envoy, &raw).await);
        assert!(began.elapsed() < Duration::from_secs(5), "{shown} took {:?}", began.elapsed());
        let ran = origin.executions_of(&key);
        assert!(ran <= 1, "{shown} ran {ran} times");
        assert_eq!(ran == 1, first.starts_with(b"200 "), "{shown}: {}", first.escape_ascii());
        if ran == 1 {
            assert_eq!(first, again, "{shown}: {}", again.escape_ascii());
            taken += 1;
        } else {
            assert!(first.is_empty() || first.starts_with(b"4"), "{shown}: {}", first.escape_ascii());
        }
        assert!(!trapped(&envoy), "{shown}\n{}", envoy.log_text());
    }
    assert!(taken > 20, "only {taken} targets reached the filter");
    canary.check_at_the_end(&envoy).await;
    for (key, parameters) in [(unique_key(), &many), (unique_key(), &same_name)] {
        // The same on HTTP/2.
        let request = Request::post(&format!("/pay?{parameters}")).key(&key).body("b");
        for _ in 0..2 {
            assert_eq!(send_once(envoy.addr(), Protocol::Http2, &request).await.unwrap().status, 200);
        }
        assert_eq!(origin.executions_of(&key), 1);
    }
}

// ---- too much of it

/// However many header lines a request has, and however long they are, it is protected like any other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_thousands_of_headers_are_protected_like_any_other() {
    let origin = RawOrigin::start(RawReply::whole(200, &[], b"fine")).await;
    let mut plugin = plugin_with(json!({}));
    let pass = json!({
        "name": "pass", "scope": "shared", "missing_key": "pass",
        "match": {"methods": ["POST"], "path": {"prefix": "/pass"}}
    });
    plugin["rules"].as_array_mut().unwrap().insert(0, pass);
    let limits =
        json!({"max_request_headers_kb": 4096, "common_http_protocol_options": {"max_headers_count": 5000}});
    let options = Envoy::builder().workers(1).plugin(plugin).hcm_patch(limits);
    let envoy = options.origin_addr(origin.addr()).start().await;
    let canary = Canary::new(&envoy).await;
    for proto in Protocol::BOTH {
        for (path, lines, length) in [
            ("/pay", 1500, 10),
            ("/pass", 1500, 10),
            ("/pay", 4000, 0),
            ("/pass", 40, 30_000),
            ("/pay", 1, 60_000),
        ] {
            let key = unique_key();
            let what = format!("{proto:?} {path}: {lines} lines of {length} bytes");
            let mut request = Request::post(path);
            for nth in 0..lines {
                request = request.header(format!("x-many-{nth}"), "v".repeat(length));
            }
            // The key comes last: beyond whatever limit there might be.
            let request = request.key(&key).body("b");
            for replayed in [None, Some("true")] {
                let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
                let found = (answer.status, answer.header("idempotent-replayed"));
                assert_eq!(found, (200, replayed), "{what}: {answer:?}");
                assert_eq!(origin.executions_of(&key), 1, "{what}");
            }
        }
        // A key and a caller of absurd size.
        for (request, kind) in [
            (Request::post("/pay").key("k".repeat(60_000)), "invalid-key"),
            (Request::post("/pay").key(format!("\"{}\"", "\\\"".repeat(10_000))), "invalid-key"),
            (Request::post("/pay").key(format!("\"k\";{}", "a=1;".repeat(15_000))), "invalid-key"),
            (Request::post("/pay").key(unique_key()).account("a".repeat(60_000)), "invalid-scope"),
        ] {
            let before = origin.requests().len();
            let answer = send_once(envoy.addr(), proto, &request.body("b")).await;
            let answer = answer.unwrap_or_else(|e| panic!("{proto:?} {kind}: {e:?}"));
            assert_eq!((answer.status, answer.problem_type()), (400, Some(kind.to_owned())), "{answer:?}");
            assert!(answer.body.len() < 1000, "{answer:?}");
            assert_eq!(origin.requests().len(), before);
        }
        canary.check(&envoy, "headers in thousands").await;
    }
    canary.check_at_the_end(&envoy).await;
}

/// Responses that can't be kept are delivered as they are, and never run again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strange_responses_never_trap_and_never_run_twice() {
    let origin = RawOrigin::start(RawReply::whole(200, &[], b"fine")).await;
    let cluster = json!({"typed_extension_protocol_options": {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "common_http_protocol_options": {"max_headers_count": 5000, "max_response_headers_kb": 4096},
            "explicit_http_config": {"http_protocol_options": {}}
        }
    }});
    let envoy = Envoy::builder().workers(1).origin_addr(origin.addr()).cluster_patch(cluster).start().await;
    let canary = Canary::new(&envoy).await;
    // (name, status line and headers and body, what a retry gets)
    let many: String = (0..1500).map(|nth| format!("x-many-{nth}: v\r\n")).collect();
    let fitting: String = (0..950).map(|nth| format!("x-many-{nth}: v\r\n")).collect();
    let locations = format!("location: /{}\r\n", "v".repeat(30_000)).repeat(40);
    let large: String = (0..40).map(|nth| format!("x-large-{nth}: {}\r\n", "v".repeat(30_000))).collect();
    let ok = "HTTP/1.1 200 OK\r\n";
    let rows: Vec<(&str, Vec<u8>, u16)> = vec![
        ("bytes", [ok.as_bytes(), b"x-b: a\xffb\r\nx-b: \x80\r\ncontent-type: \xfe\r\ncontent-length: 2\r\n\r\n\xff\xfe"].concat(), 200),
        ("location", [ok.as_bytes(), b"location: /\xff\r\netag: \xff\r\ncontent-length: 0\r\n\r\n"].concat(), 200),
        ("server", [ok.as_bytes(), b"server: \xff\r\ncontent-type: text/plain\r\ncontent-length: 1\r\n\r\n\xff"].concat(), 200),
        ("cors", [ok.as_bytes(), b"access-control-allow-origin: \xff\r\nconnection: x-\xff, close\r\ncontent-length: 0\r\n\r\n"].concat(), 200),
        ("reason", b"HTTP/1.1 200 \xff\xfe\r\ncontent-length: 0\r\n\r\n".to_vec(), 200),
        ("refusal", [ok.as_bytes(), b"x-idempotency-refusal: \xff\r\ncontent-length: 0\r\n\r\n"].concat(), 200),
        ("fitting", format!("{ok}{fitting}content-length: 4\r\n\r\nbody").into_bytes(), 200),
        ("locations", format!("{ok}{locations}content-length: 4\r\n\r\nbody").into_bytes(), 409),
        ("many", format!("{ok}{many}content-length: 4\r\n\r\nbody").into_bytes(), 409),
        ("large", format!("{ok}{large}content-length: 4\r\n\r\nbody").into_bytes(), 409),
        ("status", b"HTTP/1.1 299 Odd\r\ncontent-length: 4\r\n\r\nbody".to_vec(), 299),
        ("huge-status", b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n".to_vec(), 424),
        ("garbage", b"\xff\xff\xff\xff\r\n\r\n".to_vec(), 424),
        ("bad-length", b"HTTP/1.1 200 OK\r\ncontent-length: \xff\r\n\r\n".to_vec(), 424),
        ("bad-chunk", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nbody\r\nzz\r\n".to_vec(), 424),
    ];
    for (name, bytes, retry) in rows {
        origin.set(RawReply::new(&bytes, if name == "cors" { End::Close } else { End::KeepOpen }));
        for proto in Protocol::BOTH {
            let key = unique_key();
            let request = Request::post(&format!("/{name}")).key(&key).header("origin", b"\xff").body("b");
            let first = send_once(envoy.addr(), proto, &request).await;
            assert_eq!(origin.executions_of(&key), 1, "{name}");
            for _ in 0..2 {
                let again = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_eq!(again.status, retry, "{proto:?} {name}: {first:?}, then {again:?}");
                if retry < 300 {
                    let first = first.as_ref().unwrap();
                    assert_eq!((again.status, &again.body), (first.status, &first.body), "{name}");
                    for header in [
                        "x-b",
                        "content-type",
                        "location",
                        "etag",
                        "access-control-allow-origin",
                        "x-many-949",
                    ] {
                        assert_eq!(again.header_lines(header), first.header_lines(header), "{name} {header}");
                    }
                    assert_eq!(again.header("idempotent-replayed"), Some("true"), "{name}");
                }
            }
            if name == "bytes" {
                let first = first.as_ref().unwrap();
                assert_eq!(first.header_lines("x-b"), [b"a\xffb".as_slice(), b"\x80"]);
                assert_eq!(first.body, b"\xff\xfe");
            }
            if retry == 409 {
                let first = first.as_ref().unwrap();
                assert_eq!(
                    (first.status, first.text().as_str()),
                    (200, "body"),
                    "{name}: what can't be kept is delivered"
                );
                let again = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_eq!(again.json()["original_status"], 200, "{name}: {again:?}");
            }
            assert_eq!(origin.executions_of(&key), 1, "{proto:?} {name} ran again");
        }
        assert!(!trapped(&envoy), "{name}\n{}", envoy.log_text());
    }
    origin.set(RawReply::whole(200, &[], b"fine"));
    canary.check_at_the_end(&envoy).await;
}

// ---- anything at all

const FRAGMENTS: [&[u8]; 24] = [
    b"",
    b" ",
    b"\t",
    b"\"",
    b"\\",
    b",",
    b";",
    b"=",
    b"k",
    b"a=b",
    b"\xff",
    b"\x80",
    b"\xc3\xa9",
    b"?1",
    b":YQ==:",
    b"%zz",
    b"&",
    b"?",
    b"#",
    b"/",
    b"..",
    b"chunked",
    b"application/grpc",
    b"upgrade",
];

fn noise(rng: &mut Rng, pieces: usize) -> Vec<u8> {
    let count = rng.below(pieces + 1);
    let mut noise = vec![];
    for _ in 0..count {
        match rng.below(4) {
            0 => {
                let length = rng.below(40);
                noise.extend(rng.bytes(length));
            }
            1 => noise.extend(std::iter::repeat_n(b'x', rng.below(600))),
            _ => noise.extend_from_slice(rng.pick(&FRAGMENTS)),
        }
    }
    // A line can't hold these; that they end it is no mutation of the value.
    noise.retain(|byte| !matches!(byte, b'\r' | b'\n' | 0));
    noise
}

const NAMES: [&str; 18] = [
    "idempotency-key",
    "x-account-id",
    "content-type",
    "content-length",
    "transfer-encoding",
    "connection",
    "upgrade",
    "expect",
    "te",
    "x-idempotency-attempt",
    "idempotency-protection",
    "x-listed",
    "origin",
    "authorization",
    "host",
    "x-forwarded-for",
    "x-envoy-expected-rq-timeout-ms",
    "cookie",
];

/// A few hundred seeded mutations of everything on HTTP/1.1; the worker's VM lives and protects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_http1_requests_never_trap_the_filter() {
    let origin = Origin::start().await;
    let envoy = one_worker(&origin, fuzzed_plugin()).await;
    let canary = Canary::new(&envoy).await;
    let mut rng = Rng::new(0x1d_e2e1);
    let mut answered = 0;
    for round in 0..300 {
        let mut raw = rng.pick(&["POST", "PATCH", "GET", "PUT", "post", "P\u{e9}"]).as_bytes().to_vec();
        raw.extend_from_slice(if rng.one_in(5) { b"  /" } else { b" /" });
        raw.extend(noise(&mut rng, 6));
        raw.extend_from_slice(b" HTTP/1.1\r\nhost: api.example.com\r\n");
        if !rng.one_in(4) {
            raw.extend_from_slice(b"x-account-id: alice\r\n");
        }
        if !rng.one_in(4) {
            raw.extend_from_slice(format!("idempotency-key: {}\r\n", rng.below(40)).as_bytes());
        }
        for _ in 0..rng.below(6) {
            raw.extend_from_slice(rng.pick(&NAMES).as_bytes());
            raw.extend_from_slice(b": ");
            raw.extend(noise(&mut rng, 4));
            raw.extend_from_slice(b"\r\n");
        }
        let length = rng.below(3000);
        let body = rng.bytes(length);
        let framing = rng.below(4);
        match framing {
            0 => raw.extend_from_slice(b"\r\n"),
            1 => {
                raw.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len()).as_bytes());
                raw.extend(body);
            }
            2 => {
                raw.extend_from_slice(
                    format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", body.len()).as_bytes(),
                );
                raw.extend(body);
                raw.extend_from_slice(if rng.one_in(3) { b"\r\nzz\r\n" } else { b"\r\n0\r\n\r\n" });
            }
            // Less than announced, and gone.
            _ => {
                raw.extend_from_slice(format!("content-length: {}\r\n\r\n", body.len() + 1).as_bytes());
                raw.extend(body);
            }
        }
        let corrupted = rng.one_in(3);
        if corrupted {
            // Within what Envoy lets a line or body be, any byte may change.
            let at = rng.below(raw.len());
            raw[at] = rng.bytes(1)[0];
        }
        let mut stream = TcpStream::connect(envoy.addr()).await.unwrap();
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, &raw).await;
        let mut answer = [0; 64];
        // What asks for more than it sends gets no answer where no rule covers it.
        let wait = if corrupted || framing == 3 { Duration::from_millis(100) } else { PATIENCE };
        if let Ok(Ok(read)) = tokio::time::timeout(wait, stream.read(&mut answer)).await {
            answered += usize::from(read > 0);
            let status = String::from_utf8_lossy(&answer[..read.min(12)]).into_owned();
            assert!(!status.starts_with("HTTP/1.1 5"), "round {round}: {status}\n{}", raw.escape_ascii());
        }
        if round % 50 == 49 {
            canary.check(&envoy, &format!("round {round}")).await;
        }
    }
    assert!(answered > 200, "{answered}");
    canary.check_at_the_end(&envoy).await;
}

fn fuzzed_plugin() -> Value {
    let mut plugin = plugin_with(json!({
        "match": {"methods": ["POST", "PATCH", "PUT"]}, "body_timeout": "50ms", "max_request_body_bytes": 2500,
        "fingerprint": {"headers": ["content-type", "x-listed"]}
    }));
    let auth = json!({"name": "auth", "scope": [{"authorization": true}, {"property": ["request", "headers", "x-listed"]}],
        "match": {"methods": ["POST"], "hosts": ["*.example.com"], "path": {"regex": "/(a=b|%zz|x+).*"}}});
    plugin["rules"].as_array_mut().unwrap().insert(0, auth);
    plugin
}

/// The same on HTTP/2, with frames of any size, resets, and trailers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_http2_requests_never_trap_the_filter() {
    let origin = Origin::start().await;
    let envoy = one_worker(&origin, fuzzed_plugin()).await;
    let canary = Canary::new(&envoy).await;
    let mut rng = Rng::new(0x2d_e2e2);
    let (mut answered, mut reset) = (0, 0);
    for round in 0..300 {
        let path: String = noise(&mut rng, 6)
            .into_iter()
            .filter(|byte| byte.is_ascii_graphic() && !b"\"<>\\^`{|}#".contains(byte))
            .map(char::from)
            .collect();
        let mut request = Request::new(rng.pick(&["POST", "PATCH", "GET", "PUT"]), &format!("/{path}"));
        if rng.one_in(4) {
            request = request.without("x-account-id");
        }
        if !rng.one_in(4) {
            request = request.key(rng.below(40).to_string());
        }
        for _ in 0..rng.below(6) {
            let name = rng.pick(&NAMES);
            let value: Vec<u8> =
                noise(&mut rng, 4).into_iter().filter(|byte| *byte >= 0x20 && *byte != 0x7f).collect();
            // The client refuses to send these on HTTP/2.
            if !["connection", "upgrade", "te", "transfer-encoding", "host", "content-length"].contains(&name)
            {
                request = request.header(name, value);
            }
        }
        let length = rng.below(3000);
        request = request.body(rng.bytes(length)).no_content_length();
        if rng.one_in(2) {
            request = request.chunked(&[1 + rng.below(50), 1 + rng.below(2000)]);
        }
        if rng.one_in(5) {
            request = request.trailer(
                "x-trailer",
                noise(&mut rng, 2).into_iter().filter(|b| *b >= 0x20 && *b != 0x7f).collect::<Vec<_>>(),
            );
        }
        let client = H2::connect(envoy.addr()).await.unwrap();
        let Ok(mut stream) = client.open(&request, true).await else { continue };
        match rng.below(6) {
            0 => {
                // Part of the body, then gone.
                let _ = stream.send_data(&request.body[..request.body.len() / 2], false).await;
                stream.reset();
                reset += 1;
            }
            1 => {
                // Part of the body, then nothing: the rule's body timeout ends it where a rule covers it.
                let _ = stream.send_data(&request.body[..request.body.len() / 2], false).await;
                let _ = tokio::time::timeout(Duration::from_millis(100), stream.response()).await;
            }
            _ => {
                let _ = stream.send_rest(&request).await;
                if let Ok(Ok(answer)) = tokio::time::timeout(PATIENCE, stream.response()).await {
                    answered += 1;
                    assert!(answer.status < 500, "round {round}: {request:?}\n{answer:?}");
                }
            }
        }
        if round % 50 == 49 {
            canary.check(&envoy, &format!("round {round}")).await;
        }
    }
    assert!(answered > 120 && reset > 20, "{answered} {reset}");
    canary.check_at_the_end(&envoy).await;
}

// ---- configuration

/// A value of the plugin's configuration, and what the log must say of it.
fn malformed() -> Vec<(Value, &'static str)> {
    let with = |patch: Value| {
        let mut plugin = default_plugin();
        deep_merge(&mut plugin, &patch);
        plugin
    };
    let deep = "[".repeat(100_000);
    vec![
        (json!(""), "configuration: "),
        (json!("{\"store\": "), "configuration: not valid JSON"),
        (json!("[]"), "configuration: got [], expected an object"),
        (json!("null"), "configuration: "),
        (json!(deep), "configuration: not valid JSON"),
        (json!("{\"store\": {\"shared_data\": {}}}"), "rules"),
        (with(json!({"rules": []})), "rules: got [], expected a list of at least one rule"),
        (with(json!({"ruels": 1})), "ruels: unknown field"),
        (with(json!({"store": {"redis": {}}})), "store"),
        (with(json!({"store": {"shared_data": {"max_records": 0}}})), "store.shared_data.max_records: got 0"),
        (plugin_with(json!({"lock_ttl": 60})), "rules[0].lock_ttl: got 60"),
        (
            plugin_with(json!({"lock_tll": "60s"})),
            "rules[0].lock_tll: unknown field, did you mean \"lock_ttl\"",
        ),
        (plugin_with(json!({"record_ttl": "60s"})), "rules[0].record_ttl"),
        (plugin_with(json!({"scope": []})), "rules[0].scope: got []"),
        (plugin_with(json!({"scope": null})), "rules[0].scope: missing"),
        (plugin_with(json!({"scope": [{"header": "x"}, {"header": 1}]})), "rules[0].scope[1].header: got 1"),
        (plugin_with(json!({"match": {"methods": ["get"]}})), "rules[0].match.methods[0]: got \"get\""),
        (
            plugin_with(json!({"match": {"path": {"prefix": null, "regex": "("}}})),
            "rules[0].match.path.regex",
        ),
        (
            plugin_with(json!({"match": {"path": {"prefix": null, "regex": "(a{1000}){1000}"}}})),
            "rules[0].match.path.regex",
        ),
        (plugin_with(json!({"mode": "ghost"})), "rules[0].mode: got \"ghost\""),
        (
            plugin_with(json!({"execution": "detached"})),
            "rules[0].execute_timeout: missing here and in defaults",
        ),
        (plugin_with(json!({"max_request_body_bytes": 1e30})), "rules[0].max_request_body_bytes"),
        (plugin_with(json!({"release_statuses": [200, 503], "replay_statuses": [200]})), "rules[0].re"),
        (with(json!({"statuses": {"failed": 200}})), "statuses.failed: got 200"),
        (with(json!({"problem_type_base": "x\r\ny"})), "problem_type_base: got"),
    ]
}

/// A bad configuration that is pushed is refused with its path, and what ran before goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_reload_is_refused_by_its_path_and_the_old_listener_serves_on() {
    let origin = Origin::start().await;
    let mut envoy = one_worker(&origin, default_plugin()).await;
    let canary = Canary::new(&envoy).await;
    for (plugin, says) in malformed() {
        let shown = plugin.to_string();
        let shown = &shown[..shown.len().min(200)];
        let refused = envoy.reload_listener(plugin.clone()).await;
        let log = refused.expect_err(&format!("accepted: {shown}"));
        assert!(log.contains(says), "{shown}: no {says:?} in\n{log}");
        assert!(!log.contains("Function: proxy_on_"), "{shown}\n{log}");
    }
    canary.check_at_the_end(&envoy).await;
    // Not JSON at all, and not even text: as another kind of message, or none.
    for (configuration, says) in [
        (
            json!({"@type": "type.googleapis.com/google.protobuf.BytesValue", "value": "//79AAECAw=="}),
            "configuration: ",
        ),
        (
            json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": {"store": {"shared_data": {}}}}),
            "rules",
        ),
        (json!({"@type": "type.googleapis.com/google.protobuf.Duration", "value": "5s"}), "configuration: "),
        (json!(null), "configuration: "),
    ] {
        let refused =
            envoy.reload(|main| main.filter_mut().patch = json!({"configuration": configuration})).await;
        let log = refused.expect_err(&format!("accepted: {configuration}"));
        // Envoy below 1.40 refuses a plugin without any configuration before it asks the plugin.
        let says = if configuration.is_null() && envoy.version().await < [1, 40, 0] { "" } else { says };
        assert!(log.contains(says) && !log.contains("Function: proxy_on_"), "{configuration}: {log}");
    }
    canary.check_at_the_end(&envoy).await;
    envoy.reload_listener(plugin_with(json!({"max_response_body_bytes": 1000}))).await.unwrap();
    canary.check(&envoy, "a good one").await;
}

/// At the start there is nothing to go on with: Envoy says why, all of it at once, and ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_configuration_keeps_envoy_from_starting() {
    let mut bad = plugin_with(json!({"lock_ttl": 60, "missing_key": "maybe"}));
    bad["verbose"] = json!(true);
    for (plugin, says) in [
        (
            bad,
            vec![
                "rules[0].lock_ttl: got 60",
                "rules[0].missing_key: got \"maybe\"",
                "verbose: unknown field",
            ],
        ),
        (json!("{"), vec!["configuration: not valid JSON"]),
    ] {
        let log =
            Envoy::builder().plugin(plugin).static_listeners().try_start().await.err().expect("a refusal");
        for text in says {
            assert!(log.contains(text), "no {text:?} in\n{log}");
        }
        assert!(!log.contains("Function: proxy_on_"), "{log}");
    }
}

/// A `Struct` has only doubles for numbers; it means the same as the text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_struct_configures_the_filter_as_the_text_does() {
    let origin = Origin::start().await;
    let mut plugin = plugin_with(json!({
        "max_request_body_bytes": 100, "replay_header": "X-Again", "fingerprint": {"headers": ["content-type"]},
        "release_statuses": [503], "lock_ttl": "2s", "key": {"max_length": 40}
    }));
    plugin["statuses"] = json!({"mismatch": 409});
    let envoy = Envoy::builder().plugin(plugin).plugin_as_struct().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("b");
        let first = send_once(envoy.addr(), proto, &request).await.unwrap();
        let again = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!((first.status, &first.body), (again.status, &again.body));
        assert_eq!((first.header("x-again"), again.header("x-again")), (None, Some("true")), "{again:?}");
        for (request, status, kind) in [
            (request.clone().header("content-type", "a/b"), 409, "mismatch"),
            (request.clone().body(vec![b'x'; 101]), 413, "payload-too-large"),
            (Request::post("/pay").key("k".repeat(41)).body("b"), 400, "invalid-key"),
        ] {
            let answer = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((answer.status, answer.problem_type()), (status, Some(kind.to_owned())), "{answer:?}");
        }
        assert_eq!(origin.executions_of(&key), 1);
    }
}
