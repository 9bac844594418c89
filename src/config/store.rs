//! Reading `store`: where records live.

use std::time::Duration;

use super::fields::{Field, Object, got, report};
use super::json::Json;
use super::problem::Problems;
use super::values::{Span, choice, duration_of, integer, key_prefix, name, visible};
use super::{Dialect, GatewayConfig, NearCacheConfig, RedisConfig, SharedDataConfig, StoreConfig, WhenFull};

pub(super) const EXPECTED: &str =
    "an object with exactly one of: shared_data, redis, such as {\"shared_data\": {}}";

pub(super) const CLUSTER: &str = "the name of an Envoy cluster: 1 to 255 visible ASCII characters";

/// What one record takes at least: an index entry of 112 bytes, as much room again so that the table doesn't refuse
/// early, and some for its response.
const INDEX_BYTES_PER_RECORD: u64 = 320;

const MAX_RECORDS: u64 = 131_072;
const MAX_BYTES: u64 = 128 * 1024 * 1024;
const MIN_BYTES: u64 = 1024 * 1024;

pub(super) const TIMEOUT: Duration = Duration::from_millis(250);
const KEY_PREFIX: &str = "idem:";
const MAX_IN_FLIGHT_BATCHES: u64 = 2;
/// Webdis takes one operation in a callout.
const MAX_IN_FLIGHT_OF_WEBDIS: u64 = 32;
const TOKEN_ENV: &str = "UPSTASH_REDIS_REST_TOKEN";

const TIMEOUTS: Span =
    Span { least: Duration::from_millis(10), most: Duration::from_secs(30), example: "250ms" };
const NEAR_CACHE_TTLS: Span =
    Span { least: Duration::from_millis(100), most: Duration::from_secs(24 * 3600), example: "60s" };

impl Default for NearCacheConfig {
    fn default() -> Self {
        Self { max_records: 16_384, max_bytes: 32 * 1024 * 1024, ttl: Duration::from_secs(60) }
    }
}

/// The store as written: [`RawStore::fill_in`] adds what was left out.
#[derive(Debug)]
pub(super) enum RawStore {
    SharedData(SharedDataConfig),
    Redis(Box<RawRedis>),
}

#[derive(Debug)]
pub(super) struct RawRedis {
    cluster: Field<String>,
    pub(super) timeout: Field<Duration>,
    key_prefix: Field<String>,
    max_in_flight_batches: Field<u64>,
    near_cache: Field<Option<NearCacheConfig>>,
    pub(super) gateway: Field<GatewayConfig>,
}

impl RawStore {
    /// The settings of Redis, where that is the store.
    pub(super) fn redis(&self) -> Option<&RawRedis> {
        match self {
            Self::SharedData(_) => None,
            Self::Redis(redis) => Some(redis.as_ref()),
        }
    }

    /// `None` where something that has no default is missing or was refused.
    pub(super) fn fill_in(self) -> Option<StoreConfig> {
        Some(match self {
            Self::SharedData(shared_data) => StoreConfig::SharedData(shared_data),
            Self::Redis(redis) => StoreConfig::Redis(RedisConfig {
                cluster: redis.cluster.given()?,
                timeout: redis.timeout.given_or(TIMEOUT),
                key_prefix: redis.key_prefix.given_or(KEY_PREFIX.to_owned()),
                max_in_flight_batches: {
                    let is_webdis =
                        matches!(redis.gateway.located(), Some((it, _)) if it.dialect == Dialect::Webdis);
                    let default = if is_webdis { MAX_IN_FLIGHT_OF_WEBDIS } else { MAX_IN_FLIGHT_BATCHES };
                    narrow(redis.max_in_flight_batches.given_or(default))
                },
                near_cache: redis.near_cache.given_or(Some(NearCacheConfig::default())),
                gateway: redis.gateway.given(),
            }),
        })
    }
}

pub(super) fn read_store(json: &Json, path: &str, problems: &mut Problems) -> Option<RawStore> {
    let mut object = Object::begin(json, path, EXPECTED, problems)?;
    let shared_data = object.nested("shared_data", problems, read_shared_data);
    let redis = object.nested("redis", problems, read_redis);
    object.finish(problems);
    if shared_data.is_absent() == redis.is_absent() {
        problems.refuse(path, got(json, EXPECTED));
        return None;
    }
    shared_data
        .given()
        .map(RawStore::SharedData)
        .or(redis.given().map(|redis| RawStore::Redis(Box::new(redis))))
}

fn read_shared_data(json: &Json, path: &str, problems: &mut Problems) -> Option<SharedDataConfig> {
    let expected = "an object with any of: namespace, max_records, max_bytes, when_full";
    let mut object = Object::begin(json, path, expected, problems)?;
    let namespace = object.field("namespace", problems, name);
    let (max_records, max_bytes) = read_room(&mut object, problems);
    let when_full = object.field(
        "when_full",
        problems,
        choice(&[("reject", WhenFull::Reject), ("evict_completed", WhenFull::EvictCompleted)]),
    );
    object.finish(problems);
    compare_room(&max_records, MAX_RECORDS, &max_bytes, MAX_BYTES, path, problems);
    Some(SharedDataConfig {
        namespace: namespace.given(),
        max_records: narrow(max_records.given_or(MAX_RECORDS)),
        max_bytes: max_bytes.given_or(MAX_BYTES),
        when_full: when_full.given_or(WhenFull::Reject),
    })
}

