//! Every row of the outcome table, made real: what ended an execution, what the retry gets, how often the upstream ran.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::envoy::config::cluster;
use crate::support::*;

/// What an access log line says, with the key first so that a line can be found.
const LOG: &str = "%REQ(IDEMPOTENCY-KEY)% %RESPONSE_CODE% %RESPONSE_CODE_DETAILS% %RESPONSE_FLAGS% \
                   attempts=%UPSTREAM_REQUEST_ATTEMPT_COUNT% %FILTER_STATE(wasm.idempotency:PLAIN)%";

/// Where a claim ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// Proven not sent: given back, whatever the rule says.
    NotSent,
    /// Kept as failed for this reason, or given back under `on_unknown: release`.
    Unknown(&'static str),
}

/// One way to end an execution without a usable response of the upstream.
#[derive(Clone, Copy, Debug)]
struct Fault {
    /// The value of `x-fault`, which picks the route, the cluster and what filters and upstreams do.
    name: &'static str,
    /// The status the client sees; `None`: the response is cut off or never comes.
    status: Option<u16>,
    /// How the code details of the access log begin.
    details: &'static str,
    /// `%UPSTREAM_REQUEST_ATTEMPT_COUNT%`.
    attempts: &'static str,
    /// How often an upstream saw the whole request.
    ran: usize,
    ends: Ends,
}

const fn fault(
    name: &'static str,
    status: Option<u16>,
    details: &'static str,
    attempts: &'static str,
    ran: usize,
    ends: Ends,
) -> Fault {
    Fault { name, status, details, attempts, ran, ends }
}

const CONNECT: &str = "upstream_reset_before_response_started{remote_connection_failure";

const FAULTS: &[Fault] = &[
    fault("no_route", Some(404), "route_not_found", "0", 0, Ends::NotSent),
    fault("no_cluster", Some(503), "cluster_not_found", "0", 0, Ends::NotSent),
    fault("no_host", Some(503), "no_healthy_upstream", "1", 0, Ends::NotSent),
    fault("direct", Some(409), "direct_response", "0", 0, Ends::NotSent),
    fault("redirect", Some(307), "direct_response", "0", 0, Ends::NotSent),
    fault("drop_overload", Some(503), "unconditional_drop_overload", "0", 0, Ends::NotSent),
    fault("rbac", Some(403), "rbac_access_denied", "0", 0, Ends::NotSent),
    fault("lua_respond", Some(402), "lua_response", "0", 0, Ends::NotSent),
    fault("fault_abort", Some(418), "fault_filter_abort", "0", 0, Ends::NotSent),
    fault("refused", Some(503), CONNECT, "1", 0, Ends::NotSent),
    fault(
        "connect_timeout",
        Some(503),
        "upstream_reset_before_response_started{connection_timeout",
        "1",
        0,
        Ends::NotSent,
    ),
    // What an earlier attempt did is not known.
    fault("refused_retried", Some(503), CONNECT, "2", 0, Ends::Unknown("reset")),
    fault("route_timeout", Some(504), "response_timeout", "1", 1, Ends::Unknown("timeout")),
    fault("try_timeout", Some(504), "upstream_per_try_timeout", "1", 1, Ends::Unknown("timeout")),
    fault("idle_timeout", Some(504), "stream_idle_timeout", "1", 1, Ends::Unknown("timeout")),
    fault("max_duration", Some(504), "max_duration_timeout", "1", 1, Ends::Unknown("timeout")),
    fault(
        "upstream_max_duration",
        Some(504),
        "upstream_max_stream_duration_reached",
        "1",
        1,
        Ends::Unknown("timeout"),
    ),
    fault(
        "rst",
        Some(503),
        "upstream_reset_before_response_started{connection_termination",
        "1",
        1,
        Ends::Unknown("reset"),
    ),
    fault(
        "close",
        Some(503),
        "upstream_reset_before_response_started{connection_termination",
        "1",
        1,
        Ends::Unknown("reset"),
    ),
    fault(
        "garbage",
        Some(502),
        "upstream_reset_before_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("reset"),
    ),
    fault(
        "half_head",
        Some(502),
        "upstream_reset_before_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("reset"),
    ),
    fault(
        "cut_length_fin",
        None,
        "upstream_reset_after_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("truncated"),
    ),
    fault(
        "cut_length_rst",
        None,
        "upstream_reset_after_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("truncated"),
    ),
    fault(
        "cut_chunked_fin",
        None,
        "upstream_reset_after_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("truncated"),
    ),
    fault(
        "cut_chunked_rst",
        None,
        "upstream_reset_after_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("truncated"),
    ),
    fault(
        "cut_garbage",
        None,
        "upstream_reset_after_response_started{protocol_error",
        "1",
        1,
        Ends::Unknown("truncated"),
    ),
    fault("cut_idle", None, "stream_idle_timeout", "1", 1, Ends::Unknown("truncated")),
    fault("lua_buffer", Some(500), "response_payload_too_large", "1", 1, Ends::Unknown("replaced")),
];

/// What the raw upstream does, by `x-fault`.
fn raw_answer(seen: &Seen) -> RawReply {
    let chunked = |rest: &str, end| {
        RawReply::new(format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n{rest}"), end)
    };
    match seen.header("x-fault").unwrap_or_default() {
        "rst" => RawReply::reset_before_response(),
        "close" => RawReply::close_before_response(),
        "garbage" => RawReply::new("\x00\x01 this is no HTTP\r\n\r\n", End::Close),
        "half_head" => RawReply::new("HTTP/1.1 200 OK\r\ncontent-le", End::Close),
        "cut_length_fin" => RawReply::truncated(100, b"ten bytes!", End::Close),
        "cut_length_rst" => RawReply::truncated(100, b"ten bytes!", End::Reset),
        "cut_chunked_fin" => chunked("a\r\nten bytes!\r\n", End::Close),
        "cut_chunked_rst" => chunked("a\r\nten bytes!\r\n", End::Reset),
        "cut_garbage" => chunked("a\r\nten bytes!\r\nzz\r\n", End::KeepOpen),
        "cut_idle" => RawReply::truncated(100, b"ten bytes!", End::HangForever),
        "lua_buffer" => RawReply::whole(200, &[("x-lua", b"buffer")], &[b'x'; 150_000]),
        _ => RawReply::hang(),
    }
}

fn lua(script: &str) -> Value {
    json!({
        "name": "lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script}
        }
    })
}

