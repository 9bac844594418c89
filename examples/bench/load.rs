//! Load by wrk, and what it printed.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::envoy::Variant;
use crate::{Fallible, Setting};

/// One run of one variant.
pub struct Load {
    /// Of the variant's listener.
    pub port: u16,
    pub variant: Variant,
    pub setting: Setting,
    /// Makes keys new in each round.
    pub round: u32,
}

/// What one run gave.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Requests per second.
    pub rate: f64,
    /// Latency, in microseconds.
    pub p50: f64,
    pub p99: f64,
}

/// Builds each request out of parts that are made once.
const SCRIPT: &str = r#"
local thread = 0
function setup(t) t:set("number", thread); thread = thread + 1 end
function init(args)
  body = string.rep("x", BODY)
  head = "POST /pay HTTP/1.1\r\nhost: api.example.com\r\nx-account-id: bench\r\ncontent-length: " .. BODY ..
    "\r\nidempotency-key: PREFIX-" .. number .. "-"
  tail = "\r\n\r\n" .. body
  count = 0
  bad = 0
end
function request()
  count = count + 1
  return head .. (NEW and count or count % 64) .. tail
end
function response(status) if status ~= 200 then bad = bad + 1 end end
function done(summary, latency, requests)
  local e = summary.errors
  io.write(string.format("RESULT %d %d %d %d %d\n", summary.requests, summary.duration, latency:percentile(50),
    latency:percentile(99), e.connect + e.read + e.write + e.status + e.timeout))
end
"#;

impl Load {
    /// Runs for this long.
    ///
    /// # Errors
    /// When wrk can't be run, or any answer was none of success: such a run measures something else.
    pub fn run(&self, time: Duration) -> Fallible<Sample> {
        let unique = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_nanos();
        let prefix =
            if self.variant.new_keys() { format!("{unique}-{}", self.round) } else { "replay".to_owned() };
        let script = SCRIPT
            .replace("BODY", &self.setting.body.to_string())
            .replace("PREFIX", &format!("{prefix}-{}", self.setting.body))
            .replace("NEW", if self.variant.new_keys() { "true" } else { "false" });
        let file = tempfile::Builder::new().suffix(".lua").tempfile()?;
        fs::write(file.path(), script)?;
        let output = Command::new("wrk")
            .args(["-t", "1", "-c", &self.setting.connections.to_string()])
            .args(["-d", &format!("{}s", time.as_secs()), "--timeout", "20s", "-s"])
            .arg(file.path())
            .arg(format!("http://127.0.0.1:{}/pay", self.port))
            .output()
            .map_err(|error| format!("wrk: {error} (`apt-get install wrk`)"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let result = text.lines().find_map(|line| line.strip_prefix("RESULT "));
        let numbers: Vec<f64> =
            result.unwrap_or_default().split(' ').filter_map(|part| part.parse().ok()).collect();
        let [requests, micros, p50, p99, errors] = numbers.as_slice() else {
            return Err(format!("{}: wrk printed\n{text}", self.variant.name()).into());
        };
        if *errors > 0.0 {
            return Err(format!("{}: {errors} of {requests} requests failed", self.variant.name()).into());
        }
        Ok(Sample { rate: requests * 1e6 / micros, p50: *p50, p99: *p99 })
    }
}
