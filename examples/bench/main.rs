//! `make bench`: what the filter costs, measured side by side. One Envoy serves every variant on a port of its own; the
//! variants take turns, round after round, and what counts are ratios of medians within one run.
//!
//! | file | owns |
//! |---|---|
//! | `envoy` | the Envoy process and its configuration |
//! | `upstream` | the service behind it, which answers at once |
//! | `load` | wrk, and what it printed |
//! | `report` | the table and the JSON |
#![allow(
    clippy::disallowed_methods,
    clippy::indexing_slicing,
    reason = "a benchmark runs in real time, and builds JSON by its members"
)]

mod envoy;
mod load;
mod report;
mod upstream;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use envoy::{Envoy, Variant};
use load::{Load, Sample};
use report::{Measured, Report};

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// What is measured at once: every variant under the same workers, connections and body.
#[derive(Debug, Clone, Copy)]
struct Setting {
    workers: u32,
    connections: u32,
    body: usize,
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
    let binary = std::env::var("ENVOY_PATH").map_err(|_| "ENVOY_PATH is not set: use `make bench`")?;
    let redis = std::env::var("REDIS_PATH").map_err(|_| "REDIS_PATH is not set: use `make bench`")?;
    let rounds = number("ROUNDS", 3)?;
    let seconds = number("SECONDS_EACH", 3)?;
    let workers = numbers("WORKERS", &[1])?;
    let connections = numbers("CONNECTIONS", &[1, 32, 128])?;
    let bodies = numbers("BODIES", &[200])?;

    let upstream = upstream::start()?;
    let mut report = Report::new(rounds, seconds);
    for &workers in &workers {
        let envoy = Envoy::start(&root, Path::new(&binary), Path::new(&redis), workers, upstream)?;
        for &body in &bodies {
            for &connections in &connections {
                let body = usize::try_from(body)?;
                let setting = Setting { workers, connections, body };
                report.add(measure(&envoy, setting, rounds, Duration::from_secs(seconds.into()))?);
            }
        }
    }
    let written = report.write(&root.join("bench/results"))?;
    println!("\n{}", written.display());
    Ok(())
}

fn measure(envoy: &Envoy, setting: Setting, rounds: u32, time: Duration) -> Fallible<Measured> {
    println!(
        "\n{} worker(s), {} connection(s), bodies of {} B",
        setting.workers, setting.connections, setting.body
    );
    let mut samples: Vec<Vec<Sample>> = Variant::ALL.iter().map(|_| Vec::new()).collect();
    for round in 0..=rounds {
        for (variant, samples) in Variant::ALL.iter().zip(&mut samples) {
            let load = Load { port: envoy.port(*variant)?, variant: *variant, setting, round };
            // The first round warms up.
            if round == 0 {
                load.run(Duration::from_secs(1))?;
            } else {
                samples.push(load.run(time)?);
            }
        }
    }
    let measured = Measured::new(setting, samples);
    print!("{}", measured.table());
    Ok(measured)
}

fn number(name: &str, default: u32) -> Fallible<u32> {
    match std::env::var(name).ok().filter(|text| !text.is_empty()) {
        Some(text) => text.parse().map_err(|_| format!("{name}={text}: not a number").into()),
        None => Ok(default),
    }
}

/// Several, with commas between.
fn numbers(name: &str, default: &[u32]) -> Fallible<Vec<u32>> {
    match std::env::var(name).ok().filter(|text| !text.is_empty()) {
        Some(text) => text
            .split(',')
            .map(|part| part.trim().parse().map_err(|_| format!("{name}={text}: not numbers").into()))
            .collect(),
        None => Ok(default.to_vec()),
    }
}
