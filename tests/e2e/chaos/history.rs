//! Owns what a storm leaves behind: what the upstream ran, what the clients were told, what was broken and when.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Milliseconds since the storm's begin, on this process's monotonic clock.
pub type Millis = u64;

#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    pub fn start() -> Clock {
        Clock(Instant::now())
    }

    pub fn now(self) -> Millis {
        millis(self.0.elapsed())
    }
}

pub fn millis(duration: Duration) -> Millis {
    u64::try_from(duration.as_millis()).unwrap_or(Millis::MAX)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    SharedData,
    Redis,
}

/// The rule that covers a key; its name is the first segment of the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// The defaults: `on_abandoned: takeover`.
    Takeover,
    /// The same, and duplicates wait.
    Wait,
    /// `on_abandoned: retain`.
    Retain,
    /// `on_failure: release`, `on_unknown: release`.
    Atomic,
    /// `execution: detached`, which retains what was abandoned.
    Detached,
}

impl Rule {
    pub const ALL: [Rule; 5] = [Rule::Takeover, Rule::Wait, Rule::Retain, Rule::Atomic, Rule::Detached];

    /// Nothing that was abandoned is taken over.
    pub fn retains(self) -> bool {
        matches!(self, Rule::Retain | Rule::Detached)
    }

    pub fn name(self) -> &'static str {
        match self {
            Rule::Takeover => "takeover",
            Rule::Wait => "wait",
            Rule::Retain => "retain",
            Rule::Atomic => "atomic",
            Rule::Detached => "detached",
        }
    }
}

/// One run of the upstream.
#[derive(Clone, Debug)]
pub struct Execution {
    /// From 1, of its key.
    pub nth: usize,
    /// What `x-idempotency-attempt` said; 1 where it was missing.
    pub attempt: u32,
    /// The try that it runs for.
    pub by: TryId,
    pub variant: u8,
    pub start: Millis,
    /// When its answer was given; none if Envoy cancelled it before.
    pub answered: Option<Millis>,
    pub status: u16,
    pub length: usize,
    /// Reset, or cut off in the middle.
    pub broken: bool,
}

pub type TryId = u64;

/// One request of a client.
#[derive(Clone, Debug)]
pub struct Try {
    pub id: TryId,
    pub envoy: usize,
    /// Which of the key's two bodies it carries.
    pub variant: u8,
    pub sent: Millis,
    pub ended: Millis,
    pub got: Got,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Got {
    Whole(Answer),
    /// The response broke off after so much.
    Cut(Body),
    /// The connection ended without a response.
    Lost,
    /// The client left.
    HungUp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub replayed: bool,
    /// The problem's type, and its reason.
    pub problem: Option<(String, Option<String>)>,
    pub body: Body,
}

impl Answer {
    pub fn is(&self, problem: &str) -> bool {
        self.problem.as_ref().is_some_and(|(kind, _)| kind == problem)
    }
}

/// What the bytes of a response say about where they come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// The upstream's, of this run.
    Made { key: String, nth: usize, variant: u8, length: usize },
    /// The filter's or Envoy's own text, which names no key.
    Own,
    /// Anything else: mixed, or unreadable.
    Strange(String),
}

/// The line that the upstream's bodies repeat: no two runs have the same bytes, and any piece shows whose they are.
pub fn mark(key: &str, nth: usize, variant: u8) -> String {
    format!("{key}#{nth}/{variant}")
}

pub fn made_body(mark: &str, length: usize) -> Vec<u8> {
    mark.bytes().chain(*b"\n").cycle().take(length).collect()
}

const NAMES_A_KEY: &str = "chaos-";

impl Body {
    /// `header` is the response's `x-execution`, if any: it has to say the same as the body.
    pub fn read(bytes: &[u8], header: Option<&str>) -> Body {
        let begin = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
        // A piece too short for a whole line is told by the header.
        let line = if begin.len() < bytes.len() { std::str::from_utf8(begin).ok() } else { header };
        if let Some((line, (key, nth, variant))) = line.and_then(|line| Some((line, parse_mark(line)?)))
            && header == Some(line)
            && made_body(line, bytes.len()) == bytes
        {
            return Body::Made { key, nth, variant, length: bytes.len() };
        }
        let text = String::from_utf8_lossy(bytes);
        if header.is_none() && !text.contains(NAMES_A_KEY) {
            return Body::Own;
        }
        Body::Strange(format!("{header:?}: {}", text.chars().take(300).collect::<String>()))
    }
}

fn parse_mark(line: &str) -> Option<(String, usize, u8)> {
    let (key, run) = line.rsplit_once('#')?;
    let (nth, variant) = run.split_once('/')?;
    Some((key.to_owned(), nth.parse().ok()?, variant.parse().ok()?))
}

#[derive(Clone, Debug)]
pub struct KeyHistory {
    pub rule: Rule,
    pub executions: Vec<Execution>,
    pub tries: Vec<Try>,
    /// After the storm, the key gave nothing but 409 and 503 for so long.
    pub wedged: Option<Millis>,
}

/// What was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fault {
    /// SIGKILL, and started again.
    EnvoyKilled(usize),
    /// A worker's VM trapped at a request: its claim is made, nothing was forwarded.
    TrapAtRequest(usize),
    /// The same at a response: the upstream has run, nothing is stored.
    TrapAtResponse(usize),
    /// The listener was pushed anew.
    Reloaded(usize),
    RedisPaused,
    /// SIGKILL, and started again from its append-only file.
    RedisRestarted,
}

#[derive(Clone, Copy, Debug)]
pub struct Happened {
    pub fault: Fault,
    pub from: Millis,
    pub until: Millis,
}

/// What one Envoy process weighed, from the end of its warm-up to its end.
#[derive(Clone, Debug)]
pub struct Life {
    pub envoy: usize,
    pub from: Millis,
    pub until: Millis,
    pub rss_begin: u64,
    pub rss_end: u64,
    pub traps: usize,
}

/// What an Envoy says of itself once all leases are over.
#[derive(Clone, Debug, Default)]
pub struct Rest {
    pub envoy: usize,
    /// Traps of the process that runs: their claims stay in its gauges (README, "Limits").
    pub traps: usize,
    pub in_flight: u64,
    pub outbox: u64,
    /// `in_flight` when the storm ended, before every key was asked again.
    pub in_flight_before: u64,
    /// Counters that only a bug moves.
    pub anomalies: BTreeMap<String, u64>,
}

#[derive(Clone, Debug)]
pub struct History {
    pub store: Store,
    pub lock_ttl: Millis,
    /// Larger answers are not kept.
    pub largest_kept: usize,
    pub keys: BTreeMap<String, KeyHistory>,
    pub faults: Vec<Happened>,
    pub lives: Vec<Life>,
    pub rests: Vec<Rest>,
    /// Traps that the Envoys report; those at a response among them are asked for, and may not come.
    pub traps_logged: usize,
    /// Envoys that ended by themselves, VMs that trapped unasked.
    pub crashes: Vec<String>,
}

impl fmt::Display for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Store::SharedData => "the embedded store",
            Store::Redis => "Redis",
        })
    }
}
