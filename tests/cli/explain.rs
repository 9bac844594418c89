//! `explain` says what the filter does; what it says of records is held against Redis in `snippet.rs`.

use serde_json::{Value, json};

use crate::Scratch;
use crate::command::run;

const PLUGIN: &str = r#"{
    "store": {"redis": {"cluster": "redis-link", "key_prefix": "pay:"}},
    "rules": [
        {"name": "orders", "match": {"path": {"prefix": "/orders"}, "hosts": ["*.example.com"]}, "scope": "shared"},
        {"name": "dark", "match": {"path": {"exact": "/dark"}}, "scope": "shared", "mode": "shadow"},
        {"name": "off", "match": {"path": {"exact": "/off"}}, "scope": "shared", "mode": "off"},
        {"name": "waits", "match": {"path": {"exact": "/waits"}}, "in_flight": "wait", "on_abandoned": "retain",
         "scope": [{"jwt_claim": "sub", "metadata_key": "payload"}, {"peer_certificate": "uri_san"}]},
        {"name": "rest", "scope": [{"header": "x-account-id"}], "max_request_body_bytes": 4, "missing_key": "pass"}
    ]}"#;

fn explain(code: i32, arguments: &[&str]) -> Value {
    let scratch = Scratch::new();
    let file = scratch.put("plugin.json", PLUGIN);
    run(&[&["--json", "explain", &file], arguments].concat()).expect(code, "").json()
}

const KEY: [&str; 2] = ["-H", "Idempotency-Key: k1"];

#[test]
fn the_rule_that_covers_and_the_reasons_of_the_others_are_told() {
    let told = explain(0, &[&["--path", "/x?q=1", "-H", "x-account-id: a"][..], &KEY].concat());
    assert_eq!(told["covered"]["rule"], "rest");
    let why = |index: usize| told["rules"][index]["why_not"].as_str().unwrap().to_owned();
    assert!(why(0).contains("host localhost is not one of *.example.com"), "{}", why(0));
    assert!(why(0).contains("does not match prefix /orders"));
    assert!(why(1).contains("exact /dark"));
    assert_eq!(told["rules"][4]["why_not"], Value::Null);

    let orders =
        explain(0, &[&["--path", "/orders/1", "--authority", "API.example.com:8443"][..], &KEY].concat());
    assert_eq!(orders["covered"]["rule"], "orders");
    assert_eq!(orders["rules"][4]["why_not"], "it matches, but orders comes first");
    let off = explain(0, &["--path", "/off"]);
    assert_eq!((&off["covered"], &off["verdict"]["why"]), (&Value::Null, &json!("rule_off")));
}

#[test]
fn what_passes_and_what_is_refused_is_told_with_its_reason() {
    let account = ["-H", "x-account-id: a"];
    for (arguments, code, kind, why) in [
        (&["--path", "/x", "-X", "GET"][..], 0, "bypassed", "safe_method"),
        (&["--path", "/x"], 0, "bypassed", "no_key"),
        (&["--path", "/x", "-H", "content-type: application/grpc"], 0, "bypassed", "grpc"),
        (&["--path", "/x", "--route-off"], 0, "bypassed", "route_off"),
    ] {
        let told = explain(code, &[arguments, &account].concat());
        assert_eq!(
            (&told["verdict"]["kind"], &told["verdict"]["why"]),
            (&json!(kind), &json!(why)),
            "{arguments:?}"
        );
    }
    for (arguments, status, kind) in [
        (&["--path", "/orders", "--authority", "a.example.com"][..], 400, "missing-key"),
        (&["--path", "/x", "-H", "Idempotency-Key: a,b"], 400, "invalid-key"),
        (&["--path", "/x", "-H", "Idempotency-Key: a"], 400, "invalid-scope"),
        (
            &["--path", "/x", "-H", "Idempotency-Key: a", "-H", "x-account-id: a", "--data", "12345"],
            413,
            "payload-too-large",
        ),
        (&["--path", "/x", "--route-rule", "nobody"], 500, "misconfigured"),
    ] {
        let told = explain(1, arguments);
        let reply = &told["verdict"]["reply"];
        assert_eq!((&reply["status"], &reply["type"]), (&json!(status), &json!(kind)), "{arguments:?}");
    }
}

