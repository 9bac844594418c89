//! Natural batching: one callout carries everything that waits, and while enough of them are out the rest waits.
//!
//! Sans-IO: **after each call, drain [`Batcher::next_answer`] until it gives none, then dispatch what
//! [`Batcher::poll`] gives until it gives none.** Every ticket is answered exactly once.
//!
//! | a callout | its operations |
//! |---|---|
//! | was answered by a whole envelope | each by its own value |
//! | was answered otherwise, or not at all | may have been executed: once more while time remains, else unavailable |
//! | was refused by the host | were surely not executed: again while time remains, else not sent |
//!
//! | a value | its operation |
//! |---|---|
//! | what its script says | is answered |
//! | `-NOSCRIPT` | was not executed: once more, with the script's text |
//! | another `-` reply that may pass | may have been executed: once more while time remains, else unavailable |
//! | any other, or any other shape | unavailable |
//!
//! A batch whose answer never comes gives its place up; what it brings later is ignored.
//!
//! `redis_proxy` answers in order, so in a Redis Cluster one operation on a shard that hangs holds back the answers of its
//! whole batch. Where some of a batch failed upstream and some did not, the slots that failed go by themselves from then
//! on, in batches and places of their own, until they answer: the others wait for them no more.

use std::collections::VecDeque;
use std::time::Duration;

use super::envelope;
use super::fault::{CalloutFault, Cause, Fault};
use super::operation::{ClaimAnswer, Operation, read_claim, read_write};
use super::queue::{Job, Queue, Room};
use super::resp::Value;
use super::script::{Call, Scripts};
use super::slot::range_of;
use super::transport::{Encoded, Transport};
use crate::clock::Timestamp;
use crate::store::{StoreError, WriteReply};

pub use super::queue::Priority;

/// Operations in one callout.
const MAX_OPERATIONS: usize = 256;
/// Bytes of one callout's body, but for one larger operation that goes alone.
const MAX_BYTES: usize = 1 << 20;
/// Bytes that one callout's answer may have. Envoy resets the callout at 32 MiB, and all of it is held twice here.
const MAX_ANSWER_BYTES: u64 = 16 << 20;
/// What a kept response has beside its body, generously.
const HEAD_BYTES: u64 = 64 << 10;

/// How a worker talks to its Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchSettings {
    /// What every key begins with.
    pub key_prefix: String,
    /// By then every operation is answered, its time in the queue and a second try included.
    pub timeout: Duration,
    /// Callouts that may be out at the same time; and as many more for slots that fail.
    pub max_in_flight_batches: usize,
    /// The longest response body that any rule keeps: how many claims fit one answer follows from it.
    pub max_response_body_bytes: u64,
    /// Who takes the callouts.
    pub transport: Transport,
}

/// A batch that was given out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BatchId(u64);

/// A callout to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dispatch {
    /// To be given back with its answer.
    pub batch: BatchId,
    /// The callout's request.
    pub request: Encoded,
    /// The callout's timeout.
    pub timeout: Duration,
    /// How many operations it carries.
    pub operations: usize,
}

/// What became of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Of a claim. An error means that it may have been executed.
    Claim(Result<ClaimAnswer, StoreError>),
    /// Of a fenced operation. An error means that it may have been executed.
    Write(Result<WriteReply, StoreError>),
    /// It was cancelled, or its time was over, before it left: the store is unavailable, and nothing was executed.
    NotSent,
}

/// What happened since it was last asked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Counts {
    /// Operations sent once more because they may have failed.
    pub retries: u64,
    /// Operations sent once more with their script's text.
    pub script_misses: u64,
    /// Callouts that the host refused.
    pub refused: u64,
    /// Answers that came when nobody waited any more.
    pub late: u64,
    /// What operations failed of, each try counted.
    pub causes: Vec<(Cause, u64)>,
}

#[derive(Debug)]
struct InFlight {
    batch: BatchId,
    /// In the order sent; none where it is answered already.
    jobs: Vec<Option<Job>>,
    /// Its place is given up then.
    until: Timestamp,
    side: Side,
}

