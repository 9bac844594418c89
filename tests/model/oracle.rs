//! What must hold, told from outside: from what clients sent and saw, what the upstream did, and which answers the store
//! gave. It calls none of the product's decisions, so that a wrong one shows.

use std::collections::{BTreeMap, BTreeSet};

use idempotency::clock::Timestamp;
use idempotency::fingerprint::Fingerprint;
use idempotency::record::{Owner, Reason};
use idempotency::store::{ClaimReply, StoreError, WriteReply};

/// The settings that say what may happen, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rules {
    pub takeover: bool,
    pub release_unknown: bool,
    pub release_failure: bool,
    pub allow: bool,
    pub lock_ttl: u64,
    pub record_ttl: u64,
    pub failed_ttl: u64,
}

/// Which guarantee was broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Broken {
    /// Two live owners of one key.
    TwoOwners,
    /// A write of somebody who is not the owner was applied, or a terminal record changed.
    StaleOverwrites,
    /// The upstream was asked again though no lease ran out and no release was due.
    RanAgain,
    /// A request was forwarded that no claim protects.
    NoClaim,
    /// A replay is not what was stored first.
    ReplayDiffers,
    /// Another request's response was replayed, or its execution taken over.
    MismatchReplayed,
    /// A key is held though no lease is alive.
    Wedged,
    /// An answer of the store agrees with nothing that happened.
    WrongAnswer,
    /// A client saw the whole response before its record was stored.
    SeenBeforeStored,
    /// A client, or a write, waits for ever.
    LeftWaiting,
    /// Something that was taken was never given back.
    Leaked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation {
    pub broken: Broken,
    pub why: String,
}

pub type Verdict = Result<(), Violation>;

pub fn broken(broken: Broken, why: impl Into<String>) -> Verdict {
    Err(Violation { broken, why: why.into() })
}

/// What an execution's ending makes of its claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Due {
    Keep,
    Fail,
    Release,
}

/// How an execution ended, as the upstream or the client made it end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ending {
    /// The upstream's whole response.
    Whole(u16),
    /// The response began and was cut off, or the client left meanwhile.
    CutOff(u16),
    /// No response: a time-out, a reset, another filter's reply, the client left.
    Unknown,
    /// It provably reached no upstream.
    NotSent,
}

impl Rules {
    /// `ran_before`: an attempt before the one that ended may have run, by the route's retries or a redirect.
    pub fn due(&self, ending: Ending, ran_before: bool) -> Due {
        let unknown = if self.release_unknown { Due::Release } else { Due::Fail };
        let not_run = if ran_before { unknown } else { Due::Release };
        let failure = if self.release_failure { Due::Release } else { Due::Fail };
        match ending {
            Ending::NotSent | Ending::Whole(429 | 503) | Ending::CutOff(429 | 503) => not_run,
            Ending::Whole(200..=499) => Due::Keep,
            Ending::Whole(_) => failure,
            Ending::CutOff(_) | Ending::Unknown => unknown,
        }
    }
}

/// A write, without what only the store needs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Written {
    Renew,
    Complete(Vec<u8>),
    Fail(Reason),
    Release,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    owner: Owner,
    fingerprint: Fingerprint,
    attempt: u32,
    lease_until: u64,
    expires: u64,
    state: State,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum State {
    InFlight,
    Completed(Vec<u8>),
    Tombstone,
    Failed(Reason),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Run {
    key: u8,
    body: u8,
    protected: bool,
    due: Option<Due>,
    /// What the upstream answered in whole: status and body.
    answer: Option<(u16, Vec<u8>)>,
}

/// Everything that is known of the keys of one run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Oracle {
    rules: Rules,
    keys: BTreeMap<u8, Held>,
    runs: BTreeMap<Owner, Run>,
    granted: BTreeSet<Owner>,
    /// Whose lease ran out, or whose record's life ended, before somebody else claimed.
    superseded: BTreeSet<Owner>,
    trusts_store: bool,
}

impl Oracle {
    pub const fn new(rules: Rules) -> Self {
        Self {
            rules,
            keys: BTreeMap::new(),
            runs: BTreeMap::new(),
            granted: BTreeSet::new(),
            superseded: BTreeSet::new(),
            trusts_store: false,
        }
    }

