//! Faults that other layers of this kind had in public, tried on this one. `docs/cases.md` says which case is which; those
//! that other files cover already are not here.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::envoy::config::cluster;
use crate::support::*;

fn lua(script: &str) -> Value {
    json!({
        "name": "lua",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script}
        }
    })
}

fn refusal(status: u16, kind: &str) -> (u16, Option<String>) {
    (status, Some(kind.to_owned()))
}

fn ran(answer: &Response) -> bool {
    answer.status == 200 && !answer.is_replay()
}

/// The default route, and one for each header `x-route: <name>`.
fn routes(named: &[(&str, Value)]) -> Vec<Value> {
    let mut routes: Vec<Value> = named
        .iter()
        .map(|(name, patch)| {
            let mut route = json!({
                "match": {"prefix": "/", "headers": [{"name": "x-route", "string_match": {"exact": name}}]},
                "route": {"cluster": "origin", "timeout": "15s"}
            });
            deep_merge(&mut route, patch);
            route
        })
        .collect();
    routes.push(json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "15s"}}));
    routes
}

// ---- the request

/// A08: what a request is gets decided once, at its claim; whatever filters and routes below make of it, the result is
/// filed where its retry looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_rewritten_below_the_filter_keeps_the_record_of_its_claim() {
    let rewrite = lua("function envoy_on_request(handle)
           local headers = handle:headers()
           headers:replace('x-account-id', 'eve')
           headers:replace('idempotency-key', 'another')
           headers:replace(':path', headers:get(':path') .. '?rewritten=1')
           handle:body(true):setBytes('amount=1000000')
         end");
    let route = json!({
        "match": {"prefix": "/pay/"},
        "route": {"cluster": "origin", "prefix_rewrite": "/internal/", "host_rewrite_literal": "inner.example"},
        "request_headers_to_remove": ["authorization", "x-account-id", "idempotency-key"]
    });
    let plugin = plugin_with(json!({"scope": [{"header": "x-account-id"}, {"authorization": true}]}));
    let world = Deployment::start(Store::SharedData, plugin, |builder| {
        builder.routes(vec![route.clone()]).filters_after(vec![rewrite.clone()])
    })
    .await;
    for proto in Protocol::BOTH {
        let what = format!("{proto:?}");
        let id = unique_key();
        let request = |account: &str| {
            let request = Request::post(&format!("/pay/{id}")).account(account).key(&id);
            request.header("authorization", "Bearer token").body("amount=1")
        };
        let runs = || world.origin.executions(|seen| seen.path == format!("/internal/{id}?rewritten=1"));
        let first = ask(world.first(), proto, &request("alice")).await;
        assert!(ran(&first), "{what}: {first:?}");
        let seen = world.origin.requests().pop().unwrap();
        assert_eq!(
            (seen.authority.as_str(), seen.body.as_slice()),
            ("inner.example", &b"amount=1000000"[..])
        );
        assert_eq!(
            (seen.key(), seen.header("authorization"), seen.header("x-account-id")),
            (None, None, None)
        );
        let replay = ask(world.other(), proto, &request("alice")).await;
        assert_eq!((replay.is_replay(), &replay.body, runs()), (true, &first.body, 1), "{what}: {replay:?}");
        // Who would be the same below is not the same here.
        let mismatch = ask(world.other(), proto, &request("alice").body("amount=2")).await;
        assert_eq!((mismatch.kind(), runs()), (refusal(422, "mismatch"), 1), "{what}");
        let bob = ask(world.other(), proto, &request("bob")).await;
        assert_eq!((ran(&bob), runs()), (true, 2), "{what}: {bob:?}");
    }
    world.settled().await;
}

/// D13: a client that makes a new key for each attempt runs twice; the access log shows that the keys differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_keys_for_one_request_run_twice_and_the_access_log_tells_them_apart() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder().origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let path = format!("/pay/{proto:?}");
        let keys = [unique_key(), unique_key()];
        for key in [&keys[0], &keys[1], &keys[0]] {
            ask(&envoy, proto, &Request::post(&path).key(key).body("amount=1")).await;
        }
        assert_eq!((origin.executions_of(&keys[0]), origin.executions_of(&keys[1])), (1, 1));
        let lines = poll_until(PATIENCE, "three lines", async || {
            let lines: Vec<String> =
                envoy.access_log_lines().into_iter().filter(|line| line.ends_with(&path)).collect();
            (lines.len() == 3).then_some(lines)
        })
        .await;
        let marks = |begins: &str| -> BTreeSet<String> {
            let lines = lines.iter().filter(|line| line.contains(begins));
            lines.map(|line| line.split("key=").nth(1).unwrap()[..8].to_owned()).collect()
        };
        let (executed, replayed) = (marks(" executed "), marks(" replayed "));
        assert_eq!((executed.len(), replayed.len()), (2, 1), "{lines:?}");
        assert!(replayed.is_subset(&executed), "{lines:?}");
    }
}

