//! How an execution ended, told from what Envoy says about a response or a closed stream.
//!
//! Only `response.code_details == "via_upstream"` is an upstream's response; everything else was made by this
//! Envoy. Details are those of `source/common/stream_info/` and `source/common/router/router.cc`; an unknown one
//! is a failure, since it proves nothing.

use crate::config::{OnFailure, Rule, StatusMeaning};
use crate::record::Reason;

/// What Envoy says when response headers reach the filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseFacts<'a> {
    /// `response.code_details`; empty when Envoy has none.
    pub code_details: &'a [u8],
    /// `upstream.request_attempt_count`.
    pub attempts: Option<u64>,
    /// The `:status`.
    pub status: u16,
}

/// What Envoy says when the stream is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClosingFacts<'a> {
    /// `response.code_details`; empty when Envoy has none.
    pub code_details: &'a [u8],
    /// `response.flags`, the bit mask of `CoreResponseFlag`.
    pub flags: u64,
}

/// What is known of a whole answer of a detached execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutionFacts<'a> {
    /// `response.code_details` in the execution listener; `None` when the answer was made on the way there.
    pub code_details: Option<&'a [u8]>,
    /// `upstream.request_attempt_count` there.
    pub attempts: Option<u64>,
    /// The `:status`.
    pub status: u16,
    /// The body.
    pub body: &'a [u8],
}

/// Who made a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResponseSource {
    /// The upstream, as far as this Envoy can tell.
    Upstream,
    /// This Envoy, and the request has provably not reached an upstream.
    NotSent,
    /// This Envoy, and the request may have run.
    Failed(Reason),
}

/// How an execution ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The upstream's response is kept and replayed.
    Completed,
    /// The upstream's status says that it did not process the request.
    NotProcessed,
    /// The request did not reach an upstream.
    NotSent,
    /// Something may have happened.
    Failed(Reason),
}

/// What becomes of the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimEnd {
    /// A completed record.
    Complete,
    /// A failed record.
    Fail(Reason),
    /// Given back.
    Release(Released),
}

/// Why a claim was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Released {
    /// A status that means "not processed".
    Status,
    /// The request did not reach an upstream.
    NotSent,
    /// A failure under `on_failure: release` or `on_unknown: release`.
    Failure,
}

/// The details of an upstream's response.
pub const VIA_UPSTREAM: &[u8] = b"via_upstream";

const EARLY_RESET: &[u8] = b"upstream_reset_before_response_started{";
const LATE_RESET: &[u8] = b"upstream_reset_after_response_started{";

/// Reset reasons of a connection pool that never bound the request to a connection.
const NEVER_CONNECTED: [&[u8]; 4] =
    [b"local_connection_failure", b"remote_connection_failure", b"connection_timeout", b"overflow"];

/// How the details of this filter's own replies begin.
const OWN_DETAILS: &[u8] = b"idempotency_";

/// The refusals after which this filter has surely forwarded nothing.
const NOTHING_RAN: [&[u8]; 11] = [
    b"missing_key",
    b"invalid_key",
    b"invalid_scope",
    b"body_timeout",
    b"payload_too_large",
    b"in_flight",
    b"mismatch",
    b"store_unavailable",
    b"store_full",
    b"execution_unavailable",
    b"misconfigured",
];

/// Details of replies made where no host was ever picked.
const NEVER_ROUTED: [&[u8]; 8] = [
    b"route_not_found",
    b"cluster_not_found",
    b"no_healthy_upstream",
    b"maintenance_mode",
    b"direct_response",
    b"drop_overload",
    b"unconditional_drop_overload",
    b"no_cluster_info",
];

const TIMEOUTS: [&[u8]; 8] = [
    b"response_timeout",
    b"upstream_per_try_timeout",
    b"upstream_per_try_idle_timeout",
    b"upstream_max_stream_duration_reached",
    b"max_duration_timeout",
    b"stream_idle_timeout",
    b"duration_timeout",
    b"request_overall_timeout",
];

/// `CoreResponseFlag::DownstreamConnectionTermination`, `DownstreamProtocolError` and `DownstreamRemoteReset`: a
/// connection that closed, one that Envoy closed because of what came on it, and a stream that was reset.
const FLAGS_CLIENT_GONE: u64 = 1 << 14 | 1 << 18 | 1 << 28;

/// What an HTTP/2 or HTTP/3 codec says of a stream that the client reset.
const RESETS_BY_CLIENT: [&[u8]; 2] = [b"http2.remote_reset", b"http3.remote_reset"];

