//! The operations every store offers, and what each may answer.
//!
//! The contract (tested by one suite against every store):
//!
//! - One key, one state machine; each operation is one atomic step; time is the store's.
//! - A claim answers exactly one [`ClaimReply`]. A claim that finds its own owner in flight is claimed.
//! - Renew, complete, fail and release act only on an in-flight record with their owner. The same operation
//!   again on the terminal record it made is [`WriteReply::Applied`] and writes nothing; anything else is
//!   [`WriteReply::Stale`] and writes nothing. Complete, fail and renew also write when the record is gone.
//! - The same operation with the same owner twice is the same as once: a reply may be lost.
//! - A [`StoreError`] means the operation may have been executed.

pub mod near_cache;
pub mod outbox;
pub mod redis;
pub mod shared_data;

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::fingerprint::Fingerprint;
use crate::key::StoreKey;
use crate::record::{ClaimTerms, Owner, Reason, WriteKind};

/// A claim to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Where.
    pub key: StoreKey,
    /// Under which terms.
    pub terms: ClaimTerms,
}

/// A claim that holds, or may hold: what every later write is fenced by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hold {
    /// Where.
    pub key: StoreKey,
    /// The claim's token.
    pub owner: Owner,
    /// What the key is used for: needed where the record is gone and has to be written anew.
    pub fingerprint: Fingerprint,
    /// The attempt this claim is.
    pub attempt: u32,
}

/// A fenced operation on a [`Hold`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Extend the lease and the record's life.
    Renew {
        /// The lease.
        lock_ttl: Duration,
        /// The record's life.
        record_ttl: Duration,
    },
    /// Keep the response.
    Complete {
        /// As [`crate::record::codec`] encodes it.
        response: Rc<[u8]>,
        /// The record's life, from now.
        record_ttl: Duration,
    },
    /// Keep the failure.
    Fail {
        /// Why.
        reason: Reason,
        /// The record's life, from now.
        failed_ttl: Duration,
    },
    /// Give the claim back: as if it had never been.
    Release,
}

impl Write {
    /// The kind, as the record's rules know it.
    #[must_use]
    pub const fn kind(&self) -> WriteKind {
        match self {
            Self::Renew { .. } => WriteKind::Renew,
            Self::Complete { .. } => WriteKind::Complete,
            Self::Fail { .. } => WriteKind::Fail,
            Self::Release => WriteKind::Release,
        }
    }
}

/// What a claim comes to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ClaimReply {
    /// The claim holds: execute.
    Claimed {
        /// 1 for the first execution.
        attempt: u32,
    },
    /// Somebody else executes.
    InFlight {
        /// What for.
        fingerprint: Fingerprint,
        /// Since when.
        elapsed: Duration,
        /// How long its lease still holds.
        remaining: Duration,
    },
    /// Somebody's lease ran out, and this claim may not take over.
    Abandoned {
        /// What for.
        fingerprint: Fingerprint,
    },
    /// Done before.
    Completed {
        /// What for.
        fingerprint: Fingerprint,
        /// As [`crate::record::codec`] encodes it.
        response: Vec<u8>,
    },
    /// Failed before.
    Failed {
        /// What for.
        fingerprint: Fingerprint,
        /// Why.
        reason: Reason,
    },
}

/// What a fenced operation comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteReply {
    /// The store is as the operation wants it.
    Applied,
    /// The response had no room: what was written is a tombstone.
    AppliedAsTombstone,
    /// Another owner's, or another end: nothing was written.
    Stale,
}

/// Why a store gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StoreError {
    /// No room for a new record. Never let through.
    Full,
    /// No answer in time, or one that can't be trusted. It may have been executed.
    Unavailable,
    /// The record is of an unknown format: never "absent", never let through.
    Unreadable,
}

impl StoreError {
    /// The word used in logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Unavailable => "unavailable",
            Self::Unreadable => "unreadable",
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A store that answers at once.
pub trait Store {
    /// Tries to become the one that executes.
    ///
    /// # Errors
    /// [`StoreError::Full`] when a new record has no room; the others as they say.
    fn claim(&mut self, claim: &Claim, now: Timestamp) -> Result<ClaimReply, StoreError>;

    /// Carries out a fenced operation.
    ///
    /// # Errors
    /// [`StoreError::Full`] when a record that is gone has no room to be written anew; the others as they say. It may
    /// have been executed.
    fn write(&mut self, hold: &Hold, write: &Write, now: Timestamp) -> Result<WriteReply, StoreError>;
}
