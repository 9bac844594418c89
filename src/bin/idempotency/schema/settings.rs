//! Every setting of the plugin configuration, described once: its shape, default, meaning, and what is allowed.
//!
//! The JSON Schema and the tables of docs/configuration.md are made of this. The loader stays the judge: the tests hold
//! each name, bound, word and default here against what it accepts and refuses.

use self::Shape::{
    Boolean, Cluster, Defaults, Duration, Header, Headers, Hosts, Integer, KeyPrefix, Methods, Name, Object,
    ObjectOrFalse, Path, ProblemTypeBase, Regex, ReleaseStatuses, ReplayStatuses, Rules, Scope, Text, Words,
};

/// One setting. A dot in its name leads into an object.
#[derive(Debug)]
pub struct Setting {
    pub name: &'static str,
    pub shape: Shape,
    /// As Markdown; a JSON value in backticks where there is one.
    pub default: &'static str,
    /// As Markdown.
    pub meaning: &'static str,
    /// As Markdown.
    pub allowed: &'static str,
}

/// What a value looks like.
#[derive(Debug, Clone, Copy)]
pub enum Shape {
    Boolean,
    Integer(u64, u64),
    Duration(&'static str, &'static str),
    Words(&'static [&'static str]),
    /// So many bytes without control characters.
    Text(u64, u64),
    Name,
    Cluster,
    KeyPrefix,
    ProblemTypeBase,
    /// A header's name, and those that it must not be; a `*` at the end stands for any end.
    Header(&'static [&'static str]),
    /// The same, listed.
    Headers(&'static [&'static str]),
    Methods,
    Hosts,
    Path,
    Regex,
    ReplayStatuses,
    ReleaseStatuses,
    Scope,
    Rules,
    Defaults,
    /// Settings of a group, or those named with a dot.
    Object(&'static str),
    /// The same, or `false`.
    ObjectOrFalse,
}

impl Shape {
    /// As the tables name it.
    pub fn type_name(self) -> &'static str {
        match self {
            Boolean => "boolean",
            Integer(..) => "integer",
            Duration(..) => "duration",
            Words(_) | Text(..) | Name | Cluster | KeyPrefix | ProblemTypeBase | Header(_) | Path | Regex => {
                "string"
            }
            Headers(_) | Methods | Hosts | ReplayStatuses | ReleaseStatuses | Rules => "list",
            Scope => "string or list",
            Defaults | Object(_) => "object",
            ObjectOrFalse => "object or `false`",
        }
    }
}

/// The longest duration.
const LONGEST: &str = "8760h";

const HOP_BY_HOP: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
];
const KEY_HEADERS: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "host",
    "authorization",
    "cookie",
    "x-idempotency-attempt",
    "idempotency-protection",
];
const FINGERPRINT_HEADERS: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-idempotency-attempt",
    "idempotency-protection",
];
pub const SCOPE_HEADERS: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-length",
    "authorization",
    "x-idempotency-attempt",
    "idempotency-protection",
];
const REPLAY_HEADERS: &[&str] = &[
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "content-*",
    "cache-control",
    "date",
    "set-cookie",
    "x-idempotency-refusal",
];

/// The tables by name, in the order of the page.
pub const GROUPS: [(&str, &[Setting]); 6] = [
    ("top", TOP),
    ("store", STORE),
    ("rule", RULE),
    ("match", MATCH),
    ("statuses", STATUSES),
    ("limits", LIMITS),
];

