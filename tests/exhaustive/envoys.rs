//! Two Envoys, three requests with one key and one store, as a state machine that a model checker can walk through.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use idempotency::clock::Timestamp;
use idempotency::exchange::{Gate, StoreAnswer};
use idempotency::record::{Reason, RecordState};
use idempotency::store::{Store, StoreError, WriteReply};
use stateright::{Model, Property};

use crate::oracle::{Broken, Ending, Oracle, Rules, Verdict, Written, broken};
use crate::reference::ReferenceStore;
use crate::replayed::{BoxLogId, BoxTold, ClientId, LogId, Product, Told, Wanted};

pub const LOCK_TTL: u64 = 60_000;
/// A third of the lease, when it is renewed.
const RENEWED: u64 = 21_000;
const ENVOYS: u8 = 2;
const BEGIN: u64 = 1_000_000;

/// A configuration, its rules as the oracle knows them, and how much may go wrong.
#[derive(Debug, Clone)]
pub struct Envoys {
    pub product: Product,
    pub rules: Rules,
    pub budget: Budget,
    /// Two or three.
    pub requests: u8,
    /// The upstream's statuses.
    pub statuses: Vec<u16>,
    pub mistake: Option<Mistake>,
    /// The upstream's response arrives at once.
    pub in_one_go: bool,
    /// What happened somewhere: outside of the states, which it would multiply.
    pub seen: Seen,
}

/// A deliberate mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Whoever writes is taken for the owner.
    NoFencing,
    /// Nobody is told of a lost reply.
    SilentStore,
    /// A client that leaves gives its claim back.
    ReleaseOnClientGone,
}

pub type Seen = Arc<Mutex<BTreeMap<&'static str, u64>>>;

/// How often each thing may still happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Budget {
    pub crashes: u8,
    pub lost_replies: u8,
    pub late_replies: u8,
    pub lease_ends: u8,
    pub renewals: u8,
    pub clients_gone: u8,
    pub resets: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    NotStarted,
    /// Its request is held.
    Held,
    Forwarded,
    /// The head of the upstream's response has gone through.
    Responding(u16),
    /// All of the response is there; its end may be held.
    Ended,
    Answered,
    /// It left, or its Envoy did.
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Client {
    pub phase: Phase,
    log: Option<LogId>,
}

