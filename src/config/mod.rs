//! The typed plugin configuration: what the rest of the crate may rely on once it is loaded.
//!
//! [`load_plugin`] turns the JSON an operator wrote into a [`Plugin`], or into every mistake in it at once.
//! `json` keeps the text as a tree, `raw` reads it setting by setting, `check` fills in and compares.
//! Nothing here knows the host.

mod check;
mod fields;
pub(crate) mod json;
mod matcher;
mod problem;
mod protobuf;
mod raw;
mod scope;
mod store;
mod values;
mod warnings;

use std::rc::Rc;
use std::time::Duration;

pub use check::{load, load_plugin};
pub use problem::{ConfigError, ConfigErrors};
pub use values::parse_duration;

/// What a plugin configuration makes of this module.
#[derive(Debug, Clone)]
pub enum Plugin {
    /// The filter.
    Filter(Box<Config>),
    /// The part of the link to Redis that keeps a request's end from the upstream. It has no settings.
    RequestEndHold,
}

/// The filter's whole configuration, which passed every check.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where records live.
    pub store: StoreConfig,
    /// What happens to a request whose claim the store could not answer.
    pub on_store_error: OnStoreError,
    /// The rules, in the order written: the first match wins.
    pub rules: Vec<Rc<Rule>>,
    /// The Envoy cluster that detached executions go to; given where a rule has any.
    pub execute_cluster: Option<String>,
    /// The HTTP statuses of the filter's own refusals.
    pub statuses: Statuses,
    /// Prefix of the `type` member of every problem detail (RFC 9457 section 3.1.1); ends with `/` or `#`.
    pub problem_type_base: String,
    /// Bounds of one worker's memory.
    pub limits: Limits,
    /// What the operator should hear about at load; none of it makes the configuration wrong.
    pub warnings: Vec<String>,
}

impl Config {
    /// How many new keys in 100 seconds the embedded store takes for ever without being full: `max_records` over the
    /// longest `record_ttl` of the rules that keep records. `None` where none does, and for another store.
    #[must_use]
    pub fn sustained_keys_per_100_seconds(&self) -> Option<u128> {
        let StoreConfig::SharedData(store) = &self.store else { return None };
        let keeping = self.rules.iter().filter(|rule| rule.mode != Mode::Off);
        let longest = keeping.map(|rule| rule.record_ttl).max()?;
        (u128::from(store.max_records) * 100_000).checked_div(longest.as_millis())
    }
}

/// Exactly one store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreConfig {
    /// Records in this Envoy process's shared data: lost on restart, shared by its workers.
    SharedData(SharedDataConfig),
    /// Records in Redis: shared by all Envoys.
    Redis(RedisConfig),
}

/// Settings of the embedded store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedDataConfig {
    /// The name of the table; `None` means one of this plugin's own (its name and root id).
    pub namespace: Option<String>,
    /// How many live records must fit before the first refusal.
    pub max_records: u32,
    /// Bound of the sum of all records' sizes, in bytes.
    pub max_bytes: u64,
    /// What a claim meets in a full table.
    pub when_full: WhenFull,
}

/// Settings of the store in Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedisConfig {
    /// The Envoy cluster that the callouts go to: the link's.
    pub cluster: String,
    /// How long an operation may take in all, with queueing and one retry.
    pub timeout: Duration,
    /// What every key in Redis begins with; has no hash tag.
    pub key_prefix: String,
    /// Callouts of one worker that may be out at a time; what comes meanwhile goes into the next.
    pub max_in_flight_batches: u32,
    /// Completed records kept in this Envoy process too; `None` for none.
    pub near_cache: Option<NearCacheConfig>,
    /// The HTTP gateway that the cluster leads to; `None` for the link.
    pub gateway: Option<GatewayConfig>,
}

/// An HTTP gateway in front of Redis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayConfig {
    /// What it speaks.
    pub dialect: Dialect,
    /// `:authority` of the callouts.
    pub authority: String,
    /// The environment variable of the VM that has the bearer token; `None` for no token.
    pub token_env: Option<String>,
}

/// What a gateway speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// Webdis with `.raw`.
    Webdis,
    /// The REST API of Upstash, `Upstash-Response-Format: resp2`.
    UpstashResp2,
    /// The same, `Upstash-Encoding: base64`.
    UpstashBase64,
}

/// Settings of the near cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NearCacheConfig {
    /// How many records are kept at most.
    pub max_records: u32,
    /// Bound of the sum of their sizes, in bytes.
    pub max_bytes: u64,
    /// How long one is kept; never longer than it lives in Redis.
    pub ttl: Duration,
}

/// What a claim meets in a full table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenFull {
    /// 503 `store-full`.
    Reject,
    /// The bucket's oldest completed record or tombstone makes room; a live, failed or abandoned one never does.
    EvictCompleted,
}

