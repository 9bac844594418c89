//! What an outbox leaves behind when its root goes, as bytes that another root of the same store takes over.
//!
//! ```text
//! version u8 = 1 | per entry: length u32, then key 32, owner 16, fingerprint 32, attempt u32,
//! lock_ttl ms u64, record_ttl ms u64, remaining ms u64, kind u8, reason u8, ttl ms u64, response
//! ```
//! Times are durations, since the clocks of two roots may not be the same.

use std::rc::Rc;
use std::time::Duration;

use super::{Outbox, Terms};
use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::key::StoreKey;
use crate::metrics::Counter;
use crate::record::{Owner, Reason};
use crate::store::{Hold, Write};

const VERSION: u8 = 1;
const COMPLETE: u8 = 1;
const FAIL: u8 = 2;
const RELEASE: u8 = 3;

impl Outbox {
    /// Takes everything out, as bytes, at most `max_bytes` of them. What does not fit is counted as dropped.
    /// `None` when there is nothing.
    pub fn spill(
        &mut self,
        max_bytes: usize,
        now: Timestamp,
        count: &mut dyn FnMut(Counter),
    ) -> Option<Vec<u8>> {
        if self.is_empty() {
            return None;
        }
        let mut bytes = vec![VERSION];
        for entry in std::mem::take(&mut self.entries).into_values() {
            let remaining = entry.give_up.since(now);
            let encoded = encode(&entry.hold, &entry.write, entry.lock_ttl, entry.record_ttl, remaining);
            match u32::try_from(encoded.len()) {
                Ok(length) if bytes.len().saturating_add(encoded.len()).saturating_add(4) <= max_bytes => {
                    bytes.extend_from_slice(&length.to_le_bytes());
                    bytes.extend_from_slice(&encoded);
                    count(Counter::OutboxSpilled);
                }
                Ok(_) | Err(_) => count(Counter::OutboxDropped),
            }
        }
        self.due.clear();
        self.bytes = 0;
        Some(bytes)
    }

    /// Takes over what another outbox spilled. Bytes that can't be read are left out.
    pub fn adopt(&mut self, bytes: &[u8], now: Timestamp, count: &mut dyn FnMut(Counter)) {
        let mut reader = Reader(bytes);
        if reader.array::<1>() != Some(&[VERSION]) {
            return;
        }
        while let Some(length) = reader.array::<4>() {
            let Some(encoded) = reader.take(u32::from_le_bytes(*length) as usize) else { return };
            if let Some(entry) = decode(encoded) {
                let give_up = now.after(entry.remaining.min(entry.record_ttl));
                let terms = Terms { lock_ttl: entry.lock_ttl, record_ttl: entry.record_ttl, give_up };
                self.insert(entry.hold, entry.write, &terms, now, count);
            }
        }
    }
}

struct Spilled {
    hold: Hold,
    write: Write,
    lock_ttl: Duration,
    record_ttl: Duration,
    remaining: Duration,
}

fn encode(
    hold: &Hold,
    write: &Write,
    lock_ttl: Duration,
    record_ttl: Duration,
    remaining: Duration,
) -> Vec<u8> {
    let nothing: &[u8] = &[];
    let (kind, reason, ttl, response) = match write {
        Write::Complete { response, record_ttl } => (COMPLETE, 0, *record_ttl, response.as_ref()),
        Write::Fail { reason, failed_ttl } => (FAIL, reason.code(), *failed_ttl, nothing),
        Write::Release | Write::Renew { .. } => (RELEASE, 0, Duration::ZERO, nothing),
    };
    let mut bytes = Vec::with_capacity(128 + response.len());
    bytes.extend_from_slice(hold.key.bytes());
    bytes.extend_from_slice(hold.owner.bytes());
    bytes.extend_from_slice(hold.fingerprint.bytes());
    bytes.extend_from_slice(&hold.attempt.to_le_bytes());
    for duration in [lock_ttl, record_ttl, remaining] {
        bytes.extend_from_slice(&millis(duration).to_le_bytes());
    }
    bytes.extend_from_slice(&[kind, reason]);
    bytes.extend_from_slice(&millis(ttl).to_le_bytes());
    bytes.extend_from_slice(response);
    bytes
}

