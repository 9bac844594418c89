//! `validate` finds each thing that an operator must not forget, and nothing in the project's own files.

use serde_json::Value;

use crate::command::{Ended, run};
use crate::{Scratch, project, read};

fn validate(text: &str, more: &[&str]) -> Ended {
    let scratch = Scratch::new();
    let file = scratch.put("file.yaml", text);
    run(&[&["--json", "validate", &file], more].concat())
}

fn findings(ended: &Ended) -> Vec<Value> {
    ended.json()["files"][0]["findings"].as_array().unwrap().clone()
}

#[test]
fn the_projects_own_files_have_no_errors() {
    for (file, holds) in [("embedded", 0), ("redis", 2), ("detached", 0), ("detached-rds", 0)] {
        let path = project(&format!("envoy/{file}.yaml"));
        let ended = run(&["--json", "validate", path.to_str().unwrap()]).expect(0, "");
        let found = &ended.json()["files"][0];
        assert_eq!(found["filters"][0]["name"], "idempotency", "{file}");
        assert_eq!(found["link_filters"], holds, "{file}");
        assert!(findings(&ended).iter().all(|finding| finding["code"] == "config"), "{file}: {found:#}");
    }
}

#[test]
fn a_plugin_configuration_is_told_what_the_filter_would_say() {
    let folder = project("tests/config/bad");
    for name in ["all_at_once", "scope_empty", "document_not_json", "duplicate_spelling"] {
        let file = folder.join(name).with_extension("json");
        if !file.exists() {
            panic!("{name}");
        }
        let expected = std::fs::read_to_string(folder.join(name).with_extension("expected")).unwrap();
        let ended = run(&["--json", "validate", file.to_str().unwrap()]).expect(1, "");
        let told: Vec<String> = findings(&ended)
            .iter()
            .map(|finding| {
                format!("{}: {}", finding["path"].as_str().unwrap(), finding["message"].as_str().unwrap())
            })
            .collect();
        assert_eq!(told.join("\n").trim_end(), expected.trim_end(), "{name}");
    }
}

