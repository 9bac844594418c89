//! Load by wrk, and proof that it was the load it says.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::process::{cpu_time, wait_until};
use crate::{Fallible, http, upstream};

/// Under what all subjects take their turns.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    pub workers: u32,
    pub connections: u32,
    pub body: usize,
}

/// Which keys a load uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keys {
    /// Each request has its own.
    New,
    /// The same 64, each of which was executed before.
    Executed,
    /// One that is held in flight.
    Held,
}

/// What must come of a load; anything else is an error, since it would measure something else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// The service runs once for each request.
    Executions,
    /// The service does not run.
    NoExecutions,
    /// The service does not run, and each answer is a refusal.
    Refusals,
}

/// Who tells how often the service ran.
#[derive(Debug, Clone, Copy)]
pub enum Counter {
    /// The service of this program.
    Upstream,
    /// A service of its own, on this port at `/count`.
    Own(u16),
}

impl Counter {
    pub fn read(self) -> Fallible<u64> {
        match self {
            Self::Upstream => Ok(upstream::executed()),
            Self::Own(port) => Ok(http::get(port, "/count")?.trim().parse()?),
        }
    }

    /// The same once what is on its way has arrived.
    fn settled(self) -> Fallible<u64> {
        let mut last = (self.read()?, Instant::now());
        wait_until("the service's count to settle", Duration::from_secs(30), || {
            let count = self.read()?;
            if count != last.0 {
                last = (count, Instant::now());
            }
            Ok(last.1.elapsed() > Duration::from_millis(40))
        })?;
        Ok(last.0)
    }
}

/// What is measured.
#[derive(Debug, Clone)]
pub struct Subject {
    pub name: String,
    /// The subject that its figures are compared with.
    pub against: String,
    pub port: u16,
    pub path: String,
    pub keys: Keys,
    pub expected: Expected,
    pub counter: Counter,
    /// Further header lines of each request, each with its line end.
    pub headers: String,
    /// What marks an answer as a replay, in lower case; nothing where the peer doesn't mark it.
    pub replay_mark: Option<&'static str>,
    /// Whose processor time counts.
    pub processes: Vec<u32>,
}

/// What one run gave.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    pub requests: f64,
    /// Requests per second.
    pub rate: f64,
    /// Latency, in microseconds.
    pub p50: f64,
    pub p99: f64,
    /// Processor time per request, in microseconds.
    pub cpu: f64,
}

/// The caller in every request.
pub const ACCOUNT: &str = "bench";
/// The host in every request.
pub const HOST: &str = "api.example.com";
const EXECUTED_KEYS: u32 = 64;

/// Builds each request out of parts that are made once.
const SCRIPT: &str = r#"
function init(args)
  head = "POST @PATH HTTP/1.1\r\nhost: @HOST\r\nx-account-id: @ACCOUNT\r\ncontent-type: text/plain\r\n@HEADERS" ..
    "content-length: @BODY\r\nidempotency-key: @PREFIX"
  tail = "\r\n\r\n" .. string.rep("x", @BODY)
  count = 0
end
function request()
  count = count + 1
  return head .. @KEY .. tail
end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %d %d\n", summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), e.connect + e.read + e.write + e.timeout, e.status))
end
"#;

impl Subject {
    /// Sends one request by itself.
    pub fn ask(&self, key: &str, body: usize, more: &[(&str, &str)]) -> Fallible<http::Answer> {
        self.ask_within(Duration::from_secs(30), key, body, more)
    }

    /// The same, answered within so long.
    pub fn ask_within(
        &self,
        limit: Duration,
        key: &str,
        body: usize,
        more: &[(&str, &str)],
    ) -> Fallible<http::Answer> {
        let own: Vec<(&str, &str)> = self.headers.lines().filter_map(|line| line.split_once(": ")).collect();
        let mut headers = vec![
            ("host", HOST),
            ("x-account-id", ACCOUNT),
            ("content-type", "text/plain"),
            ("idempotency-key", key),
        ];
        headers.extend(own);
        headers.extend(more);
        http::send_within(Some(limit), self.port, "POST", &self.path, &headers, "x".repeat(body).as_bytes())
    }

