//! What an exchange is told.

use std::rc::Rc;

use super::{ExecutionAnswer, Handover};
use crate::config::Rule;
use crate::headers::{HeaderBlock, RequestHead};
use crate::outcome::{ClosingFacts, ResponseFacts};
use crate::record::Owner;
use crate::store::{ClaimReply, StoreError, WriteReply};

/// Something that happened. Names are in the past tense.
#[derive(Debug)]
pub enum Event<'a> {
    /// The head of a request that `rule` covers arrived.
    RequestHead {
        /// The rule.
        rule: Rc<Rule>,
        /// The head.
        head: &'a RequestHead<'a>,
        /// The request ends with it.
        end: bool,
        /// 16 random bytes, for this claim alone.
        owner: Owner,
    },
    /// The route names an unknown rule.
    RouteMisconfigured,
    /// The host could not give the head or a part of the body of a covered request.
    RequestUnreadable,
    /// The head of the further pass of an internal redirect arrived; the earlier pass handed its claim over.
    Adopted(Handover),
    /// Body bytes arrived (not those of an earlier callback again).
    RequestBody {
        /// The bytes.
        chunk: &'a [u8],
        /// The request ends with them.
        end: bool,
    },
    /// The request's trailers arrived: its end.
    RequestTrailers,
    /// The store answered the operation that is out.
    StoreAnswered(StoreAnswer),
    /// The head of a response arrived, whoever made it.
    ResponseHead {
        /// What Envoy says of it.
        facts: ResponseFacts<'a>,
        /// Its header lines; `None` when the host could not give them.
        headers: Option<&'a HeaderBlock>,
        /// The response ends with it.
        end: bool,
    },
    /// Body bytes of the response arrived (not those of an earlier callback again).
    ResponseBody {
        /// The bytes.
        chunk: &'a [u8],
        /// Bytes that arrived as well and are not shown: nobody wants them, or the host could not give them.
        skipped: usize,
        /// The response ends with them.
        end: bool,
    },
    /// The detached execution ended.
    Executed(ExecutionAnswer<'a>),
    /// The response's trailers arrived: its end.
    ResponseTrailers,
    /// Some time passed.
    Ticked,
    /// The stream is gone.
    StreamClosed(ClosingFacts<'a>),
}

/// A store's answer to the operation an exchange had out.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum StoreAnswer {
    /// To a claim.
    Claim(Result<ClaimReply, StoreError>),
    /// To a renewal.
    Renew(Result<WriteReply, StoreError>),
    /// To the write that ends the claim.
    End(Result<WriteReply, StoreError>),
}
