//! Owns the storm: the processes, what is broken and when, and the calm afterwards in which every key is asked again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::clients::{Crowd, is_final};
use super::history::{Fault, Got, History, Life, Millis, Rest, Rule, Store, millis};
use super::ledger::Ledger;
use super::upstream::{LARGEST_KEPT, Upstream, mix};
use crate::support::*;

/// Renewed at a third of it: the rest is for what a busy machine may stall.
const LOCK_TTL: Duration = Duration::from_secs(3);
/// What a key may take beyond a lease until it answers: a client's pause, a VM that is loaded anew, a busy machine.
const WEDGE_SLACK: Duration = Duration::from_secs(4);
/// How many keys are asked at a time after the storm.
const PROBES: usize = 32;

/// How long, how hard.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub store: Store,
    pub seed: u64,
    pub length: Duration,
    pub workers: usize,
    pub clients: usize,
    /// The longest time between two acts.
    pub pause: Duration,
    /// An Envoy has been under load for so long when its memory is first looked at.
    pub warm_up: Duration,
}

struct Running {
    envoy: Envoy,
    booted: Millis,
    warm: Option<(Millis, u64)>,
    /// Traps in the log when this process was started.
    traps_before: usize,
}

pub struct Storm {
    plan: Plan,
    rng: Rng,
    ledger: Arc<Ledger>,
    upstream: Arc<Upstream>,
    crowd: Arc<Crowd>,
    envoys: Vec<Running>,
    redis: Option<Redis>,
    /// Stops with the storm.
    _origin: Origin,
    lives: Vec<Life>,
    crashes: Vec<String>,
    pushes: u64,
    traps: usize,
}

/// What the storm does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Kill(usize),
    TrapAtRequest(usize),
    TrapAtResponse,
    Reload(usize),
    /// For a moment, or for longer than a lease.
    Pause(Duration),
    Restart,
}

