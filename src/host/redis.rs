//! Redis from inside Envoy: operations wait for the next callout, the root owns every callout, and answers find their
//! way back to streams that may be gone by then.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::hostcalls::{self, Buffer, HostError, Map};
use super::shared_data::HostCas;
use super::stream::StreamState;
use super::wake::Wake;
use crate::clock::Timestamp;
use crate::config::{Config, Dialect, RedisConfig};
use crate::exchange::{StoreAnswer, StoreOp};
use crate::fingerprint::Fingerprint;
use crate::key::StoreKey;
use crate::metrics::Counter;
use crate::record::Owner;
use crate::store::near_cache::{NearCache, NearCacheBounds};
use crate::store::outbox::EntryId;
use crate::store::redis::{
    Answer, BatchId, BatchSettings, Batcher, CalloutAnswer, Encoded, Eviction, EvictionWatch, Operation,
    Priority, SCRIPTS, Transport, Trap,
};
use crate::store::{ClaimReply, Hold, StoreError, Write, WriteReply};

/// How often each worker asks whether Redis evicts. The tests do not wait for so long.
const EVICTION_CHECK_PAUSE: Duration =
    Duration::from_millis(if cfg!(feature = "test-hooks") { 300 } else { 600_000 });

/// The link of one worker.
pub struct Link {
    cluster: String,
    authority: String,
    /// The value of `authorization`, where a gateway wants one.
    authorization: Option<String>,
    transport: Transport,
    batcher: Batcher,
    near_cache: Option<NearCache<HostCas>>,
    pending: BTreeMap<u64, Pending>,
    last_ticket: u64,
    /// By token: as many as may be in flight at once.
    callouts: Vec<(u32, Callout)>,
    wake: Rc<Wake>,
    eviction: EvictionWatch,
    key_prefix: String,
    timeout: Duration,
    /// The callout that asks whether Redis evicts.
    eviction_check: Option<u32>,
    /// What it said, to be told.
    found: Option<Eviction>,
}

/// Who waits for an operation's answer.
pub struct Pending {
    /// When it was asked for.
    pub since: Timestamp,
    /// Who.
    pub waits: Waits,
}

/// Who waits.
pub enum Waits {
    /// An exchange; it is kept until the answer came, whatever became of its stream.
    Exchange {
        /// Its stream's context.
        id: u32,
        /// The exchange.
        state: Rc<RefCell<StreamState>>,
        /// What was asked.
        kind: Kind,
        /// What the near cache takes once Redis has it.
        copy: Option<Box<Copy>>,
    },
    /// The outbox.
    Outbox(EntryId),
}

/// What an exchange asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A claim under this key.
    Claim(StoreKey),
    /// A renewal.
    Renew,
    /// The claim's end.
    End,
}

/// A completed record on its way.
pub struct Copy {
    key: StoreKey,
    owner: Owner,
    fingerprint: Fingerprint,
    response: Rc<[u8]>,
    life: Duration,
}

struct Callout {
    batch: BatchId,
    operations: usize,
    sent: Timestamp,
    timeout: Duration,
}

impl Link {
    /// Opens the link; nothing is sent yet.
    ///
    /// # Errors
    /// What the operator has to mend.
    pub fn open(settings: &RedisConfig, config: &Config, wake: Rc<Wake>) -> Result<Self, String> {
        let gateway = settings.gateway.as_ref();
        let transport = gateway.map_or(Transport::Link, |gateway| match gateway.dialect {
            Dialect::Webdis => Transport::Webdis,
            Dialect::UpstashResp2 => Transport::UpstashResp2,
            Dialect::UpstashBase64 => Transport::UpstashBase64,
        });
        let token_env = gateway.and_then(|gateway| gateway.token_env.as_deref());
        let authorization = token_env.map(bearer).transpose()?;
        let near_cache = settings.near_cache.as_ref().and_then(|near| {
            let bounds =
                NearCacheBounds { max_records: near.max_records, max_bytes: near.max_bytes, ttl: near.ttl };
            NearCache::open(HostCas, &settings.cluster, &settings.key_prefix, &bounds)
                .map_err(|error| log::warn!("no near cache: {error}"))
                .ok()
        });
        let longest = config.rules.iter().map(|rule| rule.max_response_body_bytes).max();
        let batches = BatchSettings {
            key_prefix: settings.key_prefix.clone(),
            timeout: settings.timeout,
            max_in_flight_batches: usize::try_from(settings.max_in_flight_batches).unwrap_or(1),
            max_response_body_bytes: longest.unwrap_or(0),
            transport,
        };
        Ok(Self {
            cluster: settings.cluster.clone(),
            authority: gateway.map_or_else(|| "redis".to_owned(), |gateway| gateway.authority.clone()),
            authorization,
            transport,
            batcher: Batcher::new(batches, SCRIPTS),
            near_cache,
            pending: BTreeMap::new(),
            last_ticket: 0,
            callouts: Vec::new(),
            eviction: EvictionWatch::new(EVICTION_CHECK_PAUSE),
            key_prefix: settings.key_prefix.clone(),
            timeout: settings.timeout,
            eviction_check: None,
            found: None,
            wake,
        })
    }

