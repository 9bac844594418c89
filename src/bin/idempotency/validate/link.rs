//! The link to Redis, piece by piece: cluster, internal listener, two holds, CONNECT, `redis_proxy`, Redis.

use idempotency::config::RedisConfig;

use super::{Report, address_of, endpoint_addresses, http_options, internal_target, network_filters};
use crate::manifest::{Filter, Manifest, Node};

/// Where every piece is to be seen.
const SEE: &str = "compare with envoy/redis.yaml, or print the link with `idempotency envoy-snippet`";

pub fn check(manifest: &Manifest, filter: &Filter, redis: &RedisConfig, report: &mut Report) {
    let here = (filter.path.as_str(), filter.line);
    let Some(cluster) = manifest.cluster(&redis.cluster) else {
        let message =
            format!("store.redis.cluster names {}, and there is no cluster of that name", redis.cluster);
        report.missing(manifest, "redis-cluster", here, message, SEE);
        return;
    };
    let at = (cluster.path.as_str(), cluster.node.line);
    let Some(target) = internal_target(&cluster.node) else {
        report.error(
            "redis-cluster",
            at,
            format!(
                "{} does not lead to an internal listener: the filter speaks to the link, not to Redis itself",
                redis.cluster
            ),
            format!("give it an envoy_internal_address with the link's listener; {SEE}"),
        );
        return;
    };
    check_extension(manifest, at, report);
    let Some(listener) = manifest.listener(target) else {
        let message =
            format!("the link's cluster leads to the internal listener {target}, which does not exist");
        report.missing(manifest, "redis-link-listener", at, message, SEE);
        return;
    };
    if listener.node.get("internal_listener").is_none() {
        report.error(
            "redis-link-listener",
            (&listener.path, listener.node.line),
            format!("{target} is no internal listener"),
            "give it internal_listener: {} in place of an address",
        );
    }
    if listener.node.text_of("traffic_direction") == Some("INBOUND") {
        drained(&listener.path, &listener.node, report);
    }
    let Some(chain) = manifest.chain_of(listener) else {
        let message = "the link's listener has no HTTP connection manager";
        report.error("redis-link-listener", (&listener.path, listener.node.line), message, SEE);
        return;
    };
    let at = (chain.path.as_str(), chain.manager.line);
    check_holds(manifest, chain, at, report);

    let routes: Vec<&Node> = chain
        .manager
        .get("route_config")
        .map_or(&[][..], |table| table.list("virtual_hosts"))
        .iter()
        .flat_map(|host| host.list("routes"))
        .filter_map(|route| route.get("route"))
        .collect();
    let connects = |route: &Node| {
        route.list("upgrade_configs").iter().any(|upgrade| {
            upgrade.text_of("upgrade_type").is_some_and(|kind| kind.eq_ignore_ascii_case("connect"))
                && upgrade.get("connect_config").is_some_and(|config| config.flag("allow_post"))
        })
    };
    if !routes.iter().any(|route| connects(route)) {
        report.error(
            "redis-link-connect",
            at,
            "the link's route does not send POST as a TCP stream: redis_proxy is spoken to in HTTP",
            "set upgrade_configs: [{ upgrade_type: CONNECT, connect_config: { allow_post: true } }] on the route",
        );
    }
    for name in routes.iter().filter_map(|route| route.text_of("cluster")) {
        check_proxy_cluster(manifest, name, at, redis, report);
    }
}

/// The link must outlive a drain that lets requests end.
fn drained(path: &str, listener: &Node, report: &mut Report) {
    report.warn(
        "link-drained",
        (path, listener.line),
        "the link's listener is INBOUND: a drain closes it, and what still runs can't be recorded",
        "set traffic_direction: INBOUND only on the listeners that clients use",
    );
}

/// An internal listener needs its bootstrap extension.
pub fn check_extension(manifest: &Manifest, at: (&str, usize), report: &mut Report) {
    if !manifest.has_internal_listener_extension {
        report.missing(
            manifest,
            "internal-listener",
            at,
            "an internal listener needs the bootstrap extension envoy.bootstrap.internal_listener",
            "add it to bootstrap_extensions (Envoy Gateway: EnvoyProxy spec.bootstrap; Istio: a BOOTSTRAP patch)",
        );
    }
}

