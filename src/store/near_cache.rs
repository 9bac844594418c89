//! A bounded copy of Redis's completed records in this Envoy's shared data, so that a replay needs no callout.
//!
//! It holds completed records only: a failed one may be resolved by an operator, and one in flight changes. A completed
//! one is final, so a copy that is shown is what Redis would have shown; but what an operator deletes from Redis is
//! shown until its copy's time is over. Tombstones are neither kept nor shown: the table makes some of its own when
//! room runs out, and Redis may still have what they stand for.

use std::rc::Rc;
use std::time::Duration;

use super::shared_data::cas::Cas;
use super::shared_data::{OpenError, SharedDataStore, StoreEvents};
use super::{ClaimReply, Hold, Store, Write, WriteReply};
use crate::clock::Timestamp;
use crate::config::{SharedDataConfig, WhenFull};
use crate::fingerprint::Fingerprint;
use crate::key::StoreKey;
use crate::record::Owner;
use crate::record::codec::StoredResponse;

/// How much is kept, and how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NearCacheBounds {
    /// Records.
    pub max_records: u32,
    /// Bytes, everything counted.
    pub max_bytes: u64,
    /// The longest life of a copy.
    pub ttl: Duration,
}

/// Copies of completed records; time is this process's, not Redis's.
#[derive(Debug)]
pub struct NearCache<C> {
    table: SharedDataStore<C>,
    ttl: Duration,
}

impl<C: Cas> NearCache<C> {
    /// Opens the cache of the records that `cluster` holds under `key_prefix`: every worker opens the same.
    ///
    /// # Errors
    /// [`OpenError`]: go on without a cache. Bounds that changed need a restart of Envoy, since the host frees nothing.
    pub fn open(
        cas: C,
        cluster: &str,
        key_prefix: &str,
        bounds: &NearCacheBounds,
    ) -> Result<Self, OpenError> {
        // Not a name that a configuration can give its own namespace; the length keeps the two parts apart.
        let namespace = format!("near cache {}:{cluster}{key_prefix}", cluster.len());
        let config = SharedDataConfig {
            namespace: None,
            max_records: bounds.max_records,
            max_bytes: bounds.max_bytes,
            when_full: WhenFull::EvictCompleted,
        };
        Ok(Self { table: SharedDataStore::open(cas, &namespace, &config)?, ttl: bounds.ttl })
    }

    /// The answer of a claim, if it is known here: always [`ClaimReply::Completed`]. The caller compares fingerprints.
    #[must_use]
    pub fn get(&mut self, key: &StoreKey, now: Timestamp) -> Option<ClaimReply> {
        let (fingerprint, response) = self.table.peek(key, now)?;
        is_whole(&response).then_some(ClaimReply::Completed { fingerprint, response })
    }

    /// Keeps a copy of what Redis holds for `life` more; `owner` is any random token of the caller's, best its claim's.
    ///
    /// `false` if it is not kept: there was no room, there is a copy already, or it is a tombstone.
    pub fn put(
        &mut self,
        key: &StoreKey,
        owner: Owner,
        fingerprint: Fingerprint,
        response: &[u8],
        life: Duration,
        now: Timestamp,
    ) -> bool {
        let record_ttl = self.ttl.min(life);
        if record_ttl < Duration::from_millis(1) || !is_whole(response) {
            return false;
        }
        let hold = Hold { key: *key, owner, fingerprint, attempt: 1 };
        let write = Write::Complete { response: Rc::from(response), record_ttl };
        self.table.write(&hold, &write, now) == Ok(WriteReply::Applied)
    }

    /// What the table did since this was last called.
    pub fn take_events(&mut self) -> StoreEvents {
        self.table.take_events()
    }
}

fn is_whole(response: &[u8]) -> bool {
    StoredResponse::decode(response).is_ok_and(|response| response.body.is_some())
}
