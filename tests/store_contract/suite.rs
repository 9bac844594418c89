//! The store contract as a list of cases: the same list runs against every store.
//!
//! A case gets a [`Subject`], uses keys that nobody used before, and moves time itself. It relies on nothing that is
//! in the store already, so a list may run again and again against one store.
//!
//! This file knows stores and their contract only: `tests/e2e` includes it by path and runs it through the compiled
//! filter.

use std::hash::{BuildHasher as _, RandomState};
use std::rc::Rc;
use std::time::Duration;

use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::codec::{ResponseEncoder, StoredResponse};
use idempotency::record::{ClaimTerms, Owner, Reason};
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};

/// A store under test, with a clock that only the test moves.
pub trait Subject {
    fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError>;
    fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError>;
    fn advance(&mut self, by: Duration);
}

/// A named case; it panics where the store breaks the contract.
pub type Case = (&'static str, fn(&mut dyn Subject));

macro_rules! cases {
    ($($name:ident),* $(,)?) => { &[$((stringify!($name), $name)),*] };
}

/// The whole contract.
pub const CASES: &[Case] = cases![
    a_first_claim_is_attempt_one,
    a_claim_that_finds_its_own_owner_is_claimed,
    a_claim_beside_a_live_one_is_in_flight,
    elapsed_and_remaining_are_exact_to_the_millisecond,
    a_lease_ends_at_its_millisecond,
    an_abandoned_claim_is_taken_over_as_the_next_attempt,
    an_abandoned_claim_is_retained_where_the_rule_says_so,
    another_request_never_takes_over,
    its_own_owner_is_claimed_after_its_lease_too,
    an_in_flight_record_is_forgotten_at_its_expiry,
    a_record_outlives_its_lease,
    a_completed_record_is_answered_as_it_was_written,
    a_completed_record_answers_whatever_the_fingerprint,
    a_completed_record_expires_from_its_completion,
    empty_and_falsy_bodies_are_kept,
    a_large_body_is_kept_whole,
    a_tombstone_is_answered_as_a_tombstone,
    a_failed_record_is_answered_with_its_reason,
    a_failed_record_expires_from_its_failure,
    every_reason_is_kept,
    a_released_claim_is_as_if_it_had_never_been,
    a_renewed_lease_holds_on,
    renewing_extends_the_record_too,
    renewing_keeps_the_attempt_and_its_start,
    an_abandoned_owner_may_still_write,
    a_stale_owner_changes_nothing,
    a_stale_completion_never_replaces_the_new_owners,
    a_duplicate_cannot_release_the_claim,
    a_write_on_a_completed_record_is_stale_unless_it_made_it,
    a_write_on_a_failed_record_is_stale_unless_it_made_it,
    a_repeated_operation_is_the_same_as_once,
    a_repeated_completion_does_not_extend_the_record,
    completing_writes_when_the_record_is_gone,
    failing_writes_when_the_record_is_gone,
    renewing_re_creates_when_the_record_is_gone,
    releasing_nothing_is_applied,
    a_gone_record_that_somebody_took_is_stale,
    the_attempt_is_known_over_many_takeovers,
    a_new_claim_after_a_release_starts_at_attempt_one,
    parallel_payloads_under_one_key_execute_once,
    keys_do_not_touch_each_other,
    claims_and_completions_follow_on_each_other,
];

const LEASE: Duration = Duration::from_secs(60);
const LIFE: Duration = Duration::from_secs(3_600);
const MILLISECOND: Duration = Duration::from_millis(1);

/// Runs every case; says which one is running when it panics.
pub fn run_all(subject: &mut dyn Subject) {
    for (name, case) in CASES {
        println!("store contract: {name}");
        case(subject);
    }
}

/// Bytes that no other call of any run gives.
fn unique<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    for chunk in bytes.chunks_mut(8) {
        let word = RandomState::new().hash_one(0u8).to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

fn fresh_key() -> StoreKey {
    StoreKey::from_bytes(unique())
}

fn fingerprint(of: u8) -> Fingerprint {
    Fingerprint::from_bytes([of; 32])
}

/// One caller's view of a key: a claim, and what may follow.
#[derive(Clone, Copy)]
struct Caller {
    key: StoreKey,
    owner: Owner,
    fingerprint: Fingerprint,
    on_abandoned: OnAbandoned,
    attempt: u32,
}

impl Caller {
    fn of(key: StoreKey) -> Self {
        Self {
            key,
            owner: Owner::from_bytes(unique()),
            fingerprint: fingerprint(1),
            on_abandoned: OnAbandoned::Takeover,
            attempt: 1,
        }
    }

    fn with_fingerprint(self, of: u8) -> Self {
        Self { fingerprint: fingerprint(of), ..self }
    }

    fn retaining(self) -> Self {
        Self { on_abandoned: OnAbandoned::Retain, ..self }
    }

    fn try_claim(&self, subject: &mut dyn Subject, lock_ttl: Duration, record_ttl: Duration) -> ClaimReply {
        let Self { key, owner, fingerprint, on_abandoned, .. } = *self;
        let terms = ClaimTerms { owner, fingerprint, lock_ttl, record_ttl, on_abandoned };
        subject.claim(&Claim { key, terms }).expect("the store answers")
    }

    fn claim(&self, subject: &mut dyn Subject) -> ClaimReply {
        self.try_claim(subject, LEASE, LIFE)
    }

    /// Claims, and must get this attempt.
    fn claimed(mut self, subject: &mut dyn Subject, attempt: u32) -> Self {
        assert_eq!(self.claim(subject), ClaimReply::Claimed { attempt });
        self.attempt = attempt;
        self
    }

    fn write(&self, subject: &mut dyn Subject, write: &Write) -> WriteReply {
        let Self { key, owner, fingerprint, attempt, .. } = *self;
        subject.write(&Hold { key, owner, fingerprint, attempt }, write).expect("the store answers")
    }

    fn apply(&self, subject: &mut dyn Subject, write: &Write) {
        assert_eq!(self.write(subject, write), WriteReply::Applied, "{write:?}");
    }
}

fn response(status: u16, body: &[u8]) -> Rc<[u8]> {
    let headers = [(&b"content-type"[..], &b"text/plain"[..]), (b"x-twice", b"1"), (b"x-twice", b"2")];
    let mut encoder = ResponseEncoder::begin(status, headers, None).expect("headers fit");
    encoder.push(body);
    encoder.finish().into()
}

fn complete(response: &Rc<[u8]>) -> Write {
    Write::Complete { response: Rc::clone(response), record_ttl: LIFE }
}

fn fail(reason: Reason) -> Write {
    Write::Fail { reason, failed_ttl: LIFE }
}

const fn renew() -> Write {
    Write::Renew { lock_ttl: LEASE, record_ttl: LIFE }
}

/// Every operation that may follow on a claim.
fn every_write() -> [Write; 4] {
    [renew(), complete(&response(299, b"stale")), fail(Reason::Timeout), Write::Release]
}

fn completed(fingerprint: Fingerprint, response: &[u8]) -> ClaimReply {
    ClaimReply::Completed { fingerprint, response: response.to_vec() }
}

fn failed(reason: Reason) -> ClaimReply {
    ClaimReply::Failed { fingerprint: fingerprint(1), reason }
}

const fn in_flight(fingerprint: Fingerprint, elapsed: Duration, remaining: Duration) -> ClaimReply {
    ClaimReply::InFlight { fingerprint, elapsed, remaining }
}

fn a_first_claim_is_attempt_one(subject: &mut dyn Subject) {
    Caller::of(fresh_key()).claimed(subject, 1);
}

// A12: the claim was applied and its reply lost.
fn a_claim_that_finds_its_own_owner_is_claimed(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(Duration::from_secs(1));
    caller.claimed(subject, 1);
    // Claiming again is no renewal.
    let beside = Caller::of(key).claim(subject);
    assert_eq!(beside, in_flight(fingerprint(1), Duration::from_secs(1), Duration::from_secs(59)));
}

fn a_claim_beside_a_live_one_is_in_flight(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    let same = Caller::of(key).claim(subject);
    assert_eq!(same, in_flight(fingerprint(1), Duration::ZERO, LEASE));
    // The holder's fingerprint is told, so that the caller sees the mismatch.
    let other = Caller::of(key).with_fingerprint(2).claim(subject);
    assert_eq!(other, in_flight(fingerprint(1), Duration::ZERO, LEASE));
}

// I06: 500 ms and 1500 ms are what they say.
fn elapsed_and_remaining_are_exact_to_the_millisecond(subject: &mut dyn Subject) {
    for lease in [500, 1_500] {
        let key = fresh_key();
        let lease = Duration::from_millis(lease);
        assert_eq!(Caller::of(key).try_claim(subject, lease, LIFE), ClaimReply::Claimed { attempt: 1 });
        let elapsed = Duration::from_millis(123);
        subject.advance(elapsed);
        assert_eq!(Caller::of(key).claim(subject), in_flight(fingerprint(1), elapsed, lease - elapsed));
    }
}

fn a_lease_ends_at_its_millisecond(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE - MILLISECOND);
    let last = Caller::of(key).claim(subject);
    assert_eq!(last, in_flight(fingerprint(1), LEASE - MILLISECOND, MILLISECOND));
    subject.advance(MILLISECOND);
    Caller::of(key).claimed(subject, 2);
}

fn an_abandoned_claim_is_taken_over_as_the_next_attempt(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    Caller::of(key).claimed(subject, 2);
    let beside = Caller::of(key).claim(subject);
    assert_eq!(beside, in_flight(fingerprint(1), Duration::ZERO, LEASE));
}

fn an_abandoned_claim_is_retained_where_the_rule_says_so(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    for _ in 0..2 {
        let reply = Caller::of(key).retaining().claim(subject);
        assert_eq!(reply, ClaimReply::Abandoned { fingerprint: fingerprint(1) });
    }
    // The rule at hand decides, not the one that claimed.
    Caller::of(key).claimed(subject, 2);
}

fn another_request_never_takes_over(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    let reply = Caller::of(key).with_fingerprint(2).claim(subject);
    assert_eq!(reply, ClaimReply::Abandoned { fingerprint: fingerprint(1) });
    Caller::of(key).claimed(subject, 2);
}

fn its_own_owner_is_claimed_after_its_lease_too(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    caller.retaining().claimed(subject, 1);
}

// A10: no claim lives for ever, whatever was lost.
fn an_in_flight_record_is_forgotten_at_its_expiry(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LIFE - MILLISECOND);
    let reply = Caller::of(key).retaining().claim(subject);
    assert_eq!(reply, ClaimReply::Abandoned { fingerprint: fingerprint(1) });
    subject.advance(MILLISECOND);
    Caller::of(key).with_fingerprint(2).retaining().claimed(subject, 1);
}

