//! The response side of an exchange: who made the response, what of it is kept, and how the claim ends.

use std::rc::Rc;

use super::budget::Reservation;
use super::{Effect, Exchange, Forwarded, Gate, Held, State, StoreOp, line, parse_length, unexpected};
use crate::clock::Timestamp;
use crate::config::{Commit, Rule, StatusMeaning};
use crate::headers::HeaderBlock;
use crate::metrics::Counter;
use crate::outcome::{
    ClaimEnd, ClosingFacts, Outcome, ResponseFacts, ResponseSource, TELLTALE_BYTES, claim_end, closed_reason,
    may_be_intermediary, may_become_intermediary, response_source, upstream_outcome,
};
use crate::record::Reason;
use crate::record::codec::ResponseEncoder;
use crate::reply::problem::REFUSAL_HEADER;
use crate::reply::replay::{
    PROTECTION_HEADER, has_cors, is_kept_by_tombstones, kept_headers, tombstone_headers,
};
use crate::reply::{LocalReply, fit_a_reply, put_right};
use crate::store::{Hold, StoreError, Write, WriteReply};

/// How long the last frame waits for the end that must follow it.
const LAST_FRAME_HELD: std::time::Duration = std::time::Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Responding {
    pub(super) held: Held,
    started: Timestamp,
    status: u16,
    refusal: Option<Vec<u8>>,
    /// Nothing of the body was seen yet, and its head may be an Envoy's behind this one.
    head_undecided: bool,
    capture: Capture,
    announced: Option<u64>,
    received: u64,
    last_frame: LastFrame,
}

/// The frame that completes the announced length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LastFrame {
    Expected,
    Held(Timestamp),
    LetGo,
}

#[derive(Debug)]
enum Capture {
    /// Kept as it arrives.
    Keeping { encoder: ResponseEncoder, reservation: Reservation },
    /// A tombstone's encoding.
    Tombstone(Vec<u8>),
    /// Only the beginning, to tell who answered.
    Telltale(Vec<u8>),
}

/// The write that ends the claim is out, or waits for a renewal's answer.
#[derive(Debug)]
pub(super) struct Saving {
    hold: Hold,
    rule: Rc<Rule>,
    write: Write,
    waits_for_renewal: bool,
    pub(super) delivery: Delivery,
    /// Bytes of a detached execution's request and answer.
    pub(super) room: Option<Reservation>,
}

/// How the client gets the answer whose record is being written.
#[derive(Debug)]
pub(super) enum Delivery {
    /// Envoy passes it on; its end waits for the record, or not.
    Stream { holds_response: bool },
    /// The filter sends it once the record is written.
    After(LocalReply),
    /// The filter sent it: its own lines, until Envoy has made a head of them.
    Before(Option<HeaderBlock>),
    /// The client is gone.
    Nobody,
}

impl Delivery {
    pub(super) const fn gate(&self) -> Gate {
        match self {
            Self::Stream { holds_response: true } => Gate::HoldResponse,
            Self::Stream { holds_response: false } => Gate::Pass,
            // What was executed detached never goes on by itself.
            Self::After(_) | Self::Before(_) | Self::Nobody => Gate::HoldRequest,
        }
    }

    pub(super) const fn wants_response_head(&self) -> bool {
        matches!(self, Self::After(_) | Self::Before(Some(_)))
    }

    pub(super) fn lose_client(&mut self) {
        *self = match self {
            Self::Stream { .. } => Self::Stream { holds_response: false },
            Self::After(_) | Self::Before(_) | Self::Nobody => Self::Nobody,
        };
    }
}

impl Responding {
    pub(super) const fn holding(&self) -> bool {
        matches!(self.last_frame, LastFrame::Held(_))
    }

    pub(super) fn wants_bytes(&self) -> bool {
        match &self.capture {
            Capture::Keeping { .. } => true,
            Capture::Tombstone(_) => false,
            Capture::Telltale(bytes) => bytes.len() < TELLTALE_BYTES,
        }
    }

