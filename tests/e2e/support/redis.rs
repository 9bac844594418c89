//! A real Redis of a test's own, and the link through which a filter reaches it.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::envoy::{Builder, FilterSpec};
use super::wait::{PATIENCE, poll_until};

/// A `redis-server`, killed when dropped.
pub struct Redis {
    process: Child,
    arguments: Vec<String>,
    directory: TempDir,
    port: u16,
}

impl Redis {
    pub async fn start() -> Redis {
        Redis::start_with(&[]).await
    }

    /// `arguments` are those of `redis-server`.
    pub async fn start_with(arguments: &[&str]) -> Redis {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let directory = tempfile::tempdir().unwrap();
        let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let process = spawn(&directory, port, &arguments);
        let redis = Redis { process, arguments, directory, port };
        redis.wait_ready().await;
        redis
    }

    pub fn addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    async fn wait_ready(&self) {
        poll_until(PATIENCE, "redis-server listens", async || {
            TcpStream::connect(self.addr()).await.ok().map(drop)
        })
        .await;
        // It listens before it has read its append-only file.
        poll_until(PATIENCE, "redis-server has loaded its data", async || {
            (!self.command("PING").await.starts_with("-LOADING")).then_some(())
        })
        .await;
    }

    /// One inline command; the raw reply.
    pub async fn command(&self, line: &str) -> String {
        let mut stream = TcpStream::connect(self.addr()).await.unwrap();
        stream.write_all(format!("{line}\r\nQUIT\r\n").as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut reply)).await.unwrap().unwrap();
        String::from_utf8_lossy(&reply).into_owned()
    }

    /// Whether it runs and is not paused.
    pub async fn answers(&self) -> bool {
        let ping = async {
            let mut stream = TcpStream::connect(self.addr()).await.ok()?;
            stream.write_all(b"PING\r\n").await.ok()?;
            stream.read_u8().await.ok()
        };
        tokio::time::timeout(Duration::from_millis(500), ping).await.is_ok_and(|answer| answer.is_some())
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Starts again on the same port: empty, unless its arguments make it keep its data.
    pub async fn restart(&mut self) {
        self.kill();
        self.process = spawn(&self.directory, self.port, &self.arguments);
        self.wait_ready().await;
    }

    /// SIGSTOP: connections stay, nothing is answered.
    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.process.id().cast_signed(), signal) }, 0);
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.resume_quietly();
        self.kill();
    }
}

impl Redis {
    fn resume_quietly(&self) {
        // SAFETY: as above; a process that has ended is no reason to fail.
        unsafe { libc::kill(self.process.id().cast_signed(), libc::SIGCONT) };
    }
}

fn spawn(directory: &TempDir, port: u16, arguments: &[String]) -> Child {
    Command::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--databases", "4"])
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("redis-server is missing: `make setup-redis`, or `apt-get install redis-server`")
}

/// Adds the link to an Envoy: an internal listener with two holds, `redis_proxy` on an abstract socket, three clusters.
/// `patch` changes parts of it by name: `link`, `proxy`, `link_cluster`, `proxy_cluster`, `redis_cluster`; and
/// `settings`, those of `redis_proxy`.
pub fn with_link(builder: Builder, redis: SocketAddr, patch: &Value) -> Builder {
    with_changed_link(builder, redis, |name, part| {
        if let Some(change) = patch.get(name) {
            super::deep_merge(part, change);
        }
        if let ("proxy", Some(settings)) = (name, patch.get("settings")) {
            super::deep_merge(
                &mut part["filter_chains"][0]["filters"][0]["typed_config"]["settings"],
                settings,
            );
        }
    })
}

/// The same; `change` may do anything to each part, inside its arrays too.
pub fn with_changed_link(
    mut builder: Builder,
    redis: SocketAddr,
    change: impl Fn(&str, &mut Value),
) -> Builder {
    let socket = format!("@idempotency-test-{}", super::unique_key());
    for (name, mut part) in link_parts(redis, &socket) {
        change(name, &mut part);
        builder = match name {
            "link" | "proxy" => builder.extra_listener(part),
            _ => builder.extra_cluster(part),
        };
    }
    builder.internal_listeners()
}

/// The link on a port, so that a test can send through it what the filter would.
pub fn link_on_port(port: u16) -> Value {
    let mut parts = link_parts(SocketAddr::from(([127, 0, 0, 1], 1)), "");
    let (_, mut listener) = parts.swap_remove(0);
    listener.as_object_mut().unwrap().remove("internal_listener");
    super::deep_merge(
        &mut listener,
        &json!({"name": "link_on_port", "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}),
    );
    listener
}

fn link_parts(redis: SocketAddr, socket: &str) -> Vec<(&'static str, Value)> {
    let hold = || FilterSpec::new("request_end_hold", json!({"role": "request_end_hold"})).to_json();
    let endpoint = |address: Value| json!([{"lb_endpoints": [{"endpoint": {"address": address}}]}]);
    let http = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
    vec![
        (
            "link",
            json!({
                "name": "redis_link",
                "internal_listener": {},
                "filter_chains": [{"filters": [{"name": "hcm", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
                    "stat_prefix": "redis_link",
                    "route_config": {"virtual_hosts": [{"name": "redis", "domains": ["*"], "routes": [{
                        "match": {"prefix": "/"},
                        "route": {
                            "cluster": "redis-proxy",
                            "upgrade_configs": [{"upgrade_type": "CONNECT", "connect_config": {"allow_post": true}}],
                        },
                    }]}]},
                    "http_filters": [hold(), hold(), {"name": "router", "typed_config": {
                        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}],
                }}]}],
            }),
        ),
        (
            "proxy",
            json!({
                "name": "redis_proxy",
                "address": {"pipe": {"path": socket}},
                "filter_chains": [{"filters": [{"name": "envoy.filters.network.redis_proxy", "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy",
                    "stat_prefix": "redis",
                    "settings": {"op_timeout": "0.1s", "enable_redirection": true},
                    "prefix_routes": {"catch_all_route": {"cluster": "redis"}},
                }}]}],
            }),
        ),
        (
            "link_cluster",
            json!({
                "name": "redis-link",
                "load_assignment": {"cluster_name": "redis-link", "endpoints":
                    endpoint(json!({"envoy_internal_address": {"server_listener_name": "redis_link"}}))},
            }),
        ),
        (
            "proxy_cluster",
            json!({
                "name": "redis-proxy",
                "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                    "@type": http,
                    "common_http_protocol_options": {"max_requests_per_connection": 1},
                    "explicit_http_config": {"http_protocol_options": {}},
                }},
                "load_assignment": {"cluster_name": "redis-proxy", "endpoints": endpoint(json!({"pipe": {"path": socket}}))},
            }),
        ),
        (
            "redis_cluster",
            json!({
                "name": "redis",
                "connect_timeout": "1s",
                "load_assignment": {"cluster_name": "redis", "endpoints": endpoint(json!({"socket_address": {
                    "address": redis.ip().to_string(), "port_value": redis.port()}}))},
            }),
        ),
    ]
}
