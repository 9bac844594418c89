//! How the cost grows: with stored records, with keys in flight, with the size of the body.

use std::fs;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::envoy::{Around, Envoy, Redis, Variant, embedded, free_address, on_redis, plugin};
use crate::load::{ACCOUNT, HOST, Sample, Setting, Subject};
use crate::plot::{Series, chart};
use crate::process::wait_until;
use crate::turns::{Effort, round, take_turns};
use crate::{Bench, Fallible, upstream};

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let variants = [
        Variant::plain(),
        Variant::first("first", plugin(embedded(), json!({}))),
        Variant::first(
            "head_only",
            plugin(embedded(), json!({"fingerprint": {"body": false}, "record_ttl": "20s"})),
        ),
        Variant::replay("replay", plugin(embedded(), json!({}))).against("first"),
        Variant::first("redis_first", plugin(on_redis("bench:", json!(false), 2), json!({}))),
        Variant::replay("redis_replay", plugin(on_redis("bench:", json!(false), 2), json!({})))
            .against("redis_first"),
    ];
    let redis = Redis::start(&bench.tools)?;
    let around = Around { upstream: bench.upstream, redis: redis.address, webdis: free_address()? };
    let envoy = Envoy::start(&bench.tools, 1, around, &variants)?;
    let subject = |name: &str| {
        let variant = variants.iter().find(|variant| variant.name == name).ok_or("no such variant")?;
        envoy.subject(variant)
    };
    // The order matters: only the last of them writes many records.
    let body = with_body(bench, &[subject("plain")?, subject("head_only")?, subject("first")?])?;
    let in_flight = with_keys_in_flight(bench, &subject("first")?)?;
    let on_redis =
        with_records_on_redis(bench, &redis, &[subject("redis_first")?, subject("redis_replay")?])?;
    let embedded = with_records(bench, &[subject("first")?, subject("replay")?])?;
    Ok(json!({
        "records_embedded": embedded, "records_redis": on_redis, "keys_in_flight": in_flight, "body": body,
    }))
}

/// One line of the plots: the subjects at one size.
struct Point {
    size: u64,
    samples: Vec<(String, Sample)>,
}

fn point(bench: &Bench, subjects: &[Subject], size: u64, setting: Setting, rounds: u32) -> Fallible<Point> {
    println!("\n  at {size}:");
    let effort = Effort { rounds, ..bench.effort };
    let measured = take_turns(subjects, setting, effort)?;
    let samples =
        subjects.iter().filter_map(|subject| Some((subject.name.clone(), *measured.of(&subject.name)?)));
    Ok(Point { size, samples: samples.collect() })
}

const BUSY: Setting = Setting { workers: 1, connections: 32, body: 200 };

/// Fills the table by executions, as anybody would.
fn with_records(bench: &Bench, subjects: &[Subject; 2]) -> Fallible<Value> {
    let [first, _] = subjects;
    let mut points = Vec::new();
    let begun = upstream::executed();
    let exponents = if bench.full { 3..=6 } else { 3..=5 };
    for size in exponents.map(|exponent| 10_u64.pow(exponent)) {
        while upstream::executed() - begun < size {
            if size > 10_000 {
                first.run(Setting { connections: 64, ..BUSY }, Duration::from_secs(5))?;
            } else {
                first.ask(&format!("fill-{}", upstream::executed()), BUSY.body, &[])?;
            }
        }
        points.push(point(bench, subjects, upstream::executed() - begun, BUSY, 1)?);
    }
    draw(
        bench,
        "records-embedded",
        "Throughput against stored records, embedded store",
        "records",
        &points,
        false,
    )?;
    Ok(describe(&points))
}

/// Fills Redis with copies of a record under other names, which Redis makes itself.
fn with_records_on_redis(bench: &Bench, redis: &Redis, subjects: &[Subject; 2]) -> Fallible<Value> {
    const COPY: &str = "local keys = redis.call('SCAN', '0', 'MATCH', 'bench:*', 'COUNT', '1000')[2] \
        local bytes = redis.call('DUMP', keys[1]) \
        for i = 1, tonumber(ARGV[2]) do redis.call('RESTORE', 'bench:copy-' .. ARGV[1] .. '-' .. i, 3600000, bytes) end \
        return redis.call('DBSIZE')";
    subjects[0].ask("to-be-copied", BUSY.body, &[])?;
    let size_now =
        || -> Fallible<u64> { Ok(redis.command(&["DBSIZE"])?.trim().trim_start_matches(':').parse()?) };
    let mut points = Vec::new();
    let mut copies = 0;
    for size in [1_000, 10_000, 100_000, 1_000_000] {
        while size_now()? < size {
            copies += 1;
            let missing = (size - size_now()?).min(10_000);
            redis.command(&["EVAL", COPY, "0", &copies.to_string(), &missing.to_string()])?;
        }
        points.push(point(bench, subjects, size_now()?, BUSY, bench.effort.rounds.min(3))?);
    }
    draw(bench, "records-redis", "Throughput against stored records, Redis", "records", &points, false)?;
    Ok(describe(&points))
}

