//! A replay is the first response again: its status, its lines, its bytes; and a first response is what the upstream
//! sent, as it sent it.

use std::net::SocketAddr;

use bytes::Bytes;
use serde_json::json;

use crate::support::envoy::config::cluster;
use crate::support::*;

/// Lines that belong to one exchange, or that the filter itself sets on a replay.
const NOT_COMPARED: [&str; 9] = [
    "date",
    "server",
    "content-length",
    "transfer-encoding",
    "connection",
    "cache-control",
    "idempotent-replayed",
    "x-envoy-upstream-service-time",
    "retry-after",
];

type Lines = Vec<(String, Vec<u8>)>;

/// The lines that a replay has in common with the first response; on HTTP/2 sorted by name, since the client gives
/// them in no order.
fn kept_lines(response: &Response, proto: Protocol) -> Lines {
    let mut lines: Lines = response
        .headers
        .iter()
        .map(|(name, value)| (String::from_utf8_lossy(name).to_ascii_lowercase(), value.clone()))
        .filter(|(name, _)| !NOT_COMPARED.contains(&name.as_str()))
        .collect();
    if proto == Protocol::Http2 {
        lines.sort_by(|a, b| a.0.cmp(&b.0));
    }
    lines
}

/// The marks of a replay, each exactly once, and a length that is the body's.
fn assert_replay(response: &Response, what: &str) {
    assert_eq!(response.header_lines("idempotent-replayed"), [b"true"], "{what}: {response:?}");
    assert_eq!(response.header_lines("cache-control"), [b"no-store"], "{what}: {response:?}");
    assert_eq!(response.header_lines("date").len(), 1, "{what}: {response:?}");
    assert_eq!(response.header_lines("transfer-encoding"), [b""; 0], "{what}: {response:?}");
    let length = response.body.len().to_string();
    match response.header_lines("content-length").as_slice() {
        [] => assert!(response.body.is_empty(), "{what}: {response:?}"),
        lines => {
            assert!(![204, 304].contains(&response.status), "{what}: {response:?}");
            assert_eq!(*lines, [length.as_bytes()], "{what}: {response:?}");
        }
    }
}

/// The first response and its replay over one connection, which serves a further request afterwards.
async fn first_and_replay(envoy: SocketAddr, proto: Protocol, path: &str, key: &str) -> (Response, Response) {
    let what = format!("{path} {proto:?}");
    let request = Request::post(path).key(key).body("amount=1");
    let mut client = Client::connect(envoy, proto).await;
    let first = client.send(&request).await.expect(&what);
    assert_eq!(first.header("idempotent-replayed"), None, "{what}: {first:?}");
    let replay = client.send(&request).await.expect(&what);
    assert_replay(&replay, &what);
    assert_eq!(replay.status, first.status, "{what}: {replay:?}");
    assert!(replay.body == first.body, "{what}: {} bytes, then {}", first.body.len(), replay.body.len());
    assert_eq!(kept_lines(&replay, proto), kept_lines(&first, proto), "{what}");
    // F03: the connection is still in step.
    let after = client.send(&Request::post("/after").key(unique_key()).body("b")).await.expect(&what);
    assert_eq!((after.status, after.header("idempotent-replayed")), (200, None), "{what}: {after:?}");
    (first, replay)
}

/// Bytes that compress badly and repeat nowhere.
fn random_bytes(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(length).collect()
}

/// Paths under `/2/` go to the same origin over HTTP/2.
fn both_upstreams(builder: envoy::Builder, origin: SocketAddr) -> envoy::Builder {
    builder.origin_addr(origin).extra_cluster(cluster("http2", origin, true)).routes(vec![
        json!({"match": {"prefix": "/2/"}, "route": {"cluster": "http2"}}),
        json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}}),
    ])
}

const UPSTREAMS: [&str; 2] = ["/1/", "/2/"];

async fn assert_sound(envoy: &Envoy) {
    poll_until(PATIENCE, "no claim held", async || (envoy.metric("in_flight").await == 0).then_some(()))
        .await;
    for name in ["unexpected_events", "host_errors", "stale_writes", "store_errors"] {
        assert_eq!(envoy.metric(name).await, 0, "{name}");
    }
}

