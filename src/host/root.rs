//! The root context: one per worker and plugin configuration. Loads the configuration, opens the store, and acts
//! for streams when time passes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::ContextType;

use super::hostcalls::{self, Buffer};
use super::io::Acting;
use super::metrics::Metrics;
use super::shared_data::HostCas;
use super::stream::{Stream, StreamState};
use crate::clock::Timestamp;
use crate::config::{self, Config, InFlight, Mode, Plugin, StoreConfig};
use crate::exchange::{Event, Handover, Worker};
use crate::metrics::{Counter, Gauge};
use crate::record::{Owner, Reason};
use crate::store::Write;
use crate::store::outbox::Outbox;
use crate::store::shared_data::SharedDataStore;

/// How long a claim waits for the pass of an internal redirect that adopts it.
const HANDOVER_WAIT: Duration = Duration::from_secs(2);
/// The tick while anything waits; renewals and deadlines are this exact.
const LONGEST_TICK: Duration = Duration::from_millis(100);
const SHORTEST_TICK: Duration = Duration::from_millis(5);
/// Ticks without work before the tick stops.
const IDLE_TICKS: u32 = 10;

/// What the streams of one worker share with its root.
pub struct Shared {
    /// The root's context id.
    pub root_id: u32,
    /// The exchanges' common ground.
    pub worker: Rc<Worker>,
    /// The store.
    pub store: RefCell<SharedDataStore<HostCas>>,
    /// Writes still to be applied.
    pub outbox: RefCell<Outbox>,
    /// The metrics.
    pub metrics: Metrics,
    /// Filter state that leads the further pass of an internal redirect to its claim: random, so that another
    /// filter of this kind in the chain has another.
    pub handover_state: String,
    /// Streams that may be acted for: in when covered, out when closed. A stream that is not in here may be gone.
    live: RefCell<BTreeMap<u32, Rc<RefCell<StreamState>>>>,
    handovers: RefCell<Vec<(Owner, Handover, Timestamp)>>,
    tick: Duration,
    ticking: Cell<bool>,
    idle_ticks: Cell<u32>,
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
            handovers.push((handover.hold().owner, handover, Self::now().after(HANDOVER_WAIT)));
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

    /// Queues a write that the store did not take.
    pub fn post(&self, handover: &Handover, write: Write) {
        if let Ok(mut outbox) = self.outbox.try_borrow_mut() {
            outbox.push(*handover.hold(), write, handover.rule(), Self::now(), &mut |counter| {
                self.metrics.count(counter);
            });
        }
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
        self.expire_handovers(now);
        self.flush_outbox(now);
        let busy = self.live.try_borrow().map_or(true, |live| !live.is_empty())
            || self.outbox.try_borrow().map_or(true, |outbox| !outbox.is_empty())
            || self.handovers.try_borrow().map_or(true, |handovers| !handovers.is_empty());
        self.idle_ticks.set(if busy { 0 } else { self.idle_ticks.get().saturating_add(1) });
        if self.idle_ticks.get() > IDLE_TICKS && hostcalls::set_tick_millis(0).is_ok() {
            self.ticking.set(false);
        }
    }

    fn tick_streams(&self, now: Timestamp) {
        let streams: Vec<(u32, Rc<RefCell<StreamState>>)> = match self.live.try_borrow() {
            Ok(live) => live.iter().map(|(id, stream)| (*id, Rc::clone(stream))).collect(),
            Err(_) => return,
        };
        for (id, stream) in streams {
            if let Ok(mut stream) = stream.try_borrow_mut() {
                stream.handle(self, Event::Ticked, now, Acting::For(id));
            }
        }
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
            self.metrics.count(Counter::RetainedRedirected);
            self.metrics.shift(Gauge::InFlight, -1);
            let failed_ttl = handover.rule().failed_ttl;
            self.post(&handover, Write::Fail { reason: Reason::Redirected, failed_ttl });
        }
    }

    fn flush_outbox(&self, now: Timestamp) {
        let (Ok(mut outbox), Ok(mut store)) = (self.outbox.try_borrow_mut(), self.store.try_borrow_mut())
        else {
            return;
        };
        let before = outbox.len();
        outbox.flush(&mut *store, now, &mut |counter| self.metrics.count(counter));
        let applied = i64::try_from(before.saturating_sub(outbox.len())).unwrap_or(0);
        self.metrics.shift(Gauge::Outbox, -applied);
    }
}

