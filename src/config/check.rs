//! From the configuration as written to [`Config`]: defaults filled in, settings compared with each other.

use std::rc::Rc;
use std::time::Duration;

use super::fields::Field;
use super::json::{Json, quoted};
use super::matcher::match_all;
use super::problem::{ConfigError, ConfigErrors, Problems};
use super::raw::{
    RawConfig, RawExecution, RawFingerprint, RawKey, RawPlugin, RawRule, ReplayStatus, read_plugin,
};
use super::store::{RawRedis, RawStore, TIMEOUT};
use super::values::shown;
use super::warnings::{warn_about_limits, warn_about_redis, warn_about_rule, warn_about_waiting};
use super::{
    Commit, Config, Execution, FingerprintPolicy, InFlight, KeyFormat, KeyPolicy, KeySyntax, Limits,
    MissingKey, Mode, OnAbandoned, OnFailure, OnStoreError, Plugin, Rule, Scope, ScopePart, StatusRules,
    Statuses,
};
use crate::sorted::{NameSet, repeats};

pub(super) const LOCK_TTL: Duration = Duration::from_secs(60);
pub(super) const RECORD_TTL: Duration = Duration::from_secs(24 * 3600);
pub(super) const FAILED_TTL: Duration = RECORD_TTL;
pub(super) const KEY_HEADER: &str = "idempotency-key";
pub(super) const MAX_REQUEST_BODY_BYTES: u64 = 1024 * 1024;
pub(super) const MAX_RESPONSE_BODY_BYTES: u64 = 256 * 1024;
pub(super) const CAPTURED_BYTES: u64 = 64 * 1024 * 1024;
pub(super) const DETACHED_BYTES: u64 = CAPTURED_BYTES;
const WAIT_TIMEOUT: Duration = Duration::from_secs(10);
const WAITERS: u64 = 1024;
const REPLAY_STATUSES: [ReplayStatus; 3] =
    [ReplayStatus::Class(2), ReplayStatus::Class(3), ReplayStatus::Class(4)];
const RELEASE_STATUSES: [u16; 8] = [401, 407, 408, 421, 425, 429, 501, 503];
const PROBLEM_TYPE_BASE: &str = "https://envoy-idempotency.example/problems/";

/// Reads a plugin configuration, whichever part of this module it is for.
///
/// # Errors
///
/// Every mistake at once, each with its place, the value given and what is allowed.
pub fn load_plugin(json: &[u8]) -> Result<Plugin, ConfigErrors> {
    let mut problems = Problems::default();
    let tree = Json::parse(json).map_err(|message| problems.refuse("", message)).ok();
    let plugin = match tree.and_then(|tree| read_plugin(&tree, &mut problems)) {
        Some(RawPlugin::Filter(raw)) => check_config(*raw, &mut problems).map(Box::new).map(Plugin::Filter),
        Some(RawPlugin::RequestEndHold) => Some(Plugin::RequestEndHold),
        None => None,
    };
    let warnings = problems.into_warnings()?;
    match plugin {
        Some(Plugin::Filter(config)) => Ok(Plugin::Filter(Box::new(Config { warnings, ..*config }))),
        Some(Plugin::RequestEndHold) => Ok(Plugin::RequestEndHold),
        // Whatever yields no configuration has said why; this says so where it has not.
        None => Err(single_error("configuration", "refused for an unknown reason")),
    }
}

/// Reads a plugin configuration that must be the filter's.
///
/// # Errors
///
/// As [`load_plugin`], and for any other role.
pub fn load(json: &[u8]) -> Result<Config, ConfigErrors> {
    match load_plugin(json)? {
        Plugin::Filter(config) => Ok(*config),
        Plugin::RequestEndHold => Err(single_error(
            "role",
            "got \"request_end_hold\", expected the filter's configuration, without a role",
        )),
    }
}

fn single_error(path: &str, message: &str) -> ConfigErrors {
    ConfigErrors(vec![ConfigError { path: path.to_owned(), message: message.to_owned() }])
}

