//! envoy-idempotency: an Envoy filter that makes unsafe HTTP requests execute at most once per Idempotency-Key.
//!
//! ```text
//!  Envoy ──callbacks──> host::stream ──Event──> exchange ──Effect──> host::stream ──host calls──> Envoy
//!                            │                     │  ▲
//!                            │        StoreOp ─────┘  └───── StoreAnswer
//!                            │           ▼                       ▲
//!                       host::root ── store (shared_data over Envoy's shared data) ── record (rules)
//! ```
//!
//! The core is sans-IO: `exchange` takes events and gives effects, time is a parameter, stores sit behind traits.
//! Only `host` talks to Envoy, and only the wasm32 build has it: a native test that reaches a host call does not
//! link.
//!
//! | module | owns |
//! |---|---|
//! | [`config`] | the plugin configuration: JSON in, typed and checked, or every mistake at once |
//! | [`policy`] | which rule covers a request |
//! | [`headers`] | header lines as the host gives and takes them |
//! | [`key`], [`scope`] | the key, the caller, and the store key made of both |
//! | [`fingerprint`] | what makes two requests the same |
//! | [`exchange`] | one request/response and its state machine |
//! | [`outcome`] | how an execution ended |
//! | [`record`] | what a store holds and how it may change |
//! | [`store`] | the operations, and the stores |
//! | [`reply`] | refusals and replays |
//! | [`metrics`] | the names that are counted |
//! | `sorted` | sorting, with one copy of its code |

pub mod clock;
pub mod config;
pub mod exchange;
pub mod fingerprint;
pub mod headers;
pub mod key;
pub mod metrics;
pub mod outcome;
pub mod policy;
pub mod record;
pub mod reply;
pub mod scope;
mod sorted;
pub mod store;

#[cfg(target_arch = "wasm32")]
mod host;
