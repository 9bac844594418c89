//! Writes that a store did not take: kept, and tried again until they are applied or stale.
//!
//! A failed store write never frees its claim, so its lease is renewed meanwhile. Memory is bounded: over the byte
//! limit a response degrades to a tombstone; over the entry limit a write is dropped and counted, and its claim ends
//! by its lease. What is left when a root goes is [`spilled`](Outbox::spill) for another root of the same store.

mod spill;

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use super::{Hold, Store, StoreError, Write, WriteReply};
use crate::clock::Timestamp;
use crate::config::Rule;
use crate::metrics::Counter;
use crate::record::Reason;
use crate::record::codec::{ResponseEncoder, StoredResponse};
use crate::reply::replay::is_kept_by_tombstones;

const MAX_ENTRIES: usize = 16_384;
/// A lease of next to nothing must not keep its write from being tried.
const SHORTEST_RENEWAL: Duration = Duration::from_millis(1);
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Names an entry while an operation of its is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EntryId(u64);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    hold: Hold,
    write: Write,
    lock_ttl: Duration,
    record_ttl: Duration,
    next_try: Timestamp,
    pause: Duration,
    renew_at: Timestamp,
    give_up: Timestamp,
    out: Out,
}

/// How long an entry's claim is held, its record kept, and its write tried.
struct Terms {
    lock_ttl: Duration,
    record_ttl: Duration,
    give_up: Timestamp,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Out {
    Nothing,
    Write,
    Renewal,
}

/// The writes of one worker that are still to be applied.
#[derive(Debug)]
pub struct Outbox {
    entries: BTreeMap<EntryId, Entry>,
    /// The entries that nothing is out of, by the moment at which they are due: looking at each of them for one would
    /// make a full outbox cost its length squared.
    due: BTreeSet<(Timestamp, EntryId)>,
    next_id: u64,
    bytes: u64,
    max_bytes: u64,
}

impl Outbox {
    /// An empty outbox that holds at most `max_bytes` of responses.
    #[must_use]
    pub const fn new(max_bytes: u64) -> Self {
        Self { entries: BTreeMap::new(), due: BTreeSet::new(), next_id: 0, bytes: 0, max_bytes }
    }

    /// How many writes wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Takes a write. What it counts goes to `count`. Over the entry limit it is dropped: the claim then ends by its
    /// lease.
    pub fn push(
        &mut self,
        hold: Hold,
        write: Write,
        rule: &Rc<Rule>,
        now: Timestamp,
        count: &mut dyn FnMut(Counter),
    ) {
        let (lock_ttl, record_ttl) = (rule.lock_ttl, rule.record_ttl);
        let terms = Terms { lock_ttl, record_ttl, give_up: now.after(record_ttl) };
        self.insert(hold, write, &terms, now, count);
    }

    fn insert(
        &mut self,
        hold: Hold,
        write: Write,
        terms: &Terms,
        now: Timestamp,
        count: &mut dyn FnMut(Counter),
    ) {
        if self.entries.len() >= MAX_ENTRIES {
            count(Counter::OutboxDropped);
            return;
        }
        let write = self.fit(write, count);
        self.bytes = self.bytes.saturating_add(held_bytes(&write));
        count(Counter::OutboxQueued);
        let entry = Entry {
            hold,
            write,
            lock_ttl: terms.lock_ttl,
            record_ttl: terms.record_ttl,
            next_try: now,
            pause: FIRST_PAUSE,
            renew_at: now.after(terms.lock_ttl / 3),
            give_up: terms.give_up,
            out: Out::Nothing,
        };
        let id = EntryId(self.next_id);
        self.due.insert((entry.due_at(), id));
        self.entries.insert(id, entry);
        self.next_id = self.next_id.wrapping_add(1);
    }

    /// The next operation that is due; it is out from then on, until [`Self::settle`].
    pub fn take_due(&mut self, now: Timestamp) -> Option<(EntryId, Hold, Write)> {
        let (due_at, id) = self.due.first().copied().filter(|(due_at, _)| *due_at <= now)?;
        self.due.remove(&(due_at, id));
        let entry = self.entries.get_mut(&id)?;
        // A write that fails every time must not starve its lease.
        let write = if entry.needs_renewal(now) {
            entry.out = Out::Renewal;
            Write::Renew { lock_ttl: entry.lock_ttl, record_ttl: entry.record_ttl }
        } else {
            entry.out = Out::Write;
            entry.write.clone()
        };
        Some((id, entry.hold, write))
    }

