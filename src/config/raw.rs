//! The configuration as written: every setting valid by itself, none filled in, none compared with another.

use std::time::Duration;

use super::fields::{Field, Object, got, list, nearest, report};
use super::json::Json;
use super::matcher::read_match;
use super::problem::Problems;
use super::scope::read_scope;
use super::store::{CLUSTER, RawStore, read_store};
use super::values::{
    Span, boolean, choice, duration, duration_of, fingerprint_header, header, integer, kept_header,
    key_header, length, name, problem_type_base, replay_header, status, text, visible, word,
};
use super::{
    Commit, InFlight, KeyFormat, KeySyntax, Matcher, MissingKey, Mode, OnAbandoned, OnFailure, OnStoreError,
    Scope, Statuses,
};

/// Bound of the bodies' settings, in bytes: Envoy holds what this filter holds.
const LARGEST_BODY: u64 = 16 * 1024 * 1024;

/// Half of what V8 gives one VM.
const LARGEST_CAPTURES: u64 = 512 * 1024 * 1024;

/// A request that waits is held, with its body.
const MOST_WAITERS: u64 = 65_536;

const REQUEST_END_HOLD: &str = "request_end_hold";

#[derive(Debug)]
pub(super) enum RawPlugin {
    Filter(Box<RawConfig>),
    RequestEndHold,
}

#[derive(Debug, Default)]
pub(super) struct RawConfig {
    pub(super) store: Field<RawStore>,
    pub(super) on_store_error: Field<OnStoreError>,
    pub(super) execute_cluster: Field<String>,
    pub(super) rules: Field<Vec<RawRule>>,
    pub(super) defaults: RawRule,
    pub(super) statuses: Field<Statuses>,
    pub(super) problem_type_base: Field<String>,
    pub(super) limits: RawLimits,
}

#[derive(Debug, Default)]
pub(super) struct RawLimits {
    pub(super) captured_bytes: Field<u64>,
    pub(super) detached_bytes: Field<u64>,
    pub(super) waiters: Field<u64>,
}

/// A rule, or the defaults of all.
#[derive(Debug, Default, Clone)]
pub(super) struct RawRule {
    pub(super) path: String,
    pub(super) name: Field<String>,
    pub(super) matcher: Field<Matcher>,
    pub(super) mode: Field<Mode>,
    pub(super) header: Field<String>,
    pub(super) key: RawKey,
    pub(super) missing_key: Field<MissingKey>,
    pub(super) namespace: Field<String>,
    pub(super) scope: Field<Scope>,
    pub(super) max_scope_length: Field<usize>,
    pub(super) fingerprint: RawFingerprint,
    pub(super) body_timeout: Field<Duration>,
    pub(super) max_request_body_bytes: Field<u64>,
    pub(super) max_response_body_bytes: Field<u64>,
    pub(super) lock_ttl: Field<Duration>,
    pub(super) record_ttl: Field<Duration>,
    pub(super) failed_ttl: Field<Duration>,
    pub(super) replay_statuses: Field<Vec<ReplayStatus>>,
    pub(super) release_statuses: Field<Vec<u16>>,
    pub(super) on_failure: Field<OnFailure>,
    pub(super) on_unknown: Field<OnFailure>,
    pub(super) on_abandoned: Field<OnAbandoned>,
    pub(super) in_flight: Field<InFlight>,
    pub(super) wait_timeout: Field<Duration>,
    pub(super) trust_route_retries: Field<bool>,
    pub(super) execution: Field<RawExecution>,
    pub(super) execute_timeout: Field<Duration>,
    pub(super) commit: Field<Commit>,
    pub(super) replay_header: Field<String>,
    pub(super) drop_response_headers: Field<Vec<String>>,
    pub(super) keep_response_headers: Field<Vec<String>>,
}

#[derive(Debug, Default, Clone)]
pub(super) struct RawKey {
    pub(super) max_length: Field<usize>,
    pub(super) format: Field<KeyFormat>,
    pub(super) syntax: Field<KeySyntax>,
}

#[derive(Debug, Default, Clone)]
pub(super) struct RawFingerprint {
    pub(super) authority: Field<bool>,
    pub(super) headers: Field<Vec<String>>,
    pub(super) body: Field<bool>,
}