fn check_config(raw: RawConfig, problems: &mut Problems) -> Option<Config> {
    if raw.store.is_absent() {
        problems.refuse("store", format!("missing, expected {}", super::store::EXPECTED));
    }
    if raw.rules.is_absent() {
        problems.refuse("rules", "missing, expected a list of at least one rule");
    }
    compare(&raw.defaults, &Given, problems);
    let merged: Vec<_> =
        raw.rules.given_or(Vec::new()).into_iter().map(|rule| merge(rule, &raw.defaults)).collect();
    check_names(&merged, problems);
    if let Some(redis) = raw.store.located().and_then(|(store, _)| store.redis()) {
        for rule in &merged {
            compare_with_redis(rule, redis, problems);
        }
        warn_about_redis(redis, &raw.on_store_error, problems);
    }
    check_detached(&raw.execute_cluster, &raw.limits.detached_bytes, &merged, problems);
    warn_about_waiting(&merged, problems);
    warn_about_limits(&raw.limits.captured_bytes, &merged, problems);
    let rules: Vec<_> =
        merged.into_iter().filter_map(|rule| check_rule(rule, problems)).map(Rc::new).collect();
    Some(Config {
        store: raw.store.given().and_then(RawStore::fill_in)?,
        on_store_error: raw.on_store_error.given_or(OnStoreError::Deny),
        execute_cluster: raw.execute_cluster.given(),
        rules,
        statuses: raw.statuses.given_or(Statuses::default()),
        problem_type_base: raw.problem_type_base.given_or(PROBLEM_TYPE_BASE.to_owned()),
        limits: Limits {
            captured_bytes: raw.limits.captured_bytes.given_or(CAPTURED_BYTES),
            detached_bytes: raw.limits.detached_bytes.given_or(DETACHED_BYTES),
            waiters: u32::try_from(raw.limits.waiters.given_or(WAITERS)).unwrap_or(u32::MAX),
        },
        warnings: Vec::new(),
    })
}

/// A rule with what it takes from `defaults`; objects are merged member by member.
fn merge(rule: RawRule, defaults: &RawRule) -> RawRule {
    RawRule {
        path: rule.path,
        name: rule.name,
        matcher: rule.matcher,
        mode: rule.mode.or(&defaults.mode),
        header: rule.header.or(&defaults.header),
        key: RawKey {
            max_length: rule.key.max_length.or(&defaults.key.max_length),
            format: rule.key.format.or(&defaults.key.format),
            syntax: rule.key.syntax.or(&defaults.key.syntax),
        },
        missing_key: rule.missing_key.or(&defaults.missing_key),
        namespace: rule.namespace.or(&defaults.namespace),
        scope: rule.scope.or(&defaults.scope),
        max_scope_length: rule.max_scope_length.or(&defaults.max_scope_length),
        fingerprint: RawFingerprint {
            authority: rule.fingerprint.authority.or(&defaults.fingerprint.authority),
            headers: rule.fingerprint.headers.or(&defaults.fingerprint.headers),
            body: rule.fingerprint.body.or(&defaults.fingerprint.body),
        },
        body_timeout: rule.body_timeout.or(&defaults.body_timeout),
        max_request_body_bytes: rule.max_request_body_bytes.or(&defaults.max_request_body_bytes),
        max_response_body_bytes: rule.max_response_body_bytes.or(&defaults.max_response_body_bytes),
        lock_ttl: rule.lock_ttl.or(&defaults.lock_ttl),
        record_ttl: rule.record_ttl.or(&defaults.record_ttl),
        failed_ttl: rule.failed_ttl.or(&defaults.failed_ttl),
        replay_statuses: rule.replay_statuses.or(&defaults.replay_statuses),
        release_statuses: rule.release_statuses.or(&defaults.release_statuses),
        on_failure: rule.on_failure.or(&defaults.on_failure),
        on_unknown: rule.on_unknown.or(&defaults.on_unknown),
        on_abandoned: rule.on_abandoned.or(&defaults.on_abandoned),
        in_flight: rule.in_flight.or(&defaults.in_flight),
        wait_timeout: rule.wait_timeout.or(&defaults.wait_timeout),
        trust_route_retries: rule.trust_route_retries.or(&defaults.trust_route_retries),
        execution: rule.execution.or(&defaults.execution),
        execute_timeout: rule.execute_timeout.or(&defaults.execute_timeout),
        commit: rule.commit.or(&defaults.commit),
        replay_header: rule.replay_header.or(&defaults.replay_header),
        drop_response_headers: rule.drop_response_headers.or(&defaults.drop_response_headers),
        keep_response_headers: rule.keep_response_headers.or(&defaults.keep_response_headers),
    }
}

