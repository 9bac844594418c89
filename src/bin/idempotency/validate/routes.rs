//! What copies a request below the filter: retries, hedging, mirroring.

use idempotency::config::{Config, PathMatcher, Rule};

use super::{Report, active, http_options};
use crate::manifest::{Filter, Manifest, Node};

/// What resends only a request that never reached the upstream.
const SAFE_RETRIES: [&str; 3] = ["connect-failure", "refused-stream", "reset-before-request"];
const SAFE: &str = "allow only retry_on: connect-failure,refused-stream,reset-before-request on covered routes, and then set \
                    trust_route_retries: true";

pub fn check(manifest: &Manifest, filter: &Filter, config: &Config, report: &mut Report) {
    let chain = filter.chain.and_then(|(chain, _)| manifest.chains.get(chain));
    if let Some(chain) = chain
        && let Some(table) = chain.manager.get("route_config")
    {
        check_table(table, &format!("{}.route_config", chain.path), manifest, config, report);
    } else {
        for table in &manifest.routes {
            match table.node.text_of("kind") {
                Some("VirtualService") => check_virtual_service(&table.node, &table.path, report),
                Some("HTTPRoute") => check_http_route(&table.node, &table.path, report),
                Some("BackendTrafficPolicy") => check_traffic_policy(&table.node, &table.path, report),
                Some(_) | None => {
                    let is_another_chains =
                        manifest.chains.iter().any(|chain| table.path.starts_with(&chain.path));
                    if !is_another_chains {
                        let value = table.node.at(&["patch", "value"]).unwrap_or(&table.node);
                        check_table(value, &table.path, manifest, config, report);
                    }
                }
            }
        }
    }
}

/// A route configuration, a virtual host, or one route.
fn check_table(table: &Node, path: &str, manifest: &Manifest, config: &Config, report: &mut Report) {
    for (index, host) in table.list("virtual_hosts").iter().enumerate() {
        check_table(host, &format!("{path}.virtual_hosts[{index}]"), manifest, config, report);
    }
    let hosts_own = |setting: &str| table.get(setting);
    for (index, route) in table.list("routes").iter().enumerate() {
        let path = format!("{path}.routes[{index}]");
        check_route(route, &path, &hosts_own, manifest, config, report);
    }
    if table.get("route").is_some() && table.get("match").is_some() {
        check_route(table, path, &|_| None, manifest, config, report);
    }
    if table.get("routes").is_none()
        && table.get("virtual_hosts").is_none()
        && table.get("match").is_none()
        && let Some(policy) = table.get("retry_policy").or_else(|| table.at(&["route", "retry_policy"]))
    {
        check_retries(policy, path, config, report);
    }
}

fn check_route<'a>(
    route: &'a Node,
    path: &str,
    hosts_own: &dyn Fn(&str) -> Option<&'a Node>,
    manifest: &Manifest,
    config: &Config,
    report: &mut Report,
) {
    let Some(action) = route.get("route") else { return };
    let metadata = route.at(&["metadata", "filter_metadata", "idempotency"]);
    if metadata.is_some_and(|metadata| metadata.flag("off")) {
        return;
    }
    if let Some(name) = metadata.and_then(|metadata| metadata.text_of("rule"))
        && !config.rules.iter().any(|rule| rule.name == name)
    {
        report.error(
            "route-rule",
            (path, route.line),
            format!(
                "the route names the rule {name}, which does not exist: its requests are refused with 500"
            ),
            "name one of the configuration's rules",
        );
    }
    if metadata.is_none() && !active(config).any(|rule| may_cover(rule, route)) {
        return;
    }
    let setting = |name: &str| action.get(name).or_else(|| hosts_own(name));
    if let Some(policy) = setting("retry_policy") {
        check_retries(policy, path, config, report);
    }
    if let Some(hedge) = setting("hedge_policy")
        && (hedge.flag("hedge_on_per_try_timeout") || hedge.get("initial_requests").is_some())
    {
        report.error(
            "hedging",
            (path, hedge.line),
            "hedging sends a second request while the first still runs: both execute under one claim",
            "take hedge_policy out of covered routes",
        );
    }
    if let Some(mirrors) = setting("request_mirror_policies")
        && !mirrors.items().is_empty()
    {
        mirrored(path, mirrors.line, report);
    }
    for name in target_clusters(action) {
        let Some(cluster) = manifest.cluster(name) else { continue };
        let options = http_options(&cluster.node);
        if let Some(policy) = options.and_then(|options| options.get("retry_policy")) {
            check_retries(policy, &cluster.path, config, report);
        }
    }
}

fn target_clusters(action: &Node) -> impl Iterator<Item = &str> {
    let weighted = action.at(&["weighted_clusters", "clusters"]).map_or(&[][..], Node::items);
    action.text_of("cluster").into_iter().chain(weighted.iter().filter_map(|cluster| cluster.text_of("name")))
}