impl Storm {
    pub async fn run(plan: Plan) -> History {
        let mut storm = Storm::start(plan).await;
        let clients: Vec<_> =
            (0..plan.clients).map(|number| tokio::spawn(Arc::clone(&storm.crowd).client(number))).collect();
        storm.rage().await;
        storm.crowd.stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.await.expect("a client");
        }
        storm.calm().await
    }

    async fn start(plan: Plan) -> Storm {
        let ledger = Arc::new(Ledger::new());
        let upstream = Upstream::new(plan.seed, Arc::clone(&ledger));
        let origin = Origin::start().await;
        origin.on("/", upstream.behaviour());
        let redis = match plan.store {
            Store::SharedData => None,
            // Nothing that it acknowledged is lost.
            Store::Redis => {
                Some(Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"]).await)
            }
        };
        let count = if redis.is_some() { 2 } else { 1 };
        let mut envoys = Vec::new();
        for _ in 0..count {
            let builder = Envoy::builder()
                .workers(plan.workers)
                .wasm(Wasm::TestHooks)
                .plugin(plugin(plan.store, 0))
                .drain_time_s(2)
                .origin_addr(origin.addr());
            let builder = with_execution(builder, &default_routes());
            let envoy = match &redis {
                None => builder.start().await,
                Some(redis) => {
                    let link = json!({"settings": {"op_timeout": "0.2s"}});
                    with_link(builder, redis.addr(), &link).start().await
                }
            };
            envoys.push(Running { envoy, booted: ledger.clock.now(), warm: None, traps_before: 0 });
        }
        let crowd = Arc::new(Crowd {
            seed: plan.seed,
            ledger: Arc::clone(&ledger),
            envoys: envoys.iter().map(|it| it.envoy.addr()).collect(),
            stop: AtomicBool::new(false),
        });
        let rng = Rng::new(mix(plan.seed, "faults"));
        let (lives, crashes) = (vec![], vec![]);
        let _origin = origin;
        Storm {
            plan,
            rng,
            ledger,
            upstream,
            crowd,
            envoys,
            redis,
            _origin,
            lives,
            crashes,
            pushes: 0,
            traps: 0,
        }
    }

    /// Breaks one thing after the other, each kind once before any comes again, until the time is over.
    async fn rage(&mut self) {
        let end = Instant::now() + self.plan.length;
        let mut bag = Vec::new();
        let mut round = 0;
        while Instant::now() < end || round == 1 && !bag.is_empty() {
            if bag.is_empty() {
                round += 1;
                bag = self.acts(round, end);
            }
            // The load goes on meanwhile: what is broken next breaks something.
            let meanwhile = self.plan.pause.mul_f64(0.2 + self.rng.below(80) as f64 / 100.0);
            self.load(meanwhile).await;
            let next = self.rng.below(bag.len());
            let act = bag.swap_remove(next);
            let beside = (self.rng.one_in(3) && self.redis.is_some()).then(|| bag.pop()).flatten();
            match (act, beside) {
                // Two at once: the other while Redis does not answer.
                (Act::Pause(long), Some(other)) if !matches!(other, Act::Pause(_) | Act::Restart) => {
                    let from = self.pause();
                    self.load(long / 2).await;
                    let happened = self.act(other).await;
                    self.load(long / 2).await;
                    self.resume(from);
                    bag.extend((!happened).then_some(other));
                }
                (act, beside) => {
                    let happened = self.act(act).await;
                    bag.extend(beside);
                    bag.extend((!happened).then_some(act));
                }
            }
        }
        if self.redis.is_some() {
            // One process of which no VM has trapped: its gauges have to come back to zero.
            self.act(Act::Kill(1)).await;
        }
        self.load(LOCK_TTL / 2).await;
    }

    /// One of each kind. The last Envoy dies in every round, the first one only while the storm is young, so that one
    /// process lives long under load.
    fn acts(&mut self, round: usize, end: Instant) -> Vec<Act> {
        let last = self.envoys.len() - 1;
        let any = |rng: &mut Rng| rng.below(last + 1);
        let mut acts = vec![
            Act::Reload(any(&mut self.rng)),
            Act::TrapAtRequest(any(&mut self.rng)),
            Act::TrapAtResponse,
        ];
        let early = end.saturating_duration_since(Instant::now()) > self.plan.length / 2;
        // With Redis the storm's end kills the last one once more.
        if round > 1 && last > 0 || last == 0 && (round == 1 || early) {
            acts.push(Act::Kill(last));
        }
        if self.redis.is_some() {
            if early {
                acts.push(Act::Kill(0));
            }
            let longer = LOCK_TTL.mul_f64(0.8 + self.rng.below(80) as f64 / 100.0);
            acts.extend([Act::Pause(Duration::from_millis(300)), Act::Pause(longer), Act::Restart]);
        }
        acts
    }

    /// Whether it happened: a trap may not find the VM that it is for.
    async fn act(&mut self, act: Act) -> bool {
        let from = self.ledger.clock.now();
        match act {
            Act::Kill(at) => self.kill(at).await,
            Act::TrapAtRequest(envoy) => {
                self.traps += 1;
                let key = format!("chaos-{:x}-trap-{}", self.plan.seed, self.traps);
                let before = self.traps_logged();
                self.crowd.trap(&key, envoy).await;
                // A worker whose VM is down, or a Redis that does not answer, saves it.
                if !self.traps_beyond(before).await {
                    return false;
                }
                self.ledger.happened(Fault::TrapAtRequest(envoy), from);
            }
            Act::TrapAtResponse => {
                let before = self.traps_logged();
                self.upstream.armed.store(1, Ordering::Relaxed);
                // The client may leave before the answer, and while Redis does not answer there is none.
                let trapped = self.traps_beyond(before).await;
                self.upstream.armed.store(0, Ordering::Relaxed);
                return trapped;
            }
            Act::Reload(envoy) => {
                self.pushes += 1;
                let plugin = plugin(self.plan.store, self.pushes);
                self.envoys[envoy].envoy.reload_listener(plugin).await.expect("an accepted listener");
                self.ledger.happened(Fault::Reloaded(envoy), from);
            }
            Act::Pause(long) => {
                let from = self.pause();
                self.load(long).await;
                self.resume(from);
            }
            Act::Restart => {
                self.redis.as_mut().expect("a Redis").restart().await;
                self.ledger.happened(Fault::RedisRestarted, from);
            }
        }
        true
    }

    /// Whether a VM traps within a second.
    async fn traps_beyond(&mut self, before: usize) -> bool {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.traps_logged() == before && Instant::now() < deadline {
            self.load(Duration::from_millis(20)).await;
        }
        self.traps_logged() > before
    }

    fn pause(&mut self) -> Millis {
        let from = self.ledger.clock.now();
        self.redis.as_ref().expect("a Redis").pause();
        self.upstream.redis_away.send_replace(true);
        from
    }

    fn resume(&mut self, from: Millis) {
        self.redis.as_ref().expect("a Redis").resume();
        self.upstream.redis_away.send_replace(false);
        self.ledger.happened(Fault::RedisPaused, from);
    }

    async fn kill(&mut self, at: usize) {
        self.end_life(at);
        let from = self.ledger.clock.now();
        let running = &mut self.envoys[at];
        running.envoy.kill9();
        self.ledger.happened(Fault::EnvoyKilled(at), from);
        running.envoy.restart().await;
        running.booted = self.ledger.clock.now();
        running.warm = None;
        running.traps_before = traps_of(&running.envoy);
    }

    /// Lets the clients do their work, and looks at the processes meanwhile.
    async fn load(&mut self, long: Duration) {
        tokio::time::sleep(long).await;
        let now = self.ledger.clock.now();
        for (at, running) in self.envoys.iter_mut().enumerate() {
            if !running.envoy.is_running() {
                self.crashes.push(format!("Envoy {at} ended by itself:\n{}", running.envoy.log_text()));
                running.envoy.expect_death();
            } else if running.warm.is_none() && now >= running.booted + millis(self.plan.warm_up) {
                running.warm = Some((now, running.envoy.rss_bytes()));
            }
        }
    }

    fn end_life(&mut self, at: usize) {
        let running = &mut self.envoys[at];
        let Some((from, rss_begin)) = running.warm.take() else { return };
        if !running.envoy.is_running() {
            return;
        }
        let (until, rss_end) = (self.ledger.clock.now(), running.envoy.rss_bytes());
        let traps = traps_of(&running.envoy) - running.traps_before;
        self.lives.push(Life { envoy: at, from, until, rss_begin, rss_end, traps });
    }

    fn traps_logged(&self) -> usize {
        self.envoys.iter().map(|it| traps_of(&it.envoy)).sum()
    }

    /// Nothing is broken any more: every key has to answer, and the filter to come to rest.
    async fn calm(mut self) -> History {
        self.upstream.calm.store(true, Ordering::Relaxed);
        self.upstream.armed.store(0, Ordering::Relaxed);
        for at in 0..self.envoys.len() {
            self.end_life(at);
        }
        let mut in_flight = Vec::new();
        for running in &self.envoys {
            in_flight.push(running.envoy.metric("in_flight").await);
        }
        let keys: Vec<(String, Rule, u8)> = {
            let keys = self.ledger.keys();
            let asked = |(key, it): (&String, &super::history::KeyHistory)| {
                Some((key.clone(), it.rule, it.tries.first()?.variant))
            };
            keys.iter().filter_map(asked).collect()
        };
        let keys = Arc::new(std::sync::Mutex::new(keys.into_iter()));
        let probing: Vec<_> = (0..PROBES)
            .map(|_| {
                let (crowd, keys) = (Arc::clone(&self.crowd), Arc::clone(&keys));
                tokio::spawn(async move {
                    loop {
                        let Some((key, rule, variant)) = keys.lock().unwrap().next() else { return };
                        crowd.has_to_answer(&key, rule, variant).await;
                    }
                })
            })
            .collect();
        for probe in probing {
            probe.await.expect("a probe");
        }
        let mut rests = Vec::new();
        for (at, in_flight_before) in in_flight.into_iter().enumerate() {
            rests.push(self.rest(at, in_flight_before).await);
        }
        for (at, running) in self.envoys.iter().enumerate() {
            let log = running.envoy.log_text();
            let (asked, trapped) = (traps_of(&running.envoy), log.matches(TRAPPED).count());
            if trapped > asked || log.contains("panicked at") {
                self.crashes.push(format!("Envoy {at}: {asked} traps asked for, {trapped} seen:\n{log}"));
            }
        }
        let traps_logged = self.traps_logged();
        let keys = std::mem::take(&mut *self.ledger.keys());
        History {
            store: self.plan.store,
            lock_ttl: millis(LOCK_TTL),
            largest_kept: LARGEST_KEPT,
            keys,
            faults: self.ledger.faults(),
            lives: self.lives,
            rests,
            traps_logged,
            crashes: self.crashes,
        }
    }

    /// What an Envoy says of itself once it has nothing to do any more, or after the time it has for that.
    async fn rest(&self, at: usize, in_flight_before: u64) -> Rest {
        let running = &self.envoys[at];
        let deadline = Instant::now() + LOCK_TTL + WEDGE_SLACK;
        loop {
            let metric = async |name: &str| running.envoy.metric(name).await;
            let (in_flight, outbox) = (metric("in_flight").await, metric("outbox").await);
            let traps = traps_of(&running.envoy) - running.traps_before;
            let at_rest = if traps == 0 { in_flight + outbox == 0 } else { in_flight <= in_flight_before };
            if at_rest || Instant::now() > deadline {
                let mut anomalies = BTreeMap::new();
                for name in ["unexpected_events", "host_errors", "outbox_dropped", "store_full"] {
                    anomalies.insert(name.to_owned(), metric(name).await);
                }
                return Rest { envoy: at, traps, in_flight, outbox, anomalies, in_flight_before };
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Crowd {
    /// Asks every Envoy for the key until it answers.
    async fn has_to_answer(&self, key: &str, rule: Rule, variant: u8) {
        for envoy in 0..self.envoys.len() {
            let begin = Instant::now();
            while !answers(&self.probe(key, rule, variant, envoy).await) {
                if begin.elapsed() > LOCK_TTL + WEDGE_SLACK {
                    self.ledger.wedged(key, millis(begin.elapsed()));
                    return;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn answers(got: &Got) -> bool {
    is_final(got)
}

/// What Envoy writes when a VM traps.
const TRAPPED: &str = "Function: ";

fn traps_of(envoy: &Envoy) -> usize {
    envoy.log_text().matches("test fault: trap").count()
}

/// `push` changes nothing that anybody could notice.
fn plugin(store: Store, push: u64) -> Value {
    let rule = |rule: Rule| {
        let mut json = json!({
            "name": rule.name(),
            "match": {"methods": ["POST"], "path": {"prefix": format!("/{}", rule.name())}},
            "scope": [{"header": "x-account-id"}],
            "lock_ttl": format!("{}ms", LOCK_TTL.as_millis()),
            "max_request_body_bytes": 100_000 + push,
            "max_response_body_bytes": LARGEST_KEPT,
        });
        let more = match rule {
            Rule::Takeover => json!({}),
            Rule::Wait => json!({"in_flight": "wait", "wait_timeout": "2s"}),
            Rule::Retain => json!({"on_abandoned": "retain"}),
            Rule::Atomic => json!({"on_failure": "release", "on_unknown": "release"}),
            Rule::Detached => json!({"execution": "detached", "execute_timeout": "20s"}),
        };
        deep_merge(&mut json, &more);
        json
    };
    let store = match store {
        Store::SharedData => json!({"shared_data": {"max_records": 500_000, "max_bytes": 512 << 20}}),
        Store::Redis => json!({"redis": {"cluster": "redis-link", "timeout": "500ms"}}),
    };
    json!({"store": store, "execute_cluster": "idempotency-execute", "rules": Rule::ALL.map(rule)})
}
