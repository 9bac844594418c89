//! The JSON: one file for each section, and all of them in one.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::{Bench, Fallible};

/// Writes a section's result, and merges it with those of the others.
pub fn write(bench: &Bench, name: &str, result: Value) -> Fallible<PathBuf> {
    let folder = bench.tools.root.join("bench/results");
    fs::create_dir_all(&folder)?;
    let section = json!({
        "machine": machine(), "rounds": bench.effort.rounds, "seconds_each": bench.effort.time.as_secs(),
        "full": bench.full, "result": result,
    });
    let file = folder.join(format!("{name}.json"));
    fs::write(&file, format!("{section:#}\n"))?;
    let mut all = BTreeMap::new();
    for (other, _) in crate::section::ALL {
        if let Ok(text) = fs::read_to_string(folder.join(format!("{other}.json"))) {
            all.insert(*other, serde_json::from_str::<Value>(&text)?);
        }
    }
    fs::write(folder.join("latest.json"), format!("{:#}\n", json!({"sections": all})))?;
    Ok(file)
}

fn machine() -> Value {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": cpu.trim_start_matches([' ', '\t', ':']),
    })
}