fn answer<'a>(told: &'a Value, record: &str) -> &'a str {
    let answers = told["answers"].as_array().unwrap();
    let found = answers.iter().find(|answer| answer["record"] == record).unwrap();
    found["answer"].as_str().unwrap()
}

#[test]
fn every_state_of_the_record_has_its_answer() {
    let told = explain(0, &[&["--path", "/x", "-H", "x-account-id: a", "--data", "1234"][..], &KEY].concat());
    assert!(answer(&told, "no record").starts_with("forwarded"));
    assert_eq!(answer(&told, "in flight, its lease holds"), "409 in-flight, Retry-After: 1");
    assert_eq!(answer(&told, "in flight, its lease ran out"), "forwarded with x-idempotency-attempt: 2");
    assert_eq!(answer(&told, "completed (with 201, say)"), "201, replayed from the record");
    assert_eq!(answer(&told, "failed"), "424 failed");
    assert_eq!(answer(&told, "any, of another request"), "422 mismatch");
    assert!(answer(&told, "the store gives no answer").starts_with("503 store-unavailable"));
    let statuses = |what: &str| {
        let all = told["upstream_answers"].as_array().unwrap();
        all.iter().find(|group| group["what"].as_str().unwrap().contains(what)).unwrap()["statuses"].clone()
    };
    assert_eq!(statuses("given back"), "401, 407-408, 421, 425, 429, 501, 503");
    assert_eq!(statuses("kept as failed"), "500, 502, 504-599");

    let who = ["--claim", "sub=alice", "--certificate", "uri_san=spiffe://a"];
    let waits = explain(0, &[&["--path", "/waits"][..], &KEY, &who].concat());
    assert!(answer(&waits, "in flight, its lease holds").starts_with("waits"));
    assert_eq!(answer(&waits, "in flight, its lease ran out"), "424 abandoned");
    explain(1, &[&["--path", "/waits"][..], &KEY].concat());
}

#[test]
fn the_same_key_in_two_spellings_is_one_record_and_another_body_is_another_request() {
    let claim = |key: &str, data: &str, account: &str| {
        let (key, account) = (format!("Idempotency-Key: {key}"), format!("x-account-id: {account}"));
        explain(0, &["--path", "/x", "-H", &key, "-H", &account, "--data", data])["claim"].clone()
    };
    let first = claim("k1", "1", "a");
    assert_eq!(first, claim("\"k1\"", "1", "a"));
    assert_eq!(first["redis_key"], format!("pay:{}", first["store_key"].as_str().unwrap()));
    let other = claim("k1", "2", "a");
    assert!(first["store_key"] == other["store_key"] && first["fingerprint"] != other["fingerprint"]);
    assert_ne!(first["store_key"], claim("k1", "1", "b")["store_key"]);
}

#[test]
fn a_shadow_keeps_its_own_records_and_credentials_are_not_shown() {
    let dark = explain(0, &[&["--path", "/dark"][..], &KEY].concat());
    assert_eq!((&dark["covered"]["mode"], &dark["answers"]), (&json!("shadow"), &json!([])));
    let orders = explain(0, &[&["--path", "/orders", "--authority", "a.example.com"][..], &KEY].concat());
    assert_ne!(dark["claim"]["store_key"], orders["claim"]["store_key"]);

    let scratch = Scratch::new();
    let file = scratch.put(
        "p.json",
        r#"{"store": {"shared_data": {}}, "rules": [{"name": "a", "scope": [{"authorization": true}]}]}"#,
    );
    let told =
        run(&[&["explain", &file, "--path", "/", "-H", "authorization: Bearer sesame"][..], &KEY].concat());
    assert!(!told.expect(0, "hashed").out.contains("sesame"));
}
