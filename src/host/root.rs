//! The root context: one per worker and plugin configuration. Loads the configuration, opens the store, and acts
//! for streams when time passes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::abi::HttpContext;
use super::execution::{self, Executions, HeldRequest};
use super::hostcalls::{self, Buffer};
use super::io::Acting;
use super::metrics::Metrics;
use super::random::RandomOwners;
use super::redis::{self, Kind, Link, Pending, Waits};
use super::shared_data::HostCas;
use super::stream::{Stream, StreamState};
use super::wake::Wake;
use crate::clock::Timestamp;
use crate::config::{self, Config, InFlight, Plugin, Rule, StoreConfig};
use crate::exchange::{Event, ExecutionAnswer, Handover, Warning, Worker};
use crate::metrics::{Counter, Gauge, Histogram};
use crate::record::Owner;
use crate::store::outbox::Outbox;
use crate::store::redis::{Answer, Eviction, Trap};
use crate::store::shared_data::cas::Cas;
use crate::store::shared_data::{SharedDataStore, StoreEvents};
use crate::store::{Hold, Write, WriteReply};

/// How long a claim waits for the pass of an internal redirect that adopts it.
const HANDOVER_WAIT: Duration = Duration::from_secs(2);
/// The tick while anything waits; renewals and deadlines are this exact.
const LONGEST_TICK: Duration = Duration::from_millis(100);
const SHORTEST_TICK: Duration = Duration::from_millis(5);
/// How long the log is spared the same warning.
const WARNING_PAUSE: Duration = Duration::from_secs(10);
/// Most bytes that one root leaves behind.
const MAX_SPILL: usize = 1 << 20;
const SPILL_TRIES: u32 = 64;
/// How often a root looks for what others left.
const SPILL_LOOK_PAUSE: Duration = Duration::from_millis(500);
/// Rounds in which a root that goes ends what its callouts carried; each ends at least one step of every exchange.
const MOST_FAREWELLS: u32 = 8;
/// Rounds of answers and callouts in one callback; the tick takes up what is left.
const MOST_ROUNDS: u32 = 64;
/// Duplicates that wait are polled this often at first.
const SHORTEST_WAIT: Duration = Duration::from_millis(250);
/// Ticks without work before the tick stops.
const IDLE_TICKS: u32 = 10;

/// What the streams of one worker share with its root.
pub struct Shared {
    /// The root's context id.
    pub root_id: u32,
    /// The exchanges' common ground.
    pub worker: Rc<Worker>,
    /// Where records live.
    pub backend: Backend,
    /// Writes still to be applied.
    pub outbox: RefCell<Outbox>,
    /// The metrics.
    pub metrics: Metrics,
    /// Owners of claims to come.
    pub random: RandomOwners,
    /// Some rule covers some hosts only: what a host call tells of them is worth its time.
    pub looks_at_hosts: bool,
    /// Filter state that leads the further pass of an internal redirect to its claim: random, so that another
    /// filter of this kind in the chain has another.
    pub handover_state: String,
    /// Streams that may be acted for: in when covered, out when closed. A stream that is not in here may be gone.
    live: RefCell<BTreeMap<u32, Rc<RefCell<StreamState>>>>,
    handovers: RefCell<Vec<(Owner, Handover, Timestamp)>>,
    wake_up: Rc<Wake>,
    executions: Executions,
    /// What the gauge of the detached bytes shows of this worker.
    detached_shown: Cell<u64>,
    tick: Duration,
    ticking: Cell<bool>,
    idle_ticks: Cell<u32>,
    /// Where a root of this store leaves what its outbox still holds when it goes.
    spill_name: String,
    next_spill_look: Cell<Timestamp>,
    warned: RefCell<Vec<(&'static str, Timestamp)>>,
}

/// Where records live.
pub enum Backend {
    /// In this process.
    SharedData(RefCell<SharedDataStore<HostCas>>),
    /// In Redis.
    Redis(Box<RefCell<Link>>),
}

impl Shared {
    /// The worker's clock.
    pub fn now() -> Timestamp {
        Timestamp::from_millis(hostcalls::monotonic_millis())
    }

    /// Lets the root act for a stream from here on.
    pub fn enlist(&self, id: u32, stream: &Rc<RefCell<StreamState>>) {
        if let Ok(mut live) = self.live.try_borrow_mut() {
            live.insert(id, Rc::clone(stream));
        }
        self.wake();
    }

