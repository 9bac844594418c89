//! What operators look at: the dashboard, the alert rules and the access log, on a real Envoy and a real Prometheus.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use idempotency::metrics::{Counter, Gauge, Histogram};
use serde_json::{Value, json};

use crate::support::envoy::config::{cluster, repository};
use crate::support::envoy::process;
use crate::support::prometheus::{History, Prometheus, run, tools};
use crate::support::*;

fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Every query of the dashboard as (panel, legend, expression).
fn queries() -> Vec<(String, String, String)> {
    let dashboard: Value = serde_json::from_str(&read("observability/dashboard.json")).unwrap();
    let mut found = vec![];
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let text = |value: &Value| value.as_str().unwrap().to_owned();
            found.push((text(&panel["title"]), text(&target["legendFormat"]), text(&target["expr"])));
        }
    }
    assert!(found.len() > 60, "{}", found.len());
    found
}

/// What Grafana puts in the place of its variables.
fn filled_in(expr: &str, window: &str) -> String {
    expr.replace("$__rate_interval", window)
        .replace("$__range", window)
        .replace("$job", "envoy")
        .replace("$instance", ".+")
}

/// The metric names of ours in an expression.
fn names_in(expr: &str) -> BTreeSet<String> {
    expr.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("idempotency_") || word.starts_with("envoy_"))
        .map(str::to_owned)
        .collect()
}

fn names_scraped(scrape: &str) -> BTreeSet<String> {
    scrape
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split('{').next().unwrap().to_owned())
        .collect()
}

/// One Envoy on a Redis, forwarding when that is gone.
async fn world() -> (Redis, Origin, Envoy) {
    let (redis, origin) = (Redis::start().await, Origin::start().await);
    let mut plugin = on_redis(plugin_with(json!({})), Pace::PATIENT);
    plugin["store"]["redis"]["near_cache"] = json!({});
    plugin["on_store_error"] = json!("allow");
    let builder = Envoy::builder()
        .workers(2)
        .plugin(plugin)
        .origin_addr(origin.addr())
        // Histograms show what was recorded before the last flush.
        .bootstrap_patch(json!({"stats_flush_interval": "0.2s"}));
    let envoy = linked(builder, redis.addr(), Pace::PATIENT).start().await;
    (redis, origin, envoy)
}

fn pay(path: &str, key: &str) -> Request {
    Request::post(path).key(key).body("amount=1")
}

async fn scrape(envoy: &Envoy) -> String {
    envoy.admin_get("/stats/prometheus").await
}

fn value_of(scrape: &str, series: &str) -> Option<f64> {
    let line =
        scrape.lines().find(|line| line.strip_prefix(series).is_some_and(|rest| rest.starts_with(' ')))?;
    line.rsplit_once(' ')?.1.parse().ok()
}

/// Ends a lease in Redis before its time, as if its worker had died long ago.
async fn abandon(redis: &Redis, in_flight: usize, known: &BTreeSet<String>) -> BTreeSet<String> {
    let keys = poll_until(PATIENCE, "the claims in Redis", async || {
        let reply = redis.command("KEYS idem:*").await;
        let keys: BTreeSet<String> =
            reply.lines().filter(|line| line.starts_with("idem:")).map(str::to_owned).collect();
        (keys.len() == known.len() + in_flight).then_some(keys)
    })
    .await;
    for key in keys.difference(known) {
        let reply = redis.command(&format!("HSET {key} lease_until 1")).await;
        assert!(reply.starts_with(":0"), "{reply}");
    }
    keys
}

