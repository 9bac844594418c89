//! Which rule covers a request, and why a request passes without one.
//!
//! Host and path are compared as Envoy hands them over: what Envoy should normalize (`normalize_path`,
//! `merge_slashes`, `strip_trailing_host_dot`) is its own configuration's business.

use std::rc::Rc;

use crate::config::{HostPattern, Matcher, Mode, PathMatcher, Rule};
use crate::headers::{HeaderBlock, trim_ows};

/// Whether a request is covered.
#[derive(Debug, Clone)]
pub enum Coverage<'c> {
    /// By this rule.
    Covered(&'c Rc<Rule>),
    /// No: it passes untouched.
    Bypass(Bypass),
    /// The route names a rule that doesn't exist. The request is refused: passing it would drop the protection
    /// that somebody asked for.
    Misconfigured,
}

/// Why a request passes untouched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bypass {
    /// A safe method (RFC 9110 section 9.2.1).
    SafeMethod,
    /// A tunnel or another protocol: there is no one response to keep.
    Upgrade,
    /// No rule matches.
    NotCovered,
    /// The rule that matches is off.
    RuleOff,
    /// The route's metadata says so.
    RouteOff,
    /// gRPC carries its outcome in trailers.
    Grpc,
    /// The rule lets requests without a key pass.
    NoKey,
}

impl Bypass {
    /// A name for metrics and logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Bypass::SafeMethod => "safe_method",
            Bypass::Upgrade => "upgrade",
            Bypass::NotCovered => "not_covered",
            Bypass::RuleOff => "rule_off",
            Bypass::RouteOff => "route_off",
            Bypass::Grpc => "grpc",
            Bypass::NoKey => "no_key",
        }
    }
}

/// What the route's metadata says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteOverride {
    /// Nothing: the rules' own matchers decide.
    None,
    /// No rule.
    Off,
    /// The rule of this name, whatever its matcher says.
    Rule(Vec<u8>),
}

/// Finds the rule for a request. Safe methods and CONNECT pass even where the route names a rule; whether the
/// other requests are upgrades or gRPC, [`protocol_bypass`] tells.
#[must_use]
pub fn decide_coverage<'c>(
    rules: &'c [Rc<Rule>],
    method: &[u8],
    authority: &[u8],
    path_and_query: &[u8],
    route_override: &RouteOverride,
) -> Coverage<'c> {
    if is_safe(method) {
        return Coverage::Bypass(Bypass::SafeMethod);
    }
    if method == b"CONNECT" {
        return Coverage::Bypass(Bypass::Upgrade);
    }
    let rule = match route_override {
        RouteOverride::Off => return Coverage::Bypass(Bypass::RouteOff),
        RouteOverride::Rule(name) => {
            match rules.iter().find(|rule| rule.name.as_bytes() == name.as_slice()) {
                Some(rule) => rule,
                None => return Coverage::Misconfigured,
            }
        }
        RouteOverride::None => {
            let path = path_and_query.split(|byte| *byte == b'?').next().unwrap_or_default();
            match rules.iter().find(|rule| covers(&rule.matcher, method, authority, path)) {
                Some(rule) => rule,
                None => return Coverage::Bypass(Bypass::NotCovered),
            }
        }
    };
    match rule.mode {
        Mode::Enforce | Mode::Shadow => Coverage::Covered(rule),
        Mode::Off => Coverage::Bypass(Bypass::RuleOff),
    }
}

/// Whether a method is safe by definition (RFC 9110 section 9.2.1); methods compare with case (section 9.1).
#[must_use]
pub fn is_safe(method: &[u8]) -> bool {
    matches!(method, b"GET" | b"HEAD" | b"OPTIONS" | b"TRACE")
}

/// Why a request that a rule covers passes all the same: there is no one response to keep.
#[must_use]
pub fn protocol_bypass(headers: &HeaderBlock) -> Option<Bypass> {
    if is_upgrade(headers) {
        return Some(Bypass::Upgrade);
    }
    is_grpc(headers).then_some(Bypass::Grpc)
}

