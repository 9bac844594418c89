//! The embedded store: a bounded set-associative table over a map that knows compare-and-swap only.
//!
//! The host neither deletes nor expires, so the table uses a fixed number of names (see
//! [`Geometry::host_keys`]), each of them written by compare-and-swap:
//!
//! | name | value |
//! |---|---|
//! | `idem:<namespace>:geometry` | which table the namespace holds |
//! | `idem:<namespace>:<buckets>x<ways>:b<bucket>` | a bucket: its records, without their responses |
//! | `…:s<bucket>.<slot>` | a body slot: one record's response, and the mark that says whose it is |
//! | `…:l<group>` | a ledger: what the bodies of a group of buckets take |
//!
//! **A record is its bucket entry.** One swap of the bucket makes each operation; what happens before it can be
//! repeated, what happens after it can be lost. A record gets a slot with its claim, no other record of the
//! bucket has it, and it keeps it until it goes.
//!
//! **Complete** loads the bucket and picks the entry's slot; loads the slot; looks whether the bucket still is
//! that version; swaps the slot; swaps the bucket. The slot is seen *before* the bucket is known to say that the
//! writer owns it, so whoever publishes a body there later has changed the slot in between, and a stale owner's
//! swap is lost. **A replay** loads bucket, then slot, and takes the bytes only if their mark is the entry's (tag,
//! owner, generation, length, checksum). If not, it looks at the bucket again, and if that still says the same,
//! answers a tombstone with the entry's status.
//!
//! **What goes.** A body that is dropped (expired, evicted) is emptied first, then its entry changes: a VM that dies
//! in between leaves an entry without a body, never a body without an entry. Bytes that were never published are
//! emptied after the bucket was swapped: from then on, nobody can publish them.
//!
//! **Bytes.** `max_bytes` bounds the sum of all values: buckets, ledgers and the geometry count as if full
//! ([`Geometry::index_bytes`]), the rest is the bodies' budget, divided evenly over the groups. A body is reserved
//! in its group's ledger before it is written and settled after; what finds no room is kept as a tombstone. What a
//! VM that trapped had reserved is found by a sweep: it stays reserved for more than ten seconds on end, and an
//! operation takes microseconds. So the sum passes `max_bytes` only where a worker is stopped for ten seconds within
//! one operation and lives on, and then by the body it is saving, which counts as soon as it is saved. What the host
//! takes for a name and a map node, some 150 bytes for each of [`Geometry::host_keys`], comes on top.

mod body;
mod bucket;
pub mod cas;
mod complete;
mod entry;
mod geometry;
mod ledger;
mod names;
mod namespace;
mod room;
mod table;

use std::time::Duration;

pub use self::geometry::Geometry;
pub use self::namespace::OpenError;

use self::cas::Cas;
use self::entry::{Entry, Kept};
use self::names::Names;
use self::namespace::hold_namespace;
use self::room::GroupSweep;
use self::table::{Place, find, status_only};
use super::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};
use crate::clock::Timestamp;
use crate::config::{OnAbandoned, SharedDataConfig, WhenFull};
use crate::fingerprint::Fingerprint;
use crate::key::StoreKey;
use crate::record::{
    ClaimDecision, ClaimTerms, Record, RecordState, WriteDecision, decide_claim, decide_write, in_flight,
};

/// How often an operation begins anew because somebody else's came first. Each loss is another's success, so only
/// a broken host comes near.
const TRIES: u32 = 256;

/// What the table did beside answering, since it was last asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreEvents {
    /// Completed records that made room for new ones.
    pub evictions: u64,
    /// Bodies that made room for new ones; their records stay as tombstones.
    pub evicted_bodies: u64,
    /// Responses kept as tombstones because there was no room.
    pub tombstones: u64,
    /// Operations that began anew because another worker's came first.
    pub contentions: u64,
}

