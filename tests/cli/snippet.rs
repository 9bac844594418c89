//! What `envoy-snippet` prints is taken by a real Envoy, and a request goes through it.

use std::fs::File;
use std::process::{Command, Stdio};

use serde_json::json;

use crate::Scratch;
use crate::command::run;
use crate::support::envoy::process::{Process, binary};
use crate::support::{Origin, PATIENCE, Protocol, Redis, Request, Wasm, poll_until, send_once, unique_key};

fn plugin(store: &str, detached: bool) -> String {
    let store = match store {
        "redis" => json!({"redis": {"cluster": "the-link", "timeout": "2s", "near_cache": false}}),
        _ => json!({"shared_data": {}}),
    };
    let mut plugin = json!({
        "store": store,
        "rules": [{"name": "p", "scope": [{"header": "x-account-id"}], "trust_route_retries": true}],
    });
    if detached {
        plugin["execute_cluster"] = json!("the-execution");
        plugin["rules"][0]["execution"] = json!("detached");
        plugin["rules"][0]["execute_timeout"] = json!("30s");
    }
    format!("{plugin:#}")
}

/// A bootstrap for this plugin, which `validate` finds nothing wrong with.
fn whole(scratch: &Scratch, plugin: &str, more: &[&str]) -> String {
    let plugin = scratch.put("plugin.json", plugin);
    let module = Wasm::Dist.path();
    let command = ["envoy-snippet", &plugin, "--whole", "--module", module.to_str().unwrap()];
    let file = scratch.put("envoy.yaml", &run(&[&command, more].concat()).expect(0, "").out);
    let checked = run(&["--json", "validate", "--strict", &file]).expect(0, "").json();
    assert_eq!(checked["files"][0]["filters"][0]["rules"], json!(["p"]));
    file
}

#[test]
fn an_envoy_takes_every_topology() {
    let password = Scratch::new();
    let secret = password.put("password", "sesame");
    for (store, detached, more) in [
        ("embedded", false, &[][..]),
        ("embedded", true, &["--upstream", "payments.internal:80"]),
        ("redis", true, &["--redis", "10.0.0.1:6380", "--socket", "/tmp/idem.sock"]),
        (
            "redis",
            false,
            &["--topology", "redis-cluster", "--redis", "a.internal:6379", "--redis", "b.internal:6379"],
        ),
        (
            "redis",
            false,
            &["--redis", "redis.internal:6379", "--tls", "--password-file", &secret, "--user", "idem"],
        ),
    ] {
        let scratch = Scratch::new();
        let file = whole(&scratch, &plugin(store, detached), more);
        let output =
            Command::new(binary()).args(["--mode", "validate", "-l", "error", "-c", &file]).output().unwrap();
        let said =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{store} {more:?}\n{said}");
    }
}

#[test]
fn the_parts_are_one_document_and_the_whole_is_made_of_them() {
    let scratch = Scratch::new();
    let file = scratch.put("plugin.json", &plugin("redis", true));
    let parts = run(&["envoy-snippet", &file]).expect(0, "").out;
    let parts_file = scratch.put("parts.yaml", &parts);
    let checked = run(&["--json", "validate", &parts_file]).expect(0, "").json();
    assert_eq!(checked["files"][0]["errors"], 0, "{checked:#}");
    for mark in [
        "http_filters:",
        "bootstrap_extensions:",
        "- name: redis_link",
        "- name: the-link",
        "- name: idempotency_execute",
        "- name: the-execution",
    ] {
        assert!(parts.lines().any(|line| line.trim_start() == mark), "{mark}\n{parts}");
    }
    let whole = std::fs::read_to_string(whole(&scratch, &plugin("redis", true), &[])).unwrap();
    for line in
        parts.lines().filter(|line| !line.trim_start().starts_with('#') && !line.contains("filename:"))
    {
        let line = line.trim();
        let is_heading = matches!(line, "http_filters:" | "listeners:" | "clusters:");
        assert!(is_heading || whole.lines().any(|other| other.trim() == line), "{line}");
    }
    run(&["envoy-snippet", &file, "--topology", "embedded"]).expect(2, "store is redis");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_through_the_snippet_and_its_record_has_the_explained_key() {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let scratch = Scratch::new();
    let free = || std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (port, admin) = (free(), free());
    let socket = format!("@idempotency-snippet-{}", unique_key());
    let (redis_addr, upstream) = (redis.addr().to_string(), origin.addr().to_string());
    let (port_text, admin_text) = (port.to_string(), admin.to_string());
    let places = [
        "--redis",
        &redis_addr,
        "--upstream",
        &upstream,
        "--socket",
        &socket,
        "--port",
        &port_text,
        "--admin-port",
        &admin_text,
    ];
    let file = whole(&scratch, &plugin("redis", true), &places);

    let log = File::create(scratch.0.path().join("log")).unwrap();
    let mut command = Command::new(binary());
    command
        .args(["--disable-hot-restart", "--concurrency", "1", "-l", "warning", "-c", &file])
        .stdin(Stdio::null());
    let _envoy = Process::start(command, &log);
    let envoy = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    poll_until(PATIENCE, "Envoy listens", async || {
        tokio::net::TcpStream::connect(envoy).await.ok().map(drop)
    })
    .await;

    let key = unique_key();
    let request = Request::post("/pay?b=2&a=1").key(&key).body("amount=1");
    let first = send_once(envoy, Protocol::BOTH[0], &request).await.unwrap();
    let retry = send_once(envoy, Protocol::BOTH[0], &request).await.unwrap();
    let text = || std::fs::read_to_string(scratch.0.path().join("log")).unwrap();
    assert_eq!((first.status, retry.status), (200, 200), "{first:?}\n{}", text());
    assert_eq!(retry.header("idempotent-replayed"), Some("true"));
    assert_eq!(origin.executions_of(&key), 1);

    let seen = &origin.requests()[0];
    let authority = seen
        .header("host")
        .or(seen.header(":authority"))
        .map(str::to_owned)
        .unwrap_or_else(|| envoy.to_string());
    let (key_line, plugin) =
        (format!("Idempotency-Key: {key}"), scratch.put("explained.json", &plugin("redis", true)));
    let request = [
        "--path",
        "/pay?b=2&a=1",
        "--authority",
        &authority,
        "-H",
        &key_line,
        "-H",
        "x-account-id: alice",
        "--data",
        "amount=1",
    ];
    for source in [&plugin, &file] {
        let told = run(&[&["--json", "explain", source], &request[..]].concat()).expect(0, "").json();
        let record = told["claim"]["redis_key"].as_str().unwrap();
        let kept = redis.command(&format!("HMGET {record} state fingerprint")).await;
        let fingerprint = told["claim"]["fingerprint"].as_str().unwrap();
        assert!(kept.contains("completed") && kept.contains(fingerprint), "{kept:?} is not {told:#}");
    }
    assert!(redis.command("DBSIZE").await.starts_with(":1"));
}