/// F04, B10, G05, F01: whatever the bytes, the framing and the protocol.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_are_replayed_byte_for_byte() {
    let gzip: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xcbH\xcd\xc9\xc9\x07\0\x86\xa6\x106\x05\0\0\0";
    let all_bytes: Vec<u8> = (0..=255).collect();
    let large = random_bytes(1 << 20);
    let bodies: Vec<(&str, Vec<u8>)> = vec![
        ("every-byte", all_bytes),
        ("invalid-utf8", b"{\"name\": \"\xff\xfe\xc3\x28\"}".to_vec()),
        ("floats", b"{\"a\":1.0, \"b\":1e2 ,\"a\":2}".to_vec()),
        ("mebibyte", large.clone()),
        ("g05", large[..25_246].to_vec()),
        ("one", b"x".to_vec()),
        ("zero-digit", b"0".to_vec()),
        ("null", b"null".to_vec()),
        ("object", b"{}".to_vec()),
        ("gzip", gzip.to_vec()),
        ("crlf", b"\r\n\r\nHTTP/1.1 200 OK\r\n\r\n".to_vec()),
        ("empty", vec![]),
    ];
    let origin = Origin::start().await;
    for upstream in UPSTREAMS {
        for (name, body) in &bodies {
            let mut reply = Reply::status(201).header("x-case", name);
            if *name == "gzip" {
                reply = reply.header("content-encoding", "gzip");
            }
            // G05: frames of 8 KiB, the last one short.
            for piece in body.chunks(8192) {
                reply = reply.chunk(piece.to_vec());
            }
            origin.on(&format!("{upstream}length/{name}"), Behaviour::Respond(reply.clone()));
            origin.on(&format!("{upstream}stream/{name}"), Behaviour::Respond(reply.no_content_length()));
        }
    }
    let rule = plugin_with(json!({"max_response_body_bytes": 1 << 20}));
    let envoy = both_upstreams(Envoy::builder().plugin(rule), origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for upstream in UPSTREAMS {
            for framing in ["length", "stream"] {
                for (name, body) in &bodies {
                    let key = unique_key();
                    let path = format!("{upstream}{framing}/{name}");
                    let (first, _) = first_and_replay(envoy.addr(), proto, &path, &key).await;
                    assert!(first.body == *body, "{path} {proto:?}: {} bytes", first.body.len());
                    assert_eq!(first.header("x-case"), Some(*name), "{path} {proto:?}");
                    assert_eq!(origin.executions_of(&key), 1, "{path} {proto:?}");
                }
            }
        }
    }
    assert_eq!(envoy.metric("tombstones").await, 0);
    assert_sound(&envoy).await;
}

/// Asserts the answer to a retry whose response was not kept.
fn assert_not_kept(response: &Response, original_status: u16, what: &str) {
    assert_eq!(
        (response.status, response.problem_type().as_deref(), response.header("x-idempotency-refusal")),
        (409, Some("response-not-kept"), Some("response-not-kept")),
        "{what}: {response:?}"
    );
    assert_eq!(response.json()["original_status"], original_status, "{what}");
    assert_eq!(response.header("retry-after"), None, "{what}: retrying is in vain");
    assert_eq!(response.header("idempotent-replayed"), None, "{what}");
}

/// B07, B08: at the limit everything is kept, past it nothing: never a beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_over_the_limit_is_delivered_whole_and_never_kept() {
    const LIMIT: usize = 20_000;
    let origin = Origin::start().await;
    let body = random_bytes(5 << 20);
    let sizes = [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 5 << 20];
    for upstream in UPSTREAMS {
        for size in sizes {
            let mut reply = Reply::status(201)
                .header("location", "/pay/7")
                .header("etag", "\"7\"")
                .header("x-other", "1");
            for piece in body[..size].chunks(16_384) {
                reply = reply.chunk(piece.to_vec());
            }
            origin.on(&format!("{upstream}length/{size}/"), Behaviour::Respond(reply.clone()));
            origin.on(&format!("{upstream}stream/{size}/"), Behaviour::Respond(reply.no_content_length()));
        }
    }
    let rule = plugin_with(json!({"max_response_body_bytes": LIMIT}));
    let envoy = both_upstreams(Envoy::builder().plugin(rule), origin.addr()).start().await;
    let mut tombstones = 0;
    for proto in Protocol::BOTH {
        for upstream in UPSTREAMS {
            for framing in ["length", "stream"] {
                for size in sizes {
                    let what = format!("{upstream}{framing}/{size}/");
                    let key = unique_key();
                    if size <= LIMIT {
                        let (first, _) = first_and_replay(envoy.addr(), proto, &what, &key).await;
                        assert!(first.body == body[..size], "{what} {proto:?}");
                    } else {
                        tombstones += 1;
                        let request = Request::post(&what).key(&key).body("amount=1");
                        let first = send_once(envoy.addr(), proto, &request).await.unwrap();
                        assert_eq!(first.status, 201, "{what} {proto:?}");
                        assert!(first.body == body[..size], "{what} {proto:?}");
                        for _ in 0..2 {
                            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
                            assert_not_kept(&retry, 201, &what);
                            assert_eq!(retry.header("location"), Some("/pay/7"), "{what}");
                            assert_eq!(retry.header("etag"), Some("\"7\""), "{what}");
                            assert_eq!(retry.header("x-other"), None, "{what}");
                        }
                    }
                    assert_eq!(origin.executions_of(&key), 1, "{what} {proto:?}");
                }
            }
        }
    }
    assert_eq!(envoy.metric("tombstones").await, tombstones);
    assert_sound(&envoy).await;
}