/// Other requests that wait at the service meanwhile.
fn with_keys_in_flight(bench: &Bench, first: &Subject) -> Fallible<Value> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let mut points = Vec::new();
    let mut held = Vec::new();
    for size in [1_usize, 100, 1_000, 4_000] {
        for number in held.len()..size {
            held.push(runtime.spawn(hold(first.port, number)));
        }
        let wanted = u64::try_from(size)?;
        wait_until(
            "the held requests to arrive",
            Duration::from_secs(30),
            || Ok(upstream::held() >= wanted),
        )?;
        points.push(point(bench, std::slice::from_ref(first), wanted, BUSY, bench.effort.rounds.min(3))?);
    }
    upstream::release();
    runtime.block_on(async {
        for answer in held {
            let answer = answer.await??;
            if !answer.starts_with("HTTP/1.1 200 ") {
                return Err(format!("a held request: {answer}").into());
            }
        }
        Ok::<_, crate::Error>(())
    })?;
    draw(
        bench,
        "keys-in-flight",
        "Throughput of first executions against keys in flight",
        "keys in flight",
        &points,
        false,
    )?;
    Ok(describe(&points))
}

async fn hold(port: u16, number: usize) -> Fallible<String> {
    let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await?;
    let request = format!(
        "POST /pay HTTP/1.1\r\nhost: {HOST}\r\nx-account-id: {ACCOUNT}\r\nidempotency-key: in-flight-{number}\r\n{}: 1\r\n\
         connection: close\r\ncontent-length: 1\r\n\r\nx",
        upstream::HOLD
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Bodies of growing size, one request at a time.
fn with_body(bench: &Bench, subjects: &[Subject; 3]) -> Fallible<Value> {
    let mut points = Vec::new();
    for body in [200, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20] {
        let setting = Setting { workers: 1, connections: 1, body };
        points.push(point(bench, subjects, u64::try_from(body)?, setting, bench.effort.rounds.min(3))?);
    }
    draw(bench, "body", "Latency against the request's body, 1 connection", "bytes", &points, true)?;
    let mut described = describe(&points);
    // What a body costs beyond the head is what `first` takes more than `head_only`: into the VM, and hashed.
    if let Some(point) = points.iter().find(|point| point.size == 512 << 10) {
        let cpu = |name| {
            point
                .samples
                .iter()
                .find(|(candidate, _)| candidate == name)
                .map_or(f64::NAN, |(_, sample)| sample.cpu)
        };
        let spent = cpu("first") - cpu("head_only");
        #[allow(clippy::cast_precision_loss, reason = "half a mebibyte")]
        let rate = point.size as f64 / spent;
        println!(
            "\n  copying into the VM and hashing there: {rate:.0} MB/s ({spent:.0} µs of processor time for 512 KiB)"
        );
        described["copied_and_hashed_mb_per_s"] = json!(round(rate, 1));
    }
    Ok(described)
}

fn describe(points: &[Point]) -> Value {
    let lines: Vec<Value> = points
        .iter()
        .flat_map(|point| point.samples.iter().map(|(name, sample)| (point.size, name, sample)))
        .map(|(size, name, sample)| {
            json!({"size": size, "name": name, "requests_per_second": sample.rate.round(), "p50_us": sample.p50,
                "p99_us": sample.p99, "cpu_us": round(sample.cpu, 1)})
        })
        .collect();
    let mut growth = json!({});
    if let (Some(least), Some(most)) = (points.first(), points.last()) {
        for ((name, from), (_, to)) in least.samples.iter().zip(&most.samples) {
            #[allow(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
            let exponent = (to.cpu / from.cpu).ln() / (most.size as f64 / least.size as f64).ln();
            println!(
                "  {name}: processor time per request grows with the size to the power of {exponent:.2}"
            );
            growth[name] =
                json!({"cpu_exponent": round(exponent, 3), "cpu_ratio": round(to.cpu / from.cpu, 2)});
        }
    }
    json!({"points": lines, "growth": growth})
}

fn draw(
    bench: &Bench,
    file: &str,
    title: &str,
    x_name: &str,
    points: &[Point],
    latency: bool,
) -> Fallible<()> {
    let names: Vec<&String> =
        points.first().map(|point| point.samples.iter().map(|(name, _)| name).collect()).unwrap_or_default();
    #[allow(clippy::cast_precision_loss, reason = "sizes are below 2^53")]
    let series: Vec<Series> = names
        .into_iter()
        .map(|name| Series {
            name: name.clone(),
            points: points
                .iter()
                .flat_map(|point| point.samples.iter().map(|sample| (point.size, sample)))
                .filter(|(_, (candidate, _))| candidate == name)
                .map(|(size, (_, sample))| (size as f64, if latency { sample.p50 } else { sample.rate }))
                .collect(),
        })
        .collect();
    let y_name = if latency { "p50, µs" } else { "requests/s" };
    let folder = bench.tools.root.join("docs/images");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(format!("{file}.svg")), chart(title, x_name, y_name, &series))?;
    Ok(())
}