    /// Whether what was seen so far leaves open that an Envoy behind this one answered for a lost request.
    fn is_undecided(&self) -> bool {
        let begun = self.telltale();
        self.head_undecided || (!begun.is_empty() && may_become_intermediary(begun))
    }

    fn telltale(&self) -> &[u8] {
        match &self.capture {
            Capture::Keeping { encoder, .. } => encoder.body(),
            Capture::Tombstone(_) => &[],
            Capture::Telltale(bytes) => bytes,
        }
    }
}

impl Exchange {
    pub(super) fn on_response_head(
        &self,
        state: State,
        facts: &ResponseFacts<'_>,
        headers: Option<&HeaderBlock>,
        end: bool,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        match state {
            State::Forwarded(forwarded) => {
                self.on_forwarded_head(*forwarded, facts, headers, end, now, effects)
            }
            State::Replying(own) => {
                replace_head(own, headers, effects);
                State::Replying(None)
            }
            // Another filter's or Envoy's own reply before anything was claimed.
            State::Reading(_) | State::Waiting(_) => State::Done,
            State::Claiming(mut claiming) => {
                claiming.closed = true;
                State::Claiming(claiming)
            }
            State::Executing(mut executing) => {
                executing.client_waits = false;
                State::Executing(executing)
            }
            State::Saving(mut saving) => {
                saving.on_response_head(headers, effects);
                State::Saving(saving)
            }
            State::Responding(_) => unexpected(state, effects),
            State::Idle | State::Bypassed | State::Shadow(_) | State::Spent | State::Done => state,
        }
    }

    fn on_forwarded_head(
        &self,
        forwarded: Forwarded,
        facts: &ResponseFacts<'_>,
        headers: Option<&HeaderBlock>,
        end: bool,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Forwarded { mut held, request_origin, started, protected, .. } = forwarded;
        held.note_attempts(facts.attempts);
        if !protected {
            effects.push(Effect::SetResponseHeader(PROTECTION_HEADER, b"none".to_vec()));
        }
        match response_source(facts, held.rule.trust_route_retries) {
            ResponseSource::Upstream => {}
            ResponseSource::NotSent => return self.end(held, Outcome::NotSent, None, true, effects),
            ResponseSource::Failed(reason) => {
                return self.end(held, Outcome::Failed(reason), None, true, effects);
            }
        }
        let first = |name| headers.and_then(|headers| headers.first(name));
        // A response without a body may still announce the length that another one would have (304, RFC 9110
        // section 8.6).
        let announced = first("content-length").filter(|_| !end).and_then(parse_length);
        let capture =
            self.start_capture(&held.rule, facts.status, headers, announced, request_origin.as_deref());
        let responding = Responding {
            held,
            started,
            status: facts.status,
            refusal: first(REFUSAL_HEADER).map(<[u8]>::to_vec),
            head_undecided: !end
                && announced != Some(0)
                && may_be_intermediary(first("server"), first("content-type")),
            capture,
            announced,
            received: 0,
            last_frame: LastFrame::Expected,
        };
        if end { self.finish(responding, now, effects) } else { State::Responding(Box::new(responding)) }
    }

    fn start_capture(
        &self,
        rule: &Rule,
        status: u16,
        headers: Option<&HeaderBlock>,
        announced: Option<u64>,
        request_origin: Option<&[u8]>,
    ) -> Capture {
        if rule.statuses.meaning(status) != StatusMeaning::Replay {
            return Capture::Telltale(Vec::new());
        }
        let Some(headers) = headers else {
            return Capture::Tombstone(ResponseEncoder::tombstone(status, []).unwrap_or_default());
        };
        let streamed = headers.first("content-type").is_some_and(is_event_stream);
        let too_large = announced.is_some_and(|length| length > rule.max_response_body_bytes)
            || !fit_a_reply(kept_headers(headers, rule));
        if streamed || too_large {
            return tombstone(status, headers, rule);
        }
        let origin = request_origin.filter(|_| has_cors(headers));
        let Some(encoder) = ResponseEncoder::begin(status, kept_headers(headers, rule), origin) else {
            return tombstone(status, headers, rule);
        };
        let Some(reservation) = self.worker.captured.reserve(encoder.held_bytes() as u64) else {
            return tombstone(status, headers, rule);
        };
        Capture::Keeping { encoder, reservation }
    }

