//! An exchange under `mode: shadow`: works out and counts what `enforce` would have done, holds nothing, refuses
//! nothing, and changes nothing that a client or an upstream sees.
//!
//! Its records live under store keys of their own, so that `enforce` never obeys them. They keep no headers and no
//! body: only whether there would have been something to replay. Store errors are counted and otherwise ignored.
//!
//! ```text
//! Hashing ──end of the request──> Asking ──claimed──> Holding ──response ended, or closed──> Ending ──answered──> Done
//!                                   │  └──anything else: counted──> Done
//!                                   └─ the response may end first: its outcome waits for the answer
//! ```

use std::rc::Rc;

use super::effect::{Effect, StoreOp};
use super::event::StoreAnswer;
use super::{Held, parse_length};
use crate::clock::Timestamp;
use crate::config::{MissingKey, Rule};
use crate::fingerprint::{Fingerprint, FingerprintHasher};
use crate::headers::{HeaderBlock, RequestHead};
use crate::key::{StoreKey, parse_key};
use crate::metrics::Counter;
use crate::outcome::{
    ClaimEnd, ClosingFacts, Outcome, ResponseFacts, ResponseSource, TELLTALE_BYTES, claim_end, closed_reason,
    response_source, upstream_outcome,
};
use crate::record::codec::{ResponseEncoder, StoredResponse};
use crate::record::{ClaimTerms, Owner};
use crate::reply::problem::REFUSAL_HEADER;
use crate::scope::resolve_scope;
use crate::store::{Claim, ClaimReply, Hold, StoreError, Write};

#[derive(Debug)]
pub(super) struct Shadow {
    rule: Rc<Rule>,
    owner: Owner,
    key: StoreKey,
    phase: Phase,
    response: Option<Response>,
}

#[derive(Debug)]
enum Phase {
    Hashing {
        hasher: FingerprintHasher,
        received: u64,
    },
    Asking {
        fingerprint: Fingerprint,
        ended: Option<(Outcome, Kept)>,
    },
    Holding(Held),
    /// A renewal is out: one operation per key and owner at a time.
    AfterRenewal(Hold, Write),
    Ending,
    Done,
}

/// What `enforce` would have kept of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kept {
    Nothing,
    Whole(u16),
    Tombstone(u16),
}

#[derive(Debug)]
struct Response {
    status: u16,
    refusal: Option<Vec<u8>>,
    telltale: Vec<u8>,
    received: u64,
    too_large: bool,
}

impl Shadow {
    /// `None` when `enforce` would not have claimed anything.
    pub(super) fn begin(
        rule: Rc<Rule>,
        head: &RequestHead<'_>,
        end: bool,
        owner: Owner,
        effects: &mut Vec<Effect>,
    ) -> Option<Self> {
        let key = match parse_key(head.headers.lines(&rule.header), &rule.key) {
            Ok(Some(key)) => key,
            Ok(None) => {
                if rule.missing_key == MissingKey::Reject {
                    effects.push(Effect::Count(Counter::ShadowRejected));
                }
                return None;
            }
            Err(_) => {
                effects.push(Effect::Count(Counter::ShadowRejected));
                return None;
            }
        };
        let announced = head.headers.first("content-length").and_then(parse_length).unwrap_or(0);
        let (Ok(scope), true) = (resolve_scope(&rule, head), announced <= rule.max_request_body_bytes) else {
            effects.push(Effect::Count(Counter::ShadowRejected));
            return None;
        };
        let hasher = FingerprintHasher::start(&rule, head);
        let whole = end || !rule.fingerprint.body;
        let mut shadow = Self {
            key: StoreKey::under(&rule, &scope, &key),
            rule,
            owner,
            phase: Phase::Hashing { hasher, received: 0 },
            response: None,
        };
        if whole {
            shadow.ask(effects);
        }
        Some(shadow)
    }

    pub(super) const fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    pub(super) const fn wants_request_body(&self) -> bool {
        matches!(self.phase, Phase::Hashing { .. })
    }

    pub(super) const fn wants_response_head(&self) -> bool {
        self.response.is_none() && matches!(self.phase, Phase::Asking { .. } | Phase::Holding(_))
    }

    pub(super) const fn wants_response_body(&self) -> bool {
        self.response.is_some()
    }

    pub(super) fn wants_response_bytes(&self) -> bool {
        self.response.as_ref().is_some_and(|response| response.telltale.len() < TELLTALE_BYTES)
    }

