//! What a table holds at the least, and what it takes at the most.

use std::cell::RefCell;
use std::rc::Rc;

use idempotency::clock::Timestamp;
use idempotency::config::WhenFull;
use idempotency::record::Reason;
use idempotency::record::codec::ResponseEncoder;
use idempotency::store::shared_data::{Geometry, StoreEvents};
use idempotency::store::{ClaimReply, StoreError, Write, WriteReply};

use crate::fake_cas::FakeCas;
use crate::operation::{
    LEASE, LIFE, Operation, Reply, at, claim, complete, replayed, response, splitmix, write,
};
use crate::{config, open};

const CLAIMED: Reply = Reply::Claim(Ok(ClaimReply::Claimed { attempt: 1 }));
const FULL: Reply = Reply::Claim(Err(StoreError::Full));

fn fail() -> Write {
    Write::Fail { reason: Reason::Reset, failed_ttl: LIFE }
}

#[test]
fn max_records_live_records_fit() {
    for max_records in [1, 4, 64, 1_000, 20_000, 131_072] {
        let cas = FakeCas::default();
        let mut store = open(&cas, &config(max_records, 1 << 30, WhenFull::Reject));
        for number in 0..u64::from(max_records) {
            assert_eq!(claim(number, number).run(&mut store, at(0)), CLAIMED, "{number} of {max_records}");
        }
        let geometry = *store.geometry();
        let ways = u64::from(geometry.buckets()) * u64::from(geometry.ways());
        println!(
            "max_records {max_records}: {geometry}, {ways} ways, {} index bytes",
            geometry.index_bytes()
        );
        assert!(cas.bytes() <= geometry.index_bytes());
    }
}

#[test]
fn a_full_table_refuses_and_runs_nothing_again() {
    let mut store = open(&FakeCas::default(), &config(4, 1 << 20, WhenFull::Reject));
    for number in 0..4 {
        assert_eq!(claim(number, number).run(&mut store, at(0)), CLAIMED);
    }
    assert_eq!(claim(4, 4).run(&mut store, at(1)), FULL);
    // What is there is answered, and ends, as ever.
    assert!(matches!(claim(0, 9).run(&mut store, at(1)), Reply::Claim(Ok(ClaimReply::InFlight { .. }))));
    let kept = response(0, 10);
    assert_eq!(complete(0, 0, &kept).run(&mut store, at(1)), Reply::Write(Ok(WriteReply::Applied)));
    assert_eq!(claim(4, 4).run(&mut store, at(1)), FULL);
    assert_eq!(complete(5, 5, &kept).run(&mut store, at(1)), Reply::Write(Err(StoreError::Full)));
    assert_eq!(write(1, 1, Write::Release).run(&mut store, at(1)), Reply::Write(Ok(WriteReply::Applied)));
    assert_eq!(claim(4, 4).run(&mut store, at(1)), CLAIMED);
    // Expired records make room.
    assert_eq!(claim(6, 6).run(&mut store, at(LIFE.as_secs())), CLAIMED);
}

#[test]
fn the_oldest_completed_record_makes_room_and_no_other() {
    let mut store = open(&FakeCas::default(), &config(6, 1 << 20, WhenFull::EvictCompleted));
    for number in 0..6 {
        assert_eq!(claim(number, number).run(&mut store, at(number)), CLAIMED);
    }
    // 0 will be abandoned, 1 has failed, 5 is alive. Of the others, the oldest is the one that was claimed first.
    let bare: Rc<[u8]> = ResponseEncoder::tombstone(204, []).unwrap().into();
    write(1, 1, fail()).run(&mut store, at(6));
    complete(4, 4, &response(4, 10)).run(&mut store, at(6));
    complete(3, 3, &bare).run(&mut store, at(7));
    complete(2, 2, &response(2, 10)).run(&mut store, at(8));
    let now = at(LEASE.as_secs() + 2);
    for (new, left) in [(12, vec![3, 4]), (13, vec![4]), (14, vec![])] {
        assert_eq!(claim(new, new).run(&mut store, now), CLAIMED);
        assert_eq!(store.take_events(), StoreEvents { evictions: 1, ..StoreEvents::default() });
        for key in left {
            replayed(&claim(key, 9).run(&mut store, now));
        }
    }
    assert_eq!(claim(15, 15).run(&mut store, now), FULL);
    assert!(matches!(claim(1, 9).run(&mut store, now), Reply::Claim(Ok(ClaimReply::Failed { .. }))));
    assert!(matches!(claim(5, 9).run(&mut store, now), Reply::Claim(Ok(ClaimReply::InFlight { .. }))));
    assert_eq!(claim(0, 9).run(&mut store, now), Reply::Claim(Ok(ClaimReply::Claimed { attempt: 2 })));
}