    pub(super) fn on_response_body(
        &self,
        state: State,
        chunk: &[u8],
        skipped: usize,
        end: bool,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let State::Responding(mut responding) = state else { return state };
        let arrived = chunk.len().saturating_add(skipped) as u64;
        responding.received = responding.received.saturating_add(arrived);
        let limit = responding.held.rule.max_response_body_bytes;
        let too_large = responding.received > limit;
        if !chunk.is_empty() {
            responding.head_undecided = false;
        }
        match &mut responding.capture {
            Capture::Keeping { encoder, reservation } => {
                if too_large || skipped > 0 || !reservation.grow(chunk.len() as u64) {
                    responding.capture = tombstone_of(encoder);
                } else {
                    encoder.push(chunk);
                }
            }
            Capture::Tombstone(_) => {}
            Capture::Telltale(bytes) => {
                let room = TELLTALE_BYTES.saturating_sub(bytes.len());
                bytes.extend(chunk.iter().take(room));
            }
        }
        if end {
            return self.finish(*responding, now, effects);
        }
        // The client could see the whole response with this frame: it waits for the end, which says whether
        // trailers follow.
        if responding.announced == Some(responding.received)
            && responding.held.rule.commit == Commit::BeforeResponseEnd
            && responding.last_frame == LastFrame::Expected
        {
            responding.last_frame = LastFrame::Held(now);
        }
        State::Responding(responding)
    }

    pub(super) fn on_response_trailers(
        &self,
        state: State,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let State::Responding(mut responding) = state else { return state };
        if let Capture::Keeping { encoder, .. } = &mut responding.capture {
            responding.capture = tombstone_of(encoder);
        }
        self.finish(*responding, now, effects)
    }

    pub(super) fn on_responding_ticked(
        &self,
        mut responding: Box<Responding>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        if let LastFrame::Held(since) = responding.last_frame
            && now.since(since) >= LAST_FRAME_HELD
        {
            responding.last_frame = LastFrame::LetGo;
        }
        responding.held.renew_if_due(now, effects);
        State::Responding(responding)
    }

    pub(super) fn on_responding_closed(
        &self,
        responding: Responding,
        facts: &ClosingFacts<'_>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let meaning = responding.held.rule.statuses.meaning(responding.status);
        if responding.announced == Some(responding.received) && responding.received > 0 {
            // Every byte was there: what happened after that does not change it.
            return self.finish(responding, now, effects);
        }
        // A status that is replayed is no Envoy's answer for a lost request.
        if meaning != StatusMeaning::Replay && responding.is_undecided() {
            let outcome = Outcome::Failed(Reason::Intermediary);
            return self.end(responding.held, outcome, None, false, effects);
        }
        match meaning {
            // The status froze the outcome.
            StatusMeaning::Release => self.finish(responding, now, effects),
            StatusMeaning::Failure => {
                let outcome = Outcome::Failed(closed_reason(facts, true));
                self.end(responding.held, outcome, None, false, effects)
            }
            StatusMeaning::Replay => {
                let outcome = match upstream_outcome(
                    &responding.held.rule,
                    responding.status,
                    responding.refusal.as_deref(),
                    &[],
                ) {
                    Outcome::Completed => Outcome::Failed(closed_reason(facts, true)),
                    frozen @ (Outcome::NotProcessed | Outcome::NotSent | Outcome::Failed(_)) => frozen,
                };
                self.end(responding.held, outcome, None, false, effects)
            }
        }
    }

