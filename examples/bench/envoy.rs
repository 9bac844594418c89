//! One Envoy, one listener per variant, and a Redis of its own.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::Fallible;
use crate::upstream::ANSWER;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// Envoy without the filter.
    Plain,
    /// The filter, on a route that no rule covers.
    Uncovered,
    /// First executions on the embedded store.
    First,
    /// The same, detached.
    Detached,
    /// Replays from the embedded store.
    Replay,
    /// Envoy's own `direct_response` of the same bytes.
    Direct,
    /// First executions on Redis.
    RedisFirst,
    /// The same, detached.
    RedisDetached,
    /// Replays from Redis, without the near cache.
    RedisReplay,
    /// Replays from the near cache.
    NearReplay,
}

impl Variant {
    /// All, in the order of the table.
    pub const ALL: [Self; 10] = [
        Self::Plain,
        Self::Uncovered,
        Self::First,
        Self::Detached,
        Self::RedisFirst,
        Self::RedisDetached,
        Self::Direct,
        Self::Replay,
        Self::NearReplay,
        Self::RedisReplay,
    ];

    /// Its name in the results.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Uncovered => "uncovered",
            Self::First => "first",
            Self::Detached => "first_detached",
            Self::Replay => "replay",
            Self::Direct => "direct_response",
            Self::RedisFirst => "redis_first",
            Self::RedisDetached => "redis_first_detached",
            Self::RedisReplay => "redis_replay",
            Self::NearReplay => "near_replay",
        }
    }

    /// What its throughput is a share of.
    pub const fn against(self) -> Self {
        match self {
            Self::Plain | Self::Uncovered | Self::First | Self::RedisFirst => Self::Plain,
            Self::Detached => Self::First,
            Self::RedisDetached => Self::RedisFirst,
            Self::Direct | Self::Replay | Self::NearReplay | Self::RedisReplay => Self::Direct,
        }
    }

    /// Every request has a key of its own.
    pub const fn new_keys(self) -> bool {
        !matches!(self, Self::Replay | Self::NearReplay | Self::RedisReplay)
    }

    fn plugin(self) -> Option<Value> {
        let store = match self {
            Self::Plain | Self::Direct => return None,
            Self::Uncovered | Self::First | Self::Detached | Self::Replay => {
                // Room for all that is written within a record's life.
                json!({"shared_data": {"max_records": 1_048_576, "max_bytes": 1_073_741_824}})
            }
            Self::RedisFirst | Self::RedisDetached | Self::NearReplay => redis("bench:", json!({})),
            Self::RedisReplay => redis("bench-far:", json!(false)),
        };
        let detached = matches!(self, Self::Detached | Self::RedisDetached);
        let path = if self == Self::Uncovered { "/covered" } else { "/" };
        let mut rule = json!({
            "name": "bench", "match": {"path": {"prefix": path}}, "scope": [{"header": "x-account-id"}],
            "lock_ttl": "10s", "record_ttl": if self.new_keys() { "20s" } else { "1h" },
        });
        let mut plugin = json!({"store": store});
        if detached {
            rule["execution"] = json!("detached");
            rule["execute_timeout"] = json!("20s");
            plugin["execute_cluster"] = json!("idempotency-execute");
        }
        plugin["rules"] = json!([rule]);
        Some(plugin)
    }
}

fn redis(prefix: &str, near_cache: Value) -> Value {
    json!({"redis": {
        "cluster": "redis-link", "timeout": "2s", "key_prefix": prefix, "near_cache": near_cache}})
}

/// The running processes.
pub struct Envoy {
    envoy: Child,
    redis: Child,
    admin: SocketAddr,
    _directory: TempDir,
}