fn check_names(rules: &[RawRule], problems: &mut Problems) {
    for rule in rules {
        if rule.name.is_absent() {
            problems.refuse(
                &format!("{}.name", rule.path),
                "missing, expected 1 to 64 letters, digits, \"_\", \".\" or \"-\"",
            );
        }
    }
    let named: Vec<(&String, &str, &String)> = rules
        .iter()
        .filter_map(|rule| rule.name.located().map(|(name, at)| (name, at, &rule.path)))
        .collect();
    let name = |position: usize| named.get(position).map(|(name, ..)| *name);
    for (later, earlier) in repeats(named.len(), &mut |a, b| name(a).cmp(&name(b))) {
        if let (Some((name, at, _)), Some((_, _, other))) = (named.get(later), named.get(earlier)) {
            problems.refuse(at, format!("got {}, which {other} is named already", quoted(name)));
        }
    }
}

fn check_rule(rule: RawRule, problems: &mut Problems) -> Option<Rule> {
    if rule.scope.is_absent() {
        problems.refuse(
            &format!("{}.scope", rule.path),
            format!("missing here and in defaults, expected {}", super::scope::EXPECTED),
        );
    }
    compare(&rule, &GivenOrBuiltIn, problems);
    warn_about_rule(&rule, problems);

    let detached = is_detached(&rule);
    let execution = match (detached, rule.execute_timeout.given()) {
        (false, _) => Execution::Inline,
        (true, timeout) => Execution::Detached { timeout: timeout? },
    };
    // The record of an execution that nobody waited for is the only trace of it.
    let on_abandoned = if detached { OnAbandoned::Retain } else { OnAbandoned::Takeover };
    Some(Rule {
        name: rule.name.given()?,
        matcher: rule.matcher.given_or(match_all()),
        mode: rule.mode.given_or(Mode::Enforce),
        header: rule.header.given_or(KEY_HEADER.to_owned()),
        key: KeyPolicy {
            max_length: rule.key.max_length.given_or(255),
            format: rule.key.format.given_or(KeyFormat::Any),
            syntax: rule.key.syntax.given_or(KeySyntax::Lenient),
        },
        missing_key: rule.missing_key.given_or(MissingKey::Reject),
        namespace: rule.namespace.given_or(String::new()),
        scope: rule.scope.given()?,
        max_scope_length: rule.max_scope_length.given_or(255),
        fingerprint: FingerprintPolicy {
            authority: rule.fingerprint.authority.given_or(true),
            headers: rule.fingerprint.headers.given_or(Vec::new()),
            body: rule.fingerprint.body.given_or(true),
        },
        body_timeout: rule.body_timeout.given_or(Duration::from_secs(15)),
        max_request_body_bytes: rule.max_request_body_bytes.given_or(MAX_REQUEST_BODY_BYTES),
        max_response_body_bytes: rule.max_response_body_bytes.given_or(MAX_RESPONSE_BODY_BYTES),
        lock_ttl: rule.lock_ttl.given_or(LOCK_TTL),
        record_ttl: rule.record_ttl.given_or(RECORD_TTL),
        failed_ttl: rule.failed_ttl.given_or(FAILED_TTL),
        statuses: status_rules(
            &rule.replay_statuses.given_or(REPLAY_STATUSES.to_vec()),
            rule.release_statuses.given_or(RELEASE_STATUSES.to_vec()),
        ),
        on_failure: rule.on_failure.given_or(OnFailure::Retain),
        on_unknown: rule.on_unknown.given_or(OnFailure::Retain),
        on_abandoned: rule.on_abandoned.given_or(on_abandoned),
        in_flight: rule.in_flight.given_or(InFlight::Reject),
        wait_timeout: rule.wait_timeout.given_or(WAIT_TIMEOUT),
        trust_route_retries: rule.trust_route_retries.given_or(false),
        execution,
        commit: rule.commit.given_or(Commit::BeforeResponseEnd),
        replay_header: rule.replay_header.given_or("Idempotent-Replayed".to_owned()),
        drop_response_headers: rule.drop_response_headers.given_or(Vec::new()),
        keep_response_headers: rule.keep_response_headers.given_or(Vec::new()),
    })
}