    /// What is known without asking Redis.
    pub fn known(
        &mut self,
        op: &StoreOp,
        now: Timestamp,
        count: &mut dyn FnMut(Counter),
    ) -> Option<StoreAnswer> {
        let StoreOp::Claim(claim) = op else { return None };
        let near_cache = self.near_cache.as_mut()?;
        let reply = near_cache.get(&claim.key, now);
        count(if reply.is_some() { Counter::NearCacheHits } else { Counter::NearCacheMisses });
        Some(StoreAnswer::Claim(Ok(reply?)))
    }

    /// Puts an exchange's operation into the next callout.
    pub fn ask(&mut self, op: StoreOp, id: u32, state: Rc<RefCell<StreamState>>, now: Timestamp) {
        let (operation, kind, copy) = match op {
            StoreOp::Claim(claim) => {
                let key = claim.key;
                (Operation::Claim(claim), Kind::Claim(key), None)
            }
            StoreOp::Renew(hold, write) => (Operation::Write(hold, write), Kind::Renew, None),
            StoreOp::End(hold, write) => {
                let copy = copy_of(&hold, &write);
                (Operation::Write(hold, write), Kind::End, copy)
            }
        };
        self.submit(operation, Waits::Exchange { id, state, kind, copy }, Priority::Normal, now);
    }

    /// Puts a write of the outbox into the next callout.
    pub fn retry(&mut self, entry: EntryId, hold: Hold, write: Write, now: Timestamp) {
        self.submit(Operation::Write(hold, write), Waits::Outbox(entry), Priority::Outbox, now);
    }

    fn submit(&mut self, operation: Operation, waits: Waits, priority: Priority, now: Timestamp) {
        self.last_ticket = self.last_ticket.wrapping_add(1);
        self.pending.insert(self.last_ticket, Pending { since: now, waits });
        self.batcher.submit(self.last_ticket, operation, priority, now);
        self.wake.ring();
    }

    /// Sends what may be sent. Only from the root's own callbacks: the answer comes to the context that runs.
    pub fn dispatch(&mut self, now: Timestamp, sent: &mut dyn FnMut(usize)) -> Option<Trap> {
        let mut trap = None;
        while let Some(dispatch) = self.batcher.poll(now) {
            match self.call(&dispatch.request, dispatch.timeout) {
                Ok(token) => {
                    sent(dispatch.operations);
                    let callout = Callout {
                        batch: dispatch.batch,
                        operations: dispatch.operations,
                        sent: now,
                        timeout: dispatch.timeout,
                    };
                    self.callouts.push((token, callout));
                }
                Err(status) => {
                    let unknown = status.0 == hostcalls::BAD_ARGUMENT;
                    trap = Some(if unknown { Trap::UnknownCluster } else { Trap::NobodyListens });
                    self.batcher.on_refused(dispatch.batch, now);
                }
            }
        }
        if !self.callouts.is_empty() {
            self.check_eviction(now);
        }
        trap
    }

    fn call(&self, request: &Encoded, timeout: Duration) -> Result<u32, HostError> {
        let mut headers = vec![
            (":method", "POST"),
            (":path", request.path.as_str()),
            (":authority", self.authority.as_str()),
        ];
        headers.extend_from_slice(request.headers);
        headers.extend(self.authorization.as_deref().map(|value| ("authorization", value)));
        hostcalls::http_call(&self.cluster, &headers, &request.body, timeout)
    }

    /// Behind a batch, so that no operation waits for it.
    fn check_eviction(&mut self, now: Timestamp) {
        if self.eviction_check.is_some() {
            return;
        }
        let Some(check) = self.eviction.poll(&self.key_prefix, self.transport, now) else { return };
        self.eviction_check = self.call(&check, self.timeout).ok();
        if self.eviction_check.is_none() {
            self.eviction.on_refused(now);
        }
    }

    /// What was found out about Redis's evicting, if that is new.
    pub const fn take_found(&mut self) -> Option<Eviction> {
        self.found.take()
    }

    /// Whether Redis is known to evict.
    pub const fn is_evicting(&self) -> bool {
        self.eviction.is_evicting()
    }