/// What a root was configured as.
enum Role {
    Filter(Rc<Shared>),
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
        let Plugin::Filter(config) = plugin else {
            return Err("role: \"request_end_hold\" is not available in this build".to_owned());
        };
        for warning in &config.warnings {
            log::warn!("{warning}");
        }
        self.role = Some(Role::Filter(Rc::new(self.open(*config)?)));
        Ok(())
    }

    fn open(&self, config: Config) -> Result<Shared, String> {
        let StoreConfig::SharedData(settings) = &config.store else {
            return Err("store.redis is not available in this build".to_owned());
        };
        for rule in &config.rules {
            let setting = match (rule.mode, rule.in_flight) {
                (Mode::Shadow, _) => "mode \"shadow\"",
                (_, InFlight::Wait) => "in_flight \"wait\"",
                (Mode::Enforce | Mode::Off, InFlight::Reject) => continue,
            };
            return Err(format!("rule {}: {setting} is not available in this build", rule.name));
        }
        let namespace = settings.namespace.clone().unwrap_or_else(own_namespace);
        let store = SharedDataStore::open(HostCas, &namespace, settings)
            .map_err(|error| format!("store.shared_data: {error}"))?;
        let suffix = hostcalls::random_bytes::<8>().ok_or("the host gives no random bytes")?;
        let handover_state = format!("idempotency_handover_{:016x}", u64::from_le_bytes(suffix));
        declare_request_state(&handover_state);
        let shortest_lease = config.rules.iter().map(|rule| rule.lock_ttl.min(rule.body_timeout)).min();
        let tick =
            shortest_lease.map_or(LONGEST_TICK, |lease| (lease / 10).clamp(SHORTEST_TICK, LONGEST_TICK));
        let outbox = RefCell::new(Outbox::new(config.limits.captured_bytes));
        Ok(Shared {
            root_id: self.id,
            worker: Rc::new(Worker::new(config)),
            store: RefCell::new(store),
            outbox,
            metrics: Metrics::define(),
            handover_state,
            live: RefCell::new(BTreeMap::new()),
            handovers: RefCell::new(Vec::new()),
            tick,
            ticking: Cell::new(false),
            idle_ticks: Cell::new(0),
        })
    }
}

impl Context for Root {
    fn on_done(&mut self) -> bool {
        if let Some(Role::Filter(shared)) = &self.role {
            // Nobody else will: what is left ends by its lease.
            shared.flush_outbox(Shared::now());
        }
        true
    }
}

impl RootContext for Root {
    fn on_vm_start(&mut self, _vm_configuration_size: usize) -> bool {
        true
    }

    fn on_configure(&mut self, _plugin_configuration_size: usize) -> bool {
        match self.configure() {
            Ok(()) => true,
            Err(error) => {
                log::error!("{error}");
                false
            }
        }
    }

    fn on_tick(&mut self) {
        if let Some(Role::Filter(shared)) = &self.role {
            shared.on_tick();
        }
    }

    fn create_http_context(&self, context_id: u32) -> Option<Box<dyn HttpContext>> {
        match self.role.as_ref()? {
            Role::Filter(shared) => Some(Box::new(Stream::new(context_id, Rc::clone(shared)))),
            #[cfg(feature = "test-hooks")]
            Role::StoreDriver => Some(Box::new(super::store_driver::StoreDriver::new())),
        }
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }
}

/// A table of this plugin's own: another plugin configuration in the same VM has another name or root id.
fn own_namespace() -> String {
    let text = |name| hostcalls::property(&[name]).unwrap_or_default();
    let (name, root_id) = (text("plugin_name"), text("plugin_root_id"));
    format!("{}/{}", String::from_utf8_lossy(&name), String::from_utf8_lossy(&root_id))
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
