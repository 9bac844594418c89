//! The filter's refusals as problem details (RFC 9457), one stable type per meaning.

use serde::Serialize;

use super::LocalReply;
use crate::config::Statuses;
use crate::headers::serialize_pairs;
use crate::record::Reason;

/// Marks a refusal for an outer hop of this filter, which must not keep it as the upstream's answer.
pub const REFUSAL_HEADER: &str = "x-idempotency-refusal";

/// A refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// The rule requires a key.
    MissingKey {
        /// The key header.
        header: String,
    },
    /// The key header breaks a rule, which the text names.
    InvalidKey {
        /// What is wrong, without any byte of the key.
        why: String,
    },
    /// The caller could not be told.
    InvalidScope {
        /// What is wrong, without any byte of the scope.
        why: String,
    },
    /// The body did not come.
    BodyTimeout,
    /// The body is too large.
    PayloadTooLarge {
        /// The limit in bytes.
        limit: u64,
    },
    /// Another request with this key is being executed.
    InFlight {
        /// When to come again, in seconds.
        retry_after: u64,
    },
    /// The key was used for another request.
    Mismatch,
    /// The execution failed.
    Failed {
        /// How.
        reason: Reason,
    },
    /// The execution was abandoned.
    Abandoned,
    /// Executed, but the response was not kept.
    ResponseNotKept {
        /// The status it had.
        status: u16,
        /// Its `Location` and `ETag`.
        headers: Vec<(Vec<u8>, Vec<u8>)>,
    },
    /// The store gave no answer.
    StoreUnavailable,
    /// The store has no room.
    StoreFull,
    /// The request can't be executed, and was not.
    ExecutionUnavailable,
    /// The detached execution gave no answer.
    NoAnswer {
        /// Why.
        reason: Reason,
    },
    /// The route names an unknown rule.
    Misconfigured,
}

#[derive(Serialize)]
struct Body<'a> {
    r#type: &'a str,
    title: &'a str,
    status: u16,
    detail: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    original_status: Option<u16>,
}

