//! What a real Redis, and the way to it, may do wrong: never an answer, never a second execution.

use std::time::Duration;

use idempotency::record::Reason;
use idempotency::store::redis::{Answer, CalloutFault, Cause, Operation};
use idempotency::store::{ClaimReply, StoreError, Write, WriteReply};

use crate::fixture::{
    LIFE, TIMEOUT, Worker, claim, claim_reply, complete, hold, name, only, response, write_reply,
};
use crate::server::Redis;

const CLAIMED: Result<ClaimReply, StoreError> = Ok(ClaimReply::Claimed { attempt: 1 });

fn causes(worker: &mut Worker<'_>) -> Vec<(Cause, u64)> {
    worker.batcher.take_counts().causes.into_iter().collect()
}

// H11
#[test]
fn scripts_flushed_between_claim_and_completion_lose_nothing() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 1);
    assert_eq!(worker.claim(claim(&holder)), CLAIMED);
    assert_eq!(worker.batcher.take_counts().script_misses, 1);
    redis.command(&["SCRIPT", "FLUSH"]);
    let kept = response(b"kept");
    for key in 2..40 {
        worker.submit(claim(&hold(key, 1)));
    }
    worker.submit(complete(&holder, &kept));
    let answers = worker.run_all();
    assert_eq!(answers.len(), 39);
    assert!(answers.iter().all(|(_, answer)| !matches!(answer, Answer::NotSent)));
    let counts = worker.batcher.take_counts();
    assert_eq!((counts.script_misses, counts.retries), (39, 0));
    let fingerprint = holder.fingerprint;
    assert_eq!(worker.claim(claim(&hold(1, 2))), Ok(ClaimReply::Completed { fingerprint, response: kept }));
    // Once it was run, its name is enough.
    assert_eq!(worker.batcher.take_counts().script_misses, 0);
}

// H08: an error is neither "claimed" nor "taken".
#[test]
fn out_of_memory_is_no_answer_and_changes_nothing() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let holder = hold(1, 1);
    assert_eq!(worker.claim(claim(&holder)), CLAIMED);
    worker.batcher.take_counts();
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(worker.claim(claim(&hold(2, 1))), Err(StoreError::Unavailable));
    assert_eq!(worker.write(&holder, Write::Release), Ok(WriteReply::Applied));
    let write = Write::Complete { response: (*b"kept").into(), record_ttl: LIFE };
    assert_eq!(worker.write(&holder, write.clone()), Err(StoreError::Unavailable));
    assert_eq!(causes(&mut worker), [(Cause::OutOfMemory, 2)]);
    redis.command(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(redis.command(&["DBSIZE"]), "0");
    assert_eq!(worker.write(&holder, write), Ok(WriteReply::Applied));
}

#[test]
fn a_replica_takes_no_claim() {
    // It has no primary, and serves what it has.
    let redis = Redis::start_with(&["--replicaof", "127.0.0.1 1"]);
    let mut worker = Worker::of(&redis);
    assert_eq!(worker.claim(claim(&hold(1, 1))), Err(StoreError::Unavailable));
    assert_eq!(causes(&mut worker), [(Cause::ReadOnly, 1)]);
    let alone = Redis::start_with(&["--min-replicas-to-write", "1"]);
    let mut worker = Worker::of(&alone);
    assert_eq!(worker.claim(claim(&hold(1, 1))), Err(StoreError::Unavailable));
    assert_eq!(causes(&mut worker), [(Cause::NoReplicas, 1)]);
}

#[test]
fn a_wrong_password_is_no_answer() {
    let redis = Redis::start_with(&["--requirepass", "secret"]);
    let mut worker = Worker::of(&redis);
    let ticket = worker.submit(claim(&hold(1, 1)));
    let dispatch = worker.poll();
    let reply = redis.call(&dispatch.request.body);
    assert!(reply.starts_with(b"-NOAUTH"), "{}", reply.escape_ascii());
    worker.batcher.on_reply(dispatch.batch, Ok(&reply), worker.now);
    assert_eq!(claim_reply(only(worker.run_all(), ticket)), Err(StoreError::Unavailable));
    assert_eq!(causes(&mut worker), [(Cause::NotAllowed, 1)]);
}

