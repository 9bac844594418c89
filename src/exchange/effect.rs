//! What an exchange asks for.

use std::rc::Rc;

use super::Handover;
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
}

impl Warning {
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
        }
    }
}