fn a_record_outlives_its_lease(subject: &mut dyn Subject) {
    let key = fresh_key();
    let reply = Caller::of(key).try_claim(subject, LEASE, MILLISECOND);
    assert_eq!(reply, ClaimReply::Claimed { attempt: 1 });
    subject.advance(LEASE - MILLISECOND);
    let last = Caller::of(key).claim(subject);
    assert_eq!(last, in_flight(fingerprint(1), LEASE - MILLISECOND, MILLISECOND));
    subject.advance(MILLISECOND);
    Caller::of(key).claimed(subject, 1);
}

fn a_completed_record_is_answered_as_it_was_written(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    let response = response(201, b"{\"id\":1}");
    caller.apply(subject, &complete(&response));
    for again in [caller, Caller::of(key), Caller::of(key).retaining()] {
        assert_eq!(again.claim(subject), completed(fingerprint(1), &response));
    }
    subject.advance(LEASE);
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &response));
}

fn a_completed_record_answers_whatever_the_fingerprint(subject: &mut dyn Subject) {
    let key = fresh_key();
    let response = response(200, b"kept");
    Caller::of(key).claimed(subject, 1).apply(subject, &complete(&response));
    // A07: a mismatch harms nothing.
    assert_eq!(Caller::of(key).with_fingerprint(2).claim(subject), completed(fingerprint(1), &response));
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &response));
}