/// Every way in which an answer can be other than it should be, of a batch that was executed.
fn broken_answers(whole: &[u8]) -> Vec<Vec<u8>> {
    let without_quit = whole.strip_suffix(b"+OK\r\n").unwrap();
    let mut broken: Vec<Vec<u8>> = (0..whole.len()).map(|cut| whole[..cut].to_vec()).collect();
    broken.extend([
        [whole, b"+OK\r\n"].concat(),
        [whole, b"x"].concat(),
        [b":1\r\n", whole].concat(),
        [without_quit, b":1\r\n+OK\r\n"].concat(),
        [without_quit, b"-ERR\r\n"].concat(),
        b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(),
        vec![0; 100_000],
    ]);
    broken
}

// A12: the claim was executed, its reply cut, lengthened or lost; the same claim again is the same claim.
#[test]
fn a_broken_answer_is_none_and_the_second_try_finds_its_own_claim() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    worker.submit(claim(&hold(0, 1)));
    let dispatch = worker.poll();
    let whole = redis.call(&dispatch.request.body);
    worker.batcher.on_reply(dispatch.batch, Ok(&whole), worker.now);
    worker.run_all();
    for (key, broken) in (1..).zip(broken_answers(&whole)) {
        let ticket = worker.submit(claim(&hold(key, 1)));
        let dispatch = worker.poll();
        assert_eq!(redis.call(&dispatch.request.body), whole);
        worker.batcher.on_reply(dispatch.batch, Ok(&broken), worker.now);
        assert_eq!(worker.answers(), [], "{}", broken.escape_ascii());
        assert_eq!(claim_reply(only(worker.run_all(), ticket)), CLAIMED, "{}", broken.escape_ascii());
    }
}

#[test]
fn a_second_broken_answer_is_unavailable() {
    let redis = Redis::start();
    let mut worker = Worker::after_others(&redis);
    let holder = hold(1, 1);
    worker.claim(claim(&holder)).unwrap();
    let kept = response(b"kept");
    let tickets = [worker.submit(complete(&holder, &kept)), worker.submit(claim(&hold(2, 1)))];
    for _ in 0..2 {
        let dispatch = worker.poll();
        assert_eq!(dispatch.operations, 2);
        worker.call_in_vain(&dispatch);
    }
    let answers = worker.answers();
    assert_eq!(answers.iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), tickets);
    assert!(matches!(answers[0].1, Answer::Write(Err(StoreError::Unavailable))));
    assert!(matches!(answers[1].1, Answer::Claim(Err(StoreError::Unavailable))));
    // Both were executed. The outbox completes again, and gives the claim back that nobody knows of.
    worker.submit(complete(&holder, &kept));
    worker.submit(Operation::Write(hold(2, 1), Write::Release));
    for (_, answer) in worker.run_all() {
        assert_eq!(write_reply(answer), Ok(WriteReply::Applied));
    }
    assert_eq!(worker.claim(claim(&hold(2, 2))), CLAIMED);
    let fingerprint = holder.fingerprint;
    assert_eq!(worker.claim(claim(&hold(1, 2))), Ok(ClaimReply::Completed { fingerprint, response: kept }));
}

#[test]
fn a_redis_that_comes_back_empty_takes_what_is_left() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let [first, second] = [hold(1, 1), hold(2, 1)];
    worker.claim(claim(&first)).unwrap();
    worker.claim(claim(&second)).unwrap();
    redis.command(&["FLUSHALL"]);
    redis.command(&["SCRIPT", "FLUSH"]);
    let renew = Write::Renew { lock_ttl: LIFE, record_ttl: LIFE };
    assert_eq!(worker.write(&first, renew), Ok(WriteReply::Applied));
    let reply = worker.claim(claim(&hold(1, 2)));
    assert!(matches!(reply, Ok(ClaimReply::InFlight { .. })), "{reply:?}");
    let fail = Write::Fail { reason: Reason::Timeout, failed_ttl: LIFE };
    assert_eq!(worker.write(&second, fail), Ok(WriteReply::Applied));
    let fingerprint = second.fingerprint;
    let failed = ClaimReply::Failed { fingerprint, reason: Reason::Timeout };
    assert_eq!(worker.claim(claim(&hold(2, 2))), Ok(failed));
}

#[test]
fn one_unreadable_record_spoils_nobody_elses_answer() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    redis.command(&["SET", &name(&hold(2, 1)), "1"]);
    for key in 1..=3 {
        worker.submit(claim(&hold(key, 1)));
    }
    let answers = worker.run_all().into_iter().map(|(_, answer)| claim_reply(answer)).collect::<Vec<_>>();
    assert_eq!(answers, [CLAIMED, Err(StoreError::Unreadable), CLAIMED]);
}