/// A file, what is changed in it, and what has to be found.
const MISTAKES: &[(&str, &str, &str, &str, &str)] = &[
    (
        "embedded",
        "allow_on_headers_stop_iteration: true",
        "allow_on_headers_stop_iteration: false",
        "error",
        "stop-iteration",
    ),
    ("embedded", "failure_policy: FAIL_RELOAD", "failure_policy: FAIL_OPEN", "error", "fail-open"),
    ("embedded", "failure_policy: FAIL_RELOAD", "failure_policy: FAIL_CLOSED", "warning", "failure-policy"),
    (
        "embedded",
        "per_connection_buffer_limit_bytes: 2097152",
        "per_connection_buffer_limit_bytes: 65536",
        "error",
        "buffer-limit",
    ),
    ("embedded", "normalize_path: true", "normalize_path: false", "warning", "path-normalization"),
    ("embedded", "\"lock_ttl\": \"60s\"", "\"lock_tll\": \"60s\"", "error", "config"),
    ("embedded", "retry_on: connect-failure", "retry_on: 5xx,connect-failure", "error", "route-retries"),
    (
        "embedded",
        "num_retries: 1",
        "num_retries: 1\n                    per_try_timeout: 1s",
        "warning",
        "route-retries",
    ),
    (
        "embedded",
        "timeout: 15s",
        "timeout: 15s\n                  hedge_policy: { hedge_on_per_try_timeout: true }",
        "error",
        "hedging",
    ),
    (
        "embedded",
        "timeout: 15s",
        "timeout: 15s\n                  request_mirror_policies: [{ cluster: payments }]",
        "warning",
        "mirroring",
    ),
    (
        "embedded",
        "\"trust_route_retries\": true",
        "\"trust_route_retries\": false",
        "warning",
        "trust-route-retries",
    ),
    (
        "embedded",
        "- match: { prefix: \"/\" }",
        "- match: { prefix: \"/\" }\n                metadata: { filter_metadata: { idempotency: { rule: nobody } } }",
        "error",
        "route-rule",
    ),
    (
        "embedded",
        "{ \"header\": \"x-account-id\" }",
        "{ \"jwt_claim\": \"sub\", \"metadata_key\": \"p\" }",
        "error",
        "scope-jwt",
    ),
    (
        "embedded",
        "- name: envoy.filters.http.router\n",
        "- name: authz\n            typed_config: { \"@type\": type.googleapis.com/envoy.extensions.filters.http.ext_authz.v3.ExtAuthz }\n          - name: envoy.filters.http.router\n",
        "error",
        "filter-order",
    ),
    (
        "embedded",
        "- name: envoy.filters.http.router\n",
        "- name: gzip\n            typed_config: { \"@type\": type.googleapis.com/envoy.extensions.filters.http.compressor.v3.Compressor }\n          - name: envoy.filters.http.router\n",
        "warning",
        "filter-order",
    ),
    (
        "embedded",
        "- name: idempotency\n",
        "- name: limit\n            typed_config: { \"@type\": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit }\n          - name: idempotency\n",
        "warning",
        "filter-order",
    ),
    (
        "embedded",
        "connect_timeout: 1s",
        "connect_timeout: 1s\n    typed_extension_protocol_options: { envoy.extensions.upstreams.http.v3.HttpProtocolOptions: { retry_policy: { retry_on: reset } } }",
        "error",
        "route-retries",
    ),
    ("redis", "\"cluster\": \"redis-link\"", "\"cluster\": \"redis-lnik\"", "error", "redis-cluster"),
    ("redis", "\"cluster\": \"redis-link\"", "\"cluster\": \"redis\"", "error", "redis-cluster"),
    (
        "redis",
        "server_listener_name: redis_link",
        "server_listener_name: other",
        "error",
        "redis-link-listener",
    ),
    (
        "redis",
        "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
        "x.Other",
        "error",
        "internal-listener",
    ),
    ("redis", "          - *hold\n", "", "error", "redis-link-hold"),
    ("redis", "allow_post: true", "allow_post: false", "error", "redis-link-connect"),
    ("redis", "cluster: redis-proxy\n", "cluster: redis-prxy\n", "error", "redis-proxy-cluster"),
    (
        "redis",
        "max_requests_per_connection: 1",
        "max_requests_per_connection: 100",
        "error",
        "redis-proxy-cluster",
    ),
    (
        "redis",
        "      pipe: { path: \"@idempotency-redis\" }",
        "      pipe: { path: \"@elsewhere\" }",
        "error",
        "redis-proxy-listener",
    ),
    ("redis", "op_timeout: 0.1s", "op_timeout: 0.2s", "error", "redis-op-timeout"),
    (
        "redis",
        "catch_all_route: { cluster: redis }",
        "catch_all_route: { cluster: rediss }",
        "error",
        "redis-upstream",
    ),
    (
        "redis",
        "- name: redis_link\n",
        "- name: redis_link\n    traffic_direction: INBOUND\n",
        "warning",
        "link-drained",
    ),
    (
        "detached",
        "\"execute_cluster\": \"idempotency-execute\"",
        "\"execute_cluster\": \"nobody\"",
        "error",
        "execute-cluster",
    ),
    (
        "detached",
        "server_listener_name: idempotency_execute",
        "server_listener_name: nobody",
        "error",
        "execute-listener",
    ),
    (
        "detached",
        "value: \"%RESPONSE_CODE_DETAILS%\" }",
        "value: \"%RESPONSE_CODE_DETAILS%\" }\n                - remove: x",
        "",
        "",
    ),
    (
        "detached",
        "header: { key: x-idempotency-execution-details",
        "header: { key: x-idempotency-execution-detials",
        "error",
        "execute-report",
    ),
    (
        "detached",
        "explicit_http_config: { http2_protocol_options: {} }",
        "explicit_http_config: { http_protocol_options: {} }",
        "warning",
        "execute-http2",
    ),
    (
        "detached",
        "explicit_http_config: { http2_protocol_options: {} }",
        "explicit_http_config: { http2_protocol_options: {} }\n        retry_policy: { retry_on: reset }",
        "error",
        "execute-retries",
    ),
    ("detached", "stream_idle_timeout: 40s", "stream_idle_timeout: 30s", "error", "stream-idle-timeout"),
    (
        "detached",
        "virtual_hosts: *payments_hosts",
        "virtual_hosts: [{ name: other, domains: [\"*\"], routes: [] }]",
        "warning",
        "execute-routes",
    ),
    (
        "detached",
        "    circuit_breakers:\n      thresholds:\n      - { max_connections: 100000, max_pending_requests: 100000, max_requests: 100000 }\n",
        "",
        "warning",
        "execute-circuit-breakers",
    ),
];

