//! The request side (design section 4): what passes untouched, what is refused before a claim, what makes two
//! requests the same, and the answer for each record that a claim can find.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::client::{Framing, H2Stream};
use crate::support::*;

/// A plugin configuration of several rules, each for POST below a path of its own name.
fn plugin_of(rules: Vec<(&str, Value)>) -> Value {
    let mut plugin = json!({"store": {"shared_data": {}}, "rules": []});
    for (name, patch) in rules {
        let mut rule = json!({
            "name": name,
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}]
        });
        deep_merge(&mut rule, &patch);
        plugin["rules"].as_array_mut().unwrap().push(rule);
    }
    plugin
}

/// Everything that a refusal of ours has in common (RFC 9457, design section 4).
fn assert_refusal(answer: &Response, status: u16, kind: &str, what: &str) {
    let found = (answer.status, answer.problem_type());
    assert_eq!(found, (status, Some(kind.to_owned())), "{what}: {answer:?}");
    let problem = answer.json();
    assert_eq!(problem["status"], status, "{what}");
    for member in ["title", "detail"] {
        assert!(problem[member].as_str().is_some_and(|text| text.len() > 10), "{what}: {problem}");
    }
    let link = format!("<{}>; rel=\"describedby\"", problem["type"].as_str().unwrap());
    assert_eq!(answer.header("link"), Some(link.as_str()), "{what}");
    assert_eq!(answer.header_lines("x-idempotency-refusal"), [kind.as_bytes()], "{what}");
    assert_eq!(answer.header("cache-control"), Some("no-store"), "{what}");
    assert_eq!(answer.header("idempotent-replayed"), None, "{what}");
    let waiting_helps = matches!(kind, "in-flight" | "store-unavailable" | "store-full");
    assert_eq!(answer.header("retry-after").is_some(), waiting_helps, "{what}: {answer:?}");
}

/// The first run carries no mark; the replay has its status, its bytes, and the mark.
fn assert_replay(first: &Response, again: &Response, what: &str) {
    assert_eq!(first.header("idempotent-replayed"), None, "{what}: {first:?}");
    assert_eq!((again.status, &again.body), (first.status, &first.body), "{what}: {again:?}");
    assert_eq!(again.header_lines("idempotent-replayed"), [b"true"], "{what}: {again:?}");
    assert_eq!(again.header("cache-control"), Some("no-store"), "{what}");
    assert_eq!(again.header("content-type"), first.header("content-type"), "{what}");
}

async fn send(envoy: &Envoy, proto: Protocol, request: &Request) -> Response {
    let answer = send_once(envoy.addr(), proto, request).await;
    answer.unwrap_or_else(|e| panic!("{proto:?} {} {}: {e:?}", request.method, request.path))
}

/// The access log's line that begins with `start` (status and details) and ends with `path`.
async fn logged(envoy: &Envoy, start: &str, path: &str) -> String {
    let (start, end) = (format!("{start} "), format!(" {path}"));
    envoy.wait_access_log(|line| line.starts_with(&start) && line.ends_with(&end), PATIENCE).await
}

/// The filter state within a line of the access log.
fn state_of<'a>(line: &'a str, path: &str) -> &'a str {
    line.splitn(3, ' ').nth(2).and_then(|rest| rest.strip_suffix(path)).expect("a line of the log").trim_end()
}

/// `<outcome> rule=<rule> attempt=<n> key=<8 hex>`.
fn assert_state(line: &str, path: &str, begins: &str) {
    let state = state_of(line, path);
    let (head, key) = state.rsplit_once(" key=").unwrap_or_else(|| panic!("{line}"));
    assert_eq!(head, begins, "{line}");
    assert!(key.len() == 8 && key.bytes().all(|byte| byte.is_ascii_hexdigit()), "{line}");
}

// ---- what passes untouched

/// D07, J04, J05, F10: safe methods and what no rule matches pass, with or without a key, each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn safe_methods_and_uncovered_requests_pass_untouched() {
    let origin = Origin::start().await;
    let plugin = plugin_with(json!({
        "match": {"methods": ["POST"], "hosts": ["*.example.com"], "path": {"prefix": "/pay"}}
    }));
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let paid = send(&envoy, proto, &Request::post("/pay").key(&key).body("b")).await;
        assert_eq!((paid.status, origin.executions_of(&key)), (200, 1));
        for (method, path, host) in [
            ("GET", "/pay", "api.example.com"),
            ("HEAD", "/pay", "api.example.com"),
            ("OPTIONS", "/pay", "api.example.com"),
            ("PUT", "/pay", "api.example.com"),
            ("DELETE", "/pay", "api.example.com"),
            ("PATCH", "/pay", "api.example.com"),
            ("POST", "/other", "api.example.com"),
            ("POST", "/pa", "api.example.com"),
            ("POST", "/pay", "example.com"),
            ("POST", "/pay", "api.example.org"),
        ] {
            let what = format!("{proto:?} {method} {path} {host}");
            let request = Request::get(path).method(method).authority(host);
            let count = || origin.executions(|seen| seen.method == method && seen.authority == host);
            let before = count();
            for request in [
                request.clone(),
                request.clone().key(&key),
                request.clone().key(&key),
                request.clone().key("").key("two lines").header("x-idempotency-attempt", "7"),
                request.clone().key(&key).header("idempotency-protection", "none").without("x-account-id"),
            ] {
                let answer = send(&envoy, proto, &request).await;
                assert_eq!(answer.status, 200, "{what}: {answer:?}");
                assert_eq!(answer.header("idempotent-replayed"), None, "{what}");
                assert_ne!(answer.body, paid.body, "{what}");
                let seen = origin.requests().pop().unwrap();
                for name in ["idempotency-key", "x-idempotency-attempt", "idempotency-protection"] {
                    let sent: Vec<_> = request
                        .headers
                        .iter()
                        .filter(|line| line.0 == name.as_bytes())
                        .map(|line| &line.1)
                        .collect();
                    assert_eq!(seen.header_lines(name), sent, "{what}");
                }
            }
            assert_eq!(count() - before, 5, "{what}");
            let line = envoy.wait_access_log(|line| line.ends_with(path), PATIENCE).await;
            if path != "/pay" {
                assert_eq!(line, format!("200 via_upstream - {path}"));
            }
        }
        let again = send(&envoy, proto, &Request::post("/pay").key(&key).body("b")).await;
        assert_replay(&paid, &again, "after all those");
        assert_eq!(
            origin.executions(|seen| seen.method == "POST" && seen.path == "/pay" && seen.body == b"b"),
            { Protocol::BOTH.iter().position(|one| *one == proto).unwrap() + 1 }
        );
    }
    assert_eq!(envoy.metric("executed").await, 2);
}

/// D07, D12: without a key the rule decides; keyless requests never share a record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_key_is_refused_or_passes_as_the_rule_says() {
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![("reject", json!({})), ("pass", json!({"missing_key": "pass"}))]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let path = format!("/reject/{proto:?}");
        let refused = send(&envoy, proto, &Request::post(&path).body("b")).await;
        assert_refusal(&refused, 400, "missing-key", &path);
        assert!(refused.json()["detail"].as_str().unwrap().contains("idempotency-key"), "{refused:?}");
        let line = logged(&envoy, "400 idempotency_missing_key", &path).await;
        assert_eq!(state_of(&line, &path), "refused.missing-key rule=reject attempt=0 key=-");
        assert_eq!(origin.executions(|seen| seen.path == path), 0);

        let path = format!("/pass/{proto:?}");
        let request = Request::post(&path).header("x-idempotency-attempt", "3").body("b");
        let (first, second) = (send(&envoy, proto, &request).await, send(&envoy, proto, &request).await);
        assert_ne!(first.execution(), second.execution());
        assert_eq!(origin.executions(|seen| seen.path == path), 2);
        // A key that is none is not the absence of one (D06).
        for bad in ["", "\"\"", "a,b"] {
            assert_refusal(&send(&envoy, proto, &request.clone().key(bad)).await, 400, "invalid-key", bad);
        }
        // D12: a key that nobody asked for is honoured.
        let keyed = request.clone().key(format!("\"{}\"", unique_key()));
        let (first, second) = (send(&envoy, proto, &keyed).await, send(&envoy, proto, &keyed).await);
        assert_replay(&first, &second, &path);
        assert_eq!(origin.executions(|seen| seen.path == path), 3);
    }
    assert_eq!(envoy.metric("rejected.missing_key").await, 2);
    assert_eq!(envoy.metric("bypassed.no_key").await, 4);
}

