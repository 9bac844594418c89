//! The way to Redis: one server, or the primaries of a cluster. It finds no primary behind a Sentinel.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use idempotency::config::parse_duration;
use redis::{
    Client, ClientTlsConfig, Cmd, Connection, ConnectionAddr, ConnectionInfo, ErrorKind, FromRedisValue,
    IntoConnectionInfo as _, Pipeline, RedisError, RedisResult, ServerErrorKind, TlsCertificates, Value,
};

use crate::exit::Failure;

/// Where a password is looked for first.
const PASSWORD: &str = "REDIS_PASSWORD";

/// Slots of a cluster.
const SLOTS: usize = 16_384;

/// Where Redis is and who asks.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Redis")]
#[group(skip)]
pub struct Args {
    /// Where Redis is: redis://HOST:PORT/DATABASE, rediss:// for TLS, or unix:///PATH. Its password belongs into the
    /// environment variable REDIS_PASSWORD or a file, for everybody can read the arguments of a process.
    #[arg(long, value_name = "URL")]
    redis: String,
    /// It is a Redis Cluster, and the URL that of any node.
    #[arg(long)]
    cluster: bool,
    /// Trust the authorities in this PEM file, and no other.
    #[arg(long, value_name = "FILE")]
    redis_ca: Option<PathBuf>,
    /// The client's own certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "redis_client_key")]
    redis_client_cert: Option<PathBuf>,
    /// The private key of that certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "redis_client_cert")]
    redis_client_key: Option<PathBuf>,
    /// The user of Redis's ACL.
    #[arg(long, value_name = "NAME")]
    redis_user: Option<String>,
    /// A file with the password, in place of REDIS_PASSWORD.
    #[arg(long, value_name = "FILE")]
    redis_password_file: Option<PathBuf>,
    /// How long to wait for a connection, and for each answer.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_argument)]
    timeout: Duration,
}

/// A duration as settings are written.
pub fn parse_argument(text: &str) -> Result<Duration, String> {
    parse_duration(text)
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| "expected a whole number and a unit (ms, s, m or h), such as 60s".to_owned())
}

/// A server that holds records.
pub struct Node {
    name: String,
    timeout: Duration,
    connection: Connection,
}

/// Every server that holds records.
pub struct Link<'a> {
    args: &'a Args,
    /// The one that the URL names.
    seed: Node,
    /// Of a cluster: where each primary is, and its slots.
    primaries: Option<Vec<(ConnectionInfo, Vec<RangeInclusive<u16>>)>>,
}

impl<'a> Link<'a> {
    /// Connects to the server that the URL names.
    pub fn open(args: &'a Args) -> Result<Self, Failure> {
        // Another provider can't have been chosen before: nothing of the command does so.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let info = args.info()?;
        let mut seed = args.connect(&info)?;
        if !args.cluster {
            return Ok(Self { args, seed, primaries: None });
        }
        let slots: Value = seed
            .query(redis::cmd("CLUSTER").arg("SLOTS"))
            .map_err(|failure| Failure { message: format!("--cluster: {failure}"), ..failure })?;
        let primaries = primaries(&slots, &host_of(info.addr()))
            .ok_or_else(|| Failure::store(format!("{}: CLUSTER SLOTS: {}", seed.name, describe(&slots))))?;
        let at = |host, port| info.clone().set_addr(at(info.addr(), host, port));
        let primaries = primaries.into_iter().map(|((host, port), slots)| (at(host, port), slots)).collect();
        Ok(Self { args, seed, primaries: Some(primaries) })
    }

