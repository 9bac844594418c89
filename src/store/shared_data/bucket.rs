//! A bucket's value: a header and its entries, changed in place.
//!
//! ```text
//! "IDM" | format u8 | entry size u16 | count u16 | version u64 | count entries, see the entry module
//! ```
//! Numbers are little-endian. The version counts the bucket's writes: it is the generation of a body that the
//! write publishes, and it orders what ledgers hear of the bucket.

pub(super) use super::entry::ENTRY;
use super::entry::{self, Entry};
use crate::clock::Timestamp;
use crate::store::StoreError;

/// The format this build writes.
pub(super) const FORMAT_VERSION: u8 = 1;
/// Bytes of the header.
pub(super) const HEADER: usize = 16;

const MAGIC: [u8; 3] = *b"IDM";

/// A bucket that was read, and is being changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bucket {
    /// The whole value; the header is written by [`seal`](Self::seal).
    bytes: Vec<u8>,
    version: u64,
}

impl Bucket {
    /// A bucket that nobody has written.
    pub(super) fn unwritten() -> Self {
        Self { bytes: vec![0; HEADER], version: 0 }
    }

    /// Reads a value. Each format that can be read has its reader here and comes out as the one that is written.
    pub(super) fn read(bytes: Vec<u8>, ways: u8) -> Result<Self, StoreError> {
        match bytes.strip_prefix(&MAGIC).and_then(<[u8]>::first) {
            Some(&FORMAT_VERSION) => Self::read_v1(bytes, ways).ok_or(StoreError::Unreadable),
            Some(_) | None => Err(StoreError::Unreadable),
        }
    }

    fn read_v1(bytes: Vec<u8>, ways: u8) -> Option<Self> {
        let (header, entries) = bytes.split_first_chunk::<HEADER>()?;
        let (_, sizes) = header.split_first_chunk::<4>()?;
        let (size, sizes) = sizes.split_first_chunk()?;
        let (count, version) = sizes.split_first_chunk()?;
        let version = u64::from_le_bytes(*version.first_chunk()?);
        let (entries, rest) = entries.as_chunks::<ENTRY>();
        let count = usize::from(u16::from_le_bytes(*count));
        if usize::from(u16::from_le_bytes(*size)) != ENTRY
            || !rest.is_empty()
            || entries.len() != count
            || count > usize::from(ways)
        {
            return None;
        }
        let mut taken: u64 = 0;
        for bytes in entries {
            let slot = Entry::decode(bytes)?.slot;
            let bit = 1u64.checked_shl(u32::from(slot)).filter(|_| slot < ways)?;
            if taken & bit != 0 {
                return None;
            }
            taken |= bit;
        }
        Some(Self { bytes, version })
    }

    /// How many times the bucket was written.
    pub(super) const fn version(&self) -> u64 {
        self.version
    }

    /// The version that the next write makes.
    pub(super) const fn next_version(&self) -> u64 {
        self.version.wrapping_add(1)
    }

    pub(super) fn len(&self) -> usize {
        self.raw_entries().len()
    }

