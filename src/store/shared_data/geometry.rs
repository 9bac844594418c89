//! How many buckets, ways and ledger groups a table has, and what that costs in the worst case.
//!
//! A bucket of `W` ways refuses its `W+1`th record, so a table refuses before it is full. With `N` records thrown
//! into `B` buckets, the chance that some bucket gets more than `W` is at most `B × P(Poisson(N/B) > W)`
//! (a bucket's load is binomial, whose upper tail is below the Poisson's). `B` is the smallest number that keeps
//! this at one in a thousand for `N = max_records`.
//!
//! The sum uses additions, multiplications and divisions only: IEEE 754 fixes their results, so that the same
//! configuration makes the same table in every build. `exp` and `ln` differ between libraries.

use std::fmt;

use super::{bucket, ledger, namespace};
use crate::key::StoreKey;

/// Ways of a bucket, unless the whole table needs fewer.
const WAYS: u8 = 64;
/// The chance, at most, that a record is refused while there are no more than `max_records`.
const REFUSAL_CHANCE: f64 = 0.001;
/// Records that share one ledger, roughly; and the most ledgers there are.
const RECORDS_PER_GROUP: u32 = 8_192;
const MAX_GROUPS: u32 = 64;

/// The shape of a table: fixed for as long as its namespace lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Geometry {
    buckets: u32,
    ways: u8,
    groups: u32,
}

impl Geometry {
    /// The smallest table in which `max_records` live records fit but for one chance in a thousand.
    #[must_use]
    pub fn for_records(max_records: u32) -> Self {
        let max_records = max_records.max(1);
        let buckets = if max_records <= u32::from(WAYS) { 1 } else { smallest_buckets(max_records) };
        Self {
            buckets,
            ways: u8::try_from(max_records).unwrap_or(WAYS).min(WAYS),
            groups: (max_records / RECORDS_PER_GROUP).clamp(1, MAX_GROUPS).min(buckets),
        }
    }

    /// Buckets of the table.
    #[must_use]
    pub const fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Records a bucket holds at the most.
    #[must_use]
    pub const fn ways(&self) -> u8 {
        self.ways
    }

    /// Parts into which the byte budget of bodies is divided, each with its own ledger.
    #[must_use]
    pub const fn groups(&self) -> u32 {
        self.groups
    }

    /// Bytes of everything but the bodies, with every bucket full.
    #[must_use]
    pub fn index_bytes(&self) -> u64 {
        let buckets = u64::from(self.buckets);
        namespace::BYTES as u64
            + buckets * (bucket::HEADER + usize::from(self.ways) * bucket::ENTRY) as u64
            + u64::from(self.groups) * ledger::HEADER as u64
            + buckets * ledger::ACCOUNT as u64
    }

    /// Names the table can ever write: the geometry, each bucket, each bucket's body slots, each ledger.
    ///
    /// The host never frees a name. Each costs it some 150 bytes beside the value (the name and a map node).
    #[must_use]
    pub fn host_keys(&self) -> u64 {
        1 + u64::from(self.groups) + u64::from(self.buckets) * (1 + u64::from(self.ways))
    }

    /// The bucket of a key. The entry's tag is the hash's first half; the place comes from the second.
    pub(super) fn bucket_of(&self, key: &StoreKey) -> u32 {
        let hash = key.bytes().last_chunk::<8>().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let place = (u128::from(hash) * u128::from(self.buckets)) >> 64;
        u32::try_from(place).unwrap_or(0)
    }

    /// The ledger group of a bucket.
    pub(super) const fn group_of(&self, bucket: u32) -> u32 {
        match bucket.checked_rem(self.groups) {
            Some(group) => group,
            None => 0,
        }
    }

    /// A bucket's place within its group.
    pub(super) fn position_of(&self, bucket: u32) -> usize {
        bucket.checked_div(self.groups).unwrap_or(0) as usize
    }

    /// The bucket at a place of a group: [`position_of`](Self::position_of) backwards.
    pub(super) const fn bucket_at(&self, group: u32, position: u32) -> u32 {
        position.saturating_mul(self.groups).saturating_add(group)
    }

    /// How many buckets a group has.
    pub(super) fn buckets_in(&self, group: u32) -> u32 {
        self.buckets.saturating_sub(group).div_ceil(self.groups.max(1))
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} buckets of {} ways in {} groups", self.buckets, self.ways, self.groups)
    }
}

impl Geometry {
    /// A geometry as it was read from the host, if it is one that could be used.
    pub(super) fn from_parts(buckets: u32, ways: u32, groups: u32) -> Option<Self> {
        let ways = u8::try_from(ways).ok().filter(|ways| (1..=WAYS).contains(ways))?;
        (groups >= 1 && groups <= buckets).then_some(Self { buckets, ways, groups })
    }
}

