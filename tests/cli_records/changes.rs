//! Records removed and resolved, and what the filter makes of them then.

use std::time::Duration;

use idempotency::record::codec::StoredResponse;
use idempotency::store::{ClaimReply, Write, WriteReply};
use serde_json::{Value, json};

use crate::command::{Config, run, run_with};
use crate::server::{LEASE, LIFE, Redis, claim_of, completion, failure, hold};

fn forget(redis: &Redis, key: &str, more: &[&str]) -> crate::command::Ended {
    let url = redis.url();
    run(&[&["forget", "--redis", &url, "--redis-key", key], more].concat())
}

#[test]
fn a_removed_record_is_as_if_it_had_never_been() {
    let redis = Redis::start();
    for (number, key) in [redis.failed(0), redis.abandoned(1), redis.completed(2, b"")].iter().enumerate() {
        let done = forget(&redis, key, &["--yes", "--json"]).expect(0, "").json();
        assert_eq!((&done["done"], &done["was"]["redis_key"]), (&json!("forgotten"), &json!(key)));
        let again = redis.claim(&claim_of(&hold(number as u64, 2), LEASE));
        assert_eq!(again, Ok(ClaimReply::Claimed { attempt: 1 }));
    }
    forget(&redis, "idem:none", &["--yes"]).expect(1, "no record");
}

#[test]
fn nothing_is_changed_unless_somebody_confirms() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let before = redis.record(&key);
    let config = Config::payments(json!({}));
    let (url, file) = (redis.url(), config.file());
    forget(&redis, &key, &[]).expect(5, "--yes");
    let resolve = ["resolve", "--redis", &url, "--config", &file, "--redis-key", &key];
    run(&[&resolve[..], &["--release"]].concat()).expect(5, "--yes");
    run_with(&[&resolve[..], &["--status", "201"]].concat(), b"yes\n", |_| {}).expect(5, "--yes");
    for (answer, code) in [("no", 5), ("y", 5), ("", 5)] {
        let asking = crate::command::ask(&["forget", "--redis", &url, "--redis-key", &key]);
        asking.answer(answer).expect(code, "not confirmed");
    }
    assert_eq!(redis.record(&key), before);
    crate::command::ask(&["forget", "--redis", &url, "--redis-key", &key]).answer("yes").expect(0, "Removed");
    assert_eq!(redis.record(&key), "");
}

#[test]
fn a_lease_that_holds_is_let_be() {
    let redis = Redis::start();
    let key = redis.in_flight(1);
    let before = redis.record(&key);
    let config = Config::payments(json!({}));
    let (url, file) = (redis.url(), config.file());
    forget(&redis, &key, &["--yes"]).expect(4, "--force");
    let resolve = ["resolve", "--yes", "--redis", &url, "--config", &file, "--redis-key", &key];
    for how in [&["--release"][..], &["--status", "201"]] {
        run(&[&resolve[..], how].concat()).expect(4, "executing");
    }
    assert_eq!(redis.record(&key), before);
    forget(&redis, &key, &["--yes", "--force"]).expect(0, "Removed");
    assert_eq!(redis.record(&key), "");
}

#[test]
fn what_this_version_cannot_read_it_does_not_touch() {
    let redis = Redis::start();
    let key = redis.failed(1);
    redis.command(&["HSET", &key, "v", "2"]);
    let before = redis.record(&key);
    forget(&redis, &key, &["--yes", "--force"]).expect(4, "unreadable");
    let url = redis.url();
    run(&["resolve", "--release", "--yes", "--redis", &url, "--redis-key", &key]).expect(4, "unreadable");
    assert_eq!(redis.record(&key), before);
}

