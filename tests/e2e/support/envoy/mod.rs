//! Owns a real Envoy for one test: its options, start, reload, restart, and what can be read from it.

pub mod config;
pub mod process;

use std::collections::BTreeMap;
use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

pub use self::config::{FilterSpec, ListenerSpec, Wasm};
use self::process::Process;
use super::client::{ClientError, H1, Request};
use super::default_plugin;
use super::merge::deep_merge;
use super::wait::{PATIENCE, poll_until};

const FILTER: &str = "idempotency";
const MAIN: &str = "main";
const LOG_TAIL: usize = 60;

/// The options of an Envoy. Methods about a filter or listener mean the main ones.
pub struct Builder {
    workers: usize,
    main: ListenerSpec,
    listeners: Vec<ListenerSpec>,
    extra_listeners: Vec<Value>,
    static_listeners: bool,
    origin: SocketAddr,
    origin_http2: bool,
    cluster_patch: Value,
    clusters: Vec<Value>,
    bootstrap_patch: Value,
    env: Vec<(String, String)>,
    component_log_level: String,
    drain_time_s: u32,
}

impl Builder {
    fn new() -> Builder {
        Builder {
            workers: 2,
            main: ListenerSpec::new(MAIN, Some(FilterSpec::new(FILTER, default_plugin()))),
            listeners: vec![],
            extra_listeners: vec![],
            static_listeners: false,
            origin: ([127, 0, 0, 1], 1).into(),
            origin_http2: false,
            cluster_patch: json!({}),
            clusters: vec![],
            bootstrap_patch: json!({}),
            env: vec![],
            component_log_level: "wasm:info".to_owned(),
            drain_time_s: 1,
        }
    }

    pub fn workers(mut self, workers: usize) -> Builder {
        self.workers = workers;
        self
    }

    /// The plugin's configuration. A JSON string is passed as it is, for what isn't JSON.
    pub fn plugin(mut self, plugin: Value) -> Builder {
        self.main.filter_mut().plugin = plugin;
        self
    }

    /// Passes the configuration as a `Struct`, not as the JSON text in a `StringValue`.
    pub fn plugin_as_struct(mut self) -> Builder {
        self.main.filter_mut().plugin_as_struct = true;
        self
    }

    pub fn plugin_name(mut self, name: &str) -> Builder {
        self.main.filter_mut().plugin_name = Some(name.to_owned());
        self
    }

    pub fn filter_name(mut self, name: &str) -> Builder {
        self.main.filter_mut().name = name.to_owned();
        self
    }

    pub fn root_id(mut self, root_id: &str) -> Builder {
        self.main.filter_mut().root_id = root_id.to_owned();
        self
    }

    pub fn vm_id(mut self, vm_id: &str) -> Builder {
        self.main.filter_mut().vm_id = Some(vm_id.to_owned());
        self
    }

    pub fn wasm(mut self, wasm: Wasm) -> Builder {
        self.main.filter_mut().wasm = wasm;
        self
    }

    pub fn failure_policy(mut self, policy: &str) -> Builder {
        self.main.filter_mut().failure_policy = policy.to_owned();
        self
    }

    pub fn headers_stop_iteration(mut self, on: bool) -> Builder {
        self.main.filter_mut().headers_stop_iteration = on;
        self
    }

