//! What makes two requests the same one, and two callers the same caller.

use std::collections::BTreeMap;

use idempotency::config::{Config, KeyFormat, KeyPolicy, KeySyntax};
use idempotency::fingerprint::{Fingerprint, FingerprintHasher};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::{StoreKey, parse_key};
use idempotency::scope::{ScopeValues, resolve_scope};

use super::headers::text_block;

/// One attribute, whatever is asked for.
struct Attribute<'a>(&'a [u8]);

impl Attributes for Attribute<'_> {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        (!self.0.is_empty()).then(|| self.0.to_vec())
    }
}

fn take(config: &Config, headers: &HeaderBlock, chunks: &[&[u8]]) -> Fingerprint {
    let head = RequestHead { headers, attributes: &Attribute(b"") };
    let mut hasher = FingerprintHasher::start(&config.rules[0], &head);
    chunks.iter().for_each(|chunk| hasher.update_body(chunk));
    hasher.finish()
}

/// Two request targets, one a line.
pub fn query(data: &[u8]) {
    let [one, other] = super::lines(data);
    let config = super::plugin(r#""scope": "shared""#);
    compare_targets(&config, one, other);
    // Neighbours that differ in little, and permutations that may mean the same.
    let Some((path, query)) = super::split_once(one, b"?") else { return };
    let mut pairs: Vec<&[u8]> = query.split(|byte| *byte == b'&').collect();
    let target = |pairs: &[&[u8]]| [path, b"?", &pairs.join(&b'&')].concat();
    pairs.rotate_left(1);
    compare_targets(&config, one, &target(&pairs));
    pairs.reverse();
    compare_targets(&config, one, &target(&pairs));
    pairs.sort_unstable();
    compare_targets(&config, one, &target(&pairs));
    pairs.dedup();
    compare_targets(&config, one, &target(&pairs));
    for (from, to) in [(b'=', b'&'), (b'&', b'='), (b'?', b'&')] {
        let changed: Vec<u8> = one.iter().map(|byte| if *byte == from { to } else { *byte }).collect();
        compare_targets(&config, one, &changed);
    }
}

fn compare_targets(config: &Config, one: &[u8], other: &[u8]) {
    let of = |target: &[u8]| take(config, &HeaderBlock::from_pairs([(":path", target)]), &[]);
    assert_eq!(
        of(one) == of(other),
        means(one) == means(other),
        "{} and {}",
        one.escape_ascii(),
        other.escape_ascii()
    );
}

type Values = Vec<Option<Vec<u8>>>;

/// What a target means: its path, and for each name of the query its values in order.
fn means(target: &[u8]) -> (Vec<u8>, Option<BTreeMap<Vec<u8>, Values>>) {
    let Some((path, query)) = super::split_once(target, b"?") else { return (target.to_vec(), None) };
    let mut names: BTreeMap<Vec<u8>, Values> = BTreeMap::new();
    for pair in query.split(|byte| *byte == b'&') {
        let (name, value) = match super::split_once(pair, b"=") {
            Some((name, value)) => (name, Some(value.to_vec())),
            None => (pair, None),
        };
        names.entry(name.to_vec()).or_default().push(value);
    }
    (path.to_vec(), Some(names))
}

/// Two requests with a line `---` between them: `name: value` lines, an empty line, the body.
pub fn fingerprint(data: &[u8]) {
    let (one, other) = super::split_once(data, b"\n---\n").unwrap_or((data, data));
    let config =
        super::plugin(r#""scope": "shared", "fingerprint": {"headers": ["content-type", "x-part"]}"#);
    compare_requests(&config, one, other);
    // A byte that crosses from one piece to the next.
    for at in one.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at) {
        let mut moved = one.to_vec();
        if at > 0 {
            moved.swap(at, at - 1);
            compare_requests(&config, one, &moved);
        }
    }
}

fn compare_requests(config: &Config, one: &[u8], other: &[u8]) {
    let of = |request: &[u8]| {
        let (head, body) = super::split_once(request, b"\n\n").unwrap_or((request, b""));
        let headers = text_block(head);
        let whole = take(config, &headers, &[body]);
        // How the body is cut makes no difference.
        let bytes: Vec<&[u8]> = body.chunks(1).collect();
        let (left, right) = body.split_at(body.len() / 3);
        assert_eq!(take(config, &headers, &bytes), whole);
        assert_eq!(take(config, &headers, &[left, b"", right]), whole);
        (whole, means_request(&headers, body))
    };
    let ((one, meant), (other, other_meant)) = (of(one), of(other));
    assert_eq!(one == other, meant == other_meant, "{meant:?}\n{other_meant:?}");
}

type Meaning = (Vec<u8>, Vec<u8>, (Vec<u8>, Option<BTreeMap<Vec<u8>, Values>>), Vec<Vec<Vec<u8>>>, Vec<u8>);

fn means_request(headers: &HeaderBlock, body: &[u8]) -> Meaning {
    let all = |wanted: &str| -> Vec<Vec<u8>> {
        let named = headers.iter().filter(|(name, _)| name.to_ascii_lowercase() == wanted.as_bytes());
        named.map(|(_, value)| trim(value).to_vec()).collect()
    };
    let raw = |wanted: &str| headers.first(wanted).unwrap_or_default().to_vec();
    (
        raw(":method"),
        raw(":authority").to_ascii_lowercase(),
        means(&raw(":path")),
        vec![all("content-type"), all("x-part")],
        body.to_vec(),
    )
}

fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

const LONGEST: usize = 24;

/// Two callers with a line `---` between them: an attribute in the first line, then `name: value` lines.
pub fn scope(data: &[u8]) {
    let (one, other) = super::split_once(data, b"\n---\n").unwrap_or((data, data));
    let by_header =
        super::plugin(r#""max_scope_length": 24, "scope": [{"header": "x-account"}, {"header": "x-user"}]"#);
    let by_attribute = super::plugin(
        r#""max_scope_length": 24, "scope": [{"header": "x-account"}, {"property": ["a", "b"]}]"#,
    );
    let by_credential = super::plugin(r#""scope": [{"authorization": true}]"#);
    let (one, other) = (caller(one), caller(other));

    let headers = |of: &Caller<'_>| Some([header(of, "x-account")?, header(of, "x-user")?]);
    compare(&by_header, &one, &other, &headers);
    let attribute = |of: &Caller<'_>| {
        let value = of.0.to_vec();
        Some([header(of, "x-account")?, (1..=LONGEST).contains(&value.len()).then_some(value)?])
    };
    compare(&by_attribute, &one, &other, &attribute);

    for of in [&one, &other] {
        if let Some(scope) = resolve(&by_credential, of) {
            let mut lines = of.1.lines("authorization");
            let value = trim(lines.next().unwrap());
            assert!(lines.next().is_none() && !value.is_empty());
            assert!(!value.iter().any(u8::is_ascii_control));
            assert!(resolve(&by_header, of).is_none_or(|other| other != scope));
        }
    }
}

type Caller<'a> = (&'a [u8], HeaderBlock);

fn caller(data: &[u8]) -> Caller<'_> {
    let [attribute, lines] = super::lines(data);
    (attribute, text_block(lines))
}

