//! Detached execution: the filter sends the claimed request itself, so that it runs to its end whether or not the
//! client stays.
//!
//! The request goes to the execution listener, an internal listener of the same Envoy with the same routes. What that
//! listener knows of the answer comes as header lines ([`DETAILS_HEADER`] and the others), which it adds and this
//! module removes; an answer without them was made on the way there.

use std::time::Duration;

use super::budget::Reservation;
use super::response::Delivery;
use super::{ATTEMPT_HEADER, Effect, Exchange, Held, Request, State, announce, deliver_now, forward, line};
use crate::clock::Timestamp;
use crate::config::{Commit, Execution};
use crate::exchange::Warning;
use crate::headers::HeaderBlock;
use crate::metrics::Counter;
use crate::outcome::{
    ExecutionFacts, Outcome, ResponseSource, TELLTALE_BYTES, execution_source, upstream_outcome,
};
use crate::record::Reason;
use crate::reply::problem::{Problem, REFUSAL_HEADER};
use crate::reply::replay::{HopByHop, PROTECTION_HEADER, is_execution_report, is_kept_by_tombstones};
use crate::reply::{LocalReply, fit_a_reply};
use crate::store::{Hold, Write};

/// `%RESPONSE_CODE_DETAILS%` of the execution listener.
pub const DETAILS_HEADER: &str = "x-idempotency-execution-details";
/// Its `%UPSTREAM_REQUEST_ATTEMPT_COUNT%`.
pub const ATTEMPTS_HEADER: &str = "x-idempotency-execution-attempts";
/// Its `%REQ(x-envoy-original-url)%`: given when it followed an internal redirect.
pub const REDIRECTED_HEADER: &str = "x-idempotency-execution-redirected";

/// How much earlier than asked for a callout's time-out may come.
const TIMER_SLACK: Duration = Duration::from_millis(50);

/// What an execution takes at least of the worker's memory, in bytes: its header lines, its state.
pub const LEAST_ROOM: u64 = 1024;

/// Names that are not sent to the execution listener: what only this filter says, and what would tell Envoy's routers
/// how to retry or how long to wait. The router of the callout itself obeys these, too.
const NOT_SENT: [&[u8]; 23] = [
    DETAILS_HEADER.as_bytes(),
    ATTEMPTS_HEADER.as_bytes(),
    REDIRECTED_HEADER.as_bytes(),
    b"x-idempotency-attempt",
    b"idempotency-protection",
    b"content-length",
    b"expect",
    b"x-envoy-attempt-count",
    b"x-envoy-expected-rq-timeout-ms",
    b"x-envoy-hedge-on-per-try-timeout",
    b"x-envoy-internal",
    b"x-envoy-is-timeout-retry",
    b"x-envoy-max-retries",
    b"x-envoy-original-url",
    b"x-envoy-retriable-header-names",
    b"x-envoy-retriable-status-codes",
    b"x-envoy-retry-grpc-on",
    b"x-envoy-retry-on",
    b"x-envoy-upstream-alt-stat-name",
    b"x-envoy-upstream-rq-per-try-timeout-ms",
    b"x-envoy-upstream-rq-timeout-alt-response",
    b"x-envoy-upstream-rq-timeout-ms",
    b"x-envoy-upstream-stream-duration-ms",
];

/// How a detached execution ended, as its callout tells.
#[derive(Debug)]
pub enum ExecutionAnswer<'a> {
    /// It never left.
    NotDispatched(NotDispatched),
    /// No answer, or one that was cut off.
    Unanswered,
    /// A whole answer.
    Answered {
        /// Its head.
        headers: &'a HeaderBlock,
        /// Its body; `None` when there was no room for it, or the host could not give it.
        body: Option<Vec<u8>>,
        /// Trailers followed.
        has_trailers: bool,
    },
}

/// Why an execution never left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotDispatched {
    /// The held request could not be read.
    Unreadable,
    /// `execute_cluster` names no cluster.
    UnknownCluster,
    /// The cluster has nobody to send to.
    NobodyListens,
    /// The filter is on its way out.
    RootGone,
}

/// A claimed request on its way by itself.
#[derive(Debug)]
pub(super) struct Executing {
    held: Held,
    request_origin: Option<Vec<u8>>,
    started: Timestamp,
    /// The upstream has no more time than this.
    until: Timestamp,
    protected: bool,
    /// Nobody else answered the client, and it is still there.
    pub(super) client_waits: bool,
    room: Reservation,
}

