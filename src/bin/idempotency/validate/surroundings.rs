//! How the filter is loaded, and what its connection manager and listener do to a request.

use idempotency::config::Config;

use super::{Report, active};
use crate::manifest::{Filter, Host, Manifest, Node};

/// What Envoy holds of a request unless it is told otherwise.
const ENVOYS_BUFFER: u64 = 1024 * 1024;

pub fn check(manifest: &Manifest, filter: &Filter, config: &Config, report: &mut Report) {
    let at = (filter.path.as_str(), filter.settings.line);
    check_stop_iteration(filter, config, at, report);
    check_failure_policy(filter, at, report);
    let Some(chain) = filter.chain.and_then(|(chain, _)| manifest.chains.get(chain)) else { return };
    let at = (chain.path.as_str(), chain.manager.line);
    let largest = active(config).map(|rule| rule.max_request_body_bytes).max().unwrap_or(0);
    if let Some(listener) = &chain.listener {
        let room = listener.node.get("per_connection_buffer_limit_bytes").and_then(Node::integer);
        if room.unwrap_or(ENVOYS_BUFFER) < largest {
            report.error(
                "buffer-limit",
                (&listener.path, listener.node.line),
                format!(
                    "the listener holds {} bytes of a request, and max_request_body_bytes is {largest}: Envoy answers 413 \
                     before the filter can",
                    room.unwrap_or(ENVOYS_BUFFER)
                ),
                "raise per_connection_buffer_limit_bytes above every max_request_body_bytes",
            );
        }
    }
    // A list of filters by itself says nothing of its connection manager.
    let is_manager = chain.manager.get("stat_prefix").is_some() || chain.manager.get("@type").is_some();
    for setting in ["normalize_path", "merge_slashes"] {
        if is_manager && !chain.manager.flag(setting) {
            report.warn(
                "path-normalization",
                at,
                format!("{setting} is not set: one path has several spellings, and a request can step around a rule's path"),
                format!("set {setting}: true"),
            );
        }
    }
}

fn check_stop_iteration(filter: &Filter, config: &Config, at: (&str, usize), report: &mut Report) {
    let Some(rule) = active(config).find(|rule| rule.fingerprint.body) else { return };
    let name = &rule.name;
    match filter.host {
        Host::Envoy if filter.settings.flag("allow_on_headers_stop_iteration") => {}
        Host::Envoy => report.error(
            "stop-iteration",
            at,
            format!(
                "allow_on_headers_stop_iteration is not true, so the filter can't hold a request for its body, which rule \
                 {name} needs: covered requests with a body are refused with 408"
            ),
            "set allow_on_headers_stop_iteration: true beside vm_config (Envoy 1.35 or later)",
        ),
        Host::WasmPlugin | Host::ExtensionPolicy => report.error(
            "stop-iteration",
            at,
            format!(
                "a resource of this kind can't set allow_on_headers_stop_iteration, which rule {name} needs for the body: \
                 covered requests with a body are refused with 408"
            ),
            "put the filter in with an EnvoyFilter (Istio) or an EnvoyPatchPolicy (Envoy Gateway), or set fingerprint to \
             {\"body\": false, \"headers\": [\"content-digest\", \"content-length\"]}",
        ),
    }
}

fn check_failure_policy(filter: &Filter, at: (&str, usize), report: &mut Report) {
    let settings = &filter.settings;
    let policy = match filter.host {
        Host::Envoy => settings.text_of("failure_policy"),
        Host::WasmPlugin => settings.text_of("failStrategy"),
        Host::ExtensionPolicy => None,
    };
    let is_open = policy == Some("FAIL_OPEN") || settings.flag("fail_open");
    if is_open {
        report.error(
            "fail-open",
            at,
            "requests run unprotected while the filter's VM is down",
            "set failure_policy: FAIL_RELOAD (Istio: failStrategy: FAIL_RELOAD; Envoy Gateway: failOpen: false)",
        );
    } else if policy != Some("FAIL_RELOAD") && filter.host != Host::ExtensionPolicy {
        report.warn(
            "failure-policy",
            at,
            "a worker whose VM trapped refuses every request until Envoy is restarted",
            "set failure_policy: FAIL_RELOAD, and the worker gets a new VM",
        );
    }
}