/// A whole response as it stands on the wire, and what its replay has to look like.
struct Raw {
    name: &'static str,
    bytes: &'static str,
    end: End,
    status: u16,
    body: &'static str,
    content_type: &'static [&'static str],
}

const fn raw(
    name: &'static str,
    bytes: &'static str,
    status: u16,
    body: &'static str,
    content_type: &'static [&'static str],
) -> Raw {
    Raw { name, bytes, end: End::KeepOpen, status, body, content_type }
}

const RAW: &[Raw] = &[
    raw("no-type", "200 OK\r\ncontent-length: 2\r\n\r\nhi", 200, "hi", &[]),
    raw(
        "csv",
        "200 OK\r\ncontent-type: text/csv; charset=latin1\r\ncontent-length: 2\r\n\r\nhi",
        200,
        "hi",
        &["text/csv; charset=latin1"],
    ),
    raw(
        "odd-type",
        "200 OK\r\ncontent-type: a/B;c=\"d; e\"\r\ncontent-length: 2\r\n\r\nhi",
        200,
        "hi",
        &["a/B;c=\"d; e\""],
    ),
    raw("empty-type", "200 OK\r\ncontent-type:\r\ncontent-length: 2\r\n\r\nhi", 200, "hi", &[""]),
    raw("created", "201 Created\r\ncontent-length: 0\r\n\r\n", 201, "", &[]),
    raw(
        "created-type",
        "201 Created\r\ncontent-type: application/json\r\ncontent-length: 0\r\n\r\n",
        201,
        "",
        &["application/json"],
    ),
    raw("ok-chunked-empty", "200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 200, "", &[]),
    raw(
        "chunked-type-empty",
        "200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        200,
        "",
        &["a/b"],
    ),
    raw(
        "chunked",
        "200 OK\r\ncontent-type: a/b\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n",
        200,
        "hi!",
        &["a/b"],
    ),
    raw("no-content", "204 No Content\r\n\r\n", 204, "", &[]),
    raw("no-content-type", "204 No Content\r\ncontent-type: a/b\r\n\r\n", 204, "", &["a/b"]),
    raw("not-modified", "304 Not Modified\r\netag: \"1\"\r\n\r\n", 304, "", &[]),
    raw(
        "not-modified-length",
        "304 Not Modified\r\netag: \"1\"\r\ncontent-type: a/b\r\ncontent-length: 1234\r\n\r\n",
        304,
        "",
        &["a/b"],
    ),
    raw("unknown-status", "299 Odd\r\ncontent-length: 2\r\n\r\nhi", 299, "hi", &[]),
    raw(
        "hints",
        "103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nhi",
        201,
        "hi",
        &[],
    ),
    raw(
        "continue",
        "100 Continue\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nhi",
        201,
        "hi",
        &[],
    ),
    raw(
        "lines",
        "201 Created\r\nlink: </a>; rel=a\r\nx-one: 1\r\nvary: a\r\nlink: </b>; rel=b\r\nwarning: 199 - \"a\"\r\n\
         location: /pay/7\r\nvary: b, c\r\netag: W/\"7\"\r\nx-two:\r\nwarning: 199 - \"b\"\r\nx-one: 1\r\n\
         x-idempotency-note: mine\r\ncontent-language: de\r\nlink: </a>; rel=a\r\ncontent-length: 2\r\n\r\nhi",
        201,
        "hi",
        &[],
    ),
    // Neither a length nor chunks: the close is the end.
    Raw {
        name: "until-close",
        bytes: "200 OK\r\nconnection: close\r\n\r\nto the end",
        end: End::Close,
        status: 200,
        body: "to the end",
        content_type: &[],
    },
];

/// F01, F03, F06, F07, F08, F11: lines as they were, none invented, and no body where none may be.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_are_replayed_line_by_line() {
    let origin = RawOrigin::start_with(|seen, _| {
        let case = RAW.iter().find(|case| seen.path.trim_start_matches('/') == case.name);
        case.map_or(RawReply::whole(200, &[], b""), |case| {
            RawReply::new(format!("HTTP/1.1 {}", case.bytes), case.end)
        })
    })
    .await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for case in RAW {
            let what = format!("{} {proto:?}", case.name);
            let key = unique_key();
            let (first, replay) =
                first_and_replay(envoy.addr(), proto, &format!("/{}", case.name), &key).await;
            assert_eq!(origin.executions_of(&key), 1, "{what}");
            for response in [&first, &replay] {
                assert_eq!(
                    (response.status, response.text().as_str()),
                    (case.status, case.body),
                    "{what}: {response:?}"
                );
                let types: Vec<&[u8]> = case.content_type.iter().map(|line| line.as_bytes()).collect();
                assert_eq!(response.header_lines("content-type"), types, "{what}: {response:?}");
            }
            if case.name == "lines" {
                assert_eq!(
                    replay.header_lines("link"),
                    [&b"</a>; rel=a"[..], b"</b>; rel=b", b"</a>; rel=a"],
                    "{what}"
                );
                // Envoy itself joins the lines of Vary, before any filter.
                assert_eq!(replay.header_lines("vary"), [b"a,b, c"], "{what}");
                assert_eq!(replay.header_lines("warning"), [&b"199 - \"a\""[..], b"199 - \"b\""], "{what}");
                assert_eq!(replay.header_lines("x-one"), [b"1", b"1"], "{what}");
                assert_eq!(replay.header_lines("x-two"), [b""], "{what}");
                assert_eq!(
                    (replay.header("location"), replay.header("etag")),
                    (Some("/pay/7"), Some("W/\"7\""))
                );
            }
        }
    }
    assert_eq!(envoy.metric("tombstones").await, 0);
    assert_sound(&envoy).await;
}