/// Filters nearer the upstream, each acting on its own `x-fault` only.
fn filters_after() -> Vec<Value> {
    let is = |name: &str| json!({"name": "x-fault", "string_match": {"exact": name}});
    vec![
        lua("function envoy_on_request(handle)
               if handle:headers():get('x-fault') == 'lua_respond' then
                 handle:respond({[':status'] = '402'}, 'pay first')
               end
             end
             function envoy_on_response(handle)
               if handle:headers():get('x-lua') == 'buffer' then handle:body() end
             end"),
        json!({
            "name": "rbac",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
                "rules": {"action": "DENY", "policies": {"no": {
                    "permissions": [{"header": is("rbac")}], "principals": [{"any": true}]
                }}}
            }
        }),
        json!({
            "name": "fault",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault",
                "headers": [is("fault_abort")],
                "abort": {"http_status": 418, "percentage": {"numerator": 100}}
            }
        }),
    ]
}

fn fault_routes() -> Vec<Value> {
    let route = |name: &str, action: Value| {
        let mut route = json!({"match": {"prefix": "/", "headers": [{"name": "x-fault", "string_match": {"exact": name}}]}});
        deep_merge(&mut route, &action);
        route
    };
    let to = |name: &str, cluster: &str, more: Value| {
        let mut action = json!({"cluster": cluster, "timeout": "15s"});
        deep_merge(&mut action, &more);
        route(name, json!({"route": action}))
    };
    let mut routes = vec![
        to("no_cluster", "origin", json!({"cluster": null, "cluster_header": "x-cluster"})),
        to("no_host", "no_host", json!({})),
        route("direct", json!({"direct_response": {"status": 409, "body": {"inline_string": "closed"}}})),
        route(
            "redirect",
            json!({"redirect": {"host_redirect": "b.example", "response_code": "TEMPORARY_REDIRECT"}}),
        ),
        to("drop_overload", "drop_overload", json!({})),
        to("refused", "refused", json!({})),
        to("connect_timeout", "unanswering", json!({})),
        to(
            "refused_retried",
            "refused",
            json!({"retry_policy": {"retry_on": "connect-failure", "num_retries": 1}}),
        ),
        to("route_timeout", "raw", json!({"timeout": "0.25s"})),
        to(
            "try_timeout",
            "raw",
            json!({"retry_policy": {"retry_on": "refused-stream", "per_try_timeout": "0.25s"}}),
        ),
        to("idle_timeout", "raw", json!({"idle_timeout": "0.25s"})),
        to("cut_idle", "raw", json!({"idle_timeout": "0.25s"})),
        to(
            "max_duration",
            "raw",
            json!({"timeout": "0s", "max_stream_duration": {"max_stream_duration": "0.25s"}}),
        ),
        to("upstream_max_duration", "raw_max_duration", json!({"timeout": "0s"})),
    ];
    for name in ["rst", "close", "garbage", "half_head", "lua_buffer", "rbac", "lua_respond", "fault_abort"] {
        routes.push(to(name, "raw", json!({})));
    }
    for fault in FAULTS.iter().filter(|fault| fault.name.starts_with("cut_") && fault.name != "cut_idle") {
        routes.push(to(fault.name, "raw", json!({})));
    }
    routes.push(json!({
        "match": {"prefix": "/", "headers": [{"name": "x-fault", "present_match": true, "invert_match": true}]},
        "route": {"cluster": "origin", "timeout": "15s"}
    }));
    routes
}

/// Listens, and never takes a connection: its queue is full, so that a handshake is never finished.
struct Unanswering {
    socket: std::net::TcpListener,
    _queued: Vec<tokio::net::TcpStream>,
}

impl Unanswering {
    async fn start() -> Unanswering {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
        let socket = socket.listen(1).unwrap().into_std().unwrap();
        let addr = socket.local_addr().unwrap();
        let mut queued = vec![];
        while let Ok(connected) =
            tokio::time::timeout(Duration::from_millis(200), tokio::net::TcpStream::connect(addr)).await
        {
            queued.push(connected.unwrap());
        }
        Unanswering { socket, _queued: queued }
    }
}

/// An Envoy in which `x-fault` ends an execution in the way of that name, and its upstreams.
struct Faulty {
    envoy: Envoy,
    origin: Origin,
    raw: RawOrigin,
    _refused: RefusedPort,
    _unanswering: Unanswering,
}

impl Faulty {
    async fn start(rule: Value) -> Faulty {
        Self::start_from(Envoy::builder().plugin(plugin_with(rule))).await
    }

    async fn start_without_filter() -> Faulty {
        Self::start_from(Envoy::builder().without_filter()).await
    }

