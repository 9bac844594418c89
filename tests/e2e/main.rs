//! End-to-end tests: the compiled filter in a real Envoy, between real clients and recording upstreams.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs
)]

mod support;

mod acceptance;
mod bad_input;
mod chain;
mod contract;
mod fidelity;
mod flood;
mod harness;
mod lifecycle;
mod outcomes;
mod redis;
mod redis_eviction;
mod redis_faults;
mod redis_pair;
mod requests;
mod smoke;
mod stop_iteration;
