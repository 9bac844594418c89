//! Envoys, their workers, their clients, an upstream and a store, all driven one step at a time.

use std::collections::BTreeMap;
use std::rc::Rc;

use idempotency::clock::Timestamp;
use idempotency::config;
use idempotency::exchange::{Event, Exchange, Gate, StoreAnswer, Worker, drive};
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::outcome::{ClosingFacts, ResponseFacts};
use idempotency::record::Owner;
use idempotency::reply::LocalReply;
use idempotency::store::outbox::{EntryId, Outbox};
use idempotency::store::{Hold, StoreError, Write, WriteReply};
use serde_json::json;

use crate::oracle::{Broken, Ending, Oracle, Oracles, Rules, Verdict, Written, broken};
use crate::rng::Rng;
use crate::stores::{Mutation, Shelf};
use crate::taken::{Asked, Taken, Taking};

pub const LOCK_TTL: u64 = 60_000;
const RECORD_TTL: u64 = 400_000;
const FAILED_TTL: u64 = 300_000;
const BEGIN: u64 = 10_000_000;
const WAITERS: u32 = 2;
const MOST_KEPT: usize = 40;

/// What is the same for a whole run.
#[derive(Debug, Clone)]
pub struct Settings {
    pub rules: Rules,
    pub wait: bool,
    pub after_response: bool,
    /// The embedded store's table; the record's rules in a map otherwise.
    pub table: bool,
    /// The store answers in the same callback, as the embedded one does.
    pub at_once: bool,
    pub envoys: usize,
    pub workers_per_envoy: usize,
    pub keys: u8,
    pub mutation: Option<Mutation>,
    /// Only what clients and the upstream see counts.
    pub trusts_store: bool,
}

impl Settings {
    pub fn random(rng: &mut Rng, mutation: Option<Mutation>, trusts_store: bool) -> Self {
        let table = match mutation {
            Some(Mutation::CasNone) => true,
            Some(Mutation::NoFencing) => false,
            Some(_) | None => rng.one_in(2),
        };
        let rules = Rules {
            takeover: mutation != Some(Mutation::AlwaysTakeover) && !rng.one_in(3),
            release_unknown: mutation != Some(Mutation::ReleaseOnClientGone) && rng.one_in(4),
            release_failure: rng.one_in(4),
            allow: rng.one_in(6),
            lock_ttl: LOCK_TTL,
            record_ttl: RECORD_TTL,
            failed_ttl: FAILED_TTL,
        };
        Self {
            rules,
            wait: rng.one_in(3),
            after_response: rng.one_in(4),
            table,
            at_once: mutation != Some(Mutation::CasNone) && rng.one_in(3),
            // Workers of one process share its table; Envoys share a Redis.
            envoys: if table { 1 } else { 1 + rng.below(3) },
            workers_per_envoy: if table { 2 + rng.below(2) } else { 1 + rng.below(2) },
            keys: 1 + u8::try_from(rng.below(3)).unwrap(),
            mutation,
            trusts_store,
        }
    }

    const fn workers(&self) -> usize {
        self.envoys * self.workers_per_envoy
    }

    fn configuration(&self) -> config::Config {
        let policy = |release| if release { "release" } else { "retain" };
        let rule = json!({
            "name": "payments", "match": {"methods": ["POST"]}, "scope": [{"header": "x-account-id"}],
            "lock_ttl": "60s", "record_ttl": "400s", "failed_ttl": "300s", "wait_timeout": "10s",
            "max_response_body_bytes": MOST_KEPT,
            "on_abandoned": if self.rules.takeover { "takeover" } else { "retain" },
            "on_unknown": policy(self.rules.release_unknown),
            "on_failure": policy(self.rules.release_failure),
            "in_flight": if self.wait { "wait" } else { "reject" },
            "commit": if self.after_response { "after_response" } else { "before_response_end" },
        });
        let whole = json!({
            "store": {"shared_data": {}}, "limits": {"waiters": WAITERS}, "rules": [rule],
            "on_store_error": if self.rules.allow { "allow" } else { "deny" },
        });
        config::load(whole.to_string().as_bytes()).unwrap()
    }
}

/// Names an operation: whose it is, and the how-many-th. The same in a shortened run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OpId {
    Stream(u32, u32),
    Outbox(usize, u32),
    /// The same operation again, as a link that heard nothing sends it.
    CopyOf(u32, u32),
}

/// What the upstream, or Envoy on its way there, does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// The request reaches the upstream.
    Reach,
    Head {
        status: u16,
        attempts: u64,
        announced: bool,
        end: bool,
    },
    Chunk {
        end: bool,
    },
    Trailers,
    /// Envoy's own reply, with the request possibly executed.
    Unknown(&'static str),
    /// Envoy's own reply, with the request surely not executed.
    NotSent(&'static str),
    CutOff,
}

/// One step of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    Start {
        id: u32,
        worker: usize,
        key: u8,
        body: u8,
    },
    RequestEnd {
        id: u32,
        trailers: bool,
    },
    Abort {
        id: u32,
    },
    /// Envoy answers a request that is still held.
    IdleTimeout {
        id: u32,
    },
    Upstream {
        id: u32,
        to: Move,
    },
    Redirect {
        id: u32,
        adopted: bool,
    },
    /// Envoy is done with the stream.
    Close {
        id: u32,
    },
    Apply(OpId),
    Race {
        outer: OpId,
        inner: OpId,
        step: usize,
    },
    Deliver(OpId),
    /// The asker is told that the store is unavailable; the operation may still be carried out.
    GiveUp(OpId),
    /// An operation that was not carried out never will be.
    Lose(OpId),
    Copy(OpId),
    /// The next operation of a store that answers at once fails, after it was carried out or before.
    FailNext {
        worker: usize,
        carried_out: bool,
    },
    Tick {
        worker: usize,
    },
    Outbox {
        worker: usize,
    },
    Trap {
        worker: usize,
    },
    Crash {
        envoy: usize,
    },
    /// The root goes, and another takes over what it owes.
    Reload {
        worker: usize,
        heir: usize,
    },
    Pass {
        millis: u64,
    },
    /// One Envoy's clock goes on by more than the others'.
    StepEnvoy {
        envoy: usize,
        millis: u64,
    },
    /// The store's clock is set, back or on.
    StepStore {
        millis: i64,
    },
}