/// G22: upgrades and CONNECT are tunnels; nothing of them is held, and their bytes flow.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn websocket_upgrades_and_connect_pass_promptly() {
    let reply = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nhello";
    let origin = RawOrigin::start(RawReply::new(reply, End::HangForever)).await;
    let routes = vec![
        json!({"match": {"connect_matcher": {}}, "route": {
            "cluster": "origin", "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {}}]}}),
        json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}}),
    ];
    let envoy = Envoy::builder()
        .origin_addr(origin.addr())
        .routes(routes)
        .hcm_patch(json!({
            "upgrade_configs": [{"upgrade_type": "websocket"}, {"upgrade_type": "CONNECT"}],
            "http2_protocol_options": {"allow_connect": true}
        }))
        .start()
        .await;
    for method in ["GET", "POST"] {
        let key = unique_key();
        for _ in 0..2 {
            let request = Request::get("/ws").method(method).key(&key);
            let request = request.header("upgrade", "websocket").header("connection", "Upgrade");
            let mut client = H1::connect(envoy.addr()).await.unwrap();
            client.write_request(&request).await.unwrap();
            assert_eq!(client.read_head().await.unwrap().status, 101, "{method}");
            assert_eq!(client.read_chunk().await.unwrap().unwrap(), b"hello", "{method}");
        }
        assert_eq!(origin.executions_of(&key), 2, "{method}");
    }
    assert_eq!(envoy.metric("bypassed.upgrade").await, 2);

    // HTTP/2: extended CONNECT (RFC 8441).
    let key = unique_key();
    for nth in 1..=2 {
        let (sender, mut body) = extended_connect(envoy.addr(), &key).await;
        assert_eq!(body.data().await.unwrap().unwrap(), "hello");
        assert_eq!(origin.executions_of(&key), nth);
        drop(sender);
    }

    // CONNECT: a plain tunnel to the upstream.
    let before = origin.executions(|_| true);
    let key = unique_key();
    let mut client = H1::connect(envoy.addr()).await.unwrap();
    let connect = format!(
        "CONNECT api.example.com:443 HTTP/1.1\r\nhost: api.example.com:443\r\nidempotency-key: {key}\r\n\r\n"
    );
    client.write_raw(connect.as_bytes()).await.unwrap();
    assert_eq!(client.read_head().await.unwrap().status, 200);
    client.write_raw(b"GET /through HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
    assert!(client.read_chunk().await.unwrap().unwrap().starts_with(b"HTTP/1.1 101"));
    assert_eq!(origin.executions(|seen| seen.path == "/through"), 1);
    assert_eq!(origin.executions(|_| true) - before, 1);
    assert_eq!(envoy.metric("executed").await, 0);
}

async fn extended_connect(addr: SocketAddr, key: &str) -> (::h2::SendStream<bytes::Bytes>, ::h2::RecvStream) {
    let stream = TcpStream::connect(addr).await.unwrap();
    let (sender, connection) = ::h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut sender = sender.ready().await.unwrap();
    // The server's settings come first: without them extended CONNECT isn't allowed.
    poll_until(PATIENCE, "the settings", async || {
        sender.is_extended_connect_protocol_enabled().then_some(())
    })
    .await;
    let request = http::Request::builder()
        .method("CONNECT")
        .uri("http://api.example.com/ws")
        .header("x-account-id", "alice")
        .header("idempotency-key", key)
        .extension(::h2::ext::Protocol::from_static("websocket"))
        .body(())
        .unwrap();
    let (answer, send) = sender.send_request(request, false).unwrap();
    let answer = answer.await.unwrap();
    assert_eq!(answer.status(), 200);
    (send, answer.into_body())
}

/// F14: gRPC says its outcome in trailers; it passes unprotected, and is counted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_passes_and_is_counted() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    let mut count = 0;
    for proto in Protocol::BOTH {
        for content_type in
            ["application/grpc", "application/grpc+proto", "application/grpc-web", "Application/gRPC; x=1"]
        {
            let key = unique_key();
            let request =
                Request::post("/pkg.Pay/Charge").key(&key).header("content-type", content_type).body("b");
            for _ in 0..2 {
                let answer = send(&envoy, proto, &request).await;
                assert_eq!(answer.header("idempotent-replayed"), None, "{content_type}");
            }
            count += 2;
            assert_eq!(origin.executions_of(&key), 2, "{proto:?} {content_type}");
        }
        assert_eq!(envoy.metric("bypassed.grpc").await, count);
        let key = unique_key();
        let json = Request::post("/").key(&key).header("content-type", "application/json").body("b");
        let (first, again) = (send(&envoy, proto, &json).await, send(&envoy, proto, &json).await);
        assert_replay(&first, &again, "JSON is no gRPC");
    }
}

/// The route's metadata picks a rule by name, or none; an unknown name refuses and forwards nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routes_metadata_overrides_the_rules_matchers() {
    let origin = Origin::start().await;
    let mut plugin = plugin_with(json!({}));
    plugin["rules"].as_array_mut().unwrap().push(json!({
        "name": "second", "match": {"methods": ["PUT"], "path": {"exact": "/never"}},
        "header": "x-second-key", "replay_header": "X-Again", "scope": "shared"
    }));
    let route = |prefix: &str, metadata: Value| {
        json!({"match": {"prefix": prefix}, "route": {"cluster": "origin"},
               "metadata": {"filter_metadata": {"idempotency": metadata}}})
    };
    let envoy = Envoy::builder()
        .plugin(plugin)
        .origin_addr(origin.addr())
        .routes(vec![
            route("/off", json!({"off": true})),
            route("/named", json!({"rule": "second"})),
            route("/stays", json!({"off": false})),
            route("/both", json!({"off": true, "rule": "second"})),
            route("/text", json!({"off": "true"})),
            route("/typo", json!({"of": true})),
            route("/unknown", json!({"rule": "nope"})),
            route("/number", json!({"rule": 5})),
            route("/empty", json!({"rule": ""})),
            json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}}),
        ])
        .start()
        .await;
    for (nth, proto) in (1..).zip(Protocol::BOTH) {
        let key = unique_key();
        for path in ["/stays", "/plain"] {
            let path = format!("{path}/{key}");
            let request = Request::post(&path).key(unique_key()).body("b");
            let (first, again) = (send(&envoy, proto, &request).await, send(&envoy, proto, &request).await);
            assert_replay(&first, &again, &path);
            assert_eq!(origin.executions(|seen| seen.path == path), 1);
        }

        let path = format!("/off/{key}");
        for request in [Request::post(&path), Request::post(&path).key(&key), Request::post(&path).key(&key)]
        {
            assert_eq!(send(&envoy, proto, &request.body("b")).await.header("idempotent-replayed"), None);
        }
        assert_eq!(origin.executions(|seen| seen.path == path), 3);
        assert_eq!(envoy.metric("bypassed.route_off").await, 3 * nth);
        assert_eq!(state_of(&logged(&envoy, "200 via_upstream", &path).await, &path), "-");

        let path = format!("/named/{key}");
        let request = Request::post(&path).without("x-account-id").header("x-second-key", &key).body("b");
        let (first, again) = (send(&envoy, proto, &request).await, send(&envoy, proto, &request).await);
        assert_eq!((first.header("x-again"), again.header("x-again")), (None, Some("true")), "{again:?}");
        assert_eq!((origin.executions(|seen| seen.path == path), &first.body), (1, &again.body));
        assert_state(
            &logged(&envoy, "200 idempotency_replayed", &path).await,
            &path,
            "replayed rule=second attempt=0",
        );

        // Whoever wrote the metadata wanted something: what can't be understood doesn't fall back to the matchers.
        let unclear = ["/unknown", "/number", "/empty", "/both", "/text", "/typo"];
        for path in unclear {
            let path = format!("{path}/{key}");
            for request in [Request::post(&path), Request::post(&path).key(&key).body("b")] {
                assert_refusal(&send(&envoy, proto, &request).await, 500, "misconfigured", &path);
            }
            let line = logged(&envoy, "500 idempotency_misconfigured", &path).await;
            assert_eq!(state_of(&line, &path), "refused.misconfigured rule=- attempt=0 key=-");
            assert_eq!(origin.executions(|seen| seen.path == path), 0);
            assert_eq!(send(&envoy, proto, &Request::get(&path)).await.status, 200, "safe methods pass");
        }
        assert_eq!(envoy.metric("rejected.misconfigured").await, 2 * unclear.len() as u64 * nth);
    }
}

// ---- the key