    async fn start_from(builder: crate::support::envoy::Builder) -> Faulty {
        let origin = Origin::start().await;
        let raw = RawOrigin::start_with(|seen, _| raw_answer(seen)).await;
        let refused = RefusedPort::new();
        let unanswering = Unanswering::start().await;
        let mut no_host = cluster("no_host", raw.addr(), false);
        no_host["load_assignment"]["endpoints"] = json!([]);
        let mut drop_overload = cluster("drop_overload", raw.addr(), false);
        drop_overload["load_assignment"]["policy"] =
            json!({"drop_overloads": [{"category": "all", "drop_percentage": {"numerator": 100}}]});
        let mut max_duration = cluster("raw_max_duration", raw.addr(), false);
        max_duration["typed_extension_protocol_options"] = json!({
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "common_http_protocol_options": {"max_stream_duration": "0.25s"},
                "explicit_http_config": {"http_protocol_options": {}}
            }
        });
        let mut silent = cluster("unanswering", unanswering.socket.local_addr().unwrap(), false);
        silent["connect_timeout"] = json!("0.25s");
        let mut builder = builder
            .origin_addr(origin.addr())
            .routes(fault_routes())
            .filters_after(filters_after())
            .per_connection_buffer_limit_bytes(65_536)
            .hcm_patch(json!({"http2_protocol_options": {
                "initial_stream_window_size": 65_536, "initial_connection_window_size": 65_536
            }}))
            .access_log_format(LOG);
        for cluster in [
            cluster("raw", raw.addr(), false),
            cluster("refused", refused.addr(), false),
            no_host,
            drop_overload,
            max_duration,
            silent,
        ] {
            builder = builder.extra_cluster(cluster);
        }
        let envoy = builder.start().await;
        Faulty { envoy, origin, raw, _refused: refused, _unanswering: unanswering }
    }

    fn ran(&self, key: &str) -> usize {
        self.origin.executions_of(key) + self.raw.executions_of(key)
    }

    /// Plays one fault and its retries without the fault.
    async fn play(&self, fault: Fault, proto: Protocol, kept: Kept) {
        let what = format!("{} {proto:?}", fault.name);
        let key = unique_key();
        let clean = Request::post("/pay").key(&key).body("amount=1");
        let faulty = clean.clone().header("x-fault", fault.name).header("x-cluster", "nowhere");
        let first = send_once(self.envoy.addr(), proto, &faulty).await;
        let line = self.envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
        assert_eq!(first.as_ref().ok().map(|response| response.status), fault.status, "{what}: {line}");
        let details = line.split(' ').nth(2).unwrap();
        assert!(details.starts_with(fault.details), "{what}: {line}");
        let attempts = line.split(' ').nth(4).unwrap();
        assert_eq!(attempts, format!("attempts={}", fault.attempts), "{what}: {line}");
        assert_eq!(self.ran(&key), fault.ran, "{what}: the fault happened another way: {line}");
        assert!(line.contains(&format!(" {} rule=payments attempt=1 key=", kept.word())), "{what}: {line}");
        if let Kept::Failed(reason) = kept {
            for _ in 0..2 {
                assert_failed(&send_once(self.envoy.addr(), proto, &clean).await.unwrap(), reason, &what);
            }
            assert_eq!(self.ran(&key), fault.ran, "{what}");
            return;
        }
        let retry = send_once(self.envoy.addr(), proto, &clean).await.unwrap();
        assert_eq!(retry.status, 200, "{what}: {retry:?}");
        assert_eq!(retry.header("idempotent-replayed"), None, "{what}");
        let again = send_once(self.envoy.addr(), proto, &clean).await.unwrap();
        assert_eq!((again.status, again.execution()), (200, retry.execution()), "{what}");
        assert_eq!(self.origin.executions_of(&key), 1, "{what}");
        assert_eq!(self.ran(&key), fault.ran + 1, "{what}");
    }

    /// Plays all faults at once on both protocols, then compares the metrics.
    async fn play_all(&self, kept: impl Fn(&Fault) -> Kept) {
        let mut plays = vec![];
        let mut expected = BTreeMap::<String, u64>::new();
        for fault in FAULTS {
            for proto in Protocol::BOTH {
                let kept = kept(fault);
                *expected.entry(kept.metric()).or_default() += 1;
                plays.push(self.play(*fault, proto, kept));
            }
        }
        all_at_once(plays).await;
        assert_eq!(ended_claims(&self.envoy).await, expected);
        assert_sound(&self.envoy).await;
    }
}

/// What became of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kept {
    Failed(&'static str),
    NotSent,
    GivenBack,
}

impl Kept {
    fn word(self) -> String {
        match self {
            Kept::Failed(reason) => format!("failed.{reason}"),
            Kept::NotSent => "released.not_sent".to_owned(),
            Kept::GivenBack => "released.failure".to_owned(),
        }
    }

    fn metric(self) -> String {
        match self {
            Kept::Failed(reason) => format!("retained.{reason}"),
            Kept::NotSent | Kept::GivenBack => self.word(),
        }
    }
}

fn assert_failed(response: &Response, reason: &str, what: &str) {
    assert_eq!(
        (response.status, response.problem_type().as_deref(), response.header("x-idempotency-refusal")),
        (424, Some("failed"), Some("failed")),
        "{what}: {response:?}"
    );
    assert_eq!(response.json()["reason"], reason, "{what}: {response:?}");
    assert_eq!(response.header("idempotent-replayed"), None, "{what}");
}

/// The counters of how claims ended, those at 0 left out.
async fn ended_claims(envoy: &Envoy) -> BTreeMap<String, u64> {
    let stats = envoy.stats("wasmcustom.idempotency.re").await;
    let counted = stats.into_iter().filter_map(|(name, count)| {
        let name = name.strip_prefix("wasmcustom.idempotency.")?;
        let ends = name.starts_with("retained.") || name.starts_with("released.");
        (ends && count > 0).then(|| (name.to_owned(), count))
    });
    counted.collect()
}

/// Nothing is left over, and nothing happened that can't.
async fn assert_sound(envoy: &Envoy) {
    poll_until(PATIENCE, "no claim held", async || (envoy.metric("in_flight").await == 0).then_some(()))
        .await;
    for name in ["unexpected_events", "host_errors", "stale_writes", "store_errors", "outbox"] {
        assert_eq!(envoy.metric(name).await, 0, "{name}");
    }
}

