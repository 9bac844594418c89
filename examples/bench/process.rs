//! A process that this program started: what it costs, and that it ends with us.

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::Fallible;

/// Ended when dropped.
pub struct Process(Child);

impl Process {
    /// Starts it without an input. Where its output goes is the caller's to say.
    pub fn start(command: &mut Command) -> Fallible<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdin(Stdio::null()).spawn().map_err(|error| format!("{name}: {error}"))?;
        Ok(Self(child))
    }

    pub fn id(&self) -> u32 {
        self.0.id()
    }

    /// How it ended, if it did.
    pub fn ended(&mut self) -> Fallible<Option<String>> {
        Ok(self.0.try_wait()?.map(|status| status.to_string()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that is gone already is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Processor time of a process so far, its ended threads included.
pub fn cpu_time(id: u32) -> Fallible<Duration> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat"))?;
    // The name, in parentheses, may hold anything: what follows it has fixed places.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |place: usize| fields.get(place).and_then(|text| text.parse::<u64>().ok());
    let (Some(user), Some(system)) = (ticks(11), ticks(12)) else {
        return Err(format!("/proc/{id}/stat: {stat}").into());
    };
    // Linux counts in hundredths of a second, whatever the kernel's own rate is.
    Ok(Duration::from_millis((user + system) * 10))
}

/// Resident memory of a process, in bytes.
pub fn resident(id: u32) -> Fallible<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|text| text.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| format!("/proc/{id}/status has no VmRSS").into())
}

/// Polls until it holds.
pub fn wait_until(what: &str, limit: Duration, mut holds: impl FnMut() -> Fallible<bool>) -> Fallible<()> {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        if holds()? {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(format!("{what}: not within {limit:?}").into())
}