/// Tells who made a response.
///
/// `trust_route_retries`: the operator vouches that retries below resend only what never reached the upstream, so
/// that a connect failure after several attempts still proves that nothing ran.
#[must_use]
pub fn response_source(facts: &ResponseFacts<'_>, trust_route_retries: bool) -> ResponseSource {
    let details = facts.code_details;
    if details == VIA_UPSTREAM {
        return ResponseSource::Upstream;
    }
    let attempts = facts.attempts.unwrap_or(0);
    let earlier_attempts_excluded = attempts <= 1 || trust_route_retries;
    if let Some(reason) = braced(details, EARLY_RESET) {
        // Without an attempt count this Envoy proves nothing about a reset.
        let proven =
            facts.attempts.is_some() && earlier_attempts_excluded && NEVER_CONNECTED.contains(&reason);
        return if proven { ResponseSource::NotSent } else { ResponseSource::Failed(Reason::Reset) };
    }
    if NEVER_ROUTED.contains(&details) {
        return if earlier_attempts_excluded {
            ResponseSource::NotSent
        } else {
            ResponseSource::Failed(Reason::Reset)
        };
    }
    if details.starts_with(LATE_RESET) {
        return ResponseSource::Failed(Reason::Truncated);
    }
    if attempts == 0 && !details.starts_with(b"upstream_") && details != b"response_timeout" {
        // A later filter's refusal, or a time-out in one: no upstream was ever tried.
        return ResponseSource::NotSent;
    }
    if TIMEOUTS.contains(&details) {
        return ResponseSource::Failed(Reason::Timeout);
    }
    if details.starts_with(b"upstream_") {
        return ResponseSource::Failed(Reason::Reset);
    }
    ResponseSource::Failed(Reason::Replaced)
}

/// Tells who made the answer of a detached execution.
///
/// The execution listener says how an execution ended. What comes without that was made by the callout's own router
/// on the way there (`source/common/router/router.cc`), or the listener does not say it; either way only a
/// connection that was never made proves that nothing ran.
#[must_use]
pub fn execution_source(facts: &ExecutionFacts<'_>, trust_route_retries: bool) -> ResponseSource {
    let Some(code_details) = facts.code_details else {
        return match facts.status {
            503 if is_never_connected(facts.body) => ResponseSource::NotSent,
            503 if facts.body.starts_with(ENVOY_RESET_TEXT) => ResponseSource::Failed(Reason::Reset),
            504 if ENVOY_TIMEOUT_TEXTS.iter().any(|text| facts.body.starts_with(text)) => {
                ResponseSource::Failed(Reason::Timeout)
            }
            _ => ResponseSource::Failed(Reason::Replaced),
        };
    };
    if let Some(kind) = code_details.strip_prefix(OWN_DETAILS) {
        // A hop of this filter in the execution listener's chain: it refused, or it says what became of the request.
        return if NOTHING_RAN.contains(&kind) { ResponseSource::NotSent } else { ResponseSource::Upstream };
    }
    let facts = ResponseFacts { code_details, attempts: facts.attempts, status: facts.status };
    response_source(&facts, trust_route_retries)
}

/// Tells why a forwarded request's stream closed before the end of a response was seen.
#[must_use]
pub fn closed_reason(facts: &ClosingFacts<'_>, response_started: bool) -> Reason {
    let details = facts.code_details;
    if details == b"internal_redirect" {
        return Reason::Redirected;
    }
    if facts.flags & FLAGS_CLIENT_GONE != 0
        || details.starts_with(b"downstream_")
        || RESETS_BY_CLIENT.contains(&details)
    {
        return Reason::ClientGone;
    }
    if response_started {
        return Reason::Truncated;
    }
    if TIMEOUTS.contains(&details) {
        return Reason::Timeout;
    }
    if details.starts_with(b"upstream_") {
        return Reason::Reset;
    }
    Reason::Replaced
}

/// What a whole upstream response means. `body` is its beginning, at least [`TELLTALE_BYTES`] where it has as many.
#[must_use]
pub fn upstream_outcome(rule: &Rule, status: u16, refusal: Option<&[u8]>, body: &[u8]) -> Outcome {
    match refusal {
        // The mark of another hop of this filter behind this one.
        Some(b"in-flight" | b"store-unavailable" | b"store-full" | b"execution-unavailable") => {
            return Outcome::NotProcessed;
        }
        Some(b"failed" | b"abandoned") => return Outcome::Failed(Reason::Intermediary),
        Some(_) | None => {}
    }
    match rule.statuses.meaning(status) {
        StatusMeaning::Replay => Outcome::Completed,
        StatusMeaning::Release if is_intermediary_failure(body) => Outcome::Failed(Reason::Intermediary),
        StatusMeaning::Release => Outcome::NotProcessed,
        StatusMeaning::Failure if is_intermediary_failure(body) => Outcome::Failed(Reason::Intermediary),
        StatusMeaning::Failure => Outcome::Failed(Reason::Status),
    }
}

