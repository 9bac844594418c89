//! The Redis store against a real Redis: the contract, its scripts in real time, its faults; and its batches against
//! a server that misbehaves in every way, on virtual time.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs
)]

mod batches;
mod contract;
#[allow(dead_code, reason = "the suites of the embedded store use all of it")]
#[path = "../store_contract/fake_cas.rs"]
mod fake_cas;
mod faults;
mod fixture;
mod flaky;
mod near_cache;
mod scripts;
mod server;
mod shards;
#[path = "../store_contract/suite.rs"]
mod suite;