/// F13: an end by trailers is an end, and a response with them is not kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trailers_end_a_request_and_make_a_response_a_tombstone() {
    let origin = Origin::start().await;
    origin.on("/2/trailers", Behaviour::Respond(Reply::status(201).chunk("body").trailer("x-sum", "1")));
    origin.on("/2/only", Behaviour::Respond(Reply::status(202).trailer("x-sum", "1")));
    let announced = Reply::status(203).header("content-length", "4").chunk("body").trailer("x-sum", "1");
    origin.on("/2/announced", Behaviour::Respond(announced));
    let builder = both_upstreams(Envoy::builder(), origin.addr());
    let envoy = builder.http_protocol_options(json!({"enable_trailers": true})).start().await;
    for proto in Protocol::BOTH {
        for (path, status, body) in
            [("/2/trailers", 201, "body"), ("/2/only", 202, ""), ("/2/announced", 203, "body")]
        {
            let key = unique_key();
            let request = Request::post(path).key(&key).body("amount=1");
            let first = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((first.status, first.text().as_str()), (status, body), "{path} {proto:?}");
            // HTTP/1 can't carry trailers after a content-length.
            if proto == Protocol::Http2 || path != "/2/announced" {
                let trailers = first.trailers.as_deref().unwrap_or_default();
                assert_eq!(trailers, [(b"x-sum".to_vec(), b"1".to_vec())], "{path} {proto:?}");
            }
            assert_not_kept(&send_once(envoy.addr(), proto, &request).await.unwrap(), status, path);
            assert_eq!(origin.executions_of(&key), 1, "{path} {proto:?}");
        }
        // Request trailers: the claim is made at their end, with and without a body before them.
        for body in ["amount=1", ""] {
            for upstream in UPSTREAMS {
                let key = unique_key();
                let path = format!("{upstream}request");
                let request =
                    Request::post(&path).key(&key).body(body).chunked(&[3]).trailer("x-check", "abc");
                let first = send_once(envoy.addr(), proto, &request).await.unwrap();
                let replay = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_replay(&replay, &path);
                assert_eq!((first.status, first.execution()), (200, replay.execution()), "{path} {proto:?}");
                assert_eq!(origin.executions_of(&key), 1, "{path} {proto:?}");
                let seen =
                    origin.requests().into_iter().find(|seen| seen.key() == Some(key.as_bytes())).unwrap();
                assert_eq!(seen.body, body.as_bytes(), "{path} {proto:?}");
                if upstream == "/2/" {
                    assert_eq!(seen.trailers, [("x-check".to_owned(), b"abc".to_vec())], "{path} {proto:?}");
                }
            }
        }
    }
    assert_eq!(envoy.metric("tombstones").await, 6);
    assert_sound(&envoy).await;
}

/// Lines about one exchange, each with a value that only the first response may have.
const EXCHANGE_LINES: [(&str, &str); 23] = [
    ("date", "Mon, 01 Jan 2001 00:00:00 GMT"),
    ("age", "17"),
    ("server", "first"),
    ("x-request-id", "first"),
    ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    ("tracestate", "a=first"),
    ("x-envoy-upstream-service-time", "4711"),
    ("x-envoy-anything", "first"),
    ("set-cookie", "session=first"),
    ("www-authenticate", "Basic realm=first"),
    ("proxy-authenticate", "Basic realm=first"),
    ("proxy-status", "first"),
    ("alt-svc", "h3=\":443\""),
    ("retry-after", "17"),
    ("ratelimit", "limit=10, remaining=1"),
    ("ratelimit-remaining", "1"),
    ("ratelimit-policy", "10;w=1"),
    ("server-timing", "db;dur=1"),
    ("keep-alive", "timeout=5"),
    ("idempotent-replayed", "maybe"),
    ("idempotency-protection", "none"),
    ("cache-control", "max-age=60"),
    ("x-dropped-by-rule", "first"),
];

