//! A record for people and for programs. A body is shown only where it was asked for.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use idempotency::record::codec::StoredResponse;
use serde_json::{Value, json};

use super::record::{Found, State};
use crate::output::{DIM, ERROR, GOOD, STRONG, WARNING};

/// As JSON: docs/command-records.md says what each member means.
pub fn to_json(found: &Found, show_body: bool) -> Value {
    let mut json = json!({
        "redis_key": found.redis_key,
        "state": found.state.word(),
        "owner": found.owner,
        "attempt": found.attempt,
        "created_ms": found.created_ms,
        "age_ms": millis(found.age),
        "lease_remaining_ms": null,
        "reason": null,
        "expires_in_ms": found.expires_in.map(millis),
        "fingerprint": found.fingerprint,
        "fingerprint_version": found.fingerprint_version,
        "format": found.format,
        "resolved": found.resolved.as_ref().map(|(at, from)| json!({"at_ms": at, "from": from})),
    });
    let mut put = |name: &str, value: Value| {
        if let Some(object) = json.as_object_mut() {
            object.insert(name.to_owned(), value);
        }
    };
    match &found.state {
        State::InFlight { remaining } => put("lease_remaining_ms", json!(millis(*remaining))),
        State::Abandoned { since } => {
            let ago = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
            put("lease_remaining_ms", json!(ago.saturating_neg()));
        }
        State::Failed { reason } => put("reason", json!(reason.as_str())),
        State::Unreadable { why } => put("reason", json!(why)),
        State::Completed => {}
    }
    if let Some(response) = &found.response {
        put("response", response_json(response, show_body));
    }
    json
}

fn response_json(encoded: &[u8], show_body: bool) -> Value {
    let format = encoded.first();
    let response = match StoredResponse::decode(encoded) {
        Ok(response) => response,
        Err(error) => return json!({ "format": format, "error": error.to_string() }),
    };
    let lines: Vec<[String; 2]> =
        response.headers.iter().map(|(name, value)| [text(name), text(value)]).collect();
    let mut json = json!({
        "format": format,
        "status": response.status,
        "headers": lines,
        "tombstone": response.body.is_none(),
        "body_bytes": response.body.map(<[u8]>::len),
        "kept_for_an_origin": response.origin.is_some(),
    });
    if let (true, Some(body), Some(object)) = (show_body, response.body, json.as_object_mut()) {
        match std::str::from_utf8(body) {
            Ok(text) => object.insert("body".to_owned(), json!(text)),
            Err(_) => object.insert("body_hex".to_owned(), json!(idempotency::key::hex(body))),
        };
    }
    json
}

/// As lines of text.
pub fn to_text(found: &Found, show_body: bool) -> String {
    let mut out = format!("{STRONG}{}{STRONG:#}\n", found.redis_key);
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "  {DIM}{name:<12}{DIM:#} {value}");
    };
    line("state", &state(&found.state));
    if !found.owner.is_empty() {
        line("attempt", &found.attempt.to_string());
        line("owner", &found.owner);
        line("claimed", &format!("{}, {} ago", moment(found.created_ms), span(found.age)));
    }
    match &found.state {
        State::InFlight { remaining } => line("lease", &format!("holds for {} more", span(*remaining))),
        State::Abandoned { since } => line("lease", &format!("ended {} ago", span(*since))),
        State::Completed | State::Failed { .. } | State::Unreadable { .. } => {}
    }
    line(
        "expires",
        &found.expires_in.map_or_else(|| "never".to_owned(), |left| format!("in {}", span(left))),
    );
    if !found.fingerprint.is_empty() {
        line("fingerprint", &format!("{} (version {})", found.fingerprint, found.fingerprint_version));
    }
    if !found.format.is_empty() {
        line("format", &found.format);
    }
    if let Some((at, from)) = &found.resolved {
        line("resolved", &format!("{} by an operator; it was: {from}", moment(*at)));
    }
    if let Some(response) = &found.response {
        match StoredResponse::decode(response) {
            Ok(response) => {
                let size = response.body.map_or_else(
                    || "its body was not kept".to_owned(),
                    |body| format!("a body of {} bytes", body.len()),
                );
                line("response", &format!("{}, {size}", response.status));
                for (name, value) in &response.headers {
                    line("", &format!("{}: {}", text(name), text(value)));
                }
                if let (true, Some(body)) = (show_body, response.body) {
                    let _ = writeln!(out, "\n{}", text(body));
                }
            }
            Err(error) => line("response", &error.to_string()),
        }
    }
    out
}

/// A record's state in colour.
pub fn state(state: &State) -> String {
    match state {
        State::InFlight { .. } => "in flight".to_owned(),
        State::Abandoned { .. } => format!("{WARNING}abandoned{WARNING:#}"),
        State::Completed => format!("{GOOD}completed{GOOD:#}"),
        State::Failed { reason } => format!("{ERROR}failed{ERROR:#} ({})", reason.as_str()),
        State::Unreadable { why } => format!("{WARNING}unreadable{WARNING:#}: {why}"),
    }
}

/// Whole seconds, or milliseconds below one.
pub fn span(duration: Duration) -> String {
    let shown = if duration < Duration::from_secs(1) {
        Duration::from_millis(millis(duration))
    } else {
        Duration::from_secs(duration.as_secs())
    };
    humantime::format_duration(shown).to_string()
}

fn moment(at_ms: u64) -> String {
    /// The end of the year 9999, beyond which there is no such text.
    const LAST: u64 = 253_402_300_799_999;
    SystemTime::UNIX_EPOCH
        .checked_add(Duration::from_millis(at_ms.min(LAST)))
        .map_or_else(String::new, |at| humantime::format_rfc3339_millis(at).to_string())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// What a terminal may be given of foreign bytes.
fn text(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    text.chars().map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c }).collect()
}