    /// How often requests with this key went to the upstream.
    pub fn executions(&self, key: u8) -> usize {
        self.runs.values().filter(|run| run.key == key).count()
    }

    /// Takes the store at its word: what is wrong with it has to show in what clients and the upstream see.
    pub fn trusting(self) -> Self {
        Self { trusts_store: true, ..self }
    }

    /// The store answered a claim at its time `at`.
    pub fn claimed(
        &mut self,
        key: u8,
        owner: Owner,
        fingerprint: Fingerprint,
        at: Timestamp,
        reply: &Result<ClaimReply, StoreError>,
    ) -> Verdict {
        let at = at.as_millis();
        let verdict = self.judge_claim(key, owner, fingerprint, at, reply);
        if !self.trusts_store {
            verdict?;
        }
        let Ok(ClaimReply::Claimed { attempt }) = *reply else { return Ok(()) };
        self.granted.insert(owner);
        if let Some(before) = self.keys.get(&key) {
            if at < before.expires && before.state == State::InFlight && before.owner == owner {
                return Ok(());
            }
            let is_abandoned =
                before.state == State::InFlight && at >= before.lease_until && self.rules.takeover;
            if at >= before.expires || is_abandoned {
                self.superseded.insert(before.owner);
            }
        }
        let held = Held {
            owner,
            fingerprint,
            attempt,
            lease_until: at + self.rules.lock_ttl,
            expires: at + self.rules.record_ttl,
            state: State::InFlight,
        };
        self.keys.insert(key, held);
        Ok(())
    }

    fn judge_claim(
        &self,
        key: u8,
        owner: Owner,
        asked_for: Fingerprint,
        at: u64,
        reply: &Result<ClaimReply, StoreError>,
    ) -> Verdict {
        let held = self.keys.get(&key).filter(|held| at < held.expires);
        let wrong = || broken(Broken::WrongAnswer, format!("{reply:?} for {held:?}"));
        let in_flight = held.filter(|held| held.state == State::InFlight);
        match reply {
            Ok(ClaimReply::Claimed { attempt }) => {
                let Some(held) = held else { return same("attempt", attempt, &1) };
                if in_flight.is_none() {
                    return broken(Broken::RanAgain, format!("{owner:?} claimed {key} over {held:?}"));
                }
                if held.owner == owner {
                    return same("attempt", attempt, &held.attempt);
                }
                if at < held.lease_until || !self.rules.takeover {
                    return broken(Broken::TwoOwners, format!("{owner:?} claimed {key} beside {held:?}"));
                }
                if held.fingerprint != asked_for {
                    let why = format!("{owner:?} took {key} over with another request: {held:?}");
                    return broken(Broken::MismatchReplayed, why);
                }
                same("attempt", attempt, &(held.attempt + 1))
            }
            Ok(ClaimReply::InFlight { fingerprint, .. }) => match in_flight {
                Some(held) if held.owner != owner && at < held.lease_until => {
                    same("fingerprint", fingerprint, &held.fingerprint)
                }
                Some(held) => {
                    broken(Broken::Wedged, format!("{key} is in flight at {at}, beyond its lease: {held:?}"))
                }
                None => wrong(),
            },
            Ok(ClaimReply::Abandoned { fingerprint }) => match in_flight {
                Some(held)
                    if at >= held.lease_until && !(self.rules.takeover && held.fingerprint == asked_for) =>
                {
                    same("fingerprint", fingerprint, &held.fingerprint)
                }
                None | Some(_) => wrong(),
            },
            Ok(ClaimReply::Completed { fingerprint, response }) => match held {
                Some(Held { state: State::Completed(first), .. }) if first != response => {
                    broken(Broken::ReplayDiffers, format!("{key} was stored as other bytes"))
                }
                Some(Held { state: State::Completed(_) | State::Tombstone, fingerprint: kept, .. }) => {
                    same("fingerprint", fingerprint, kept)
                }
                None | Some(_) => wrong(),
            },
            Ok(ClaimReply::Failed { fingerprint, reason }) => match held {
                Some(Held { state: State::Failed(kept), fingerprint: found, .. }) => {
                    same("reason", reason, kept)?;
                    same("fingerprint", fingerprint, found)
                }
                None | Some(_) => wrong(),
            },
            Err(_) => wrong(),
        }
    }