/// D03, D04, D06, D09 on the wire: what is one key, what are two, and what is none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_grammar_holds_on_the_wire() {
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![
        ("lenient", json!({})),
        ("strict", json!({"key": {"syntax": "strict"}})),
        ("uuid", json!({"key": {"format": "uuid"}})),
        ("short", json!({"key": {"max_length": 8}})),
        ("alias", json!({"header": "X-Idem"})),
    ]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    let uuid = unique_key();
    let upper = uuid.to_uppercase();
    let long = "x".repeat(255);
    let quoted = |key: &str| format!("\"{key}\"");
    // (rule, one value, another value, the same key)
    let pairs = [
        ("lenient", "k".to_owned(), quoted("k"), true),
        ("lenient", quoted("k"), "\"k\";v=1;w;x=\"a,b\";y=:YQ==:;z=?1".to_owned(), true),
        ("lenient", quoted("k"), "\"k\"; a=1".to_owned(), true),
        ("lenient", "\"a\\\"b\"".to_owned(), "\"a\\\"b\";v=1".to_owned(), true),
        ("lenient", "\"a\\\\b\"".to_owned(), "\"a\\\\b\";v=1".to_owned(), true),
        ("lenient", "\"a\\\"b\"".to_owned(), quoted("ab"), false),
        ("lenient", "K".to_owned(), "k".to_owned(), false),
        ("lenient", uuid.clone(), upper.clone(), false),
        ("lenient", "a'b".to_owned(), "a'b'".to_owned(), false),
        ("lenient", quoted("a,b;c()"), quoted("a,b;c"), false),
        ("lenient", long.clone(), quoted(&long), true),
        ("strict", quoted("k"), "\"k\";v=1".to_owned(), true),
        ("uuid", uuid.clone(), quoted(&uuid), true),
        ("uuid", uuid.clone(), upper.clone(), false),
        ("short", "12345678".to_owned(), quoted("12345678"), true),
        // The length is that of the decoded value.
        (
            "short",
            "\"\\\"\\\"\\\"\\\"\\\"\\\"\\\"\\\"\"".to_owned(),
            "\"\\\"\\\"\\\"\\\"\\\"\\\"\\\"\"".to_owned(),
            false,
        ),
    ];
    // (rule, value, the offending index if the text names one)
    let refused: Vec<(&str, Vec<u8>, Option<usize>)> = vec![
        ("lenient", b"".to_vec(), None),
        ("lenient", b"\"\"".to_vec(), None),
        ("lenient", b"\"SECRET".to_vec(), Some(0)),
        ("lenient", b"SECRET\"".to_vec(), Some(6)),
        ("lenient", b":SECRET==:".to_vec(), Some(0)),
        ("lenient", b"(\"SECRET\" \"b\")".to_vec(), Some(0)),
        ("lenient", b"?1".to_vec(), Some(0)),
        ("lenient", b"SECRET,b".to_vec(), Some(6)),
        ("lenient", b"\"SECRET\", \"b\"".to_vec(), Some(8)),
        ("lenient", b"\"SECRET\",\"b\"".to_vec(), Some(8)),
        ("lenient", b"SECRET b".to_vec(), Some(6)),
        ("lenient", b"\"SECRET b\"".to_vec(), Some(7)),
        ("lenient", b"\" SECRET\"".to_vec(), Some(1)),
        ("lenient", b"SECRET\tb".to_vec(), Some(6)),
        ("lenient", b"SECRET;v=1".to_vec(), Some(6)),
        ("lenient", b"SECRET\\b".to_vec(), Some(6)),
        ("lenient", b"SECRET(b".to_vec(), Some(6)),
        ("lenient", b"SECRET\xff".to_vec(), Some(6)),
        ("lenient", b"\"SECRET\xc3\xa9\"".to_vec(), Some(7)),
        ("lenient", b"\"SECRET\\b\"".to_vec(), Some(7)),
        ("lenient", b"\"SECRET\" x".to_vec(), Some(8)),
        ("lenient", b"\"SECRET\";V=1".to_vec(), Some(9)),
        ("lenient", "x".repeat(256).into_bytes(), None),
        ("lenient", quoted(&"x".repeat(256)).into_bytes(), None),
        ("strict", b"SECRET".to_vec(), Some(0)),
        ("strict", uuid.clone().into_bytes(), Some(0)),
        ("uuid", b"SECRET".to_vec(), None),
        ("uuid", format!("{{{uuid}}}").into_bytes(), None),
        ("uuid", uuid.replace('-', "").into_bytes(), None),
        ("short", b"123456789".to_vec(), None),
        ("short", b"\"123456789\"".to_vec(), None),
    ];
    let mut rejected = 0;
    for proto in Protocol::BOTH {
        for (at, (rule, one, other, same)) in pairs.iter().enumerate() {
            let path = format!("/{rule}/pair{at}/{proto:?}");
            let what = format!("{path}: {one} and {other}");
            let answers = [
                send(&envoy, proto, &Request::post(&path).account(&path).key(one).body("b")).await,
                send(&envoy, proto, &Request::post(&path).account(&path).key(other).body("b")).await,
                send(&envoy, proto, &Request::post(&path).account(&path).key(one).body("b")).await,
            ];
            assert_replay(&answers[0], &answers[2], &what);
            if *same {
                assert_replay(&answers[0], &answers[1], &what);
            } else {
                assert_ne!(answers[0].execution(), answers[1].execution(), "{what}");
            }
            assert_eq!(origin.executions(|seen| seen.path == path), if *same { 1 } else { 2 }, "{what}");
            // The keys go on as they came.
            let seen = origin.requests().into_iter().find(|seen| seen.path == path).unwrap();
            assert_eq!(seen.header_lines("idempotency-key"), [one.as_bytes()], "{what}");
        }
        for (at, (rule, value, index)) in refused.iter().enumerate() {
            let path = format!("/{rule}/bad{at}/{proto:?}");
            let what = format!("{path}: {}", value.escape_ascii());
            let answer = send(&envoy, proto, &Request::post(&path).account(&path).key(value).body("b")).await;
            rejected += 1;
            assert_refusal(&answer, 400, "invalid-key", &what);
            let detail = answer.json()["detail"].as_str().unwrap().to_owned();
            assert!(detail.contains("idempotency-key"), "{what}: {detail}");
            assert!(!answer.text().contains("SECRET") && !detail.contains("123456789"), "{what}: {detail}");
            if let Some(index) = index {
                let at = format!("at byte {index}");
                let exactly = [".", " "].iter().any(|after| detail.contains(&format!("{at}{after}")));
                assert!(exactly, "{what}: {detail}");
            }
            assert_eq!(origin.executions(|seen| seen.path == path), 0, "{what}");
        }
        // The first of them as the access log has it.
        let path = format!("/lenient/bad0/{proto:?}");
        let line = logged(&envoy, "400 idempotency_invalid_key", &path).await;
        assert_eq!(state_of(&line, &path), "refused.invalid-key rule=lenient attempt=0 key=-");
        // D10: the rule's own header counts, whatever its case, and no other.
        let path = format!("/alias/{proto:?}");
        let request = Request::post(&path).account(&path).key("k").body("b");
        assert_refusal(&send(&envoy, proto, &request).await, 400, "missing-key", &path);
        let (first, again) = (
            send(&envoy, proto, &request.clone().header("x-idem", "k")).await,
            send(&envoy, proto, &request.clone().without("idempotency-key").header("x-idem", "k")).await,
        );
        assert_replay(&first, &again, &path);
        assert_eq!(origin.executions(|seen| seen.path == path), 1);
    }
    assert_eq!(envoy.metric("rejected.invalid_key").await, rejected);
    assert!(!envoy.log_contains("SECRET"));
    assert!(envoy.access_log_lines().iter().all(|line| !line.contains("SECRET")));
}

/// D02: a key header on two lines is refused, whatever the order, the case of the name, or the values.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_key_lines_are_refused() {
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![("reject", json!({})), ("pass", json!({"missing_key": "pass"}))]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for rule in ["reject", "pass"] {
            for (at, lines) in
                [["A", "B"], ["B", "A"], ["A", "A"], ["A", ""], ["", "A"], ["\"A\"", "A"]].iter().enumerate()
            {
                // Only HTTP/1.1 has names in mixed case.
                let names = match proto {
                    Protocol::Http1 => ["Idempotency-Key", "IDEMPOTENCY-KEY"],
                    Protocol::Http2 => ["idempotency-key"; 2],
                };
                let path = format!("/{rule}/{at}/{proto:?}");
                let request = Request::post(&path)
                    .account(&path)
                    .header(names[0], lines[0])
                    .header("x-between", "1")
                    .header(names[1], lines[1]);
                let answer = send(&envoy, proto, &request.body("b")).await;
                assert_refusal(&answer, 400, "invalid-key", &path);
                assert_eq!(origin.executions(|seen| seen.path == path), 0, "{path}");
                // Nothing was claimed for either of them.
                for key in lines.iter().filter(|key| !key.is_empty()) {
                    let answer =
                        send(&envoy, proto, &Request::post(&path).account(&path).key(key).body("b")).await;
                    assert_eq!(answer.status, 200, "{path} {key}: {answer:?}");
                }
            }
        }
    }
}

// ---- the scope

/// E01, E10: callers are kept apart by whatever the rule names, and by nothing else (E03).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scope_sources_keep_callers_apart() {
    let origin = Origin::start().await;
    let host = |host: &str, patch: Value| {
        let mut rule = json!({"match": {"hosts": [host], "path": {"prefix": "/"}}});
        deep_merge(&mut rule, &patch);
        rule
    };
    let plugin = plugin_of(vec![
        ("header", json!({})),
        ("auth", json!({"scope": [{"authorization": true}]})),
        ("property", json!({"scope": [{"property": ["request", "headers", "x-tenant"]}]})),
        ("two", json!({"scope": [{"header": "x-account-id"}, {"header": "x-org"}]})),
        ("shared", json!({"scope": "shared"})),
        ("constant", json!({"scope": [{"constant": "tenant"}]})),
        ("other-header", json!({"scope": [{"header": "x-user"}]})),
        ("tenant-a", host("a.example", json!({"scope": [{"constant": "tenant-a"}]}))),
        ("tenant-b", host("b.example", json!({"scope": [{"constant": "tenant-b"}]}))),
        ("space-c", host("c.example", json!({"namespace": "c"}))),
        ("space-d", host("d.example", json!({"namespace": "d"}))),
    ]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    let post = |path: &str| Request::post(path).body("b");
    type Make = fn(Request) -> Request;
    // (path, one caller, another caller, their answers are apart)
    let rows: [(&str, Make, Make, bool); 13] = [
        ("/header", |r| r.account("alice"), |r| r.account("bob"), true),
        ("/header", |r| r.account("alice"), |r| r.account("Alice"), true),
        ("/header", |r| r.account("al\u{ef}ce"), |r| r.account("al\u{ee}ce"), true),
        // What the rule does not name does not count.
        (
            "/header",
            |r| r.header("authorization", "Bearer 1"),
            |r| r.header("authorization", "Bearer 2"),
            false,
        ),
        (
            "/header",
            |r| r.header("x-forwarded-for", "1.1.1.1"),
            |r| r.header("x-forwarded-for", "2.2.2.2"),
            false,
        ),
        ("/auth", |r| r.header("authorization", "Bearer 1"), |r| r.header("authorization", "Bearer 2"), true),
        (
            "/auth",
            |r| r.header("authorization", "Basic a b"),
            |r| r.header("authorization", "Basic ab"),
            true,
        ),
        ("/property", |r| r.header("x-tenant", "1"), |r| r.header("x-tenant", "2"), true),
        ("/two", |r| r.header("x-org", "1"), |r| r.header("x-org", "2"), true),
        ("/two", |r| r.account("a").header("x-org", "bc"), |r| r.account("ab").header("x-org", "c"), true),
        ("/shared", |r| r.account("alice"), |r| r.without("x-account-id"), false),
        ("/constant", |r| r.account("alice"), |r| r.account("bob"), false),
        ("/", |r| r.authority("a.example"), |r| r.authority("b.example"), true),
    ];
    for proto in Protocol::BOTH {
        for (at, (path, one, other, apart)) in rows.iter().enumerate() {
            let path = format!("{path}?row={at}&{proto:?}");
            let key = unique_key();
            let (one, other) = (one(post(&path).key(&key)), other(post(&path).key(&key)));
            let mut answers = Vec::new();
            for request in [&one, &other, &one, &other] {
                answers.push(send(&envoy, proto, request).await);
            }
            assert_replay(&answers[0], &answers[2], &path);
            assert_eq!((answers[3].status, &answers[3].body), (200, &answers[1].body), "{path}");
            assert_eq!(answers[0].body != answers[1].body, *apart, "{path}: {answers:?}");
            assert_eq!(origin.executions_of(&key), if *apart { 2 } else { 1 }, "{path}");
        }
        // E11: a namespace keeps the hosts apart; the same caller on another host is no mismatch then.
        let key = unique_key();
        let [c, d] = ["c.example", "d.example"].map(|host| post("/").key(&key).authority(host));
        let (first, second) = (send(&envoy, proto, &c).await, send(&envoy, proto, &d).await);
        assert_ne!(first.execution(), second.execution());
        assert_replay(&first, &send(&envoy, proto, &c).await, "a namespace of its own");
        assert_eq!(origin.executions_of(&key), 2);
        // `x-account-id: alice` is not `x-user: alice`: one key, two records, although one store holds both.
        let key = unique_key();
        let one = send(&envoy, proto, &post("/header").key(&key)).await;
        let other = send(&envoy, proto, &post("/other-header").key(&key).header("x-user", "alice")).await;
        assert_eq!((one.status, other.status), (200, 200), "{other:?}");
        assert_eq!(origin.executions_of(&key), 2);
    }
}