    /// An environment variable of the wasm VM.
    pub fn vm_env(mut self, name: &str, value: &str) -> Builder {
        self.main.filter_mut().vm_env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// An environment variable of the Envoy process.
    pub fn env(mut self, name: &str, value: &str) -> Builder {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    pub fn without_filter(mut self) -> Builder {
        self.main.filter = None;
        self
    }

    /// A second instance of the filter in the main chain, nearer the upstream, in a VM of its own.
    pub fn second_filter(mut self, plugin: Value) -> Builder {
        let mut second = FilterSpec::new("idempotency_second", plugin);
        if let Some(first) = &self.main.filter {
            second.wasm = first.wasm.clone();
        }
        self.main.second_filter = Some(second);
        self
    }

    /// Replaces the route table.
    pub fn routes(mut self, routes: Vec<Value>) -> Builder {
        self.main.routes = routes;
        self
    }

    pub fn virtual_host(mut self, patch: Value) -> Builder {
        deep_merge(&mut self.main.virtual_host, &patch);
        self
    }

    pub fn filters_before(mut self, filters: Vec<Value>) -> Builder {
        self.main.filters_before = filters;
        self
    }

    pub fn filters_after(mut self, filters: Vec<Value>) -> Builder {
        self.main.filters_after = filters;
        self
    }

    pub fn hcm_patch(mut self, patch: Value) -> Builder {
        deep_merge(&mut self.main.hcm_patch, &patch);
        self
    }

    pub fn http_protocol_options(self, options: Value) -> Builder {
        self.hcm_patch(json!({"http_protocol_options": options}))
    }

    pub fn stream_idle_timeout(mut self, timeout: &str) -> Builder {
        self.main.stream_idle_timeout = Some(timeout.to_owned());
        self
    }

    pub fn per_connection_buffer_limit_bytes(mut self, limit: u32) -> Builder {
        self.main.per_connection_buffer_limit_bytes = Some(limit);
        self
    }

    pub fn access_log_format(mut self, format: &str) -> Builder {
        self.main.access_log_format = format.to_owned();
        self
    }

    /// Whatever else is to change in the main listener.
    pub fn main(mut self, change: impl FnOnce(&mut ListenerSpec)) -> Builder {
        change(&mut self.main);
        self
    }

    /// A further listener; it gets an address of its own, see `Envoy::addr_of`.
    pub fn listener(mut self, listener: ListenerSpec) -> Builder {
        self.listeners.push(listener);
        self
    }

    /// A further listener as Envoy reads it, address included.
    pub fn extra_listener(mut self, mut listener: Value) -> Builder {
        listener["@type"] = json!("type.googleapis.com/envoy.config.listener.v3.Listener");
        self.extra_listeners.push(listener);
        self
    }

    /// Listeners in the bootstrap: a bad one keeps Envoy from starting. They can't be reloaded.
    pub fn static_listeners(mut self) -> Builder {
        self.static_listeners = true;
        self
    }

    pub fn origin_addr(mut self, addr: SocketAddr) -> Builder {
        self.origin = addr;
        self
    }

    pub fn origin_http2(mut self, on: bool) -> Builder {
        self.origin_http2 = on;
        self
    }

    /// Merged into the cluster `origin`.
    pub fn cluster_patch(mut self, patch: Value) -> Builder {
        deep_merge(&mut self.cluster_patch, &patch);
        self
    }

    pub fn extra_cluster(mut self, cluster: Value) -> Builder {
        self.clusters.push(cluster);
        self
    }

    pub fn bootstrap_patch(mut self, patch: Value) -> Builder {
        deep_merge(&mut self.bootstrap_patch, &patch);
        self
    }

    /// Lets listeners be reached from inside this Envoy.
    pub fn internal_listeners(self) -> Builder {
        self.bootstrap_patch(json!({"bootstrap_extensions": [{
            "name": "envoy.bootstrap.internal_listener",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.bootstrap.internal_listener.v3.InternalListener"
            },
        }]}))
    }

    /// Envoy's `--component-log-level`, `wasm:info` by default; other components log warnings.
    pub fn component_log_level(mut self, levels: &str) -> Builder {
        self.component_log_level = levels.to_owned();
        self
    }

    /// How long what a reload replaces lives on, 1 s by default; connections still on it are cut then.
    pub fn drain_time_s(mut self, seconds: u32) -> Builder {
        self.drain_time_s = seconds;
        self
    }

    pub async fn start(self) -> Envoy {
        match self.try_start().await {
            Ok(envoy) => envoy,
            Err(log) => panic!("Envoy did not start:\n{}", tail(&log)),
        }
    }

    /// Like `start`, but an Envoy that refuses its configuration gives its log text.
    pub async fn try_start(self) -> Result<Envoy, String> {
        let dir =
            tempfile::Builder::new().prefix("idempotency-e2e-").tempdir().expect("a temporary directory");
        std::fs::create_dir(dir.path().join("lds")).expect("the listeners' directory");
        let reserved = std::iter::once(&self.main)
            .chain(&self.listeners)
            .map(|listener| (listener.name.clone(), ReservedPort::new()))
            .collect();
        let log = File::options()
            .create(true)
            .append(true)
            .open(dir.path().join("envoy.log"))
            .expect("the log of Envoy");
        let mut envoy = Envoy {
            options: self,
            reserved,
            log,
            process: None,
            admin: ([127, 0, 0, 1], 0).into(),
            pushes: 0,
            death_expected: false,
            dir,
        };
        envoy.write_bootstrap();
        envoy.write_listeners();
        envoy.boot().await?;
        Ok(envoy)
    }
}

/// A port that is ours for as long as this lives, and that Envoy can listen on all the while: the socket is bound with
/// SO_REUSEPORT, as Envoy's are, and never listens.
struct ReservedPort {
    _socket: tokio::net::TcpSocket,
    addr: SocketAddr,
}

impl ReservedPort {
    fn new() -> ReservedPort {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseport(true).unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
        let addr = socket.local_addr().unwrap();
        ReservedPort { _socket: socket, addr }
    }
}

/// A running Envoy. It ends with this value; if the test fails, the end of its log is printed.
pub struct Envoy {
    options: Builder,
    reserved: BTreeMap<String, ReservedPort>,
    log: File,
    process: Option<Process>,
    admin: SocketAddr,
    pushes: usize,
    death_expected: bool,
    dir: TempDir,
}

impl Envoy {
    pub fn builder() -> Builder {
        Builder::new()
    }

