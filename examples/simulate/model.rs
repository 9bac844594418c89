//! One worker of Envoy on Redis as a discrete simulation: what its processor does one after the other, what waits for a callout,
//! and what Redis does one after the other. Time is virtual, and the same seed gives the same run.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use serde_json::Value;

/// What things cost, in microseconds.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// Processor time of the worker for a protected request, callouts left out.
    pub request: f64,
    /// Processor time of the worker for a callout, whatever it carries: both passes of the link are its own.
    pub callout: f64,
    /// A request's time elsewhere: the client and the service.
    pub elsewhere: f64,
    /// The way to Redis and back, Redis left out.
    pub way: f64,
    /// Redis's processor time for one script, measured by `INFO commandstats` (claim 17, complete 22).
    pub operation: f64,
}

/// What was measured of one setting.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub connections: usize,
    pub batches: usize,
    pub per_second: f64,
    pub p50: f64,
    pub processor: f64,
    pub operations_per_callout: Option<f64>,
}

/// What a run came to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    pub per_second: f64,
    /// Microseconds.
    pub mean: f64,
    pub p50: f64,
    pub p99: f64,
    pub operations_per_callout: f64,
    /// Share of the time that the worker was busy.
    pub busy: f64,
    /// Requests that began and were not answered when the run ended.
    pub open: usize,
}

const WAY: f64 = 40.0;
const OPERATION: f64 = 20.0;
/// Most operations in a callout.
const ROOM: usize = 256;

/// What `make bench SECTIONS=redis` measured with bodies of 200 B and one worker.
pub fn measured(results: &Value) -> Vec<Measured> {
    let result = &results["result"];
    let number = |value: &Value| value.as_f64().unwrap_or(f64::NAN);
    let mut all = Vec::new();
    let is_meant = |setting: &&Value| setting["workers"] == 1 && setting["body_bytes"] == 200;
    for (list, names) in [
        ("settings", &[("redis_first", 2)][..]),
        ("batching", &[("batches_1", 1), ("batches_2", 2), ("batches_4", 4)]),
    ] {
        for setting in result[list].as_array().into_iter().flatten().filter(is_meant) {
            for subject in setting["subjects"].as_array().into_iter().flatten() {
                let Some((name, batches)) = names.iter().find(|(name, _)| subject["name"] == *name) else {
                    continue;
                };
                all.push(Measured {
                    connections: setting["connections"].as_u64().unwrap_or(0) as usize,
                    batches: *batches,
                    per_second: number(&subject["requests_per_second"]),
                    p50: number(&subject["p50_us"]),
                    processor: number(&subject["cpu_us"]),
                    operations_per_callout: setting["operations_per_callout"][*name].as_f64(),
                });
            }
        }
    }
    all
}

/// The costs that two of the settings say: one connection, where each callout carries one operation, and the most connections with the usual number of batches.
pub fn calibrate(measured: &[Measured]) -> Option<Costs> {
    let alone = measured.iter().find(|setting| setting.connections == 1)?;
    let most = measured.iter().map(|setting| setting.connections).max()?;
    let mut crowded = measured.iter().filter(|setting| setting.connections == most && setting.batches == 2);
    let (processor, per_callout) =
        (crowded.clone().next()?.processor, crowded.find_map(|setting| setting.operations_per_callout)?);
    // A request is two operations: `request + callout * 2 / operations per callout`.
    let callout = (alone.processor - processor) / (2.0 - 2.0 / per_callout);
    let request = alone.processor - 2.0 * callout;
    let elsewhere = (1e6 / alone.per_second - alone.processor - 2.0 * (WAY + OPERATION)).max(20.0);
    Some(Costs { request, callout, elsewhere, way: WAY, operation: OPERATION })
}

#[derive(Debug, Clone, Copy)]
enum Operation {
    Claim(usize),
    Complete(usize),
}

#[derive(Debug)]
enum Task {
    /// A request of this connection is there.
    Request(usize),
    /// The service's answer is there.
    Response(usize),
    /// The root was woken.
    Wake,
    /// A callout was answered.
    Answered(Vec<Operation>),
}

#[derive(Debug)]
enum Event {
    Arrives(Task),
    /// The worker ends what it did, and this comes of it.
    Ends(Vec<Effect>),
}

#[derive(Debug)]
enum Effect {
    Queue(Operation),
    Send(Vec<Operation>),
    Forward(usize),
    Answer(usize),
}

struct Run {
    costs: Costs,
    batches: usize,
    random: fastrand::Rng,
    now: f64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    what: std::collections::HashMap<u64, Event>,
    last: u64,
    tasks: VecDeque<Task>,
    is_busy: bool,
    busy_time: f64,
    waiting: VecDeque<Operation>,
    out: usize,
    is_woken: bool,
    redis_free: f64,
    began: Vec<f64>,
    is_open: Vec<bool>,
    callouts: u64,
    operations: u64,
    latencies: Vec<f64>,
}

