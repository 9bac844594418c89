//! A record as Redis holds it, read for people. What is readable here is what the filter's scripts can read.

use std::time::Duration;

use idempotency::fingerprint::FINGERPRINT_VERSION;
use idempotency::record::Reason;
use redis::{RedisError, Value};

use super::link::{Node, has_moved};
use crate::exit::Failure;

/// The format of records that this version reads, as `record.lua` has it.
const FORMAT: &str = "1";

const FIELDS: [&str; 11] = [
    "v",
    "state",
    "owner",
    "attempt",
    "lease_until",
    "created",
    "reason",
    "fingerprint",
    "fingerprint_version",
    "resolved_at",
    "resolved_from",
];

/// How a record stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Somebody's lease holds.
    InFlight {
        remaining: Duration,
    },
    /// In flight, and its lease ran out.
    Abandoned {
        since: Duration,
    },
    Completed,
    Failed {
        reason: Reason,
    },
    /// The filter refuses requests with this key.
    Unreadable {
        why: String,
    },
}

impl State {
    /// The word for it.
    pub const fn word(&self) -> &'static str {
        match self {
            Self::InFlight { .. } => "in_flight",
            Self::Abandoned { .. } => "abandoned",
            Self::Completed => "completed",
            Self::Failed { .. } => "failed",
            Self::Unreadable { .. } => "unreadable",
        }
    }

    /// What its field `state` says.
    pub const fn stored(&self) -> &'static str {
        match self {
            Self::InFlight { .. } | Self::Abandoned { .. } => "in_flight",
            Self::Completed => "completed",
            Self::Failed { .. } => "failed",
            Self::Unreadable { .. } => "",
        }
    }

    /// The word, and the reason where there is one.
    pub fn words(&self) -> String {
        match self {
            Self::Failed { reason } => format!("failed {}", reason.as_str()),
            Self::InFlight { .. } | Self::Abandoned { .. } | Self::Completed | Self::Unreadable { .. } => {
                self.word().to_owned()
            }
        }
    }
}

/// A record.
#[derive(Debug, Clone)]
pub struct Found {
    pub redis_key: String,
    pub state: State,
    /// Its format's version; empty if there is none.
    pub format: String,
    pub fingerprint_version: String,
    pub fingerprint: String,
    pub owner: String,
    pub attempt: u64,
    /// When this attempt was claimed, and how long ago.
    pub created_ms: u64,
    pub age: Duration,
    /// `None`: never.
    pub expires_in: Option<Duration>,
    /// When an operator completed it, and what it was.
    pub resolved: Option<(u64, String)>,
    /// The kept response as it is encoded, where it was asked for.
    pub response: Option<Vec<u8>>,
}

/// The record under a key, response included.
pub fn read_one(node: &mut Node, redis_key: &str) -> Result<Option<Found>, Failure> {
    let mut read = read(node, &[redis_key.to_owned()], true)?;
    if read.moved > 0 {
        return Err(Failure::store(format!(
            "Redis at {}: the key is another server's: this is a Redis Cluster, so use --cluster; or it is moving, so try again",
            node.name()
        )));
    }
    Ok(read.found.pop())
}

/// What was read of some keys.
pub struct Read {
    pub found: Vec<Found>,
    /// Keys that were another server's by then.
    pub moved: usize,
}

/// Reads the records under `keys`, in one round trip. One that is gone is left out.
pub fn read(node: &mut Node, keys: &[String], with_response: bool) -> Result<Read, Failure> {
    let mut commands = redis::pipe();
    for key in keys {
        let command = commands.cmd("HMGET").arg(key).arg(&FIELDS);
        if with_response {
            command.arg("response");
        }
        commands.cmd("HEXISTS").arg(key).arg("response").cmd("PTTL").arg(key);
    }
    commands.cmd("TIME");
    let mut answers = node.query_each(&mut commands)?.into_iter();
    let mut read = Read { found: Vec::new(), moved: 0 };
    let mut unread = Vec::new();
    for key in keys {
        let (Some(fields), Some(has_response), Some(left)) = (answers.next(), answers.next(), answers.next())
        else {
            return Err(Failure::store(format!("Redis at {}: answers are missing", node.name())));
        };
        unread.push((key, fields, has_response, left));
    }
    let now = answers
        .next()
        .and_then(Result::ok)
        .and_then(|time| redis::from_redis_value::<(u64, u64)>(time).ok())
        .map(|(seconds, micros)| seconds.saturating_mul(1000).saturating_add(micros / 1000))
        .ok_or_else(|| Failure::store(format!("Redis at {} does not tell the time", node.name())))?;
    for (key, fields, has_response, left) in unread {
        let fields = match fields {
            Ok(Value::Array(fields)) => fields,
            Err(error) if error.code() == Some("WRONGTYPE") => {
                read.found.push(foreign(key, "it is no hash", expiry(left.ok())));
                continue;
            }
            Err(error) if has_moved(&error) => {
                read.moved = read.moved.saturating_add(1);
                continue;
            }
            Err(error) => return Err(node.failure(&error)),
            Ok(_) => return Err(Failure::store(format!("Redis at {}: unexpected answer", node.name()))),
        };
        let left = left.map_err(|error: RedisError| node.failure(&error))?;
        if matches!(left, Value::Int(-2)) {
            continue;
        }
        let has_response = matches!(has_response, Ok(Value::Int(1)));
        read.found.push(interpret(key, fields, has_response, expiry(Some(left)), now));
    }
    Ok(read)
}