// I03: the record's life starts at its completion.
fn a_completed_record_expires_from_its_completion(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key);
    let life = Duration::from_secs(100);
    assert_eq!(caller.try_claim(subject, LEASE, life), ClaimReply::Claimed { attempt: 1 });
    subject.advance(Duration::from_secs(50));
    let response = response(200, b"kept");
    caller.apply(subject, &Write::Complete { response: Rc::clone(&response), record_ttl: life });
    subject.advance(life - MILLISECOND);
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &response));
    subject.advance(MILLISECOND);
    Caller::of(key).with_fingerprint(2).claimed(subject, 1);
}

// B10: an empty body is a body.
fn empty_and_falsy_bodies_are_kept(subject: &mut dyn Subject) {
    for (status, body) in
        [(204, &b""[..]), (201, b""), (200, b"\"\""), (200, b"0"), (200, b"null"), (200, b"{}")]
    {
        let key = fresh_key();
        let response = response(status, body);
        Caller::of(key).claimed(subject, 1).apply(subject, &complete(&response));
        assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &response));
    }
    // Not even a header line.
    let key = fresh_key();
    let bare: Rc<[u8]> = ResponseEncoder::begin(204, [], None).expect("fits").finish().into();
    Caller::of(key).claimed(subject, 1).apply(subject, &complete(&bare));
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &bare));
}

