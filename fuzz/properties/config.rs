//! The plugin configuration, from JSON and from a protobuf Struct; and the paths and hosts that it covers.

use std::collections::BTreeSet;

use idempotency::config::{ConfigErrors, Plugin, load, load_plugin};
use idempotency::policy::{Bypass, Coverage, RouteOverride, decide_coverage};
use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};

fn shown(loaded: Result<Plugin, ConfigErrors>) -> Result<String, ConfigErrors> {
    loaded.map(|plugin| format!("{plugin:?}"))
}

fn check(errors: &ConfigErrors) {
    assert!(!errors.0.is_empty());
    for error in &errors.0 {
        assert!(!error.path.is_empty() && !error.message.is_empty());
        let line = error.to_string();
        assert!(!line.contains(char::is_control), "{line:?}");
        assert!(line.len() < 4_000, "{} bytes", line.len());
    }
}

fn paths(errors: &ConfigErrors) -> BTreeSet<&str> {
    errors.0.iter().map(|error| error.path.as_str()).collect()
}

/// Bytes that are said to be a configuration in JSON.
pub fn config(data: &[u8]) {
    let loaded = shown(load_plugin(data));
    assert_eq!(shown(load_plugin(data)), loaded, "a second time");
    if let Err(errors) = &loaded {
        check(errors);
    }
    // The same tree as Envoy hands a Struct over. A Struct can't say a member twice, and knows no integers.
    let Ok(serde_json::Value::Object(tree)) = serde_json::from_slice(data) else { return };
    let is_exact = |number: &serde_json::Number| number.as_i64().is_none_or(|whole| whole.abs() < 1 << 53);
    if tree.is_empty() || !numbers_of(&tree.clone().into()).iter().all(is_exact) {
        return;
    }
    match (loaded, shown(load_plugin(&encode(tree)))) {
        (Err(json), _) if json.to_string().contains("given twice") => {}
        (Ok(json), from_struct) => assert_eq!(from_struct.as_ref(), Ok(&json)),
        (Err(json), Err(from_struct)) => assert_eq!(paths(&json), paths(&from_struct)),
        (Err(json), Ok(from_struct)) => panic!("{json}\nbut {from_struct}"),
    }
}

fn numbers_of(value: &serde_json::Value) -> Vec<serde_json::Number> {
    match value {
        serde_json::Value::Number(number) => vec![number.clone()],
        serde_json::Value::Array(items) => items.iter().flat_map(numbers_of).collect(),
        serde_json::Value::Object(members) => members.values().flat_map(numbers_of).collect(),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::String(_) => Vec::new(),
    }
}

/// As another implementation of protobuf writes it.
pub fn encode(tree: serde_json::Map<String, serde_json::Value>) -> Vec<u8> {
    to_struct(tree).encode_to_vec()
}

fn to_struct(tree: serde_json::Map<String, serde_json::Value>) -> Struct {
    Struct { fields: tree.into_iter().map(|(name, value)| (name, to_value(value))).collect() }
}

fn to_value(value: serde_json::Value) -> Value {
    let kind = match value {
        serde_json::Value::Null => Kind::NullValue(0),
        serde_json::Value::Bool(truth) => Kind::BoolValue(truth),
        serde_json::Value::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or_default()),
        serde_json::Value::String(text) => Kind::StringValue(text),
        serde_json::Value::Array(items) => {
            Kind::ListValue(ListValue { values: items.into_iter().map(to_value).collect() })
        }
        serde_json::Value::Object(members) => Kind::StructValue(to_struct(members)),
    };
    Value { kind: Some(kind) }
}

fn from_struct(tree: Struct) -> Option<serde_json::Value> {
    let members = tree.fields.into_iter().map(|(name, value)| Some((name, from_value(value)?)));
    members.collect::<Option<_>>().map(serde_json::Value::Object)
}

/// `None` for a number that JSON can't write exactly.
fn from_value(value: Value) -> Option<serde_json::Value> {
    Some(match value.kind {
        None | Some(Kind::NullValue(_)) => serde_json::Value::Null,
        Some(Kind::BoolValue(truth)) => truth.into(),
        Some(Kind::NumberValue(number)) => {
            // Some are read as their neighbour.
            let text = serde_json::Number::from_f64(number)?;
            let again: f64 = serde_json::from_str(&text.to_string()).ok()?;
            (again == number).then_some(text)?.into()
        }
        Some(Kind::StringValue(text)) => text.into(),
        Some(Kind::ListValue(list)) => {
            serde_json::Value::Array(list.values.into_iter().map(from_value).collect::<Option<_>>()?)
        }
        Some(Kind::StructValue(members)) => from_struct(members)?,
    })
}

