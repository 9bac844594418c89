//! The stream context: turns Envoy's callbacks into events, and gates into actions.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use super::abi::Action;
use super::hostcalls::{self, Buffer, Direction, Map};
use super::io::{Acting, HostIo};
use super::root::Shared;
use crate::clock::Timestamp;
use crate::config::Mode;
use crate::exchange::{Event, Exchange, Gate, drive};
use crate::headers::{Attributes, HeaderBlock, RequestHead, serialize_pairs};
use crate::metrics::Counter;
use crate::outcome::{ClosingFacts, ResponseFacts};
use crate::policy::{Bypass, Coverage, RouteOverride, decide_coverage, is_safe, protocol_bypass};
use crate::reply::replay::are_remarks;

/// What a stream and its root share.
pub struct StreamState {
    id: u32,
    /// An operation that is out keeps the exchange until its answer came.
    me: Weak<RefCell<StreamState>>,
    exchange: Exchange,
    gate: Gate,
    /// The filter answered this stream: nothing may be sent or resumed any more.
    replied: bool,
}

impl StreamState {
    /// Feeds an event, carries its effects out, and resumes what is no longer held.
    pub fn handle(&mut self, shared: &Shared, event: Event<'_>, now: Timestamp, acting: Acting) {
        let Self { id, me, exchange, .. } = self;
        let mut io = HostIo::new(shared, *id, me, acting, now);
        let before = self.gate;
        self.gate = drive(exchange, event, now, &mut io);
        self.replied |= io.replied;
        if acting == Acting::Root && before != self.gate && !self.replied {
            // Inside a stream's own callback the returned action does this.
            let direction = match before {
                Gate::HoldRequest => Some(Direction::Request),
                Gate::HoldResponse => Some(Direction::Response),
                Gate::Pass => None,
            };
            if let Some(direction) = direction
                && io.enter()
                && hostcalls::resume(direction).is_err()
            {
                shared.metrics.count(Counter::HostErrors);
            }
        }
        io.leave();
    }

    /// The stream's context id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Whether the body of a detached execution's answer may be read.
    pub fn make_room(&mut self, bytes: u64) -> bool {
        self.exchange.make_room(bytes)
    }

    fn action(&self, held: Gate) -> Action {
        if self.gate == held { Action::Pause } else { Action::Continue }
    }
}

/// The stream context.
pub struct Stream {
    id: u32,
    shared: Rc<Shared>,
    /// Absent until a rule covers the request: nothing is kept for the others.
    state: Option<Rc<RefCell<StreamState>>>,
    request_seen: usize,
    response_seen: usize,
}

struct HostAttributes;

impl Attributes for HostAttributes {
    fn attribute(&self, path: &[&str]) -> Option<Vec<u8>> {
        hostcalls::property(path)
    }
}

impl Stream {
    /// A stream that nothing is known of.
    pub const fn new(id: u32, shared: Rc<Shared>) -> Self {
        Self { id, shared, state: None, request_seen: 0, response_seen: 0 }
    }

    fn begin(&mut self) -> Rc<RefCell<StreamState>> {
        if let Some(state) = &self.state {
            return Rc::clone(state);
        }
        let state = Rc::new_cyclic(|me| {
            RefCell::new(StreamState {
                id: self.id,
                me: Weak::clone(me),
                exchange: Exchange::new(Rc::clone(&self.shared.worker)),
                gate: Gate::Pass,
                replied: false,
            })
        });
        self.state = Some(Rc::clone(&state));
        state
    }

    /// Feeds an event, and says what to do with the direction that `held` stands for.
    fn feed(&self, event: Event<'_>, held: Gate) -> Action {
        let Some(state) = &self.state else { return Action::Continue };
        let Ok(mut state) = state.try_borrow_mut() else {
            // Nothing calls back while a state is borrowed; if it did, an unseen event must not let a request go.
            return if held == Gate::HoldRequest { Action::Pause } else { Action::Continue };
        };
        state.handle(&self.shared, event, Shared::now(), Acting::Self_);
        // After a reply of ours nothing of the request may go on.
        if held == Gate::HoldRequest && state.replied { Action::Pause } else { state.action(held) }
    }

