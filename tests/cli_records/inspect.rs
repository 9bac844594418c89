//! One record, found by what a request brings, and shown.

use std::time::Duration;

use idempotency::store::ClaimReply;
use idempotency::store::redis::Fault;
use serde_json::{Value, json};

use crate::command::{Config, run};
use crate::server::{LEASE, Redis, claim_of, hold, name};

fn inspect(redis: &Redis, key: &str) -> Value {
    run(&["inspect", "--json", "--redis", &redis.url(), "--redis-key", key]).expect(0, key).json()
}

#[test]
fn each_state_is_shown_as_it_is() {
    let redis = Redis::start();
    let in_flight = inspect(&redis, &redis.in_flight(1));
    assert_eq!((&in_flight["state"], &in_flight["attempt"]), (&json!("in_flight"), &json!(1)));
    assert_eq!((&in_flight["format"], &in_flight["fingerprint_version"]), (&json!("1"), &json!("1")));
    assert_eq!(
        (&in_flight["owner"], &in_flight["fingerprint"]),
        (&json!("01".repeat(16)), &json!("01".repeat(32)))
    );
    let left = in_flight["lease_remaining_ms"].as_i64().unwrap();
    assert!((1..=60_000).contains(&left), "{left}");
    let left = in_flight["expires_in_ms"].as_i64().unwrap();
    assert!((3_500_000..=3_600_000).contains(&left), "{left}");

    let abandoned = inspect(&redis, &redis.abandoned(2));
    assert_eq!(abandoned["state"], json!("abandoned"));
    assert!(abandoned["lease_remaining_ms"].as_i64().unwrap() < 0, "{abandoned}");

    let failed = inspect(&redis, &redis.failed(3));
    assert_eq!((&failed["state"], &failed["reason"]), (&json!("failed"), &json!("status")));
    assert_eq!(failed["lease_remaining_ms"], Value::Null);

    let completed = inspect(&redis, &redis.completed(4, b"paid"));
    assert_eq!(completed["state"], json!("completed"));
    let lines = json!([["content-type", "application/json"], ["location", "/payments/pay-1"]]);
    let response = json!({"format": 1, "status": 201, "headers": lines, "tombstone": false, "body_bytes": 4,
        "kept_for_an_origin": false});
    assert_eq!(completed["response"], response);

    let absent = run(&["inspect", "--json", "--redis", &redis.url(), "--redis-key", "idem:none"]);
    assert_eq!(absent.expect(1, "").json(), json!({"redis_key": "idem:none", "state": "absent"}));
}

#[test]
fn a_body_is_shown_only_where_it_is_asked_for() {
    let redis = Redis::start();
    let text = redis.completed(1, b"card 4111");
    let bytes = redis.completed(2, b"\xff\x00");
    let show = |key: &str, more: &[&str]| {
        let url = redis.url();
        let arguments = [&["inspect", "--redis", &url, "--redis-key", key], more].concat();
        run(&arguments).expect(0, "")
    };
    for more in [&[][..], &["--json"]] {
        assert!(!show(&text, more).out.contains("4111"));
    }
    show(&text, &["--show-body"]).expect(0, "card 4111");
    assert_eq!(show(&text, &["--show-body", "--json"]).json()["response"]["body"], json!("card 4111"));
    assert_eq!(show(&bytes, &["--show-body", "--json"]).json()["response"]["body_hex"], json!("ff00"));
    // A terminal is given no control characters of a stranger.
    assert!(!show(&bytes, &["--show-body"]).out.contains('\0'));
}

#[test]
fn what_is_unreadable_here_is_what_a_claim_calls_unreadable() {
    let redis = Redis::start();
    let spoil: [&[&str]; 12] = [
        &["HSET", "KEY", "v", "2"],
        &["HDEL", "KEY", "v"],
        &["HDEL", "KEY", "owner"],
        &["HDEL", "KEY", "attempt"],
        &["HDEL", "KEY", "created"],
        &["HDEL", "KEY", "reason"],
        &["HDEL", "KEY", "fingerprint"],
        &["HSET", "KEY", "fingerprint_version", "9"],
        &["HSET", "KEY", "fingerprint", "EF"],
        &["HSET", "KEY", "state", "resolved"],
        &["HSET", "KEY", "state", "completed"],
        &["HSET", "KEY", "reason", "haunted"],
    ];
    for (number, argv) in spoil.into_iter().enumerate() {
        let number = number as u64;
        let key = redis.failed(number);
        let argv: Vec<&str> =
            argv.iter().map(|word| if *word == "KEY" { key.as_str() } else { *word }).collect();
        redis.command(&argv);
        assert_eq!(redis.claim(&claim_of(&hold(number, 2), LEASE)), Err(Fault::Unreadable), "{argv:?}");
        assert_eq!(inspect(&redis, &key)["state"], json!("unreadable"), "{argv:?}");
    }
    let text = name(&hold(99, 1));
    redis.command(&["SET", &text, "1"]);
    assert_eq!(redis.claim(&claim_of(&hold(99, 2), LEASE)), Err(Fault::Unreadable));
    assert_eq!(inspect(&redis, &text)["state"], json!("unreadable"));
    // The control: the same record, unspoilt.
    let sound = redis.failed(98);
    assert!(matches!(redis.claim(&claim_of(&hold(98, 2), LEASE)), Ok(ClaimReply::Failed { .. })));
    assert_eq!(inspect(&redis, &sound)["state"], json!("failed"));
}

