//! Room for bodies: reservations in the ledgers, and the sweeps that find or make room when there is none.

use std::time::Duration;

use super::cas::{Cas, Seen, Slot};
use super::entry::Kept;
use super::ledger::{Ledger, Settlement};
use super::table::{Loaded, load, swap};
use super::{SharedDataStore, TRIES};
use crate::clock::Timestamp;
use crate::config::WhenFull;
use crate::record::RecordState;
use crate::store::StoreError;

/// Buckets that one sweep looks at.
const SWEEP_BUCKETS: u32 = 64;
/// How often a sweep of one bucket begins anew before it leaves it alone.
const SWEEP_TRIES: u32 = 8;
/// Time between two sweeps of a group for expired records, or a full table would sweep at each response.
const SWEEP_INTERVAL: Duration = Duration::from_millis(100);

/// How far this worker's sweeps of a group have come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GroupSweep {
    next: u32,
    last: Option<Timestamp>,
}

/// What a sweep is to find.
#[derive(Debug, Clone, Copy)]
enum Sweep {
    /// Expired records and leaks.
    Expired,
    /// That, and so many bytes more, from the oldest bodies.
    Oldest { bytes: u64 },
}

impl<C: Cas> SharedDataStore<C> {
    /// Reserves room in a bucket's group; with `make_room`, what may go for it does.
    pub(super) fn reserve(&mut self, bucket: u32, bytes: u32, now: Timestamp, make_room: bool) -> bool {
        let group = self.geometry.group_of(bucket);
        // A ledger that can't be read or written gives no room: a tombstone is the safe end.
        if u64::from(bytes) > self.group_budget {
            return false;
        }
        if self.try_reserve(bucket, bytes, now).unwrap_or(false) {
            return true;
        }
        if !make_room {
            return false;
        }
        if self.sweep_is_due(group, now) {
            self.sweep(group, bucket, now, Sweep::Expired);
            if self.try_reserve(bucket, bytes, now).unwrap_or(false) {
                return true;
            }
        }
        if self.when_full == WhenFull::EvictCompleted
            && let Ok((ledger, _)) = self.load_ledger(group)
        {
            let missing = ledger.total().saturating_add(u64::from(bytes)).saturating_sub(self.group_budget);
            self.sweep(group, bucket, now, Sweep::Oldest { bytes: missing });
            return self.try_reserve(bucket, bytes, now).unwrap_or(false);
        }
        false
    }

    fn try_reserve(&mut self, bucket: u32, bytes: u32, now: Timestamp) -> Result<bool, StoreError> {
        let group = self.geometry.group_of(bucket);
        let position = self.geometry.position_of(bucket);
        for _ in 0..TRIES {
            let (mut ledger, seen) = self.load_ledger(group)?;
            if !ledger.reserve(position, bytes, self.group_budget, now) {
                return Ok(false);
            }
            if swap(&self.cas, self.names.ledger(group), seen, ledger.bytes(), &mut self.events)? {
                return Ok(true);
            }
        }
        Err(StoreError::Unavailable)
    }

    /// Changes a bucket's account. If that fails, the bucket's next settlement or a sweep makes it good.
    pub(super) fn settle(&mut self, bucket: u32, settlement: Settlement, now: Timestamp) {
        self.settle_all(self.geometry.group_of(bucket), &[(bucket, settlement)], now);
    }

    fn settle_all(&mut self, group: u32, settlements: &[(u32, Settlement)], now: Timestamp) {
        for _ in 0..TRIES {
            let Ok((mut ledger, seen)) = self.load_ledger(group) else { return };
            for (bucket, settlement) in settlements {
                ledger.settle(self.geometry.position_of(*bucket), settlement, now);
            }
            let name = self.names.ledger(group);
            if !matches!(swap(&self.cas, name, seen, ledger.bytes(), &mut self.events), Ok(false)) {
                return;
            }
        }
    }

    fn load_ledger(&mut self, group: u32) -> Result<(Ledger, Seen), StoreError> {
        let slot = load(&self.cas, self.names.ledger(group))?;
        let seen = slot.seen();
        let buckets = self.geometry.buckets_in(group);
        let ledger = match slot {
            Slot::Absent => Ledger::unwritten(buckets),
            Slot::Emptied { .. } => return Err(StoreError::Unreadable),
            Slot::Present { bytes, .. } => Ledger::read(bytes, buckets).ok_or(StoreError::Unreadable)?,
        };
        Ok((ledger, seen))
    }

