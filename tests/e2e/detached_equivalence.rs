//! Inline and detached side by side: what the upstream sees and what the client gets is the same, but for what is
//! listed here.

use std::collections::BTreeMap;

use serde_json::json;

use super::detached::detached_plugin;
use crate::support::*;

/// What the upstream sees differently, and why.
const REQUEST_DIFFERENCES: [(&str, &str); 4] = [
    ("x-envoy-expected-rq-timeout-ms", "what is left of the route's time after a retry"),
    ("transfer-encoding", "a callout knows the length of its body"),
    ("content-length", "the same"),
    ("x-request-id", "new for every request"),
];

/// What the client sees differently, and why.
const RESPONSE_DIFFERENCES: [(&str, &str); 5] = [
    ("connection", "Envoy closes an HTTP/1.1 connection after some failing statuses that it sends itself"),
    ("transfer-encoding", "the whole answer is there before it is sent"),
    ("content-length", "the same"),
    ("date", "another second"),
    ("x-envoy-upstream-service-time", "a measurement"),
];

struct Case {
    name: &'static str,
    request: Request,
    reply: Option<Reply>,
    /// Of the client's answer.
    status: u16,
    executions: usize,
}

fn case(name: &'static str, request: Request, reply: Reply) -> Case {
    let status = reply.status;
    Case { name, request, reply: Some(reply), status, executions: 1 }
}

/// Nothing that the origin answers.
fn unanswered(name: &'static str, path: &str, status: u16, executions: usize) -> Case {
    Case { name, request: Request::post(path).body("amount=1"), reply: None, status, executions }
}

fn every_byte(length: usize) -> Vec<u8> {
    (0..length).map(|index| (index % 256) as u8).collect()
}

