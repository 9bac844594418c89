//! `make bench`: what the filter costs, measured side by side. The subjects of a section take turns, round after round;
//! what counts are ratios of medians within one run. Each run proves that it was the load that it says, by how often the
//! service ran.
//!
//! | file | owns |
//! |---|---|
//! | `process`, `http` | processes that were started here, and single requests |
//! | `envoy` | the Envoy process, its configuration, and Redis |
//! | `upstream` | the service behind it, which answers at once |
//! | `load` | wrk, and proof of what it did |
//! | `turns` | rounds and medians |
//! | `section` | the sections, one file each |
//! | `plot` | line charts as SVG |
//! | `report` | the JSON |
#![allow(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a benchmark runs in real time, and builds JSON by its members"
)]

mod envoy;
mod http;
mod load;
mod plot;
mod process;
mod report;
mod section;
mod turns;
mod upstream;

use std::error::Error as StdError;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use turns::Effort;

type Error = Box<dyn StdError + Send + Sync>;
type Fallible<T> = Result<T, Error>;

/// What was there before this program.
pub struct Tools {
    /// This repository.
    pub root: PathBuf,
    /// Envoy's binary.
    pub envoy: PathBuf,
    /// That of redis-server.
    pub redis: PathBuf,
}

/// What all sections go by.
pub struct Bench {
    /// Where all is.
    pub tools: Tools,
    /// The service.
    pub upstream: SocketAddr,
    /// How long and how often each subject is measured.
    pub effort: Effort,
    /// The whole matrix instead of the part that fits into some minutes.
    pub full: bool,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Fallible<()> {
    let root = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| PathBuf::from("."), PathBuf::from);
    let path = |name: &str| {
        std::env::var_os(name).map(PathBuf::from).ok_or(format!("{name} is not set: use `make bench`"))
    };
    let tools = Tools { envoy: path("ENVOY_PATH")?, redis: path("REDIS_PATH")?, root };
    let full = text("FULL").is_some_and(|text| text != "0");
    let effort = Effort {
        rounds: number("ROUNDS", if full { 5 } else { 3 })?,
        time: Duration::from_secs(number("SECONDS_EACH", if full { 2 } else { 1 })?.into()),
    };
    let names = text("SECTIONS");
    let names: Vec<&str> = match &names {
        Some(names) => names.split(',').map(str::trim).collect(),
        None => section::ALL.iter().map(|(name, _)| *name).collect(),
    };
    let bench = Bench { tools, upstream: upstream::start()?, effort, full };
    for name in names {
        let known = section::ALL.iter().find(|(candidate, _)| *candidate == name);
        let (_, measure) = known.ok_or_else(|| format!("SECTIONS: no section {name}"))?;
        println!("\n=== {name}");
        let start = Instant::now();
        let result = measure(&bench).map_err(|error| format!("{name}: {error}"))?;
        // A check that kept what it found would let the counts creep.
        if std::env::var_os("CHECK").is_some() {
            continue;
        }
        let written = report::write(&bench, name, result)?;
        println!("\n{} ({} s)", written.display(), start.elapsed().as_secs());
    }
    Ok(())
}

fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn number(name: &str, default: u32) -> Fallible<u32> {
    match text(name) {
        Some(text) => text.parse().map_err(|_| format!("{name}={text}: not a number").into()),
        None => Ok(default),
    }
}
