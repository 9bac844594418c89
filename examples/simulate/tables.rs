//! The tables of docs/scale.md.

use std::fmt::Write as _;

use serde_json::Value;

use crate::model::{Costs, Measured, Outcome, calibrate, measured, run};

/// Share of the time that a worker, or a Redis, may be busy.
const BUSY: f64 = 0.7;
/// Virtual microseconds of a run.
const TIME: f64 = 2e6;
const SEED: u64 = 1;
/// Memory of one Redis.
const REDIS_BYTES: f64 = 64.0 * 1024.0 * 1024.0 * 1024.0;
/// Bytes to Redis for a request with an answer of 200 B: the words of a claim and of a completion.
const REQUEST_BYTES: f64 = 1100.0;
const DAY: f64 = 86_400.0;
const HOUR: f64 = 3_600.0;

/// One setting as measured and as simulated.
pub struct Compared {
    pub measured: Measured,
    pub simulated: Outcome,
}

impl Compared {
    /// How far the simulation is off, as a share of what was measured.
    pub fn error(&self) -> f64 {
        self.simulated.per_second / self.measured.per_second - 1.0
    }

    /// Whether it says something that the calibration did not put in.
    pub fn is_predicted(&self, most: usize) -> bool {
        self.measured.connections != 1 && !(self.measured.connections == most && self.measured.batches == 2)
    }
}

/// Every measured setting, simulated with the costs that two of them say.
pub fn compare(redis: &Value) -> Option<(Costs, Vec<Compared>)> {
    let measured = measured(redis);
    let costs = calibrate(&measured)?;
    let all = measured.into_iter().map(|measured| Compared {
        measured,
        simulated: run(costs, measured.connections, measured.batches, TIME, SEED),
    });
    Some((costs, all.collect()))
}

/// What was measured beside what is simulated, and what three rates need.
pub fn tables(redis: &Value, memory: &Value) -> Option<String> {
    let (costs, compared) = compare(redis)?;
    let mut text = format!(
        "A protected request takes {:.0} µs of a worker, a callout {:.0} µs, a script {:.0} µs of Redis.\n\n",
        costs.request, costs.callout, costs.operation
    );
    text.push_str(
        "| connections | `max_in_flight_batches` | | requests/s measured | simulated | off by | median measured, µs | simulated | operations per callout measured | simulated |\n|---|---|---|---|---|---|---|---|---|---|\n",
    );
    let most = compared.iter().map(|row| row.measured.connections).max()?;
    for row in &compared {
        let Measured { connections, batches, per_second, p50, operations_per_callout, .. } = row.measured;
        let per_callout = operations_per_callout.map(|found| format!("{found:.1}")).unwrap_or_default();
        let _ = writeln!(
            text,
            "| {connections} | {batches} | {} | {per_second:.0} | {:.0} | {:+.0} % | {p50:.0} | {:.0} | {per_callout} | {:.1} |",
            if row.is_predicted(most) { "predicted" } else { "calibrated" },
            row.simulated.per_second,
            row.error() * 100.0,
            row.simulated.p50,
            row.simulated.operations_per_callout
        );
    }
    let capacity = run(costs, 128, 2, TIME, SEED).per_second * BUSY;
    let record = memory["result"]["record_redis"]["bytes_in_redis"].as_f64()?;
    text.push_str("\n| protected requests/s | workers | scripts/s | shards for them | records of a day | memory | shards for it | records of an hour | memory | shards for it | to Redis |\n|---|---|---|---|---|---|---|---|---|---|---|\n");
    for rate in [1e3, 1e5, 1e6] {
        let scripts = rate * 2.0;
        let held = |time: f64| {
            let records = rate * time;
            let bytes = records * record;
            format!("{} | {} | {:.0}", many(records), size(bytes), (bytes / (REDIS_BYTES * BUSY)).ceil())
        };
        let _ = writeln!(
            text,
            "| {} | {:.0} | {} | {:.0} | {} | {} | {}/s |",
            many(rate),
            (rate / capacity).ceil(),
            many(scripts),
            (scripts * costs.operation / 1e6 / BUSY).ceil(),
            held(DAY),
            held(HOUR),
            size(rate * REQUEST_BYTES),
        );
    }
    Some(text)
}

fn many(number: f64) -> String {
    match number {
        number if number >= 1e9 => format!("{:.1} · 10⁹", number / 1e9),
        number if number >= 1e6 => format!("{:.1} · 10⁶", number / 1e6),
        number => format!("{number:.0}"),
    }
}

fn size(bytes: f64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut bytes = bytes;
    for unit in units {
        if bytes < 1024.0 {
            return format!("{bytes:.1} {unit}");
        }
        bytes /= 1024.0;
    }
    format!("{bytes:.1} PiB")
}