/// Which of its two queues an operation is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    /// Its slot answers, or nothing is known of it.
    Well,
    /// Its slot failed while others answered.
    Failing,
}

/// The operations of one worker on their way to Redis.
#[derive(Debug)]
pub struct Batcher {
    settings: BatchSettings,
    scripts: Scripts,
    room: Room,
    well: Queue,
    failing: Queue,
    /// The ranges of slots whose operations are in `failing`.
    failing_ranges: u64,
    in_flight: Vec<InFlight>,
    answers: VecDeque<(u64, Answer)>,
    last_batch: u64,
    paused_until: Option<Timestamp>,
    counts: Counts,
}

impl Batcher {
    /// A batcher with nothing to do.
    #[must_use]
    pub fn new(settings: BatchSettings, scripts: Scripts) -> Self {
        let per_claim = settings.max_response_body_bytes.saturating_add(HEAD_BYTES);
        let claims = usize::try_from(MAX_ANSWER_BYTES.checked_div(per_claim).unwrap_or(1));
        let claims = claims.unwrap_or(MAX_OPERATIONS).clamp(1, MAX_OPERATIONS);
        let operations = settings.transport.max_operations().unwrap_or(MAX_OPERATIONS);
        Self {
            settings,
            scripts,
            room: Room { operations, claims, bytes: MAX_BYTES },
            well: Queue::default(),
            failing: Queue::default(),
            failing_ranges: 0,
            in_flight: Vec::new(),
            answers: VecDeque::new(),
            last_batch: 0,
            paused_until: None,
            counts: Counts::default(),
        }
    }

    /// Takes an operation. Of one claim's operations only one may be on its way at a time.
    pub fn submit(&mut self, ticket: u64, operation: Operation, priority: Priority, now: Timestamp) {
        let deadline = now.after(self.settings.timeout);
        let range = range_of(operation.key(&self.settings.key_prefix).as_bytes());
        let job = Job {
            ticket,
            operation,
            priority,
            deadline,
            call: Call::Name,
            failures: 0,
            is_suspect: false,
            range,
        };
        self.queue_of(range).push_back(job);
    }

    /// Nobody waits for this claim any more. One that has not left is answered at once; one that is out goes on, and
    /// a write always does.
    pub fn cancel(&mut self, ticket: u64) {
        let job = self.well.take_claim(ticket).or_else(|| self.failing.take_claim(ticket));
        if let Some(job) = job {
            self.give_up(&job);
        }
    }

    /// The next callout to be made, if there is one and a place for it.
    pub fn poll(&mut self, now: Timestamp) -> Option<Dispatch> {
        self.expire_queue(now);
        if self.paused_until.is_some_and(|until| now < until) {
            return None;
        }
        self.paused_until = None;
        self.poll_side(Side::Well, now).or_else(|| self.poll_side(Side::Failing, now))
    }

    // Twice in `poll`: once in the wasm is enough.
    #[inline(never)]
    fn poll_side(&mut self, side: Side, now: Timestamp) -> Option<Dispatch> {
        let out = self.in_flight.iter().filter(|in_flight| in_flight.side == side).count();
        if out >= self.settings.max_in_flight_batches.max(1) {
            return None;
        }
        let Self { well, failing, settings, scripts, .. } = self;
        let queue = match side {
            Side::Well => well,
            Side::Failing => failing,
        };
        let prefix = &settings.key_prefix;
        let jobs = queue.next_batch(self.room, |job| {
            let goes_alone = settings.transport.sends_alone(job.operation.response());
            let weight = job.operation.weight(prefix, scripts, job.call);
            if goes_alone { weight.max(MAX_BYTES + 1) } else { weight }
        });
        let latest = jobs.iter().map(|job| job.deadline).max()?;
        let commands: Vec<_> = jobs.iter().map(|job| job.operation.argv(prefix, scripts, job.call)).collect();
        let request = settings.transport.encode(&commands);
        drop(commands);
        let timeout = (settings.timeout / 2).min(latest.since(now)).max(Duration::from_millis(1));
        self.last_batch = self.last_batch.wrapping_add(1);
        let batch = BatchId(self.last_batch);
        let operations = jobs.len();
        let until = now.after(timeout).after(self.settings.timeout);
        self.in_flight.push(InFlight { batch, jobs: jobs.into_iter().map(Some).collect(), until, side });
        Some(Dispatch { batch, request, timeout, operations })
    }