/// Whether a rule says so itself, or through `defaults`.
pub(super) fn is_detached(rule: &RawRule) -> bool {
    matches!(rule.execution.known_or(&RawExecution::Inline), Some((RawExecution::Detached, _)))
}

/// What detached rules need beside themselves.
fn check_detached(
    cluster: &Field<String>,
    detached_bytes: &Field<u64>,
    rules: &[RawRule],
    problems: &mut Problems,
) {
    let detached: Vec<_> = rules.iter().filter(|rule| is_detached(rule)).collect();
    if let (true, Some((_, at))) = (detached.is_empty(), cluster.located()) {
        problems.warn(at, "has no effect without execution \"detached\"");
    }
    if let (false, true) = (detached.is_empty(), cluster.is_absent()) {
        problems.refuse(
            "execute_cluster",
            "missing, expected the Envoy cluster of the execution listener, since a rule's execution is \"detached\"",
        );
    }
    for rule in rules {
        if let (false, Some((_, at))) = (is_detached(rule), rule.execute_timeout.located())
            && (in_rule(at) || detached.is_empty())
        {
            problems.warn(at, "has no effect without execution \"detached\"");
        }
    }
    for rule in detached {
        if rule.execute_timeout.is_absent() {
            problems.refuse(
                &format!("{}.execute_timeout", rule.path),
                "missing here and in defaults, expected how long a detached execution may take, such as \"60s\": \
                 above the route's own timeout",
            );
        }
        if let Some((false, at)) = rule.fingerprint.body.known_or(&true)
            && let Some(at) = at
        {
            problems.refuse(
                at,
                "got false, expected true where execution is \"detached\": the filter sends the body, so it has to \
                 hold it",
            );
        }
        check_room(rule, detached_bytes, problems);
    }
}

/// A request of the largest size must have room on a worker that does nothing else.
fn check_room(rule: &RawRule, detached_bytes: &Field<u64>, problems: &mut Problems) {
    let (Some((room, room_at)), Some((request, request_at)), Some((response, response_at))) = (
        detached_bytes.known_or(&DETACHED_BYTES),
        rule.max_request_body_bytes.known_or(&MAX_REQUEST_BODY_BYTES),
        rule.max_response_body_bytes.known_or(&MAX_RESPONSE_BODY_BYTES),
    ) else {
        return;
    };
    let least = request.saturating_add(*response).max(crate::exchange::LEAST_ROOM);
    if *room >= least {
        return;
    }
    let at = room_at.or(most_specific(request_at, response_at)).unwrap_or("limits.detached_bytes");
    problems.refuse(
        at,
        format!(
            "a detached request of max_request_body_bytes {request} with max_response_body_bytes {response} has no \
             room in limits.detached_bytes {room}, expected at least {least}"
        ),
    );
}

fn status_rules(replay: &[ReplayStatus], mut release: Vec<u16>) -> StatusRules {
    let mut replay_classes = [false; 5];
    let mut singles = Vec::new();
    for status in replay {
        match status {
            ReplayStatus::Class(class) => {
                if let Some(replayed) = replay_classes.get_mut(usize::from(*class).wrapping_sub(1)) {
                    *replayed = true;
                }
            }
            ReplayStatus::Single(status) => singles.push(*status),
        }
    }
    singles.sort_unstable();
    release.sort_unstable();
    StatusRules { replay_classes, replay: singles, release }
}

/// Where a comparison takes a setting from that was not given.
trait Source {
    fn value<'a, T>(&self, field: &'a Field<T>, built_in: &'a T) -> Option<Known<'a, T>>;
}

/// A value with its path; no path for a built-in one.
type Known<'a, T> = (&'a T, Option<&'a str>);

/// Only what was given: the defaults by themselves, since a rule may still set the other half of a pair.
struct Given;

impl Source for Given {
    fn value<'a, T>(&self, field: &'a Field<T>, _: &'a T) -> Option<Known<'a, T>> {
        field.located().map(|(value, path)| (value, Some(path)))
    }
}

/// What will be in force.
struct GivenOrBuiltIn;

impl Source for GivenOrBuiltIn {
    fn value<'a, T>(&self, field: &'a Field<T>, built_in: &'a T) -> Option<Known<'a, T>> {
        field.known_or(built_in)
    }
}

