//! The value of a body slot: a kept response, and the mark that says whose it is.
//!
//! ```text
//! response | "IDB1" | length u32 | generation u64 | checksum u64 | tag 16 | owner 16
//! ```
//! Numbers are little-endian. The mark comes last, so that a replay cuts it off and copies nothing.

use crate::record::Owner;

/// Bytes of the mark.
pub(super) const MARK: usize = 56;

const MAGIC: [u8; 4] = *b"IDB1";

/// Whose bytes these are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BodyMark {
    pub(super) tag: [u8; 16],
    pub(super) owner: Owner,
    pub(super) generation: u64,
    pub(super) length: u32,
    pub(super) checksum: u64,
}

impl BodyMark {
    /// The mark at the end of a slot's value, if there is one that fits the length.
    pub(super) fn read(value: &[u8]) -> Option<Self> {
        let (response, mark) = value.split_last_chunk::<MARK>()?;
        let mark = mark.strip_prefix(&MAGIC)?;
        let (length, mark) = mark.split_first_chunk()?;
        let (generation, mark) = mark.split_first_chunk()?;
        let (checksum, mark) = mark.split_first_chunk()?;
        let (tag, mark) = mark.split_first_chunk()?;
        let (owner, []) = mark.split_first_chunk()? else { return None };
        let length = u32::from_le_bytes(*length);
        (response.len() as u64 == u64::from(length)).then_some(Self {
            tag: *tag,
            owner: Owner::from_bytes(*owner),
            generation: u64::from_le_bytes(*generation),
            length,
            checksum: u64::from_le_bytes(*checksum),
        })
    }
}

/// A slot's value on its way: built once, stamped anew for each attempt to publish it.
#[derive(Debug)]
pub(super) struct BodyDraft {
    value: Vec<u8>,
    mark: BodyMark,
}

impl BodyDraft {
    /// `None` if the response is longer than the format can say.
    pub(super) fn of(tag: [u8; 16], owner: Owner, response: &[u8]) -> Option<Self> {
        let length = u32::try_from(response.len()).ok()?;
        let mut value = Vec::with_capacity(response.len().saturating_add(MARK));
        value.extend_from_slice(response);
        Some(Self {
            mark: BodyMark { tag, owner, generation: 0, length, checksum: checksum(response) },
            value,
        })
    }

    /// The value for this generation, and its mark.
    pub(super) fn stamp(&mut self, generation: u64) -> (&[u8], BodyMark) {
        let mark = BodyMark { generation, ..self.mark };
        self.value.truncate(mark.length as usize);
        self.value.extend_from_slice(&MAGIC);
        self.value.extend_from_slice(&mark.length.to_le_bytes());
        self.value.extend_from_slice(&mark.generation.to_le_bytes());
        self.value.extend_from_slice(&mark.checksum.to_le_bytes());
        self.value.extend_from_slice(&mark.tag);
        self.value.extend_from_slice(mark.owner.bytes());
        (&self.value, mark)
    }
}

/// The response in a slot's value, if it is the one that `expected` marks.
pub(super) fn take_response(mut value: Vec<u8>, expected: &BodyMark) -> Option<Vec<u8>> {
    if BodyMark::read(&value) != Some(*expected) {
        return None;
    }
    value.truncate(expected.length as usize);
    (checksum(&value) == expected.checksum).then_some(value)
}

/// Guards against torn or foreign bytes, not against a forger: whoever writes the host's map is trusted.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let (words, rest) = bytes.as_chunks::<8>();
    let mut last = [0; 8];
    last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
    let mut sum = ODD ^ bytes.len() as u64;
    for word in words.iter().chain([&last]) {
        sum = (sum ^ u64::from_le_bytes(*word)).wrapping_mul(ODD);
        sum ^= sum >> 29;
    }
    sum
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(response: &[u8], generation: u64) -> (Vec<u8>, BodyMark) {
        let mut draft = BodyDraft::of([1; 16], Owner::from_bytes([2; 16]), response).unwrap();
        draft.stamp(generation + 1);
        let (value, mark) = draft.stamp(generation);
        (value.to_vec(), mark)
    }

    proptest! {
        #[test]
        fn what_was_stamped_is_what_is_taken(response in proptest::collection::vec(any::<u8>(), 0..200)) {
            let (value, mark) = value(&response, 7);
            prop_assert_eq!(value.len(), response.len() + MARK);
            prop_assert_eq!(take_response(value, &mark), Some(response));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = BodyMark::read(&bytes);
        }

        #[test]
        fn a_changed_byte_is_never_replayed(
            response in proptest::collection::vec(any::<u8>(), 1..100),
            at in any::<proptest::sample::Index>(),
            flip in 1u8..,
        ) {
            let (mut value, mark) = value(&response, 7);
            let at = at.index(value.len());
            value[at] ^= flip;
            prop_assert_eq!(take_response(value, &mark), None);
        }
    }

    #[test]
    fn bytes_of_another_record_are_never_taken() {
        let (value, mark) = value(b"one", 7);
        for other in [
            BodyMark { tag: [9; 16], ..mark },
            BodyMark { owner: Owner::from_bytes([9; 16]), ..mark },
            BodyMark { generation: 8, ..mark },
            BodyMark { length: 2, ..mark },
            BodyMark { checksum: 0, ..mark },
        ] {
            assert_eq!(take_response(value.clone(), &other), None);
        }
        assert_eq!(take_response(value[1..].to_vec(), &mark), None);
        assert_eq!(take_response(Vec::new(), &mark), None);
    }

    #[test]
    fn checksums_tell_lengths_and_orders_apart() {
        let sums: std::collections::BTreeSet<u64> = [
            &b""[..],
            b"\0",
            b"\0\0",
            &[0; 8],
            &[0; 9],
            &[0; 16],
            b"ab",
            b"ba",
            b"12345678abcdefgh",
            b"abcdefgh12345678",
        ]
        .into_iter()
        .map(checksum)
        .collect();
        assert_eq!(sums.len(), 10);
    }
}
