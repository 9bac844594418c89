//! Operations that wait for a callout, and which of them go with the next one.
//!
//! - What failed with its whole callout goes without anything else, and an outbox's without anybody else's: an operation
//!   that makes every callout fail takes no claim with it twice. What failed by its own answer spoils nobody's callout.
//! - The outbox goes first, but takes at most half of a callout while others wait.

use std::collections::VecDeque;

use super::operation::Operation;
use super::script::Call;
use crate::clock::Timestamp;

/// Whose operation it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A write that was not taken before: ahead of everything.
    Outbox,
    /// Everything else.
    Normal,
}

/// An operation on its way.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) ticket: u64,
    pub(super) operation: Operation,
    pub(super) priority: Priority,
    /// It is answered by then.
    pub(super) deadline: Timestamp,
    pub(super) call: Call,
    /// How often it failed after it was sent: so often, it may have been executed.
    pub(super) failures: u8,
    /// Whether the whole callout failed that it was in.
    pub(super) is_suspect: bool,
    /// See [`super::slot::range_of`].
    pub(super) range: u64,
}

/// What one callout may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) operations: usize,
    /// A claim may be answered by a whole response.
    pub(super) claims: usize,
    pub(super) bytes: usize,
}

impl Room {
    fn half(self) -> Self {
        let half = |of: usize| (of / 2).max(1);
        Self { operations: half(self.operations), claims: half(self.claims), bytes: half(self.bytes) }
    }

    /// Room for what failed with its callout: the answer may have been longer than Envoy buffers.
    fn for_another_try(self) -> Self {
        Self { claims: (self.claims / 8).max(1), ..self }
    }

    /// Takes an operation of this weight in; the first one always fits.
    fn take(&mut self, job: &Job, weight: usize, is_first: bool) -> bool {
        let claims = usize::from(job.operation.is_claim());
        let fits = self.operations >= 1 && self.claims >= claims && self.bytes >= weight;
        if fits || is_first {
            self.operations = self.operations.saturating_sub(1);
            self.claims = self.claims.saturating_sub(claims);
            self.bytes = self.bytes.saturating_sub(weight);
        }
        fits || is_first
    }
}

#[derive(Debug, Default)]
struct Lanes {
    outbox: VecDeque<Job>,
    normal: VecDeque<Job>,
}

/// What waits, oldest first.
#[derive(Debug, Default)]
pub(super) struct Queue {
    others: Lanes,
    suspects: Lanes,
}

impl Queue {
    pub(super) fn len(&self) -> usize {
        self.lanes().map(VecDeque::len).sum()
    }

    pub(super) fn push_back(&mut self, job: Job) {
        self.lane_of(&job).push_back(job);
    }

    /// Puts back what waited before everything that waits now.
    pub(super) fn push_front(&mut self, job: Job) {
        self.lane_of(&job).push_front(job);
    }

    /// Takes out everything that it is true of.
    pub(super) fn take_where(&mut self, is_taken: &dyn Fn(&Job) -> bool) -> Vec<Job> {
        let mut taken = Vec::new();
        for lane in self.lanes_mut() {
            // Nearly always nothing is, and then nothing is moved.
            if lane.iter().any(is_taken) {
                let (out, waiting): (Vec<_>, Vec<_>) = std::mem::take(lane).into_iter().partition(is_taken);
                *lane = waiting.into();
                taken.extend(out);
            }
        }
        taken
    }

    /// Takes out a claim that waits.
    pub(super) fn take_claim(&mut self, ticket: u64) -> Option<Job> {
        self.lanes_mut().into_iter().find_map(|lane| {
            let at = lane.iter().position(|job| job.ticket == ticket && job.operation.is_claim())?;
            lane.remove(at)
        })
    }

    /// Takes out what goes with the next callout.
    pub(super) fn next_batch(&mut self, mut room: Room, weigh: impl Fn(&Job) -> usize) -> Vec<Job> {
        let mut batch = Vec::new();
        let again = &mut self.suspects;
        for lane in [&mut again.normal, &mut again.outbox] {
            if !lane.is_empty() {
                take_from(lane, &mut room.for_another_try(), &weigh, &mut batch);
                return batch;
            }
        }
        let Lanes { outbox, normal } = &mut self.others;
        if normal.is_empty() {
            take_from(outbox, &mut room, &weigh, &mut batch);
            return batch;
        }
        let half = room.half();
        let mut left = half;
        take_from(outbox, &mut left, &weigh, &mut batch);
        room.operations = room.operations.saturating_sub(half.operations - left.operations);
        room.claims = room.claims.saturating_sub(half.claims - left.claims);
        let bytes: usize = batch.iter().map(&weigh).sum();
        room.bytes = room.bytes.saturating_sub(bytes);
        take_from(normal, &mut room, &weigh, &mut batch);
        batch
    }

    fn lane_of(&mut self, job: &Job) -> &mut VecDeque<Job> {
        let lanes = if job.is_suspect { &mut self.suspects } else { &mut self.others };
        match job.priority {
            Priority::Outbox => &mut lanes.outbox,
            Priority::Normal => &mut lanes.normal,
        }
    }