/// Compares settings with each other.
fn compare(rule: &RawRule, source: &impl Source, problems: &mut Problems) {
    compare_ttls(&rule.record_ttl, "record_ttl", &RECORD_TTL, rule, source, problems);
    compare_ttls(&rule.failed_ttl, "failed_ttl", &FAILED_TTL, rule, source, problems);
    compare_statuses(rule, source, problems);
    compare_response_headers(rule, source, problems);
    compare_scope(rule, source, problems);
}

fn compare_ttls(
    field: &Field<Duration>,
    name: &str,
    built_in: &Duration,
    rule: &RawRule,
    source: &impl Source,
    problems: &mut Problems,
) {
    let Some((ttl, ttl_at)) = source.value(field, built_in) else { return };
    let Some((lock_ttl, lock_at)) = source.value(&rule.lock_ttl, &LOCK_TTL) else { return };
    let least = lock_ttl.saturating_mul(2);
    if *ttl >= least {
        return;
    }
    let (ttl, lock_ttl, least) = (shown(*ttl), shown(*lock_ttl), shown(least));
    match (ttl_at, lock_at) {
        (Some(at), other) if in_rule(at) || !other.is_some_and(in_rule) => {
            problems.refuse(
                at,
                format!("got \"{ttl}\", expected at least \"{least}\", twice the lock_ttl of \"{lock_ttl}\""),
            );
        }
        (_, Some(at)) => {
            problems
                .refuse(at, format!("got \"{lock_ttl}\", expected at most half of the {name} of \"{ttl}\""));
        }
        (_, None) => {}
    }
}

fn compare_statuses(rule: &RawRule, source: &impl Source, problems: &mut Problems) {
    let (replay_built_in, release_built_in) = (REPLAY_STATUSES.to_vec(), RELEASE_STATUSES.to_vec());
    let Some((replay, replay_at)) = source.value(&rule.replay_statuses, &replay_built_in) else { return };
    let Some((release, release_at)) = source.value(&rule.release_statuses, &release_built_in) else { return };
    let Some(at) = most_specific(replay_at, release_at) else { return };
    for entry in replay {
        let ReplayStatus::Single(status) = entry else { continue };
        if release.contains(status) {
            let origin =
                if release_at.is_none() { "the default release_statuses" } else { "release_statuses" };
            problems.refuse(
                at,
                format!("got {status} in replay_statuses and in {origin}, expected it in one of them"),
            );
        }
    }
}

fn compare_response_headers(rule: &RawRule, source: &impl Source, problems: &mut Problems) {
    let none = Vec::new();
    let Some((kept, kept_at)) = source.value(&rule.keep_response_headers, &none) else { return };
    let Some((dropped, dropped_at)) = source.value(&rule.drop_response_headers, &none) else { return };
    let Some(at) = most_specific(kept_at, dropped_at) else { return };
    let dropped = NameSet::new(&dropped.iter().map(String::as_bytes).collect::<Vec<_>>());
    for name in kept.iter().filter(|name| dropped.has(name.as_bytes())) {
        problems.refuse(
            at,
            format!(
                "got {} in keep_response_headers and in drop_response_headers, expected it in one of them",
                quoted(name)
            ),
        );
    }
}

fn compare_scope(rule: &RawRule, source: &impl Source, problems: &mut Problems) {
    let (shared, key_header) = (Scope::Shared, KEY_HEADER.to_owned());
    let Some((scope, scope_at)) = source.value(&rule.scope, &shared) else { return };
    let Some((header, header_at)) = source.value(&rule.header, &key_header) else { return };
    let Some(at) = most_specific(scope_at, header_at) else { return };
    let Scope::Parts(parts) = scope else { return };
    if parts.iter().any(|part| matches!(part, ScopePart::Header(name) if name == header)) {
        problems.refuse(
            at,
            format!("got {} as a part of the scope and as the key's own header, expected a header that says who the caller is", quoted(header)),
        );
    }
}

