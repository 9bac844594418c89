//! The stores of the model, and the wrong ones that it must tell from them.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use idempotency::clock::Timestamp;
use idempotency::config::{OnAbandoned, SharedDataConfig, WhenFull};
use idempotency::exchange::StoreAnswer;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::{Owner, Reason};
use idempotency::store::shared_data::SharedDataStore;
use idempotency::store::shared_data::cas::{Cas, CasError, Seen, Slot};
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

use crate::fake_cas::FakeCas;
use crate::reference::ReferenceStore;
use crate::taken::Asked;

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Whoever writes is taken for the owner.
    NoFencing,
    /// The host's "no version": a swap overwrites whatever is there.
    CasNone,
    /// A claim holds as long as its record is kept.
    LeaseIsRecordTtl,
    /// A client that leaves gives its claim back.
    ReleaseOnClientGone,
    /// A failed record is not written, though the store says so.
    FailureForgotten,
    /// The rule takes over, whatever it was told.
    AlwaysTakeover,
    /// A takeover does not look whose request it is.
    FingerprintIgnored,
}

/// A map of versioned values, with or without the versions.
#[derive(Debug)]
pub struct ModelCas {
    fake: FakeCas,
    blind: bool,
}

impl Cas for ModelCas {
    fn load(&self, name: &str) -> Result<Slot, CasError> {
        self.fake.load(name)
    }

    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError> {
        if !self.blind {
            return self.fake.swap(name, seen, value);
        }
        // Reading again lets the other worker in, as the swap would have.
        let seen = self.fake.load(name)?.seen();
        self.fake.swap(name, seen, value)
    }
}

enum Kind {
    Reference(ReferenceStore),
    /// One handle per worker, on one map.
    Table {
        handles: Vec<(FakeCas, Option<SharedDataStore<ModelCas>>)>,
    },
}

/// What all workers of a run share.
pub struct Shelf {
    kind: Kind,
    mutation: Option<Mutation>,
    claimants: BTreeMap<StoreKey, (Owner, Fingerprint)>,
}

impl Shelf {
    pub fn new(table: bool, workers: usize, mutation: Option<Mutation>) -> Self {
        let kind = if table {
            let (first, config) = (FakeCas::default(), config());
            let blind = mutation == Some(Mutation::CasNone);
            let handles = (0..workers).map(|_| {
                let fake = first.another_worker();
                let cas = ModelCas { fake: fake.clone(), blind };
                (fake, Some(SharedDataStore::open(cas, "model", &config).expect("the table opens")))
            });
            Kind::Table { handles: handles.collect() }
        } else {
            Kind::Reference(ReferenceStore::default())
        };
        Self { kind, mutation, claimants: BTreeMap::new() }
    }

    pub fn claim(&mut self, worker: usize, claim: &Claim, now: Timestamp) -> Result<ClaimReply, StoreError> {
        let mut claim = claim.clone();
        match self.mutation {
            Some(Mutation::LeaseIsRecordTtl) => claim.terms.lock_ttl = claim.terms.record_ttl,
            Some(Mutation::AlwaysTakeover) => {
                claim.terms.on_abandoned = OnAbandoned::Takeover;
            }
            Some(Mutation::FingerprintIgnored) => {
                if let Some((_, found)) = self.claimants.get(&claim.key) {
                    claim.terms.fingerprint = *found;
                }
            }
            Some(
                Mutation::NoFencing
                | Mutation::CasNone
                | Mutation::ReleaseOnClientGone
                | Mutation::FailureForgotten,
            )
            | None => {}
        }
        let reply = self.store(worker).claim(&claim, now);
        if let Ok(ClaimReply::Claimed { .. }) = reply {
            self.claimants.insert(claim.key, (claim.terms.owner, claim.terms.fingerprint));
        }
        reply
    }

    pub fn write(
        &mut self,
        worker: usize,
        hold: &Hold,
        write: &Write,
        now: Timestamp,
    ) -> Result<WriteReply, StoreError> {
        let (mut hold, mut write) = (*hold, write.clone());
        match (self.mutation, &mut write) {
            (Some(Mutation::NoFencing), _) => {
                hold.owner = self.claimants.get(&hold.key).map_or(hold.owner, |(owner, _)| *owner);
            }
            (Some(Mutation::LeaseIsRecordTtl), Write::Renew { lock_ttl, record_ttl }) => {
                *lock_ttl = *record_ttl;
            }
            (Some(Mutation::ReleaseOnClientGone), Write::Fail { reason: Reason::ClientGone, .. }) => {
                write = Write::Release;
            }
            (Some(Mutation::FailureForgotten), Write::Fail { .. }) => return Ok(WriteReply::Applied),
            (Some(_) | None, _) => {}
        }
        self.store(worker).write(&hold, &write, now)
    }

    /// Carries out what an exchange asked for.
    pub fn carry_out(&mut self, worker: usize, asked: &Asked, now: Timestamp) -> StoreAnswer {
        match asked {
            Asked::Claim(claim) => StoreAnswer::Claim(self.claim(worker, claim, now)),
            Asked::Renew(hold, write) => StoreAnswer::Renew(self.write(worker, hold, write, now)),
            Asked::End(hold, write) => StoreAnswer::End(self.write(worker, hold, write, now)),
        }
    }

    /// Whether two operations can meet inside of the store.
    pub const fn can_race(&self) -> bool {
        matches!(self.kind, Kind::Table { .. }) && matches!(self.mutation, None | Some(Mutation::CasNone))
    }

    /// Runs `outer`, and `inner` before the given step of it, or after it where it has fewer.
    pub fn race(
        &mut self,
        step: usize,
        (outer_worker, outer): (usize, &Asked),
        (inner_worker, inner): (usize, &Asked),
        now: Timestamp,
    ) -> (StoreAnswer, StoreAnswer) {
        let Kind::Table { handles } = &mut self.kind else { panic!("only tables race") };
        assert_ne!(outer_worker, inner_worker, "a worker is one thread");
        let table = handles[inner_worker].1.take().expect("it is not racing");
        let inner_run = Rc::new(RefCell::new((table, None)));
        let (fake, table) = &mut handles[outer_worker];
        let (hooked, asked) = (Rc::clone(&inner_run), inner.clone());
        let mut number = 0;
        fake.before_each_step(move |_, _| {
            if number == step {
                let (table, answer) = &mut *hooked.borrow_mut();
                *answer = Some(on(table, &asked, now));
            }
            number += 1;
        });
        let first = on(table.as_mut().expect("it is not racing"), outer, now);
        fake.reset();
        let (mut table, second) = Rc::into_inner(inner_run).expect("the hook is gone").into_inner();
        let second = second.unwrap_or_else(|| on(&mut table, inner, now));
        handles[inner_worker].1 = Some(table);
        (first, second)
    }

    fn store(&mut self, worker: usize) -> &mut dyn Store {
        match &mut self.kind {
            Kind::Reference(store) => store,
            Kind::Table { handles } => handles[worker].1.as_mut().expect("not racing"),
        }
    }
}

fn on(store: &mut dyn Store, asked: &Asked, now: Timestamp) -> StoreAnswer {
    match asked {
        Asked::Claim(claim) => StoreAnswer::Claim(store.claim(claim, now)),
        Asked::Renew(hold, write) => StoreAnswer::Renew(store.write(hold, write, now)),
        Asked::End(hold, write) => StoreAnswer::End(store.write(hold, write, now)),
    }
}

fn config() -> SharedDataConfig {
    SharedDataConfig { namespace: None, max_records: 64, max_bytes: 16 << 20, when_full: WhenFull::Reject }
}
