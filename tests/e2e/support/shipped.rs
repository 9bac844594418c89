//! Owns an Envoy that runs a configuration as it is shipped, changed only in what a test's machine must have its own of.

use std::fs::File;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::client::{H1, Request};
use super::envoy::config::repository;
use super::envoy::process::{self, Process};
use super::wait::poll_until;

/// Compiling the module takes a second or two; a loaded machine needs more.
const START_UP: Duration = Duration::from_secs(60);

/// The YAML documents of a file of the project.
pub fn documents_of(path: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(repository().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_saphyr::from_multiple(&text).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Replaces `from` in every text of `value`; panics if it is nowhere.
pub fn replace_text(value: &mut Value, from: &str, to: &str) {
    fn replace(value: &mut Value, from: &str, to: &str) -> usize {
        match value {
            Value::String(text) if text.contains(from) => {
                *text = text.replace(from, to);
                1
            }
            Value::Array(items) => items.iter_mut().map(|item| replace(item, from, to)).sum(),
            Value::Object(fields) => fields.values_mut().map(|field| replace(field, from, to)).sum(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
        }
    }
    assert!(replace(value, from, to) > 0, "{from:?} is nowhere in the configuration");
}

/// Gives the static cluster `name` of a bootstrap another address.
pub fn move_cluster(bootstrap: &mut Value, name: &str, addr: SocketAddr) {
    let clusters = bootstrap["static_resources"]["clusters"].as_array_mut().expect("clusters");
    let cluster = clusters.iter_mut().find(|cluster| cluster["name"] == name);
    let cluster = cluster.unwrap_or_else(|| panic!("no cluster {name}"));
    let address = &mut cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"];
    assert!(address["socket_address"].is_object(), "{name}: {address}");
    *address = json!({"socket_address": {"address": addr.ip().to_string(), "port_value": addr.port()}});
}

/// A running Envoy, in the project's folder as the documents say.
pub struct Shipped {
    process: Process,
    admin: SocketAddr,
    addr: SocketAddr,
    dir: TempDir,
}

impl Shipped {
    /// Starts `bootstrap` with its listener `ingress` and its admin interface on ports of their own.
    pub async fn start(bootstrap: Value, environment: &[(&str, &str)]) -> Shipped {
        match Self::try_start(bootstrap, environment).await {
            Ok(envoy) => envoy,
            Err(log) => panic!("Envoy did not start:\n{log}"),
        }
    }

    /// `Err`: Envoy ended, with this log.
    pub async fn try_start(mut bootstrap: Value, environment: &[(&str, &str)]) -> Result<Shipped, String> {
        let dir =
            tempfile::Builder::new().prefix("idempotency-e2e-").tempdir().expect("a temporary directory");
        bootstrap["admin"]["address"]["socket_address"] = json!({"address": "127.0.0.1", "port_value": 0});
        let listeners = bootstrap["static_resources"]["listeners"].as_array_mut().expect("listeners");
        let ingress = listeners.iter_mut().find(|listener| listener["name"] == "ingress").expect("ingress");
        ingress["address"]["socket_address"] = json!({"address": "127.0.0.1", "port_value": 0});
        let (config, admin_file) = (dir.path().join("envoy.json"), dir.path().join("admin-address"));
        std::fs::write(&config, bootstrap.to_string()).expect("writing the bootstrap");
        let log = File::create(dir.path().join("envoy.log")).expect("the log of Envoy");
        let mut command = Command::new(process::binary());
        command
            .current_dir(repository())
            .arg("--config-path")
            .arg(&config)
            .arg("--admin-address-path")
            .arg(&admin_file)
            .args(["--disable-hot-restart", "--concurrency", "1", "--log-level", "warning"])
            .arg("--reject-unknown-dynamic-fields")
            .envs(environment.iter().copied());
        let mut process = Process::start(command, &log);
        let started = poll_until(START_UP, "Envoy ready", async || {
            if process.exited().is_some() {
                return Some(None);
            }
            let admin: SocketAddr = std::fs::read_to_string(&admin_file).ok()?.trim().parse().ok()?;
            if admin_get(admin, "/ready").await?.0 != 200 {
                return None;
            }
            let listeners: Value =
                serde_json::from_str(&admin_get(admin, "/listeners?format=json").await?.1).ok()?;
            let ingress =
                listeners["listener_statuses"].as_array()?.iter().find(|one| one["name"] == "ingress")?;
            let port = ingress["local_address"]["socket_address"]["port_value"].as_u64()?;
            Some(Some((admin, SocketAddr::from(([127, 0, 0, 1], u16::try_from(port).ok()?)))))
        })
        .await;
        match started {
            Some((admin, addr)) => Ok(Shipped { process, admin, addr, dir }),
            None => {
                process.kill();
                Err(std::fs::read_to_string(dir.path().join("envoy.log")).unwrap_or_default())
            }
        }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("envoy.log")).unwrap_or_default()
    }

    /// A counter or gauge; 0 if there is none of that name.
    pub async fn stat(&self, name: &str) -> u64 {
        let (_, text) = admin_get(self.admin, "/stats").await.expect("the admin port of Envoy");
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.map_or(0, |number| number.trim().parse().expect("a number"))
    }
}

impl Drop for Shipped {
    /// A crash fails the test, whatever else the test saw.
    fn drop(&mut self) {
        let death = self.process.kill();
        if std::thread::panicking() {
            eprintln!("---- the log of Envoy\n{}\n----", self.log_text());
        } else if let Some(death) = death {
            panic!("{death}; its log:\n{}", self.log_text());
        }
    }
}

async fn admin_get(admin: SocketAddr, path: &str) -> Option<(u16, String)> {
    let request = Request::new("GET", path).authority("admin").without("x-account-id");
    let response = H1::connect(admin).await.ok()?.send(&request).await.ok()?;
    Some((response.status, response.text()))
}
