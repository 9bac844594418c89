//! A real Prometheus of a test's own: fed with scrapes that the test dates itself, and scraping Envoys live.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{Protocol, Request, send_once};
use super::envoy::config::repository;
use super::envoy::process::Process;
use super::wait::{PATIENCE, poll_until};

/// The folder with `prometheus` and `promtool`.
pub fn tools() -> PathBuf {
    let script = repository().join("scripts/install-prometheus.sh");
    let output = Command::new(script).output().expect("scripts/install-prometheus.sh");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
}

/// Runs a command to its end; its output, or a panic with all that it said.
pub fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}\n{err}", output.status);
    out.into_owned()
}

/// Scrapes of `/stats/prometheus` at times that the test chooses, so that rates come out exact.
#[derive(Default)]
pub struct History(String);

impl History {
    /// `at` is in seconds. Only the filter's metrics are taken, and Envoy's about Wasm.
    pub fn add(&mut self, scrape: &str, instance: &str, at: u64) {
        for line in scrape.lines() {
            if !line.starts_with("idempotency_") && !line.starts_with("envoy_wasm_") {
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect("a sample");
            let (name, labels) = series.trim_end_matches('}').split_once('{').expect("labels");
            let comma = if labels.is_empty() { "" } else { "," };
            writeln!(self.0, "{name}{{job=\"envoy\",instance=\"{instance}\"{comma}{labels}}} {value} {at}")
                .unwrap();
        }
    }
}

pub struct Prometheus {
    _process: Process,
    addr: SocketAddr,
    directory: TempDir,
}

impl Prometheus {
    /// With the project's alert rules. It scrapes the admin addresses of `live` under the job `live`, four times a second.
    pub async fn start(history: &History, live: &[SocketAddr]) -> Prometheus {
        let tools = tools();
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        if !history.0.is_empty() {
            std::fs::write(at("history.txt"), format!("{}# EOF\n", history.0)).unwrap();
            run(Command::new(tools.join("promtool"))
                .args(["tsdb", "create-blocks-from", "openmetrics"])
                .args([at("history.txt"), at("data")]));
        }
        let targets: Vec<String> = live.iter().map(ToString::to_string).collect();
        let config = json!({
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "1s"},
            "rule_files": [repository().join("observability/alerts.yaml")],
            "scrape_configs": [{
                "job_name": "live", "metrics_path": "/stats/prometheus",
                "static_configs": [{"targets": targets}],
            }],
        });
        // JSON is YAML.
        std::fs::write(at("prometheus.yaml"), config.to_string()).unwrap();
        let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut command = Command::new(tools.join("prometheus"));
        command
            .arg(format!("--config.file={}", at("prometheus.yaml").display()))
            .arg(format!("--storage.tsdb.path={}", at("data").display()))
            .arg(format!("--web.listen-address={addr}"))
            .args(["--storage.tsdb.retention.time=100y", "--log.level=warn"]);
        let log = File::create(at("log")).unwrap();
        let prometheus = Prometheus { _process: Process::start(command, &log), addr, directory };
        poll_until(PATIENCE, "Prometheus is ready", async || {
            let answer = send_once(addr, Protocol::Http1, &Request::get("/-/ready")).await;
            answer.is_ok_and(|answer| answer.status == 200).then_some(())
        })
        .await;
        prometheus
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The `data` of an answer.
    pub async fn get(&self, path: &str) -> Value {
        let answer = send_once(self.addr, Protocol::Http1, &Request::get(path)).await.unwrap();
        let value: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        assert_eq!(value["status"], "success", "{path}: {}", answer.text());
        value["data"].clone()
    }

    /// An instant query, `at` in seconds (`None`: by the clock): labels and value of each series.
    pub async fn query(&self, expr: &str, at: Option<u64>) -> Vec<(BTreeMap<String, String>, f64)> {
        let mut path = format!("/api/v1/query?query={}", percent_encode(expr));
        if let Some(at) = at {
            write!(path, "&time={at}").unwrap();
        }
        let data = self.get(&path).await;
        let series = data["result"].as_array().expect("a vector");
        let one = |series: &Value| {
            let labels = serde_json::from_value(series["metric"].clone()).unwrap();
            (labels, series["value"][1].as_str().unwrap().parse().unwrap())
        };
        series.iter().map(one).collect()
    }
}

fn percent_encode(text: &str) -> String {
    text.bytes().fold(String::new(), |mut encoded, byte| {
        if byte.is_ascii_alphanumeric() {
            encoded.push(char::from(byte));
        } else {
            write!(encoded, "%{byte:02X}").unwrap();
        }
        encoded
    })
}