/// What happens to a request whose claim the store could not answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStoreError {
    /// 503 with `Retry-After`; nothing is forwarded.
    Deny,
    /// Forwarded without protection, marked and counted.
    Allow,
}

/// What a rule does with the requests it covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The rule decides.
    Enforce,
    /// What the rule would have decided is counted; neither client nor upstream sees any of it.
    Shadow,
    /// The rule is passed over as if the request were not covered.
    Off,
}

/// One rule: which requests it covers and how each is treated.
#[derive(Debug, Clone)]
pub struct Rule {
    /// Name for logs, filter state and route metadata; unique.
    pub name: String,
    /// Which requests it covers.
    pub matcher: Matcher,
    /// Enforce, shadow or off.
    pub mode: Mode,
    /// The key header's name, lower case.
    pub header: String,
    /// What a key may look like.
    pub key: KeyPolicy,
    /// What a covered request without a key meets.
    pub missing_key: MissingKey,
    /// Separates APIs that share a store.
    pub namespace: String,
    /// Who the caller is.
    pub scope: Scope,
    /// Longest value of one scope part, in bytes.
    pub max_scope_length: usize,
    /// What makes two requests the same request.
    pub fingerprint: FingerprintPolicy,
    /// No byte of the body seen for so long: refused.
    pub body_timeout: Duration,
    /// Longest request body, in bytes.
    pub max_request_body_bytes: u64,
    /// Longest response body that is kept, in bytes.
    pub max_response_body_bytes: u64,
    /// Lease of a claim.
    pub lock_ttl: Duration,
    /// Life of a completed record.
    pub record_ttl: Duration,
    /// Life of a failed record.
    pub failed_ttl: Duration,
    /// Which statuses are kept and replayed, and which mean "not processed".
    pub statuses: StatusRules,
    /// The upstream answered with a failing status.
    pub on_failure: OnFailure,
    /// The outcome is unknown.
    pub on_unknown: OnFailure,
    /// The record's lease ran out.
    pub on_abandoned: OnAbandoned,
    /// The key's first request is still running.
    pub in_flight: InFlight,
    /// How long a request waits at most where `in_flight` says so.
    pub wait_timeout: Duration,
    /// The operator vouches that retries below resend only what never reached the upstream.
    pub trust_route_retries: bool,
    /// Who sends the request on.
    pub execution: Execution,
    /// Whether the end of a response waits for its record.
    pub commit: Commit,
    /// Name of the header that marks a replay, as written.
    pub replay_header: String,
    /// Response headers never kept, lower case.
    pub drop_response_headers: Vec<String>,
    /// Response headers kept although they are dropped by default, lower case.
    pub keep_response_headers: Vec<String>,
}

/// Which requests a rule covers: every part must match.
#[derive(Debug, Clone)]
pub struct Matcher {
    /// Upper-case methods; never a safe one.
    pub methods: Vec<String>,
    /// Host patterns; empty means every host.
    pub hosts: Vec<HostPattern>,
    /// The path, without its query.
    pub path: PathMatcher,
}

/// A host of the `hosts` list, lower case.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostPattern {
    /// `*`
    Any,
    /// `api.example.com`: compared without the port unless the pattern has one.
    Exact(String),
    /// `*.example.com`, kept as `.example.com`: any host that ends so and has something before it.
    Suffix(String),
}

/// How the path (without its query) must look.
#[derive(Debug, Clone)]
pub enum PathMatcher {
    /// Every path.
    Any,
    /// Equal, byte for byte.
    Exact(String),
    /// Begins so.
    Prefix(String),
    /// Matches as a whole, as Envoy's `safe_regex` does.
    Regex(regex_lite::Regex),
}

/// What a key may look like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPolicy {
    /// Longest decoded value, in bytes.
    pub max_length: usize,
    /// Any value, or a UUID.
    pub format: KeyFormat,
    /// How the header line is read.
    pub syntax: KeySyntax,
}

/// What the decoded value must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyFormat {
    /// Anything visible.
    Any,
    /// A UUID in its 36-character form (RFC 9562 section 4), either case.
    Uuid,
}

/// How the header line is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeySyntax {
    /// An RFC 9651 String, or a bare token that means the same key.
    Lenient,
    /// Only the String.
    Strict,
}

/// What a covered request without a key meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MissingKey {
    /// 400 `missing-key`.
    Reject,
    /// Forwarded as if not covered.
    Pass,
}

/// Who the caller is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All callers share one key space, by the operator's explicit choice.
    Shared,
    /// All parts together; never empty.
    Parts(Vec<ScopePart>),
}