struct Op {
    worker: usize,
    asker: Option<Asker>,
    asked: Asked,
    answer: Option<StoreAnswer>,
}

#[derive(Clone, Copy)]
enum Asker {
    Stream { id: u32, pass: usize },
    Outbox(EntryId),
}

struct Node {
    worker: Rc<Worker>,
    outbox: Outbox,
    taken_due: u32,
    claims: i64,
    fails_next: Option<bool>,
}

/// A request on its way, and everything its client and its upstream know.
pub struct Stream {
    worker: usize,
    key: u8,
    body: u8,
    owner: Owner,
    /// The exchanges of its passes: more than one after internal redirects.
    passes: Vec<Exchange>,
    gate: Gate,
    open: bool,
    sent: bool,
    answered: bool,
    forwarded: bool,
    reached: bool,
    ran_before: bool,
    head: Option<(u16, u64)>,
    announced: Option<usize>,
    sent_bytes: Vec<u8>,
    response_end: bool,
    asked: u32,
    died: bool,
    /// An operation of its may be carried out when nobody waits for it.
    late: bool,
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

/// How often each thing happened that a run is about.
pub type Tally = BTreeMap<&'static str, u64>;

/// The world of one run.
pub struct World {
    settings: Settings,
    configuration: config::Config,
    now: u64,
    store_offset: i64,
    offsets: Vec<u64>,
    nodes: Vec<Node>,
    streams: BTreeMap<u32, Stream>,
    ops: BTreeMap<OpId, Op>,
    copies: BTreeMap<(u32, u32), ()>,
    shelf: Shelf,
    oracles: Oracles,
    pub tally: Tally,
}

const DETAILS_UNKNOWN: [&str; 4] = [
    "response_timeout",
    "upstream_reset_before_response_started{connection_termination}",
    "lua_response",
    "upstream_per_try_timeout",
];
const DETAILS_NOT_SENT: [&str; 2] =
    ["no_healthy_upstream", "upstream_reset_before_response_started{remote_connection_failure}"];
const STATUSES: [u16; 8] = [200, 201, 204, 302, 404, 429, 500, 503];
const CLIENT_GONE: ClosingFacts<'static> =
    ClosingFacts { code_details: b"downstream_remote_disconnect", flags: 0x4000 };

impl World {
    pub fn new(settings: &Settings) -> Self {
        let configuration = settings.configuration();
        let oracle = Oracle::new(settings.rules.clone());
        let oracle = if settings.trusts_store { oracle.trusting() } else { oracle };
        let nodes = (0..settings.workers()).map(|_| Node::new(&configuration)).collect();
        Self {
            now: BEGIN,
            store_offset: 0,
            offsets: vec![0; settings.envoys],
            nodes,
            streams: BTreeMap::new(),
            ops: BTreeMap::new(),
            copies: BTreeMap::new(),
            shelf: Shelf::new(settings.table, settings.workers(), settings.mutation),
            oracles: Oracles::new(oracle),
            tally: Tally::new(),
            settings: settings.clone(),
            configuration,
        }
    }

    /// A step that can be taken.
    pub fn choose(&self, rng: &mut Rng, next_id: u32) -> Action {
        let mut choices = Choices::default();
        self.offer_streams(rng, next_id, &mut choices);
        self.offer_ops(rng, &mut choices);
        self.offer_nodes(rng, &mut choices);
        let jumps = [5, 30, 400, 1_500, 6_000, 21_000, LOCK_TTL + 1_000];
        choices.add(7, Action::Pass { millis: rng.pick(&jumps) });
        choices.add(usize::from(rng.one_in(8)), Action::Pass { millis: RECORD_TTL });
        choices.pick(rng)
    }

    fn offer_streams(&self, rng: &mut Rng, next_id: u32, choices: &mut Choices) {
        let open = self.streams.values().filter(|stream| stream.open).count();
        if open < 6 {
            let worker = rng.below(self.nodes.len());
            let key = u8::try_from(rng.below(usize::from(self.settings.keys))).unwrap();
            let body = u8::from(rng.one_in(6));
            choices.add(8, Action::Start { id: next_id, worker, key, body });
        }
        for (&id, stream) in self.streams.iter().filter(|(_, stream)| stream.open) {
            let upstream = |to| Action::Upstream { id, to };
            if stream.is_over() {
                choices.add(6, Action::Close { id });
                continue;
            }
            choices.add(1, Action::Abort { id });
            if !stream.sent {
                choices.add(6, Action::RequestEnd { id, trailers: rng.one_in(4) });
            } else if !stream.forwarded {
                choices.add(usize::from(rng.one_in(3)), Action::IdleTimeout { id });
            } else if stream.response_end {
                // Held until its record is stored.
            } else if let Some((_, _)) = stream.head {
                choices.add(5, upstream(Move::Chunk { end: rng.one_in(2) }));
                choices.add(1, upstream(Move::Trailers));
                choices.add(1, upstream(Move::CutOff));
            } else {
                let attempts = if rng.one_in(10) { 2 } else { 1 };
                let head = Move::Head {
                    status: rng.pick(&STATUSES),
                    attempts,
                    announced: rng.one_in(2),
                    end: rng.one_in(3),
                };
                choices.add(if stream.reached { 5 } else { 0 }, upstream(head));
                choices.add(usize::from(stream.reached), upstream(Move::Unknown(rng.pick(&DETAILS_UNKNOWN))));
                choices.add(if stream.reached { 0 } else { 6 }, upstream(Move::Reach));
                let not_sent = Move::NotSent(rng.pick(&DETAILS_NOT_SENT));
                choices.add(usize::from(!stream.reached), upstream(not_sent));
                choices.add(usize::from(rng.one_in(2)), Action::Redirect { id, adopted: !rng.one_in(3) });
            }
        }
    }

