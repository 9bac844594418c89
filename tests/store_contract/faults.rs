//! Workers that die in the middle of an operation, and slots that hold what they should not.

use idempotency::clock::Timestamp;
use idempotency::config::{SharedDataConfig, WhenFull};
use idempotency::record::Reason;
use idempotency::store::shared_data::{Geometry, SharedDataStore};
use idempotency::store::{ClaimReply, Write, WriteReply};

use crate::fake_cas::FakeCas;
use crate::operation::{LEASE, LIFE, Operation, Reply, at, claim, complete, replayed, response, write};
use crate::{config, open};

/// A body's slot: the response and its mark.
fn slot_bytes(length: usize) -> u64 {
    response(1, length).len() as u64 + 56
}

fn table_with_room_for(bodies: u64, length: usize, when_full: WhenFull) -> SharedDataConfig {
    let index = Geometry::for_records(8).index_bytes();
    config(8, index + bodies * slot_bytes(length), when_full)
}

/// A worker that dies at this step of the operation; `false` if the operation has fewer.
fn dies_in(
    cas: &FakeCas,
    config: &SharedDataConfig,
    operation: &Operation,
    now: Timestamp,
    step: usize,
) -> bool {
    let handle = cas.another_worker();
    let mut worker = SharedDataStore::open(handle.clone(), "test", config).expect("the table opens");
    handle.reset();
    handle.die_at(step);
    operation.run(&mut worker, now);
    handle.steps() > step
}

fn slots_in_use(cas: &FakeCas) -> Vec<String> {
    let slots = cas.names().into_iter().filter(|name| name.contains(":s"));
    slots.filter(|name| cas.get(name).is_some_and(|value| !value.is_empty())).collect()
}

fn applied(reply: &Reply) -> bool {
    *reply == Reply::Write(Ok(WriteReply::Applied))
}

#[test]
fn a_worker_that_dies_leaves_the_operation_done_or_not() {
    let config = table_with_room_for(8, 100, WhenFull::Reject);
    let fail = write(1, 1, Write::Fail { reason: Reason::Reset, failed_ttl: LIFE });
    for operation in [complete(1, 1, &response(1, 100)), fail, write(1, 1, Write::Release)] {
        let mut last_was_done = false;
        for step in 0.. {
            let cas = FakeCas::default();
            let mut other = open(&cas, &config);
            claim(1, 1).run(&mut other, at(0));
            if !dies_in(&cas, &config, &operation, at(1), step) {
                break;
            }
            let reply = claim(1, 2).run(&mut other, at(2));
            let done = !matches!(reply, Reply::Claim(Ok(ClaimReply::InFlight { .. })));
            if let Reply::Claim(Ok(ClaimReply::Completed { .. })) = &reply {
                // Never an entry whose body is missing.
                assert_eq!(replayed(&reply).1, Some(vec![1; 100]), "step {step}");
            }
            assert!(done || !last_was_done, "step {step}: {reply:?}");
            last_was_done = done;
        }
        assert!(last_was_done, "{operation:?}");
    }
}

// What a trapped VM reserved or wrote, and never published, is found when room is wanted.
#[test]
fn a_leaked_reservation_is_found_within_half_a_minute() {
    let config = table_with_room_for(1, 100, WhenFull::Reject);
    let mut published = 0;
    for step in 0.. {
        let cas = FakeCas::default();
        let mut other = open(&cas, &config);
        claim(1, 1).run(&mut other, at(0));
        if !dies_in(&cas, &config, &complete(1, 1, &response(1, 100)), at(1), step) {
            break;
        }
        let mut kept = 0;
        for key in 2..=7 {
            let now = at(5 * key);
            claim(key, key).run(&mut other, now);
            kept += u64::from(applied(&complete(key, key, &response(key, 100)).run(&mut other, now)));
        }
        let reply = claim(1, 9).run(&mut other, at(40));
        let first_is_kept = matches!(reply, Reply::Claim(Ok(ClaimReply::Completed { .. })));
        published += u64::from(first_is_kept);
        assert_eq!(kept, u64::from(!first_is_kept), "step {step}");
        assert!(cas.peak_bytes() <= config.max_bytes, "step {step}: {} bytes", cas.peak_bytes());
        assert_eq!(slots_in_use(&cas).len(), 1, "step {step}");
    }
    assert!(published > 0);
}

#[test]
fn nothing_is_left_of_a_dead_worker_when_its_record_is_gone() {
    let config = table_with_room_for(8, 100, WhenFull::Reject);
    let completion = complete(1, 1, &response(1, 100));
    // How the record ends: it expires, or the next attempt ends it in some way.
    let ends: [&[Operation]; 5] = [
        &[],
        &[write(1, 2, Write::Release)],
        &[write(1, 2, Write::Fail { reason: Reason::Reset, failed_ttl: LIFE })],
        &[complete(1, 2, &idempotency::record::codec::ResponseEncoder::tombstone(204, []).unwrap().into())],
        &[complete(1, 2, &response(2, 50))],
    ];
    for end in ends {
        for step in 0.. {
            let cas = FakeCas::default();
            let mut other = open(&cas, &config);
            claim(1, 1).run(&mut other, at(0));
            if !dies_in(&cas, &config, &completion, at(1), step) {
                break;
            }
            claim(1, 2).run(&mut other, at(LEASE.as_secs() + 1));
            for operation in end {
                operation.run(&mut other, at(LEASE.as_secs() + 2));
            }
            // Another record's write drops what is expired.
            claim(2, 9).run(&mut other, at(3 * LIFE.as_secs()));
            assert_eq!(slots_in_use(&cas), Vec::<String>::new(), "step {step}, {end:?}");
        }
    }
}

