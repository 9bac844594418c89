//! Redis and the Envoys: started, killed and started again, and never outliving the demo.

use std::fs::{self, File};
use std::io::{self, BufReader, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::client::Client;
use crate::{Fallible, signals};

/// The lease in the demo's copies of the configuration.
pub const LOCK_TTL: Duration = Duration::from_secs(3);
const START_UP: Duration = Duration::from_secs(60);

/// Different free ports of this machine.
pub fn free_ports<const N: usize>() -> io::Result<[u16; N]> {
    let mut ports = [0; N];
    let mut listeners = Vec::new();
    for port in &mut ports {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        *port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(ports)
}

/// A process that can be killed and started again; dropped, it is killed.
pub struct Process {
    command: Command,
    child: Option<Child>,
    log: PathBuf,
}

impl Process {
    fn new(mut command: Command, log: PathBuf) -> Self {
        // Ctrl-C is for the demo, which ends its children.
        command.stdin(Stdio::null()).process_group(0);
        // SAFETY: between fork and exec only async-signal-safe functions are called.
        unsafe {
            command.pre_exec(|| {
                signals::unblock()?;
                let done = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
            });
        }
        Self { command, child: None, log }
    }

    /// Starts it and waits until it is ready. Call it on the main thread: children end with the thread that started them.
    pub fn start(&mut self, ready: impl Fn() -> bool) -> Fallible<()> {
        let out = File::options().create(true).append(true).open(&self.log)?;
        let name = self.command.get_program().to_string_lossy().into_owned();
        let child = self.command.stdout(out.try_clone()?).stderr(out).spawn();
        self.child = Some(child.map_err(|error| format!("{name}: {error}"))?);
        let end = Instant::now() + START_UP;
        while !ready() {
            if !self.is_running() || Instant::now() > end {
                return Err(format!("{name} did not start; its log:\n{}", self.log_text()).into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// SIGKILL, and its end.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Both fail only where the process has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Its log.
    pub fn log_text(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Redis, with what it acknowledged on its disk.
pub fn redis(binary: &str, directory: &Path, port: u16) -> Process {
    let mut command = Command::new(binary);
    let port = port.to_string();
    command.args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--maxmemory-policy", "noeviction"]);
    command.args(["--appendonly", "yes", "--appendfsync", "always"]).arg("--dir").arg(directory);
    Process::new(command, directory.join("redis.log"))
}

/// A node of a Redis Cluster that is not formed yet.
pub fn cluster_node(binary: &str, directory: &Path, [port, bus]: [u16; 2]) -> Fallible<Process> {
    let own = directory.join(format!("node-{port}"));
    fs::create_dir(&own)?;
    let mut command = Command::new(binary);
    let (port, bus) = (port.to_string(), bus.to_string());
    command.args(["--bind", "127.0.0.1", "--port", &port, "--save", "", "--maxmemory-policy", "noeviction"]);
    command.args(["--cluster-enabled", "yes", "--cluster-port", &bus, "--cluster-node-timeout", "2000"]);
    command.args(["--cluster-require-full-coverage", "no"]).arg("--dir").arg(&own);
    Ok(Process::new(command, own.join("redis.log")))
}

/// An Envoy on a copy of the configuration with a socket and a lease of its own, and these ports: its own, its admin's,
/// the service's; and for each usual port of Redis an actual one.
pub fn envoy(
    binary: &str,
    directory: &Path,
    configuration: &str,
    ports: [u16; 3],
    redis: &[(u16, u16)],
) -> Fallible<Process> {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
    if !root.join("dist/idempotency.wasm").is_file() {
        return Err("dist/idempotency.wasm is missing: run `make build`".into());
    }
    let [port, admin, service] = ports;
    let mut text = fs::read_to_string(root.join(configuration))?;
    let moved = [(10_000, port), (9_901, admin), (8_080, service)];
    // Two spaces, or a later change could take this port for a usual one.
    let moved = moved
        .iter()
        .chain(redis)
        .map(|(usual, actual)| (format!("port_value: {usual} "), format!("port_value:  {actual} "), 1));
    let lease = format!("\"lock_ttl\": \"{}s\"", LOCK_TTL.as_secs());
    let own = [
        ("\"@idempotency-redis\"".to_owned(), format!("\"@idempotency-redis-{port}\""), 2),
        ("\"lock_ttl\": \"60s\"".to_owned(), lease, 1),
    ];
    for (usual, actual, times) in moved.chain(own) {
        if text.matches(&usual).count() != times {
            return Err(format!("{configuration} should have `{usual}` {times} ×").into());
        }
        text = text.replace(&usual, &actual);
    }
    let copy = directory.join(format!("envoy-{port}.yaml"));
    fs::write(&copy, text)?;
    let mut command = Command::new(binary);
    // The configuration names the module relative to the project's root.
    command.current_dir(root).arg("-c").arg(copy).args(["--concurrency", "2", "--disable-hot-restart"]);
    command.args(["--log-level", "warning", "--file-flush-interval-msec", "100"]);
    Ok(Process::new(command, directory.join(format!("envoy-{port}.log"))))
}

/// Whether Envoy serves.
pub fn envoy_is_ready(admin: u16) -> bool {
    Client::new(admin).get("/ready").is_ok_and(|answer| answer.status == 200)
}

/// What Redis says to a command, as it comes.
pub fn say_to_redis(port: u16, command: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("{command}\r\nQUIT\r\n").as_bytes())?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    Ok(reply)
}

/// Asks Redis for a list of strings.
pub fn ask_redis(port: u16, command: &str) -> io::Result<Vec<Vec<u8>>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(format!("{command}\r\n").as_bytes())?;
    let mut reader = BufReader::new(stream);
    let mut items = Vec::new();
    for _ in 0..read_number(&mut reader, '*')? {
        let mut item = vec![0; read_number(&mut reader, '$')? + 2];
        reader.read_exact(&mut item)?;
        item.truncate(item.len() - 2);
        items.push(item);
    }
    Ok(items)
}

fn read_number(reader: &mut impl io::BufRead, mark: char) -> io::Result<usize> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let number = line.trim_end().strip_prefix(mark).and_then(|digits| digits.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("Redis said {line:?}")))
}