    /// All of them, or none: what some hold is a part only.
    pub fn into_nodes(mut self) -> Result<Vec<Node>, Failure> {
        let Some(primaries) = self.primaries else {
            // One that does not say passes: its user may lack the right to ask.
            let info: Result<String, Failure> = self.seed.query(redis::cmd("INFO").arg("cluster"));
            if info.is_ok_and(|info| info.contains("cluster_enabled:1")) {
                let name = self.seed.name;
                return Err(Failure::usage(format!(
                    "Redis at {name} is a part of a Redis Cluster: use --cluster"
                )));
            }
            return Ok(vec![self.seed]);
        };
        let owned: usize = primaries.iter().flat_map(|(_, slots)| slots).map(ExactSizeIterator::len).sum();
        if owned != SLOTS {
            return Err(Failure::store(format!(
                "Redis at {}: {owned} of {SLOTS} slots of the cluster have a primary: it is not whole",
                self.seed.name
            )));
        }
        primaries.iter().map(|(info, _)| self.args.connect(info)).collect()
    }

    /// The one that a key belongs to.
    pub fn into_node_of(mut self, key: &str) -> Result<Node, Failure> {
        let Some(primaries) = self.primaries else { return Ok(self.seed) };
        let slot: u16 = self.seed.query(redis::cmd("CLUSTER").arg("KEYSLOT").arg(key))?;
        let owner = primaries.iter().find(|(_, slots)| slots.iter().any(|own| own.contains(&slot)));
        let (info, _) =
            owner.ok_or_else(|| Failure::store("no primary of the cluster owns the key's slot"))?;
        self.args.connect(info)
    }
}

impl Args {
    fn info(&self) -> Result<ConnectionInfo, Failure> {
        // The URL is not repeated: it may hold a password.
        let info = self.redis.as_str().into_connection_info().map_err(|error| {
            let why = error.detail().map_or_else(|| error.to_string(), str::to_owned);
            Failure::usage(format!("--redis: expected redis://, rediss:// or unix:///: {why}"))
        })?;
        let mut settings = info.redis_settings().clone().set_skip_set_lib_name();
        if settings.password().is_some() {
            eprintln!(
                "warning: --redis has a password, which everybody can read in the list of processes: use {PASSWORD} or \
                 --redis-password-file"
            );
        }
        if let Some(user) = &self.redis_user {
            settings = settings.set_username(user);
        }
        if let Some(file) = &self.redis_password_file {
            let password = String::from_utf8(read(file)?)
                .map_err(|_| Failure::usage(format!("{}: the password is not UTF-8", file.display())))?;
            settings = settings.set_password(password.trim_end_matches(['\r', '\n']));
        } else if let Ok(password) = std::env::var(PASSWORD)
            && !password.is_empty()
        {
            settings = settings.set_password(password);
        }
        if self.cluster && settings.db() != 0 {
            return Err(Failure::usage("--cluster: a Redis Cluster has no database but 0"));
        }
        let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
        if !is_tls && (self.redis_ca.is_some() || self.redis_client_cert.is_some()) {
            return Err(Failure::usage("--redis-ca, --redis-client-cert: only with --redis rediss://…"));
        }
        let info = info.set_redis_settings(settings);
        if !is_tls {
            return Ok(info);
        }
        let client_tls = if let (Some(cert), Some(key)) = (&self.redis_client_cert, &self.redis_client_key) {
            Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? })
        } else {
            None
        };
        let root_cert = self.redis_ca.as_deref().map(read).transpose()?;
        let client = Client::build_with_tls(info, TlsCertificates { client_tls, root_cert })
            .map_err(|error| Failure::usage(format!("--redis-ca, --redis-client-cert: {error}")))?;
        Ok(client.get_connection_info().clone())
    }

    fn connect(&self, info: &ConnectionInfo) -> Result<Node, Failure> {
        let name = name_of(info.addr());
        let connected = Client::open(info.clone()).and_then(|client| {
            let connection = client.get_connection_with_timeout(self.timeout)?;
            connection.set_read_timeout(Some(self.timeout))?;
            connection.set_write_timeout(Some(self.timeout))?;
            Ok(connection)
        });
        match connected {
            Ok(connection) => Ok(Node { name, timeout: self.timeout, connection }),
            Err(error) => Err(failure_of(&name, self.timeout, &error)),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    std::fs::read(path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

impl Node {
    /// Its address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// One command.
    pub fn query<T: FromRedisValue>(&mut self, command: &Cmd) -> Result<T, Failure> {
        command.query(&mut self.connection).map_err(|error| failure_of(&self.name, self.timeout, &error))
    }

    /// Several commands; each may fail by itself.
    pub fn query_each(&mut self, commands: &mut Pipeline) -> Result<Vec<RedisResult<Value>>, Failure> {
        let answers = commands.ignore_errors().query(&mut self.connection);
        answers.map_err(|error| failure_of(&self.name, self.timeout, &error))
    }

    /// What a failed command means.
    pub fn failure(&self, error: &RedisError) -> Failure {
        failure_of(&self.name, self.timeout, error)
    }
}

/// Whether the key is another server's, for good or for now.
pub fn has_moved(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask))
}

fn failure_of(name: &str, timeout: Duration, error: &RedisError) -> Failure {
    let code = error.code().unwrap_or_default();
    let what = if error.is_timeout() {
        format!("no answer within {}", humantime::format_duration(timeout))
    } else if has_moved(error) {
        "the key is another server's: this is a Redis Cluster, so use --cluster; or it is moving, so try again".to_owned()
    } else if code == "READONLY" {
        "this is a replica: give the primary's address".to_owned()
    } else if code == "NOAUTH" || code == "WRONGPASS" || error.kind() == ErrorKind::AuthenticationFailed {
        format!(
            "the user or its password is refused: see --redis-user, {PASSWORD} and --redis-password-file ({error})"
        )
    } else if code == "NOPERM" {
        format!("the user may not do this: {error}")
    } else {
        error.to_string()
    };
    Failure::store(format!("Redis at {name}: {what}"))
}

/// A reply that is none of those expected, without what it holds.
pub fn describe(value: &Value) -> &'static str {
    if matches!(value, Value::Nil) { "unexpected answer: nothing" } else { "unexpected answer" }
}

