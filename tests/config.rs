//! One bad file per mistake, with the exact text an operator reads; good files with their exact warnings.
//!
//! `tests/config/bad/x.json` goes with `x.expected`. `tests/config/good/x.json` goes with `x.warnings`, and
//! without that file has none.

#![allow(clippy::unwrap_used, clippy::panic, reason = "clippy.toml allows them only inside test functions")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use idempotency::config::{
    Commit, Config, Dialect, Execution, GatewayConfig, HostPattern, InFlight, KeyFormat, KeySyntax,
    MissingKey, Mode, NearCacheConfig, OnAbandoned, OnFailure, OnStoreError, PathMatcher, Plugin,
    RedisConfig, Scope, ScopePart, SharedDataConfig, StatusMeaning, Statuses, StoreConfig, WhenFull, load,
    load_plugin,
};

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config").join(name)
}

/// The files of a folder with this extension, without it.
fn stems(folder: &Path, extension: &str) -> BTreeSet<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension() == Some(OsStr::new(extension)))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect()
}

fn good(name: &str) -> Config {
    let bytes = fs::read(folder("good").join(name).with_extension("json")).unwrap();
    load(&bytes).unwrap_or_else(|errors| panic!("{name}.json was refused:\n{errors}"))
}

fn refusal(json: &str) -> String {
    load(json.as_bytes()).map(|config| format!("{config:?}")).unwrap_err().to_string()
}

/// A configuration whose only rule has these settings beside its name and scope.
fn with_rule(settings: &str) -> String {
    format!(
        r#"{{"store": {{"shared_data": {{}}}},
            "rules": [{{"name": "r", "scope": [{{"header": "x-account-id"}}], {settings}}}]}}"#
    )
}

