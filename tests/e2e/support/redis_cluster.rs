//! A real Redis Cluster of a test's own: three primaries, a replica of each, and the link that knows them all.

use std::net::{SocketAddr, TcpListener};

use serde_json::{Value, json};

use super::deployment::Pace;
use super::envoy::Builder;
use super::wait::{PATIENCE, poll_until};
use super::{Redis, all_at_once, with_changed_link};

pub const SHARDS: usize = 3;
pub const SLOTS: usize = 16_384;

/// `nodes[0..3]` begin as primaries, `nodes[3..6]` as their replicas.
pub struct RedisCluster {
    pub nodes: Vec<Redis>,
    ids: Vec<String>,
}

impl RedisCluster {
    /// `arguments` are those of each `redis-server`.
    pub async fn start(arguments: &[&str]) -> RedisCluster {
        let ports: Vec<u16> = bus_ports(2 * SHARDS);
        let nodes = all_at_once(ports.iter().map(async |bus| {
            // A dead shard refuses its own keys only; a failover is decided within two seconds.
            let bus = bus.to_string();
            let own = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                &bus,
                "--cluster-node-timeout",
                "1000",
                "--cluster-require-full-coverage",
                "no",
                "--cluster-replica-validity-factor",
                "0",
                "--cluster-allow-replica-migration",
                "no",
                "--repl-diskless-sync-delay",
                "0",
            ];
            Redis::start_with(&[&own[..], arguments].concat()).await
        }))
        .await;
        let mut ids = Vec::new();
        for (at, node) in nodes.iter().enumerate() {
            ids.push(bulk(&node.command("CLUSTER MYID").await));
            ok(node, &format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1)).await;
            if at < SHARDS {
                let (first, after) = (at * SLOTS / SHARDS, (at + 1) * SLOTS / SHARDS);
                ok(node, &format!("CLUSTER ADDSLOTSRANGE {first} {}", after - 1)).await;
            }
            if at > 0 {
                let meet = format!("CLUSTER MEET 127.0.0.1 {} {}", node.addr().port(), ports[at]);
                ok(&nodes[0], &meet).await;
            }
        }
        let cluster = RedisCluster { nodes, ids };
        for node in &cluster.nodes {
            poll_until(PATIENCE, "every node knows every node and slot", async || {
                let info = node.command("CLUSTER INFO").await;
                let whole = ["cluster_state:ok", "cluster_slots_assigned:16384", "cluster_known_nodes:6"];
                whole.iter().all(|line| info.contains(line)).then_some(())
            })
            .await;
        }
        for shard in 0..SHARDS {
            ok(&cluster.nodes[SHARDS + shard], &format!("CLUSTER REPLICATE {}", cluster.ids[shard])).await;
        }
        cluster.wait_replicas().await;
        cluster
    }

    /// Every replica is in sync, and every node knows it.
    pub async fn wait_replicas(&self) {
        for replica in &self.nodes {
            if replica.command("ROLE").await.contains("master") {
                continue;
            }
            poll_until(PATIENCE, "the replica is in sync", async || {
                replica.command("INFO replication").await.contains("master_link_status:up").then_some(())
            })
            .await;
        }
        for node in &self.nodes {
            poll_until(PATIENCE, "every node knows the replicas", async || {
                let replicas = node.command("CLUSTER NODES").await.matches(" slave ").count();
                let replicas = replicas + node.command("CLUSTER NODES").await.matches(",slave ").count();
                (replicas == SHARDS).then_some(())
            })
            .await;
        }
    }

    pub fn addrs(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(Redis::addr).collect()
    }

    /// The node that serves a slot, as another one sees it.
    pub async fn owner_of(&self, slot: usize) -> usize {
        poll_until(PATIENCE, "somebody serves the slot", async || {
            for (at, node) in self.nodes.iter().enumerate() {
                if !node.answers().await {
                    continue;
                }
                // A primary serves the slots that it calls its own.
                let nodes = node.command("CLUSTER NODES").await;
                let own = nodes.lines().find(|line| line.contains("myself,master"));
                if own.is_some_and(|line| {
                    ranges(line).iter().any(|(first, last)| (*first..=*last).contains(&slot))
                }) {
                    return Some(at);
                }
            }
            None
        })
        .await
    }

    /// How many keys each node has.
    pub async fn keys(&self) -> Vec<usize> {
        let mut keys = Vec::new();
        for node in &self.nodes {
            let size = node.command("DBSIZE").await;
            keys.push(size.lines().next().unwrap_or_default()[1..].trim().parse().unwrap());
        }
        keys
    }

    /// Begins to move a slot: what is asked of `from` and not there is answered ASK, and of `to` without ASKING, MOVED.
    pub async fn begin_move(&self, slot: usize, from: usize, to: usize) {
        ok(&self.nodes[to], &format!("CLUSTER SETSLOT {slot} IMPORTING {}", self.ids[from])).await;
        ok(&self.nodes[from], &format!("CLUSTER SETSLOT {slot} MIGRATING {}", self.ids[to])).await;
    }

    /// Moves the keys of a slot, and ends its move.
    pub async fn end_move(&self, slot: usize, from: usize, to: usize) {
        let port = self.nodes[to].addr().port();
        loop {
            let reply = self.nodes[from].command(&format!("CLUSTER GETKEYSINSLOT {slot} 100")).await;
            let keys: Vec<&str> = reply.lines().filter(|line| line.starts_with("idem:")).collect();
            if keys.is_empty() {
                break;
            }
            let moved = self.nodes[from]
                .command(&format!("MIGRATE 127.0.0.1 {port} \"\" 0 5000 KEYS {}", keys.join(" ")))
                .await;
            assert!(moved.starts_with("+OK") || moved.starts_with("+NOKEY"), "{moved}");
        }
        for node in [to, from] {
            ok(&self.nodes[node], &format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to])).await;
        }
    }
}