/// Whether a rule can cover a request of the route; where it can't be told, it may.
fn may_cover(rule: &Rule, route: &Node) -> bool {
    let Some(condition) = route.get("match") else { return true };
    let (route_path, route_is_exact) = match (condition.text_of("path"), condition.text_of("prefix")) {
        (Some(path), _) => (path, true),
        (None, Some(prefix)) => (prefix, false),
        (None, None) => match condition.text_of("path_separated_prefix") {
            Some(prefix) => (prefix, false),
            None => return true,
        },
    };
    match &rule.matcher.path {
        PathMatcher::Any => true,
        PathMatcher::Regex(regex) => !route_is_exact || regex.is_match(route_path),
        PathMatcher::Exact(exact) if route_is_exact => exact == route_path,
        PathMatcher::Exact(exact) => exact.starts_with(route_path),
        PathMatcher::Prefix(prefix) if route_is_exact => route_path.starts_with(prefix.as_str()),
        PathMatcher::Prefix(prefix) => {
            prefix.starts_with(route_path) || route_path.starts_with(prefix.as_str())
        }
    }
}

fn check_retries(policy: &Node, path: &str, config: &Config, report: &mut Report) {
    let at = (path, policy.line);
    let retry_on = policy.text_of("retry_on").unwrap_or_default();
    let unsafe_ones: Vec<&str> = retry_on
        .split(',')
        .map(str::trim)
        .filter(|one| !one.is_empty() && !SAFE_RETRIES.contains(one))
        .collect();
    let retries = policy.get("num_retries").and_then(Node::integer) != Some(0);
    if retries && !unsafe_ones.is_empty() {
        report.error(
            "route-retries",
            at,
            format!(
                "retry_on: {} sends a request again that may have been executed, below the filter",
                unsafe_ones.join(",")
            ),
            SAFE,
        );
    } else if retries && !retry_on.is_empty() && active(config).any(|rule| !rule.trust_route_retries) {
        report.warn(
            "trust-route-retries",
            at,
            "these retries are safe, but a rule does not say so: a failure after more than one attempt is retained although nothing ran",
            "set trust_route_retries: true, and keep retry_on as it is",
        );
    }
    if retries && policy.get("per_try_timeout").is_some() {
        report.warn(
            "route-retries",
            at,
            "per_try_timeout gives up a try that may be executing; with retries of resets or hedging it is run again",
            "take per_try_timeout out of covered routes",
        );
    }
}

fn mirrored(path: &str, line: usize, report: &mut Report) {
    report.warn(
        "mirroring",
        (path, line),
        "requests are mirrored below the filter: the mirror executes each of them too",
        "mirror covered routes only to something without side effects",
    );
}

fn check_virtual_service(document: &Node, path: &str, report: &mut Report) {
    for (index, route) in document.get("spec").map_or(&[][..], |spec| spec.list("http")).iter().enumerate() {
        let path = format!("{path}spec.http[{index}]");
        let retries = route.get("retries");
        let off = retries.is_some_and(|retries| retries.get("attempts").and_then(Node::integer) == Some(0));
        let retry_on = retries.and_then(|retries| retries.text_of("retryOn"));
        let safe = retry_on.is_some_and(|retry_on| {
            retry_on.split(',').map(str::trim).all(|one| SAFE_RETRIES.contains(&one))
        });
        if !off && !safe {
            report.error(
                "route-retries",
                (&path, route.line),
                match retry_on {
                    Some(retry_on) => format!("retryOn: {retry_on} sends a request again that may have been executed"),
                    None => "Istio's own retries are on: they resend a request after answers that may come from an execution".to_owned(),
                },
                "set retries: { attempts: 0 }, or retryOn: connect-failure,refused-stream,reset-before-request with trust_route_retries: true",
            );
        }
        for mirror in ["mirror", "mirrors"].into_iter().filter_map(|name| route.get(name)) {
            mirrored(&path, mirror.line, report);
        }
    }
}

fn check_http_route(document: &Node, path: &str, report: &mut Report) {
    for (index, rule) in document.get("spec").map_or(&[][..], |spec| spec.list("rules")).iter().enumerate() {
        let mirror =
            rule.list("filters").iter().find(|filter| filter.text_of("type") == Some("RequestMirror"));
        if let Some(mirror) = mirror {
            mirrored(&format!("{path}spec.rules[{index}]"), mirror.line, report);
        }
        if let Some(retry) = rule.get("retry") {
            report.error(
                "route-retries",
                (&format!("{path}spec.rules[{index}].retry"), retry.line),
                "these retries send a request again that may have been executed, below the filter",
                SAFE,
            );
        }
    }
}

fn check_traffic_policy(document: &Node, path: &str, report: &mut Report) {
    let Some(retry) = document.at(&["spec", "retry"]) else { return };
    let triggers = retry.at(&["retryOn", "triggers"]).map_or(&[][..], Node::items);
    let safe = !triggers.is_empty()
        && triggers.iter().filter_map(Node::text).all(|one| SAFE_RETRIES.contains(&one))
        && retry.at(&["retryOn", "httpStatusCodes"]).is_none();
    if !safe {
        report.error(
            "route-retries",
            (&format!("{path}spec.retry"), retry.line),
            "these retries send a request again that may have been executed, below the filter",
            "allow only the triggers connect-failure, refused-stream and reset-before-request",
        );
    }
}
