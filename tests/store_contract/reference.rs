//! The contract in its plainest form: a map, and the rules of `record` applied to it.

use std::collections::BTreeMap;

use idempotency::clock::Timestamp;
use idempotency::key::StoreKey;
use idempotency::record::{
    ClaimDecision, Record, RecordState, WriteDecision, decide_claim, decide_write, in_flight,
};
use idempotency::store::{Claim, ClaimReply, Hold, Store, StoreError, Write, WriteReply};

/// A store without bounds.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ReferenceStore(pub BTreeMap<StoreKey, Record<Vec<u8>>>);

impl Store for ReferenceStore {
    fn claim(&mut self, claim: &Claim, now: Timestamp) -> Result<ClaimReply, StoreError> {
        let found = self.0.get(&claim.key);
        let decision = decide_claim(found, &claim.terms, now);
        if let ClaimDecision::Take { attempt } = decision {
            self.0.insert(claim.key, in_flight(&claim.terms, attempt, now));
            return Ok(ClaimReply::Claimed { attempt });
        }
        let record = found.expect("only a claim that takes is decided over nothing");
        let fingerprint = record.fingerprint;
        Ok(match decision {
            ClaimDecision::Take { attempt } | ClaimDecision::Own { attempt } => {
                ClaimReply::Claimed { attempt }
            }
            ClaimDecision::InFlight { elapsed, remaining } => {
                ClaimReply::InFlight { fingerprint, elapsed, remaining }
            }
            ClaimDecision::Abandoned => ClaimReply::Abandoned { fingerprint },
            ClaimDecision::Failed { reason } => ClaimReply::Failed { fingerprint, reason },
            ClaimDecision::Completed => {
                let RecordState::Completed { response } = &record.state else { panic!("{record:?}") };
                ClaimReply::Completed { fingerprint, response: response.clone() }
            }
        })
    }

    fn write(&mut self, hold: &Hold, write: &Write, now: Timestamp) -> Result<WriteReply, StoreError> {
        let found = self.0.get(&hold.key);
        match decide_write(found, &hold.owner, write.kind(), now) {
            WriteDecision::AlreadyApplied => return Ok(WriteReply::Applied),
            WriteDecision::Stale => return Ok(WriteReply::Stale),
            WriteDecision::Apply => {}
        }
        let live = found.filter(|record| now < record.expires);
        let (created, attempt, fingerprint) = live.map_or((now, hold.attempt, hold.fingerprint), |live| {
            (live.created, live.attempt, live.fingerprint)
        });
        let (state, expires) = match write {
            Write::Release => {
                self.0.remove(&hold.key);
                return Ok(WriteReply::Applied);
            }
            Write::Renew { lock_ttl, record_ttl } => (
                RecordState::InFlight { lease_until: now.after(*lock_ttl) },
                now.after(*record_ttl).max(now.after(*lock_ttl)),
            ),
            Write::Complete { response, record_ttl } => {
                (RecordState::Completed { response: response.to_vec() }, now.after(*record_ttl))
            }
            Write::Fail { reason, failed_ttl } => {
                (RecordState::Failed { reason: *reason }, now.after(*failed_ttl))
            }
        };
        let owner = hold.owner;
        self.0.insert(hold.key, Record { fingerprint, owner, attempt, created, expires, state });
        Ok(WriteReply::Applied)
    }
}
