//! Owns the bootstrap and the listeners that the tests' Envoys run with.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::super::merge::deep_merge;

pub const DEFAULT_ACCESS_LOG: &str =
    "%RESPONSE_CODE% %RESPONSE_CODE_DETAILS% %FILTER_STATE(wasm.idempotency:PLAIN)% %REQ(:PATH)%";

/// Which build of the filter runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wasm {
    /// What is shipped.
    Dist,
    /// The build with the `test-hooks` feature.
    TestHooks,
    File(PathBuf),
}

impl Wasm {
    /// The module's path; panics with the command that makes it.
    pub fn path(&self) -> PathBuf {
        let (variable, default) = match self {
            Wasm::Dist => ("IDEMPOTENCY_WASM", "dist/idempotency.wasm"),
            Wasm::TestHooks => ("IDEMPOTENCY_TEST_WASM", "target/test-hooks/idempotency.wasm"),
            Wasm::File(path) => return path.clone(),
        };
        let path = match std::env::var_os(variable) {
            Some(path) => PathBuf::from(path),
            None => repository().join(default),
        };
        assert!(path.is_file(), "no wasm module at {} ({variable}): run `make build`", path.display());
        path.canonicalize().expect("the module's path")
    }
}

pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// One instance of the filter in a chain.
#[derive(Clone, Debug)]
pub struct FilterSpec {
    /// The HTTP filter's name; also the plugin's, unless that is set.
    pub name: String,
    pub plugin: Value,
    pub plugin_as_struct: bool,
    pub plugin_name: Option<String>,
    pub root_id: String,
    /// Default: the filter's name. Filters with the same id, module and VM configuration share a VM on each worker.
    pub vm_id: Option<String>,
    pub wasm: Wasm,
    pub failure_policy: String,
    pub headers_stop_iteration: bool,
    /// Environment of the VM. The first filter of a VM decides.
    pub vm_env: BTreeMap<String, String>,
    /// Merged into the plugin's `PluginConfig` message.
    pub patch: Value,
}

impl FilterSpec {
    pub fn new(name: &str, plugin: Value) -> FilterSpec {
        FilterSpec {
            name: name.to_owned(),
            plugin,
            plugin_as_struct: false,
            plugin_name: None,
            root_id: "idempotency".to_owned(),
            vm_id: None,
            wasm: Wasm::Dist,
            failure_policy: "FAIL_RELOAD".to_owned(),
            headers_stop_iteration: true,
            vm_env: BTreeMap::new(),
            patch: json!({}),
        }
    }

    /// The HTTP filter as Envoy reads it.
    pub fn to_json(&self) -> Value {
        let configuration = if self.plugin_as_struct {
            json!({"@type": "type.googleapis.com/google.protobuf.Struct", "value": self.plugin})
        } else {
            // A string is taken as the text itself, so that a test can pass what isn't JSON.
            let text = self.plugin.as_str().map_or_else(|| self.plugin.to_string(), str::to_owned);
            json!({"@type": "type.googleapis.com/google.protobuf.StringValue", "value": text})
        };
        let mut vm = json!({
            "vm_id": self.vm_id.as_ref().unwrap_or(&self.name),
            "runtime": "envoy.wasm.runtime.v8",
            "code": {"local": {"filename": self.wasm.path()}},
        });
        if !self.vm_env.is_empty() {
            vm["environment_variables"] = json!({"key_values": self.vm_env});
        }
        let mut plugin = json!({
            "name": self.plugin_name.as_ref().unwrap_or(&self.name),
            "root_id": self.root_id,
            "failure_policy": self.failure_policy,
            "configuration": configuration,
            "vm_config": vm,
        });
        if self.headers_stop_iteration {
            plugin["allow_on_headers_stop_iteration"] = json!(true);
        }
        deep_merge(&mut plugin, &self.patch);
        json!({
            "name": self.name,
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
                "config": plugin,
            }
        })
    }
}

/// One listener with an HTTP connection manager.
#[derive(Clone, Debug)]
pub struct ListenerSpec {
    pub name: String,
    pub filter: Option<FilterSpec>,
    pub second_filter: Option<FilterSpec>,
    pub filters_before: Vec<Value>,
    pub filters_after: Vec<Value>,
    pub routes: Vec<Value>,
    pub virtual_host: Value,
    pub hcm_patch: Value,
    pub listener_patch: Value,
    pub access_log_format: String,
    pub per_connection_buffer_limit_bytes: Option<u32>,
    pub stream_idle_timeout: Option<String>,
}