    fn lanes(&self) -> impl Iterator<Item = &VecDeque<Job>> {
        let Self { others, suspects } = self;
        [&suspects.outbox, &suspects.normal, &others.outbox, &others.normal].into_iter()
    }

    fn lanes_mut(&mut self) -> [&mut VecDeque<Job>; 4] {
        let Self { others, suspects } = self;
        [&mut suspects.outbox, &mut suspects.normal, &mut others.outbox, &mut others.normal]
    }
}

fn take_from(
    lane: &mut VecDeque<Job>,
    room: &mut Room,
    weigh: &impl Fn(&Job) -> usize,
    batch: &mut Vec<Job>,
) {
    while let Some(job) = lane.pop_front() {
        if !room.take(&job, weigh(&job), batch.is_empty()) {
            lane.push_front(job);
            return;
        }
        batch.push(job);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::config::OnAbandoned;
    use crate::fingerprint::Fingerprint;
    use crate::key::StoreKey;
    use crate::record::{ClaimTerms, Owner};
    use crate::store::{Claim, Hold, Write};

    const ROOM: Room = Room { operations: 8, claims: 4, bytes: 1_000 };

    fn job(ticket: u64, priority: Priority, failures: u8, is_claim: bool) -> Job {
        let (key, owner) = (StoreKey::from_bytes([0; 32]), Owner::from_bytes([0; 16]));
        let fingerprint = Fingerprint::from_bytes([0; 32]);
        let second = Duration::from_secs(1);
        let operation = if is_claim {
            let on_abandoned = OnAbandoned::Retain;
            let terms = ClaimTerms { owner, fingerprint, lock_ttl: second, record_ttl: second, on_abandoned };
            Operation::Claim(Claim { key, terms })
        } else {
            Operation::Write(Hold { key, owner, fingerprint, attempt: 1 }, Write::Release)
        };
        let deadline = Timestamp::from_millis(ticket);
        Job {
            ticket,
            operation,
            priority,
            deadline,
            call: Call::Name,
            failures,
            is_suspect: failures > 0,
            range: 1,
        }
    }

    fn queue(jobs: impl IntoIterator<Item = Job>) -> Queue {
        let mut queue = Queue::default();
        jobs.into_iter().for_each(|job| queue.push_back(job));
        queue
    }

    fn next(queue: &mut Queue, weight: usize) -> Vec<u64> {
        queue.next_batch(ROOM, |_| weight).iter().map(|job| job.ticket).collect()
    }

    #[test]
    fn the_outbox_goes_first_and_leaves_half() {
        let outbox = (0..10).map(|ticket| job(ticket, Priority::Outbox, 0, false));
        let normal = (100..110).map(|ticket| job(ticket, Priority::Normal, 0, true));
        let mut waiting = queue(normal.chain(outbox));
        assert_eq!(next(&mut waiting, 1), [0, 1, 2, 3, 100, 101, 102, 103]);
        assert_eq!(next(&mut waiting, 300), [4, 100 + 4, 105]);
        let mut alone = queue((0..10).map(|ticket| job(ticket, Priority::Outbox, 0, false)));
        assert_eq!(next(&mut alone, 1).len(), 8);
    }

    #[test]
    fn a_larger_one_goes_alone() {
        let mut waiting = queue((0..3).map(|ticket| job(ticket, Priority::Normal, 0, false)));
        assert_eq!(next(&mut waiting, 5_000), [0]);
        let jobs = [job(1, Priority::Outbox, 0, false), job(2, Priority::Normal, 0, false)];
        assert_eq!(next(&mut queue(jobs), 5_000), [1]);
    }

    #[test]
    fn what_failed_with_its_callout_goes_by_itself() {
        let mut waiting = queue([
            job(1, Priority::Normal, 0, false),
            job(2, Priority::Outbox, 1, false),
            job(3, Priority::Normal, 1, true),
            job(4, Priority::Outbox, 0, false),
            job(5, Priority::Normal, 1, true),
        ]);
        // One claim at a time: the answer may have been too long.
        assert_eq!(next(&mut waiting, 1), [3]);
        assert_eq!(next(&mut waiting, 1), [5]);
        assert_eq!(next(&mut waiting, 1), [2]);
        assert_eq!(next(&mut waiting, 1), [4, 1]);
        assert_eq!((next(&mut waiting, 1).len(), waiting.len()), (0, 0));
    }

    #[test]
    fn what_is_over_or_cancelled_is_taken_out() {
        let jobs = (1..=4).map(|ticket| job(ticket, Priority::Normal, 0, ticket != 3));
        let mut waiting = queue(jobs);
        let expired = waiting.take_where(&|job: &Job| job.deadline <= Timestamp::from_millis(1));
        assert_eq!(expired.iter().map(|job| job.ticket).collect::<Vec<_>>(), [1]);
        assert!(waiting.take_claim(3).is_none());
        assert!(waiting.take_claim(9).is_none());
        assert_eq!(waiting.take_claim(2).map(|job| job.ticket), Some(2));
        assert_eq!(next(&mut waiting, 1), [3, 4]);
    }
}
