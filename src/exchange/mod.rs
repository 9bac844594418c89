//! One request/response exchange and its state machine. Owns no clock, no store, no host.
//!
//! **The contract:** one [`Event`] in; then all effects of the [`Step`] are applied in order; then the next event. A
//! store that answers at once is fed back as [`Event::StoreAnswered`] in the same callback ([`drive`] does all
//! this). [`Step::gate`] says whether the request or the response is held once the effects are applied. An event
//! that can't happen in a state is counted and ignored, never a panic.
//!
//! Everything that affects the state of an exchange lives in this module.
//!
//! ```text
//!            RequestHead                       StoreAnswered(claimed)         ResponseHead (upstream)
//!  Idle ──────┬──> Reading ──end──> Claiming ────────┬──────> Forwarded ────────┬────> Responding
//!             │       │                │             │  ^        │  │           │          │ end, or closed
//!             │ no key│ too large,     │ in flight,  │  │Adopted │  │ closed    │ local    v
//!             v       │ late           │ done, failed│  └─ Idle  │  │           └─────> Saving ──answered──> Done
//!          Bypassed   └──> Replying <──┘             └─ store down, allowed:  ───────────^
//!                                                       Forwarded, unprotected
//! ```
//!
//! Under `execution: detached` a granted claim leads to `Executing` in place of `Forwarded`: the filter sends the
//! request itself, the client's own goes nowhere, and `Executed` leads to `Saving`, then to `Replying` or, without a
//! client, to `Spent`.
//!
//! | state | request | response | on a tick | when the stream closes |
//! |---|---|---|---|---|
//! | `Idle`, `Bypassed`, `Done` | passes | passes | – | – |
//! | `Reading` | held | Envoy's own reply: nothing is claimed | refuses after `body_timeout` | nothing is claimed |
//! | `Claiming` | held | Envoy's own reply: releases | – | releases |
//! | `Forwarded` | passes, once a body that was held is whole | decides | renews | fails, or hands over |
//! | `Responding` | passes | captured; the last frame is held | renews | fails, unless its status froze the outcome |
//! | `Waiting` | held | Envoy's own reply: nothing is claimed | claims again | nothing is claimed |
//! | `Shadow` | passes | passes | renews | fails |
//! | `Executing` | held for ever | Envoy's own reply: the client is answered, the execution goes on | renews | the execution goes on |
//! | `Saving` | passes, but after `Executing` | held until the store answered | – | nothing: the write is out |
//! | `Spent` | held for ever | – | – | – |
//! | `Replying` | over | our own: its lines are put right | – | – |

mod budget;
mod detached;
mod effect;
mod event;
mod response;
mod shadow;
mod worker;

use std::rc::Rc;
use std::time::Duration;

pub use budget::{Budget, Reservation};
pub use detached::{
    ATTEMPTS_HEADER, DETAILS_HEADER, ExecutionAnswer, LEAST_ROOM, NotDispatched, REDIRECTED_HEADER,
    execution_lines,
};
pub use effect::{Effect, StoreOp, Warning};
pub use event::{Event, StoreAnswer};
pub use worker::{WaiterPlace, Worker};

use crate::clock::Timestamp;
use crate::config::{InFlight, MissingKey, Mode, OnStoreError, Rule};
use crate::fingerprint::{Fingerprint, FingerprintHasher};
use crate::headers::{HeaderBlock, RequestHead};
use crate::key::{StoreKey, parse_key};
use crate::metrics::Counter;
use crate::outcome::{ClaimEnd, ClosingFacts, Outcome, claim_end, closed_reason};
use crate::policy::Bypass;
use crate::record::codec::StoredResponse;
use crate::record::{ClaimTerms, Owner, Reason};
use crate::reply::problem::{Problem, retry_after_seconds};
use crate::reply::replay::{PROTECTION_HEADER, replay};
use crate::reply::{LocalReply, fit_a_reply};
use crate::scope::resolve_scope;
use crate::store::{Claim, ClaimReply, Hold, StoreError, Write, WriteReply};
use detached::Executing;
use response::{Responding, Saving};
use shadow::Shadow;

/// Tells the upstream which attempt it sees, from the second on.
pub const ATTEMPT_HEADER: &str = "x-idempotency-attempt";

/// What one event comes to.
#[derive(Debug)]
#[must_use]
pub struct Step {
    /// To be applied in order.
    pub effects: Vec<Effect>,
    /// What is held afterwards.
    pub gate: Gate,
}

/// What is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Nothing.
    Pass,
    /// The request.
    HoldRequest,
    /// The response.
    HoldResponse,
}

/// A claim on its way from one pass of an internal redirect to the next.
#[derive(Debug, Clone)]
pub struct Handover {
    held: Held,
    request_origin: Option<Vec<u8>>,
    started: Timestamp,
    protected: bool,
}

