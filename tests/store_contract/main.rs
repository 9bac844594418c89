//! The stores against their contract, and what only the embedded store has to prove: races, faults and bounds.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::unreachable,
    reason = "a test ends by panicking"
)]
#![allow(missing_docs, reason = "nothing here is anybody's interface")]

mod bounds;
mod fake_cas;
mod faults;
mod model;
mod opening;
mod operation;
mod races;
mod reference;
mod suite;

use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::{SharedDataConfig, WhenFull};
use idempotency::store::shared_data::SharedDataStore;
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

use crate::fake_cas::FakeCas;
use crate::reference::ReferenceStore;
use crate::suite::Subject;

struct Clocked<S> {
    store: S,
    now: Timestamp,
}

impl<S: Store> Clocked<S> {
    fn of(store: S) -> Self {
        Self { store, now: Timestamp::from_millis(1_000) }
    }
}

impl<S: Store> Subject for Clocked<S> {
    fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError> {
        self.store.claim(claim, self.now)
    }

    fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError> {
        self.store.write(hold, write, self.now)
    }

    fn advance(&mut self, by: Duration) {
        self.now = self.now.after(by);
    }
}

fn config(max_records: u32, max_bytes: u64, when_full: WhenFull) -> SharedDataConfig {
    SharedDataConfig { namespace: None, max_records, max_bytes, when_full }
}

fn open(cas: &FakeCas, config: &SharedDataConfig) -> SharedDataStore<FakeCas> {
    let store = SharedDataStore::open(cas.another_worker(), "test", config);
    store.expect("the table opens")
}

#[test]
fn the_reference_store_keeps_the_contract() {
    let mut subject = Clocked::of(ReferenceStore::default());
    for _ in 0..3 {
        suite::run_all(&mut subject);
    }
}

#[test]
fn the_shared_data_store_keeps_the_contract() {
    // One bucket, and many: what shares a bucket must not matter.
    for max_records in [64, 10_000] {
        for when_full in [WhenFull::Reject, WhenFull::EvictCompleted] {
            let store = open(&FakeCas::default(), &config(max_records, 64 << 20, when_full));
            let mut subject = Clocked::of(store);
            for _ in 0..3 {
                suite::run_all(&mut subject);
                // Time frees the one bucket for the next round.
                subject.advance(Duration::from_secs(1 << 20));
            }
        }
    }
}

#[test]
fn two_workers_over_one_map_keep_the_contract() {
    struct Workers([Clocked<SharedDataStore<FakeCas>>; 2], usize);

    impl Workers {
        fn next(&mut self) -> &mut Clocked<SharedDataStore<FakeCas>> {
            self.1 += 1;
            &mut self.0[self.1 % 2]
        }
    }

    impl Subject for Workers {
        fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError> {
            self.next().claim(claim)
        }

        fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError> {
            self.next().write(hold, write)
        }

        fn advance(&mut self, by: Duration) {
            self.0.iter_mut().for_each(|worker| worker.advance(by));
        }
    }

    let cas = FakeCas::default();
    let config = config(1_000, 64 << 20, WhenFull::Reject);
    suite::run_all(&mut Workers([(); 2].map(|()| Clocked::of(open(&cas, &config))), 0));
}