impl Problem {
    /// The last segment of the type URI, also the value of [`REFUSAL_HEADER`].
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::MissingKey { .. } => "missing-key",
            Self::InvalidKey { .. } => "invalid-key",
            Self::InvalidScope { .. } => "invalid-scope",
            Self::BodyTimeout => "body-timeout",
            Self::PayloadTooLarge { .. } => "payload-too-large",
            Self::InFlight { .. } => "in-flight",
            Self::Mismatch => "mismatch",
            Self::Failed { .. } => "failed",
            Self::Abandoned => "abandoned",
            Self::ResponseNotKept { .. } => "response-not-kept",
            Self::StoreUnavailable => "store-unavailable",
            Self::StoreFull => "store-full",
            Self::ExecutionUnavailable => "execution-unavailable",
            // What a retry will be told.
            Self::NoAnswer { .. } => "failed",
            Self::Misconfigured => "misconfigured",
        }
    }

    /// `response.code_details` of the refusal.
    #[must_use]
    pub const fn code_details(&self) -> &'static str {
        match self {
            Self::MissingKey { .. } => "idempotency_missing_key",
            Self::InvalidKey { .. } => "idempotency_invalid_key",
            Self::InvalidScope { .. } => "idempotency_invalid_scope",
            Self::BodyTimeout => "idempotency_body_timeout",
            Self::PayloadTooLarge { .. } => "idempotency_payload_too_large",
            Self::InFlight { .. } => "idempotency_in_flight",
            Self::Mismatch => "idempotency_mismatch",
            Self::Failed { .. } => "idempotency_failed",
            Self::Abandoned => "idempotency_abandoned",
            Self::ResponseNotKept { .. } => "idempotency_response_not_kept",
            Self::StoreUnavailable => "idempotency_store_unavailable",
            Self::StoreFull => "idempotency_store_full",
            Self::ExecutionUnavailable => "idempotency_execution_unavailable",
            Self::NoAnswer { .. } => "idempotency_no_answer",
            Self::Misconfigured => "idempotency_misconfigured",
        }
    }

    /// A short summary, the same for every occurrence.
    #[must_use]
    pub const fn title(&self) -> &'static str {
        match self {
            Self::MissingKey { .. } => "An idempotency key is required",
            Self::InvalidKey { .. } => "The idempotency key is not valid",
            Self::InvalidScope { .. } => "The caller of this request could not be determined",
            Self::BodyTimeout => "The request body did not arrive in time",
            Self::PayloadTooLarge { .. } => "The request body is too large",
            Self::InFlight { .. } => "A request with this idempotency key is still being executed",
            Self::Mismatch => "This idempotency key was used for a different request",
            Self::Failed { .. } | Self::NoAnswer { .. } => "The request with this idempotency key failed",
            Self::Abandoned => "The request with this idempotency key was abandoned",
            Self::ResponseNotKept { .. } => "The request was executed, but its response was not kept",
            Self::StoreUnavailable => "The idempotency store is unavailable",
            Self::StoreFull => "The idempotency store is full",
            Self::ExecutionUnavailable => "The request can't be executed at the moment",
            Self::Misconfigured => "This route is misconfigured",
        }
    }

    /// The configured status.
    #[must_use]
    pub const fn status(&self, statuses: &Statuses) -> u16 {
        match self {
            Self::MissingKey { .. } => statuses.missing_key,
            Self::InvalidKey { .. } => statuses.invalid_key,
            Self::InvalidScope { .. } => statuses.invalid_scope,
            Self::BodyTimeout => statuses.body_timeout,
            Self::PayloadTooLarge { .. } => statuses.payload_too_large,
            Self::InFlight { .. } => statuses.in_flight,
            Self::Mismatch => statuses.mismatch,
            Self::Failed { .. } => statuses.failed,
            Self::Abandoned => statuses.abandoned,
            Self::ResponseNotKept { .. } => statuses.response_not_kept,
            Self::StoreUnavailable => statuses.store_unavailable,
            Self::StoreFull => statuses.store_full,
            Self::ExecutionUnavailable => statuses.execution_unavailable,
            // As Envoy answers by itself.
            Self::NoAnswer { reason: Reason::Timeout } => 504,
            Self::NoAnswer { .. } => 502,
            Self::Misconfigured => 500,
        }
    }

    fn detail(&self) -> String {
        match self {
            Self::MissingKey { header } => format!(
                "Send the header {header} with a value that is unique to this operation, such as a UUID, and send \
                 the same value again when you retry it."
            ),
            Self::InvalidKey { why } => format!("{why}. Nothing was executed."),
            Self::InvalidScope { why } => format!("{why}. Nothing was executed."),
            Self::BodyTimeout => "Nothing was executed. Send the request again with the same key.".to_owned(),
            Self::PayloadTooLarge { limit } => {
                format!("At most {limit} bytes are accepted here. Nothing was executed.")
            }
            Self::InFlight { retry_after } => format!(
                "Send the same request again in {retry_after} s: you will get the response of the execution that \
                 is under way."
            ),
            Self::Mismatch => "The method, the host, the path, the query, the body or a header that counts differs \
                               from the request this key was first used for. Use a new key for a new request; \
                               nothing was executed."
                .to_owned(),
            Self::Failed { reason } | Self::NoAnswer { reason } => format!(
                "Its outcome is {}. It may have taken effect and will not be executed again under this key. Find \
                 out what happened before you use a new key.",
                match reason {
                    Reason::Status => "an error response of the service",
                    Reason::Timeout => "unknown: the service did not answer in time",
                    Reason::Reset => "unknown: the connection to the service was reset",
                    Reason::Truncated => "unknown: the service's response was cut off",
                    Reason::ClientGone => "unknown: the client went away before the service had answered",
                    Reason::Intermediary => "unknown: a proxy in front of the service lost it",
                    Reason::Replaced => "unknown: the service's response was replaced on its way",
                    Reason::Redirected => "unknown: it was redirected inside the proxy",
                }
            ),
            Self::Abandoned => "The proxy that executed it stopped before the outcome was known. It may have taken \
                                effect and will not be executed again under this key. Find out what happened \
                                before you use a new key."
                .to_owned(),
            Self::ResponseNotKept { status, .. } => format!(
                "The service answered {status}; the response was too large, streamed, or had trailers. It will not \
                 be executed again under this key. Read the result from the service."
            ),
            Self::StoreUnavailable => {
                "Nothing was forwarded. Send the request again with the same key.".to_owned()
            }
            Self::StoreFull => {
                "Nothing was forwarded. Send the request again later with the same key.".to_owned()
            }
            Self::ExecutionUnavailable => {
                "Nothing was executed. Send the request again later with the same key.".to_owned()
            }
            Self::Misconfigured => {
                "The route's metadata names an idempotency rule that does not exist. Nothing was forwarded."
                    .to_owned()
            }
        }
    }

    /// The whole reply.
    #[must_use]
    pub fn into_reply(self, statuses: &Statuses, type_base: &str) -> LocalReply {
        let status = self.status(statuses);
        let kind = self.kind();
        let type_uri = format!("{type_base}{kind}");
        let detail = self.detail();
        let reason = match &self {
            Self::Failed { reason } | Self::NoAnswer { reason } => Some(reason.as_str()),
            Self::Abandoned => Some("abandoned"),
            Self::MissingKey { .. }
            | Self::InvalidKey { .. }
            | Self::InvalidScope { .. }
            | Self::BodyTimeout
            | Self::PayloadTooLarge { .. }
            | Self::InFlight { .. }
            | Self::Mismatch
            | Self::ResponseNotKept { .. }
            | Self::StoreUnavailable
            | Self::StoreFull
            | Self::ExecutionUnavailable
            | Self::Misconfigured => None,
        };
        let original_status =
            if let Self::ResponseNotKept { status, .. } = &self { Some(*status) } else { None };
        let body =
            Body { r#type: &type_uri, title: self.title(), status, detail: &detail, reason, original_status };
        // Strings and numbers always serialize; an empty body would still carry the status and the type header.
        let content = serde_json::to_vec(&body).unwrap_or_default();
        let link = format!("<{type_uri}>; rel=\"describedby\"");
        let retry_after = match &self {
            Self::InFlight { retry_after } => Some(retry_after.to_string()),
            Self::StoreUnavailable | Self::StoreFull | Self::ExecutionUnavailable => Some("1".to_owned()),
            Self::MissingKey { .. }
            | Self::InvalidKey { .. }
            | Self::InvalidScope { .. }
            | Self::BodyTimeout
            | Self::PayloadTooLarge { .. }
            | Self::Mismatch
            | Self::Failed { .. }
            | Self::NoAnswer { .. }
            | Self::Abandoned
            | Self::ResponseNotKept { .. }
            | Self::Misconfigured => None,
        };
        let mut pairs: Vec<(&[u8], &[u8])> = vec![
            (b"content-type", b"application/problem+json"),
            (b"cache-control", b"no-store"),
            (b"link", link.as_bytes()),
            (REFUSAL_HEADER.as_bytes(), kind.as_bytes()),
        ];
        if let Some(seconds) = &retry_after {
            pairs.push((b"retry-after", seconds.as_bytes()));
        }
        if let Self::ResponseNotKept { headers, .. } = &self {
            pairs.extend(headers.iter().map(|(name, value)| (name.as_slice(), value.as_slice())));
        }
        LocalReply {
            status,
            headers: serialize_pairs(&pairs),
            content,
            body_at: 0,
            code_details: self.code_details(),
        }
    }
}

