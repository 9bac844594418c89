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
mod chaos;
mod client_guide;
mod contract;
mod detached;
mod detached_equivalence;
mod failover;
mod fidelity;
mod flood;
mod gateways;
mod guarantees;
mod harness;
mod lifecycle;
mod mesh;
mod moved_primary;
mod observability;
mod outcomes;
mod public_cases;
mod redis;
mod redis_cases;
mod redis_cluster;
mod redis_eviction;
mod redis_faults;
mod redis_pair;
mod release;
mod requests;
mod shipped_configurations;
mod smoke;
mod stop_iteration;
mod transports;