/// B01, B02, B11, B15: what provably was not sent runs again, and everything else is kept as failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_not_sent_is_released_and_what_may_have_run_is_retained() {
    let faulty = Faulty::start(json!({})).await;
    faulty
        .play_all(|fault| match fault.ends {
            Ends::NotSent => Kept::NotSent,
            Ends::Unknown(reason) => Kept::Failed(reason),
        })
        .await;
}

/// The same faults where a second run is harmless, and where route retries resend only what never arrived.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_outcomes_run_again_under_release_and_trusted_retries_prove_as_much_as_one() {
    let faulty = Faulty::start(json!({"on_unknown": "release", "trust_route_retries": true})).await;
    faulty
        .play_all(|fault| match fault.ends {
            Ends::NotSent => Kept::NotSent,
            Ends::Unknown(_) if fault.name == "refused_retried" => Kept::NotSent,
            Ends::Unknown(_) => Kept::GivenBack,
        })
        .await;
}

/// An origin that answers `/s/<status>` with that status the first time, and echoes afterwards.
fn status_then_echo() -> Behaviour {
    Behaviour::func(|seen, nth| async move {
        let status: u16 = seen.path.rsplit('/').next().unwrap().parse().unwrap();
        if nth > 1 {
            Reply::echo(200)
        } else {
            Reply::status(status).header("x-first", "yes").chunk("the first")
        }
    })
}

/// B04, B05: the statuses of the design's table. A bodiless status can't carry the body of `status_then_echo`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statuses_are_replayed_released_or_retained_as_the_rule_says() {
    const REPLAYED: [u16; 22] = [
        200, 201, 202, 203, 206, 226, 300, 301, 302, 303, 307, 308, 400, 403, 404, 409, 410, 412, 418, 422,
        424, 451,
    ];
    const RELEASED: [u16; 8] = [401, 407, 408, 421, 425, 429, 501, 503];
    const FAILED: [u16; 7] = [500, 502, 504, 505, 507, 511, 599];
    let origin = Origin::start().await;
    origin.on("/s/", status_then_echo());
    for (on_failure, origin_http2) in [("retain", false), ("release", true)] {
        let envoy = Envoy::builder()
            .plugin(plugin_with(json!({"on_failure": on_failure})))
            .origin_addr(origin.addr())
            .origin_http2(origin_http2)
            .start()
            .await;
        for proto in Protocol::BOTH {
            let mut client = Client::connect(envoy.addr(), proto).await;
            for status in REPLAYED.into_iter().chain(RELEASED).chain(FAILED) {
                let what = format!("{status} {proto:?} on_failure: {on_failure}");
                let key = unique_key();
                let request = Request::post(&format!("/s/{status}")).key(&key).body("amount=1");
                let first = client.send(&request).await.expect(&what);
                assert_eq!((first.status, first.text().as_str()), (status, "the first"), "{what}");
                let retry = client.send(&request).await.expect(&what);
                // Envoy closes an HTTP/1 connection after any local reply of 400.
                if retry.header("connection") == Some("close") {
                    assert_eq!((status, proto), (400, Protocol::Http1), "{what}");
                    client = Client::connect(envoy.addr(), proto).await;
                }
                if REPLAYED.contains(&status) {
                    assert_eq!((retry.status, retry.text().as_str()), (status, "the first"), "{what}");
                    assert_eq!(retry.header("idempotent-replayed"), Some("true"), "{what}");
                    assert_eq!(retry.header("x-first"), Some("yes"), "{what}");
                    assert_eq!(origin.executions_of(&key), 1, "{what}");
                } else if RELEASED.contains(&status) || on_failure == "release" {
                    assert_eq!((retry.status, retry.header("idempotent-replayed")), (200, None), "{what}");
                    let again = client.send(&request).await.unwrap();
                    assert_eq!(again.execution(), retry.execution(), "{what}");
                    assert_eq!(origin.executions_of(&key), 2, "{what}");
                } else {
                    // B12: for good, even though the upstream is well again.
                    assert_failed(&retry, "status", &what);
                    assert_failed(&client.send(&request).await.unwrap(), "status", &what);
                    assert_eq!(origin.executions_of(&key), 1, "{what}");
                }
            }
        }
        let ended = ended_claims(&envoy).await;
        let failures = if on_failure == "retain" { "retained.status" } else { "released.failure" };
        assert_eq!(
            ended,
            BTreeMap::from([
                ("released.status".to_owned(), 2 * RELEASED.len() as u64),
                (failures.to_owned(), 2 * FAILED.len() as u64)
            ])
        );
        assert_sound(&envoy).await;
    }
}

/// A status in both lists: the one by itself in `replay_statuses` and a class beat nothing in `release_statuses`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lists_of_statuses_are_the_operators() {
    let origin = Origin::start().await;
    origin.on("/s/", status_then_echo());
    let rule = json!({"replay_statuses": ["2xx", 500], "release_statuses": [409, 204]});
    let envoy = Envoy::builder().plugin(plugin_with(rule)).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        // Neither a 3xx, a 4xx nor a 503 is anything but a failure here.
        for (status, second, ran) in [
            (200, 200, 1),
            (500, 500, 1),
            (409, 200, 2),
            (302, 424, 1),
            (404, 424, 1),
            (429, 424, 1),
            (503, 424, 1),
        ] {
            let key = unique_key();
            let request = Request::post(&format!("/s/{status}")).key(&key).body("amount=1");
            assert_eq!(send_once(envoy.addr(), proto, &request).await.unwrap().status, status);
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((retry.status, origin.executions_of(&key)), (second, ran), "{status} {proto:?}");
        }
    }
}