    /// The store answered a fenced operation at its time `at`.
    pub fn written(
        &mut self,
        key: u8,
        owner: Owner,
        (fingerprint, attempt): (Fingerprint, u32),
        write: &Written,
        at: Timestamp,
        reply: Result<WriteReply, StoreError>,
    ) -> Verdict {
        let at = at.as_millis();
        let verdict = self.judge_write(key, owner, write, at, reply);
        if !self.trusts_store {
            verdict?;
        }
        let held = self.keys.get(&key).filter(|held| at < held.expires);
        let (state, life) = match (write, reply) {
            (_, Err(_) | Ok(WriteReply::Stale)) => return Ok(()),
            (Written::Release, Ok(_)) => {
                if held.is_some() {
                    self.keys.remove(&key);
                }
                return Ok(());
            }
            (Written::Renew, Ok(_)) => (State::InFlight, self.rules.record_ttl),
            (Written::Complete(_), Ok(WriteReply::AppliedAsTombstone)) => {
                (State::Tombstone, self.rules.record_ttl)
            }
            (Written::Complete(bytes), Ok(WriteReply::Applied)) => {
                (State::Completed(bytes.clone()), self.rules.record_ttl)
            }
            (Written::Fail(reason), Ok(_)) => (State::Failed(*reason), self.rules.failed_ttl),
        };
        if held.is_some_and(|held| held.state != State::InFlight) {
            // The same again changes nothing.
            return Ok(());
        }
        let (fingerprint, attempt) =
            held.map_or((fingerprint, attempt), |held| (held.fingerprint, held.attempt));
        let lease_until = at + self.rules.lock_ttl;
        let held = Held { owner, fingerprint, attempt, lease_until, expires: at + life, state };
        if let Some(before) = self.keys.insert(key, held)
            && before.owner != owner
            && at >= before.expires
        {
            self.superseded.insert(before.owner);
        }
        Ok(())
    }

    fn judge_write(
        &self,
        key: u8,
        owner: Owner,
        write: &Written,
        at: u64,
        reply: Result<WriteReply, StoreError>,
    ) -> Verdict {
        let held = self.keys.get(&key).filter(|held| at < held.expires);
        let is_own = held.is_none_or(|held| held.owner == owner && held.state == State::InFlight);
        let is_again = held.is_some_and(|held| {
            held.owner == owner
                && matches!(
                    (&held.state, write),
                    (State::Completed(_) | State::Tombstone, Written::Complete(_))
                        | (State::Failed(_), Written::Fail(_))
                )
        });
        match reply {
            Ok(WriteReply::Applied | WriteReply::AppliedAsTombstone) if is_own || is_again => Ok(()),
            Ok(WriteReply::Applied | WriteReply::AppliedAsTombstone) => {
                let why = format!("{write:?} of {owner:?} was applied to {key}: {held:?}");
                broken(Broken::StaleOverwrites, why)
            }
            Ok(WriteReply::Stale) if !is_own => Ok(()),
            Ok(WriteReply::Stale) => {
                broken(Broken::WrongAnswer, format!("{write:?} of {owner:?} is no stale one: {held:?}"))
            }
            Err(error) => broken(Broken::WrongAnswer, format!("{error:?}, with no fault planted")),
        }
    }

    /// A request went on to the upstream.
    pub fn forwarded(&mut self, key: u8, body: u8, owner: Owner, protected: bool) -> Verdict {
        if protected && !self.granted.contains(&owner) {
            return broken(Broken::NoClaim, format!("{owner:?} was forwarded with no claim to {key}"));
        }
        if !protected && !self.rules.allow {
            return broken(Broken::NoClaim, format!("{owner:?} was forwarded unprotected to {key}"));
        }
        let excused = !protected || self.superseded.contains(&owner);
        let beside = self.runs.iter().find(|(other, run)| {
            run.key == key
                && **other != owner
                && run.protected
                && run.due != Some(Due::Release)
                && !self.superseded.contains(other)
        });
        if let Some((other, run)) = beside
            && !excused
        {
            return broken(Broken::RanAgain, format!("{owner:?} runs {key} again after {other:?}: {run:?}"));
        }
        self.runs.insert(owner, Run { key, body, protected, due: None, answer: None });
        Ok(())
    }

