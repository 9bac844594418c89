//! The scripts as they are shipped, in Redis's own time.

use std::time::{Duration, Instant};

use idempotency::record::Reason;
use idempotency::store::redis::script::{SCRIPTS, Script, Scripts};
use idempotency::store::redis::{Answer, Operation};
use idempotency::store::{ClaimReply, StoreError, Write, WriteReply};

use crate::fixture::{LEASE, LIFE, Worker, claim, claim_for, complete, hold, name, response};
use crate::server::Redis;

#[test]
fn each_script_has_the_name_that_redis_gives_it() {
    let redis = Redis::start();
    let Scripts { claim, renew, complete, fail, release } = SCRIPTS;
    let named = [claim, renew, complete, fail, release].map(|script| script.sha1);
    let right = [claim, renew, complete, fail, release]
        .map(|Script { source, .. }| redis.command(&["SCRIPT", "LOAD", source]));
    assert_eq!(named.as_slice(), right.as_slice(), "put the right ones into src/store/redis/script.rs");
}

// H14: exactly the expected names, fields and lives.
#[test]
fn a_record_is_a_hash_that_an_operator_can_read() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 0xcd);
    let fields = |names: &[&str]| redis.command(&[&["HMGET", &name(&holder)], names].concat());
    worker.claim(claim(&holder)).unwrap();
    assert_eq!(redis.command(&["KEYS", "*"]), name(&holder));
    assert_eq!(name(&holder), format!("idem:{}01{}", "00".repeat(7), "00".repeat(24)));
    assert_eq!(redis.command(&["HLEN", &name(&holder)]), "8");
    assert_eq!(
        fields(&["v", "state", "owner", "attempt", "fingerprint", "fingerprint_version"]),
        format!("1\nin_flight\n{}\n1\n{}\n1", "cd".repeat(16), "01".repeat(32))
    );
    let times = fields(&["created", "lease_until"]);
    let [created, lease_until] = [0, 1].map(|at| times.lines().nth(at).unwrap().parse::<u128>().unwrap());
    assert_eq!(lease_until - created, LEASE.as_millis());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis();
    assert!(now.abs_diff(created) < 10_000, "{created}");

    worker.run(complete(&holder, b"kept"));
    assert_eq!(fields(&["state", "response", "lease_until", "reason"]), "completed\nkept\n\n");
    assert_eq!(redis.command(&["HLEN", &name(&holder)]), "8");

    let failed = hold(2, 0xcd);
    worker.claim(claim(&failed)).unwrap();
    worker.write(&failed, Write::Fail { reason: Reason::ClientGone, failed_ttl: LIFE }).unwrap();
    assert_eq!(redis.command(&["HMGET", &name(&failed), "state", "reason"]), "failed\nclient_gone");
    assert_eq!(redis.command(&["HLEN", &name(&failed)]), "8");

    worker.write(&hold(3, 1), Write::Release).unwrap();
    worker.claim(claim(&hold(3, 1))).unwrap();
    worker.write(&hold(3, 1), Write::Release).unwrap();
    assert_eq!(redis.command(&["EXISTS", &name(&hold(3, 1))]), "0");
}

// A10: every record ends, however it came to be.
#[test]
fn every_write_sets_the_records_end() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let lives = |key: u64, expected: Duration| {
        let left = redis.millis_left(&name(&hold(key, 1)));
        let expected = i64::try_from(expected.as_millis()).unwrap();
        assert!((expected - 10_000..=expected).contains(&left), "key {key}: {left} instead of {expected}");
    };
    let second = Duration::from_secs(1);
    worker.claim(claim(&hold(1, 1))).unwrap();
    lives(1, LIFE);
    worker.claim(claim_for(&hold(2, 1), 2 * LIFE)).unwrap();
    lives(2, 2 * LIFE);
    for (lock_ttl, record_ttl, life) in [(LEASE, 50 * second, LEASE), (LEASE, 5 * LIFE, 5 * LIFE)] {
        // The second time there is a record, the first time it is made anew.
        for _ in 0..2 {
            assert_eq!(
                worker.write(&hold(3, 1), Write::Renew { lock_ttl, record_ttl }),
                Ok(WriteReply::Applied)
            );
            lives(3, life);
        }
        worker.write(&hold(3, 1), Write::Release).unwrap();
    }
    for key in [4, 5] {
        if key == 4 {
            worker.claim(claim(&hold(key, 1))).unwrap();
        }
        let write = Write::Complete { response: (*b"kept").into(), record_ttl: 90 * second };
        assert_eq!(worker.write(&hold(key, 1), write), Ok(WriteReply::Applied));
        lives(key, 90 * second);
    }
    for key in [6, 7] {
        if key == 6 {
            worker.claim(claim(&hold(key, 1))).unwrap();
        }
        let write = Write::Fail { reason: Reason::Reset, failed_ttl: 90 * second };
        assert_eq!(worker.write(&hold(key, 1), write), Ok(WriteReply::Applied));
        lives(key, 90 * second);
    }
}