/// A caller that can't be told is refused and never shares a record. E07: nothing is read from a raw token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unclear_scope_is_refused() {
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![
        ("header", json!({})),
        ("long", json!({"max_scope_length": 4})),
        ("auth", json!({"scope": [{"authorization": true}]})),
        (
            "property",
            json!({"scope": [{"property": ["request", "headers", "x-tenant"]}], "max_scope_length": 4}),
        ),
        ("two", json!({"scope": [{"header": "x-account-id"}, {"header": "x-org"}]})),
        ("jwt", json!({"scope": [{"jwt_claim": "sub", "metadata_key": "payload"}]})),
        ("cert", json!({"scope": [{"peer_certificate": "subject"}]})),
    ]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    let forged = "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbGljZSJ9.";
    type Lines = Vec<(&'static str, &'static str)>;
    // (path, header lines, what the text says)
    let rows: [(&str, Lines, &str); 18] = [
        ("/header", vec![], "header x-account-id: missing"),
        ("/header", vec![("x-account-id", "")], "header x-account-id: empty"),
        ("/header", vec![("x-account-id", "SECRET"), ("x-account-id", "bob")], "more than one line"),
        ("/header", vec![("x-account-id", "SECRET"), ("x-account-id", "SECRET")], "more than one line"),
        ("/header", vec![("x-account-id", "SECRET,bob")], "a comma at byte 6"),
        ("/header", vec![("x-account-id", "SECRET bob")], "a space at byte 6"),
        ("/header", vec![("x-account-id", "SECRET\tbob")], "a control character at byte 6"),
        ("/long", vec![("x-account-id", "12345")], "longer than 4 bytes"),
        ("/auth", vec![], "header authorization: missing"),
        (
            "/auth",
            vec![("authorization", "Bearer SECRET"), ("authorization", "Bearer b")],
            "header authorization: ",
        ),
        ("/auth", vec![("authorization", "Bearer\tSECRET")], "a control character at byte 6"),
        ("/property", vec![], "property request.headers.x-tenant: missing"),
        ("/property", vec![("x-tenant", "12345")], "longer than 4 bytes"),
        ("/two", vec![("x-account-id", "alice")], "header x-org: missing"),
        ("/two", vec![("x-org", "1")], "header x-account-id: missing"),
        (
            "/jwt",
            vec![("authorization", forged), ("x-sub", "alice"), ("sub", "alice")],
            "jwt claim sub: missing",
        ),
        (
            "/cert",
            vec![("x-forwarded-client-cert", "Subject=\"CN=alice\"")],
            "subject_peer_certificate: missing",
        ),
        ("/header", vec![("X-Account-Id", "a"), ("x-account-ID", "b")], "more than one line"),
    ];
    let mut rejected = 0;
    for proto in Protocol::BOTH {
        for (at, (path, lines, says)) in rows.iter().enumerate() {
            let path = format!("{path}/{at}/{proto:?}");
            let key = unique_key();
            let mut request = Request::post(&path).without("x-account-id").key(&key).body("b");
            for (name, value) in lines {
                let name = if proto == Protocol::Http2 { name.to_lowercase() } else { (*name).to_owned() };
                request = request.header(name, value);
            }
            for _ in 0..2 {
                let answer = send(&envoy, proto, &request).await;
                assert_refusal(&answer, 400, "invalid-scope", &path);
                let detail = answer.json()["detail"].as_str().unwrap().to_owned();
                assert!(detail.contains(says), "{path}: {detail}");
                assert!(!answer.text().contains("SECRET"), "{path}: {detail}");
                rejected += 1;
            }
            assert_eq!(origin.executions_of(&key), 0, "{path}");
        }
        let path = format!("/header/0/{proto:?}");
        let line = logged(&envoy, "400 idempotency_invalid_scope", &path).await;
        assert_eq!(state_of(&line, &path), "refused.invalid-scope rule=header attempt=0 key=-");
    }
    assert_eq!(envoy.metric("rejected.invalid_scope").await, rejected);
    assert!(!envoy.log_contains("SECRET"));
}

// ---- the body

/// G08: too large by its announcement or by its bytes, a body is refused before any claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversized_body_is_refused_before_any_claim() {
    const LIMIT: usize = 20_000;
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![
        ("small", json!({"max_request_body_bytes": LIMIT})),
        ("head", json!({"max_request_body_bytes": LIMIT, "fingerprint": {"body": false}})),
        ("default", json!({})),
    ]);
    // Envoy's own limit is the same 1 MiB by default, and a frame that crosses both may meet Envoy's first.
    let options = Envoy::builder().plugin(plugin).per_connection_buffer_limit_bytes(4 << 20);
    let envoy = options.origin_addr(origin.addr()).start().await;
    let mut rejected = 0;
    for proto in Protocol::BOTH {
        for (rule, length, framing) in [
            ("small", LIMIT + 1, Framing::Length),
            ("small", LIMIT + 1, Framing::Chunks(vec![1000])),
            ("small", LIMIT + 1, Framing::Chunks(vec![LIMIT, 1])),
            ("small", 500_000, Framing::Chunks(vec![16_384])),
            ("head", LIMIT + 1, Framing::Length),
            ("default", 2 << 20, Framing::Length),
            ("default", (1 << 20) + 1, Framing::Chunks(vec![16_384])),
            ("default", 2 << 20, Framing::Chunks(vec![16_384])),
        ] {
            let key = unique_key();
            let path = format!("/{rule}/{key}");
            let what = format!("{proto:?} {rule} {length} {framing:?}");
            let small = Request::post(&path).key(&key).body(vec![b'x'; 1000]);
            let large = Request { framing, ..small.clone().body(vec![b'x'; length]) };
            let answer = send(&envoy, proto, &large).await;
            assert_refusal(&answer, 413, "payload-too-large", &what);
            rejected += 1;
            let line = logged(&envoy, "413 idempotency_payload_too_large", &path).await;
            assert_eq!(
                state_of(&line, &path),
                format!("refused.payload-too-large rule={rule} attempt=0 key=-")
            );
            assert_eq!(origin.executions_of(&key), 0, "{what}");
            let first = send(&envoy, proto, &small).await;
            assert_replay(&first, &send(&envoy, proto, &small).await, &what);
            assert_refusal(&send(&envoy, proto, &large).await, 413, "payload-too-large", &what);
            rejected += 1;
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
        for framing in [Framing::Length, Framing::Chunks(vec![LIMIT]), Framing::Chunks(vec![999])] {
            let key = unique_key();
            let request = Request { framing, ..Request::post("/small").key(&key).body(vec![b'x'; LIMIT]) };
            let first = send(&envoy, proto, &request).await;
            assert_replay(&first, &send(&envoy, proto, &request).await, "exactly the limit");
            assert_eq!(origin.executions_of(&key), 1);
        }
    }
    assert_eq!(envoy.metric("rejected.too_large").await, rejected);
    // What never reached the upstream was never sent there either.
    assert!(origin.requests().iter().all(|seen| seen.complete && seen.body.len() <= LIMIT));
}

/// Where Envoy's own limit is the lower one its own 413 comes first; that claims nothing either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn envoys_own_limit_claims_nothing_either() {
    let origin = Origin::start().await;
    let options = Envoy::builder().workers(1).per_connection_buffer_limit_bytes(32 << 10);
    let envoy = options.origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let path = format!("/{key}");
        let small = Request::post(&path).key(&key).body("small");
        // On HTTP/2 the limit is that of the stream's window, which is far larger unless it is set.
        let large = small.clone().body(vec![b'x'; 17 << 20]).chunked(&[16_384]);
        let large = if proto == Protocol::Http1 { large.body(vec![b'x'; 500_000]) } else { large };
        let answer = send(&envoy, proto, &large).await;
        assert_eq!(answer.status, 413, "{proto:?}: {answer:?}");
        if proto == Protocol::Http1 {
            assert_eq!(answer.header("x-idempotency-refusal"), None, "Envoy's own: {answer:?}");
            logged(&envoy, "413 request_payload_too_large", &path).await;
        }
        assert_eq!(origin.requests().iter().filter(|seen| seen.path == path).count(), 0, "{proto:?}");
        let first = send(&envoy, proto, &small).await;
        assert_replay(&first, &send(&envoy, proto, &small).await, "after a 413");
        assert_eq!(origin.executions_of(&key), 1, "{proto:?}");
    }
    assert_eq!(envoy.metric("unexpected_events").await, 0);
    assert_eq!(envoy.metric("in_flight").await, 0);
}

