//! Reading `match`: which requests a rule covers.

use super::fields::{Object, got, list, report};
use super::json::Json;
use super::problem::Problems;
use super::values::{method, word};
use super::{HostPattern, Matcher, PathMatcher};

/// Bound of a compiled path pattern, in bytes of the worker's memory.
const REGEX_SIZE: usize = 1024 * 1024;
const LONGEST_PATTERN: usize = 4096;

pub(super) fn read_match(json: &Json, path: &str, problems: &mut Problems) -> Option<Matcher> {
    let expected = "an object with any of: methods, hosts, path";
    let mut object = Object::begin(json, path, expected, problems)?;
    let methods = object.nested("methods", problems, |json, path, problems| {
        let expected = "a list of methods such as [\"POST\", \"PATCH\"]";
        let methods = list(json, path, expected, problems, |json, path, problems| {
            report(method(json), path, problems)
        })?;
        not_empty(methods, json, path, expected, problems)
    });
    let hosts = object.nested("hosts", problems, |json, path, problems| {
        let expected = "a list of hosts such as [\"*.example.com\"]; leave it out to cover every host";
        let hosts =
            list(json, path, expected, problems, |json, path, problems| report(host(json), path, problems))?;
        not_empty(hosts, json, path, expected, problems)
    });
    let pattern = object.nested("path", problems, read_path);
    object.finish(problems);
    Some(Matcher {
        methods: methods.given_or(default_methods()),
        hosts: hosts.given_or(Vec::new()),
        path: pattern.given_or(PathMatcher::Any),
    })
}

/// What a rule without `match` covers.
pub(super) fn match_all() -> Matcher {
    Matcher { methods: default_methods(), hosts: Vec::new(), path: PathMatcher::Any }
}

fn default_methods() -> Vec<String> {
    vec!["POST".to_owned(), "PATCH".to_owned()]
}

fn not_empty<T>(
    values: Vec<T>,
    json: &Json,
    path: &str,
    expected: &str,
    problems: &mut Problems,
) -> Option<Vec<T>> {
    if values.is_empty() {
        problems.refuse(path, got(json, expected));
        return None;
    }
    Some(values)
}

fn host(json: &Json) -> Result<HostPattern, String> {
    let host = word(json).unwrap_or_default().to_ascii_lowercase();
    if host == "*" {
        return Ok(HostPattern::Any);
    }
    let (wildcard, rest) = host.strip_prefix("*.").map_or((false, host.as_str()), |rest| (true, rest));
    let bracketed = rest.starts_with('[');
    if is_authority(rest) && !(wildcard && bracketed) {
        return Ok(if wildcard { HostPattern::Suffix(format!(".{rest}")) } else { HostPattern::Exact(host) });
    }
    Err(got(json, "\"*\", \"*.example.com\", or a host such as \"api.example.com\" without scheme and path"))
}

/// A host name or address, with or without a port.
fn is_authority(text: &str) -> bool {
    if let Some(rest) = text.strip_prefix('[') {
        let Some((address, port)) = rest.split_once(']') else { return false };
        let address = !address.is_empty()
            && address.bytes().all(|byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.'));
        return address && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port));
    }
    let (name, port) = text.split_once(':').map_or((text, None), |(name, port)| (name, Some(port)));
    let label = |label: &str| {
        !label.is_empty()
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
    };
    name.split('.').all(label) && port.is_none_or(is_port)
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

fn read_path(json: &Json, path: &str, problems: &mut Problems) -> Option<PathMatcher> {
    const EXPECTED: &str =
        "an object with exactly one of: exact, prefix, regex, such as {\"prefix\": \"/api/\"}";
    let mut object = Object::begin(json, path, EXPECTED, problems)?;
    let exact = object.field("exact", problems, literal_path);
    let prefix = object.field("prefix", problems, literal_path);
    let regex = object.nested("regex", problems, read_regex);
    object.finish(problems);

    let count =
        [exact.is_absent(), prefix.is_absent(), regex.is_absent()].iter().filter(|absent| !**absent).count();
    if count != 1 {
        problems.refuse(path, got(json, EXPECTED));
        return None;
    }
    exact
        .given()
        .map(PathMatcher::Exact)
        .or_else(|| prefix.given().map(PathMatcher::Prefix))
        .or_else(|| regex.given().map(PathMatcher::Regex))
}