    /// A callout ended.
    pub fn on_reply(&mut self, batch: BatchId, reply: Result<&[u8], CalloutFault>, now: Timestamp) {
        let Some(jobs) = self.take_batch(batch) else {
            self.counts.late = self.counts.late.saturating_add(1);
            return;
        };
        let reply = reply.map(|bytes| self.settings.transport.as_of_link(bytes, jobs.len()));
        let values = match &reply {
            Ok(bytes) => envelope::open(bytes, jobs.len()).ok_or(Cause::BrokenEnvelope),
            Err(fault) => Err(fault.cause()),
        };
        let again: Vec<Job> = match values {
            Ok(values) => {
                self.judge_ranges(&jobs, &values);
                let answered = jobs.into_iter().zip(values);
                answered.filter_map(|(job, value)| self.settle(job?, &value, now)).collect()
            }
            Err(cause) => self.fail_all(jobs, cause, now),
        };
        self.put_back(again);
    }

    /// The host refused a callout: nothing was sent.
    pub fn on_refused(&mut self, batch: BatchId, now: Timestamp) {
        let Some(jobs) = self.take_batch(batch) else { return };
        self.counts.refused = self.counts.refused.saturating_add(1);
        // A host that refuses one refuses the next at once, for ever.
        self.paused_until = Some(now.after(self.settings.timeout / 8));
        let again: Vec<Job> = jobs.into_iter().flatten().collect();
        again.iter().for_each(|_| self.count(Cause::Refused));
        self.put_back(again);
        self.expire_queue(now);
    }

    /// Time has passed: several times within a timeout, or operations are answered later than they should.
    pub fn on_tick(&mut self, now: Timestamp) {
        self.expire_queue(now);
        let mut overdue = Vec::new();
        for in_flight in &mut self.in_flight {
            for job in &mut in_flight.jobs {
                overdue.extend(job.take_if(|job| now >= job.deadline));
            }
        }
        for job in overdue {
            let again = self.fail(job, Cause::TimedOut, now);
            self.put_back(again);
        }
        let (lost, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.in_flight).into_iter().partition(|in_flight| now >= in_flight.until);
        self.in_flight = kept;
        for in_flight in lost {
            let again = self.fail_all(in_flight.jobs, Cause::NoAnswer, now);
            self.put_back(again);
        }
    }

    /// The next answer, and the ticket it belongs to.
    pub fn next_answer(&mut self) -> Option<(u64, Answer)> {
        self.answers.pop_front()
    }