#[test]
fn a_refused_callout_was_not_executed() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let ticket = worker.submit(claim(&hold(1, 1)));
    let dispatch = worker.poll();
    worker.batcher.on_refused(dispatch.batch, worker.now);
    // Not at once: a host that refuses one refuses the next.
    assert_eq!(worker.batcher.poll(worker.now), None);
    worker.now = worker.now.after(TIMEOUT / 4);
    assert_eq!(claim_reply(only(worker.run_all(), ticket)), CLAIMED);
    let ticket = worker.submit(claim(&hold(2, 1)));
    let dispatch = worker.poll();
    worker.batcher.on_refused(dispatch.batch, worker.now);
    worker.now = worker.now.after(TIMEOUT);
    worker.batcher.on_tick(worker.now);
    assert_eq!(only(worker.answers(), ticket), Answer::NotSent);
    assert_eq!(redis.command(&["EXISTS", &name(&hold(2, 1))]), "0");
}

#[test]
fn a_claim_nobody_waits_for_is_sent_no_more() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let queued = worker.submit(claim(&hold(1, 1)));
    worker.batcher.cancel(queued);
    assert_eq!(only(worker.answers(), queued), Answer::NotSent);
    assert_eq!(worker.batcher.poll(worker.now), None);
    // One that is out is answered; whoever asked gives the claim back.
    let sent = worker.submit(claim(&hold(2, 1)));
    let dispatch = worker.poll();
    worker.batcher.cancel(sent);
    assert_eq!(worker.answers(), []);
    worker.call(&dispatch);
    assert_eq!(claim_reply(only(worker.run_all(), sent)), CLAIMED);
    // One whose answer was lost may hold its claim: it is not tried again, and not "not sent".
    let lost = worker.submit(claim(&hold(3, 1)));
    let dispatch = worker.poll();
    worker.call_in_vain(&dispatch);
    worker.batcher.cancel(lost);
    assert_eq!(claim_reply(only(worker.answers(), lost)), Err(StoreError::Unavailable));
    // A write goes on whoever left.
    let written = worker.submit(complete(&hold(2, 1), b"kept"));
    worker.batcher.cancel(written);
    assert_eq!(write_reply(only(worker.run_all(), written)), Ok(WriteReply::Applied));
}

#[test]
fn an_answer_that_comes_too_late_is_ignored() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    let ticket = worker.submit(claim(&hold(1, 1)));
    let dispatch = worker.poll();
    assert_eq!(dispatch.timeout, TIMEOUT / 2);
    worker.now = worker.now.after(TIMEOUT);
    worker.batcher.on_tick(worker.now);
    assert_eq!(claim_reply(only(worker.answers(), ticket)), Err(StoreError::Unavailable));
    assert!(!worker.batcher.is_idle());
    worker.call(&dispatch);
    assert!(worker.batcher.is_idle());
    worker.call(&dispatch);
    assert_eq!((worker.answers(), worker.batcher.take_counts().late), (vec![], 1));
}

#[test]
fn a_lost_callout_gives_its_place_up() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    for key in 0..2 {
        worker.submit(claim(&hold(key, 1)));
        worker.poll();
    }
    worker.submit(claim(&hold(3, 1)));
    assert_eq!(worker.batcher.poll(worker.now), None);
    worker.now = worker.now.after(2 * TIMEOUT);
    worker.batcher.on_tick(worker.now);
    assert_eq!(worker.answers().len(), 3);
    worker.submit(claim(&hold(4, 1)));
    assert!(worker.batcher.poll(worker.now).is_some());
}

#[test]
fn an_attempt_gets_half_of_the_time_and_never_more_than_is_left() {
    let redis = Redis::start();
    let mut worker = Worker::of(&redis);
    worker.submit(claim(&hold(1, 1)));
    worker.now = worker.now.after(Duration::from_millis(200));
    let dispatch = worker.poll();
    assert_eq!(dispatch.timeout, Duration::from_millis(50));
    worker.now = worker.now.after(Duration::from_millis(50));
    worker.batcher.on_reply(dispatch.batch, Err(CalloutFault::NoAnswer), worker.now);
    let answers = worker.answers();
    assert!(matches!(answers[..], [(1, Answer::Claim(Err(StoreError::Unavailable)))]), "{answers:?}");
}