pub const TOP: &[Setting] = &[
    Setting {
        name: "store",
        shape: Object("store"),
        default: "**required**",
        meaning: "where records live",
        allowed: "exactly one store, see [Store](#store)",
    },
    Setting {
        name: "on_store_error",
        shape: Words(&["deny", "allow"]),
        default: r#"`"deny"`"#,
        meaning: "a request whose claim the store could not answer: refuse it (503 with `Retry-After`), or forward it without protection, marked and counted",
        allowed: r#"`"deny"`, `"allow"`"#,
    },
    Setting {
        name: "rules",
        shape: Rules,
        default: "**required**",
        meaning: "which requests are covered, and how; the first rule that matches wins, a request that no rule matches is not covered",
        allowed: "at least one, see [Rules](#rules)",
    },
    Setting {
        name: "defaults",
        shape: Defaults,
        default: "`{}`",
        meaning: "settings for every rule that doesn't have its own",
        allowed: "every field of a rule except `name` and `match`, see [Defaults](#defaults)",
    },
    Setting {
        name: "statuses",
        shape: Object("statuses"),
        default: "",
        meaning: "the HTTP statuses of the filter's own refusals",
        allowed: "see [Statuses](#statuses)",
    },
    Setting {
        name: "problem_type_base",
        shape: ProblemTypeBase,
        default: r#"`"https://envoy-idempotency.example/problems/"`"#,
        meaning: "beginning of the `type` of every problem detail; the problem's name is appended",
        allowed: r#"an absolute `http` or `https` URI of at most 512 bytes that ends with `/` or `#`, in visible ASCII without ``" ' < > \ ^ ` { | }``"#,
    },
    Setting {
        name: "limits",
        shape: Object("limits"),
        default: "",
        meaning: "bounds of one worker's memory",
        allowed: "see [Limits](#limits)",
    },
    Setting {
        name: "execute_cluster",
        shape: Cluster,
        default: "",
        meaning: r#"the cluster of the execution listener; **required** where a rule's `execution` is `"detached"`, see [Detached execution](detached.md)"#,
        allowed: "1 to 255 visible ASCII characters",
    },
    Setting {
        name: "role",
        shape: Words(&["request_end_hold"]),
        default: "the filter",
        meaning: "another part of this module instead of the filter, see [Role](#role)",
        allowed: r#"`"request_end_hold"`, and then no other field"#,
    },
];

pub const STORE: &[Setting] = &[
    Setting {
        name: "shared_data",
        shape: Object(""),
        default: "",
        meaning: "records in this Envoy process: its workers share them, a restart loses them",
        allowed: "the fields below; `{}` for all defaults",
    },
    Setting {
        name: "shared_data.namespace",
        shape: Name,
        default: "one of this plugin's own",
        meaning: "name of the table; two plugin configurations in one VM share a table only if they name the same one",
        allowed: "1 to 64 letters, digits, `_`, `.`, `-`",
    },
    Setting {
        name: "shared_data.max_records",
        shape: Integer(1, 16_777_216),
        default: "`131072`",
        meaning: "live records that fit",
        allowed: "1 to 16777216",
    },
    Setting {
        name: "shared_data.max_bytes",
        shape: Integer(1_048_576, 68_719_476_736),
        default: "`134217728`",
        meaning: "bound of all records together",
        allowed: "1048576 (1 MiB) to 68719476736 (64 GiB), and at least 320 × `max_records`",
    },
    Setting {
        name: "shared_data.when_full",
        shape: Words(&["reject", "evict_completed"]),
        default: r#"`"reject"`"#,
        meaning: "what a new key meets in a full table: 503 `store-full`, or the place of an old completed record",
        allowed: r#"`"reject"`, `"evict_completed"`"#,
    },
    Setting {
        name: "redis",
        shape: Object(""),
        default: "",
        meaning: "records in Redis, shared by all Envoys",
        allowed: "the fields below",
    },
    Setting {
        name: "redis.cluster",
        shape: Cluster,
        default: "**required**",
        meaning: "the Envoy cluster of the link to Redis, verbatim; not the Redis cluster itself",
        allowed: "1 to 255 visible ASCII characters",
    },
    Setting {
        name: "redis.timeout",
        shape: Duration("10ms", "30s"),
        default: r#"`"250ms"`"#,
        meaning: "how long an operation may take in all, with queueing and one retry; then the store has failed and `on_store_error` decides",
        allowed: r#"`"10ms"` to `"30s"`; `lock_ttl` must be at least 4 ×, and `wait_timeout` of a rule that waits at least 1 × as long"#,
    },
    Setting {
        name: "redis.key_prefix",
        shape: KeyPrefix,
        default: r#"`"idem:"`"#,
        meaning: "what every key in Redis begins with",
        allowed: "0 to 64 visible ASCII characters without `{` and `}` (a hash tag would put every key into one slot of a Redis Cluster)",
    },
    Setting {
        name: "redis.max_in_flight_batches",
        shape: Integer(1, 64),
        default: "`2`",
        meaning: "callouts of one worker that may be out at a time; operations that come meanwhile go together into the next",
        allowed: "1 to 64",
    },
    Setting {
        name: "redis.near_cache",
        shape: ObjectOrFalse,
        default: "`{}`",
        meaning: "completed records are kept in this Envoy process too, so that a replay needs no Redis; `false`: every replay is read from Redis",
        allowed: "the fields below, or `false`",
    },
    Setting {
        name: "redis.near_cache.max_records",
        shape: Integer(1, 16_777_216),
        default: "`16384`",
        meaning: "records that fit",
        allowed: "1 to 16777216",
    },
    Setting {
        name: "redis.near_cache.max_bytes",
        shape: Integer(1_048_576, 68_719_476_736),
        default: "`33554432`",
        meaning: "bound of all of them together",
        allowed: "1048576 (1 MiB) to 68719476736 (64 GiB), and at least 320 × `max_records`",
    },
    Setting {
        name: "redis.near_cache.ttl",
        shape: Duration("100ms", "24h"),
        default: r#"`"60s"`"#,
        meaning: "how long one is kept, and never longer than it lives in Redis",
        allowed: r#"`"100ms"` to `"24h"`"#,
    },
];