impl ListenerSpec {
    pub fn new(name: &str, filter: Option<FilterSpec>) -> ListenerSpec {
        ListenerSpec {
            name: name.to_owned(),
            filter,
            second_filter: None,
            filters_before: vec![],
            filters_after: vec![],
            routes: vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "15s"}})],
            virtual_host: json!({}),
            hcm_patch: json!({}),
            listener_patch: json!({}),
            access_log_format: DEFAULT_ACCESS_LOG.to_owned(),
            per_connection_buffer_limit_bytes: None,
            stream_idle_timeout: None,
        }
    }

    /// The filter, to be changed; panics in a listener without one.
    pub fn filter_mut(&mut self) -> &mut FilterSpec {
        self.filter.as_mut().expect("a listener with the filter")
    }

    pub fn to_json(&self, addr: SocketAddr, access_log: &Path) -> Value {
        let mut filters = self.filters_before.clone();
        filters.extend(self.filter.iter().chain(&self.second_filter).map(FilterSpec::to_json));
        filters.extend(self.filters_after.iter().cloned());
        filters.push(json!({
            "name": "envoy.filters.http.router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
        }));
        let mut host = json!({"name": "all", "domains": ["*"], "routes": self.routes});
        deep_merge(&mut host, &self.virtual_host);
        let mut hcm = json!({
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": self.name,
            "codec_type": "AUTO",
            "route_config": {"name": self.name, "virtual_hosts": [host]},
            "http_filters": filters,
            "access_log": [{
                "name": "envoy.access_loggers.file",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog",
                    "path": access_log,
                    "log_format": {
                        "text_format_source": {"inline_string": format!("{}\n", self.access_log_format)}
                    }
                }
            }]
        });
        if let Some(timeout) = &self.stream_idle_timeout {
            hcm["stream_idle_timeout"] = json!(timeout);
        }
        deep_merge(&mut hcm, &self.hcm_patch);
        let mut listener = json!({
            "@type": "type.googleapis.com/envoy.config.listener.v3.Listener",
            "name": self.name,
            "stat_prefix": self.name,
            "address": {"socket_address": socket_address(addr)},
            "filter_chains": [{
                "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": hcm}]
            }]
        });
        if let Some(limit) = self.per_connection_buffer_limit_bytes {
            listener["per_connection_buffer_limit_bytes"] = json!(limit);
        }
        deep_merge(&mut listener, &self.listener_patch);
        listener
    }
}

/// A static cluster of one endpoint.
pub fn cluster(name: &str, addr: SocketAddr, http2: bool) -> Value {
    let mut cluster = json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": socket_address(addr)}}}]}]
        }
    });
    if http2 {
        cluster["typed_extension_protocol_options"] = json!({
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {"http2_protocol_options": {}}
            }
        });
    }
    cluster
}

/// The bootstrap; the listeners come from `lds_file` unless `listeners` holds them.
pub fn bootstrap(clusters: &[Value], lds_file: &Path, listeners: Option<&Value>, patch: &Value) -> Value {
    let mut bootstrap = json!({
        "node": {"id": "e2e", "cluster": "e2e"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}},
        "static_resources": {"clusters": clusters},
        // Keeps the warning about a missing connection limit out of the logs.
        "overload_manager": {
            "resource_monitors": [{
                "name": "envoy.resource_monitors.global_downstream_max_connections",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    "max_active_downstream_connections": 50000
                }
            }]
        }
    });
    match listeners {
        Some(listeners) => bootstrap["static_resources"]["listeners"] = listeners.clone(),
        None => {
            bootstrap["dynamic_resources"] = json!({
                "lds_config": {"resource_api_version": "V3", "path_config_source": {"path": lds_file}}
            });
        }
    }
    deep_merge(&mut bootstrap, patch);
    bootstrap
}

fn socket_address(addr: SocketAddr) -> Value {
    json!({"address": addr.ip().to_string(), "port_value": addr.port()})
}