    pub(super) fn on_request_body(&mut self, chunk: &[u8], end: bool, effects: &mut Vec<Effect>) {
        let Phase::Hashing { hasher, received } = &mut self.phase else { return };
        *received = received.saturating_add(chunk.len() as u64);
        if *received > self.rule.max_request_body_bytes {
            effects.push(Effect::Count(Counter::ShadowRejected));
            self.phase = Phase::Done;
            return;
        }
        hasher.update_body(chunk);
        if end {
            self.ask(effects);
        }
    }

    pub(super) fn on_request_end(&mut self, effects: &mut Vec<Effect>) {
        self.ask(effects);
    }

    fn ask(&mut self, effects: &mut Vec<Effect>) {
        let Phase::Hashing { hasher, .. } = std::mem::replace(&mut self.phase, Phase::Done) else { return };
        let fingerprint = hasher.finish();
        let terms = ClaimTerms {
            owner: self.owner,
            fingerprint,
            lock_ttl: self.rule.lock_ttl,
            record_ttl: self.rule.record_ttl,
            on_abandoned: self.rule.on_abandoned,
        };
        self.phase = Phase::Asking { fingerprint, ended: None };
        effects.push(Effect::Store(StoreOp::Claim(Claim { key: self.key, terms })));
    }

    pub(super) fn on_store_answered(
        &mut self,
        answer: StoreAnswer,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        match (std::mem::replace(&mut self.phase, Phase::Done), answer) {
            (Phase::Asking { fingerprint, ended }, StoreAnswer::Claim(answer)) => {
                self.on_claim_answered(fingerprint, ended, answer, now, effects);
            }
            (Phase::Holding(mut held), StoreAnswer::Renew(answer)) => {
                held.on_renewed(&answer, effects);
                self.phase = Phase::Holding(held);
            }
            (Phase::Ending, StoreAnswer::End(answer)) => {
                if answer.is_err() {
                    effects.push(Effect::Count(Counter::StoreErrors));
                }
            }
            (Phase::AfterRenewal(hold, write), StoreAnswer::Renew(_)) => {
                self.phase = Phase::Ending;
                effects.push(Effect::Store(StoreOp::End(hold, write)));
            }
            (
                phase @ (Phase::Hashing { .. }
                | Phase::Asking { .. }
                | Phase::Holding(_)
                | Phase::AfterRenewal(..)
                | Phase::Ending
                | Phase::Done),
                StoreAnswer::Claim(_) | StoreAnswer::Renew(_) | StoreAnswer::End(_),
            ) => {
                effects.push(Effect::Count(Counter::UnexpectedEvents));
                self.phase = phase;
            }
        }
    }

    fn on_claim_answered(
        &mut self,
        fingerprint: Fingerprint,
        ended: Option<(Outcome, Kept)>,
        answer: Result<ClaimReply, StoreError>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        let counter = match answer {
            Ok(ClaimReply::Claimed { attempt }) => {
                effects.push(Effect::Count(Counter::ShadowExecuted));
                let hold = Hold { key: self.key, owner: self.owner, fingerprint, attempt };
                let renew_at = now.after(self.rule.lock_ttl / 3);
                let held = Held {
                    hold,
                    rule: Rc::clone(&self.rule),
                    renew_at,
                    renewing: false,
                    lost: false,
                    ran_before: None,
                };
                self.phase = Phase::Holding(held);
                if let Some((outcome, kept)) = ended {
                    self.end(outcome, kept, effects);
                }
                return;
            }
            Ok(
                ClaimReply::InFlight { fingerprint: found, .. }
                | ClaimReply::Abandoned { fingerprint: found }
                | ClaimReply::Completed { fingerprint: found, .. }
                | ClaimReply::Failed { fingerprint: found, .. },
            ) if found != fingerprint => Counter::ShadowMismatches,
            Ok(ClaimReply::InFlight { .. }) => Counter::ShadowConflicts,
            Ok(ClaimReply::Abandoned { .. } | ClaimReply::Failed { .. }) => Counter::ShadowFailedReplies,
            Ok(ClaimReply::Completed { response, .. }) => match StoredResponse::decode(&response) {
                Ok(stored) if stored.body.is_some() => Counter::ShadowReplayed,
                Ok(_) => Counter::ShadowNotKeptReplies,
                Err(_) => Counter::StoreErrors,
            },
            Err(_) => Counter::StoreErrors,
        };
        effects.push(Effect::Count(counter));
    }