    /// The upstream's response ended: its outcome is frozen.
    fn finish(&self, responding: Responding, now: Timestamp, effects: &mut Vec<Effect>) -> State {
        self.worker.learn_time(&responding.held.rule, now.since(responding.started));
        let outcome = upstream_outcome(
            &responding.held.rule,
            responding.status,
            responding.refusal.as_deref(),
            responding.telltale(),
        );
        let response = match responding.capture {
            Capture::Keeping { encoder, .. }
                if responding.announced.is_none_or(|length| length == responding.received) =>
            {
                Some(encoder.finish())
            }
            // The length disagrees with what was delivered: what was captured may not be what was sent.
            Capture::Keeping { encoder, .. } => match tombstone_of(&encoder) {
                Capture::Tombstone(bytes) => Some(bytes),
                Capture::Keeping { .. } | Capture::Telltale(_) => None,
            },
            Capture::Tombstone(bytes) => Some(bytes),
            Capture::Telltale(_) => None,
        };
        self.end(responding.held, outcome, response, true, effects)
    }

    /// Ends the claim as the outcome and the rule say. `holdable`: there is a response whose end can wait for it.
    pub(super) fn end(
        &self,
        held: Held,
        outcome: Outcome,
        response: Option<Vec<u8>>,
        holdable: bool,
        effects: &mut Vec<Effect>,
    ) -> State {
        let holds_response = holdable && held.rule.commit == Commit::BeforeResponseEnd;
        let mut saving = Self::begin_end(held, outcome, response, effects);
        saving.delivery = Delivery::Stream { holds_response };
        State::Saving(Box::new(saving))
    }

    /// Asks the store for what the outcome and the rule say.
    pub(super) fn begin_end(
        held: Held,
        outcome: Outcome,
        response: Option<Vec<u8>>,
        effects: &mut Vec<Effect>,
    ) -> Saving {
        let Held { hold, rule, renewing, ran_before, .. } = held;
        let outcome = match (outcome, ran_before) {
            // True of the last pass or attempt only: giving the claim back would run the first again.
            (Outcome::NotSent | Outcome::NotProcessed, Some(reason)) => Outcome::Failed(reason),
            (
                Outcome::Completed | Outcome::NotSent | Outcome::NotProcessed | Outcome::Failed(_),
                None | Some(_),
            ) => outcome,
        };
        let (write, word) = match claim_end(&rule, outcome) {
            ClaimEnd::Complete => {
                let response = response.unwrap_or_default();
                if is_tombstone(&response) {
                    effects.push(Effect::Count(Counter::Tombstones));
                }
                let write = Write::Complete { response: Rc::from(response), record_ttl: rule.record_ttl };
                (write, "executed".to_owned())
            }
            ClaimEnd::Fail(reason) => {
                effects.push(Effect::Count(Counter::retained(reason)));
                (Write::Fail { reason, failed_ttl: rule.failed_ttl }, format!("failed.{}", reason.as_str()))
            }
            ClaimEnd::Release(released) => {
                let counter = Counter::released(released);
                effects.push(Effect::Count(counter));
                (Write::Release, counter.name().to_owned())
            }
        };
        effects.push(Effect::Publish(line(&word, &rule, hold.attempt, &hold.key)));
        if !renewing {
            effects.push(Effect::Store(StoreOp::End(hold, write.clone())));
        }
        Saving { hold, rule, write, waits_for_renewal: renewing, delivery: Delivery::Nobody, room: None }
    }
}

impl Saving {
    pub(super) fn on_renewed(
        mut self: Box<Self>,
        _answer: &Result<WriteReply, StoreError>,
        effects: &mut Vec<Effect>,
    ) -> State {
        if !self.waits_for_renewal {
            return unexpected(State::Saving(self), effects);
        }
        // Stale or lost, the end is fenced by its owner all the same, and says so itself.
        self.waits_for_renewal = false;
        effects.push(Effect::Store(StoreOp::End(self.hold, self.write.clone())));
        State::Saving(self)
    }

