//! Every reachable state of two Envoys and the requests that they get with one key, with one of each fault.
//!
//! The exchanges, the outboxes and the record's rules are the product's; the checker is `stateright`. Time moves by
//! whole steps, and every budget is finite, so that each path ends: "eventually" is decided where it does.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing, missing_docs)]

mod envoys;
#[path = "../model/oracle.rs"]
#[allow(dead_code, reason = "the random model needs more of it")]
mod oracle;
#[path = "../store_contract/reference.rs"]
mod reference;
mod replayed;
#[path = "../model/taken.rs"]
#[allow(dead_code, reason = "the random model needs more of it")]
mod taken;

use envoys::{Budget, Envoys, LOCK_TTL, Mistake};
use oracle::Rules;
use replayed::Product;
use serde_json::json;
use stateright::{Checker, Expectation, HasDiscoveries, Model};

const NOTHING: Budget = Budget {
    crashes: 0,
    lost_replies: 0,
    late_replies: 0,
    lease_ends: 0,
    renewals: 0,
    clients_gone: 0,
    resets: 0,
};

const ONE_OF_EACH: Budget = Budget { crashes: 1, lost_replies: 1, late_replies: 1, lease_ends: 1, ..NOTHING };

/// Three requests; `name` tells the configurations apart.
fn envoys(
    name: &'static str,
    on_abandoned: &str,
    on_unknown: &str,
    bodies: [u8; 3],
    budget: Budget,
) -> Envoys {
    let rule = json!({
        "name": "payments", "match": {"methods": ["POST"]}, "scope": [{"header": "x-account-id"}],
        "lock_ttl": "60s", "record_ttl": "24h", "failed_ttl": "24h",
        "on_abandoned": on_abandoned, "on_unknown": on_unknown,
    });
    let day = 24 * 3_600_000;
    Envoys {
        product: Product::new(name, &rule, bodies),
        rules: Rules {
            takeover: on_abandoned == "takeover",
            release_unknown: on_unknown == "release",
            release_failure: false,
            allow: false,
            lock_ttl: LOCK_TTL,
            record_ttl: day,
            failed_ttl: day,
        },
        budget,
        requests: 3,
        statuses: vec![200],
        in_one_go: true,
        mistake: None,
        seen: envoys::Seen::default(),
    }
}

/// Two requests, an upstream with more to say, and its response in two parts.
fn two(envoys: Envoys, statuses: &[u16]) -> Envoys {
    Envoys { requests: 2, statuses: statuses.to_vec(), in_one_go: false, ..envoys }
}

/// Visits everything. `least` and `witnesses` keep the model from becoming trivial unnoticed.
fn visit(envoys: Envoys, least: usize, witnesses: &[&str]) {
    let (name, seen) = (envoys.product.name, envoys.seen.clone());
    let checker = envoys.checker().spawn_bfs().join();
    println!(
        "{name}: {} states, {} steps, depth {}",
        checker.unique_state_count(),
        checker.state_count(),
        checker.max_depth()
    );
    for property in checker.model().properties() {
        let found = checker.discovery(property.name);
        println!("    {}: {}", if found.is_some() { "BROKEN" } else { "holds" }, property.name);
    }
    println!("    seen: {:?}", seen.lock().unwrap());
    checker.assert_properties();
    assert!(checker.is_done());
    assert!(checker.unique_state_count() >= least, "only {} states", checker.unique_state_count());
    for witness in witnesses {
        assert!(seen.lock().unwrap().contains_key(witness), "never seen: {witness}");
    }
}

const USUAL: [&str; 4] =
    ["a replay", "a duplicate is refused", "a stale write is refused", "the store is unavailable"];

#[test]
fn every_state_under_takeover() {
    let envoys = envoys("takeover", "takeover", "retain", [0; 3], ONE_OF_EACH);
    visit(envoys, 300_000, &[&USUAL[..], &["the upstream runs again"]].concat());
}

#[test]
fn every_state_under_retain() {
    let envoys = envoys("retain", "retain", "retain", [0; 3], ONE_OF_EACH);
    visit(envoys, 80_000, &["a replay", "a duplicate is refused", "an abandoned record is kept"]);
}

#[test]
fn every_state_with_another_request_among_them() {
    let budget = Budget { crashes: 1, lease_ends: 1, lost_replies: 1, ..NOTHING };
    let envoys = envoys("mismatch", "takeover", "retain", [0, 1, 0], budget);
    visit(envoys, 10_000, &["a replay", "a mismatch is refused", "the upstream runs again"]);
}

#[test]
fn every_state_with_a_renewal_and_a_failing_upstream() {
    let budget = Budget { renewals: 1, lease_ends: 1, resets: 1, ..NOTHING };
    let envoys = envoys("renewal", "takeover", "retain", [0; 3], budget);
    visit(two(envoys, &[200, 500]), 3_000, &["a replay", "a stale write is refused", "a failure is kept"]);
}

#[test]
fn every_state_with_a_client_that_leaves() {
    let budget = Budget { clients_gone: 1, lease_ends: 1, lost_replies: 1, crashes: 1, ..NOTHING };
    let envoys = envoys("client gone", "retain", "retain", [0; 3], budget);
    visit(two(envoys, &[200, 503]), 3_000, &["a replay", "a failure is kept", "an abandoned record is kept"]);
}

#[test]
fn every_state_where_an_unknown_outcome_is_released() {
    let budget = Budget { clients_gone: 1, resets: 1, lease_ends: 1, late_replies: 1, ..NOTHING };
    let envoys = envoys("release", "takeover", "release", [0; 3], budget);
    visit(two(envoys, &[200]), 3_000, &["a replay", "the upstream runs again"]);
}

/// Looks for what a deliberate mistake breaks.
fn is_broken(envoys: Envoys, mistake: Mistake, property: &'static str) {
    let failures = HasDiscoveries::AnyFailures;
    let checker =
        Envoys { mistake: Some(mistake), ..envoys }.checker().finish_when(failures).spawn_bfs().join();
    let broken: Vec<&str> = checker
        .discoveries()
        .into_keys()
        .filter(|name| checker.model().property(name).expectation != Expectation::Sometimes)
        .collect();
    let path = checker.discovery(property);
    let path = path.unwrap_or_else(|| panic!("{mistake:?} broke {broken:?}, not {property:?}"));
    println!("{mistake:?} breaks {property:?}: {:?}", path.into_actions());
}

#[test]
fn a_store_that_does_not_fence_is_found() {
    let envoys = envoys("no fencing", "takeover", "retain", [0; 3], ONE_OF_EACH);
    is_broken(envoys, Mistake::NoFencing, "a stale owner never overwrites");
}

#[test]
fn a_release_when_the_client_leaves_is_found() {
    let envoys = envoys("early release", "retain", "retain", [0; 3], Budget { clients_gone: 1, ..NOTHING });
    let property = "at most one execution while no lease ran out and no release was due";
    is_broken(envoys, Mistake::ReleaseOnClientGone, property);
}

#[test]
fn a_client_that_waits_for_ever_is_found() {
    let envoys = envoys("silence", "takeover", "retain", [0; 3], Budget { lost_replies: 1, ..NOTHING });
    is_broken(envoys, Mistake::SilentStore, "every client is answered");
}
