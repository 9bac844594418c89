//! The one suite that every store has to pass, on virtual time: `virtual_time.lua` goes before each script.

use std::time::Duration;

use idempotency::store::redis::script::{SCRIPTS, Script, Scripts};
use idempotency::store::redis::{Answer, Operation};
use idempotency::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};

use crate::fixture::{Worker, claim_reply, only, write_reply};
use crate::server::Redis;
use crate::suite::{self, Subject};

/// The scripts under a clock that the test moves; their names are those Redis gives them.
fn on_virtual_time(redis: &Redis) -> Scripts {
    let virtual_time = |script: Script| {
        let source: &'static str =
            Box::leak([include_str!("virtual_time.lua"), script.source].concat().into_boxed_str());
        let sha1: &'static str = Box::leak(redis.command(&["SCRIPT", "LOAD", source]).into_boxed_str());
        Script { source, sha1 }
    };
    let Scripts { claim, renew, complete, fail, release } = SCRIPTS;
    Scripts {
        claim: virtual_time(claim),
        renew: virtual_time(renew),
        complete: virtual_time(complete),
        fail: virtual_time(fail),
        release: virtual_time(release),
    }
}

/// What happens to each operation on its way.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weather {
    Fair,
    /// It is executed and its reply lost, so that all of them are executed twice.
    RepliesLost,
    /// Redis forgets every script before it.
    ScriptsForgotten,
}

struct OverRedis<'a> {
    workers: [Worker<'a>; 2],
    turn: usize,
    clock: u64,
    weather: Weather,
}

impl<'a> OverRedis<'a> {
    fn new(redis: &'a Redis, weather: Weather) -> Self {
        let scripts = on_virtual_time(redis);
        let mut subject = Self {
            workers: [(); 2].map(|()| Worker::with_scripts(redis, scripts)),
            turn: 0,
            clock: 0,
            weather,
        };
        // A time of today: what Lua makes of such numbers is part of the test.
        subject.advance(Duration::from_millis(1_790_000_000_123));
        subject
    }

    fn run(&mut self, operation: Operation) -> Answer {
        self.turn += 1;
        let worker = &mut self.workers[self.turn % 2];
        if self.weather == Weather::ScriptsForgotten {
            worker.redis.command(&["SCRIPT", "FLUSH"]);
        }
        let ticket = worker.submit(operation);
        if self.weather == Weather::RepliesLost {
            let dispatch = worker.poll();
            worker.call_in_vain(&dispatch);
        }
        only(worker.run_all(), ticket)
    }
}

impl Subject for OverRedis<'_> {
    fn claim(&mut self, claim: &Claim) -> Result<ClaimReply, StoreError> {
        claim_reply(self.run(Operation::Claim(claim.clone())))
    }

    fn write(&mut self, hold: &Hold, write: &Write) -> Result<WriteReply, StoreError> {
        write_reply(self.run(Operation::Write(*hold, write.clone())))
    }

    fn advance(&mut self, by: Duration) {
        self.clock += u64::try_from(by.as_millis()).unwrap();
        self.workers[0].redis.command(&["SET", "clock", &self.clock.to_string()]);
    }
}

#[test]
fn redis_keeps_the_contract() {
    let redis = Redis::start();
    suite::run_all(&mut OverRedis::new(&redis, Weather::Fair));
}

// A12: whatever was executed may be executed again.
#[test]
fn redis_keeps_the_contract_where_every_reply_is_lost_once() {
    let redis = Redis::start();
    suite::run_all(&mut OverRedis::new(&redis, Weather::RepliesLost));
}

// H11
#[test]
fn redis_keeps_the_contract_where_it_forgets_every_script() {
    let redis = Redis::start();
    suite::run_all(&mut OverRedis::new(&redis, Weather::ScriptsForgotten));
}
