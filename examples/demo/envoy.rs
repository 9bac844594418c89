//! The Envoy process: its configuration, its ports, its log, and that it never outlives the demo.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::client::Client;
use crate::{Fallible, signals};

const CONFIGURATION: &str = "envoy/detached.yaml";
const MODULE: &str = "dist/idempotency.wasm";
const USUAL_PORT: u16 = 10000;
const USUAL_ADMIN_PORT: u16 = 9901;
const USUAL_SERVICE_PORT: u16 = 8080;
/// The number of workers: duplicates must meet across them.
pub const WORKERS: u32 = 4;
/// Compiling the module takes a second or two on each worker; a loaded machine needs more.
const START_UP: Duration = Duration::from_secs(60);

/// A running Envoy.
pub struct Envoy {
    process: Mutex<Child>,
    directory: Mutex<Option<TempDir>>,
    log: PathBuf,
    configuration: PathBuf,
    port: u16,
    admin_port: u16,
    moved: bool,
}

impl Envoy {
    /// Starts Envoy and waits until it serves. Call it on the main thread: Envoy ends with the thread that started it.
    pub fn start(root: &Path, binary: &Path, port: Option<u16>, service_port: u16) -> Fallible<Self> {
        if !root.join(MODULE).is_file() {
            return Err(format!("{MODULE} is missing: run `make build`").into());
        }
        let directory = tempfile::Builder::new().prefix("idempotency-demo-").tempdir()?;
        // Port 0 lets Envoy choose.
        let port = match port {
            Some(port) if !is_free(port) => return Err(format!("PORT={port} is taken").into()),
            Some(port) => port,
            None if is_free(USUAL_PORT) => USUAL_PORT,
            None => 0,
        };
        let admin_port = if is_free(USUAL_ADMIN_PORT) { USUAL_ADMIN_PORT } else { 0 };
        let moves = [(USUAL_PORT, port), (USUAL_ADMIN_PORT, admin_port), (USUAL_SERVICE_PORT, service_port)];
        let moved = moves.iter().any(|(usual, actual)| usual != actual);
        let configuration = if moved {
            let text = fs::read_to_string(root.join(CONFIGURATION))?;
            let copy = directory.path().join("envoy.yaml");
            fs::write(&copy, move_ports(text, &moves)?)?;
            copy
        } else {
            PathBuf::from(CONFIGURATION)
        };

        let log = directory.path().join("envoy.log");
        let admin_file = directory.path().join("admin");
        let process = spawn(root, binary, &configuration, &admin_file, &log)?;
        let mut envoy = Self {
            process: Mutex::new(process),
            directory: Mutex::new(Some(directory)),
            log,
            configuration,
            port,
            admin_port,
            moved,
        };
        match envoy.wait_until_ready(&admin_file) {
            Ok(()) => Ok(envoy),
            Err(error) => Err(format!("{error}; the end of Envoy's log:\n{}", envoy.log_tail()).into()),
        }
    }

    /// Where clients go.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The admin interface.
    pub fn admin(&self) -> String {
        format!("http://127.0.0.1:{}", self.admin_port)
    }

    /// Whether a port isn't the usual one.
    pub fn moved(&self) -> bool {
        self.moved
    }

    /// The configuration it runs with.
    pub fn configuration(&self) -> String {
        if self.moved {
            format!("a copy of {CONFIGURATION} with other ports: {}", self.configuration.display())
        } else {
            CONFIGURATION.to_owned()
        }
    }