#[test]
fn whoever_removes_a_completed_record_hears_of_the_near_caches() {
    let redis = Redis::start();
    let near = |patch: Value| {
        let mut store = json!({"redis": {"cluster": "c"}});
        if !patch.is_null() {
            store["redis"]["near_cache"] = patch;
        }
        Config::whole(json!({"store": store, "rules": [{"name": "r",
            "match": {"methods": ["POST"], "path": {"prefix": "/"}}, "scope": "shared"}]}))
    };
    let warning = |number: u64, config: &Config| {
        let key = redis.completed(number, b"");
        forget(&redis, &key, &["--yes", "--json", "--config", &config.file()]).expect(0, "").json()["warning"]
            .clone()
    };
    assert!(warning(1, &near(json!({"ttl": "90s"}))).as_str().unwrap().contains("1m 30s"));
    assert_eq!(warning(2, &near(json!(false))), Value::Null);
    let key = redis.completed(3, b"");
    forget(&redis, &key, &["--yes"]).expect(0, "near_cache.ttl");
    // A failed one is never near.
    let ended = forget(&redis, &redis.failed(4), &["--yes"]).expect(0, "");
    assert!(!ended.err.contains("near"), "{ended:?}");
}

/// Resolves with status 201 and a body under one rule, `payments`.
fn resolve(redis: &Redis, key: &str, patch: Value, more: &[&str]) -> crate::command::Ended {
    let config = Config::payments(patch);
    let (url, file) = (redis.url(), config.file());
    let body = config.put("body", b"{\"id\":\"pay-1\"}");
    let arguments =
        ["resolve", "--yes", "--redis", &url, "--config", &file, "--redis-key", key, "--body", &body];
    run(&[&arguments[..], more].concat())
}

#[test]
fn a_resolved_record_is_one_that_the_filter_replays() {
    let redis = Redis::start();
    for (number, key) in [redis.failed(0), redis.abandoned(1)].iter().enumerate() {
        let number = number as u64;
        let lines = ["--header", "Content-Type: application/json", "--header", "location: /payments/pay-1"];
        let more = [&["--status", "201"], &lines[..], &["--json"]].concat();
        let done = resolve(&redis, key, json!({"record_ttl": "2h"}), &more).expect(0, "").json();
        assert_eq!((&done["done"], &done["body_bytes"]), (&json!("resolved"), &json!(14)));
        let claimed = redis.claim(&claim_of(&hold(number, 2), LEASE));
        let Ok(ClaimReply::Completed { fingerprint, response }) = claimed else { panic!("{claimed:?}") };
        // Another request with this key is still a mismatch.
        assert_eq!(fingerprint, hold(number, 1).fingerprint);
        let response = StoredResponse::decode(&response).unwrap();
        assert_eq!(
            (response.status, response.body, response.origin),
            (201, Some(&b"{\"id\":\"pay-1\"}"[..]), None)
        );
        let lines: [(&[u8], &[u8]); 2] =
            [(b"content-type", b"application/json"), (b"location", b"/payments/pay-1")];
        assert_eq!(response.headers, lines);
        let left: u64 = redis.command(&["PTTL", key]).parse().unwrap();
        assert!((7_100_000..=7_200_000).contains(&left), "{left}");
        assert_eq!(redis.command(&["HMGET", key, "lease_until", "reason"]), "\n");
        // It is final, and says whose word it is.
        let shown =
            run(&["inspect", "--redis", &redis.url(), "--redis-key", key]).expect(0, "by an operator");
        assert!(shown.out.contains(["failed status", "abandoned"][number as usize]), "{shown:?}");
        resolve(&redis, key, json!({}), &["--status", "201"]).expect(4, "nothing to resolve");
    }
}

// An Envoy that was asleep comes back: what it still has to write is stale, so its near cache takes none of it either.
#[test]
fn what_the_old_owner_still_writes_is_stale() {
    let redis = Redis::start();
    let key = redis.abandoned(1);
    resolve(&redis, &key, json!({}), &["--status", "201"]).expect(0, "Resolved");
    let before = redis.record(&key);
    let renewal = Write::Renew { lock_ttl: LEASE, record_ttl: LIFE };
    for write in [completion(b"late"), failure(), renewal, Write::Release] {
        assert_eq!(redis.write(&hold(1, 1), write), Ok(WriteReply::Stale));
    }
    assert_eq!(redis.record(&key), before);
}

