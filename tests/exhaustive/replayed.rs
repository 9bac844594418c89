//! The product's state machines as functions of what they were told: an exchange and an outbox can be neither copied
//! nor compared, but the same events always make the same of them. What was once worked out is remembered.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::{Arc, LazyLock, Mutex};

use idempotency::clock::Timestamp;
use idempotency::config::{self, Config};
use idempotency::exchange::{Event, Exchange, Gate, StoreAnswer, Worker, drive};
use idempotency::fingerprint::Fingerprint;
use idempotency::headers::{Attributes, HeaderBlock, RequestHead};
use idempotency::key::StoreKey;
use idempotency::outcome::{ClosingFacts, ResponseFacts};
use idempotency::record::Owner;
use idempotency::store::outbox::Outbox;
use idempotency::store::{Claim, Hold, StoreError, Write, WriteReply};

use crate::oracle::Written;
use crate::taken::{Asked, Taken, Taking};

/// An outbox tries again after less than that.
const BOX_PAUSE: u64 = 1_500;

/// Names a client; also its place.
pub type ClientId = u8;

/// What an exchange is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Told {
    Request,
    Answered(StoreAnswer),
    /// The upstream's whole response, in its head.
    Status(u16),
    /// The head of a response whose body follows.
    Head(u16),
    Body,
    Reset,
    Ticked,
    Closed,
    ClientGone,
}

/// When, in milliseconds, and what.
type Log = Vec<(u64, Told)>;

/// Stands for everything that an exchange was told. The same events have the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LogId(usize);

/// Stands for everything that an outbox was told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BoxLogId(usize);

/// An operation, as plain data.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Wanted {
    Claim,
    Renew { attempt: u32 },
    End { attempt: u32, write: Written },
}

/// What the filter answered itself.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reply {
    pub status: u16,
    /// `None` for a replay.
    pub refusal: Option<String>,
    pub body: Vec<u8>,
}

/// What the last event of a log came to.
#[derive(Debug, Clone)]
pub struct View {
    pub wanted: Vec<Wanted>,
    pub outbox: Vec<(u32, Written)>,
    pub reply: Option<Reply>,
    pub unprotected: bool,
    pub gate: Gate,
    pub is_inert: bool,
}

/// What an outbox is told.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum BoxTold {
    Pushed {
        client: ClientId,
        attempt: u32,
        write: Written,
    },
    Asked,
    /// What came of the how-many-th operation that it gave out.
    Settled(usize, Result<WriteReply, StoreError>),
}

type BoxLog = Vec<(u64, BoxTold)>;

/// What the last event of an outbox's log came to.
#[derive(Debug, Clone)]
pub struct BoxView {
    /// The operation it gave out: whose, and what.
    pub due: Option<(ClientId, Wanted)>,
    /// How often it gave one out.
    pub given: usize,
    pub is_empty: bool,
}

/// A configuration, and what follows from it.
#[derive(Debug, Clone)]
pub struct Product {
    /// Tells it from the others.
    pub name: &'static str,
    /// Its rule, as JSON.
    pub rule: String,
    pub bodies: [u8; 3],
    /// The claims that the clients' requests come to.
    pub claims: Vec<Claim>,
}

struct NoAttributes;

impl Attributes for NoAttributes {
    fn attribute(&self, _path: &[&str]) -> Option<Vec<u8>> {
        None
    }
}