fn read_redis(json: &Json, path: &str, problems: &mut Problems) -> Option<RawRedis> {
    let expected = "an object such as {\"cluster\": \"redis-link\"}";
    let mut object = Object::begin(json, path, expected, problems)?;
    let redis = RawRedis {
        cluster: object.field("cluster", problems, visible(1, 255, CLUSTER)),
        timeout: object.field("timeout", problems, duration_of(TIMEOUTS)),
        key_prefix: object.field("key_prefix", problems, key_prefix),
        max_in_flight_batches: object.field("max_in_flight_batches", problems, integer(1, 64)),
        near_cache: object.nested("near_cache", problems, read_near_cache),
        gateway: object.nested("gateway", problems, read_gateway),
    };
    object.finish(problems);
    if redis.cluster.is_absent() {
        problems.refuse(&format!("{path}.cluster"), format!("missing, expected {CLUSTER}"));
    }
    Some(redis)
}

fn read_gateway(json: &Json, path: &str, problems: &mut Problems) -> Option<GatewayConfig> {
    let expected = "an object such as {\"dialect\": \"webdis\"}";
    let mut object = Object::begin(json, path, expected, problems)?;
    let words = [
        ("webdis", Dialect::Webdis),
        ("upstash_resp2", Dialect::UpstashResp2),
        ("upstash_base64", Dialect::UpstashBase64),
    ];
    let dialect = object.field("dialect", problems, choice(&words));
    let authority = object.field("authority", problems, visible(1, 255, "1 to 255 visible ASCII characters"));
    let token_env = object.field("token_env", problems, name);
    object.finish(problems);
    if dialect.is_absent() {
        problems.refuse(
            &format!("{path}.dialect"),
            "missing, expected \"webdis\", \"upstash_resp2\" or \"upstash_base64\"",
        );
    }
    let dialect = dialect.given()?;
    let has_token = dialect != Dialect::Webdis;
    Some(GatewayConfig {
        dialect,
        authority: authority.given_or("redis".to_owned()),
        token_env: token_env.given().or_else(|| has_token.then(|| TOKEN_ENV.to_owned())),
    })
}

/// `false` is no near cache.
fn read_near_cache(json: &Json, path: &str, problems: &mut Problems) -> Option<Option<NearCacheConfig>> {
    if let Json::Bool(_) = json {
        let off = if *json == Json::Bool(false) {
            Ok(None)
        } else {
            Err(got(
                json,
                "false, or an object with any of: max_records, max_bytes, ttl; {} for all defaults",
            ))
        };
        return report(off, path, problems);
    }
    let expected = "an object with any of: max_records, max_bytes, ttl, or false for none";
    let mut object = Object::begin(json, path, expected, problems)?;
    let (max_records, max_bytes) = read_room(&mut object, problems);
    let ttl = object.field("ttl", problems, duration_of(NEAR_CACHE_TTLS));
    object.finish(problems);
    let default = NearCacheConfig::default();
    let default_records = u64::from(default.max_records);
    compare_room(&max_records, default_records, &max_bytes, default.max_bytes, path, problems);
    Some(Some(NearCacheConfig {
        max_records: narrow(max_records.given_or(default_records)),
        max_bytes: max_bytes.given_or(default.max_bytes),
        ttl: ttl.given_or(default.ttl),
    }))
}

/// `max_records` and `max_bytes` of a table in shared data.
fn read_room(object: &mut Object<'_>, problems: &mut Problems) -> (Field<u64>, Field<u64>) {
    let max_records = object.field("max_records", problems, integer(1, 16_777_216));
    let max_bytes = object.field("max_bytes", problems, integer(MIN_BYTES, 64 * 1024 * 1024 * 1024));
    (max_records, max_bytes)
}

/// The index of so many records must fit.
fn compare_room(
    max_records: &Field<u64>,
    default_records: u64,
    max_bytes: &Field<u64>,
    default_bytes: u64,
    path: &str,
    problems: &mut Problems,
) {
    let Some((records, records_at)) = max_records.known_or(&default_records) else { return };
    let Some((bytes, bytes_at)) = max_bytes.known_or(&default_bytes) else { return };
    let needed = records.saturating_mul(INDEX_BYTES_PER_RECORD);
    if *bytes >= needed {
        return;
    }
    let most = bytes / INDEX_BYTES_PER_RECORD;
    match (bytes_at, records_at) {
        (None, Some(at)) => problems.refuse(
            at,
            format!("got {records}, expected at most {most} for max_bytes {bytes}, or max_bytes of at least {needed}"),
        ),
        (at, _) => problems.refuse(
            at.unwrap_or(path),
            format!("got {bytes}, expected at least {needed} for max_records {records}, or max_records of at most {most}"),
        ),
    }
}

fn narrow(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