/// Whether a request asks for a tunnel or another protocol: CONNECT, extended CONNECT (RFC 8441 section 4), or
/// Upgrade (RFC 9110 section 7.8), which counts only if Connection names it.
#[must_use]
pub fn is_upgrade(headers: &HeaderBlock) -> bool {
    let names_upgrade = |line: &[u8]| {
        line.split(|byte| *byte == b',').any(|token| trim_ows(token).1.eq_ignore_ascii_case(b"upgrade"))
    };
    headers.first(":method") == Some(b"CONNECT")
        || headers.first(":protocol").is_some()
        || (headers.first("upgrade").is_some() && headers.lines("connection").any(names_upgrade))
}

/// Whether a request is gRPC or gRPC-Web, by any `application/grpc*` media type.
#[must_use]
pub fn is_grpc(headers: &HeaderBlock) -> bool {
    const GRPC: &[u8] = b"application/grpc";
    headers.first("content-type").is_some_and(|line| {
        trim_ows(line).1.get(..GRPC.len()).is_some_and(|prefix| prefix.eq_ignore_ascii_case(GRPC))
    })
}

fn covers(matcher: &Matcher, method: &[u8], authority: &[u8], path: &[u8]) -> bool {
    matcher.methods.iter().any(|one| one.as_bytes() == method)
        && (matcher.hosts.is_empty() || matcher.hosts.iter().any(|pattern| host_matches(pattern, authority)))
        && path_matches(&matcher.path, path)
}

fn host_matches(pattern: &HostPattern, authority: &[u8]) -> bool {
    match pattern {
        HostPattern::Any => true,
        HostPattern::Exact(host) => comparable(authority, host).eq_ignore_ascii_case(host.as_bytes()),
        HostPattern::Suffix(suffix) => {
            let host = comparable(authority, suffix);
            host.len()
                .checked_sub(suffix.len())
                .and_then(|begin| host.split_at_checked(begin))
                .is_some_and(|(label, end)| !label.is_empty() && end.eq_ignore_ascii_case(suffix.as_bytes()))
        }
    }
}

/// The part of the authority that a pattern is about: all of it if the pattern has a port.
fn comparable<'a>(authority: &'a [u8], pattern: &str) -> &'a [u8] {
    let pattern_has_port = without_port(pattern.as_bytes()).len() < pattern.len();
    if pattern_has_port { authority } else { without_port(authority) }
}

/// The host of an authority (RFC 3986 section 3.2): a colon within the brackets of an IPv6 literal begins no
/// port.
fn without_port(authority: &[u8]) -> &[u8] {
    let digits = authority.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    authority
        .len()
        .checked_sub(digits)
        .and_then(|end| authority.get(..end))
        .and_then(|rest| rest.strip_suffix(b":"))
        .filter(|host| host.ends_with(b"]") || !host.contains(&b':'))
        .unwrap_or(authority)
}

fn path_matches(matcher: &PathMatcher, path: &[u8]) -> bool {
    match matcher {
        PathMatcher::Any => true,
        PathMatcher::Exact(exact) => path == exact.as_bytes(),
        PathMatcher::Prefix(prefix) => path.starts_with(prefix.as_bytes()),
        // The expression is anchored when it is loaded. Bytes that aren't UTF-8 are replaced rather than left
        // uncovered: `/pay/.*` has to see `/pay/\xff`.
        PathMatcher::Regex(regex) => regex.is_match(&String::from_utf8_lossy(path)),
    }
}

/// Rules and requests for the tests of the modules that read them.
#[cfg(test)]
pub(crate) mod fixture {
    use std::time::Duration;

    use crate::config::{
        Commit, Execution, FingerprintPolicy, InFlight, KeyFormat, KeyPolicy, KeySyntax, Matcher, MissingKey,
        Mode, OnAbandoned, OnFailure, PathMatcher, Rule, Scope, StatusRules,
    };
    use crate::headers::{Attributes, HeaderBlock, RequestHead};

