//! Bytes that an earlier version, another worker or somebody else may have left in a store.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::{OnAbandoned, SharedDataConfig, WhenFull};
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::codec::{DecodeError, ResponseEncoder, StoredResponse};
use idempotency::record::{ClaimTerms, Owner};
use idempotency::store::near_cache::{NearCache, NearCacheBounds};
use idempotency::store::outbox::Outbox;
use idempotency::store::shared_data::SharedDataStore;
use idempotency::store::shared_data::cas::{Cas, CasError, Seen, Slot};
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

/// Bytes that are said to be a kept response.
pub fn record_codec(data: &[u8]) {
    let stored = match StoredResponse::decode(data) {
        Ok(stored) => stored,
        Err(DecodeError::Version(version)) => return assert!(version == data[0] && version != 1),
        Err(DecodeError::Malformed) => return assert!(data.first().is_none_or(|version| *version == 1)),
    };
    // What is accepted is what the encoder writes, to the byte.
    let headers = stored.headers.iter().copied();
    let encode = |cut: usize| {
        let mut encoder = ResponseEncoder::begin(stored.status, headers.clone(), stored.origin).unwrap();
        let body = stored.body.unwrap_or_default();
        let (left, right) = body.split_at(cut.min(body.len()));
        encoder.push(left);
        encoder.push(right);
        assert_eq!((encoder.body(), encoder.body_len()), (body, body.len()));
        encoder
    };
    match stored.body {
        Some(body) => {
            assert_eq!(encode(body.len() / 2).finish(), data);
            assert_eq!(encode(1).finish(), data);
        }
        None => {
            assert_eq!(ResponseEncoder::tombstone(stored.status, headers.clone()).as_deref(), Some(data));
        }
    }
    let tombstone = encode(0).to_tombstone(|name| name.len() % 2 == 0);
    let tombstone = StoredResponse::decode(&tombstone).unwrap();
    let kept: Vec<_> = headers.clone().filter(|(name, _)| name.len() % 2 == 0).collect();
    let expected = StoredResponse { status: stored.status, headers: kept, origin: None, body: None };
    assert_eq!(tombstone, expected);
    // Neither less nor more is the same record.
    for cut in (0..data.len()).rev().take(40) {
        assert!(StoredResponse::decode(&data[..cut]).is_err(), "cut at {cut}");
    }
    assert_eq!(StoredResponse::decode(&[data, b"x"].concat()), Err(DecodeError::Malformed));
}

/// A store that refuses or takes every write, and counts them.
struct Taking {
    refuses: bool,
    keys: Vec<StoreKey>,
}

impl Store for Taking {
    fn claim(&mut self, _claim: &Claim, _now: Timestamp) -> Result<ClaimReply, StoreError> {
        panic!("an outbox makes no claims")
    }

    fn write(&mut self, hold: &Hold, _write: &Write, _now: Timestamp) -> Result<WriteReply, StoreError> {
        self.keys.push(hold.key);
        if self.refuses { Err(StoreError::Unavailable) } else { Ok(WriteReply::Applied) }
    }
}

/// Bytes that are said to be what an outbox left behind.
pub fn outbox_spill(data: &[u8]) {
    let now = Timestamp::from_millis(5_000);
    let adopt = |bytes: &[u8]| {
        let mut outbox = Outbox::new(4_096);
        outbox.adopt(bytes, now, &mut |_| {});
        outbox
    };
    let mut outbox = adopt(data);
    assert!(outbox.len() <= data.len() / 100, "{} entries of {} bytes", outbox.len(), data.len());
    let count = outbox.len();
    // What is left behind again is taken over again, the same.
    if let Some(spilled) = adopt(data).spill(usize::MAX, now, &mut |_| {}) {
        let again = adopt(&spilled).spill(usize::MAX, now, &mut |_| {});
        assert_eq!(again.as_ref(), Some(&spilled));
        // Two that left theirs under one name: the version leads once.
        assert_eq!(adopt(&[&spilled[..], &spilled[1..]].concat()).len(), 2 * count);
    }
    // Every write is tried, and kept until the store takes it.
    let mut store = Taking { refuses: true, keys: Vec::new() };
    outbox.flush(&mut store, now, &mut |_| {});
    let tried: std::collections::BTreeSet<_> = store.keys.drain(..).collect();
    assert_eq!(tried.is_empty(), count == 0);
    let mut later = now;
    store.refuses = false;
    for _ in 0..4 {
        later = later.after(Duration::from_secs(2));
        outbox.flush(&mut store, later, &mut |_| {});
    }
    assert!(outbox.is_empty());
    assert!(store.keys.iter().all(|key| tried.contains(key)));
}