#[test]
fn a_lease_runs_out_in_redis_own_time() {
    const SHORT: Duration = Duration::from_millis(200);
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let began = Instant::now();
    assert_eq!(worker.claim(claim_for(&hold(1, 1), SHORT)), Ok(ClaimReply::Claimed { attempt: 1 }));
    let claimed = Instant::now();
    let mut reply = worker.claim(claim(&hold(1, 2))).unwrap();
    while let ClaimReply::InFlight { elapsed, remaining, .. } = reply {
        assert_eq!(elapsed + remaining, SHORT);
        assert!(claimed.elapsed() < Duration::from_secs(10), "the lease does not end");
        std::thread::sleep(Duration::from_millis(5));
        reply = worker.claim(claim(&hold(1, 2))).unwrap();
    }
    assert_eq!(reply, ClaimReply::Claimed { attempt: 2 });
    assert!(began.elapsed() >= SHORT);
    assert_eq!(worker.write(&hold(1, 1), Write::Release), Ok(WriteReply::Stale));
}

#[test]
fn a_record_ends_in_redis_own_time() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let record_ttl = Duration::from_millis(150);
    worker.write(&hold(1, 1), Write::Complete { response: (*b"kept").into(), record_ttl }).unwrap();
    let began = Instant::now();
    while worker.claim(claim(&hold(1, 2))).unwrap() != (ClaimReply::Claimed { attempt: 1 }) {
        assert!(began.elapsed() < Duration::from_secs(10), "the record does not end");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_completed_record_tells_the_rest_of_its_life() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let kept = response(b"kept");
    worker.run(complete(&hold(1, 1), &kept));
    let Answer::Claim(Ok(answer)) = worker.run(claim(&hold(1, 2))) else { panic!() };
    assert!(answer.life <= LIFE && answer.life > LIFE - Duration::from_secs(10), "{:?}", answer.life);
    redis.command(&["PERSIST", &name(&hold(1, 1))]);
    let Answer::Claim(Ok(answer)) = worker.run(claim(&hold(1, 2))) else { panic!() };
    assert!(answer.life > LIFE);
    let fingerprint = hold(1, 1).fingerprint;
    assert_eq!(answer.reply, ClaimReply::Completed { fingerprint, response: kept });
}

/// Whatever this version did not write is refused, and left as it is.
#[test]
fn what_is_unreadable_is_never_absent() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let every_write = || {
        [
            Write::Renew { lock_ttl: LEASE, record_ttl: LIFE },
            Write::Complete { response: (*b"kept").into(), record_ttl: LIFE },
            Write::Fail { reason: Reason::Reset, failed_ttl: LIFE },
            Write::Release,
        ]
    };
    type Damage = fn(&Redis, &str);
    let damages: [(&str, Damage); 9] = [
        ("a string", |redis, key| drop(redis.command(&["SET", key, "1"]))),
        ("a list", |redis, key| drop(redis.command(&["RPUSH", key, "1"]))),
        ("a foreign hash", |redis, key| drop(redis.command(&["HSET", key, "state", "in_flight"]))),
        ("another format", |redis, key| {
            claimed(redis, key);
            redis.command(&["HSET", key, "v", "2"]);
        }),
        ("another state", |redis, key| {
            claimed(redis, key);
            redis.command(&["HSET", key, "state", "paused"]);
        }),
        ("no owner", |redis, key| {
            claimed(redis, key);
            redis.command(&["HDEL", key, "owner"]);
        }),
        ("no lease", |redis, key| {
            claimed(redis, key);
            redis.command(&["HDEL", key, "lease_until"]);
        }),
        ("no reason", |redis, key| {
            claimed(redis, key);
            redis.command(&["HSET", key, "state", "failed"]);
        }),
        ("no number", |redis, key| {
            claimed(redis, key);
            redis.command(&["HSET", key, "attempt", "first"]);
        }),
    ];
    for (what, damage) in damages {
        let holder = hold(1, 1);
        let key = name(&holder);
        redis.command(&["DEL", &key]);
        damage(&redis, &key);
        let before = dump(&redis, &key);
        for owner in [1, 2] {
            assert_eq!(worker.claim(claim(&hold(1, owner))), Err(StoreError::Unreadable), "{what}");
            for write in every_write() {
                assert_eq!(worker.write(&hold(1, owner), write), Err(StoreError::Unreadable), "{what}");
            }
        }
        assert_eq!(dump(&redis, &key), before, "{what}");
    }
}

