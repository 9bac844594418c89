//! Changes of a record, each one script over one key: it compares, and writes in the same step.

use std::time::Duration;

use redis::Value;

use super::link::{Node, describe};
use super::record::Found;
use crate::exit::Failure;

macro_rules! script {
    ($file:literal) => {
        concat!(
            include_str!("../../../store/redis/scripts/record.lua"),
            include_str!("scripts/fence.lua"),
            include_str!(concat!("scripts/", $file))
        )
    };
}

const FORGET: &str = script!("forget.lua");
const RESOLVE: &str = script!("resolve.lua");

/// What becomes of a record.
pub enum Change<'a> {
    /// It is deleted.
    Forget {
        /// Even while somebody's lease holds.
        force: bool,
    },
    /// It is completed.
    Complete { owner: [u8; 16], record_ttl: Duration, response: &'a [u8] },
}

/// Makes `change` of the record that was shown, or of none.
pub fn apply(node: &mut Node, found: &Found, change: &Change<'_>) -> Result<(), Failure> {
    let (script, lease) = match change {
        Change::Forget { force: true } => (FORGET, "any_lease"),
        Change::Forget { force: false } => (FORGET, "lease_over"),
        Change::Complete { .. } => (RESOLVE, "lease_over"),
    };
    let mut command = redis::cmd("EVAL");
    command.arg(script).arg(1).arg(&found.redis_key);
    command.arg(found.state.stored()).arg(&found.owner).arg(found.attempt).arg(lease);
    if let Change::Complete { owner, record_ttl, response } = change {
        let millis = u64::try_from(record_ttl.as_millis()).unwrap_or(u64::MAX);
        command.arg(idempotency::key::hex(owner)).arg(millis).arg(*response).arg(found.state.words());
    }
    let answer: Value = node.query(&command).map_err(|failure| Failure {
        message: format!("{failure}; the change may have been made: inspect the record again"),
        ..failure
    })?;
    match word(&answer) {
        Some(b"applied") => Ok(()),
        Some(b"changed") => Err(Failure::changed(
            "changed meanwhile: the record is no longer the one that was shown. Nothing was changed",
        )),
        Some(b"gone") => Err(Failure::changed("changed meanwhile: the record is gone. Nothing was changed")),
        Some(b"alive") => Err(Failure::changed(
            "changed meanwhile: its lease was renewed, the request is executing. Nothing was changed",
        )),
        Some(b"unreadable") => {
            Err(Failure::changed("changed meanwhile: the record is unreadable. Nothing was changed"))
        }
        Some(_) | None => Err(Failure::store(format!("{}: {}", node.name(), describe(&answer)))),
    }
}

fn word(answer: &Value) -> Option<&[u8]> {
    let Value::Array(values) = answer else { return None };
    let [Value::BulkString(word)] = values.as_slice() else { return None };
    Some(word)
}