/// A table in a host's shared data.
#[derive(Debug)]
pub struct SharedDataStore<C> {
    cas: C,
    names: Names,
    geometry: Geometry,
    when_full: WhenFull,
    group_budget: u64,
    sweeps: Vec<GroupSweep>,
    events: StoreEvents,
}

impl<C: Cas> SharedDataStore<C> {
    /// Opens the namespace's table, and makes it if there is none.
    ///
    /// # Errors
    /// [`OpenError`]: above all, a known namespace with another geometry is never started empty.
    pub fn open(cas: C, namespace: &str, config: &SharedDataConfig) -> Result<Self, OpenError> {
        let geometry = Geometry::for_records(config.max_records);
        let budget = config.max_bytes.checked_sub(geometry.index_bytes()).filter(|budget| *budget > 0);
        let Some(budget) = budget else {
            return Err(OpenError::TooFewBytes {
                max_bytes: config.max_bytes,
                max_records: config.max_records,
                index_bytes: geometry.index_bytes(),
            });
        };
        hold_namespace(&cas, namespace, geometry, config.max_records)?;
        Ok(Self {
            cas,
            names: Names::of(namespace, &geometry),
            geometry,
            when_full: config.when_full,
            group_budget: budget / u64::from(geometry.groups().max(1)),
            sweeps: vec![GroupSweep::default(); geometry.groups() as usize],
            events: StoreEvents::default(),
        })
    }

    /// The table's shape.
    pub const fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes that the bodies of one group may take together; a longer response is always a tombstone.
    pub const fn group_budget(&self) -> u64 {
        self.group_budget
    }

    /// The fingerprint and the response of a completed record, if there is one that can be read. It changes nothing.
    pub fn peek(&mut self, key: &StoreKey, now: Timestamp) -> Option<(Fingerprint, Vec<u8>)> {
        let place = Place::of(key, &self.geometry);
        let bucket = self.load_bucket(place.bucket).ok()?.bucket;
        let entry = find(&bucket, &place, now).ok()?.filter(|entry| now < entry.record.expires)?;
        match &entry.record.state {
            RecordState::Completed { .. } => {
                let response = self.read_response(&place, &entry).ok()??;
                Some((entry.record.fingerprint, response))
            }
            RecordState::InFlight { .. } | RecordState::Failed { .. } => None,
        }
    }

    /// What happened since this was last called.
    pub fn take_events(&mut self) -> StoreEvents {
        std::mem::take(&mut self.events)
    }
}

impl<C: Cas> Store for SharedDataStore<C> {
    fn claim(&mut self, claim: &Claim, now: Timestamp) -> Result<ClaimReply, StoreError> {
        let place = Place::of(&claim.key, &self.geometry);
        let terms = &claim.terms;
        let mut doubted = None;
        for _ in 0..TRIES {
            let loaded = self.load_bucket(place.bucket)?;
            let found = find(&loaded.bucket, &place, now)?;
            match (decide_claim(found.as_ref().map(|entry| &entry.record), terms, now), found) {
                (ClaimDecision::Take { attempt }, _) => {
                    if self.put(&place, loaded, in_flight(terms, attempt, now), now)? {
                        return Ok(ClaimReply::Claimed { attempt });
                    }
                }
                (ClaimDecision::Own { attempt }, _) => return Ok(ClaimReply::Claimed { attempt }),
                (ClaimDecision::InFlight { elapsed, remaining }, Some(Entry { record, .. })) => {
                    return Ok(ClaimReply::InFlight { fingerprint: record.fingerprint, elapsed, remaining });
                }
                (ClaimDecision::Abandoned, Some(Entry { record, .. })) => {
                    return Ok(ClaimReply::Abandoned { fingerprint: record.fingerprint });
                }
                (ClaimDecision::Failed { reason }, Some(Entry { record, .. })) => {
                    return Ok(ClaimReply::Failed { fingerprint: record.fingerprint, reason });
                }
                (ClaimDecision::Completed, Some(entry)) => {
                    let response = match self.read_response(&place, &entry)? {
                        Some(response) => response,
                        // Somebody may have emptied the slot on the way to changing the entry.
                        None if doubted.as_ref() != Some(&entry) => {
                            doubted = Some(entry);
                            continue;
                        }
                        None => status_only(&entry)?,
                    };
                    return Ok(ClaimReply::Completed { fingerprint: entry.record.fingerprint, response });
                }
                // Only a claim that takes is decided over nothing.
                (
                    ClaimDecision::InFlight { .. }
                    | ClaimDecision::Abandoned
                    | ClaimDecision::Failed { .. }
                    | ClaimDecision::Completed,
                    None,
                ) => return Err(StoreError::Unreadable),
            }
        }
        Err(StoreError::Unavailable)
    }