    /// Never act for a stream again.
    pub fn strike(&self, id: u32) {
        if let Ok(mut live) = self.live.try_borrow_mut() {
            live.remove(&id);
        }
    }

    /// Keeps a claim for the next pass of its request.
    pub fn hand_over(&self, handover: Handover) {
        if let Ok(mut handovers) = self.handovers.try_borrow_mut() {
            // Nobody renews the lease meanwhile.
            let wait = HANDOVER_WAIT.min(handover.rule().lock_ttl / 3);
            handovers.push((handover.hold().owner, handover, Self::now().after(wait)));
        }
        self.wake();
    }

    /// The claim that an earlier pass of the current stream's request left.
    pub fn adopt(&self) -> Option<Handover> {
        if self.handovers.try_borrow().map_or(true, |handovers| handovers.is_empty()) {
            return None;
        }
        let owner = hostcalls::filter_state(&self.handover_state)?;
        let mut handovers = self.handovers.try_borrow_mut().ok()?;
        let index = handovers.iter().position(|(candidate, _, _)| candidate.bytes().as_slice() == owner)?;
        Some(handovers.swap_remove(index).1)
    }

    /// Puts a write into the outbox.
    pub fn post(&self, hold: Hold, write: Write, rule: &Rc<Rule>, now: Timestamp) {
        if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
            let before = outbox.len();
            outbox.push(hold, write, rule, now, &mut |counter| self.metrics.count(counter));
            self.shift_outbox(before, outbox.len());
        }
        self.wake();
    }

    fn shift_outbox(&self, before: usize, after: usize) {
        let count = |length| i64::try_from(length).unwrap_or(i64::MAX);
        self.metrics.shift(Gauge::Outbox, count(after).saturating_sub(count(before)));
    }

    /// Tells the operator, but not with every request.
    pub fn warn(&self, warning: Warning, now: Timestamp) {
        self.tell(warning.as_str(), format_args!("{}", warning.as_str()), now);
    }

    /// Starts the tick.
    pub fn wake(&self) {
        self.idle_ticks.set(0);
        if !self.ticking.get() {
            let millis = u32::try_from(self.tick.as_millis()).unwrap_or(100);
            self.ticking.set(hostcalls::set_tick_millis(millis).is_ok());
        }
    }

    fn on_tick(&self) {
        let now = Self::now();
        self.tick_streams(now);
        self.pump_executions(now);
        self.expire_handovers(now);
        self.take_spill(now);
        if let Backend::Redis(link) = &self.backend
            && let Ok(mut link) = link.try_borrow_mut()
        {
            link.on_tick(now);
        }
        self.flush_outbox(now);
        self.pump(now);
        let busy = self.live.try_borrow().map_or(true, |live| !live.is_empty())
            || self.outbox.try_borrow().map_or(true, |outbox| !outbox.is_empty())
            || self.handovers.try_borrow().map_or(true, |handovers| !handovers.is_empty());
        let busy = busy || !self.is_link_idle() || !self.executions.is_empty();
        self.idle_ticks.set(if busy { 0 } else { self.idle_ticks.get().saturating_add(1) });
        if self.idle_ticks.get() > IDLE_TICKS && hostcalls::set_tick_millis(0).is_ok() {
            self.ticking.set(false);
        }
    }

    fn is_link_idle(&self) -> bool {
        match &self.backend {
            Backend::SharedData(_) => true,
            Backend::Redis(link) => link.try_borrow().is_ok_and(|link| link.is_idle()),
        }
    }

    fn tick_streams(&self, now: Timestamp) {
        let streams: Vec<Rc<RefCell<StreamState>>> = match self.live.try_borrow() {
            Ok(live) => live.values().map(Rc::clone).collect(),
            Err(_) => return,
        };
        for stream in streams {
            if let Ok(mut stream) = stream.try_borrow_mut() {
                stream.handle(self, Event::Ticked, now, Acting::Root);
            }
        }
        for stream in self.executions.running() {
            if let Ok(mut stream) = stream.try_borrow_mut()
                && !self.is_live(stream.id())
            {
                stream.handle(self, Event::Ticked, now, Acting::Nobody);
            }
        }
    }

    fn is_live(&self, id: u32) -> bool {
        self.live.try_borrow().is_ok_and(|live| live.contains_key(&id))
    }

    /// On whose behalf the root acts for a stream.
    fn acting_for(&self, id: u32) -> Acting {
        if self.is_live(id) { Acting::Root } else { Acting::Nobody }
    }

