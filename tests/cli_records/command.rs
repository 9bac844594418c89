//! The command, run to its end or held at its question.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

pub const BINARY: &str = env!("CARGO_BIN_EXE_idempotency");

/// What came of it.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Ended {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    #[track_caller]
    pub fn expect(self, code: i32, says: &str) -> Self {
        let all = format!("{}{}", self.out, self.err);
        assert!(self.code == code && all.contains(says), "expected {code} and {says:?}: {self:#?}");
        self
    }
}

pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(arguments).env_remove("REDIS_PASSWORD").env_remove("NO_COLOR");
    command
}

pub fn run(arguments: &[&str]) -> Ended {
    run_with(arguments, b"", |_| {})
}

/// Runs it with this standard input, which is no terminal.
pub fn run_with(arguments: &[&str], input: &[u8], change: impl FnOnce(&mut Command)) -> Ended {
    let mut command = command(arguments);
    change(&mut command);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It may end before it has read anything.
    let _ = child.stdin.take().unwrap().write_all(input);
    end(child, String::new())
}

fn end(child: Child, told: String) -> Ended {
    let output = child.wait_with_output().unwrap();
    Ended {
        code: output.status.code().expect("no signal"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: told + &String::from_utf8(output.stderr).unwrap(),
    }
}

/// A command that waits for its answer at a terminal: what it shows is read by then, nothing is written.
pub struct Asking {
    child: Child,
    terminal: File,
    told: String,
}

/// A terminal: this side, and the command's.
fn terminal() -> (File, OwnedFd) {
    let (mut master, mut slave) = (0, 0);
    let null = std::ptr::null_mut();
    // SAFETY: both numbers are there to be written, and nothing else is asked for.
    assert_eq!(unsafe { libc::openpty(&mut master, &mut slave, null, null.cast(), null.cast()) }, 0);
    // SAFETY: both are open and nobody else's.
    unsafe { (File::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) }
}

/// Runs it with a terminal for its standard error.
pub fn run_watched(arguments: &[&str]) -> Ended {
    let (mut terminal, told) = terminal();
    let mut command = command(arguments);
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(told).spawn().unwrap();
    // The command's side is open here as long as this is.
    drop(command);
    let watching = std::thread::spawn(move || {
        let mut told = Vec::new();
        // A terminal that nobody holds any more ends with an error.
        let _ = terminal.read_to_end(&mut told);
        String::from_utf8_lossy(&told).into_owned()
    });
    let ended = end(child, String::new());
    Ended { err: watching.join().unwrap(), ..ended }
}

pub fn ask(arguments: &[&str]) -> Asking {
    let (terminal, input) = terminal();
    let mut child =
        command(arguments).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut told = Vec::new();
    let stderr = child.stderr.as_mut().unwrap();
    while !told.ends_with(b"Type yes: ") {
        let mut byte = [0];
        if stderr.read(&mut byte).unwrap() == 0 {
            panic!("it did not ask: {}", String::from_utf8_lossy(&told));
        }
        told.push(byte[0]);
    }
    Asking { child, terminal, told: String::from_utf8(told).unwrap() }
}

impl Asking {
    pub fn answer(mut self, answer: &str) -> Ended {
        self.terminal.write_all(format!("{answer}\n").as_bytes()).unwrap();
        end(self.child, self.told)
    }
}

/// A configuration in a file, with these rules.
pub struct Config {
    directory: TempDir,
}

impl Config {
    pub fn of(rules: Value) -> Self {
        Self::whole(json!({ "store": { "redis": { "cluster": "redis-link" } }, "rules": rules }))
    }

    pub fn whole(config: Value) -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("filter.json"), config.to_string()).unwrap();
        Self { directory }
    }

    /// One rule, `payments`, scoped by `x-account-id`, with `patch` set.
    pub fn payments(patch: Value) -> Self {
        let mut rule = json!({
            "name": "payments",
            "match": { "methods": ["POST"], "path": { "prefix": "/" } },
            "scope": [{ "header": "x-account-id" }]
        });
        for (name, value) in patch.as_object().unwrap() {
            rule[name] = value.clone();
        }
        Self::of(json!([rule]))
    }

    pub fn file(&self) -> String {
        self.path("filter.json").to_str().unwrap().to_owned()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Another file beside it.
    pub fn put(&self, name: &str, bytes: &[u8]) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }
}