    fn offer_ops(&self, rng: &mut Rng, choices: &mut Choices) {
        let open: Vec<(OpId, usize)> =
            self.ops.iter().filter(|(_, op)| op.answer.is_none()).map(|(id, op)| (*id, op.worker)).collect();
        for (&id, op) in &self.ops {
            if op.answer.is_some() {
                choices.add(8, Action::Deliver(id));
                choices.add(1, Action::GiveUp(id));
                continue;
            }
            choices.add(if op.asker.is_some() { 6 } else { 1 }, Action::Apply(id));
            choices.add(1, Action::Lose(id));
            choices.add(usize::from(op.asker.is_some()), Action::GiveUp(id));
            choices.add(usize::from(matches!(id, OpId::Stream(..))), Action::Copy(id));
            if self.shelf.can_race() {
                let (inner, worker) = rng.pick(&open);
                choices.add(
                    if worker == op.worker { 0 } else { 6 },
                    Action::Race { outer: id, inner, step: rng.below(8) },
                );
            }
        }
    }

    fn offer_nodes(&self, rng: &mut Rng, choices: &mut Choices) {
        for (worker, node) in self.nodes.iter().enumerate() {
            choices.add(3, Action::Tick { worker });
            choices.add(if node.outbox.is_empty() { 0 } else { 5 }, Action::Outbox { worker });
            choices.add(usize::from(rng.one_in(12)), Action::Trap { worker });
            if self.settings.at_once {
                choices.add(1, Action::FailNext { worker, carried_out: rng.one_in(2) });
            }
            let heir = rng.below(self.nodes.len());
            if heir != worker && !node.outbox.is_empty() {
                choices.add(1, Action::Reload { worker, heir });
            }
        }
        let envoy = rng.below(self.settings.envoys);
        choices.add(usize::from(rng.one_in(6)), Action::Crash { envoy });
        if !self.settings.table {
            choices.add(
                usize::from(rng.one_in(4)),
                Action::StepEnvoy { envoy, millis: rng.pick(&[3_000, 90_000]) },
            );
            choices.add(
                usize::from(rng.one_in(4)),
                Action::StepStore { millis: rng.pick(&[-70_000, -2_000, 2_000, 70_000]) },
            );
        }
    }

    /// Takes a step. One that can't be taken (a shortened run) changes nothing.
    pub fn step(&mut self, action: Action) -> Verdict {
        match action {
            Action::Start { id, worker, key, body } => self.start(id, worker, key, body),
            Action::RequestEnd { id, trailers } => self.request_end(id, trailers),
            Action::Abort { id } => self.abort(id),
            Action::IdleTimeout { id } => {
                let Some(stream) = self.open(id) else { return Ok(()) };
                if stream.forwarded || stream.is_over() {
                    return Ok(());
                }
                stream.answered = true;
                self.local_head(id, "stream_idle_timeout", None, 408)
            }
            Action::Upstream { id, to } => self.upstream(id, to),
            Action::Redirect { id, adopted } => self.redirect(id, adopted),
            Action::Close { id } => {
                let Some(stream) = self.open(id) else { return Ok(()) };
                if !stream.is_over() {
                    return Ok(());
                }
                self.close(id, &ClosingFacts { code_details: b"via_upstream", flags: 0 })
            }
            Action::Apply(id) => self.apply(id),
            Action::Race { outer, inner, step } => self.race(outer, inner, step),
            Action::Deliver(id) => self.deliver(id),
            Action::GiveUp(id) => self.give_up(id),
            Action::Lose(id) => {
                if self.ops.get(&id).is_none_or(|op| op.answer.is_some()) {
                    return Ok(());
                }
                self.count("an operation is lost");
                self.give_up(id)?;
                self.ops.remove(&id);
                Ok(())
            }
            Action::Copy(id) => {
                self.copy(id);
                Ok(())
            }
            Action::FailNext { worker, carried_out } => {
                self.nodes[worker].fails_next = Some(carried_out);
                Ok(())
            }
            Action::Tick { worker } => self.tick(worker),
            Action::Outbox { worker } => self.outbox(worker),
            Action::Trap { worker } => self.trap(worker),
            Action::Crash { envoy } => {
                let each = self.settings.workers_per_envoy;
                (envoy * each..(envoy + 1) * each).try_for_each(|worker| self.trap(worker))
            }
            Action::Reload { worker, heir } => self.reload(worker, heir),
            Action::Pass { millis } => {
                self.now += millis;
                Ok(())
            }
            Action::StepEnvoy { envoy, millis } => {
                self.offsets[envoy] += millis;
                Ok(())
            }
            Action::StepStore { millis } => {
                self.store_offset += millis;
                Ok(())
            }
        }
    }

