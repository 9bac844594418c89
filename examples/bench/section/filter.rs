//! The filter on the embedded store, beside Envoy without it.

use serde_json::{Value, json};

use crate::envoy::{Around, Envoy, Redis, Variant, embedded, free_address, plugin};
use crate::load::{ACCOUNT, HOST, Setting, Subject};
use crate::process::wait_until;
use crate::turns::take_turns;
use crate::{Bench, Fallible, http, upstream};

pub fn measure(bench: &Bench) -> Fallible<Value> {
    let short = json!({"record_ttl": "20s"});
    let variants = [
        Variant::plain(),
        Variant::floor("filter_that_does_nothing"),
        Variant::floor("filter_that_holds"),
        Variant::first("uncovered", plugin(embedded(), json!({"match": {"path": {"prefix": "/other"}}}))),
        Variant::first("first", plugin(embedded(), short)),
        Variant::first(
            "first_detached",
            plugin(embedded(), json!({"execution": "detached", "record_ttl": "40s"})),
        )
        .against("first"),
        Variant::direct(),
        Variant::replay("replay", plugin(embedded(), json!({}))),
        Variant::conflict("conflict", plugin(embedded(), json!({}))),
    ];
    let redis = Redis::start(&bench.tools)?;
    let around = Around { upstream: bench.upstream, redis: redis.address, webdis: free_address()? };
    let mut settings = Vec::new();
    for workers in [1, 2] {
        let envoy = Envoy::start(&bench.tools, workers, around, &variants)?;
        let subjects = envoy.subjects(&variants)?;
        let conflict = subjects.iter().find(|subject| subject.name == "conflict").ok_or("no such subject")?;
        for body in [200, 16 << 10, 512 << 10] {
            let held = hold(conflict, body)?;
            for connections in [1, 32, 128] {
                let setting = Setting { workers, connections, body };
                let is_quick = match (workers, body) {
                    (1, 200) => true,
                    (1, 16_384) | (2, 200) => connections == 32,
                    (1, _) => connections != 128,
                    _ => false,
                };
                if bench.full || is_quick {
                    settings.push(take_turns(&subjects, setting, bench.effort)?.json());
                }
            }
            upstream::release();
            held.join().map_err(|_| "the held request's thread broke")??;
        }
    }
    Ok(json!({"settings": settings}))
}

/// Begins the request whose duplicates are refused, and returns once it is at the service.
fn hold(conflict: &Subject, body: usize) -> Fallible<std::thread::JoinHandle<Fallible<()>>> {
    let (port, path) = (conflict.port, conflict.path.clone());
    let before = upstream::held();
    let held = std::thread::spawn(move || {
        let key = format!("held-{body}");
        let headers = [
            ("host", HOST),
            ("x-account-id", ACCOUNT),
            ("content-type", "text/plain"),
            ("idempotency-key", &key),
            (upstream::HOLD, "1"),
        ];
        let answer = http::send_within(None, port, "POST", &path, &headers, "x".repeat(body).as_bytes())?;
        if answer.status == 200 { Ok(()) } else { Err(format!("the held request: {}", answer.head).into()) }
    });
    wait_until("the held request to arrive", std::time::Duration::from_secs(10), || {
        Ok(upstream::held() > before)
    })?;
    Ok(held)
}