    /// The head of the request.
    pub fn on_request_head(&mut self, end: bool) -> Action {
        if let Some(handover) = self.shared.adopt() {
            let state = self.begin();
            self.shared.enlist(self.id, &state);
            return self.feed(Event::Adopted(handover), Gate::HoldRequest);
        }
        let method = hostcalls::header(Map::Request, ":method").unwrap_or_default();
        if is_safe(&method) {
            return Action::Continue;
        }
        let authority = if self.shared.looks_at_hosts {
            hostcalls::header(Map::Request, ":authority").unwrap_or_default()
        } else {
            Vec::new()
        };
        let path = hostcalls::header(Map::Request, ":path").unwrap_or_default();
        let shared = Rc::clone(&self.shared);
        let rules = &shared.worker.config.rules;
        let rule = match decide_coverage(rules, &method, &authority, &path, &route_override()) {
            Coverage::Covered(rule) => rule,
            Coverage::Bypass(bypass) => return self.bypass(bypass),
            Coverage::Misconfigured => {
                self.begin();
                return self.feed(Event::RouteMisconfigured, Gate::HoldRequest);
            }
        };
        let headers =
            hostcalls::header_pairs(Map::Request).ok().and_then(|bytes| HeaderBlock::parse(bytes).ok());
        // A map the host could not serialize comes as an empty one.
        let headers = headers.filter(|headers| headers.first(":method").is_some());
        let (Some(headers), Some(owner)) = (headers, self.shared.random.take()) else {
            return if rule.mode == Mode::Shadow { Action::Continue } else { self.refuse_unreadable() };
        };
        if let Some(bypass) = protocol_bypass(&headers) {
            return self.bypass(bypass);
        }
        let state = self.begin();
        let head = RequestHead { headers: &headers, attributes: &HostAttributes };
        let event = Event::RequestHead { rule: Rc::clone(rule), head: &head, end, owner };
        let action = self.feed(event, Gate::HoldRequest);
        if state.try_borrow().is_ok_and(|state| !state.exchange.is_inert()) {
            self.shared.enlist(self.id, &state);
        }
        #[cfg(feature = "test-hooks")]
        super::test_hooks::trap_if_asked(&headers);
        action
    }

    /// A covered request that the host can't give is not forwarded.
    fn refuse_unreadable(&mut self) -> Action {
        self.shared.metrics.count(Counter::HostErrors);
        self.begin();
        self.feed(Event::RequestUnreadable, Gate::HoldRequest)
    }

    fn bypass(&self, bypass: Bypass) -> Action {
        if let Some(counter) = Counter::bypassed(bypass) {
            self.shared.metrics.count(counter);
        }
        Action::Continue
    }

    fn wants(&self, ask: impl FnOnce(&Exchange) -> bool) -> bool {
        self.state.as_ref().is_some_and(|state| state.try_borrow().is_ok_and(|state| ask(&state.exchange)))
    }

    fn action(&self, held: Gate) -> Action {
        self.state.as_ref().map_or(Action::Continue, |state| {
            state.try_borrow().map_or(Action::Continue, |state| {
                if held == Gate::HoldRequest && state.replied { Action::Pause } else { state.action(held) }
            })
        })
    }
}

/// What the route's metadata says: `filter_metadata["idempotency"]`.
fn route_override() -> RouteOverride {
    const PATH: [&str; 4] = ["xds", "route_metadata", "filter_metadata", "idempotency"];
    let [a, b, c, d] = PATH;
    if !hostcalls::has_property(&PATH) {
        return RouteOverride::None;
    }
    // Envoy writes a boolean as one byte. Whoever wrote metadata wanted something: what can't be understood is not
    // the same as nothing, and an empty name is an unknown one.
    let off = hostcalls::property(&[a, b, c, d, "off"]);
    match (off.as_deref(), hostcalls::property(&[a, b, c, d, "rule"])) {
        (Some([1]), None) => RouteOverride::Off,
        (None | Some([0]), Some(name)) => RouteOverride::Rule(name),
        (Some([0]), None) => RouteOverride::None,
        (None | Some(_), None | Some(_)) => RouteOverride::Rule(Vec::new()),
    }
}