    fn start(&mut self, id: u32, worker: usize, key: u8, body: u8) -> Verdict {
        let mut owner = [0; 16];
        owner[..4].copy_from_slice(&(id + 1).to_be_bytes());
        let owner = Owner::from_bytes(owner);
        let stream = Stream {
            worker,
            key,
            body,
            owner,
            passes: vec![Exchange::new(Rc::clone(&self.nodes[worker].worker))],
            gate: Gate::Pass,
            open: true,
            sent: false,
            answered: false,
            forwarded: false,
            reached: false,
            ran_before: false,
            head: None,
            announced: None,
            sent_bytes: Vec::new(),
            response_end: false,
            asked: 0,
            died: false,
            late: false,
        };
        self.streams.insert(id, stream);
        let key = format!("k{key}");
        let block = HeaderBlock::from_pairs([
            (":method", "POST"),
            (":authority", "api.example.com"),
            (":path", "/pay"),
            ("idempotency-key", &key),
            ("x-account-id", "alice"),
        ]);
        let head = RequestHead { headers: &block, attributes: &NoAttributes };
        let rule = Rc::clone(&self.nodes[worker].worker.config.rules[0]);
        self.feed(id, Event::RequestHead { rule, head: &head, end: false, owner })
    }

    fn request_end(&mut self, id: u32, trailers: bool) -> Verdict {
        let Some(stream) = self.open(id) else { return Ok(()) };
        if stream.sent || stream.is_over() {
            return Ok(());
        }
        stream.sent = true;
        let chunk = [b'b', b'0' + stream.body];
        self.feed(id, Event::RequestBody { chunk: &chunk, end: !trailers })?;
        if trailers { self.feed(id, Event::RequestTrailers) } else { Ok(()) }
    }

    fn abort(&mut self, id: u32) -> Verdict {
        let Some(stream) = self.open(id) else { return Ok(()) };
        if stream.is_over() {
            return Ok(());
        }
        let ending = stream.cut_off();
        self.end(id, ending);
        self.count("a client left");
        self.close(id, &CLIENT_GONE)
    }

    fn upstream(&mut self, id: u32, to: Move) -> Verdict {
        let Some(stream) = self.open(id) else { return Ok(()) };
        if !stream.forwarded || stream.is_over() || stream.response_end {
            return Ok(());
        }
        match (to, stream.head) {
            (Move::Reach, None) => {
                stream.reached = true;
                self.count("the upstream ran");
                Ok(())
            }
            (Move::Head { status, attempts, announced, end }, None) if stream.reached => {
                stream.head = Some((status, attempts));
                stream.ran_before |= attempts > 1;
                let length = if end { 0 } else { stream.next_chunk(id).len() * 2 };
                stream.announced = (announced && !end).then_some(length);
                let (text, length) = (status.to_string(), length.to_string());
                let mut lines = vec![(":status", text.as_str()), ("x-run", "1")];
                if stream.announced.is_some() {
                    lines.push(("content-length", &length));
                }
                let block = HeaderBlock::from_pairs(lines);
                if end {
                    self.end(id, Ending::Whole(status));
                    self.stream(id).response_end = true;
                }
                let facts = ResponseFacts { code_details: b"via_upstream", attempts: Some(attempts), status };
                self.feed(id, Event::ResponseHead { facts, headers: Some(&block), end })
            }
            (Move::Chunk { end }, Some((status, _))) => {
                let chunk = stream.next_chunk(id);
                let left = stream.announced.map(|length| length - stream.sent_bytes.len());
                if left == Some(0) && !end {
                    return Ok(());
                }
                let chunk = if left == Some(0) { Vec::new() } else { chunk };
                // The end comes with the announced length, neither sooner nor later.
                let end = end && left.is_none_or(|left| left == chunk.len());
                stream.sent_bytes.extend_from_slice(&chunk);
                if end {
                    stream.response_end = true;
                    self.end(id, Ending::Whole(status));
                }
                self.feed(id, Event::ResponseBody { chunk: &chunk, skipped: 0, end })
            }
            (Move::Trailers, Some((status, _))) => {
                if stream.announced.is_some_and(|length| length != stream.sent_bytes.len()) {
                    return Ok(());
                }
                stream.response_end = true;
                self.end(id, Ending::Whole(status));
                self.feed(id, Event::ResponseTrailers)
            }
            (Move::CutOff, Some(_)) => {
                let ending = stream.cut_off();
                self.end(id, ending);
                let details = b"upstream_reset_after_response_started{connection_termination}";
                self.close(id, &ClosingFacts { code_details: details, flags: 0 })
            }
            (Move::Unknown(details), None) if stream.reached => {
                stream.response_end = true;
                self.end(id, Ending::Unknown);
                self.local_head(id, details, Some(1), 504)
            }
            (Move::NotSent(details), None) if !stream.reached => {
                stream.response_end = true;
                let attempts = details.starts_with("upstream").then_some(1);
                self.end(id, Ending::NotSent);
                self.local_head(id, details, attempts, 503)
            }
            (_, Some(_) | None) => Ok(()),
        }
    }

    /// Envoy follows a redirect: this pass closes, and the next one finds its claim or does not.
    fn redirect(&mut self, id: u32, adopted: bool) -> Verdict {
        let Some(stream) = self.open(id) else { return Ok(()) };
        if !stream.forwarded || stream.is_over() || stream.response_end || stream.head.is_some() {
            return Ok(());
        }
        let facts = ClosingFacts { code_details: b"internal_redirect", flags: 0 };
        let worker = stream.worker;
        let taken = self.drive(id, None, Event::StreamClosed(facts))?;
        let Some(handover) = taken.handover else {
            return broken(Broken::Leaked, format!("stream {id} handed nothing over"));
        };
        self.count("a claim was handed over");
        let exchange = Exchange::new(Rc::clone(&self.nodes[worker].worker));
        let stream = self.stream(id);
        stream.ran_before = true;
        stream.reached = false;
        if adopted {
            stream.passes.push(exchange);
            return self.feed(id, Event::Adopted(handover));
        }
        stream.open = false;
        self.end(id, Ending::Unknown);
        let (write, _) = handover.end_unadopted();
        let (hold, rule, now) = (*handover.hold(), Rc::clone(handover.rule()), self.clock(worker));
        let node = &mut self.nodes[worker];
        node.claims -= 1;
        node.outbox.push(hold, write, &rule, now, &mut |_| {});
        Ok(())
    }

