//! Memory per worker and per record, start-up time, size of the module.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};

use crate::envoy::{Around, Envoy, Redis, Variant, embedded, free_address, on_redis, plugin};
use crate::load::Setting;
use crate::process::resident;
use crate::turns::{median, round};
use crate::{Bench, Fallible, upstream};

const RECORDS: u64 = 20_000;
const STARTS: u32 = 5;

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let redis = Redis::start(&bench.tools)?;
    let around = Around { upstream: bench.upstream, redis: redis.address, webdis: free_address()? };
    let first = Variant::first("first", plugin(embedded(), json!({})));
    let redis_first = Variant::first("redis_first", plugin(on_redis("bench:", json!(false), 2), json!({})));
    let module = fs::metadata(bench.tools.root.join("dist/idempotency.wasm"))?.len();
    println!("  the module is {module} B");

    let (mut starts, mut workers) = (json!({}), json!({}));
    for variant in [Variant::plain(), first.clone(), redis_first.clone()] {
        let mut times = Vec::new();
        for _ in 0..STARTS {
            let envoy = Envoy::start(&bench.tools, 1, around, std::slice::from_ref(&variant))?;
            times.push(envoy.started_in.as_secs_f64() * 1e3);
        }
        starts[variant.name] = json!(median(times).round());
        let (one, five) = (idle(bench, around, &variant, 1)?, idle(bench, around, &variant, 5)?);
        workers[variant.name] = json!({
            "resident_bytes_1_worker": one.resident, "resident_bytes_5_workers": five.resident,
            "resident_bytes_each_further": five.resident.saturating_sub(one.resident) / 4,
            "allocated_bytes_each_further": five.allocated.saturating_sub(one.allocated) / 4,
        });
        println!("  {:<12} starts in {} ms; {}", variant.name, starts[variant.name], workers[variant.name]);
    }

    let embedded_record = {
        let envoy = Envoy::start(&bench.tools, 1, around, std::slice::from_ref(&first))?;
        let (from, grown) = per_record(&envoy, &first)?;
        json!({"records": grown.records, "resident_bytes": grown.resident / grown.records,
            "allocated_bytes": grown.allocated / grown.records, "resident_bytes_before": from.resident})
    };
    let redis_record = {
        let envoy = Envoy::start(&bench.tools, 1, around, std::slice::from_ref(&redis_first))?;
        let used = || -> Fallible<u64> {
            let info = redis.command(&["INFO", "memory"])?;
            let line = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
            Ok(line.ok_or("Redis tells no used_memory")?.trim().parse()?)
        };
        let before = used()?;
        let (_, grown) = per_record(&envoy, &redis_first)?;
        json!({"records": grown.records, "bytes_in_redis": used()?.saturating_sub(before) / grown.records,
            "envoy_resident_bytes": grown.resident / grown.records})
    };
    println!("  a record of 200 B, embedded: {embedded_record}\n  in Redis: {redis_record}");
    Ok(json!({
        "module_bytes": module, "module_mib": round(kib(module) / 1024.0, 2), "start_ms": starts, "worker": workers,
        "record_embedded": embedded_record, "record_redis": redis_record,
    }))
}

struct Memory {
    resident: u64,
    /// As Envoy's `/memory` tells: its own heap, without that of the VMs.
    allocated: u64,
}

struct Grown {
    records: u64,
    resident: u64,
    allocated: u64,
}

/// After each worker has served.
fn idle(bench: &Bench, around: Around, variant: &Variant, workers: u32) -> Fallible<Memory> {
    let envoy = Envoy::start(&bench.tools, workers, around, std::slice::from_ref(variant))?;
    let setting = Setting { workers, connections: 8 * workers, body: 200 };
    envoy.subject(variant)?.run(setting, Duration::from_secs(1))?;
    memory(&envoy)
}

fn memory(envoy: &Envoy) -> Fallible<Memory> {
    let told: Value = serde_json::from_str(&envoy.get("/memory")?)?;
    let allocated = told["allocated"].as_str().and_then(|text| text.parse().ok());
    Ok(Memory {
        resident: resident(envoy.id())?,
        allocated: allocated.ok_or("/memory tells no `allocated`")?,
    })
}

/// What so many records add to an Envoy that has served before.
fn per_record(envoy: &Envoy, variant: &Variant) -> Fallible<(Memory, Grown)> {
    let subject = envoy.subject(variant)?;
    let setting = Setting { workers: 1, connections: 32, body: 200 };
    subject.run(setting, Duration::from_secs(1))?;
    let (before, begun) = (memory(envoy)?, upstream::executed());
    while upstream::executed() - begun < RECORDS {
        subject.run(setting, Duration::from_secs(2))?;
    }
    let after = memory(envoy)?;
    let grown = Grown {
        records: upstream::executed() - begun,
        resident: after.resident.saturating_sub(before.resident),
        allocated: after.allocated.saturating_sub(before.allocated),
    };
    Ok((before, grown))
}

#[allow(clippy::cast_precision_loss, reason = "a file's size")]
fn kib(bytes: u64) -> f64 {
    bytes as f64 / 1024.0
}