impl Stream {
    /// A piece of the request's body.
    pub fn on_request_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        if !self.wants(Exchange::wants_request_body) {
            return self.action(Gate::HoldRequest);
        }
        // While paused the buffer holds everything since the pause began.
        let fresh = body_size.saturating_sub(self.request_seen);
        let chunk = if fresh == 0 || !self.wants(Exchange::wants_request_bytes) {
            Vec::new()
        } else {
            match hostcalls::buffer(Buffer::RequestBody, self.request_seen, fresh) {
                Ok(chunk) if chunk.len() == fresh => chunk,
                // A body that can't be read can't be compared: it is not forwarded.
                Ok(_) | Err(_) => return self.refuse_unreadable(),
            }
        };
        let action = self.feed(Event::RequestBody { chunk: &chunk, end: end_of_stream }, Gate::HoldRequest);
        // What is held comes again with the next callback; what goes on (under shadow) does not.
        self.request_seen = if action == Action::Pause { body_size } else { 0 };
        action
    }

    /// The request's trailers.
    pub fn on_request_trailers(&mut self) -> Action {
        // With trailers the end of stream is never announced in the body callback.
        if self.wants(Exchange::wants_request_body) {
            return self.feed(Event::RequestTrailers, Gate::HoldRequest);
        }
        self.action(Gate::HoldRequest)
    }

    /// The head of the response.
    pub fn on_response_head(&mut self, end_of_stream: bool) -> Action {
        if !self.wants(Exchange::wants_response_head) {
            return Action::Continue;
        }
        let details = hostcalls::try_property(&["response", "code_details"]);
        let attempts = hostcalls::try_property(&["upstream", "request_attempt_count"]);
        let (code_details, attempts) = match (details, attempts) {
            (Ok(details), Ok(attempts)) => (
                details.unwrap_or_default(),
                attempts.and_then(|value| Some(u64::from_le_bytes(*value.first_chunk::<8>()?))),
            ),
            // What the host does not tell is no proof of anything.
            (Err(_), _) | (_, Err(_)) => (b"not_told".to_vec(), Some(u64::MAX)),
        };
        let headers =
            hostcalls::header_pairs(Map::Response).ok().and_then(|bytes| HeaderBlock::parse(bytes).ok());
        #[cfg(feature = "test-hooks")]
        if let Some(headers) = &headers {
            super::test_hooks::trap_if_asked(headers);
        }
        let status = match &headers {
            Some(headers) => headers.first(":status").map(<[u8]>::to_vec),
            None => hostcalls::header(Map::Response, ":status"),
        };
        let status = status
            .and_then(|value| std::str::from_utf8(&value).ok().and_then(|value| value.parse().ok()))
            .unwrap_or(0);
        let facts = ResponseFacts { code_details: &code_details, attempts, status };
        self.feed(
            Event::ResponseHead { facts, headers: headers.as_ref(), end: end_of_stream },
            Gate::HoldResponse,
        )
    }

    /// A piece of the response's body.
    pub fn on_response_body(&mut self, body_size: usize, end_of_stream: bool) -> Action {
        if !self.wants(Exchange::wants_response_body) {
            return self.action(Gate::HoldResponse);
        }
        let fresh = body_size.saturating_sub(self.response_seen);
        let chunk = if fresh > 0 && self.wants(Exchange::wants_response_bytes) {
            hostcalls::buffer(Buffer::ResponseBody, self.response_seen, fresh).unwrap_or_default()
        } else {
            Vec::new()
        };
        let skipped = fresh.saturating_sub(chunk.len());
        let event = Event::ResponseBody { chunk: &chunk, skipped, end: end_of_stream };
        let action = self.feed(event, Gate::HoldResponse);
        // What is held comes again with the next callback; what goes on does not.
        self.response_seen = if action == Action::Pause { body_size } else { 0 };
        action
    }

    /// The response's trailers.
    pub fn on_response_trailers(&mut self) -> Action {
        if !self.wants(Exchange::wants_response_body) {
            return self.action(Gate::HoldResponse);
        }
        let trailers = hostcalls::header_pairs(Map::ResponseTrailers).ok();
        let trailers = trailers.and_then(|bytes| HeaderBlock::parse(bytes).ok());
        let event = if trailers.is_some_and(|trailers| are_remarks(&trailers)) {
            Event::ResponseBody { chunk: &[], skipped: 0, end: true }
        } else {
            Event::ResponseTrailers
        };
        self.feed(event, Gate::HoldResponse)
    }

    /// The stream is over.
    pub fn on_log(&mut self) {
        self.shared.strike(self.id);
        if !self.wants(|exchange| !exchange.is_inert()) {
            return;
        }
        let code_details = hostcalls::property(&["response", "code_details"]).unwrap_or_default();
        let flags = hostcalls::property(&["response", "flags"])
            .and_then(|value| Some(u64::from_le_bytes(*value.first_chunk::<8>()?)))
            .unwrap_or(0);
        let facts = ClosingFacts { code_details: &code_details, flags };
        self.feed(Event::StreamClosed(facts), Gate::Pass);
    }
}

/// Answers a request that no context stands for: its plugin is not configured.
pub fn refuse_unknown() -> Action {
    let no_headers = serialize_pairs::<&str, &str>(&[]);
    // If this fails, too, the request stays held.
    let _ = hostcalls::send_local_response(503, "idempotency_not_configured", &no_headers, &[]);
    Action::Pause
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.shared.strike(self.id);
    }
}