/// Compares a rule with the store it uses.
fn compare_with_redis(rule: &RawRule, redis: &RawRedis, problems: &mut Problems) {
    let Some(timeout) = redis.timeout.known_or(&TIMEOUT) else { return };
    // A lease is renewed a third of it after the claim was sent, and at two thirds where that failed. With a quarter
    // as the time-out, that second renewal has its whole time before the lease ends.
    let lock_ttl = rule.lock_ttl.known_or(&LOCK_TTL);
    refuse_short(lock_ttl, timeout, 4, ["four times the", "a quarter of the lock_ttl"], problems);
    // Every poll is a claim; a wait that ends before the first one is answered is none.
    if let Some((InFlight::Wait, _)) = rule.in_flight.known_or(&InFlight::Reject) {
        let wait_timeout = rule.wait_timeout.known_or(&WAIT_TIMEOUT);
        refuse_short(wait_timeout, timeout, 1, ["the", "the wait_timeout"], problems);
    }
}

/// Refuses a duration that is less than `times` the store's timeout; `relations` say so from either side.
fn refuse_short(
    duration: Option<Known<'_, Duration>>,
    (timeout, timeout_at): Known<'_, Duration>,
    times: u32,
    [more, less]: [&str; 2],
    problems: &mut Problems,
) {
    let Some((duration, duration_at)) = duration else { return };
    let least = timeout.saturating_mul(times);
    if *duration >= least {
        return;
    }
    let most = duration.checked_div(times).unwrap_or(*duration);
    let [duration, timeout, least, most] = [*duration, *timeout, least, most].map(shown);
    if let Some(at) = duration_at {
        problems.refuse(
            at,
            format!("got \"{duration}\", expected at least \"{least}\", {more} store.redis.timeout of \"{timeout}\""),
        );
    } else if let Some(at) = timeout_at {
        problems
            .refuse(at, format!("got \"{timeout}\", expected at most \"{most}\", {less} of \"{duration}\""));
    }
}

/// The rule's own setting is to blame rather than one of `defaults`, and the first rather than the second.
fn most_specific<'a>(first: Option<&'a str>, second: Option<&'a str>) -> Option<&'a str> {
    [first, second].into_iter().flatten().find(|path| in_rule(path)).or(first).or(second)
}