/// The refusals of a hop of this filter behind this one are told from the service's own statuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_refusals_of_an_inner_hop_are_taken_for_what_they_mean() {
    // Type, status, and what the retry gets: another run, 424, or the replay of the refusal.
    const REFUSALS: [(&str, u16, u16); 13] = [
        ("in-flight", 409, 200),
        ("store-unavailable", 503, 200),
        ("store-full", 503, 200),
        ("body-timeout", 408, 200),
        ("failed", 424, 424),
        ("abandoned", 424, 424),
        ("missing-key", 400, 400),
        ("invalid-key", 400, 400),
        ("invalid-scope", 400, 400),
        ("payload-too-large", 413, 413),
        ("mismatch", 422, 422),
        ("response-not-kept", 409, 409),
        ("in-flight", 503, 200),
    ];
    let origin = Origin::start().await;
    origin.on(
        "/r/",
        Behaviour::func(|seen, nth| async move {
            let mut parts = seen.path.rsplit('/');
            let (status, kind) = (parts.next().unwrap().parse().unwrap(), parts.next().unwrap());
            if nth > 1 {
                Reply::echo(200)
            } else {
                Reply::status(status).header("x-idempotency-refusal", kind)
            }
        }),
    );
    let envoy = Envoy::builder()
        .plugin(plugin_with(json!({"on_failure": "release"})))
        .origin_addr(origin.addr())
        .start()
        .await;
    for proto in Protocol::BOTH {
        for (kind, status, second) in REFUSALS {
            let what = format!("{kind} {status} {proto:?}");
            let key = unique_key();
            let request = Request::post(&format!("/r/{kind}/{status}")).key(&key).body("amount=1");
            let first = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((first.status, first.header("x-idempotency-refusal")), (status, Some(kind)), "{what}");
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(retry.status, second, "{what}");
            assert_eq!(origin.executions_of(&key), if second == 200 { 2 } else { 1 }, "{what}");
            match second {
                // `on_failure` is no matter here: the inner hop doesn't know what happened.
                424 => assert_failed(&retry, "intermediary", &what),
                200 => assert_eq!(retry.header("idempotent-replayed"), None, "{what}"),
                _ => assert_eq!(retry.header("idempotent-replayed"), Some("true"), "{what}"),
            }
        }
    }
    assert_eq!(
        ended_claims(&envoy).await,
        BTreeMap::from([("released.status".to_owned(), 10), ("retained.intermediary".to_owned(), 4)])
    );
}

/// Two Envoys in a row: the inner one's own replies are told from the service's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_envoy_behind_that_lost_the_request_is_an_intermediary_failure() {
    // The inner Envoy's fault, its status, whether the outer one keeps the claim, how often the service ran.
    const CASES: [(&str, u16, bool, usize); 13] = [
        ("rst", 503, true, 1),
        ("close", 503, true, 1),
        ("garbage", 502, true, 1),
        ("half_head", 502, true, 1),
        // Whatever `on_failure` says: nobody knows whether it ran.
        ("route_timeout", 504, true, 1),
        ("try_timeout", 504, true, 1),
        ("upstream_max_duration", 504, true, 1),
        ("idle_timeout", 504, true, 1),
        ("max_duration", 504, true, 1),
        // An attempt before the last one may have run.
        ("refused_retried", 503, true, 0),
        ("refused", 503, false, 0),
        ("connect_timeout", 503, false, 0),
        ("no_host", 503, false, 0),
    ];
    for (on_failure, http2) in [("release", false), ("retain", true)] {
        let inner = Faulty::start_without_filter().await;
        let outer = Envoy::builder()
            .plugin(plugin_with(json!({"on_failure": on_failure})))
            .origin_addr(inner.envoy.addr())
            .origin_http2(http2)
            .access_log_format(LOG)
            .start()
            .await;
        for proto in Protocol::BOTH {
            let plays = CASES.map(|(fault, status, keeps, ran)| {
                let (inner, outer) = (&inner, &outer);
                async move {
                    let what = format!("{fault} {proto:?} on_failure: {on_failure}");
                    let key = unique_key();
                    let clean = Request::post("/pay").key(&key).body("amount=1");
                    let faulty = clean.clone().header("x-fault", fault).header("x-cluster", "nowhere");
                    let first = send_once(outer.addr(), proto, &faulty).await.unwrap();
                    assert_eq!(first.status, status, "{what}");
                    let line = inner.envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
                    let expected = FAULTS.iter().find(|row| row.name == fault).unwrap().details;
                    assert!(line.split(' ').nth(2).unwrap().starts_with(expected), "{what}: {line}");
                    let line = outer.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
                    assert!(line.contains("via_upstream"), "{what}: {line}");
                    let retry = send_once(outer.addr(), proto, &clean).await.unwrap();
                    if keeps {
                        assert_failed(&retry, "intermediary", &what);
                        assert_eq!(inner.ran(&key), ran, "{what}");
                    } else {
                        assert_eq!((retry.status, inner.ran(&key)), (200, ran + 1), "{what}");
                    }
                }
            });
            all_at_once(plays).await;
        }
        let kept = 2 * CASES.iter().filter(|case| case.2).count() as u64;
        let released = 2 * CASES.len() as u64 - kept;
        assert_eq!(
            ended_claims(&outer).await,
            BTreeMap::from([
                ("released.status".to_owned(), released),
                ("retained.intermediary".to_owned(), kept)
            ])
        );
        assert_sound(&outer).await;
    }
}

