//! What a store holds under one key, and the rules by which it changes.
//!
//! Every store applies these rules in one atomic step: the shared-data table and the tests' reference call these
//! functions, the Redis scripts say the same in Lua. The rules know no clock and no store.
//!
//! | found, beside an operation | claim | renew | complete / fail | release |
//! |---|---|---|---|---|
//! | nothing, or an expired record | insert, attempt 1 | re-create | write | applied |
//! | in flight, this owner | claimed, as before | extend | write | delete |
//! | in flight, other owner, lease alive | in flight | stale | stale | stale |
//! | in flight, other owner, lease over | takeover or abandoned | stale | stale | stale |
//! | terminal record made by the same operation and owner | its answer | stale | applied | stale |
//! | any other terminal record | its answer | stale | stale | stale |

pub mod codec;

use std::fmt;
use std::time::Duration;

use crate::clock::Timestamp;
use crate::config::OnAbandoned;
use crate::fingerprint::Fingerprint;

/// The random 128-bit token of a claim; every later write is fenced by it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Owner([u8; 16]);

impl Owner {
    /// An owner of 16 random bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The token's bytes.
    #[must_use]
    pub const fn bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Owner({:02x?}…)", self.0.first_chunk::<2>().unwrap_or(&[0, 0]))
    }
}

/// Why an execution is a failed record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// The upstream answered with a failing status.
    Status,
    /// No answer within the route's time.
    Timeout,
    /// The upstream reset the stream, or broke the protocol.
    Reset,
    /// The response had no proper end.
    Truncated,
    /// The client left after the request was forwarded.
    ClientGone,
    /// A proxy between this one and the upstream answered for a request that may have run.
    Intermediary,
    /// Another filter's own reply took the place of the upstream's response.
    Replaced,
    /// An internal redirect left this pass, and no later pass took the claim over.
    Redirected,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 8] = [
        Self::Status,
        Self::Timeout,
        Self::Reset,
        Self::Truncated,
        Self::ClientGone,
        Self::Intermediary,
        Self::Replaced,
        Self::Redirected,
    ];

    /// The word used in answers, logs and metrics.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Timeout => "timeout",
            Self::Reset => "reset",
            Self::Truncated => "truncated",
            Self::ClientGone => "client_gone",
            Self::Intermediary => "intermediary",
            Self::Replaced => "replaced",
            Self::Redirected => "redirected",
        }
    }

    /// The number that stands for it in a record.
    #[must_use]
    pub const fn code(self) -> u8 {
        match self {
            Self::Status => 1,
            Self::Timeout => 2,
            Self::Reset => 3,
            Self::Truncated => 4,
            Self::ClientGone => 5,
            Self::Intermediary => 6,
            Self::Replaced => 7,
            Self::Redirected => 8,
        }
    }

    /// The reason that `code` stands for.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.code() == code)
    }
}

/// A record: `R` is how the store at hand refers to a kept response.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Record<R> {
    /// What the key was used for.
    pub fingerprint: Fingerprint,
    /// Whose claim made it.
    pub owner: Owner,
    /// 1 for the first execution, one more at each takeover.
    pub attempt: u32,
    /// When this attempt was claimed.
    pub created: Timestamp,
    /// When the record is forgotten.
    pub expires: Timestamp,
    /// What is known of the execution.
    pub state: RecordState<R>,
}

/// What is known of the execution.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum RecordState<R> {
    /// It runs, or its worker died.
    InFlight {
        /// Alive until then, abandoned from then on.
        lease_until: Timestamp,
    },
    /// The upstream's response.
    Completed {
        /// The kept response, or a tombstone of it.
        response: R,
    },
    /// Something may have happened; the outcome is unknown or bad.
    Failed {
        /// Why.
        reason: Reason,
    },
}

/// The attempt to become the one that executes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimTerms {
    /// The token of this attempt.
    pub owner: Owner,
    /// What the key is used for.
    pub fingerprint: Fingerprint,
    /// The lease.
    pub lock_ttl: Duration,
    /// The record's life, so that a takeover knows the attempt number.
    pub record_ttl: Duration,
    /// Whether a record whose lease ran out may be taken over.
    pub on_abandoned: OnAbandoned,
}