    fn on_response_head(&mut self, headers: Option<&HeaderBlock>, effects: &mut Vec<Effect>) {
        match &mut self.delivery {
            Delivery::Stream { .. } => effects.push(Effect::Count(Counter::UnexpectedEvents)),
            Delivery::Before(own) => replace_head(own.take(), headers, effects),
            // Envoy's own reply: the client is answered.
            Delivery::After(_) | Delivery::Nobody => self.delivery.lose_client(),
        }
    }
}

impl Exchange {
    pub(super) fn on_saved(
        &self,
        saving: Saving,
        answer: Result<WriteReply, StoreError>,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Saving { hold, rule, write, delivery, room: _room, .. } = saving;
        match answer {
            Ok(WriteReply::Applied) => {}
            Ok(WriteReply::AppliedAsTombstone) => effects.push(Effect::Count(Counter::Tombstones)),
            Ok(WriteReply::Stale) => effects.push(Effect::Count(Counter::StaleWrites)),
            Err(_) => {
                effects.push(Effect::Count(Counter::StoreErrors));
                effects.push(Effect::Outbox { hold, write, rule });
            }
        }
        effects.push(Effect::ClaimEnded);
        match delivery {
            Delivery::Stream { .. } => State::Done,
            Delivery::After(reply) => self.send(reply, effects),
            Delivery::Before(own) => State::Replying(own),
            Delivery::Nobody => State::Spent,
        }
    }

    /// What is kept of a response that is there as a whole: without its body where that is not, or must not be.
    pub(super) fn keep_whole(
        &self,
        rule: &Rule,
        status: u16,
        headers: &HeaderBlock,
        body: Option<&[u8]>,
        request_origin: Option<&[u8]>,
    ) -> Option<Vec<u8>> {
        let announced = headers
            .first("content-length")
            .filter(|_| body.is_none_or(|body| !body.is_empty()))
            .and_then(parse_length);
        match (self.start_capture(rule, status, Some(headers), announced, request_origin), body) {
            (Capture::Telltale(_), _) => None,
            (Capture::Tombstone(bytes), _) => Some(bytes),
            (Capture::Keeping { mut encoder, .. }, Some(body))
                if body.len() as u64 <= rule.max_response_body_bytes
                    && announced.is_none_or(|length| length == body.len() as u64) =>
            {
                encoder.push(body);
                Some(encoder.finish())
            }
            (Capture::Keeping { encoder, .. }, _) => Some(encoder.to_tombstone(is_kept_by_tombstones)),
        }
    }
}

/// Puts the filter's own lines right in the head that Envoy made of them.
fn replace_head(own: Option<HeaderBlock>, made: Option<&HeaderBlock>, effects: &mut Vec<Effect>) {
    let head = own.zip(made).and_then(|(own, made)| put_right(&own, made));
    effects.extend(head.map(Effect::ReplaceResponseHead));
}

fn tombstone(status: u16, headers: &HeaderBlock, rule: &Rule) -> Capture {
    let fit = fit_a_reply(tombstone_headers(headers, rule));
    let lines = tombstone_headers(headers, rule).filter(|_| fit);
    Capture::Tombstone(ResponseEncoder::tombstone(status, lines).unwrap_or_default())
}

fn is_event_stream(content_type: &[u8]) -> bool {
    const EVENT_STREAM: &[u8] = b"text/event-stream";
    content_type.get(..EVENT_STREAM.len()).is_some_and(|start| start.eq_ignore_ascii_case(EVENT_STREAM))
}

fn tombstone_of(encoder: &ResponseEncoder) -> Capture {
    Capture::Tombstone(encoder.to_tombstone(is_kept_by_tombstones))
}

fn is_tombstone(encoded: &[u8]) -> bool {
    crate::record::codec::StoredResponse::decode(encoded).is_ok_and(|stored| stored.body.is_none())
}
