//! What stands before and after the filter in its chain.

use std::collections::BTreeSet;

use idempotency::config::{Config, Scope, ScopePart, StoreConfig};

use super::{Report, active};
use crate::manifest::{Chain, Filter, Host, Manifest, Node};

/// Filters that say whether a caller may: a replay behind them can't outlive the grant.
const GATES: [&str; 9] = [
    "JwtAuthentication",
    "ExtAuthz",
    "ExtAuthzPerRoute",
    "RBAC",
    "OAuth2",
    "BasicAuth",
    "ApiKeyAuth",
    "CsrfPolicy",
    "GcpAuthnFilterConfig",
];
const RATE_LIMITS: [&str; 3] = ["RateLimit", "LocalRateLimit", "RateLimitQuotaFilterConfig"];

pub fn check(manifest: &Manifest, filter: &Filter, config: &Config, report: &mut Report) {
    check_insertion(filter, report);
    let Some((chain, place)) = filter.chain else { return };
    let Some(chain) = manifest.chains.get(chain) else { return };
    let kinds = chain.kinds();
    let (before, rest) = kinds.split_at_checked(place).unwrap_or((&kinds, &[]));
    let after = rest.get(1..).unwrap_or_default();
    let at = (filter.path.as_str(), filter.settings.line);
    if before.iter().any(|kind| kind == "Router") {
        report.error(
            "filter-order",
            at,
            "the filter stands behind the router, and never runs",
            "put it before the router",
        );
    }
    for kind in after.iter().filter(|kind| GATES.contains(&kind.as_str())) {
        report.error(
            "filter-order",
            at,
            format!(
                "{kind} stands behind the filter: a replay would be given to a caller whose grant was revoked"
            ),
            "put authentication and authorization before the idempotency filter",
        );
    }
    for kind in after.iter().filter(|kind| *kind == "Compressor") {
        report.warn(
            "filter-order",
            at,
            format!("{kind} stands behind the filter: what is kept is compressed as the first client asked, and replayed so to every other"),
            "put the compressor before the idempotency filter",
        );
    }
    for kind in after.iter().filter(|kind| *kind == "Cors" || *kind == "CorsPolicy") {
        report.warn(
            "filter-order",
            at,
            format!("{kind} stands behind the filter: refusals and replays have no CORS header lines, and a browser can't read them"),
            "put CORS before the idempotency filter",
        );
    }
    for kind in before.iter().filter(|kind| RATE_LIMITS.contains(&kind.as_str())) {
        report.warn(
            "filter-order",
            at,
            format!("{kind} stands before the filter: replays are counted as if they reached the upstream"),
            "put the rate limit of the upstream behind the idempotency filter; a limit per caller may stay in front",
        );
    }
    check_scope_sources(chain, before, at, config, report);
}

fn check_insertion(filter: &Filter, report: &mut Report) {
    let at = (filter.path.as_str(), filter.settings.line);
    let phase = filter.settings.text_of("phase");
    let is_first = filter.patch_operation.as_deref() == Some("INSERT_FIRST")
        || (filter.host == Host::WasmPlugin && phase == Some("AUTHN"));
    if is_first && filter.chain.is_none() {
        report.error(
            "filter-order",
            at,
            "the filter is put before authentication and authorization: a replay would be given to a caller whose grant was revoked",
            "insert it before the router (INSERT_BEFORE with subFilter envoy.filters.http.router), or with phase: STATS",
        );
    }
}

/// A verified claim needs somebody who verifies it.
fn check_scope_sources(
    chain: &Chain,
    before: &[String],
    at: (&str, usize),
    config: &Config,
    report: &mut Report,
) {
    let parts = active(config).flat_map(|rule| match &rule.scope {
        Scope::Shared => &[][..],
        Scope::Parts(parts) => parts.as_slice(),
    });
    let wanted: BTreeSet<&str> = parts
        .filter_map(|part| match part {
            ScopePart::JwtClaim { metadata_key, .. } => Some(metadata_key.as_str()),
            ScopePart::Header(_)
            | ScopePart::Authorization
            | ScopePart::PeerCertificate(_)
            | ScopePart::Property(_)
            | ScopePart::Constant(_) => None,
        })
        .collect();
    if wanted.is_empty() {
        return;
    }
    if !before.iter().any(|kind| kind == "JwtAuthentication") {
        report.error(
            "scope-jwt",
            at,
            "a scope is made of a verified claim, and no jwt_authn filter stands before this one: every covered request is refused with 400",
            "put envoy.filters.http.jwt_authn before the idempotency filter",
        );
        return;
    }
    let given: BTreeSet<&str> = chain
        .manager
        .list("http_filters")
        .iter()
        .filter_map(|filter| filter.get("typed_config")?.get("providers"))
        .flat_map(Node::members)
        .filter_map(|(_, provider)| provider.text_of("payload_in_metadata"))
        .collect();
    for key in wanted.difference(&given) {
        report.error(
            "scope-jwt",
            at,
            format!("no provider of jwt_authn has payload_in_metadata: {key}, which the scope's metadata_key names"),
            format!("set payload_in_metadata: {key}"),
        );
    }
}

/// Two filters on one request must not find each other's claims.
pub fn check_pairs(loaded: &[(&Filter, Config)], report: &mut Report) {
    for (index, (filter, config)) in loaded.iter().enumerate() {
        for (other, other_config) in loaded.iter().take(index) {
            let (StoreConfig::Redis(one), StoreConfig::Redis(two)) = (&config.store, &other_config.store)
            else {
                continue;
            };
            let same_chain = filter.chain.map(|(chain, _)| chain) == other.chain.map(|(chain, _)| chain);
            if filter.chain.is_some() && same_chain && one.key_prefix == two.key_prefix {
                report.error(
                    "same-prefix",
                    (&filter.path, filter.settings.line),
                    format!(
                        "two filters in one chain share the key prefix \"{}\": the second finds the claim of the first, and \
                         every request is refused with 409",
                        one.key_prefix
                    ),
                    "give each its own store.redis.key_prefix",
                );
            }
        }
    }
}