/// B02: what a circuit breaker turned away was not sent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_overflow_is_released() {
    let origin = Origin::start().await;
    let breaker = |limits: Value| json!({"circuit_breakers": {"thresholds": [limits]}});
    let mut http2 = cluster("http2", origin.addr(), true);
    deep_merge(&mut http2, &breaker(json!({"max_requests": 1})));
    let envoy = Envoy::builder()
        .workers(1)
        .origin_addr(origin.addr())
        .cluster_patch(breaker(json!({"max_connections": 1, "max_pending_requests": 1})))
        .extra_cluster(http2)
        .routes(vec![
            json!({"match": {"prefix": "/http2"}, "route": {"cluster": "http2"}}),
            json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}}),
        ])
        .access_log_format(LOG)
        .start()
        .await;
    for proto in Protocol::BOTH {
        for (path, cluster, fillers) in [("/http1", "origin", 2), ("/http2", "http2", 1)] {
            let path = format!("{path}/{proto:?}");
            let barrier = Barrier::new();
            origin.on(&path, Behaviour::BarrierEcho(barrier.clone()));
            let mut filling = vec![];
            for nth in 1..=fillers {
                let client = Client::connect(envoy.addr(), proto).await;
                filling.push(client.start(&Request::post(&path).key(unique_key()).body("a")).await.unwrap());
                let stat = if nth == 1 { "upstream_rq_active" } else { "upstream_rq_pending_active" };
                envoy.wait_stat(&format!("cluster.{cluster}.{stat}"), 1, PATIENCE).await;
            }
            barrier.wait_arrived(1, PATIENCE).await;
            let key = unique_key();
            let request = Request::post(&path).key(&key).body("a");
            let refused = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(refused.status, 503);
            let line = envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
            assert!(
                line.contains("{overflow} UO attempts=1 released.not_sent rule=payments attempt=1 "),
                "{line}"
            );
            assert_eq!(origin.executions_of(&key), 0);
            barrier.open();
            for filler in filling {
                assert_eq!(filler.finish().await.unwrap().status, 200);
            }
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            let again = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((retry.status, again.execution()), (200, retry.execution()));
            assert_eq!(origin.executions_of(&key), 1);
        }
    }
    assert_eq!(ended_claims(&envoy).await, BTreeMap::from([("released.not_sent".to_owned(), 4)]));
    assert_sound(&envoy).await;
}

/// How a client leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leaving {
    /// A TCP reset, or RST_STREAM.
    Reset,
    /// An orderly close of the connection.
    Close,
}

async fn leave(pending: Pending, h2: Option<H2>, how: Leaving) {
    match (how, h2) {
        (Leaving::Reset, _) => pending.abort(),
        (Leaving::Close, None) => drop(pending),
        (Leaving::Close, Some(connection)) => {
            connection.abort();
            drop(pending);
        }
    }
}

/// Starts a request on a connection of its own; the HTTP/2 connection comes along, to be closed.
async fn start(envoy: &Envoy, proto: Protocol, request: &Request) -> (Pending, Option<H2>) {
    let client = Client::connect(envoy.addr(), proto).await;
    let connection = if let Client::Http2(connection) = &client { Some(connection.clone()) } else { None };
    (client.start(request).await.unwrap(), connection)
}

/// A client that hangs up after its request was forwarded leaves an unknown outcome, unless the status was seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_is_an_unknown_outcome_unless_the_status_had_decided() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).access_log_format(LOG).start().await;
    // The status that the client saw before it left, what the access log says, how often the service runs in all.
    let cases = [
        (None, "failed.client_gone", 1),
        (Some(200), "failed.client_gone", 1),
        (Some(404), "failed.client_gone", 1),
        (Some(500), "failed.client_gone", 1),
        (Some(503), "released.status", 2),
        (Some(429), "released.status", 2),
    ];
    let mut expected = BTreeMap::<String, u64>::new();
    for proto in Protocol::BOTH {
        for how in [Leaving::Reset, Leaving::Close] {
            for (status, word, ran) in cases {
                let what = format!("{status:?} {proto:?} {how:?}");
                let path = format!("/{}/{proto:?}{how:?}", status.unwrap_or(0));
                let (head, rest) = (Barrier::new(), Barrier::new());
                let (before, after) = (head.clone(), rest.clone());
                if status.is_some() {
                    head.open();
                }
                origin.on(
                    &path,
                    Behaviour::func(move |_, nth| {
                        let (before, after) = (before.clone(), after.clone());
                        async move {
                            if nth > 1 {
                                return Reply::echo(200);
                            }
                            before.pass().await;
                            let reply = Reply::status(status.unwrap_or(200)).no_content_length();
                            reply.chunk("first").wait(&after).chunk("rest")
                        }
                    }),
                );
                let key = unique_key();
                let request = Request::post(&path).key(&key).body("amount=1");
                let (mut pending, connection) = start(&envoy, proto, &request).await;
                if let Some(status) = status {
                    assert_eq!(pending.head().await.unwrap().status, status, "{what}");
                    assert_eq!(pending.read_exactly(5).await.unwrap(), b"first", "{what}");
                } else {
                    head.wait_arrived(1, PATIENCE).await;
                }
                leave(pending, connection, how).await;
                let line = envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
                assert!(line.contains(&format!(" {word} rule=payments attempt=1 key=")), "{what}: {line}");
                let details = line.split(' ').nth(2).unwrap();
                // A client that closes an HTTP/2 connection may get to reset its streams first.
                let left: &[&str] = match (proto, how) {
                    (Protocol::Http1, _) => &["downstream_remote_disconnect"],
                    (Protocol::Http2, Leaving::Reset) => &["http2.remote_reset"],
                    (Protocol::Http2, Leaving::Close) => {
                        &["downstream_remote_disconnect", "http2.remote_reset"]
                    }
                };
                assert!(left.contains(&details), "{what}: {line}");
                let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
                match word.strip_prefix("failed.") {
                    Some(reason) => assert_failed(&retry, reason, &what),
                    None => assert_eq!(retry.status, 200, "{what}"),
                }
                assert_eq!(origin.executions_of(&key), ran, "{what}");
                *expected.entry(word.replace("failed.", "retained.")).or_default() += 1;
                head.open();
                rest.open();
            }
        }
    }
    assert_eq!(ended_claims(&envoy).await, expected);
    assert_sound(&envoy).await;
}

