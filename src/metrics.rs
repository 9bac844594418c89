//! The names under which the filter counts; Envoy shows them as `wasmcustom.idempotency.<name>`.
//!
//! A name never carries a key, a scope or anything else of a request: the set is fixed.

use crate::outcome::Released;
use crate::policy::Bypass;
use crate::record::Reason;

macro_rules! metrics {
    ($(#[$doc:meta])* $enum:ident { $($(#[$variant_doc:meta])* $variant:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum $enum { $($(#[$variant_doc])* $variant,)* }

        impl $enum {
            /// Every one, in the order of [`Self::index`].
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The name below `idempotency.`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Its place in [`Self::ALL`].
            #[must_use]
            pub const fn index(self) -> usize {
                self as usize
            }
        }
    };
}

metrics! {
    /// A counter.
    Counter {
        /// A covered request was forwarded, with a claim or unprotected.
        Executed = "executed",
        /// A kept response was replayed.
        Replayed = "replayed",
        /// 409: another request with this key is being executed.
        Conflicts = "conflicts",
        /// 422: the key was used for another request.
        Mismatches = "mismatches",
        /// 424: the key's execution failed or was abandoned.
        FailedReplies = "failed_replies",
        /// 409: done before, but the response was not kept.
        NotKeptReplies = "not_kept_replies",
        /// 400: no key.
        RejectedMissingKey = "rejected.missing_key",
        /// 400: a key that is none.
        RejectedInvalidKey = "rejected.invalid_key",
        /// 400: the caller could not be told.
        RejectedInvalidScope = "rejected.invalid_scope",
        /// 413: the request body is over the rule's limit.
        RejectedTooLarge = "rejected.too_large",
        /// 408: the request body did not come.
        RejectedBodyTimeout = "rejected.body_timeout",
        /// 500: the route names an unknown rule.
        RejectedMisconfigured = "rejected.misconfigured",
        /// A body was waited for in vain, and no body callback was ever seen before a resume:
        /// `allow_on_headers_stop_iteration` is probably missing.
        StopIterationMissing = "headers_stop_iteration_missing",
        /// Abandoned records taken over.
        Takeovers = "takeovers",
        /// Claims given back: the status means "not processed".
        ReleasedStatus = "released.status",
        /// Claims given back: the request did not reach an upstream.
        ReleasedNotSent = "released.not_sent",
        /// Claims given back: a failure under `on_failure` or `on_unknown: release`.
        ReleasedFailure = "released.failure",
        /// Failed records: the upstream's status.
        RetainedStatus = "retained.status",
        /// Failed records: no answer in time.
        RetainedTimeout = "retained.timeout",
        /// Failed records: a reset or a broken protocol.
        RetainedReset = "retained.reset",
        /// Failed records: a response without a proper end.
        RetainedTruncated = "retained.truncated",
        /// Failed records: the client left.
        RetainedClientGone = "retained.client_gone",
        /// Failed records: a proxy behind this one lost the request.
        RetainedIntermediary = "retained.intermediary",
        /// Failed records: another filter replaced the response.
        RetainedReplaced = "retained.replaced",
        /// Failed records: an internal redirect nobody adopted.
        RetainedRedirected = "retained.redirected",
        /// Writes refused because the claim was somebody else's by then.
        StaleWrites = "stale_writes",
        /// Completed records whose body was not kept.
        Tombstones = "tombstones",
        /// Store operations that gave no answer.
        StoreErrors = "store_errors",
        /// 503: no room for a new record.
        StoreFull = "store_full",
        /// Forwarded without a claim, since `on_store_error` is `allow`.
        Unprotected = "unprotected",
        /// Completed records dropped to make room.
        Evictions = "evictions",
        /// Writes put into the outbox.
        OutboxQueued = "outbox_queued",
        /// Writes given up when their record's time was over, or as the root went.
        OutboxDropped = "outbox_dropped",
        /// Writes that another root of the same store took over when this one went.
        OutboxSpilled = "outbox_spilled",
        /// Claims handed over at an internal redirect.
        HandedOver = "handed_over",
        /// Executed by a callout that outlives its client.
        Detached = "detached",
        /// Executed inline under a detached rule: trailers, or header lines that no callout carries.
        DetachedInline = "detached_inline",
        /// Detached executions that ended after their client had left.
        FinishedWithoutClient = "finished_without_client",
        /// 503: no room or no way for a detached execution; nothing was executed.
        ExecutionUnavailable = "execution_unavailable",
        /// Unprotected: gRPC.
        BypassedGrpc = "bypassed.grpc",
        /// Unprotected: an upgrade or CONNECT.
        BypassedUpgrade = "bypassed.upgrade",
        /// Unprotected: no key, `missing_key` is `pass`.
        BypassedNoKey = "bypassed.no_key",
        /// Unprotected: the route's metadata says so.
        BypassedRouteOff = "bypassed.route_off",
        /// Under shadow: would have been forwarded with a claim.
        ShadowExecuted = "shadow.executed",
        /// Under shadow: would have been replayed.
        ShadowReplayed = "shadow.replayed",
        /// Under shadow: would have been answered 409 in-flight.
        ShadowConflicts = "shadow.conflicts",
        /// Under shadow: would have been answered 422.
        ShadowMismatches = "shadow.mismatches",
        /// Under shadow: would have been answered 424.
        ShadowFailedReplies = "shadow.failed_replies",
        /// Under shadow: would have been answered 409 response-not-kept.
        ShadowNotKeptReplies = "shadow.not_kept_replies",
        /// Under shadow: would have been refused before any claim.
        ShadowRejected = "shadow.rejected",
        /// Duplicates that waited for the first execution.
        Waited = "waited",
        /// Duplicates that waited in vain.
        WaitTimeouts = "wait_timeouts",
        /// Completed records found in the near cache.
        NearCacheHits = "near_cache.hits",
        /// Claims the near cache could not answer.
        NearCacheMisses = "near_cache.misses",
        /// Events that an exchange met in a state where they can't happen.
        UnexpectedEvents = "unexpected_events",
        /// Host calls that failed.
        HostErrors = "host_errors",
    }
}

metrics! {
    /// A gauge, summed over workers.
    Gauge {
        /// Claims held now.
        InFlight = "in_flight",
        /// Writes waiting in the outboxes.
        Outbox = "outbox",
        /// Bytes of detached executions: their bodies, and the room for their responses.
        DetachedBytes = "detached_bytes",
        /// Workers that found their Redis evicting: it has `maxmemory` and a policy other than `noeviction`.
        RedisEvicting = "redis.evicting",
    }
}

metrics! {
    /// A histogram.
    Histogram {
        /// Time of a store operation in whole milliseconds: the embedded store shows as 0.
        StoreMillis = "store_ms",
        /// Operations per callout to Redis.
        BatchSize = "batch_size",
    }
}

impl Counter {
    /// Counts a claim given back.
    #[must_use]
    pub const fn released(released: Released) -> Self {
        match released {
            Released::Status => Self::ReleasedStatus,
            Released::NotSent => Self::ReleasedNotSent,
            Released::Failure => Self::ReleasedFailure,
        }
    }

    /// Counts a failed record.
    #[must_use]
    pub const fn retained(reason: Reason) -> Self {
        match reason {
            Reason::Status => Self::RetainedStatus,
            Reason::Timeout => Self::RetainedTimeout,
            Reason::Reset => Self::RetainedReset,
            Reason::Truncated => Self::RetainedTruncated,
            Reason::ClientGone => Self::RetainedClientGone,
            Reason::Intermediary => Self::RetainedIntermediary,
            Reason::Replaced => Self::RetainedReplaced,
            Reason::Redirected => Self::RetainedRedirected,
        }
    }

    /// Counts a bypass worth counting: safe methods and uncovered requests are not.
    #[must_use]
    pub const fn bypassed(bypass: Bypass) -> Option<Self> {
        match bypass {
            Bypass::Grpc => Some(Self::BypassedGrpc),
            Bypass::Upgrade => Some(Self::BypassedUpgrade),
            Bypass::NoKey => Some(Self::BypassedNoKey),
            Bypass::RouteOff => Some(Self::BypassedRouteOff),
            Bypass::SafeMethod | Bypass::NotCovered | Bypass::RuleOff => None,
        }
    }
}