fn header(of: &Caller<'_>, name: &str) -> Option<Vec<u8>> {
    let lines: Vec<&[u8]> = of.1.lines(name).collect();
    let [line] = lines.as_slice() else { return None };
    let value = trim(line);
    let is_fit = (1..=LONGEST).contains(&value.len())
        && value.iter().all(|byte| !byte.is_ascii_control() && !b" ,".contains(byte));
    is_fit.then(|| value.to_vec())
}

fn resolve(config: &Config, of: &Caller<'_>) -> Option<ScopeValues> {
    let attribute = Attribute(of.0);
    let head = RequestHead { headers: &of.1, attributes: &attribute };
    let resolved = resolve_scope(&config.rules[0], &head);
    if let Err(error) = &resolved {
        // A text that is free of what the caller sent: it is one of few.
        let known =
            ["missing", "empty", "more than one line", "a comma", "a space", "a control character", "longer"];
        assert!(known.iter().any(|text| error.to_string().contains(text)), "{error}");
    }
    resolved.ok()
}

/// The scope is had when the reference has one, and two are the same when the reference says so: for the values and
/// for the store keys made of them.
fn compare<const N: usize>(
    config: &Config,
    one: &Caller<'_>,
    other: &Caller<'_>,
    reference: &dyn Fn(&Caller<'_>) -> Option<[Vec<u8>; N]>,
) {
    let (resolved, expected) = ([one, other].map(|of| resolve(config, of)), [one, other].map(reference));
    assert_eq!(resolved.each_ref().map(Option::is_some), expected.each_ref().map(Option::is_some));
    let ([Some(one), Some(other)], [Some(first), Some(second)]) = (resolved, expected) else { return };
    assert_eq!(one == other, first == second, "{first:?} {second:?}");
    let policy = KeyPolicy { max_length: 9, format: KeyFormat::Any, syntax: KeySyntax::Lenient };
    let key = parse_key([&b"k"[..]], &policy).unwrap().unwrap();
    let derive = |scope: &ScopeValues| StoreKey::derive("", scope, &key);
    assert_eq!(derive(&one) == derive(&other), first == second);
}