/// J05: what is not safe is covered where the rule says so; what is safe never is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn put_and_delete_are_covered_where_the_rule_says_so_and_get_never_is() {
    let origin = Origin::start().await;
    let plugin = plugin_with(json!({"match": {"methods": ["PUT", "DELETE"]}}));
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for (method, covered) in [("PUT", true), ("DELETE", true), ("POST", false), ("GET", false)] {
            let key = unique_key();
            let request = Request::get("/state").method(method).key(&key);
            let answers = [ask(&envoy, proto, &request).await, ask(&envoy, proto, &request).await];
            assert_eq!(answers[1].is_replay(), covered, "{proto:?} {method}");
            assert_eq!(answers[0].body == answers[1].body, covered, "{proto:?} {method}");
            assert_eq!(origin.executions_of(&key), if covered { 1 } else { 2 }, "{proto:?} {method}");
        }
    }
}

/// F18: a client that sends another precondition under the same key gets the first answer, unless the operator lists the
/// header, or says that 412 means "not processed".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_precondition_is_what_the_operator_says() {
    let rule = |name: &str, patch: Value| {
        let mut rule = json!({
            "name": name,
            "match": {"methods": ["PATCH"], "path": {"prefix": format!("/{name}")}},
            "scope": [{"header": "x-account-id"}]
        });
        deep_merge(&mut rule, &patch);
        rule
    };
    let plugin = json!({"store": {"shared_data": {}}, "rules": [
        rule("plain", json!({})),
        rule("listed", json!({"fingerprint": {"headers": ["if-match", "if-none-match", "range"]}})),
        rule("released", json!({"release_statuses": [412, 416, 429, 503]})),
    ]});
    let origin = Origin::start().await;
    origin.on(
        "/",
        Behaviour::func(|seen, _| async move {
            if seen.header("if-match") == Some("\"v2\"") { Reply::echo(200) } else { Reply::status(412) }
        }),
    );
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        for (path, status, replayed, runs) in
            [("/plain", 412, true, 1), ("/listed", 422, false, 1), ("/released", 200, false, 2)]
        {
            let key = unique_key();
            let request = |version: &str| {
                Request::post(path).method("PATCH").key(&key).header("if-match", version).body("amount=1")
            };
            assert_eq!(ask(&envoy, proto, &request("\"v1\"")).await.status, 412, "{path}");
            let retry = ask(&envoy, proto, &request("\"v2\"")).await;
            assert_eq!((retry.status, retry.is_replay()), (status, replayed), "{proto:?} {path}: {retry:?}");
            assert_eq!(origin.executions_of(&key), runs, "{proto:?} {path}");
        }
    }
}

// ---- statuses

/// B04: the answer to a bad body is never the answer to a good one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrected_body_is_a_mismatch_where_the_400_is_kept_and_runs_where_it_is_not() {
    let mut plugin = default_plugin();
    let forgetting = json!({
        "name": "forgotten", "match": {"methods": ["POST"], "path": {"prefix": "/forgotten"}},
        "scope": [{"header": "x-account-id"}], "release_statuses": [400, 429, 503]
    });
    plugin["rules"].as_array_mut().unwrap().insert(0, forgetting);
    let origin = Origin::start().await;
    let envoy = Envoy::builder().plugin(plugin).origin_addr(origin.addr()).start().await;
    let judge = |seen: Seen, _| async move {
        if seen.body == b"bad" { Reply::status(400).chunk("bad amount") } else { Reply::echo(200) }
    };
    origin.on("/", Behaviour::func(judge));
    for proto in Protocol::BOTH {
        for (path, runs) in [("/kept", 1), ("/forgotten", 2)] {
            let key = unique_key();
            let request = |body: &str| Request::post(path).key(&key).body(body);
            assert_eq!(ask(&envoy, proto, &request("bad")).await.text(), "bad amount", "{proto:?} {path}");
            let good = ask(&envoy, proto, &request("good")).await;
            let bad = ask(&envoy, proto, &request("bad")).await;
            if runs == 1 {
                assert_eq!(good.kind(), refusal(422, "mismatch"), "{proto:?}");
                assert_eq!((bad.status, bad.is_replay(), bad.text().as_str()), (400, true, "bad amount"));
            } else {
                assert!(ran(&good), "{proto:?}: {good:?}");
                assert_eq!(bad.kind(), refusal(422, "mismatch"), "{proto:?}");
            }
            assert_eq!(origin.executions_of(&key), runs, "{proto:?} {path}");
        }
    }
}

