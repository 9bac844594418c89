//! What an operator should hear about a configuration that is valid.

use std::time::Duration;

use super::check::{CAPTURED_BYTES, MAX_REQUEST_BODY_BYTES, MAX_RESPONSE_BODY_BYTES, in_rule};
use super::fields::Field;
use super::problem::Problems;
use super::raw::{RawRule, ReplayStatus};
use super::store::RawRedis;
use super::{CertificateField, Dialect, InFlight, OnFailure, OnStoreError, Scope, ScopePart};

/// Request headers that clients, proxies or Envoy itself set anew for each attempt.
const NEW_EACH_ATTEMPT: [&str; 5] =
    ["x-request-id", "traceparent", "tracestate", "x-envoy-attempt-count", "date"];

/// Requests that wait longer than this for a store are taken for lost by many clients.
const LONG_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) fn warn_about_redis(
    redis: &RawRedis,
    on_store_error: &Field<OnStoreError>,
    problems: &mut Problems,
) {
    if let Some((timeout, at)) = redis.timeout.located()
        && *timeout > LONG_TIMEOUT
    {
        problems.warn(
            at,
            "above \"2s\": while Redis doesn't answer, each covered request is held for so long, \
             and so is the end of each response",
        );
    }
    if let Some((gateway, at)) = redis.gateway.located()
        && gateway.dialect == Dialect::Webdis
    {
        problems.warn(
            at,
            "Webdis does not say its version, and before 0.1.20 it can hand one client another's reply: \
             run 0.1.20 or newer",
        );
    }
    if let Some((OnStoreError::Allow, at)) = on_store_error.located() {
        problems.warn(
            at,
            "\"allow\" forwards requests unprotected while Redis is down, and a retry then runs again",
        );
    }
}

/// Whoever sets a time-out expects that somebody waits.
pub(super) fn warn_about_waiting(rules: &[RawRule], problems: &mut Problems) {
    let waits =
        |rule: &RawRule| matches!(rule.in_flight.known_or(&InFlight::Reject), Some((InFlight::Wait, _)));
    let any_waits = rules.iter().any(waits);
    for rule in rules.iter().filter(|rule| !waits(rule)) {
        if let Some((_, at)) = rule.wait_timeout.located()
            && (in_rule(at) || !any_waits)
        {
            problems.warn(at, "has no effect without in_flight \"wait\"");
        }
    }
}

pub(super) fn warn_about_rule(rule: &RawRule, problems: &mut Problems) {
    if let Some((name, at)) = rule.header.located()
        && NEW_EACH_ATTEMPT.contains(&name.as_str())
    {
        problems.warn(
            at,
            format_args!("{name} is usually new in each attempt, and every retry would then be a new key"),
        );
    }
    warn_about_scope(rule, problems);
    warn_about_fingerprint(rule, problems);
    if let Some((bytes, at)) = rule.max_request_body_bytes.located()
        && *bytes > MAX_REQUEST_BODY_BYTES
    {
        problems.warn(
            at,
            "Envoy holds 1 MiB of a request by default: raise per_connection_buffer_limit_bytes, \
             or request_body_buffer_limit of the route, above this value",
        );
    }
    warn_about_statuses(rule, problems);
    for (field, name) in [(&rule.on_failure, "on_failure"), (&rule.on_unknown, "on_unknown")] {
        if let Some((OnFailure::Release, at)) = field.located() {
            problems.warn(
                at,
                format_args!(
                    "{name} \"release\" lets a retry run again: only where a second run is harmless"
                ),
            );
        }
    }
}

fn warn_about_scope(rule: &RawRule, problems: &mut Problems) {
    let Some((scope, at)) = rule.scope.located() else { return };
    let parts = match scope {
        Scope::Shared => &[][..],
        Scope::Parts(parts) => parts.as_slice(),
    };
    if parts.iter().all(|part| matches!(part, ScopePart::Constant(_))) {
        problems.warn(
            at,
            "all callers share one key space: one caller's key is everybody's, and so is its response",
        );
    }
    for part in parts {
        match part {
            ScopePart::Authorization => problems.warn(
                at,
                "the authorization header changes when the credential does, and a retry then runs again: \
                 prefer a stable claim, such as {\"jwt_claim\": \"sub\", \"metadata_key\": \"…\"}",
            ),
            ScopePart::PeerCertificate(CertificateField::Sha256) => problems.warn(
                at,
                "the certificate's digest changes when it is renewed, and a retry then runs again: \
                 prefer \"uri_san\" or \"subject\"",
            ),
            ScopePart::Header(name) if NEW_EACH_ATTEMPT.contains(&name.as_str()) => {
                problems.warn(
                    at,
                    format_args!("{name} is usually new in each attempt, and a retry then runs again"),
                );
            }
            ScopePart::Header(_)
            | ScopePart::JwtClaim { .. }
            | ScopePart::PeerCertificate(CertificateField::UriSan | CertificateField::Subject)
            | ScopePart::Property(_)
            | ScopePart::Constant(_) => {}
        }
    }
}

fn warn_about_fingerprint(rule: &RawRule, problems: &mut Problems) {
    let headers = rule.fingerprint.headers.located();
    if let Some((false, at)) = rule.fingerprint.body.located()
        && headers.is_none_or(|(names, _)| names.is_empty())
    {
        problems.warn(
            at,
            "requests with different bodies count as the same: \
             name content-digest and content-length in fingerprint.headers where clients send them",
        );
    }
    let Some((names, at)) = headers else { return };
    for name in names.iter().filter(|name| NEW_EACH_ATTEMPT.contains(&name.as_str())) {
        problems.warn(
            at,
            format_args!("{name} is usually new in each attempt, and every retry would then be a mismatch"),
        );
    }
}

fn warn_about_statuses(rule: &RawRule, problems: &mut Problems) {
    if let Some((statuses, at)) = rule.replay_statuses.located() {
        let success = |status: &ReplayStatus| match status {
            ReplayStatus::Class(class) => *class == 2,
            ReplayStatus::Single(status) => (200..300).contains(status),
        };
        if !statuses.iter().any(success) {
            problems
                .warn(at, "no status of 2xx is replayed: a retry after a success is refused, or runs again");
        }
    }
    if let Some((statuses, at)) = rule.release_statuses.located() {
        for status in statuses.iter().filter(|status| **status < 400) {
            problems
                .warn(at, format_args!("{status} would count as not processed, and a retry then runs again"));
        }
    }
}

/// A response that has no room among all captures is never kept.
pub(super) fn warn_about_limits(captured_bytes: &Field<u64>, rules: &[RawRule], problems: &mut Problems) {
    let Some((captured, captured_at)) = captured_bytes.known_or(&CAPTURED_BYTES) else { return };
    for rule in rules {
        let Some((body, body_at)) = rule.max_response_body_bytes.known_or(&MAX_RESPONSE_BODY_BYTES) else {
            continue;
        };
        if let (true, Some(at)) = (body > captured, body_at.or(captured_at)) {
            problems.warn(
                at,
                format_args!("a response of max_response_body_bytes {body} has no room in limits.captured_bytes {captured}"),
            );
        }
    }
}