/// C15, F13: however the body is cut, and whether trailers end it, it is one request, and arrives whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_cut_of_a_body_is_one_request() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder()
        .origin_addr(origin.addr())
        .origin_http2(true)
        .http_protocol_options(json!({"enable_trailers": true}))
        .start()
        .await;
    let mut rng = Rng::new(15);
    for (length, cuts) in
        [(2000, vec![vec![1], vec![7, 1, 500], vec![2000]]), (50_000, vec![vec![8192], vec![16_384, 1]])]
    {
        let body = rng.bytes(length);
        let plain = |key: &str| Request::post("/cut").key(key).body(&body);
        let mut ways = vec![];
        for proto in Protocol::BOTH {
            ways.push((proto, Framing::Length, false));
            for cut in &cuts {
                ways.push((proto, Framing::Chunks(cut.clone()), false));
                ways.push((proto, Framing::Chunks(cut.clone()), true));
            }
        }
        ways.push((Protocol::Http2, Framing::NoLength, false));
        for first in (0..ways.len()).step_by(3) {
            let key = unique_key();
            let mut executed = None;
            for turn in 0..ways.len() {
                let (proto, framing, trailers) = ways[(first + turn) % ways.len()].clone();
                let mut request = Request { framing: framing.clone(), ..plain(&key) };
                if trailers {
                    request = request.trailer("x-sum", "17");
                }
                let what = format!("{length} bytes, {proto:?} {framing:?} trailers: {trailers}");
                let answer = send(&envoy, proto, &request).await;
                match &executed {
                    None => executed = Some(answer),
                    Some(first) => assert_replay(first, &answer, &what),
                }
            }
            assert_eq!(origin.executions_of(&key), 1);
            let seen = origin.requests().pop().unwrap();
            assert!(seen.complete && seen.body == body, "{:?}", ways[first]);
            assert_eq!(seen.trailers.is_empty(), !ways[first].2, "{:?}", ways[first]);
        }
    }
}

/// A way to say that there is no body.
#[derive(Clone, Copy, Debug)]
enum NoBody {
    H1Nothing,
    H1LengthZero,
    H1EmptyChunked,
    H2EndOnHeaders,
    H2LengthZero,
    H2EmptyData,
    H2TwoEmptyData,
}

async fn send_without_body(envoy: &Envoy, how: NoBody, request: &Request) -> Response {
    let bare = request.clone().no_content_length();
    match how {
        NoBody::H1Nothing => send(envoy, Protocol::Http1, &bare).await,
        NoBody::H1LengthZero => send(envoy, Protocol::Http1, request).await,
        NoBody::H1EmptyChunked => send(envoy, Protocol::Http1, &request.clone().chunked(&[1])).await,
        NoBody::H2EndOnHeaders => send(envoy, Protocol::Http2, &bare).await,
        NoBody::H2LengthZero => send(envoy, Protocol::Http2, request).await,
        NoBody::H2EmptyData => send(envoy, Protocol::Http2, &request.clone().chunked(&[1])).await,
        NoBody::H2TwoEmptyData => {
            let mut stream = open(envoy, &bare).await;
            stream.send_data(b"", false).await.unwrap();
            stream.send_data(b"", true).await.unwrap();
            stream.response().await.unwrap()
        }
    }
}

/// An HTTP/2 stream whose head is sent and whose body is still to come.
async fn open(envoy: &Envoy, request: &Request) -> H2Stream {
    H2::connect(envoy.addr()).await.unwrap().open(request, true).await.unwrap()
}

/// C18, C04: no body has many encodings and is one request; another path is another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_encoding_of_no_body_is_one_request() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    let ways = [
        NoBody::H1Nothing,
        NoBody::H1LengthZero,
        NoBody::H1EmptyChunked,
        NoBody::H2EndOnHeaders,
        NoBody::H2LengthZero,
        NoBody::H2EmptyData,
        NoBody::H2TwoEmptyData,
    ];
    for first in ways {
        let key = unique_key();
        let request = Request::post("/carts/1/cancel").key(&key);
        let executed = send_without_body(&envoy, first, &request).await;
        for again in ways {
            let what = format!("{first:?}, then {again:?}");
            assert_replay(&executed, &send_without_body(&envoy, again, &request).await, &what);
            let other = Request::post("/carts/2/cancel").key(&key);
            assert_refusal(&send_without_body(&envoy, again, &other).await, 422, "mismatch", &what);
        }
        let seen = origin.requests().pop().unwrap();
        assert_eq!((origin.executions_of(&key), seen.body.len()), (1, 0), "{first:?}");
    }
}

/// G03, G06: a large body is held until the verdict, goes on byte for byte, and a duplicate's never does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_arrive_whole_and_duplicates_never_do() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    let mut rng = Rng::new(6);
    for proto in Protocol::BOTH {
        for (length, framing) in [
            (900 << 10, Framing::Length),
            (900 << 10, Framing::Chunks(vec![16_384])),
            (160_000, Framing::Chunks(vec![1, 8191, 16_000])),
            (1 << 20, Framing::Length),
        ] {
            let key = unique_key();
            let body = rng.bytes(length);
            let request =
                Request { framing: framing.clone(), ..Request::post("/large").key(&key).body(&body) };
            let first = send(&envoy, proto, &request).await;
            assert_eq!(first.status, 200, "{proto:?} {length} {framing:?}: {first:?}");
            assert_eq!(origin.executions_of(&key), 1);
            assert!(origin.requests().pop().unwrap().body == body, "{proto:?} {length} {framing:?}");
            assert_replay(&first, &send(&envoy, proto, &request).await, "large");
            // C14: only the last byte differs.
            let mut other = body.clone();
            *other.last_mut().unwrap() ^= 1;
            let other = send(&envoy, proto, &Request { body: other, ..request.clone() }).await;
            assert_refusal(&other, 422, "mismatch", "the last byte");
            assert_eq!(origin.executions_of(&key), 1);
        }
    }
    let key = unique_key();
    let held = Request::post("/held").key(&key).body(rng.bytes(900 << 10));
    let first = tokio::spawn({
        let (addr, held) = (envoy.addr(), held.clone());
        async move { send_once(addr, Protocol::Http1, &held).await }
    });
    barrier.wait_arrived(1, PATIENCE).await;
    let before = envoy.stat("cluster.origin.upstream_rq_total").await;
    for proto in Protocol::BOTH {
        for length in [900 << 10, 160_000] {
            let mut request = held.clone();
            request.body.truncate(length);
            let kind = if length == held.body.len() { (409, "in-flight") } else { (422, "mismatch") };
            assert_refusal(&send(&envoy, proto, &request).await, kind.0, kind.1, "a large duplicate");
        }
    }
    assert_eq!(envoy.stat("cluster.origin.upstream_rq_total").await, before);
    barrier.open();
    let first = first.await.unwrap().unwrap();
    assert_replay(&first, &send(&envoy, Protocol::Http2, &held).await, "the held one");
    assert_eq!(origin.executions_of(&key), 1);
}

/// G23: a client that waits for 100 (Continue) gets it, and every answer, without a deadlock.
/// HTTP/1.1 only: the HTTP/2 clients that there are don't wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expect_100_continue_does_not_deadlock() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    let key = unique_key();
    let exchange = |path: &'static str, body: &'static str| {
        let (addr, key) = (envoy.addr(), key.clone());
        async move {
            let mut stream = TcpStream::connect(addr).await.unwrap();
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: api.example.com\r\nx-account-id: alice\r\nidempotency-key: {key}\r\n\
                 expect: 100-continue\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut interim = [0; 25];
            stream.read_exact(&mut interim).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&interim), "HTTP/1.1 100 Continue\r\n\r\n");
            stream.write_all(body.as_bytes()).await.unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await.unwrap();
            answer
        }
    };
    let within = |work| tokio::time::timeout(PATIENCE, work);
    let first = within(exchange("/pay", "b")).await.unwrap();
    assert!(first.starts_with("HTTP/1.1 200 "), "{first}");
    assert_eq!(origin.executions_of(&key), 1);
    let again = within(exchange("/pay", "b")).await.unwrap();
    assert!(again.starts_with("HTTP/1.1 200 ") && again.contains("idempotent-replayed: true"), "{again}");
    let other = within(exchange("/pay", "c")).await.unwrap();
    assert!(other.starts_with("HTTP/1.1 422 "), "{other}");
    assert_eq!(origin.executions_of(&key), 1);

    let key = unique_key();
    let held = Request::post("/held").key(&key).body("b");
    let first = tokio::spawn({
        let (addr, held) = (envoy.addr(), held.clone());
        async move { send_once(addr, Protocol::Http1, &held).await }
    });
    barrier.wait_arrived(1, PATIENCE).await;
    let duplicate = held.clone().header("expect", "100-continue");
    assert_refusal(
        &send(&envoy, Protocol::Http1, &duplicate).await,
        409,
        "in-flight",
        "a duplicate that expects",
    );
    barrier.open();
    assert_eq!(first.await.unwrap().unwrap().status, 200);
    assert_eq!(origin.executions_of(&key), 1);
}

// ---- the fingerprint

