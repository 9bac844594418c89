//! Single values: a JSON value in, a typed one or the refusal's text out.

use std::time::Duration;

use super::fields::got;
use super::json::{Json, quoted};

/// Longest duration: what is longer is a mistake, and sums of shorter ones can't overflow.
pub(super) const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// Headers that belong to one connection or frame one message (RFC 9110 section 7.6.1).
pub(super) const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
];

/// Request headers that this filter removes before anything reads them.
const OWN_REQUEST_HEADERS: [&str; 2] = ["x-idempotency-attempt", "idempotency-protection"];

pub(super) fn boolean(json: &Json) -> Result<bool, String> {
    if let Json::Bool(value) = json { Ok(*value) } else { Err(got(json, "true or false")) }
}

/// An integer of `min..=max`. A float with an integral value is one: a `google.protobuf.Struct` has no other numbers.
pub(super) fn integer(min: u64, max: u64) -> impl Fn(&Json) -> Result<u64, String> {
    move |json| read_whole(json, min, max, "an integer")
}

#[inline(never)]
fn read_whole(json: &Json, min: u64, max: u64, what: &str) -> Result<u64, String> {
    whole_number(json)
        .filter(|value| (min..=max).contains(value))
        .ok_or_else(|| got(json, &format!("{what} from {min} to {max}")))
}

/// An [`integer`] as a length in memory.
pub(super) fn length(min: u64, max: u64) -> impl Fn(&Json) -> Result<usize, String> {
    let integer = integer(min, max);
    move |json| integer(json).map(|value| usize::try_from(value).unwrap_or(usize::MAX))
}

/// An HTTP status of `min..=max`.
pub(super) fn status(min: u16, max: u16) -> impl Fn(&Json) -> Result<u16, String> {
    move |json| {
        let value = read_whole(json, min.into(), max.into(), "a status")?;
        Ok(u16::try_from(value).unwrap_or(max))
    }
}

fn whole_number(json: &Json) -> Option<u64> {
    /// Beyond 2^53 a double no longer holds every integer.
    const LAST_EXACT: f64 = 9_007_199_254_740_992.0;
    match json {
        Json::Integer(value) => u64::try_from(*value).ok(),
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        Json::Float(value) if value.fract() == 0.0 && (0.0..=LAST_EXACT).contains(value) => {
            Some(*value as u64)
        }
        Json::Float(_) | Json::Null | Json::Bool(_) | Json::Text(_) | Json::List(_) | Json::Object(_) => None,
    }
}

/// Which durations a setting takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) least: Duration,
    pub(super) most: Duration,
    /// One of them as it is written, in seconds or milliseconds.
    pub(super) example: &'static str,
}

/// A duration from `min` to [`LONGEST`], exact or refused.
pub(super) fn duration(min: Duration) -> impl Fn(&Json) -> Result<Duration, String> {
    duration_of(Span { least: min, most: LONGEST, example: "60s" })
}

/// A duration within `span`, exact or refused.
pub(super) fn duration_of(span: Span) -> impl Fn(&Json) -> Result<Duration, String> {
    move |json| read_duration(json, &span)
}

#[inline(never)]
fn read_duration(json: &Json, span: &Span) -> Result<Duration, String> {
    let within = |value: &Duration| (span.least..=span.most).contains(value);
    {
        let expected = || {
            format!(
                "a whole number and a unit (ms, s, m or h) from \"{}\" to \"{}\", such as \"{}\"",
                shown(span.least),
                shown(span.most),
                span.example
            )
        };
        match json {
            Json::Text(text) => parse_duration(text).filter(within).ok_or_else(|| got(json, &expected())),
            Json::Integer(_) | Json::Float(_) => {
                // The unit that was probably meant is one that fits.
                let number = whole_number(json).unwrap_or_default();
                let write = [format!("{number}s"), format!("{number}ms")]
                    .into_iter()
                    .find(|text| parse_duration(text).is_some_and(|value| within(&value)))
                    .unwrap_or_else(|| span.example.to_owned());
                let unit = if write.ends_with("ms") { "milliseconds" } else { "seconds" };
                Err(format!("{}: a number has no unit, write \"{write}\" for {unit}", got(json, &expected())))
            }
            Json::Null | Json::Bool(_) | Json::List(_) | Json::Object(_) => Err(got(json, &expected())),
        }
    }
}

/// A duration as settings are written, such as `"60s"`; `None` for anything else.
#[must_use]
pub fn parse_duration(text: &str) -> Option<Duration> {
    let end = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(end)?;
    let number: u64 = number.parse().ok()?;
    match unit {
        "ms" => Some(Duration::from_millis(number)),
        "s" => Some(Duration::from_secs(number)),
        "m" => number.checked_mul(60).map(Duration::from_secs),
        "h" => number.checked_mul(3600).map(Duration::from_secs),
        _ => None,
    }
}