    /// Lets the root send a request.
    pub fn execute(&self, stream: Rc<RefCell<StreamState>>, request: Option<HeldRequest>, timeout: Duration) {
        self.executions.submit(stream, request, timeout);
        self.wake_up.ring();
        self.wake();
    }

    /// Sends the requests that wait. Only from the root's own callbacks.
    fn pump_executions(&self, now: Timestamp) {
        for (stream, why) in self.executions.dispatch() {
            self.end_execution(&stream, ExecutionAnswer::NotDispatched(why), now);
        }
        self.show_detached();
    }

    fn end_execution(&self, stream: &RefCell<StreamState>, answer: ExecutionAnswer<'_>, now: Timestamp) {
        if let Ok(mut stream) = stream.try_borrow_mut() {
            let acting = self.acting_for(stream.id());
            stream.handle(self, Event::Executed(answer), now, acting);
        }
    }

    /// A callout was answered: was it an execution's?
    fn on_executed(
        &self,
        token: u32,
        lines: usize,
        body_size: usize,
        trailers: usize,
        now: Timestamp,
    ) -> bool {
        let Some(stream) = self.executions.take(token) else { return false };
        let headers = execution::answer_head(lines);
        let has_room = stream
            .try_borrow_mut()
            .is_ok_and(|mut stream| stream.make_room(u64::try_from(body_size).unwrap_or(u64::MAX)));
        let answer = execution::answer(headers.as_ref(), body_size, trailers, has_room);
        self.end_execution(&stream, answer, now);
        self.show_detached();
        true
    }

    fn show_detached(&self) {
        let taken = self.worker.detached.taken();
        let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
        let shown = self.detached_shown.replace(taken);
        self.metrics.shift(Gauge::DetachedBytes, signed(taken).saturating_sub(signed(shown)));
    }

    fn expire_handovers(&self, now: Timestamp) {
        let Ok(mut handovers) = self.handovers.try_borrow_mut() else { return };
        let mut index = 0;
        while let Some((_, _, until)) = handovers.get(index) {
            if now < *until {
                index = index.saturating_add(1);
                continue;
            }
            let (_, handover, _) = handovers.swap_remove(index);
            let (write, counter) = handover.end_unadopted();
            self.metrics.count(counter);
            self.metrics.shift(Gauge::InFlight, -1);
            self.post(*handover.hold(), write, handover.rule(), now);
        }
    }

    fn flush_outbox(&self, now: Timestamp) {
        let Ok(mut outbox) = self.outbox.try_borrow_mut() else { return };
        match &self.backend {
            Backend::SharedData(store) => {
                let Ok(mut store) = store.try_borrow_mut() else { return };
                let before = outbox.len();
                outbox.flush(&mut *store, now, &mut |counter| self.metrics.count(counter));
                self.shift_outbox(before, outbox.len());
            }
            Backend::Redis(link) => {
                let Ok(mut link) = link.try_borrow_mut() else { return };
                while let Some((entry, hold, write)) = outbox.take_due(now) {
                    link.retry(entry, hold, write, now);
                }
            }
        }
    }

    /// Counts what a table did.
    pub fn count_events(&self, events: StoreEvents) {
        self.metrics.count_many(Counter::Evictions, events.evictions);
        self.metrics.count_many(Counter::Tombstones, events.evicted_bodies);
    }

    /// Delivers the answers that are there and sends what may be sent, until there is nothing to do. Only from the
    /// root's own callbacks.
    fn pump(&self, now: Timestamp) {
        let Backend::Redis(link) = &self.backend else { return };
        for _ in 0..MOST_ROUNDS {
            loop {
                let answer = link.try_borrow_mut().ok().and_then(|mut link| link.next_answer());
                let Some((pending, answer)) = answer else { break };
                self.deliver(pending, answer, now);
            }
            let Ok(mut link) = link.try_borrow_mut() else { return };
            let sent = &mut |operations| {
                self.metrics.record(Histogram::BatchSize, u64::try_from(operations).unwrap_or(0));
            };
            if let Some(trap) = link.dispatch(now, sent) {
                self.warn_of(trap, now);
            }
            for cause in link.take_causes() {
                self.tell(cause, format_args!("Redis: operations failed: {cause}"), now);
            }
            if !link.has_answers() {
                return;
            }
        }
    }