    fn close(&mut self, id: u32, facts: &ClosingFacts<'_>) -> Verdict {
        self.stream(id).open = false;
        self.feed(id, Event::StreamClosed(*facts))
    }

    fn local_head(&mut self, id: u32, details: &str, attempts: Option<u64>, status: u16) -> Verdict {
        let text = status.to_string();
        let block = HeaderBlock::from_pairs([(":status", text.as_str())]);
        let facts = ResponseFacts { code_details: details.as_bytes(), attempts, status };
        self.feed(id, Event::ResponseHead { facts, headers: Some(&block), end: true })
    }

    /// Feeds an event to the stream's newest pass, and does what Envoy does then.
    fn feed(&mut self, id: u32, event: Event<'_>) -> Verdict {
        let taken = self.drive(id, None, event)?;
        let before_end = !self.settings.after_response;
        if let Some(reply) = taken.reply {
            return self.replied(id, &reply);
        }
        let stream = self.stream(id);
        let goes_on = stream.open && stream.sent && stream.gate != Gate::HoldRequest && !stream.answered;
        if goes_on && !stream.forwarded {
            stream.forwarded = true;
            let (key, body, owner) = (stream.key, stream.body, stream.owner);
            let marked = taken.request_headers.iter().any(|(name, _)| *name == "idempotency-protection");
            if taken.request_headers.iter().any(|(name, _)| *name == "x-idempotency-attempt") {
                self.count("a takeover ran");
            }
            self.count(if marked { "forwarded unprotected" } else { "forwarded" });
            return self.oracles.all(|oracle| oracle.forwarded(key, body, owner, !marked));
        }
        if stream.open && stream.response_end && stream.gate == Gate::Pass && !stream.answered {
            stream.answered = true;
            let is_out = self.ops.values().any(|op| {
                matches!(op.asker, Some(Asker::Stream { id: asker, .. }) if asker == id)
                    && matches!(op.asked, Asked::End(..))
            });
            if is_out && before_end {
                return broken(
                    Broken::SeenBeforeStored,
                    format!("stream {id} ended before its record was stored"),
                );
            }
        }
        Ok(())
    }

    fn drive(
        &mut self,
        id: u32,
        pass: Option<usize>,
        event: Event<'_>,
    ) -> Result<Taken, crate::oracle::Violation> {
        let worker = self.stream(id).worker;
        let (now, store_now) = (self.clock(worker), self.store_clock());
        let Self { streams, shelf, oracles, nodes, settings, tally, .. } = self;
        let stream = streams.get_mut(&id).expect("a known stream");
        let key = stream.key;
        let mut verdict = Ok(());
        let mut answer = |asked: &Asked| {
            if !settings.at_once {
                return None;
            }
            let fails = nodes[worker].fails_next.take();
            if fails == Some(false) {
                *tally.entry("an operation is lost").or_default() += 1;
                return Some(asked.unavailable());
            }
            let answer = shelf.carry_out(worker, asked, store_now);
            note_stale(&answer, tally);
            verdict = std::mem::replace(&mut verdict, Ok(()))
                .and(oracles.all(|oracle| tell(oracle, key, asked, &answer, store_now)));
            if fails == Some(true) {
                *tally.entry("a reply is lost").or_default() += 1;
                return Some(asked.unavailable());
            }
            Some(answer)
        };
        let newest = stream.passes.len() - 1;
        let pass = pass.unwrap_or(newest);
        let mut io = Taking { taken: Taken::default(), answer: &mut answer };
        let gate = drive(&mut stream.passes[pass], event, now, &mut io);
        let mut taken = io.taken;
        if pass == newest {
            stream.gate = gate;
        }
        verdict?;
        if taken.replied_twice {
            return Err(broken(Broken::WrongAnswer, format!("stream {id} was answered twice")).unwrap_err());
        }
        for asked in std::mem::take(&mut taken.asked) {
            let asker = Some(Asker::Stream { id, pass });
            self.ops.insert(OpId::Stream(id, stream.asked), Op { worker, asker, asked, answer: None });
            stream.asked += 1;
        }
        let node = &mut self.nodes[worker];
        node.claims += taken.claims;
        for (hold, write, rule) in std::mem::take(&mut taken.outbox) {
            *self.tally.entry("a write went to the outbox").or_default() += 1;
            node.outbox.push(hold, write, &rule, now, &mut |_| {});
        }
        Ok(taken)
    }