    /// A callout was answered. Says what is wrong with the way to Redis, if the answer shows it.
    pub fn on_reply(&mut self, token: u32, headers: usize, body_size: usize, now: Timestamp) -> Option<Trap> {
        // Without headers there is nothing that may be read.
        let status = if headers == 0 { None } else { hostcalls::header(Map::CalloutResponse, ":status") };
        let status = status.and_then(|value| std::str::from_utf8(&value).ok()?.parse().ok());
        let body = if headers == 0 {
            Vec::new()
        } else {
            hostcalls::buffer(Buffer::CalloutResponseBody, 0, body_size).unwrap_or_default()
        };
        let transport = self.transport;
        let mut answer =
            CalloutAnswer { headers, status, body: &body, operations: 1, is_early: false, transport };
        if self.eviction_check.take_if(|check| *check == token).is_some() {
            let replies = answer.replies().map(|replies| transport.as_of_link(replies, 1));
            self.found =
                self.eviction.on_reply(replies.as_deref().map_err(|fault| *fault), now).or(self.found.take());
            return None;
        }
        let at = self.callouts.iter().position(|(sent, _)| *sent == token)?;
        let (_, callout) = self.callouts.swap_remove(at);
        answer.operations = callout.operations;
        answer.is_early = now.since(callout.sent) < callout.timeout / 2;
        let trap = answer.diagnose();
        self.batcher.on_reply(callout.batch, answer.replies(), now);
        trap
    }

    /// Time passed.
    pub fn on_tick(&mut self, now: Timestamp) {
        self.batcher.on_tick(now);
    }

    /// The next answer, and who waits for it.
    pub fn next_answer(&mut self) -> Option<(Pending, Answer)> {
        loop {
            let (ticket, answer) = self.batcher.next_answer()?;
            if let Some(pending) = self.pending.remove(&ticket) {
                return Some((pending, answer));
            }
        }
    }

    /// Whether an answer waits for delivery.
    pub fn has_answers(&self) -> bool {
        self.batcher.has_answers()
    }

    /// Everybody who still waits: nobody will answer them any more.
    pub fn abandon(&mut self) -> Vec<Pending> {
        std::mem::take(&mut self.pending).into_values().collect()
    }

    /// Whether nobody waits.
    pub fn is_idle(&self) -> bool {
        self.pending.is_empty() && self.batcher.is_idle()
    }

    /// Why operations failed since this was last called, for the log.
    pub fn take_causes(&mut self) -> Vec<&'static str> {
        self.batcher.take_counts().causes.iter().map(|(cause, _)| cause.as_str()).collect()
    }

    /// Keeps a copy of what Redis is known to hold.
    pub fn keep(&mut self, copy: &Copy, now: Timestamp) {
        if let Some(near_cache) = &mut self.near_cache {
            let Copy { key, owner, fingerprint, response, life } = copy;
            near_cache.put(key, *owner, *fingerprint, response, *life, now);
        }
    }

    /// Keeps a copy of what Redis answered to a claim.
    pub fn keep_reply(&mut self, key: StoreKey, reply: &ClaimReply, life: Duration, now: Timestamp) {
        let (Some(near_cache), ClaimReply::Completed { fingerprint, response }) =
            (&mut self.near_cache, reply)
        else {
            return;
        };
        if let Some(owner) = hostcalls::random_bytes::<16>() {
            near_cache.put(&key, Owner::from_bytes(owner), *fingerprint, response, life, now);
        }
    }
}

/// The token's header; the token itself is never logged.
fn bearer(token_env: &str) -> Result<String, String> {
    let token = std::env::var(token_env).unwrap_or_default();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!(
            "store.redis.gateway.token_env: the VM has no token in its environment variable {token_env}: \
             add it to vm_config.environment_variables (host_env_keys takes it from Envoy's own)"
        ));
    }
    Ok(["Bearer ", &token].concat())
}

fn copy_of(hold: &Hold, write: &Write) -> Option<Box<Copy>> {
    match write {
        Write::Complete { response, record_ttl } => Some(Box::new(Copy {
            key: hold.key,
            owner: hold.owner,
            fingerprint: hold.fingerprint,
            response: Rc::clone(response),
            life: *record_ttl,
        })),
        Write::Renew { .. } | Write::Fail { .. } | Write::Release => None,
    }
}

/// An exchange's answer to what it asked. One of another kind is no answer.
pub fn exchange_answer(kind: &Kind, answer: Answer) -> StoreAnswer {
    match kind {
        Kind::Claim(_) => StoreAnswer::Claim(match answer {
            Answer::Claim(result) => result.map(|claimed| claimed.reply),
            Answer::Write(_) | Answer::NotSent => Err(StoreError::Unavailable),
        }),
        Kind::Renew => StoreAnswer::Renew(write_answer(answer)),
        Kind::End => StoreAnswer::End(write_answer(answer)),
    }
}

/// A fenced operation's answer. One of another kind is no answer.
pub fn write_answer(answer: Answer) -> Result<WriteReply, StoreError> {
    match answer {
        Answer::Write(result) => result,
        Answer::Claim(_) | Answer::NotSent => Err(StoreError::Unavailable),
    }
}