impl Handover {
    /// The claim.
    #[must_use]
    pub const fn hold(&self) -> &Hold {
        &self.held.hold
    }

    /// The rule it was made under.
    #[must_use]
    pub const fn rule(&self) -> &Rc<Rule> {
        &self.held.rule
    }

    /// How the claim ends when no further pass adopts it, and what counts that.
    #[must_use]
    pub fn end_unadopted(&self) -> (Write, Counter) {
        let rule = self.rule();
        match claim_end(rule, Outcome::Failed(Reason::Redirected)) {
            ClaimEnd::Fail(reason) => {
                (Write::Fail { reason, failed_ttl: rule.failed_ttl }, Counter::retained(reason))
            }
            ClaimEnd::Release(released) => (Write::Release, Counter::released(released)),
            ClaimEnd::Complete => (Write::Release, Counter::UnexpectedEvents),
        }
    }
}

/// A claim that this exchange holds.
#[derive(Debug, Clone)]
struct Held {
    hold: Hold,
    rule: Rc<Rule>,
    renew_at: Timestamp,
    /// A renewal is out: one operation per key and owner at a time.
    renewing: bool,
    lost: bool,
    /// Why the upstream may have executed before the answer that ends this: a redirect that Envoy followed, or an
    /// earlier attempt of the route's retries. Such a claim is never given back as not processed.
    ran_before: Option<Reason>,
}

/// One request/response exchange.
#[derive(Debug)]
pub struct Exchange {
    worker: Rc<Worker>,
    state: State,
}

#[derive(Debug)]
enum State {
    Idle,
    Bypassed,
    Reading(Box<Reading>),
    Claiming(Box<Claiming>),
    Waiting(Box<Waiting>),
    Forwarded(Box<Forwarded>),
    Responding(Box<Responding>),
    Executing(Box<Executing>),
    Saving(Box<Saving>),
    /// The filter's own lines, until Envoy has made a head of them.
    Replying(Option<HeaderBlock>),
    Shadow(Box<Shadow>),
    /// The request was executed detached and the client is gone: what is held goes nowhere.
    Spent,
    Done,
}

/// What of the request is needed after its head is gone.
#[derive(Debug)]
struct Request {
    rule: Rc<Rule>,
    key: StoreKey,
    owner: Owner,
    origin: Option<Vec<u8>>,
    has_attempt_header: bool,
    has_protection_header: bool,
    /// Bytes of the body that are held.
    body_bytes: u64,
    /// A part of the body was held while its head was, and its end is still to come.
    body_open: bool,
    /// A callout can't carry it: it has trailers, or header lines that don't fit one.
    inline_only: bool,
}

#[derive(Debug)]
struct Reading {
    request: Request,
    hasher: FingerprintHasher,
    progress_at: Timestamp,
}

#[derive(Debug)]
struct Claiming {
    request: Request,
    fingerprint: Fingerprint,
    /// A lease that is granted counts from its asking at the latest.
    asked_at: Timestamp,
    closed: bool,
    wait: Option<Wait>,
}

/// A duplicate that waits for the first execution: it asks again, and may become the one that executes.
#[derive(Debug)]
struct Waiting {
    request: Request,
    fingerprint: Fingerprint,
    wait: Wait,
    poll_at: Timestamp,
}

#[derive(Debug)]
struct Wait {
    until: Timestamp,
    pause: Duration,
    _place: WaiterPlace,
}

const FIRST_POLL: Duration = Duration::from_millis(25);
const LONGEST_POLL: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Forwarded {
    held: Held,
    request_origin: Option<Vec<u8>>,
    started: Timestamp,
    protected: bool,
    /// Nothing of the request has gone on yet: Envoy below 1.37.6 and 1.38.4 loses a part of a body that was held and is
    /// let go before its end (envoy#46842).
    held_back: bool,
}

impl Exchange {
    /// An exchange that has seen nothing.
    #[must_use]
    pub const fn new(worker: Rc<Worker>) -> Self {
        Self { worker, state: State::Idle }
    }

    /// An exchange that will never do anything: for requests that no rule covers.
    #[must_use]
    pub const fn bypassed(worker: Rc<Worker>) -> Self {
        Self { worker, state: State::Bypassed }
    }

    /// Whether no event can matter any more but the end of the stream.
    #[must_use]
    pub const fn is_inert(&self) -> bool {
        matches!(self.state, State::Idle | State::Bypassed | State::Spent | State::Done)
    }

    /// Whether the head of a response has to be shown to it.
    #[must_use]
    pub const fn wants_response_head(&self) -> bool {
        match &self.state {
            State::Reading(_)
            | State::Claiming(_)
            | State::Forwarded(_)
            | State::Waiting(_)
            | State::Executing(_)
            | State::Replying(Some(_)) => true,
            State::Saving(saving) => saving.delivery.wants_response_head(),
            State::Shadow(shadow) => shadow.wants_response_head(),
            State::Idle
            | State::Bypassed
            | State::Responding(_)
            | State::Spent
            | State::Replying(None)
            | State::Done => false,
        }
    }