    /// Its log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let log = fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = text.lines().collect();
        let skipped = lines.len().saturating_sub(40);
        lines.into_iter().skip(skipped).map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
    }

    /// What the filter counted, without the counters that are zero.
    pub fn counters(&self) -> Vec<(String, u64)> {
        let Ok(answer) =
            Client::new(self.admin_port).get("/stats?filter=^wasmcustom\\.idempotency\\.&usedonly")
        else {
            return Vec::new();
        };
        let text = String::from_utf8_lossy(&answer.message.body).into_owned();
        let counter = |line: &str| {
            let (name, value) = line.split_once(": ")?;
            let name = name.strip_prefix("wasmcustom.idempotency.")?;
            Some((name.to_owned(), value.trim().parse::<u64>().ok()?))
        };
        text.lines().filter_map(counter).filter(|(_, value)| *value > 0).collect()
    }

    /// Whether the process still runs.
    pub fn is_running(&self) -> bool {
        matches!(self.process().try_wait(), Ok(None))
    }

    /// Ends the process and removes its files; the second time does nothing.
    pub fn stop(&self) {
        let mut process = self.process();
        // Both fail only where the process has ended already.
        let _ = process.kill();
        let _ = process.wait();
        drop(self.directory.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn process(&self) -> MutexGuard<'_, Child> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until_ready(&mut self, admin_file: &Path) -> Fallible<()> {
        let end = Instant::now() + START_UP;
        while Instant::now() < end {
            if let Some(status) = self.process().try_wait()? {
                return Err(format!("Envoy did not start ({status})").into());
            }
            if let Some(port) = written_port(admin_file)
                && Client::new(port).get("/ready").is_ok_and(|answer| answer.status == 200)
            {
                self.admin_port = port;
                if self.port == 0 {
                    self.port = self.ask_port()?;
                }
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Err(format!("Envoy was not ready after {} s", START_UP.as_secs()).into())
    }

    /// The port that Envoy chose for the listener.
    fn ask_port(&self) -> Fallible<u16> {
        let answer = Client::new(self.admin_port).get("/listeners")?;
        let text = String::from_utf8_lossy(&answer.message.body).into_owned();
        let port = text.trim().rsplit(':').next().and_then(|port| port.parse().ok());
        port.ok_or_else(|| format!("no port in Envoy's list of listeners: {text}").into())
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Whether nobody listens on this port of this machine.
fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The configuration with other ports.
fn move_ports(mut text: String, moves: &[(u16, u16)]) -> Fallible<String> {
    for (usual, actual) in moves {
        let wanted = format!("port_value: {usual} ");
        if text.matches(&wanted).count() != 1 {
            return Err(format!("{CONFIGURATION} should have `{wanted}` exactly once").into());
        }
        // Not `port_value` yet, or a later move could take this port for a usual one.
        text = text.replace(&wanted, &format!("moved_port_value: {actual} "));
    }
    Ok(text.replace("moved_port_value", "port_value"))
}

fn spawn(root: &Path, binary: &Path, configuration: &Path, admin_file: &Path, log: &Path) -> Fallible<Child> {
    let out = File::create(log)?;
    let mut command = Command::new(binary);
    command
        // The configuration names the module relative to the project's root.
        .current_dir(root)
        .arg("-c")
        .arg(configuration)
        .args(["--concurrency", &WORKERS.to_string()])
        .args(["--log-level", "warning", "--component-log-level", "wasm:info", "--disable-hot-restart"])
        // The access log is for reading along.
        .args(["--file-flush-interval-msec", "100"])
        .arg("--admin-address-path")
        .arg(admin_file)
        .stdin(Stdio::null())
        .stdout(out.try_clone()?)
        .stderr(out)
        // Ctrl-C is for the demo, which ends Envoy.
        .process_group(0);
    // SAFETY: between fork and exec only async-signal-safe functions are called.
    unsafe {
        command.pre_exec(|| {
            signals::unblock()?;
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) == 0 {
                Ok(())
            } else {
                Err(std::io::Error::last_os_error())
            }
        });
    }
    command.spawn().map_err(|error| format!("{}: {error}", binary.display()).into())
}

/// The port of the address that Envoy wrote to a file.
fn written_port(file: &Path) -> Option<u16> {
    fs::read_to_string(file).ok()?.trim().rsplit(':').next()?.parse().ok()
}