    /// A rule that covers POST everywhere, with the documented defaults.
    pub(crate) fn rule() -> Rule {
        Rule {
            name: "payments".to_owned(),
            matcher: Matcher { methods: vec!["POST".to_owned()], hosts: Vec::new(), path: PathMatcher::Any },
            mode: Mode::Enforce,
            header: "idempotency-key".to_owned(),
            key: KeyPolicy { max_length: 255, format: KeyFormat::Any, syntax: KeySyntax::Lenient },
            missing_key: MissingKey::Reject,
            namespace: String::new(),
            scope: Scope::Shared,
            max_scope_length: 255,
            fingerprint: FingerprintPolicy { authority: true, headers: Vec::new(), body: true },
            body_timeout: Duration::from_secs(15),
            max_request_body_bytes: 1 << 20,
            max_response_body_bytes: 1 << 18,
            lock_ttl: Duration::from_secs(60),
            record_ttl: Duration::from_secs(86_400),
            failed_ttl: Duration::from_secs(86_400),
            statuses: StatusRules {
                replay_classes: [false, true, true, true, false],
                replay: Vec::new(),
                release: vec![401, 407, 408, 421, 425, 429, 501, 503],
            },
            on_failure: OnFailure::Retain,
            on_unknown: OnFailure::Retain,
            on_abandoned: OnAbandoned::Takeover,
            in_flight: InFlight::Reject,
            wait_timeout: Duration::from_secs(10),
            trust_route_retries: false,
            execution: Execution::Inline,
            commit: Commit::BeforeResponseEnd,
            replay_header: "Idempotent-Replayed".to_owned(),
            drop_response_headers: Vec::new(),
            keep_response_headers: Vec::new(),
        }
    }

    /// A POST to `http://a.example/` until told otherwise.
    pub(crate) struct Request {
        headers: HeaderBlock,
        attributes: FixedAttributes,
    }

    #[derive(Default)]
    struct FixedAttributes(Vec<(Vec<String>, Vec<u8>)>);

    impl Attributes for FixedAttributes {
        fn attribute(&self, path: &[&str]) -> Option<Vec<u8>> {
            self.0.iter().find(|(known, _)| known == path).map(|(_, value)| value.clone())
        }
    }

    impl Request {
        pub(crate) fn new() -> Request {
            let pseudo = [(":method", "POST"), (":authority", "a.example"), (":path", "/")];
            Request { headers: HeaderBlock::from_pairs(pseudo), attributes: FixedAttributes::default() }
        }

        pub(crate) fn head(&self) -> RequestHead<'_> {
            RequestHead { headers: &self.headers, attributes: &self.attributes }
        }

        pub(crate) fn method(self, method: impl AsRef<[u8]>) -> Request {
            self.replace(":method", method)
        }

        pub(crate) fn authority(self, authority: impl AsRef<[u8]>) -> Request {
            self.replace(":authority", authority)
        }

        pub(crate) fn target(self, target: impl AsRef<[u8]>) -> Request {
            self.replace(":path", target)
        }

        /// One line more.
        pub(crate) fn line(self, name: &str, value: impl AsRef<[u8]>) -> Request {
            let line = (name.as_bytes(), value.as_ref());
            Request { headers: HeaderBlock::from_pairs(self.headers.iter().chain([line])), ..self }
        }

        pub(crate) fn attribute(mut self, path: &[&str], value: &[u8]) -> Request {
            let path = path.iter().map(|name| (*name).to_owned()).collect();
            self.attributes.0.push((path, value.to_vec()));
            self
        }