/// What becomes of the claim under the rule.
#[must_use]
pub fn claim_end(rule: &Rule, outcome: Outcome) -> ClaimEnd {
    match outcome {
        Outcome::Completed => ClaimEnd::Complete,
        Outcome::NotProcessed => ClaimEnd::Release(Released::Status),
        Outcome::NotSent => ClaimEnd::Release(Released::NotSent),
        Outcome::Failed(reason) => {
            let policy = match reason {
                Reason::Status => rule.on_failure,
                Reason::Timeout
                | Reason::Reset
                | Reason::Truncated
                | Reason::ClientGone
                | Reason::Intermediary
                | Reason::Replaced
                | Reason::Redirected => rule.on_unknown,
            };
            match policy {
                OnFailure::Retain => ClaimEnd::Fail(reason),
                OnFailure::Release => ClaimEnd::Release(Released::Failure),
            }
        }
    }
}

/// How much of a body tells an intermediary's reply, in bytes.
pub const TELLTALE_BYTES: usize = 256;

const ENVOY_RESET_TEXT: &[u8] = b"upstream connect error or disconnect/reset before headers";
const ENVOY_RESET_REASON: &[u8] = b". reset reason: ";
const ENVOY_TIMEOUT_TEXTS: [&[u8]; 4] = [
    b"upstream request timeout",
    b"stream timeout",
    b"upstream max stream duration reached",
    b"downstream duration timeout",
];
const ENVOY_NEVER_CONNECTED: [&[u8]; 5] = [
    b"local connection failure",
    b"remote connection failure",
    b"connection timeout",
    b"connection failure",
    b"overflow",
];

/// Whether a body is the text of an Envoy behind this one that lost a request which may have run
/// (`source/common/router/router.cc`): a reset for another reason than a connection failure, a retried one, or a
/// time-out.
#[must_use]
pub fn is_intermediary_failure(body: &[u8]) -> bool {
    if ENVOY_TIMEOUT_TEXTS.iter().any(|text| body.starts_with(text)) {
        return true;
    }
    let Some(rest) = body.strip_prefix(ENVOY_RESET_TEXT) else { return false };
    // "retried and the latest reset reason: …" says nothing about the attempts before.
    !names_no_connection(rest)
}

/// Whether a body is the text of an Envoy's router that never had a connection.
fn is_never_connected(body: &[u8]) -> bool {
    body == b"no healthy upstream" || body.strip_prefix(ENVOY_RESET_TEXT).is_some_and(names_no_connection)
}

fn names_no_connection(rest: &[u8]) -> bool {
    let Some(reason) = rest.strip_prefix(ENVOY_RESET_REASON) else { return false };
    ENVOY_NEVER_CONNECTED.iter().any(|known| {
        reason.strip_prefix(*known).is_some_and(|after| after.is_empty() || after.starts_with(b", "))
    })
}

/// Whether a head leaves open who made the response: `server` as Envoy writes it (Istio: `istio-envoy`).
#[must_use]
pub fn may_be_intermediary(server: Option<&[u8]>, content_type: Option<&[u8]>) -> bool {
    // A mesh's proxies call themselves "istio-envoy".
    server.is_some_and(|value| value.ends_with(b"envoy"))
        && content_type.is_some_and(|value| value.starts_with(b"text/plain"))
}

/// Whether the beginning of a body may still become the text of an Envoy.
#[must_use]
pub fn may_become_intermediary(body: &[u8]) -> bool {
    std::iter::once(&ENVOY_RESET_TEXT).chain(&ENVOY_TIMEOUT_TEXTS).any(|text| text.starts_with(body))
}