fn smallest_buckets(max_records: u32) -> u32 {
    // At one record a way every second bucket overflows; at eight records a bucket none ever does.
    let mut too_few = max_records / u32::from(WAYS);
    let mut enough = max_records / 8 + 1;
    while enough.saturating_sub(too_few) > 1 {
        let middle = too_few + (enough - too_few) / 2;
        if f64::from(middle) * overflow_chance(f64::from(max_records) / f64::from(middle)) <= REFUSAL_CHANCE {
            enough = middle;
        } else {
            too_few = middle;
        }
    }
    enough
}

/// `P(Poisson(mean) > WAYS)`, for a mean of no more than about `WAYS`.
fn overflow_chance(mean: f64) -> f64 {
    let (mut term, mut below, mut above) = (1.0, 0.0, 0.0);
    // Terms beyond four times the ways are too small to count, for any mean that is asked for.
    for count in 0..4 * u32::from(WAYS) {
        if count <= u32::from(WAYS) {
            below += term;
        } else {
            above += term;
        }
        term *= mean / f64::from(count + 1);
    }
    above / (above + below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tiny_table_has_exactly_the_ways_it_needs() {
        for max_records in [1, 4, 16, 64] {
            let geometry = Geometry::for_records(max_records);
            assert_eq!((geometry.buckets(), u32::from(geometry.ways())), (1, max_records));
        }
        assert_eq!(Geometry::for_records(0), Geometry::for_records(1));
    }

    #[test]
    fn a_table_is_the_smallest_that_keeps_the_chance() {
        for max_records in [65, 100, 1_000, 16_384, 131_072, 1_000_000, u32::MAX] {
            let buckets = Geometry::for_records(max_records).buckets();
            let bound = |buckets: u32| {
                f64::from(buckets) * overflow_chance(f64::from(max_records) / f64::from(buckets))
            };
            assert!(bound(buckets) <= REFUSAL_CHANCE, "{max_records}: {}", bound(buckets));
            assert!(bound(buckets - 1) > REFUSAL_CHANCE, "{max_records}: {} buckets too many", buckets);
        }
    }

    #[test]
    fn overflow_chance_is_the_poisson_tail() {
        // Computed with exact fractions.
        for (mean, tail) in
            [(8.0, 2.323_575_229_6e-36), (32.0, 2.012_602_759_0e-7), (50.0, 2.360_321_267_7e-2)]
        {
            let found = overflow_chance(mean);
            assert!((found / tail - 1.0).abs() < 1e-9, "{mean}: {found:e} instead of {tail:e}");
        }
    }

    #[test]
    fn groups_partition_the_buckets() {
        for max_records in [4, 1_000, 20_000, 131_072] {
            let geometry = Geometry::for_records(max_records);
            let mut seen = vec![false; geometry.buckets() as usize];
            for group in 0..geometry.groups() {
                for position in 0..geometry.buckets_in(group) {
                    let bucket = geometry.bucket_at(group, position);
                    assert_eq!(geometry.group_of(bucket), group);
                    assert_eq!(geometry.position_of(bucket), position as usize);
                    assert!(!std::mem::replace(&mut seen[bucket as usize], true));
                }
            }
            assert!(seen.into_iter().all(|seen| seen));
        }
    }

    /// The bound is on a chance, so it is tried: tables of several sizes, filled with random keys to their first
    /// refusal.
    #[test]
    fn max_records_random_keys_fit_but_for_one_chance_in_a_thousand() {
        let mut state: u64 = 1;
        for (max_records, trials) in
            [(65, 4_000u32), (200, 4_000), (1_000, 2_000), (20_000, 100), (131_072, 10)]
        {
            let geometry = Geometry::for_records(max_records);
            let (mut early, mut held, mut least) = (0, 0, u64::MAX);
            for _ in 0..trials {
                let mut loads = vec![0; geometry.buckets() as usize];
                let mut records = 0;
                loop {
                    let mut key = [0; 32];
                    // splitmix64
                    state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                    let word = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                    key[24..].copy_from_slice(&(word ^ (word >> 31)).to_le_bytes());
                    let load = &mut loads[geometry.bucket_of(&StoreKey::from_bytes(key)) as usize];
                    if *load == geometry.ways() {
                        break;
                    }
                    *load += 1;
                    records += 1;
                }
                early += u32::from(records < u64::from(max_records));
                held += records;
                least = least.min(records);
            }
            let held = held / u64::from(trials);
            println!(
                "{max_records}: {early} of {trials} refused early; first refusal after {least}, {held} on average"
            );
            // Some above the expected number: the seed is fixed, so what passes once passes always.
            assert!(
                f64::from(early) <= 5.0 * REFUSAL_CHANCE * f64::from(trials),
                "{max_records}: {early} of {trials}"
            );
        }
    }
}