    fn deliver(&self, pending: Pending, answer: Answer, now: Timestamp) {
        let Pending { since, waits } = pending;
        let millis = u64::try_from(now.since(since).as_millis()).unwrap_or(u64::MAX);
        self.metrics.record(Histogram::StoreMillis, millis);
        match waits {
            Waits::Outbox(entry) => {
                if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
                    let before = outbox.len();
                    let count = &mut |counter| self.metrics.count(counter);
                    outbox.settle(entry, redis::write_answer(answer), now, count);
                    self.shift_outbox(before, outbox.len());
                }
            }
            Waits::Exchange { id, state, kind, copy } => {
                self.copy_near(&kind, &answer, copy.as_deref(), now);
                let answer = redis::exchange_answer(&kind, answer);
                let acting = self.acting_for(id);
                if let Ok(mut state) = state.try_borrow_mut() {
                    state.handle(self, Event::StoreAnswered(answer), now, acting);
                }
            }
        }
    }

    fn copy_near(&self, kind: &Kind, answer: &Answer, copy: Option<&redis::Copy>, now: Timestamp) {
        let Backend::Redis(link) = &self.backend else { return };
        let Ok(mut link) = link.try_borrow_mut() else { return };
        match (kind, answer, copy) {
            (Kind::Claim(key), Answer::Claim(Ok(claimed)), _) => {
                link.keep_reply(*key, &claimed.reply, claimed.life, now);
            }
            (Kind::End, Answer::Write(Ok(WriteReply::Applied)), Some(copy)) => link.keep(copy, now),
            (
                Kind::Claim(_) | Kind::Renew | Kind::End,
                Answer::Claim(_) | Answer::Write(_) | Answer::NotSent,
                Some(_) | None,
            ) => {}
        }
    }

    fn warn_of(&self, trap: Trap, now: Timestamp) {
        self.tell(trap.as_str(), format_args!("Redis: {trap}"), now);
    }

    fn tell(&self, what: &'static str, text: std::fmt::Arguments<'_>, now: Timestamp) {
        let Ok(mut warned) = self.warned.try_borrow_mut() else { return };
        if warned.iter().any(|(warning, last)| *warning == what && now.since(*last) < WARNING_PAUSE) {
            return;
        }
        warned.retain(|(warning, _)| *warning != what);
        warned.push((what, now));
        log::warn!("{text}");
    }

    /// The root goes: what can still be written is; the rest is left to another root of the same store.
    fn finish(&self) {
        let now = Self::now();
        self.expire_handovers(now.after(HANDOVER_WAIT));
        if let Backend::Redis(link) = &self.backend
            && let Ok(link) = link.try_borrow()
        {
            self.metrics.shift(Gauge::RedisEvicting, -i64::from(link.is_evicting()));
        }
        // What ends here may ask for more: an end that waited for a renewal, an execution after a claim.
        for _ in 0..MOST_FAREWELLS {
            if !self.cancel_callouts(now) {
                break;
            }
        }
        self.show_detached();
        if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
            outbox.hurry(now);
        }
        if let Backend::SharedData(_) = &self.backend {
            self.flush_outbox(now);
        }
        if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
            let before = outbox.len();
            let count = &mut |counter| self.metrics.count(counter);
            if let Some(bytes) = outbox.spill(MAX_SPILL, now, count) {
                leave_spill(&self.spill_name, &bytes);
            }
            self.shift_outbox(before, 0);
        }
    }

    /// The host cancels the callouts: what they carried may have taken effect, nobody will tell. Says whether there was
    /// any.
    fn cancel_callouts(&self, now: Timestamp) -> bool {
        let executions = self.executions.abandon();
        let waiting = match &self.backend {
            Backend::SharedData(_) => Vec::new(),
            Backend::Redis(link) => link.try_borrow_mut().map(|mut link| link.abandon()).unwrap_or_default(),
        };
        let any = !(executions.is_empty() && waiting.is_empty());
        for (stream, answer) in executions {
            if let Ok(mut stream) = stream.try_borrow_mut() {
                stream.handle(self, Event::Executed(answer), now, Acting::Nobody);
            }
        }
        for pending in waiting {
            self.deliver(pending, Answer::NotSent, now);
        }
        any
    }

    /// Takes over what another root of the same store left. Costs one look at shared data.
    fn take_spill(&self, now: Timestamp) {
        if now < self.next_spill_look.get() {
            return;
        }
        self.next_spill_look.set(now.after(SPILL_LOOK_PAUSE));
        let Ok(slot) = HostCas.load(&self.spill_name) else { return };
        let bytes = slot.bytes();
        // Of two roots that see it, one empties it.
        if bytes.is_empty() || HostCas.swap(&self.spill_name, slot.seen(), &[]).is_err() {
            return;
        }
        if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
            let before = outbox.len();
            outbox.adopt(bytes, now, &mut |counter| self.metrics.count(counter));
            self.shift_outbox(before, outbox.len());
        }
    }
}

