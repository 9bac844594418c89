//! One operation of the core, over and over: for `make callgrind`, which counts instructions. Two runs of different
//! length differ by exactly the operations, so whatever the beginning costs falls out.
//!
//! `core_costs OPERATION TIMES`

#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a program that ends at the first mistake, and knows its own data"
)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::{self, Config, OnAbandoned, Rule};
use idempotency::fingerprint::{Fingerprint, FingerprintHasher};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::{StoreKey, parse_key};
use idempotency::record::codec::{ResponseEncoder, StoredResponse};
use idempotency::record::{ClaimTerms, Owner};
use idempotency::reply::replay::replay;
use idempotency::scope::resolve_scope;
use idempotency::store::shared_data::SharedDataStore;
use idempotency::store::shared_data::cas::{Cas, CasError, Seen, Slot};
use idempotency::store::{Claim, ClaimReply, Hold, Store, Write, WriteReply};

/// The host's map, as simple as it can be.
#[derive(Default)]
struct MapCas(RefCell<BTreeMap<String, (Vec<u8>, u32)>>);

impl Cas for MapCas {
    fn load(&self, name: &str) -> Result<Slot, CasError> {
        Ok(match self.0.borrow().get(name) {
            Some((bytes, cas)) if bytes.is_empty() => Slot::Emptied { cas: *cas },
            Some((bytes, cas)) => Slot::Present { bytes: bytes.clone(), cas: *cas },
            None => Slot::Absent,
        })
    }

    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError> {
        let mut map = self.0.borrow_mut();
        let next = match (map.get(name), seen) {
            (None, Seen::Absent) => 1,
            (Some((_, cas)), Seen::Version(seen)) if *cas == seen => cas + 1,
            (None | Some(_), Seen::Absent | Seen::Version(_)) => return Err(CasError::Lost),
        };
        map.insert(name.to_owned(), (value.to_vec(), next));
        Ok(())
    }
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

struct Core {
    config: Config,
    store: SharedDataStore<MapCas>,
    headers: HeaderBlock,
    now: Timestamp,
}

impl Core {
    fn new() -> Self {
        let config = config::load(
            br#"{"store": {"shared_data": {}}, "rules": [{"name": "bench", "scope": [{"header": "x-account-id"}]}]}"#,
        )
        .unwrap();
        let config::StoreConfig::SharedData(settings) = &config.store else { return Self::new() };
        let store = SharedDataStore::open(MapCas::default(), "bench", settings).unwrap();
        let headers = HeaderBlock::from_pairs([
            (":method", "POST"),
            (":authority", "api.example.com"),
            (":path", "/pay?order=17&currency=EUR"),
            ("x-account-id", "bench"),
            ("idempotency-key", "\"8e03978e-40d5-43e8-bc93-6894a57f9324\""),
            ("content-type", "application/json"),
            ("user-agent", "bench/1.0"),
            ("accept", "*/*"),
        ]);
        Self { config, store, headers, now: Timestamp::from_millis(1_000_000) }
    }

    fn rule(&self) -> &Rule {
        &self.config.rules[0]
    }

    fn head(&self) -> RequestHead<'_> {
        RequestHead { headers: &self.headers, attributes: &NoAttributes }
    }

    fn key(&self) -> StoreKey {
        let key = parse_key(self.headers.lines("idempotency-key"), &self.rule().key).unwrap().unwrap();
        let scope = resolve_scope(self.rule(), &self.head()).unwrap();
        StoreKey::derive("", &scope, &key)
    }

    fn fingerprint(&self, body: &[u8]) -> Fingerprint {
        let mut hasher = FingerprintHasher::start(self.rule(), &self.head());
        // As Envoy hands it over.
        for chunk in body.chunks(16 << 10) {
            hasher.update_body(chunk);
        }
        hasher.finish()
    }

    fn hold(number: u32) -> Hold {
        let mut key = [0; 32];
        // Spread as a hash is, at next to no cost (SplitMix64).
        let mut state = u64::from(number);
        for bytes in key.chunks_exact_mut(8) {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut mixed = state;
            mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            bytes.copy_from_slice(&(mixed ^ (mixed >> 31)).to_be_bytes());
        }
        let mut owner = [7; 16];
        owner[..4].copy_from_slice(&number.to_be_bytes());
        Hold {
            key: StoreKey::from_bytes(key),
            owner: Owner::from_bytes(owner),
            fingerprint: Fingerprint::from_bytes([1; 32]),
            attempt: 1,
        }
    }

    fn claim(&mut self, hold: &Hold) -> ClaimReply {
        let terms = ClaimTerms {
            owner: hold.owner,
            fingerprint: hold.fingerprint,
            lock_ttl: Duration::from_secs(60),
            record_ttl: Duration::from_secs(86_400),
            on_abandoned: OnAbandoned::Takeover,
        };
        self.store.claim(&Claim { key: hold.key, terms }, self.now).unwrap()
    }

    fn complete(&mut self, hold: &Hold) {
        let lines: [(&[u8], &[u8]); 2] =
            [(b"content-type", b"application/json"), (b"location", b"/payments/pay-17")];
        let mut encoder = ResponseEncoder::begin(201, lines, None).unwrap();
        encoder.push(&[b'a'; 200]);
        let write =
            Write::Complete { response: Rc::from(encoder.finish()), record_ttl: Duration::from_secs(86_400) };
        assert_eq!(self.store.write(hold, &write, self.now).unwrap(), WriteReply::Applied);
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (operation, times) = (arguments.next().unwrap(), arguments.next().unwrap().parse::<u32>().unwrap());
    let mut core = Core::new();
    if let Some(size) = operation.strip_prefix("fingerprint-") {
        let body = vec![b'x'; size.parse().unwrap()];
        for _ in 0..times {
            black_box(core.fingerprint(black_box(&body)));
        }
        return;
    }
    match operation.as_str() {
        "key" => {
            for _ in 0..times {
                black_box(core.key());
            }
        }
        "claim" => {
            for number in 0..times {
                assert_eq!(core.claim(&Core::hold(number)), ClaimReply::Claimed { attempt: 1 });
            }
        }
        "claim-complete" => {
            for number in 0..times {
                let hold = Core::hold(number);
                assert_eq!(core.claim(&hold), ClaimReply::Claimed { attempt: 1 });
                core.complete(&hold);
            }
        }
        "conflict" | "replay" => {
            let first = Core::hold(0);
            core.claim(&first);
            if operation == "replay" {
                core.complete(&first);
            }
            let again = Hold { owner: Owner::from_bytes([9; 16]), ..first };
            for _ in 0..times {
                match core.claim(&again) {
                    ClaimReply::Completed { response, .. } => {
                        let stored = StoredResponse::decode(&response).unwrap();
                        black_box(replay(&stored, 0, core.rule(), None));
                    }
                    ClaimReply::InFlight { .. } => {}
                    reply @ (ClaimReply::Claimed { .. }
                    | ClaimReply::Abandoned { .. }
                    | ClaimReply::Failed { .. }) => {
                        eprintln!("core_costs: {operation}: {reply:?}");
                        std::process::exit(1);
                    }
                }
            }
        }
        _ => {
            eprintln!("core_costs: no operation {operation}");
            std::process::exit(2);
        }
    }
}
