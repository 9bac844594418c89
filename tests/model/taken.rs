//! What an exchange asked for, as plain data: the one place where the models match its effects.

use std::rc::Rc;

use idempotency::config::Rule;
use idempotency::exchange::{Effect, Handover, Io, StoreAnswer, StoreOp};
use idempotency::reply::LocalReply;
use idempotency::store::{Claim, Hold, Write};

/// A store operation that can be carried out more than once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    Claim(Claim),
    Renew(Hold, Write),
    End(Hold, Write),
}

/// The effects of one event.
#[derive(Debug, Default)]
pub struct Taken {
    /// Operations that are answered later.
    pub asked: Vec<Asked>,
    pub outbox: Vec<(Hold, Write, Rc<Rule>)>,
    pub reply: Option<LocalReply>,
    pub request_headers: Vec<(&'static str, String)>,
    pub handover: Option<Handover>,
    /// Claims that are held from here on, less those that are no longer.
    pub claims: i64,
    /// More than one reply was sent.
    pub replied_twice: bool,
}

/// Collects effects; `answer` is a store that answers at once, or says that it does not.
pub struct Taking<'a> {
    pub taken: Taken,
    pub answer: &'a mut dyn FnMut(&Asked) -> Option<StoreAnswer>,
}

impl Io for Taking<'_> {
    fn apply(&mut self, effect: Effect) {
        let taken = &mut self.taken;
        match effect {
            Effect::Store(op) => panic!("drive asks for {op:?}"),
            Effect::Execute { .. } => panic!("no rule of the models is detached"),
            Effect::Outbox { hold, write, rule } => taken.outbox.push((hold, write, rule)),
            Effect::Reply(reply) => taken.replied_twice |= taken.reply.replace(reply).is_some(),
            Effect::SetRequestHeader(name, value) => taken.request_headers.push((name, value)),
            Effect::HandOver(handover) => taken.handover = Some(handover),
            Effect::ClaimHeld => taken.claims += 1,
            Effect::ClaimEnded => taken.claims -= 1,
            Effect::RemoveRequestHeader(_)
            | Effect::SetResponseHeader(..)
            | Effect::ReplaceResponseHead(_)
            | Effect::Count(_)
            | Effect::Publish(_)
            | Effect::OfferHandover(_)
            | Effect::Warn(_) => {}
        }
    }

    fn ask(&mut self, op: StoreOp) -> Option<StoreAnswer> {
        let asked = match op {
            StoreOp::Claim(claim) => Asked::Claim(claim),
            StoreOp::Renew(hold, write) => Asked::Renew(hold, write),
            StoreOp::End(hold, write) => Asked::End(hold, write),
        };
        let answer = (self.answer)(&asked);
        if answer.is_none() {
            self.taken.asked.push(asked);
        }
        answer
    }
}

impl Asked {
    /// The answer when nobody knows whether it was carried out.
    pub fn unavailable(&self) -> StoreAnswer {
        use idempotency::store::StoreError::Unavailable;
        match self {
            Self::Claim(_) => StoreAnswer::Claim(Err(Unavailable)),
            Self::Renew(..) => StoreAnswer::Renew(Err(Unavailable)),
            Self::End(..) => StoreAnswer::End(Err(Unavailable)),
        }
    }
}
