//! Every operation against every other, with the second worker let in at each step of the first.
//!
//! The map's steps are atomic, so running the second operation between two steps of the first is every schedule that
//! two workers can have with one of them uninterrupted; with a third one, its operations land at two places. What
//! comes out must be what some order of whole operations gives on the reference store: replies and all later answers.

use std::cell::RefCell;
use std::rc::Rc;

use idempotency::clock::Timestamp;
use idempotency::config::{SharedDataConfig, WhenFull};
use idempotency::record::Reason;
use idempotency::store::shared_data::SharedDataStore;
use idempotency::store::{ClaimReply, Store, Write, WriteReply};

use crate::fake_cas::FakeCas;
use crate::operation::{LEASE, LIFE, Operation, Reply, at, claim, complete, response, write};
use crate::reference::ReferenceStore;
use crate::{config, open};

/// What was there before, and when the race is run.
#[derive(Debug, Clone)]
struct Scene {
    before: Vec<(Operation, Timestamp)>,
    now: Timestamp,
}

fn scenes() -> Vec<Scene> {
    let (lease, life) = (LEASE.as_secs(), LIFE.as_secs());
    let scene = |before: Vec<(Operation, Timestamp)>, now| Scene { before, now: at(now) };
    let first = || (claim(1, 1), at(0));
    vec![
        scene(vec![], 0),
        scene(vec![first()], 1),
        scene(vec![first()], lease),
        scene(vec![first(), (claim(1, 2), at(lease))], lease + 1),
        scene(vec![first(), (claim(1, 2), at(lease))], 2 * lease),
        scene(vec![first(), (complete(1, 1, &response(1, 40)), at(1))], 2),
        scene(vec![first(), (write(1, 1, fail()), at(1))], 2),
        scene(vec![first(), (complete(1, 1, &response(1, 40)), at(1))], life + 1),
        scene(vec![first()], life),
        scene(
            vec![
                (claim(2, 1), at(0)),
                (complete(2, 1, &response(9, 70)), at(0)),
                (claim(1, 1), at(life - 1)),
            ],
            life,
        ),
    ]
}

fn fail() -> Write {
    Write::Fail { reason: Reason::Timeout, failed_ttl: LIFE }
}

fn renew() -> Write {
    Write::Renew { lock_ttl: LEASE, record_ttl: LIFE }
}

fn operations(keys: &[u64], owners: &[u64]) -> Vec<Operation> {
    let mut operations = Vec::new();
    for &key in keys {
        for &owner in owners {
            operations.push(claim(key, owner));
            operations.push(complete(key, owner, &response(owner, 30 + 7 * owner as usize)));
            operations.extend([renew(), fail(), Write::Release].map(|kind| write(key, owner, kind)));
        }
    }
    operations
}

/// What everybody was told, and what anybody is told afterwards.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outcome {
    replies: Vec<Reply>,
    after: Vec<Reply>,
}

/// What two keys answer, now and when every lease is over.
fn answers(store: &mut dyn Store, now: Timestamp) -> Vec<Reply> {
    let mut answers = Vec::new();
    for now in [now, now.after(LEASE)] {
        for key in [1, 2] {
            answers.push(claim(key, 1_000).run(store, now));
        }
    }
    answers
}

/// The outcomes of every order that keeps the order of what is let in.
fn serial_outcomes(scene: &Scene, first: &Operation, let_in: &[&Operation]) -> Vec<Outcome> {
    (0..=let_in.len())
        .map(|place| {
            let mut store = ReferenceStore::default();
            for (operation, now) in &scene.before {
                operation.run(&mut store, *now);
            }
            let mut order: Vec<(usize, &Operation)> = let_in.iter().copied().enumerate().collect();
            order.iter_mut().for_each(|(number, _)| *number += 1);
            order.insert(place, (0, first));
            let mut replies: Vec<_> =
                order.into_iter().map(|(number, run)| (number, run.run(&mut store, scene.now))).collect();
            replies.sort_by_key(|(number, _)| *number);
            let replies = replies.into_iter().map(|(_, reply)| reply).collect();
            Outcome { replies, after: answers(&mut store, scene.now) }
        })
        .collect()
}

struct Race {
    worker: SharedDataStore<FakeCas>,
    handle: FakeCas,
    others: Rc<RefCell<SharedDataStore<FakeCas>>>,
}

fn table() -> SharedDataConfig {
    config(8, 1 << 20, WhenFull::Reject)
}

fn set_up(scene: &Scene) -> Race {
    let cas = FakeCas::default();
    let mut others = open(&cas, &table());
    for (operation, now) in &scene.before {
        operation.run(&mut others, *now);
    }
    let handle = cas.another_worker();
    let worker = SharedDataStore::open(handle.clone(), "test", &table()).expect("the table opens");
    handle.reset();
    Race { worker, handle, others: Rc::new(RefCell::new(others)) }
}

/// Runs `first`, with the others before its steps of these numbers. `None` if it has fewer steps.
fn race(scene: &Scene, first: &Operation, let_in: &[(usize, &Operation)]) -> Option<Outcome> {
    let Race { mut worker, handle, others } = set_up(scene);
    let replies = Rc::new(RefCell::new(Vec::new()));
    let (now, mut step) = (scene.now, 0);
    let mut waiting: Vec<(usize, Operation)> = let_in.iter().map(|(at, run)| (*at, (*run).clone())).collect();
    handle.before_each_step({
        let (others, replies) = (Rc::clone(&others), Rc::clone(&replies));
        move |_, _| {
            while waiting.first().is_some_and(|(at, _)| *at == step) {
                let (_, operation) = waiting.remove(0);
                replies.borrow_mut().push(operation.run(&mut *others.borrow_mut(), now));
            }
            step += 1;
        }
    });
    let reply = first.run(&mut worker, now);
    handle.reset();
    let mut replies = replies.borrow().clone();
    if replies.len() < let_in.len() {
        return None;
    }
    replies.insert(0, reply);
    let after = answers(&mut *others.borrow_mut(), now);
    Some(Outcome { replies, after })
}