fn a_large_body_is_kept_whole(subject: &mut dyn Subject) {
    let key = fresh_key();
    let body: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let response = response(200, &body);
    Caller::of(key).claimed(subject, 1).apply(subject, &complete(&response));
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &response));
}

fn a_tombstone_is_answered_as_a_tombstone(subject: &mut dyn Subject) {
    for headers in [vec![], vec![(&b"location"[..], &b"/payments/1"[..]), (b"etag", b"\"1\"")]] {
        let key = fresh_key();
        let tombstone: Rc<[u8]> = ResponseEncoder::tombstone(201, headers.clone()).expect("fits").into();
        Caller::of(key).claimed(subject, 1).apply(subject, &complete(&tombstone));
        let reply = Caller::of(key).claim(subject);
        let ClaimReply::Completed { response, .. } = reply else { panic!("{reply:?}") };
        let decoded = StoredResponse::decode(&response).expect("a tombstone");
        assert_eq!((decoded.status, decoded.body, decoded.headers), (201, None, headers));
    }
}

fn a_failed_record_is_answered_with_its_reason(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    caller.apply(subject, &fail(Reason::Timeout));
    subject.advance(LEASE);
    for again in [caller, Caller::of(key), Caller::of(key).with_fingerprint(2)] {
        assert_eq!(again.claim(subject), failed(Reason::Timeout));
    }
}

fn a_failed_record_expires_from_its_failure(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(Duration::from_secs(30));
    let failed_ttl = Duration::from_secs(7_200);
    caller.apply(subject, &Write::Fail { reason: Reason::Reset, failed_ttl });
    subject.advance(failed_ttl - MILLISECOND);
    assert_eq!(Caller::of(key).claim(subject), failed(Reason::Reset));
    subject.advance(MILLISECOND);
    Caller::of(key).claimed(subject, 1);
}

fn every_reason_is_kept(subject: &mut dyn Subject) {
    for reason in Reason::ALL {
        let key = fresh_key();
        Caller::of(key).claimed(subject, 1).apply(subject, &fail(reason));
        assert_eq!(Caller::of(key).claim(subject), failed(reason));
    }
}

fn a_released_claim_is_as_if_it_had_never_been(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1).apply(subject, &Write::Release);
    Caller::of(key).with_fingerprint(2).retaining().claimed(subject, 1);
}

fn a_renewed_lease_holds_on(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    for _ in 0..3 {
        subject.advance(LEASE - MILLISECOND);
        caller.apply(subject, &renew());
    }
    subject.advance(LEASE - MILLISECOND);
    let reply = Caller::of(key).claim(subject);
    assert_eq!(reply, in_flight(fingerprint(1), (LEASE - MILLISECOND) * 4, MILLISECOND));
    subject.advance(MILLISECOND);
    Caller::of(key).claimed(subject, 2);
}