/// F16, F17: what belongs to the first exchange is not replayed, what the rule names is or is not, and the marker is
/// set when a replay is sent, never kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_of_one_exchange_are_not_replayed() {
    let mut head = "HTTP/1.1 200 OK\r\nconnection: keep-alive, x-hop\r\nx-hop: first\r\n".to_owned();
    for (name, value) in EXCHANGE_LINES {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    head.push_str("set-cookie: second=first\r\nx-kept: yes\r\ncontent-length: 2\r\n\r\nhi");
    let origin = RawOrigin::start(RawReply::new(head, End::KeepOpen)).await;
    let keeping = {
        let mut plugin = plugin_with(json!({
            "drop_response_headers": ["X-Dropped-By-Rule"], "replay_header": "X-Again",
            "keep_response_headers": ["Set-Cookie", "www-authenticate", "ratelimit", "retry-after"]
        }));
        plugin["store"]["shared_data"]["namespace"] = json!("keeping");
        plugin
    };
    let mut second = ListenerSpec::new("keeping", Some(FilterSpec::new("keeping", keeping)));
    second.routes = vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}})];
    let rule = json!({"drop_response_headers": ["x-dropped-by-rule"]});
    let envoy =
        Envoy::builder().plugin(plugin_with(rule)).origin_addr(origin.addr()).listener(second).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let first = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_eq!(first.header("cache-control"), Some("max-age=60"));
        assert_eq!(
            first.header_lines("set-cookie").len(),
            2,
            "the first response is the upstream's: {first:?}"
        );
        let replay = send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_replay(&replay, "default");
        assert_eq!((replay.text().as_str(), replay.header("x-kept")), ("hi", Some("yes")));
        for (name, value) in EXCHANGE_LINES {
            let lines = replay.header_lines(name);
            assert!(!lines.contains(&value.as_bytes()), "{name} {proto:?}: {replay:?}");
            let set_anew = ["date", "server", "idempotent-replayed", "cache-control"].contains(&name);
            assert_eq!(lines.len(), usize::from(set_anew), "{name} {proto:?}: {replay:?}");
        }
        assert_eq!(replay.header("x-hop"), None);
        let year = replay.header("date").unwrap().split(' ').nth(3).unwrap().parse::<u32>().unwrap();
        assert!(year > 2024, "{replay:?}");
        assert_eq!(origin.executions_of(&key), 1);

        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let addr = envoy.addr_of("keeping");
        send_once(addr, proto, &request).await.unwrap();
        let replay = send_once(addr, proto, &request).await.unwrap();
        assert_eq!(replay.header_lines("set-cookie"), [&b"session=first"[..], b"second=first"], "{replay:?}");
        assert_eq!(replay.header("www-authenticate"), Some("Basic realm=first"));
        assert_eq!(
            (replay.header("ratelimit"), replay.header("retry-after")),
            (Some("limit=10, remaining=1"), Some("17"))
        );
        assert_eq!(replay.header("ratelimit-remaining"), None);
        assert_eq!(replay.header("x-dropped-by-rule"), None);
        assert_eq!(replay.header("x-again"), Some("true"));
        // Another marker's name makes this an ordinary line of the upstream's.
        assert_eq!(replay.header("idempotent-replayed"), Some("maybe"));
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert_sound(&envoy).await;
}

/// E13: what one origin may read is not told another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cors_lines_are_replayed_to_the_same_origin_only() {
    let upstream = Origin::start().await;
    let reply = Reply::ok("hi").header("vary", "origin").header("access-control-expose-headers", "x-id");
    upstream.on(
        "/",
        Behaviour::func(move |seen, _| {
            let origin = seen.header("origin").unwrap_or("*").to_owned();
            let reply = reply.clone().header("access-control-allow-origin", origin);
            async move { reply }
        }),
    );
    let envoy = Envoy::builder().origin_addr(upstream.addr()).start().await;
    let (a, b) = (Some("https://a.example"), Some("https://b.example"));
    for proto in Protocol::BOTH {
        for first_from in [a, None] {
            let key = unique_key();
            let request = |origin: Option<&str>| {
                let request = Request::post("/pay").key(&key).body("amount=1");
                origin.map_or(request.clone(), |origin| request.header("origin", origin))
            };
            let first = send_once(envoy.addr(), proto, &request(first_from)).await.unwrap();
            assert_eq!(first.header("access-control-allow-origin"), Some(first_from.unwrap_or("*")));
            for from in [a, b, None] {
                let replay = send_once(envoy.addr(), proto, &request(from)).await.unwrap();
                assert_replay(&replay, "cors");
                assert_eq!(replay.header("vary"), Some("origin"));
                let allowed = from.filter(|_| from == first_from);
                assert_eq!(
                    replay.header("access-control-allow-origin"),
                    allowed,
                    "{first_from:?} {from:?}: {replay:?}"
                );
                assert_eq!(
                    replay.header("access-control-expose-headers"),
                    allowed.map(|_| "x-id"),
                    "{from:?}"
                );
            }
            assert_eq!(upstream.executions_of(&key), 1);
        }
    }
    assert_sound(&envoy).await;
}