fn claimed(redis: &Redis, key: &str) {
    let holder = hold(1, 1);
    assert_eq!(name(&holder), key);
    Worker::of(redis).claim(claim(&holder)).unwrap();
}

/// What a key holds; its end is not in it.
fn dump(redis: &Redis, key: &str) -> String {
    match redis.command(&["TYPE", key]).as_str() {
        "hash" => redis.command(&["HGETALL", key]),
        "list" => redis.command(&["LRANGE", key, "0", "-1"]),
        "string" => redis.command(&["GET", key]),
        other => other.to_owned(),
    }
}

#[test]
fn fingerprints_of_another_version_are_not_compared() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 1);
    worker.claim(claim(&holder)).unwrap();
    redis.command(&["HSET", &name(&holder), "fingerprint_version", "9"]);
    assert_eq!(worker.claim(claim(&hold(1, 2))), Err(StoreError::Unreadable));
    // The owner is the owner in any version, and a stale one is stale.
    assert_eq!(worker.write(&hold(1, 2), Write::Release), Ok(WriteReply::Stale));
    assert_eq!(worker.write(&holder, Write::Release), Ok(WriteReply::Applied));
    worker.run(complete(&holder, b"kept"));
    redis.command(&["HDEL", &name(&holder), "response"]);
    assert_eq!(worker.claim(claim(&hold(1, 2))), Err(StoreError::Unreadable));
}

#[test]
fn a_time_that_goes_back_makes_no_negative_time() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 1);
    worker.claim(claim(&holder)).unwrap();
    redis.command(&["HSET", &name(&holder), "created", "99999999999999"]);
    let reply = worker.claim(claim(&hold(1, 2))).unwrap();
    assert!(matches!(reply, ClaimReply::InFlight { elapsed: Duration::ZERO, .. }), "{reply:?}");
}

#[test]
fn an_attempt_does_not_wrap() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 1);
    worker.claim(claim(&holder)).unwrap();
    redis.command(&["HSET", &name(&holder), "attempt", &u32::MAX.to_string(), "lease_until", "1"]);
    for owner in [2, 2] {
        let reply = worker.claim(claim(&hold(1, owner)));
        assert_eq!(reply, Ok(ClaimReply::Claimed { attempt: u32::MAX }));
    }
}

// What the module's documentation tells an operator to allow is enough.
#[test]
fn the_documented_commands_are_all_an_acl_has_to_allow() {
    let redis = Redis::start();
    let user = "ACL SETUSER filter on nopass ~idem:* +eval +evalsha +time +hmget +hget +exists +hset +hdel +del \
                +pexpire +pttl";
    redis.command(&user.split_whitespace().collect::<Vec<_>>());
    let holder = hold(1, 1);
    let mut worker = Worker::of(&redis);
    let steps = [
        claim(&holder),
        claim(&hold(1, 2)),
        Operation::Write(holder, Write::Renew { lock_ttl: LEASE, record_ttl: LIFE }),
        complete(&holder, b"kept"),
        claim(&hold(1, 2)),
        Operation::Write(hold(2, 1), Write::Fail { reason: Reason::Reset, failed_ttl: LIFE }),
        claim(&hold(3, 1)),
        Operation::Write(hold(3, 1), Write::Release),
    ];
    for operation in steps {
        worker.submit(operation);
    }
    while let Some(dispatch) = worker.batcher.poll(worker.now) {
        let mut body = Vec::new();
        idempotency::store::redis::resp::encode_command(&mut body, &["AUTH", "filter", "any"]);
        body.extend(&dispatch.request.body);
        let reply = redis.call(&body);
        let reply = reply.strip_prefix(b"+OK\r\n").unwrap_or_else(|| panic!("{}", reply.escape_ascii()));
        worker.batcher.on_reply(dispatch.batch, Ok(reply), worker.now);
    }
    let answers = worker.answers();
    assert_eq!(answers.len(), 8);
    for (_, answer) in answers {
        assert!(
            matches!(answer, Answer::Claim(Ok(_)) | Answer::Write(Ok(WriteReply::Applied))),
            "{answer:?}"
        );
    }
}