        fn replace(self, name: &str, value: impl AsRef<[u8]>) -> Request {
            let lines = self
                .headers
                .iter()
                .map(|(found, old)| (found, if found == name.as_bytes() { value.as_ref() } else { old }));
            Request { headers: HeaderBlock::from_pairs(lines), ..self }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fixture::Request;
    use proptest::prelude::*;

    fn named(name: &str, change: impl FnOnce(&mut Rule)) -> Rc<Rule> {
        let mut rule = fixture::rule();
        rule.name = name.to_owned();
        change(&mut rule);
        Rc::new(rule)
    }

    fn on_path(name: &str, path: PathMatcher) -> Rc<Rule> {
        named(name, |rule| rule.matcher.path = path)
    }

    fn regex(pattern: &str) -> PathMatcher {
        PathMatcher::Regex(regex_lite::Regex::new(&format!("^(?:{pattern})$")).unwrap())
    }

    /// The covering rule's name, or why there is none.
    fn decide(rules: &[Rc<Rule>], method: &str, target: &[u8], route: &RouteOverride) -> String {
        match decide_coverage(rules, method.as_bytes(), b"a.example", target, route) {
            Coverage::Covered(rule) => rule.name.clone(),
            Coverage::Bypass(bypass) => bypass.as_str().to_owned(),
            Coverage::Misconfigured => "misconfigured".to_owned(),
        }
    }

    fn covers_host(patterns: &[HostPattern], authority: &[u8]) -> bool {
        let rule = named("r", |rule| rule.matcher.hosts = patterns.to_vec());
        matches!(
            decide_coverage(&[rule], b"POST", authority, b"/", &RouteOverride::None),
            Coverage::Covered(_)
        )
    }

    fn exact(host: &str) -> HostPattern {
        HostPattern::Exact(host.to_owned())
    }

    fn suffix(host: &str) -> HostPattern {
        HostPattern::Suffix(host.to_owned())
    }

    /// J04, J05, F10
    #[test]
    fn safe_methods_pass_even_where_the_route_names_a_rule() {
        let rules = [named("r", |rule| rule.matcher.methods = vec!["POST".to_owned(), "PUT".to_owned()])];
        for route in
            [RouteOverride::None, RouteOverride::Rule(b"r".to_vec()), RouteOverride::Rule(b"?".to_vec())]
        {
            for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
                assert_eq!(decide(&rules, method, b"/", &route), "safe_method");
            }
            assert_eq!(decide(&rules, "CONNECT", b"", &route), "upgrade");
        }
        for (method, expected) in
            [("POST", "r"), ("PUT", "r"), ("DELETE", "not_covered"), ("post", "not_covered")]
        {
            assert_eq!(decide(&rules, method, b"/", &RouteOverride::None), expected);
        }
    }

    #[test]
    fn the_first_rule_that_matches_wins_even_when_it_is_off() {
        let rules = [
            named("off", |rule| {
                rule.matcher.path = PathMatcher::Prefix("/health".to_owned());
                rule.mode = Mode::Off;
            }),
            on_path("exact", PathMatcher::Exact("/api/pay".to_owned())),
            on_path("prefix", PathMatcher::Prefix("/api/".to_owned())),
            on_path("regex", regex("/v[0-9]+/pay|/v[0-9]+/pay/.*")),
        ];
        for (target, expected) in [
            (&b"/healthz"[..], "rule_off"),
            (b"/api/pay", "exact"),
            (b"/api/pay?x", "exact"),
            (b"/api/pay/", "prefix"),
            (b"/api?/api/", "not_covered"),
            (b"/API/pay", "not_covered"),
            (b"/v1/pay", "regex"),
            (b"/v1/pay?a=/b", "regex"),
            (b"/v1/payx", "not_covered"),
            (b"/v1/pay/\xff", "regex"),
            (b"/x/v1/pay", "not_covered"),
            (b"", "not_covered"),
        ] {
            assert_eq!(
                decide(&rules, "POST", target, &RouteOverride::None),
                expected,
                "{}",
                target.escape_ascii()
            );
        }
    }

    #[test]
    fn a_route_picks_a_rule_by_name_or_none() {
        let rules = [
            on_path("first", PathMatcher::Any),
            on_path("second", PathMatcher::Exact("/elsewhere".to_owned())),
            named("off", |rule| rule.mode = Mode::Off),
            named("shadow", |rule| rule.mode = Mode::Shadow),
        ];
        for (route, expected) in [
            (RouteOverride::None, "first"),
            (RouteOverride::Off, "route_off"),
            (RouteOverride::Rule(b"second".to_vec()), "second"),
            (RouteOverride::Rule(b"off".to_vec()), "rule_off"),
            (RouteOverride::Rule(b"shadow".to_vec()), "shadow"),
            (RouteOverride::Rule(b"Second".to_vec()), "misconfigured"),
            (RouteOverride::Rule(b"\xff".to_vec()), "misconfigured"),
            (RouteOverride::Rule(Vec::new()), "misconfigured"),
        ] {
            assert_eq!(decide(&rules, "POST", b"/", &route), expected, "{route:?}");
        }
        assert_eq!(decide(&rules, "DELETE", b"/", &RouteOverride::Rule(b"second".to_vec())), "second");
    }

