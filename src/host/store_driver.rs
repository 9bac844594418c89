//! Lets the end-to-end tests run the store contract through the compiled filter: one operation per request, with
//! the time given by the test. Not in a release build.

use std::rc::Rc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::abi::Action;
use super::hostcalls::{self, Buffer};
use super::shared_data::HostCas;
use crate::clock::Timestamp;
use crate::config::{OnAbandoned, SharedDataConfig, WhenFull};
use crate::fingerprint::Fingerprint;
use crate::headers::serialize_pairs;
use crate::key::StoreKey;
use crate::record::{ClaimTerms, Owner, Reason};
use crate::store::shared_data::SharedDataStore;
use crate::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

/// Whether the plugin configuration asks for this role.
pub fn is_asked_for(json: &[u8]) -> bool {
    serde_json::from_slice::<Value>(json)
        .is_ok_and(|value| value.get("test_role").is_some_and(|role| role == "store_driver"))
}

#[derive(Deserialize)]
struct Request {
    namespace: String,
    max_records: u32,
    max_bytes: u64,
    evict: bool,
    now_ms: u64,
    op: String,
    key: String,
    owner: String,
    fingerprint: String,
    #[serde(default)]
    attempt: u32,
    #[serde(default)]
    lock_ttl_ms: u64,
    #[serde(default)]
    ttl_ms: u64,
    #[serde(default)]
    takeover: bool,
    #[serde(default)]
    response: String,
    #[serde(default)]
    reason: u8,
}

/// A stream whose request is an operation and whose response is its reply.
pub struct StoreDriver;

impl StoreDriver {
    /// Answers once the body, which the host buffers, is whole.
    pub fn on_request_body(size: usize, end: bool) -> Action {
        if !end {
            return Action::Pause;
        }
        let body = hostcalls::buffer(Buffer::RequestBody, 0, size).unwrap_or_default();
        let (status, value) = match Self::answer(&body) {
            Ok(value) => (200, value),
            Err(error) => (400, json!({"error": error})),
        };
        let headers = serialize_pairs(&[("content-type", "application/json")]);
        let _ =
            hostcalls::send_local_response(status, "store_driver", &headers, value.to_string().as_bytes());
        Action::Pause
    }

    fn answer(body: &[u8]) -> Result<Value, String> {
        let request: Request = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let settings = SharedDataConfig {
            namespace: None,
            max_records: request.max_records,
            max_bytes: request.max_bytes,
            when_full: if request.evict { WhenFull::EvictCompleted } else { WhenFull::Reject },
        };
        let mut store = SharedDataStore::open(HostCas, &request.namespace, &settings)
            .map_err(|error| error.to_string())?;
        let now = Timestamp::from_millis(request.now_ms);
        let key = StoreKey::from_bytes(bytes(&request.key)?);
        let owner = Owner::from_bytes(bytes(&request.owner)?);
        let fingerprint = Fingerprint::from_bytes(bytes(&request.fingerprint)?);
        let (lock_ttl, ttl) =
            (Duration::from_millis(request.lock_ttl_ms), Duration::from_millis(request.ttl_ms));
        let write = match request.op.as_str() {
            "claim" => {
                let on_abandoned = if request.takeover { OnAbandoned::Takeover } else { OnAbandoned::Retain };
                let terms = ClaimTerms { owner, fingerprint, lock_ttl, record_ttl: ttl, on_abandoned };
                return Ok(claim_reply(store.claim(&Claim { key, terms }, now)));
            }
            "renew" => Write::Renew { lock_ttl, record_ttl: ttl },
            "complete" => Write::Complete { response: Rc::from(unhex(&request.response)?), record_ttl: ttl },
            "fail" => Write::Fail {
                reason: Reason::from_code(request.reason).ok_or("no such reason")?,
                failed_ttl: ttl,
            },
            "release" => Write::Release,
            other => return Err(format!("no such operation: {other}")),
        };
        let hold = Hold { key, owner, fingerprint, attempt: request.attempt };
        Ok(write_reply(store.write(&hold, &write, now)))
    }
}

fn claim_reply(reply: Result<ClaimReply, StoreError>) -> Value {
    match reply {
        Ok(ClaimReply::Claimed { attempt }) => json!({"reply": "claimed", "attempt": attempt}),
        Ok(ClaimReply::InFlight { fingerprint, elapsed, remaining }) => json!({
            "reply": "in_flight", "fingerprint": hex(fingerprint.bytes()),
            "elapsed_ms": millis(elapsed), "remaining_ms": millis(remaining),
        }),
        Ok(ClaimReply::Abandoned { fingerprint }) => {
            json!({"reply": "abandoned", "fingerprint": hex(fingerprint.bytes())})
        }
        Ok(ClaimReply::Completed { fingerprint, response }) => json!({
            "reply": "completed", "fingerprint": hex(fingerprint.bytes()), "response": hex(&response),
        }),
        Ok(ClaimReply::Failed { fingerprint, reason }) => {
            json!({"reply": "failed", "fingerprint": hex(fingerprint.bytes()), "reason": reason.code()})
        }
        Err(error) => json!({"error": error.as_str()}),
    }
}

fn write_reply(reply: Result<WriteReply, StoreError>) -> Value {
    match reply {
        Ok(WriteReply::Applied) => json!({"reply": "applied"}),
        Ok(WriteReply::AppliedAsTombstone) => json!({"reply": "applied_as_tombstone"}),
        Ok(WriteReply::Stale) => json!({"reply": "stale"}),
        Err(error) => json!({"error": error.as_str()}),
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Result<Vec<u8>, String> {
    text.as_bytes()
        .chunks(2)
        .map(|pair| {
            std::str::from_utf8(pair)
                .ok()
                .and_then(|pair| u8::from_str_radix(pair, 16).ok())
                .ok_or_else(|| "not hex".to_owned())
        })
        .collect()
}

fn bytes<const N: usize>(text: &str) -> Result<[u8; N], String> {
    unhex(text)?.try_into().map_err(|_| format!("not {N} bytes"))
}