fn name_of(addr: &ConnectionAddr) -> String {
    if let ConnectionAddr::Unix(path) = addr {
        return path.display().to_string();
    }
    let (ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. }) = addr else {
        return "an unknown kind of address".to_owned();
    };
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

fn host_of(addr: &ConnectionAddr) -> String {
    if let ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } = addr {
        return host.clone();
    }
    String::new()
}

/// The same way to another server.
fn at(seed: &ConnectionAddr, host: String, port: u16) -> ConnectionAddr {
    if let ConnectionAddr::TcpTls { insecure, tls_params, .. } = seed {
        return ConnectionAddr::TcpTls { host, port, insecure: *insecure, tls_params: tls_params.clone() };
    }
    ConnectionAddr::Tcp(host, port)
}

type Primaries = BTreeMap<(String, u16), Vec<RangeInclusive<u16>>>;

/// Reads CLUSTER SLOTS: ranges, each with its primary first. A node without a name is the one that was asked.
fn primaries(slots: &Value, seed_host: &str) -> Option<Primaries> {
    let Value::Array(ranges) = slots else { return None };
    let mut primaries = Primaries::new();
    for range in ranges {
        let Value::Array(range) = range else { return None };
        let [Value::Int(first), Value::Int(last), Value::Array(primary), ..] = range.as_slice() else {
            return None;
        };
        let [host, Value::Int(port), ..] = primary.as_slice() else { return None };
        let host = if let Value::BulkString(host) = host
            && !host.is_empty()
        {
            String::from_utf8(host.clone()).ok()?
        } else {
            seed_host.to_owned()
        };
        let range = u16::try_from(*first).ok()?..=u16::try_from(*last).ok()?;
        primaries.entry((host, u16::try_from(*port).ok()?)).or_default().push(range);
    }
    Some(primaries)
}
