//! `idempotency inspect`, `list`, `forget` and `resolve`: the real command against a real Redis, whose records the
//! filter's own operations made.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    missing_docs
)]

mod changes;
mod command;
mod inspect;
mod list;
mod races;
mod server;
mod ways;
