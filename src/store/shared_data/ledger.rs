//! A group's ledger: what each of its buckets holds in body slots, and what is about to be written there.
//!
//! ```text
//! "IDL" | format u8 | per bucket: used u32 | reserved u32 | version u32
//! ```
//! Numbers are little-endian. `used` is what the bucket said in the write that made `version` (its low 32 bits):
//! figures are absolute and the newest wins, so that a settlement that was lost is made good by the next one.

/// Bytes of the header.
pub(super) const HEADER: usize = 4;
/// Bytes of one bucket's account.
pub(super) const ACCOUNT: usize = 12;

const MAGIC: [u8; HEADER] = *b"IDL\x01";

/// What changes in a bucket's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Settlement {
    /// What its entries' slots hold, and in which version of the bucket.
    pub(super) used: Option<(u64, u64)>,
    /// What is no longer reserved.
    pub(super) unreserved: u32,
}

/// One bucket's account.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Account {
    used: u32,
    reserved: u32,
    version: u32,
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

    /// What is reserved in a bucket.
    pub(super) fn reserved(&self, position: usize) -> u32 {
        self.account(position).reserved
    }

    /// Reserves room in a bucket, if the group stays within its budget.
    pub(super) fn reserve(&mut self, position: usize, bytes: u32, budget: u64) -> bool {
        let mut account = self.account(position);
        let Some(reserved) = account.reserved.checked_add(bytes) else { return false };
        if self.total().saturating_add(u64::from(bytes)) > budget {
            return false;
        }
        account.reserved = reserved;
        self.put(position, account)
    }

    /// Changes a bucket's account.
    pub(super) fn settle(&mut self, position: usize, settlement: &Settlement) {
        let mut account = self.account(position);
        if let Some((used, version)) = settlement.used {
            // The low half is enough to tell which of two versions is newer: they lie close together.
            let version = version as u32;
            if version.wrapping_sub(account.version) < u32::MAX / 2 {
                account.version = version;
                account.used = u32::try_from(used).unwrap_or(u32::MAX);
            }
        }
        account.reserved = account.reserved.saturating_sub(settlement.unreserved);
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
    fn decode(bytes: &[u8; ACCOUNT]) -> Self {
        let &[u0, u1, u2, u3, r0, r1, r2, r3, v0, v1, v2, v3] = bytes;
        Self {
            used: u32::from_le_bytes([u0, u1, u2, u3]),
            reserved: u32::from_le_bytes([r0, r1, r2, r3]),
            version: u32::from_le_bytes([v0, v1, v2, v3]),
        }
    }

    const fn encode(self) -> [u8; ACCOUNT] {
        let [u0, u1, u2, u3] = self.used.to_le_bytes();
        let [r0, r1, r2, r3] = self.reserved.to_le_bytes();
        let [v0, v1, v2, v3] = self.version.to_le_bytes();
        [u0, u1, u2, u3, r0, r1, r2, r3, v0, v1, v2, v3]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn settlement(used: u64, version: u64, unreserved: u32) -> Settlement {
        Settlement { used: Some((used, version)), unreserved }
    }

    #[test]
    fn a_reservation_becomes_use_when_it_is_settled() {
        let mut ledger = Ledger::unwritten(3);
        assert!(ledger.reserve(1, 60, 100));
        assert!(ledger.reserve(2, 40, 100));
        assert!(!ledger.reserve(0, 1, 100));
        ledger.settle(1, &settlement(50, 1, 60));
        assert_eq!((ledger.total(), ledger.reserved(1)), (90, 0));
        assert_eq!(Ledger::read(ledger.bytes().to_vec(), 3), Some(ledger));
    }

    #[test]
    fn an_older_settlement_only_gives_back() {
        let mut ledger = Ledger::unwritten(3);
        assert!(ledger.reserve(1, 60, 100));
        ledger.settle(1, &settlement(10, 5, 0));
        ledger.settle(1, &settlement(99, 4, 30));
        ledger.settle(1, &Settlement { used: None, unreserved: 30 });
        assert_eq!(ledger.total(), 10);
    }

    #[test]
    fn versions_are_compared_across_the_wrap() {
        let mut ledger = Ledger::unwritten(2);
        ledger.settle(1, &settlement(1, 0x7000_0000, 0));
        ledger.settle(1, &settlement(2, 0xe000_0000, 0));
        ledger.settle(1, &settlement(3, 0x1_0000_0001, 0));
        assert_eq!(ledger.total(), 3);
        ledger.settle(1, &settlement(4, 0xffff_fffe, 0));
        assert_eq!(ledger.total(), 3);
    }

    #[test]
    fn a_ledger_of_other_size_or_magic_is_not_read() {
        assert_eq!(Ledger::read(Ledger::unwritten(3).bytes().to_vec(), 4), None);
        assert_eq!(Ledger::read(vec![0; HEADER + 3 * ACCOUNT], 3), None);
        assert_eq!(Ledger::read(Vec::new(), 0), None);
        let mut ledger = Ledger::unwritten(3);
        assert!(!ledger.reserve(3, 1, 100));
    }
}
