//! What a namespace holds, and who may use it.

use idempotency::config::WhenFull;
use idempotency::store::Store as _;
use idempotency::store::shared_data::{Geometry, OpenError, SharedDataStore};
use idempotency::store::{ClaimReply, StoreError};

use crate::config;
use crate::fake_cas::FakeCas;
use crate::operation::{Operation, Reply, at, claim, complete, response};

const MEBIBYTE: u64 = 1 << 20;

#[test]
fn the_same_table_is_opened_again_with_all_it_holds() {
    let cas = FakeCas::default();
    let mut store =
        SharedDataStore::open(cas.clone(), "n", &config(100, MEBIBYTE, WhenFull::Reject)).unwrap();
    claim(1, 1).run(&mut store, at(0));
    // Neither the bound nor what happens when full is the table's shape.
    let other = config(100, 2 * MEBIBYTE, WhenFull::EvictCompleted);
    let mut reopened = SharedDataStore::open(cas, "n", &other).unwrap();
    let reply = claim(1, 2).run(&mut reopened, at(1));
    assert!(matches!(reply, Reply::Claim(Ok(ClaimReply::InFlight { .. }))), "{reply:?}");
}

#[test]
fn another_geometry_under_a_known_namespace_is_refused_with_the_ways_out() {
    let cas = FakeCas::default();
    SharedDataStore::open(cas.clone(), "orders", &config(1_000, MEBIBYTE, WhenFull::Reject)).unwrap();
    let error = SharedDataStore::open(cas.clone(), "orders", &config(4_000, 4 * MEBIBYTE, WhenFull::Reject));
    let message = error.unwrap_err().to_string();
    let (held, wanted) = (Geometry::for_records(1_000), Geometry::for_records(4_000));
    for part in
        ["orders", "1000", "4000", &held.to_string(), &wanted.to_string(), "restart Envoy", "`namespace`"]
    {
        assert!(message.contains(part), "{part:?} is not in: {message}");
    }
    SharedDataStore::open(cas, "orders-2", &config(4_000, 4 * MEBIBYTE, WhenFull::Reject)).unwrap();
}

#[test]
fn two_workers_that_open_at_once_agree() {
    for step in 0..2 {
        let cas = FakeCas::default();
        let (other, mut number) = (cas.another_worker(), 0);
        cas.before_each_step(move |_, _| {
            if number == step {
                SharedDataStore::open(other.clone(), "n", &config(10, MEBIBYTE, WhenFull::Reject)).unwrap();
            }
            number += 1;
        });
        SharedDataStore::open(cas.clone(), "n", &config(10, MEBIBYTE, WhenFull::Reject)).unwrap();
        assert_eq!(cas.keys(), 1);
    }
}

#[test]
fn namespaces_do_not_touch() {
    let cas = FakeCas::default();
    let long = "n".repeat(300);
    let namespaces = ["", "a", "a:b", "a%3Ab", "a:", "é", &long, &long[1..]];
    for (owner, namespace) in (0..).zip(namespaces) {
        let config = config(10, MEBIBYTE, WhenFull::Reject);
        let mut store = SharedDataStore::open(cas.clone(), namespace, &config).unwrap();
        let reply = claim(1, owner).run(&mut store, at(0));
        assert_eq!(reply, Reply::Claim(Ok(ClaimReply::Claimed { attempt: 1 })), "{namespace}");
    }
    assert_eq!(cas.keys(), 2 * namespaces.len());
}

#[test]
fn a_geometry_that_cannot_be_read_is_never_started_over() {
    for foreign in [&b""[..], b"x", b"IDMG", &[0; 24], &[0xff; 24]] {
        let cas = FakeCas::default();
        cas.overwrite("idem:n:geometry", foreign);
        let error = SharedDataStore::open(cas.clone(), "n", &config(10, MEBIBYTE, WhenFull::Reject));
        assert_eq!(error.unwrap_err(), OpenError::Unreadable { namespace: "n".to_owned() });
        assert_eq!((cas.keys(), cas.get("idem:n:geometry").as_deref()), (1, Some(foreign)));
    }
}

#[test]
fn an_index_beyond_max_bytes_is_refused_with_both_numbers() {
    let index = Geometry::for_records(1_000).index_bytes();
    let open = |max_bytes| {
        SharedDataStore::open(FakeCas::default(), "n", &config(1_000, max_bytes, WhenFull::Reject))
            .map(|_| ())
    };
    let message = open(index).unwrap_err().to_string();
    assert!(message.contains(&format!("max_bytes {index}")), "{message}");
    assert!(message.contains("max_records 1000"), "{message}");
    assert_eq!(open(index + 1), Ok(()));
}

// "Absent" would run the key again.
#[test]
fn a_bucket_that_cannot_be_read_refuses_and_is_left_alone() {
    let cas = FakeCas::default();
    let mut store =
        SharedDataStore::open(cas.clone(), "n", &config(4, MEBIBYTE, WhenFull::EvictCompleted)).unwrap();
    claim(1, 1).run(&mut store, at(0));
    let name = cas.names().into_iter().find(|name| name.contains(":b")).unwrap();
    let sound = cas.get(&name).unwrap();
    let mut damaged = vec![Vec::new(), vec![0], b"IDM".to_vec(), vec![0; sound.len()], sound[1..].to_vec()];
    damaged.extend((0..8).map(|at| {
        let mut other = sound.clone();
        other[at] ^= 0x40;
        other
    }));
    for length in 0..sound.len() {
        damaged.push(sound[..length].to_vec());
    }
    let mut state = 7;
    for length in 0..300 {
        damaged.push((0..length).map(|_| crate::operation::splitmix(&mut state) as u8).collect());
    }
    for value in damaged {
        cas.overwrite(&name, &value);
        for key in [1, 2] {
            let Operation::Claim(operation) = claim(key, 2) else { unreachable!() };
            assert_eq!(store.claim(&operation, at(1)), Err(StoreError::Unreadable), "{value:?}");
            let reply = complete(key, 1, &response(1, 10)).run(&mut store, at(1));
            assert_eq!(reply, Reply::Write(Err(StoreError::Unreadable)));
        }
        assert_eq!(cas.get(&name), Some(value));
    }
    cas.overwrite(&name, &sound);
    let reply = claim(1, 2).run(&mut store, at(1));
    assert!(matches!(reply, Reply::Claim(Ok(ClaimReply::InFlight { .. }))), "{reply:?}");
}

#[test]
fn a_fingerprint_of_another_version_refuses_its_key_only() {
    let cas = FakeCas::default();
    let mut store = SharedDataStore::open(cas.clone(), "n", &config(4, MEBIBYTE, WhenFull::Reject)).unwrap();
    claim(1, 1).run(&mut store, at(0));
    let name = cas.names().into_iter().find(|name| name.contains(":b")).unwrap();
    let mut value = cas.get(&name).unwrap();
    value[16 + 3] ^= 0x80;
    cas.overwrite(&name, &value);
    assert_eq!(claim(1, 2).run(&mut store, at(1)), Reply::Claim(Err(StoreError::Unreadable)));
    assert_eq!(claim(2, 2).run(&mut store, at(1)), Reply::Claim(Ok(ClaimReply::Claimed { attempt: 1 })));
    // Nobody has to compare it any more.
    assert_eq!(claim(1, 2).run(&mut store, at(9_999)), Reply::Claim(Ok(ClaimReply::Claimed { attempt: 1 })));
}