/// Who asked: an exchange, with a number to tell its operations apart, or an outbox, the how-many-th time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Asker {
    Client(ClientId, u8),
    Outbox(u8, u8),
    /// The outbox of an Envoy that crashed.
    Lost(u8, u8),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Op {
    owner: ClientId,
    wanted: Wanted,
    answer: Option<StoreAnswer>,
    /// Nobody waits for the answer any more.
    is_orphan: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct State {
    now: u64,
    store: Arc<ReferenceStore>,
    pub clients: [Client; 3],
    outboxes: [Option<BoxLogId>; 2],
    ops: BTreeMap<Asker, Op>,
    crashed: u8,
    budget: Budget,
    pub oracle: Arc<Oracle>,
    pub broken: Option<Broken>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    Start(ClientId),
    /// The store carries it out, and whoever asked is told at once. What others do in between could as well come
    /// before or after; what the clock does is [`Action::Delay`].
    Serve(Asker),
    /// It is carried out, and nobody hears of it.
    LoseReply(Asker),
    /// It is carried out, and whoever asked is told some time later.
    Delay(Asker),
    /// The asker is told that the store is unavailable; the operation is carried out some time later, or so late that
    /// it makes no difference.
    GiveUp(Asker),
    Respond(ClientId, u16),
    Body(ClientId),
    Reset(ClientId),
    ClientGone(ClientId),
    Tick(ClientId),
    Outbox(u8),
    Crash(u8),
    TimeToRenew,
    LeaseEnd,
}

const fn envoy_of(client: ClientId) -> u8 {
    client % ENVOYS
}

fn has_started(client: &Client) -> bool {
    client.phase != Phase::NotStarted
}

impl State {
    fn time(&self) -> Timestamp {
        Timestamp::from_millis(self.now)
    }

    fn client(&mut self, id: ClientId) -> &mut Client {
        &mut self.clients[usize::from(id)]
    }

    pub fn is_everyone_answered(&self) -> bool {
        self.clients.iter().all(|client| matches!(client.phase, Phase::Answered | Phase::Gone))
    }
}

impl Envoys {
    /// Tells a client's exchange, and does what Envoy does then.
    fn tell(&self, state: &mut State, id: ClientId, told: Told) -> Verdict {
        let now = state.now;
        let client = state.client(id);
        let log = self.product.told(id, client.log, now, told);
        client.log = Some(log);
        let view = Product::view(log);
        for wanted in view.wanted.iter().cloned() {
            let free = (0..).find(|nth| !state.ops.contains_key(&Asker::Client(id, *nth)));
            let asker = Asker::Client(id, free.unwrap());
            state.ops.insert(asker, Op { owner: id, wanted, answer: None, is_orphan: false });
        }
        for (attempt, write) in view.outbox.iter().cloned() {
            let pushed = BoxTold::Pushed { client: id, attempt, write };
            self.tell_outbox(state, envoy_of(id), pushed);
        }
        let phase = state.client(id).phase;
        if let Some(reply) = &view.reply {
            if phase != Phase::Held {
                return broken(Broken::WrongAnswer, format!("{reply:?} while {phase:?}"));
            }
            match reply.refusal.as_deref() {
                None => {
                    let body = self.product.bodies[usize::from(id)];
                    state.oracle.replayed(0, body, reply.status, &reply.body)?;
                    self.saw("a replay");
                }
                Some("in-flight") => self.saw("a duplicate is refused"),
                Some("mismatch") => self.saw("a mismatch is refused"),
                Some("failed") => self.saw("a failure is kept"),
                Some("abandoned") => self.saw("an abandoned record is kept"),
                Some("store-unavailable") => self.saw("the store is unavailable"),
                Some(other) => return broken(Broken::WrongAnswer, format!("refused as {other}")),
            }
            state.client(id).phase = Phase::Answered;
            return self.tell(state, id, Told::Closed);
        }
        if phase == Phase::Held && view.gate != Gate::HoldRequest {
            state.client(id).phase = Phase::Forwarded;
            let body = self.product.bodies[usize::from(id)];
            if state.oracle.executions(0) > 0 {
                self.saw("the upstream runs again");
            }
            return Arc::make_mut(&mut state.oracle).forwarded(
                0,
                body,
                Product::owner(id),
                !view.unprotected,
            );
        }
        if phase == Phase::Ended && view.gate == Gate::Pass {
            let is_out = state.ops.iter().any(|(asker, op)| {
                matches!(asker, Asker::Client(asker, _) if *asker == id)
                    && !op.is_orphan
                    && matches!(op.wanted, Wanted::End { .. })
            });
            if is_out {
                return broken(Broken::SeenBeforeStored, format!("client {id}"));
            }
            state.client(id).phase = Phase::Answered;
            return self.tell(state, id, Told::Closed);
        }
        Ok(())
    }

    fn saw(&self, what: &'static str) {
        *self.seen.lock().unwrap().entry(what).or_default() += 1;
    }

    /// What can make no difference any more is forgotten: fewer states are told apart.
    fn forget(state: &mut State) {
        for client in &mut state.clients {
            let is_over = matches!(client.phase, Phase::Answered | Phase::Gone);
            if is_over && client.log.is_some_and(|log| Product::view(log).is_inert) {
                client.log = None;
            }
        }
    }

    fn tell_outbox(&self, state: &mut State, envoy: u8, told: BoxTold) {
        let log = self.product.box_told(state.outboxes[usize::from(envoy)], state.now, told);
        // What an outbox was told before it was empty makes no difference.
        let is_out = state.ops.keys().any(|asker| matches!(asker, Asker::Outbox(of, _) if *of == envoy));
        let is_over = Product::box_view(log).is_empty && !is_out;
        state.outboxes[usize::from(envoy)] = (!is_over).then_some(log);
    }

    fn end(&self, state: &mut State, id: ClientId, ending: Ending) {
        let answer = match ending {
            Ending::Whole(200) => Some(Product::response(id)),
            Ending::Whole(_) => Some(Vec::new()),
            Ending::CutOff(_) | Ending::Unknown | Ending::NotSent => None,
        };
        Arc::make_mut(&mut state.oracle).ended(Product::owner(id), ending, false, answer);
    }

    /// The store carries an operation out.
    fn apply(&self, state: &mut State, asker: Asker) -> Verdict {
        let now = state.time();
        let Some(op) = state.ops.get(&asker) else { return Ok(()) };
        let (id, wanted) = (op.owner, op.wanted.clone());
        let owner = Product::owner(id);
        let (attempt, write) = match wanted {
            Wanted::Claim => {
                let claim = &self.product.claims[usize::from(id)];
                let reply = Arc::make_mut(&mut state.store).claim(claim, now);
                Arc::make_mut(&mut state.oracle).claimed(0, owner, claim.terms.fingerprint, now, &reply)?;
                return self.keep(state, asker, StoreAnswer::Claim(reply));
            }
            Wanted::Renew { attempt } => (attempt, Written::Renew),
            Wanted::End { attempt, write: Written::Fail(Reason::ClientGone) }
                if self.mistake == Some(Mistake::ReleaseOnClientGone) =>
            {
                (attempt, Written::Release)
            }
            Wanted::End { attempt, write } => (attempt, write),
        };
        let mut hold = self.product.hold(id, attempt);
        if let Some(found) = state.store.0.get(&hold.key).filter(|_| self.mistake == Some(Mistake::NoFencing))
        {
            hold.owner = found.owner;
        }
        let reply = Arc::make_mut(&mut state.store).write(&hold, &self.product.write(&write), now);
        if reply == Ok(WriteReply::Stale) {
            self.saw("a stale write is refused");
        }
        Arc::make_mut(&mut state.oracle).written(
            0,
            owner,
            (self.product.fingerprint(id), attempt),
            &write,
            now,
            reply,
        )?;
        self.keep(state, asker, StoreAnswer::End(reply))
    }

    fn keep(&self, state: &mut State, asker: Asker, answer: StoreAnswer) -> Verdict {
        let Some(op) = state.ops.get_mut(&asker) else { return Ok(()) };
        op.answer = Some(answer);
        if op.is_orphan {
            state.ops.remove(&asker);
        }
        Ok(())
    }

    /// Hands an answer to whoever asked.
    fn answer(&self, state: &mut State, asker: Asker, wanted: &Wanted, answer: StoreAnswer) -> Verdict {
        match (asker, wanted, answer) {
            (
                Asker::Client(id, _),
                Wanted::Renew { .. },
                StoreAnswer::Renew(reply) | StoreAnswer::End(reply),
            ) => self.tell(state, id, Told::Answered(StoreAnswer::Renew(reply))),
            (Asker::Client(id, _), _, answer) => self.tell(state, id, Told::Answered(answer)),
            (Asker::Outbox(envoy, nth), _, StoreAnswer::Renew(reply) | StoreAnswer::End(reply)) => {
                self.tell_outbox(state, envoy, BoxTold::Settled(usize::from(nth), reply));
                Ok(())
            }
            (Asker::Outbox(..) | Asker::Lost(..), _, _) => {
                broken(Broken::WrongAnswer, "an answer that nobody asked for")
            }
        }
    }

    /// `stays`: it may still be carried out.
    fn give_up(&self, state: &mut State, asker: Asker, stays: bool) -> Verdict {
        let Some(op) = state.ops.get_mut(&asker) else { return Ok(()) };
        let wanted = op.wanted.clone();
        op.is_orphan = true;
        if !stays {
            state.ops.remove(&asker);
        }
        let unavailable = match wanted {
            Wanted::Claim => StoreAnswer::Claim(Err(StoreError::Unavailable)),
            Wanted::Renew { .. } | Wanted::End { .. } => StoreAnswer::End(Err(StoreError::Unavailable)),
        };
        self.answer(state, asker, &wanted, unavailable)
    }

    fn crash(&self, state: &mut State, envoy: u8) {
        state.crashed += 1;
        for id in (0..3).filter(|id| envoy_of(*id) == envoy) {
            let client = state.client(id);
            let is_over = matches!(client.phase, Phase::Answered | Phase::Gone);
            if client.phase != Phase::NotStarted {
                client.log = None;
                client.phase = if is_over { client.phase } else { Phase::Gone };
            }
        }
        state.outboxes[usize::from(envoy)] = None;
        let is_its = |asker: &Asker| match asker {
            Asker::Client(id, _) => envoy_of(*id) == envoy,
            Asker::Outbox(of, _) => *of == envoy,
            Asker::Lost(..) => false,
        };
        for (asker, op) in std::mem::take(&mut state.ops) {
            let lost = match asker {
                Asker::Outbox(of, nth) if of == envoy => Asker::Lost(of, nth),
                Asker::Client(..) | Asker::Outbox(..) | Asker::Lost(..) => asker,
            };
            if !is_its(&asker) {
                state.ops.insert(asker, op);
            } else if op.answer.is_none() {
                state.ops.insert(lost, Op { is_orphan: true, ..op });
            }
        }
    }

    fn step(&self, state: &mut State, action: Action) -> Verdict {
        match action {
            Action::Start(id) => {
                state.client(id).phase = Phase::Held;
                self.tell(state, id, Told::Request)
            }
            Action::Serve(asker) => {
                if state.ops.get(&asker).is_some_and(|op| op.answer.is_none()) {
                    self.apply(state, asker)?;
                }
                match state.ops.remove(&asker) {
                    Some(Op { wanted, answer: Some(answer), .. }) => {
                        self.answer(state, asker, &wanted, answer)
                    }
                    Some(_) | None => Ok(()),
                }
            }
            Action::LoseReply(asker) => {
                state.budget.lost_replies -= 1;
                self.apply(state, asker)?;
                if self.mistake == Some(Mistake::SilentStore) {
                    state.ops.remove(&asker);
                    return Ok(());
                }
                self.give_up(state, asker, false)
            }
            Action::Delay(asker) => {
                state.budget.late_replies -= 1;
                self.apply(state, asker)
            }
            Action::GiveUp(asker) => {
                state.budget.late_replies -= 1;
                self.give_up(state, asker, true)
            }
            Action::Respond(id, 200) => {
                state.client(id).phase = Phase::Responding(200);
                self.tell(state, id, Told::Head(200))?;
                if self.in_one_go { self.step(state, Action::Body(id)) } else { Ok(()) }
            }
            Action::Respond(id, status) => {
                state.client(id).phase = Phase::Ended;
                self.end(state, id, Ending::Whole(status));
                self.tell(state, id, Told::Status(status))
            }
            Action::Body(id) => {
                state.client(id).phase = Phase::Ended;
                self.end(state, id, Ending::Whole(200));
                self.tell(state, id, Told::Body)
            }
            Action::Reset(id) => {
                state.budget.resets -= 1;
                state.client(id).phase = Phase::Ended;
                self.end(state, id, Ending::Unknown);
                self.tell(state, id, Told::Reset)
            }
            Action::ClientGone(id) => {
                state.budget.clients_gone -= 1;
                let client = state.client(id);
                let ending = match client.phase {
                    Phase::Responding(status) => Ending::CutOff(status),
                    Phase::NotStarted
                    | Phase::Held
                    | Phase::Forwarded
                    | Phase::Ended
                    | Phase::Answered
                    | Phase::Gone => Ending::Unknown,
                };
                client.phase = Phase::Gone;
                self.end(state, id, ending);
                self.tell(state, id, Told::ClientGone)
            }
            Action::Tick(id) => self.tell(state, id, Told::Ticked),
            Action::Outbox(envoy) => {
                self.tell_outbox(state, envoy, BoxTold::Asked);
                let Some(log) = state.outboxes[usize::from(envoy)] else { return Ok(()) };
                let view = Product::box_view(log);
                if let Some((owner, wanted)) = view.due.clone() {
                    let asker = Asker::Outbox(envoy, u8::try_from(view.given - 1).unwrap());
                    state.ops.insert(asker, Op { owner, wanted, answer: None, is_orphan: false });
                }
                Ok(())
            }
            Action::Crash(envoy) => {
                state.budget.crashes -= 1;
                self.crash(state, envoy);
                Ok(())
            }
            Action::TimeToRenew => {
                state.budget.renewals -= 1;
                state.now += RENEWED;
                Ok(())
            }
            Action::LeaseEnd => {
                state.budget.lease_ends -= 1;
                state.now += LOCK_TTL;
                Ok(())
            }
        }
    }

    fn offer(&self, state: &State, actions: &mut Vec<Action>) {
        for (id, client) in (0..).zip(&state.clients) {
            match client.phase {
                // The first and the third client are alike but for the request: one order of the two is enough.
                Phase::NotStarted if id == 2 && self.are_alike() && !has_started(&state.clients[0]) => {}
                Phase::NotStarted => actions.push(Action::Start(id)),
                Phase::Forwarded => {
                    actions.extend(self.statuses.iter().map(|status| Action::Respond(id, *status)));
                    actions.extend((state.budget.resets > 0).then_some(Action::Reset(id)));
                }
                Phase::Responding(_) => actions.push(Action::Body(id)),
                Phase::Held | Phase::Ended | Phase::Answered | Phase::Gone => {}
            }
            let is_open =
                matches!(client.phase, Phase::Held | Phase::Forwarded | Phase::Responding(_) | Phase::Ended);
            if is_open && state.budget.clients_gone > 0 {
                actions.push(Action::ClientGone(id));
            }
            if is_open && self.would_renew(state, id) {
                actions.push(Action::Tick(id));
            }
        }
        for (asker, op) in &state.ops {
            actions.push(Action::Serve(*asker));
            if op.is_orphan || op.answer.is_some() {
                continue;
            }
            actions.extend((state.budget.lost_replies > 0).then_some(Action::LoseReply(*asker)));
            if state.budget.late_replies > 0 {
                actions.extend([Action::Delay(*asker), Action::GiveUp(*asker)]);
            }
        }
        for (envoy, log) in (0..ENVOYS).zip(&state.outboxes) {
            if log.is_some_and(|log| self.would_write(state, log)) {
                actions.push(Action::Outbox(envoy));
            }
            let lives =
                |id: u8| envoy_of(id) == envoy && state.clients[usize::from(id)].phase != Phase::NotStarted;
            if state.budget.crashes > 0 && (0..3).any(lives) {
                actions.push(Action::Crash(envoy));
            }
        }
        let is_in_flight =
            state.store.0.values().any(|record| matches!(record.state, RecordState::InFlight { .. }));
        if is_in_flight {
            actions.extend((state.budget.renewals > 0).then_some(Action::TimeToRenew));
            actions.extend((state.budget.lease_ends > 0).then_some(Action::LeaseEnd));
        }
    }

    const fn are_alike(&self) -> bool {
        let [first, _, third] = self.product.bodies;
        first == third
    }

    fn would_renew(&self, state: &State, id: ClientId) -> bool {
        if state.now == BEGIN {
            return false;
        }
        let log = self.product.told(id, state.clients[usize::from(id)].log, state.now, Told::Ticked);
        !Product::view(log).wanted.is_empty()
    }

    fn would_write(&self, state: &State, log: BoxLogId) -> bool {
        let log = self.product.box_told(Some(log), state.now, BoxTold::Asked);
        Product::box_view(log).due.is_some()
    }

    /// Nothing can happen any more.
    pub fn is_final(&self, state: &State) -> bool {
        let mut actions = Vec::new();
        self.actions(state, &mut actions);
        actions.is_empty()
    }

    /// Nothing waits, and nothing was forgotten.
    pub fn is_at_rest(state: &State) -> bool {
        let mut logs = state.clients.iter().filter_map(|client| client.log);
        logs.all(|log| Product::view(log).is_inert)
            && state.is_everyone_answered()
            && state.ops.is_empty()
            && state.outboxes.iter().flatten().all(|log| Product::box_view(*log).is_empty)
    }
}

impl Model for Envoys {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client { phase: Phase::NotStarted, log: None };
        let absent = Client { phase: Phase::Gone, log: None };
        let third = if self.requests > 2 { client.clone() } else { absent };
        vec![State {
            now: BEGIN,
            store: Arc::default(),
            clients: [client.clone(), client, third],
            outboxes: [None, None],
            ops: BTreeMap::new(),
            crashed: 0,
            budget: self.budget,
            oracle: Arc::new(Oracle::new(self.rules.clone())),
            broken: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.broken.is_none() {
            self.offer(state, actions);
        }
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        let mut state = last.clone();
        if let Err(violation) = self.step(&mut state, action) {
            state.broken = Some(violation.broken);
        }
        Self::forget(&mut state);
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn not(state: &State, broken: Broken) -> bool {
            state.broken != Some(broken)
        }
        vec![
            Property::always("at most one live owner", |_, s: &State| not(s, Broken::TwoOwners)),
            Property::always("a stale owner never overwrites", |_, s: &State| {
                not(s, Broken::StaleOverwrites)
            }),
            Property::always(
                "at most one execution while no lease ran out and no release was due",
                |_, s: &State| not(s, Broken::RanAgain),
            ),
            Property::always("nothing is forwarded without a claim", |_, s: &State| not(s, Broken::NoClaim)),
            Property::always("a replay is what was stored first", |_, s: &State| {
                not(s, Broken::ReplayDiffers)
            }),
            Property::always("a mismatch is never replayed", |_, s: &State| not(s, Broken::MismatchReplayed)),
            Property::always("no key is held beyond its lease", |_, s: &State| not(s, Broken::Wedged)),
            Property::always("the store's answers agree with what happened", |_, s: &State| {
                not(s, Broken::WrongAnswer)
            }),
            Property::always("a response ends after it was stored", |_, s: &State| {
                not(s, Broken::SeenBeforeStored)
            }),
            Property::always(
                "where nothing can happen any more, nothing waits",
                |model: &Self, s: &State| {
                    s.broken.is_some() || !s.ops.is_empty() || !model.is_final(s) || Self::is_at_rest(s)
                },
            ),
            Property::eventually("every client is answered", |_, s: &State| {
                s.is_everyone_answered() || s.broken.is_some()
            }),
        ]
    }
}