/// C01, C02, C04, C05, C06, C08, C11, C12, C16, C19: what makes another request, and what doesn't.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_part_of_the_fingerprint_counts() {
    let origin = Origin::start().await;
    let methods = json!({"methods": ["POST", "PATCH", "PUT"]});
    let plugin = plugin_of(vec![
        ("any-host", json!({"match": methods, "fingerprint": {"authority": false}})),
        (
            "typed",
            json!({"match": methods, "fingerprint": {"headers": ["Content-Type", "x-http-method-override"]}}),
        ),
        ("pay", json!({"match": methods})),
    ]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    type Make = fn(Request) -> Request;
    // (target, the first request, the second one, they are the same)
    let rows: Vec<(&str, Make, Make, bool)> = vec![
        ("/pay", |r| r, |r| r, true),
        ("/pay", |r| r, |r| r.method("PATCH"), false),
        ("/pay", |r| r, |r| r.authority("other.example.com"), false),
        ("/pay", |r| r, |r| r.authority("API.Example.COM"), true),
        ("/pay", |r| r, |r| r.authority("api.example.com:8080"), false),
        ("/any-host", |r| r, |r| r.authority("other.example.org"), true),
        ("/any-host", |r| r, |r| r.body("other"), false),
        ("/pay", |r| r, |r| r.body("amount=2"), false),
        ("/pay", |r| r, |r| r.body("amount=1\0"), false),
        ("/pay", |r| r, |r| r.body(""), false),
        ("/pay", |r| r.body("{\"a\":1,\"b\":2}"), |r| r.body("{\"b\":2,\"a\":1}"), false),
        ("/pay", |r| r.body("{\"a\":1}"), |r| r.body("{\"a\": 1}"), false),
        ("/pay", |r| r.body("{\"a\":1}"), |r| r.body("\u{feff}{\"a\":1}"), false),
        ("/pay", |r| r.body("{\"amount\":1,\"amount\":2}"), |r| r.body("{\"amount\":2}"), false),
        ("/pay", |r| r.header("content-type", "text/plain"), |r| r.header("content-type", "a/b"), true),
        ("/pay", |r| r, |r| r.header("x-http-method-override", "DELETE"), true),
        (
            "/pay",
            |r| r.header("user-agent", "1"),
            |r| r.header("user-agent", "2").header("x-more", "1"),
            true,
        ),
        ("/typed", |r| r.header("content-type", "text/plain"), |r| r.header("content-type", "a/b"), false),
        ("/typed", |r| r.header("content-type", "text/plain"), |r| r, false),
        ("/typed", |r| r, |r| r.header("content-type", ""), false),
        ("/typed", |r| r, |r| r.header("x-http-method-override", "DELETE"), false),
        (
            "/typed",
            |r| r.header("content-type", "a/b"),
            |r| r.header("content-type", "a/b").header("x", "y"),
            true,
        ),
    ];
    // (one target, another, they are the same): the query's pairs are sorted by name, and nothing is decoded.
    let targets = [
        ("/pay/1/cancel", "/pay/2/cancel", false),
        ("/pay", "/pay/", false),
        ("/pay/a%2Fb", "/pay/a/b", false),
        ("/pay/%7Eu", "/pay/~u", false),
        ("/pay?dry=1", "/pay", false),
        ("/pay?to=a", "/pay?to=b", false),
        ("/pay?", "/pay", false),
        ("/pay?a", "/pay?a=", false),
        ("/pay?a=1&b=2", "/pay?b=2&a=1", true),
        ("/pay?a=1&b=2&a=3", "/pay?b=2&a=1&a=3", true),
        ("/pay?a=1&a=2", "/pay?a=2&a=1", false),
        ("/pay?a=&a=b&c=", "/pay?a=&b=c&b=", false),
        ("/pay?a=&a=b", "/pay?a=a%3Db", false),
        ("/pay?x=a%26b=c", "/pay?x=a&b=c", false),
        ("/pay?a%00=b", "/pay?a=b", false),
        ("/pay?a=%1F", "/pay?a=%1f", false),
        ("/pay?a=%0A&b", "/pay?a=&b", false),
        ("/pay?a=1&&b=2", "/pay?a=1&b=2", false),
        ("/pay?=x", "/pay?x", false),
        ("/pay?a&a", "/pay?a", false),
    ];
    for proto in Protocol::BOTH {
        let mut cases = vec![];
        for (target, one, other, same) in &rows {
            let base = || Request::post(target).key(unique_key()).body("amount=1");
            let request = base();
            cases.push((one(request.clone()), other(request), *same));
        }
        for (one, other, same) in targets {
            let request = Request::post(one).key(unique_key());
            cases.push((request.clone(), Request { path: other.to_owned(), ..request }, same));
        }
        let mut mismatches = envoy.metric("mismatches").await;
        for (at, (one, other, same)) in cases.iter().enumerate() {
            let what = format!("{proto:?} row {at}: {} {one:?} and {} {other:?}", one.path, other.path);
            let first = send(&envoy, proto, one).await;
            assert_eq!(first.status, 200, "{what}: {first:?}");
            let second = send(&envoy, proto, other).await;
            if *same {
                assert_replay(&first, &second, &what);
            } else {
                assert_refusal(&second, 422, "mismatch", &what);
                mismatches += 1;
            }
            // A refused one changes nothing (A07).
            assert_replay(&first, &send(&envoy, proto, one).await, &what);
            let key = one.headers.iter().find(|line| line.0 == b"idempotency-key").unwrap();
            assert_eq!(origin.executions_of(std::str::from_utf8(&key.1).unwrap()), 1, "{what}");
        }
        assert_eq!(envoy.metric("mismatches").await, mismatches);
    }
}

/// With `body: false` the head alone decides: before the body's end, and with the listed headers in its stead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_body_the_head_alone_decides() {
    let origin = Origin::start().await;
    let plugin = plugin_of(vec![
        ("head", json!({"fingerprint": {"body": false}})),
        ("digest", json!({"fingerprint": {"body": false, "headers": ["content-digest", "content-length"]}})),
    ]);
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/head").key(&key).body("amount=1");
        let first = send(&envoy, proto, &request).await;
        assert_replay(&first, &send(&envoy, proto, &request).await, "the same");
        let other = request.clone().body("amount=1000").chunked(&[3]);
        assert_replay(&first, &send(&envoy, proto, &other).await, "another body");
        let elsewhere = Request { path: "/head/2".to_owned(), ..request };
        assert_refusal(&send(&envoy, proto, &elsewhere).await, 422, "mismatch", "another path");
        assert_eq!(origin.executions_of(&key), 1);

        let key = unique_key();
        let digest =
            |value: &str| Request::post("/digest").key(&key).header("content-digest", value).body("amount=1");
        let first = send(&envoy, proto, &digest("sha-256=:YQ==:")).await;
        assert_replay(&first, &send(&envoy, proto, &digest("sha-256=:YQ==:")).await, "the same digest");
        for other in [digest("sha-256=:Yg==:"), digest("sha-256=:YQ==:").body("longer=100")] {
            assert_refusal(&send(&envoy, proto, &other).await, 422, "mismatch", "another digest or length");
        }
        assert_eq!(origin.executions_of(&key), 1);

        // The upstream has the request before its body is over; a duplicate is refused at its head.
        let key = unique_key();
        let body = Rng::new(1).bytes(300_000);
        let request = Request::post("/head").key(&key).body(&body);
        let before = envoy.stat("cluster.origin.upstream_rq_total").await;
        let (early, late) = body.split_at(100_000);
        let mut slow = Slow::start(&envoy, proto, &request).await;
        slow.send(early, false).await;
        envoy.wait_stat("cluster.origin.upstream_rq_total", before + 1, PATIENCE).await;
        assert_refusal(&send(&envoy, proto, &request).await, 409, "in-flight", "the body is still under way");
        slow.send(late, true).await;
        let first = slow.answer().await;
        assert_replay(&first, &send(&envoy, proto, &request).await, "after its end");
        assert_eq!(origin.executions_of(&key), 1);
        assert!(origin.requests().iter().any(|seen| seen.key() == Some(key.as_bytes()) && seen.body == body));
        assert_eq!(envoy.stat("cluster.origin.upstream_rq_total").await, before + 1);
    }
}

/// A request whose body comes piece by piece.
pub enum Slow {
    Http1(H1),
    Http2(H2Stream),
}

impl Slow {
    /// Sends the head; the body's length is announced on HTTP/1.1.
    pub async fn start(envoy: &Envoy, proto: Protocol, request: &Request) -> Slow {
        match proto {
            Protocol::Http1 => {
                let mut client = H1::connect(envoy.addr()).await.unwrap();
                let length = request.body.len().to_string();
                let head = request.clone().header("content-length", length).body("");
                client.write_request(&head).await.unwrap();
                Slow::Http1(client)
            }
            Protocol::Http2 => Slow::Http2(open(envoy, request).await),
        }
    }

    pub async fn send(&mut self, piece: &[u8], end: bool) {
        match self {
            Slow::Http1(client) => client.write_raw(piece).await.unwrap(),
            Slow::Http2(stream) => stream.send_data(piece, end).await.unwrap(),
        }
    }

    pub async fn answer(&mut self) -> Response {
        let answer = async {
            match self {
                Slow::Http1(client) => client.read_response().await,
                Slow::Http2(stream) => stream.response().await,
            }
        };
        tokio::time::timeout(PATIENCE, answer).await.expect("an answer in time").unwrap()
    }
}

// ---- what the upstream sees

/// Inbound claims about attempts and protection are removed; the key goes on as it came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forged_attempts_are_removed_and_the_key_goes_on_unchanged() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = format!("\"{}\";v=1", unique_key());
        let request = Request::post("/pay")
            .header("x-idempotency-attempt", "7")
            .header("idempotency-protection", "none")
            .key(&key)
            .header("x-idempotency-attempt", "8")
            .header("x-mine", "kept")
            .body("b");
        let first = send(&envoy, proto, &request).await;
        let seen = origin.requests().pop().unwrap();
        for name in ["x-idempotency-attempt", "idempotency-protection"] {
            assert!(seen.header_lines(name).is_empty(), "{proto:?} {seen:?}");
        }
        assert_eq!(seen.header_lines("idempotency-key"), [key.as_bytes()]);
        assert_eq!(seen.header("x-mine"), Some("kept"));
        // They are no part of what makes the request the same.
        let plain = Request::post("/pay").key(&key).body("b");
        assert_replay(&first, &send(&envoy, proto, &plain).await, "without them");
        assert_eq!(origin.executions_of(&key), 1);
    }
}

