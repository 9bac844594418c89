//! Random interleavings of requests, store operations and faults, against what must hold after every step.
//!
//! `MODEL_SEED`, `MODEL_RUNS` and `MODEL_STEPS` change the budget; a failure prints the seed that repeats it and the
//! shortest sequence of steps found that still fails.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

#[path = "../store_contract/fake_cas.rs"]
#[allow(dead_code, reason = "the store contract needs more of it")]
mod fake_cas;
mod mutations;
mod oracle;
#[path = "../store_contract/reference.rs"]
mod reference;
#[path = "../e2e/support/rng.rs"]
#[allow(dead_code, reason = "the end-to-end tests need more of it")]
mod rng;
mod stores;
mod taken;
mod world;

use std::fmt;

use oracle::{Verdict, Violation};
use rng::Rng;
use world::{Action, Settings, Tally, World};

const RUNS: u64 = 2_000;
const STEPS: u64 = 160;

/// A run that broke something.
struct Failure {
    seed: u64,
    settings: Settings,
    actions: Vec<Action>,
    violation: Violation,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { broken, why } = &self.violation;
        writeln!(f, "{broken:?}: {why}")?;
        writeln!(f, "with {:?}", self.settings)?;
        writeln!(f, "after {} steps:", self.actions.len())?;
        for action in &self.actions {
            writeln!(f, "    {action:?}")?;
        }
        write!(f, "again: MODEL_SEED={} MODEL_RUNS=1 cargo test --test model random", self.seed)
    }
}

/// One run of the product from its seed.
fn run(seed: u64, steps: u64) -> Result<(Tally, usize), Failure> {
    let mut rng = Rng::new(seed);
    let settings = Settings::random(&mut rng, None, false);
    run_with(seed, rng, settings, steps)
}

/// What happened in it, and the most executions of one key.
fn run_with(seed: u64, mut rng: Rng, settings: Settings, steps: u64) -> Result<(Tally, usize), Failure> {
    let mut world = World::new(&settings);
    let (mut actions, mut next_id) = (Vec::new(), 0);
    let outcome = (|| -> Verdict {
        for _ in 0..steps {
            let action = world.choose(&mut rng, next_id);
            next_id += u32::from(matches!(action, Action::Start { .. }));
            actions.push(action);
            world.step(action)?;
        }
        world.settle()?;
        world.probe(PROBES)
    })();
    let Err(violation) = outcome else { return Ok((world.tally.clone(), world.most_executions())) };
    let (actions, violation) = shorten(&settings, actions, violation);
    Err(Failure { seed, settings, actions, violation })
}

/// Clients that look at every key once all is over.
const PROBES: u32 = 900;

fn repeat(settings: &Settings, actions: &[Action]) -> Verdict {
    let mut world = World::new(settings);
    actions.iter().try_for_each(|action| world.step(*action))?;
    world.settle()?;
    world.probe(PROBES)
}

/// Leaves steps out as long as the same guarantee is broken.
fn shorten(settings: &Settings, mut actions: Vec<Action>, violation: Violation) -> (Vec<Action>, Violation) {
    let mut violation = violation;
    let mut length = actions.len().div_ceil(2);
    while length > 0 {
        let mut at = 0;
        while at < actions.len() {
            let end = (at + length).min(actions.len());
            let shorter = [&actions[..at], &actions[end..]].concat();
            match repeat(settings, &shorter) {
                Err(found) if found.broken == violation.broken => (actions, violation) = (shorter, found),
                Ok(()) | Err(_) => at = end,
            }
        }
        length /= 2;
    }
    (actions, violation)
}

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |value| value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

#[test]
fn random_interleavings_break_no_guarantee() {
    let (seed, runs) = (from_environment("MODEL_SEED", 1), from_environment("MODEL_RUNS", RUNS));
    let steps = from_environment("MODEL_STEPS", STEPS);
    println!("MODEL_SEED={seed} MODEL_RUNS={runs} MODEL_STEPS={steps}");
    let (mut tally, mut most) = (Tally::new(), 0);
    for seed in seed..seed.saturating_add(runs) {
        match run(seed, steps) {
            Ok((happened, executions)) => {
                happened.into_iter().for_each(|(what, times)| *tally.entry(what).or_default() += times);
                most = most.max(executions);
            }
            Err(failure) => panic!("{failure}"),
        }
    }
    println!("{tally:#?}\nat most {most} executions of one key");
    // A model in which nothing happens proves nothing.
    if runs >= RUNS && steps >= STEPS {
        for what in HAPPENS {
            assert!(tally.get(what).is_some_and(|times| *times >= 25), "{what}: {:?}", tally.get(what));
        }
        assert!(most > 1, "no key was ever executed again");
    }
}

const HAPPENS: [&str; 22] = [
    "forwarded",
    "forwarded unprotected",
    "the upstream ran",
    "a takeover ran",
    "a replay",
    "refused: in flight",
    "refused: mismatch",
    "refused: failed",
    "refused: abandoned",
    "refused: response not kept",
    "refused: store unavailable",
    "refused: body timeout",
    "a stale write",
    "a write went to the outbox",
    "a client left",
    "a worker died",
    "a claim was handed over",
    "an outbox was taken over",
    "an operation is lost",
    "a reply is lost",
    "an operation was carried out late",
    "two operations met in the table",
];

#[test]
fn a_seed_repeats_its_run() {
    for seed in 1..20 {
        let [first, second] = [(); 2].map(|()| run(seed, STEPS).map_err(|failure| failure.to_string()));
        assert_eq!(first, second);
    }
}