/// A duration as it is written in a configuration, in the largest unit that is exact.
pub(super) fn shown(duration: Duration) -> String {
    let millis = duration.as_millis();
    for (unit, length) in [("h", 3_600_000), ("m", 60_000), ("s", 1000)] {
        if millis >= length && millis.is_multiple_of(length) {
            return format!("{}{unit}", millis / length);
        }
    }
    format!("{millis}ms")
}

/// One of several words.
pub(super) fn choice<T: Copy>(words: &[(&str, T)]) -> impl Fn(&Json) -> Result<T, String> {
    move |json| {
        let spelled: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let at = position_of(json, &spelled)?;
        words.get(at).map(|(_, value)| *value).ok_or_else(|| none_of(json, &spelled))
    }
}

#[inline(never)]
fn position_of(json: &Json, words: &[&str]) -> Result<usize, String> {
    let is_meant = |word: &&str| matches!(json, Json::Text(text) if text == word);
    words.iter().position(is_meant).ok_or_else(|| none_of(json, words))
}

#[inline(never)]
fn none_of(json: &Json, words: &[&str]) -> String {
    let expected = match words {
        [first @ .., last] if !first.is_empty() => format!("\"{}\" or \"{last}\"", first.join("\", \"")),
        all => format!("\"{}\"", all.join("\", \"")),
    };
    got(json, &expected)
}

/// Text of `min..=max` bytes without control characters.
pub(super) fn text(min: usize, max: usize) -> impl Fn(&Json) -> Result<String, String> {
    move |json| read_text(json, min, max)
}

#[inline(never)]
fn read_text(json: &Json, min: usize, max: usize) -> Result<String, String> {
    word(json)
        .filter(|text| (min..=max).contains(&text.len()) && !text.chars().any(char::is_control))
        .map(str::to_owned)
        .ok_or_else(|| got(json, &format!("a string of {min} to {max} bytes without control characters")))
}

/// Text of `min..=max` visible ASCII characters.
pub(super) fn visible(min: usize, max: usize, expected: &str) -> impl Fn(&Json) -> Result<String, String> {
    move |json| read_visible(json, min, max, expected)
}

#[inline(never)]
fn read_visible(json: &Json, min: usize, max: usize, expected: &str) -> Result<String, String> {
    word(json)
        .filter(|text| (min..=max).contains(&text.len()))
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()))
        .map(str::to_owned)
        .ok_or_else(|| got(json, expected))
}

/// What every key of this filter in Redis begins with.
pub(super) fn key_prefix(json: &Json) -> Result<String, String> {
    const EXPECTED: &str = "0 to 64 visible ASCII characters without \"{\" and \"}\"";
    let prefix = visible(0, 64, EXPECTED)(json)?;
    if prefix.contains(['{', '}']) {
        return Err(format!(
            "{}: a hash tag puts every key into one slot of a Redis Cluster",
            got(json, EXPECTED)
        ));
    }
    Ok(prefix)
}

/// A name that may stand in filter state, metadata and table names.
pub(super) fn name(json: &Json) -> Result<String, String> {
    word(json)
        .filter(|text| (1..=64).contains(&text.len()))
        .filter(|text| {
            text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-'))
        })
        .map(str::to_owned)
        .ok_or_else(|| got(json, "1 to 64 letters, digits, \"_\", \".\" or \"-\""))
}

/// An upper-case method that this filter can protect.
pub(super) fn method(json: &Json) -> Result<String, String> {
    const EXPECTED: &str = "an HTTP method such as \"POST\"";
    let Some(text) = word(json).filter(|text| is_token(text) && text.len() <= 64) else {
        return Err(got(json, EXPECTED));
    };
    let upper = text.to_ascii_uppercase();
    match upper.as_str() {
        "GET" | "HEAD" | "OPTIONS" | "TRACE" => {
            Err(format!("{}: a safe method passes untouched and can't be covered", got(json, EXPECTED)))
        }
        "CONNECT" => Err(format!("{}: a tunnel passes untouched and can't be covered", got(json, EXPECTED))),
        _ if upper != text => {
            Err(format!("{}: methods are case-sensitive, write {}", got(json, EXPECTED), quoted(&upper)))
        }
        _ => Ok(upper),
    }
}

/// A header's name in lower case.
pub(super) fn header(json: &Json) -> Result<String, String> {
    header_as_written(json).map(|name| name.to_ascii_lowercase())
}

