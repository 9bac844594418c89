//! The execution listener of detached rules, and the time-outs on the way to it.

use std::time::Duration;

use idempotency::config::{Config, Execution};

use super::{Report, active, http_options, internal_target, link};
use crate::manifest::{Chain, Filter, Manifest, Node};

const SEE: &str = "compare with envoy/detached.yaml, or print it with `idempotency envoy-snippet`";
const REPORTED: [&str; 3] = [
    "x-idempotency-execution-details",
    "x-idempotency-execution-attempts",
    "x-idempotency-execution-redirected",
];
/// Envoy's own, where nothing is set.
const STREAM_IDLE_SECONDS: f64 = 300.0;

pub fn check(manifest: &Manifest, filter: &Filter, config: &Config, report: &mut Report) {
    let longest = active(config)
        .filter_map(|rule| match rule.execution {
            Execution::Inline => None,
            Execution::Detached { timeout } => Some(timeout),
        })
        .max();
    let (Some(longest), Some(name)) = (longest, &config.execute_cluster) else { return };
    let main = filter.chain.and_then(|(chain, _)| manifest.chains.get(chain));
    if let Some(chain) = main {
        check_idle(chain, longest, "the client then gets 408 while its execution goes on", report);
    }
    let here = (filter.path.as_str(), filter.line);
    let Some(cluster) = manifest.cluster(name) else {
        let message = format!("execute_cluster names {name}, and there is no cluster of that name");
        report.missing(manifest, "execute-cluster", here, message, SEE);
        return;
    };
    let at = (cluster.path.as_str(), cluster.node.line);
    check_cluster(name, &cluster.node, at, report);
    let Some(target) = internal_target(&cluster.node) else {
        report.warn(
            "execute-cluster",
            at,
            format!("{name} does not lead to an internal listener, so its listener can't be checked"),
            SEE,
        );
        return;
    };
    link::check_extension(manifest, at, report);
    let Some(listener) = manifest.listener(target) else {
        let message = format!("{name} leads to the internal listener {target}, which does not exist");
        report.missing(manifest, "execute-listener", at, message, SEE);
        return;
    };
    let at = (listener.path.as_str(), listener.node.line);
    let Some(chain) = manifest.chain_of(listener) else {
        report.error("execute-listener", at, format!("{target} has no HTTP connection manager"), SEE);
        return;
    };
    check_chain(manifest, chain, report);
    check_idle(chain, longest, "the execution is cut then", report);
    if let Some(main) = main {
        check_same_routes(main, chain, report);
    }
}

fn check_cluster(name: &str, cluster: &Node, at: (&str, usize), report: &mut Report) {
    let options = http_options(cluster);
    if options.is_some_and(|options| options.get("retry_policy").is_some())
        || cluster.get("retry_policy").is_some()
    {
        report.error(
            "execute-retries",
            at,
            format!("{name} has a retry_policy: the callout itself would run a request again"),
            "take it out: retries belong into the routes of the execution listener",
        );
    }
    let http2 = |options: &Node| options.at(&["explicit_http_config", "http2_protocol_options"]).is_some();
    if !options.is_some_and(http2) && cluster.get("http2_protocol_options").is_none() {
        report.warn(
            "execute-http2",
            at,
            format!("{name} speaks HTTP/1.1: a response that is cut off is told only when its connection has closed"),
            "set explicit_http_config: { http2_protocol_options: {} }",
        );
    }
    if cluster.at(&["circuit_breakers", "thresholds"]).is_none() {
        report.warn(
            "execute-circuit-breakers",
            at,
            format!("{name} has Envoy's own circuit breakers, which are few for requests that wait as long as the service works"),
            "raise max_connections, max_pending_requests and max_requests; limits.detached_bytes bounds what runs",
        );
    }
}

fn check_chain(manifest: &Manifest, chain: &Chain, report: &mut Report) {
    let at = (chain.path.as_str(), chain.manager.line);
    let index = manifest.chains.iter().position(|other| other.path == chain.path);
    let loops = manifest
        .filters
        .iter()
        .any(|filter| index.is_some() && filter.chain.map(|(chain, _)| chain) == index);
    if loops {
        report.error(
            "execute-loop",
            at,
            "the execution listener has the idempotency filter in its chain: detached requests are refused before they run",
            "take it out there",
        );
    }
    let first = chain.manager.list("http_filters").first();
    let mutations = first
        .and_then(|filter| filter.get("typed_config")?.typed())
        .filter(|(kind, _)| *kind == "HeaderMutation")
        .map_or(&[][..], |(_, typed)| {
            typed.at(&["mutations", "response_mutations"]).map_or(&[][..], Node::items)
        });
    for name in REPORTED {
        let appended = mutations
            .iter()
            .filter_map(|mutation| mutation.get("append"))
            .find(|append| append.at(&["header", "key"]).and_then(Node::text) == Some(name));
        let overwrites = appended
            .is_some_and(|append| append.text_of("append_action") == Some("OVERWRITE_IF_EXISTS_OR_ADD"));
        if !overwrites {
            report.error(
                "execute-report",
                at,
                format!(
                    "the first filter of the execution listener does not set {name}: the filter can't tell how an execution ended, and every \
                     answer counts as unknown"
                ),
                format!("begin the chain with execution_report; {SEE}"),
            );
        }
    }
}

fn check_idle(chain: &Chain, longest: Duration, what: &str, report: &mut Report) {
    let idle =
        chain.manager.get("stream_idle_timeout").and_then(Node::seconds).unwrap_or(STREAM_IDLE_SECONDS);
    if idle > 0.0 && idle <= longest.as_secs_f64() {
        report.error(
            "stream-idle-timeout",
            (&chain.path, chain.manager.line),
            format!(
                "stream_idle_timeout of {idle} s is not above the execute_timeout of {} s: {what}",
                longest.as_secs_f64()
            ),
            "raise stream_idle_timeout above every execute_timeout",
        );
    }
}

fn check_same_routes(main: &Chain, execution: &Chain, report: &mut Report) {
    let hosts = |chain: &Chain| Some(chain.manager.at(&["route_config", "virtual_hosts"])?.to_json());
    if let (Some(main_hosts), Some(own)) = (hosts(main), hosts(execution))
        && main_hosts != own
    {
        report.warn(
            "execute-routes",
            (&execution.path, execution.manager.line),
            "the execution listener's routes are not those of the main listener: a detached request may go elsewhere than an inline one",
            "use one table for both (a YAML alias, or RDS)",
        );
    }
}
