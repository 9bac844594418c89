//! The filter on Redis: what an execution costs against one bare callout over the same link, and what batching brings.

use serde_json::{Value, json};

use crate::envoy::{Action, Around, Envoy, Filter, Redis, Variant, embedded, free_address, on_redis, plugin};
use crate::load::{Expected, Setting, Subject};
use crate::turns::{Measured, round, take_turns};
use crate::{Bench, Fallible};

/// Answers at once; `callout` first sends one command over the link, as the filter sends its own.
const CALLOUT: &str = r#"
function envoy_on_request(handle)
  local headers, answer = handle:httpCall("redis-link",
    {[":method"] = "POST", [":path"] = "/", [":authority"] = "redis"},
    "*1\r\n$4\r\nPING\r\n*1\r\n$4\r\nQUIT\r\n", 2000)
  handle:respond({[":status"] = answer == "+PONG\r\n+OK\r\n" and "200" or "500"}, string.rep("a", 200))
end
"#;
const NO_CALLOUT: &str = r#"
function envoy_on_request(handle)
  handle:respond({[":status"] = "200"}, string.rep("a", 200))
end
"#;

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let short = json!({"record_ttl": "20s"});
    let first =
        |name, batches| Variant::first(name, plugin(on_redis("bench:", json!({}), batches), short.clone()));
    let lua = |name, script: &str| Variant {
        name,
        against: "lua_respond",
        filter: Filter::Lua(script.to_owned()),
        action: Action::Answer,
        expected: Expected::NoExecutions,
        ..Variant::direct()
    };
    let variants = [
        Variant::plain(),
        Variant::first("embedded_first", plugin(embedded(), short.clone())),
        first("redis_first", 2),
        Variant::first(
            "redis_first_detached",
            plugin(on_redis("bench:", json!({}), 2), json!({"record_ttl": "40s", "execution": "detached"})),
        )
        .against("redis_first"),
        Variant::direct(),
        Variant::replay("near_replay", plugin(on_redis("bench-near:", json!({}), 2), json!({}))),
        Variant::replay("redis_replay", plugin(on_redis("bench-far:", json!(false), 2), json!({}))),
        lua("lua_respond", NO_CALLOUT),
        lua("lua_callout", CALLOUT),
    ];
    // With as many batches as the configuration allows, an operation waits for none: each has a callout of its own as long
    // as no more than that many are out.
    let batching = [
        first("batches_2", 2).against("batches_2"),
        first("batches_1", 1).against("batches_2"),
        first("batches_4", 4).against("batches_2"),
        first("batching_off", 64).against("batches_2"),
    ];
    let redis = Redis::start(&bench.tools)?;
    let around = Around { upstream: bench.upstream, redis: redis.address, webdis: free_address()? };
    let (mut settings, mut batches, mut callout) = (Vec::new(), Vec::new(), Value::Null);
    for workers in [1, 2] {
        let all: Vec<Variant> = variants.iter().chain(&batching).cloned().collect();
        let envoy = Envoy::start(&bench.tools, workers, around, &all)?;
        let subjects = envoy.subjects(&variants)?;
        for body in [200, 16 << 10, 512 << 10] {
            for connections in [1, 32, 128] {
                let is_quick = body == 200 && (workers == 1 || connections == 32);
                if !bench.full && !is_quick {
                    continue;
                }
                let measured = take_turns(&subjects, Setting { workers, connections, body }, bench.effort)?;
                if (workers, connections, body) == (1, 1, 200) {
                    callout = cost_of_callout(&measured)?;
                }
                settings.push(measured.json());
            }
        }
        for connections in [32, 128] {
            if bench.full || workers == 1 {
                let setting = Setting { workers, connections, body: 200 };
                let subjects = envoy.subjects(&batching)?;
                let mut measured = take_turns(&subjects, setting, bench.effort)?.json();
                measured["operations_per_callout"] = operations_per_callout(&envoy, &subjects, setting)?;
                batches.push(measured);
            }
        }
    }
    Ok(json!({"settings": settings, "callout": callout, "batching": batches}))
}

/// What a first execution adds to the latency, in callouts.
fn cost_of_callout(measured: &Measured) -> Fallible<Value> {
    let p50 = |name| measured.of(name).map(|sample| sample.p50).ok_or_else(|| format!("no {name}"));
    let callout = p50("lua_callout")? - p50("lua_respond")?;
    let first = p50("redis_first")? - p50("plain")?;
    let replay = p50("redis_replay")? - p50("direct_response")?;
    println!(
        "  a bare callout takes {callout:.0} µs; a first execution adds {first:.0} µs, {:.2} of it; a replay from Redis {replay:.0} µs, {:.2} of it",
        first / callout,
        replay / callout
    );
    Ok(json!({
        "bare_callout_us": callout, "first_execution_adds_us": first, "replay_adds_us": replay,
        "first_in_callouts": round(first / callout, 2), "replay_in_callouts": round(replay / callout, 2),
    }))
}

/// A first execution is two operations, a claim and a completion.
fn operations_per_callout(envoy: &Envoy, subjects: &[Subject], setting: Setting) -> Fallible<Value> {
    let mut all = json!({});
    for subject in subjects {
        let callouts = || envoy.stat("cluster.redis-link.upstream_rq_total");
        let before = callouts()?;
        let sample = subject.run(setting, std::time::Duration::from_secs(1))?;
        #[allow(clippy::cast_precision_loss, reason = "counts of one second")]
        let operations = sample.requests * 2.0 / (callouts()? - before) as f64;
        println!("  {:<28} {operations:.2} operations per callout", subject.name);
        all[&subject.name] = json!(round(operations, 2));
    }
    Ok(all)
}
