//! One record as a bucket holds it: 112 bytes, every one of them accounted for.
//!
//! ```text
//!   0 state u8 | 1 reason u8 | 2 slot u8 | 3 fingerprint version u8 | 4 status u16 | 6 zero u16
//!   8 attempt u32 | 12 body length u32 | 16 tag | 32 owner | 48 fingerprint (32)
//!  80 created u64 | 88 expires u64 | 96 lease end or body generation u64 | 104 body checksum u64
//! ```
//! Numbers are little-endian, moments in milliseconds. What a state has no use for is zero.

use super::body::BodyMark;
use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::record::{Owner, Reason, Record, RecordState};

/// Bytes of an entry.
pub(super) const ENTRY: usize = 112;

const IN_FLIGHT: u8 = 1;
const COMPLETED_BODY: u8 = 2;
const COMPLETED_STATUS: u8 = 3;
const FAILED: u8 = 4;

/// How the table refers to a kept response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// In the entry's slot; `status` answers where the slot can't.
    Body { status: u16, generation: u64, length: u32, checksum: u64 },
    /// Nothing but the status.
    Status(u16),
}

impl Kept {
    pub(super) const fn status(&self) -> u16 {
        match self {
            Self::Body { status, .. } | Self::Status(status) => *status,
        }
    }
}

/// A record and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Entry {
    /// What the record is found by within its bucket.
    pub(super) tag: [u8; 16],
    /// Its body slot: its own from the claim on, so that no other record writes there.
    pub(super) slot: u8,
    /// How the fingerprint was computed.
    pub(super) fingerprint_version: u8,
    pub(super) record: Record<Kept>,
}

impl Entry {
    /// The mark that the slot's value must carry.
    pub(super) fn body_mark(&self) -> Option<BodyMark> {
        match self.record.state {
            RecordState::Completed { response: Kept::Body { generation, length, checksum, .. } } => {
                Some(BodyMark { tag: self.tag, owner: self.record.owner, generation, length, checksum })
            }
            RecordState::Completed { response: Kept::Status(_) }
            | RecordState::InFlight { .. }
            | RecordState::Failed { .. } => None,
        }
    }

    pub(super) fn encode(&self) -> [u8; ENTRY] {
        let record = &self.record;
        let (state, reason, status, length, word, checksum) = match record.state {
            RecordState::InFlight { lease_until } => (IN_FLIGHT, 0, 0, 0, lease_until.as_millis(), 0),
            RecordState::Completed { response: Kept::Body { status, generation, length, checksum } } => {
                (COMPLETED_BODY, 0, status, length, generation, checksum)
            }
            RecordState::Completed { response: Kept::Status(status) } => {
                (COMPLETED_STATUS, 0, status, 0, 0, 0)
            }
            RecordState::Failed { reason } => (FAILED, reason.code(), 0, 0, 0, 0),
        };
        let mut bytes = [0; ENTRY];
        let mut fields = Fields(&mut bytes);
        fields.put([state, reason, self.slot, self.fingerprint_version]);
        fields.put(status.to_le_bytes());
        fields.put([0; 2]);
        fields.put(record.attempt.to_le_bytes());
        fields.put(length.to_le_bytes());
        fields.put(self.tag);
        fields.put(*record.owner.bytes());
        fields.put(*record.fingerprint.bytes());
        fields.put(record.created.as_millis().to_le_bytes());
        fields.put(record.expires.as_millis().to_le_bytes());
        fields.put(word.to_le_bytes());
        fields.put(checksum.to_le_bytes());
        bytes
    }

    /// `None` for anything that [`encode`](Self::encode) did not write.
    pub(super) fn decode(bytes: &[u8; ENTRY]) -> Option<Self> {
        let [state, reason, slot, fingerprint_version] = array(bytes, 0);
        let status = u16::from_le_bytes(array(bytes, 4));
        let length = u32::from_le_bytes(array(bytes, 12));
        let word = u64::from_le_bytes(array(bytes, 96));
        let checksum = u64::from_le_bytes(array(bytes, 104));
        if array(bytes, 6) != [0; 2] || (state == FAILED) == (reason == 0) {
            return None;
        }
        let state = match state {
            IN_FLIGHT => RecordState::InFlight { lease_until: Timestamp::from_millis(word) },
            COMPLETED_BODY => {
                RecordState::Completed { response: Kept::Body { status, generation: word, length, checksum } }
            }
            COMPLETED_STATUS => RecordState::Completed { response: Kept::Status(status) },
            FAILED => RecordState::Failed { reason: Reason::from_code(reason)? },
            _ => return None,
        };
        Some(Self {
            tag: array(bytes, TAG_AT),
            slot,
            fingerprint_version,
            record: Record {
                fingerprint: Fingerprint::from_bytes(array(bytes, 48)),
                owner: Owner::from_bytes(array(bytes, 32)),
                attempt: u32::from_le_bytes(array(bytes, 8)),
                created: Timestamp::from_millis(u64::from_le_bytes(array(bytes, 80))),
                expires: Timestamp::from_millis(u64::from_le_bytes(array(bytes, EXPIRES_AT))),
                state,
            },
        })
    }
}