    pub(super) fn on_response_head(
        &mut self,
        facts: &ResponseFacts<'_>,
        headers: Option<&HeaderBlock>,
        end: bool,
        effects: &mut Vec<Effect>,
    ) {
        match response_source(facts, self.rule.trust_route_retries) {
            ResponseSource::Upstream => {}
            ResponseSource::NotSent => return self.end(Outcome::NotSent, Kept::Nothing, effects),
            ResponseSource::Failed(reason) => {
                return self.end(Outcome::Failed(reason), Kept::Nothing, effects);
            }
        }
        let streamed = headers
            .and_then(|headers| headers.first("content-type"))
            .is_some_and(|value| value.starts_with(b"text/event-stream"));
        self.response = Some(Response {
            status: facts.status,
            refusal: headers.and_then(|headers| headers.first(REFUSAL_HEADER)).map(<[u8]>::to_vec),
            telltale: Vec::new(),
            received: 0,
            too_large: streamed,
        });
        if end {
            self.on_response_end(false, effects);
        }
    }

    pub(super) fn on_response_body(
        &mut self,
        chunk: &[u8],
        skipped: usize,
        end: bool,
        effects: &mut Vec<Effect>,
    ) {
        let Some(response) = &mut self.response else { return };
        let arrived = chunk.len().saturating_add(skipped) as u64;
        response.received = response.received.saturating_add(arrived);
        response.too_large |= response.received > self.rule.max_response_body_bytes;
        let room = TELLTALE_BYTES.saturating_sub(response.telltale.len());
        response.telltale.extend(chunk.iter().take(room));
        if end {
            self.on_response_end(false, effects);
        }
    }

    pub(super) fn on_response_end(&mut self, trailers: bool, effects: &mut Vec<Effect>) {
        let Some(response) = self.response.take() else { return };
        let outcome =
            upstream_outcome(&self.rule, response.status, response.refusal.as_deref(), &response.telltale);
        let kept = if trailers || response.too_large {
            Kept::Tombstone(response.status)
        } else {
            Kept::Whole(response.status)
        };
        self.end(outcome, kept, effects);
    }

    pub(super) fn on_closed(&mut self, facts: &ClosingFacts<'_>, effects: &mut Vec<Effect>) {
        let started = self.response.take().is_some();
        match &self.phase {
            Phase::Hashing { .. } => self.phase = Phase::Done,
            Phase::Asking { ended: None, .. } | Phase::Holding(_) => {
                self.end(Outcome::Failed(closed_reason(facts, started)), Kept::Nothing, effects);
            }
            Phase::Asking { ended: Some(_), .. } | Phase::AfterRenewal(..) | Phase::Ending | Phase::Done => {}
        }
    }

    pub(super) fn on_ticked(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        if let Phase::Holding(held) = &mut self.phase {
            held.renew_if_due(now, effects);
        }
    }

    fn end(&mut self, outcome: Outcome, kept: Kept, effects: &mut Vec<Effect>) {
        match std::mem::replace(&mut self.phase, Phase::Ending) {
            Phase::Asking { fingerprint, .. } => {
                self.phase = Phase::Asking { fingerprint, ended: Some((outcome, kept)) };
            }
            Phase::Holding(held) => {
                let write = match claim_end(&self.rule, outcome) {
                    ClaimEnd::Complete => {
                        Write::Complete { response: encode(kept), record_ttl: self.rule.record_ttl }
                    }
                    ClaimEnd::Fail(reason) => Write::Fail { reason, failed_ttl: self.rule.failed_ttl },
                    ClaimEnd::Release(_) => Write::Release,
                };
                if held.renewing {
                    self.phase = Phase::AfterRenewal(held.hold, write);
                } else {
                    effects.push(Effect::Store(StoreOp::End(held.hold, write)));
                }
            }
            phase @ (Phase::Hashing { .. } | Phase::AfterRenewal(..) | Phase::Ending | Phase::Done) => {
                self.phase = phase;
            }
        }
    }
}

fn encode(kept: Kept) -> Rc<[u8]> {
    let none: [(&[u8], &[u8]); 0] = [];
    let bytes = match kept {
        Kept::Whole(status) => ResponseEncoder::begin(status, none, None).map(ResponseEncoder::finish),
        Kept::Tombstone(status) => ResponseEncoder::tombstone(status, none),
        Kept::Nothing => None,
    };
    Rc::from(bytes.unwrap_or_default())
}