/// An entry of `replay_statuses`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReplayStatus {
    /// `"2xx"` is 2.
    Class(u8),
    Single(u16),
}

/// Who sends a request on; its time-out is a setting of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RawExecution {
    Inline,
    Detached,
}

/// Whose settings an object holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Rule,
    Defaults,
}

pub(super) fn read_plugin(json: &Json, problems: &mut Problems) -> Option<RawPlugin> {
    let mut object = Object::begin(json, "", "an object with store and rules", problems)?;
    match object.field("role", problems, role) {
        Field::Absent => {}
        // Nothing else was given, so nothing else is missing.
        Field::Invalid if object.is_read() => return None,
        // The rest can only be meant for the filter.
        Field::Invalid => {}
        Field::Given { .. } => {
            object.finish_alone(
                &format!("given beside the role \"{REQUEST_END_HOLD}\", which has no settings"),
                problems,
            );
            return Some(RawPlugin::RequestEndHold);
        }
    }
    Some(RawPlugin::Filter(Box::new(read_config(object, problems))))
}

/// The one role that has a name.
fn role(json: &Json) -> Result<(), String> {
    match word(json) {
        Some(REQUEST_END_HOLD) => Ok(()),
        Some(text) if nearest(text, &[REQUEST_END_HOLD]).is_some() => {
            Err(format!("got {}, did you mean \"{REQUEST_END_HOLD}\"?", json.excerpt()))
        }
        _ => Err(got(json, &format!("\"{REQUEST_END_HOLD}\", or no role for the filter"))),
    }
}

fn read_config(mut object: Object<'_>, problems: &mut Problems) -> RawConfig {
    let store = object.nested("store", problems, read_store);
    let on_store_error = object.field(
        "on_store_error",
        problems,
        choice(&[("deny", OnStoreError::Deny), ("allow", OnStoreError::Allow)]),
    );
    let defaults = object.nested("defaults", problems, |json, path, problems| {
        read_rule(json, path, Owner::Defaults, problems)
    });
    let rules = object.nested("rules", problems, read_rules);
    let statuses = object.nested("statuses", problems, read_statuses);
    let problem_type_base = object.field("problem_type_base", problems, problem_type_base);
    let limits = object.nested("limits", problems, read_limits);
    let execute_cluster = object.field("execute_cluster", problems, visible(1, 255, CLUSTER));
    object.finish(problems);
    RawConfig {
        store,
        on_store_error,
        execute_cluster,
        rules,
        defaults: defaults.given_or(RawRule::default()),
        statuses,
        problem_type_base,
        limits: limits.given_or(RawLimits::default()),
    }
}

fn read_limits(json: &Json, path: &str, problems: &mut Problems) -> Option<RawLimits> {
    let expected = "an object with any of: captured_bytes, detached_bytes, waiters";
    let mut object = Object::begin(json, path, expected, problems)?;
    let limits = RawLimits {
        captured_bytes: object.field("captured_bytes", problems, integer(0, LARGEST_CAPTURES)),
        detached_bytes: object.field("detached_bytes", problems, integer(0, LARGEST_CAPTURES)),
        waiters: object.field("waiters", problems, integer(1, MOST_WAITERS)),
    };
    object.finish(problems);
    Some(limits)
}

fn read_rules(json: &Json, path: &str, problems: &mut Problems) -> Option<Vec<RawRule>> {
    const EXPECTED: &str = "a list of at least one rule";
    match json {
        Json::List(items) if !items.is_empty() => Some(
            items
                .iter()
                .enumerate()
                .filter_map(|(index, item)| {
                    read_rule(item, &format!("{path}[{index}]"), Owner::Rule, problems)
                })
                .collect(),
        ),
        Json::List(_)
        | Json::Null
        | Json::Bool(_)
        | Json::Integer(_)
        | Json::Float(_)
        | Json::Text(_)
        | Json::Object(_) => {
            problems.refuse(path, got(json, EXPECTED));
            None
        }
    }
}

