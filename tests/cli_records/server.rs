//! A Redis of a test's own, and records in it as the filter makes them.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::codec::ResponseEncoder;
use idempotency::record::{ClaimTerms, Owner, Reason};
use idempotency::store::redis::operation::{read_claim, read_write};
use idempotency::store::redis::script::Call;
use idempotency::store::redis::{Fault, Operation, SCRIPTS, envelope, resp};
use idempotency::store::{Claim, ClaimReply, Hold, Write, WriteReply};
use tempfile::TempDir;

pub const PREFIX: &str = "idem:";
pub const LEASE: Duration = Duration::from_secs(60);
pub const LIFE: Duration = Duration::from_secs(3_600);
const PATIENCE: Duration = Duration::from_secs(30);

pub struct Redis {
    process: Child,
    pub port: u16,
    _directory: TempDir,
}

/// A port that is free; a cluster's node takes the one 10000 above too.
pub fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port < 55_000 && TcpListener::bind(("127.0.0.1", port + 10_000)).is_ok() {
            return port;
        }
    }
}

/// What is true at last.
pub fn eventually<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let patience = Instant::now() + PATIENCE;
    loop {
        if let Some(value) = found() {
            return value;
        }
        assert!(Instant::now() < patience, "{what}: not within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Redis {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// `arguments` come after those that keep it from disk.
    pub fn start_with(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let process = Command::new("redis-server")
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
            .args(arguments)
            .current_dir(&directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("redis-server is missing: `make setup-redis`, or `apt-get install redis-server`");
        let redis = Self { process, port, _directory: directory };
        eventually("redis-server listens", || TcpStream::connect(("127.0.0.1", port)).ok());
        redis
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn call(&self, argv: &[impl AsRef<[u8]>]) -> Vec<u8> {
        let mut body = Vec::new();
        resp::encode_command(&mut body, argv);
        envelope::seal(&mut body);
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&body).unwrap();
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        reply
    }

    /// One command of the test's own: its reply as text, arrays as lines.
    pub fn command(&self, argv: &[&str]) -> String {
        let reply = self.call(argv);
        let values = envelope::open(&reply, 1);
        text(&values.unwrap_or_else(|| panic!("{argv:?}: {}", reply.escape_ascii()))[0])
    }

    /// Everything in a record, for "nothing was changed". Redis gives fields in any order.
    pub fn record(&self, key: &str) -> String {
        let all = self.command(&["HGETALL", key]);
        let mut lines: Vec<&str> = all.lines().collect();
        lines.sort_unstable();
        lines.join("\n")
    }

    pub fn claim(&self, operation: &Operation) -> Result<ClaimReply, Fault> {
        let reply = self.call(&operation.argv(PREFIX, &SCRIPTS, Call::Text));
        let values = envelope::open(&reply, 1).unwrap_or_else(|| panic!("{}", reply.escape_ascii()));
        read_claim(&values[0]).map(|answer| answer.reply)
    }

    pub fn write(&self, hold: &Hold, write: Write) -> Result<WriteReply, Fault> {
        let reply = self.call(&Operation::Write(*hold, write).argv(PREFIX, &SCRIPTS, Call::Text));
        let values = envelope::open(&reply, 1).unwrap_or_else(|| panic!("{}", reply.escape_ascii()));
        read_write(&values[0])
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// SIGSTOP: it accepts connections, and answers nothing.
    pub fn pause(&self) {
        // SAFETY: the process is a child that has not been waited for.
        assert_eq!(unsafe { libc::kill(self.process.id().cast_signed(), libc::SIGSTOP) }, 0);
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
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

/// The claim of owner number `owner` on key number `key`.
pub fn hold(key: u64, owner: u8) -> Hold {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&key.to_be_bytes());
    Hold {
        key: StoreKey::from_bytes(bytes),
        owner: Owner::from_bytes([owner; 16]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        attempt: 1,
    }
}

pub fn name(hold: &Hold) -> String {
    format!("{PREFIX}{}", hold.key.hex())
}

pub fn claim_of(hold: &Hold, lock_ttl: Duration) -> Operation {
    let Hold { key, owner, fingerprint, .. } = *hold;
    let terms =
        ClaimTerms { owner, fingerprint, lock_ttl, record_ttl: LIFE, on_abandoned: OnAbandoned::Takeover };
    Operation::Claim(Claim { key, terms })
}

pub fn completion(body: &[u8]) -> Write {
    let lines: [(&[u8], &[u8]); 2] =
        [(b"content-type", b"application/json"), (b"location", b"/payments/pay-1")];
    let mut encoder = ResponseEncoder::begin(201, lines, None).unwrap();
    encoder.push(body);
    Write::Complete { response: Rc::from(encoder.finish()), record_ttl: LIFE }
}

pub fn failure() -> Write {
    Write::Fail { reason: Reason::Status, failed_ttl: LIFE }
}

impl Redis {
    /// The key in Redis of a record in flight.
    pub fn in_flight(&self, key: u64) -> String {
        assert_eq!(self.claim(&claim_of(&hold(key, 1), LEASE)), Ok(ClaimReply::Claimed { attempt: 1 }));
        name(&hold(key, 1))
    }

    pub fn abandoned(&self, key: u64) -> String {
        let operation = claim_of(&hold(key, 1), Duration::from_millis(1));
        assert_eq!(self.claim(&operation), Ok(ClaimReply::Claimed { attempt: 1 }));
        let name = name(&hold(key, 1));
        eventually("the lease is over", || {
            let time = self.command(&["TIME"]);
            let (seconds, micros) = time.split_once('\n').unwrap();
            let now = seconds.parse::<u64>().unwrap() * 1000 + micros.parse::<u64>().unwrap() / 1000;
            let until: u64 = self.command(&["HGET", &name, "lease_until"]).parse().unwrap();
            (now > until).then_some(())
        });
        name
    }

    pub fn failed(&self, key: u64) -> String {
        let name = self.in_flight(key);
        assert_eq!(self.write(&hold(key, 1), failure()), Ok(WriteReply::Applied));
        name
    }

    pub fn completed(&self, key: u64, body: &[u8]) -> String {
        let name = self.in_flight(key);
        assert_eq!(self.write(&hold(key, 1), completion(body)), Ok(WriteReply::Applied));
        name
    }
}