    fn write(&mut self, hold: &Hold, write: &Write, now: Timestamp) -> Result<WriteReply, StoreError> {
        match write {
            Write::Complete { response, record_ttl } => self.complete(hold, response, *record_ttl, now),
            Write::Renew { .. } | Write::Fail { .. } | Write::Release => self.change(hold, write, now),
        }
    }
}

impl<C: Cas> SharedDataStore<C> {
    /// Every fenced operation that writes no response.
    fn change(&mut self, hold: &Hold, write: &Write, now: Timestamp) -> Result<WriteReply, StoreError> {
        let place = Place::of(&hold.key, &self.geometry);
        for _ in 0..TRIES {
            let mut loaded = self.load_bucket(place.bucket)?;
            let found = find(&loaded.bucket, &place, now)?;
            match decide_write(found.as_ref().map(|entry| &entry.record), &hold.owner, write.kind(), now) {
                WriteDecision::Apply => {}
                WriteDecision::AlreadyApplied => return Ok(WriteReply::Applied),
                WriteDecision::Stale => return Ok(WriteReply::Stale),
            }
            if let (Write::Fail { .. }, Some(entry)) = (write, &found) {
                // An attempt to complete may have left bytes there.
                loaded.leftovers.push(entry.slot);
            }
            let swapped = match changed(found.map(|entry| entry.record), hold, write, now) {
                Some(record) => self.put(&place, loaded, record, now)?,
                None => self.take_out(&place, loaded, now)?,
            };
            if swapped {
                return Ok(WriteReply::Applied);
            }
        }
        Err(StoreError::Unavailable)
    }
}

/// The record after an operation that may be applied; `None` if it goes.
fn changed(found: Option<Record<Kept>>, hold: &Hold, write: &Write, now: Timestamp) -> Option<Record<Kept>> {
    let live = found.filter(|record| now < record.expires);
    match write {
        Write::Renew { lock_ttl, record_ttl } => {
            let renewed = re_created(hold, *lock_ttl, *record_ttl, now);
            Some(match live {
                Some(record) => Record { expires: renewed.expires, state: renewed.state, ..record },
                None => renewed,
            })
        }
        Write::Fail { reason, failed_ttl } => {
            let record = live.unwrap_or_else(|| re_created(hold, Duration::ZERO, *failed_ttl, now));
            let state = RecordState::Failed { reason: *reason };
            Some(Record { state, expires: now.after(*failed_ttl), ..record })
        }
        // A response takes the way of `complete`, which knows what is kept of it.
        Write::Complete { .. } | Write::Release => None,
    }
}

/// The hold's record where it is gone from the table.
fn re_created(hold: &Hold, lock_ttl: Duration, record_ttl: Duration, now: Timestamp) -> Record<Kept> {
    let terms = ClaimTerms {
        owner: hold.owner,
        fingerprint: hold.fingerprint,
        lock_ttl,
        record_ttl,
        on_abandoned: OnAbandoned::Retain,
    };
    in_flight(&terms, hold.attempt, now)
}
