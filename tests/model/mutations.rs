//! The model has to notice what it is there for: each deliberate mistake breaks a guarantee within the budget.
//!
//! Twice: once by what the store answers, and once with the store taken at its word, by how often the upstream ran.

use crate::oracle::Broken;
use crate::rng::Rng;
use crate::stores::Mutation;
use crate::world::Settings;
use crate::{STEPS, run_with};

const MOST_RUNS: u64 = 1_000;

/// Looks for a run with this mistake that breaks this guarantee.
fn is_caught(mutation: Mutation, expected: Broken, trusts_store: bool) {
    for seed in 1..=MOST_RUNS {
        let mut rng = Rng::new(seed);
        let settings = Settings::random(&mut rng, Some(mutation), trusts_store);
        if let Err(failure) = run_with(seed, rng, settings, STEPS)
            && failure.violation.broken == expected
        {
            println!("{mutation:?}, run {seed}: {failure}\n");
            return;
        }
    }
    panic!("{mutation:?} did not show as {expected:?} in {MOST_RUNS} runs")
}

#[test]
fn a_store_that_does_not_fence_is_caught() {
    is_caught(Mutation::NoFencing, Broken::StaleOverwrites, false);
    is_caught(Mutation::NoFencing, Broken::RanAgain, true);
}

#[test]
fn a_swap_without_a_version_is_caught() {
    is_caught(Mutation::CasNone, Broken::TwoOwners, false);
    is_caught(Mutation::CasNone, Broken::RanAgain, true);
}

#[test]
fn a_lease_as_long_as_the_record_is_caught() {
    is_caught(Mutation::LeaseIsRecordTtl, Broken::Wedged, false);
}

#[test]
fn a_release_when_the_client_leaves_is_caught() {
    is_caught(Mutation::ReleaseOnClientGone, Broken::RanAgain, false);
    is_caught(Mutation::ReleaseOnClientGone, Broken::RanAgain, true);
}

#[test]
fn a_failure_that_is_not_written_is_caught() {
    is_caught(Mutation::FailureForgotten, Broken::RanAgain, false);
}

#[test]
fn a_takeover_against_the_rule_is_caught() {
    is_caught(Mutation::AlwaysTakeover, Broken::TwoOwners, false);
    is_caught(Mutation::AlwaysTakeover, Broken::RanAgain, true);
}

#[test]
fn a_takeover_by_another_request_is_caught() {
    is_caught(Mutation::FingerprintIgnored, Broken::MismatchReplayed, false);
}
