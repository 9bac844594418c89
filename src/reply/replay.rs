//! Which header lines of a response are kept, and how a kept response is sent again.

use super::LocalReply;
use crate::config::Rule;
use crate::headers::{HeaderBlock, serialize_pairs};
use crate::record::codec::StoredResponse;
use crate::sorted::NameSet;

/// Marks requests and responses that went through without protection.
pub const PROTECTION_HEADER: &str = "idempotency-protection";

const HOP_BY_HOP: [&[u8]; 7] =
    [b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"];

/// Dropped by whole name beside the hop-by-hop ones: framing, what belongs to one exchange, and what must not reach
/// another one.
const DROPPED: [&[u8]; 13] = [
    b"content-length",
    b"date",
    b"server",
    b"age",
    b"x-request-id",
    b"traceparent",
    b"tracestate",
    b"set-cookie",
    b"www-authenticate",
    b"alt-svc",
    b"retry-after",
    b"server-timing",
    b"idempotency-protection",
];

const ENVOYS_OWN: &[u8] = b"x-envoy-";

/// What an execution listener tells this filter, and nobody else.
const EXECUTION_REPORT: &[u8] = b"x-idempotency-execution-";

const DROPPED_PREFIXES: [&[u8]; 3] = [ENVOYS_OWN, b"proxy-", b"ratelimit"];

/// Lines that a tombstone keeps: how the client finds what was made.
const TOMBSTONE_KEPT: [&[u8]; 2] = [b"location", b"etag"];

const CORS_PREFIX: &[u8] = b"access-control-";

/// The lines of `headers` that are kept under `rule`, in order, with repeats.
pub fn kept_headers<'a>(
    headers: &'a HeaderBlock,
    rule: &'a Rule,
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    let hop_by_hop = HopByHop::of(headers);
    headers.iter().filter(move |(name, _)| is_kept(name, &hop_by_hop, rule))
}

/// The lines of `headers` that a tombstone keeps.
pub fn tombstone_headers<'a>(
    headers: &'a HeaderBlock,
    rule: &'a Rule,
) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
    kept_headers(headers, rule).filter(|(name, _)| is_kept_by_tombstones(name))
}

/// Whether a tombstone keeps a line of this name.
#[must_use]
pub fn is_kept_by_tombstones(name: &[u8]) -> bool {
    TOMBSTONE_KEPT.contains(&name)
}

/// Whether these trailers say nothing about the response: Envoy's own remarks on one exchange, such as the byte counts of
/// its decompressor. A response that ends with them is as replayable as without.
#[must_use]
pub fn are_remarks(trailers: &HeaderBlock) -> bool {
    trailers.iter().all(|(name, _)| name.starts_with(ENVOYS_OWN))
}

/// Whether any kept line depends on the request's `Origin`.
#[must_use]
pub fn has_cors(headers: &HeaderBlock) -> bool {
    headers.iter().any(|(name, _)| name.starts_with(CORS_PREFIX))
}

/// The fields of a message that end at the next hop (RFC 9110 section 7.6.1).
pub struct HopByHop<'a>(NameSet<'a>);

impl<'a> HopByHop<'a> {
    /// Those known by name, and those that this message's `Connection` names.
    #[must_use]
    pub fn of(headers: &'a HeaderBlock) -> Self {
        let lines = headers.lines("connection");
        let options = lines.flat_map(|line| line.split(|byte| *byte == b','));
        Self(NameSet::new(&options.map(<[u8]>::trim_ascii).collect::<Vec<_>>()))
    }

    /// Whether `name`, in either case, is one of them.
    #[must_use]
    pub fn has(&self, name: &[u8]) -> bool {
        HOP_BY_HOP.contains(&name) || self.0.has(name)
    }
}

/// Whether a line is for this filter alone. No setting keeps it.
#[must_use]
pub fn is_execution_report(name: &[u8]) -> bool {
    name.starts_with(EXECUTION_REPORT)
}

fn is_kept(name: &[u8], hop_by_hop: &HopByHop<'_>, rule: &Rule) -> bool {
    if name.starts_with(b":") || is_execution_report(name) {
        return false;
    }
    let listed = |list: &[String]| list.iter().any(|entry| entry.as_bytes() == name);
    if listed(&rule.keep_response_headers) {
        return true;
    }
    if listed(&rule.drop_response_headers)
        || DROPPED.contains(&name)
        || DROPPED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || name.eq_ignore_ascii_case(rule.replay_header.as_bytes())
    {
        return false;
    }
    !hop_by_hop.has(name)
}

/// The reply that sends a kept response again. `stored` is `encoded`, decoded, and not a tombstone.
#[must_use]
pub fn replay(
    stored: &StoredResponse<'_>,
    body_at: usize,
    rule: &Rule,
    request_origin: Option<&[u8]>,
) -> LocalReply {
    let same_origin = stored.origin.is_some() && stored.origin == request_origin;
    let mut pairs: Vec<(&[u8], &[u8])> = Vec::with_capacity(stored.headers.len().saturating_add(2));
    for (name, value) in &stored.headers {
        if *name == b"cache-control" || (name.starts_with(CORS_PREFIX) && !same_origin) {
            continue;
        }
        pairs.push((name, value));
    }
    pairs.push((b"cache-control", b"no-store"));
    let marker = rule.replay_header.to_ascii_lowercase();
    pairs.push((marker.as_bytes(), b"true"));
    LocalReply {
        status: stored.status,
        headers: serialize_pairs(&pairs),
        content: Vec::new(),
        body_at,
        code_details: "idempotency_replayed",
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
mod tests {
    use super::*;

    /// F03
    #[test]
    fn only_envoys_own_trailers_are_remarks() {
        let remarks =
            |names: &[&str]| are_remarks(&HeaderBlock::from_pairs(names.iter().map(|name| (*name, "1"))));
        assert!(remarks(&[
            "x-envoy-decompressor-gzip-compressed-bytes",
            "x-envoy-decompressor-gzip-uncompressed-bytes"
        ]));
        for names in [&["x-sum"][..], &["x-envoy-a", "x-sum"], &["grpc-status"], &["x-env"]] {
            assert!(!remarks(names), "{names:?}");
        }
    }
}