#[test]
fn a_response_without_room_is_a_tombstone_with_its_location() {
    let index = Geometry::for_records(8).index_bytes();
    let mut store = open(&FakeCas::default(), &config(8, index + 1_000, WhenFull::Reject));
    for (key, length, expected) in [(1, 700, WriteReply::Applied), (2, 700, WriteReply::AppliedAsTombstone)] {
        claim(key, key).run(&mut store, at(0));
        assert_eq!(
            complete(key, key, &response(key, length)).run(&mut store, at(0)),
            Reply::Write(Ok(expected))
        );
    }
    assert_eq!(replayed(&claim(1, 9).run(&mut store, at(1))).1, Some(vec![1; 700]));
    assert_eq!(replayed(&claim(2, 9).run(&mut store, at(1))), (201, None, Some(b"/payments/1".to_vec())));
    assert_eq!(store.take_events(), StoreEvents { tombstones: 1, ..StoreEvents::default() });
    // Where not even that has room, the status is told.
    let mut bare = 0;
    for key in 3..8 {
        claim(key, key).run(&mut store, at(1));
        complete(key, key, &response(key, 700)).run(&mut store, at(1));
        let (status, body, location) = replayed(&claim(key, 9).run(&mut store, at(1)));
        assert_eq!((status, body), (201, None));
        bare += usize::from(location.is_none());
    }
    assert!(bare > 0);
    // The first body expires; it is its room that the next one gets.
    let now = at(LIFE.as_secs());
    claim(11, 11).run(&mut store, now);
    let reply = complete(11, 11, &response(11, 700)).run(&mut store, now);
    assert_eq!(reply, Reply::Write(Ok(WriteReply::Applied)));
}

#[test]
fn the_oldest_bodies_make_room_and_their_keys_are_not_run_again() {
    let index = Geometry::for_records(2_000).index_bytes();
    let config = config(2_000, index + 10_000, WhenFull::EvictCompleted);
    let cas = FakeCas::default();
    let mut store = open(&cas, &config);
    assert!(store.geometry().buckets() > 30);
    for key in 0..200 {
        claim(key, key).run(&mut store, at(key));
        let reply = complete(key, key, &response(key, 1_000)).run(&mut store, at(key));
        assert_eq!(reply, Reply::Write(Ok(WriteReply::Applied)), "{key}");
        assert!(cas.bytes() <= config.max_bytes);
    }
    let mut bodies = 0;
    for key in 0..200 {
        let (status, body, _) = replayed(&claim(key, 999).run(&mut store, at(200)));
        assert_eq!(status, 201);
        bodies += usize::from(body.is_some());
    }
    assert!((7..=9).contains(&bodies), "{bodies}");
    let events = store.take_events();
    assert_eq!((events.evictions, events.tombstones), (0, 0));
    assert_eq!(events.evicted_bodies, 200 - bodies as u64);
    // What could never fit evicts nobody.
    claim(300, 300).run(&mut store, at(201));
    let reply = complete(300, 300, &response(1, 20_000)).run(&mut store, at(201));
    assert_eq!(reply, Reply::Write(Ok(WriteReply::AppliedAsTombstone)));
    assert!(store.take_events().evicted_bodies <= 1);
}

/// Operations of four workers, each let in at any step of another's, some of them dying there: the host never holds
/// more than it may.
#[test]
fn bytes_stay_within_max_bytes_under_load() {
    for seed in 0..40 {
        let mut state = seed;
        let when_full = if seed % 2 == 0 { WhenFull::Reject } else { WhenFull::EvictCompleted };
        let max_records = [8, 64, 300, 20_000][seed as usize / 2 % 4];
        let config =
            config(max_records, Geometry::for_records(max_records).index_bytes() + 20_000, when_full);
        let cas = FakeCas::default();
        let handles: Vec<FakeCas> = (0..4).map(|_| cas.another_worker()).collect();
        let workers: Vec<_> = handles
            .iter()
            .map(|handle| {
                let store =
                    idempotency::store::shared_data::SharedDataStore::open(handle.clone(), "test", &config);
                Rc::new(RefCell::new(store.unwrap()))
            })
            .collect();
        let (mut now, mut applied) = (1_000_000u64, 0);
        for _ in 0..1_500 {
            now += splitmix(&mut state) % 40_000;
            let moment = Timestamp::from_millis(now);
            let first = (splitmix(&mut state) % 4) as usize;
            let second = (first + 1 + (splitmix(&mut state) % 3) as usize) % 4;
            let (operation, other) = (random_operation(&mut state), random_operation(&mut state));
            let handle = &handles[first];
            handle.reset();
            if splitmix(&mut state).is_multiple_of(8) {
                handle.die_at((splitmix(&mut state) % 12) as usize);
            }
            let (worker, mut left) = (Rc::clone(&workers[second]), splitmix(&mut state) % 20);
            handles[second].reset();
            handle.before_each_step(move |_, _| {
                if left == 0 {
                    other.run(&mut *worker.borrow_mut(), moment);
                }
                left = left.wrapping_sub(1);
            });
            let reply = operation.run(&mut *workers[first].borrow_mut(), moment);
            applied += u64::from(reply == Reply::Write(Ok(WriteReply::Applied)));
            let bytes = cas.peak_bytes();
            assert!(bytes <= config.max_bytes, "seed {seed}: {bytes} of {}", config.max_bytes);
            assert!(cas.keys() as u64 <= Geometry::for_records(max_records).host_keys());
        }
        assert!(applied > 100, "seed {seed}: {applied}");
    }
}