/// The slot of a key without a hash tag.
pub fn slot_of(key: &[u8]) -> usize {
    let crc = key.iter().fold(0_u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(*byte) << 8, |crc, _| crc << 1 ^ if crc >> 15 == 1 { 0x1021 } else { 0 })
    });
    usize::from(crc) % SLOTS
}

/// The link to a cluster, of which Envoy is told these nodes; the patch of `envoy/redis-cluster.yaml` to the link.
pub fn linked_to_cluster(builder: Builder, nodes: &[SocketAddr], pace: Pace) -> Builder {
    let endpoint = |node: &SocketAddr| {
        json!({"endpoint": {"address": {"socket_address": {
            "address": node.ip().to_string(), "port_value": node.port()}}}})
    };
    let endpoints: Vec<Value> = nodes.iter().map(endpoint).collect();
    with_changed_link(builder, nodes[0], |name, part| match name {
        "proxy" => {
            let settings = &mut part["filter_chains"][0]["filters"][0]["typed_config"]["settings"];
            settings["op_timeout"] = json!(pace.op_timeout());
            settings["dns_cache_config"] = json!({"name": "redis", "dns_lookup_family": "V4_PREFERRED"});
        }
        "redis_cluster" => {
            part["lb_policy"] = json!("CLUSTER_PROVIDED");
            part["dns_lookup_family"] = json!("V4_PREFERRED");
            part["cluster_type"] = json!({"name": "envoy.clusters.redis", "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.clusters.redis.v3.RedisClusterConfig",
                "cluster_refresh_rate": "5s",
                "cluster_refresh_timeout": "1s",
                "redirect_refresh_interval": "0.5s",
                "redirect_refresh_threshold": 1,
                "failure_refresh_threshold": 1,
                "host_degraded_refresh_threshold": 1,
            }});
            part["load_assignment"]["endpoints"] = json!([{"lb_endpoints": endpoints}]);
        }
        _ => {}
    })
}

async fn ok(node: &Redis, command: &str) {
    let reply = node.command(command).await;
    assert!(reply.starts_with("+OK"), "{command}: {reply}");
}

fn bulk(reply: &str) -> String {
    reply.lines().nth(1).expect("a bulk string").to_owned()
}

/// The slots at the end of a line of CLUSTER NODES, but for those that move.
fn ranges(line: &str) -> Vec<(usize, usize)> {
    let words = line.split_whitespace().skip(8).filter(|word| !word.starts_with('['));
    words
        .map(|word| {
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            (first.parse().unwrap(), last.parse().unwrap())
        })
        .collect()
}

fn bus_ports(count: usize) -> Vec<u16> {
    let listeners: Vec<_> = (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| listener.local_addr().unwrap().port()).collect()
}