fn decode(bytes: &[u8]) -> Option<Spilled> {
    let mut reader = Reader(bytes);
    let key = StoreKey::from_bytes(*reader.array()?);
    let owner = Owner::from_bytes(*reader.array()?);
    let fingerprint = Fingerprint::from_bytes(*reader.array()?);
    let attempt = u32::from_le_bytes(*reader.array()?);
    let lock_ttl = reader.duration()?;
    let record_ttl = reader.duration()?;
    let remaining = reader.duration()?;
    let [kind, reason] = *reader.array::<2>()?;
    let ttl = reader.duration()?;
    let write = match kind {
        COMPLETE => Write::Complete { response: Rc::from(reader.0), record_ttl: ttl },
        FAIL => Write::Fail { reason: Reason::from_code(reason)?, failed_ttl: ttl },
        RELEASE => Write::Release,
        _ => return None,
    };
    Some(Spilled { hold: Hold { key, owner, fingerprint, attempt }, write, lock_ttl, record_ttl, remaining })
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(length)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(head)
    }

    fn duration(&mut self) -> Option<Duration> {
        Some(Duration::from_millis(u64::from_le_bytes(*self.array()?)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::EntryId;
    use super::*;
    use crate::policy::fixture;
    use crate::record::codec::ResponseEncoder;

    fn hold(byte: u8) -> Hold {
        Hold {
            key: StoreKey::from_bytes([byte; 32]),
            owner: Owner::from_bytes([byte; 16]),
            fingerprint: Fingerprint::from_bytes([byte; 32]),
            attempt: u32::from(byte),
        }
    }

    #[test]
    fn what_is_spilled_is_what_is_adopted() {
        let rule = Rc::new(fixture::rule());
        let now = Timestamp::from_millis(5_000);
        let response: Rc<[u8]> = Rc::from(ResponseEncoder::tombstone(201, []).unwrap());
        let record_ttl = Duration::from_secs(60);
        let writes = [
            Write::Complete { response, record_ttl },
            Write::Fail { reason: Reason::ClientGone, failed_ttl: record_ttl },
            Write::Release,
        ];
        let mut left = Outbox::new(1 << 20);
        for (index, write) in (1..).zip(&writes) {
            left.push(hold(index), write.clone(), &rule, now, &mut |_| {});
        }
        let mut spilled = 0;
        let bytes = left
            .spill(1 << 20, now, &mut |counter| spilled += u32::from(counter == Counter::OutboxSpilled))
            .unwrap();
        assert_eq!((spilled, left.len()), (3, 0));
        let mut taken = Outbox::new(1 << 20);
        taken.adopt(&bytes, now, &mut |_| {});
        let mut seen = Vec::new();
        while let Some((_, hold, write)) = taken.take_due(now) {
            seen.push((hold, write));
        }
        assert_eq!(seen, (1..).map(hold).zip(writes).collect::<Vec<_>>());
    }

    /// The renewal says how long the record is kept: with the time that is left for trying, a claim that nobody may
    /// take over would be forgotten with its lease.
    #[test]
    fn an_adopted_claim_is_renewed_for_as_long_as_before() {
        let rule = Rc::new(fixture::rule());
        let (lock_ttl, record_ttl) = (rule.lock_ttl, rule.record_ttl);
        let now = Timestamp::from_millis(5_000);
        let mut left = Outbox::new(1 << 20);
        let fail = Write::Fail { reason: Reason::Timeout, failed_ttl: record_ttl };
        left.push(hold(1), fail.clone(), &rule, now, &mut |_| {});
        let late = now.after(record_ttl).as_millis() - 10_000;
        let bytes = left.spill(1 << 20, Timestamp::from_millis(late), &mut |_| {}).unwrap();

        let mut taken = Outbox::new(1 << 20);
        let now = Timestamp::from_millis(77);
        taken.adopt(&bytes, now, &mut |_| {});
        let due = now.after(lock_ttl / 3);
        assert_eq!(taken.take_due(due), Some((EntryId(0), hold(1), Write::Renew { lock_ttl, record_ttl })));
        taken.settle(EntryId(0), Err(crate::store::StoreError::Unavailable), due, &mut |_| {});
        assert!(taken.is_empty(), "its time is over as it was before");
    }

    #[test]
    fn what_does_not_fit_is_counted() {
        let rule = Rc::new(fixture::rule());
        let now = Timestamp::from_millis(5_000);
        let mut left = Outbox::new(1 << 20);
        for index in 1..=3 {
            left.push(hold(index), Write::Release, &rule, now, &mut |_| {});
        }
        let mut dropped = 0;
        let bytes = left
            .spill(200, now, &mut |counter| dropped += u32::from(counter == Counter::OutboxDropped))
            .unwrap();
        assert!(bytes.len() <= 200);
        assert_eq!(dropped, 2);
    }

    proptest! {
        #[test]
        fn any_bytes_are_adopted_or_left_out(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            Outbox::new(1 << 20).adopt(&bytes, Timestamp::from_millis(1), &mut |_| {});
        }
    }
}
