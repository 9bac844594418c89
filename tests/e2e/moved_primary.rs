//! A primary whose place another takes: Envoy follows it by a health check (Sentinel), or by a DNS name (managed endpoints).

use std::net::Ipv4Addr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
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

/// All servers are in Envoy's cluster, and the health check lets only the primary in.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_failover_is_followed() {
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
    let mut firsts = vec![works().await];
    for _ in 0..15 {
        firsts.push(pay(&envoy).await);
    }
    let again = |key: &str| Request::post("/pay").key(key).body("amount=1");
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
    // Every new key, too: none of them goes to a replica.
    for _ in 0..12 {
        firsts.push(pay(&envoy).await);
    }
    for (key, first) in &firsts {
        assert_eq!(first.status, 200, "{first:?}");
        let replay = poll_until(PATIENCE, "the store works for each key", async || {
            let answer = ask(&envoy, Protocol::Http2, &again(key)).await;
            (answer.status == 200).then_some(answer)
        })
        .await;
        assert_eq!((replay.is_replay(), &replay.body, origin.executions_of(key)), (true, &first.body, 1));
    }
    let runs = origin.requests().into_iter().filter(|seen| seen.complete).count();
    let keys: std::collections::BTreeSet<_> =
        origin.requests().into_iter().map(|seen| seen.key().map(<[u8]>::to_vec)).collect();
    assert_eq!(runs, keys.len(), "a key ran twice");
}

/// A DNS server with one answer to every question for an IPv4 address: 127.0.0.x.
struct Dns {
    port: u16,
    last: Arc<AtomicU8>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Dns {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Dns {
    async fn start() -> Dns {
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let (port, last) = (socket.local_addr().unwrap().port(), Arc::new(AtomicU8::new(1)));
        let says = Arc::clone(&last);
        let task = tokio::spawn(async move {
            let mut query = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut query).await {
                let _ = socket.send_to(&answer(&query[..length], says.load(Ordering::Relaxed)), from).await;
            }
        });
        Dns { port, last, task }
    }

    fn lead_to(&self, last: u8) {
        self.last.store(last, Ordering::Relaxed);
    }
}

/// RFC 1035 section 4: the question again, and one A record for it.
fn answer(query: &[u8], last: u8) -> Vec<u8> {
    let name = 12 + query[12..].iter().position(|byte| *byte == 0).unwrap() + 1;
    let question = &query[12..name + 4];
    let is_ipv4 = question[question.len() - 4..] == [0, 1, 0, 1];
    let mut answer = [&query[..2], &[0x81, 0x80, 0, 1, 0, u8::from(is_ipv4), 0, 0, 0, 0], question].concat();
    if is_ipv4 {
        answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4, 127, 0, 0, last]);
    }
    answer
}

/// What a managed Redis does: one name for the primary, which moves when the primary died, or became a replica.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_moves_to_the_new_primary_is_followed() {
    for dies in [false, true] {
        let mut old = Redis::start_with(&["--repl-diskless-sync-delay", "0"]).await;
        let of = format!("127.0.0.1 {}", old.addr().port());
        let new = Redis::start_with(&["--replicaof", &of]).await;
        poll_until(PATIENCE, "the replica is in sync", async || {
            new.command("INFO replication").await.contains("master_link_status:up").then_some(())
        })
        .await;
        // The same port at another address leads to the replica.
        let other =
            tokio::net::TcpListener::bind((Ipv4Addr::new(127, 0, 0, 2), old.addr().port())).await.unwrap();
        let replica = new.addr();
        let road = tokio::spawn(async move {
            while let Ok((mut client, _)) = other.accept().await {
                tokio::spawn(async move {
                    let Ok(mut server) = tokio::net::TcpStream::connect(replica).await else { return };
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                });
            }
        });
        let (dns, origin) = (Dns::start().await, Origin::start().await);
        let plugin = on_redis(plugin_with(json!({"lock_ttl": "5s"})), Pace::STEADY);
        let builder = Envoy::builder().workers(1).plugin(plugin).origin_addr(origin.addr());
        let patch = json!({
            "settings": {"op_timeout": Pace::STEADY.op_timeout()},
            "redis_cluster": {
                "type": "STRICT_DNS", "dns_lookup_family": "V4_ONLY", "dns_refresh_rate": "0.5s",
                "load_assignment": {"endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": {
                    "address": "redis.test", "port_value": old.addr().port()}}}}]}]},
                "typed_dns_resolver_config": {"name": "envoy.network.dns_resolver.cares", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                    "resolvers": [{"socket_address": {"address": "127.0.0.1", "port_value": dns.port}}],
                }},
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
        poll_until(PATIENCE, "the replica has it", async || {
            (new.command("DBSIZE").await == old.command("DBSIZE").await).then_some(())
        })
        .await;
        assert!(new.command("REPLICAOF NO ONE").await.starts_with("+OK"));
        if dies {
            old.kill();
        } else {
            let of = format!("REPLICAOF 127.0.0.1 {}", new.addr().port());
            assert!(old.command(&of).await.starts_with("+OK"));
        }
        let moved = Instant::now();
        let (refused, answer) = pay(&envoy).await;
        assert_eq!(answer.kind(), (503, Some("store-unavailable".to_owned())), "{dies}: {answer:?}");
        assert_eq!(origin.executions_of(&refused), 0);
        dns.lead_to(2);
        works().await;
        println!("dies: {dies}: the store works again after {:?}", moved.elapsed());
        let again = Request::post("/pay").key(&key).body("amount=1");
        let replay = ask(&envoy, Protocol::Http2, &again).await;
        assert_eq!((replay.is_replay(), replay.body, origin.executions_of(&key)), (true, first.body, 1));
        road.abort();
    }
}
