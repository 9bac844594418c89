//! What `explain` found, for people and for programs.

use std::fmt::{self, Write as _};
use std::time::Duration;

use idempotency::config::{HostPattern, KeySyntax, Mode, PathMatcher, Rule, Scope, ScopePart};
use idempotency::headers::HeaderBlock;
use idempotency::key::parse_key;
use idempotency::outcome::{ClaimEnd, claim_end, upstream_outcome};
use idempotency::reply::LocalReply;
use idempotency::reply::problem::REFUSAL_HEADER;
use idempotency::scope::resolve_scope;
use idempotency::store::Claim;
use serde_json::{Value, json};

use super::{Request, execution};
use crate::output::{DIM, ERROR, GOOD, STRONG, WARNING};

/// Everything there is to say.
pub struct Report {
    pub rules: Vec<RuleVerdict>,
    pub verdict: Verdict,
    covered: Option<Covered>,
    claim: Option<Claimed>,
    pub answers: Vec<Answer>,
    pub outcomes: Vec<(String, String)>,
}

/// A rule, and why it doesn't cover the request.
pub struct RuleVerdict {
    pub name: String,
    pub why_not: Option<String>,
}

/// What happens before the store is asked.
pub enum Verdict {
    /// The record decides.
    Claims,
    /// The request passes.
    Bypassed(&'static str, String),
    /// The client is refused.
    Refused(Refusal),
    /// The filter's code did nothing that is known here.
    Unknown,
}

struct Covered {
    rule: String,
    mode: Mode,
    header: String,
    key: Result<Option<String>, String>,
    syntax: &'static str,
    scope: Result<Vec<(String, String)>, String>,
    terms: Vec<(&'static str, String)>,
}

struct Claimed {
    store_key: String,
    short: String,
    redis_key: Option<String>,
    fingerprint: String,
}

/// What the client gets for a state of the record.
pub struct Answer {
    pub record: &'static str,
    pub what: String,
}

/// A reply of the filter's own.
pub struct Refusal {
    status: u16,
    kind: Option<String>,
    retry_after: Option<String>,
    detail: Option<String>,
}

impl Refusal {
    pub fn of(reply: &LocalReply) -> Self {
        let headers = HeaderBlock::parse(reply.headers.clone())
            .unwrap_or_else(|_| HeaderBlock::from_pairs([("", ""); 0]));
        let line = |name: &str| headers.first(name).map(|value| String::from_utf8_lossy(value).into_owned());
        let problem: Option<Value> = serde_json::from_slice(reply.body()).ok();
        Self {
            status: reply.status,
            kind: line(REFUSAL_HEADER),
            retry_after: line("retry-after"),
            detail: problem.as_ref().and_then(|problem| problem.get("detail")?.as_str().map(str::to_owned)),
        }
    }

    fn to_json(&self) -> Value {
        json!({ "status": self.status, "type": self.kind, "retry_after": self.retry_after, "detail": self.detail })
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Some(kind) => write!(f, "{} {kind}", self.status)?,
            None => write!(f, "{}, replayed from the record", self.status)?,
        }
        self.retry_after.iter().try_for_each(|seconds| write!(f, ", Retry-After: {seconds}"))
    }
}

impl Report {
    pub fn uncovered(rules: Vec<RuleVerdict>, verdict: Verdict) -> Self {
        Self { rules, verdict, covered: None, claim: None, answers: Vec::new(), outcomes: Vec::new() }
    }

    pub fn covered(rules: Vec<RuleVerdict>, rule: &Rule, request: &Request) -> Self {
        let lines: Vec<&[u8]> = request.headers.lines(&rule.header).collect();
        let key = parse_key(lines.iter().copied(), &rule.key)
            .map(|key| key.map(|key| String::from_utf8_lossy(key.as_bytes()).into_owned()))
            .map_err(|error| error.to_string());
        let quoted = lines.first().is_some_and(|line| line.trim_ascii_start().starts_with(b"\""));
        let covered = Covered {
            rule: rule.name.clone(),
            mode: rule.mode,
            header: rule.header.clone(),
            key,
            syntax: match (quoted, rule.key.syntax) {
                (true, _) => "an RFC 9651 String",
                (false, KeySyntax::Lenient) => "a bare token, the same key as the String",
                (false, KeySyntax::Strict) => "not an RFC 9651 String, which the rule asks for",
            },
            scope: scope(rule, request),
            terms: vec![
                ("execution", execution(rule)),
                ("lock_ttl", shown(rule.lock_ttl)),
                ("record_ttl", shown(rule.record_ttl)),
                ("failed_ttl", shown(rule.failed_ttl)),
            ],
        };
        Self { covered: Some(covered), ..Self::uncovered(rules, Verdict::Unknown) }
    }