    /// What came of an operation that [`Self::take_due`] gave out.
    pub fn settle(
        &mut self,
        id: EntryId,
        answer: Result<WriteReply, StoreError>,
        now: Timestamp,
        count: &mut dyn FnMut(Counter),
    ) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        self.due.remove(&(entry.due_at(), id));
        let renewal = entry.out == Out::Renewal;
        entry.out = Out::Nothing;
        match answer {
            Ok(WriteReply::Stale) => {
                count(Counter::StaleWrites);
                return self.forget(id);
            }
            Ok(WriteReply::Applied | WriteReply::AppliedAsTombstone) if renewal => {
                entry.renew_at = now.after((entry.lock_ttl / 3).max(SHORTEST_RENEWAL));
            }
            Ok(WriteReply::Applied) => return self.forget(id),
            Ok(WriteReply::AppliedAsTombstone) => {
                count(Counter::Tombstones);
                return self.forget(id);
            }
            Err(_) if now >= entry.give_up => {
                count(Counter::OutboxDropped);
                return self.forget(id);
            }
            Err(_) if renewal => {
                count(Counter::StoreErrors);
                entry.renew_at = now.after(entry.pause);
            }
            Err(_) => {
                count(Counter::StoreErrors);
                entry.next_try = now.after(entry.pause);
                entry.pause = entry.pause.saturating_mul(2).min(LONGEST_PAUSE);
            }
        }
        self.due.insert((entry.due_at(), id));
    }

    /// Makes every write due: there will be no later.
    pub fn hurry(&mut self, now: Timestamp) {
        for entry in self.entries.values_mut() {
            entry.next_try = now;
            entry.renew_at = now.after(entry.lock_ttl);
        }
        let waiting = self.entries.iter().filter(|(_, entry)| entry.out == Out::Nothing);
        self.due = waiting.map(|(id, entry)| (entry.due_at(), *id)).collect();
    }

    /// Tries every write that is due, on a store that answers at once.
    pub fn flush(&mut self, store: &mut dyn Store, now: Timestamp, count: &mut dyn FnMut(Counter)) {
        for _ in 0..self.entries.len().saturating_mul(2) {
            let Some((id, hold, write)) = self.take_due(now) else { return };
            let answer = store.write(&hold, &write, now);
            self.settle(id, answer, now, count);
        }
    }

    fn forget(&mut self, id: EntryId) {
        if let Some(entry) = self.entries.remove(&id) {
            self.due.remove(&(entry.due_at(), id));
            self.bytes = self.bytes.saturating_sub(held_bytes(&entry.write));
        }
    }

    fn fit(&self, write: Write, count: &mut dyn FnMut(Counter)) -> Write {
        let fits = self.bytes.saturating_add(held_bytes(&write)) <= self.max_bytes;
        match write {
            Write::Complete { response, record_ttl } if !fits => {
                count(Counter::Tombstones);
                let tombstone = StoredResponse::decode(&response).ok().and_then(|stored| {
                    let lines =
                        stored.headers.iter().copied().filter(|(name, _)| is_kept_by_tombstones(name));
                    ResponseEncoder::tombstone(stored.status, lines)
                });
                let tombstone = tombstone.unwrap_or_default();
                if self.bytes.saturating_add(tombstone.len() as u64) > self.max_bytes {
                    return Write::Fail { reason: Reason::Truncated, failed_ttl: record_ttl };
                }
                Write::Complete { response: Rc::from(tombstone), record_ttl }
            }
            write @ (Write::Complete { .. } | Write::Renew { .. } | Write::Fail { .. } | Write::Release) => {
                write
            }
        }
    }
}

impl Entry {
    /// When there is something to do for it.
    fn due_at(&self) -> Timestamp {
        if self.write == Write::Release { self.next_try } else { self.next_try.min(self.renew_at) }
    }

    fn needs_renewal(&self, now: Timestamp) -> bool {
        self.renew_at <= now && self.write != Write::Release
    }
}

fn held_bytes(write: &Write) -> u64 {
    match write {
        Write::Complete { response, .. } => response.len() as u64,
        Write::Renew { .. } | Write::Fail { .. } | Write::Release => 0,
    }
}