/// Where the command looks for a request's record.
fn place(redis: &Redis, config: &Config, more: &[&str]) -> String {
    let (url, file) = (redis.url(), config.file());
    let arguments = [&["inspect", "--json", "--redis", &url, "--config", &file], more].concat();
    run(&arguments).expect(1, "absent").json()["redis_key"].as_str().unwrap().to_owned()
}

// What a filter under these rules asked Redis for: the derivation of store keys is frozen.
#[test]
fn rule_scope_and_key_lead_to_one_place_each() {
    let redis = Redis::start();
    let plain = Config::payments(json!({}));
    let alice = place(&redis, &plain, &["--scope", "x-account-id=alice", "--key", "order-1"]);
    assert!(alice.starts_with("idem:") && alice.len() == 5 + 64, "{alice}");
    let same = [
        // A String and a bare token are one key; a header's name has no case.
        &["--rule", "payments", "--scope", "X-Account-Id=alice", "--key", "\"order-1\""][..],
        &["--scope-file", &format!("x-account-id={}", plain.put("alice", b"alice\n")), "--key", "order-1"],
    ];
    for arguments in same {
        assert_eq!(place(&redis, &plain, arguments), alice);
    }
    let mut places = vec![alice];
    let mut other = |config: &Config, arguments: &[&str]| places.push(place(&redis, config, arguments));
    other(&plain, &["--scope", "x-account-id=bob", "--key", "order-1"]);
    other(&plain, &["--scope", "x-account-id=alice", "--key", "order-2"]);
    let account = ["--scope", "x-account-id=alice", "--key", "order-1"];
    other(&Config::payments(json!({"namespace": "orders"})), &account);
    other(&Config::payments(json!({"mode": "shadow"})), &account);
    let several = Config::payments(json!({"scope": [
        {"jwt_claim": "sub", "metadata_key": "payload"}, {"peer_certificate": "uri_san"},
        {"property": ["request", "host"]}, {"constant": "tenant"}, {"authorization": true}]}));
    let rest =
        ["--scope", "uri_san=spiffe://a", "--scope", "request.host=b", "--scope", "authorization=Bearer c"];
    for sub in ["sub=7", "sub:number=7", "sub:integer=7", "sub:boolean=true"] {
        other(&several, &[&["--key", "order-1", "--scope", sub], &rest[..]].concat());
    }
    other(&Config::payments(json!({"scope": "shared"})), &["--key", "order-1"]);
    let count = places.len();
    places.sort();
    places.dedup();
    assert_eq!(places.len(), count);
}

#[test]
fn a_mistake_is_named_without_what_was_typed() {
    let redis = Redis::start();
    let config = Config::payments(json!({"key": {"max_length": 20}}));
    let refuse = |more: &[&str], says: &str| {
        let (url, file) = (redis.url(), config.file());
        let ended = run(&[&["inspect", "--redis", &url, "--config", &file], more].concat()).expect(2, says);
        assert!(!ended.err.contains("s3cret"), "{ended:?}");
    };
    refuse(&["--key", "a"], "x-account-id=VALUE (header x-account-id)");
    refuse(&["--key", "a", "--scope", "account=s3cret"], "x-account-id=VALUE (header x-account-id)");
    refuse(&["--key", "a", "--scope", "x-account-id=s3cret s3cret"], "a space at byte 6");
    refuse(&["--key", "s3cret,s3cret", "--scope", "x-account-id=alice"], "a list of keys");
    refuse(&["--key", "s3cret-s3cret-s3cret-s3cret", "--scope", "x-account-id=alice"], "longer than 20");
    refuse(
        &["--key", "a", "--scope", "x-account-id=a", "--rule", "orders"],
        "no rule of this name, but payments",
    );
    refuse(&["--redis-key", "other:1"], "key_prefix \"idem:\"");
    let embedded = Config::whole(json!({"store": {"shared_data": {}}, "rules": [{"name": "payments",
        "match": {"methods": ["POST"], "path": {"prefix": "/"}}, "scope": "shared"}]}));
    run(&["inspect", "--redis", &redis.url(), "--config", &embedded.file(), "--key", "a"])
        .expect(2, "live in the Envoy process");
    let wrong = Config::whole(json!({"store": {"redis": {"cluster": "c"}}, "rules": [], "rulez": []}));
    run(&["inspect", "--redis", &redis.url(), "--config", &wrong.file(), "--key", "a"]).expect(2, "rulez");
}

#[test]
fn a_record_that_never_expires_says_so() {
    let redis = Redis::start();
    let key = redis.completed(1, b"");
    redis.command(&["PERSIST", &key]);
    assert_eq!(inspect(&redis, &key)["expires_in_ms"], Value::Null);
    let ended = run(&["inspect", "--redis", &redis.url(), "--redis-key", &key]).expect(0, "never");
    assert!(ended.out.contains("201, a body of 0 bytes"), "{ended:?}");
    let shortly = Duration::from_millis(1);
    redis.command(&["PEXPIRE", &key, &shortly.as_millis().to_string()]);
    crate::server::eventually("it is gone", || (redis.command(&["EXISTS", &key]) == "0").then_some(()));
    run(&["inspect", "--redis", &redis.url(), "--redis-key", &key]).expect(1, "no record");
}