fn renewing_extends_the_record_too(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(LIFE - MILLISECOND);
    caller.apply(subject, &renew());
    subject.advance(LIFE - MILLISECOND);
    Caller::of(key).claimed(subject, 2);
}

fn renewing_keeps_the_attempt_and_its_start(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    let second = Caller::of(key).claimed(subject, 2);
    subject.advance(Duration::from_secs(10));
    second.apply(subject, &renew());
    second.claimed(subject, 2);
    let reply = Caller::of(key).claim(subject);
    assert_eq!(reply, in_flight(fingerprint(1), Duration::from_secs(10), LEASE));
}

// Nobody took over: what is known of the execution is kept.
fn an_abandoned_owner_may_still_write(subject: &mut dyn Subject) {
    let kept = response(200, b"late");
    for (write, reply) in [
        (renew(), in_flight(fingerprint(1), LEASE, LEASE)),
        (complete(&kept), completed(fingerprint(1), &kept)),
        (fail(Reason::Truncated), failed(Reason::Truncated)),
        (Write::Release, ClaimReply::Claimed { attempt: 1 }),
    ] {
        let key = fresh_key();
        let caller = Caller::of(key).claimed(subject, 1);
        subject.advance(LEASE);
        caller.apply(subject, &write);
        assert_eq!(Caller::of(key).claim(subject), reply);
    }
}

// A04, A07: only the acquirer ends a claim.
fn a_stale_owner_changes_nothing(subject: &mut dyn Subject) {
    for write in every_write() {
        let key = fresh_key();
        let first = Caller::of(key).claimed(subject, 1);
        subject.advance(LEASE);
        let second = Caller::of(key).claimed(subject, 2);
        assert_eq!(first.write(subject, &write), WriteReply::Stale, "{write:?}");
        let beside = Caller::of(key).claim(subject);
        assert_eq!(beside, in_flight(fingerprint(1), Duration::ZERO, LEASE));
        let kept = response(200, b"second");
        second.apply(subject, &complete(&kept));
        assert_eq!(first.write(subject, &write), WriteReply::Stale, "{write:?}");
        assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &kept));
        // Abandoned again, the stale owner is stale still.
        let key = fresh_key();
        let first = Caller::of(key).claimed(subject, 1);
        subject.advance(LEASE);
        Caller::of(key).claimed(subject, 2);
        subject.advance(LEASE);
        assert_eq!(first.write(subject, &write), WriteReply::Stale, "{write:?}");
        Caller::of(key).claimed(subject, 3);
    }
}

// A04: two later retries get one and the same response.
fn a_stale_completion_never_replaces_the_new_owners(subject: &mut dyn Subject) {
    for stale_first in [true, false] {
        let key = fresh_key();
        let first = Caller::of(key).claimed(subject, 1);
        subject.advance(LEASE);
        let second = Caller::of(key).claimed(subject, 2);
        let (stale, kept) = (complete(&response(200, b"id 1")), response(200, b"id 2"));
        if stale_first {
            assert_eq!(first.write(subject, &stale), WriteReply::Stale);
            second.apply(subject, &complete(&kept));
        } else {
            second.apply(subject, &complete(&kept));
            assert_eq!(first.write(subject, &stale), WriteReply::Stale);
        }
        for _ in 0..2 {
            assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &kept));
        }
    }
}

// A07: a rejected duplicate's cleanup.
fn a_duplicate_cannot_release_the_claim(subject: &mut dyn Subject) {
    let key = fresh_key();
    let holder = Caller::of(key).claimed(subject, 1);
    let duplicate = Caller::of(key).with_fingerprint(2);
    assert_eq!(duplicate.claim(subject), in_flight(fingerprint(1), Duration::ZERO, LEASE));
    assert_eq!(duplicate.write(subject, &Write::Release), WriteReply::Stale);
    assert_eq!(Caller::of(key).claim(subject), in_flight(fingerprint(1), Duration::ZERO, LEASE));
    let kept = response(200, b"kept");
    holder.apply(subject, &complete(&kept));
    assert_eq!(duplicate.claim(subject), completed(fingerprint(1), &kept));
    assert_eq!(duplicate.write(subject, &Write::Release), WriteReply::Stale);
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &kept));
}

