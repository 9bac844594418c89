//! Records in Redis: what is said to it, how it is batched, and what its answers are worth. No IO.
//!
//! ```text
//! Operation ─ batch (queue, envelope) ─> a callout's body ─> Envoy's redis_proxy ─> Redis: scripts/*.lua
//!    Answer <─ operation ─ resp ────────────────────────── its answer
//! ```
//!
//! A record is a hash under `<key_prefix><64 hexadecimal digits of the store key>`, to be read with `HGETALL`:
//!
//! | field | holds |
//! |---|---|
//! | `v` | the format, `1`; anything else is unreadable and never the same as nothing |
//! | `state` | `in_flight`, `completed` or `failed` |
//! | `owner`, `attempt` | 32 hexadecimal digits; 1 for the first execution |
//! | `created`, `lease_until` | milliseconds of Redis's clock; the lease only while in flight |
//! | `fingerprint`, `fingerprint_version` | 64 hexadecimal digits, and how they were made |
//! | `reason` | of a failed one, the word of [`crate::record::Reason`] |
//! | `response` | of a completed one, as [`crate::record::codec`] encodes it |
//! | `resolved_at`, `resolved_from` | of one that an operator completed: when, and what it was; the filter reads neither |
//!
//! The record's end is the key's own expiry. The scripts use TIME, HMGET, HGET, EXISTS, HSET, HDEL, DEL, PEXPIRE and
//! PTTL on that key: with EVAL and EVALSHA, that is all an ACL has to allow. INFO is asked for by [`eviction`], and may be
//! left out.

pub mod batch;
pub mod diagnosis;
pub mod envelope;
pub mod eviction;
pub mod fault;
pub mod operation;
mod queue;
pub mod resp;
pub mod script;
pub mod slot;
pub mod transport;

pub use self::batch::{Answer, BatchId, BatchSettings, Batcher, Counts, Dispatch, Priority};
pub use self::diagnosis::{CalloutAnswer, Trap};
pub use self::eviction::{Eviction, EvictionWatch};
pub use self::fault::{CalloutFault, Cause, Fault};
pub use self::operation::{ClaimAnswer, Operation};
pub use self::script::SCRIPTS;
pub use self::transport::{Encoded, Transport};