fn random_operation(state: &mut u64) -> Operation {
    let (key, owner) = (splitmix(state) % 60, splitmix(state) % 6);
    match splitmix(state) % 10 {
        0..4 => claim(key, owner),
        4..8 => {
            let length = [10, 300, 3_000, 9_000][(splitmix(state) % 4) as usize];
            complete(key, owner, &response(owner, length))
        }
        8 => write(key, owner, fail()),
        _ => write(key, owner, Write::Release),
    }
}

/// Two hundred times what fits, each claimed and completed, one in eight with a body.
#[test]
fn a_flood_of_keys_leaves_what_it_found() {
    let config = config(512, 1 << 20, WhenFull::EvictCompleted);
    let cas = FakeCas::default();
    let mut store = open(&cas, &config);
    let geometry = *store.geometry();
    let (body, bare): (_, Rc<[u8]>) = (response(7, 500), ResponseEncoder::tombstone(204, []).unwrap().into());
    let day = std::time::Duration::from_secs(1 << 20);
    let keeping = |key: u64| {
        let Operation::Claim(mut keeping) = claim(key, key) else { unreachable!() };
        keeping.terms.record_ttl = day;
        keeping
    };
    // Alive, abandoned, and failed.
    let mut alive = keeping(u64::MAX);
    alive.terms.lock_ttl = day;
    for keeping in [alive, keeping(u64::MAX - 1), keeping(u64::MAX - 2)] {
        assert_eq!(Operation::Claim(keeping).run(&mut store, at(0)), CLAIMED);
    }
    let failure = Write::Fail { reason: Reason::Reset, failed_ttl: day };
    write(u64::MAX - 2, u64::MAX - 2, failure).run(&mut store, at(0));
    let mut flood = |from: u64, keys: u64| {
        for key in from..from + keys {
            assert_eq!(claim(key, key).run(&mut store, at(key / 1_000)), CLAIMED);
            let kept = if key.is_multiple_of(8) { &body } else { &bare };
            let reply = complete(key, key, kept).run(&mut store, at(key / 1_000));
            assert_eq!(reply, Reply::Write(Ok(WriteReply::Applied)));
        }
        (cas.keys(), cas.bytes(), store.take_events())
    };
    let (keys, bytes, events) = flood(0, 120_000);
    println!("after the first flood: {keys} host keys, {bytes} bytes, {events:?}");
    assert!(events.evictions > 110_000);
    assert!(keys as u64 <= geometry.host_keys() && cas.peak_bytes() <= config.max_bytes);
    let (keys_again, bytes_again, _) = flood(120_000, 50_000);
    println!("after a second flood: {keys_again} host keys, {bytes_again} bytes");
    assert_eq!(keys_again, keys);
    assert!(bytes_again.abs_diff(bytes) < bytes / 10 && cas.peak_bytes() <= config.max_bytes);
    let now = at(2_000);
    let beside = claim(u64::MAX, 1).run(&mut store, now);
    assert!(matches!(beside, Reply::Claim(Ok(ClaimReply::InFlight { .. }))), "{beside:?}");
    let failed = claim(u64::MAX - 2, 1).run(&mut store, now);
    assert!(matches!(failed, Reply::Claim(Ok(ClaimReply::Failed { .. }))), "{failed:?}");
    let takeover = claim(u64::MAX - 1, 1).run(&mut store, now);
    assert_eq!(takeover, Reply::Claim(Ok(ClaimReply::Claimed { attempt: 2 })));
}
