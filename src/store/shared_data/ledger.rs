//! A group's ledger: what each of its buckets holds in body slots, and what is about to be written there.
//!
//! ```text
//! "IDL" | format u8 | per bucket: used u32 | version u32 | reserved u32 | floor u32 | since u32
//! ```
//! Numbers are little-endian. `used` is what the bucket said in the write that made `version` (its low 32 bits):
//! figures are absolute and the newest wins, so that a settlement that was lost is made good by the next one.
//!
//! `floor` is the least that was reserved at any time since the second `since`. Whoever saves a body reserves and
//! gives back within microseconds, so a floor that stands for [`LEAK_AFTER`] is what trapped VMs left behind.

use std::time::Duration;

use crate::clock::Timestamp;

/// Bytes of the header.
pub(super) const HEADER: usize = 4;
/// Bytes of one bucket's account.
pub(super) const ACCOUNT: usize = 20;
/// How long something is reserved before it is taken for a leak.
const LEAK_AFTER: Duration = Duration::from_secs(10);

const MAGIC: [u8; HEADER] = *b"IDL\x01";

/// What changes in a bucket's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settlement {
    /// What its entries' slots hold, and in which version of the bucket.
    pub(super) used: Option<(u64, u64)>,
    /// What the one who reserved it gives back.
    pub(super) unreserved: u32,
    /// What is taken back as a leak.
    pub(super) leaked: u32,
}

/// One bucket's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Account {
    used: u32,
    version: u32,
    reserved: u32,
    floor: u32,
    since: u32,
}

/// A ledger that was read, and is being changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ledger(Vec<u8>);

impl Ledger {
    /// A ledger that nobody has written.
    pub(super) fn unwritten(buckets: u32) -> Self {
        let mut bytes = vec![0; HEADER + buckets as usize * ACCOUNT];
        bytes.iter_mut().zip(MAGIC).for_each(|(to, from)| *to = from);
        Self(bytes)
    }

    /// Reads the value of a ledger over so many buckets.
    pub(super) fn read(bytes: Vec<u8>, buckets: u32) -> Option<Self> {
        (bytes.starts_with(&MAGIC) && bytes.len() == HEADER + buckets as usize * ACCOUNT)
            .then_some(Self(bytes))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Everything used and reserved in the group.
    pub(super) fn total(&self) -> u64 {
        let accounts = self.0.get(HEADER..).unwrap_or_default().as_chunks::<ACCOUNT>().0;
        accounts
            .iter()
            .map(Account::decode)
            .map(|account| u64::from(account.used) + u64::from(account.reserved))
            .sum()
    }

    /// What trapped VMs left reserved in a bucket.
    pub(super) fn leaked(&self, position: usize, now: Timestamp) -> u32 {
        let account = self.account(position);
        if account.is_settled_since(now) { account.floor } else { 0 }
    }

    /// Reserves room in a bucket, if the group stays within its budget.
    pub(super) fn reserve(&mut self, position: usize, bytes: u32, budget: u64, now: Timestamp) -> bool {
        let mut account = self.account(position);
        let Some(reserved) = account.reserved.checked_add(bytes) else { return false };
        if self.total().saturating_add(u64::from(bytes)) > budget {
            return false;
        }
        account.observe(now);
        account.reserved = reserved;
        self.put(position, account)
    }

    /// Changes a bucket's account.
    pub(super) fn settle(&mut self, position: usize, settlement: &Settlement, now: Timestamp) {
        let mut account = self.account(position);
        if let Some((used, version)) = settlement.used {
            // The low half is enough to tell which of two versions is newer: they lie close together.
            let version = version as u32;
            if version.wrapping_sub(account.version) < u32::MAX / 2 {
                account.version = version;
                account.used = u32::try_from(used).unwrap_or(u32::MAX);
            }
        }
        account.observe(now);
        account.reserved =
            account.reserved.saturating_sub(settlement.unreserved.saturating_add(settlement.leaked));
        account.floor = account.floor.saturating_sub(settlement.leaked).min(account.reserved);
        self.put(position, account);
    }

    fn account(&self, position: usize) -> Account {
        let rest = self.0.get(HEADER + position * ACCOUNT..).unwrap_or_default();
        rest.first_chunk().map(Account::decode).unwrap_or_default()
    }

    fn put(&mut self, position: usize, account: Account) -> bool {
        let rest = self.0.get_mut(HEADER + position * ACCOUNT..).unwrap_or_default();
        let place = rest.first_chunk_mut::<ACCOUNT>();
        place.map(|place| *place = account.encode()).is_some()
    }
}

impl Account {
    /// Whether the floor has stood long enough to mean something.
    fn is_settled_since(&self, now: Timestamp) -> bool {
        u64::from(seconds(now).wrapping_sub(self.since)) >= LEAK_AFTER.as_secs()
    }