impl Executing {
    pub(super) const fn held(&mut self) -> &mut Held {
        &mut self.held
    }

    /// Renews the lease while the upstream may still work; whatever hangs longer is not kept alive.
    pub(super) fn on_ticked(&mut self, now: Timestamp, effects: &mut Vec<Effect>) {
        if now < self.until {
            self.held.renew_if_due(now, effects);
        }
    }

    /// Takes room for an answer's body of `bytes`.
    pub(super) fn make_room(&mut self, bytes: u64) -> bool {
        let granted = self.held.rule.max_response_body_bytes;
        self.room.grow(bytes.saturating_sub(granted))
    }
}

impl Exchange {
    /// Runs a request whose claim is held.
    pub(super) fn execute(
        &self,
        request: Request,
        hold: Hold,
        protected: bool,
        asked_at: Timestamp,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Execution::Detached { timeout } = request.rule.execution else {
            return forward(request, hold, protected, asked_at, now, effects);
        };
        if request.inline_only {
            effects.push(Effect::Count(Counter::DetachedInline));
            return forward(request, hold, protected, asked_at, now, effects);
        }
        let bytes = request.body_bytes.saturating_add(request.rule.max_response_body_bytes).max(LEAST_ROOM);
        let Some(room) = self.worker.detached.reserve(bytes) else {
            effects.push(Effect::Outbox { hold, write: Write::Release, rule: request.rule.clone() });
            effects.push(Effect::Count(Counter::ReleasedNotSent));
            effects.push(Effect::Count(Counter::ExecutionUnavailable));
            effects.push(Effect::Warn(Warning::NoRoomToExecute));
            effects.push(Effect::Publish(line("execution_unavailable", &request.rule, 0, &request.key)));
            return self.reply_with(Problem::ExecutionUnavailable, effects);
        };
        announce(&request.rule, &hold, protected, effects);
        effects.push(Effect::Count(Counter::Detached));
        effects.push(Effect::Execute {
            timeout,
            attempt: hold.attempt,
            protected,
            body_bytes: request.body_bytes,
        });
        State::Executing(Box::new(Executing {
            request_origin: request.origin,
            held: Held::new(hold, request.rule, asked_at),
            started: now,
            until: now.after(timeout),
            protected,
            client_waits: true,
            room,
        }))
    }

    pub(super) fn on_executed(
        &self,
        executing: Executing,
        answer: ExecutionAnswer<'_>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) -> State {
        let Executing { mut held, request_origin, started, until, protected, client_waits, room } = executing;
        if !client_waits {
            effects.push(Effect::Count(Counter::FinishedWithoutClient));
        }
        let (outcome, response, reply) = match answer {
            ExecutionAnswer::NotDispatched(why) => {
                effects.push(Effect::Warn(Warning::of(why)));
                effects.push(Effect::Count(Counter::ExecutionUnavailable));
                (Outcome::NotSent, None, self.problem(Problem::ExecutionUnavailable))
            }
            ExecutionAnswer::Unanswered => {
                // Envoy's timers count from the beginning of a round of its loop: they may end a little early.
                let reason = if until.since(now) > TIMER_SLACK { Reason::Reset } else { Reason::Timeout };
                (Outcome::Failed(reason), None, self.problem(Problem::NoAnswer { reason }))
            }
            ExecutionAnswer::Answered { headers, body, has_trailers } => {
                self.worker.learn_time(&held.rule, now.since(started));
                let (outcome, response) = self.judge(
                    &mut held,
                    headers,
                    body.as_deref(),
                    has_trailers,
                    request_origin.as_deref(),
                    effects,
                );
                let on_the_way = headers.first(DETAILS_HEADER).is_none();
                let reply = match outcome {
                    Outcome::NotSent if on_the_way || is_refused_by_a_hop(headers) || body.is_none() => {
                        effects.push(Effect::Count(Counter::ExecutionUnavailable));
                        self.problem(Problem::ExecutionUnavailable)
                    }
                    // Envoy gave the callout up: it made the answer.
                    Outcome::Failed(reason @ (Reason::Timeout | Reason::Reset)) if on_the_way => {
                        self.problem(Problem::NoAnswer { reason })
                    }
                    Outcome::Completed | Outcome::NotProcessed | Outcome::NotSent | Outcome::Failed(_) => {
                        body.and_then(|body| deliver(headers, body, protected)).unwrap_or_else(|| {
                            let kept = headers.iter().filter(|(name, _)| is_kept_by_tombstones(name));
                            let kept = kept.map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
                            self.problem(Problem::ResponseNotKept {
                                status: status_of(headers),
                                headers: kept,
                            })
                        })
                    }
                };
                (outcome, response, reply)
            }
        };
        let waits = held.rule.commit == Commit::BeforeResponseEnd;
        let mut saving = Self::begin_end(held, outcome, response, effects);
        // What was read stays in memory until the store has it.
        saving.room = Some(room);
        saving.delivery = if !client_waits {
            Delivery::Nobody
        } else if waits {
            Delivery::After(reply)
        } else {
            Delivery::Before(deliver_now(reply, effects))
        };
        State::Saving(Box::new(saving))
    }