    /// Whether [`Self::next_answer`] has one to give.
    #[must_use]
    pub fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    /// Whether nothing waits and nothing is out.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting() == 0 && self.in_flight.is_empty() && self.answers.is_empty()
    }

    /// Operations that wait for a callout.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.well.len().saturating_add(self.failing.len())
    }

    /// What happened since this was last called.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    fn take_batch(&mut self, batch: BatchId) -> Option<Vec<Option<Job>>> {
        let at = self.in_flight.iter().position(|in_flight| in_flight.batch == batch)?;
        Some(self.in_flight.swap_remove(at).jobs)
    }

    /// Answers an operation by its value, or gives it back to be sent once more.
    fn settle(&mut self, mut job: Job, value: &Value<'_>, now: Timestamp) -> Option<Job> {
        let answer = match &job.operation {
            Operation::Claim(_) => read_claim(value).map(|answer| Answer::Claim(Ok(answer))),
            Operation::Write(..) => read_write(value).map(|reply| Answer::Write(Ok(reply))),
        };
        match answer {
            Ok(answer) => {
                self.answers.push_back((job.ticket, answer));
                None
            }
            Err(Fault::NoScript) if job.call == Call::Name => {
                self.counts.script_misses = self.counts.script_misses.saturating_add(1);
                job.call = Call::Text;
                Some(job)
            }
            Err(Fault::NoScript) => self.fail(job, Cause::UnexpectedReply, now),
            Err(Fault::Unavailable(cause)) => self.fail(job, cause, now),
            Err(Fault::Unreadable) => {
                self.answer_error(&job, StoreError::Unreadable);
                None
            }
        }
    }

    fn fail_all(&mut self, jobs: Vec<Option<Job>>, cause: Cause, now: Timestamp) -> Vec<Job> {
        let suspect = |job: Option<Job>| job.map(|job| Job { is_suspect: true, ..job });
        jobs.into_iter().filter_map(|job| self.fail(suspect(job)?, cause, now)).collect()
    }

    /// A try that may have been executed: gives it back if another may help and there is time, or gives it up.
    fn fail(&mut self, mut job: Job, cause: Cause, now: Timestamp) -> Option<Job> {
        self.count(cause);
        job.failures = job.failures.saturating_add(1);
        if job.failures == 1 && cause.is_transient() && now < job.deadline {
            self.counts.retries = self.counts.retries.saturating_add(1);
            return Some(job);
        }
        self.give_up(&job);
        None
    }

    /// Ahead of what waits, in the same order.
    fn put_back(&mut self, again: impl IntoIterator<Item = Job, IntoIter: DoubleEndedIterator>) {
        for job in again.into_iter().rev() {
            self.queue_of(job.range).push_front(job);
        }
    }

    fn queue_of(&mut self, range: u64) -> &mut Queue {
        if self.failing_ranges & range == 0 { &mut self.well } else { &mut self.failing }
    }

    /// Sees which slots fail. A Redis that fails as a whole is no reason to tell them apart.
    fn judge_ranges(&mut self, jobs: &[Option<Job>], values: &[Value<'_>]) {
        let (mut answered, mut failed) = (0, 0);
        for (job, value) in jobs.iter().zip(values) {
            let Some(job) = job else { continue };
            let fault = Fault::of_unexpected(value);
            let ranges =
                if fault == Fault::Unavailable(Cause::UpstreamFailure) { &mut failed } else { &mut answered };
            *ranges |= job.range;
        }
        let mut failing = self.failing_ranges & (failed | !answered);
        if answered != 0 {
            failing |= failed;
        }
        if failing == self.failing_ranges {
            return;
        }
        self.failing_ranges = failing;
        let worse = self.well.take_where(&|job: &Job| job.range & failing != 0);
        let better = self.failing.take_where(&|job: &Job| job.range & failing == 0);
        worse.into_iter().for_each(|job| self.failing.push_back(job));
        better.into_iter().for_each(|job| self.well.push_back(job));
    }

    fn expire_queue(&mut self, now: Timestamp) {
        let mut expired = self.well.take_where(&|job: &Job| now >= job.deadline);
        expired.extend(self.failing.take_where(&|job: &Job| now >= job.deadline));
        for job in expired {
            self.count(Cause::TimedOut);
            self.give_up(&job);
        }
    }

    fn give_up(&mut self, job: &Job) {
        if job.failures == 0 {
            self.answers.push_back((job.ticket, Answer::NotSent));
        } else {
            self.answer_error(job, StoreError::Unavailable);
        }
    }

    fn answer_error(&mut self, job: &Job, error: StoreError) {
        let answer = match &job.operation {
            Operation::Claim(_) => Answer::Claim(Err(error)),
            Operation::Write(..) => Answer::Write(Err(error)),
        };
        self.answers.push_back((job.ticket, answer));
    }

    fn count(&mut self, cause: Cause) {
        match self.counts.causes.iter_mut().find(|(known, _)| *known == cause) {
            Some((_, count)) => *count = count.saturating_add(1),
            None => self.counts.causes.push((cause, 1)),
        }
    }
}
