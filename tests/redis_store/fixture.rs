//! Operations to be sent, and a worker that sends them.

use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config::OnAbandoned;
use idempotency::fingerprint::Fingerprint;
use idempotency::key::StoreKey;
use idempotency::record::codec::ResponseEncoder;
use idempotency::record::{ClaimTerms, Owner};
use idempotency::store::redis::script::Scripts;
use idempotency::store::redis::{
    Answer, BatchSettings, Batcher, CalloutFault, Dispatch, Operation, Priority, SCRIPTS, Transport,
};
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};

use crate::server::Redis;

pub const PREFIX: &str = "idem:";
pub const TIMEOUT: Duration = Duration::from_millis(250);
pub const LEASE: Duration = Duration::from_secs(60);
pub const LIFE: Duration = Duration::from_secs(3_600);

pub fn settings() -> BatchSettings {
    BatchSettings {
        key_prefix: PREFIX.to_owned(),
        timeout: TIMEOUT,
        max_in_flight_batches: 2,
        max_response_body_bytes: 256 << 10,
        transport: Transport::Link,
    }
}

/// The claim of owner number `owner` on key number `key`.
pub fn hold(key: u64, owner: u8) -> Hold {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&key.to_be_bytes());
    Hold {
        key: StoreKey::from_bytes(bytes),
        owner: Owner::from_bytes([owner; 16]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        attempt: 1,
    }
}

pub fn name(hold: &Hold) -> String {
    format!("{PREFIX}{}", hold.key.hex())
}

pub fn claim(hold: &Hold) -> Operation {
    claim_for(hold, LEASE)
}

pub fn claim_for(hold: &Hold, lock_ttl: Duration) -> Operation {
    let Hold { key, owner, fingerprint, .. } = *hold;
    let on_abandoned = OnAbandoned::Takeover;
    Operation::Claim(Claim {
        key,
        terms: ClaimTerms { owner, fingerprint, lock_ttl, record_ttl: LIFE, on_abandoned },
    })
}

pub fn complete(hold: &Hold, response: &[u8]) -> Operation {
    Operation::Write(*hold, Write::Complete { response: Rc::from(response), record_ttl: LIFE })
}

pub fn response(body: &[u8]) -> Vec<u8> {
    let mut encoder = ResponseEncoder::begin(200, [], None).unwrap();
    encoder.push(body);
    encoder.finish()
}

/// A worker: its batcher, and the Redis it speaks to.
pub struct Worker<'a> {
    pub redis: &'a Redis,
    pub batcher: Batcher,
    pub now: Timestamp,
    tickets: u64,
}

impl<'a> Worker<'a> {
    pub fn of(redis: &'a Redis) -> Self {
        Self::with_scripts(redis, SCRIPTS)
    }

    pub fn with_scripts(redis: &'a Redis, scripts: Scripts) -> Self {
        let batcher = Batcher::new(settings(), scripts);
        Self { redis, batcher, now: Timestamp::from_millis(1_000), tickets: 0 }
    }

    /// A worker whose Redis knows the scripts.
    pub fn after_others(redis: &'a Redis) -> Self {
        let Scripts { claim, renew, complete, fail, release } = SCRIPTS;
        for script in [claim, renew, complete, fail, release] {
            redis.command(&["SCRIPT", "LOAD", script.source]);
        }
        Self::of(redis)
    }

    pub fn submit(&mut self, operation: Operation) -> u64 {
        self.tickets += 1;
        self.batcher.submit(self.tickets, operation, Priority::Normal, self.now);
        self.tickets
    }

    pub fn poll(&mut self) -> Dispatch {
        self.batcher.poll(self.now).expect("a batch")
    }

    /// Sends a batch and gives its answer to the batcher.
    pub fn call(&mut self, dispatch: &Dispatch) {
        let reply = self.redis.call(&dispatch.request.body);
        self.batcher.on_reply(dispatch.batch, Ok(&reply), self.now);
    }

    /// Sends a batch, and its answer is lost.
    pub fn call_in_vain(&mut self, dispatch: &Dispatch) {
        self.redis.call(&dispatch.request.body);
        self.batcher.on_reply(dispatch.batch, Err(CalloutFault::NoAnswer), self.now);
    }

    pub fn answers(&mut self) -> Vec<(u64, Answer)> {
        std::iter::from_fn(|| self.batcher.next_answer()).collect()
    }

    /// Everything that waits is sent until all of it is answered.
    pub fn run_all(&mut self) -> Vec<(u64, Answer)> {
        while let Some(dispatch) = self.batcher.poll(self.now) {
            self.call(&dispatch);
        }
        assert!(self.batcher.waiting() == 0);
        self.answers()
    }

    pub fn run(&mut self, operation: Operation) -> Answer {
        let ticket = self.submit(operation);
        only(self.run_all(), ticket)
    }

    pub fn claim(&mut self, operation: Operation) -> Result<ClaimReply, StoreError> {
        claim_reply(self.run(operation))
    }

    pub fn write(&mut self, hold: &Hold, write: Write) -> Result<WriteReply, StoreError> {
        write_reply(self.run(Operation::Write(*hold, write)))
    }
}

pub fn only(answers: Vec<(u64, Answer)>, ticket: u64) -> Answer {
    let [(answered, answer)] = <[_; 1]>::try_from(answers).expect("one answer");
    assert_eq!(answered, ticket);
    answer
}

pub fn claim_reply(answer: Answer) -> Result<ClaimReply, StoreError> {
    match answer {
        Answer::Claim(answer) => answer.map(|answer| answer.reply),
        answer @ (Answer::Write(_) | Answer::NotSent) => panic!("{answer:?}"),
    }
}

pub fn write_reply(answer: Answer) -> Result<WriteReply, StoreError> {
    match answer {
        Answer::Write(reply) => reply,
        answer @ (Answer::Claim(_) | Answer::NotSent) => panic!("{answer:?}"),
    }
}