    /// Whether response bodies have to be announced to it.
    #[must_use]
    pub const fn wants_response_body(&self) -> bool {
        match &self.state {
            State::Responding(_) | State::Saving(_) => true,
            State::Shadow(shadow) => shadow.wants_response_body(),
            State::Idle
            | State::Bypassed
            | State::Reading(_)
            | State::Claiming(_)
            | State::Waiting(_)
            | State::Forwarded(_)
            | State::Executing(_)
            | State::Spent
            | State::Replying(_)
            | State::Done => false,
        }
    }

    /// Whether the bytes of response bodies have to be shown to it, too.
    #[must_use]
    pub fn wants_response_bytes(&self) -> bool {
        match &self.state {
            State::Responding(responding) => responding.wants_bytes(),
            State::Shadow(shadow) => shadow.wants_response_bytes(),
            State::Idle
            | State::Bypassed
            | State::Reading(_)
            | State::Claiming(_)
            | State::Waiting(_)
            | State::Forwarded(_)
            | State::Executing(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Done => false,
        }
    }

    /// Whether request bodies have to be announced to it.
    #[must_use]
    pub const fn wants_request_body(&self) -> bool {
        match &self.state {
            State::Reading(_) | State::Claiming(_) | State::Waiting(_) => true,
            State::Forwarded(forwarded) => forwarded.held_back,
            State::Shadow(shadow) => shadow.wants_request_body(),
            State::Idle
            | State::Bypassed
            | State::Responding(_)
            | State::Executing(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Done => false,
        }
    }

    /// Whether the bytes of request bodies have to be shown to it, too.
    #[must_use]
    pub const fn wants_request_bytes(&self) -> bool {
        match &self.state {
            State::Reading(_) => true,
            State::Shadow(shadow) => shadow.wants_request_body(),
            State::Idle
            | State::Bypassed
            | State::Claiming(_)
            | State::Waiting(_)
            | State::Forwarded(_)
            | State::Responding(_)
            | State::Executing(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Done => false,
        }
    }

    /// Whether there is room for the body of the detached execution's answer; takes it.
    pub fn make_room(&mut self, bytes: u64) -> bool {
        if let State::Executing(executing) = &mut self.state { executing.make_room(bytes) } else { false }
    }

    /// What is held.
    #[must_use]
    pub const fn gate(&self) -> Gate {
        match &self.state {
            State::Reading(_)
            | State::Claiming(_)
            | State::Waiting(_)
            | State::Executing(_)
            | State::Spent => Gate::HoldRequest,
            State::Forwarded(forwarded) if forwarded.held_back => Gate::HoldRequest,
            State::Responding(responding) if responding.holding() => Gate::HoldResponse,
            State::Saving(saving) => saving.delivery.gate(),
            State::Idle
            | State::Bypassed
            | State::Forwarded(_)
            | State::Responding(_)
            | State::Replying(_)
            | State::Shadow(_)
            | State::Done => Gate::Pass,
        }
    }

    /// Takes one event. See the module's contract.
    pub fn handle(&mut self, event: Event<'_>, now: Timestamp) -> Step {
        let mut effects = Vec::new();
        let state = std::mem::replace(&mut self.state, State::Done);
        if let State::Shadow(shadow) = state {
            self.state = on_shadow_event(shadow, event, now, &mut effects);
            return Step { effects, gate: Gate::Pass };
        }
        self.state = match event {
            Event::RequestHead { rule, head, end, owner } => {
                self.on_request_head(state, rule, head, end, owner, now, &mut effects)
            }
            Event::RouteMisconfigured => {
                self.refuse(Problem::Misconfigured, Counter::RejectedMisconfigured, None, &mut effects)
            }
            // Without it there is no claim, and without a claim nothing is forwarded.
            Event::RequestUnreadable => {
                self.refuse(Problem::StoreUnavailable, Counter::StoreErrors, None, &mut effects)
            }
            Event::Adopted(handover) => self.on_adopted(state, handover, &mut effects),
            Event::RequestBody { chunk, end } => self.on_request_body(state, chunk, end, now, &mut effects),
            Event::RequestTrailers => self.on_request_trailers(state, now, &mut effects),
            Event::StoreAnswered(answer) => self.on_store_answered(state, answer, now, &mut effects),
            Event::ResponseHead { facts, headers, end } => {
                self.on_response_head(state, &facts, headers, end, now, &mut effects)
            }
            Event::ResponseBody { chunk, skipped, end } => {
                self.on_response_body(state, chunk, skipped, end, now, &mut effects)
            }
            Event::Executed(answer) => {
                if let State::Executing(executing) = state {
                    self.on_executed(*executing, answer, now, &mut effects)
                } else {
                    unexpected(state, &mut effects)
                }
            }
            Event::ResponseTrailers => self.on_response_trailers(state, now, &mut effects),
            Event::Ticked => self.on_ticked(state, now, &mut effects),
            Event::StreamClosed(facts) => self.on_stream_closed(state, &facts, now, &mut effects),
        };
        Step { effects, gate: self.gate() }
    }

    fn refuse(
        &self,
        problem: Problem,
        counter: Counter,
        rule: Option<&Rule>,
        effects: &mut Vec<Effect>,
    ) -> State {
        effects.push(Effect::Count(counter));
        let rule = rule.map_or("-", |rule| rule.name.as_str());
        effects.push(Effect::Publish(format!("refused.{} rule={rule} attempt=0 key=-", problem.kind())));
        self.reply_with(problem, effects)
    }

    fn reply_with(&self, problem: Problem, effects: &mut Vec<Effect>) -> State {
        self.send(self.problem(problem), effects)
    }

    fn problem(&self, problem: Problem) -> LocalReply {
        let config = &self.worker.config;
        problem.into_reply(&config.statuses, &config.problem_type_base)
    }

    fn send(&self, reply: LocalReply, effects: &mut Vec<Effect>) -> State {
        State::Replying(deliver_now(reply, effects))
    }

    #[allow(clippy::too_many_arguments)]
    fn on_request_head(
        &self,
        state: State,
        rule: Rc<Rule>,
        head: &RequestHead<'_>,
        end: bool,
        owner: Owner,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !matches!(state, State::Idle) {
            return unexpected(state, effects);
        }
        if rule.mode == Mode::Shadow {
            return Shadow::begin(rule, head, end, owner, effects)
                .map_or(State::Bypassed, |shadow| State::Shadow(Box::new(shadow)));
        }
        let key = match parse_key(head.headers.lines(&rule.header), &rule.key) {
            Ok(Some(key)) => key,
            Ok(None) => match rule.missing_key {
                MissingKey::Pass => {
                    remove_marks(
                        head.headers.first(ATTEMPT_HEADER).is_some(),
                        head.headers.first(PROTECTION_HEADER).is_some(),
                        effects,
                    );
                    effects.extend(Counter::bypassed(Bypass::NoKey).map(Effect::Count));
                    return State::Bypassed;
                }
                MissingKey::Reject => {
                    let problem = Problem::MissingKey { header: rule.header.clone() };
                    return self.refuse(problem, Counter::RejectedMissingKey, Some(&rule), effects);
                }
            },
            Err(error) => {
                let problem = Problem::InvalidKey { why: format!("{}: {error}", rule.header) };
                return self.refuse(problem, Counter::RejectedInvalidKey, Some(&rule), effects);
            }
        };
        let scope = match resolve_scope(&rule, head) {
            Ok(scope) => scope,
            Err(error) => {
                let problem = Problem::InvalidScope { why: error.to_string() };
                return self.refuse(problem, Counter::RejectedInvalidScope, Some(&rule), effects);
            }
        };
        let announced = head.headers.first("content-length").and_then(parse_length).unwrap_or(0);
        if announced > rule.max_request_body_bytes {
            return self.refuse_too_large(&rule, effects);
        }
        let hasher = FingerprintHasher::start(&rule, head);
        let request = Request {
            key: StoreKey::under(&rule, &scope, &key),
            owner,
            origin: head.headers.first("origin").map(<[u8]>::to_vec),
            has_attempt_header: head.headers.first(ATTEMPT_HEADER).is_some(),
            has_protection_header: head.headers.first(PROTECTION_HEADER).is_some(),
            body_bytes: 0,
            body_open: false,
            inline_only: !fits_a_callout(head.headers),
            rule,
        };
        if end || !request.rule.fingerprint.body {
            return claim(request, hasher.finish(), None, now, effects);
        }
        State::Reading(Box::new(Reading { request, hasher, progress_at: now }))
    }

    fn refuse_too_large(&self, rule: &Rule, effects: &mut Vec<Effect>) -> State {
        let problem = Problem::PayloadTooLarge { limit: rule.max_request_body_bytes };
        self.refuse(problem, Counter::RejectedTooLarge, Some(rule), effects)
    }

    fn on_adopted(&self, state: State, handover: Handover, effects: &mut Vec<Effect>) -> State {
        if !matches!(state, State::Idle) {
            return unexpected(state, effects);
        }
        let Handover { mut held, request_origin, started, protected } = handover;
        held.ran_before = Some(Reason::Redirected);
        // A renewal that is out answers the pass that asked for it.
        held.renewing = false;
        effects.push(Effect::Count(Counter::HandedOver));
        effects.push(Effect::OfferHandover(held.hold.owner));
        State::Forwarded(Box::new(Forwarded { held, request_origin, started, protected, held_back: false }))
    }

    fn on_request_body(
        &self,
        state: State,
        chunk: &[u8],
        end: bool,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        match state {
            State::Claiming(mut claiming) => {
                claiming.request.body_open = !end;
                State::Claiming(claiming)
            }
            State::Waiting(mut waiting) => {
                waiting.request.body_open = !end;
                State::Waiting(waiting)
            }
            State::Forwarded(mut forwarded) => {
                forwarded.held_back &= !end;
                State::Forwarded(forwarded)
            }
            State::Reading(mut reading) => {
                self.worker.note_body_seen();
                let request = &mut reading.request;
                request.body_bytes = request.body_bytes.saturating_add(chunk.len() as u64);
                if request.body_bytes > request.rule.max_request_body_bytes {
                    return self.refuse_too_large(&reading.request.rule, effects);
                }
                reading.hasher.update_body(chunk);
                if end {
                    return claim(reading.request, reading.hasher.finish(), None, now, effects);
                }
                reading.progress_at = now;
                State::Reading(reading)
            }
            State::Idle
            | State::Bypassed
            | State::Responding(_)
            | State::Executing(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Shadow(_)
            | State::Done => state,
        }
    }

    fn on_request_trailers(&self, state: State, now: Timestamp, effects: &mut Vec<Effect>) -> State {
        match state {
            State::Claiming(mut claiming) => {
                claiming.request.body_open = false;
                State::Claiming(claiming)
            }
            State::Waiting(mut waiting) => {
                waiting.request.body_open = false;
                State::Waiting(waiting)
            }
            State::Forwarded(mut forwarded) => {
                forwarded.held_back = false;
                State::Forwarded(forwarded)
            }
            State::Reading(mut reading) => {
                reading.request.inline_only = true;
                claim(reading.request, reading.hasher.finish(), None, now, effects)
            }
            State::Idle
            | State::Bypassed
            | State::Responding(_)
            | State::Executing(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Shadow(_)
            | State::Done => state,
        }
    }

    fn on_store_answered(
        &self,
        state: State,
        answer: StoreAnswer,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        match (state, answer) {
            (State::Claiming(claiming), StoreAnswer::Claim(answer)) => {
                self.on_claim_answered(*claiming, answer, now, effects)
            }
            (State::Forwarded(mut forwarded), StoreAnswer::Renew(answer)) => {
                forwarded.held.on_renewed(&answer, effects);
                State::Forwarded(forwarded)
            }
            (State::Executing(mut executing), StoreAnswer::Renew(answer)) => {
                executing.held().on_renewed(&answer, effects);
                State::Executing(executing)
            }
            (State::Responding(mut responding), StoreAnswer::Renew(answer)) => {
                responding.held.on_renewed(&answer, effects);
                State::Responding(responding)
            }
            (State::Saving(saving), StoreAnswer::Renew(answer)) => saving.on_renewed(&answer, effects),
            (State::Saving(saving), StoreAnswer::End(answer)) => self.on_saved(*saving, answer, effects),
            (state, StoreAnswer::Claim(_) | StoreAnswer::Renew(_) | StoreAnswer::End(_)) => {
                unexpected(state, effects)
            }
        }
    }

    fn on_claim_answered(
        &self,
        claiming: Claiming,
        answer: Result<ClaimReply, StoreError>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Claiming { request, fingerprint, asked_at, closed, wait } = claiming;
        let (key, owner) = (request.key, request.owner);
        let hold = |attempt| Hold { key, owner, fingerprint, attempt };
        if closed {
            // The client left while the store was asked: nothing was forwarded, so nothing may stay claimed.
            let may_be_claimed = match &answer {
                Ok(ClaimReply::Claimed { attempt }) => Some(*attempt),
                Err(StoreError::Unavailable) => Some(1),
                Ok(
                    ClaimReply::InFlight { .. }
                    | ClaimReply::Abandoned { .. }
                    | ClaimReply::Completed { .. }
                    | ClaimReply::Failed { .. },
                )
                | Err(StoreError::Full | StoreError::Unreadable) => None,
            };
            if let Some(attempt) = may_be_claimed {
                effects.push(Effect::Count(Counter::ReleasedNotSent));
                effects.push(Effect::Outbox {
                    hold: hold(attempt),
                    write: Write::Release,
                    rule: request.rule,
                });
            }
            return State::Done;
        }
        let (outcome, problem, counter) = match answer {
            Ok(ClaimReply::Claimed { attempt }) => {
                return self.execute(request, hold(attempt), true, asked_at, now, effects);
            }
            Err(StoreError::Unavailable) if self.worker.config.on_store_error == OnStoreError::Allow => {
                effects.push(Effect::Count(Counter::StoreErrors));
                effects.push(Effect::Count(Counter::Unprotected));
                return self.execute(request, hold(1), false, asked_at, now, effects);
            }
            Ok(
                ClaimReply::InFlight { fingerprint: found, .. }
                | ClaimReply::Abandoned { fingerprint: found }
                | ClaimReply::Completed { fingerprint: found, .. }
                | ClaimReply::Failed { fingerprint: found, .. },
            ) if found != fingerprint => ("mismatch", Problem::Mismatch, Counter::Mismatches),
            Ok(ClaimReply::InFlight { elapsed, remaining, .. }) => {
                let waited = wait.is_some();
                if let Some(wait) = self.wait_on(&request.rule, wait, now) {
                    if !waited {
                        effects.push(Effect::Count(Counter::Waited));
                    }
                    let poll_at = now.after(wait.pause).min(wait.until);
                    return State::Waiting(Box::new(Waiting { request, fingerprint, wait, poll_at }));
                }
                if waited {
                    effects.push(Effect::Count(Counter::WaitTimeouts));
                }
                let usual = self.worker.usual_time(&request.rule);
                let retry_after = retry_after_seconds(usual, elapsed, remaining);
                ("in_flight", Problem::InFlight { retry_after }, Counter::Conflicts)
            }
            Ok(ClaimReply::Abandoned { .. }) => ("abandoned", Problem::Abandoned, Counter::FailedReplies),
            Ok(ClaimReply::Failed { reason, .. }) => {
                ("failed", Problem::Failed { reason }, Counter::FailedReplies)
            }
            Ok(ClaimReply::Completed { response, .. }) => {
                return self.answer_completed(&request, response, effects);
            }
            Err(StoreError::Full) => ("store_full", Problem::StoreFull, Counter::StoreFull),
            Err(StoreError::Unreadable) => {
                effects.push(Effect::Warn(Warning::UnreadableRecord));
                ("store_unreadable", Problem::StoreUnavailable, Counter::StoreErrors)
            }
            Err(StoreError::Unavailable) => {
                let write = Write::Release;
                effects.push(Effect::Outbox { hold: hold(1), write, rule: request.rule.clone() });
                ("store_unavailable", Problem::StoreUnavailable, Counter::StoreErrors)
            }
        };
        effects.push(Effect::Count(counter));
        effects.push(Effect::Publish(line(outcome, &request.rule, 0, &request.key)));
        self.reply_with(problem, effects)
    }

    /// A place to wait in, or the next pause of one that waits; `None` when it is time for the refusal.
    fn wait_on(&self, rule: &Rule, wait: Option<Wait>, now: Timestamp) -> Option<Wait> {
        match wait {
            None if rule.in_flight == InFlight::Wait => Some(Wait {
                until: now.after(rule.wait_timeout),
                pause: FIRST_POLL,
                _place: self.worker.begin_wait()?,
            }),
            None => None,
            Some(wait) if now >= wait.until => None,
            Some(wait) => Some(Wait { pause: wait.pause.saturating_mul(2).min(LONGEST_POLL), ..wait }),
        }
    }

    fn answer_completed(&self, request: &Request, encoded: Vec<u8>, effects: &mut Vec<Effect>) -> State {
        let Ok(stored) = StoredResponse::decode(&encoded) else {
            effects.push(Effect::Warn(Warning::UnreadableRecord));
            effects.push(Effect::Count(Counter::StoreErrors));
            effects.push(Effect::Publish(line("store_unreadable", &request.rule, 0, &request.key)));
            return self.reply_with(Problem::StoreUnavailable, effects);
        };
        let Some(body) = stored.body else {
            let headers =
                stored.headers.iter().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
            let problem = Problem::ResponseNotKept { status: stored.status, headers };
            effects.push(Effect::Count(Counter::NotKeptReplies));
            effects.push(Effect::Publish(line("response_not_kept", &request.rule, 0, &request.key)));
            return self.reply_with(problem, effects);
        };
        let body_at = encoded.len().saturating_sub(body.len());
        let mut reply = replay(&stored, body_at, &request.rule, request.origin.as_deref());
        reply.content = encoded;
        effects.push(Effect::Count(Counter::Replayed));
        effects.push(Effect::Publish(line("replayed", &request.rule, 0, &request.key)));
        self.send(reply, effects)
    }

    fn on_ticked(&self, state: State, now: Timestamp, effects: &mut Vec<Effect>) -> State {
        match state {
            State::Reading(reading) => {
                if now.since(reading.progress_at) < reading.request.rule.body_timeout {
                    return State::Reading(reading);
                }
                if !self.worker.has_seen_body() {
                    effects.push(Effect::Count(Counter::StopIterationMissing));
                    effects.push(Effect::Warn(Warning::StopIterationMissing));
                }
                let rule = reading.request.rule;
                self.refuse(Problem::BodyTimeout, Counter::RejectedBodyTimeout, Some(&rule), effects)
            }
            State::Forwarded(mut forwarded) => {
                forwarded.held.renew_if_due(now, effects);
                State::Forwarded(forwarded)
            }
            State::Executing(mut executing) => {
                executing.on_ticked(now, effects);
                State::Executing(executing)
            }
            State::Responding(responding) => self.on_responding_ticked(responding, now, effects),
            State::Waiting(waiting) if now < waiting.poll_at => State::Waiting(waiting),
            State::Waiting(waiting) => {
                let Waiting { request, fingerprint, wait, .. } = *waiting;
                claim(request, fingerprint, Some(wait), now, effects)
            }
            State::Idle
            | State::Bypassed
            | State::Claiming(_)
            | State::Saving(_)
            | State::Spent
            | State::Replying(_)
            | State::Shadow(_)
            | State::Done => state,
        }
    }

    fn on_stream_closed(
        &self,
        state: State,
        facts: &ClosingFacts<'_>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        match state {
            State::Claiming(mut claiming) => {
                claiming.closed = true;
                State::Claiming(claiming)
            }
            State::Forwarded(forwarded) => {
                let Forwarded { held, request_origin, started, protected, held_back } = *forwarded;
                if held_back {
                    return self.end(held, Outcome::NotSent, None, false, effects);
                }
                let reason = closed_reason(facts, false);
                if reason == Reason::Redirected {
                    effects.push(Effect::HandOver(Handover { held, request_origin, started, protected }));
                    return State::Done;
                }
                self.end(held, Outcome::Failed(reason), None, false, effects)
            }
            State::Responding(responding) => self.on_responding_closed(*responding, facts, now, effects),
            State::Executing(mut executing) => {
                executing.client_waits = false;
                State::Executing(executing)
            }
            State::Saving(mut saving) => {
                saving.delivery.lose_client();
                State::Saving(saving)
            }
            State::Idle
            | State::Bypassed
            | State::Reading(_)
            | State::Waiting(_)
            | State::Replying(_)
            | State::Shadow(_)
            | State::Done => State::Done,
            State::Spent => State::Spent,
        }
    }
}

impl Held {
    /// A lease counts from its asking at the latest.
    fn new(hold: Hold, rule: Rc<Rule>, asked_at: Timestamp) -> Self {
        let renew_at = asked_at.after(rule.lock_ttl / 3);
        Self { hold, rule, renew_at, renewing: false, lost: false, ran_before: None }
    }

    /// Notes that an earlier attempt of the route's retries may have executed.
    fn note_attempts(&mut self, attempts: Option<u64>) {
        if attempts.is_some_and(|attempts| attempts > 1) && !self.rule.trust_route_retries {
            self.ran_before = self.ran_before.or(Some(Reason::Intermediary));
        }
    }

    /// Asks for a renewal when a third of the lease is gone.
    fn renew_if_due(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        if self.renewing || self.lost || now < self.renew_at {
            return;
        }
        self.renewing = true;
        self.renew_at = now.after(self.rule.lock_ttl / 3);
        let write = Write::Renew { lock_ttl: self.rule.lock_ttl, record_ttl: self.rule.record_ttl };
        effects.push(Effect::Store(StoreOp::Renew(self.hold, write)));
    }

    fn on_renewed(&mut self, answer: &Result<WriteReply, StoreError>, effects: &mut Vec<Effect>) {
        self.renewing = false;
        match answer {
            Ok(WriteReply::Applied | WriteReply::AppliedAsTombstone) => {}
            Ok(WriteReply::Stale) => {
                self.lost = true;
                effects.push(Effect::Count(Counter::StaleWrites));
                effects.push(Effect::Warn(Warning::LeaseLost));
            }
            Err(_) => effects.push(Effect::Count(Counter::StoreErrors)),
        }
    }
}

fn claim(
    request: Request,
    fingerprint: Fingerprint,
    wait: Option<Wait>,
    now: Timestamp,
    effects: &mut Vec<Effect>,
) -> State {
    let rule = &request.rule;
    let terms = ClaimTerms {
        owner: request.owner,
        fingerprint,
        lock_ttl: rule.lock_ttl,
        record_ttl: rule.record_ttl,
        on_abandoned: rule.on_abandoned,
    };
    effects.push(Effect::Store(StoreOp::Claim(Claim { key: request.key, terms })));
    State::Claiming(Box::new(Claiming { request, fingerprint, asked_at: now, closed: false, wait }))
}

fn forward(
    request: Request,
    hold: Hold,
    protected: bool,
    asked_at: Timestamp,
    now: Timestamp,
    effects: &mut Vec<Effect>,
) -> State {
    remove_marks(request.has_attempt_header, request.has_protection_header, effects);
    announce(&request.rule, &hold, protected, effects);
    if hold.attempt > 1 {
        effects.push(Effect::SetRequestHeader(ATTEMPT_HEADER, hold.attempt.to_string()));
    }
    if !protected {
        effects.push(Effect::SetRequestHeader(PROTECTION_HEADER, "none".to_owned()));
    }
    effects.push(Effect::OfferHandover(hold.owner));
    State::Forwarded(Box::new(Forwarded {
        held_back: request.body_open,
        held: Held::new(hold, request.rule, asked_at),
        request_origin: request.origin,
        started: now,
        protected,
    }))
}

/// Sends a reply, and keeps the filter's own lines of it.
fn deliver_now(reply: LocalReply, effects: &mut Vec<Effect>) -> Option<HeaderBlock> {
    let own = HeaderBlock::parse(reply.headers.clone()).ok();
    effects.push(Effect::Reply(reply));
    own
}

/// An execution begins under a claim.
fn announce(rule: &Rule, hold: &Hold, protected: bool, effects: &mut Vec<Effect>) {
    if hold.attempt > 1 {
        effects.push(Effect::Count(Counter::Takeovers));
    }
    effects.push(Effect::Count(Counter::Executed));
    effects.push(Effect::ClaimHeld);
    let outcome = if protected { "executing" } else { "unprotected" };
    effects.push(Effect::Publish(line(outcome, rule, hold.attempt, &hold.key)));
}

fn on_shadow_event(
    mut shadow: Box<Shadow>,
    event: Event<'_>,
    now: Timestamp,
    effects: &mut Vec<Effect>,
) -> State {
    match event {
        Event::RequestHead { .. } | Event::Adopted(_) | Event::RouteMisconfigured => {
            effects.push(Effect::Count(Counter::UnexpectedEvents));
        }
        Event::RequestUnreadable => return State::Done,
        Event::RequestBody { chunk, end } => shadow.on_request_body(chunk, end, effects),
        Event::RequestTrailers => shadow.on_request_end(effects),
        Event::StoreAnswered(answer) => shadow.on_store_answered(answer, now, effects),
        Event::ResponseHead { facts, headers, end } => {
            shadow.on_response_head(&facts, headers, end, effects);
        }
        Event::Executed(_) => effects.push(Effect::Count(Counter::UnexpectedEvents)),
        Event::ResponseBody { chunk, skipped, end } => shadow.on_response_body(chunk, skipped, end, effects),
        Event::ResponseTrailers => shadow.on_response_end(true, effects),
        Event::Ticked => shadow.on_ticked(now, effects),
        Event::StreamClosed(facts) => shadow.on_closed(&facts, effects),
    }
    if shadow.is_done() { State::Done } else { State::Shadow(shadow) }
}

/// Only this filter says these things to an upstream. A changed request header makes Envoy pick the route anew, so
/// nothing is touched without need.
fn remove_marks(has_attempt: bool, has_protection: bool, effects: &mut Vec<Effect>) {
    if has_attempt {
        effects.push(Effect::RemoveRequestHeader(ATTEMPT_HEADER));
    }
    if has_protection {
        effects.push(Effect::RemoveRequestHeader(PROTECTION_HEADER));
    }
}

fn unexpected(state: State, effects: &mut Vec<Effect>) -> State {
    effects.push(Effect::Count(Counter::UnexpectedEvents));
    state
}

/// The access log's line: outcome, rule, attempt, the first 8 hex digits of the store key.
fn line(outcome: &str, rule: &Rule, attempt: u32, key: &StoreKey) -> String {
    format!("{outcome} rule={} attempt={attempt} key={}", rule.name, key.short_hex().as_str())
}

/// Whether a callout can carry these lines: they are text, and the host takes as many.
fn fits_a_callout(headers: &HeaderBlock) -> bool {
    headers.iter().all(|(_, value)| std::str::from_utf8(value).is_ok()) && fit_a_reply(headers.iter())
}

fn parse_length(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.trim().parse().ok()
}

/// Carries effects out.
pub trait Io {
    /// Carries out any effect but [`Effect::Store`].
    fn apply(&mut self, effect: Effect);

    /// Asks the store. `None` when the answer comes later.
    fn ask(&mut self, op: StoreOp) -> Option<StoreAnswer>;
}

/// How many answers one event may lead to in a row: a claim, or a renewal and the end that waited for it.
const MAX_ANSWERS: usize = 4;

/// Feeds an event and every answer that comes at once, applies all effects in order, and says what is held.
pub fn drive(exchange: &mut Exchange, event: Event<'_>, now: Timestamp, io: &mut dyn Io) -> Gate {
    let mut step = exchange.handle(event, now);
    for _ in 0..MAX_ANSWERS {
        let mut answer = None;
        for effect in step.effects {
            if let Effect::Store(op) = effect {
                answer = io.ask(op).or(answer);
            } else {
                io.apply(effect);
            }
        }
        let Some(answer) = answer else { return exchange.gate() };
        step = exchange.handle(Event::StoreAnswered(answer), now);
    }
    for effect in step.effects {
        io.apply(effect);
    }
    exchange.gate()
}