fn expiry(left: Option<Value>) -> Option<Duration> {
    let Some(Value::Int(millis)) = left else { return None };
    u64::try_from(millis).ok().map(Duration::from_millis)
}

fn foreign(key: &str, why: &str, expires_in: Option<Duration>) -> Found {
    Found {
        redis_key: key.to_owned(),
        state: State::Unreadable { why: why.to_owned() },
        format: String::new(),
        fingerprint_version: String::new(),
        fingerprint: String::new(),
        owner: String::new(),
        attempt: 0,
        created_ms: 0,
        age: Duration::ZERO,
        expires_in,
        resolved: None,
        response: None,
    }
}

fn interpret(
    key: &str,
    fields: Vec<Value>,
    has_response: bool,
    expires_in: Option<Duration>,
    now: u64,
) -> Found {
    let mut fields = fields.into_iter().map(|field| {
        let Value::BulkString(bytes) = field else { return None };
        Some(bytes)
    });
    let mut next = || fields.next().flatten();
    let mut text = || next().map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    let (format, state, owner, attempt) = (text(), text(), text(), text());
    let (lease_until, created, reason) = (text(), text(), text());
    let (fingerprint, fingerprint_version, resolved_at, resolved_from) = (text(), text(), text(), text());
    let number = |text: &Option<String>| text.as_deref().and_then(|text| text.parse::<u64>().ok());
    let reason = reason.and_then(|word| Reason::ALL.into_iter().find(|reason| reason.as_str() == word));
    let is_hash =
        |text: &str| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let unreadable = |why: &str| State::Unreadable { why: why.to_owned() };
    let state = if format.is_none() {
        unreadable("it is somebody else's hash")
    } else if format.as_deref() != Some(FORMAT) {
        State::Unreadable { why: format!("its format is not {FORMAT}") }
    } else if fingerprint_version != Some(FINGERPRINT_VERSION.to_string()) {
        State::Unreadable { why: format!("its fingerprint's version is not {FINGERPRINT_VERSION}") }
    } else if !fingerprint.as_deref().is_some_and(is_hash) {
        unreadable("it has no fingerprint")
    } else if owner.is_none() || number(&attempt).is_none() || number(&created).is_none() {
        unreadable("a field is missing")
    } else {
        match (state.as_deref(), number(&lease_until), reason) {
            (Some("in_flight"), Some(until), _) if now < until => {
                State::InFlight { remaining: Duration::from_millis(until.saturating_sub(now)) }
            }
            (Some("in_flight"), Some(until), _) => {
                State::Abandoned { since: Duration::from_millis(now.saturating_sub(until)) }
            }
            (Some("completed"), _, _) if has_response => State::Completed,
            (Some("failed"), _, Some(reason)) => State::Failed { reason },
            (Some("completed"), _, _) => unreadable("its response is missing"),
            (Some(_) | None, _, _) => unreadable("its state is unknown or incomplete"),
        }
    };
    let created_ms = number(&created).unwrap_or_default();
    Found {
        redis_key: key.to_owned(),
        state,
        format: format.unwrap_or_default(),
        fingerprint_version: fingerprint_version.unwrap_or_default(),
        fingerprint: fingerprint.unwrap_or_default(),
        owner: owner.unwrap_or_default(),
        attempt: number(&attempt).unwrap_or_default(),
        created_ms,
        age: Duration::from_millis(now.saturating_sub(created_ms)),
        expires_in,
        resolved: number(&resolved_at).map(|at| (at, resolved_from.unwrap_or_default())),
        response: next(),
    }
}
