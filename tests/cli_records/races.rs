//! A record that changes between what was shown and what is written: the command waits at its question meanwhile.

use std::time::Duration;

use idempotency::store::{ClaimReply, Write, WriteReply};
use serde_json::json;

use crate::command::{Config, ask, run};
use crate::server::{LEASE, LIFE, Redis, claim_of, completion, failure, hold};

/// Asks each kind of change for a record that `make` makes, lets `meanwhile` happen, says yes, and expects the record
/// to be what `meanwhile` left.
fn changed_meanwhile(
    make: impl Fn(&Redis, u64) -> String,
    says: &str,
    meanwhile: impl Fn(&Redis, u64, &str),
) {
    let redis = Redis::start();
    let config = Config::payments(json!({}));
    let (url, file) = (redis.url(), config.file());
    let changes: [&[&str]; 3] = [&["forget"], &["resolve", "--release"], &["resolve", "--status", "201"]];
    for (number, change) in changes.into_iter().enumerate() {
        let key = make(&redis, number as u64);
        let place = ["--redis", &url, "--config", &file, "--redis-key", &key];
        let asking = ask(&[change, &place[..]].concat());
        meanwhile(&redis, number as u64, &key);
        let (left, ttl) = (redis.record(&key), redis.command(&["PEXPIRETIME", &key]));
        asking.answer("yes").expect(6, says);
        assert_eq!((redis.record(&key), redis.command(&["PEXPIRETIME", &key])), (left, ttl), "{change:?}");
    }
}

#[test]
fn a_retry_took_the_abandoned_record_over() {
    changed_meanwhile(Redis::abandoned, "no longer the one", |redis, number, _| {
        let took = redis.claim(&claim_of(&hold(number, 2), LEASE));
        assert_eq!(took, Ok(ClaimReply::Claimed { attempt: 2 }));
    });
}

#[test]
fn the_lease_was_renewed() {
    changed_meanwhile(Redis::abandoned, "lease was renewed", |redis, number, _| {
        let renewal = Write::Renew { lock_ttl: LEASE, record_ttl: LIFE };
        assert_eq!(redis.write(&hold(number, 1), renewal), Ok(WriteReply::Applied));
    });
}

#[test]
fn its_own_worker_completed_it() {
    changed_meanwhile(Redis::abandoned, "no longer the one", |redis, number, _| {
        assert_eq!(redis.write(&hold(number, 1), completion(b"late")), Ok(WriteReply::Applied));
    });
}

#[test]
fn its_own_worker_recorded_a_failure() {
    changed_meanwhile(Redis::abandoned, "no longer the one", |redis, number, _| {
        assert_eq!(redis.write(&hold(number, 1), failure()), Ok(WriteReply::Applied));
    });
}

#[test]
fn somebody_else_released_it_and_it_runs_again() {
    changed_meanwhile(Redis::failed, "no longer the one", |redis, number, key| {
        redis.command(&["DEL", key]);
        let again = redis.claim(&claim_of(&hold(number, 2), LEASE));
        assert_eq!(again, Ok(ClaimReply::Claimed { attempt: 1 }));
    });
}

#[test]
fn it_ran_again_and_failed_again() {
    changed_meanwhile(Redis::failed, "no longer the one", |redis, number, key| {
        redis.command(&["DEL", key]);
        redis.claim(&claim_of(&hold(number, 2), LEASE)).unwrap();
        assert_eq!(redis.write(&hold(number, 2), failure()), Ok(WriteReply::Applied));
    });
}

#[test]
fn somebody_else_resolved_it() {
    changed_meanwhile(Redis::failed, "no longer the one", |redis, number, key| {
        redis.command(&["DEL", key]);
        redis.claim(&claim_of(&hold(number, 3), LEASE)).unwrap();
        assert_eq!(redis.write(&hold(number, 3), completion(b"theirs")), Ok(WriteReply::Applied));
    });
}

#[test]
fn it_is_gone() {
    changed_meanwhile(Redis::failed, "is gone", |redis, _, key| {
        redis.command(&["DEL", key]);
    });
}

#[test]
fn a_newer_version_wrote_it() {
    changed_meanwhile(Redis::failed, "unreadable", |redis, _, key| {
        redis.command(&["HSET", key, "v", "2"]);
    });
}

#[test]
fn a_script_is_held_to_the_owner_it_was_shown() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let (before, url) = (redis.record(&key), redis.url());
    for verb in [&["forget"][..], &["resolve", "--release"]] {
        let place = ["--yes", "--redis", &url, "--redis-key", &key, "--owner"];
        run(&[verb, &place[..], &["02"]].concat()).expect(6, "another owner");
        assert_eq!(redis.record(&key), before);
    }
    let owner = "01".repeat(16);
    run(&["forget", "--yes", "--redis", &url, "--redis-key", &key, "--owner", &owner]).expect(0, "Removed");
    assert_eq!(redis.record(&key), "");
}

/// The control: when nothing happens meanwhile, the same question leads to the change.
#[test]
fn nothing_happened() {
    let redis = Redis::start();
    let config = Config::payments(json!({}));
    let (url, file) = (redis.url(), config.file());
    for (number, change) in
        [&["forget"][..], &["resolve", "--release"], &["resolve", "--status", "201"]].into_iter().enumerate()
    {
        let key = redis.failed(number as u64);
        let place = ["--redis", &url, "--config", &file, "--redis-key", &key];
        ask(&[change, &place[..]].concat()).answer("yes").expect(0, "");
        let claimed = redis.claim(&claim_of(&hold(number as u64, 2), Duration::from_secs(1)));
        assert!(
            matches!(claimed, Ok(ClaimReply::Claimed { .. } | ClaimReply::Completed { .. })),
            "{claimed:?}"
        );
    }
}