impl Envoy {
    /// Starts Redis and Envoy, and waits until both serve.
    pub fn start(
        root: &Path,
        binary: &Path,
        redis: &Path,
        workers: u32,
        upstream: SocketAddr,
    ) -> Fallible<Self> {
        let module = root.join("dist/idempotency.wasm");
        let directory = tempfile::Builder::new().prefix("idempotency-bench-").tempdir()?;
        let redis_port = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let redis = Command::new(redis)
            .args(["--port", &redis_port.port().to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "no"])
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let configuration = directory.path().join("envoy.json");
        fs::write(&configuration, bootstrap(&module, upstream, redis_port, directory.path()).to_string())?;
        let log = File::create(directory.path().join("log"))?;
        let admin_file = directory.path().join("admin");
        let envoy = Command::new(binary)
            .arg("-c")
            .arg(&configuration)
            .args(["--concurrency", &workers.to_string(), "--disable-hot-restart", "--log-level", "warning"])
            .arg("--admin-address-path")
            .arg(&admin_file)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        let admin = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut envoy = Self { envoy, redis, admin, _directory: directory };
        let end = Instant::now() + Duration::from_secs(60);
        while Instant::now() < end {
            if let Some(status) = envoy.envoy.try_wait()? {
                let log = fs::read_to_string(envoy._directory.path().join("log"))?;
                return Err(format!("Envoy did not start ({status}):\n{log}").into());
            }
            let address = fs::read_to_string(&admin_file).ok().and_then(|text| text.trim().parse().ok());
            if let Some(address) = address {
                envoy.admin = address;
                let ready = envoy.get("/ready").is_ok_and(|answer| answer.contains("LIVE"));
                if ready && TcpStream::connect(redis_port).is_ok() {
                    return Ok(envoy);
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Err("Envoy was not ready in time".into())
    }

    /// Where a variant listens.
    pub fn port(&self, variant: Variant) -> Fallible<u16> {
        let listeners = self.get("/listeners")?;
        let wanted = format!("{}::", variant.name());
        let line = listeners.lines().find_map(|line| line.strip_prefix(&wanted));
        let port = line.and_then(|line| line.rsplit(':').next()).and_then(|port| port.parse().ok());
        port.ok_or_else(|| format!("no listener {} in:\n{listeners}", variant.name()).into())
    }

    fn get(&self, path: &str) -> Fallible<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(self.admin)?;
        stream.write_all(
            format!("GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n").as_bytes(),
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer.replace("\r\n", "\n"))
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        for child in [&mut self.envoy, &mut self.redis] {
            // They are ended by the processes that were started here; one that is gone already is fine.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const HCM: &str =
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const HTTP: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

fn bootstrap(module: &Path, upstream: SocketAddr, redis: SocketAddr, directory: &Path) -> Value {
    let socket = directory.join("redis.sock");
    let mut listeners: Vec<Value> = Variant::ALL.iter().map(|variant| listener(*variant, module)).collect();
    let hold = || wasm("request_end_hold", module, &json!({"role": "request_end_hold"}));
    listeners.push(internal(
        "redis_link",
        json!([hold(), hold(), router()]),
        json!({"cluster": "redis-proxy", "upgrade_configs": [
            {"upgrade_type": "CONNECT", "connect_config": {"allow_post": true}}]}),
    ));
    listeners.push(internal(
        "idempotency_execute",
        json!([report(), router()]),
        json!({"cluster": "upstream"}),
    ));
    listeners.push(json!({
        "name": "redis_proxy",
        "address": {"pipe": {"path": socket}},
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.redis_proxy", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy",
            "stat_prefix": "redis",
            "settings": {"op_timeout": "0.5s"},
            "prefix_routes": {"catch_all_route": {"cluster": "redis"}},
        }}]}],
    }));
    let address = |address: SocketAddr| json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}});
    let to = |name: &str| json!({"envoy_internal_address": {"server_listener_name": name}});
    let pipe = json!({"pipe": {"path": socket}});
    json!({
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "bootstrap_extensions": [{"name": "envoy.bootstrap.internal_listener", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"}}],
        "static_resources": {
            "listeners": listeners,
            "clusters": [
                cluster("upstream", &address(upstream), json!({})),
                cluster("redis", &address(redis), json!({})),
                cluster("redis-link", &to("redis_link"), json!({})),
                cluster("redis-proxy", &pipe, json!({"@type": HTTP,
                    "common_http_protocol_options": {"max_requests_per_connection": 1},
                    "explicit_http_config": {"http_protocol_options": {}}})),
                cluster("idempotency-execute", &to("idempotency_execute"), json!({"@type": HTTP,
                    "explicit_http_config": {"http2_protocol_options": {}}})),
            ],
        },
    })
}

fn cluster(name: &str, address: &Value, options: Value) -> Value {
    let mut cluster = json!({
        "name": name, "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [
            {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]},
        "load_assignment": {"cluster_name": name, "endpoints": [
            {"lb_endpoints": [{"endpoint": {"address": address}}]}]},
    });
    if options.get("@type").is_some() {
        cluster["typed_extension_protocol_options"] =
            json!({"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options});
    }
    cluster
}

fn router() -> Value {
    json!({"name": "envoy.filters.http.router", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}})
}

fn report() -> Value {
    let says = |name: &str, value: &str| {
        json!({"append": {
            "header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}})
    };
    json!({"name": "execution_report", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation",
        "mutations": {
            "request_mutations": [{"remove": "x-envoy-internal"}],
            "response_mutations": [
                {"remove": "x-idempotency-execution-details"},
                {"remove": "x-idempotency-execution-attempts"},
                {"remove": "x-idempotency-execution-redirected"},
                says("x-idempotency-execution-details", "%RESPONSE_CODE_DETAILS%"),
                says("x-idempotency-execution-attempts", "%UPSTREAM_REQUEST_ATTEMPT_COUNT%"),
                says("x-idempotency-execution-redirected", "%REQ(x-envoy-original-url)%"),
            ],
        },
    }})
}

fn wasm(name: &str, module: &Path, plugin: &Value) -> Value {
    json!({"name": name, "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
        "config": {
            "name": name, "root_id": name, "allow_on_headers_stop_iteration": true,
            "vm_config": {
                "vm_id": name, "runtime": "envoy.wasm.runtime.v8", "code": {"local": {"filename": module}}},
            "configuration": {
                "@type": "type.googleapis.com/google.protobuf.StringValue", "value": plugin.to_string()},
        },
    }})
}

fn hcm(name: &str, filters: Value, action: Value) -> Value {
    json!([{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": {
        "@type": HCM,
        "stat_prefix": name,
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [action]}]},
    }}]}])
}

fn internal(name: &str, filters: Value, route: Value) -> Value {
    let action = json!({"match": {"prefix": "/"}, "route": route});
    json!({"name": name, "internal_listener": {}, "filter_chains": hcm(name, filters, action)})
}

fn listener(variant: Variant, module: &Path) -> Value {
    let filter = variant.plugin().map(|plugin| wasm(variant.name(), module, &plugin));
    let filters: Vec<Value> = filter.into_iter().chain([router()]).collect();
    let action = if variant == Variant::Direct {
        json!({"match": {"prefix": "/"}, "direct_response": {
            "status": 200, "body": {"inline_string": "a".repeat(ANSWER)}}})
    } else {
        json!({"match": {"prefix": "/"}, "route": {"cluster": "upstream"}})
    };
    json!({
        "name": variant.name(),
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "per_connection_buffer_limit_bytes": 4_194_304,
        "filter_chains": hcm(variant.name(), json!(filters), action),
    })
}