/// B05: whoever says 429, the service or Envoy itself, has not processed the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_429_is_given_back_whoever_sent_it() {
    let limit = "type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit";
    let always = json!({"default_value": {"numerator": 100}});
    let limited = json!({"typed_per_filter_config": {"limit": {
        "@type": limit, "stat_prefix": "limit",
        "token_bucket": {"max_tokens": 1, "tokens_per_fill": 1, "fill_interval": "3600s"},
        "filter_enabled": always, "filter_enforced": always
    }}});
    let filter = json!({"name": "limit", "typed_config": {"@type": limit, "stat_prefix": "limit"}});
    let world = Deployment::start(Store::SharedData, plugin_with(json!({})), |builder| {
        builder.routes(routes(&[("limited", limited.clone())])).filters_after(vec![filter.clone()])
    })
    .await;
    let busy = Reply::status(429).header("retry-after", "1");
    world.origin.on("/busy", Behaviour::Sequence(vec![busy, Reply::echo(200)]));
    let envoy = world.first();
    let token = Request::post("/pay").header("x-route", "limited").key(unique_key()).body("amount=1");
    assert!(ran(&ask(envoy, Protocol::Http1, &token).await));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/pay").key(&key).body("amount=1");
        for _ in 0..2 {
            let (limited, _) =
                ask_until_decided(envoy, proto, &request.clone().header("x-route", "limited")).await;
            assert_eq!((limited.status, limited.is_replay()), (429, false), "{proto:?}");
        }
        assert_eq!(world.origin.executions_of(&key), 0, "{proto:?}");
        let (run, _) = ask_until_decided(world.other(), proto, &request).await;
        assert_eq!((ran(&run), world.origin.executions_of(&key)), (true, 1), "{proto:?}");

        let key = unique_key();
        let request = Request::post("/busy").key(&key).body("amount=1");
        let busy = ask(envoy, proto, &request).await;
        assert_eq!((busy.status, busy.header("retry-after")), (429, Some("1")), "{proto:?}");
        let (run, _) = ask_until_decided(world.other(), proto, &request).await;
        assert_eq!((ran(&run), world.origin.executions_of(&key)), (true, 2), "{proto:?}");
    }
    world.settled().await;
}

// ---- the caller

/// Tokens of one issuer, signed HS256 with `0123456789abcdef0123456789abcdef`: two of alice's, one of bob's.
const ALICE: &str = "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJpc3N1ZXIiLCJzdWIiOiJhbGljZSIsImp0aSI6IjEifQ.GNNND2t8bsN6-dLlO5ojtUhcpzIK3XTFG1QmK1HQq1w";
const ALICE_ANEW: &str = "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJpc3N1ZXIiLCJzdWIiOiJhbGljZSIsImp0aSI6IjIifQ.T0grU0_ImMQGXI_9aqhueaUxhpDdD6QXvuipWDTN_N4";
const BOB: &str = "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJpc3N1ZXIiLCJzdWIiOiJib2IiLCJqdGkiOiIzIn0.8d9WCu78mDVg3HBS6ajWd7EEMeUyllHDcqkAQ7Jvisk";
/// Alice's name in tokens that nobody signed: with another secret, and with `alg: none`.
const FORGED: [&str; 2] = [
    "Bearer eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJpc3N1ZXIiLCJzdWIiOiJhbGljZSIsImp0aSI6IjQifQ.zQMESO_zBqjM0xzpXPXbhI0wX2yeVe8SsKduCFZ3H2E",
    "Bearer eyJhbGciOiJub25lIiwidHlwIjoiSldUIn0.eyJpc3MiOiJpc3N1ZXIiLCJzdWIiOiJhbGljZSIsImp0aSI6IjUifQ.",
];

fn authentication() -> Value {
    let keys = r#"{"keys":[{"kty":"oct","alg":"HS256","k":"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY"}]}"#;
    json!({
        "name": "envoy.filters.http.jwt_authn",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.jwt_authn.v3.JwtAuthentication",
            "providers": {"issuer": {
                "issuer": "issuer", "payload_in_metadata": "payload", "forward": true,
                "local_jwks": {"inline_string": keys}
            }},
            "rules": [{"match": {"prefix": "/"}, "requires": {"provider_name": "issuer"}}]
        }
    })
}

