//! Owns the execution listener of detached rules: an internal listener with routes of its own, and its cluster.

use serde_json::{Value, json};

use super::envoy::Builder;

/// The route table that the tests' listeners have by default.
pub fn default_routes() -> Vec<Value> {
    vec![json!({"match": {"prefix": "/"}, "route": {"cluster": "origin", "timeout": "15s"}})]
}

/// Adds the execution listener with these routes.
pub fn with_execution(builder: Builder, routes: &[Value]) -> Builder {
    with_changed_execution(builder, routes, |_, _| {})
}

/// The same; `change` may do anything to each part: `listener` and `cluster`.
pub fn with_changed_execution(
    builder: Builder,
    routes: &[Value],
    change: impl Fn(&str, &mut Value),
) -> Builder {
    let mut listener = execution_listener(routes, json!([]));
    let mut cluster = execution_cluster();
    change("listener", &mut listener);
    change("cluster", &mut cluster);
    builder.extra_listener(listener).extra_cluster(cluster).internal_listeners()
}

pub fn execution_cluster() -> Value {
    json!({
        "name": "idempotency-execute",
        "connect_timeout": "1s",
        // HTTP/2 tells a cut response at once; HTTP/1.1 only when the connection has closed.
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }},
        "circuit_breakers": {"thresholds": [
            {"max_connections": 100_000, "max_pending_requests": 100_000, "max_requests": 100_000}]},
        "load_assignment": {"cluster_name": "idempotency-execute", "endpoints": [{"lb_endpoints": [{"endpoint": {
            "address": {"envoy_internal_address": {"server_listener_name": "idempotency_execute"}}}}]}]},
    })
}

/// `filters` stand between the one that says how an execution ended and the router.
pub fn execution_listener(routes: &[Value], filters: Value) -> Value {
    let says = |name: &str, value: &str| {
        json!({"append": {
            "header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}})
    };
    let mut http_filters = vec![json!({"name": "execution_report", "typed_config": {
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
    }})];
    http_filters.extend(filters.as_array().unwrap().iter().cloned());
    http_filters.push(json!({"name": "envoy.filters.http.router", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}}));
    json!({
        "name": "idempotency_execute",
        "internal_listener": {},
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "idempotency_execute",
            "route_config": {"name": "execute", "virtual_hosts": [
                {"name": "all", "domains": ["*"], "routes": routes}]},
            "http_filters": http_filters,
        }}]}],
    })
}