/// Bytes that are said to be a serialized Struct.
pub fn config_struct(data: &[u8]) {
    let loaded = shown(load_plugin(data));
    if let Err(errors) = &loaded {
        check(errors);
    }
    if data.first() != Some(&b'\n') || serde_json::from_slice::<serde_json::Value>(data).is_ok() {
        return;
    }
    let decoded = Struct::decode(data).ok();
    if let Ok(loaded) = &loaded {
        let tree = decoded.and_then(from_struct).expect("another implementation reads what was accepted");
        assert_eq!(shown(load_plugin(tree.to_string().as_bytes())).as_ref(), Ok(loaded));
        return;
    }
    // What another implementation writes again is taken as its JSON is.
    let Some(tree) = decoded.filter(|tree| !tree.fields.is_empty()) else { return };
    let again = shown(load_plugin(&tree.encode_to_vec()));
    if let Some(json) = from_struct(tree) {
        match (again, shown(load_plugin(json.to_string().as_bytes()))) {
            (Ok(again), json) => assert_eq!(json, Ok(again)),
            (Err(again), Err(json)) => assert_eq!(paths(&again), paths(&json)),
            (Err(again), Ok(json)) => panic!("{again}\nbut {json}"),
        }
    }
}

/// A pattern, an authority and a path, one a line: the pattern is read as a regular expression, a literal path, a
/// prefix, and a host.
pub fn path_match(data: &[u8]) {
    let [pattern, authority, path] = super::lines(data);
    let Ok(pattern) = std::str::from_utf8(pattern) else { return };
    let bare = path.split(|byte| *byte == b'?').next().unwrap_or_default();

    if let Some(covers) = covers(&serde_json::json!({"path": {"exact": pattern}}), authority, path) {
        assert_eq!(covers, pattern.as_bytes() == bare);
    }
    if let Some(covers) = covers(&serde_json::json!({"path": {"prefix": pattern}}), authority, path) {
        assert_eq!(covers, pattern.len() <= bare.len() && &bare[..pattern.len()] == pattern.as_bytes());
    }
    if let Some(covers) = covers(&serde_json::json!({"path": {"regex": pattern}}), authority, path)
        && pattern.is_ascii()
        && bare.is_ascii()
        && let Ok(regex) = regex::Regex::new(&format!(r"\A(?:{pattern})\z"))
    {
        // Of ASCII alone, both engines mean the same by every class.
        assert_eq!(covers, regex.is_match(std::str::from_utf8(bare).unwrap()), "{pattern:?}");
    }
    if let Some(covers) = covers(&serde_json::json!({"hosts": [pattern]}), authority, path) {
        assert_eq!(covers, host_matches(pattern, authority), "{pattern:?} {}", authority.escape_ascii());
    }
}

/// Whether a rule with this `match` covers a POST; `None` if the rule is refused.
fn covers(matcher: &serde_json::Value, authority: &[u8], path: &[u8]) -> Option<bool> {
    let json = serde_json::json!({"store": {"shared_data": {}},
        "rules": [{"name": "r", "scope": "shared", "match": matcher}]});
    let config = load(json.to_string().as_bytes()).ok()?;
    Some(match decide_coverage(&config.rules, b"POST", authority, path, &RouteOverride::None) {
        Coverage::Covered(rule) => {
            assert_eq!(rule.name, "r");
            true
        }
        Coverage::Bypass(bypass) => {
            assert_eq!(bypass, Bypass::NotCovered);
            false
        }
        Coverage::Misconfigured => panic!("no route names a rule"),
    })
}

fn host_matches(pattern: &str, authority: &[u8]) -> bool {
    let pattern = pattern.to_ascii_lowercase();
    if pattern == "*" {
        return true;
    }
    let authority = authority.to_ascii_lowercase();
    let (name, port) = split_port(&authority);
    // A pattern without a port covers every port.
    let subject = if split_port(pattern.as_bytes()).1.is_some() { &authority[..] } else { name };
    debug_assert!(port.is_none() || subject.len() <= authority.len());
    match pattern.strip_prefix('*') {
        Some(suffix) => subject.len() > suffix.len() && subject.ends_with(suffix.as_bytes()),
        None => subject == pattern.as_bytes(),
    }
}

/// A port is digits behind the last colon, unless the colon is one of an IPv6 address without brackets.
fn split_port(authority: &[u8]) -> (&[u8], Option<&[u8]>) {
    let Some(colon) = authority.iter().rposition(|byte| *byte == b':') else { return (authority, None) };
    let (name, port) = (&authority[..colon], &authority[colon + 1..]);
    let is_address = name.contains(&b':') && !name.ends_with(b"]");
    if is_address || !port.iter().all(u8::is_ascii_digit) { (authority, None) } else { (name, Some(port)) }
}