    pub fn claimed(&mut self, claim: &Claim, redis_key: Option<String>) {
        self.claim = Some(Claimed {
            store_key: claim.key.hex(),
            short: claim.key.short_hex().as_str().to_owned(),
            redis_key,
            fingerprint: claim.terms.fingerprint.bytes().iter().map(|byte| format!("{byte:02x}")).collect(),
        });
    }

    pub fn is_forwarded(&self) -> bool {
        match &self.verdict {
            Verdict::Claims | Verdict::Bypassed(..) => true,
            Verdict::Refused(_) | Verdict::Unknown => false,
        }
    }

    pub fn to_json(&self) -> Value {
        let rules: Vec<_> = self
            .rules
            .iter()
            .map(|rule| json!({ "name": rule.name, "covers": rule.why_not.is_none(), "why_not": rule.why_not }))
            .collect();
        let verdict = match &self.verdict {
            Verdict::Claims => json!({ "kind": "claims" }),
            Verdict::Bypassed(why, text) => json!({ "kind": "bypassed", "why": why, "text": text }),
            Verdict::Refused(refusal) => json!({ "kind": "refused", "reply": refusal.to_json() }),
            Verdict::Unknown => json!({ "kind": "unknown" }),
        };
        let covered = self.covered.as_ref().map(|covered| {
            json!({
                "rule": covered.rule,
                "mode": mode(covered.mode),
                "key": {
                    "header": covered.header,
                    "value": covered.key.as_ref().ok(),
                    "error": covered.key.as_ref().err(),
                },
                "scope": covered.scope.as_ref().ok().map(|parts| {
                    parts.iter().map(|(source, value)| json!({ "source": source, "value": value })).collect::<Vec<_>>()
                }),
                "scope_error": covered.scope.as_ref().err(),
                "terms": covered.terms.iter().map(|(name, value)| ((*name).to_owned(), json!(value))).collect::<serde_json::Map<_, _>>(),
            })
        });
        let claim = self.claim.as_ref().map(|claim| {
            json!({
                "store_key": claim.store_key,
                "log_key": claim.short,
                "redis_key": claim.redis_key,
                "fingerprint": claim.fingerprint,
            })
        });
        let answers: Vec<_> = self
            .answers
            .iter()
            .map(|answer| json!({ "record": answer.record, "answer": answer.what }))
            .collect();
        let outcomes: Vec<_> = self
            .outcomes
            .iter()
            .map(|(what, statuses)| json!({ "what": what, "statuses": statuses }))
            .collect();
        json!({
            "rules": rules,
            "verdict": verdict,
            "covered": covered,
            "claim": claim,
            "answers": answers,
            "upstream_answers": outcomes,
        })
    }

    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(text, "{STRONG}{name:<13}{STRONG:#} {value}");
        };
        match &self.covered {
            Some(covered) => {
                line("rule", &format!("{} ({})", covered.rule, mode(covered.mode)));
            }
            None => line("rule", "none"),
        }
        for rule in &self.rules {
            if let Some(why) = &rule.why_not {
                line("", &format!("{DIM}not {}: {why}{DIM:#}", rule.name));
            }
        }
        if let Some(covered) = &self.covered {
            match &covered.key {
                Ok(Some(key)) => line("key", &format!("{key} ({}; from {})", covered.syntax, covered.header)),
                Ok(None) => line("key", &format!("none: no {} header", covered.header)),
                Err(error) => line("key", &format!("{ERROR}{error}{ERROR:#} ({})", covered.header)),
            }
            match &covered.scope {
                Ok(parts) => {
                    for (index, (source, value)) in parts.iter().enumerate() {
                        let name = if index == 0 { "scope" } else { "" };
                        line(name, &format!("{source} {value}"));
                    }
                }
                Err(error) => line("scope", &format!("{ERROR}{error}{ERROR:#}")),
            }
            let terms: Vec<String> =
                covered.terms.iter().map(|(name, value)| format!("{name} {value}")).collect();
            line("terms", &terms.join(", "));
        }
        if let Some(claim) = &self.claim {
            line("fingerprint", &claim.fingerprint);
            line("store key", &format!("{} (key={} in the access log)", claim.store_key, claim.short));
            if let Some(key) = &claim.redis_key {
                line("Redis key", key);
            }
        }
        match &self.verdict {
            Verdict::Claims => line("verdict", &format!("{GOOD}protected{GOOD:#}: the record decides")),
            Verdict::Bypassed(why, text) => {
                line("verdict", &format!("{WARNING}passes without protection{WARNING:#} ({why}): {text}"));
            }
            Verdict::Refused(refusal) => {
                let detail = refusal.detail.as_deref().unwrap_or_default();
                line("verdict", &format!("{ERROR}refused{ERROR:#}: {refusal}; {detail}"));
            }
            Verdict::Unknown => line("verdict", "unknown"),
        }
        if !self.answers.is_empty() {
            let _ = writeln!(text, "\nThe record of this key is    and then this request is");
            for answer in &self.answers {
                let _ = writeln!(text, "  {:<33} {}", answer.record, answer.what);
            }
        }
        if !self.outcomes.is_empty() {
            let _ = writeln!(text, "\nThe upstream answers");
            for (what, statuses) in &self.outcomes {
                let _ = writeln!(text, "  {statuses}\n      {what}");
            }
        }
        text
    }
}