    /// Does it replay to the keys of [`Keys::Executed`]?
    pub fn prepare(&self, body: usize) -> Fallible<()> {
        if self.keys != Keys::Executed {
            return Ok(());
        }
        let keys: Vec<String> =
            (0..EXECUTED_KEYS).map(|number| format!("executed-{body}-{number}")).collect();
        for key in &keys {
            self.ask(key, body, &[])?;
        }
        let before = self.counter.settled()?;
        for key in &keys {
            let answer = self.ask(key, body, &[])?;
            let is_marked = self.replay_mark.is_none_or(|mark| answer.head.to_lowercase().contains(mark));
            if answer.status != 200 || answer.body.len() != upstream::ANSWER || !is_marked {
                return Err(format!("{}: no replay, but {}", self.name, answer.head).into());
            }
        }
        let ran = self.counter.settled()? - before;
        if ran == 0 {
            Ok(())
        } else {
            Err(format!("{}: {ran} of {EXECUTED_KEYS} replays executed", self.name).into())
        }
    }

    /// Runs for whole seconds, and checks what came of it.
    pub fn run(&self, setting: Setting, time: Duration) -> Fallible<Sample> {
        let unique = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos();
        let (prefix, key) = match self.keys {
            Keys::New => (format!("new-{unique}-"), "count"),
            Keys::Executed => (format!("executed-{}-", setting.body), "(count % 64)"),
            Keys::Held => (format!("held-{}", setting.body), "\"\""),
        };
        let script = SCRIPT
            .replace("@BODY", &setting.body.to_string())
            .replace("@PREFIX", &prefix)
            .replace("@KEY", key)
            .replace("@PATH", &self.path)
            .replace("@HOST", HOST)
            .replace("@ACCOUNT", ACCOUNT)
            .replace("@HEADERS", &self.headers.replace('\n', "\\n").replace('\r', "\\r"));
        let file = tempfile::Builder::new().suffix(".lua").tempfile()?;
        fs::write(file.path(), script)?;
        let spent = || -> Fallible<Duration> { self.processes.iter().map(|id| cpu_time(*id)).sum() };
        let (cpu_before, executed_before) = (spent()?, self.counter.settled()?);
        let output = Command::new("wrk")
            .args(["-t", "1", "-c", &setting.connections.to_string()])
            .args(["-d", &format!("{}s", time.as_secs()), "--timeout", "20s", "-s"])
            .arg(file.path())
            .arg(format!("http://127.0.0.1:{}{}", self.port, self.path))
            .output()
            .map_err(|error| format!("wrk: {error} (`apt-get install wrk`)"))?;
        let cpu = spent()?.saturating_sub(cpu_before);
        let executed = self.counter.settled()? - executed_before;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let result = text.lines().find_map(|line| line.strip_prefix("RESULT "));
        let numbers: Vec<f64> =
            result.unwrap_or_default().split(' ').filter_map(|part| part.parse().ok()).collect();
        let [requests, micros, p50, p99, broken, refused] = *numbers.as_slice() else {
            return Err(format!("{}: wrk printed\n{text}", self.name).into());
        };
        let most = requests + f64::from(setting.connections);
        #[allow(clippy::cast_precision_loss, reason = "counts of some seconds")]
        let executed = executed as f64;
        let as_expected = match self.expected {
            // Those that wrk had sent when its time was up are executed, but not among its answers.
            Expected::Executions => refused == 0.0 && executed >= requests && executed <= most,
            Expected::NoExecutions => refused == 0.0 && executed == 0.0,
            Expected::Refusals => refused == requests && executed == 0.0,
        };
        if requests == 0.0 || broken > 0.0 || !as_expected {
            return Err(format!(
                "{}: {:?} expected of {requests} requests, but the service ran {executed} times, {refused} were refused, {broken} broke",
                self.name, self.expected
            )
            .into());
        }
        Ok(Sample {
            requests,
            rate: requests * 1e6 / micros,
            p50,
            p99,
            cpu: cpu.as_secs_f64() * 1e6 / requests,
        })
    }
}