fn a_write_on_a_completed_record_is_stale_unless_it_made_it(subject: &mut dyn Subject) {
    let kept = response(200, b"kept");
    for write in every_write() {
        let key = fresh_key();
        let caller = Caller::of(key).claimed(subject, 1);
        caller.apply(subject, &complete(&kept));
        let own = matches!(write, Write::Complete { .. });
        assert_eq!(caller.write(subject, &write), if own { WriteReply::Applied } else { WriteReply::Stale });
        assert_eq!(Caller::of(key).write(subject, &write), WriteReply::Stale);
        // Nothing was written, not even by the completion that was repeated with other bytes.
        assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &kept));
    }
}

fn a_write_on_a_failed_record_is_stale_unless_it_made_it(subject: &mut dyn Subject) {
    for write in every_write() {
        let key = fresh_key();
        let caller = Caller::of(key).claimed(subject, 1);
        caller.apply(subject, &fail(Reason::Status));
        let own = matches!(write, Write::Fail { .. });
        assert_eq!(caller.write(subject, &write), if own { WriteReply::Applied } else { WriteReply::Stale });
        assert_eq!(Caller::of(key).write(subject, &write), WriteReply::Stale);
        assert_eq!(Caller::of(key).claim(subject), failed(Reason::Status));
    }
}

// A12, A20: a reply may be lost, the operation is sent again.
fn a_repeated_operation_is_the_same_as_once(subject: &mut dyn Subject) {
    let kept = response(200, b"kept");
    for (write, reply) in [
        (renew(), in_flight(fingerprint(1), Duration::ZERO, LEASE)),
        (complete(&kept), completed(fingerprint(1), &kept)),
        (fail(Reason::ClientGone), failed(Reason::ClientGone)),
        (Write::Release, ClaimReply::Claimed { attempt: 1 }),
    ] {
        let key = fresh_key();
        let caller = Caller::of(key).claimed(subject, 1);
        for _ in 0..3 {
            caller.apply(subject, &write);
        }
        assert_eq!(Caller::of(key).claim(subject), reply);
    }
}

fn a_repeated_completion_does_not_extend_the_record(subject: &mut dyn Subject) {
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    let kept = complete(&response(200, b"kept"));
    caller.apply(subject, &kept);
    subject.advance(LIFE / 2);
    caller.apply(subject, &kept);
    subject.advance(LIFE / 2);
    Caller::of(key).claimed(subject, 1);
}

fn completing_writes_when_the_record_is_gone(subject: &mut dyn Subject) {
    let kept = response(200, b"kept");
    // Never there, as when the claim was let through on a store error.
    let unclaimed = Caller::of(fresh_key());
    unclaimed.apply(subject, &complete(&kept));
    assert_eq!(Caller::of(unclaimed.key).claim(subject), completed(fingerprint(1), &kept));
    // Expired, and not yet swept away.
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(LIFE);
    caller.apply(subject, &complete(&kept));
    subject.advance(LIFE - MILLISECOND);
    assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(1), &kept));
    subject.advance(MILLISECOND);
    Caller::of(key).claimed(subject, 1);
}

fn failing_writes_when_the_record_is_gone(subject: &mut dyn Subject) {
    let unclaimed = Caller::of(fresh_key());
    unclaimed.apply(subject, &fail(Reason::Reset));
    assert_eq!(Caller::of(unclaimed.key).claim(subject), failed(Reason::Reset));
    let key = fresh_key();
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(LIFE);
    caller.apply(subject, &fail(Reason::Reset));
    assert_eq!(Caller::of(key).claim(subject), failed(Reason::Reset));
}

fn renewing_re_creates_when_the_record_is_gone(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    let second = Caller::of(key).claimed(subject, 2);
    subject.advance(LIFE);
    second.apply(subject, &renew());
    let reply = Caller::of(key).claim(subject);
    assert_eq!(reply, in_flight(fingerprint(1), Duration::ZERO, LEASE));
    second.claimed(subject, 2);
    subject.advance(LEASE);
    Caller::of(key).claimed(subject, 3);
}