    /// What a whole answer means, and what of it is kept.
    fn judge(
        &self,
        held: &mut Held,
        headers: &HeaderBlock,
        body: Option<&[u8]>,
        has_trailers: bool,
        request_origin: Option<&[u8]>,
        effects: &mut Vec<Effect>,
    ) -> (Outcome, Option<Vec<u8>>) {
        let status = status_of(headers);
        let known = |name| headers.first(name).filter(|value| !matches!(*value, b"" | b"-"));
        let facts = ExecutionFacts {
            code_details: known(DETAILS_HEADER),
            // What the listener does not tell is no proof of anything.
            attempts: known(DETAILS_HEADER).map(|_| {
                known(ATTEMPTS_HEADER)
                    .and_then(|value| std::str::from_utf8(value).ok())
                    .and_then(|value| value.parse().ok())
                    .unwrap_or(u64::MAX)
            }),
            status,
            body: body.unwrap_or_default(),
        };
        held.note_attempts(facts.attempts);
        if known(REDIRECTED_HEADER).is_some() {
            held.ran_before = Some(Reason::Redirected);
        }
        let source = execution_source(&facts, held.rule.trust_route_retries);
        let warning = match (facts.code_details, source) {
            (Some(_), ResponseSource::NotSent) if is_refused_by_a_hop(headers) => {
                Some(Warning::ExecutionLoops)
            }
            (None, ResponseSource::NotSent) => Some(Warning::ExecutionUnreachable),
            (None, ResponseSource::Failed(Reason::Replaced)) => Some(Warning::ExecutionDetailsMissing),
            (Some(_), _) if known(ATTEMPTS_HEADER).is_none() => Some(Warning::ExecutionDetailsMissing),
            (Some(_) | None, _) => None,
        };
        effects.extend(warning.map(Effect::Warn));
        match source {
            ResponseSource::NotSent => return (Outcome::NotSent, None),
            ResponseSource::Failed(reason) => return (Outcome::Failed(reason), None),
            ResponseSource::Upstream => {}
        }
        let telltale = facts.body.get(..TELLTALE_BYTES).unwrap_or(facts.body);
        let refusal = headers.first(REFUSAL_HEADER);
        let outcome = match upstream_outcome(&held.rule, status, refusal, telltale) {
            // Unread, it may be the text of a proxy that lost the request.
            Outcome::NotProcessed if body.is_none() && refusal.is_none() => {
                Outcome::Failed(Reason::Intermediary)
            }
            frozen @ (Outcome::Completed | Outcome::NotProcessed | Outcome::NotSent | Outcome::Failed(_)) => {
                frozen
            }
        };
        let body = if has_trailers { None } else { body };
        (outcome, self.keep_whole(&held.rule, status, headers, body, request_origin))
    }
}

/// The lines that go to the execution listener, in order; `None` when the map is no request's, or not text.
///
/// Hop-by-hop lines end here (RFC 9110 section 7.6.1). The callout sets the length of a body; of a request without
/// one, the client's own stays. `attempt` is given from the second on.
#[must_use]
pub fn execution_lines<'a>(
    headers: &'a HeaderBlock,
    attempt: Option<&'a str>,
    protected: bool,
    has_body: bool,
) -> Option<Vec<(&'a str, &'a str)>> {
    headers.first(":path")?;
    let hop_by_hop = HopByHop::of(headers);
    let mut lines = Vec::with_capacity(headers.len());
    for (name, value) in headers.iter() {
        let empty_length = name == b"content-length" && !has_body;
        if hop_by_hop.has(name) || (NOT_SENT.contains(&name) && !empty_length) {
            continue;
        }
        lines.push((std::str::from_utf8(name).ok()?, std::str::from_utf8(value).ok()?));
    }
    lines.extend(attempt.map(|attempt| (ATTEMPT_HEADER, attempt)));
    if !protected {
        lines.push((PROTECTION_HEADER, "none"));
    }
    Some(lines)
}