fn header_as_written(json: &Json) -> Result<&str, String> {
    const EXPECTED: &str = "a header name such as \"x-account-id\"";
    match word(json) {
        Some(text) if text.starts_with(':') => {
            Err(format!("{}: a pseudo header is not one", got(json, EXPECTED)))
        }
        // A `*` would be a legal character and match nothing.
        Some(text) if text.contains('*') => {
            Err(format!("{}: every header is named in full, there are no wildcards", got(json, EXPECTED)))
        }
        Some(text) if is_token(text) && text.len() <= 256 => Ok(text),
        Some(_) | None => Err(got(json, EXPECTED)),
    }
}

/// The header that carries the key.
pub(super) fn key_header(json: &Json) -> Result<String, String> {
    let name = request_header(json)?;
    if HOP_BY_HOP.contains(&name.as_str()) || matches!(name.as_str(), "host" | "authorization" | "cookie") {
        return Err(got(json, "a header that clients set to a new value for each operation"));
    }
    Ok(name)
}

/// A header that a part of the scope is read from.
pub(super) fn scope_header(json: &Json) -> Result<String, String> {
    let name = request_header(json)?;
    if name == "authorization" {
        return Err(format!(
            "{}: write {{\"authorization\": true}} instead",
            got(json, "a header whose value is one word")
        ));
    }
    if HOP_BY_HOP.contains(&name.as_str()) {
        return Err(got(json, "a header that says who the caller is"));
    }
    Ok(name)
}

/// A request header that counts in the fingerprint.
pub(super) fn fingerprint_header(json: &Json) -> Result<String, String> {
    let name = request_header(json)?;
    if name != "content-length" && HOP_BY_HOP.contains(&name.as_str()) {
        return Err(got(json, "a header that belongs to the request and not to its connection"));
    }
    Ok(name)
}

fn request_header(json: &Json) -> Result<String, String> {
    let name = header(json)?;
    if OWN_REQUEST_HEADERS.contains(&name.as_str()) {
        return Err(format!("{}: this filter removes it from every request", got(json, "another header")));
    }
    Ok(name)
}

/// A response header that may be kept although it is dropped by default.
pub(super) fn kept_header(json: &Json) -> Result<String, String> {
    let name = header(json)?;
    if HOP_BY_HOP.contains(&name.as_str()) {
        return Err(format!(
            "{}: it belongs to one connection or message",
            got(json, "a header that can be replayed")
        ));
    }
    Ok(name)
}

/// The header that marks a replay, as written.
pub(super) fn replay_header(json: &Json) -> Result<String, String> {
    let name = header_as_written(json)?;
    let lower = name.to_ascii_lowercase();
    let taken = HOP_BY_HOP.contains(&lower.as_str())
        || lower.starts_with("content-")
        || matches!(lower.as_str(), "cache-control" | "date" | "set-cookie" | "x-idempotency-refusal");
    if taken { Err(got(json, "a header that has no other meaning")) } else { Ok(name.to_owned()) }
}

/// Prefix of the problem types' URIs. It stands between `<` and `>` in a `Link` header (RFC 8288 section 3).
pub(super) fn problem_type_base(json: &Json) -> Result<String, String> {
    word(json)
        .filter(|text| text.len() <= 512)
        .filter(|text| {
            let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            rest.is_some_and(|rest| rest.len() > 1 && !rest.starts_with(['/', '?', '#']))
        })
        .filter(|text| text.ends_with(['/', '#']) && text.matches('#').count() <= 1)
        .filter(|text| !text.contains('#') || text.ends_with('#'))
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"'<>\\^`{|}".contains(&byte)))
        .map(str::to_owned)
        .ok_or_else(|| {
            got(
                json,
                "an absolute http or https URI that ends with \"/\" or \"#\" and has no spaces or quotes",
            )
        })
}

pub(super) fn word(json: &Json) -> Option<&str> {
    if let Json::Text(text) = json { Some(text) } else { None }
}