const TAG_AT: usize = 16;
const EXPIRES_AT: usize = 88;

// What a look through a bucket needs, without decoding every entry.

pub(super) fn tag_of(bytes: &[u8; ENTRY]) -> [u8; 16] {
    array(bytes, TAG_AT)
}

pub(super) fn slot_of(bytes: &[u8; ENTRY]) -> u8 {
    let [slot] = array(bytes, 2);
    slot
}

pub(super) fn is_expired(bytes: &[u8; ENTRY], now: Timestamp) -> bool {
    now >= Timestamp::from_millis(u64::from_le_bytes(array(bytes, EXPIRES_AT)))
}

/// The length of the response in the entry's slot.
pub(super) fn body_length(bytes: &[u8; ENTRY]) -> Option<u32> {
    (array(bytes, 0) == [COMPLETED_BODY]).then(|| u32::from_le_bytes(array(bytes, 12)))
}

/// The `N` bytes at a place; every place asked for above lies within the entry.
fn array<const N: usize>(bytes: &[u8; ENTRY], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

struct Fields<'a>(&'a mut [u8]);

impl Fields<'_> {
    fn put<const N: usize>(&mut self, field: [u8; N]) {
        if let Some((head, rest)) = std::mem::take(&mut self.0).split_first_chunk_mut() {
            *head = field;
            self.0 = rest;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn any_entry() -> impl Strategy<Value = Entry> {
        let state = prop_oneof![
            any::<u64>().prop_map(|at| RecordState::InFlight { lease_until: Timestamp::from_millis(at) }),
            any::<(u16, u64, u32, u64)>().prop_map(|(status, generation, length, checksum)| {
                RecordState::Completed { response: Kept::Body { status, generation, length, checksum } }
            }),
            any::<u16>().prop_map(|status| RecordState::Completed { response: Kept::Status(status) }),
            proptest::sample::select(Reason::ALL.to_vec()).prop_map(|reason| RecordState::Failed { reason }),
        ];
        (any::<([u8; 16], u8, u8, [u8; 16], [u8; 32], u32, u64, u64)>(), state).prop_map(
            |((tag, slot, fingerprint_version, owner, fingerprint, attempt, created, expires), state)| {
                Entry {
                    tag,
                    slot,
                    fingerprint_version,
                    record: Record {
                        fingerprint: Fingerprint::from_bytes(fingerprint),
                        owner: Owner::from_bytes(owner),
                        attempt,
                        created: Timestamp::from_millis(created),
                        expires: Timestamp::from_millis(expires),
                        state,
                    },
                }
            },
        )
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_what_is_decoded(entry in any_entry(), now in any::<u64>()) {
            let bytes = entry.encode();
            let now = Timestamp::from_millis(now);
            prop_assert_eq!(tag_of(&bytes), entry.tag);
            prop_assert_eq!(slot_of(&bytes), entry.slot);
            prop_assert_eq!(is_expired(&bytes, now), now >= entry.record.expires);
            prop_assert_eq!(body_length(&bytes), entry.body_mark().map(|mark| mark.length));
            prop_assert_eq!(Entry::decode(&bytes), Some(entry));
        }

        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), ENTRY)) {
            let _ = Entry::decode(bytes.first_chunk().unwrap());
        }
    }

    #[test]
    fn the_last_field_ends_the_entry() {
        let state = RecordState::Completed {
            response: Kept::Body { status: 200, generation: 1, length: 2, checksum: u64::MAX },
        };
        let record = Record {
            fingerprint: Fingerprint::from_bytes([0; 32]),
            owner: Owner::from_bytes([0; 16]),
            attempt: 1,
            created: Timestamp::default(),
            expires: Timestamp::default(),
            state,
        };
        let bytes = Entry { tag: [0; 16], slot: 0, fingerprint_version: 1, record }.encode();
        assert_eq!(bytes[ENTRY - 8..], [0xff; 8]);
    }
}