/// The upstream's answer as the client gets it; `None` when its lines don't fit a reply.
fn deliver(headers: &HeaderBlock, body: Vec<u8>, protected: bool) -> Option<LocalReply> {
    let hop_by_hop = HopByHop::of(headers);
    let mut lines: Vec<_> = headers
        .iter()
        .filter(|(name, _)| {
            !name.starts_with(b":")
                && *name != b"content-length"
                && !is_execution_report(name)
                && !hop_by_hop.has(name)
        })
        .collect();
    if !protected {
        lines.retain(|(name, _)| *name != PROTECTION_HEADER.as_bytes());
        lines.push((PROTECTION_HEADER.as_bytes(), b"none"));
    }
    if !fit_a_reply(lines.iter().copied()) {
        return None;
    }
    Some(LocalReply {
        status: status_of(headers),
        headers: crate::headers::serialize_pairs(&lines),
        content: body,
        body_at: 0,
        code_details: "idempotency_executed",
    })
}

fn status_of(headers: &HeaderBlock) -> u16 {
    headers
        .first(":status")
        .and_then(|value| std::str::from_utf8(value).ok())
        .and_then(|value| value.parse().ok())
        .unwrap_or(502)
}

/// The execution listener has this filter in it, which answered: most likely, it met the claim of this very request.
fn is_refused_by_a_hop(headers: &HeaderBlock) -> bool {
    headers.first(DETAILS_HEADER).is_some_and(|details| details.starts_with(b"idempotency_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_to_the_execution_listener_is_the_request_without_what_ends_here_or_steers_a_router() {
        let sent = |headers: &[(&str, &str)], attempt: u32, protected, has_body| {
            let attempt = (attempt > 1).then(|| attempt.to_string());
            let pseudo = [(":method", "POST"), (":path", "/pay"), (":authority", "a.example")];
            let block = HeaderBlock::from_pairs(pseudo.iter().chain(headers).copied());
            let lines = execution_lines(&block, attempt.as_deref(), protected, has_body).unwrap();
            lines
                .into_iter()
                .skip(3)
                .map(|(name, value)| format!("{name}={value}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        let plain = [("idempotency-key", "k"), ("x", "1"), ("y", ""), ("x", "2")];
        assert_eq!(sent(&plain, 1, true, true), "idempotency-key=k x=1 y= x=2");
        for steering in [
            ("x-envoy-retry-on", "5xx"),
            ("x-envoy-max-retries", "3"),
            ("x-envoy-upstream-rq-timeout-ms", "1"),
            ("x-envoy-hedge-on-per-try-timeout", "true"),
            ("x-envoy-original-url", "/forged"),
            ("x-idempotency-attempt", "9"),
            ("idempotency-protection", "none"),
            ("content-length", "8"),
            ("transfer-encoding", "chunked"),
            ("te", "trailers"),
            ("upgrade", "h2c"),
        ] {
            assert_eq!(sent(&[steering, ("x", "1")], 1, true, true), "x=1", "{steering:?}");
        }
        assert_eq!(sent(&[("connection", "close, X"), ("x", "1"), ("y", "1")], 1, true, true), "y=1");
        assert_eq!(sent(&[("content-length", "0")], 1, true, false), "content-length=0");
        assert_eq!(sent(&[], 2, false, true), "x-idempotency-attempt=2 idempotency-protection=none");
        let forwarded = [("x-forwarded-for", "192.0.2.1"), ("x-envoy-external-address", "192.0.2.1")];
        assert_eq!(
            sent(&forwarded, 1, true, true),
            "x-forwarded-for=192.0.2.1 x-envoy-external-address=192.0.2.1"
        );
    }

    #[test]
    fn a_map_that_is_no_request_or_no_text_is_not_sent() {
        assert!(execution_lines(&HeaderBlock::from_pairs([("x", "1")]), None, true, true).is_none());
        let lines: [(&[u8], &[u8]); 2] = [(b":path", b"/"), (b"x", b"caf\xe9")];
        let block = HeaderBlock::parse(crate::headers::serialize_pairs(&lines)).unwrap();
        assert!(execution_lines(&block, None, true, true).is_none());
    }
}