const START: u64 = 1_700_000_000;
/// In the middle of the load, while requests are held.
const HELD: u64 = START + 150;
const END: u64 = START + 300;
/// All scrapes lie in it, the first one too where a range leaves out its own start. Counters begin at 0, so nothing is
/// added at the edges, and a rate times this is what was counted.
const WINDOW: u64 = END - START + 1;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_query_of_the_dashboard_tells_what_happened() {
    let (mut redis, origin, envoy) = world().await;
    let ask = async |request: &Request| ask(&envoy, Protocol::Http1, request).await.status;
    let mut history = History::default();
    let idle = scrape(&envoy).await;
    history.add(&idle, "a", START);
    // Another Envoy, that nothing happens on: what is not by Envoy has to be summed up.
    for at in [START, HELD, END] {
        history.add(&idle, "b", at);
    }

    let keys: Vec<String> = (0..7).map(|_| unique_key()).collect();
    for key in &keys {
        assert_eq!(ask(&pay("/pay", key)).await, 200);
    }
    for nth in 0..11 {
        assert_eq!(ask(&pay("/pay", &keys[nth % 7])).await, 200);
    }
    for key in &keys[..3] {
        assert_eq!(ask(&pay("/pay", key).body("amount=2")).await, 422);
    }
    for _ in 0..6 {
        assert_eq!(ask(&Request::post("/pay").body("amount=1")).await, 400);
    }
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    origin.on("/busy", Behaviour::Respond(Reply::status(503)));
    for _ in 0..4 {
        let key = unique_key();
        assert_eq!((ask(&pay("/fails", &key)).await, ask(&pay("/fails", &key)).await), (500, 424));
    }
    assert_eq!(ask(&pay("/busy", &unique_key())).await, 503);

    let barrier = Barrier::new();
    origin.on("/held", Behaviour::BarrierEcho(barrier.clone()));
    let reply = redis.command("KEYS idem:*").await;
    let known: BTreeSet<String> =
        reply.lines().filter(|line| line.starts_with("idem:")).map(str::to_owned).collect();
    let (lost, held) = (unique_key(), [unique_key(), unique_key()]);
    let addr = envoy.addr();
    let start = |key: &str| tokio::spawn(burst(addr, Protocol::Http1, vec![pay("/held", key)]));
    let mut running = vec![start(&lost)];
    barrier.wait_arrived(1, PATIENCE).await;
    abandon(&redis, 1, &known).await;
    // Its lease is over: the second one takes it over, and the first one's completion comes too late.
    running.push(start(&lost));
    running.extend(held.iter().map(|key| start(key)));
    barrier.wait_arrived(4, PATIENCE).await;
    for nth in 0..5 {
        assert_eq!(ask(&pay("/held", &held[nth % 2])).await, 409);
    }
    let at_held = scrape(&envoy).await;
    history.add(&at_held, "a", HELD);
    barrier.open();
    for task in running {
        assert_eq!(task.await.unwrap().remove(0).unwrap().status, 200);
    }

    redis.kill();
    for _ in 0..3 {
        let answer = send_once(addr, Protocol::Http1, &pay("/pay", &unique_key())).await.unwrap();
        assert_eq!((answer.status, answer.header("idempotency-protection")), (200, Some("none")));
    }
    envoy.wait_metric("outbox", 3, PATIENCE).await;
    let before = value_of(&at_held, "idempotency_store_ms_count{}").expect("store_ms");
    let at_end = poll_until(PATIENCE, "the histograms' flush", async || {
        let scrape = scrape(&envoy).await;
        // Four completions, and three claims that failed.
        value_of(&scrape, "idempotency_store_ms_count{}")
            .is_some_and(|count| count >= before + 7.0)
            .then_some(scrape)
    })
    .await;
    history.add(&at_end, "a", END);

    let forwarded = origin.executions(|_| true);
    let unprotected = origin.executions(|seen| seen.header("idempotency-protection") == Some("none"));
    assert_eq!((forwarded, unprotected), (7 + 4 + 1 + 4 + 3, 3));
    // Each claim and each completion that got no answer, and the tries from the outbox, which go on.
    let errors = value_of(&at_end, "idempotency_store_errors{}").expect("store_errors") as usize;
    assert!(errors >= 6, "{errors}");
    let expected: &[(&str, &str, u64, usize)] = &[
        ("Executed", "Executed", 1, forwarded),
        ("Replayed", "Replayed", 1, 11),
        ("Unprotected", "Unprotected", 1, unprotected),
        ("Failed records", "Failed records", 1, 4),
        ("Taken over", "Taken over", 1, 1),
        ("Outbox", "Outbox", 1, 3),
        ("Redis evicts", "Redis evicts", 1, 0),
        ("Outcomes", "executed", WINDOW, forwarded),
        ("Outcomes", "replayed", WINDOW, 11),
        ("Outcomes", "409 in flight", WINDOW, 5),
        ("Outcomes", "422 mismatch", WINDOW, 3),
        ("Outcomes", "424 failed", WINDOW, 4),
        ("Refused before any claim", "no key", WINDOW, 6),
        ("Failed records by reason", "status", WINDOW, 4),
        ("Abandoned and lost claims", "taken over", WINDOW, 1),
        ("Abandoned and lost claims", "stale writes", WINDOW, 1),
        ("Claims given back", "status says not processed", WINDOW, 1),
        ("Unprotected requests", "store down", WINDOW, unprotected),
        ("Store errors", "no answer", WINDOW, errors),
        ("Outbox flow", "queued", WINDOW, 3),
        ("Evictions and near cache", "near cache hits", WINDOW, 14),
    ];
    let prometheus = Prometheus::start(&history, &[envoy.admin_addr()]).await;
    let mut left: BTreeMap<(&str, &str), (u64, usize)> =
        expected.iter().map(|&(panel, legend, times, count)| ((panel, legend), (times, count))).collect();
    let queries = queries();
    for (panel, legend, expr) in &queries {
        let expr = filled_in(expr, &format!("{WINDOW}s"));
        let series = prometheus.query(&expr, Some(END)).await;
        let by_envoy = legend == "{{instance}}";
        assert_eq!(series.len(), if by_envoy { 2 } else { 1 }, "{panel}, {legend}: {expr} gave {series:?}");
        let value = series[0].1;
        assert!(value.is_finite(), "{panel}, {legend}: {expr} gave {value}");
        if let Some((times, count)) = left.remove(&(panel.as_str(), legend.as_str())) {
            let counted = value * times as f64;
            assert!((counted - count as f64).abs() < 1e-6, "{panel}, {legend}: {counted}, not {count}");
        }
        // The gauges, while requests were held.
        for gauge in ["In flight", "Claims held"] {
            if panel == gauge {
                let held = prometheus.query(&expr, Some(HELD)).await;
                assert_eq!((held[0].1, barrier.arrived()), (4.0, 4), "{gauge}");
                assert!(
                    !by_envoy || (&held[0].0["instance"], held[1].1) == (&"a".to_owned(), 0.0),
                    "{held:?}"
                );
            }
        }
    }
    assert!(left.is_empty(), "the dashboard has no {left:?}");

    // Prometheus itself can scrape it, and finds there what the upstream saw.
    poll_until(PATIENCE, "a live scrape", async || {
        let up = prometheus.query("up{job=\"live\"} == 1 and on (instance) idempotency_executed", None).await;
        (up.len() == 1).then_some(())
    })
    .await;
    let live = prometheus.query("idempotency_executed{job=\"live\"}", None).await;
    assert_eq!(live[0].1, forwarded as f64);
    // Each alert is evaluated without an error.
    poll_until(PATIENCE, "all alert rules evaluated", async || {
        let data = prometheus.get("/api/v1/rules").await;
        let rules = data["groups"][0]["rules"].as_array().unwrap().clone();
        let bad: Vec<&Value> = rules.iter().filter(|rule| rule["health"] == "err").collect();
        assert!(bad.is_empty(), "{bad:?}");
        (rules.len() >= 18 && rules.iter().all(|rule| rule["health"] == "ok")).then_some(())
    })
    .await;

    // What the dashboard and the alerts ask for is in a scrape, and all that the filter counts.
    let scraped = names_scraped(&at_end);
    let mut asked: BTreeSet<String> = queries.iter().flat_map(|(_, _, expr)| names_in(expr)).collect();
    let rules = prometheus.get("/api/v1/rules").await;
    for rule in rules["groups"][0]["rules"].as_array().unwrap() {
        asked.extend(names_in(rule["query"].as_str().unwrap()));
    }
    let absent: Vec<_> = asked.difference(&scraped).collect();
    assert!(absent.is_empty(), "not in Envoy's /stats/prometheus: {absent:?}");
    let types = |kind: &str, names: Vec<&'static str>| {
        for name in names {
            let line = format!("# TYPE idempotency_{} {kind}\n", name.replace('.', "_"));
            assert!(at_end.contains(&line), "{line}");
        }
    };
    types("counter", Counter::ALL.iter().map(|each| each.name()).collect());
    types("gauge", Gauge::ALL.iter().map(|each| each.name()).collect());
    types("histogram", Histogram::ALL.iter().map(|each| each.name()).collect());
}