    /// The main listener's address.
    pub fn addr(&self) -> SocketAddr {
        self.addr_of(MAIN)
    }

    pub fn addr_of(&self, listener: &str) -> SocketAddr {
        self.reserved.get(listener).unwrap_or_else(|| panic!("no listener {listener}")).addr
    }

    pub fn admin_addr(&self) -> SocketAddr {
        self.admin
    }

    /// Envoy's temporary directory: its configuration and logs.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub fn pid(&self) -> u32 {
        self.process.as_ref().expect("a running Envoy").pid()
    }

    pub fn rss_bytes(&self) -> u64 {
        let status =
            std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("a running Envoy");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a size in kB");
        kib * 1024
    }

    /// The version of this Envoy, such as `[1, 40, 0]`.
    pub async fn version(&self) -> [u32; 3] {
        let info: Value = serde_json::from_str(&self.admin_get("/server_info").await).expect("JSON");
        let text = info["version"].as_str().expect("a version");
        let number = text.split('/').nth(1).expect("a version between slashes");
        let parts: Vec<u32> = number.split(['.', '-']).filter_map(|part| part.parse().ok()).collect();
        parts[..3].try_into().expect("three numbers")
    }

    pub async fn admin_get(&self, path: &str) -> String {
        self.admin_call("GET", path).await
    }

    pub async fn admin_post(&self, path: &str) -> String {
        self.admin_call("POST", path).await
    }

    /// A counter or gauge; 0 if there is none of that name.
    pub async fn stat(&self, name: &str) -> u64 {
        self.stats_matching(&format!("^{}$", escape(name))).await.remove(name).unwrap_or(0)
    }

    /// All counters and gauges whose names begin with `prefix`.
    pub async fn stats(&self, prefix: &str) -> BTreeMap<String, u64> {
        self.stats_matching(&format!("^{}", escape(prefix))).await
    }

    /// A counter or gauge of the filter.
    pub async fn metric(&self, name: &str) -> u64 {
        self.stat(&format!("wasmcustom.idempotency.{name}")).await
    }

