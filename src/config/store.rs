//! Reading `store`: where records live.

use super::fields::{Object, got};
use super::json::Json;
use super::problem::Problems;
use super::values::{choice, integer, name};
use super::{SharedDataConfig, StoreConfig, WhenFull};

pub(super) const EXPECTED: &str = "an object with one store, such as {\"shared_data\": {}}";

/// What one record takes at least: an index entry of 112 bytes, as much room again so that the table doesn't refuse
/// early, and some for its response.
const INDEX_BYTES_PER_RECORD: u64 = 320;

const MAX_RECORDS: u64 = 131_072;
const MAX_BYTES: u64 = 128 * 1024 * 1024;
const MIN_BYTES: u64 = 1024 * 1024;

pub(super) fn read_store(json: &Json, path: &str, problems: &mut Problems) -> Option<StoreConfig> {
    let mut object = Object::begin(json, path, EXPECTED, problems)?;
    let shared_data = object.nested("shared_data", problems, read_shared_data);
    let redis = object.refuse("redis", "not available yet, expected shared_data", problems);
    object.finish(problems);
    if shared_data.is_absent() && !redis {
        problems.refuse(path, got(json, EXPECTED));
    }
    shared_data.given().map(StoreConfig::SharedData)
}

fn read_shared_data(json: &Json, path: &str, problems: &mut Problems) -> Option<SharedDataConfig> {
    let expected = "an object with any of: namespace, max_records, max_bytes, when_full";
    let mut object = Object::begin(json, path, expected, problems)?;
    let namespace = object.field("namespace", problems, name);
    let max_records = object.field("max_records", problems, integer(1, 16_777_216));
    let max_bytes = object.field("max_bytes", problems, integer(MIN_BYTES, 64 * 1024 * 1024 * 1024));
    let when_full = object.field(
        "when_full",
        problems,
        choice(&[("reject", Some(WhenFull::Reject)), ("evict_completed", Some(WhenFull::EvictCompleted))]),
    );
    object.finish(problems);

    let records = max_records.known_or(&MAX_RECORDS);
    let bytes = max_bytes.known_or(&MAX_BYTES);
    if let (Some((records, records_at)), Some((bytes, bytes_at))) = (records, bytes) {
        let needed = records.saturating_mul(INDEX_BYTES_PER_RECORD);
        if *bytes < needed {
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
    }
    Some(SharedDataConfig {
        namespace: namespace.given(),
        max_records: u32::try_from(max_records.given_or(MAX_RECORDS)).unwrap_or(u32::MAX),
        max_bytes: max_bytes.given_or(MAX_BYTES),
        when_full: when_full.given_or(WhenFull::Reject),
    })
}