/// Values under names, each with its version.
#[derive(Clone, Default)]
struct Values(Rc<RefCell<BTreeMap<String, Versioned>>>);

type Versioned = (Vec<u8>, u32);

impl Cas for Values {
    fn load(&self, name: &str) -> Result<Slot, CasError> {
        Ok(match self.0.borrow().get(name).cloned() {
            None => Slot::Absent,
            Some((bytes, cas)) if bytes.is_empty() => Slot::Emptied { cas },
            Some((bytes, cas)) => Slot::Present { bytes, cas },
        })
    }

    fn swap(&self, name: &str, seen: Seen, value: &[u8]) -> Result<(), CasError> {
        if self.load(name)?.seen() != seen {
            return Err(CasError::Lost);
        }
        let mut values = self.0.borrow_mut();
        let cas = values.len() as u32 + values.get(name).map_or(0, |(_, cas)| *cas) + 1;
        values.insert(name.to_owned(), (value.to_vec(), cas));
        Ok(())
    }
}

/// The number of a value that is spoilt and where, in the first line; then the bytes that are put there.
pub fn near_cache(data: &[u8]) {
    let [head, bytes] = super::lines(data);
    let mut numbers = head.split(|byte| *byte == b' ').map(|number| {
        std::str::from_utf8(number).ok().and_then(|number| number.parse::<usize>().ok()).unwrap_or_default()
    });
    let (which, at) = (numbers.next().unwrap_or_default(), numbers.next());
    let now = Timestamp::from_millis(1_000);
    let response = {
        let mut encoder = ResponseEncoder::begin(201, [(&b"etag"[..], &b"1"[..])], None).unwrap();
        encoder.push(b"the body that was kept");
        encoder.finish()
    };
    let second = Duration::from_secs(60);
    let (key, owner) = (StoreKey::from_bytes([3; 32]), Owner::from_bytes([4; 16]));
    let fingerprint = Fingerprint::from_bytes([5; 32]);
    let spoil = |values: &Values| {
        let mut values = values.0.borrow_mut();
        let count = values.len().max(1);
        if let Some((value, _)) = values.values_mut().nth(which % count) {
            match at {
                None => *value = bytes.to_vec(),
                Some(at) => {
                    let at = at % (value.len() + 1);
                    for (to, from) in value[at..].iter_mut().zip(bytes) {
                        *to = *from;
                    }
                }
            }
        }
    };

    let values = Values::default();
    let bounds = NearCacheBounds { max_records: 16, max_bytes: 1 << 20, ttl: second };
    let mut cache = NearCache::open(values.clone(), "redis", "p:", &bounds).unwrap();
    assert!(cache.put(&key, owner, fingerprint, &response, second, now));
    spoil(&values);
    if let Some(ClaimReply::Completed { response: read, .. }) = cache.get(&key, now) {
        assert_eq!(read, response, "spoilt bytes were replayed");
    }

    // The store itself: a kept response is replayed as it is, or not at all; and no spoilt body frees its key.
    let values = Values::default();
    let config = SharedDataConfig {
        namespace: None,
        max_records: 16,
        max_bytes: 1 << 20,
        when_full: WhenFull::Reject,
    };
    let mut store = SharedDataStore::open(values.clone(), "n", &config).unwrap();
    let hold = Hold { key, owner, fingerprint, attempt: 1 };
    let write = Write::Complete { response: Rc::from(response.as_slice()), record_ttl: second };
    assert_eq!(store.write(&hold, &write, now), Ok(WriteReply::Applied));
    let before = values.0.borrow().clone();
    spoil(&values);
    let is_index = {
        let after = values.0.borrow();
        let changed = before.iter().find(|(name, value)| after.get(*name) != Some(value));
        changed.is_some_and(|(_, (value, _))| !value.windows(8).any(|window| window == b"the body"))
    };
    let terms = ClaimTerms {
        owner: Owner::from_bytes([8; 16]),
        fingerprint,
        lock_ttl: second,
        record_ttl: second,
        on_abandoned: OnAbandoned::Retain,
    };
    match store.claim(&Claim { key, terms }, now) {
        Ok(ClaimReply::Completed { response: read, .. }) => {
            let read = StoredResponse::decode(&read).expect("a response");
            assert!(read.body.is_none_or(|body| body == b"the body that was kept"));
        }
        Ok(ClaimReply::Claimed { .. }) => assert!(is_index, "a spoilt body freed its key"),
        Ok(ClaimReply::InFlight { .. } | ClaimReply::Abandoned { .. } | ClaimReply::Failed { .. })
        | Err(_) => {}
    }
}