pub(super) fn in_rule(path: &str) -> bool {
    !path.starts_with("defaults")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NAMES: &[&str] = &[
        "store",
        "shared_data",
        "redis",
        "cluster",
        "timeout",
        "key_prefix",
        "max_in_flight_batches",
        "near_cache",
        "ttl",
        "namespace",
        "max_records",
        "max_bytes",
        "when_full",
        "on_store_error",
        "rules",
        "name",
        "match",
        "methods",
        "hosts",
        "path",
        "exact",
        "prefix",
        "regex",
        "mode",
        "header",
        "key",
        "max_length",
        "format",
        "syntax",
        "scope",
        "authorization",
        "jwt_claim",
        "metadata_key",
        "property",
        "constant",
        "fingerprint",
        "headers",
        "body",
        "lock_ttl",
        "lockTtl",
        "in_flight",
        "wait_timeout",
        "record_ttl",
        "replay_statuses",
        "release_statuses",
        "keep_response_headers",
        "drop_response_headers",
        "defaults",
        "statuses",
        "limits",
        "captured_bytes",
        "detached_bytes",
        "execute_cluster",
        "execution",
        "execute_timeout",
        "waiters",
        "role",
        "problem_type_base",
        "x",
    ];
    const TEXTS: &[&str] = &[
        "",
        "shared",
        "reject",
        "detached",
        "60s",
        "1ms",
        "24h",
        "POST",
        "*.example.com",
        "/api/",
        "2xx",
        "x-account-id",
        "idempotency-key",
        "(",
        "/a|/b",
        "enforce",
        "shadow",
        "wait",
        "request_end_hold",
        "redis-link",
        "uuid",
        "https://a/",
        "é",
        "\u{0}",
    ];

    fn json_text() -> impl Strategy<Value = String> {
        let leaf = prop_oneof![
            Just("null".to_owned()),
            any::<bool>().prop_map(|value| value.to_string()),
            any::<i64>().prop_map(|value| value.to_string()),
            any::<f64>().prop_map(|value| format!("{value:?}")),
            (0_u16..1000).prop_map(|value| value.to_string()),
            prop::sample::select(TEXTS).prop_map(|text| serde_json::Value::from(text).to_string()),
            any::<String>().prop_map(|text| serde_json::Value::from(text).to_string()),
        ];
        leaf.prop_recursive(6, 64, 8, |inner| {
            let name = prop::sample::select(NAMES);
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(|items| format!("[{}]", items.join(","))),
                prop::collection::vec((name, inner), 0..8).prop_map(|members| {
                    let members: Vec<_> =
                        members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
                    format!("{{{}}}", members.join(","))
                }),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = load(&bytes);
        }

        #[test]
        fn any_json_is_read_without_a_panic(json in json_text()) {
            if let Err(errors) = load(json.as_bytes()) {
                prop_assert!(!errors.0.is_empty());
            }
        }

        #[test]
        fn any_store_is_read_without_a_panic(name in prop::sample::select(NAMES), value in json_text()) {
            let json = format!(
                "{{\"store\":{{\"redis\":{{\"cluster\":\"c\",\"{name}\":{value}}}}},\
                 \"rules\":[{{\"name\":\"r\",\"scope\":\"shared\"}}]}}"
            );
            if let Err(errors) = load(json.as_bytes()) {
                prop_assert!(!errors.to_string().contains("unknown reason"));
            }
        }

        #[test]
        fn any_rule_is_read_without_a_panic(name in prop::sample::select(NAMES), value in json_text()) {
            let json = format!(
                "{{\"store\":{{\"shared_data\":{{}}}},\"rules\":[{{\"name\":\"r\",\"scope\":\"shared\",\"{name}\":{value}}}],\
                 \"defaults\":{{\"{name}\":{value}}}}}"
            );
            if let Err(errors) = load(json.as_bytes()) {
                prop_assert!(!errors.to_string().contains("unknown reason"));
            }
        }
    }

    fn refusal(rules: &str, defaults: &str) -> String {
        let json =
            format!(r#"{{"store": {{"shared_data": {{}}}}, "rules": {rules}, "defaults": {defaults}}}"#);
        load(json.as_bytes()).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn a_mistake_in_defaults_is_reported_once_however_many_rules_there_are() {
        let rules = r#"[{"name": "a", "scope": "shared"}, {"name": "b", "scope": "shared"}]"#;
        for (defaults, path, errors) in [
            (r#"{"lock_ttl": "13h"}"#, "defaults.lock_ttl: got \"13h\"", 2),
            (r#"{"record_ttl": "1s", "failed_ttl": "3m"}"#, "defaults.record_ttl: got \"1s\"", 1),
            (r#"{"mode": "on"}"#, "defaults.mode: got \"on\"", 1),
            (r#"{"scope": [{"header": "idempotency-key"}]}"#, "defaults.scope: got", 1),
        ] {
            let rules = if defaults.contains("scope") { r#"[{"name": "a"}, {"name": "b"}]"# } else { rules };
            let message = refusal(rules, defaults);
            assert!(message.starts_with(path), "{message}");
            assert_eq!(message.lines().count(), errors, "{message}");
        }
    }

    #[test]
    fn defaults_are_compared_even_without_rules() {
        let message = refusal("[]", r#"{"lock_ttl": "60s", "record_ttl": "61s"}"#);
        assert!(message.contains("defaults.record_ttl: got \"61s\", expected at least \"2m\""), "{message}");
    }

    #[test]
    fn a_rule_may_correct_what_would_be_wrong_in_defaults_alone() {
        let json = r#"{"store": {"shared_data": {}}, "defaults": {"lock_ttl": "13h", "failed_ttl": "48h"},
                       "rules": [{"name": "a", "scope": "shared", "record_ttl": "48h"}]}"#;
        assert!(load(json.as_bytes()).is_ok());
    }

    #[test]
    fn the_rule_is_to_blame_when_it_does_not_fit_the_defaults() {
        let message =
            refusal(r#"[{"name": "a", "scope": "shared", "lock_ttl": "1h"}]"#, r#"{"record_ttl": "90m"}"#);
        assert_eq!(
            message,
            "rules[0].lock_ttl: got \"1h\", expected at most half of the record_ttl of \"90m\""
        );
    }

    #[test]
    fn a_refused_value_raises_no_second_error_by_comparison() {
        let message =
            refusal(r#"[{"name": "a", "scope": "shared", "lock_ttl": 1, "record_ttl": "1s"}]"#, "{}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}