    /// An execution ended; `answer` is what the upstream sent, where it sent all.
    pub fn ended(&mut self, owner: Owner, ending: Ending, ran_before: bool, answer: Option<Vec<u8>>) {
        let due = self.rules.due(ending, ran_before);
        if let Some(run) = self.runs.get_mut(&owner)
            && run.due.is_none()
        {
            run.due = Some(due);
            if let (Ending::Whole(status) | Ending::CutOff(status), Some(body)) = (ending, answer) {
                run.answer = Some((status, body));
            }
        }
    }

    /// Everything has settled: what ended as kept or failed is recorded so, unless its worker died.
    pub fn recorded(&self, died: impl Fn(Owner) -> bool) -> Verdict {
        let unrecorded = self.keys.values().find(|held| {
            let due = self.runs.get(&held.owner).and_then(|run| run.due);
            let is_kept = matches!(due, Some(Due::Keep | Due::Fail));
            held.state == State::InFlight && is_kept && !died(held.owner)
        });
        match unrecorded {
            Some(held) => broken(Broken::LeftWaiting, format!("an end was never recorded: {held:?}")),
            None => Ok(()),
        }
    }

    /// A client was sent a replay.
    pub fn replayed(&self, key: u8, body: u8, status: u16, bytes: &[u8]) -> Verdict {
        let same_answer =
            |run: &Run| run.answer.as_ref().is_some_and(|(was, kept)| *was == status && kept == bytes);
        let mut sources = self.runs.values().filter(|run| run.key == key && same_answer(run)).peekable();
        if sources.peek().is_none() {
            return broken(
                Broken::ReplayDiffers,
                format!("no execution of {key} answered {status} {bytes:?}"),
            );
        }
        if !sources.any(|run| run.body == body) {
            let why = format!("body {body} of {key} was answered with another request's response");
            return broken(Broken::MismatchReplayed, why);
        }
        Ok(())
    }
}

/// Every oracle that agrees with what was seen: where two operations met, their order may stay open.
pub struct Oracles(Vec<Oracle>);

impl Oracles {
    pub fn new(oracle: Oracle) -> Self {
        Self(vec![oracle])
    }

    pub fn first(&self) -> &Oracle {
        &self.0[0]
    }

    pub fn tell(&mut self, tell: impl Fn(&mut Oracle)) {
        self.0.iter_mut().for_each(tell);
    }

    /// Something is wrong once it agrees with none of them.
    pub fn all(&mut self, check: impl Fn(&mut Oracle) -> Verdict) -> Verdict {
        self.either(&check, |_| broken(Broken::WrongAnswer, "there is no other order"))
    }

    /// As [`Self::all`], with two orders to choose from.
    pub fn either(
        &mut self,
        one: impl Fn(&mut Oracle) -> Verdict,
        other: impl Fn(&mut Oracle) -> Verdict,
    ) -> Verdict {
        let (mut agree, mut first) = (Vec::new(), None);
        for oracle in &self.0 {
            for verdict in [&one as &dyn Fn(&mut Oracle) -> Verdict, &other] {
                let mut trial = oracle.clone();
                match verdict(&mut trial) {
                    Ok(()) if agree.contains(&trial) => {}
                    Ok(()) => agree.push(trial),
                    Err(violation) => {
                        first.get_or_insert(violation);
                    }
                }
            }
        }
        match first {
            Some(violation) if agree.is_empty() => Err(violation),
            Some(_) | None => {
                self.0 = agree;
                Ok(())
            }
        }
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, found: &T, expected: &T) -> Verdict {
    if found == expected {
        return Ok(());
    }
    broken(Broken::WrongAnswer, format!("{what} is {found:?}, not {expected:?}"))
}