/// When a duplicate should come again: the rule's usual execution time less what has elapsed, at least 1 s, at most
/// the remaining lease or 30 s, whichever is shorter. In whole seconds, as the header wants them (RFC 9110 section
/// 10.2.3).
#[must_use]
pub fn retry_after_seconds(
    usual: std::time::Duration,
    elapsed: std::time::Duration,
    remaining: std::time::Duration,
) -> u64 {
    let millis =
        usual.saturating_sub(elapsed).min(remaining).min(std::time::Duration::from_secs(30)).as_millis();
    u64::try_from(millis.div_ceil(1000)).unwrap_or(30).max(1)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::headers::HeaderBlock;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn retry_after_is_the_usual_time_less_the_elapsed_within_its_bounds() {
        assert_eq!(retry_after_seconds(SECOND * 5, SECOND * 2, SECOND * 60), 3);
        assert_eq!(retry_after_seconds(SECOND * 5, SECOND * 9, SECOND * 60), 1);
        assert_eq!(retry_after_seconds(SECOND * 50, SECOND, SECOND * 10), 10);
        assert_eq!(retry_after_seconds(SECOND * 500, SECOND, SECOND * 400), 30);
        assert_eq!(retry_after_seconds(Duration::from_millis(2100), Duration::ZERO, SECOND * 60), 3);
    }

    fn statuses() -> Statuses {
        Statuses {
            missing_key: 400,
            invalid_key: 400,
            invalid_scope: 400,
            body_timeout: 408,
            payload_too_large: 413,
            in_flight: 409,
            mismatch: 422,
            failed: 424,
            abandoned: 424,
            response_not_kept: 409,
            store_unavailable: 503,
            store_full: 503,
            execution_unavailable: 503,
        }
    }

    #[test]
    fn a_refusal_is_a_problem_with_type_link_and_mark() {
        let reply =
            Problem::InFlight { retry_after: 3 }.into_reply(&statuses(), "https://docs.example/problems/");
        let headers = HeaderBlock::parse(reply.headers.clone()).unwrap();
        assert_eq!(reply.status, 409);
        assert_eq!(headers.first("content-type"), Some(&b"application/problem+json"[..]));
        assert_eq!(headers.first("retry-after"), Some(&b"3"[..]));
        assert_eq!(headers.first("x-idempotency-refusal"), Some(&b"in-flight"[..]));
        assert_eq!(
            headers.first("link"),
            Some(&b"<https://docs.example/problems/in-flight>; rel=\"describedby\""[..])
        );
        let body: serde_json::Value = serde_json::from_slice(reply.body()).unwrap();
        assert_eq!(body["type"], "https://docs.example/problems/in-flight");
        assert_eq!(body["status"], 409);
    }

    #[test]
    fn only_what_waiting_helps_carries_retry_after() {
        for (problem, expected) in [
            (Problem::Mismatch, false),
            (Problem::Failed { reason: Reason::Timeout }, false),
            (Problem::Abandoned, false),
            (Problem::ResponseNotKept { status: 201, headers: vec![] }, false),
            (Problem::StoreUnavailable, true),
            (Problem::StoreFull, true),
            (Problem::ExecutionUnavailable, true),
            (Problem::NoAnswer { reason: Reason::Timeout }, false),
        ] {
            let kind = problem.kind();
            let reply = problem.into_reply(&statuses(), "https://docs.example/");
            let headers = HeaderBlock::parse(reply.headers).unwrap();
            assert_eq!(headers.first("retry-after").is_some(), expected, "{kind}");
        }
    }

    #[test]
    fn a_tombstone_answer_carries_the_original_status_and_location() {
        let reply = Problem::ResponseNotKept {
            status: 201,
            headers: vec![(b"location".to_vec(), b"/pay/1".to_vec())],
        }
        .into_reply(&statuses(), "https://docs.example/");
        let headers = HeaderBlock::parse(reply.headers.clone()).unwrap();
        assert_eq!(headers.first("location"), Some(&b"/pay/1"[..]));
        let body: serde_json::Value = serde_json::from_slice(reply.body()).unwrap();
        assert_eq!(body["original_status"], 201);
    }
}
