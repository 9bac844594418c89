//! One Envoy with one listener per variant, and the Redis beside it.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::load::{Counter, Expected, Keys, Subject};
use crate::process::{Process, wait_until};
use crate::upstream::ANSWER;
use crate::{Fallible, Tools, http};

/// What a listener does with a request.
#[derive(Debug, Clone)]
pub enum Action {
    /// Sends it to the service.
    Forward,
    /// Answers as the service would, by Envoy's own `direct_response`.
    Answer,
}

/// A filter in front of that.
#[derive(Debug, Clone)]
pub enum Filter {
    None,
    /// This project's, with its plugin configuration.
    Idempotency(Value),
    /// Another module, of this name in `target/bench`: the least that any filter costs.
    Floor(&'static str),
    /// A script for Envoy's Lua filter.
    Lua(String),
}

/// One listener, and the load that it gets.
#[derive(Debug, Clone)]
pub struct Variant {
    pub name: &'static str,
    /// What its figures are compared with.
    pub against: &'static str,
    pub filter: Filter,
    pub action: Action,
    pub keys: Keys,
    pub expected: Expected,
}

impl Variant {
    /// Envoy without the filter.
    pub fn plain() -> Self {
        Self {
            name: "plain",
            against: "plain",
            filter: Filter::None,
            action: Action::Forward,
            keys: Keys::New,
            expected: Expected::Executions,
        }
    }

    /// Envoy's own `direct_response` of the bytes that a replay has.
    pub fn direct() -> Self {
        Self {
            name: "direct_response",
            against: "direct_response",
            action: Action::Answer,
            expected: Expected::NoExecutions,
            ..Self::plain()
        }
    }

    /// First executions under this plugin configuration.
    pub fn first(name: &'static str, plugin: Value) -> Self {
        Self { name, filter: Filter::Idempotency(plugin), ..Self::plain() }
    }

    /// First executions behind a filter that does nothing, or only holds.
    pub fn floor(name: &'static str) -> Self {
        Self { name, filter: Filter::Floor(name), ..Self::plain() }
    }

    /// Replays under this plugin configuration.
    pub fn replay(name: &'static str, plugin: Value) -> Self {
        Self {
            name,
            against: "direct_response",
            keys: Keys::Executed,
            expected: Expected::NoExecutions,
            ..Self::first(name, plugin)
        }
    }

    /// Refusals of a key that is in flight.
    pub fn conflict(name: &'static str, plugin: Value) -> Self {
        Self { keys: Keys::Held, expected: Expected::Refusals, ..Self::replay(name, plugin) }
    }

    /// The same, compared with another.
    pub fn against(mut self, name: &'static str) -> Self {
        self.against = name;
        self
    }
}

/// The plugin configuration of the variants: one rule, with these fields set over the usual ones.
pub fn plugin(store: Value, rule: Value) -> Value {
    let mut whole = json!({
        "name": "bench", "match": {"path": {"prefix": "/"}}, "scope": [{"header": "x-account-id"}],
        "lock_ttl": "10s", "record_ttl": "1h",
    });
    let mut plugin = json!({"store": store});
    for (name, value) in rule.as_object().into_iter().flatten() {
        whole[name] = value.clone();
    }
    if whole["execution"] == "detached" {
        whole["execute_timeout"] = json!("20s");
        plugin["execute_cluster"] = json!("idempotency-execute");
    }
    plugin["rules"] = json!([whole]);
    plugin
}

/// The embedded store with room for all that a run writes.
pub fn embedded() -> Value {
    json!({"shared_data": {"max_records": 2_097_152, "max_bytes": 4_294_967_296_u64}})
}

/// The Redis store.
pub fn on_redis(prefix: &str, near_cache: Value, batches: u32) -> Value {
    json!({"redis": {"cluster": "redis-link", "timeout": "2s", "key_prefix": prefix, "near_cache": near_cache,
        "max_in_flight_batches": batches}})
}

/// A Redis without persistence.
pub struct Redis {
    _process: Process,
    pub address: SocketAddr,
    _directory: TempDir,
}

impl Redis {
    /// Starts it, and waits until it serves.
    pub fn start(tools: &Tools) -> Fallible<Self> {
        let directory = tempfile::Builder::new().prefix("idempotency-bench-").tempdir()?;
        let address = free_address()?;
        let process = Process::start(
            Command::new(&tools.redis)
                .args(["--port", &address.port().to_string(), "--bind", "127.0.0.1", "--save", ""])
                .args(["--appendonly", "no"])
                .current_dir(directory.path())
                .stdout(Stdio::null()),
        )?;
        wait_until("Redis", Duration::from_secs(20), || Ok(TcpStream::connect(address).is_ok()))?;
        Ok(Self { _process: process, address, _directory: directory })
    }

    /// One command, as RESP; the answer as text.
    pub fn command(&self, words: &[&str]) -> Fallible<String> {
        use std::io::{Read as _, Write as _};
        let mut stream = TcpStream::connect(self.address)?;
        let mut request = format!("*{}\r\n", words.len());
        for word in words {
            request += &format!("${}\r\n{word}\r\n", word.len());
        }
        stream.write_all(format!("{request}*1\r\n$4\r\nQUIT\r\n").as_bytes())?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        match answer.strip_suffix("+OK\r\n") {
            Some(answer) if !answer.starts_with('-') => Ok(answer.to_owned()),
            Some(_) | None => Err(format!("Redis: {words:?}: {answer}").into()),
        }
    }
}

/// An address that was free a moment ago.
pub fn free_address() -> Fallible<SocketAddr> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?)
}

/// What stands around Envoy.
#[derive(Debug, Clone, Copy)]
pub struct Around {
    pub upstream: SocketAddr,
    pub redis: SocketAddr,
    /// An HTTP gateway in front of Redis.
    pub webdis: SocketAddr,
}