#[test]
fn a_stale_completion_takes_its_bytes_and_its_reservation_back() {
    let config = table_with_room_for(1, 100, WhenFull::Reject);
    let mut stale = 0;
    for step in 0..12 {
        let cas = FakeCas::default();
        let mut other = open(&cas, &config);
        let now = at(LEASE.as_secs());
        claim(1, 1).run(&mut other, at(0));
        let handle = cas.another_worker();
        let mut worker = SharedDataStore::open(handle.clone(), "test", &config).expect("the table opens");
        let (mut taker, mut left) = (open(&cas, &config), step);
        handle.before_each_step(move |_, _| {
            if left == 0 {
                claim(1, 2).run(&mut taker, now);
            }
            left -= 1;
        });
        if complete(1, 1, &response(1, 100)).run(&mut worker, now) != Reply::Write(Ok(WriteReply::Stale)) {
            continue;
        }
        stale += 1;
        assert_eq!(slots_in_use(&cas), Vec::<String>::new(), "step {step}");
        assert!(applied(&complete(1, 2, &response(2, 100)).run(&mut other, now)), "step {step}");
        assert!(cas.peak_bytes() <= config.max_bytes);
    }
    assert!(stale > 4, "{stale}");
}

#[test]
fn a_slot_with_other_bytes_answers_a_tombstone_with_the_status() {
    let config = table_with_room_for(8, 100, WhenFull::Reject);
    let cas = FakeCas::default();
    let mut store = open(&cas, &config);
    for key in [1, 2] {
        claim(key, key).run(&mut store, at(0));
        assert!(applied(&complete(key, key, &response(key, 100)).run(&mut store, at(0))));
    }
    let [first, second] = &slots_in_use(&cas)[..] else { panic!("two slots") };
    let (one, other) = (cas.get(first).unwrap(), cas.get(second).unwrap());
    let mut torn = one.clone();
    torn[40] ^= 1;
    for value in [&other[..], &torn, &one[1..], &one[..50], b"x", b""] {
        cas.overwrite(first, value);
        let replays = [1, 2].map(|key| replayed(&claim(key, 9).run(&mut store, at(1))).1);
        assert_eq!(replays.iter().filter(|body| body.is_none()).count(), 1, "{replays:?}");
    }
    for key in [1, 2] {
        assert_eq!(replayed(&claim(key, 9).run(&mut store, at(1))).0, 201);
    }
    cas.overwrite(first, &one);
    for key in [1, 2] {
        assert_eq!(replayed(&claim(key, 9).run(&mut store, at(1))).1, Some(vec![key as u8; 100]));
    }
}

#[test]
fn a_reused_slot_replays_its_own_record_only() {
    let config = table_with_room_for(8, 100, WhenFull::Reject);
    let cas = FakeCas::default();
    let mut store = open(&cas, &config);
    for round in 0..50 {
        let now = at(round * LIFE.as_secs());
        for key in 1..=8 {
            let number = round * 8 + key;
            assert_eq!(
                claim(number, number).run(&mut store, now),
                Reply::Claim(Ok(ClaimReply::Claimed { attempt: 1 }))
            );
            assert!(applied(&complete(number, number, &response(number, 100)).run(&mut store, now)));
        }
        for key in 1..=8 {
            let number = round * 8 + key;
            assert_eq!(replayed(&claim(number, 9).run(&mut store, now)).1, Some(vec![number as u8; 100]));
        }
        assert_eq!(slots_in_use(&cas).len(), 8);
    }
    // The geometry, a bucket, a ledger, and a name for each way.
    assert_eq!(cas.keys(), 11);
}

#[test]
fn a_ledger_that_cannot_be_read_gives_no_room() {
    let config = table_with_room_for(8, 100, WhenFull::EvictCompleted);
    let cas = FakeCas::default();
    let mut store = open(&cas, &config);
    claim(1, 1).run(&mut store, at(0));
    complete(1, 1, &response(1, 100)).run(&mut store, at(0));
    let ledger = cas.names().into_iter().find(|name| name.contains(":l")).unwrap();
    for (key, foreign) in [(2, &b""[..]), (3, b"x"), (4, &[0; 24])] {
        cas.overwrite(&ledger, foreign);
        claim(key, key).run(&mut store, at(0));
        let reply = complete(key, key, &response(key, 100)).run(&mut store, at(0));
        assert_eq!(reply, Reply::Write(Ok(WriteReply::AppliedAsTombstone)));
        assert_eq!(replayed(&claim(1, 9).run(&mut store, at(1))).1, Some(vec![1; 100]));
        assert_eq!(replayed(&claim(key, 9).run(&mut store, at(1))), (201, None, None));
    }
}
