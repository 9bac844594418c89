//! Owns what the upstream of a storm does: every run is recorded, and answered as the seed says, with bytes of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::watch;

use super::clients::{ENVOY_HEADER, TRY_HEADER, VARIANTS, request_body};
use super::history::{Execution, Fault, made_body, mark};
use super::ledger::Ledger;
use crate::support::*;

pub const EXECUTION_HEADER: &str = "x-execution";
pub const LARGEST_KEPT: usize = 32 * 1024;
/// A body that is none of its key's.
const NO_VARIANT: u8 = 255;

pub struct Upstream {
    seed: u64,
    ledger: Arc<Ledger>,
    /// So many of the next whole answers trap the VM that they come to.
    pub armed: AtomicUsize,
    /// Some runs then last longer than that, so that their leases are lost while they are alive.
    pub redis_away: watch::Sender<bool>,
    /// The storm is over: every run is answered at once and well.
    pub calm: AtomicBool,
}

struct Plan {
    status: u16,
    length: usize,
    delay: Duration,
    end: PlannedEnd,
    /// If Redis is away when the run ends, it ends so long after Redis is back.
    outlasts_redis: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PlannedEnd {
    Whole,
    Chunked,
    CutOff,
    Reset,
}

impl Upstream {
    pub fn new(seed: u64, ledger: Arc<Ledger>) -> Arc<Upstream> {
        Arc::new(Upstream {
            seed,
            ledger,
            armed: AtomicUsize::new(0),
            redis_away: watch::Sender::new(false),
            calm: AtomicBool::new(false),
        })
    }

    pub fn behaviour(self: &Arc<Self>) -> Behaviour {
        let upstream = Arc::clone(self);
        Behaviour::func(move |seen, nth| {
            let upstream = Arc::clone(&upstream);
            async move { upstream.answer(seen, nth).await }
        })
    }

    async fn answer(&self, seen: Seen, nth: usize) -> Reply {
        let Some(by) = seen.header(TRY_HEADER).and_then(|by| by.parse().ok()).filter(|_| seen.complete)
        else {
            return Reply::hang_up();
        };
        let key = seen.header("idempotency-key").expect("a key").to_owned();
        let attempt = seen.header("x-idempotency-attempt").map_or(1, |n| n.parse().expect("a number"));
        let variant = VARIANTS.into_iter().find(|variant| request_body(&key, *variant) == seen.body);
        let variant = variant.unwrap_or(NO_VARIANT);
        let plan = self.plan(&key, nth);
        let start = self.ledger.clock.now();
        let broken = matches!(plan.end, PlannedEnd::CutOff | PlannedEnd::Reset);
        let (status, length) = (plan.status, plan.length);
        let run = Execution { nth, attempt, by, variant, start, answered: None, status, length, broken };
        self.ledger.ran(&key, run);
        // The upstream works; if Envoy cancels it, this ends here.
        tokio::time::sleep(plan.delay).await;
        if let Some(longer) = plan.outlasts_redis.filter(|_| *self.redis_away.borrow()) {
            let _ = self.redis_away.subscribe().wait_for(|away| !*away).await;
            tokio::time::sleep(longer).await;
        }
        self.ledger.answered(&key, nth);
        let mark = mark(&key, nth, variant);
        let body = made_body(&mark, plan.length);
        let reply = Reply::status(plan.status).header("content-type", "text/plain");
        let reply = reply.header(EXECUTION_HEADER, &mark);
        // A callout's answer passes no filter of this kind: the line would be kept, and each replay would trap.
        let passes = !seen.path.starts_with("/detached");
        let reply = if plan.end == PlannedEnd::Whole && passes && self.traps() {
            let envoy = seen.header(ENVOY_HEADER).and_then(|envoy| envoy.parse().ok()).expect("an Envoy");
            self.ledger.happened(Fault::TrapAtResponse(envoy), self.ledger.clock.now());
            reply.header("x-test-fault", "trap")
        } else {
            reply
        };
        let (begin, rest) = body.split_at(body.len() / 2);
        match plan.end {
            PlannedEnd::Whole => reply.chunk(body),
            PlannedEnd::Chunked => reply.no_content_length().chunk(begin.to_vec()).chunk(rest.to_vec()),
            // What comes before a barrier is on the wire when the reply breaks off.
            PlannedEnd::CutOff => {
                let sent = Barrier::new();
                sent.open();
                reply.no_content_length().chunk(begin.to_vec()).wait(&sent).abort()
            }
            PlannedEnd::Reset => Reply::hang_up(),
        }
    }

    fn traps(&self) -> bool {
        self.armed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |armed| armed.checked_sub(1)).is_ok()
    }

    fn plan(&self, key: &str, nth: usize) -> Plan {
        let mut rng = Rng::new(mix(self.seed, &format!("{key}#{nth}")));
        let (delay, end) = (Duration::ZERO, PlannedEnd::Whole);
        let mut plan = Plan { status: 200, length: 200, delay, end, outlasts_redis: None };
        if self.calm.load(Ordering::Relaxed) {
            return plan;
        }
        let millis = match rng.below(30) {
            // Longer than a lease.
            0 => 4000,
            1..5 => 200 + rng.below(600),
            _ => rng.below(40),
        };
        plan.delay = Duration::from_millis(millis as u64);
        let longer = Duration::from_millis(rng.below(1500) as u64);
        plan.outlasts_redis = rng.one_in(2).then_some(longer);
        plan.length = rng.pick(&[100, 200, 400, 3000, 20_000]);
        // From the third run on all is well, so that every key ends.
        let luck = if nth < 3 { rng.below(100) } else { 0 };
        match luck {
            0..50 => {}
            50..62 => plan.status = 201,
            62..68 => plan.status = rng.pick(&[400, 404]),
            68..75 => plan.status = 503,
            75..78 => plan.status = 429,
            78..85 => plan.status = 500,
            85..89 => plan.end = PlannedEnd::Reset,
            89..93 => plan.end = PlannedEnd::CutOff,
            93..95 => plan.length = LARGEST_KEPT + 1000,
            _ => plan.end = PlannedEnd::Chunked,
        }
        plan
    }
}

/// A seed of its own for each name (FNV-1a).
pub fn mix(seed: u64, name: &str) -> u64 {
    name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
