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
    let tables: Vec<String> = all.iter().map(|(name, section)| tables(name, &section["result"])).collect();
    fs::write(folder.join("tables.md"), tables.concat())?;
    fs::write(folder.join("latest.json"), format!("{:#}\n", json!({"sections": all})))?;
    Ok(file)
}

/// What took turns, as Markdown for the documents: a column for each setting.
fn tables(name: &str, result: &Value) -> String {
    ["settings", "batching"]
        .into_iter()
        .filter_map(|part| Some((part, result[part].as_array()?)))
        .map(|(part, settings)| format!("## {name}: {part}\n\n{}\n", table(settings)))
        .collect()
}

fn table(settings: &[Value]) -> String {
    let mut text = "| requests/s (share of); p50; processor time each |".to_owned();
    for setting in settings {
        text += &format!(
            " {} worker(s), {} connection(s), {} B |",
            setting["workers"], setting["connections"], setting["body_bytes"]
        );
    }
    text += &format!("\n|---|{}\n", "---|".repeat(settings.len()));
    let rows = settings.first().and_then(|setting| setting["subjects"].as_array()).map_or(0, Vec::len);
    for row in 0..rows {
        let of = |setting: &Value| setting["subjects"][row].clone();
        let first = settings.first().map(of).unwrap_or_default();
        text += &format!("| {} (of {}) |", as_text(&first["name"]), as_text(&first["share_of"]));
        for subject in settings.iter().map(of) {
            text += &format!(
                " {} ({}); {} µs; {} µs |",
                subject["requests_per_second"], subject["share"], subject["p50_us"], subject["cpu_us"]
            );
        }
        text.push('\n');
    }
    text
}

fn as_text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn machine() -> Value {
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": cpu.trim_start_matches([' ', '\t', ':']),
    })
}