/// The parts of the scope; what must not appear is told by its length only.
fn scope(rule: &Rule, request: &Request) -> Result<Vec<(String, String)>, String> {
    let head = request.head();
    resolve_scope(rule, &head).map_err(|error| error.to_string())?;
    let text = |bytes: Option<Vec<u8>>| {
        bytes.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
    };
    let parts = match &rule.scope {
        Scope::Shared => return Ok(vec![("shared".to_owned(), "by all callers".to_owned())]),
        Scope::Parts(parts) => parts,
    };
    Ok(parts
        .iter()
        .map(|part| match part {
            ScopePart::Header(name) => {
                (format!("header {name}"), text(head.headers.first(name).map(<[u8]>::to_vec)))
            }
            ScopePart::Authorization => {
                let length = head.headers.first("authorization").map_or(0, <[u8]>::len);
                ("authorization".to_owned(), format!("({length} bytes, hashed)"))
            }
            ScopePart::JwtClaim { claim, .. } => {
                ("jwt_claim".to_owned() + " " + claim, text(head.attributes.attribute(&["metadata", claim])))
            }
            ScopePart::PeerCertificate(field) => ("peer_certificate".to_owned(), format!("{field:?}")),
            ScopePart::Property(path) => {
                let names: Vec<&str> = path.iter().map(String::as_str).collect();
                (format!("property {}", path.join("/")), text(head.attributes.attribute(&names)))
            }
            ScopePart::Constant(value) => ("constant".to_owned(), value.clone()),
        })
        .collect())
}

/// What becomes of the claim for every status that the upstream may answer with.
pub fn outcomes(rule: &Rule) -> Vec<(String, String)> {
    let mut groups: Vec<(String, Vec<u16>)> = Vec::new();
    for status in 200..600 {
        let what = match claim_end(rule, upstream_outcome(rule, status, None, b"")) {
            ClaimEnd::Complete => format!("kept for {} and replayed", shown(rule.record_ttl)),
            ClaimEnd::Release(_) => "the claim is given back: a retry runs".to_owned(),
            ClaimEnd::Fail(_) => format!("kept as failed for {}: a retry is refused", shown(rule.failed_ttl)),
        };
        match groups.iter_mut().find(|(known, _)| *known == what) {
            Some((_, statuses)) => statuses.push(status),
            None => groups.push((what, vec![status])),
        }
    }
    groups.into_iter().map(|(what, statuses)| (what, ranges(&statuses))).collect()
}

fn ranges(statuses: &[u16]) -> String {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for status in statuses {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == *status => *last = *status,
            _ => ranges.push((*status, *status)),
        }
    }
    let texts: Vec<String> = ranges
        .iter()
        .map(|(first, last)| if first == last { first.to_string() } else { format!("{first}-{last}") })
        .collect();
    texts.join(", ")
}

pub fn shown(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, length) in [("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
        if millis >= length && millis.is_multiple_of(length) {
            return format!("{}{unit}", millis / length);
        }
    }
    format!("{millis}ms")
}

pub fn host(pattern: &HostPattern) -> String {
    match pattern {
        HostPattern::Any => "*".to_owned(),
        HostPattern::Exact(host) => host.clone(),
        HostPattern::Suffix(suffix) => format!("*{suffix}"),
    }
}

pub fn path(matcher: &PathMatcher) -> String {
    match matcher {
        PathMatcher::Any => "any".to_owned(),
        PathMatcher::Exact(path) => format!("exact {path}"),
        PathMatcher::Prefix(prefix) => format!("prefix {prefix}"),
        PathMatcher::Regex(regex) => format!("regex {}", regex.as_str()),
    }
}

fn mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "enforce",
        Mode::Shadow => "shadow",
        Mode::Off => "off",
    }
}