/// What routes and virtual hosts add, Envoy adds to a replay too: a line that was kept with it is not doubled, and
/// what the record doesn't hold is of now.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_that_the_route_adds_are_not_doubled_on_a_replay() {
    let add = |name: &str, value: &str, action: &str| json!({"header": {"key": name, "value": value}, "append_action": action});
    let origin = Origin::start().await;
    origin.on(
        "/",
        Behaviour::Respond(Reply::ok("hi").header("x-both", "upstream").header("cache-control", "public")),
    );
    let routes = vec![json!({
        "match": {"prefix": "/"}, "route": {"cluster": "origin"},
        "response_headers_to_add": [
            add("x-route", "route", "APPEND_IF_EXISTS_OR_ADD"),
            add("x-both", "route", "APPEND_IF_EXISTS_OR_ADD"),
            add("cache-control", "private", "OVERWRITE_IF_EXISTS_OR_ADD"),
            add("set-cookie", "a=%REQ(x-cookie)%", "APPEND_IF_EXISTS_OR_ADD"),
        ]
    })];
    let host = json!({"response_headers_to_add": [add("x-host", "host", "OVERWRITE_IF_EXISTS_OR_ADD")]});
    let envoy = Envoy::builder().origin_addr(origin.addr()).routes(routes).virtual_host(host).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        let first = send_once(envoy.addr(), proto, &request.clone().header("x-cookie", "1")).await.unwrap();
        let replay = send_once(envoy.addr(), proto, &request.clone().header("x-cookie", "2")).await.unwrap();
        assert_replay(&replay, "route");
        for response in [&first, &replay] {
            assert_eq!(response.header_lines("x-route"), [b"route"], "{response:?}");
            assert_eq!(response.header_lines("x-host"), [b"host"], "{response:?}");
            assert_eq!(response.header_lines("x-both"), [&b"upstream"[..], b"route"], "{response:?}");
        }
        assert_eq!(first.header("cache-control"), Some("private"));
        // Not kept, so what the route adds is of this exchange.
        assert_eq!(replay.header_lines("set-cookie"), [b"a=2"], "{replay:?}");
        assert_eq!(origin.executions_of(&key), 1);
        let mismatch = send_once(envoy.addr(), proto, &request.body("amount=2")).await.unwrap();
        assert_eq!(
            (mismatch.status, mismatch.header_lines("x-route")),
            (422, vec![&b"route"[..]]),
            "{mismatch:?}"
        );
        assert_eq!(mismatch.problem_type().as_deref(), Some("mismatch"));
    }
    assert_sound(&envoy).await;
}

/// Event streams are never captured, but they count as done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_stream_flows_and_is_not_kept() {
    let origin = Origin::start().await;
    let envoy = both_upstreams(Envoy::builder(), origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for upstream in UPSTREAMS {
            let path = format!("{upstream}{proto:?}");
            let barrier = Barrier::new();
            let reply = Reply::status(200)
                .header("content-type", "text/event-stream; charset=utf-8")
                .no_content_length();
            origin.on(
                &path,
                Behaviour::Respond(reply.chunk("data: 1\n\n").wait(&barrier).chunk("data: 2\n\n")),
            );
            let key = unique_key();
            let request = Request::post(&path).key(&key).body("amount=1");
            let mut pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
            pending.head().await.unwrap();
            assert_eq!(pending.read_exactly(9).await.unwrap(), b"data: 1\n\n", "{path}");
            let meanwhile = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(meanwhile.problem_type().as_deref(), Some("in-flight"), "{path}");
            barrier.open();
            assert_eq!(pending.finish().await.unwrap().text(), "data: 1\n\ndata: 2\n\n", "{path}");
            assert_not_kept(&send_once(envoy.addr(), proto, &request).await.unwrap(), 200, &path);
            assert_eq!(origin.executions_of(&key), 1, "{path}");
        }
    }
    assert_eq!(envoy.metric("tombstones").await, 4);
    assert_sound(&envoy).await;
}