/// Denies alice, by the verified subject.
fn revocation() -> Value {
    json!({
        "name": "rbac",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC",
            "rules": {"action": "DENY", "policies": {"revoked": {
                "permissions": [{"any": true}],
                "principals": [{"metadata": {
                    "filter": "envoy.filters.http.jwt_authn",
                    "path": [{"key": "payload"}, {"key": "sub"}],
                    "value": {"string_match": {"exact": "alice"}}
                }}]
            }}}
        }
    })
}

fn by_subject() -> Value {
    plugin_with(json!({"scope": [{"jwt_claim": "sub", "metadata_key": "payload"}]}))
}

/// E04, E07: a verified subject is one caller, whatever its token; an unverified one is nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verified_subject_is_one_caller_whatever_its_token() {
    let world = Deployment::start(Store::SharedData, by_subject(), |builder| {
        builder.filters_before(vec![authentication()])
    })
    .await;
    for proto in Protocol::BOTH {
        let what = format!("{proto:?}");
        let key = unique_key();
        let plain = Request::post("/pay").key(&key).header("x-sub", "alice").body("amount=1");
        let request = |token: &str| plain.clone().header("authorization", token);
        let alices = ask(world.first(), proto, &request(ALICE)).await;
        assert!(ran(&alices), "{what}: {alices:?}");
        let renewed = ask(world.other(), proto, &request(ALICE_ANEW)).await;
        assert_eq!((renewed.is_replay(), &renewed.body), (true, &alices.body), "{what}: {renewed:?}");
        let bobs = ask(world.other(), proto, &request(BOB)).await;
        assert!(ran(&bobs) && bobs.body != alices.body, "{what}: {bobs:?}");
        for forged in FORGED.map(&request).into_iter().chain([plain.clone()]) {
            let refused = ask(world.other(), proto, &forged).await;
            assert_eq!((refused.status, refused.is_replay()), (401, false), "{what}: {refused:?}");
            assert!(!refused.text().contains("execution"), "{what}: {refused:?}");
        }
        assert_eq!(world.origin.executions_of(&key), 2, "{what}");
    }
    world.settled().await;
}

/// E06: behind authentication and authorization a replay does not outlive the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_replay_does_not_outlive_a_revoked_grant() {
    let origin = Origin::start().await;
    let builder = Envoy::builder().plugin(by_subject()).filters_before(vec![authentication()]);
    let mut envoy = builder.origin_addr(origin.addr()).start().await;
    let mut done = Vec::new();
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request =
            |token: &str| Request::post("/pay").key(&key).header("authorization", token).body("amount=1");
        let (alices, bobs) = (request(ALICE), request(BOB));
        assert!(ran(&ask(&envoy, proto, &alices).await) && ran(&ask(&envoy, proto, &bobs).await));
        assert!(ask(&envoy, proto, &alices).await.is_replay());
        done.push((proto, key, alices, bobs));
    }
    envoy.reload(|main| main.filters_before = vec![authentication(), revocation()]).await.unwrap();
    for (proto, key, alices, bobs) in &done {
        let refused = ask(&envoy, *proto, alices).await;
        assert_eq!((refused.status, refused.is_replay()), (403, false), "{refused:?}");
        assert!(!refused.text().contains("execution"), "{refused:?}");
        let anonymous = ask(&envoy, *proto, &alices.clone().without("authorization")).await;
        assert_eq!((anonymous.status, anonymous.is_replay()), (401, false), "{anonymous:?}");
        assert!(ask(&envoy, *proto, bobs).await.is_replay());
        assert_eq!(origin.executions_of(key), 2);
    }
    envoy.reload(|main| main.filters_before = vec![authentication()]).await.unwrap();
    for (proto, key, alices, _) in &done {
        assert!(ask(&envoy, *proto, alices).await.is_replay());
        assert_eq!(origin.executions_of(key), 2);
    }
}