/// What was worked out so far: each number's log and view.
#[derive(Default)]
struct Memory {
    exchange_ids: HashMap<(&'static str, ClientId, Option<LogId>, u64, Told), LogId>,
    exchanges: Vec<(Log, Arc<View>)>,
    outbox_ids: HashMap<(&'static str, Option<BoxLogId>, u64, BoxTold), BoxLogId>,
    outboxes: Vec<(BoxLog, Arc<BoxView>)>,
}

static MEMORY: LazyLock<Mutex<Memory>> = LazyLock::new(Mutex::default);

thread_local! {
    static WORKERS: RefCell<HashMap<&'static str, Rc<Worker>>> = RefCell::default();
}

impl Product {
    pub fn new(name: &'static str, rule: &serde_json::Value, bodies: [u8; 3]) -> Self {
        let mut product = Self { name, rule: rule.to_string(), bodies, claims: Vec::new() };
        product.claims = (0..3)
            .map(|client| {
                let (_, taken, _) = product.run(client, &vec![(0, Told::Request)]);
                match taken.asked.as_slice() {
                    [Asked::Claim(claim)] => claim.clone(),
                    other => panic!("a request asks for a claim, not for {other:?}"),
                }
            })
            .collect();
        product
    }

    fn config(&self) -> Config {
        let rule: serde_json::Value = serde_json::from_str(&self.rule).unwrap();
        let whole = serde_json::json!({"store": {"shared_data": {}}, "rules": [rule]});
        config::load(whole.to_string().as_bytes()).unwrap()
    }

    fn worker(&self) -> Rc<Worker> {
        WORKERS.with_borrow_mut(|workers| {
            Rc::clone(workers.entry(self.name).or_insert_with(|| Rc::new(Worker::new(self.config()))))
        })
    }

    pub fn owner(client: ClientId) -> Owner {
        Owner::from_bytes([client + 1; 16])
    }

    pub fn fingerprint(&self, client: ClientId) -> Fingerprint {
        self.claims[usize::from(client)].terms.fingerprint
    }

    pub fn key(&self) -> StoreKey {
        self.claims[0].key
    }

    pub fn hold(&self, client: ClientId, attempt: u32) -> Hold {
        Hold { key: self.key(), owner: Self::owner(client), fingerprint: self.fingerprint(client), attempt }
    }

    /// The whole body that the upstream answers a client with.
    pub fn response(client: ClientId) -> Vec<u8> {
        format!("paid by {client}").into_bytes()
    }

    /// The log with one event more.
    pub fn told(&self, client: ClientId, before: Option<LogId>, at: u64, told: Told) -> LogId {
        let known = (self.name, client, before, at, told);
        let log = {
            let memory = MEMORY.lock().unwrap();
            if let Some(id) = memory.exchange_ids.get(&known) {
                return *id;
            }
            let mut log = before.map_or_else(Log::new, |before| memory.exchanges[before.0].0.clone());
            log.push((at, known.4.clone()));
            log
        };
        let view = Arc::new(self.work_out(client, &log));
        let mut memory = MEMORY.lock().unwrap();
        let id = LogId(memory.exchanges.len());
        memory.exchanges.push((log, view));
        memory.exchange_ids.insert(known, id);
        id
    }

    /// What the newest event of a log came to.
    pub fn view(log: LogId) -> Arc<View> {
        Arc::clone(&MEMORY.lock().unwrap().exchanges[log.0].1)
    }

    fn work_out(&self, client: ClientId, log: &Log) -> View {
        let (exchange, taken, gate) = self.run(client, log);
        View {
            wanted: taken.asked.iter().map(wanted).collect(),
            outbox: taken.outbox.iter().map(|(hold, write, _)| (hold.attempt, written(write))).collect(),
            reply: taken.reply.as_ref().map(|reply| {
                let headers = HeaderBlock::parse(reply.headers.clone()).unwrap();
                let refusal = headers.first("x-idempotency-refusal");
                Reply {
                    status: reply.status,
                    refusal: refusal.map(|kind| String::from_utf8(kind.to_vec()).unwrap()),
                    body: reply.body().to_vec(),
                }
            }),
            unprotected: taken.request_headers.iter().any(|(name, _)| *name == "idempotency-protection"),
            gate,
            is_inert: exchange.is_inert(),
        }
    }

    fn run(&self, client: ClientId, log: &Log) -> (Exchange, Taken, Gate) {
        let mut exchange = Exchange::new(self.worker());
        let (mut taken, mut gate) = (Taken::default(), Gate::Pass);
        for (at, told) in log {
            (taken, gate) = self.tell(&mut exchange, client, told, Timestamp::from_millis(*at));
        }
        (exchange, taken, gate)
    }

    fn tell(&self, exchange: &mut Exchange, client: ClientId, told: &Told, now: Timestamp) -> (Taken, Gate) {
        let mut io = Taking { taken: Taken::default(), answer: &mut |_| None };
        let mut feed = |event: Event<'_>| drive(exchange, event, now, &mut io);
        let head = |status: &str, length: Option<&str>| {
            let length = length.map(|length| ("content-length", length));
            HeaderBlock::from_pairs([(":status", status)].into_iter().chain(length))
        };
        let gate = match told {
            Told::Request => {
                let pairs = [
                    (":method", "POST"),
                    (":authority", "api.example.com"),
                    (":path", "/pay"),
                    ("idempotency-key", "k"),
                    ("x-account-id", "alice"),
                ];
                let block = HeaderBlock::from_pairs(pairs);
                let head = RequestHead { headers: &block, attributes: &NoAttributes };
                let rule = Rc::clone(&self.worker().config.rules[0]);
                feed(Event::RequestHead { rule, head: &head, end: false, owner: Self::owner(client) });
                feed(Event::RequestBody { chunk: &[self.bodies[usize::from(client)]], end: true })
            }
            Told::Answered(answer) => feed(Event::StoreAnswered(answer.clone())),
            Told::Status(status) | Told::Head(status) => {
                let end = matches!(told, Told::Status(_));
                let length = Self::response(client).len().to_string();
                let headers = head(&status.to_string(), (!end).then_some(&length));
                let facts =
                    ResponseFacts { code_details: b"via_upstream", attempts: Some(1), status: *status };
                feed(Event::ResponseHead { facts, headers: Some(&headers), end })
            }
            Told::Body => feed(Event::ResponseBody { chunk: &Self::response(client), skipped: 0, end: true }),
            Told::Reset => {
                let details = b"upstream_reset_before_response_started{connection_termination}";
                let facts = ResponseFacts { code_details: details, attempts: Some(1), status: 503 };
                feed(Event::ResponseHead { facts, headers: Some(&head("503", None)), end: true })
            }
            Told::Ticked => feed(Event::Ticked),
            Told::Closed => {
                feed(Event::StreamClosed(ClosingFacts { code_details: b"via_upstream", flags: 0 }))
            }
            Told::ClientGone => {
                let facts = ClosingFacts { code_details: b"downstream_remote_disconnect", flags: 0x4000 };
                feed(Event::StreamClosed(facts))
            }
        };
        (io.taken, gate)
    }

    /// An outbox's log with one event more; each event comes a little later than the one before.
    pub fn box_told(&self, before: Option<BoxLogId>, now: u64, told: BoxTold) -> BoxLogId {
        let known = (self.name, before, now, told);
        let log = {
            let memory = MEMORY.lock().unwrap();
            if let Some(id) = memory.outbox_ids.get(&known) {
                return *id;
            }
            let mut log = before.map_or_else(BoxLog::new, |before| memory.outboxes[before.0].0.clone());
            log.push((now + BOX_PAUSE * log.len() as u64, known.3.clone()));
            log
        };
        let view = Arc::new(self.work_out_box(&log));
        let mut memory = MEMORY.lock().unwrap();
        let id = BoxLogId(memory.outboxes.len());
        memory.outboxes.push((log, view));
        memory.outbox_ids.insert(known, id);
        id
    }

    /// What the newest event of an outbox's log came to.
    pub fn box_view(log: BoxLogId) -> Arc<BoxView> {
        Arc::clone(&MEMORY.lock().unwrap().outboxes[log.0].1)
    }

    fn work_out_box(&self, log: &BoxLog) -> BoxView {
        let rule = Rc::clone(&self.worker().config.rules[0]);
        let (mut outbox, mut given, mut due) = (Outbox::new(1 << 20), Vec::new(), None);
        for (at, told) in log {
            let now = Timestamp::from_millis(*at);
            due = None;
            match told {
                BoxTold::Pushed { client, attempt, write } => {
                    let hold = self.hold(*client, *attempt);
                    outbox.push(hold, self.write(write), &rule, now, &mut |_| {});
                }
                BoxTold::Asked => {
                    if let Some((entry, hold, write)) = outbox.take_due(now) {
                        given.push(entry);
                        let client = hold.owner.bytes()[0] - 1;
                        due = Some((client, wanted(&Asked::End(hold, write))));
                    }
                }
                BoxTold::Settled(nth, answer) => outbox.settle(given[*nth], *answer, now, &mut |_| {}),
            }
        }
        BoxView { due, given: given.len(), is_empty: outbox.is_empty() }
    }

    /// A write, with what only the store needs.
    pub fn write(&self, write: &Written) -> Write {
        let worker = self.worker();
        let rule = &worker.config.rules[0];
        match write {
            Written::Renew => Write::Renew { lock_ttl: rule.lock_ttl, record_ttl: rule.record_ttl },
            Written::Complete(bytes) => {
                Write::Complete { response: Rc::from(bytes.as_slice()), record_ttl: rule.record_ttl }
            }
            Written::Fail(reason) => Write::Fail { reason: *reason, failed_ttl: rule.failed_ttl },
            Written::Release => Write::Release,
        }
    }
}

fn wanted(asked: &Asked) -> Wanted {
    match asked {
        Asked::Claim(_) => Wanted::Claim,
        Asked::Renew(hold, _) => Wanted::Renew { attempt: hold.attempt },
        Asked::End(hold, write) => Wanted::End { attempt: hold.attempt, write: written(write) },
    }
}

fn written(write: &Write) -> Written {
    match write {
        Write::Renew { .. } => Written::Renew,
        Write::Complete { response, .. } => Written::Complete(response.to_vec()),
        Write::Fail { reason, .. } => Written::Fail(*reason),
        Write::Release => Written::Release,
    }
}
