//! Instructions that the core takes, counted by callgrind: the same in every run, whatever else the machine does. The core
//! is built natively, so these are not the wasm's own; they grow and shrink together.

use std::process::Command;

use serde_json::{Value, json};

use crate::{Bench, Fallible};

const OPERATIONS: [(&str, u32); 9] = [
    ("key", 200),
    ("claim", 200),
    ("claim-complete", 200),
    ("conflict", 200),
    ("replay", 200),
    ("fingerprint-0", 200),
    ("fingerprint-200", 200),
    ("fingerprint-16384", 20),
    ("fingerprint-524288", 2),
];
/// More than this share over the kept count is a regression.
const TOLERANCE: f64 = 0.05;

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let program = std::env::var("CORE_COSTS").map_err(|_| "CORE_COSTS is not set: use `make bench`")?;
    let rustc = Command::new("rustc").arg("--version").output()?;
    let rustc = String::from_utf8_lossy(&rustc.stdout).trim().to_owned();
    let mut counts = json!({});
    for (operation, times) in OPERATIONS {
        let (once, thrice) = (count(&program, operation, times)?, count(&program, operation, 3 * times)?);
        let each = (thrice - once) / (2 * u64::from(times));
        println!("  {operation:<20} {each:>10} instructions");
        counts[operation] = json!(each);
    }
    if std::env::var_os("CHECK").is_some() {
        check(bench, &rustc, &counts)?;
    }
    Ok(json!({"rustc": rustc, "instructions": counts}))
}

fn count(program: &str, operation: &str, times: u32) -> Fallible<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", program, operation, &times.to_string()])
        .output()
        .map_err(|error| format!("valgrind: {error} (`apt-get install valgrind`)"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    let count = text.lines().find_map(|line| line.split("Collected : ").nth(1)?.trim().parse().ok());
    match count {
        Some(count) if output.status.success() => Ok(count),
        Some(_) | None => Err(format!("valgrind {program} {operation}: {}\n{text}", output.status).into()),
    }
}

/// Against the counts that were kept last.
fn check(bench: &Bench, rustc: &str, counts: &Value) -> Fallible<()> {
    let file = bench.tools.root.join("bench/results/callgrind.json");
    let kept: Value = serde_json::from_str(&std::fs::read_to_string(&file)?)?;
    let kept = &kept["result"];
    if kept["rustc"] != rustc {
        return Err(format!(
            "the kept counts are of {}, not of {rustc}: keep new ones by `make bench SECTIONS=callgrind`",
            kept["rustc"]
        )
        .into());
    }
    let mut grown = Vec::new();
    for (operation, _) in OPERATIONS {
        let of =
            |counts: &Value| counts[operation].as_f64().ok_or_else(|| format!("no count of {operation}"));
        let (before, after) = (of(&kept["instructions"])?, of(counts)?);
        if after > before * (1.0 + TOLERANCE) {
            grown.push(format!("{operation}: {before} -> {after}"));
        }
    }
    if grown.is_empty() {
        Ok(())
    } else {
        Err(format!("more instructions than kept: {}", grown.join(", ")).into())
    }
}