/// The running Envoy.
pub struct Envoy {
    process: Process,
    admin: SocketAddr,
    /// From its start to its readiness.
    pub started_in: Duration,
    directory: TempDir,
}

impl Envoy {
    /// Starts it, and waits until it serves.
    pub fn start(tools: &Tools, workers: u32, around: Around, variants: &[Variant]) -> Fallible<Self> {
        let module = &tools.root.join("dist/idempotency.wasm");
        let floors = &tools.root.join("target/bench");
        let directory = tempfile::Builder::new().prefix("idempotency-bench-").tempdir()?;
        let configuration = directory.path().join("envoy.json");
        fs::write(&configuration, bootstrap(module, floors, around, directory.path(), variants).to_string())?;
        let log = File::create(directory.path().join("log"))?;
        let admin_file = directory.path().join("admin");
        let start = Instant::now();
        let process = Process::start(
            Command::new(&tools.envoy)
                .arg("-c")
                .arg(&configuration)
                .args(["--concurrency", &workers.to_string(), "--disable-hot-restart"])
                .args(["--log-level", "warning", "--admin-address-path"])
                .arg(&admin_file)
                .stdout(log.try_clone()?)
                .stderr(log),
        )?;
        let admin = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut envoy = Self { process, admin, started_in: Duration::ZERO, directory };
        wait_until("Envoy", Duration::from_secs(60), || {
            if let Some(status) = envoy.process.ended()? {
                let log = fs::read_to_string(envoy.directory.path().join("log"))?;
                return Err(format!("Envoy did not start ({status}):\n{log}").into());
            }
            let address = fs::read_to_string(&admin_file).ok().and_then(|text| text.trim().parse().ok());
            let Some(address) = address else { return Ok(false) };
            envoy.admin = address;
            Ok(envoy.get("/ready").is_ok_and(|answer| answer.contains("LIVE")))
        })?;
        envoy.started_in = start.elapsed();
        Ok(envoy)
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// A variant as what is measured.
    pub fn subject(&self, variant: &Variant) -> Fallible<Subject> {
        let is_filter = matches!(variant.filter, Filter::Idempotency(_) | Filter::Floor(_) | Filter::Lua(_));
        Ok(Subject {
            name: variant.name.to_owned(),
            against: variant.against.to_owned(),
            port: self.port(variant.name)?,
            path: "/pay".to_owned(),
            keys: variant.keys,
            expected: variant.expected,
            counter: Counter::Upstream,
            headers: String::new(),
            replay_mark: is_filter.then_some("idempotent-replayed: true"),
            processes: vec![self.id()],
        })
    }

    /// All of them.
    pub fn subjects(&self, variants: &[Variant]) -> Fallible<Vec<Subject>> {
        variants.iter().map(|variant| self.subject(variant)).collect()
    }

    fn port(&self, name: &str) -> Fallible<u16> {
        let listeners = self.get("/listeners")?;
        let wanted = format!("{name}::");
        let line = listeners.lines().find_map(|line| line.strip_prefix(&wanted));
        let port = line.and_then(|line| line.rsplit(':').next()).and_then(|port| port.parse().ok());
        port.ok_or_else(|| format!("no listener {name} in:\n{listeners}").into())
    }

    /// One counter or gauge.
    pub fn stat(&self, name: &str) -> Fallible<u64> {
        let stats = self.get(&format!("/stats?filter=^{name}$"))?;
        let value = stats.trim().rsplit(": ").next().and_then(|text| text.parse().ok());
        value.ok_or_else(|| format!("no {name}: {stats}").into())
    }

    /// What its admin interface answers.
    pub fn get(&self, path: &str) -> Fallible<String> {
        http::get(self.admin.port(), path)
    }
}

const HCM: &str =
    "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";
const HTTP: &str = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

fn bootstrap(module: &Path, floors: &Path, around: Around, directory: &Path, variants: &[Variant]) -> Value {
    let socket = directory.join("redis.sock");
    let mut listeners: Vec<Value> =
        variants.iter().map(|variant| listener(variant, module, floors)).collect();
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
                cluster("upstream", &address(around.upstream), json!({})),
                cluster("redis", &address(around.redis), json!({})),
                cluster("webdis", &address(around.webdis), json!({})),
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
        "stat_prefix": name, "stream_idle_timeout": "0s",
        "http_filters": filters,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [action]}]},
    }}]}])
}

fn internal(name: &str, filters: Value, route: Value) -> Value {
    let action = json!({"match": {"prefix": "/"}, "route": route});
    json!({"name": name, "internal_listener": {}, "filter_chains": hcm(name, filters, action)})
}

fn listener(variant: &Variant, module: &Path, floors: &Path) -> Value {
    let filter = match &variant.filter {
        Filter::None => None,
        Filter::Idempotency(plugin) => Some(wasm(variant.name, module, plugin)),
        Filter::Floor(name) => {
            Some(wasm(variant.name, &floors.join(name).with_extension("wasm"), &json!({})))
        }
        Filter::Lua(script) => Some(json!({"name": "lua", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua",
            "default_source_code": {"inline_string": script}}})),
    };
    let filters: Vec<Value> = filter.into_iter().chain([router()]).collect();
    let action = match variant.action {
        Action::Answer => json!({"match": {"prefix": "/"}, "direct_response": {
            "status": 200, "body": {"inline_string": "a".repeat(ANSWER)}}}),
        Action::Forward => {
            json!({"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}})
        }
    };
    json!({
        "name": variant.name,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}},
        "per_connection_buffer_limit_bytes": 4_194_304,
        "filter_chains": hcm(variant.name, json!(filters), action),
    })
}