/// A status alone says nothing while its text may still turn out to be a proxy's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxys_text_that_was_cut_off_is_no_proof_that_nothing_ran() {
    // Server, content type, body so far, what becomes of the claim.
    const CASES: [(&str, &str, &str, &str); 7] = [
        ("envoy", "text/plain", "", "failed.intermediary"),
        ("envoy", "text/plain", "upstream connect err", "failed.intermediary"),
        ("istio-envoy", "text/plain", "upstream connect err", "failed.intermediary"),
        ("istio-envoy", "text/plain", "strea", "failed.intermediary"),
        ("envoy", "text/plain", "busy, come again", "released.status"),
        ("envoy", "application/json", "{\"busy\": ", "released.status"),
        ("nginx", "text/plain", "no room", "released.status"),
    ];
    let origin = RawOrigin::start_with(|seen, nth| {
        if nth > 1 {
            return RawReply::whole(200, &[], b"ran again");
        }
        let case = CASES[seen.path.rsplit('/').next().unwrap().parse::<usize>().unwrap()];
        let (server, kind, begin, _) = case;
        let head =
            format!("HTTP/1.1 503 Busy\r\nserver: {server}\r\ncontent-type: {kind}\r\ncontent-length: 100");
        RawReply::new(format!("{head}\r\n\r\n{begin}"), End::HangForever)
    })
    .await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).access_log_format(LOG).start().await;
    for proto in Protocol::BOTH {
        for (nth, (server, kind, begin, word)) in CASES.into_iter().enumerate() {
            let what = format!("{server} {kind} {begin:?} {proto:?}");
            let key = unique_key();
            let request = Request::post(&format!("/{proto:?}/{nth}")).key(&key).body("amount=1");
            let (mut pending, _connection) = start(&envoy, proto, &request).await;
            assert_eq!(pending.head().await.unwrap().status, 503, "{what}");
            assert_eq!(pending.read_exactly(begin.len()).await.unwrap(), begin.as_bytes(), "{what}");
            pending.abort();
            let line = envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
            assert!(line.contains(&format!(" {word} rule=payments attempt=1 key=")), "{what}: {line}");
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            match word.strip_prefix("failed.") {
                Some(reason) => assert_failed(&retry, reason, &what),
                None => assert_eq!((retry.status, origin.executions_of(&key)), (200, 2), "{what}"),
            }
        }
    }
    assert_sound(&envoy).await;
}

/// A client that leaves in the middle of its body claims nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_within_its_body_claims_nothing() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).access_log_format(LOG).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let whole = Request::post("/pay").key(&key).body("amount=1");
        let active = "http.main.downstream_rq_active";
        match proto {
            Protocol::Http1 => {
                let mut client = H1::connect(envoy.addr()).await.unwrap();
                let bytes = client::h1::encode(&whole);
                client.write_raw(&bytes[..bytes.len() - 2]).await.unwrap();
                envoy.wait_stat(active, 1, PATIENCE).await;
                client.abort();
            }
            Protocol::Http2 => {
                let client = H2::connect(envoy.addr()).await.unwrap();
                let mut stream = client.open(&whole, true).await.unwrap();
                stream.send_data(b"amount", false).await.unwrap();
                envoy.wait_stat(active, 1, PATIENCE).await;
                stream.reset();
            }
        }
        let line = envoy.wait_access_log(|line| line.starts_with(&key), PATIENCE).await;
        assert!(line.contains(" 0 ") && line.contains("attempts=0"), "{line}");
        assert_eq!(envoy.metric("executed").await, if proto == Protocol::Http1 { 0 } else { 1 });
        let retry = send_once(envoy.addr(), proto, &whole).await.unwrap();
        assert_eq!((retry.status, retry.header("idempotent-replayed")), (200, None));
        assert_eq!(origin.executions_of(&key), 1);
    }
    assert_eq!(origin.requests().len(), 2);
    assert_eq!(ended_claims(&envoy).await, BTreeMap::new());
    assert_sound(&envoy).await;
}

/// The end of the upstream's response decides, even if the client never read a byte of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_after_the_responses_end_changes_nothing() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).access_log_format(LOG).start().await;
    for proto in Protocol::BOTH {
        for how in [Leaving::Reset, Leaving::Close] {
            let key = unique_key();
            let request = Request::post("/pay").key(&key).body("amount=1");
            let (pending, connection) = start(&envoy, proto, &request).await;
            origin.wait_executions_of(&key, 1, PATIENCE).await;
            poll_until(PATIENCE, "the claim's end", async || {
                (envoy.metric("in_flight").await == 0).then_some(())
            })
            .await;
            leave(pending, connection, how).await;
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!(
                (retry.status, retry.header("idempotent-replayed")),
                (200, Some("true")),
                "{proto:?} {how:?}"
            );
            assert_eq!(origin.executions_of(&key), 1);
        }
    }
    assert_eq!(ended_claims(&envoy).await, BTreeMap::new());
    assert_sound(&envoy).await;
}

