//! The store contract, through the compiled filter: the same list of cases as natively, and real races.

use std::io::{Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::record::Reason;
use idempotency::record::codec::ResponseEncoder;
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};
use serde_json::{Value, json};

use crate::support::*;

#[path = "../store_contract/suite.rs"]
pub mod suite;

/// The filter as a store driver: one operation for each POST.
async fn driver() -> Envoy {
    Envoy::builder()
        .workers(4)
        .wasm(Wasm::TestHooks)
        .plugin(json!({"test_role": "store_driver"}))
        .start()
        .await
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex<const N: usize>(value: &Value) -> [u8; N] {
    unhex_all(value).try_into().expect("the right length")
}

fn unhex_all(value: &Value) -> Vec<u8> {
    let text = value.as_str().unwrap_or_else(|| panic!("hex digits: {value}"));
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits");
    (0..text.len()).step_by(2).map(digits).collect()
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap()
}

/// A blocking connection to the driver: the suite's stores answer at once.
struct Wire(TcpStream);

impl Wire {
    fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).expect("the driver");
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    fn call(&mut self, operation: &Value) -> Value {
        let body = operation.to_string();
        let head = format!("POST / HTTP/1.1\r\nhost: driver\r\ncontent-length: {}\r\n\r\n", body.len());
        self.0.write_all(&[head.as_bytes(), body.as_bytes()].concat()).expect("the driver listens");
        let mut answer = Vec::new();
        let mut chunk = [0; 16 * 1024];
        loop {
            let count = self.0.read(&mut chunk).expect("the driver answers");
            assert!(count > 0, "the driver hung up: {}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&chunk[..count]);
            let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else { continue };
            let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
            let length = head.split("content-length: ").nth(1).expect("a length");
            let length: usize = length.split("\r\n").next().unwrap().parse().unwrap();
            if answer.len() == end + 4 + length {
                let body = &answer[end + 4..];
                assert!(head.starts_with("http/1.1 200"), "{head}: {}", String::from_utf8_lossy(body));
                return serde_json::from_slice(body).expect("JSON");
            }
        }
    }
}

/// The suite's subject: each operation goes out on the next connection, so to another worker.
struct Driven {
    wires: Vec<Wire>,
    next: usize,
    now_ms: u64,
    namespace: String,
    max_records: u32,
}

impl Driven {
    fn connect(addr: SocketAddr, namespace: &str) -> Self {
        let wires = (0..12).map(|_| Wire::connect(addr)).collect();
        Self { wires, next: 0, now_ms: 1_000_000, namespace: namespace.to_owned(), max_records: 1_000 }
    }

    fn call(&mut self, mut operation: Value) -> Value {
        deep_merge(
            &mut operation,
            &json!({
                "namespace": self.namespace, "max_records": self.max_records, "max_bytes": 64 << 20,
                "evict": false, "now_ms": self.now_ms,
            }),
        );
        self.next = (self.next + 1) % self.wires.len();
        self.wires[self.next].call(&operation)
    }
}

fn claim_operation(claim: &Claim) -> Value {
    let terms = &claim.terms;
    json!({
        "op": "claim", "key": hex(claim.key.bytes()), "owner": hex(terms.owner.bytes()),
        "fingerprint": hex(terms.fingerprint.bytes()), "lock_ttl_ms": millis(terms.lock_ttl),
        "ttl_ms": millis(terms.record_ttl), "takeover": terms.on_abandoned == OnAbandoned::Takeover,
    })
}

fn write_operation(hold: &Hold, write: &Write) -> Value {
    let mut operation = match write {
        Write::Renew { lock_ttl, record_ttl } => {
            json!({"op": "renew", "lock_ttl_ms": millis(*lock_ttl), "ttl_ms": millis(*record_ttl)})
        }
        Write::Complete { response, record_ttl } => {
            json!({"op": "complete", "response": hex(response), "ttl_ms": millis(*record_ttl)})
        }
        Write::Fail { reason, failed_ttl } => {
            json!({"op": "fail", "reason": reason.code(), "ttl_ms": millis(*failed_ttl)})
        }
        Write::Release => json!({"op": "release"}),
    };
    deep_merge(
        &mut operation,
        &json!({
            "key": hex(hold.key.bytes()), "owner": hex(hold.owner.bytes()),
            "fingerprint": hex(hold.fingerprint.bytes()), "attempt": hold.attempt,
        }),
    );
    operation
}

fn error(reply: &Value) -> StoreError {
    match reply["error"].as_str() {
        Some("full") => StoreError::Full,
        Some("unavailable") => StoreError::Unavailable,
        Some("unreadable") => StoreError::Unreadable,
        _ => panic!("{reply}"),
    }
}

fn claim_reply(reply: &Value) -> Result<ClaimReply, StoreError> {
    let fingerprint = || Fingerprint::from_bytes(unhex(&reply["fingerprint"]));
    let duration = |name: &str| Duration::from_millis(reply[name].as_u64().expect("milliseconds"));
    Ok(match reply["reply"].as_str() {
        Some("claimed") => {
            ClaimReply::Claimed { attempt: u32::try_from(reply["attempt"].as_u64().unwrap()).unwrap() }
        }
        Some("in_flight") => ClaimReply::InFlight {
            fingerprint: fingerprint(),
            elapsed: duration("elapsed_ms"),
            remaining: duration("remaining_ms"),
        },
        Some("abandoned") => ClaimReply::Abandoned { fingerprint: fingerprint() },
        Some("completed") => {
            ClaimReply::Completed { fingerprint: fingerprint(), response: unhex_all(&reply["response"]) }
        }
        Some("failed") => {
            let code = u8::try_from(reply["reason"].as_u64().unwrap()).unwrap();
            ClaimReply::Failed {
                fingerprint: fingerprint(),
                reason: Reason::from_code(code).expect("a known reason"),
            }
        }
        _ => return Err(error(reply)),
    })
}

impl suite::Subject for Driven {
    fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError> {
        claim_reply(&self.call(claim_operation(claim)))
    }

    fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError> {
        let reply = self.call(write_operation(hold, write));
        Ok(match reply["reply"].as_str() {
            Some("applied") => WriteReply::Applied,
            Some("applied_as_tombstone") => WriteReply::AppliedAsTombstone,
            Some("stale") => WriteReply::Stale,
            _ => return Err(error(&reply)),
        })
    }

    fn advance(&mut self, by: Duration) {
        self.now_ms += millis(by);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_contract_holds_through_the_compiled_filter_on_every_worker() {
    let envoy = driver().await;
    let addr = envoy.addr();
    tokio::task::spawn_blocking(move || {
        // Twice on one table: a case relies on nothing that is in the store already.
        let mut subject = Driven::connect(addr, "contract");
        suite::run_all(&mut subject);
        suite::run_all(&mut subject);
    })
    .await
    .unwrap();
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.stat("http.main.downstream_rq_5xx").await, 0);
}

/// Callers of each key, on a connection each.
const CALLERS: usize = 8;
const KEYS: usize = 500;

/// Sends `operation(key, caller)` for every key and caller, all callers of a key at the same time, two keys at once;
/// the replies by key, then by caller.
fn fire(addr: SocketAddr, operation: impl Fn(usize, usize) -> Value + Sync) -> Vec<Vec<Value>> {
    let gate = std::sync::Barrier::new(2 * CALLERS);
    let (gate, operation) = (&gate, &operation);
    let lane = |lane: usize, caller: usize| {
        move || {
            let mut wire = Wire::connect(addr);
            let calls = (lane..KEYS).step_by(2).map(|key| {
                let operation = operation(key, caller);
                gate.wait();
                wire.call(&operation)
            });
            calls.collect::<Vec<Value>>()
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..2 * CALLERS).map(|number| scope.spawn(lane(number / CALLERS, number % CALLERS))).collect();
        let replies: Vec<Vec<Value>> =
            threads.into_iter().map(|thread| thread.join().expect("a caller")).collect();
        let of_key = |key: usize| {
            let lane = key % 2 * CALLERS;
            replies[lane..lane + CALLERS].iter().map(|replies| replies[key / 2].clone()).collect()
        };
        (0..KEYS).map(of_key).collect()
    })
}

/// The one caller of each key that got `claimed`; all others must have found it in flight.
fn winners(replies: &[Vec<Value>]) -> Vec<usize> {
    let winner = |replies: &Vec<Value>| {
        let mut won = (0..CALLERS).filter(|caller| replies[*caller]["reply"] == "claimed");
        let winner = won.next().unwrap_or_else(|| panic!("nobody: {replies:?}"));
        assert_eq!(won.next(), None, "{replies:?}");
        let lost = replies.iter().filter(|reply| reply["reply"] == "in_flight").count();
        assert_eq!(lost, CALLERS - 1, "{replies:?}");
        winner
    };
    replies.iter().map(winner).collect()
}

// G15: no claim is won twice, and a released key, whose place the host never forgets, is won once again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_racing_claims_exactly_one_is_claimed() {
    let envoy = driver().await;
    let addr = envoy.addr();
    // A small table, so that claims of different keys meet in its buckets too.
    let operation = |op: &str, key: usize, round: usize, caller: usize| {
        json!({
            "namespace": "races", "max_records": KEYS, "max_bytes": 8 << 20, "evict": false, "now_ms": 1_000_000,
            "op": op, "key": store_key(key), "owner": format!("{key:016x}{round:08x}{caller:08x}"),
            "fingerprint": "11".repeat(32), "attempt": 1, "lock_ttl_ms": 60_000, "ttl_ms": 3_600_000,
            "takeover": true,
        })
    };
    tokio::task::spawn_blocking(move || {
        let first = winners(&fire(addr, |key, caller| operation("claim", key, 1, caller)));
        let different: std::collections::BTreeSet<_> = first.iter().collect();
        assert!(different.len() >= 2, "no race at all: {first:?}");
        // Everybody releases: only the winner's counts.
        let released = fire(addr, |key, caller| operation("release", key, 1, caller));
        for (replies, winner) in released.iter().zip(&first) {
            assert_eq!(replies[*winner]["reply"], "applied", "{replies:?}");
        }
        let second = winners(&fire(addr, |key, caller| operation("claim", key, 2, caller)));
        // The winners of both rounds complete at the same time: the first round's are stale.
        let mut response = ResponseEncoder::begin(200, [], None).unwrap();
        response.push(b"done");
        let response = hex(&response.finish());
        let completed = fire(addr, |key, caller| {
            let (round, winner) = if caller % 2 == 0 { (1, first[key]) } else { (2, second[key]) };
            let mut complete = operation("complete", key, round, winner);
            complete["response"] = json!(response);
            complete
        });
        for replies in completed {
            for (caller, reply) in replies.iter().enumerate() {
                assert_eq!(reply["reply"], if caller % 2 == 0 { "stale" } else { "applied" }, "{replies:?}");
            }
        }
        let found = fire(addr, |key, caller| operation("claim", key, 3, caller));
        for reply in found.iter().flatten() {
            assert_eq!((&reply["reply"], &reply["response"]), (&json!("completed"), &json!(response)));
        }
    })
    .await
    .unwrap();
    assert!(envoy.workers_that_served().await >= 2);
    assert_eq!(envoy.stat("http.main.downstream_rq_5xx").await, 0);
}

/// A store key, as evenly spread as real ones are.
fn store_key(number: usize) -> String {
    let word =
        |salt: u64| (number as u64 + 1 + salt).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29) ^ salt;
    (1..=4).map(|salt| format!("{:016x}", word(salt << 40).wrapping_mul(0xbf58_476d_1ce4_e5b9))).collect()
}
