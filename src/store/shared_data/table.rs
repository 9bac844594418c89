//! The steps that operations are made of: a bucket is loaded, changed and swapped, and what goes empties its slot.

use super::body::{self, BodyMark};
use super::bucket::Bucket;
use super::cas::{Cas, CasError, Seen, Slot};
use super::entry::{Entry, Kept};
use super::geometry::Geometry;
use super::ledger::Settlement;
use super::{SharedDataStore, StoreEvents};
use crate::clock::Timestamp;
use crate::config::WhenFull;
use crate::fingerprint::FINGERPRINT_VERSION;
use crate::key::StoreKey;
use crate::record::codec::ResponseEncoder;
use crate::record::{Owner, Record, RecordState};
use crate::store::StoreError;

/// Where a key's record is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) bucket: u32,
    pub(super) tag: [u8; 16],
}

impl Place {
    pub(super) fn of(key: &StoreKey, geometry: &Geometry) -> Self {
        Self { bucket: geometry.bucket_of(key), tag: key.tag() }
    }
}

/// A bucket as it was found.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) bucket: Bucket,
    pub(super) seen: Seen,
    /// What its slots held.
    pub(super) body_bytes: u64,
    /// Slots that may hold bytes which were never published, to be emptied once the bucket is swapped.
    pub(super) leftovers: Vec<u8>,
}

/// Where a record is seated.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seat {
    at: usize,
    pub(super) slot: u8,
    /// How many records went to make room for it.
    evicted: u64,
}

impl<C: Cas> SharedDataStore<C> {
    /// Puts a record in its place, or in a new one; `false` if another's write came first.
    pub(super) fn put(
        &mut self,
        place: &Place,
        mut loaded: Loaded,
        record: Record<Kept>,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        self.drop_expired(place.bucket, &mut loaded, now);
        let seat = self.seat(place, &mut loaded.bucket, &record.owner)?;
        self.publish(place, loaded, &seat, record, 0, now)
    }

    /// Takes a record out; `false` if another's write came first.
    pub(super) fn take_out(
        &mut self,
        place: &Place,
        mut loaded: Loaded,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        self.drop_expired(place.bucket, &mut loaded, now);
        if let Some((at, entry)) = loaded.bucket.find(&place.tag) {
            loaded.leftovers.push(entry.slot);
            loaded.bucket.remove(at);
        }
        self.swap_bucket(place.bucket, loaded, 0, now)
    }

    /// Where the record is, or a new place for it.
    pub(super) fn seat(
        &mut self,
        place: &Place,
        bucket: &mut Bucket,
        owner: &Owner,
    ) -> Result<Seat, StoreError> {
        if let Some((at, entry)) = bucket.find(&place.tag) {
            return Ok(Seat { at, slot: entry.slot, evicted: 0 });
        }
        let mut evicted = 0;
        if bucket.len() >= usize::from(self.geometry.ways()) {
            let oldest = oldest_completed(bucket).filter(|_| self.when_full == WhenFull::EvictCompleted);
            let (at, entry) = oldest.ok_or(StoreError::Full)?;
            self.clear_body(place.bucket, &entry);
            bucket.remove(at);
            evicted = 1;
        }
        // A random start: two workers that write a lost record anew don't meet in one slot.
        let [start, ..] = *owner.bytes();
        let slot = bucket.free_slot(self.geometry.ways(), start).ok_or(StoreError::Full)?;
        Ok(Seat { at: bucket.len(), slot, evicted })
    }

    /// Publishes a record in its seat; `false` if another's write came first.
    pub(super) fn publish(
        &mut self,
        place: &Place,
        mut loaded: Loaded,
        seat: &Seat,
        record: Record<Kept>,
        unreserved: u32,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let entry =
            Entry { tag: place.tag, slot: seat.slot, fingerprint_version: FINGERPRINT_VERSION, record };
        loaded.bucket.put(seat.at, &entry);
        let swapped = self.swap_bucket(place.bucket, loaded, unreserved, now)?;
        if swapped {
            self.events.evictions = self.events.evictions.saturating_add(seat.evicted);
        }
        Ok(swapped)
    }

    /// Takes the bucket's expired records out, their bodies first.
    pub(super) fn drop_expired(&mut self, index: u32, loaded: &mut Loaded, now: Timestamp) {
        let mut from = 0;
        while let Some((at, entry)) = loaded.bucket.next_expired(from, now) {
            match entry.record.state {
                RecordState::InFlight { .. } => loaded.leftovers.push(entry.slot),
                RecordState::Completed { .. } | RecordState::Failed { .. } => self.clear_body(index, &entry),
            }
            loaded.bucket.remove(at);
            from = at;
        }
    }

    /// Empties the slot of an entry that goes, or whose body does.
    pub(super) fn clear_body(&mut self, bucket: u32, entry: &Entry) {
        if let Some(mark) = entry.body_mark() {
            clear_if(&self.cas, self.names.slot(bucket, entry.slot), |found| *found == mark);
        }
    }