// ---- the answer for each record

/// A07, A18, J01, J03: in flight is 409 with Retry-After; a mismatch is 422 first; no refusal ends the claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_duplicate_in_flight_is_told_when_to_come_again() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().workers(4).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let path = format!("/held/{proto:?}");
        let barrier = Barrier::new();
        origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
        let request = Request::post(&path).key(&key).body("b");
        let first = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
        barrier.wait_arrived(1, PATIENCE).await;
        assert_eq!(envoy.metric("in_flight").await, 1);
        let (conflicts, mismatches) = (envoy.metric("conflicts").await, envoy.metric("mismatches").await);
        for turn in 0..4 {
            let duplicate = send(&envoy, proto, &request).await;
            assert_refusal(&duplicate, 409, "in-flight", &path);
            let seconds: u64 = duplicate.header("retry-after").unwrap().parse().unwrap();
            assert!((1..=30).contains(&seconds), "{duplicate:?}");
            let other = send(&envoy, proto, &request.clone().body("c")).await;
            assert_refusal(&other, 422, "mismatch", &path);
            // A duplicate that hangs up takes nothing with it.
            let gone = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
            envoy.wait_metric("conflicts", conflicts + 2 * (turn + 1), PATIENCE).await;
            gone.abort();
        }
        assert_eq!(envoy.metric("mismatches").await, mismatches + 4);
        assert_state(
            &logged(&envoy, "409 idempotency_in_flight", &path).await,
            &path,
            "in_flight rule=payments attempt=0",
        );
        assert_state(
            &logged(&envoy, "422 idempotency_mismatch", &path).await,
            &path,
            "mismatch rule=payments attempt=0",
        );
        assert_eq!(origin.executions_of(&key), 1);
        barrier.open();
        let first = first.finish().await.unwrap();
        assert_replay(&first, &send(&envoy, proto, &request).await, &path);
        assert_refusal(&send(&envoy, proto, &request.clone().body("c")).await, 422, "mismatch", &path);
        assert_eq!(origin.executions_of(&key), 1);
        assert_state(
            &logged(&envoy, "200 via_upstream", &path).await,
            &path,
            "executed rule=payments attempt=1",
        );
        assert_state(
            &logged(&envoy, "200 idempotency_replayed", &path).await,
            &path,
            "replayed rule=payments attempt=0",
        );
        assert_eq!(envoy.metric("in_flight").await, 0);
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("unexpected_events").await, 0);
}

/// Completed, tombstone and failed: each has its answer, for good, and a mismatch comes first. B04, B07, J03.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_record_has_its_answer_and_a_mismatch_comes_first() {
    let origin = Origin::start().await;
    let made =
        |reply: Reply| reply.header("location", "/pay/17").header("etag", "\"e\"").header("x-own", "1");
    let problem = "{\"type\":\"https://upstream.example/declined\",\"status\":422}";
    let declined = Reply::status(422).header("content-type", "application/problem+json").chunk(problem);
    origin
        .on("/kept", Behaviour::func(move |_, _| async move { made(Reply::echo(201)) }))
        .on("/large", Behaviour::Respond(made(Reply::status(201)).chunk(vec![b'x'; 5000])))
        .on("/declined", Behaviour::Respond(declined))
        .on("/broken", Behaviour::Respond(Reply::status(500).chunk("boom")));
    let plugin = plugin_with(json!({"max_response_body_bytes": 4000}));
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for (path, status, counted, answer) in [
            ("/kept", 201, "replayed", (201, "", "idempotency_replayed", "replayed")),
            ("/declined", 422, "replayed", (422, "", "idempotency_replayed", "replayed")),
            (
                "/large",
                201,
                "not_kept_replies",
                (409, "response-not-kept", "idempotency_response_not_kept", "response_not_kept"),
            ),
            ("/broken", 500, "failed_replies", (424, "failed", "idempotency_failed", "failed")),
        ] {
            let key = unique_key();
            let path = format!("{path}/{key}");
            let request = Request::post(&path).key(&key).body("b");
            let first = send(&envoy, proto, &request).await;
            assert_eq!(first.status, status, "{path}: {first:?}");
            assert_eq!(first.header("idempotent-replayed"), None, "{path}");
            assert_eq!(first.header("x-idempotency-refusal"), None, "{path}");
            let (mut count, mut mismatches) = (envoy.metric(counted).await, envoy.metric("mismatches").await);
            for _ in 0..2 {
                let again = send(&envoy, proto, &request).await;
                count += 1;
                match answer.1 {
                    "" => {
                        assert_replay(&first, &again, &path);
                        for name in ["location", "etag", "x-own"] {
                            assert_eq!(again.header_lines(name), first.header_lines(name), "{path}");
                        }
                        // The upstream's own problem is the upstream's (J03).
                        assert_eq!(again.header("x-idempotency-refusal"), None, "{path}");
                    }
                    kind => assert_refusal(&again, answer.0, kind, &path),
                }
                match answer.1 {
                    "response-not-kept" => {
                        assert_eq!(first.body.len(), 5000);
                        assert_eq!(again.json()["original_status"], 201, "{again:?}");
                        assert_eq!(again.header("location"), Some("/pay/17"), "{again:?}");
                        assert_eq!(again.header("etag"), Some("\"e\""), "{again:?}");
                        assert_eq!(again.header("x-own"), None, "{again:?}");
                    }
                    "failed" => assert_eq!(again.json()["reason"], "status", "{again:?}"),
                    _ => {}
                }
                let other = send(&envoy, proto, &request.clone().body("c")).await;
                assert_refusal(&other, 422, "mismatch", &path);
                mismatches += 1;
            }
            assert_eq!(envoy.metric(counted).await, count, "{path}");
            assert_eq!(envoy.metric("mismatches").await, mismatches, "{path}");
            let start = format!("{} {}", answer.0, answer.2);
            let begins = format!("{} rule=payments attempt=0", answer.3);
            assert_state(&logged(&envoy, &start, &path).await, &path, &begins);
            assert_eq!(origin.executions_of(&key), 1, "{path}");
        }
    }
    assert_eq!(envoy.metric("tombstones").await, 2);
    assert_eq!(envoy.metric("retained.status").await, 2);
}

/// Whatever kills the worker's VM abandons its claims: once the lease is over a retry takes over as attempt 2, or is
/// told so where the rule retains; another request under the key stays a mismatch all the while.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_claim_is_taken_over_or_retained_as_the_rule_says() {
    let origin = Origin::start().await;
    let barrier = Barrier::new();
    let first_waits = Behaviour::first_waits(&barrier);
    origin.on("/takeover", first_waits.clone()).on("/retain", first_waits);
    let plugin = plugin_of(vec![
        ("takeover", json!({"lock_ttl": "1500ms"})),
        ("retain", json!({"lock_ttl": "1500ms", "on_abandoned": "retain"})),
    ]);
    let envoy = Envoy::builder()
        .plugin(plugin)
        .wasm(Wasm::TestHooks)
        .workers(1)
        .origin_addr(origin.addr())
        .start()
        .await;
    let mut clients = vec![];
    let mut cases = vec![];
    for rule in ["takeover", "retain"] {
        for proto in Protocol::BOTH {
            let key = unique_key();
            let path = format!("/{rule}/{proto:?}");
            let request = Request::post(&path).key(&key).header("x-idempotency-attempt", "9").body("b");
            clients.push(Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap());
            cases.push((rule, proto, path, key, request));
            barrier.wait_arrived(clients.len(), PATIENCE).await;
        }
    }
    // One more claim, whose request never gets past the filter: the trap comes between the two.
    let unsent_key = unique_key();
    let unsent = Request::post("/takeover/unsent").key(&unsent_key);
    assert!(!trapped(&envoy));
    let killed =
        send_once(envoy.addr(), Protocol::Http1, &unsent.clone().header("x-test-fault", "trap")).await;
    assert!(killed.as_ref().map_or(true, |answer| answer.status == 503), "{killed:?}");
    assert!(envoy.log_contains("test fault: trap") && trapped(&envoy), "{}", envoy.log_text());
    assert_eq!(origin.executions_of(&unsent_key), 0);
    drop(clients);

    // While the VM is down Envoy refuses; while the lease lives, the new VM does. The last claim's lease ends last.
    let (_, proto, _, _, last) = cases.last().unwrap();
    let seen_alive = std::cell::Cell::new(0);
    poll_until(PATIENCE, "the end of the lease", async || {
        let answer = send_once(envoy.addr(), *proto, last).await.ok()?;
        match answer.status {
            409 => {
                assert_refusal(&answer, 409, "in-flight", "the lease lives");
                seen_alive.set(seen_alive.get() + 1);
                None
            }
            503 => None,
            _ => {
                assert_refusal(&answer, 424, "abandoned", "the lease is over");
                Some(())
            }
        }
    })
    .await;
    assert_eq!(envoy.stat("wasm.idempotency.vm_reload_success").await, 1);

    for (rule, proto, path, key, request) in &cases {
        let other = request.clone().body("c");
        assert_refusal(&send(&envoy, *proto, &other).await, 422, "mismatch", path);
        assert_eq!(origin.executions_of(key), 1, "{path}");
        let retry = send(&envoy, *proto, request).await;
        if *rule == "retain" {
            assert_refusal(&retry, 424, "abandoned", path);
            assert_eq!(retry.json()["reason"], "abandoned");
            assert_state(
                &logged(&envoy, "424 idempotency_abandoned", path).await,
                path,
                "abandoned rule=retain attempt=0",
            );
            assert_eq!(origin.executions_of(key), 1, "{path}");
        } else {
            assert_eq!(retry.status, 200, "{path}: {retry:?}");
            let seen = origin.requests().into_iter().rfind(|seen| seen.path == *path).unwrap();
            assert_eq!(seen.header_lines("x-idempotency-attempt"), [b"2"], "{path}: {seen:?}");
            assert_replay(&retry, &send(&envoy, *proto, request).await, path);
            assert_eq!(origin.executions_of(key), 2, "{path}");
            let line = envoy
                .wait_access_log(|line| line.contains("attempt=2") && line.ends_with(path.as_str()), PATIENCE)
                .await;
            assert_state(&line, path, "executed rule=takeover attempt=2");
        }
        assert_refusal(&send(&envoy, *proto, &other).await, 422, "mismatch", path);
    }
    // A first attempt has no attempt header, even if the client sent one.
    let firsts = origin.requests();
    assert!(firsts[..4].iter().all(|seen| seen.header_lines("x-idempotency-attempt").is_empty()));
    barrier.open();
    let healed = send(&envoy, Protocol::Http1, &unsent).await;
    assert_eq!((healed.status, origin.executions_of(&unsent_key)), (200, 1));
    assert_eq!(origin.requests().pop().unwrap().header("x-idempotency-attempt"), Some("2"));
    assert_eq!(envoy.metric("takeovers").await, 3);
    assert!(seen_alive.get() > 0, "the lease was never seen alive");
}