#[test]
fn two_operations_come_out_as_if_one_had_followed_the_other() {
    let operations = operations(&[1, 2], &[1, 2]);
    let mut races = 0;
    for (number, scene) in scenes().iter().enumerate() {
        for first in &operations {
            for second in &operations {
                let expected = serial_outcomes(scene, first, &[second]);
                for step in 0.. {
                    let Some(found) = race(scene, first, &[(step, second)]) else { break };
                    assert!(
                        expected.contains(&found),
                        "scene {number}, step {step}:\n{first:?}\n{second:?}\n{found:?}\nis none of {expected:?}"
                    );
                    races += 1;
                }
            }
        }
    }
    println!("{races} races of two");
    assert!(races > 10_000);
}

#[test]
fn three_operations_come_out_as_if_one_had_followed_the_other() {
    let operations = operations(&[1], &[1, 2]);
    let mut races = 0;
    for (number, scene) in scenes().iter().enumerate() {
        // The longest operation, between two others.
        for first in [complete(1, 1, &response(1, 37)), claim(1, 3)] {
            for second in &operations {
                for third in &operations {
                    let expected = serial_outcomes(scene, &first, &[second, third]);
                    'second: for step in 0.. {
                        for later in step.. {
                            let Some(found) = race(scene, &first, &[(step, second), (later, third)]) else {
                                if later == step {
                                    break 'second;
                                }
                                break;
                            };
                            assert!(
                                expected.contains(&found),
                                "scene {number}, steps {step} and {later}:\n{first:?}\n{second:?}\n{third:?}\n\
                                 {found:?}\nis none of {expected:?}"
                            );
                            races += 1;
                        }
                    }
                }
            }
        }
    }
    println!("{races} races of three");
    assert!(races > 10_000);
}

#[test]
fn of_two_claims_exactly_one_is_claimed() {
    for scene in scenes().into_iter().filter(|scene| scene.before.len() < 2) {
        for step in 0.. {
            let Some(outcome) = race(&scene, &claim(1, 11), &[(step, &claim(1, 12))]) else { break };
            let claimed = outcome
                .replies
                .iter()
                .filter(|reply| matches!(reply, Reply::Claim(Ok(ClaimReply::Claimed { .. }))));
            let live = scene.now == at(1);
            assert_eq!(claimed.count(), usize::from(!live), "{scene:?} {step}: {outcome:?}");
        }
    }
}

// A04: the bytes that are replayed are those of the completion that was applied, all of them.
#[test]
fn a_stale_completion_never_overwrites_the_new_owners_bytes() {
    let scene = &scenes()[2];
    let (first, second) = (response(1, 50), response(2, 60));
    let (stale, takeover, completion) = (complete(1, 1, &first), claim(1, 2), complete(1, 2, &second));
    let mut stale_replies = 0;
    for step in 0..20 {
        for later in step..20 {
            let Some(outcome) = race(scene, &stale, &[(step, &takeover), (later, &completion)]) else {
                continue;
            };
            let kept = match &outcome.replies[0] {
                Reply::Write(Ok(WriteReply::Applied)) => &first,
                Reply::Write(Ok(WriteReply::Stale)) => {
                    stale_replies += 1;
                    &second
                }
                other @ (Reply::Claim(_) | Reply::Write(_)) => panic!("{other:?}"),
            };
            for answer in [&outcome.after[0], &outcome.after[2]] {
                let Reply::Claim(Ok(ClaimReply::Completed { response, .. })) = answer else {
                    panic!("{answer:?}")
                };
                assert_eq!(response.as_slice(), &**kept);
            }
        }
    }
    assert!(stale_replies > 5, "{stale_replies}");
}

// A02, A20: contention is retried inside.
#[test]
fn a_lost_swap_changes_no_reply() {
    let operations = operations(&[1], &[1, 2]);
    for scene in &scenes() {
        for operation in &operations {
            let expected = serial_outcomes(scene, operation, &[]);
            for (first, second) in (0..16).flat_map(|first| (first..16).map(move |second| (first, second))) {
                let Race { mut worker, handle, others } = set_up(scene);
                handle.lose_at(first);
                handle.lose_at(second);
                let reply = operation.run(&mut worker, scene.now);
                handle.reset();
                let after = answers(&mut *others.borrow_mut(), scene.now);
                let found = Outcome { replies: vec![reply], after };
                assert!(
                    expected.contains(&found),
                    "{scene:?}\n{operation:?}\n{found:?}\nis not {expected:?}"
                );
            }
        }
    }
}

#[test]
fn endless_contention_ends_as_unavailable() {
    let Race { mut worker, handle, .. } = set_up(&scenes()[0]);
    (0..100_000).for_each(|step| handle.lose_at(step));
    for operation in [claim(1, 1), complete(1, 1, &response(1, 10))] {
        let reply = operation.run(&mut worker, at(0));
        assert!(format!("{reply:?}").contains("Unavailable"), "{reply:?}");
    }
    assert!(handle.steps() < 5_000, "{}", handle.steps());
}
