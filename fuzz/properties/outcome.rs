//! What is concluded from how Envoy says that an execution ended.

use idempotency::outcome::{
    ClaimEnd, ClosingFacts, Outcome, ResponseFacts, ResponseSource, TELLTALE_BYTES, claim_end, closed_reason,
    is_intermediary_failure, may_become_intermediary, response_source, upstream_outcome,
};
use idempotency::record::Reason;

/// Details, then attempts, flags and status as numbers, then another hop's mark, one a line; then a body.
pub fn outcome(data: &[u8]) {
    let [details, numbers, mark, body] = super::lines(data);
    let mut numbers = numbers.split(|byte| *byte == b' ').map(|number| {
        std::str::from_utf8(number).ok().and_then(|number| number.parse::<u64>().ok()).unwrap_or_default()
    });
    let mut number = || numbers.next().unwrap_or_default();
    let (attempts, flags, status) = (number(), number(), number());
    let status = u16::try_from(status % 1_000).unwrap();
    check_source(details, attempts, status);
    check_closed(details, flags);
    check_upstream(status, mark, body);
}

fn check_source(details: &[u8], attempts: u64, status: u16) {
    let of =
        |attempts, trust| response_source(&ResponseFacts { code_details: details, attempts, status }, trust);
    for trust in [false, true] {
        let (unknown, known) = (of(None, trust), of(Some(attempts), trust));
        for source in [unknown, known] {
            assert_eq!(source == ResponseSource::Upstream, details == b"via_upstream");
            // A claim is given back only if it is sure that nothing ran.
            if source == ResponseSource::NotSent {
                assert!(!details.starts_with(b"upstream_reset_after_response_started"));
                assert!(details != b"response_timeout" && !details.starts_with(b"upstream_per_try"));
            }
        }
        // One attempt more proves less.
        let more = of(Some(attempts.saturating_add(1)), trust);
        assert!(more != ResponseSource::NotSent || known == ResponseSource::NotSent);
        if attempts >= 1 && known == ResponseSource::NotSent {
            assert!(attempts == 1 || trust, "an earlier attempt may have run");
        }
    }
    assert!(
        of(Some(attempts), false) != ResponseSource::NotSent
            || of(Some(attempts), true) == ResponseSource::NotSent
    );
}

fn check_closed(details: &[u8], flags: u64) {
    for started in [false, true] {
        let reason = closed_reason(&ClosingFacts { code_details: details, flags }, started);
        assert_eq!(reason == Reason::Redirected, details == b"internal_redirect");
        assert!(reason != Reason::Status && reason != Reason::Intermediary);
        assert!(reason != Reason::Truncated || started);
    }
}

fn check_upstream(status: u16, mark: &[u8], body: &[u8]) {
    let retain = super::plugin(r#""scope": "shared""#);
    let release = super::plugin(r#""scope": "shared", "on_failure": "release", "on_unknown": "release""#);
    let rule = &retain.rules[0];
    let unmarked = upstream_outcome(rule, status, None, body);
    let marked = upstream_outcome(rule, status, Some(mark), body);
    for outcome in [unmarked, marked] {
        let is_lost = matches!(outcome, Outcome::Failed(_));
        assert_eq!(matches!(claim_end(rule, outcome), ClaimEnd::Fail(_)), is_lost);
        assert!(!matches!(claim_end(&release.rules[0], outcome), ClaimEnd::Fail(_)));
        assert_eq!(outcome == Outcome::Completed, claim_end(rule, outcome) == ClaimEnd::Complete);
    }
    let is_lost = is_intermediary_failure(body);
    // A proxy's text takes nothing away from an answer that is kept, and never frees a claim.
    assert!(unmarked != Outcome::NotProcessed || !is_lost);
    assert_eq!(
        unmarked == Outcome::Completed,
        upstream_outcome(rule, status, None, b"") == Outcome::Completed
    );
    // Read piece by piece, a proxy's text is never passed by: no shorter beginning looks like something else.
    if is_lost {
        for end in 0..body.len().min(TELLTALE_BYTES) {
            let begun = &body[..end];
            let is_begun = may_become_intermediary(begun) || is_known_text(begun);
            assert!(is_begun, "{}", begun.escape_ascii());
        }
    }
}

fn is_known_text(begun: &[u8]) -> bool {
    is_intermediary_failure(begun)
        || begun.starts_with(b"upstream connect error or disconnect/reset before headers")
}
