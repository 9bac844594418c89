//! A world without Envoy: a virtual clock, a reference store, and requests that go through the state machine.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use idempotency::clock::Timestamp;
use idempotency::config;
use idempotency::exchange::{
    ATTEMPTS_HEADER, DETAILS_HEADER, Effect, Event, Exchange, ExecutionAnswer, Gate, Handover, Io,
    StoreAnswer, StoreOp, Worker, drive,
};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::StoreKey;
use idempotency::metrics::Counter;
use idempotency::outcome::{ClosingFacts, ResponseFacts};
use idempotency::policy::{Coverage, RouteOverride, decide_coverage};
use idempotency::record::{
    ClaimDecision, Owner, Record, RecordState, WriteDecision, decide_claim, decide_write, in_flight,
};
use idempotency::reply::LocalReply;
use idempotency::store::outbox::Outbox;
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

/// The simplest store that follows the record's rules.
#[derive(Default)]
pub struct ReferenceStore {
    pub records: BTreeMap<StoreKey, Record<Vec<u8>>>,
    /// Answers in place of the next operations.
    pub errors: VecDeque<StoreError>,
    /// Takes everything but responses.
    pub refuses_responses: bool,
}

impl Store for ReferenceStore {
    fn claim(&mut self, claim: &Claim, now: Timestamp) -> Result<ClaimReply, StoreError> {
        if let Some(error) = self.errors.pop_front() {
            return Err(error);
        }
        let found = self.records.get(&claim.key);
        Ok(match decide_claim(found, &claim.terms, now) {
            ClaimDecision::Take { attempt } => {
                self.records.insert(claim.key, in_flight(&claim.terms, attempt, now));
                ClaimReply::Claimed { attempt }
            }
            ClaimDecision::Own { attempt } => ClaimReply::Claimed { attempt },
            ClaimDecision::InFlight { elapsed, remaining } => {
                ClaimReply::InFlight { fingerprint: found.unwrap().fingerprint, elapsed, remaining }
            }
            ClaimDecision::Abandoned => ClaimReply::Abandoned { fingerprint: found.unwrap().fingerprint },
            ClaimDecision::Completed => match &found.unwrap().state {
                RecordState::Completed { response } => ClaimReply::Completed {
                    fingerprint: found.unwrap().fingerprint,
                    response: response.clone(),
                },
                state @ (RecordState::InFlight { .. } | RecordState::Failed { .. }) => panic!("{state:?}"),
            },
            ClaimDecision::Failed { reason } => {
                ClaimReply::Failed { fingerprint: found.unwrap().fingerprint, reason }
            }
        })
    }

    fn write(&mut self, hold: &Hold, write: &Write, now: Timestamp) -> Result<WriteReply, StoreError> {
        if let Some(error) = self.errors.pop_front() {
            return Err(error);
        }
        if self.refuses_responses && matches!(write, Write::Complete { .. }) {
            return Err(StoreError::Unavailable);
        }
        let found = self.records.get(&hold.key);
        match decide_write(found, &hold.owner, write.kind(), now) {
            WriteDecision::AlreadyApplied => return Ok(WriteReply::Applied),
            WriteDecision::Stale => return Ok(WriteReply::Stale),
            WriteDecision::Apply => {}
        }
        let record = |expires, state| Record {
            fingerprint: hold.fingerprint,
            owner: hold.owner,
            attempt: hold.attempt,
            created: found.map_or(now, |record| record.created),
            expires,
            state,
        };
        let written = match write {
            Write::Renew { lock_ttl, record_ttl } => {
                record(now.after(*record_ttl), RecordState::InFlight { lease_until: now.after(*lock_ttl) })
            }
            Write::Complete { response, record_ttl } => {
                record(now.after(*record_ttl), RecordState::Completed { response: response.to_vec() })
            }
            Write::Fail { reason, failed_ttl } => {
                record(now.after(*failed_ttl), RecordState::Failed { reason: *reason })
            }
            Write::Release => {
                self.records.remove(&hold.key);
                return Ok(WriteReply::Applied);
            }
        };
        self.records.insert(hold.key, written);
        Ok(WriteReply::Applied)
    }
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

/// One worker, its store and its clock.
pub struct World {
    pub worker: Rc<Worker>,
    pub store: Rc<RefCell<ReferenceStore>>,
    pub outbox: Outbox,
    pub now: Timestamp,
    pub counters: BTreeMap<Counter, u64>,
    /// Answers to store operations come when the test says so.
    pub deferred: bool,
    owners: u8,
}

/// A request on its way.
pub struct Trip {
    pub exchange: Exchange,
    pub gate: Gate,
    pub reply: Option<LocalReply>,
    pub forwarded: bool,
    pub request_headers: BTreeMap<String, String>,
    pub removed_headers: Vec<String>,
    pub response_headers: Vec<(String, Vec<u8>)>,
    pub published: Vec<String>,
    pub warnings: Vec<&'static str>,
    pub handover: Option<Handover>,
    /// The request left by itself: attempt, and whether a claim is held.
    pub executing: Option<(u32, bool)>,
    pending: VecDeque<StoreOp>,
}

impl World {
    /// A worker with this rule patch over a rule that covers POST everywhere, scope `x-account-id`.
    pub fn new(rule: serde_json::Value) -> Self {
        Self::with(serde_json::json!({}), rule)
    }

