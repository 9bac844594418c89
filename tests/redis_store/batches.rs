//! Whole batches through a real Redis.

use idempotency::store::redis::{Answer, Priority};
use idempotency::store::{ClaimReply, WriteReply};

use crate::fixture::{Worker, claim, claim_reply, complete, hold, only, response, write_reply};
use crate::server::Redis;

#[test]
fn each_of_a_batch_gets_its_own_answer() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    let kept = |key: u64| response(format!("response {key}").as_bytes());
    for key in (0..64).filter(|key| key % 3 == 0) {
        worker.submit(complete(&hold(key, 1), &kept(key)));
    }
    worker.run_all();
    let tickets: Vec<u64> = (0..64)
        .map(|key| match key % 4 {
            3 => worker.submit(complete(&hold(key, 2), b"late")),
            _ => worker.submit(claim(&hold(key, 2))),
        })
        .collect();
    let mut answers = Vec::new();
    let mut batches = Vec::new();
    while let Some(dispatch) = worker.batcher.poll(worker.now) {
        batches.push(dispatch.operations);
        worker.call(&dispatch);
        answers.extend(worker.answers());
    }
    assert_eq!(batches, [64]);
    assert_eq!(answers.iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), tickets);
    for (key, (_, answer)) in (0..64).zip(answers) {
        match (key % 4, key % 3) {
            (3, 0) => assert_eq!(write_reply(answer), Ok(WriteReply::Stale)),
            (3, _) => assert_eq!(write_reply(answer), Ok(WriteReply::Applied)),
            (_, 0) => {
                let fingerprint = hold(key, 1).fingerprint;
                let reply = ClaimReply::Completed { fingerprint, response: kept(key) };
                assert_eq!(claim_reply(answer), Ok(reply));
            }
            _ => assert_eq!(claim_reply(answer), Ok(ClaimReply::Claimed { attempt: 1 })),
        }
    }
}

// Envoy resets a callout whose answer is beyond 32 MiB, and then nobody of the batch gets one.
#[test]
fn no_more_claims_go_together_than_may_all_be_answered_by_a_response() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    for key in 0..100 {
        worker.submit(claim(&hold(key, 1)));
        worker.submit(complete(&hold(1_000 + key, 1), b"kept"));
    }
    let dispatch = worker.poll();
    assert_eq!(dispatch.operations, 102);
    // After a failure they go in smaller parts: the answer may have been too long for all that.
    worker.call_in_vain(&dispatch);
    assert_eq!(worker.poll().operations, 12);
}

#[test]
fn a_megabyte_of_any_bytes_comes_back() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    let body = |key: u64| -> Vec<u8> {
        (0u64..1 << 20).map(|at| (at.wrapping_mul(0x9e37_79b9 + key) >> 13).to_le_bytes()[0]).collect()
    };
    for key in 0..4 {
        let big = response(&body(key));
        let ticket = worker.submit(complete(&hold(key, 1), &big));
        let beside = worker.submit(claim(&hold(100 + key, 1)));
        let dispatch = worker.poll();
        assert_eq!(dispatch.operations, 1);
        worker.call(&dispatch);
        assert_eq!(write_reply(only(worker.answers(), ticket)), Ok(WriteReply::Applied));
        assert_eq!(claim_reply(only(worker.run_all(), beside)), Ok(ClaimReply::Claimed { attempt: 1 }));
    }
    for key in 0..4 {
        worker.submit(claim(&hold(key, 2)));
    }
    let answers = worker.run_all();
    for (key, (_, answer)) in (0..4).zip(answers) {
        let Ok(ClaimReply::Completed { response: kept, .. }) = claim_reply(answer) else {
            panic!("key {key}")
        };
        assert!(kept == response(&body(key)), "key {key}");
    }
}

#[test]
fn the_outbox_goes_ahead() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    // The claim of a key whose completion waits in the outbox finds it completed.
    let claimed = worker.submit(claim(&hold(1, 2)));
    worker.batcher.submit(99, complete(&hold(1, 1), &response(b"kept")), Priority::Outbox, worker.now);
    let answers = worker.run_all();
    assert_eq!(answers.iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), [99, claimed]);
    assert!(matches!(
        &answers[1].1,
        Answer::Claim(Ok(answer)) if matches!(answer.reply, ClaimReply::Completed { .. })
    ));
}