    /// The entry at a place; `None` past the last.
    pub(super) fn get(&self, at: usize) -> Option<Entry> {
        self.raw_entries().get(at).and_then(Entry::decode)
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (usize, Entry)> {
        self.raw_entries().iter().enumerate().filter_map(|(at, bytes)| Some((at, Entry::decode(bytes)?)))
    }

    pub(super) fn find(&self, tag: &[u8; 16]) -> Option<(usize, Entry)> {
        let at = self.raw_entries().iter().position(|bytes| entry::tag_of(bytes) == *tag)?;
        Some((at, self.get(at)?))
    }

    /// The first expired entry at or after a place.
    pub(super) fn next_expired(&self, from: usize, now: Timestamp) -> Option<(usize, Entry)> {
        let rest = self.raw_entries().get(from..)?;
        let at = from + rest.iter().position(|bytes| entry::is_expired(bytes, now))?;
        Some((at, self.get(at)?))
    }

    /// What the entries' slots hold, marks included.
    pub(super) fn body_bytes(&self) -> u64 {
        let lengths = self.raw_entries().iter().filter_map(entry::body_length);
        lengths.map(|length| u64::from(length) + super::body::MARK as u64).sum()
    }

    /// A slot that no entry has, looked for from `start` on.
    pub(super) fn free_slot(&self, ways: u8, start: u8) -> Option<u8> {
        let taken =
            self.raw_entries().iter().filter_map(|bytes| 1u64.checked_shl(u32::from(entry::slot_of(bytes))));
        let taken = taken.fold(0, |all, bit| all | bit);
        let start = start.checked_rem(ways)?;
        (start..ways).chain(0..start).find(|slot| taken & (1u64 << (slot & 63)) == 0)
    }

    /// Writes the entry at a place, or after the last.
    pub(super) fn put(&mut self, at: usize, entry: &Entry) {
        let from = HEADER + at * ENTRY;
        match self.bytes.get_mut(from..from + ENTRY) {
            Some(place) => place.copy_from_slice(&entry.encode()),
            None => self.bytes.extend_from_slice(&entry.encode()),
        }
    }

    /// Takes an entry out; the last one moves to its place.
    pub(super) fn remove(&mut self, at: usize) {
        let last = self.len().saturating_sub(1);
        let from = HEADER + last * ENTRY;
        if at < last {
            self.bytes.copy_within(from..from + ENTRY, HEADER + at * ENTRY);
        }
        if at <= last {
            self.bytes.truncate(from);
        }
    }

    /// The value that the next write puts under the bucket's name.
    pub(super) fn seal(&mut self) -> &[u8] {
        let [size_low, size_high] = (ENTRY as u16).to_le_bytes();
        let [count_low, count_high] = u16::try_from(self.len()).unwrap_or(u16::MAX).to_le_bytes();
        let [m0, m1, m2] = MAGIC;
        let [v0, v1, v2, v3, v4, v5, v6, v7] = self.next_version().to_le_bytes();
        if let Some(header) = self.bytes.first_chunk_mut::<HEADER>() {
            *header = [
                m0,
                m1,
                m2,
                FORMAT_VERSION,
                size_low,
                size_high,
                count_low,
                count_high,
                v0,
                v1,
                v2,
                v3,
                v4,
                v5,
                v6,
                v7,
            ];
        }
        &self.bytes
    }

    fn raw_entries(&self) -> &[[u8; ENTRY]] {
        self.bytes.get(HEADER..).unwrap_or_default().as_chunks::<ENTRY>().0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree as _;

    use super::super::entry::tests::any_entry;
    use super::*;

    const WAYS: u8 = 64;

    fn any_bucket() -> impl Strategy<Value = (Bucket, Vec<Entry>)> {
        proptest::collection::vec(any_entry(), 0..=usize::from(WAYS)).prop_map(|mut entries| {
            let mut bucket = Bucket::unwritten();
            for (at, entry) in entries.iter_mut().enumerate() {
                entry.slot = u8::try_from(at).unwrap();
                bucket.put(at, entry);
            }
            (bucket, entries)
        })
    }

    proptest! {
        #[test]
        fn what_was_sealed_is_what_is_read((mut bucket, entries) in any_bucket()) {
            let read = Bucket::read(bucket.seal().to_vec(), WAYS).unwrap();
            prop_assert_eq!(read.version(), 1);
            prop_assert_eq!(read.entries().map(|(_, entry)| entry).collect::<Vec<_>>(), entries);
        }

        #[test]
        fn any_bytes_are_unreadable(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            prop_assert_eq!(Bucket::read(bytes, WAYS), Err(StoreError::Unreadable));
        }

        #[test]
        fn a_damaged_header_or_length_is_unreadable((mut bucket, _) in any_bucket(), at in 0usize..8, flip in 1u8..) {
            let bytes = bucket.seal().to_vec();
            let mut damaged = bytes.clone();
            damaged[at] ^= flip;
            prop_assert_eq!(Bucket::read(damaged, WAYS), Err(StoreError::Unreadable));
            prop_assert_eq!(Bucket::read(bytes[..bytes.len() - 1].to_vec(), WAYS), Err(StoreError::Unreadable));
        }

        #[test]
        fn a_damaged_entry_is_read_or_unreadable((mut bucket, entries) in any_bucket(), at in any::<usize>(), to: u8) {
            prop_assume!(!entries.is_empty());
            let mut bytes = bucket.seal().to_vec();
            let at = HEADER + at % (bytes.len() - HEADER);
            bytes[at] = to;
            if let Ok(read) = Bucket::read(bytes, WAYS) {
                prop_assert_eq!(read.entries().count(), entries.len());
            }
        }

        #[test]
        fn removing_keeps_the_others((mut bucket, mut entries) in any_bucket(), at in 0usize..70) {
            bucket.remove(at);
            if at < entries.len() {
                entries.swap_remove(at);
            }
            prop_assert_eq!(bucket.entries().map(|(_, entry)| entry).collect::<Vec<_>>(), entries);
        }
    }

    #[test]
    fn a_slot_is_free_until_an_entry_has_it() {
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let mut entry = any_entry().new_tree(&mut runner).unwrap().current();
        let mut bucket = Bucket::unwritten();
        let mut slots = Vec::new();
        while let Some(slot) = bucket.free_slot(5, 203) {
            entry.slot = slot;
            bucket.put(bucket.len(), &entry);
            slots.push(slot);
        }
        assert_eq!(slots, [3, 4, 0, 1, 2]);
    }

    #[test]
    fn two_entries_in_one_slot_are_unreadable() {
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let mut entry = any_entry().new_tree(&mut runner).unwrap().current();
        let mut bucket = Bucket::unwritten();
        entry.slot = 3;
        bucket.put(0, &entry);
        assert!(Bucket::read(bucket.seal().to_vec(), 4).is_ok());
        assert!(Bucket::read(bucket.seal().to_vec(), 3).is_err());
        bucket.put(1, &entry);
        assert!(Bucket::read(bucket.seal().to_vec(), 4).is_err());
    }
}