fn check_holds(manifest: &Manifest, chain: &crate::manifest::Chain, at: (&str, usize), report: &mut Report) {
    let filters = chain.manager.list("http_filters");
    let is_hold = |filter: &Node| {
        let value =
            filter.get("typed_config").and_then(Node::typed).map(|(_, typed)| typed.to_json().to_string());
        value.is_some_and(|text| {
            text.contains("request_end_hold\\\"}") || text.contains("\"role\":\"request_end_hold\"")
        }) || manifest.filters.iter().any(|known| {
            known.role == crate::manifest::Role::Hold
                && filter.at(&["typed_config", "config"]) == Some(&known.settings)
        })
    };
    let holds = filters.iter().take_while(|filter| is_hold(filter)).count();
    if holds < 2 || filters.len() != holds + 1 {
        report.error(
            "redis-link-hold",
            at,
            format!(
                "the link has {holds} request_end_hold filters before its router, and {} filters in all: the end of a callout's \
                 request reaches redis_proxy, which then drops its replies",
                filters.len()
            ),
            "put two filters with the configuration {\"role\": \"request_end_hold\"} in a row before the router, and nothing else",
        );
    }
}

fn check_proxy_cluster(
    manifest: &Manifest,
    name: &str,
    at: (&str, usize),
    redis: &RedisConfig,
    report: &mut Report,
) {
    let Some(cluster) = manifest.cluster(name) else {
        let message = format!("the link's route leads to the cluster {name}, which does not exist");
        report.missing(manifest, "redis-proxy-cluster", at, message, SEE);
        return;
    };
    let at = (cluster.path.as_str(), cluster.node.line);
    let most = http_options(&cluster.node)
        .and_then(|options| options.at(&["common_http_protocol_options", "max_requests_per_connection"]))
        .or_else(|| cluster.node.at(&["common_http_protocol_options", "max_requests_per_connection"]))
        .or_else(|| cluster.node.get("max_requests_per_connection"))
        .and_then(Node::integer);
    if most != Some(1) {
        report.error(
            "redis-proxy-cluster",
            at,
            format!("{name} keeps connections that QUIT has ended"),
            "set common_http_protocol_options: { max_requests_per_connection: 1 } in its HttpProtocolOptions",
        );
    }
    if internal_target(&cluster.node).is_some() {
        report.error(
            "redis-proxy-socket",
            at,
            format!("{name} reaches redis_proxy through an internal listener, where its close arrives as a reset and replies are lost"),
            "let redis_proxy listen on a unix socket (address: { pipe: { path: \"@idempotency-redis\" } })",
        );
        return;
    }
    let Some(address) = endpoint_addresses(&cluster.node).find_map(address_of) else {
        report.warn(
            "redis-proxy-cluster",
            at,
            format!("{name} has no endpoint that can be compared with a listener"),
            SEE,
        );
        return;
    };
    let listener = manifest.listeners.iter().find(|listener| {
        listener.node.get("address").and_then(address_of).as_deref() == Some(address.as_str())
    });
    let Some(listener) = listener else {
        let message = format!("nobody listens at {address}, where {name} leads");
        report.missing(manifest, "redis-proxy-listener", at, message, SEE);
        return;
    };
    let proxy = network_filters(&listener.node)
        .filter_map(|filter| filter.get("typed_config")?.typed())
        .find(|(kind, _)| *kind == "RedisProxy");
    let Some((_, proxy)) = proxy else {
        let message = format!("the listener at {address} has no redis_proxy filter");
        report.error("redis-proxy-listener", (&listener.path, listener.node.line), message, SEE);
        return;
    };
    check_proxy(manifest, &listener.path, proxy, redis, report);
}

fn check_proxy(manifest: &Manifest, path: &str, proxy: &Node, redis: &RedisConfig, report: &mut Report) {
    let at = (path, proxy.line);
    let half = redis.timeout.as_secs_f64() / 2.0;
    match proxy.at(&["settings", "op_timeout"]).and_then(Node::seconds) {
        Some(op_timeout) if op_timeout < half => {}
        Some(op_timeout) => report.error(
            "redis-op-timeout",
            at,
            format!(
                "op_timeout of {op_timeout} s is not below half of store.redis.timeout ({half} s): an attempt is given up before \
                 redis_proxy has answered"
            ),
            "lower op_timeout, or raise store.redis.timeout",
        ),
        None => report.error("redis-op-timeout", at, "redis_proxy has no op_timeout", "set settings.op_timeout below half of store.redis.timeout"),
    }
    let Some(name) = proxy.at(&["prefix_routes", "catch_all_route", "cluster"]).and_then(Node::text) else {
        report.warn(
            "redis-upstream",
            at,
            "redis_proxy has no catch_all_route: only keys with one of its prefixes reach Redis",
            "set prefix_routes.catch_all_route.cluster, or a prefix that matches store.redis.key_prefix",
        );
        return;
    };
    if manifest.cluster(name).is_none() {
        let message = format!("redis_proxy leads to the cluster {name}, which does not exist");
        report.missing(manifest, "redis-upstream", at, message, SEE);
    }
}