/// J10: a check of one-time tokens in front refuses a retry that brings the same token; it never makes it run again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_one_time_token_in_front_means_a_401_or_a_replay() {
    let once = lua("local used = {}
         function envoy_on_request(handle)
           local token = handle:headers():get('authorization')
           if used[token] then
             handle:respond({[':status'] = '401'}, 'used')
           end
           used[token] = true
         end");
    let origin = Origin::start().await;
    // The script's table is a worker's own.
    let builder = Envoy::builder().workers(1).filters_before(vec![once]);
    let envoy = builder.origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = |token: &str| {
            Request::post("/pay").key(&key).header("authorization", format!("{token}{key}")).body("amount=1")
        };
        let first = ask(&envoy, proto, &request("a")).await;
        assert!(ran(&first), "{first:?}");
        let same = ask(&envoy, proto, &request("a")).await;
        assert_eq!((same.status, same.text().as_str()), (401, "used"));
        let replay = ask(&envoy, proto, &request("b")).await;
        assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
    }
}

/// J04: a browser asks first, without a key; and the lines that let it read the answer are of each exchange.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browsers_preflight_is_answered_and_its_replay_is_readable() {
    let cors = json!({
        "name": "envoy.filters.http.cors",
        "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.Cors"}
    });
    let policy = json!({"typed_per_filter_config": {"envoy.filters.http.cors": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.cors.v3.CorsPolicy",
        "allow_origin_string_match": [{"prefix": "https://"}],
        "allow_methods": "POST", "allow_headers": "idempotency-key",
        "expose_headers": "idempotent-replayed, retry-after"
    }}});
    let origin = Origin::start().await;
    let builder = Envoy::builder().filters_before(vec![cors]).virtual_host(policy);
    let envoy = builder.origin_addr(origin.addr()).start().await;
    for proto in Protocol::BOTH {
        let preflight = Request::get("/pay")
            .method("OPTIONS")
            .without("x-account-id")
            .header("origin", "https://a.example")
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "idempotency-key");
        let answer = ask(&envoy, proto, &preflight).await;
        assert_eq!(
            (answer.status, answer.header("access-control-allow-headers")),
            (200, Some("idempotency-key"))
        );
        let key = unique_key();
        let request = |from: &str| Request::post("/pay").key(&key).header("origin", from).body("amount=1");
        let first = ask(&envoy, proto, &request("https://a.example")).await;
        assert!(ran(&first), "{first:?}");
        for from in ["https://a.example", "https://b.example"] {
            let replay = ask(&envoy, proto, &request(from)).await;
            assert_eq!((replay.is_replay(), &replay.body), (true, &first.body));
            assert_eq!(replay.header_lines("access-control-allow-origin"), [from.as_bytes()], "{replay:?}");
            let exposed = replay.header_lines("access-control-expose-headers");
            assert_eq!(exposed, [b"idempotent-replayed, retry-after"], "{replay:?}");
        }
        let refused = ask(&envoy, proto, &request("https://a.example").body("amount=2")).await;
        assert_eq!(refused.kind(), refusal(422, "mismatch"));
        assert_eq!(refused.header("access-control-allow-origin"), Some("https://a.example"));
        assert_eq!(origin.executions_of(&key), 1);
    }
}

// ---- the response

/// F03: a body that a filter nearer the upstream unpacks or rewrites is kept as it was delivered, with its own length.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_a_later_filter_changed_is_replayed_as_it_was_delivered() {
    let decompressor = json!({
        "name": "decompressor",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.decompressor.v3.Decompressor",
            "decompressor_library": {
                "name": "gzip",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.compression.gzip.decompressor.v3.Gzip"}
            }
        }
    });
    let rewrite = lua("function envoy_on_response(handle)
           if handle:headers():get('x-rewrite') then
             handle:body(true):setBytes('a longer body than before')
           end
         end");
    let hello: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xcbH\xcd\xc9\xc9\x07\0\x86\xa6\x106\x05\0\0\0";
    let world = Deployment::start(Store::SharedData, plugin_with(json!({})), |builder| {
        builder.filters_after(vec![rewrite.clone(), decompressor.clone()])
    })
    .await;
    let packed = Reply::ok(hello).header("content-encoding", "gzip");
    world.origin.on("/packed", Behaviour::Respond(packed));
    world.origin.on("/rewritten", Behaviour::Respond(Reply::ok("short").header("x-rewrite", "1")));
    for proto in Protocol::BOTH {
        for (path, text) in [("/packed", "hello"), ("/rewritten", "a longer body than before")] {
            let what = format!("{proto:?} {path}");
            let key = unique_key();
            let request = Request::post(path).key(&key).body("amount=1");
            let mut client = Client::connect(world.other().addr(), proto).await;
            let first = ask(world.first(), proto, &request).await;
            // Twice on one connection, which must stay in step.
            for _ in 0..2 {
                let replay = client.send(&request).await.unwrap();
                assert!(replay.is_replay(), "{what}: {replay:?}");
                assert_eq!((first.text().as_str(), replay.text().as_str()), (text, text), "{what}");
                assert_eq!(replay.header("content-encoding"), None, "{what}: {replay:?}");
                let length = text.len().to_string();
                assert_eq!(replay.header_lines("content-length"), [length.as_bytes()], "{what}: {replay:?}");
            }
            assert_eq!(world.origin.executions_of(&key), 1, "{what}");
        }
    }
    world.settled().await;
}