    /// Empties a slot of what was written for this version of the bucket or an earlier one, and is not published.
    ///
    /// Once the bucket has this version, nobody can publish it any more.
    fn clear_leftovers(&mut self, index: u32, slot: u8, bucket: &Bucket, version: u64) {
        let mut entries = bucket.entries().filter(|(_, entry)| entry.slot == slot);
        let published = entries.find_map(|(_, entry)| entry.body_mark());
        clear_if(&self.cas, self.names.slot(index, slot), |found| {
            found.generation <= version && Some(*found) != published
        });
    }

    pub(super) fn read_response(
        &mut self,
        place: &Place,
        entry: &Entry,
    ) -> Result<Option<Vec<u8>>, StoreError> {
        let Some(mark) = entry.body_mark() else { return status_only(entry).map(Some) };
        match load(&self.cas, self.names.slot(place.bucket, entry.slot))? {
            Slot::Present { bytes, .. } => Ok(body::take_response(bytes, &mark)),
            Slot::Absent | Slot::Emptied { .. } => Ok(None),
        }
    }

    pub(super) fn load_bucket(&mut self, index: u32) -> Result<Loaded, StoreError> {
        let slot = load(&self.cas, self.names.bucket(index))?;
        let seen = slot.seen();
        let bucket = match slot {
            Slot::Absent => Bucket::unwritten(),
            // The table never empties a bucket: somebody else did, and its records are unknown.
            Slot::Emptied { .. } => return Err(StoreError::Unreadable),
            Slot::Present { bytes, .. } => Bucket::read(bytes, self.geometry.ways())?,
        };
        let body_bytes = bucket.body_bytes();
        Ok(Loaded { bucket, seen, body_bytes, leftovers: Vec::new() })
    }

    /// Swaps a bucket and settles what its slots hold; `false` if another's write came first.
    fn swap_bucket(
        &mut self,
        index: u32,
        mut loaded: Loaded,
        unreserved: u32,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        if !self.swap_unsettled(index, &mut loaded)? {
            return Ok(false);
        }
        let used = loaded.bucket.body_bytes();
        if used != loaded.body_bytes || unreserved > 0 {
            let used = Some((used, loaded.bucket.next_version()));
            self.settle(index, Settlement { used, unreserved, leaked: 0 }, now);
        }
        Ok(true)
    }

    /// Swaps a bucket and empties its leftovers; `false` if another's write came first.
    pub(super) fn swap_unsettled(&mut self, index: u32, loaded: &mut Loaded) -> Result<bool, StoreError> {
        let version = loaded.bucket.next_version();
        let name = self.names.bucket(index);
        if !swap(&self.cas, name, loaded.seen, loaded.bucket.seal(), &mut self.events)? {
            return Ok(false);
        }
        for slot in std::mem::take(&mut loaded.leftovers) {
            self.clear_leftovers(index, slot, &loaded.bucket, version);
        }
        Ok(true)
    }
}

/// The key's entry, unless its fingerprint can't be compared.
pub(super) fn find(bucket: &Bucket, place: &Place, now: Timestamp) -> Result<Option<Entry>, StoreError> {
    match bucket.find(&place.tag) {
        Some((_, entry))
            if now < entry.record.expires && entry.fingerprint_version != FINGERPRINT_VERSION =>
        {
            Err(StoreError::Unreadable)
        }
        Some((_, entry)) => Ok(Some(entry)),
        None => Ok(None),
    }
}

/// The bucket's oldest completed record.
fn oldest_completed(bucket: &Bucket) -> Option<(usize, Entry)> {
    let completed = bucket.entries().filter(|(_, entry)| match entry.record.state {
        RecordState::Completed { .. } => true,
        RecordState::InFlight { .. } | RecordState::Failed { .. } => false,
    });
    completed.min_by_key(|(_, entry)| entry.record.created)
}

pub(super) fn status_only(entry: &Entry) -> Result<Vec<u8>, StoreError> {
    let status = match &entry.record.state {
        RecordState::Completed { response } => response.status(),
        RecordState::InFlight { .. } | RecordState::Failed { .. } => return Err(StoreError::Unreadable),
    };
    ResponseEncoder::tombstone(status, []).ok_or(StoreError::Unreadable)
}

/// Empties a slot, if its mark is the one that is meant. If that fails, the entry's end or a sweep tries again.
pub(super) fn clear_if<C: Cas>(cas: &C, name: &str, meant: impl Fn(&BodyMark) -> bool) {
    if let Ok(Slot::Present { bytes, cas: version }) = cas.load(name)
        && BodyMark::read(&bytes).as_ref().is_some_and(meant)
    {
        let _ = cas.swap(name, Seen::Version(version), &[]);
    }
}

pub(super) fn load<C: Cas>(cas: &C, name: &str) -> Result<Slot, StoreError> {
    cas.load(name).map_err(|_| StoreError::Unavailable)
}

/// `false` if somebody else wrote since: that is counted.
pub(super) fn swap<C: Cas>(
    cas: &C,
    name: &str,
    seen: Seen,
    value: &[u8],
    events: &mut StoreEvents,
) -> Result<bool, StoreError> {
    match cas.swap(name, seen, value) {
        Ok(()) => Ok(true),
        Err(CasError::Lost) => {
            events.contentions = events.contentions.saturating_add(1);
            Ok(false)
        }
        Err(CasError::Host) => Err(StoreError::Unavailable),
    }
}