pub const RULE: &[Setting] = &[
    Setting {
        name: "name",
        shape: Name,
        default: "**required**",
        meaning: "for logs, filter state and route metadata",
        allowed: "1 to 64 letters, digits, `_`, `.`, `-`; unique",
    },
    Setting {
        name: "match",
        shape: Object("match"),
        default: "every `POST` and `PATCH`",
        meaning: "which requests the rule covers",
        allowed: "see [Match](#match)",
    },
    Setting {
        name: "mode",
        shape: Words(&["enforce", "shadow", "off"]),
        default: r#"`"enforce"`"#,
        meaning: "`enforce`: the rule decides; `shadow`: what it would have decided is counted, and neither client nor upstream sees any of it; `off`: the rule is passed over, and its requests are not covered",
        allowed: r#"`"enforce"`, `"shadow"`, `"off"`"#,
    },
    Setting {
        name: "header",
        shape: Header(KEY_HEADERS),
        default: r#"`"Idempotency-Key"`"#,
        meaning: "the header that carries the key",
        allowed: "a header name, but no header of the connection or message, `host`, `authorization`, `cookie`, `x-idempotency-attempt`, `idempotency-protection`",
    },
    Setting {
        name: "key.max_length",
        shape: Integer(1, 1024),
        default: "`255`",
        meaning: "longest key after decoding, in bytes",
        allowed: "1 to 1024",
    },
    Setting {
        name: "key.format",
        shape: Words(&["any", "uuid"]),
        default: r#"`"any"`"#,
        meaning: "what a key must be",
        allowed: r#"`"any"`, `"uuid"`"#,
    },
    Setting {
        name: "key.syntax",
        shape: Words(&["lenient", "strict"]),
        default: r#"`"lenient"`"#,
        meaning: r#"`lenient`: an RFC 9651 String (`"abc"`) and a bare token (`abc`) mean the same key; `strict`: only the String"#,
        allowed: r#"`"lenient"`, `"strict"`"#,
    },
    Setting {
        name: "missing_key",
        shape: Words(&["reject", "pass"]),
        default: r#"`"reject"`"#,
        meaning: "a covered request without a key: 400, or forwarded as if not covered",
        allowed: r#"`"reject"`, `"pass"`"#,
    },
    Setting {
        name: "namespace",
        shape: Text(0, 128),
        default: r#"`""`"#,
        meaning: "separates APIs that share a store, where one caller may use a key in both",
        allowed: "0 to 128 bytes without control characters",
    },
    Setting {
        name: "scope",
        shape: Scope,
        default: "**required**, here or in `defaults`",
        meaning: "who the caller is",
        allowed: "see [Scope](#scope)",
    },
    Setting {
        name: "max_scope_length",
        shape: Integer(1, 4096),
        default: "`255`",
        meaning: "longest value of one part of the scope, in bytes",
        allowed: "1 to 4096",
    },
    Setting {
        name: "fingerprint.authority",
        shape: Boolean,
        default: "`true`",
        meaning: "the host is part of what makes two requests the same",
        allowed: "`true`, `false`",
    },
    Setting {
        name: "fingerprint.headers",
        shape: Headers(FINGERPRINT_HEADERS),
        default: "`[]`",
        meaning: "request headers that are part of it",
        allowed: "header names, but no header of the connection (`content-length` is allowed) and none that the filter removes",
    },
    Setting {
        name: "fingerprint.body",
        shape: Boolean,
        default: "`true`",
        meaning: "the body is part of it",
        allowed: "`true`, `false`",
    },
    Setting {
        name: "body_timeout",
        shape: Duration("1ms", LONGEST),
        default: r#"`"15s"`"#,
        meaning: "no byte of the body seen for so long: 408, nothing claimed",
        allowed: r#"`"1ms"` to `"8760h"`"#,
    },
    Setting {
        name: "max_request_body_bytes",
        shape: Integer(0, 16_777_216),
        default: "`1048576`",
        meaning: "longest request body; a longer one is refused with 413 before any claim",
        allowed: "0 to 16777216",
    },
    Setting {
        name: "max_response_body_bytes",
        shape: Integer(0, 16_777_216),
        default: "`262144`",
        meaning: "longest response body that is kept; of a longer one only the fact is kept",
        allowed: "0 to 16777216",
    },
    Setting {
        name: "lock_ttl",
        shape: Duration("100ms", LONGEST),
        default: r#"`"60s"`"#,
        meaning: "lease of a claim; renewed while the upstream works",
        allowed: r#"`"100ms"` to `"8760h"`"#,
    },
    Setting {
        name: "record_ttl",
        shape: Duration("1ms", LONGEST),
        default: r#"`"24h"`"#,
        meaning: "how long a completed record is kept and replayed",
        allowed: "at least 2 × `lock_ttl`",
    },
    Setting {
        name: "failed_ttl",
        shape: Duration("1ms", LONGEST),
        default: r#"`"24h"`"#,
        meaning: "how long a failed record is kept",
        allowed: "at least 2 × `lock_ttl`",
    },
    Setting {
        name: "replay_statuses",
        shape: ReplayStatuses,
        default: r#"`["2xx", "3xx", "4xx"]`"#,
        meaning: "responses that are kept and replayed",
        allowed: r#"`"2xx"`, `"3xx"`, `"4xx"`, `"5xx"`, and numbers from 200 to 599"#,
    },
    Setting {
        name: "release_statuses",
        shape: ReleaseStatuses,
        default: "`[401, 407, 408, 421, 425, 429, 501, 503]`",
        meaning: r#"responses that mean "not processed": forgotten, a retry runs again; wins over a class of `replay_statuses`"#,
        allowed: "numbers from 200 to 599; a number may not stand in both lists",
    },
    Setting {
        name: "on_failure",
        shape: Words(&["retain", "release"]),
        default: r#"`"retain"`"#,
        meaning: "the upstream answered with any other status: keep a failed record (a retry gets 424), or let a retry run again",
        allowed: r#"`"retain"`, `"release"`"#,
    },
    Setting {
        name: "on_unknown",
        shape: Words(&["retain", "release"]),
        default: r#"`"retain"`"#,
        meaning: "the same for a time-out, a reset, a response cut off, a client that left",
        allowed: r#"`"retain"`, `"release"`"#,
    },
    Setting {
        name: "on_abandoned",
        shape: Words(&["takeover", "retain"]),
        default: r#"`"takeover"`; `"retain"` where detached"#,
        meaning: "a record whose lease ran out: the next request takes it over and runs again, or gets 424",
        allowed: r#"`"takeover"`, `"retain"`"#,
    },
    Setting {
        name: "in_flight",
        shape: Words(&["reject", "wait"]),
        default: r#"`"reject"`"#,
        meaning: "a request whose key is running: 409, or it waits for the first to end and gets the replay",
        allowed: r#"`"reject"`, `"wait"`"#,
    },
    Setting {
        name: "wait_timeout",
        shape: Duration("100ms", "5m"),
        default: r#"`"10s"`"#,
        meaning: "how long it waits at most; then 409",
        allowed: r#"`"100ms"` to `"5m"`, and not below `store.redis.timeout`"#,
    },
    Setting {
        name: "trust_route_retries",
        shape: Boolean,
        default: "`false`",
        meaning: "you vouch that retries below this filter resend only what never reached the upstream",
        allowed: "`true`, `false`",
    },
    Setting {
        name: "execution",
        shape: Words(&["inline", "detached"]),
        default: r#"`"inline"`"#,
        meaning: "who sends the request on: Envoy, in the client's own stream, so that a client that leaves takes it along; or the filter, so that it runs to its end, see [Detached execution](detached.md)",
        allowed: r#"`"inline"`, `"detached"` (which needs `fingerprint.body`)"#,
    },
    Setting {
        name: "execute_timeout",
        shape: Duration("100ms", "1h"),
        default: "**required** where detached",
        meaning: "how long the upstream may take, the execution listener's retries included: above the route's own timeout, and below the `stream_idle_timeout` of the main listener",
        allowed: r#"`"100ms"` to `"1h"`"#,
    },
    Setting {
        name: "commit",
        shape: Words(&["before_response_end", "after_response"]),
        default: r#"`"before_response_end"`"#,
        meaning: "`before_response_end`: the end of the response waits for its record, so a client that saw it all finds it replayable; `after_response`: nothing waits",
        allowed: r#"`"before_response_end"`, `"after_response"`"#,
    },
    Setting {
        name: "replay_header",
        shape: Header(REPLAY_HEADERS),
        default: r#"`"Idempotent-Replayed"`"#,
        meaning: "the header that marks a replay",
        allowed: "a header name, but no header of the connection or message, `content-*`, `cache-control`, `date`, `set-cookie`, `x-idempotency-refusal`",
    },
    Setting {
        name: "drop_response_headers",
        shape: Headers(&[]),
        default: "`[]`",
        meaning: "response headers not kept, beside those that never are",
        allowed: "header names; none of `keep_response_headers`",
    },
    Setting {
        name: "keep_response_headers",
        shape: Headers(HOP_BY_HOP),
        default: "`[]`",
        meaning: "response headers kept although they are dropped by default, such as `set-cookie`",
        allowed: "header names, but no header of the connection or message",
    },
];