fn releasing_nothing_is_applied(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).apply(subject, &Write::Release);
    let caller = Caller::of(key).claimed(subject, 1);
    subject.advance(LIFE);
    caller.apply(subject, &Write::Release);
    Caller::of(key).claimed(subject, 1);
}

fn a_gone_record_that_somebody_took_is_stale(subject: &mut dyn Subject) {
    for write in every_write() {
        let key = fresh_key();
        let first = Caller::of(key).claimed(subject, 1);
        subject.advance(LIFE);
        Caller::of(key).with_fingerprint(2).claimed(subject, 1);
        assert_eq!(first.write(subject, &write), WriteReply::Stale, "{write:?}");
        assert_eq!(Caller::of(key).claim(subject), in_flight(fingerprint(2), Duration::ZERO, LEASE));
    }
}

fn the_attempt_is_known_over_many_takeovers(subject: &mut dyn Subject) {
    let key = fresh_key();
    for attempt in 1..=20 {
        Caller::of(key).claimed(subject, attempt);
        subject.advance(LEASE);
    }
}

fn a_new_claim_after_a_release_starts_at_attempt_one(subject: &mut dyn Subject) {
    let key = fresh_key();
    Caller::of(key).claimed(subject, 1);
    subject.advance(LEASE);
    let second = Caller::of(key).claimed(subject, 2);
    second.apply(subject, &Write::Release);
    Caller::of(key).claimed(subject, 1);
}

// A17: exactly one of two payloads is executed and replayed.
fn parallel_payloads_under_one_key_execute_once(subject: &mut dyn Subject) {
    let key = fresh_key();
    let first = Caller::of(key).claimed(subject, 1);
    let second = Caller::of(key).with_fingerprint(2);
    assert_eq!(second.claim(subject), in_flight(fingerprint(1), Duration::ZERO, LEASE));
    let kept = response(200, b"first");
    first.apply(subject, &complete(&kept));
    assert_eq!(second.write(subject, &complete(&response(200, b"second"))), WriteReply::Stale);
    for caller in [Caller::of(key), Caller::of(key).with_fingerprint(2)] {
        assert_eq!(caller.claim(subject), completed(fingerprint(1), &kept));
    }
}

fn keys_do_not_touch_each_other(subject: &mut dyn Subject) {
    let callers: Vec<Caller> = (0..40).map(|_| Caller::of(fresh_key()).claimed(subject, 1)).collect();
    let kept: Vec<Rc<[u8]>> = (0..40u8).map(|number| response(200, &[number; 100])).collect();
    for (number, (caller, kept)) in callers.iter().zip(&kept).enumerate() {
        match number % 4 {
            0 => caller.apply(subject, &complete(kept)),
            1 => caller.apply(subject, &fail(Reason::Status)),
            2 => caller.apply(subject, &Write::Release),
            _ => caller.apply(subject, &renew()),
        }
    }
    for (number, (caller, kept)) in callers.iter().zip(&kept).enumerate() {
        let reply = Caller::of(caller.key).claim(subject);
        let expected = match number % 4 {
            0 => completed(fingerprint(1), kept),
            1 => failed(Reason::Status),
            2 => ClaimReply::Claimed { attempt: 1 },
            _ => in_flight(fingerprint(1), Duration::ZERO, LEASE),
        };
        assert_eq!(reply, expected, "caller {number}");
    }
}

// A11: a record that expires between two looks is a new claim, never a hole.
fn claims_and_completions_follow_on_each_other(subject: &mut dyn Subject) {
    let key = fresh_key();
    for round in 0..10u8 {
        let caller = Caller::of(key).with_fingerprint(round).claimed(subject, 1);
        let kept = response(200, &vec![round; usize::from(round) * 50]);
        caller.apply(subject, &complete(&kept));
        assert_eq!(Caller::of(key).claim(subject), completed(fingerprint(round), &kept));
        subject.advance(LIFE);
    }
}