    fn replied(&mut self, id: u32, reply: &LocalReply) -> Verdict {
        let headers = HeaderBlock::parse(reply.headers.clone()).unwrap();
        let stream = self.stream(id);
        if !stream.open || stream.answered || stream.forwarded {
            return broken(Broken::WrongAnswer, format!("stream {id} was answered out of turn"));
        }
        stream.answered = true;
        let (key, body) = (stream.key, stream.body);
        if headers.first("idempotent-replayed").is_some() {
            self.count("a replay");
            self.oracles.all(|oracle| oracle.replayed(key, body, reply.status, reply.body()))?;
        } else {
            let kind = String::from_utf8_lossy(headers.first("x-idempotency-refusal").unwrap_or_default());
            self.count(match &*kind {
                "in-flight" => "refused: in flight",
                "mismatch" => "refused: mismatch",
                "failed" => "refused: failed",
                "abandoned" => "refused: abandoned",
                "response-not-kept" => "refused: response not kept",
                "store-unavailable" => "refused: store unavailable",
                "body-timeout" => "refused: body timeout",
                other => return broken(Broken::WrongAnswer, format!("refused as {other:?}")),
            });
        }
        self.local_head(id, reply.code_details, None, reply.status)
    }

    fn apply(&mut self, id: OpId) -> Verdict {
        let now = self.store_clock();
        let Self { ops, shelf, oracles, streams, settings, tally, .. } = self;
        let Some(op) = ops.get_mut(&id).filter(|op| op.answer.is_none()) else { return Ok(()) };
        let answer = shelf.carry_out(op.worker, &op.asked, now);
        let key = key_of(&op.asked, streams, settings);
        oracles.all(|oracle| tell(oracle, key, &op.asked, &answer, now))?;
        note_stale(&answer, tally);
        if op.asker.is_none() {
            self.count("an operation was carried out late");
            self.ops.remove(&id);
        } else {
            op.answer = Some(answer);
        }
        Ok(())
    }

    /// Two operations meet in the table: some order of the two must explain both answers.
    fn race(&mut self, outer: OpId, inner: OpId, step: usize) -> Verdict {
        let now = self.store_clock();
        let Self { ops, shelf, oracles, streams, settings, .. } = self;
        let (Some(first), Some(second)) = (ops.get(&outer), ops.get(&inner)) else { return Ok(()) };
        if first.answer.is_some() || second.answer.is_some() || first.worker == second.worker {
            return Ok(());
        }
        let (one, two) = shelf.race(step, (first.worker, &first.asked), (second.worker, &second.asked), now);
        let (key_one, key_two) =
            (key_of(&first.asked, streams, settings), key_of(&second.asked, streams, settings));
        oracles.either(
            |oracle| {
                tell(oracle, key_two, &second.asked, &two, now)?;
                tell(oracle, key_one, &first.asked, &one, now)
            },
            |oracle| {
                tell(oracle, key_one, &first.asked, &one, now)?;
                tell(oracle, key_two, &second.asked, &two, now)
            },
        )?;
        self.count("two operations met in the table");
        for (id, answer) in [(outer, one), (inner, two)] {
            match self.ops.get_mut(&id) {
                Some(op) if op.asker.is_some() => op.answer = Some(answer),
                Some(_) | None => {
                    self.ops.remove(&id);
                }
            }
        }
        Ok(())
    }

    fn deliver(&mut self, id: OpId) -> Verdict {
        let Some(op) = self.ops.remove(&id) else { return Ok(()) };
        match (op.asker, op.answer) {
            (Some(asker), Some(answer)) => self.answer(op.worker, asker, answer),
            (asker, answer) => {
                self.ops.insert(id, Op { asker, answer, ..op });
                Ok(())
            }
        }
    }

    fn give_up(&mut self, id: OpId) -> Verdict {
        let Some(op) = self.ops.get_mut(&id) else { return Ok(()) };
        let Some(asker) = op.asker.take() else { return Ok(()) };
        let owner = owner_of(&op.asked);
        let (worker, unavailable, was_carried_out) = (op.worker, op.asked.unavailable(), op.answer.is_some());
        self.note_late(owner, !was_carried_out);
        if was_carried_out {
            self.ops.remove(&id);
            self.count("a reply is lost");
        }
        self.answer(worker, asker, unavailable)
    }

    fn answer(&mut self, worker: usize, asker: Asker, answer: StoreAnswer) -> Verdict {
        match asker {
            Asker::Stream { id, pass } if pass + 1 == self.stream(id).passes.len() => {
                self.feed(id, Event::StoreAnswered(answer))
            }
            Asker::Stream { id, pass } => self.drive(id, Some(pass), Event::StoreAnswered(answer)).map(drop),
            Asker::Outbox(entry) => {
                let now = self.clock(worker);
                self.nodes[worker].outbox.settle(entry, write_answer(answer), now, &mut |_| {});
                Ok(())
            }
        }
    }

    fn copy(&mut self, id: OpId) {
        let OpId::Stream(stream, nth) = id else { return };
        let Some(op) = self.ops.get(&id).filter(|op| op.answer.is_none()) else { return };
        let copy = Op { worker: op.worker, asker: None, asked: op.asked.clone(), answer: None };
        if self.copies.insert((stream, nth), ()).is_none() {
            self.ops.insert(OpId::CopyOf(stream, nth), copy);
            self.count("an operation was sent twice");
            self.stream(stream).late = true;
        }
    }

    fn tick(&mut self, worker: usize) -> Verdict {
        let ticked: Vec<u32> = self
            .streams
            .iter()
            .filter(|(_, stream)| stream.open && stream.worker == worker)
            .map(|(id, _)| *id)
            .collect();
        ticked.into_iter().try_for_each(|id| self.feed(id, Event::Ticked))
    }

