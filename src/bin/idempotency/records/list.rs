//! `idempotency list`: the records of a store.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use idempotency::config::StoreConfig;
use serde_json::{Value, json};

use super::link::{self, Link, Node};
use super::record::{self, Found, State};
use super::{show, target};
use crate::exit::{Exit, Failure};
use crate::output::{Output, STRONG};

/// Keys that Redis looks at in one step: some tens of microseconds, in which nobody else is served.
const STEP: usize = 500;

/// List records, oldest first.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    idempotency list --redis redis://127.0.0.1 --state failed,abandoned\n  \
    idempotency list --redis redis://127.0.0.1 --key-prefix idem:eb19260d    (digits from the access log)")]
pub struct Args {
    /// Only records in this state; several with commas.
    #[arg(long, value_enum, value_delimiter = ',')]
    state: Vec<Wanted>,
    /// What the keys begin with: `store.redis.key_prefix` and, if known, some digits [default: --config's, or idem:].
    #[arg(long, value_name = "TEXT")]
    key_prefix: Option<String>,
    /// The filter's configuration, for its key_prefix.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Only records that were claimed so long ago.
    #[arg(long, value_name = "DURATION", value_parser = link::parse_argument)]
    older_than: Option<Duration>,
    /// Stop after so many.
    #[arg(long, value_name = "COUNT")]
    limit: Option<usize>,
    #[command(flatten)]
    link: link::Args,
}

/// A state to be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Wanted {
    /// The execution failed, or its outcome is unknown.
    Failed,
    /// Somebody's lease holds.
    InFlight,
    /// In flight, and its lease ran out.
    Abandoned,
    Completed,
    /// Not this version's, or nobody's: requests with such a key are refused.
    Unreadable,
}

impl Wanted {
    fn is(self, state: &State) -> bool {
        self == match state {
            State::InFlight { .. } => Self::InFlight,
            State::Abandoned { .. } => Self::Abandoned,
            State::Completed => Self::Completed,
            State::Failed { .. } => Self::Failed,
            State::Unreadable { .. } => Self::Unreadable,
        }
    }
}

pub fn run(args: &Args, output: &Output) -> Result<Exit, Failure> {
    let prefix = args.prefix()?;
    let mut scan = Scan::default();
    for node in &mut Link::open(&args.link)?.into_nodes()? {
        if scan.limit_reached {
            break;
        }
        scan_node(node, &prefix, args, &mut scan)?;
    }
    scan.progress.end();
    scan.found.sort_by(|a, b| (a.created_ms, &a.redis_key).cmp(&(b.created_ms, &b.redis_key)));
    if output.json {
        let records: Vec<Value> = scan.found.iter().map(|found| show::to_json(found, false)).collect();
        output.print_json(&json!({
            "records": records,
            "scanned": scan.scanned,
            "unreadable": scan.unreadable,
            "moved": scan.moved,
            "limit_reached": scan.limit_reached,
        }));
        return Ok(Exit::Ok);
    }
    if !scan.found.is_empty() {
        output.print(&table(&scan.found));
    }
    let (listed, scanned) = (scan.found.len(), scan.scanned);
    eprintln!(
        "{listed} of {scanned} records{}",
        if scan.limit_reached { ", stopped at --limit" } else { "" }
    );
    if scan.unreadable > 0 {
        eprintln!("warning: {} unreadable: --state unreadable lists them", scan.unreadable);
    }
    if scan.moved > 0 {
        eprintln!("warning: {} moved to another server meanwhile: run it again", scan.moved);
    }
    Ok(Exit::Ok)
}

impl Args {
    fn prefix(&self) -> Result<String, Failure> {
        if let Some(prefix) = &self.key_prefix {
            return Ok(prefix.clone());
        }
        let Some(file) = &self.config else { return Ok("idem:".to_owned()) };
        match target::load(file)?.store {
            StoreConfig::Redis(redis) => Ok(redis.key_prefix),
            StoreConfig::SharedData(_) => {
                Err(Failure::usage(format!("{}: its store is shared_data, not Redis", file.display())))
            }
        }
    }

    fn wants(&self, found: &Found) -> bool {
        (self.state.is_empty() || self.state.iter().any(|wanted| wanted.is(&found.state)))
            && self.older_than.is_none_or(|least| found.age >= least)
    }
}