// ---- what copies requests below the filter

/// G18: a claim guards the way to the router, not what the router makes of it. Route retries of answers run a request
/// again; those of connections that took nothing do not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn route_retries_of_answers_run_a_request_again_and_safe_ones_do_not() {
    let retries = |on: &str| {
        json!({"route": {"retry_policy": {"retry_on": on, "num_retries": 2,
        "retry_back_off": {"base_interval": "0.01s"}}}})
    };
    let named =
        [("5xx", retries("5xx")), ("safe", retries("connect-failure,refused-stream,reset-before-request"))];
    let world = Deployment::start(Store::SharedData, plugin_with(json!({})), |builder| {
        builder.routes(routes(&named))
    })
    .await;
    world.origin.on("/busy", Behaviour::Respond(Reply::status(503)));
    for proto in Protocol::BOTH {
        // Executed three times for one claim; nobody knows what the first two did, so there is no fourth.
        let key = unique_key();
        let request = Request::post("/busy").key(&key).header("x-route", "5xx").body("amount=1");
        assert_eq!(ask(world.first(), proto, &request).await.status, 503);
        assert_eq!(world.origin.executions_of(&key), 3, "{proto:?}");
        let (retry, _) = ask_until_decided(world.other(), proto, &request).await;
        assert_eq!(retry.kind(), refusal(424, "failed"), "{proto:?}");
        assert_eq!(world.origin.executions_of(&key), 3, "{proto:?}");

        let key = unique_key();
        let request = Request::post("/busy").key(&key).header("x-route", "safe").body("amount=1");
        for runs in 1..=2 {
            let (answer, _) = ask_until_decided(world.first(), proto, &request).await;
            assert_eq!((answer.status, answer.problem_type()), (503, None), "{proto:?}");
            assert_eq!(world.origin.executions_of(&key), runs, "{proto:?}");
        }
    }
    world.settled().await;
}

/// G19: a hedged or mirrored request is sent more than once for one claim. Retries still get one answer, and are not
/// copied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hedging_and_mirroring_send_more_than_one_request_for_one_claim() {
    let named = [
        (
            "hedged",
            json!({"route": {
                "retry_policy": {"retry_on": "5xx", "num_retries": 1, "per_try_timeout": "0.2s"},
                "hedge_policy": {"hedge_on_per_try_timeout": true}
            }}),
        ),
        ("mirrored", json!({"route": {"request_mirror_policies": [{"cluster": "mirror"}]}})),
    ];
    let mirror = Origin::start().await;
    let world = Deployment::start(Store::SharedData, plugin_with(json!({})), |builder| {
        builder.routes(routes(&named)).extra_cluster(cluster("mirror", mirror.addr(), false))
    })
    .await;
    let slow = Barrier::new();
    world.origin.on("/slow", Behaviour::first_waits(&slow));
    for proto in Protocol::BOTH {
        let key = unique_key();
        let request = Request::post("/slow").key(&key).header("x-route", "hedged").body("amount=1");
        let first = ask(world.first(), proto, &request).await;
        assert!(ran(&first), "{proto:?}: {first:?}");
        assert_eq!(world.origin.executions_of(&key), 2, "{proto:?}");
        let replay = ask(world.other(), proto, &request).await;
        assert_eq!((replay.is_replay(), replay.body), (true, first.body), "{proto:?}");
        assert_eq!(world.origin.executions_of(&key), 2, "{proto:?}");

        let key = unique_key();
        let request = Request::post("/pay").key(&key).header("x-route", "mirrored").body("amount=1");
        let first = ask(world.first(), proto, &request).await;
        mirror.wait_executions_of(&key, 1, PATIENCE).await;
        let replay = ask(world.other(), proto, &request).await;
        assert_eq!((replay.is_replay(), replay.body), (true, first.body), "{proto:?}");
        assert_eq!((world.origin.executions_of(&key), mirror.executions_of(&key)), (1, 1));
    }
    slow.open();
    world.settled().await;
}
