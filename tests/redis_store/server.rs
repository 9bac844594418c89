//! A Redis of a test's own, on a unix socket, spoken to in exactly the bytes that the batcher makes.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use idempotency::store::redis::{envelope, resp};
use tempfile::TempDir;

pub struct Redis {
    process: Child,
    directory: TempDir,
}

impl Redis {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// `arguments` come after those that keep it from disk and network.
    pub fn start_with(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let process = Command::new("redis-server")
            .args(["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--appendonly", "no"])
            .args(arguments)
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is missing: `make setup-redis`, or `apt-get install redis-server`");
        let redis = Self { process, directory };
        let patience = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(redis.socket()).is_err() {
            assert!(Instant::now() < patience, "redis-server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        redis
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("redis.sock")
    }

    /// Sends a callout's body and reads until Redis closes, which is what the QUIT at its end makes it do.
    pub fn call(&self, body: &[u8]) -> Vec<u8> {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(body).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        reply
    }

    /// One command of the test's own: its reply as text, arrays as lines.
    pub fn command(&self, argv: &[&str]) -> String {
        let mut body = Vec::new();
        resp::encode_command(&mut body, argv);
        envelope::seal(&mut body);
        let reply = self.call(&body);
        let values = envelope::open(&reply, 1);
        text(&values.unwrap_or_else(|| panic!("{argv:?}: {}", reply.escape_ascii()))[0])
    }

    pub fn millis_left(&self, key: &str) -> i64 {
        self.command(&["PTTL", key]).parse().unwrap()
    }
}

fn text(value: &resp::Value<'_>) -> String {
    match value {
        resp::Value::Simple(text) | resp::Value::Bulk(text) => String::from_utf8_lossy(text).into_owned(),
        resp::Value::Error(text) => panic!("{}", text.escape_ascii()),
        resp::Value::Integer(number) => number.to_string(),
        resp::Value::Null => String::new(),
        resp::Value::Array(values) => values.iter().map(text).collect::<Vec<_>>().join("\n"),
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