/// The captures of a worker are bounded together: what doesn't fit is a tombstone, and the room comes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn captures_over_the_budget_become_tombstones() {
    const CHUNK: usize = 100_000;
    let origin = Origin::start().await;
    let mut plugin = default_plugin();
    plugin["limits"] = json!({"captured_bytes": 2 * CHUNK + CHUNK / 2});
    // The budget is one worker's.
    let envoy = Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr()).start().await;
    let body = Bytes::from(random_bytes(CHUNK));
    for proto in Protocol::BOTH {
        let path = format!("/{proto:?}");
        let barrier = Barrier::new();
        let reply = Reply::status(200).no_content_length();
        origin.on(&path, Behaviour::Respond(reply.chunk(body.clone()).wait(&barrier).chunk("end")));
        let mut running = vec![];
        for _ in 0..4 {
            let key = unique_key();
            let request = Request::post(&path).key(&key).body("amount=1");
            let mut pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
            pending.head().await.unwrap();
            // All of the chunk came through, so all of it was captured or given up.
            assert_eq!(pending.read_exactly(CHUNK).await.unwrap().len(), CHUNK);
            running.push((key, request, pending));
        }
        barrier.open();
        for (nth, (key, request, pending)) in running.into_iter().enumerate() {
            let what = format!("{nth} {proto:?}");
            let first = pending.finish().await.unwrap();
            assert_eq!((first.body.len(), &first.body[CHUNK..]), (CHUNK + 3, &b"end"[..]), "{what}");
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            if nth < 2 {
                assert_replay(&retry, &what);
                assert!(retry.body == first.body, "{what}");
            } else {
                assert_not_kept(&retry, 200, &what);
            }
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
        // The budget is free again.
        let key = unique_key();
        let request = Request::post(&path).key(&key).body("amount=1");
        send_once(envoy.addr(), proto, &request).await.unwrap();
        assert_replay(&send_once(envoy.addr(), proto, &request).await.unwrap(), "afterwards");
    }
    assert_eq!(envoy.metric("tombstones").await, 4);
    assert_sound(&envoy).await;
}

/// Chunks go on as they come, whatever is captured of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_response_is_not_delayed() {
    let origin = Origin::start().await;
    let envoy = both_upstreams(Envoy::builder(), origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for upstream in UPSTREAMS {
            for with_length in [true, false] {
                let path = format!("{upstream}{proto:?}/{with_length}");
                let barriers = [Barrier::new(), Barrier::new()];
                let reply = Reply::status(200)
                    .chunk("one")
                    .wait(&barriers[0])
                    .chunk("two")
                    .wait(&barriers[1])
                    .chunk("three");
                let reply = if with_length { reply } else { reply.no_content_length() };
                origin.on(&path, Behaviour::Respond(reply));
                let key = unique_key();
                let request = Request::post(&path).key(&key).body("amount=1");
                let mut pending = Client::connect(envoy.addr(), proto).await.start(&request).await.unwrap();
                pending.head().await.unwrap();
                for (chunk, barrier) in ["one", "two"].into_iter().zip(&barriers) {
                    // The origin holds all that follows.
                    assert_eq!(pending.read_exactly(3).await.unwrap(), chunk.as_bytes(), "{path}");
                    barrier.wait_arrived(1, PATIENCE).await;
                    barrier.open();
                }
                assert_eq!(pending.finish().await.unwrap().text(), "onetwothree", "{path}");
                let replay = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_replay(&replay, &path);
                assert_eq!(
                    (replay.text().as_str(), origin.executions_of(&key)),
                    ("onetwothree", 1),
                    "{path}"
                );
            }
        }
    }
    assert_sound(&envoy).await;
}

/// `before_response_end`: who has seen the end of a response finds it replayable, on whatever worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_was_seen_whole_is_replayable_at_once() {
    const ROUNDS: usize = 200;
    let origin = Origin::start().await;
    let body = random_bytes(30_000);
    for upstream in UPSTREAMS {
        origin.on(&format!("{upstream}length"), Behaviour::Respond(Reply::ok(body.clone())));
        origin.on(
            &format!("{upstream}stream"),
            Behaviour::Respond(Reply::ok(body.clone()).no_content_length()),
        );
        origin.on(&format!("{upstream}head"), Behaviour::Respond(Reply::status(204)));
    }
    let envoy = both_upstreams(Envoy::builder().workers(4), origin.addr()).start().await;
    for round in 0..ROUNDS {
        let proto = Protocol::BOTH[round % 2];
        let path = format!("{}{}", UPSTREAMS[round / 2 % 2], ["length", "stream", "head"][round % 3]);
        let key = unique_key();
        let request = Request::post(&path).key(&key).body("amount=1");
        // Connected before the first answer, so that nothing but the retry itself lies between.
        let mut other = Client::connect(envoy.addr(), proto).await;
        let first = send_once(envoy.addr(), proto, &request).await.unwrap();
        let replay = other.send(&request).await.unwrap();
        assert_replay(&replay, &path);
        assert!(replay.body == first.body && replay.status == first.status, "{path}");
        assert_eq!(origin.executions_of(&key), 1, "{path}");
    }
    assert!(envoy.workers_that_served().await >= 2);
    assert_sound(&envoy).await;
}