fn cases() -> Vec<Case> {
    let made = || Reply::status(201).header("content-type", "application/json").chunk("{\"id\":1}");
    let post = |path: &str| Request::post(path).body("amount=1");
    let mut cases = vec![
        case("POST", post("/post"), made()),
        case("PATCH", post("/patch").method("PATCH"), made()),
        case("PUT", post("/put").method("PUT"), made()),
        case("DELETE without a body", Request::new("DELETE", "/delete"), Reply::status(204)),
        case("no body", Request::post("/empty"), made()),
        case("no body, no length", Request::post("/no-length").no_content_length(), made()),
        case("1 byte", Request::post("/one").body("x"), made()),
        case("64 KiB", Request::post("/64k").body(every_byte(65_536)), made()),
        case("the limit", Request::post("/limit").body(every_byte(1 << 20)), made()),
        case("chunked", Request::post("/chunked").body(every_byte(30_000)).chunked(&[1, 8192, 3]), made()),
        case(
            "query and repeated lines",
            post("/query?b=2&a=1&b=%2F")
                .header("x-many", "1")
                .header("x-other", "y")
                .header("x-many", "2, 3"),
            made(),
        ),
        case(
            "what a proxy before this one says",
            post("/forwarded")
                .header("x-forwarded-for", "192.0.2.1, 192.0.2.2")
                .header("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
                .header("cookie", "a=b")
                .header("authorization", "Bearer x")
                .header("origin", "https://a.example"),
            made().header("access-control-allow-origin", "https://a.example"),
        ),
        case(
            "repeated response lines",
            post("/lines"),
            made()
                .header("link", "<a>")
                .header("set-cookie", "a=1")
                .header("link", "<b>")
                .header("set-cookie", "b=2"),
        ),
        case(
            "binary body",
            post("/binary"),
            Reply::ok(every_byte(100_000)).header("content-type", "image/png"),
        ),
        case("no content-type", post("/untyped"), Reply::ok("plain")),
        case(
            "gzip",
            post("/gzip"),
            Reply::ok(&b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab\xae\x05\0\x43\xbf\xa6\xa3\x02\0\0\0"[..])
                .header("content-type", "application/json")
                .header("content-encoding", "gzip"),
        ),
        case("chunked response", post("/chunked-response"), made().chunk("more").no_content_length()),
        case("302", post("/redirect"), Reply::status(302).header("location", "/elsewhere")),
        case("200 without a body", post("/empty-200"), Reply::status(200)),
        case("304", post("/304"), Reply::status(304).header("etag", "\"1\"")),
        case("over the limit", post("/large"), Reply::ok(every_byte(600_000))),
    ];
    for status in [400, 401, 404, 409, 429, 500, 503] {
        let path = format!("/status/{status}");
        cases.push(case("a status", post(&path), Reply::status(status).header("x-why", "z").chunk("why")));
    }
    let slow = Reply::echo(200).after(std::time::Duration::from_millis(300));
    cases.push(case("slow", post("/slow"), slow));
    cases.push(unanswered("connect failure", "/refused", 503, 0));
    cases.push(unanswered("time-out of the route", "/hang", 504, 1));
    cases.push(unanswered("no route", "/nowhere", 404, 0));
    cases.push(unanswered("an answer of the route", "/direct", 418, 0));
    cases.push(case("a retry after a connect failure", post("/retried"), made()));
    cases
}

fn differs(list: &[(&str, &str)], name: &str) -> bool {
    list.iter().any(|(listed, _)| *listed == name)
}

fn by_name(lines: &[(Vec<u8>, Vec<u8>)], differences: &[(&str, &str)]) -> BTreeMap<String, Vec<String>> {
    let mut map = BTreeMap::<String, Vec<String>>::new();
    for (name, value) in lines {
        let name = String::from_utf8_lossy(name).to_lowercase();
        if !differs(differences, &name) {
            map.entry(name).or_default().push(String::from_utf8_lossy(value).into_owned());
        }
    }
    map
}

/// The same requests through the same routes, inline and detached, on both protocols.
#[tokio::test(flavor = "multi_thread")]
async fn inline_and_detached_look_the_same_to_both_sides() {
    let origin = Origin::start().await;
    let refused = RefusedPort::new();
    let hanging = Barrier::new();
    origin.on("/hang", Behaviour::BarrierEcho(hanging.clone()));
    for case in cases() {
        if let Some(reply) = case.reply {
            let path = case.request.path.split('?').next().unwrap_or_default().to_owned();
            origin.on(&path, Behaviour::Respond(reply));
        }
    }
    let route =
        |prefix: &str, action: serde_json::Value| json!({"match": {"prefix": prefix}, "route": action});
    let routes = vec![
        route("/refused", json!({"cluster": "refused"})),
        route("/hang", json!({"cluster": "origin", "timeout": "0.5s"})),
        json!({"match": {"prefix": "/direct"}, "direct_response": {"status": 418, "body": {"inline_string": "tea"}}}),
        // One of two hosts refuses: the retry goes to the other.
        route(
            "/retried",
            json!({"cluster": "half", "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 5}}),
        ),
        json!({
            // Everything but "/nowhere".
            "match": {"safe_regex": {"regex": "/[^n].*|/no-length"}},
            "route": {"cluster": "origin", "timeout": "15s"},
            "response_headers_to_add": [{"header": {"key": "x-route", "value": "yes"}}],
            "request_headers_to_add": [{"header": {"key": "x-from-route", "value": "yes"}}],
        }),
    ];
    let endpoint = |addr: std::net::SocketAddr| {
        json!({"endpoint": {"address": {"socket_address": {
            "address": addr.ip().to_string(), "port_value": addr.port()}}}})
    };
    let half = json!({
        "name": "half", "connect_timeout": "1s", "type": "STATIC",
        "load_assignment": {"cluster_name": "half", "endpoints": [{"lb_endpoints": [
            endpoint(refused.addr()), endpoint(origin.addr())]}]},
    });
    let rule = json!({"match": {"methods": ["POST", "PATCH", "PUT", "DELETE"]}, "trust_route_retries": true});
    let mut inline = detached_plugin(rule.clone());
    inline["rules"][0]["execution"] = json!("inline");
    let builder = Envoy::builder()
        .workers(4)
        .plugin(detached_plugin(rule))
        .origin_addr(origin.addr())
        .routes(routes.clone())
        .extra_cluster(envoy::config::cluster("refused", refused.addr(), false))
        .extra_cluster(half)
        .per_connection_buffer_limit_bytes(4 << 20)
        .listener(ListenerSpec {
            routes: routes.clone(),
            per_connection_buffer_limit_bytes: Some(4 << 20),
            ..ListenerSpec::new("inline", Some(FilterSpec::new("idempotency_inline", inline)))
        });
    let envoy = with_execution(builder, &routes).start().await;

    for proto in [Protocol::Http1, Protocol::Http2] {
        for case in cases() {
            let what = format!("{} ({}) over {proto:?}", case.name, case.request.path);
            let mut sides = Vec::new();
            for listener in ["inline", "main"] {
                let key = unique_key();
                let request = case.request.clone().key(&key);
                let answer = send_once(envoy.addr_of(listener), proto, &request).await.unwrap();
                assert_eq!(answer.status, case.status, "{what}, {listener}: {answer:?}");
                poll_until(PATIENCE, &what, async || {
                    (origin.executions_of(&key) == case.executions).then_some(())
                })
                .await;
                let mut seen: Vec<Seen> =
                    origin.requests().into_iter().filter(|seen| seen.key() == Some(key.as_bytes())).collect();
                let retry = send_once(envoy.addr_of(listener), proto, &request).await.unwrap();
                sides.push((key, answer, seen.pop(), retry));
            }
            let [(inline_key, inline, inline_seen, inline_retry), (key, detached, seen, retry)] =
                <[_; 2]>::try_from(sides).ok().unwrap();
            let lines = |response: &Response| by_name(&response.headers, &RESPONSE_DIFFERENCES);
            assert_eq!(lines(&inline), lines(&detached), "{what}");
            assert!(inline.body == detached.body, "{what}: the body");
            // A retry is told the same, too.
            assert_eq!(
                (inline_retry.status, inline_retry.problem_type()),
                (retry.status, retry.problem_type()),
                "{what}"
            );
            assert_eq!(lines(&inline_retry), lines(&retry), "{what}: the retry");
            assert_eq!(origin.executions_of(&inline_key), origin.executions_of(&key), "{what}");
            match (inline_seen, seen) {
                (None, None) => assert_eq!(case.executions, 0, "{what}"),
                (Some(inline), Some(detached)) => {
                    let head = |seen: &Seen| (seen.method.clone(), seen.path.clone(), seen.authority.clone());
                    assert_eq!(head(&inline), head(&detached), "{what}");
                    assert!(inline.body == detached.body, "{what}: the body at the upstream");
                    let lines = |seen: &Seen, key: &str| {
                        let lines: Vec<_> = seen
                            .headers
                            .iter()
                            .map(|(name, value)| (name.clone().into_bytes(), value.clone()))
                            .filter(|(_, value)| value != key.as_bytes())
                            .collect();
                        by_name(&lines, &REQUEST_DIFFERENCES)
                    };
                    assert_eq!(lines(&inline, &inline_key), lines(&detached, &key), "{what}");
                }
                (inline, detached) => panic!("{what}: {inline:?} and {detached:?}"),
            }
        }
    }
    hanging.open();
    assert!(envoy.metric("detached").await >= 60);
    assert_eq!(envoy.metric("detached_inline").await, 0);
}