/// Runs so many connections, each with one request after the other, for so long (µs), the first tenth of which does not count.
pub fn run(costs: Costs, connections: usize, batches: usize, time: f64, seed: u64) -> Outcome {
    let mut run = Run {
        costs,
        batches,
        random: fastrand::Rng::with_seed(seed),
        now: 0.0,
        events: BinaryHeap::new(),
        what: std::collections::HashMap::new(),
        last: 0,
        tasks: VecDeque::new(),
        is_busy: false,
        busy_time: 0.0,
        waiting: VecDeque::new(),
        out: 0,
        is_woken: false,
        redis_free: 0.0,
        began: vec![0.0; connections],
        is_open: vec![false; connections],
        callouts: 0,
        operations: 0,
        latencies: Vec::new(),
    };
    for connection in 0..connections {
        run.at(connection as f64, Event::Arrives(Task::Request(connection)));
    }
    let warm = time / 10.0;
    while let Some(Reverse((at, id))) = run.events.pop() {
        run.now = at as f64 / 1000.0;
        if run.now > time {
            break;
        }
        match run.what.remove(&id) {
            Some(Event::Arrives(task)) => {
                if let Task::Request(connection) = task {
                    run.began[connection] = run.now;
                    run.is_open[connection] = true;
                }
                run.tasks.push_back(task);
            }
            Some(Event::Ends(effects)) => {
                run.is_busy = false;
                for effect in effects {
                    run.apply(effect, warm);
                }
            }
            None => {}
        }
        run.work(warm);
    }
    let mut sorted = std::mem::take(&mut run.latencies);
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len().max(1);
    let quantile = |share: f64| sorted.get((count as f64 * share) as usize).copied().unwrap_or(0.0);
    Outcome {
        per_second: sorted.len() as f64 / (time - warm) * 1e6,
        mean: sorted.iter().sum::<f64>() / count as f64,
        p50: quantile(0.5),
        p99: quantile(0.99),
        operations_per_callout: run.operations as f64 / run.callouts.max(1) as f64,
        busy: run.busy_time / (time - warm),
        open: run.is_open.iter().filter(|open| **open).count(),
    }
}

impl Run {
    fn at(&mut self, time: f64, event: Event) {
        self.last += 1;
        self.events.push(Reverse(((time * 1000.0) as u64, self.last)));
        self.what.insert(self.last, event);
    }

    /// Exponential: what many independent things come to.
    fn around(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.random.f64()).ln()
    }

    fn apply(&mut self, effect: Effect, warm: f64) {
        match effect {
            Effect::Queue(operation) => {
                self.waiting.push_back(operation);
                if !self.is_woken {
                    self.is_woken = true;
                    self.tasks.push_back(Task::Wake);
                }
            }
            Effect::Send(operations) => {
                let begins = (self.now + self.costs.way / 2.0).max(self.redis_free);
                self.redis_free = begins + self.costs.operation * operations.len() as f64;
                self.at(self.redis_free + self.costs.way / 2.0, Event::Arrives(Task::Answered(operations)));
            }
            Effect::Forward(connection) => {
                let later = self.around(self.costs.elsewhere / 2.0);
                self.at(self.now + later, Event::Arrives(Task::Response(connection)));
            }
            Effect::Answer(connection) => {
                self.is_open[connection] = false;
                if self.now > warm {
                    self.latencies.push(self.now - self.began[connection]);
                }
                let later = self.around(self.costs.elsewhere / 2.0);
                self.at(self.now + later, Event::Arrives(Task::Request(connection)));
            }
        }
    }

    /// The worker takes the next task, if it is free.
    fn work(&mut self, warm: f64) {
        if self.is_busy {
            return;
        }
        let Some(task) = self.tasks.pop_front() else { return };
        let mut effects = Vec::new();
        let mut time = 0.0;
        // Only the root's own callbacks may send.
        let is_root = matches!(task, Task::Wake | Task::Answered(_));
        match task {
            Task::Request(connection) => {
                time += self.costs.request * 0.35;
                effects.push(Effect::Queue(Operation::Claim(connection)));
            }
            Task::Response(connection) => {
                time += self.costs.request * 0.3;
                effects.push(Effect::Queue(Operation::Complete(connection)));
            }
            Task::Wake => self.is_woken = false,
            Task::Answered(operations) => {
                self.out -= 1;
                time += self.costs.callout / 2.0;
                for operation in operations {
                    match operation {
                        Operation::Claim(connection) => {
                            time += self.costs.request * 0.2;
                            effects.push(Effect::Forward(connection));
                        }
                        Operation::Complete(connection) => {
                            time += self.costs.request * 0.15;
                            effects.push(Effect::Answer(connection));
                        }
                    }
                }
            }
        }
        if is_root {
            time += self.dispatch(&mut effects);
        }
        let time = time / 2.0 + self.around(time / 2.0);
        if self.now > warm {
            self.busy_time += time;
        }
        self.is_busy = true;
        self.at(self.now + time, Event::Ends(effects));
    }

    fn dispatch(&mut self, effects: &mut Vec<Effect>) -> f64 {
        let mut time = 0.0;
        while !self.waiting.is_empty() && self.out < self.batches {
            let operations: Vec<_> = self.waiting.drain(..self.waiting.len().min(ROOM)).collect();
            self.out += 1;
            self.callouts += 1;
            self.operations += operations.len() as u64;
            time += self.costs.callout / 2.0;
            effects.push(Effect::Send(operations));
        }
        time
    }
}