/// A handler that takes longer than its lease, before its answer or within it, is never taken over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_execution_longer_than_its_lease_is_not_taken_over() {
    const LEASE: Duration = Duration::from_millis(500);
    let origin = Origin::start().await;
    let rule = json!({"lock_ttl": "500ms", "on_abandoned": "takeover"});
    let envoy =
        Envoy::builder().workers(4).plugin(plugin_with(rule)).origin_addr(origin.addr()).start().await;
    let cases = Protocol::BOTH.into_iter().flat_map(|proto| [(proto, false), (proto, true)]);
    all_at_once(cases.map(|(proto, within_the_response)| {
        let (envoy, origin) = (&envoy, &origin);
        async move {
            let what = format!("{proto:?}, within the response: {within_the_response}");
            let key = unique_key();
            let path = format!("/slow/{within_the_response}/{proto:?}");
            let barrier = Barrier::new();
            let behaviour = if within_the_response {
                Behaviour::Respond(Reply::status(201).chunk("begin").wait(&barrier).chunk("end"))
            } else {
                Behaviour::Barrier(barrier.clone(), Reply::status(201).chunk("begin").chunk("end"))
            };
            origin.on(&path, behaviour);
            let request = Request::post(&path).key(&key).body("amount=1");
            let (mut first, _connection) = start(envoy, proto, &request).await;
            if within_the_response {
                first.head().await.unwrap();
            }
            barrier.wait_arrived(1, PATIENCE).await;
            let begun = Instant::now();
            let mut refused = 0;
            poll_until(PATIENCE, "more than three leases", async || {
                let duplicate = send_once(envoy.addr(), proto, &request).await.unwrap();
                assert_eq!(duplicate.problem_type().as_deref(), Some("in-flight"), "{what}: {duplicate:?}");
                assert_eq!(duplicate.status, 409, "{what}");
                refused += 1;
                (begun.elapsed() > 3 * LEASE + LEASE / 4).then_some(())
            })
            .await;
            assert!(refused >= 8, "{what}: only {refused} duplicates");
            barrier.open();
            let first = first.finish().await.unwrap();
            assert_eq!((first.status, first.text().as_str()), (201, "beginend"), "{what}");
            let retry = send_once(envoy.addr(), proto, &request).await.unwrap();
            assert_eq!((retry.status, retry.text().as_str()), (201, "beginend"), "{what}");
            assert_eq!(retry.header("idempotent-replayed"), Some("true"), "{what}");
            assert_eq!(origin.executions_of(&key), 1, "{what}");
        }
    }))
    .await;
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.metric("takeovers").await, 0);
    assert_eq!(envoy.metric("executed").await, 4);
    assert_sound(&envoy).await;
}

/// An external processor that answers every first message with 403 in place of whatever goes on.
async fn denying_processor() -> std::net::SocketAddr {
    // ProcessingResponse {immediate_response: {status: {code: 403}, details: "denied"}}, in a gRPC frame.
    const MESSAGE: &[u8] = b"\0\0\0\0\x0f\x3a\x0d\x0a\x03\x08\x93\x03\x2a\x06denied";
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = ::h2::server::handshake(socket).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    tokio::spawn(async move {
                        let _ = request.into_body().data().await;
                        let head =
                            http::Response::builder().header("content-type", "application/grpc").body(());
                        let mut body = respond.send_response(head.unwrap(), false).unwrap();
                        body.send_data(bytes::Bytes::from_static(MESSAGE), false).unwrap();
                        let mut trailers = http::HeaderMap::new();
                        trailers.insert("grpc-status", http::HeaderValue::from_static("0"));
                        let _ = body.send_trailers(trailers);
                    });
                }
            });
        }
    });
    addr
}

/// B11: a filter nearer the upstream that answers in the upstream's place after the request went out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_replaced_by_a_later_filter_is_retained() {
    let processor = |mode: Value| {
        json!({
            "name": "ext_proc",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "processor"}},
                "processing_mode": mode
            }
        })
    };
    let routes = vec![
        json!({
            "match": {"prefix": "/", "headers": [{"name": "x-unprocessed", "present_match": true}]},
            "route": {"cluster": "origin"},
            "typed_per_filter_config": {"ext_proc": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "disabled": true
            }}
        }),
        json!({"match": {"prefix": "/"}, "route": {"cluster": "origin"}}),
    ];
    let origin = Origin::start().await;
    let mut within_request =
        ListenerSpec::new("within_request", Some(FilterSpec::new("first", default_plugin())));
    within_request.filters_after = vec![processor(
        json!({"request_header_mode": "SKIP", "response_header_mode": "SKIP", "request_body_mode": "STREAMED"}),
    )];
    within_request.access_log_format = LOG.to_owned();
    within_request.routes = routes.clone();
    let envoy = Envoy::builder()
        .routes(routes)
        .filters_after(vec![processor(
            json!({"request_header_mode": "SKIP", "response_header_mode": "SEND"}),
        )])
        .listener(within_request)
        .origin_addr(origin.addr())
        .extra_cluster(cluster("processor", denying_processor().await, true))
        .access_log_format(LOG)
        .start()
        .await;
    for proto in Protocol::BOTH {
        // The response was seen only in the log; the reply came through the filter while the request went out.
        for (listener, ran) in [("main", 1), ("within_request", 0)] {
            let what = format!("{listener} {proto:?}");
            let key = unique_key();
            let request = Request::post("/pay").key(&key).body("amount=1");
            let first = send_once(envoy.addr_of(listener), proto, &request).await.unwrap();
            assert_eq!(first.status, 403, "{what}");
            let line = poll_until(PATIENCE, "the access log", async || {
                envoy.access_log_lines_of(listener).into_iter().find(|line| line.starts_with(&key))
            })
            .await;
            assert!(line.contains("denied") && line.contains("attempts=1"), "{what}: {line}");
            assert!(line.contains(" failed.replaced rule=payments attempt=1 "), "{what}: {line}");
            assert_eq!(origin.executions_of(&key), ran, "{what}");
            // The processor would replace the filter's own answer, too.
            let retry = request.clone().header("x-unprocessed", "yes");
            let retry = send_once(envoy.addr_of(listener), proto, &retry).await.unwrap();
            assert_failed(&retry, "replaced", &what);
            assert_eq!(origin.executions_of(&key), ran, "{what}");
        }
    }
    assert_eq!(ended_claims(&envoy).await, BTreeMap::from([("retained.replaced".to_owned(), 4)]));
    assert_sound(&envoy).await;
}