pub const MATCH: &[Setting] = &[
    Setting {
        name: "methods",
        shape: Methods,
        default: r#"`["POST", "PATCH"]`"#,
        meaning: "methods",
        allowed: "upper-case methods; not `GET`, `HEAD`, `OPTIONS`, `TRACE` (safe) and `CONNECT` (a tunnel), which always pass untouched",
    },
    Setting {
        name: "hosts",
        shape: Hosts,
        default: "every host",
        meaning: "hosts, without regard to case; compared without the port unless the pattern has one",
        allowed: r#"`"*"`, `"api.example.com"`, `"*.example.com"` (something before `.example.com`), an IPv6 address in brackets; no other wildcard"#,
    },
    Setting {
        name: "path",
        shape: Object(""),
        default: "every path",
        meaning: "the path, without its query",
        allowed: "exactly one of the three below",
    },
    Setting {
        name: "path.exact",
        shape: Path,
        default: "",
        meaning: "equal",
        allowed: "begins with `/`; visible ASCII as sent, without `?` and `#`",
    },
    Setting {
        name: "path.prefix",
        shape: Path,
        default: "",
        meaning: "begins so; byte for byte, so `/api` also covers `/apis`: write `/api/`",
        allowed: "the same",
    },
    Setting {
        name: "path.regex",
        shape: Regex,
        default: "",
        meaning: "matches **as a whole**, as Envoy's `safe_regex` does",
        allowed: r"a regular expression of at most 4096 bytes, and 1 MiB when compiled; no look-around, no back-references, no `\p{…}`",
    },
];