    fn outbox(&mut self, worker: usize) -> Verdict {
        let (now, store_now) = (self.clock(worker), self.store_clock());
        let node = &mut self.nodes[worker];
        let Some((entry, hold, write)) = node.outbox.take_due(now) else { return Ok(()) };
        let asked = Asked::End(hold, write);
        node.taken_due += 1;
        let id = OpId::Outbox(worker, node.taken_due);
        if !self.settings.at_once {
            let asker = Some(Asker::Outbox(entry));
            self.ops.insert(id, Op { worker, asker, asked, answer: None });
            return Ok(());
        }
        let fails = node.fails_next.take();
        let mut answer = asked.unavailable();
        if fails != Some(false) {
            let carried_out = self.shelf.carry_out(worker, &asked, store_now);
            let key = key_of(&asked, &self.streams, &self.settings);
            self.oracles.all(|oracle| tell(oracle, key, &asked, &carried_out, store_now))?;
            note_stale(&carried_out, &mut self.tally);
            if fails.is_none() {
                answer = carried_out;
            }
        }
        self.answer(worker, Asker::Outbox(entry), answer)
    }

    /// The worker's VM is gone, and everything in it. What it asked for may still be carried out.
    fn trap(&mut self, worker: usize) -> Verdict {
        self.count("a worker died");
        self.nodes[worker] =
            Node { taken_due: self.nodes[worker].taken_due, ..Node::new(&self.configuration) };
        self.orphan(worker);
        let mut ended = Vec::new();
        for (id, stream) in self.streams.iter_mut().filter(|(_, stream)| stream.worker == worker) {
            if stream.open {
                ended.push(*id);
            }
            stream.open = false;
            stream.died = true;
            // A stream whose VM is gone is nobody's.
            stream.passes = vec![Exchange::bypassed(Rc::clone(&self.nodes[worker].worker))];
            stream.gate = Gate::Pass;
        }
        Ok(())
    }

    fn orphan(&mut self, worker: usize) {
        self.ops.retain(|_, op| op.worker != worker || op.answer.is_none());
        let late: Vec<Owner> =
            self.ops.values().filter(|op| op.worker == worker).map(|op| owner_of(&op.asked)).collect();
        self.ops.values_mut().filter(|op| op.worker == worker).for_each(|op| op.asker = None);
        late.into_iter().for_each(|owner| self.note_late(owner, true));
    }

    /// A listener update: the root goes once its streams are gone.
    fn reload(&mut self, worker: usize, heir: usize) -> Verdict {
        let is_busy = self.streams.values().any(|stream| stream.worker == worker && stream.open)
            || self
                .ops
                .values()
                .any(|op| op.worker == worker && matches!(op.asker, Some(Asker::Stream { .. })));
        if is_busy || worker == heir {
            return Ok(());
        }
        let (now, heirs_now) = (self.clock(worker), self.clock(heir));
        self.orphan(worker);
        let node = &mut self.nodes[worker];
        node.outbox.hurry(now);
        if let Some(bytes) = node.outbox.spill(1 << 20, now, &mut |_| {}) {
            self.nodes[heir].outbox.adopt(&bytes, heirs_now, &mut |_| {});
            self.count("an outbox was taken over");
            self.streams
                .values_mut()
                .filter(|stream| stream.worker == worker)
                .for_each(|stream| stream.worker = heir);
        }
        Ok(())
    }

    /// No more faults: everybody has to come to an end, and nothing may be left behind.
    pub fn settle(&mut self) -> Verdict {
        self.nodes.iter_mut().for_each(|node| node.fails_next = None);
        for _ in 0..40 {
            self.settle_once()?;
            self.now += 1_000;
        }
        if let Some((id, stream)) = self.streams.iter().find(|(_, stream)| stream.open) {
            let why = format!("stream {id} still waits: sent {}, gate {:?}", stream.sent, stream.gate);
            return broken(Broken::LeftWaiting, why);
        }
        if let Some((id, _)) =
            self.streams.iter().find(|(_, stream)| !stream.passes.iter().all(Exchange::is_inert))
        {
            return broken(Broken::LeftWaiting, format!("the exchange of stream {id} waits for nothing"));
        }
        let streams = &self.streams;
        // A late copy of a renewal, or of a claim, may bring a record back.
        let is_excused = |owner| {
            let stream = streams.values().find(|stream| stream.owner == owner);
            stream.is_none_or(|stream| stream.died || stream.late)
        };
        self.oracles.all(|oracle| oracle.recorded(is_excused))?;
        for (worker, node) in self.nodes.iter().enumerate() {
            if !node.outbox.is_empty() {
                return broken(Broken::LeftWaiting, format!("the outbox of worker {worker} is not empty"));
            }
            let places: Vec<_> = (0..WAITERS).map(|_| node.worker.begin_wait()).collect();
            if places.iter().any(Option::is_none) || node.worker.captured.taken() != 0 || node.claims != 0 {
                let (bytes, claims) = (node.worker.captured.taken(), node.claims);
                return broken(
                    Broken::Leaked,
                    format!("worker {worker}: {bytes} bytes, {claims} claims, {places:?}"),
                );
            }
        }
        Ok(())
    }

    fn settle_once(&mut self) -> Verdict {
        for id in self.streams.keys().copied().collect::<Vec<_>>() {
            self.step(Action::RequestEnd { id, trailers: false })?;
            for to in [
                Move::Reach,
                Move::Head { status: 200, attempts: 1, announced: false, end: true },
                Move::Chunk { end: true },
            ] {
                self.step(Action::Upstream { id, to })?;
            }
            self.step(Action::Close { id })?;
        }
        for worker in 0..self.nodes.len() {
            self.step(Action::Tick { worker })?;
            self.step(Action::Outbox { worker })?;
        }
        for id in self.ops.keys().copied().collect::<Vec<_>>() {
            self.step(Action::Apply(id))?;
            self.step(Action::Deliver(id))?;
        }
        Ok(())
    }