    pub fn with(top: serde_json::Value, rule: serde_json::Value) -> Self {
        let mut whole = serde_json::json!({
            "store": {"shared_data": {}},
            "rules": [{"name": "payments", "match": {"methods": ["POST"]}, "scope": [{"header": "x-account-id"}]}],
        });
        for (name, value) in rule.as_object().unwrap() {
            whole["rules"][0][name] = value.clone();
        }
        for (name, value) in top.as_object().unwrap() {
            whole[name] = value.clone();
        }
        let config = config::load(whole.to_string().as_bytes()).unwrap();
        Self {
            worker: Rc::new(Worker::new(config)),
            store: Rc::default(),
            outbox: Outbox::new(1 << 20),
            now: Timestamp::from_millis(1_000_000),
            counters: BTreeMap::new(),
            deferred: false,
            owners: 0,
        }
    }

    pub fn pass(&mut self, time: Duration) {
        self.now = self.now.after(time);
    }

    pub fn count(&self, counter: Counter) -> u64 {
        self.counters.get(&counter).copied().unwrap_or(0)
    }

    pub fn records(&self) -> usize {
        self.store.borrow().records.len()
    }

    pub fn flush_outbox(&mut self) {
        let counters = &mut self.counters;
        self.outbox.flush(&mut *self.store.borrow_mut(), self.now, &mut |counter| {
            *counters.entry(counter).or_default() += 1;
        });
    }

    pub fn trip(&self) -> Trip {
        Trip {
            exchange: Exchange::new(Rc::clone(&self.worker)),
            gate: Gate::Pass,
            reply: None,
            forwarded: false,
            request_headers: BTreeMap::new(),
            removed_headers: Vec::new(),
            response_headers: Vec::new(),
            published: Vec::new(),
            warnings: Vec::new(),
            handover: None,
            executing: None,
            pending: VecDeque::new(),
        }
    }

    /// Sends `POST /pay` with key `k` and this body, as alice.
    pub fn post(&mut self, body: &str) -> Trip {
        self.request(&[("idempotency-key", "k"), ("x-account-id", "alice")], body)
    }

    pub fn request(&mut self, headers: &[(&str, &str)], body: &str) -> Trip {
        let mut trip = self.head(headers, false);
        if trip.gate == Gate::HoldRequest && trip.reply.is_none() {
            self.feed(&mut trip, Event::RequestBody { chunk: body.as_bytes(), end: true });
        }
        trip
    }

    pub fn head(&mut self, headers: &[(&str, &str)], end: bool) -> Trip {
        let mut trip = self.trip();
        let pseudo = [(":method", "POST"), (":authority", "api.example.com"), (":path", "/pay")];
        let block = HeaderBlock::from_pairs(pseudo.iter().chain(headers).copied());
        let worker = Rc::clone(&self.worker);
        let covered =
            decide_coverage(&worker.config.rules, b"POST", b"api.example.com", b"/pay", &RouteOverride::None);
        let Coverage::Covered(rule) = covered else { panic!("not covered: {covered:?}") };
        self.owners += 1;
        let owner = Owner::from_bytes([self.owners; 16]);
        let head = RequestHead { headers: &block, attributes: &NoAttributes };
        self.feed(&mut trip, Event::RequestHead { rule: Rc::clone(rule), head: &head, end, owner });
        trip
    }

    /// Feeds an event; the request counts as forwarded once nothing holds it and nothing refused it.
    pub fn feed(&mut self, trip: &mut Trip, event: Event<'_>) {
        let held = trip.gate == Gate::HoldRequest || matches!(event, Event::RequestHead { .. });
        let mut exchange = std::mem::replace(&mut trip.exchange, Exchange::new(Rc::clone(&self.worker)));
        let now = self.now;
        trip.gate = drive(&mut exchange, event, now, &mut WorldIo { world: self, trip });
        trip.exchange = exchange;
        if held && trip.gate != Gate::HoldRequest && trip.reply.is_none() {
            trip.forwarded = true;
        }
    }

    /// Lets the store answer the oldest deferred operation.
    pub fn answer(&mut self, trip: &mut Trip) {
        let op = trip.pending.pop_front().expect("an operation is out");
        let answer = self.carry_out(op);
        self.feed(trip, Event::StoreAnswered(answer));
    }

    fn carry_out(&mut self, op: StoreOp) -> StoreAnswer {
        let mut store = self.store.borrow_mut();
        match op {
            StoreOp::Claim(claim) => StoreAnswer::Claim(store.claim(&claim, self.now)),
            StoreOp::Renew(hold, write) => StoreAnswer::Renew(store.write(&hold, &write, self.now)),
            StoreOp::End(hold, write) => StoreAnswer::End(store.write(&hold, &write, self.now)),
        }
    }