/// What a root was configured as.
enum Role {
    Filter(Rc<Shared>),
    RequestEndHold,
    #[cfg(feature = "test-hooks")]
    StoreDriver,
}

/// The root context.
pub struct Root {
    id: u32,
    role: Option<Role>,
}

impl Root {
    /// A root that is not configured yet.
    pub const fn new(id: u32) -> Self {
        Self { id, role: None }
    }

    fn configure(&mut self) -> Result<(), String> {
        let json = hostcalls::buffer(Buffer::PluginConfiguration, 0, usize::MAX)
            .map_err(|error| format!("the plugin configuration can't be read (status {})", error.0))?;
        #[cfg(feature = "test-hooks")]
        if super::store_driver::is_asked_for(&json) {
            self.role = Some(Role::StoreDriver);
            return Ok(());
        }
        let plugin =
            config::load_plugin(&json).map_err(|errors| format!("configuration refused:\n{errors}"))?;
        let config = match plugin {
            Plugin::Filter(config) => config,
            Plugin::RequestEndHold => {
                self.role = Some(Role::RequestEndHold);
                return Ok(());
            }
        };
        for warning in &config.warnings {
            log::warn!("{warning}");
        }
        if let Some(rate) = config.sustained_keys_per_100_seconds() {
            log::info!(
                "the embedded store sustains {}.{:02} new keys per second (max_records / record_ttl)",
                rate / 100,
                rate % 100
            );
        }
        self.role = Some(Role::Filter(Rc::new(self.open(*config)?)));
        Ok(())
    }

    fn open(&self, config: Config) -> Result<Shared, String> {
        let wake_up = Rc::new(Wake::open()?);
        let (backend, store_name) = match &config.store {
            StoreConfig::SharedData(settings) => {
                let namespace = settings.namespace.clone().unwrap_or_else(own_namespace);
                let store = SharedDataStore::open(HostCas, &namespace, settings)
                    .map_err(|error| format!("store.shared_data: {error}"))?;
                (Backend::SharedData(RefCell::new(store)), namespace)
            }
            StoreConfig::Redis(settings) => {
                let link = Link::open(settings, &config, Rc::clone(&wake_up))?;
                let name =
                    format!("redis {}:{}{}", settings.cluster.len(), settings.cluster, settings.key_prefix);
                (Backend::Redis(Box::new(RefCell::new(link))), name)
            }
        };
        let suffix = hostcalls::random_bytes::<8>().ok_or("the host gives no random bytes")?;
        let handover_state = format!("idempotency_handover_{:016x}", u64::from_le_bytes(suffix));
        declare_request_state(&handover_state);
        let executions = Executions::through(config.execute_cluster.as_deref());
        let leases = config.rules.iter().map(|rule| rule.lock_ttl.min(rule.body_timeout));
        let store_timeout = match &config.store {
            StoreConfig::SharedData(_) => None,
            StoreConfig::Redis(settings) => Some(settings.timeout),
        };
        let waits = config.rules.iter().any(|rule| rule.in_flight == InFlight::Wait);
        let shortest = leases.chain(store_timeout).chain(waits.then_some(SHORTEST_WAIT)).min();
        let tick = shortest.map_or(LONGEST_TICK, |time| (time / 10).clamp(SHORTEST_TICK, LONGEST_TICK));
        let outbox = RefCell::new(Outbox::new(config.limits.captured_bytes));
        let looks_at_hosts = config.rules.iter().any(|rule| !rule.matcher.hosts.is_empty());
        Ok(Shared {
            root_id: self.id,
            random: RandomOwners::default(),
            looks_at_hosts,
            worker: Rc::new(Worker::new(config)),
            backend,
            outbox,
            metrics: Metrics::define(),
            handover_state,
            live: RefCell::new(BTreeMap::new()),
            handovers: RefCell::new(Vec::new()),
            wake_up,
            executions,
            detached_shown: Cell::new(0),
            tick,
            ticking: Cell::new(false),
            idle_ticks: Cell::new(0),
            spill_name: format!("idem:outbox:{store_name}"),
            next_spill_look: Cell::new(Timestamp::default()),
            warned: RefCell::new(Vec::new()),
        })
    }
}