#[test]
fn each_alert_fires_when_it_should_and_not_else() {
    let promtool = tools().join("promtool");
    run(Command::new(&promtool)
        .args(["check", "rules", "--lint-fatal", "alerts.yaml"])
        .current_dir(repository().join("observability")));
    run(Command::new(&promtool)
        .args(["test", "rules", "alerts_test.yaml"])
        .current_dir(repository().join("observability")));
    // Each has a test of each kind.
    let (rules, tests) = (read("observability/alerts.yaml"), read("observability/alerts_test.yaml"));
    for alert in rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")) {
        for kind in ["fires", "stays quiet"] {
            assert!(tests.contains(&format!("- name: {alert} {kind}\n")), "{alert} {kind}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_traps_shows_in_the_metrics_that_the_alert_watches() {
    let origin = Origin::start().await;
    let envoy = Envoy::builder()
        .workers(1)
        .wasm(Wasm::TestHooks)
        .plugin(plugin_with(json!({})))
        .origin_addr(origin.addr())
        .start()
        .await;
    let reloads = "envoy_wasm_idempotency_vm_reload_success{}";
    assert_eq!(value_of(&scrape(&envoy).await, reloads), Some(0.0));
    let trapped = Request::post("/pay").key(unique_key()).header("x-test-fault", "trap");
    let _ = send_once(envoy.addr(), Protocol::Http1, &trapped).await;
    poll_until(PATIENCE, "a reload that is counted", async || {
        let _ = send_once(envoy.addr(), Protocol::Http1, &pay("/pay", &unique_key())).await;
        (value_of(&scrape(&envoy).await, reloads) >= Some(1.0)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_module_that_never_came_shows_as_the_alert_on_an_absent_filter_asks() {
    let origin = Origin::start().await;
    let nowhere = RefusedPort::new();
    let remote = json!({
        "http_uri": {"uri": "http://modules.example/idempotency.wasm", "cluster": "modules", "timeout": "1s"},
        "sha256": "00",
        "retry_policy": {"num_retries": 0},
    });
    let envoy = Envoy::builder()
        .workers(1)
        .plugin(plugin_with(json!({})))
        .main(|main| {
            main.filter_mut().patch = json!({"vm_config": {"code": {"local": null, "remote": remote}}})
        })
        .extra_cluster(cluster("modules", nowhere.addr(), false))
        .origin_addr(origin.addr())
        .start()
        .await;
    envoy.wait_stat("wasm.remote_load_fetch_failures", 1, PATIENCE).await;
    let answer = send_once(envoy.addr(), Protocol::Http1, &pay("/pay", &unique_key())).await.unwrap();
    assert_eq!((answer.status, origin.executions(|_| true)), (503, 0));
    let mut history = History::default();
    history.add(&scrape(&envoy).await, "a", START);
    let prometheus = Prometheus::start(&history, &[]).await;
    let rules = prometheus.get("/api/v1/rules").await;
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    let absent = rules.iter().find(|rule| rule["name"] == "IdempotencyFilterAbsent").unwrap();
    let fires = prometheus.query(absent["query"].as_str().unwrap(), Some(START)).await;
    assert_eq!(fires.len(), 1, "{fires:?}");
}

/// `envoy/embedded.yaml` with the access log of `observability/` in the place of its own, on free ports.
fn with_access_log(upstream: SocketAddr) -> String {
    let example = read("envoy/embedded.yaml");
    let (head, rest) = example.split_once("          access_log:\n").unwrap();
    let (_, tail) = rest.split_once("          http_filters:\n").unwrap();
    let log: String =
        read("observability/access-log.yaml").lines().map(|line| format!("          {line}\n")).collect();
    let whole = format!("{head}          access_log:\n{log}          http_filters:\n{tail}");
    let module = Wasm::Dist.path();
    for part in
        ["port_value: 10000", "port_value: 9901", "port_value: 8080", "filename: dist/idempotency.wasm"]
    {
        assert_eq!(whole.matches(part).count(), 1, "{part}");
    }
    whole
        .replace("port_value: 10000", "port_value: 0")
        .replace("port_value: 9901", "port_value: 0")
        .replace("port_value: 8080", &format!("port_value: {}", upstream.port()))
        .replace("filename: dist/idempotency.wasm", &format!("filename: {}", module.display()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_access_log_says_what_the_filter_did() {
    let origin = Origin::start().await;
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("envoy.yaml"), with_access_log(origin.addr())).unwrap();
    let mut command = Command::new(process::binary());
    command.args(["--disable-hot-restart", "--concurrency", "1", "-l", "warning", "-c"]).args([
        at("envoy.yaml").as_os_str(),
        "--admin-address-path".as_ref(),
        at("admin").as_os_str(),
    ]);
    let _process = process::Process::start(command, &File::create(at("log")).unwrap());
    let log = || std::fs::read_to_string(at("log")).unwrap_or_default();
    let addr: SocketAddr = poll_until(PATIENCE, "Envoy's listener", async || {
        let admin: SocketAddr = std::fs::read_to_string(at("admin")).ok()?.trim().parse().ok()?;
        let answer = send_once(admin, Protocol::Http1, &Request::get("/listeners")).await.ok()?;
        answer.text().lines().find_map(|line| line.strip_prefix("ingress::")?.parse().ok())
    })
    .await;

    let (paid, failed) = (unique_key(), unique_key());
    let asked = [
        pay("/pay?card=1234", &paid),
        pay("/pay?card=1234", &paid),
        pay("/pay?card=9999", &paid),
        pay("/fails", &failed),
        Request::post("/pay").body("x"),
        Request::get("/pay"),
    ];
    for request in &asked {
        send_once(addr, Protocol::Http1, request).await.unwrap_or_else(|e| panic!("{e:?}\n{}", log()));
    }
    let lines: Vec<Value> = poll_until(PATIENCE, "a line for each request", async || {
        let lines: Vec<Value> = log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        (lines.len() >= asked.len()).then_some(lines)
    })
    .await;
    let key = lines[0]["idempotency"]
        .as_str()
        .and_then(|line| line.rsplit_once("key="))
        .expect("a key")
        .1
        .to_owned();
    assert!(key.len() == 8 && key.bytes().all(|byte| byte.is_ascii_hexdigit()), "{key}");
    let expected = [
        json!({"status": 200, "details": "via_upstream", "replayed": null, "refusal": null,
               "idempotency": format!("executed rule=payments attempt=1 key={key}"), "path": "/pay"}),
        json!({"status": 200, "details": "idempotency_replayed", "replayed": "true", "refusal": null,
               "idempotency": format!("replayed rule=payments attempt=0 key={key}")}),
        json!({"status": 422, "details": "idempotency_mismatch", "replayed": null, "refusal": "mismatch",
               "idempotency": format!("mismatch rule=payments attempt=0 key={key}")}),
        json!({"status": 500, "details": "via_upstream", "refusal": null, "upstream_attempts": 1}),
        json!({"status": 400, "details": "idempotency_missing_key", "refusal": "missing-key",
               "idempotency": "refused.missing-key rule=payments attempt=0 key=-"}),
        json!({"status": 200, "details": "via_upstream", "idempotency": null, "method": "GET"}),
    ];
    for (line, expected) in lines.iter().zip(&expected) {
        for (field, value) in expected.as_object().unwrap() {
            assert_eq!(&line[field], value, "{field} of {line}");
        }
    }
    let failure = lines[3]["idempotency"].as_str().unwrap();
    assert!(failure.starts_with("failed.status rule=payments attempt=1 key="), "{failure}");
    assert_eq!(origin.executions_of(&paid), 1);
    // Neither a key, nor a caller, nor a query.
    for secret in [paid.as_str(), failed.as_str(), "alice", "1234"] {
        assert!(!lines.iter().any(|line| line.to_string().contains(secret)), "{secret}: {lines:?}");
    }
}

/// A load of all kinds for so long: two Envoys on a Redis, and the service fails now and then.
async fn mixed_load(addrs: &[SocketAddr], until: Instant) -> usize {
    let mut rng = Rng::new(7);
    let mut sent = 0;
    let mut recent: Vec<String> = vec![unique_key()];
    while Instant::now() < until {
        let mut requests = vec![];
        for _ in 0..rng.below(12) + 1 {
            let old = recent[rng.below(recent.len())].clone();
            let request = match rng.below(20) {
                0 => pay("/pay", &old).body("amount=2"),
                1 => Request::post("/pay").body("amount=1"),
                2 => pay("/fails", &unique_key()),
                3 => pay("/busy", &unique_key()),
                4..=6 => pay("/pay", &old),
                7 => {
                    let twice = pay("/slow", &unique_key());
                    requests.push(twice.clone());
                    twice
                }
                _ => {
                    recent.push(unique_key());
                    pay("/pay", &recent[recent.len() - 1])
                }
            };
            requests.push(request);
        }
        sent += requests.len();
        for answer in burst(addrs[sent % addrs.len()], Protocol::Http1, requests).await {
            answer.unwrap();
        }
        let excess = recent.len().saturating_sub(50);
        recent.drain(..excess);
    }
    sent
}

/// `make dashboard-image` runs it for minutes and keeps the picture.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_dashboard_can_be_drawn_from_what_prometheus_scraped() {
    let seconds = std::env::var("DASHBOARD_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let (mut redis, origin, envoy) = world().await;
    let mut plugin = on_redis(plugin_with(json!({})), Pace::PATIENT);
    plugin["store"]["redis"]["near_cache"] = json!({});
    let other = Envoy::builder().plugin(plugin).origin_addr(origin.addr());
    let other = linked(other, redis.addr(), Pace::PATIENT).start().await;
    origin.on("/fails", Behaviour::Respond(Reply::status(500)));
    origin.on("/busy", Behaviour::Respond(Reply::status(503)));
    origin.on("/slow", Behaviour::Respond(Reply::ok("slow").after(Duration::from_millis(300))));
    let prometheus = Prometheus::start(&History::default(), &[envoy.admin_addr(), other.admin_addr()]).await;
    poll_until(PATIENCE, "scrapes of both Envoys", async || {
        let counts = prometheus.query("count_over_time(idempotency_executed[1h])", None).await;
        (counts.len() == 2 && counts.iter().all(|(_, count)| *count >= 2.0)).then_some(())
    })
    .await;
    let begin = Instant::now();
    let until = begin + Duration::from_secs(seconds);
    let addrs = [envoy.addr(), other.addr()];
    // A long load has an outage of Redis in it, so that the picture shows what that looks like.
    let outage = async {
        if seconds >= 30 {
            tokio::time::sleep_until((begin + Duration::from_secs(seconds / 2)).into()).await;
            redis.kill();
            tokio::time::sleep_until((begin + Duration::from_secs(seconds / 2 + 8)).into()).await;
            redis.restart().await;
        }
    };
    let loads = all_at_once([mixed_load(&addrs, until), mixed_load(&addrs, until)]);
    let (loads, ()) = tokio::join!(loads, outage);
    assert!(loads.iter().all(|sent| *sent > 0));
    let image = match std::env::var_os("DASHBOARD_IMAGE") {
        Some(path) => repository().join(path),
        None => prometheus.directory().join("dashboard.svg"),
    };
    let count = prometheus.query("sum(idempotency_executed)", None).await;
    assert!(count[0].1 > 0.0);
    run(Command::new("python3")
        .arg(repository().join("scripts/draw-dashboard.py"))
        .args(["--prometheus", &prometheus.url(), "--seconds", &(seconds + 2).to_string()])
        .args(["--var", "job=live", "--out"])
        .arg(&image));
    let drawn = std::fs::read_to_string(&image).unwrap();
    for (panel, _, _) in queries() {
        assert!(drawn.contains(&format!(">{panel}<")), "{panel}");
    }
    assert!(!drawn.contains(">no data<"), "a panel has no data");
}
