//! Operations as values, so that tests can list, order and compare them.

use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::codec::{ResponseEncoder, StoredResponse};
use idempotency::record::{ClaimTerms, Owner};
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

pub const LEASE: Duration = Duration::from_secs(60);
pub const LIFE: Duration = Duration::from_secs(3_600);

/// One call of a store.
#[derive(Debug, Clone)]
pub enum Operation {
    Claim(Claim),
    Write(Hold, Write),
}

/// What a store said to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    Claim(Result<ClaimReply, StoreError>),
    Write(Result<WriteReply, StoreError>),
}

impl Operation {
    pub fn run(&self, store: &mut dyn Store, now: Timestamp) -> Reply {
        match self {
            Self::Claim(claim) => Reply::Claim(store.claim(claim, now)),
            Self::Write(hold, write) => Reply::Write(store.write(hold, write, now)),
        }
    }
}

pub fn at(seconds: u64) -> Timestamp {
    Timestamp::from_millis(1_000_000 + seconds * 1_000)
}

/// A key of its own number; numbers are spread over the buckets.
pub fn key(number: u64) -> StoreKey {
    let mut bytes = [0; 32];
    let mut state = number;
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&splitmix(&mut state).to_le_bytes());
    }
    StoreKey::from_bytes(bytes)
}

pub fn owner(number: u64) -> Owner {
    let mut bytes = [0; 16];
    let mut state = !number;
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&splitmix(&mut state).to_le_bytes());
    }
    Owner::from_bytes(bytes)
}

/// A seeded source of numbers (splitmix64): the same seed gives the same run.
pub fn splitmix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut word = *state;
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

pub fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([1; 32])
}

pub fn claim(key_number: u64, owner_number: u64) -> Operation {
    let terms = ClaimTerms {
        owner: owner(owner_number),
        fingerprint: fingerprint(),
        lock_ttl: LEASE,
        record_ttl: LIFE,
        on_abandoned: OnAbandoned::Takeover,
    };
    Operation::Claim(Claim { key: key(key_number), terms })
}

pub fn write(key_number: u64, owner_number: u64, write: Write) -> Operation {
    let hold =
        Hold { key: key(key_number), owner: owner(owner_number), fingerprint: fingerprint(), attempt: 1 };
    Operation::Write(hold, write)
}

pub fn complete(key_number: u64, owner_number: u64, response: &Rc<[u8]>) -> Operation {
    write(key_number, owner_number, Write::Complete { response: Rc::clone(response), record_ttl: LIFE })
}

/// A response with a Location, whose body is so many bytes of its owner's.
pub fn response(owner_number: u64, length: usize) -> Rc<[u8]> {
    let headers = [(&b"location"[..], &b"/payments/1"[..])];
    let mut encoder = ResponseEncoder::begin(201, headers, None).expect("fits");
    encoder.push(&vec![owner_number as u8; length]);
    encoder.finish().into()
}

/// Status, body and Location of a replay.
pub fn replayed(reply: &Reply) -> (u16, Option<Vec<u8>>, Option<Vec<u8>>) {
    let Reply::Claim(Ok(ClaimReply::Completed { response, .. })) = reply else { panic!("{reply:?}") };
    let decoded = StoredResponse::decode(response).expect("a kept response");
    let location = decoded.headers.iter().find(|(name, _)| *name == b"location");
    (decoded.status, decoded.body.map(<[u8]>::to_vec), location.map(|(_, value)| value.to_vec()))
}