    fn sweep_is_due(&mut self, group: u32, now: Timestamp) -> bool {
        let Some(sweep) = self.sweeps.get_mut(group as usize) else { return false };
        let due = sweep.last.is_none_or(|last| now.since(last) >= SWEEP_INTERVAL);
        if due {
            sweep.last = Some(now);
        }
        due
    }

    /// Looks through the bucket at hand and then through the next of its group, from where the last sweep ended.
    fn sweep(&mut self, group: u32, first: u32, now: Timestamp, sweep: Sweep) {
        let Ok((ledger, _)) = self.load_ledger(group) else { return };
        let buckets = self.geometry.buckets_in(group);
        let mut settlements = Vec::new();
        let mut freed: u64 = 0;
        for step in 0..=buckets.min(SWEEP_BUCKETS) {
            let wanted = match sweep {
                Sweep::Expired => 0,
                Sweep::Oldest { bytes } => bytes.saturating_sub(freed),
            };
            if wanted == 0 && matches!(sweep, Sweep::Oldest { .. }) {
                break;
            }
            let bucket = if step == 0 { first } else { self.next_to_sweep(group, buckets) };
            let leaked = ledger.leaked(self.geometry.position_of(bucket), now);
            // A bucket that can't be read or won keeps what it has.
            if let Ok(Some((settlement, bytes))) = self.sweep_bucket(bucket, now, wanted, leaked) {
                settlements.push((bucket, settlement));
                freed = freed.saturating_add(bytes);
            }
        }
        if !settlements.is_empty() {
            self.settle_all(group, &settlements, now);
        }
    }

    fn next_to_sweep(&mut self, group: u32, buckets: u32) -> u32 {
        let Some(sweep) = self.sweeps.get_mut(group as usize) else { return group };
        let position = sweep.next.checked_rem(buckets).unwrap_or(0);
        sweep.next = position.wrapping_add(1);
        self.geometry.bucket_at(group, position)
    }

    /// Drops what is expired, and of the oldest bodies `wanted` bytes: what the bucket's account is then, and how
    /// much its bodies became less.
    fn sweep_bucket(
        &mut self,
        index: u32,
        now: Timestamp,
        wanted: u64,
        leaked: u32,
    ) -> Result<Option<(Settlement, u64)>, StoreError> {
        for _ in 0..SWEEP_TRIES {
            let mut loaded = self.load_bucket(index)?;
            if leaked > 0 {
                // The VM may have trapped after it wrote a slot.
                loaded.leftovers.extend(0..self.geometry.ways());
            }
            let records = loaded.bucket.len();
            self.drop_expired(index, &mut loaded, now);
            let evicted = self.evict_bodies(index, &mut loaded, wanted);
            let used = loaded.bucket.body_bytes();
            let freed = loaded.body_bytes.saturating_sub(used);
            if evicted == 0 && leaked == 0 && loaded.bucket.len() == records {
                let used = Some((used, loaded.bucket.version()));
                return Ok(Some((Settlement { used, unreserved: 0, leaked }, freed)));
            }
            if self.swap_unsettled(index, &mut loaded)? {
                self.events.evicted_bodies = self.events.evicted_bodies.saturating_add(evicted);
                let used = Some((used, loaded.bucket.next_version()));
                return Ok(Some((Settlement { used, unreserved: 0, leaked }, freed)));
            }
        }
        Ok(None)
    }

    /// Makes tombstones of the bucket's oldest bodies until `wanted` bytes are free; says of how many.
    ///
    /// Their records stay: the keys are not run again, and retries hear that the response was not kept.
    fn evict_bodies(&mut self, index: u32, loaded: &mut Loaded, wanted: u64) -> u64 {
        let mut evicted = 0;
        while loaded.body_bytes.saturating_sub(loaded.bucket.body_bytes()) < wanted {
            let bodies = loaded.bucket.entries().filter(|(_, entry)| entry.body_mark().is_some());
            let Some((at, mut entry)) = bodies.min_by_key(|(_, entry)| entry.record.created) else { break };
            self.clear_body(index, &entry);
            if let RecordState::Completed { response } = &mut entry.record.state {
                *response = Kept::Status(response.status());
            }
            loaded.bucket.put(at, &entry);
            evicted += 1;
        }
        evicted
    }
}