/// `after_response`: the client may be faster than the record, but nothing runs twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_response_makes_it_replayable_soon() {
    let origin = Origin::start().await;
    let rule = plugin_with(json!({"commit": "after_response"}));
    let envoy = both_upstreams(Envoy::builder().workers(4).plugin(rule), origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for upstream in UPSTREAMS {
            let key = unique_key();
            let request = Request::post(&format!("{upstream}pay")).key(&key).body("amount=1");
            let first = send_once(envoy.addr(), proto, &request).await.unwrap();
            let replay = poll_until(PATIENCE, "the replay", async || {
                let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert!(
                    retry.status == 200 || retry.problem_type().as_deref() == Some("in-flight"),
                    "{retry:?}"
                );
                (retry.status == 200).then_some(retry)
            })
            .await;
            assert_replay(&replay, upstream);
            assert_eq!((replay.execution(), origin.executions_of(&key)), (first.execution(), 1));
        }
    }
    assert_sound(&envoy).await;
}

/// F10: HEAD is safe, so it passes, key or not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_request_is_never_answered_from_a_record() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let post = Request::post("/pay").key(&key).body("amount=1");
        let mut client = Client::connect(envoy.addr(), proto).await;
        let first = client.send(&post).await.unwrap();
        for _ in 0..2 {
            let head =
                client.send(&Request::new("HEAD", "/pay").no_content_length().key(&key)).await.unwrap();
            assert_eq!(
                (head.status, head.body.len(), head.header("idempotent-replayed")),
                (200, 0, None),
                "{head:?}"
            );
        }
        let replay = client.send(&post).await.unwrap();
        assert_replay(&replay, "after HEAD");
        assert_eq!(replay.execution(), first.execution());
        let ran = |method: &str| {
            origin.executions(|seen| seen.key() == Some(key.as_bytes()) && seen.method == method)
        };
        assert_eq!((ran("POST"), ran("HEAD")), (1, 2));
    }
    assert_sound(&envoy).await;
}

/// F03: a compressor nearer the client compresses the replay for the client that asks, from one and the same record.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compressor_in_front_works_on_replays_as_on_first_responses() {
    let compressor = json!({
        "name": "compressor",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor",
            "compressor_library": {
                "name": "gzip",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.compression.gzip.compressor.v3.Gzip"}
            }
        }
    });
    let origin = Origin::start().await;
    let text = "amount: 1\n".repeat(1000);
    origin.on("/", Behaviour::Respond(Reply::ok(text.clone()).header("content-type", "text/plain")));
    let envoy = Envoy::builder().filters_before(vec![compressor]).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let plain = Request::post("/pay").key(&key).body("amount=1");
        let packed = plain.clone().header("accept-encoding", "gzip");
        let mut client = Client::connect(envoy.addr(), proto).await;
        let first = client.send(&packed).await.unwrap();
        let replay = client.send(&packed).await.unwrap();
        for response in [&first, &replay] {
            assert_eq!(response.header("content-encoding"), Some("gzip"), "{response:?}");
            assert!(
                response.body.len() < text.len() / 4 && response.body.starts_with(b"\x1f\x8b"),
                "{response:?}"
            );
        }
        assert!(first.body == replay.body);
        assert_eq!(replay.header_lines("idempotent-replayed"), [b"true"]);
        let replay = client.send(&plain).await.unwrap();
        assert_replay(&replay, "plain");
        assert!(replay.text() == text && replay.header("content-encoding").is_none());
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert_sound(&envoy).await;
}

/// G05: a length that disagrees with the bytes is never kept, however Envoy takes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_content_length_over_http2_is_not_kept() {
    let origin = Origin::start().await;
    for (path, length) in [("/2/long", "100"), ("/2/short", "2")] {
        let reply = Reply::status(200).no_content_length().header("content-length", length).chunk("four");
        origin.on(path, Behaviour::Respond(reply));
    }
    let envoy = both_upstreams(Envoy::builder(), origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for path in ["/2/long", "/2/short"] {
            let key = unique_key();
            let request = Request::post(path).key(&key).body("amount=1");
            let first = send_once(envoy.addr(), proto, &request).await;
            let retry = poll_until(PATIENCE, "the end of the claim", async || {
                let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
                (retry.problem_type().as_deref() != Some("in-flight")).then_some(retry)
            })
            .await;
            assert_eq!(
                retry.header("idempotent-replayed"),
                None,
                "{path} {proto:?}: {first:?}, then {retry:?}"
            );
            assert!([409, 424].contains(&retry.status), "{path} {proto:?}: {first:?}, then {retry:?}");
            assert_eq!(origin.executions_of(&key), 1, "{path} {proto:?}");
        }
    }
    assert_sound(&envoy).await;
}