/// The word between the prefix's brace and the next `|` or `}`.
fn braced<'a>(details: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    let rest = details.strip_prefix(prefix)?;
    let end = rest.iter().position(|byte| matches!(byte, b'|' | b'}'))?;
    rest.get(..end)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::fixture;

    fn source(details: &str, attempts: Option<u64>) -> ResponseSource {
        source_trusting(details, attempts, false)
    }

    fn source_trusting(details: &str, attempts: Option<u64>, trust: bool) -> ResponseSource {
        response_source(&ResponseFacts { code_details: details.as_bytes(), attempts, status: 503 }, trust)
    }

    #[test]
    fn only_via_upstream_is_the_upstreams_response() {
        assert_eq!(source("via_upstream", Some(1)), ResponseSource::Upstream);
        assert_eq!(source("via_upstream_but_not_quite", Some(1)), ResponseSource::Failed(Reason::Replaced));
        assert_ne!(source("", Some(1)), ResponseSource::Upstream);
    }

    #[test]
    fn a_connect_failure_proves_that_nothing_was_sent_only_at_the_first_attempt() {
        let details =
            "upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_111}";
        assert_eq!(source(details, Some(1)), ResponseSource::NotSent);
        assert_eq!(source(details, Some(2)), ResponseSource::Failed(Reason::Reset));
        assert_eq!(source(details, None), ResponseSource::Failed(Reason::Reset));
        assert_eq!(source_trusting(details, Some(3), true), ResponseSource::NotSent);
    }

    #[test]
    fn a_reset_for_another_reason_proves_nothing() {
        for reason in [
            "connection_termination",
            "remote_reset",
            "protocol_error",
            "remote_connection_failure_of_a_kind",
        ] {
            let details = format!("upstream_reset_before_response_started{{{reason}}}");
            assert_eq!(source(&details, Some(1)), ResponseSource::Failed(Reason::Reset), "{reason}");
            assert_eq!(
                source_trusting(&details, Some(1), true),
                ResponseSource::Failed(Reason::Reset),
                "{reason}"
            );
        }
        let unclosed = "upstream_reset_before_response_started{overflow";
        assert_eq!(source(unclosed, Some(1)), ResponseSource::Failed(Reason::Reset));
        assert_eq!(
            source("upstream_reset_before_response_started{overflow}", Some(1)),
            ResponseSource::NotSent
        );
    }

    #[test]
    fn without_any_attempt_nothing_was_sent() {
        for details in ["route_not_found", "no_healthy_upstream", "ext_authz_denied", "direct_response"] {
            assert_eq!(source(details, None), ResponseSource::NotSent, "{details}");
            assert_eq!(source(details, Some(0)), ResponseSource::NotSent, "{details}");
        }
        assert_eq!(source("no_healthy_upstream", Some(2)), ResponseSource::Failed(Reason::Reset));
        assert_eq!(source_trusting("no_healthy_upstream", Some(2), true), ResponseSource::NotSent);
    }

    #[test]
    fn timeouts_and_replacements_after_an_attempt_are_failures() {
        assert_eq!(source("response_timeout", Some(1)), ResponseSource::Failed(Reason::Timeout));
        assert_eq!(source("response_timeout", None), ResponseSource::Failed(Reason::Timeout));
        assert_eq!(source("stream_idle_timeout", Some(1)), ResponseSource::Failed(Reason::Timeout));
        assert_eq!(source("stream_idle_timeout", None), ResponseSource::NotSent);
        assert_eq!(source("lua_response", Some(1)), ResponseSource::Failed(Reason::Replaced));
        assert_eq!(source("never_heard_of", Some(1)), ResponseSource::Failed(Reason::Replaced));
    }

    #[test]
    fn a_closed_stream_says_why() {
        let closed = |details: &str, flags, started| {
            closed_reason(&ClosingFacts { code_details: details.as_bytes(), flags }, started)
        };
        assert_eq!(closed("downstream_remote_disconnect", 0x4000, false), Reason::ClientGone);
        assert_eq!(closed("http2.remote_reset", 0x4000, true), Reason::ClientGone);
        assert_eq!(closed("http2.remote_reset", 0, false), Reason::ClientGone);
        assert_eq!(closed("http2.remote_reset", 0x1000_0000, false), Reason::ClientGone);
        assert_eq!(closed("codec_error", 0x4_0000, false), Reason::ClientGone);
        assert_eq!(closed("max_duration_timeout", 0, false), Reason::Timeout);
        assert_eq!(closed("upstream_max_stream_duration_reached", 0x8_0000, false), Reason::Timeout);
        assert_eq!(
            closed("upstream_reset_after_response_started{connection_termination}", 0, true),
            Reason::Truncated
        );
        assert_eq!(closed("response_timeout", 0x4, false), Reason::Timeout);
        assert_eq!(closed("internal_redirect", 0, false), Reason::Redirected);
        assert_eq!(closed("", 0, false), Reason::Replaced);
        assert_eq!(closed("", 0, true), Reason::Truncated);
    }

    #[test]
    fn a_proxys_own_text_behind_us_means_it_may_have_run() {
        for (body, expected) in [
            (
                "upstream connect error or disconnect/reset before headers. reset reason: connection termination",
                true,
            ),
            ("upstream connect error or disconnect/reset before headers. reset reason: remote reset", true),
            (
                "upstream connect error or disconnect/reset before headers. retried and the latest reset reason: \
                 remote connection failure",
                true,
            ),
            (
                "upstream connect error or disconnect/reset before headers. reset reason: remote connection failure, \
                 transport failure reason: delayed connect error: 111",
                false,
            ),
            ("upstream connect error or disconnect/reset before headers. reset reason: overflow", false),
            ("upstream connect error or disconnect/reset before headers. reset reason: overflowing", true),
            ("upstream connect error or disconnect/reset before headers", true),
            ("upstream request timeout", true),
            ("upstream max stream duration reached", true),
            ("downstream duration timeout", true),
            ("no healthy upstream", false),
            ("{\"error\":\"busy\"}", false),
            ("", false),
        ] {
            assert_eq!(is_intermediary_failure(body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn the_beginning_of_a_proxys_text_leaves_open_what_it_was() {
        for body in
            ["", "upstream", "upstream connect error or disconnect/reset before headers", "stream time"]
        {
            assert!(may_become_intermediary(body.as_bytes()), "{body}");
        }
        for body in ["busy", "upstream is busy", "upstream request timeout!"] {
            assert!(!may_become_intermediary(body.as_bytes()), "{body}");
        }
        let may_be =
            |server: &str, kind: &str| may_be_intermediary(Some(server.as_bytes()), Some(kind.as_bytes()));
        assert!(may_be("envoy", "text/plain") && may_be("istio-envoy", "text/plain; charset=utf-8"));
        assert!(!may_be("nginx", "text/plain") && !may_be("envoy", "application/json"));
        assert!(!may_be_intermediary(None, None));
    }

    #[test]
    fn an_upstreams_status_decides_by_the_rule() {
        let rule = fixture::rule();
        let outcome = |status, refusal: Option<&str>, body: &str| {
            upstream_outcome(&rule, status, refusal.map(str::as_bytes), body.as_bytes())
        };
        assert_eq!(outcome(201, None, ""), Outcome::Completed);
        assert_eq!(outcome(302, None, ""), Outcome::Completed);
        assert_eq!(outcome(404, None, ""), Outcome::Completed);
        assert_eq!(outcome(429, None, ""), Outcome::NotProcessed);
        assert_eq!(outcome(503, None, "busy"), Outcome::NotProcessed);
        assert_eq!(outcome(500, None, ""), Outcome::Failed(Reason::Status));
        assert_eq!(outcome(504, None, "upstream request timeout"), Outcome::Failed(Reason::Intermediary));
        assert_eq!(
            outcome(
                503,
                None,
                "upstream connect error or disconnect/reset before headers. reset reason: remote reset"
            ),
            Outcome::Failed(Reason::Intermediary)
        );
        assert_eq!(outcome(409, Some("in-flight"), ""), Outcome::NotProcessed);
        assert_eq!(outcome(503, Some("store-unavailable"), ""), Outcome::NotProcessed);
        assert_eq!(outcome(424, Some("failed"), ""), Outcome::Failed(Reason::Intermediary));
        assert_eq!(outcome(424, Some("abandoned"), ""), Outcome::Failed(Reason::Intermediary));
        assert_eq!(outcome(422, Some("mismatch"), ""), Outcome::Completed);
    }

    #[test]
    fn failures_by_status_and_unknown_outcomes_have_a_policy_each() {
        let mut rule = fixture::rule();
        rule.on_failure = OnFailure::Release;
        assert_eq!(claim_end(&rule, Outcome::Failed(Reason::Status)), ClaimEnd::Release(Released::Failure));
        for reason in Reason::ALL.into_iter().filter(|reason| *reason != Reason::Status) {
            assert_eq!(claim_end(&rule, Outcome::Failed(reason)), ClaimEnd::Fail(reason));
        }
        rule.on_failure = OnFailure::Retain;
        rule.on_unknown = OnFailure::Release;
        assert_eq!(claim_end(&rule, Outcome::Failed(Reason::Status)), ClaimEnd::Fail(Reason::Status));
        assert_eq!(
            claim_end(&rule, Outcome::Failed(Reason::ClientGone)),
            ClaimEnd::Release(Released::Failure)
        );
        assert_eq!(claim_end(&rule, Outcome::NotSent), ClaimEnd::Release(Released::NotSent));
    }
}