/// Whether a VM of the filter has trapped; the test above shows that this would be seen.
pub fn trapped(envoy: &Envoy) -> bool {
    let log = envoy.log_text();
    ["Function: proxy_on_", "panicked at", "wasm_fail_stream"].iter().any(|sign| log.contains(sign))
        || envoy.access_log_lines().iter().any(|line| line.contains("wasm_fail_stream"))
}

/// Every status of a refusal is configurable, and so are the type's base and the replay's mark.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statuses_type_base_and_replay_header_are_configurable() {
    let origin = Origin::start().await;
    origin
        .on("/broken", Behaviour::Respond(Reply::status(500)))
        .on("/large", Behaviour::Respond(Reply::ok(vec![b'x'; 100])));
    let mut plugin = plugin_with(json!({
        "replay_header": "X-Again", "max_response_body_bytes": 99, "max_request_body_bytes": 10, "body_timeout": "200ms"
    }));
    plugin["statuses"] = json!({
        "missing_key": 428, "invalid_key": 422, "invalid_scope": 403, "body_timeout": 400, "payload_too_large": 400,
        "in_flight": 425, "mismatch": 409, "failed": 500, "response_not_kept": 410
    });
    plugin["problem_type_base"] = json!("https://docs.example/errors#");
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let post = |path: &str| Request::post(path).body("b");
        let key = unique_key();
        let [held_key, broken_key, large_key] = [(); 3].map(|()| unique_key());
        let held = post("/held").key(&held_key);
        let first = Client::connect(envoy.addr(), proto).await.start(&held).await.unwrap();
        poll_until(PATIENCE, "the held one", async || (origin.executions_of(&held_key) == 1).then_some(()))
            .await;
        assert_eq!(send(&envoy, proto, &post("/pay").key(&key)).await.status, 200);
        assert_eq!(send(&envoy, proto, &post("/broken").key(&broken_key)).await.status, 500);
        assert_eq!(send(&envoy, proto, &post("/large").key(&large_key)).await.status, 200);
        for (request, status, kind) in [
            (post("/pay"), 428, "missing-key"),
            (post("/pay").key("a b"), 422, "invalid-key"),
            (post("/pay").key(&key).without("x-account-id"), 403, "invalid-scope"),
            (post("/pay").key(unique_key()).body("longer than ten"), 400, "payload-too-large"),
            (held.clone(), 425, "in-flight"),
            (post("/pay").key(&key).body("c"), 409, "mismatch"),
            (post("/broken").key(&broken_key), 500, "failed"),
            (post("/large").key(&large_key), 410, "response-not-kept"),
        ] {
            let answer = send(&envoy, proto, &request).await;
            assert_refusal(&answer, status, kind, kind);
            assert_eq!(answer.json()["type"], format!("https://docs.example/errors#{kind}"));
        }
        let mut stalled =
            Slow::start(&envoy, proto, &post("/pay").key(unique_key()).no_content_length()).await;
        assert_refusal(&stalled.answer().await, 400, "body-timeout", "a body that never comes");
        let again = send(&envoy, proto, &post("/pay").key(&key)).await;
        assert_eq!((again.header("x-again"), again.header("idempotent-replayed")), (Some("true"), None));
        for key in [&key, &held_key, &broken_key, &large_key] {
            assert_eq!(origin.executions_of(key), 1);
        }
        barrier.open();
        assert_eq!(first.finish().await.unwrap().status, 200);
    }
}

// ---- at the same time

/// A01, A02: of 50 at once one runs; the others are told so while it runs, and replay it afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_fifty_duplicates_at_once_one_runs() {
    const MANY: usize = 50;
    let origin = Origin::start().await;
    let envoy = Envoy::builder().workers(4).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let barrier = Barrier::new();
        origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
        let before = envoy.metric("conflicts").await;
        let request = Request::post("/held").key(&key).body("b");
        let answers = tokio::spawn(burst(envoy.addr(), proto, vec![request.clone(); MANY]));
        envoy.wait_metric("conflicts", before + MANY as u64 - 1, PATIENCE).await;
        barrier.wait_arrived(1, PATIENCE).await;
        assert_eq!((barrier.arrived(), origin.executions_of(&key)), (1, 1));
        barrier.open();
        let answers: Vec<Response> = answers.await.unwrap().into_iter().map(Result::unwrap).collect();
        let (ran, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
        assert_eq!((ran.len(), refused.len()), (1, MANY - 1));
        refused.iter().for_each(|answer| assert_refusal(answer, 409, "in-flight", "a duplicate"));
        for answer in burst(envoy.addr(), proto, vec![request; 10]).await {
            assert_replay(&ran[0], &answer.unwrap(), "afterwards");
        }
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("store_errors").await, 0);
}

/// A17: two payloads under one key at once: one of them runs and replays, the other is always a mismatch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_payloads_under_one_key_one_runs_and_the_other_never() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().workers(4).origin_addr(origin.addr()).start().await;
    let mut winners = [0, 0];
    for proto in Protocol::BOTH {
        for round in 0..6 {
            let key = unique_key();
            let barrier = Barrier::new();
            origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
            let request = |which: usize| Request::post("/held").key(&key).body(["one", "two"][which]);
            let counts = async || envoy.metric("conflicts").await + envoy.metric("mismatches").await;
            let before = counts().await;
            // Which one comes first changes from round to round.
            let requests: Vec<_> = (0..16).map(|nth| request((nth + round) % 2)).collect();
            let answers = tokio::spawn(burst(envoy.addr(), proto, requests));
            poll_until(PATIENCE, "15 refusals", async || (counts().await >= before + 15).then_some(())).await;
            barrier.wait_arrived(1, PATIENCE).await;
            assert_eq!((barrier.arrived(), origin.executions_of(&key)), (1, 1));
            barrier.open();
            let answers: Vec<Response> = answers.await.unwrap().into_iter().map(Result::unwrap).collect();
            let winner = answers.iter().position(|answer| answer.status == 200).expect("one that ran");
            let which = (winner + round) % 2;
            winners[which] += 1;
            for (nth, answer) in answers.iter().enumerate() {
                match (nth == winner, (nth + round) % 2 == which) {
                    (true, _) => {}
                    (false, true) => assert_refusal(answer, 409, "in-flight", "the same payload"),
                    (false, false) => assert_refusal(answer, 422, "mismatch", "the other payload"),
                }
            }
            assert_replay(&answers[winner], &send(&envoy, proto, &request(which)).await, "the one that ran");
            assert_refusal(&send(&envoy, proto, &request(1 - which)).await, 422, "mismatch", "the other");
            assert_eq!(origin.executions_of(&key), 1);
            assert_eq!(origin.requests().pop().unwrap().body, ["one", "two"][which].as_bytes());
        }
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(winners[0] + winners[1], 12);
}

/// A01 on many keys: whatever the workers do at the same time, each key runs once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_keys_at_once_run_once_each() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().workers(4).origin_addr(origin.addr()).start().await;
    let envoy = Arc::new(envoy);
    for proto in Protocol::BOTH {
        let keys: Vec<String> = (0..60).map(|_| unique_key()).collect();
        let senders: Vec<_> = (0..4)
            .map(|sender| {
                let (envoy, keys) = (envoy.clone(), keys.clone());
                tokio::spawn(async move {
                    let mut client = Client::connect(envoy.addr(), proto).await;
                    let mut statuses = vec![];
                    for at in 0..keys.len() {
                        // Two go up, two go down: they meet on every key.
                        let at = if sender % 2 == 0 { at } else { keys.len() - 1 - at };
                        let request = Request::post("/pay").key(&keys[at]).body("b");
                        statuses.push(client.send(&request).await.unwrap().status);
                    }
                    statuses
                })
            })
            .collect();
        for sender in senders {
            let statuses = sender.await.unwrap();
            assert!(statuses.iter().all(|status| [200, 409].contains(status)), "{statuses:?}");
        }
        for key in &keys {
            assert_eq!(origin.executions_of(key), 1, "{proto:?}");
        }
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("executed").await, 120);
}
