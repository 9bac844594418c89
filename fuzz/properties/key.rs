//! The key header, against an RFC 9651 parser; and its refusals, which tell nothing of the key.

use idempotency::config::{KeyFormat, KeyPolicy, KeySyntax, Statuses};
use idempotency::headers::HeaderBlock;
use idempotency::key::{IdempotencyKey, KeyError, parse_key};
use idempotency::record::Reason;
use idempotency::reply::problem::Problem;
use sfv::{BareItem, Parser, Version};

const MAX_LENGTH: usize = 40;

fn policy(syntax: KeySyntax, format: KeyFormat) -> KeyPolicy {
    KeyPolicy { max_length: MAX_LENGTH, format, syntax }
}

fn parse(lines: &[&[u8]], syntax: KeySyntax) -> Result<Option<Vec<u8>>, KeyError> {
    parse_key(lines.iter().copied(), &policy(syntax, KeyFormat::Any)).map(|key| key.map(bytes))
}

fn bytes(key: IdempotencyKey) -> Vec<u8> {
    key.as_bytes().to_vec()
}

/// Lines of a key header, one a line.
pub fn key_header(data: &[u8]) {
    let lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
    let lenient = parse(&lines, KeySyntax::Lenient);
    let strict = parse(&lines, KeySyntax::Strict);
    if lines.len() > 1 {
        assert_eq!((lenient, strict), (Err(KeyError::SeveralLines), Err(KeyError::SeveralLines)));
        return;
    }
    let value = trim(lines[0]);
    let string = rfc_9651_string(value);
    match &strict {
        Ok(key) => {
            let key = key.as_ref().expect("a line is a key or an error");
            assert!(is_fit(key));
            // Only what is inside a parameter's Byte Sequence is taken more freely than the RFC has it.
            if string.is_some() || !value.contains(&b':') {
                assert_eq!(string.as_ref(), Some(key));
            }
        }
        Err(error) => {
            assert!(string.is_none_or(|key| !is_fit(&key)), "{error:?}");
        }
    }
    if value.first() == Some(&b'"') {
        assert_eq!(lenient, strict);
    } else {
        assert!(strict.is_err());
        let is_bare = is_fit(value)
            && !value.iter().any(|byte| b"\",;\\()".contains(byte))
            && !matches!(value[0], b'?' | b':');
        assert_eq!(lenient.clone().ok().flatten().as_deref(), is_bare.then_some(value));
    }
    if let Ok(Some(key)) = &lenient {
        // As a String, it is the same key, whatever parameters follow.
        let mut quoted = b" \"".to_vec();
        for byte in key {
            if matches!(byte, b'"' | b'\\') {
                quoted.push(b'\\');
            }
            quoted.push(*byte);
        }
        quoted.extend_from_slice(b"\";a;b=\"x,y\"\t");
        assert_eq!(parse(&[&quoted], KeySyntax::Strict), Ok(Some(key.clone())));
        let uuid = parse_key(lines.iter().copied(), &policy(KeySyntax::Lenient, KeyFormat::Uuid));
        assert_eq!(uuid.is_ok(), is_uuid(key));
    }
}

fn trim(mut value: &[u8]) -> &[u8] {
    while let [b' ' | b'\t', rest @ ..] | [rest @ .., b' ' | b'\t'] = value {
        value = rest;
    }
    value
}

fn is_fit(key: &[u8]) -> bool {
    (1..=MAX_LENGTH).contains(&key.len()) && key.iter().all(u8::is_ascii_graphic)
}

fn is_uuid(key: &[u8]) -> bool {
    let text = String::from_utf8_lossy(key);
    let groups: Vec<&str> = text.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12])
        && groups.concat().chars().all(|digit| digit.is_ascii_hexdigit())
}

fn rfc_9651_string(value: &[u8]) -> Option<Vec<u8>> {
    let item: sfv::Item = Parser::new(value).with_version(Version::Rfc9651).parse().ok()?;
    let BareItem::String(text) = item.bare_item else { return None };
    Some(text.as_str().as_bytes().to_vec())
}

/// A line of a key header, then text that an operator chose, then a response's Location.
pub fn problem_detail(data: &[u8]) {
    let [key, text, location] = super::lines(data);
    let text = String::from_utf8_lossy(text).into_owned();
    if let Some(why) = refusal(key) {
        // What is said is the same for every key that breaks the same rule at the same place.
        let masked = masked(key);
        assert_eq!(refusal(&masked).as_ref(), Some(&why));
        check(Problem::InvalidKey { why }, &text, &[]);
    }
    let headers = vec![(b"location".to_vec(), location.to_vec())];
    let number = u64::from_le_bytes(std::array::from_fn(|at| key.get(at).copied().unwrap_or_default()));
    for problem in [
        Problem::MissingKey { header: text.clone() },
        Problem::InvalidScope { why: text.clone() },
        Problem::PayloadTooLarge { limit: number },
        Problem::InFlight { retry_after: number },
        Problem::Failed { reason: Reason::ALL[key.len() % Reason::ALL.len()] },
        Problem::ResponseNotKept { status: 201, headers: headers.clone() },
        Problem::Abandoned,
        Problem::BodyTimeout,
        Problem::Mismatch,
        Problem::StoreUnavailable,
        Problem::StoreFull,
        Problem::Misconfigured,
    ] {
        let is_not_kept = matches!(problem, Problem::ResponseNotKept { .. });
        check(problem, &text, if is_not_kept { &headers } else { &[] });
    }
}

fn refusal(line: &[u8]) -> Option<String> {
    let error = parse_key([line], &policy(KeySyntax::Lenient, KeyFormat::Uuid)).err()?;
    Some(format!("{error} {error:?} {}", error.as_str()))
}

/// Another key whose bytes are of the same kinds. Parameters stay as they are.
fn masked(line: &[u8]) -> Vec<u8> {
    let end = line.iter().position(|byte| *byte == b';').unwrap_or(line.len());
    let mask = |byte: &u8| match byte {
        b'a'..=b'f' => b'a' + (byte - b'a' + 1) % 6,
        b'A'..=b'F' => b'A' + (byte - b'A' + 1) % 6,
        b'g'..=b'z' => b'g' + (byte - b'g' + 1) % 20,
        b'G'..=b'Z' => b'G' + (byte - b'G' + 1) % 20,
        b'0'..=b'9' => b'0' + (byte - b'0' + 1) % 10,
        other => *other,
    };
    line[..end].iter().map(mask).chain(line[end..].iter().copied()).collect()
}

fn check(problem: Problem, type_base: &str, more: &[(Vec<u8>, Vec<u8>)]) {
    let kind = problem.kind();
    let status = problem.status(&Statuses::default());
    let reply = problem.into_reply(&Statuses::default(), type_base);
    let body: serde_json::Value = serde_json::from_slice(reply.body()).expect("JSON");
    assert_eq!(body["type"], format!("{type_base}{kind}"));
    assert_eq!((reply.status, &body["status"]), (status, &status.into()));
    assert!(body["title"].is_string() && body["detail"].is_string());
    let headers = HeaderBlock::parse(reply.headers).expect("a header map");
    assert_eq!(headers.first("content-type"), Some(&b"application/problem+json"[..]));
    assert_eq!(headers.first("x-idempotency-refusal"), Some(kind.as_bytes()));
    for (name, value) in more {
        assert_eq!(headers.first(std::str::from_utf8(name).unwrap()), Some(value.as_slice()));
    }
}