/// RFC 9110 section 5.6.2.
fn is_token(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_value(text: &str) -> Json {
        Json::Text(text.to_owned())
    }

    #[test]
    fn a_duration_is_exact_or_refused() {
        let parse = duration(Duration::from_millis(1));
        for (text, millis) in [
            ("1ms", 1),
            ("500ms", 500),
            ("60s", 60_000),
            ("15m", 900_000),
            ("24h", 86_400_000),
            ("8760h", 31_536_000_000),
        ] {
            assert_eq!(parse(&text_value(text)), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "s",
            "60",
            "0s",
            "0ms",
            "-5s",
            "+5s",
            "1.5s",
            "1h30m",
            " 60s",
            "60s ",
            "60 s",
            "60S",
            "1d",
            "8761h",
            "١s",
            "18446744073709551615h",
            "18446744073709551616ms",
            "18446744073709551615ms",
        ] {
            assert!(parse(&text_value(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn a_bare_number_is_refused_with_the_text_to_write() {
        let parse = duration(Duration::from_millis(1));
        for (json, hint) in [
            (Json::Integer(60), "write \"60s\""),
            (Json::Float(60.0), "write \"60s\""),
            (Json::Integer(0), "write \"60s\""),
            (Json::Float(1.5), "write \"60s\""),
            (Json::Integer(15), "write \"15s\""),
        ] {
            assert!(parse(&json).unwrap_err().contains(hint), "{json:?}");
        }
    }

    #[test]
    fn the_text_to_write_has_a_unit_that_fits() {
        let span = Span { least: Duration::from_millis(10), most: Duration::from_secs(30), example: "250ms" };
        for (number, hint) in [
            (5, "\"5s\" for seconds"),
            (500, "\"500ms\" for milliseconds"),
            (0, "\"250ms\""),
            (99_999, "\"250ms\""),
        ] {
            let message = duration_of(span)(&Json::Integer(number)).unwrap_err();
            assert!(message.contains(&format!("write {hint}")), "{message}");
        }
    }

    #[test]
    fn visible_text_is_counted_with_its_ends() {
        let parse = visible(1, 3, "so");
        assert_eq!(parse(&text_value("a~!")), Ok("a~!".to_owned()));
        for text in ["", "abcd", "a b", "é", "a\n"] {
            assert!(parse(&text_value(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_shown_as_they_are_written() {
        for text in ["1ms", "1500ms", "90s", "1m", "61m", "24h", "8760h"] {
            assert_eq!(parse_duration(text).map(shown).as_deref(), Some(text));
        }
    }

    #[test]
    fn a_float_with_an_integral_value_is_an_integer() {
        let parse = integer(0, u64::MAX);
        assert_eq!(parse(&Json::Float(1e6)), Ok(1_000_000));
        assert_eq!(parse(&Json::Float(-0.0)), Ok(0));
        assert_eq!(parse(&Json::Integer(1_048_576)), Ok(1_048_576));
        for json in [
            Json::Float(0.5),
            Json::Float(-1.0),
            Json::Float(1e300),
            Json::Float(f64::NAN),
            Json::Integer(-1),
        ] {
            assert!(parse(&json).is_err(), "{json:?}");
        }
    }

    #[test]
    fn a_range_includes_its_ends() {
        let parse = integer(2, 4);
        let accepted: Vec<_> = (0..=6).filter(|value| parse(&Json::Integer(*value)).is_ok()).collect();
        assert_eq!(accepted, [2, 3, 4]);
    }

    #[test]
    fn only_an_upper_case_method_that_is_not_safe_can_be_covered() {
        for text in ["POST", "PATCH", "PUT", "DELETE", "PURGE"] {
            assert!(method(&text_value(text)).is_ok(), "{text}");
        }
        for (text, reason) in [
            ("post", "write \"POST\""),
            ("GET", "safe method"),
            ("head", "safe method"),
            ("OPTIONS", "safe method"),
            ("TRACE", "safe method"),
            ("CONNECT", "tunnel"),
            ("PO ST", "expected an HTTP method"),
            ("", "expected an HTTP method"),
        ] {
            assert!(method(&text_value(text)).unwrap_err().contains(reason), "{text}");
        }
    }

    #[test]
    fn a_problem_type_base_can_stand_in_a_link_header() {
        for text in ["https://example.com/problems/", "http://a.b/docs#", "https://[::1]:8443/p/?v=1/"] {
            assert!(problem_type_base(&text_value(text)).is_ok(), "{text}");
        }
        for text in [
            "",
            "https://",
            "https:///",
            "https://#",
            "ftp://a/",
            "example.com/",
            "/problems/",
            "https://a/problems",
            "https://a/ /",
            "https://a/<b>/",
            "https://a/\"/",
            "https://a/\n/",
            "https://a/é/",
            "https://a/#x/",
            "https://a/##",
        ] {
            assert!(problem_type_base(&text_value(text)).is_err(), "{text}");
        }
    }

    #[test]
    fn a_header_name_is_a_token_without_wildcards() {
        assert_eq!(header(&text_value("X-Account_ID")), Ok("x-account_id".to_owned()));
        for text in ["", ":authority", "x account", "x:y", "x-é", "ratelimit-*", "x\n"] {
            assert!(header(&text_value(text)).is_err(), "{text}");
        }
    }
}