#[test]
fn every_mistake_in_the_surroundings_is_found_at_its_place() {
    let mut wrong = Vec::new();
    for (file, from, to, severity, code) in MISTAKES {
        let text = read(&format!("envoy/{file}.yaml"));
        assert!(text.contains(from), "envoy/{file}.yaml has no {from:?}");
        let ended = validate(&text.replacen(from, to, 1), &[]);
        let found: Vec<Value> = findings(&ended)
            .into_iter()
            .filter(|finding| finding["severity"] == "error" || finding["code"] != "config")
            .collect();
        let expected = found.iter().any(|finding| {
            finding["code"] == *code && finding["severity"] == *severity && finding["line"].as_u64() > Some(0)
        });
        let is_error = *severity == "error";
        if (!code.is_empty() && !expected)
            || (code.is_empty() && !found.is_empty())
            || ended.code != i32::from(is_error)
        {
            wrong.push(format!(
                "{file}: {from:?} -> {to:?}: exit {}, wanted {severity} {code}, got {found:#?}",
                ended.code
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn two_filters_on_one_prefix_and_a_loop_are_found() {
    let text = read("envoy/redis.yaml");
    let begin = text.find("          - name: idempotency\n").unwrap();
    let end = begin + text[begin..].find("          - name: envoy.filters.http.router\n").unwrap();
    let twice = format!("{}{}{}", &text[..end], &text[begin..end], &text[end..]);
    let ended = validate(&twice, &[]).expect(1, "");
    assert!(findings(&ended).iter().any(|finding| finding["code"] == "same-prefix"), "{ended:?}");

    let text = read("envoy/detached.yaml");
    let begin = text.find("          - name: idempotency\n").unwrap();
    let end = begin + text[begin..].find("          - name: envoy.filters.http.router\n").unwrap();
    let at = text.rfind("          - name: envoy.filters.http.router\n").unwrap();
    let looped = format!("{}{}{}", &text[..at], &text[begin..end], &text[at..]);
    let ended = validate(&looped, &[]).expect(1, "");
    assert!(findings(&ended).iter().any(|finding| finding["code"] == "execute-loop"), "{ended:?}");
}

const RULES: &str = r#"store: { shared_data: {} }
      rules: [{ name: p, scope: [{ header: x-account-id }], BODY }]"#;

fn wasm_plugin(phase: &str, body: &str) -> String {
    format!(
        "apiVersion: extensions.istio.io/v1alpha1\nkind: WasmPlugin\nmetadata: {{ name: idem }}\nspec:\n  phase: {phase}\n  \
         failStrategy: FAIL_RELOAD\n  pluginConfig:\n      {}\n",
        RULES.replace("BODY", body)
    )
}

const NO_BODY: &str = "fingerprint: { body: false, headers: [content-digest] }";

#[test]
fn the_resources_of_meshes_and_gateways_are_read() {
    let codes = |text: &str| -> Vec<String> {
        let ended = validate(text, &[]);
        findings(&ended)
            .iter()
            .map(|finding| {
                format!("{}/{}", finding["severity"].as_str().unwrap(), finding["code"].as_str().unwrap())
            })
            .collect()
    };
    assert_eq!(codes(&wasm_plugin("STATS", NO_BODY)), [""; 0]);
    assert_eq!(codes(&wasm_plugin("STATS", "mode: enforce")), ["error/stop-iteration"]);
    assert_eq!(codes(&wasm_plugin("AUTHN", NO_BODY)), ["error/filter-order"]);

    let policy = |open: bool| {
        format!(
            "apiVersion: gateway.envoyproxy.io/v1alpha1\nkind: EnvoyExtensionPolicy\nmetadata: {{ name: idem }}\nspec:\n  wasm:\n  - name: idem\n    \
             failOpen: {open}\n    config:\n      {}\n",
            RULES.replace("BODY", NO_BODY)
        )
    };
    assert_eq!(codes(&policy(false)), [""; 0]);
    assert_eq!(codes(&policy(true)), ["error/fail-open"]);

    let service = |retries: &str| {
        format!(
            "{}---\napiVersion: networking.istio.io/v1\nkind: VirtualService\nmetadata: {{ name: v }}\nspec:\n  http:\n  - route: []\n{retries}",
            wasm_plugin("STATS", NO_BODY)
        )
    };
    assert_eq!(codes(&service("    retries: { attempts: 0 }\n")), [""; 0]);
    assert_eq!(codes(&service("")), ["error/route-retries"]);
    assert_eq!(
        codes(&service("    retries: { attempts: 0 }\n    mirror: { host: m }\n")),
        ["warning/mirroring"]
    );
}

/// The filter of envoy/redis.yaml, as a piece of another document.
fn filter_at(depth: usize) -> String {
    let text = read("envoy/redis.yaml");
    let begin = text.find("          - name: idempotency\n").unwrap();
    let end = begin + text[begin..].find("          - name: envoy.filters.http.router\n").unwrap();
    let lines = text[begin..end].lines().enumerate().map(|(index, line)| {
        let line = line.get(10..).unwrap_or_default();
        let line = if index == 0 { line.replacen("- ", "  ", 1) } else { line.to_owned() };
        format!("{}{}\n", " ".repeat(depth), line.get(2..).unwrap_or_default())
    });
    lines.collect()
}

#[test]
fn a_patch_and_a_config_map_are_read_and_what_is_elsewhere_is_a_warning() {
    let patch = |operation: &str| {
        format!(
            "apiVersion: networking.istio.io/v1alpha3\nkind: EnvoyFilter\nmetadata: {{ name: idem }}\nspec:\n  configPatches:\n  - applyTo: \
             HTTP_FILTER\n    patch:\n      operation: {operation}\n      value:\n{}",
            filter_at(8)
        )
    };
    let ended = validate(&patch("INSERT_BEFORE"), &[]).expect(0, "");
    let missing = findings(&ended).into_iter().find(|finding| finding["code"] == "redis-cluster").unwrap();
    assert_eq!(missing["severity"], "warning");
    assert!(missing["message"].as_str().unwrap().contains("elsewhere"));
    validate(&patch("INSERT_BEFORE"), &["--strict"]).expect(1, "");
    validate(&patch("INSERT_FIRST"), &[]).expect(1, "filter-order");

    let bad = read("envoy/embedded.yaml").replace("\"lock_ttl\": \"60s\"", "\"lock_ttl\": 60");
    let indented: String = bad.lines().map(|line| format!("    {line}\n")).collect();
    let map = format!(
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {{ name: envoy }}\ndata:\n  envoy.yaml: |\n{indented}"
    );
    let ended = validate(&map, &[]).expect(1, "write \\\"60s\\\" for seconds");
    let line = findings(&ended)[0]["line"].as_u64().unwrap() as usize;
    assert!(
        map.lines().skip(line - 3).take(6).any(|line| line.contains("value: |") || line.contains('{')),
        "{line}"
    );
}

#[test]
fn a_file_without_the_filter_and_standard_input() {
    validate("static_resources: {}\n", &[]).expect(1, "no-filter");
    let text = read("tests/config/good/minimal.json");
    let ended = crate::command::run_with(&["validate", "-"], text.as_bytes(), |_| {});
    ended.expect(0, "found 1 filter");
}
