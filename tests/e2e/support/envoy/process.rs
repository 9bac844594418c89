//! Owns the Envoy process: finding the binary, starting it so that it can't outlive the tests, ending it.

use std::fs::File;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, OnceLock, mpsc};

use super::config::repository;

/// The binary of `ENVOY_PATH`, or the newest that `make setup` installed.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ENVOY_PATH").filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "ENVOY_PATH={}: no such file", path.display());
        return path;
    }
    let version = |path: &PathBuf| -> Vec<u32> {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.trim_start_matches("envoy-").split('.').map(|part| part.parse().unwrap_or(0)).collect()
    };
    let tools = std::fs::read_dir(repository().join(".tools")).into_iter().flatten().flatten();
    tools
        .map(|entry| entry.path())
        .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("envoy-")))
        .filter(|path| path.join("envoy/_bin/envoy").is_file())
        .max_by_key(version)
        .map(|path| path.join("envoy/_bin/envoy"))
        .expect("no Envoy: run `make setup`, or set ENVOY_PATH")
}

/// A running child that dies with this process.
pub struct Process {
    child: Child,
    told_to_end: bool,
}

impl Process {
    /// Starts `command` with its output appended to `log`.
    pub fn start(mut command: Command, log: &File) -> Process {
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log"))
            .stderr(log.try_clone().expect("the log"));
        Process { child: spawn(command).expect("starting Envoy"), told_to_end: false }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, if it has.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("waiting for the child")
    }

    /// Asks for an orderly end.
    pub fn terminate(&mut self) {
        self.told_to_end = true;
        if self.exited().is_none() {
            let pid = i32::try_from(self.pid()).expect("a pid");
            // SAFETY: the child isn't reaped yet, so the pid is still its own.
            unsafe { libc::kill(pid, libc::SIGTERM) };
        }
    }

    /// Kills it; says how it had ended without being told to, if it had. A crash that is under way counts: its signal
    /// shows in the status even if the kill comes before the end.
    pub fn kill(&mut self) -> Option<String> {
        // It may have ended already.
        let _ = self.child.kill();
        let status = self.child.wait().ok()?;
        if std::mem::replace(&mut self.told_to_end, true) {
            return None;
        }
        match status.signal() {
            Some(libc::SIGKILL) => None,
            Some(signal) => Some(format!("Envoy died of signal {signal}")),
            None => Some(format!("Envoy ended by itself: {status}")),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

type Order = (Command, mpsc::Sender<io::Result<Child>>);

/// Forks on one thread that lives as long as the process: the death signal of a child is sent when the *thread* that
/// forked it ends, and the threads of tests end early.
fn spawn(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<mpsc::Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = mpsc::channel::<Order>();
        let parent = std::process::id();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                for (mut command, reply) in inbox {
                    // SAFETY: only async-signal-safe calls between fork and exec.
                    unsafe { command.pre_exec(move || die_with(parent)) };
                    let _ = reply.send(command.spawn());
                }
            })
            .expect("the spawner thread");
        Mutex::new(orders)
    });
    let (reply, answer) = mpsc::channel();
    spawner.lock().unwrap().send((command, reply)).expect("the spawner thread");
    answer.recv().expect("the spawner thread")
}

fn die_with(parent: u32) -> io::Result<()> {
    // SAFETY: plain system calls.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(io::Error::last_os_error());
        }
        if u32::try_from(libc::getppid()) != Ok(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
    }
    Ok(())
}
