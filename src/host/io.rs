//! Carries an exchange's effects out on Envoy.

use std::cell::RefCell;
use std::rc::Weak;

use super::execution::HeldRequest;
use super::hostcalls::{self, Map};
use super::root::{Backend, Shared};
use super::stream::StreamState;
use crate::clock::Timestamp;
use crate::exchange::{Effect, Io, StoreAnswer, StoreOp};
use crate::metrics::{Counter, Gauge, Histogram};
use crate::store::{Store, StoreError};

/// On whose behalf host calls are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acting {
    /// The stream whose callback runs.
    Self_,
    /// The stream, from the root's callback.
    Root,
    /// Nobody: the stream is gone, its exchange is not.
    Nobody,
}

/// The effects of one event.
pub struct HostIo<'a> {
    shared: &'a Shared,
    id: u32,
    me: &'a Weak<RefCell<StreamState>>,
    acting: Acting,
    now: Timestamp,
    in_place: bool,
    gone: bool,
    /// The stream was answered.
    pub replied: bool,
}

const FILTER_STATE: &str = "idempotency";

impl<'a> HostIo<'a> {
    /// For one event.
    pub const fn new(
        shared: &'a Shared,
        id: u32,
        me: &'a Weak<RefCell<StreamState>>,
        acting: Acting,
        now: Timestamp,
    ) -> Self {
        let gone = matches!(acting, Acting::Nobody);
        Self { shared, id, me, acting, now, in_place: false, gone, replied: false }
    }

    /// Makes host calls act on the stream; `false` when it is gone. Needed before each that does; costs a host call
    /// only the first time.
    pub fn enter(&mut self) -> bool {
        if self.acting == Acting::Root && !self.in_place && !self.gone {
            // If the host no longer knows the stream, its calls would act on the root.
            match hostcalls::set_effective_context(self.id) {
                Ok(()) => self.in_place = true,
                Err(error) => {
                    self.note(Err(error));
                    self.gone = true;
                }
            }
        }
        !self.gone
    }

    /// Host calls act on the root again.
    pub fn leave(&mut self) {
        if self.in_place {
            self.note(hostcalls::set_effective_context(self.shared.root_id));
            self.in_place = false;
        }
    }

    fn note(&self, result: Result<(), hostcalls::HostError>) {
        if result.is_err() {
            self.shared.metrics.count(Counter::HostErrors);
        }
    }

    fn timed<T>(&self, operation: impl FnOnce() -> T) -> T {
        let result = operation();
        // The callback's time is the operation's start, to the millisecond that is recorded.
        let millis = Shared::now().since(self.now).as_millis();
        self.shared.metrics.record(Histogram::StoreMillis, u64::try_from(millis).unwrap_or(u64::MAX));
        result
    }
}

impl Io for HostIo<'_> {
    fn apply(&mut self, effect: Effect) {
        match effect {
            // `drive` gives these to `ask`.
            Effect::Store(_) => {}
            Effect::Outbox { hold, write, rule } => {
                self.shared.post(hold, write, &rule, self.now);
            }
            Effect::Execute { timeout, attempt, protected, body_bytes } => {
                let request =
                    if self.enter() { HeldRequest::read(attempt, protected, body_bytes) } else { None };
                if let Some(me) = self.me.upgrade() {
                    self.shared.execute(me, request, timeout);
                }
            }
            Effect::Reply(reply) => {
                if self.replied {
                    return;
                }
                if !self.enter() {
                    return;
                }
                self.replied = true;
                let status = u32::from(reply.status);
                let sent =
                    hostcalls::send_local_response(status, reply.code_details, &reply.headers, reply.body());
                self.note(sent);
            }
            Effect::RemoveRequestHeader(name) => {
                if self.enter() {
                    self.note(hostcalls::remove_header(Map::Request, name));
                }
            }
            Effect::SetRequestHeader(name, value) => {
                if self.enter() {
                    self.note(hostcalls::set_header(Map::Request, name, value.as_bytes()));
                }
            }
            Effect::SetResponseHeader(name, value) => {
                if self.enter() {
                    self.note(hostcalls::set_header(Map::Response, name, &value));
                }
            }
            Effect::ReplaceResponseHead(lines) => {
                if self.enter() {
                    self.note(hostcalls::set_header_pairs(Map::Response, &lines));
                }
            }
            Effect::Count(counter) => self.shared.metrics.count(counter),
            Effect::ClaimHeld => self.shared.metrics.shift(Gauge::InFlight, 1),
            Effect::ClaimEnded => self.shared.metrics.shift(Gauge::InFlight, -1),
            Effect::Publish(line) => {
                if self.enter() {
                    self.note(hostcalls::set_filter_state(FILTER_STATE, line.as_bytes()));
                }
            }
            Effect::OfferHandover(owner) => {
                if self.enter() {
                    self.note(hostcalls::set_filter_state(&self.shared.handover_state, owner.bytes()));
                }
            }
            Effect::HandOver(handover) => self.shared.hand_over(handover),
            Effect::Warn(warning) => self.shared.warn(warning, self.now),
        }
    }

    fn ask(&mut self, op: StoreOp) -> Option<StoreAnswer> {
        match &self.shared.backend {
            Backend::SharedData(store) => {
                let Ok(mut store) = store.try_borrow_mut() else { return Some(unavailable(&op)) };
                let answer = self.timed(|| match op {
                    StoreOp::Claim(claim) => StoreAnswer::Claim(store.claim(&claim, self.now)),
                    StoreOp::Renew(hold, write) => StoreAnswer::Renew(store.write(&hold, &write, self.now)),
                    StoreOp::End(hold, write) => StoreAnswer::End(store.write(&hold, &write, self.now)),
                });
                self.shared.count_events(store.take_events());
                Some(answer)
            }
            Backend::Redis(link) => {
                let (Ok(mut link), Some(me)) = (link.try_borrow_mut(), self.me.upgrade()) else {
                    return Some(unavailable(&op));
                };
                let known = link.known(&op, self.now, &mut |counter| self.shared.metrics.count(counter));
                if known.is_none() {
                    link.ask(op, self.id, me, self.now);
                    self.shared.wake();
                }
                known
            }
        }
    }
}

const fn unavailable(op: &StoreOp) -> StoreAnswer {
    match op {
        StoreOp::Claim(_) => StoreAnswer::Claim(Err(StoreError::Unavailable)),
        StoreOp::Renew(..) => StoreAnswer::Renew(Err(StoreError::Unavailable)),
        StoreOp::End(..) => StoreAnswer::End(Err(StoreError::Unavailable)),
    }
}
