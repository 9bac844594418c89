//! Writes that a store did not take: kept, and tried again until they are applied or stale.
//!
//! A failed store write never frees its claim. Memory is bounded: over the byte limit a response degrades to a
//! tombstone; over the entry limit a write is dropped and counted, and its claim ends by its lease.

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use super::{Hold, Store, Write, WriteReply};
use crate::clock::Timestamp;
use crate::config::Rule;
use crate::metrics::Counter;
use crate::record::codec::{ResponseEncoder, StoredResponse};

const MAX_ENTRIES: usize = 16_384;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Entry {
    hold: Hold,
    write: Write,
    next_try: Timestamp,
    pause: Duration,
    give_up: Timestamp,
}

/// The writes of one worker that are still to be applied.
#[derive(Debug)]
pub struct Outbox {
    entries: VecDeque<Entry>,
    bytes: u64,
    max_bytes: u64,
}

impl Outbox {
    /// An empty outbox that holds at most `max_bytes` of responses.
    #[must_use]
    pub const fn new(max_bytes: u64) -> Self {
        Self { entries: VecDeque::new(), bytes: 0, max_bytes }
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

    /// Takes a write. What it counts goes to `count`.
    pub fn push(
        &mut self,
        hold: Hold,
        write: Write,
        rule: &Rc<Rule>,
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
        self.entries.push_back(Entry {
            hold,
            write,
            next_try: now,
            pause: FIRST_PAUSE,
            give_up: now.after(rule.record_ttl),
        });
    }

    /// Tries every write that is due.
    pub fn flush(&mut self, store: &mut dyn Store, now: Timestamp, count: &mut dyn FnMut(Counter)) {
        for _ in 0..self.entries.len() {
            let Some(mut entry) = self.entries.pop_front() else { return };
            if entry.next_try > now {
                self.entries.push_back(entry);
                continue;
            }
            match store.write(&entry.hold, &entry.write, now) {
                Ok(WriteReply::Applied) => self.forget(&entry),
                Ok(WriteReply::AppliedAsTombstone) => {
                    count(Counter::Tombstones);
                    self.forget(&entry);
                }
                Ok(WriteReply::Stale) => {
                    count(Counter::StaleWrites);
                    self.forget(&entry);
                }
                Err(_) if now >= entry.give_up => {
                    count(Counter::OutboxDropped);
                    self.forget(&entry);
                }
                Err(_) => {
                    count(Counter::StoreErrors);
                    entry.next_try = now.after(entry.pause);
                    entry.pause = entry.pause.saturating_mul(2).min(LONGEST_PAUSE);
                    self.entries.push_back(entry);
                }
            }
        }
    }

    fn forget(&mut self, entry: &Entry) {
        self.bytes = self.bytes.saturating_sub(held_bytes(&entry.write));
    }

    fn fit(&self, write: Write, count: &mut dyn FnMut(Counter)) -> Write {
        let fits = self.bytes.saturating_add(held_bytes(&write)) <= self.max_bytes;
        match write {
            Write::Complete { response, record_ttl } if !fits => {
                count(Counter::Tombstones);
                let status = StoredResponse::decode(&response).map_or(200, |stored| stored.status);
                let tombstone = ResponseEncoder::tombstone(status, []).unwrap_or_default();
                Write::Complete { response: Rc::from(tombstone), record_ttl }
            }
            write @ (Write::Complete { .. } | Write::Renew { .. } | Write::Fail { .. } | Write::Release) => {
                write
            }
        }
    }
}

fn held_bytes(write: &Write) -> u64 {
    match write {
        Write::Complete { response, .. } => response.len() as u64,
        Write::Renew { .. } | Write::Fail { .. } | Write::Release => 0,
    }
}