/// What a claim comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaimDecision {
    /// Write [`in_flight`] with this attempt number; the claim holds.
    Take {
        /// 1, or one more than the abandoned record's.
        attempt: u32,
    },
    /// The record already is this claim: its reply was lost.
    Own {
        /// The attempt it holds.
        attempt: u32,
    },
    /// In flight, lease alive.
    InFlight {
        /// Since the attempt was claimed.
        elapsed: Duration,
        /// Until the lease ends.
        remaining: Duration,
    },
    /// In flight, lease over, not to be taken over by this request.
    Abandoned,
    /// Completed: read the response.
    Completed,
    /// Failed.
    Failed {
        /// Why.
        reason: Reason,
    },
}

/// Decides a claim over what the store holds.
#[must_use]
pub fn decide_claim<R>(found: Option<&Record<R>>, terms: &ClaimTerms, now: Timestamp) -> ClaimDecision {
    let Some(record) = found.filter(|record| now < record.expires) else {
        return ClaimDecision::Take { attempt: 1 };
    };
    match &record.state {
        RecordState::InFlight { .. } if record.owner == terms.owner => {
            ClaimDecision::Own { attempt: record.attempt }
        }
        RecordState::InFlight { lease_until } if now < *lease_until => {
            ClaimDecision::InFlight { elapsed: now.since(record.created), remaining: lease_until.since(now) }
        }
        // A takeover runs the request again, so only the same request may do it: another one is a mismatch.
        RecordState::InFlight { .. }
            if terms.on_abandoned == OnAbandoned::Takeover && record.fingerprint == terms.fingerprint =>
        {
            ClaimDecision::Take { attempt: record.attempt.saturating_add(1) }
        }
        RecordState::InFlight { .. } => ClaimDecision::Abandoned,
        RecordState::Completed { .. } => ClaimDecision::Completed,
        RecordState::Failed { reason } => ClaimDecision::Failed { reason: *reason },
    }
}

/// The record of a claim that holds.
#[must_use]
pub fn in_flight<R>(terms: &ClaimTerms, attempt: u32, now: Timestamp) -> Record<R> {
    Record {
        fingerprint: terms.fingerprint,
        owner: terms.owner,
        attempt,
        created: now,
        // The record outlives its lease, or a takeover could not tell the attempt.
        expires: now.after(terms.record_ttl.max(terms.lock_ttl)),
        state: RecordState::InFlight { lease_until: now.after(terms.lock_ttl) },
    }
}

/// Which fenced operation asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteKind {
    /// Extend the lease.
    Renew,
    /// Keep the response.
    Complete,
    /// Keep the failure.
    Fail,
    /// Give the claim back.
    Release,
}

/// What a fenced operation may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteDecision {
    /// Write (or, for a release, delete).
    Apply,
    /// It is as the operation wants it: nothing to write.
    AlreadyApplied,
    /// Another owner's, or another end: nothing may be written.
    Stale,
}

/// Decides a fenced operation over what the store holds.
#[must_use]
pub fn decide_write<R>(
    found: Option<&Record<R>>,
    owner: &Owner,
    kind: WriteKind,
    now: Timestamp,
) -> WriteDecision {
    let Some(record) = found.filter(|record| now < record.expires) else {
        // Nobody took over: dropping the only trace of an execution would run it again.
        return match kind {
            WriteKind::Renew | WriteKind::Complete | WriteKind::Fail => WriteDecision::Apply,
            WriteKind::Release => WriteDecision::AlreadyApplied,
        };
    };
    if record.owner != *owner {
        return WriteDecision::Stale;
    }
    match (&record.state, kind) {
        (RecordState::InFlight { .. }, _) => WriteDecision::Apply,
        (RecordState::Completed { .. }, WriteKind::Complete)
        | (RecordState::Failed { .. }, WriteKind::Fail) => WriteDecision::AlreadyApplied,
        (RecordState::Completed { .. }, WriteKind::Renew | WriteKind::Fail | WriteKind::Release)
        | (RecordState::Failed { .. }, WriteKind::Renew | WriteKind::Complete | WriteKind::Release) => {
            WriteDecision::Stale
        }
    }
}