pub const STATUSES: &[Setting] = &[
    Setting {
        name: "missing_key",
        shape: Integer(400, 599),
        default: "`400`",
        meaning: "a covered request has no key",
        allowed: "",
    },
    Setting {
        name: "invalid_key",
        shape: Integer(400, 599),
        default: "`400`",
        meaning: "the key is malformed, or there are several",
        allowed: "",
    },
    Setting {
        name: "invalid_scope",
        shape: Integer(400, 599),
        default: "`400`",
        meaning: "a part of the scope is missing or malformed",
        allowed: "",
    },
    Setting {
        name: "body_timeout",
        shape: Integer(400, 599),
        default: "`408`",
        meaning: "the body stopped coming",
        allowed: "",
    },
    Setting {
        name: "payload_too_large",
        shape: Integer(400, 599),
        default: "`413`",
        meaning: "the body is over `max_request_body_bytes`",
        allowed: "",
    },
    Setting {
        name: "in_flight",
        shape: Integer(400, 599),
        default: "`409`",
        meaning: "a request with this key is running",
        allowed: "",
    },
    Setting {
        name: "mismatch",
        shape: Integer(400, 599),
        default: "`422`",
        meaning: "the key was used for another request",
        allowed: "",
    },
    Setting {
        name: "failed",
        shape: Integer(400, 599),
        default: "`424`",
        meaning: "the first request failed, or its outcome is unknown",
        allowed: "",
    },
    Setting {
        name: "abandoned",
        shape: Integer(400, 599),
        default: "`424`",
        meaning: "the first request's lease ran out, and the rule retains",
        allowed: "",
    },
    Setting {
        name: "response_not_kept",
        shape: Integer(400, 599),
        default: "`409`",
        meaning: "the first request succeeded, but its response was not kept",
        allowed: "",
    },
    Setting {
        name: "store_unavailable",
        shape: Integer(400, 599),
        default: "`503`",
        meaning: "the store did not answer",
        allowed: "",
    },
    Setting {
        name: "store_full",
        shape: Integer(400, 599),
        default: "`503`",
        meaning: "the store has no room",
        allowed: "",
    },
    Setting {
        name: "execution_unavailable",
        shape: Integer(400, 599),
        default: "`503`",
        meaning: "a detached execution has no room or no way; nothing was executed",
        allowed: "",
    },
];

pub const LIMITS: &[Setting] = &[
    Setting {
        name: "captured_bytes",
        shape: Integer(0, 536_870_912),
        default: "`67108864`",
        meaning: "response bodies being captured by one worker, together; beyond it new ones are not kept",
        allowed: "0 to 536870912",
    },
    Setting {
        name: "detached_bytes",
        shape: Integer(0, 536_870_912),
        default: "`67108864`",
        meaning: "all detached executions of a worker together: each takes its body plus `max_response_body_bytes`; without room a request is refused 503 `execution-unavailable` before it runs",
        allowed: "0 to 536870912, and at least `max_request_body_bytes` + `max_response_body_bytes` of every detached rule",
    },
    Setting {
        name: "waiters",
        shape: Integer(1, 65_536),
        default: "`1024`",
        meaning: r#"requests of one worker that may wait for another at a time (`in_flight` `"wait"`); the next one gets 409 at once. Envoy holds the body of each: up to `max_request_body_bytes`"#,
        allowed: "1 to 65536",
    },
];
