//! `make simulate`: what was measured of one worker on Redis, simulated, and what larger rates need: the tables of docs/scale.md.
#![allow(clippy::indexing_slicing, missing_docs, reason = "a program that reads its own results")]

mod model;
mod tables;

use std::process::ExitCode;

use serde_json::Value;

fn main() -> ExitCode {
    let read = |name: &str| -> Option<Value> {
        let text = std::fs::read_to_string(format!("bench/results/{name}.json")).ok()?;
        serde_json::from_str(&text).ok()
    };
    let tables =
        read("redis").zip(read("memory")).and_then(|(redis, memory)| tables::tables(&redis, &memory));
    match tables {
        Some(tables) => {
            print!("{tables}");
            ExitCode::SUCCESS
        }
        None => {
            eprintln!(
                "simulate: bench/results/ lacks redis.json or memory.json: make bench SECTIONS=redis,memory"
            );
            ExitCode::FAILURE
        }
    }
}