    /// Once every lease is over: no key may be held by nobody, and what was stored is still there.
    pub fn probe(&mut self, next_id: u32) -> Verdict {
        self.now += LOCK_TTL;
        for key in 0..self.settings.keys {
            let id = next_id + u32::from(key);
            self.step(Action::Start { id, worker: 0, key, body: 0 })?;
        }
        self.settle()
    }

    fn end(&mut self, id: u32, ending: Ending) {
        let stream = &self.streams[&id];
        if stream.forwarded {
            let (owner, ran_before, answer) = (stream.owner, stream.ran_before, stream.sent_bytes.clone());
            self.oracles.tell(|oracle| oracle.ended(owner, ending, ran_before, Some(answer.clone())));
        }
    }

    fn open(&mut self, id: u32) -> Option<&mut Stream> {
        self.streams.get_mut(&id).filter(|stream| stream.open)
    }

    fn stream(&mut self, id: u32) -> &mut Stream {
        self.streams.get_mut(&id).expect("a known stream")
    }

    fn clock(&self, worker: usize) -> Timestamp {
        Timestamp::from_millis(self.now + self.offsets[worker / self.settings.workers_per_envoy])
    }

    fn store_clock(&self) -> Timestamp {
        Timestamp::from_millis(self.now.saturating_add_signed(self.store_offset))
    }

    fn note_late(&mut self, owner: Owner, late: bool) {
        self.streams
            .values_mut()
            .filter(|stream| stream.owner == owner)
            .for_each(|stream| stream.late |= late);
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    /// How often requests with a key went to the upstream.
    pub fn most_executions(&self) -> usize {
        (0..self.settings.keys).map(|key| self.oracles.first().executions(key)).max().unwrap_or(0)
    }
}

impl Node {
    fn new(configuration: &config::Config) -> Self {
        Self {
            worker: Rc::new(Worker::new(configuration.clone())),
            outbox: Outbox::new(1 << 20),
            taken_due: 0,
            claims: 0,
            fails_next: None,
        }
    }
}

impl Stream {
    /// Its client has its answer.
    const fn is_over(&self) -> bool {
        self.answered
    }

    /// Half of a body; no two streams' are the same.
    fn next_chunk(&self, id: u32) -> Vec<u8> {
        format!("run {id:03}, {} bytes", self.sent_bytes.len() % 7).into_bytes()
    }

    /// What it comes to when the stream ends here.
    fn cut_off(&self) -> Ending {
        match self.head {
            None => Ending::Unknown,
            Some((status, _))
                if !self.sent_bytes.is_empty() && self.announced == Some(self.sent_bytes.len()) =>
            {
                Ending::Whole(status)
            }
            Some((status, _)) if self.response_end => Ending::Whole(status),
            Some((status, _)) => Ending::CutOff(status),
        }
    }
}

/// Tells the oracle what the store answered.
fn tell(oracle: &mut Oracle, key: u8, asked: &Asked, answer: &StoreAnswer, now: Timestamp) -> Verdict {
    match (asked, answer) {
        (Asked::Claim(claim), StoreAnswer::Claim(reply)) => {
            oracle.claimed(key, claim.terms.owner, claim.terms.fingerprint, now, reply)
        }
        (
            Asked::Renew(hold, write) | Asked::End(hold, write),
            StoreAnswer::Renew(reply) | StoreAnswer::End(reply),
        ) => oracle.written(key, hold.owner, (hold.fingerprint, hold.attempt), &plain(write), now, *reply),
        (Asked::Claim(_), StoreAnswer::Renew(_) | StoreAnswer::End(_))
        | (Asked::Renew(..) | Asked::End(..), StoreAnswer::Claim(_)) => {
            broken(Broken::WrongAnswer, "an answer of another kind")
        }
    }
}

fn note_stale(answer: &StoreAnswer, tally: &mut Tally) {
    if let StoreAnswer::Renew(Ok(WriteReply::Stale)) | StoreAnswer::End(Ok(WriteReply::Stale)) = answer {
        *tally.entry("a stale write").or_default() += 1;
    }
}

/// A write, as the oracle knows it.
pub fn plain(write: &Write) -> Written {
    match write {
        Write::Renew { .. } => Written::Renew,
        Write::Complete { response, .. } => Written::Complete(response.to_vec()),
        Write::Fail { reason, .. } => Written::Fail(*reason),
        Write::Release => Written::Release,
    }
}

fn write_answer(answer: StoreAnswer) -> Result<WriteReply, StoreError> {
    match answer {
        StoreAnswer::Renew(reply) | StoreAnswer::End(reply) => reply,
        StoreAnswer::Claim(_) => Err(StoreError::Unavailable),
    }
}

fn owner_of(asked: &Asked) -> Owner {
    match asked {
        Asked::Claim(claim) => claim.terms.owner,
        Asked::Renew(Hold { owner, .. }, _) | Asked::End(Hold { owner, .. }, _) => *owner,
    }
}

/// The key of an operation, by the owner that asks.
fn key_of(asked: &Asked, streams: &BTreeMap<u32, Stream>, _settings: &Settings) -> u8 {
    let owner = owner_of(asked);
    let [a, b, c, d, ..] = *owner.bytes();
    streams[&(u32::from_be_bytes([a, b, c, d]) - 1)].key
}

#[derive(Default)]
struct Choices(Vec<(usize, Action)>);

impl Choices {
    fn add(&mut self, weight: usize, action: Action) {
        if weight > 0 {
            self.0.push((weight, action));
        }
    }

    fn pick(&self, rng: &mut Rng) -> Action {
        let mut left = rng.below(self.0.iter().map(|(weight, _)| weight).sum());
        for (weight, action) in &self.0 {
            if left < *weight {
                return *action;
            }
            left -= weight;
        }
        panic!("a weight was chosen")
    }
}
