//! A Redis Cluster with a shard that hangs: its operations hold nobody else's back for long. On virtual time.

use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::store::redis::slot::range_of;
use idempotency::store::redis::{Answer, Batcher, Dispatch, Priority, SCRIPTS};
use idempotency::store::{ClaimReply, StoreError};

use crate::fixture::{claim, hold, name, settings};

const CLAIMED: &str = "*2\r\n$7\r\nclaimed\r\n:1\r\n";
const FAILED: &str = "-upstream failure\r\n";

/// The shard that hangs has the lower half of the slots.
fn hangs(key: u64) -> bool {
    range_of(name(&hold(key, 1)).as_bytes()) < 1 << 32
}

struct World {
    batcher: Batcher,
    now: Timestamp,
}

impl World {
    fn new() -> World {
        World { batcher: Batcher::new(settings(), SCRIPTS), now: Timestamp::from_millis(1_000) }
    }

    fn submit(&mut self, keys: impl IntoIterator<Item = u64>) {
        for key in keys {
            self.batcher.submit(key, claim(&hold(key, 1)), Priority::Normal, self.now);
        }
    }

    /// The next callout, and the keys in it.
    fn poll(&mut self) -> Option<(Dispatch, Vec<u64>)> {
        let dispatch = self.batcher.poll(self.now)?;
        let body = String::from_utf8_lossy(&dispatch.request.body).into_owned();
        let mut keys: Vec<(usize, u64)> =
            (0..4_000).filter_map(|key| Some((body.find(&name(&hold(key, 1)))?, key))).collect();
        keys.sort_unstable();
        assert_eq!(keys.len(), dispatch.operations);
        Some((dispatch, keys.into_iter().map(|(_, key)| key).collect()))
    }

    fn reply(&mut self, dispatch: &Dispatch, keys: &[u64], is_up: bool) {
        let values: String =
            keys.iter().map(|key| if hangs(*key) && !is_up { FAILED } else { CLAIMED }).collect();
        self.batcher.on_reply(dispatch.batch, Ok(format!("{values}+OK\r\n").as_bytes()), self.now);
    }

    fn answered(&mut self) -> Vec<u64> {
        let mut answered: Vec<u64> = std::iter::from_fn(|| self.batcher.next_answer())
            .map(|(key, answer)| {
                let Answer::Claim(Ok(claimed)) = answer else { panic!("{key}: {answer:?}") };
                assert_eq!(claimed.reply, ClaimReply::Claimed { attempt: 1 });
                key
            })
            .collect();
        answered.sort_unstable();
        answered
    }

    fn pass(&mut self, millis: u64) {
        self.now = self.now.after(Duration::from_millis(millis));
        self.batcher.on_tick(self.now);
    }
}

fn keys(of: std::ops::Range<u64>, hanging: bool) -> Vec<u64> {
    of.filter(|key| hangs(*key) == hanging).collect()
}

#[test]
fn a_shard_that_hangs_holds_one_batch_back_and_then_only_its_own() {
    let mut world = World::new();
    world.submit(0..40);
    let (first, all) = world.poll().unwrap();
    assert_eq!(all.len(), 40);
    world.pass(100);
    world.reply(&first, &all, false);
    assert_eq!(world.answered(), keys(0..40, false));
    // What failed goes again, by itself; what comes does not wait for it.
    let (again, failed) = world.poll().unwrap();
    assert_eq!(failed, keys(0..40, true));
    world.submit(40..80);
    let seen: Vec<u64> =
        keys(0..40, true).iter().map(|key| range_of(name(&hold(*key, 1)).as_bytes())).collect();
    let (well, live) = world.poll().unwrap();
    for key in keys(40..80, false) {
        assert!(live.contains(&key), "{key}");
    }
    for key in &live {
        assert!(
            !seen.contains(&range_of(name(&hold(*key, 1)).as_bytes())),
            "{key} is of a range that failed"
        );
    }
    world.reply(&well, &live, true);
    assert_eq!(world.answered(), {
        let mut live = live.clone();
        live.sort_unstable();
        live
    });
    // What is of a slot that failed goes behind it, and takes no place from the others.
    let is_seen = |key: &u64| seen.contains(&range_of(name(&hold(*key, 1)).as_bytes()));
    let late: Vec<u64> = (1_000..4_000).filter(is_seen).take(5).collect();
    world.submit(late.clone());
    let (other, behind) = world.poll().unwrap();
    assert!(behind.ends_with(&late) && behind.iter().all(is_seen), "{behind:?}");
    world.submit(80..100);
    assert!(world.poll().unwrap().1.iter().any(|key| !hangs(*key)));
    for (dispatch, keys) in [(&again, &failed), (&other, &behind)] {
        world.reply(dispatch, keys, true);
        assert_eq!(&world.answered(), keys);
    }
}

#[test]
fn a_shard_that_answers_again_goes_with_the_others_again() {
    let mut world = World::new();
    world.submit(0..40);
    let (first, all) = world.poll().unwrap();
    world.reply(&first, &all, false);
    world.answered();
    while let Some((dispatch, keys)) = world.poll() {
        world.reply(&dispatch, &keys, true);
    }
    assert_eq!(world.answered(), keys(0..40, true));
    world.submit(40..80);
    assert_eq!(world.poll().unwrap().1, (40..80).collect::<Vec<_>>());
}

#[test]
fn a_redis_that_fails_as_a_whole_is_not_split() {
    let mut world = World::new();
    world.submit(0..40);
    let (first, all) = world.poll().unwrap();
    let failures = FAILED.repeat(40);
    world.batcher.on_reply(first.batch, Ok(format!("{failures}+OK\r\n").as_bytes()), world.now);
    world.submit(40..60);
    let (_, again) = world.poll().unwrap();
    assert_eq!((all.len(), again.len()), (40, 51));
    assert!(again.contains(&40), "what comes goes with what failed");
    world.pass(250);
    for _ in 0..40 {
        let (key, answer) = world.batcher.next_answer().unwrap();
        let never_sent = key >= 51;
        let expected = if never_sent { Answer::NotSent } else { Answer::Claim(Err(StoreError::Unavailable)) };
        assert_eq!(answer, expected, "{key}");
    }
}
