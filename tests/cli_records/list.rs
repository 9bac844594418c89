//! Records found by scanning.

use serde_json::{Value, json};

use crate::command::{Config, Ended, run, run_watched, run_with};
use crate::server::{Redis, hold, name};

fn list(redis: &Redis, more: &[&str]) -> Ended {
    let url = redis.url();
    run(&[&["list", "--redis", &url, "--json"], more].concat()).expect(0, "")
}

fn keys(ended: &Ended) -> Vec<String> {
    let json = ended.json();
    let records = json["records"].as_array().unwrap();
    records.iter().map(|record| record["redis_key"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn each_state_is_found_and_nothing_else() {
    let redis = Redis::start();
    let by_state = [
        ("in-flight", redis.in_flight(1)),
        ("abandoned", redis.abandoned(2)),
        ("failed", redis.failed(3)),
        ("completed", redis.completed(4, b"paid")),
        ("unreadable", name(&hold(5, 1))),
    ];
    redis.command(&["HSET", &by_state[4].1, "v", "9"]);
    for foreign in ["idem:", "idem:short", "other:1", &format!("idem:{}", "G".repeat(64))] {
        redis.command(&["SET", foreign, "1"]);
    }
    for (state, key) in &by_state {
        assert_eq!(keys(&list(&redis, &["--state", state])), [key.as_str()], "{state}");
    }
    let two = list(&redis, &["--state", "failed,abandoned"]);
    assert_eq!(keys(&two), [by_state[1].1.as_str(), by_state[2].1.as_str()], "oldest first");
    let all = list(&redis, &[]).json();
    assert_eq!(
        (&all["scanned"], &all["unreadable"], &all["limit_reached"]),
        (&json!(5), &json!(1), &json!(false))
    );
    assert_eq!(all["records"].as_array().unwrap().len(), 5);
    assert!(!all.to_string().contains("paid"));

    let text = run(&["list", "--redis", &redis.url(), "--state", "failed"]).expect(0, "failed (status)");
    assert!(text.err.contains("1 of 5 records") && text.err.contains("1 unreadable"), "{text:?}");
    assert!(!text.out.contains('\x1b'), "no colour in a pipe: {text:?}");
}

#[test]
fn age_limit_and_prefix_narrow_it() {
    let redis = Redis::start();
    let old = redis.failed(1);
    redis.command(&["HSET", &old, "created", "1000"]);
    let young = redis.failed(2);
    assert_eq!(keys(&list(&redis, &["--older-than", "1h"])), [old.as_str()]);
    assert_eq!(keys(&list(&redis, &["--key-prefix", &young[..21]])), [young.as_str()]);
    let limited = list(&redis, &["--limit", "1"]);
    assert_eq!((keys(&limited).len(), &limited.json()["limit_reached"]), (1, &json!(true)));
    // A prefix is text, not a pattern.
    let hash = "ab".repeat(32);
    redis.command(&["RENAME", &old, &format!("a*[b]?:{hash}")]);
    redis.command(&["RENAME", &young, &format!("aXbY:{hash}")]);
    let config = json!({"store": {"redis": {"cluster": "c", "key_prefix": "a*[b]?:"}}, "rules": [{"name": "r",
        "match": {"methods": ["POST"], "path": {"prefix": "/"}}, "scope": "shared"}]});
    let config = Config::whole(config);
    assert_eq!(keys(&list(&redis, &["--config", &config.file()])), [format!("a*[b]?:{hash}")]);
    run(&["list", "--redis", &redis.url(), "--older-than", "soon"]).expect(2, "such as 60s");
}

#[test]
fn a_user_of_an_acl_needs_the_rights_that_are_documented_and_no_more() {
    let redis = Redis::start();
    let key = redis.failed(1);
    let rights = "+scan +dbsize +hmget +hexists +pttl +time";
    let argv: Vec<&str> = ["ACL", "SETUSER", "reader", "on", ">pass", "resetkeys", "~idem:*", "-@all"]
        .into_iter()
        .chain(rights.split(' '))
        .collect();
    redis.command(&argv);
    let url = redis.url();
    let as_reader = |arguments: &[&str]| {
        let arguments = [arguments, &["--redis", &url, "--redis-user", "reader"]].concat();
        run_with(&arguments, b"", |command| {
            command.env("REDIS_PASSWORD", "pass");
        })
    };
    let found = as_reader(&["list", "--json"]).expect(0, "");
    assert_eq!(keys(&found), [key.as_str()]);
    as_reader(&["inspect", "--redis-key", &key]).expect(0, "failed");
    let before = redis.record(&key);
    as_reader(&["forget", "--yes", "--redis-key", &key]).expect(3, "may not do this");
    assert_eq!(redis.record(&key), before);

    // With these rights more, the same user may change records.
    let rights = ["+eval", "+hset", "+hdel", "+del", "+exists", "+pexpire"];
    redis.command(&[&["ACL", "SETUSER", "reader"], &rights[..]].concat());
    let config = Config::payments(json!({}));
    let file = config.file();
    let place = ["--yes", "--config", &file, "--redis-key", &key];
    as_reader(&[&["resolve", "--status", "201"], &place[..]].concat()).expect(0, "Resolved");
    as_reader(&[&["forget"], &place[..]].concat()).expect(0, "Removed");
}

const MANY: usize = 100_000;

#[test]
fn a_hundred_thousand_records_are_scanned_in_small_steps() {
    let redis = Redis::start();
    let template = redis.failed(0);
    let fill = "for i = 1, tonumber(ARGV[1]) do
        local key = string.format('idem:%064x', i)
        redis.call('HSET', key, unpack(redis.call('HGETALL', KEYS[1])))
        if i % 1000 ~= 0 then redis.call('HSET', key, 'state', 'completed', 'response', 'r') end
    end";
    redis.command(&["EVAL", fill, "1", &template, &MANY.to_string()]);
    redis.command(&["CONFIG", "RESETSTAT"]);
    let found = list(&redis, &["--state", "failed"]);
    assert_eq!(found.json()["scanned"], json!(MANY + 1));
    assert_eq!(keys(&found).len(), MANY / 1000 + 1);
    let stats = redis.command(&["INFO", "commandstats"]);
    let used: Vec<&str> = stats.lines().filter_map(|line| line.strip_prefix("cmdstat_")).collect();
    let scan = used.iter().find(|line| line.starts_with("scan:")).expect("SCAN");
    let number = |name: &str| -> f64 {
        scan.split([':', ',']).find_map(|part| part.strip_prefix(name)).unwrap().parse().unwrap()
    };
    // Each step is short on the average: nobody else waits for longer than that.
    assert!(number("calls=") >= 200.0 && number("usec_per_call=") < 5_000.0, "{scan}");
    let read_only =
        ["scan", "dbsize", "hmget", "hexists", "pttl", "time", "info", "quit", "config|resetstat", "ping"];
    for line in used {
        let name = line.split(':').next().unwrap();
        assert!(read_only.contains(&name), "{name}");
    }
    // Whoever watches sees how far it is, and a pipe stays a pipe.
    let watched = run_watched(&["list", "--redis", &redis.url(), "--state", "failed"])
        .expect(0, "of about 100001 keys");
    assert_eq!(watched.out.lines().count(), 1 + MANY / 1000 + 1);
    assert!(!found.err.contains('\r'), "{}", found.err);
}

#[test]
fn an_empty_store_is_an_empty_list() {
    let redis = Redis::start();
    assert_eq!(list(&redis, &[]).json()["records"], Value::Array(Vec::new()));
    let text = run(&["list", "--redis", &redis.url()]).expect(0, "0 of 0 records");
    assert_eq!(text.out, "");
}