    /// The upstream answers in one go.
    pub fn respond(&mut self, trip: &mut Trip, status: u16, headers: &[(&str, &str)], body: &str) {
        assert!(trip.forwarded, "only a forwarded request is answered");
        self.respond_head(trip, status, headers, body.is_empty());
        if !body.is_empty() {
            self.feed(trip, Event::ResponseBody { chunk: body.as_bytes(), skipped: 0, end: true });
        }
    }

    pub fn respond_head(&mut self, trip: &mut Trip, status: u16, headers: &[(&str, &str)], end: bool) {
        self.local_head(trip, "via_upstream", Some(1), status, headers, end);
    }

    pub fn local_head(
        &mut self,
        trip: &mut Trip,
        details: &str,
        attempts: Option<u64>,
        status: u16,
        headers: &[(&str, &str)],
        end: bool,
    ) {
        let text = status.to_string();
        let block = HeaderBlock::from_pairs([(":status", text.as_str())].iter().chain(headers).copied());
        let facts = ResponseFacts { code_details: details.as_bytes(), attempts, status };
        self.feed(trip, Event::ResponseHead { facts, headers: Some(&block), end });
    }

    /// The execution listener answers a detached request.
    pub fn executed(&mut self, trip: &mut Trip, headers: &[(&str, &str)], body: &str) {
        assert!(trip.executing.is_some(), "only what was sent is answered");
        let block = HeaderBlock::from_pairs(headers.iter().copied());
        let body = Some(body.as_bytes().to_vec());
        let answer = ExecutionAnswer::Answered { headers: &block, body, has_trailers: false };
        self.feed(trip, Event::Executed(answer));
    }

    /// The upstream answers a detached request with this status.
    pub fn executed_with(&mut self, trip: &mut Trip, status: &str, body: &str) {
        let headers =
            [(":status", status), (DETAILS_HEADER, "via_upstream"), (ATTEMPTS_HEADER, "1"), ("x-made", "1")];
        self.executed(trip, &headers, body);
    }

    pub fn close(&mut self, trip: &mut Trip, details: &str, flags: u64) {
        let facts = ClosingFacts { code_details: details.as_bytes(), flags };
        self.feed(trip, Event::StreamClosed(facts));
    }
}

impl Trip {
    /// Status and refusal type, or `None` when the filter did not answer.
    pub fn refusal(&self) -> Option<(u16, String)> {
        let reply = self.reply.as_ref()?;
        let headers = HeaderBlock::parse(reply.headers.clone()).unwrap();
        let kind = headers.first("x-idempotency-refusal").unwrap_or(b"replay");
        Some((reply.status, String::from_utf8(kind.to_vec()).unwrap()))
    }

    pub fn reply_header(&self, name: &str) -> Option<String> {
        let headers = HeaderBlock::parse(self.reply.as_ref()?.headers.clone()).unwrap();
        headers.first(name).map(|value| String::from_utf8(value.to_vec()).unwrap())
    }

    pub fn refused_as(&self, status: u16, kind: &str) -> bool {
        !self.forwarded && self.refusal() == Some((status, kind.to_owned()))
    }

    pub fn replayed(&self, status: u16, body: &str) -> bool {
        !self.forwarded
            && self.reply.as_ref().is_some_and(|reply| {
                reply.status == status
                    && reply.body() == body.as_bytes()
                    && self.reply_header("idempotent-replayed").as_deref() == Some("true")
            })
    }
}

struct WorldIo<'a> {
    world: &'a mut World,
    trip: &'a mut Trip,
}

impl Io for WorldIo<'_> {
    fn apply(&mut self, effect: Effect) {
        let Self { world, trip } = self;
        match effect {
            Effect::Store(_) => panic!("drive asks for these"),
            Effect::Outbox { hold, write, rule } => {
                let counters = &mut world.counters;
                world.outbox.push(hold, write, &rule, world.now, &mut |counter| {
                    *counters.entry(counter).or_default() += 1;
                });
            }
            Effect::Execute { attempt, protected, .. } => {
                assert!(
                    trip.executing.replace((attempt, protected)).is_none(),
                    "at most one execution a claim"
                );
            }
            Effect::Reply(reply) => {
                assert!(trip.reply.replace(reply).is_none(), "at most one reply a stream")
            }
            Effect::RemoveRequestHeader(name) => trip.removed_headers.push(name.to_owned()),
            Effect::SetRequestHeader(name, value) => {
                trip.request_headers.insert(name.to_owned(), value);
            }
            Effect::SetResponseHeader(name, value) => trip.response_headers.push((name.to_owned(), value)),
            Effect::ReplaceResponseHead(_) => {}
            Effect::Count(counter) => *world.counters.entry(counter).or_default() += 1,
            Effect::ClaimHeld | Effect::ClaimEnded | Effect::OfferHandover(_) => {}
            Effect::Publish(line) => trip.published.push(line),
            Effect::HandOver(handover) => trip.handover = Some(handover),
            Effect::Warn(warning) => trip.warnings.push(warning.as_str()),
        }
    }

    fn ask(&mut self, op: StoreOp) -> Option<StoreAnswer> {
        if self.world.deferred {
            self.trip.pending.push_back(op);
            return None;
        }
        Some(self.world.carry_out(op))
    }
}