    #[test]
    fn hosts_match_without_case_and_without_the_port() {
        for (pattern, authority, expected) in [
            (exact("a.example"), &b"a.example"[..], true),
            (exact("a.example"), b"A.Example:8443", true),
            (exact("a.example"), b"a.example:", true),
            (exact("a.example"), b"b.example", false),
            (exact("a.example"), b"a.example.evil", false),
            (exact("a.example"), b"a.example:80x", false),
            (exact("a.example"), b"", false),
            (exact("a.example:8443"), b"a.example:8443", true),
            (exact("a.example:8443"), b"a.example:80", false),
            (exact("a.example:8443"), b"a.example", false),
            (exact("[::1]"), b"[::1]:80", true),
            (exact("[::1]"), b"[::1]", true),
            (exact("[::1]:80"), b"[::1]:80", true),
            (exact("[::1]:80"), b"[::1]", false),
            (exact("[::1]"), b"[::1:80", false),
            (exact("::1"), b"::1", true),
            (exact("192.0.2.1"), b"192.0.2.1:80", true),
            (suffix(".example"), b"a.example", true),
            (suffix(".example"), b"a.B.EXAMPLE:1", true),
            (suffix(".example"), b".example", false),
            (suffix(".example"), b"example", false),
            (suffix(".example"), b"aexample", false),
            (suffix(".example:80"), b"a.example:80", true),
            (suffix(".example:80"), b"a.example:81", false),
            (suffix(".example"), b"\xff\xff.example", true),
            (HostPattern::Any, b"", true),
        ] {
            assert_eq!(
                covers_host(std::slice::from_ref(&pattern), authority),
                expected,
                "{pattern:?} {}",
                authority.escape_ascii()
            );
        }
        assert!(covers_host(&[], b"any"));
        assert!(covers_host(&[exact("x"), exact("a")], b"a"));
    }

    /// G22
    #[test]
    fn upgrades_are_recognised_on_every_protocol() {
        let upgrade = |request: Request| is_upgrade(request.head().headers);
        assert!(upgrade(Request::new().line("upgrade", "websocket").line("connection", "Upgrade")));
        assert!(upgrade(
            Request::new()
                .line("upgrade", "websocket")
                .line("connection", "keep-alive")
                .line("connection", "x , UPGRADE")
        ));
        assert!(upgrade(Request::new().line(":protocol", "websocket")));
        assert!(upgrade(Request::new().method("CONNECT")));
        assert!(!upgrade(Request::new()));
        assert!(!upgrade(Request::new().line("upgrade", "websocket")));
        assert!(!upgrade(Request::new().line("connection", "upgrade")));
        assert!(!upgrade(Request::new().line("upgrade", "h2c").line("connection", "upgrades, close")));
    }

    /// F14
    #[test]
    fn grpc_is_recognised_by_its_media_type() {
        let grpc = |value: &[u8]| is_grpc(Request::new().line("content-type", value).head().headers);
        for value in
            ["application/grpc", "Application/gRPC+proto", "application/grpc;x", "application/grpc-web"]
        {
            assert!(grpc(value.as_bytes()), "{value}");
        }
        for value in [&b"application/json"[..], b"application/grp", b"", b"x application/grpc", b"\xff"] {
            assert!(!grpc(value), "{}", value.escape_ascii());
        }
        assert!(!is_grpc(Request::new().head().headers));
    }

    proptest! {
        #[test]
        fn any_request_is_decided(
            method in "[A-Z]{0,4}",
            authority in proptest::collection::vec(any::<u8>(), 0..24),
            target in proptest::collection::vec(any::<u8>(), 0..24),
        ) {
            let rules = [
                named("hosts", |rule| rule.matcher.hosts = vec![exact("a"), suffix(".b"), exact("[::1]:1")]),
                on_path("regex", regex("/.*")),
            ];
            let _ = decide_coverage(&rules, method.as_bytes(), &authority, &target, &RouteOverride::None);
        }

        #[test]
        fn a_port_is_the_digits_after_the_last_colon(host in "[a-z.]{1,8}|\\[[0-9a-f:]{1,8}\\]", port in "[0-9]{0,5}") {
            let authority = format!("{host}:{port}");
            prop_assert_eq!(without_port(authority.as_bytes()), host.as_bytes());
            prop_assert_eq!(without_port(host.as_bytes()), host.as_bytes());
        }
    }
}