#[derive(Default)]
struct Scan {
    found: Vec<Found>,
    /// SCAN may name a key more than once.
    seen: HashSet<String>,
    scanned: usize,
    unreadable: usize,
    moved: usize,
    limit_reached: bool,
    progress: Progress,
}

fn scan_node(node: &mut Node, prefix: &str, args: &Args, scan: &mut Scan) -> Result<(), Failure> {
    let pattern = [&*escaped(prefix), "*"].concat();
    let total: u64 = node.query(&redis::cmd("DBSIZE")).unwrap_or_default();
    let (mut cursor, mut looked_at) = (0_u64, 0_u64);
    loop {
        let mut command = redis::cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(STEP);
        let (next, keys): (u64, Vec<Vec<u8>>) = node.query(&command)?;
        looked_at = looked_at.saturating_add(STEP as u64);
        let keys: Vec<String> = keys
            .into_iter()
            .filter_map(|key| String::from_utf8(key).ok())
            .filter(|key| is_record_key(key) && scan.seen.insert(key.clone()))
            .collect();
        if !keys.is_empty() {
            let read = record::read(node, &keys, false)?;
            scan.moved = scan.moved.saturating_add(read.moved);
            scan.scanned = scan.scanned.saturating_add(read.found.len());
            for found in read.found {
                let is_unreadable = matches!(found.state, State::Unreadable { .. });
                scan.unreadable = scan.unreadable.saturating_add(usize::from(is_unreadable));
                if scan.limit_reached || !args.wants(&found) {
                    continue;
                }
                if args.limit.is_some_and(|limit| scan.found.len() >= limit) {
                    scan.limit_reached = true;
                    continue;
                }
                scan.found.push(found);
            }
        }
        scan.progress.tell(node.name(), looked_at.min(total), total, scan.found.len());
        if next == 0 || scan.limit_reached {
            return Ok(());
        }
        cursor = next;
    }
}

/// Whether a key is one of the filter's: some prefix, and a hash.
fn is_record_key(key: &str) -> bool {
    let hash = key.len().checked_sub(64).and_then(|at| key.get(at..));
    hash.is_some_and(|hash| hash.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')))
}

/// A text that a pattern of Redis takes as it is.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

fn table(records: &[Found]) -> String {
    let width = records.iter().map(|found| found.redis_key.len()).max().unwrap_or_default();
    let mut out =
        format!("{STRONG}{:<width$}  {:>12}  {:>7}  STATE{STRONG:#}\n", "KEY IN REDIS", "CLAIMED", "ATTEMPT");
    for found in records {
        let ago = coarse(found.age);
        let _ = writeln!(
            out,
            "{:<width$}  {ago:>12}  {:>7}  {}",
            found.redis_key,
            found.attempt,
            show::state(&found.state)
        );
    }
    out
}

/// In its largest unit: a table is for finding.
fn coarse(age: Duration) -> String {
    let seconds = age.as_secs();
    for (unit, length) in [("d", 86_400), ("h", 3_600), ("m", 60)] {
        if seconds >= length * 2 {
            return format!("{} {unit} ago", seconds / length);
        }
    }
    format!("{seconds} s ago")
}

/// How far a scan is: one line that changes on a terminal, a line now and then elsewhere.
struct Progress {
    told: Instant,
    on_terminal: bool,
    line_open: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self { told: now(), on_terminal: io::stderr().is_terminal(), line_open: false }
    }
}

impl Progress {
    fn tell(&mut self, node: &str, looked_at: u64, total: u64, found: usize) {
        let pause = Duration::from_millis(if self.on_terminal { 200 } else { 5_000 });
        if now().duration_since(self.told) < pause {
            return;
        }
        self.told = now();
        let mut stderr = io::stderr();
        if self.on_terminal {
            let _ = write!(stderr, "\r\x1b[K{node}: {looked_at} of about {total} keys, {found} found");
            let _ = stderr.flush();
            self.line_open = true;
        } else {
            let _ = writeln!(stderr, "{node}: {looked_at} of about {total} keys, {found} found");
        }
    }

    fn end(&mut self) {
        if self.line_open {
            let _ = write!(io::stderr(), "\r\x1b[K");
            self.line_open = false;
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "the progress of a command is about its own time")]
fn now() -> Instant {
    Instant::now()
}