fn read_rule(json: &Json, path: &str, owner: Owner, problems: &mut Problems) -> Option<RawRule> {
    const MIN_DURATION: Duration = Duration::from_millis(1);
    const MIN_LOCK_TTL: Duration = Duration::from_millis(100);
    const WAIT_TIMEOUTS: Span =
        Span { least: Duration::from_millis(100), most: Duration::from_secs(300), example: "10s" };
    const EXECUTE_TIMEOUTS: Span =
        Span { least: Duration::from_millis(100), most: Duration::from_secs(3600), example: "60s" };
    let expected = match owner {
        Owner::Rule => "an object with a rule's settings",
        Owner::Defaults => "an object with settings for every rule",
    };
    let mut object = Object::begin(json, path, expected, problems)?;
    let on_failure = || choice(&[("retain", OnFailure::Retain), ("release", OnFailure::Release)]);

    let (name, matcher) = match owner {
        Owner::Rule => (object.field("name", problems, name), object.nested("match", problems, read_match)),
        Owner::Defaults => {
            object.refuse("name", "belongs in each rule: names are unique", problems);
            object.refuse("match", "belongs in each rule", problems);
            (Field::Absent, Field::Absent)
        }
    };
    let rule = RawRule {
        path: path.to_owned(),
        name,
        matcher,
        mode: object.field(
            "mode",
            problems,
            choice(&[("enforce", Mode::Enforce), ("shadow", Mode::Shadow), ("off", Mode::Off)]),
        ),
        header: object.field("header", problems, key_header),
        key: object.nested("key", problems, read_key).given_or(RawKey::default()),
        missing_key: object.field(
            "missing_key",
            problems,
            choice(&[("reject", MissingKey::Reject), ("pass", MissingKey::Pass)]),
        ),
        namespace: object.field("namespace", problems, text(0, 128)),
        scope: object.nested("scope", problems, read_scope),
        max_scope_length: object.field("max_scope_length", problems, length(1, 4096)),
        fingerprint: object
            .nested("fingerprint", problems, read_fingerprint)
            .given_or(RawFingerprint::default()),
        body_timeout: object.field("body_timeout", problems, duration(MIN_DURATION)),
        max_request_body_bytes: object.field("max_request_body_bytes", problems, integer(0, LARGEST_BODY)),
        max_response_body_bytes: object.field("max_response_body_bytes", problems, integer(0, LARGEST_BODY)),
        lock_ttl: object.field("lock_ttl", problems, duration(MIN_LOCK_TTL)),
        record_ttl: object.field("record_ttl", problems, duration(MIN_DURATION)),
        failed_ttl: object.field("failed_ttl", problems, duration(MIN_DURATION)),
        replay_statuses: object.nested("replay_statuses", problems, read_replay_statuses),
        release_statuses: object.nested("release_statuses", problems, read_release_statuses),
        on_failure: object.field("on_failure", problems, on_failure()),
        on_unknown: object.field("on_unknown", problems, on_failure()),
        on_abandoned: object.field(
            "on_abandoned",
            problems,
            choice(&[("takeover", OnAbandoned::Takeover), ("retain", OnAbandoned::Retain)]),
        ),
        in_flight: object.field(
            "in_flight",
            problems,
            choice(&[("reject", InFlight::Reject), ("wait", InFlight::Wait)]),
        ),
        wait_timeout: object.field("wait_timeout", problems, duration_of(WAIT_TIMEOUTS)),
        trust_route_retries: object.field("trust_route_retries", problems, boolean),
        commit: object.field(
            "commit",
            problems,
            choice(&[
                ("before_response_end", Commit::BeforeResponseEnd),
                ("after_response", Commit::AfterResponse),
            ]),
        ),
        execution: object.field(
            "execution",
            problems,
            choice(&[("inline", RawExecution::Inline), ("detached", RawExecution::Detached)]),
        ),
        execute_timeout: object.field("execute_timeout", problems, duration_of(EXECUTE_TIMEOUTS)),
        replay_header: object.field("replay_header", problems, replay_header),
        drop_response_headers: object.nested("drop_response_headers", problems, header_list(header)),
        keep_response_headers: object.nested("keep_response_headers", problems, header_list(kept_header)),
    };
    object.finish(problems);
    Some(rule)
}

