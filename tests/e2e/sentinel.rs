//! Failover by Sentinel: Envoy's health check follows the primary, and a primary that lost its replicas takes no claim.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::*;

/// A `redis-server --sentinel`, killed when dropped.
struct Sentinel {
    process: Child,
    _directory: tempfile::TempDir,
}

impl Sentinel {
    fn start(primary: &Redis) -> Sentinel {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = tempfile::tempdir().unwrap();
        let settings = format!(
            "port {port}\nbind 127.0.0.1\nsentinel monitor idem 127.0.0.1 {} 1\n\
             sentinel down-after-milliseconds idem 500\nsentinel failover-timeout idem 4000\n\
             sentinel parallel-syncs idem 2\n",
            primary.addr().port()
        );
        std::fs::write(directory.path().join("sentinel.conf"), settings).unwrap();
        let process = Command::new("redis-server")
            .args(["sentinel.conf", "--sentinel"])
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is missing: `make setup-redis`, or `apt-get install redis-server`");
        Sentinel { process, _directory: directory }
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02x}")).collect()
}

/// The answer to a new key, and to the same again.
async fn pay(envoy: &Envoy) -> (String, Response) {
    let key = unique_key();
    let answer = ask(envoy, Protocol::Http1, &Request::post("/pay").key(&key).body("amount=1")).await;
    (key, answer)
}

/// Both servers are in Envoy's cluster, and the health check lets only the primary in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_failover_is_followed_and_the_old_primary_takes_nothing() {
    // A primary without replicas refuses writes, from the moment it is back.
    let own =
        ["--min-replicas-to-write", "1", "--min-replicas-max-lag", "2", "--repl-diskless-sync-delay", "0"];
    let mut old = Redis::start_with(&own).await;
    let of = format!("127.0.0.1 {}", old.addr().port());
    let replica = async || Redis::start_with(&[&own[..], &["--replicaof", &of]].concat()).await;
    let (one, two) = tokio::join!(replica(), replica());
    poll_until(PATIENCE, "the primary has its replicas", async || {
        old.command("INFO replication").await.contains("min_slaves_good_slaves:2").then_some(())
    })
    .await;
    let _sentinel = Sentinel::start(&old);
    let origin = Origin::start().await;
    let mut plugin = on_redis(plugin_with(json!({"lock_ttl": "5s"})), Pace::STEADY);
    plugin["store"]["redis"]["near_cache"] = json!(false);
    let builder = Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr());
    let endpoint = |redis: &Redis| json!({"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": redis.addr().port()}}}});
    let patch = json!({
        "settings": {"op_timeout": Pace::STEADY.op_timeout()},
        "redis_cluster": {
            // No host at all is better than a wrong one.
            "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
            "load_assignment": {"endpoints": [{"lb_endpoints": [endpoint(&old), endpoint(&one), endpoint(&two)]}]},
            "health_checks": [{
                "timeout": "1s", "interval": "0.25s", "no_traffic_interval": "0.25s",
                "unhealthy_threshold": 1, "healthy_threshold": 1,
                "tcp_health_check": {"send": {"text": hex("ROLE\r\n")}, "receive": [{"text": hex("$6\r\nmaster")}]},
            }],
        },
    });
    let envoy = with_link(builder, old.addr(), &patch).start().await;
    let works = async || {
        poll_until(PATIENCE, "the store works", async || {
            let (key, answer) = pay(&envoy).await;
            (answer.status == 200).then_some((key, answer))
        })
        .await
    };
    let (key, first) = works().await;
    let again = Request::post("/pay").key(&key).body("amount=1");
    poll_until(PATIENCE, "the replicas have it", async || {
        let sizes = [one.command("DBSIZE").await, two.command("DBSIZE").await, old.command("DBSIZE").await];
        (sizes[0] == sizes[2] && sizes[1] == sizes[2]).then_some(())
    })
    .await;
    old.kill();
    let killed = Instant::now();
    works().await;
    println!("the store works again {:?} after its primary was killed", killed.elapsed());
    assert!(killed.elapsed() < Duration::from_secs(15), "{:?}", killed.elapsed());
    // It comes back empty, and for a while it calls itself the primary.
    old.restart().await;
    let mut masters = 0;
    poll_until(PATIENCE, "Sentinel makes it a replica", async || {
        let calls_itself_primary = old.command("ROLE").await.contains("master");
        masters += usize::from(calls_itself_primary);
        let replay = ask(&envoy, Protocol::Http1, &again).await;
        let refused = (503, Some("store-unavailable".to_owned()));
        assert!(replay.is_replay() && replay.body == first.body || replay.kind() == refused, "{replay:?}");
        (!calls_itself_primary && old.command("DBSIZE").await != ":0\r\n+OK\r\n").then_some(())
    })
    .await;
    assert!(masters > 0, "it never called itself the primary");
    let (replay, _) = ask_until_decided(&envoy, Protocol::Http2, &again).await;
    assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
    let runs = origin.requests().into_iter().filter(|seen| seen.complete).count();
    let keys: std::collections::BTreeSet<_> =
        origin.requests().into_iter().map(|seen| seen.key().map(<[u8]>::to_vec)).collect();
    assert_eq!(runs, keys.len(), "a key ran twice");
}
