//! What an exchange asks for.

use std::rc::Rc;
use std::time::Duration;

use super::{Handover, NotDispatched};
use crate::config::Rule;
use crate::metrics::Counter;
use crate::record::Owner;
use crate::reply::LocalReply;
use crate::store::{Claim, Hold, Write};

/// Something to be done, in the order given. Names are imperative.
#[derive(Debug)]
pub enum Effect {
    /// Ask the store, and answer with [`super::Event::StoreAnswered`].
    Store(StoreOp),
    /// Keep trying this write until it is applied or stale, whatever becomes of the exchange.
    Outbox {
        /// Whose claim.
        hold: Hold,
        /// What.
        write: Write,
        /// How long it may matter, and how its lease is renewed meanwhile.
        rule: Rc<Rule>,
    },
    /// Send the held request to the execution listener, and answer with [`super::Event::Executed`].
    Execute {
        /// How long the upstream may take.
        timeout: Duration,
        /// Which attempt this is.
        attempt: u32,
        /// A claim is held.
        protected: bool,
        /// The length of the held body.
        body_bytes: u64,
    },
    /// Send this to the client in place of anything else.
    Reply(LocalReply),
    /// Remove a request header.
    RemoveRequestHeader(&'static str),
    /// Set a request header.
    SetRequestHeader(&'static str, String),
    /// Set a response header.
    SetResponseHeader(&'static str, Vec<u8>),
    /// Replace the whole head of the response, `:status` included, by these serialized lines.
    ReplaceResponseHead(Vec<u8>),
    /// Count.
    Count(Counter),
    /// The claim is held from here on.
    ClaimHeld,
    /// The claim is no longer held.
    ClaimEnded,
    /// Set the line that the access log shows.
    Publish(String),
    /// Let a further pass of this request (an internal redirect) find this claim.
    OfferHandover(Owner),
    /// A further pass of this request owns the claim.
    HandOver(Handover),
    /// Tell the operator.
    Warn(Warning),
}

/// A store operation of an exchange.
#[derive(Debug)]
pub enum StoreOp {
    /// Claim.
    Claim(Claim),
    /// Renew the lease.
    Renew(Hold, Write),
    /// Complete, fail or release: the claim's end.
    End(Hold, Write),
}

/// What the operator should read in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Warning {
    /// `allow_on_headers_stop_iteration` is probably missing.
    StopIterationMissing,
    /// A record can't be read.
    UnreadableRecord,
    /// A claim was lost while its exchange lived.
    LeaseLost,
    /// `limits.detached_bytes` is used up.
    NoRoomToExecute,
    /// The host could not give a held request.
    RequestUnreadable,
    /// `execute_cluster` names no cluster.
    ExecuteClusterUnknown,
    /// `execute_cluster` leads nowhere.
    ExecutionUnreachable,
    /// The execution listener has this filter in it.
    ExecutionLoops,
    /// The execution listener does not say how an execution ended.
    ExecutionDetailsMissing,
    /// The filter goes before an execution left.
    RootGone,
}

impl Warning {
    /// Why an execution never left.
    #[must_use]
    pub const fn of(why: NotDispatched) -> Self {
        match why {
            NotDispatched::Unreadable => Self::RequestUnreadable,
            NotDispatched::UnknownCluster => Self::ExecuteClusterUnknown,
            NotDispatched::NobodyListens => Self::ExecutionUnreachable,
            NotDispatched::RootGone => Self::RootGone,
        }
    }

    /// The log line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::StopIterationMissing => {
                "no byte of a request body was seen for body_timeout, and this worker has never seen a body before \
                 it resumed a request: set allow_on_headers_stop_iteration: true in this filter's PluginConfig \
                 (Envoy 1.35 or later), or \"fingerprint\": {\"body\": false} where it can't be set"
            }
            Self::UnreadableRecord => {
                "a record in the store is of an unknown format; the request was refused, since the record is not \
                 the same as no record"
            }
            Self::LeaseLost => {
                "another claim took this key over while its request was still being executed: lock_ttl is too short \
                 for this worker to renew it in time"
            }
            Self::NoRoomToExecute => {
                "limits.detached_bytes of this worker is used up: a request was refused before it ran. Each detached \
                 execution takes its body plus max_response_body_bytes"
            }
            Self::RequestUnreadable => "the host could not give a held request: it was refused before it ran",
            Self::ExecuteClusterUnknown => {
                "execute_cluster names no cluster of this Envoy: detached requests are refused before they run"
            }
            Self::ExecutionUnreachable => {
                "execute_cluster can't be reached: is the execution listener there, and do its cluster's circuit \
                 breakers leave room? Detached requests are refused before they run"
            }
            Self::ExecutionLoops => {
                "the execution listener leads back into this filter: take the filter out of its chain. Detached \
                 requests are refused before they run"
            }
            Self::ExecutionDetailsMissing => {
                "an execution was answered without the header x-idempotency-execution-details: the execution listener \
                 must add it, or every answer counts as unknown"
            }
            Self::RootGone => "the filter was replaced before a detached request left; it was not executed",
        }
    }
}
