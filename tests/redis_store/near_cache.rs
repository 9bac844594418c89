//! The near cache over the map that stands for Envoy's shared data.

use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::record::codec::ResponseEncoder;
use idempotency::store::ClaimReply;
use idempotency::store::near_cache::{NearCache, NearCacheBounds};

use crate::fake_cas::FakeCas;
use crate::fixture::{LIFE, hold, response};

const BOUNDS: NearCacheBounds =
    NearCacheBounds { max_records: 1_000, max_bytes: 4 << 20, ttl: Duration::from_secs(60) };
const NOW: Timestamp = Timestamp::from_millis(5_000);

fn open(cas: &FakeCas, cluster: &str, prefix: &str) -> NearCache<FakeCas> {
    NearCache::open(cas.another_worker(), cluster, prefix, &BOUNDS).unwrap()
}

fn put(cache: &mut NearCache<FakeCas>, key: u64, response: &[u8], life: Duration) -> bool {
    let copied = hold(key, 1);
    cache.put(&copied.key, copied.owner, copied.fingerprint, response, life, NOW)
}

#[test]
fn every_worker_sees_a_copy_until_its_time_is_over() {
    let cas = FakeCas::default();
    let kept = response(b"kept");
    let key = hold(1, 1).key;
    let mut here = open(&cas, "redis-link", "idem:");
    let mut there = open(&cas, "redis-link", "idem:");
    assert_eq!(there.get(&key, NOW), None);
    assert!(put(&mut here, 1, &kept, LIFE));
    let copy = ClaimReply::Completed { fingerprint: hold(1, 1).fingerprint, response: kept.clone() };
    for cache in [&mut here, &mut there] {
        assert_eq!(cache.get(&key, NOW.after(BOUNDS.ttl - Duration::from_millis(1))), Some(copy.clone()));
        assert_eq!(cache.get(&key, NOW.after(BOUNDS.ttl)), None);
    }
    // No longer than Redis keeps it.
    assert!(put(&mut here, 2, &kept, Duration::from_secs(1)));
    assert_eq!(here.get(&hold(2, 1).key, NOW.after(Duration::from_secs(1))), None);
    assert!(!put(&mut here, 3, &kept, Duration::ZERO));
}

#[test]
fn each_cluster_and_prefix_has_its_own() {
    let cas = FakeCas::default();
    let kept = response(b"kept");
    assert!(put(&mut open(&cas, "redis", "a:"), 1, &kept, LIFE));
    for (cluster, prefix) in [("redis", "b:"), ("redisa", ":"), ("other", "a:"), ("redi", "sa:")] {
        assert_eq!(open(&cas, cluster, prefix).get(&hold(1, 1).key, NOW), None, "{cluster} {prefix}");
    }
}

#[test]
fn a_tombstone_is_not_shown() {
    let mut cache = open(&FakeCas::default(), "redis", "idem:");
    let lines = [(&b"location"[..], &b"/1"[..])];
    for tombstone in [ResponseEncoder::tombstone(201, lines), ResponseEncoder::tombstone(201, [])] {
        assert!(!put(&mut cache, 1, &tombstone.unwrap(), LIFE));
        assert_eq!(cache.get(&hold(1, 1).key, NOW), None);
    }
    assert!(!put(&mut cache, 1, b"no response", LIFE));
}

// Redis has what has no room here: nobody is told that it was not kept.
#[test]
fn what_has_no_room_is_not_shown_as_lost() {
    let mut cache = open(&FakeCas::default(), "redis", "idem:");
    let big = response(&vec![7; 300 << 10]);
    for key in 0..200 {
        put(&mut cache, key, &big, LIFE);
    }
    let mut shown = 0;
    for key in 0..200 {
        if let Some(reply) = cache.get(&hold(key, 1).key, NOW) {
            let fingerprint = hold(key, 1).fingerprint;
            assert_eq!(reply, ClaimReply::Completed { fingerprint, response: big.clone() });
            shown += 1;
        }
    }
    assert!((1..20).contains(&shown), "{shown}");
    assert!(!put(&mut cache, 1_000, &response(&vec![7; 8 << 20]), LIFE));
    assert_eq!(cache.get(&hold(1_000, 1).key, NOW), None);
}