fn literal_path(json: &Json) -> Result<String, String> {
    const EXPECTED: &str = "a path such as \"/api/\"";
    match word(json) {
        Some(text) if !text.starts_with('/') => {
            Err(format!("{}: it must begin with \"/\"", got(json, EXPECTED)))
        }
        Some(text) if text.contains(['?', '#']) => {
            Err(format!("{}: the query is no part of it", got(json, EXPECTED)))
        }
        Some(text) if !text.bytes().all(|byte| byte.is_ascii_graphic()) => Err(format!(
            "{}: it is compared as sent, write other characters percent-encoded",
            got(json, EXPECTED)
        )),
        Some(text) => Ok(text.to_owned()),
        None => Err(got(json, EXPECTED)),
    }
}

fn read_regex(json: &Json, path: &str, problems: &mut Problems) -> Option<regex_lite::Regex> {
    let regex = report(regex(json), path, problems)?;
    let pattern = word(json).unwrap_or_default();
    if pattern.starts_with(|c: char| c.is_alphanumeric() || c == '-') && !pattern.contains('|') {
        problems.warn(path, "matches no path, since every path begins with \"/\"");
    }
    Some(regex)
}

fn regex(json: &Json) -> Result<regex_lite::Regex, String> {
    const EXPECTED: &str = "a regular expression for the whole path, such as \"/v[0-9]+/payments\"";
    let Some(pattern) = word(json).filter(|text| (1..=LONGEST_PATTERN).contains(&text.len())) else {
        return Err(got(json, EXPECTED));
    };
    let compile = |pattern: &str| regex_lite::RegexBuilder::new(pattern).size_limit(REGEX_SIZE).build();
    // By itself first: `a)|(?:b` would be well-formed between the anchors, and escape them.
    compile(pattern).and_then(|_| compile(&format!("^(?:{pattern})$"))).map_err(|error| {
        format!("{}: {}", got(json, EXPECTED), error.to_string().replace(char::is_control, " "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_value(text: &str) -> Json {
        Json::Text(text.to_owned())
    }

    #[test]
    fn hosts_are_lower_cased_and_only_a_leading_label_is_wild() {
        for (text, pattern) in [
            ("*", HostPattern::Any),
            ("API.example.com", HostPattern::Exact("api.example.com".to_owned())),
            ("localhost:8080", HostPattern::Exact("localhost:8080".to_owned())),
            ("[::1]:8443", HostPattern::Exact("[::1]:8443".to_owned())),
            ("*.Example.com", HostPattern::Suffix(".example.com".to_owned())),
        ] {
            assert_eq!(host(&text_value(text)), Ok(pattern), "{text}");
        }
        for text in [
            "",
            "*.",
            "*.*",
            "api.*",
            "*example.com",
            "a.*.com",
            "https://a.com",
            "a.com/",
            "a b",
            "a..com",
            ".a.com",
            "a.com.",
            "a:",
            "a:0",
            "a:65536",
            "a:+1",
            "[::1",
            "[]",
            "[::1]x",
            "*.[::1]",
            "::1",
            "é.com",
        ] {
            assert!(host(&text_value(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn a_pattern_matches_the_whole_path_or_is_refused() {
        let pattern = regex(&text_value("/a|/b[0-9]+")).unwrap();
        let matching: Vec<_> = ["/a", "/b1", "/b12", "/ab", "/b", "x/a", "/a\n"]
            .into_iter()
            .filter(|path| pattern.is_match(path))
            .collect();
        assert_eq!(matching, ["/a", "/b1", "/b12"]);

        for text in ["", "(", "/a)|(?:/b", "[", "\\", "(?x)/a)|(?:/b", "/(?=a)"] {
            assert!(regex(&text_value(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn an_inline_flag_does_not_loosen_the_anchors() {
        let pattern = regex(&text_value("(?m)/a")).unwrap();
        assert!(pattern.is_match("/a"));
        assert!(!pattern.is_match("/a\n/b") && !pattern.is_match("/b\n/a"));
    }

    #[test]
    fn a_pattern_that_would_take_much_memory_is_refused() {
        for text in ["(?:a{1000}){1000}", &"(".repeat(2000), &"a".repeat(5000)] {
            assert!(regex(&text_value(text)).is_err());
        }
    }
}
