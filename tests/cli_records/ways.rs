//! The ways to Redis: a password, TLS, a cluster, and a Redis that does not answer.

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::command::{Config, run, run_with};
use crate::server::{LEASE, Redis, claim_of, eventually, free_port, hold, name};

#[test]
fn a_redis_that_is_gone_or_silent_is_no_answer() {
    let mut redis = Redis::start();
    let key = redis.failed(1);
    let url = redis.url();
    redis.pause();
    let began = Instant::now();
    let commands: [&[&str]; 3] =
        [&["list"], &["inspect", "--redis-key", &key], &["forget", "--yes", "--redis-key", &key]];
    for arguments in commands {
        let arguments = [arguments, &["--redis", &url, "--timeout", "200ms"]].concat();
        run(&arguments).expect(3, "no answer within 200ms");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    redis.kill();
    for arguments in commands {
        let arguments = [arguments, &["--redis", &url]].concat();
        run(&arguments).expect(3, &format!("Redis at 127.0.0.1:{}", redis.port));
    }
}

#[test]
fn redis_killed_before_the_write_is_no_success() {
    let mut redis = Redis::start();
    let key = redis.failed(1);
    let asking = crate::command::ask(&["forget", "--redis", &redis.url(), "--redis-key", &key]);
    redis.kill();
    asking.answer("yes").expect(3, "inspect the record again");
}

#[test]
fn a_password_comes_from_the_environment_or_a_file_and_is_never_printed() {
    let redis = Redis::start_with(&["--requirepass", "s3cret"]);
    let url = redis.url();
    let config = Config::payments(json!({}));
    let with = |password: Option<&str>, more: &[&str]| {
        let arguments = [&["list", "--redis", &url], more].concat();
        let ended = run_with(&arguments, b"", |command| {
            if let Some(password) = password {
                command.env("REDIS_PASSWORD", password);
            }
        });
        assert!(!format!("{ended:?}").contains("s3cret"), "{ended:?}");
        ended
    };
    with(None, &[]).expect(3, "REDIS_PASSWORD");
    with(Some("wrong"), &[]).expect(3, "refused");
    with(Some("s3cret"), &[]).expect(0, "0 of 0");
    let file = config.put("password", b"s3cret\n");
    with(Some("wrong"), &["--redis-password-file", &file]).expect(0, "0 of 0");
    let shown = run(&["list", "--redis", &format!("redis://:s3cret@127.0.0.1:{}", redis.port)]);
    assert!(!shown.err.contains("s3cret"));
    shown.expect(0, "everybody can read");
    for url in ["s3cret", "http://a:s3cret@b", "redis://:s3cret@127.0.0.1:x"] {
        let ended = run(&["list", "--redis", url]).expect(2, "--redis");
        assert!(!ended.err.contains("s3cret"), "{ended:?}");
    }
}

#[test]
fn tls_trusts_the_given_authority_alone() {
    let files = Config::payments(json!({}));
    let path = |name: &str| files.path(name).to_str().unwrap().to_owned();
    for name in ["redis", "stranger"] {
        let made = Command::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
            .args(["-days", "2", "-subj", &format!("/CN={name}"), "-addext", "subjectAltName=IP:127.0.0.1"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"])
            .args(["-keyout", &path(&format!("{name}.key")), "-out", &path(&format!("{name}.crt"))])
            .output()
            .expect("openssl is missing: `apt-get install openssl`");
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    }
    let (port, certificate, key) = (free_port().to_string(), path("redis.crt"), path("redis.key"));
    let tls = ["--tls-port", &port, "--tls-cert-file", &certificate, "--tls-key-file", &key];
    let redis = Redis::start_with(
        &[&tls[..], &["--tls-ca-cert-file", &certificate, "--tls-auth-clients", "yes"]].concat(),
    );
    let record = redis.failed(1);
    let url = format!("rediss://127.0.0.1:{port}");
    let own = ["--redis-client-cert", &certificate, "--redis-client-key", &key];
    let inspect = ["inspect", "--redis", &url, "--redis-key", &record, "--redis-ca"];
    run(&[&inspect[..], &[&certificate], &own[..]].concat()).expect(0, "failed (status)");
    run(&[&inspect[..], &[&path("stranger.crt")], &own[..]].concat()).expect(3, "certificate");
    run(&[&inspect[..], &[&certificate]].concat()).expect(3, "Redis at");
    run(&["list", "--redis", &redis.url(), "--redis-ca", &certificate]).expect(2, "rediss://");
    run(&[&inspect[..], &[&path("none.crt")]].concat()).expect(2, "none.crt");
}

const CLUSTER: [&str; 6] =
    ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"];

/// Three primaries and no replica.
fn cluster() -> Vec<Redis> {
    let nodes: Vec<Redis> = (0..3).map(|_| Redis::start_with(&CLUSTER)).collect();
    let ranges = [(0, 5460), (5461, 10922), (10923, 16383)];
    for (node, (first, last)) in nodes.iter().zip(ranges) {
        node.command(&["CLUSTER", "ADDSLOTSRANGE", &first.to_string(), &last.to_string()]);
        nodes[0].command(&["CLUSTER", "MEET", "127.0.0.1", &node.port.to_string()]);
    }
    for node in &nodes {
        eventually("the cluster is whole", || {
            let info = node.command(&["CLUSTER", "INFO"]);
            let is_whole = info.contains("cluster_state:ok") && info.contains("cluster_known_nodes:3");
            (is_whole && info.contains("cluster_slots_ok:16384")).then_some(())
        });
    }
    nodes
}

#[test]
fn every_primary_of_a_cluster_is_scanned_and_each_record_reached() {
    let nodes = cluster();
    let mut made = Vec::new();
    for number in 0..60 {
        let hold = hold(number, 1);
        let slot: u16 = nodes[0].command(&["CLUSTER", "KEYSLOT", &name(&hold)]).parse().unwrap();
        let node = &nodes[usize::from(slot > 5460) + usize::from(slot > 10922)];
        node.claim(&claim_of(&hold, LEASE)).unwrap();
        assert!(node.write(&hold, crate::server::failure()).is_ok());
        made.push((name(&hold), node));
    }
    assert!(nodes.iter().all(|node| made.iter().any(|(_, at)| at.port == node.port)), "all have some");
    let url = nodes[1].url();
    let list = || run(&["list", "--json", "--cluster", "--redis", &url]).expect(0, "").json();
    let found = list();
    let found: Vec<&Value> =
        found["records"].as_array().unwrap().iter().map(|record| &record["redis_key"]).collect();
    assert!(
        found.len() == made.len() && made.iter().all(|(key, _)| found.contains(&&json!(key))),
        "{found:?}"
    );
    for (key, node) in made.iter().take(12) {
        run(&["inspect", "--cluster", "--redis", &url, "--redis-key", key]).expect(0, "failed");
        run(&["resolve", "--release", "--yes", "--cluster", "--redis", &url, "--redis-key", key])
            .expect(0, "Released");
        assert_eq!(node.command(&["EXISTS", key]), "0");
    }
    assert_eq!(list()["scanned"], json!(made.len() - 12));

    // A part is never taken for the whole.
    run(&["list", "--redis", &url]).expect(2, "--cluster");
    let (elsewhere, _) = made.iter().skip(12).find(|(_, node)| node.port != nodes[1].port).unwrap();
    run(&["inspect", "--redis", &url, "--redis-key", elsewhere]).expect(3, "--cluster");
    run(&["list", "--cluster", "--redis", &format!("{url}/1")]).expect(2, "database");
    let alone = Redis::start();
    run(&["list", "--cluster", "--redis", &alone.url()]).expect(3, "cluster support disabled");
}

#[test]
fn a_cluster_with_a_primary_that_is_gone_is_no_list() {
    let mut nodes = cluster();
    let slot = |number: u64| -> u16 {
        nodes[0].command(&["CLUSTER", "KEYSLOT", &name(&hold(number, 1))]).parse().unwrap()
    };
    let (here, gone) =
        ((0..).find(|number| slot(*number) <= 5460), (0..).find(|number| slot(*number) > 10922));
    let (here, gone) = (nodes[0].failed(here.unwrap()), nodes[2].failed(gone.unwrap()));
    nodes[2].kill();
    let inspect = |key: &str| run(&["inspect", "--cluster", "--redis", &nodes[0].url(), "--redis-key", key]);
    inspect(&here).expect(0, "failed");
    inspect(&gone).expect(3, "Redis at");
    run(&["list", "--cluster", "--redis", &nodes[0].url()]).expect(3, "Redis at");
}