impl Root {
    /// The context's id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// A callout was answered, or was not.
    pub fn on_http_call_response(&self, token: u32, headers: usize, body_size: usize, trailers: usize) {
        let Some(Role::Filter(shared)) = &self.role else { return };
        if shared.on_executed(token, headers, body_size, trailers, Shared::now()) {
            shared.pump(Shared::now());
            return;
        }
        let Backend::Redis(link) = &shared.backend else { return };
        let now = Shared::now();
        let trap = link.try_borrow_mut().ok().and_then(|mut link| {
            let was_evicting = link.is_evicting();
            let trap = link.on_reply(token, headers, body_size, now);
            shared
                .metrics
                .shift(Gauge::RedisEvicting, i64::from(link.is_evicting()) - i64::from(was_evicting));
            match link.take_found() {
                Some(found @ Eviction::Drops { .. }) => log::warn!("Redis: {found}"),
                Some(found @ (Eviction::Keeps | Eviction::Unknown)) => log::info!("Redis: {found}"),
                None => {}
            }
            trap
        });
        if let Some(trap) = trap {
            shared.warn_of(trap, now);
        }
        shared.pump(now);
    }

    /// The root goes.
    pub fn on_done(&self) {
        if let Some(Role::Filter(shared)) = &self.role {
            shared.finish();
        }
    }

    /// The plugin configuration is there; `false` refuses it.
    pub fn on_configure(&mut self) -> bool {
        match self.configure() {
            Ok(()) => true,
            Err(error) => {
                log::error!("{error}");
                false
            }
        }
    }

    /// Time passed.
    pub fn on_tick(&self) {
        if let Some(Role::Filter(shared)) = &self.role {
            shared.on_tick();
        }
    }

    /// A queue of some root has an item.
    pub fn on_queue_ready(&self, queue_id: u32) {
        let Some(Role::Filter(shared)) = &self.role else { return };
        shared.wake_up.on_woken(queue_id);
        let now = Shared::now();
        shared.pump_executions(now);
        shared.flush_outbox(now);
        shared.pump(now);
    }

    /// A context for a stream; `None` while the root is not configured.
    pub fn create_stream(&self, id: u32) -> Option<HttpContext> {
        Some(match self.role.as_ref()? {
            Role::RequestEndHold => HttpContext::RequestEndHold,
            Role::Filter(shared) => HttpContext::Filter(Stream::new(id, Rc::clone(shared))),
            #[cfg(feature = "test-hooks")]
            Role::StoreDriver => HttpContext::StoreDriver,
        })
    }
}

/// A table of this plugin's own: another plugin configuration in the same VM has another name or root id.
fn own_namespace() -> String {
    let text = |name| hostcalls::property(&[name]).unwrap_or_default();
    let (name, root_id) = (text("plugin_name"), text("plugin_root_id"));
    // With its length in front, no other pair of names reads the same.
    format!("{}:{}/{}", name.len(), String::from_utf8_lossy(&name), String::from_utf8_lossy(&root_id))
}

/// Adds to what roots of the same store left before, as long as there is room.
fn leave_spill(name: &str, bytes: &[u8]) {
    for _ in 0..SPILL_TRIES {
        let Ok(slot) = HostCas.load(name) else { return };
        let mut all = slot.bytes().to_vec();
        // The format's version leads: once, whoever wrote first.
        let fresh = if all.is_empty() { Some(bytes) } else { bytes.get(1..) };
        all.extend_from_slice(fresh.unwrap_or_default());
        if all.len() > MAX_SPILL.saturating_mul(4) || HostCas.swap(name, slot.seen(), &all).is_ok() {
            return;
        }
    }
}

/// Declares a filter state that outlives an internal redirect (`envoy.source.extensions.common.wasm.
/// DeclarePropertyArguments`: field 1 is the name, field 5 the life span, 1 of which is the downstream request).
fn declare_request_state(name: &str) {
    let mut arguments = vec![0x0a, u8::try_from(name.len()).unwrap_or(0)];
    arguments.extend_from_slice(name.as_bytes());
    arguments.extend_from_slice(&[0x28, 0x01]);
    if hostcalls::call_foreign_function("declare_property", &arguments).is_err() {
        log::warn!(
            "filter state can't be declared: a request that is redirected inside Envoy ends as failed"
        );
    }
}