fn read_key(json: &Json, path: &str, problems: &mut Problems) -> Option<RawKey> {
    let mut object =
        Object::begin(json, path, "an object with any of: max_length, format, syntax", problems)?;
    let key = RawKey {
        max_length: object.field("max_length", problems, length(1, 1024)),
        format: object.field(
            "format",
            problems,
            choice(&[("any", KeyFormat::Any), ("uuid", KeyFormat::Uuid)]),
        ),
        syntax: object.field(
            "syntax",
            problems,
            choice(&[("lenient", KeySyntax::Lenient), ("strict", KeySyntax::Strict)]),
        ),
    };
    object.finish(problems);
    Some(key)
}

fn read_fingerprint(json: &Json, path: &str, problems: &mut Problems) -> Option<RawFingerprint> {
    let mut object = Object::begin(json, path, "an object with any of: authority, headers, body", problems)?;
    let fingerprint = RawFingerprint {
        authority: object.field("authority", problems, boolean),
        headers: object.nested("headers", problems, header_list(fingerprint_header)),
        body: object.field("body", problems, boolean),
    };
    object.finish(problems);
    Some(fingerprint)
}

fn header_list(
    parse: impl Fn(&Json) -> Result<String, String>,
) -> impl FnOnce(&Json, &str, &mut Problems) -> Option<Vec<String>> {
    move |json, path, problems| {
        list(json, path, "a list of header names", problems, |json, path, problems| {
            report(parse(json), path, problems)
        })
    }
}

fn read_replay_statuses(json: &Json, path: &str, problems: &mut Problems) -> Option<Vec<ReplayStatus>> {
    let parse = |json: &Json| match json {
        Json::Text(text) => match text.as_str() {
            "2xx" => Ok(ReplayStatus::Class(2)),
            "3xx" => Ok(ReplayStatus::Class(3)),
            "4xx" => Ok(ReplayStatus::Class(4)),
            "5xx" => Ok(ReplayStatus::Class(5)),
            _ => Err(got(
                json,
                "a status from 200 to 599, as a number, or \"2xx\", \"3xx\", \"4xx\" or \"5xx\"",
            )),
        },
        Json::Integer(_) | Json::Float(_) => status(200, 599)(json).map(ReplayStatus::Single),
        Json::Null | Json::Bool(_) | Json::List(_) | Json::Object(_) => {
            Err(got(json, "a status from 200 to 599 or \"2xx\", \"3xx\", \"4xx\" or \"5xx\""))
        }
    };
    let expected = "a list of statuses such as [\"2xx\", 404]";
    list(json, path, expected, problems, |json, path, problems| report(parse(json), path, problems))
}

fn read_release_statuses(json: &Json, path: &str, problems: &mut Problems) -> Option<Vec<u16>> {
    let parse = |json: &Json| {
        status(200, 599)(json).map_err(|message| match json {
            Json::Text(_) => format!("{message}, as a number: classes can't be released as a whole"),
            Json::Null
            | Json::Bool(_)
            | Json::Integer(_)
            | Json::Float(_)
            | Json::List(_)
            | Json::Object(_) => message,
        })
    };
    let expected = "a list of statuses such as [429, 503]";
    list(json, path, expected, problems, |json, path, problems| report(parse(json), path, problems))
}

fn read_statuses(json: &Json, path: &str, problems: &mut Problems) -> Option<Statuses> {
    let mut object = Object::begin(json, path, "an object with a status for each refusal", problems)?;
    let mut read = |name, default| object.field(name, problems, status(400, 599)).given_or(default);
    let default = Statuses::default();
    let statuses = Statuses {
        missing_key: read("missing_key", default.missing_key),
        invalid_key: read("invalid_key", default.invalid_key),
        invalid_scope: read("invalid_scope", default.invalid_scope),
        body_timeout: read("body_timeout", default.body_timeout),
        payload_too_large: read("payload_too_large", default.payload_too_large),
        in_flight: read("in_flight", default.in_flight),
        mismatch: read("mismatch", default.mismatch),
        failed: read("failed", default.failed),
        abandoned: read("abandoned", default.abandoned),
        response_not_kept: read("response_not_kept", default.response_not_kept),
        store_unavailable: read("store_unavailable", default.store_unavailable),
        store_full: read("store_full", default.store_full),
        execution_unavailable: read("execution_unavailable", default.execution_unavailable),
    };
    object.finish(problems);
    Some(statuses)
}