    /// Begins to look for a floor anew where none was found.
    fn observe(&mut self, now: Timestamp) {
        if self.floor == 0 && self.is_settled_since(now) {
            self.floor = self.reserved;
            self.since = seconds(now);
        }
    }

    fn decode(bytes: &[u8; ACCOUNT]) -> Self {
        let field = |at: usize| {
            let field = bytes.as_chunks::<4>().0.get(at);
            u32::from_le_bytes(field.copied().unwrap_or_default())
        };
        Self { used: field(0), version: field(1), reserved: field(2), floor: field(3), since: field(4) }
    }

    fn encode(self) -> [u8; ACCOUNT] {
        let mut bytes = [0; ACCOUNT];
        let fields = [self.used, self.version, self.reserved, self.floor, self.since];
        for (place, field) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(fields) {
            *place = field.to_le_bytes();
        }
        bytes
    }
}

/// The low half of the seconds: only how far two of them lie apart is asked.
const fn seconds(now: Timestamp) -> u32 {
    (now.as_millis() / 1_000) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn settlement(used: u64, version: u64, unreserved: u32) -> Settlement {
        Settlement { used: Some((used, version)), unreserved, leaked: 0 }
    }

    const fn given_back(unreserved: u32) -> Settlement {
        Settlement { used: None, unreserved, leaked: 0 }
    }

    const fn at(seconds: u64) -> Timestamp {
        Timestamp::from_millis(1_000_000 + seconds * 1_000)
    }

    #[test]
    fn a_reservation_becomes_use_when_it_is_settled() {
        let mut ledger = Ledger::unwritten(3);
        assert!(ledger.reserve(1, 60, 100, at(0)));
        assert!(ledger.reserve(2, 40, 100, at(0)));
        assert!(!ledger.reserve(0, 1, 100, at(0)));
        ledger.settle(1, &settlement(50, 1, 60), at(0));
        assert_eq!(ledger.total(), 90);
        assert_eq!(Ledger::read(ledger.bytes().to_vec(), 3), Some(ledger));
    }

    #[test]
    fn an_older_settlement_only_gives_back() {
        let mut ledger = Ledger::unwritten(3);
        assert!(ledger.reserve(1, 60, 100, at(0)));
        ledger.settle(1, &settlement(10, 5, 0), at(0));
        ledger.settle(1, &settlement(99, 4, 30), at(0));
        ledger.settle(1, &given_back(30), at(0));
        assert_eq!(ledger.total(), 10);
    }

    #[test]
    fn what_stays_reserved_is_a_leak_and_what_comes_and_goes_is_none() {
        let mut ledger = Ledger::unwritten(3);
        for second in 0..60 {
            assert!(ledger.reserve(1, 7, 1_000, at(second)));
            assert_eq!(ledger.leaked(1, at(second)), 0);
            ledger.settle(1, &given_back(7), at(second));
        }
        // At 60 a VM traps; others go on.
        assert!(ledger.reserve(1, 30, 1_000, at(60)));
        let mut found = None;
        for second in 61..90 {
            assert!(ledger.reserve(1, 7, 1_000, at(second)));
            if ledger.leaked(1, at(second)) > 0 {
                found = Some((second, ledger.leaked(1, at(second))));
                break;
            }
            ledger.settle(1, &given_back(7), at(second));
        }
        let (second, leaked) = found.unwrap();
        assert_eq!(leaked, 30);
        assert!((70..=80).contains(&second), "{second}");
        // It is taken back beside the one that is being saved.
        ledger.settle(1, &Settlement { used: None, unreserved: 0, leaked }, at(second));
        assert_eq!((ledger.total(), ledger.leaked(1, at(second + 1))), (7, 0));
    }

    #[test]
    fn versions_are_compared_across_the_wrap() {
        let mut ledger = Ledger::unwritten(2);
        ledger.settle(1, &settlement(1, 0x7000_0000, 0), at(0));
        ledger.settle(1, &settlement(2, 0xe000_0000, 0), at(0));
        ledger.settle(1, &settlement(3, 0x1_0000_0001, 0), at(0));
        assert_eq!(ledger.total(), 3);
        ledger.settle(1, &settlement(4, 0xffff_fffe, 0), at(0));
        assert_eq!(ledger.total(), 3);
    }

    #[test]
    fn a_ledger_of_other_size_or_magic_is_not_read() {
        assert_eq!(Ledger::read(Ledger::unwritten(3).bytes().to_vec(), 4), None);
        assert_eq!(Ledger::read(vec![0; HEADER + 3 * ACCOUNT], 3), None);
        assert_eq!(Ledger::read(Vec::new(), 0), None);
        let mut ledger = Ledger::unwritten(3);
        assert!(!ledger.reserve(3, 1, 100, at(0)));
    }
}