/// One source of a caller's identity.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScopePart {
    /// The one line of this request header (lower-case name).
    Header(String),
    /// The Authorization header.
    Authorization,
    /// A claim of Envoy's jwt_authn *verified* metadata.
    JwtClaim {
        /// The claim's path in the payload (`["sub"]`; a dotted name in the JSON is one element).
        claim: String,
        /// The metadata key that jwt_authn's `payload_in_metadata` names.
        metadata_key: String,
    },
    /// A property of the client's verified certificate.
    PeerCertificate(CertificateField),
    /// Any Envoy attribute.
    Property(Vec<String>),
    /// The same for everybody this rule covers.
    Constant(String),
}

/// Which part of the client's certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CertificateField {
    /// `connection.uri_san_peer_certificate`
    UriSan,
    /// `connection.subject_peer_certificate`
    Subject,
    /// `connection.sha256_peer_certificate_digest`
    Sha256,
}

/// What makes two requests the same request, beside method, path and query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FingerprintPolicy {
    /// The authority counts.
    pub authority: bool,
    /// These request headers count (lower case, as listed).
    pub headers: Vec<String>,
    /// The body counts.
    pub body: bool,
}

/// What becomes of a claim whose execution failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnFailure {
    /// A failed record: the key is never run again.
    Retain,
    /// The claim is given back: a retry runs again.
    Release,
}

/// What becomes of a record whose lease ran out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnAbandoned {
    /// The next claim takes it over, as a further attempt.
    Takeover,
    /// 424 until the record expires.
    Retain,
}

/// What a request meets whose key is still running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InFlight {
    /// 409 `in-flight`.
    Reject,
    /// It waits for the first to end and gets the replay; after `wait_timeout`, 409 `in-flight`.
    Wait,
}

/// Who sends a claimed request on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Execution {
    /// Envoy, in the client's own stream: a client that leaves takes the upstream request along.
    Inline,
    /// The filter, by a callout that lives on when the client leaves.
    Detached {
        /// How long the upstream may take, all of the execution listener's retries included.
        timeout: Duration,
    },
}

/// Whether the end of a response waits for its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Commit {
    /// A client that saw the whole response finds it replayable.
    BeforeResponseEnd,
    /// Nothing waits.
    AfterResponse,
}

/// What a response status means for the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusMeaning {
    /// Kept and replayed.
    Replay,
    /// Not processed: the claim is given back.
    Release,
    /// Failed.
    Failure,
}

/// `replay_statuses` and `release_statuses` as one table; `release` wins over classes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusRules {
    /// Whole classes that are replayed: index 0 is 1xx … 4 is 5xx.
    pub replay_classes: [bool; 5],
    /// Single statuses that are replayed, sorted.
    pub replay: Vec<u16>,
    /// Single statuses that are released, sorted.
    pub release: Vec<u16>,
}

impl StatusRules {
    /// What `status` means.
    #[must_use]
    pub fn meaning(&self, status: u16) -> StatusMeaning {
        if self.release.binary_search(&status).is_ok() {
            return StatusMeaning::Release;
        }
        let class = usize::from(status / 100).wrapping_sub(1);
        let replayed = self.replay.binary_search(&status).is_ok()
            || self.replay_classes.get(class).copied().unwrap_or(false);
        if replayed { StatusMeaning::Replay } else { StatusMeaning::Failure }
    }
}

/// The HTTP statuses of the filter's own refusals.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Statuses {
    /// `missing-key`, 400
    pub missing_key: u16,
    /// `invalid-key`, 400
    pub invalid_key: u16,
    /// `invalid-scope`, 400
    pub invalid_scope: u16,
    /// `body-timeout`, 408
    pub body_timeout: u16,
    /// `payload-too-large`, 413
    pub payload_too_large: u16,
    /// `in-flight`, 409
    pub in_flight: u16,
    /// `mismatch`, 422
    pub mismatch: u16,
    /// `failed`, 424
    pub failed: u16,
    /// `abandoned`, 424
    pub abandoned: u16,
    /// `response-not-kept`, 409
    pub response_not_kept: u16,
    /// `store-unavailable`, 503
    pub store_unavailable: u16,
    /// `store-full`, 503
    pub store_full: u16,
    /// `execution-unavailable`, 503
    pub execution_unavailable: u16,
}

impl Default for Statuses {
    fn default() -> Self {
        Self {
            missing_key: 400,
            invalid_key: 400,
            invalid_scope: 400,
            body_timeout: 408,
            payload_too_large: 413,
            in_flight: 409,
            mismatch: 422,
            failed: 424,
            abandoned: 424,
            response_not_kept: 409,
            store_unavailable: 503,
            store_full: 503,
            execution_unavailable: 503,
        }
    }
}

/// Bounds of one worker's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// All response captures of a worker together, in bytes.
    pub captured_bytes: u64,
    /// Bodies of a worker's detached executions together, and the room for their responses, in bytes.
    pub detached_bytes: u64,
    /// How many requests of a worker may wait for another at a time; what comes beyond is refused as in flight.
    pub waiters: u32,
}