#[test]
fn every_bad_file_is_refused_with_its_text() {
    let folder = folder("bad");
    let names = stems(&folder, "json");
    assert!(names.len() > 50, "only {} bad files were found", names.len());
    let mut wrong = Vec::new();
    for name in names {
        let bytes = fs::read(folder.join(&name).with_extension("json")).unwrap();
        let expected = fs::read_to_string(folder.join(&name).with_extension("expected")).unwrap();
        match load(&bytes) {
            Ok(_) => wrong.push(format!("{name}.json was accepted")),
            Err(errors) if format!("{errors}\n") != expected => {
                wrong.push(format!("{name}.json:\n got: {errors}\nwant: {expected}"));
            }
            Err(_) => {}
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n\n"));
}

#[test]
fn every_bad_file_has_an_expectation_and_every_expectation_a_file() {
    let folder = folder("bad");
    assert_eq!(stems(&folder, "json"), stems(&folder, "expected"));
}

#[test]
fn every_good_file_is_accepted_with_its_warnings_and_no_others() {
    let folder = folder("good");
    let names = stems(&folder, "json");
    assert!(stems(&folder, "warnings").is_subset(&names));
    for name in names {
        let warnings: String = good(&name).warnings.iter().map(|warning| format!("{warning}\n")).collect();
        let file = folder.join(&name).with_extension("warnings");
        let expected = if file.exists() { fs::read_to_string(file).unwrap() } else { String::new() };
        assert_eq!(warnings, expected, "{name}.json");
    }
}

#[test]
fn what_is_left_out_has_the_documented_default() {
    let config = good("minimal");

    let StoreConfig::SharedData(store) = &config.store else { panic!("another store") };
    let expected = SharedDataConfig {
        namespace: None,
        max_records: 131_072,
        max_bytes: 134_217_728,
        when_full: WhenFull::Reject,
    };
    assert_eq!(*store, expected);
    assert_eq!(config.on_store_error, OnStoreError::Deny);
    assert_eq!(config.problem_type_base, "https://envoy-idempotency.example/problems/");
    assert_eq!(config.limits.captured_bytes, 67_108_864);
    assert_eq!(config.limits.detached_bytes, 67_108_864);
    assert_eq!(config.execute_cluster, None);
    assert_eq!(config.limits.waiters, 1024);
    let statuses = Statuses {
        missing_key: 400,
        invalid_key: 400,
        invalid_scope: 400,
        body_timeout: 408,
        payload_too_large: 413,
        in_flight: 409,
        mismatch: 422,
        failed: 424,
        abandoned: 424,
        response_not_kept: 409,
        store_unavailable: 503,
        store_full: 503,
        execution_unavailable: 503,
    };
    assert_eq!(config.statuses, statuses);

    assert_eq!(config.rules.len(), 1);
    let rule = &config.rules[0];
    assert_eq!(rule.name, "payments");
    assert_eq!(rule.matcher.methods, ["POST", "PATCH"]);
    assert!(rule.matcher.hosts.is_empty());
    assert!(matches!(rule.matcher.path, PathMatcher::Any));
    assert_eq!(rule.mode, Mode::Enforce);
    assert_eq!(rule.header, "idempotency-key");
    assert_eq!(rule.key.max_length, 255);
    assert_eq!(rule.key.format, KeyFormat::Any);
    assert_eq!(rule.key.syntax, KeySyntax::Lenient);
    assert_eq!(rule.missing_key, MissingKey::Reject);
    assert_eq!(rule.namespace, "");
    assert_eq!(rule.scope, Scope::Parts(vec![ScopePart::Header("x-account-id".to_owned())]));
    assert_eq!(rule.max_scope_length, 255);
    assert!(rule.fingerprint.authority && rule.fingerprint.body && rule.fingerprint.headers.is_empty());
    assert_eq!(rule.body_timeout, Duration::from_secs(15));
    assert_eq!(rule.max_request_body_bytes, 1_048_576);
    assert_eq!(rule.max_response_body_bytes, 262_144);
    assert_eq!(rule.lock_ttl, Duration::from_secs(60));
    assert_eq!(rule.record_ttl, Duration::from_secs(86_400));
    assert_eq!(rule.failed_ttl, Duration::from_secs(86_400));
    for (status, meaning) in [
        (200, StatusMeaning::Replay),
        (302, StatusMeaning::Replay),
        (404, StatusMeaning::Replay),
        (401, StatusMeaning::Release),
        (429, StatusMeaning::Release),
        (503, StatusMeaning::Release),
        (500, StatusMeaning::Failure),
        (504, StatusMeaning::Failure),
        (101, StatusMeaning::Failure),
    ] {
        assert_eq!(rule.statuses.meaning(status), meaning, "{status}");
    }
    assert_eq!(rule.statuses.release, [401, 407, 408, 421, 425, 429, 501, 503]);
    assert_eq!(rule.on_failure, OnFailure::Retain);
    assert_eq!(rule.on_unknown, OnFailure::Retain);
    assert_eq!(rule.on_abandoned, OnAbandoned::Takeover);
    assert_eq!(rule.in_flight, InFlight::Reject);
    assert_eq!(rule.wait_timeout, Duration::from_secs(10));
    assert!(!rule.trust_route_retries);
    assert_eq!(rule.commit, Commit::BeforeResponseEnd);
    assert_eq!(rule.replay_header, "Idempotent-Replayed");
    assert!(rule.drop_response_headers.is_empty() && rule.keep_response_headers.is_empty());
}

#[test]
fn every_setting_arrives_where_it_belongs() {
    let config = good("full");

    let StoreConfig::SharedData(store) = &config.store else { panic!("another store") };
    let expected = SharedDataConfig {
        namespace: Some("payments-1".to_owned()),
        max_records: 1000,
        max_bytes: 2_097_152,
        when_full: WhenFull::EvictCompleted,
    };
    assert_eq!(*store, expected);
    assert_eq!(config.on_store_error, OnStoreError::Allow);
    assert_eq!(config.problem_type_base, "https://docs.example.com/problems#");
    assert_eq!(config.limits.captured_bytes, 1_048_576);
    assert_eq!(config.limits.waiters, 100);
    let statuses = Statuses {
        missing_key: 401,
        invalid_key: 402,
        invalid_scope: 403,
        body_timeout: 404,
        payload_too_large: 405,
        in_flight: 425,
        mismatch: 407,
        failed: 408,
        abandoned: 409,
        response_not_kept: 410,
        store_unavailable: 500,
        store_full: 507,
        execution_unavailable: 503,
    };
    assert_eq!(config.statuses, statuses);

    let rule = &config.rules[0];
    assert_eq!(rule.name, "payments");
    assert_eq!(rule.matcher.methods, ["POST", "PUT", "DELETE"]);
    let hosts =
        [HostPattern::Exact("api.example.com".to_owned()), HostPattern::Suffix(".example.org".to_owned())];
    assert_eq!(rule.matcher.hosts, hosts);
    assert!(matches!(&rule.matcher.path, PathMatcher::Prefix(prefix) if prefix == "/api/"));
    assert_eq!(rule.mode, Mode::Off);
    assert_eq!(rule.header, "x-operation-id");
    assert_eq!(rule.key.max_length, 36);
    assert_eq!(rule.key.format, KeyFormat::Uuid);
    assert_eq!(rule.key.syntax, KeySyntax::Strict);
    assert_eq!(rule.missing_key, MissingKey::Pass);
    assert_eq!(rule.namespace, "payments v1");
    let Scope::Parts(parts) = &rule.scope else { panic!("shared") };
    assert_eq!(parts.len(), 5);
    assert_eq!(rule.max_scope_length, 100);
    assert!(!rule.fingerprint.authority && !rule.fingerprint.body);
    assert_eq!(rule.fingerprint.headers, ["content-digest", "content-length"]);
    assert_eq!(rule.body_timeout, Duration::from_millis(1500));
    assert_eq!(rule.max_request_body_bytes, 1000);
    assert_eq!(rule.max_response_body_bytes, 2000);
    assert_eq!(rule.lock_ttl, Duration::from_secs(30));
    assert_eq!(rule.record_ttl, Duration::from_secs(3600));
    assert_eq!(rule.failed_ttl, Duration::from_secs(60));
    assert_eq!(rule.statuses.replay_classes, [false, true, false, false, true]);
    assert_eq!(rule.statuses.replay, [303, 404]);
    assert_eq!(rule.statuses.release, [429, 501]);
    assert_eq!(rule.on_failure, OnFailure::Retain);
    assert_eq!(rule.on_unknown, OnFailure::Retain);
    assert_eq!(rule.on_abandoned, OnAbandoned::Retain);
    assert_eq!(rule.in_flight, InFlight::Wait);
    assert_eq!(rule.wait_timeout, Duration::from_secs(20));
    assert!(rule.trust_route_retries);
    assert_eq!(rule.commit, Commit::AfterResponse);
    assert_eq!(rule.replay_header, "X-Replayed");
    assert_eq!(rule.drop_response_headers, ["x-served-by"]);
    assert_eq!(rule.keep_response_headers, ["set-cookie"]);
}

/// The settings of Redis in a good file.
fn redis(name: &str) -> RedisConfig {
    match good(name).store {
        StoreConfig::Redis(redis) => redis,
        StoreConfig::SharedData(_) => panic!("{name}.json has another store"),
    }
}

#[test]
fn what_is_left_out_of_redis_has_the_documented_default() {
    let near_cache =
        NearCacheConfig { max_records: 16_384, max_bytes: 33_554_432, ttl: Duration::from_secs(60) };
    let expected = RedisConfig {
        cluster: "redis-link".to_owned(),
        timeout: Duration::from_millis(250),
        key_prefix: "idem:".to_owned(),
        max_in_flight_batches: 2,
        near_cache: Some(near_cache),
        gateway: None,
    };
    assert_eq!(redis("redis_minimal"), expected);
    assert_eq!(redis("redis_near_cache_default"), expected);
    assert_eq!(redis("redis_near_cache_off"), RedisConfig { near_cache: None, ..expected });
}

#[test]
fn every_setting_of_redis_arrives_where_it_belongs() {
    let near_cache =
        NearCacheConfig { max_records: 1000, max_bytes: 2_097_152, ttl: Duration::from_secs(10) };
    let expected = RedisConfig {
        cluster: "redis-link".to_owned(),
        timeout: Duration::from_millis(500),
        key_prefix: "payments:".to_owned(),
        max_in_flight_batches: 4,
        near_cache: Some(near_cache),
        gateway: None,
    };
    assert_eq!(redis("redis"), expected);
    assert_eq!(redis("redis_camel_case"), expected);
}

#[test]
fn a_gateway_says_its_dialect_and_what_it_wants_to_hear() {
    let gateway = |name: &str| {
        let redis = redis(name);
        (redis.gateway.expect("a gateway"), redis.max_in_flight_batches)
    };
    let webdis = GatewayConfig { dialect: Dialect::Webdis, authority: "redis".to_owned(), token_env: None };
    // One operation goes in one callout.
    assert_eq!(gateway("redis_webdis"), (webdis, 32));
    let upstash = GatewayConfig {
        dialect: Dialect::UpstashResp2,
        authority: "eu1-example.upstash.io".to_owned(),
        token_env: Some("UPSTASH_REDIS_REST_TOKEN".to_owned()),
    };
    assert_eq!(gateway("redis_upstash"), (upstash.clone(), 2));
    let own =
        GatewayConfig { dialect: Dialect::UpstashBase64, token_env: Some("TOKEN".to_owned()), ..upstash };
    assert_eq!(gateway("redis_upstash_base64"), (own, 2));
}

#[test]
fn a_detached_rule_retains_what_was_abandoned_unless_it_says_otherwise() {
    let config = good("detached");
    assert_eq!(config.execute_cluster.as_deref(), Some("idempotency-execute"));
    assert_eq!(config.limits.detached_bytes, 1_310_720);
    assert_eq!(config.statuses.execution_unavailable, 429);
    let rules: Vec<_> = config.rules.iter().map(|rule| (rule.execution, rule.on_abandoned)).collect();
    let detached = |millis| Execution::Detached { timeout: Duration::from_millis(millis) };
    let expected = [
        (detached(30_000), OnAbandoned::Retain),
        (detached(100), OnAbandoned::Takeover),
        (Execution::Inline, OnAbandoned::Takeover),
    ];
    assert_eq!(rules, expected);
}

#[test]
fn the_role_alone_is_a_whole_configuration() {
    // The second is the same as a `google.protobuf.Struct`.
    let protobuf = b"\x0a\x1a\x0a\x04role\x12\x12\x1a\x10request_end_hold";
    for bytes in [&br#"{"role": "request_end_hold"}"#[..], protobuf] {
        assert!(matches!(load_plugin(bytes), Ok(Plugin::RequestEndHold)), "{}", bytes.escape_ascii());
    }
}

#[test]
fn without_a_role_it_is_the_filter() {
    let bytes = fs::read(folder("good").join("full.json")).unwrap();
    let Ok(Plugin::Filter(config)) = load_plugin(&bytes) else { panic!("not the filter") };
    assert_eq!(format!("{config:?}"), format!("{:?}", good("full")));
}

#[test]
fn camel_case_means_the_same() {
    let [snake, camel] = ["full", "full_camel_case"].map(|name| format!("{:?}", good(name)));
    assert_eq!(snake, camel);
}

#[test]
fn numbers_of_a_protobuf_struct_mean_the_same() {
    let [integers, doubles] = ["full", "full_doubles"].map(|name| format!("{:?}", good(name)));
    assert_eq!(integers, doubles);
}

#[test]
fn a_rule_takes_from_defaults_what_it_does_not_set() {
    let config = good("defaults");
    let [first, second] = config.rules.as_slice() else { panic!("two rules") };

    assert_eq!(first.scope, Scope::Parts(vec![ScopePart::Header("x-tenant".to_owned())]));
    assert_eq!(second.scope, Scope::Parts(vec![ScopePart::Header("x-account-id".to_owned())]));
    assert_eq!((first.lock_ttl, second.lock_ttl), (Duration::from_secs(10), Duration::from_secs(20)));
    // Objects are merged member by member.
    assert_eq!((first.key.format, second.key.format), (KeyFormat::Uuid, KeyFormat::Uuid));
    assert_eq!((first.key.max_length, second.key.max_length), (36, 100));
    assert!(!first.fingerprint.authority && !second.fingerprint.authority);
    assert_eq!(second.fingerprint.headers, ["content-type"]);
}

#[test]
fn every_setting_of_a_rule_may_stand_in_defaults() {
    let [in_rule, in_defaults] = ["full", "full_in_defaults"].map(|name| format!("{:?}", good(name)));
    assert_eq!(in_rule, in_defaults);
}

#[test]
fn release_wins_over_a_class_that_is_replayed() {
    let config =
        load(with_rule(r#""replay_statuses": ["2xx", "5xx"], "release_statuses": [503]"#).as_bytes())
            .unwrap();
    let statuses = &config.rules[0].statuses;
    assert_eq!(statuses.meaning(500), StatusMeaning::Replay);
    assert_eq!(statuses.meaning(503), StatusMeaning::Release);
}

#[test]
fn a_regex_covers_whole_paths() {
    let config = load(with_rule(r#""match": {"path": {"regex": "/a|/b"}}"#).as_bytes()).unwrap();
    let PathMatcher::Regex(regex) = &config.rules[0].matcher.path else { panic!("no regex") };
    assert!(regex.is_match("/a") && regex.is_match("/b"));
    assert!(!regex.is_match("/ab") && !regex.is_match("/a/b"));
}

#[test]
fn the_store_sustains_its_records_over_the_longest_record_ttl_in_force() {
    let config = good("sustained");
    // 7200 records; 1h in force, 24h switched off, 2h in force.
    assert_eq!(config.sustained_keys_per_100_seconds(), Some(100));
    // Records of a rule in shadow take up room too.
    let shadow = good("shadow");
    assert_eq!(shadow.rules[0].mode, Mode::Shadow);
    assert_eq!(shadow.sustained_keys_per_100_seconds(), Some(3640));
    // Redis has bounds of its own.
    assert_eq!(good("redis").sustained_keys_per_100_seconds(), None);
}

#[test]
fn bytes_that_are_not_utf_8_are_refused() {
    let error = load(b"{\"store\": \"\xff\"}").unwrap_err();
    assert_eq!(error.to_string(), "configuration: not UTF-8 from byte 11 on, expected JSON");
}

#[test]
fn deep_nesting_is_refused_before_the_stack_ends() {
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let json = format!("{{\"store\": {}1{}}}", open.repeat(200_000), close.repeat(200_000));
        assert!(refusal(&json).starts_with("configuration: not valid JSON: recursion limit exceeded"));
    }
}

#[test]
fn a_long_value_is_cut_off_in_the_message() {
    let message = refusal(&with_rule(&format!(r#""lock_ttl": "{}""#, "9".repeat(10_000))));
    assert!(message.len() < 300, "{message}");
    assert!(message.contains(&format!("got \"{}…, expected", "9".repeat(63))), "{message}");
}

#[test]
fn a_message_stays_on_one_line_whatever_the_value() {
    for settings in
        [r#""mode": "a\nb\r\u001b[31m""#, r#""a\nb": 1"#, r#""match": {"path": {"regex": "(\n"}}"#]
    {
        let message = refusal(&with_rule(settings));
        assert!(!message.contains(char::is_control), "{message:?}");
    }
}

#[test]
fn each_error_has_a_path_and_a_message() {
    let errors = load(with_rule(r#""lock_ttl": 60"#).as_bytes()).unwrap_err();
    assert_eq!(errors.0.len(), 1);
    assert_eq!(errors.0[0].path, "rules[0].lock_ttl");
    assert_eq!(errors.0[0].to_string(), format!("{}: {}", errors.0[0].path, errors.0[0].message));
}

#[test]
fn the_reference_names_every_field() {
    let reference =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/configuration.md")).unwrap();
    let levels = [
        r#"{"?": 1}"#,
        r#"{"store": {"?": 1}}"#,
        r#"{"store": {"shared_data": {"?": 1}}}"#,
        r#"{"store": {"redis": {"?": 1}}}"#,
        r#"{"store": {"redis": {"near_cache": {"?": 1}}}}"#,
        r#"{"rules": [{"?": 1}]}"#,
        r#"{"rules": [{"match": {"?": 1}}]}"#,
        r#"{"rules": [{"match": {"path": {"?": 1}}}]}"#,
        r#"{"rules": [{"key": {"?": 1}}]}"#,
        r#"{"rules": [{"scope": [{"?": 1}]}]}"#,
        r#"{"rules": [{"fingerprint": {"?": 1}}]}"#,
        r#"{"statuses": {"?": 1}}"#,
        r#"{"limits": {"?": 1}}"#,
    ];
    for level in levels {
        let message = refusal(level);
        let unknown = message.lines().find_map(|line| line.split_once("unknown field, expected one of: "));
        let (_, allowed) = unknown.unwrap_or_else(|| panic!("{level}: {message}"));
        for name in allowed.split(", ") {
            let named =
                [format!("`{name}`"), format!(".{name}`"), format!("\"{name}\""), format!("`{name}.")];
            assert!(named.iter().any(|form| reference.contains(form)), "{name} of {level}");
        }
    }
}