#[test]
fn a_released_record_lets_the_retry_run() {
    let redis = Redis::start();
    let url = redis.url();
    for (number, key) in [redis.failed(0), redis.abandoned(1)].iter().enumerate() {
        let done = run(&["resolve", "--release", "--yes", "--json", "--redis", &url, "--redis-key", key]);
        assert_eq!(done.expect(0, "").json()["done"], json!("released"));
        let again = redis.claim(&claim_of(&hold(number as u64, 2), LEASE));
        assert_eq!(again, Ok(ClaimReply::Claimed { attempt: 1 }));
    }
    let key = redis.completed(2, b"");
    run(&["resolve", "--release", "--yes", "--redis", &url, "--redis-key", &key]).expect(4, "`forget`");
}

#[test]
fn an_answer_that_the_filter_would_not_keep_is_refused() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let before = redis.record(&key);
    let refuse = |patch: Value, more: &[&str], code: i32, says: &str| {
        resolve(&redis, &key, patch, more).expect(code, says);
    };
    for status in ["100", "429", "500", "503", "600"] {
        refuse(json!({}), &["--status", status], 2, "replay_statuses");
    }
    refuse(json!({}), &["--status", "204"], 2, "has none");
    refuse(json!({"max_response_body_bytes": 13}), &["--status", "201"], 2, "max_response_body_bytes");
    refuse(json!({"mode": "shadow"}), &["--status", "201"], 4, "shadow");
    for line in ["no colon", ": x", "a b: x", "x: a\nb"] {
        refuse(json!({}), &["--status", "201", "--header", line], 2, "name: value");
    }
    let url = redis.url();
    run(&["resolve", "--yes", "--redis", &url, "--redis-key", &key, "--status", "201"]).expect(2, "--config");
    run(&["resolve", "--yes", "--redis", &url, "--redis-key", &key]).expect(2, "--status");
    assert_eq!(redis.record(&key), before);
}

#[test]
fn lines_that_the_filter_does_not_keep_are_left_out_and_named() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let lines = [
        "Date: now",
        "connection: x-hop",
        "x-hop: 1",
        "set-cookie: a=b",
        "access-control-allow-origin: *",
        "x-secret: s",
        "etag: \"1\"",
        "etag: \"2\"",
    ];
    let mut more = vec!["--status", "201", "--json"];
    for line in &lines {
        more.extend(["--header", line]);
    }
    let done = resolve(&redis, &key, json!({"drop_response_headers": ["x-secret"]}), &more).expect(0, "");
    let left_out = ["date", "connection", "x-hop", "set-cookie", "access-control-allow-origin", "x-secret"];
    let shown = run(&["inspect", "--json", "--redis", &redis.url(), "--redis-key", &key]).json();
    assert_eq!(shown["response"]["headers"], json!([["etag", "\"1\""], ["etag", "\"2\""]]));
    assert!(left_out.iter().all(|name| done.err.contains(&format!("{name}: not kept"))), "{done:?}");
}

#[test]
fn a_body_comes_from_standard_input_too() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let config = Config::payments(json!({}));
    let (url, file) = (redis.url(), config.file());
    let arguments = [
        "resolve",
        "--redis",
        &url,
        "--config",
        &file,
        "--redis-key",
        &key,
        "--status",
        "200",
        "--body",
        "-",
    ];
    run_with(&arguments, b"paid", |_| {}).expect(2, "--yes");
    run_with(&[&arguments[..], &["--yes"]].concat(), b"\x00paid\xff", |_| {}).expect(0, "Resolved");
    let Ok(ClaimReply::Completed { response, .. }) =
        redis.claim(&claim_of(&hold(1, 2), Duration::from_secs(1)))
    else {
        panic!("not completed")
    };
    assert_eq!(StoredResponse::decode(&response).unwrap().body, Some(&b"\x00paid\xff"[..]));
}