    pub async fn wait_stat(&self, name: &str, at_least: u64, deadline: Duration) {
        poll_until(deadline, &format!("{name} >= {at_least}"), async || {
            (self.stat(name).await >= at_least).then_some(())
        })
        .await;
    }

    pub async fn wait_metric(&self, name: &str, at_least: u64, deadline: Duration) {
        self.wait_stat(&format!("wasmcustom.idempotency.{name}"), at_least, deadline).await;
    }

    /// How many workers have had a connection of the main listener.
    pub async fn workers_that_served(&self) -> usize {
        let stats = self.stats(&format!("listener.{MAIN}.worker_")).await;
        stats.iter().filter(|(name, count)| name.ends_with(".downstream_cx_total") && **count > 0).count()
    }

    pub fn access_log_lines(&self) -> Vec<String> {
        self.access_log_lines_of(MAIN)
    }

    pub fn access_log_lines_of(&self, listener: &str) -> Vec<String> {
        let text = std::fs::read(self.access_log(listener)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        // A last line without its end is still being written.
        text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')).map(str::to_owned).collect()
    }

    /// The first line of the main listener's access log that `matches`, once it is there.
    pub async fn wait_access_log(&self, matches: impl Fn(&str) -> bool, deadline: Duration) -> String {
        poll_until(deadline, "the line in the access log", async || {
            self.access_log_lines().into_iter().find(|line| matches(line))
        })
        .await
    }

    pub fn log_text(&self) -> String {
        let bytes = std::fs::read(self.dir.path().join("envoy.log")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn log_contains(&self, text: &str) -> bool {
        self.log_text().contains(text)
    }

    pub async fn wait_log(&self, text: &str, deadline: Duration) {
        poll_until(deadline, &format!("{text:?} in the log of Envoy"), async || {
            self.log_contains(text).then_some(())
        })
        .await;
    }

    /// The machine loses power, as far as Envoy can tell.
    pub fn kill9(&mut self) {
        let death = self.process.as_mut().and_then(Process::kill);
        self.report(death);
    }

    /// SIGSTOP: the process sleeps, its connections stay.
    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid().cast_signed(), signal) }, 0);
    }

    /// SIGTERM, then waits for the end.
    pub async fn stop(&mut self) {
        let process = self.process.as_mut().expect("a running Envoy");
        process.terminate();
        poll_until(PATIENCE, "the end of Envoy", async || process.exited()).await;
    }

    /// Stops Envoy if it still runs, and starts it again: same configuration, same ports, nothing remembered.
    pub async fn restart(&mut self) {
        self.kill9();
        if let Err(log) = self.boot().await {
            panic!("Envoy did not start again:\n{}", tail(&log));
        }
    }

    /// A crash of Envoy is what this test is about, not a failure.
    pub fn expect_death(&mut self) {
        self.death_expected = true;
    }

    /// Whether Envoy still runs.
    pub fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| process.exited().is_none())
    }

    /// Pushes the main listener with another plugin configuration. Once this returns, new connections get it on every
    /// worker; old ones keep the old one until the drain time is over. `Err`: Envoy refused it, and why.
    pub async fn reload_listener(&mut self, plugin: Value) -> Result<(), String> {
        self.reload(|main| main.filter_mut().plugin = plugin).await
    }

    /// Pushes the main listener with any change. A refused change is forgotten again.
    pub async fn reload(&mut self, change: impl FnOnce(&mut ListenerSpec)) -> Result<(), String> {
        assert!(!self.options.static_listeners, "static listeners can't be reloaded");
        let before = self.listener_stats().await;
        let log_before = self.log_text().len();
        let old = self.options.main.clone();
        change(&mut self.options.main);
        self.write_listeners();
        let refused = poll_until(PATIENCE, "an answer to the pushed listener", async || {
            self.listener_stats().await.settled_after(&before, self.options.workers)
        })
        .await;
        if refused {
            self.options.main = old;
            return Err(self.log_text().split_off(log_before));
        }
        Ok(())
    }

    /// Waits until nothing of the replaced listeners is left.
    pub async fn wait_drained(&self, deadline: Duration) {
        poll_until(deadline, "the old listeners drained", async || {
            let stats = self.stats("listener_manager.").await;
            let left = |name: &str| stats.get(&format!("listener_manager.{name}")).copied().unwrap_or(0);
            (left("total_filter_chains_draining") + left("total_listeners_draining") == 0).then_some(())
        })
        .await;
    }

    /// A crash fails the test, whatever else the test saw.
    fn report(&self, death: Option<String>) {
        if let Some(death) = death.filter(|_| !self.death_expected) {
            panic!("{death}; the end of its log:\n{}", tail(&self.log_text()));
        }
    }

    fn access_log(&self, listener: &str) -> PathBuf {
        let name = if listener == MAIN { "access.log".to_owned() } else { format!("access-{listener}.log") };
        self.dir.path().join(name)
    }

    fn listeners_json(&self) -> Value {
        let mut all: Vec<Value> = std::iter::once(&self.options.main)
            .chain(&self.options.listeners)
            .map(|listener| listener.to_json(self.addr_of(&listener.name), &self.access_log(&listener.name)))
            .collect();
        all.extend(self.options.extra_listeners.iter().cloned());
        Value::Array(all)
    }

    fn lds_file(&self) -> PathBuf {
        self.dir.path().join("lds").join("listeners.json")
    }

    /// Envoy watches for a file that is moved into place.
    fn write_listeners(&mut self) {
        self.pushes += 1;
        let mut listeners = self.listeners_json();
        let version = self.pushes.to_string();
        let text = json!({"version_info": version, "resources": listeners.take()}).to_string();
        let draft = self.dir.path().join("lds").join(format!("draft-{version}"));
        std::fs::write(&draft, text).expect("writing the listeners");
        std::fs::rename(&draft, self.lds_file()).expect("moving the listeners into place");
    }

    fn write_bootstrap(&self) {
        let options = &self.options;
        let mut origin = config::cluster("origin", options.origin, options.origin_http2);
        deep_merge(&mut origin, &options.cluster_patch);
        let mut clusters = vec![origin];
        clusters.extend(options.clusters.iter().cloned());
        let listeners = options.static_listeners.then(|| {
            let mut listeners = self.listeners_json();
            for listener in listeners.as_array_mut().into_iter().flatten() {
                deep_merge(listener, &json!({"@type": null}));
            }
            listeners
        });
        let bootstrap =
            config::bootstrap(&clusters, &self.lds_file(), listeners.as_ref(), &options.bootstrap_patch);
        let text = serde_json::to_string_pretty(&bootstrap).expect("JSON");
        std::fs::write(self.dir.path().join("envoy.json"), text).expect("writing the bootstrap");
    }

    async fn boot(&mut self) -> Result<(), String> {
        let admin_file = self.dir.path().join("admin-address");
        // A restart must not read the address of the Envoy before.
        let _ = std::fs::remove_file(&admin_file);
        let mut command = Command::new(process::binary());
        command
            .arg("--config-path")
            .arg(self.dir.path().join("envoy.json"))
            .arg("--admin-address-path")
            .arg(&admin_file)
            .args(["--disable-hot-restart", "--concurrency", &self.options.workers.to_string()])
            .args(["--log-level", "warning", "--component-log-level", &self.options.component_log_level])
            // Envoy would take a misspelt field of a pushed listener with a warning.
            .arg("--reject-unknown-dynamic-fields")
            .args(["--file-flush-interval-msec", "20"])
            .args(["--drain-time-s", &self.options.drain_time_s.to_string()])
            .args(["--drain-strategy", "immediate"])
            .envs(self.options.env.iter().cloned());
        let mut process = Process::start(command, &self.log);
        let admin = poll_until(PATIENCE, "the admin address of Envoy", async || {
            if process.exited().is_some() {
                return Some(None);
            }
            std::fs::read_to_string(&admin_file).ok().and_then(|text| text.trim().parse().ok()).map(Some)
        })
        .await;
        let Some(admin) = admin else {
            process.kill();
            return Err(self.log_text());
        };
        self.admin = admin;
        let expected = 1 + self.options.listeners.len() + self.options.extra_listeners.len();
        let none = ListenerStats::default();
        let started = poll_until(PATIENCE, "Envoy ready", async || {
            if process.exited().is_some() {
                return Some(false);
            }
            if self.try_admin_call("GET", "/ready").await.ok()?.0 != 200 {
                return None;
            }
            let stats = self.try_listener_stats().await.ok()?;
            if self.options.static_listeners {
                return (stats.created >= (expected * self.options.workers) as u64).then_some(true);
            }
            stats.settled_after(&none, expected * self.options.workers).map(|refused| !refused)
        })
        .await;
        if !started {
            process.kill();
            return Err(self.log_text());
        }
        self.process = Some(process);
        Ok(())
    }

    async fn listener_stats(&self) -> ListenerStats {
        self.try_listener_stats().await.unwrap_or_else(|e| panic!("the admin port of Envoy: {e:?}"))
    }

    async fn try_listener_stats(&self) -> Result<ListenerStats, ClientError> {
        let stats = self.try_stats_matching("^listener_manager\\.").await?;
        let stat = |name: &str| stats.get(&format!("listener_manager.{name}")).copied().unwrap_or(0);
        Ok(ListenerStats {
            accepted: stat("lds.update_success"),
            refused: stat("lds.update_rejected")
                + stat("lds.update_failure")
                + stat("listener_create_failure"),
            created: stat("listener_create_success"),
        })
    }

    async fn stats_matching(&self, regex: &str) -> BTreeMap<String, u64> {
        self.try_stats_matching(regex).await.unwrap_or_else(|e| panic!("the admin port of Envoy: {e:?}"))
    }

    async fn try_stats_matching(&self, regex: &str) -> Result<BTreeMap<String, u64>, ClientError> {
        let (_, text) = self.try_admin_call("GET", &format!("/stats?filter={}", percent(regex))).await?;
        // Histograms and texts have no single number.
        let number = |line: &str| {
            let (name, value) = line.split_once(": ")?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        };
        Ok(text.lines().filter_map(number).collect())
    }

    async fn admin_call(&self, method: &str, path: &str) -> String {
        let answer = self.try_admin_call(method, path).await;
        answer.unwrap_or_else(|e| panic!("{method} {path} at the admin port of Envoy: {e:?}")).1
    }

    async fn try_admin_call(&self, method: &str, path: &str) -> Result<(u16, String), ClientError> {
        let request = Request::new(method, path).authority("admin").without("x-account-id");
        let response = H1::connect(self.admin).await?.send(&request).await?;
        Ok((response.status, response.text()))
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let death = self.process.take().and_then(|mut process| process.kill());
        if std::thread::panicking() {
            let log = tail(&self.log_text());
            eprintln!(
                "---- the end of the log of Envoy ({})\n{log}\n----",
                death.as_deref().unwrap_or("it ran")
            );
        } else {
            self.report(death);
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct ListenerStats {
    accepted: u64,
    refused: u64,
    created: u64,
}

impl ListenerStats {
    /// None while an update is under way; then whether it was refused. An accepted update counts once `on_workers`
    /// workers have taken over a listener.
    fn settled_after(&self, before: &ListenerStats, on_workers: usize) -> Option<bool> {
        if self.refused > before.refused {
            return Some(true);
        }
        let accepted = self.accepted > before.accepted;
        (accepted && self.created >= before.created + on_workers as u64).then_some(false)
    }
}

fn tail(log: &str) -> String {
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
}

fn escape(name: &str) -> String {
    name.chars().flat_map(|c| if c.is_alphanumeric() || c == '_' { vec![c] } else { vec!['\\', c] }).collect()
}

fn percent(text: &str) -> String {
    let safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes().map(|b| if safe(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
